//! Landlock: rules on paths, ports and signals that a process puts on itself for good.
//!
//! A thin wrapper instead of the `landlock` crate, because it runs in every sandbox's init, whose
//! size is part of what starting a sandbox costs. See landlock(7).
#![expect(unsafe_code, reason = "the Landlock calls have no safe wrapper")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const CREATE_RULESET_VERSION: u32 = 1;
const RULE_PATH_BENEATH: u32 = 1;

const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const TRUNCATE: u64 = 1 << 14;
const IOCTL_DEV: u64 = 1 << 15;
/// What makes sense on something that is not a directory.
const FILE_RIGHTS: u64 = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV;

const NET_TCP: u64 = 0b11;
const SCOPE_ABSTRACT_SOCKET: u64 = 1;
const SCOPE_SIGNAL: u64 = 1 << 1;

/// What a rule grants below a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading, listing, executing.
    Read,
    /// All of it.
    Full,
}

/// Whether the path of a rule is a directory; the kernel refuses directory rights on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A directory, with all below it.
    Directory,
    /// Anything else.
    File,
}

#[repr(C)]
struct RulesetAttr {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

#[repr(C, packed)]
struct PathBeneathAttr {
    allowed_access: u64,
    parent_fd: i32,
}

/// Returns the version of Landlock that this kernel enforces; an error if it has none.
pub fn abi() -> io::Result<u32> {
    // SAFETY: with CREATE_RULESET_VERSION, a null pointer and size 0 the call only answers.
    let version = crate::check(unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            0 as libc::c_long,
            0,
            CREATE_RULESET_VERSION,
        )
    })?;
    u32::try_from(version).map_err(io::Error::other)
}

/// A set of rules that is not yet in force.
#[derive(Debug)]
pub struct Ruleset {
    fd: OwnedFd,
    handled: u64,
}

impl Ruleset {
    /// Starts a set under which everything on a path is refused that no rule grants, and with
    /// `tcp` false all TCP; signals and abstract sockets cannot leave where the kernel knows how.
    pub fn new(abi: u32, tcp: bool) -> io::Result<Self> {
        let handled = match abi {
            0 | 1 => (1 << 13) - 1,
            2 => (1 << 14) - 1,
            3 | 4 => (1 << 15) - 1,
            _ => (1 << 16) - 1,
        };
        let attr = RulesetAttr {
            handled_access_fs: handled,
            handled_access_net: if abi >= 4 && !tcp { NET_TCP } else { 0 },
            scoped: if abi >= 6 { SCOPE_ABSTRACT_SOCKET | SCOPE_SIGNAL } else { 0 },
        };
        // An older kernel takes a shorter structure, and a longer one if the rest is zero.
        let size = match abi {
            0..=3 => 8,
            4 | 5 => 16,
            _ => size_of::<RulesetAttr>(),
        };
        // SAFETY: `attr` is initialised, at least `size` bytes long and outlives the call.
        let fd = crate::check(unsafe {
            libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attr, size, 0)
        })?;
        // SAFETY: the call returned a new descriptor that nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd, handled })
    }

    /// Starts a set that refuses nothing but signals and abstract sockets across its border. Needs ABI 6.
    pub fn scopes_alone() -> io::Result<Self> {
        let attr = RulesetAttr {
            handled_access_fs: 0,
            handled_access_net: 0,
            scoped: SCOPE_ABSTRACT_SOCKET | SCOPE_SIGNAL,
        };
        // SAFETY: `attr` is initialised and outlives the call, which is told its size.
        let fd = crate::check(unsafe {
            libc::syscall(
                libc::SYS_landlock_create_ruleset,
                &raw const attr,
                size_of::<RulesetAttr>(),
                0,
            )
        })?;
        // SAFETY: the call returned a new descriptor that nothing else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd, handled: 0 })
    }

    /// Grants `access` to `place` and, if it is a directory, to everything below it.
    pub fn allow(&self, place: BorrowedFd<'_>, kind: Kind, access: Access) -> io::Result<()> {
        let rights = match access {
            Access::Read => EXECUTE | READ_FILE | READ_DIR,
            Access::Full => u64::MAX,
        };
        let possible = if kind == Kind::Directory { self.handled } else { FILE_RIGHTS };
        let attr = PathBeneathAttr {
            allowed_access: rights & possible & self.handled,
            parent_fd: place.as_raw_fd(),
        };
        // SAFETY: `attr` is the packed structure that RULE_PATH_BENEATH calls for and outlives the
        // call; `parent_fd` is open because it is borrowed.
        crate::check(unsafe {
            libc::syscall(
                libc::SYS_landlock_add_rule,
                self.fd.as_raw_fd(),
                RULE_PATH_BENEATH,
                &raw const attr,
                0,
            )
        })
        .map(drop)
    }

    /// Puts the rules in force on this thread and all it starts. Needs `no_new_privs`.
    pub fn restrict(self) -> io::Result<()> {
        // SAFETY: the call takes a descriptor that is open because it is owned, and flags.
        crate::check(unsafe {
            libc::syscall(libc::SYS_landlock_restrict_self, self.fd.as_raw_fd(), 0)
        })
        .map(drop)
    }
}
