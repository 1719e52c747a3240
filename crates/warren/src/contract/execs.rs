//! An exec that is there on its own: it has a name, a log, and an end that can be waited for.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Denial, ExecCause, Explain, ResourceUsage, Result, SandboxError};

/// The longest name of an exec: with what is added to it, it names a file.
const MAX_ID: usize = 64;

/// What an exec is called, by its caller or by chance. A name is used once in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExecId(pub String);

impl ExecId {
    /// Makes a fresh one: `exec-` and a random UUID.
    pub fn new() -> Self {
        Self(format!("exec-{}", Uuid::new_v4()))
    }

    /// Checks a name that a caller chose.
    pub fn validate(&self) -> Result<(), SandboxError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let fits = (1..=MAX_ID).contains(&self.0.len());
        if fits && self.0.chars().all(plain) && !self.0.starts_with(['.', '-']) {
            return Ok(());
        }
        let shown: String = self.0.chars().take(MAX_ID).collect();
        Err(SandboxError::invalid(
            "exec_id",
            format!("`{}` is no name of an exec", shown.escape_debug()),
            "a name has up to 64 letters, digits, `-`, `_` and `.`, and begins with no `.` or `-`",
        ))
    }

    /// Returns it as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for ExecId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for ExecId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a caller asks of an exec beside its command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExecOptions {
    /// Its name. Asking for the same command by the same name again returns the same run.
    pub id: Option<ExecId>,
    /// What it reads after [`Command::stdin`](super::Command).
    pub input: ExecInput,
    /// The size of its terminal, if it is to have one.
    pub terminal: Option<TerminalSize>,
    /// What happens when its log is full.
    pub overflow: LogOverflow,
    /// Whether the sandbox's limits on time hold for it.
    pub time_limits: TimeLimits,
    /// Which of the sandbox's users runs it; the usual one if absent.
    pub user: Option<ExecUser>,
    /// What whoever started it wants to find with it again, up to [`MAX_EXEC_NOTE`] bytes.
    pub note: Option<String>,
    /// Whether its result tells what walls refused to it.
    pub explain: Explain,
}

/// The longest note that is kept with an exec.
pub const MAX_EXEC_NOTE: usize = 128 << 10;

/// One of a sandbox's users, who runs a command.
///
/// `HOME`, `USER` and `LOGNAME` are that user's unless the command or the spec says otherwise. Whom
/// there is to name depends on the profile: every sandbox has `user`, and one of the profile `dev`
/// has `root`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExecUser {
    /// The name, as the sandbox's `/etc/passwd` has it.
    pub name: String,
    /// Where to run the command, instead of where it says: the user's home, or a path that begins
    /// there, with `~` or with `/`.
    pub workdir: Option<String>,
}

/// Whether `max_wall_time_ms` and `max_cpu_time_ms` hold for an exec as a whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeLimits {
    /// They do.
    #[default]
    Held,
    /// They do not: it is a shell that waits for commands, and whoever started it holds each of
    /// those to them.
    HeldByCaller,
}

/// What an exec reads, after what its command says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecInput {
    /// Nothing.
    #[default]
    Closed,
    /// What [`ExecHandle::write_input`] brings.
    Open,
    /// Nothing; what [`ExecHandle::write_input`] brings it reads from its descriptor 3, and what it
    /// writes there is in its log as [`LogStream::Control`], after all that it wrote before. Its
    /// descriptor 4 may be a file that helps a bash to say which signal ended a program.
    Control,
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// What happens when an exec writes more than `max_output_bytes`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogOverflow {
    /// It is ended.
    #[default]
    End,
    /// It goes on, and the oldest output is forgotten.
    Forget,
}

/// Which of an exec's streams bytes came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogStream {
    /// Its standard output, or its terminal.
    Stdout,
    /// Its standard error.
    Stderr,
    /// What it wrote to its descriptor 3.
    Control,
}

/// Bytes of a log that one stream brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogPiece {
    /// Where in the log the first of them is.
    pub offset: u64,
    /// Whose they are.
    pub stream: LogStream,
    /// They.
    pub bytes: Vec<u8>,
}

/// What was read of a log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogRead {
    /// The bytes, in order; none if there are none yet.
    pub pieces: Vec<LogPiece>,
    /// Where to read on.
    pub next: u64,
    /// How many bytes before the first piece were asked for and are forgotten.
    pub skipped: u64,
    /// Whether more was written than the log holds: it was cut where it ends.
    pub cut: bool,
    /// Whether this is the end of the log: the exec has ended and nothing follows.
    pub ended: bool,
}

/// Whether a read waits for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogWait {
    /// It returns what there is.
    Never,
    /// It returns once there is something, or the exec has ended.
    More,
}

/// How an exec ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecEnd {
    /// How.
    pub cause: ExecCause,
    /// The exit code: its own where it has one.
    pub exit_code: i32,
    /// How long it took.
    pub duration: Duration,
    /// What it used.
    pub usage: ResourceUsage,
    /// Processes and threads that were started in the sandbox from its own on, until its end; those of
    /// other execs at the same time are among them. 0 if that is not known.
    #[serde(default)]
    pub tasks_started: u64,
    /// When it was seen to end.
    pub ended_at: DateTime<Utc>,
    /// The limit that ended it, if one did; of one that failed the system calls that its filter refused;
    /// and whatever else walls refused to it, if somebody [asked](ExecOptions::explain).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub denials: Vec<Denial>,
}

/// What an exec and all it started have used so far, and what was refused to its sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExecMeasure {
    /// CPU time, user and system.
    pub cpu_time: Duration,
    /// Bytes read, by whatever call, by its first process and all that this waited for.
    pub bytes_read: u64,
    /// Bytes written in the same way.
    pub bytes_written: u64,
    /// The most memory that the sandbox held at once since the exec was measured before; `None` the
    /// first time, and where nobody counts.
    pub peak_memory_bytes: Option<u64>,
    /// How often something of the sandbox was ended because there was no memory.
    pub out_of_memory: u64,
    /// How often a process was refused to the sandbox.
    pub too_many_processes: u64,
    /// Whether nothing more can be written in the sandbox.
    pub disk_full: bool,
    /// Whether the sandbox is suspended.
    pub suspended: bool,
    /// For how long it was, since the exec was started.
    pub stood_still: Duration,
}

/// An exec at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecInfo {
    /// Its name.
    pub id: ExecId,
    /// Its program and arguments; a long one is shortened.
    pub command: Vec<String>,
    /// Its pid inside the sandbox, once its program runs.
    pub pid: Option<i32>,
    /// Whether it has a terminal.
    pub terminal: bool,
    /// What whoever started it noted.
    #[serde(default)]
    pub note: Option<String>,
    /// The request that it serves, as [`ExecContext`](super::ExecContext) says; may be empty.
    #[serde(default)]
    pub request_id: String,
    /// When it was asked for.
    pub started_at: DateTime<Utc>,
    /// How many bytes its log has taken.
    pub logged: u64,
    /// How much input it has taken.
    pub input_taken: u64,
    /// Whether it takes more.
    pub input_open: bool,
    /// How it ended, once it has.
    pub end: Option<ExecEnd>,
}

/// A hold of an exec. Dropping it ends nothing.
#[async_trait]
pub trait ExecHandle: Send + Sync {
    /// Returns its name.
    fn id(&self) -> &ExecId;

    /// Says how it is now.
    fn info(&self) -> ExecInfo;

    /// Reads its log from `offset` on, at most `max` bytes.
    async fn read(&self, offset: u64, max: usize, wait: LogWait) -> Result<LogRead, SandboxError>;

    /// Waits until it has ended.
    async fn wait(&self) -> Result<ExecEnd, SandboxError>;

    /// Sends a signal to its process group.
    async fn signal(&self, signal: i32) -> Result<(), SandboxError>;

    /// Ends it and everything it started.
    async fn kill(&self) -> Result<(), SandboxError>;

    /// Ends everything it started, but not itself.
    async fn kill_children(&self) -> Result<(), SandboxError>;

    /// Gives its terminal another size.
    async fn resize(&self, size: TerminalSize) -> Result<(), SandboxError>;

    /// Gives it input, and returns how much it has taken in all once these bytes are among it.
    ///
    /// With an `offset`, what it has already of these bytes is passed over, so that repeating is safe;
    /// one beyond what it has is an error. `end` says that nothing follows.
    async fn write_input(
        &self,
        offset: Option<u64>,
        bytes: &[u8],
        end: bool,
    ) -> Result<u64, SandboxError>;

    /// Measures it while it runs.
    async fn measure(&self) -> Result<ExecMeasure, SandboxError>;

    /// Has nothing that was refused so far count for how it ends. Whoever drives a shell has told it
    /// of the command that met the refusal.
    fn count_from_here(&self) {}

    /// Leaves it to the caller to tell of its end: to the first that asks, and to none if somebody did tell, here or in an
    /// earlier process.
    fn claim_end(&self) -> bool {
        true
    }

    /// Notes that its end was told, for whoever comes after us.
    fn end_was_told(&self) {}

    /// Removes it with its log, once it has ended.
    async fn forget(&self) -> Result<(), SandboxError>;
}

impl fmt::Debug for dyn ExecHandle + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecHandle").field("id", self.id()).finish_non_exhaustive()
    }
}

/// What looking for an exec finds.
pub type FoundExec = Arc<dyn ExecHandle>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_an_exec_is_plain() {
        ExecId::new().validate().unwrap();
        for good in ["a", "build.1", "A_b-c"] {
            ExecId(good.to_owned()).validate().unwrap();
        }
        for bad in ["", ".", "..", "-rf", "a/b", "a\0", "ä", &"x".repeat(65)] {
            assert!(ExecId(bad.to_owned()).validate().is_err(), "{bad:?}");
        }
    }
}
