//! Whatever is applied is what is loaded.

use std::collections::HashMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use proptest::prelude::*;
use warren::store::memory::MemoryStore;
use warren::store::sqlite::SqliteStore;
use warren::store::{Change, Phase, SandboxRecord, SessionRecord, Store};
use warren::{Base, Reach, SandboxId, SandboxSession, SandboxSpec, SessionState, SessionTimeouts};

use crate::support::{block_on, db, fast_dir};

/// Few ids, so that they meet again, and odd ones.
fn id() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["a", "b", "sbx-1", "", "a\0b", "Ä", "ä", "'; --", "a b"])
        .prop_map(str::to_owned)
}

fn time() -> impl Strategy<Value = DateTime<Utc>> {
    (0..253_402_300_799_i64, 0..1_000_000_000_u32)
        .prop_map(|(secs, nanos)| DateTime::from_timestamp(secs, nanos).unwrap())
}

fn spec() -> impl Strategy<Value = SandboxSpec> {
    let pairs = prop::collection::vec((any::<String>(), any::<String>()), 0..4);
    (any::<String>(), pairs.clone(), pairs, any::<Option<u64>>(), any::<Duration>()).prop_map(
        |(profile, environment, labels, max_memory_bytes, creation_timeout)| {
            let mut spec = SandboxSpec {
                profile,
                environment,
                labels,
                creation_timeout,
                ..Default::default()
            };
            spec.limits.max_memory_bytes = max_memory_bytes;
            spec
        },
    )
}

fn sandbox() -> impl Strategy<Value = SandboxRecord> {
    let phase = prop::sample::select(vec![
        Phase::Creating,
        Phase::Running,
        Phase::Suspended,
        Phase::Destroying,
        Phase::Restoring,
    ]);
    let texts = (any::<String>(), any::<Option<String>>(), any::<Option<String>>());
    (id(), spec(), phase, any::<bool>(), texts, time()).prop_map(
        |(id, spec, phase, used, (backend, owner, anchor), created_at)| {
            let id = SandboxId(id);
            let base = Base::default();
            SandboxRecord {
                id,
                backend,
                spec,
                phase,
                owner,
                used,
                anchor,
                created_at,
                base,
                receipt: None,
                reach: Reach::default(),
            }
        },
    )
}

fn session() -> impl Strategy<Value = SessionRecord> {
    let state = prop::sample::select(vec![
        SessionState::Active,
        SessionState::Detached,
        SessionState::Suspended,
        SessionState::Terminated,
    ]);
    let metadata = prop::collection::hash_map(any::<String>(), any::<String>(), 0..4);
    let texts = (id(), id(), any::<String>(), metadata);
    (texts, time(), time(), state, any::<Duration>(), any::<bool>(), any::<u64>()).prop_map(
        |(texts, created_at, last_active_at, state, idle_timeout, kept_alive, rested_ms)| {
            let (session_id, sandbox_id, client_id, metadata): (_, _, _, HashMap<_, _>) = texts;
            let sandbox_id = SandboxId(sandbox_id);
            let timeouts = SessionTimeouts { idle_timeout, ..SessionTimeouts::default() };
            let session = SandboxSession {
                session_id,
                sandbox_id,
                client_id,
                created_at,
                last_active_at,
                state,
                metadata,
                timeouts,
            };
            SessionRecord { session, kept_alive, rested_ms }
        },
    )
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        3 => sandbox().prop_map(Change::PutSandbox),
        1 => id().prop_map(|id| Change::DropSandbox(SandboxId(id))),
        3 => session().prop_map(Change::PutSession),
        1 => id().prop_map(Change::DropSession),
        1 => prop::option::of(id()).prop_map(|id| Change::SetDefault(id.map(SandboxId))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..Default::default() })]

    #[test]
    fn what_is_applied_is_what_is_loaded_now_and_after_a_restart(
        lists in prop::collection::vec(prop::collection::vec(change(), 0..8), 0..8),
    ) {
        let dir = fast_dir();
        let model = MemoryStore::new();
        let store = SqliteStore::open(&db(dir.path())).unwrap();
        for changes in lists {
            block_on(model.apply(changes.clone())).unwrap();
            block_on(store.apply(changes)).unwrap();
            prop_assert_eq!(block_on(store.load()).unwrap(), model.image());
        }
        drop(store);
        let store = SqliteStore::open(&db(dir.path())).unwrap();
        prop_assert_eq!(block_on(store.load()).unwrap(), model.image());
    }
}
