//! The sandbox as its clients hold it: each use is counted as work of a session, and refused once
//! the session or the sandbox does not allow it.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};

use super::Inner;
use super::keeper::{Request, Wanted};
use super::registry::Life;
use crate::{
    Command, Enforcement, ExecContext, ExecOutput, ExecReport, ResourceUsage, Result, Sandbox,
    SandboxCapabilities, SandboxError, SandboxFiles, SandboxId, SandboxSession, SessionState,
    StreamOutput,
};

/// A sandbox as its clients hold it.
#[derive(Debug)]
pub(super) struct Guarded {
    inner: Arc<Inner>,
    pub(super) handle: Arc<dyn Sandbox>,
    /// Through which session it is used; all of the sandbox's if it was asked for by its id.
    session: Option<String>,
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
}

impl Drop for Work {
    fn drop(&mut self) {
        let mut registry = self.inner.registry();
        for id in &self.sessions {
            if let Some(held) = registry.sessions.get_mut(id) {
                held.busy = held.busy.saturating_sub(1);
                if held.shown.state != SessionState::Suspended {
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
        Self { inner, handle, session }
    }

    /// Begins a piece of work, if the sandbox is to be used.
    pub(super) fn begin(&self, usage: Use) -> Result<Work> {
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
        let entry = registry.sandboxes.get_mut(id).ok_or_else(ended)?;
        match (entry.life, usage) {
            (Life::Running, _) | (Life::Suspended, Use::Looks) => {}
            (Life::Suspended, Use::Runs) => {
                return Err(SandboxError::Suspended { id: id.clone() });
            }
            (Life::Creating | Life::Ending, _) => return Err(ended()),
        }
        entry.used |= usage == Use::Runs;
        for id in &sessions {
            if let Some(held) = registry.sessions.get_mut(id) {
                held.busy += 1;
                if held.shown.state != SessionState::Suspended {
                    held.touch();
                }
            }
        }
        Ok(Work { inner: Arc::clone(&self.inner), sessions })
    }

    /// Returns the session that a call on the sandbox itself is made through.
    fn session(&self) -> Result<SandboxSession> {
        let id = self.handle.id();
        let registry = self.inner.registry();
        let held = match &self.session {
            Some(session) => registry.sessions.get(session),
            None => {
                let active =
                    |held: &&super::session::Held| held.shown.state == SessionState::Active;
                let first = registry.sessions_on(id).find(active);
                first.or_else(|| registry.sessions_on(id).next())
            }
        };
        let held = held.ok_or_else(|| SandboxError::Ended { id: id.clone() })?;
        Ok(held.shown.clone())
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
        let _work = self.begin(Use::Runs)?;
        self.handle.exec(cmd, ctx).await
    }

    async fn exec_streaming(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        output_tx: mpsc::Sender<StreamOutput>,
    ) -> Result<ExecOutput, SandboxError> {
        let _work = self.begin(Use::Runs)?;
        self.handle.exec_streaming(cmd, ctx, output_tx).await
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

    async fn resume(&self) -> Result<(), SandboxError> {
        let session = self.session()?;
        self.inner.move_session(&session, Wanted::Resume).await.map(drop)
    }

    async fn snapshot(&self, name: &str) -> Result<String, SandboxError> {
        let _work = self.begin(Use::Looks)?;
        self.handle.snapshot(name).await
    }

    async fn restore(&self, snapshot_id: &str) -> Result<(), SandboxError> {
        let _work = self.begin(Use::Runs)?;
        self.handle.restore(snapshot_id).await
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
        let _work = self.begin(Use::Runs)?;
        self.handle.exec_report(cmd, ctx).await
    }

    fn anchor(&self) -> Option<String> {
        self.handle.anchor()
    }

    fn files(&self) -> Option<&dyn SandboxFiles> {
        self.handle.files().map(|_| self as &dyn SandboxFiles)
    }

    fn enforcement(&self) -> Enforcement {
        self.handle.enforcement()
    }
}
