//! The daemon: where it listens, whom it lets in, how it ends.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::Value;

use crate::support::{Daemon, PATIENCE, Place};

/// Sends raw bytes to the socket and reads until it is closed.
fn raw(daemon: &Daemon, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(daemon.place.path("run/warren.sock")).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    // It may be refused before all of it is sent.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn the_socket_is_its_owners_and_goes_with_the_daemon() {
    let daemon = Daemon::start();
    let socket = daemon.place.path("run/warren.sock");
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let second = daemon.place.run(&["serve", "--state-dir", "/nonexistent-root/x"]);
    assert_eq!(second.code, Some(125), "{second:?}");
    let other = daemon.place.path("other-state");
    let second = daemon.place.run(&["serve", "--state-dir", other.to_str().unwrap()]);
    assert_eq!(second.code, Some(125));
    assert!(second.stderr.contains("a daemon listens on"), "{second:?}");
    let other = daemon.place.path("other.sock");
    let second = daemon.place.run(&["serve", "--socket", other.to_str().unwrap()]);
    assert!(second.stderr.contains("another daemon uses"), "{second:?}");
    let (code, daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0), "{}", daemon.log());
    assert!(!socket.exists());
}

#[test]
fn the_lock_of_a_killed_daemon_may_outlive_it_for_a_moment() {
    let place = Daemon::start().kill().into_place();
    let lock = std::fs::File::open(place.path("state/daemon.lock")).unwrap();
    lock.lock_shared().unwrap();
    let refused = place.run(&["serve"]);
    assert!(refused.stderr.contains("another daemon uses"), "control: it is locked: {refused:?}");
    // As a child has it that was being started, and has not executed its program yet.
    let child = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(lock);
    });
    let (code, daemon) = Daemon::start_in(place, &[]).end("TERM");
    assert_eq!(code, Some(0), "{}", daemon.log());
    child.join().unwrap();
}

#[test]
fn a_stale_socket_is_replaced_and_a_link_or_a_file_is_not() {
    let (code, daemon) = Daemon::start().end("KILL");
    assert_eq!(code, None);
    assert!(daemon.place.path("run/warren.sock").exists(), "it is left behind");
    let (_, daemon) = Daemon::start_in(daemon.into_place(), &[]).end("INT");
    let socket = daemon.place.path("run/warren.sock");
    std::os::unix::fs::symlink(daemon.place.path("victim"), &socket).unwrap();
    let refused = daemon.place.run(&["serve"]);
    assert_eq!(refused.code, Some(125));
    assert!(refused.stderr.contains("is no socket\nhint: "), "{refused:?}");
    assert!(!daemon.place.path("victim").exists());
}

#[test]
fn tcp_needs_a_key_at_start_and_at_each_request() {
    let place = Place::new();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let refused = place.run(&["serve", "--listen", &address]);
    assert_eq!(refused.code, Some(125));
    assert!(refused.stderr.contains("without a key\nhint: make one first"), "{refused:?}");

    let made = place.run(&["key", "create", "alice", "--max-sandboxes", "1", "--json"]);
    let key: Value = serde_json::from_str(&made.stdout).unwrap();
    let (id, secret) = (key["id"].as_str().unwrap(), key["key"].as_str().unwrap());
    assert!(!place.run(&["key", "ls"]).stdout.contains(secret));
    assert!(place.run(&["key", "ls"]).stdout.contains("alice"));
    let daemon = Daemon::start_in(place, &["--listen", &address]);
    let ask = |method: &str, path: &str, key: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n\
             Content-Length: 0\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(ask("GET", "/v1/health", "").starts_with("HTTP/1.1 200"));
    assert!(ask("GET", "/v1/sandboxes", "wrn_nope").starts_with("HTTP/1.1 401"));
    assert!(ask("POST", "/v1/sandboxes", secret).starts_with("HTTP/1.1 201"));
    assert!(ask("POST", "/v1/sandboxes", secret).starts_with("HTTP/1.1 429"));
    assert_eq!(daemon.ok(&["ls", "-q"]).lines().count(), 1, "the operator sees it");
    daemon.ok(&["key", "revoke", id]);
    assert!(ask("GET", "/v1/sandboxes", secret).starts_with("HTTP/1.1 401"), "at once");
    assert!(!daemon.log().contains(secret), "no secret in the log");
    let (code, _daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0));
}

#[test]
fn a_request_that_is_none_harms_nobody() {
    let daemon = Daemon::start();
    let big = format!("GET /v1/health HTTP/1.1\r\nHost: x\r\nA: {}\r\n\r\n", "a".repeat(1 << 20));
    let many: String = (0..1_000).map(|i| format!("H{i}: x\r\n")).collect();
    let many = format!("GET /v1/health HTTP/1.1\r\nHost: x\r\n{many}\r\n");
    for (request, status) in [
        (b"nonsense\r\n\r\n".to_vec(), "HTTP/1.1 400"),
        (big.into_bytes(), "HTTP/1.1 431"),
        (many.into_bytes(), "HTTP/1.1 431"),
        (
            b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
              Content-Length: 5\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n"
                .to_vec(),
            "HTTP/1.1",
        ),
        (b"GET /v1/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".to_vec(), "HTTP/1.1 200"),
    ] {
        let answer = raw(&daemon, &request);
        let head = String::from_utf8_lossy(&request[..request.len().min(40)]).into_owned();
        // A connection that is reset while we still write has no answer to read.
        assert!(answer.is_empty() || answer.starts_with(status), "{head}: {answer}");
    }
    daemon.ok(&["ls"]);
}

#[test]
fn settings_are_shown_with_their_origin_and_a_mistake_with_its_line() {
    let place = Place::new();
    let file = place.path("warren.toml");
    std::fs::write(&file, "max_sandboxes = 7\n[pool]\nmin_warm = 1\n").unwrap();
    let file = file.to_str().unwrap();
    let seen = place.run(&["config", "--config", file, "--group", "root"]);
    assert_eq!(seen.code, Some(0), "{seen:?}");
    let line = |name: &str| {
        let line = seen.stdout.lines().find(|line| line.split_whitespace().next() == Some(name));
        line.unwrap_or_default().split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("max_sandboxes"), format!("7 {file}:1"));
    assert_eq!(line("pool.min_warm"), format!("1 {file}:3"));
    assert_eq!(line("group"), "root --group");
    assert_eq!(line("backends"), "fake $WARREN_BACKENDS");
    assert_eq!(line("pool.max_warm"), "10 default");
    for line in place.run(&["config", "--json"]).stdout.lines() {
        let setting: Value = serde_json::from_str(line).unwrap();
        assert!(setting["name"].is_string() && setting["origin"].is_string(), "{line}");
    }
    std::fs::write(file, "max_sandboxes = 7\n\nmax_sandboxen = 8\n").unwrap();
    let seen = place.run(&["serve", "--config", file]);
    assert_eq!(seen.code, Some(2));
    assert!(seen.stderr.starts_with(&format!("error: {file}:3: there is no setting")), "{seen:?}");
}

#[test]
fn logs_can_be_json() {
    let daemon = Daemon::start_in(Place::new(), &["--log-format", "json"]);
    daemon.ok(&["ls"]);
    let (_, daemon) = daemon.end("TERM");
    let log = daemon.log();
    assert!(log.lines().count() >= 3, "{log}");
    for line in log.lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        assert!(event["level"].is_string() && event["fields"]["message"].is_string(), "{line}");
    }
}
