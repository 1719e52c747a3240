//! The cases of a test program once more, as somebody who is not root.

/// Runs the cases of this very program that match `args`, as `nobody`, and expects them to pass.
#[track_caller]
pub(crate) fn rerun(args: &[&str]) {
    assert!(rustix::process::geteuid().is_root(), "only root can become somebody else here");
    let directory = tempfile::tempdir().unwrap();
    // A copy: what cargo builds is in a directory that root alone may enter.
    let program = directory.path().join("cases");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(directory.path(), open).unwrap();
    let output = std::process::Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"])
        .arg(&program)
        .args(args)
        .current_dir("/")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains(" 0 passed"), "control: cases did run: {text}");
}
