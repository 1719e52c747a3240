//! Processes: starting them in new namespaces, waiting for them, signals.
#![expect(unsafe_code, reason = "clone3, wait4 and the signal calls have no safe wrapper")]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::process::{Pid, Signal};

/// Proof that this process has one thread, so that a copy of it may go on running our code.
///
/// It cannot be sent to another thread. Nothing stops its holder from starting one later; the
/// processes that hold it (Warren's launcher and init) never do.
#[derive(Debug)]
pub struct SingleThreaded(pub(crate) PhantomData<*const ()>);

impl SingleThreaded {
    /// Asks the kernel; an error if there is more than one thread.
    pub fn claim() -> io::Result<Self> {
        // Its directory of threads has, like every directory, two links and one for each below it.
        // That is one call, which tells no less than the list does. See proc_task_getattr in fs/proc.
        match rustix::fs::stat(c"/proc/self/task")?.st_nlink {
            3 => Ok(Self(PhantomData)),
            links => Err(io::Error::other(format!("threads: {}", links.saturating_sub(2)))),
        }
    }
}

/// Which namespaces of its own a new process gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespaces(u64);

impl Namespaces {
    /// None: a plain copy of this process.
    pub const NONE: Self = Self(0);
    /// A user namespace alone.
    pub const USER: Self = Self(libc::CLONE_NEWUSER as u64);
    /// Everything that walls a sandbox off, but for what it makes itself: a cgroup namespace is rooted
    /// where its *creator* is, so it must be in its cgroups first; a network namespace takes longer
    /// than all others together, and the one who forked has more to do meanwhile.
    pub const SANDBOX: Self = Self(
        (libc::CLONE_NEWUSER
            | libc::CLONE_NEWNS
            | libc::CLONE_NEWPID
            | libc::CLONE_NEWIPC
            | libc::CLONE_NEWUTS) as u64,
    );
}

/// The two sides of [`fork`].
#[derive(Debug)]
pub enum Fork {
    /// In the process that forked.
    Parent {
        /// The new process.
        child: Pid,
        /// The same, by descriptor.
        pidfd: OwnedFd,
    },
    /// In the new process.
    Child,
}

/// `libc` has these too narrow, and says so.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
/// What a process shares with the one who starts it in its own memory.
const SHARED: u64 = libc::CLONE_VM as u64;

/// Copies this process into new namespaces and, with `cgroup`, into that v2 cgroup.
///
/// No handler of ours runs in the copy. See clone3(2), Linux 5.7 for the cgroup. The child's exit
/// sends SIGCHLD.
pub fn fork(
    _proof: &SingleThreaded,
    namespaces: Namespaces,
    cgroup: Option<BorrowedFd<'_>>,
) -> io::Result<Fork> {
    let mut pidfd: i32 = -1;
    let mut args = clone_args(namespaces.0 | libc::CLONE_PIDFD as u64, cgroup);
    args.pidfd = &raw mut pidfd as u64;
    // SAFETY: `args` is initialised and outlives the call, which writes one descriptor through
    // `pidfd`. No stack is given and CLONE_VM is absent, so the child runs on a copy of ours, like
    // after fork(2). `SingleThreaded` shows that no other thread held a lock (of the allocator,
    // say) that the copy would find locked for ever.
    let result = crate::check(unsafe {
        libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>())
    });
    let result = match result {
        // Containers refuse it, because a filter cannot see its flags. None of ours is needed then.
        Err(error)
            if error.raw_os_error() == Some(libc::ENOSYS)
                && namespaces == Namespaces::NONE
                && cgroup.is_none() =>
        {
            plain_copy(&mut pidfd)?
        }
        other => other?,
    };
    match Pid::from_raw(result) {
        None => Ok(Fork::Child),
        // SAFETY: CLONE_PIDFD stored a new descriptor that nothing else owns.
        Some(child) => Ok(Fork::Parent { child, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } }),
    }
}

/// What clone3 is told of a new process, whose exit sends SIGCHLD and in which no handler of ours runs.
fn clone_args(flags: u64, cgroup: Option<BorrowedFd<'_>>) -> libc::clone_args {
    libc::clone_args {
        flags: flags | CLONE_CLEAR_SIGHAND | if cgroup.is_some() { CLONE_INTO_CGROUP } else { 0 },
        pidfd: 0,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: cgroup.map_or(0, |cgroup| u64::from(cgroup.as_raw_fd().unsigned_abs())),
    }
}

/// Starts a process that runs `main` with `data` in this very memory, on `stack`. Nothing
/// else is shared: neither descriptors nor identity nor handlers of signals.
///
/// For [`crate::spawn`], which says what such a process may do.
pub(crate) fn clone_sharing<T>(
    main: extern "C" fn(*const T) -> !,
    data: *const T,
    (stack, size): (*mut std::ffi::c_void, usize),
    cgroup: Option<BorrowedFd<'_>>,
) -> io::Result<Pid> {
    let mut args = clone_args(SHARED, cgroup);
    args.stack = stack as u64;
    args.stack_size = size as u64;
    // SAFETY: `args` is initialised and outlives the call. The child begins on a stack that nobody else
    // uses, with a call that does not return; it shares our memory, of which `spawn::run` says why that
    // is sound.
    let pid = match said(unsafe { clone_onto(&raw const args, main, data) }) {
        // Containers refuse it, because a filter cannot see its flags.
        Err(rustix::io::Errno::NOSYS) if cgroup.is_none() => {
            let (flags, top) = (SHARED | libc::SIGCHLD as u64, stack as u64 + size as u64);
            // SAFETY: the same stack, by its end, and the same call on it.
            said(unsafe { clone_onto_plainly(flags, top, main, data) })?
        }
        other => other?,
    };
    i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Makes a system call without the C library, which would leave `errno` behind.
///
/// # Safety
///
/// That of the call.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn call(number: libc::c_long, args: [u64; 4]) -> Result<u64, rustix::io::Errno> {
    let result: i64;
    // SAFETY: the kernel's convention: it takes `rcx` and `r11` and keeps the rest. The caller answers
    // for what the call does.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2], in("r10") args[3],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    said(result)
}

/// Makes a system call without the C library, which would leave `errno` behind.
///
/// # Safety
///
/// That of the call.
#[cfg(target_arch = "aarch64")]
pub(crate) unsafe fn call(number: libc::c_long, args: [u64; 4]) -> Result<u64, rustix::io::Errno> {
    let result: i64;
    // SAFETY: the kernel's convention: it keeps everything but `x0`. The caller answers for what the
    // call does.
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") args[0] => result,
            in("x1") args[1], in("x2") args[2], in("x3") args[3],
            options(nostack),
        );
    }
    said(result)
}

/// Takes the kernel's answer apart.
fn said(result: i64) -> Result<u64, rustix::io::Errno> {
    match i32::try_from(result) {
        Ok(code @ -4095..=-1) => Err(rustix::io::Errno::from_raw_os_error(-code)),
        _ => Ok(result.cast_unsigned()),
    }
}

/// Calls clone3; the child calls `main` with `data` and has nowhere to return to.
///
/// # Safety
///
/// That of clone3 with CLONE_VM: the stack in `args` is the child's alone.
#[cfg(target_arch = "x86_64")]
unsafe fn clone_onto<T>(
    args: *const libc::clone_args,
    main: extern "C" fn(*const T) -> !,
    data: *const T,
) -> i64 {
    let result: i64;
    // SAFETY: as for `call`. In the child the stack pointer is that of the new stack, aligned as a call
    // wants it; the parent goes on behind.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") args, in("rsi") size_of::<libc::clone_args>(),
            in("r12") data, in("r13") main,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// Calls clone3; the child calls `main` with `data` and has nowhere to return to.
///
/// # Safety
///
/// That of clone3 with CLONE_VM: the stack in `args` is the child's alone.
#[cfg(target_arch = "aarch64")]
unsafe fn clone_onto<T>(
    args: *const libc::clone_args,
    main: extern "C" fn(*const T) -> !,
    data: *const T,
) -> i64 {
    let result: i64;
    // SAFETY: as for `call`. In the child the stack pointer is that of the new stack, aligned as a call
    // wants it; the parent goes on behind.
    unsafe {
        std::arch::asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x30, xzr",
            "mov x0, x2",
            "blr x3",
            "brk #1",
            "2:",
            in("x8") libc::SYS_clone3,
            inlateout("x0") args => result,
            in("x1") size_of::<libc::clone_args>(), in("x2") data, in("x3") main,
            lateout("x30") _,
        );
    }
    result
}

/// Likewise by the older call, which knows no cgroups. A stack is given to it by its end.
///
/// # Safety
///
/// That of clone with CLONE_VM: the stack below `top` is the child's alone.
#[cfg(target_arch = "x86_64")]
unsafe fn clone_onto_plainly<T>(
    flags: u64,
    top: u64,
    main: extern "C" fn(*const T) -> !,
    data: *const T,
) -> i64 {
    let result: i64;
    // SAFETY: as for `clone_onto`.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone => result,
            in("rdi") flags, in("rsi") top, in("rdx") 0, in("r10") 0, in("r8") 0,
            in("r12") data, in("r13") main,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// Likewise by the older call, which knows no cgroups. A stack is given to it by its end.
///
/// # Safety
///
/// That of clone with CLONE_VM: the stack below `top` is the child's alone.
#[cfg(target_arch = "aarch64")]
unsafe fn clone_onto_plainly<T>(
    flags: u64,
    top: u64,
    main: extern "C" fn(*const T) -> !,
    data: *const T,
) -> i64 {
    let result: i64;
    // SAFETY: as for `clone_onto`.
    unsafe {
        std::arch::asm!(
            "svc 0",
            "cbnz x0, 2f",
            "mov x29, xzr",
            "mov x30, xzr",
            "mov x0, x5",
            "blr x6",
            "brk #1",
            "2:",
            in("x8") libc::SYS_clone,
            inlateout("x0") flags => result,
            in("x1") top, in("x2") 0, in("x3") 0, in("x4") 0, in("x5") data, in("x6") main,
            lateout("x30") _,
        );
    }
    result
}

/// Copies this process by the older call, which knows neither cgroups nor handlers to forget: a copy of
/// ours handles no signal that its program would not reset.
fn plain_copy(pidfd: &mut i32) -> io::Result<i32> {
    let flags = libc::CLONE_PIDFD as libc::c_long | libc::SIGCHLD as libc::c_long;
    // SAFETY: no stack is given and CLONE_VM is absent, so the child runs on a copy of ours, like after
    // fork(2); CLONE_PIDFD stores one descriptor where the third argument points, which outlives the
    // call on every architecture that this is built for. The caller has shown that there is one thread.
    crate::check(unsafe {
        libc::syscall(libc::SYS_clone, flags, 0 as libc::c_long, std::ptr::from_mut(pidfd), 0, 0)
    })
}

/// Roots the view of control groups where this process is now. See cgroup_namespaces(7).
pub fn new_cgroup_namespace() -> io::Result<()> {
    // SAFETY: unshare takes flags; CLONE_NEWCGROUP touches no memory and no descriptor.
    crate::check(unsafe { libc::unshare(libc::CLONE_NEWCGROUP) }).map(drop)
}

/// Goes on with mounts of its own, which at first are the same. See mount_namespaces(7).
pub fn new_mount_namespace() -> io::Result<()> {
    // SAFETY: unshare takes flags; CLONE_NEWNS touches no memory and no descriptor.
    crate::check(unsafe { libc::unshare(libc::CLONE_NEWNS) }).map(drop)
}

/// Leaves the network for one that is empty. See network_namespaces(7).
pub fn new_network_namespace() -> io::Result<()> {
    // SAFETY: unshare takes flags; CLONE_NEWNET touches no memory and no descriptor.
    crate::check(unsafe { libc::unshare(libc::CLONE_NEWNET) }).map(drop)
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself, with this code.
    Exited(i32),
    /// By this signal.
    Signalled(i32),
}

/// What a process and the children it waited for used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Time on a CPU, user and system.
    pub cpu: Duration,
    /// The largest resident size of any one of them, in bytes.
    pub peak_resident: u64,
}

/// Looks whether a child has ended, without removing it; `None` if none has.
pub fn peek_ended() -> io::Result<Option<Pid>> {
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `siginfo_t` is plain data for which all zeroes is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: waitid writes one `siginfo_t`, which outlives the call.
    let result = unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, options) };
    match crate::check(result) {
        // SAFETY: waitid filled the SIGCHLD form of the union, or left the zeroes.
        Ok(_) => Ok(Pid::from_raw(unsafe { info.si_pid() })),
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes the ended child `pid` and says how it ended and what it used.
pub fn reap(pid: Pid) -> io::Result<(End, Usage)> {
    let mut status = 0;
    // SAFETY: `rusage` is plain data for which all zeroes is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: wait4 writes one integer and one `rusage`; both outlive the call.
    let result =
        unsafe { libc::wait4(pid.as_raw_nonzero().get(), &raw mut status, 0, &raw mut usage) };
    crate::check(result)?;
    let time = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec.unsigned_abs())
            + Duration::from_micros(t.tv_usec.unsigned_abs())
    };
    let usage = Usage {
        cpu: time(usage.ru_utime) + time(usage.ru_stime),
        peak_resident: usage.ru_maxrss.unsigned_abs() * 1024,
    };
    let end = if libc::WIFSIGNALED(status) {
        End::Signalled(libc::WTERMSIG(status))
    } else {
        End::Exited(libc::WEXITSTATUS(status))
    };
    Ok((end, usage))
}

/// Sends `signal` to every process that this one may signal, except itself and PID 1.
///
/// From PID 1 of a pid namespace that is every other process in it, and from within a Landlock domain
/// that scopes signals every other one in that, at one moment: the kernel holds off forks while it
/// walks the list. Anywhere else it is a catastrophe. See kill(2).
pub fn signal_all(signal: Signal) -> io::Result<()> {
    // SAFETY: kill takes two integers.
    let result = unsafe { libc::kill(-1, signal.as_raw()) };
    match crate::check(result) {
        // There is nobody else.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        other => other.map(drop),
    }
}

/// Sends signal number `signal`, real-time ones included, to process `pid` or group `-pid`.
pub fn signal_raw(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: kill takes two integers.
    crate::check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Waits until any child has ended and removes it; an error if there is none.
pub fn wait_any() -> io::Result<()> {
    loop {
        // SAFETY: wait4 takes a null status and a null usage, which it then does not write.
        let result =
            unsafe { libc::wait4(-1, std::ptr::null_mut(), libc::__WALL, std::ptr::null_mut()) };
        match crate::check(result) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(drop),
        }
    }
}

/// Blocks SIGCHLD and returns a descriptor that becomes readable when one is due. See signalfd(2).
pub fn child_events() -> io::Result<OwnedFd> {
    events(&[Signal::CHILD])
}

/// Takes what is due from a descriptor of [`events`], and returns the numbers of the signals.
pub fn next_events(events: &OwnedFd) -> Vec<i32> {
    const SIZE: usize = size_of::<libc::signalfd_siginfo>();
    let (mut numbers, mut buffer) = (Vec::new(), [0; SIZE * 16]);
    while let Ok(length @ 1..) = rustix::io::read(events, &mut buffer) {
        for info in buffer[..length].chunks_exact(SIZE) {
            // The number is the first field, of four bytes. See signalfd(2).
            if let Some((number, _)) = info.split_first_chunk::<4>() {
                numbers.push(i32::from_ne_bytes(*number));
            }
        }
    }
    numbers
}

/// Blocks signals, also ones that are ignored, and returns a descriptor that becomes readable when one is
/// due. See signalfd(2).
pub fn events(signals: &[Signal]) -> io::Result<OwnedFd> {
    // SAFETY: a `sigset_t` is plain data, initialised by sigemptyset before it is used; the calls
    // read or write only the sets passed, which outlive them.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, signal.as_raw());
        }
        let result = libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        crate::check(result)?;
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        crate::check(fd)?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Has the kernel forget children as they end: nobody can ask how they did. See sigaction(2), SIG_IGN.
pub fn leave_reaping_to_the_kernel() {
    // SAFETY: SIG_IGN is a valid disposition and installs no code of ours.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Has children wait to be reaped, for a copy of one who called [`leave_reaping_to_the_kernel`].
pub fn reap_again() {
    // SAFETY: SIG_DFL is a valid disposition and installs no code of ours.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// What a terminal or a supervisor sends to a whole group of processes, and what is done to one who writes to a pipe that
/// nobody reads any more, or more to a file than that may have: both are told by the write, too.
const IGNORED: [i32; 7] = [
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGHUP,
    libc::SIGTERM,
    libc::SIGTSTP,
    libc::SIGPIPE,
    libc::SIGXFSZ,
];

/// Ignores the signals that are meant for a whole group of processes, or for nobody, and gives every
/// other its default meaning again.
pub fn ignore_group_signals() {
    for signal in 1..=64 {
        let action = if IGNORED.contains(&signal) { libc::SIG_IGN } else { libc::SIG_DFL };
        // SAFETY: neither disposition installs code of ours; numbers that cannot be changed are
        // refused.
        unsafe { libc::signal(signal, action) };
    }
}

/// Likewise, for one whose signals have their default meaning.
pub(crate) fn ignore_signals_of_groups() {
    for signal in IGNORED {
        // SAFETY: SIG_IGN is a valid disposition and installs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Gives every signal its default meaning again and lets it through, as a program that is started
/// expects it: what is ignored or blocked stays so across exec. For a copy of one who called
/// [`ignore_group_signals`].
pub fn default_signals() {
    // SAFETY: a `sigset_t` is plain data, initialised by sigemptyset before it is read; both calls
    // touch only the set passed, which outlives them.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
    for signal in IGNORED {
        // SAFETY: SIG_DFL is a valid disposition and installs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Ends this process at once: no destructor runs, nothing is flushed.
///
/// For a forked copy that must not run what belongs to the original.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit takes an integer and does not return.
    unsafe { libc::_exit(code) }
}

/// Limits what descriptors this process may get; both the soft and the hard limit.
pub fn limit(resource: rustix::process::Resource, value: u64) -> io::Result<()> {
    let limit = rustix::process::Rlimit { current: Some(value), maximum: Some(value) };
    Ok(rustix::process::setrlimit(resource, limit)?)
}

/// The limit by which processes are marked: the kernel stopped reading it in Linux 2.4 and still hands it
/// down to every child. See getrlimit(2), RLIMIT_LOCKS.
///
/// It can never be raised without a capability. Lowering it is for a filter to refuse, by
/// [`crate::seccomp::keep_limit`].
pub const MARK: rustix::process::Resource = rustix::process::Resource::Locks;
/// The same as the kernel's `resource.h` numbers it: C libraries do not agree on its type.
pub const MARK_NUMBER: u32 = 10;
