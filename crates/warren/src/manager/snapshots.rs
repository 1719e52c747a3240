//! Snapshots and forks by the rules of the contract: whose they are, and that a crash leaves nothing
//! half-made.
//!
//! The layers and the records are the backend's ([`crate::snapshot`]); here is who may use them. The
//! keeper of a sandbox captures it and makes it anew, between its other requests.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::Inner;
use super::keeper::{Joined, Request};
use super::registry::Found;
use super::selection::Needs;
use crate::layers::records::Records;
use crate::layers::{Held, Layers};
use crate::snapshot::Snapshots;
use crate::{
    Base, Capture, ForkOptions, Importer, IsolationRequirements, Reach, Result, Sandbox,
    SandboxError, SandboxId, SandboxSession, SandboxSpec, Snapshot, SnapshotKind, SnapshotOptions,
};

/// How long a capture, and making a sandbox anew, may take.
pub(super) const CAPTURE_TIME: Duration = Duration::from_secs(600);
/// How many sandboxes one fork may make.
const MAX_FORK: u32 = 1_000;
/// The directory of the records of forks that are being made.
const FORKS: &str = "forks";

/// A fork that is being made. If its maker is killed, none of its sandboxes is to be seen.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Fork {
    base: Base,
    sandboxes: BTreeSet<SandboxId>,
}

/// Runs what waits for a disk where that holds up nobody.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(SandboxError::Internal { message: error.to_string() }))
}

impl Inner {
    /// Returns every store of layers, once.
    fn stores(&self) -> Vec<Layers> {
        let mut stores: Vec<Layers> = Vec::new();
        for known in &self.backends {
            if let Some(layers) = known.get().layers()
                && !stores.iter().any(|other| other.root() == layers.root())
            {
                stores.push(layers.clone());
            }
        }
        stores
    }

    pub(super) fn layers_of(&self, backend: usize) -> Result<Layers> {
        self.backend(backend).layers().cloned().ok_or_else(|| SandboxError::Unsupported {
            feature: "snapshots".to_owned(),
            backend: self.name(backend).to_owned(),
            hint: "use a backend that keeps layers, `linux` for one".to_owned(),
        })
    }

    /// Returns the way to the keeper of a session's sandbox, and its backend.
    fn keeper_of(
        &self,
        session: &SandboxSession,
    ) -> Result<(tokio::sync::mpsc::Sender<Request>, usize, Arc<SandboxSpec>)> {
        let id = || session.session_id.clone();
        let registry = self.registry();
        match registry.find(session) {
            Found::Held(mailbox) => {
                let held = registry.sessions.get(&session.session_id);
                let sandbox = held.map(|held| held.shown.sandbox_id.clone());
                let entry = sandbox.and_then(|sandbox| registry.sandboxes.get(&sandbox));
                let unknown = || SandboxError::NotFound { what: "session", id: id() };
                let entry = entry.ok_or_else(unknown)?;
                Ok((mailbox, entry.backend, Arc::clone(&entry.spec)))
            }
            Found::Ended => Err(SandboxError::SessionEnded { id: id() }),
            Found::Unknown => Err(SandboxError::NotFound { what: "session", id: id() }),
        }
    }

    fn handle_of(&self, session: &SandboxSession) -> Result<Arc<dyn Sandbox>> {
        let id = &session.sandbox_id;
        let handle = self.registry().sandboxes.get(id).and_then(|entry| entry.handle.clone());
        handle.ok_or_else(|| SandboxError::NotFound { what: "sandbox", id: id.to_string() })
    }

    async fn capture(self: &Arc<Self>, session: &SandboxSession) -> Result<Capture> {
        let (mailbox, ..) = self.keeper_of(session)?;
        let (reply, captured) = oneshot::channel();
        self.post(&mailbox, Request::Capture { reply })?;
        let ended = || SandboxError::SessionEnded { id: session.session_id.clone() };
        captured.await.unwrap_or_else(|_| Err(ended()))
    }

    pub(super) async fn snapshot(
        self: &Arc<Self>,
        session: &SandboxSession,
        options: &SnapshotOptions,
    ) -> Result<Snapshot> {
        self.enter()?;
        options.validate()?;
        let (_, backend, spec) = self.keeper_of(session)?;
        let snapshots = Snapshots::of(&self.layers_of(backend)?);
        let (owner, name) = (session.client_id.clone(), options.name.clone());
        let reserved = blocking(move || snapshots.reserve(Some(&owner), &name)).await?;
        let capture = self.capture(session).await?;
        let (id, options) = (session.sandbox_id.clone(), options.clone());
        // On its own from here: whoever gives up now finds the snapshot, or none.
        blocking(move || reserved.put(&id, (*spec).clone(), &capture, options)).await
    }

    pub(super) async fn restore(
        self: &Arc<Self>,
        session: &SandboxSession,
        snapshot: &Snapshot,
    ) -> Result<()> {
        self.enter()?;
        let (mailbox, backend, _) = self.keeper_of(session)?;
        let snapshots = Snapshots::of(&self.layers_of(backend)?);
        let (owner, id) = (snapshot.owner.clone(), snapshot.id.clone());
        // As it is recorded now, and held until the sandbox stands on it.
        let (base, held) = blocking(move || {
            let base = snapshots.find(owner.as_deref(), id.as_str())?.base;
            let held = snapshots.layers().hold(base.all())?;
            Ok((base, held))
        })
        .await?;
        let (reply, done) = oneshot::channel();
        self.post(&mailbox, Request::Rebase { base, held, reply })?;
        let ended = || SandboxError::SessionEnded { id: session.session_id.clone() };
        done.await.unwrap_or_else(|_| Err(ended()))
    }

    /// Goes back to the last savepoint, which is used up by that.
    pub(super) async fn undo(self: &Arc<Self>, session: &SandboxSession) -> Result<Snapshot> {
        self.enter()?;
        let (_, backend, _) = self.keeper_of(session)?;
        let snapshots = Snapshots::of(&self.layers_of(backend)?);
        let (owner, sandbox) = (session.client_id.clone(), session.sandbox_id.clone());
        let all = snapshots.clone();
        let last = blocking(move || Ok(all.savepoints(Some(&owner), &sandbox)?.pop())).await?;
        let last = last.ok_or_else(|| SandboxError::Conflict {
            action: format!("undo in sandbox `{}`", session.sandbox_id),
            reason: "it has no savepoint".to_owned(),
        })?;
        self.restore(session, &last).await?;
        let (owner, id) = (session.client_id.clone(), last.id.clone());
        blocking(move || snapshots.remove(Some(&owner), id.as_str())).await?;
        Ok(last)
    }

    pub(super) async fn list_snapshots(&self) -> Result<Vec<Snapshot>> {
        let stores = self.stores();
        blocking(move || {
            let mut all = Vec::new();
            for layers in &stores {
                all.extend(Snapshots::of(layers).all()?);
            }
            Ok(all)
        })
        .await
    }

    pub(super) async fn get_snapshot(&self, client: &str, id: &str) -> Result<Snapshot> {
        let (stores, client, id) = (self.stores(), client.to_owned(), id.to_owned());
        blocking(move || {
            for layers in &stores {
                match Snapshots::of(layers).find(Some(&client), &id) {
                    Err(SandboxError::NotFound { .. }) => {}
                    found => return found,
                }
            }
            Err(SandboxError::NotFound { what: "snapshot", id })
        })
        .await
    }

    pub(super) async fn remove_snapshot(&self, client: &str, id: &str) -> Result<()> {
        let found = self.get_snapshot(client, id).await?;
        let (stores, client) = (self.stores(), client.to_owned());
        blocking(move || {
            for layers in &stores {
                match Snapshots::of(layers).remove(Some(&client), found.id.as_str()) {
                    Err(SandboxError::NotFound { .. }) => {}
                    other => return other.map(drop),
                }
            }
            Ok(())
        })
        .await?;
        self.collect().await;
        Ok(())
    }

    pub(super) async fn export_snapshot(&self, client: &str, id: &str) -> Result<std::fs::File> {
        let found = self.get_snapshot(client, id).await?;
        let (stores, client) = (self.stores(), client.to_owned());
        blocking(move || {
            for layers in &stores {
                let snapshots = Snapshots::of(layers);
                match snapshots.export(Some(&client), found.id.as_str()) {
                    Err(SandboxError::NotFound { what: "snapshot", .. }) => {}
                    other => return other,
                }
            }
            Err(SandboxError::NotFound { what: "snapshot", id: found.id.0 })
        })
        .await
    }

    pub(super) async fn import_snapshot(
        self: &Arc<Self>,
        client: &str,
        name: Option<String>,
        importer: Importer,
        from: Box<dyn std::io::Read + Send>,
    ) -> Result<Snapshot> {
        self.enter()?;
        let layers = self.stores().into_iter().next();
        let layers = layers.ok_or_else(|| SandboxError::Unsupported {
            feature: "snapshots".to_owned(),
            backend: "only".to_owned(),
            hint: "use a backend that keeps layers, `linux` for one".to_owned(),
        })?;
        let client = client.to_owned();
        blocking(move || {
            Snapshots::of(&layers).import(Some(&client), name.as_deref(), importer, from)
        })
        .await
    }

    /// Makes sandboxes that are as the session's is now.
    pub(super) async fn fork(
        self: &Arc<Self>,
        session: &SandboxSession,
        options: &ForkOptions,
    ) -> Result<Vec<Joined>> {
        self.enter()?;
        check_count(options)?;
        let (_, backend, spec) = self.keeper_of(session)?;
        let layers = self.layers_of(backend)?;
        // Before the sandbox stands still for something that cannot be.
        self.check_room(options)?;
        // Also before: should it end meanwhile, its forks reach what it did, and not everything.
        let handle = self.handle_of(session)?;
        let Capture { base, held, .. } = self.capture(session).await?;
        let reach = handle.reach();
        let fork = Ground { backend, layers, spec: (*spec).clone(), base, reach, held };
        self.make_fork(fork, options, &session.client_id).await
    }

    /// Makes sandboxes that are as a snapshot says.
    pub(super) async fn fork_snapshot(
        self: &Arc<Self>,
        snapshot: &Snapshot,
        options: &ForkOptions,
        client: &str,
    ) -> Result<Vec<Joined>> {
        self.enter()?;
        check_count(options)?;
        self.check_room(options)?;
        let unknown = || SandboxError::NotFound { what: "snapshot", id: snapshot.id.to_string() };
        for backend in 0..self.backends.len() {
            let Ok(layers) = self.layers_of(backend) else { continue };
            let (snapshots, wanted) = (Snapshots::of(&layers), snapshot.clone());
            let found = blocking(move || {
                let found = snapshots.find(wanted.owner.as_deref(), wanted.id.as_str())?;
                let held = snapshots.layers().hold(found.base.all())?;
                Ok((found, held))
            });
            match found.await {
                Err(SandboxError::NotFound { .. }) => {}
                Err(error) => return Err(error),
                Ok((Snapshot { spec, base, .. }, held)) => {
                    // What was reached when it was taken is not part of what was saved.
                    let reach = Reach::default();
                    let fork = Ground { backend, layers, spec, base, reach, held };
                    return self.make_fork(fork, options, client).await;
                }
            }
        }
        Err(unknown())
    }

    /// Says at once that there is no room, where that can be known.
    fn check_room(&self, options: &ForkOptions) -> Result<()> {
        let registry = self.registry();
        let living = registry.sandboxes.values().filter(|entry| !entry.is_warm() && !entry.ceded);
        let taken = u32::try_from(living.count()).unwrap_or(u32::MAX);
        let limit = self.config.max_sandboxes;
        let wanted = if options.partial { 1 } else { options.count };
        if taken.saturating_add(wanted) > limit {
            let next = registry.next_expiry().unwrap_or_default();
            let retry_after = next.saturating_add(self.config.cleanup_interval);
            return Err(SandboxError::Capacity { limit, retry_after });
        }
        Ok(())
    }

    async fn make_fork(
        self: &Arc<Self>,
        ground: Ground,
        options: &ForkOptions,
        client: &str,
    ) -> Result<Vec<Joined>> {
        let Ground { backend, layers, mut spec, base, reach, held } = ground;
        if let Some(labels) = &options.labels {
            spec.labels = labels.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
            spec.labels.sort();
            spec.validate()?;
        }
        let name = self.name(backend).to_owned();
        // Where it was: what it stands on is that backend's, and so it is as strong as before.
        let isolation = IsolationRequirements::default();
        let fitting = self.choose(&spec, &isolation, Some(&name)).await?;
        let (spec, base) = (Arc::new(spec), Arc::new(base));
        let ids: Vec<SandboxId> = (0..options.count).map(|_| SandboxId::new()).collect();
        // Known before the first of them is made, and until the last one is.
        let record = Fork { base: (*base).clone(), sandboxes: ids.iter().cloned().collect() };
        let records = Records::of(&layers, FORKS);
        let fork_id = uuid::Uuid::new_v4().to_string();
        let (writer, id) = (records.clone(), fork_id.clone());
        blocking(move || writer.put(&id, &record)).await?;
        let make = |id: SandboxId| {
            let (fitting, spec, base, reach) = (&fitting, &spec, &base, &reach);
            async move {
                let made = (spec, base);
                let made = self.create(fitting, made, Some(&id), Needs::default(), client).await?;
                // Before anybody has it.
                match *reach == Reach::default() {
                    true => Ok(made),
                    false => made.handle.set_reach(reach).await.map(|()| made),
                }
            }
        };
        let made = join_all(ids.into_iter().map(make)).await;
        let (made, failed): (Vec<_>, Vec<_>) = made.into_iter().partition(Result::is_ok);
        let made: Vec<Joined> = made.into_iter().flatten().collect();
        let failed = failed.into_iter().find_map(Result::err);
        let outcome = match failed {
            Some(error) if !options.partial || made.is_empty() => {
                // Those that were made are taken back, by their promises, and all at once.
                let ended = made.iter().map(|joined| self.end_made(joined.session.clone()));
                join_all(ended).await;
                drop(made);
                Err(error)
            }
            Some(error) => {
                warn!(%error, made = made.len(), "a fork has fewer sandboxes than were asked for");
                Ok(made)
            }
            None => Ok(made),
        };
        let done = blocking(move || records.remove(&fork_id)).await;
        drop(held);
        done.and(outcome)
    }

    async fn end_made(self: &Arc<Self>, session: SandboxSession) {
        let ended = self.move_session(&session, super::keeper::Wanted::End).await;
        if let Err(error) = ended {
            warn!(sandbox = %session.sandbox_id, %error, "one of a fork could not be ended yet");
        }
    }

    /// Returns the sandboxes of forks that a killed manager did not come to finish.
    pub(super) async fn unfinished_forks(&self) -> Result<BTreeSet<SandboxId>> {
        let stores = self.stores();
        blocking(move || {
            let mut ids = BTreeSet::new();
            for layers in &stores {
                for fork in Records::of(layers, FORKS).list::<Fork>()? {
                    ids.extend(fork.sandboxes);
                }
            }
            Ok(ids)
        })
        .await
    }

    /// Forgets them, once none of their sandboxes is left.
    pub(super) async fn forget_forks(&self) -> Result<()> {
        let stores = self.stores();
        blocking(move || stores.iter().try_for_each(|layers| Records::of(layers, FORKS).clear()))
            .await
    }

    /// Forgets snapshots whose time is up, and removes layers that nothing stands on.
    pub(super) async fn collect(&self) {
        let stores = self.stores();
        if stores.is_empty() {
            return;
        }
        let (living, stands_on) = {
            let registry = self.registry();
            let here = registry.sandboxes.iter().map(|(id, entry)| (id, &*entry.base));
            let rest = &registry.unreachable;
            let rest = rest.iter().map(|(id, rest)| (id, &rest.record.base));
            let (ids, bases): (BTreeSet<SandboxId>, Vec<Base>) =
                here.chain(rest).map(|(id, base)| (id.clone(), base.clone())).unzip();
            (ids, bases)
        };
        let collected = blocking(move || {
            let mut total = 0;
            for layers in &stores {
                Snapshots::of(layers).expire(|id| living.contains(id))?;
                let known = stands_on.iter().flat_map(Base::all).cloned();
                total += layers.collect_unnamed(known)?.layers;
            }
            Ok(total)
        });
        match collected.await {
            Ok(0) => {}
            Ok(layers) => info!(layers, "removed layers that nothing stands on"),
            Err(error) => warn!(%error, "layers could not be collected"),
        }
    }

    /// Makes a savepoint of a session's sandbox, without a name.
    pub(super) async fn savepoint(self: &Arc<Self>, session: &SandboxSession) -> Result<Snapshot> {
        let kind = SnapshotKind::Savepoint;
        self.snapshot(session, &SnapshotOptions { kind, ..SnapshotOptions::default() }).await
    }

    /// Hands out what a fork made.
    pub(super) fn hand_out(
        self: &Arc<Self>,
        made: Vec<Joined>,
    ) -> Vec<(SandboxSession, Arc<dyn Sandbox>)> {
        let out = made.into_iter().map(|Joined { session, handle, promise }| {
            promise.keep();
            let sandbox = self.guard(handle, Some(session.session_id.clone()));
            (session, sandbox)
        });
        out.collect()
    }
}

/// What the sandboxes of a fork are made from.
struct Ground {
    backend: usize,
    layers: Layers,
    spec: SandboxSpec,
    base: Base,
    /// How much of what it may reach it does.
    reach: Reach,
    held: Held,
}

fn check_count(options: &ForkOptions) -> Result<()> {
    if (1..=MAX_FORK).contains(&options.count) {
        return Ok(());
    }
    let reason = format!("{} is not between 1 and {MAX_FORK}", options.count);
    Err(SandboxError::invalid("count", reason, "fork into at least one sandbox"))
}
