//! What makes no sense has a stable code, a status and a hint, and nothing is made of it.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::Request;
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tower::ServiceExt as _;
use warren::SandboxManagerConfig;

use crate::support::{ALICE, Daemon, echo, read};

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

#[tokio::test]
async fn a_body_that_makes_no_sense_is_refused_with_its_position() {
    let daemon = Daemon::new().await;
    let deep = "[".repeat(100_000);
    let rows: &[(&str, &str, &str)] = &[
        ("{", "invalid_json", "line 1 column 1"),
        ("{\n\"name\": nope}", "invalid_json", "line 2 column"),
        ("{} {}", "invalid_json", "line 1 column 4"),
        ("{\"name\":\"a\"} trailing", "invalid_json", "line 1"),
        (&deep, "invalid_body", "line 1"),
        ("null", "invalid_body", "line 1"),
        ("[]x", "invalid_json", "line 1"),
        ("{\"nope\":1}", "invalid_body", "unknown field `nope`"),
        ("{\"tenant\":\"uid:0\"}", "invalid_body", "unknown field `tenant`"),
        ("{\"limits\":{\"max_memory\":1}}", "invalid_body", "unknown field `max_memory`"),
        ("{\"select\":{\"x\":1}}", "invalid_body", "unknown field `x`"),
        ("{\"name\":1}", "invalid_body", "line 1 column"),
        ("{\"name\":\"a\",\"name\":\"b\"}", "invalid_body", "duplicate field"),
        ("{\"labels\":{\"a\":\"b\",\"a\":\"c\"}}", "invalid_body", "duplicate key `a`"),
        ("{\"environment\":{\"a\":\"b\",\"a\":\"b\"}}", "invalid_body", "duplicate key `a`"),
        ("{\"limits\":{\"max_processes\":-1}}", "invalid_body", "line 1"),
        ("{\"limits\":{\"max_memory_bytes\":18446744073709551616}}", "invalid_body", "line 1"),
        ("{\"limits\":{\"max_memory_bytes\":NaN}}", "invalid_json", "line 1"),
        ("{\"limits\":{\"max_memory_bytes\":1}}", "invalid_spec", "max_memory_bytes"),
        ("{\"limits\":{\"max_processes\":0}}", "invalid_spec", "max_processes"),
        (
            "{\"limits\":{\"max_memory_bytes\":9223372036854775808}}",
            "invalid_spec",
            "max_memory_bytes",
        ),
        ("{\"limits\":{\"max_wall_time_ms\":0}}", "invalid_spec", "max_wall_time_ms"),
        ("{\"limits\":{\"max_wall_time_ms\":-1}}", "invalid_body", "line 1"),
        (
            "{\"limits\":{\"max_wall_time_ms\":9223372036854775808}}",
            "invalid_spec",
            "max_wall_time_ms",
        ),
        ("{\"limits\":{\"cpu_weight\":0}}", "invalid_spec", "cpu_weight"),
        ("{\"limits\":{\"cpu_weight\":0.000000001}}", "invalid_body", "line 1"),
        ("{\"limits\":{\"max_open_files\":0}}", "invalid_spec", "max_open_files"),
        ("{\"creation_timeout_ms\":0}", "invalid_spec", "creation_timeout"),
        ("{\"creation_timeout_ms\":9223372036854775808}", "invalid_spec", "creation_timeout"),
        ("{\"isolation\":\"vm\"}", "invalid_spec", "there is no isolation level `vm`"),
        ("{\"require\":[\"ram\"]}", "invalid_spec", "there is no guarantee `ram`"),
        ("{\"name\":\"a b\"}", "invalid_spec", "name"),
        ("{\"name\":\"-rf\"}", "invalid_spec", "name"),
        ("{\"name\":\"\"}", "invalid_spec", "name"),
        ("{\"name\":\"a\",\"labels\":{\"name\":\"b\"}}", "invalid_spec", "name"),
        ("{\"select\":{\"preferred_id\":\"../x\"}}", "invalid_id", "../x"),
        ("\u{fffe}", "invalid_json", "line 1"),
    ];
    for (body, code, word) in rows {
        let body = body.as_bytes().to_vec();
        let refused = daemon.send(ALICE, "POST", "/v1/sandboxes", body.clone(), &JSON).await;
        let shown = String::from_utf8_lossy(&refused.bytes).into_owned();
        let body = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        assert_eq!((refused.status, refused.code().as_str()), (400, *code), "{body}: {shown}");
        assert!(refused.json()["error"]["message"].as_str().unwrap().contains(word), "{shown}");
    }
    assert_eq!(daemon.backend.counts().created, 0);
}

#[tokio::test]
async fn a_body_beyond_a_mebibyte_is_not_read() {
    let daemon = Daemon::new().await;
    let mut body = b"{\"name\":\"".to_vec();
    body.resize((1 << 20) + 1, b'a');
    for path in ["/v1/sandboxes", "/v1/sandboxes/x/exec", "/v1/sandboxes/x/attach"] {
        let refused = daemon.send(ALICE, "POST", path, body.clone(), &JSON).await;
        assert_eq!((refused.status, refused.code().as_str()), (413, "too_large"), "{path}");
    }
}

#[tokio::test]
async fn an_id_that_is_none_is_refused_at_the_edge() {
    let daemon = Daemon::new().await;
    let long = "a".repeat(129);
    for id in
        ["..", ".", ".a", "-rf", "a%2Fb", "%2e%2e", "a%2eb", "a%00b", "%", "a..%2f", &long, "a:b"]
    {
        for (method, path) in [
            ("GET", format!("/v1/sandboxes/{id}")),
            ("DELETE", format!("/v1/sandboxes/{id}")),
            ("POST", format!("/v1/sandboxes/{id}/exec")),
            ("POST", format!("/v1/sandboxes/{id}/attach")),
            ("GET", format!("/v1/sessions/{id}")),
            ("POST", format!("/v1/sessions/{id}/suspend")),
        ] {
            let refused = daemon.call(ALICE, method, &path, Value::Null).await;
            assert_eq!((refused.status, refused.code().as_str()), (400, "invalid_id"), "{path}");
        }
    }
    let body = json!({ "sandbox_id": "a/b" });
    let refused = daemon.call(ALICE, "PUT", "/v1/default", body).await;
    assert_eq!((refused.status, refused.code().as_str()), (400, "invalid_id"));
    let exact = "a".repeat(128);
    let unknown = daemon.call(ALICE, "GET", &format!("/v1/sandboxes/{exact}"), Value::Null).await;
    assert_eq!(unknown.status, 404, "control: 128 bytes are an id");
}

#[tokio::test]
async fn paths_methods_and_queries_that_there_are_not_are_named() {
    let daemon = Daemon::new().await;
    for (method, path, status, code) in [
        ("GET", "/", 404, "no_route"),
        ("GET", "/v2/sandboxes", 404, "no_route"),
        ("GET", "/v1/sandboxes/a/b/c", 404, "no_route"),
        ("GET", "/v1//sandboxes", 400, "invalid_id"),
        ("GET", "/v1/sandboxes/", 400, "invalid_id"),
        ("PATCH", "/v1/sandboxes", 405, "method_not_allowed"),
        ("PUT", "/v1/sandboxes/x", 405, "method_not_allowed"),
        ("GET", "/v1/sandboxes?nope=1", 400, "invalid_query"),
        ("GET", "/v1/sandboxes?limit=0", 400, "invalid_query"),
        ("GET", "/v1/sandboxes?limit=1001", 400, "invalid_query"),
        ("GET", "/v1/sandboxes?limit=x", 400, "invalid_query"),
        ("GET", "/v1/sandboxes?limit=1&limit=2", 400, "invalid_query"),
        ("GET", "/v1/sandboxes?after=x", 400, "invalid_query"),
        ("GET", "/v1/sandboxes?state=asleep", 400, "invalid_query"),
        ("GET", "/v1/sessions?label=x", 400, "invalid_query"),
    ] {
        let refused = daemon.call(ALICE, method, path, Value::Null).await;
        assert_eq!((refused.status, refused.code().as_str()), (status, code), "{method} {path}");
    }
    for header in [("x-warren-client", "a/b"), ("x-warren-client", ""), ("idempotency-key", "")] {
        let refused = daemon.call_with(ALICE, "POST", "/v1/sandboxes", json!({}), &[header]).await;
        assert_eq!(
            (refused.status, refused.code().as_str()),
            (400, "invalid_header"),
            "{header:?}"
        );
    }
}

#[tokio::test]
async fn what_cannot_be_done_now_says_why() {
    let daemon =
        Daemon::with(SandboxManagerConfig { max_sandboxes: 2, ..Default::default() }).await;
    let (sandbox, session) = daemon.create(ALICE, json!({ "name": "one" })).await;
    let exec = format!("/v1/sandboxes/{sandbox}/exec");
    for (body, status, code) in [
        (json!({ "program": "" }), 400, "invalid_spec"),
        (json!({ "program": "a\u{0}b" }), 400, "invalid_spec"),
        (json!({ "program": "echo", "timeout_ms": 0 }), 400, "invalid_spec"),
        (json!({ "program": "cat", "stdin_base64": "?" }), 400, "invalid_spec"),
        (json!({ "program": "cat", "stdin": "", "stdin_base64": "" }), 400, "invalid_spec"),
        (json!({ "program": "no-such" }), 422, "program_not_found"),
        (json!({}), 400, "invalid_body"),
    ] {
        let refused = daemon.call(ALICE, "POST", &exec, body.clone()).await;
        assert_eq!((refused.status, refused.code().as_str()), (status, code), "{body}");
    }
    let twin = daemon.call(ALICE, "POST", "/v1/sandboxes", json!({ "name": "one" })).await;
    assert_eq!((twin.status, twin.code().as_str()), (409, "already_exists"));

    let attach = format!("/v1/sandboxes/{sandbox}/attach");
    let second = daemon.call(ALICE, "POST", &attach, json!({})).await.expect(200);
    let second = second["session"]["id"].as_str().unwrap().to_owned();
    let suspend = format!("/v1/sessions/{session}/suspend");
    let shared = daemon.call(ALICE, "POST", &suspend, Value::Null).await;
    assert_eq!((shared.status, shared.code().as_str()), (409, "conflict"), "shared and active");
    let path = format!("/v1/sessions/{second}");
    daemon.call(ALICE, "DELETE", &path, Value::Null).await.expect(204);
    daemon.call(ALICE, "POST", &suspend, Value::Null).await.expect(200);
    let refused = daemon.call(ALICE, "POST", &exec, echo()).await;
    assert_eq!((refused.status, refused.code().as_str()), (409, "suspended"));

    let ended = daemon.call(ALICE, "POST", &format!("{path}/detach"), Value::Null).await;
    assert!(matches!(ended.status, 404 | 410), "{ended:?}");

    daemon.create(ALICE, json!({})).await;
    let full = daemon.call(ALICE, "POST", "/v1/sandboxes", json!({})).await;
    assert_eq!((full.status, full.code().as_str()), (503, "capacity"));
    assert!(full.headers.iter().any(|(name, _)| name == "retry-after"));
    let nothing = daemon.call(ALICE, "POST", "/v1/sandboxes/nope/attach", json!({})).await;
    assert_eq!((nothing.status, nothing.code().as_str()), (404, "not_found"));
    let body = json!({ "select": { "backend": "../../bin/sh" } });
    let refused = daemon.call(ALICE, "POST", "/v1/sandboxes", body).await;
    assert_eq!(refused.status, 404, "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn input_that_does_not_come_to_its_end_is_not_waited_for() {
    let daemon = Daemon::new().await;
    let (sandbox, _) = daemon.create(ALICE, json!({})).await;
    let path = format!("/v1/sandboxes/{sandbox}/execs/any/stdin");
    let send = async |rest: Option<Bytes>| {
        let begun = futures_util::stream::iter([Ok::<_, std::io::Error>(Bytes::from("some"))]);
        let rest = async move {
            match rest {
                Some(rest) => Ok(rest),
                None => std::future::pending().await,
            }
        };
        let body = Body::from_stream(begun.chain(futures_util::stream::once(rest)));
        let request = Request::put(&path).extension(ALICE).body(body).unwrap();
        let answer = daemon.router.clone().oneshot(request);
        let answer = tokio::time::timeout(Duration::from_secs(60), answer).await;
        read(answer.expect("an answer in time").unwrap()).await
    };
    let slow = send(None).await;
    assert_eq!((slow.status, slow.code().as_str()), (408, "request_timeout"));
    // Control: what is whole is read, and only then it is found that nobody wants it.
    let whole = send(Some(Bytes::from("more"))).await;
    assert_eq!((whole.status, whole.code().as_str()), (404, "not_found"));
    let much = send(Some(vec![0; 1 << 20].into())).await;
    assert_eq!((much.status, much.code().as_str()), (413, "too_large"));
}
