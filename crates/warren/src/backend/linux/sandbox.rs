//! One sandbox of the `linux` backend, and everything it has on the host.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Gid, Uid};
use rustix::process::{Signal, WaitId, WaitIdOptions, waitid};
use serde::de::DeserializeOwned;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use warren_init::plan::{Overlay, Plan, WORKLOAD_ID, Walls};
use warren_init::protocol::files::FileRequest;
use warren_init::protocol::{
    self, Done, Failure, Loopback, Proof, Report, Request, Standing, Word,
};
use warren_init::terminal::Terminal;

use super::anchor::{self, Anchor, Home};
use super::channel::{Channel, watch};
use super::execs::{self, Execs, Hold, Keep, LoggedExec};
use super::execution::{Execution, First, Sent, Stdio};
use super::groups::{Groups, OnDrop, Refusals};
use super::host::GroupSupport;
use super::launcher::{Launched, Launcher};
use super::limits;
use super::plan::{Inputs, WRITABLE};
use super::port;
use super::snapshot::Tracked;
use super::swap::{self, PagedOut};
use crate::backend::ExecPlan;
use crate::backend::landlock::rules;
use crate::backend::oci::Container;
use crate::egress::Policy;
use crate::egress::broker::Broker;
use crate::layers::Held;
use crate::profile::{self, Profile, ProfileUsers, Seccomp, capability_names};
use crate::receipt;
use crate::{
    BarredDestinations, Base, Capture, Command, CreateOptions, DiffEntry, DiffOptions, Enforcement,
    ExecCause, ExecContext, ExecHandle, ExecId, ExecOptions, ExecOutput, ExecReport, Explain,
    Extent, FoundExec, Layer, Limit, LogPiece, LogStream, LogWait, PortStream, Reach, Receipt,
    ResourceLimits, ResourceUsage, Result, Sandbox, SandboxCapabilities, SandboxError,
    SandboxFiles, SandboxId, SandboxSpec, StreamOutput, TimeLimits,
};

/// How long a killed sandbox may take to be gone.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long the end of a process may take to be seen.
const MOMENT: Duration = Duration::from_secs(1);
/// How long a thread waits for a group to be empty, which takes some microseconds as a rule.
const A_BLINK: Duration = Duration::from_millis(5);
/// How long before it looks again.
const PAUSE: Duration = Duration::from_millis(1);

/// Everything a sandbox has on the host. Dropping it ends the sandbox, unless it is to outlive us.
#[derive(Debug)]
pub(crate) struct Instance {
    /// Its directory, if it is to outlive us.
    pub(super) home: Option<Home>,
    on_drop: OnDrop,
    pub(super) cpu_quota_millis: Option<u32>,
    pub(super) control: Channel,
    /// The signal at which its first process takes all others with it.
    ends_by: Signal,
    /// The directory that it has on the host for want of a root of its own.
    own: Option<Own>,
    pidfd: AsyncFd<OwnedFd>,
    pid: i32,
    /// When its first process was started.
    started: OnceLock<u64>,
    pub(super) base: Option<u32>,
    proof: Proof,
    /// How often the kernel had refused something before anybody ran in it.
    pub(super) refused_before: Refusals,
    pub(super) made_at: DateTime<Utc>,
    groups: Mutex<Groups>,
    /// Whether something inside could not be ended in time.
    is_stuck: AtomicBool,
    pub(super) base_layers: Base,
    /// Keeps them from being removed.
    held_layers: Mutex<Option<Held>>,
    overlays: Vec<Overlay>,
    /// What a container runtime made of it.
    pub(super) container: Option<Container>,
    /// Everything that is written to it, where we have it without asking init.
    pub(super) scratch: Option<OwnedFd>,
    /// Who makes the connections that it may have.
    egress: Mutex<Option<Broker>>,
    /// What it may reach, if anything. It stays when nobody is there any more to go by it.
    policy: Option<Arc<Policy>>,
}

/// A sandbox to be launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) id: &'a SandboxId,
    pub(crate) plan: &'a Plan,
    pub(crate) egress: Option<&'a Arc<Policy>>,
    pub(crate) seccomp: &'a Seccomp,
    pub(crate) limits: &'a ResourceLimits,
    /// What its control groups are to hold once it stands.
    pub(crate) settings: &'a [limits::Setting],
    pub(crate) cpu_quota_millis: Option<u32>,
    pub(crate) patience: Duration,
}

/// What a sandbox without a root of its own has on the host instead.
#[derive(Debug)]
pub(crate) struct Own {
    pub(crate) directory: PathBuf,
    /// What the marks of its processes begin with.
    pub(crate) nonce: u64,
}

impl Own {
    /// Removes it, with what may still run in it: its warden, which is gone, removes the directory last of
    /// all, and if it is still there was killed.
    pub(crate) fn remove(&self) {
        if self.directory.symlink_metadata().is_ok() {
            warren_init::warden::sweep(self.nonce);
            warren_init::warden::remove_directory(&self.directory);
        }
    }
}

/// Has the launcher make a sandbox and waits until it stands, or until it is sure that it does not.
///
/// With a directory in which it listens it is one that outlives us.
pub(crate) async fn launch(
    launcher: &Launcher,
    wanted: Wanted<'_>,
    groups: Groups,
    home: Option<(Home, OwnedFd)>,
    first: Option<First>,
) -> Result<(Instance, Option<Sent>)> {
    let instance = begin(launcher, &wanted, groups, home).await?;
    finish(instance, &wanted, first).await
}

/// Has one that was begun ahead become what is wanted, and waits until it stands.
pub(crate) async fn complete(
    mut instance: Instance,
    wanted: Wanted<'_>,
    first: Option<First>,
) -> Result<(Instance, Option<Sent>)> {
    instance.groups().change(wanted.id, wanted.settings)?;
    (instance.cpu_quota_millis, instance.made_at) = (wanted.cpu_quota_millis, Utc::now());
    let sent = instance.control.send(&Word::Become(wanted.plan), &[]).await;
    sent.map_err(|error| lost("start the sandbox", error))?;
    finish(instance, &wanted, first).await
}

/// Has the launcher make the first process of a sandbox. Dropping what is returned ends it, and leaves
/// nothing.
pub(crate) async fn begin(
    launcher: &Launcher,
    wanted: &Wanted<'_>,
    groups: Groups,
    home: Option<(Home, OwnedFd)>,
) -> Result<Instance> {
    let (home, listener) = home.unzip();
    let mut unfinished = Unfinished { home, groups: Some(groups) };
    let (control, theirs) = Channel::pair().map_err(|error| lost("make a socket", error))?;
    let place = unfinished.home.as_ref().map(|home| home.path().to_owned());
    let finish_groups = || unfinished.groups.as_mut().map_or(Ok(()), Groups::finish);
    let place = place.as_deref();
    let launched = launcher.launch(wanted, theirs, listener, place, finish_groups).await?;
    let (made, container) = match launched {
        Launched::Child(warren_init::launcher::Launched { pid, base, pidfd }) => {
            (Some((pid, base, pidfd)), None)
        }
        Launched::Asked => (None, None),
        Launched::Contained(container) => (None, Some(container)),
    };
    let mut scratch = None;
    let (pid, base, pidfd) = match made {
        Some(made) => made,
        None => {
            let answer = next_report(wanted.id, &control).await;
            if let (Err(_), Some(container)) = (&answer, &container) {
                // What was made of it is removed by then, or is about to be.
                let _ = container.gone(PATIENCE).await;
            }
            let (report, fds) = answer?;
            let mut fds = fds.into_iter();
            let (Report::Launched { pid, base }, Some(pidfd)) = (report, fds.next()) else {
                return Err(nonsense("the launcher"));
            };
            scratch = fds.next();
            (pid, base, pidfd)
        }
    };
    let pidfd = watch(pidfd).map_err(|error| lost("watch the sandbox", error))?;
    // From here on, dropping this ends what was made, should we be cancelled or refused.
    let proof = Proof { landlock_abi: 0, owners_shifted: false, tried: 0 };
    let (home, groups) = unfinished.finish();
    let (groups, on_drop) = (Mutex::new(groups), OnDrop::Remove);
    Ok(Instance {
        home,
        on_drop,
        cpu_quota_millis: wanted.cpu_quota_millis,
        control,
        ends_by: warren_init::launcher::ends_by(&wanted.plan.walls),
        own: match &wanted.plan.walls {
            Walls::Namespaces | Walls::OwnKernel => None,
            Walls::Rules(rules) => {
                Some(Own { directory: PathBuf::from(&rules.directory), nonce: rules.nonce })
            }
        },
        pidfd,
        pid,
        started: OnceLock::new(),
        base,
        proof,
        refused_before: Refusals::default(),
        made_at: Utc::now(),
        groups,
        is_stuck: AtomicBool::new(false),
        base_layers: Base::default(),
        held_layers: Mutex::default(),
        overlays: Vec::new(),
        container,
        scratch,
        egress: Mutex::default(),
        policy: None,
    })
}

/// Waits until a sandbox stands, with its first command on the way.
async fn finish(
    mut instance: Instance,
    wanted: &Wanted<'_>,
    first: Option<First>,
) -> Result<(Instance, Option<Sent>)> {
    // Init reads it once it is ready.
    let send = async |instance: &Instance, first: Option<First>| match first {
        Some(first) => Sent::send(instance, first, true).await.map(Some),
        None => Ok(None),
    };
    // A container has its exact limits only once it stands: nothing may run in it before.
    let (at_once, later) = if instance.container.is_some() { (None, first) } else { (first, None) };
    let sent = send(&instance, at_once).await;
    // First: should init have ended before that reached it, it has said why.
    match next_report(wanted.id, &instance.control).await?.0 {
        Report::Ready(proof) => instance.proof = proof,
        Report::Launched { .. } | Report::Waiting | Report::Failed(_) => {
            return Err(nonsense("init"));
        }
    }
    let sent = sent?;
    if instance.container.is_some() {
        // A runtime needs more of everything than what it starts.
        instance.groups().change(wanted.id, wanted.settings)?;
    }
    instance.proof.tried |= read_back(wanted);
    instance.reach(wanted.egress).await?;
    let sent = send(&instance, later).await?.or(sent);
    if instance.home.is_some() {
        instance.on_drop = OnDrop::Leave;
        instance.groups().leave();
    }
    Ok((instance, sent))
}

/// Says which limits were read back when they were written, by the bits of [`protocol::tried`].
fn read_back(wanted: &Wanted<'_>) -> u32 {
    let own_kernel = wanted.plan.walls == Walls::OwnKernel;
    let settings = wanted.settings.iter().filter(|setting| {
        // There the host's groups hold more than what was asked for: the kernel that it brings along, too.
        let limit = setting.limit();
        !(own_kernel && matches!(limit, Some(Limit::Memory | Limit::Processes)))
    });
    settings.map(receipt::set_bit).fold(0, |all, bit| all | bit)
}

/// What a sandbox has on the host before it has a process.
struct Unfinished {
    home: Option<Home>,
    groups: Option<Groups>,
}

impl Unfinished {
    fn finish(mut self) -> (Option<Home>, Groups) {
        let groups = self.groups.take().expect("taken once, here");
        (self.home.take(), groups)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(home) = &self.home {
            home.remove();
        }
    }
}

/// Finds a sandbox that outlived its maker; `None` if its process is gone.
pub(crate) async fn adopt(
    id: &SandboxId,
    home: Home,
    container: Option<Container>,
    egress: Option<&Arc<Policy>>,
    anchor: &Anchor,
) -> Result<Option<(Instance, bool)>> {
    let Some(pidfd) = anchor.find(id) else { return Ok(None) };
    let Ok(control) = home.connect() else { return Ok(None) };
    let scratch = match &container {
        Some(container) => Some(container.scratch()?),
        None => None,
    };
    let control = Channel::over(control).map_err(|error| lost("watch a socket", error))?;
    let mut instance = Instance {
        home: Some(home),
        on_drop: OnDrop::Leave,
        cpu_quota_millis: anchor.cpu_quota_millis,
        control,
        ends_by: Signal::KILL,
        own: None,
        pidfd: watch(pidfd).map_err(|error| lost("watch the sandbox", error))?,
        pid: anchor.pid,
        started: OnceLock::from(anchor.start_time),
        base: anchor.base,
        proof: Proof {
            landlock_abi: anchor.landlock_abi,
            owners_shifted: anchor.owners_shifted,
            tried: anchor.tried,
        },
        refused_before: Refusals::default(),
        made_at: anchor.made_at,
        groups: Mutex::new(Groups::adopt(anchor.groups.clone())),
        is_stuck: AtomicBool::new(false),
        base_layers: Base::default(),
        held_layers: Mutex::default(),
        overlays: Vec::new(),
        container,
        scratch,
        egress: Mutex::default(),
        policy: None,
    };
    if let Some(container) = &instance.container {
        // One that is paused answers nobody.
        container.resume().await?;
    }
    // One stuck sandbox must not hold up the others.
    let hello = tokio::time::timeout(PATIENCE, instance.ask::<Standing>(&Request::Hello)).await;
    match hello {
        Ok(Ok(Some(standing))) => {
            let suspended = match &instance.container {
                Some(container) => {
                    if standing.suspended {
                        container.pause().await?;
                    }
                    standing.suspended
                }
                None => instance.settle(standing.suspended).await,
            };
            instance.reach(egress).await?;
            Ok(Some((instance, suspended)))
        }
        Ok(Ok(None)) | Ok(Err(_)) => Ok(None),
        Err(_) => {
            Err(SandboxError::Timeout { what: "adopting a sandbox".to_owned(), after: PATIENCE })
        }
    }
}

/// Asks an init that nobody knows to end, and waits until it has.
pub(crate) async fn end(control: OwnedFd) {
    let gone = async {
        let control = Channel::over(control)?;
        let (ours, theirs) = Channel::pair()?;
        control.send(&Request::End, &[theirs.as_fd()]).await?;
        drop(theirs);
        ours.receive::<Done>().await
    };
    // However it answers: what is left of it is removed by other means.
    let _ = tokio::time::timeout(PATIENCE, gone).await;
}

pub(super) async fn next_report(
    id: &SandboxId,
    control: &Channel,
) -> Result<(Report, Vec<OwnedFd>)> {
    match control.receive::<Report>().await {
        Ok(Some((Report::Failed(failure), _))) if failure.step == protocol::OPEN_WALL => {
            Err(SandboxError::WallOpen { id: id.clone(), open: vec![failure.path] })
        }
        Ok(Some((Report::Failed(failure), _))) => Err(failed(failure)),
        Ok(Some(report)) => Ok(report),
        Ok(None) => Err(lost("start the sandbox", io::ErrorKind::BrokenPipe.into())),
        Err(error) => Err(lost("start the sandbox", error)),
    }
}

pub(crate) fn failed(failure: Failure) -> SandboxError {
    let Failure { step, path, errno } = failure;
    if errno == 0 {
        // Not the kernel's word, but that of another program.
        return SandboxError::Step { step, path: None, source: io::Error::other(path) };
    }
    let path = (!path.is_empty()).then(|| PathBuf::from(path));
    SandboxError::Step { step, path, source: io::Error::from_raw_os_error(errno) }
}

pub(super) fn lost(step: &str, source: io::Error) -> SandboxError {
    SandboxError::Step { step: step.to_owned(), path: None, source }
}

pub(super) fn nonsense(who: &str) -> SandboxError {
    SandboxError::Internal { message: format!("{who} answered something else than was asked") }
}

impl Instance {
    /// Has somebody make the connections that it may have.
    async fn reach(&mut self, policy: Option<&Arc<Policy>>) -> Result<()> {
        if let Some(policy) = policy {
            let broker = Broker::start(&self.control, policy.clone()).await;
            let broker = broker.map_err(|error| lost("reach the sandbox's gate", error))?;
            (self.egress, self.policy) = (Mutex::new(Some(broker)), Some(policy.clone()));
        }
        Ok(())
    }

    /// Returns what it may reach, if anything.
    pub(super) fn policy(&self) -> Option<Arc<Policy>> {
        self.policy.clone()
    }

    /// Takes note of what its root stands on, which is not removed as long as this lives.
    pub(crate) fn stand_on(&mut self, base: Base, held: Option<Held>, overlays: Vec<Overlay>) {
        (self.base_layers, self.overlays) = (base, overlays);
        self.held_layers = Mutex::new(held);
    }

    /// Takes note that it has no namespaces, and the directory that it has instead.
    pub(crate) fn by_rules(&mut self, own: Own) {
        (self.ends_by, self.own) = (Signal::TERM, Some(own));
    }

    /// Makes the terminal of a command that may not make its own: where the sandbox has the host's terminals before it, it may
    /// neither open one that is another's nor take all that the host can have.
    pub(super) fn lend_terminal(&self, rows: u16, columns: u16) -> Result<Option<Terminal>> {
        if self.own.is_none() {
            return Ok(None);
        }
        let made = Terminal::open(rows, columns).and_then(|made| {
            if let Some(base) = self.base {
                let (uid, gid) =
                    (Uid::from_raw(base + WORKLOAD_ID), Gid::from_raw(base + WORKLOAD_ID));
                rustix::fs::fchown(&made.inner, Some(uid), Some(gid))?;
            }
            Ok(made)
        });
        made.map(Some).map_err(|error| SandboxError::Step {
            step: "make a terminal".to_owned(),
            path: None,
            source: error,
        })
    }

    /// Removes the directory that it has on the host, which nobody writes to any more.
    fn remove_own(&self) {
        if let Some(own) = &self.own {
            own.remove();
        }
    }

    /// Returns which parts of the host seem writable in it.
    pub(super) fn overlays(&self) -> Vec<Overlay> {
        self.overlays.clone()
    }

    /// Kills every process. PID 1 takes the whole pid namespace with it, a warden its domain, and the directory with
    /// that: it is given a moment before its groups are ended with it in them.
    fn kill(&self) {
        // With what it is connected to: each would keep the network of a sandbox that is gone.
        drop(self.egress.lock().unwrap_or_else(PoisonError::into_inner).take());
        let _ = rustix::process::pidfd_send_signal(self.pidfd.get_ref(), self.ends_by);
        if self.own.is_none() {
            self.groups().kill();
        }
    }

    /// Returns its PID 1, on the host.
    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns what init tried before it was ready.
    pub(super) fn tried(&self) -> u32 {
        self.proof.tried
    }

    /// Reports whether no command runs in it, nor anything that one left behind.
    pub(super) async fn is_idle(&self) -> bool {
        if !self.groups().is_populated() {
            return true;
        }
        // What is in its groups may be the process that waits for the next command, which init alone can tell, unless its
        // container is paused and init with it.
        let is_paused = self.container.as_ref().is_some_and(Container::is_known_paused);
        if is_paused || !self.groups().tell_commands() {
            return false;
        }
        let hello = tokio::time::timeout(PATIENCE, self.ask::<Standing>(&Request::Hello)).await;
        let standing = hello.ok().and_then(Result::ok).flatten();
        standing.is_some_and(|standing| standing.running == 0 && !standing.left)
    }

    /// Asks init for something that it answers once; `None` if it is gone.
    pub(super) async fn ask<T: DeserializeOwned>(
        &self,
        request: &Request,
    ) -> io::Result<Option<T>> {
        let (ours, theirs) = Channel::pair()?;
        self.control.send(request, &[theirs.as_fd()]).await?;
        drop(theirs);
        Ok(ours.receive::<T>().await?.map(|(answer, _)| answer))
    }

    /// Stops all commands, or lets them go on.
    ///
    /// They are stopped from here where they can be. Init keeps their clocks and is told, but not waited for: it hears
    /// of this before it acts on anything that is said to it later, by whatever socket.
    pub(super) async fn freeze(&self, frozen: bool) -> io::Result<Option<Done>> {
        let request = if frozen { Request::Suspend } else { Request::Resume };
        if !self.freezes_here(frozen) {
            return self.ask(&request).await;
        }
        self.control.send(&request, &[]).await?;
        Ok(Some(Done(0)))
    }

    /// Lets all commands go on, for whoever cannot wait.
    pub(super) fn go_on(&self) {
        if self.freezes_here(false) {
            self.control.try_send(&Request::Resume);
        } else {
            self.order(&Request::Resume);
        }
    }

    fn freezes_here(&self, frozen: bool) -> bool {
        self.container.is_none() && self.groups().freeze_commands(frozen)
    }

    /// Asks init for something that comes with a descriptor; `None` if it is gone.
    pub(crate) async fn ask_for(
        &self,
        request: &Request,
    ) -> io::Result<Option<(Done, Vec<OwnedFd>)>> {
        let (ours, theirs) = Channel::pair()?;
        self.control.send(request, &[theirs.as_fd()]).await?;
        drop(theirs);
        ours.receive::<Done>().await
    }

    /// Has init hear of what the group of commands says, should whoever was killed have written to the one and
    /// not told the other; returns whether all stand still.
    ///
    /// What is meant by it is for others to know: nothing goes on here that stood still, or the other way round.
    async fn settle(&self, suspended: bool) -> bool {
        let stopped = self.groups().are_commands_stopped().unwrap_or(suspended);
        if stopped != suspended {
            // Should that fail, so does whatever it is asked next.
            let _ = self.freeze(stopped).await;
        }
        stopped
    }

    /// Returns when its first process was started, in ticks since the host was.
    fn start_time(&self) -> Option<u64> {
        if let Some(started) = self.started.get() {
            return Some(*started);
        }
        let started = anchor::start_time(self.pid)?;
        Some(*self.started.get_or_init(|| started))
    }

    /// Asks init for something without waiting for it, and without an answer.
    pub(crate) fn order(&self, request: &Request) {
        if let Ok((_ours, theirs)) = warren_sys::socket::pair() {
            self.control.try_send_with(request, &[theirs.as_fd()]);
        }
    }

    /// Kills every process, waits until all are gone, and removes what they had.
    async fn destroy(&self) -> Result<()> {
        self.end().await?;
        if let Some(home) = &self.home {
            home.remove();
        }
        Ok(())
    }

    /// As [`destroy`](Self::destroy), but leaves the directory, with the logs in it.
    pub(crate) async fn end(&self) -> Result<()> {
        self.kill();
        if let Some(container) = &self.container {
            container.thaw().await;
        }
        // One that was waited for in vain is not waited for again: whoever asks anew is told at once.
        let stuck = self.is_stuck.load(Ordering::Relaxed);
        let patience = if stuck { Duration::ZERO } else { PATIENCE };
        if self.own.is_some() && !stuck && !self.ends_soon().await {
            self.groups().kill();
        }
        if tokio::time::timeout(patience, self.pidfd.readable()).await.is_err() {
            let what = "ending the sandbox".to_owned();
            self.is_stuck.store(true, Ordering::Relaxed);
            return Err(SandboxError::Timeout { what, after: PATIENCE });
        }
        self.reap();
        if let Some(container) = &self.container {
            let gone = container.gone(patience).await;
            gone.inspect_err(|_| self.is_stuck.store(true, Ordering::Relaxed))?;
        }
        // First: with the groups goes the one who would do both for us, should we be killed now.
        self.remove_own();
        self.remove_groups(patience).await?;
        drop(self.held_layers.lock().unwrap_or_else(PoisonError::into_inner).take());
        Ok(())
    }

    /// Waits so long for the last process to leave the groups, and removes them.
    async fn remove_groups(&self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            // Nearly always it is done at once. The thread that waits here for a moment has others to serve.
            let gone = self.groups().remove_within(patience.min(A_BLINK));
            match gone {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() >= deadline => {
                    self.is_stuck.store(true, Ordering::Relaxed);
                    return Err(error);
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// Reaps PID 1, which has ended, where it is a child of ours; else the launcher does.
    fn reap(&self) {
        let id = WaitId::PidFd(self.pidfd.get_ref().as_fd());
        let _ = waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
    }

    /// Reports whether PID 1 is gone, or is so in a moment: its sockets close before that is known.
    pub(super) async fn ends_soon(&self) -> bool {
        tokio::time::timeout(MOMENT, self.pidfd.readable()).await.is_ok()
    }

    /// Reports whether PID 1 is gone.
    pub(super) fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)];
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    pub(crate) fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if self.on_drop == OnDrop::Leave {
            return;
        }
        self.kill();
        if let Some(container) = &self.container {
            container.thaw_now();
        }
        if self.is_stuck.load(Ordering::Relaxed) {
            // It was waited for already. The launcher clears up when it ends at last.
            self.groups().leave();
            return;
        }
        let wait = |time: Duration| {
            let time = Timespec { tv_sec: time.as_secs().try_into().unwrap_or(10), tv_nsec: 0 };
            let _ = poll(&mut [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)], Some(&time));
        };
        if self.own.is_some() {
            wait(MOMENT);
            self.groups().kill();
        }
        wait(PATIENCE);
        self.reap();
        if let Some(container) = &self.container {
            container.gone_now();
        }
        self.remove_own();
        if let Some(home) = &self.home {
            home.remove();
        }
        // The groups are removed with their own drop, which comes next.
    }
}

/// One sandbox of the `linux` backend. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct LinuxSandbox {
    pub(super) core: Arc<Core>,
    pub(super) terms: Arc<Terms>,
    /// Whose files its files are; nobody's in particular if absent.
    files_of: Option<Arc<str>>,
}

/// The sandbox itself.
#[derive(Debug)]
pub(crate) struct Core {
    pub(super) id: SandboxId,
    /// What it has on the host, until it is made anew in the same place.
    instance: Mutex<Arc<Instance>>,
    pub(super) support: GroupSupport,
    pub(super) backend: Weak<super::Inner>,
    /// What its backend is called.
    name: &'static str,
    /// What was captured of it since it was made.
    pub(super) tracked: Mutex<Option<Tracked>>,
    pub(super) state: tokio::sync::Mutex<State>,
    used: Mutex<ResourceUsage>,
    created: Instant,
    execs: Execs,
    /// The terms that hold now; a handle keeps those it was given under.
    current: Mutex<Arc<Terms>>,
    /// Ends what is done with files when the sandbox is suspended.
    transfers: Mutex<CancellationToken>,
}

/// What a sandbox is for whoever has it. A warm one gets new terms when it is claimed.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) spec: SandboxSpec,
    pub(super) capabilities: SandboxCapabilities,
    pub(super) enforcement: Enforcement,
}

impl Terms {
    fn users(&self) -> ProfileUsers {
        profile::profile(&self.spec.profile).map_or(ProfileUsers::One, |profile| profile.users)
    }

    /// Refuses to explain where what is done to explain would change what happens.
    pub(super) fn settle_explain(
        spec: &SandboxSpec,
        backend: &str,
        explain: Explain,
    ) -> Result<()> {
        let unsupported = |hint: &str| SandboxError::Unsupported {
            feature: "explaining what is refused".to_owned(),
            backend: backend.to_owned(),
            hint: hint.to_owned(),
        };
        let users = profile::profile(&spec.profile).map_or(ProfileUsers::One, |p| p.users);
        // What is followed is followed by the host's kernel.
        let follows = ["linux", "landlock", "oci-crun", "oci-runc"].contains(&backend);
        match (explain, users) {
            (Explain::Nothing, _) => Ok(()),
            _ if !follows => Err(unsupported("use the backend `linux`, `oci-crun` or `oci-runc`")),
            (_, ProfileUsers::One) => Ok(()),
            (_, ProfileUsers::Several { .. }) => Err(unsupported(
                "a program that is followed cannot become another user, as sudo does; \
                 use a profile with one user",
            )),
        }
    }

    /// Refuses a user that no sandbox with these terms can have; who there is, only init can see.
    fn settle_user(&self, plan: &mut ExecPlan) -> Result<()> {
        let Some(user) = &plan.user else { return Ok(()) };
        match (self.users(), user.name.as_str()) {
            (ProfileUsers::Several { .. }, _) | (ProfileUsers::One, "user") => Ok(()),
            // The one user there is, by its number.
            (ProfileUsers::One, number) if number == WORKLOAD_ID.to_string() => {
                plan.user = None;
                Ok(())
            }
            (ProfileUsers::One, user) => Err(SandboxError::Unsupported {
                feature: format!("the user `{user}` in profile `{}`", self.spec.profile),
                backend: self.capabilities.backend.clone(),
                hint: "commands are `user` there; the profile `dev` has several users".to_owned(),
            }),
        }
    }
}

/// What the sandbox is asked to be. Its lock is held while it changes, so that contradicting calls
/// follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Running,
    Suspended,
    Destroyed,
}

/// The conversation with init, and all that it needs to go on.
#[derive(Debug)]
pub(crate) struct Control(Arc<Instance>);

impl std::ops::Deref for Control {
    type Target = Channel;

    fn deref(&self) -> &Channel {
        &self.0.control
    }
}

impl Core {
    pub(crate) fn execs(&self) -> &Execs {
        &self.execs
    }

    pub(crate) fn refusals(&self) -> Refusals {
        self.instance().groups().refusals()
    }

    /// Returns the terms that hold now.
    pub(super) fn terms(&self) -> Arc<Terms> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn instance(&self) -> Arc<Instance> {
        self.instance.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the most memory that the sandbox held since this was asked for the same exec before.
    pub(crate) fn peak_memory(&self, id: &ExecId) -> Option<u64> {
        let group = self.instance().groups().memory()?.to_owned();
        self.execs.peak_memory(&group, id)
    }

    /// Adds what a command used to what the sandbox did.
    pub(crate) fn account(&self, usage: &ResourceUsage) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.peak_memory_bytes = used.peak_memory_bytes.max(usage.peak_memory_bytes);
        used.cpu_time_ms += usage.cpu_time_ms;
        used.bytes_read += usage.bytes_read;
        used.bytes_written += usage.bytes_written;
    }
}

impl LinuxSandbox {
    /// Reports whether both are handles to one sandbox.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }

    pub(super) fn new(
        inputs: &Inputs<'_>,
        plan: &Plan,
        instance: Instance,
        backend: &Arc<super::Inner>,
        suspended: bool,
    ) -> Self {
        let terms = Arc::new(Terms {
            spec: inputs.spec.clone(),
            capabilities: capabilities(inputs, plan, &instance),
            enforcement: enforcement(inputs, plan, &instance),
        });
        let state = if suspended { State::Suspended } else { State::Running };
        let execs = Execs::new(instance.home.as_ref().map(Home::path));
        let core = Core {
            id: inputs.id.clone(),
            execs,
            instance: Mutex::new(Arc::new(instance)),
            support: backend.host.groups.clone(),
            backend: Arc::downgrade(backend),
            name: backend.kind.name(),
            tracked: Mutex::default(),
            state: tokio::sync::Mutex::new(state),
            used: Mutex::default(),
            created: Instant::now(),
            current: Mutex::new(terms.clone()),
            transfers: Mutex::default(),
        };
        Self { core: Arc::new(core), terms, files_of: None }
    }

    /// Goes on with what was made in its place.
    pub(super) fn replace(&self, inputs: &Inputs<'_>, plan: &Plan, instance: Instance) {
        let terms = Terms {
            spec: inputs.spec.clone(),
            capabilities: SandboxCapabilities {
                created_at: self.terms.capabilities.created_at,
                ..capabilities(inputs, plan, &instance)
            },
            enforcement: enforcement(inputs, plan, &instance),
        };
        *self.core.current.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(terms);
        let mut place = self.core.instance.lock().unwrap_or_else(PoisonError::into_inner);
        *place = Arc::new(instance);
    }

    /// Returns a handle under the terms that hold now.
    pub(crate) fn current(&self) -> Self {
        let terms = self.core.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Self { core: self.core.clone(), terms, files_of: None }
    }

    /// Returns the terms under which this pristine sandbox can be what `spec` asks for.
    ///
    /// What is fixed when a sandbox is made must be the same: what it sees of the host, its filter,
    /// the size of its disk. The rest is bound to it now.
    fn terms_for(&self, spec: &SandboxSpec) -> Option<(Terms, Vec<limits::Setting>)> {
        let own = &self.terms.spec;
        let (a, b) = (&own.limits, &spec.limits);
        let (_, seccomp) = super::profiles(spec).ok()?;
        let (_, own_seccomp) = super::profiles(own).ok()?;
        let same = own.profile == spec.profile
            && seccomp.name == own_seccomp.name
            && own.allowed_paths_ro == spec.allowed_paths_ro
            && own.allowed_paths_rw == spec.allowed_paths_rw
            && own.bind_mounts == spec.bind_mounts
            && own.workdir == spec.workdir
            && own.network_enabled == spec.network_enabled
            && own.allowed_network == spec.allowed_network
            && a.max_write_bytes == b.max_write_bytes
            && a.max_memory_bytes.is_some() == b.max_memory_bytes.is_some()
            && a.max_processes.is_some() == b.max_processes.is_some()
            && a.cpu_weight.is_some() == b.cpu_weight.is_some();
        if !same || spec.validate().is_err() {
            return None;
        }
        let required = CreateOptions::default().required(spec);
        let writable = super::binds_writable(spec);
        let decision = limits::decide(b, None, &required, &self.core.support, writable).ok()?;
        // What init holds itself was fixed when it was started.
        let held = limits::decide(a, None, &BTreeSet::new(), &self.core.support, writable).ok()?;
        if decision.bounds != held.bounds {
            return None;
        }
        let capabilities =
            SandboxCapabilities { limits: spec.limits.clone(), ..self.terms.capabilities.clone() };
        let enforcement = Enforcement {
            limits: decision.enforced,
            warnings: decision.warnings,
            ..self.terms.enforcement.clone()
        };
        Some((Terms { spec: spec.clone(), capabilities, enforcement }, decision.settings))
    }

    /// Decides what a command runs as, and where that is on the host if it has no root of its own.
    fn decide(&self, spec: &SandboxSpec, cmd: &Command, ctx: &ExecContext) -> Result<ExecPlan> {
        let mut plan = ExecPlan::new(spec, cmd, ctx)?;
        if let Some(own) = &self.core.instance().own {
            plan.workdir = rules::place(&plan.workdir, &own.directory);
        }
        Ok(plan)
    }

    /// Starts a command and returns a hold of it. Dropping the hold ends the command.
    pub async fn start(&self, cmd: &Command, ctx: &ExecContext, stdio: Stdio) -> Result<Execution> {
        let mut plan = self.decide(&self.terms.spec, cmd, ctx)?;
        self.terms.settle_user(&mut plan)?;
        if matches!(stdio, Stdio::Terminal { .. }) {
            self.refuse_handing_out("a terminal that the caller holds; one with a log works")?;
        }
        let _state = self.running().await?;
        let instance = self.core.instance();
        let refusals = instance.groups().refusals();
        let (limits, explain) = (self.terms.spec.limits.clone(), Explain::Nothing);
        let first = First { plan, limits, stdio, explain };
        let sent = Sent::send(&instance, first, false).await;
        let sent = sent.map_err(|error| self.explain(error))?;
        Ok(Execution::of(self.clone(), sent, refusals))
    }

    /// Refuses what init would have to send a descriptor for, where its kernel can send none.
    fn refuse_handing_out(&self, feature: &str) -> Result<()> {
        match self.core.support.own_kernel {
            false => Ok(()),
            true => Err(SandboxError::Unsupported {
                feature: feature.to_owned(),
                backend: self.core.name.to_owned(),
                hint: "gVisor hands no descriptor out; choose another backend".to_owned(),
            }),
        }
    }

    /// Has init begin a connection to a port, and returns the socket that it says is one.
    pub(super) async fn begin_connection(
        &self,
        to: Loopback,
        port: u16,
    ) -> Result<Result<OwnedFd, i32>> {
        // Held until init has answered, so that no connection is begun in a suspended sandbox.
        let state = self.core.state.lock().await;
        match *state {
            State::Running => {}
            State::Suspended => return Err(SandboxError::Suspended { id: self.core.id.clone() }),
            State::Destroyed => return Err(self.ended()),
        }
        match port::begin(&self.control(), to, port).await {
            Ok(Some(begun)) => Ok(begun),
            Ok(None) if self.has_ended() => Err(self.ended()),
            // An init that another version of ours left running does not know the question.
            Ok(None) => Err(SandboxError::Unsupported {
                feature: "connections to ports of a sandbox this old".to_owned(),
                backend: self.terms.capabilities.backend.clone(),
                hint: "make a new sandbox".to_owned(),
            }),
            Err(error) => Err(self.explain(lost("reach init", error))),
        }
    }

    /// Returns the pid of the sandbox's PID 1 on the host.
    pub fn pid(&self) -> i32 {
        self.core.instance().pid
    }

    /// Returns the first id of the range on the host that the sandbox's ids are, if it has one.
    pub fn id_base(&self) -> Option<u32> {
        self.core.instance().base
    }

    pub(crate) fn kill(&self) {
        self.core.instance().kill();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.core.instance().has_ended()
    }

    pub(crate) fn instance(&self) -> Arc<Instance> {
        self.core.instance()
    }

    pub(super) fn lend_terminal(&self, rows: u16, columns: u16) -> Result<Option<Terminal>> {
        self.core.instance().lend_terminal(rows, columns)
    }

    pub(crate) fn control(&self) -> Control {
        Control(self.core.instance())
    }

    pub(crate) fn ended(&self) -> SandboxError {
        SandboxError::Ended { id: self.core.id.clone() }
    }

    pub(crate) fn suspended(&self) -> SandboxError {
        SandboxError::Suspended { id: self.core.id.clone() }
    }

    /// Begins a conversation about files, to be given up when what comes with it is cancelled.
    pub(crate) async fn ask_about_files(
        &self,
        request: FileRequest,
        data: Option<BorrowedFd<'_>>,
    ) -> Result<(Channel, CancellationToken)> {
        let _state = self.running().await?;
        if self.has_ended() {
            return Err(self.ended());
        }
        let (ours, theirs) = Channel::pair().map_err(|error| lost("make a socket", error))?;
        let fds: Vec<_> = [theirs.as_fd()].into_iter().chain(data).collect();
        let request = match &self.files_of {
            None => Request::Files(request),
            Some(user) => Request::FilesAs { user: user.as_bytes().to_vec(), request },
        };
        let sent = self.control().send(&request, &fds).await;
        sent.map_err(|error| self.explain(lost("reach init", error)))?;
        Ok((ours, self.transfers().clone()))
    }

    pub(super) fn transfers(&self) -> MutexGuard<'_, CancellationToken> {
        self.core.transfers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn account(&self, usage: &ResourceUsage) {
        self.core.account(usage);
    }

    pub(crate) fn execs(&self) -> &Execs {
        &self.core.execs
    }

    pub(super) fn terms(&self) -> &Terms {
        &self.terms
    }

    pub(crate) fn downgrade(&self) -> Weak<Core> {
        Arc::downgrade(&self.core)
    }

    /// Starts a command with a log, while the sandbox runs.
    async fn start_with_log(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        options: &ExecOptions,
        keep: Keep,
    ) -> Result<Hold> {
        let spec = match options.time_limits {
            TimeLimits::Held => Cow::Borrowed(&self.terms.spec),
            TimeLimits::HeldByCaller => {
                let mut spec = self.terms.spec.clone();
                (spec.limits.max_wall_time_ms, spec.limits.max_cpu_time_ms) = (None, None);
                Cow::Owned(spec)
            }
        };
        let mut plan = self.decide(&spec, cmd, ctx)?;
        execs::validate(options)?;
        Terms::settle_explain(&spec, &self.terms.capabilities.backend, options.explain)?;
        if options.user.is_some() {
            plan.user.clone_from(&options.user);
        }
        self.terms.settle_user(&mut plan)?;
        let state = self.running().await?;
        let started = self.start_logged(plan, &spec.limits, options, keep, &ctx.request_id).await;
        drop(state);
        started.map_err(|error| self.explain(error))
    }

    /// Holds off changes of a sandbox that runs.
    pub(super) async fn running(&self) -> Result<tokio::sync::MutexGuard<'_, State>> {
        let state = self.core.state.lock().await;
        match *state {
            State::Running => Ok(state),
            State::Suspended => Err(self.suspended()),
            State::Destroyed => Err(self.ended()),
        }
    }

    /// Runs a command to its end and keeps its output, and hands it on as it comes.
    async fn run(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        receiver: Option<mpsc::Sender<StreamOutput>>,
    ) -> Result<ExecReport> {
        let options = ExecOptions::default();
        let mut hold = self.start_with_log(cmd, ctx, &options, Keep::Unnamed).await?;
        let exec = Arc::clone(&hold.exec);
        if receiver.is_none() {
            // All at once: there is nobody to hand anything on to.
            hold.listen().await;
            return self.report(&exec, ctx, None).await;
        }
        let (report, ()) = tokio::join!(self.report(&exec, ctx, receiver), hold.listen());
        report
    }

    /// Collects what a command writes, and how it ends.
    async fn report(
        &self,
        exec: &LoggedExec,
        ctx: &ExecContext,
        receiver: Option<mpsc::Sender<StreamOutput>>,
    ) -> Result<ExecReport> {
        let (mut stdout, mut stderr, mut at) = (Vec::new(), Vec::new(), 0);
        loop {
            let read = exec.read(at, usize::MAX, LogWait::More).await?;
            at = read.next;
            for LogPiece { stream, bytes, .. } in read.pieces {
                let (kept, keep, wrap): (_, _, fn(Vec<u8>) -> StreamOutput) = match stream {
                    LogStream::Stdout => (&mut stdout, ctx.capture_stdout, StreamOutput::Stdout),
                    LogStream::Stderr => (&mut stderr, ctx.capture_stderr, StreamOutput::Stderr),
                    LogStream::Control => continue,
                };
                if keep {
                    kept.extend_from_slice(&bytes);
                }
                if let Some(receiver) = &receiver {
                    // Whoever does not want it any more does not stop the command.
                    let _ = receiver.send(wrap(bytes)).await;
                }
            }
            if read.ended {
                break;
            }
        }
        exec.started().await?;
        let end = exec.wait().await?;
        let output = ExecOutput {
            exit_code: end.exit_code,
            stdout,
            stderr,
            duration: end.duration,
            timed_out: end.cause == ExecCause::TimedOut,
            resource_limited: end.cause.is_resource_limit(),
            resource_usage: Some(end.usage),
        };
        if let Some(receiver) = receiver {
            let _ = receiver.send(StreamOutput::Exit { code: output.exit_code }).await;
        }
        let denials = end.denials;
        Ok(ExecReport { denials, ..ExecReport::with_exit_code(output, end.cause) })
    }

    /// A sandbox that is gone explains whatever else went wrong.
    pub(super) fn explain(&self, error: SandboxError) -> SandboxError {
        let talk = matches!(error, SandboxError::Step { .. });
        if talk && self.has_ended() { self.ended() } else { error }
    }

    async fn change(&self, to: State) -> Result<()> {
        let mut state = self.core.state.lock().await;
        self.turn(&mut state, to).await
    }

    /// Has every process stand still or go on, for whoever holds off other changes.
    async fn turn(&self, state: &mut State, to: State) -> Result<()> {
        if *state == State::Destroyed || self.has_ended() {
            return Err(self.ended());
        }
        if *state != to {
            let instance = self.core.instance();
            if let (State::Running, Some(container)) = (to, &instance.container) {
                container.resume().await?;
            }
            let step = if to == State::Suspended { "suspend" } else { "resume" };
            match instance.freeze(to == State::Suspended).await {
                Ok(Some(Done(0))) => {}
                Ok(Some(Done(errno))) => {
                    return Err(lost(step, io::Error::from_raw_os_error(errno)));
                }
                Ok(None) => return Err(self.ended()),
                Err(error) => return Err(self.explain(lost("reach init", error))),
            }
            // Its commands stand still by init's word, which keeps their clocks; so does init now.
            if let (State::Suspended, Some(container)) = (to, &instance.container) {
                container.pause().await?;
            }
            *state = to;
        }
        if to == State::Suspended {
            // None can be added before the sandbox is resumed.
            std::mem::take(&mut *self.transfers()).cancel();
        }
        Ok(())
    }

    /// Stops every process and frees the memory that they hold, or leaves the sandbox as it was.
    pub(super) async fn page_out(&self) -> Result<PagedOut> {
        let mut state = self.core.state.lock().await;
        if *state == State::Destroyed || self.has_ended() {
            return Err(self.ended());
        }
        let was = *state;
        let group = self.core.instance().groups().memory().map(Path::to_owned);
        // Asked first: nothing stands still for what cannot be.
        let group = swap::check(group)?;
        self.turn(&mut state, State::Suspended).await?;
        let done = tokio::task::spawn_blocking(move || swap::page_out(&group)).await;
        let done = done.map_err(|error| SandboxError::Internal { message: error.to_string() });
        let paged = done.and_then(|paged| paged);
        if paged.is_err() && was == State::Running {
            self.turn(&mut state, State::Running).await?;
        }
        paged.map_err(|error| self.explain(error))
    }
}

#[async_trait]
impl Sandbox for LinuxSandbox {
    fn id(&self) -> &SandboxId {
        &self.core.id
    }

    fn capabilities(&self) -> &SandboxCapabilities {
        &self.terms.capabilities
    }

    async fn exec(&self, cmd: &Command, ctx: &ExecContext) -> Result<ExecOutput> {
        Ok(self.exec_report(cmd, ctx).await?.output)
    }

    async fn exec_report(&self, cmd: &Command, ctx: &ExecContext) -> Result<ExecReport> {
        self.run(cmd, ctx, None).await
    }

    async fn exec_streaming(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        output_tx: mpsc::Sender<StreamOutput>,
    ) -> Result<ExecOutput> {
        Ok(self.run(cmd, ctx, Some(output_tx)).await?.output)
    }

    async fn start_exec(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        options: &ExecOptions,
    ) -> Result<FoundExec> {
        let hold = self.start_with_log(cmd, ctx, options, Keep::Named).await?;
        hold.exec.started().await?;
        Ok(hold.exec.clone())
    }

    async fn list_execs(&self) -> Result<Vec<FoundExec>> {
        Ok(self.core.execs.list())
    }

    async fn find_exec(&self, id: &ExecId) -> Result<Option<FoundExec>> {
        Ok(self.core.execs.find(id))
    }

    async fn is_alive(&self) -> bool {
        !self.has_ended()
    }

    async fn suspend(&self) -> Result<()> {
        self.change(State::Suspended).await
    }

    async fn suspend_to_disk(&self) -> Result<()> {
        let PagedOut { bytes, left } = self.page_out().await?;
        tracing::info!(sandbox = %self.core.id, bytes, left, "memory went to disk");
        Ok(())
    }

    async fn resume(&self) -> Result<()> {
        self.change(State::Running).await
    }

    async fn snapshot(&self, name: &str) -> Result<String> {
        self.take_snapshot(name).await
    }

    async fn restore(&self, snapshot_id: &str) -> Result<()> {
        self.restore_snapshot(snapshot_id).await
    }

    fn base(&self) -> Base {
        self.core.instance().base_layers.clone()
    }

    async fn capture(&self) -> Result<Capture> {
        self.capture_layers().await
    }

    async fn diff(&self, since: Option<&Base>, options: &DiffOptions) -> Result<Vec<DiffEntry>> {
        self.compare(since, options).await
    }

    async fn rebase(&self, base: &Base) -> Result<()> {
        self.stand_anew(base).await
    }

    async fn destroy(&self) -> Result<()> {
        let mut state = self.core.state.lock().await;
        self.core.instance().destroy().await?;
        *state = State::Destroyed;
        if let Some(backend) = self.core.backend.upgrade() {
            backend.forget(self);
        }
        Ok(())
    }

    async fn claim(&self, spec: &SandboxSpec) -> Result<Option<Arc<dyn Sandbox>>> {
        let state = self.core.state.lock().await;
        if *state != State::Running || self.has_ended() {
            return Ok(None);
        }
        if self.core.instance().own.is_some() {
            // What it stands on is in its directory, and that has the id of another spec.
            return Ok(None);
        }
        let Some((terms, settings)) = self.terms_for(spec) else { return Ok(None) };
        let before = self.current().terms.spec.limits.clone();
        // What its groups hold already is not written again.
        let same = before == spec.limits;
        if !same && self.core.instance().groups().change(&self.core.id, &settings).is_err() {
            // As it was: what could be changed is written back. What cannot be is not handed out.
            if let Some((_, settings)) = self.terms_for(&self.terms.spec) {
                self.core.instance().groups().change(&self.core.id, &settings)?;
            }
            return Ok(None);
        }
        let terms = Arc::new(terms);
        *self.core.current.lock().unwrap_or_else(PoisonError::into_inner) = terms.clone();
        Ok(Some(Arc::new(Self { core: self.core.clone(), terms, files_of: None })))
    }

    async fn connect(&self, port: u16) -> Result<PortStream> {
        if self.core.instance().own.is_some() {
            return Err(SandboxError::Unsupported {
                feature: "connections to ports".to_owned(),
                backend: self.core.name.to_owned(),
                hint: "its commands have no sockets; choose the `linux` backend".to_owned(),
            });
        }
        self.refuse_handing_out("connections to ports")?;
        port::connect(self, port).await
    }

    async fn set_reach(&self, reach: &Reach) -> Result<()> {
        // With it: nobody makes the sandbox anew meanwhile.
        let state = self.core.state.lock().await;
        if *state == State::Destroyed || self.has_ended() {
            return Err(self.ended());
        }
        let instance = self.core.instance();
        let Some(policy) = instance.policy() else {
            return match reach.allow.first() {
                None => Ok(()),
                Some(first) => Err(SandboxError::Conflict {
                    action: format!("let it reach `{first}`"),
                    reason: "the sandbox was made without a network".to_owned(),
                }),
            };
        };
        policy.check(reach)?;
        if let Some(home) = &instance.home {
            home.note_reach(reach)?;
        }
        policy.set_reach(reach.clone());
        Ok(())
    }

    fn take_barred(&self, all: bool) -> Option<BarredDestinations> {
        self.core.instance().policy()?.barred.take(all)
    }

    fn reach(&self) -> Reach {
        self.core.instance().policy().map(|policy| policy.reach()).unwrap_or_default()
    }

    fn anchor(&self) -> Option<String> {
        let instance = self.core.instance();
        instance.home.as_ref()?;
        let anchor = Anchor {
            boot_id: anchor::boot_id().ok()?,
            pid: instance.pid,
            start_time: instance.start_time()?,
            base: instance.base,
            landlock_abi: instance.proof.landlock_abi,
            owners_shifted: instance.proof.owners_shifted,
            groups: instance.groups().places(),
            cpu_quota_millis: instance.cpu_quota_millis,
            stands_on: instance.base_layers.clone(),
            tried: instance.proof.tried,
            made_at: instance.made_at,
            protocol: warren_init::protocol::VERSION,
        };
        serde_json::to_string(&anchor).ok()
    }

    async fn resource_usage(&self) -> Result<ResourceUsage> {
        if self.has_ended() {
            return Err(self.ended());
        }
        let mut usage = *self.core.used.lock().unwrap_or_else(PoisonError::into_inner);
        let instance = self.core.instance();
        let groups = instance.groups();
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        if let Some(cpu) = groups.cpu_time() {
            // A kernel of its own counts commands by its own clock, which may have come to more.
            usage.cpu_time_ms = usage.cpu_time_ms.max(millis(cpu));
        }
        if let Some(peak) = groups.peak_memory() {
            usage.peak_memory_bytes = peak;
        }
        usage.wall_time_ms = millis(self.core.created.elapsed());
        Ok(usage)
    }

    fn files(&self) -> Option<&dyn SandboxFiles> {
        Some(self)
    }

    fn files_of(&self, user: &str) -> Option<Arc<dyn SandboxFiles>> {
        Some(Arc::new(Self { files_of: Some(user.into()), ..self.clone() }))
    }

    fn enforcement(&self) -> Enforcement {
        self.terms.enforcement.clone()
    }

    fn receipt(&self) -> Receipt {
        self.creation_receipt()
    }

    async fn verify(&self, extent: Extent) -> Result<Receipt> {
        self.try_walls(extent).await
    }
}

fn capabilities(inputs: &Inputs<'_>, plan: &Plan, instance: &Instance) -> SandboxCapabilities {
    let (readable, writable) = match &plan.walls {
        Walls::Namespaces | Walls::OwnKernel => {
            let own = || WRITABLE.iter().map(PathBuf::from);
            let bound = plan.mounts.iter().filter(|mount| mount.writable);
            let bound = bound.map(|mount| PathBuf::from(&mount.target));
            let shown = plan.mounts.iter().map(|mount| PathBuf::from(&mount.target));
            (shown.chain(own()).collect(), own().chain(bound).collect())
        }
        Walls::Rules(planned) => {
            let paths = |paths: &[String]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
            let own = vec![PathBuf::from(&planned.directory)];
            let writable = [paths(&planned.writable), own].concat();
            let shown = [paths(&planned.system), paths(&planned.readable)].concat();
            let readable = [shown, vec!["/proc".into()], writable.clone()];
            (readable.concat(), writable)
        }
    };
    let policy = instance.policy();
    let allowed = |text: &&String| policy.as_ref().is_some_and(|policy| policy.has(text));
    SandboxCapabilities {
        sandbox_id: inputs.id.to_string(),
        backend: inputs.backend.to_owned(),
        profile: inputs.profile.name.to_owned(),
        can_write_filesystem: true,
        readable_paths: readable,
        writable_paths: writable,
        has_network: plan.egress.as_ref().is_some_and(|egress| !egress.is_empty()),
        allowed_destinations: inputs.spec.allowed_network.iter().filter(allowed).cloned().collect(),
        limits: inputs.spec.limits.clone(),
        // Init tried a call that only the filter refuses, and would not be there had it worked.
        syscall_filter_active: true,
        blocked_syscall_categories: inputs
            .seccomp
            .blocked_categories
            .iter()
            .map(|category| (*category).to_owned())
            .collect(),
        is_persistent: instance.home.is_some(),
        created_at: instance.made_at,
        time_remaining_ms: None,
    }
}

/// Says whether the caller's supplementary groups go in: only root can leave them behind, because
/// the kernel lets nobody else into a user namespace in which setgroups(2) works.
fn kept_groups() -> &'static str {
    let own = rustix::process::getegid();
    let others = rustix::process::getgroups().unwrap_or_default();
    if others.iter().all(|group| *group == own) { "" } else { ", with its supplementary groups" }
}

/// Says what a root inside may do, if there is one.
fn capabilities_of(profile: &Profile) -> String {
    match profile.users {
        ProfileUsers::One => "none in any set, no new privileges; read back".to_owned(),
        ProfileUsers::Several { capabilities } => {
            format!(
                "{}, for root of its own user namespace; read back",
                capability_names(capabilities).join(" ")
            )
        }
    }
}

/// Lists what holds the sandbox, and of each layer whether init tried it before it said that it is
/// ready. What was not tried was made by a call that may not fail.
fn enforcement(inputs: &Inputs<'_>, plan: &Plan, instance: &Instance) -> Enforcement {
    let layer = |name: &str, detail: String| Layer { name: name.to_owned(), detail };
    let (limits, mut warnings) = (inputs.limits.enforced.clone(), inputs.limits.warnings.clone());
    if let Walls::Rules(_) = plan.walls {
        let user = match instance.base {
            Some(base) => format!("user {} of the host", base + warren_init::plan::WORKLOAD_ID),
            None => format!("the caller's{}", kept_groups()),
        };
        let layers = vec![
            layer(
                "landlock",
                format!("ABI {}; files and signals were tried", instance.proof.landlock_abi),
            ),
            layer("warden", "nothing inside reaches it; tried".to_owned()),
            layer("identity", format!("{user}; set")),
            layer("capabilities", capabilities_of(inputs.profile)),
            layer("seccomp", format!("profile {}, and no sockets; tried", inputs.seccomp.name)),
        ];
        return Enforcement { limits, layers, warnings };
    }
    let ids = match instance.base {
        Some(base) => format!("ids {base} to {} of the host", base + warren_init::plan::RANGE - 1),
        None => format!("one id, the caller's{}", kept_groups()),
    };
    let owners = if instance.proof.owners_shifted { ", owners of host files shifted" } else { "" };
    if plan.walls == Walls::OwnKernel {
        let runtime = instance.container.as_ref().map(Container::describe).unwrap_or_default();
        let layers = vec![
            layer("runtime", runtime),
            layer(
                "kernel",
                "gVisor's, in user space: no system call of a command is the host's; tried".to_owned(),
            ),
            layer(
                "root",
                "overlay on a tmpfs, by a process of its own that holds no other; tried: the host's \
                 part is read-only"
                    .to_owned(),
            ),
            layer("identity", format!("{ids}{owners}; set")),
            layer("capabilities", capabilities_of(inputs.profile)),
            layer("seccomp", format!("profile {}, by gVisor; tried", inputs.seccomp.name)),
            layer("network", "own loopback only; tried: no route leads out".to_owned()),
        ];
        return Enforcement { limits, layers, warnings };
    }
    let mut layers = vec![
        layer(
            "namespaces",
            "user, mount, pid, net, ipc, uts, cgroup; pid and net were tried, the others were made"
                .to_owned(),
        ),
        layer(
            "root",
            "overlay on a tmpfs, old root detached; tried: the host's part is read-only".to_owned(),
        ),
        layer("identity", format!("{ids}{owners}; set")),
        layer("capabilities", capabilities_of(inputs.profile)),
        layer("seccomp", format!("profile {}; tried", inputs.seccomp.name)),
        layer("landlock", format!("ABI {}; tried", instance.proof.landlock_abi)),
        layer("network", "own loopback only; tried: no route leads out".to_owned()),
    ];
    if let Some(container) = &instance.container {
        layers.insert(0, layer("runtime", container.describe()));
    }
    if plan.overlays.iter().any(|overlay| !overlay.veiled) {
        warnings.push(
            "the host's /usr is on an overlay: files there that only the host's root may read can \
             be read by root of this sandbox"
                .to_owned(),
        );
    }
    Enforcement { limits, layers, warnings }
}
