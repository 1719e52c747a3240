//! Who is connected, and who has to go when there is no room.
//!
//! A connection is busy while a request of somebody we know is under way, until the last byte of its
//! answer is out. All others are idle, however much they send, and the one that has been for longest
//! makes room for the next: whoever opens connections without a key can only push out their own.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::Version;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};
use tokio_util::sync::CancellationToken;

use crate::server::{Connection, Hangup};

/// For how long nobody may read what we write.
const STALL: Duration = Duration::from_secs(20);
/// For how long what is still being sent to us is thrown away, so that our last answer is read:
/// to close before that would be a reset.
const LINGER: Duration = Duration::from_secs(1);
/// How much of it.
const LINGER_BYTES: usize = 8 << 20;

/// The connections of a listener.
#[derive(Debug, Clone, Default)]
pub(crate) struct Crowd(Arc<Mutex<Guests>>);

#[derive(Debug, Default)]
struct Guests {
    by_number: HashMap<u64, Guest>,
    clock: u64,
}

#[derive(Debug)]
struct Guest {
    /// How many answers are under way.
    busy: u32,
    /// Since when there is none, by our own clock.
    idle_since: u64,
    leave: CancellationToken,
}

/// A connection's place. Dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Place {
    seat: Seat,
    /// Cancelled when another needs the place more.
    pub(crate) leave: CancellationToken,
}

/// What the requests of a connection know of its place.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    crowd: Crowd,
    number: u64,
}

/// Says that an answer is under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct Busy(Seat);

impl Crowd {
    fn guests(&self) -> MutexGuard<'_, Guests> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a connection a place among so many, or none if all the others are busy.
    pub(crate) fn enter(&self, room: usize) -> Option<Place> {
        let mut guests = self.guests();
        if guests.by_number.len() >= room && !guests.shed() {
            return None;
        }
        guests.clock += 1;
        let (number, leave) = (guests.clock, CancellationToken::new());
        let guest = Guest { busy: 0, idle_since: number, leave: leave.clone() };
        guests.by_number.insert(number, guest);
        Some(Place { seat: Seat { crowd: self.clone(), number }, leave })
    }

    /// Drops the connection that has been idle for longest, if there is one.
    pub(crate) fn shed(&self) {
        self.guests().shed();
    }
}

impl Guests {
    fn shed(&mut self) -> bool {
        let idle = self.by_number.iter().filter(|(_, guest)| guest.busy == 0);
        let longest = idle.min_by_key(|(_, guest)| guest.idle_since).map(|(number, _)| *number);
        let shed = longest.and_then(|number| self.by_number.remove(&number));
        shed.inspect(|guest| guest.leave.cancel()).is_some()
    }
}

impl Place {
    pub(crate) fn seat(&self) -> Seat {
        self.seat.clone()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.seat.crowd.guests().by_number.remove(&self.seat.number);
    }
}

impl Seat {
    /// Keeps the connection while an answer is under way.
    pub(crate) fn occupy(self) -> Busy {
        if let Some(guest) = self.crowd.guests().by_number.get_mut(&self.number) {
            guest.busy += 1;
        }
        Busy(self)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut guests = self.0.crowd.guests();
        guests.clock += 1;
        let now = guests.clock;
        if let Some(guest) = guests.by_number.get_mut(&self.0.number) {
            guest.busy -= 1;
            guest.idle_since = now;
        }
    }
}

/// A body that holds on to something until it is out.
pub(crate) struct Holding<T> {
    body: Body,
    _held: T,
}

impl<T: Send + Unpin + 'static> Holding<T> {
    pub(crate) fn body(body: Body, held: T) -> Body {
        Body::new(Self { body, _held: held })
    }
}

impl<T: Unpin> HttpBody for Holding<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A connection that does not wait for ever to be read, and whose last answer can be.
#[derive(Debug)]
pub(crate) struct Patient<S: Connection> {
    stream: S,
    hangup: Hangup,
    stalled: Option<Pin<Box<Sleep>>>,
    is_wide: bool,
    lingering: Option<Pin<Box<Sleep>>>,
    thrown_away: usize,
}

impl<S: Connection> Patient<S> {
    pub(crate) fn new(stream: S) -> Self {
        let hangup = Hangup::default();
        Self { stream, hangup, stalled: None, is_wide: false, lingering: None, thrown_away: 0 }
    }

    /// Finds out which HTTP the other end wants to speak.
    pub(crate) async fn agree(&mut self) -> io::Result<Version> {
        self.stream.agree().await
    }

    /// Returns what cuts it off, once it is dropped.
    pub(crate) fn hangup(&self) -> Hangup {
        self.hangup.clone()
    }

    /// Gives a write that has to wait so long and no longer.
    fn bounded<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        if !self.is_wide {
            // Only now: most connections never have so much to say.
            self.is_wide = true;
            self.stream.widen();
        }
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(STALL)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: Connection> Drop for Patient<S> {
    fn drop(&mut self) {
        if self.hangup.is_now() {
            self.stream.reset();
        }
    }
}

impl<S: Connection> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: Connection> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.bounded(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.bounded(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.bounded(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.lingering.is_none() {
            ready!(Pin::new(&mut this.stream).poll_shutdown(cx))?;
        }
        let lingering = this.lingering.get_or_insert_with(|| Box::pin(sleep(LINGER)));
        while this.thrown_away < LINGER_BYTES && lingering.as_mut().poll(cx).is_pending() {
            let mut bytes = [0; 8 << 10];
            let mut buffer = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut buffer))?;
            if buffer.filled().is_empty() {
                break;
            }
            this.thrown_away += buffer.filled().len();
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[test]
    fn the_one_that_was_idle_for_longest_makes_room_and_a_busy_one_never_does() {
        let crowd = Crowd::default();
        let (first, second) = (crowd.enter(2).unwrap(), crowd.enter(2).unwrap());
        let busy = first.seat().occupy();
        let third = crowd.enter(2).unwrap();
        assert!(second.leave.is_cancelled() && !first.leave.is_cancelled());
        drop(second);
        let thirds = third.seat().occupy();
        assert!(crowd.enter(2).is_none(), "both are busy");
        drop(thirds);
        drop(busy);
        crowd.enter(2).unwrap();
        assert!(third.leave.is_cancelled(), "it has been idle for longer");
        assert!(!first.leave.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_nothing_is_given_up_and_one_that_reads_late_is_not() {
        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut ours = Patient::new(ours);
        ours.write_all(&[0; 16]).await.unwrap();
        let late = async {
            sleep(STALL / 2).await;
            theirs.read_exact(&mut [0; 16]).await.unwrap();
        };
        tokio::join!(async { ours.write_all(&[0; 16]).await.unwrap() }, late);
        let stalled = ours.write_all(&[0; 16]).await.unwrap_err();
        assert_eq!(stalled.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_only_gives_signs_of_life_stays_open_for_an_hour() {
        let (ours, mut theirs) = tokio::io::duplex(4096);
        let mut ours = Patient::new(ours);
        let sign = b"\x00\x00\x00\x00\x1b{\"event\":{\"keepalive\":{}}}";
        // As often as SDKs ask for one. Nobody reads meanwhile, as in a program that waits for something else.
        for _ in 0..72 {
            sleep(Duration::from_secs(50)).await;
            ours.write_all(sign).await.unwrap();
            ours.flush().await.unwrap();
        }
        let mut seen = vec![0; 72 * sign.len()];
        theirs.read_exact(&mut seen).await.unwrap();
        assert!(seen.chunks(sign.len()).all(|one| one == sign));
        ours.write_all(sign).await.unwrap();
    }

    #[tokio::test]
    async fn what_still_comes_is_thrown_away_for_a_while() {
        let (ours, theirs) = tokio::io::duplex(16);
        let mut ours = Patient::new(ours);
        let (mut read, mut write) = tokio::io::split(theirs);
        let talk = async { while write.write_all(&[0; 16]).await.is_ok() {} };
        let close = async move {
            ours.write_all(b"no").await.unwrap();
            ours.shutdown().await.unwrap();
        };
        let mut answer = Vec::new();
        let (_, _, read) = tokio::join!(talk, close, read.read_to_end(&mut answer));
        assert_eq!((read.unwrap(), answer.as_slice()), (2, &b"no"[..]));
    }
}
