//! The streams of a command that has a log: what it writes goes there, what it is sent goes to it.
//!
//! A command never waits for whoever reads its output, only for the log; and whoever sends it input
//! is told how much was taken, so that nothing of it is held here but a bounded rest.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::PollFlags;
use rustix::io::{Errno, ioctl_fionbio, read, write};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use crate::exec::{self, Ends};
use crate::log::{Log, Overflow, Room, Stream};
use crate::protocol::denied::Denials;
use crate::protocol::{Ended, ExecEvent, Input};
use crate::terminal::{self, Terminal};

/// How much is moved at once.
const CHUNK: usize = 128 * 1024;
/// The pipe of a stream, where the kernel lets it be that large.
const PIPE: usize = 256 * 1024;
/// How much input waits here for the command to read it.
const MAX_PENDING: usize = 64 * 1024;
/// More than a pipe can hold, so that reading this much reads all that was there.
const FLUSH: usize = 2 * 1024 * 1024;

/// The streams of one command.
#[derive(Debug)]
pub(crate) struct Logged {
    pub(crate) name: String,
    log: Log,
    /// Written to when the log grows.
    notice: OwnedFd,
    sinks: Vec<Sink>,
    feed: Option<Feed>,
    /// How much input was taken.
    taken: u64,
    terminal: Option<OwnedFd>,
    ended: bool,
}

/// Where bytes of one stream come from.
#[derive(Debug)]
struct Sink {
    from: OwnedFd,
    stream: Stream,
}

/// Where a command's input goes.
#[derive(Debug)]
struct Feed {
    to: OwnedFd,
    kind: FeedKind,
    pending: VecDeque<u8>,
    end: bool,
    /// Whether somebody has more and waits until it is wanted.
    owed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FeedKind {
    Pipe,
    Terminal,
    Control,
}

impl Logged {
    /// Makes the streams, and returns those ends that the command gets.
    pub(crate) fn new(
        name: String,
        log: OwnedFd,
        notice: OwnedFd,
        input: &Input,
        terminal: Option<Terminal>,
        limit: Option<u64>,
        overflow: Overflow,
    ) -> io::Result<(Self, Ends)> {
        let log = Log::new(log, limit, overflow);
        let mut logged = Self {
            name,
            log,
            notice,
            sinks: Vec::new(),
            feed: None,
            taken: 0,
            terminal: None,
            ended: false,
        };
        let mut ends = Ends::default();
        if let Some(Terminal { outer, inner }) = terminal {
            ioctl_fionbio(&outer, true)?;
            logged.sinks.push(Sink { from: outer.try_clone()?, stream: Stream::Stdout });
            if let Input::Stdin { first, more } = input {
                logged.feed(outer.try_clone()?, FeedKind::Terminal, first, *more);
            }
            logged.terminal = Some(outer);
            ends.terminal = Some(inner);
            return Ok((logged, ends));
        }
        match input {
            Input::Stdin { first, more } if *more || !first.is_empty() => {
                let (stdin, feed) = pipe_with(PipeFlags::CLOEXEC)?;
                ioctl_fionbio(&feed, true)?;
                ends.streams.push(stdin);
                logged.feed(feed, FeedKind::Pipe, first, *more);
            }
            Input::Stdin { .. } | Input::Control => ends.streams.push(exec::nothing_to_read()?),
        }
        for stream in [Stream::Stdout, Stream::Stderr] {
            let (from, to) = pipe_with(PipeFlags::CLOEXEC)?;
            ioctl_fionbio(&from, true)?;
            if stream == Stream::Stdout {
                // As large as it may be; the usual size does as well.
                let _ = fcntl_setpipe_size(&from, PIPE);
            }
            logged.sinks.push(Sink { from, stream });
            ends.streams.push(to);
        }
        if *input == Input::Control {
            let flags = SocketFlags::CLOEXEC;
            let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            ioctl_fionbio(&ours, true)?;
            // Last, so that everything it wrote before is in the log before.
            logged.sinks.push(Sink { from: ours.try_clone()?, stream: Stream::Control });
            logged.feed(ours, FeedKind::Control, &[], true);
            ends.streams.push(theirs);
        }
        Ok((logged, ends))
    }

    fn feed(&mut self, to: OwnedFd, kind: FeedKind, first: &[u8], more: bool) {
        self.taken = first.len() as u64;
        self.feed = Some(Feed {
            to,
            kind,
            pending: first.iter().copied().collect(),
            end: !more,
            owed: false,
        });
        self.push_input();
    }

    /// Lists what has to be watched, in an order that [`ready`](Self::ready) knows.
    pub(crate) fn watched(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        let sinks = self.sinks.iter().map(|sink| (sink.from.as_fd(), PollFlags::IN));
        let feed = self.feed.iter().filter(|feed| !feed.pending.is_empty());
        sinks.chain(feed.map(|feed| (feed.to.as_fd(), PollFlags::OUT)))
    }

    /// Deals with what is ready, in the order of [`watched`](Self::watched).
    pub(crate) fn ready(&mut self, mut next: impl FnMut() -> bool) -> Room {
        let ready: Vec<bool> = self.sinks.iter().map(|_| next()).collect();
        if self.feed.as_ref().is_some_and(|feed| !feed.pending.is_empty()) && next() {
            self.push_input();
        }
        if !ready.contains(&true) {
            return Room::Left;
        }
        let control = self.sinks.iter().zip(&ready);
        let control = control.clone().any(|(sink, ready)| *ready && sink.stream == Stream::Control);
        let mut drained = Drained::default();
        let mut index = 0;
        self.sinks.retain(|sink| {
            index += 1;
            // What it said to us comes after everything that it had written by then.
            let most = if control && sink.stream != Stream::Control { FLUSH } else { CHUNK };
            let look = control || ready[index - 1];
            !look || drain(sink, &mut self.log, &mut drained, most)
        });
        // That a stream was closed is no news to a reader.
        if drained.moved > 0 {
            self.tell();
        }
        drained.room
    }

    /// Takes in all that the command wrote, and notes how it ended.
    pub(crate) fn end(&mut self, ended: &mut Ended) {
        let mut drained = Drained::default();
        self.sinks.retain(|sink| drain(sink, &mut self.log, &mut drained, FLUSH));
        if drained.room == Room::Full {
            ended.stopped_by.get_or_insert(crate::protocol::StoppedBy::Output);
        }
        // Whoever reads the log hears of its end from the one who is told how the command ended.
        self.log.end(*ended);
        self.ended = true;
        self.feed = None;
    }

    /// Notes what walls refused to the command.
    pub(crate) fn note(&self, denials: &Denials) {
        self.log.note(denials);
    }

    /// Reports whether nothing more can come of it.
    pub(crate) fn is_over(&self) -> bool {
        self.ended && self.sinks.is_empty()
    }

    /// Has another descriptor written to when the log grows.
    pub(crate) fn tell_to(&mut self, notice: OwnedFd) {
        self.notice = notice;
    }

    fn tell(&self) {
        // One that was not read yet says it as well.
        let _ = write(&self.notice, &1u64.to_ne_bytes());
    }

    /// Reports whether it is told what to do, and goes on after what it was told.
    pub(crate) fn is_driven(&self) -> bool {
        self.feed.as_ref().is_some_and(|feed| feed.kind == FeedKind::Control)
    }

    /// Takes more input, as much as there is room for.
    pub(crate) fn take_input(&mut self, offset: u64, bytes: &[u8], end: bool) -> ExecEvent {
        let Some(feed) = &mut self.feed else { return self.input() };
        let known = usize::try_from(self.taken.saturating_sub(offset)).unwrap_or(usize::MAX);
        let new = if offset > self.taken { &[] } else { bytes.get(known..).unwrap_or_default() };
        let room = MAX_PENDING.saturating_sub(feed.pending.len());
        let taken = new.len().min(room);
        feed.pending.extend(&new[..taken]);
        feed.owed = taken < new.len();
        feed.end |= end && taken == new.len() && offset <= self.taken;
        self.taken += taken as u64;
        self.push_input();
        self.input()
    }

    /// Says how much input was taken.
    pub(crate) fn input(&self) -> ExecEvent {
        let open = self.feed.as_ref().is_some_and(|feed| !feed.end);
        let full = self.feed.as_ref().is_some_and(|feed| feed.owed);
        ExecEvent::Input { taken: self.taken, open, full }
    }

    /// Says how much input was taken, if somebody waits to be told; once.
    pub(crate) fn wants_input(&mut self) -> Option<ExecEvent> {
        match &mut self.feed {
            Some(feed) if feed.owed && feed.pending.len() < MAX_PENDING / 2 => feed.owed = false,
            Some(_) | None => return None,
        }
        Some(self.input())
    }

    fn push_input(&mut self) {
        let Some(feed) = &mut self.feed else { return };
        while !feed.pending.is_empty() {
            let (front, _) = feed.pending.as_slices();
            match write(&feed.to, front) {
                Ok(length) => drop(feed.pending.drain(..length)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // It reads no more.
                Err(_) => {
                    self.feed = None;
                    return;
                }
            }
        }
        if feed.end {
            match feed.kind {
                FeedKind::Pipe => self.feed = None,
                FeedKind::Terminal => {
                    // The character that ends input, as everybody's terminal has it.
                    let _ = write(&feed.to, b"\x04");
                    self.feed = None;
                }
                FeedKind::Control => {
                    let _ = shutdown(&feed.to, Shutdown::Write);
                    self.feed = None;
                }
            }
        }
    }

    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        if let Some(terminal) = &self.terminal {
            let _ = terminal::resize(terminal, rows, columns);
        }
    }
}

/// What came of looking at streams.
#[derive(Debug, Default)]
struct Drained {
    moved: usize,
    room: Room,
}

/// Moves at most `most` bytes to the log; `false` when no more can come.
fn drain(sink: &Sink, log: &mut Log, drained: &mut Drained, most: usize) -> bool {
    let mut buffer = [0; CHUNK];
    let mut moved = 0;
    while moved < most {
        match read(&sink.from, &mut buffer) {
            Ok(0) => return false,
            Ok(length) => {
                moved += length;
                drained.moved += length;
                if log.append(sink.stream, &buffer[..length]) == Room::Full {
                    drained.room = Room::Full;
                }
                // The pipe is empty: what comes next is announced.
                if length < buffer.len() && most == CHUNK {
                    return true;
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return true,
            // A terminal that nobody has open any more.
            Err(_) => return false,
        }
    }
    true
}
