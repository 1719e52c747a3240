//! A command in a sandbox of its own.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warren::backend::fake::{Step, When};
use warren_api::keys::Quotas;

use crate::support::{ALICE, Daemon, echo, tcp};

/// Waits until so many sandboxes live: their end is nobody's to wait for.
async fn await_live(daemon: &Daemon, live: u64) {
    let began = Instant::now();
    while daemon.backend.counts().live != live {
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", daemon.backend.counts());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn run(daemon: &Daemon, body: Value) -> crate::support::Answer {
    daemon.call(ALICE, "POST", "/v1/run", body).await
}

#[tokio::test]
async fn it_is_answered_and_nothing_of_it_stays() {
    let daemon = Daemon::new().await;
    let ran = run(&daemon, json!({ "command": echo() })).await.expect(200);
    assert_eq!((&ran["stdout"], &ran["exit_code"]), (&json!("hi\n"), &json!(0)));
    await_live(&daemon, 0).await;
    assert_eq!(daemon.backend.counts().created, 1, "there was one");
    let listed = daemon.call(ALICE, "GET", "/v1/sandboxes", Value::Null).await.expect(200);
    assert_eq!(listed["items"], json!([]));
    let failed = json!({ "command": { "program": "exit", "args": ["3"] } });
    assert_eq!(run(&daemon, failed).await.expect(200)["exit_code"], 3);
    await_live(&daemon, 0).await;
}

#[tokio::test]
async fn what_cannot_be_started_leaves_no_sandbox() {
    let daemon = Daemon::new().await;
    daemon.backend.fail(Step::Exec, When::Nth(1));
    assert!(run(&daemon, json!({ "command": echo() })).await.status >= 400);
    await_live(&daemon, 0).await;
    assert_eq!(daemon.backend.counts().created, 1, "there was one");
}

#[tokio::test]
async fn whoever_hangs_up_ends_it() {
    let daemon = Daemon::new().await;
    let long = json!({ "command": { "program": "sleep", "args": ["600"] } });
    let hung_up = tokio::time::timeout(Duration::from_millis(300), run(&daemon, long)).await;
    assert!(hung_up.is_err(), "it was still at it");
    await_live(&daemon, 0).await;
    assert_eq!(daemon.backend.counts().created, 1, "there was one");
}

#[tokio::test]
async fn what_would_have_to_outlive_it_is_refused() {
    let daemon = Daemon::new().await;
    for sandbox in [
        json!({ "name": "mine" }),
        json!({ "labels": { "name": "mine" } }),
        json!({ "select": { "preferred_id": "sbx-1" } }),
    ] {
        let answer = run(&daemon, json!({ "command": echo(), "sandbox": sandbox })).await;
        assert_eq!((answer.status, answer.code()), (400, "invalid_spec".to_owned()), "{sandbox}");
    }
    let control = json!({ "command": echo(), "sandbox": { "labels": { "a": "b" } } });
    run(&daemon, control).await.expect(200);
    assert_eq!(run(&daemon, json!({ "command": echo(), "x": 1 })).await.status, 400);
    assert_eq!(run(&daemon, json!({})).await.status, 400);
}

#[tokio::test]
async fn it_counts_as_a_sandbox_of_its_tenant() {
    let daemon = Daemon::new().await;
    let key = daemon.key("bob", Quotas { sandboxes: Some(1), ..Quotas::default() });
    let headers = [("host", "127.0.0.1:8080"), ("x-api-key", &*key)];
    let body = json!({ "command": echo() });
    let ask = async |path, body| daemon.call_with(tcp(), "POST", path, body, &headers).await;
    ask("/v1/run", body.clone()).await.expect(200);
    await_live(&daemon, 0).await;
    ask("/v1/sandboxes", json!({})).await.expect(201);
    assert_eq!(ask("/v1/run", body).await.code(), "quota");
    assert_eq!(daemon.backend.counts().live, 1, "the other one");
}
