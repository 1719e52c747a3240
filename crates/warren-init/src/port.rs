//! The way in to a server inside: init connects where the server is, and hands the socket out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, connect as connect_to, ipproto, socket_with,
};

use crate::protocol::{self, Done, Loopback};

/// Begins a connection to `port` and answers with its socket.
///
/// It is not waited for: on a full backlog that could take minutes, and init has others to serve.
/// Whoever gets the socket waits until it can be written to, and then asks for its error.
pub(crate) fn connect(to: Loopback, port: u16, reply: &OwnedFd) {
    // Nobody is there to be told if this fails.
    let _ = match begin(to, port) {
        Ok(socket) => protocol::send(reply, &Done(0), &[socket.as_fd()]),
        Err(errno) => protocol::send(reply, &Done(errno.raw_os_error()), &[]),
    };
}

fn begin(to: Loopback, port: u16) -> Result<OwnedFd, Errno> {
    let (family, address) = match to {
        Loopback::V4 => (AddressFamily::INET, IpAddr::from(Ipv4Addr::LOCALHOST)),
        Loopback::V6 => (AddressFamily::INET6, IpAddr::from(Ipv6Addr::LOCALHOST)),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    match connect_to(&socket, &SocketAddr::new(address, port)) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}
