//! Finding a sandbox again after the process that made it is gone.
//!
//! A sandbox that is to outlive its maker has a directory of its own below the backend's runtime
//! directory, made first and removed last. Its init listens on a socket in there. The anchor is what
//! the store keeps: enough to tell that the process found is the one that was meant.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};
use rustix::process::{Pid, PidfdFlags};
use serde::{Deserialize, Serialize};
use warren_init::protocol;
use warren_sys::socket;

pub(crate) use crate::clock::boot_id;
use crate::{Base, Reach, Result, SandboxError, SandboxId};

/// The name of the socket in a sandbox's directory.
const SOCKET: &str = "init";
/// The name of the file there that says how much of what it may reach it does.
const REACH: &str = "reach";

/// What is kept of a sandbox to find it by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Anchor {
    /// Pids mean nothing after the host was started anew.
    pub(crate) boot_id: String,
    pub(crate) pid: i32,
    /// Tells the process from a later one with the same pid.
    pub(crate) start_time: u64,
    pub(crate) base: Option<u32>,
    pub(crate) landlock_abi: u32,
    pub(crate) owners_shifted: bool,
    pub(crate) groups: super::groups::Places,
    pub(crate) cpu_quota_millis: Option<u32>,
    /// What its root stands on.
    #[serde(default)]
    pub(crate) stands_on: Base,
    /// What init tried before it was ready.
    #[serde(default)]
    pub(crate) tried: u32,
    #[serde(default = "Utc::now")]
    pub(crate) made_at: DateTime<Utc>,
    /// The version of what its init is told: [`protocol::VERSION`] of the daemon that made it.
    #[serde(default = "first_version")]
    pub(crate) protocol: u32,
}

/// The version of those that say none.
fn first_version() -> u32 {
    1
}

/// What an anchor turned out to be.
#[derive(Debug)]
pub(crate) enum Reading {
    /// One of ours.
    Ours(Box<Anchor>),
    /// That of a sandbox which runs and whose init is told things in the way of this version.
    OtherVersion(u32),
    /// Nothing to go by: damaged, or of another version and no longer running.
    Nothing,
}

/// What every version says: who is meant.
#[derive(Deserialize)]
struct Meant {
    boot_id: String,
    pid: i32,
    start_time: u64,
    #[serde(default = "first_version")]
    protocol: u32,
}

impl Anchor {
    /// Understands what the store kept.
    pub(crate) fn read(text: &str) -> Reading {
        let Ok(meant) = serde_json::from_str::<Meant>(text) else { return Reading::Nothing };
        if meant.protocol != protocol::VERSION {
            let same_boot = boot_id().is_ok_and(|boot| boot == meant.boot_id);
            return match same_boot && start_time(meant.pid) == Some(meant.start_time) {
                true => Reading::OtherVersion(meant.protocol),
                false => Reading::Nothing,
            };
        }
        serde_json::from_str(text)
            .map_or(Reading::Nothing, |anchor| Reading::Ours(Box::new(anchor)))
    }

    /// Returns a descriptor of the process that is meant, if it still runs.
    pub(crate) fn find(&self, id: &SandboxId) -> Option<OwnedFd> {
        if boot_id().ok()? != self.boot_id {
            return None;
        }
        let pidfd =
            rustix::process::pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok()?;
        // Asked after the descriptor was taken: if it is right now, it was right then.
        let same = start_time(self.pid)? == self.start_time && self.is_in_its_groups(id);
        same.then_some(pidfd)
    }

    /// Reports whether the process is in the sandbox's control groups, if it has any.
    fn is_in_its_groups(&self, id: &SandboxId) -> bool {
        let own = fs::read_to_string(format!("/proc/{}/cgroup", self.pid)).unwrap_or_default();
        self.groups.is_empty() || own.contains(&super::groups::name(id))
    }
}

/// Returns when a process was started, in ticks since the host was.
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything, a bracket too; what follows the last one is plain.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    // One that has ended and was not reaped yet is gone.
    (state != "Z").then(|| fields.nth(18)?.parse().ok())?
}

/// The directory of one sandbox that outlives its maker.
#[derive(Debug)]
pub(crate) struct Home {
    path: PathBuf,
}

impl Home {
    /// Makes the directory and listens in it.
    pub(crate) fn create(runtime: &Path, id: &SandboxId) -> Result<(Self, OwnedFd)> {
        let path = runtime.join(id.as_str());
        let made = fs::DirBuilder::new().mode(0o700).recursive(false).create(&path);
        made.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => super::taken(id),
            _ => SandboxError::step("create", &path, error),
        })?;
        let home = Self { path };
        let listener = File::open(&home.path).and_then(|dir| socket::listen(dir, SOCKET));
        match listener {
            Ok(listener) => Ok((home, listener)),
            Err(error) => {
                let path = home.path.clone();
                home.remove();
                Err(SandboxError::step("listen in", path, error))
            }
        }
    }

    /// Listens anew in a directory whose init is gone.
    pub(crate) fn listen_again(runtime: &Path, id: &SandboxId) -> Result<(Self, OwnedFd)> {
        let home = Self::of(runtime, id);
        let _ = fs::remove_file(home.path.join(SOCKET));
        let listener = File::open(&home.path).and_then(|dir| socket::listen(dir, SOCKET));
        let path = home.path.clone();
        Ok((home, listener.map_err(|error| SandboxError::step("listen in", path, error))?))
    }

    /// Names the directory of a sandbox that was made before.
    pub(crate) fn of(runtime: &Path, id: &SandboxId) -> Self {
        Self { path: runtime.join(id.as_str()) }
    }

    /// Returns where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Begins a conversation with the init that listens there.
    pub(crate) fn connect(&self) -> io::Result<OwnedFd> {
        socket::connect(File::open(&self.path)?, SOCKET)
    }

    /// Writes down how much of what its sandbox may reach it does.
    pub(crate) fn note_reach(&self, reach: &Reach) -> Result<()> {
        let (path, new) = (self.path.join(REACH), self.path.join(format!("{REACH}.new")));
        let written = serde_json::to_vec(reach).map_err(io::Error::from);
        let written = written.and_then(|text| fs::write(&new, text));
        let written = written.and_then(|()| fs::rename(&new, &path));
        written.map_err(|error| SandboxError::step("write", path, error))
    }

    /// Reads it again; nothing was written if all is reached.
    pub(crate) fn reach(&self) -> Result<Option<Reach>> {
        let path = self.path.join(REACH);
        let read = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.and_then(|text| Ok(serde_json::from_slice(&text)?)),
        };
        read.map(Some).map_err(|error| SandboxError::step("read", path, error))
    }

    /// Removes the directory; whoever listened in it must be gone.
    pub(crate) fn remove(&self) {
        // It holds the socket and the logs of execs; one that is gone already is as good.
        let _ = fs::remove_dir_all(&self.path);
    }

    /// Lists the sandboxes that have a directory.
    pub(crate) fn all(runtime: &Path) -> Vec<SandboxId> {
        let entries = fs::read_dir(runtime).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.map(SandboxId::from_string).filter(|id| id.validate().is_ok()).collect()
    }
}
