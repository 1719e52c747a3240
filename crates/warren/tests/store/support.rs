//! Stores and records to test with.

use std::future::Future;
use std::path::{Path, PathBuf};

use chrono::DateTime;
use tempfile::TempDir;
use uuid::Uuid;
use warren::store::sqlite::SqliteStore;
use warren::store::{Change, Image, Phase, SandboxRecord, SessionRecord, Store, StoreError};
use warren::{Base, Reach, SandboxId, SandboxSession, SandboxSpec};

/// Makes a directory in memory, where thousands of stores cost no sync of a disk.
pub(crate) fn fast_dir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// Returns the file of the store in `dir`.
pub(crate) fn db(dir: &Path) -> PathBuf {
    dir.join("warren.db")
}

/// Returns the path of what lies beside a store.
pub(crate) fn beside(db: &Path, suffix: &str) -> PathBuf {
    PathBuf::from(format!("{}{suffix}", db.display()))
}

/// Opens a store and reads all of it.
pub(crate) fn image(db: &Path) -> Result<Image, StoreError> {
    let store = SqliteStore::open(db)?;
    block_on(store.load())
}

/// Returns a sandbox that carries a number.
pub(crate) fn sandbox(id: &str, number: u64) -> SandboxRecord {
    SandboxRecord {
        id: SandboxId::from_string(id),
        backend: "fake".to_owned(),
        spec: SandboxSpec::default(),
        phase: Phase::Running,
        owner: Some("client".to_owned()),
        used: true,
        anchor: Some(number.to_string()),
        created_at: DateTime::UNIX_EPOCH,
        base: Base::default(),
        receipt: None,
        reach: Reach::default(),
    }
}

/// Returns a session that carries a number.
pub(crate) fn session(id: &str, number: u64) -> SessionRecord {
    let mut session = SandboxSession::new(SandboxId::from_string(id), "client");
    session.session_id = id.to_owned();
    (session.created_at, session.last_active_at) = (DateTime::UNIX_EPOCH, DateTime::UNIX_EPOCH);
    SessionRecord { session, kept_alive: false, rested_ms: number }
}

/// Returns changes that only together leave `id` at `number`.
pub(crate) fn numbered(id: &str, number: u64) -> Vec<Change> {
    vec![Change::PutSandbox(sandbox(id, number)), Change::PutSession(session(id, number))]
}

/// Returns the number that `id` is at; its two halves must agree.
pub(crate) fn number(image: &Image, id: &str) -> Option<u64> {
    let sandbox = image.sandboxes.iter().find(|record| record.id.as_str() == id);
    let session = image.sessions.iter().find(|record| record.session.session_id == id);
    let numbers = (
        sandbox.map(|record| record.anchor.as_ref().unwrap().parse::<u64>().unwrap()),
        session.map(|record| record.rested_ms),
    );
    assert_eq!(numbers.0, numbers.1, "half of an apply is there");
    numbers.0
}

/// Returns a random number below `bound`.
pub(crate) fn random(bound: u64) -> u64 {
    u64::try_from(Uuid::new_v4().as_u128() >> 80).unwrap() % bound
}
