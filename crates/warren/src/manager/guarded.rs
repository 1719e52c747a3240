//! The sandbox as its clients hold it: each use is counted as work of a session, and refused once
//! the session or the sandbox does not allow it.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};

use super::Inner;
use super::keeper::{Request, Wanted};
use super::registry::Life;
use super::session::Held;
use crate::shell::is_shell;
use crate::{
    BarredDestinations, Base, Capture, Command, DiffEntry, DiffOptions, Enforcement, ExecContext,
    ExecEnd, ExecHandle, ExecId, ExecInfo, ExecMeasure, ExecOptions, ExecOutput, ExecReport,
    Extent, FoundExec, LogRead, LogWait, Outcome, PortStream, Reach, Receipt, ResourceUsage,
    Result, Run, Sandbox, SandboxCapabilities, SandboxError, SandboxFiles, SandboxId,
    SandboxSession, SessionState, SnapshotOptions, StreamOutput, TerminalSize, Witness,
};

/// A sandbox as its clients hold it.
#[derive(Debug)]
pub(super) struct Guarded {
    inner: Arc<Inner>,
    pub(super) handle: Arc<dyn Sandbox>,
    /// Through which session it is used; all of the sandbox's if it was asked for by its id.
    session: Option<String>,
    /// Its files, where they are one user's.
    pub(super) files: Option<Arc<dyn SandboxFiles>>,
}

/// Whether a use may change what is inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    Runs,
    Looks,
}

/// Work that goes on: while this lives, its sessions do not rest.
#[derive(Debug)]
pub(super) struct Work {
    inner: Arc<Inner>,
    sessions: Vec<String>,
    kind: Kind,
}

/// Who works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A caller, who waits for it.
    Call,
    /// A command on its own, which nobody need wait for.
    Command,
}

impl Work {
    fn count(kind: Kind, held: &mut Held) -> &mut u32 {
        match kind {
            Kind::Call => &mut held.busy,
            Kind::Command => &mut held.running,
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let mut registry = self.inner.registry();
        for id in &self.sessions {
            if let Some(held) = registry.sessions.get_mut(id) {
                let count = Self::count(self.kind, held);
                *count = count.saturating_sub(1);
                // A command that ends is no sign of the client who left it.
                let counts = match (self.kind, held.shown.state) {
                    (_, SessionState::Active) | (Kind::Call, SessionState::Detached) => true,
                    (Kind::Command, SessionState::Detached)
                    | (_, SessionState::Suspended | SessionState::Terminated) => false,
                };
                if counts {
                    held.touch();
                }
            }
        }
    }
}

impl Guarded {
    pub(super) fn new(
        inner: Arc<Inner>,
        handle: Arc<dyn Sandbox>,
        session: Option<String>,
    ) -> Self {
        Self { inner, handle, session, files: None }
    }

    /// Begins a piece of work, if the sandbox is to be used.
    pub(super) fn begin(&self, usage: Use) -> Result<Work> {
        self.begin_as(usage, Kind::Call)
    }

    fn begin_as(&self, usage: Use, kind: Kind) -> Result<Work> {
        let id = self.handle.id();
        let mut registry = self.inner.registry();
        let ended = || SandboxError::Ended { id: id.clone() };
        let life = registry.sandboxes.get(id).map(|entry| entry.life);
        let sessions = match &self.session {
            Some(session) if registry.sessions.contains_key(session) => vec![session.clone()],
            Some(session) if life.is_some_and(|life| life != Life::Ending) => {
                return Err(SandboxError::SessionEnded { id: session.clone() });
            }
            Some(_) => return Err(ended()),
            None => registry.sessions_on(id).map(|held| held.shown.session_id.clone()).collect(),
        };
        let mut entry = registry.sandboxes.get_mut(id).ok_or_else(ended)?;
        match (entry.life, usage) {
            (Life::Running, _) | (Life::Suspended, Use::Looks) => {}
            (Life::Suspended, Use::Runs) => {
                return Err(SandboxError::Suspended { id: id.clone() });
            }
            (Life::Creating | Life::Ending, _) => return Err(ended()),
        }
        entry.used |= usage == Use::Runs;
        drop(entry);
        for id in &sessions {
            if let Some(held) = registry.sessions.get_mut(id) {
                *Work::count(kind, held) += 1;
                if held.shown.state != SessionState::Suspended {
                    held.touch();
                }
            }
        }
        Ok(Work { inner: Arc::clone(&self.inner), sessions, kind })
    }

    /// Returns the session that a call on the sandbox itself is made through.
    fn session(&self) -> Result<SandboxSession> {
        let id = self.handle.id();
        let registry = self.inner.registry();
        let held = match &self.session {
            Some(session) => registry.sessions.get(session),
            None => {
                let active = |held: &&Held| held.shown.state == SessionState::Active;
                let first = registry.sessions_on(id).find(active);
                first.or_else(|| registry.sessions_on(id).next())
            }
        };
        let held = held.ok_or_else(|| SandboxError::Ended { id: id.clone() })?;
        Ok(held.shown.clone())
    }
}

impl Guarded {
    /// Has a command on its own count as work until it ends, and its end be told.
    fn watch(&self, exec: FoundExec) {
        let id = self.handle.id().clone();
        // Asked now: once it ends with its sandbox, nobody knows whose that was.
        let client = self.inner.client_of(&id);
        // A shell that waits for commands is no work; whoever runs one in it waits for that. A sandbox that is suspended has
        // commands all the same.
        let is_work = exec.info().end.is_none() && !is_shell(&*exec);
        let work = is_work.then(|| self.begin_as(Use::Looks, Kind::Command).ok()).flatten();
        let (inner, stop) = (Arc::clone(&self.inner), self.inner.stop.clone());
        self.inner.tasks.spawn(async move {
            // One that ends later is told by the next manager.
            if let Some(end) = stop.run_until_cancelled(exec.wait()).await {
                drop(work);
                inner.tell_end(&*exec, &id, &client, &end);
            }
        });
    }

    /// Has the commands that outlived the last manager count as work of their sessions, and their ends be told.
    pub(super) async fn watch_all(&self) {
        for exec in self.handle.list_execs().await.unwrap_or_default() {
            self.watch(exec);
        }
    }

    /// Tells of those that have ended and that nobody was told of.
    pub(super) async fn tell_ended(&self) {
        let client = self.inner.client_of(self.handle.id());
        for exec in self.handle.list_execs().await.unwrap_or_default() {
            if exec.info().end.is_some() {
                self.inner.tell_end(&*exec, self.handle.id(), &client, &exec.wait().await);
            }
        }
    }

    /// Has it be told what becomes of a command that is waited for, also if it is given up.
    fn telling<'a>(&'a self, ctx: &'a ExecContext) -> Option<Told<'a>> {
        let witness = self.inner.witness()?;
        let client = self.inner.client_of(self.handle.id());
        Some(Told {
            witness,
            sandbox: self.handle.id(),
            client,
            request: &ctx.request_id,
            done: false,
        })
    }

    /// Tells of a command that was to be on its own and is not. What serves no request of its own, as a shell, nobody was
    /// told of.
    fn tell_unstarted(&self, ctx: &ExecContext, name: Option<&ExecId>, outcome: &Outcome<'_>) {
        let Some(witness) = self.inner.witness().filter(|_| !ctx.request_id.is_empty()) else {
            return;
        };
        let (sandbox, client) = (self.handle.id(), self.inner.client_of(self.handle.id()));
        let run = Run { sandbox, client: &client, request: &ctx.request_id, name };
        witness.ended(&run, outcome);
    }

    fn hold(&self, exec: FoundExec) -> FoundExec {
        let guarded =
            Self::new(Arc::clone(&self.inner), Arc::clone(&self.handle), self.session.clone());
        Arc::new(GuardedExec { guarded, exec })
    }
}

/// A command that is waited for, and whoever is told what becomes of it.
struct Told<'a> {
    witness: Arc<dyn Witness>,
    sandbox: &'a SandboxId,
    client: String,
    request: &'a str,
    done: bool,
}

impl Told<'_> {
    fn say(&mut self, outcome: &Outcome<'_>) {
        let Self { sandbox, client, request, .. } = self;
        self.witness.ended(&Run { sandbox, client, request, name: None }, outcome);
        self.done = true;
    }
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.say(&Outcome::GivenUp);
        }
    }
}

/// A command that is being started. Should whoever asked for it not wait, it runs all the same, or is not begun.
struct Starting<'a> {
    guarded: &'a Guarded,
    /// Its name, until it was started.
    id: Option<ExecId>,
    ctx: &'a ExecContext,
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        let Some(id) = self.id.take() else { return };
        if tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let Guarded { inner, handle, session, .. } = self.guarded;
        let guarded = Guarded::new(Arc::clone(inner), Arc::clone(handle), session.clone());
        let ctx = self.ctx.clone();
        inner.tasks.spawn(async move {
            match guarded.handle.find_exec(&id).await {
                Ok(Some(exec)) => guarded.watch(exec),
                Ok(None) | Err(_) => {
                    guarded.tell_unstarted(&ctx, Some(&id), &Outcome::GivenUp);
                }
            }
        });
    }
}

/// An exec as its clients hold it: looking at it is work of its session.
#[derive(Debug)]
struct GuardedExec {
    guarded: Guarded,
    exec: FoundExec,
}

#[async_trait]
impl ExecHandle for GuardedExec {
    fn id(&self) -> &ExecId {
        self.exec.id()
    }

    fn info(&self) -> ExecInfo {
        self.exec.info()
    }

    async fn read(&self, offset: u64, max: usize, wait: LogWait) -> Result<LogRead> {
        let _work = self.guarded.begin(Use::Looks)?;
        self.exec.read(offset, max, wait).await
    }

    async fn wait(&self) -> Result<ExecEnd> {
        let _work = self.guarded.begin(Use::Looks)?;
        self.exec.wait().await
    }

    async fn signal(&self, signal: i32) -> Result<()> {
        let _work = self.guarded.begin(Use::Looks)?;
        self.exec.signal(signal).await
    }

    async fn kill(&self) -> Result<()> {
        let _work = self.guarded.begin(Use::Looks)?;
        self.exec.kill().await
    }

    async fn kill_children(&self) -> Result<()> {
        let _work = self.guarded.begin(Use::Looks)?;
        self.exec.kill_children().await
    }

    async fn resize(&self, size: TerminalSize) -> Result<()> {
        let _work = self.guarded.begin(Use::Looks)?;
        self.exec.resize(size).await
    }

    async fn write_input(&self, offset: Option<u64>, bytes: &[u8], end: bool) -> Result<u64> {
        let _work = self.guarded.begin(Use::Runs)?;
        self.exec.write_input(offset, bytes, end).await
    }

    async fn measure(&self) -> Result<ExecMeasure> {
        let _work = self.guarded.begin(Use::Looks)?;
        self.exec.measure().await
    }

    fn count_from_here(&self) {
        self.exec.count_from_here();
    }

    async fn forget(&self) -> Result<()> {
        let _work = self.guarded.begin(Use::Looks)?;
        self.exec.forget().await
    }
}

#[async_trait]
impl Sandbox for Guarded {
    fn id(&self) -> &SandboxId {
        self.handle.id()
    }

    fn capabilities(&self) -> &SandboxCapabilities {
        self.handle.capabilities()
    }

    async fn exec(&self, cmd: &Command, ctx: &ExecContext) -> Result<ExecOutput, SandboxError> {
        Ok(self.exec_report(cmd, ctx).await?.output)
    }

    async fn exec_streaming(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        output_tx: mpsc::Sender<StreamOutput>,
    ) -> Result<ExecOutput, SandboxError> {
        let told = self.telling(ctx);
        let ran = async {
            let _work = self.begin(Use::Runs)?;
            self.handle.exec_streaming(cmd, ctx, output_tx).await
        };
        let report = ran.await.map(ExecReport::from);
        if let Some(mut told) = told {
            told.say(&Outcome::of_report(&report));
        }
        report.map(|report| report.output)
    }

    async fn is_alive(&self) -> bool {
        let id = self.handle.id();
        let lives = match (&self.session, self.inner.registry()) {
            (Some(session), registry) => registry.sessions.contains_key(session),
            (None, registry) => registry.sandboxes.get(id).is_some_and(|entry| entry.lives()),
        };
        lives && self.handle.is_alive().await
    }

    async fn suspend(&self) -> Result<(), SandboxError> {
        let session = self.session()?;
        self.inner.move_session(&session, Wanted::Suspend).await.map(drop)
    }

    async fn suspend_to_disk(&self) -> Result<(), SandboxError> {
        let session = self.session()?;
        self.inner.move_session(&session, Wanted::SuspendToDisk).await.map(drop)
    }

    async fn resume(&self) -> Result<(), SandboxError> {
        let session = self.session()?;
        self.inner.move_session(&session, Wanted::Resume).await.map(drop)
    }

    async fn snapshot(&self, name: &str) -> Result<String, SandboxError> {
        let _work = self.begin(Use::Looks)?;
        let options = SnapshotOptions { name: name.to_owned(), ..SnapshotOptions::default() };
        Ok(self.inner.snapshot(&self.session()?, &options).await?.id.0)
    }

    async fn restore(&self, snapshot_id: &str) -> Result<(), SandboxError> {
        let _work = self.begin(Use::Runs)?;
        let session = self.session()?;
        let snapshot = self.inner.get_snapshot(&session.client_id, snapshot_id).await?;
        self.inner.restore(&session, &snapshot).await
    }

    fn base(&self) -> Base {
        self.handle.base()
    }

    async fn diff(
        &self,
        since: Option<&Base>,
        options: &DiffOptions,
    ) -> Result<Vec<DiffEntry>, SandboxError> {
        let _work = self.begin(Use::Looks)?;
        self.handle.diff(since, options).await
    }

    async fn capture(&self) -> Result<Capture, SandboxError> {
        let _work = self.begin(Use::Looks)?;
        self.handle.capture().await
    }

    /// Ends the sandbox with every session that it has: its owner asks for it by name.
    async fn destroy(&self) -> Result<(), SandboxError> {
        let session_lives = match &self.session {
            Some(session) => self.inner.registry().sessions.contains_key(session),
            None => true,
        };
        let id = self.handle.id();
        let mailbox = {
            let registry = self.inner.registry();
            registry.sandboxes.get(id).map(|entry| entry.mailbox.clone())
        };
        // An id can be used again: a handle of a session that ended has no say in what is there now.
        let Some(mailbox) = mailbox.filter(|_| session_lives) else { return Ok(()) };
        let (reply, done) = oneshot::channel();
        self.inner.post(&mailbox, Request::Discard { reply })?;
        done.await.unwrap_or(Ok(()))
    }

    async fn resource_usage(&self) -> Result<ResourceUsage, SandboxError> {
        let _work = self.begin(Use::Looks)?;
        self.handle.resource_usage().await
    }

    async fn exec_report(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
    ) -> Result<ExecReport, SandboxError> {
        let told = self.telling(ctx);
        let ran = async {
            let _work = self.begin(Use::Runs)?;
            self.handle.exec_report(cmd, ctx).await
        };
        let report = ran.await;
        if let Some(mut told) = told {
            told.say(&Outcome::of_report(&report));
        }
        report
    }

    async fn start_exec(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        options: &ExecOptions,
    ) -> Result<FoundExec, SandboxError> {
        let mut starting = Starting { guarded: self, id: options.id.clone(), ctx };
        let started = async {
            let work = self.begin(Use::Runs)?;
            Ok((work, self.handle.start_exec(cmd, ctx, options).await?))
        };
        let started = started.await;
        starting.id = None;
        if let Err(error) = &started {
            self.tell_unstarted(ctx, options.id.as_ref(), &Outcome::Failed(error));
        }
        let (_work, exec) = started?;
        self.watch(Arc::clone(&exec));
        Ok(self.hold(exec))
    }

    async fn list_execs(&self) -> Result<Vec<FoundExec>, SandboxError> {
        let _work = self.begin(Use::Looks)?;
        let all = self.handle.list_execs().await?;
        Ok(all.into_iter().map(|exec| self.hold(exec)).collect())
    }

    async fn find_exec(&self, id: &ExecId) -> Result<Option<FoundExec>, SandboxError> {
        let _work = self.begin(Use::Looks)?;
        Ok(self.handle.find_exec(id).await?.map(|exec| self.hold(exec)))
    }

    /// An open connection is work of the session for as long as it is open (S3).
    async fn connect(&self, port: u16) -> Result<PortStream, SandboxError> {
        let work = self.begin(Use::Runs)?;
        Ok(self.handle.connect(port).await?.holding(work))
    }

    async fn set_reach(&self, reach: &Reach) -> Result<(), SandboxError> {
        let _work = self.begin(Use::Looks)?;
        self.handle.set_reach(reach).await
    }

    fn reach(&self) -> Reach {
        self.handle.reach()
    }

    fn take_barred(&self, all: bool) -> Option<BarredDestinations> {
        self.handle.take_barred(all)
    }

    fn anchor(&self) -> Option<String> {
        self.handle.anchor()
    }

    fn files(&self) -> Option<&dyn SandboxFiles> {
        self.handle.files().map(|_| self as &dyn SandboxFiles)
    }

    fn files_of(&self, user: &str) -> Option<Arc<dyn SandboxFiles>> {
        let files = Some(self.handle.files_of(user)?);
        let (inner, handle) = (Arc::clone(&self.inner), Arc::clone(&self.handle));
        Some(Arc::new(Self { inner, handle, session: self.session.clone(), files }))
    }

    fn enforcement(&self) -> Enforcement {
        self.handle.enforcement()
    }

    fn receipt(&self) -> Receipt {
        self.handle.receipt()
    }

    /// Tries as much as whatever runs in it lets; what is found open is destroyed.
    async fn verify(&self, _: Extent) -> Result<Receipt, SandboxError> {
        let _work = self.begin(Use::Looks)?;
        Ok(self.inner.verify(self.handle.id()).await?.receipt)
    }
}
