//! How strongly a sandbox is to be walled off, and what of that may not be missing.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{BackendCapabilities, Base, SandboxSelectionOptions};

/// A rung of the ladder: what stands between a program and the host. Each is stronger, and dearer, than
/// the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IsolationLevel {
    /// Rules on what a process of the host may do: Landlock, seccomp, rlimits.
    Process,
    /// Views of its own of files, processes and network, on the host's kernel.
    Namespace,
    /// Likewise, by a container runtime that others trust and audit.
    Container,
    /// A kernel of its own: the host's is asked for little.
    Kernel,
}

impl IsolationLevel {
    /// Every level, the weakest first.
    pub const ALL: [Self; 4] = [Self::Process, Self::Namespace, Self::Container, Self::Kernel];

    /// Returns the name that users write.
    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Namespace => "namespace",
            Self::Container => "container",
            Self::Kernel => "kernel",
        }
    }

    /// Returns what every backend of this level must have proved.
    pub fn guarantees(self) -> BTreeSet<Guarantee> {
        use Guarantee::{Filesystem, Network, Process, Syscalls};
        match self {
            // A process without namespaces can be kept from touching others, but sees that they are there.
            Self::Process => [Filesystem, Network, Syscalls].into(),
            Self::Namespace | Self::Container | Self::Kernel => {
                [Filesystem, Network, Process, Syscalls].into()
            }
        }
    }
}

impl fmt::Display for IsolationLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for IsolationLevel {
    type Err = UnknownIsolation;

    fn from_str(name: &str) -> Result<Self, UnknownIsolation> {
        let found = Self::ALL.into_iter().find(|level| level.name() == name);
        found.ok_or_else(|| UnknownIsolation {
            what: "isolation level",
            name: name.to_owned(),
            known: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// One thing that may not be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Guarantee {
    /// Only files that it is given can be opened.
    Filesystem,
    /// Only what it is allowed to can be reached.
    Network,
    /// No process but its own can be seen or touched.
    Process,
    /// Each limit of the spec holds exactly, the defaults too.
    Limits,
    /// System calls are filtered.
    Syscalls,
}

impl Guarantee {
    /// Every one there is.
    pub const ALL: [Self; 5] =
        [Self::Filesystem, Self::Network, Self::Process, Self::Limits, Self::Syscalls];

    /// Returns the name that users write.
    pub fn name(self) -> &'static str {
        match self {
            Self::Filesystem => "filesystem",
            Self::Network => "network",
            Self::Process => "process",
            Self::Limits => "limits",
            Self::Syscalls => "syscalls",
        }
    }

    /// Says what is missing where it is not given.
    pub fn description(self) -> &'static str {
        match self {
            Self::Filesystem => "filesystem isolation",
            Self::Network => "network isolation",
            Self::Process => "process isolation",
            Self::Limits => "resource limits",
            Self::Syscalls => "a system call filter",
        }
    }

    /// Tells whether a backend has proved it.
    pub fn is_given_by(self, backend: &BackendCapabilities) -> bool {
        match self {
            Self::Filesystem => backend.filesystem_isolation,
            Self::Network => backend.network_isolation,
            Self::Process => backend.process_isolation,
            Self::Limits => backend.resource_limits,
            Self::Syscalls => backend.syscall_filtering,
        }
    }
}

impl fmt::Display for Guarantee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Guarantee {
    type Err = UnknownIsolation;

    fn from_str(name: &str) -> Result<Self, UnknownIsolation> {
        let found = Self::ALL.into_iter().find(|guarantee| guarantee.name() == name);
        found.ok_or_else(|| UnknownIsolation {
            what: "guarantee",
            name: name.to_owned(),
            known: Self::ALL.map(Self::name).join(", "),
        })
    }
}

/// A name that is no level's and no guarantee's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {what} is called `{name}`; they are {known}")]
pub struct UnknownIsolation {
    /// What was looked for.
    pub what: &'static str,
    /// The name that was given.
    pub name: String,
    /// The names that there are.
    pub known: String,
}

/// The least that a caller accepts.
///
/// By default every wall must stand: files, network, processes and system calls, whichever level that
/// takes. A level says how strong they must be; `process` alone asks for less than the default, because
/// whoever writes it has said so.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct IsolationRequirements {
    /// The weakest level that will do.
    pub level: Option<IsolationLevel>,
    /// What may not be missing beside what the level says.
    pub require: BTreeSet<Guarantee>,
}

impl IsolationRequirements {
    /// Asks for a level at least.
    pub fn at_least(level: IsolationLevel) -> Self {
        Self { level: Some(level), require: BTreeSet::new() }
    }

    /// Tells whether nothing is asked for beyond what every caller gets.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns everything that must have been proved.
    pub fn guarantees(&self) -> BTreeSet<Guarantee> {
        let level = self.level.unwrap_or(IsolationLevel::Namespace);
        &level.guarantees() | &self.require
    }

    /// Tells whether every limit must hold exactly, those with default values too.
    pub fn demands_limits(&self) -> bool {
        self.require.contains(&Guarantee::Limits)
    }

    /// Returns what a backend of some level lacks, by what its probe has proved; nothing if it will do.
    pub fn lacking(
        &self,
        level: Option<IsolationLevel>,
        backend: &BackendCapabilities,
    ) -> Vec<String> {
        let mut lacks = Vec::new();
        if let Some(wanted) = self.level
            && level.is_none_or(|level| level < wanted)
        {
            let has = level.map_or("none", IsolationLevel::name);
            lacks.push(format!("isolation level `{wanted}` (it has {has})"));
        }
        let missing = self.guarantees().into_iter().filter(|one| !one.is_given_by(backend));
        lacks.extend(missing.map(|one| one.description().to_owned()));
        lacks
    }
}

/// What an acquire asks for beside the spec.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AcquireOptions {
    /// Which sandbox may be given.
    pub select: SandboxSelectionOptions,
    /// What its root stands on.
    pub base: Base,
    /// How strongly it must be walled off.
    pub isolation: IsolationRequirements,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walled() -> BackendCapabilities {
        BackendCapabilities {
            filesystem_isolation: true,
            network_isolation: true,
            process_isolation: true,
            resource_limits: true,
            syscall_filtering: true,
            ..BackendCapabilities::default()
        }
    }

    #[test]
    fn every_level_and_guarantee_parses_from_the_name_it_shows() {
        for level in IsolationLevel::ALL {
            assert_eq!(level.to_string().parse(), Ok(level));
            assert_eq!(serde_json::to_string(&level).unwrap(), format!("\"{level}\""));
        }
        for guarantee in Guarantee::ALL {
            assert_eq!(guarantee.to_string().parse(), Ok(guarantee));
            assert_eq!(serde_json::to_string(&guarantee).unwrap(), format!("\"{guarantee}\""));
        }
        let unknown = "vm".parse::<IsolationLevel>().unwrap_err().to_string();
        assert!(unknown.contains("`vm`") && unknown.contains("kernel"), "{unknown}");
        assert!("ram".parse::<Guarantee>().is_err());
    }

    #[test]
    fn whoever_asks_for_more_never_gets_less() {
        let levels = IsolationLevel::ALL.map(Some).into_iter().chain([None]);
        for level in levels {
            for guarantee in Guarantee::ALL {
                let plain = IsolationRequirements { level, ..Default::default() };
                let more = IsolationRequirements { level, require: [guarantee].into() };
                assert!(more.guarantees().is_superset(&plain.guarantees()), "{more:?}");
                assert!(more.guarantees().contains(&guarantee));
            }
        }
        for pair in IsolationLevel::ALL.windows(2) {
            assert!(pair[0] < pair[1] && pair[0].guarantees().is_subset(&pair[1].guarantees()));
        }
    }

    #[test]
    fn a_backend_lacks_what_it_has_not_proved() {
        use IsolationLevel::{Kernel, Namespace, Process};
        type Change = fn(&mut BackendCapabilities);
        type Level = Option<IsolationLevel>;
        type Row = (Level, &'static [Guarantee], Level, Change, &'static str);
        let any: &[Guarantee] = &[];
        let rows: [Row; 9] = [
            (None, any, Some(Namespace), |_| {}, ""),
            (None, any, None, |_| {}, ""),
            (None, any, Some(Process), |b| b.process_isolation = false, "process isolation"),
            (Some(Process), any, Some(Process), |b| b.process_isolation = false, ""),
            (
                Some(Process),
                &[Guarantee::Process],
                Some(Process),
                |b| b.process_isolation = false,
                "process isolation",
            ),
            (Some(Process), any, None, |_| {}, "isolation level `process` (it has none)"),
            (
                Some(Kernel),
                &[Guarantee::Limits],
                Some(Namespace),
                |b| b.resource_limits = false,
                "isolation level `kernel` (it has namespace), resource limits",
            ),
            (Some(Namespace), any, Some(Kernel), |b| b.resource_limits = false, ""),
            // A level counts only with the walls that it stands for.
            (
                Some(Namespace),
                any,
                Some(Kernel),
                |b| b.network_isolation = false,
                "network isolation",
            ),
        ];
        for (level, require, has, change, expected) in rows {
            let mut backend = walled();
            change(&mut backend);
            let asked = IsolationRequirements { level, require: require.iter().copied().collect() };
            assert_eq!(asked.lacking(has, &backend).join(", "), expected, "{asked:?}");
        }
    }
}
