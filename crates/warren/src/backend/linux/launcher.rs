//! The launcher process, as seen from the library.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use warren_init::launcher::Guard;
use warren_init::protocol;
use warren_sys::process::SingleThreaded;
use warren_sys::{fd, socket};

use super::channel::room_in;
use super::limits::Setting;
use super::sandbox::{Wanted, failed};
use crate::backend::oci;
use crate::{Result, SandboxError, SandboxId};

/// How long it may take to end what is attached to us.
const PATIENCE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// Starts sandboxes.
#[derive(Debug)]
pub(crate) enum Launcher {
    /// A process of its own, started when first needed, and again should it ever die.
    Beside(Mutex<Option<Process>>),
    /// This process, which must have one thread whenever it makes a sandbox.
    Here,
    /// A container runtime, with a process of ours beside each sandbox.
    Container(Arc<oci::Runtime>),
}

/// What is known of a sandbox that was launched; whether it comes to stand is said on its socket.
pub(crate) enum Launched {
    /// The launcher says on the same socket what it made.
    Asked,
    /// It is a child of ours.
    Child(warren_init::launcher::Launched),
    /// The one who guards it says so.
    Contained(oci::Container),
}

#[derive(Debug)]
pub(crate) struct Process {
    /// There until the end.
    socket: Option<OwnedFd>,
    child: Child,
}

impl Process {
    /// Starts the program from a sealed memory file: what runs inside a sandbox later is a copy of
    /// this process, and must not lead to a file of the host.
    fn start() -> io::Result<Self> {
        let image = fd::sealed("warren-init", warren_init::IMAGE)?;
        let (ours, theirs) = socket::pair()?;
        let child = Command::new(format!("/proc/self/fd/{}", image.as_raw_fd()))
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { socket: Some(ours), child })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Without our end it ends what is attached to us, clears up and exits; it is ours to reap.
        self.socket = None;
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        if let Some(pidfd) = pidfd {
            let mut ends = [PollFd::new(&pidfd, PollFlags::IN)];
            if matches!(poll(&mut ends, Some(&PATIENCE)), Ok(0)) {
                // Something inside cannot be ended now. It waits for that by itself.
                return;
            }
        }
        let _ = self.child.wait();
    }
}

impl Launcher {
    /// Returns one that is a process of its own.
    pub(crate) fn beside() -> Self {
        Self::Beside(Mutex::default())
    }

    /// Starts the process, if it is not there yet, so that the first sandbox does not wait for it.
    pub(crate) fn prepare(&self) -> Result<()> {
        let process = match self {
            Self::Beside(process) => process,
            Self::Here => return Ok(()),
            Self::Container(runtime) => return runtime.check(),
        };
        let mut process = process.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if process.as_mut().is_none_or(|process| !matches!(process.child.try_wait(), Ok(None))) {
            *process = None;
            *process = Some(Process::start().map_err(start_failed)?);
        }
        Ok(())
    }

    /// Has somebody remove these control groups, which are not made yet, should we die, and with them
    /// the sandbox's directory.
    pub(crate) fn guard(
        &self,
        groups: Vec<PathBuf>,
        directory: Option<&Path>,
    ) -> Result<Option<Guard>> {
        match self {
            // It knows them by the plan, and outlives us.
            Self::Beside(_) | Self::Container(_) => Ok(None),
            Self::Here if groups.is_empty() => Ok(None),
            Self::Here => {
                let guard = SingleThreaded::claim()
                    .and_then(|proof| Guard::start(&proof, groups, directory));
                let failed = |source| SandboxError::Step {
                    step: "start the guard of the control groups".to_owned(),
                    path: None,
                    source,
                };
                Ok(Some(guard.map_err(failed)?))
            }
        }
    }

    /// Returns what the control groups are to hold while the sandbox is made.
    pub(crate) fn at_first(&self, settings: &[Setting]) -> Vec<Setting> {
        match self {
            Self::Beside(_) | Self::Here => settings.to_vec(),
            Self::Container(_) => settings.iter().map(oci::room_to_start).collect(),
        }
    }

    /// Returns the container of a sandbox, if sandboxes are such.
    pub(crate) fn container(
        &self,
        id: &SandboxId,
        runtime: Option<&Path>,
    ) -> Option<oci::Container> {
        match self {
            Self::Beside(_) | Self::Here => None,
            Self::Container(container) => Some(oci::Container::of(container, id, runtime)),
        }
    }

    /// Asks for a sandbox; what becomes of it is said on `control`.
    ///
    /// With a `listener` it can be found again by whoever comes after us. The v1 control groups of the plan
    /// are there once `finish_groups` was called.
    pub(crate) async fn launch(
        &self,
        wanted: &Wanted<'_>,
        control: OwnedFd,
        listener: Option<OwnedFd>,
        home: Option<&Path>,
        finish_groups: impl FnOnce() -> Result<()>,
    ) -> Result<Launched> {
        let plan = wanted.plan;
        let process = match self {
            Self::Beside(process) => process,
            Self::Here => {
                let proof = SingleThreaded::claim().map_err(start_failed)?;
                let made =
                    warren_init::launcher::launch(proof, plan, &control, listener, finish_groups);
                return Ok(Launched::Child(made.map_err(failed)??));
            }
            Self::Container(runtime) => {
                finish_groups()?;
                let made = oci::Container::start(runtime, wanted, control, listener, home);
                return Ok(Launched::Contained(made?));
            }
        };
        finish_groups()?;
        self.prepare()?;
        let socket = {
            let process = process.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let socket = process.as_ref().and_then(|process| process.socket.as_ref());
            let socket = socket.ok_or_else(|| SandboxError::Internal {
                message: "the launcher was stopped".to_owned(),
            })?;
            socket.try_clone().map_err(send_failed)?
        };
        let fds: Vec<_> = [Some(&control), listener.as_ref()].into_iter().flatten().collect();
        let fds: Vec<_> = fds.into_iter().map(AsFd::as_fd).collect();
        // Nearly always there is room at once; else the launcher is busy and says when there is.
        loop {
            match protocol::send(&socket, plan, &fds) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    room_in(&socket).await.map_err(send_failed)?;
                }
                other => return other.map(|()| Launched::Asked).map_err(send_failed),
            }
        }
    }
}

fn start_failed(source: io::Error) -> SandboxError {
    SandboxError::Step { step: "start the launcher".to_owned(), path: None, source }
}

fn send_failed(source: io::Error) -> SandboxError {
    SandboxError::Step { step: "reach the launcher".to_owned(), path: None, source }
}
