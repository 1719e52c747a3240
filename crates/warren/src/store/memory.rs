//! A store in memory, for tests: it can be told to fail at a write, and what was applied to it
//! outlives the manager that wrote it, as a file would.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use super::{Change, Image, SandboxRecord, SessionRecord, Store, StoreError};
use crate::SandboxId;

/// A store in memory. Clones share everything.
#[derive(Debug, Clone, Default)]
pub struct MemoryStore {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    sandboxes: BTreeMap<SandboxId, SandboxRecord>,
    sessions: BTreeMap<String, SessionRecord>,
    default: Option<SandboxId>,
    writes: u64,
    failure: Option<Failure>,
    crashed: bool,
}

/// A write that is to fail.
#[derive(Debug, Clone, Copy)]
struct Failure {
    at: u64,
    kind: FailureKind,
}

/// How a write fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FailureKind {
    /// That write alone says that the store is full.
    Once,
    /// That write and all after it do, until the store is healed.
    Full,
    /// That write never returns, nor does any after it: the process died before it was durable.
    CrashBefore,
    /// That write is durable and never returns: the process died before it could answer.
    CrashAfter,
}

impl MemoryStore {
    /// Makes an empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Tells the n-th write from now to fail; 1 is the next.
    pub fn fail_nth(&self, n: u64) {
        self.plan(n, FailureKind::Once);
    }

    /// Tells the n-th write from now, and all after it, to fail, until [`heal`](Self::heal).
    pub fn fill_at(&self, n: u64) {
        self.plan(n, FailureKind::Full);
    }

    /// Tells the n-th write from now to be lost, and its writer to hear nothing any more.
    pub fn crash_before(&self, n: u64) {
        self.plan(n, FailureKind::CrashBefore);
    }

    /// Tells the n-th write from now to be durable, and its writer to hear nothing any more.
    pub fn crash_after(&self, n: u64) {
        self.plan(n, FailureKind::CrashAfter);
    }

    /// Takes back what it was told to fail at.
    pub fn heal(&self) {
        self.lock().failure = None;
    }

    /// Returns how many writes there were, those that failed included.
    pub fn writes(&self) -> u64 {
        self.lock().writes
    }

    /// Tells whether the crash that was asked for has come.
    pub fn has_crashed(&self) -> bool {
        self.lock().crashed
    }

    /// Returns a store with what was applied to this one, for the process after the crash. This one
    /// takes nothing more: whoever still holds it is dead.
    pub fn reopen(&self) -> Self {
        let mut old = self.lock();
        old.crashed = true;
        let shared = Shared {
            sandboxes: old.sandboxes.clone(),
            sessions: old.sessions.clone(),
            default: old.default.clone(),
            ..Shared::default()
        };
        Self { shared: Arc::new(Mutex::new(shared)) }
    }

    /// Returns what is stored.
    pub fn image(&self) -> Image {
        let shared = self.lock();
        Image {
            sandboxes: shared.sandboxes.values().cloned().collect(),
            sessions: shared.sessions.values().cloned().collect(),
            default: shared.default.clone(),
        }
    }

    fn plan(&self, n: u64, kind: FailureKind) {
        let mut shared = self.lock();
        shared.failure = Some(Failure { at: shared.writes + n, kind });
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What becomes of one write.
enum Outcome {
    Done,
    Failed(StoreError),
    Lost,
}

impl Shared {
    fn write(&mut self, changes: Vec<Change>) -> Outcome {
        if self.crashed {
            return Outcome::Lost;
        }
        self.writes += 1;
        match self.failure {
            Some(Failure { at, kind }) if self.writes >= at => match kind {
                FailureKind::Once => {
                    self.failure = None;
                    return Outcome::Failed(StoreError::Full);
                }
                FailureKind::Full => return Outcome::Failed(StoreError::Full),
                FailureKind::CrashBefore => {
                    self.crashed = true;
                    return Outcome::Lost;
                }
                FailureKind::CrashAfter => {
                    self.crashed = true;
                    self.commit(changes);
                    return Outcome::Lost;
                }
            },
            Some(_) | None => {}
        }
        self.commit(changes);
        Outcome::Done
    }

    fn commit(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::PutSandbox(record) => {
                    self.sandboxes.insert(record.id.clone(), record);
                }
                Change::DropSandbox(id) => {
                    self.sandboxes.remove(&id);
                }
                Change::PutSession(record) => {
                    self.sessions.insert(record.session.session_id.clone(), record);
                }
                Change::DropSession(id) => {
                    self.sessions.remove(&id);
                }
                Change::SetDefault(id) => self.default = id,
            }
        }
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn load(&self) -> Result<Image, StoreError> {
        Ok(self.image())
    }

    async fn apply(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        let outcome = self.lock().write(changes);
        match outcome {
            Outcome::Done => Ok(()),
            Outcome::Failed(error) => Err(error),
            Outcome::Lost => std::future::pending().await,
        }
    }
}
