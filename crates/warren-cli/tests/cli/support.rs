//! Running the binary and keeping what it gave.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// No test takes longer, whatever is stuck.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What a run of the binary gave.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Makes a command for the binary, in a plain environment.
pub(crate) fn warren(args: &[&str]) -> Command {
    command(env!("CARGO_BIN_EXE_warren"), args)
}

/// Makes a command in a plain environment.
pub(crate) fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command
        .args(args)
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
        .env("HOME", "/nonexistent")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs `warren run ARGS`.
pub(crate) fn run(args: &[&str]) -> Outcome {
    outcome(warren(&["run"]).args(args))
}

/// Runs a shell script that finds the binary as `$WARREN`.
pub(crate) fn shell(script: &str) -> Outcome {
    let mut command = command("/bin/bash", &["-c", script]);
    outcome(command.env("WARREN", env!("CARGO_BIN_EXE_warren")))
}

/// Runs a command to its end.
pub(crate) fn outcome(command: &mut Command) -> Outcome {
    finish(command.spawn().expect("the program starts"))
}

/// Waits for the end of a process, and fails if it does not come.
#[track_caller]
pub(crate) fn finish(child: Child) -> Outcome {
    let pid = child.id().to_string();
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match receiver.recv_timeout(PATIENCE) {
        Ok(output) => {
            let output = output.expect("the output can be read");
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
            Outcome { code: output.status.code(), stdout, stderr }
        }
        Err(_) => {
            let _ = Command::new("kill").args(["-KILL", &pid]).status();
            panic!("it did not end within {PATIENCE:?}");
        }
    }
}

/// Waits until something is so.
#[track_caller]
pub(crate) fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let began = Instant::now();
    while !check() {
        assert!(began.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a signal to a process of ours.
pub(crate) fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status();
    assert!(status.expect("kill runs").success());
}

/// Writes a program.
pub(crate) fn program(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().expect("a program is in a directory")).expect("a directory");
    fs::write(path, text).expect("a file");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("its mode");
}

/// Makes a directory that everybody can read.
pub(crate) fn directory() -> tempfile::TempDir {
    directory_in("/var/tmp")
}

/// Makes a directory that everybody can read, in another.
pub(crate) fn directory_in(parent: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir_in(parent).expect("a directory");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("its mode");
    dir
}
