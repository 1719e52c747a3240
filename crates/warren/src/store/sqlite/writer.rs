//! The one thread that touches the database.
//!
//! Whatever waits is committed in one transaction, so that many callers cost little more than one.
//! A transaction that fails is taken back and tried again for each caller alone: one bad change
//! fails nobody else's.

use std::fmt;
use std::slice;

use rusqlite::{Connection, Transaction, TransactionBehavior};
use tokio::sync::{mpsc, oneshot};

use super::StoreError;
use super::failure::failure;
use super::file::StoreFile;

/// How many callers share a transaction at most, so that the first does not wait for all the others.
const BATCH: usize = 256;

/// What a job needs of the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// To see what is committed.
    Read,
    /// To commit what outlives the process.
    Write,
}

/// One caller's work, and where the answer goes.
pub(super) struct Job {
    kind: Kind,
    work: Box<dyn Work>,
}

impl Job {
    pub(super) fn new<T, F>(
        kind: Kind,
        work: F,
        reply: oneshot::Sender<Result<T, StoreError>>,
    ) -> Self
    where
        T: Send + 'static,
        F: FnMut(&Connection) -> Result<T, StoreError> + Send + 'static,
    {
        Self { kind, work: Box::new(Pending { work, result: None, reply }) }
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("kind", &self.kind).finish_non_exhaustive()
    }
}

trait Work: Send {
    /// Does the work and keeps its result; the last run counts.
    fn run(&mut self, db: &Connection) -> Result<(), StoreError>;
    /// Tells the caller how it ended.
    fn answer(self: Box<Self>, outcome: Result<(), StoreError>);
}

struct Pending<T, F> {
    work: F,
    result: Option<T>,
    reply: oneshot::Sender<Result<T, StoreError>>,
}

impl<T, F> Work for Pending<T, F>
where
    T: Send,
    F: FnMut(&Connection) -> Result<T, StoreError> + Send,
{
    fn run(&mut self, db: &Connection) -> Result<(), StoreError> {
        self.result = Some((self.work)(db)?);
        Ok(())
    }

    fn answer(self: Box<Self>, outcome: Result<(), StoreError>) {
        let Self { result, reply, .. } = *self;
        // The caller may have gone meanwhile; what was done stands.
        drop(reply.send(outcome.and_then(|()| result.ok_or(StoreError::Closed))));
    }
}

/// Owns the open file until nobody can ask for anything any more.
#[derive(Debug)]
pub(super) struct Writer {
    file: StoreFile,
}

impl Writer {
    pub(super) fn new(file: StoreFile) -> Self {
        Self { file }
    }

    /// Does what is asked, in the order it was asked, until every sender is gone.
    pub(super) fn run(mut self, mut mailbox: mpsc::Receiver<Job>) {
        let mut batch = Vec::with_capacity(BATCH);
        while mailbox.blocking_recv_many(&mut batch, BATCH) > 0 {
            let mut writes = Vec::with_capacity(batch.len());
            for job in batch.drain(..) {
                if job.kind == Kind::Read {
                    // A read sees what was asked for before it, and only once that is committed.
                    self.commit(std::mem::take(&mut writes));
                    self.read(job);
                } else {
                    writes.push(job);
                }
            }
            self.commit(writes);
        }
    }

    fn read(&self, mut job: Job) {
        let outcome = job.work.run(&self.file.db);
        job.work.answer(outcome);
    }

    fn commit(&mut self, mut jobs: Vec<Job>) {
        if jobs.len() > 1 && self.attempt(&mut jobs).is_ok() {
            jobs.into_iter().for_each(|job| job.work.answer(Ok(())));
            return;
        }
        for mut job in jobs {
            let mut outcome = self.attempt(slice::from_mut(&mut job));
            if matches!(outcome, Err(StoreError::Full)) && self.shrink_log().is_ok() {
                outcome = self.attempt(slice::from_mut(&mut job));
            }
            job.work.answer(outcome);
        }
    }

    /// Takes the log over into the file and gives its room back, which may be room enough.
    fn shrink_log(&self) -> Result<(), StoreError> {
        let shrunk = self.file.db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
        shrunk.map_err(failure("shrink the log of"))
    }

    /// Commits all jobs, or none.
    fn attempt(&mut self, jobs: &mut [Job]) -> Result<(), StoreError> {
        let failed = failure("write to");
        let db = &self.file.db;
        if !db.is_autocommit() {
            // A full disk can fail even the end of the transaction before this one.
            db.execute_batch("ROLLBACK").map_err(&failed)?;
        }
        let change = Transaction::new_unchecked(db, TransactionBehavior::Immediate);
        let change = change.map_err(&failed)?;
        for job in jobs {
            job.work.run(&change)?;
        }
        change.commit().map_err(&failed)
    }
}
