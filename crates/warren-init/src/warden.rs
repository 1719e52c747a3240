//! A sandbox without namespaces: a warden that nothing inside can reach, and init among its commands.
//!
//! Without a pid namespace no kernel object holds a sandbox together. What does instead is a Landlock
//! domain: its processes cannot leave it, and a signal sent from it reaches nobody outside. The warden has
//! one that scopes signals and nothing else; init and all that it starts have a narrower one below. So a
//! signal of the warden's to everybody is one to the sandbox, whole, at one moment: the kernel holds off
//! forks while it walks the list. And nothing inside can signal the warden.
//!
//! The warden makes the sandbox's directory, forks init, reaps what init leaves, and when init is gone, or
//! when it is told to (SIGTERM), ends everything and removes the directory.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Resource, Signal, WaitId, WaitIdOptions, waitid};
use warren_sys::landlock::{self, Access, Kind, Ruleset};
use warren_sys::process::{self, Fork, Namespaces, SingleThreaded};
use warren_sys::{cred, fd, keyring, mount};

use crate::account::{Census, Meter};
use crate::apply::{self, Inherited};
use crate::attempt::{self, NO_CAPABILITY, NO_KEYCTL, holds};
use crate::launcher::step;
use crate::plan::{HOME, INIT_ID, Lifetime, Plan, Rules, SCRATCH, WORKLOAD_ID, WORKSPACE};
use crate::protocol::{self, Failure, Proof, Report, tried};
use crate::refusals::Refusals;
use crate::serve::{self, Kept};

/// The first Landlock that keeps signals inside.
pub const LEAST_ABI: u32 = 6;

/// Goes on as the warden of a new sandbox, in a fresh copy of the launcher, if it got so far. Does not
/// return.
pub(crate) fn become_warden(
    proof: &SingleThreaded,
    (plan, rules): (&Plan, &Rules),
    control: &OwnedFd,
    go: &OwnedFd,
    inherited: Inherited,
    so_far: Result<(), Failure>,
) -> ! {
    let mut keep = vec![control, go];
    keep.extend([&inherited.work, &inherited.listener, &inherited.lock].into_iter().flatten());
    let closed = fd::close_all_except(&keep).and_then(|()| fd::occupy_streams(c"/dev/null"));
    let closed = step("close what was inherited", "", closed);
    let base = inherited.base;
    let mut is_ours = false;
    let ready = so_far.and(closed).and_then(|()| {
        let (_, doors) = step("wait for the launcher", "", apply::wait_for_go(go))?;
        // Closed behind it: they lead to the host.
        for door in doors {
            let joined = rustix::io::write(&door, b"0").map_err(io::Error::from);
            step("join", "a control group", joined)?;
        }
        step("create", &rules.directory, make_directory(rules, base, &mut is_ours))?;
        let events = step("hear signals", "", process::events(&[Signal::CHILD, Signal::TERM]))?;
        stand_guard(plan, base).map(|()| events)
    });
    let events = match ready {
        Ok(events) => events,
        Err(failure) => {
            let _ = protocol::send(control, &Report::Failed(failure), &[]);
            // One that was there before is another's.
            if is_ours {
                remove_directory(Path::new(&rules.directory));
            }
            process::exit_now(1)
        }
    };
    match process::fork(proof, Namespaces::NONE, None) {
        Ok(Fork::Child) => {
            drop(events);
            become_init((plan, rules), control, inherited)
        }
        Ok(Fork::Parent { child, pidfd }) => {
            // Closed by its owner, and not behind its back below: who then drops it aborts, and the directory stays.
            drop(pidfd);
            let sealed = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
            // The ids are in use for as long as something of the sandbox may run.
            let keep = [Some(&events), inherited.lock.as_ref()];
            let keep: Vec<&OwnedFd> = keep.into_iter().flatten().collect();
            if sealed.is_ok() && fd::close_all_except(&keep).is_ok() {
                watch_over(&events, child);
            }
            end_all();
        }
        Err(error) => {
            let failed = step::<()>("start", "init", Err(error)).expect_err("it failed");
            let _ = protocol::send(control, &Report::Failed(failed), &[]);
        }
    }
    remove_directory(Path::new(&rules.directory));
    process::exit_now(0)
}

/// Makes the directory of the sandbox, which must not be there yet, and what is in it from the start.
fn make_directory(rules: &Rules, base: Option<u32>, is_ours: &mut bool) -> io::Result<()> {
    let top = Path::new(&rules.directory);
    let builder = |mode| {
        let mut builder = std::fs::DirBuilder::new();
        builder.mode(mode);
        builder
    };
    builder(0o700).create(top)?;
    *is_ours = true;
    let mut made = vec![top.to_owned()];
    for name in [WORKSPACE, HOME, SCRATCH] {
        made.push(top.join(name));
    }
    // Where commands are to run, below the first of these; the plan has no `..` in it.
    let mut workdir = top.join(WORKSPACE);
    for part in Path::new(&rules.workdir).components() {
        workdir.push(part);
        made.push(workdir.clone());
    }
    for path in &made[1..] {
        builder(0o755).create(path)?;
    }
    // Nobody but root has been able to come here yet, so that no path leads elsewhere.
    if let Some(base) = base {
        let id = Some(base + WORKLOAD_ID);
        for path in made.iter().rev() {
            std::os::unix::fs::chown(path, id, id)?;
        }
    }
    Ok(())
}

/// Gives up every right, and everybody who is not of the sandbox.
fn stand_guard(plan: &Plan, base: Option<u32>) -> Result<(), Failure> {
    let _ = rustix::process::setsid();
    let _ = rustix::thread::set_name(c"warren-warden");
    if let Some(base) = base {
        step("leave the groups of", "the launcher", cred::leave_groups())?;
        step("empty the bounding set", "", cred::forbid_capabilities())?;
        let (init, workload) = (base + INIT_ID, base + WORKLOAD_ID);
        step("become", "the user of init", cred::become_split(init, workload))?;
    }
    step("drop the capabilities", "", cred::drop_capabilities())?;
    let forbidden = rustix::thread::set_no_new_privs(true);
    step("forbid new privileges", "", forbidden.map_err(io::Error::from))?;
    // Nobody of the host's root is ever among those that are signalled all at once.
    let is_root = rustix::process::geteuid().is_root() || rustix::process::getuid().is_root();
    holds("privileges: be the host's root", !is_root)?;
    // Init, which is a copy of this process, has yet to look at its own account.
    let open = rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable);
    step("prepare", "init", open.map_err(io::Error::from))?;
    let reaps = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    step("become the reaper of", "the sandbox", reaps.map_err(io::Error::from))?;
    if plan.lifetime == Lifetime::Attached {
        // Told, not killed: somebody has to end the others.
        let set = rustix::process::set_parent_process_death_signal(Some(Signal::TERM));
        step("bind to the launcher", "", set.map_err(io::Error::from))?;
    }
    let scoped = landlock::abi().and_then(|abi| {
        if abi < LEAST_ABI {
            return Err(Errno::OPNOTSUPP.into());
        }
        Ruleset::scopes_alone()?.restrict()
    });
    step("keep signals in by Landlock", "(ABI 6, Linux 6.12)", scoped)?;
    // What is not so would end the user's session, or the whole container, at the first kill of all.
    let outside = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    let refused =
        outside.map(|pid| process::signal_raw(pid, 0).map_err(|error| error.raw_os_error()));
    holds(
        "processes: signal the one who made the sandbox",
        refused == Some(Err(Some(Errno::PERM.raw_os_error()))),
    )
}

/// Waits until init is gone or stands still, or somebody says that all is to end.
fn watch_over(events: &OwnedFd, init: rustix::process::Pid) {
    loop {
        match poll(&mut [PollFd::new(events, PollFlags::IN)], None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        if process::next_events(events).contains(&Signal::TERM.as_raw()) {
            return;
        }
        while let Ok(Some(pid)) = process::peek_ended() {
            let _ = process::reap(pid);
            if pid == init {
                return;
            }
        }
        if is_stopped(init) {
            return;
        }
    }
}

/// Reports whether init was stopped. Nobody but a command does that, which may where both are the caller: init would hold no
/// limit any more and answer nobody, as if it had been killed.
fn is_stopped(init: rustix::process::Pid) -> bool {
    let look = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(init), look).is_ok_and(|found| found.is_some())
}

/// Ends every process of the sandbox and waits until they are gone.
fn end_all() {
    loop {
        if process::signal_all(Signal::KILL).is_err() {
            return;
        }
        // All are this process's by now, or will be when their parents are gone.
        match process::wait_any() {
            Ok(()) => {}
            Err(_) => return,
        }
    }
}

/// Ends what is left of a sandbox whose warden was killed, by the marks of its processes. One that forks all
/// the time is found again.
pub fn sweep(nonce: u64) {
    for _ in 0..1_000 {
        let Ok(proc) = mount::open_place(CWD, c"/proc") else { return };
        let census = Census::of_marked(proc, nonce);
        let mut found = census.processes();
        // One that is dead waits for whoever is its parent by now, who may take its time.
        found.retain(|seen| !census.is_dead(seen.pid));
        if found.is_empty() {
            return;
        }
        for signal in [Signal::STOP, Signal::KILL] {
            for seen in &found {
                let pid = rustix::process::Pid::from_raw(seen.pid);
                let flags = rustix::process::PidfdFlags::empty();
                let pidfd = pid.and_then(|pid| rustix::process::pidfd_open(pid, flags).ok());
                // Asked after the descriptor was taken: if it is its own now, it was then.
                if let Some(pidfd) = pidfd
                    && census.mark_of(seen.pid) == Some(seen.mark)
                {
                    let _ = rustix::process::pidfd_send_signal(pidfd, signal);
                }
            }
        }
    }
}

/// Removes a tree that a sandbox has written, whatever rights it left on it. Nothing of the sandbox runs.
pub fn remove_directory(path: &Path) {
    if std::fs::remove_dir_all(path).is_ok() {
        return;
    }
    // Directories that their owner may not enter; links are not followed.
    fn open_up(path: &Path, depth: u32) {
        let is_dir = std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
        if !is_dir || depth == 0 {
            return;
        }
        let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700));
        for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
            open_up(&entry.path(), depth - 1);
        }
    }
    open_up(path, 4_096);
    let _ = std::fs::remove_dir_all(path);
}

/// Goes on as init, in a copy of the warden. Does not return.
fn become_init((plan, rules): (&Plan, &Rules), control: &OwnedFd, inherited: Inherited) -> ! {
    let settled = lock_down(plan, rules, inherited.work.as_ref(), inherited.base).and_then(
        |(meter, census, directory, outside, refusals)| {
            Ok((meter, census, directory, prove(plan, rules, &outside)?, refusals))
        },
    );
    match settled {
        Ok((meter, census, directory, tried, refusals)) => {
            let landlock_abi = landlock::abi().unwrap_or_default();
            let ready = Report::Ready(Proof { landlock_abi, owners_shifted: false, tried });
            let _ = protocol::send(control, &ready, &[]);
            let kept = Kept {
                scratch: Some(directory),
                meter,
                census,
                refusals,
                gate: None,
                own: None,
                written: None,
            };
            serve::serve(plan, control, inherited, kept)
        }
        Err(failure) => {
            let _ = protocol::send(control, &Report::Failed(failure), &[]);
        }
    }
    process::exit_now(1)
}

/// Puts up every wall around init and what it will start. The last that is returned is the host's root, to be
/// tried.
fn lock_down(
    plan: &Plan,
    rules: &Rules,
    work: Option<&OwnedFd>,
    base: Option<u32>,
) -> Result<(Meter, Census, OwnedFd, OwnedFd, Option<Refusals>), Failure> {
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let _ = rustix::thread::set_name(c"warren-init");
    let meter = step("open", "/proc/self/io", Meter::open())?;
    let census = step("open", "/proc", mount::open_place(CWD, c"/proc"))?;
    let census = Census::of_marked(census, rules.nonce);
    let set = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    step("bind to the warden", "", set.map_err(io::Error::from))?;
    let reaps = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    step("become the reaper of", "the commands", reaps.map_err(io::Error::from))?;
    apply::lower_limits()?;
    if let Some(processes) = plan.bounds.processes {
        // Whose other processes count too, where the user is not the sandbox's own.
        let others = if base.is_some() { 0 } else { count_own_tasks() };
        step("limit", "processes", process::limit(Resource::Nproc, processes + others + 1))?;
    }
    if let Some(bytes) = plan.bounds.memory {
        step("limit", "memory", process::limit(Resource::Data, bytes))?;
    }
    // A container may have none to give; commands cannot ask for any in either case.
    let _ = keyring::new_session();
    let directory = step(
        "open",
        &rules.directory,
        rustix::fs::open(rules.directory.as_str(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(io::Error::from),
    )?;
    let outside = step("open", "/", mount::open_place(CWD, c"/"))?;
    let sealed = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    step("seal", "init", sealed.map_err(io::Error::from))?;
    restrict(rules, work, &census)?;
    let refusals = Refusals::install(&plan.filter.init);
    let refusals = step("install the seccomp filter", "", refusals)?;
    Ok((meter, census, directory, outside, refusals))
}

fn restrict(rules: &Rules, work: Option<&OwnedFd>, census: &Census) -> Result<(), Failure> {
    let made = landlock::abi().and_then(|abi| Ruleset::new(abi, false));
    let set = step("make the Landlock rules", "", made)?;
    let allow = |place: &OwnedFd, access| {
        let mode = rustix::fs::fstat(place)?.st_mode;
        let is_dir = rustix::fs::FileType::from_raw_mode(mode).is_dir();
        let kind = if is_dir { Kind::Directory } else { Kind::File };
        set.allow(place.as_fd(), kind, access)
    };
    let (links, none) =
        (ResolveFlags::empty(), ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS);
    let system = rules.system.iter().map(|path| (path, Access::Read, links));
    let own = [(&rules.directory, Access::Full, links)];
    let readable = rules.readable.iter().map(|path| (path, Access::Read, none));
    let writable = rules.writable.iter().map(|path| (path, Access::Full, none));
    for (path, access, resolve) in system.chain(own).chain(readable).chain(writable) {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let place = rustix::fs::openat2(CWD, path.as_str(), flags, Mode::empty(), resolve);
        let place = step("open", path, place.map_err(io::Error::from))?;
        step("allow", path, allow(&place, access))?;
    }
    let listed = set.allow(census.place(), Kind::Directory, Access::Read);
    step("allow", "/proc", listed)?;
    if let Some(work) = work {
        // A command may find it, and is not its owner.
        step("allow", "the control group", set.allow(work.as_fd(), Kind::Directory, Access::Full))?;
    }
    step("restrict by Landlock", "", set.restrict())
}

/// Tries what must fail now, and says what that was.
fn prove(plan: &Plan, rules: &Rules, outside: &OwnedFd) -> Result<u32, Failure> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(outside, c".", flags, Mode::empty());
    holds("filesystem: list / by a descriptor", opened.err() == Some(Errno::ACCESS))?;
    // Where every user may, so that Landlock alone can be what refuses it.
    let beside = format!("{}.probe", rules.directory);
    let made = rustix::fs::mkdirat(CWD, &beside, Mode::RWXU);
    if made.is_ok() {
        let _ = rustix::fs::unlinkat(CWD, &beside, AtFlags::REMOVEDIR);
    }
    holds("filesystem: make a directory beside its own", made.err() == Some(Errno::ACCESS))?;
    let warden = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    let refused =
        warden.map(|pid| process::signal_raw(pid, 0).map_err(|error| error.raw_os_error()));
    holds("processes: signal one outside", refused == Some(Err(Some(Errno::PERM.raw_os_error()))))?;
    holds(NO_CAPABILITY, cred::holds_nothing().unwrap_or(false))?;
    let refused = keyring::ask().err().and_then(|error| error.raw_os_error());
    holds(NO_KEYCTL, refused == Some(Errno::PERM.raw_os_error()))?;
    let opened =
        rustix::fs::open(c"/proc/sysrq-trigger", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
    let held = opened.is_err_and(|error| [Errno::ACCESS, Errno::NOENT].contains(&error));
    holds("filesystem: write /proc/sysrq-trigger", held)?;
    let files = tried::FILES | tried::WRITES | tried::PROC_WRITES | attempt::mounting()?;
    let own = tried::SIGNALS | tried::CAPABILITIES | tried::SECCOMP | attempt::raw_sockets()?;
    Ok(files | own | attempt::as_command(plan)?)
}

/// Counts the processes and threads of this user, all over the host.
fn count_own_tasks() -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let own = rustix::process::getuid().as_raw();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter(|entry| {
        entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
    });
    let own = pids.filter(|entry| entry.metadata().is_ok_and(|found| found.uid() == own));
    own.map(|entry| {
        // As with every directory: two links and one for each below it.
        let tasks = std::fs::metadata(entry.path().join("task"));
        tasks.map_or(1, |found| found.nlink().saturating_sub(2).max(1))
    })
    .sum()
}
