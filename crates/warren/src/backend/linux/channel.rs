//! An asynchronous socket for the messages of `warren_init::protocol`.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use warren_init::protocol;
use warren_sys::socket;

/// Has the runtime watch what comes from a descriptor of ours.
///
/// That alone: there is room in it as soon as it is watched, and again whenever the other end has read
/// something, and either would wake up a thread of ours just when init has something to do.
pub(crate) fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    watch_for(fd, Interest::READABLE)
}

/// Waits until there is room in a socket that was full.
pub(crate) async fn room_in(socket: &OwnedFd) -> io::Result<()> {
    let again = watch_for(socket.try_clone()?, Interest::WRITABLE)?;
    again.writable().await?.retain_ready();
    Ok(())
}

#[expect(
    deprecated,
    reason = "unsound only for types that lie about their descriptor; an OwnedFd does not, and the \
              replacement is unsafe to call"
)]
fn watch_for(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, interest)
}

/// Our end of a conversation with the launcher or with an init.
#[derive(Debug)]
pub(crate) struct Channel(AsyncFd<OwnedFd>);

impl Channel {
    /// Returns our end, and the other one to give away.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = socket::pair()?;
        Ok((Self(watch(ours)?), theirs))
    }

    /// Goes on with a conversation that somebody else began.
    pub(crate) fn over(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self(watch(socket)?))
    }

    /// Sends one message with descriptors.
    pub(crate) async fn send(
        &self,
        message: &impl Serialize,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        loop {
            // Nearly always there is room at once.
            match protocol::send(self.0.get_ref(), message, fds) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    room_in(self.0.get_ref()).await?;
                }
                result => return result,
            }
        }
    }

    /// Sends one message if that can be done at once.
    pub(crate) fn try_send(&self, message: &impl Serialize) {
        // What cannot be said now is not said: the other end is gone, or hears too much already.
        let _ = protocol::send(self.0.get_ref(), message, &[]);
    }

    /// Likewise, with descriptors.
    pub(crate) fn try_send_with(&self, message: &impl Serialize, fds: &[BorrowedFd<'_>]) {
        let _ = protocol::send(self.0.get_ref(), message, fds);
    }

    /// Receives one message; `None` when the other end is gone. What arrives was written by an
    /// attacker: it is short, complete and of the right form, or it is an error.
    pub(crate) async fn receive<T: DeserializeOwned>(
        &self,
    ) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        loop {
            let mut guard = self.0.readable().await?;
            match guard.try_io(|socket| protocol::receive(socket.get_ref())) {
                // The other end closed without reading all that we sent. The kernel says so once;
                // what it had sent us before is still to be read.
                Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset => {}
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }
}
