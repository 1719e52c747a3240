//! Network interfaces.
#![expect(unsafe_code, reason = "interface ioctls have no safe wrapper")]

use std::io;
use std::os::fd::AsRawFd;

use rustix::net::{
    AddressFamily, Ipv4Addr, SocketAddrV4, SocketFlags, SocketType, connect, socket_with,
};

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
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) };
    crate::check(result).map(drop)
}

/// Asks this network namespace for a way out, and sends nothing. `ENETUNREACH`: there is none.
///
/// A datagram socket is connected by a route alone. The address is nobody's: RFC 5737.
pub fn find_way_out() -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    Ok(connect(&socket, &SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 9))?)
}
