//! Pristine warm sandboxes, made ahead of their callers.
//!
//! Nothing here is called by a caller: the pool looks after itself when a sandbox was claimed, made
//! or lost, when one grew too old, and when it is time to try again after a failure.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::warn;

use super::Inner;
use super::keeper::Request;
use super::registry::{Entry, Life, Place};
use crate::{IsolationRequirements, SandboxSpec};

/// How many warm sandboxes are made at once.
const AT_ONCE: usize = 4;
/// How long the pool leaves the machine to whoever has just taken a warm sandbox, and wants to use it.
const PAUSE: Duration = Duration::from_millis(20);
const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(30);

/// When the pool may try again after failures.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    fn note(&mut self, made: bool) {
        if made {
            *self = Self::default();
            return;
        }
        let delay = FIRST_RETRY.saturating_mul(1 << self.failures.min(16)).min(LAST_RETRY);
        self.failures = self.failures.saturating_add(1);
        self.until = Some(Instant::now() + delay);
    }
}

impl Inner {
    /// Keeps the pool filled until the manager stops.
    pub(super) async fn keep_pool(self: Arc<Self>) {
        loop {
            self.retire_old();
            let retry = self.backoff().until;
            if retry.is_none_or(|retry| Instant::now() >= retry) {
                self.fill_pool().await;
            }
            let retry = self.backoff().until.filter(|retry| *retry > Instant::now());
            let wake = [retry, self.next_retirement()].into_iter().flatten().min();
            let wait = async {
                match wake {
                    Some(wake) => tokio::time::sleep_until(wake).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.pool_kick.notified() => self.let_claims_pass().await,
                () = wait => {}
            }
        }
    }

    /// Waits a moment, unless the pool runs low meanwhile.
    async fn let_claims_pass(&self) {
        let over = tokio::time::sleep(PAUSE);
        tokio::pin!(over);
        while !self.is_low() {
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.pool_kick.notified() => {}
                () = &mut over => return,
            }
        }
    }

    /// Reports whether less than half of what is to be warm is so.
    fn is_low(&self) -> bool {
        let wanted = self.config.pool.min_warm as usize * self.wanted_warm().len();
        let registry = self.registry();
        let warm = registry.sandboxes.pooled().filter(|(_, entry)| entry.is_warm());
        warm.count() * 2 < wanted
    }

    /// Takes note that a warm sandbox was made, or was not.
    pub(super) fn pool_made(&self, made: bool) {
        self.backoff().note(made);
        self.pool_kick.notify_one();
    }

    /// Begins to make what is missing, as far as there is room.
    async fn fill_pool(self: &Arc<Self>) {
        for spec in self.wanted_warm() {
            if self.missing(&spec) == 0 {
                continue;
            }
            let base = Arc::default();
            let fitting = match self.choose(&spec, &IsolationRequirements::default(), None).await {
                Ok(fitting) => fitting,
                Err(error) => {
                    let profile = &spec.profile;
                    warn!(profile, %error, "no backend can keep this profile warm");
                    self.backoff().note(false);
                    continue;
                }
            };
            while self.missing(&spec) > 0 {
                let taken = fitting.iter().any(|backend| {
                    matches!(
                        self.conceive(backend, (&spec, &base), None, None, false),
                        Ok(Place::Taken)
                    )
                });
                if !taken {
                    break;
                }
            }
        }
    }

    /// Returns what is kept warm: of each profile the usual, and what was asked for besides.
    fn wanted_warm(&self) -> Vec<Arc<SandboxSpec>> {
        let usual = |profile: &String| {
            Arc::new(SandboxSpec { profile: profile.clone(), ..SandboxSpec::default() })
        };
        let mut wanted: Vec<_> = self.config.pool.warm_profiles.iter().map(usual).collect();
        let also = self.also_warm.lock().unwrap_or_else(PoisonError::into_inner);
        wanted.extend(also.iter().cloned());
        wanted
    }

    /// Returns how many of a kind are to be begun now.
    fn missing(&self, spec: &SandboxSpec) -> usize {
        let pool = &self.config.pool;
        let registry = self.registry();
        let warm: Vec<&Entry> = registry.sandboxes.pooled().map(|(_, entry)| entry).collect();
        let ready = |entry: &&&Entry| entry.life != Life::Ending;
        let of_kind = warm.iter().filter(ready).filter(|entry| *entry.spec == *spec);
        let making = |entry: &&&Entry| entry.life == Life::Creating && !entry.set_aside;
        let making = warm.iter().filter(making).count();
        // One that ends is counted until it has: there are never more than `max_warm`.
        let room = (pool.max_warm as usize).saturating_sub(warm.len());
        let missing = (pool.min_warm as usize).saturating_sub(of_kind.count());
        missing.min(room).min(AT_ONCE.saturating_sub(making))
    }

    /// Ends warm sandboxes that grew too old; the pool is then filled anew.
    fn retire_old(&self) {
        let now = Instant::now();
        let mut registry = self.registry();
        let old = |entry: &Entry| {
            let age = now.saturating_duration_since(entry.since);
            entry.is_warm() && age >= self.config.pool.warm_ttl
        };
        let old = registry.sandboxes.pooled().filter(|(_, entry)| old(entry));
        let old: Vec<_> = old.map(|(id, _)| id.clone()).collect();
        for id in old {
            if let Some(mut entry) = registry.sandboxes.get_mut(&id) {
                let (reply, _) = oneshot::channel();
                if entry.mailbox.try_send(Request::Discard { reply }).is_ok() {
                    entry.life = Life::Ending;
                }
            }
        }
    }

    fn next_retirement(&self) -> Option<Instant> {
        let registry = self.registry();
        let warm = registry.sandboxes.pooled().filter(|(_, entry)| entry.is_warm());
        let oldest = warm.map(|(_, entry)| entry.since).min()?;
        oldest.checked_add(self.config.pool.warm_ttl)
    }
}
