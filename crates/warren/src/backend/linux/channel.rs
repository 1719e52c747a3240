//! An asynchronous socket for the messages of `warren_init::protocol`.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::unix::AsyncFd;
use warren_init::protocol;
use warren_sys::socket;

/// Has the runtime watch a descriptor of ours.
#[expect(
    deprecated,
    reason = "unsound only for types that lie about their descriptor; an OwnedFd does not, and the \
              replacement is unsafe to call"
)]
pub(crate) fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
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
            let mut guard = self.0.writable().await?;
            let sent = guard.try_io(|socket| protocol::send(socket.get_ref(), message, fds));
            if let Ok(result) = sent {
                return result;
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
