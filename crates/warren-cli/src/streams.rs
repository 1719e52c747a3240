//! Bytes between the caller's streams and the command's.
//!
//! The caller's streams are shared with whoever else has them, so they are never made
//! non-blocking: each is asked with poll(2) first, and gets no more than it takes without a wait.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::unix::pipe;

/// How much is read at once.
const CHUNK: usize = 64 * 1024;
/// How much is read until that is too little: memory that is never used costs time as well.
const FIRST_CHUNK: usize = 4 << 10;
/// What a pipe that is ready takes for certain (PIPE_BUF).
const SURE: usize = 4096;

/// A descriptor that may be shared and may block.
#[derive(Debug)]
pub(crate) enum Stream<F: AsFd + AsRawFd> {
    /// One that says when it is ready.
    Waiting(AsyncFd<F>),
    /// A file, or the like, which always is.
    Always(F),
}

impl<F: AsFd + AsRawFd> Stream<F> {
    #[expect(
        deprecated,
        reason = "its successor is unsafe, for types whose descriptor may change; `AsFd` rules that out"
    )]
    pub(crate) fn new(fd: F, interest: Interest) -> Self {
        match AsyncFd::try_with_interest(fd, interest) {
            Ok(fd) => Self::Waiting(fd),
            Err(error) => Self::Always(error.into_parts().0),
        }
    }

    fn fd(&self) -> &F {
        match self {
            Self::Waiting(fd) => fd.get_ref(),
            Self::Always(fd) => fd,
        }
    }

    async fn ready(&self, interest: Interest, flags: PollFlags) -> io::Result<()> {
        let Self::Waiting(fd) = self else { return Ok(()) };
        while !is_ready(fd.get_ref(), flags)? {
            let mut guard = fd.ready(interest).await?;
            // Only the kernel knows: whoever shares the descriptor may have been faster.
            if is_ready(fd.get_ref(), flags)? {
                break;
            }
            guard.clear_ready();
        }
        Ok(())
    }

    /// Reads what there is; 0 is the end.
    pub(crate) async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.ready(Interest::READABLE, PollFlags::IN).await?;
            match rustix::io::read(self.fd(), &mut *buffer) {
                Ok(length) => return Ok(length),
                // The other side of a terminal is closed.
                Err(Errno::IO) => return Ok(0),
                Err(Errno::INTR | Errno::AGAIN) => tokio::task::yield_now().await,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Writes all of it.
    pub(crate) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.ready(Interest::WRITABLE, PollFlags::OUT).await?;
            let most = match self {
                Self::Waiting(_) => SURE,
                Self::Always(_) => CHUNK,
            };
            match rustix::io::write(self.fd(), &bytes[..bytes.len().min(most)]) {
                Ok(length) => bytes = &bytes[length..],
                Err(Errno::INTR | Errno::AGAIN) => tokio::task::yield_now().await,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// An error or a hang-up counts as ready: the call that follows says which.
fn is_ready(fd: &impl AsFd, flags: PollFlags) -> io::Result<bool> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut [PollFd::new(fd, flags)], Some(&now)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Where a command's output comes from.
#[derive(Debug)]
pub(crate) enum Source {
    Pipe(pipe::Receiver),
    Terminal(Rc<Stream<OwnedFd>>),
}

impl Source {
    async fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Pipe(pipe) => pipe.read(buffer).await,
            Self::Terminal(terminal) => terminal.read(buffer).await,
        }
    }
}

/// Where the caller's input goes.
#[derive(Debug)]
pub(crate) enum Target {
    Pipe(pipe::Sender),
    Terminal(Rc<Stream<OwnedFd>>),
}

/// Where a command's output goes.
#[derive(Debug)]
pub(crate) enum Sink<F: AsFd + AsRawFd> {
    /// To a stream of the caller's.
    Caller(Stream<F>),
    /// Into memory.
    Kept(RefCell<Vec<u8>>),
}

impl<F: AsFd + AsRawFd> Sink<F> {
    async fn take(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Caller(stream) => stream.write_all(bytes).await,
            Self::Kept(kept) => {
                kept.borrow_mut().extend_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// Returns what was kept in memory.
    pub(crate) fn kept(self) -> Vec<u8> {
        match self {
            Self::Caller(_) => Vec::new(),
            Self::Kept(kept) => kept.into_inner(),
        }
    }
}

/// What a command may still write.
#[derive(Debug)]
pub(crate) struct Allowance {
    left: Cell<u64>,
}

/// A command wrote more than it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooMuch;

impl Allowance {
    pub(crate) fn new(most: Option<u64>) -> Self {
        Self { left: Cell::new(most.unwrap_or(u64::MAX)) }
    }

    /// Returns how much of `length` is still allowed.
    fn spend(&self, length: usize) -> usize {
        let allowed = usize::try_from(self.left.get()).unwrap_or(usize::MAX).min(length);
        self.left.set(self.left.get() - allowed as u64);
        allowed
    }
}

/// Hands on output until its end, or until there is too much of it.
///
/// A reader that has gone ends this too. The command finds its stream closed when it next writes,
/// as it would have without us.
pub(crate) async fn copy_out<F: AsFd + AsRawFd>(
    source: Option<Source>,
    sink: &Sink<F>,
    allowance: &Allowance,
) -> Result<(), TooMuch> {
    let Some(mut source) = source else { return Ok(()) };
    let mut buffer = vec![0; FIRST_CHUNK];
    while let Ok(length @ 1..) = source.read(&mut buffer).await {
        let allowed = allowance.spend(length);
        if sink.take(&buffer[..allowed]).await.is_err() {
            return Ok(());
        }
        if allowed < length {
            return Err(TooMuch);
        }
        grow(&mut buffer, length);
    }
    Ok(())
}

/// Hands on input until its end; the command then finds the end of its own. It need not read any.
pub(crate) async fn copy_in<F: AsFd + AsRawFd>(stream: Stream<F>, target: Option<Target>) {
    let Some(mut target) = target else { return };
    let mut buffer = vec![0; FIRST_CHUNK];
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        let written = match &mut target {
            Target::Pipe(pipe) => pipe.write_all(&buffer[..length]).await,
            Target::Terminal(terminal) => terminal.write_all(&buffer[..length]).await,
        };
        if written.is_err() {
            return;
        }
        grow(&mut buffer, length);
    }
}

/// Makes room for more where what was read filled all there was.
fn grow(buffer: &mut Vec<u8>, length: usize) {
    if length == buffer.len() && length < CHUNK {
        buffer.resize(CHUNK, 0);
    }
}
