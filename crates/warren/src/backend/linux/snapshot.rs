//! Saving what a sandbox wrote, and going back to what was saved.
//!
//! What is written is on a filesystem in memory that nothing but the sandbox has mounted; its init
//! hands out a descriptor of it. The sandbox stands still while what is new there is copied, and goes
//! on before that is digested. To go back is to end the sandbox and to make it anew, in the same place,
//! on other layers.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use rustix::fs::{Mode, OFlags};
use warren_init::plan::{self as init_plan, Lifetime};
use warren_init::protocol::{Done, Request};

use super::Kind;
use super::anchor::Home;
use super::groups::Groups;
use super::sandbox::{Instance, LinuxSandbox, State, lost};
use super::{limits, plan};
use crate::layers::capture::{self, Captured, Failure, Node, Previous, Source};
use crate::layers::diff::{self, Stack, Tree};
use crate::layers::tree::{self, Ids};
use crate::layers::{Below, Held, Layers, Staging};
use crate::snapshot::Snapshots;
use crate::{
    Base, Capture, DiffEntry, DiffOptions, LayerId, MAX_LAYERS, Reach, Result, SandboxError,
    SnapshotOptions,
};

/// How many layers a chain of snapshots may have before everything is copied once more.
const MAX_CHAIN: usize = 16;
/// The magic number of tmpfs. See statfs(2).
const TMPFS: u32 = 0x0102_1994;

/// What was captured of a sandbox since it was made.
#[derive(Debug)]
pub(crate) struct Tracked {
    /// What the tree was like.
    root: Node,
    /// The layers that hold it, oldest first.
    layers: Vec<LayerId>,
}

/// Lets a sandbox go on that stands still for a capture, whatever becomes of that.
struct Pause {
    instance: Arc<Instance>,
    since: Instant,
    ours: bool,
}

impl Drop for Pause {
    fn drop(&mut self) {
        if self.ours {
            self.instance.go_on();
        }
    }
}

impl LinuxSandbox {
    fn layers(&self) -> Result<Layers> {
        if self.has_ended() {
            return Err(self.ended());
        }
        let backend = self.core.backend.upgrade().ok_or_else(|| self.ended())?;
        backend.layers.clone().ok_or_else(|| SandboxError::Unsupported {
            feature: "snapshots".to_owned(),
            backend: backend.kind.name().to_owned(),
            hint: match backend.kind {
                Kind::Namespaces | Kind::Containers(_) => {
                    "give the backend a directory to keep layers in"
                }
                Kind::Rules { .. } => "copy out what is needed, or use the `linux` backend",
            }
            .to_owned(),
        })
    }

    /// Saves it under a name, for whoever has the backend alone.
    pub(super) async fn take_snapshot(&self, name: &str) -> Result<String> {
        let options = SnapshotOptions { name: name.to_owned(), ..SnapshotOptions::default() };
        options.validate()?;
        let snapshots = Snapshots::of(&self.layers()?);
        let reserved = snapshots.reserve(None, name)?;
        let capture = self.capture_layers().await?;
        let spec = self.terms.spec.clone();
        Ok(reserved.put(&self.core.id, spec, &capture, options)?.id.0)
    }

    /// Goes back to what was saved, by its id or its name.
    pub(super) async fn restore_snapshot(&self, id: &str) -> Result<()> {
        let snapshots = Snapshots::of(&self.layers()?);
        let snapshot = snapshots.find(None, id)?;
        self.stand_anew(&snapshot.base).await
    }

    /// Makes layers of what it wrote.
    pub(super) async fn capture_layers(&self) -> Result<Capture> {
        let layers = self.layers()?;
        let state = self.core.state.lock().await;
        if *state == State::Destroyed || self.has_ended() {
            return Err(self.ended());
        }
        let instance = self.core.instance();
        let base = instance.base_layers.clone();
        let ids = instance.base.map_or_else(Ids::of_layers, Ids::From);
        let overlays = instance.overlays();
        let tracked = self.core.tracked.lock().unwrap_or_else(PoisonError::into_inner).take();
        let scratch = self.scratch(&instance).await?;
        let pause = self.pause(&instance, *state).await?;
        // Asked while it stands still: nothing is there then that could come and go.
        let idle = instance.is_idle().await;
        let work = move || {
            let copied = copy(&layers, &scratch, &base, &overlays, ids, tracked, idle);
            let paused = pause.since.elapsed();
            drop(pause);
            let Copied { staging, tracked, mut held } = copied?;
            let mut new_bytes = 0;
            let mut tracked = tracked;
            if let Some(staging) = staging {
                let (id, kept) = staging.commit()?;
                new_bytes = layers.info(&id)?.bytes;
                held.join(kept);
                tracked.layers.push(id);
            }
            held.join(layers.hold(base.all())?);
            let mut changes = base.changes.clone();
            if base.layers.len() + changes.len() + tracked.layers.len() > MAX_LAYERS {
                // The kernel stacks no more: what was written before becomes one layer, for those that come.
                let (merged, kept) = layers.merge(&changes, Below::Something)?;
                held.join(kept);
                changes = merged;
            }
            changes.extend(tracked.layers.iter().cloned());
            let base = Base { changes, ..base };
            Ok((Capture { base, new_bytes, paused, held }, tracked))
        };
        let done = tokio::task::spawn_blocking(work).await;
        let done = done.map_err(|error| SandboxError::Internal { message: error.to_string() })?;
        let (capture, tracked) = done.map_err(|error| self.explain(error))?;
        *self.core.tracked.lock().unwrap_or_else(PoisonError::into_inner) = Some(tracked);
        drop(state);
        Ok(capture)
    }

    /// Compares what it is with what it was.
    pub(super) async fn compare(
        &self,
        since: Option<&Base>,
        options: &DiffOptions,
    ) -> Result<Vec<DiffEntry>> {
        let layers = self.layers()?;
        let state = self.core.state.lock().await;
        if *state == State::Destroyed || self.has_ended() {
            return Err(self.ended());
        }
        let instance = self.core.instance();
        let base = instance.base_layers.clone();
        let since = since.unwrap_or(&base).clone();
        // What is compared with is not to go meanwhile.
        let held = layers.hold(since.all())?;
        let ids = instance.base.map_or_else(Ids::of_layers, Ids::From);
        let (overlays, options) = (instance.overlays(), options.clone());
        let scratch = self.scratch(&instance).await?;
        let pause = self.pause(&instance, *state).await?;
        let work = move || {
            let _until_then = (pause, held);
            let failed = |error: io::Error| match error.kind() {
                io::ErrorKind::FileTooLarge => SandboxError::TooLarge {
                    what: "what differs, to be digested,".to_owned(),
                    limit: diff::MAX_DIGESTED,
                },
                _ => lost("compare what the sandbox wrote", error),
            };
            let before = stack(&layers, &scratch, &since, &overlays, ids).map_err(failed)?;
            let mut after = stack(&layers, &scratch, &base, &overlays, ids).map_err(failed)?;
            let written = sources(&scratch, &base, &overlays).map_err(failed)?;
            let written = written.into_iter().map(|source| {
                let tag = format!("written {:?}", source.at);
                let Source { dir, at, whole } = source;
                std::rc::Rc::new(Tree { tag, dir, at, whole, ids })
            });
            after.0.splice(0..0, written);
            diff::diff(&before, &after, &options).map_err(failed)
        };
        let done = tokio::task::spawn_blocking(work).await;
        drop(state);
        done.map_err(|error| SandboxError::Internal { message: error.to_string() })?
    }

    /// Has init hand out the filesystem of what is written. It may be an attacker who answers.
    async fn scratch(&self, instance: &Instance) -> Result<OwnedFd> {
        // Of a container we have it ourselves: one that is paused answers nobody.
        if let Some(scratch) = &instance.scratch {
            return scratch.try_clone().map_err(|error| lost("open the scratch", error));
        }
        let answer = instance.ask_for(&Request::Scratch).await;
        let answer = match answer {
            // Whoever does not answer may be about to end.
            Ok(None) | Err(_) if instance.ends_soon().await => return Err(self.ended()),
            other => other.map_err(|error| lost("reach init", error))?,
        };
        let Some((Done(0), fds)) = answer else {
            return Err(SandboxError::Unsupported {
                feature: "snapshots of a sandbox this old".to_owned(),
                backend: self.terms.capabilities.backend.clone(),
                hint: "make a new sandbox".to_owned(),
            });
        };
        let scratch = fds.into_iter().next();
        let is_tmpfs = |fd: &OwnedFd| {
            rustix::fs::fstatfs(fd).is_ok_and(|fs| u32::try_from(fs.f_type) == Ok(TMPFS))
        };
        scratch.filter(is_tmpfs).ok_or_else(|| SandboxError::Internal {
            message: "init handed out something else than was asked".to_owned(),
        })
    }

    async fn pause(&self, instance: &Arc<Instance>, state: State) -> Result<Pause> {
        let since = Instant::now();
        if state == State::Suspended {
            return Ok(Pause { instance: Arc::clone(instance), since, ours: false });
        }
        let pause = Pause { instance: Arc::clone(instance), since, ours: true };
        match instance.freeze(true).await {
            Ok(Some(Done(0))) => Ok(pause),
            Ok(Some(Done(errno))) => Err(lost("stop", io::Error::from_raw_os_error(errno))),
            Ok(None) => Err(self.ended()),
            Err(_) if instance.ends_soon().await => Err(self.ended()),
            Err(error) => Err(lost("stop the sandbox", error)),
        }
    }

    /// Ends all that runs and makes the sandbox anew, on another ground.
    pub(super) async fn stand_anew(&self, base: &Base) -> Result<()> {
        base.validate()?;
        let backend = self.core.backend.upgrade().ok_or_else(|| self.ended())?;
        let held = self.layers()?.hold(base.all())?;
        let mut state = self.core.state.lock().await;
        if *state == State::Destroyed {
            return Err(self.ended());
        }
        let old = self.core.instance();
        let spec = self.current().terms.spec.clone();
        let (profile, seccomp) = super::profiles(&spec)?;
        let support = &backend.host.groups;
        let quota = old.cpu_quota_millis;
        let writable = super::binds_writable(&spec);
        let limits = limits::decide(&spec.limits, quota, &Default::default(), support, writable)?;
        let persistent = old.home.is_some();
        let mut inputs = plan::Inputs {
            backend: backend.kind.name(),
            id: &self.core.id,
            spec: &spec,
            profile,
            seccomp,
            privilege: backend.host.privilege,
            lifetime: if persistent { Lifetime::Detached } else { Lifetime::Attached },
            limits: &limits,
            cgroups: Default::default(),
            base,
            layers: backend.layers.as_ref(),
        };
        // Decided before anything is ended, so that what cannot be leaves all as it is.
        let mut plan = plan::plan(&inputs, &plan::RealHost)?;
        let egress = backend.policy_left(&self.core.id, &spec);
        if let Some(new) = &egress {
            new.set_reach(old.policy().map_or_else(Reach::nothing, |old| old.reach()));
        }
        plan.egress = egress.as_ref().map(|policy| policy.plan());
        if self.core.support.own_kernel {
            plan.walls = init_plan::Walls::OwnKernel;
        }
        std::mem::take(&mut *self.transfers()).cancel();
        *self.core.tracked.lock().unwrap_or_else(PoisonError::into_inner) = None;
        old.end().await?;
        *state = State::Destroyed;
        let make = async {
            let wanted = Groups::wanted(&self.core.id, support, &limits.settings);
            let guard = backend.launcher.guard(wanted, None)?;
            let settings = backend.launcher.at_first(&limits.settings);
            let groups = Groups::begin(&self.core.id, support, &settings, guard)?;
            inputs.cgroups = groups.planned();
            plan.cgroups = groups.planned();
            let runtime = backend.runtime.as_ref().filter(|_| persistent);
            let home = runtime.map(|runtime| Home::listen_again(runtime, &self.core.id));
            let wanted = super::sandbox::Wanted {
                id: &self.core.id,
                plan: &plan,
                egress: egress.as_ref(),
                seccomp,
                limits: &spec.limits,
                settings: &limits.settings,
                cpu_quota_millis: quota,
                patience: spec.creation_timeout,
            };
            let home = home.transpose()?;
            let launch = super::sandbox::launch(&backend.launcher, wanted, groups, home, None);
            let made = tokio::time::timeout(spec.creation_timeout, launch).await;
            made.unwrap_or_else(|_| {
                let what = "making the sandbox anew".to_owned();
                Err(SandboxError::Timeout { what, after: spec.creation_timeout })
            })
        };
        let mut instance = match make.await {
            Ok((instance, _)) => instance,
            Err(error) => {
                // What it was is gone, and what it should be is not there: it has ended.
                if let Some(home) = &old.home {
                    home.remove();
                }
                return Err(error);
            }
        };
        if let (Some(new), Some(old)) = (&egress, old.policy()) {
            new.barred.go_on_from(&old.barred);
        }
        instance.stand_on(base.clone(), Some(held), plan.overlays.clone());
        self.replace(&inputs, &plan, instance);
        *state = State::Running;
        Ok(())
    }
}

/// What was copied while the sandbox stood still.
struct Copied {
    /// The new layer, unless there is nothing new.
    staging: Option<Staging>,
    tracked: Tracked,
    held: Held,
}

fn copy(
    layers: &Layers,
    scratch: &OwnedFd,
    base: &Base,
    overlays: &[init_plan::Overlay],
    ids: Ids,
    tracked: Option<Tracked>,
    idle: bool,
) -> Result<Copied> {
    let failed = |error: io::Error| lost("open what the sandbox wrote", error);
    let sources = sources(scratch, base, overlays).map_err(failed)?;
    // All that was written before can be two layers.
    let before = base.layers.len() + base.changes.len().min(2);
    let room = MAX_LAYERS.saturating_sub(before).min(MAX_CHAIN);
    if room == 0 {
        return Err(SandboxError::Conflict {
            action: "take a snapshot".to_owned(),
            reason: format!("the sandbox stands on {MAX_LAYERS} layers already"),
        });
    }
    // What was captured before is of use as long as it is there, and if one more fits on top.
    let before = tracked.and_then(|tracked| {
        let held = layers.hold(&tracked.layers).ok()?;
        let dirs = tracked.layers.iter().map(|id| tree::open_root(&layers.path(id)));
        let dirs = dirs.collect::<io::Result<Vec<_>>>().ok()?;
        (tracked.layers.len() < room).then_some((tracked, held, dirs))
    });
    if let Some((tracked, held, dirs)) = before {
        let staging = layers.begin()?;
        let previous = Previous { root: &tracked.root, layers: dirs };
        match capture::capture(&sources, ids, staging.tree(), Some(&previous), idle) {
            Ok(Captured { root, changed }) => {
                let tracked = Tracked { root, layers: tracked.layers };
                return Ok(Copied { staging: changed.then_some(staging), tracked, held });
            }
            Err(Failure::NeedsAll) => {}
            Err(Failure::At(path, error)) => return Err(cannot_copy(path, error)),
        }
    }
    let staging = layers.begin()?;
    match capture::capture(&sources, ids, staging.tree(), None, idle) {
        Ok(Captured { root, .. }) => Ok(Copied {
            staging: Some(staging),
            tracked: Tracked { root, layers: Vec::new() },
            held: Held::default(),
        }),
        Err(Failure::NeedsAll) => {
            Err(SandboxError::Internal { message: "there is nothing to compare with".to_owned() })
        }
        Err(Failure::At(path, error)) => Err(cannot_copy(path, error)),
    }
}

/// Opens the trees that a root stands on, the highest first.
fn stack(
    layers: &Layers,
    scratch: &OwnedFd,
    base: &Base,
    overlays: &[init_plan::Overlay],
    ids: Ids,
) -> io::Result<Stack> {
    let mut trees = Vec::new();
    let root = |tag: String, dir: OwnedFd, ids: Ids| {
        std::rc::Rc::new(Tree { tag, dir, at: Vec::new(), whole: false, ids })
    };
    let layer = |id: &LayerId| {
        io::Result::Ok(root(id.to_string(), tree::open_root(&layers.path(id))?, Ids::of_layers()))
    };
    for id in base.changes.iter().rev() {
        trees.push(layer(id)?);
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let skeleton = rustix::fs::openat(scratch, init_plan::LOWER, flags, Mode::empty())?;
    trees.push(root("skeleton".to_owned(), skeleton, ids));
    for id in base.layers.iter().rev() {
        trees.push(layer(id)?);
    }
    for overlay in overlays {
        let dir = tree::open_root(std::path::Path::new(&overlay.source))?;
        let names = overlay.target.split('/').filter(|name| !name.is_empty());
        let at = names.map(CString::new).collect::<Result<Vec<_>, _>>()?;
        let tag = format!("host {}", overlay.source);
        trees.push(std::rc::Rc::new(Tree { tag, dir, at, whole: false, ids: Ids::Same }));
    }
    Ok(Stack(trees))
}

fn cannot_copy(path: Vec<u8>, error: io::Error) -> SandboxError {
    let path = PathBuf::from("/").join(std::ffi::OsString::from_vec(path));
    SandboxError::keeping("save", Some(path), error)
}

/// Opens the trees of what a sandbox writes to.
pub(super) fn sources(
    scratch: &OwnedFd,
    base: &Base,
    overlays: &[init_plan::Overlay],
) -> io::Result<Vec<Source>> {
    let open = |name: &str| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(scratch, name, flags, Mode::empty())
    };
    let names = |path: &str| {
        let names = path.split('/').filter(|name| !name.is_empty());
        names.map(CString::new).collect::<Result<Vec<_>, _>>()
    };
    let mut sources = vec![Source { dir: open(init_plan::UPPER)?, at: Vec::new(), whole: false }];
    if base.changes.is_empty() {
        let (dir, at) = (open(init_plan::TMP)?, vec![c"tmp".to_owned()]);
        sources.push(Source { dir, at, whole: true });
    }
    for (index, overlay) in overlays.iter().enumerate() {
        let dir = open(&init_plan::overlay_upper(index))?;
        sources.push(Source { dir, at: names(&overlay.target)?, whole: false });
    }
    Ok(sources)
}
