//! Descriptors: closing what was inherited, sealed memory files, locks on byte ranges.
#![expect(unsafe_code, reason = "close_range and OFD locks have no safe wrapper")]

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

/// Closes every descriptor of this process except those in `keep`.
///
/// For a process that was just forked and is about to become something else: whoever owns one of
/// the closed descriptors must never use it again. See close_range(2), Linux 5.9.
pub fn close_all_except(keep: &[&OwnedFd]) -> io::Result<()> {
    let mut kept: Vec<u32> = keep.iter().map(|fd| fd.as_raw_fd().unsigned_abs()).collect();
    kept.sort_unstable();
    let mut first = 0;
    for fd in kept {
        if fd > first {
            close_range(first, fd - 1)?;
        }
        first = fd + 1;
    }
    close_range(first, LAST)
}

/// The largest number that a descriptor can have. gVisor refuses a larger one as the end of a range.
pub(crate) const LAST: u32 = i32::MAX.unsigned_abs();

fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: close_range reads three integers and no memory of ours. Values of type `OwnedFd` for
    // the closed numbers may still exist in this (forked) process; the caller promises not to use
    // them, and it leaves by exec or exit, so that no `Drop` closes a number a second time.
    crate::check(unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }).map(drop)
}

/// Returns a memory file with `contents` that nobody can ever change, fit to be executed.
pub fn sealed(name: &str, contents: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // MFD_EXEC is known since Linux 6.3, and there silences a warning; older kernels refuse it.
    let fd = rustix::fs::memfd_create(name, flags | MemfdFlags::EXEC)
        .or_else(|_| rustix::fs::memfd_create(name, flags))?;
    let mut file = File::from(fd);
    file.write_all(contents)?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// Duplicates `fd` onto descriptor `number`, without the close-on-exec flag.
///
/// Meant for 0, 1 and 2 of a child that is about to exec.
pub fn install_as(fd: impl AsFd, number: i32) -> io::Result<()> {
    let raw = fd.as_fd().as_raw_fd();
    if raw == number {
        return Ok(rustix::io::fcntl_setfd(fd, rustix::io::FdFlags::empty())?);
    }
    // SAFETY: dup2 takes two integers. Replacing `number` may pull it from under an `OwnedFd`; the
    // caller names a standard stream, which no `OwnedFd` of Warren holds.
    crate::check(unsafe { libc::dup2(raw, number) }).map(drop)
}

/// Opens `path` on each of 0, 1 and 2 that is closed, so that nothing else lands there.
pub fn occupy_streams(path: &CStr) -> io::Result<()> {
    loop {
        let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        if fd.as_raw_fd() > 2 {
            return Ok(());
        }
        // It stays open; the standard streams belong to the process, not to a value.
        std::mem::forget(fd);
    }
}

/// Takes over descriptor `number`, which this process was started with.
///
/// Returns an error if it is not open. Call it at most once for each number.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: F_GETFD only asks about the descriptor.
    crate::check(unsafe { libc::fcntl(number, libc::F_GETFD) })?;
    // SAFETY: the descriptor is open, as was just asked, and its number came from the process that
    // started us, so nothing in this process owns it yet.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Tries to lock one byte of `file` for its open file description; `false` if someone holds it.
///
/// The lock lives as long as any duplicate of the descriptor, across fork and exec, and needs no
/// clean-up after a crash. See fcntl(2), "Open file description locks".
#[expect(
    clippy::cast_possible_truncation,
    reason = "constants that fit the narrow fields of flock"
)]
pub fn try_lock_byte(file: impl AsFd, offset: i64) -> io::Result<bool> {
    let lock = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: offset,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: F_OFD_SETLK reads the flock structure, which is initialised and outlives the call.
    let result =
        unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if result == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_sealed_file_cannot_be_written_or_resized() {
        let fd = sealed("test", b"contents").unwrap();
        let mut file = File::from(fd);
        assert_eq!(file.write(b"x").unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(file.set_len(0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        let mut text = String::new();
        std::io::Seek::rewind(&mut file).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "contents");
    }

    #[test]
    fn a_locked_byte_is_refused_to_another_description_until_all_duplicates_are_gone() {
        let dir = std::env::temp_dir().join(format!("warren-lock-{}", std::process::id()));
        let first = File::create(&dir).unwrap();
        let second = File::create(&dir).unwrap();
        assert!(try_lock_byte(&first, 7).unwrap());
        assert!(!try_lock_byte(&second, 7).unwrap());
        assert!(try_lock_byte(&second, 8).unwrap(), "control: another byte is free");
        let duplicate = first.try_clone().unwrap();
        drop(first);
        assert!(!try_lock_byte(&second, 7).unwrap());
        drop(duplicate);
        assert!(try_lock_byte(&second, 7).unwrap());
        std::fs::remove_file(dir).unwrap();
    }
}
