//! The name of a sandbox.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The name of one sandbox, unique on its host.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SandboxId(pub String);

impl SandboxId {
    /// Makes a fresh id: `sbx-` and a random UUID.
    pub fn new() -> Self {
        Self(format!("sbx-{}", Uuid::new_v4()))
    }

    /// Takes an id as it is, for one that was stored or given by a caller.
    pub fn from_string(id: impl Into<String>) -> Self {
        Self(id.into())
    }

    /// Returns the id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for SandboxId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
