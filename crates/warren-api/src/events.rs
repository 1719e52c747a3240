//! What happened to sessions and sandboxes, as a numbered list that a reader can take up again.
//!
//! Events are derived from the sessions as they are seen: after each request that changes one, and
//! by a look at all of them every second for what happens by itself. A tenant has numbers of its
//! own, so that gaps tell nothing of others. The list is bounded; a reader that comes too late is told.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::ToSchema;
use warren::{SandboxId, SandboxSession, SessionState};

use crate::principal::{Principal, split};

/// How many events are kept.
const KEPT: usize = 4_096;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum EventKind {
    /// A sandbox was made, or given to its first session.
    #[serde(rename = "sandbox.created")]
    SandboxCreated,
    /// A sandbox is gone.
    #[serde(rename = "sandbox.destroyed")]
    SandboxDestroyed,
    /// A session is active: it began, or was attached to, or resumed.
    #[serde(rename = "session.active")]
    SessionActive,
    /// A session was detached.
    #[serde(rename = "session.detached")]
    SessionDetached,
    /// A session was suspended.
    #[serde(rename = "session.suspended")]
    SessionSuspended,
    /// A session ended.
    #[serde(rename = "session.ended")]
    SessionEnded,
}

impl EventKind {
    /// Returns the name that is sent.
    pub fn name(self) -> &'static str {
        match self {
            Self::SandboxCreated => "sandbox.created",
            Self::SandboxDestroyed => "sandbox.destroyed",
            Self::SessionActive => "session.active",
            Self::SessionDetached => "session.detached",
            Self::SessionSuspended => "session.suspended",
            Self::SessionEnded => "session.ended",
        }
    }
}

/// One event, as it is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventView {
    /// Its id, to go on after with `Last-Event-ID`.
    pub id: String,
    /// What happened.
    pub kind: EventKind,
    /// When it was noticed.
    pub at: DateTime<Utc>,
    /// The sandbox.
    pub sandbox_id: String,
    /// The session, if it is about one.
    pub session_id: Option<String>,
    /// The tenant.
    pub tenant: String,
    /// The client.
    pub client: String,
}

#[derive(Debug)]
struct Noted {
    kind: EventKind,
    at: DateTime<Utc>,
    sandbox: SandboxId,
    session: Option<String>,
    client_id: String,
    /// Its number among all, and among those of its tenant.
    number: u64,
    own_number: u64,
}

/// What is known of a session.
#[derive(Debug)]
struct Known {
    state: SessionState,
    sandbox: SandboxId,
    client_id: String,
    /// When it was last seen, by our own clock.
    seen: u64,
}

#[derive(Debug)]
struct Log {
    /// Tells this daemon's numbers from those of the one before.
    epoch: String,
    ring: VecDeque<Arc<Noted>>,
    next: u64,
    own_next: HashMap<String, u64>,
    known: HashMap<String, Known>,
    clock: u64,
}

/// The events of this daemon.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    log: Arc<Mutex<Log>>,
    changed: watch::Sender<u64>,
}

/// Where a reader is.
#[derive(Debug)]
pub(crate) struct Reader {
    events: Events,
    principal: Principal,
    after: u64,
    changed: watch::Receiver<u64>,
    missed: bool,
}

/// What a reader is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Item {
    /// The next event.
    Event(EventView),
    /// Some events are lost to this reader, which should look at everything anew.
    Gap,
}

/// A moment of the log, to tell what was seen after it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment(u64);

impl Events {
    pub(crate) fn new(epoch: String) -> Self {
        let log = Log {
            epoch,
            ring: VecDeque::new(),
            next: 1,
            own_next: HashMap::new(),
            known: HashMap::new(),
            clock: 0,
        };
        Self { log: Arc::new(Mutex::new(log)), changed: watch::channel(0).0 }
    }

    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a session as it is now, and what that tells. Returns the sandbox if it is gone.
    pub(crate) fn note(&self, session: &SandboxSession) -> Option<SandboxId> {
        let mut log = self.log();
        let gone = log.note(session);
        self.tell(&log);
        gone
    }

    /// Returns this moment, to be taken before the sessions are listed.
    pub(crate) fn moment(&self) -> Moment {
        let mut log = self.log();
        log.clock += 1;
        Moment(log.clock)
    }

    /// Notes all sessions as they were listed, except those seen since. Returns the sandboxes that
    /// are gone.
    pub(crate) fn note_all(&self, moment: Moment, sessions: &[SandboxSession]) -> Vec<SandboxId> {
        let mut log = self.log();
        let mut gone = Vec::new();
        for session in sessions {
            if log.known.get(&session.session_id).is_none_or(|known| known.seen < moment.0) {
                gone.extend(log.note(session));
            }
        }
        let listed: HashSet<&str> = sessions.iter().map(|one| one.session_id.as_str()).collect();
        let is_lost = |(id, known): (&String, &Known)| {
            (known.seen < moment.0 && !listed.contains(id.as_str())).then(|| id.clone())
        };
        let lost: Vec<String> = log.known.iter().filter_map(is_lost).collect();
        for id in lost {
            gone.extend(log.end(&id));
            log.known.remove(&id);
        }
        self.tell(&log);
        gone
    }

    fn tell(&self, log: &Log) {
        self.changed.send_if_modified(|last| std::mem::replace(last, log.next) != log.next);
    }

    /// Begins to read after the event with this id, or with what comes next.
    pub(crate) fn read(&self, principal: Principal, last_id: Option<&str>) -> Reader {
        // Subscribed first: what comes between is then seen at once and not missed.
        let changed = self.changed.subscribe();
        let log = self.log();
        let newest = log.newest(&principal);
        let (after, missed) = match last_id.map(|id| id.split_once('-')) {
            None => (newest, false),
            Some(Some((epoch, number))) if epoch == log.epoch => match number.parse() {
                Ok(number) if number <= newest => (number, log.lost_after(&principal, number)),
                Ok(_) | Err(_) => (newest, true),
            },
            Some(_) => (newest, true),
        };
        drop(log);
        Reader { events: self.clone(), principal, after, changed, missed }
    }
}

impl Log {
    fn note(&mut self, session: &SandboxSession) -> Option<SandboxId> {
        self.clock += 1;
        let seen = self.clock;
        let id = session.session_id.as_str();
        let before = self.known.get_mut(id).map(|known| {
            known.seen = seen;
            known.state
        });
        if before == Some(session.state) || before == Some(SessionState::Terminated) {
            return None;
        }
        if session.state == SessionState::Terminated {
            return before.and_then(|_| self.end(id));
        }
        let is_first = !self.has_sessions(&session.sandbox_id);
        let known = Known {
            state: session.state,
            sandbox: session.sandbox_id.clone(),
            client_id: session.client_id.clone(),
            seen,
        };
        self.known.insert(id.to_owned(), known);
        if is_first {
            self.push(EventKind::SandboxCreated, &session.sandbox_id, None, &session.client_id);
        }
        let kind = match session.state {
            SessionState::Active => EventKind::SessionActive,
            SessionState::Detached => EventKind::SessionDetached,
            SessionState::Suspended => EventKind::SessionSuspended,
            SessionState::Terminated => EventKind::SessionEnded,
        };
        self.push(kind, &session.sandbox_id, Some(id), &session.client_id);
        None
    }

    /// Notes that a session ended. It stays known until a list lacks it: an older list may have it.
    fn end(&mut self, id: &str) -> Option<SandboxId> {
        let known = self.known.get_mut(id)?;
        if known.state == SessionState::Terminated {
            return None;
        }
        known.state = SessionState::Terminated;
        let (sandbox, client_id) = (known.sandbox.clone(), known.client_id.clone());
        self.push(EventKind::SessionEnded, &sandbox, Some(id), &client_id);
        if self.has_sessions(&sandbox) {
            return None;
        }
        self.push(EventKind::SandboxDestroyed, &sandbox, None, &client_id);
        Some(sandbox)
    }

    fn has_sessions(&self, sandbox: &SandboxId) -> bool {
        self.known
            .values()
            .any(|known| known.state != SessionState::Terminated && known.sandbox == *sandbox)
    }

    fn push(&mut self, kind: EventKind, sandbox: &SandboxId, session: Option<&str>, owner: &str) {
        let own_next = self.own_next.entry(split(owner).0.to_owned()).or_insert(1);
        let noted = Noted {
            kind,
            at: Utc::now(),
            sandbox: sandbox.clone(),
            session: session.map(str::to_owned),
            client_id: owner.to_owned(),
            number: self.next,
            own_number: *own_next,
        };
        *own_next += 1;
        self.next += 1;
        if self.ring.len() == KEPT {
            self.ring.pop_front();
        }
        self.ring.push_back(Arc::new(noted));
    }

    fn newest(&self, principal: &Principal) -> u64 {
        let next = if principal.operator {
            self.next
        } else {
            self.own_next.get(&*principal.tenant).copied().unwrap_or(1)
        };
        next - 1
    }

    /// Tells whether events after this one have left the ring.
    fn lost_after(&self, principal: &Principal, number: u64) -> bool {
        let mut theirs = self
            .ring
            .iter()
            .filter(|noted| principal.operator || split(&noted.client_id).0 == &*principal.tenant);
        let oldest = theirs.next().map_or(self.newest(principal) + 1, |n| n.number_for(principal));
        number + 1 < oldest
    }
}

impl Noted {
    fn number_for(&self, principal: &Principal) -> u64 {
        if principal.operator { self.number } else { self.own_number }
    }

    fn view(&self, epoch: &str, principal: &Principal) -> EventView {
        let (tenant, client) = split(&self.client_id);
        EventView {
            id: format!("{epoch}-{}", self.number_for(principal)),
            kind: self.kind,
            at: self.at,
            sandbox_id: self.sandbox.to_string(),
            session_id: self.session.clone(),
            tenant: tenant.to_owned(),
            client: client.to_owned(),
        }
    }
}

impl Reader {
    /// Waits for the next event.
    pub(crate) async fn next(&mut self) -> Option<Item> {
        loop {
            if std::mem::take(&mut self.missed) {
                return Some(Item::Gap);
            }
            self.changed.borrow_and_update();
            if let Some(item) = self.take() {
                return Some(item);
            }
            self.changed.changed().await.ok()?;
        }
    }

    fn take(&mut self) -> Option<Item> {
        let log = self.events.log();
        if log.lost_after(&self.principal, self.after) {
            self.after = log.newest(&self.principal);
            return Some(Item::Gap);
        }
        let principal = &self.principal;
        let next = log.ring.iter().find(|noted| {
            principal.owns(&noted.client_id) && noted.number_for(principal) > self.after
        })?;
        self.after = next.number_for(principal);
        Some(Item::Event(next.view(&log.epoch, principal)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Quotas;

    fn principal(tenant: &str, operator: bool) -> Principal {
        let (tenant, client) = (tenant.into(), None);
        Principal { tenant, client, operator, quotas: Quotas::default() }
    }

    fn session(client: &str) -> SandboxSession {
        SandboxSession::new(SandboxId::new(), client)
    }

    async fn kinds(reader: &mut Reader, count: usize) -> Vec<&'static str> {
        let mut kinds = Vec::new();
        for _ in 0..count {
            kinds.push(match reader.next().await {
                Some(Item::Event(event)) => event.kind.name(),
                Some(Item::Gap) => "gap",
                None => "end",
            });
        }
        kinds
    }

    #[tokio::test]
    async fn each_change_is_told_once_however_often_it_is_seen() {
        let events = Events::new("e".into());
        let mut reader = events.read(principal("a", false), None);
        let mut one = session("a/x");
        events.note(&one);
        events.note(&one);
        let stale = one.clone();
        let moment = events.moment();
        one.state = SessionState::Suspended;
        events.note(&one);
        assert_eq!(events.note_all(moment, &[stale]), [], "listed before the suspend was seen");
        let moment = events.moment();
        assert_eq!(events.note_all(moment, &[]), [one.sandbox_id.clone()], "it timed out");
        assert_eq!(
            kinds(&mut reader, 5).await,
            [
                "sandbox.created",
                "session.active",
                "session.suspended",
                "session.ended",
                "sandbox.destroyed"
            ]
        );
        assert_eq!(reader.take(), None);
    }

    #[tokio::test]
    async fn a_tenant_sees_its_own_events_under_its_own_numbers() {
        let events = Events::new("e".into());
        let mut alice = events.read(principal("a", false), None);
        let mut operator = events.read(principal("uid:0", true), None);
        for client in ["b/x", "b/x", "a/x"] {
            events.note(&session(client));
        }
        let Some(Item::Event(first)) = alice.next().await else { panic!("an event") };
        assert_eq!((first.id.as_str(), first.tenant.as_str()), ("e-1", "a"));
        assert_eq!(kinds(&mut alice, 1).await, ["session.active"]);
        assert_eq!(alice.take(), None);
        assert_eq!(kinds(&mut operator, 6).await.len(), 6);
    }

    #[tokio::test]
    async fn reading_goes_on_after_the_last_event_or_says_that_some_are_lost() {
        let events = Events::new("e".into());
        let mut one = session("a/x");
        events.note(&one);
        let mut again = events.read(principal("a", false), Some("e-1"));
        assert_eq!(kinds(&mut again, 1).await, ["session.active"]);
        for id in ["f-1", "e-99", "nonsense", "e-x"] {
            let mut lost = events.read(principal("a", false), Some(id));
            assert_eq!(kinds(&mut lost, 1).await, ["gap"], "{id}");
        }
        for turn in 0..KEPT {
            let states = [SessionState::Suspended, SessionState::Active];
            one.state = states[turn % 2];
            events.note(&one);
        }
        let mut late = events.read(principal("a", false), Some("e-1"));
        assert_eq!(kinds(&mut late, 1).await, ["gap"]);
        assert_eq!(kinds(&mut again, 1).await, ["session.suspended"], "the oldest that is kept");
    }
}
