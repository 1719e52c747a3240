//! A power cut: what was not synced is there, is not, or is torn.

use std::fs;
use std::path::Path;

use warren::store::Store;
use warren::store::sqlite::SqliteStore;

use crate::support::{beside, block_on, db, fast_dir, image, number, numbered, random};

const COMMITS: u64 = 32;

/// The files as they were before and after the commits, and once the log was taken over.
struct Disk {
    before: Vec<u8>,
    log: Vec<u8>,
    after: Vec<u8>,
}

/// Commits numbers to a store and keeps what each file went through.
fn record() -> Disk {
    let dir = fast_dir();
    let path = db(dir.path());
    drop(SqliteStore::open(&path).unwrap());
    let before = fs::read(&path).unwrap();
    let store = SqliteStore::open(&path).unwrap();
    for n in 1..=COMMITS {
        block_on(store.apply(numbered("counter", n))).unwrap();
        block_on(store.apply(numbered(&format!("only-{n}"), n))).unwrap();
    }
    assert!(fs::read(&path).unwrap() == before, "control: nothing was taken over yet");
    let log = fs::read(beside(&path, "-wal")).unwrap();
    drop(store);
    let after = fs::read(&path).unwrap();
    assert!(!beside(&path, "-wal").exists(), "control: everything was taken over");
    Disk { before, log, after }
}

/// Opens the files as a power cut left them and returns how many commits are there. They must be the
/// first ones, each of them whole.
fn commits_after(dir: &Path, file: &[u8], log: &[u8]) -> u64 {
    let path = db(dir);
    fs::write(&path, file).unwrap();
    fs::write(beside(&path, "-wal"), log).unwrap();
    fs::write(beside(&path, ".made"), "").unwrap();
    let image = image(&path).unwrap();
    let counter = number(&image, "counter").unwrap_or(0);
    let others = image.sandboxes.len() as u64 - u64::from(counter > 0);
    assert!(others == counter || others + 1 == counter, "{others} beside {counter}");
    for n in 1..=others {
        assert_eq!(number(&image, &format!("only-{n}")), Some(n));
    }
    counter + others
}

#[test]
fn after_a_power_cut_the_store_holds_the_commits_that_reached_the_disk() {
    let disk = record();
    let dir = fast_dir();
    // Every sector, and around it: a sector of 512 bytes is what a disk writes whole, mostly.
    let whole = (0..disk.log.len()).step_by(512);
    let torn = (0..disk.log.len()).step_by(4_120).flat_map(|frame| [frame + 1, frame + 31]);
    let mut lengths: Vec<_> = whole.chain(torn).chain([disk.log.len()]).collect();
    lengths.retain(|&length| length <= disk.log.len());
    lengths.sort_unstable();
    assert!(lengths.len() >= 2_000, "control: {} images", lengths.len());
    let mut last = 0;
    for &length in &lengths {
        let commits = commits_after(dir.path(), &disk.before, &disk.log[..length]);
        assert!(commits >= last, "{commits} after {last}, with {length} bytes of the log");
        last = commits;
    }
    assert_eq!(last, 2 * COMMITS, "control: the whole log holds all commits");
    println!("{} lengths of the log", lengths.len());
}

#[test]
fn sectors_that_reached_the_disk_out_of_order_or_as_zeros_cost_commits_and_never_the_store() {
    let disk = record();
    let dir = fast_dir();
    let mut lost = 0;
    for _ in 0..200 {
        let mut log = disk.log.clone();
        // Not the header, which is synced before anything follows it.
        let sector = 512 * (1 + usize::try_from(random(log.len() as u64 / 512 - 1)).unwrap());
        let end = (sector + 512).min(log.len());
        log[sector..end].fill(0);
        let before = commits_after(dir.path(), &disk.before, &log[..sector]);
        let commits = commits_after(dir.path(), &disk.before, &log);
        // It is later only if the sector held nothing but zeros.
        assert!(
            (before..=2 * COMMITS).contains(&commits),
            "{commits}, and {before} before {sector}"
        );
        lost += 2 * COMMITS - commits;
    }
    assert!(lost > 0, "control: a sector that is lost costs commits");
}

#[test]
fn a_power_cut_while_the_log_is_taken_over_costs_nothing() {
    let disk = record();
    let dir = fast_dir();
    for round in 0..300 {
        // Any of the pages are there, whole or torn, and the log still is.
        let mut file = disk.before.clone();
        file.resize(if round % 2 == 0 { disk.after.len() } else { disk.before.len() }, 0);
        for start in (0..file.len()).step_by(512) {
            if random(2) == 0 {
                let end = (start + 512).min(file.len());
                file[start..end].copy_from_slice(&disk.after[start..end]);
            }
        }
        assert_eq!(commits_after(dir.path(), &file, &disk.log), 2 * COMMITS);
    }
}
