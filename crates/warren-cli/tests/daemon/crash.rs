//! The daemon is killed at random moments, with real sandboxes and under load (D1, D2).

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Daemon, PATIENCE, Place};

/// How often the daemon is killed.
const KILLS: u64 = 200;
/// How many sandboxes are kept at most, so that there is room for those being made.
const KEEP: usize = 12;

/// What clients were told, and so what must be true after a restart.
#[derive(Default)]
struct Told {
    /// Sandboxes whose making was acknowledged, with a process that was seen to run.
    alive: BTreeSet<String>,
    /// Every id that was ever seen.
    seen: BTreeSet<String>,
    acknowledged: u64,
}

/// A small generator, so that a run can be repeated by its seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Starts something whose life can be seen; each beat is there whole or not at all.
const BEAT: &str = "cd /workspace; date +%s%N > beat; \
    (while :; do date +%s%N > next; mv next beat; sleep 0.05; done) > /dev/null 2> err &";

/// Makes sandboxes, starts something in them and ends others, until told to stop.
fn load(place: &Place, told: &Mutex<Told>, stop: &AtomicBool, mut dice: Dice) {
    while !stop.load(Ordering::SeqCst) {
        let full = told.lock().unwrap().alive.len() >= KEEP;
        if full || dice.below(4) == 0 {
            // Taken off the list before it is asked for: whether it was done is not known if the
            // daemon dies meanwhile.
            let chosen = {
                let mut told = told.lock().unwrap();
                let index = dice.below(told.alive.len().max(1) as u64);
                let chosen = told.alive.iter().nth(usize::try_from(index).unwrap()).cloned();
                chosen.inspect(|id| {
                    told.alive.remove(id);
                })
            };
            if let Some(id) = chosen {
                place.run(&["kill", &id]);
            }
            continue;
        }
        let made = place.run(&["create"]);
        let id = made.stdout.trim().to_owned();
        if made.code != Some(0) {
            continue;
        }
        told.lock().unwrap().seen.insert(id.clone());
        let begun = place.run(&["exec", &id, "--", "sh", "-c", BEAT]);
        let mut told = told.lock().unwrap();
        told.acknowledged += 1;
        // Made and acknowledged it is in any case; its process counts once that was too.
        if begun.code == Some(0) {
            told.alive.insert(id);
        }
    }
}

fn listed(daemon: &Daemon) -> BTreeSet<String> {
    let lines = daemon.ok(&["ls", "--json"]);
    let ids = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    ids.map(|object| object["id"].as_str().unwrap().to_owned()).collect()
}

/// Finds the control groups of sandboxes, in whatever hierarchy.
fn groups() -> String {
    let find = std::process::Command::new("find")
        .args(["/sys/fs/cgroup", "-maxdepth", "4", "-name", "warren-sbx-*"])
        .output();
    String::from_utf8(find.unwrap().stdout).unwrap()
}

#[test]
fn d1_a_daemon_killed_at_any_moment_loses_nothing_and_leaves_nothing() {
    let seed = std::process::id().into();
    eprintln!("seed {seed}");
    let mut dice = Dice(seed);
    let (mut daemon, told) =
        (Daemon::start_in(Place::with_backend("linux"), &[]), Mutex::default());
    let began = Instant::now();
    for round in 0..KILLS {
        let stop = AtomicBool::new(false);
        let (told, stop) = (&told, &stop);
        daemon = std::thread::scope(|scope| {
            for _ in 0..2 {
                let dice = Dice(dice.below(u64::MAX).max(1));
                let place = daemon.place.clone();
                scope.spawn(move || load(&place, told, stop, dice));
            }
            std::thread::sleep(Duration::from_millis(dice.below(250)));
            let (code, killed) = daemon.end("KILL");
            assert_eq!(code, None, "control: it was killed");
            stop.store(true, Ordering::SeqCst);
            killed
        });
        daemon = Daemon::start_in(daemon.into_place(), &[]);
        let known = listed(&daemon);
        let alive = told.lock().unwrap().alive.clone();
        let lost: Vec<_> = alive.difference(&known).collect();
        assert!(lost.is_empty(), "round {round}: lost {lost:?}: {}", daemon.log());
        let index = dice.below(alive.len().max(1) as u64);
        if let Some(id) = alive.iter().nth(usize::try_from(index).unwrap()) {
            let look = "cd /workspace; a=$(cat beat); sleep 0.3; b=$(cat beat); \
                        test -n \"$a\" -a -n \"$b\" -a \"$a\" != \"$b\" || \
                        { echo \"$a, $b\"; ls -la; cat err; ps x; exit 1; }";
            let beat = daemon.run(&["exec", id, "--", "sh", "-c", look]);
            assert_eq!(beat.code, Some(0), "round {round}: {id} has stopped: {beat:?}");
        }
    }
    let told = told.into_inner().unwrap();
    eprintln!("{} kills in {:?}, {} acknowledged", KILLS, began.elapsed(), told.acknowledged);
    assert!(told.acknowledged > KILLS / 10, "control: there was load: {}", told.acknowledged);
    let left: BTreeSet<_> = &listed(&daemon) | &told.seen;
    let (_, daemon) = daemon.end("TERM");
    let daemon = Daemon::start_in(daemon.into_place(), &["--stop-all"]);
    let (code, daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0), "{}", daemon.log());
    let deadline = Instant::now() + PATIENCE;
    let remains = |groups: &str| left.iter().filter(|id| groups.contains(*id)).count();
    while remains(&groups()) > 0 {
        assert!(Instant::now() < deadline, "left: {}", groups());
        std::thread::sleep(Duration::from_millis(50));
    }
    let homes = daemon.place.path("state/sandboxes");
    let homes = std::fs::read_dir(Path::new(&homes)).unwrap().count();
    assert_eq!(homes, 0, "no directory is left either");
}
