//! How a command ends: its exit code, and what is said about it.

use std::time::{Duration, Instant};

use crate::support::{Outcome, directory, directory_in, run};

fn gave(code: i32, stdout: &str, stderr: &str) -> Outcome {
    Outcome { code: Some(code), stdout: stdout.into(), stderr: stderr.into() }
}

#[test]
fn the_exit_code_is_the_commands_own() {
    for code in [0, 1, 2, 42, 124, 125, 255] {
        assert_eq!(run(&["--", "sh", "-c", &format!("exit {code}")]), gave(code, "", ""));
    }
}

#[test]
fn a_signal_is_128_and_its_number() {
    for (signal, code) in [("KILL", 137), ("TERM", 143), ("SEGV", 139)] {
        assert_eq!(run(&["--", "sh", "-c", &format!("kill -{signal} $$")]), gave(code, "", ""));
    }
}

#[test]
fn a_limit_that_ended_the_command_is_named_in_one_line() {
    let fill = "head -c 4000000 /dev/zero > /tmp/fill";
    let forks = "import os, sys, time\n\
                 for i in range(50):\n    \
                     try:\n        pid = os.fork()\n    \
                     except OSError: sys.exit(9)\n    \
                     if pid == 0: time.sleep(20)";
    for (args, code, stderr) in [
        (&["--timeout", "1s", "--", "sleep", "60"][..], 124, "timed out (limit 1 s)"),
        (&["--timeout", "500ms", "--", "sleep", "60"], 124, "timed out (limit 500 ms)"),
        (&["--memory", "64M", "--", "tail", "/dev/zero"], 137, "out of memory (limit 64 MiB)"),
        (
            &["--cpu-time", "1s", "--", "sh", "-c", "while :; do :; done"],
            137,
            "CPU time used up (limit 1 s)",
        ),
        (&["--pids", "8", "--", "python3", "-c", forks], 9, "too many processes (limit 8)"),
        (&["--disk", "1M", "--", "sh", "-c", fill], 1, "disk quota exceeded (limit 1 MiB)"),
    ] {
        let seen = run(args);
        let last = seen.stderr.lines().last().unwrap_or_default();
        assert_eq!(last, format!("warren: ended: {stderr}"), "{args:?}: {seen:?}");
        assert_eq!(seen.code, Some(code), "{args:?}: {seen:?}");
    }
    assert_eq!(run(&["--quiet", "--timeout", "500ms", "--", "sleep", "60"]), gave(124, "", ""));
}

#[test]
fn output_stops_at_its_limit() {
    let seen = run(&["--max-output", "64K", "--", "yes"]);
    assert_eq!((seen.code, seen.stdout.len()), (Some(137), 64 << 10));
    assert_eq!(seen.stderr, "warren: ended: output limit exceeded (limit 64 KiB)\n");
    // Both streams count together, and what is left in the pipes at the end counts too.
    let seen =
        run(&["--max-output", "10", "--", "sh", "-c", "printf 12345678; printf 12345678 >&2"]);
    let ended = "warren: ended: output limit exceeded (limit 10 bytes)\n";
    let said = seen.stderr.strip_suffix(ended).unwrap_or_else(|| panic!("{seen:?}"));
    assert_eq!((seen.code, seen.stdout.len() + said.len()), (Some(137), 10));
    assert_eq!(run(&["--max-output", "5", "--", "printf", "12345"]), gave(0, "12345", ""));
}

#[test]
fn none_takes_a_limit_away() {
    let script = "ulimit -n; head -c 12000000 /dev/zero | wc -c; head -c 12000000 /dev/zero";
    let seen = run(&["--max-output", "none", "--", "sh", "-c", script]);
    assert_eq!((seen.code, seen.stdout.len()), (Some(0), "256\n12000000\n".len() + 12_000_000));
    let seen = run(&["--open-files", "unlimited", "--", "sh", "-c", "ulimit -n"]);
    assert_ne!(seen.stdout, "256\n");
    assert_eq!(run(&["--open-files", "32", "--", "sh", "-c", "ulimit -n"]), gave(0, "32\n", ""));
}

#[test]
fn what_the_command_left_running_is_not_waited_for() {
    let began = Instant::now();
    let seen = run(&["--", "sh", "-c", "sleep 50 & echo done"]);
    assert_eq!(seen, gave(0, "done\n", ""));
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn paths_are_shown_as_they_were_given() {
    check_paths(&directory());
}

#[test]
fn paths_below_tmp_are_shown_in_the_sandboxs_own_tmp() {
    check_paths(&directory_in("/tmp"));
}

fn check_paths(dir: &tempfile::TempDir) {
    let path = dir.path().to_str().expect("a plain path");
    std::fs::write(dir.path().join("in"), "given").expect("a file");
    let written = || std::fs::read_to_string(dir.path().join("out")).expect("it was written");
    let read = format!("cat {path}/in; echo x > {path}/out");
    let seen = run(&["--ro", path, "--", "sh", "-c", &read]);
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(2), "given"), "{seen:?}");
    assert!(!dir.path().join("out").exists());
    let seen =
        run(&["--rw", path, "--workdir", path, "--", "sh", "-c", "cat in; echo x > out; pwd"]);
    assert_eq!(seen, gave(0, &format!("given{path}\n"), ""));
    assert_eq!(written(), "x\n");
    let bind = format!("{path}:/data:ro");
    assert_eq!(run(&["--bind", &bind, "--", "cat", "/data/in"]), gave(0, "given", ""));
    let seen = run(&["--bind", &bind, "--", "sh", "-c", "echo y > /data/out"]);
    assert_eq!(seen.code, Some(2), "{seen:?}");
    assert_eq!(written(), "x\n");
    assert_eq!(run(&["--", "ls", path]).code, Some(2), "control: nobody showed it");
}

#[test]
fn a_relative_path_counts_from_where_the_caller_stands() {
    let dir = directory();
    std::fs::write(dir.path().join("in"), "given").unwrap();
    let mut command =
        crate::support::warren(&["run", "--bind", ".:/data:ro", "--", "cat", "/data/in"]);
    assert_eq!(crate::support::outcome(command.current_dir(dir.path())), gave(0, "given", ""));
}

#[test]
fn the_environment_is_what_was_given_and_none_of_the_callers() {
    let mut command = crate::support::warren(&["run", "--env", "GIVEN=a=b", "--", "env"]);
    let seen = crate::support::outcome(command.env("SECRET", "s3cret"));
    assert!(seen.stdout.contains("GIVEN=a=b\n"), "{seen:?}");
    assert!(!seen.stdout.contains("s3cret"), "{seen:?}");
}

#[test]
fn a_caller_whose_directory_is_gone_can_still_run() {
    let script = "d=$(mktemp -d) && cd $d && rmdir $d && $WARREN run -- echo ran";
    assert_eq!(crate::support::shell(script), gave(0, "ran\n", ""));
    let seen = crate::support::shell(&script.replace("run --", "run --ro x --"));
    assert_eq!(seen.code, Some(2));
    assert!(seen.stderr.contains("a directory that is gone"), "{seen:?}");
}
