//! Where a secret must not be found (THREATS B16): keys, variables and what is typed, in logs, answers, dumps and the store.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;

use serde_json::Value;

use crate::support::{Daemon, PATIENCE, Place, outcome};

/// The files below a directory, or the one file, that hold some bytes.
fn holders(path: &Path, bytes: &[u8]) -> Vec<String> {
    if path.is_dir() {
        let entries = fs::read_dir(path).unwrap().flatten();
        return entries.flat_map(|entry| holders(&entry.path(), bytes)).collect();
    }
    let holds = fs::read(path).is_ok_and(|text| text.windows(bytes.len()).any(|at| at == bytes));
    holds.then(|| path.display().to_string()).into_iter().collect()
}

/// Says everything that there is to say.
const LOUD: &[(&str, &str)] = &[("WARREN_LOG_LEVEL", "trace")];

#[test]
fn b16_what_is_secret_is_in_no_log_answer_dump_or_record() {
    let place = Place::with_settings("linux", LOUD);
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let made = place.run(&["key", "create", "alice", "--json"]);
    let made: Value = serde_json::from_str(&made.stdout).unwrap();
    let key = made["key"].as_str().unwrap().to_owned();
    let daemon = Daemon::start_in(place, &["--listen", &address]);
    let mut answers = String::new();
    let mut ask = |request: &str, key: &str, body: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let length = body.len();
        write!(
            stream,
            "{request} HTTP/1.1\r\nHost: {address}\r\nX-Api-Key: {key}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        stream.read_to_string(&mut answers).unwrap();
    };
    let id = daemon.ok(&["create", "--env", "SPEC=s3cret-spec"]);
    let shown =
        daemon.ok(&["exec", &id, "--env", "EXEC=s3cret-exec", "--", "sh", "-c", "echo $EXEC"]);
    assert_eq!(shown, "s3cret-exec", "control: it arrives");
    let mut typed = daemon.place.warren(&["exec", "-i", &id, "--", "wc", "-c"]);
    let mut typed = typed.stdin(std::process::Stdio::piped()).spawn().unwrap();
    typed.stdin.take().unwrap().write_all(b"s3cret-typed").unwrap();
    assert_eq!(outcome(typed.wait_with_output().unwrap()).stdout.trim(), "12", "control");
    let failed = daemon.run(&["exec", &id, "--env", "FAIL=s3cret-fail", "--", "/not/there"]);
    assert_eq!(failed.code, Some(127), "control: {failed:?}");
    daemon.ok(&["exec", "-d", &id, "--env", "LATER=s3cret-later", "--", "sleep", "60"]);
    ask("GET /v1/sandboxes", "s3cret-key", "");
    ask("GET /v1/sandboxes?key=s3cret-query", &key, "");
    ask("POST /v1/sandboxes", &key, r#"{"environment":{"BAD":"s3cret-bad"},"surely_not":1}"#);
    ask("POST /v1/sandboxes", &key, r#"{"environment":{"B=D":"s3cret-name"}}"#);
    ask("POST /v1/sandboxes", &key, r#"{"environment":{"TYPE":["s3cret-type"]}}"#);
    assert_eq!(answers.matches("HTTP/1.1 4").count(), 5, "control: all are refused: {answers}");
    let (state, log) = (daemon.place.path("state"), daemon.place.path("log"));
    assert!(!holders(&log, id.as_bytes()).is_empty(), "control: the log tells of it");
    let said = format!("{answers}{}{failed:?}", daemon.run(&["audit", "show"]).stdout);
    for secret in ["exec", "typed", "fail", "later", "key", "query", "bad", "name", "type"] {
        let secret = format!("s3cret-{secret}");
        let found = [holders(&state, secret.as_bytes()), holders(&log, secret.as_bytes())];
        assert_eq!(found.concat(), [""; 0], "{secret}");
        assert!(!said.contains(&secret), "{secret}: {said}");
    }
    assert_eq!(holders(&state, key.as_bytes()), [""; 0], "of a key there is a hash");
    assert!(holders(&log, b"s3cret").is_empty() && !said.contains(&key), "{said}");
    // What every command of a sandbox is given has to outlive the daemon, for as long as the sandbox lives and no longer.
    let kept = holders(&state, b"s3cret-spec");
    assert!(!kept.is_empty(), "control: what is there is found");
    for file in &kept {
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o77, 0, "{file}");
    }
    let limits = fs::read_to_string(format!("/proc/{}/limits", daemon.pid())).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core")).unwrap();
    let most: Vec<_> = core.split_whitespace().skip(4).take(2).collect();
    assert!(most.iter().all(|most| ["0", "1"].contains(most)), "it leaves no dump: {core}");
    daemon.ok(&["kill", &id]);
    let (code, daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0));
    assert_eq!(holders(&state, b"s3cret"), [""; 0], "nothing of one that is gone");
    drop(daemon);
}
