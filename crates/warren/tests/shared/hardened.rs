//! The cases of a test program once more, in a container that gives nothing.

use std::io::{Seek as _, Write as _};
use std::os::fd::AsRawFd as _;

use warren_sys::seccomp::{self, Action, Arch, Instruction, Rule};

/// System calls that hardened containers refuse, by their numbers on this architecture: those that make
/// namespaces and mounts, and `clone3`, whose flags no filter sees.
fn refused() -> Vec<Rule> {
    let rule = |nr, errno| Rule { nr, action: Action::Errno(errno), when: Vec::new() };
    let numbers: &[u32] = match Arch::NATIVE {
        // unshare, setns, mount, pivot_root, open_tree, move_mount, fsopen, fsmount, mount_setattr
        Arch::X86_64 => &[272, 308, 165, 155, 428, 429, 430, 432, 442],
        Arch::Aarch64 => &[97, 268, 40, 41, 428, 429, 430, 432, 442],
    };
    let mut rules: Vec<Rule> = numbers.iter().map(|&nr| rule(nr, 1)).collect();
    rules.push(rule(435, 38));
    rules
}

/// Runs the cases of this very program that match `args` in such a container, and expects them to pass.
#[track_caller]
pub(crate) fn rerun(args: &[&str]) {
    let directory = tempfile::Builder::new().prefix("warren-test-").tempdir_in("/var/tmp").unwrap();
    let program = directory.path().join("cases");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let open = || std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(directory.path(), open()).unwrap();
    std::fs::set_permissions(&program, open()).unwrap();
    let filter = seccomp::compile(Arch::NATIVE, Action::Allow, &refused()).unwrap();
    let mut file = tempfile::tempfile().unwrap();
    for Instruction { code, jt, jf, k } in filter {
        file.write_all(&code.to_ne_bytes()).unwrap();
        file.write_all(&[jt, jf]).unwrap();
        file.write_all(&k.to_ne_bytes()).unwrap();
    }
    file.rewind().unwrap();
    // Bubblewrap is to inherit it.
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    let filter = file.as_raw_fd().to_string();
    // As somebody who has no right on the host either: root's would go in with it.
    let output = std::process::Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--", "bwrap"])
        .args(["--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"])
        .args(["--unshare-pid", "--unshare-net", "--die-with-parent"])
        .args(["--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--seccomp", &filter, "--"])
        .arg(&program)
        .args(args)
        .current_dir("/")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains(" 0 passed"), "control: cases did run: {text}");
}
