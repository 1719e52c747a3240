//! Everything at once, for as long as one likes, at the limit of what the daemon may have, on every backend.
//!
//! Clients make, use, fork, snapshot, suspend and end sandboxes at random while the daemon is killed again and
//! again; then for a while it lives. In the end nothing is left on the host, the daemon has no more open
//! than before, and has not grown.
//!
//! `./test` does it for a minute. `WARREN_SOAK_SECONDS=1800 cargo nextest run -P soak --workspace --test daemon soak::` for
//! half an hour. `WARREN_SOAK_BACKENDS` names some of the backends; `WARREN_SOAK_PROGRAM` is another build of the daemon;
//! with `WARREN_SOAK_BESIDE` others may make sandboxes on this host meanwhile: only what bears a name of ours is a leak.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

mod client;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use self::client::Client;
use crate::calls::{Dice, ask};
use crate::host::{Host, Kind, Names, Undertaker};
use crate::support::{Daemon, PATIENCE, Place, greet};

/// A backend that takes part.
#[derive(Debug)]
struct Backend {
    name: &'static str,
    /// What has to be asked for to be given it.
    level: &'static str,
    /// Where its sandboxes have their directories, in the daemon's.
    homes: &'static str,
    /// Whether its sandboxes can be saved; those of others refuse to be.
    snapshots: bool,
    /// Whether its sandboxes can be let reach anything.
    network: bool,
}

const BACKENDS: [Backend; 5] = [
    Backend {
        name: "linux",
        level: "namespace",
        homes: "sandboxes",
        snapshots: true,
        network: true,
    },
    Backend {
        name: "landlock",
        level: "process",
        homes: "landlock",
        snapshots: false,
        network: false,
    },
    Backend {
        name: "oci-crun",
        level: "container",
        homes: "sandboxes-oci-crun",
        snapshots: true,
        network: true,
    },
    Backend {
        name: "oci-runc",
        level: "container",
        homes: "sandboxes-oci-runc",
        snapshots: true,
        network: true,
    },
    Backend {
        name: "oci-runsc",
        level: "kernel",
        homes: "sandboxes-oci-runsc",
        snapshots: true,
        network: false,
    },
];

/// How many clients there are at once.
const CLIENTS: u64 = 4;
/// Fewer than all clients want, so that the limit is met.
const SETTINGS: &[(&str, &str)] = &[
    ("WARREN_MAX_SANDBOXES", "20"),
    ("WARREN_POOL_MIN_WARM", "2"),
    ("WARREN_POOL_MAX_WARM", "3"),
    ("WARREN_TIMEOUTS_IDLE", "2h"),
];
const SECONDS: u64 = 60;
/// How long a daemon lives that is to be killed.
const LIFE: Duration = Duration::from_secs(2);
/// How long what it made may be there before a client was told of it.
const STRANGE: Duration = Duration::from_secs(20);
/// What the daemon's memory may differ by between two moments of rest, in kB.
const SLACK: u64 = 8 << 10;

/// What was done on a backend.
#[derive(Debug, Default)]
struct Done {
    made: AtomicU64,
    refused: AtomicU64,
    ran: AtomicU64,
    reached: AtomicU64,
    moved: AtomicU64,
    kept: AtomicU64,
    ended: AtomicU64,
}

/// Everything that one run has to do with.
struct Soak {
    backends: Vec<(&'static Backend, Done)>,
    undertaker: Undertaker,
    kills: AtomicU64,
    /// Where on this host somebody greets who comes.
    port: u16,
    /// The ids of what clients know to be theirs.
    known: Mutex<BTreeSet<String>>,
}

/// What is there without a client that knows it, since when: a daemon made it and was killed before it had said so.
/// It would be there for hours, and in the end nothing else.
#[derive(Debug, Default)]
struct Strangers {
    since: BTreeMap<String, Instant>,
    ended: u64,
}

/// What a process has open, and its memory in kB.
fn standing(daemon: &Daemon) -> (usize, u64) {
    let place = format!("/proc/{}", daemon.pid());
    let status = fs::read_to_string(format!("{place}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let memory = line.trim().trim_end_matches(" kB").parse().unwrap();
    (fs::read_dir(format!("{place}/fd")).unwrap().count(), memory)
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

impl Soak {
    /// Starts a daemon, whose end is ours to wait for.
    fn start(&self, place: Place, args: &[&str]) -> Daemon {
        let daemon = Daemon::start_in(place, args);
        self.undertaker.spare.store(daemon.id(), Ordering::SeqCst);
        daemon
    }

    /// Has clients at work for a while, and then ends what they have.
    fn load(
        &self,
        daemon: Daemon,
        names: &mut Names,
        dice: &mut Dice,
        (time, life): (Duration, Option<Duration>),
    ) -> Daemon {
        let (stop, began) = (AtomicBool::new(false), Instant::now());
        let stop = &stop;
        /// Has the clients end when we do, by a panic too.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let place = daemon.place.clone();
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|name| {
                    let (place, dice) = (place.clone(), Dice(dice.below(u64::MAX).max(1)));
                    let client = Client { place, name, stop, soak: self, dice, own: Vec::new() };
                    scope.spawn(move || client.work())
                })
                .collect();
            let stops = Stop(stop);
            let (mut daemon, mut strangers) = (daemon, Strangers::default());
            let broken = |clients: &[std::thread::ScopedJoinHandle<'_, _>]| {
                clients.iter().any(std::thread::ScopedJoinHandle::is_finished)
            };
            while began.elapsed() < time && !broken(&clients) {
                let turn = Instant::now();
                names.note();
                self.sweep(&place, &mut strangers, STRANGE);
                match life {
                    None => std::thread::sleep(Duration::from_millis(200)),
                    Some(life) => {
                        std::thread::sleep(life / 2 + life.mul_f64(dice.below(100) as f64 / 100.0));
                        daemon = self.start(daemon.kill().into_place(), &[]);
                        self.kills.fetch_add(1, Ordering::SeqCst);
                    }
                }
                if turn.elapsed() > Duration::from_secs(10) {
                    eprintln!("{:?} in, a turn took {:?}", began.elapsed(), turn.elapsed());
                }
            }
            drop(stops);
            for client in clients {
                let own = client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                for own in own {
                    let path = format!("/v1/sandboxes/{}", own.id);
                    let (status, answer) = ask(&place, "DELETE", &path, None).expect("it answers");
                    assert!(matches!(status, 204 | 404), "{own:?}: {status} {answer}");
                }
            }
            self.known.lock().unwrap().clear();
            self.sweep(&place, &mut strangers, Duration::ZERO);
            if life.is_none() {
                assert_eq!(strangers.ended, 0, "control: one that lives says what it made");
            }
            eprintln!("{} that nobody knew", strangers.ended);
            daemon
        })
    }

    /// Ends what has been there for a while and is nobody's.
    fn sweep(&self, place: &Place, strangers: &mut Strangers, patience: Duration) {
        for kind in ["sandboxes", "snapshots"] {
            let path = format!("/v1/{kind}");
            let Some((200, list)) = ask(place, "GET", &path, None) else { continue };
            for item in list["items"].as_array().unwrap() {
                let id = item["id"].as_str().unwrap().to_owned();
                if self.known.lock().unwrap().contains(&id) {
                    continue;
                }
                let since = *strangers.since.entry(id.clone()).or_insert_with(Instant::now);
                if since.elapsed() < patience {
                    continue;
                }
                let ended = ask(place, "DELETE", &format!("{path}/{id}"), None);
                strangers.ended += u64::from(ended.is_some_and(|(status, _)| status == 204));
            }
        }
    }

    /// Kills daemons under load, then has one live under load: it must not grow.
    fn work(&self, place: Place, names: &mut Names, time: Duration) -> Daemon {
        let seed = std::process::id().into();
        eprintln!("seed {seed}");
        let mut dice = Dice(seed);
        let daemon = self.start(place, &[]);
        let fresh = standing(&daemon);
        let daemon = self.load(daemon, names, &mut dice, (time / 2, Some(LIFE)));
        // From here on one lives. What it allocates once it has after a while.
        let daemon = self.load(daemon, names, &mut dice, (time / 6, None));
        std::thread::sleep(Duration::from_secs(1));
        let before = standing(&daemon);
        let daemon = self.load(daemon, names, &mut dice, (time / 3, None));
        let after = assert_at_rest(&daemon, (before.0 + 2, before.1));
        eprintln!("descriptors and kB: {fresh:?} fresh; at rest {before:?}, then {after:?}");
        let (_, snapshots) = ask(&daemon.place, "GET", "/v1/snapshots", None).expect("it answers");
        assert_eq!(snapshots["items"], json!([]), "all were forgotten");
        daemon
    }

    /// Prints what was done, and looks whether it was enough to mean anything.
    fn report(&self, names: &Names) {
        let (kills, sandboxes) = (self.kills.load(Ordering::SeqCst), names.count());
        eprintln!("{kills} kills, {sandboxes} sandboxes with those that nobody asked for");
        for (backend, done) in &self.backends {
            eprintln!("{}: {done:?}", backend.name);
            let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
            let mut all = vec![&done.made, &done.ran, &done.moved, &done.ended];
            all.extend(backend.snapshots.then_some(&done.kept));
            let enough = all.into_iter().all(|counter| count(counter) >= 3)
                && (count(&done.reached) > 0) == backend.network;
            assert!(enough, "control: everything was done: {} {done:?}", backend.name);
        }
    }
}

#[test]
fn a_daemon_at_its_limit_leaves_nothing_and_does_not_grow() {
    let set = |name: &str| std::env::var(name).ok();
    let seconds = set("WARREN_SOAK_SECONDS").map(|text| text.parse().expect("a number"));
    let wanted = set("WARREN_SOAK_BACKENDS");
    let wanted: Option<Vec<_>> = wanted.as_deref().map(|names| names.split(',').collect());
    for name in wanted.iter().flatten() {
        assert!(BACKENDS.iter().any(|backend| backend.name == *name), "no backend {name}");
    }
    let backends: Vec<_> = BACKENDS
        .iter()
        .filter(|backend| wanted.as_ref().is_none_or(|wanted| wanted.contains(&backend.name)))
        .map(|backend| (backend, Done::default()))
        .collect();
    let names: Vec<_> = backends.iter().map(|(backend, _)| backend.name).collect();
    let program = set("WARREN_SOAK_PROGRAM").map(PathBuf::from);
    let port = greet();
    let world = ("WARREN_EGRESS_HOSTS", &*format!("world.test:{port}=127.0.0.1").leak());
    let settings = [SETTINGS, &[world]].concat().leak();
    let place = Place::with_settings(names.join(",").leak(), settings).with_program(program);
    let (undertaker, kills, known) = (Undertaker::new(), AtomicU64::new(0), Mutex::default());
    let soak = Soak { backends, undertaker, kills, port, known };
    let is_alone = set("WARREN_SOAK_BESIDE").is_none();
    run(&soak, place, is_alone, Duration::from_secs(seconds.unwrap_or(SECONDS)));
}

fn run(soak: &Soak, place: Place, is_alone: bool, time: Duration) {
    // What it needs on the host once and for all is there before.
    let (_, first) = Daemon::start_in(place, &["--stop-all"]).end("TERM");
    let homes = |(backend, _): &(&Backend, _)| first.place.path("state").join(backend.homes);
    let homes: Vec<_> = soak.backends.iter().map(homes).collect();
    let directories: Vec<_> =
        homes.iter().map(PathBuf::as_path).chain([Path::new("/run/warren")]).collect();
    let cleared = first.place.clone();
    let mut names = Names::of(&first.place.path(""), &homes);
    let host = Host::look(&directories);
    std::thread::scope(|scope| {
        scope.spawn(|| soak.undertaker.work());
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let daemon = soak.work(first.into_place(), &mut names, time);
            names.note();
            // What is warm is there still.
            let there = host.left(&directories, Some(&names));
            let found = |kind| there.iter().any(|(other, _)| *other == kind);
            let all = [Kind::Process, Kind::Group, Kind::Directory, Kind::Namespace].map(found);
            assert_eq!(all, [true; 4], "control: what is there is found: {there:#?}");
            let (_, daemon) = daemon.end("TERM");
            let daemon = soak.start(daemon.into_place(), &["--stop-all"]);
            let (code, daemon) = daemon.end("TERM");
            assert_eq!(code, Some(0), "{}", daemon.log());
            names.note();
            let names = (!is_alone).then_some(&names);
            host.assert_restored(&directories, names, PATIENCE);
        }));
        soak.undertaker.done.store(true, Ordering::SeqCst);
        if let Err(panic) = result {
            let log = fs::read_to_string(cleared.path("log")).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            eprintln!(
                "the last that it said:\n{}",
                lines[lines.len().saturating_sub(30)..].join("\n")
            );
            // What was kept alive is not left behind by a test that failed.
            drop(Daemon::start_in(cleared, &["--stop-all"]).end("TERM"));
            std::panic::resume_unwind(panic);
        }
    });
    soak.report(&names);
}
