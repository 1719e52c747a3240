//! Pairs of sockets that keep the borders of messages and carry descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    recvmsg, sendmsg, socket_with, socketpair,
};

/// How many descriptors one message may carry: as many as the kernel takes (SCM_MAX_FD).
pub const MAX_FDS: usize = 253;

/// Returns two connected sockets; what one sends as one message the other receives as one.
///
/// Both are non-blocking and close-on-exec. See unix(7), SOCK_SEQPACKET.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Listens for conversations at `name` in the directory `dir`, which must not exist yet.
///
/// The directory is named by its descriptor, so that its own path may be of any length. Whoever
/// may enter it may connect.
pub fn listen(dir: impl AsFd, name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &address(dir.as_fd(), name)?)?;
    rustix::net::listen(&socket, 16)?;
    Ok(socket)
}

/// Connects to what listens at `name` in the directory `dir`.
pub fn connect(dir: impl AsFd, name: &str) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &address(dir.as_fd(), name)?)?;
    Ok(socket)
}

/// Takes one conversation that somebody began.
pub fn accept(listener: impl AsFd) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::accept_with(listener, flags)?)
}

fn address(dir: BorrowedFd<'_>, name: &str) -> io::Result<SocketAddrUnix> {
    let number = dir.as_raw_fd();
    Ok(SocketAddrUnix::new(format!("/proc/self/fd/{number}/{name}"))?)
}

/// Sends one message with descriptors. The peer gets all of it or nothing.
pub fn send(socket: impl AsFd, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    // NOSIGNAL: a peer that is gone is an error to handle, not a signal that ends the process.
    sendmsg(socket, &[IoSlice::new(payload)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Returns how long the next message is, and leaves it there; 0 when the peer is gone.
pub fn next_length(socket: impl AsFd) -> io::Result<usize> {
    let flags = RecvFlags::PEEK | RecvFlags::TRUNC;
    let (_, length) = rustix::net::recv(socket, &mut [0; 0][..], flags)?;
    Ok(length)
}

/// Receives one message into `buffer`; `None` when the peer is gone.
///
/// A message that does not fit `buffer` is an error: it was not sent by us. One whose descriptors this process has no room
/// for is lost, and that is EMFILE; the next may arrive.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message =
        recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    if message.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "an oversize message"));
    }
    // Nobody can send more of them than there is space for here: the kernel takes no more.
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE.into());
    }
    Ok((message.bytes > 0).then_some((message.bytes, fds)))
}

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    #[test]
    fn a_message_arrives_whole_with_its_descriptors() {
        let (a, b) = pair().unwrap();
        let (mut payload, extra) = ([0u8; 64], a.try_clone().unwrap());
        send(&a, b"one", &[extra.as_fd()]).unwrap();
        send(&a, b"three", &[]).unwrap();
        let (length, fds) = receive(&b, &mut payload).unwrap().unwrap();
        assert_eq!((&payload[..length], fds.len()), (&b"one"[..], 1));
        let (length, fds) = receive(&b, &mut payload).unwrap().unwrap();
        assert_eq!((&payload[..length], fds.len()), (&b"three"[..], 0));
        drop((a, extra));
    }

    #[test]
    fn as_many_descriptors_as_are_promised_arrive() {
        let (a, b) = pair().unwrap();
        send(&a, b"all", &[a.as_fd(); MAX_FDS]).unwrap();
        let (_, fds) = receive(&b, &mut [0; 8]).unwrap().unwrap();
        assert_eq!(fds.len(), MAX_FDS);
        let error = send(&a, b"more", &[a.as_fd(); MAX_FDS + 1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_message_without_room_for_its_descriptors_is_lost_alone_and_said_to_be() {
        let (a, b) = pair().unwrap();
        for message in [&b"first"[..], b"next"] {
            send(&a, message, &[a.as_fd(), a.as_fd()]).unwrap();
        }
        let free = a.try_clone().unwrap();
        let most = u64::try_from(free.as_raw_fd()).unwrap() + 1;
        drop(free);
        let had = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..had }).unwrap();
        let lost = receive(&b, &mut [0; 8]);
        setrlimit(Resource::Nofile, had).unwrap();
        assert_eq!(Errno::from_io_error(&lost.unwrap_err()), Some(Errno::MFILE));
        let (length, fds) = receive(&b, &mut [0; 8]).unwrap().unwrap();
        assert_eq!((length, fds.len()), (4, 2));
    }

    #[test]
    fn an_oversize_message_is_an_error_and_a_closed_peer_is_not() {
        let (a, b) = pair().unwrap();
        send(&a, &[7; 100], &[]).unwrap();
        let error = receive(&b, &mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(a);
        assert!(receive(&b, &mut [0; 10]).unwrap().is_none());
    }
}
