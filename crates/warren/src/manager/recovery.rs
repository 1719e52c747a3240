//! What a manager does with the records of the one before it: takes over what still runs, finishes
//! what was half-made or half-destroyed, and removes what belongs to nobody.
//!
//! Several are looked at side by side, and whoever does not answer soon is left for later: one init that hangs keeps neither the
//! others waiting nor the manager closed. What cannot be done when the manager opens is tried again at once, with more
//! patience, and by each sweep.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, Stream, StreamExt as _};
use tokio::time::Instant;
use tracing::{info, warn};

use super::Inner;
use super::bounded::bounded;
use super::guarded::Guarded;
use super::registry::{Entry, Life, Unreachable};
use super::session::Held;
use crate::store::{Change, Phase, SandboxRecord, SessionRecord};
use crate::{CreateOptions, Reach, Result, Sandbox, SandboxError, SandboxId, SessionState};

/// How long one sandbox may take to be taken over, or its remains to be removed.
const ADOPT_TIME: Duration = Duration::from_secs(60);
/// How long one may take to be taken over while the manager opens, and everybody waits: an init answers in less than a
/// millisecond, and on a host with more to do than it can in a few.
const OPENING_TIME: Duration = Duration::from_secs(3);
/// How many are looked at side by side.
const AT_ONCE: usize = 16;

/// What became of a record.
enum Fate {
    /// It runs, and is kept.
    Adopted(Arc<dyn Sandbox>),
    /// Nothing of it is left.
    Gone,
    /// Its backend is missing or does not answer, so its record stays as it is.
    Unreachable,
}

/// What the store has of one sandbox.
type Known = (SandboxRecord, Vec<SessionRecord>);

impl Inner {
    /// Makes the registry what the store says, and the host what the registry says.
    pub(super) async fn recover(self: &Arc<Self>) -> Result<()> {
        let Some(store) = &self.store else { return Ok(()) };
        let image = store.load().await?;
        let mut sessions: BTreeMap<SandboxId, Vec<SessionRecord>> = BTreeMap::new();
        for record in image.sessions {
            sessions.entry(record.session.sandbox_id.clone()).or_default().push(record);
        }
        // None of a fork that is not whole is to be seen.
        let unfinished = self.unfinished_forks().await?;
        let mut dropped = Vec::new();
        let mut spared = BTreeSet::new();
        let known: Vec<Known> = image
            .sandboxes
            .into_iter()
            .map(|record| {
                let mut held = sessions.remove(&record.id).unwrap_or_default();
                held.retain(|record| record.session.state != SessionState::Terminated);
                match unfinished.contains(&record.id) {
                    true => (SandboxRecord { phase: Phase::Creating, ..record }, held),
                    false => (record, held),
                }
            })
            .collect();
        let mut fates = pin!(self.decide_all(known, OPENING_TIME));
        while let Some(((record, held), fate)) = fates.next().await {
            let id = record.id.clone();
            match fate {
                Fate::Adopted(handle) => {
                    spared.insert(id);
                    dropped.extend(settled(&record, &handle).map(Change::PutSandbox));
                    self.install(record, held, handle);
                }
                Fate::Gone => {
                    self.tell_lost(&record);
                    let ids = held.into_iter().map(|record| record.session.session_id);
                    dropped.extend(ids.map(Change::DropSession));
                    dropped.push(Change::DropSandbox(id));
                }
                Fate::Unreachable => {
                    spared.insert(id.clone());
                    let rest = Unreachable { record, sessions: held };
                    self.registry().unreachable.insert(id, rest);
                }
            }
        }
        // Sessions on sandboxes that there is no record of.
        let strays = sessions.into_values().flatten();
        dropped.extend(strays.map(|record| Change::DropSession(record.session.session_id)));
        if let Some(default) = image.default {
            if spared.contains(&default) {
                self.registry().default = Some(default);
            } else {
                dropped.push(Change::SetDefault(None));
            }
        }
        self.persist(dropped.into_iter()).await?;
        self.remove_strays(&spared).await;
        if unfinished.iter().all(|id| !self.registry().unreachable.contains_key(id)) {
            self.forget_forks().await?;
        }
        self.collect().await;
        let left = self.registry().unreachable.len();
        info!(sandboxes = self.registry().sandboxes.len(), left, "took over");
        if left > 0 {
            // Some may only have been slow.
            let inner = Arc::clone(self);
            self.tasks.spawn(async move {
                tokio::select! {
                    () = inner.stop.cancelled() => {}
                    () = inner.recover_rest() => {}
                }
            });
        }
        Ok(())
    }

    /// Finds out what becomes of each, several side by side, in the order in which it is known.
    fn decide_all(
        &self,
        known: impl IntoIterator<Item = Known>,
        patience: Duration,
    ) -> impl Stream<Item = (Known, Fate)> {
        let decide = move |(record, sessions): Known| async move {
            // On the heap: it is large, and there are several.
            let fate = Box::pin(self.decide(&record, &sessions, patience)).await;
            ((record, sessions), fate)
        };
        stream::iter(known).map(decide).buffer_unordered(AT_ONCE)
    }

    async fn decide(
        &self,
        record: &SandboxRecord,
        sessions: &[SessionRecord],
        patience: Duration,
    ) -> Fate {
        let backend = self.backends.iter().find(|backend| backend.name() == record.backend);
        let Some(backend) = backend else {
            warn!(sandbox = %record.id, backend = %record.backend, "its backend is not here");
            return Fate::Unreachable;
        };
        let backend = backend.get();
        let pool = &self.config.pool;
        let wanted = match (record.phase, &record.owner) {
            (Phase::Creating | Phase::Destroying, _) => false,
            (Phase::Running | Phase::Suspended | Phase::Restoring, Some(_)) => !sessions.is_empty(),
            (Phase::Running | Phase::Suspended | Phase::Restoring, None) => {
                pool.enabled && pool.warm_profiles.contains(&record.spec.profile) && !record.used
            }
        };
        let anchor = record.anchor.as_deref().filter(|_| wanted);
        let outcome = match anchor {
            Some(anchor) => {
                let adoption = async {
                    match backend.adopt(&record.id, &record.spec, anchor).await? {
                        Some(handle) => settle(record.phase, Arc::from(handle)).await,
                        None => Ok(None),
                    }
                };
                bounded("taking over the sandbox", patience, adoption).await
            }
            None => Ok(None),
        };
        // Half-made, half-destroyed, nobody's or gone: nothing of it may be left.
        let outcome = match outcome {
            Ok(None) => {
                let reclaim = backend.reclaim(&record.id);
                match bounded("removing its remains", ADOPT_TIME, reclaim).await {
                    // It was ended to be made anew, and its maker was killed before it was.
                    Ok(()) if wanted && record.phase == Phase::Restoring => {
                        let options = CreateOptions {
                            id: Some(record.id.clone()),
                            persistent: true,
                            base: record.base.clone(),
                            ..CreateOptions::default()
                        };
                        let make = async {
                            let made = backend.create_sandbox_with(&record.spec, &options).await?;
                            deny_again(record, &*made).await?;
                            Ok(Some(Arc::from(made)))
                        };
                        bounded("making it anew", ADOPT_TIME, make).await
                    }
                    other => other.map(|()| None),
                }
            }
            other => other,
        };
        match outcome {
            Ok(Some(handle)) => Fate::Adopted(handle),
            Ok(None) => {
                if wanted {
                    warn!(sandbox = %record.id, "a sandbox did not outlive the restart");
                }
                Fate::Gone
            }
            Err(error) => {
                warn!(sandbox = %record.id, %error, "a sandbox could not be taken over");
                Fate::Unreachable
            }
        }
    }

    fn install(
        self: &Arc<Self>,
        record: SandboxRecord,
        sessions: Vec<SessionRecord>,
        handle: Arc<dyn Sandbox>,
    ) {
        let Some(backend) = self.backends.iter().position(|b| b.name() == record.backend) else {
            return;
        };
        let (mailbox, inbox) = Self::mailbox();
        let suspended = record.phase == Phase::Suspended;
        let entry = Entry {
            backend,
            spec: Arc::new(record.spec),
            base: Arc::new(handle.base()),
            life: if suspended { Life::Suspended } else { Life::Running },
            owner: record.owner,
            used: record.used,
            handle: Some(Arc::clone(&handle)),
            mailbox,
            sessions: Vec::new(),
            since: Instant::now(),
            created_at: record.created_at,
            set_aside: false,
            ceded: false,
            timed_out: false,
            dirty: false,
            receipt: record.receipt.map(Arc::new),
        };
        {
            let mut registry = self.registry();
            registry.unreachable.remove(&record.id);
            registry.sandboxes.insert(record.id.clone(), entry);
            for record in sessions {
                registry.put_session(Held::from_record(record));
            }
        }
        let guarded = Guarded::new(Arc::clone(self), Arc::clone(&handle), None);
        self.tasks.spawn(async move { guarded.watch_all().await });
        self.spawn_keeper(record.id, backend, Some(handle), inbox, None);
    }

    /// Tells of a sandbox that somebody had and that is gone. Of one that was never made, or was being ended, its caller
    /// heard.
    fn tell_lost(&self, record: &SandboxRecord) {
        let had = match record.phase {
            Phase::Running | Phase::Suspended | Phase::Restoring => record.owner.as_ref(),
            Phase::Creating | Phase::Destroying => None,
        };
        if let Some(client) = had {
            self.tell_gone(&record.id, client);
        }
    }

    /// Removes what the host still has of sandboxes that there is no record of.
    async fn remove_strays(&self, spared: &BTreeSet<SandboxId>) {
        for (index, backend) in self.backends.iter().enumerate() {
            let remains = backend.get().remains().await.unwrap_or_else(|error| {
                warn!(backend = backend.name(), %error, "cannot tell what is left on the host");
                Vec::new()
            });
            let strays = remains.into_iter().filter(|id| !spared.contains(id));
            let remove = async |id: SandboxId| {
                info!(sandbox = %id, "removing what belongs to nobody");
                if let Err(error) = self.remove_stray(index, &id).await {
                    warn!(sandbox = %id, %error, "could not be removed yet");
                    self.registry().strays.insert((index, id));
                }
            };
            stream::iter(strays).for_each_concurrent(AT_ONCE, remove).await;
        }
    }

    async fn remove_stray(&self, backend: usize, id: &SandboxId) -> Result<()> {
        let reclaim = self.backend(backend).reclaim(id);
        bounded("removing what belongs to nobody", ADOPT_TIME, reclaim).await
    }

    /// Tries again what could not be done when the manager opened.
    pub(super) async fn recover_rest(self: &Arc<Self>) {
        let Ok(_turn) = self.recovering.try_lock() else { return };
        let (rest, strays) = {
            let registry = self.registry();
            (registry.unreachable.clone(), registry.strays.clone())
        };
        let rest = rest.into_values().map(|Unreachable { record, sessions }| (record, sessions));
        let mut fates = pin!(self.decide_all(rest, ADOPT_TIME));
        while let Some(((record, sessions), fate)) = fates.next().await {
            let id = record.id.clone();
            match fate {
                Fate::Unreachable => {}
                Fate::Adopted(handle) => {
                    info!(sandbox = %id, "took over after all");
                    let changed = settled(&record, &handle).map(Change::PutSandbox);
                    let _ = self.persist(changed.into_iter()).await;
                    self.install(record, sessions, handle);
                }
                Fate::Gone => {
                    self.tell_lost(&record);
                    let sessions = sessions.into_iter().map(|held| held.session.session_id);
                    let mut dropped: Vec<_> = sessions.map(Change::DropSession).collect();
                    dropped.push(Change::DropSandbox(id.clone()));
                    let _turn = self.default_turn.lock().await;
                    {
                        let mut registry = self.registry();
                        if registry.default.as_ref() == Some(&id) {
                            registry.default = None;
                            dropped.push(Change::SetDefault(None));
                        }
                    }
                    self.persist_or_owe(dropped).await;
                    self.registry().unreachable.remove(&id);
                }
            }
        }
        for (backend, id) in strays {
            if self.remove_stray(backend, &id).await.is_ok() {
                self.registry().strays.remove(&(backend, id));
            }
        }
    }
}

/// Returns the record of a sandbox that was about to be made anew, now that it is settled whether it was.
fn settled(record: &SandboxRecord, handle: &Arc<dyn Sandbox>) -> Option<SandboxRecord> {
    (record.phase == Phase::Restoring).then(|| SandboxRecord {
        phase: Phase::Running,
        anchor: handle.anchor(),
        base: handle.base(),
        reach: Reach::default(),
        ..record.clone()
    })
}

/// Has one that was made anew reach what it did, before anybody has it.
async fn deny_again(record: &SandboxRecord, made: &dyn Sandbox) -> Result<()> {
    if record.reach == Reach::default() {
        return Ok(());
    }
    let Err(error) = made.set_reach(&record.reach).await else { return Ok(()) };
    warn!(sandbox = %record.id, %error, "a sandbox reaches nothing until it is told again what");
    made.set_reach(&Reach::nothing()).await
}

/// Finishes a turn that may have been written and not been made.
async fn settle(
    phase: Phase,
    handle: Arc<dyn Sandbox>,
) -> Result<Option<Arc<dyn Sandbox>>, SandboxError> {
    if !handle.is_alive().await {
        return Ok(None);
    }
    match phase {
        Phase::Suspended => handle.suspend().await?,
        Phase::Creating | Phase::Running | Phase::Destroying | Phase::Restoring => {
            handle.resume().await?;
        }
    }
    Ok(Some(handle))
}
