//! What a caller asks of the sandbox that an acquire gives it.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::SandboxId;

/// Which sandbox an acquire may give.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SandboxSelectionOptions {
    /// This one, if it lives and fits.
    pub preferred_id: Option<SandboxId>,
    /// Only one that no command has ever run in.
    pub require_fresh: bool,
    /// What it must be able to do.
    pub required_capabilities: RequiredCapabilities,
    /// Only one of this backend.
    pub preferred_backend: Option<String>,
    /// Labels that it must bear.
    pub required_labels: HashMap<String, String>,
    /// Whether a warm one may be taken from the pool.
    pub use_pool: bool,
}

/// What a sandbox must be able to do, each only where given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequiredCapabilities {
    /// Whether it must, or must not, have a network.
    pub network: Option<bool>,
    /// Whether it must, or must not, be able to write files.
    pub write_access: Option<bool>,
    /// The least memory that it may use.
    pub min_memory_bytes: Option<u64>,
    /// Paths that it must be able to read.
    pub readable_paths: Vec<String>,
    /// Paths that it must be able to write.
    pub writable_paths: Vec<String>,
}
