//! One run of a command: where it happens, what it gave, how it ended.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Denial;

/// The circumstances of one exec, set by whoever passes a command on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExecContext {
    /// The trace that this exec is part of.
    pub trace_id: String,
    /// The request that it serves.
    pub request_id: String,
    /// Where to run a command that does not say.
    pub workdir: Option<PathBuf>,
    /// Environment beside the sandbox's own; the command's wins.
    pub extra_env: Vec<(String, String)>,
    /// How long it may take; the command's own timeout holds too.
    pub timeout: Option<Duration>,
    /// Whether stdout is kept.
    pub capture_stdout: bool,
    /// Whether stderr is kept.
    pub capture_stderr: bool,
    /// Whether the caller wants output as it comes.
    pub stream_output: bool,
}

impl Default for ExecContext {
    fn default() -> Self {
        Self {
            trace_id: String::new(),
            request_id: String::new(),
            workdir: None,
            extra_env: Vec::new(),
            timeout: None,
            capture_stdout: true,
            capture_stderr: true,
            stream_output: false,
        }
    }
}

/// What one exec gave.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecOutput {
    /// The command's own exit code; see [`ExecCause::exit_code`] for one that had none.
    pub exit_code: i32,
    /// What it wrote to stdout.
    pub stdout: Vec<u8>,
    /// What it wrote to stderr.
    pub stderr: Vec<u8>,
    /// How long it took.
    pub duration: Duration,
    /// Whether it was ended because its time was up.
    pub timed_out: bool,
    /// Whether it was ended by a limit other than time.
    pub resource_limited: bool,
    /// What it used, where that was measured.
    pub resource_usage: Option<ResourceUsage>,
}

/// What an exec or a sandbox used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceUsage {
    /// The most memory at any moment.
    pub peak_memory_bytes: u64,
    /// CPU time, user and system.
    pub cpu_time_ms: u64,
    /// Time by the clock.
    pub wall_time_ms: u64,
    /// Bytes written to storage.
    pub bytes_written: u64,
    /// Bytes read from storage.
    pub bytes_read: u64,
}

/// A piece of a running command's output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamOutput {
    /// Bytes of its stdout.
    Stdout(Vec<u8>),
    /// Bytes of its stderr.
    Stderr(Vec<u8>),
    /// Its end; nothing follows.
    Exit {
        /// The exit code, as in [`ExecOutput::exit_code`].
        code: i32,
    },
}

/// How an exec ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum ExecCause {
    /// The command returned.
    Exited {
        /// Its exit code.
        code: i32,
    },
    /// A signal ended it that was none of ours.
    Signalled {
        /// The signal's number.
        signal: i32,
    },
    /// Its time was up.
    TimedOut,
    /// It used more memory than allowed.
    OutOfMemory,
    /// It needed more processes than allowed. Where the kernel counts no refusals (gVisor), that is inferred: it failed
    /// while as many ran as may.
    TooManyProcesses,
    /// It wrote more to disk than allowed.
    DiskQuota,
    /// It wrote more output than allowed.
    OutputLimit,
    /// It used more CPU time than allowed.
    CpuTime,
    /// It did what a policy forbids, or was ended on request.
    KilledByPolicy {
        /// Which policy, or whose request.
        reason: String,
    },
    /// The manager was gone when it ended, so how is not known.
    Lost,
}

impl ExecCause {
    /// Returns the exit code that stands for this end: the command's own, 128 and the signal, 124
    /// for a timeout, 137 for what a limit or a policy killed, 125 for what was lost.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Exited { code } => *code,
            Self::Signalled { signal } => signal.saturating_add(128),
            Self::TimedOut => 124,
            Self::OutOfMemory
            | Self::TooManyProcesses
            | Self::DiskQuota
            | Self::OutputLimit
            | Self::CpuTime
            | Self::KilledByPolicy { .. } => 137,
            Self::Lost => 125,
        }
    }

    /// Tells whether a limit other than the clock ended the exec.
    pub fn is_resource_limit(&self) -> bool {
        match self {
            Self::OutOfMemory
            | Self::TooManyProcesses
            | Self::DiskQuota
            | Self::OutputLimit
            | Self::CpuTime => true,
            Self::Exited { .. }
            | Self::Signalled { .. }
            | Self::TimedOut
            | Self::KilledByPolicy { .. }
            | Self::Lost => false,
        }
    }
}

impl fmt::Display for ExecCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited { code } => write!(f, "exited with code {code}"),
            Self::Signalled { signal } => write!(f, "ended by signal {signal}"),
            Self::TimedOut => f.write_str("timed out"),
            Self::OutOfMemory => f.write_str("out of memory"),
            Self::TooManyProcesses => f.write_str("too many processes"),
            Self::DiskQuota => f.write_str("disk quota exceeded"),
            Self::OutputLimit => f.write_str("output limit exceeded"),
            Self::CpuTime => f.write_str("CPU time used up"),
            Self::KilledByPolicy { reason } => write!(f, "killed by policy: {reason}"),
            Self::Lost => f.write_str("lost with the manager"),
        }
    }
}

/// What one exec gave, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ExecReport {
    /// What it gave.
    pub output: ExecOutput,
    /// How it ended.
    pub cause: ExecCause,
    /// Why, as far as walls are: as in [`ExecEnd::denials`](super::ExecEnd::denials).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub denials: Vec<Denial>,
}

impl ExecReport {
    /// Joins an output with the way it ended, which settles its exit code and its flags.
    pub fn new(output: ExecOutput, cause: ExecCause) -> Self {
        let output = ExecOutput {
            exit_code: cause.exit_code(),
            timed_out: cause == ExecCause::TimedOut,
            resource_limited: cause.is_resource_limit(),
            ..output
        };
        Self { output, cause, denials: Vec::new() }
    }
}

impl ExecReport {
    /// Joins an output with the way it ended, and keeps the exit code that the command itself gave.
    pub fn with_exit_code(output: ExecOutput, cause: ExecCause) -> Self {
        let exit_code = output.exit_code;
        let mut report = Self::new(output, cause);
        report.output.exit_code = exit_code;
        report
    }
}

/// Reads the cause from the flags of an output, for a backend that tells no more.
impl From<ExecOutput> for ExecReport {
    fn from(output: ExecOutput) -> Self {
        let cause = if output.timed_out {
            ExecCause::TimedOut
        } else if output.resource_limited {
            ExecCause::KilledByPolicy { reason: "a resource limit".to_owned() }
        } else {
            ExecCause::Exited { code: output.exit_code }
        };
        Self { output, cause, denials: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_has_its_exit_code_and_flags() {
        let killed = || ExecCause::KilledByPolicy { reason: "r".to_owned() };
        for (cause, code, timed_out, limited) in [
            (ExecCause::Exited { code: 3 }, 3, false, false),
            (ExecCause::Signalled { signal: 9 }, 137, false, false),
            (ExecCause::Signalled { signal: i32::MAX }, i32::MAX, false, false),
            (ExecCause::TimedOut, 124, true, false),
            (ExecCause::OutOfMemory, 137, false, true),
            (ExecCause::TooManyProcesses, 137, false, true),
            (ExecCause::DiskQuota, 137, false, true),
            (ExecCause::OutputLimit, 137, false, true),
            (ExecCause::CpuTime, 137, false, true),
            (killed(), 137, false, false),
            (ExecCause::Lost, 125, false, false),
        ] {
            let output = ExecReport::new(ExecOutput::default(), cause.clone()).output;
            assert_eq!(
                (output.exit_code, output.timed_out, output.resource_limited),
                (code, timed_out, limited),
                "{cause}"
            );
        }
    }

    #[test]
    fn a_cause_is_tagged_by_its_kind_in_json() {
        let json = serde_json::to_string(&ExecCause::Exited { code: 3 }).unwrap();
        assert_eq!(json, r#"{"kind":"exited","code":3}"#);
        let json = serde_json::to_string(&ExecCause::OutOfMemory).unwrap();
        assert_eq!(json, r#"{"kind":"out_of_memory"}"#);
    }
}
