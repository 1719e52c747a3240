//! What is sent and what is shown: types of the wire, apart from those of the library.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use chrono::{DateTime, Utc};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};
use warren::{
    BindMount, Command, Denial, Enforcement, Envelope, ExecCause, ExecReport,
    IsolationRequirements, Receipt, RequiredCapabilities, ResourceLimits, ResourceUsage,
    SandboxCapabilities, SandboxError, SandboxId, SandboxSelectionOptions, SandboxSession,
    SandboxSpec, SessionState, SignedReceipt, UnknownIsolation,
};

use super::snapshots::DiffView;
use crate::error::ApiError;
use crate::keys::Quotas;
use crate::principal::split;

/// Reads a map, and refuses one that says two things of one key: readers would differ in which holds.
fn unique<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    struct Unique;

    impl<'de> Visitor<'de> for Unique {
        type Value = BTreeMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object of texts")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut read = BTreeMap::new();
            while let Some((key, value)) = map.next_entry::<String, String>()? {
                if read.contains_key(&key) {
                    let key = key.escape_debug();
                    return Err(A::Error::custom(format!("duplicate key `{key}`")));
                }
                read.insert(key, value);
            }
            Ok(read)
        }
    }
    from.deserialize_map(Unique)
}

/// The label that people call a sandbox by.
pub const NAME_LABEL: &str = "name";
/// The label of a sandbox whose commands are followed.
pub const EXPLAIN_LABEL: &str = "explain";
/// What it says then.
pub const EXPLAINED: &str = "true";

/// What a new sandbox shall be, and which one may be given instead.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CreateSandboxBody {
    /// A name to call it by: the label `name`, unique among the caller's sandboxes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The template that it is made from: its name, with a tag or without, or its id. What is said
    /// here holds over what the template has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The profile that it starts from; `default` if absent, or the template's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Where commands run that do not say; `/workspace` if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// Host paths that it may read. For the operator alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allowed_paths_ro: Vec<String>,
    /// Host paths that it may read and write. For the operator alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allowed_paths_rw: Vec<String>,
    /// Host paths that appear elsewhere inside. For the operator alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bind_mounts: Vec<BindMountBody>,
    /// Whether it has a network beyond its own loopback.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub network_enabled: bool,
    /// Where it may connect to: host, host:port, `*.domain` or CIDR.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allowed_network: Vec<String>,
    /// The environment of its commands.
    #[serde(deserialize_with = "unique", skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// How much of the host it may use.
    pub limits: LimitsBody,
    /// The system call profile, if not the one of the profile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seccomp_profile: Option<String>,
    /// How long its creation may take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_timeout_ms: Option<u64>,
    /// Labels to find it by.
    #[serde(deserialize_with = "unique", skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The weakest isolation that will do: `process`, `namespace`, `container` or `kernel`. Nothing weaker
    /// is ever given, and the cheapest that will do is taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolation: Option<String>,
    /// What may not be missing beside that: `filesystem`, `network`, `process`, `limits`, `syscalls`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub require: Vec<String>,
    /// Which sandbox may be given.
    pub select: SelectBody,
    /// Whether its walls are tried from inside before it is given, and its limits too if nothing has run
    /// in it yet. One that does not hold is destroyed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub verify: bool,
    /// Whether its commands are followed, each as if it said `explain`: the label `explain`, which is then
    /// `true`. Where they cannot be followed they are not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub explain: bool,
}

/// A host path that appears inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BindMountBody {
    /// The path on the host.
    pub source: String,
    /// The path inside.
    pub target: String,
    /// Whether it cannot be written through this mount.
    #[serde(default)]
    pub readonly: bool,
}

/// Limits: absent is the default, `null` is none, which is for the operator alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsBody {
    /// Memory of all its processes together.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub max_memory_bytes: Option<Option<u64>>,
    /// CPU time of one exec.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub max_cpu_time_ms: Option<Option<u64>>,
    /// Time by the clock of one exec.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub max_wall_time_ms: Option<Option<u64>>,
    /// Processes and threads at once.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>)]
    pub max_processes: Option<Option<u32>>,
    /// Open files of each process.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>)]
    pub max_open_files: Option<Option<u32>>,
    /// Output of one exec, stdout and stderr together.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub max_output_bytes: Option<Option<u64>>,
    /// Bytes that its files may take up.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub max_write_bytes: Option<Option<u64>>,
    /// Its share of the CPU against others, 1 to 10000.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>)]
    pub cpu_weight: Option<Option<u32>>,
}

/// Tells `null` from nothing.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

impl LimitsBody {
    fn limits(&self) -> ResourceLimits {
        let mut limits = ResourceLimits::default();
        self.lay_over(&mut limits);
        limits
    }

    /// Puts what is said here over what holds otherwise.
    pub(crate) fn lay_over(&self, limits: &mut ResourceLimits) {
        let before = limits.clone();
        *limits = ResourceLimits {
            max_memory_bytes: self.max_memory_bytes.unwrap_or(before.max_memory_bytes),
            max_cpu_time_ms: self.max_cpu_time_ms.unwrap_or(before.max_cpu_time_ms),
            max_wall_time_ms: self.max_wall_time_ms.unwrap_or(before.max_wall_time_ms),
            max_processes: self.max_processes.unwrap_or(before.max_processes),
            max_open_files: self.max_open_files.unwrap_or(before.max_open_files),
            max_output_bytes: self.max_output_bytes.unwrap_or(before.max_output_bytes),
            max_write_bytes: self.max_write_bytes.unwrap_or(before.max_write_bytes),
            cpu_weight: self.cpu_weight.unwrap_or(before.cpu_weight),
        };
    }

    /// Tells whether a limit is taken away.
    pub(crate) fn lifts_any(&self) -> bool {
        let Self {
            max_memory_bytes,
            max_cpu_time_ms,
            max_wall_time_ms,
            max_processes,
            max_open_files,
            max_output_bytes,
            max_write_bytes,
            cpu_weight,
        } = self;
        [max_memory_bytes, max_cpu_time_ms, max_wall_time_ms, max_output_bytes, max_write_bytes]
            .contains(&&Some(None))
            || [max_processes, max_open_files, cpu_weight].contains(&&Some(None))
    }
}

/// Which sandbox an acquire may give.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SelectBody {
    /// This one, if it lives and fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_id: Option<String>,
    /// Only one that no command has ever run in.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub require_fresh: bool,
    /// Only one of this backend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Whether a warm one may be taken from the pool.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub use_pool: bool,
    /// Labels that it must bear.
    #[serde(deserialize_with = "unique", skip_serializing_if = "BTreeMap::is_empty")]
    pub required_labels: BTreeMap<String, String>,
    /// What it must be able to do.
    pub required_capabilities: RequiredCapabilitiesBody,
}

/// What a sandbox must be able to do, each only where given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RequiredCapabilitiesBody {
    /// Whether it must, or must not, have a network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
    /// Whether it must, or must not, be able to write files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_access: Option<bool>,
    /// The least memory that it may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_memory_bytes: Option<u64>,
    /// Paths that it must be able to read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub readable_paths: Vec<String>,
    /// Paths that it must be able to write.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub writable_paths: Vec<String>,
}

impl CreateSandboxBody {
    /// Returns the spec that the body asks for.
    pub(crate) fn spec(&self) -> Result<SandboxSpec, ApiError> {
        let default = SandboxSpec::default();
        let paths = |paths: &[String]| paths.iter().map(PathBuf::from).collect();
        let bind = |bind: &BindMountBody| BindMount {
            source: (&bind.source).into(),
            target: (&bind.target).into(),
            readonly: bind.readonly,
        };
        let pairs = |map: &BTreeMap<String, String>| {
            map.iter().map(|(key, value)| (key.clone(), value.clone())).collect::<Vec<_>>()
        };
        let mut labels = self.labels.clone();
        if let Some(name) = &self.name {
            check_name(name)?;
            if labels.insert(NAME_LABEL.to_owned(), name.clone()).is_some_and(|old| old != *name) {
                let hint = "give the name once";
                let reason = "the label `name` says another name";
                return Err(SandboxError::invalid("name", reason, hint).into());
            }
        } else if let Some(name) = labels.get(NAME_LABEL) {
            check_name(name)?;
        }
        if self.explain {
            let said = labels.insert(EXPLAIN_LABEL.to_owned(), EXPLAINED.to_owned());
            if said.is_some_and(|said| said != EXPLAINED) {
                let (reason, hint) = ("the label `explain` says something else", "say it once");
                return Err(SandboxError::invalid("explain", reason, hint).into());
            }
        }
        let spec = SandboxSpec {
            profile: self.profile.clone().unwrap_or(default.profile),
            workdir: self.workdir.as_ref().map_or(default.workdir, PathBuf::from),
            allowed_paths_ro: paths(&self.allowed_paths_ro),
            allowed_paths_rw: paths(&self.allowed_paths_rw),
            bind_mounts: self.bind_mounts.iter().map(bind).collect(),
            allowed_network: self.allowed_network.clone(),
            environment: pairs(&self.environment),
            limits: self.limits.limits(),
            network_enabled: self.network_enabled,
            seccomp_profile: self.seccomp_profile.clone(),
            creation_timeout: self
                .creation_timeout_ms
                .map_or(default.creation_timeout, Duration::from_millis),
            labels: pairs(&labels),
        };
        spec.validate()?;
        Ok(spec)
    }

    /// Returns how strongly the sandbox must be walled off.
    pub(crate) fn isolation(&self) -> Result<IsolationRequirements, ApiError> {
        let unknown = |field: &str, error: UnknownIsolation| {
            let name = error.name.escape_debug();
            let reason = format!("there is no {} `{name}`", error.what);
            SandboxError::invalid(field, reason, format!("they are {}", error.known))
        };
        let level = self.isolation.as_deref().map(str::parse).transpose();
        let require = self.require.iter().map(|name| name.parse()).collect::<Result<_, _>>();
        Ok(IsolationRequirements {
            level: level.map_err(|error| unknown("isolation", error))?,
            require: require.map_err(|error| unknown("require", error))?,
        })
    }

    /// Returns the selection that the body asks for.
    pub(crate) fn options(&self) -> Result<SandboxSelectionOptions, ApiError> {
        let select = &self.select;
        let needs = &select.required_capabilities;
        Ok(SandboxSelectionOptions {
            preferred_id: select.preferred_id.clone().map(crate::extract::plain).transpose()?,
            require_fresh: select.require_fresh,
            required_capabilities: RequiredCapabilities {
                network: needs.network,
                write_access: needs.write_access,
                min_memory_bytes: needs.min_memory_bytes,
                readable_paths: needs.readable_paths.clone(),
                writable_paths: needs.writable_paths.clone(),
            },
            preferred_backend: select.backend.clone(),
            required_labels: select.required_labels.clone().into_iter().collect(),
            use_pool: select.use_pool,
        })
    }
}

/// A name stands on command lines and in tables, so it is as plain as an id.
fn check_name(name: &str) -> Result<(), ApiError> {
    SandboxId::from_string(name).validate().map_err(|_| {
        let hint = "a name has up to 128 letters, digits, `-`, `_` and `.`";
        let reason = format!("`{}` is no name", name.escape_debug());
        SandboxError::invalid("name", reason, hint).into()
    })
}

/// How to join a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AttachBody {
    /// Whether a sandbox with this id is made when there is none.
    pub create_if_missing: bool,
    /// What to make then.
    pub create: Option<CreateSandboxBody>,
}

/// How to give a sandbox back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ReleaseBody {
    /// Whether it stays, for the same client to take up again.
    pub keep_alive: bool,
}

/// How to stop a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SuspendBody {
    /// Whether the memory that it holds is freed meanwhile. Where that cannot be, the session is as it was.
    pub to_disk: bool,
}

/// Which sandbox is used when a caller names none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DefaultBody {
    /// The sandbox.
    pub sandbox_id: String,
}

/// Which sandbox is used when a caller names none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DefaultView {
    /// The sandbox, if there is one.
    pub sandbox_id: Option<String>,
}

/// A command to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecBody {
    /// The program: a path inside, or a name to be found in the sandbox's `PATH`.
    pub program: String,
    /// Its arguments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Where it runs; the sandbox's own directory if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// Its environment beside the sandbox's own.
    #[serde(default, deserialize_with = "unique", skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// What it reads from stdin, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    /// What it reads from stdin, in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_base64: Option<String>,
    /// How long it may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// Whether it is followed, call by call, so that its `denials` say what walls refused to it; it
    /// takes longer then. Not every backend can.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub explain: bool,
}

/// A command to run in a sandbox of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunBody {
    /// The command.
    pub command: ExecBody,
    /// What the sandbox shall be. A warm one is taken where one fits.
    #[serde(default)]
    pub sandbox: CreateSandboxBody,
}

/// Returns what a command is to read, which is given in one of two ways.
pub(super) fn stdin(
    text: Option<String>,
    encoded: Option<String>,
) -> Result<Option<Vec<u8>>, ApiError> {
    match (text, encoded) {
        (None, None) => Ok(None),
        (Some(text), None) => Ok(Some(text.into_bytes())),
        (None, Some(encoded)) => Ok(Some(BASE64.decode(encoded).map_err(|error| {
            let hint = "encode it as in RFC 4648, section 4";
            SandboxError::invalid("stdin_base64", error.to_string(), hint)
        })?)),
        (Some(_), Some(_)) => {
            let reason = "`stdin` is given too";
            Err(SandboxError::invalid("stdin_base64", reason, "give one").into())
        }
    }
}

impl ExecBody {
    /// Sets what it reads from stdin, as text where it is text.
    pub fn set_stdin(&mut self, bytes: Vec<u8>) {
        match String::from_utf8(bytes) {
            Ok(text) => self.stdin = Some(text),
            Err(error) => self.stdin_base64 = Some(BASE64.encode(error.into_bytes())),
        }
    }

    pub(crate) fn command(self) -> Result<Command, ApiError> {
        let stdin = stdin(self.stdin, self.stdin_base64)?;
        let command = Command {
            program: self.program,
            args: self.args,
            workdir: self.workdir.map(PathBuf::from),
            env: self.env.into_iter().collect(),
            inherit_env: true,
            stdin,
            timeout: self.timeout_ms.map(Duration::from_millis),
        };
        command.validate()?;
        Ok(command)
    }
}

/// What a command gave, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecView {
    /// Its exit code, or the one that stands for how it ended.
    pub exit_code: i32,
    /// How it ended.
    #[schema(value_type = Object, example = json!({"kind": "exited", "code": 0}))]
    pub cause: ExecCause,
    /// What it wrote to stdout, as text.
    pub stdout: String,
    /// The same in base64, where it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_base64: Option<String>,
    /// What it wrote to stderr, as text.
    pub stderr: String,
    /// The same in base64, where it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_base64: Option<String>,
    /// How long it took.
    pub duration_ms: u64,
    /// Whether it was ended because its time was up.
    pub timed_out: bool,
    /// Whether it was ended by a limit other than time.
    pub resource_limited: bool,
    /// What it used, where that was measured.
    pub usage: Option<UsageView>,
    /// The limit that ended it, if one did; of one that failed the system calls that were refused to it;
    /// and, with `explain`, whatever else walls refused to it. Each with what would allow it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub denials: Vec<Denial>,
    /// The savepoint that was made before it, and what changed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub savepoint: Option<SavepointView>,
}

/// What a command changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SavepointView {
    /// The savepoint.
    pub id: String,
    /// What differs from it.
    pub changes: DiffView,
}

impl From<ExecReport> for ExecView {
    fn from(report: ExecReport) -> Self {
        let output = report.output;
        let exact =
            |bytes: &[u8]| std::str::from_utf8(bytes).is_err().then(|| BASE64.encode(bytes));
        Self {
            exit_code: output.exit_code,
            cause: report.cause,
            stdout_base64: exact(&output.stdout),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr_base64: exact(&output.stderr),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            duration_ms: millis(output.duration),
            timed_out: output.timed_out,
            resource_limited: output.resource_limited,
            denials: report.denials,
            usage: output.resource_usage.map(Into::into),
            savepoint: None,
        }
    }
}

impl ExecView {
    /// Returns the bytes that it wrote to stdout and to stderr.
    pub fn bytes(&self) -> (Vec<u8>, Vec<u8>) {
        let exact = |text: &str, encoded: Option<&String>| {
            encoded
                .and_then(|encoded| BASE64.decode(encoded).ok())
                .unwrap_or_else(|| text.as_bytes().to_vec())
        };
        (
            exact(&self.stdout, self.stdout_base64.as_ref()),
            exact(&self.stderr, self.stderr_base64.as_ref()),
        )
    }
}

/// What an exec or a sandbox used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UsageView {
    /// The most memory at any moment.
    pub peak_memory_bytes: u64,
    /// CPU time, user and system.
    pub cpu_time_ms: u64,
    /// Time by the clock.
    pub wall_time_ms: u64,
    /// Bytes written to storage.
    pub bytes_written: u64,
    /// Bytes read from storage.
    pub bytes_read: u64,
}

impl From<ResourceUsage> for UsageView {
    fn from(usage: ResourceUsage) -> Self {
        Self {
            peak_memory_bytes: usage.peak_memory_bytes,
            cpu_time_ms: usage.cpu_time_ms,
            wall_time_ms: usage.wall_time_ms,
            bytes_written: usage.bytes_written,
            bytes_read: usage.bytes_read,
        }
    }
}

/// Where in its life a session or a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StateView {
    /// A client is there.
    Active,
    /// The client went away; the sandbox goes on.
    Detached,
    /// Every process of the sandbox is stopped.
    Suspended,
    /// It has ended.
    Terminated,
}

impl StateView {
    /// Every state there is.
    pub const ALL: [Self; 4] = [Self::Active, Self::Detached, Self::Suspended, Self::Terminated];

    /// Returns the name that is sent.
    pub fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Detached => "detached",
            Self::Suspended => "suspended",
            Self::Terminated => "terminated",
        }
    }
}

impl From<SessionState> for StateView {
    fn from(state: SessionState) -> Self {
        match state {
            SessionState::Active => Self::Active,
            SessionState::Detached => Self::Detached,
            SessionState::Suspended => Self::Suspended,
            SessionState::Terminated => Self::Terminated,
        }
    }
}

/// A client's use of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionView {
    /// Its id.
    pub id: String,
    /// The sandbox that is used.
    pub sandbox_id: String,
    /// The tenant whose it is.
    pub tenant: String,
    /// The client whose it is.
    pub client: String,
    /// Where in its life it is.
    pub state: StateView,
    /// When it began.
    pub created_at: DateTime<Utc>,
    /// When the client last did something with it.
    pub last_active_at: DateTime<Utc>,
    /// How long it may rest while active.
    pub idle_timeout_ms: u64,
    /// How long it may rest while detached.
    pub detach_timeout_ms: u64,
    /// How long it may rest while suspended.
    pub suspend_timeout_ms: u64,
    /// The client's own notes.
    pub metadata: BTreeMap<String, String>,
}

impl From<&SandboxSession> for SessionView {
    fn from(session: &SandboxSession) -> Self {
        let (tenant, client) = split(&session.client_id);
        let metadata: &HashMap<String, String> = &session.metadata;
        Self {
            id: session.session_id.clone(),
            sandbox_id: session.sandbox_id.to_string(),
            tenant: tenant.to_owned(),
            client: client.to_owned(),
            state: session.state.into(),
            created_at: session.created_at,
            last_active_at: session.last_active_at,
            idle_timeout_ms: millis(session.timeouts.idle_timeout),
            detach_timeout_ms: millis(session.timeouts.detach_timeout),
            suspend_timeout_ms: millis(session.timeouts.suspend_timeout),
            metadata: metadata.iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
        }
    }
}

/// A sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxView {
    /// Its id.
    pub id: String,
    /// The name that people call it by.
    pub name: Option<String>,
    /// The liveliest state of its sessions.
    pub state: StateView,
    /// The backend that made it.
    pub backend: String,
    /// The profile that it was made from.
    pub profile: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// The limits that hold; absent means without a bound.
    pub limits: LimitsView,
    /// Whether it reaches anything beyond its own loopback.
    pub has_network: bool,
    /// Its sessions, as far as they are the caller's.
    pub sessions: Vec<SessionView>,
}

/// The limits that hold; absent means without a bound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LimitsView {
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
    /// Its share of the CPU against others.
    pub cpu_weight: Option<u32>,
}

impl From<&ResourceLimits> for LimitsView {
    fn from(limits: &ResourceLimits) -> Self {
        Self {
            max_memory_bytes: limits.max_memory_bytes,
            max_cpu_time_ms: limits.max_cpu_time_ms,
            max_wall_time_ms: limits.max_wall_time_ms,
            max_processes: limits.max_processes,
            max_open_files: limits.max_open_files,
            max_output_bytes: limits.max_output_bytes,
            max_write_bytes: limits.max_write_bytes,
            cpu_weight: limits.cpu_weight,
        }
    }
}

impl SandboxView {
    pub(crate) fn new(
        capabilities: &SandboxCapabilities,
        labels: BTreeMap<String, String>,
        sessions: Vec<SessionView>,
    ) -> Self {
        let state = sessions.iter().map(|session| session.state).min();
        Self {
            id: capabilities.sandbox_id.clone(),
            name: labels.get(NAME_LABEL).cloned(),
            state: state.unwrap_or(StateView::Terminated),
            backend: capabilities.backend.clone(),
            profile: capabilities.profile.clone(),
            labels,
            created_at: capabilities.created_at,
            limits: (&capabilities.limits).into(),
            has_network: capabilities.has_network,
            sessions,
        }
    }
}

/// A sandbox with all that is known of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxDetailView {
    /// What every list shows.
    #[serde(flatten)]
    pub sandbox: SandboxView,
    /// What it can do.
    #[schema(value_type = Object)]
    pub capabilities: SandboxCapabilities,
    /// What holds it, as far as that was proved by trying.
    #[schema(value_type = Object)]
    pub enforcement: Enforcement,
    /// What it has used; absent when it could not be asked.
    pub usage: Option<UsageView>,
    /// What was tried of it the last time; absent when it could not be asked.
    pub receipt: Option<ReceiptView>,
}

/// What was tried of a sandbox, and what happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReceiptView {
    /// The receipt, to be read.
    #[schema(value_type = Object)]
    pub receipt: Receipt,
    /// What is signed of it, in the form of DSSE 1.0: the receipt as JSON in base64, and an Ed25519
    /// signature. Absent where the daemon has no key.
    #[schema(value_type = Option<Object>)]
    pub envelope: Option<Envelope>,
}

impl From<SignedReceipt> for ReceiptView {
    fn from(signed: SignedReceipt) -> Self {
        Self { receipt: signed.receipt, envelope: signed.envelope }
    }
}

/// What receipts are checked with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReceiptKeyView {
    /// The daemon's public key: Ed25519, in PEM.
    pub public_key: String,
}

/// A new session and its sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AcquiredView {
    /// The session.
    pub session: SessionView,
    /// The sandbox.
    pub sandbox: SandboxView,
    /// Whether the sandbox was made for this request, where that is known.
    pub newly_created: Option<bool>,
}

/// Some of a list, in the order in which they were made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Page<T> {
    /// The items.
    pub items: Vec<T>,
    /// What `after` must be to get the next ones; absent at the end.
    pub next: Option<String>,
}

/// Which part of a list is asked for.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "describes the query, which is read by hand to name what is wrong")]
pub(crate) struct ListParams {
    /// How many at most, 1 to 1000; 100 if absent.
    limit: Option<u32>,
    /// The `next` of the page before.
    after: Option<String>,
    /// Only those in this state; may be repeated to allow several.
    state: Option<StateView>,
    /// Only those with this label, as KEY=VALUE; may be repeated to demand several.
    label: Option<String>,
}

/// The numbers of one moment. A tenant sees those of its own; the operator sees all.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StatsView {
    /// Sandboxes that live.
    pub active_sandboxes: u64,
    /// Sessions that are active.
    pub active_sessions: u64,
    /// Sessions that are detached.
    pub detached_sessions: u64,
    /// Sessions that are suspended.
    pub suspended_sessions: u64,
    /// What only the operator sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manager: Option<ManagerStatsView>,
}

/// The numbers of the manager as a whole.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ManagerStatsView {
    /// Sandboxes made since the start.
    pub sandboxes_created: u64,
    /// Sandboxes that live, warm ones included.
    pub active_sandboxes: u64,
    /// Warm sandboxes that wait.
    pub pool_size: u64,
    /// Claims that the pool could serve, 0 to 1.
    pub pool_hit_rate: f64,
    /// How long a creation takes on average.
    pub avg_creation_time_ms: f64,
    /// Sandboxes destroyed because a session timed out.
    pub timeout_destroys: u64,
}

/// How the daemon does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HealthView {
    /// Whether at least one backend works.
    pub healthy: bool,
    /// The version of the daemon.
    pub version: String,
}

/// What a sweep did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CleanupView {
    /// How many sessions were past their time and have been ended.
    pub ended: u64,
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// What everybody has that the caller may know of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QuotaListView {
    /// By the name of the tenant.
    pub items: Vec<QuotaView>,
}

/// How much a tenant has of everything, and how much it may have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QuotaView {
    /// The tenant.
    pub tenant: String,
    /// What it has.
    pub used: UsedView,
    /// What it may have, by the key that it last came with.
    pub quotas: Quotas,
}

/// What a tenant has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UsedView {
    /// Sandboxes.
    pub sandboxes: u64,
    /// Memory that they may use together.
    pub memory_bytes: u64,
    /// Shares of the CPU that they have together.
    pub cpu_weight: u64,
    /// What they may write together.
    pub disk_bytes: u64,
    /// Snapshots that it keeps, savepoints included.
    pub snapshots: u64,
    /// Commands that run.
    pub execs: u64,
    /// Streams that are followed.
    pub streams: u64,
    /// Requests that are under way.
    pub requests: u64,
}
