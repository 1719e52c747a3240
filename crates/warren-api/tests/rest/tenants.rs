//! Who may see what.

use serde_json::{Value, json};
use warren_api::keys::Quotas;

use crate::support::{ALICE, Answer, BOB, Daemon, ROOT, echo, tcp};

/// Every endpoint that names something, with a body that would be taken.
fn named() -> Vec<(&'static str, &'static str, Value)> {
    let none = || Value::Null;
    vec![
        ("GET", "/v1/sandboxes/{sandbox}", none()),
        ("DELETE", "/v1/sandboxes/{sandbox}", none()),
        ("POST", "/v1/sandboxes/{sandbox}/exec", echo()),
        ("POST", "/v1/sandboxes/{sandbox}/attach", json!({})),
        ("GET", "/v1/sandboxes/{sandbox}/execs", none()),
        ("POST", "/v1/sandboxes/{sandbox}/execs", json!({ "command": { "program": "true" } })),
        ("GET", "/v1/sandboxes/{sandbox}/execs/{exec}", none()),
        ("DELETE", "/v1/sandboxes/{sandbox}/execs/{exec}", none()),
        ("GET", "/v1/sandboxes/{sandbox}/execs/{exec}/wait", none()),
        ("POST", "/v1/sandboxes/{sandbox}/execs/{exec}/signal", json!({ "signal": 15 })),
        ("POST", "/v1/sandboxes/{sandbox}/execs/{exec}/kill", none()),
        (
            "POST",
            "/v1/sandboxes/{sandbox}/execs/{exec}/resize",
            json!({ "rows": 24, "columns": 80 }),
        ),
        ("PUT", "/v1/sandboxes/{sandbox}/execs/{exec}/stdin", none()),
        ("GET", "/v1/sandboxes/{sandbox}/execs/{exec}/log", none()),
        ("GET", "/v1/sandboxes/{sandbox}/execs/{exec}/stream", none()),
        ("GET", "/v1/sandboxes/{sandbox}/execs/{exec}/attach", none()),
        ("GET", "/v1/sandboxes/{sandbox}/ports/{port}", none()),
        ("GET", "/v1/sandboxes/{sandbox}/ports/{port}/{path}", none()),
        ("GET", "/v1/sandboxes/{sandbox}/files?path=/x", none()),
        ("PUT", "/v1/sandboxes/{sandbox}/files?path=/x", none()),
        ("PATCH", "/v1/sandboxes/{sandbox}/files?path=/x", none()),
        ("DELETE", "/v1/sandboxes/{sandbox}/files?path=/x", none()),
        ("GET", "/v1/sandboxes/{sandbox}/files/stat?path=/x", none()),
        ("GET", "/v1/sandboxes/{sandbox}/files/list?path=/x", none()),
        ("POST", "/v1/sandboxes/{sandbox}/files/mkdir?path=/x", none()),
        ("POST", "/v1/sandboxes/{sandbox}/files/move?from=/x&to=/y", none()),
        ("GET", "/v1/sandboxes/{sandbox}/files/watch?path=/x", none()),
        ("GET", "/v1/sandboxes/{sandbox}/files/tar?path=/x", none()),
        ("PUT", "/v1/sandboxes/{sandbox}/files/tar?path=/x", none()),
        ("GET", "/v1/sandboxes/{sandbox}/receipt", none()),
        ("POST", "/v1/sandboxes/{sandbox}/verify", none()),
        ("POST", "/v1/sandboxes/{sandbox}/snapshots", json!({ "name": "x" })),
        ("POST", "/v1/sandboxes/{sandbox}/restore", json!({ "snapshot": "x" })),
        ("POST", "/v1/sandboxes/{sandbox}/undo", none()),
        ("POST", "/v1/sandboxes/{sandbox}/fork", json!({ "count": 2 })),
        ("GET", "/v1/sandboxes/{sandbox}/diff", none()),
        // By the id of a sandbox; `snapshots.rs` asks by that of a snapshot.
        ("GET", "/v1/snapshots/{sandbox}", none()),
        ("DELETE", "/v1/snapshots/{sandbox}", none()),
        ("GET", "/v1/snapshots/{sandbox}/export", none()),
        ("POST", "/v1/snapshots/{sandbox}/fork", json!({ "count": 2 })),
        ("GET", "/v1/sandboxes/{sandbox}/shells", none()),
        ("GET", "/v1/sandboxes/{sandbox}/shells/{name}", none()),
        ("DELETE", "/v1/sandboxes/{sandbox}/shells/{name}", none()),
        ("POST", "/v1/sandboxes/{sandbox}/shells/{name}/run", json!({ "command": "true" })),
        ("POST", "/v1/sandboxes/{sandbox}/shells/{name}/stream", json!({ "command": "true" })),
        ("POST", "/v1/sandboxes/{sandbox}/shells/{name}/interrupt", none()),
        ("POST", "/v1/sandboxes", json!({ "select": { "preferred_id": "{sandbox}" } })),
        ("POST", "/v1/sandboxes", json!({ "template": "{sandbox}" })),
        ("POST", "/v1/run", json!({ "command": echo(), "sandbox": { "template": "{sandbox}" } })),
        ("GET", "/v1/templates/{name}", none()),
        ("DELETE", "/v1/templates/{name}", none()),
        ("PUT", "/v1/templates/{name}/tags/{tag}", none()),
        ("DELETE", "/v1/templates/{name}/tags/{tag}", none()),
        ("GET", "/v1/templates/builds/{sandbox}", none()),
        ("DELETE", "/v1/templates/builds/{sandbox}", none()),
        ("PUT", "/v1/templates/builds/{sandbox}/files", none()),
        ("PUT", "/v1/default", json!({ "sandbox_id": "{sandbox}" })),
        ("GET", "/v1/sessions/{session}", none()),
        ("DELETE", "/v1/sessions/{session}", none()),
        ("POST", "/v1/sessions/{session}/attach", none()),
        ("POST", "/v1/sessions/{session}/detach", none()),
        ("POST", "/v1/sessions/{session}/suspend", none()),
        ("POST", "/v1/sessions/{session}/resume", none()),
        ("POST", "/v1/sessions/{session}/release", json!({})),
        ("POST", "/v1/sessions/{session}/release", json!({ "keep_alive": true })),
    ]
}

/// Asks, and puts a placeholder for the id into the answer: the ids differ, nothing else may.
async fn ask(
    daemon: &Daemon,
    (method, path, body): &(&str, &str, Value),
    headers: &[(&str, &str)],
    peer: warren_api::Peer,
    (sandbox, session): (&str, &str),
) -> Answer {
    let fill = |text: &str| {
        let text = text.replace("{sandbox}", sandbox).replace("{session}", session);
        let text = text.replace("{name}", "main").replace("{exec}", "exec-1").replace("{tag}", "t");
        text.replace("{port}", "80").replace("{path}", "a//%ff?b")
    };
    let body = match body {
        Value::Null => Value::Null,
        body => serde_json::from_str(&fill(&body.to_string())).expect("JSON"),
    };
    let mut answer = daemon.call_with(peer, method, &fill(path), body, headers).await;
    let text = String::from_utf8(answer.bytes.to_vec()).expect("UTF-8");
    answer.bytes = text.replace(sandbox, "ID").replace(session, "ID").into();
    answer
}

const UNKNOWN: (&str, &str) =
    ("sbx-00000000-0000-4000-8000-000000000000", "sess-00000000-0000-4000-8000-000000000000");

#[tokio::test]
async fn what_belongs_to_another_is_answered_like_what_does_not_exist() {
    let daemon = Daemon::new().await;
    let host = ("host", "127.0.0.1:8080");
    let bearer = format!("Bearer {}", daemon.key("mallory", Quotas::default()));
    let key = daemon.key("mallory", Quotas::default());
    let e2b = daemon.keys().create_for_e2b("eve", Quotas::default()).unwrap().0;
    // The same name, but for where it comes from.
    let namesake = daemon.key("4000001", Quotas::default());
    let other_client = ("x-warren-client", "other");
    let default_client = ("x-warren-client", "default");
    let strangers: [(_, &[(&str, &str)]); 8] = [
        (BOB, &[]),
        (BOB, &[default_client]),
        (ALICE, &[other_client]),
        (tcp(), &[host, ("authorization", &bearer)]),
        (tcp(), &[host, ("x-api-key", &key), default_client]),
        (tcp(), &[host, ("x-api-key", &e2b)]),
        (tcp(), &[host, ("x-api-key", &namesake)]),
        (tcp(), &[host, ("x-api-key", &namesake), default_client]),
    ];

    for state in ["active", "detached", "suspended"] {
        let (sandbox, session) = daemon.create(ALICE, json!({ "name": state })).await;
        let verb = match state {
            "detached" => Some("detach"),
            "suspended" => Some("suspend"),
            _ => None,
        };
        if let Some(verb) = verb {
            let path = format!("/v1/sessions/{session}/{verb}");
            daemon.call(ALICE, "POST", &path, Value::Null).await.expect(200);
        }
        let ids = (sandbox.as_str(), session.as_str());
        for endpoint in named() {
            for (peer, headers) in strangers {
                let unknown = ask(&daemon, &endpoint, headers, peer, UNKNOWN).await;
                let theirs = ask(&daemon, &endpoint, headers, peer, ids).await;
                assert_eq!(unknown.status, 404, "{endpoint:?}: {unknown:?}");
                assert_eq!(theirs, unknown, "{state} {endpoint:?}");
            }
        }
        assert_eq!(daemon.state_of(ALICE, &session).await, state, "nobody touched it");
    }
}

#[tokio::test]
async fn a_tenants_things_do_not_exist_for_one_whose_name_is_nearly_the_same() {
    let daemon = Daemon::new().await;
    let host = ("host", "127.0.0.1:8080");
    let key = daemon.key("alice", Quotas::default());
    let on_tcp = [host, ("x-api-key", key.as_str())];
    let made = daemon.call_with(tcp(), "POST", "/v1/sandboxes", json!({}), &on_tcp).await;
    let made = made.expect(201);
    let ids = (made["sandbox"]["id"].as_str().unwrap(), made["session"]["id"].as_str().unwrap());
    let near: Vec<String> = ["alic", "alice2", "Alice", "alice.", "alice-default", "tenant"]
        .iter()
        .map(|name| daemon.key(name, Quotas::default()))
        .collect();
    for endpoint in named() {
        for key in &near {
            let headers = [host, ("x-api-key", key.as_str())];
            let unknown = ask(&daemon, &endpoint, &headers, tcp(), UNKNOWN).await;
            let theirs = ask(&daemon, &endpoint, &headers, tcp(), ids).await;
            assert_eq!(unknown.status, 404, "{endpoint:?}: {unknown:?}");
            assert_eq!(theirs, unknown, "{endpoint:?}");
        }
    }
    let path = format!("/v1/sandboxes/{}", ids.0);
    daemon.call_with(tcp(), "GET", &path, Value::Null, &on_tcp).await.expect(200);
}

#[tokio::test]
async fn without_a_good_key_what_exists_is_answered_like_what_does_not() {
    let daemon = Daemon::new().await;
    let host = ("host", "127.0.0.1:8080");
    let (sandbox, session) = daemon.create(ALICE, json!({})).await;
    let ids = (sandbox.as_str(), session.as_str());
    let revoked = daemon.key("gone", Quotas::default());
    let id = daemon.keys().list().unwrap()[0].id.clone();
    daemon.keys().revoke(&id).unwrap();
    let short = &revoked[..revoked.len() - 1];
    let strangers: [&[(&str, &str)]; 5] = [
        &[host],
        &[host, ("x-api-key", &revoked)],
        &[host, ("x-api-key", short)],
        &[host, ("authorization", "Bearer")],
        &[host, ("cookie", &revoked)],
    ];
    for endpoint in named() {
        for headers in strangers {
            let unknown = ask(&daemon, &endpoint, headers, tcp(), UNKNOWN).await;
            let theirs = ask(&daemon, &endpoint, headers, tcp(), ids).await;
            assert_eq!(unknown.status, 401, "{endpoint:?}: {unknown:?}");
            assert_eq!(theirs, unknown, "{endpoint:?}");
        }
    }
}

#[tokio::test]
async fn the_matrix_has_every_endpoint_that_names_something() {
    let daemon = Daemon::new().await;
    let document: Value =
        serde_json::from_str(&warren_api::rest::description(&daemon.api)).unwrap();
    for (path, methods) in document["paths"].as_object().unwrap() {
        if !path.contains('{') {
            continue;
        }
        for method in methods.as_object().unwrap().keys() {
            let known = named().into_iter().any(|(verb, tried, _)| {
                let tried = tried.replace("{sandbox}", "{id}").replace("{session}", "{id}");
                let tried = tried.split('?').next().unwrap_or_default();
                verb.eq_ignore_ascii_case(method) && tried == path
            });
            assert!(known, "{method} {path} is not in the matrix of tenants");
        }
    }
}

#[tokio::test]
async fn lists_numbers_and_the_default_tell_nothing_of_others() {
    let daemon = Daemon::new().await;
    let before = daemon.call(BOB, "GET", "/v1/stats", Value::Null).await;
    let (sandbox, _) = daemon.create(ALICE, json!({})).await;
    let body = json!({ "sandbox_id": sandbox });
    daemon.call(ALICE, "PUT", "/v1/default", body).await.expect(200);
    for path in ["/v1/sandboxes", "/v1/sessions"] {
        let seen = daemon.call(BOB, "GET", path, Value::Null).await.expect(200);
        assert_eq!(seen, json!({ "items": [], "next": null }), "{path}");
        let own = daemon.call(ALICE, "GET", path, Value::Null).await.expect(200);
        assert_eq!(own["items"].as_array().unwrap().len(), 1, "control: {path}");
        let all = daemon.call(ROOT, "GET", path, Value::Null).await.expect(200);
        assert_eq!(all["items"].as_array().unwrap().len(), 1, "root sees all: {path}");
    }
    assert_eq!(daemon.call(BOB, "GET", "/v1/stats", Value::Null).await, before);
    let seen = daemon.call(BOB, "GET", "/v1/default", Value::Null).await.expect(200);
    assert_eq!(seen, json!({ "sandbox_id": null }));
    let ran = daemon.call(BOB, "POST", "/v1/default/exec", echo()).await;
    assert_eq!((ran.status, ran.code().as_str()), (404, "no_default"));
    let ran = daemon.call(ALICE, "POST", "/v1/default/exec", echo()).await.expect(200);
    assert_eq!(ran["stdout"], "hi\n");
}

#[tokio::test]
async fn attaching_finds_out_nothing_of_the_ids_that_others_have() {
    let daemon = Daemon::new().await;
    let create = json!({ "create_if_missing": true });
    let attach = ("POST", "/v1/sandboxes/{sandbox}/attach", create.clone());
    daemon.call(ROOT, "POST", "/v1/sandboxes/web/attach", create).await.expect(200);
    let (sandbox, session) = daemon.create(ALICE, json!({})).await;
    for id in ["web", "sbx-1", "sbx-00000000-0000-1000-8000-000000000000"] {
        let upper = UNKNOWN.0.replace("sbx-0", "sbx-A");
        let guessed = ask(&daemon, &attach, &[], BOB, (id, "-")).await;
        assert_eq!((guessed.status, guessed.code().as_str()), (403, "forbidden"), "{id}");
        let unknown = ask(&daemon, &attach, &[], BOB, ("nope", "-")).await;
        let twin = ask(&daemon, &attach, &[], BOB, (&upper, "-")).await;
        assert_eq!((&guessed, &unknown), (&unknown, &twin), "{id}: there or not");
    }
    // Whoever was told a random id is told no more, and the sandbox stays whose it is.
    let theirs = ask(&daemon, &attach, &[], BOB, (&sandbox, &session)).await;
    assert_eq!((theirs.status, theirs.code().as_str()), (404, "not_found"));
    let own = ask(&daemon, &attach, &[], BOB, UNKNOWN).await.expect(200);
    assert_eq!((&own["sandbox"]["id"], &own["newly_created"]), (&json!("ID"), &json!(true)));
}

#[tokio::test]
async fn s11_a_tenants_default_outlives_the_daemon_and_not_its_sandbox() {
    let daemon = Daemon::new().await;
    let (sandbox, _) = daemon.create(ALICE, json!({})).await;
    let body = json!({ "sandbox_id": sandbox });
    daemon.call(ALICE, "PUT", "/v1/default", body.clone()).await.expect(200);
    let daemon = daemon.restart().await;
    let seen = daemon.call(ALICE, "GET", "/v1/default", Value::Null).await.expect(200);
    assert_eq!(seen, body);
    let seen = daemon.call(BOB, "GET", "/v1/default", Value::Null).await.expect(200);
    assert_eq!(seen["sandbox_id"], Value::Null);
    let path = format!("/v1/sandboxes/{sandbox}");
    daemon.call(ALICE, "DELETE", &path, Value::Null).await.expect(204);
    let daemon = daemon.restart().await;
    // The same id again is another sandbox.
    let create = json!({ "create_if_missing": true });
    daemon.call(ALICE, "POST", &format!("{path}/attach"), create).await.expect(200);
    let seen = daemon.call(ALICE, "GET", "/v1/default", Value::Null).await.expect(200);
    assert_eq!(seen["sandbox_id"], Value::Null);
}

#[tokio::test]
async fn only_the_operator_shows_host_paths_and_lifts_limits() {
    let daemon = Daemon::new().await;
    for body in [
        json!({ "allowed_paths_ro": ["/etc"] }),
        json!({ "allowed_paths_rw": ["/etc"] }),
        json!({ "bind_mounts": [{ "source": "/etc", "target": "/x" }] }),
        json!({ "limits": { "max_processes": null } }),
        json!({ "limits": { "max_memory_bytes": null } }),
    ] {
        let refused = daemon.call(ALICE, "POST", "/v1/sandboxes", body.clone()).await;
        assert_eq!((refused.status, refused.code().as_str()), (403, "forbidden"), "{body}");
        let create = json!({ "create_if_missing": true, "create": body.clone() });
        let path = format!("/v1/sandboxes/{}/attach", UNKNOWN.0);
        let refused = daemon.call(ALICE, "POST", &path, create).await;
        assert_eq!(refused.status, 403, "{body}");
        daemon.call(ROOT, "POST", "/v1/sandboxes", body).await.expect(201);
    }
    assert_eq!(daemon.backend.counts().created, 5, "only the operator's");
}

#[tokio::test]
async fn tcp_takes_a_key_and_nothing_else() {
    let daemon = Daemon::new().await;
    let key = daemon.key("alice", Quotas::default());
    let bearer = format!("Bearer {key}");
    let wrong = format!("Bearer {}", key.replace("wrn_", "wrn-"));
    let host = ("host", "127.0.0.1:8080");
    let get = async |headers: &[(&str, &str)], path: &str| {
        daemon.call_with(tcp(), "GET", path, Value::Null, headers).await
    };
    get(&[host, ("authorization", &bearer)], "/v1/sandboxes").await.expect(200);
    get(&[host, ("x-api-key", &key)], "/v1/sandboxes").await.expect(200);
    for headers in [
        vec![host],
        vec![host, ("authorization", &wrong)],
        vec![host, ("authorization", &key)],
        vec![host, ("authorization", "Bearer ")],
        vec![host, ("authorization", "Basic YTpi")],
        vec![host, ("x-api-key", "")],
        vec![host, ("x-api-key", &key), ("authorization", &bearer)],
    ] {
        for (method, path, body) in named() {
            let path = path.replace("{sandbox}", "x").replace("{session}", "x");
            let refused = daemon.call_with(tcp(), method, &path, body, &headers).await;
            assert_eq!((refused.status, refused.code().as_str()), (401, "unauthenticated"));
        }
        get(&headers, "/v1/health").await.expect(200);
    }
    let in_query = get(&[host], &format!("/v1/sandboxes?key={key}")).await;
    assert_eq!(in_query.status, 401);
    let id = daemon.keys().list().unwrap()[0].id.clone();
    daemon.keys().revoke(&id).unwrap();
    assert_eq!(get(&[host, ("x-api-key", &key)], "/v1/sandboxes").await.status, 401);
}

/// What a client sends that would go on by WebSocket.
const UPGRADE: [(&str, &str); 4] = [
    ("connection", "Upgrade"),
    ("upgrade", "websocket"),
    ("sec-websocket-version", "13"),
    ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
];

/// Every call of the description, as a method and a path that names things of these ids.
fn described(daemon: &Daemon, (sandbox, session): (&str, &str)) -> Vec<(String, String)> {
    let document = warren_api::rest::description(&daemon.api);
    let document: Value = serde_json::from_str(&document).expect("JSON");
    let calls = document["paths"].as_object().expect("paths").iter().flat_map(|(path, methods)| {
        let id = if path.starts_with("/v1/sessions/") { session } else { sandbox };
        let path = path.replace("{id}", id).replace("{port}", "80");
        let path = path.replace(['{', '}'], "");
        let methods = methods.as_object().expect("methods").keys();
        methods.map(|method| (method.to_uppercase(), path.clone())).collect::<Vec<_>>()
    });
    calls.collect()
}

#[tokio::test]
async fn b2_every_call_there_is_but_health_is_refused_without_a_key_that_is_good_here() {
    let (daemon, elsewhere) = (Daemon::new().await, Daemon::new().await);
    let (sandbox, session) = daemon.create(ALICE, json!({})).await;
    let revoked = daemon.key("gone", Quotas::default());
    let id = daemon.keys().list().unwrap()[0].id.clone();
    daemon.keys().revoke(&id).unwrap();
    let key = daemon.key("alice", Quotas::default());
    let foreign = elsewhere.key("alice", Quotas::default());
    let bearer = |key: &str| format!("Bearer {key}");
    let (good, gone, theirs) = (bearer(&key), bearer(&revoked), bearer(&foreign));
    let basic = format!("Basic {key}");
    let host = ("host", "127.0.0.1:8080");
    let strangers: [&[(&str, &str)]; 14] = [
        &[],
        &[("authorization", &gone)],
        &[("x-api-key", &revoked)],
        &[("authorization", &theirs)],
        &[("x-api-key", &foreign)],
        &[("authorization", &key)],
        &[("authorization", &basic)],
        &[("authorization", "Bearer")],
        &[("authorization", "Bearer wrn_x")],
        &[("x-api-key", "")],
        &[("x-api-key", &key[..key.len() - 1])],
        &[("cookie", &key)],
        &[("x-access-token", &key), ("sec-websocket-protocol", &key)],
        &[("x-api-key", &key), ("authorization", &good)],
    ];
    let calls = described(&daemon, (&sandbox, &session));
    assert!(calls.contains(&("POST".into(), "/v1/sandboxes".into())), "control: {calls:?}");
    let mut first: Option<Answer> = None;
    for (method, path) in &calls {
        for given in strangers {
            for upgrade in [&UPGRADE[..], &[]] {
                for query in [String::new(), format!("?key={key}&token={key}&access_token={key}")] {
                    let headers = [&[host], given, upgrade].concat();
                    let path = format!("{path}{query}");
                    let answer = daemon.call_with(tcp(), method, &path, json!({}), &headers).await;
                    if path.starts_with("/v1/health") {
                        assert_eq!(answer.status, 200, "{method} {path}");
                        continue;
                    }
                    assert_eq!(answer.status, 401, "{method} {path} {given:?}: {answer:?}");
                    let first = first.get_or_insert(answer.clone());
                    assert_eq!(answer, *first, "{method} {path} {given:?}: whatever it is");
                }
            }
        }
        // What is not described of a path is not there either, or asks for a key as well.
        for other in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "X"] {
            if path != "/v1/health" && other != *method {
                let answer = daemon.call_with(tcp(), other, path, json!({}), &[host]).await;
                assert!(matches!(answer.status, 401 | 405), "{other} {path}: {answer:?}");
            }
        }
    }
    // Nothing came of any of it, and with a good key each is answered otherwise.
    let path = format!("/v1/sandboxes/{sandbox}");
    daemon.call(ALICE, "GET", &path, Value::Null).await.expect(200);
    let counts = daemon.backend.counts();
    assert_eq!((counts.created, counts.live, counts.execs), (1, 1, 0));
    for (method, path) in &calls {
        let headers = [host, ("x-api-key", &key), ("content-type", "application/json")];
        let answer = daemon.open(tcp(), method, path, b"{}".to_vec(), &headers).await;
        assert_ne!(answer.status(), 401, "control: {method} {path}");
    }
}

#[tokio::test]
async fn a_web_page_cannot_use_a_browser_to_reach_us() {
    let daemon = Daemon::new().await;
    let key = daemon.key("alice", Quotas::default());
    let key = ("x-api-key", key.as_str());
    for headers in [
        vec![key, ("host", "evil.example:8080")],
        vec![key, ("host", "127.0.0.1.evil.example")],
        vec![key],
        vec![key, ("host", "127.0.0.1:8080"), ("origin", "http://evil.example")],
        vec![key, ("host", "127.0.0.1:8080"), ("origin", "null")],
    ] {
        for path in ["/v1/sandboxes", "/v1/health", "/v1/openapi.json"] {
            let refused = daemon.call_with(tcp(), "GET", path, Value::Null, &headers).await;
            assert_eq!((refused.status, refused.code().as_str()), (403, "forbidden"));
            let allows = refused.headers.iter().any(|(name, _)| name.starts_with("access-control"));
            assert!(!allows, "no CORS");
        }
    }
    let form = [("content-type", "text/plain")];
    let sent = daemon.send(ALICE, "POST", "/v1/sandboxes", b"{ }".to_vec(), &form).await;
    assert_eq!((sent.status, sent.code().as_str()), (415, "media_type"));
}

#[tokio::test]
async fn b18_the_id_of_a_session_lets_nobody_in_and_is_dead_once_it_ended() {
    let daemon = Daemon::new().await;
    let host = ("host", "127.0.0.1:8080");
    let own = daemon.key("alice", Quotas::default());
    let other = daemon.key("mallory", Quotas::default());
    let with =
        |key: &str| [("host".to_owned(), host.1.to_owned()), ("x-api-key".into(), key.into())];
    let ask = async |key: Option<&str>, method: &str, path: &str| {
        let headers = key
            .map_or_else(|| vec![(host.0.to_owned(), host.1.to_owned())], |key| with(key).to_vec());
        let headers: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        daemon.call_with(tcp(), method, path, Value::Null, &headers).await
    };
    let made = ask(Some(&own), "POST", "/v1/sandboxes").await.expect(201);
    let session = made["session"]["id"].as_str().unwrap().to_owned();
    let verb = |verb: &str| format!("/v1/sessions/{session}/{verb}");
    ask(Some(&own), "POST", &verb("detach")).await.expect(200);
    // Whoever overheard the id, or guesses, is told what it would be told of any other.
    for (key, status) in [(None, 401), (Some("wrn_x"), 401), (Some(other.as_str()), 404)] {
        let overheard = ask(key, "POST", &verb("attach")).await;
        let guessed = ask(key, "POST", &format!("/v1/sessions/{}/attach", UNKNOWN.1)).await;
        assert_eq!(overheard.status, status, "{key:?}");
        let told =
            String::from_utf8(overheard.bytes.to_vec()).unwrap().replace(&session, UNKNOWN.1);
        assert_eq!(told.as_bytes(), &guessed.bytes[..], "{key:?}");
    }
    ask(Some(&own), "POST", &verb("attach")).await.expect(200);
    ask(Some(&own), "DELETE", &format!("/v1/sessions/{session}")).await.expect(204);
    for stale in ["attach", "resume", "detach"] {
        let refused = ask(Some(&own), "POST", &verb(stale)).await;
        assert!(matches!(refused.status, 404 | 409 | 410), "{stale}: {refused:?}");
    }
    // Nor does it lead to what its owner made next, and a key that was taken back leads nowhere.
    let next = ask(Some(&own), "POST", "/v1/sandboxes").await.expect(201);
    assert_ne!(next["session"]["id"], session);
    let id =
        daemon.keys().list().unwrap().into_iter().find(|key| key.tenant == "alice").unwrap().id;
    daemon.keys().revoke(&id).unwrap();
    let path = format!("/v1/sessions/{}/attach", next["session"]["id"].as_str().unwrap());
    assert_eq!(ask(Some(&own), "POST", &path).await.status, 401);
}
