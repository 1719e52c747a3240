//! Rule H1, statistics, and the manager's own life.

use std::sync::Arc;

use warren::backend::FakeBackend;
use warren::backend::fake::{Step, When};
use warren::*;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn h1_a_broken_backend_is_named_and_hides_no_other() {
    let (broken, stuck) = (FakeBackend::named("broken"), FakeBackend::named("stuck"));
    let works = FakeBackend::named("works");
    broken.fail(Step::Health, When::Always);
    stuck.stall(Step::Health, When::Always);
    let all: Vec<Arc<dyn IsolationBackend>> =
        vec![Arc::new(broken.clone()), Arc::new(stuck), Arc::new(works)];
    let manager = DefaultSandboxManager::new(all, poolless());
    assert!(manager.health().await.unwrap());
    let report = manager.health_report().await;
    let report: Vec<_> = report.iter().map(|(name, health)| (&**name, health.is_ok())).collect();
    assert_eq!(report, [("broken", false), ("stuck", false), ("works", true)]);

    let manager = DefaultSandboxManager::new(vec![Arc::new(broken)], poolless());
    assert!(!manager.health().await.unwrap());
    assert!(!DefaultSandboxManager::new(Vec::new(), poolless()).health().await.unwrap());
}

#[test]
fn a_manager_made_outside_of_a_runtime_starts_with_its_first_call() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(1, 1));
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_time().start_paused(true).build().unwrap().block_on(async {
        manager.stats().await;
        until("one is warm", async || backend.counts().live == 1).await;
    });
}

#[tokio::test(start_paused = true)]
async fn a_manager_that_is_dropped_stops_its_tasks() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, pooled(1, 1));
    until("one is warm", async || backend.counts().live == 1).await;
    drop(manager);
    tokio::time::sleep(3_600 * SECOND).await;
    assert_eq!((backend.counts().created, backend.counts().live), (1, 1), "nobody replaced it");
}

#[tokio::test(start_paused = true)]
async fn shutting_down_leaves_all_running_or_stops_all() {
    for (mode, left) in [(Shutdown::LeaveRunning, 3), (Shutdown::StopAll, 0)] {
        let backend = FakeBackend::new();
        let manager = manager(&backend, pooled(1, 1));
        until("one is warm", async || backend.counts().live == 1).await;
        acquire(&manager, "c").await;
        let (session, _) = acquire(&manager, "c").await;
        manager.shutdown(mode).await;
        assert_eq!(backend.counts().live, left, "{mode:?}");
        let refused = manager.acquire(&spec(), &options(), "c").await.unwrap_err();
        assert_eq!(refused.code(), "shutting_down");
        assert_eq!(manager.terminate(&session).await.unwrap_err().code(), "shutting_down");
        manager.shutdown(mode).await;
    }
}

#[tokio::test(start_paused = true)]
async fn shutting_down_is_bounded() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    acquire(&manager, "c").await;
    backend.stall(Step::Destroy, When::Always);
    let began = tokio::time::Instant::now();
    manager.shutdown(Shutdown::StopAll).await;
    assert!(began.elapsed().as_secs() <= 61, "{:?}", began.elapsed());
}
