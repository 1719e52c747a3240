//! A full backend with no kernel in it, for tests of everything above a backend.
//!
//! It can be told to fail or to stall at any [`Step`], counts what it makes and loses, and runs a
//! tiny shell: `true`, `false`, `echo`, `exit N`, `sleep SECONDS`, `cat`, `env`, `pwd`, `yes`, and
//! `sh -c` with a list of those, `;` between them, `'quotes'`, `$NAME` and `>&2`. Its files are one text,
//! which `write WORD` sets and `read` shows, and which is saved in real layers. Time is tokio's,
//! so that a paused clock makes it instant. It isolates nothing and runs nothing on the host.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use rustix::io::Errno;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use warren_init::protocol::{Said, Try};

use super::{Capture, Channel, ExecPlan, Room};
use crate::layers::{Held, Layers};
use crate::receipt::{Attempt, Walled};
use crate::{
    BackendCapabilities, BackendHealth, Base, Bound, Command, CreateOptions, EnforcedLimit,
    Enforcement, ExecCause, ExecContext, ExecOutput, ExecReport, Extent, IsolationBackend,
    IsolationLevel, Limit, PortStream, ProgramFault, Reach, Receipt, ResourceUsage, Result,
    Sandbox, SandboxCapabilities, SandboxError, SandboxId, SandboxSpec, StreamOutput,
};

/// A step that can be told to fail or to stall.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// [`IsolationBackend::probe`].
    Probe,
    /// [`IsolationBackend::create_sandbox`], before anything is made.
    Create,
    /// An exec of either kind, before the command starts.
    Exec,
    /// [`Sandbox::suspend`].
    Suspend,
    /// [`Sandbox::resume`].
    Resume,
    /// [`Sandbox::snapshot`].
    Snapshot,
    /// [`Sandbox::restore`].
    Restore,
    /// [`Sandbox::destroy`]; one that fails leaves the sandbox alive.
    Destroy,
    /// [`IsolationBackend::health_check`].
    Health,
    /// [`Sandbox::claim`].
    Claim,
    /// [`IsolationBackend::adopt`].
    Adopt,
    /// [`IsolationBackend::reclaim`].
    Reclaim,
    /// [`Sandbox::verify`]; one that fails finds the network open.
    Verify,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Probe => "probe the host",
            Self::Create => "create the sandbox",
            Self::Exec => "run the command",
            Self::Suspend => "suspend the sandbox",
            Self::Resume => "resume the sandbox",
            Self::Snapshot => "save the sandbox",
            Self::Restore => "restore the sandbox",
            Self::Destroy => "destroy the sandbox",
            Self::Health => "check the health",
            Self::Claim => "claim the sandbox",
            Self::Adopt => "take over the sandbox",
            Self::Reclaim => "remove the remains",
            Self::Verify => "try the walls",
        })
    }
}

/// Which passes of a step are meant, counted from when the order was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum When {
    /// Every one.
    Always,
    /// The n-th alone; 1 is the next.
    Nth(u64),
}

/// How many sandboxes and execs there were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sandboxes made.
    pub created: u64,
    /// Sandboxes destroyed.
    pub destroyed: u64,
    /// Sandboxes that died by themselves.
    pub crashed: u64,
    /// Sandboxes that live.
    pub live: u64,
    /// Execs begun.
    pub execs: u64,
    /// Execs that run.
    pub running: u64,
    /// Most sandboxes that ever lived at once.
    pub most_live: u64,
    /// Warm sandboxes that became somebody's.
    pub claimed: u64,
    /// Claims of a sandbox that was somebody's already, or in which a command had run.
    pub wrong_claims: u64,
}

/// What a scripted program does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scripted {
    /// How long it takes.
    pub delay: Duration,
    /// What it writes to stdout.
    pub stdout: Vec<u8>,
    /// What it writes to stderr.
    pub stderr: Vec<u8>,
    /// How it ends.
    pub cause: ExecCause,
}

impl Default for Scripted {
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            stdout: Vec::new(),
            stderr: Vec::new(),
            cause: ExecCause::Exited { code: 0 },
        }
    }
}

/// How sandboxes are named that nobody chose an id for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ids {
    /// `sbx-` and a random UUID.
    #[default]
    Random,
    /// `sbx-1`, `sbx-2` and so on.
    Sequential,
}

/// A backend with no kernel in it. Clones share everything.
#[derive(Debug, Clone)]
pub struct FakeBackend {
    name: Arc<str>,
    shared: Arc<Mutex<Shared>>,
    layers: Option<Layers>,
}

#[derive(Debug)]
struct Shared {
    capabilities: BackendCapabilities,
    level: Option<IsolationLevel>,
    ids: Ids,
    next_id: u64,
    orders: Vec<Order>,
    stalled: HashMap<Step, u64>,
    scripts: HashMap<String, Scripted>,
    /// Where connections to a port go.
    ports: HashMap<u16, SocketAddr>,
    live: BTreeMap<SandboxId, Arc<Instance>>,
    /// What is half-made, or was when its maker died.
    half_made: BTreeSet<SandboxId>,
    killed: bool,
    unclaimable: fn(&SandboxSpec) -> bool,
    /// What the next pauses are drawn from; steps take no time without.
    pace: Option<u64>,
    counts: Counts,
    last_created: Option<DateTime<Utc>>,
}

#[derive(Debug)]
struct Order {
    step: Step,
    when: When,
    passed: u64,
    action: Action,
}

#[derive(Debug, Clone)]
enum Action {
    Fail,
    Panic,
    Stall(watch::Receiver<bool>, Arc<watch::Sender<bool>>),
}

impl Default for FakeBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeBackend {
    /// Makes a backend called `fake` that claims to enforce everything.
    pub fn new() -> Self {
        Self::named("fake")
    }

    /// Makes one with another name, to have several.
    pub fn named(name: &str) -> Self {
        let capabilities = BackendCapabilities {
            name: name.to_owned(),
            filesystem_isolation: true,
            network_isolation: true,
            process_isolation: true,
            resource_limits: true,
            syscall_filtering: true,
            persistent_sandboxes: true,
            snapshots: true,
            max_concurrent_sandboxes: None,
            available_profiles: ["default", "strict", "permissive", "dev"]
                .map(str::to_owned)
                .to_vec(),
            platform_features: Vec::new(),
        };
        Self {
            name: name.into(),
            shared: Arc::new(Mutex::new(Shared {
                capabilities,
                level: Some(IsolationLevel::Namespace),
                ids: Ids::default(),
                next_id: 0,
                orders: Vec::new(),
                stalled: HashMap::new(),
                scripts: HashMap::new(),
                ports: HashMap::new(),
                live: BTreeMap::new(),
                half_made: BTreeSet::new(),
                killed: false,
                unclaimable: |_| false,
                pace: None,
                counts: Counts::default(),
                last_created: None,
            })),
            layers: None,
        }
    }

    /// Has it keep what its sandboxes write, where others can stand on it.
    pub fn with_layers(self, layers: Layers) -> Self {
        Self { layers: Some(layers), ..self }
    }

    /// Changes what it claims to enforce, for sandboxes made from now on.
    pub fn set_capabilities(&self, change: impl FnOnce(&mut BackendCapabilities)) {
        change(&mut lock(&self.shared).capabilities);
    }

    /// Sets which rung of the ladder it claims to be; `namespace` unless told.
    pub fn set_level(&self, level: Option<IsolationLevel>) {
        lock(&self.shared).level = level;
    }

    /// Sets how sandboxes are named that nobody chose an id for.
    pub fn set_ids(&self, ids: Ids) {
        lock(&self.shared).ids = ids;
    }

    /// Tells a step to fail.
    pub fn fail(&self, step: Step, when: When) {
        lock(&self.shared).orders.push(Order { step, when, passed: 0, action: Action::Fail });
    }

    /// Tells a step to panic.
    pub fn panic(&self, step: Step, when: When) {
        lock(&self.shared).orders.push(Order { step, when, passed: 0, action: Action::Panic });
    }

    /// Tells a step to wait until it is [released](Self::release).
    pub fn stall(&self, step: Step, when: When) {
        let (release, released) = watch::channel(false);
        let action = Action::Stall(released, Arc::new(release));
        lock(&self.shared).orders.push(Order { step, when, passed: 0, action });
    }

    /// Lets go whoever waits at a step, and tells it to stall no more.
    pub fn release(&self, step: Step) {
        lock(&self.shared).orders.retain(|order| match &order.action {
            Action::Stall(_, release) if order.step == step => {
                release.send_replace(true);
                false
            }
            Action::Stall(..) | Action::Fail | Action::Panic => true,
        });
    }

    /// Tells a step to fail or panic no more.
    pub fn heal(&self, step: Step) {
        let fails = |order: &Order| {
            order.step == step && matches!(order.action, Action::Fail | Action::Panic)
        };
        lock(&self.shared).orders.retain(|order| !fails(order));
    }

    /// Returns how many calls wait at a step.
    pub fn stalled(&self, step: Step) -> u64 {
        lock(&self.shared).stalled.get(&step).copied().unwrap_or(0)
    }

    /// Sets what a program does instead of what the tiny shell would.
    pub fn script(&self, program: &str, scripted: Scripted) {
        lock(&self.shared).scripts.insert(program.to_owned(), scripted);
    }

    /// Sets where connections to a port of every sandbox go; all other ports are closed.
    pub fn open_port(&self, port: u16, to: SocketAddr) {
        lock(&self.shared).ports.insert(port, to);
    }

    /// Lets a sandbox die by itself, as if its init had crashed. Tells whether it lived.
    pub fn crash(&self, id: &SandboxId) -> bool {
        let mut shared = lock(&self.shared);
        let Some(instance) = shared.live.remove(id) else { return false };
        instance.state.send_replace(State::Ended);
        shared.counts.crashed += 1;
        true
    }

    /// Sets which specs a warm sandbox cannot become.
    pub fn set_unclaimable(&self, unclaimable: fn(&SandboxSpec) -> bool) {
        lock(&self.shared).unclaimable = unclaimable;
    }

    /// Has each step take its time: a few turns of the scheduler or milliseconds, the same for the
    /// same seed, before it does or fails to do what it is to do.
    pub fn set_pace(&self, seed: u64) {
        // A generator of this kind stays at zero for ever.
        lock(&self.shared).pace = Some(seed.max(1));
    }

    /// Kills the process that uses the backend, as `kill -9` would: what is given up from now on is
    /// left half-done, until [`restart`](Self::restart).
    pub fn kill(&self) {
        lock(&self.shared).killed = true;
    }

    /// Begins the life of the next process: sandboxes that were not to outlive theirs are gone.
    pub fn restart(&self) {
        let mut shared = lock(&self.shared);
        shared.killed = false;
        shared.live.retain(|_, instance| {
            if !instance.persistent {
                instance.state.send_replace(State::Ended);
            }
            instance.persistent
        });
    }

    /// Returns how many sandboxes and execs there were.
    pub fn counts(&self) -> Counts {
        let shared = lock(&self.shared);
        Counts { live: shared.live.len() as u64, ..shared.counts }
    }

    /// Passes a step: waits if it is to stall, then fails if it is to fail.
    async fn pass(&self, step: Step) -> Result<()> {
        let pause = lock(&self.shared).pause();
        match pause {
            Pause::None => {}
            Pause::Turns(turns) => {
                for _ in 0..turns {
                    tokio::task::yield_now().await;
                }
            }
            Pause::Time(time) => tokio::time::sleep(time).await,
        }
        let due = lock(&self.shared).due(step);
        let mut fails = false;
        for action in due {
            match action {
                Action::Fail => fails = true,
                Action::Panic => panic!("the fake backend was told to panic: cannot {step}"),
                Action::Stall(mut released, _release) => {
                    let _waiting = Waiting::new(self, step);
                    // The sender is held above, so that waiting ends by a release alone.
                    let _ = released.wait_for(|released| *released).await;
                }
            }
        }
        if fails {
            return Err(SandboxError::Step {
                step: step.to_string(),
                path: None,
                source: std::io::Error::other("the fake backend was told to fail"),
            });
        }
        Ok(())
    }

    fn handle(&self, instance: Arc<Instance>) -> Box<dyn Sandbox> {
        Box::new(FakeSandbox { backend: self.clone(), instance })
    }
}

/// How long a step takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pause {
    None,
    Turns(u64),
    Time(Duration),
}

impl Shared {
    /// Draws how long the next step takes.
    fn pause(&mut self) -> Pause {
        let Some(dice) = &mut self.pace else { return Pause::None };
        *dice ^= *dice << 13;
        *dice ^= *dice >> 7;
        *dice ^= *dice << 17;
        let length = (*dice >> 16) % 5;
        match (*dice >> 8) % 3 {
            0 => Pause::None,
            1 => Pause::Turns(length),
            _ => Pause::Time(Duration::from_millis(length)),
        }
    }

    /// Returns what is to happen at this pass of a step, and uses up the orders for it.
    fn due(&mut self, step: Step) -> Vec<Action> {
        let mut due = Vec::new();
        for order in self.orders.iter_mut().filter(|order| order.step == step) {
            order.passed += 1;
            match order.when {
                When::Always => due.push(order.action.clone()),
                When::Nth(n) if n == order.passed => due.push(order.action.clone()),
                When::Nth(_) => {}
            }
        }
        // A stall that is waited for stays, so that it can be released.
        self.orders.retain(|order| match (order.when, &order.action) {
            (When::Nth(n), Action::Fail | Action::Panic) => order.passed < n,
            (When::Nth(_), Action::Stall(..)) | (When::Always, _) => true,
        });
        due
    }

    fn next_id(&mut self) -> SandboxId {
        match self.ids {
            Ids::Random => SandboxId::new(),
            Ids::Sequential => {
                self.next_id += 1;
                SandboxId(format!("sbx-{}", self.next_id))
            }
        }
    }

    /// Makes the sandbox. Nothing waits from here to the handle, so nobody can give up half-way.
    fn insert(&mut self, spec: &SandboxSpec, options: &CreateOptions) -> Result<Arc<Instance>> {
        let id = options.id.clone().unwrap_or_else(|| self.next_id());
        if self.live.contains_key(&id) {
            return Err(SandboxError::AlreadyExists { what: "sandbox", id: id.0 });
        }
        let now = Utc::now();
        let instance = Arc::new(Instance::new(id.clone(), &self.capabilities, spec, options, now));
        self.live.insert(id, Arc::clone(&instance));
        self.counts.created += 1;
        self.counts.most_live = self.counts.most_live.max(self.live.len() as u64);
        self.last_created = Some(now);
        Ok(instance)
    }
}

/// What a creation has on the host until it is done or given up; one that is killed leaves it.
struct HalfMade<'a> {
    backend: &'a FakeBackend,
    id: Option<SandboxId>,
}

impl<'a> HalfMade<'a> {
    fn new(backend: &'a FakeBackend, id: Option<SandboxId>) -> Self {
        lock(&backend.shared).half_made.extend(id.clone());
        Self { backend, id }
    }
}

impl Drop for HalfMade<'_> {
    fn drop(&mut self) {
        let mut shared = lock(&self.backend.shared);
        if let Some(id) = &self.id
            && !shared.killed
        {
            shared.half_made.remove(id);
        }
    }
}

/// Counts a call that waits at a step, for as long as it does.
struct Waiting<'a> {
    backend: &'a FakeBackend,
    step: Step,
}

impl<'a> Waiting<'a> {
    fn new(backend: &'a FakeBackend, step: Step) -> Self {
        *lock(&backend.shared).stalled.entry(step).or_default() += 1;
        Self { backend, step }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        *lock(&self.backend.shared).stalled.entry(self.step).or_insert(1) -= 1;
    }
}

#[async_trait]
impl IsolationBackend for FakeBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn level(&self) -> Option<IsolationLevel> {
        lock(&self.shared).level
    }

    async fn probe(&self) -> Result<BackendCapabilities, SandboxError> {
        self.pass(Step::Probe).await?;
        Ok(lock(&self.shared).capabilities.clone())
    }

    fn layers(&self) -> Option<&Layers> {
        self.layers.as_ref()
    }

    async fn create_sandbox(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        self.create_sandbox_with(spec, &CreateOptions::default()).await
    }

    async fn create_sandbox_with(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
    ) -> Result<Box<dyn Sandbox>, SandboxError> {
        spec.validate()?;
        options.validate()?;
        let claims = lock(&self.shared).capabilities.clone();
        if !claims.available_profiles.contains(&spec.profile) {
            return Err(SandboxError::invalid(
                "profile",
                format!("no profile is called `{}`", spec.profile),
                format!("the profiles are {}", claims.available_profiles.join(", ")),
            ));
        }
        if let Some(limit) = options.required(spec).first().copied()
            && !claims.resource_limits
        {
            return Err(SandboxError::LimitNotEnforceable {
                limit,
                reason: "the fake backend was told that it has no limits".to_owned(),
                hint: format!("accept a sandbox without it: --accept-missing {limit}"),
            });
        }
        let ground = self.read(&options.base)?;
        let _half_made = HalfMade::new(self, options.id.clone());
        self.pass(Step::Create).await?;
        let instance = lock(&self.shared).insert(spec, options)?;
        *lock(&instance.ground) = ground;
        Ok(self.handle(instance))
    }

    async fn list_sandboxes(&self) -> Result<Vec<SandboxId>, SandboxError> {
        Ok(lock(&self.shared).live.keys().cloned().collect())
    }

    async fn get_sandbox(&self, id: &SandboxId) -> Result<Option<Box<dyn Sandbox>>, SandboxError> {
        let found = lock(&self.shared).live.get(id).cloned();
        Ok(found.map(|instance| self.handle(instance)))
    }

    async fn destroy_all(&self) -> Result<(), SandboxError> {
        let all: Vec<_> = lock(&self.shared).live.values().cloned().collect();
        let mut result = Ok(());
        for instance in all {
            if let Err(error) = self.handle(instance).destroy().await {
                result = Err(error);
            }
        }
        result
    }

    async fn health_check(&self) -> Result<BackendHealth, SandboxError> {
        self.pass(Step::Health).await?;
        let shared = lock(&self.shared);
        Ok(BackendHealth {
            healthy: true,
            active_sandboxes: u32::try_from(shared.live.len()).unwrap_or(u32::MAX),
            resource_utilization: 0.0,
            warnings: Vec::new(),
            last_sandbox_created: shared.last_created,
        })
    }

    async fn adopt(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        anchor: &str,
    ) -> Result<Option<Box<dyn Sandbox>>, SandboxError> {
        self.pass(Step::Adopt).await?;
        let found = lock(&self.shared).live.get(id).cloned();
        let found = found.filter(|found| found.anchor().as_deref() == Some(anchor));
        if let Some(found) = &found
            && found.spec != *spec
        {
            let message = format!("`{id}` is not what its record says");
            return Err(SandboxError::Internal { message });
        }
        Ok(found.map(|instance| self.handle(instance)))
    }

    async fn reclaim(&self, id: &SandboxId) -> Result<(), SandboxError> {
        self.pass(Step::Reclaim).await?;
        let mut shared = lock(&self.shared);
        shared.half_made.remove(id);
        if let Some(instance) = shared.live.remove(id) {
            instance.state.send_replace(State::Ended);
            lock(&instance.ground).held = None;
            shared.counts.destroyed += 1;
        }
        Ok(())
    }

    async fn remains(&self) -> Result<Vec<SandboxId>, SandboxError> {
        let shared = lock(&self.shared);
        let all: BTreeSet<_> = shared.live.keys().chain(&shared.half_made).cloned().collect();
        Ok(all.into_iter().collect())
    }
}

/// Where in its life a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Suspended,
    Ended,
}

/// What a sandbox stands on, and what it wrote.
#[derive(Debug, Clone, Default)]
struct Ground {
    base: Base,
    text: String,
    /// How often it was made anew.
    life: u64,
    held: Option<Arc<Held>>,
}

#[derive(Debug)]
struct Instance {
    id: SandboxId,
    spec: SandboxSpec,
    capabilities: SandboxCapabilities,
    enforcement: Enforcement,
    snapshots: bool,
    /// The ids and the names of what was saved of it.
    saved: Mutex<Vec<(String, String)>>,
    ground: Mutex<Ground>,
    reach: Mutex<Reach>,
    started: Instant,
    state: watch::Sender<State>,
    persistent: bool,
    /// Whether it is as it was made: nobody has claimed it, and no command has run in it.
    pristine: Mutex<bool>,
}

impl Instance {
    fn new(
        id: SandboxId,
        claims: &BackendCapabilities,
        spec: &SandboxSpec,
        options: &CreateOptions,
        created_at: DateTime<Utc>,
    ) -> Self {
        let mut writable = vec![spec.workdir.clone()];
        writable.extend(spec.allowed_paths_rw.iter().cloned());
        let written = |bind: &&crate::BindMount| !bind.readonly;
        writable.extend(spec.bind_mounts.iter().filter(written).map(|bind| bind.target.clone()));
        let mut readable = writable.clone();
        readable.extend(spec.allowed_paths_ro.iter().cloned());
        let read = |bind: &&crate::BindMount| bind.readonly;
        readable.extend(spec.bind_mounts.iter().filter(read).map(|bind| bind.target.clone()));
        Self {
            capabilities: SandboxCapabilities {
                sandbox_id: id.to_string(),
                backend: claims.name.clone(),
                profile: spec.profile.clone(),
                can_write_filesystem: true,
                readable_paths: readable,
                writable_paths: writable,
                has_network: spec.network_enabled || !claims.network_isolation,
                allowed_destinations: spec.allowed_network.clone(),
                limits: spec.limits.clone(),
                syscall_filter_active: claims.syscall_filtering,
                blocked_syscall_categories: Vec::new(),
                is_persistent: claims.persistent_sandboxes,
                created_at,
                time_remaining_ms: None,
            },
            enforcement: receipt(claims, spec, options),
            id,
            spec: spec.clone(),
            snapshots: claims.snapshots,
            saved: Mutex::default(),
            ground: Mutex::default(),
            reach: Mutex::default(),
            started: Instant::now(),
            state: watch::Sender::new(State::Running),
            persistent: options.persistent,
            pristine: Mutex::new(true),
        }
    }

    fn anchor(&self) -> Option<String> {
        let life = lock(&self.ground).life;
        self.persistent.then(|| format!("fake:{}:{life}", self.id))
    }

    fn check_alive(&self) -> Result<State> {
        match *self.state.borrow() {
            State::Ended => Err(SandboxError::Ended { id: self.id.clone() }),
            state @ (State::Running | State::Suspended) => Ok(state),
        }
    }

    fn turn(&self, state: State) -> Result<()> {
        self.check_alive()?;
        self.state.send_if_modified(|now| {
            let changes = *now != state && *now != State::Ended;
            if changes {
                *now = state;
            }
            changes
        });
        self.check_alive().map(drop)
    }
}

fn receipt(
    claims: &BackendCapabilities,
    spec: &SandboxSpec,
    options: &CreateOptions,
) -> Enforcement {
    if !claims.resource_limits {
        let warnings = vec!["no limit is enforced".to_owned()];
        return Enforcement { warnings, ..Enforcement::default() };
    }
    let quota = options.cpu_quota_millis.map(u64::from);
    let limits = Limit::ALL.into_iter().filter_map(|limit| {
        let value = if limit == Limit::CpuQuota { quota } else { spec.limits.get(limit) };
        Some(EnforcedLimit { limit, value: value?, bound: Bound::Exact, by: "fake".to_owned() })
    });
    Enforcement { limits: limits.collect(), ..Enforcement::default() }
}

/// A handle on one sandbox of the fake backend.
#[derive(Debug)]
struct FakeSandbox {
    backend: FakeBackend,
    instance: Arc<Instance>,
}

impl FakeSandbox {
    async fn run(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        output_tx: Option<mpsc::Sender<StreamOutput>>,
    ) -> Result<ExecReport> {
        let instance = &self.instance;
        let plan = ExecPlan::new(&instance.spec, cmd, ctx)?;
        self.check_running()?;
        self.backend.pass(Step::Exec).await?;
        self.check_running()?;
        let script = self.parse(&plan)?;
        *lock(&instance.pristine) = false;
        let _running = Running::new(&self.backend);
        let started = Instant::now();
        let max = instance.spec.limits.max_output_bytes;
        let mut shell = Shell {
            plan: &plan,
            capture: Capture::new(max, ctx, output_tx.is_some()),
            output_tx,
            state: instance.state.subscribe(),
            ground: &instance.ground,
            left: plan.timeout.unwrap_or(Duration::MAX),
        };
        let cause = match shell.run(script).await {
            Ok(code) => ExecCause::Exited { code },
            Err(cause) => cause,
        };
        if let Some(output_tx) = shell.output_tx {
            let _ = output_tx.send(StreamOutput::Exit { code: cause.exit_code() }).await;
        }
        let duration = started.elapsed();
        let wall_time_ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let output = ExecOutput {
            stdout: shell.capture.stdout,
            stderr: shell.capture.stderr,
            duration,
            resource_usage: Some(ResourceUsage { wall_time_ms, ..ResourceUsage::default() }),
            ..ExecOutput::default()
        };
        Ok(ExecReport::new(output, cause))
    }

    fn check_running(&self) -> Result<()> {
        match self.instance.check_alive()? {
            State::Suspended => Err(SandboxError::Suspended { id: self.instance.id.clone() }),
            State::Running | State::Ended => Ok(()),
        }
    }

    /// Reads what is to be done, before any of it is done.
    fn parse(&self, plan: &ExecPlan) -> Result<Vec<Statement>> {
        if let Some(scripted) = lock(&self.backend.shared).scripts.get(&plan.program) {
            return Ok(vec![Statement {
                action: Do::Scripted(scripted.clone()),
                to: Channel::Stdout,
            }]);
        }
        let not_found = |program: &str| SandboxError::Program {
            program: program.to_owned(),
            kind: ProgramFault::NotFound,
            source: std::io::Error::from(std::io::ErrorKind::NotFound),
        };
        let base = plan.program.rsplit('/').next().unwrap_or_default();
        match (base, plan.args.as_slice()) {
            ("sh", [flag, script, ..]) if flag == "-c" => Ok(split(script, plan)),
            _ => {
                let words = std::iter::once(base).chain(plan.args.iter().map(String::as_str));
                let action = Do::parse(&words.map(str::to_owned).collect::<Vec<_>>());
                let action = action.ok_or_else(|| not_found(&plan.program))?;
                Ok(vec![Statement { action, to: Channel::Stdout }])
            }
        }
    }
}

/// Counts an exec that runs, for as long as it does.
struct Running<'a>(&'a FakeBackend);

impl<'a> Running<'a> {
    fn new(backend: &'a FakeBackend) -> Self {
        let mut shared = lock(&backend.shared);
        shared.counts.execs += 1;
        shared.counts.running += 1;
        Self(backend)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        lock(&self.0.shared).counts.running -= 1;
    }
}

/// One command of the tiny shell.
#[derive(Debug)]
struct Statement {
    action: Do,
    to: Channel,
}

#[derive(Debug)]
enum Do {
    Write(Vec<u8>),
    Exit(i32),
    Fail,
    Sleep(Duration),
    Cat,
    Env,
    Pwd,
    Yes,
    Save(String),
    Show,
    Unknown(String),
    Scripted(Scripted),
}

impl Do {
    fn parse(words: &[String]) -> Option<Self> {
        let (program, args) = words.split_first()?;
        Some(match program.as_str() {
            "true" | ":" => Self::Write(Vec::new()),
            "false" => Self::Fail,
            "echo" => Self::Write(format!("{}\n", args.join(" ")).into_bytes()),
            "exit" => Self::Exit(args.first().and_then(|code| code.parse().ok()).unwrap_or(0)),
            "sleep" => Self::Sleep(parse_sleep(args.first()?)?),
            "cat" => Self::Cat,
            "env" => Self::Env,
            "pwd" => Self::Pwd,
            "yes" => Self::Yes,
            "write" => Self::Save(args.join(" ")),
            "read" => Self::Show,
            _ => return None,
        })
    }
}

fn parse_sleep(text: &str) -> Option<Duration> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 0.001),
        None => (text, 1.0),
    };
    Duration::try_from_secs_f64(number.parse::<f64>().ok()? * unit).ok()
}

/// Splits a script into statements: `;` and newlines between them, `'quotes'`, `$NAME`, `>&2`.
fn split(script: &str, plan: &ExecPlan) -> Vec<Statement> {
    let mut statements = Vec::new();
    for line in script.split([';', '\n']) {
        let mut to = Channel::Stdout;
        let mut words = Vec::new();
        for word in line.split_whitespace() {
            if word == ">&2" {
                to = Channel::Stderr;
            } else if let Some(plain) = word.strip_prefix('\'').and_then(|w| w.strip_suffix('\'')) {
                words.push(plain.to_owned());
            } else if let Some(name) = word.strip_prefix('$') {
                words.push(plan.env.get(name).cloned().unwrap_or_default());
            } else {
                words.push(word.to_owned());
            }
        }
        if let Some(program) = words.first() {
            let action = Do::parse(&words).unwrap_or_else(|| Do::Unknown(program.clone()));
            statements.push(Statement { action, to });
        }
    }
    statements
}

/// One run of the tiny shell.
struct Shell<'a> {
    plan: &'a ExecPlan,
    capture: Capture,
    output_tx: Option<mpsc::Sender<StreamOutput>>,
    state: watch::Receiver<State>,
    ground: &'a Mutex<Ground>,
    /// What is left of its time; it stands still while the sandbox is suspended.
    left: Duration,
}

impl Shell<'_> {
    /// Runs the statements and returns the exit code, or why it had to end.
    async fn run(&mut self, script: Vec<Statement>) -> Result<i32, ExecCause> {
        let mut code = 0;
        for Statement { action, to } in script {
            // One turn of the scheduler each, so that a script never hogs the thread.
            self.sleep(Duration::ZERO).await?;
            code = 0;
            match action {
                Do::Write(bytes) => self.write(to, &bytes).await?,
                Do::Exit(code) => return Ok(code),
                Do::Save(text) => lock(self.ground).text = text,
                Do::Show => {
                    let text = format!("{}\n", lock(self.ground).text);
                    self.write(to, text.as_bytes()).await?;
                }
                Do::Fail => code = 1,
                Do::Sleep(time) => self.sleep(time).await?,
                Do::Cat => {
                    let stdin = self.plan.stdin.clone().unwrap_or_default();
                    self.write(to, &stdin).await?;
                }
                Do::Env => {
                    let env = self.plan.env.iter().map(|(name, value)| format!("{name}={value}\n"));
                    let env = env.collect::<String>();
                    self.write(to, env.as_bytes()).await?;
                }
                Do::Pwd => {
                    let workdir = format!("{}\n", self.plan.workdir.display());
                    self.write(to, workdir.as_bytes()).await?;
                }
                Do::Yes => loop {
                    self.write(to, &b"y\n".repeat(4_096)).await?;
                    self.sleep(Duration::from_millis(1)).await?;
                },
                Do::Unknown(program) => {
                    let complaint = format!("sh: {program}: not found\n");
                    self.write(Channel::Stderr, complaint.as_bytes()).await?;
                    code = 127;
                }
                Do::Scripted(scripted) => {
                    self.sleep(scripted.delay).await?;
                    self.write(Channel::Stdout, &scripted.stdout).await?;
                    self.write(Channel::Stderr, &scripted.stderr).await?;
                    match scripted.cause {
                        ExecCause::Exited { code: own } => code = own,
                        cause => return Err(cause),
                    }
                }
            }
        }
        Ok(code)
    }

    async fn write(&mut self, to: Channel, bytes: &[u8]) -> Result<(), ExecCause> {
        let room = self.capture.take(to, bytes);
        while let Some(piece) = self.capture.pending.pop_front() {
            if let Some(output_tx) = &self.output_tx
                && output_tx.send(piece).await.is_err()
            {
                self.output_tx = None;
            }
        }
        match room {
            Room::Left => Ok(()),
            Room::Exceeded => Err(ExecCause::OutputLimit),
        }
    }

    /// Lets time pass that the sandbox lives through: none passes while it is suspended.
    async fn sleep(&mut self, mut time: Duration) -> Result<(), ExecCause> {
        loop {
            let state = *self.state.borrow_and_update();
            match state {
                State::Running => {}
                State::Suspended => {
                    // The instance holds the sender for as long as this runs.
                    let _ = self.state.changed().await;
                    continue;
                }
                State::Ended => {
                    let reason = "the sandbox was destroyed".to_owned();
                    return Err(ExecCause::KilledByPolicy { reason });
                }
            }
            let began = Instant::now();
            let due = tokio::select! {
                () = tokio::time::sleep(time.min(self.left)) => true,
                _ = self.state.changed() => false,
            };
            let passed = began.elapsed();
            let out_of_time = due && self.left < time;
            self.left = self.left.saturating_sub(passed);
            time = time.saturating_sub(passed);
            if out_of_time || self.left.is_zero() {
                return Err(ExecCause::TimedOut);
            }
            if due {
                return Ok(());
            }
        }
    }
}

#[async_trait]
impl Sandbox for FakeSandbox {
    fn id(&self) -> &SandboxId {
        &self.instance.id
    }

    fn capabilities(&self) -> &SandboxCapabilities {
        &self.instance.capabilities
    }

    async fn exec(&self, cmd: &Command, ctx: &ExecContext) -> Result<ExecOutput, SandboxError> {
        Ok(self.run(cmd, ctx, None).await?.output)
    }

    async fn exec_streaming(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        output_tx: mpsc::Sender<StreamOutput>,
    ) -> Result<ExecOutput, SandboxError> {
        Ok(self.run(cmd, ctx, Some(output_tx)).await?.output)
    }

    async fn exec_report(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
    ) -> Result<ExecReport, SandboxError> {
        self.run(cmd, ctx, None).await
    }

    async fn is_alive(&self) -> bool {
        self.instance.check_alive().is_ok()
    }

    async fn verify(&self, extent: Extent) -> Result<Receipt, SandboxError> {
        self.instance.check_alive()?;
        let errno = match self.backend.pass(Step::Verify).await {
            Ok(()) => Errno::NETUNREACH.raw_os_error(),
            Err(_) => 0,
        };
        let tries = vec![Try { name: "tcp to 192.0.2.1".to_owned(), said: Said::Errno(errno) }];
        let (at, took, read_back) = (Utc::now(), None, Vec::new());
        let attempt = Attempt { extent, at, took, tries, read_back, at_creation: 0 };
        let walled = Walled { namespaces: true, blocked: &[], limits: &[] };
        Ok(Receipt::new(self.id(), self.capabilities(), &walled, &attempt))
    }

    async fn suspend(&self) -> Result<(), SandboxError> {
        self.instance.check_alive()?;
        self.backend.pass(Step::Suspend).await?;
        self.instance.turn(State::Suspended)
    }

    async fn suspend_to_disk(&self) -> Result<(), SandboxError> {
        self.suspend().await
    }

    async fn resume(&self) -> Result<(), SandboxError> {
        self.instance.check_alive()?;
        self.backend.pass(Step::Resume).await?;
        self.instance.turn(State::Running)
    }

    async fn snapshot(&self, name: &str) -> Result<String, SandboxError> {
        self.check_snapshots()?;
        self.backend.pass(Step::Snapshot).await?;
        let mut saved = lock(&self.instance.saved);
        if !name.is_empty() && saved.iter().any(|(_, taken)| taken == name) {
            return Err(SandboxError::AlreadyExists { what: "snapshot", id: name.to_owned() });
        }
        let id = format!("snap-{}-{}-{name}", self.instance.id, saved.len() + 1);
        saved.push((id.clone(), name.to_owned()));
        Ok(id)
    }

    async fn restore(&self, snapshot_id: &str) -> Result<(), SandboxError> {
        self.check_snapshots()?;
        if !lock(&self.instance.saved).iter().any(|(saved, _)| saved == snapshot_id) {
            return Err(SandboxError::NotFound { what: "snapshot", id: snapshot_id.to_owned() });
        }
        self.backend.pass(Step::Restore).await
    }

    async fn destroy(&self) -> Result<(), SandboxError> {
        if self.instance.check_alive().is_err() {
            return Ok(());
        }
        self.backend.pass(Step::Destroy).await?;
        let mut shared = lock(&self.backend.shared);
        // Somebody else may have come first while this waited.
        if self.instance.state.send_replace(State::Ended) != State::Ended {
            lock(&self.instance.ground).held = None;
            shared.live.remove(&self.instance.id);
            shared.counts.destroyed += 1;
        }
        Ok(())
    }

    async fn connect(&self, port: u16) -> Result<PortStream, SandboxError> {
        self.check_running()?;
        let to = lock(&self.backend.shared).ports.get(&port).copied();
        let connected = match to {
            Some(to) => TcpStream::connect(to).await,
            None => Err(std::io::ErrorKind::ConnectionRefused.into()),
        };
        let stream = connected.map_err(|source| SandboxError::PortClosed { port, source })?;
        Ok(PortStream::new(stream))
    }

    async fn resource_usage(&self) -> Result<ResourceUsage, SandboxError> {
        self.instance.check_alive()?;
        let wall = self.instance.started.elapsed().as_millis();
        let wall_time_ms = u64::try_from(wall).unwrap_or(u64::MAX);
        Ok(ResourceUsage { wall_time_ms, ..ResourceUsage::default() })
    }

    /// Makes it what the spec asks for. Whoever claims what is not pristine is counted and refused.
    async fn claim(&self, spec: &SandboxSpec) -> Result<Option<Arc<dyn Sandbox>>, SandboxError> {
        spec.validate()?;
        self.instance.check_alive()?;
        self.backend.pass(Step::Claim).await?;
        self.instance.check_alive()?;
        let mut shared = lock(&self.backend.shared);
        if !*lock(&self.instance.pristine) {
            shared.counts.wrong_claims += 1;
            let message = format!("`{}` is not pristine", self.instance.id);
            return Err(SandboxError::Internal { message });
        }
        if spec.profile != self.instance.spec.profile || (shared.unclaimable)(spec) {
            return Ok(None);
        }
        let id = self.instance.id.clone();
        let options =
            CreateOptions { persistent: self.instance.persistent, ..CreateOptions::default() };
        let now = Utc::now();
        let claimed = Instance::new(id.clone(), &shared.capabilities, spec, &options, now);
        *lock(&claimed.pristine) = false;
        let claimed = Arc::new(claimed);
        // From here on there is one handle on it: the old one is good for nothing.
        self.instance.state.send_replace(State::Ended);
        shared.live.insert(id, Arc::clone(&claimed));
        shared.counts.claimed += 1;
        Ok(Some(Arc::new(FakeSandbox { backend: self.backend.clone(), instance: claimed })))
    }

    async fn set_reach(&self, reach: &Reach) -> Result<(), SandboxError> {
        self.instance.check_alive()?;
        match reach.allow.first() {
            _ if self.instance.capabilities.has_network => {
                *lock(&self.instance.reach) = reach.clone();
                Ok(())
            }
            None => Ok(()),
            Some(first) => Err(SandboxError::Conflict {
                action: format!("let it reach `{first}`"),
                reason: "the sandbox was made without a network".to_owned(),
            }),
        }
    }

    fn reach(&self) -> Reach {
        lock(&self.instance.reach).clone()
    }

    fn anchor(&self) -> Option<String> {
        self.instance.anchor()
    }

    fn base(&self) -> Base {
        lock(&self.instance.ground).base.clone()
    }

    async fn capture(&self) -> Result<crate::Capture, SandboxError> {
        self.check_snapshots()?;
        self.backend.pass(Step::Snapshot).await?;
        self.instance.check_alive()?;
        let layers = self.backend.layers.as_ref().ok_or_else(|| self.no_layers())?;
        let Ground { base, text, .. } = lock(&self.instance.ground).clone();
        let staging = layers.begin()?;
        let path = staging.path().join(TEXT);
        std::fs::write(&path, text).map_err(|error| SandboxError::step("write", path, error))?;
        let (id, mut held) = staging.commit()?;
        held.join(layers.hold(base.all())?);
        let new_bytes = layers.info(&id)?.bytes;
        let mut changes = base.changes.clone();
        changes.push(id);
        let base = Base { changes, ..base };
        Ok(crate::Capture { base, new_bytes, paused: Duration::ZERO, held })
    }

    async fn rebase(&self, base: &Base) -> Result<(), SandboxError> {
        self.check_snapshots()?;
        let ground = self.backend.read(base)?;
        self.backend.pass(Step::Restore).await?;
        self.instance.check_alive()?;
        let mut now = lock(&self.instance.ground);
        *now = Ground { life: now.life + 1, ..ground };
        Ok(())
    }

    fn enforcement(&self) -> Enforcement {
        self.instance.enforcement.clone()
    }
}

/// The one file in the layers of this backend.
const TEXT: &str = "text";

impl FakeBackend {
    /// Reads what a sandbox on this base begins with.
    fn read(&self, base: &Base) -> Result<Ground> {
        let Some(layers) = self.layers.as_ref().filter(|_| !base.is_plain()) else {
            return Ok(Ground { base: base.clone(), ..Ground::default() });
        };
        let held = Some(Arc::new(layers.hold(base.all())?));
        let mut text = String::new();
        if let Some(id) = base.changes.last() {
            let path = layers.path(id).join(TEXT);
            let read = std::fs::read_to_string(&path);
            text = read.map_err(|error| SandboxError::step("read", path, error))?;
        }
        Ok(Ground { base: base.clone(), text, life: 0, held })
    }
}

impl FakeSandbox {
    fn no_layers(&self) -> SandboxError {
        SandboxError::Unsupported {
            feature: "layers".to_owned(),
            backend: self.backend.name.to_string(),
            hint: "give the backend a directory to keep layers in".to_owned(),
        }
    }

    fn check_snapshots(&self) -> Result<()> {
        self.instance.check_alive()?;
        if self.instance.snapshots {
            return Ok(());
        }
        Err(SandboxError::Unsupported {
            feature: "snapshots".to_owned(),
            backend: self.backend.name.to_string(),
            hint: "choose a backend that has snapshots".to_owned(),
        })
    }
}

/// Locks; a panic elsewhere leaves plain values behind that are as good as before.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn create(backend: &FakeBackend) -> Result<Box<dyn Sandbox>> {
        backend.create_sandbox(&SandboxSpec::default()).await
    }

    fn context() -> ExecContext {
        ExecContext::default()
    }

    #[tokio::test]
    async fn a_step_fails_at_the_pass_it_was_told_to_and_at_no_other() {
        let backend = FakeBackend::new();
        backend.fail(Step::Create, When::Nth(2));
        let outcomes = [
            create(&backend).await.is_ok(),
            create(&backend).await.is_ok(),
            create(&backend).await.is_ok(),
        ];
        assert_eq!(outcomes, [true, false, true]);
        let made = Counts { created: 2, live: 2, most_live: 2, ..Counts::default() };
        assert_eq!(backend.counts(), made);

        backend.fail(Step::Destroy, When::Always);
        let id = &backend.list_sandboxes().await.unwrap()[0];
        let sandbox = backend.get_sandbox(id).await.unwrap().unwrap();
        assert!(sandbox.destroy().await.is_err() && sandbox.destroy().await.is_err());
        assert!(sandbox.is_alive().await, "one that was not destroyed can be tried again");
        backend.heal(Step::Destroy);
        sandbox.destroy().await.unwrap();
        assert_eq!((backend.counts().destroyed, backend.counts().live), (1, 1));
    }

    #[tokio::test]
    async fn every_step_can_be_told_to_fail() {
        let backend = FakeBackend::new();
        let sandbox = create(&backend).await.unwrap();
        let (spec, fresh) = (SandboxSpec::default(), create(&backend).await.unwrap());
        let saved = sandbox.snapshot("s").await.unwrap();
        let steps = [
            Step::Probe,
            Step::Create,
            Step::Exec,
            Step::Suspend,
            Step::Resume,
            Step::Snapshot,
            Step::Restore,
            Step::Claim,
            Step::Adopt,
            Step::Reclaim,
            Step::Destroy,
            Step::Health,
        ];
        for step in steps {
            backend.fail(step, When::Nth(1));
            let error = match step {
                Step::Probe => backend.probe().await.map(drop),
                Step::Create => create(&backend).await.map(drop),
                Step::Exec => sandbox.exec(&Command::new("true"), &context()).await.map(drop),
                Step::Suspend => sandbox.suspend().await,
                Step::Resume => sandbox.resume().await,
                Step::Snapshot => sandbox.snapshot("t").await.map(drop),
                Step::Restore => sandbox.restore(&saved).await,
                Step::Destroy => sandbox.destroy().await,
                Step::Health => backend.health_check().await.map(drop),
                Step::Claim => fresh.claim(&spec).await.map(drop),
                Step::Adopt => backend.adopt(fresh.id(), &spec, "").await.map(drop),
                Step::Reclaim => backend.reclaim(fresh.id()).await,
                // It is no error, but a wall that is open.
                Step::Verify => continue,
            };
            assert_eq!(error.unwrap_err().to_string(), format!("cannot {step}"));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_step_goes_on_when_it_is_released() {
        let backend = FakeBackend::new();
        backend.stall(Step::Create, When::Always);
        let release = async {
            while backend.stalled(Step::Create) < 2 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert_eq!(backend.counts().live, 0);
            backend.release(Step::Create);
        };
        let (first, second, ()) = tokio::join!(create(&backend), create(&backend), release);
        assert!(first.is_ok() && second.is_ok());
        assert_eq!((backend.stalled(Step::Create), backend.counts().live), (0, 2));
        create(&backend).await.expect("and stalls no more");
    }

    #[tokio::test(start_paused = true)]
    async fn a_creation_that_is_given_up_leaves_nothing() {
        let backend = FakeBackend::new();
        backend.stall(Step::Create, When::Always);
        let given_up = tokio::time::timeout(Duration::from_secs(1), create(&backend)).await;
        assert!(given_up.is_err());
        assert_eq!(backend.stalled(Step::Create), 0);
        backend.release(Step::Create);
        assert_eq!(backend.counts(), Counts::default());
    }

    #[tokio::test(start_paused = true)]
    async fn an_exec_that_is_given_up_runs_no_more() {
        let backend = FakeBackend::new();
        let sandbox = create(&backend).await.unwrap();
        let command = Command::new("sleep").args(["60"]);
        let context = context();
        let exec = sandbox.exec(&command, &context);
        assert!(tokio::time::timeout(Duration::from_secs(1), exec).await.is_err());
        assert_eq!((backend.counts().execs, backend.counts().running), (1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_scripted_program_does_what_it_was_told() {
        let backend = FakeBackend::new();
        let scripted = Scripted {
            delay: Duration::from_secs(3),
            stdout: b"out".to_vec(),
            stderr: b"err".to_vec(),
            cause: ExecCause::OutOfMemory,
        };
        backend.script("python3", scripted);
        let sandbox = create(&backend).await.unwrap();
        let report = sandbox.exec_report(&Command::new("python3"), &context()).await.unwrap();
        assert_eq!(report.cause, ExecCause::OutOfMemory);
        assert_eq!((report.output.stdout, report.output.stderr), (b"out".into(), b"err".into()));
        assert!(report.output.resource_limited && report.output.duration.as_secs() == 3);
    }

    #[tokio::test]
    async fn ids_are_counted_up_when_asked() {
        let backend = FakeBackend::new();
        backend.set_ids(Ids::Sequential);
        create(&backend).await.unwrap();
        create(&backend).await.unwrap();
        let ids = backend.list_sandboxes().await.unwrap();
        assert_eq!(ids.iter().map(SandboxId::as_str).collect::<Vec<_>>(), ["sbx-1", "sbx-2"]);
    }

    #[tokio::test]
    async fn a_sandbox_that_crashed_is_gone() {
        let backend = FakeBackend::new();
        let sandbox = create(&backend).await.unwrap();
        assert!(backend.crash(sandbox.id()));
        assert!(!backend.crash(sandbox.id()) && !sandbox.is_alive().await);
        let counts = backend.counts();
        assert_eq!((counts.created, counts.crashed, counts.destroyed, counts.live), (1, 1, 0, 0));
    }
}
