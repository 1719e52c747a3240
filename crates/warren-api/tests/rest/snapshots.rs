//! Snapshots, forks and undo over REST.

use serde_json::{Value, json};
use warren::{Importer, SandboxManager as _};
use warren_api::Peer;
use warren_api::keys::Quotas;

use crate::support::{ALICE, BOB, Daemon, ROOT, tcp};

async fn run(daemon: &Daemon, sandbox: &str, script: &str) -> String {
    let body = json!({ "program": "sh", "args": ["-c", script] });
    let path = format!("/v1/sandboxes/{sandbox}/exec");
    let ran = daemon.call(ALICE, "POST", &path, body).await.expect(200);
    ran["stdout"].as_str().expect("text").trim_end().to_owned()
}

async fn post(daemon: &Daemon, peer: Peer, path: &str, body: Value) -> (u16, Value) {
    let answer = daemon.call(peer, "POST", path, body).await;
    (answer.status, answer.json())
}

#[tokio::test]
async fn a_sandbox_is_saved_forked_restored_and_undone() {
    let daemon = Daemon::new().await;
    let (id, _) = daemon.create(ALICE, json!({ "name": "origin", "labels": { "k": "v" } })).await;
    let at = |what: &str| format!("/v1/sandboxes/{id}/{what}");
    run(&daemon, &id, "write one").await;
    let body = json!({ "name": "first", "labels": { "a": "b" }, "keep_seconds": 3600 });
    let (status, saved) = post(&daemon, ALICE, &at("snapshots"), body).await;
    assert_eq!(
        (status, &saved["name"], &saved["savepoint"]),
        (201, &json!("first"), &json!(false))
    );
    assert_eq!((&saved["sandbox_id"], &saved["bytes"]), (&json!(id), &json!(3)));
    assert!(saved["expires_at"].is_string() && saved["layers"][0].as_str().unwrap().len() == 71);
    run(&daemon, &id, "write two").await;
    let (status, made) = post(&daemon, ALICE, &at("fork"), json!({ "count": 2 })).await;
    assert_eq!((status, made["items"].as_array().unwrap().len()), (201, 2));
    for item in made["items"].as_array().unwrap() {
        assert_eq!(run(&daemon, item["sandbox"]["id"].as_str().unwrap(), "read").await, "two");
        assert_eq!(
            (&item["sandbox"]["labels"]["k"], &item["sandbox"]["name"]),
            (&json!("v"), &Value::Null)
        );
    }
    let (status, back) = post(&daemon, ALICE, &at("restore"), json!({ "snapshot": "first" })).await;
    assert_eq!((status, &back["id"]), (200, &saved["id"]));
    assert_eq!(run(&daemon, &id, "read").await, "one");
    let (status, _) = post(&daemon, ALICE, &at("snapshots"), json!({ "savepoint": true })).await;
    assert_eq!(status, 201);
    run(&daemon, &id, "write three").await;
    assert_eq!(post(&daemon, ALICE, &at("undo"), Value::Null).await.0, 200);
    assert_eq!(run(&daemon, &id, "read").await, "one");
    assert_eq!(post(&daemon, ALICE, &at("undo"), Value::Null).await.0, 409);
    let path = "/v1/snapshots/first/fork";
    let (status, made) = post(&daemon, ALICE, path, json!({ "labels": { "x": "y" } })).await;
    assert_eq!((status, &made["items"][0]["sandbox"]["labels"]["x"]), (201, &json!("y")));
    let listed =
        daemon.call(ALICE, "GET", "/v1/snapshots?label=a=b", Value::Null).await.expect(200);
    assert_eq!(listed["items"].as_array().unwrap().len(), 1);
    daemon.call(ALICE, "GET", "/v1/snapshots/first", Value::Null).await.expect(200);
    daemon.call(ALICE, "DELETE", "/v1/snapshots/first", Value::Null).await.expect(204);
    assert_eq!(daemon.call(ALICE, "GET", "/v1/snapshots/first", Value::Null).await.status, 404);
}

#[tokio::test]
async fn a_snapshot_moves_as_one_file_that_is_checked_as_it_comes() {
    let daemon = Daemon::new().await;
    let (id, _) = daemon.create(ALICE, json!({})).await;
    run(&daemon, &id, "write moved").await;
    post(&daemon, ALICE, &format!("/v1/sandboxes/{id}/snapshots"), json!({ "name": "s" })).await;
    let file = daemon.call(ALICE, "GET", "/v1/snapshots/s/export", Value::Null).await;
    assert_eq!(file.status, 200);
    let kind = [("content-type", "application/zstd")];
    let send = async |bytes: &[u8], path: &str| {
        daemon.send(BOB, "POST", path, bytes.to_vec(), &kind).await
    };
    let made = send(&file.bytes, "/v1/snapshots?name=theirs").await.expect(201);
    assert_eq!((&made["name"], &made["bytes"]), (&json!("theirs"), &json!(5)));
    let forked = daemon.call(BOB, "POST", "/v1/snapshots/theirs/fork", json!({})).await.expect(201);
    let path =
        format!("/v1/sandboxes/{}/exec", forked["items"][0]["sandbox"]["id"].as_str().unwrap());
    let body = json!({ "program": "sh", "args": ["-c", "read"] });
    let ran = daemon.call(BOB, "POST", &path, body).await.expect(200);
    assert_eq!(ran["stdout"], "moved\n");
    assert_eq!(send(&file.bytes, "/v1/snapshots?name=theirs").await.status, 409);
    let mut broken = file.bytes.to_vec();
    let middle = broken.len() / 2;
    broken[middle] ^= 1;
    for bad in [&broken[..], &file.bytes[..middle], b"", b"nonsense"] {
        let refused = send(bad, "/v1/snapshots?name=bad").await;
        assert_eq!((refused.status, refused.code().as_str()), (400, "invalid_spec"));
    }
}

/// What a sandbox says of itself moves along with its files, and whoever sends it may have written it.
#[tokio::test]
async fn what_only_the_operator_may_ask_for_does_not_come_in_by_an_import_or_a_fork() {
    let daemon = Daemon::new().await;
    let kind = [("content-type", "application/zstd")];
    for (name, body) in [
        ("harmless", json!({})),
        ("without-an-end", json!({ "limits": { "max_cpu_time_ms": null } })),
        ("shown", json!({ "allowed_paths_ro": ["/etc"] })),
        ("shown-to-write", json!({ "allowed_paths_rw": ["/etc"] })),
        (
            "bound",
            json!({ "bind_mounts": [{ "source": "/etc", "target": "/x", "readonly": true }] }),
        ),
        ("boundless", json!({ "limits": { "max_memory_bytes": null } })),
        ("endless", json!({ "limits": { "max_write_bytes": null } })),
        ("countless", json!({ "limits": { "max_processes": null } })),
    ] {
        let allowed = ["harmless", "without-an-end"].contains(&name);
        let (id, _) = daemon.create(ROOT, body).await;
        let path = format!("/v1/sandboxes/{id}/snapshots");
        post(&daemon, ROOT, &path, json!({ "name": name })).await;
        let path = format!("/v1/snapshots/{name}/export");
        let file = daemon.call(ROOT, "GET", &path, Value::Null).await.bytes.to_vec();
        let send = async |peer, name: &str| {
            let path = format!("/v1/snapshots?name={name}");
            daemon.send(peer, "POST", &path, file.clone(), &kind).await
        };
        send(ROOT, &format!("{name}-again")).await.expect(201);

        let sent = send(ALICE, name).await;
        let found = daemon.call(ALICE, "GET", &format!("/v1/snapshots/{name}"), Value::Null).await;
        if allowed {
            assert_eq!((sent.status, found.status), (201, 200), "{name}: control");
        } else {
            assert_eq!((sent.status, sent.code().as_str()), (400, "invalid_spec"), "{name}");
            assert_eq!(found.status, 404, "{name}: nothing of it was kept");
        }

        // One that came in before that was looked at.
        let (old, from) = (format!("{name}-old"), Box::new(std::io::Cursor::new(file.clone())));
        let owner = "uid:4000001/default";
        let imported =
            daemon.manager.import_snapshot(owner, Some(old.clone()), Importer::Operator, from);
        imported.await.expect("an import");
        let fork = format!("/v1/snapshots/{old}/fork");
        let forked = daemon.call(ALICE, "POST", &fork, json!({})).await;
        if allowed {
            assert_eq!(forked.status, 201, "{name}: control");
        } else {
            assert_eq!((forked.status, forked.code().as_str()), (403, "forbidden"), "{name}");
        }
    }
}

#[tokio::test]
async fn the_same_key_finds_the_same_snapshot_and_the_same_fork() {
    let daemon = Daemon::new().await;
    let (id, _) = daemon.create(ALICE, json!({})).await;
    let key = [("idempotency-key", "k1")];
    for (path, other) in [("snapshots", "fork"), ("fork", "snapshots")] {
        let path = format!("/v1/sandboxes/{id}/{path}");
        let key = [("idempotency-key", other)];
        let first = daemon.call_with(ALICE, "POST", &path, json!({}), &key).await.expect(201);
        let again = daemon.call_with(ALICE, "POST", &path, json!({}), &key).await.expect(201);
        assert_eq!(first, again);
    }
    let path = format!("/v1/sandboxes/{id}/snapshots");
    let first = daemon.call_with(ALICE, "POST", &path, json!({}), &key).await;
    assert_eq!(first.status, 201);
    let elsewhere = format!("/v1/sandboxes/{id}/fork");
    let refused = daemon.call_with(ALICE, "POST", &elsewhere, json!({}), &key).await;
    assert_eq!(refused.status, 409, "the same key is not for something else");
}

#[tokio::test]
async fn what_cannot_be_is_refused_with_a_hint() {
    let daemon = Daemon::new().await;
    let (id, session) = daemon.create(ALICE, json!({})).await;
    let at = |what: &str| format!("/v1/sandboxes/{id}/{what}");
    post(&daemon, ALICE, &at("snapshots"), json!({ "name": "taken" })).await;
    for (path, body, status, code) in [
        ("snapshots", json!({ "name": "taken" }), 409, "already_exists"),
        ("snapshots", json!({ "name": "../x" }), 400, "invalid_spec"),
        ("snapshots", json!({ "title": "x" }), 400, "invalid_body"),
        ("fork", json!({ "count": 0 }), 400, "invalid_spec"),
        ("fork", json!({ "count": 5000 }), 400, "invalid_spec"),
        ("fork", json!({ "labels": { "name": "x" } }), 400, "invalid_spec"),
        ("restore", json!({ "snapshot": "nope" }), 404, "not_found"),
        ("undo", Value::Null, 409, "conflict"),
    ] {
        let refused = daemon.call(ALICE, "POST", &at(path), body.clone()).await;
        assert_eq!((refused.status, refused.code().as_str()), (status, code), "{path} {body}");
    }
    let refused = daemon.call(ALICE, "GET", &at("diff?patch=maybe"), Value::Null).await;
    assert_eq!((refused.status, refused.code().as_str()), (400, "invalid_query"));
    daemon
        .call(ALICE, "POST", &format!("/v1/sessions/{session}/suspend"), Value::Null)
        .await
        .expect(200);
    let refused = daemon.call(ALICE, "POST", &at("restore"), json!({ "snapshot": "taken" })).await;
    assert_eq!((refused.status, refused.code().as_str()), (409, "suspended"));
    assert_eq!(
        post(&daemon, ALICE, &at("snapshots"), json!({})).await.0,
        201,
        "a suspended one too"
    );
}

#[tokio::test]
async fn another_tenants_snapshots_do_not_exist_and_quotas_hold_for_forks() {
    let daemon = Daemon::new().await;
    let (id, _) = daemon.create(ALICE, json!({})).await;
    let (_, saved) =
        post(&daemon, ALICE, &format!("/v1/sandboxes/{id}/snapshots"), json!({ "name": "mine" }))
            .await;
    let (own, _) = daemon.create(BOB, json!({})).await;
    let known = saved["id"].as_str().unwrap();
    let unknown = "snap-00000000-0000-4000-8000-000000000000";
    for (method, path, body) in [
        ("GET", "/v1/snapshots/@", Value::Null),
        ("DELETE", "/v1/snapshots/@", Value::Null),
        ("GET", "/v1/snapshots/@/export", Value::Null),
        ("POST", "/v1/snapshots/@/fork", json!({})),
        ("POST", "/v1/sandboxes/OWN/restore", json!({ "snapshot": "@" })),
        ("GET", "/v1/sandboxes/OWN/diff?since=@", Value::Null),
    ] {
        let ask = async |id: &str| {
            let path = path.replace('@', id).replace("OWN", &own);
            let body = serde_json::from_str(&body.to_string().replace('@', id)).unwrap();
            let mut answer = daemon.call(BOB, method, &path, body).await;
            answer.bytes =
                String::from_utf8_lossy(&answer.bytes).replace(id, "ID").into_bytes().into();
            answer
        };
        let theirs = ask(known).await;
        assert_eq!((theirs.status, &theirs), (404, &ask(unknown).await), "{method} {path}");
        assert_eq!(ask("mine").await.status, 404, "by its name neither");
    }
    let none = daemon.call(BOB, "GET", "/v1/snapshots", Value::Null).await.expect(200);
    assert_eq!(none["items"], json!([]));

    let key = daemon.key("carol", Quotas { sandboxes: Some(3), ..Quotas::default() });
    let headers = [("host", "127.0.0.1:8080"), ("x-api-key", key.as_str())];
    let made =
        daemon.call_with(tcp(), "POST", "/v1/sandboxes", json!({}), &headers).await.expect(201);
    let path = format!("/v1/sandboxes/{}/fork", made["sandbox"]["id"].as_str().unwrap());
    let refused = daemon.call_with(tcp(), "POST", &path, json!({ "count": 3 }), &headers).await;
    assert_eq!((refused.status, refused.code().as_str()), (429, "quota"));
    let body = json!({ "count": 3, "partial": true });
    let made = daemon.call_with(tcp(), "POST", &path, body, &headers).await.expect(201);
    assert_eq!(made["items"].as_array().unwrap().len(), 2);
}
