//! `warren snapshot`, `fork`, `restore`, `undo` and `diff`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::Value;
use warren_api::KEY_HEADER;
use warren_api::rest::snapshots::{
    ChangeView, DiffEntryView, DiffView, ForkBody, ForkView, RestoreBody, SnapshotBody,
    SnapshotView,
};
use warren_api::rest::wire::Page;

use crate::args::{ClientArgs, TargetArgs};
use crate::client::Client;
use crate::commands::{age, chrono_now, find, printed, read, show_object};
use crate::failure::Failure;
use crate::files::{Progress, pour};
use crate::output;
use crate::units::{self, Bytes, Cap};

/// What to do with snapshots.
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotAction {
    /// Save a sandbox and print the id of the snapshot; the sandbox stands still for a moment.
    Create(SnapshotCreateArgs),
    /// List the snapshots.
    Ls(SnapshotLsArgs),
    /// Show a snapshot with all that is known of it.
    Show(SnapshotShowArgs),
    /// Write a snapshot to one file, with digests of all that it holds; `-` is stdout.
    Export(SnapshotExportArgs),
    /// Read a snapshot from a file that was exported, and print its id; `-` is stdin.
    Import(SnapshotImportArgs),
    /// Forget snapshots; what sandboxes and other snapshots stand on stays.
    Rm(SnapshotRmArgs),
}

impl SnapshotAction {
    pub(crate) fn is_json(&self) -> bool {
        match self {
            Self::Create(args) => args.client.json,
            Self::Ls(args) => args.client.json,
            Self::Show(args) => args.client.json,
            Self::Rm(args) => args.client.json,
            Self::Export(args) => args.client.json,
            Self::Import(args) => args.client.json,
        }
    }
}

/// What a snapshot shall be.
#[derive(Debug, Args)]
pub(crate) struct SnapshotCreateArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Note something with it.
    #[arg(long, value_name = "KEY=VALUE", value_parser = units::variable)]
    pub(crate) label: Vec<(String, String)>,
    /// Forget it after this time.
    #[arg(long, value_name = "TIME", value_parser = units::time)]
    pub(crate) keep_for: Option<Cap<u64>>,
    /// Make it a place that `warren undo` goes back to.
    #[arg(long)]
    pub(crate) savepoint: bool,
    /// Have a repeated call find the same snapshot.
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
    /// Name or id of the sandbox or its session, or the beginning of one.
    pub(crate) sandbox: String,
    /// What it shall be called.
    pub(crate) name: Option<String>,
}

/// Which snapshots to list.
#[derive(Debug, Args)]
pub(crate) struct SnapshotLsArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Print ids alone.
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Only those with this label.
    #[arg(long, value_name = "KEY=VALUE", value_parser = units::variable)]
    pub(crate) label: Vec<(String, String)>,
}

/// Which snapshot to show.
#[derive(Debug, Args)]
pub(crate) struct SnapshotShowArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Name or id of the snapshot, or the beginning of its id.
    pub(crate) snapshot: String,
}

/// Which snapshots to forget.
#[derive(Debug, Args)]
pub(crate) struct SnapshotRmArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Names or ids of the snapshots, or beginnings of ids.
    #[arg(required = true, value_name = "SNAPSHOT")]
    pub(crate) snapshots: Vec<String>,
}

/// What to write, and where to.
#[derive(Debug, Args)]
pub(crate) struct SnapshotExportArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Name or id of the snapshot, or the beginning of its id.
    pub(crate) snapshot: String,
    /// The file.
    pub(crate) file: PathBuf,
}

/// What to read.
#[derive(Debug, Args)]
pub(crate) struct SnapshotImportArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// What it shall be called, if not as it was.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// The file.
    pub(crate) file: PathBuf,
}

/// What to fork.
#[derive(Debug, Args)]
pub(crate) struct ForkArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// How many sandboxes to make.
    #[arg(long, short = 'n', value_name = "NUMBER", default_value_t = 1)]
    pub(crate) count: u32,
    /// Be content with fewer.
    #[arg(long)]
    pub(crate) partial: bool,
    /// Labels of each, instead of those of the origin.
    #[arg(long, value_name = "KEY=VALUE", value_parser = units::variable)]
    pub(crate) label: Vec<(String, String)>,
    /// TARGET is the name of a snapshot.
    #[arg(long)]
    pub(crate) snapshot: bool,
    /// Have a repeated call find the same sandboxes.
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
    /// A sandbox, or a snapshot by its id.
    pub(crate) target: String,
}

/// What to go back to.
#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Name or id of the sandbox or its session, or the beginning of one.
    pub(crate) sandbox: String,
    /// Name or id of the snapshot, or the beginning of its id.
    pub(crate) snapshot: String,
}

/// What to compare.
#[derive(Debug, Args)]
pub(crate) struct DiffArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Compare with this snapshot, and not with what the sandbox was made from.
    #[arg(long, value_name = "SNAPSHOT")]
    pub(crate) since: Option<String>,
    /// Show how texts differ.
    #[arg(long, short)]
    pub(crate) patch: bool,
    /// Name or id of the sandbox or its session, or the beginning of one.
    pub(crate) sandbox: String,
    /// Only these paths and what is below them.
    pub(crate) paths: Vec<PathBuf>,
}

/// `warren snapshot`.
pub(crate) fn snapshot(action: &SnapshotAction) -> Result<u8, Failure> {
    match action {
        SnapshotAction::Create(args) => create(args),
        SnapshotAction::Ls(args) => ls(args),
        SnapshotAction::Export(args) => export(args),
        SnapshotAction::Import(args) => import(args),
        SnapshotAction::Show(args) => {
            let client = Client::new(&args.client)?;
            let found = find_snapshot(&client, &args.snapshot)?;
            show_snapshot(&found, args.client.json)
        }
        SnapshotAction::Rm(args) => {
            let client = Client::new(&args.client)?;
            // All are found before any is gone.
            let find = |name: &String| find_snapshot(&client, name);
            let found = args.snapshots.iter().map(find).collect::<Result<Vec<_>, _>>()?;
            for snapshot in found {
                client.delete(&format!("/v1/snapshots/{}", snapshot.id))?;
            }
            Ok(0)
        }
    }
}

fn create(args: &SnapshotCreateArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let id = find(&client, &args.sandbox)?.id;
    let body = SnapshotBody {
        name: args.name.clone(),
        labels: args.label.iter().cloned().collect(),
        keep_seconds: args.keep_for.and_then(Cap::bound).map(|millis| millis.div_ceil(1000)),
        savepoint: args.savepoint,
    };
    let key = args.idempotency_key.as_deref().map(|key| (KEY_HEADER, key));
    let path = format!("/v1/sandboxes/{id}/snapshots");
    let made: Value = client.send(Method::POST, &path, &body, key.as_slice())?;
    if args.client.json {
        return show_object(&made);
    }
    let made: SnapshotView = read(made)?;
    printed(output::print(format!("{}\n", made.id).as_bytes()))
}

fn export(args: &SnapshotExportArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let url = format!("/v1/snapshots/{}/export", find_snapshot(&client, &args.snapshot)?.id);
    let broken = |error: &io::Error| {
        Failure::system(&format!("cannot write {}", args.file.display()), error)
    };
    if args.file.as_os_str() == "-" {
        let mut out = io::stdout().lock();
        client.download(
            &url,
            |_| (),
            |piece| out.write_all(&piece).map_err(|error| broken(&error)),
        )?;
        return out.flush().map(|()| 0).map_err(|error| broken(&error));
    }
    // Whole or not at all, under its name.
    let draft = args.file.with_file_name(format!(".warren-{}", std::process::id()));
    let mut file = File::create_new(&draft).map_err(|error| broken(&error))?;
    let write = |piece: hyper::body::Bytes| file.write_all(&piece).map_err(|error| broken(&error));
    let done = client.download(&url, |_| (), write);
    let done =
        done.and_then(|()| std::fs::rename(&draft, &args.file).map_err(|error| broken(&error)));
    if done.is_err() {
        let _ = std::fs::remove_file(&draft);
    }
    done.map(|()| 0)
}

fn import(args: &SnapshotImportArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let name = args.name.as_deref().map(|name| format!("?name={}", crate::commands::escaped(name)));
    let url = format!("/v1/snapshots{}", name.unwrap_or_default());
    let bar = Progress::hidden();
    let kind = Some("application/zstd");
    let made: Value = if args.file.as_os_str() == "-" {
        client.upload(Method::POST, &url, kind, |out| pour(io::stdin(), out, &bar))?
    } else {
        let file = File::open(&args.file).map_err(|error| {
            Failure::system(&format!("cannot read {}", args.file.display()), &error)
        })?;
        client.upload(Method::POST, &url, kind, |out| pour(file, out, &bar))?
    };
    if args.client.json {
        return show_object(&made);
    }
    let made: SnapshotView = read(made)?;
    printed(output::print(format!("{}\n", made.id).as_bytes()))
}

fn all(client: &Client) -> Result<Vec<SnapshotView>, Failure> {
    let (mut items, mut after) = (Vec::new(), String::new());
    loop {
        let page: Page<SnapshotView> = client.get(&format!("/v1/snapshots?limit=1000{after}"))?;
        items.extend(page.items);
        match page.next {
            Some(next) => after = format!("&after={next}"),
            None => return Ok(items),
        }
    }
}

/// Finds the one snapshot that is meant: by name, by id, or by the beginning of one.
pub(crate) fn find_snapshot(client: &Client, target: &str) -> Result<SnapshotView, Failure> {
    let items = all(client)?;
    let exact = |item: &&SnapshotView| item.id == target || item.name.as_deref() == Some(target);
    let begins = |item: &&SnapshotView| {
        let bare = item.id.strip_prefix("snap-").unwrap_or(&item.id);
        target.len() >= 2 && (item.id.starts_with(target) || bare.starts_with(target))
    };
    let found: Vec<&SnapshotView> = items.iter().filter(exact).collect();
    let found = if found.is_empty() { items.iter().filter(begins).collect() } else { found };
    match found[..] {
        [item] => Ok(item.clone()),
        [] => Err(Failure::fatal("not_found", format!("no snapshot `{target}`"))
            .with_hint("`warren snapshot ls` lists them")),
        _ => {
            let ids: Vec<&str> = found.iter().map(|item| item.id.as_str()).collect();
            let message = format!("`{target}` could be {}", ids.join(", "));
            Err(Failure::fatal("ambiguous", message).with_hint("write more of the id"))
        }
    }
}

fn ls(args: &SnapshotLsArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let mut items = all(&client)?;
    items.retain(|item| args.label.iter().all(|(key, value)| item.labels.get(key) == Some(value)));
    if args.client.json {
        items.iter().try_for_each(|item| show_object(item).map(drop))?;
        return Ok(0);
    }
    if args.quiet {
        let ids: String = items.iter().map(|item| format!("{}\n", item.id)).collect();
        return printed(output::print(ids.as_bytes()));
    }
    let now = chrono_now();
    let rows = items.iter().map(|item| {
        let kind = if item.savepoint { "savepoint" } else { "-" };
        vec![
            item.id.clone(),
            item.name.clone().unwrap_or_else(|| kind.to_owned()),
            item.sandbox_id.clone(),
            age(now, item.created_at.timestamp()),
            Bytes(item.bytes).to_string(),
            Bytes(item.new_bytes).to_string(),
            item.entries.to_string(),
        ]
    });
    let head = ["ID", "NAME", "SANDBOX", "AGE", "SIZE", "NEW", "FILES"];
    printed(output::print(output::table(&head, rows.collect()).as_bytes()))
}

fn show_snapshot(snapshot: &SnapshotView, json: bool) -> Result<u8, Failure> {
    if json {
        return show_object(snapshot);
    }
    let labels = snapshot.labels.iter().map(|(key, value)| format!("{key}={value}"));
    let rows = [
        ("id", snapshot.id.clone()),
        ("name", snapshot.name.clone().unwrap_or_else(|| "-".to_owned())),
        ("sandbox", snapshot.sandbox_id.clone()),
        ("savepoint", snapshot.savepoint.to_string()),
        ("labels", labels.collect::<Vec<_>>().join(", ")),
        ("created", snapshot.created_at.to_rfc3339()),
        ("expires", snapshot.expires_at.map_or_else(|| "-".to_owned(), |at| at.to_rfc3339())),
        ("size", Bytes(snapshot.bytes).to_string()),
        ("new", Bytes(snapshot.new_bytes).to_string()),
        ("files", snapshot.entries.to_string()),
        ("layers", snapshot.layers.join(", ")),
    ];
    let rows = rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
    printed(output::print(output::table(&["FIELD", "VALUE"], rows).as_bytes()))
}

/// `warren fork`.
pub(crate) fn fork(args: &ForkArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let path = if args.snapshot || args.target.starts_with("snap-") {
        format!("/v1/snapshots/{}/fork", find_snapshot(&client, &args.target)?.id)
    } else {
        format!("/v1/sandboxes/{}/fork", find(&client, &args.target)?.id)
    };
    let labels = (!args.label.is_empty()).then(|| args.label.iter().cloned().collect());
    let body = ForkBody { count: args.count, partial: args.partial, labels };
    let key = args.idempotency_key.as_deref().map(|key| (KEY_HEADER, key));
    let made: Value = client.send(Method::POST, &path, &body, key.as_slice())?;
    if args.client.json {
        return show_object(&made);
    }
    let made: ForkView = read(made)?;
    let ids: String = made.items.iter().map(|item| format!("{}\n", item.sandbox.id)).collect();
    printed(output::print(ids.as_bytes()))
}

/// `warren restore`.
pub(crate) fn restore(args: &RestoreArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let id = find(&client, &args.sandbox)?.id;
    let snapshot = find_snapshot(&client, &args.snapshot)?.id;
    let path = format!("/v1/sandboxes/{id}/restore");
    let done: Value = client.send(Method::POST, &path, &RestoreBody { snapshot }, &[])?;
    if args.client.json { show_object(&done) } else { Ok(0) }
}

/// `warren undo`.
pub(crate) fn undo(args: &TargetArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let id = find(&client, &args.sandbox)?.id;
    let empty = BTreeMap::<String, String>::new();
    let done: Value =
        client.send(Method::POST, &format!("/v1/sandboxes/{id}/undo"), &empty, &[])?;
    if args.client.json {
        return show_object(&done);
    }
    Ok(0)
}

/// Saves a sandbox before a command, and returns the id of what was saved.
pub(crate) fn savepoint(client: &Client, sandbox: &str) -> Result<String, Failure> {
    let body = SnapshotBody { savepoint: true, ..SnapshotBody::default() };
    let path = format!("/v1/sandboxes/{sandbox}/snapshots");
    let made: SnapshotView = client.send(Method::POST, &path, &body, &[])?;
    Ok(made.id)
}

/// Fetches what is otherwise than a snapshot says.
pub(crate) fn changes(client: &Client, sandbox: &str, query: &str) -> Result<DiffView, Failure> {
    client.get(&format!("/v1/sandboxes/{sandbox}/diff?{query}"))
}

/// Lays differences out, one a line.
pub(crate) fn lines(diff: &DiffView) -> String {
    let line = |entry: &DiffEntryView| {
        let mark = match entry.change {
            ChangeView::Added => 'A',
            ChangeView::Changed => 'M',
            ChangeView::Removed => 'D',
        };
        let size = |side: &Option<warren_api::rest::snapshots::SideView>| {
            side.as_ref().filter(|side| side.kind == "file").map(|side| Bytes(side.size))
        };
        let slash = |side: &Option<warren_api::rest::snapshots::SideView>| {
            side.as_ref().is_some_and(|side| side.kind == "directory")
        };
        let tail = if slash(&entry.after) || slash(&entry.before) { "/" } else { "" };
        let sizes = match (size(&entry.before), size(&entry.after)) {
            (Some(before), Some(after)) => format!("  {before} -> {after}"),
            (Some(size), None) | (None, Some(size)) => format!("  {size}"),
            (None, None) => String::new(),
        };
        // A name may hold anything; one line stays one line.
        let path: String = entry
            .path
            .chars()
            .flat_map(|c| match c.is_control() {
                true => c.escape_default().collect::<Vec<_>>(),
                false => vec![c],
            })
            .collect();
        format!("{mark} {path}{tail}{sizes}\n")
    };
    let mut text: String = diff.items.iter().map(line).collect();
    if diff.truncated {
        text.push_str("... and more\n");
    }
    text
}

/// `warren diff`.
pub(crate) fn diff(args: &DiffArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let id = find(&client, &args.sandbox)?.id;
    let mut query = format!("patch={}", args.patch);
    if let Some(since) = &args.since {
        query.push_str(&format!("&since={}", find_snapshot(&client, since)?.id));
    }
    for path in &args.paths {
        let path = path.to_str().ok_or_else(|| {
            Failure::usage(
                format!("`{}` is not UTF-8", path.display()),
                "name its parent directory",
            )
        })?;
        query.push_str(&format!("&path={}", crate::commands::escaped(path)));
    }
    let found = changes(&client, &id, &query)?;
    if args.client.json {
        return show_object(&found);
    }
    if args.patch {
        let whole = |entry: &DiffEntryView| match &entry.patch {
            Some(patch) => patch.clone(),
            None => {
                let one = DiffView { items: vec![entry.clone()], truncated: false };
                format!("# {}", lines(&one))
            }
        };
        let text: String = found.items.iter().map(whole).collect();
        return printed(output::print(text.as_bytes()));
    }
    printed(output::print(lines(&found).as_bytes()))
}
