//! What was tried of a sandbox, and what becomes of one that is open.

use std::sync::Arc;

use warren::backend::FakeBackend;
use warren::backend::fake::{Step, When};
use warren::receipt::{self, ReceiptKey};
use warren::store::memory::MemoryStore;
use warren::*;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_is_found_open_is_destroyed() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (session, sandbox) = acquire(&manager, "c").await;
    let id = sandbox.id().clone();
    let kept = manager.verify(&id).await.unwrap();
    assert_eq!((kept.receipt.extent, kept.receipt.verdict), (Extent::Everything, Verdict::Partly));
    assert_eq!(manager.receipt(&id).await.unwrap(), kept);
    run(&*sandbox, "true").await.unwrap();
    let used = manager.verify(&id).await.unwrap();
    assert_eq!(used.receipt.extent, Extent::Walls, "whatever runs is not to notice");

    backend.fail(Step::Verify, When::Nth(1));
    let error = manager.verify(&id).await.unwrap_err();
    let SandboxError::WallOpen { id: open_id, open } = error else { panic!("{error:?}") };
    assert_eq!((open_id, open.len()), (id.clone(), 1));
    assert!(open[0].starts_with("network: connect to 192.0.2.1"), "{open:?}");
    assert_eq!(backend.counts().live, 0);
    assert_eq!(state(&manager, &session.session_id).await, None);
    assert!(matches!(manager.verify(&id).await, Err(SandboxError::NotFound { .. })));
    assert!(matches!(manager.receipt(&id).await, Err(SandboxError::NotFound { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_suspended_sandbox_is_not_tried_and_stays() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (session, sandbox) = acquire(&manager, "c").await;
    manager.suspend(&session).await.unwrap();
    let error = manager.verify(sandbox.id()).await.unwrap_err();
    assert!(matches!(error, SandboxError::Suspended { .. }), "{error:?}");
    let receipt = manager.receipt(sandbox.id()).await.unwrap();
    assert_eq!(receipt.receipt.extent, Extent::Creation, "what was tried before is known");
}

#[tokio::test(start_paused = true)]
async fn what_is_warm_was_tried_and_what_is_open_never_becomes_warm() {
    let backend = FakeBackend::new();
    backend.fail(Step::Verify, When::Nth(1));
    let manager = manager(&backend, pooled(1, 1));
    until("one is warm", async || manager.stats().await.pool_size == 1).await;
    assert_eq!((backend.counts().created, backend.counts().live), (2, 1), "the first was open");
    let (_, sandbox) = manager.acquire(&spec(), &from_pool(), "c").await.unwrap();
    let receipt = manager.receipt(sandbox.id()).await.unwrap().receipt;
    assert_eq!(receipt.extent, Extent::Pristine, "tried before anybody asked for it");
}

#[tokio::test(start_paused = true)]
async fn a_receipt_is_signed_and_outlives_the_manager() {
    let backend = FakeBackend::new();
    let store = MemoryStore::default();
    let place = tempfile::tempdir().unwrap();
    let key = || ReceiptKey::open(&place.path().join("key")).unwrap();
    let open = async || {
        let backends: Vec<Arc<dyn IsolationBackend>> = vec![Arc::new(backend.clone())];
        let store = Arc::new(store.clone());
        DefaultSandboxManager::open_signing(backends, poolless(), store, Some(key())).await.unwrap()
    };
    let manager = open().await;
    let public = manager.receipt_key().unwrap();
    let (_, sandbox) = acquire(&manager, "c").await;
    let id = sandbox.id().clone();
    let first = manager.receipt(&id).await.unwrap();
    let text = serde_json::to_string(&first).unwrap();
    assert_eq!(receipt::verify(&text, &public).unwrap().extent, Extent::Creation);
    let made = manager.verify(&id).await.unwrap();
    assert!(made.envelope.is_some());
    manager.shutdown(Shutdown::LeaveRunning).await;
    backend.restart();

    let manager = open().await;
    let kept = manager.receipt(&id).await.unwrap();
    assert_eq!(kept, made, "as it was signed");
    let text = serde_json::to_string(&kept).unwrap();
    assert_eq!(receipt::verify(&text, &public).unwrap(), made.receipt);
}
