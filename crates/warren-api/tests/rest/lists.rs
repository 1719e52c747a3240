//! Lists: pages, states, labels.

use serde_json::{Value, json};

use crate::support::{ALICE, Daemon, ROOT};

#[tokio::test]
async fn pages_hold_everything_once_in_the_order_in_which_it_was_made() {
    let daemon = Daemon::new().await;
    let mut made = Vec::new();
    for _ in 0..7 {
        made.push(daemon.create(ALICE, json!({})).await.0);
    }
    let (mut seen, mut path) = (Vec::new(), "/v1/sandboxes?limit=3".to_owned());
    loop {
        let page = daemon.call(ALICE, "GET", &path, Value::Null).await.expect(200);
        let items = page["items"].as_array().unwrap();
        assert!(items.len() <= 3);
        seen.extend(items.iter().map(|item| item["id"].as_str().unwrap().to_owned()));
        match page["next"].as_str() {
            Some(next) => path = format!("/v1/sandboxes?limit=3&after={next}"),
            None => break,
        }
        if seen.len() == 3 {
            // What ends between two pages moves nothing.
            let path = format!("/v1/sandboxes/{}", seen[2]);
            daemon.call(ALICE, "DELETE", &path, Value::Null).await.expect(204);
        }
    }
    assert_eq!(seen, made);
}

#[tokio::test]
async fn states_and_labels_choose() {
    let daemon = Daemon::new().await;
    let labels = |team: &str, tier: &str| json!({ "labels": { "team": team, "tier": tier } });
    daemon.create(ALICE, labels("blue", "1")).await;
    daemon.create(ALICE, labels("blue", "2")).await;
    let (_, session) = daemon.create(ALICE, labels("red", "1")).await;
    let path = format!("/v1/sessions/{session}/suspend");
    daemon.call(ALICE, "POST", &path, Value::Null).await.expect(200);
    for (query, count) in [
        ("", 3),
        ("label=team=blue", 2),
        ("label=team=blue&label=tier=1", 1),
        ("label=team=green", 0),
        ("state=suspended", 1),
        ("state=active&state=suspended", 3),
        ("state=detached", 0),
        ("state=suspended&label=team=blue", 0),
    ] {
        for what in ["sandboxes", "sessions"] {
            let path = format!("/v1/{what}?{query}");
            let page = daemon.call(ALICE, "GET", &path, Value::Null).await.expect(200);
            assert_eq!(page["items"].as_array().unwrap().len(), count, "{path}");
        }
    }
}

#[tokio::test]
async fn a_sandbox_is_shown_with_what_it_can_do() {
    let daemon = Daemon::new().await;
    let (sandbox, session) = daemon.create(ALICE, json!({ "name": "web" })).await;
    let shown = daemon.call(ALICE, "GET", &format!("/v1/sandboxes/{sandbox}"), Value::Null).await;
    let shown = shown.expect(200);
    assert_eq!((&shown["name"], &shown["state"]), (&json!("web"), &json!("active")));
    assert_eq!(shown["sessions"][0]["id"], session);
    assert_eq!(shown["capabilities"]["backend"], "fake");
    let stats = daemon.call(ROOT, "GET", "/v1/stats", Value::Null).await.expect(200);
    assert_eq!(stats["manager"]["sandboxes_created"], 1);
    let mine = daemon.call(ALICE, "GET", "/v1/stats", Value::Null).await.expect(200);
    assert_eq!((&mine["active_sandboxes"], mine.get("manager")), (&json!(1), None));
}

#[tokio::test]
async fn only_the_operator_may_sweep() {
    let daemon = Daemon::new().await;
    let swept = daemon.call(ROOT, "POST", "/v1/cleanup", Value::Null).await.expect(200);
    assert_eq!(swept["ended"], 0);
    let refused = daemon.call(ALICE, "POST", "/v1/cleanup", Value::Null).await.expect(403);
    assert_eq!(refused["error"]["code"], "forbidden");
}
