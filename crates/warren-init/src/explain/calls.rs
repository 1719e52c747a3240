//! Which calls name a path or an address, and what they want of it.

use std::ffi::c_long;

use warren_sys::seccomp::{
    Action, Arch, Comparison, CompileError, Condition, Instruction, Rule, compile,
};

use crate::protocol::denied::Right;

/// What a call is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// A path.
    Path(Named),
    /// The address of a socket.
    Address {
        /// Where it is in memory.
        pointer: u64,
        /// How long it is.
        length: u64,
    },
    /// An address within a `msghdr`.
    Message {
        /// Where that is in memory.
        pointer: u64,
    },
}

/// A path that a call names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    /// The descriptor that it begins at; the working directory if none.
    pub(crate) base: Option<i32>,
    /// Where it is in memory.
    pub(crate) pointer: u64,
    /// What is wanted of it, if it is there.
    pub(crate) right: Right,
    /// What is wanted if it is not.
    pub(crate) absent: Right,
}

const O_CREAT: u64 = libc::O_CREAT as u64;
const O_TRUNC: u64 = libc::O_TRUNC as u64;
const O_ACCMODE: u64 = libc::O_ACCMODE as u64;
const W_OK: u64 = libc::W_OK as u64;
const X_OK: u64 = libc::X_OK as u64;

/// Lists what a call names, at most two things.
pub(crate) fn subjects(nr: u64, args: &[u64; 6]) -> Vec<Subject> {
    let Ok(nr) = c_long::try_from(nr) else { return Vec::new() };
    let path = |right| vec![at(None, args[0], right)];
    let path_at = |right| vec![at(Some(args[0]), args[1], right)];
    match nr {
        libc::SYS_openat => vec![open(Some(args[0]), args[1], args[2])],
        libc::SYS_mkdirat | libc::SYS_mknodat => path_at(Right::Create),
        libc::SYS_unlinkat => path_at(Right::Remove),
        libc::SYS_renameat2 => vec![
            at(Some(args[0]), args[1], Right::Remove),
            at(Some(args[2]), args[3], Right::Create),
        ],
        libc::SYS_linkat => vec![at(Some(args[2]), args[3], Right::Create)],
        libc::SYS_symlinkat => vec![at(Some(args[1]), args[2], Right::Create)],
        libc::SYS_fchmodat | libc::SYS_fchownat | libc::SYS_utimensat | SYS_FCHMODAT2 => {
            path_at(Right::Change)
        }
        libc::SYS_setxattr
        | libc::SYS_lsetxattr
        | libc::SYS_removexattr
        | libc::SYS_lremovexattr => path(Right::Change),
        libc::SYS_truncate => path(Right::Write),
        libc::SYS_execve => path(Right::Execute),
        libc::SYS_execveat => path_at(Right::Execute),
        libc::SYS_faccessat | libc::SYS_faccessat2 => path_at(asked(args[2])),
        libc::SYS_newfstatat | libc::SYS_statx | libc::SYS_readlinkat => path_at(Right::Read),
        libc::SYS_chdir | libc::SYS_statfs => path(Right::Read),
        libc::SYS_connect | libc::SYS_bind => address(args[1], args[2]),
        libc::SYS_sendto => address(args[4], args[5]),
        libc::SYS_sendmsg => vec![Subject::Message { pointer: args[1] }],
        _ => older(nr, args),
    }
}

/// Lists what a call names that newer machines do without.
#[cfg(target_arch = "x86_64")]
fn older(nr: c_long, args: &[u64; 6]) -> Vec<Subject> {
    let path = |right| vec![at(None, args[0], right)];
    match nr {
        libc::SYS_open => vec![open(None, args[0], args[1])],
        libc::SYS_creat => vec![open(None, args[0], O_CREAT | libc::O_WRONLY as u64)],
        libc::SYS_mkdir | libc::SYS_mknod => path(Right::Create),
        libc::SYS_unlink | libc::SYS_rmdir => path(Right::Remove),
        libc::SYS_rename => {
            vec![at(None, args[0], Right::Remove), at(None, args[1], Right::Create)]
        }
        libc::SYS_renameat => vec![
            at(Some(args[0]), args[1], Right::Remove),
            at(Some(args[2]), args[3], Right::Create),
        ],
        libc::SYS_link | libc::SYS_symlink => vec![at(None, args[1], Right::Create)],
        libc::SYS_chmod
        | libc::SYS_chown
        | libc::SYS_lchown
        | libc::SYS_utime
        | libc::SYS_utimes => path(Right::Change),
        libc::SYS_futimesat => vec![at(Some(args[0]), args[1], Right::Change)],
        libc::SYS_access => path(asked(args[1])),
        libc::SYS_stat | libc::SYS_lstat | libc::SYS_readlink => path(Right::Read),
        _ => Vec::new(),
    }
}

#[cfg(target_arch = "aarch64")]
fn older(nr: c_long, args: &[u64; 6]) -> Vec<Subject> {
    match nr {
        libc::SYS_renameat => vec![
            at(Some(args[0]), args[1], Right::Remove),
            at(Some(args[2]), args[3], Right::Create),
        ],
        _ => Vec::new(),
    }
}

/// Too new for some C libraries.
const SYS_FCHMODAT2: c_long = 452;

/// Writes the filter by which a command's calls are seen: those that something can be said about if they fail.
///
/// Not reading and writing, which is what most programs do most.
pub(crate) fn seen() -> Result<Vec<Instruction>, CompileError> {
    const EMPTY_PATH: u64 = libc::AT_EMPTY_PATH as u64;
    // What makes descriptors, beside what has a path.
    const OPENS: [c_long; 12] = [
        libc::SYS_socket,
        libc::SYS_socketpair,
        libc::SYS_accept,
        libc::SYS_accept4,
        libc::SYS_pipe2,
        libc::SYS_dup,
        libc::SYS_dup3,
        libc::SYS_eventfd2,
        libc::SYS_epoll_create1,
        libc::SYS_timerfd_create,
        libc::SYS_signalfd4,
        libc::SYS_memfd_create,
    ];
    let opens = |nr: u32| OPENS.contains(&c_long::from(nr)) || opens_as_before(nr);
    let is_seen = |nr: &u32| {
        let number = u64::from(*nr);
        !subjects(number, &[1; 6]).is_empty() || starts_a_task(number) || opens(*nr)
    };
    let rule = |nr: u32| {
        // It is about an open descriptor then.
        let by_path =
            Condition { argument: 3, mask: EMPTY_PATH, comparison: Comparison::Equal, value: 0 };
        let is_stat = c_long::from(nr) == libc::SYS_newfstatat;
        let when = if is_stat { vec![by_path] } else { Vec::new() };
        Rule { nr, action: Action::Trace, when }
    };
    let rules: Vec<Rule> = (0..NUMBERS).filter(is_seen).map(rule).collect();
    compile(Arch::NATIVE, Action::Allow, &rules)
}

/// Beyond the last number that any of these calls has.
const NUMBERS: u32 = 500;

#[cfg(target_arch = "x86_64")]
fn opens_as_before(nr: u32) -> bool {
    const OLDER: [c_long; 5] = [
        libc::SYS_pipe,
        libc::SYS_dup2,
        libc::SYS_eventfd,
        libc::SYS_epoll_create,
        libc::SYS_signalfd,
    ];
    OLDER.contains(&c_long::from(nr))
}

#[cfg(target_arch = "aarch64")]
fn opens_as_before(_: u32) -> bool {
    false
}

/// Reports whether a call starts a process or a thread.
pub(crate) fn starts_a_task(nr: u64) -> bool {
    #[cfg(target_arch = "x86_64")]
    const STARTS: [c_long; 3] = [libc::SYS_clone, libc::SYS_fork, libc::SYS_vfork];
    #[cfg(target_arch = "aarch64")]
    const STARTS: [c_long; 1] = [libc::SYS_clone];
    c_long::try_from(nr).is_ok_and(|nr| STARTS.contains(&nr))
}

fn at(base: Option<u64>, pointer: u64, right: Right) -> Subject {
    Subject::Path(Named { base: base.and_then(descriptor), pointer, right, absent: right })
}

/// A descriptor, unless it stands for the working directory.
fn descriptor(word: u64) -> Option<i32> {
    // The kernel looks at the lower half alone.
    let number = (word & 0xffff_ffff) as u32;
    i32::try_from(number).ok()
}

fn open(base: Option<u64>, pointer: u64, flags: u64) -> Subject {
    let writes = flags & O_ACCMODE != 0 || flags & O_TRUNC != 0;
    let right = if writes { Right::Write } else { Right::Read };
    let absent = if flags & O_CREAT != 0 { Right::Create } else { right };
    Subject::Path(Named { base: base.and_then(descriptor), pointer, right, absent })
}

/// What was asked whether it may be done.
fn asked(mode: u64) -> Right {
    match mode {
        mode if mode & W_OK != 0 => Right::Write,
        mode if mode & X_OK != 0 => Right::Execute,
        _ => Right::Read,
    }
}

fn address(pointer: u64, length: u64) -> Vec<Subject> {
    if pointer == 0 { Vec::new() } else { vec![Subject::Address { pointer, length }] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(nr: c_long, args: [u64; 6]) -> Vec<Subject> {
        subjects(nr.cast_unsigned(), &args)
    }

    #[test]
    fn what_can_be_told_is_seen_and_reading_and_writing_are_not() {
        use warren_sys::seccomp::{Call, evaluate};
        let filter = seen().unwrap();
        let ask = |nr: c_long, args| {
            let (arch, nr) = (Arch::NATIVE.audit(), nr.try_into().unwrap());
            evaluate(&filter, &Call { arch, nr, args })
        };
        for nr in
            [libc::SYS_openat, libc::SYS_connect, libc::SYS_clone, libc::SYS_dup, SYS_FCHMODAT2]
        {
            assert_eq!(ask(nr, [0; 6]), Action::Trace, "{nr}");
        }
        for nr in [libc::SYS_read, libc::SYS_write, libc::SYS_futex, libc::SYS_mmap, 499] {
            assert_eq!(ask(nr, [0; 6]), Action::Allow, "{nr}");
        }
        let (by_path, by_descriptor) = ([0; 6], [0, 0, 0, 0x1000, 0, 0]);
        assert_eq!(ask(libc::SYS_newfstatat, by_path), Action::Trace);
        assert_eq!(ask(libc::SYS_newfstatat, by_descriptor), Action::Allow);
    }

    #[test]
    fn what_is_wanted_of_a_path_is_read_from_the_call() {
        let cwd = u64::from((-100i32).cast_unsigned());
        let open = |flags: i32| {
            let [Subject::Path(named)] =
                call(libc::SYS_openat, [cwd, 7, u64::from(flags.cast_unsigned()), 0, 0, 0])[..]
            else {
                panic!("one path");
            };
            assert_eq!((named.base, named.pointer), (None, 7));
            (named.right, named.absent)
        };
        assert_eq!(open(libc::O_RDONLY), (Right::Read, Right::Read));
        assert_eq!(open(libc::O_RDWR), (Right::Write, Right::Write));
        assert_eq!(open(libc::O_WRONLY | libc::O_CREAT), (Right::Write, Right::Create));
        assert_eq!(open(libc::O_RDONLY | libc::O_CREAT), (Right::Read, Right::Create));
        let renamed = call(libc::SYS_renameat2, [3, 1, 4, 2, 0, 0]);
        let named = |base, pointer, right| {
            Subject::Path(Named { base: Some(base), pointer, right, absent: right })
        };
        assert_eq!(renamed, [named(3, 1, Right::Remove), named(4, 2, Right::Create)]);
        assert_eq!(call(libc::SYS_getpid, [1; 6]), []);
        assert_eq!(call(libc::SYS_sendto, [3, 1, 1, 0, 0, 0]), [], "to whom it is connected");
    }
}
