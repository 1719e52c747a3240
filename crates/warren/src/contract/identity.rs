//! The name of a sandbox.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Result, SandboxError};

const MAX_ID: usize = 128;

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

    /// Checks an id that a caller chose: it names files and cgroups, so it must be plain.
    pub fn validate(&self) -> Result<(), SandboxError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let fits = (1..=MAX_ID).contains(&self.0.len());
        if fits && self.0.chars().all(plain) && !self.0.starts_with(['.', '-']) {
            return Ok(());
        }
        Err(SandboxError::invalid(
            "id",
            format!(
                "`{}` is no id",
                self.0.chars().take(MAX_ID).collect::<String>().escape_debug()
            ),
            "an id has up to 128 letters, digits, `-`, `_` and `.`, and begins with no `.` or `-`",
        ))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_could_not_name_a_file_is_refused() {
        for id in ["", ".", "..", "a/b", "../a", "-a", "a b", "a\0", "ü", &"a".repeat(129)] {
            assert!(SandboxId::from_string(id).validate().is_err(), "{id:?}");
        }
        for id in ["a", "sbx-1", "a.b_c-D", &"a".repeat(128)] {
            SandboxId::from_string(id).validate().unwrap();
        }
        SandboxId::new().validate().unwrap();
    }
}
