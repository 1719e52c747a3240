//! What makes no sense is refused with a hint, before anything is made.

use crate::support::{outcome, run, warren};

#[test]
fn bad_input_is_refused_with_its_flag_its_reason_and_a_hint() {
    let rows: &[(&[&str], i32, &[&str])] = &[
        (
            &["--profile", "nope", "--", "true"],
            2,
            &["--profile", "`nope`", "hint: the profiles are"],
        ),
        (&["--seccomp", "nope", "--", "true"], 2, &["--seccomp", "`nope`", "hint: "]),
        (&["--profile", "../x", "--", "true"], 2, &["--profile", "hint: "]),
        (&["--ro", "/nope/x", "--", "true"], 2, &["--ro", "`/nope/x` does not exist", "hint: "]),
        (&["--rw", "nope/x", "--", "true"], 2, &["--rw", "/nope/x` does not exist", "hint: "]),
        (&["--ro", "/usr/../etc", "--", "true"], 2, &["--ro", "contains `..`", "hint: "]),
        (&["--ro", "../x", "--", "true"], 2, &["--ro", "contains `..`", "hint: "]),
        (&["--ro", "", "--", "true"], 2, &["--ro", "value is required"]),
        (&["--ro", "/", "--", "true"], 2, &["--ro", "root", "hint: "]),
        (&["--ro", "/tmp", "--rw", "/tmp", "--", "true"], 2, &["twice", "hint: "]),
        (&["--bind", "/nope/x:/x", "--", "true"], 2, &["--bind", "does not exist", "hint: "]),
        (&["--bind", "/tmp:x", "--", "true"], 2, &["--bind", "`x` is relative", "hint: "]),
        (&["--bind", "/tmp:/a/../b", "--", "true"], 2, &["--bind", "`..`", "hint: "]),
        (&["--bind", "/tmp:/proc/x", "--", "true"], 2, &["--bind", "/proc", "hint: "]),
        (&["--bind", "/tmp:/dev", "--", "true"], 2, &["--bind", "/dev", "hint: "]),
        (&["--bind", "/tmp", "--", "true"], 2, &["--bind", "SRC:DST"]),
        (&["--bind", "/tmp:/x:rx", "--", "true"], 2, &["--bind", "SRC:DST:ro"]),
        (&["--workdir", "x", "--", "true"], 2, &["--workdir", "relative", "hint: "]),
        (&["--workdir", "/proc/1", "--", "true"], 2, &["--workdir", "/proc", "hint: "]),
        (&["--env", "A", "--", "true"], 2, &["--env", "NAME=VALUE"]),
        (&["--env", "=x", "--", "true"], 2, &["--env", "NAME=VALUE"]),
        (&["--memory", "0", "--", "true"], 2, &["--memory", "between", "hint: `none`"]),
        (&["--memory", "1K", "--", "true"], 2, &["--memory", "between", "hint: `none`"]),
        (&["--memory", "999999T", "--", "true"], 2, &["--memory", "between", "hint: `none`"]),
        (&["--memory", "99999999999999999999", "--", "true"], 2, &["--memory", "512M"]),
        (&["--memory", "-5", "--", "true"], 2, &["-5"]),
        (&["--memory", "12Q", "--", "true"], 2, &["--memory", "512M or 1.5G"]),
        (&["--memory", "", "--", "true"], 2, &["--memory"]),
        (&["--cpus", "0", "--", "true"], 2, &["--cpus", "between", "hint: 1 is one whole CPU"]),
        (&["--cpus", "x", "--", "true"], 2, &["--cpus", "0.5"]),
        (&["--cpu-weight", "0", "--", "true"], 2, &["--cpu-weight", "hint: `none`"]),
        (&["--cpu-weight", "10001", "--", "true"], 2, &["--cpu-weight", "10000"]),
        (&["--cpu-time", "0s", "--", "true"], 2, &["--cpu-time", "between"]),
        (&["--timeout", "30", "--", "true"], 2, &["--timeout", "500ms, 30s or 2m"]),
        (&["--timeout", "0s", "--", "true"], 2, &["--timeout", "between"]),
        (&["--timeout", "99999999h", "--", "true"], 2, &["--timeout", "between"]),
        (&["--pids", "0", "--", "true"], 2, &["--pids", "between"]),
        (&["--pids", "1.5", "--", "true"], 2, &["--pids", "whole number"]),
        (&["--open-files", "1", "--", "true"], 2, &["--open-files", "between"]),
        (&["--disk", "1", "--", "true"], 2, &["--disk", "between"]),
        (&["--max-output", "0", "--", "true"], 2, &["--max-output", "between"]),
        (&["--accept-missing", "ram", "--", "true"], 2, &["--accept-missing", "memory, cpu-time"]),
        (&["--tty", "--", "true"], 2, &["--tty needs a terminal", "hint: leave --tty out"]),
        (&["--"], 2, &["<CMD>"]),
        (&["--", ""], 2, &["the program is empty", "hint: name a program"]),
        (&["--nope", "--", "true"], 2, &["--nope"]),
        (&["--", "no-such-program"], 127, &["`no-such-program`", "no such program", "hint: "]),
        (&["--", "/no/such/program"], 127, &["`/no/such/program`", "no such program", "hint: "]),
        (&["--", "/etc/passwd"], 126, &["`/etc/passwd`", "cannot be executed", "hint: "]),
        (&["--", "/usr"], 126, &["`/usr`", "cannot be executed", "hint: "]),
    ];
    for (args, code, words) in rows {
        let seen = run(args);
        assert_eq!(seen.code, Some(*code), "{args:?}: {seen:?}");
        assert_eq!(seen.stdout, "", "{args:?}: nothing ran");
        assert!(seen.stderr.starts_with("error: "), "{args:?}: {seen:?}");
        for word in *words {
            assert!(seen.stderr.contains(word), "{args:?}: no `{word}` in {seen:?}");
        }
    }
}

#[test]
fn an_error_is_one_line_and_its_hint_another() {
    for (args, stderr) in [
        (
            &["--ro", "/nope", "--", "true"][..],
            "error: invalid --ro: `/nope` does not exist on the host\n\
             hint: create it first, or correct the path\n",
        ),
        (
            &["--profile", "nope", "--", "true"],
            "error: invalid --profile: there is no profile `nope`\n\
             hint: the profiles are default, dev, permissive, strict\n",
        ),
        (
            &["--memory", "0", "--", "true"],
            "error: invalid --memory: 0 is not between 1048576 and 1125899906842624\n\
             hint: `none` takes the limit away\n",
        ),
        (
            &["--", "no-such-program"],
            "error: cannot run `no-such-program`: no such program in the sandbox: No such file or \
             directory (os error 2)\n\
             hint: only programs inside the sandbox can run; check the name and its PATH\n",
        ),
        (
            &["--tty", "--", "true"],
            "error: --tty needs a terminal, and stdin is none\n\
             hint: leave --tty out to use pipes\n",
        ),
    ] {
        assert_eq!(run(args).stderr, stderr);
    }
}

#[test]
fn with_json_an_error_is_an_object_on_stdout() {
    for (args, code, name) in [
        (&["--json", "--ro", "/nope", "--", "true"][..], 2, "invalid_spec"),
        (&["--json", "--memory", "12Q", "--", "true"], 2, "usage"),
        (&["--json", "--tty", "--", "true"], 2, "usage"),
        (&["--json", "--", "no-such-program"], 127, "program_not_found"),
        (&["--json", "--", "/etc/passwd"], 126, "program_not_executable"),
    ] {
        let seen = run(args);
        assert_eq!((seen.code, seen.stderr.as_str()), (Some(code), ""), "{args:?}");
        let object: serde_json::Value = serde_json::from_str(&seen.stdout).unwrap();
        assert_eq!(object["error"]["code"], name);
        assert!(object["error"]["message"].as_str().is_some_and(|message| !message.is_empty()));
        assert!(object["error"]["hint"].as_str().is_some_and(|hint| !hint.is_empty()));
        assert_eq!(seen.stdout.lines().count(), 1);
    }
}

#[test]
fn a_json_flag_of_the_command_is_not_ours() {
    let seen = run(&["--memory", "12Q", "--", "true", "--json"]);
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(2), ""));
}

#[test]
fn without_a_command_the_help_is_on_stderr_and_the_code_is_2() {
    let seen = outcome(&mut warren(&[]));
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(2), ""));
    assert!(seen.stderr.contains("Usage: warren"));
}
