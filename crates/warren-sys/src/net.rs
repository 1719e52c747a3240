//! Network interfaces, which network a socket is in, and where a network leads to.
#![expect(unsafe_code, reason = "interface ioctls and SO_NETNS_COOKIE have no safe wrapper")]

mod divert;
mod netlink;
mod route;

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

pub use divert::{divert_tcp, listen_transparently};
pub use route::{Lead, Range, Way, lead, route};

/// By number, from the kernel's `sockios.h`: C libraries do not agree on its type.
const SIOCSIFFLAGS: libc::Ioctl = 0x8914;

/// Brings up the loopback interface of this network namespace. See netdevice(7).
#[expect(clippy::cast_possible_truncation, reason = "flags that fit the narrow field of ifreq")]
pub fn loopback_up() -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: `ifreq` is plain data for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo\0") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    // SAFETY: SIOCSIFFLAGS reads one `ifreq`, which is initialised and outlives the call; its name
    // is terminated.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCSIFFLAGS, &raw const request) };
    crate::check(result).map(drop)
}

/// Returns a number that is one network namespace's alone, that of `socket`; `None` where the
/// kernel does not tell. See socket(7), SO_NETNS_COOKIE, Linux 5.14.
pub fn namespace_of(socket: impl AsFd) -> io::Result<Option<u64>> {
    let mut cookie = 0_u64;
    let mut length = libc::socklen_t::try_from(size_of::<u64>()).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open because it is borrowed; the kernel writes at most `length`
    // bytes to `cookie`, which has that size, and the length to `length`. Both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    match crate::check(result) {
        Ok(_) => Ok(Some(cookie)),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the same of the network namespace of this thread.
pub fn own_namespace() -> io::Result<Option<u64>> {
    namespace_of(socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}
