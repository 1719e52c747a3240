//! Rules A1 to A8.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use warren::backend::FakeBackend;
use warren::backend::fake::{Step, When};
use warren::store::memory::MemoryStore;
use warren::*;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a1_every_acquire_returns_a_session_that_is_found() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(1, 1));
    until("one is warm", async || manager.stats().await.pool_size == 1).await;

    let (warm, _) = manager.acquire(&spec(), &from_pool(), "c").await.unwrap();
    let (new, _) = acquire(&manager, "c").await;
    let (preferred, _) = manager.acquire(&spec(), &preferring(&new.sandbox_id), "c").await.unwrap();
    manager.release(&new, true).await.unwrap();
    let (kept, _) = acquire(&manager, "c").await;
    manager.set_default_sandbox(Some(warm.sandbox_id.clone())).await.unwrap();
    let (default, _) = acquire(&manager, "c").await;
    assert_eq!(preferred.sandbox_id, new.sandbox_id);
    assert_eq!(kept.session_id, new.session_id, "taken up again");
    assert_eq!(default.sandbox_id, warm.sandbox_id);
    for session in [warm, new, preferred, kept, default] {
        let found = manager.get_session(&session.session_id).await.unwrap().unwrap();
        assert_eq!((found.state, &*found.client_id), (SessionState::Active, "c"));
    }
}

#[tokio::test(start_paused = true)]
async fn a2_the_order_is_preferred_kept_warm_new() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(1, 1));
    until("one is warm", async || manager.stats().await.pool_size == 1).await;
    let (one, _) = acquire(&manager, "c").await;
    let (two, _) = acquire(&manager, "c").await;
    manager.release(&two, true).await.unwrap();
    let all = SandboxSelectionOptions { use_pool: true, ..preferring(&one.sandbox_id) };

    let (first, _) = manager.acquire(&spec(), &all, "c").await.unwrap();
    assert_eq!(first.sandbox_id, one.sandbox_id, "the preferred one");
    let (second, _) = manager.acquire(&spec(), &from_pool(), "c").await.unwrap();
    assert_eq!(second.session_id, two.session_id, "then the kept one");
    assert_eq!(backend.counts().claimed, 0);
    manager.acquire(&spec(), &from_pool(), "c").await.unwrap();
    assert_eq!(backend.counts().claimed, 1, "then a warm one");
    backend.fail(Step::Create, When::Nth(1));
    let new = manager.acquire(&spec(), &from_pool(), "c").await;
    assert_eq!(new.unwrap_err().code(), "step_failed", "then a new one");
}

#[tokio::test(start_paused = true)]
async fn a2_a_kept_sandbox_is_given_only_to_its_client_and_for_its_spec() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (kept, _) = acquire(&manager, "c").await;
    manager.release(&kept, true).await.unwrap();

    let (other, _) = acquire(&manager, "d").await;
    assert_ne!(other.sandbox_id, kept.sandbox_id);
    let different = SandboxSpec { environment: vec![("A".into(), "b".into())], ..spec() };
    let (different, _) = manager.acquire(&different, &options(), "c").await.unwrap();
    assert_ne!(different.sandbox_id, kept.sandbox_id);
    let (same, _) = acquire(&manager, "c").await;
    assert_eq!(same.sandbox_id, kept.sandbox_id, "control");
}

#[tokio::test(start_paused = true)]
async fn a2_fresh_means_that_no_command_has_ever_run() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(1, 1));
    until("one is warm", async || manager.stats().await.pool_size == 1).await;
    let (used, sandbox) = acquire(&manager, "c").await;
    let fresh = SandboxSelectionOptions { require_fresh: true, ..preferring(&used.sandbox_id) };
    let (same, _) = manager.acquire(&spec(), &fresh, "c").await.unwrap();
    assert_eq!(same.sandbox_id, used.sandbox_id, "nothing has run in it yet");
    run(&*sandbox, "true").await.unwrap();
    manager.release(&used, true).await.unwrap();

    let (other, _) = manager.acquire(&spec(), &fresh, "c").await.unwrap();
    assert_ne!(other.sandbox_id, used.sandbox_id);
    let fresh = SandboxSelectionOptions { require_fresh: true, ..from_pool() };
    let before = backend.counts().claimed;
    manager.acquire(&spec(), &fresh, "c").await.unwrap();
    assert_eq!(backend.counts().claimed, before + 1, "a pristine warm one counts");
}

#[tokio::test(start_paused = true)]
async fn a3_what_is_preferred_and_not_there_is_named_in_an_error() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (theirs, _) = acquire(&manager, "other").await;
    let dead = acquire(&manager, "c").await.0.sandbox_id;
    backend.crash(&dead);
    for id in [SandboxId::from_string("sbx-none"), theirs.sandbox_id, dead] {
        let error = manager.acquire(&spec(), &preferring(&id), "c").await.unwrap_err();
        assert_eq!(error.to_string(), format!("no sandbox `{id}`"));
    }
    let named = |name: &str| SandboxSelectionOptions {
        preferred_backend: Some(name.to_owned()),
        ..options()
    };
    let error = manager.acquire(&spec(), &named("nope"), "c").await.unwrap_err();
    assert_eq!(error.to_string(), "no backend `nope`");
    manager.acquire(&spec(), &named("fake"), "c").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a4_capabilities_and_labels_are_checked_on_every_path() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(1, 1));
    until("one is warm", async || manager.stats().await.pool_size == 1).await;
    let (held, _) = acquire(&manager, "c").await;
    let (kept, _) = acquire(&manager, "c").await;
    manager.release(&kept, true).await.unwrap();
    let live = backend.counts().live;

    let required_capabilities =
        RequiredCapabilities { network: Some(true), ..RequiredCapabilities::default() };
    let demands = SandboxSelectionOptions {
        required_capabilities,
        use_pool: true,
        ..preferring(&held.sandbox_id)
    };
    let error = manager.acquire(&spec(), &demands, "c").await.unwrap_err();
    let SandboxError::NoMatch { missing } = &error else { panic!("{error}") };
    assert_eq!(missing.len(), 4, "preferred, kept, warm, new: {missing:?}");
    assert!(missing.iter().all(|line| line.ends_with("network")), "{missing:?}");
    until("what did not fit is gone", async || backend.counts().live == live).await;

    let required_labels = HashMap::from([("team".to_owned(), "blue".to_owned())]);
    let demands = SandboxSelectionOptions { required_labels, ..demands };
    let error = manager.acquire(&spec(), &demands, "c").await.unwrap_err();
    assert!(error.to_string().contains("label `team=blue`"), "{error}");

    let fits = SandboxSpec {
        network_enabled: true,
        labels: vec![("team".into(), "blue".into())],
        ..spec()
    };
    let (_, sandbox) = manager.acquire(&fits, &demands, "c").await.unwrap();
    assert!(sandbox.capabilities().has_network);
}

#[tokio::test(start_paused = true)]
async fn a4_paths_and_memory_are_those_the_sandbox_really_has() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let spec = SandboxSpec { allowed_paths_ro: vec!["/srv/data".into()], ..spec() };
    type Demand = fn(&mut RequiredCapabilities);
    let rows: &[(bool, Demand)] = &[
        (true, |r| r.readable_paths = vec!["/srv/data/a".into()]),
        (false, |r| r.readable_paths = vec!["/srv/database".into()]),
        (false, |r| r.readable_paths = vec!["/srv/data/../x".into()]),
        (false, |r| r.writable_paths = vec!["/srv/data".into()]),
        (true, |r| r.writable_paths = vec!["/workspace/x".into()]),
        (true, |r| r.min_memory_bytes = Some(512 << 20)),
        (false, |r| r.min_memory_bytes = Some((512 << 20) + 1)),
        (true, |r| r.write_access = Some(true)),
        (false, |r| r.write_access = Some(false)),
        (true, |r| r.network = Some(false)),
    ];
    for (i, (expected, demand)) in rows.iter().enumerate() {
        let mut options = options();
        demand(&mut options.required_capabilities);
        let outcome = manager.acquire(&spec, &options, "c").await;
        assert_eq!(outcome.is_ok(), *expected, "row {i}: {outcome:?}");
    }
    assert_eq!(backend.counts().live, 5, "those that did not fit left nothing");
}

#[tokio::test(start_paused = true)]
async fn a5_no_wall_is_missing_unless_the_backend_was_named() {
    let (open, broken) = (FakeBackend::named("open"), FakeBackend::named("broken"));
    let walled = FakeBackend::named("walled");
    open.set_capabilities(|can| can.network_isolation = false);
    broken.fail(Step::Probe, When::Always);
    let backends = |of: &[&FakeBackend]| -> Vec<Arc<dyn IsolationBackend>> {
        of.iter().map(|backend| Arc::new((*backend).clone()) as Arc<dyn IsolationBackend>).collect()
    };
    let manager = DefaultSandboxManager::new(backends(&[&open, &broken, &walled]), poolless());
    let (_, sandbox) = acquire(&manager, "c").await;
    assert_eq!(sandbox.capabilities().backend, "walled");
    let named = SandboxSelectionOptions { preferred_backend: Some("open".into()), ..options() };
    let (_, sandbox) = manager.acquire(&spec(), &named, "c").await.unwrap();
    assert_eq!(sandbox.capabilities().backend, "open");

    let manager = DefaultSandboxManager::new(backends(&[&open, &broken]), poolless());
    let error = manager.acquire(&spec(), &options(), "c").await.unwrap_err();
    let SandboxError::NoMatch { missing } = &error else { panic!("{error}") };
    assert_eq!(missing[0], "backend `open` lacks network isolation");
    assert!(missing[1].starts_with("backend `broken` lacks an answer"), "{missing:?}");
    let strange = SandboxSpec { profile: "strange".into(), ..spec() };
    let error = manager.acquire(&strange, &named, "c").await.unwrap_err();
    assert!(error.to_string().contains("profile `strange`"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a6_at_the_limit_warm_sandboxes_give_way_and_then_the_caller_is_told() {
    let backend = FakeBackend::new();
    let config = SandboxManagerConfig { max_sandboxes: 3, ..pooled(2, 2) };
    let manager = manager(&backend, config);
    until("two are warm", async || manager.stats().await.pool_size == 2).await;
    let mut sessions = Vec::new();
    for _ in 0..3 {
        sessions.push(acquire(&manager, "c").await.0);
        assert!(backend.counts().live <= 3);
    }
    let error = manager.acquire(&spec(), &options(), "c").await.unwrap_err();
    let SandboxError::Capacity { limit: 3, retry_after } = error else { panic!("{error}") };
    assert!(retry_after > Duration::ZERO && retry_after <= Duration::from_secs(360));
    assert_eq!((error.code(), backend.counts().most_live), ("capacity", 3));

    // The hint is true: after that long there is room.
    tokio::time::sleep(retry_after + SECOND).await;
    acquire(&manager, "c").await;
}

#[tokio::test(start_paused = true)]
async fn a6_a_place_is_given_back_when_a_creation_fails_or_is_given_up() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, SandboxManagerConfig { max_sandboxes: 1, ..poolless() });
    backend.fail(Step::Create, When::Nth(1));
    manager.acquire(&spec(), &options(), "c").await.unwrap_err();
    backend.stall(Step::Create, When::Always);
    let (spec, options) = (spec(), options());
    let given_up = manager.acquire(&spec, &options, "c");
    assert!(tokio::time::timeout(SECOND, given_up).await.is_err());
    let error = manager.acquire(&spec, &options, "c").await.unwrap_err();
    assert_eq!(error.code(), "capacity", "it is still being made");
    backend.release(Step::Create);
    until("what nobody waits for is gone", async || backend.counts().destroyed == 1).await;
    acquire(&manager, "c").await;
    assert_eq!((backend.counts().most_live, manager.stats().await.active_sessions), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a6_a_warm_sandbox_that_cannot_be_ended_keeps_its_place() {
    let backend = FakeBackend::new();
    let config = SandboxManagerConfig { max_sandboxes: 1, ..pooled(1, 1) };
    let manager = manager(&backend, config);
    until("one is warm", async || manager.stats().await.pool_size == 1).await;
    backend.fail(Step::Destroy, When::Nth(1));
    manager.acquire(&spec(), &options(), "c").await.unwrap_err();
    assert_eq!((backend.counts().created, backend.counts().live), (1, 1));
    manager.cleanup_expired().await.unwrap();
    assert_eq!(backend.counts().destroyed, 1, "it is tried again");
}

#[tokio::test(start_paused = true)]
async fn a7_a_creation_that_takes_too_long_leaves_nothing() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    backend.stall(Step::Create, When::Nth(1));
    let began = tokio::time::Instant::now();
    let error = manager.acquire(&spec(), &options(), "c").await.unwrap_err();
    assert_eq!((error.code(), began.elapsed().as_secs()), ("timeout", 30));
    backend.release(Step::Create);
    let stats = manager.stats().await;
    assert_eq!((backend.counts().created, stats.active_sandboxes), (0, 0));
    assert!(backend.remains().await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a7_a_backend_that_panics_costs_no_place() {
    let backend = FakeBackend::new();
    let store = MemoryStore::new();
    let config = SandboxManagerConfig { max_sandboxes: 1, ..poolless() };
    for manager in [manager(&backend, config.clone()), opened(&backend, config, &store).await] {
        backend.panic(Step::Create, When::Nth(1));
        let error = manager.acquire(&spec(), &options(), "c").await.unwrap_err();
        assert_eq!(error.code(), "internal");
        assert_eq!((manager.stats().await.active_sandboxes, backend.counts().live), (0, 0));
        let (session, _) = acquire(&manager, "c").await;
        backend.panic(Step::Suspend, When::Nth(1));
        assert_eq!(manager.suspend(&session).await.unwrap_err().code(), "internal");
        manager.suspend(&session).await.expect("what panicked once is tried again");
        backend.panic(Step::Destroy, When::Nth(1));
        assert_eq!(manager.terminate(&session).await.unwrap_err().code(), "internal");
        manager.cleanup_expired().await.unwrap();
        assert_eq!((manager.stats().await.active_sandboxes, backend.counts().live), (0, 0));
    }
    assert_eq!(store.image(), warren::store::Image::default());
}

#[tokio::test(start_paused = true)]
async fn a8_the_managers_timeouts_are_those_of_each_new_session() {
    let backend = FakeBackend::new();
    let timeouts = SessionTimeouts {
        idle_timeout: Duration::from_secs(7),
        detach_timeout: Duration::from_secs(8),
        suspend_timeout: Duration::from_secs(9),
    };
    let config = SandboxManagerConfig { default_timeouts: timeouts.clone(), ..pooled(1, 1) };
    let manager = manager(&backend, config);
    until("one is warm", async || manager.stats().await.pool_size == 1).await;
    let (new, _) = acquire(&manager, "c").await;
    let (warm, _) = manager.acquire(&spec(), &from_pool(), "c").await.unwrap();
    let joined = manager.attach(attach_to(&new.sandbox_id, "c")).await.unwrap().session;
    for session in [new, warm, joined] {
        assert_eq!(session.timeouts, timeouts);
    }
}
