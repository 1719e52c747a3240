//! The `landlock` backend: rules on processes of the host, for places where no namespace can be had.
//!
//! No mount, no user or pid namespace: Landlock says which files a sandbox may open, seccomp which calls it
//! may make, rlimits and a watching init how much it may take. What holds it together is a Landlock domain
//! with a warden outside it (`warren-init`, `warden.rs`). Everything above init is the `linux` backend's:
//! commands, logs, files, adoption.
//!
//! | | as root | as a plain user |
//! | --- | --- | --- |
//! | its user | one of its own on the host | the caller's |
//! | limits | cgroups where they are writable | rlimits, and init watches memory |
//! | changing modes and times by path | yes | no: Landlock does not hold it off the caller's files |
//!
//! A command can have a terminal, which is lent to it; none can be made inside, since the host's are for everybody.
//! It sees that other processes exist, their names and command lines; it cannot touch them, or read their
//! memory, environment or files. Sockets of every kind are refused, because Landlock before ABI 9 does not
//! keep a process from those of the host that have a path. How many bytes it writes is bounded for each file
//! and not for all together.

mod probe;
pub(crate) mod rules;

use std::path::PathBuf;

use async_trait::async_trait;

use crate::backend::linux::{Execution, LinuxBackend, LinuxSandbox, Stdio};
use crate::{
    BackendCapabilities, BackendHealth, Command, CreateOptions, ExecContext, Explain, Inspection,
    IsolationBackend, IsolationLevel, Result, Sandbox, SandboxId, SandboxSpec,
};

/// Sandboxes that are processes of the host under rules that they cannot shed.
///
/// Dropping the last handle of a backend ends its sandboxes, but those that are to outlive it.
#[derive(Clone, Debug)]
pub struct LandlockBackend {
    inner: LinuxBackend,
}

impl LandlockBackend {
    /// Looks at the host and starts the launcher.
    pub fn new() -> Result<Self> {
        Ok(Self { inner: LinuxBackend::by_rules(None, false)? })
    }

    /// Likewise, without a launcher, as [`LinuxBackend::without_launcher`].
    pub fn without_launcher() -> Result<Self> {
        Ok(Self { inner: LinuxBackend::by_rules(None, true)? })
    }

    /// Likewise, for sandboxes that can outlive this process, as [`LinuxBackend::with_runtime`].
    pub fn with_runtime(runtime: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self { inner: LinuxBackend::by_rules(Some(runtime.into()), false)? })
    }

    /// Has sandboxes made from now on have their directories below another than `/var/tmp`. Whoever they
    /// run as must be able to come there, and nobody to take what is another's: mode 1777.
    pub fn in_directory(self, below: impl Into<PathBuf>) -> Self {
        Self { inner: self.inner.below(below.into()) }
    }

    /// Makes a sandbox, or leaves nothing.
    pub async fn create(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
    ) -> Result<LinuxSandbox> {
        self.inner.create(spec, options).await
    }

    /// Makes a sandbox for one command, as [`LinuxBackend::create_for`].
    pub async fn create_for(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
        cmd: &Command,
        ctx: &ExecContext,
        stdio: Stdio,
        explain: Explain,
    ) -> Result<(LinuxSandbox, Execution)> {
        self.inner.create_for(spec, options, cmd, ctx, stdio, explain).await
    }
}

#[async_trait]
impl IsolationBackend for LandlockBackend {
    fn name(&self) -> &str {
        rules::NAME
    }

    fn level(&self) -> Option<IsolationLevel> {
        Some(IsolationLevel::Process)
    }

    async fn probe(&self) -> Result<BackendCapabilities> {
        Ok(self.inspect().await?.capabilities)
    }

    async fn inspect(&self) -> Result<Inspection> {
        Ok(probe::inspect(self).await)
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
