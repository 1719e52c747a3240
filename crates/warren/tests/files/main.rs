//! The files of a sandbox of the linux backend, reached from outside, by friends and foes.
//!
//! Those named after THREATS.md try what a hostile sandbox, or a hostile caller, would.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

mod hostile;
mod load;
mod support;
mod uses;

/// Runs the other cases of this very program once more, as `nobody`.
#[test]
fn all_of_it_holds_for_a_plain_user_too() {
    assert!(rustix::process::geteuid().is_root(), "only root can become somebody else here");
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("files");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(directory.path(), open).unwrap();
    let output = std::process::Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"])
        .arg(&program)
        .args(["hostile::", "uses::", "--test-threads", "2"])
        .current_dir("/")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains(" 0 passed"), "control: cases did run: {text}");
}
