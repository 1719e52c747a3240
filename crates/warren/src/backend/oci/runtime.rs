//! A container runtime, as a program that is called.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde::Deserialize;
use warren_init::plan::{Cgroups, PID_FILE};
use warren_sys::cgroup::Layout;

use super::OciRuntime;
use crate::backend::linux::groups;
use crate::{Result, SandboxError, SandboxId};

/// Where runtimes are looked for: a library reads no environment.
const PLACES: [&str; 6] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
/// How long one call may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// What gVisor is told. By ptrace it needs nothing of the host but the call; what is written goes to our own
/// layers, not to one in its memory.
const RUNSC_FLAGS: [&str; 6] = [
    "--platform=ptrace",
    "--network=none",
    "--ignore-cgroups",
    "--overlay2=none",
    "--host-uds=none",
    "--file-access-mounts=exclusive",
];

/// One runtime of this host.
#[derive(Debug)]
pub(crate) struct Runtime {
    kind: OciRuntime,
    program: PathBuf,
    version: String,
    made: AtomicU32,
}

/// Returns where a runtime is, if it is anywhere.
pub(super) fn program(kind: OciRuntime) -> Option<PathBuf> {
    let mut places = PLACES.iter().map(|place| Path::new(place).join(kind.program()));
    places.find(|path| path.is_file())
}

impl Runtime {
    /// Looks for it, and asks it who it is.
    pub(crate) fn find(kind: OciRuntime) -> Result<Self> {
        let program = program(kind).ok_or_else(|| SandboxError::Unsupported {
            feature: format!("containers: `{}` is not installed", kind.program()),
            backend: kind.name().to_owned(),
            hint: format!("install it: apt-get install {}", kind.program()),
        })?;
        let said = Command::new(&program).arg("--version").stdin(Stdio::null()).output();
        let said = said.map_err(|error| SandboxError::step("run", &program, error))?;
        let said = String::from_utf8_lossy(&said.stdout);
        let version = said.lines().next().unwrap_or_default().chars().take(80).collect();
        Ok(Self { kind, program, version, made: AtomicU32::new(0) })
    }

    pub(crate) fn kind(&self) -> OciRuntime {
        self.kind
    }

    /// What users choose its backend by.
    pub(crate) fn name(&self) -> &'static str {
        self.kind.name()
    }

    /// Says which it is, for people.
    pub(crate) fn describe(&self) -> String {
        let made = if self.has_own_kernel() { "is the kernel" } else { "made the namespaces" };
        format!("{} ({}), which {made}", self.version, self.program.display())
    }

    /// Reports whether what it makes runs on a kernel that it brings along.
    pub(crate) fn has_own_kernel(&self) -> bool {
        self.kind == OciRuntime::Runsc
    }

    /// Counts the containers, so that two begin to look for ids in different places.
    pub(crate) fn next(&self) -> u32 {
        self.made.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes sure that it can be used by us.
    pub(crate) fn check(&self) -> Result<()> {
        if !rustix::process::geteuid().is_root() {
            return Err(SandboxError::Unsupported {
                feature: "containers for anybody but root".to_owned(),
                backend: self.name().to_owned(),
                hint: "run the daemon as root, or use the backend `linux`, which needs no rights"
                    .to_owned(),
            });
        }
        Ok(())
    }

    /// Returns where among the control groups it is to put a container; `None` if it is started where
    /// that has to be.
    pub(crate) fn group(
        &self,
        id: &SandboxId,
        planned: &Cgroups,
        layout: &Layout,
    ) -> Option<String> {
        match self.kind {
            // Below the group that it is called in, as ours are.
            OciRuntime::Runc if !layout.v1.is_empty() => Some(groups::name(id)),
            OciRuntime::Runc => {
                let (group, v2) = (planned.v2.as_ref()?, layout.v2.as_ref()?);
                let below = Path::new(group).strip_prefix(&v2.mount).ok()?;
                Some(Path::new("/").join(below).to_string_lossy().into_owned())
            }
            // crun 1.8 gives up where both versions of control groups are mounted, and takes one path for all
            // hierarchies.
            OciRuntime::Crun => None,
            // It is told to leave them alone, and is started where it has to be, with all its processes.
            OciRuntime::Runsc => None,
        }
    }

    /// Lists the mounts of the host that it is not to see.
    pub(crate) fn hidden(&self, layout: &Layout) -> Vec<String> {
        match (self.kind, &layout.v2) {
            (OciRuntime::Crun, Some(v2)) if !layout.v1.is_empty() => {
                vec![v2.mount.to_string_lossy().into_owned()]
            }
            _ => Vec::new(),
        }
    }

    fn words(&self, bundle: &Path) -> Vec<String> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut words = vec![text(&self.program), "--root".to_owned(), text(&bundle.join("state"))];
        let own: &[&str] = match self.kind {
            OciRuntime::Runc => &[],
            OciRuntime::Crun => &["--cgroup-manager=disabled"],
            OciRuntime::Runsc => &RUNSC_FLAGS,
        };
        words.extend(own.iter().map(|word| (*word).to_owned()));
        words
    }

    fn ask(&self, verb: &[&str], id: &SandboxId, bundle: &Path) -> Vec<String> {
        let mut words = self.words(bundle);
        words.extend(verb.iter().map(|word| (*word).to_owned()));
        words.push(id.to_string());
        words
    }

    /// Returns what starts a container.
    pub(crate) fn start(&self, id: &SandboxId, bundle: &Path) -> Vec<String> {
        let pid_file = bundle.join(PID_FILE).to_string_lossy().into_owned();
        let place = bundle.to_string_lossy().into_owned();
        let verb = ["run", "--detach", "--bundle", &place, "--pid-file", &pid_file];
        self.ask(&verb, id, bundle)
    }

    /// Returns what removes a container, running or not.
    pub(crate) fn delete(&self, id: &SandboxId, bundle: &Path) -> Vec<String> {
        self.ask(&["delete", "--force"], id, bundle)
    }

    /// Returns what says how a container is.
    pub(crate) fn state(&self, id: &SandboxId, bundle: &Path) -> Vec<String> {
        self.ask(&["state"], id, bundle)
    }

    /// Returns what stops a container, if it can: crun needs control groups of its own for that.
    pub(crate) fn pause(&self, id: &SandboxId, bundle: &Path) -> Option<Vec<String>> {
        (self.kind != OciRuntime::Crun).then(|| self.ask(&["pause"], id, bundle))
    }

    /// Returns what lets it go on.
    pub(crate) fn resume(&self, id: &SandboxId, bundle: &Path) -> Option<Vec<String>> {
        (self.kind != OciRuntime::Crun).then(|| self.ask(&["resume"], id, bundle))
    }

    /// Makes a command of words.
    pub(crate) fn command(words: &[String]) -> Command {
        let mut command = Command::new(words.first().map_or("", String::as_str));
        command.args(words.iter().skip(1)).env_clear().current_dir("/").stdin(Stdio::null());
        command.env("PATH", PLACES.join(":")).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Calls it and returns what it said.
    pub(crate) async fn call(&self, words: Vec<String>) -> Result<Vec<u8>> {
        let verb = words.iter().rev().nth(1).cloned().unwrap_or_default();
        let mut command = tokio::process::Command::from(Self::command(&words));
        let said = tokio::time::timeout(PATIENCE, command.kill_on_drop(true).output()).await;
        let step = format!("have {} {verb} the container", self.kind.program());
        let failed = |source| SandboxError::Step { step: step.clone(), path: None, source };
        let said = said.map_err(|_| failed(io::ErrorKind::TimedOut.into()))?.map_err(failed)?;
        if said.status.success() {
            return Ok(said.stdout);
        }
        let words = String::from_utf8_lossy(&said.stderr);
        let last = words.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        Err(failed(io::Error::other(last.chars().take(500).collect::<String>())))
    }
}

/// What a runtime says of a container, as far as it is asked. See the specification, "State".
#[derive(Debug, Deserialize)]
struct State {
    status: String,
}

/// Reads how a container is from what a runtime said; `None` if that is nothing of the kind.
pub(crate) fn status(said: &[u8]) -> Option<String> {
    const KNOWN: [&str; 5] = ["creating", "created", "running", "stopped", "paused"];
    let state: State = serde_json::from_slice(said).ok()?;
    KNOWN.contains(&state.status.as_str()).then_some(state.status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_one_of_those_of_the_specification_or_nothing() {
        let said = br#"{"ociVersion":"1.0.2","id":"x","status":"paused","bundle":"/b","pid":7}"#;
        assert_eq!(status(said).as_deref(), Some("paused"));
        for bad in [&b"{}"[..], b"", b"paused", br#"{"status":7}"#, br#"{"status":"fine"}"#] {
            assert_eq!(status(bad), None, "{}", String::from_utf8_lossy(bad));
        }
    }
}
