//! The streams of a command that has a log: what it writes goes there, what it is sent goes to it.
//!
//! A command never waits for whoever reads its output, only for the log; and whoever sends it input
//! is told how much was taken, so that nothing of it is held here but a bounded rest.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::{Errno, ioctl_fionbio, read, write};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use crate::exec::{self, Ends};
use crate::log::{Log, Overflow, Room, Stream};
use crate::protocol::denied::Denials;
use crate::protocol::{Ended, ExecEvent, Input};
use crate::terminal::{self, Terminal};

/// How much is read at once.
const CHUNK: usize = 128 * 1024;
/// The pipe of a stream that floods, where the kernel lets it be that large.
const PIPE: usize = 1024 * 1024;
/// A stream floods that brings so much in so short a time.
const FLOOD: (usize, Duration) = (64 * 1024, Duration::from_millis(1));
/// How long what floods is left to gather.
const REST: Duration = Duration::from_micros(200);
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
    flow: Flow,
    /// How much came since when, if it is known.
    came: usize,
    since: Option<Instant>,
    /// Until when it is not looked at.
    rest: Option<Instant>,
}

/// How bytes are taken from a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    /// As they come; it is a pipe of the usual size.
    Small,
    /// As they come: it is no pipe, or cannot be larger.
    Fixed,
    /// By the kernel, from a large pipe, in which they may gather.
    Large,
    /// As they come, from a large pipe: the kernel does not move them.
    Copied,
}

impl Sink {
    fn new(from: OwnedFd, stream: Stream, flow: Flow) -> Self {
        Self { from, stream, flow, came: 0, since: None, rest: None }
    }

    /// Notes how much came at once, and lets a stream that floods gather for a while.
    ///
    /// A program that writes four kilobytes at a time would wake us, and us whoever reads, for each. A
    /// pipe that was half full when we came needs no more time.
    fn pace(&mut self, moved: usize) {
        self.came += moved;
        if self.came < FLOOD.0 || self.flow == Flow::Fixed {
            return;
        }
        let now = Instant::now();
        let floods = self.since.is_some_and(|since| now - since < FLOOD.1);
        (self.since, self.came) = (Some(now), 0);
        if !floods {
            return;
        }
        if self.flow == Flow::Small {
            // A user has so many pages for pipes and no more; the usual size does as well.
            let grown = fcntl_setpipe_size(&self.from, PIPE).is_ok();
            self.flow = if grown { Flow::Large } else { Flow::Fixed };
        }
        if self.flow != Flow::Fixed && moved < PIPE / 2 {
            self.rest = Some(now + REST);
        }
    }
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
            logged.sinks.push(Sink::new(outer.try_clone()?, Stream::Stdout, Flow::Fixed));
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
            logged.sinks.push(Sink::new(from, stream, Flow::Small));
            ends.streams.push(to);
        }
        if *input == Input::Control {
            let flags = SocketFlags::CLOEXEC;
            let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            ioctl_fionbio(&ours, true)?;
            // Last, so that everything it wrote before is in the log before.
            logged.sinks.push(Sink::new(ours.try_clone()?, Stream::Control, Flow::Fixed));
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
        let sinks = self.sinks.iter().filter(|sink| sink.rest.is_none());
        let sinks = sinks.map(|sink| (sink.from.as_fd(), PollFlags::IN));
        let feed = self.feed.iter().filter(|feed| !feed.pending.is_empty());
        sinks.chain(feed.map(|feed| (feed.to.as_fd(), PollFlags::OUT)))
    }

    /// Returns when to look again, whatever happens until then.
    pub(crate) fn rests_until(&self) -> Option<Instant> {
        self.sinks.iter().filter_map(|sink| sink.rest).min()
    }

    /// Deals with what is ready, in the order of [`watched`](Self::watched).
    pub(crate) fn ready(&mut self, mut next: impl FnMut() -> bool) -> Room {
        let rested = |until: &mut Instant| *until <= Instant::now();
        let sinks = self.sinks.iter_mut();
        let ready: Vec<bool> = sinks
            .map(|sink| match sink.rest {
                Some(_) => sink.rest.take_if(rested).is_some(),
                None => next(),
            })
            .collect();
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
        self.sinks.retain_mut(|sink| {
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
        self.sinks.retain_mut(|sink| drain(sink, &mut self.log, &mut drained, FLUSH));
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
        // One that was not read yet says it as well; and by the largest number an eventfd is full, so that
        // until then the next wakes nobody.
        let _ = write(&self.notice, &(u64::MAX - 1).to_ne_bytes());
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

impl Drained {
    fn full_if(&mut self, room: Room) {
        if room == Room::Full {
            self.room = Room::Full;
        }
    }
}

/// Moves about `most` bytes to the log; `false` when no more can come.
fn drain(sink: &mut Sink, log: &mut Log, drained: &mut Drained, most: usize) -> bool {
    let mut moved = 0;
    let open = take(sink, log, drained, most, &mut moved);
    drained.moved += moved;
    sink.pace(moved);
    open
}

fn take(
    sink: &mut Sink,
    log: &mut Log,
    drained: &mut Drained,
    most: usize,
    moved: &mut usize,
) -> bool {
    let mut buffer = [MaybeUninit::uninit(); CHUNK];
    while *moved < most {
        if sink.flow == Flow::Large && log.room_to_splice(sink.stream) > 0 {
            match log.splice(sink.stream, &sink.from, PIPE) {
                // Closed, or so this kernel says: gVisor's says it of a pipe that is empty. Reading tells.
                Ok((0, _)) => sink.flow = Flow::Copied,
                Ok((length, room)) => {
                    *moved += length;
                    drained.full_if(room);
                    if most == CHUNK {
                        return true;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                // A filter that has no such call, or a disk that is full: what reads and writes finds out.
                Err(_) => sink.flow = Flow::Copied,
            }
            continue;
        }
        match read(&sink.from, &mut buffer) {
            Ok(([], _)) => return false,
            Ok((bytes, rest)) => {
                *moved += bytes.len();
                drained.full_if(log.append(sink.stream, bytes));
                // The pipe is empty: what comes next is announced.
                if !rest.is_empty() && most == CHUNK {
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

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, PollFd, Timespec, eventfd, poll};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::log::{self, Runs};

    struct Stage {
        logged: Logged,
        log: OwnedFd,
        notice: OwnedFd,
        stdout: Option<OwnedFd>,
        stderr: OwnedFd,
    }

    fn stage(limit: Option<u64>) -> Stage {
        let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        let notice = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (theirs, rung) = (log.try_clone().unwrap(), notice.try_clone().unwrap());
        let input = Input::Stdin { first: Vec::new(), more: false };
        let (logged, ends) =
            Logged::new("x".to_owned(), theirs, rung, &input, None, limit, Overflow::End).unwrap();
        let [_, stdout, stderr] = <[OwnedFd; 3]>::try_from(ends.streams).unwrap();
        Stage { logged, log, notice, stdout: Some(stdout), stderr }
    }

    impl Stage {
        /// One turn of init's, as far as it is about this log.
        fn turn(&mut self) -> Room {
            let watched = self.logged.watched();
            let mut fds: Vec<_> =
                watched.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)).collect();
            let rest = self.logged.rests_until();
            let rest = rest.map(|until| until.saturating_duration_since(Instant::now()));
            let timeout = rest.map(|rest| Timespec::try_from(rest).unwrap());
            poll(&mut fds, timeout.as_ref()).unwrap();
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(fds);
            let mut ready = ready.into_iter();
            self.logged.ready(|| ready.next().unwrap())
        }

        fn read(&self, from: u64) -> Vec<log::Piece> {
            let (mut runs, size) = (Runs::default(), log::size(&self.log).unwrap());
            runs.extend(&self.log, size).unwrap();
            log::read(&self.log, &runs, from, size, usize::MAX / 2).unwrap()
        }
    }

    fn numbered(length: usize) -> Vec<u8> {
        (0..length / 8).flat_map(|number| (number as u64).to_le_bytes()).collect()
    }

    /// Writes as most programs do, a little at a time.
    fn flood(to: OwnedFd, bytes: Vec<u8>) -> std::thread::JoinHandle<()> {
        std::thread::spawn(move || {
            for chunk in bytes.chunks(4096) {
                let mut rest = chunk;
                while !rest.is_empty() {
                    match write(&to, rest) {
                        Ok(length) => rest = &rest[length..],
                        Err(_) => return,
                    }
                }
            }
        })
    }

    #[test]
    fn a_stream_that_floods_arrives_whole_and_is_moved_by_the_kernel_from_a_large_pipe() {
        let mut stage = stage(None);
        let bytes = numbered(32 << 20);
        let writer = flood(stage.stdout.take().unwrap(), bytes.clone());
        let mut large = false;
        while stage.logged.sinks.len() == 2 {
            assert_eq!(stage.turn(), Room::Left);
            large |= stage.logged.sinks.iter().any(|sink| sink.flow == Flow::Large);
        }
        writer.join().unwrap();
        assert!(large, "control: it did flood");
        for from in [0, 1, 12_345_678] {
            let pieces = stage.read(from as u64);
            assert!(pieces.len() == 1 && pieces[0].bytes == bytes[from..], "from {from}");
        }
    }

    #[test]
    fn a_stream_that_floods_is_cut_at_exactly_the_limit() {
        let limit = (10 << 20) + 123;
        let mut stage = stage(Some(limit));
        let bytes = numbered(16 << 20);
        let writer = flood(stage.stdout.take().unwrap(), bytes.clone());
        while stage.turn() == Room::Left {}
        assert!(log::head(&stage.log).unwrap().cut);
        // What comes after it is taken from the pipe and not kept.
        while stage.logged.sinks.len() == 2 {
            stage.turn();
        }
        writer.join().unwrap();
        let kept = stage.read(0).remove(0).bytes;
        assert!(kept == bytes[..usize::try_from(limit).unwrap()], "{} bytes", kept.len());
    }

    #[test]
    fn what_another_stream_says_in_a_flood_is_its_own() {
        let mut stage = stage(None);
        let bytes = numbered(8 << 20);
        let writer = flood(stage.stdout.take().unwrap(), bytes.clone());
        let mut said = write(&stage.stderr, b"e").unwrap();
        while stage.logged.sinks.len() == 2 {
            stage.turn();
            if said < 100 && stage.logged.sinks[0].flow == Flow::Large {
                said += write(&stage.stderr, b"e").unwrap();
            }
        }
        while stage.read(0).iter().filter(|p| p.stream == Stream::Stderr).count() == 0 {
            stage.turn();
        }
        writer.join().unwrap();
        let of = |wanted| {
            let pieces = stage.read(0).into_iter().filter(move |piece| piece.stream == wanted);
            pieces.flat_map(|piece| piece.bytes).collect::<Vec<u8>>()
        };
        assert!(of(Stream::Stdout) == bytes);
        assert!(of(Stream::Stderr).iter().all(|byte| *byte == b'e'));
    }

    #[test]
    fn a_little_is_taken_at_once_and_growth_that_nobody_looked_at_is_announced_once() {
        let mut stage = stage(None);
        let stdout = stage.stdout.take().unwrap();
        for _ in 0..3 {
            write(&stdout, b"abc").unwrap();
            stage.turn();
            assert_eq!(stage.logged.rests_until(), None);
        }
        assert_eq!(stage.read(0)[0].bytes, b"abcabcabc");
        let full = write(&stage.notice, &(u64::MAX - 1).to_ne_bytes());
        assert_eq!(full, Err(Errno::AGAIN), "the next would wake nobody");
        let mut number = [0; 8];
        read(&stage.notice, &mut number).unwrap();
        write(&stdout, b"d").unwrap();
        stage.turn();
        assert_eq!(read(&stage.notice, &mut number), Ok(8), "whoever has looked is told again");
    }
}
