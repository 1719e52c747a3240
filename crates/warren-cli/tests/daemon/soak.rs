//! Everything at once, for as long as one likes, at the limit of what the daemon may have.
//!
//! Clients make, use, fork, snapshot, suspend and end sandboxes at random while the daemon is killed again and
//! again; then for a while it lives. In the end nothing is left on the host, the daemon has no more open
//! than before, and has not grown.
//!
//! `./test` does it for less than a minute. `WARREN_SOAK_SECONDS=1800 cargo nextest run -p warren-cli --test
//! daemon soak` does it for half an hour; `WARREN_SOAK_BACKENDS` names the backends, `linux` if absent.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::calls::{Dice, ask, run};
use crate::host::{Host, Undertaker};
use crate::support::{Daemon, PATIENCE, Place};

/// How many clients there are at once, and how many sandboxes each keeps.
const CLIENTS: u64 = 4;
const KEEP: usize = 6;
/// Fewer than all clients want, so that the limit is met.
const SETTINGS: &[(&str, &str)] = &[
    ("WARREN_MAX_SANDBOXES", "20"),
    ("WARREN_POOL_MIN_WARM", "2"),
    ("WARREN_POOL_MAX_WARM", "3"),
    ("WARREN_TIMEOUTS_IDLE", "2h"),
];
const SECONDS: u64 = 30;
/// How long a daemon lives that is to be killed.
const LIFE: Duration = Duration::from_secs(2);
/// What the daemon's memory may differ by between two moments of rest, in kB.
const SLACK: u64 = 8 << 10;

/// What was done.
#[derive(Debug, Default)]
struct Done {
    made: AtomicU64,
    refused: AtomicU64,
    ran: AtomicU64,
    moved: AtomicU64,
    kept: AtomicU64,
    ended: AtomicU64,
}

/// A client with sandboxes of its own.
struct Client<'a> {
    place: Place,
    name: u64,
    stop: &'a AtomicBool,
    done: &'a Done,
    dice: Dice,
    /// Its sandboxes, each with its session and whether it is known to be suspended.
    own: Vec<(String, String, bool)>,
}

impl Client<'_> {
    fn work(mut self) -> Vec<(String, String, bool)> {
        while !self.stop.load(Ordering::SeqCst) {
            match self.dice.below(12) {
                0..=2 if self.own.len() < KEEP => self.make(),
                0..=4 => self.end(),
                _ if self.own.is_empty() => self.make(),
                5 => self.use_one(),
                6 | 7 => self.keep_one(),
                _ => self.move_one(),
            }
        }
        self.own
    }

    /// Asks; nothing if the daemon died, or had no room.
    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Option<Value> {
        let Some((status, answer)) = ask(&self.place, method, path, body) else {
            // It is being started again.
            std::thread::sleep(Duration::from_millis(20));
            return None;
        };
        if status == 503 {
            assert_eq!(answer["error"]["code"], "capacity", "{method} {path}: {answer}");
            self.done.refused.fetch_add(1, Ordering::SeqCst);
            return None;
        }
        assert!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        Some(answer)
    }

    fn note(&self, what: &AtomicU64) {
        what.fetch_add(1, Ordering::SeqCst);
    }

    fn pick(&mut self) -> usize {
        usize::try_from(self.dice.below(self.own.len() as u64)).unwrap()
    }

    fn make(&mut self) {
        let body = json!({ "select": { "use_pool": self.dice.below(2) == 0 } });
        let Some(made) = self.ask("POST", "/v1/sandboxes", Some(&body)) else { return };
        self.note(&self.done.made);
        self.take(&made["sandbox"]["id"], &made["session"]["id"]);
    }

    fn take(&mut self, id: &Value, session: &Value) {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        self.own.push((text(id), text(session), false));
    }

    fn end(&mut self) {
        if self.own.is_empty() {
            return;
        }
        let nth = self.pick();
        let (id, session, suspended) = self.own.swap_remove(nth);
        match self.ask("DELETE", &format!("/v1/sandboxes/{id}"), None) {
            Some(_) => self.note(&self.done.ended),
            // It may be there still, and is asked for by id later: then it must be one or the other.
            None => {
                let found = ask(&self.place, "GET", &format!("/v1/sandboxes/{id}"), None);
                if found.is_none_or(|(status, _)| status == 200) {
                    self.own.push((id, session, suspended));
                }
            }
        }
    }

    /// Brings one to run that may be suspended, or of which that is not known.
    fn wake(&mut self, nth: usize) -> Option<String> {
        let (id, session, suspended) = self.own[nth].clone();
        if suspended {
            self.ask("POST", &format!("/v1/sessions/{session}/resume"), None)?;
            self.own[nth].2 = false;
        }
        // One whose end was asked of a daemon that died meanwhile is gone.
        match ask(&self.place, "GET", &format!("/v1/sandboxes/{id}"), None)? {
            (200, _) => Some(id),
            (status, answer) => {
                assert_eq!(status, 404, "{answer}");
                self.own.swap_remove(nth);
                None
            }
        }
    }

    /// Writes a file by a command and reads it back by another.
    fn use_one(&mut self) {
        let nth = self.pick();
        let Some(id) = self.wake(nth) else { return };
        let word = format!("{}-{}", self.name, self.dice.below(1 << 40));
        let path = format!("/v1/sandboxes/{id}/exec");
        let line = format!("echo {word} > note; (sleep 0.2; :) & cat note");
        let Some(ran) = self.ask("POST", &path, Some(&run(&line))) else { return };
        assert_eq!(ran["stdout"], format!("{word}\n"), "{ran}");
        self.note(&self.done.ran);
        let stat = format!("/v1/sandboxes/{id}/files/stat?path=/workspace/note");
        if let Some(stat) = self.ask("GET", &stat, None) {
            assert_eq!(stat["size"], word.len() + 1, "{stat}");
        }
    }

    /// Snapshots one, forks the snapshot, looks at the fork, and forgets the snapshot.
    fn keep_one(&mut self) {
        let nth = self.pick();
        let Some(id) = self.wake(nth) else { return };
        let word = self.dice.below(1 << 40).to_string();
        let exec = format!("/v1/sandboxes/{id}/exec");
        let line = format!("echo {word} > kept");
        if self.ask("POST", &exec, Some(&run(&line))).is_none() {
            return;
        }
        let path = format!("/v1/sandboxes/{id}/snapshots");
        let Some(snapshot) = self.ask("POST", &path, Some(&json!({}))) else { return };
        let snapshot = snapshot["id"].as_str().unwrap().to_owned();
        let path = format!("/v1/snapshots/{snapshot}");
        let forks = self.ask("POST", &format!("{path}/fork"), Some(&json!({ "count": 1 })));
        for fork in forks.iter().flat_map(|forks| forks["items"].as_array().unwrap()) {
            self.take(&fork["sandbox"]["id"], &fork["session"]["id"]);
            let id = &self.own.last().unwrap().0;
            let exec = format!("/v1/sandboxes/{id}/exec");
            if let Some(ran) = self.ask("POST", &exec, Some(&run("cat kept"))) {
                assert_eq!(ran["stdout"], format!("{word}\n"), "{ran}");
                self.note(&self.done.kept);
            }
        }
        // Until it is so: nothing else would remove it.
        while self.ask("DELETE", &path, None).is_none() {
            if ask(&self.place, "GET", &path, None).is_some_and(|(status, _)| status == 404) {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn move_one(&mut self) {
        let nth = self.pick();
        let Some(_) = self.wake(nth) else { return };
        let session = self.own[nth].1.clone();
        // Whether it is so if there is no answer is not known; to resume what runs changes nothing.
        self.own[nth].2 = true;
        if self.ask("POST", &format!("/v1/sessions/{session}/suspend"), None).is_some() {
            self.note(&self.done.moved);
        }
    }
}

/// What a process has open, and its memory in kB.
fn standing(daemon: &Daemon) -> (usize, u64) {
    let place = format!("/proc/{}", daemon.pid());
    let status = fs::read_to_string(format!("{place}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let memory = line.trim().trim_end_matches(" kB").parse().unwrap();
    (fs::read_dir(format!("{place}/fd")).unwrap().count(), memory)
}

/// Starts a daemon, whose end is ours to wait for.
fn start(place: Place, undertaker: &Undertaker) -> Daemon {
    let daemon = Daemon::start_in(place, &[]);
    undertaker.spare.store(daemon.id(), Ordering::SeqCst);
    daemon
}

/// Has clients at work for a while, and then ends what they have.
fn load(
    daemon: Daemon,
    (done, undertaker): (&Done, &Undertaker),
    dice: &mut Dice,
    time: Duration,
    life: Option<Duration>,
) -> Daemon {
    let (stop, began) = (AtomicBool::new(false), Instant::now());
    let stop = &stop;
    let place = daemon.place.clone();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|name| {
                let dice = Dice(dice.below(u64::MAX).max(1));
                let client =
                    Client { place: place.clone(), name, stop, done, dice, own: Vec::new() };
                scope.spawn(move || client.work())
            })
            .collect();
        let mut daemon = daemon;
        let broken = |clients: &[std::thread::ScopedJoinHandle<'_, _>]| {
            clients.iter().any(std::thread::ScopedJoinHandle::is_finished)
        };
        while began.elapsed() < time && !broken(&clients) {
            match life {
                None => std::thread::sleep(Duration::from_millis(50)),
                Some(life) => {
                    std::thread::sleep(life / 2 + life.mul_f64(dice.below(100) as f64 / 100.0));
                    daemon = start(daemon.kill().into_place(), undertaker);
                }
            }
        }
        stop.store(true, Ordering::SeqCst);
        for client in clients {
            for (id, ..) in client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                let ended = ask(&place, "DELETE", &format!("/v1/sandboxes/{id}"), None);
                let (status, answer) = ended.expect("it answers");
                assert!(matches!(status, 204 | 404), "{id}: {status} {answer}");
            }
        }
        daemon
    })
}

/// Waits until a daemon at rest has no more open than before.
fn assert_at_rest(daemon: &Daemon, before: (usize, u64)) -> (usize, u64) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = standing(daemon);
        let fine = now.0 <= before.0 && now.1 <= before.1 + SLACK;
        if fine {
            return now;
        }
        let names = || {
            let open = fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().flatten();
            open.filter_map(|entry| fs::read_link(entry.path()).ok()).collect::<Vec<_>>()
        };
        assert!(Instant::now() < deadline, "{before:?} became {now:?}: {:?}", names());
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_daemon_at_its_limit_leaves_nothing_and_does_not_grow() {
    let seconds = std::env::var("WARREN_SOAK_SECONDS").ok().and_then(|text| text.parse().ok());
    let time = Duration::from_secs(seconds.unwrap_or(SECONDS));
    let backends = std::env::var("WARREN_SOAK_BACKENDS").unwrap_or_else(|_| "linux".to_owned());
    for backend in backends.split(',') {
        soak(backend.to_owned().leak(), time);
    }
}

fn soak(backend: &'static str, time: Duration) {
    let seed = std::process::id().into();
    eprintln!("{backend}, seed {seed}");
    let mut dice = Dice(seed);
    let place = Place::with_settings(backend, SETTINGS);
    // What it needs on the host once and for all is there before.
    let (_, first) = Daemon::start_in(place, &["--stop-all"]).end("TERM");
    let sandboxes = first.place.path("state/sandboxes");
    let directories = [Path::new("/run/warren"), sandboxes.as_path()];
    let cleared = first.place.clone();
    let undertaker = Undertaker::new();
    let host = Host::look(&directories);
    let done = Done::default();
    std::thread::scope(|scope| {
        scope.spawn(|| undertaker.work());
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let with = (&done, &undertaker);
            let daemon = start(first.into_place(), &undertaker);
            let daemon = load(daemon, with, &mut dice, time / 2, Some(LIFE));
            // From here on one lives. What it allocates once it has after a while.
            let daemon = load(daemon, with, &mut dice, time / 6, None);
            std::thread::sleep(Duration::from_secs(1));
            let before = standing(&daemon);
            let daemon = load(daemon, with, &mut dice, time / 3, None);
            let after = assert_at_rest(&daemon, (before.0 + 2, before.1));
            eprintln!("descriptors and kB at rest: {before:?}, then {after:?}");
            let (_, snapshots) =
                ask(&daemon.place, "GET", "/v1/snapshots", None).expect("it answers");
            assert_eq!(snapshots["items"], json!([]), "all were forgotten");
            let (_, daemon) = daemon.end("TERM");
            let daemon = Daemon::start_in(daemon.into_place(), &["--stop-all"]);
            undertaker.spare.store(daemon.id(), Ordering::SeqCst);
            let (code, daemon) = daemon.end("TERM");
            assert_eq!(code, Some(0), "{}", daemon.log());
            host.assert_restored(&directories, PATIENCE);
        }));
        undertaker.done.store(true, Ordering::SeqCst);
        if let Err(panic) = result {
            // What was kept alive is not left behind by a test that failed.
            drop(Daemon::start_in(cleared, &["--stop-all"]).end("TERM"));
            std::panic::resume_unwind(panic);
        }
    });
    eprintln!("{done:?}");
    let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
    let all = [&done.made, &done.ran, &done.moved, &done.kept, &done.ended].map(count);
    assert!(all.iter().all(|count| *count >= 5), "control: everything was done: {done:?}");
}
