//! Why a wall stopped a command, or something that it did.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a wall refused to a command, as whoever holds it says; never what a program prints.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Denial {
    /// Which wall: "limits", "mount", "landlock", "seccomp" or "network".
    pub wall: String,
    /// What was refused: "more than 512M of memory", "write /usr/x", "call ptrace",
    /// "reach 10.0.0.1 port 80".
    pub what: String,
    /// What refused it: "cgroup v2 memory", "the read-only mount /usr".
    pub by: String,
    /// What was answered, where something was: the kernel's "EROFS", or "REFUSED" as name servers say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    /// How often, where that was counted.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub count: u32,
    /// The smallest thing that would allow it, if there is one: "--pids 128".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<String>,
}

fn once() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands it by reference")]
fn is_once(count: &u32) -> bool {
    *count == 1
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        if self.count > 1 {
            write!(f, " ({} times)", self.count)?;
        }
        write!(f, ", by {}", self.by)?;
        match &self.grant {
            Some(grant) => write!(f, "; allowed by {grant}"),
            // Nobody has to ask how; a limit always says it.
            None if self.errno.is_some() => write!(f, "; nothing allows it"),
            None => Ok(()),
        }
    }
}

/// Whether a command is followed, so that its result tells what walls refused to it.
///
/// To be followed slows a command down: each of its system calls stops it twice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Explain {
    /// It is not; only a limit that ends it is told and, if it fails, the calls that its filter refused.
    #[default]
    Nothing,
    /// What can be told from inside: calls, addresses, and paths that are there.
    Inside,
    /// That, and of paths that are not there whether the host has them. Whoever hears it learns what
    /// files the host has, and must be one who may know.
    Host,
}
