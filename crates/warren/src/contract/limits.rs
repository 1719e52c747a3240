//! The limits of a sandbox, and how each is held.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How much of the host a sandbox may use. Absent means without a bound.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceLimits {
    /// Memory of all its processes together.
    pub max_memory_bytes: Option<u64>,
    /// CPU time of one exec.
    pub max_cpu_time_ms: Option<u64>,
    /// Time by the clock of one exec.
    pub max_wall_time_ms: Option<u64>,
    /// Processes and threads at once.
    pub max_processes: Option<u32>,
    /// Open files of each process.
    pub max_open_files: Option<u32>,
    /// Output of one exec, stdout and stderr together.
    pub max_output_bytes: Option<u64>,
    /// Bytes that its files may take up.
    pub max_write_bytes: Option<u64>,
    /// Its share of the CPU against others, 1 to 10000.
    pub cpu_weight: Option<u32>,
}

impl Default for ResourceLimits {
    fn default() -> Self {
        Self {
            max_memory_bytes: Some(512 << 20),
            max_cpu_time_ms: Some(60_000),
            max_wall_time_ms: Some(120_000),
            max_processes: Some(64),
            max_open_files: Some(256),
            max_output_bytes: Some(10 << 20),
            max_write_bytes: Some(100 << 20),
            cpu_weight: Some(100),
        }
    }
}

impl ResourceLimits {
    /// Sets no bound on anything.
    pub fn unlimited() -> Self {
        Self {
            max_memory_bytes: None,
            max_cpu_time_ms: None,
            max_wall_time_ms: None,
            max_processes: None,
            max_open_files: None,
            max_output_bytes: None,
            max_write_bytes: None,
            cpu_weight: None,
        }
    }

    /// Returns the value of one limit. A CPU quota is no part of these, so it has none here.
    pub fn get(&self, limit: Limit) -> Option<u64> {
        match limit {
            Limit::Memory => self.max_memory_bytes,
            Limit::CpuTime => self.max_cpu_time_ms,
            Limit::WallTime => self.max_wall_time_ms,
            Limit::Processes => self.max_processes.map(u64::from),
            Limit::OpenFiles => self.max_open_files.map(u64::from),
            Limit::Output => self.max_output_bytes,
            Limit::Write => self.max_write_bytes,
            Limit::CpuWeight => self.cpu_weight.map(u64::from),
            Limit::CpuQuota => None,
        }
    }

    /// Returns the limits whose value is not the default, which count as asked for.
    ///
    /// A limit that was taken away asks for nothing to be enforced, so it is not among them.
    pub fn non_default(&self) -> BTreeSet<Limit> {
        let default = Self::default();
        Limit::ALL
            .into_iter()
            .filter(|&limit| self.get(limit).is_some() && self.get(limit) != default.get(limit))
            .collect()
    }
}

/// A limit by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// `max_memory_bytes`.
    Memory,
    /// `max_cpu_time_ms`.
    CpuTime,
    /// `max_wall_time_ms`.
    WallTime,
    /// `max_processes`.
    Processes,
    /// `max_open_files`.
    OpenFiles,
    /// `max_output_bytes`.
    Output,
    /// `max_write_bytes`.
    Write,
    /// `cpu_weight`.
    CpuWeight,
    /// [`CreateOptions::cpu_quota_millis`](crate::CreateOptions::cpu_quota_millis).
    #[serde(rename = "cpus")]
    CpuQuota,
}

impl Limit {
    /// Every limit there is.
    pub const ALL: [Self; 9] = [
        Self::Memory,
        Self::CpuTime,
        Self::WallTime,
        Self::Processes,
        Self::OpenFiles,
        Self::Output,
        Self::Write,
        Self::CpuWeight,
        Self::CpuQuota,
    ];

    /// Returns the name that users write: `memory`, `cpu-time`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::CpuTime => "cpu-time",
            Self::WallTime => "wall-time",
            Self::Processes => "processes",
            Self::OpenFiles => "open-files",
            Self::Output => "output",
            Self::Write => "write",
            Self::CpuWeight => "cpu-weight",
            Self::CpuQuota => "cpus",
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Limit {
    type Err = UnknownLimit;

    fn from_str(name: &str) -> Result<Self, UnknownLimit> {
        Self::ALL
            .into_iter()
            .find(|limit| limit.name() == name)
            .ok_or_else(|| UnknownLimit { name: name.to_owned() })
    }
}

/// A name that is no limit's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no limit is called `{name}`; they are {}", Limit::ALL.map(Limit::name).join(", "))]
pub struct UnknownLimit {
    /// The name that was given.
    pub name: String,
}

/// How closely a limit is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// As it was asked.
    Exact,
    /// By the nearest bound that this host has.
    Nearest,
}

/// A limit in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnforcedLimit {
    /// Which one.
    pub limit: Limit,
    /// Its value, in the unit of its field.
    pub value: u64,
    /// How closely it is held.
    pub bound: Bound,
    /// What holds it: "cgroup v1 memory", "init watches memory".
    pub by: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_parses_from_the_name_it_shows() {
        for limit in Limit::ALL {
            assert_eq!(limit.to_string().parse(), Ok(limit));
            let json = serde_json::to_string(&limit).unwrap();
            assert_eq!(json, format!("\"{limit}\""), "serde and Display agree");
        }
        let unknown = "ram".parse::<Limit>().unwrap_err();
        assert!(unknown.to_string().contains("`ram`") && unknown.to_string().contains("memory"));
    }

    #[test]
    fn a_limit_counts_as_asked_for_when_it_is_set_and_not_the_default() {
        assert!(ResourceLimits::default().non_default().is_empty());
        assert!(ResourceLimits::unlimited().non_default().is_empty());
        let limits = ResourceLimits {
            max_memory_bytes: Some(1 << 30),
            cpu_weight: Some(200),
            max_processes: None,
            ..ResourceLimits::default()
        };
        assert_eq!(limits.non_default(), BTreeSet::from([Limit::Memory, Limit::CpuWeight]));
    }
}
