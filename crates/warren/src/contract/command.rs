//! A command to run.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::spec::{MAX_STRING, check_path, check_variable};
use super::{ExecContext, Result, SandboxError};

/// A command to run in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// The program: a path inside, or a name to be found in the sandbox's `PATH`.
    pub program: String,
    /// Its arguments.
    #[serde(default)]
    pub args: Vec<String>,
    /// Where it runs; the context's or the sandbox's own directory if absent.
    #[serde(default)]
    pub workdir: Option<PathBuf>,
    /// Its environment beside what it inherits.
    #[serde(default)]
    pub env: HashMap<String, String>,
    /// Whether it inherits the sandbox's environment. The host's is never inherited.
    #[serde(default = "inherits")]
    pub inherit_env: bool,
    /// What it reads from stdin; nothing if absent.
    #[serde(default)]
    pub stdin: Option<Vec<u8>>,
    /// How long it may take.
    #[serde(default)]
    pub timeout: Option<Duration>,
}

fn inherits() -> bool {
    true
}

/// The kernel's own bound on arguments and environment together is a quarter of the stack limit,
/// 2 MiB as it is usually set.
const MAX_TOTAL: usize = 2 << 20;

impl Command {
    /// Makes a command without arguments, in the sandbox's own environment.
    pub fn new(program: impl Into<String>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            workdir: None,
            env: HashMap::new(),
            inherit_env: true,
            stdin: None,
            timeout: None,
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets where it runs.
    #[must_use]
    pub fn workdir(mut self, workdir: impl Into<PathBuf>) -> Self {
        self.workdir = Some(workdir.into());
        self
    }

    /// Sets one variable of its environment.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Sets how long it may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets what it reads from stdin.
    #[must_use]
    pub fn stdin(mut self, stdin: impl Into<Vec<u8>>) -> Self {
        self.stdin = Some(stdin.into());
        self
    }

    /// Checks what can be checked without a sandbox. Whether the program exists is left to it.
    pub fn validate(&self) -> Result<(), SandboxError> {
        if self.program.is_empty() {
            return Err(SandboxError::invalid(
                "program",
                "the program is empty",
                "name a program, such as `python3`",
            ));
        }
        check_string("program", &self.program)?;
        for (i, arg) in self.args.iter().enumerate() {
            check_string(&format!("args[{i}]"), arg)?;
        }
        for (name, value) in &self.env {
            check_variable("env", name, value)?;
        }
        if let Some(workdir) = &self.workdir {
            check_path("workdir", workdir)?;
        }
        check_timeout(self.timeout)?;
        let args = self.args.iter().map(|arg| arg.len() + 1).sum::<usize>();
        let env = self.env.iter().map(|(name, value)| name.len() + value.len() + 2).sum::<usize>();
        if self.program.len() + 1 + args + env > MAX_TOTAL {
            return Err(SandboxError::TooLarge {
                what: "the command with its arguments and environment".to_owned(),
                limit: MAX_TOTAL as u64,
            });
        }
        Ok(())
    }
}

impl ExecContext {
    /// Checks what can be checked without a sandbox.
    pub fn validate(&self) -> Result<(), SandboxError> {
        for (i, (name, value)) in self.extra_env.iter().enumerate() {
            check_variable(&format!("extra_env[{i}]"), name, value)?;
        }
        if let Some(workdir) = &self.workdir {
            check_path("workdir", workdir)?;
        }
        check_timeout(self.timeout)
    }
}

fn check_string(field: &str, text: &str) -> Result<()> {
    if text.contains('\0') {
        let hint = "the kernel ends an argument at a NUL byte; pass such data through stdin";
        return Err(SandboxError::invalid(field, "it contains a NUL byte", hint));
    }
    if text.len() >= MAX_STRING {
        let what = format!("`{field}` of the command");
        return Err(SandboxError::TooLarge { what, limit: MAX_STRING as u64 });
    }
    Ok(())
}

fn check_timeout(timeout: Option<Duration>) -> Result<()> {
    match timeout {
        Some(Duration::ZERO) => Err(SandboxError::invalid(
            "timeout",
            "no command ends within no time",
            "leave the timeout out to have none",
        )),
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_command_is_refused() {
        for (i, (command, code, field)) in [
            (Command::new(""), "invalid_spec", "program"),
            (Command::new("a\0b"), "invalid_spec", "program"),
            (Command::new("a").args(["x", "y\0"]), "invalid_spec", "args[1]"),
            (Command::new("a").env("", "v"), "invalid_spec", "env"),
            (Command::new("a").env("A=", "v"), "invalid_spec", "env"),
            (Command::new("a").env("A", "\0"), "invalid_spec", "env"),
            (Command::new("a").workdir("rel"), "invalid_spec", "workdir"),
            (Command::new("a").workdir("/a/.."), "invalid_spec", "workdir"),
            (Command::new("a").timeout(Duration::ZERO), "invalid_spec", "timeout"),
            (Command::new("a").args(["x".repeat(128 << 10)]), "too_large", "args[0]"),
            (Command::new("a").args(vec!["x".repeat(100 << 10); 21]), "too_large", "the command"),
        ]
        .into_iter()
        .enumerate()
        {
            let error = command.validate().expect_err(&format!("row {i}"));
            assert_eq!(error.code(), code, "row {i}: {error}");
            assert!(error.to_string().contains(field), "row {i}: {error}");
            assert!(error.hint().is_some(), "row {i} has a hint");
        }
    }

    #[test]
    fn a_sensible_command_is_accepted() {
        for command in [
            Command::new("true"),
            Command::new("/bin/sh").args(["-c", "", "ü\n\t"]).env("A", "b=c").workdir("/"),
            Command::new("cat").stdin(vec![0, 1, 2]).timeout(Duration::MAX),
            Command::new("a").args(vec!["x".repeat(100 << 10); 20]),
        ] {
            command.validate().unwrap();
        }
    }

    #[test]
    fn an_invalid_context_is_refused() {
        let ok = ExecContext::default();
        ok.validate().unwrap();
        for context in [
            ExecContext { workdir: Some("rel".into()), ..ok.clone() },
            ExecContext { extra_env: vec![("A=".into(), "v".into())], ..ok.clone() },
            ExecContext { timeout: Some(Duration::ZERO), ..ok.clone() },
        ] {
            assert_eq!(context.validate().unwrap_err().code(), "invalid_spec");
        }
    }
}
