//! The kernel made safe for Warren.
//!
//! Thin wrappers around the system calls that Warren needs and that no other crate has a door for,
//! in terms of owned and borrowed descriptors. There is no policy here: nothing in this crate knows
//! what a sandbox is. All of Warren's `unsafe` is in this crate.

#![cfg(target_os = "linux")]

pub mod cgroup;
pub mod cred;
pub mod fd;
pub mod heir;
pub mod keyring;
pub mod landlock;
pub mod memory;
pub mod mount;
pub mod net;
pub mod notify;
pub mod process;
pub mod seccomp;
pub mod socket;
pub mod spawn;
pub mod surface;
pub mod trace;

use std::io;

/// Turns the result of a raw system call into a number or the errno.
///
/// Every call made through it answers with a small number: a descriptor, a pid, a version, zero.
pub(crate) fn check(result: impl Into<libc::c_long>) -> io::Result<i32> {
    let result = result.into();
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        i32::try_from(result).map_err(io::Error::other)
    }
}
