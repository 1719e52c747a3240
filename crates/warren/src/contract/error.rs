//! What can go wrong, and what the caller can do about it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::{FileFault, Limit, SandboxId};
use crate::store::StoreError;

/// A result whose error is a [`SandboxError`] unless it says otherwise.
pub type Result<T, E = SandboxError> = std::result::Result<T, E>;

/// Why a call failed: the variant says what the caller can do, the message what was tried, the
/// source what the kernel said.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// What was asked for makes no sense; found before anything was created.
    #[error("invalid {field}: {reason}")]
    InvalidSpec {
        /// The field, as in `bind_mounts[2].target`.
        field: String,
        /// What is wrong with it.
        reason: String,
        /// How to put it right.
        hint: String,
    },
    /// The backend, or this host, cannot do what was asked.
    #[error("the {backend} backend does not support {feature} here")]
    Unsupported {
        /// What was asked.
        feature: String,
        /// Who cannot do it.
        backend: String,
        /// What would help.
        hint: String,
    },
    /// A limit that was asked for cannot be enforced on this host.
    #[error("cannot enforce the limit `{limit}`: {reason}")]
    LimitNotEnforceable {
        /// The limit.
        limit: Limit,
        /// Why not.
        reason: String,
        /// What would help.
        hint: String,
    },
    /// There is nothing of this name, or it is not the caller's.
    #[error("no {what} `{id}`")]
    NotFound {
        /// What was looked for: "sandbox".
        what: &'static str,
        /// The name it was looked for by.
        id: String,
    },
    /// There is something of this name already.
    #[error("there is already a {what} `{id}`")]
    AlreadyExists {
        /// What: "sandbox".
        what: &'static str,
        /// Its name.
        id: String,
    },
    /// The sandbox has been destroyed.
    #[error("sandbox `{id}` has ended")]
    Ended {
        /// The sandbox.
        id: SandboxId,
    },
    /// The sandbox is suspended, so nothing can run in it.
    #[error("sandbox `{id}` is suspended")]
    Suspended {
        /// The sandbox.
        id: SandboxId,
    },
    /// The session has ended.
    #[error("session `{id}` has ended")]
    SessionEnded {
        /// The session.
        id: String,
    },
    /// Something of ours took too long. (A command that takes too long is no error.)
    #[error("{what} took longer than {after:?}")]
    Timeout {
        /// What took too long: "creating the sandbox".
        what: String,
        /// How long it was given.
        after: Duration,
    },
    /// One step of the work failed: "cannot mount the overlay on /run/warren/k3f9a2vx/root".
    #[error("cannot {step}{}", on(path.as_ref()))]
    Step {
        /// What was tried, as a verb: "mount the overlay on".
        step: String,
        /// What it was tried on.
        path: Option<PathBuf>,
        /// What the kernel said.
        source: io::Error,
    },
    /// A command could not be started.
    #[error("cannot run `{program}`: {}", kind.reason())]
    Program {
        /// The program that was asked for.
        program: String,
        /// Why not.
        kind: ProgramFault,
        /// What the kernel said.
        source: io::Error,
    },
    /// Nothing listens on a port of the sandbox.
    #[error("nothing listens on port {port} inside the sandbox")]
    PortClosed {
        /// The port.
        port: u16,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something could not be done with a file of a sandbox.
    #[error("cannot {action} {path}: {}{detail}", kind.reason())]
    File {
        /// What was tried, as a verb: "write".
        action: &'static str,
        /// The path inside the sandbox.
        path: String,
        /// Why not.
        kind: FileFault,
        /// What else there is to say, with its punctuation.
        detail: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something is larger than it may be.
    #[error("{what} is larger than {limit} bytes")]
    TooLarge {
        /// What.
        what: String,
        /// How large it may be.
        limit: u64,
    },
    /// As many sandboxes live as may.
    #[error("all {limit} sandboxes are in use")]
    Capacity {
        /// How many there may be.
        limit: u32,
        /// When one may be free at the latest, as far as that is known now.
        retry_after: Duration,
    },
    /// No sandbox and no backend has what was asked for.
    #[error("nothing has what was asked for: {}", missing.join("; "))]
    NoMatch {
        /// What each candidate lacks: "backend `host`: network isolation".
        missing: Vec<String>,
    },
    /// The move is not a legal one: "cannot suspend session `sess-1`: another is active".
    #[error("cannot {action}: {reason}")]
    Conflict {
        /// What was tried.
        action: String,
        /// What stands against it.
        reason: String,
    },
    /// A sandbox was found to be open, and was destroyed.
    #[error("sandbox `{id}` was destroyed: its walls do not hold: {}", open.join("; "))]
    WallOpen {
        /// The sandbox.
        id: SandboxId,
        /// What got through: "network: connect to 192.0.2.1".
        open: Vec<String>,
    },
    /// The manager shuts down and takes no more work.
    #[error("the sandbox manager is shutting down")]
    ShuttingDown,
    /// The records cannot be read or written, so no new work is taken.
    #[error("the sandbox manager's store is not available")]
    Store(#[from] StoreError),
    /// A bug of ours, or a sandbox that answered nonsense.
    #[error("internal error: {message}")]
    Internal {
        /// What happened.
        message: String,
    },
}

/// Why a command could not be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProgramFault {
    /// There is no such program.
    NotFound,
    /// There is one, and it cannot be executed.
    NotExecutable,
    /// The directory to run it in cannot be entered.
    Workdir,
    /// The sandbox has no user of the name who is to run it, or nothing may run as that one.
    User,
    /// The host or the sandbox has no room for one more process.
    NoProcess,
    /// Anything else.
    Other,
}

impl ProgramFault {
    /// Returns the exit code that a shell gives for this: 127, or 126.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::NotFound => 127,
            Self::NotExecutable | Self::Workdir | Self::User | Self::NoProcess | Self::Other => 126,
        }
    }

    fn reason(self) -> &'static str {
        match self {
            Self::NotFound => "no such program in the sandbox",
            Self::NotExecutable => "it cannot be executed",
            Self::Workdir => "its working directory cannot be entered",
            Self::User => "it cannot run as that user",
            Self::NoProcess => "no process could be started",
            Self::Other => "it could not be started",
        }
    }
}

fn on(path: Option<&PathBuf>) -> String {
    path.map(|path| format!(" {}", path.display())).unwrap_or_default()
}

impl SandboxError {
    /// Makes a [`SandboxError::InvalidSpec`].
    pub fn invalid(
        field: impl Into<String>,
        reason: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Self::InvalidSpec { field: field.into(), reason: reason.into(), hint: hint.into() }
    }

    /// Makes a [`SandboxError::Step`]: "cannot {step} {path}".
    pub fn step(step: impl Into<String>, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::Step { step: step.into(), path: Some(path.into()), source }
    }

    /// As [`step`](Self::step), of something that we keep: a disk that is full is [`StoreError::Full`].
    pub(crate) fn keeping(step: &str, path: Option<PathBuf>, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::Store(StoreError::Full)
            }
            _ => Self::Step { step: step.to_owned(), path, source },
        }
    }

    /// Returns the stable name of the variant, for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::InvalidSpec { .. } => "invalid_spec",
            Self::Unsupported { .. } => "unsupported",
            Self::LimitNotEnforceable { .. } => "limit_not_enforceable",
            Self::NotFound { .. } => "not_found",
            Self::AlreadyExists { .. } => "already_exists",
            Self::Ended { .. } => "ended",
            Self::Suspended { .. } => "suspended",
            Self::SessionEnded { .. } => "session_ended",
            Self::Timeout { .. } => "timeout",
            Self::Step { .. } => "step_failed",
            Self::Program { kind: ProgramFault::NotFound, .. } => "program_not_found",
            Self::Program { .. } => "program_not_executable",
            Self::PortClosed { .. } => "port_closed",
            Self::File { kind, .. } => kind.code(),
            Self::TooLarge { .. } => "too_large",
            Self::Capacity { .. } => "capacity",
            Self::NoMatch { .. } => "no_match",
            Self::Conflict { .. } => "conflict",
            Self::WallOpen { .. } => "wall_open",
            Self::ShuttingDown => "shutting_down",
            Self::Store(_) => "store_unavailable",
            Self::Internal { .. } => "internal",
        }
    }

    /// Returns what the caller could do about it, for people.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::InvalidSpec { hint, .. }
            | Self::Unsupported { hint, .. }
            | Self::LimitNotEnforceable { hint, .. } => {
                Some(hint.as_str()).filter(|hint| !hint.is_empty())
            }
            Self::WallOpen { .. } => {
                Some("use no sandbox of this host, and report it: SECURITY.md")
            }
            Self::NotFound { .. } => Some("`warren ls` lists what there is"),
            Self::AlreadyExists { .. } => Some("choose another name, or use what is there"),
            Self::Ended { .. } => Some("create a new sandbox"),
            Self::SessionEnded { .. } => Some("acquire a sandbox, or attach to one that lives"),
            Self::Suspended { .. } => Some("resume the sandbox first"),
            Self::Timeout { .. } => Some("try again, or allow more time"),
            Self::Step { .. } => Some("`warren doctor` shows what this host lacks"),
            Self::Program { kind, .. } => Some(match kind {
                ProgramFault::NotFound => {
                    "only programs inside the sandbox can run; check the name and its PATH"
                }
                ProgramFault::NotExecutable => {
                    "check that it is a program for this machine and has its x bit"
                }
                ProgramFault::Workdir => "the directory must exist inside the sandbox",
                ProgramFault::User => {
                    "name a user of the sandbox: `user`, or `root` in profile `dev`"
                }
                ProgramFault::NoProcess => {
                    "raise the limit on processes or memory, or wait for some to end"
                }
                ProgramFault::Other => return None,
            }),
            Self::PortClosed { .. } => Some(
                "start a server in the sandbox that listens on this port of 127.0.0.1, 0.0.0.0 or ::1",
            ),
            Self::File { kind, .. } => Some(kind.hint()),
            Self::TooLarge { .. } => Some("pass it through a file or stdin"),
            Self::Capacity { .. } => Some("end a session, or try again when one has timed out"),
            Self::NoMatch { .. } => Some("ask for less, or for a new sandbox that has it"),
            Self::Conflict { .. } => {
                Some("look at the session's state, and end what is in the way")
            }
            Self::ShuttingDown => Some("try again once it has started anew"),
            Self::Store(StoreError::Full) => Some("make room on the disk that holds the store"),
            Self::Store(StoreError::Busy) => Some("end the other process that holds the store"),
            Self::Store(_) => Some("the log of the sandbox manager says what is wrong with it"),
            Self::Internal { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn display_leaves_the_source_to_whoever_walks_the_chain() {
        let source = || io::Error::other("EPERM");
        for (error, shown) in [
            (
                SandboxError::step("mount the overlay on", "/run/x", source()),
                "cannot mount the overlay on /run/x",
            ),
            (
                SandboxError::Step { step: "fork".into(), path: None, source: source() },
                "cannot fork",
            ),
            (
                SandboxError::Program {
                    program: "nope".into(),
                    kind: ProgramFault::NotFound,
                    source: source(),
                },
                "cannot run `nope`: no such program in the sandbox",
            ),
        ] {
            assert_eq!(error.to_string(), shown);
            assert_eq!(error.source().map(ToString::to_string).as_deref(), Some("EPERM"));
            assert!(anyhow::Error::from(error).chain().count() == 2);
        }
    }
}
