//! Terminals of commands.
//!
//! Init makes them, in the sandbox's own `/dev/pts`. Where that is the host's and the sandbox may open nothing there, because
//! what is another's is the same user's, whoever asks for the command makes its terminal and sends both sides along.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::pty::OpenptFlags;

use crate::plan::WORKLOAD_ID;

/// Both sides of a terminal.
#[derive(Debug)]
pub struct Terminal {
    /// What whoever sits in front of it has.
    pub outer: OwnedFd,
    /// What the command has.
    pub inner: OwnedFd,
}

impl Terminal {
    /// Makes one, where this process is.
    pub fn open(rows: u16, columns: u16) -> io::Result<Self> {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let outer = rustix::pty::openpt(flags)?;
        rustix::pty::unlockpt(&outer)?;
        let inner = match rustix::pty::ioctl_tiocgptpeer(&outer, flags) {
            // gVisor, where nobody but init has made anything in `/dev`.
            Err(Errno::NOTTY) => {
                let name = rustix::pty::ptsname(&outer, Vec::new())?;
                let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
                let inner = rustix::fs::open(name.as_c_str(), flags, Mode::empty())?;
                // It is of whoever made it, which is nobody that a command is.
                let user = Some(Uid::from_raw(WORKLOAD_ID));
                rustix::fs::fchown(&inner, user, None)?;
                inner
            }
            other => other?,
        };
        resize(&outer, rows, columns)?;
        Ok(Self { outer, inner })
    }

    /// Takes the one whose sides came with a request, or makes one.
    pub(crate) fn given_or_open(
        fds: &mut Vec<OwnedFd>,
        rows: u16,
        columns: u16,
    ) -> io::Result<Self> {
        if fds.len() < 2 {
            return Self::open(rows, columns);
        }
        let outer = fds.remove(0);
        Ok(Self { outer, inner: fds.remove(0) })
    }
}

/// Sets the size of a terminal.
pub(crate) fn resize(terminal: &OwnedFd, rows: u16, columns: u16) -> io::Result<()> {
    let size =
        rustix::termios::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(terminal, size)?)
}
