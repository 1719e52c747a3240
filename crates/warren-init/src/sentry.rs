//! Init on a kernel that is a program of the host: gVisor.
//!
//! Its walls are that kernel, with all that its runtime put around it: nothing inside makes a system call of
//! the host's. What init adds is what keeps commands from each other and from init, as far as that kernel
//! knows it. It has no Landlock, no v2 control groups, no `openat2`, no `clone3`, no pidfd; it has seccomp, and
//! v1 control groups of its own, which tell commands apart and bound how many processes there are.
//!
//! Descriptors come in from the host, if they are of files, pipes or sockets; none goes out.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Pid, Resource};
use warren_sys::seccomp::{self, Instruction};
use warren_sys::{cred, fd, keyring, mount, process};

use crate::account::{Census, Common, Meter, Work};
use crate::apply::{self, Begin, Inherited, Outside};
use crate::attempt::{self, NO_CAPABILITY, NO_KEYCTL, OWN_PROCESSES, holds};
use crate::launcher::step;
use crate::plan::{INIT_ID, Lifetime, OWN_GROUPS, Plan, Users};
use crate::protocol::{self, Failure, Proof, Report, tried};
use crate::serve::{self, Kept};

/// The group of all commands, in each hierarchy.
const ALL: &str = "all";

/// What init keeps of the rights that this kernel, and no other, gives it: to give a terminal to the commands' user, to
/// signal commands, and to become their user in the process of each. This kernel shows a process's descriptors to its
/// own user, whatever it asks for, and init's lead to the groups of commands: so it must be another user altogether.
const KEPT: u64 = 1 | 1 << 5 | 1 << 6 | 1 << 7;

/// A directory on the file system of everything that is written.
const WRITTEN: &str = "/tmp";

/// Goes on as init; `line` leads to the one who guards the container, who stays. Does not return.
pub(crate) fn go_on(begin: Begin, line: OwnedFd, fds: Vec<OwnedFd>) -> ! {
    let Begin { plan, shifted, lock, outside, .. } = begin;
    let mut fds = fds.into_iter();
    let Some(control) = fds.next() else { process::exit_now(1) };
    let lock = if lock { fds.next() } else { None };
    // Its number is that of a standard stream, which is replaced below.
    let kept = line.try_clone();
    std::mem::forget(line);
    let Ok(line) = kept else { process::exit_now(1) };
    let mut keep = vec![&control, &line];
    keep.extend(lock.as_ref());
    let closed = fd::close_all_except(&keep).and_then(|()| fd::occupy_streams(c"/dev/null"));
    process::ignore_group_signals();
    let ready =
        step("close what was inherited", "", closed).and_then(|()| settle_in(&plan, &outside));
    match ready {
        Ok(Settled { meter, census, work, written, tried }) => {
            let proof = Proof { landlock_abi: 0, owners_shifted: shifted, tried };
            let _ = protocol::send(&control, &Report::Ready(proof), &[]);
            let inherited = Inherited {
                work: None,
                listener: None,
                lock,
                network: true,
                names: None,
                base: None,
            };
            // That kernel asks nobody.
            let refusals = None;
            let kept = Kept {
                scratch: None,
                meter,
                census,
                refusals,
                gate: None,
                own: Some((work, line)),
                written: Some(written),
            };
            serve::serve(&plan, &control, inherited, kept)
        }
        Err(failure) => {
            let _ = protocol::send(&control, &Report::Failed(failure), &[]);
        }
    }
    process::exit_now(1)
}

/// What init has once its walls stand.
struct Settled {
    meter: Meter,
    census: Census,
    work: Work,
    written: OwnedFd,
    tried: u32,
}

fn settle_in(plan: &Plan, outside: &Outside) -> Result<Settled, Failure> {
    let one = if plan.users == Users::One { Ok(()) } else { Err(Errno::OPNOTSUPP.into()) };
    step("have several users on", "a kernel of its own", one)?;
    rustix::process::umask(Mode::empty());
    let meter = step("open", "/proc/self/io", Meter::open())?;
    step("leave the groups of", "the runtime", cred::leave_groups())?;
    let census = step("open", crate::plan::OWN_PROC, apply::take_census(Census::of_grouped))?;
    let [pids, cpu] = OWN_GROUPS;
    let all = step("make a control group in", pids, own_group(pids, "pids"))?;
    let common = step("limit", "processes", Common::new(&all, plan.bounds.processes))?;
    let group = step("make a control group in", cpu, own_group(cpu, "cpuacct"))?;
    let network = attempt::network(plan.promised.host_port)?;
    // By right: this kernel looks at the permissions before it asks who holds the files, who knows the mounts.
    let mounts = apply::prove_read_only(plan)?;
    // By right, too: it is not that it may not be seen, but that it is not there.
    let host = prove_apart(plan, outside)?;
    // Whoever asks first reads it from a file, by a path; init is not to wait for one later.
    let _ = (rustix::param::page_size(), rustix::param::clock_ticks_per_second());
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let written = rustix::fs::open(WRITTEN, directory, Mode::empty());
    let written = step("open", WRITTEN, written.map_err(io::Error::from))?;
    let trial = attempt::as_command(plan)?;
    lock_down(plan)?;
    let tried = network | mounts | host | trial | prove(plan)?;
    let work = Work::on_own_kernel(group, common);
    Ok(Settled { meter, census, work, written, tried })
}

/// Mounts control groups of this kernel, makes the one for commands, and takes their name away.
///
/// They are of init's own user, which no command is.
fn own_group(place: &str, controller: &str) -> io::Result<OwnedFd> {
    mount::new_v1_groups(place, controller)?;
    cred::act_as(INIT_ID)?;
    let top = rustix::fs::openat(CWD, place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    rustix::fs::mkdirat(&top, ALL, Mode::from_raw_mode(0o755))?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let group = rustix::fs::openat(top.as_fd(), ALL, flags, Mode::empty())?;
    cred::act_as(0)?;
    mount::detach(place)?;
    Ok(group)
}

/// Gives up every right that was needed so far.
fn lock_down(plan: &Plan) -> Result<(), Failure> {
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let _ = rustix::thread::set_name(c"warren-init");
    // What this kernel does not let anybody lower it has no use for.
    for (resource, value) in apply::LOWERED {
        let _ = apply::lower_limit(resource, value);
    }
    if let Some(bytes) = plan.bounds.memory {
        step("limit", "memory", process::limit(Resource::Data, bytes))?;
    }
    step("empty the bounding set", "", cred::empty_bounding_set())?;
    step("become", "the user of init", cred::become_only_keeping(INIT_ID, KEPT))?;
    let forbidden = rustix::thread::set_no_new_privs(true);
    step("forbid new privileges", "", forbidden.map_err(io::Error::from))?;
    let sealed = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    step("seal", "init", sealed.map_err(io::Error::from))?;
    let program: Vec<_> = plan.filter.init.iter().copied().map(Instruction::from_bits).collect();
    step("install the seccomp filter", "", seccomp::install(&program))
}

/// Looks for what is the host's alone, and says what that was.
fn prove_apart(plan: &Plan, outside: &Outside) -> Result<u32, Failure> {
    holds("syscalls: be on the host's kernel", outside.kernel != Outside::kernel())?;
    // Whoever is shown the directory that it is in was shown this, too.
    let shown = |target: &str| Path::new(&outside.path).starts_with(target);
    if plan.mounts.iter().any(|planned| shown(&planned.target)) {
        return Ok(tried::KERNEL);
    }
    let found = rustix::fs::lstat(outside.path.as_str());
    let attempt = "filesystem: find a path of the host that it was not given";
    holds(attempt, found.err() == Some(Errno::NOENT))?;
    Ok(tried::KERNEL | tried::HOST_PATH)
}

/// Tries what must fail now, and says what that was.
fn prove(plan: &Plan) -> Result<u32, Failure> {
    let first = rustix::process::getpid() == Pid::INIT && rustix::process::getppid().is_none();
    holds(OWN_PROCESSES, first)?;
    holds(NO_CAPABILITY, cred::holds_only(KEPT).unwrap_or(false))?;
    // This kernel has no key rings and says EACCES; EPERM is the filter's word.
    let refused = keyring::ask().err().and_then(|error| error.raw_os_error());
    holds(NO_KEYCTL, refused == Some(Errno::PERM.raw_os_error()))?;
    let own = tried::PROCESSES | tried::CAPABILITIES | tried::SECCOMP;
    // Its `/proc` tells of nothing but this kernel, so that what is masked elsewhere need not be here.
    let files = attempt::mounting()? | attempt::host_memory()?;
    let more = files | attempt::raw_sockets()? | attempt::others(plan)?;
    Ok(own | more | attempt::room(plan)?)
}

/// Takes what the guard hands in: somebody who found the sandbox by its place on the host. `None` once the
/// guard is gone.
pub(crate) fn handed_in(line: &OwnedFd) -> Option<Option<OwnedFd>> {
    match protocol::receive_trusted::<protocol::Done>(line) {
        Ok(Some((_, mut fds))) => Some(fds.pop()),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Some(None),
        Ok(None) | Err(_) => None,
    }
}

/// Reports whether a sandbox goes on without its guard.
pub(crate) fn goes_on_alone(plan: &Plan) -> bool {
    plan.lifetime == Lifetime::Detached
}
