//! Why a wall stopped a command.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A wall that ended a command, as whoever holds it counted; never what a program prints.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Denial {
    /// Which wall: "limits".
    pub wall: String,
    /// What was refused: "more than 512M of memory".
    pub what: String,
    /// What refused it: "cgroup v2 memory".
    pub by: String,
    /// The smallest thing that would allow it, if there is one: "--pids 128".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<String>,
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        write!(f, ", by {}", self.by)?;
        match &self.grant {
            Some(grant) => write!(f, "; allowed by {grant}"),
            None => Ok(()),
        }
    }
}
