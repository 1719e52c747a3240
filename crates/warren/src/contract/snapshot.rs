//! What is kept of a sandbox, and how it is named.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Base, FileKind, Result, SandboxError, SandboxId, SandboxSpec};
use crate::clock::BootMoment;
use crate::layers::Held;

/// How long a name or a label may be.
const MAX_NAME: usize = 128;
/// How many labels a snapshot may have.
const MAX_LABELS: usize = 64;

/// The name of a snapshot: `snap-` and a UUID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SnapshotId(pub String);

impl SnapshotId {
    /// Makes one that nobody has.
    #[expect(clippy::new_without_default, reason = "each is another, as a default is not")]
    pub fn new() -> Self {
        Self(format!("snap-{}", Uuid::new_v4()))
    }

    /// Returns it as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a snapshot is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// Somebody wanted to keep it.
    #[default]
    Kept,
    /// A place to go back to, that goes with its sandbox.
    Savepoint,
}

/// A sandbox as it was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// What it is found by.
    pub id: SnapshotId,
    /// What its owner calls it; empty for nothing. No two of one owner have the same.
    pub name: String,
    /// Whose it is; nobody's in particular if it was made without a manager.
    pub owner: Option<String>,
    /// What it is for.
    #[serde(default)]
    pub kind: SnapshotKind,
    /// What its owner noted.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The sandbox that it was taken of.
    pub sandbox_id: SandboxId,
    /// What that was asked to be.
    pub spec: SandboxSpec,
    /// What a sandbox stands on that shall be as this one was.
    pub base: Base,
    /// When it was taken.
    pub created_at: DateTime<Utc>,
    /// When it is forgotten, if ever.
    #[serde(default)]
    pub expires_at: Option<DateTime<Utc>>,
    /// The same by the clock that counts while the host it was taken on runs, whoever sets the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_moment: Option<BootMoment>,
    /// Bytes in the files of all that was written.
    pub bytes: u64,
    /// Bytes in the files that no snapshot before it had.
    pub new_bytes: u64,
    /// Files, directories and other entries of all that was written.
    pub entries: u64,
}

/// What a caller asks of a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SnapshotOptions {
    /// What it shall be called.
    pub name: String,
    /// What shall be noted with it.
    pub labels: BTreeMap<String, String>,
    /// After how long it is forgotten.
    pub keep_for: Option<Duration>,
    /// What it is for.
    pub kind: SnapshotKind,
}

/// Who brings an exported snapshot. It says itself what its sandboxes are to be, and nobody signed it: whoever
/// brings it may have written that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Importer {
    /// Somebody who may have sandboxes, and may not show them paths of the host or take away their limits.
    #[default]
    Tenant,
    /// Whoever runs the host.
    Operator,
}

impl SnapshotOptions {
    /// Checks names, labels and times.
    pub fn validate(&self) -> Result<(), SandboxError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let name = &self.name;
        let fits = name.len() <= MAX_NAME
            && name.chars().all(plain)
            && !name.starts_with(['.', '-'])
            && !name.starts_with("snap-");
        if !fits {
            let reason = format!("`{}` cannot be the name of a snapshot", name.escape_debug());
            let hint = "use up to 128 letters, digits, `.`, `_` and `-`, and begin with no `snap-`";
            return Err(SandboxError::invalid("name", reason, hint));
        }
        let long = |text: &String| text.len() > MAX_NAME || text.chars().any(char::is_control);
        let bad = self.labels.iter().any(|(key, value)| key.is_empty() || long(key) || long(value));
        if bad || self.labels.len() > MAX_LABELS {
            let reason = "a label is empty or too long, or there are too many";
            return Err(SandboxError::invalid(
                "labels",
                reason,
                "have 64 labels of 128 bytes at most",
            ));
        }
        if self.keep_for.is_some_and(|time| time.is_zero() || time.as_secs() > 100 * 366 * 86_400) {
            let reason = "it is not between a moment and a century";
            return Err(SandboxError::invalid(
                "keep_for",
                reason,
                "leave it out to keep it for good",
            ));
        }
        Ok(())
    }
}

/// What was captured of a sandbox: the layers are not removed while this lives.
#[derive(Debug)]
pub struct Capture {
    /// What a sandbox stands on that shall be as this one was.
    pub base: Base,
    /// Bytes in files that were written now.
    pub new_bytes: u64,
    /// For how long its processes stood still.
    pub paused: Duration,
    /// Keeps the layers.
    pub held: Held,
}

/// How many sandboxes a fork makes, and of what.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ForkOptions {
    /// How many.
    pub count: u32,
    /// Whether fewer will do.
    pub partial: bool,
    /// Labels that each of them gets, instead of those of its origin.
    pub labels: Option<HashMap<String, String>>,
}

/// What to compare, and how much of it to tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiffOptions {
    /// Only these paths and what is below them; all if empty.
    pub paths: Vec<PathBuf>,
    /// Whether to show how texts differ.
    pub patch: bool,
    /// Whether to digest the contents of files.
    pub digests: bool,
    /// How many differences to list at most.
    pub limit: Option<usize>,
}

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiffKind {
    /// It was not there before.
    Added,
    /// It is otherwise.
    Changed,
    /// It is not there any more.
    Removed,
}

/// A file as it was or is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiffSide {
    /// What it is.
    pub kind: FileKind,
    /// Its size in bytes, if it is a regular file.
    pub size: u64,
    /// Its permissions.
    pub mode: u32,
    /// Its owner, inside.
    pub uid: u32,
    /// Its group, inside.
    pub gid: u32,
    /// Where it leads, if it is a link.
    pub target: Option<String>,
    /// The SHA-256 of its contents, if that was asked for.
    pub sha256: Option<String>,
}

/// One difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiffEntry {
    /// Where.
    pub path: PathBuf,
    /// What became of it.
    pub change: DiffKind,
    /// As it was.
    pub before: Option<DiffSide>,
    /// As it is.
    pub after: Option<DiffSide>,
    /// How two texts differ, if that was asked for.
    pub patch: Option<String>,
}
