//! What happened to sessions and sandboxes, as a numbered list that a reader can take up again.
//!
//! Events are derived from the sessions as they are seen: after each request that changes one, and
//! by a look at all of them every second for what happens by itself. A tenant has numbers of its
//! own, so that gaps tell nothing of others. The list is bounded; a reader that comes too late is told.
//!
//! An event is shown once the journal has it, together with what it says of its session. So a number
//! that somebody saw is never given to another event, and after a crash the sessions as they are
//! differ from the sessions as they were told by exactly what nobody was told yet.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;
use warren::store::sqlite::NewEvent;
use warren::{SandboxId, SandboxSession, SessionState};

use crate::journal::{Journal, KEPT_EVENTS, Notes};
use crate::principal::{Principal, split};

/// How many events are kept.
const KEPT: usize = KEPT_EVENTS as usize;
/// How long to wait before the journal is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// The notes of the journal that are ours.
const EPOCH: &str = "epoch";
const NUMBERS: &str = "numbers/";
const SESSION: &str = "session/";

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
    /// A snapshot of a sandbox was taken.
    #[serde(rename = "snapshot.created")]
    SnapshotCreated,
    /// A snapshot of a sandbox was removed.
    #[serde(rename = "snapshot.removed")]
    SnapshotRemoved,
    /// A sandbox went back to what it was.
    #[serde(rename = "sandbox.restored")]
    SandboxRestored,
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
            Self::SnapshotCreated => "snapshot.created",
            Self::SnapshotRemoved => "snapshot.removed",
            Self::SandboxRestored => "sandbox.restored",
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
#[derive(Debug, Serialize, Deserialize)]
struct Known {
    state: SessionState,
    sandbox: SandboxId,
    client_id: String,
    /// When it was last seen, by our own clock.
    #[serde(skip)]
    seen: u64,
}

#[derive(Debug, Default)]
struct Log {
    /// Tells the numbers of this journal from those of another.
    epoch: String,
    /// What is shown. There is no gap in its numbers.
    ring: VecDeque<Arc<Noted>>,
    /// What the journal does not have yet.
    waiting: VecDeque<Arc<Noted>>,
    /// The last number that was given.
    last: u64,
    own_last: HashMap<String, u64>,
    known: HashMap<String, Known>,
    /// How many of them have not ended, by their sandboxes; those without are not in it.
    living: HashMap<SandboxId, usize>,
    clock: u64,
}

/// The events of this daemon.
#[derive(Debug, Clone, Default)]
pub(crate) struct Events {
    log: Arc<Mutex<Log>>,
    /// The last number that was given.
    noted: watch::Sender<u64>,
    /// The last number that is shown.
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
    /// Goes on where the journal ends. Returns a note to be written first, if the journal is new.
    pub(crate) fn restore(
        &self,
        events: &[NewEvent],
        notes: &Notes,
    ) -> Option<(String, Option<Value>)> {
        let mut log = self.log();
        for event in events {
            // What cannot be read leaves a gap in the numbers, which tells readers.
            if let Some(noted) = Noted::read(event) {
                log.last = noted.number;
                log.show(Arc::new(noted));
            }
        }
        for (name, value) in notes {
            if let Some(tenant) = name.strip_prefix(NUMBERS) {
                log.own_last.insert(tenant.to_owned(), value.as_u64().unwrap_or(0));
            } else if let Some(session) = name.strip_prefix(SESSION)
                && let Ok(known) = Known::deserialize(value)
            {
                if known.state != SessionState::Terminated {
                    *log.living.entry(known.sandbox.clone()).or_default() += 1;
                }
                log.known.insert(session.to_owned(), known);
            }
        }
        if let Some(epoch) = notes.get(EPOCH).and_then(Value::as_str) {
            log.epoch = epoch.to_owned();
            return None;
        }
        log.epoch = SandboxId::new().as_str().chars().skip(4).take(8).collect();
        Some((EPOCH.to_owned(), Some(log.epoch.clone().into())))
    }

    /// Hands on to the journal what is noted, and shows it then, until told to stop.
    pub(crate) async fn record(self, journal: Arc<dyn Journal>, stop: CancellationToken) {
        let mut noted = self.noted.subscribe();
        loop {
            noted.borrow_and_update();
            let waiting: Vec<Arc<Noted>> = self.log().waiting.iter().cloned().collect();
            let Some(last) = waiting.last().map(|noted| noted.number) else {
                match stop.run_until_cancelled(noted.changed()).await {
                    Some(Ok(())) => continue,
                    Some(Err(_)) | None => return,
                }
            };
            let events = waiting.iter().map(|noted| noted.written()).collect();
            let notes = waiting.iter().flat_map(|noted| noted.notes()).collect();
            match journal.record(events, notes).await {
                Ok(()) => {
                    self.log().show_until(last);
                    self.changed.send_replace(last);
                }
                Err(error) => {
                    tracing::warn!(%error, waiting = waiting.len(), "cannot record events");
                    if stop.run_until_cancelled(tokio::time::sleep(RETRY)).await.is_none() {
                        // They are told by the next daemon, which finds that nobody was.
                        return;
                    }
                }
            }
        }
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

    /// Notes something that happened to a session's sandbox.
    pub(crate) fn happened(&self, kind: EventKind, session: &SandboxSession) {
        self.happened_to(kind, &session.sandbox_id, &session.client_id);
    }

    /// Notes something that happened to a sandbox, or to what was kept of one.
    pub(crate) fn happened_to(&self, kind: EventKind, sandbox: &SandboxId, owner: &str) {
        let mut log = self.log();
        log.push(kind, sandbox, None, owner);
        self.tell(&log);
    }

    fn tell(&self, log: &Log) {
        self.noted.send_if_modified(|last| std::mem::replace(last, log.last) != log.last);
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
        let is_first = !self.living.contains_key(&session.sandbox_id);
        if before.is_none() {
            *self.living.entry(session.sandbox_id.clone()).or_default() += 1;
        }
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
        let left = self.living.get_mut(&sandbox)?;
        *left -= 1;
        if *left > 0 {
            return None;
        }
        self.living.remove(&sandbox);
        self.push(EventKind::SandboxDestroyed, &sandbox, None, &client_id);
        Some(sandbox)
    }

    fn push(&mut self, kind: EventKind, sandbox: &SandboxId, session: Option<&str>, owner: &str) {
        let own_last = self.own_last.entry(split(owner).0.to_owned()).or_default();
        *own_last += 1;
        self.last += 1;
        let noted = Noted {
            kind,
            at: Utc::now(),
            sandbox: sandbox.clone(),
            session: session.map(str::to_owned),
            client_id: owner.to_owned(),
            number: self.last,
            own_number: *own_last,
        };
        if self.waiting.len() == KEPT {
            // The journal has taken nothing for long. Its number is missing from now on.
            self.waiting.pop_front();
        }
        self.waiting.push_back(Arc::new(noted));
    }

    /// Shows what the journal has.
    fn show_until(&mut self, last: u64) {
        let shown = self.waiting.partition_point(|noted| noted.number <= last);
        let later = self.waiting.split_off(shown);
        for noted in std::mem::replace(&mut self.waiting, later) {
            self.show(noted);
        }
    }

    fn show(&mut self, noted: Arc<Noted>) {
        if self.ring.back().is_some_and(|before| before.number + 1 != noted.number) {
            self.ring.clear();
        }
        if self.ring.len() == KEPT {
            self.ring.pop_front();
        }
        self.ring.push_back(noted);
    }

    fn newest(&self, principal: &Principal) -> u64 {
        match principal.operator {
            true => self.last,
            false => self.own_last.get(&*principal.tenant).copied().unwrap_or(0),
        }
    }

    /// Tells whether events after this one are no longer there.
    fn lost_after(&self, principal: &Principal, number: u64) -> bool {
        let mut theirs =
            self.ring.iter().chain(&self.waiting).filter(|noted| {
                principal.operator || split(&noted.client_id).0 == &*principal.tenant
            });
        let oldest = theirs.next().map_or(self.newest(principal) + 1, |n| n.number_for(principal));
        number + 1 < oldest
    }
}

impl Noted {
    /// Returns what the journal keeps of it.
    fn written(&self) -> NewEvent {
        NewEvent {
            at: self.at,
            kind: self.kind.name().to_owned(),
            sandbox_id: Some(self.sandbox.clone()),
            session_id: self.session.clone(),
            client_id: Some(self.client_id.clone()),
            detail: json!({ "number": self.number, "own_number": self.own_number }),
        }
    }

    /// Reads what the journal has kept.
    fn read(event: &NewEvent) -> Option<Self> {
        Some(Self {
            kind: EventKind::deserialize(&Value::from(event.kind.as_str())).ok()?,
            at: event.at,
            sandbox: event.sandbox_id.clone()?,
            session: event.session_id.clone(),
            client_id: event.client_id.clone()?,
            number: event.detail["number"].as_u64()?,
            own_number: event.detail["own_number"].as_u64()?,
        })
    }

    /// Returns what is to be known from now on.
    fn notes(&self) -> impl Iterator<Item = (String, Option<Value>)> {
        let state = match self.kind {
            EventKind::SandboxCreated
            | EventKind::SandboxDestroyed
            | EventKind::SandboxRestored
            | EventKind::SnapshotCreated
            | EventKind::SnapshotRemoved => None,
            EventKind::SessionActive => Some(SessionState::Active),
            EventKind::SessionDetached => Some(SessionState::Detached),
            EventKind::SessionSuspended => Some(SessionState::Suspended),
            EventKind::SessionEnded => Some(SessionState::Terminated),
        };
        let session = state.zip(self.session.as_ref()).map(|(state, id)| {
            let (sandbox, client_id) = (self.sandbox.clone(), self.client_id.clone());
            let known = Known { state, sandbox, client_id, seen: 0 };
            let is_over = state == SessionState::Terminated;
            (format!("{SESSION}{id}"), (!is_over).then(|| json!(known)))
        });
        let number =
            (format!("{NUMBERS}{}", split(&self.client_id).0), Some(json!(self.own_number)));
        session.into_iter().chain([number])
    }

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
    use futures_util::FutureExt as _;
    use warren::store::StoreError;
    use warren::store::sqlite::Answer;

    use super::*;
    use crate::journal::MemoryJournal;
    use crate::keys::Quotas;

    fn principal(tenant: &str, operator: bool) -> Principal {
        let (tenant, client) = (tenant.into(), None);
        let (note, followed) = (Default::default(), Default::default());
        Principal { tenant, client, operator, quotas: Quotas::default(), note, followed }
    }

    fn restored(journal: &Arc<MemoryJournal>) -> Events {
        let events = Events::default();
        let (kept, mut notes) = journal.load().now_or_never().unwrap().unwrap();
        notes.insert(EPOCH.to_owned(), "e".into());
        assert_eq!(events.restore(&kept, &notes), None);
        let record = events.clone().record(Arc::clone(journal) as _, CancellationToken::new());
        tokio_util::task::TaskTracker::new().spawn(record);
        events
    }

    fn events() -> Events {
        restored(&Arc::default())
    }

    /// Waits until all is shown that was noted.
    async fn settle(events: &Events) {
        let last = events.log().last;
        events.changed.subscribe().wait_for(|shown| *shown >= last).await.unwrap();
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
        let events = events();
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
        let events = events();
        let mut alice = events.read(principal("a", false), None);
        let mut operator = events.read(principal("uid:0", true), None);
        for client in ["b/x", "b/x", "a/x"] {
            events.note(&session(client));
        }
        settle(&events).await;
        let Some(Item::Event(first)) = alice.next().await else { panic!("an event") };
        assert_eq!((first.id.as_str(), first.tenant.as_str()), ("e-1", "a"));
        assert_eq!(kinds(&mut alice, 1).await, ["session.active"]);
        assert_eq!(alice.take(), None);
        assert_eq!(kinds(&mut operator, 6).await.len(), 6);
    }

    #[tokio::test]
    async fn reading_goes_on_after_the_last_event_or_says_that_some_are_lost() {
        let events = events();
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
        settle(&events).await;
        let mut late = events.read(principal("a", false), Some("e-1"));
        assert_eq!(kinds(&mut late, 1).await, ["gap"]);
        assert_eq!(kinds(&mut again, 1).await, ["session.suspended"], "the oldest that is kept");
    }

    #[tokio::test]
    async fn the_next_daemon_goes_on_and_tells_what_nobody_was_told() {
        let journal = Arc::default();
        let events = restored(&journal);
        let (mut kept, ended) = (session("a/x"), session("a/x"));
        events.note(&kept);
        events.note(&session("b/x"));
        events.note(&ended);
        settle(&events).await;
        // The daemon dies before it notices this, and before the journal has the last.
        kept.state = SessionState::Detached;

        let events = restored(&journal);
        let moment = events.moment();
        assert_eq!(events.note_all(moment, &[kept.clone()]).len(), 2, "two sandboxes are gone");
        settle(&events).await;
        let mut alice = events.read(principal("a", false), Some("e-1"));
        let told =
            ["session.active", "sandbox.created", "session.active", "session.detached"].to_vec();
        let ends = ["session.ended", "sandbox.destroyed"];
        assert_eq!(kinds(&mut alice, 6).await, [told, ends.to_vec()].concat());
        assert_eq!((alice.take(), alice.after), (None, 7), "each once, without a gap");

        let events = restored(&journal);
        let moment = events.moment();
        assert_eq!(events.note_all(moment, &[kept]), [], "all of it is known");
        assert_eq!(events.log().waiting.len(), 0);
    }

    #[tokio::test]
    async fn numbers_go_on_though_the_events_of_a_tenant_are_no_longer_kept() {
        let journal = Arc::default();
        let events = restored(&journal);
        events.note(&session("a/x"));
        let mut other = session("b/x");
        for turn in 0..KEPT {
            other.state = [SessionState::Active, SessionState::Suspended][turn % 2];
            events.note(&other);
            settle(&events).await;
        }
        let events = restored(&journal);
        events.note(&session("a/x"));
        settle(&events).await;
        let mut alice = events.read(principal("a", false), Some("e-2"));
        assert_eq!(kinds(&mut alice, 2).await, ["sandbox.created", "session.active"]);
        assert_eq!(alice.after, 4);
        let mut late = events.read(principal("a", false), Some("e-1"));
        assert_eq!(kinds(&mut late, 1).await, ["gap"]);
    }

    /// A journal that takes nothing, until it does.
    #[derive(Debug, Default)]
    struct Full(std::sync::atomic::AtomicBool, MemoryJournal);

    #[async_trait::async_trait]
    impl Journal for Full {
        async fn load(&self) -> Result<(Vec<NewEvent>, Notes), StoreError> {
            self.1.load().await
        }

        async fn record(
            &self,
            events: Vec<NewEvent>,
            notes: Vec<(String, Option<Value>)>,
        ) -> Result<(), StoreError> {
            if !self.0.load(std::sync::atomic::Ordering::SeqCst) {
                return Err(StoreError::Full);
            }
            self.1.record(events, notes).await
        }

        async fn remember(&self, _: &str, _: &str, _: &[u8], _: Value) -> Result<(), StoreError> {
            Err(StoreError::Full)
        }

        async fn recall(&self, _: &str, _: &str) -> Result<Option<Answer>, StoreError> {
            Ok(None)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_cannot_be_recorded_is_shown_to_nobody_and_waits_within_bounds() {
        let (events, journal) = (Events::default(), Arc::new(Full::default()));
        events.restore(&[], &Notes::from([(EPOCH.to_owned(), "e".into())]));
        let record = events.clone().record(Arc::clone(&journal) as _, CancellationToken::new());
        tokio_util::task::TaskTracker::new().spawn(record);
        let mut reader = events.read(principal("a", false), None);
        let mut one = session("a/x");
        events.note(&one);
        tokio::time::sleep(RETRY * 3).await;
        assert_eq!(reader.take(), None);
        journal.0.store(true, std::sync::atomic::Ordering::SeqCst);
        assert_eq!(kinds(&mut reader, 2).await, ["sandbox.created", "session.active"]);

        journal.0.store(false, std::sync::atomic::Ordering::SeqCst);
        for turn in 0..=KEPT {
            one.state = [SessionState::Suspended, SessionState::Active][turn % 2];
            events.note(&one);
        }
        assert_eq!(events.log().waiting.len(), KEPT);
        journal.0.store(true, std::sync::atomic::Ordering::SeqCst);
        assert_eq!(kinds(&mut reader, 1).await, ["gap"], "one did not find room");
    }
}
