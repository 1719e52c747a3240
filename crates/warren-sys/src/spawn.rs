//! Starting programs from a process that must not be copied for it.
//!
//! To fork is to copy page tables and then, on both sides, every page that is written to: with what a
//! fault costs in a virtual machine that is a fifth of a millisecond for a small process. So a new
//! process runs here in the memory of the one who starts it, on a stack of its own, until it executes
//! its program. Unlike after vfork(2) the starter goes on meanwhile: whoever may signal the new process
//! could stop it for ever, and with it the starter.
//!
//! Two that share memory without knowing of each other must not both change it. The new process
//! therefore does nothing but walk a list of [`Step`]s that was made before, by system calls of its own:
//! it allocates nothing, frees nothing, and leaves `errno`, which both share, alone.
#![expect(unsafe_code, reason = "clone3 with shared memory and execve have no safe wrapper")]

use std::cell::{Cell, UnsafeCell};
use std::ffi::{CStr, CString, c_char};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd as _, OwnedFd};
use std::ptr;
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketFlags,
    SocketType, recvmsg,
};
use rustix::pipe::PipeFlags;
use rustix::process::{DumpableBehavior, Pid, Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, Gid, Uid};

use crate::process::{self, SingleThreaded};
use crate::seccomp::Instruction;
use crate::socket;

/// What a new process does before it executes its program.
#[derive(Debug)]
pub enum Step {
    /// Leads a session of its own.
    NewSession,
    /// Puts its streams where its program looks for them; the first is its terminal if it is to have one.
    Streams {
        /// Whether it is.
        terminal: bool,
    },
    /// Joins the control group whose `cgroup.procs` this is.
    Join(OwnedFd),
    /// Keeps its streams, if it has any yet, and closes everything else.
    CloseOthers,
    /// Lowers a limit, soft and hard.
    Limit(Resource, u64),
    /// Changes its priority.
    Nice(i32),
    /// Gives every signal its default meaning again and lets it through.
    DefaultSignals,
    /// Puts every capability that it holds into effect.
    UseCapabilities,
    /// Takes other supplementary groups.
    Groups(Vec<Gid>),
    /// Becomes a user and a group for good, and stays closed to all others of that user.
    Become(Uid, Gid),
    /// Enters a directory without passing through a link of `/proc`.
    Enter(CString),
    /// Installs a filter.
    Filter(Arc<[Instruction]>),
    /// Gives up every capability in every set.
    DropCapabilities,
    /// Likewise, on a kernel that has no ambient set: gVisor.
    EmptyCapabilities,
    /// Tries what must be refused by now: done if it is.
    Expect(Refused),
}

/// What a process is not to get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// To be traced by the one who started it, for which nobody needs a right.
    Tracing,
    /// A descriptor of this number.
    Descriptor(u64),
    /// A socket of this family and type. See socket(2).
    Socket(u64, u64),
}

impl Refused {
    /// Tries to get it.
    fn attempt(self) -> Result<u64, Errno> {
        let (number, args) = match self {
            // PTRACE_TRACEME.
            Self::Tracing => (libc::SYS_ptrace, [0; 4]),
            Self::Descriptor(number) => (libc::SYS_dup3, [0, number, libc::O_CLOEXEC as u64, 0]),
            Self::Socket(family, kind) => (libc::SYS_socket, [family, kind, 0, 0]),
        };
        // SAFETY: all of these take integers; what they make is this process's alone, and ends with it.
        unsafe { process::call(number, args) }
    }

    /// Tells an answer that means no from one that means that this was let through, or got so far that something
    /// else was wrong with it.
    fn is_meant_by(self, errno: Errno) -> bool {
        match self {
            Self::Tracing => errno == Errno::PERM || errno == Errno::NOSYS,
            Self::Descriptor(_) => errno == Errno::BADF || errno == Errno::MFILE,
            Self::Socket(..) => errno == Errno::PERM || errno == Errno::AFNOSUPPORT,
        }
    }
}

/// A program with its arguments and environment.
#[derive(Debug)]
pub struct Program {
    /// Where to look for it, in order.
    places: Vec<CString>,
    /// A place for a shell, the program's name, its arguments, and a null.
    args: Vec<*const c_char>,
    env: Vec<*const c_char>,
    /// What those point to.
    _strings: Vec<CString>,
}

/// Who executes what cannot be executed and is no program of another machine either.
const SHELL: &CStr = c"/bin/sh";
/// Where programs are looked for if nobody says. See execvp(3).
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";

impl Program {
    /// Takes a program, looked for as execvp(3) does it if its name has no slash. In the environment the
    /// last of two with one name counts.
    ///
    /// # Errors
    ///
    /// `EINVAL` if anything has a zero byte in it, `ENOENT` if the name is empty.
    pub fn new(name: &[u8], args: &[Vec<u8>], env: &[Vec<u8>]) -> Result<Self, Errno> {
        let string = |bytes: &[u8]| CString::new(bytes).map_err(|_| Errno::INVAL);
        if name.is_empty() {
            return Err(Errno::NOENT);
        }
        let mut strings = vec![string(name)?];
        for arg in args {
            strings.push(string(arg)?);
        }
        let mut variables: Vec<&[u8]> = Vec::with_capacity(env.len());
        let key = |variable: &[u8]| variable.iter().position(|byte| *byte == b'=');
        for variable in env {
            let name = &variable[..key(variable).unwrap_or(variable.len())];
            let same = |known: &&[u8]| known[..key(known).unwrap_or(known.len())] == *name;
            match variables.iter_mut().find(|known| same(known)) {
                Some(known) => *known = variable,
                None => variables.push(variable),
            }
        }
        let path = variables.iter().find_map(|variable| variable.strip_prefix(b"PATH="));
        let places = if name.contains(&b'/') {
            vec![strings[0].clone()]
        } else {
            let dirs = path.unwrap_or(DEFAULT_PATH).split(|byte| *byte == b':');
            let place = |dir: &[u8]| match dir {
                // The working directory.
                b"" => string(name),
                dir => string(&[dir, b"/", name].concat()),
            };
            dirs.map(place).collect::<Result<_, _>>()?
        };
        let args = [ptr::null()].into_iter().chain(strings.iter().map(|arg| arg.as_ptr()));
        let args = args.chain([ptr::null()]).collect();
        let first = strings.len();
        for variable in variables {
            let whole = if variable.contains(&b'=') { &b""[..] } else { b"=" };
            strings.push(string(&[variable, whole].concat())?);
        }
        let env = strings[first..].iter().map(|variable| variable.as_ptr());
        let env = env.chain([ptr::null()]).collect();
        Ok(Self { places, args, env, _strings: strings })
    }
}

/// How far a new process got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has not executed its program yet.
    Pending,
    /// It executes its program, or was ended before it could say anything.
    Gone,
    /// It ended because a step failed, by the place of that step; the one after the last is the program.
    Failed(usize, Errno),
}

/// A process that is about to become a program.
#[derive(Debug)]
pub struct Starting {
    pid: Pid,
    outcome: OwnedFd,
    /// What the process reads until it is over. `None` from then on.
    held: Option<Box<Held>>,
}

impl AsFd for Starting {
    /// Becomes readable when there is an [`Starting::outcome`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.outcome.as_fd()
    }
}

impl Starting {
    /// Takes hold of a process that another of ours started, in its own memory, and that says to
    /// `outcome` how far it got.
    pub fn elsewhere(pid: Pid, outcome: OwnedFd) -> Self {
        Self { pid, outcome, held: None }
    }

    /// The process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Looks how far it got.
    pub fn outcome(&mut self) -> Outcome {
        let mut record = [0; 8];
        let outcome = match rustix::io::read(&self.outcome, &mut record) {
            Err(Errno::AGAIN | Errno::INTR) => return Outcome::Pending,
            Ok(8) => {
                let [a, b, c, d, e, f, g, h] = record;
                let step = u32::from_le_bytes([a, b, c, d]);
                let errno = Errno::from_raw_os_error(i32::from_le_bytes([e, f, g, h]));
                Outcome::Failed(usize::try_from(step).unwrap_or(usize::MAX), errno)
            }
            Ok(_) | Err(_) => Outcome::Gone,
        };
        if outcome == Outcome::Gone {
            // The kernel takes the memory away before it closes what is closed by an exec or an exit.
            if let Some(held) = self.held.take() {
                IDLE_STACK.set(Some(held.stack));
            }
        }
        outcome
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        // One that failed has said so and is gone a moment later.
        if let Outcome::Failed(..) = self.outcome() {
            self.outcome();
        }
        // Better lost than taken from under somebody who uses it.
        std::mem::forget(self.held.take());
    }
}

/// A process that has taken its first steps and waits to be told the others.
#[derive(Debug)]
pub struct Waiting {
    starting: Starting,
    orders: OwnedFd,
}

impl Waiting {
    /// The process.
    pub fn pid(&self) -> Pid {
        self.starting.pid
    }

    /// Has it take these steps and execute a program, with `streams` from 0 on. Steps are counted from
    /// the first of those that it has taken.
    ///
    /// # Errors
    ///
    /// The process is gone, or has something else than we know.
    pub fn go(
        self,
        steps: Vec<Step>,
        program: Program,
        streams: &[BorrowedFd<'_>],
    ) -> io::Result<Starting> {
        let held = self.starting.held.as_ref().ok_or(Errno::SRCH)?;
        // They arrive at these numbers, since it has nothing else open there.
        let numbers = (0..FIRST_FREE).take(streams.len()).collect();
        let rest = Rest { steps, program, streams: numbers };
        // SAFETY: the process looks here only when it has received what is sent below, and nobody else does.
        unsafe { *held.rest.get() = Some(rest) };
        socket::send(&self.orders, &[0], streams)?;
        Ok(self.starting)
    }
}

/// Everything that a new process reads.
#[derive(Debug)]
struct Held {
    steps: Vec<Step>,
    /// What is done after those. Where it is not known yet, it is when something has come by `orders`.
    rest: UnsafeCell<Option<Rest>>,
    orders: Option<i32>,
    report: i32,
    stack: Stack,
}

/// What makes a process this program and no other.
#[derive(Debug)]
struct Rest {
    steps: Vec<Step>,
    program: Program,
    /// The numbers of what becomes its streams: none that another stream gets.
    streams: Vec<i32>,
}

/// Starts a program in a process of its own, with `streams` from 0 on and, with `cgroup`, in that v2
/// cgroup. The process's exit sends SIGCHLD.
pub fn start(
    _proof: &SingleThreaded,
    steps: Vec<Step>,
    program: Program,
    streams: &[BorrowedFd<'_>],
    cgroup: Option<BorrowedFd<'_>>,
) -> io::Result<Starting> {
    if streams.len() >= usize::try_from(FIRST_FREE).unwrap_or_default() {
        return Err(Errno::INVAL.into());
    }
    let (outcome, report) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // Out of the way of the descriptors that the program gets.
    let above = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, FIRST_FREE);
    let report = above(report.as_fd())?;
    let moved: Vec<Option<OwnedFd>> = streams
        .iter()
        .map(|stream| (stream.as_raw_fd() < FIRST_FREE).then(|| above(*stream)).transpose())
        .collect::<Result<_, _>>()?;
    let number = |(stream, moved): (&BorrowedFd<'_>, &Option<OwnedFd>)| {
        moved.as_ref().map_or(stream.as_raw_fd(), AsRawFd::as_raw_fd)
    };
    let streams = streams.iter().zip(&moved).map(number).collect();
    let held = Box::new(Held {
        steps: Vec::new(),
        rest: UnsafeCell::new(Some(Rest { steps, program, streams })),
        orders: None,
        report: report.as_raw_fd(),
        stack: Stack::take()?,
    });
    let pid = process::clone_sharing(run, &raw const *held, held.stack.memory(), cgroup)?;
    Ok(Starting { pid, outcome, held: Some(held) })
}

/// Starts a process that takes these steps and then waits, in `cgroup`. Its exit sends SIGCHLD.
pub fn prepare(
    _proof: &SingleThreaded,
    steps: Vec<Step>,
    cgroup: BorrowedFd<'_>,
) -> io::Result<Waiting> {
    let (outcome, report) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (orders, theirs) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
    // Out of the way of the descriptors that it will be sent.
    let above = |fd: OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, FIRST_FREE);
    let (report, theirs) = (above(report)?, above(theirs)?);
    let held = Box::new(Held {
        steps,
        rest: UnsafeCell::new(None),
        orders: Some(theirs.as_raw_fd()),
        report: report.as_raw_fd(),
        stack: Stack::take()?,
    });
    let pid = process::clone_sharing(run, &raw const *held, held.stack.memory(), Some(cgroup))?;
    Ok(Waiting { starting: Starting { pid, outcome, held: Some(held) }, orders })
}

/// A process that takes steps and ends.
#[derive(Debug)]
pub struct Trial {
    pid: Pid,
    /// What it reads until it has ended. `None` from then on.
    held: Option<Box<Held>>,
}

impl Trial {
    /// Starts one. It is a child of this process, whose streams it has.
    pub fn begin(_proof: &SingleThreaded, steps: Vec<Step>) -> io::Result<Self> {
        let held = Box::new(Held {
            steps,
            rest: UnsafeCell::new(None),
            orders: None,
            report: -1,
            stack: Stack::take()?,
        });
        let pid = process::clone_sharing(try_out, &raw const *held, held.stack.memory(), None)?;
        Ok(Self { pid, held: Some(held) })
    }

    /// Waits until it has ended; returns the first step that failed, if one did.
    ///
    /// # Errors
    ///
    /// It was ended by somebody else.
    pub fn end(mut self) -> io::Result<Option<usize>> {
        let (end, _) = process::reap(self.pid)?;
        if let Some(held) = self.held.take() {
            IDLE_STACK.set(Some(held.stack));
        }
        match end {
            process::End::Exited(0) => Ok(None),
            process::End::Exited(step) => Ok(usize::try_from(step - 1).ok()),
            process::End::Signalled(_) => Err(Errno::INTR.into()),
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        // Better lost than taken from under somebody who uses it.
        std::mem::forget(self.held.take());
    }
}

/// The process of a trial.
extern "C" fn try_out(held: *const Held) -> ! {
    // SAFETY: `Trial` keeps it until this process is over, and its owner does not look at it meanwhile.
    let held = unsafe { &*held };
    let failed = held.steps.iter().position(|step| held.take(step, None).is_err());
    // Zero is for none; no trial has so many steps that the number does not fit.
    let code = failed.map_or(0, |step| (step as u64 + 1).min(255));
    loop {
        // SAFETY: exit_group takes an integer and does not return.
        let _ = unsafe { process::call(libc::SYS_exit_group, [code, 0, 0, 0]) };
    }
}

/// The first number that no stream of a program has.
const FIRST_FREE: i32 = 16;

/// The new process.
extern "C" fn run(held: *const Held) -> ! {
    // SAFETY: `Starting` keeps it until this process is over or has left this memory, and its owner
    // does not look at it meanwhile.
    let held = unsafe { &*held };
    let (failed, errno) = held.live();
    let step = u32::try_from(failed).unwrap_or(u32::MAX).to_le_bytes();
    let code = errno.raw_os_error().to_le_bytes();
    let mut record = [0; 8];
    record[..4].copy_from_slice(&step);
    record[4..].copy_from_slice(&code);
    // SAFETY: the starter made this descriptor for this process and no step closes it.
    let report = unsafe { BorrowedFd::borrow_raw(held.report) };
    let _ = rustix::io::write(report, &record);
    loop {
        // SAFETY: exit_group takes an integer and does not return.
        let _ = unsafe { process::call(libc::SYS_exit_group, [127, 0, 0, 0]) };
    }
}

impl Held {
    /// Takes all steps and executes the program; returns only if that failed, with the step that did.
    fn live(&self) -> (usize, Errno) {
        for (index, step) in self.steps.iter().enumerate() {
            if let Err(errno) = self.take(step, None) {
                return (index, errno);
            }
        }
        let first = self.steps.len();
        if let Some(orders) = self.orders
            && let Err(errno) = receive_streams(orders)
        {
            return (first, errno);
        }
        // SAFETY: it was there before this process was, or before what it has just received was sent, and
        // nobody changes it after that.
        let Some(rest) = (unsafe { &*self.rest.get() }) else { return (first, Errno::INVAL) };
        for (index, step) in rest.steps.iter().enumerate() {
            if let Err(errno) = self.take(step, Some(rest)) {
                return (first + index, errno);
            }
        }
        (first + rest.steps.len(), rest.execute())
    }

    /// Takes one step. Whatever it calls allocates nothing and does not touch `errno`.
    fn take(&self, step: &Step, rest: Option<&Rest>) -> Result<(), Errno> {
        match step {
            Step::NewSession => rustix::process::setsid().map(drop),
            Step::Streams { terminal } => {
                rest.map_or(Err(Errno::BADF), |rest| rest.place_streams(*terminal))
            }
            Step::Join(processes) => rustix::io::write(processes, b"0").map(drop),
            Step::CloseOthers => {
                let streams = rest.map_or(0, |rest| rest.streams.len());
                let after = u32::try_from(streams).unwrap_or_default();
                let report = self.report.unsigned_abs();
                // Once there are orders, there is nothing that more could come by.
                let orders = self.orders.filter(|_| rest.is_none()).map(i32::unsigned_abs);
                let (low, high) = orders
                    .map_or((report, report), |orders| (report.min(orders), report.max(orders)));
                close_range(after, low - 1)?;
                if high > low + 1 {
                    close_range(low + 1, high - 1)?;
                }
                close_range(high + 1, crate::fd::LAST)
            }
            Step::Limit(resource, value) => {
                let limit = Rlimit { current: Some(*value), maximum: Some(*value) };
                rustix::process::setrlimit(*resource, limit)
            }
            Step::Nice(priority) => rustix::process::setpriority_process(None, *priority),
            Step::DefaultSignals => {
                process::default_signals();
                Ok(())
            }
            Step::UseCapabilities => {
                let sets = rustix::thread::capabilities(None)?;
                let all = CapabilitySets { effective: sets.permitted, ..sets };
                rustix::thread::set_capabilities(None, all)
            }
            Step::Groups(groups) => rustix::thread::set_thread_groups(groups),
            Step::Become(uid, gid) => {
                rustix::thread::set_thread_res_gid(*gid, *gid, *gid)?;
                rustix::thread::set_thread_res_uid(*uid, *uid, *uid)?;
                // A change of identity may open the memory to others, as fs.suid_dumpable says, and it is
                // not ours alone.
                rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
            }
            Step::Enter(dir) => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let resolve = ResolveFlags::NO_MAGICLINKS;
                let dir = dir.as_c_str();
                let place = match rustix::fs::openat2(CWD, dir, flags, Mode::empty(), resolve) {
                    // gVisor, where nothing but the streams is open by now that such a link could lead to.
                    Err(Errno::NOSYS) => rustix::fs::openat(CWD, dir, flags, Mode::empty())?,
                    other => other?,
                };
                rustix::process::fchdir(place)
            }
            Step::Filter(program) => install(program),
            Step::DropCapabilities => {
                rustix::thread::clear_ambient_capability_set()?;
                empty_capabilities()
            }
            Step::EmptyCapabilities => empty_capabilities(),
            Step::Expect(refused) => match refused.attempt() {
                Err(errno) if refused.is_meant_by(errno) => Ok(()),
                Ok(_) | Err(_) => Err(Errno::NOTRECOVERABLE),
            },
        }
    }
}

fn empty_capabilities() -> Result<(), Errno> {
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, none)
}

impl Rest {
    /// Puts the streams where the program looks for them.
    fn place_streams(&self, terminal: bool) -> Result<(), Errno> {
        for (stream, number) in self.streams.iter().zip(0..) {
            if as_word(*stream) == number {
                continue;
            }
            // SAFETY: dup3 takes integers. The numbers of the streams are below all that this process was
            // given, and it has nothing else open there that it uses.
            unsafe { process::call(libc::SYS_dup3, [as_word(*stream), number, 0, 0]) }?;
        }
        if terminal {
            // SAFETY: 0 was installed just now.
            rustix::process::ioctl_tiocsctty(unsafe { BorrowedFd::borrow_raw(0) })?;
        }
        Ok(())
    }

    /// Executes the program; returns only if that failed. See execvp(3).
    fn execute(&self) -> Errno {
        let program = &self.program;
        let mut refused = Errno::NOENT;
        for place in &program.places {
            // The shell's place in front is left out.
            match execute(place, &raw const program.args[1], program.env.as_ptr()) {
                Errno::NOEXEC => return self.execute_script(place),
                Errno::NOENT | Errno::NOTDIR | Errno::STALE | Errno::NODEV | Errno::TIMEDOUT => {}
                Errno::ACCESS => refused = Errno::ACCESS,
                other => return other,
            }
        }
        refused
    }

    /// Has a shell execute what the kernel does not know how to.
    fn execute_script(&self, place: &CStr) -> Errno {
        let args = self.program.args.as_ptr().cast_mut();
        // SAFETY: the list has these two places, for the shell and for the name; its owner does not look
        // at it, and the process that writes here is the only one that reads it.
        unsafe {
            args.write(SHELL.as_ptr());
            args.add(1).write(place.as_ptr());
        }
        execute(SHELL, args, self.program.env.as_ptr())
    }
}

/// Waits for the streams of a program, which arrive at the first numbers, and hangs up.
fn receive_streams(orders: i32) -> Result<(), Errno> {
    // SAFETY: the starter made this descriptor for this process, which has not closed it.
    let socket = unsafe { BorrowedFd::borrow_raw(orders) };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FIRST_FREE as usize))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let received = loop {
        let mut into = [IoSliceMut::new(&mut byte)];
        match recvmsg(socket, &mut into, &mut control, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut expected = 0;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(streams) = message {
            for stream in streams {
                if stream.into_raw_fd() != expected {
                    return Err(Errno::BADF);
                }
                expected += 1;
            }
        }
    }
    let whole = received.bytes == 1 && !received.flags.contains(ReturnFlags::CTRUNC);
    close_range(orders.unsigned_abs(), orders.unsigned_abs())?;
    if whole { Ok(()) } else { Err(Errno::BADMSG) }
}

fn execute(place: &CStr, args: *const *const c_char, env: *const *const c_char) -> Errno {
    let arguments = [place.as_ptr() as u64, args as u64, env as u64, 0];
    // SAFETY: execve reads a string and two lists of strings that end with a null; `Program` made them,
    // and is held until this process is over.
    unsafe { process::call(libc::SYS_execve, arguments) }.err().unwrap_or(Errno::INVAL)
}

pub(crate) fn close_range(first: u32, last: u32) -> Result<(), Errno> {
    // SAFETY: close_range reads integers. Values of type `OwnedFd` for what is closed are the starter's,
    // whose own descriptors these are not.
    unsafe { process::call(libc::SYS_close_range, [first.into(), last.into(), 0, 0]) }.map(drop)
}

fn install(program: &[Instruction]) -> Result<(), Errno> {
    let len = u16::try_from(program.len()).map_err(|_| Errno::INVAL)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    let mode = u64::from(libc::SECCOMP_SET_MODE_FILTER);
    // SAFETY: as in `seccomp::install`, whose layout of instructions this is.
    unsafe { process::call(libc::SYS_seccomp, [mode, 0, (&raw const program) as u64, 0]) }.map(drop)
}

/// A descriptor as the kernel takes it.
fn as_word(number: i32) -> u64 {
    u64::from(number.unsigned_abs())
}

/// Memory for the stack of a new process, below which there is nothing.
#[derive(Debug)]
pub(crate) struct Stack {
    start: *mut std::ffi::c_void,
}

// SAFETY: memory that this value alone owns and never looks into; any thread may give it back.
unsafe impl Send for Stack {}
// SAFETY: likewise: a shared one tells where it is, and nothing else.
unsafe impl Sync for Stack {}

thread_local! {
    /// The stack of the last one that is over, for the next: what it touched need not be made again.
    static IDLE_STACK: Cell<Option<Stack>> = const { Cell::new(None) };
}

/// Some steps and their calls take a few kilobytes, of which an unoptimised build makes more.
const STACK: usize = 64 << 10;
const GUARD: usize = 4096 << 4;

impl Stack {
    pub(crate) fn take() -> io::Result<Self> {
        IDLE_STACK.take().map_or_else(Self::new, Ok)
    }

    fn new() -> io::Result<Self> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: new memory at an address that the kernel chooses.
        let start =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), GUARD + STACK, access, flags) }?;
        let stack = Self { start };
        // SAFETY: the first part of what was just mapped, which nothing refers to.
        unsafe { rustix::mm::mprotect(start, GUARD, MprotectFlags::empty()) }?;
        Ok(stack)
    }

    pub(crate) fn memory(&self) -> (*mut std::ffi::c_void, usize) {
        (self.start.wrapping_byte_add(GUARD), STACK)
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: what `new` mapped, and nobody uses any more: see `Starting`.
        let _ = unsafe { rustix::mm::munmap(self.start, GUARD + STACK) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(name: &str, env: &[&str]) -> Program {
        let env: Vec<Vec<u8>> = env.iter().map(|variable| variable.as_bytes().to_vec()).collect();
        Program::new(name.as_bytes(), &[b"a".to_vec()], &env).unwrap()
    }

    fn strings(list: &[*const c_char]) -> Vec<String> {
        let strings = list.iter().take_while(|pointer| !pointer.is_null());
        // SAFETY: `Program` made them of strings that it keeps.
        strings.map(|s| unsafe { CStr::from_ptr(*s) }.to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn a_program_is_looked_for_in_the_path_of_its_own_environment() {
        let found = program("x", &["PATH=/a::/b", "A"]);
        assert_eq!(found.places, [c"/a/x", c"x", c"/b/x"].map(CStr::to_owned));
        assert_eq!(strings(&found.args[1..]), ["x", "a"]);
        assert_eq!(strings(&found.env), ["PATH=/a::/b", "A="]);
        assert_eq!(program("x", &[]).places, [c"/bin/x", c"/usr/bin/x"].map(CStr::to_owned));
        assert_eq!(program("./x", &["PATH=/a"]).places, [c"./x".to_owned()]);
    }

    #[test]
    fn of_two_variables_with_one_name_the_last_counts() {
        let found = program("/x", &["A=1", "B=2", "A=3=4", "AB=5"]);
        assert_eq!(strings(&found.env), ["A=3=4", "B=2", "AB=5"]);
    }

    #[test]
    fn a_trial_tells_what_is_refused_from_what_gets_through() {
        fn no_tracing() -> Vec<Instruction> {
            let step = |code, jf, k| Instruction { code, jt: 0, jf, k };
            let ptrace = u32::try_from(libc::SYS_ptrace).unwrap();
            let (refuse, allow) = (step(0x06, 0, 0x0005_0001), step(0x06, 0, 0x7fff_0000));
            vec![step(0x20, 0, 0), step(0x15, 1, ptrace), refuse, allow]
        }
        // Tests have threads. A copy of this process has one.
        let alone = |steps: fn() -> Vec<Step>| {
            // SAFETY: the copy makes system calls, allocates a little as glibc lets it after a fork, and ends.
            match unsafe { libc::fork() } {
                0 => {
                    let _ = rustix::thread::set_no_new_privs(true);
                    let tried = SingleThreaded::claim()
                        .and_then(|proof| Trial::begin(&proof, steps()))
                        .and_then(Trial::end);
                    let code = match tried {
                        Ok(None) => 0,
                        Ok(Some(step)) => i32::try_from(step).unwrap_or(99) + 1,
                        Err(_) => 100,
                    };
                    process::exit_now(code)
                }
                child => process::reap(Pid::from_raw(child).unwrap()).unwrap().0,
            }
        };
        let end = alone(|| vec![Step::Expect(Refused::Tracing)]);
        assert_eq!(end, process::End::Exited(1), "control: whoever may is traced");
        let end = alone(|| vec![Step::Expect(Refused::Descriptor(99))]);
        assert_eq!(end, process::End::Exited(1), "control: the number is free");
        let end = alone(|| vec![Step::NewSession, Step::Expect(Refused::Socket(1, 1))]);
        assert_eq!(end, process::End::Exited(2), "control: anybody may have one");
        let end = alone(|| {
            vec![
                Step::Limit(Resource::Nofile, 99),
                Step::Filter(no_tracing().into()),
                Step::Expect(Refused::Tracing),
                Step::Expect(Refused::Descriptor(99)),
            ]
        });
        assert_eq!(end, process::End::Exited(0), "all is refused");
    }

    #[test]
    fn what_no_program_can_be_given_is_refused() {
        let made = |name: &[u8], arg: &[u8], env: &[u8]| {
            Program::new(name, &[arg.to_vec()], &[env.to_vec()]).err()
        };
        assert_eq!(made(b"a", b"b", b"C=d"), None, "control");
        assert_eq!(made(b"", b"b", b"C=d"), Some(Errno::NOENT));
        assert_eq!(made(b"a\0", b"b", b"C=d"), Some(Errno::INVAL));
        assert_eq!(made(b"a", b"b\0", b"C=d"), Some(Errno::INVAL));
        assert_eq!(made(b"a", b"b", b"C=d\0"), Some(Errno::INVAL));
    }
}
