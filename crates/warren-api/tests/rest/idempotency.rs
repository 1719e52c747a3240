//! Repeating a request.

use std::sync::Arc;

use serde_json::{Value, json};
use warren::backend::fake::{Step, When};

use crate::support::{ALICE, BOB, Daemon};

const KEY: [(&str, &str); 1] = [("idempotency-key", "once")];

#[tokio::test]
async fn the_same_key_and_body_get_the_same_answer_and_one_sandbox() {
    let daemon = Arc::new(Daemon::new().await);
    let ask =
        async |peer, body: Value| daemon.call_with(peer, "POST", "/v1/sandboxes", body, &KEY).await;
    let body = json!({ "name": "web" });
    // The first is held up, so that the others come while it runs.
    daemon.backend.stall(Step::Create, When::Always);
    let release = async {
        while daemon.backend.stalled(Step::Create) == 0 {
            tokio::task::yield_now().await;
        }
        daemon.backend.release(Step::Create);
    };
    let (first, second, third, ()) = tokio::join!(
        ask(ALICE, body.clone()),
        ask(ALICE, body.clone()),
        ask(ALICE, body.clone()),
        release
    );
    let fourth = ask(ALICE, body.clone()).await;
    assert_eq!(first.status, 201);
    for again in [second, third, fourth] {
        assert_eq!((again.status, &again.bytes), (201, &first.bytes));
        assert!(again.headers.contains(&("idempotency-replayed".into(), "true".into())));
    }
    assert_eq!(daemon.backend.counts().created, 1);

    let other = ask(ALICE, json!({ "name": "other" })).await;
    assert_eq!((other.status, other.code().as_str()), (409, "idempotency_mismatch"));
    let bobs = ask(BOB, json!({ "name": "other" })).await;
    assert_eq!(bobs.status, 201, "another tenant has its own keys");
    assert_eq!(daemon.backend.counts().created, 2);
}

#[tokio::test]
async fn the_next_daemon_gives_the_same_answer() {
    let daemon = Daemon::new().await;
    let body = json!({ "name": "web" });
    let first = daemon.call_with(ALICE, "POST", "/v1/sandboxes", body.clone(), &KEY).await;
    let daemon = daemon.restart().await;
    let again = daemon.call_with(ALICE, "POST", "/v1/sandboxes", body, &KEY).await;
    assert_eq!((again.status, &again.bytes), (201, &first.bytes));
    assert!(again.headers.contains(&("idempotency-replayed".into(), "true".into())));
    let other = daemon.call_with(ALICE, "POST", "/v1/sandboxes", json!({}), &KEY).await;
    assert_eq!((other.status, other.code().as_str()), (409, "idempotency_mismatch"));
    assert_eq!(daemon.backend.counts().created, 1);
    daemon.call_with(BOB, "POST", "/v1/sandboxes", json!({}), &KEY).await.expect(201);
}

#[tokio::test]
async fn what_failed_can_be_tried_again_under_the_same_key() {
    let daemon = Daemon::new().await;
    daemon.backend.fail(Step::Create, When::Nth(1));
    let body = json!({});
    let failed = daemon.call_with(ALICE, "POST", "/v1/sandboxes", body.clone(), &KEY).await;
    assert_eq!(failed.status, 500);
    daemon.call_with(ALICE, "POST", "/v1/sandboxes", body, &KEY).await.expect(201);
}

#[tokio::test]
async fn a_create_whose_caller_hung_up_is_rolled_back() {
    let daemon = Daemon::new().await;
    daemon.backend.stall(Step::Create, When::Always);
    let create = daemon.call(ALICE, "POST", "/v1/sandboxes", json!({ "name": "web" }));
    let stalled = async {
        while daemon.backend.stalled(Step::Create) == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        answer = create => panic!("{answer:?}"),
        () = stalled => {}
    }
    daemon.backend.release(Step::Create);
    while daemon.backend.counts().created == 0 || daemon.backend.counts().live > 0 {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    daemon.create(ALICE, json!({ "name": "web" })).await;
}

#[tokio::test]
async fn b9_an_end_that_is_asked_for_again_is_the_end_of_nothing_else() {
    let daemon = Daemon::new().await;
    let delete =
        async |path: &str| daemon.call_with(ALICE, "DELETE", path, Value::Null, &KEY).await;
    for by_session in [true, false] {
        let before = daemon.backend.counts().destroyed;
        let (sandbox, session) = daemon.create(ALICE, json!({ "name": "web" })).await;
        let path = match by_session {
            true => format!("/v1/sessions/{session}"),
            false => format!("/v1/sandboxes/{sandbox}"),
        };
        // At once, and later: one of them ends it, and whoever comes too late is told that nothing is there.
        let (one, other) = tokio::join!(delete(&path), delete(&path));
        let mut told = [one.status, other.status];
        told.sort_unstable();
        assert!(matches!(told, [204, 204 | 404]), "{one:?} {other:?}");
        assert_eq!(delete(&path).await.status, 404);
        assert_eq!(daemon.backend.counts().destroyed, before + 1, "once");
        // What has its name since is another, and a body says nothing of which is meant.
        let (next, _) = daemon.create(ALICE, json!({ "name": "web" })).await;
        let body = json!({ "sandbox_id": next, "name": "web" });
        let replayed = daemon.call_with(ALICE, "DELETE", &path, body, &KEY).await;
        assert_eq!(replayed.status, 404, "{replayed:?}");
        let path = format!("/v1/sandboxes/{next}");
        daemon.call(ALICE, "GET", &path, Value::Null).await.expect(200);
        delete(&path).await.expect(204);
    }
    // A key of an end is none of a create, nor the other way round.
    let made = daemon.call_with(ALICE, "POST", "/v1/sandboxes", json!({}), &KEY).await;
    assert_eq!(made.status, 201, "{made:?}");
    assert!(!made.headers.iter().any(|(name, _)| name == "idempotency-replayed"));
    let session = made.json()["session"]["id"].as_str().unwrap().to_owned();
    delete(&format!("/v1/sessions/{session}")).await.expect(204);
}
