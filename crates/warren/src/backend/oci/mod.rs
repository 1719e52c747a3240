//! The `oci` backends: sandboxes whose walls a container runtime puts up, `runc`, `crun`, or gVisor's `runsc`.
//!
//! ```text
//! spec -> the plan of the linux backend (pure) -> config.json (config.rs, pure) -> a guard for each (warren_init::stage)
//!   the guard mounts the root -> runtime run --detach -> init inside, which speaks the same protocol
//! ```
//!
//! From then on it is a sandbox like any other: `linux/` has what is done with it. What differs is said by the
//! `Container` that it has: how it is paused, and how it is removed. See docs/design/oci.md.

mod config;
mod container;
mod runtime;

pub(crate) use container::{Container, room_to_start};
pub(crate) use runtime::Runtime;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::linux::HostReport;
use super::{LinuxBackend, LinuxSandbox};
use crate::egress::Egress;
use crate::layers::Layers;
use crate::{
    BackendCapabilities, BackendHealth, CreateOptions, Inspection, IsolationBackend,
    IsolationLevel, Result, Sandbox, SandboxId, SandboxSpec,
};

/// A container runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OciRuntime {
    /// The reference, in Go.
    Runc,
    /// The same in C.
    Crun,
    /// gVisor: a kernel in user space.
    Runsc,
}

impl OciRuntime {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Runc, Self::Crun, Self::Runsc];

    /// Returns the name of its program.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Self::Runc => "runc",
            Self::Crun => "crun",
            Self::Runsc => "runsc",
        }
    }

    /// Reports whether its program is on this host.
    #[must_use]
    pub fn is_installed(self) -> bool {
        runtime::program(self).is_some()
    }

    /// Returns what users choose its backend by.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Runc => "oci-runc",
            Self::Crun => "oci-crun",
            Self::Runsc => "oci-runsc",
        }
    }

    /// Returns how far what it makes is from the host.
    #[must_use]
    pub fn level(self) -> IsolationLevel {
        match self {
            Self::Runc | Self::Crun => IsolationLevel::Container,
            Self::Runsc => IsolationLevel::Kernel,
        }
    }
}

/// Sandboxes made by a container runtime, for root.
#[derive(Clone, Debug)]
pub struct OciBackend {
    inner: LinuxBackend,
    runtime: Arc<Runtime>,
}

impl OciBackend {
    /// Looks for the runtime, which must be installed; we must be root.
    pub fn new(kind: OciRuntime) -> Result<Self> {
        Self::start(kind, None, None)
    }

    /// Likewise, for sandboxes that can stand on layers, and be saved as such: with a `runtime`, a
    /// directory that must be ours alone, they can outlive this process.
    pub fn with_layers(kind: OciRuntime, runtime: Option<PathBuf>, layers: Layers) -> Result<Self> {
        Self::start(kind, runtime, Some(layers))
    }

    fn start(kind: OciRuntime, homes: Option<PathBuf>, layers: Option<Layers>) -> Result<Self> {
        let runtime = Arc::new(Runtime::find(kind)?);
        let inner = LinuxBackend::by_runtime(runtime.clone(), homes, layers)?;
        let backend = Self { inner, runtime };
        backend.sweep();
        Ok(backend)
    }

    /// Makes a sandbox, or leaves nothing.
    pub async fn create(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
    ) -> Result<LinuxSandbox> {
        self.inner.create(spec, options).await
    }

    /// Goes by this in what sandboxes may reach, as [`LinuxBackend::reaching`] does. To be called before there are any.
    #[must_use]
    pub fn reaching(self, egress: impl Into<Arc<Egress>>) -> Self {
        Self { inner: self.inner.reaching(egress), ..self }
    }

    /// Returns what makes its sandboxes: with it one can be made for one command.
    #[must_use]
    pub fn into_maker(self) -> LinuxBackend {
        self.inner
    }

    /// Tries out every layer on this host and says what was found.
    pub async fn examine(&self) -> HostReport {
        self.inner.examine().await
    }

    /// Removes containers whose maker and whose guard were both killed.
    fn sweep(&self) {
        /// A guard takes its lock in less.
        const YOUNG: Duration = Duration::from_secs(60);
        for entry in std::fs::read_dir(container::PLACE).into_iter().flatten().flatten() {
            let (bundle, name) = (entry.path(), entry.file_name());
            let Some(id) = name.to_str().map(SandboxId::from_string) else { continue };
            let made_by = std::fs::read_to_string(bundle.join(container::RUNTIME_FILE));
            let is_ours = made_by.is_ok_and(|name| name == self.runtime.name());
            let age = entry.metadata().and_then(|found| found.modified());
            let is_old = age.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > YOUNG));
            let container = Container::at(&self.runtime, &id, bundle);
            if is_ours && is_old && id.validate().is_ok() && !container.is_guarded() {
                container.gone_now();
            }
        }
    }
}

#[async_trait]
impl IsolationBackend for OciBackend {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn level(&self) -> Option<IsolationLevel> {
        Some(self.runtime.kind().level())
    }

    async fn probe(&self) -> Result<BackendCapabilities> {
        self.inner.probe().await
    }

    async fn inspect(&self) -> Result<Inspection> {
        self.inner.inspect().await
    }

    fn layers(&self) -> Option<&Layers> {
        self.inner.layers()
    }

    async fn create_sandbox(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>> {
        self.inner.create_sandbox(spec).await
    }

    async fn try_egress(&self) -> Result<()> {
        self.inner.try_egress().await
    }

    async fn create_sandbox_with(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
    ) -> Result<Box<dyn Sandbox>> {
        self.inner.create_sandbox_with(spec, options).await
    }

    async fn adopt(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        anchor: &str,
    ) -> Result<Option<Box<dyn Sandbox>>> {
        self.inner.adopt(id, spec, anchor).await
    }

    async fn reclaim(&self, id: &SandboxId) -> Result<()> {
        self.inner.reclaim(id).await
    }

    async fn remains(&self) -> Result<Vec<SandboxId>> {
        self.inner.remains().await
    }

    async fn list_sandboxes(&self) -> Result<Vec<SandboxId>> {
        self.inner.list_sandboxes().await
    }

    async fn get_sandbox(&self, id: &SandboxId) -> Result<Option<Box<dyn Sandbox>>> {
        self.inner.get_sandbox(id).await
    }

    async fn destroy_all(&self) -> Result<()> {
        self.inner.destroy_all().await
    }

    async fn health_check(&self) -> Result<BackendHealth> {
        self.inner.health_check().await
    }
}

/// Where the containers are that end with their maker.
#[must_use]
pub fn place() -> &'static Path {
    Path::new(container::PLACE)
}
