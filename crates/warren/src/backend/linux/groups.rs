//! The control groups of one sandbox, from first to last.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use warren_init::plan::Cgroups;
use warren_sys::cgroup;

use super::host::{Controller, GroupSupport};
use super::limits::Setting;
use crate::{Result, SandboxError, SandboxId};

/// How long the last process of a group may take to be gone after it was killed.
const PATIENCE: Duration = Duration::from_secs(10);

/// The control groups of one sandbox. Dropping them removes them.
#[derive(Debug)]
pub(crate) struct Groups {
    v2: Option<PathBuf>,
    v1: Vec<PathBuf>,
    memory: Option<PathBuf>,
    pids: Option<PathBuf>,
}

/// How often the kernel refused something to a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Refusals {
    pub(crate) out_of_memory: u64,
    pub(crate) too_many_processes: u64,
}

impl Groups {
    /// Makes the groups and writes the limits, or leaves nothing.
    pub(crate) fn create(
        id: &SandboxId,
        support: &GroupSupport,
        settings: &[Setting],
    ) -> Result<Self> {
        let name = format!("warren-{id}");
        let mut groups = Self { v2: None, v1: Vec::new(), memory: None, pids: None };
        if let Some(base) = &support.v2 {
            let group = base.join(&name);
            make(&group)?;
            groups.v2 = Some(group);
        }
        for setting in settings {
            groups.apply(&name, setting)?;
        }
        let find = |controller: &Option<Controller>| match controller.as_ref()? {
            Controller::V2 => groups.v2.clone(),
            Controller::V1(base) => Some(base.join(&name)).filter(|path| groups.v1.contains(path)),
        };
        (groups.memory, groups.pids) = (find(&support.memory), find(&support.pids));
        Ok(groups)
    }

    fn apply(&mut self, name: &str, setting: &Setting) -> Result<()> {
        let group = match &setting.controller {
            Controller::V1(base) => {
                let group = base.join(name);
                if !self.v1.contains(&group) {
                    make(&group)?;
                    self.v1.push(group.clone());
                }
                group
            }
            Controller::V2 => self.v2.clone().ok_or_else(|| SandboxError::Internal {
                message: "a v2 limit without a v2 group".to_owned(),
            })?,
        };
        match cgroup::write(&group, setting.file, &setting.value) {
            Err(error) if setting.optional && error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(|error| failed(&group, setting.file, error)),
        }
    }

    /// Returns the directories for the plan.
    pub(crate) fn planned(&self) -> Cgroups {
        let text = |path: &PathBuf| path.to_string_lossy().into_owned();
        Cgroups { v2: self.v2.as_ref().map(text), v1: self.v1.iter().map(text).collect() }
    }

    /// Reads how often the kernel refused memory or a process.
    pub(crate) fn refusals(&self) -> Refusals {
        let count = |group: &Option<PathBuf>, files: &[&str], key: &str| {
            let group = group.as_ref()?;
            let text = files.iter().find_map(|file| cgroup::read(group, file).ok())?;
            cgroup::field(&text, key)
        };
        let memory = count(&self.memory, &["memory.events", "memory.oom_control"], "oom_kill");
        let pids = count(&self.pids, &["pids.events"], "max");
        Refusals {
            out_of_memory: memory.unwrap_or_default(),
            too_many_processes: pids.unwrap_or_default(),
        }
    }

    /// Returns the most memory that the sandbox ever held.
    pub(crate) fn peak_memory(&self) -> Option<u64> {
        let group = self.memory.as_ref()?;
        let files = ["memory.peak", "memory.max_usage_in_bytes"];
        files.iter().find_map(|file| cgroup::read(group, file).ok()?.trim().parse().ok())
    }

    /// Returns the CPU time of everything that ran in the sandbox.
    pub(crate) fn cpu_time(&self) -> Option<Duration> {
        let text = cgroup::read(self.v2.as_ref()?, "cpu.stat").ok()?;
        cgroup::field(&text, "usage_usec").map(Duration::from_micros)
    }

    /// Ends whatever is in the groups at once, where the kernel can.
    pub(crate) fn kill(&self) {
        if let Some(group) = &self.v2 {
            let _ = cgroup::write(group, "cgroup.kill", "1");
        }
    }

    /// Removes the groups; every process in them must be dead or dying.
    pub(crate) fn remove(&mut self) -> Result<()> {
        let mut result = Ok(());
        for group in self.v2.take().into_iter().chain(self.v1.drain(..)) {
            if let Err(error) = cgroup::remove(&group, PATIENCE) {
                result = Err(SandboxError::step("remove the control group", &group, error));
            }
        }
        result
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        // Only reached with groups left when a creation failed or a sandbox was never destroyed;
        // whoever could be told of a failure is gone.
        let _ = self.remove();
    }
}

fn make(group: &Path) -> Result<()> {
    fs::create_dir(group)
        .map_err(|error| SandboxError::step("create the control group", group, error))
}

fn failed(group: &Path, file: &str, error: io::Error) -> SandboxError {
    SandboxError::step("set the limit", group.join(file), error)
}
