//! Signals go through.

use std::io::{BufRead as _, BufReader};
use std::process::Child;
use std::time::{Duration, Instant};

use crate::support::{command, finish, signal, warren};

/// Starts a script that says `ready` and waits until it has.
fn start(script: &str) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = warren(&["run", "--", "sh", "-c", script]).spawn().expect("it starts");
    let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    (child, stdout)
}

#[test]
fn each_signal_reaches_the_command() {
    for name in ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2"] {
        let script = format!(
            "trap 'echo {name}; exit 9' {name}; echo ready; i=0; \
             while [ $i -lt 300 ]; do sleep 0.1; i=$((i+1)); done"
        );
        let (child, mut stdout) = start(&script);
        signal(&child, name);
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line, format!("{name}\n"));
        assert_eq!(finish(child).code, Some(9), "{name}");
    }
}

#[test]
fn a_command_that_dies_of_a_signal_gives_its_number() {
    for (name, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let (child, _stdout) = start("echo ready; exec sleep 30");
        signal(&child, name);
        assert_eq!(finish(child).code, Some(code));
    }
}

#[test]
fn a_second_signal_ends_a_command_that_ignores_the_first() {
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let script = format!("trap '' {name}; echo ready; sleep 40; sleep 40");
        let (child, _stdout) = start(&script);
        let began = Instant::now();
        signal(&child, name);
        std::thread::sleep(Duration::from_millis(200));
        signal(&child, name);
        let seen = finish(child);
        assert_eq!(seen.code, Some(code), "{seen:?}");
        assert_eq!(seen.stderr, "warren: ended: asked to end twice\n");
        assert!(began.elapsed() < Duration::from_secs(20));
    }
}

#[test]
fn a_reader_that_has_stopped_can_be_given_up() {
    // Its output does not fit into our pipe, which nobody reads.
    let mut command = warren(&["run", "--", "sh", "-c", "head -c 90000 /dev/zero; echo x >&2"]);
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let stdout = child.stdout.take();
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none(), "control: it waits for its reader");
    signal(&child, "TERM");
    let began = Instant::now();
    assert_eq!(finish(child).code, Some(0), "the command itself had ended");
    assert!(began.elapsed() < Duration::from_secs(20));
    drop(stdout);
}

#[test]
fn a_signal_that_the_caller_has_us_ignore_does_not_reach_the_command() {
    // As nohup does, and a shell for what it runs in the background.
    let script = "trap '' HUP; exec $WARREN run -- sh -c 'echo ready; sleep 1; echo lived'";
    let mut command = command("/bin/sh", &["-c", script]);
    let mut child = command.env("WARREN", env!("CARGO_BIN_EXE_warren")).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    signal(&child, "HUP");
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\nlived\n");
    assert_eq!(finish(child).code, Some(0));
}
