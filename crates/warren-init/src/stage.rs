//! The stage: makes one sandbox by somebody else's container runtime, and guards it to its end.
//!
//! A process of its own for each such sandbox, in a mount namespace of its own: the root that the
//! runtime is given is mounted there and nowhere else, and vanishes with the last of its processes. It
//! is the parent of what the runtime leaves running, ends that when the library is gone, unless it is
//! to outlive the library, and has the runtime forget it afterwards.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal};
use warren_sys::mount::{self, Attributes};
use warren_sys::process::{self, End, Fork, Namespaces, SingleThreaded};
use warren_sys::{cgroup, fd, socket};

use crate::apply::{self, Begin, Ids, Outside};
use crate::launcher::{self, Maker, step};
use crate::plan::{
    Container, LOCK_FILE, LOG_FILE, Lifetime, OWN_PROGRAM, Owner, PID_FILE, RANGE, STAGE,
    STAGE_USERS, Walls,
};
use crate::protocol::{self, Done, Failure, Report};

/// How long something that was killed may take to be gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// How much of what a runtime said is passed on.
const MAX_WORDS: u64 = 2048;

/// Goes on as init in a container. Does not return.
pub fn inside() -> ! {
    if std::env::vars_os().next().is_some() {
        // gVisor adds some, and lets commands read those of init: begin again without. Returns only if it cannot.
        let _ = Command::new(OWN_PROGRAM).arg("contained").env_clear().exec();
        process::exit_now(1)
    }
    apply::become_contained()
}

/// What comes with the request.
struct Given {
    /// Where it is said what becomes of the sandbox; init's own socket later.
    control: OwnedFd,
    /// The mark that its ids are in use.
    lock: OwnedFd,
    /// Where init can be found after the library is gone.
    listener: Option<OwnedFd>,
}

/// Makes the sandbox that descriptor 0 asks for, and stays until it has ended.
pub fn main() {
    // Nobody reads what this process would say; an error here shows at the library as a stage that
    // is gone.
    let Ok(proof) = SingleThreaded::claim() else { return };
    if launcher::stand_apart().is_err() {
        return;
    }
    let Ok(client) = fd::inherited(0) else { return };
    // A caller may hold what others wait for it to close, and this process may outlive it by days.
    if fd::close_all_except(&[&client]).and_then(|()| fd::occupy_streams(c"/dev/null")).is_err() {
        return;
    }
    let Ok(children) = process::child_events() else { return };
    let _ = rustix::thread::set_name(c"warren-stage");
    let _ = poll(&mut [PollFd::new(&client, PollFlags::IN)], None);
    let Ok(Some((job, mut fds))) = protocol::receive_trusted::<Container>(&client) else { return };
    if !(2..=3).contains(&fds.len()) {
        return;
    }
    let listener = (fds.len() == 3).then(|| fds.remove(2));
    let (Some(lock), Some(control)) = (fds.pop(), fds.pop()) else { return };
    let given = Given { control, lock, listener };
    let stage = Stage { maker: Maker::new(proof), job, bundle: PathBuf::new() };
    stage.run(given, &client, &children);
}

struct Stage {
    maker: Maker,
    job: Container,
    bundle: PathBuf,
}

impl Stage {
    fn run(mut self, given: Given, client: &OwnedFd, children: &OwnedFd) {
        self.bundle = PathBuf::from(&self.job.bundle);
        // Until the end: whoever finds it locked leaves the rest to us.
        let _held = match step("lock", &self.job.bundle, self.lock()) {
            Ok(held) => held,
            Err(failure) => {
                let _ = protocol::send(&given.control, &Report::Failed(failure), &[]);
                return;
            }
        };
        match self.start(&given) {
            Ok((pidfd, line)) => {
                // A kernel of its own can take connections, and cannot listen for them on the host.
                let listener = given.listener.filter(|_| line.is_some());
                drop((given.control, given.lock));
                let door = line.as_ref().zip(listener.as_ref());
                self.guard(&pidfd, client, children, door);
            }
            Err(failure) => {
                // First: the library removes what it made, and is told when that is all.
                self.clear_up();
                let _ = protocol::send(&given.control, &Report::Failed(failure), &[]);
            }
        }
    }

    fn lock(&self) -> io::Result<File> {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(self.bundle.join(LOCK_FILE))?;
        if !fd::try_lock_byte(&file, 0)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        // By which the mounts of this process are found.
        writeln!(&file, "{}", rustix::process::getpid().as_raw_nonzero())?;
        Ok(file)
    }

    /// Mounts the root, has the runtime start init in it, and tells init what it is to be.
    ///
    /// Returns its first process and, if it has a kernel of its own, the line to init.
    fn start(&self, given: &Given) -> Result<(OwnedFd, Option<OwnedFd>), Failure> {
        let Container { plan, base, .. } = &self.job;
        let subreaper = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
        step("adopt", "what the runtime starts", subreaper.map_err(io::Error::from))?;
        step("create the mount namespace", "", process::new_mount_namespace())?;
        step("make the mounts private", "/", mount::make_private())?;
        let namespace = self.maker.mapped_namespace(*base, (0, 0), *base, RANGE);
        let namespace = step("map the ids of", "the sandbox", namespace)?;
        let (trees, shifted) = self.maker.shift_mounts(plan, *base, &namespace)?;
        step("create", STAGE, make_place(STAGE))?;
        let place = step("open", STAGE, mount::target(root()?.as_fd(), STAGE))?;
        rustix::process::umask(Mode::empty());
        let ids = Ids::outside(*base);
        let (root, scratch) = apply::build_root(plan, &trees, place.as_fd(), ids)?;
        drop(trees);
        step("mount", STAGE_USERS, show_users(&namespace))?;
        let program = step("make a file for", OWN_PROGRAM, own_program(scratch.as_fd(), ids))?;
        apply::attach_at(root.as_fd(), OWN_PROGRAM, &program)?;
        drop((root, program));
        let work = launcher::open_group(plan, Some(*base));
        let work = step("open the control group", "", work)?;
        let (line, theirs) = step("make a socket", "", socket::pair())?;
        self.call(&self.job.start, Some(&theirs), work.as_ref())?;
        drop(theirs);
        let (pid, pidfd) = step("find", "the container's first process", self.first_process())?;
        let report = Report::Launched { pid: pid.as_raw_nonzero().get(), base: Some(*base) };
        let sent = protocol::send(&given.control, &report, &[pidfd.as_fd(), scratch.as_fd()]);
        step("reach", "the library", sent)?;
        // Only files, pipes and sockets that are connected can be handed to a kernel that is not the host's.
        let own_kernel = plan.walls == Walls::OwnKernel;
        let [scratch, work, listener] = [Some(&scratch), work.as_ref(), given.listener.as_ref()]
            .map(|fd| fd.filter(|_| !own_kernel));
        let begin = Begin {
            plan: plan.clone(),
            shifted,
            work: work.is_some(),
            lock: true,
            listener: listener.is_some(),
            outside: Outside { path: self.job.bundle.clone(), kernel: Outside::kernel() },
        };
        let fds = [Some(&given.control), scratch, work, Some(&given.lock), listener];
        let fds: Vec<_> = fds.into_iter().flatten().map(AsFd::as_fd).collect();
        // One that is gone already is found out by whoever waits for its report.
        let _ = protocol::send(&line, &begin, &fds);
        Ok((pidfd, own_kernel.then_some(line)))
    }

    /// Runs the runtime once and waits for it; `input` is what the container's init gets.
    fn call(
        &self,
        command: &[String],
        input: Option<&OwnedFd>,
        work: Option<&OwnedFd>,
    ) -> Result<(), Failure> {
        let mut options = File::options();
        let options = options.read(true).append(true).create(true).mode(0o600);
        let log = step("open", LOG_FILE, options.open(self.bundle.join(LOG_FILE)))?;
        let log = OwnedFd::from(log);
        let join = input.is_some() && self.job.join;
        let mut doors = Vec::new();
        if join {
            for group in &self.job.plan.cgroups.v1 {
                doors.push(step("open", group, launcher::open_door(group))?);
            }
        }
        let group = work.filter(|_| join).map(AsFd::as_fd);
        let forked = process::fork(&self.maker.proof, Namespaces::NONE, group);
        let (child, pidfd) = match step("start", &command[0], forked)? {
            Fork::Child => {
                let failed = become_runtime(command, &self.job.hidden, input, &log, doors);
                let _ = rustix::io::write(&log, format!("{failed}\n").as_bytes());
                process::exit_now(127)
            }
            Fork::Parent { child, pidfd } => (child, pidfd),
        };
        let patience = Duration::from_millis(self.job.patience_ms);
        let in_time = wait_for(&pidfd, child, patience);
        if !in_time {
            let _ = pidfd_send_signal(&pidfd, Signal::KILL);
        }
        let (end, _) = step("wait for", &command[0], process::reap(child))?;
        match (in_time, end) {
            (true, End::Exited(0)) => Ok(()),
            (true, _) => Err(said(&command[0], &log)),
            (false, _) => step("wait for", &command[0], Err(io::ErrorKind::TimedOut.into())),
        }
    }

    /// Takes hold of the process that the runtime says is the first.
    fn first_process(&self) -> io::Result<(Pid, OwnedFd)> {
        let text = fs::read_to_string(self.bundle.join(PID_FILE))?;
        let pid = text.trim().parse::<i32>().ok().filter(|pid| *pid > 1).and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidData)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        // A child of ours, whose number is its own until we reap it.
        let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()))?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        let own = rustix::process::getpid().as_raw_nonzero().get();
        match parent.and_then(|parent| parent.trim().parse::<i32>().ok()) {
            Some(parent) if parent == own => Ok((pid, pidfd)),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Waits for the end of the container, or brings it about when the library is gone.
    ///
    /// Through the `door`, a line to init and what to listen on, it hands in who comes meanwhile.
    fn guard(
        self,
        pidfd: &OwnedFd,
        client: &OwnedFd,
        children: &OwnedFd,
        door: Option<(&OwnedFd, &OwnedFd)>,
    ) {
        let attached = self.job.plan.lifetime == Lifetime::Attached;
        let mut listening = attached;
        loop {
            let mut fds =
                vec![PollFd::new(pidfd, PollFlags::IN), PollFd::new(children, PollFlags::IN)];
            // Of a sandbox that ends with the library there is none, and of another no end to wait for.
            match door {
                Some((_, listener)) if !listening => fds.push(PollFd::new(listener, PollFlags::IN)),
                Some(_) | None => {}
            }
            if listening {
                fds.push(PollFd::new(client, PollFlags::IN));
            }
            match poll(&mut fds, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => break,
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            launcher::drain(children);
            while let Ok(Some(pid)) = process::peek_ended() {
                let _ = process::reap(pid);
            }
            if ready[0] {
                break;
            }
            let third = ready.get(2) == Some(&true);
            if let (true, false, Some((line, listener))) = (third, listening, door) {
                if let Ok(control) = socket::accept(listener) {
                    let _ = protocol::send(line, &Done(0), &[control.as_fd()]);
                }
            } else if third {
                listening = false;
                let _ = pidfd_send_signal(pidfd, Signal::KILL);
                // One that is paused may have to be thawed before it can die.
                let _ = self.call(&self.job.delete, None, None);
            }
        }
        self.clear_up();
    }

    /// Has the runtime forget the container, and removes what was made for it.
    fn clear_up(&self) {
        // Whatever it says: what is left is removed by other means.
        let _ = self.call(&self.job.delete, None, None);
        let groups: Vec<_> = self.job.groups.iter().map(PathBuf::from).collect();
        for group in &groups {
            let _ = cgroup::write(group, "cgroup.kill", "1");
        }
        await_children();
        launcher::remove_all(&groups);
        let deadline = Instant::now() + PATIENCE;
        while fs::remove_dir_all(&self.bundle).is_err_and(|e| e.kind() != io::ErrorKind::NotFound)
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Waits until nothing is left of what the runtime started, all of which was killed. One that waits for a file system of
/// the host dies when that answers, or goes: there is nobody else to clear up then.
fn await_children() {
    while let Ok(ended) = rustix::process::wait(WaitOptions::NOHANG) {
        if ended.is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Becomes the runtime, in a fresh copy of the stage; returns only what failed.
fn become_runtime(
    command: &[String],
    hidden: &[String],
    input: Option<&OwnedFd>,
    log: &OwnedFd,
    doors: Vec<OwnedFd>,
) -> io::Error {
    for door in doors {
        if let Err(error) = rustix::io::write(&door, b"0") {
            return error.into();
        }
    }
    if !hidden.is_empty() {
        let apart = process::new_mount_namespace();
        let hide = || hidden.iter().try_for_each(|path| mount::detach(path));
        if let Err(error) = apart.and_then(|()| hide()) {
            return error;
        }
    }
    let nothing = match crate::exec::nothing_to_read() {
        Ok(nothing) => nothing,
        Err(error) => return error,
    };
    let streams = [input.unwrap_or(&nothing), log, log];
    for (stream, number) in streams.into_iter().zip(0..) {
        if let Err(error) = fd::install_as(stream, number) {
            return error;
        }
    }
    process::default_signals();
    let mut runtime = Command::new(&command[0]);
    runtime.args(&command[1..]).env_clear().current_dir("/");
    runtime.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    runtime.exec()
}

/// Passes on the last of what a runtime said.
fn said(program: &str, log: &OwnedFd) -> Failure {
    let mut words = Vec::new();
    let read = log.try_clone().map(File::from).and_then(|mut log| {
        let length = log.metadata()?.len();
        log.seek(SeekFrom::Start(length.saturating_sub(MAX_WORDS)))?;
        log.take(MAX_WORDS).read_to_end(&mut words)
    });
    let words = String::from_utf8_lossy(&words);
    let last = words.lines().rev().find(|line| !line.trim().is_empty());
    let last = if read.is_ok() { last.unwrap_or_default() } else { "" };
    let last: String = last.chars().filter(|c| !c.is_control()).collect();
    Failure { step: format!("have {program} start the container"), path: last, errno: 0 }
}

/// Waits until a child has ended, and reaps others meanwhile: a runtime that waits for what it started before looks
/// until nothing is left of that. `false` if it took too long.
fn wait_for(pidfd: &OwnedFd, child: Pid, patience: Duration) -> bool {
    const INTERVAL: Duration = Duration::from_millis(5);
    let deadline = Instant::now() + patience;
    loop {
        while let Ok(Some(pid)) = process::peek_ended() {
            if pid == child {
                return true;
            }
            let _ = process::reap(pid);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let is_last = left <= INTERVAL;
        let left = left.min(INTERVAL);
        let left = Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&left)) {
            Ok(0) if is_last => return false,
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) | Err(_) => return true,
        }
    }
}

fn root() -> Result<OwnedFd, Failure> {
    step("open", "/", mount::open_place(CWD, c"/"))
}

/// Makes a directory that everybody may pass through: a runtime walks there with the ids of the
/// sandbox.
fn make_place(path: &str) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o755).create(Path::new(path))
}

/// Gives the sandbox's user namespace a name, for the runtime to find it by.
fn show_users(namespace: &OwnedFd) -> io::Result<()> {
    drop(File::create_new(STAGE_USERS)?);
    mount::bind(&format!("/proc/self/fd/{}", namespace.as_raw_fd()), STAGE_USERS)
}

/// Mounts a file with this very program, which nobody can write.
///
/// On a filesystem of its own, so that it takes nothing of what the sandbox may write.
fn own_program(scratch: BorrowedFd<'_>, ids: Ids) -> io::Result<OwnedFd> {
    let attributes = Attributes { no_devices: true, ..Attributes::default() };
    let place = mount::new("tmpfs", &[("mode", "0700"), ("size", "8m")], &[], attributes)?;
    // Only what is mounted somewhere can be cloned.
    rustix::fs::mkdirat(scratch, "own", Mode::RWXU)?;
    mount::attach_in(place.as_fd(), scratch, "own")?;
    apply::make_file(place.as_fd(), "init", &apply::own_program()?, 0o555)?;
    apply::give(place.as_fd(), "init", ids.of(Owner::System))?;
    let program = mount::clone_at(place.as_fd(), "init")?;
    let attributes = Attributes { read_only: true, ..attributes };
    mount::restrict(program.as_fd(), attributes, None)?;
    Ok(program)
}
