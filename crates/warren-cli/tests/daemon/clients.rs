//! The client commands.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use serde_json::Value;

use crate::support::{Daemon, Place, outcome};

#[test]
fn without_a_daemon_every_client_says_how_to_start_one() {
    let place = Place::new();
    let socket = place.path("run/warren.sock");
    for args in [
        &["create"][..],
        &["ls"],
        &["show", "x"],
        &["exec", "x", "--", "true"],
        &["exec", "--", "true"],
        &["sh", "x", "--", "true"],
        &["attach", "x"],
        &["detach", "x"],
        &["suspend", "x"],
        &["resume", "x"],
        &["kill", "x"],
        &["default"],
        &["stats"],
        &["events"],
        &["port", "x", "80"],
    ] {
        let seen = place.run(args);
        let expected =
            format!("error: no daemon at {}\nhint: start one: warren serve\n", socket.display());
        assert_eq!((seen.code, seen.stdout.as_str(), seen.stderr), (Some(125), "", expected));
    }
    let seen = place.run(&["ls", "--json"]);
    let object: Value = serde_json::from_str(&seen.stdout).unwrap();
    assert_eq!((seen.code, &object["error"]["code"]), (Some(125), &"no_daemon".into()));
}

#[test]
fn a_sandbox_lives_from_create_to_kill() {
    let daemon = Daemon::start();
    let id = daemon.ok(&["create", "--name", "web", "--label", "team=blue"]);
    assert!(id.starts_with("sbx-"), "{id}");
    let other = daemon.ok(&["create"]);
    let table = daemon.ok(&["ls"]);
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("ID ") && lines[0].contains("STATE"), "{table}");
    assert!(lines[1].starts_with(&id[..12]) && lines[1].contains("web"), "{table}");
    assert_eq!(daemon.ok(&["ls", "-q", "-f", "label=team=blue"]), id);
    assert_eq!(daemon.ok(&["ls", "-q", "-f", "name=web", "-f", "state=active"]), id);
    assert_eq!(daemon.ok(&["ls", "-q", "-f", "backend=linux"]), "");

    let seen = daemon.run(&["exec", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]);
    assert_eq!(
        (seen.code, seen.stdout.as_str(), seen.stderr.as_str()),
        (Some(3), "out\n", "err\n")
    );
    for target in [&id[..], &id[..12], &id[4..12], "we"] {
        assert_eq!(daemon.ok(&["exec", target, "--", "echo", "hi"]), "hi");
    }
    let seen = daemon.run(&["exec", "web", "--", "no-such-program"]);
    assert_eq!(seen.code, Some(127), "{seen:?}");
    assert!(seen.stderr.contains("hint: "));
    let seen = daemon.run(&["exec", "web", "--timeout", "50ms", "--", "sleep", "9"]);
    assert_eq!((seen.code, seen.stderr.as_str()), (Some(124), "warren: ended: timed out\n"));

    daemon.ok(&["suspend", "web"]);
    let seen = daemon.run(&["exec", "web", "--", "true"]);
    assert_eq!(seen.code, Some(125));
    assert!(seen.stderr.contains("is suspended\nhint: resume"), "{seen:?}");
    daemon.ok(&["resume", "web"]);
    daemon.ok(&["detach", "web"]);
    assert_eq!(daemon.ok(&["ls", "-q", "-f", "state=detached"]), id);
    assert!(daemon.ok(&["attach", "web"]).starts_with("sess-"));

    let seen = daemon.run(&["exec", "--", "true"]);
    assert!(seen.stderr.starts_with("error: there is no default sandbox\nhint: "), "{seen:?}");
    assert_eq!(daemon.ok(&["default", "web"]), id);
    assert_eq!(daemon.ok(&["exec", "--", "echo", "there"]), "there");
    daemon.ok(&["default", "--unset"]);
    assert!(daemon.ok(&["stats"]).contains("sandboxes"));
    assert!(daemon.ok(&["show", "web"]).contains(&id));

    let seen = daemon.run(&["kill", "web", "nope"]);
    assert_eq!(
        (seen.code, seen.stderr.as_str()),
        (Some(125), "error: no sandbox `nope`\nhint: `warren ls` lists the running ones\n")
    );
    assert_eq!(daemon.ok(&["ls", "-q"]).lines().count(), 2, "a slip ends nothing");
    daemon.ok(&["kill", "web", &other]);
    assert_eq!(daemon.ok(&["ls", "-q"]), "");
}

#[test]
fn a_beginning_that_several_have_lists_them() {
    let daemon = Daemon::start();
    for name in ["web-1", "web-2"] {
        daemon.ok(&["create", "--name", name]);
    }
    let seen = daemon.run(&["kill", "web"]);
    assert_eq!(seen.code, Some(125));
    assert!(seen.stderr.contains("(web-1)") && seen.stderr.contains("(web-2)"), "{seen:?}");
    let seen = daemon.run(&["create", "--name", "web-1"]);
    assert!(seen.stderr.starts_with("error: there is already a sandbox `web-1`"), "{seen:?}");
    let seen = daemon.run(&["create", "--name", "a b"]);
    assert_eq!(seen.code, Some(2), "{seen:?}");
    let seen = daemon.run(&["ls", "-f", "colour=red"]);
    assert_eq!(seen.code, Some(2), "{seen:?}");
}

#[test]
fn json_is_the_apis_own_objects_one_a_line() {
    let daemon = Daemon::start();
    let made: Value = serde_json::from_str(&daemon.ok(&["create", "--json"])).unwrap();
    daemon.ok(&["create"]);
    let listed = daemon.ok(&["ls", "--json"]);
    let items: Vec<Value> =
        listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(items.len(), 2);
    assert_eq!(items[0], made["sandbox"]);
    let id = made["sandbox"]["id"].as_str().unwrap();
    let seen = daemon.run(&["exec", "--json", id, "--", "sh", "-c", "echo hi; exit 4"]);
    let ran: Value = serde_json::from_str(&seen.stdout).unwrap();
    assert_eq!(
        (seen.code, &ran["exit_code"], &ran["stdout"]),
        (Some(4), &4.into(), &"hi\n".into())
    );
    let seen = daemon.run(&["exec", "--json", "nope", "--", "true"]);
    let error: Value = serde_json::from_str(&seen.stdout).unwrap();
    assert_eq!((seen.code, &error["error"]["code"]), (Some(125), &"not_found".into()));
}

#[test]
fn stdin_is_handed_on_when_asked() {
    let daemon = Daemon::start();
    daemon.ok(&["create", "--name", "web"]);
    let mut child = daemon
        .place
        .warren(&["exec", "-i", "web", "--", "cat"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&[0xff, b'a', 0]).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.stdout, [0xff, b'a', 0]);
    assert_eq!(daemon.ok(&["exec", "web", "--", "cat"]), "", "and not otherwise");
}

#[test]
fn events_are_followed_and_taken_up_again() {
    let daemon = Daemon::start();
    let mut child = daemon.place.warren(&["events", "--json"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // The stream begins with what comes next, so something must come until it is there.
    let first: Value = loop {
        let id = daemon.ok(&["create"]);
        daemon.ok(&["kill", &id]);
        if daemon.log().contains("path=\"/v1/events\"") {
            let id = daemon.ok(&["create"]);
            daemon.ok(&["kill", &id]);
            break serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        }
    };
    child.kill().unwrap();
    child.wait().unwrap();
    let id = first["id"].as_str().unwrap();
    let mut child = daemon.place.warren(&["events", "--json", "--since", id]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let next: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_ne!(next["id"], first["id"]);
    let number = |event: &Value| {
        event["id"].as_str().unwrap().rsplit('-').next().unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(number(&next), number(&first) + 1, "none is missed and none comes twice");
    // The stream ends with the daemon, and the client with it.
    let (_, _daemon) = daemon.end("TERM");
    let seen = outcome(child.wait_with_output().unwrap());
    assert_eq!(seen.code, Some(0), "{seen:?}");
}

#[test]
fn those_who_ask_at_once_are_not_given_the_same_sandbox() {
    let daemon = Daemon::start_in(Place::with_backend("linux"), &[]);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..3 {
        let ids: Vec<String> = std::thread::scope(|scope| {
            let asked: Vec<_> = (0..6).map(|_| scope.spawn(|| daemon.ok(&["create"]))).collect();
            asked.into_iter().map(|one| one.join().unwrap()).collect()
        });
        for id in ids {
            daemon.ok(&["kill", &id]);
            assert!(seen.insert(id.clone()), "{id} was given to two");
        }
    }
    assert_eq!(seen.len(), 18);
}
