//! The front door: who may use which sandbox, for how long.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::{
    AcquireOptions, AttachRequest, AttachResult, Base, ForkOptions, Importer,
    IsolationRequirements, PoolConfig, Result, Sandbox, SandboxError, SandboxId,
    SandboxSelectionOptions, SandboxSession, SandboxSpec, SessionTimeouts, SignedReceipt, Snapshot,
    SnapshotOptions, Witness,
};

fn no_snapshots() -> SandboxError {
    SandboxError::Unsupported {
        feature: "snapshots".to_owned(),
        backend: "this manager's".to_owned(),
        hint: "use a manager that keeps them".to_owned(),
    }
}

/// Refuses what only a manager that knows its backends' levels can promise.
fn require_default(isolation: &IsolationRequirements) -> Result<(), SandboxError> {
    if isolation.is_default() {
        return Ok(());
    }
    Err(SandboxError::Unsupported {
        feature: "a choice of isolation".to_owned(),
        backend: "this manager's".to_owned(),
        hint: "leave the level and the guarantees out".to_owned(),
    })
}

/// Gives sandboxes to clients and takes them back, by the rules of the contract.
#[async_trait]
pub trait SandboxManager: Send + Sync {
    /// Gives a client a sandbox that fits the spec and the options, and begins a session on it.
    async fn acquire(
        &self,
        spec: &SandboxSpec,
        options: &SandboxSelectionOptions,
        client_id: &str,
    ) -> Result<(SandboxSession, Arc<dyn Sandbox>), SandboxError>;

    /// As [`acquire`](Self::acquire), of a sandbox whose root stands on `base`.
    async fn acquire_on(
        &self,
        spec: &SandboxSpec,
        base: &Base,
        options: &SandboxSelectionOptions,
        client_id: &str,
    ) -> Result<(SandboxSession, Arc<dyn Sandbox>), SandboxError> {
        if base.is_plain() {
            return self.acquire(spec, options, client_id).await;
        }
        Err(SandboxError::Unsupported {
            feature: "a root of layers".to_owned(),
            backend: "this manager's".to_owned(),
            hint: "acquire one on the host's toolchain".to_owned(),
        })
    }

    /// As [`acquire`](Self::acquire), with everything that can be asked for.
    async fn acquire_with(
        &self,
        spec: &SandboxSpec,
        options: &AcquireOptions,
        client_id: &str,
    ) -> Result<(SandboxSession, Arc<dyn Sandbox>), SandboxError> {
        require_default(&options.isolation)?;
        self.acquire_on(spec, &options.base, &options.select, client_id).await
    }

    /// Gives a sandbox back; kept alive, it waits for the same client.
    async fn release(&self, session: &SandboxSession, keep_alive: bool)
    -> Result<(), SandboxError>;

    /// Joins a sandbox by its id.
    async fn attach(&self, request: AttachRequest) -> Result<AttachResult, SandboxError>;

    /// As [`attach`](Self::attach), if the sandbox is, or is made, as strong as is required.
    async fn attach_with(
        &self,
        request: AttachRequest,
        isolation: &IsolationRequirements,
    ) -> Result<AttachResult, SandboxError> {
        require_default(isolation)?;
        self.attach(request).await
    }

    /// Leaves a sandbox; its processes go on.
    async fn detach(&self, session: &SandboxSession) -> Result<(), SandboxError>;

    /// Stops every process of the session's sandbox.
    async fn suspend(&self, session: &SandboxSession) -> Result<(), SandboxError>;

    /// Lets the processes of the session's sandbox continue.
    async fn resume(&self, session: &SandboxSession) -> Result<SandboxSession, SandboxError>;

    /// Ends a session, and with the last one its sandbox.
    async fn terminate(&self, session: &SandboxSession) -> Result<(), SandboxError>;

    /// As [`suspend`](Self::suspend), with what the sandbox has in memory on disk. Where that cannot be it is an error, and the
    /// session is as it was.
    async fn suspend_to_disk(&self, session: &SandboxSession) -> Result<(), SandboxError> {
        let _ = session;
        Err(SandboxError::Unsupported {
            feature: "suspending to disk".to_owned(),
            backend: "only".to_owned(),
            hint: "suspend the session in memory".to_owned(),
        })
    }

    /// Saves the session's sandbox, which stands still for a moment.
    async fn snapshot(
        &self,
        session: &SandboxSession,
        options: &SnapshotOptions,
    ) -> Result<Snapshot, SandboxError> {
        let _ = (session, options);
        Err(no_snapshots())
    }

    /// Saves the session's sandbox as a place to go back to, which goes with it.
    async fn savepoint(&self, session: &SandboxSession) -> Result<Snapshot, SandboxError> {
        let _ = session;
        Err(no_snapshots())
    }

    /// Returns all snapshots, the oldest first.
    async fn list_snapshots(&self) -> Result<Vec<Snapshot>, SandboxError> {
        Ok(Vec::new())
    }

    /// Finds a snapshot of a client by its id or its name.
    async fn get_snapshot(&self, client_id: &str, id: &str) -> Result<Snapshot, SandboxError> {
        let _ = client_id;
        Err(SandboxError::NotFound { what: "snapshot", id: id.to_owned() })
    }

    /// Forgets a snapshot of a client, and removes what nothing else stands on.
    async fn remove_snapshot(&self, client_id: &str, id: &str) -> Result<(), SandboxError> {
        let _ = client_id;
        Err(SandboxError::NotFound { what: "snapshot", id: id.to_owned() })
    }

    /// Makes the session's sandbox what a snapshot says: its processes end, and it keeps its id, its
    /// sessions and its spec.
    async fn restore(
        &self,
        session: &SandboxSession,
        snapshot: &Snapshot,
    ) -> Result<(), SandboxError> {
        let _ = (session, snapshot);
        Err(no_snapshots())
    }

    /// Goes back to the last savepoint of the session's sandbox, which is used up by that.
    async fn undo(&self, session: &SandboxSession) -> Result<Snapshot, SandboxError> {
        let _ = session;
        Err(no_snapshots())
    }

    /// Makes sandboxes that are as the session's is now, each with a session: all of them, or none
    /// unless fewer will do.
    async fn fork(
        &self,
        session: &SandboxSession,
        options: &ForkOptions,
    ) -> Result<Vec<(SandboxSession, Arc<dyn Sandbox>)>, SandboxError> {
        let _ = (session, options);
        Err(no_snapshots())
    }

    /// Likewise, of what a snapshot says, for a client.
    async fn fork_snapshot(
        &self,
        snapshot: &Snapshot,
        options: &ForkOptions,
        client_id: &str,
    ) -> Result<Vec<(SandboxSession, Arc<dyn Sandbox>)>, SandboxError> {
        let _ = (snapshot, options, client_id);
        Err(no_snapshots())
    }

    /// Writes a snapshot of a client to one file, which has no name and is read from its beginning.
    async fn export_snapshot(
        &self,
        client_id: &str,
        id: &str,
    ) -> Result<std::fs::File, SandboxError> {
        let _ = (client_id, id);
        Err(no_snapshots())
    }

    /// Makes what was exported a snapshot of a client, under its own name or another, if it asks for nothing that
    /// who brings it may not ask for.
    async fn import_snapshot(
        &self,
        client_id: &str,
        name: Option<String>,
        importer: Importer,
        from: Box<dyn std::io::Read + Send>,
    ) -> Result<Snapshot, SandboxError> {
        let _ = (client_id, name, importer, from);
        Err(no_snapshots())
    }

    /// Tries the walls of a sandbox from inside. One that does not hold is destroyed, and the error says
    /// what got through. What nothing has run in yet is tried to the limits.
    async fn verify(&self, sandbox_id: &SandboxId) -> Result<SignedReceipt, SandboxError> {
        let _ = sandbox_id;
        Err(SandboxError::Unsupported {
            feature: "receipts".to_owned(),
            backend: "this manager's".to_owned(),
            hint: "use a manager that keeps them".to_owned(),
        })
    }

    /// Returns what was tried of a sandbox the last time.
    async fn receipt(&self, sandbox_id: &SandboxId) -> Result<SignedReceipt, SandboxError> {
        Err(SandboxError::NotFound { what: "sandbox", id: sandbox_id.to_string() })
    }

    /// Returns what receipts are checked with, in PEM, if they are signed.
    fn receipt_key(&self) -> Option<String> {
        None
    }

    /// Returns all sessions.
    async fn list_sessions(&self) -> Result<Vec<SandboxSession>, SandboxError>;

    /// Lists the sessions on one sandbox, oldest first. A manager that knows them need not go through all.
    async fn list_sessions_on(
        &self,
        sandbox_id: &SandboxId,
    ) -> Result<Vec<SandboxSession>, SandboxError> {
        let mut sessions = self.list_sessions().await?;
        sessions.retain(|session| session.sandbox_id == *sandbox_id);
        Ok(sessions)
    }

    /// Returns the session with this id.
    async fn get_session(&self, session_id: &str) -> Result<Option<SandboxSession>, SandboxError>;

    /// Returns a session on this sandbox.
    async fn get_session_by_sandbox(
        &self,
        sandbox_id: &SandboxId,
    ) -> Result<Option<SandboxSession>, SandboxError>;

    /// Returns the client's active session.
    async fn get_session_by_client(
        &self,
        client_id: &str,
    ) -> Result<Option<SandboxSession>, SandboxError>;

    /// Returns the sandbox with this id.
    async fn get_sandbox(
        &self,
        sandbox_id: &SandboxId,
    ) -> Result<Option<Arc<dyn Sandbox>>, SandboxError>;

    /// Sets which sandbox is used when a caller names none.
    async fn set_default_sandbox(&self, sandbox_id: Option<SandboxId>) -> Result<(), SandboxError>;

    /// Returns which sandbox is used when a caller names none.
    async fn get_default_sandbox(&self) -> Option<SandboxId>;

    /// Ends what timed out and returns how many sessions that were.
    async fn cleanup_expired(&self) -> Result<u64, SandboxError>;

    /// Returns the statistics of this moment.
    async fn stats(&self) -> SandboxManagerStats;

    /// Tells whether at least one backend works.
    async fn health(&self) -> Result<bool, SandboxError>;

    /// Has somebody hear what becomes of every command from now on, and of those that ended while nobody was there to
    /// hear it. Whoever did so before hears no more.
    async fn witnessed_by(&self, witness: Arc<dyn Witness>) {
        let _ = witness;
    }

    /// Tells whoever hears of commands what was summed up so far.
    fn tell_rest(&self) {}
}

/// How a manager behaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SandboxManagerConfig {
    /// How many sandboxes there may be at once.
    pub max_sandboxes: u32,
    /// How many are kept warm.
    pub pool: PoolConfig,
    /// The timeouts of each new session.
    pub default_timeouts: SessionTimeouts,
    /// How often what timed out is ended.
    pub cleanup_interval: Duration,
}

impl Default for SandboxManagerConfig {
    fn default() -> Self {
        Self {
            max_sandboxes: 100,
            pool: PoolConfig::default(),
            default_timeouts: SessionTimeouts::default(),
            cleanup_interval: Duration::from_secs(60),
        }
    }
}

/// The statistics of one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SandboxManagerStats {
    /// Sandboxes made since the start.
    pub sandboxes_created: u64,
    /// Sandboxes that live.
    pub active_sandboxes: u64,
    /// Sessions that are active.
    pub active_sessions: u64,
    /// Sessions that are detached.
    pub detached_sessions: u64,
    /// Warm sandboxes that wait.
    pub pool_size: u64,
    /// Claims that the pool could serve, 0 to 1.
    pub pool_hit_rate: f64,
    /// How long a creation takes on average.
    pub avg_creation_time_ms: f64,
    /// Sandboxes destroyed because a session timed out.
    pub timeout_destroys: u64,
}
