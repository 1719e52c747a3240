//! Shells that keep their state, through a daemon with real sandboxes.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Daemon, Outcome, PATIENCE, Place, outcome};

/// Asks the daemon for something; returns the status and the answer.
fn ask(place: &Place, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
    let mut stream = UnixStream::connect(place.path("run/warren.sock")).expect("a daemon");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let body = body.map(|body| body.to_string()).unwrap_or_default();
    let head = format!(
        "{method} /v1/sandboxes/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).expect("it listens");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    (status, serde_json::from_str(body).unwrap_or(Value::Null))
}

/// Asks for a stream of events and reads it to its end; returns each with its name.
fn stream(place: &Place, path: &str, body: &Value) -> (u16, Vec<(String, Value)>) {
    let mut stream = UnixStream::connect(place.path("run/warren.sock")).expect("a daemon");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let body = body.to_string();
    // By an older version of HTTP, whose answers come in one piece.
    let head = format!(
        "POST /v1/sandboxes/{path} HTTP/1.0\r\nHost: localhost\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).expect("it listens");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    let events = body.split("\n\n").filter_map(|event| {
        let field = |name| event.lines().find_map(|line| line.strip_prefix(name));
        Some((field("event: ")?.to_owned(), serde_json::from_str(field("data: ")?).ok()?))
    });
    (status, events.collect())
}

fn seen(outcome: &Outcome) -> (Option<i32>, &str, &str) {
    (outcome.code, &outcome.stdout, &outcome.stderr)
}

#[test]
fn a_shell_keeps_its_state_between_commands_and_daemons() {
    let daemon = Daemon::start_in(Place::with_backend("linux"), &[]);
    let id = daemon.ok(&["create", "--name", "box"]);
    let run = |daemon: &Daemon, command: &str| daemon.run(&["sh", "box", "--", command]);
    assert_eq!(seen(&run(&daemon, "cd /tmp; x='a b'; f() { echo \"f $x\"; }")), (Some(0), "", ""));
    assert_eq!(
        seen(&run(&daemon, "pwd; f; echo err >&2; (exit 3)")),
        (Some(3), "/tmp\nf a b\n", "err\n")
    );
    let other = daemon.run(&["sh", "box", "--session", "two", "--", "echo", "[$x]", "$?"]);
    assert_eq!(seen(&other), (Some(0), "[] 0\n", ""));
    // How a command ended is more than its number.
    let killed = run(&daemon, "sh -c 'kill -9 $$'");
    assert_eq!((killed.code, killed.stderr.contains("ended by signal 9")), (Some(137), true));
    let exited = run(&daemon, "sh -c 'exit 137'");
    assert_eq!(seen(&exited), (Some(137), "", ""));
    let grown = run(&daemon, "python3 -c 'x = b\"x\" * (1 << 30)'");
    assert_eq!((grown.code, grown.stderr.contains("ended: out of memory")), (Some(137), true));
    let late = daemon.run(&["sh", "box", "--timeout", "300ms", "--", "while :; do :; done"]);
    assert_eq!(seen(&late), (Some(124), "", "\nwarren: ended: timed out\n"));
    assert_eq!(run(&daemon, "echo 'open").code, Some(2));

    // A signal to the client is one to the command.
    let mut client = daemon.place.warren(&["sh", "box", "--", "touch on; sleep 60; echo no"]);
    let child = client.stdout(Stdio::piped()).spawn().unwrap();
    let began = Instant::now();
    while daemon.run(&["exec", "box", "--", "test", "-e", "/tmp/on"]).code != Some(0) {
        assert!(began.elapsed() < PATIENCE, "it does not begin");
    }
    std::thread::sleep(Duration::from_millis(100));
    let busy = ask(
        &daemon.place,
        "POST",
        &format!("{id}/shells/main/run"),
        Some(json!({"command": "true"})),
    );
    assert_eq!((busy.0, &busy.1["error"]["code"]), (409, &"conflict".into()));
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert_eq!(seen(&outcome(child.wait_with_output().unwrap())), (Some(130), "", "\n"));
    assert_eq!(run(&daemon, "f").stdout, "f a b\n");

    // A daemon that is killed takes no shell with it.
    let (_, daemon) = daemon.end("KILL");
    let daemon = Daemon::start_in(daemon.into_place(), &[]);
    assert_eq!(seen(&run(&daemon, "pwd; f; x=2")), (Some(0), "/tmp\nf a b\n", ""));
    let gone = run(&daemon, "kill -9 $$");
    assert_eq!(seen(&gone), (Some(137), "", "warren: the shell `main` is gone with its state\n"));
    assert_eq!(run(&daemon, "echo \"<$x>\"").stdout, "<>\n", "the next is a new one");
    assert_eq!(run(&daemon, "exit 7").code, Some(7));
    let mut reads = daemon.place.warren(&["sh", "box", "--stdin", "--", "cat; echo more"]);
    let mut reads = reads.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    reads.stdin.take().unwrap().write_all(b"some\n").unwrap();
    assert_eq!(outcome(reads.wait_with_output().unwrap()).stdout, "some\nmore\n");
    // It is shown as it comes, not at the end.
    let mut shown = daemon.place.warren(&["sh", "box", "--", "echo now; sleep 60"]);
    let mut shown = shown.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = [0; 4];
    shown.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    assert_eq!(&line, b"now\n");
    Command::new("kill").args(["-INT", &shown.id().to_string()]).status().unwrap();
    assert_eq!(shown.wait().unwrap().code(), Some(130));
    let bad = daemon.run(&["sh", "box", "--session", "a/b", "--", "true"]);
    assert_eq!(bad.code, Some(2), "{bad:?}");
    daemon.ok(&["kill", "box"]);
}

#[test]
fn shells_are_run_listed_interrupted_and_removed_over_rest() {
    let daemon = Daemon::start_in(Place::with_backend("linux"), &[]);
    let id = daemon.ok(&["create"]);
    let place = &daemon.place;
    let run = |name: &str, body: Value| {
        ask(place, "POST", &format!("{id}/shells/{name}/run"), Some(body))
    };
    assert_eq!(ask(place, "GET", &format!("{id}/shells"), None).1["items"], json!([]));
    let (status, ran) = run(
        "a",
        json!({"command": "x=$Y; pwd; printf '\\xff' >&2", "workdir": "/tmp", "env": {"Y": "1"}}),
    );
    assert_eq!(
        (status, &ran["exit_code"], &ran["stdout"]),
        (200, &0.into(), &"/tmp\n".into()),
        "{ran}"
    );
    assert_eq!((&ran["stderr_base64"], &ran["shell_is_new"]), (&"/w==".into(), &true.into()));
    assert_eq!((&ran["exec_id"], &ran["usage"]["output_bytes"]), (&"shell-a".into(), &6.into()));
    let (_, ran) = run("a", json!({"command": "echo $x; exit 4"}));
    assert_eq!((&ran["stdout"], &ran["shell_is_new"]), (&"1\n".into(), &false.into()));
    assert_eq!((&ran["exit_code"], &ran["shell_ended"]), (&4.into(), &true.into()));
    let (_, shown) = ask(place, "GET", &format!("{id}/shells/a"), None);
    assert_eq!((&shown["ended"], &shown["cause"]["code"]), (&true.into(), &4.into()));
    let (_, ran) = run("a", json!({"command": "yes", "max_output_bytes": 10}));
    assert_eq!((&ran["cause"]["kind"], &ran["truncated"]), (&"output_limit".into(), &true.into()));
    assert_eq!(ran["stdout"], "y\ny\ny\ny\ny\n");

    let interrupt = || ask(place, "POST", &format!("{id}/shells/a/interrupt"), None);
    assert_eq!(interrupt(), (200, json!({"interrupted": false, "shell_ended": false})));
    let (ran, interrupted) = std::thread::scope(|scope| {
        let ran = scope.spawn(|| run("a", json!({"command": "x=5; while :; do :; done"})));
        std::thread::sleep(Duration::from_millis(700));
        let interrupted = interrupt();
        (ran.join().unwrap().1, interrupted)
    });
    assert_eq!(interrupted, (200, json!({"interrupted": true, "shell_ended": false})));
    assert_eq!(ran["cause"], json!({"kind": "signalled", "signal": 2}));
    assert_eq!(run("a", json!({"command": "echo $x"})).1["stdout"], "5\n");
    // As it comes, and what it reads.
    let bodies = json!({"command": "cat; printf '\\xff' >&2; (exit 3)", "stdin": "given"});
    let (status, told) = stream(place, &format!("{id}/shells/a/stream"), &bodies);
    assert_eq!(status, 200);
    let kinds: Vec<_> = told.iter().map(|(kind, _)| kind.as_str()).collect();
    assert_eq!((kinds[0], *kinds.last().unwrap()), ("stdout", "end"), "{told:?}");
    assert_eq!(told[0].1["text"], "given");
    assert!(told.iter().any(|(kind, piece)| kind == "stderr" && piece["base64"] == "/w=="));
    let end = &told.last().unwrap().1;
    assert_eq!(
        (&end["exit_code"], &end["stdout"], &end["shell_ended"]),
        (&3.into(), &"".into(), &false.into())
    );
    assert!(end["usage"]["bytes_read"].as_u64().unwrap() >= 5, "{end}");
    assert!(end["usage"]["peak_memory_bytes"].as_u64().unwrap() > 0, "{end}");
    let (_, ran) = run("a", json!({"command": "cat", "stdin_base64": "/w=="}));
    assert_eq!(ran["stdout_base64"], "/w==");
    let killed = run("a", json!({"command": "sh -c 'kill -9 $$'"})).1;
    assert_eq!(killed["cause"], json!({"kind": "signalled", "signal": 9}));
    let busy = std::thread::scope(|scope| {
        let long = scope.spawn(|| run("a", json!({"command": "sleep 60"})));
        std::thread::sleep(Duration::from_millis(300));
        let busy = stream(place, &format!("{id}/shells/a/stream"), &json!({"command": "true"})).0;
        interrupt();
        long.join().unwrap();
        busy
    });
    assert_eq!(busy, 409, "a refusal has its own status");
    daemon.ok(&["suspend", &id]);
    let (status, answer) = run("a", json!({"command": "true"}));
    assert_eq!((status, &answer["error"]["code"]), (409, &"suspended".into()));
    daemon.ok(&["resume", &id]);
    assert_eq!(run("a", json!({"command": "echo $x"})).1["stdout"], "5\n");

    for (name, body, status, code) in [
        ("a", json!({"command": "a\0b"}), 400, "invalid_spec"),
        ("a", json!({"command": "true", "timeout_ms": 0}), 400, "invalid_spec"),
        ("a", json!({"command": "cat", "stdin_base64": "!"}), 400, "invalid_spec"),
        ("a", json!({"command": "cat", "stdin": "", "stdin_base64": ""}), 400, "invalid_spec"),
        ("a", json!({"command": "true", "colour": "red"}), 400, "invalid_body"),
        ("a", json!({}), 400, "invalid_body"),
        ("a!", json!({"command": "true"}), 400, "invalid_spec"),
        ("b", json!({"command": "true", "workdir": "/nowhere"}), 422, "program_not_executable"),
    ] {
        let (got, answer) = run(name, body.clone());
        assert_eq!((got, &answer["error"]["code"]), (status, &code.into()), "{body} {answer}");
    }
    assert_eq!(ask(place, "GET", &format!("{id}/shells/none"), None).0, 404);
    assert_eq!(ask(place, "POST", &format!("{id}/shells/none/interrupt"), None).0, 404);
    assert_eq!(ask(place, "GET", "sbx-none/shells", None).0, 404);
    let (_, listed) = ask(place, "GET", &format!("{id}/shells"), None);
    assert_eq!(listed["items"].as_array().unwrap().len(), 1, "{listed}");
    assert_eq!(ask(place, "DELETE", &format!("{id}/shells/a"), None).0, 204);
    assert_eq!(ask(place, "DELETE", &format!("{id}/shells/a"), None).0, 404);
    assert_eq!(ask(place, "GET", &format!("{id}/shells"), None).1["items"], json!([]));
    daemon.ok(&["kill", &id]);
}

#[test]
fn a_shell_that_waits_does_not_keep_its_session_from_being_idle() {
    let place = Place::with_backend("linux");
    let config = place.path("config.toml");
    std::fs::write(&config, "cleanup_interval = \"200ms\"\n[timeouts]\nidle = \"1s\"\n").unwrap();
    let daemon = Daemon::start_in(place, &["--config", config.to_str().unwrap()]);
    daemon.ok(&["create", "--name", "box"]);
    let active = || daemon.ok(&["ls", "-q", "-f", "state=active"]);
    let worked = daemon.run(&["sh", "box", "--", "sleep 2.5; echo done"]);
    assert_eq!(seen(&worked), (Some(0), "done\n", ""), "control: a command in it does");
    assert_ne!(active(), "");
    let began = Instant::now();
    while !active().is_empty() {
        assert!(began.elapsed() < PATIENCE, "it is held: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(100));
    }
    daemon.run(&["kill", "box"]);
}
