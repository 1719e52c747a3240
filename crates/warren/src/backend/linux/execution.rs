//! One command in a sandbox of the `linux` backend.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::net::unix::pipe;
use warren_init::plan::WORKLOAD_ID;
use warren_init::protocol::denied::{Denials, MAX_DENIED};
use warren_init::protocol::{
    Ended, Exec, ExecControl, ExecEvent, Request, Stage, Status, StoppedBy, Streams,
};

use super::channel::Channel;
use super::groups::Refusals;
use super::plan::HOME;
use super::sandbox::{Instance, LinuxSandbox, Terms};
use crate::backend::ExecPlan;
use crate::denial::{Ground, Really};
use crate::{
    Denial, ExecCause, Explain, ProgramFault, ResourceLimits, ResourceUsage, Result, SandboxError,
    SandboxId,
};

/// Where a command's standard streams go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stdio {
    /// To three pipes.
    Pipes,
    /// To a terminal of this size.
    Terminal {
        /// Lines.
        rows: u16,
        /// Characters in a line.
        columns: u16,
    },
}

/// A hold of a command that was started. Dropping it ends the command and all it started.
#[derive(Debug)]
pub struct Execution {
    sandbox: LinuxSandbox,
    channel: Channel,
    program: String,
    before: Refusals,
    over_output: bool,
    explain: Explain,
    denials: Denials,
    /// Writes to the command; dropped to tell it that there is no more.
    pub stdin: Option<pipe::Sender>,
    /// What [`Command::stdin`](crate::Command) asked to be written first.
    pub input: Option<Vec<u8>>,
    /// Reads what it writes to stdout.
    pub stdout: Option<pipe::Receiver>,
    /// Reads what it writes to stderr.
    pub stderr: Option<pipe::Receiver>,
}

/// How a command ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// How.
    pub cause: ExecCause,
    /// The exit code: its own where it has one.
    pub exit_code: i32,
    /// How long it took.
    pub duration: Duration,
    /// What it used.
    pub usage: ResourceUsage,
    /// Processes and threads that were started in the sandbox meanwhile, its own included.
    pub tasks_started: u64,
    /// What walls refused to it, if somebody asked for that.
    pub denials: Vec<Denial>,
}

/// The one command of a sandbox that is being made, which ends with it.
#[derive(Debug)]
pub(crate) struct First {
    pub(crate) plan: ExecPlan,
    pub(crate) limits: ResourceLimits,
    pub(crate) stdio: Stdio,
    pub(crate) explain: Explain,
}

/// A command that init was asked for.
#[derive(Debug)]
pub(crate) struct Sent {
    channel: Channel,
    program: String,
    input: Option<Vec<u8>>,
    streams: Option<(pipe::Sender, pipe::Receiver, pipe::Receiver)>,
    explain: Explain,
}

impl Sent {
    /// Asks a sandbox for a command.
    pub(crate) async fn send(instance: &Instance, first: First, only: bool) -> Result<Self> {
        let First { plan, limits, stdio, explain } = first;
        let streams = match stdio {
            Stdio::Pipes => {
                let owner = instance.base.map(|base| base + WORKLOAD_ID);
                Some(Pipes::new(owner).map_err(|error| step("make pipes", error))?)
            }
            Stdio::Terminal { .. } => None,
        };
        let named = match stdio {
            Stdio::Pipes => Streams::Given,
            Stdio::Terminal { rows, columns } => Streams::Terminal { rows, columns },
        };
        let terminal = match stdio {
            Stdio::Pipes => None,
            Stdio::Terminal { rows, columns } => instance.lend_terminal(rows, columns)?,
        };
        let exec = request(&plan, &limits, String::new(), named);
        let followed = explain != Explain::Nothing;
        let request = Request::Exec(Exec { only, announced: true, explain: followed, ..exec });
        let (channel, theirs) = Channel::pair().map_err(|error| step("make a socket", error))?;
        let mut fds = vec![theirs.as_fd()];
        fds.extend(streams.iter().flat_map(|pipes| pipes.theirs.iter().map(AsFd::as_fd)));
        fds.extend(terminal.iter().flat_map(|both| [both.outer.as_fd(), both.inner.as_fd()]));
        if instance.home.is_some() {
            // So that the command outlives us, and what it leaves running the end of this call.
            let spare =
                streams.iter().flat_map(|pipes| [pipes.stdout.as_fd(), pipes.stderr.as_fd()]);
            fds.extend(spare);
        }
        instance.control.send(&request, &fds).await.map_err(|error| step("reach init", error))?;
        let ExecPlan { program, stdin: input, .. } = plan;
        let streams = streams.map(|pipes| (pipes.stdin, pipes.stdout, pipes.stderr));
        Ok(Self { channel, program, input, streams, explain })
    }
}

impl Execution {
    /// Takes hold of a command; `before` is how often the kernel had refused something by then.
    pub(crate) fn of(sandbox: LinuxSandbox, sent: Sent, before: Refusals) -> Self {
        let Sent { channel, program, input, streams, explain } = sent;
        let (stdin, stdout, stderr) = match streams {
            Some((stdin, stdout, stderr)) => (Some(stdin), Some(stdout), Some(stderr)),
            None => (None, None, None),
        };
        Self {
            sandbox,
            channel,
            program,
            before,
            over_output: false,
            explain,
            denials: Denials::default(),
            stdin,
            input,
            stdout,
            stderr,
        }
    }

    /// Waits until its program runs; returns the outer side of its terminal if it has one.
    pub async fn started(&mut self) -> Result<Option<OwnedFd>> {
        match self.channel.receive::<ExecEvent>().await {
            Ok(Some((ExecEvent::Started { .. }, mut fds))) => match fds.pop() {
                // What comes from inside is used only if it is what it should be.
                Some(fd) if !rustix::termios::isatty(&fd) => Err(SandboxError::Internal {
                    message: "init sent something else than a terminal".to_owned(),
                }),
                terminal => Ok(terminal),
            },
            Ok(Some((ExecEvent::Refused { stage, errno }, _))) => Err(self.refused(stage, errno)),
            Ok(Some((
                ExecEvent::Ended(_)
                | ExecEvent::Input { .. }
                | ExecEvent::Used(_)
                | ExecEvent::Denied(_)
                | ExecEvent::DeniedMore(_),
                _,
            ))) => Err(SandboxError::Internal {
                message: "init spoke of a command before it started".to_owned(),
            }),
            Ok(None) => Err(self.sandbox.ended()),
            Err(error) => Err(step("hear from init", error)),
        }
    }

    /// Sends a signal to the command's process group.
    pub async fn signal(&self, signal: i32) -> Result<()> {
        self.control(ExecControl::Signal(signal)).await
    }

    /// Tells the command's terminal its new size.
    pub async fn resize(&self, rows: u16, columns: u16) -> Result<()> {
        self.control(ExecControl::Resize { rows, columns }).await
    }

    /// Ends the command because it wrote too much.
    pub async fn stop_for_output(&mut self) -> Result<()> {
        self.over_output = true;
        self.control(ExecControl::Kill).await
    }

    async fn control(&self, control: ExecControl) -> Result<()> {
        match self.channel.send(&control, &[]).await {
            // It ended meanwhile; how is about to be read.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other.map_err(|error| step("reach init", error)),
        }
    }

    /// Waits until it ends. How long that may take is for init to see to, which knows when the
    /// sandbox was suspended; a sandbox that is destroyed ends this too.
    pub async fn wait(&mut self) -> Result<Ending> {
        loop {
            match self.channel.receive::<ExecEvent>().await {
                Ok(Some((
                    ExecEvent::Started { .. } | ExecEvent::Input { .. } | ExecEvent::Used(_),
                    _,
                ))) => {}
                Ok(Some((ExecEvent::Denied(denied), _))) => {
                    if self.denials.list.len() < MAX_DENIED {
                        self.denials.list.push(denied);
                    }
                }
                Ok(Some((ExecEvent::DeniedMore(more), _))) => self.denials.omitted = more,
                Ok(Some((ExecEvent::Refused { stage, errno }, _))) => {
                    return Err(self.refused(stage, errno));
                }
                Ok(Some((ExecEvent::Ended(ended), _))) => return Ok(self.settle(&ended)),
                Ok(None) => return self.orphaned(),
                Err(error) => return Err(step("hear from init", error)),
            }
        }
    }

    /// Decides how the command ended, from what init saw and what the kernel counted.
    fn settle(&self, ended: &Ended) -> Ending {
        let after = || self.sandbox.instance().groups().refusals();
        let mut ending = settle(ended, self.before, after, self.over_output);
        ending.denials = explained(self.sandbox.terms(), self.explain, &self.denials);
        self.sandbox.account(&ending.usage);
        ending
    }

    /// Init is gone: the kernel may have chosen it when memory ran out, or somebody destroyed it.
    fn orphaned(&self) -> Result<Ending> {
        let after = self.sandbox.instance().groups().refusals();
        if after.out_of_memory > self.before.out_of_memory {
            return Ok(Ending::of(ExecCause::OutOfMemory, Duration::ZERO));
        }
        Err(self.sandbox.ended())
    }

    fn refused(&self, stage: Stage, errno: i32) -> SandboxError {
        refused(crate::Sandbox::id(&self.sandbox), self.program.clone(), stage, errno)
    }
}

/// Says what walls refused to a command, as init saw it.
pub(super) fn explained(terms: &Terms, explain: Explain, seen: &Denials) -> Vec<Denial> {
    let really = |path: &Path| {
        path.symlink_metadata().ok()?;
        Some(path.canonicalize().unwrap_or_else(|_| path.to_owned()))
    };
    let host: Option<&Really> = match explain {
        Explain::Host => Some(&really),
        Explain::Inside | Explain::Nothing => None,
    };
    let on_host = terms.capabilities.backend == "landlock";
    Ground { spec: &terms.spec, limits: &terms.enforcement.limits, on_host, host }.explain(seen)
}

/// Says why a command could not be started.
pub(crate) fn refused(id: &SandboxId, program: String, stage: Stage, errno: i32) -> SandboxError {
    let source = io::Error::from_raw_os_error(errno);
    let kind = match (stage, Errno::from_raw_os_error(errno)) {
        (Stage::Suspended, _) => return SandboxError::Suspended { id: id.clone() },
        (Stage::Follow, _) => {
            return SandboxError::Unsupported {
                feature: format!("explaining what is refused ({source})"),
                backend: "linux".to_owned(),
                hint: "have kernel.yama.ptrace_scope below 2, or run the command without"
                    .to_owned(),
            };
        }
        (Stage::Program, Errno::TOOBIG) => {
            let what = "the command's arguments and environment".to_owned();
            return SandboxError::TooLarge { what, limit: 2 << 20 };
        }
        (Stage::Program, Errno::NOENT | Errno::NOTDIR) => ProgramFault::NotFound,
        // Whatever is wrong then, it is not the program.
        (Stage::Fork | Stage::Program, Errno::AGAIN | Errno::NOMEM) => ProgramFault::NoProcess,
        (Stage::Program, _) => ProgramFault::NotExecutable,
        (Stage::Workdir, _) => ProgramFault::Workdir,
        (Stage::User, _) => ProgramFault::User,
        (Stage::Fork | Stage::Prepare, _) => ProgramFault::Other,
    };
    SandboxError::Program { program, kind, source }
}

/// Decides how a command ended, from what init saw and what the kernel counted.
pub(crate) fn settle(
    ended: &Ended,
    before: Refusals,
    after: impl FnOnce() -> Refusals,
    over_output: bool,
) -> Ending {
    let cause = cause(ended, before, after, over_output);
    let exit_code = match (&cause, ended.status) {
        (ExecCause::TimedOut, _) => cause.exit_code(),
        (_, Status::Exited(code)) => code,
        (_, Status::Signalled(_)) => cause.exit_code(),
    };
    let usage = ResourceUsage {
        peak_memory_bytes: ended.peak_bytes,
        cpu_time_ms: ended.cpu_us / 1000,
        wall_time_ms: ended.wall_us / 1000,
        bytes_written: ended.written_bytes,
        bytes_read: ended.read_bytes,
    };
    let duration = Duration::from_micros(ended.wall_us);
    let (tasks_started, denials) = (ended.tasks_started, Vec::new());
    Ending { cause, exit_code, duration, usage, tasks_started, denials }
}

impl Ending {
    pub(crate) fn of(cause: ExecCause, duration: Duration) -> Self {
        let exit_code = cause.exit_code();
        let (usage, denials) = (ResourceUsage::default(), Vec::new());
        Self { cause, exit_code, duration, usage, tasks_started: 0, denials }
    }
}

/// Decides how a command ended. A limit is the cause only if the command did not succeed all the
/// same.
fn cause(
    ended: &Ended,
    before: Refusals,
    after: impl FnOnce() -> Refusals,
    over_output: bool,
) -> ExecCause {
    // We stopped listening, so however it ended then, it was for that.
    if over_output {
        return ExecCause::OutputLimit;
    }
    match ended.stopped_by {
        Some(StoppedBy::WallTime) => return ExecCause::TimedOut,
        Some(StoppedBy::CpuTime) => return ExecCause::CpuTime,
        Some(StoppedBy::Memory) => return ExecCause::OutOfMemory,
        Some(StoppedBy::Output) => return ExecCause::OutputLimit,
        Some(StoppedBy::Processes) => return ExecCause::TooManyProcesses,
        Some(StoppedBy::Client) => {
            return ExecCause::KilledByPolicy { reason: "ended by the caller".to_owned() };
        }
        None => {}
    }
    let plain = match ended.status {
        Status::Exited(0) => return ExecCause::Exited { code: 0 },
        Status::Exited(code) => ExecCause::Exited { code },
        Status::Signalled(signal) => ExecCause::Signalled { signal },
    };
    let after = after();
    if after.out_of_memory > before.out_of_memory {
        ExecCause::OutOfMemory
    } else if after.too_many_processes > before.too_many_processes {
        ExecCause::TooManyProcesses
    } else if ended.scratch_full {
        ExecCause::DiskQuota
    } else {
        plain
    }
}

/// Puts together what init is asked to run.
pub(crate) fn request(
    plan: &ExecPlan,
    limits: &ResourceLimits,
    name: String,
    streams: Streams,
) -> Exec {
    let user = plan.user.as_ref();
    let mut env: std::collections::BTreeMap<&str, &str> = [
        ("LANG", "C.UTF-8"),
        ("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"),
    ]
    .into();
    if user.is_none() {
        // Of one who is named, init knows them.
        env.extend([("HOME", HOME), ("LOGNAME", "user"), ("USER", "user")]);
    }
    env.extend(plan.env.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
    Exec {
        name,
        program: plan.program.clone().into_bytes(),
        args: plan.args.iter().map(|arg| arg.clone().into_bytes()).collect(),
        env: env.iter().map(|(name, value)| format!("{name}={value}").into_bytes()).collect(),
        workdir: plan.workdir.as_os_str().as_bytes().to_vec(),
        user: user.map(|user| warren_init::protocol::ExecUser {
            name: user.name.clone().into_bytes(),
            workdir: user.workdir.clone().unwrap_or_default().into_bytes(),
        }),
        streams,
        wall_ms: plan.timeout.map(millis),
        cpu_ms: limits.max_cpu_time_ms,
        open_files: limits.max_open_files.map(u64::from),
        only: false,
        announced: false,
        explain: false,
    }
}

/// Our ends and the command's ends of its streams.
struct Pipes {
    stdin: pipe::Sender,
    stdout: pipe::Receiver,
    stderr: pipe::Receiver,
    theirs: [OwnedFd; 3],
}

impl Pipes {
    /// Makes them, to belong to `owner` if that is not us.
    fn new(owner: Option<u32>) -> io::Result<Self> {
        let pair = || pipe_with(PipeFlags::CLOEXEC);
        let ((stdin_r, stdin_w), (stdout_r, stdout_w), (stderr_r, stderr_w)) =
            (pair()?, pair()?, pair()?);
        // Only our ends may not block: the command expects the streams it knows.
        for ours in [&stdin_w, &stdout_r, &stderr_r] {
            rustix::io::ioctl_fionbio(ours, true)?;
            if let Some(id) = owner {
                // Only its owner may open a pipe again, as `echo > /dev/stderr` does.
                let (uid, gid) = (rustix::fs::Uid::from_raw(id), rustix::fs::Gid::from_raw(id));
                rustix::fs::fchown(ours, Some(uid), Some(gid))?;
            }
        }
        Ok(Self {
            stdin: pipe::Sender::from_owned_fd(stdin_w)?,
            stdout: pipe::Receiver::from_owned_fd(stdout_r)?,
            stderr: pipe::Receiver::from_owned_fd(stderr_r)?,
            theirs: [stdin_r, stdout_w, stderr_w],
        })
    }
}

fn step(step: &str, source: io::Error) -> SandboxError {
    SandboxError::Step { step: step.to_owned(), path: None, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAILED: Status = Status::Exited(1);

    fn ended(status: Status, stopped_by: Option<StoppedBy>, scratch_full: bool) -> Ended {
        Ended {
            status,
            stopped_by,
            scratch_full,
            cpu_us: 0,
            wall_us: 0,
            peak_bytes: 0,
            read_bytes: 0,
            written_bytes: 0,
            tasks_started: 0,
        }
    }

    #[test]
    fn the_cause_is_who_ended_it_or_the_limit_that_was_hit_or_its_own_end() {
        let killed = Status::Signalled(9);
        let none = Refusals::default();
        let memory = Refusals { out_of_memory: 1, ..none };
        let processes = Refusals { too_many_processes: 1, ..none };
        for (ended, after, over_output, expected) in [
            (ended(Status::Exited(0), None, false), none, false, ExecCause::Exited { code: 0 }),
            (ended(FAILED, None, false), none, false, ExecCause::Exited { code: 1 }),
            (ended(killed, None, false), none, false, ExecCause::Signalled { signal: 9 }),
            (ended(killed, Some(StoppedBy::WallTime), false), none, false, ExecCause::TimedOut),
            (ended(killed, Some(StoppedBy::CpuTime), false), none, false, ExecCause::CpuTime),
            (ended(killed, Some(StoppedBy::Memory), false), none, false, ExecCause::OutOfMemory),
            (ended(killed, Some(StoppedBy::Client), false), none, true, ExecCause::OutputLimit),
            (ended(Status::Signalled(13), None, false), none, true, ExecCause::OutputLimit),
            (ended(killed, None, false), memory, false, ExecCause::OutOfMemory),
            (ended(FAILED, None, false), memory, false, ExecCause::OutOfMemory),
            (ended(FAILED, None, false), processes, false, ExecCause::TooManyProcesses),
            (ended(FAILED, None, true), none, false, ExecCause::DiskQuota),
        ] {
            assert_eq!(cause(&ended, none, || after, over_output), expected, "{ended:?} {after:?}");
        }
        let succeeded = ended(Status::Exited(0), None, true);
        let hit = Refusals { out_of_memory: 2, too_many_processes: 2 };
        assert_eq!(cause(&succeeded, none, || hit, false), ExecCause::Exited { code: 0 });
        let by_caller = ended(killed, Some(StoppedBy::Client), false);
        let cause = cause(&by_caller, none, || none, false);
        assert!(matches!(cause, ExecCause::KilledByPolicy { .. }));
    }
}
