//! One container: its bundle, the process of ours that guards it, and what its runtime is asked to do with it.
//!
//! The guard (`warren_init::stage`) holds a lock in the bundle as long as it lives and removes the bundle last of all. So
//! whoever waits for the end of a container looks at both, whether or not it is the one who made it.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use warren_init::plan::{self, Cgroups, LOCK_FILE, OWN_PLACE, OWN_PROC, OWN_PROGRAM, Plan, STAGE};
use warren_init::plan::{Entry, EntryKind, OWN_GROUPS, Owner, Walls};
use warren_init::protocol;
use warren_sys::cgroup::Layout;
use warren_sys::{fd, socket};

use super::config::{self, LEAST_MEMORY, LEAST_PROCESSES};
use super::runtime::Runtime;
use crate::backend::linux::groups;
use crate::backend::linux::limits::Setting;
use crate::backend::linux::sandbox::Wanted;
use crate::{Result, SandboxError, SandboxId};

/// Where the containers are that end with their maker.
pub(super) const PLACE: &str = "/run/warren/oci";
/// The directory of one that outlives its maker, in that of the sandbox.
const BELOW_HOME: &str = "oci";
/// The file of a bundle that says which runtime made it.
pub(super) const RUNTIME_FILE: &str = "runtime";
/// How long a container may take to be gone after its first process is.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is looked at meanwhile.
const INTERVAL: Duration = Duration::from_millis(2);

/// One container.
#[derive(Debug)]
pub(crate) struct Container {
    runtime: Arc<Runtime>,
    id: SandboxId,
    bundle: PathBuf,
    paused: AtomicBool,
    /// Whether nothing of it was left. Its bundle may be another's since then, of the same sandbox made anew.
    gone: AtomicBool,
    /// The guard, if it is a child of ours.
    guard: Mutex<Option<Child>>,
    /// Without it the guard ends what is not to outlive us.
    line: Option<OwnedFd>,
}

/// Gives the runtime itself, which is in the same control group for a moment, room to start.
pub(crate) fn room_to_start(setting: &Setting) -> Setting {
    let least = match setting.file {
        "pids.max" => LEAST_PROCESSES,
        "memory.max" | "memory.limit_in_bytes" | "memory.memsw.limit_in_bytes" => LEAST_MEMORY,
        _ => 0,
    };
    let value = match setting.value.parse::<u64>() {
        Ok(value) if value < least => least.to_string(),
        _ => setting.value.clone(),
    };
    Setting { value, ..setting.clone() }
}

impl Container {
    /// Names the container of a sandbox that was made before.
    pub(crate) fn of(runtime: &Arc<Runtime>, id: &SandboxId, homes: Option<&Path>) -> Self {
        let below_home = homes.map(|homes| homes.join(id.as_str()).join(BELOW_HOME));
        let bundle = below_home.filter(|bundle| bundle.exists());
        let bundle = bundle.unwrap_or_else(|| Path::new(PLACE).join(id.as_str()));
        Self::at(runtime, id, bundle)
    }

    pub(super) fn at(runtime: &Arc<Runtime>, id: &SandboxId, bundle: PathBuf) -> Self {
        Self {
            runtime: runtime.clone(),
            id: id.clone(),
            bundle,
            paused: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            guard: Mutex::default(),
            line: None,
        }
    }

    /// Writes the bundle and has a guard start it; what becomes of it is said on `control`.
    pub(crate) fn start(
        runtime: &Arc<Runtime>,
        wanted: &Wanted<'_>,
        control: OwnedFd,
        listener: Option<OwnedFd>,
        home: Option<&Path>,
    ) -> Result<Self> {
        let bundle = match home {
            Some(home) => home.join(BELOW_HOME),
            None => Path::new(PLACE).join(wanted.id.as_str()),
        };
        let made = (|| {
            if let Some(parent) = bundle.parent() {
                DirBuilder::new().recursive(true).mode(0o711).create(parent)?;
            }
            DirBuilder::new().mode(0o700).create(&bundle)
        })();
        made.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                SandboxError::AlreadyExists { what: "sandbox", id: wanted.id.to_string() }
            }
            _ => SandboxError::step("create", &bundle, error),
        })?;
        let started = Self::start_in(runtime, wanted, control, listener, &bundle);
        if started.is_err() {
            // There is no guard that could.
            let _ = fs::remove_dir_all(&bundle);
        }
        started
    }

    fn start_in(
        runtime: &Arc<Runtime>,
        wanted: &Wanted<'_>,
        control: OwnedFd,
        listener: Option<OwnedFd>,
        bundle: &Path,
    ) -> Result<Self> {
        let failed = |step: &str| {
            let step = step.to_owned();
            move |source| SandboxError::Step { step, path: None, source }
        };
        let first = std::process::id().wrapping_mul(31).wrapping_add(runtime.next());
        let (lock, base) =
            warren_init::launcher::reserve_ids(first).map_err(failed("reserve ids"))?;
        let plan = contained(wanted.plan);
        let layout = Layout::detect().map_err(failed("read the host's control groups"))?;
        let group = runtime.group(wanted.id, &plan.cgroups, &layout);
        let config = config::config(&config::Inputs {
            runtime: runtime.kind(),
            plan: &plan,
            base,
            seccomp: wanted.seccomp,
            limits: wanted.limits,
            cpu_quota_millis: wanted.cpu_quota_millis,
            group: group.as_deref(),
        });
        let write = |name: &str, contents: String| {
            let path = bundle.join(name);
            fs::write(&path, contents).map_err(|error| SandboxError::step("write", path, error))
        };
        write("config.json", config.to_string())?;
        write(RUNTIME_FILE, runtime.name().to_owned())?;
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let job = plan::Container {
            groups: all_groups(wanted.id, &plan.cgroups, &layout),
            plan,
            base,
            bundle: text(bundle),
            start: runtime.start(wanted.id, bundle),
            delete: runtime.delete(wanted.id, bundle),
            hidden: runtime.hidden(&layout),
            join: group.is_none(),
            patience_ms: wanted.patience.as_millis().try_into().unwrap_or(u64::MAX),
        };
        let (line, child) = start_guard().map_err(failed("start the guard of a container"))?;
        let mut container = Self::at(runtime, wanted.id, bundle.to_owned());
        (container.guard, container.line) = (Mutex::new(Some(child)), Some(line));
        let lock = OwnedFd::from(lock);
        let fds = [Some(&control), Some(&lock), listener.as_ref()];
        let fds: Vec<_> = fds.into_iter().flatten().map(AsFd::as_fd).collect();
        let line = container.line.as_ref().map(AsFd::as_fd);
        let line = line.ok_or_else(|| SandboxError::Internal { message: "no line".to_owned() })?;
        protocol::send(line, &job, &fds).map_err(failed("reach the guard of a container"))?;
        Ok(container)
    }

    /// Says what it is, for people.
    pub(crate) fn describe(&self) -> String {
        self.runtime.describe()
    }

    /// Stops everything in it, where the runtime can.
    pub(crate) async fn pause(&self) -> Result<()> {
        let Some(command) = self.runtime.pause(&self.id, &self.bundle) else { return Ok(()) };
        // Said first: one that was given up half-way may be paused.
        self.paused.store(true, Ordering::Relaxed);
        self.runtime.call(command).await.map(drop)
    }

    /// Lets it go on, if it is paused.
    pub(crate) async fn resume(&self) -> Result<()> {
        let known = self.paused.load(Ordering::Relaxed);
        if !known && (self.is_ours() || !self.is_paused().await?) {
            return Ok(());
        }
        if let Some(command) = self.runtime.resume(&self.id, &self.bundle) {
            self.runtime.call(command).await?;
        }
        self.paused.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Reports whether we made it, and so know what was done with it.
    fn is_ours(&self) -> bool {
        self.line.is_some()
    }

    /// Reports whether we paused it, so that nobody inside answers.
    pub(crate) fn is_known_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Asks the runtime.
    async fn is_paused(&self) -> Result<bool> {
        if self.runtime.pause(&self.id, &self.bundle).is_none() {
            return Ok(false);
        }
        let said = self.runtime.call(self.runtime.state(&self.id, &self.bundle)).await?;
        let status = super::runtime::status(&said);
        status.map(|status| status == "paused").ok_or_else(|| SandboxError::Internal {
            message: format!("{} said something else than a state", self.runtime.name()),
        })
    }

    /// Lets one that is paused go on, so that it can die.
    pub(crate) async fn thaw(&self) {
        // What cannot be asked for any more is gone.
        let _ = self.resume().await;
    }

    /// Likewise, without waiting for anybody else.
    pub(crate) fn thaw_now(&self) {
        if !self.paused.swap(false, Ordering::Relaxed) {
            return;
        }
        if let Some(command) = self.runtime.resume(&self.id, &self.bundle) {
            let _ = Runtime::command(&command).status();
        }
    }

    /// Waits so long until nothing of it is left; its first process must be gone.
    pub(crate) async fn gone(&self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        while self.is_guarded() {
            if Instant::now() >= deadline {
                let what = format!("removing the container by {}", self.runtime.name());
                return Err(SandboxError::Timeout { what, after: PATIENCE });
            }
            tokio::time::sleep(INTERVAL).await;
        }
        self.reap();
        if self.bundle.exists() {
            // Its guard was killed: what it would have done is ours to do.
            let _ = self.runtime.call(self.runtime.delete(&self.id, &self.bundle)).await;
            self.forget()?;
        }
        self.gone.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Likewise, without waiting for anybody else.
    pub(crate) fn gone_now(&self) {
        if self.gone.load(Ordering::Relaxed) {
            return;
        }
        let deadline = Instant::now() + PATIENCE;
        while self.is_guarded() && Instant::now() < deadline {
            std::thread::sleep(INTERVAL);
        }
        self.reap();
        if self.bundle.exists() && !self.is_guarded() {
            let _ = Runtime::command(&self.runtime.delete(&self.id, &self.bundle)).status();
            let _ = self.forget();
        }
    }

    /// Ends it, whatever is left of it.
    pub(crate) async fn remove(&self) -> Result<()> {
        if !self.bundle.exists() {
            return Ok(());
        }
        // One that is not there is as good.
        let _ = self.runtime.call(self.runtime.delete(&self.id, &self.bundle)).await;
        self.gone(PATIENCE).await
    }

    /// Removes what is left of one that nobody guards.
    fn forget(&self) -> Result<()> {
        if let Ok(layout) = Layout::detect() {
            for group in all_groups(&self.id, &Cgroups::default(), &layout) {
                let _ = warren_sys::cgroup::remove(Path::new(&group), PATIENCE);
            }
        }
        match fs::remove_dir_all(&self.bundle) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(SandboxError::step("remove", &self.bundle, error))
            }
            _ => Ok(()),
        }
    }

    /// Reports whether somebody sees to its end.
    pub(super) fn is_guarded(&self) -> bool {
        let Ok(file) = File::options().write(true).open(self.bundle.join(LOCK_FILE)) else {
            // Not made yet, or removed with the rest.
            return self.bundle.exists() && self.runs();
        };
        !fd::try_lock_byte(&file, 0).unwrap_or(true)
    }

    /// Reports whether a guard of ours runs.
    fn runs(&self) -> bool {
        let mut guard = self.guard.lock().unwrap_or_else(PoisonError::into_inner);
        guard.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Waits for the last step of a guard of ours, which has let go of everything.
    fn reap(&self) {
        let guard = self.guard.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut child) = guard {
            let _ = child.wait();
        }
    }

    /// Opens what is written to it, by the mounts of its guard.
    pub(crate) fn scratch(&self) -> Result<OwnedFd> {
        let path = self.bundle.join(LOCK_FILE);
        let guard = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse::<i32>().ok());
        let failed = |error| SandboxError::step("open the scratch by", &path, error);
        let guard = guard.ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))?;
        if !self.is_guarded() {
            return Err(failed(io::ErrorKind::NotFound.into()));
        }
        // Its number is its own as long as it holds the lock, which was just asked.
        let scratch = File::open(format!("/proc/{guard}/root{STAGE}")).map_err(failed)?;
        Ok(scratch.into())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // The guard sees the end of its line, or goes on without us; either way it is ours to reap.
        self.line = None;
        let guard = self.guard.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut child) = guard
            && matches!(child.try_wait(), Ok(None))
        {
            let wait = move || drop(child.wait());
            let _ = std::thread::Builder::new().name("warren-reap".to_owned()).spawn(wait);
        }
    }
}

/// Adds to a plan what a container needs to begin.
fn contained(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    let entry = |path: &str, kind| Entry { path: path.to_owned(), kind, owner: Owner::System };
    plan.skeleton.extend([
        entry(OWN_PLACE, EntryKind::Directory(0o700)),
        entry(OWN_PROC, EntryKind::Directory(0o555)),
        entry(OWN_PROGRAM, EntryKind::File(Vec::new())),
    ]);
    if plan.walls == Walls::OwnKernel {
        plan.skeleton.extend(OWN_GROUPS.map(|path| entry(path, EntryKind::Directory(0o700))));
    }
    plan
}

/// Lists every control group that a container may have.
fn all_groups(id: &SandboxId, planned: &Cgroups, layout: &Layout) -> Vec<String> {
    let name = groups::name(id);
    let own = layout.v1.iter().map(|(_, hierarchy)| hierarchy.own.join(&name));
    let v2 = layout.v2.iter().flat_map(|v2| [v2.own.join(&name), v2.mount.join(&name)]);
    let mut all: Vec<String> = planned.v2.iter().chain(&planned.v1).cloned().collect();
    all.extend(own.chain(v2).map(|path| path.to_string_lossy().into_owned()));
    all.sort();
    all.dedup();
    all
}

/// Starts the process that makes a container and guards it.
fn start_guard() -> io::Result<(OwnedFd, Child)> {
    let image = fd::sealed("warren-init", warren_init::IMAGE)?;
    let (ours, theirs) = socket::pair()?;
    let child = Command::new(format!("/proc/self/fd/{}", image.as_raw_fd()))
        .arg("stage")
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    Ok((ours, child))
}
