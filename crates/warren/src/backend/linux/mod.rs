//! The `linux` backend: namespaces, an overlay root, cgroups, seccomp and Landlock, without any
//! help but the kernel's.
//!
//! ```text
//! spec -> limits::decide, plan::plan (pure) -> Groups::create -> Launcher -> clone3 -> init
//!   exec -> one message to init with the command's streams and a socket of its own
//! ```
//!
//! `plan.rs` and `limits.rs` decide, `groups.rs` and `launcher.rs` act, `sandbox.rs` owns what was
//! made, `execution.rs` is one command whose streams its caller holds, `execs.rs` are those that have
//! a log, and `port.rs` is a connection to a server inside.

mod ahead;
mod anchor;
pub(crate) mod channel;
mod execs;
mod execution;
mod files;
pub(crate) mod groups;
pub(crate) mod host;
mod launcher;
pub(crate) mod limits;
mod peaks;
pub(crate) mod plan;
mod port;
pub(crate) mod probe;
pub(crate) mod sandbox;
mod snapshot;
mod swap;
mod trial;
mod verify;

pub use execution::{Ending, Execution, Stdio};
pub use probe::HostReport;
pub use sandbox::LinuxSandbox;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use futures_util::future::Either;
use warren_init::plan::{Lifetime, Plan, Walls};

use self::ahead::{Ahead, Like};
use self::anchor::{Anchor, Home, Reading};
use self::groups::Groups;
use self::host::{Host, Privilege};
use self::launcher::Launcher;
use self::sandbox::{Own, Terms};
use crate::backend::landlock::rules;
use crate::backend::{ExecPlan, oci};
use crate::egress::{self, Egress, EgressOptions, Policy};
use crate::layers::Layers;
use crate::profile::{self, Profile, ProfileUsers, Seccomp};
use crate::{
    BackendCapabilities, BackendHealth, Base, Command, CreateOptions, ExecContext, Explain,
    Inspection, IsolationBackend, IsolationLevel, Reach, Result, Sandbox, SandboxError, SandboxId,
    SandboxSpec,
};

/// What users choose this backend by.
pub(crate) const NAME: &str = "linux";

/// What the sandboxes of a backend are walled off by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Namespaces,
    /// Rules alone; each has a directory below this one.
    Rules {
        below: PathBuf,
    },
    /// Namespaces that the runtime of the backend of this name makes.
    Containers(&'static str),
}

impl Kind {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Namespaces => NAME,
            Self::Rules { .. } => rules::NAME,
            Self::Containers(name) => name,
        }
    }

    /// Returns what a sandbox has on the host, if it has no root of its own.
    fn own(&self, id: &SandboxId) -> Option<Own> {
        match self {
            Self::Namespaces | Self::Containers(_) => None,
            Self::Rules { below } => {
                Some(Own { directory: rules::directory(below, id), nonce: rules::nonce(id) })
            }
        }
    }
}

/// Where sandboxes without a root have their directories: on a disk, where everybody may come and
/// nobody may take what is another's.
const BELOW: &str = "/var/tmp";

/// Sandboxes made by the kernel alone, for root and for everybody else.
///
/// Dropping the last handle of a backend ends its sandboxes.
#[derive(Clone, Debug)]
pub struct LinuxBackend {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Where sandboxes that outlive us have their directories.
    runtime: Option<PathBuf>,
    kind: Kind,
    /// Where what sandboxes stand on is kept.
    layers: Option<Layers>,
    // In the order in which they may go: sandboxes, the launcher that reaps them, the group that
    // they were made in.
    registry: Mutex<Registry>,
    /// The next of them.
    ahead: Ahead,
    /// Has a place on the host's own loopback, which no sandbox is to share.
    place: Option<UdpSocket>,
    launcher: Launcher,
    host: Host,
    /// What sandboxes may reach beyond themselves.
    egress: Arc<Egress>,
}

/// How many sandboxes there are before anybody looks for some that have ended.
const FIRST_LOOK: usize = 64;

/// The sandboxes that live, and some that have ended since somebody looked.
#[derive(Debug, Default)]
struct Registry {
    sandboxes: HashMap<SandboxId, LinuxSandbox>,
    /// Those that are being made.
    claimed: HashSet<SandboxId>,
    /// How many there must be for the next look.
    next_look: usize,
    last_created: Option<DateTime<Utc>>,
}

impl Inner {
    /// Returns what a sandbox may reach beyond itself, if anything.
    fn policy(&self, spec: &SandboxSpec) -> Result<Option<Arc<Policy>>> {
        let (profile, _) = profiles(spec)?;
        if let Some(lacking) = self.lacking().filter(|_| egress::is_asked(spec)) {
            return Err(SandboxError::Unsupported {
                feature: format!("a network beyond the sandbox's own loopback: {lacking}"),
                backend: self.kind.name().to_owned(),
                hint:
                    "leave `network_enabled` and `allowed_network` out, or use the backend `linux`"
                        .to_owned(),
            });
        }
        Policy::of(spec, profile, self.kind.name(), &self.egress)
    }

    /// Returns what a sandbox that there is already may reach, if anything was asked for: all else of it goes on, whatever
    /// became of the network that it was made with.
    fn policy_left(&self, id: &SandboxId, spec: &SandboxSpec) -> Option<Arc<Policy>> {
        self.policy(spec).unwrap_or_else(|error| {
            let tcp = profiles(spec).is_ok_and(|(profile, _)| profile.tcp);
            let left = Policy::left(spec, tcp && self.lacking().is_none(), &self.egress);
            let asked = spec.allowed_network.iter();
            let lost: Vec<_> = asked.filter(|text| !left.has(text)).collect();
            tracing::warn!(sandbox = %id, %error, ?lost, "a sandbox may not reach all any more that it could");
            Some(left)
        })
    }

    /// Says why no sandbox of this backend has a network, if that is so.
    fn lacking(&self) -> Option<&'static str> {
        match &self.kind {
            Kind::Rules { .. } => Some("it has no network of its own"),
            _ if self.host.groups.own_kernel => Some("its own kernel diverts nothing"),
            Kind::Namespaces | Kind::Containers(_) => None,
        }
    }

    /// Forgets a sandbox that was destroyed, and with it what we hold of it.
    fn forget(&self, sandbox: &LinuxSandbox) {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        if registry.sandboxes.get(sandbox.id()).is_some_and(|known| known.is(sandbox)) {
            registry.sandboxes.remove(sandbox.id());
        }
    }
}

impl Registry {
    /// Returns the sandbox of that id, if it lives.
    fn get(&self, id: &SandboxId) -> Option<&LinuxSandbox> {
        self.sandboxes.get(id).filter(|sandbox| !sandbox.has_ended())
    }

    /// Adds a sandbox. Those that have ended are looked for only when there are twice as many as were
    /// left the last time: each look asks the kernel once for every sandbox.
    fn insert(&mut self, id: SandboxId, sandbox: LinuxSandbox) {
        self.sandboxes.insert(id, sandbox);
        if self.sandboxes.len() >= self.next_look.max(FIRST_LOOK) {
            self.forget_ended();
        }
    }

    fn forget_ended(&mut self) {
        self.sandboxes.retain(|_, sandbox| !sandbox.has_ended());
        self.next_look = self.sandboxes.len() * 2;
    }
}

impl LinuxBackend {
    /// Says why a sandbox is left as it is: to talk to its init in another way than it knows could mean anything.
    fn of_another_version(&self, version: u32) -> SandboxError {
        let own = warren_init::protocol::VERSION;
        SandboxError::Unsupported {
            feature: format!(
                "sandboxes whose init is of version {version}, as it is of {own} itself"
            ),
            backend: self.inner.kind.name().to_owned(),
            hint: "it runs on; start the warren that made it to use or end it".to_owned(),
        }
    }

    /// Looks at the host and starts the launcher.
    ///
    /// Whether sandboxes can be made here is found out by [`probe`](IsolationBackend::probe), or by
    /// making one.
    pub fn new() -> Result<Self> {
        Self::start(None, None, Launcher::beside(), Kind::Namespaces)
    }

    /// Returns one whose sandboxes have no namespaces.
    pub(crate) fn by_rules(runtime: Option<PathBuf>, here: bool) -> Result<Self> {
        let runtime = runtime.map(Self::runtime).transpose()?;
        let launcher = if here { Launcher::Here } else { Launcher::beside() };
        Self::start(runtime, None, launcher, Kind::Rules { below: BELOW.into() })
    }

    /// Has sandboxes without a root have their directories elsewhere. To be called before there are any.
    pub(crate) fn below(mut self, below: PathBuf) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.inner)
            && let Kind::Rules { below: place } = &mut inner.kind
        {
            *place = below;
        }
        self
    }

    /// Goes by this in what sandboxes may reach: options, or what another backend goes by as well, so that the bounds on
    /// all sandboxes are those of both together. To be called before there are any.
    #[must_use]
    pub fn reaching(mut self, egress: impl Into<Arc<Egress>>) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.egress = egress.into();
        }
        self
    }

    /// Reports whether sandboxes can outlive this process.
    pub(crate) fn is_durable(&self) -> bool {
        self.inner.runtime.is_some()
    }

    /// Likewise, without a launcher: this process, which must have one thread whenever it makes a
    /// sandbox, copies itself. That spares the start of another program to one that makes a sandbox
    /// and ends.
    pub fn without_launcher() -> Result<Self> {
        Self::start(None, None, Launcher::Here, Kind::Namespaces)
    }

    /// Likewise, for one that stands on layers.
    pub fn without_launcher_on(layers: Layers) -> Result<Self> {
        Self::start(None, Some(layers), Launcher::Here, Kind::Namespaces)
    }

    /// Likewise, for sandboxes that can outlive this process: each has a directory below `runtime`,
    /// which must be ours alone, until it ends.
    pub fn with_runtime(runtime: impl Into<PathBuf>) -> Result<Self> {
        let runtime = Some(Self::runtime(runtime.into())?);
        Self::start(runtime, None, Launcher::beside(), Kind::Namespaces)
    }

    /// Likewise, for sandboxes that can also stand on layers, and be saved as such: with `runtime` they
    /// can outlive this process.
    pub fn with_layers(runtime: Option<PathBuf>, layers: Layers) -> Result<Self> {
        let runtime = runtime.map(Self::runtime).transpose()?;
        Self::start(runtime, Some(layers), Launcher::beside(), Kind::Namespaces)
    }

    fn runtime(runtime: PathBuf) -> Result<PathBuf> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&runtime);
        made.map_err(|error| SandboxError::step("create", &runtime, error))?;
        Ok(runtime)
    }

    /// Returns one that has others put up the walls.
    pub(crate) fn by_runtime(
        container: Arc<oci::Runtime>,
        runtime: Option<PathBuf>,
        layers: Option<Layers>,
    ) -> Result<Self> {
        let runtime = runtime.map(Self::runtime).transpose()?;
        let kind = Kind::Containers(container.name());
        Self::start(runtime, layers, Launcher::Container(container), kind)
    }

    fn start(
        runtime: Option<PathBuf>,
        layers: Option<Layers>,
        launcher: Launcher,
        kind: Kind,
    ) -> Result<Self> {
        // First: it starts on its own while we look at the host.
        launcher.prepare()?;
        let mut host = Host::detect().map_err(|source| SandboxError::Step {
            step: "read the host's control groups".to_owned(),
            path: None,
            source,
        })?;
        if let Kind::Rules { .. } = kind {
            // Groups that are the caller's are also its sandboxes': they could lift their own limits.
            if host.privilege != Privilege::Root {
                host.groups = Default::default();
            }
            host.groups.shared = true;
        }
        host.groups.own_kernel =
            matches!(&launcher, Launcher::Container(it) if it.has_own_kernel());
        let (registry, ahead) = (Mutex::default(), Ahead::default());
        // Without a loopback there is nothing to be shared.
        let place = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok();
        let egress = Egress::new(EgressOptions::default());
        let inner = Inner { runtime, kind, layers, host, launcher, registry, ahead, place, egress };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Makes a sandbox, or leaves nothing.
    pub async fn create(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
    ) -> Result<LinuxSandbox> {
        // On the heap: it is large, and whoever awaits it carries it along.
        Ok(Box::pin(self.make(spec, options, None)).await?.0)
    }

    /// Makes a sandbox for one command, which does not wait for us to hear that the sandbox stands, and
    /// at whose end the sandbox ends; or leaves nothing.
    pub async fn create_for(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
        cmd: &Command,
        ctx: &ExecContext,
        stdio: Stdio,
        explain: Explain,
    ) -> Result<(LinuxSandbox, Execution)> {
        let first = Some((cmd, ctx, stdio, explain));
        let (sandbox, sent) = self.make(spec, options, first).await?;
        let sent = sent.ok_or_else(|| SandboxError::Internal {
            message: "the first command was not sent".to_owned(),
        })?;
        let before = sandbox.instance().refused_before;
        Ok((sandbox.clone(), Execution::of(sandbox, sent, before)))
    }

    async fn make(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
        first: Option<(&Command, &ExecContext, Stdio, Explain)>,
    ) -> Result<(LinuxSandbox, Option<execution::Sent>)> {
        spec.validate()?;
        options.validate()?;
        let (profile, seccomp) = profiles(spec)?;
        self.refuse(spec, options)?;
        let layers = self.inner.layers.as_ref();
        for own in self.inner.runtime.as_deref().into_iter().chain(layers.map(Layers::root)) {
            plan::refuse_runtime(spec, own)?;
        }
        let usual = self.is_usual(spec, options);
        let next = || self.next_id(spec, &options.base).filter(|_| usual);
        let id = options.id.clone().or_else(next).unwrap_or_default();
        // Without a cgroup or a directory there is nothing on the host that two could not both make.
        let _claim = Claim::new(self, &id)?;
        let runtime = match (options.persistent, &self.inner.runtime) {
            (false, _) => None,
            (true, Some(runtime)) => Some(runtime.as_path()),
            (true, None) => {
                return Err(SandboxError::Unsupported {
                    feature: "sandboxes that outlive their maker".to_owned(),
                    backend: self.inner.kind.name().to_owned(),
                    hint: "give the backend a runtime directory".to_owned(),
                });
            }
        };
        let required = options.required(spec);
        let support = &self.inner.host.groups;
        let limits = limits::decide(
            &spec.limits,
            options.cpu_quota_millis,
            &required,
            support,
            binds_writable(spec),
        )?;
        let like = || Like {
            profile: spec.profile.clone(),
            workdir: spec.workdir.clone(),
            settings: limits.settings.clone(),
        };
        if let Some(open) = self.inner.ahead.found_open() {
            // Tried again, for whoever comes next.
            self.begin_later(like());
            return Err(SandboxError::WallOpen { id, open });
        }
        let own = self.inner.kind.own(&id);
        // As it is where the sandbox is: without a root of its own, its paths are those of the host.
        let asked = spec;
        let spec = &match &own {
            Some(own) => Cow::Owned(rules::on_host(spec, &own.directory)),
            None => Cow::Borrowed(spec),
        };
        let first = first.map(|(cmd, ctx, stdio, explain)| {
            Terms::settle_explain(spec, self.inner.kind.name(), explain)?;
            let mut plan = ExecPlan::new(spec, cmd, ctx)?;
            if let Some(own) = &own {
                plan.workdir = rules::place(&plan.workdir, &own.directory);
            }
            let limits = spec.limits.clone();
            Ok::<_, SandboxError>(execution::First { plan, limits, stdio, explain })
        });
        let first = first.transpose()?;
        let mut inputs = plan::Inputs {
            backend: self.inner.kind.name(),
            id: &id,
            spec,
            profile,
            seccomp,
            privilege: self.inner.host.privilege,
            lifetime: if options.persistent { Lifetime::Detached } else { Lifetime::Attached },
            limits: &limits,
            cgroups: Default::default(),
            base: &options.base,
            layers,
        };
        // Decided before anything is made, so that a bad spec leaves nothing to remove.
        let mut plan = self.plan(&inputs, asked, &plan::RealHost)?;
        let egress = self.inner.policy(asked)?;
        plan.egress = egress.as_ref().map(|policy| policy.plan());
        let groups = Groups::wanted(&id, support, &limits.settings);
        let begun = self.inner.ahead.take(&id).filter(|begun| begun.becomes(&plan, &groups));
        let wanted = |plan| sandbox::Wanted {
            id: &id,
            egress: egress.as_ref(),
            plan,
            seccomp,
            limits: &spec.limits,
            settings: &limits.settings,
            cpu_quota_millis: options.cpu_quota_millis,
            patience: spec.creation_timeout,
        };
        let launch = match begun {
            Some(begun) => {
                plan.cgroups = begun.plan().cgroups.clone();
                Either::Left(sandbox::complete(begun.instance, wanted(&plan), first))
            }
            None => {
                let directory = own.as_ref().map(|own| own.directory.as_path());
                let guard = self.inner.launcher.guard(groups, directory)?;
                let settings = self.inner.launcher.at_first(&limits.settings);
                let groups = Groups::begin(&id, support, &settings, guard)?;
                plan.cgroups = groups.planned();
                let home = runtime.map(|runtime| Home::create(runtime, &id)).transpose()?;
                let launcher = &self.inner.launcher;
                Either::Right(sandbox::launch(launcher, wanted(&plan), groups, home, first))
            }
        };
        inputs.cgroups = plan.cgroups.clone();
        // Before anything of them is mounted, and until nothing is.
        let held = layers.map(|layers| layers.hold(options.base.all())).transpose()?;
        let (mut instance, sent) = tokio::time::timeout(spec.creation_timeout, launch)
            .await
            .map_err(|_| SandboxError::Timeout {
                what: "creating the sandbox".to_owned(),
                after: spec.creation_timeout,
            })??;
        instance.stand_on(options.base.clone(), held, plan.overlays.clone());
        let sandbox = LinuxSandbox::new(&inputs, &plan, instance, &self.inner, false);
        let mut registry = self.registry();
        registry.last_created = Some(sandbox.capabilities().created_at);
        registry.insert(id.clone(), sandbox.clone());
        drop(registry);
        if usual {
            self.begin_next(like());
        }
        Ok((sandbox, sent))
    }

    /// Decides what a sandbox is to be, of what was asked for and what that is on the host.
    fn plan(
        &self,
        inputs: &plan::Inputs<'_>,
        asked: &SandboxSpec,
        look: &impl plan::Look,
    ) -> Result<Plan> {
        match &self.inner.kind {
            Kind::Namespaces | Kind::Containers(_) => {
                let mut plan = plan::plan(inputs, look)?;
                if self.inner.host.groups.own_kernel {
                    plan.walls = Walls::OwnKernel;
                }
                let place = self.inner.place.as_ref().and_then(|place| place.local_addr().ok());
                plan.promised.host_port = place.map(|place| place.port());
                Ok(plan)
            }
            Kind::Rules { below } => {
                let inputs = rules::Inputs {
                    id: inputs.id,
                    spec: asked,
                    profile: inputs.profile,
                    seccomp: inputs.seccomp,
                    privilege: inputs.privilege,
                    lifetime: inputs.lifetime,
                    limits: inputs.limits,
                    below,
                };
                rules::plan(&inputs, look)
            }
        }
    }

    /// Refuses what no sandbox of this backend can have.
    fn refuse(&self, spec: &SandboxSpec, options: &CreateOptions) -> Result<()> {
        let name = self.inner.kind.name();
        let users = profile::profile(&spec.profile).map_or(ProfileUsers::One, |found| found.users);
        if self.inner.host.groups.own_kernel && users != ProfileUsers::One {
            return Err(SandboxError::Unsupported {
                feature: format!("profile `{}`: several users", spec.profile),
                backend: name.to_owned(),
                hint: "use the profile `default`, or another backend".to_owned(),
            });
        }
        if matches!(self.inner.kind, Kind::Rules { .. }) && !options.base.is_plain() {
            return Err(SandboxError::Unsupported {
                feature: "a root of layers".to_owned(),
                backend: name.to_owned(),
                hint: "create it on the host's toolchain, or choose another backend".to_owned(),
            });
        }
        Ok(())
    }

    /// Tries out every layer on this host and says what was found, with the way to mend it.
    pub async fn examine(&self) -> HostReport {
        probe::examine(self).await
    }

    fn capabilities_by(&self, report: &HostReport) -> BackendCapabilities {
        let (persistent, snapshots) = (self.inner.runtime.is_some(), self.inner.layers.is_some());
        report.capabilities(self.inner.kind.name(), persistent, snapshots)
    }

    fn host(&self) -> &Host {
        &self.inner.host
    }

    /// The registry is only ever touched for a moment, never across a kernel call that waits.
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.inner.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the sandboxes that live, and forgets the others.
    fn living(&self) -> Vec<LinuxSandbox> {
        let mut registry = self.registry();
        registry.forget_ended();
        registry.sandboxes.values().map(LinuxSandbox::current).collect()
    }
}

/// Says that there is a sandbox of this id already.
fn taken(id: &SandboxId) -> SandboxError {
    SandboxError::AlreadyExists { what: "sandbox", id: id.to_string() }
}

/// The right to make the sandbox of one id, which nobody else has until this value goes.
struct Claim<'a> {
    backend: &'a LinuxBackend,
    id: SandboxId,
}

impl<'a> Claim<'a> {
    fn new(backend: &'a LinuxBackend, id: &SandboxId) -> Result<Self> {
        let mut registry = backend.registry();
        let lives = registry.get(id).is_some();
        if lives || !registry.claimed.insert(id.clone()) {
            return Err(taken(id));
        }
        Ok(Self { backend, id: id.clone() })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.backend.registry().claimed.remove(&self.id);
    }
}

fn profiles(spec: &SandboxSpec) -> Result<(&'static Profile, &'static Seccomp)> {
    let names = || format!("the profiles are {}", profile::profile_names().join(", "));
    let unknown = |field: &str, name: &str| {
        SandboxError::invalid(field, format!("there is no profile `{name}`"), names())
    };
    let found = profile::profile(&spec.profile).ok_or_else(|| unknown("profile", &spec.profile))?;
    let name = spec.seccomp_profile.as_deref().unwrap_or(found.seccomp);
    let filter = profile::seccomp(name).ok_or_else(|| unknown("seccomp_profile", name))?;
    Ok((found, filter))
}

/// Reports whether a sandbox can write somewhere that is not its own.
pub(crate) fn binds_writable(spec: &SandboxSpec) -> bool {
    !spec.allowed_paths_rw.is_empty() || spec.bind_mounts.iter().any(|bind| !bind.readonly)
}

#[async_trait]
impl IsolationBackend for LinuxBackend {
    fn name(&self) -> &str {
        self.inner.kind.name()
    }

    fn level(&self) -> Option<IsolationLevel> {
        Some(IsolationLevel::Namespace)
    }

    async fn probe(&self) -> Result<BackendCapabilities> {
        Ok(self.capabilities_by(&probe::examine_for_good(self).await?))
    }

    async fn inspect(&self) -> Result<Inspection> {
        // Whatever it was that could not be done: whoever looks is told what to do about it.
        let mut report = self.examine().await;
        let capabilities = self.capabilities_by(&report);
        if report.is_usable() {
            report.findings.push(probe::egress_finding(self.try_egress().await));
        }
        Ok(Inspection { capabilities, findings: report.findings })
    }

    fn next_id(&self, spec: &SandboxSpec, base: &Base) -> Option<SandboxId> {
        self.inner.ahead.next_id(spec, base)
    }

    fn layers(&self) -> Option<&Layers> {
        self.inner.layers.as_ref()
    }

    async fn create_sandbox(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>> {
        self.create_sandbox_with(spec, &CreateOptions::default()).await
    }

    async fn try_egress(&self) -> Result<()> {
        probe::try_egress(self).await
    }

    async fn create_sandbox_with(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
    ) -> Result<Box<dyn Sandbox>> {
        Ok(Box::new(self.create(spec, options).await?))
    }

    async fn adopt(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        anchor: &str,
    ) -> Result<Option<Box<dyn Sandbox>>> {
        let Some(runtime) = &self.inner.runtime else { return Ok(None) };
        let (profile, seccomp) = profiles(spec)?;
        let anchor = match Anchor::read(anchor) {
            Reading::Ours(anchor) => *anchor,
            Reading::OtherVersion(version) => return Err(self.of_another_version(version)),
            Reading::Nothing => {
                self.reclaim(id).await?;
                return Ok(None);
            }
        };
        let container = self.inner.launcher.container(id, Some(runtime));
        let home = Home::of(runtime, id);
        let egress = self.inner.policy_left(id, spec);
        if let Some(policy) = &egress {
            let noted = home.reach().unwrap_or_else(|error| {
                // Whatever it was, nobody said that it was less.
                tracing::warn!(sandbox = %id, %error, "a sandbox reaches nothing until it is told again what");
                Some(Reach::nothing())
            });
            noted.into_iter().for_each(|reach| policy.set_reach(reach));
        }
        let found = sandbox::adopt(id, home, container, egress.as_ref(), &anchor).await?;
        let Some((mut instance, suspended)) = found else {
            self.reclaim(id).await?;
            return Ok(None);
        };
        let support = &self.inner.host.groups;
        let quota = anchor.cpu_quota_millis;
        let limits = limits::decide(
            &spec.limits,
            quota,
            &Default::default(),
            support,
            binds_writable(spec),
        )?;
        let own = self.inner.kind.own(id);
        let asked = spec;
        let spec = &match &own {
            Some(own) => Cow::Owned(rules::on_host(spec, &own.directory)),
            None => Cow::Borrowed(spec),
        };
        let inputs = plan::Inputs {
            backend: self.inner.kind.name(),
            id,
            spec,
            profile,
            seccomp,
            privilege: self.inner.host.privilege,
            lifetime: Lifetime::Detached,
            limits: &limits,
            cgroups: Default::default(),
            base: &anchor.stands_on,
            layers: self.inner.layers.as_ref(),
        };
        let mut plan = self.plan(&inputs, asked, &plan::RememberedHost)?;
        plan.egress = egress.as_ref().map(|policy| policy.plan());
        if let Some(own) = own {
            instance.by_rules(own);
        }
        // A daemon that was killed while it moved memory to disk left the group open to that.
        swap::keep_in_memory(instance.groups().memory(), &spec.limits);
        // It has them mounted, so that even one that is gone from its place is still there for it.
        let held = inputs.layers.and_then(|layers| layers.hold(anchor.stands_on.all()).ok());
        instance.stand_on(anchor.stands_on.clone(), held, plan.overlays.clone());
        let sandbox = LinuxSandbox::new(&inputs, &plan, instance, &self.inner, suspended);
        sandbox.adopt_execs().await?;
        self.registry().insert(id.clone(), sandbox.clone());
        Ok(Some(Box::new(sandbox)))
    }

    async fn reclaim(&self, id: &SandboxId) -> Result<()> {
        if let Some(container) = self.inner.launcher.container(id, self.inner.runtime.as_deref()) {
            container.remove().await?;
        }
        let mut groups = Groups::of(id, &self.inner.host.groups);
        if let Some(runtime) = &self.inner.runtime {
            let home = Home::of(runtime, id);
            // Asked first: without a cgroup there is nobody else to end it by.
            if let Ok(control) = home.connect() {
                sandbox::end(control).await;
            }
            groups.kill();
            groups.remove()?;
            if let Some(own) = self.inner.kind.own(id) {
                own.remove();
            }
            home.remove();
            return Ok(());
        }
        groups.kill();
        groups.remove()
    }

    async fn remains(&self) -> Result<Vec<SandboxId>> {
        // A sandbox that outlives its maker has its directory first and last of all. Control groups
        // tell nothing: a `warren run`, or another daemon, has some too.
        let mut all: Vec<_> =
            self.inner.runtime.iter().flat_map(|runtime| Home::all(runtime)).collect();
        let next = self.inner.ahead.id();
        all.retain(|id| Some(id) != next.as_ref());
        Ok(all)
    }

    async fn list_sandboxes(&self) -> Result<Vec<SandboxId>> {
        Ok(self.living().iter().map(|sandbox| sandbox.id().clone()).collect())
    }

    async fn get_sandbox(&self, id: &SandboxId) -> Result<Option<Box<dyn Sandbox>>> {
        let found = self.registry().get(id).map(LinuxSandbox::current);
        Ok(found.map(|sandbox| Box::new(sandbox) as Box<dyn Sandbox>))
    }

    async fn destroy_all(&self) -> Result<()> {
        let all = self.living();
        // All are killed before any is waited for.
        all.iter().for_each(LinuxSandbox::kill);
        let mut result = Ok(());
        for sandbox in all {
            result = sandbox.destroy().await.and(result);
        }
        result
    }

    async fn health_check(&self) -> Result<BackendHealth> {
        let ready = self.inner.launcher.prepare();
        let active = u32::try_from(self.living().len()).unwrap_or(u32::MAX);
        Ok(BackendHealth {
            healthy: ready.is_ok(),
            active_sandboxes: active,
            resource_utilization: 0.0,
            warnings: ready.err().map(|error| error.to_string()).into_iter().collect(),
            last_sandbox_created: self.registry().last_created,
        })
    }
}
