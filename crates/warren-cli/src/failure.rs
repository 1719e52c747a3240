//! What went wrong, for people and for programs, and the exit code for it.

use std::borrow::Cow;
use std::error::Error;
use std::io;
use std::process::ExitCode;

use serde::Serialize;
use warren::SandboxError;
use warren_api::ErrorView;

/// An error of ours.
const OURS: u8 = 125;
/// What was asked for makes no sense.
const USAGE: u8 = 2;

/// Why there is no result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Failure {
    code: Cow<'static, str>,
    message: String,
    hint: Option<String>,
    #[serde(skip)]
    exit: u8,
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: &'a Failure,
}

impl Failure {
    /// Makes one for what the caller should write differently.
    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        let (message, hint) = (message.into(), Some(hint.into()));
        Self { code: Cow::Borrowed("usage"), message, hint, exit: USAGE }
    }

    /// Makes one for what the system refused us.
    pub(crate) fn system(what: &str, error: &io::Error) -> Self {
        let message = format!("{what}: {error}");
        Self { code: Cow::Borrowed("system"), message, hint: None, exit: OURS }
    }

    /// Makes one for what we cannot go on with.
    pub(crate) fn fatal(code: &'static str, message: impl Into<String>) -> Self {
        Self { code: Cow::Borrowed(code), message: message.into(), hint: None, exit: OURS }
    }

    /// Returns what went wrong, without the hint.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Makes one of what the daemon answered.
    pub(crate) fn answered(status: u16, error: ErrorView) -> Self {
        let exit = match error.code.as_str() {
            "program_not_found" => 127,
            "program_not_executable" => 126,
            _ if matches!(status, 400 | 413) => USAGE,
            _ => OURS,
        };
        Self { code: Cow::Owned(error.code), message: error.message, hint: error.hint, exit }
    }

    /// Says something better to do.
    pub(crate) fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Says how the program ends.
    pub(crate) fn with_exit(self, exit: u8) -> Self {
        Self { exit, ..self }
    }

    /// Tells whether there is no such program in the sandbox.
    pub(crate) fn is_missing_program(&self) -> bool {
        self.code == "program_not_found"
    }

    /// Tells whether there is nothing at a path inside.
    pub(crate) fn is_missing_file(&self) -> bool {
        self.code == "file_not_found"
    }

    /// Tells whether there is no sandbox of that name.
    pub(crate) fn is_not_found(&self) -> bool {
        self.code == "not_found"
    }

    /// Tells whether it is this kind of failure.
    pub(crate) fn is(&self, code: &str) -> bool {
        self.code == code
    }

    /// Tells whether the daemon is gone, for now at least.
    pub(crate) fn is_lost(&self) -> bool {
        self.is("daemon_gone") || self.is("no_daemon") || self.is("request_timeout")
    }

    /// Prints it where it belongs and returns its exit code.
    pub(crate) fn report(&self, json: bool) -> ExitCode {
        // Nobody listens any more if a write fails; the exit code still tells.
        if json {
            let _ = crate::output::print_json(&Envelope { error: self });
        } else {
            crate::output::say(&format!("error: {}", self.message));
            if let Some(hint) = &self.hint {
                crate::output::say(&format!("hint: {hint}"));
            }
        }
        ExitCode::from(self.exit)
    }
}

impl From<SandboxError> for Failure {
    fn from(error: SandboxError) -> Self {
        let hint = match &error {
            SandboxError::InvalidSpec { field, .. } if field.starts_with("limits.") => {
                Some("`none` takes the limit away".to_owned())
            }
            SandboxError::InvalidSpec { field, .. } if field == "cpu_quota_millis" => {
                Some("1 is one whole CPU; from 0.01 to 10000 can be held".to_owned())
            }
            other => other.hint().map(str::to_owned),
        };
        let exit = match &error {
            SandboxError::InvalidSpec { .. } | SandboxError::TooLarge { .. } => USAGE,
            SandboxError::Program { kind, .. } => u8::try_from(kind.exit_code()).unwrap_or(OURS),
            SandboxError::Unsupported { .. }
            | SandboxError::LimitNotEnforceable { .. }
            | SandboxError::NotFound { .. }
            | SandboxError::AlreadyExists { .. }
            | SandboxError::Ended { .. }
            | SandboxError::Suspended { .. }
            | SandboxError::SessionEnded { .. }
            | SandboxError::Timeout { .. }
            | SandboxError::PortClosed { .. }
            | SandboxError::Step { .. }
            | SandboxError::File { .. }
            | SandboxError::Capacity { .. }
            | SandboxError::NoMatch { .. }
            | SandboxError::Conflict { .. }
            | SandboxError::WallOpen { .. }
            | SandboxError::ShuttingDown
            | SandboxError::Store(_)
            | SandboxError::Internal { .. } => OURS,
        };
        let message = match &error {
            SandboxError::InvalidSpec { field, reason, .. } => {
                format!("invalid {}: {reason}", flag(field))
            }
            other => chain(other),
        };
        Self { code: Cow::Borrowed(error.code()), message, hint, exit }
    }
}

/// Joins what was tried and what the kernel said.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

/// Finds the flag that a field of the spec came from.
fn flag(field: &str) -> &str {
    let name = field.split(['[', '.']).next().unwrap_or(field);
    match (name, field) {
        ("profile", _) => "--profile",
        ("seccomp_profile", _) => "--seccomp",
        ("workdir", _) => "--workdir",
        ("allowed_paths_ro", _) => "--ro",
        ("allowed_paths_rw", _) => "--rw",
        ("bind_mounts", _) => "--bind",
        ("environment" | "env", _) => "--env",
        ("cpu_quota_millis", _) => "--cpus",
        (_, "limits.max_memory_bytes") => "--memory",
        (_, "limits.max_cpu_time_ms") => "--cpu-time",
        (_, "limits.max_wall_time_ms") => "--timeout",
        (_, "limits.max_processes") => "--pids",
        (_, "limits.max_open_files") => "--open-files",
        (_, "limits.max_output_bytes") => "--max-output",
        (_, "limits.max_write_bytes") => "--disk",
        (_, "limits.cpu_weight") => "--cpu-weight",
        ("program" | "args", _) => "command",
        _ => field,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warren::{Command, ProgramFault};

    #[test]
    fn an_error_names_the_flag_and_not_the_field() {
        for (field, flag) in [
            ("allowed_paths_ro[1]", "--ro"),
            ("bind_mounts[0].target", "--bind"),
            ("limits.max_memory_bytes", "--memory"),
            ("args[3]", "command"),
            ("labels[0]", "labels[0]"),
        ] {
            let failure = Failure::from(SandboxError::invalid(field, "why", "how"));
            assert_eq!(failure.message, format!("invalid {flag}: why"));
            assert_eq!(failure.exit, USAGE);
        }
    }

    #[test]
    fn the_chain_is_joined_and_the_program_decides_the_exit_code() {
        for (kind, exit) in [(ProgramFault::NotFound, 127), (ProgramFault::NotExecutable, 126)] {
            let source = io::Error::other("EPERM");
            let failure =
                Failure::from(SandboxError::Program { program: "x".into(), kind, source });
            assert!(failure.message.ends_with(": EPERM"), "{}", failure.message);
            assert_eq!(failure.exit, exit);
        }
    }

    #[test]
    fn a_nul_byte_in_an_argument_is_refused_as_bad_usage() {
        let error = Command::new("echo").args(["a\0b"]).validate().expect_err("a NUL");
        let failure = Failure::from(error);
        assert_eq!(
            (failure.exit, failure.message.as_str()),
            (2, "invalid command: it contains a NUL byte")
        );
        assert!(failure.hint.is_some_and(|hint| hint.contains("stdin")));
    }
}
