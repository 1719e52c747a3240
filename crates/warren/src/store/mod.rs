//! What outlives the daemon: one record for each sandbox and each session.
//!
//! The manager writes a record before it touches the kernel, so that a crash leaves a record and
//! not an orphan, and answers only once "done" is durable. A [`Store`] keeps the records; what they
//! mean is left to the manager, and what an anchor means to the backend that made it.

use std::fmt;
use std::io;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{Base, Reach, SandboxId, SandboxSession, SandboxSpec, SignedReceipt};

pub mod memory;
pub mod sqlite;

/// Keeps the manager's records.
#[async_trait]
pub trait Store: Send + Sync + fmt::Debug {
    /// Returns everything that was applied.
    async fn load(&self) -> Result<Image, StoreError>;

    /// Applies all changes, in order, or none of them; durable once it returns.
    ///
    /// Dropping what is not there changes nothing, and a put replaces what is there.
    async fn apply(&self, changes: Vec<Change>) -> Result<(), StoreError>;
}

/// One change to what is stored.
#[expect(clippy::large_enum_variant, reason = "a change is made, written and dropped, never kept")]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Change {
    /// Writes a sandbox, new or changed.
    PutSandbox(SandboxRecord),
    /// Forgets a sandbox.
    DropSandbox(SandboxId),
    /// Writes a session, new or changed.
    PutSession(SessionRecord),
    /// Forgets a session, by its id.
    DropSession(String),
    /// Sets which sandbox is used when a caller names none.
    SetDefault(Option<SandboxId>),
}

/// A sandbox, as it is stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxRecord {
    /// Its id, known before it is made.
    pub id: SandboxId,
    /// The backend that makes it.
    pub backend: String,
    /// What it shall be.
    pub spec: SandboxSpec,
    /// How far its life has come.
    pub phase: Phase,
    /// The client that owns it; `None` while it is warm.
    pub owner: Option<String>,
    /// Whether a command may have run in it.
    pub used: bool,
    /// What its backend finds it by after a restart; `None` until it runs.
    pub anchor: Option<String>,
    /// When it was asked for.
    pub created_at: DateTime<Utc>,
    /// What its root stands on.
    #[serde(default)]
    pub base: Base,
    /// What was tried of it since it was made, if anything was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipt: Option<SignedReceipt>,
    /// How much it reaches of what its spec lets it, for whoever makes it anew; written when that is about to happen.
    #[serde(default)]
    pub reach: Reach,
}

/// How far the life of a stored sandbox has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// It is about to be made, or half-made.
    Creating,
    /// It runs.
    Running,
    /// It is suspended.
    Suspended,
    /// It is about to be destroyed, or half-destroyed.
    Destroying,
    /// It runs, and is about to be made anew on the base of its record, or half-made.
    Restoring,
}

/// A session, as it is stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionRecord {
    /// The session, as clients see it.
    pub session: SandboxSession,
    /// Whether it was released to be taken up again, so that its sandbox is kept alive.
    pub kept_alive: bool,
    /// How long it had rested when this was written: a monotonic clock does not survive a restart.
    pub rested_ms: u64,
}

/// Everything that is stored.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Image {
    /// The sandboxes, in no order.
    pub sandboxes: Vec<SandboxRecord>,
    /// The sessions, in no order.
    pub sessions: Vec<SessionRecord>,
    /// The sandbox that is used when a caller names none.
    pub default: Option<SandboxId>,
}

/// Why a store could not read or write. What it held before, it still holds.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no room left.
    #[error("the store is full")]
    Full,
    /// What is stored cannot be understood.
    #[error("the store is damaged: {reason}")]
    Damaged {
        /// What is wrong with it.
        reason: String,
    },
    /// Another process holds the store.
    #[error("the store is in use by another process")]
    Busy,
    /// The store was closed, or its writer is gone.
    #[error("the store is closed")]
    Closed,
    /// The store could not be read or written.
    #[error("cannot {action} the store")]
    Io {
        /// What was tried, as a verb: "open".
        action: String,
        /// What the host said.
        source: io::Error,
    },
}

impl StoreError {
    /// Makes a [`StoreError::Io`]: "cannot {action} the store".
    pub fn io(action: impl Into<String>, source: io::Error) -> Self {
        Self::Io { action: action.into(), source }
    }
}
