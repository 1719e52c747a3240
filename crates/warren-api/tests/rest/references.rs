//! What is another tenant's, named in a body, in a query or in a header: it is answered like what never was, and
//! nobody is told of it.

use serde_json::{Value, json};
use warren_api::keys::Quotas;

use crate::events::{follow, read};
use crate::support::{ALICE, Answer, BOB, Daemon, tcp};

/// One of everything, by what it is referred to.
struct Things {
    sandbox: String,
    /// What the sandbox is called.
    name: String,
    snapshot: String,
    /// What the snapshot is called.
    saved: String,
    template: String,
    /// What the template is called.
    made: String,
    /// The place in a list after which the sandbox comes.
    place: String,
}

impl Things {
    /// What is as long as what Alice has, and was never there.
    fn nobodys(like: &Self) -> Self {
        let none = "00000000-0000-4000-8000-000000000000";
        let (at, _) = like.place.split_once('.').expect("a place");
        Self {
            sandbox: format!("sbx-{none}"),
            name: "nobodys-web".to_owned(),
            snapshot: format!("snap-{none}"),
            saved: "nobodys-day".to_owned(),
            template: none.to_owned(),
            made: "nobodys-own".to_owned(),
            place: format!("{at}.sbx-{none}"),
        }
    }

    fn all(&self) -> [(&'static str, &str); 7] {
        // The place before the id of the sandbox, which is in it.
        [
            ("{place}", &self.place),
            ("{sandbox}", &self.sandbox),
            ("{name}", &self.name),
            ("{snapshot}", &self.snapshot),
            ("{saved}", &self.saved),
            ("{template}", &self.template),
            ("{made}", &self.made),
        ]
    }

    fn fill(&self, text: &str) -> String {
        self.all().into_iter().fold(text.to_owned(), |text, (mark, is)| text.replace(mark, is))
    }

    /// Takes them out of a text: they differ, nothing else may.
    fn forget(&self, text: &str) -> String {
        self.all().into_iter().fold(text.to_owned(), |text, (mark, is)| text.replace(is, mark))
    }

    fn forget_in(&self, mut answer: Answer) -> Answer {
        let text = String::from_utf8(answer.bytes.to_vec()).expect("UTF-8");
        answer.bytes = self.forget(&text).into();
        answer
    }
}

/// Waits until a build is over, and returns what is told of it but for what each has of its own.
async fn built(daemon: &Daemon, peer: warren_api::Peer, body: Value) -> Value {
    let build = daemon.call(peer, "POST", "/v1/templates/builds", body).await.expect(202);
    let path = format!("/v1/templates/builds/{}?wait=true", build["id"].as_str().expect("an id"));
    loop {
        let mut build = daemon.call(peer, "GET", &path, Value::Null).await.expect(200);
        if build["state"] != "building" && build["state"] != "waiting" {
            for entry in build["log"].as_array_mut().expect("a log") {
                entry["timestamp"] = Value::Null;
            }
            build["created_at"] = Value::Null;
            return build;
        }
        tokio::task::yield_now().await;
    }
}

/// Gives Alice one of everything.
async fn furnish(daemon: &Daemon) -> Things {
    let [name, saved, made] = ["alices-site", "alices-hour", "alices-tool"].map(str::to_owned);
    let body = json!({ "name": name, "labels": { "whose": "alice" } });
    let (sandbox, _) = daemon.create(ALICE, body).await;
    let path = format!("/v1/sandboxes/{sandbox}/snapshots");
    let body = json!({ "name": saved, "labels": { "whose": "alice" } });
    let taken = daemon.call(ALICE, "POST", &path, body).await.expect(201);
    let recipe = "FROM host\nENV SECRET=s3cret";
    let body = json!({ "name": made, "tags": ["v1"], "recipe": recipe });
    let ready = built(daemon, ALICE, body).await;
    assert_eq!(ready["state"], "ready", "{ready}");
    // The second of two has the first before it.
    daemon.create(ALICE, json!({})).await;
    let listed = daemon.call(ALICE, "GET", "/v1/sandboxes?limit=1", Value::Null).await.expect(200);
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let snapshot = text(&taken["id"]);
    let (template, place) = (text(&ready["id"]), text(&listed["next"]));
    Things { sandbox, name, snapshot, saved, template, made, place }
}

/// Every place but a path in which something can be named, with what a stranger is told. `OWN` is the stranger's own sandbox.
fn references() -> Vec<(&'static str, &'static str, Value, u16)> {
    let none = || Value::Null;
    let echo = || json!({ "program": "echo" });
    let make = |body: Value| ("POST", "/v1/sandboxes", body, 404);
    let restore =
        |what: &str| ("POST", "/v1/sandboxes/OWN/restore", json!({ "snapshot": what }), 404);
    let attach = |create: Value| {
        let body = json!({ "create_if_missing": true, "create": create });
        ("POST", "/v1/sandboxes/{name}/attach", body, 403)
    };
    vec![
        make(json!({ "select": { "preferred_id": "{sandbox}" } })),
        make(json!({ "select": { "preferred_id": "{name}" } })),
        make(json!({ "select": { "preferred_id": "{sandbox}", "use_pool": true } })),
        make(json!({ "template": "{made}" })),
        make(json!({ "template": "{made}:v1" })),
        make(json!({ "template": "{template}" })),
        (
            "POST",
            "/v1/run",
            json!({ "command": echo(), "sandbox": { "template": "{made}:v1" } }),
            404,
        ),
        (
            "POST",
            "/v1/run",
            json!({ "command": echo(), "sandbox": { "template": "{template}" } }),
            404,
        ),
        restore("{snapshot}"),
        restore("{saved}"),
        ("GET", "/v1/sandboxes/OWN/diff?since={snapshot}", none(), 404),
        ("GET", "/v1/sandboxes/OWN/diff?since={saved}", none(), 404),
        ("POST", "/v1/snapshots/{snapshot}/fork", json!({}), 404),
        ("POST", "/v1/snapshots/{saved}/fork", json!({ "count": 2, "partial": true }), 404),
        ("POST", "/v1/sandboxes/{sandbox}/fork", json!({}), 404),
        ("PUT", "/v1/default", json!({ "sandbox_id": "{sandbox}" }), 404),
        ("PUT", "/v1/default", json!({ "sandbox_id": "{name}" }), 404),
        attach(json!({})),
        attach(json!({ "name": "{name}" })),
        attach(json!({ "select": { "preferred_id": "{sandbox}" } })),
        ("POST", "/v1/sandboxes/{sandbox}/attach", json!({ "create": { "name": "{name}" } }), 404),
        ("GET", "/v1/sandboxes?label=name={name}", none(), 200),
        ("GET", "/v1/sandboxes?label=whose=alice", none(), 200),
        ("GET", "/v1/sandboxes?after={place}", none(), 200),
        ("GET", "/v1/sessions?after={place}", none(), 200),
        ("GET", "/v1/snapshots?after={place}", none(), 200),
        ("GET", "/v1/snapshots?label=whose=alice", none(), 200),
        ("GET", "/v1/templates/{made}:v1", none(), 404),
        ("PUT", "/v1/templates/{made}:v1/tags/mine", none(), 404),
        ("PUT", "/v1/templates/{template}/tags/mine", none(), 404),
        ("DELETE", "/v1/templates/{made}/tags/v1", none(), 404),
    ]
}

#[tokio::test]
async fn b3_what_is_others_is_answered_like_what_never_was_wherever_it_is_named() {
    let daemon = Daemon::new().await;
    let theirs = furnish(&daemon).await;
    let nobodys = Things::nobodys(&theirs);
    let (own, _) = daemon.create(BOB, json!({ "name": "own" })).await;
    let mut told = (follow(&daemon, ALICE, None).await, follow(&daemon, BOB, None).await);
    let counts = daemon.backend.counts();
    for (method, path, body, wanted) in references() {
        let tried = async |things: &Things| {
            let body = match &body {
                Value::Null => Value::Null,
                body => serde_json::from_str(&things.fill(&body.to_string())).expect("JSON"),
            };
            let path = things.fill(path).replace("OWN", &own);
            things.forget_in(daemon.call(BOB, method, &path, body).await)
        };
        let (unknown, stranger) = (tried(&nobodys).await, tried(&theirs).await);
        assert_eq!(unknown.status, wanted, "{method} {path} {body}: {unknown:?}");
        assert_eq!(stranger, unknown, "{method} {path} {body}");
    }
    assert_eq!(daemon.backend.counts(), counts, "nothing was made of it");
    // Nobody was told of any of it: what comes next is what is next done.
    for (peer, stream) in [(ALICE, &mut told.0), (BOB, &mut told.1)] {
        let (marker, _) = daemon.create(peer, json!({})).await;
        for (_, kind, data) in read(stream, 2).await {
            assert_eq!(data["sandbox_id"], marker.as_str(), "{kind}");
        }
    }
    // Control: to Alice each of them is there by the same name.
    let (own, _) = daemon.create(ALICE, json!({ "name": "own" })).await;
    for (method, path, body, wanted) in references() {
        // Nobody refers to a sandbox by its name where an id is wanted, not even its owner.
        if wanted != 404 || body.to_string().contains("_id\":\"{name}") {
            continue;
        }
        let body = match &body {
            Value::Null => Value::Null,
            body => serde_json::from_str(&theirs.fill(&body.to_string())).expect("JSON"),
        };
        let path = theirs.fill(path).replace("OWN", &own);
        let answer = daemon.call(ALICE, method, &path, body.clone()).await;
        // A backend with no kernel in it has no differences; it was asked for them.
        let is_there = answer.status < 300 || path.contains("/diff") && answer.status == 422;
        assert!(is_there, "control: {method} {path} {body}: {answer:?}");
    }
}

#[tokio::test]
async fn b3_a_build_that_begins_with_others_template_fails_as_if_there_were_none() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let theirs = furnish(&daemon).await;
    let nobodys = Things::nobodys(&theirs);
    for from in ["{made}", "{made}:v1", "{template}", "alice/{made}", "uid:4000001/{made}:v1"] {
        let tried = async |peer, things: &Things, name: &str| {
            let recipe = format!("FROM template:{}\nENV A=1", things.fill(from));
            let mut build = built(&daemon, peer, json!({ "name": name, "recipe": recipe })).await;
            build["id"] = Value::Null;
            things.forget(&build.to_string())
        };
        let unknown = tried(BOB, &nobodys, "x").await;
        assert!(unknown.contains("\"state\":\"failed\""), "{from}: {unknown}");
        assert!(!unknown.contains("s3cret"), "{from}: {unknown}");
        assert_eq!(tried(BOB, &theirs, "x").await, unknown, "{from}");
        if !from.contains('/') {
            let own = tried(ALICE, &theirs, "y").await;
            assert!(own.contains("\"state\":\"ready\""), "control: {from}: {own}");
        }
    }
    // What E2B's clients call the same.
    let alice = daemon.keys().create_for_e2b("alice", Quotas::default()).unwrap().0;
    let mallory = daemon.keys().create_for_e2b("mallory", Quotas::default()).unwrap().0;
    let call = async |key: &str, method: &str, path: &str, body: Value| {
        let headers = [("host", "127.0.0.1:8080"), ("x-api-key", key)];
        daemon.call_with(tcp(), method, path, body, &headers).await
    };
    let build = async |key: &str, name: &str, from: &str| {
        let told = call(key, "POST", "/v3/templates", json!({ "name": name })).await.expect(202);
        let id = told["buildID"].as_str().unwrap().to_owned();
        let path = format!("/v2/templates/{name}/builds/{id}");
        let step = json!({ "type": "ENV", "args": ["SECRET", "s3cret"] });
        let body = json!({ "fromTemplate": from, "steps": [step] });
        let begun = call(key, "POST", &path, body).await;
        if begun.status != 202 {
            let text = String::from_utf8_lossy(&begun.bytes).replace(from, "FROM");
            return json!([begun.status, text]);
        }
        let path = format!("/templates/{name}/builds/{id}/status");
        loop {
            let mut said = call(key, "GET", &path, Value::Null).await.expect(200);
            if said["status"] != "building" && said["status"] != "waiting" {
                for entry in said["logEntries"].as_array_mut().unwrap() {
                    entry["timestamp"] = Value::Null;
                }
                let text = said.to_string().replace(&id, "BUILD").replace(from, "FROM");
                return serde_json::from_str(&text).unwrap();
            }
            tokio::task::yield_now().await;
        }
    };
    assert_eq!(build(&alice, "alices", "base").await["status"], "ready");
    assert_eq!(build(&alice, "second", "alices").await["status"], "ready", "control");
    for (from, nobody) in [
        ("alices", "nobody"),
        ("alices:default", "nobody:default"),
        ("alice/alices", "alice/nobody"),
    ] {
        let unknown = build(&mallory, "x", nobody).await;
        assert_ne!(unknown["status"], "ready", "{from}: {unknown}");
        assert_eq!(build(&mallory, "x", from).await, unknown, "{from}");
    }
}

#[tokio::test]
async fn b9_others_idempotency_key_is_a_key_like_any_other() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let body = json!({ "name": "web", "environment": { "SECRET": "s3cret" } });
    let create = async |peer, key: &str| {
        let headers = [("idempotency-key", key)];
        daemon.call_with(peer, "POST", "/v1/sandboxes", body.clone(), &headers).await
    };
    let alices = create(ALICE, "alices-key").await.expect(201);
    let known = create(BOB, "alices-key").await;
    let ids = |answer: &Value| {
        let id = |what: &str| answer[what]["id"].as_str().unwrap().to_owned();
        (id("sandbox"), id("session"))
    };
    let (theirs, own) = (ids(&alices), ids(&known.json()));
    assert!(theirs.0 != own.0 && theirs.1 != own.1, "a sandbox of his own");
    daemon.call(BOB, "DELETE", &format!("/v1/sessions/{}", own.1), Value::Null).await.expect(204);
    let unknown = create(BOB, "nobodys-key").await;
    assert_eq!((known.status, &known.headers), (unknown.status, &unknown.headers));
    assert_eq!(daemon.backend.counts().created, 3);
    let again = create(ALICE, "alices-key").await;
    let replayed = ("idempotency-replayed".to_owned(), "true".to_owned());
    assert!(again.headers.contains(&replayed) && again.json() == alices, "control: {again:?}");

    let alice = daemon.keys().create_for_e2b("alice", Quotas::default()).unwrap().0;
    let mallory = daemon.keys().create_for_e2b("mallory", Quotas::default()).unwrap().0;
    let create = async |by: &str, key: &str| {
        let host = ("host", "127.0.0.1:8080");
        let headers = [host, ("x-api-key", by), ("idempotency-key", key)];
        let body = json!({ "templateID": "base", "timeout": 600 });
        daemon.call_with(tcp(), "POST", "/v2/sandboxes", body, &headers).await
    };
    let alices = create(&alice, "alices-key").await.expect(201);
    assert_eq!(create(&alice, "alices-key").await.expect(201), alices, "control");
    let known = create(&mallory, "alices-key").await;
    let unknown = create(&mallory, "nobodys-key").await;
    assert_eq!((known.status, &known.headers), (unknown.status, &unknown.headers));
    for id in ["sandboxID", "envdAccessToken"] {
        assert_ne!(known.json()[id], alices[id], "{id}");
    }
}

#[tokio::test]
async fn b3_the_id_of_others_event_leads_to_none_of_theirs() {
    let daemon = Daemon::new().await;
    let mut alices = follow(&daemon, ALICE, None).await;
    let (_, session) = daemon.create(ALICE, json!({})).await;
    for verb in ["suspend", "resume", "detach"] {
        let path = format!("/v1/sessions/{session}/{verb}");
        daemon.call(ALICE, "POST", &path, Value::Null).await.expect(200);
    }
    let last = read(&mut alices, 5).await.pop().expect("five").0;
    let (epoch, number) = last.split_once('-').expect("an id");
    assert_eq!(number, "5");
    let nobodys = format!("{epoch}-7000");
    // He has had fewer than she has, and is told that what he names is none of his.
    let (first, _) = daemon.create(BOB, json!({})).await;
    let mut streams = Vec::new();
    for id in [&last, &nobodys] {
        streams.push(follow(&daemon, BOB, Some(id)).await);
    }
    daemon.create(ALICE, json!({})).await;
    let (second, _) = daemon.create(BOB, json!({})).await;
    let mut seen = Vec::new();
    for stream in &mut streams {
        seen.push(read(stream, 3).await);
    }
    assert_eq!(seen[0], seen[1]);
    let kinds: Vec<_> = seen[0].iter().map(|(_, kind, _)| kind.as_str()).collect();
    assert_eq!(kinds, ["gap", "sandbox.created", "session.active"]);
    assert!(seen[0][1..].iter().all(|(_, _, data)| data["sandbox_id"] == second.as_str()));
    // One that both have had is his own.
    let mut own = follow(&daemon, BOB, Some(&format!("{epoch}-1"))).await;
    let seen = read(&mut own, 3).await;
    let ids: Vec<_> = seen.iter().map(|(_, _, data)| data["sandbox_id"].clone()).collect();
    assert_eq!(ids, [first.as_str(), &second, &second].map(Value::from));
}

mod needs_root {
    use std::time::{Duration, Instant};

    use super::*;

    const UNKNOWN: &str = "nobodys-job";

    /// Starts something in a sandbox of a real backend, by a name.
    async fn start(daemon: &Daemon, peer: warren_api::Peer, sandbox: &str, script: &str) -> Answer {
        let command = json!({ "program": "sh", "args": ["-c", script] });
        let body = json!({ "id": "alices-job", "command": command, "open_stdin": true });
        daemon.call(peer, "POST", &format!("/v1/sandboxes/{sandbox}/execs"), body).await
    }

    /// Waits for an exec and returns what it wrote.
    async fn said(daemon: &Daemon, peer: warren_api::Peer, path: &str) -> String {
        daemon.call(peer, "GET", &format!("{path}/wait"), Value::Null).await.expect(200);
        let log = daemon.call(peer, "GET", &format!("{path}/log"), Value::Null).await;
        String::from_utf8_lossy(&log.bytes).into_owned()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn b3_the_names_of_others_commands_and_shells_mean_nothing_in_ones_own_sandbox() {
        let daemon = Daemon::on_linux().await;
        let (theirs, _) = daemon.create(ALICE, json!({})).await;
        let (own, _) = daemon.create(BOB, json!({})).await;
        let script = "echo s3cret; exec cat";
        let started = start(&daemon, ALICE, &theirs, script).await.expect(201);
        let pid = started["pid"].to_string();
        let shell = |of: &str, name: &str| format!("/v1/sandboxes/{of}/shells/{name}");
        let body = json!({ "command": "X=s3cret; echo $X" });
        let path = format!("{}/run", shell(&theirs, "alices-job"));
        daemon.call(ALICE, "POST", &path, body).await.expect(200);
        let at = |of: &str, kind: &str, name: &str, what: &str| {
            format!("/v1/sandboxes/{of}/{kind}/{name}{what}")
        };
        for (method, kind, what, body) in [
            ("GET", "execs", "", Value::Null),
            ("DELETE", "execs", "", Value::Null),
            ("GET", "execs", "/wait", Value::Null),
            ("POST", "execs", "/signal", json!({ "signal": 9 })),
            ("POST", "execs", "/kill", Value::Null),
            ("POST", "execs", "/resize", json!({ "rows": 24, "columns": 80 })),
            ("PUT", "execs", "/stdin", json!("x")),
            ("GET", "execs", "/log", Value::Null),
            ("GET", "execs", "/stream", Value::Null),
            ("GET", "shells", "", Value::Null),
            ("DELETE", "shells", "", Value::Null),
            ("POST", "shells", "/interrupt", Value::Null),
        ] {
            let ask = async |name: &str| {
                let path = at(&own, kind, name, what);
                let mut answer = daemon.call(BOB, method, &path, body.clone()).await;
                let text = String::from_utf8_lossy(&answer.bytes).replace(name, "NAME");
                answer.headers.retain(|(name, _)| name != "content-length");
                answer.bytes = text.into_bytes().into();
                answer
            };
            let unknown = ask(UNKNOWN).await;
            assert_eq!(unknown.status, 404, "{method} {kind}{what}: {unknown:?}");
            assert_eq!(ask("alices-job").await, unknown, "{method} {kind}{what}");
            if kind == "execs" {
                assert_eq!(ask(&pid).await, ask("4194000").await, "{method} {kind}{what}");
            }
        }
        // To write, to steal the right to, and to be told of both is for who has the sandbox.
        let none =
            daemon.call(BOB, "GET", &format!("/v1/sandboxes/{own}/execs"), Value::Null).await;
        assert_eq!(none.expect(200)["items"], json!([]));
        // By the same names he has his own: another command is no conflict, a shell knows nothing.
        start(&daemon, BOB, &own, "echo own").await.expect(201);
        let path = at(&own, "execs", "alices-job", "");
        let said_own = said(&daemon, BOB, &path).await;
        assert!(said_own.contains("own") && !said_own.contains("s3cret"), "{said_own}");
        let path = format!("{}/run", shell(&own, "alices-job"));
        let ran =
            daemon.call(BOB, "POST", &path, json!({ "command": "echo [$X]" })).await.expect(200);
        assert_eq!((&ran["stdout"], &ran["shell_is_new"]), (&json!("[]\n"), &json!(true)));
        // Control: hers are as she left them, under those names.
        let path = at(&theirs, "execs", "alices-job", "");
        let seen = daemon.call(ALICE, "GET", &path, Value::Null).await.expect(200);
        assert_eq!(seen["pid"].to_string(), pid, "{seen}");
        let path = format!("{}/run", shell(&theirs, "alices-job"));
        let ran = daemon.call(ALICE, "POST", &path, json!({ "command": "echo [$X]" })).await;
        assert_eq!(ran.expect(200)["stdout"], "[s3cret]\n");
        for (peer, id) in [(ALICE, &theirs), (BOB, &own)] {
            let path = format!("/v1/sandboxes/{id}");
            daemon.call(peer, "DELETE", &path, Value::Null).await.expect(204);
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn b3_others_watcher_and_process_mean_nothing_in_ones_own_sandbox_of_e2b() {
        let daemon = Daemon::on_linux().await;
        let make = async |tenant: &str| {
            let key = daemon.keys().create_for_e2b(tenant, Quotas::default()).unwrap().0;
            let headers = [("host", "127.0.0.1:8080"), ("x-api-key", &key)];
            let body = json!({ "templateID": "base", "timeout": 600 });
            let made = daemon.call_with(tcp(), "POST", "/v2/sandboxes", body, &headers).await;
            let made = made.expect(201);
            let text = |name: &str| made[name].as_str().expect("text").to_owned();
            (key, text("sandboxID"), text("envdAccessToken"))
        };
        let (alice, mallory) = (make("alice").await, make("mallory").await);
        let ask = async |of: &(String, String, String), path: &str, kind: &str, body: Vec<u8>| {
            let headers = [
                ("host", "127.0.0.1:8080"),
                ("e2b-sandbox-id", of.1.as_str()),
                ("e2b-sandbox-port", "49983"),
                ("x-access-token", of.2.as_str()),
                ("content-type", kind),
            ];
            daemon.send(tcp(), "POST", path, body, &headers).await
        };
        let call = async |of: &(String, String, String), path: &str, body: Value| {
            ask(of, path, "application/json", body.to_string().into_bytes()).await
        };
        let home = json!({ "path": "/home/user" });
        let watch = call(&alice, "/filesystem.Filesystem/CreateWatcher", home.clone()).await;
        let watcher = watch.expect(200)["watcherId"].as_str().unwrap().to_owned();
        let own = call(&mallory, "/filesystem.Filesystem/CreateWatcher", home).await.expect(200);
        assert_ne!(own["watcherId"], watcher.as_str());
        let (known, unknown) = (json!({ "watcherId": watcher }), format!("w{}", "0".repeat(32)));
        let unknown_body = json!({ "watcherId": unknown });
        let make_dir = async |of, path: &str| {
            let made = call(of, "/filesystem.Filesystem/MakeDir", json!({ "path": path })).await;
            made.expect(200);
        };
        make_dir(&alice, "/home/user/s3cret").await;
        for path in
            ["/filesystem.Filesystem/GetWatcherEvents", "/filesystem.Filesystem/RemoveWatcher"]
        {
            let nobodys = call(&mallory, path, unknown_body.clone()).await;
            let mut theirs = call(&mallory, path, known.clone()).await;
            assert_eq!(nobodys.status, 404, "{path}: {nobodys:?}");
            let text = String::from_utf8_lossy(&theirs.bytes).replace(&watcher, &unknown);
            theirs.bytes = text.into_bytes().into();
            assert_eq!(theirs, nobodys, "{path}");
        }
        // Processes by tag: to be listened to, written to, ended.
        let frame = |body: Value| {
            let body = body.to_string().into_bytes();
            let length = u32::try_from(body.len()).unwrap().to_be_bytes();
            [&[0][..], &length, &body].concat()
        };
        let start = frame(json!({
            "process": { "cmd": "sleep", "args": ["600"] }, "tag": "alices-job",
        }));
        let headers = [
            ("host", "127.0.0.1:8080"),
            ("e2b-sandbox-id", alice.1.as_str()),
            ("e2b-sandbox-port", "49983"),
            ("x-access-token", alice.2.as_str()),
            ("content-type", "application/connect+json"),
        ];
        let started = daemon.open(tcp(), "POST", "/process.Process/Start", start, &headers).await;
        assert_eq!(started.status(), 200);
        let listed = async |of| call(of, "/process.Process/List", json!({})).await.expect(200);
        let began = Instant::now();
        while listed(&alice).await["processes"].as_array().is_none_or(Vec::is_empty) {
            assert!(began.elapsed() < Duration::from_secs(20), "control: she has one");
        }
        let his = listed(&mallory).await;
        assert!(his["processes"].as_array().is_none_or(Vec::is_empty), "{his}");
        let pid = listed(&alice).await["processes"][0]["pid"].clone();
        for (path, more) in [
            ("/process.Process/SendSignal", json!({ "signal": "SIGNAL_SIGKILL" })),
            ("/process.Process/SendInput", json!({ "input": { "stdin": "eA==" } })),
            ("/process.Process/CloseStdin", json!({})),
            ("/process.Process/Update", json!({ "pty": { "size": { "rows": 1, "cols": 1 } } })),
        ] {
            let by = async |selector: Value| {
                let mut body = more.clone();
                body["process"] = selector;
                call(&mallory, path, body).await
            };
            let unknown = by(json!({ "tag": "nobody-job" })).await;
            let mut theirs = by(json!({ "tag": "alices-job" })).await;
            assert_eq!(unknown.status, 404, "{path}: {unknown:?}");
            let text = String::from_utf8_lossy(&theirs.bytes).replace("alices-job", "nobody-job");
            theirs.bytes = text.into_bytes().into();
            assert_eq!(theirs, unknown, "{path}");
            let theirs = by(json!({ "pid": pid })).await;
            assert_eq!(theirs.status, 404, "{path}: by a pid that is none of his: {theirs:?}");
        }
        for selector in [json!({ "tag": "alices-job" }), json!({ "tag": "nobody-job" })] {
            let body = frame(json!({ "process": selector }));
            let kind = "application/connect+json";
            let answer = ask(&mallory, "/process.Process/Connect", kind, body).await;
            let text = String::from_utf8_lossy(&answer.bytes).into_owned();
            assert!(text.contains("not_found") && !text.contains("s3cret"), "{text}");
        }
        // Control: to her both are there, and what happened meanwhile.
        assert_eq!(listed(&alice).await["processes"][0]["pid"], pid);
        let path = "/filesystem.Filesystem/GetWatcherEvents";
        let began = Instant::now();
        loop {
            let events = call(&alice, path, known.clone()).await.expect(200);
            if events.to_string().contains("s3cret") {
                break;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "control: {events}");
        }
        drop(started);
        for (key, id, _) in [&alice, &mallory] {
            let headers = [("host", "127.0.0.1:8080"), ("x-api-key", key)];
            let path = format!("/sandboxes/{id}");
            daemon.call_with(tcp(), "DELETE", &path, Value::Null, &headers).await.expect(204);
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn b9_a_command_by_name_is_run_once_and_another_under_that_name_is_a_conflict() {
        let daemon = Daemon::on_linux().await;
        let (id, _) = daemon.create(ALICE, json!({})).await;
        let script = "echo ran >> /workspace/count";
        let first = start(&daemon, ALICE, &id, script).await.expect(201);
        let path = format!("/v1/sandboxes/{id}/execs/alices-job");
        said(&daemon, ALICE, &path).await;
        for _ in 0..3 {
            let again = start(&daemon, ALICE, &id, script).await.expect(201);
            assert_eq!((&again["id"], &again["started_at"]), (&first["id"], &first["started_at"]));
        }
        let other = start(&daemon, ALICE, &id, "echo other >> /workspace/count").await;
        assert_eq!((other.status, other.code().as_str()), (409, "already_exists"));
        let body = json!({ "program": "cat", "args": ["/workspace/count"] });
        let ran = daemon.call(ALICE, "POST", &format!("/v1/sandboxes/{id}/exec"), body).await;
        assert_eq!(ran.expect(200)["stdout"], "ran\n", "once, and nothing else");
        daemon.call(ALICE, "DELETE", &format!("/v1/sandboxes/{id}"), Value::Null).await.expect(204);
    }
}
