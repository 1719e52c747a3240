//! Calls that show by their answer whether a filter stands before them, and do nothing.
#![expect(unsafe_code, reason = "calls whose wrappers do more than ask")]

use std::io;

use rustix::process::Pid;

use crate::process::SingleThreaded;

/// A call that sandboxes are kept from.
///
/// The arguments are such that the kernel itself answers EFAULT, EINVAL or success, whoever asks: EPERM
/// and ENOSYS are a filter's words, or those of a kernel that was built without the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarded {
    /// `io_uring_setup`.
    IoUring,
    /// `perf_event_open`.
    Perf,
    /// `userfaultfd`.
    Userfaultfd,
    /// `ptrace`.
    Ptrace,
    /// `unshare` of a user namespace.
    UserNamespace,
    /// `setns`.
    Setns,
    /// `open_by_handle_at`.
    FileHandle,
    /// `process_vm_readv`.
    ReadMemory,
}

impl Guarded {
    /// Makes the call.
    pub fn ask(self) -> io::Result<()> {
        let number = match self {
            Self::IoUring => libc::SYS_io_uring_setup,
            Self::Perf => libc::SYS_perf_event_open,
            Self::Userfaultfd => libc::SYS_userfaultfd,
            Self::Ptrace => libc::SYS_ptrace,
            Self::UserNamespace => libc::SYS_unshare,
            Self::Setns => libc::SYS_setns,
            Self::FileHandle => libc::SYS_open_by_handle_at,
            Self::ReadMemory => libc::SYS_process_vm_readv,
        };
        let none: libc::c_long = 0;
        // PTRACE_TRACEME is 0. A flag that no userfaultfd has. CLONE_NEWUSER, or a descriptor that is none.
        let first = match self {
            Self::IoUring => 1,
            // Of nobody, and nothing: what has no length is done.
            Self::Perf | Self::Ptrace | Self::ReadMemory => none,
            Self::Userfaultfd => 1 << 20,
            Self::UserNamespace => libc::c_long::from(libc::CLONE_NEWUSER),
            Self::Setns => -1,
            Self::FileHandle => libc::c_long::from(libc::AT_FDCWD),
        };
        // SAFETY: every pointer among the arguments is null, which the kernel refuses to read or does
        // not look at; what such a call can change is this process alone.
        crate::check(unsafe { libc::syscall(number, first, none, none, none, none) }).map(drop)
    }
}

/// Tries to trace the process of this number, and does not stop it; what is traced is let go with this process.
pub fn seize(pid: i32) -> io::Result<()> {
    let (request, none) = (libc::c_long::from(libc::PTRACE_SEIZE), 0 as libc::c_long);
    // SAFETY: PTRACE_SEIZE takes a number and options, of which there are none.
    let result =
        unsafe { libc::syscall(libc::SYS_ptrace, request, libc::c_long::from(pid), none, none) };
    crate::check(result).map(drop)
}

/// Copies this process by the call that programs use; `None` in the copy.
///
/// [`process::fork`](crate::process::fork) is made by one that a filter may have taken away.
pub fn fork_plainly(_proof: &SingleThreaded) -> io::Result<Option<Pid>> {
    let (flags, none) = (libc::c_long::from(libc::SIGCHLD), 0 as libc::c_long);
    // SAFETY: without CLONE_VM and with no stack given the child runs on a copy of ours, like after
    // fork(2); `SingleThreaded` shows that no other thread held a lock that the copy would find locked.
    let child =
        crate::check(unsafe { libc::syscall(libc::SYS_clone, flags, none, none, none, none) })?;
    Ok(Pid::from_raw(child))
}
