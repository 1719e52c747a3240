//! Quotas hold under any concurrency.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio_util::task::TaskTracker;
use warren::backend::fake::{Step, When};
use warren::{SandboxManagerConfig, SessionTimeouts};
use warren_api::keys::Quotas;

use crate::support::{Daemon, ROOT, tcp};

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
async fn a_fork_counts_by_what_its_origin_may_use() {
    let daemon = Daemon::new().await;
    let all = Quotas {
        memory_bytes: Some(2 << 30),
        disk_bytes: Some(2 << 30),
        cpu_weight: Some(600),
        ..Quotas::default()
    };
    for (what, limits) in [
        ("nothing", json!({})),
        ("memory", json!({ "max_memory_bytes": 1_100_u64 << 20 })),
        ("disk", json!({ "max_write_bytes": 1_100_u64 << 20 })),
        ("cpu", json!({ "cpu_weight": 400 })),
    ] {
        let key = daemon.key(what, all);
        let (status, made) = create(&daemon, &key, json!({ "limits": limits })).await;
        assert_eq!(status, 201, "{what}");
        let id = made["sandbox"]["id"].as_str().unwrap();
        let save = format!("/v1/sandboxes/{id}/snapshots");
        assert_eq!(call(&daemon, &key, "POST", &save, json!({ "name": "s" })).await.0, 201);
        // One of the kind is half of it and more, unless it is the usual.
        let wanted = if what == "nothing" { 201 } else { 429 };
        for path in [format!("/v1/sandboxes/{id}/fork"), "/v1/snapshots/s/fork".to_owned()] {
            let (status, _) = call(&daemon, &key, "POST", &path, json!({})).await;
            assert_eq!(status, wanted, "{what}: {path}");
        }
    }
}

#[tokio::test]
async fn whoever_joins_a_sandbox_has_it_count_as_before() {
    let daemon = Daemon::new().await;
    let key = daemon.key("alice", Quotas { memory_bytes: Some(1 << 30), ..Quotas::default() });
    let of = |mebibytes: u64| json!({ "limits": { "max_memory_bytes": mebibytes << 20 } });
    let (status, made) = create(&daemon, &key, of(800)).await;
    assert_eq!(status, 201);
    let id = made["sandbox"]["id"].as_str().unwrap();
    let joined = json!({ "select": { "preferred_id": id }, "limits": of(1)["limits"] });
    let (status, again) = create(&daemon, &key, joined).await;
    assert_eq!((status, &again["sandbox"]["id"]), (201, &json!(id)), "control: it is joined");
    assert_eq!(create(&daemon, &key, of(300)).await.0, 429);
    assert_eq!(create(&daemon, &key, of(200)).await.0, 201, "control: there is so much");
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

#[tokio::test]
async fn disk_and_shares_of_the_cpu_count_by_what_each_sandbox_may_use() {
    let daemon = Daemon::new().await;
    let quotas = Quotas { disk_bytes: Some(300 << 20), cpu_weight: Some(250), ..Quotas::default() };
    let key = daemon.key("alice", quotas);
    let of = |mebibytes: u64, weight: u64| json!({ "limits": { "max_write_bytes": mebibytes << 20, "cpu_weight": weight } });
    assert_eq!(create(&daemon, &key, of(200, 1)).await.0, 201);
    let (status, refused) = create(&daemon, &key, of(101, 1)).await;
    assert_eq!((status, &refused["error"]["code"]), (429, &json!("quota")));
    assert!(refused["error"]["message"].as_str().unwrap().contains("bytes to be written"));
    assert_eq!(create(&daemon, &key, of(1, 250)).await.0, 429);
    assert_eq!(create(&daemon, &key, of(1, 249)).await.0, 201);
    let bob = daemon.key("bob", quotas);
    assert_eq!(create(&daemon, &bob, of(300, 250)).await.0, 201, "another tenant's");
}

#[tokio::test]
async fn s10_what_counts_is_derived_anew_after_a_restart() {
    let daemon = Daemon::new().await;
    let quotas = Quotas {
        sandboxes: Some(3),
        memory_bytes: Some(1 << 30),
        disk_bytes: Some(200 << 20),
        cpu_weight: Some(200),
        ..Quotas::default()
    };
    let key = daemon.key("alice", quotas);
    assert_eq!(create(&daemon, &key, json!({})).await.0, 201);
    let (_, before) = call(&daemon, &key, "GET", "/v1/quotas", Value::Null).await;
    let daemon = daemon.restart().await;
    let (_, after) = call(&daemon, &key, "GET", "/v1/quotas", Value::Null).await;
    assert_eq!(after, before);
    assert_eq!(
        after["items"][0]["used"],
        json!({
            "sandboxes": 1, "memory_bytes": 512 << 20, "cpu_weight": 100, "disk_bytes": 100 << 20,
            "snapshots": 0, "execs": 0, "streams": 0, "requests": 1,
        })
    );
    assert_eq!(after["items"][0]["quotas"]["cpu_weight"], 200);
    assert_eq!(create(&daemon, &key, json!({})).await.0, 201);
    assert_eq!(create(&daemon, &key, json!({})).await.0, 429, "the first one counts still");
}

#[tokio::test]
async fn requests_past_their_rate_are_told_when_to_come_again() {
    let daemon = Daemon::new().await;
    let slow = Quotas { requests_per_second: Some(5), ..Quotas::default() };
    let (alice, bob) = (daemon.key("alice", slow), daemon.key("bob", Quotas::default()));
    let headers = [("host", "127.0.0.1:8080"), ("x-api-key", alice.as_str())];
    let mut refused = None;
    for _ in 0..50 {
        let answer = daemon.call_with(tcp(), "GET", "/v1/stats", Value::Null, &headers).await;
        if answer.status != 200 {
            refused = Some(answer);
            break;
        }
    }
    let refused = refused.expect("fifty at once are too many");
    assert_eq!((refused.status, refused.code().as_str()), (429, "rate"));
    assert!(refused.headers.contains(&("retry-after".into(), "1".into())), "{refused:?}");
    assert_eq!(call(&daemon, &bob, "GET", "/v1/stats", Value::Null).await.0, 200, "another's");
    // Nor does a second key of the same tenant give more.
    let second = daemon.key("alice", slow);
    assert_eq!(call(&daemon, &second, "GET", "/v1/stats", Value::Null).await.0, 429);
}

#[tokio::test]
async fn streams_are_bounded_and_given_back_when_they_are_left() {
    let daemon = Daemon::new().await;
    let key = daemon.key("alice", Quotas { streams: Some(2), ..Quotas::default() });
    let headers = [("host", "127.0.0.1:8080"), ("x-api-key", key.as_str())];
    let follow = || daemon.open(tcp(), "GET", "/v1/events", Vec::new(), &headers);
    let (first, second) = (follow().await, follow().await);
    assert_eq!((first.status().as_u16(), second.status().as_u16()), (200, 200));
    let third = follow().await;
    assert_eq!(third.status().as_u16(), 429);
    assert!(third.headers().contains_key("retry-after"));
    assert_eq!(call(&daemon, &key, "GET", "/v1/stats", Value::Null).await.0, 200, "no stream");
    let (_, used) = call(&daemon, &key, "GET", "/v1/quotas", Value::Null).await;
    assert_eq!(used["items"][0]["used"]["streams"], 2);
    drop(first);
    assert_eq!(follow().await.status().as_u16(), 200);
    drop(second);
}

#[tokio::test]
async fn what_is_used_is_shown_to_whom_it_belongs_and_to_the_operator() {
    let daemon = Daemon::new().await;
    let (alice, bob) =
        (daemon.key("alice", Quotas::default()), daemon.key("bob", Quotas::default()));
    assert_eq!(create(&daemon, &alice, json!({})).await.0, 201);
    let tenants = |shown: &Value| -> Vec<String> {
        let items = shown["items"].as_array().unwrap();
        items.iter().map(|item| item["tenant"].as_str().unwrap().to_owned()).collect()
    };
    let (_, own) = call(&daemon, &bob, "GET", "/v1/quotas", Value::Null).await;
    assert_eq!(tenants(&own), ["tenant:bob"]);
    assert_eq!(own["items"][0]["used"]["sandboxes"], 0);
    let all = daemon.call(ROOT, "GET", "/v1/quotas", Value::Null).await.expect(200);
    assert!(tenants(&all).contains(&"tenant:alice".to_owned()), "{all}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_snapshots_at_once_exactly_as_many_are_kept_as_the_quota_says() {
    let daemon = Arc::new(Daemon::new().await);
    let few = Quotas { snapshots: Some(5), ..Quotas::default() };
    let (alice, bob) = (daemon.key("alice", few), daemon.key("bob", few));
    let (_, made) = create(&daemon, &alice, json!({})).await;
    let path = format!("/v1/sandboxes/{}/snapshots", made["sandbox"]["id"].as_str().unwrap());
    let save = async |body: Value| call(&daemon, &alice, "POST", &path, body).await;
    assert_eq!(save(json!({ "name": "a" })).await.0, 201);
    assert_eq!(save(json!({ "name": "a" })).await.0, 409, "what fails takes no place");
    let tasks = TaskTracker::new();
    let handles: Vec<_> = (0..20)
        .map(|_| {
            let (daemon, key, path) = (Arc::clone(&daemon), alice.clone(), path.clone());
            tasks.spawn(async move { call(&daemon, &key, "POST", &path, json!({})).await })
        })
        .collect();
    let (mut kept, mut refused) = (Vec::new(), 0);
    for handle in handles {
        match handle.await.unwrap() {
            (201, body) => kept.push(body["id"].as_str().unwrap().to_owned()),
            (429, body) => {
                assert_eq!(body["error"]["code"], "quota");
                refused += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((kept.len(), refused), (4, 16));

    // However it would come to be, after a restart too.
    drop(tasks);
    let daemon = Arc::into_inner(daemon).expect("nobody else has it").restart().await;
    let call = async |key: &str, method: &str, path: &str, body: Value| {
        call(&daemon, key, method, path, body).await
    };
    let (_, shown) = call(&alice, "GET", "/v1/quotas", Value::Null).await;
    let used = |shown: &Value| shown["items"][0]["used"]["snapshots"].clone();
    assert_eq!((used(&shown), &shown["items"][0]["quotas"]["snapshots"]), (json!(5), &json!(5)));
    let exec = path.replace("/snapshots", "/exec?savepoint=true");
    let saving = json!({ "program": "sh", "args": ["-c", "read"] });
    for (path, body) in [
        (path.as_str(), json!({ "savepoint": true })),
        ("/v1/snapshots", json!("what was exported")),
        (exec.as_str(), saving),
    ] {
        let (status, body) = call(&alice, "POST", path, body).await;
        assert_eq!((status, &body["error"]["code"]), (429, &json!("quota")), "{path}: {body}");
    }
    let gone = format!("/v1/snapshots/{}", kept[0]);
    assert_eq!(call(&alice, "DELETE", &gone, Value::Null).await.0, 204);
    let savepoint = call(&alice, "POST", &path, json!({ "savepoint": true })).await;
    assert_eq!(savepoint.0, 201, "one was given back");
    assert_eq!(call(&alice, "POST", &path, json!({})).await.0, 429, "and taken by a savepoint");
    let (_, others) = call(&bob, "GET", "/v1/quotas", Value::Null).await;
    assert_eq!(used(&others), json!(0), "another's are another's");
}
