//! Commands in the daemon's sandboxes, with logs that outlive the daemon (E3 to E5, S8).

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::io::{Read as _, Write as _};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Daemon, PATIENCE, Place, outcome};

fn linux() -> Daemon {
    Daemon::start_in(Place::with_backend("linux"), &[])
}

/// Ends the sandbox with the daemon, so that nothing is left on the host.
fn finish(daemon: Daemon) {
    daemon.ok(&["kill", "box"]);
}

#[track_caller]
fn soon(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn e4_a_client_ends_with_every_byte_although_the_daemon_was_killed_in_the_middle_of_the_stream() {
    let mut daemon = linux();
    daemon.ok(&["create", "--name", "box", "--max-output", "100M"]);
    // It does not end before it may, however long a daemon takes to start.
    let script = "i=0; while [ $i -lt 4000 ]; do i=$((i+1)); echo \"line $i\"; echo \"side $i\" >&2; \
                  [ $((i % 8)) = 0 ] && sleep 0.005; \
                  [ $i = 3500 ] && until [ -e /tmp/go ]; do sleep 0.02; done; done; exit 7";
    let out = std::fs::File::create(daemon.place.path("out")).unwrap();
    let err = std::fs::File::create(daemon.place.path("err")).unwrap();
    let mut client = daemon.place.warren(&["exec", "box", "--", "sh", "-c", script]);
    let mut client = client.stdout(out).stderr(err).spawn().unwrap();
    let size = |place: &Place| std::fs::metadata(place.path("out")).map_or(0, |meta| meta.len());
    for round in 1..=4_u64 {
        let place = daemon.place.clone();
        soon("it writes", || size(&place) > round * 6_000);
        daemon = Daemon::start_in(daemon.end("KILL").1.into_place(), &[]);
        let said = || std::fs::read_to_string(daemon.place.path("err")).unwrap();
        let said = || said().lines().rev().take(5).collect::<Vec<_>>().join("; ");
        assert_eq!(client.try_wait().unwrap(), None, "it waits for the daemon: {}", said());
    }
    daemon.ok(&["exec", "box", "--", "touch", "/tmp/go"]);
    let status = client.wait().unwrap();
    let read = |name| std::fs::read_to_string(daemon.place.path(name)).unwrap();
    let lines = |word: &str| (1..=4000).map(|i| format!("{word} {i}\n")).collect::<String>();
    assert_eq!(status.code(), Some(7), "{}", read("err"));
    assert!(read("out") == lines("line"), "stdout is whole and in order");
    assert!(read("err") == lines("side"), "stderr is: {}", &read("err")[..200]);
    finish(daemon);
}

#[test]
fn e4_a_gibibyte_arrives_whole_and_in_order_while_another_reader_is_stopped() {
    const SIZE: u64 = 1 << 30;
    let daemon = linux();
    daemon.ok(&["create", "--name", "box", "--max-output", "2G"]);
    let script = format!("yes 0123456789abcde | head -c {SIZE}");
    let start = ["exec", "-d", "--id", "much", "box", "--", "sh", "-c", &script];
    daemon.ok(&start);
    let mut stopped = daemon.place.warren(&["logs", "-f", "box", "much"]).spawn().unwrap();
    let mut first = [0; 64];
    stopped.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    let mut reader = daemon.place.warren(&["logs", "-f", "box", "much"]).spawn().unwrap();
    let mut from = reader.stdout.take().unwrap();
    let (mut buffer, mut total) = (vec![0; 1 << 20], 0_u64);
    let line = b"0123456789abcde\n";
    let expected: Vec<u8> = line.iter().copied().cycle().take((1 << 20) + line.len()).collect();
    loop {
        let length = from.read(&mut buffer).unwrap();
        if length == 0 {
            break;
        }
        let at = usize::try_from(total % line.len() as u64).unwrap();
        assert!(buffer[..length] == expected[at..at + length], "at {total}");
        total += length as u64;
    }
    let seen = outcome(reader.wait_with_output().unwrap());
    assert_eq!((total, seen.code), (SIZE, Some(0)), "{seen:?}");
    assert!(stopped.try_wait().unwrap().is_none(), "control: the other one is still there");
    stopped.kill().unwrap();
    stopped.wait().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap().trim();
    let peak: u64 = peak.trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 128 << 10, "the daemon took {peak} kB");
    assert_eq!(daemon.run(&["wait", "box", "much"]).code, Some(0));
    finish(daemon);
}

#[test]
fn e5_a_command_is_started_once_listed_read_from_an_offset_waited_for_and_signalled() {
    let daemon = linux();
    daemon.ok(&["create", "--name", "box"]);
    let script = "echo first; echo second; exec sleep 1000";
    let start = ["exec", "-d", "--id", "job", "box", "--", "sh", "-c", script];
    assert_eq!(daemon.ok(&start), "job");
    assert_eq!(daemon.ok(&start), "job", "the same name, the same run");
    let other = daemon.run(&["exec", "-d", "--id", "job", "box", "--", "true"]);
    assert_eq!(other.code, Some(125), "{other:?}");
    assert!(other.stderr.contains("already"), "{other:?}");

    soon("it writes", || daemon.ok(&["logs", "box", "job"]).contains("second"));
    assert_eq!(daemon.ok(&["logs", "box", "job"]), "first\nsecond");
    assert_eq!(daemon.ok(&["logs", "--since-offset", "6", "box", "job"]), "second");
    let listed = daemon.ok(&["ps", "box"]);
    assert!(listed.contains("job") && listed.contains("running"), "{listed}");
    let shown: Value = serde_json::from_str(&daemon.ok(&["ps", "--json", "box"])).unwrap();
    let pid = shown["pid"].as_i64().unwrap().to_string();
    assert_eq!(daemon.ok(&["logs", "box", &pid]), "first\nsecond", "it is found by its pid too");
    let waited = daemon.run(&["wait", "--timeout", "100ms", "box", "job"]);
    assert_eq!(waited.code, Some(124), "{waited:?}");
    daemon.ok(&["signal", "-s", "USR1", "box", "jo"]);
    let waited = daemon.run(&["wait", "box", "job"]);
    assert_eq!((waited.code, waited.stderr.as_str()), (Some(128 + 10), ""));
    assert_eq!(daemon.ok(&["ps", "box"]).lines().count(), 1, "only its head");
    assert!(daemon.ok(&["ps", "-a", "box"]).contains("ended by signal 10"));

    let tree = "sleep 1000 & sleep 1000";
    daemon.ok(&["exec", "-d", "--id", "tree", "box", "--", "sh", "-c", tree]);
    daemon.ok(&["signal", "--kill", "box", "tree"]);
    let waited = daemon.run(&["wait", "--json", "box", "tree"]);
    let shown: Value = serde_json::from_str(&waited.stdout).unwrap();
    assert_eq!(shown["end"]["cause"]["kind"], "killed_by_policy", "{waited:?}");
    assert_eq!(daemon.run(&["exec", "box", "--", "pgrep", "-x", "sleep"]).stdout, "");
    let missing = daemon.run(&["logs", "box", "nope"]);
    assert_eq!(missing.code, Some(125));
    assert!(missing.stderr.contains("warren ps -a box"), "{missing:?}");
    finish(daemon);
}

#[test]
fn input_streams_to_a_command_and_its_exit_code_comes_back() {
    let daemon = linux();
    daemon.ok(&["create", "--name", "box"]);
    let script = "wc -c; echo oops >&2; exit 9";
    let mut command = daemon.place.warren(&["exec", "-i", "box", "--", "sh", "-c", script]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&vec![b'x'; 5_000_000]).unwrap());
    let seen = outcome(child.wait_with_output().unwrap());
    writer.join().unwrap();
    assert_eq!(
        (seen.code, seen.stdout.trim(), seen.stderr.as_str()),
        (Some(9), "5000000", "oops\n")
    );
    let limited = daemon.run(&["exec", "--timeout", "300ms", "box", "--", "sleep", "60"]);
    assert_eq!(limited.code, Some(124), "{limited:?}");
    assert!(limited.stderr.contains("timed out"), "{limited:?}");
    assert_eq!(daemon.ok(&["ps", "-a", "box"]).lines().count(), 1, "nothing unnamed is kept");
    finish(daemon);
}

/// Runs `warren` on a terminal and types, each piece once the screen shows what it waits for.
fn on_a_terminal(place: &Place, args: &str, typed: &[(&str, &[u8])]) -> (Option<i32>, String) {
    let program = env!("CARGO_BIN_EXE_warren");
    let mut command = place.warren(&[]);
    let environment: Vec<_> = command
        .get_envs()
        .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())))
        .collect();
    command = std::process::Command::new("script");
    command
        .args(["-qec", &format!("{program} {args}"), "/dev/null"])
        .env_clear()
        .envs(environment)
        .env("SHELL", "/bin/sh")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let (send, screen) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = stdout.read(&mut buffer) {
            let _ = send.send(buffer[..length].to_vec());
        }
    });
    let mut seen = String::new();
    for (awaited, keys) in typed {
        while !seen.contains(awaited) {
            let more = screen.recv_timeout(PATIENCE);
            let more = more.unwrap_or_else(|_| panic!("no {awaited:?} in {seen:?}"));
            seen.push_str(&String::from_utf8_lossy(&more));
        }
        stdin.write_all(keys).unwrap();
    }
    let status = child.wait().unwrap();
    drop(stdin);
    seen.extend(screen.iter().map(|more| String::from_utf8_lossy(&more).into_owned()));
    (status.code(), seen)
}

#[test]
fn a_terminal_is_left_by_its_keys_and_joined_again_with_what_it_showed() {
    let mut daemon = linux();
    daemon.ok(&["create", "--name", "box"]);
    let steps: &[(&str, &[u8])] =
        &[("$", b"echo $((6*7)); stty size\n"), ("42\r\n", b"x=kept\n\x10\x11")];
    let (code, screen) = on_a_terminal(&daemon.place, "shell --id term box", steps);
    assert_eq!(code, Some(0), "{screen:?}");
    assert!(screen.contains("it runs on as term"), "{screen:?}");
    // Its shell outlives the daemon as well.
    daemon = Daemon::start_in(daemon.end("KILL").1.into_place(), &[]);
    assert!(daemon.ok(&["ps", "box"]).contains("term"));
    let steps: &[(&str, &[u8])] = &[("42\r\n", b"echo \"<$x>\"\n"), ("<kept>", b"exit 5\n")];
    let (code, screen) = on_a_terminal(&daemon.place, "attach box term", steps);
    assert_eq!(code, Some(5), "{screen:?}");
    let whole = daemon.ok(&["logs", "box", "term"]);
    assert!(whole.contains("42") && whole.contains("<kept>"), "{whole:?}");
    finish(daemon);
}

#[test]
fn a_backend_without_logs_still_runs_commands_and_says_what_it_cannot() {
    let daemon = Daemon::start();
    daemon.ok(&["create", "--name", "box"]);
    assert_eq!(daemon.ok(&["exec", "box", "--", "echo", "hi"]), "hi");
    let refused = daemon.run(&["exec", "-d", "box", "--", "echo", "hi"]);
    assert_eq!(refused.code, Some(125), "{refused:?}");
    assert!(refused.stderr.contains("does not support execs with a log"), "{refused:?}");
    assert_eq!(daemon.ok(&["ps", "box"]).lines().count(), 1);
}

mod writers {
    use futures_util::{SinkExt as _, StreamExt as _};
    use tokio_tungstenite::WebSocketStream;
    use tokio_tungstenite::tungstenite::{Error, Message};

    use super::*;

    type Socket = WebSocketStream<tokio::net::UnixStream>;

    async fn attach(place: &Place, path: &str) -> Result<Socket, Error> {
        let stream = tokio::net::UnixStream::connect(place.path("run/warren.sock")).await.unwrap();
        let url = format!("ws://localhost{path}");
        tokio_tungstenite::client_async(url, stream).await.map(|(socket, _)| socket)
    }

    /// Reads until the log holds `wanted`, or something is said beside it.
    async fn until(socket: &mut Socket, wanted: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(wanted) {
            let message = tokio::time::timeout(PATIENCE, socket.next()).await.expect("in time");
            match message {
                Some(Ok(Message::Binary(bytes))) => {
                    seen.push_str(&String::from_utf8_lossy(&bytes[9..]));
                }
                Some(Ok(Message::Text(text))) => seen.push_str(&text),
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return seen,
            }
        }
        seen
    }

    #[tokio::test]
    async fn many_watch_a_terminal_and_one_writes_to_it() {
        let daemon = linux();
        let id = daemon.ok(&["create", "--name", "box"]);
        let path = format!("/v1/sandboxes/{id}/execs");
        let place = &daemon.place;
        // A terminal that nobody is at yet.
        let body = r#"{"id":"term","command":{"program":"cat"},"open_stdin":true,
                       "terminal":{"rows":24,"columns":80},"overflow":"forget"}"#;
        let made = super::post(place, &path, body);
        assert!(made.contains(" 201 "), "{made}");
        let term = format!("{path}/term/attach");
        let mut writer = attach(place, &format!("{term}?write=true")).await.unwrap();
        let mut watcher = attach(place, &term).await.unwrap();
        writer.send(Message::Binary(b"one\n".to_vec().into())).await.unwrap();
        for socket in [&mut writer, &mut watcher] {
            let seen = until(socket, "one\r\none\r\n").await;
            assert!(seen.contains("one\r\none\r\n"), "{seen:?}");
        }
        watcher.send(Message::Binary(b"never\n".to_vec().into())).await.unwrap();
        assert!(until(&mut watcher, "refused").await.contains("you watch"));
        match attach(place, &format!("{term}?write=true")).await {
            Err(Error::Http(response)) => assert_eq!(response.status().as_u16(), 409),
            other => panic!("two may write: {other:?}"),
        }
        let mut thief = attach(place, &format!("{term}?write=true&steal=true")).await.unwrap();
        assert!(until(&mut writer, "somebody else").await.contains("somebody else"));
        thief.send(Message::Binary(b"two\n".to_vec().into())).await.unwrap();
        let seen = until(&mut thief, "two\r\ntwo\r\n").await;
        assert!(seen.starts_with("one\r\n") && !seen.contains("never"), "from the start: {seen:?}");
        // One who knows where it was reads no more than it missed.
        let mut late = attach(place, &format!("{term}?offset=10")).await.unwrap();
        let seen = until(&mut late, "two\r\ntwo\r\n").await;
        assert_eq!(seen, "two\r\ntwo\r\n");
        finish(daemon);
    }
}

/// Sends a request by hand and returns the answer with its head.
fn post(place: &Place, path: &str, body: &str) -> String {
    let mut stream =
        std::os::unix::net::UnixStream::connect(place.path("run/warren.sock")).unwrap();
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Connection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn whether_commands_are_followed_can_be_chosen_once_for_a_sandbox_or_for_all() {
    let told =
        "denied: create /usr/lib/x, by the read-only mount /usr; allowed by --bind SRC:/usr/lib";
    let tells = |daemon: &Daemon, sandbox: &str| {
        let seen = daemon.run(&["exec", sandbox, "--", "sh", "-c", "touch /usr/lib/x; exit 3"]);
        assert_eq!(seen.code, Some(3), "{}", seen.stderr);
        let whole = daemon.run(&["exec", "--json", sandbox, "--", "sh", "-c", "touch /usr/lib/x"]);
        let (streamed, whole) =
            (seen.stderr.contains(told), whole.stdout.contains("create /usr/lib/x"));
        assert_eq!(streamed, whole, "{} {}", seen.stderr, seen.stdout);
        streamed
    };
    let daemon = Daemon::start_in(Place::with_backend("linux"), &["--stop-all"]);
    daemon.ok(&["create", "--name", "told", "--explain"]);
    daemon.ok(&["create", "--name", "plain"]);
    // Where nobody can be followed it is no reason to refuse anything.
    daemon.ok(&["create", "--name", "dev", "--explain", "--profile", "dev"]);
    let seen = ["told", "plain", "dev"].map(|sandbox| tells(&daemon, sandbox));
    assert_eq!(seen, [true, false, false]);
    let seen = daemon.run(&["exec", "--explain", "dev", "--", "true"]);
    assert_eq!(seen.code, Some(125), "who asks for it there is told: {}", seen.stderr);
    let seen = daemon.run(&["create", "--explain", "--label", "explain=no"]);
    assert!(seen.code != Some(0) && seen.stderr.contains("explain"), "{}", seen.stderr);
    let (code, daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0), "{}", daemon.log());
    let place = Place::with_settings("linux", &[("WARREN_EXECS_EXPLAIN", "true")]);
    let daemon = Daemon::start_in(place, &["--stop-all"]);
    daemon.ok(&["create", "--name", "plain"]);
    assert!(tells(&daemon, "plain"));
    let (code, daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0), "{}", daemon.log());
}

#[test]
fn what_walls_refuse_is_told_to_the_operator_with_the_host_and_to_a_tenant_without() {
    let place = Place::with_backend("linux");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let made = place.run(&["key", "create", "alice", "--json"]);
    let made: Value = serde_json::from_str(&made.stdout).unwrap();
    let key = made["key"].as_str().unwrap();
    let daemon = Daemon::start_in(place.clone(), &["--listen", &address, "--stop-all"]);
    daemon.ok(&["create", "--name", "box"]);
    let script = "cat /etc/shadow; touch /usr/lib/x; exit 3";
    let seen = daemon.run(&["exec", "--explain", "box", "--", "sh", "-c", script]);
    assert_eq!(seen.code, Some(3), "{}", seen.stderr);
    for told in [
        "denied: read /etc/shadow, by the sandbox's root, in which this path of the host is not \
         shown; allowed by --ro /etc/shadow",
        "denied: create /usr/lib/x, by the read-only mount /usr; allowed by --bind SRC:/usr/lib",
    ] {
        assert!(seen.stderr.lines().any(|line| line == told), "{}", seen.stderr);
    }
    let whats = |answer: &Value| {
        let denials = answer["denials"].as_array().cloned().unwrap_or_default();
        let whats = denials.iter().map(|denial| denial["what"].as_str().unwrap().to_owned());
        whats.collect::<Vec<_>>()
    };
    let seen = daemon.run(&["exec", "--json", "--explain", "box", "--", "sh", "-c", script]);
    let seen: Value = serde_json::from_str(&seen.stdout).unwrap();
    assert_eq!(whats(&seen), ["read /etc/shadow", "create /usr/lib/x"], "{seen}");

    let ask = |path: &str, body: &str| -> Value {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let body = answer.split("\r\n\r\n").nth(1).unwrap();
        serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
    };
    let made = ask("/v1/sandboxes", "{}");
    let id = made["sandbox"]["id"].as_str().unwrap();
    let body = serde_json::json!({"program": "sh", "args": ["-c", script], "explain": true});
    let seen = ask(&format!("/v1/sandboxes/{id}/exec"), &body.to_string());
    assert_eq!(
        (&seen["exit_code"], whats(&seen)),
        (&3.into(), vec!["create /usr/lib/x".to_owned()])
    );
    let (code, daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0), "{}", daemon.log());
}

#[test]
fn commands_that_outlive_the_daemon_count_against_the_quota_until_they_end() {
    let daemon = linux();
    daemon.ok(&["create", "--name", "box"]);
    let used = |daemon: &Daemon| {
        let shown: Value = serde_json::from_str(&daemon.ok(&["quota", "--json"])).unwrap();
        shown["items"][0]["used"]["execs"].as_u64().unwrap()
    };
    let until =
        |file: &str| format!("touch /tmp/{file}.on; until [ -e /tmp/{file} ]; do sleep 0.02; done");
    // One that has ended, a shell that waits for commands, and what runs: a command, and one in a shell.
    daemon.ok(&["exec", "-d", "--id", "done", "box", "--", "true"]);
    daemon.ok(&["sh", "box", "--session", "idle", "--", "true"]);
    assert_eq!(used(&daemon), 0);
    daemon.ok(&["exec", "-d", "--id", "long", "box", "--", "sh", "-c", &until("go")]);
    let line = until("went");
    let mut client = daemon.place.warren(&["sh", "box", "--session", "busy", "--", &line]);
    let mut client = client.spawn().unwrap();
    let runs = |daemon: &Daemon| {
        let seen = ["/tmp/go.on", "/tmp/went.on"];
        seen.iter()
            .all(|file| daemon.run(&["exec", "box", "--", "test", "-e", file]).code == Some(0))
    };
    soon("both begin", || runs(&daemon));
    assert_eq!(used(&daemon), 2, "control: they count while their daemon lives");
    let daemon = Daemon::start_in(daemon.end("KILL").1.into_place(), &[]);
    client.kill().unwrap();
    client.wait().unwrap();
    assert_eq!(used(&daemon), 2, "and by the next one");
    daemon.ok(&["exec", "box", "--", "touch", "/tmp/go"]);
    soon("the command ends", || used(&daemon) == 1);
    daemon.ok(&["exec", "box", "--", "touch", "/tmp/went"]);
    soon("the one in the shell does", || used(&daemon) == 0);
    finish(daemon);
}
