//! Server-Sent Events.

use std::time::Duration;

use axum::body::Body;
use axum::http::Response;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use warren::{SandboxManagerConfig, SessionTimeouts};

use crate::support::{ALICE, BOB, Daemon};

pub(crate) async fn follow(
    daemon: &Daemon,
    peer: warren_api::Peer,
    last: Option<&str>,
) -> Response<Body> {
    let headers: Vec<(&str, &str)> = last.map(|id| ("last-event-id", id)).into_iter().collect();
    let response = daemon.open(peer, "GET", "/v1/events", Vec::new(), &headers).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    response
}

/// Reads events as (id, kind, data) until there are so many.
pub(crate) async fn read(
    response: &mut Response<Body>,
    count: usize,
) -> Vec<(String, String, Value)> {
    let mut events = Vec::new();
    while events.len() < count {
        let frame =
            tokio::time::timeout(Duration::from_secs(10), response.body_mut().frame()).await;
        let data =
            frame.expect("in time").expect("more").expect("a frame").into_data().expect("data");
        let text = String::from_utf8(data.to_vec()).expect("UTF-8");
        for event in text.split("\n\n").filter(|event| event.contains("event: ")) {
            let field = |name: &str| {
                event
                    .lines()
                    .find_map(|line| line.strip_prefix(name))
                    .unwrap_or_default()
                    .to_owned()
            };
            let data = serde_json::from_str(&field("data: ")).expect("JSON");
            events.push((field("id: "), field("event: "), data));
        }
    }
    events
}

#[tokio::test]
async fn events_are_followed_and_taken_up_again() {
    let daemon = Daemon::new().await;
    let mut stream = follow(&daemon, ALICE, None).await;
    let mut bobs = follow(&daemon, BOB, None).await;
    let (sandbox, session) = daemon.create(ALICE, json!({})).await;
    for verb in ["suspend", "resume", "detach"] {
        let path = format!("/v1/sessions/{session}/{verb}");
        daemon.call(ALICE, "POST", &path, Value::Null).await.expect(200);
    }
    daemon
        .call(ALICE, "DELETE", &format!("/v1/sandboxes/{sandbox}"), Value::Null)
        .await
        .expect(204);
    let seen = read(&mut stream, 7).await;
    let kinds: Vec<&str> = seen.iter().map(|(_, kind, _)| kind.as_str()).collect();
    let expected = [
        "sandbox.created",
        "session.active",
        "session.suspended",
        "session.active",
        "session.detached",
        "session.ended",
        "sandbox.destroyed",
    ];
    assert_eq!(kinds, expected);
    assert!(seen.iter().all(|(id, _, data)| data["id"] == id.as_str()));
    assert!(seen.iter().all(|(_, _, data)| data["sandbox_id"] == sandbox.as_str()));

    let mut again = follow(&daemon, ALICE, Some(&seen[4].0)).await;
    let rest = read(&mut again, 2).await;
    assert_eq!(rest, seen[5..]);
    let mut lost = follow(&daemon, ALICE, Some("another-daemons-7")).await;
    assert_eq!(read(&mut lost, 1).await[0].1, "gap");

    daemon.create(BOB, json!({})).await;
    let own = read(&mut bobs, 2).await;
    assert!(own[0].0.ends_with("-1"), "numbers of his own: {own:?}");
    assert_ne!(own[0].2["sandbox_id"], sandbox.as_str());
}

#[tokio::test]
async fn the_next_daemon_goes_on_where_a_reader_was() {
    let daemon = Daemon::new().await;
    let mut stream = follow(&daemon, ALICE, None).await;
    let (sandbox, session) = daemon.create(ALICE, json!({})).await;
    let seen = read(&mut stream, 2).await;
    let detach = format!("/v1/sessions/{session}/detach");
    daemon.call(ALICE, "POST", &detach, Value::Null).await.expect(200);
    let third = read(&mut stream, 1).await.remove(0);
    let manager = daemon.manager.clone();
    daemon.api.stop().await;
    // While no API looks.
    let ended = warren::SandboxManager::get_session(&manager, &session).await.unwrap().unwrap();
    warren::SandboxManager::terminate(&manager, &ended).await.unwrap();
    let daemon = daemon.restart().await;
    let mut again = follow(&daemon, ALICE, Some(&seen[1].0)).await;
    let rest = read(&mut again, 3).await;
    assert_eq!(rest[0], third);
    let kinds = (rest[1].1.as_str(), rest[2].1.as_str());
    assert_eq!(kinds, ("session.ended", "sandbox.destroyed"));
    assert_eq!(rest[2].2["sandbox_id"], sandbox.as_str());
}

#[tokio::test]
async fn streams_end_with_the_daemon() {
    let daemon = Daemon::new().await;
    let mut stream = follow(&daemon, ALICE, None).await;
    daemon.create(ALICE, json!({})).await;
    read(&mut stream, 2).await;
    daemon.api.stop().await;
    let end = tokio::time::timeout(Duration::from_secs(5), stream.body_mut().frame()).await;
    assert!(end.expect("in time").is_none(), "the stream ends");
}

#[tokio::test]
async fn what_happens_by_itself_is_told_too() {
    let default_timeouts =
        SessionTimeouts { idle_timeout: Duration::from_millis(20), ..Default::default() };
    let cleanup_interval = Duration::from_millis(10);
    let config = SandboxManagerConfig { default_timeouts, cleanup_interval, ..Default::default() };
    let daemon = Daemon::with(config).await;
    let mut stream = follow(&daemon, ALICE, None).await;
    daemon.create(ALICE, json!({})).await;
    let seen = read(&mut stream, 4).await;
    assert_eq!((seen[2].1.as_str(), seen[3].1.as_str()), ("session.ended", "sandbox.destroyed"));
}
