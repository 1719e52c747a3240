//! One sandbox of the `linux` backend, and everything it has on the host.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::Utc;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use warren_init::plan::Plan;
use warren_init::protocol::{Done, Failure, Proof, Report, Request, Tries};

use super::channel::{Channel, watch};
use super::execution::{self, Execution, Stdio};
use super::groups::Groups;
use super::launcher::Launcher;
use super::plan::{Inputs, WRITABLE};
use crate::backend::ExecPlan;
use crate::{
    Command, Enforcement, ExecContext, ExecOutput, ExecReport, Layer, ResourceUsage, Result,
    Sandbox, SandboxCapabilities, SandboxError, SandboxId, SandboxSpec, StreamOutput,
};

/// How long a killed sandbox may take to be gone.
const PATIENCE: Duration = Duration::from_secs(10);

/// Everything a sandbox has on the host. Dropping it ends the sandbox.
#[derive(Debug)]
pub(crate) struct Instance {
    control: Channel,
    pidfd: AsyncFd<OwnedFd>,
    pid: i32,
    base: Option<u32>,
    proof: Proof,
    groups: Mutex<Groups>,
}

/// Has the launcher make a sandbox and waits until it stands, or until it is sure that it does not.
pub(crate) async fn launch(launcher: &Launcher, plan: &Plan, groups: Groups) -> Result<Instance> {
    let (control, theirs) = Channel::pair().map_err(|error| lost("make a socket", error))?;
    launcher.launch(plan, theirs).await?;
    let (report, mut fds) = next_report(&control).await?;
    let (Report::Launched { pid, base }, Some(pidfd)) = (report, fds.pop()) else {
        return Err(nonsense("the launcher"));
    };
    let pidfd = watch(pidfd).map_err(|error| lost("watch the sandbox", error))?;
    // From here on, dropping this ends what was made, should we be cancelled or refused.
    let unproved = Proof { landlock_abi: 0, owners_shifted: false };
    let groups = Mutex::new(groups);
    let mut instance = Instance { control, pidfd, pid, base, proof: unproved, groups };
    match next_report(&instance.control).await?.0 {
        Report::Ready(proof) => instance.proof = proof,
        Report::Launched { .. } | Report::Failed(_) => return Err(nonsense("init")),
    }
    Ok(instance)
}

async fn next_report(control: &Channel) -> Result<(Report, Vec<OwnedFd>)> {
    match control.receive::<Report>().await {
        Ok(Some((Report::Failed(failure), _))) => Err(failed(failure)),
        Ok(Some(report)) => Ok(report),
        Ok(None) => Err(lost("start the sandbox", io::ErrorKind::BrokenPipe.into())),
        Err(error) => Err(lost("start the sandbox", error)),
    }
}

fn failed(failure: Failure) -> SandboxError {
    let Failure { step, path, errno } = failure;
    let path = (!path.is_empty()).then(|| PathBuf::from(path));
    SandboxError::Step { step, path, source: io::Error::from_raw_os_error(errno) }
}

fn lost(step: &str, source: io::Error) -> SandboxError {
    SandboxError::Step { step: step.to_owned(), path: None, source }
}

fn nonsense(who: &str) -> SandboxError {
    SandboxError::Internal { message: format!("{who} answered something else than was asked") }
}

impl Instance {
    /// Kills every process. PID 1 takes the whole pid namespace with it.
    fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL);
        self.groups().kill();
    }

    /// Reports whether PID 1 is gone.
    fn has_ended(&self) -> bool {
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
        self.kill();
        let patience = Timespec { tv_sec: PATIENCE.as_secs().try_into().unwrap_or(10), tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)], Some(&patience));
        // The groups are removed with their own drop, which comes next.
    }
}

/// One sandbox of the `linux` backend. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct LinuxSandbox {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    id: SandboxId,
    spec: SandboxSpec,
    capabilities: SandboxCapabilities,
    enforcement: Enforcement,
    instance: Instance,
    state: tokio::sync::Mutex<State>,
    used: Mutex<ResourceUsage>,
    created: Instant,
}

/// What the sandbox is asked to be. Its lock is held while it changes, so that contradicting calls
/// follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    Suspended,
    Destroyed,
}

impl LinuxSandbox {
    pub(crate) fn new(inputs: &Inputs<'_>, plan: &Plan, instance: Instance) -> Self {
        let shared = Shared {
            id: inputs.id.clone(),
            spec: inputs.spec.clone(),
            capabilities: capabilities(inputs, plan),
            enforcement: enforcement(inputs, &instance),
            instance,
            state: tokio::sync::Mutex::new(State::Running),
            used: Mutex::default(),
            created: Instant::now(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Starts a command and returns a hold of it. Dropping the hold ends the command.
    pub async fn start(&self, cmd: &Command, ctx: &ExecContext, stdio: Stdio) -> Result<Execution> {
        let plan = ExecPlan::new(&self.shared.spec, cmd, ctx)?;
        let state = self.shared.state.lock().await;
        match *state {
            State::Running => {}
            State::Suspended => return Err(SandboxError::Suspended { id: self.shared.id.clone() }),
            State::Destroyed => return Err(self.ended()),
        }
        let refusals = self.shared.instance.groups().refusals();
        let limits = &self.shared.spec.limits;
        let execution = Execution::start(self.clone(), plan, limits, stdio, refusals).await;
        execution.map_err(|error| self.explain(error))
    }

    /// Returns the pid of the sandbox's PID 1 on the host.
    pub fn pid(&self) -> i32 {
        self.shared.instance.pid
    }

    /// Returns the first id of the range on the host that the sandbox's ids are, if it has one.
    pub fn id_base(&self) -> Option<u32> {
        self.shared.instance.base
    }

    /// Tries every wall from where a command stands; returns what was tried and what the kernel
    /// said, 0 where it let the command through.
    pub async fn try_walls(&self) -> Result<Vec<(String, i32)>> {
        let Tries(tries) = self.ask(&Request::Probe).await?;
        Ok(tries.into_iter().map(|attempt| (attempt.name, attempt.errno)).collect())
    }

    pub(crate) fn kill(&self) {
        self.shared.instance.kill();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.shared.instance.has_ended()
    }

    pub(crate) fn instance(&self) -> &Instance {
        &self.shared.instance
    }

    pub(crate) fn control(&self) -> &Channel {
        &self.shared.instance.control
    }

    pub(crate) fn ended(&self) -> SandboxError {
        SandboxError::Ended { id: self.shared.id.clone() }
    }

    /// Adds what a command used to what the sandbox did.
    pub(crate) fn account(&self, usage: &ResourceUsage) {
        let mut used = self.shared.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.peak_memory_bytes = used.peak_memory_bytes.max(usage.peak_memory_bytes);
        used.cpu_time_ms += usage.cpu_time_ms;
        used.bytes_read += usage.bytes_read;
        used.bytes_written += usage.bytes_written;
    }

    /// Asks init for something that it answers once.
    async fn ask<T: serde::de::DeserializeOwned>(&self, request: &Request) -> Result<T> {
        let answer = async {
            let (ours, theirs) = Channel::pair()?;
            self.shared.instance.control.send(request, &[theirs.as_fd()]).await?;
            drop(theirs);
            ours.receive::<T>().await
        };
        match answer.await {
            Ok(Some((answer, _))) => Ok(answer),
            Ok(None) => Err(self.ended()),
            Err(error) => Err(self.explain(lost("reach init", error))),
        }
    }

    /// A sandbox that is gone explains whatever else went wrong.
    fn explain(&self, error: SandboxError) -> SandboxError {
        let talk = matches!(error, SandboxError::Step { .. });
        if talk && self.has_ended() { self.ended() } else { error }
    }

    async fn change(&self, to: State, request: Request) -> Result<()> {
        let mut state = self.shared.state.lock().await;
        if *state == State::Destroyed || self.has_ended() {
            return Err(self.ended());
        }
        if *state != to {
            let Done(errno) = self.ask(&request).await?;
            if errno != 0 {
                let step = if to == State::Suspended { "suspend" } else { "resume" };
                return Err(lost(step, io::Error::from_raw_os_error(errno)));
            }
            *state = to;
        }
        Ok(())
    }

    fn no_snapshots(&self) -> SandboxError {
        if self.has_ended() {
            return self.ended();
        }
        SandboxError::Unsupported {
            feature: "snapshots".to_owned(),
            backend: super::NAME.to_owned(),
            hint: "copy out what is needed before the sandbox is destroyed".to_owned(),
        }
    }
}

#[async_trait]
impl Sandbox for LinuxSandbox {
    fn id(&self) -> &SandboxId {
        &self.shared.id
    }

    fn capabilities(&self) -> &SandboxCapabilities {
        &self.shared.capabilities
    }

    async fn exec(&self, cmd: &Command, ctx: &ExecContext) -> Result<ExecOutput> {
        Ok(self.exec_report(cmd, ctx).await?.output)
    }

    async fn exec_report(&self, cmd: &Command, ctx: &ExecContext) -> Result<ExecReport> {
        let execution = self.start(cmd, ctx, Stdio::Pipes).await?;
        execution::capture(execution, ctx, self.shared.spec.limits.max_output_bytes, None).await
    }

    async fn exec_streaming(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        output_tx: mpsc::Sender<StreamOutput>,
    ) -> Result<ExecOutput> {
        let execution = self.start(cmd, ctx, Stdio::Pipes).await?;
        let limit = self.shared.spec.limits.max_output_bytes;
        Ok(execution::capture(execution, ctx, limit, Some(output_tx)).await?.output)
    }

    async fn is_alive(&self) -> bool {
        !self.has_ended()
    }

    async fn suspend(&self) -> Result<()> {
        self.change(State::Suspended, Request::Suspend).await
    }

    async fn resume(&self) -> Result<()> {
        self.change(State::Running, Request::Resume).await
    }

    async fn snapshot(&self, _name: &str) -> Result<String> {
        Err(self.no_snapshots())
    }

    async fn restore(&self, _snapshot_id: &str) -> Result<()> {
        Err(self.no_snapshots())
    }

    async fn destroy(&self) -> Result<()> {
        let mut state = self.shared.state.lock().await;
        let instance = &self.shared.instance;
        instance.kill();
        let gone = tokio::time::timeout(PATIENCE, instance.pidfd.readable()).await;
        if gone.is_err() {
            return Err(SandboxError::Timeout {
                what: "ending the sandbox".to_owned(),
                after: PATIENCE,
            });
        }
        *state = State::Destroyed;
        instance.groups().remove()
    }

    async fn resource_usage(&self) -> Result<ResourceUsage> {
        if self.has_ended() {
            return Err(self.ended());
        }
        let mut usage = *self.shared.used.lock().unwrap_or_else(PoisonError::into_inner);
        let groups = self.shared.instance.groups();
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        if let Some(cpu) = groups.cpu_time() {
            usage.cpu_time_ms = millis(cpu);
        }
        if let Some(peak) = groups.peak_memory() {
            usage.peak_memory_bytes = peak;
        }
        usage.wall_time_ms = millis(self.shared.created.elapsed());
        Ok(usage)
    }

    fn enforcement(&self) -> Enforcement {
        self.shared.enforcement.clone()
    }
}

fn capabilities(inputs: &Inputs<'_>, plan: &Plan) -> SandboxCapabilities {
    let own = WRITABLE.iter().map(PathBuf::from);
    let bound = plan.mounts.iter().filter(|mount| mount.writable);
    let writable: Vec<PathBuf> =
        own.chain(bound.map(|mount| PathBuf::from(&mount.target))).collect();
    let shown = plan.mounts.iter().map(|mount| PathBuf::from(&mount.target));
    SandboxCapabilities {
        sandbox_id: inputs.id.to_string(),
        backend: super::NAME.to_owned(),
        profile: inputs.profile.name.to_owned(),
        can_write_filesystem: true,
        readable_paths: shown.chain(WRITABLE.iter().map(PathBuf::from)).collect(),
        writable_paths: writable,
        has_network: false,
        allowed_destinations: Vec::new(),
        limits: inputs.spec.limits.clone(),
        // Init tried a call that only the filter refuses, and would not be there had it worked.
        syscall_filter_active: true,
        blocked_syscall_categories: inputs
            .seccomp
            .blocked_categories
            .iter()
            .map(|category| (*category).to_owned())
            .collect(),
        is_persistent: false,
        created_at: Utc::now(),
        time_remaining_ms: None,
    }
}

/// Lists what holds the sandbox. Init has tried each layer before it said that it is ready.
fn enforcement(inputs: &Inputs<'_>, instance: &Instance) -> Enforcement {
    let layer = |name: &str, detail: String| Layer { name: name.to_owned(), detail };
    let ids = match instance.base {
        Some(base) => format!("ids {base} to {} of the host", base + warren_init::plan::RANGE - 1),
        None => "one id, the caller's".to_owned(),
    };
    let owners = if instance.proof.owners_shifted { ", owners of host files shifted" } else { "" };
    let layers = vec![
        layer("namespaces", "user, mount, pid, net, ipc, uts, cgroup".to_owned()),
        layer("root", "overlay on a tmpfs, old root detached".to_owned()),
        layer("identity", format!("{ids}{owners}")),
        layer("capabilities", "none in any set, no new privileges".to_owned()),
        layer("seccomp", format!("profile {}", inputs.seccomp.name)),
        layer("landlock", format!("ABI {}", instance.proof.landlock_abi)),
        layer("network", "own loopback only".to_owned()),
    ];
    let (limits, warnings) = (inputs.limits.enforced.clone(), inputs.limits.warnings.clone());
    Enforcement { limits, layers, warnings }
}
