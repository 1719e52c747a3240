//! What is printed about the program itself.

use std::process::{Command, Stdio};

use crate::support::{directory, outcome, shell, warren};

#[test]
fn completions_are_printed_for_each_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let seen = outcome(&mut warren(&["completions", shell]));
        assert_eq!((seen.code, seen.stderr.as_str()), (Some(0), ""));
        assert!(seen.stdout.contains("accept-missing"), "{shell}");
    }
    assert_eq!(outcome(&mut warren(&["completions", "tcl"])).code, Some(2));
}

#[test]
fn man_pages_are_printed_or_written_to_a_directory() {
    let seen = outcome(&mut warren(&["man"]));
    assert!(seen.stdout.contains(".TH warren 1"), "{seen:?}");
    let dir = directory();
    let seen = outcome(&mut warren(&["man", dir.path().join("new").to_str().unwrap()]));
    assert_eq!(seen.code, Some(0), "{seen:?}");
    let page = std::fs::read_to_string(dir.path().join("new/warren-run.1")).unwrap();
    assert!(page.contains("memory"));
}

#[test]
fn the_version_is_the_packages() {
    let seen = outcome(&mut warren(&["--version"]));
    assert_eq!(seen.stdout, concat!("warren ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn help_that_is_not_read_to_its_end_is_no_error() {
    for command in ["--help", "run --help", "completions bash", "man"] {
        let seen = shell(&format!("$WARREN {command} | true; echo ${{PIPESTATUS[0]}}"));
        assert_eq!((seen.stdout.as_str(), seen.stderr.as_str()), ("0\n", ""), "{command}");
    }
}

#[test]
fn doctor_says_what_to_do_where_there_are_no_user_namespaces() {
    let none = "echo 0 > /proc/sys/user/max_user_namespaces; exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["-Ur", "sh", "-ec", none, "sh", env!("CARGO_BIN_EXE_warren"), "doctor"]);
    let seen = outcome(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let (_, linux) = seen.stdout.split_once("\nlinux:\n").unwrap_or_else(|| panic!("{seen:?}"));
    let mut lines = linux.lines().skip_while(|line| !line.starts_with("sandbox"));
    let [found, fix] = [lines.next().unwrap(), lines.next().unwrap()];
    assert!(found.contains("user.max_user_namespaces is 0"), "{seen:?}");
    assert!(fix.contains("fix:") && fix.contains("user.max_user_namespaces"), "{seen:?}");
}

#[test]
fn doctor_has_a_line_for_each_layer_and_the_same_as_an_object() {
    let seen = outcome(&mut warren(&["doctor"]));
    assert_eq!((seen.code, seen.stderr.as_str()), (Some(0), ""), "{seen:?}");
    let mut lines = seen.stdout.lines();
    let header: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    assert_eq!(header, ["BACKEND", "LEVEL", "USABLE", "PROVED", "LACKS", "BECAUSE"]);
    let of = |name: &str| {
        let line = seen.stdout.lines().find(|line| line.starts_with(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("{name}: {seen:?}")).split_whitespace().collect::<Vec<_>>()
    };
    assert_eq!(of("linux")[1..3], ["namespace", "yes"]);
    assert_eq!(of("landlock")[1..3], ["process", "yes"]);
    assert_eq!(of("host")[1..4], ["-", "no", "-"], "it isolates nothing, and says so");
    assert!(seen.stdout.contains("\nlinux:\nLAYER"), "{seen:?}");
    for layer in ["sandbox", "mounts", "network", "seccomp", "landlock", "memory"] {
        assert!(seen.stdout.lines().any(|line| line.starts_with(layer)), "{layer}: {seen:?}");
    }
    let seen = outcome(&mut warren(&["doctor", "--json"]));
    let report: serde_json::Value = serde_json::from_str(&seen.stdout).unwrap();
    assert_eq!(report["usable"], true);
    let linux = report["backends"].as_array().unwrap().iter().find(|one| one["name"] == "linux");
    let linux = linux.unwrap();
    assert_eq!((&linux["level"], &linux["usable"]), (&"namespace".into(), &true.into()));
    assert!(linux["proved"].as_array().unwrap().contains(&"network".into()), "{linux}");
    let findings = report["findings"].as_array().unwrap();
    assert!(
        findings.iter().any(|finding| finding["layer"] == "seccomp" && finding["holds"] == true)
    );
}

#[test]
fn nothing_weaker_than_what_is_asked_for_ever_runs_a_command() {
    let kernel = ["run", "--backend", "linux", "--isolation", "kernel", "--", "true"];
    let seen = outcome(&mut warren(&kernel));
    assert_eq!(seen.code, Some(125), "{seen:?}");
    assert!(seen.stderr.contains("backend `linux` lacks isolation level `kernel`"), "{seen:?}");
    let ours = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let seen = outcome(&mut warren(&["run", "--isolation", "kernel", "--", "uname", "-r"]));
    assert_eq!(seen.code, Some(0), "{seen:?}");
    assert_ne!(seen.stdout, ours, "it is a kernel of its own");
    let seen = outcome(&mut warren(&["run", "--isolation", "namespace", "--", "echo", "in"]));
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(0), "in\n"), "control: {seen:?}");
    let seen = outcome(&mut warren(&["run", "--isolation", "process", "--", "sh", "-c", "pwd"]));
    assert_eq!(seen.code, Some(0), "{seen:?}");
    assert!(seen.stdout.starts_with("/var/tmp/warren-sbx-"), "{seen:?}");
    assert!(!std::path::Path::new(seen.stdout.trim()).exists(), "nothing is left");
    let seen = outcome(&mut warren(&["run", "--isolation", "container", "--", "echo", "in"]));
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(0), "in\n"), "{seen:?}");
    let seen = outcome(&mut warren(&["run", "--isolation", "vm", "--", "true"]));
    assert_eq!(seen.code, Some(2), "{seen:?}");
    let seen = outcome(&mut warren(&["run", "--require", "network,ram", "--", "true"]));
    assert_eq!(seen.code, Some(2), "{seen:?}");
}
