//! What one sandbox can do, and what holds it.

use std::path::PathBuf;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::{EnforcedLimit, ResourceLimits};

/// What one sandbox can do: what it really has, not what was configured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxCapabilities {
    /// The sandbox.
    pub sandbox_id: String,
    /// The backend that made it.
    pub backend: String,
    /// The profile that it was made from.
    pub profile: String,
    /// Whether it can write files anywhere.
    pub can_write_filesystem: bool,
    /// Host paths that it can read.
    pub readable_paths: Vec<PathBuf>,
    /// Paths that it can write.
    pub writable_paths: Vec<PathBuf>,
    /// Whether it reaches anything beyond its own loopback.
    pub has_network: bool,
    /// Where it may connect to.
    pub allowed_destinations: Vec<String>,
    /// The limits that hold.
    pub limits: ResourceLimits,
    /// Whether a system call filter is in force.
    pub syscall_filter_active: bool,
    /// What the filter blocks, by category.
    pub blocked_syscall_categories: Vec<String>,
    /// Whether it outlives the process that made it.
    pub is_persistent: bool,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// How long it has to live, if that is bounded.
    pub time_remaining_ms: Option<u64>,
}

/// What holds a sandbox: the receipt of what was proved by trying.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Enforcement {
    /// The limits in force, and by what.
    pub limits: Vec<EnforcedLimit>,
    /// The walls between sandbox and host.
    pub layers: Vec<Layer>,
    /// What fell back to a nearer bound, one line each, for people.
    pub warnings: Vec<String>,
}

/// One wall between a sandbox and its host. Its detail says whether it was tried, or follows from a step
/// of the set-up that may not fail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// What it is: "seccomp".
    pub name: String,
    /// How it was found to be: "profile default, 318 calls allowed".
    pub detail: String,
}
