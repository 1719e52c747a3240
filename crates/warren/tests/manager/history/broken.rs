//! Managers that break a rule, to see each of them found out.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::task::yield_now;
use tokio_util::task::TaskTracker;
use warren::*;

/// Which rule is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// A1: each fifth session that is given out is gone at once.
    LosesASession,
    /// P5: each fourth sandbox is one that another was given before.
    GivesOneToTwo,
    /// S1: a detach ends the session.
    EndsWhatIsDetached,
    /// S2: what is somebody else's can be ended.
    LetsAnybodyEnd,
    /// S4: a resume of what has ended succeeds.
    ResumesTheEnded,
    /// S5: a release is answered before it is done.
    AnswersTooSoon,
    /// S7: a suspend does nothing.
    SuspendsInName,
    /// S7: a resume that fails is said to have succeeded.
    HidesAFailure,
    /// S9: a sweep ends what has not timed out.
    SweepsTooMuch,
    /// S9: a sweep counts what it did not end.
    CountsTooMuch,
    /// S10: the statistics are of two moments.
    TearsStatistics,
    /// The list is of many moments.
    TearsTheList,
    /// S11: the default stays when its sandbox is gone.
    KeepsTheDefault,
}

impl How {
    pub(super) const ALL: [Self; 13] = [
        Self::LosesASession,
        Self::GivesOneToTwo,
        Self::EndsWhatIsDetached,
        Self::LetsAnybodyEnd,
        Self::ResumesTheEnded,
        Self::AnswersTooSoon,
        Self::SuspendsInName,
        Self::HidesAFailure,
        Self::SweepsTooMuch,
        Self::CountsTooMuch,
        Self::TearsStatistics,
        Self::TearsTheList,
        Self::KeepsTheDefault,
    ];
}

/// A manager that breaks one rule and keeps the others.
#[derive(Debug)]
pub(super) struct Broken {
    inner: DefaultSandboxManager,
    how: How,
    count: AtomicU64,
    given: Mutex<Option<SandboxId>>,
    default: Mutex<Option<SandboxId>>,
    late: TaskTracker,
}

impl Broken {
    pub(super) fn new(inner: DefaultSandboxManager, how: How) -> Self {
        Self {
            inner,
            how,
            count: AtomicU64::new(1),
            given: Mutex::default(),
            default: Mutex::default(),
            late: TaskTracker::new(),
        }
    }

    fn is(&self, how: How) -> bool {
        self.how == how
    }

    fn each(&self, nth: u64) -> bool {
        self.count.fetch_add(1, Ordering::Relaxed).is_multiple_of(nth)
    }
}

#[async_trait]
impl SandboxManager for Broken {
    async fn acquire(
        &self,
        spec: &SandboxSpec,
        options: &SandboxSelectionOptions,
        client_id: &str,
    ) -> Result<(SandboxSession, Arc<dyn Sandbox>), SandboxError> {
        let (mut session, sandbox) = self.inner.acquire(spec, options, client_id).await?;
        if self.is(How::LosesASession) && self.each(5) {
            self.inner.terminate(&session).await?;
        }
        let given = self.given.lock().unwrap().replace(session.sandbox_id.clone());
        if self.is(How::GivesOneToTwo)
            && self.each(4)
            && let Some(given) = given
        {
            session.sandbox_id = given;
        }
        Ok((session, sandbox))
    }

    async fn release(
        &self,
        session: &SandboxSession,
        keep_alive: bool,
    ) -> Result<(), SandboxError> {
        if self.is(How::AnswersTooSoon) && !keep_alive {
            let (inner, session) = (self.inner.clone(), session.clone());
            self.late.spawn(async move {
                tokio::time::sleep(Duration::from_millis(3)).await;
                inner.release(&session, false).await
            });
            return Ok(());
        }
        self.inner.release(session, keep_alive).await
    }

    async fn attach(&self, request: AttachRequest) -> Result<AttachResult, SandboxError> {
        self.inner.attach(request).await
    }

    async fn detach(&self, session: &SandboxSession) -> Result<(), SandboxError> {
        if self.is(How::EndsWhatIsDetached) {
            return self.inner.terminate(session).await;
        }
        self.inner.detach(session).await
    }

    async fn suspend(&self, session: &SandboxSession) -> Result<(), SandboxError> {
        if self.is(How::SuspendsInName)
            && self.inner.get_session(&session.session_id).await?.is_some()
        {
            return Ok(());
        }
        self.inner.suspend(session).await
    }

    async fn resume(&self, session: &SandboxSession) -> Result<SandboxSession, SandboxError> {
        let resumed = SandboxSession { state: SessionState::Active, ..session.clone() };
        match self.inner.resume(session).await {
            Err(SandboxError::SessionEnded { .. }) if self.is(How::ResumesTheEnded) => Ok(resumed),
            Err(SandboxError::Step { .. }) if self.is(How::HidesAFailure) => Ok(resumed),
            other => other,
        }
    }

    async fn terminate(&self, session: &SandboxSession) -> Result<(), SandboxError> {
        let found = self.inner.get_session(&session.session_id).await?;
        match found {
            Some(found) if self.is(How::LetsAnybodyEnd) => self.inner.terminate(&found).await,
            _ => self.inner.terminate(session).await,
        }
    }

    async fn list_sessions(&self) -> Result<Vec<SandboxSession>, SandboxError> {
        let all = self.inner.list_sessions().await?;
        if !self.is(How::TearsTheList) {
            return Ok(all);
        }
        let mut torn = Vec::new();
        for session in all {
            torn.extend(self.inner.get_session(&session.session_id).await?);
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        Ok(torn)
    }

    async fn get_session(&self, session_id: &str) -> Result<Option<SandboxSession>, SandboxError> {
        self.inner.get_session(session_id).await
    }

    async fn get_session_by_sandbox(
        &self,
        sandbox_id: &SandboxId,
    ) -> Result<Option<SandboxSession>, SandboxError> {
        self.inner.get_session_by_sandbox(sandbox_id).await
    }

    async fn get_session_by_client(
        &self,
        client_id: &str,
    ) -> Result<Option<SandboxSession>, SandboxError> {
        self.inner.get_session_by_client(client_id).await
    }

    async fn get_sandbox(
        &self,
        sandbox_id: &SandboxId,
    ) -> Result<Option<Arc<dyn Sandbox>>, SandboxError> {
        self.inner.get_sandbox(sandbox_id).await
    }

    async fn set_default_sandbox(&self, sandbox_id: Option<SandboxId>) -> Result<(), SandboxError> {
        self.inner.set_default_sandbox(sandbox_id.clone()).await?;
        *self.default.lock().unwrap() = sandbox_id;
        Ok(())
    }

    async fn get_default_sandbox(&self) -> Option<SandboxId> {
        if self.is(How::KeepsTheDefault) {
            return self.default.lock().unwrap().clone();
        }
        self.inner.get_default_sandbox().await
    }

    async fn cleanup_expired(&self) -> Result<u64, SandboxError> {
        let mut ended = self.inner.cleanup_expired().await?;
        if self.is(How::SweepsTooMuch)
            && let Some(session) = self.inner.list_sessions().await?.first()
        {
            self.inner.terminate(session).await?;
            ended += 1;
        }
        Ok(ended + u64::from(self.is(How::CountsTooMuch) && self.each(3)))
    }

    async fn stats(&self) -> SandboxManagerStats {
        let before = self.inner.stats().await;
        if !self.is(How::TearsStatistics) {
            return before;
        }
        for _ in 0..3 {
            yield_now().await;
        }
        let after = self.inner.stats().await;
        SandboxManagerStats { active_sessions: before.active_sessions, ..after }
    }

    async fn health(&self) -> Result<bool, SandboxError> {
        self.inner.health().await
    }
}
