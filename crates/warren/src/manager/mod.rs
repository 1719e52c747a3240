//! The front door: who may have which sandbox, and for how long.
//!
//! | file | its job |
//! | --- | --- |
//! | `registry.rs`, `sandboxes.rs` | who has what, under one lock that is held for moments |
//! | `keeper.rs` | the task that keeps one sandbox and serves requests in order |
//! | `session.rs`, `selection.rs` | what may happen and what fits, as pure functions |
//! | `guarded.rs` | the sandbox as clients hold it |
//! | `pool.rs`, `sweep.rs` | what happens by itself |
//! | `bounded.rs` | calls on what is not ours, with an end to each |
//! | `snapshots.rs` | what is kept of sandboxes, and for whom |
//! | `told.rs` | what whoever keeps account of commands is told |
//! | `recovery.rs` | what happens with the records of the manager before |

mod bounded;
mod guarded;
mod guarded_files;
mod keeper;
mod pool;
mod recovery;
mod registry;
mod sandboxes;
mod selection;
mod session;
mod snapshots;
mod sweep;
mod told;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use chrono::Utc;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{Instant, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use self::guarded::Guarded;
use self::keeper::{
    Birth, Claimed, Join, Joined, Keeper, MAILBOX, Parent, Predecessor, Request, Wanted,
};
use self::pool::Backoff;
use self::registry::{Entry, Found, Life, Place, Registry};
use self::selection::{Asked, Chosen, Needs, backend_lacks, cost, labels_missing, same_spec};
use self::session::Held;
use self::told::Telling;
use crate::receipt::ReceiptKey;
use crate::store::{Change, Store, StoreError};
use crate::{
    AcquireOptions, AttachRequest, AttachResult, BackendCapabilities, BackendHealth, Base,
    CreateOptions, ForkOptions, Importer, IsolationBackend, IsolationRequirements, Limit, Receipt,
    Result, Sandbox, SandboxError, SandboxId, SandboxManager, SandboxManagerConfig,
    SandboxManagerStats, SandboxSelectionOptions, SandboxSession, SandboxSpec, SessionState,
    SignedReceipt, Snapshot, SnapshotOptions, Witness,
};

/// How long a backend may take to tell what it can do or how it does.
const PROBE_TIME: Duration = Duration::from_secs(10);
/// How long a shutdown waits for sandboxes to end, and then for tasks.
const SHUTDOWN_TIME: Duration = Duration::from_secs(30);

/// How long the store may take to write.
const STORE_TIME: Duration = Duration::from_secs(30);

/// What becomes of the sandboxes when their manager shuts down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shutdown {
    /// They are left as they are, for the next manager to take over.
    LeaveRunning,
    /// They are destroyed, with every session.
    StopAll,
}

/// Gives sandboxes to clients and takes them back, by the rules of the contract.
///
/// A handle: clones share everything. When the last one is dropped the background tasks stop and
/// the sandboxes are left as they are; [`shutdown`](Self::shutdown) says otherwise.
#[derive(Debug, Clone)]
pub struct DefaultSandboxManager {
    inner: Arc<Inner>,
    _stops: Arc<DropGuard>,
}

/// What the handles and the tasks of one manager share.
#[derive(Debug)]
struct Inner {
    backends: Vec<Known>,
    config: SandboxManagerConfig,
    store: Option<Arc<dyn Store>>,
    registry: Mutex<Registry>,
    /// Held while the default sandbox is changed, so that store and registry change in one order.
    default_turn: tokio::sync::Mutex<()>,
    /// What receipts are signed with.
    key: Option<ReceiptKey>,
    /// Whether each is tried as a warm one is before its client has it.
    verifies: AtomicBool,
    backoff: Mutex<Backoff>,
    telling: Mutex<Telling>,
    /// Held while what could not be taken over is tried again.
    recovering: tokio::sync::Mutex<()>,
    pool_kick: Notify,
    /// What is kept warm beside the profiles of the configuration.
    also_warm: Mutex<Vec<Arc<SandboxSpec>>>,
    tasks: TaskTracker,
    stop: CancellationToken,
    started: AtomicBool,
    closing: AtomicBool,
}

/// A backend, and what its last probe said.
struct Known {
    backend: Arc<dyn IsolationBackend>,
    probed: tokio::sync::Mutex<Option<Arc<BackendCapabilities>>>,
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Known").field(&self.backend.name()).finish()
    }
}

impl Known {
    fn name(&self) -> &str {
        self.backend.name()
    }

    fn get(&self) -> &Arc<dyn IsolationBackend> {
        &self.backend
    }

    /// Returns what it can do, by its last probe that succeeded.
    async fn probe(&self) -> Result<Arc<BackendCapabilities>> {
        let mut probed = self.probed.lock().await;
        if let Some(known) = &*probed {
            return Ok(Arc::clone(known));
        }
        let known = timeout(PROBE_TIME, self.backend.probe()).await.unwrap_or_else(|_| {
            let what = format!("probing the {} backend", self.name());
            Err(SandboxError::Timeout { what, after: PROBE_TIME })
        })?;
        let known = Arc::new(known);
        *probed = Some(Arc::clone(&known));
        Ok(known)
    }
}

/// A backend that fits a spec.
#[derive(Debug, Clone)]
struct Fitting {
    index: usize,
    max: Option<u32>,
    persistent: bool,
}

impl DefaultSandboxManager {
    /// Makes a manager that keeps everything in memory.
    ///
    /// Its background tasks start at once inside a tokio runtime, else with the first call.
    pub fn new(backends: Vec<Arc<dyn IsolationBackend>>, config: SandboxManagerConfig) -> Self {
        Self::new_signing(backends, config, None)
    }

    /// Likewise, with a key that what was tried of sandboxes is signed with.
    pub fn new_signing(
        backends: Vec<Arc<dyn IsolationBackend>>,
        config: SandboxManagerConfig,
        key: Option<ReceiptKey>,
    ) -> Self {
        let manager = Self::build(backends, config, None, key);
        if tokio::runtime::Handle::try_current().is_ok() {
            manager.inner.start();
        }
        manager
    }

    /// Makes a manager whose records are kept in a store: takes over what still runs, finishes what
    /// was half-made or half-destroyed, and removes what belongs to nobody.
    pub async fn open(
        backends: Vec<Arc<dyn IsolationBackend>>,
        config: SandboxManagerConfig,
        store: Arc<dyn Store>,
    ) -> Result<Self> {
        Self::open_signing(backends, config, store, None).await
    }

    /// Likewise, with a key that what was tried of sandboxes is signed with.
    pub async fn open_signing(
        backends: Vec<Arc<dyn IsolationBackend>>,
        config: SandboxManagerConfig,
        store: Arc<dyn Store>,
        key: Option<ReceiptKey>,
    ) -> Result<Self> {
        let manager = Self::build(backends, config, Some(store), key);
        manager.inner.recover().await?;
        manager.inner.start();
        Ok(manager)
    }

    fn build(
        backends: Vec<Arc<dyn IsolationBackend>>,
        config: SandboxManagerConfig,
        store: Option<Arc<dyn Store>>,
        key: Option<ReceiptKey>,
    ) -> Self {
        let known = |backend| Known { backend, probed: tokio::sync::Mutex::default() };
        let stop = CancellationToken::new();
        let inner = Inner {
            backends: backends.into_iter().map(known).collect(),
            config,
            store,
            registry: Mutex::default(),
            default_turn: tokio::sync::Mutex::default(),
            key,
            verifies: AtomicBool::new(false),
            backoff: Mutex::default(),
            telling: Mutex::default(),
            recovering: tokio::sync::Mutex::default(),
            pool_kick: Notify::new(),
            also_warm: Mutex::default(),
            tasks: TaskTracker::new(),
            stop: stop.clone(),
            started: AtomicBool::new(false),
            closing: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner), _stops: Arc::new(stop.drop_guard()) }
    }

    /// Takes no more work, ends the background tasks, and the sandboxes if asked to. Bounded: what
    /// does not finish in time is logged and left to the next manager.
    pub async fn shutdown(&self, mode: Shutdown) {
        let inner = &self.inner;
        inner.closing.store(true, Ordering::SeqCst);
        let requests: Vec<_> = {
            let mut registry = inner.registry();
            registry.closed = true;
            registry.sandboxes.values().map(|entry| entry.mailbox.clone()).collect()
        };
        let mut waits = Vec::new();
        for mailbox in requests {
            let (reply, done) = oneshot::channel();
            let request = match mode {
                Shutdown::StopAll => Request::Discard { reply },
                Shutdown::LeaveRunning => Request::Flush { reply },
            };
            if mailbox.send(request).await.is_ok() {
                waits.push(done);
            }
        }
        let all = async {
            for wait in waits {
                // A failure was logged by whoever met it.
                let _ = wait.await;
            }
        };
        let in_time = timeout(SHUTDOWN_TIME, all).await.is_ok();
        inner.stop.cancel();
        inner.tasks.close();
        if timeout(SHUTDOWN_TIME, inner.tasks.wait()).await.is_err() || !in_time {
            warn!(tasks = inner.tasks.len(), "shut down with work unfinished");
        }
    }

    /// Has the pool, if there is one, keep sandboxes of this spec warm as well, as many as of a profile.
    ///
    /// For a caller who knows what it will be asked for: a claim is of use only where what is fixed when a
    /// sandbox is made (its profile, its directory, the room for what it writes) is what is wanted.
    pub fn keep_warm(&self, spec: SandboxSpec) -> Result<()> {
        spec.validate()?;
        let mut specs = self.inner.also_warm.lock().unwrap_or_else(PoisonError::into_inner);
        if !specs.iter().any(|known| **known == spec) {
            specs.push(Arc::new(spec));
        }
        drop(specs);
        self.inner.pool_kick.notify_one();
        Ok(())
    }

    /// Has every new sandbox be tried as a warm one is before its client has it: its limits are exceeded, too, which takes
    /// milliseconds. What gets through is an error, and that sandbox is gone.
    pub fn verify_all(&self) {
        self.inner.verifies.store(true, Ordering::Relaxed);
    }

    /// Tries whether a sandbox of this spec could reach anything beyond itself, on the backend that would make it.
    pub async fn try_egress(&self, spec: &SandboxSpec) -> Result<()> {
        let fitting = self.inner.choose(spec, &IsolationRequirements::default(), None).await?;
        let first = fitting.first().and_then(|first| self.inner.backends.get(first.index));
        let first = first.ok_or_else(|| SandboxError::NoMatch { missing: Vec::new() })?;
        first.backend.try_egress().await
    }

    /// Returns how each backend does: one that is broken hides no other.
    pub async fn health_report(&self) -> Vec<(String, Result<BackendHealth>)> {
        self.inner.start();
        let begin = |known: &Known| {
            let backend = Arc::clone(known.get());
            let check = async move { timeout(PROBE_TIME, backend.health_check()).await };
            (known.name().to_owned(), self.inner.tasks.spawn(check))
        };
        let checks: Vec<_> = self.inner.backends.iter().map(begin).collect();
        let mut report = Vec::new();
        for (name, check) in checks {
            let health = match check.await {
                Ok(Ok(health)) => health,
                Ok(Err(_)) => {
                    let what = format!("checking the health of the {name} backend");
                    Err(SandboxError::Timeout { what, after: PROBE_TIME })
                }
                Err(panic) => Err(SandboxError::Internal { message: panic.to_string() }),
            };
            report.push((name, health));
        }
        report
    }
}

impl Inner {
    /// Starts the background tasks, once.
    fn start(self: &Arc<Self>) {
        if self.started.swap(true, Ordering::SeqCst) {
            return;
        }
        if self.config.pool.enabled {
            self.tasks.spawn(Arc::clone(self).keep_pool());
        }
        self.tasks.spawn(Arc::clone(self).keep_swept());
        self.tasks.spawn(Arc::clone(self).keep_told());
        if self.is_durable() {
            self.tasks.spawn(Arc::clone(self).keep_written());
        }
    }

    /// Begins a call that changes something.
    fn enter(self: &Arc<Self>) -> Result<()> {
        if self.closing.load(Ordering::SeqCst) || self.stop.is_cancelled() {
            return Err(SandboxError::ShuttingDown);
        }
        self.start();
        Ok(())
    }

    /// Locks the registry; a panic elsewhere leaves plain values behind that are as good as before.
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn backoff(&self) -> MutexGuard<'_, Backoff> {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn backend(&self, index: usize) -> &Arc<dyn IsolationBackend> {
        self.backends[index].get()
    }

    fn name(&self, index: usize) -> &str {
        self.backends[index].name()
    }

    /// Has a backend probed anew before it is used again: it did not do what it said.
    async fn forget_probe(&self, index: usize) {
        *self.backends[index].probed.lock().await = None;
    }

    fn is_durable(&self) -> bool {
        self.store.is_some()
    }

    /// Writes changes, after what is still owed; without a store there is nothing to do.
    async fn persist(&self, changes: impl Iterator<Item = Change>) -> Result<()> {
        let Some(store) = &self.store else { return Ok(()) };
        let owed = self.registry().owed.clone();
        let changes: Vec<_> = owed.iter().cloned().chain(changes).collect();
        if changes.is_empty() {
            return Ok(());
        }
        // Whether one that is given up is written later is not known. Its caller makes up for it
        // with the next write, which the store makes after it.
        let applied = timeout(STORE_TIME, store.apply(changes)).await;
        applied.unwrap_or_else(|_| {
            Err(StoreError::io("write to", std::io::Error::from(std::io::ErrorKind::TimedOut)))
        })?;
        if !owed.is_empty() {
            self.registry().owed.retain(|change| !owed.contains(change));
        }
        Ok(())
    }

    /// Writes that something ended. A store that fails holds up no end: it is told later.
    async fn persist_or_owe(&self, changes: Vec<Change>) {
        if let Err(error) = self.persist(changes.iter().cloned()).await {
            warn!(%error, "an end could not be written yet");
            let forgets = |change: &Change| match change {
                Change::DropSandbox(_) | Change::DropSession(_) | Change::SetDefault(None) => true,
                Change::PutSandbox(_) | Change::PutSession(_) | Change::SetDefault(Some(_)) => {
                    false
                }
            };
            self.owe(changes.into_iter().filter(forgets));
        }
    }

    /// Has changes written before the next ones.
    fn owe(&self, changes: impl Iterator<Item = Change>) {
        if self.is_durable() {
            self.registry().owed.extend(changes);
        }
    }

    /// Writes which sandbox is the default; should that fail, which one it still is.
    async fn write_default(&self, id: Option<SandboxId>) -> Result<()> {
        let written = self.persist([Change::SetDefault(id)].into_iter()).await;
        if written.is_err() {
            let still = self.registry().default.clone();
            self.owe([Change::SetDefault(still)].into_iter());
        }
        written
    }

    fn mailbox() -> (mpsc::Sender<Request>, mpsc::Receiver<Request>) {
        mpsc::channel(MAILBOX)
    }

    fn spawn_keeper(
        self: &Arc<Self>,
        id: SandboxId,
        backend: usize,
        handle: Option<Arc<dyn Sandbox>>,
        inbox: mpsc::Receiver<Request>,
        birth: Option<Birth>,
    ) {
        let keeper = Keeper::new(Arc::clone(self), id, backend, handle, inbox);
        self.tasks.spawn(keeper.run(birth));
    }

    /// Sends a request. A full mailbox is an answer, not a wait; one that is closed means that
    /// the sandbox is gone, which whoever waits for the reply learns from that.
    fn post(&self, mailbox: &mpsc::Sender<Request>, request: Request) -> Result<()> {
        match mailbox.try_send(request) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
            Err(mpsc::error::TrySendError::Full(_)) => Err(SandboxError::Conflict {
                action: "use the sandbox".to_owned(),
                reason: format!("{MAILBOX} calls wait for it already"),
            }),
        }
    }

    /// Returns what each backend lacks of what is required, as far as that goes beyond the default.
    async fn lacking(&self, isolation: &IsolationRequirements) -> Vec<Vec<String>> {
        if isolation.is_default() {
            return Vec::new();
        }
        let mut all = Vec::with_capacity(self.backends.len());
        for known in &self.backends {
            all.push(match known.probe().await {
                Ok(can) => isolation.lacking(known.backend.level(), &can),
                Err(error) => vec![format!("an answer ({error})")],
            });
        }
        all
    }

    /// Returns the backends that keep what a spec asks for, the cheapest first.
    async fn choose(
        &self,
        spec: &SandboxSpec,
        isolation: &IsolationRequirements,
        preferred: Option<&str>,
    ) -> Result<Vec<Fitting>> {
        if let Some(name) = preferred
            && !self.backends.iter().any(|known| known.name() == name)
        {
            return Err(SandboxError::NotFound { what: "backend", id: name.to_owned() });
        }
        let chosen = if preferred.is_some() { Chosen::ByName } else { Chosen::ByPromise };
        let mut fitting = Vec::new();
        let mut missing = Vec::new();
        for (index, known) in self.backends.iter().enumerate() {
            if preferred.is_some_and(|name| name != known.name()) {
                continue;
            }
            let lacks = match known.probe().await {
                Ok(can) => {
                    let has = (known.backend.level(), &*can);
                    let lacks = backend_lacks(has, spec, isolation, chosen, self.is_durable());
                    if lacks.is_empty() {
                        let max = can.max_concurrent_sandboxes;
                        let persistent = can.persistent_sandboxes;
                        fitting.push(Fitting { index, max, persistent });
                        continue;
                    }
                    lacks.join(", ")
                }
                Err(error) => format!("an answer ({error})"),
            };
            missing.push(format!("backend `{}` lacks {lacks}", known.name()));
        }
        if fitting.is_empty() {
            if missing.is_empty() {
                missing.push("there is no backend".to_owned());
            }
            return Err(SandboxError::NoMatch { missing });
        }
        // Stable: of two that cost the same, the first that was named is taken.
        fitting.sort_by_key(|fitting| cost(self.backend(fitting.index).level()));
        Ok(fitting)
    }

    /// Takes a place for a sandbox and begins to make it; it tells its parent when it is there.
    fn conceive(
        self: &Arc<Self>,
        fitting: &Fitting,
        (spec, base): (&Arc<SandboxSpec>, &Arc<Base>),
        id: Option<&SandboxId>,
        parent: Option<&mut Option<Parent>>,
        evict: bool,
    ) -> Result<Place> {
        let durable = self.is_durable();
        let (mailbox, inbox) = Self::mailbox();
        let owner = parent.as_ref().and_then(|parent| parent.as_ref());
        let entry = Entry {
            backend: fitting.index,
            spec: Arc::clone(spec),
            base: Arc::clone(base),
            life: Life::Creating,
            owner: owner.map(|parent| parent.client.clone()),
            used: false,
            handle: None,
            mailbox,
            sessions: Vec::new(),
            since: Instant::now(),
            created_at: Utc::now(),
            set_aside: false,
            ceded: false,
            timed_out: false,
            dirty: false,
            receipt: None,
        };
        let max = self.config.max_sandboxes;
        let (place_id, place) = {
            let mut registry = self.registry();
            // Asked for under the lock: what waits there is promised to one.
            let begun = || self.backend(fitting.index).next_id(spec, base);
            let begun = || begun().filter(|begun| !registry.sandboxes.contains_key(begun));
            // In memory the backend names it, and until then it has a name that nobody knows.
            let id = id.cloned().or_else(begun).unwrap_or_default();
            let place = registry.take_place(&id, entry, max, fitting.max, evict)?;
            (id, place)
        };
        let after = match &place {
            Place::Taken => None,
            Place::TakenFrom(warm, mailbox) => {
                debug!(sandbox = %warm, "a warm sandbox gives way");
                let (reply, gone) = oneshot::channel();
                // Should there be no room, `gone` says so, and the next tend ends the warm one.
                let _ = mailbox.try_send(Request::Discard { reply });
                Some(Predecessor { id: warm.clone(), gone })
            }
            Place::Full { .. } => return Ok(place),
        };
        let parent = parent.and_then(Option::take);
        let strict = parent.as_ref().is_some_and(|parent| parent.needs.isolation.demands_limits());
        let options = CreateOptions {
            id: (id.is_some() || durable).then(|| place_id.clone()),
            persistent: durable && fitting.persistent,
            base: (**base).clone(),
            demanded: if strict { Limit::ALL.into() } else { Default::default() },
            ..CreateOptions::default()
        };
        let birth = Birth { spec: Arc::clone(spec), options, parent, after };
        self.spawn_keeper(place_id, fitting.index, None, inbox, Some(birth));
        Ok(place)
    }

    /// Makes a new sandbox for a client, on the first backend that has a place for it.
    async fn create(
        self: &Arc<Self>,
        fitting: &[Fitting],
        (spec, base): (&Arc<SandboxSpec>, &Arc<Base>),
        id: Option<&SandboxId>,
        needs: Needs,
        client: &str,
    ) -> Result<Joined> {
        let (reply, born) = oneshot::channel();
        let mut parent = Some(Parent { client: client.to_owned(), needs, reply });
        let mut full = self.config.max_sandboxes;
        for fitting in fitting {
            match self.conceive(fitting, (spec, base), id, Some(&mut parent), true)? {
                Place::Taken | Place::TakenFrom(..) => {
                    return born.await.unwrap_or(Err(SandboxError::ShuttingDown));
                }
                Place::Full { limit } => full = limit,
            }
        }
        let next = self.registry().next_expiry().unwrap_or_default();
        let retry_after = next.saturating_add(self.config.cleanup_interval);
        Err(SandboxError::Capacity { limit: full, retry_after })
    }

    /// Joins a sandbox that lives; `None` if it is gone.
    async fn join(
        &self,
        mailbox: &mpsc::Sender<Request>,
        client: &str,
        join: Join,
        fresh: bool,
    ) -> Result<Option<Joined>> {
        let (reply, joined) = oneshot::channel();
        self.post(mailbox, Request::Join { client: client.to_owned(), join, fresh, reply })?;
        match joined.await {
            Ok(Ok(joined)) => Ok(Some(joined)),
            Ok(Err(SandboxError::NotFound { .. })) | Err(_) => Ok(None),
            Ok(Err(error)) => Err(error),
        }
    }

    /// Takes the sandbox that the caller named, or says what it lacks.
    async fn take_preferred(
        &self,
        id: &SandboxId,
        asked: &Asked<'_>,
        client: &str,
        missing: &mut Vec<String>,
    ) -> Result<Option<Joined>> {
        let AcquireOptions { base, select, .. } = asked.options;
        let unknown = || SandboxError::NotFound { what: "sandbox", id: id.to_string() };
        let mailbox = {
            let registry = self.registry();
            let entry = registry.sandboxes.get(id);
            let entry = entry.filter(|entry| entry.lives() && entry.belongs_to(client));
            let entry = entry.ok_or_else(unknown)?;
            let mut lacks = self.entry_lacks(entry, asked);
            if !base.is_plain() && *base != *entry.base {
                lacks.push("its root stands on something else".to_owned());
            }
            if !lacks.is_empty() {
                missing.push(format!("sandbox `{id}`: {}", lacks.join(", ")));
                return Ok(None);
            }
            entry.mailbox.clone()
        };
        match self.join(&mailbox, client, Join::Any, select.require_fresh).await {
            Ok(Some(joined)) => Ok(Some(joined)),
            Ok(None) => Err(unknown()),
            Err(SandboxError::NoMatch { missing: lacks }) => {
                missing.extend(lacks);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns what a sandbox that lives lacks of what is asked for.
    fn entry_lacks(&self, entry: &Entry, asked: &Asked<'_>) -> Vec<String> {
        let options = &asked.options.select;
        let mut lacks = labels_missing(&entry.spec, &options.required_labels);
        lacks.extend(asked.lacking.get(entry.backend).into_iter().flatten().cloned());
        if let Some(handle) = &entry.handle {
            lacks.extend(Needs::of(asked.options).lacking(&**handle, &entry.spec));
        }
        if let Some(backend) = &options.preferred_backend
            && backend != self.name(entry.backend)
        {
            lacks.push(format!("backend `{backend}`"));
        }
        if options.require_fresh && entry.used {
            lacks.push("it is not fresh".to_owned());
        }
        lacks
    }

    /// Takes the default sandbox or one that is kept for the client, if one is what is asked for.
    async fn take_kept(
        &self,
        spec: &SandboxSpec,
        asked: &Asked<'_>,
        client: &str,
        missing: &mut Vec<String>,
    ) -> Result<Option<Joined>> {
        let AcquireOptions { base, select: options, .. } = asked.options;
        let candidates: Vec<_> = {
            let registry = self.registry();
            let fits = |id: &SandboxId| {
                let entry = registry.sandboxes.get(id)?;
                let same = same_spec(&entry.spec, spec) && *entry.base == *base;
                if !entry.lives() || !entry.belongs_to(client) || !same {
                    return None;
                }
                Some((entry.mailbox.clone(), self.entry_lacks(entry, asked)))
            };
            let default = registry.default.clone().filter(|_| options.preferred_id.is_none());
            let default = default.map(|id| (id, Join::Any));
            let kept = registry.kept_for(client).filter(|_| !options.require_fresh);
            let kept = kept.map(|held| {
                (held.shown.sandbox_id.clone(), Join::Kept(held.shown.session_id.clone()))
            });
            let all = default.into_iter().chain(kept);
            all.filter_map(|(id, join)| fits(&id).map(|fit| (id, join, fit))).collect()
        };
        for (id, join, (mailbox, lacks)) in candidates {
            if !lacks.is_empty() {
                missing.push(format!("sandbox `{id}`: {}", lacks.join(", ")));
                continue;
            }
            match self.join(&mailbox, client, join, options.require_fresh).await {
                Ok(Some(joined)) => return Ok(Some(joined)),
                // Gone, or taken by another call; the next may do.
                Ok(None) => {}
                Err(SandboxError::NoMatch { missing: lacks }) => missing.extend(lacks),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Takes a warm sandbox that becomes what the spec asks for.
    async fn take_warm(
        self: &Arc<Self>,
        fitting: &[Fitting],
        spec: &Arc<SandboxSpec>,
        needs: &Needs,
        client: &str,
        missing: &mut Vec<String>,
    ) -> Result<Option<Joined>> {
        let mut backends: Vec<_> = fitting.iter().map(|fitting| fitting.index).collect();
        while let Some((backend, mailbox)) = self.set_aside(&backends, spec, client) {
            let (reply, claimed) = oneshot::channel();
            let request = Request::Claim {
                spec: Arc::clone(spec),
                client: client.to_owned(),
                needs: needs.clone(),
                reply,
            };
            let _ = mailbox.try_send(request);
            let claimed = claimed.await;
            self.pool_kick.notify_one();
            match claimed {
                Ok(Ok(Claimed::Taken(joined))) => return Ok(Some(*joined)),
                // The others of this backend would say the same.
                Ok(Ok(Claimed::Unfit)) => backends.retain(|other| *other != backend),
                Ok(Ok(Claimed::Lost(lacks))) if !lacks.is_empty() => {
                    missing.extend(lacks);
                    backends.retain(|other| *other != backend);
                }
                Ok(Err(error)) => return Err(error),
                // It died; another may do.
                Ok(Ok(Claimed::Lost(_))) | Err(_) => self.enter()?,
            }
        }
        self.registry().ledger.misses += 1;
        Ok(None)
    }

    /// Sets the oldest fitting warm sandbox aside for a client, so that nobody else gets it.
    fn set_aside(
        &self,
        backends: &[usize],
        spec: &SandboxSpec,
        client: &str,
    ) -> Option<(usize, mpsc::Sender<Request>)> {
        let mut registry = self.registry();
        let fits = |(_, entry): &(&SandboxId, &Entry)| {
            entry.is_warm()
                && !entry.used
                && entry.spec.profile == spec.profile
                && backends.contains(&entry.backend)
                && entry.mailbox.capacity() > 0
        };
        let warm = registry.sandboxes.pooled().filter(fits);
        // Of one profile there may be several kinds: the one that was made for this first.
        let unlike = |warm: &SandboxSpec| {
            let network = warm.network_enabled != spec.network_enabled
                || warm.allowed_network != spec.allowed_network;
            let place = warm.workdir != spec.workdir
                || warm.limits.max_write_bytes != spec.limits.max_write_bytes;
            (network, place)
        };
        let best = warm.min_by_key(|(_, entry)| (unlike(&entry.spec), entry.since))?.0.clone();
        let mut warm = registry.sandboxes.get_mut(&best)?;
        warm.owner = Some(client.to_owned());
        warm.life = Life::Creating;
        warm.set_aside = true;
        Some((warm.backend, warm.mailbox.clone()))
    }

    async fn acquire(
        self: &Arc<Self>,
        spec: &SandboxSpec,
        options: &AcquireOptions,
        client: &str,
    ) -> Result<Joined> {
        self.enter()?;
        spec.validate()?;
        options.base.validate()?;
        let asked = Asked { options, lacking: self.lacking(&options.isolation).await };
        let mut missing = Vec::new();
        if let Some(id) = &options.select.preferred_id
            && let Some(joined) = self.take_preferred(id, &asked, client, &mut missing).await?
        {
            return Ok(joined);
        }
        // A backend that is asked for by name and is not there is an error on every path.
        if let Some(name) = &options.select.preferred_backend
            && !self.backends.iter().any(|known| known.name() == name)
        {
            return Err(SandboxError::NotFound { what: "backend", id: name.clone() });
        }
        if let Some(joined) = self.take_kept(spec, &asked, client, &mut missing).await? {
            return Ok(joined);
        }
        let outcome = self.take_new(spec, options, client, &mut missing).await;
        outcome.map_err(|error| match error {
            SandboxError::NoMatch { missing: lacks } => {
                missing.extend(lacks);
                SandboxError::NoMatch { missing }
            }
            other => other,
        })
    }

    /// Takes a warm sandbox, or makes one.
    async fn take_new(
        self: &Arc<Self>,
        spec: &SandboxSpec,
        options: &AcquireOptions,
        client: &str,
        missing: &mut Vec<String>,
    ) -> Result<Joined> {
        let AcquireOptions { select, base, isolation } = options;
        let labels = labels_missing(spec, &select.required_labels);
        if !labels.is_empty() {
            let missing = vec![format!("the spec: {}", labels.join(", "))];
            return Err(SandboxError::NoMatch { missing });
        }
        let fitting = self.choose(spec, isolation, select.preferred_backend.as_deref()).await?;
        let (spec, needs) = (Arc::new(spec.clone()), Needs::of(options));
        // What is warm stands on nothing of anybody's.
        if select.use_pool
            && base.is_plain()
            && let Some(joined) = self.take_warm(&fitting, &spec, &needs, client, missing).await?
        {
            return Ok(joined);
        }
        self.create(&fitting, (&spec, &Arc::new(base.clone())), None, needs, client).await
    }

    /// Joins a sandbox by its id, or makes one that has it.
    async fn attach(
        self: &Arc<Self>,
        request: &AttachRequest,
        isolation: &IsolationRequirements,
    ) -> Result<(Joined, bool)> {
        let AttachRequest { sandbox_id: id, client_id: client, .. } = request;
        let options = AcquireOptions { isolation: isolation.clone(), ..AcquireOptions::default() };
        let asked = Asked { options: &options, lacking: self.lacking(isolation).await };
        let unknown = || SandboxError::NotFound { what: "sandbox", id: id.to_string() };
        loop {
            self.enter()?;
            let mailbox = {
                let registry = self.registry();
                match registry.sandboxes.get(id) {
                    // Also one that is being made: the request waits until it is there.
                    Some(entry) if entry.belongs_to(client) && !entry.set_aside => {
                        let lacks = self.entry_lacks(entry, &asked);
                        if !lacks.is_empty() {
                            let missing = vec![format!("sandbox `{id}`: {}", lacks.join(", "))];
                            return Err(SandboxError::NoMatch { missing });
                        }
                        Some(entry.mailbox.clone())
                    }
                    Some(_) => return Err(unknown()),
                    None => None,
                }
            };
            if let Some(mailbox) = mailbox {
                if let Some(joined) = self.join(&mailbox, client, Join::Any, false).await? {
                    return Ok((joined, false));
                }
                // Another call may have made one of this id meanwhile: look again, unless it is the
                // same that is still there and cannot be joined.
                let registry = self.registry();
                let there = registry.sandboxes.get(id);
                if there.is_some_and(|entry| entry.mailbox.same_channel(&mailbox)) {
                    return Err(unknown());
                }
                continue;
            }
            if !request.create_if_missing {
                return Err(unknown());
            }
            id.validate()?;
            let spec = Arc::new(request.create_spec.clone().unwrap_or_default());
            spec.validate()?;
            let fitting = self.choose(&spec, isolation, None).await?;
            let (base, needs) = (Arc::default(), Needs::of(&options));
            match self.create(&fitting, (&spec, &base), Some(id), needs, client).await {
                // Another call has begun to make it meanwhile.
                Err(SandboxError::AlreadyExists { .. })
                    if self.registry().sandboxes.contains_key(id) => {}
                other => return other.map(|joined| (joined, true)),
            }
        }
    }

    /// Has the walls of a sandbox tried.
    async fn verify(&self, id: &SandboxId) -> Result<SignedReceipt> {
        let unknown = || SandboxError::NotFound { what: "sandbox", id: id.to_string() };
        let mailbox = {
            let registry = self.registry();
            let entry = registry.sandboxes.get(id).filter(|entry| entry.owner.is_some());
            entry.map(|entry| entry.mailbox.clone()).ok_or_else(unknown)?
        };
        let (reply, done) = oneshot::channel();
        self.post(&mailbox, Request::Verify { reply })?;
        done.await.unwrap_or_else(|_| Err(unknown()))
    }

    /// Moves a session, if it is the caller's.
    async fn move_session(
        self: &Arc<Self>,
        session: &SandboxSession,
        wanted: Wanted,
    ) -> Result<SandboxSession> {
        let id = &session.session_id;
        loop {
            self.enter()?;
            let found = self.registry().find(session);
            let mailbox = match found {
                Found::Held(mailbox) => mailbox,
                Found::Ended if wanted == Wanted::End => {
                    return Ok(SandboxSession {
                        state: SessionState::Terminated,
                        ..session.clone()
                    });
                }
                Found::Ended => return Err(SandboxError::SessionEnded { id: id.clone() }),
                Found::Unknown => {
                    return Err(SandboxError::NotFound { what: "session", id: id.clone() });
                }
            };
            let (reply, moved) = oneshot::channel();
            self.post(&mailbox, Request::Move { session_id: id.clone(), wanted, reply })?;
            match moved.await {
                // It ended while this waited: look again, as which is what was asked for or not.
                Ok(Err(SandboxError::SessionEnded { .. })) | Err(_) => {}
                Ok(outcome) => return outcome,
            }
        }
    }

    /// Vouches for a receipt, if there is a key to do so with.
    fn sign(&self, receipt: Receipt) -> Result<SignedReceipt> {
        match &self.key {
            Some(key) => key.sign(receipt),
            None => Ok(SignedReceipt { receipt, envelope: None }),
        }
    }

    fn guard(
        self: &Arc<Self>,
        handle: Arc<dyn Sandbox>,
        session: Option<String>,
    ) -> Arc<dyn Sandbox> {
        Arc::new(Guarded::new(Arc::clone(self), handle, session))
    }
}

#[async_trait]
impl SandboxManager for DefaultSandboxManager {
    async fn acquire(
        &self,
        spec: &SandboxSpec,
        options: &SandboxSelectionOptions,
        client_id: &str,
    ) -> Result<(SandboxSession, Arc<dyn Sandbox>), SandboxError> {
        self.acquire_on(spec, &Base::default(), options, client_id).await
    }

    async fn acquire_on(
        &self,
        spec: &SandboxSpec,
        base: &Base,
        options: &SandboxSelectionOptions,
        client_id: &str,
    ) -> Result<(SandboxSession, Arc<dyn Sandbox>), SandboxError> {
        let isolation = IsolationRequirements::default();
        let options = AcquireOptions { select: options.clone(), base: base.clone(), isolation };
        self.acquire_with(spec, &options, client_id).await
    }

    async fn acquire_with(
        &self,
        spec: &SandboxSpec,
        options: &AcquireOptions,
        client_id: &str,
    ) -> Result<(SandboxSession, Arc<dyn Sandbox>), SandboxError> {
        let Joined { session, handle, promise } =
            self.inner.acquire(spec, options, client_id).await?;
        promise.keep();
        let sandbox = self.inner.guard(handle, Some(session.session_id.clone()));
        Ok((session, sandbox))
    }

    async fn release(
        &self,
        session: &SandboxSession,
        keep_alive: bool,
    ) -> Result<(), SandboxError> {
        let wanted = if keep_alive { Wanted::Keep } else { Wanted::End };
        self.inner.move_session(session, wanted).await.map(drop)
    }

    async fn attach(&self, request: AttachRequest) -> Result<AttachResult, SandboxError> {
        self.attach_with(request, &IsolationRequirements::default()).await
    }

    async fn attach_with(
        &self,
        request: AttachRequest,
        isolation: &IsolationRequirements,
    ) -> Result<AttachResult, SandboxError> {
        let (joined, newly_created) = self.inner.attach(&request, isolation).await?;
        let Joined { session, handle, promise } = joined;
        promise.keep();
        let capabilities = handle.capabilities().clone();
        Ok(AttachResult { session, newly_created, capabilities })
    }

    async fn detach(&self, session: &SandboxSession) -> Result<(), SandboxError> {
        self.inner.move_session(session, Wanted::Detach).await.map(drop)
    }

    async fn suspend(&self, session: &SandboxSession) -> Result<(), SandboxError> {
        self.inner.move_session(session, Wanted::Suspend).await.map(drop)
    }

    async fn suspend_to_disk(&self, session: &SandboxSession) -> Result<(), SandboxError> {
        self.inner.move_session(session, Wanted::SuspendToDisk).await.map(drop)
    }

    async fn resume(&self, session: &SandboxSession) -> Result<SandboxSession, SandboxError> {
        self.inner.move_session(session, Wanted::Resume).await
    }

    async fn terminate(&self, session: &SandboxSession) -> Result<(), SandboxError> {
        self.inner.move_session(session, Wanted::End).await.map(drop)
    }

    async fn snapshot(
        &self,
        session: &SandboxSession,
        options: &SnapshotOptions,
    ) -> Result<Snapshot, SandboxError> {
        self.inner.snapshot(session, options).await
    }

    async fn savepoint(&self, session: &SandboxSession) -> Result<Snapshot, SandboxError> {
        self.inner.savepoint(session).await
    }

    async fn list_snapshots(&self) -> Result<Vec<Snapshot>, SandboxError> {
        self.inner.list_snapshots().await
    }

    async fn get_snapshot(&self, client_id: &str, id: &str) -> Result<Snapshot, SandboxError> {
        self.inner.get_snapshot(client_id, id).await
    }

    async fn remove_snapshot(&self, client_id: &str, id: &str) -> Result<(), SandboxError> {
        self.inner.enter()?;
        self.inner.remove_snapshot(client_id, id).await
    }

    async fn restore(
        &self,
        session: &SandboxSession,
        snapshot: &Snapshot,
    ) -> Result<(), SandboxError> {
        self.inner.restore(session, snapshot).await
    }

    async fn undo(&self, session: &SandboxSession) -> Result<Snapshot, SandboxError> {
        self.inner.undo(session).await
    }

    async fn fork(
        &self,
        session: &SandboxSession,
        options: &ForkOptions,
    ) -> Result<Vec<(SandboxSession, Arc<dyn Sandbox>)>, SandboxError> {
        Ok(self.inner.hand_out(self.inner.fork(session, options).await?))
    }

    async fn fork_snapshot(
        &self,
        snapshot: &Snapshot,
        options: &ForkOptions,
        client_id: &str,
    ) -> Result<Vec<(SandboxSession, Arc<dyn Sandbox>)>, SandboxError> {
        Ok(self.inner.hand_out(self.inner.fork_snapshot(snapshot, options, client_id).await?))
    }

    async fn export_snapshot(
        &self,
        client_id: &str,
        id: &str,
    ) -> Result<std::fs::File, SandboxError> {
        self.inner.export_snapshot(client_id, id).await
    }

    async fn import_snapshot(
        &self,
        client_id: &str,
        name: Option<String>,
        importer: Importer,
        from: Box<dyn std::io::Read + Send>,
    ) -> Result<Snapshot, SandboxError> {
        self.inner.import_snapshot(client_id, name, importer, from).await
    }

    async fn verify(&self, sandbox_id: &SandboxId) -> Result<SignedReceipt, SandboxError> {
        self.inner.enter()?;
        self.inner.verify(sandbox_id).await
    }

    async fn receipt(&self, sandbox_id: &SandboxId) -> Result<SignedReceipt, SandboxError> {
        let unknown = || SandboxError::NotFound { what: "sandbox", id: sandbox_id.to_string() };
        let (kept, handle) = {
            let registry = self.inner.registry();
            let entry = registry.sandboxes.get(sandbox_id);
            let entry = entry.filter(|entry| entry.lives() && entry.owner.is_some());
            let entry = entry.ok_or_else(unknown)?;
            (entry.receipt.clone(), entry.handle.clone())
        };
        match kept {
            Some(kept) => Ok((*kept).clone()),
            // What was tried when it was made is known to its backend.
            None => self.inner.sign(handle.ok_or_else(unknown)?.receipt()),
        }
    }

    fn receipt_key(&self) -> Option<String> {
        self.inner.key.as_ref().map(ReceiptKey::public)
    }

    async fn list_sessions(&self) -> Result<Vec<SandboxSession>, SandboxError> {
        let registry = self.inner.registry();
        let mut sessions: Vec<_> =
            registry.sessions.values().map(|held| held.shown.clone()).collect();
        drop(registry);
        sessions.sort_by(|a, b| (a.created_at, &a.session_id).cmp(&(b.created_at, &b.session_id)));
        Ok(sessions)
    }

    async fn list_sessions_on(
        &self,
        sandbox_id: &SandboxId,
    ) -> Result<Vec<SandboxSession>, SandboxError> {
        let registry = self.inner.registry();
        Ok(registry.sessions_on(sandbox_id).map(|held| held.shown.clone()).collect())
    }

    async fn get_session(&self, session_id: &str) -> Result<Option<SandboxSession>, SandboxError> {
        let registry = self.inner.registry();
        Ok(registry.sessions.get(session_id).map(|held| held.shown.clone()))
    }

    async fn get_session_by_sandbox(
        &self,
        sandbox_id: &SandboxId,
    ) -> Result<Option<SandboxSession>, SandboxError> {
        let registry = self.inner.registry();
        let is_active = |held: &Held| held.shown.state == SessionState::Active;
        let sessions = registry.sessions_on(sandbox_id);
        let best = sessions.max_by_key(|held| (is_active(held), held.shown.last_active_at));
        Ok(best.map(|held| held.shown.clone()))
    }

    async fn get_session_by_client(
        &self,
        client_id: &str,
    ) -> Result<Option<SandboxSession>, SandboxError> {
        let registry = self.inner.registry();
        let sessions = registry.sessions_of(client_id).map(|held| &held.shown);
        let active = sessions.filter(|session| session.state == SessionState::Active);
        Ok(active.max_by_key(|session| session.last_active_at).cloned())
    }

    async fn get_sandbox(
        &self,
        sandbox_id: &SandboxId,
    ) -> Result<Option<Arc<dyn Sandbox>>, SandboxError> {
        let handle = {
            let registry = self.inner.registry();
            let entry = registry.sandboxes.get(sandbox_id);
            // What is warm is nobody's, and no command may run in it.
            let entry = entry.filter(|entry| entry.lives() && entry.owner.is_some());
            entry.and_then(|entry| entry.handle.clone())
        };
        Ok(handle.map(|handle| self.inner.guard(handle, None)))
    }

    async fn set_default_sandbox(&self, sandbox_id: Option<SandboxId>) -> Result<(), SandboxError> {
        self.inner.enter()?;
        let Some(id) = sandbox_id else {
            let _turn = self.inner.default_turn.lock().await;
            self.inner.write_default(None).await?;
            self.inner.registry().default = None;
            return Ok(());
        };
        let unknown = || SandboxError::NotFound { what: "sandbox", id: id.to_string() };
        let mailbox = {
            let registry = self.inner.registry();
            let entry = registry.sandboxes.get(&id);
            let entry = entry.filter(|entry| entry.lives() && entry.owner.is_some());
            entry.map(|entry| entry.mailbox.clone()).ok_or_else(unknown)?
        };
        let (reply, done) = oneshot::channel();
        self.inner.post(&mailbox, Request::MakeDefault { reply })?;
        done.await.unwrap_or_else(|_| Err(unknown()))
    }

    async fn get_default_sandbox(&self) -> Option<SandboxId> {
        self.inner.registry().default.clone()
    }

    async fn cleanup_expired(&self) -> Result<u64, SandboxError> {
        self.inner.enter()?;
        Ok(self.inner.sweep().await)
    }

    async fn stats(&self) -> SandboxManagerStats {
        self.inner.start();
        self.inner.registry().stats()
    }

    async fn witnessed_by(&self, witness: Arc<dyn Witness>) {
        self.inner.tell(witness).await;
    }

    fn tell_rest(&self) {
        self.inner.tell_barred(true);
    }

    async fn health(&self) -> Result<bool, SandboxError> {
        let report = self.health_report().await;
        Ok(report.iter().any(|(_, health)| health.as_ref().is_ok_and(|health| health.healthy)))
    }
}
