//! Connections to servers inside: init begins one, and the socket it hands out is not trusted.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{
    set_socket_linger, set_tcp_nodelay, socket_domain, socket_protocol, socket_type,
};
use rustix::net::{AddressFamily, SocketType, ipproto};
use tokio::net::TcpStream;
use warren_init::protocol::{Done, Loopback, Request};
use warren_sys::net;

use super::channel::Channel;
use super::sandbox::LinuxSandbox;
use crate::{PortStream, Result, SandboxError};

/// How long a connection may take: it is made at once, or the server's backlog is full.
const PATIENCE: Duration = Duration::from_secs(5);

/// Connects to a port of the sandbox.
pub(super) async fn connect(sandbox: &LinuxSandbox, port: u16) -> Result<PortStream> {
    if port == 0 {
        return Err(SandboxError::invalid("port", "0 is no port", "a port is from 1 to 65535"));
    }
    match tokio::time::timeout(PATIENCE, try_each(sandbox, port)).await {
        Ok(connected) => connected,
        Err(_) => Err(SandboxError::Timeout {
            what: format!("connecting to port {port} inside the sandbox"),
            after: PATIENCE,
        }),
    }
}

async fn try_each(sandbox: &LinuxSandbox, port: u16) -> Result<PortStream> {
    let mut refused = None;
    for to in [Loopback::V4, Loopback::V6] {
        let outcome = match sandbox.begin_connection(to, port).await? {
            Ok(socket) => finish(socket, to, port).await,
            Err(errno) => Err(io::Error::from_raw_os_error(errno)),
        };
        let source = match outcome {
            Ok(stream) => return Ok(PortStream::new(stream)),
            Err(error) => error,
        };
        match source.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::CONNREFUSED) => refused = refused.or(Some(source)),
            // The filter has no such sockets, or Landlock no TCP. Nothing inside can listen either.
            Some(Errno::AFNOSUPPORT | Errno::ACCESS | Errno::PERM) if to == Loopback::V4 => {
                return Err(SandboxError::Unsupported {
                    feature: "connections to ports under this profile".to_owned(),
                    backend: crate::Sandbox::capabilities(sandbox).backend.clone(),
                    hint: "the profile `strict` has no TCP; make the sandbox with `default`"
                        .to_owned(),
                });
            }
            // A kernel without IPv6.
            Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL | Errno::NETUNREACH)
                if to == Loopback::V6 => {}
            _ => {
                let step = format!("connect to port {port} inside the sandbox");
                return Err(SandboxError::Step { step, path: None, source });
            }
        }
    }
    let source = refused.unwrap_or_else(|| io::ErrorKind::ConnectionRefused.into());
    Err(SandboxError::PortClosed { port, source })
}

/// Asks init to begin a connection; gives its socket or errno, or `None` if init is gone.
pub(super) async fn begin(
    control: &Channel,
    to: Loopback,
    port: u16,
) -> io::Result<Option<Result<OwnedFd, i32>>> {
    let (ours, theirs) = Channel::pair()?;
    control.send(&Request::Connect { to, port }, &[theirs.as_fd()]).await?;
    drop(theirs);
    let Some((Done(errno), mut fds)) = ours.receive::<Done>().await? else { return Ok(None) };
    match (errno, fds.pop()) {
        (0, Some(socket)) if fds.is_empty() => Ok(Some(Ok(socket))),
        (1.., None) => Ok(Some(Err(errno))),
        _ => Err(nonsense("answered something else than a socket")),
    }
}

fn nonsense(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Waits until the connection stands, and makes sure that it is the one that was asked for.
async fn finish(socket: OwnedFd, to: Loopback, port: u16) -> io::Result<TcpStream> {
    check_kind(&socket, to)?;
    // Whatever was set inside must neither make closing wait nor hold back what is small.
    set_socket_linger(&socket, None)?;
    set_tcp_nodelay(&socket, true)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    let stream = TcpStream::from_std(socket.into())?;
    stream.writable().await?;
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    let address: IpAddr = match to {
        Loopback::V4 => Ipv4Addr::LOCALHOST.into(),
        Loopback::V6 => Ipv6Addr::LOCALHOST.into(),
    };
    let peer = stream.peer_addr()?;
    if peer != SocketAddr::new(address, port) {
        return Err(nonsense("a socket that is connected elsewhere"));
    }
    if stream.local_addr()? == peer {
        // Where nobody listens on a port that the kernel gives out itself, it can happen to give
        // that very port to us, and the socket is then connected to itself (RFC 9293, 3.5).
        return Err(Errno::CONNREFUSED.into());
    }
    Ok(stream)
}

/// Refuses a descriptor that is no TCP socket, or one of the host's own network.
fn check_kind(socket: &OwnedFd, to: Loopback) -> io::Result<()> {
    let family = match to {
        Loopback::V4 => AddressFamily::INET,
        Loopback::V6 => AddressFamily::INET6,
    };
    let is_tcp = socket_domain(socket)? == family
        && socket_type(socket)? == SocketType::STREAM
        && socket_protocol(socket)? == Some(ipproto::TCP);
    if !is_tcp {
        return Err(nonsense("a socket of another kind"));
    }
    match net::namespace_of(socket)? {
        Some(there) if Some(there) == net::own_namespace()? => {
            Err(nonsense("a socket of the host's own network"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(fd: impl Into<OwnedFd>) -> Result<(), String> {
        check_kind(&fd.into(), Loopback::V4).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_no_tcp_socket_of_another_network_is_refused() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(kind(listener).unwrap_err(), "a socket of the host's own network");
        let datagrams = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(kind(datagrams).unwrap_err(), "a socket of another kind");
        let unix = std::os::unix::net::UnixStream::pair().unwrap().0;
        assert_eq!(kind(unix).unwrap_err(), "a socket of another kind");
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(kind(file).unwrap_err().contains("socket"), "ENOTSOCK");
    }
}
