//! Dialects of one manager: wire types, authentication, status codes, and nothing else.
//!
//! [`rest`] is the native one, under `/v1`. Whoever asks is a `Principal`: a user of this host on the
//! unix socket, the tenant of an API key on TCP. The manager is told client ids that begin with the
//! tenant, and every look-up here asks whose it is first, so that what is somebody else's does not
//! exist. How a sandbox is made, kept and ended is left to the manager.

pub mod audit;
mod catalog;
mod crowd;
pub mod e2b;
mod error;
mod events;
mod extract;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod idempotency;
pub mod journal;
pub mod keys;
mod principal;
mod proxy;
mod quota;
pub mod rest;
pub mod server;
pub mod tls;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warren::shell::{LeftCommand, Shells};
use warren::template::{self, Behalf, BuildRequest, Templates};
use warren::{
    AcquireOptions, Base, Sandbox, SandboxId, SandboxManager, SandboxSelectionOptions,
    SandboxSession, SandboxSpec, SessionState, Witness,
};

pub use error::{ApiError, ErrorBody, ErrorView};
pub use events::{EventKind, EventView};
pub use extract::MAX_BODY;
pub use idempotency::KEY_HEADER;
pub use principal::{CLIENT_HEADER, Peer, tenant_of};

use audit::{Account, Audit, End, Entry, Exec};
use catalog::Catalog;
use events::Events;
use idempotency::Repeatable;
use journal::{Journal, MemoryJournal};
use keys::{Keys, Quotas};
use principal::{Principal, split};
use proxy::Ports;
use quota::{Ledger, Promise, Running, Saving, Size};

/// How often a look is taken at what happened by itself.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How long a snapshot waits for others that may take the last place, or fail.
const SAVING_TIME: Duration = Duration::from_secs(10);

/// How the API behaves.
#[derive(Debug, Default)]
pub struct Options {
    /// Who may come over TCP; nobody if absent.
    pub keys: Option<Keys>,
    /// Names that a `Host` header may have beside the address itself.
    pub allowed_hosts: Vec<String>,
    /// What outlives the daemon; nothing if absent.
    pub journal: Option<Arc<dyn Journal>>,
    /// What sandboxes are made from by name; nothing if absent.
    pub templates: Option<Templates>,
    /// What a tenant may have whose key says nothing else. The operator may have everything.
    pub quotas: Quotas,
    /// Where every call is noted; nowhere if absent.
    pub audit: Option<Audit>,
    /// Whether commands are followed wherever they can be, whoever runs them.
    pub explain: bool,
}

/// The notes of the journal that name the default sandboxes of tenants.
const DEFAULT: &str = "default/";

/// One manager and what its dialects share. Clones are handles to the same one.
#[derive(Clone)]
pub struct Api(Arc<Inner>);

struct Inner {
    manager: Arc<dyn SandboxManager>,
    options: Options,
    catalog: Catalog,
    ledger: Ledger,
    events: Events,
    repeatable: Repeatable,
    journal: Arc<dyn Journal>,
    ports: Ports,
    writers: rest::execs::Writers,
    shells: Shells,
    /// The commands that an earlier daemon started and that run still.
    left: Mutex<Vec<(LeftCommand, Running)>>,
    pending: rest::templates::Pending,
    /// The default sandbox of each tenant but the operator's, which is the manager's own.
    defaults: Mutex<HashMap<Arc<str>, SandboxId>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").field("options", &self.0.options).finish_non_exhaustive()
    }
}

impl Api {
    /// Puts an API before a manager.
    pub fn new(manager: Arc<dyn SandboxManager>, options: Options) -> Self {
        let journal = options.journal.clone().unwrap_or_else(|| Arc::new(MemoryJournal::default()));
        Self(Arc::new(Inner {
            manager,
            options,
            catalog: Catalog::default(),
            ledger: Ledger::default(),
            events: Events::default(),
            repeatable: Repeatable::new(Arc::clone(&journal)),
            ports: Ports::default(),
            writers: Default::default(),
            journal,
            shells: Shells::default(),
            left: Mutex::default(),
            pending: Default::default(),
            defaults: Mutex::default(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        }))
    }

    /// Remembers a sandbox that an earlier daemon made, by what its store has of it.
    pub fn remember(&self, owner: &str, id: &SandboxId, labels: &[(String, String)]) {
        self.0.catalog.remember(principal::split(owner).0, id, labels);
    }

    /// Takes stock of what the manager has, and looks after it until [`stop`](Self::stop).
    pub async fn start(&self) -> Result<(), warren::SandboxError> {
        if let Some(account) = self.account() {
            if let Some(templates) = &self.options().templates {
                templates.witnessed_by(account.clone());
            }
            self.manager().witnessed_by(account).await;
        }
        let (events, notes) = self.0.journal.load().await?;
        if let Some(note) = self.0.events.restore(&events, &notes) {
            self.0.journal.record(Vec::new(), vec![note]).await?;
        }
        let defaults = notes.iter().filter_map(|(name, id)| {
            Some((name.strip_prefix(DEFAULT)?.into(), SandboxId::from_string(id.as_str()?)))
        });
        self.0.defaults.lock().await.extend(defaults);
        let mut seen = HashSet::new();
        for session in self.manager().list_sessions().await? {
            if session.state == SessionState::Terminated {
                continue;
            }
            let sandbox = self.manager().get_sandbox(&session.sandbox_id).await?;
            let size = sandbox.as_ref().map(|one| Size::of(&one.capabilities().limits));
            let (tenant, _) = principal::split(&session.client_id);
            self.0.ledger.note(tenant, &session.sandbox_id, size.unwrap_or_default());
            if let Some(sandbox) = sandbox
                && seen.insert(session.sandbox_id)
            {
                self.count_left(tenant, &*sandbox).await?;
            }
        }
        self.look().await;
        let events = self.0.events.clone();
        self.0.tasks.spawn(events.record(Arc::clone(&self.0.journal), self.0.stop.clone()));
        let this = self.clone();
        self.0.tasks.spawn(async move {
            while this.0.stop.run_until_cancelled(tokio::time::sleep(LOOK_INTERVAL)).await.is_some()
            {
                this.look().await;
            }
        });
        Ok(())
    }

    /// Ends the event streams and waits until everything that was begun is done.
    pub async fn stop(&self) {
        self.0.stop.cancel();
        if let Some(templates) = &self.options().templates {
            templates.shutdown().await;
        }
        self.manager().tell_rest();
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    /// Waits until those who hung up at the end are noted, for a moment at the most.
    pub async fn noted(&self) {
        let _ = tokio::time::timeout(LOOK_INTERVAL, self.0.tasks.wait()).await;
    }

    fn manager(&self) -> &Arc<dyn SandboxManager> {
        &self.0.manager
    }

    fn options(&self) -> &Options {
        &self.0.options
    }

    fn audit(&self) -> Option<&Audit> {
        self.0.options.audit.as_ref()
    }

    /// Returns the log as whoever runs commands is to have it.
    fn account(&self) -> Option<Arc<dyn Witness>> {
        let audit = self.audit()?.clone();
        Some(Arc::new(Account::new(audit, self.0.tasks.clone())))
    }

    /// Says for whom a template has commands run in a caller's sandbox, for the log.
    fn behalf(&self, who: &Principal) -> Behalf {
        Behalf::new(self.account(), who.client_id(), who.note.request())
    }

    /// Notes how something ended that only the API knows as a command.
    async fn ended(&self, end: End) {
        if let Some(audit) = self.audit() {
            // The daemon ends, and says so in its own log.
            let _ = audit.after(Entry::End(Box::new(end))).await;
        }
    }

    fn keys(&self) -> Option<&Keys> {
        self.0.options.keys.as_ref()
    }

    /// Counts the commands in a sandbox that an earlier daemon started.
    async fn count_left(
        &self,
        tenant: &str,
        sandbox: &dyn Sandbox,
    ) -> Result<(), warren::SandboxError> {
        let execs = match sandbox.list_execs().await {
            Err(warren::SandboxError::Ended { .. }) => return Ok(()),
            execs => execs?,
        };
        let mut left = self.0.left.lock().await;
        for exec in execs {
            // What a template starts in each sandbox was not counted when it began either.
            let uncounted = exec.info().end.is_some() || exec.id().as_str() == template::START;
            if !uncounted {
                let running = self.0.ledger.run_on(&tenant.into());
                left.push((LeftCommand::new(exec), running));
            }
        }
        Ok(())
    }

    /// Forgets what is left of an earlier daemon and has ended.
    async fn look_at_left(&self) {
        let mut left = self.0.left.lock().await;
        let mut at = 0;
        // One at a time: whoever asks may hang up in the middle.
        while let Some((command, _)) = left.get_mut(at) {
            match command.runs().await {
                true => at += 1,
                false => drop(left.swap_remove(at)),
            }
        }
    }

    /// Notices what happened by itself.
    async fn look(&self) {
        self.look_at_left().await;
        let moment = self.0.events.moment();
        match self.manager().list_sessions().await {
            Ok(sessions) => {
                for gone in self.0.events.note_all(moment, &sessions) {
                    self.forget(&gone).await;
                }
            }
            Err(error) => tracing::warn!(%error, "cannot list the sessions"),
        }
    }

    /// Notices what became of a session by a request.
    async fn look_at(&self, session: &SandboxSession) -> Result<SandboxSession, ApiError> {
        let now = self.manager().get_session(&session.session_id).await?;
        let now = now.unwrap_or_else(|| SandboxSession {
            state: SessionState::Terminated,
            ..session.clone()
        });
        if let Some(gone) = self.0.events.note(&now) {
            self.forget(&gone).await;
        }
        Ok(now)
    }

    /// Ends a session that nobody was told of.
    async fn undo(&self, session: &SandboxSession) {
        if self.manager().terminate(session).await.is_ok() {
            // What cannot be looked at now is noticed by the next look at all.
            let _ = self.look_at(session).await;
        }
    }

    async fn forget(&self, id: &SandboxId) {
        self.0.catalog.forget(id);
        self.0.ledger.forget(id);
        let mut defaults = self.0.defaults.lock().await;
        let unset: Vec<_> = defaults.extract_if(|_, default| default == id).collect();
        if unset.is_empty() {
            return;
        }
        let notes = unset.into_iter().map(|(tenant, _)| (format!("{DEFAULT}{tenant}"), None));
        if let Err(error) = self.0.journal.record(Vec::new(), notes.collect()).await {
            // A default that does not live is none, so this one comes back with its id at most.
            tracing::warn!(%error, "cannot record that a default is gone");
        }
    }

    /// Sets or unsets a tenant's default sandbox.
    async fn set_default(
        &self,
        tenant: &Arc<str>,
        id: Option<SandboxId>,
    ) -> Result<(), warren::SandboxError> {
        // Locked until it is written, so that the last to come is what is kept.
        let mut defaults = self.0.defaults.lock().await;
        let note = (format!("{DEFAULT}{tenant}"), id.as_ref().map(|id| id.as_str().into()));
        self.0.journal.record(Vec::new(), vec![note]).await?;
        match id {
            Some(id) => defaults.insert(Arc::clone(tenant), id),
            None => defaults.remove(tenant),
        };
        Ok(())
    }

    /// Does work to its end, even if whoever asked for it hangs up.
    async fn finish<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        let done = self.0.tasks.spawn(work).await;
        done.unwrap_or_else(|error| Err(ApiError::internal(&error.to_string())))
    }

    /// Returns the caller's session of this id.
    async fn session(&self, who: &Principal, id: &str) -> Result<SandboxSession, ApiError> {
        who.note.session(id);
        let session = self.manager().get_session(id).await?;
        let found = session.filter(|session| {
            who.note.sandbox(&session.sandbox_id);
            let own = who.has(session);
            if !own {
                who.note.foreign();
            }
            own
        });
        found.ok_or_else(|| ApiError::not_found("session", id))
    }

    /// Returns the caller's sessions that have not ended, oldest first.
    async fn sessions(&self, who: &Principal) -> Result<Vec<SandboxSession>, ApiError> {
        let mut sessions = self.manager().list_sessions().await?;
        sessions.retain(|one| one.state != SessionState::Terminated && who.has(one));
        sessions.sort_by(|a, b| (a.created_at, &a.session_id).cmp(&(b.created_at, &b.session_id)));
        Ok(sessions)
    }

    /// Returns the caller's sandbox of this id, with the caller's sessions on it.
    async fn sandbox(
        &self,
        who: &Principal,
        id: &SandboxId,
    ) -> Result<(Arc<dyn Sandbox>, Vec<SandboxSession>), ApiError> {
        who.note.sandbox(id);
        let mut sessions = self.manager().list_sessions_on(id).await?;
        sessions.retain(|one| one.state != SessionState::Terminated);
        let exists = !sessions.is_empty();
        sessions.retain(|session| who.has(session));
        let missing = || ApiError::not_found("sandbox", id.as_str());
        if sessions.is_empty() {
            if exists {
                who.note.foreign();
            }
            return Err(missing());
        }
        let sandbox = self.manager().get_sandbox(id).await?.ok_or_else(missing)?;
        Ok((sandbox, sessions))
    }

    /// Promises the caller one more sandbox, after a second look at what it still has.
    async fn promise(&self, who: &Principal, spec: &SandboxSpec) -> Result<Promise, ApiError> {
        let size = Size::of(&spec.limits);
        if let Ok(promise) = self.0.ledger.promise(&who.tenant, &who.quotas, size) {
            return Ok(promise);
        }
        let moment = self.0.ledger.moment();
        let all = self.manager().list_sessions().await?;
        let living: HashSet<SandboxId> = all
            .into_iter()
            .filter(|session| session.state != SessionState::Terminated)
            .map(|session| session.sandbox_id)
            .collect();
        self.0.ledger.settle(&who.tenant, moment, &living);
        self.0.ledger.promise(&who.tenant, &who.quotas, size)
    }

    /// Returns how many snapshots each tenant keeps.
    async fn kept_snapshots(&self) -> Result<HashMap<String, u64>, ApiError> {
        let mut kept = HashMap::new();
        for snapshot in self.manager().list_snapshots().await? {
            let (tenant, _) = split(snapshot.owner.as_deref().unwrap_or_default());
            *kept.entry(tenant.to_owned()).or_default() += 1;
        }
        Ok(kept)
    }

    /// Lets a caller make one more snapshot. Where only those that are being made are in the way it waits
    /// for them: one that fails takes no place.
    async fn save_one(&self, who: &Principal) -> Result<Saving, ApiError> {
        let ledger = &self.0.ledger;
        let Some(limit) = who.quotas.snapshots else {
            return Ok(ledger.save_unbounded(&who.tenant));
        };
        let full = || {
            ApiError::quota("snapshots", limit)
                .with_hint("`warren snapshot rm` one, or ask the operator for a larger quota")
        };
        let admitted = async {
            loop {
                let saved = ledger.saved();
                let changed = saved.notified();
                let at = ledger.before_counting(&who.tenant);
                let kept = self.kept_snapshots().await?.remove(&*who.tenant).unwrap_or(0);
                let room = limit.checked_sub(kept).filter(|room| *room > 0).ok_or_else(full)?;
                if let Some(saving) = ledger.save(&who.tenant, room, at) {
                    return Ok(saving);
                }
                changed.await;
            }
        };
        tokio::time::timeout(SAVING_TIME, admitted).await.unwrap_or_else(|_| Err(full()))
    }

    /// Counts one more command of a caller's, after a second look at those that were left.
    async fn count_command(&self, who: &Principal) -> Result<Running, ApiError> {
        if let Ok(running) = self.0.ledger.run(&who.tenant, &who.quotas) {
            return Ok(running);
        }
        self.look_at_left().await;
        self.0.ledger.run(&who.tenant, &who.quotas)
    }

    /// Lets a caller build a template: the build holds a place, and what its sandbox and its commands may
    /// use, until it is over.
    async fn admit_build(
        &self,
        who: &Principal,
        request: &mut BuildRequest,
    ) -> Result<(), ApiError> {
        rest::templates::lower(request, &who.quotas);
        let building = self.0.ledger.build(&who.tenant)?;
        // Steps follow one another: one sandbox and one command at a time.
        let running = self.count_command(who).await?;
        let promise = self.promise(who, &request.spec).await?;
        request.held = Some(Arc::new((building, running, promise)));
        Ok(())
    }

    /// Lets a caller run one more command: counts it, and notes it before it is run.
    async fn run_one(&self, who: &Principal, exec: Exec) -> Result<Running, ApiError> {
        let running = self.count_command(who).await?;
        if let Some(audit) = self.audit() {
            let (request, tenant) = (who.note.request(), who.tenant.to_string());
            let exec = Exec { request, tenant, ..exec };
            let noted = audit.before(Entry::Exec(Box::new(exec))).await;
            noted.map_err(|_| ApiError::unwritable())?;
        }
        Ok(running)
    }

    /// Gives the caller a sandbox on the host's toolchain.
    async fn acquire(
        &self,
        who: &Principal,
        spec: &SandboxSpec,
        options: &SandboxSelectionOptions,
    ) -> Result<(SandboxSession, Arc<dyn Sandbox>), ApiError> {
        self.acquire_on(who, spec, &Base::default(), options).await
    }

    /// Gives the caller a sandbox whose root stands on `base`.
    async fn acquire_on(
        &self,
        who: &Principal,
        spec: &SandboxSpec,
        base: &Base,
        options: &SandboxSelectionOptions,
    ) -> Result<(SandboxSession, Arc<dyn Sandbox>), ApiError> {
        let (select, base) = (options.clone(), base.clone());
        let options = AcquireOptions { select, base, ..AcquireOptions::default() };
        self.acquire_with(who, spec, &options).await
    }

    /// Gives the caller a sandbox, with everything that can be asked for.
    async fn acquire_with(
        &self,
        who: &Principal,
        spec: &SandboxSpec,
        options: &AcquireOptions,
    ) -> Result<(SandboxSession, Arc<dyn Sandbox>), ApiError> {
        let client_id = who.client_id();
        let mut name = self.0.catalog.promise(&who.tenant, spec)?;
        if let (Some(before), Some(text)) = (name.before.clone(), name.text().map(str::to_owned)) {
            let mut theirs = self.manager().list_sessions_on(&before).await?;
            theirs.retain(|one| one.state != SessionState::Terminated);
            let waits = |one: &SandboxSession| {
                one.state == SessionState::Detached && one.client_id == client_id
            };
            if theirs.is_empty() {
                name.outlived();
            } else if !theirs.iter().all(waits) {
                return Err(catalog::taken(&text));
            }
        }
        let promise = self.promise(who, spec).await?;
        let (session, sandbox) = self.manager().acquire_with(spec, options, &client_id).await?;
        let id = sandbox.id();
        who.note.sandbox(id);
        who.note.session(&session.session_id);
        if let (Some(before), Some(text)) = (&name.before, name.text())
            && before != id
        {
            // The one that has the name waits, and is not what was asked for now.
            self.manager().terminate(&session).await?;
            return Err(catalog::taken(text));
        }
        promise.keep(id, &sandbox.capabilities().limits);
        if !self.0.catalog.knows(id) {
            name.keep(&who.tenant, id, &spec.labels);
        }
        self.0.events.note(&session);
        Ok((session, sandbox))
    }
}
