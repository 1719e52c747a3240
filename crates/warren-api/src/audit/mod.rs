//! The audit log: every call, command and refusal, in lines that vouch for one another.
//!
//! It is in the daemon's own directory, where no sandbox reaches. Whoever asks hands an entry to a
//! bounded queue; one thread makes lines of them and writes those, many at once if there are many. No
//! call waits for the disk. When the queue is full a call waits for room in it; while the log cannot be
//! written nothing is begun, and what is under way waits: nothing happens that is not noted.

mod account;
mod entry;
mod strangers;
mod trail;
mod verify;
mod watch;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use tokio::sync::mpsc;
use tokio::time::timeout;

pub(crate) use account::{Account, noted};
pub use entry::{Barred, Call, End, Entry, Exec, Found, Place, Refusal, Start, Torn};
pub use strangers::{Group, Source, Strangers};
pub use verify::{Break, Report, list, read, verify, verify_files};
pub(crate) use watch::{Note, around};

use strangers::Gate;
use trail::Trail;

#[cfg(test)]
mod tests;

/// How many entries wait to be written.
const QUEUE: usize = 4_096;
/// How many of them are written at once.
const BATCH: usize = 512;
/// How long more is waited for once something came.
const GATHER: Duration = Duration::from_millis(2);
/// How long nothing must come before the log is sealed, and the longest that it is not.
const IDLE: Duration = Duration::from_secs(1);
const SEAL_AFTER: Duration = Duration::from_secs(10);
/// How long to wait before the disk is tried again.
const AGAIN: Duration = Duration::from_millis(200);
/// How often it is at the end.
const LAST_TRIES: u32 = 10;

/// How large a log gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// A file that has so many bytes is followed by another.
    pub file_bytes: u64,
    /// The oldest files are removed when all have more.
    pub total_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { file_bytes: 16 << 20, total_bytes: 256 << 20 }
    }
}

/// Why the log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// A file could not be read or written.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There is a log, and not the key that vouches for it.
    #[error("cannot read the key of the audit log, {}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// What was noted could not be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unwritable;

type Noted = (DateTime<Utc>, Entry);

/// A log that is being written. Clones are handles to the same one.
#[derive(Debug, Clone)]
pub struct Audit(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    queue: mpsc::Sender<Noted>,
    /// The log cannot be written now.
    stuck: Arc<AtomicBool>,
    /// Nobody asks any more.
    ending: Arc<AtomicBool>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

impl Audit {
    /// Opens the log in a directory, or begins one, and notes that it did.
    pub fn open(directory: &Path, limits: Limits) -> Result<Self, AuditError> {
        let failed =
            |source| AuditError::File { action: "write to", path: directory.to_owned(), source };
        let trail = Trail::open(directory, limits)?;
        let (queue, entries) = mpsc::channel(QUEUE);
        let (stuck, ending) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        // It waits for entries and for time to pass, and for nothing else.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(failed)?;
        let (gate, is_stuck, ends) =
            (Gate::new(Instant::now()), Arc::clone(&stuck), Arc::clone(&ending));
        let mut writer = Writer { trail, entries, gate, stuck: is_stuck, ending: ends };
        let thread = std::thread::Builder::new().name("audit".to_owned());
        let thread = thread.spawn(move || writer.run(&runtime)).map_err(failed)?;
        Ok(Self(Arc::new(Inner { queue, stuck, ending, writer: Mutex::new(Some(thread)) })))
    }

    /// Tells whether something may be begun that will have to be noted.
    pub(crate) fn is_ready(&self) -> bool {
        !self.0.stuck.load(Ordering::Acquire) && !self.0.queue.is_closed()
    }

    /// Notes something before it is done, or says that it must not be.
    pub(crate) async fn before(&self, entry: Entry) -> Result<(), Unwritable> {
        if !self.is_ready() {
            return Err(Unwritable);
        }
        self.0.queue.send((Utc::now(), entry)).await.map_err(|_| Unwritable)
    }

    /// Notes what was done, and waits until there is room for it.
    pub(crate) async fn after(&self, entry: Entry) -> Result<(), Unwritable> {
        self.0.queue.send((Utc::now(), entry)).await.map_err(|_| Unwritable)
    }

    /// Notes what was done, for one who cannot wait; returns what there is no room for, or that nothing is noted any more.
    pub(crate) fn at_once(&self, entry: Entry) -> Result<(), Option<Entry>> {
        self.0.queue.try_send((Utc::now(), entry)).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full((_, entry)) => Some(entry),
            mpsc::error::TrySendError::Closed(_) => None,
        })
    }

    /// Notes the end and writes what is left. Whatever is asked after that is refused.
    pub async fn stop(&self) {
        self.0.ending.store(true, Ordering::Release);
        // It wakes up the thread; if there is no room for it, that is awake.
        let _ = self.0.queue.try_send((Utc::now(), Entry::Stop { noted: 0 }));
        let writer = self.0.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(writer) = writer {
            // Its thread ends within moments, whatever the disk does.
            let _ = tokio::task::spawn_blocking(move || writer.join()).await;
        }
    }
}

/// What the thread has.
struct Writer {
    trail: Trail,
    entries: mpsc::Receiver<Noted>,
    /// What is let through of those whom nobody knows.
    gate: Gate,
    stuck: Arc<AtomicBool>,
    ending: Arc<AtomicBool>,
}

impl Writer {
    fn run(&mut self, runtime: &tokio::runtime::Runtime) {
        let mut batch = Vec::with_capacity(BATCH);
        let mut sealed = Instant::now();
        loop {
            let idle = self.trail.is_unsealed().then_some(IDLE);
            let patience = [idle, self.gate.wait(Instant::now())].into_iter().flatten().min();
            let came = runtime.block_on(async {
                let came = self.entries.recv_many(&mut batch, BATCH);
                match patience {
                    Some(patience) => timeout(patience, came).await,
                    None => Ok(came.await),
                }
            });
            let mut ends = self.ending.load(Ordering::Acquire) || matches!(came, Ok(0));
            if !ends && came.is_ok() && batch.len() < BATCH {
                // What a call did comes right after that it began: both are written at once, and not while
                // the caller waits for a CPU.
                std::thread::sleep(GATHER);
                while batch.len() < BATCH
                    && let Ok(entry) = self.entries.try_recv()
                {
                    batch.push(entry);
                }
                ends = self.ending.load(Ordering::Acquire);
            }
            if ends {
                // What waits for room is let in, and nobody else.
                self.entries.close();
                while let Ok(entry) = self.entries.try_recv() {
                    batch.push(entry);
                }
            }
            for (time, entry) in batch.drain(..) {
                // That it is the end is said last.
                if !matches!(entry, Entry::Stop { .. })
                    && let Some(entry) = self.gate.pass(entry, time, Instant::now())
                {
                    self.trail.push(&entry, time);
                }
            }
            if let Some(sum) = self.gate.due(Instant::now(), ends) {
                self.trail.push(&sum, Utc::now());
            }
            if ends {
                self.trail.push(&Entry::Stop { noted: self.trail.noted }, Utc::now());
                self.insist(|trail| trail.write().and_then(|()| trail.seal()));
                return;
            }
            self.insist(Trail::write);
            if self.trail.is_unsealed() && (came.is_err() || sealed.elapsed() >= SEAL_AFTER) {
                self.insist(Trail::seal);
                sealed = Instant::now();
            }
        }
    }

    /// Does it again and again until it works, or until the daemon ends and has no more patience.
    fn insist(&mut self, work: impl Fn(&mut Trail) -> io::Result<()>) {
        let mut last_tries = 0;
        while let Err(error) = work(&mut self.trail) {
            if !self.stuck.swap(true, Ordering::AcqRel) {
                tracing::error!(%error, "cannot write the audit log: nothing is begun until it can be");
            }
            if self.ending.load(Ordering::Acquire) {
                last_tries += 1;
                if last_tries > LAST_TRIES {
                    tracing::error!(%error, "the end of the audit log is lost");
                    return;
                }
            }
            std::thread::sleep(AGAIN);
        }
        if self.stuck.swap(false, Ordering::AcqRel) {
            tracing::info!("the audit log can be written again");
        }
    }
}
