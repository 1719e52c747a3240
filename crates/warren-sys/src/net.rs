//! Network interfaces.
#![expect(unsafe_code, reason = "interface ioctls have no safe wrapper")]

use std::io;
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

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
