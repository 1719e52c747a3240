//! Rules P1 to P5.

use std::collections::HashSet;
use std::time::Duration;

use warren::backend::FakeBackend;
use warren::backend::fake::{Step, When};
use warren::*;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn p1_the_pool_fills_itself_and_is_full_again_after_a_burst() {
    let backend = FakeBackend::new();
    let mut config = pooled(2, 3);
    config.pool.warm_profiles = vec!["default".into(), "strict".into()];
    let manager = manager(&backend, config);
    // Nobody calls: the backend's own count says what there is.
    until("it is as full as it may be", async || backend.counts().live == 3).await;
    tokio::time::sleep(SECOND).await;
    assert_eq!((backend.counts().live, manager.stats().await.pool_size), (3, 3));

    let mut taken = Vec::new();
    for _ in 0..10 {
        taken.push(manager.acquire(&spec(), &from_pool(), "c").await.unwrap());
        assert!(manager.stats().await.pool_size <= 3);
    }
    until("it is full again", async || backend.counts().live == 13).await;
    tokio::time::sleep(SECOND).await;
    assert_eq!((backend.counts().live, manager.stats().await.pool_size), (13, 3));
}

#[tokio::test(start_paused = true)]
async fn p1_what_grew_too_old_is_replaced() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(2, 2));
    until("two are warm", async || backend.counts().live == 2).await;
    let first: HashSet<_> = backend.list_sandboxes().await.unwrap().into_iter().collect();
    tokio::time::sleep(Duration::from_secs(601)).await;
    until("two are warm", async || manager.stats().await.pool_size == 2).await;
    let second: HashSet<_> = backend.list_sandboxes().await.unwrap().into_iter().collect();
    assert!(first.is_disjoint(&second), "none is older than its time");
    assert_eq!((backend.counts().created, backend.counts().most_live), (4, 2));
}

#[tokio::test(start_paused = true)]
async fn p1_a_backend_that_fails_is_not_asked_in_a_busy_loop() {
    let backend = FakeBackend::new();
    backend.fail(Step::Create, When::Always);
    let manager = manager(&backend, pooled(2, 2));
    tokio::time::sleep(Duration::from_secs(60)).await;
    backend.heal(Step::Create);
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(manager.stats().await.pool_size, 2, "it is asked again");
}

#[tokio::test(start_paused = true)]
async fn p2_a_used_sandbox_never_reaches_another_client() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(2, 2));
    let mut seen = HashSet::new();
    for i in 0..20 {
        until("two are warm", async || manager.stats().await.pool_size == 2).await;
        let client = format!("client {i}");
        let (session, sandbox) = manager.acquire(&spec(), &from_pool(), &client).await.unwrap();
        run(&*sandbox, "true").await.unwrap();
        assert!(seen.insert(session.sandbox_id.clone()), "given twice");
        manager.release(&session, i % 2 == 0).await.unwrap();
    }
    assert_eq!(backend.counts().wrong_claims, 0);
    assert!(manager.stats().await.pool_hit_rate == 1.0);
}

#[tokio::test(start_paused = true)]
async fn p2_what_is_warm_is_nobodys() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(1, 1));
    until("one is warm", async || manager.stats().await.pool_size == 1).await;
    let id = backend.list_sandboxes().await.unwrap().remove(0);
    assert!(manager.get_sandbox(&id).await.unwrap().is_none());
    assert!(manager.set_default_sandbox(Some(id.clone())).await.is_err());
    let request = AttachRequest { create_if_missing: true, ..attach_to(&id, "c") };
    assert_eq!(manager.attach(request).await.unwrap_err().code(), "not_found");
    assert!(manager.acquire(&spec(), &preferring(&id), "c").await.is_err());
    assert_eq!(manager.stats().await.pool_size, 1);
}

#[tokio::test(start_paused = true)]
async fn p3_what_a_caller_will_ask_for_is_kept_warm_beside_the_profiles() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(1, 10));
    let mut own = SandboxSpec { workdir: "/home/user".into(), ..spec() };
    own.limits.max_write_bytes = Some(1 << 30);
    manager.keep_warm(own.clone()).unwrap();
    manager.keep_warm(own.clone()).unwrap();
    let both = async || manager.stats().await.pool_size == 2;
    until("one of each is warm", both).await;
    for round in 1..=3 {
        let (_, sandbox) = manager.acquire(&own, &from_pool(), "ann").await.unwrap();
        assert_eq!(sandbox.capabilities().limits, own.limits);
        let (_, sandbox) = manager.acquire(&spec(), &from_pool(), "ben").await.unwrap();
        assert_eq!(sandbox.capabilities().limits, spec().limits);
        until("both are made up for", both).await;
        let stats = manager.stats().await;
        assert!((stats.pool_hit_rate - 1.0).abs() < 1e-9, "round {round}: {stats:?}");
    }
    let odd = SandboxSpec { profile: String::new(), ..spec() };
    assert!(manager.keep_warm(odd).is_err());
}

#[tokio::test(start_paused = true)]
async fn p3_a_claim_binds_the_whole_spec() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(1, 1));
    until("one is warm", async || manager.stats().await.pool_size == 1).await;
    let spec = SandboxSpec {
        environment: vec![("TEAM".into(), "blue".into())],
        network_enabled: true,
        limits: ResourceLimits { max_memory_bytes: Some(1 << 28), ..ResourceLimits::default() },
        labels: vec![("a".into(), "b".into())],
        ..spec()
    };
    let required_labels = [("a".to_owned(), "b".to_owned())].into();
    let options = SandboxSelectionOptions { required_labels, ..from_pool() };
    let (session, sandbox) = manager.acquire(&spec, &options, "c").await.unwrap();
    assert_eq!(backend.counts().claimed, 1);
    let can = sandbox.capabilities();
    assert_eq!((can.has_network, can.limits.max_memory_bytes), (true, Some(1 << 28)));
    assert_eq!(run(&*sandbox, "echo $TEAM").await.unwrap().stdout, b"blue\n");
    assert_eq!(*sandbox.id(), session.sandbox_id);
}

#[tokio::test(start_paused = true)]
async fn p3_an_entry_that_cannot_take_the_spec_stays_and_the_caller_gets_a_new_one() {
    let backend = FakeBackend::new();
    backend.set_unclaimable(|spec| spec.network_enabled);
    let manager = manager(&backend, pooled(2, 2));
    until("two are warm", async || manager.stats().await.pool_size == 2).await;
    let spec = SandboxSpec { network_enabled: true, ..spec() };
    let (_, sandbox) = manager.acquire(&spec, &from_pool(), "c").await.unwrap();
    assert!(sandbox.capabilities().has_network);
    tokio::time::sleep(SECOND).await;
    let stats = manager.stats().await;
    assert_eq!((backend.counts().claimed, backend.counts().created, stats.pool_size), (0, 3, 2));
    assert!(stats.pool_hit_rate == 0.0);
}

#[tokio::test(start_paused = true)]
async fn p3_an_empty_pool_or_a_broken_entry_falls_back_to_creating() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(1, 1));
    until("one is warm", async || manager.stats().await.pool_size == 1).await;
    let warm = backend.list_sandboxes().await.unwrap().remove(0);
    backend.crash(&warm);
    let (session, _) = manager.acquire(&spec(), &from_pool(), "c").await.unwrap();
    assert_ne!(session.sandbox_id, warm);
    let without = self::manager_without_pool();
    without.acquire(&spec(), &from_pool(), "c").await.unwrap();
}

fn manager_without_pool() -> DefaultSandboxManager {
    manager(&FakeBackend::new(), poolless())
}

#[tokio::test(start_paused = true)]
async fn p4_a_hit_and_a_miss_count_once_each() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(1, 1));
    until("one is warm", async || manager.stats().await.pool_size == 1).await;
    backend.stall(Step::Create, When::Always);
    manager.acquire(&spec(), &from_pool(), "c").await.unwrap();
    let stats = manager.stats().await;
    assert_eq!((stats.pool_size, stats.pool_hit_rate, stats.active_sandboxes), (0, 1.0, 1));
    let (spec, options) = (spec(), from_pool());
    let missed = manager.acquire(&spec, &options, "c");
    let release = async {
        tokio::time::sleep(SECOND).await;
        backend.release(Step::Create);
    };
    let (missed, ()) = tokio::join!(missed, release);
    missed.unwrap();
    assert!(manager.stats().await.pool_hit_rate == 0.5);
    acquire(&manager, "c").await;
    assert!(manager.stats().await.pool_hit_rate == 0.5, "who does not ask the pool is neither");
}

#[tokio::test(start_paused = true)]
async fn p5_no_sandbox_reaches_two_claims() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(8, 8));
    until("eight are warm", async || manager.stats().await.pool_size == 8).await;
    let mut claims = tokio::task::JoinSet::new();
    for i in 0..32 {
        let manager = manager.clone();
        claims.spawn(async move {
            manager.acquire(&spec(), &from_pool(), &format!("{i}")).await.unwrap().0.sandbox_id
        });
    }
    let ids: HashSet<_> = claims.join_all().await.into_iter().collect();
    assert_eq!((ids.len(), backend.counts().wrong_claims), (32, 0));
    assert!(backend.counts().claimed >= 8);
}
