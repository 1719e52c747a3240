//! Quotas hold under any concurrency.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio_util::task::TaskTracker;
use warren::backend::fake::{Step, When};
use warren::{SandboxManagerConfig, SessionTimeouts};
use warren_api::keys::Quotas;

use crate::support::{Daemon, tcp};

async fn call(daemon: &Daemon, key: &str, method: &str, path: &str, body: Value) -> (u16, Value) {
    let headers = [("host", "127.0.0.1:8080"), ("x-api-key", key)];
    let answer = daemon.call_with(tcp(), method, path, body, &headers).await;
    let body = if answer.bytes.is_empty() { Value::Null } else { answer.json() };
    (answer.status, body)
}

async fn create(daemon: &Daemon, key: &str, body: Value) -> (u16, Value) {
    call(daemon, key, "POST", "/v1/sandboxes", body).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_a_thousand_creates_at_once_exactly_as_many_succeed_as_the_quota_says() {
    let daemon = Arc::new(Daemon::new().await);
    let key = daemon.key("alice", Quotas { sandboxes: Some(10), ..Quotas::default() });
    // Nobody is served before everybody has asked.
    daemon.backend.stall(Step::Create, When::Always);
    let tasks = TaskTracker::new();
    let handles: Vec<_> = (0..1_000)
        .map(|_| {
            let (daemon, key) = (Arc::clone(&daemon), key.clone());
            tasks.spawn(async move { create(&daemon, &key, json!({})).await })
        })
        .collect();
    let began = Instant::now();
    while tasks.len() > 10 {
        assert!(began.elapsed() < Duration::from_secs(30), "{} still ask", tasks.len());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    daemon.backend.release(Step::Create);
    let (mut made, mut refused) = (Vec::new(), 0);
    for handle in handles {
        match handle.await.unwrap() {
            (201, body) => made.push(body["sandbox"]["id"].as_str().unwrap().to_owned()),
            (429, body) => {
                assert_eq!(body["error"]["code"], "quota");
                refused += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((made.len(), refused), (10, 990));
    assert_eq!(daemon.backend.counts().live, 10);
    let path = format!("/v1/sandboxes/{}", made[0]);
    assert_eq!(call(&daemon, &key, "DELETE", &path, Value::Null).await.0, 204);
    assert_eq!(create(&daemon, &key, json!({})).await.0, 201, "one was given back");
    assert_eq!(create(&daemon, &key, json!({})).await.0, 429);
    let bob = daemon.key("bob", Quotas::default());
    assert_eq!(create(&daemon, &bob, json!({})).await.0, 201, "another tenant");
}

#[tokio::test]
async fn memory_counts_by_what_each_sandbox_may_use() {
    let daemon = Daemon::new().await;
    let quotas = Quotas { memory_bytes: Some(1 << 30), ..Quotas::default() };
    let key = daemon.key("alice", quotas);
    let of = |mebibytes: u64| json!({ "limits": { "max_memory_bytes": mebibytes << 20 } });
    assert_eq!(create(&daemon, &key, of(600)).await.0, 201);
    assert_eq!(create(&daemon, &key, of(600)).await.0, 429);
    assert_eq!(create(&daemon, &key, of(424)).await.0, 201);
    assert_eq!(create(&daemon, &key, of(1)).await.0, 429);
}

#[tokio::test]
async fn a_failed_create_gives_its_place_back() {
    let daemon = Daemon::new().await;
    let key = daemon.key("alice", Quotas { sandboxes: Some(1), ..Quotas::default() });
    daemon.backend.fail(Step::Create, When::Nth(1));
    assert_eq!(create(&daemon, &key, json!({})).await.0, 500);
    assert_eq!(create(&daemon, &key, json!({})).await.0, 201);
    assert_eq!(create(&daemon, &key, json!({})).await.0, 429);
    let attach = "/v1/sandboxes/sbx-00000000-0000-4000-8000-000000000000/attach";
    let body = json!({ "create_if_missing": true });
    assert_eq!(call(&daemon, &key, "POST", attach, body).await.0, 429, "by whichever way");
}

#[tokio::test]
async fn a_sandbox_that_timed_out_no_longer_counts() {
    let default_timeouts =
        SessionTimeouts { idle_timeout: Duration::from_millis(20), ..Default::default() };
    let cleanup_interval = Duration::from_millis(10);
    let config = SandboxManagerConfig { default_timeouts, cleanup_interval, ..Default::default() };
    let daemon = Daemon::with(config).await;
    let key = daemon.key("alice", Quotas { sandboxes: Some(1), ..Quotas::default() });
    assert_eq!(create(&daemon, &key, json!({})).await.0, 201);
    while daemon.backend.counts().live > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(create(&daemon, &key, json!({})).await.0, 201);
}

#[tokio::test]
async fn commands_in_flight_are_bounded() {
    let daemon = Daemon::new().await;
    let key = daemon.key("alice", Quotas { execs: Some(1), ..Quotas::default() });
    let (_, made) = create(&daemon, &key, json!({})).await;
    let path = format!("/v1/sandboxes/{}/exec", made["sandbox"]["id"].as_str().unwrap());
    daemon.backend.stall(Step::Exec, When::Nth(1));
    let run = || call(&daemon, &key, "POST", &path, json!({ "program": "true" }));
    let second = async {
        while daemon.backend.stalled(Step::Exec) == 0 {
            tokio::task::yield_now().await;
        }
        let second = run().await;
        daemon.backend.release(Step::Exec);
        second
    };
    let (first, second) = tokio::join!(run(), second);
    assert_eq!((first.0, second.0), (200, 429));
    assert_eq!(run().await.0, 200);
}
