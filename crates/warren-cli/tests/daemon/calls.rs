//! Calls of a daemon that may die at any moment, and the dice that choose them.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use crate::support::{PATIENCE, Place};

/// A small generator, so that a run can be repeated by its seed.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) % bound
    }
}

/// Sends a request, and does not wait for its answer.
pub(crate) fn send(
    place: &Place,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> Option<UnixStream> {
    let mut stream = UnixStream::connect(place.path("run/warren.sock")).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let body = body.map(Value::to_string).unwrap_or_default();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len(),
    );
    stream.write_all((head + &body).as_bytes()).ok()?;
    Some(stream)
}

/// Asks the daemon for something; nothing if it died before it had answered.
pub(crate) fn ask(
    place: &Place,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> Option<(u16, Value)> {
    let mut answer = String::new();
    send(place, method, path, body)?.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    if body.is_empty() {
        return Some((status, Value::Null));
    }
    // One that is cut short was not received.
    Some((status, serde_json::from_str(body).ok()?))
}

pub(crate) fn run(line: &str) -> Value {
    json!({ "program": "sh", "args": ["-c", line] })
}
