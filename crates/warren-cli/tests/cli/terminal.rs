//! `--tty` joins two terminals.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::process::{Child, Stdio};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::support::{eventually, finish, outcome, signal, warren};

/// The caller's terminal, from outside and from inside.
struct Terminal {
    outer: File,
    inner: File,
    seen: String,
}

impl Terminal {
    fn new(rows: u16, columns: u16) -> Self {
        let outer = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&outer).expect("granted");
        unlockpt(&outer).expect("unlocked");
        let name = ptsname(&outer, Vec::new()).expect("its name").into_string().expect("text");
        let inner = OpenOptions::new().read(true).write(true).open(name).expect("its inner side");
        let mut terminal = Self { outer: outer.into(), inner, seen: String::new() };
        terminal.resize(rows, columns);
        terminal
    }

    fn resize(&mut self, ws_row: u16, ws_col: u16) {
        let size = Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.outer, size).expect("a size");
    }

    fn start(&self, args: &[&str]) -> Child {
        let side = || Stdio::from(self.inner.try_clone().expect("another descriptor"));
        let mut command = warren(&["run", "--tty"]);
        command.args(args).stdin(side()).stdout(side()).stderr(side()).spawn().expect("it starts")
    }

    /// Reads until something was shown.
    fn expect(&mut self, text: &str) {
        let mut buffer = [0; 1024];
        while !self.seen.contains(text) {
            let length = self.outer.read(&mut buffer).expect("output");
            assert!(length > 0, "no `{text}` in {:?}", self.seen);
            self.seen.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    }

    fn type_in(&mut self, text: &str) {
        self.outer.write_all(text.as_bytes()).expect("input");
    }

    fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.inner).expect("its modes").local_modes;
        !modes.contains(LocalModes::ICANON) && !modes.contains(LocalModes::ECHO)
    }
}

#[test]
fn the_command_has_a_terminal_and_keys_reach_it() {
    let mut terminal = Terminal::new(33, 111);
    let script =
        "test -t 0 && test -t 1 && test -t 2 && stty size; read line; echo got $line; exit 5";
    let child = terminal.start(&["--", "sh", "-c", script]);
    terminal.expect("33 111\r\n");
    terminal.type_in("keys\r");
    terminal.expect("got keys\r\n");
    assert_eq!(finish(child).code, Some(5));
}

#[test]
fn whoever_reads_along_is_told_how_to_learn_more_of_a_failure_of_which_nothing_was_told() {
    let hint = "hint: --explain tells what was refused\r\n";
    let refused =
        "python3 -c 'import ctypes; ctypes.CDLL(None).chroot(b\"/\"); raise SystemExit(3)'";
    for (args, script, hinted) in [
        (&[][..], "exit 3", true),
        (&[], "exit 0", false),
        (&["--quiet"], "exit 3", false),
        (&["--explain"], "exit 3", false),
        (&[], refused, false),
    ] {
        let mut terminal = Terminal::new(24, 80);
        let mut command = warren(&["run"]);
        command.args(args).args(["--", "sh", "-c", script]);
        let side = Stdio::from(terminal.inner.try_clone().expect("another descriptor"));
        let child = command.stdin(Stdio::null()).stderr(side).spawn().expect("it starts");
        finish(child);
        // So that there is an end to read to.
        let end = "that is all\r\n";
        terminal.inner.write_all(b"that is all\n").expect("output");
        terminal.expect(end);
        assert_eq!(terminal.seen.contains(hint), hinted, "{args:?} {script}: {}", terminal.seen);
        assert_eq!(terminal.seen.contains("denied: call chroot"), script == refused);
    }
}

#[test]
fn a_new_size_of_the_window_is_followed() {
    let mut terminal = Terminal::new(24, 80);
    let script = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done";
    let child = terminal.start(&["--timeout", "30s", "--", "sh", "-c", script]);
    terminal.expect("ready");
    terminal.resize(50, 132);
    // It is no controlling terminal here, so the kernel does not tell.
    signal(&child, "WINCH");
    terminal.expect("50 132");
    signal(&child, "TERM");
    assert_eq!(finish(child).code, Some(143));
}

#[test]
fn a_control_key_is_the_commands_to_interpret() {
    let mut terminal = Terminal::new(24, 80);
    let child =
        terminal.start(&["--", "sh", "-c", "trap 'echo caught; exit 4' INT; echo ready; sleep 30"]);
    terminal.expect("ready");
    terminal.type_in("\x03");
    terminal.expect("caught");
    assert_eq!(finish(child).code, Some(4));
}

#[test]
fn the_callers_terminal_is_given_back_as_it_was() {
    for (script, name) in
        [("echo ready; exec sleep 30", "TERM"), ("echo ready; trap '' TERM; sleep 30", "TERM")]
    {
        let mut terminal = Terminal::new(24, 80);
        assert!(!terminal.is_raw(), "control");
        let child = terminal.start(&["--", "sh", "-c", script]);
        terminal.expect("ready");
        eventually("the terminal is raw", || terminal.is_raw());
        signal(&child, name);
        std::thread::sleep(std::time::Duration::from_millis(100));
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(&child),
            rustix::process::Signal::TERM,
        );
        finish(child);
        assert!(!terminal.is_raw());
    }
}

#[test]
fn a_program_that_does_not_exist_leaves_the_terminal_alone() {
    let mut terminal = Terminal::new(24, 80);
    let child = terminal.start(&["--", "no-such-program"]);
    terminal.expect("hint: ");
    assert_eq!(finish(child).code, Some(127));
    assert!(!terminal.is_raw());
}

#[test]
fn without_tty_nothing_of_the_callers_terminal_is_inside() {
    let terminal = Terminal::new(24, 80);
    let script = "for fd in 0 1 2; do test -t $fd && echo terminal; done; \
                  (: < /dev/tty) 2>/dev/null && echo tty; readlink /proc/self/fd/0 | cut -d: -f1";
    let mut command = warren(&["run", "--", "sh", "-c", script]);
    let seen = outcome(command.stdin(terminal.inner.try_clone().unwrap()));
    assert_eq!(seen.stdout, "pipe\n");
}
