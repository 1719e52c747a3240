//! A store in an SQLite file: one writer thread, group commits, and no commit lost to `kill -9`.
//!
//! ```text
//! apply, append, remember, ...  --bounded channel-->  writer thread  -->  PATH, PATH-wal
//!                               <--one answer each--  (all that wait, in one transaction)
//! ```
//!
//! A commit is written to the log without an fsync, so it outlives the process and not a power cut,
//! which takes the newest commits and never the file: what ran in the sandboxes is gone then as well.
//!
//! Beside `PATH` and SQLite's own `PATH-wal` lie `PATH.lock`, held while the store is open, and
//! `PATH.made`, which says that there was a store: without it, a lost file would pass for a new one.
//! Each row carries a checksum, because SQLite checks the shape of its pages and not what they say.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use async_trait::async_trait;
use rusqlite::Connection;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::{Change, Image, Store, StoreError};
use rows::Row;
use writer::{Job, Kind, Writer};

mod failure;
mod file;
mod rows;
mod schema;
mod writer;

pub use rows::{Answer, Event, NewEvent};

/// How many calls may wait for the writer before the next one waits to be let in.
const WAITING: usize = 1_024;

/// How much of what only grows is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// How many events; the oldest go first.
    pub events: u32,
    /// How many answers to idempotent requests; the oldest go first.
    pub answers: u32,
}

impl Default for Retention {
    fn default() -> Self {
        Self { events: 10_000, answers: 10_000 }
    }
}

/// A store in an SQLite file. Dropping it writes what still waits and closes the file.
///
/// A call whose future is dropped half-way may have been carried out or not.
#[derive(Debug)]
pub struct SqliteStore {
    path: PathBuf,
    retention: Retention,
    /// Both are there until the store is dropped.
    jobs: Option<mpsc::Sender<Job>>,
    writer: Option<JoinHandle<()>>,
}

impl SqliteStore {
    /// Opens the store at `path`, or makes it where there never was one, readable by its owner alone.
    ///
    /// What cannot be trusted (damaged, truncated, gone, of a newer version) is refused and left as it
    /// is, and so is a store that another process holds.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        Self::open_keeping(path, Retention::default())
    }

    /// Opens the store at `path` as [`open`](Self::open) does, with a retention of its own.
    pub fn open_keeping(path: &Path, retention: Retention) -> Result<Self, StoreError> {
        let file = file::open(path)?;
        let path = file.path.clone();
        let (jobs, mailbox) = mpsc::channel(WAITING);
        let writer = std::thread::Builder::new()
            .name("warren-store".to_owned())
            .spawn(move || Writer::new(file).run(mailbox))
            .map_err(|e| StoreError::io("start the writer of", e))?;
        Ok(Self { path, retention, jobs: Some(jobs), writer: Some(writer) })
    }

    /// Returns where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends events and sets notes, all or nothing, and returns the ids of the events, each higher
    /// than any before it. A note that is set to `None` is removed.
    pub async fn append(
        &self,
        events: Vec<NewEvent>,
        notes: Vec<(String, Option<Value>)>,
    ) -> Result<Vec<i64>, StoreError> {
        let kept = self.retention.events;
        let notes = notes.iter().map(Row::note).collect::<Result<Vec<_>, _>>()?;
        let append = move |db: &Connection| {
            notes.iter().try_for_each(|note| note.write(db))?;
            events.iter().map(|event| rows::append_event(db, event, kept)).collect()
        };
        self.call(Kind::Write, append).await
    }

    /// Returns all notes, each a name and a value.
    pub async fn notes(&self) -> Result<Vec<(String, Value)>, StoreError> {
        self.call(Kind::Read, rows::notes).await
    }

    /// Returns up to `limit` events after the one called `id`, oldest first; 0 is before the first.
    ///
    /// Ids have no gaps: if the first event is not `id + 1`, those between are no longer kept.
    pub async fn events_after(&self, id: i64, limit: u32) -> Result<Vec<Event>, StoreError> {
        self.call(Kind::Read, move |db| rows::events_after(db, id, limit)).await
    }

    /// Notes the answer to an idempotent request. The first answer stands: if there already is one
    /// under this tenant and key, nothing is written and that one is returned.
    pub async fn remember(
        &self,
        tenant: &str,
        key: &str,
        request_hash: &[u8],
        response: Value,
    ) -> Result<Option<Answer>, StoreError> {
        let (tenant, key) = (tenant.to_owned(), key.to_owned());
        let answer =
            Answer { request_hash: request_hash.to_owned(), response, at: chrono::Utc::now() };
        let kept = self.retention.answers;
        self.call(Kind::Write, move |db| rows::remember(db, &tenant, &key, &answer, kept)).await
    }

    /// Returns the answer that was given to an idempotent request, if it is still kept.
    pub async fn recall(&self, tenant: &str, key: &str) -> Result<Option<Answer>, StoreError> {
        let (tenant, key) = (tenant.to_owned(), key.to_owned());
        self.call(Kind::Read, move |db| rows::recall(db, &tenant, &key)).await
    }

    /// Has the writer do `work`, which it may do twice: a transaction that fails for one caller is
    /// taken back and tried again for each of them alone.
    async fn call<T, F>(&self, kind: Kind, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: FnMut(&Connection) -> Result<T, StoreError> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let jobs = self.jobs.as_ref().ok_or(StoreError::Closed)?;
        jobs.send(Job::new(kind, work, reply)).await.map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn load(&self) -> Result<Image, StoreError> {
        self.call(Kind::Read, rows::load).await
    }

    async fn apply(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        // Here and not in the writer: what cannot be written costs nobody else a second try.
        let rows = changes.iter().map(Row::new).collect::<Result<Vec<_>, _>>()?;
        self.call(Kind::Write, move |db| rows.iter().try_for_each(|row| row.write(db))).await
    }
}

impl Drop for SqliteStore {
    fn drop(&mut self) {
        // The writer ends when nobody can send to it any more and it has done all that was sent.
        drop(self.jobs.take());
        if let Some(writer) = self.writer.take() {
            // A writer that panicked has closed the file on its way out.
            drop(writer.join());
        }
    }
}
