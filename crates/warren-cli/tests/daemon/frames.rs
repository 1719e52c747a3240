//! Frames that are none, as bytes on the wire (THREATS B7). Those of the other protocols are tried where they are read.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use serde_json::json;

use crate::calls;
use crate::support::{Daemon, PATIENCE, Place};

/// Speaks to a command as a client of a websocket does.
fn attach(place: &Place, sandbox: &str) -> UnixStream {
    let mut stream = UnixStream::connect(place.path("run/warren.sock")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let path = format!("/v1/sandboxes/{sandbox}/execs/cat/attach?write=true&steal=true");
    let head = format!(
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let answer = until(&mut stream, b"\r\n\r\n");
    assert!(answer.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&answer));
    stream
}

/// Reads until something was said, or to the end.
fn until(stream: &mut UnixStream, wanted: &[u8]) -> Vec<u8> {
    let (mut seen, mut byte) = (Vec::new(), [0]);
    while !seen.ends_with(wanted) {
        match stream.read(&mut byte) {
            Ok(0) => break,
            Ok(_) => seen.push(byte[0]),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&seen)),
        }
    }
    seen
}

/// A frame that is masked with nothing, which leaves what is in it readable.
fn frame(kind: u8, length: &[u8], contents: &[u8]) -> Vec<u8> {
    [&[kind][..], length, &[0; 4], contents].concat()
}

const BINARY: u8 = 0x82;
const PING: u8 = 0x89;

#[test]
fn b7_frames_that_are_none_close_their_connection_and_a_flood_of_empty_ones_harms_nobody() {
    let daemon = Daemon::start_in(Place::with_backend("linux"), &[]);
    let id = daemon.ok(&["create"]);
    let cat = json!({ "id": "cat", "command": { "program": "cat" }, "open_stdin": true });
    let path = format!("/v1/sandboxes/{id}/execs");
    assert_eq!(calls::ask(&daemon.place, "POST", &path, Some(&cat)).unwrap().0, 201);
    let echo = |stream: &mut UnixStream, word: &[u8]| {
        let length = 0x80 | u8::try_from(word.len()).unwrap();
        stream.write_all(&frame(BINARY, &[length], word)).unwrap();
        until(stream, word)
    };
    let mut good = attach(&daemon.place, &id);
    assert!(echo(&mut good, b"good\n").ends_with(b"good\n"), "control: one that is whole arrives");
    drop(good);
    let too_long = [&[0xff][..], &(1_u64 << 40).to_be_bytes()].concat();
    let past_all = [&[0xff][..], &u64::MAX.to_be_bytes()].concat();
    for (what, bytes) in [
        ("one of a tebibyte", frame(BINARY, &too_long, b"x")),
        ("one of a negative length", frame(BINARY, &past_all, b"x")),
        ("one of a kind that there is not", frame(0x83, &[0x80], b"")),
        ("one with bits that mean nothing", frame(0xf2, &[0x80], b"")),
        ("one that is not masked", vec![BINARY, 1, b'x']),
        ("a ping in pieces", frame(0x09, &[0x80], b"")),
        ("a long ping", frame(PING, &[0xfe, 1, 0], &[0; 256])),
        ("the rest of nothing", frame(0x80, &[0x80], b"")),
        ("text that is none", frame(0x81, &[0x81], b"\xff")),
    ] {
        let mut stream = attach(&daemon.place, &id);
        stream.write_all(&bytes).unwrap();
        // To its end: whoever goes on listening would have the read time out.
        until(&mut stream, b"there is no such word");
        drop(stream);
        let mut next = attach(&daemon.place, &id);
        assert!(echo(&mut next, b"next\n").ends_with(b"next\n"), "{what}");
    }
    let mut cut = attach(&daemon.place, &id);
    cut.write_all(&frame(BINARY, &[0x85], b"x")).unwrap();
    cut.shutdown(Shutdown::Write).unwrap();
    until(&mut cut, b"there is no such word");

    let mut flood = attach(&daemon.place, &id);
    // A tenth of a million, which a build that is not optimised reads in seconds; Connect's own test has all of it.
    flood.write_all(&frame(BINARY, &[0x80], b"").repeat(100_000)).unwrap();
    assert!(echo(&mut flood, b"last\n").ends_with(b"last\n"), "what follows them arrives");
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 128 << 10, "it had {peak} KiB");
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
    assert_eq!(daemon.ok(&["exec", &id, "--", "echo", "here"]), "here");
    daemon.ok(&["kill", &id]);
}
