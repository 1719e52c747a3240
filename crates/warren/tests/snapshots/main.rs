//! Snapshots on the linux backend: what a sandbox wrote is kept, and others stand on it.
//!
//! All cases run as root and, by the last test, as a plain user.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

#[path = "../shared/plain_user.rs"]
mod plain_user;

mod hard;
mod layers;
mod property;

use std::path::Path;

use warren::backend::LinuxBackend;
use warren::layers::Layers;
use warren::{Base, Command, CreateOptions, ExecContext, IsolationBackend, Sandbox, SandboxSpec};

/// A backend with layers of its own.
struct Place {
    backend: LinuxBackend,
    layers: Layers,
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self::in_directory(tempfile::tempdir().unwrap())
    }

    fn in_directory(directory: tempfile::TempDir) -> Self {
        let layers = Layers::open(directory.path().join("storage")).unwrap();
        let backend = LinuxBackend::with_layers(None, layers.clone()).unwrap();
        Self { backend, layers, directory }
    }

    async fn on(&self, base: &Base) -> Box<dyn Sandbox> {
        let options = CreateOptions { base: base.clone(), ..CreateOptions::default() };
        self.backend.create_sandbox_with(&SandboxSpec::default(), &options).await.unwrap()
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Runs a script and returns what it wrote; it must succeed.
async fn sh(sandbox: &dyn Sandbox, script: &str) -> String {
    let command = Command::new("sh").args(["-ec", script]);
    let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.exit_code, 0, "{script}: {out}{err}");
    out.into_owned()
}

#[test]
fn a_plain_user_has_the_same() {
    let skipped =
        ["--skip", "a_plain_user", "--skip", "needs_root", "--skip", "a_hundred_thousand"];
    plain_user::rerun(&[&skipped[..], &["--test-threads", "1"]].concat());
}
