//! The daemon is killed at random moments, with real sandboxes and under load (D1, D2).
//!
//! Clients make sandboxes, cold and from the pool, start something in each, suspend, resume, detach
//! and end them, over dozens that live on from kill to kill. After each restart every session that
//! was acknowledged is looked at: it is there, in the state that was acknowledged, and its process
//! is the same one, at work or at rest. In the end the host is as it was before.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::calls::{Dice, ask, run, send};
use crate::host::{Host, Process, Undertaker};
use crate::support::{Daemon, PATIENCE, Place};

/// How often the daemon is killed, unless `WARREN_KILLS` says otherwise.
const KILLS: u64 = 100;
/// How many clients there are at once.
const CLIENTS: u64 = 4;
/// How many sandboxes are kept alive over the kills.
const KEEP: usize = 36;
const SETTINGS: &[(&str, &str)] = &[
    ("WARREN_POOL_MIN_WARM", "2"),
    ("WARREN_POOL_MAX_WARM", "3"),
    ("WARREN_TIMEOUTS_IDLE", "2h"),
    ("WARREN_TIMEOUTS_DETACH", "2h"),
];

fn kills() -> u64 {
    std::env::var("WARREN_KILLS").map_or(KILLS, |text| text.parse().expect("a number"))
}

/// A sandbox whose making was acknowledged.
#[derive(Debug)]
struct Kept {
    session: String,
    /// What was acknowledged last; nothing while that is not known.
    state: Option<&'static str>,
    /// What was seen to run in it, when, and how far it had come then.
    process: Option<(Process, Instant, u64)>,
}

/// What clients were told, and so what must be true after a restart.
#[derive(Debug, Default)]
struct Told {
    alive: Mutex<BTreeMap<String, Kept>>,
    made: AtomicU64,
    from_pool: AtomicU64,
    moved: AtomicU64,
    ended: AtomicU64,
}

impl Told {
    fn acknowledged(&self) -> u64 {
        [&self.made, &self.moved, &self.ended].iter().map(|n| n.load(Ordering::SeqCst)).sum()
    }
}

/// A client: makes sandboxes, starts something in them, moves and ends others.
struct Client<'a> {
    place: Place,
    told: &'a Told,
    stop: &'a AtomicBool,
    dice: Dice,
}

impl Client<'_> {
    fn work(mut self) {
        while !self.stop.load(Ordering::SeqCst) {
            let alive = self.told.alive.lock().unwrap().len();
            match self.dice.below(10) {
                0..=5 if alive < KEEP => self.make(),
                0 | 1 => self.end(),
                _ if alive > 0 => self.move_one(),
                _ => self.make(),
            }
        }
    }

    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Option<Value> {
        let (status, answer) = ask(&self.place, method, path, body)?;
        assert!((200..300).contains(&status), "{method} {path}: {status} {answer}");
        Some(answer)
    }

    fn make(&mut self) {
        let from_pool = self.dice.below(2) == 0;
        let body = json!({ "select": { "use_pool": from_pool } });
        let Some(made) = self.ask("POST", "/v1/sandboxes", Some(&body)) else { return };
        let id = made["sandbox"]["id"].as_str().unwrap().to_owned();
        let session = made["session"]["id"].as_str().unwrap().to_owned();
        let nth = self.told.made.fetch_add(1, Ordering::SeqCst);
        self.told.from_pool.fetch_add(u64::from(from_pool), Ordering::SeqCst);
        // Something whose life can be seen from outside, by a name that nothing else has.
        let name = format!("beat-{}-{nth}", std::process::id());
        let line =
            format!("sh -c 'while :; do sleep 2; done' {name} < /dev/null > /dev/null 2>&1 &");
        let begun = self.ask("POST", &format!("/v1/sandboxes/{id}/exec"), Some(&run(&line)));
        let process = begun.map(|begun| {
            assert_eq!(begun["exit_code"], 0, "{begun}");
            let process = Process::with_argument(&name).expect("what was started runs");
            let turns = process.turns().expect("it runs");
            (process, Instant::now(), turns)
        });
        let kept = Kept { session, state: Some("active"), process };
        let before = self.told.alive.lock().unwrap().insert(id.clone(), kept);
        assert!(before.is_none(), "{id} was given to two");
    }

    /// Takes one away from the others, for as long as something is done with it.
    fn take(&mut self) -> Option<(String, Kept)> {
        let mut alive = self.told.alive.lock().unwrap();
        let nth = self.dice.below(alive.len().max(1) as u64);
        let id = alive.keys().nth(usize::try_from(nth).unwrap())?.clone();
        alive.remove_entry(&id)
    }

    fn end(&mut self) {
        // Whether it is there if the daemon dies meanwhile is not known, so it is not put back.
        let Some((id, _)) = self.take() else { return };
        if self.ask("DELETE", &format!("/v1/sandboxes/{id}"), None).is_some() {
            self.told.ended.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn move_one(&mut self) {
        let Some((id, mut kept)) = self.take() else { return };
        let (verb, becomes) = match (kept.state, self.dice.below(3)) {
            (Some("active"), 0) => ("suspend", "suspended"),
            (Some("active"), 1) => ("detach", "detached"),
            (Some("active"), _) => ("exec", "active"),
            _ => ("resume", "active"),
        };
        kept.state = None;
        let moved = match verb {
            "exec" => self.ask("POST", &format!("/v1/sandboxes/{id}/exec"), Some(&run("echo hi"))),
            _ => self.ask("POST", &format!("/v1/sessions/{}/{verb}", kept.session), None),
        };
        if let Some(moved) = moved {
            match verb {
                "exec" => assert_eq!(moved["stdout"], "hi\n", "{moved}"),
                _ => assert_eq!(moved["state"], becomes, "{moved}"),
            }
            kept.state = Some(becomes);
            self.told.moved.fetch_add(1, Ordering::SeqCst);
        } else if verb == "exec" {
            kept.state = Some("active");
        }
        // Its process stood still or goes on from now: look at it anew.
        if verb != "exec" {
            kept.process = kept.process.and_then(|(process, _, _)| {
                let turns = process.turns()?;
                Some((process, Instant::now(), turns))
            });
        }
        self.told.alive.lock().unwrap().insert(id, kept);
    }
}

/// Looks at every sandbox that was acknowledged; ends those that nobody was told of.
fn check(daemon: &Daemon, told: &Told, dice: &mut Dice) {
    let get = |path: &str| ask(&daemon.place, "GET", path, None).expect("it answers");
    let (status, page) = get("/v1/sandboxes?limit=1000");
    assert_eq!(status, 200, "{page}");
    let mut listed: BTreeMap<&str, &Value> = BTreeMap::new();
    for item in page["items"].as_array().unwrap() {
        listed.insert(item["id"].as_str().unwrap(), item);
    }
    let mut alive = told.alive.lock().unwrap();
    for (id, kept) in alive.iter_mut() {
        let Some(item) = listed.remove(id.as_str()) else {
            panic!("{id} was lost: {kept:?}\n{}", daemon.log());
        };
        let state = item["state"].as_str().unwrap();
        match kept.state {
            Some(acknowledged) => assert_eq!(state, acknowledged, "{id}: {}", daemon.log()),
            // The call was not answered: it was done or not.
            None => {
                let known = ["active", "suspended", "detached"];
                kept.state = known.into_iter().find(|known| *known == state);
                kept.process = None.or_else(|| {
                    let (process, ..) = kept.process.take()?;
                    let turns = process.turns().expect("it runs");
                    Some((process, Instant::now(), turns))
                });
            }
        }
        let sessions = item["sessions"].as_array().unwrap();
        assert!(sessions.iter().any(|s| s["id"] == kept.session.as_str()), "{id}: {item}");
        let Some((process, since, turns)) = &mut kept.process else { continue };
        let now = Process::read(process.pid);
        let now = now.unwrap_or_else(|| panic!("{id}: {process:?} is gone: {}", daemon.log()));
        assert_eq!((now.started, &now.name), (process.started, &process.name), "{id}: another");
        assert_ne!(now.state, "Z", "{id}: {now:?}");
        let reached = now.turns().expect("it runs");
        if state == "suspended" {
            // To be frozen is to go to sleep once more, which the kernel may count a moment later.
            let most = *turns + 1;
            assert!(reached <= most, "{id} goes on while it is suspended: {reached} > {most}");
        } else if since.elapsed() > Duration::from_secs(8) {
            assert!(reached > *turns, "{id} stands still: {now:?}");
            (*since, *turns) = (Instant::now(), reached);
        }
    }
    // One of them is also asked to do something.
    let active: Vec<_> = alive.iter().filter(|(_, kept)| kept.state == Some("active")).collect();
    let nth = usize::try_from(dice.below(active.len().max(1) as u64)).unwrap();
    if let Some((id, _)) = active.get(nth) {
        let path = format!("/v1/sandboxes/{id}/exec");
        let (status, done) = ask(&daemon.place, "POST", &path, Some(&run("echo hi"))).unwrap();
        assert_eq!((status, &done["stdout"]), (200, &json!("hi\n")), "{id}: {done}");
    }
    for id in listed.keys() {
        let (status, why) =
            ask(&daemon.place, "DELETE", &format!("/v1/sandboxes/{id}"), None).expect("it answers");
        assert_eq!(status, 204, "{id}: {why}");
    }
}

/// Waits for the moment to kill: after some calls of the clients, or right within a call.
fn lie_in_wait(client: &mut Client<'_>) -> Option<UnixStream> {
    let told = client.told;
    // So much is done first; a daemon that has just begun takes a while to make its first sandbox.
    let few = told.alive.lock().unwrap().len() < KEEP / 2;
    let goal = told.acknowledged() + if few { 8 } else { client.dice.below(10) };
    let deadline = Instant::now() + Duration::from_secs(1);
    while told.acknowledged() < goal && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (sent, within) = match client.dice.below(5) {
        0 | 1 => (None, 30_000),
        2 | 3 => {
            // Once it has made one, a request for the next is work on the kernel at once.
            client.make();
            let body = json!({ "select": { "use_pool": client.dice.below(2) == 0 } });
            (send(&client.place, "POST", "/v1/sandboxes", Some(&body)), 30_000)
        }
        _ => {
            // One that a client may be busy with at the same time, which is as well.
            let alive = told.alive.lock().unwrap();
            let nth = usize::try_from(client.dice.below(alive.len().max(1) as u64)).unwrap();
            let id = alive.keys().nth(nth)?.clone();
            drop(alive);
            let path = format!("/v1/sandboxes/{id}/exec");
            (send(&client.place, "POST", &path, Some(&run("sleep 0.01"))), 15_000)
        }
    };
    // Now and then at once.
    if client.dice.below(4) > 0 {
        std::thread::sleep(Duration::from_micros(client.dice.below(within)));
    }
    sent
}

#[test]
fn d1_a_daemon_killed_at_any_moment_loses_nothing_and_leaves_nothing() {
    let seed = std::process::id().into();
    eprintln!("seed {seed}");
    let mut dice = Dice(seed);
    let place = Place::with_settings("linux", SETTINGS);
    // What it needs on the host once and for all is there before.
    let (_, first) = Daemon::start_in(place, &["--stop-all"]).end("TERM");
    let sandboxes = first.place.path("state/sandboxes");
    let directories = [Path::new("/run/warren"), sandboxes.as_path()];
    let cleared = first.place.clone();
    let undertaker = Undertaker::new();
    let host = Host::look(&directories);
    let told = Told::default();
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| undertaker.work());
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let daemon = kill_and_look(first.into_place(), &told, &undertaker, &mut dice);
            eprintln!("{} kills in {:?}", kills(), began.elapsed());
            let (_, daemon) = daemon.end("TERM");
            let daemon = Daemon::start_in(daemon.into_place(), &["--stop-all"]);
            undertaker.spare.store(daemon.id(), Ordering::SeqCst);
            let (code, daemon) = daemon.end("TERM");
            assert_eq!(code, Some(0), "{}", daemon.log());
            host.assert_restored(&directories, None, PATIENCE);
        }));
        undertaker.done.store(true, Ordering::SeqCst);
        if let Err(panic) = result {
            // What was kept alive is not left behind by a test that failed.
            drop(Daemon::start_in(cleared, &["--stop-all"]).end("TERM"));
            std::panic::resume_unwind(panic);
        }
    });
    let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
    let (made, from_pool) = (count(&told.made), count(&told.from_pool));
    let (moved, ended) = (count(&told.moved), count(&told.ended));
    let alive = told.alive.lock().unwrap().len();
    eprintln!(
        "made {made} ({from_pool} of them pooled), moved {moved}, ended {ended}, {alive} alive"
    );
    assert!(told.acknowledged() > kills() * 5, "control: there was load");
    assert!(alive >= 24, "control: {alive} lived at the end");
}

/// Kills the daemon again and again under load, and looks at everything after each restart.
fn kill_and_look(place: Place, told: &Told, undertaker: &Undertaker, dice: &mut Dice) -> Daemon {
    let start = |place| {
        let daemon = Daemon::start_in(place, &[]);
        undertaker.spare.store(daemon.id(), Ordering::SeqCst);
        daemon
    };
    let mut daemon = start(place);
    for _ in 0..kills() {
        let stop = AtomicBool::new(false);
        let stop = &stop;
        daemon = std::thread::scope(|scope| {
            let mut clients = (0..=CLIENTS).map(|_| {
                let dice = Dice(dice.below(u64::MAX).max(1));
                Client { place: daemon.place.clone(), told, stop, dice }
            });
            let mut waits = clients.next().expect("there are some");
            for client in clients {
                scope.spawn(move || client.work());
            }
            let sent = lie_in_wait(&mut waits);
            stop.store(true, Ordering::SeqCst);
            let killed = daemon.kill();
            drop(sent);
            killed
        });
        daemon = start(daemon.into_place());
        check(&daemon, told, dice);
    }
    daemon
}
