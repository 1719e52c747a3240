//! Templates over REST.

use serde_json::{Value, json};
use warren_api::keys::Quotas;

use crate::support::{ALICE, BOB, Daemon, ROOT, tcp};

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
    }
}
