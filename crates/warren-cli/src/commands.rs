//! The clients of the daemon: tables for people, the API's own objects for programs.

use std::io::{IsTerminal as _, Read as _, Write as _};

use hyper::Method;
use serde::Serialize;
use serde_json::Value;
use warren_api::rest::wire::{
    AcquiredView, AttachBody, BindMountBody, CreateSandboxBody, DefaultBody, DefaultView, ExecBody,
    ExecView, LimitsBody, Page, QuotaListView, QuotaView, ReceiptView, SandboxView, SelectBody,
    SessionView, StatsView,
};
use warren_api::{EventView, KEY_HEADER};

use crate::args::{
    AttachArgs, ClientArgs, CreateArgs, DefaultArgs, EventsArgs, KillArgs, LsArgs, SuspendArgs,
    TargetArgs,
};
use crate::client::Client;
use crate::failure::Failure;
use crate::output::{self, say};
use crate::program::Caller;
use crate::request::absolute;
use crate::units::{Bytes, Cap};

/// The body has room for this much and its base64.
const MAX_STDIN: u64 = 512 << 10;
/// How much of an id is shown where that is enough.
const SHORT: usize = 12;

pub(crate) fn printed(result: std::io::Result<()>) -> Result<u8, Failure> {
    result.map(|()| 0).map_err(|error| Failure::system("cannot write to stdout", &error))
}

pub(crate) fn show_object(value: &impl Serialize) -> Result<u8, Failure> {
    printed(output::print_json(value))
}

/// `warren create`.
pub(crate) fn create(args: &CreateArgs) -> Result<u8, Failure> {
    let (caller, spec) = (Caller::new(), &args.spec);
    let path = |path: &std::path::PathBuf| Ok(absolute(&caller, path)?.display().to_string());
    let paths =
        |paths: &[std::path::PathBuf]| paths.iter().map(path).collect::<Result<_, Failure>>();
    let binds = spec.bind.iter().map(|bind| {
        let (source, target) = (path(&bind.source)?, bind.target.display().to_string());
        Ok(BindMountBody { source, target, readonly: bind.readonly })
    });
    let body = CreateSandboxBody {
        name: args.name.clone(),
        template: args.template.clone(),
        profile: Some(spec.profile.clone()),
        workdir: spec.workdir.as_ref().map(|path| path.display().to_string()),
        allowed_paths_ro: paths(&spec.ro)?,
        allowed_paths_rw: paths(&spec.rw)?,
        bind_mounts: binds.collect::<Result<_, Failure>>()?,
        allowed_network: spec.net.allow_net.clone(),
        network_enabled: spec.net.network,
        environment: spec.env.iter().cloned().collect(),
        limits: LimitsBody {
            max_memory_bytes: spec.memory.map(Cap::bound),
            max_cpu_time_ms: spec.cpu_time.map(Cap::bound),
            max_wall_time_ms: spec.timeout.map(Cap::bound),
            max_processes: spec.pids.map(Cap::bound),
            max_open_files: spec.open_files.map(Cap::bound),
            max_output_bytes: spec.max_output.map(Cap::bound),
            max_write_bytes: spec.disk.map(Cap::bound),
            cpu_weight: spec.cpu_weight.map(Cap::bound),
        },
        seccomp_profile: spec.seccomp.clone(),
        labels: args.label.iter().cloned().collect(),
        isolation: spec.isolation.map(|level| level.to_string()),
        require: spec.require.iter().map(ToString::to_string).collect(),
        select: SelectBody {
            require_fresh: args.fresh,
            backend: args.backend.clone(),
            use_pool: args.pool,
            ..SelectBody::default()
        },
        verify: args.verify,
        explain: args.explain,
        ..CreateSandboxBody::default()
    };
    let client = Client::new(&args.client)?;
    let key = args.idempotency_key.as_deref().map(|key| (KEY_HEADER, key));
    let made: Value = client.send(Method::POST, "/v1/sandboxes", &body, key.as_slice())?;
    if args.client.json {
        return show_object(&made);
    }
    let made: AcquiredView = read(made)?;
    printed(output::print(format!("{}\n", made.sandbox.id).as_bytes()))
}

pub(crate) fn read<T: serde::de::DeserializeOwned>(value: Value) -> Result<T, Failure> {
    serde_json::from_value(value).map_err(|error| {
        Failure::fatal("daemon", format!("the daemon answered nonsense: {error}"))
            .with_hint("is it of another version?")
    })
}

/// Fetches all sandboxes, page by page, as they were sent.
fn all(client: &Client, query: &str) -> Result<Vec<Value>, Failure> {
    let (mut items, mut after) = (Vec::new(), String::new());
    loop {
        let page: Page<Value> = client.get(&format!("/v1/sandboxes?limit=1000{query}{after}"))?;
        items.extend(page.items);
        match page.next {
            Some(next) => after = format!("&after={}", escaped(&next)),
            None => return Ok(items),
        }
    }
}

/// Escapes what has a meaning in a query.
pub(crate) fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let escape = |byte| if plain(byte) { char::from(byte).into() } else { format!("%{byte:02X}") };
    text.bytes().map(escape).collect()
}

/// `warren ls`.
pub(crate) fn ls(args: &LsArgs) -> Result<u8, Failure> {
    let (mut query, mut own) = (String::new(), Vec::new());
    for (key, value) in &args.filters {
        match key.as_str() {
            "state" => query.push_str(&format!("&state={}", escaped(value))),
            "name" => query.push_str(&format!("&label={}", escaped(&format!("name={value}")))),
            "label" => query.push_str(&format!("&label={}", escaped(value))),
            "profile" | "backend" => own.push((key.as_str(), value)),
            _ => {
                let hint = "filter by state, name, profile, backend or label=KEY=VALUE";
                return Err(Failure::usage(format!("there is no filter `{key}`"), hint));
            }
        }
    }
    let client = Client::new(&args.client)?;
    let mut items = all(&client, &query)?;
    items.retain(|item| own.iter().all(|(key, value)| item[key] == value.as_str()));
    if args.client.json {
        items.iter().try_for_each(|item| show_object(item).map(|_| ()))?;
        return Ok(0);
    }
    let items: Vec<SandboxView> = items.into_iter().map(read).collect::<Result<_, _>>()?;
    if args.quiet {
        let ids: String = items.iter().map(|item| format!("{}\n", item.id)).collect();
        return printed(output::print(ids.as_bytes()));
    }
    let now = chrono_now();
    let rows = items.iter().map(|item| {
        let memory = item.limits.max_memory_bytes.map(|bytes| Bytes(bytes).to_string());
        vec![
            short(&item.id, &items),
            item.name.clone().unwrap_or_else(|| "-".to_owned()),
            item.state.name().to_owned(),
            item.profile.clone(),
            item.backend.clone(),
            age(now, item.created_at.timestamp()),
            memory.unwrap_or_else(|| "-".to_owned()),
            item.sessions.len().to_string(),
        ]
    });
    let head = ["ID", "NAME", "STATE", "PROFILE", "BACKEND", "AGE", "MEMORY", "SESSIONS"];
    printed(output::print(output::table(&head, rows.collect()).as_bytes()))
}

pub(crate) fn chrono_now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

pub(crate) fn age(now: i64, then: i64) -> String {
    match now.saturating_sub(then).max(0) {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds @ 60..3_600 => format!("{}m", seconds / 60),
        seconds @ 3_600..86_400 => format!("{}h", seconds / 3_600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// Shortens an id as far as it still means this sandbox alone.
fn short(id: &str, among: &[SandboxView]) -> String {
    let Some(short) = id.get(..SHORT) else { return id.to_owned() };
    let same = among.iter().filter(|other| other.id.starts_with(short)).count();
    if same == 1 { short.to_owned() } else { id.to_owned() }
}

/// Finds the one sandbox that is meant: by id, by name, by its session, or by the beginning of one.
pub(crate) fn find(client: &Client, target: &str) -> Result<SandboxView, Failure> {
    let items = all(client, "")?;
    let items: Vec<SandboxView> = items.into_iter().map(read).collect::<Result<_, _>>()?;
    choose(&items, target).cloned()
}

fn choose<'a>(items: &'a [SandboxView], target: &str) -> Result<&'a SandboxView, Failure> {
    let has_session =
        |item: &SandboxView, is: &dyn Fn(&str) -> bool| item.sessions.iter().any(|s| is(&s.id));
    let exact = |item: &&SandboxView| {
        item.id == target
            || item.name.as_deref() == Some(target)
            || has_session(item, &|id| id == target)
    };
    let begins = |item: &&SandboxView| {
        let bare = item.id.strip_prefix("sbx-").unwrap_or(&item.id);
        !target.is_empty()
            && (item.id.starts_with(target)
                || bare.starts_with(target)
                || item.name.as_ref().is_some_and(|name| name.starts_with(target))
                || has_session(item, &|id| id.starts_with(target)))
    };
    let found: Vec<&SandboxView> = items.iter().filter(exact).collect();
    // An id wins over the name of another.
    if let Some(item) = found.iter().find(|item| item.id == target) {
        return Ok(item);
    }
    let found = if found.is_empty() { items.iter().filter(begins).collect() } else { found };
    match found[..] {
        [item] => Ok(item),
        [] => Err(Failure::fatal("not_found", format!("no sandbox `{target}`"))
            .with_hint("`warren ls` lists the running ones")),
        _ => {
            let name = |item: &&SandboxView| match &item.name {
                Some(name) => format!("{} ({name})", item.id),
                None => item.id.clone(),
            };
            let candidates: Vec<String> = found.iter().map(name).collect();
            let message = format!("`{target}` could be {}", candidates.join(", "));
            Err(Failure::fatal("ambiguous", message).with_hint("write more of the id"))
        }
    }
}

/// Finds the one session that is meant.
fn find_session(client: &Client, target: &str) -> Result<SessionView, Failure> {
    let sandbox = find(client, target)?;
    let named = sandbox.sessions.iter().find(|session| session.id.starts_with(target));
    match (named, &sandbox.sessions[..]) {
        (Some(session), _) | (None, [session]) => Ok(session.clone()),
        (None, sessions) => {
            let ids: Vec<&str> = sessions.iter().map(|session| session.id.as_str()).collect();
            let message = format!("`{target}` has several sessions: {}", ids.join(", "));
            Err(Failure::fatal("ambiguous", message).with_hint("name one of the sessions"))
        }
    }
}

/// `warren show`.
pub(crate) fn show(args: &TargetArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let id = find(&client, &args.sandbox)?.id;
    let detail: Value = client.get(&format!("/v1/sandboxes/{id}"))?;
    if args.client.json {
        return show_object(&detail);
    }
    let (mut detail, mut rows) = (detail, Vec::new());
    let receipt = detail.as_object_mut().and_then(|fields| fields.remove("receipt"));
    flatten("", &detail, &mut rows);
    // In short: `warren receipt show` has every attempt.
    if let Ok(Some(ReceiptView { receipt, .. })) =
        serde_json::from_value(receipt.unwrap_or_default())
    {
        let at = receipt.tried_at.format("%Y-%m-%d %H:%M:%S UTC");
        rows.push(vec![
            "receipt".to_owned(),
            format!("{}, {} on {at}", receipt.verdict, receipt.extent),
        ]);
        rows.extend(receipt.layers.iter().map(|layer| {
            vec![format!("receipt.{}", layer.layer), crate::receipts::in_short(layer)]
        }));
    }
    printed(output::print(output::table(&["FIELD", "VALUE"], rows).as_bytes()))
}

/// Lays an object out as names and values.
fn flatten(prefix: &str, value: &Value, rows: &mut Vec<Vec<String>>) {
    let join = |key: &str| {
        if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") }
    };
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| flatten(&join(key), value, rows));
        }
        Value::Array(items) if items.iter().any(|item| item.is_object() || item.is_array()) => {
            let numbered = items.iter().enumerate();
            numbered.for_each(|(i, item)| flatten(&format!("{prefix}[{i}]"), item, rows));
        }
        Value::Array(items) => {
            let text = |item: &Value| item.as_str().map_or_else(|| item.to_string(), str::to_owned);
            let joined: Vec<String> = items.iter().map(text).collect();
            rows.push(vec![prefix.to_owned(), joined.join(", ")]);
        }
        Value::String(text) => rows.push(vec![prefix.to_owned(), text.clone()]),
        Value::Null => rows.push(vec![prefix.to_owned(), "-".to_owned()]),
        Value::Bool(_) | Value::Number(_) => rows.push(vec![prefix.to_owned(), value.to_string()]),
    }
}

/// `warren exec`, with all of the output at the end.
pub(crate) fn exec_whole(
    client: &Client,
    sandbox: Option<&str>,
    body: ExecBody,
    with_stdin: bool,
    json: bool,
) -> Result<u8, Failure> {
    let path = match sandbox {
        Some(target) => format!("/v1/sandboxes/{}/exec", find(client, target)?.id),
        None => "/v1/default/exec".to_owned(),
    };
    exec_at(client, &path, body, with_stdin, json)
}

/// Runs a command at a place of the API, and shows what it gave.
pub(crate) fn exec_at(
    client: &Client,
    path: &str,
    mut body: ExecBody,
    with_stdin: bool,
    json: bool,
) -> Result<u8, Failure> {
    if with_stdin {
        body.set_stdin(stdin()?);
    }
    let ran: Value = client.send(Method::POST, path, &body, &[])?;
    let shown: ExecView = read(ran.clone())?;
    let code = u8::try_from(shown.exit_code & 0xff).unwrap_or(125);
    if json {
        show_object(&ran)?;
        return Ok(code);
    }
    let (stdout, stderr) = shown.bytes();
    printed(output::print(&stdout))?;
    // Nobody reads it any more if this fails.
    let _ = std::io::stderr().write_all(&stderr);
    output::say_end(&shown.cause, &shown.denials);
    Ok(code)
}

pub(crate) fn stdin() -> Result<Vec<u8>, Failure> {
    if std::io::stdin().is_terminal() {
        let hint = "pipe something in, or leave --stdin out";
        return Err(Failure::usage("stdin is a terminal", hint));
    }
    let mut bytes = Vec::new();
    let read = std::io::stdin().lock().take(MAX_STDIN + 1).read_to_end(&mut bytes);
    read.map_err(|error| Failure::system("cannot read stdin", &error))?;
    if bytes.len() as u64 > MAX_STDIN {
        let hint = "pass it through a file of the sandbox";
        return Err(Failure::usage(format!("stdin is larger than {}", Bytes(MAX_STDIN)), hint));
    }
    Ok(bytes)
}

/// `warren attach`.
pub(crate) fn attach(args: &AttachArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let id = match find(&client, &args.sandbox) {
        Ok(sandbox) => sandbox.id,
        Err(failure) if args.create && failure.is_not_found() => args.sandbox.clone(),
        Err(failure) => return Err(failure),
    };
    if let Some(exec) = &args.exec {
        return crate::execs::attach(&client, &id, exec, args.client.json);
    }
    let body = AttachBody { create_if_missing: args.create, create: None };
    if id.contains(['/', '%', '?', '#']) {
        let hint = "an id has letters, digits, `-`, `_` and `.`";
        return Err(Failure::usage(format!("`{id}` is no id"), hint));
    }
    let joined: Value =
        client.send(Method::POST, &format!("/v1/sandboxes/{id}/attach"), &body, &[])?;
    if args.client.json {
        return show_object(&joined);
    }
    let joined: AcquiredView = read(joined)?;
    printed(output::print(format!("{}\n", joined.session.id).as_bytes()))
}

/// `warren suspend`.
pub(crate) fn suspend(args: &SuspendArgs) -> Result<u8, Failure> {
    change_to(&args.target, "suspend", &serde_json::json!({ "to_disk": args.to_disk }))
}

/// `warren detach` and `warren resume`.
pub(crate) fn change(args: &TargetArgs, verb: &str) -> Result<u8, Failure> {
    change_to(args, verb, &serde_json::json!({}))
}

fn change_to(args: &TargetArgs, verb: &str, body: &Value) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let id = find_session(&client, &args.sandbox)?.id;
    let path = format!("/v1/sessions/{id}/{verb}");
    let changed: Value = client.send(Method::POST, &path, body, &[])?;
    if args.client.json {
        return show_object(&changed);
    }
    Ok(0)
}

/// `warren kill`.
pub(crate) fn kill(args: &KillArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    // All are found before any is ended: a slip in the last name ends nothing.
    let found = args.sandboxes.iter().map(|target| find(&client, target).map(|one| one.id));
    for id in found.collect::<Result<Vec<_>, _>>()? {
        client.delete(&format!("/v1/sandboxes/{id}"))?;
        if args.client.json {
            show_object(&serde_json::json!({ "id": id }))?;
        }
    }
    Ok(0)
}

/// `warren default`.
pub(crate) fn default(args: &DefaultArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let shown: DefaultView = match &args.sandbox {
        _ if args.unset => {
            client.delete("/v1/default")?;
            DefaultView { sandbox_id: None }
        }
        Some(target) => {
            let body = DefaultBody { sandbox_id: find(&client, target)?.id };
            client.send(Method::PUT, "/v1/default", &body, &[])?
        }
        None => client.get("/v1/default")?,
    };
    match shown.sandbox_id {
        _ if args.client.json => show_object(&shown),
        Some(id) if !args.unset => printed(output::print(format!("{id}\n").as_bytes())),
        None if args.sandbox.is_none() && !args.unset => {
            Err(Failure::fatal("no_default", "there is no default sandbox")
                .with_hint("set one: warren default SANDBOX"))
        }
        Some(_) | None => Ok(0),
    }
}

/// `warren stats`.
pub(crate) fn stats(args: &ClientArgs) -> Result<u8, Failure> {
    let client = Client::new(args)?;
    let stats: Value = client.get("/v1/stats")?;
    if args.json {
        return show_object(&stats);
    }
    let stats: StatsView = read(stats)?;
    let mut rows = vec![
        vec!["sandboxes".to_owned(), stats.active_sandboxes.to_string()],
        vec!["active sessions".to_owned(), stats.active_sessions.to_string()],
        vec!["detached sessions".to_owned(), stats.detached_sessions.to_string()],
        vec!["suspended sessions".to_owned(), stats.suspended_sessions.to_string()],
    ];
    if let Some(manager) = stats.manager {
        rows.extend([
            vec!["made since the start".to_owned(), manager.sandboxes_created.to_string()],
            vec!["warm".to_owned(), manager.pool_size.to_string()],
            vec!["served warm".to_owned(), format!("{:.0} %", manager.pool_hit_rate * 100.0)],
            vec!["time to make one".to_owned(), format!("{:.1} ms", manager.avg_creation_time_ms)],
            vec!["timed out".to_owned(), manager.timeout_destroys.to_string()],
        ]);
    }
    printed(output::print(output::table(&["WHAT", "NOW"], rows).as_bytes()))
}

/// `warren quota`.
pub(crate) fn quota(args: &ClientArgs) -> Result<u8, Failure> {
    let client = Client::new(args)?;
    let quotas: Value = client.get("/v1/quotas")?;
    if args.json {
        return show_object(&quotas);
    }
    let quotas: QuotaListView = read(quotas)?;
    let count = |number: u64| number.to_string();
    let size = |number: u64| Bytes(number).to_string();
    let mut rows = Vec::new();
    for QuotaView { tenant, used, quotas } in quotas.items {
        let mut row = |what: &str, used: String, limit: Option<String>| {
            let limit = limit.unwrap_or_else(|| "-".to_owned());
            rows.push(vec![tenant.clone(), what.to_owned(), used, limit]);
        };
        row("sandboxes", count(used.sandboxes), quotas.sandboxes.map(count));
        row("memory", size(used.memory_bytes), quotas.memory_bytes.map(size));
        row("cpu weight", count(used.cpu_weight), quotas.cpu_weight.map(count));
        row("disk", size(used.disk_bytes), quotas.disk_bytes.map(size));
        row("snapshots", count(used.snapshots), quotas.snapshots.map(count));
        row("commands", count(used.execs), quotas.execs.map(count));
        row("streams", count(used.streams), quotas.streams.map(count));
        row("requests at once", count(used.requests), None);
        row("requests a second", "-".to_owned(), quotas.requests_per_second.map(count));
    }
    printed(output::print(output::table(&["TENANT", "WHAT", "USED", "LIMIT"], rows).as_bytes()))
}

/// `warren events`.
pub(crate) fn events(args: &EventsArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let since = args.since.as_deref().map(|id| ("last-event-id", id));
    client.follow("/v1/events", since.as_slice(), |kind, data| {
        if kind == "gap" {
            say("warning: some events are lost; `warren ls` shows what there is now");
            return Ok(());
        }
        if args.client.json {
            return printed(output::print(format!("{data}\n").as_bytes())).map(|_| ());
        }
        let event: EventView = read(serde_json::from_str(data).unwrap_or_default())?;
        let row = [
            event.at.format("%H:%M:%S").to_string(),
            format!("{kind:17}"),
            event.sandbox_id,
            event.session_id.unwrap_or_else(|| "-".to_owned()),
            event.client,
        ];
        printed(output::print(format!("{}\n", row.join("  ")).as_bytes())).map(|_| ())
    })?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str, name: Option<&str>) -> SandboxView {
        let value = serde_json::json!({
            "id": id, "name": name, "state": "active", "backend": "fake", "profile": "default",
            "labels": {}, "created_at": "2026-01-01T00:00:00Z", "has_network": false,
            "limits": {}, "sessions": [{
                "id": format!("sess-{id}"), "sandbox_id": id, "tenant": "uid:0", "client": "default",
                "state": "active", "created_at": "2026-01-01T00:00:00Z",
                "last_active_at": "2026-01-01T00:00:00Z", "idle_timeout_ms": 1,
                "detach_timeout_ms": 1, "suspend_timeout_ms": 1, "metadata": {},
            }],
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_sandbox_is_found_by_id_name_session_or_a_beginning_that_is_its_alone() {
        let items = [
            sandbox("sbx-aa11", Some("web")),
            sandbox("sbx-aa22", Some("worker")),
            sandbox("sbx-bb33", Some("sbx-aa11")),
            sandbox("own", None),
        ];
        for (target, found) in [
            ("sbx-aa11", Ok("sbx-aa11")),
            ("web", Ok("sbx-aa11")),
            ("we", Ok("sbx-aa11")),
            ("aa2", Ok("sbx-aa22")),
            ("sbx-b", Ok("sbx-bb33")),
            ("sess-sbx-bb33", Ok("sbx-bb33")),
            ("own", Ok("own")),
            ("aa", Err("ambiguous")),
            ("w", Err("ambiguous")),
            ("nope", Err("not_found")),
            ("", Err("not_found")),
        ] {
            let chosen = choose(&items, target).map(|item| item.id.as_str());
            match (chosen, found) {
                (Ok(id), Ok(expected)) => assert_eq!(id, expected, "{target}"),
                (Err(failure), Err(code)) => {
                    assert!(format!("{failure:?}").contains(code), "{target}: {failure:?}");
                }
                (chosen, _) => panic!("{target}: {chosen:?}"),
            }
        }
        let failure = choose(&items, "aa").unwrap_err();
        assert!(format!("{failure:?}").contains("sbx-aa11 (web), sbx-aa22 (worker)"));
    }

    #[test]
    fn what_has_a_meaning_in_a_query_is_escaped() {
        assert_eq!(escaped("a=b&c d+ü"), "a%3Db%26c%20d%2B%C3%BC");
    }
}
