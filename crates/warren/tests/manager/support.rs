//! What the tests of the manager share.

use std::sync::Arc;
use std::time::Duration;

use warren::backend::FakeBackend;
use warren::store::memory::MemoryStore;
use warren::*;

pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// Returns a configuration without a pool.
pub(crate) fn poolless() -> SandboxManagerConfig {
    let pool = PoolConfig { enabled: false, ..PoolConfig::default() };
    SandboxManagerConfig { pool, ..SandboxManagerConfig::default() }
}

/// Returns a configuration with a pool of this size for the default profile.
pub(crate) fn pooled(min_warm: u32, max_warm: u32) -> SandboxManagerConfig {
    let pool = PoolConfig { min_warm, max_warm, ..PoolConfig::default() };
    SandboxManagerConfig { pool, ..SandboxManagerConfig::default() }
}

pub(crate) fn manager(
    backend: &FakeBackend,
    config: SandboxManagerConfig,
) -> DefaultSandboxManager {
    DefaultSandboxManager::new(vec![Arc::new(backend.clone())], config)
}

pub(crate) async fn opened(
    backend: &FakeBackend,
    config: SandboxManagerConfig,
    store: &MemoryStore,
) -> DefaultSandboxManager {
    let backends: Vec<Arc<dyn IsolationBackend>> = vec![Arc::new(backend.clone())];
    DefaultSandboxManager::open(backends, config, Arc::new(store.clone())).await.unwrap()
}

pub(crate) fn spec() -> SandboxSpec {
    SandboxSpec::default()
}

pub(crate) fn options() -> SandboxSelectionOptions {
    SandboxSelectionOptions::default()
}

pub(crate) fn from_pool() -> SandboxSelectionOptions {
    SandboxSelectionOptions { use_pool: true, ..options() }
}

pub(crate) fn preferring(id: &SandboxId) -> SandboxSelectionOptions {
    SandboxSelectionOptions { preferred_id: Some(id.clone()), ..options() }
}

pub(crate) type Acquired = (SandboxSession, Arc<dyn Sandbox>);

/// Acquires a sandbox of the default spec.
pub(crate) async fn acquire(manager: &DefaultSandboxManager, client: &str) -> Acquired {
    manager.acquire(&spec(), &options(), client).await.unwrap()
}

pub(crate) fn attach_to(id: &SandboxId, client: &str) -> AttachRequest {
    AttachRequest {
        sandbox_id: id.clone(),
        client_id: client.to_owned(),
        create_if_missing: false,
        create_spec: None,
    }
}

pub(crate) async fn run(sandbox: &dyn Sandbox, line: &str) -> Result<ExecOutput> {
    let command = Command::new("sh").args(["-c", line]);
    sandbox.exec(&command, &ExecContext::default()).await
}

pub(crate) async fn state(manager: &DefaultSandboxManager, id: &str) -> Option<SessionState> {
    manager.get_session(id).await.unwrap().map(|session| session.state)
}

/// Waits until something holds, for a minute of paused time.
pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..60_000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("in a minute not: {what}");
}
