//! Who has what: every sandbox and session that the manager knows of, under one lock.
//!
//! The lock is held for moments only, never across an await or a kernel call. A sandbox takes its
//! place here before the kernel is touched, so that the limit holds under any concurrency. A
//! session's state is changed by the task that keeps its sandbox alone; everybody may read it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::keeper::Request;
use super::sandboxes::Sandboxes;
use super::session::Held;
use crate::store::{Change, Phase, SandboxRecord, SessionRecord};
use crate::{
    Base, Reach, Sandbox, SandboxError, SandboxId, SandboxManagerStats, SandboxSession,
    SandboxSpec, SessionState, SignedReceipt,
};

/// How many ended sessions are remembered, so that ending one twice is no error.
const REMEMBERED: usize = 4_096;

/// Where in its life a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// It is being made, or made somebody's.
    Creating,
    Running,
    Suspended,
    /// It is being destroyed, or that has failed and is tried again.
    Ending,
}

/// One sandbox, or the place that one takes while it is made.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) backend: usize,
    pub(super) spec: Arc<SandboxSpec>,
    /// What its root stands on.
    pub(super) base: Arc<Base>,
    pub(super) life: Life,
    /// Whose it is; nobody's while it is warm.
    pub(super) owner: Option<String>,
    /// Whether a command may have run in it.
    pub(super) used: bool,
    pub(super) handle: Option<Arc<dyn Sandbox>>,
    pub(super) mailbox: mpsc::Sender<Request>,
    /// The ids of its sessions, oldest first.
    pub(super) sessions: Vec<String>,
    /// Since when it is warm.
    pub(super) since: Instant,
    pub(super) created_at: DateTime<Utc>,
    /// Whether it was warm and is about to become its owner's.
    pub(super) set_aside: bool,
    /// Whether it has given its place to another that waits for its end.
    pub(super) ceded: bool,
    /// Whether it ends because its last session timed out.
    pub(super) timed_out: bool,
    /// Whether the store has an older version.
    pub(super) dirty: bool,
    /// What was tried of it since it was made.
    pub(super) receipt: Option<Arc<SignedReceipt>>,
}

impl Entry {
    /// Tells whether it is the pool's. One that is set aside for a claim may come back, should it not be
    /// what is asked for.
    pub(super) fn is_pooled(&self) -> bool {
        self.owner.is_none() || self.set_aside
    }

    pub(super) fn is_warm(&self) -> bool {
        self.owner.is_none() && self.life == Life::Running
    }

    /// Tells whether this client may use it.
    pub(super) fn belongs_to(&self, client: &str) -> bool {
        self.owner.as_deref() == Some(client)
    }

    pub(super) fn lives(&self) -> bool {
        matches!(self.life, Life::Running | Life::Suspended)
    }

    pub(super) fn record(&self, id: &SandboxId, backend: &str, phase: Phase) -> SandboxRecord {
        SandboxRecord {
            id: id.clone(),
            backend: backend.to_owned(),
            spec: (*self.spec).clone(),
            phase,
            owner: self.owner.clone(),
            // Whether a command has run is not written at each: what is somebody's counts as used.
            used: self.used || self.owner.is_some(),
            anchor: self.handle.as_ref().and_then(|handle| handle.anchor()),
            created_at: self.created_at,
            base: (*self.base).clone(),
            receipt: self.receipt.as_deref().cloned(),
            // At all other times it is with the sandbox itself, which is made anew by nobody.
            reach: match (phase, &self.handle) {
                (Phase::Restoring, Some(handle)) => handle.reach(),
                _ => Reach::default(),
            },
        }
    }
}

/// What cannot be derived from what there is now, because it is about what was.
#[derive(Debug, Clone, Default)]
pub(super) struct Ledger {
    pub(super) created: u64,
    pub(super) creation_time: Duration,
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) timeout_destroys: u64,
}

/// How a session that a caller names stands.
#[derive(Debug)]
pub(super) enum Found {
    /// It lives; this is the way to whoever keeps its sandbox.
    Held(mpsc::Sender<Request>),
    /// It has ended.
    Ended,
    /// There is none, or it is not the caller's.
    Unknown,
}

/// What became of a wish for a place.
#[derive(Debug)]
pub(super) enum Place {
    Taken,
    /// Taken, to be used once this warm one is gone.
    TakenFrom(SandboxId, mpsc::Sender<Request>),
    /// There is none.
    Full {
        limit: u32,
    },
}

/// A sandbox of the store that could not be taken over yet, with its sessions.
#[derive(Debug, Clone)]
pub(super) struct Unreachable {
    pub(super) record: SandboxRecord,
    pub(super) sessions: Vec<SessionRecord>,
}

/// The sessions of one client, by their ids.
#[derive(Debug, Default)]
struct Client {
    all: BTreeSet<String>,
    /// Those that are kept for it to take up again: each that it acquires asks for them, and it may have thousands.
    kept: BTreeSet<String>,
}

/// Every sandbox and session.
#[derive(Debug, Default)]
pub(super) struct Registry {
    pub(super) sandboxes: Sandboxes,
    pub(super) sessions: BTreeMap<String, Held>,
    /// The ids of each client's sessions.
    clients: BTreeMap<String, Client>,
    pub(super) default: Option<SandboxId>,
    pub(super) ledger: Ledger,
    /// What the store is to forget and could not be told yet.
    pub(super) owed: Vec<Change>,
    /// Sandboxes of the store that could not be taken over yet; their ids are not free.
    pub(super) unreachable: BTreeMap<SandboxId, Unreachable>,
    /// What is on the host, belongs to nobody and could not be removed yet, with its backend.
    pub(super) strays: BTreeSet<(usize, SandboxId)>,
    /// Whether no more places are given.
    pub(super) closed: bool,
    ended: VecDeque<(String, String)>,
}

impl Registry {
    /// Finds a session by what a caller holds of it.
    pub(super) fn find(&self, session: &SandboxSession) -> Found {
        let client = &session.client_id;
        match self.sessions.get(&session.session_id) {
            Some(held) if held.shown.client_id == *client => {
                match self.sandboxes.get(&held.shown.sandbox_id) {
                    Some(entry) => Found::Held(entry.mailbox.clone()),
                    None => Found::Unknown,
                }
            }
            Some(_) => Found::Unknown,
            None => {
                let it = |(id, of): &(String, String)| *id == session.session_id && of == client;
                if self.ended.iter().rev().any(it) { Found::Ended } else { Found::Unknown }
            }
        }
    }

    /// Takes a place for a sandbox, at the limit that of an idle warm one.
    pub(super) fn take_place(
        &mut self,
        id: &SandboxId,
        entry: Entry,
        max: u32,
        backend_max: Option<u32>,
        evict: bool,
    ) -> Result<Place, SandboxError> {
        if self.closed {
            return Err(SandboxError::ShuttingDown);
        }
        if self.sandboxes.contains_key(id) || self.unreachable.contains_key(id) {
            return Err(SandboxError::AlreadyExists { what: "sandbox", id: id.to_string() });
        }
        let backend = entry.backend;
        let backend_full = backend_max.filter(|max| self.sandboxes.places(Some(backend)) >= *max);
        // What could not be taken over yet is on the host all the same.
        let unreachable = u32::try_from(self.unreachable.len()).unwrap_or(u32::MAX);
        let taken = self.sandboxes.places(None).saturating_add(unreachable);
        let limit = match (backend_full, taken >= max) {
            (Some(limit), _) => limit,
            (None, true) => max,
            (None, false) => {
                self.sandboxes.insert(id.clone(), entry);
                return Ok(Place::Taken);
            }
        };
        let gives_way = |(_, warm): &(&SandboxId, &Entry)| {
            warm.is_warm() && (backend_full.is_none() || warm.backend == backend)
        };
        let warm = self.sandboxes.pooled().filter(gives_way);
        let oldest = warm.min_by_key(|(_, warm)| warm.since).map(|(id, _)| id.clone());
        let Some(oldest) = oldest.filter(|_| evict) else { return Ok(Place::Full { limit }) };
        let Some(mut warm) = self.sandboxes.get_mut(&oldest) else {
            return Ok(Place::Full { limit });
        };
        warm.life = Life::Ending;
        warm.ceded = true;
        let mailbox = warm.mailbox.clone();
        drop(warm);
        self.sandboxes.insert(id.clone(), entry);
        Ok(Place::TakenFrom(oldest, mailbox))
    }

    /// Returns how long it takes at most until a session times out.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        let now = Instant::now();
        self.sessions.values().map(|held| held.remaining(now)).min()
    }

    /// Forgets a session that lives, and remembers that it did.
    pub(super) fn end_session(&mut self, session_id: &str) -> Option<Held> {
        let held = self.sessions.remove(session_id)?;
        let client = &held.shown.client_id;
        if let Some(sessions) = self.clients.get_mut(client) {
            sessions.all.remove(session_id);
            sessions.kept.remove(session_id);
            if sessions.all.is_empty() {
                self.clients.remove(client);
            }
        }
        if let Some(mut entry) = self.sandboxes.get_mut(&held.shown.sandbox_id) {
            entry.sessions.retain(|id| id != session_id);
        }
        if self.ended.len() == REMEMBERED {
            self.ended.pop_front();
        }
        self.ended.push_back((session_id.to_owned(), held.shown.client_id.clone()));
        Some(held)
    }

    /// Adds a session, or changes one. Work that began meanwhile stays counted.
    pub(super) fn put_session(&mut self, mut held: Held) {
        let id = held.shown.session_id.clone();
        let client = self.clients.entry(held.shown.client_id.clone()).or_default();
        match held.waits_for_its_client() {
            true => client.kept.insert(id.clone()),
            false => client.kept.remove(&id),
        };
        match self.sessions.get(&id) {
            Some(old) => (held.busy, held.running) = (old.busy, old.running),
            None => {
                client.all.insert(id.clone());
                if let Some(mut entry) = self.sandboxes.get_mut(&held.shown.sandbox_id) {
                    entry.sessions.push(id.clone());
                }
            }
        }
        self.sessions.insert(id, held);
    }

    /// Returns the sessions on a sandbox, oldest first.
    pub(super) fn sessions_on(&self, id: &SandboxId) -> impl Iterator<Item = &Held> {
        let ids = self.sandboxes.get(id).map(|entry| entry.sessions.as_slice()).unwrap_or_default();
        ids.iter().filter_map(|id| self.sessions.get(id))
    }

    /// Returns the sessions of a client.
    pub(super) fn sessions_of(&self, client: &str) -> impl Iterator<Item = &Held> {
        let ids = self.clients.get(client).into_iter().flat_map(|client| &client.all);
        ids.filter_map(|id| self.sessions.get(id))
    }

    /// Returns those of them that are kept for it to take up again.
    pub(super) fn kept_for(&self, client: &str) -> impl Iterator<Item = &Held> {
        let ids = self.clients.get(client).into_iter().flat_map(|client| &client.kept);
        ids.filter_map(|id| self.sessions.get(id))
    }

    /// Counts everything anew, so that nothing can drift.
    pub(super) fn stats(&self) -> SandboxManagerStats {
        let in_state =
            |state| self.sessions.values().filter(|held| held.shown.state == state).count() as u64;
        let owned =
            |entry: &&Entry| entry.owner.is_some() && entry.life != Life::Creating && !entry.ceded;
        let ledger = &self.ledger;
        let claims = ledger.hits + ledger.misses;
        SandboxManagerStats {
            sandboxes_created: ledger.created,
            active_sandboxes: self.sandboxes.values().filter(owned).count() as u64,
            active_sessions: in_state(SessionState::Active),
            detached_sessions: in_state(SessionState::Detached),
            pool_size: self.sandboxes.pooled().filter(|(_, entry)| entry.is_warm()).count() as u64,
            pool_hit_rate: if claims == 0 { 0.0 } else { ledger.hits as f64 / claims as f64 },
            avg_creation_time_ms: match ledger.created {
                0 => 0.0,
                created => ledger.creation_time.as_secs_f64() * 1_000.0 / created as f64,
            },
            timeout_destroys: ledger.timeout_destroys,
        }
    }
}
