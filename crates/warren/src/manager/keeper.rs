//! The task that keeps one sandbox: it alone makes it, suspends, resumes and destroys it, and moves
//! its sessions from state to state, one request after the other.
//!
//! So calls that contradict each other take effect in one order, and a caller that gives up leaves
//! no work half done. What was promised to somebody is in the store before they are told.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};
use tracing::{debug, error, warn};

use super::Inner;
use super::bounded::{bounded, caught};
use super::registry::{Entry, Life};
use super::selection::Needs;
use super::session::{Held, Move, Next, admit};
use super::snapshots::CAPTURE_TIME;
use crate::layers;
use crate::store::{Change, Phase, SandboxRecord};
use crate::{
    Base, Capture, CreateOptions, Extent, ReceiptLayer, Result, Sandbox, SandboxError, SandboxId,
    SandboxSession, SandboxSpec, SessionState, SignedReceipt, Verdict,
};

/// How many requests may wait for one sandbox.
pub(super) const MAILBOX: usize = 256;
/// How long a sandbox may take to stop or to go on.
const TURN_TIME: Duration = Duration::from_secs(30);
/// How long its memory may take to get to disk.
const DISK_TIME: Duration = Duration::from_secs(300);
/// How long its destruction may take before it is tried anew.
const END_TIME: Duration = Duration::from_secs(60);
/// How long it may take to tell whether it is alive.
const ANSWER_TIME: Duration = Duration::from_secs(5);

pub(super) type Reply<T> = oneshot::Sender<Result<T>>;

/// What is asked of a sandbox.
#[derive(Debug)]
pub(super) enum Request {
    /// Begin a session, or go on with one that rests.
    Join { client: String, join: Join, fresh: bool, reply: Reply<Joined> },
    /// Make a warm sandbox that was set aside for this client the client's.
    Claim { spec: Arc<SandboxSpec>, client: String, needs: Needs, reply: Reply<Claimed> },
    /// Move a session.
    Move { session_id: String, wanted: Wanted, reply: Reply<SandboxSession> },
    /// Make layers of what was written.
    Capture { reply: Reply<Capture> },
    /// Be made anew on other ground, which is held until then.
    Rebase { base: Base, held: layers::Held, reply: Reply<()> },
    /// Have the walls tried.
    Verify { reply: Reply<SignedReceipt> },
    /// Become the default sandbox.
    MakeDefault { reply: Reply<()> },
    /// End what timed out, and do what could not be done before.
    Tend { reply: oneshot::Sender<u64> },
    /// Write what changed without having been written.
    Flush { reply: Reply<()> },
    /// End with every session.
    Discard { reply: Reply<()> },
    /// Take a session back that nobody received.
    Abandon { session_id: String, undo: Wanted },
}

/// Which session a client joins with.
#[derive(Debug)]
pub(super) enum Join {
    /// One that rests, or else a new one.
    Any,
    /// This one, if it is still kept for the client.
    Kept(String),
}

/// What is asked of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    Detach,
    Keep,
    Suspend,
    SuspendToDisk,
    Resume,
    End,
}

impl Wanted {
    fn verb(self) -> &'static str {
        match self {
            Self::Detach => "detach",
            Self::Keep => "keep alive",
            Self::Suspend | Self::SuspendToDisk => "suspend",
            Self::Resume => "resume",
            Self::End => "end",
        }
    }
}

/// A session that was given out.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) session: SandboxSession,
    pub(super) handle: Arc<dyn Sandbox>,
    pub(super) promise: Promise,
}

/// Takes a session back, unless it has reached its client.
#[derive(Debug)]
pub(super) struct Promise {
    mailbox: mpsc::Sender<Request>,
    session_id: String,
    undo: Option<Wanted>,
}

impl Promise {
    /// Notes that the client has it.
    pub(super) fn keep(mut self) {
        self.undo = None;
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some(undo) = self.undo {
            let session_id = std::mem::take(&mut self.session_id);
            // Should there be no room, the session still ends when it times out.
            let _ = self.mailbox.try_send(Request::Abandon { session_id, undo });
        }
    }
}

/// What became of a claim.
#[derive(Debug)]
pub(super) enum Claimed {
    Taken(Box<Joined>),
    /// The sandbox cannot be what the spec asks for, and stays warm.
    Unfit,
    /// It broke, or lacks this, and is gone.
    Lost(Vec<String>),
}

/// A sandbox to be made.
#[derive(Debug)]
pub(super) struct Birth {
    pub(super) spec: Arc<SandboxSpec>,
    pub(super) options: CreateOptions,
    /// Who waits for it; nobody for a warm one.
    pub(super) parent: Option<Parent>,
    /// Whose place it takes, and tells when that is gone.
    pub(super) after: Option<Predecessor>,
}

/// A warm sandbox that gives way.
#[derive(Debug)]
pub(super) struct Predecessor {
    pub(super) id: SandboxId,
    pub(super) gone: oneshot::Receiver<Result<()>>,
}

/// Who waits for a sandbox.
#[derive(Debug)]
pub(super) struct Parent {
    pub(super) client: String,
    pub(super) needs: Needs,
    pub(super) reply: Reply<Joined>,
}

/// Keeps one sandbox.
#[derive(Debug)]
pub(super) struct Keeper {
    inner: Arc<Inner>,
    id: SandboxId,
    backend: usize,
    handle: Option<Arc<dyn Sandbox>>,
    mailbox: mpsc::Receiver<Request>,
    gone: bool,
}

impl Keeper {
    pub(super) fn new(
        inner: Arc<Inner>,
        id: SandboxId,
        backend: usize,
        handle: Option<Arc<dyn Sandbox>>,
        mailbox: mpsc::Receiver<Request>,
    ) -> Self {
        Self { inner, id, backend, handle, mailbox, gone: false }
    }

    /// Makes the sandbox if it is to be made, then serves requests until it is gone.
    pub(super) async fn run(mut self, birth: Option<Birth>) {
        if let Some(birth) = birth {
            self.be_born(birth).await;
        }
        let stop = self.inner.stop.clone();
        while !self.gone {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                request = self.mailbox.recv() => match request {
                    Some(request) => self.serve(request).await,
                    None => break,
                },
            }
        }
        // Whoever still waits finds out by the closed mailbox, and looks again.
    }

    /// Serves one request. The asker may have hung up meanwhile; what was done stands.
    async fn serve(&mut self, request: Request) {
        match request {
            Request::Join { client, join, fresh, reply } => {
                let _ = reply.send(self.join(&client, join, fresh).await);
            }
            Request::Claim { spec, client, needs, reply } => {
                let claimed = match reply.is_closed() {
                    true => self.put_back().await.map(|()| Claimed::Unfit),
                    false => self.claim(spec, &client, &needs).await,
                };
                let _ = reply.send(claimed);
            }
            Request::Move { session_id, wanted, reply } => {
                let _ = reply.send(self.move_session(&session_id, wanted).await);
            }
            Request::Capture { reply } => {
                // Nobody need stand still for one who is gone.
                if !reply.is_closed() {
                    let _ = reply.send(self.capture().await);
                }
            }
            Request::Rebase { base, held, reply } => {
                let rebased = self.rebase(base).await;
                drop(held);
                let _ = reply.send(rebased);
            }
            Request::Verify { reply } => {
                // Who asked may be gone; then nobody need wait for this.
                if !reply.is_closed() {
                    let verified = self.verify(Extent::Everything).await;
                    if verified.is_ok() {
                        self.write_running().await;
                    }
                    let _ = reply.send(verified);
                }
            }
            Request::MakeDefault { reply } => drop(reply.send(self.make_default().await)),
            Request::Tend { reply } => drop(reply.send(self.tend().await)),
            Request::Flush { reply } => drop(reply.send(self.flush().await)),
            Request::Discard { reply } => drop(reply.send(self.destroy(Vec::new(), false).await)),
            Request::Abandon { session_id, undo } => {
                debug!(%session_id, ?undo, "took back a session that nobody received");
                let _ = self.move_session(&session_id, undo).await;
            }
        }
    }

    /// Makes the sandbox, or gives its place back.
    async fn be_born(&mut self, birth: Birth) {
        let Birth { spec, options, parent, after } = birth;
        let made = self.make(&spec, &options, after).await;
        let is_warm = parent.is_none();
        let born = match (made, parent) {
            (Ok(()), Some(Parent { client, needs, reply })) => {
                let born = self.hand_over(&client, &needs, &spec).await;
                let failed = born.is_err();
                let _ = reply.send(born);
                !failed
            }
            (Ok(()), None) => self.become_warm().await,
            (Err(error), parent) => {
                warn!(sandbox = %self.id, %error, "a sandbox could not be made");
                if let Some(parent) = parent {
                    let _ = parent.reply.send(Err(error));
                }
                false
            }
        };
        if is_warm {
            self.inner.pool_made(born);
        }
    }

    /// Lets the backend make the sandbox within its time, or leaves nothing on the host.
    async fn make(
        &mut self,
        spec: &SandboxSpec,
        options: &CreateOptions,
        after: Option<Predecessor>,
    ) -> Result<()> {
        if let Some(Predecessor { id, gone }) = after {
            let gone = gone.await.unwrap_or_else(|_| {
                // A sweep may have ended it before it could be asked to go.
                match self.inner.registry().sandboxes.contains_key(&id) {
                    true => Err(SandboxError::ShuttingDown),
                    false => Ok(()),
                }
            });
            if let Err(error) = gone {
                self.leave();
                return Err(error);
            }
        }
        let began = Instant::now();
        match self.create(spec, options).await {
            Ok(handle) => {
                self.handle = Some(Arc::from(handle));
                self.settle_id(options.id.is_some(), began.elapsed()).await
            }
            Err(error) => {
                self.inner.forget_probe(self.backend).await;
                match (&options.id, &error) {
                    // What is there under this id is another's.
                    (_, SandboxError::AlreadyExists { .. }) | (None, _) => {
                        self.inner.persist_or_owe(vec![Change::DropSandbox(self.id.clone())]).await;
                        self.leave();
                    }
                    (Some(_), _) => drop(self.destroy(Vec::new(), false).await),
                }
                Err(error)
            }
        }
    }

    /// Has the backend make it while it is written that it is being made. Both at once: what was made
    /// without a record is found, and removed, as what belongs to nobody.
    async fn create(
        &mut self,
        spec: &SandboxSpec,
        options: &CreateOptions,
    ) -> Result<Box<dyn Sandbox>> {
        let record = self.record(Phase::Creating);
        let backend = Arc::clone(self.inner.backend(self.backend));
        let creation = backend.create_sandbox_with(spec, options);
        let creation = bounded("creating the sandbox", spec.creation_timeout, creation);
        let written = self.inner.persist(record.map(Change::PutSandbox).into_iter());
        tokio::pin!(written, creation);
        tokio::select! {
            biased;
            written = &mut written => match written {
                Ok(()) => creation.await,
                Err(error) => Err(error),
            },
            created = &mut creation => match written.await {
                Ok(()) => created,
                Err(error) => {
                    self.handle = created.ok().map(Arc::from);
                    Err(error)
                }
            },
        }
    }

    /// Takes note of what was made, under the id that the backend gave it.
    async fn settle_id(&mut self, chosen: bool, took: Duration) -> Result<()> {
        let made = self.handle.as_ref().map(|handle| handle.id().clone());
        let made = made.unwrap_or_else(|| self.id.clone());
        let clash = {
            let mut registry = self.inner.registry();
            registry.ledger.created += 1;
            registry.ledger.creation_time += took;
            let clash = made != self.id && (chosen || registry.sandboxes.contains_key(&made));
            if !clash && let Some(mut entry) = registry.sandboxes.remove(&self.id) {
                entry.handle.clone_from(&self.handle);
                registry.sandboxes.insert(made.clone(), entry);
            }
            clash
        };
        if clash {
            let message = format!("the backend made `{made}` where `{}` was asked for", self.id);
            let _ = self.destroy(Vec::new(), false).await;
            return Err(SandboxError::Internal { message });
        }
        self.id = made;
        Ok(())
    }

    /// Gives what was just made to its client, if it has what the client needs.
    async fn hand_over(
        &mut self,
        client: &str,
        needs: &Needs,
        spec: &SandboxSpec,
    ) -> Result<Joined> {
        if self.inner.verifies.load(Ordering::Relaxed)
            && let Err(error) = self.verify(Extent::Pristine).await
        {
            let _ = self.destroy(Vec::new(), false).await;
            return Err(error);
        }
        let handle = self.handle()?;
        let lacks = needs.lacking(&*handle, spec);
        if !lacks.is_empty() {
            let _ = self.destroy(Vec::new(), false).await;
            let missing = vec![format!("a new sandbox: {}", lacks.join(", "))];
            return Err(SandboxError::NoMatch { missing });
        }
        match self.begin(client, handle).await {
            Ok(joined) => Ok(joined),
            Err(error) => {
                let _ = self.destroy(Vec::new(), false).await;
                Err(error)
            }
        }
    }

    /// Begins the first session on a sandbox that has become a client's.
    async fn begin(&mut self, client: &str, handle: Arc<dyn Sandbox>) -> Result<Joined> {
        let held = self.new_session(client);
        let record = self.record(Phase::Running).map(Change::PutSandbox);
        let session = Change::PutSession(held.record());
        self.inner.persist(record.into_iter().chain([session])).await?;
        let mut registry = self.inner.registry();
        if let Some(mut entry) = registry.sandboxes.get_mut(&self.id) {
            entry.life = Life::Running;
            entry.set_aside = false;
        }
        registry.put_session(held.clone());
        let mailbox = registry.sandboxes.get(&self.id).map(|entry| entry.mailbox.clone());
        drop(registry);
        let mailbox = mailbox.ok_or_else(|| self.lost())?;
        Ok(joined(held, handle, mailbox, Wanted::End))
    }

    /// Tries the walls, as far as that is gentle on whatever runs. What is found open is destroyed.
    async fn verify(&mut self, most: Extent) -> Result<SignedReceipt> {
        let handle = self.handle()?;
        let state = {
            let registry = self.inner.registry();
            registry.sandboxes.get(&self.id).map(|entry| (entry.life, entry.used))
        };
        let extent = match state {
            Some((Life::Suspended, _)) => {
                return Err(SandboxError::Suspended { id: self.id.clone() });
            }
            Some((Life::Running | Life::Creating, used)) if used => most.min(Extent::Walls),
            Some((Life::Running | Life::Creating, _)) => most,
            Some((Life::Ending, _)) | None => return Err(self.lost()),
        };
        let receipt = bounded("trying the walls", TURN_TIME, handle.verify(extent)).await?;
        let got_through = |layer: &ReceiptLayer| {
            let open = layer.tries.iter().filter(|one| one.verdict == Verdict::Open);
            let open: Vec<_> = open.map(|one| format!("{} ({})", one.what, one.said)).collect();
            format!("{}: {}", layer.layer, open.join(", "))
        };
        let open: Vec<_> = receipt.open().map(got_through).collect();
        if !open.is_empty() {
            error!(sandbox = %self.id, open = open.join("; "), "a sandbox is open: destroying it");
            let _ = self.destroy(Vec::new(), false).await;
            return Err(SandboxError::WallOpen { id: self.id.clone(), open });
        }
        let signed = self.inner.sign(receipt)?;
        self.update(|entry| entry.receipt = Some(Arc::new(signed.clone())));
        Ok(signed)
    }

    async fn become_warm(&mut self) -> bool {
        if let Err(error) = self.verify(Extent::Pristine).await {
            warn!(sandbox = %self.id, %error, "a warm sandbox could not be verified");
            let _ = self.destroy(Vec::new(), false).await;
            return false;
        }
        let record = self.record(Phase::Running).map(Change::PutSandbox);
        if let Err(error) = self.inner.persist(record.into_iter()).await {
            warn!(sandbox = %self.id, %error, "a warm sandbox could not be recorded");
            let _ = self.destroy(Vec::new(), false).await;
            return false;
        }
        self.update(|entry| {
            entry.life = Life::Running;
            entry.since = Instant::now();
        });
        true
    }

    /// Binds the caller's spec to a warm sandbox that was set aside for it.
    async fn claim(
        &mut self,
        spec: Arc<SandboxSpec>,
        client: &str,
        needs: &Needs,
    ) -> Result<Claimed> {
        let handle = self.handle()?;
        // Not written before it is done: until then it is warm, nothing has run in it, and whoever claims
        // it next says anew what it may use.
        let claim = bounded("claiming the sandbox", spec.creation_timeout, handle.claim(&spec));
        let claimed = match claim.await {
            Ok(Some(claimed)) if *claimed.id() == self.id => claimed,
            Ok(None) => return self.put_back().await.map(|()| Claimed::Unfit),
            other => {
                warn!(sandbox = %self.id, outcome = ?other.map(drop), "a warm sandbox broke");
                let _ = self.destroy(Vec::new(), false).await;
                return Ok(Claimed::Lost(Vec::new()));
            }
        };
        self.handle = Some(Arc::clone(&claimed));
        let lacks = needs.lacking(&*claimed, &spec);
        self.update(|entry| {
            entry.handle = Some(Arc::clone(&claimed));
            entry.spec = spec;
        });
        if !lacks.is_empty() {
            let _ = self.destroy(Vec::new(), false).await;
            return Ok(Claimed::Lost(vec![format!("a warm sandbox: {}", lacks.join(", "))]));
        }
        match self.begin(client, claimed).await {
            Ok(joined) => {
                self.inner.registry().ledger.hits += 1;
                Ok(Claimed::Taken(Box::new(joined)))
            }
            Err(error) => {
                let _ = self.destroy(Vec::new(), false).await;
                Err(error)
            }
        }
    }

    /// Makes a sandbox that was set aside warm again; it is as it was.
    async fn put_back(&mut self) -> Result<()> {
        self.update(|entry| {
            entry.life = Life::Running;
            entry.owner = None;
            entry.set_aside = false;
        });
        let record = self.record(Phase::Running).map(Change::PutSandbox);
        if self.inner.persist(record.into_iter()).await.is_err() {
            self.update(|entry| entry.dirty = true);
        }
        Ok(())
    }

    /// Lets the owner in.
    async fn join(&mut self, client: &str, join: Join, fresh: bool) -> Result<Joined> {
        let life = self.inner.registry().sandboxes.get(&self.id).map(|entry| entry.life);
        if life == Some(Life::Ending) {
            // Its end has failed before; once it succeeds, its id is free for a new one.
            self.destroy(Vec::new(), false).await?;
            return Err(self.lost());
        }
        let handle = self.handle()?;
        if !self.is_alive(&handle).await {
            let _ = self.destroy(Vec::new(), false).await;
            return Err(self.lost());
        }
        let (chosen, undo, mut moved, wakes, mailbox) = {
            let registry = self.inner.registry();
            let entry = registry.sandboxes.get(&self.id);
            let entry = entry.filter(|entry| entry.lives() && entry.belongs_to(client));
            let entry = entry.ok_or_else(|| self.lost())?;
            if fresh && entry.used {
                let missing = vec![format!("sandbox `{}`: it is not fresh", self.id)];
                return Err(SandboxError::NoMatch { missing });
            }
            let resting = match &join {
                Join::Kept(id) => {
                    let kept = registry.sessions.get(id).filter(|held| {
                        held.kept
                            && held.shown.state == SessionState::Detached
                            && held.shown.sandbox_id == self.id
                    });
                    Some(kept.ok_or_else(|| self.lost())?)
                }
                Join::Any => {
                    let in_state = |state| {
                        let there = registry.sessions_on(&self.id);
                        there.filter(|held| held.shown.state == state).last()
                    };
                    in_state(SessionState::Suspended).or(in_state(SessionState::Detached))
                }
            };
            let (chosen, undo) = match resting {
                Some(held) => {
                    let undo = if held.kept { Wanted::Keep } else { Wanted::Detach };
                    (held.moved(SessionState::Active, false), undo)
                }
                None => (self.new_session(client), Wanted::End),
            };
            let wakes = entry.life == Life::Suspended;
            let moved = if wakes { self.woken(registry.sessions_on(&self.id)) } else { Vec::new() };
            (chosen, undo, moved, wakes, entry.mailbox.clone())
        };
        moved.retain(|held| held.shown.session_id != chosen.shown.session_id);
        moved.push(chosen.clone());
        self.transition(moved, wakes.then_some((Life::Running, Wanted::Resume))).await?;
        Ok(joined(chosen, handle, mailbox, undo))
    }

    /// Returns the suspended ones among some sessions as they are when their sandbox goes on.
    fn woken<'a>(&self, sessions: impl Iterator<Item = &'a Held>) -> Vec<Held> {
        let suspended = sessions.filter(|held| held.shown.state == SessionState::Suspended);
        suspended.map(|held| held.moved(SessionState::Active, false)).collect()
    }

    async fn move_session(&mut self, session_id: &str, wanted: Wanted) -> Result<SandboxSession> {
        if wanted == Wanted::End {
            return self.end_session(session_id).await;
        }
        let (moved, life) = {
            let registry = self.inner.registry();
            let Some(held) = registry.sessions.get(session_id) else {
                return Err(SandboxError::SessionEnded { id: session_id.to_owned() });
            };
            let asked = match wanted {
                Wanted::Detach | Wanted::Keep => Move::Detach,
                Wanted::Suspend | Wanted::SuspendToDisk => Move::Suspend,
                Wanted::Resume => Move::Activate,
                Wanted::End => Move::Terminate,
            };
            let refused = |reason: String| SandboxError::Conflict {
                action: format!("{} session `{session_id}`", wanted.verb()),
                reason,
            };
            let state = held.shown.state;
            let next = admit(state, asked).ok_or_else(|| refused(format!("it is {state:?}")))?;
            let life = registry.sandboxes.get(&self.id).map(|entry| entry.life);
            match next {
                Next::Stay if wanted == Wanted::Keep && !held.kept => (vec![held.kept()], None),
                Next::Stay if wanted == Wanted::SuspendToDisk => (vec![held.clone()], None),
                Next::Stay => return Ok(held.shown.clone()),
                Next::Move(SessionState::Suspended) => {
                    let active = |other: &&Held| {
                        other.shown.state == SessionState::Active
                            && other.shown.session_id != session_id
                    };
                    if let Some(other) = registry.sessions_on(&self.id).find(active) {
                        let other = &other.shown.session_id;
                        return Err(refused(format!("session `{other}` is active on its sandbox")));
                    }
                    let stops = life == Some(Life::Running);
                    let moved = held.moved(SessionState::Suspended, held.kept);
                    (vec![moved], stops.then_some(Life::Suspended))
                }
                Next::Move(SessionState::Active) if life == Some(Life::Suspended) => {
                    let mut moved = self.woken(registry.sessions_on(&self.id));
                    moved.retain(|other| other.shown.session_id != session_id);
                    moved.push(held.moved(SessionState::Active, false));
                    (moved, Some(Life::Running))
                }
                Next::Move(state) => (vec![held.moved(state, wanted == Wanted::Keep)], None),
            }
        };
        // The session that was asked for is the last, or the only one.
        let shown = moved.last().map(|held| held.shown.clone());
        if wanted == Wanted::SuspendToDisk && life.is_none() {
            // It stands still already.
            self.page_out().await?;
        }
        self.transition(moved, life.map(|life| (life, wanted))).await?;
        shown.ok_or_else(|| self.lost())
    }

    /// Writes what sessions and sandbox become, makes the kernel follow, then lets it be seen.
    async fn transition(
        &mut self,
        sessions: Vec<Held>,
        turn: Option<(Life, Wanted)>,
    ) -> Result<()> {
        let life = turn.map(|(life, _)| life);
        let phase = match life {
            Some(Life::Suspended) => Phase::Suspended,
            Some(Life::Running | Life::Creating | Life::Ending) | None => Phase::Running,
        };
        let record = life.and_then(|_| self.record(phase)).map(Change::PutSandbox);
        let records = sessions.iter().map(|held| Change::PutSession(held.record()));
        let changes: Vec<_> = records.chain(record).collect();
        if let Err(error) = self.inner.persist(changes.into_iter()).await {
            self.rewrite(&sessions);
            return Err(error);
        }
        if let Some((life, wanted)) = turn {
            let handle = self.handle()?;
            let turned = match life {
                Life::Suspended => {
                    // First of all: no command may begin in a sandbox that is about to stop.
                    self.update(|entry| entry.life = Life::Suspended);
                    if wanted == Wanted::SuspendToDisk {
                        self.page_out().await
                    } else {
                        bounded("suspending the sandbox", TURN_TIME, handle.suspend()).await
                    }
                }
                Life::Running | Life::Creating | Life::Ending => {
                    bounded("resuming the sandbox", TURN_TIME, handle.resume()).await
                }
            };
            if let Err(error) = turned {
                self.take_back(&sessions, life);
                return Err(error);
            }
            self.update(|entry| entry.life = life);
        }
        let mut registry = self.inner.registry();
        for mut held in sessions {
            if life.is_some() {
                // The kernel took its time, and work may have ended meanwhile: it rests from now.
                held.touch();
            }
            held.dirty = false;
            registry.put_session(held);
        }
        Ok(())
    }

    /// Undoes a turn that the kernel refused. The store follows with the next tend.
    fn take_back(&self, sessions: &[Held], life: Life) {
        self.update(|entry| {
            entry.life = if life == Life::Suspended { Life::Running } else { Life::Suspended };
        });
        self.rewrite(sessions);
    }

    /// Has what sandbox and sessions still are written: what they were to become was, or may be.
    fn rewrite(&self, sessions: &[Held]) {
        let mut never_were = Vec::new();
        {
            let mut registry = self.inner.registry();
            if let Some(mut entry) = registry.sandboxes.get_mut(&self.id) {
                entry.dirty = true;
            }
            for held in sessions {
                let id = &held.shown.session_id;
                match registry.sessions.get_mut(id) {
                    Some(held) => held.dirty = true,
                    None => never_were.push(Change::DropSession(id.clone())),
                }
            }
        }
        self.inner.owe(never_were.into_iter());
    }

    /// Has the sandbox stand still, with its memory on disk.
    async fn page_out(&self) -> Result<()> {
        let handle = self.handle()?;
        let paged = bounded("suspending the sandbox to disk", DISK_TIME, handle.suspend_to_disk());
        paged.await
    }

    async fn capture(&mut self) -> Result<Capture> {
        let handle = self.handle()?;
        let lives = self.inner.registry().sandboxes.get(&self.id).is_some_and(Entry::lives);
        if !lives {
            return Err(SandboxError::Ended { id: self.id.clone() });
        }
        bounded("saving the sandbox", CAPTURE_TIME, handle.capture()).await
    }

    /// Makes the sandbox anew. What it shall stand on is written first, so that a manager that is
    /// killed on the way leaves the next one to do it.
    async fn rebase(&mut self, base: Base) -> Result<()> {
        let handle = self.handle()?;
        let (life, old) = {
            let registry = self.inner.registry();
            let entry = registry.sandboxes.get(&self.id).ok_or_else(|| self.lost())?;
            (entry.life, Arc::clone(&entry.base))
        };
        match life {
            Life::Running => {}
            Life::Suspended => return Err(SandboxError::Suspended { id: self.id.clone() }),
            Life::Creating | Life::Ending => {
                return Err(SandboxError::Ended { id: self.id.clone() });
            }
        }
        let base = Arc::new(base);
        self.update(|entry| entry.base = Arc::clone(&base));
        let record = self.record(Phase::Restoring).map(Change::PutSandbox);
        if let Err(error) = self.inner.persist(record.into_iter()).await {
            self.update(|entry| (entry.base, entry.dirty) = (old, true));
            return Err(error);
        }
        // Whatever was tried was tried of another.
        self.update(|entry| entry.receipt = None);
        let rebased = bounded("restoring the sandbox", CAPTURE_TIME, handle.rebase(&base)).await;
        if let Err(error) = rebased {
            if !self.is_alive(&handle).await {
                warn!(sandbox = %self.id, %error, "a sandbox did not outlive its restoration");
                let _ = self.destroy(Vec::new(), false).await;
                return Err(error);
            }
            self.update(|entry| entry.base = old);
            self.write_running().await;
            return Err(error);
        }
        self.write_running().await;
        Ok(())
    }

    /// Writes that it runs; what cannot be written now is written by the next tend.
    async fn write_running(&mut self) {
        let record = self.record(Phase::Running).map(Change::PutSandbox);
        if self.inner.persist(record.into_iter()).await.is_err() {
            self.update(|entry| entry.dirty = true);
        }
    }

    /// Ends a session, and the sandbox with the last one.
    async fn end_session(&mut self, session_id: &str) -> Result<SandboxSession> {
        let (ended, is_last) = {
            let mut registry = self.inner.registry();
            let Some(ended) = registry.end_session(session_id) else {
                // Somebody came first, which is what was asked for.
                let id = session_id.to_owned();
                return Err(SandboxError::SessionEnded { id });
            };
            let entry = registry.sandboxes.get(&self.id);
            (ended, entry.is_some_and(|entry| entry.sessions.is_empty()))
        };
        let dropped = vec![Change::DropSession(session_id.to_owned())];
        if is_last {
            self.destroy(dropped, false).await?;
        } else {
            self.inner.persist_or_owe(dropped).await;
        }
        Ok(ended.moved(SessionState::Terminated, false).shown)
    }

    async fn make_default(&mut self) -> Result<()> {
        let _turn = self.inner.default_turn.lock().await;
        let lives = self.inner.registry().sandboxes.get(&self.id).is_some_and(Entry::lives);
        if !lives {
            return Err(self.lost());
        }
        self.inner.write_default(Some(self.id.clone())).await?;
        self.inner.registry().default = Some(self.id.clone());
        Ok(())
    }

    /// Ends what timed out and returns how many sessions that were; ends a sandbox that died; tries
    /// again what failed; writes what changed without having been written.
    async fn tend(&mut self) -> u64 {
        let life = self.inner.registry().sandboxes.get(&self.id).map(|entry| entry.life);
        if life == Some(Life::Ending) {
            let _ = self.destroy(Vec::new(), false).await;
            return 0;
        }
        if let Some(handle) = self.handle.clone()
            && !self.is_alive(&handle).await
        {
            warn!(sandbox = %self.id, "a sandbox died");
            let _ = self.destroy(Vec::new(), false).await;
            return 0;
        }
        let (ended, is_last) = {
            let mut registry = self.inner.registry();
            let now = Instant::now();
            let expired: Vec<_> = registry
                .sessions_on(&self.id)
                .filter(|held| held.is_expired(now))
                .map(|held| held.shown.session_id.clone())
                .collect();
            // Found and ended under one lock: whoever touches a session comes before or too late.
            for id in &expired {
                registry.end_session(id);
            }
            let entry = registry.sandboxes.get(&self.id);
            let is_last = entry.is_some_and(|entry| entry.sessions.is_empty());
            (expired, is_last)
        };
        let count = ended.len() as u64;
        let dropped: Vec<_> = ended.into_iter().map(Change::DropSession).collect();
        if count > 0 && is_last {
            let _ = self.destroy(dropped, true).await;
        } else if count > 0 {
            self.inner.persist_or_owe(dropped).await;
        }
        if !self.gone {
            // What cannot be written now is written by the next.
            let _ = self.flush().await;
        }
        count
    }

    /// Writes what changed without having been written.
    async fn flush(&mut self) -> Result<()> {
        if !self.inner.is_durable() {
            return Ok(());
        }
        let (changes, ids) = {
            let registry = self.inner.registry();
            let dirty: Vec<_> = registry.sessions_on(&self.id).filter(|held| held.dirty).collect();
            let sandbox = registry.sandboxes.get(&self.id).filter(|entry| entry.dirty);
            let sandbox = sandbox.map(|entry| {
                let suspended = entry.life == Life::Suspended;
                let phase = if suspended { Phase::Suspended } else { Phase::Running };
                Change::PutSandbox(entry.record(&self.id, self.inner.name(self.backend), phase))
            });
            let sessions = dirty.iter().map(|held| Change::PutSession(held.record()));
            let ids: Vec<_> = dirty.iter().map(|held| held.shown.session_id.clone()).collect();
            (sessions.chain(sandbox).collect::<Vec<_>>(), ids)
        };
        if changes.is_empty() {
            return Ok(());
        }
        self.inner.persist(changes.into_iter()).await?;
        let mut registry = self.inner.registry();
        if let Some(mut entry) = registry.sandboxes.get_mut(&self.id) {
            entry.dirty = false;
        }
        for id in ids {
            if let Some(held) = registry.sessions.get_mut(&id) {
                held.dirty = false;
            }
        }
        Ok(())
    }

    /// Destroys the sandbox with every session it has, and forgets it. What fails keeps its place
    /// and is tried again by the next tend.
    async fn destroy(&mut self, mut changes: Vec<Change>, timed_out: bool) -> Result<()> {
        {
            // It becomes the default by its keeper alone, which is here: if it is not, it does not.
            let is_default = self.inner.registry().default.as_ref() == Some(&self.id);
            let _turn = match is_default {
                true => Some(self.inner.default_turn.lock().await),
                false => None,
            };
            {
                let mut registry = self.inner.registry();
                let Some(mut entry) = registry.sandboxes.get_mut(&self.id) else {
                    self.gone = true;
                    return Ok(());
                };
                entry.life = Life::Ending;
                entry.timed_out |= timed_out;
                let sessions = entry.sessions.clone();
                drop(entry);
                for id in sessions {
                    registry.end_session(&id);
                    changes.push(Change::DropSession(id));
                }
                if registry.default.as_ref() == Some(&self.id) {
                    registry.default = None;
                    changes.push(Change::SetDefault(None));
                }
            }
            changes.extend(self.record(Phase::Destroying).map(Change::PutSandbox));
            if is_default {
                self.inner.persist_or_owe(std::mem::take(&mut changes)).await;
            }
        }
        let backend = Arc::clone(self.inner.backend(self.backend));
        let end = async {
            match &self.handle {
                Some(handle) => bounded("destroying the sandbox", END_TIME, handle.destroy()).await,
                None => bounded("removing its remains", END_TIME, backend.reclaim(&self.id)).await,
            }
        };
        // At once: a sandbox that is gone does not come back, whatever its record says.
        let ((), ended) = tokio::join!(self.inner.persist_or_owe(changes), end);
        if let Err(error) = ended {
            warn!(sandbox = %self.id, %error, "a sandbox could not be destroyed yet");
            self.update(|entry| entry.ceded = false);
            return Err(error);
        }
        if let (Some(handle), Some(witness)) = (&self.handle, self.inner.witness())
            && let Some(barred) = handle.take_barred(true)
        {
            witness.barred(&self.id, &self.inner.client_of(&self.id), &barred);
        }
        self.inner.persist_or_owe(vec![Change::DropSandbox(self.id.clone())]).await;
        self.leave();
        Ok(())
    }

    /// Gives the sandbox's place back.
    fn leave(&mut self) {
        let mut registry = self.inner.registry();
        if let Some(entry) = registry.sandboxes.remove(&self.id)
            && entry.timed_out
        {
            registry.ledger.timeout_destroys += 1;
        }
        drop(registry);
        self.gone = true;
        self.inner.pool_kick.notify_one();
    }

    async fn is_alive(&self, handle: &Arc<dyn Sandbox>) -> bool {
        // One that does not answer in time is not known to be dead.
        match timeout(ANSWER_TIME, caught(handle.is_alive())).await {
            Ok(Ok(alive)) => alive,
            Ok(Err(_)) | Err(_) => true,
        }
    }

    fn new_session(&self, client: &str) -> Held {
        let mut session = SandboxSession::new(self.id.clone(), client);
        session.timeouts = self.inner.config.default_timeouts.clone();
        Held::new(session)
    }

    fn handle(&self) -> Result<Arc<dyn Sandbox>> {
        self.handle.clone().ok_or_else(|| self.lost())
    }

    fn lost(&self) -> SandboxError {
        SandboxError::NotFound { what: "sandbox", id: self.id.to_string() }
    }

    /// Returns its record, if there is a store to write it to.
    fn record(&self, phase: Phase) -> Option<SandboxRecord> {
        if !self.inner.is_durable() {
            return None;
        }
        let registry = self.inner.registry();
        let entry = registry.sandboxes.get(&self.id)?;
        Some(entry.record(&self.id, self.inner.name(self.backend), phase))
    }

    fn update(&self, change: impl FnOnce(&mut Entry)) {
        if let Some(mut entry) = self.inner.registry().sandboxes.get_mut(&self.id) {
            change(&mut entry);
        }
    }
}

fn joined(
    held: Held,
    handle: Arc<dyn Sandbox>,
    mailbox: mpsc::Sender<Request>,
    undo: Wanted,
) -> Joined {
    let session_id = held.shown.session_id.clone();
    let promise = Promise { mailbox, session_id, undo: Some(undo) };
    Joined { session: held.shown, handle, promise }
}
