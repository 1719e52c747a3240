//! Starting a command: the last steps between init and somebody else's program.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::process::Resource;
use rustix::pty::OpenptFlags;
use warren_sys::process::{self, Fork, Namespaces, SingleThreaded};
use warren_sys::seccomp::{self, Instruction};
use warren_sys::{cred, fd};

use crate::account::{Leaf, Work};
use crate::plan::{Users, WORKLOAD_ID};
use crate::protocol::{Exec, Stage};
use crate::users::User;

/// A command that was forked and has not said yet whether its program could be executed.
#[derive(Debug)]
pub(crate) struct Forked {
    pub(crate) pid: rustix::process::Pid,
    /// Closes when the program runs; says what failed if it does not.
    pub(crate) outcome: OwnedFd,
}

/// What a command gets of its streams.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// Its descriptors from 0 on, if it has no terminal.
    pub(crate) streams: Vec<OwnedFd>,
    /// The inner side of its terminal.
    pub(crate) terminal: Option<OwnedFd>,
}

/// What every command of a sandbox has in common.
#[derive(Debug)]
pub(crate) struct Starter {
    pub(crate) proof: SingleThreaded,
    pub(crate) filters: Vec<Vec<Instruction>>,
    pub(crate) nice: i32,
    pub(crate) users: Users,
}

impl Starter {
    /// Starts a command in a process, a session and, if given, a cgroup of its own.
    pub(crate) fn start(
        &self,
        exec: &Exec,
        ends: &Ends,
        group: Option<(&Work, &Leaf)>,
        mark: u64,
    ) -> io::Result<Forked> {
        let (outcome, report) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        // Out of the way of the descriptors that the command gets.
        let report = rustix::io::fcntl_dupfd_cloexec(&report, 16)?;
        let fork = |cgroup| process::fork(&self.proof, Namespaces::NONE, cgroup);
        let forked = match group {
            // Whether a process may be born in a group is checked like a write to its files.
            Some((work, leaf)) => work.as_owner(|_| fork(Some(leaf.group.as_fd()))),
            None => fork(None),
        };
        match forked? {
            Fork::Child => {
                let (stage, errno) = self.become_command(exec, ends, &report, mark);
                let _ = rustix::io::write(&report, &encode(stage, errno));
                process::exit_now(127)
            }
            Fork::Parent { child, .. } => Ok(Forked { pid: child, outcome }),
        }
    }

    /// Becomes the command, in a fresh copy of init; returns only what failed.
    fn become_command(
        &self,
        exec: &Exec,
        ends: &Ends,
        report: &OwnedFd,
        mark: u64,
    ) -> (Stage, i32) {
        if let Err(error) = self.prepare(exec, ends, report, mark) {
            return (Stage::Prepare, errno(&error));
        }
        let user = match exec.user.as_ref().map(|user| find(&user.name)).transpose() {
            Ok(user) => user,
            Err(error) => return (Stage::User, errno(&error)),
        };
        if let Err(error) = self.become_user(user.as_ref()) {
            return (Stage::User, errno(&error));
        }
        let workdir = match (&user, &exec.user) {
            (Some(user), Some(wanted)) => user.place(&wanted.workdir),
            _ => Some(exec.workdir.clone()),
        };
        if let Err(error) = workdir.ok_or_else(|| Errno::INVAL.into()).and_then(|dir| enter(&dir)) {
            return (Stage::Workdir, errno(&error));
        }
        if let Err(error) = self.install_filters() {
            return (Stage::Prepare, errno(&error));
        }
        (Stage::Program, errno(&execute(exec, user.as_ref())))
    }

    /// Takes away from a command what only init may call, and then every capability. One of root's
    /// has those of the bounding set again once it is executed.
    pub(crate) fn install_filters(&self) -> io::Result<()> {
        self.filters.iter().try_for_each(|filter| seccomp::install(filter))?;
        match self.users {
            Users::One => Ok(()),
            Users::Several { .. } => cred::drop_capabilities(),
        }
    }

    /// Becomes whoever runs the command: the commands' user, if nobody is named. Where there are
    /// several users, it keeps what init holds until the filters are installed.
    pub(crate) fn become_user(&self, user: Option<&User>) -> io::Result<()> {
        match (self.users, user) {
            (Users::One, None) => cred::become_only(WORKLOAD_ID),
            (Users::One, Some(user)) if (user.uid, user.gid) == (WORKLOAD_ID, WORKLOAD_ID) => {
                cred::become_only(WORKLOAD_ID)
            }
            // Init has no rights that it could give to anybody.
            (Users::One, Some(_)) => Err(Errno::PERM.into()),
            (Users::Several { .. }, None) => {
                cred::use_capabilities()?;
                cred::become_user(WORKLOAD_ID, WORKLOAD_ID, &[])
            }
            (Users::Several { .. }, Some(user)) => {
                cred::use_capabilities()?;
                cred::become_user(user.uid, user.gid, &user.groups)
            }
        }
    }

    fn prepare(&self, exec: &Exec, ends: &Ends, report: &OwnedFd, mark: u64) -> io::Result<()> {
        rustix::process::setsid()?;
        let streams: Vec<BorrowedFd<'_>> = match (&ends.terminal, ends.streams.len()) {
            (Some(terminal), _) => vec![terminal.as_fd(); 3],
            (None, 3..) => ends.streams.iter().map(AsFd::as_fd).collect(),
            (None, _) => return Err(Errno::BADF.into()),
        };
        if let Some(terminal) = &ends.terminal {
            rustix::process::ioctl_tiocsctty(terminal)?;
        }
        let count = streams.len();
        for (stream, number) in streams.into_iter().zip(0..) {
            fd::install_as(stream, number)?;
        }
        // Nothing of init's may be open when a path is walked that the sandbox can have written:
        // a working directory of /proc/self/fd/N would lead there.
        let numbers = 0..i32::try_from(count).unwrap_or(3);
        let streams = numbers.map(fd::inherited).collect::<io::Result<Vec<_>>>()?;
        fd::close_all_except(&streams.iter().chain([report]).collect::<Vec<_>>())?;
        std::mem::forget(streams);
        process::set_mark(mark)?;
        if let Some(files) = exec.open_files {
            process::limit(Resource::Nofile, files)?;
        }
        if self.nice != 0 {
            rustix::process::setpriority_process(None, self.nice)?;
        }
        process::default_signals();
        Ok(())
    }
}

/// Finds one of the sandbox's users.
fn find(name: &[u8]) -> io::Result<User> {
    User::find(name)?.ok_or_else(|| Errno::NOENT.into())
}

/// Enters `workdir` without passing through a link of `/proc`.
fn enter(workdir: &[u8]) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let place =
        rustix::fs::openat2(CWD, workdir, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)?;
    Ok(rustix::process::fchdir(place)?)
}

fn execute(exec: &Exec, user: Option<&User>) -> io::Error {
    let mut command = Command::new(OsStr::from_bytes(&exec.program));
    command.env_clear().args(exec.args.iter().map(|arg| OsStr::from_bytes(arg)));
    if let Some(user) = user {
        let name = OsStr::from_bytes(&user.name);
        command.env("HOME", OsStr::from_bytes(&user.home)).env("USER", name).env("LOGNAME", name);
    }
    for variable in &exec.env {
        let equals = variable.iter().position(|byte| *byte == b'=').unwrap_or(variable.len());
        let (name, value) = variable.split_at(equals);
        let value = value.get(1..).unwrap_or_default();
        command.env(OsStr::from_bytes(name), OsStr::from_bytes(value));
    }
    command.exec()
}

/// Opens what a command reads that has nothing to read.
pub(crate) fn nothing_to_read() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(c"/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Makes a terminal; returns its outer and its inner side.
pub(crate) fn open_terminal(rows: u16, columns: u16) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let outer = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&outer)?;
    let inner = rustix::pty::ioctl_tiocgptpeer(&outer, flags)?;
    resize(&outer, rows, columns)?;
    Ok((outer, inner))
}

/// Sets the size of a terminal.
pub(crate) fn resize(terminal: &OwnedFd, rows: u16, columns: u16) -> io::Result<()> {
    let size =
        rustix::termios::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(terminal, size)?)
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(Errno::INVAL.raw_os_error())
}

fn encode(stage: Stage, errno: i32) -> Vec<u8> {
    postcard::to_allocvec(&(stage, errno)).unwrap_or_default()
}

/// Understands what a child wrote that could not become its command; `None` if it could.
pub(crate) fn outcome(bytes: &[u8]) -> Option<(Stage, i32)> {
    if bytes.is_empty() {
        return None;
    }
    Some(postcard::from_bytes(bytes).unwrap_or((Stage::Prepare, Errno::INVAL.raw_os_error())))
}
