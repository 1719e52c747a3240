//! The same as a plain user, which only root can become.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Outcome, command, directory, outcome, program, run};

const NOBODY: u32 = 65534;

/// User nobody with a home of its own and a copy of the binary.
struct Nobody {
    home: tempfile::TempDir,
}

impl Nobody {
    fn new() -> Self {
        assert!(rustix::process::geteuid().is_root(), "only root can become nobody");
        let home = directory();
        // The target directory may lie under a home that nobody else can enter.
        fs::copy(env!("CARGO_BIN_EXE_warren"), home.path().join("warren")).expect("a copy");
        chown(home.path(), Some(NOBODY), Some(NOBODY)).expect("its owner");
        Self { home }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn warren(&self, args: &[&str]) -> std::process::Command {
        let mut command = command("setpriv", &["--reuid=65534", "--regid=65534", "--clear-groups"]);
        command.arg(self.path("warren")).args(args);
        command.env("HOME", self.home.path()).current_dir(self.home.path());
        command
    }

    fn run(&self, args: &[&str]) -> Outcome {
        outcome(self.warren(&["run"]).args(args))
    }
}

#[test]
fn a_plain_user_gets_the_readmes_first_result() {
    let seen = Nobody::new().run(&["--", "python3", "-c", "print(6*7)"]);
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(0), "42\n"), "{seen:?}");
}

#[test]
fn a_default_that_cannot_be_kept_is_one_loud_line_and_its_hint() {
    let nobody = Nobody::new();
    let seen = nobody.run(&["--", "true"]);
    let lines: Vec<&str> = seen.stderr.lines().collect();
    assert_eq!((seen.code, lines.len()), (Some(0), 2), "{seen:?}");
    assert!(lines[0].starts_with("warning: ") && lines[0].contains("memory"), "{seen:?}");
    assert!(lines[1].starts_with("hint: ") && lines[1].contains("Delegate=yes"), "{seen:?}");

    assert_eq!(nobody.run(&["--quiet", "--", "true"]).stderr, "");
    let seen = nobody.run(&["--json", "--quiet", "--", "true"]);
    let report: Value = serde_json::from_str(&seen.stdout).unwrap();
    assert_eq!(report["enforced"]["warnings"].as_array().map(Vec::len), Some(1));
}

#[test]
fn a_limit_that_was_asked_for_by_name_and_cannot_be_kept_is_an_error() {
    let nobody = Nobody::new();
    for args in [&["--memory", "512M"][..], &["--memory", "64M"], &["--cpus", "0.5"]] {
        let seen = nobody.run(&[args, &["--", "echo", "ran"]].concat());
        assert_eq!((seen.code, seen.stdout.as_str()), (Some(125), ""), "{args:?}: {seen:?}");
        assert!(seen.stderr.starts_with("error: cannot enforce the limit"), "{seen:?}");
        assert!(seen.stderr.contains("hint: ") && seen.stderr.contains("--accept-missing"));
    }
    let seen = nobody.run(&["--memory", "64M", "--accept-missing", "memory", "--", "echo", "ran"]);
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(0), "ran\n"), "{seen:?}");
    // Taken away is not asked for.
    assert_eq!(nobody.run(&["--memory", "none", "--", "true"]).code, Some(0));
}

#[test]
fn a_plain_user_has_the_same_exit_codes_and_streams() {
    let nobody = Nobody::new();
    for (args, code, stdout) in [
        (&["--quiet", "--", "sh", "-c", "echo a; exit 3"][..], 3, "a\n"),
        (&["--quiet", "--timeout", "500ms", "--", "sleep", "60"], 124, ""),
        (&["--", "no-such-program"], 127, ""),
        (&["--", "/etc/passwd"], 126, ""),
        (&["--ro", "/nope", "--", "true"], 2, ""),
        (&["--quiet", "--max-output", "2", "--", "printf", "abc"], 137, "ab"),
    ] {
        let seen = nobody.run(args);
        assert_eq!((seen.code, seen.stdout.as_str()), (Some(code), stdout), "{args:?}: {seen:?}");
    }
}

#[test]
fn a_plain_user_has_its_own_paths_and_no_others() {
    let nobody = Nobody::new();
    fs::create_dir(nobody.path("mine")).unwrap();
    chown(nobody.path("mine"), Some(NOBODY), Some(NOBODY)).unwrap();
    let seen = nobody.run(&[
        "--quiet",
        "--rw",
        "mine",
        "--",
        "sh",
        "-c",
        "echo x > $0/new",
        nobody.path("mine").to_str().unwrap(),
    ]);
    assert_eq!(seen.code, Some(0), "{seen:?}");
    assert_eq!(fs::read_to_string(nobody.path("mine/new")).unwrap(), "x\n");
    program(&nobody.path(".pyenv/versions/1.0/bin/some-tool"), "#!/bin/sh\necho ran\n");
    program(&nobody.path(".pyenv/shims/some-tool"), "#!/bin/sh\nexit 1\n");
    let mut command = nobody.warren(&["run", "--quiet", "--", "some-tool"]);
    let seen =
        outcome(command.env("PATH", format!("{}:/usr/bin", nobody.path(".pyenv/shims").display())));
    assert_eq!(seen.stdout, "ran\n", "{seen:?}");
}

#[test]
fn nothing_of_a_sandbox_is_left_however_it_ended() {
    for args in [
        &["--json", "--", "true"][..],
        &["--json", "--", "sh", "-c", "sleep 99 & exit 3"],
        &["--json", "--timeout", "300ms", "--", "sleep", "60"],
        &["--json", "--max-output", "1K", "--", "yes"],
    ] {
        let seen = run(args);
        let report: Value = serde_json::from_str(&seen.stdout).unwrap();
        let id = report["sandbox"].as_str().unwrap();
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(id));
        assert_eq!(named(Path::new("/sys/fs/cgroup"), id), Vec::<PathBuf>::new(), "{args:?}");
    }
}

/// Finds directories by a part of their name.
fn named(dir: &Path, part: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    dirs.flat_map(|entry| {
        let mut found = named(&entry.path(), part);
        if entry.file_name().to_string_lossy().contains(part) {
            found.push(entry.path());
        }
        found
    })
    .collect()
}

#[test]
fn what_walls_refuse_is_said_on_stderr_and_in_json_and_changes_nothing_else() {
    let script = "echo out; cat /etc/shadow; touch /usr/lib/x; cat /tmp/absent; exit 3";
    let nobody = Nobody::new();
    for is_root in [true, false] {
        let warren = |args: &[&str]| if is_root { run(args) } else { nobody.run(args) };
        let plain = warren(&["--quiet", "--", "sh", "-c", script]);
        let seen = warren(&["--quiet", "--explain", "--", "sh", "-c", script]);
        assert_eq!((seen.code, &seen.stdout), (Some(3), &plain.stdout), "{seen:?}");
        let told =
            seen.stderr.strip_prefix(&plain.stderr).expect("what it wrote itself comes first");
        let expected = "denied: read /etc/shadow, by the sandbox's root, in which this path of the host \
            is not shown; allowed by --ro /etc/shadow\n\
            denied: create /usr/lib/x, by the read-only mount /usr; allowed by --bind SRC:/usr/lib\n";
        assert_eq!(told, expected);

        let seen = warren(&["--quiet", "--explain", "--json", "--", "sh", "-c", script]);
        let report: Value = serde_json::from_str(&seen.stdout).expect("one object");
        let denials = report["denials"].as_array().expect("a list");
        assert_eq!((seen.code, denials.len()), (Some(3), 2), "{report}");
        assert_eq!(denials[1]["wall"], "mount");
        assert_eq!(denials[1]["errno"], "EROFS");
        let seen = warren(&["--quiet", "--json", "--", "sh", "-c", script]);
        assert!(!seen.stdout.contains("denials"), "nobody asked: {seen:?}");
    }
}

#[test]
fn without_a_root_of_its_own_the_rules_are_what_refuses() {
    let nobody = Nobody::new();
    let args = ["--quiet", "--isolation", "process", "--explain", "--", "sh", "-c"];
    fs::write(nobody.path("theirs"), "").expect("a file");
    let theirs = nobody.path("theirs").display().to_string();
    let script = format!("cat {theirs}; echo x >mine && cat mine");
    let seen = nobody.run(&[&args[..], &[&script]].concat());
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(0), "x\n"), "{seen:?}");
    let expected = format!("denied: read {theirs}, by Landlock; allowed by --ro {theirs}");
    assert!(seen.stderr.lines().any(|line| line == expected), "{seen:?}");
    assert!(!seen.stderr.contains("mine"), "{seen:?}");
}

fn soon(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the directory of a sandbox without namespaces, by what it says of where its commands run.
fn home_of(stdout: &str) -> PathBuf {
    let workspace = Path::new(stdout.lines().next().expect("a line"));
    let home = workspace.parent().expect("it is below its own").to_owned();
    assert!(home.starts_with("/var/tmp"), "{stdout}");
    home
}

/// Init is the caller there, as its commands are, and one of them may do to it what it likes.
#[test]
fn one_who_stops_all_that_it_can_ends_its_own_sandbox() {
    let nobody = Nobody::new();
    let run = |script: &str| {
        let args =
            ["--quiet", "--isolation", "process", "--backend", "landlock", "--timeout", "20s"];
        nobody.run(&[&args[..], &["--", "bash", "-c", script]].concat())
    };
    let seen = run("kill -0 -1 && echo reached");
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(0), "reached\n"), "control: {seen:?}");
    // Time to be read: what is in the pipe of one whose init is gone is nobody's to hand on.
    for script in [
        "pwd; sleep 0.2; kill -STOP -1; sleep 60",
        "pwd; sleep 0.2; kill -STOP $PPID; sleep 60",
        "pwd; sleep 0.2; kill -KILL -1; sleep 60",
    ] {
        let began = Instant::now();
        let seen = run(script);
        assert_eq!(seen.code, Some(125), "{script}: {seen:?}");
        assert!(seen.stderr.contains("ended"), "{script}: {seen:?}");
        assert!(began.elapsed() < Duration::from_secs(10), "{script}: before its time is up");
        let home = home_of(&seen.stdout);
        soon("its directory goes with it", || !home.exists());
    }
}

#[test]
fn a_client_that_is_killed_leaves_nothing_of_a_plain_users_sandbox() {
    let nobody = Nobody::new();
    let args = ["run", "--quiet", "--isolation", "process", "--backend", "landlock"];
    let script = "mkdir -m 0 shut; pwd; sleep 1000";
    let mut client = nobody.warren(&[&args[..], &["--", "sh", "-c", script]].concat());
    let mut client = client.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(client.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let home = home_of(&line);
    assert!(home.exists(), "control: {}", home.display());
    client.kill().expect("a signal");
    client.wait().expect("its end");
    soon("its directory goes with it", || !home.exists());
}
