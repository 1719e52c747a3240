//! What a sandbox shall be.

use std::collections::HashSet;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Limit, ResourceLimits, Result, SandboxError};

/// What a sandbox shall be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SandboxSpec {
    /// The profile that it starts from.
    pub profile: String,
    /// Where commands run that do not say.
    pub workdir: PathBuf,
    /// Host paths that it may read, at the same place inside.
    pub allowed_paths_ro: Vec<PathBuf>,
    /// Host paths that it may read and write, at the same place inside.
    pub allowed_paths_rw: Vec<PathBuf>,
    /// Host paths that appear elsewhere inside.
    pub bind_mounts: Vec<BindMount>,
    /// Where it may connect to: host, host:port, `*.domain` or CIDR.
    pub allowed_network: Vec<String>,
    /// The environment of its commands.
    pub environment: Vec<(String, String)>,
    /// How much of the host it may use.
    pub limits: ResourceLimits,
    /// Whether it has a network beyond its own loopback.
    pub network_enabled: bool,
    /// The system call profile, if not the one of the profile.
    pub seccomp_profile: Option<String>,
    /// How long its creation may take.
    pub creation_timeout: Duration,
    /// Labels to find it by.
    pub labels: Vec<(String, String)>,
}

impl Default for SandboxSpec {
    fn default() -> Self {
        Self {
            profile: "default".to_owned(),
            workdir: PathBuf::from("/workspace"),
            allowed_paths_ro: Vec::new(),
            allowed_paths_rw: Vec::new(),
            bind_mounts: Vec::new(),
            allowed_network: Vec::new(),
            environment: Vec::new(),
            limits: ResourceLimits::default(),
            network_enabled: false,
            seccomp_profile: None,
            creation_timeout: Duration::from_secs(30),
            labels: Vec::new(),
        }
    }
}

/// A host path that appears inside.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BindMount {
    /// The path on the host.
    pub source: PathBuf,
    /// The path inside.
    pub target: PathBuf,
    /// Whether it cannot be written through this mount.
    pub readonly: bool,
}

const MAX_BINDS: usize = 256;
const MAX_ENV: usize = 4_096;
const MAX_LABELS: usize = 256;
const MAX_DESTINATIONS: usize = 1_024;
/// The kernel takes no longer string in arguments or environment (MAX_ARG_STRLEN).
pub(super) const MAX_STRING: usize = 128 << 10;
const MAX_PATH: usize = 4_095;
const MAX_NAME: usize = 128;
const MAX_LABEL_KEY: usize = 256;
const MAX_LABEL_VALUE: usize = 4_096;
const MAX_CREATION: Duration = Duration::from_secs(86_400);
const TEN_YEARS_MS: u64 = 10 * 365 * 86_400_000;

/// What of a spec is only for whoever runs the host to ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperatorOnly {
    /// It shows paths of the host, of which whoever asks may not be allowed to see so much.
    HostPaths,
    /// It has no bound on something that all share.
    NoLimit(Limit),
}

impl fmt::Display for OperatorOnly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostPaths => f.write_str("only the operator may show paths of the host"),
            Self::NoLimit(limit) => {
                write!(f, "only the operator may take a limit away, as here that of `{limit}`")
            }
        }
    }
}

impl SandboxSpec {
    /// Checks what can be checked without a host: the same for every backend, before anything is
    /// created. Whether a path or a profile exists is left to the backend.
    pub fn validate(&self) -> Result<(), SandboxError> {
        check_name("profile", &self.profile)?;
        if let Some(profile) = &self.seccomp_profile {
            check_name("seccomp_profile", profile)?;
        }
        check_path("workdir", &self.workdir)?;
        if is_kernel_path(&self.workdir) {
            return Err(kernel_path("workdir", &self.workdir));
        }
        self.validate_binds()?;
        self.validate_network()?;
        self.validate_environment()?;
        self.validate_labels()?;
        self.validate_limits()?;
        if self.creation_timeout.is_zero() || self.creation_timeout > MAX_CREATION {
            return Err(SandboxError::invalid(
                "creation_timeout",
                format!("{:?} is not between 0 and one day", self.creation_timeout),
                "30 seconds is the default",
            ));
        }
        Ok(())
    }

    /// Names what of it is only for whoever runs the host to ask for, if anything is.
    pub fn operator_only(&self) -> Option<OperatorOnly> {
        let paths = [&self.allowed_paths_ro, &self.allowed_paths_rw];
        if !self.bind_mounts.is_empty() || paths.iter().any(|paths| !paths.is_empty()) {
            return Some(OperatorOnly::HostPaths);
        }
        // Not time: who may run for ever has its share of the CPU and no more.
        let bounds = [
            Limit::Memory,
            Limit::Processes,
            Limit::OpenFiles,
            Limit::Output,
            Limit::Write,
            Limit::CpuWeight,
        ];
        let missing = bounds.into_iter().find(|limit| self.limits.get(*limit).is_none());
        missing.map(OperatorOnly::NoLimit)
    }

    fn validate_binds(&self) -> Result<()> {
        let count =
            self.allowed_paths_ro.len() + self.allowed_paths_rw.len() + self.bind_mounts.len();
        check_count("bind_mounts", "bound paths", count, MAX_BINDS)?;
        let ro = self.allowed_paths_ro.iter().enumerate();
        let ro = ro.map(|(i, path)| (format!("allowed_paths_ro[{i}]"), path));
        let rw = self.allowed_paths_rw.iter().enumerate();
        let rw = rw.map(|(i, path)| (format!("allowed_paths_rw[{i}]"), path));
        let binds = self.bind_mounts.iter().enumerate();
        let binds = binds.map(|(i, bind)| (format!("bind_mounts[{i}].target"), &bind.target));

        let mut seen = HashSet::new();
        for (field, target) in ro.chain(rw).chain(binds) {
            check_path(&field, target)?;
            if target.parent().is_none() {
                return Err(SandboxError::invalid(
                    field,
                    "`/` would cover the sandbox's own root",
                    "bind the directories that are needed, each at its own place",
                ));
            }
            if is_kernel_path(target) {
                return Err(kernel_path(&field, target));
            }
            // Components forget doubled and trailing slashes and `.`, as the kernel does.
            if !seen.insert(target.components().collect::<PathBuf>()) {
                return Err(SandboxError::invalid(
                    field,
                    format!("`{}` is bound twice", target.display()),
                    "keep one of the two",
                ));
            }
        }
        for (i, bind) in self.bind_mounts.iter().enumerate() {
            check_path(&format!("bind_mounts[{i}].source"), &bind.source)?;
        }
        Ok(())
    }

    fn validate_network(&self) -> Result<()> {
        let count = self.allowed_network.len();
        check_count("allowed_network", "destinations", count, MAX_DESTINATIONS)?;
        for (i, destination) in self.allowed_network.iter().enumerate() {
            if destination.parse::<super::Destination>().is_err() {
                return Err(SandboxError::invalid(
                    format!("allowed_network[{i}]"),
                    format!("`{}` is no destination", destination.escape_debug()),
                    "write a host, host:port, *.domain, or a network such as 10.0.0.0/8",
                ));
            }
        }
        Ok(())
    }

    fn validate_environment(&self) -> Result<()> {
        check_count("environment", "variables", self.environment.len(), MAX_ENV)?;
        for (i, (name, value)) in self.environment.iter().enumerate() {
            check_variable(&format!("environment[{i}]"), name, value)?;
        }
        Ok(())
    }

    fn validate_labels(&self) -> Result<()> {
        check_count("labels", "labels", self.labels.len(), MAX_LABELS)?;
        let mut seen = HashSet::new();
        for (i, (key, value)) in self.labels.iter().enumerate() {
            let problem = if key.is_empty() {
                "the key is empty".to_owned()
            } else if key.len() > MAX_LABEL_KEY {
                format!("the key is longer than {MAX_LABEL_KEY} bytes")
            } else if value.len() > MAX_LABEL_VALUE {
                format!("the value is longer than {MAX_LABEL_VALUE} bytes")
            } else if key.chars().chain(value.chars()).any(char::is_control) {
                "it contains a control character".to_owned()
            } else if !seen.insert(key) {
                format!("`{key}` is given twice")
            } else {
                continue;
            };
            let hint = "a label is a short key and a short value, each key once";
            return Err(SandboxError::invalid(format!("labels[{i}]"), problem, hint));
        }
        Ok(())
    }

    fn validate_limits(&self) -> Result<()> {
        for (limit, field, least, most) in [
            (Limit::Memory, "max_memory_bytes", 1 << 20, 1 << 50),
            (Limit::CpuTime, "max_cpu_time_ms", 1, TEN_YEARS_MS),
            (Limit::WallTime, "max_wall_time_ms", 1, TEN_YEARS_MS),
            (Limit::Processes, "max_processes", 1, 4 << 20),
            // Below 8 not even a dynamic loader gets by with its three standard files.
            (Limit::OpenFiles, "max_open_files", 8, 1 << 20),
            (Limit::Output, "max_output_bytes", 1, 1 << 40),
            (Limit::Write, "max_write_bytes", 64 << 10, 1 << 50),
            (Limit::CpuWeight, "cpu_weight", 1, 10_000),
        ] {
            if let Some(value) = self.limits.get(limit)
                && !(least..=most).contains(&value)
            {
                return Err(SandboxError::invalid(
                    format!("limits.{field}"),
                    format!("{value} is not between {least} and {most}"),
                    "leave the limit out to have none",
                ));
            }
        }
        Ok(())
    }
}

/// Refuses a path that is not absolute and plain.
pub(super) fn check_path(field: &str, path: &Path) -> Result<()> {
    let bytes = path.as_os_str().as_bytes();
    let reason = if bytes.is_empty() {
        "the path is empty".to_owned()
    } else if bytes.contains(&0) {
        "the path contains a NUL byte".to_owned()
    } else if bytes.len() > MAX_PATH {
        format!("the path is longer than {MAX_PATH} bytes")
    } else if !path.is_absolute() {
        format!("`{}` is relative", path.display())
    } else if path.components().any(|part| part == Component::ParentDir) {
        format!("`{}` contains `..`", path.display())
    } else {
        return Ok(());
    };
    Err(SandboxError::invalid(field, reason, "write an absolute path without `..`"))
}

/// Refuses an environment variable that the kernel or a program would misread.
pub(super) fn check_variable(field: &str, name: &str, value: &str) -> Result<()> {
    let reason = if name.is_empty() {
        "the name is empty".to_owned()
    } else if name.contains('=') {
        format!("the name `{}` contains `=`", name.escape_debug())
    } else if name.contains('\0') || value.contains('\0') {
        "it contains a NUL byte".to_owned()
    } else if name.len() + value.len() > MAX_STRING {
        format!("it is longer than {MAX_STRING} bytes")
    } else {
        return Ok(());
    };
    Err(SandboxError::invalid(field, reason, "a variable is a name without `=`, and a value"))
}

fn check_name(field: &str, name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let reason = if name.is_empty() {
        "the name is empty".to_owned()
    } else if name.len() > MAX_NAME {
        format!("the name is longer than {MAX_NAME} bytes")
    } else if name.starts_with('.') || !name.chars().all(plain) {
        format!("`{}` is no name", name.escape_debug())
    } else {
        return Ok(());
    };
    Err(SandboxError::invalid(field, reason, "a name has letters, digits, `-`, `_` and `.`"))
}

fn check_count(field: &str, what: &str, count: usize, most: usize) -> Result<()> {
    if count <= most {
        return Ok(());
    }
    let reason = format!("{count} {what} are more than {most}");
    Err(SandboxError::invalid(field, reason, "bind a common parent, or pass a file"))
}

fn is_kernel_path(path: &Path) -> bool {
    ["/proc", "/sys", "/dev"].iter().any(|kernel| path.starts_with(kernel))
}

fn kernel_path(field: &str, path: &Path) -> SandboxError {
    SandboxError::invalid(
        field,
        format!("`{}` belongs to the sandbox's own /proc, /sys or /dev", path.display()),
        "choose a place outside of /proc, /sys and /dev",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    type Change = fn(&mut SandboxSpec);

    fn bind(target: &str) -> BindMount {
        BindMount { source: "/tmp".into(), target: target.into(), readonly: true }
    }

    #[test]
    fn an_invalid_spec_is_refused_with_its_field_its_reason_and_a_hint() {
        let rows: &[(&str, &str, Change)] = &[
            ("profile", "empty", |s| s.profile.clear()),
            ("profile", "no name", |s| s.profile = "../x".into()),
            ("profile", "no name", |s| s.profile = "..".into()),
            ("profile", "no name", |s| s.profile = "a\0b".into()),
            ("profile", "longer", |s| s.profile = "a".repeat(129)),
            ("seccomp_profile", "no name", |s| s.seccomp_profile = Some("a/b".into())),
            ("seccomp_profile", "empty", |s| s.seccomp_profile = Some(String::new())),
            ("workdir", "empty", |s| s.workdir = "".into()),
            ("workdir", "relative", |s| s.workdir = "work".into()),
            ("workdir", "`..`", |s| s.workdir = "/a/../b".into()),
            ("workdir", "NUL", |s| s.workdir = "/a\0".into()),
            ("workdir", "longer", |s| s.workdir = format!("/{}", "a".repeat(4095)).into()),
            ("workdir", "/proc", |s| s.workdir = "/proc/self".into()),
            ("allowed_paths_ro[0]", "relative", |s| s.allowed_paths_ro = vec!["data".into()]),
            ("allowed_paths_ro[0]", "empty", |s| s.allowed_paths_ro = vec!["".into()]),
            ("allowed_paths_ro[1]", "`..`", |s| {
                s.allowed_paths_ro = vec!["/a".into(), "/..".into()];
            }),
            ("allowed_paths_ro[0]", "root", |s| s.allowed_paths_ro = vec!["/".into()]),
            ("allowed_paths_rw[0]", "root", |s| s.allowed_paths_rw = vec!["//.//".into()]),
            ("allowed_paths_rw[0]", "/proc", |s| s.allowed_paths_rw = vec!["/proc".into()]),
            ("allowed_paths_rw[0]", "twice", |s| {
                s.allowed_paths_ro = vec!["/a".into()];
                s.allowed_paths_rw = vec!["/a/".into()];
            }),
            ("bind_mounts[0].target", "relative", |s| s.bind_mounts = vec![bind("x")]),
            ("bind_mounts[0].target", "/dev", |s| s.bind_mounts = vec![bind("/dev/shm")]),
            ("bind_mounts[0].target", "/sys", |s| s.bind_mounts = vec![bind("/./sys//kernel")]),
            ("bind_mounts[0].target", "NUL", |s| s.bind_mounts = vec![bind("/a\0b")]),
            ("bind_mounts[1].target", "twice", |s| s.bind_mounts = vec![bind("/a"), bind("//a/.")]),
            ("bind_mounts[0].source", "relative", |s| {
                s.bind_mounts = vec![BindMount { source: "x".into(), ..bind("/a") }];
            }),
            ("bind_mounts", "more than 256", |s| {
                s.bind_mounts = (0..257).map(|i| bind(&format!("/m/{i}"))).collect();
            }),
            ("allowed_network[0]", "no destination", |s| s.allowed_network = vec!["".into()]),
            ("allowed_network[0]", "no destination", |s| s.allowed_network = vec!["a b".into()]),
            ("allowed_network[0]", "no destination", |s| s.allowed_network = vec!["a:0".into()]),
            ("allowed_network[0]", "no destination", |s| {
                s.allowed_network = vec!["a:99999".into()]
            }),
            ("allowed_network[0]", "no destination", |s| s.allowed_network = vec!["*".into()]),
            ("allowed_network[0]", "no destination", |s| {
                s.allowed_network = vec!["10.0.0.0/33".into()];
            }),
            ("allowed_network[0]", "no destination", |s| {
                s.allowed_network = vec!["http://a".into()];
            }),
            ("environment[0]", "empty", |s| s.environment = vec![("".into(), "v".into())]),
            ("environment[0]", "`=`", |s| s.environment = vec![("A=B".into(), "v".into())]),
            ("environment[0]", "NUL", |s| s.environment = vec![("A\0".into(), "v".into())]),
            ("environment[0]", "NUL", |s| s.environment = vec![("A".into(), "v\0".into())]),
            ("environment[0]", "longer", |s| {
                s.environment = vec![("A".into(), "v".repeat(128 << 10))];
            }),
            ("environment", "more than 4096", |s| {
                s.environment = (0..4097).map(|i| (format!("V{i}"), String::new())).collect();
            }),
            ("labels[0]", "empty", |s| s.labels = vec![("".into(), "v".into())]),
            ("labels[0]", "longer", |s| s.labels = vec![("k".repeat(257), "v".into())]),
            ("labels[0]", "longer", |s| s.labels = vec![("k".into(), "v".repeat(4097))]),
            ("labels[0]", "control", |s| s.labels = vec![("k".into(), "a\nb".into())]),
            ("labels[1]", "twice", |s| {
                s.labels = vec![("k".into(), "a".into()), ("k".into(), "b".into())];
            }),
            ("labels", "more than 256", |s| {
                s.labels = (0..257).map(|i| (format!("k{i}"), String::new())).collect();
            }),
            ("limits.max_memory_bytes", "0 is not", |s| s.limits.max_memory_bytes = Some(0)),
            ("limits.max_memory_bytes", "between", |s| {
                s.limits.max_memory_bytes = Some((1 << 20) - 1);
            }),
            ("limits.max_memory_bytes", "between", |s| s.limits.max_memory_bytes = Some(u64::MAX)),
            ("limits.max_cpu_time_ms", "between", |s| s.limits.max_cpu_time_ms = Some(0)),
            ("limits.max_wall_time_ms", "between", |s| s.limits.max_wall_time_ms = Some(0)),
            ("limits.max_wall_time_ms", "between", |s| s.limits.max_wall_time_ms = Some(u64::MAX)),
            ("limits.max_processes", "between", |s| s.limits.max_processes = Some(0)),
            ("limits.max_processes", "between", |s| s.limits.max_processes = Some(u32::MAX)),
            ("limits.max_open_files", "between", |s| s.limits.max_open_files = Some(0)),
            ("limits.max_open_files", "between", |s| s.limits.max_open_files = Some(1_048_577)),
            ("limits.max_output_bytes", "between", |s| s.limits.max_output_bytes = Some(0)),
            ("limits.max_write_bytes", "between", |s| s.limits.max_write_bytes = Some(65_535)),
            ("limits.cpu_weight", "between", |s| s.limits.cpu_weight = Some(0)),
            ("limits.cpu_weight", "between", |s| s.limits.cpu_weight = Some(10_001)),
            ("creation_timeout", "0ns", |s| s.creation_timeout = Duration::ZERO),
            ("creation_timeout", "one day", |s| s.creation_timeout = Duration::MAX),
        ];
        for (i, (expected, words, change)) in rows.iter().enumerate() {
            let mut spec = SandboxSpec::default();
            change(&mut spec);
            let error = spec.validate().expect_err(&format!("row {i}: {expected} {words}"));
            let SandboxError::InvalidSpec { field, reason, hint } = &error else {
                panic!("row {i}: {error}");
            };
            assert_eq!(field, expected, "row {i}: {error}");
            assert!(reason.contains(words), "row {i}: `{reason}` does not say `{words}`");
            assert!(!hint.is_empty(), "row {i} has a hint");
        }
    }

    #[test]
    fn a_sensible_spec_is_accepted() {
        let rows: &[Change] = &[
            |_| {},
            |s| s.workdir = "/".into(),
            |s| s.allowed_paths_ro = vec!["/srv/a".into(), "/srv/b/".into(), "/process".into()],
            |s| s.bind_mounts = vec![bind("/a"), bind("/a/b"), bind("/devices")],
            |s| s.bind_mounts = vec![BindMount { source: "/".into(), ..bind("/host") }],
            |s| s.limits = ResourceLimits::unlimited(),
            |s| s.limits.max_memory_bytes = Some(1 << 20),
            |s| s.limits.cpu_weight = Some(10_000),
            |s| s.environment = vec![("A".into(), "x=y".into()), ("A".into(), String::new())],
            |s| s.labels = vec![("team".into(), "blue ☂".into())],
            |s| {
                s.allowed_network = [
                    "example.org",
                    "example.org:443",
                    "*.example.org",
                    "*.example.org:443",
                    "10.0.0.0/8",
                    "10.1.2.3",
                    "10.1.2.3:80",
                    "2001:db8::/32",
                    "::1",
                    "[::1]:80",
                    "localhost",
                    "a.b.",
                ]
                .map(String::from)
                .to_vec();
            },
        ];
        for (i, change) in rows.iter().enumerate() {
            let mut spec = SandboxSpec::default();
            change(&mut spec);
            spec.validate().unwrap_or_else(|error| panic!("row {i}: {error}"));
        }
    }
}
