//! The life of a session.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio_util::task::TaskTracker;

use crate::support::{ALICE, Daemon, ROOT};

#[tokio::test]
async fn a_session_goes_through_its_states() {
    let daemon = Daemon::new().await;
    let (sandbox, session) = daemon.create(ALICE, json!({})).await;
    for (verb, body, state) in [
        ("detach", Value::Null, "detached"),
        ("detach", Value::Null, "detached"),
        ("attach", Value::Null, "active"),
        ("suspend", Value::Null, "suspended"),
        ("resume", Value::Null, "active"),
        ("release", json!({ "keep_alive": true }), "detached"),
        ("release", json!({}), "terminated"),
    ] {
        let path = format!("/v1/sessions/{session}/{verb}");
        let after = daemon.call(ALICE, "POST", &path, body).await.expect(200);
        let shown = after.get("session").unwrap_or(&after);
        assert_eq!(shown["state"], state, "{verb}");
    }
    let gone = daemon.call(ALICE, "GET", &format!("/v1/sandboxes/{sandbox}"), Value::Null).await;
    assert_eq!(gone.status, 404);
    assert_eq!(daemon.backend.counts().live, 0);
}

#[tokio::test]
async fn s6_a_sandbox_is_made_with_the_id_asked_for() {
    let daemon = Daemon::new().await;
    let body = json!({ "create_if_missing": true, "create": { "name": "web" } });
    let random = warren::SandboxId::new();
    for (peer, id) in [(ALICE, random.as_str()), (ROOT, "my-own")] {
        let path = format!("/v1/sandboxes/{id}/attach");
        let made = daemon.call(peer, "POST", &path, body.clone()).await.expect(200);
        assert_eq!((&made["sandbox"]["id"], &made["newly_created"]), (&json!(id), &json!(true)));
        assert_eq!(made["sandbox"]["name"], "web");
        let joined = daemon.call(peer, "POST", &path, body.clone()).await.expect(200);
        assert_eq!(joined["newly_created"], false);
    }
}

#[tokio::test]
async fn output_that_is_no_text_comes_in_base64_too() {
    let daemon = Daemon::new().await;
    let (sandbox, _) = daemon.create(ALICE, json!({})).await;
    let path = format!("/v1/sandboxes/{sandbox}/exec");
    let body = json!({ "program": "cat", "stdin_base64": "//79" });
    let ran = daemon.call(ALICE, "POST", &path, body).await.expect(200);
    assert_eq!(ran["stdout_base64"], "//79");
    let body = json!({ "program": "sh", "args": ["-c", "echo oh >&2; exit 3"] });
    let ran = daemon.call(ALICE, "POST", &path, body).await.expect(200);
    assert_eq!(ran["exit_code"], 3);
    assert_eq!(ran["cause"], json!({ "kind": "exited", "code": 3 }));
    assert_eq!((&ran["stderr"], ran.get("stdout_base64")), (&json!("oh\n"), None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn contradicting_calls_at_once_end_in_one_legal_state() {
    let daemon = Arc::new(Daemon::new().await);
    let verbs: [(&'static str, &'static str, Value); 8] = [
        ("POST", "/detach", Value::Null),
        ("POST", "/suspend", Value::Null),
        ("POST", "/resume", Value::Null),
        ("POST", "/attach", Value::Null),
        ("POST", "/release", json!({ "keep_alive": true })),
        ("POST", "/suspend", Value::Null),
        ("GET", "", Value::Null),
        ("DELETE", "", Value::Null),
    ];
    for round in 0..60 {
        let (sandbox, session) = daemon.create(ALICE, json!({})).await;
        let count = if round % 3 == 0 { verbs.len() } else { verbs.len() - 1 };
        let tasks = TaskTracker::new();
        let handles: Vec<_> = verbs[..count]
            .iter()
            .cycle()
            .skip(round % count)
            .take(count * 2)
            .map(|&(method, verb, ref body)| {
                let daemon = Arc::clone(&daemon);
                let (path, body) = (format!("/v1/sessions/{session}{verb}"), body.clone());
                tasks.spawn(async move { daemon.call(ALICE, method, &path, body).await })
            })
            .collect();
        let mut ended = false;
        for handle in handles {
            let answer = handle.await.unwrap();
            assert!(matches!(answer.status, 200 | 204 | 404 | 409 | 410), "{answer:?}");
            ended |= answer.status == 204;
        }
        let state = daemon.state_of(ALICE, &session).await;
        let legal: &[&str] =
            if ended { &["terminated"] } else { &["active", "detached", "suspended"] };
        assert!(legal.contains(&state.as_str()), "round {round}: {state}");

        // Whatever it is, it is not stuck.
        let path = format!("/v1/sandboxes/{sandbox}");
        let end = daemon.call(ALICE, "DELETE", &path, Value::Null).await;
        assert!(matches!(end.status, 204 | 404), "{end:?}");
        assert_eq!(daemon.backend.counts().live, 0, "round {round}");
    }
}

#[tokio::test]
async fn what_is_asked_for_is_the_weakest_that_is_given() {
    let daemon = Daemon::new().await;
    let made = daemon.call(ALICE, "POST", "/v1/sandboxes", json!({"isolation": "namespace"})).await;
    made.expect(201);
    let made = json!({"require": ["network", "limits"]});
    daemon.call(ALICE, "POST", "/v1/sandboxes", made).await.expect(201);
    let refused = daemon.call(ALICE, "POST", "/v1/sandboxes", json!({"isolation": "kernel"})).await;
    assert_eq!(refused.code(), "no_match");
    let message = refused.expect(422)["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("isolation level `kernel` (it has namespace)"), "{message}");
    // Also of one that is there already.
    let (sandbox, _) = daemon.create(ALICE, json!({})).await;
    let path = format!("/v1/sandboxes/{sandbox}/attach");
    let stronger = json!({"create": {"isolation": "container"}});
    assert_eq!(daemon.call(ALICE, "POST", &path, stronger).await.code(), "no_match");
    let same = json!({"create": {"isolation": "namespace"}});
    daemon.call(ALICE, "POST", &path, same).await.expect(200);
}
