//! Who may use a store, and what it keeps beside the manager's records.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use chrono::{SubsecRound, Utc};
use serde_json::json;
use warren::SandboxId;
use warren::store::sqlite::{NewEvent, Retention, SqliteStore};
use warren::store::{Change, Store, StoreError};

use crate::support::{beside, block_on, db, fast_dir, image, number, numbered};

#[test]
fn a_store_is_readable_by_its_owner_alone() {
    let dir = fast_dir();
    let path = dir.path().join("state/deep/warren.db");
    let store = SqliteStore::open(&path).unwrap();
    block_on(store.apply(numbered("a", 1))).unwrap();
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(path.parent().unwrap()), 0o700);
    assert_eq!(mode(&path), 0o600);
    for suffix in ["-wal", ".lock", ".made"] {
        assert_eq!(mode(&beside(&path, suffix)), 0o600, "{suffix}");
    }
}

#[test]
fn a_second_daemon_on_the_same_store_is_refused() {
    let dir = fast_dir();
    let path = db(dir.path());
    let first = SqliteStore::open(&path).unwrap();
    block_on(first.apply(numbered("a", 1))).unwrap();
    let error = SqliteStore::open(&path).unwrap_err();
    assert!(matches!(error, StoreError::Busy), "{error:?}");
    assert_eq!(error.to_string(), "the store is in use by another process");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    assert!(matches!(SqliteStore::open(&db(&link)), Err(StoreError::Busy)), "by another name");

    block_on(first.apply(numbered("a", 2))).unwrap();
    drop(first);
    assert_eq!(number(&image(&path).unwrap(), "a"), Some(2), "control: once the first is gone");
}

#[test]
fn dropping_a_store_writes_what_was_asked_for_before() {
    let dir = fast_dir();
    let path = db(dir.path());
    let store = SqliteStore::open(&path).unwrap();
    block_on(async {
        // Each is sent and then given up, before its answer can be there.
        for n in 1..=50 {
            let mut apply = store.apply(numbered("a", n));
            let waker = std::task::Waker::noop();
            let mut context = std::task::Context::from_waker(waker);
            drop(apply.as_mut().poll(&mut context));
        }
    });
    drop(store);
    assert_eq!(number(&image(&path).unwrap(), "a"), Some(50));
}

async fn append(store: &SqliteStore, event: NewEvent) -> i64 {
    store.append(vec![event], vec![]).await.unwrap()[0]
}

fn event(kind: &str) -> NewEvent {
    NewEvent {
        at: Utc::now().trunc_subsecs(6),
        kind: kind.to_owned(),
        sandbox_id: Some(SandboxId::from_string("sbx-1")),
        session_id: Some("sess-1".to_owned()),
        client_id: None,
        detail: json!({ "reason": "idle", "ms": 3 }),
    }
}

#[tokio::test]
async fn a_reader_of_events_goes_on_where_it_was_even_after_a_restart() {
    let dir = fast_dir();
    let path = db(dir.path());
    let store = SqliteStore::open(&path).unwrap();
    let mut written = Vec::new();
    for n in 0..10 {
        let event = event(&format!("kind-{n}"));
        written.push((append(&store, event.clone()).await, event));
    }
    let read = |events: Vec<warren::store::sqlite::Event>| {
        events.into_iter().map(|event| (event.id, event.event)).collect::<Vec<_>>()
    };
    assert_eq!(read(store.events_after(0, 100).await.unwrap()), written);
    assert_eq!(read(store.events_after(4, 3).await.unwrap()), written[4..7]);
    drop(store);
    let store = SqliteStore::open(&path).unwrap();
    assert_eq!(read(store.events_after(7, 100).await.unwrap()), written[7..]);
    assert_eq!(append(&store, event("next")).await, 11, "ids go on");
}

#[tokio::test]
async fn only_so_many_events_and_answers_are_kept_and_ids_are_never_given_twice() {
    let dir = fast_dir();
    let retention = Retention { events: 5, answers: 3 };
    let store = SqliteStore::open_keeping(&db(dir.path()), retention).unwrap();
    for n in 0..20 {
        append(&store, event("x")).await;
        store.remember("t", &format!("key-{n}"), b"hash", json!(n)).await.unwrap();
    }
    let ids = |events: Vec<warren::store::sqlite::Event>| {
        events.into_iter().map(|event| event.id).collect::<Vec<_>>()
    };
    assert_eq!(ids(store.events_after(0, 100).await.unwrap()), [16, 17, 18, 19, 20]);
    let mut kept = Vec::new();
    for n in 0..20 {
        if store.recall("t", &format!("key-{n}")).await.unwrap().is_some() {
            kept.push(n);
        }
    }
    assert_eq!(kept, [17, 18, 19]);
    drop(store);
    let none = Retention { events: 0, answers: 0 };
    let store = SqliteStore::open_keeping(&db(dir.path()), none).unwrap();
    assert_eq!(append(&store, event("x")).await, 21);
    assert_eq!(ids(store.events_after(0, 100).await.unwrap()), [0_i64; 0]);
    assert_eq!(append(&store, event("x")).await, 22, "though none is left");
}

#[tokio::test]
async fn notes_are_written_with_the_events_they_belong_to_or_not_at_all() {
    let dir = fast_dir();
    let path = db(dir.path());
    let store = SqliteStore::open(&path).unwrap();
    let set = |name: &str, value: serde_json::Value| (name.to_owned(), Some(value));
    store.append(vec![], vec![set("a", json!(1)), set("b", json!([2]))]).await.unwrap();
    let notes = vec![set("b", json!(3)), ("a".to_owned(), None), ("never".to_owned(), None)];
    store.append(vec![event("x")], notes).await.unwrap();
    let id = SandboxId::from_string("sbx-1");
    store.apply(vec![Change::SetDefault(Some(id.clone()))]).await.unwrap();
    let vast = NewEvent { detail: json!("x".repeat(32 << 20)), ..event("vast") };
    let failed = store.append(vec![vast], vec![set("b", json!(4))]).await;
    assert!(failed.is_err(), "control: an event that cannot be written");
    drop(store);
    let store = SqliteStore::open(&path).unwrap();
    assert_eq!(store.notes().await.unwrap(), [("b".to_owned(), json!(3))]);
    assert_eq!(store.load().await.unwrap().default, Some(id), "a setting of the manager's is none");
    assert_eq!(store.events_after(0, 9).await.unwrap().len(), 1);
}

#[tokio::test]
async fn the_first_answer_to_an_idempotent_request_stands() {
    let dir = fast_dir();
    let store = SqliteStore::open(&db(dir.path())).unwrap();
    assert_eq!(store.recall("acme", "k").await.unwrap(), None);
    assert_eq!(store.remember("acme", "k", b"one", json!({ "id": 1 })).await.unwrap(), None);
    let earlier = store.remember("acme", "k", b"two", json!({ "id": 2 })).await.unwrap().unwrap();
    assert_eq!((&earlier.request_hash[..], &earlier.response), (&b"one"[..], &json!({ "id": 1 })));
    let recalled = store.recall("acme", "k").await.unwrap().unwrap();
    assert_eq!(recalled.response, json!({ "id": 1 }));
    assert_eq!(store.recall("other", "k").await.unwrap(), None, "a key belongs to its tenant");
}
