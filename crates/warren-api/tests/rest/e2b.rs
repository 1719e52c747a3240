//! E2B's dialect: who may see what, by every call there is.

use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use warren_api::e2b;
use warren_api::keys::Quotas;

use crate::support::{Answer, Daemon, tcp};

/// What one tenant has, or what nobody has.
#[derive(Clone)]
struct Things {
    sandbox: String,
    template: String,
    snapshot: String,
    build: String,
}

impl Things {
    fn nobodys() -> Self {
        Self {
            sandbox: "0".repeat(32),
            template: "nobodys".to_owned(),
            snapshot: format!("{}:default", "0".repeat(32)),
            build: "00000000-0000-4000-8000-000000000000".to_owned(),
        }
    }

    /// Puts these into a path, where they are percent-encoded, or into a body.
    fn fill(&self, text: &str, in_path: bool) -> String {
        let snapshot = match in_path {
            true => self.snapshot.replace(':', "%3A").replace('/', "%2F"),
            false => self.snapshot.clone(),
        };
        text.replace("{sandbox}", &self.sandbox)
            .replace("{template}", &self.template)
            .replace("{snapshot}", &snapshot)
            .replace("{build}", &self.build)
    }

    /// Takes the names out of an answer: they differ, nothing else may.
    fn forget(&self, mut answer: Answer) -> Answer {
        let mut text = String::from_utf8(answer.bytes.to_vec()).expect("UTF-8");
        for name in [&self.snapshot, &self.sandbox, &self.template, &self.build] {
            text = text.replace(name.as_str(), "NAME").replace(bare(name), "NAME");
        }
        answer.headers.retain(|(name, _)| name != "content-length");
        answer.bytes = text.into();
        answer
    }
}

/// Returns a name without its tag.
fn bare(name: &str) -> &str {
    name.split(':').next().unwrap_or(name)
}

/// Every call of the control plane with what it may name: the route, the path, a body that would be
/// taken, and what a stranger is told.
fn control() -> Vec<(&'static str, &'static str, &'static str, Value, u16)> {
    let none = || Value::Null;
    let lease = || json!({ "timeout": 60 });
    vec![
        ("POST", "/sandboxes", "/sandboxes", json!({ "templateID": "{template}" }), 404),
        ("POST", "/sandboxes", "/sandboxes", json!({ "templateID": "{snapshot}" }), 404),
        ("POST", "/v2/sandboxes", "/v2/sandboxes", json!({ "templateID": "{template}" }), 404),
        ("POST", "/v2/sandboxes", "/v2/sandboxes", json!({ "templateID": "{snapshot}" }), 404),
        ("GET", "/sandboxes", "/sandboxes", none(), 200),
        ("GET", "/v2/sandboxes", "/v2/sandboxes?template={template}", none(), 200),
        ("GET", "/v2/sandboxes", "/v2/sandboxes?state=running,paused", none(), 200),
        ("GET", "/sandboxes/metrics", "/sandboxes/metrics?sandbox_ids={sandbox}", none(), 200),
        ("GET", "/sandboxes/{id}", "/sandboxes/{sandbox}", none(), 404),
        ("DELETE", "/sandboxes/{id}", "/sandboxes/{sandbox}", none(), 404),
        ("POST", "/sandboxes/{id}/timeout", "/sandboxes/{sandbox}/timeout", lease(), 404),
        (
            "POST",
            "/sandboxes/{id}/refreshes",
            "/sandboxes/{sandbox}/refreshes",
            json!({ "duration": 60 }),
            404,
        ),
        ("POST", "/sandboxes/{id}/connect", "/sandboxes/{sandbox}/connect", lease(), 404),
        ("POST", "/v2/sandboxes/{id}/connect", "/v2/sandboxes/{sandbox}/connect", lease(), 404),
        ("POST", "/sandboxes/{id}/resume", "/sandboxes/{sandbox}/resume", lease(), 404),
        ("POST", "/sandboxes/{id}/pause", "/sandboxes/{sandbox}/pause", json!({}), 404),
        ("POST", "/sandboxes/{id}/fork", "/sandboxes/{sandbox}/fork", json!({ "count": 2 }), 404),
        ("POST", "/sandboxes/{id}/snapshots", "/sandboxes/{sandbox}/snapshots", json!({}), 404),
        ("PUT", "/sandboxes/{id}/network", "/sandboxes/{sandbox}/network", json!({}), 404),
        ("GET", "/sandboxes/{id}/metrics", "/sandboxes/{sandbox}/metrics", none(), 404),
        ("GET", "/sandboxes/{id}/logs", "/sandboxes/{sandbox}/logs", none(), 404),
        ("GET", "/v2/sandboxes/{id}/logs", "/v2/sandboxes/{sandbox}/logs", none(), 404),
        ("GET", "/snapshots", "/snapshots?sandboxID={sandbox}", none(), 200),
        ("GET", "/snapshots", "/snapshots?name={snapshot}", none(), 200),
        ("GET", "/templates", "/templates", none(), 200),
        ("GET", "/templates/aliases/{name}", "/templates/aliases/{template}", none(), 404),
        (
            "POST",
            "/templates/tags",
            "/templates/tags",
            json!({ "target": "{template}", "tags": ["v2"] }),
            404,
        ),
        (
            "DELETE",
            "/templates/tags",
            "/templates/tags",
            json!({ "name": "{template}", "tags": ["default"] }),
            404,
        ),
        ("DELETE", "/templates/{id}", "/templates/{template}", none(), 404),
        ("DELETE", "/templates/{id}", "/templates/{snapshot}", none(), 404),
        ("GET", "/templates/{id}/tags", "/templates/{template}/tags", none(), 404),
        (
            "POST",
            "/v2/templates/{id}/builds/{build}",
            "/v2/templates/{template}/builds/{build}",
            json!({ "steps": [] }),
            404,
        ),
        (
            "GET",
            "/templates/{id}/builds/{build}/status",
            "/templates/{template}/builds/{build}/status",
            none(),
            404,
        ),
    ]
}

/// What gives a caller something of its own, whatever others have of the same name.
const OWN: [(&str, &str); 2] = [("POST", "/v3/templates"), ("GET", "/templates/{id}/files/{hash}")];

async fn ask(
    daemon: &Daemon,
    key: Option<&str>,
    method: &str,
    path: &str,
    body: Value,
    headers: &[(&str, &str)],
) -> Answer {
    let mut all = vec![("host", "127.0.0.1:8080")];
    all.extend(key.map(|key| ("x-api-key", key)));
    all.extend_from_slice(headers);
    daemon.call_with(tcp(), method, path, body, &all).await
}

/// Makes one of everything for the holder of a key.
async fn furnish(daemon: &Daemon, key: &str, name: &str) -> (Things, Value) {
    let call = async |method: &str, path: &str, body: Value| {
        ask(daemon, Some(key), method, path, body, &[]).await
    };
    let body = json!({ "templateID": "base", "timeout": 600, "metadata": { "whose": "alice" } });
    let made = call("POST", "/v2/sandboxes", body).await.expect(201);
    let sandbox = made["sandboxID"].as_str().expect("an id").to_owned();
    let taken = call("POST", &format!("/sandboxes/{sandbox}/snapshots"), json!({})).await;
    let snapshot = taken.expect(201)["snapshotID"].as_str().expect("an id").to_owned();
    let announced = call("POST", "/v3/templates", json!({ "name": name })).await.expect(202);
    let build = announced["buildID"].as_str().expect("an id").to_owned();
    let path = format!("/v2/templates/{name}/builds/{build}");
    let body = json!({ "fromTemplate": "base", "steps": [{ "type": "ENV", "args": ["A", "1"] }] });
    call("POST", &path, body).await.expect(202);
    let path = format!("/templates/{name}/builds/{build}/status");
    loop {
        let status = call("GET", &path, Value::Null).await.expect(200);
        match status["status"].as_str() {
            Some("waiting" | "building") => tokio::task::yield_now().await,
            Some("ready") => break,
            other => panic!("{other:?}: {status}"),
        }
    }
    (Things { sandbox, template: name.to_owned(), snapshot, build }, made)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_another_tenants_is_answered_like_what_does_not_exist() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let quotas = Quotas::default();
    let alice = daemon.keys().create_for_e2b("alice", quotas).unwrap().0;
    let mallory = daemon.keys().create_for_e2b("mallory", quotas).unwrap().0;
    let (theirs, made) = furnish(&daemon, &alice, "mine").await;
    let (own, _) = furnish(&daemon, &mallory, "his").await;
    assert_ne!(own.sandbox, theirs.sandbox);

    for (method, _, path, body, wanted) in control() {
        let tried = async |key: &str, things: &Things| {
            let body = match &body {
                Value::Null => Value::Null,
                body => serde_json::from_str(&things.fill(&body.to_string(), false)).unwrap(),
            };
            let path = things.fill(path, true);
            things.forget(ask(&daemon, Some(key), method, &path, body, &[]).await)
        };
        let unknown = tried(&mallory, &Things::nobodys()).await;
        let stranger = tried(&mallory, &theirs).await;
        assert_eq!(unknown.status, wanted, "{method} {path}: {unknown:?}");
        assert_eq!(stranger, unknown, "{method} {path}");
    }
    // Nothing of it was touched, and the owner sees it by the same calls.
    let path = format!("/sandboxes/{}", theirs.sandbox);
    let seen = ask(&daemon, Some(&alice), "GET", &path, Value::Null, &[]).await.expect(200);
    assert_eq!((&seen["state"], &seen["metadata"]["whose"]), (&json!("running"), &json!("alice")));
    assert_eq!(seen["envdAccessToken"], made["envdAccessToken"]);
    for (method, _, path, body, wanted) in control() {
        let path = theirs.fill(path, true);
        if method == "GET" && wanted == 404 && body.is_null() {
            let seen = ask(&daemon, Some(&alice), method, &path, Value::Null, &[]).await;
            assert_eq!(seen.status, 200, "control: {method} {path}: {seen:?}");
        }
    }
    let listed = ask(&daemon, Some(&mallory), "GET", "/v2/sandboxes", Value::Null, &[]).await;
    let listed = listed.expect(200);
    assert_eq!(listed.as_array().map(Vec::len), Some(1), "his own alone: {listed}");
}

#[tokio::test]
async fn more_rules_than_each_connection_can_be_held_against_are_refused() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let key = daemon.keys().create_for_e2b("alice", Quotas::default()).unwrap().0;
    let (things, _) = furnish(&daemon, &key, "mine").await;
    let call = async |method: &str, path: &str, body: Value| {
        ask(&daemon, Some(&key), method, path, body, &[]).await
    };
    let path = format!("/sandboxes/{}/network", things.sandbox);
    for (deny, allow, wanted) in
        [(1_024, 0, 204), (1_025, 0, 400), (1, 1_024, 400), (20_000, 0, 400), (0, 20_000, 400)]
    {
        let rules = json!({ "denyOut": vec!["8.8.8.8"; deny], "allowOut": vec!["a.b"; allow] });
        let changed = call("PUT", &path, rules.clone()).await;
        assert_eq!(changed.status, wanted, "{deny} {allow}: {changed:?}");
        let body = json!({ "templateID": "base", "network": rules });
        let made = call("POST", "/v2/sandboxes", body).await;
        let wanted = if wanted == 204 { 201 } else { wanted };
        assert_eq!(made.status, wanted, "{deny} {allow}: {made:?}");
    }
}

#[tokio::test]
async fn names_of_templates_tell_nothing_of_others() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let alice = daemon.keys().create_for_e2b("alice", Quotas::default()).unwrap().0;
    let mallory = daemon.keys().create_for_e2b("mallory", Quotas::default()).unwrap().0;
    let (theirs, _) = furnish(&daemon, &alice, "mine").await;
    // A namespace that is written out leads nowhere.
    for name in ["alice/mine", "alice%2Fmine"] {
        let path = format!("/templates/aliases/{}", name.replace('/', "%2F"));
        assert_eq!(ask(&daemon, Some(&mallory), "GET", &path, Value::Null, &[]).await.status, 404);
    }
    // Announcing and sending files give the caller its own.
    let body = json!({ "name": "mine" });
    let own = ask(&daemon, Some(&mallory), "POST", "/v3/templates", body, &[]).await.expect(202);
    assert_ne!(own["buildID"], json!(theirs.build));
    let sent = "/templates/mine/files/abc";
    let url = ask(&daemon, Some(&alice), "GET", sent, Value::Null, &[]).await.expect(201);
    let place = url["url"].as_str().unwrap().split("8080").nth(1).unwrap().to_owned();
    daemon.send(tcp(), "PUT", &place, Vec::new(), &[]).await.expect(200);
    let again = ask(&daemon, Some(&alice), "GET", sent, Value::Null, &[]).await.expect(201);
    assert_eq!(again["present"], true, "control");
    let others = ask(&daemon, Some(&mallory), "GET", sent, Value::Null, &[]).await.expect(201);
    assert_eq!(others["present"], false);
    let twice = daemon.send(tcp(), "PUT", &place, Vec::new(), &[]).await;
    assert_eq!(twice.status, 403, "an address is good once");
}

#[tokio::test]
async fn without_a_good_key_there_is_nothing_at_all() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let key = daemon.keys().create_for_e2b("alice", Quotas::default()).unwrap().0;
    let (theirs, _) = furnish(&daemon, &key, "mine").await;
    let wrong = format!("{}0", &key[..key.len() - 1]);
    let wrong = if wrong == key { format!("{}1", &key[..key.len() - 1]) } else { wrong };
    for given in [None, Some(""), Some("e2b_"), Some(wrong.as_str()), Some("x")] {
        let mut first: Option<Answer> = None;
        for (method, path) in e2b::control::routes() {
            let path = path.replace("{id}", &theirs.sandbox).replace("{build}", &theirs.build);
            let path = path.replace("{name}", "mine").replace("{hash}", "abc");
            let answer = ask(&daemon, given, method, &path, json!({}), &[]).await;
            assert_eq!(answer.status, 401, "{method} {path}: {answer:?}");
            assert_eq!(answer.json()["code"], 401, "{method} {path}");
            let first = first.get_or_insert(answer.clone());
            assert_eq!(answer, *first, "{method} {path}: whatever it is");
        }
    }
    let daemon_wide = ask(&daemon, None, "GET", "/health", Value::Null, &[]).await;
    assert_eq!(daemon_wide.status, 204, "control");
}

#[tokio::test]
async fn the_matrix_has_every_call_of_the_control_plane() {
    for (method, path) in e2b::control::routes() {
        let tried = control().into_iter().any(|(by, route, ..)| (by, route) == (method, path));
        assert!(tried || OWN.contains(&(method, path)), "{method} {path} is not in the matrix");
    }
}

/// Has the wall clock be so much later than it was when a record was written.
fn clock_set_by(days: i64) -> impl Fn(&mut Value) {
    move |note| {
        let end = note["end_at"].as_str().expect("a time").parse::<DateTime<Utc>>();
        let end = end.expect("a time");
        note["end_at"] = json!(end - TimeDelta::days(days));
    }
}

#[tokio::test]
async fn b19_a_clock_that_is_set_while_no_daemon_runs_neither_ends_a_sandbox_nor_keeps_it() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let key = daemon.keys().create_for_e2b("alice", Quotas::default()).unwrap().0;
    let create = async |daemon: &Daemon, timeout: u64| {
        let body = json!({ "templateID": "base", "timeout": timeout });
        let made = ask(daemon, Some(&key), "POST", "/sandboxes", body, &[]).await.expect(201);
        format!("/sandboxes/{}", made["sandboxID"].as_str().unwrap())
    };
    // Looked at only after those whose time is up had theirs.
    let is_there = async |daemon: &Daemon, path: &str| {
        tokio::time::sleep(Duration::from_millis(200)).await;
        ask(daemon, Some(&key), "GET", path, Value::Null, &[]).await.status == 200
    };
    let long = create(&daemon, 600).await;
    let daemon = daemon.restart_with(clock_set_by(1)).await;
    assert!(is_there(&daemon, &long).await, "a day that did not pass ended it");
    let short = create(&daemon, 1).await;
    let daemon = daemon.restart_with(clock_set_by(-1)).await;
    let ends = Instant::now() + Duration::from_secs(10);
    while is_there(&daemon, &short).await {
        assert!(Instant::now() < ends, "a day that comes again is given to it");
    }
    assert!(is_there(&daemon, &long).await);
    // Control: by the wall clock alone, as records of before have it, the same jump does end it.
    let of_before = |note: &mut Value| {
        note.as_object_mut().unwrap().remove("end_moment").expect("it is written");
        clock_set_by(1)(note);
    };
    let daemon = daemon.restart_with(of_before).await;
    assert!(!is_there(&daemon, &long).await);
}

#[tokio::test]
async fn an_announced_build_and_its_files_outlive_the_daemon() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let key = daemon.keys().create_for_e2b("alice", Quotas::default()).unwrap().0;
    let body = json!({ "name": "mine" });
    let told = ask(&daemon, Some(&key), "POST", "/v3/templates", body, &[]).await.expect(202);
    let build = told["buildID"].as_str().unwrap().to_owned();
    let sent = "/templates/mine/files/abc";
    let url = ask(&daemon, Some(&key), "GET", sent, Value::Null, &[]).await.expect(201);
    let place = url["url"].as_str().unwrap().split("8080").nth(1).unwrap().to_owned();
    daemon.send(tcp(), "PUT", &place, Vec::new(), &[]).await.expect(200);
    let other = "/templates/mine/files/def";
    let url = ask(&daemon, Some(&key), "GET", other, Value::Null, &[]).await.expect(201);
    let late = url["url"].as_str().unwrap().split("8080").nth(1).unwrap().to_owned();

    let daemon = daemon.restart().await.speak_e2b().await;
    let again = ask(&daemon, Some(&key), "GET", sent, Value::Null, &[]).await.expect(201);
    assert_eq!(again["present"], true);
    let refused = daemon.send(tcp(), "PUT", &late, Vec::new(), &[]).await;
    assert_eq!((refused.status, &refused.json()["code"]), (403, &json!(403)), "not a hang");
    let status = format!("/templates/mine/builds/{build}/status");
    let seen = ask(&daemon, Some(&key), "GET", &status, Value::Null, &[]).await.expect(200);
    assert_eq!(seen["status"], "waiting");
    let body = json!({ "steps": [{ "type": "ENV", "args": ["A", "1"] }] });
    let path = format!("/v2/templates/mine/builds/{build}");
    ask(&daemon, Some(&key), "POST", &path, body.clone(), &[]).await.expect(202);
    let twice = ask(&daemon, Some(&key), "POST", &path, body, &[]).await;
    assert_eq!(twice.status, 409, "{twice:?}");
}

#[tokio::test]
async fn a_quota_on_snapshots_holds_for_who_speaks_e2b() {
    let daemon = Daemon::new().await.speak_e2b().await;
    // One is made where the sandbox is furnished.
    let two = Quotas { snapshots: Some(2), ..Quotas::default() };
    let key = daemon.keys().create_for_e2b("alice", two).unwrap().0;
    let (own, _) = furnish(&daemon, &key, "mine").await;
    let path = format!("/sandboxes/{}/snapshots", own.sandbox);
    ask(&daemon, Some(&key), "POST", &path, json!({}), &[]).await.expect(201);
    let refused = ask(&daemon, Some(&key), "POST", &path, json!({}), &[]).await;
    assert_eq!((refused.status, &refused.json()["code"]), (429, &json!(429)), "{refused:?}");
}

/// Signs the path of a file as SDKs do.
fn signature(path: &str, operation: &str, token: &str) -> String {
    let digest = Sha256::digest(format!("{path}:{operation}::{token}"));
    format!("v1_{}", STANDARD_NO_PAD.encode(digest))
}

#[tokio::test]
async fn only_who_has_its_token_gets_into_a_sandbox() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let alice = daemon.keys().create_for_e2b("alice", Quotas::default()).unwrap().0;
    let mallory = daemon.keys().create_for_e2b("mallory", Quotas::default()).unwrap().0;
    let make = async |key: &str| {
        let body = json!({ "templateID": "base", "timeout": 600 });
        let made = ask(&daemon, Some(key), "POST", "/v2/sandboxes", body, &[]).await.expect(201);
        let text = |name: &str| made[name].as_str().expect("text").to_owned();
        (text("sandboxID"), text("envdAccessToken"))
    };
    let ((theirs, token), (own, own_token)) = (make(&alice).await, make(&mallory).await);
    let unknown = "0".repeat(32);
    let signed = signature("/etc/passwd", "read", &own_token);
    let query = format!("?path=/etc/passwd&signature={signed}");
    for (method, path) in e2b::envd_routes() {
        let kind = match path {
            "/process.Process/Start"
            | "/process.Process/Connect"
            | "/process.Process/StreamInput"
            | "/filesystem.Filesystem/WatchDir" => "application/connect+json",
            _ => "application/json",
        };
        let visit = async |id: &str, token: Option<&str>, path: &str| {
            let mut headers = vec![
                ("host", "127.0.0.1:8080"),
                ("e2b-sandbox-id", id),
                ("e2b-sandbox-port", "49983"),
                ("content-type", kind),
                ("x-api-key", mallory.as_str()),
            ];
            headers.extend(token.map(|token| ("x-access-token", token)));
            let mut answer = daemon.send(tcp(), method, path, b"{}".to_vec(), &headers).await;
            let text = String::from_utf8_lossy(&answer.bytes).replace(id, "ID");
            answer.headers.retain(|(name, _)| name != "content-length");
            answer.bytes = text.into();
            answer
        };
        if path == "/health" {
            // That it is there everybody may know who knows 122 random bits of its id.
            assert_eq!(visit(&theirs, None, path).await.status, 204);
            continue;
        }
        let none = visit(&theirs, None, path).await;
        assert_eq!((none.status, &none.json()["code"]), (401, &json!(401)), "{method} {path}");
        for wrong in ["", "x", own_token.as_str(), &token[..token.len() - 1], &alice] {
            let refused = visit(&theirs, Some(wrong), path).await;
            assert_eq!(refused.status, 401, "{method} {path}: {refused:?}");
            assert_eq!(refused.json()["code"], 401, "{method} {path}");
        }
        if path == "/files" {
            let refused = visit(&theirs, None, &format!("{path}{query}")).await;
            assert_eq!(refused.status, 401, "another's signature: {refused:?}");
        }
        let gone = visit(&unknown, Some(&token), path).await;
        assert_eq!(gone.status, 502, "{method} {path}");
        assert_eq!(gone.json()["message"], "The sandbox was not found");
        let control = visit(&own, Some(&own_token), path).await;
        assert_ne!(control.status, 401, "control: {method} {path}: {control:?}");
    }
    // A signature without an id leads to the sandbox whose token made it, and to no other.
    let nobody = signature("/etc/passwd", "read", "x");
    let host = [("host", "127.0.0.1:8080")];
    let path = format!("/files?path=/etc/passwd&signature={nobody}");
    assert_eq!(daemon.send(tcp(), "GET", &path, Vec::new(), &host).await.status, 401);
    let path = format!("/files?path=/etc/shadow&signature={signed}");
    assert_eq!(daemon.send(tcp(), "GET", &path, Vec::new(), &host).await.status, 401);
}

/// Asks a port of a sandbox for something, with a token; returns the status of the answer.
async fn visit(daemon: &Daemon, (id, port): (&str, &str), path: &str, token: &str) -> u16 {
    let headers = [
        ("host", "127.0.0.1:8080"),
        ("e2b-sandbox-id", id),
        ("e2b-sandbox-port", port),
        ("x-access-token", token),
    ];
    daemon.send(tcp(), "GET", path, Vec::new(), &headers).await.status
}

#[tokio::test]
async fn who_has_no_token_spends_nothing_of_the_tenants_and_is_not_noted_as_it() {
    let daemon = Daemon::audited().await.speaking_e2b().await;
    let few = Quotas { requests_per_second: Some(5), ..Quotas::default() };
    let key = daemon.keys().create_for_e2b("alice", few).unwrap().0;
    let body = json!({
        "templateID": "base", "timeout": 600, "secure": true,
        "network": { "allowPublicTraffic": false },
    });
    let made = ask(&daemon, Some(&key), "POST", "/v2/sandboxes", body, &[]).await.expect(201);
    let text = |name: &str| made[name].as_str().expect("text").to_owned();
    let (id, token) = (text("sandboxID"), text("envdAccessToken"));
    let visit =
        async |port: &str, path: &str, token: &str| visit(&daemon, (&id, port), path, token).await;
    let signed = "/files?path=/x&signature=v1_wrong";
    for (port, path, token, status) in [
        ("49983", "/envs", "wrong", 401),
        ("49983", "/nothing", "wrong", 401),
        ("49983", signed, "", 401),
        ("49983", "/health", "", 204),
        ("8080", "/", "", 403),
    ] {
        for _ in 0..50 {
            assert_eq!(visit(port, path, token).await, status, "{port} {path}");
        }
    }
    assert_eq!(visit("49983", "/envs", &token).await, 200, "all of it is left");
    let mut seen = Vec::new();
    for _ in 0..50 {
        seen.push(visit("49983", "/envs", &token).await);
    }
    assert!(seen.contains(&429), "control: the tenant's own requests are counted: {seen:?}");

    let state = daemon.end().await;
    let files = warren_api::audit::list(&state.path().join("audit")).unwrap();
    let mut records = Vec::new();
    warren_api::audit::read(&files, |_, record| {
        records.push(record);
        true
    })
    .unwrap();
    let of = |status: u16| {
        let found = records.iter().filter(move |one| one["status"] == status);
        found.map(|one| (one["kind"].clone(), one["tenant"].clone(), one["sandbox"].clone()))
    };
    let sandbox = of(200).next().expect("the tenant's are noted").2;
    assert!(sandbox.is_string());
    // The first are written each by itself, and the others counted.
    let sums = records.iter().filter(|one| one["kind"] == "strangers");
    let groups = sums.flat_map(|one| one["groups"].as_array()).flatten().collect::<Vec<_>>();
    for status in [401_u16, 403] {
        let own = groups.iter().filter(|one| one["status"] == status && one["sandbox"] == sandbox);
        let counted: u64 = own.filter_map(|one| one["count"].as_u64()).sum();
        assert!(of(status).count() as u64 + counted >= 50, "{status}: {records:#?}");
        let nobodys = (json!("denial"), Value::Null, sandbox.clone());
        assert!(of(status).all(|noted| noted == nobodys), "{status}: {:?}", of(status).next());
    }
    assert!(of(200).chain(of(429)).all(|(_, tenant, _)| tenant == "tenant:alice"), "control");
}

#[tokio::test]
async fn who_has_no_token_wakes_nobody() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let key = daemon.keys().create_for_e2b("alice", Quotas::default()).unwrap().0;
    let call = async |method: &str, path: &str, body: Value| {
        ask(&daemon, Some(&key), method, path, body, &[]).await
    };
    let body = json!({
        "templateID": "base", "timeout": 600, "secure": true, "autoPause": true,
        "autoResume": { "enabled": true }, "network": { "allowPublicTraffic": false },
    });
    let made = call("POST", "/v2/sandboxes", body).await.expect(201);
    let text = |name: &str| made[name].as_str().expect("text").to_owned();
    let (id, token) = (text("sandboxID"), text("envdAccessToken"));
    let state = async || {
        let path = format!("/sandboxes/{id}");
        call("GET", &path, Value::Null).await.expect(200)["state"].clone()
    };
    let visit =
        async |port: &str, path: &str, token: &str| visit(&daemon, (&id, port), path, token).await;
    call("POST", &format!("/sandboxes/{id}/pause"), json!({})).await.expect(204);
    for (port, path, token, status) in [
        ("49983", "/envs", "", 401),
        ("49983", "/envs", "wrong", 401),
        ("49983", "/files?path=/x&signature=v1_wrong", "", 401),
        ("49983", "/health", "", 502),
        ("8080", "/", &token, 403),
    ] {
        assert_eq!(visit(port, path, token).await, status, "{port} {path}");
        assert_eq!(state().await, "paused", "{port} {path}");
    }
    assert_eq!(visit("49983", "/envs", &token).await, 200);
    assert_eq!(state().await, "running", "control: its own client wakes it");
}

#[tokio::test]
async fn a_fork_counts_by_what_its_origin_has() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let quotas = Quotas { memory_bytes: Some(8 << 30), ..Quotas::default() };
    let keys = daemon.keys();
    let key = keys.create_for_e2b("alice", quotas).unwrap().0;
    let call = async |method: &str, path: &str, body: Value| {
        ask(&daemon, Some(&key), method, path, body, &[]).await
    };
    for (name, gibibytes, status) in [("usual", 2_u64, 201), ("large", 3, 429)] {
        let limits = json!({ "max_memory_bytes": gibibytes << 30 });
        let made = call("POST", "/v1/sandboxes", json!({ "limits": limits })).await.expect(201);
        let origin = made["sandbox"]["id"].as_str().unwrap().to_owned();
        let labels = json!({ "e2b.name": name, "e2b.tag": "default" });
        let path = format!("/v1/sandboxes/{origin}/snapshots");
        call("POST", &path, json!({ "name": name, "labels": labels })).await.expect(201);
        let body = json!({ "templateID": name, "timeout": 600 });
        let made = call("POST", "/v2/sandboxes", body).await.expect(201);
        let id = made["sandboxID"].as_str().unwrap().to_owned();
        let path = format!("/sandboxes/{id}/fork");
        assert_eq!(call("POST", &path, json!({ "count": 1 })).await.status, status, "{name}");
        // All of them end, so that each has the whole of the quota.
        let all = call("GET", "/v1/sandboxes", Value::Null).await.expect(200);
        for one in all["items"].as_array().unwrap() {
            let path = format!("/v1/sandboxes/{}", one["id"].as_str().unwrap());
            call("DELETE", &path, Value::Null).await.expect(204);
        }
    }
}
