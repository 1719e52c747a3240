//! Bytes go through as they are, in pieces as they come.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::Stdio;

use crate::support::{Outcome, directory, finish, outcome, run, shell, warren};

fn gave(code: i32, stdout: &str, stderr: &str) -> Outcome {
    Outcome { code: Some(code), stdout: stdout.into(), stderr: stderr.into() }
}

#[test]
fn stdout_and_stderr_stay_apart() {
    assert_eq!(run(&["--", "sh", "-c", "echo a; echo b >&2"]), gave(0, "a\n", "b\n"));
}

#[test]
fn a_stream_can_be_opened_again_by_its_name() {
    let script = "cat /dev/stdin; echo a > /dev/stdout; echo b > /dev/stderr";
    assert_eq!(run(&["--", "sh", "-c", script]), gave(0, "a\n", "b\n"));
}

#[test]
fn every_byte_goes_through_a_pipe_both_ways() {
    let script =
        "head -c 3000000 /dev/urandom > $1/in && cat $1/in | $WARREN run -- cat | cmp - $1/in";
    let dir = directory();
    let seen = shell(&script.replace("$1", dir.path().to_str().unwrap()));
    assert_eq!(seen, gave(0, "", ""));
}

#[test]
fn every_byte_goes_through_files_both_ways() {
    let dir = directory();
    let data: Vec<u8> = (0..2_000_003_u32).map(|i| (i % 251).to_le_bytes()[0]).collect();
    std::fs::write(dir.path().join("in"), &data).unwrap();
    let mut command = warren(&["run", "--", "cat"]);
    command.stdin(File::open(dir.path().join("in")).unwrap());
    command.stdout(File::create(dir.path().join("out")).unwrap());
    assert_eq!(outcome(&mut command), gave(0, "", ""));
    assert!(std::fs::read(dir.path().join("out")).unwrap() == data);
}

#[test]
fn every_byte_goes_through_a_socket() {
    let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut command = warren(&["run", "--", "cat"]);
    command.stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)));
    let child = command.spawn().unwrap();
    drop(command);
    ours.write_all(b"through a socket").unwrap();
    ours.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(finish(child), gave(0, "through a socket", ""));
}

#[test]
fn output_comes_before_the_command_ends_and_input_reaches_it_meanwhile() {
    let mut command = warren(&["run", "--", "sh", "-c", "echo ready; read line; echo got $line"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"ready\n");
    // Not closed: one line is enough.
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"it\n").unwrap();
    assert_eq!(finish(child), gave(0, "got it\n", ""));
}

#[test]
fn the_end_of_input_is_the_commands_end_of_input() {
    assert_eq!(run(&["--", "wc", "-c"]), gave(0, "0\n", ""));
    assert_eq!(shell("printf abc | $WARREN run -- wc -c"), gave(0, "3\n", ""));
    assert_eq!(shell("$WARREN run -- wc -c <&-"), gave(0, "0\n", ""));
}

#[test]
fn a_command_need_not_read_its_input() {
    let mut child = warren(&["run", "--", "echo", "done"]).stdin(Stdio::piped()).spawn().unwrap();
    let open = child.stdin.take();
    assert_eq!(finish(child), gave(0, "done\n", ""), "it does not wait for the end of its input");
    drop(open);
    assert_eq!(shell("head -c 1000000 /dev/zero | $WARREN run -- true; echo $?").stdout, "0\n");
    let seen = shell("head -c 1000000 /dev/zero | $WARREN run -- sh -c 'exec <&-; echo fine'");
    assert_eq!(seen, gave(0, "fine\n", ""));
}

#[test]
fn a_reader_that_has_gone_ends_the_command_quietly_as_it_would_outside() {
    let seen = shell("$WARREN run -- yes | head -n 1; echo ${PIPESTATUS[0]}");
    assert_eq!(seen, gave(0, "y\n141\n", ""));
    // A command that does not die of it goes on, and has the last word.
    let seen = shell(
        "$WARREN run -- sh -c 'trap \"\" PIPE; sleep 0.2; echo x; sleep 0.2; echo y; exit 7' \
         2>/dev/null | true; echo ${PIPESTATUS[0]}",
    );
    assert_eq!(seen.stdout, "7\n");
}

#[test]
fn a_reader_that_waits_does_not_hold_up_the_other_stream() {
    let mut command = warren(&[
        "run",
        "--",
        "sh",
        "-c",
        "head -c 1000000 /dev/zero & sleep 0.3; echo now >&2; wait",
    ]);
    let mut child = command.spawn().unwrap();
    let mut said = [0; 4];
    // Nobody reads stdout yet.
    child.stderr.as_mut().unwrap().read_exact(&mut said).unwrap();
    assert_eq!(&said, b"now\n");
    let seen = finish(child);
    assert_eq!((seen.code, seen.stdout.len()), (Some(0), 1_000_000));
}

#[test]
fn the_callers_streams_are_not_left_non_blocking() {
    let flags = "while read k v; do [ $k = flags: ] && echo $v; done < /proc/self/fdinfo/0";
    let seen = shell(&format!("sleep 1 | {{ $WARREN run -- true; {flags}; }}"));
    let flags = u32::from_str_radix(seen.stdout.trim(), 8).unwrap();
    assert_eq!(flags & 0o4000, 0, "O_NONBLOCK is not set: {flags:o}");
}
