//! Commands as plain children of this process: no isolation at all.
//!
//! For hosts and tests where the caller trusts what runs. Every capability says so, nothing makes
//! one by default, and nothing is created until the caller has accepted it by name. What it can
//! keep it does keep: its own process group for each exec, a cleared environment, a directory of
//! its own, timeouts and the output limit. A command's background children end with it, except one
//! that leaves the process group (`setsid`): holding those takes a real backend.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Child;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use warren_init::protocol::Probe;

use super::{Capture, Channel, ExecPlan, Room};
use crate::receipt::{self, Attempt, Listening, Nothing};
use crate::{
    BackendCapabilities, BackendHealth, Bound, Command, CreateOptions, EnforcedLimit, Enforcement,
    ExecCause, ExecContext, ExecOutput, ExecReport, Extent, IsolationBackend, Limit, PortStream,
    ProgramFault, Receipt, ResourceLimits, ResourceUsage, Result, Sandbox, SandboxCapabilities,
    SandboxError, SandboxId, SandboxSpec, StreamOutput,
};

const NAME: &str = "host";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The limits that a parent can hold over its children without help from the kernel.
const ENFORCED: [Limit; 2] = [Limit::WallTime, Limit::Output];
/// Streamed pieces that may wait for a slow receiver before the command has to wait too.
const MAX_PENDING: usize = 64;
/// How long the output is read on after the end, for a pipe that somebody else still holds.
const DRAIN: Duration = Duration::from_millis(200);

/// What the caller accepts of the host backend.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostConfig {
    /// Whether the caller knows that commands can do whatever this process can.
    pub accept_no_isolation: bool,
}

/// Runs commands as plain children, without isolation.
#[derive(Debug)]
pub struct HostBackend {
    config: HostConfig,
    directory: PathBuf,
    sandboxes: Arc<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    live: Mutex<HashMap<SandboxId, Arc<Instance>>>,
    last_created: Mutex<Option<DateTime<Utc>>>,
}

impl HostBackend {
    /// Makes a backend that keeps its sandboxes' directories in `/tmp`.
    pub fn new(config: HostConfig) -> Self {
        Self::in_directory(config, "/tmp")
    }

    /// Makes a backend that keeps its sandboxes' directories in `directory`.
    pub fn in_directory(config: HostConfig, directory: impl Into<PathBuf>) -> Self {
        Self { config, directory: directory.into(), sandboxes: Arc::default() }
    }

    fn all(&self) -> Vec<Arc<Instance>> {
        lock(&self.sandboxes.live).values().cloned().collect()
    }

    /// Refuses what this backend cannot keep. Pure.
    fn admit(&self, spec: &SandboxSpec, options: &CreateOptions) -> Result<()> {
        spec.validate()?;
        options.validate()?;
        let unsupported = |feature: &str, hint: &str| {
            Err(SandboxError::Unsupported {
                feature: feature.to_owned(),
                backend: NAME.to_owned(),
                hint: hint.to_owned(),
            })
        };
        if !self.config.accept_no_isolation {
            return unsupported(
                "isolation of any kind",
                "choose another backend, or accept that commands run on the bare host",
            );
        }
        if spec.profile != "default" {
            return unsupported("profiles", "only the profile `default` can be used here");
        }
        if spec.seccomp_profile.is_some() {
            return unsupported("system call filters", "choose another backend");
        }
        if !spec.allowed_network.is_empty() {
            return unsupported("network rules", "choose another backend");
        }
        if spec.bind_mounts.iter().any(|bind| bind.source != bind.target) {
            return unsupported("binds at another place", "choose another backend");
        }
        for limit in options.required(spec) {
            if !ENFORCED.contains(&limit) {
                return Err(SandboxError::LimitNotEnforceable {
                    limit,
                    reason: "the host backend runs plain processes".to_owned(),
                    hint: format!("choose another backend, or accept it: --accept-missing {limit}"),
                });
            }
        }
        for path in spec.allowed_paths_ro.iter().chain(&spec.allowed_paths_rw) {
            fs::metadata(path).map_err(|source| SandboxError::step("open", path, source))?;
        }
        Ok(())
    }

    /// Makes the directories and the record. Nothing here waits, so nobody can give up half-way.
    fn launch(&self, spec: &SandboxSpec, options: &CreateOptions) -> Result<Arc<Instance>> {
        self.admit(spec, options)?;
        let id = options.id.clone().unwrap_or_default();
        let mut live = lock(&self.sandboxes.live);
        if live.contains_key(&id) {
            return Err(SandboxError::AlreadyExists { what: "sandbox", id: id.0 });
        }
        let directory = self.directory.join(format!("warren-host-{id}"));
        let instance =
            Instance::create(id.clone(), directory, spec, Arc::downgrade(&self.sandboxes))?;
        let instance = Arc::new(instance);
        *lock(&self.sandboxes.last_created) = Some(instance.capabilities.created_at);
        live.insert(id, Arc::clone(&instance));
        Ok(instance)
    }
}

#[async_trait]
impl IsolationBackend for HostBackend {
    fn name(&self) -> &str {
        NAME
    }

    async fn probe(&self) -> Result<BackendCapabilities, SandboxError> {
        Ok(BackendCapabilities {
            name: NAME.to_owned(),
            available_profiles: vec!["default".to_owned()],
            ..BackendCapabilities::default()
        })
    }

    async fn create_sandbox(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.create_sandbox_with(spec, &CreateOptions::default()).await
    }

    async fn create_sandbox_with(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
    ) -> Result<Box<dyn Sandbox>, SandboxError> {
        Ok(Box::new(HostSandbox(self.launch(spec, options)?)))
    }

    async fn list_sandboxes(&self) -> Result<Vec<SandboxId>, SandboxError> {
        let mut ids: Vec<_> =
            self.all().iter().filter(|it| it.is_alive()).map(|it| it.id.clone()).collect();
        ids.sort();
        Ok(ids)
    }

    async fn get_sandbox(&self, id: &SandboxId) -> Result<Option<Box<dyn Sandbox>>, SandboxError> {
        let found = lock(&self.sandboxes.live).get(id).cloned().filter(|it| it.is_alive());
        Ok(found.map(|instance| Box::new(HostSandbox(instance)) as Box<dyn Sandbox>))
    }

    async fn destroy_all(&self) -> Result<(), SandboxError> {
        let mut result = Ok(());
        for instance in self.all() {
            if let Err(error) = instance.destroy().await {
                result = Err(error);
            }
        }
        result
    }

    async fn health_check(&self) -> Result<BackendHealth, SandboxError> {
        let active = self.all().iter().filter(|it| it.is_alive()).count();
        Ok(BackendHealth {
            healthy: self.config.accept_no_isolation,
            active_sandboxes: u32::try_from(active).unwrap_or(u32::MAX),
            resource_utilization: 0.0,
            warnings: vec!["the host backend isolates nothing".to_owned()],
            last_sandbox_created: *lock(&self.sandboxes.last_created),
        })
    }
}

/// Where in its life a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Suspended,
    Ended,
}

/// What the calls on one sandbox share. The processes are under the same lock as the state, so that
/// no exec can start between stopping all and being stopped.
#[derive(Debug)]
struct Life {
    state: watch::Sender<State>,
    groups: HashSet<Pid>,
    cpu_time: Duration,
}

impl Life {
    fn state(&self) -> State {
        *self.state.borrow()
    }

    fn signal(&self, signal: Signal) {
        for group in &self.groups {
            // A group that is gone by itself needs no signal.
            let _ = kill_process_group(*group, signal);
        }
    }
}

/// One sandbox: its directory and its processes.
#[derive(Debug)]
struct Instance {
    id: SandboxId,
    directory: PathBuf,
    /// Where commands run that do not say, on the host.
    workdir: PathBuf,
    spec: SandboxSpec,
    capabilities: SandboxCapabilities,
    enforcement: Enforcement,
    started: Instant,
    life: Mutex<Life>,
    removed: tokio::sync::Mutex<bool>,
    /// Weak, or the two would keep each other, and with them the directory, for ever.
    registry: Weak<Registry>,
}

impl Instance {
    fn create(
        id: SandboxId,
        directory: PathBuf,
        spec: &SandboxSpec,
        registry: Weak<Registry>,
    ) -> Result<Self> {
        let private = directory.join("workspace");
        let given = spec.allowed_paths_ro.iter().chain(&spec.allowed_paths_rw);
        let given = given.chain(spec.bind_mounts.iter().map(|bind| &bind.target));
        let workdir = match given.into_iter().any(|path| spec.workdir.starts_with(path)) {
            true => spec.workdir.clone(),
            false => private.clone(),
        };
        let mut builder = fs::DirBuilder::new();
        // Plain mkdir refuses what is there, so nobody can have put a link in the way.
        let made = builder.mode(0o700).create(&directory);
        made.map_err(|source| SandboxError::step("create", &directory, source))?;
        if let Err(source) = builder.create(&private) {
            let _ = fs::remove_dir_all(&directory);
            return Err(SandboxError::step("create", private, source));
        }
        let limits = enforced(&spec.limits);
        Ok(Self {
            capabilities: SandboxCapabilities {
                sandbox_id: id.to_string(),
                backend: NAME.to_owned(),
                profile: spec.profile.clone(),
                can_write_filesystem: true,
                readable_paths: vec![PathBuf::from("/")],
                writable_paths: vec![PathBuf::from("/")],
                has_network: true,
                allowed_destinations: Vec::new(),
                limits: limits.clone(),
                syscall_filter_active: false,
                blocked_syscall_categories: Vec::new(),
                is_persistent: false,
                created_at: Utc::now(),
                time_remaining_ms: None,
            },
            enforcement: enforcement(&spec.limits, &limits),
            id,
            directory,
            workdir,
            spec: spec.clone(),
            started: Instant::now(),
            life: Mutex::new(Life {
                state: watch::Sender::new(State::Running),
                groups: HashSet::new(),
                cpu_time: Duration::ZERO,
            }),
            removed: tokio::sync::Mutex::new(false),
            registry,
        })
    }

    fn is_alive(&self) -> bool {
        lock(&self.life).state() != State::Ended
    }

    fn ended(&self) -> SandboxError {
        SandboxError::Ended { id: self.id.clone() }
    }

    /// Stops or continues every process, if the sandbox has not ended.
    fn turn(&self, state: State, signal: Signal) -> Result<()> {
        let life = lock(&self.life);
        if life.state() == State::Ended {
            return Err(self.ended());
        }
        if life.state() != state {
            life.signal(signal);
            life.state.send_replace(state);
        }
        Ok(())
    }

    async fn destroy(&self) -> Result<()> {
        {
            let life = lock(&self.life);
            life.state.send_replace(State::Ended);
            life.signal(Signal::KILL);
        }
        let mut removed = self.removed.lock().await;
        if !*removed {
            let directory = self.directory.clone();
            let result = tokio::task::spawn_blocking(move || remove(&directory)).await;
            match result {
                Ok(Ok(())) => *removed = true,
                Ok(Err(source)) => {
                    return Err(SandboxError::step("remove", &self.directory, source));
                }
                Err(error) => return Err(SandboxError::Internal { message: error.to_string() }),
            }
        }
        if let Some(registry) = self.registry.upgrade() {
            lock(&registry.live).remove(&self.id);
        }
        Ok(())
    }

    /// Finds a directory of the sandbox on the host.
    fn on_host(&self, inside: &Path) -> PathBuf {
        match inside.strip_prefix(&self.spec.workdir) {
            Ok(rest) => self.workdir.join(rest),
            Err(_) => inside.to_owned(),
        }
    }

    /// Starts the command in a process group of its own.
    fn spawn(&self, plan: &ExecPlan) -> Result<(Child, Group<'_>, watch::Receiver<State>)> {
        let workdir = self.on_host(&plan.workdir);
        let fault =
            |kind, source| SandboxError::Program { program: plan.program.clone(), kind, source };
        let mut life = lock(&self.life);
        match life.state() {
            State::Running => {}
            State::Suspended => return Err(SandboxError::Suspended { id: self.id.clone() }),
            State::Ended => return Err(self.ended()),
        }
        // Looked at beforehand because the errors of chdir and exec cannot be told apart after.
        fs::metadata(workdir.join(".")).map_err(|source| fault(ProgramFault::Workdir, source))?;
        let mut command = std::process::Command::new(&plan.program);
        command.args(&plan.args).env_clear().env("PATH", PATH).envs(&plan.env);
        command.current_dir(workdir).process_group(0);
        command.stdin(if plan.stdin.is_some() { Stdio::piped() } else { Stdio::null() });
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = tokio::process::Command::from(command).spawn();
        let child = child.map_err(|source| fault(program_fault(&source), source))?;
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| SandboxError::Internal {
            message: "a child that was just started has no process id".to_owned(),
        })?;
        life.groups.insert(pid);
        Ok((child, Group { instance: self, pid }, life.state.subscribe()))
    }

    /// Runs a command to its end.
    async fn run(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        output_tx: Option<mpsc::Sender<StreamOutput>>,
    ) -> Result<ExecReport> {
        let plan = ExecPlan::new(&self.spec, cmd, ctx)?;
        let started = Instant::now();
        let max_output = self.spec.limits.max_output_bytes;
        let mut run = Run {
            capture: Capture::new(max_output, ctx, output_tx.is_some()),
            output_tx,
            timer: Timer::new(plan.timeout),
        };
        let (mut child, group, state) = self.spawn(&plan)?;
        let exit = watch_exit(group.pid).map_err(|source| SandboxError::Step {
            step: "watch a child".to_owned(),
            path: None,
            source,
        })?;
        let cause = run.follow(&mut child, &group, exit, state, plan.stdin).await?;
        // Not reaped yet, so the number is still its own: nobody else can be read or hit by it.
        let cpu_time = cpu_time(group.pid);
        drop(group);
        let status = child.wait().await.map_err(|source| SandboxError::Step {
            step: "wait for a child".to_owned(),
            path: None,
            source,
        })?;
        lock(&self.life).cpu_time += cpu_time;
        let cause = match cause {
            Some(cause) => cause,
            None if !self.is_alive() && status.signal().is_some() => {
                ExecCause::KilledByPolicy { reason: "the sandbox was destroyed".to_owned() }
            }
            None => exit_cause(status),
        };
        run.finish(cause.exit_code()).await;
        let duration = started.elapsed();
        let usage = ResourceUsage {
            cpu_time_ms: millis(cpu_time),
            wall_time_ms: millis(duration),
            ..ResourceUsage::default()
        };
        let output = ExecOutput {
            stdout: run.capture.stdout,
            stderr: run.capture.stderr,
            duration,
            resource_usage: Some(usage),
            ..ExecOutput::default()
        };
        Ok(ExecReport::new(output, cause))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        lock(&self.life).signal(Signal::KILL);
        if !*self.removed.get_mut() {
            let _ = remove(&self.directory);
        }
    }
}

/// A process group that ends with its exec, whether that ran to its end or was dropped.
#[derive(Debug)]
struct Group<'a> {
    instance: &'a Instance,
    pid: Pid,
}

impl Group<'_> {
    fn kill(&self) {
        let _ = kill_process_group(self.pid, Signal::KILL);
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        // Under the lock: once it is off the list nobody signals a number that may be reused.
        let mut life = lock(&self.instance.life);
        self.kill();
        life.groups.remove(&self.pid);
    }
}

/// The running part of one exec.
#[derive(Debug)]
struct Run {
    capture: Capture,
    output_tx: Option<mpsc::Sender<StreamOutput>>,
    timer: Timer,
}

impl Run {
    /// Moves bytes until the command ends or has to be ended. Returns why it had to be.
    async fn follow(
        &mut self,
        child: &mut Child,
        group: &Group<'_>,
        exit: AsyncFd<OwnedFd>,
        mut state: watch::Receiver<State>,
        stdin: Option<Vec<u8>>,
    ) -> Result<Option<ExecCause>> {
        let mut stdout = child.stdout.take();
        let mut stderr = child.stderr.take();
        let mut input = child.stdin.take();
        let feed = async move {
            if let (Some(pipe), Some(bytes)) = (&mut input, stdin) {
                // A command that does not read to the end is free not to.
                let _ = pipe.write_all(&bytes).await;
            }
            drop(input);
        };
        tokio::pin!(feed);
        let mut fed = false;
        let (mut out, mut err) = (vec![0; 32 << 10], vec![0; 32 << 10]);
        let cause = loop {
            let full = self.capture.pending.len() >= MAX_PENDING;
            tokio::select! {
                biased; // A flood of output must not keep the clock from being looked at.
                () = self.timer.up() => break Some(ExecCause::TimedOut),
                Ok(()) = state.changed() => {
                    let stopped = *state.borrow_and_update() == State::Suspended;
                    self.timer.pause(stopped);
                }
                ready = exit.readable() => match ready {
                    Ok(_) => break None,
                    Err(source) => {
                        let step = "watch a child".to_owned();
                        return Err(SandboxError::Step { step, path: None, source });
                    }
                },
                sent = send_next(self.output_tx.as_ref(), &mut self.capture) => {
                    if !sent { self.output_tx = None; }
                }
                () = &mut feed, if !fed => fed = true,
                read = read_some(&mut stdout, &mut out), if !full => {
                    if self.capture.take(Channel::Stdout, &out[..read]) == Room::Exceeded {
                        break Some(ExecCause::OutputLimit);
                    }
                }
                read = read_some(&mut stderr, &mut err), if !full => {
                    if self.capture.take(Channel::Stderr, &err[..read]) == Room::Exceeded {
                        break Some(ExecCause::OutputLimit);
                    }
                }
            }
        };
        group.kill();
        let rest = async {
            while stdout.is_some() || stderr.is_some() {
                let (channel, bytes) = tokio::select! {
                    read = read_some(&mut stdout, &mut out) => (Channel::Stdout, &out[..read]),
                    read = read_some(&mut stderr, &mut err) => (Channel::Stderr, &err[..read]),
                };
                if self.capture.take(channel, bytes) == Room::Exceeded {
                    return true;
                }
            }
            false
        };
        let exceeded = tokio::time::timeout(DRAIN, rest).await.unwrap_or(false);
        let ended = exit.readable().await.map(drop);
        ended.map_err(|source| SandboxError::Step {
            step: "watch a child".to_owned(),
            path: None,
            source,
        })?;
        Ok(cause.or(exceeded.then_some(ExecCause::OutputLimit)))
    }

    /// Sends a streaming caller what is left, and the end.
    async fn finish(&mut self, code: i32) {
        let Some(output_tx) = self.output_tx.take() else { return };
        for piece in self.capture.pending.drain(..) {
            if output_tx.send(piece).await.is_err() {
                return;
            }
        }
        let _ = output_tx.send(StreamOutput::Exit { code }).await;
    }
}

/// Opens a descriptor that is readable once the process has ended, whether or not it was waited for.
fn watch_exit(pid: Pid) -> io::Result<AsyncFd<OwnedFd>> {
    let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
    #[expect(
        deprecated,
        reason = "unsound only for types that lie about their descriptor; an OwnedFd does not, and \
                  the replacement is unsafe to call"
    )]
    AsyncFd::new(pidfd)
}

/// Sends the next piece; never returns while there is none. Tells whether the receiver is there.
async fn send_next(output_tx: Option<&mpsc::Sender<StreamOutput>>, capture: &mut Capture) -> bool {
    let Some(output_tx) = output_tx else {
        capture.pending.clear();
        return std::future::pending().await;
    };
    if capture.pending.is_empty() {
        return std::future::pending().await;
    }
    // A permit first: a piece taken off the queue would be lost if this future were dropped.
    let Ok(permit) = output_tx.reserve().await else { return false };
    if let Some(piece) = capture.pending.pop_front() {
        permit.send(piece);
    }
    true
}

/// Reads what is there and drops the pipe at its end; never returns once that is done.
async fn read_some<R: AsyncRead + Unpin>(pipe: &mut Option<R>, buffer: &mut [u8]) -> usize {
    let Some(reader) = pipe else { return std::future::pending().await };
    match reader.read(buffer).await {
        Ok(0) | Err(_) => {
            *pipe = None;
            0
        }
        Ok(read) => read,
    }
}

/// What is left of an exec's time; it stands still while the sandbox is suspended.
#[derive(Debug)]
struct Timer {
    left: Option<Duration>,
    running_since: Option<Instant>,
}

impl Timer {
    fn new(left: Option<Duration>) -> Self {
        Self { left, running_since: Some(Instant::now()) }
    }

    fn pause(&mut self, stopped: bool) {
        if let (Some(left), Some(since)) = (&mut self.left, self.running_since) {
            *left = left.saturating_sub(since.elapsed());
        }
        self.running_since = (!stopped).then(Instant::now);
    }

    async fn up(&self) {
        match (self.left, self.running_since) {
            (Some(left), Some(since)) => {
                tokio::time::sleep(left.saturating_sub(since.elapsed())).await;
            }
            (None, _) | (_, None) => std::future::pending().await,
        }
    }
}

/// A handle on one sandbox of the host backend.
#[derive(Debug)]
struct HostSandbox(Arc<Instance>);

impl HostSandbox {
    fn unsupported(&self, feature: &str) -> SandboxError {
        if !self.0.is_alive() {
            return self.0.ended();
        }
        SandboxError::Unsupported {
            feature: feature.to_owned(),
            backend: NAME.to_owned(),
            hint: "choose a backend that has snapshots".to_owned(),
        }
    }
}

#[async_trait]
impl Sandbox for HostSandbox {
    fn id(&self) -> &SandboxId {
        &self.0.id
    }

    fn capabilities(&self) -> &SandboxCapabilities {
        &self.0.capabilities
    }

    async fn exec(&self, cmd: &Command, ctx: &ExecContext) -> Result<ExecOutput, SandboxError> {
        Ok(self.0.run(cmd, ctx, None).await?.output)
    }

    async fn exec_streaming(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        output_tx: mpsc::Sender<StreamOutput>,
    ) -> Result<ExecOutput, SandboxError> {
        Ok(self.0.run(cmd, ctx, Some(output_tx)).await?.output)
    }

    async fn exec_report(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
    ) -> Result<ExecReport, SandboxError> {
        self.0.run(cmd, ctx, None).await
    }

    fn receipt(&self) -> Receipt {
        Receipt::unpromised(self.id(), self.capabilities())
    }

    /// Tries what it does not promise: everything is let through that this process may do.
    async fn verify(&self, extent: Extent) -> Result<Receipt, SandboxError> {
        if extent == Extent::Creation {
            return Ok(self.receipt());
        }
        let (at, began, listening) = (Utc::now(), Instant::now(), Listening::start());
        let mut probe = Probe {
            hidden: Some(self.0.directory.to_string_lossy().into_owned()),
            namespaces: receipt::own_namespaces(),
            open_files: Some(256),
            write_bytes: Some(1 << 20),
            processes: (extent >= Extent::Pristine).then_some(8),
            memory_bytes: (extent >= Extent::Everything).then_some(24 << 20),
            ..Probe::default()
        };
        listening.be_named_in(&mut probe);
        let tried = tokio::task::spawn_blocking(move || receipt::try_bare(&probe)).await;
        let tried = tried.map_err(|error| SandboxError::Internal { message: error.to_string() })?;
        let mut tries = tried.map_err(|source| {
            let step = "try the walls".to_owned();
            SandboxError::Step { step, path: None, source }
        })?;
        listening.correct(&mut tries);
        let took = Some(began.elapsed());
        let attempt = Attempt { extent, at, took, tries, read_back: Vec::new(), at_creation: 0 };
        Ok(Receipt::new(self.id(), self.capabilities(), &Nothing, &attempt))
    }

    async fn is_alive(&self) -> bool {
        self.0.is_alive()
    }

    async fn suspend(&self) -> Result<(), SandboxError> {
        self.0.turn(State::Suspended, Signal::STOP)
    }

    async fn resume(&self) -> Result<(), SandboxError> {
        self.0.turn(State::Running, Signal::CONT)
    }

    async fn snapshot(&self, _name: &str) -> Result<String, SandboxError> {
        Err(self.unsupported("snapshots"))
    }

    async fn restore(&self, _snapshot_id: &str) -> Result<(), SandboxError> {
        Err(self.unsupported("snapshots"))
    }

    async fn destroy(&self) -> Result<(), SandboxError> {
        self.0.destroy().await
    }

    /// Its ports are the host's own: there is no wall between them.
    async fn connect(&self, port: u16) -> Result<PortStream, SandboxError> {
        match lock(&self.0.life).state() {
            State::Ended => return Err(self.0.ended()),
            State::Suspended => return Err(SandboxError::Suspended { id: self.0.id.clone() }),
            State::Running => {}
        }
        let places = [(Ipv4Addr::LOCALHOST, port).into(), (Ipv6Addr::LOCALHOST, port).into()];
        let stream = TcpStream::connect(&places[..] as &[SocketAddr]).await;
        let stream = stream.map_err(|source| SandboxError::PortClosed { port, source })?;
        Ok(PortStream::new(stream))
    }

    async fn resource_usage(&self) -> Result<ResourceUsage, SandboxError> {
        let life = lock(&self.0.life);
        if life.state() == State::Ended {
            return Err(self.0.ended());
        }
        Ok(ResourceUsage {
            cpu_time_ms: millis(life.cpu_time),
            wall_time_ms: millis(self.0.started.elapsed()),
            ..ResourceUsage::default()
        })
    }

    fn enforcement(&self) -> Enforcement {
        self.0.enforcement.clone()
    }
}

/// Leaves of the limits those that are held.
fn enforced(asked: &ResourceLimits) -> ResourceLimits {
    ResourceLimits {
        max_wall_time_ms: asked.max_wall_time_ms,
        max_output_bytes: asked.max_output_bytes,
        ..ResourceLimits::unlimited()
    }
}

fn enforcement(asked: &ResourceLimits, held: &ResourceLimits) -> Enforcement {
    let limits = ENFORCED.into_iter().filter_map(|limit| {
        let value = held.get(limit)?;
        Some(EnforcedLimit { limit, value, bound: Bound::Exact, by: "the parent".to_owned() })
    });
    let missing = Limit::ALL
        .into_iter()
        .filter(|limit| asked.get(*limit).is_some() && !ENFORCED.contains(limit));
    let mut warnings = vec!["nothing separates this sandbox from the host".to_owned()];
    warnings.extend(missing.map(|limit| format!("the limit `{limit}` is not enforced")));
    Enforcement { limits: limits.collect(), layers: Vec::new(), warnings }
}

fn exit_cause(status: ExitStatus) -> ExecCause {
    match (status.code(), status.signal()) {
        (Some(code), _) => ExecCause::Exited { code },
        (None, Some(signal)) => ExecCause::Signalled { signal },
        (None, None) => ExecCause::Lost,
    }
}

fn program_fault(error: &io::Error) -> ProgramFault {
    const ENOEXEC: i32 = rustix::io::Errno::NOEXEC.raw_os_error();
    const EAGAIN: i32 = rustix::io::Errno::AGAIN.raw_os_error();
    match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::NotFound | io::ErrorKind::NotADirectory, _) => ProgramFault::NotFound,
        (io::ErrorKind::PermissionDenied, _) | (_, Some(ENOEXEC)) => ProgramFault::NotExecutable,
        (_, Some(EAGAIN)) => ProgramFault::NoProcess,
        _ => ProgramFault::Other,
    }
}

/// Reads the CPU time of a child that has ended and was not waited for, with its own children's.
fn cpu_time(pid: Pid) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
    // The name may contain anything, so count from the parenthesis that closes it (proc_pid_stat(5)).
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks = after_name.split_whitespace().skip(11).take(4);
    let ticks = ticks.filter_map(|field| field.parse::<u64>().ok()).sum::<u64>();
    Duration::from_millis(ticks * 1_000 / rustix::param::clock_ticks_per_second().max(1))
}

/// Removes a directory that killed processes may still be writing to for an instant.
fn remove(directory: &Path) -> io::Result<()> {
    for _ in 0..20 {
        match fs::remove_dir_all(directory) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            result => return result,
        }
    }
    fs::remove_dir_all(directory)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Locks; a panic elsewhere leaves plain values behind that are as good as before.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
