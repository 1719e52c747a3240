//! What clients may rely on although the daemon was killed (D1).

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdout};

use serde_json::Value;

use crate::support::{Daemon, Place, outcome};

/// How often the daemon is killed.
const KILLS: usize = 5;

/// A client that follows the events.
struct Follower {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Follower {
    /// Begins to follow; without an id, with what happens after this returns.
    fn new(daemon: &Daemon, since: Option<&str>) -> Self {
        let requests = || daemon.log().matches("path=\"/v1/events\"").count();
        let (before, mut args) = (requests(), vec!["events", "--json"]);
        args.extend(since.iter().flat_map(|id| ["--since", id]));
        let mut child = daemon.place.warren(&args).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        while requests() == before {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        Self { child, lines }
    }

    fn next(&mut self) -> Value {
        let line = self.lines.next().expect("more").expect("a line");
        serde_json::from_str(&line).expect("JSON")
    }

    /// Reads what is left once the daemon is gone, and checks that no gap was told of.
    fn rest(self) -> Vec<Value> {
        let rest = self.lines.map_while(Result::ok);
        let rest = rest.map(|line| serde_json::from_str::<Value>(&line).unwrap());
        // The last line says that the daemon is gone.
        let rest = rest.filter(|line| line["error"].is_null()).collect();
        let seen = outcome(self.child.wait_with_output().unwrap());
        assert!(!seen.stderr.contains("are lost"), "{seen:?}");
        rest
    }
}

fn number(event: &Value) -> u64 {
    event["id"].as_str().unwrap().rsplit('-').next().unwrap().parse().unwrap()
}

#[test]
fn d1_events_go_on_by_their_ids_after_each_kill_and_so_do_answers() {
    let create = ["create", "--name", "web", "--idempotency-key", "once"];
    let mut daemon = Daemon::start_in(Place::with_backend("linux"), &[]);
    let mut follower = Follower::new(&daemon, None);
    let id = daemon.ok(&create);
    let mut seen = vec![follower.next(), follower.next()];
    for round in 0..KILLS {
        daemon = std::thread::scope(|scope| {
            let place = daemon.place.clone();
            // Something always happens, whenever the kill comes.
            scope.spawn(move || {
                while ["suspend", "resume"]
                    .iter()
                    .all(|verb| place.run(&[verb, "web"]).code == Some(0))
                {}
            });
            seen.push(follower.next());
            seen.push(follower.next());
            std::thread::sleep(std::time::Duration::from_millis(37 * round as u64));
            daemon.end("KILL").1
        });
        seen.extend(follower.rest());
        daemon = Daemon::start_in(daemon.into_place(), &[]);
        assert_eq!(daemon.ok(&create), id, "round {round}: the same key, the same sandbox");
        let other = daemon.run(&["create", "--name", "other", "--idempotency-key", "once"]);
        assert!(other.stderr.contains("was used for another request"), "{other:?}");
        // Some were not read before the kill, or happened with nobody to see.
        follower = Follower::new(&daemon, seen.last().and_then(|event| event["id"].as_str()));
        daemon.run(&["resume", "web"]);
    }
    daemon.ok(&["kill", "web"]);
    while seen.last().unwrap()["kind"] != "sandbox.destroyed" {
        seen.push(follower.next());
    }
    let (code, _daemon) = daemon.end("TERM");
    assert_eq!((code, follower.rest()), (Some(0), vec![]));
    assert_eq!(seen.iter().filter(|event| event["kind"] == "sandbox.created").count(), 1);
    for pair in seen.windows(2) {
        assert_eq!(number(&pair[1]), number(&pair[0]) + 1, "{pair:?}");
        assert_ne!(pair[1]["kind"], pair[0]["kind"], "nothing is told twice: {pair:?}");
    }
}

#[test]
fn sandboxes_that_end_with_the_daemon_are_told_to_be_gone() {
    let daemon = Daemon::start();
    let mut follower = Follower::new(&daemon, None);
    let id = daemon.ok(&["create"]);
    let last = [follower.next(), follower.next()][1]["id"].as_str().unwrap().to_owned();
    let (_, daemon) = daemon.end("KILL");
    follower.rest();
    let daemon = Daemon::start_in(daemon.into_place(), &[]);
    let mut follower = Follower::new(&daemon, Some(&last));
    let (ended, destroyed) = (follower.next(), follower.next());
    assert_eq!(
        (&ended["kind"], &destroyed["kind"]),
        (&"session.ended".into(), &"sandbox.destroyed".into())
    );
    assert_eq!(destroyed["sandbox_id"], id.as_str());
    let _daemon = daemon.end("TERM");
    follower.rest();
}
