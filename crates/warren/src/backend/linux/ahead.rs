//! The next sandbox, begun before anybody asks for it.
//!
//! Most of what it takes to make a sandbox is the same whatever its spec says: ids, namespaces, control
//! groups, a root and what is mounted in it. After one was made the next is begun, for the same profile,
//! and waits. Whoever asks then gets that one, with the limits, rules and filters of its own spec; unless
//! it wants something of the host bound, or stands on layers. Nobody has run in it before.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::task::TaskTracker;
use warren_init::plan::{Lifetime, Plan};

use super::anchor::Home;
use super::groups::Groups;
use super::limits::{self, Setting};
use super::plan::{Inputs, RealHost};
use super::sandbox::{self, Instance, Wanted};
use super::{LinuxBackend, profiles, trial};
use crate::{Base, CreateOptions, Result, SandboxError, SandboxId, SandboxSpec};

/// How long nothing may have been made before the next is begun. What was made is used first, and who makes one
/// after the other does not have the next made beside them.
const PAUSE: Duration = Duration::from_millis(20);

/// Where the next sandbox is.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    slot: Mutex<Slot>,
    /// How many sandboxes were made.
    made: AtomicU64,
    /// What got through when the last was begun. Not all of that is tried of one that somebody waits for, so that none is made
    /// until it holds.
    open: Mutex<Option<Vec<String>>>,
    tasks: TaskTracker,
}

#[derive(Debug, Default)]
enum Slot {
    /// Nobody wants any.
    #[default]
    Off,
    Empty,
    Making(SandboxId),
    Ready(Box<Begun>),
}

/// How many others are made in a row before the one that waits gives way to another of their kind.
const PATIENCE: u32 = 2;

/// What a sandbox had that the next may have as well.
#[derive(Clone, Debug)]
pub(super) struct Like {
    pub(super) profile: String,
    pub(super) workdir: PathBuf,
    /// Only whose control groups there are, and not what they are to hold.
    pub(super) settings: Vec<Setting>,
}

/// A sandbox that waits for the rest of its plan. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Begun {
    id: SandboxId,
    profile: String,
    workdir: PathBuf,
    /// How many sandboxes that it could not become were made since.
    passed_over: u32,
    plan: Plan,
    /// Which files of the host it shows: should another be there by now, it shows the wrong one.
    seen: Vec<Option<(u64, u64)>>,
    pub(super) instance: Instance,
}

impl Begun {
    fn is_like(&self, profile: &str, workdir: &Path) -> bool {
        self.profile == profile && self.workdir == workdir
    }

    /// Reports whether it can become what a plan says, in these control groups. It may have been waiting for days: somebody
    /// may have killed it, or replaced what it shows.
    pub(super) fn becomes(&self, plan: &Plan, groups: &[PathBuf]) -> bool {
        let planned = &self.plan.cgroups;
        let own = planned.v2.iter().chain(&planned.v1).map(PathBuf::from);
        own.eq(groups.iter().cloned())
            && plan.completes(&self.plan)
            && !self.instance.has_ended()
            && self.seen == see(sources(&self.plan))
    }

    /// Returns what it was begun by.
    pub(super) fn plan(&self) -> &Plan {
        &self.plan
    }
}

fn sources(plan: &Plan) -> impl Iterator<Item = &str> {
    let overlays = plan.overlays.iter().map(|overlay| overlay.source.as_str());
    plan.mounts.iter().map(|mount| mount.source.as_str()).chain(overlays)
}

/// Says which files are at these paths, links followed.
fn see<'a>(paths: impl Iterator<Item = &'a str>) -> Vec<Option<(u64, u64)>> {
    let number = |path| std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    paths.map(number).collect()
}

/// Reports whether what every sandbox has is all that this one has of the host.
fn is_plain(spec: &SandboxSpec, base: &Base) -> bool {
    base.is_plain()
        && spec.allowed_paths_ro.is_empty()
        && spec.allowed_paths_rw.is_empty()
        && spec.bind_mounts.is_empty()
        && !crate::egress::is_asked(spec)
}

impl Ahead {
    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has sandboxes begun ahead from now on.
    pub(super) fn turn_on(&self) {
        *self.slot() = Slot::Empty;
    }

    /// Returns the id of the one that waits, or is being made.
    pub(super) fn id(&self) -> Option<SandboxId> {
        match &*self.slot() {
            Slot::Off | Slot::Empty => None,
            Slot::Making(id) => Some(id.clone()),
            Slot::Ready(begun) => Some(begun.id.clone()),
        }
    }

    /// Returns the id of the one that waits, if it can become what a spec says.
    pub(super) fn next_id(&self, spec: &SandboxSpec, base: &Base) -> Option<SandboxId> {
        match &*self.slot() {
            Slot::Ready(begun)
                if begun.is_like(&spec.profile, &spec.workdir) && is_plain(spec, base) =>
            {
                Some(begun.id.clone())
            }
            Slot::Off | Slot::Empty | Slot::Making(_) | Slot::Ready(_) => None,
        }
    }

    /// Takes the one of this id.
    pub(super) fn take(&self, id: &SandboxId) -> Option<Box<Begun>> {
        let mut slot = self.slot();
        match std::mem::take(&mut *slot) {
            Slot::Ready(begun) if begun.id == *id => {
                *slot = Slot::Empty;
                Some(begun)
            }
            other => {
                *slot = other;
                None
            }
        }
    }

    /// Takes the right to make the next, and the one that gives way to it.
    fn reserve(&self, like: &Like) -> Option<(SandboxId, Option<Box<Begun>>)> {
        let mut slot = self.slot();
        match &mut *slot {
            Slot::Empty => {}
            Slot::Ready(begun) if !begun.is_like(&like.profile, &like.workdir) => {
                begun.passed_over += 1;
                if begun.passed_over < PATIENCE {
                    return None;
                }
            }
            Slot::Off | Slot::Making(_) | Slot::Ready(_) => return None,
        }
        let id = SandboxId::new();
        let before = std::mem::replace(&mut *slot, Slot::Making(id.clone()));
        let Slot::Ready(begun) = before else { return Some((id, None)) };
        Some((id, Some(begun)))
    }

    fn put(&self, begun: Result<Begun>) {
        let (slot, open) = match begun {
            Ok(begun) => (Slot::Ready(Box::new(begun)), Some(None)),
            Err(SandboxError::WallOpen { open, .. }) => (Slot::Empty, Some(Some(open))),
            // Whoever asks next makes it all then, and is told if that cannot be.
            Err(_) => (Slot::Empty, None),
        };
        if let Some(open) = open {
            *self.open() = open;
        }
        *self.slot() = slot;
    }

    fn open(&self) -> MutexGuard<'_, Option<Vec<String>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what got through when the last was begun, if anything did.
    pub(super) fn found_open(&self) -> Option<Vec<String>> {
        self.open().clone()
    }
}

impl LinuxBackend {
    /// Has the next sandbox begun when one was made, so that whoever asks for it waits for less. It is one
    /// process more than there are sandboxes.
    #[must_use]
    pub fn beginning_ahead(self) -> Self {
        self.inner.ahead.turn_on();
        self
    }

    /// Reports whether one that was begun ahead could become this. Where sandboxes can outlive us, they do.
    pub(super) fn is_usual(&self, spec: &SandboxSpec, options: &CreateOptions) -> bool {
        options.persistent == self.inner.runtime.is_some() && is_plain(spec, &options.base)
    }

    /// Takes note that one was made, and has the next begun when there is time.
    pub(super) fn begin_next(&self, like: Like) {
        self.inner.ahead.made.fetch_add(1, Ordering::Relaxed);
        self.begin_later(like);
    }

    /// Has the next begun when there is time.
    pub(super) fn begin_later(&self, like: Like) {
        let Some((id, old)) = self.inner.ahead.reserve(&like) else { return };
        let inner = Arc::downgrade(&self.inner);
        self.inner.ahead.tasks.spawn(async move {
            let made = || Some(inner.upgrade()?.ahead.made.load(Ordering::Relaxed));
            let mut before = None;
            while made() != before {
                before = made();
                tokio::time::sleep(PAUSE).await;
            }
            let Some(inner) = inner.upgrade() else { return };
            let backend = Self { inner };
            drop(old);
            let begun = backend.begin(id, like).await;
            match &begun {
                Ok(_) => {}
                Err(SandboxError::WallOpen { open, .. }) => {
                    tracing::error!(?open, "walls do not hold on this host: no sandbox is made");
                }
                Err(error) => tracing::debug!(%error, "the next sandbox could not be begun"),
            }
            backend.inner.ahead.put(begun);
        });
    }

    async fn begin(&self, id: SandboxId, like: Like) -> Result<Begun> {
        let Like { profile, workdir, settings } = like;
        let spec = SandboxSpec { profile, workdir, ..SandboxSpec::default() };
        let (profile, seccomp) = profiles(&spec)?;
        let support = &self.inner.host.groups;
        let limits = limits::decide(&spec.limits, None, &Default::default(), support, false)?;
        let inputs = Inputs {
            backend: self.inner.kind.name(),
            id: &id,
            spec: &spec,
            profile,
            seccomp,
            privilege: self.inner.host.privilege,
            lifetime: match self.inner.runtime {
                Some(_) => Lifetime::Detached,
                None => Lifetime::Attached,
            },
            limits: &limits,
            cgroups: Default::default(),
            base: &Base::default(),
            layers: None,
        };
        let mut plan = self.plan(&inputs, &spec, &RealHost)?;
        plan.ahead = true;
        let seen = see(sources(&plan));
        let runtime = self.inner.runtime.as_deref();
        // First of all: nothing else says to the next daemon, should this one be killed, that there is more.
        let home = runtime.map(|runtime| Home::create(runtime, &id)).transpose()?;
        let groups = Groups::bare(&id, support, &settings).inspect_err(|_| {
            home.iter().for_each(|(home, _)| home.remove());
        })?;
        plan.cgroups = groups.planned();
        let wanted = Wanted {
            id: &id,
            plan: &plan,
            egress: None,
            seccomp,
            limits: &spec.limits,
            settings: &[],
            cpu_quota_millis: None,
            patience: spec.creation_timeout,
        };
        let mut instance = sandbox::begin(&self.inner.launcher, &wanted, groups, home).await?;
        trial::try_limits(&mut instance, &id, support, spec.creation_timeout).await?;
        let SandboxSpec { profile, workdir, .. } = spec;
        Ok(Begun { profile, workdir, passed_over: 0, plan, seen, instance, id })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_replaced_is_not_the_one_that_was_seen() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        let (shown, other) = (path("shown"), path("other"));
        std::fs::write(&shown, "one").unwrap();
        let seen = see([shown.as_str()].into_iter());
        std::fs::write(&shown, "changed").unwrap();
        assert_eq!(see([shown.as_str()].into_iter()), seen, "control: it is the same file");
        std::fs::write(&other, "two").unwrap();
        std::fs::rename(&other, &shown).unwrap();
        assert_ne!(see([shown.as_str()].into_iter()), seen);
        std::fs::remove_file(&shown).unwrap();
        assert_eq!(see([shown.as_str()].into_iter()), [None]);
    }

    #[test]
    fn only_what_every_sandbox_has_is_made_before_anybody_asks() {
        let plain = SandboxSpec::default();
        assert!(is_plain(&plain, &Base::default()), "control");
        let small = SandboxSpec { environment: vec![("A".into(), "b".into())], ..plain.clone() };
        assert!(is_plain(&small, &Base::default()), "what is done last may differ");
        for field in [
            |spec: &mut SandboxSpec| spec.allowed_paths_ro.push("/srv".into()),
            |spec: &mut SandboxSpec| spec.allowed_paths_rw.push("/srv".into()),
            |spec: &mut SandboxSpec| spec.bind_mounts.push(Default::default()),
        ] {
            let mut spec = plain.clone();
            field(&mut spec);
            assert!(!is_plain(&spec, &Base::default()), "{spec:?}");
        }
    }
}
