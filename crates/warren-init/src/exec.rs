//! Starting a command: the last steps between init and somebody else's program.

use std::cell::OnceCell;
use std::ffi::CString;
use std::io;
use std::iter;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Resource};
use rustix::thread::{Gid, Uid};
use warren_sys::process::SingleThreaded;
use warren_sys::seccomp::{self, Instruction};
use warren_sys::spawn::{self, Outcome, Program, Refused, Starting, Step, Waiting};
use warren_sys::{cred, process};

use crate::account::{Leaf, Work};
use crate::explain;
use crate::plan::{Users, WORKLOAD_ID};
use crate::protocol::{Exec, Stage};
use crate::users::User;

/// A command that was started and has not said yet whether its program could be executed.
#[derive(Debug)]
pub(crate) struct Started {
    starting: Starting,
    /// To which stage each of its steps belongs.
    stages: Vec<Stage>,
}

/// Why a command does not run.
pub(crate) type Refusal = (Stage, i32);

impl Started {
    /// Takes over a command that was started by another.
    pub(crate) fn elsewhere(pid: Pid, outcome: OwnedFd, stages: Vec<Stage>) -> Self {
        Self { starting: Starting::elsewhere(pid, outcome), stages }
    }

    /// Tells to which stage each of its steps belongs.
    pub(crate) fn stages(&self) -> &[Stage] {
        &self.stages
    }

    pub(crate) fn pid(&self) -> Pid {
        self.starting.pid()
    }

    /// Looks whether its program runs: `None` if that is not known yet.
    pub(crate) fn outcome(&mut self) -> Option<Result<(), Refusal>> {
        match self.starting.outcome() {
            Outcome::Pending => None,
            Outcome::Gone => Some(Ok(())),
            Outcome::Failed(step, errno) => {
                let stage = self.stages.get(step).copied().unwrap_or(Stage::Program);
                Some(Err((stage, errno.raw_os_error())))
            }
        }
    }
}

impl AsFd for Started {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.starting.as_fd()
    }
}

/// A process that is to become the next command, with the group that it is in.
///
/// It is init's equal until it is told what to become: nobody inside may signal it.
#[derive(Debug)]
pub(crate) struct Spare {
    waiting: Waiting,
    stages: Vec<Stage>,
    pub(crate) leaf: Leaf,
    pub(crate) mark: u64,
}

impl Spare {
    pub(crate) fn pid(&self) -> Pid {
        self.waiting.pid()
    }

    /// Has it become a command; `None` if it is gone. Its group is returned in any case.
    pub(crate) fn become_command(self, planned: Planned<'_>) -> (Option<Started>, Leaf) {
        let Self { waiting, mut stages, leaf, .. } = self;
        let placed = planned.place_streams();
        let Planned { program, streams, own, .. } = planned;
        let (steps, own): (Vec<_>, Vec<_>) = iter::once(placed).chain(own).unzip();
        stages.extend(own);
        let starting = waiting.go(steps, program, &streams).ok();
        (starting.map(|starting| Started { starting, stages }), leaf)
    }
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
    /// Init's own filter, which every command has below its own.
    pub(crate) init_filter: Arc<[Instruction]>,
    pub(crate) filters: Vec<Arc<[Instruction]>>,
    /// Those of a command that is followed, made when there is the first.
    pub(crate) followed: OnceCell<Vec<Arc<[Instruction]>>>,
    pub(crate) nice: i32,
    pub(crate) users: Users,
    /// Whether none may trace another.
    pub(crate) no_tracing: bool,
    /// What the commands of a sandbox without namespaces are, if it is one.
    pub(crate) ruled: Option<Ruled>,
    /// Whether init is nobody that a command is, and has the rights to become one: on a kernel of its own.
    pub(crate) rightful: bool,
}

/// The commands of a sandbox without namespaces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ruled {
    /// Their user, if it is not init's own.
    pub(crate) user: Option<u32>,
    /// The most that one file may have.
    pub(crate) file_bytes: Option<u64>,
}

/// A command that can be started: nothing of what was asked for is wrong in itself.
#[derive(Debug)]
pub(crate) struct Planned<'a> {
    program: Program,
    streams: Vec<BorrowedFd<'a>>,
    terminal: bool,
    /// What its process does that others do otherwise.
    own: Vec<(Step, Stage)>,
}

impl Planned<'_> {
    fn place_streams(&self) -> (Step, Stage) {
        (Step::Streams { terminal: self.terminal }, Stage::Prepare)
    }
}

impl Starter {
    /// Decides what it takes to start a command.
    pub(crate) fn plan<'a>(&self, exec: &Exec, ends: &'a Ends) -> Result<Planned<'a>, Refusal> {
        let at = |stage| move |errno: Errno| (stage, errno.raw_os_error());
        // Without a root of its own there is one user, whatever it is called: the host's list is the host's.
        let named = exec.user.as_ref().filter(|_| self.ruled.is_none());
        let user = named.map(|user| find(&user.name)).transpose();
        let user = user.map_err(|error| (Stage::User, errno(&error)))?;
        let program = Program::new(&exec.program, &exec.args, &environment(exec, user.as_ref()));
        let program = program.map_err(at(Stage::Program))?;
        let streams: Vec<BorrowedFd<'_>> = match (&ends.terminal, ends.streams.len()) {
            (Some(terminal), _) => vec![terminal.as_fd(); 3],
            (None, 3..) => ends.streams.iter().map(AsFd::as_fd).collect(),
            (None, _) => return Err(at(Stage::Fork)(Errno::BADF)),
        };
        let own = self.own_steps(exec, user.as_ref())?;
        Ok(Planned { program, streams, terminal: ends.terminal.is_some(), own })
    }

    /// Starts a command in a process, a session and, if given, a cgroup of its own.
    pub(crate) fn start(
        &self,
        planned: Planned<'_>,
        group: Option<(&Work, &Leaf)>,
        mark: u64,
    ) -> Result<Started, Refusal> {
        let doors = group.map(|(work, leaf)| work.doors(leaf)).transpose();
        let doors = doors.map_err(|error| (Stage::Fork, errno(&error)))?.unwrap_or_default();
        // Who is told by its group needs no mark.
        let joins = !doors.is_empty();
        // First of all: there may be no room for another process.
        let joined = doors.into_iter().map(|door| (Step::Join(door), Stage::Fork));
        let first = [(Step::NewSession, Stage::Prepare), planned.place_streams()];
        let common = self.common_steps((!joins).then_some(mark));
        let common = common.map(|step| (step, Stage::Prepare));
        let Planned { program, streams, own, .. } = planned;
        let (steps, stages) = joined.chain(first).chain(common).chain(own).unzip();
        let start = |cgroup| spawn::start(&self.proof, steps, program, &streams, cgroup);
        let starting = match group {
            // Whether a process may be born in a group is checked like a write to its files.
            Some((work, leaf)) if !joins => work.as_owner(|_| start(Some(leaf.group.as_fd()))),
            Some(_) | None => start(None),
        };
        let starting = starting.map_err(|error| (Stage::Fork, errno(&error)))?;
        Ok(Started { starting, stages })
    }

    /// Makes the process of the next command, if it can be made before that is known.
    pub(crate) fn prepare(&self, work: &mut Work, mark: u64) -> Option<Spare> {
        // Who has several users, or none, changes its rights in an order of its own.
        if self.users != Users::One || self.ruled.is_some() {
            return None;
        }
        let leaf = work.new_leaf().ok()?;
        let steps: Vec<_> =
            iter::once(Step::NewSession).chain(self.common_steps(Some(mark))).collect();
        let stages = vec![Stage::Prepare; steps.len()];
        let made = work.as_owner(|_| spawn::prepare(&self.proof, steps, leaf.group.as_fd()));
        match made {
            Ok(waiting) => Some(Spare { waiting, stages, leaf, mark }),
            // Whoever needs one tries again, and says what failed.
            Err(_) => {
                work.spare = Some(leaf);
                None
            }
        }
    }

    /// Lists what every command's process does as soon as it has streams, or while it has none yet.
    fn common_steps(&self, mark: Option<u64>) -> impl Iterator<Item = Step> {
        let file_bytes = self.ruled.and_then(|ruled| ruled.file_bytes);
        // Nothing of init's may be open when a path is walked that the sandbox can have written: a
        // working directory of /proc/self/fd/N would lead there.
        iter::once(Step::CloseOthers)
            .chain(mark.map(|mark| Step::Limit(process::MARK, mark)))
            .chain(file_bytes.map(|bytes| Step::Limit(Resource::Fsize, bytes)))
            .chain((self.nice != 0).then_some(Step::Nice(self.nice)))
            .chain([Step::DefaultSignals])
    }

    /// Lists what the process of one command does before it executes its program, and which stage
    /// that is.
    fn own_steps(&self, exec: &Exec, user: Option<&User>) -> Result<Vec<(Step, Stage)>, Refusal> {
        // What was asked for beyond the host's own limit was refused, or accepted as less, before.
        let most = rustix::process::getrlimit(Resource::Nofile).maximum;
        let files = exec.open_files.map(|files| most.map_or(files, |most| files.min(most)));
        // Tried at once, and below: a command whose walls do not hold does not run.
        let files = files.into_iter().flat_map(|files| {
            let beyond = (files > 0).then_some(Step::Expect(Refused::Descriptor(files)));
            iter::once(Step::Limit(Resource::Nofile, files)).chain(beyond)
        });
        let mut become_user = Vec::new();
        let (uid, gid) = user.map_or((WORKLOAD_ID, WORKLOAD_ID), |user| (user.uid, user.gid));
        match self.users {
            Users::One if (uid, gid) == (WORKLOAD_ID, WORKLOAD_ID) => {}
            // Init has no rights that it could give to anybody.
            Users::One => return Err((Stage::User, Errno::PERM.raw_os_error())),
            // It keeps what init holds until the filters are installed.
            Users::Several { .. } => {
                let groups = user.iter().flat_map(|user| &user.groups).copied().map(Gid::from_raw);
                become_user.extend([Step::UseCapabilities, Step::Groups(groups.collect())]);
            }
        }
        match self.ruled {
            None => become_user.push(Step::Become(Uid::from_raw(uid), Gid::from_raw(gid))),
            // Where it has no user of its own it is init's, which it is already.
            Some(ruled) => become_user
                .extend(ruled.user.map(|id| Step::Become(Uid::from_raw(id), Gid::from_raw(id)))),
        }
        become_user.extend(self.rightful.then_some(Step::EmptyCapabilities));
        let workdir = match (user, &exec.user) {
            (Some(user), Some(wanted)) => user.place(&wanted.workdir),
            _ => Some(exec.workdir.clone()),
        };
        let workdir = workdir.and_then(|workdir| CString::new(workdir).ok());
        let workdir = workdir.ok_or((Stage::Workdir, Errno::INVAL.raw_os_error()))?;
        // What only init may call, and then every capability. One of root's has those of the bounding
        // set again once it is executed.
        let own = match exec.explain {
            true => {
                self.followed.get_or_init(|| explain::filters(&self.init_filter, &self.filters))
            }
            false => &self.filters,
        };
        let mut filters: Vec<Step> = own.iter().cloned().map(Step::Filter).collect();
        filters
            .extend(matches!(self.users, Users::Several { .. }).then_some(Step::DropCapabilities));
        // Whoever is followed is traced already, and what it is refused is told.
        let alone = self.no_tracing && !exec.explain;
        filters.extend(alone.then_some(Step::Expect(Refused::Tracing)));
        let steps = files.map(|step| (step, Stage::Prepare));
        let steps = steps.chain(become_user.into_iter().map(|step| (step, Stage::User)));
        let steps = steps.chain([(Step::Enter(workdir), Stage::Workdir)]);
        Ok(steps.chain(filters.into_iter().map(|step| (step, Stage::Prepare))).collect())
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
        if let Some(ruled) = self.ruled {
            return ruled.user.map_or(Ok(()), cred::become_only);
        }
        let give_up = || if self.rightful { cred::empty_capability_sets() } else { Ok(()) };
        match (self.users, user) {
            (Users::One, None) => cred::become_only(WORKLOAD_ID).and_then(|()| give_up()),
            (Users::One, Some(user)) if (user.uid, user.gid) == (WORKLOAD_ID, WORKLOAD_ID) => {
                cred::become_only(WORKLOAD_ID).and_then(|()| give_up())
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
}

/// Bounds the descriptors of this process, as those of every command.
pub(crate) fn bound_files(most: Option<u64>) -> io::Result<()> {
    most.map_or(Ok(()), |most| process::limit(Resource::Nofile, most))
}

/// Finds one of the sandbox's users.
fn find(name: &[u8]) -> io::Result<User> {
    User::find(name)?.ok_or_else(|| Errno::NOENT.into())
}

/// Returns the variables of a command; of two with one name the last counts.
fn environment(exec: &Exec, user: Option<&User>) -> Vec<Vec<u8>> {
    let own = user.into_iter().flat_map(|user| {
        let pair = |name: &[u8], value: &[u8]| [name, b"=", value].concat();
        [pair(b"HOME", &user.home), pair(b"USER", &user.name), pair(b"LOGNAME", &user.name)]
    });
    own.chain(exec.env.iter().cloned()).collect()
}

/// Returns what a command reads that has nothing to read: the same for all, since it is at its end for
/// everybody and keeps no place.
pub(crate) fn nothing_to_read() -> io::Result<OwnedFd> {
    static NOTHING: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(nothing) = NOTHING.get() {
        return nothing.try_clone();
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let nothing = rustix::fs::open(c"/dev/null", flags, Mode::empty())?;
    NOTHING.get_or_init(|| nothing).try_clone()
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(Errno::INVAL.raw_os_error())
}
