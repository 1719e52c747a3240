//! The `linux` backend: namespaces, an overlay root, cgroups, seccomp and Landlock, without any
//! help but the kernel's.
//!
//! ```text
//! spec -> limits::decide, plan::plan (pure) -> Groups::create -> Launcher -> clone3 -> init
//!   exec -> one message to init with the command's streams and a socket of its own
//! ```
//!
//! `plan.rs` and `limits.rs` decide, `groups.rs` and `launcher.rs` act, `sandbox.rs` owns what was
//! made, and `execution.rs` is one command in it.

mod channel;
mod execution;
mod groups;
mod host;
mod launcher;
mod limits;
mod plan;
mod probe;
mod sandbox;

pub use execution::{Ending, Execution, Stdio};
pub use probe::{Finding, HostReport};
pub use sandbox::LinuxSandbox;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use warren_init::plan::Lifetime;

use self::groups::Groups;
use self::host::Host;
use self::launcher::Launcher;
use crate::profile::{self, Profile, Seccomp};
use crate::{
    BackendCapabilities, BackendHealth, CreateOptions, IsolationBackend, Result, Sandbox,
    SandboxError, SandboxId, SandboxSpec,
};

/// What users choose this backend by.
pub(crate) const NAME: &str = "linux";

/// Sandboxes made by the kernel alone, for root and for everybody else.
///
/// Dropping the last handle of a backend ends its sandboxes.
#[derive(Clone, Debug)]
pub struct LinuxBackend {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    // In the order in which they may go: sandboxes, the launcher that reaps them, the group that
    // they were made in.
    registry: Mutex<Registry>,
    launcher: Launcher,
    host: Host,
}

/// The sandboxes that live.
#[derive(Debug, Default)]
struct Registry {
    sandboxes: HashMap<SandboxId, LinuxSandbox>,
    last_created: Option<DateTime<Utc>>,
}

impl LinuxBackend {
    /// Looks at the host and starts the launcher.
    ///
    /// Whether sandboxes can be made here is found out by [`probe`](IsolationBackend::probe), or by
    /// making one.
    pub fn new() -> Result<Self> {
        let launcher = Launcher::default();
        // First: it starts on its own while we look at the host.
        launcher.prepare()?;
        let host = Host::detect().map_err(|source| SandboxError::Step {
            step: "read the host's control groups".to_owned(),
            path: None,
            source,
        })?;
        Ok(Self { inner: Arc::new(Inner { host, launcher, registry: Mutex::default() }) })
    }

    /// Makes a sandbox, or leaves nothing.
    pub async fn create(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
    ) -> Result<LinuxSandbox> {
        spec.validate()?;
        options.validate()?;
        let (profile, seccomp) = profiles(spec)?;
        refuse_network(spec)?;
        let id = options.id.clone().unwrap_or_default();
        if self.living().iter().any(|sandbox| *sandbox.id() == id) {
            return Err(SandboxError::AlreadyExists { what: "sandbox", id: id.0 });
        }
        let required = options.required(spec);
        let support = &self.inner.host.groups;
        let limits = limits::decide(&spec.limits, options.cpu_quota_millis, &required, support)?;
        let mut inputs = plan::Inputs {
            id: &id,
            spec,
            profile,
            seccomp,
            privilege: self.inner.host.privilege,
            lifetime: Lifetime::Attached,
            limits: &limits,
            cgroups: Default::default(),
        };
        // Decided before anything is made, so that a bad spec leaves nothing to remove.
        let mut plan = plan::plan(&inputs, &plan::RealHost)?;
        let groups = Groups::create(&id, support, &limits.settings)?;
        inputs.cgroups = groups.planned();
        plan.cgroups = groups.planned();
        let launch = sandbox::launch(&self.inner.launcher, &plan, groups);
        let instance =
            tokio::time::timeout(spec.creation_timeout, launch).await.map_err(|_| {
                SandboxError::Timeout {
                    what: "creating the sandbox".to_owned(),
                    after: spec.creation_timeout,
                }
            })??;
        let sandbox = LinuxSandbox::new(&inputs, &plan, instance);
        let mut registry = self.registry();
        registry.last_created = Some(sandbox.capabilities().created_at);
        registry.sandboxes.insert(id, sandbox.clone());
        Ok(sandbox)
    }

    /// Tries out every layer on this host and says what was found, with the way to mend it.
    pub async fn examine(&self) -> HostReport {
        probe::examine(self).await
    }

    fn host(&self) -> &Host {
        &self.inner.host
    }

    /// The registry is only ever touched for a moment, never across a kernel call.
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.inner.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the sandboxes that live, and forgets the others.
    fn living(&self) -> Vec<LinuxSandbox> {
        let mut registry = self.registry();
        registry.sandboxes.retain(|_, sandbox| !sandbox.has_ended());
        registry.sandboxes.values().cloned().collect()
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

/// A sandbox here has its own loopback and nothing else; to promise more would be a lie.
fn refuse_network(spec: &SandboxSpec) -> Result<()> {
    if spec.network_enabled || !spec.allowed_network.is_empty() {
        return Err(SandboxError::Unsupported {
            feature: "a network beyond the sandbox's own loopback".to_owned(),
            backend: NAME.to_owned(),
            hint: "leave `network_enabled` false and `allowed_network` empty".to_owned(),
        });
    }
    Ok(())
}

#[async_trait]
impl IsolationBackend for LinuxBackend {
    fn name(&self) -> &str {
        NAME
    }

    async fn probe(&self) -> Result<BackendCapabilities> {
        Ok(self.examine().await.capabilities())
    }

    async fn create_sandbox(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>> {
        self.create_sandbox_with(spec, &CreateOptions::default()).await
    }

    async fn create_sandbox_with(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
    ) -> Result<Box<dyn Sandbox>> {
        Ok(Box::new(self.create(spec, options).await?))
    }

    async fn list_sandboxes(&self) -> Result<Vec<SandboxId>> {
        Ok(self.living().iter().map(|sandbox| sandbox.id().clone()).collect())
    }

    async fn get_sandbox(&self, id: &SandboxId) -> Result<Option<Box<dyn Sandbox>>> {
        let found = self.living().into_iter().find(|sandbox| sandbox.id() == id);
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
