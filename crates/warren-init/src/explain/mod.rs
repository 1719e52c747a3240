//! Following a command when somebody asks why it fails: which wall refused what.
//!
//! ```text
//! init ── fork ──> follower ── fork ──> starter ── clone3 ──> command
//!                     │                    └ asks to be followed, and ends: the command is init's child,
//!                     │                      as any other, and the follower's to follow
//!                     └ sees calls begin and end, judges those that fail, tells init at the end
//! ```
//!
//! The follower is a process of its own, because it looks at paths and memory that may never answer, and
//! init must not wait for those; and not the command's parent, so that nothing about the command's end
//! depends on it, but that it lives: a command whose follower is killed dies with it.
//!
//! To be followed a process asks for it itself, which takes no right; to take hold of another takes its
//! identity, and with `kernel.yama.ptrace_scope` more than that.

mod calls;
mod follow;
mod judge;
mod place;

use std::iter;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use warren_sys::process::{self, Fork, Namespaces};
use warren_sys::seccomp::{self, Instruction};
use warren_sys::{fd, socket, trace};

use crate::account::{Census, Leaf, Work};
use crate::exec::{Planned, Refusal, Started, Starter};
use crate::plan::{self, HOME, Plan, SCRATCH, WORKSPACE};
use crate::protocol::denied::Denials;
use crate::protocol::{self, Stage};

use self::judge::Walls;

/// How long a command may take to be started, after which it is not.
const PATIENCE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// A hold of the follower of a command.
#[derive(Debug)]
pub(crate) struct Follower {
    pid: Pid,
    line: OwnedFd,
}

/// What the starter says of a command; carries where its outcome is read.
#[derive(Debug, Serialize, Deserialize)]
enum Begun {
    Started { pid: i32, stages: Vec<Stage> },
    Refused { stage: Stage, errno: i32 },
}

impl Follower {
    /// Starts a command as [`Starter::start`] does, and a follower with it.
    pub(crate) fn start(
        starter: &Starter,
        plan: &Plan,
        census: &Census,
        planned: Planned<'_>,
        group: Option<(&Work, &Leaf)>,
        mark: u64,
    ) -> Result<(Started, Self), Refusal> {
        let failed = |error: std::io::Error| {
            (Stage::Fork, error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()))
        };
        let (line, theirs) = socket::pair().map_err(failed)?;
        let forked = process::fork(&starter.proof, Namespaces::NONE, None).map_err(failed)?;
        let Fork::Parent { child: pid, .. } = forked else {
            begin(starter, plan, census, &theirs, || starter.start(planned, group, mark))
        };
        drop(theirs);
        let follower = Self { pid, line };
        match follower.begun() {
            Ok(started) => Ok((started, follower)),
            Err(refusal) => {
                follower.end();
                Err(refusal)
            }
        }
    }

    /// Waits until the command is started.
    fn begun(&self) -> Result<Started, Refusal> {
        let lost = |errno: Errno| (Stage::Fork, errno.raw_os_error());
        let _ = poll(&mut [PollFd::new(&self.line, PollFlags::IN)], Some(&PATIENCE));
        let received = protocol::receive_trusted::<Begun>(&self.line);
        let (begun, mut fds) = received.ok().flatten().ok_or(lost(Errno::CHILD))?;
        match begun {
            Begun::Started { pid, stages } => {
                let pid = Pid::from_raw(pid).ok_or(lost(Errno::SRCH))?;
                let outcome = fds.pop().ok_or(lost(Errno::BADF))?;
                Ok(Started::elsewhere(pid, outcome, stages))
            }
            Begun::Refused { stage, errno } => Err((stage, errno)),
        }
    }

    /// Takes what it saw, once the command has ended: it tells before anybody can hear of that.
    pub(crate) fn told(&self) -> Denials {
        let told = protocol::receive_trusted::<Denials>(&self.line);
        told.ok().flatten().map(|(denials, _)| denials).unwrap_or_default()
    }

    /// Ends it, so that nothing waits for it any more.
    pub(crate) fn end(&self) {
        let _ = process::signal_raw(self.pid.as_raw_nonzero().get(), Signal::KILL.as_raw());
    }
}

/// The follower: has the command started by another, and follows it.
fn begin(
    starter: &Starter,
    plan: &Plan,
    census: &Census,
    line: &OwnedFd,
    start: impl FnOnce() -> Result<Started, Refusal>,
) -> ! {
    match process::fork(&starter.proof, Namespaces::NONE, None) {
        Ok(Fork::Child) => start_followed(line, start),
        Ok(Fork::Parent { child, pidfd }) => {
            // By its owner: all others are closed below.
            drop(pidfd);
            let _ = rustix::thread::set_name(c"warren-explain");
            if let Ok(proc) = census.place().try_clone_to_owned()
                && let Ok(line) = line.try_clone()
                && close_others(&[&proc, &line]).is_ok()
            {
                follow::follow(child, walls(plan), proc, &line);
            }
        }
        Err(_) => {}
    }
    process::exit_now(0)
}

/// Leaves the standard streams, which lead nowhere, and what is named.
fn close_others(named: &[&OwnedFd]) -> std::io::Result<()> {
    let streams = [fd::inherited(0)?, fd::inherited(1)?, fd::inherited(2)?];
    let keep: Vec<&OwnedFd> = streams.iter().chain(named.iter().copied()).collect();
    let closed = fd::close_all_except(&keep);
    std::mem::forget(streams);
    closed
}

/// The starter: has itself followed, starts the command, and is gone.
fn start_followed(line: &OwnedFd, start: impl FnOnce() -> Result<Started, Refusal>) -> ! {
    let followed = trace::follow_me().and_then(|()| {
        // Until the follower has said what it wants to see.
        let own = rustix::process::getpid();
        process::signal_raw(own.as_raw_nonzero().get(), Signal::STOP.as_raw())
    });
    let errno = |error: &std::io::Error| error.raw_os_error().unwrap_or_default();
    let started = followed.map_err(|error| (Stage::Follow, errno(&error))).and_then(|()| start());
    match &started {
        Ok(started) => {
            let pid = started.pid().as_raw_nonzero().get();
            let begun = Begun::Started { pid, stages: started.stages().to_vec() };
            let _ = protocol::send(line, &begun, &[started.as_fd()]);
        }
        Err((stage, errno)) => {
            let begun = Begun::Refused { stage: *stage, errno: *errno };
            let _ = protocol::send(line, &begun, &[]);
        }
    }
    // What the command reads of this memory stays until it has left it.
    process::exit_now(0)
}

/// Makes the filters of a followed command: those of any other, but so that its follower hears what they refuse,
/// and one by which it sees the rest.
pub(crate) fn filters(
    init: &[Instruction],
    workload: &[Arc<[Instruction]>],
) -> Vec<Arc<[Instruction]>> {
    let refusing = iter::once(init).chain(workload.iter().map(AsRef::as_ref));
    let refusing = refusing.map(|program| seccomp::trapping(program).into());
    // What could not be compiled would be seen by nobody; a test compiles it.
    let seen = calls::seen().map(Arc::from).ok();
    seen.into_iter().chain(refusing).collect()
}

/// Says what the walls of a plan allow.
fn walls(plan: &Plan) -> Walls {
    let bytes = |paths: &[String]| paths.iter().map(|path| path.clone().into_bytes()).collect();
    let (writable, readable) = match &plan.walls {
        plan::Walls::Namespaces | plan::Walls::OwnKernel => (bytes(&plan.landlock.writable), None),
        plan::Walls::Rules(rules) => {
            let own = [WORKSPACE, HOME, SCRATCH].map(|name| format!("{}/{name}", rules.directory));
            let writable = bytes(&[&rules.writable[..], &own].concat());
            let readable = bytes(&[&rules.system[..], &rules.readable].concat());
            (writable, Some(readable))
        }
    };
    let filters = std::iter::once(&plan.filter.init).chain(&plan.filter.workload);
    let program = |bits: &Vec<u64>| bits.iter().copied().map(Instruction::from_bits).collect();
    Walls { writable, readable, filters: filters.map(program).collect() }
}
