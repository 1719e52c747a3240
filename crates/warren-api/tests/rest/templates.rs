//! Templates over REST.

use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use tower::ServiceExt as _;
use warren::backend::fake::{Step, When};
use warren_api::keys::Quotas;
use warren_api::rest;

use crate::support::{ALICE, Answer, BOB, Daemon, ROOT, read, tcp};

/// Asks one router for something.
async fn send(router: Router, path: &str, body: Value, headers: &[(&str, &str)]) -> Answer {
    let mut request = Request::post(path).extension(tcp());
    for (name, value) in headers.iter().chain(&[("content-type", "application/json")]) {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::from(body.to_string())).expect("a request");
    read(router.oneshot(request).await.expect("infallible")).await
}

/// Builds a template of nothing but the host's toolchain, which takes no sandbox.
async fn built(daemon: &Daemon, peer: warren_api::Peer, name: &str) -> String {
    let body = json!({ "name": name, "recipe": "FROM host\nENV A=1\nUSER user" });
    let build = daemon.call(peer, "POST", "/v1/templates/builds", body).await.expect(202);
    let id = build["id"].as_str().expect("an id").to_owned();
    let path = format!("/v1/templates/builds/{id}?wait=true&offset=3");
    loop {
        let build = daemon.call(peer, "GET", &path, Value::Null).await.expect(200);
        match build["state"].as_str() {
            Some("building") => {}
            Some("ready") => return id,
            other => panic!("{other:?}: {build}"),
        }
    }
}

#[tokio::test]
async fn s2_templates_are_a_tenants_and_do_not_exist_for_others() {
    let daemon = Daemon::new().await;
    let id = built(&daemon, ALICE, "mine:v1").await;
    let key = daemon.key("mallory", Quotas::default());
    let bearer = format!("Bearer {key}");
    let on_tcp = [("host", "127.0.0.1:8080"), ("authorization", bearer.as_str())];
    let strangers: [(_, &[(&str, &str)]); 2] = [(BOB, &[]), (tcp(), &on_tcp)];
    let unknown = "00000000-0000-4000-8000-000000000000";
    for (method, path, body) in [
        ("GET", "/v1/templates/{}", Value::Null),
        ("DELETE", "/v1/templates/{}", Value::Null),
        ("PUT", "/v1/templates/{}/tags/v2", Value::Null),
        ("GET", "/v1/templates/builds/{}", Value::Null),
        ("DELETE", "/v1/templates/builds/{}", Value::Null),
        ("PUT", "/v1/templates/builds/{}/files", Value::Null),
        ("POST", "/v1/sandboxes", json!({ "template": "{}" })),
    ] {
        for (peer, headers) in strangers {
            let ask = async |id: &str| {
                let body = match &body {
                    Value::Null => Value::Null,
                    body => serde_json::from_str(&body.to_string().replace("{}", id)).unwrap(),
                };
                let path = path.replace("{}", id);
                let mut answer = daemon.call_with(peer, method, &path, body, headers).await;
                let text = String::from_utf8(answer.bytes.to_vec()).unwrap();
                answer.bytes = text.replace(id, "ID").into();
                answer
            };
            let (theirs, nobodys) = (ask(&id).await, ask(unknown).await);
            assert_eq!(nobodys.status, 404, "{method} {path}: {nobodys:?}");
            assert_eq!(theirs, nobodys, "{method} {path}");
        }
    }
    let seen = daemon.call(BOB, "GET", "/v1/templates", Value::Null).await.expect(200);
    assert_eq!(seen, json!({ "items": [], "next": null }));
    let own = daemon.call(ALICE, "GET", "/v1/templates", Value::Null).await.expect(200);
    assert_eq!(own["items"][0]["tags"], json!(["v1"]), "control: nobody touched it");
    daemon.call(BOB, "GET", "/v1/templates/mine:v1", Value::Null).await.expect(404);
}

#[tokio::test]
async fn a_template_is_shown_tagged_used_and_forgotten() {
    let daemon = Daemon::new().await;
    let id = built(&daemon, ALICE, "mine").await;
    let call = async |method: &str, path: &str| daemon.call(ALICE, method, path, Value::Null).await;
    let shown = call("GET", "/v1/templates/mine").await.expect(200);
    assert_eq!((&shown["id"], &shown["host_tools"]), (&json!(id), &json!(true)));
    assert_eq!((&shown["environment"], &shown["user"]), (&json!({ "A": "1" }), &json!("user")));
    let tagged = call("PUT", "/v1/templates/mine/tags/v1").await.expect(200);
    assert_eq!(tagged["tags"], json!(["default", "v1"]));
    call("PUT", "/v1/templates/mine/tags/-bad").await.expect(400);
    let body = json!({ "template": "mine:v1", "environment": { "B": "2" } });
    let made = daemon.call(ALICE, "POST", "/v1/sandboxes", body).await.expect(201);
    assert!(made["sandbox"]["id"].is_string());
    call("DELETE", "/v1/templates/mine/tags/v1").await.expect(204);
    call("GET", "/v1/templates/mine:v1").await.expect(404);
    let daemon = daemon.restart().await;
    let shown = daemon.call(ALICE, "GET", "/v1/templates/mine", Value::Null).await.expect(200);
    assert_eq!(shown["id"], json!(id), "it outlives the daemon");
    daemon.call(ALICE, "DELETE", "/v1/templates/mine", Value::Null).await.expect(204);
    daemon.call(ALICE, "GET", &format!("/v1/templates/{id}"), Value::Null).await.expect(404);
    let body = json!({ "create_if_missing": true, "create": { "template": "mine" } });
    let path = "/v1/sandboxes/sbx-00000000-0000-4000-8000-000000000001/attach";
    daemon.call(ALICE, "POST", path, body).await.expect(400);
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_and_paths_of_the_host_are_the_operators() {
    let daemon = Daemon::new().await;
    for (body, status, word) in [
        (json!({}), 400, "no name"),
        (json!({ "name": "x" }), 400, "FROM"),
        (json!({ "name": "a b", "recipe": "FROM host" }), 400, "no name"),
        (json!({ "name": "x", "recipe": "FROM host\nNOPE x" }), 400, "line 2"),
        (json!({ "name": "x", "recipe": "FROM host", "tags": ["-"] }), 400, "no name"),
        (json!({ "name": "x", "recipe": "FROM host", "what": 1 }), 400, "what"),
        (json!({ "name": "x", "recipe": "FROM /etc" }), 403, "operator"),
        (json!({ "name": "x", "recipe": "FROM oci:/etc" }), 403, "operator"),
        (
            json!({ "name": "x", "recipe": "FROM host", "limits": { "max_processes": null } }),
            403,
            "operator",
        ),
        (
            json!({ "name": "x", "recipe": "FROM host", "limits": { "max_processes": 0 } }),
            400,
            "max_processes",
        ),
    ] {
        let refused = daemon.call(ALICE, "POST", "/v1/templates/builds", body.clone()).await;
        assert_eq!(refused.status, status, "{body}: {:?}", refused.bytes);
        let text = refused.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(text.contains(word), "{body}: {text}");
    }
    let body = json!({ "name": "x", "recipe": "FROM /nowhere" });
    daemon.call(ROOT, "POST", "/v1/templates/builds", body).await.expect(202);
    // One that waits for files is not under way, and can be given up.
    let body = json!({ "name": "x", "recipe": "FROM host\nCOPY a /a", "files": true });
    let mut ids = Vec::new();
    for _ in 0..4 {
        let build =
            daemon.call(ALICE, "POST", "/v1/templates/builds", body.clone()).await.expect(202);
        assert_eq!(build["state"], "waiting");
        ids.push(build["id"].as_str().unwrap().to_owned());
    }
    let refused = daemon.call(ALICE, "POST", "/v1/templates/builds", body).await;
    assert_eq!(refused.status, 429, "{:?}", refused.bytes);
    for id in ids {
        let path = format!("/v1/templates/builds/{id}");
        daemon.call(ALICE, "DELETE", &path, Value::Null).await.expect(204);
        let files = daemon.call(ALICE, "PUT", &format!("{path}/files"), Value::Null).await;
        assert_eq!(files.status, 409, "{:?}", files.bytes);
        let given_up = daemon.call(ALICE, "GET", &path, Value::Null).await.expect(200);
        assert_eq!(given_up["state"], "failed");
    }
    built(&daemon, ALICE, "x").await;
}

/// A step that takes a sandbox. The fake backend has one and cannot run the command.
const RUNS: &str = "FROM host\nRUN true";

const GIB: u64 = 1 << 30;

/// What holders of a key ask for.
struct Holder<'a> {
    daemon: &'a Daemon,
    key: String,
}

impl Holder<'_> {
    async fn ask(&self, method: &str, path: &str, body: Value) -> Answer {
        let headers = [("host", "127.0.0.1:8080"), ("x-api-key", self.key.as_str())];
        self.daemon.call_with(tcp(), method, path, body, &headers).await
    }

    async fn build(&self, more: Value) -> Answer {
        let mut body = json!({ "name": "x", "recipe": RUNS });
        body.as_object_mut().expect("fields").extend(more.as_object().expect("fields").clone());
        self.ask("POST", "/v1/templates/builds", body).await
    }

    /// Announces a build as E2B's clients do, and starts it.
    async fn build_by_e2b(&self, template: &Value) -> Answer {
        let told = self.ask("POST", "/v3/templates", json!({ "name": "y" })).await.expect(202);
        let path = format!("/v2/templates/y/builds/{}", told["buildID"].as_str().expect("an id"));
        self.ask("POST", &path, template.clone()).await
    }

    /// Waits until a build is over, and says how it ended.
    async fn end(&self, build: &Value) -> Value {
        let path = format!("/v1/templates/builds/{}", build["id"].as_str().expect("an id"));
        loop {
            let query = format!("{path}?wait=true&offset=100");
            let build = self.ask("GET", &query, Value::Null).await.expect(200);
            if build["state"] != "building" {
                return build["state"].clone();
            }
        }
    }

    /// Tells how many sandboxes, bytes of memory and of disk, shares of the CPU and commands count.
    async fn used(&self) -> [u64; 5] {
        let shown = self.ask("GET", "/v1/quotas", Value::Null).await.expect(200);
        ["sandboxes", "memory_bytes", "disk_bytes", "cpu_weight", "execs"]
            .map(|name| shown["items"][0]["used"][name].as_u64().expect("a number"))
    }
}

async fn stalled(daemon: &Daemon, count: u64) {
    let began = Instant::now();
    while daemon.backend.stalled(Step::Create) < count {
        assert!(began.elapsed() < Duration::from_secs(30), "too few builds began");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_build_counts_as_the_sandbox_that_its_steps_run_in_until_it_is_over() {
    let daemon = Daemon::new().await;
    let quotas = Quotas {
        sandboxes: Some(1),
        memory_bytes: Some(GIB),
        disk_bytes: Some(GIB),
        cpu_weight: Some(100),
        execs: Some(1),
        ..Quotas::default()
    };
    let alice = Holder { daemon: &daemon, key: daemon.key("alice", quotas) };
    assert_eq!(alice.used().await, [0; 5]);
    daemon.backend.stall(Step::Create, When::Always);
    let build = alice.build(json!({})).await.expect(202);
    stalled(&daemon, 1).await;
    // What nobody asked for is as much as the tenant may have: 4 GiB and 2 GiB are usual.
    assert_eq!(alice.used().await, [1, GIB, GIB, 100, 1]);
    assert_eq!(alice.ask("POST", "/v1/sandboxes", json!({})).await.status, 429);
    assert_eq!(alice.build(json!({})).await.code(), "quota");
    let bob = Holder { daemon: &daemon, key: daemon.key("bob", quotas) };
    bob.build(json!({ "recipe": "FROM host\nENV A=1" })).await.expect(202);
    daemon.backend.release(Step::Create);
    assert_eq!(alice.end(&build).await, "failed", "the fake backend runs no command of a build");
    let made = alice.ask("POST", "/v1/sandboxes", json!({})).await.expect(201);
    let refused = alice.build(json!({})).await;
    assert_eq!((refused.status, refused.code().as_str()), (429, "quota"), "by a sandbox, too");
    let path = format!("/v1/sandboxes/{}", made["sandbox"]["id"].as_str().unwrap());
    alice.ask("DELETE", &path, Value::Null).await.expect(204);
    let build = alice.build(json!({ "recipe": "FROM host\nENV A=1" })).await.expect(202);
    assert_eq!(alice.end(&build).await, "ready");
    assert_eq!(alice.used().await, [0; 5], "and one that is done");
    // One that is ended while it is under way.
    daemon.backend.stall(Step::Create, When::Always);
    let build = alice.build(json!({})).await.expect(202);
    stalled(&daemon, 1).await;
    let path = format!("/v1/templates/builds/{}", build["id"].as_str().unwrap());
    let ended = alice.ask("DELETE", &path, Value::Null);
    let (ended, ()) = tokio::join!(ended, async { daemon.backend.release(Step::Create) });
    ended.expect(204);
    assert_eq!(alice.used().await, [0; 5]);
}

#[tokio::test]
async fn every_quota_that_a_sandbox_meets_a_build_meets_in_either_dialect() {
    let daemon = Daemon::new().await.speak_e2b().await;
    let run = json!({ "steps": [{ "type": "RUN", "args": ["true"] }] });
    let none = Quotas::default();
    let large = json!({ "limits": { "max_memory_bytes": 3 * GIB, "max_write_bytes": 3 * GIB } });
    for (name, quotas, asked, status) in [
        ("none", none, json!({}), 202),
        ("one", Quotas { sandboxes: Some(1), execs: Some(1), ..none }, json!({}), 202),
        ("sandboxes", Quotas { sandboxes: Some(0), ..none }, json!({}), 429),
        ("memory", Quotas { memory_bytes: Some(0), ..none }, json!({}), 429),
        ("disk", Quotas { disk_bytes: Some(0), ..none }, json!({}), 429),
        ("cpu", Quotas { cpu_weight: Some(99), ..none }, json!({}), 429),
        ("execs", Quotas { execs: Some(0), ..none }, json!({}), 429),
        // What was asked for by name is held, or nothing is built.
        ("asked", Quotas { memory_bytes: Some(GIB), ..none }, large.clone(), 429),
        ("asked-disk", Quotas { disk_bytes: Some(GIB), ..none }, large.clone(), 429),
        ("enough", Quotas { memory_bytes: Some(3 * GIB), ..none }, large, 202),
    ] {
        let key = daemon.keys().create_for_e2b(name, quotas).unwrap().0;
        let holder = Holder { daemon: &daemon, key };
        let is_usual = asked == json!({});
        // Both dialects are on one port; the native one is asked where the other has no say.
        let native = rest::router(&daemon.api);
        let mut body = json!({ "name": "x", "recipe": RUNS });
        body.as_object_mut().unwrap().extend(asked.as_object().unwrap().clone());
        let headers = [("host", "127.0.0.1:8080"), ("x-api-key", holder.key.as_str())];
        let answer = send(native, "/v1/templates/builds", body, &headers).await;
        assert_eq!(answer.status, status, "{name}: {answer:?}");
        if is_usual {
            let began = Instant::now();
            let by_e2b = loop {
                let answer = holder.build_by_e2b(&run).await;
                // The one before is over soon.
                if answer.status == status || began.elapsed() > Duration::from_secs(10) {
                    break answer;
                }
            };
            assert_eq!(by_e2b.status, status, "{name}: {by_e2b:?}");
        }
    }
}

#[tokio::test]
async fn a_build_that_waits_for_files_counts_until_it_is_given_up() {
    let daemon = Daemon::new().await;
    let one = Quotas { sandboxes: Some(1), ..Quotas::default() };
    let alice = Holder { daemon: &daemon, key: daemon.key("alice", one) };
    let waits = json!({ "recipe": "FROM host\nCOPY a /a", "files": true });
    let build = alice.build(waits.clone()).await.expect(202);
    assert_eq!(build["state"], "waiting");
    assert_eq!(alice.build(waits.clone()).await.code(), "quota");
    let path = format!("/v1/templates/builds/{}", build["id"].as_str().unwrap());
    alice.ask("DELETE", &path, Value::Null).await.expect(204);
    assert_eq!(alice.used().await[0], 0);
    // One whose files are none.
    let build = alice.build(waits.clone()).await.expect(202);
    assert_eq!(alice.used().await[0], 1, "control");
    let path = format!("/v1/templates/builds/{}", build["id"].as_str().unwrap());
    let headers = [("host", "127.0.0.1:8080"), ("x-api-key", alice.key.as_str())];
    let junk = vec![b'x'; 4096];
    let refused = daemon.send(tcp(), "PUT", &format!("{path}/files"), junk, &headers).await;
    assert_ne!(refused.status, 202, "{refused:?}");
    assert_eq!(alice.end(&build).await, "failed");
    assert_eq!(alice.used().await[0], 0);
}

#[tokio::test(start_paused = true)]
async fn a_build_whose_files_never_come_is_given_up_after_an_hour() {
    let daemon = Daemon::new().await;
    let one = Quotas { sandboxes: Some(1), ..Quotas::default() };
    let alice = Holder { daemon: &daemon, key: daemon.key("alice", one) };
    let waits = json!({ "recipe": "FROM host\nCOPY a /a", "files": true });
    let build = alice.build(waits).await.expect(202);
    let path = format!("/v1/templates/builds/{}", build["id"].as_str().unwrap());
    let state = async || alice.ask("GET", &path, Value::Null).await.expect(200)["state"].clone();
    tokio::time::sleep(Duration::from_secs(59 * 60)).await;
    assert_eq!((state().await, alice.used().await[0]), (json!("waiting"), 1));
    tokio::time::sleep(Duration::from_secs(2 * 60)).await;
    assert_eq!((state().await, alice.used().await[0]), (json!("failed"), 0));
}

#[tokio::test]
async fn who_builds_much_does_not_keep_others_from_building() {
    let daemon = Daemon::new().await;
    daemon.backend.stall(Step::Create, When::Always);
    let body = json!({ "name": "x", "recipe": RUNS });
    let mut ids = Vec::new();
    for _ in 0..4 {
        let build =
            daemon.call(ALICE, "POST", "/v1/templates/builds", body.clone()).await.expect(202);
        ids.push(build["id"].as_str().unwrap().to_owned());
    }
    let fifth = daemon.call(ALICE, "POST", "/v1/templates/builds", body).await;
    assert_eq!((fifth.status, fifth.code().as_str()), (429, "quota"));
    stalled(&daemon, 3).await;
    built(&daemon, BOB, "mine").await;
    assert_eq!(daemon.backend.stalled(Step::Create), 3, "control: hers wait all the while");
    daemon.backend.release(Step::Create);
    for id in ids {
        let path = format!("/v1/templates/builds/{id}?wait=true&offset=100");
        while daemon.call(ALICE, "GET", &path, Value::Null).await.expect(200)["state"] == "building"
        {
        }
    }
    built(&daemon, ALICE, "hers").await;
}
