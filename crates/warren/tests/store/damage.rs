//! What was damaged is refused, or was not damaged where it matters; it never passes for empty.

use std::fs;
use std::path::Path;

use chrono::DateTime;
use serde_json::{Value, json};
use tempfile::TempDir;
use warren::store::sqlite::{Event, NewEvent, SqliteStore};
use warren::store::{Change, Image, Store, StoreError};
use warren::{SandboxId, SandboxSpec};

use crate::support::{beside, block_on, db, fast_dir, image, numbered, random, sandbox};

/// All that a store holds.
#[derive(Debug, PartialEq)]
struct Contents {
    image: Image,
    notes: Vec<(String, Value)>,
    events: Vec<Event>,
}

fn contents(path: &Path) -> Result<Contents, StoreError> {
    let store = SqliteStore::open(path)?;
    block_on(async {
        let (image, notes) = (store.load().await?, store.notes().await?);
        Ok(Contents { image, notes, events: store.events_after(0, 1_000).await? })
    })
}

async fn fill(store: &SqliteStore) {
    for n in 0..30 {
        store.apply(numbered(&format!("sbx-{n}"), n)).await.unwrap();
    }
    // One that is longer than a page.
    let mut large = sandbox("large", 1);
    let environment = (0..100).map(|n| (format!("NAME_{n}"), "value".repeat(20))).collect();
    large.spec = SandboxSpec { environment, ..SandboxSpec::default() };
    store.apply(vec![Change::PutSandbox(large)]).await.unwrap();
    store.apply(vec![Change::SetDefault(Some(SandboxId::from_string("sbx-1")))]).await.unwrap();
    for n in 0..5 {
        store.append(vec![], vec![(format!("note-{n}"), Some(json!(n)))]).await.unwrap();
    }
    for n in 0..20 {
        store.append(vec![event(n)], vec![]).await.unwrap();
    }
}

fn event(n: u64) -> NewEvent {
    NewEvent {
        at: DateTime::UNIX_EPOCH,
        kind: "sandbox.created".to_owned(),
        sandbox_id: Some(SandboxId::from_string("sbx-1")),
        session_id: None,
        client_id: Some("client".to_owned()),
        detail: json!({ "n": n }),
    }
}

/// A closed store: its file, and what it holds.
fn closed() -> (Vec<u8>, Contents) {
    let dir = fast_dir();
    let path = db(dir.path());
    block_on(fill(&SqliteStore::open(&path).unwrap()));
    let contents = contents(&path).unwrap();
    (fs::read(&path).unwrap(), contents)
}

/// Lays out a store as it is found at start.
fn lay_out(dir: &TempDir, file: &[u8], log: Option<&[u8]>) {
    let path = db(dir.path());
    fs::write(&path, file).unwrap();
    fs::write(beside(&path, ".made"), "").unwrap();
    match log {
        Some(log) => fs::write(beside(&path, "-wal"), log).unwrap(),
        None => drop(fs::remove_file(beside(&path, "-wal"))),
    }
}

/// Opens a file that was damaged: it is refused and left as it was, or all of it is there.
/// Tells whether it was refused.
#[track_caller]
fn refused_or_intact(dir: &TempDir, file: &[u8], expected: &Contents, what: &str) -> bool {
    lay_out(dir, file, None);
    match SqliteStore::open(&db(dir.path())).map(drop) {
        Ok(()) => {}
        Err(error) => {
            assert!(!matches!(error, StoreError::Busy | StoreError::Full), "{what}: {error:?}");
            assert!(fs::read(db(dir.path())).unwrap() == file, "{what}: refused, but changed");
            return true;
        }
    }
    match contents(&db(dir.path())) {
        Ok(found) => {
            assert_eq!(found, *expected, "{what}");
            false
        }
        Err(StoreError::Damaged { reason }) => {
            assert!(reason.contains("backup"), "{what}: no hint in {reason}");
            true
        }
        Err(error) => panic!("{what}: {error:?}"),
    }
}

#[test]
fn one_flipped_bit_is_noticed_or_harmless() {
    let (file, expected) = closed();
    let dir = fast_dir();
    let header = (0..100 * 8_u64).collect::<Vec<_>>();
    let anywhere = (0..900).map(|_| random(file.len() as u64 * 8));
    let mut refused = 0;
    for bit in header.into_iter().chain(anywhere) {
        let mut damaged = file.clone();
        damaged[usize::try_from(bit / 8).unwrap()] ^= 1 << (bit % 8);
        let what = format!("bit {} of byte {} flipped", bit % 8, bit / 8);
        refused += usize::from(refused_or_intact(&dir, &damaged, &expected, &what));
    }
    println!("{refused} of 1700 flipped bits were noticed, in a file of {} bytes", file.len());
    assert!(refused > 300, "control: {refused}");
}

#[test]
fn a_page_that_is_lost_or_in_the_wrong_place_is_noticed_or_harmless() {
    let (file, expected) = closed();
    let dir = fast_dir();
    let pages = file.len() / 4_096;
    let mut refused = 0;
    for page in 0..pages {
        let here = page * 4_096..(page + 1) * 4_096;
        let mut zeros = file.clone();
        zeros[here.clone()].fill(0);
        refused += usize::from(refused_or_intact(&dir, &zeros, &expected, &format!("0 {page}")));
        let other = (page + 1) % pages * 4_096;
        let mut copied = file.clone();
        copied.copy_within(other..other + 4_096, here.start);
        refused += usize::from(refused_or_intact(&dir, &copied, &expected, &format!("= {page}")));
    }
    // Two tables that are empty have the same page.
    assert!(refused >= 2 * pages - 2, "control: no page is free, yet only {refused} were noticed");
}

#[test]
fn a_truncated_file_is_refused_at_every_length() {
    let (file, expected) = closed();
    let dir = fast_dir();
    let around = (0..file.len()).step_by(4_096).flat_map(|page| [page, page + 1, page + 512]);
    for length in around.chain([16, 99, 100, 101, file.len() - 1]) {
        let what = format!("truncated to {length}");
        assert!(refused_or_intact(&dir, &file[..length], &expected, &what), "{what}");
    }
    assert!(!refused_or_intact(&dir, &file, &expected, "control"), "control: the whole file opens");
}

#[test]
fn a_log_whose_header_is_damaged_is_refused() {
    let dir = fast_dir();
    let path = db(dir.path());
    let store = SqliteStore::open(&path).unwrap();
    block_on(fill(&store));
    let (file, log) = (fs::read(&path).unwrap(), fs::read(beside(&path, "-wal")).unwrap());
    drop(store);
    let expected = contents(&path).unwrap();
    for bit in 0..32 * 8 {
        let mut damaged = log.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        lay_out(&dir, &file, Some(&damaged));
        let error = SqliteStore::open(&path).unwrap_err();
        assert!(matches!(error, StoreError::Damaged { .. }), "bit {bit}: {error:?}");
        assert!(fs::read(beside(&path, "-wal")).unwrap() == damaged, "the log is left as it was");
    }
    lay_out(&dir, &file, Some(&log));
    assert_eq!(contents(&path).unwrap(), expected, "control: the log as it was");
}

#[test]
fn a_store_that_was_lost_is_not_taken_for_a_new_one() {
    let (file, _) = closed();
    let dir = fast_dir();
    let path = db(dir.path());
    let reason = |what: &str| match SqliteStore::open(&path) {
        Err(StoreError::Damaged { reason }) => reason,
        other => panic!("{what}: {other:?}"),
    };

    lay_out(&dir, b"", None);
    assert!(reason("emptied").contains("now the file is empty"));
    fs::remove_file(&path).unwrap();
    assert!(reason("removed").contains("now the file is gone"));
    assert!(!path.exists(), "nothing was put in its place");

    // A valid database, and nothing in it.
    let blank = rusqlite::Connection::open(&path).unwrap();
    blank.pragma_update(None, "journal_mode", "WAL").unwrap();
    drop(blank);
    assert_eq!(fs::metadata(&path).unwrap().len(), 4_096, "control: it has a header");
    assert!(reason("replaced by an empty database").contains("now the file is empty"));

    for other in ["not a database, but long enough to be read as one".repeat(100), "x".into()] {
        lay_out(&dir, other.as_bytes(), None);
        reason("not a database");
        assert_eq!(fs::read_to_string(&path).unwrap(), other, "left as it was");
    }

    // Without the marker, the log still tells.
    fs::remove_file(&path).unwrap();
    fs::remove_file(beside(&path, ".made")).unwrap();
    fs::write(beside(&path, "-wal"), &file).unwrap();
    assert!(reason("only the log is left").contains("its log is still there"));
    assert!(beside(&path, "-wal").exists(), "the log is left for whoever can save it");

    fs::remove_file(beside(&path, "-wal")).unwrap();
    assert_eq!(image(&path).unwrap(), Image::default(), "control: where nothing was, one is made");
}

#[test]
fn a_database_of_another_program_is_refused_and_left_alone() {
    let dir = fast_dir();
    let path = db(dir.path());
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("CREATE TABLE cookies (x); INSERT INTO cookies VALUES (1)").unwrap();
    drop(other);
    let before = fs::read(&path).unwrap();
    let error = SqliteStore::open(&path).unwrap_err();
    assert!(error.to_string().contains("none of Warren's"), "{error}");
    assert!(fs::read(&path).unwrap() == before);
}

#[test]
fn a_store_of_a_newer_version_is_refused_with_both_numbers_and_left_alone() {
    let dir = fast_dir();
    let path = db(dir.path());
    drop(SqliteStore::open(&path).unwrap());
    let newer = rusqlite::Connection::open(&path).unwrap();
    newer.execute_batch("PRAGMA user_version = 99; CREATE TABLE later (x)").unwrap();
    // As after a crash: the version is still in the log alone.
    let (file, log) = (fs::read(&path).unwrap(), fs::read(beside(&path, "-wal")).unwrap());
    drop(newer);
    lay_out(&dir, &file, Some(&log));
    let error = SqliteStore::open(&path).unwrap_err();
    let StoreError::Io { source, .. } = &error else { panic!("{error:?}") };
    assert!(source.to_string().contains("version 99"), "{source}");
    assert!(source.to_string().contains("up to 2"), "{source}");
    assert!(fs::read(&path).unwrap() == file);
    assert!(fs::read(beside(&path, "-wal")).unwrap() == log);
}
