//! Which processes belong to which command, and what they used.
//!
//! Where init has a v2 cgroup, each command gets a group of its own below init's: the kernel then
//! knows its whole tree, however it forks. Elsewhere commands carry a mark that every descendant
//! inherits and may not change, and init finds them by it.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Dir, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Signal};
use warren_sys::{cgroup, cred, process};

use crate::plan::{COMMAND_BITS, COMMANDS, Plan};

/// The group that holds the groups of commands, and the id that owns it.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) group: OwnedFd,
    /// Whether commands are in there and nobody else: all are then frozen by one write, whoever makes it.
    apart: bool,
    /// Files of the group are checked as this user: the commands' user may not touch them.
    pub(crate) owner: u32,
    /// What init gets when the launcher dies.
    pub(crate) on_parents_death: Option<Signal>,
    pub(crate) next: u64,
    /// The group of the next command, made when there was nothing else to do.
    pub(crate) spare: Option<Leaf>,
    /// On a kernel of its own, whose groups are v1: the one that all commands are in together.
    common: Option<Common>,
}

/// The group that all commands are in on a kernel of its own, where groups do not count what is below them.
#[derive(Debug)]
pub(crate) struct Common {
    processes: OwnedFd,
    current: OwnedFd,
    most: Option<u64>,
}

impl Common {
    /// Takes a v1 group of the controller `pids`, and has it hold so many.
    pub(crate) fn new(group: &OwnedFd, most: Option<u64>) -> io::Result<Self> {
        if let Some(most) = most {
            write(group.as_fd(), "pids.max", &most.to_string())?;
        }
        let processes = open(group.as_fd(), "cgroup.procs", OFlags::WRONLY)?;
        let current = open(group.as_fd(), "pids.current", OFlags::RDONLY)?;
        Ok(Self { processes, current, most })
    }

    /// Reports whether there can be no other process, or could not be before one ended just now.
    fn is_full(&self) -> bool {
        let current = read_all(&self.current).ok().and_then(|text| text.trim().parse::<u64>().ok());
        self.most.zip(current).is_some_and(|(most, current)| current + 1 >= most)
    }
}

impl Work {
    /// Takes init's own v2 group.
    pub(crate) fn new(group: OwnedFd, owner: u32, on_parents_death: Option<Signal>) -> Self {
        let (next, spare, common) = (1, None, None);
        Self { group, apart: false, owner, on_parents_death, next, spare, common }
    }

    /// Makes a group for the groups of commands, in which init is not; without one they are beside it.
    pub(crate) fn part(&mut self) {
        if self.common.is_some() {
            return;
        }
        let made = self.as_owner(|group| {
            match rustix::fs::mkdirat(group, COMMANDS, Mode::from_raw_mode(0o755)) {
                // It was begun ahead.
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            open(group, COMMANDS, OFlags::RDONLY | OFlags::DIRECTORY)
        });
        if let Ok(group) = made {
            (self.group, self.apart) = (group, true);
        }
    }

    /// Takes a v1 group of a kernel of its own, in which processor time is counted, and the one for all.
    pub(crate) fn on_own_kernel(group: OwnedFd, common: Common) -> Self {
        let (owner, on_parents_death) = (crate::plan::INIT_ID, None);
        let (next, spare, common) = (1, None, Some(common));
        Self { group, apart: false, owner, on_parents_death, next, spare, common }
    }

    /// Reports whether no other process can be started, as far as init is the one to know.
    pub(crate) fn is_full(&self) -> bool {
        self.common.as_ref().is_some_and(Common::is_full)
    }

    /// Reports whether a process can be born in a group of a command.
    pub(crate) fn takes_births(&self) -> bool {
        self.common.is_none()
    }

    /// Returns what a command writes to so as to join its group, if it cannot be born there.
    pub(crate) fn doors(&self, leaf: &Leaf) -> io::Result<Vec<OwnedFd>> {
        let Some(common) = &self.common else { return Ok(Vec::new()) };
        let own = open(leaf.group.as_fd(), "cgroup.procs", OFlags::WRONLY)?;
        Ok(vec![common.processes.try_clone()?, own])
    }

    /// Returns a group for one command.
    pub(crate) fn new_leaf(&mut self) -> io::Result<Leaf> {
        self.spare.take().map_or_else(|| self.make_leaf(), Ok)
    }

    /// Makes the group of the next command, if there is none yet.
    pub(crate) fn prepare(&mut self) {
        if self.spare.is_none() {
            // Whoever needs it tries again, and says what failed.
            self.spare = self.make_leaf().ok();
        }
    }

    fn make_leaf(&mut self) -> io::Result<Leaf> {
        let (name, kind) = match &self.common {
            None => (format!("x{}", self.next), LeafKind::V2),
            Some(_) => (format!("x{}", self.next), LeafKind::OwnKernel { number: self.next }),
        };
        self.next += 1;
        let group = self.as_owner(|group| {
            rustix::fs::mkdirat(group, name.as_str(), Mode::from_raw_mode(0o755))?;
            open(group, &name, OFlags::RDONLY | OFlags::DIRECTORY)
        })?;
        let time = match kind {
            LeafKind::V2 => open(group.as_fd(), "cpu.stat", OFlags::RDONLY).ok(),
            // Everybody there sees what init has open.
            LeafKind::OwnKernel { .. } => None,
        };
        Ok(Leaf { name, group, kind, time })
    }

    /// Removes the group of a command; `false` if something still runs in it.
    pub(crate) fn remove(&self, leaf: &Leaf) -> bool {
        self.as_owner(|group| {
            Ok(rustix::fs::unlinkat(group, leaf.name.as_str(), AtFlags::REMOVEDIR)?)
        })
        .is_ok()
    }

    /// Freezes or thaws these groups, which are those of all commands.
    pub(crate) fn freeze<'a>(
        &self,
        leaves: impl Iterator<Item = &'a Leaf> + Clone,
        frozen: bool,
    ) -> io::Result<()> {
        if self.apart {
            return freeze_all([self.group.as_fd()].into_iter(), self, frozen);
        }
        freeze_all(leaves.map(|leaf| leaf.group.as_fd()), self, frozen)
    }

    /// Runs `action` with files checked as the owner of the group.
    pub(crate) fn as_owner<T>(
        &self,
        action: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        if self.common.is_some() {
            // Which knows no such identity; the groups are init's own.
            return action(self.group.as_fd());
        }
        let before = cred::check_files_as(self.owner);
        let result = action(self.group.as_fd());
        cred::check_files_as(before);
        // The kernel takes each change for one of identity: it forgets whose death ends init, and
        // may make it dumpable again, as fs.suid_dumpable says.
        let sealed = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
        if let Some(signal) = self.on_parents_death {
            rustix::process::set_parent_process_death_signal(Some(signal))?;
        }
        sealed?;
        result
    }
}

/// Makes the group for the groups of commands while nobody waits; whoever needs it tries again.
pub(crate) fn part_ahead(plan: &Plan, group: &OwnedFd) {
    if plan.cgroups.parted {
        let before = cred::check_files_as(plan.identity.init_id());
        let _ = rustix::fs::mkdirat(group, COMMANDS, Mode::from_raw_mode(0o755));
        cred::check_files_as(before);
    }
}

/// Freezes or thaws groups, all at once, and waits until they are.
fn freeze_all<'a>(
    groups: impl Iterator<Item = BorrowedFd<'a>> + Clone,
    work: &Work,
    frozen: bool,
) -> io::Result<()> {
    if work.common.is_some() {
        // The runtime stops that kernel whole.
        return Ok(());
    }
    let value = if frozen { "1" } else { "0" };
    work.as_owner(|_| groups.clone().try_for_each(|group| write(group, "cgroup.freeze", value)))?;
    groups.into_iter().try_for_each(|group| await_frozen(group, frozen))
}

/// Reports whether everybody in a group stands still, by its `cgroup.events`.
fn is_frozen(events: &OwnedFd) -> io::Result<bool> {
    Ok(cgroup::field(&read_all(events)?, "frozen") == Some(1))
}

/// Waits until a group is frozen, or is not.
fn await_frozen(group: BorrowedFd<'_>, frozen: bool) -> io::Result<()> {
    let events = open(group, "cgroup.events", OFlags::RDONLY)?;
    for look in 0.. {
        if is_frozen(&events)? == frozen {
            return Ok(());
        }
        // It is nearly always a matter of each process being scheduled once. The kernel also says
        // when it changes, but leaves that to a worker of its own, which takes longer.
        if look < cgroup::EAGER_LOOKS {
            rustix::thread::sched_yield();
            continue;
        }
        let mut fds = [PollFd::new(&events, PollFlags::PRI)];
        // The bound is for a task that cannot be stopped now.
        if poll(&mut fds, Some(&Timespec { tv_sec: 2, tv_nsec: 0 }))? == 0 {
            break;
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// The group of one command.
#[derive(Debug)]
pub(crate) struct Leaf {
    name: String,
    pub(crate) group: OwnedFd,
    kind: LeafKind,
    /// What counts its time, opened before anybody waits for that.
    time: Option<OwnedFd>,
}

/// What the group of a command is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeafKind {
    V2,
    /// Of v1, which neither ends nor freezes what is in it.
    OwnKernel {
        number: u64,
    },
}

/// How often a group is looked at for processes that came since it was looked at before.
const ROUNDS: u32 = 1_000;

impl Leaf {
    /// Returns what its processes are told by in `/proc`, if they are.
    pub(crate) fn mark(&self) -> Option<u64> {
        match self.kind {
            LeafKind::V2 => None,
            LeafKind::OwnKernel { number } => Some(number),
        }
    }

    /// Lists who is in it.
    fn listed(&self) -> io::Result<Vec<i32>> {
        let text = read_whole(&open(self.group.as_fd(), "cgroup.procs", OFlags::RDONLY)?)?;
        Ok(text.lines().filter_map(|pid| pid.parse().ok()).filter(|pid| *pid > 1).collect())
    }

    /// Sends a signal to everybody in it but `spared`, and to those who came meanwhile, each once.
    fn signal_each(&self, signal: Signal, spared: Option<i32>) -> io::Result<()> {
        let mut known = BTreeSet::new();
        for _ in 0..ROUNDS {
            let listed = self.listed()?.into_iter();
            let new: Vec<i32> = listed.filter(|pid| known.insert(*pid)).collect();
            if new.is_empty() {
                break;
            }
            for pid in new.into_iter().filter(|pid| Some(*pid) != spared) {
                let _ = process::signal_raw(pid, signal.as_raw());
            }
        }
        Ok(())
    }

    /// Ends everybody in it but `spared`, by signals: all are stopped first, so that none forks on.
    fn end_each(&self, spared: Option<i32>) -> io::Result<()> {
        self.signal_each(Signal::STOP, None)?;
        self.signal_each(Signal::KILL, spared)?;
        match spared {
            Some(pid) => process::signal_raw(pid, Signal::CONT.as_raw()),
            None => Ok(()),
        }
    }

    /// Ends everything in the group at one moment. See cgroup.kill, Linux 5.14.
    pub(crate) fn kill(&self, work: &Work) -> io::Result<()> {
        if self.mark().is_some() {
            return self.end_each(None);
        }
        work.as_owner(|_| write(self.group.as_fd(), "cgroup.kill", "1"))
    }

    /// Ends everything in the group but `spared`, which is frozen meanwhile like the others: none may
    /// fork between being listed and being killed.
    pub(crate) fn kill_but(&self, work: &Work, spared: i32, stay_frozen: bool) -> io::Result<()> {
        if self.mark().is_some() {
            return self.end_each(Some(spared));
        }
        self.freeze(work, true)?;
        let procs = work.as_owner(|_| open(self.group.as_fd(), "cgroup.procs", OFlags::RDONLY));
        let listed = procs.and_then(|procs| read_whole(&procs));
        for pid in listed.iter().flat_map(|text| text.lines()) {
            match pid.parse() {
                Ok(pid) if pid != spared && pid > 1 => {
                    let _ = process::signal_raw(pid, Signal::KILL.as_raw());
                }
                Ok(_) | Err(_) => {}
            }
        }
        if stay_frozen {
            return listed.map(drop);
        }
        // Not waited for: all commands may stand still for somebody of whom init has yet to hear.
        work.as_owner(|_| write(self.group.as_fd(), "cgroup.freeze", "0"))
    }

    /// Freezes or thaws everything in the group and waits until it is so.
    pub(crate) fn freeze(&self, work: &Work, frozen: bool) -> io::Result<()> {
        freeze_all([self.group.as_fd()].into_iter(), work, frozen)
    }

    /// Reports whether nothing runs in the group.
    pub(crate) fn is_empty(&self) -> bool {
        if self.mark().is_some() {
            return self.listed().is_ok_and(|listed| listed.is_empty());
        }
        let events = open(self.group.as_fd(), "cgroup.events", OFlags::RDONLY);
        let text = events.and_then(|events| read_all(&events)).unwrap_or_default();
        cgroup::field(&text, "populated") != Some(1)
    }

    /// Time on a CPU of everything that ever ran in the group.
    pub(crate) fn cpu(&self) -> Option<Duration> {
        match self.kind {
            LeafKind::V2 => {
                let text = read_all(self.time.as_ref()?).ok()?;
                cgroup::field(&text, "usage_usec").map(Duration::from_micros)
            }
            LeafKind::OwnKernel { .. } => {
                let file = open(self.group.as_fd(), "cpuacct.usage", OFlags::RDONLY).ok()?;
                read_all(&file).ok()?.trim().parse().ok().map(Duration::from_nanos)
            }
        }
    }
}

fn open(dir: BorrowedFd<'_>, name: &str, flags: OFlags) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(dir, name, flags | OFlags::CLOEXEC, Mode::empty())?)
}

fn write(dir: BorrowedFd<'_>, name: &str, value: &str) -> io::Result<()> {
    rustix::io::write(open(dir, name, OFlags::WRONLY)?, value.as_bytes())?;
    Ok(())
}

/// Reads a file of any length.
fn read_whole(file: &OwnedFd) -> io::Result<String> {
    let mut text = Vec::new();
    loop {
        let mut buffer = [0; 4096];
        match rustix::io::read(file, &mut buffer)? {
            0 => return Ok(String::from_utf8_lossy(&text).into_owned()),
            length => text.extend_from_slice(&buffer[..length]),
        }
    }
}

fn read_all(file: &OwnedFd) -> io::Result<String> {
    let mut buffer = [0; 4096];
    let length = rustix::io::pread(file, &mut buffer, 0)?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

/// Something that runs in the sandbox, as `/proc` shows it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) pid: i32,
    /// The mark of the command that it descends from.
    pub(crate) mark: u64,
    /// Time on a CPU of its own and of the children it waited for.
    pub(crate) cpu: Duration,
    /// Resident memory.
    pub(crate) resident: u64,
}

/// Init's own view of `/proc`, which hides nobody.
///
/// The sandbox's `/proc` leaves out whom the reader may not trace, and a process decides that about
/// itself: by PR_SET_DUMPABLE, or by executing a file that it cannot read.
#[derive(Debug)]
pub(crate) struct Census {
    proc: OwnedFd,
    /// What the marks of the sandbox begin with, where other processes are seen too.
    nonce: Option<u64>,
    marked_by: MarkedBy,
}

/// What the mark of a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MarkedBy {
    /// A limit, [`process::MARK`].
    Limit,
    /// The number of its control group.
    Group,
}

impl Census {
    /// Takes a procfs that is mounted nowhere.
    pub(crate) fn of(proc: OwnedFd) -> Self {
        Self { proc, nonce: None, marked_by: MarkedBy::Limit }
    }

    /// Likewise, of a kernel in which commands are told by their groups.
    pub(crate) fn of_grouped(proc: OwnedFd) -> Self {
        Self { proc, nonce: None, marked_by: MarkedBy::Group }
    }

    /// Takes the procfs of the host, in which those of the sandbox are told by their marks.
    pub(crate) fn of_marked(proc: OwnedFd, nonce: u64) -> Self {
        Self { proc, nonce: Some(nonce), marked_by: MarkedBy::Limit }
    }

    /// Returns its root, to be granted by Landlock.
    pub(crate) fn place(&self) -> BorrowedFd<'_> {
        self.proc.as_fd()
    }

    /// Lists every process of the sandbox but init.
    pub(crate) fn processes(&self) -> Vec<Seen> {
        let root = open(self.proc.as_fd(), ".", OFlags::RDONLY | OFlags::DIRECTORY);
        let Ok(entries) = root.and_then(|root| Ok(Dir::new(root)?)) else { return Vec::new() };
        let pids =
            entries.flatten().filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok());
        pids.filter(|pid| *pid != 1).filter_map(|pid| self.look_at(pid)).collect()
    }

    fn look_at(&self, pid: i32) -> Option<Seen> {
        let stat = self.read(pid, "stat")?;
        // The name may hold anything, a bracket too; what follows the last one is numbers.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let number = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
        let ticks = number(11)? + number(12)? + number(13)? + number(14)?;
        let cpu = Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second());
        let resident = number(21)? * rustix::param::page_size() as u64;
        let mark = self.mark_of(pid)?;
        let is_ours = self.nonce.is_none_or(|nonce| mark >> COMMAND_BITS == nonce);
        is_ours.then_some(Seen { pid, mark, cpu, resident })
    }

    /// Reports whether a process has ended and only waits to be reaped.
    pub(crate) fn is_dead(&self, pid: i32) -> bool {
        let stat = self.read(pid, "stat");
        let state =
            stat.as_deref().and_then(|stat| stat.rsplit_once(')')?.1.trim_start().chars().next());
        state.is_none_or(|state| ['Z', 'X'].contains(&state))
    }

    /// Reads the mark of a process.
    pub(crate) fn mark_of(&self, pid: i32) -> Option<u64> {
        if self.marked_by == MarkedBy::Group {
            let groups = self.read(pid, "cgroup")?;
            let own = groups.lines().find_map(|line| line.split_once(":cpuacct:"))?.1;
            return own.rsplit_once("/x")?.1.parse().ok();
        }
        let limits = self.read(pid, "limits")?;
        let line = limits.lines().find_map(|line| line.strip_prefix("Max file locks"))?;
        line.split_whitespace().nth(1)?.parse().ok()
    }

    /// Returns the bytes that a process and the children it waited for read and wrote, by whatever
    /// call; none if the kernel does not count, or the process does not let it be seen.
    pub(crate) fn transferred(&self, pid: i32) -> (u64, u64) {
        let text = self.read(pid, "io").unwrap_or_default();
        let field = |key: &str| cgroup::field(&text, key).unwrap_or_default();
        (field("rchar:"), field("wchar:"))
    }

    /// Reads a file of a process as text, whatever bytes the process gave itself for a name.
    fn read(&self, pid: i32, file: &str) -> Option<String> {
        read_all(&open(self.proc.as_fd(), &format!("{pid}/{file}"), OFlags::RDONLY).ok()?).ok()
    }

    /// Ends every process with `mark`, and no other, where there is no group to do it by.
    ///
    /// All are stopped first, so that none forks between being listed and being killed.
    pub(crate) fn kill_marked(
        &self,
        mark: u64,
        suspended: bool,
        spared: Option<i32>,
    ) -> io::Result<()> {
        process::signal_all(Signal::STOP)?;
        let seen = self.processes();
        for seen in seen.iter().filter(|seen| seen.mark == mark && Some(seen.pid) != spared) {
            let _ = process::signal_raw(seen.pid, Signal::KILL.as_raw());
        }
        if suspended { Ok(()) } else { process::signal_all(Signal::CONT) }
    }
}

/// Counts the bytes that children and their children read and wrote, by whatever call.
///
/// The kernel adds them to init's own account when it reaps a child. The file is opened first of
/// all, because a process that changes its identity may not open it again.
#[derive(Debug)]
pub(crate) struct Meter {
    io: OwnedFd,
    /// Whichever procfs it is of, it tells the reader of the reader's own pid namespace. One that shows processes and
    /// nothing else, as a container of the profile `strict` has, has it not.
    load: Option<OwnedFd>,
}

impl Meter {
    pub(crate) fn open() -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let open = |path: &CStr| rustix::fs::open(path, flags, Mode::empty());
        Ok(Self { io: open(c"/proc/self/io")?, load: open(c"/proc/loadavg").ok() })
    }

    /// Returns the bytes read and written so far. A kernel that does not count has none.
    pub(crate) fn read(&self) -> (u64, u64) {
        let text = read_all(&self.io).unwrap_or_default();
        let field = |key: &str| cgroup::field(&text, key).unwrap_or_default();
        // Looking is reading too, and is not the child's.
        (field("rchar:") + text.len() as u64, field("wchar:"))
    }

    /// Returns the number that the last process or thread got: the kernel hands them out in order.
    pub(crate) fn last_number(&self) -> Option<u64> {
        read_all(self.load.as_ref()?).ok()?.split_whitespace().last()?.parse().ok()
    }
}
