//! A connection to a server inside a sandbox.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::net::{RecvFlags, SendFlags, Shutdown};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

/// A connection to a TCP port inside a sandbox: bytes both ways.
///
/// The socket came out of the sandbox, and whoever made it there may still hold it and change it.
/// So no call here relies on its being non-blocking: each says itself that it does not wait.
pub struct PortStream {
    stream: TcpStream,
    /// What must stay as long as the connection does.
    held: Vec<Box<dyn Send + Sync>>,
    /// Whether its end is to be told as a failure.
    resets: bool,
}

impl PortStream {
    /// Makes one of a connection that stands.
    pub fn new(stream: TcpStream) -> Self {
        Self { stream, held: Vec::new(), resets: false }
    }

    /// Closes it so that the other end hears of a failure, and not only of the end.
    pub fn reset(mut self) {
        self.resets = true;
    }

    /// Keeps `what` until the connection is closed.
    #[must_use]
    pub fn holding(mut self, what: impl Send + Sync + 'static) -> Self {
        self.held.push(Box::new(what));
        self
    }
}

impl fmt::Debug for PortStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortStream").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Drop for PortStream {
    fn drop(&mut self) {
        // With a time to linger, which whoever made the socket may have set, closing it would wait.
        let linger = self.resets.then_some(std::time::Duration::ZERO);
        let _ = rustix::net::sockopt::set_socket_linger(&self.stream, linger);
    }
}

impl AsyncRead for PortStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            let received = self.stream.try_io(Interest::READABLE, || {
                let room = buffer.initialize_unfilled();
                let (length, _) = rustix::net::recv(&self.stream, room, RecvFlags::DONTWAIT)?;
                Ok(length)
            });
            match received {
                Ok(length) => {
                    buffer.advance(length);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if again(&error) => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(context))?;
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let sent = self
                .stream
                .try_io(Interest::WRITABLE, || Ok(rustix::net::send(&self.stream, bytes, flags)?));
            match sent {
                Err(error) if again(&error) => {}
                result => return Poll::Ready(result),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(match rustix::net::shutdown(&self.stream, Shutdown::Write) {
            // The other end was faster.
            Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(()),
            Err(error) => Err(error.into()),
        })
    }
}

/// Tells whether there was nothing to do after all. `try_io` has then noted that.
fn again(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (PortStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (PortStream::new(ours), listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn bytes_go_both_ways_and_each_way_ends_by_itself() {
        let (mut ours, mut theirs) = pair().await;
        ours.write_all(b"there").await.unwrap();
        ours.shutdown().await.unwrap();
        let mut text = String::new();
        theirs.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "there");
        theirs.write_all(b"and back").await.unwrap();
        drop(theirs);
        text.clear();
        ours.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "and back");
    }

    /// Whoever holds a duplicate shares its flags.
    #[tokio::test]
    async fn a_socket_made_blocking_by_another_holder_blocks_nobody() {
        let (mut ours, mut theirs) = pair().await;
        rustix::io::ioctl_fionbio(&ours.stream, false).unwrap();
        let mut byte = [0];
        let patience = std::time::Duration::from_millis(20);
        assert!(tokio::time::timeout(patience, ours.read_exact(&mut byte)).await.is_err());
        // Far more than the kernel takes without a reader.
        let lots = vec![0; 64 << 20];
        assert!(tokio::time::timeout(patience * 10, ours.write_all(&lots)).await.is_err());
        theirs.write_all(b"x").await.unwrap();
        ours.read_exact(&mut byte).await.unwrap();
        assert_eq!(&byte, b"x", "control: it still works");
    }

    #[tokio::test]
    async fn what_is_held_goes_with_the_connection_and_no_earlier() {
        let (ours, _theirs) = pair().await;
        let held = Arc::new(());
        let ours = ours.holding(Arc::clone(&held));
        assert_eq!(Arc::strong_count(&held), 2);
        drop(ours);
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
