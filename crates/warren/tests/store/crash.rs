//! `kill -9`: the page cache survives, the process does not.

use std::io::{self, BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use warren::store::Store;
use warren::store::sqlite::SqliteStore;

use crate::support::{block_on, db, fast_dir, image, number, numbered, random};

/// Tells the child where its store is.
const STORE: &str = "WARREN_TEST_STORE";
const CHILD: &str = "crash::each_number_is_acknowledged_once_it_is_applied";
const WRITERS: usize = 4;

fn name(writer: usize) -> String {
    format!("writer-{writer}")
}

/// Counts on from what the store holds and says each number once it is acknowledged.
async fn count(store: Arc<SqliteStore>, writer: usize, until: u64) {
    let name = name(writer);
    let start = number(&store.load().await.unwrap(), &name).unwrap_or(0);
    for n in start + 1..=until {
        store.apply(numbered(&name, n)).await.unwrap();
        // In one write, so that a line is there or not; the harness may have begun one of its own.
        io::stdout().write_all(format!("\nack {writer} {n}\n").as_bytes()).unwrap();
    }
}

/// A test by itself, and the process that is killed in the other one.
#[test]
fn each_number_is_acknowledged_once_it_is_applied() {
    let dir = fast_dir();
    let (path, until) = match std::env::var_os(STORE) {
        Some(path) => (PathBuf::from(path), u64::MAX),
        None => (db(dir.path()), 20),
    };
    let store = Arc::new(SqliteStore::open(&path).unwrap());
    block_on(async {
        let mut writers = tokio::task::JoinSet::new();
        for writer in 0..WRITERS {
            writers.spawn(count(Arc::clone(&store), writer, until));
        }
        writers.join_all().await;
    });
    drop(store);
    let image = image(&path).unwrap();
    for writer in 0..WRITERS {
        assert_eq!(number(&image, &name(writer)), Some(until));
    }
}

fn child(path: &std::path::Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", CHILD, "--nocapture"])
        .env(STORE, path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Lets a child count for a while, kills it, and returns the last number each writer acknowledged.
fn killed(path: &std::path::Path, after: Duration) -> [u64; WRITERS] {
    let mut child = child(path);
    let output = BufReader::new(child.stdout.take().unwrap());
    let reader = std::thread::spawn(move || {
        let mut last = [0; WRITERS];
        for line in output.lines().map(Result::unwrap) {
            let words: Vec<_> = line.split(' ').collect();
            if let ["ack", writer, n] = words[..] {
                last[writer.parse::<usize>().unwrap()] = n.parse().unwrap();
            }
        }
        last
    });
    std::thread::sleep(after);
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!errors.contains("panicked"), "the child failed by itself: {errors}");
    reader.join().unwrap()
}

#[test]
fn what_was_acknowledged_outlives_a_kill_at_any_moment() {
    const KILLS: usize = 100;
    let began = Instant::now();
    let (mut total, mut fresh, mut busy) = (0, 0, 0);
    let mut dir = tempfile::tempdir().unwrap();
    for round in 0..KILLS {
        if round % 5 == 0 {
            // A new store now and then, to be killed while it is being made.
            dir = tempfile::tempdir().unwrap();
        }
        let path = db(dir.path());
        let last = killed(&path, Duration::from_micros(random(70_000)));
        let image = image(&path).unwrap();
        for (writer, &acknowledged) in last.iter().enumerate() {
            let stored = number(&image, &name(writer)).unwrap_or(0);
            assert!(stored >= acknowledged, "round {round}: {stored} of {acknowledged}");
            if acknowledged > 0 {
                assert!(stored <= acknowledged + 1, "round {round}: one call is in flight");
            }
        }
        total += last.iter().sum::<u64>();
        fresh += usize::from(image.sandboxes.is_empty());
        busy += usize::from(last.iter().any(|&n| n > 0));
    }
    println!(
        "{KILLS} kills in {:?}: {busy} of a busy store, {fresh} before the first commit, \
         numbers up to {total} in sum",
        began.elapsed()
    );
    assert!(busy >= 20, "control: most children got to work before they were killed ({busy})");
}
