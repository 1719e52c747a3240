//! Finding the program of a command, also where the sandbox would not see it.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use warren::{Command, SandboxSpec};

use crate::failure::Failure;

/// What the caller's surroundings are.
#[derive(Debug)]
pub(crate) struct Caller {
    /// Where it stands.
    pub(crate) directory: PathBuf,
    #[expect(dead_code, reason = "soon")]
    path: Option<OsString>,
}

impl Caller {
    /// Looks around.
    pub(crate) fn new() -> Result<Self, Failure> {
        let directory = env::current_dir()
            .map_err(|error| Failure::system("cannot find the working directory", &error))?;
        Ok(Self { directory, path: env::var_os("PATH") })
    }
}

/// Makes the program of a command visible in its sandbox, and returns what is to be said about it.
pub(crate) fn provide(
    _command: &mut Command,
    _spec: &mut SandboxSpec,
    _caller: &Caller,
) -> Result<Vec<String>, Failure> {
    Ok(Vec::new())
}

/// Says what would help, where the caller's surroundings tell more than the sandbox knows.
pub(crate) fn advise(failure: Failure, _command: &Command, _caller: &Caller) -> Failure {
    failure
}
