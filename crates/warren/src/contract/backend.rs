//! One way of walling sandboxes off from the host.

use std::collections::BTreeSet;
use std::fmt;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::{Base, IsolationLevel, Limit, Result, Sandbox, SandboxError, SandboxId, SandboxSpec};

/// One way of walling sandboxes off from the host.
#[async_trait]
pub trait IsolationBackend: Send + Sync {
    /// Returns the name that users choose it by: `linux`.
    fn name(&self) -> &str;

    /// Returns which rung of the ladder its walls are, once its probe has shown that they stand; `None`
    /// if they are none of them.
    fn level(&self) -> Option<IsolationLevel> {
        None
    }

    /// Tries out what this host can enforce and reports what was proved.
    async fn probe(&self) -> Result<BackendCapabilities, SandboxError>;

    /// As [`probe`](Self::probe), and says what was tried and how to mend what does not hold.
    async fn inspect(&self) -> Result<Inspection, SandboxError> {
        Ok(Inspection { capabilities: self.probe().await?, findings: Vec::new() })
    }

    /// Tries whether its sandboxes can reach anything beyond themselves; says why they cannot.
    async fn try_egress(&self) -> Result<(), SandboxError> {
        Err(SandboxError::Unsupported {
            feature: "a network beyond the sandbox's own loopback".to_owned(),
            backend: self.name().to_owned(),
            hint: "leave `network_enabled` and `allowed_network` out, or use the backend `linux`"
                .to_owned(),
        })
    }

    /// Builds a sandbox, or leaves nothing behind.
    ///
    /// The same as [`create_sandbox_with`](Self::create_sandbox_with) and the default options.
    async fn create_sandbox(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError>;

    /// Returns the ids of all sandboxes that live.
    async fn list_sandboxes(&self) -> Result<Vec<SandboxId>, SandboxError>;

    /// Returns the sandbox with this id, if it lives.
    async fn get_sandbox(&self, id: &SandboxId) -> Result<Option<Box<dyn Sandbox>>, SandboxError>;

    /// Destroys every sandbox of this backend. One that fails does not keep the others.
    async fn destroy_all(&self) -> Result<(), SandboxError>;

    /// Reports how the backend does right now.
    async fn health_check(&self) -> Result<BackendHealth, SandboxError>;

    /// Builds a sandbox with what a spec has no field for, or leaves nothing behind.
    ///
    /// The default body refuses what only the backend itself could honour: an id, a limit demanded
    /// by name, a CPU quota.
    async fn create_sandbox_with(
        &self,
        spec: &SandboxSpec,
        options: &CreateOptions,
    ) -> Result<Box<dyn Sandbox>, SandboxError> {
        if options.id.is_some() {
            return Err(SandboxError::Unsupported {
                feature: "choosing the id of a sandbox".to_owned(),
                backend: self.name().to_owned(),
                hint: "leave the id to the backend, or choose another backend".to_owned(),
            });
        }
        if options.persistent {
            return Err(SandboxError::Unsupported {
                feature: "sandboxes that outlive their maker".to_owned(),
                backend: self.name().to_owned(),
                hint: "create it without persistence, or choose another backend".to_owned(),
            });
        }
        if !options.base.is_plain() {
            return Err(SandboxError::Unsupported {
                feature: "a root of layers".to_owned(),
                backend: self.name().to_owned(),
                hint: "create it on the host's toolchain, or choose another backend".to_owned(),
            });
        }
        if let Some(limit) = options.demanded_by_name().first().copied() {
            return Err(SandboxError::LimitNotEnforceable {
                limit,
                reason: format!("the {} backend does not say how it holds it", self.name()),
                hint: format!("accept a sandbox without it: --accept-missing {limit}"),
            });
        }
        self.create_sandbox(spec).await
    }

    /// Returns the id under which a sandbox of this spec would stand soonest, if there is one that was begun
    /// before anybody asked for it. Nobody else has it, and nothing is lost if it is not asked for.
    fn next_id(&self, spec: &SandboxSpec, base: &Base) -> Option<SandboxId> {
        let _ = (spec, base);
        None
    }

    /// Returns where it keeps what its sandboxes stand on, if it does.
    fn layers(&self) -> Option<&crate::layers::Layers> {
        None
    }

    /// Takes over a sandbox that outlived the process that made it, by its [`Sandbox::anchor`];
    /// `None` if it is gone, and then nothing of it is left on the host either.
    async fn adopt(
        &self,
        id: &SandboxId,
        spec: &SandboxSpec,
        anchor: &str,
    ) -> Result<Option<Box<dyn Sandbox>>, SandboxError> {
        let _ = (id, spec, anchor);
        Ok(None)
    }

    /// Removes whatever a sandbox of this id has on the host, however far its making or its end
    /// had come when the process that saw to it was killed.
    async fn reclaim(&self, id: &SandboxId) -> Result<(), SandboxError> {
        let _ = id;
        Ok(())
    }

    /// Returns the ids of sandboxes that were made to outlive a process with this backend's settings
    /// and that the host still has something of; what no record names belongs to nobody. What
    /// another process made for itself is not among them.
    async fn remains(&self) -> Result<Vec<SandboxId>, SandboxError> {
        Ok(Vec::new())
    }
}

impl fmt::Debug for dyn IsolationBackend + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IsolationBackend").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// A hundredth of a CPU is the least that the kernel's scheduler can hold: 1 ms in each 100 ms.
const CPU_QUOTA_MILLIS: std::ops::RangeInclusive<u32> = 10..=10_000_000;

/// What a caller asks of a creation beside the spec.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CreateOptions {
    /// The id that the sandbox shall have.
    pub id: Option<SandboxId>,
    /// Limits that were asked for by name, so that even their default value must be enforced.
    pub demanded: BTreeSet<Limit>,
    /// Limits that may be missing, asked for or not.
    pub accept_missing: BTreeSet<Limit>,
    /// CPU time per second of clock, in thousandths of one CPU.
    pub cpu_quota_millis: Option<u32>,
    /// Whether it shall outlive the process that makes it, to be adopted by the next.
    pub persistent: bool,
    /// What its root stands on.
    pub base: Base,
}

impl CreateOptions {
    /// Checks what can be checked without a host.
    pub fn validate(&self) -> Result<(), SandboxError> {
        if let Some(id) = &self.id {
            id.validate()?;
        }
        self.base.validate()?;
        match self.cpu_quota_millis {
            Some(quota) if !CPU_QUOTA_MILLIS.contains(&quota) => Err(SandboxError::invalid(
                "cpu_quota_millis",
                format!("{quota} is not between 10 and 10000000"),
                "1000 is one whole CPU",
            )),
            Some(_) | None => Ok(()),
        }
    }

    /// Returns the limits that must be enforced for creation to succeed: those demanded by name,
    /// and those of the spec that are not the default; without those that may be missing.
    pub fn required(&self, spec: &SandboxSpec) -> BTreeSet<Limit> {
        let mut required = self.demanded_by_name();
        required.extend(spec.limits.non_default());
        required.retain(|limit| *limit == Limit::CpuQuota || spec.limits.get(*limit).is_some());
        &required - &self.accept_missing
    }

    fn demanded_by_name(&self) -> BTreeSet<Limit> {
        let mut demanded = self.demanded.clone();
        // A quota has no default, so one that is there was asked for and one that is not was not.
        match self.cpu_quota_millis {
            Some(_) => demanded.insert(Limit::CpuQuota),
            None => demanded.remove(&Limit::CpuQuota),
        };
        &demanded - &self.accept_missing
    }
}

/// What a backend can enforce on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackendCapabilities {
    /// The backend's name.
    pub name: String,
    /// Whether a sandbox sees only files that it is given.
    pub filesystem_isolation: bool,
    /// Whether a sandbox reaches only what it is allowed to.
    pub network_isolation: bool,
    /// Whether a sandbox sees only its own processes.
    pub process_isolation: bool,
    /// Whether the limits of a spec hold.
    pub resource_limits: bool,
    /// Whether system calls are filtered.
    pub syscall_filtering: bool,
    /// Whether sandboxes outlive the process that made them.
    pub persistent_sandboxes: bool,
    /// Whether sandboxes can be saved and restored.
    pub snapshots: bool,
    /// How many there may be at once.
    pub max_concurrent_sandboxes: Option<u32>,
    /// The profiles that it knows.
    pub available_profiles: Vec<String>,
    /// What of the host it builds on: "cgroup v2", "landlock ABI 7".
    pub platform_features: Vec<String>,
}

impl BackendCapabilities {
    /// Tells whether every wall stands: files, network, processes and system calls.
    pub fn is_fully_isolated(&self) -> bool {
        self.filesystem_isolation
            && self.network_isolation
            && self.process_isolation
            && self.syscall_filtering
    }

    /// Tells whether there is no wall that a program could not step around: neither the files it
    /// sees nor the calls it makes are held back by the kernel.
    pub fn is_soft_isolation(&self) -> bool {
        !self.filesystem_isolation && !self.syscall_filtering
    }
}

/// One layer of a backend's sandboxes, as this host has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Which layer.
    pub layer: String,
    /// Whether it holds, found by trying.
    pub holds: bool,
    /// What was tried and seen.
    pub detail: String,
    /// What would mend it, where it does not hold.
    pub fix: Option<String>,
}

/// What a backend found out about its host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inspection {
    /// What was proved.
    pub capabilities: BackendCapabilities,
    /// What was tried, one line a layer.
    pub findings: Vec<Finding>,
}

/// How a backend does right now.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackendHealth {
    /// Whether it can create sandboxes.
    pub healthy: bool,
    /// How many live.
    pub active_sandboxes: u32,
    /// How much of its capacity is in use, 0 to 1.
    pub resource_utilization: f32,
    /// What a person should look at.
    pub warnings: Vec<String>,
    /// When it last made one.
    pub last_sandbox_created: Option<DateTime<Utc>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ResourceLimits;

    #[test]
    fn invalid_options_are_refused() {
        CreateOptions::default().validate().unwrap();
        let quota = |quota| CreateOptions { cpu_quota_millis: Some(quota), ..Default::default() };
        quota(1_500).validate().unwrap();
        assert!(quota(0).validate().is_err());
        assert!(quota(u32::MAX).validate().is_err());
        let id = SandboxId::from_string("a/b");
        assert!(CreateOptions { id: Some(id), ..Default::default() }.validate().is_err());
    }

    #[test]
    fn required_limits_are_those_asked_for_without_those_that_may_be_missing() {
        let big = ResourceLimits { max_memory_bytes: Some(1 << 30), ..Default::default() };
        let set = |limits: &[Limit]| limits.iter().copied().collect::<BTreeSet<_>>();
        for (limits, demanded, accepted, quota, expected) in [
            (ResourceLimits::default(), set(&[]), set(&[]), None, set(&[])),
            (big.clone(), set(&[]), set(&[]), None, set(&[Limit::Memory])),
            (big, set(&[]), set(&[Limit::Memory]), None, set(&[])),
            (
                ResourceLimits::default(),
                set(&[Limit::Processes]),
                set(&[]),
                Some(500),
                set(&[Limit::Processes, Limit::CpuQuota]),
            ),
            (ResourceLimits::unlimited(), set(&[Limit::Memory]), set(&[]), None, set(&[])),
            (ResourceLimits::default(), set(&[Limit::CpuQuota]), set(&[]), None, set(&[])),
            (ResourceLimits::default(), set(&[]), set(&[Limit::CpuQuota]), Some(1), set(&[])),
        ] {
            let spec = SandboxSpec { limits, ..SandboxSpec::default() };
            let options = CreateOptions {
                id: None,
                demanded,
                accept_missing: accepted,
                cpu_quota_millis: quota,
                persistent: false,
                base: Base::default(),
            };
            assert_eq!(options.required(&spec), expected, "{options:?}");
        }
    }
}
