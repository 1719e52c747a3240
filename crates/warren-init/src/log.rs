//! The log of one exec: everything it wrote, in the order in which it arrived, by byte offsets.
//!
//! One file holds it all, so that it outlives whoever reads it and costs one descriptor:
//!
//! ```text
//! 0        head: what init says of the log (what was forgotten, where it was cut, how it ended)
//! 32 KiB   told: whether somebody who keeps account of ends was told of this one
//! 64 KiB   meta: what the one who asked for the exec notes about it
//! 512 KiB  verdict: how it ended, as the one who asked for it settled it
//! 960 KiB  denied: what walls refused to it, as init saw it, where somebody asked for that
//! 1 MiB    index: for each run of bytes of one stream, where it begins and which stream it is
//! 16 MiB   the bytes, to the end of the file: its size says how many there are
//! ```
//!
//! What is not written takes no space. A run is noted before its bytes are written, and the size of a
//! file changes at one moment, so a reader that asks for the size first never sees bytes that it
//! cannot attribute. Init is inside the sandbox: what it writes is read as if an attacker had.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::fs::{FallocateFlags, fallocate, fstat};
use rustix::io::{Errno, pread, pwrite};
use rustix::pipe::{SpliceFlags, splice};
use serde::{Deserialize, Serialize};

use crate::protocol::Ended;
use crate::protocol::denied::{Denials, MAX_DENIED};

/// Where it is noted that the end was told; the notes of the one who asked are next.
pub const TOLD: u64 = 32 << 10;
/// Where the notes of the one who asked begin; the verdict is next.
pub const META: u64 = 64 << 10;
/// Where the verdict begins; what was denied is next.
pub const VERDICT: u64 = 512 << 10;
/// Where it is noted what walls refused; the index is next.
const DENIED: u64 = 960 << 10;
/// Where the index begins; the bytes are next.
#[doc(hidden)]
pub const INDEX: u64 = 1 << 20;
/// Where the bytes begin.
#[doc(hidden)]
pub const DATA: u64 = 16 << 20;
const MAX_RUNS: u64 = (DATA - INDEX) / 8;
const HEAD_SIZE: usize = 512;
/// Where the head's checksum, its length and it itself are.
const HEAD_TEXT: usize = 16;
/// How much is forgotten at once where the oldest bytes give way, at least.
const STEP: u64 = 64 << 10;

/// Which of an exec's streams bytes came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Stream {
    /// Its standard output, or its terminal.
    Stdout,
    /// Its standard error.
    Stderr,
    /// What a shell that is driven by us says to us.
    Control,
}

impl Stream {
    fn from_bits(bits: u64) -> Self {
        match bits & 3 {
            0 => Self::Stdout,
            1 => Self::Stderr,
            _ => Self::Control,
        }
    }

    fn bits(self) -> u64 {
        match self {
            Self::Stdout => 0,
            Self::Stderr => 1,
            Self::Control => 2,
        }
    }
}

/// What happens when a log is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Overflow {
    /// The exec is ended.
    End,
    /// The oldest bytes are forgotten.
    Forget,
}

/// What init says of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// The first offset that is still there.
    pub kept_from: u64,
    /// Whether more was written than the log may hold.
    pub cut: bool,
    /// How the exec ended, once it has.
    pub ended: Option<Ended>,
}

/// Whether a log takes more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Room {
    /// It does.
    #[default]
    Left,
    /// It does not.
    Full,
}

/// The writing side, held by init.
#[derive(Debug)]
pub struct Log {
    file: OwnedFd,
    limit: u64,
    overflow: Overflow,
    written: u64,
    runs: u64,
    last: Option<Stream>,
    head: Head,
}

impl Log {
    /// Begins a log in an empty file.
    pub fn new(file: OwnedFd, limit: Option<u64>, overflow: Overflow) -> Self {
        let (limit, head) = (limit.unwrap_or(u64::MAX), Head::default());
        Self { file, limit, overflow, written: 0, runs: 0, last: None, head }
    }

    /// Adds bytes of a stream, as far as there is room.
    pub fn append(&mut self, stream: Stream, bytes: &[u8]) -> Room {
        if self.head.cut {
            return Room::Full;
        }
        let room = match self.overflow {
            Overflow::End => usize::try_from(self.limit - self.written).unwrap_or(usize::MAX),
            Overflow::Forget => usize::MAX,
        };
        let taken = &bytes[..bytes.len().min(room)];
        // A disk that is full is the end of the log like any other.
        let whole = taken.len() == bytes.len() && self.write(stream, taken).is_ok();
        if !whole {
            if taken.len() < bytes.len() {
                let _ = self.write(stream, taken);
            }
            self.head.cut = true;
            let _ = self.write_head();
            return Room::Full;
        }
        self.give_way()
    }

    /// Returns how many bytes of a stream can be [moved](Self::splice): none where they begin a run, which is
    /// noted before its bytes and only if there are any; none where the next would be one too many, so
    /// that whoever reads it finds out whether there is one.
    pub fn room_to_splice(&self, stream: Stream) -> u64 {
        match self.overflow {
            _ if self.head.cut || self.last != Some(stream) => 0,
            Overflow::End => self.limit - self.written,
            Overflow::Forget => u64::MAX,
        }
    }

    /// Moves bytes of a stream from a pipe, at most as many as there is [room](Self::room_to_splice) for;
    /// none when the pipe is closed.
    ///
    /// The kernel takes them from the pipe's own pages, so that they are copied once and not twice. What
    /// could not be written is still in the pipe. See splice(2).
    pub fn splice(
        &mut self,
        stream: Stream,
        pipe: impl AsFd,
        most: usize,
    ) -> Result<(usize, Room), Errno> {
        let room = usize::try_from(self.room_to_splice(stream)).unwrap_or(usize::MAX);
        let mut at = DATA + self.written;
        let length =
            splice(pipe, None, &self.file, Some(&mut at), most.min(room), SpliceFlags::NONBLOCK)?;
        self.written += length as u64;
        Ok((length, self.give_way()))
    }

    /// Has the oldest bytes give way where they are to.
    fn give_way(&mut self) -> Room {
        if self.overflow == Overflow::Forget && self.forget().is_err() {
            // What cannot be given back is not taken: the disk is the host's.
            self.head.cut = true;
            let _ = self.write_head();
            return Room::Full;
        }
        Room::Left
    }

    fn write(&mut self, stream: Stream, mut bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if self.last != Some(stream) {
            if self.runs == MAX_RUNS {
                return Err(Errno::FBIG.into());
            }
            // Never zero, so that what was not written can be told.
            let entry = ((self.written << 2) | stream.bits()) + 1;
            pwrite(&self.file, &entry.to_le_bytes(), INDEX + self.runs * 8)?;
            self.runs += 1;
            self.last = Some(stream);
        }
        while !bytes.is_empty() {
            let length = pwrite(&self.file, bytes, DATA + self.written)?;
            self.written += length as u64;
            bytes = &bytes[length..];
        }
        Ok(())
    }

    /// Gives back the space of what is too old.
    fn forget(&mut self) -> io::Result<()> {
        let kept = self.written - self.head.kept_from;
        if kept < self.limit.saturating_add(STEP.max(self.limit / 4)) {
            return Ok(());
        }
        let from = (self.written - self.limit) / 4096 * 4096;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let length = from - self.head.kept_from;
        let start = DATA + self.head.kept_from;
        self.head.kept_from = from;
        // First said, then done: a reader never takes a hole for bytes.
        self.write_head()?;
        Ok(fallocate(&self.file, flags, start, length)?)
    }

    /// Notes how the exec ended.
    pub fn end(&mut self, ended: Ended) {
        self.head.ended = Some(ended);
        let _ = self.write_head();
    }

    /// Notes what walls refused to the exec, before it has [ended](Self::end).
    pub fn note(&self, denials: &Denials) {
        let Ok(text) = postcard::to_allocvec(denials) else { return };
        if (text.len() as u64) < INDEX - DENIED - 4 {
            let _ = write_note(&self.file, DENIED, &text);
        }
    }

    fn write_head(&self) -> io::Result<()> {
        let text = postcard::to_allocvec(&self.head).map_err(io::Error::other)?;
        let mut block = vec![0; HEAD_TEXT];
        block[..8].copy_from_slice(&checksum(&text).to_le_bytes());
        block[8..].copy_from_slice(&(text.len() as u64).to_le_bytes());
        block.extend_from_slice(&text);
        pwrite(&self.file, &block, 0)?;
        Ok(())
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    // FNV-1a: tells a whole head from one that is being written, and from none.
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// Bytes of one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where in the log the first of them is.
    pub offset: u64,
    /// Whose they are.
    pub stream: Stream,
    /// They.
    pub bytes: Vec<u8>,
}

/// The runs of a log that were read so far, so that each is read once.
#[derive(Debug, Default)]
pub struct Runs(Vec<(u64, Stream)>);

impl Runs {
    /// Takes in the runs that begin before `size`.
    pub fn extend(&mut self, file: impl AsFd, size: u64) -> io::Result<()> {
        let mut buffer = [0; 4096];
        loop {
            let known = self.0.len() as u64;
            let room = (MAX_RUNS - known.min(MAX_RUNS)) * 8;
            let want = usize::try_from(room).unwrap_or(usize::MAX).min(buffer.len());
            let read = read_full(&file, &mut buffer[..want], INDEX + known * 8)?;
            let (entries, _) = buffer[..read].as_chunks::<8>();
            for entry in entries {
                let entry = u64::from_le_bytes(*entry);
                if entry == 0 || (entry - 1) >> 2 >= size {
                    return Ok(());
                }
                let begins = (entry - 1) >> 2;
                // An index that goes back was not written by us.
                if self.0.last().is_some_and(|(before, _)| *before >= begins) {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "a log out of order"));
                }
                self.0.push((begins, Stream::from_bits(entry - 1)));
            }
            if entries.is_empty() {
                return Ok(());
            }
        }
    }

    /// Returns the stream of the byte at `offset`, and where its run ends if another follows.
    fn at(&self, offset: u64) -> (Stream, Option<u64>) {
        let next = self.0.partition_point(|(begins, _)| *begins <= offset);
        let stream = next.checked_sub(1).and_then(|run| self.0.get(run));
        let stream = stream.map_or(Stream::Stdout, |(_, stream)| *stream);
        (stream, self.0.get(next).map(|(begins, _)| *begins))
    }
}

/// Returns a head with this text, as init writes one: bytes that happen to have the right sum are rare.
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub fn head_of(text: &[u8]) -> Vec<u8> {
    [&checksum(text).to_le_bytes()[..], &(text.len() as u64).to_le_bytes(), text].concat()
}

/// Returns how many bytes a log has taken.
pub fn size(file: impl AsFd) -> io::Result<u64> {
    let size = fstat(file)?.st_size;
    Ok(u64::try_from(size).unwrap_or(0).saturating_sub(DATA))
}

/// Returns what init says of a log; nothing yet is the default.
pub fn head(file: impl AsFd) -> io::Result<Head> {
    // One that is being written while we look is looked at again.
    for _ in 0..1000 {
        let mut block = [0; HEAD_SIZE];
        let length = read_full(&file, &mut block, 0)?;
        let word = |at: usize| block[at..].first_chunk().copied().map_or(0, u64::from_le_bytes);
        let (sum, size) = (word(0), word(8));
        if length < HEAD_TEXT || (sum == 0 && size == 0) {
            return Ok(Head::default());
        }
        let text = usize::try_from(size).ok().and_then(|size| block[HEAD_TEXT..].get(..size));
        if let Some(text) = text
            && checksum(text) == sum
        {
            let damaged = |_| io::Error::new(io::ErrorKind::InvalidData, "a damaged log");
            return postcard::from_bytes(text).map_err(damaged);
        }
        std::thread::yield_now();
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "a damaged log"))
}

/// Reads at most `max` bytes from `offset` on, which must be below `size`; one piece for each run.
pub fn read(
    file: impl AsFd,
    runs: &Runs,
    offset: u64,
    size: u64,
    max: usize,
) -> io::Result<Vec<Piece>> {
    let end = size.min(offset.saturating_add(max as u64));
    let wanted = usize::try_from(end.saturating_sub(offset)).unwrap_or(0);
    // Not filled with zeroes first: of a stream as fast as memory that is one more pass over all of it.
    let mut buffer = Vec::with_capacity(wanted);
    while buffer.len() < wanted {
        let at = DATA + offset + buffer.len() as u64;
        if pread(&file, spare_capacity(&mut buffer), at)? == 0 {
            break;
        }
    }
    // An allocation may be larger than was asked for; whose bytes those beyond `size` are is not known.
    buffer.truncate(wanted);
    let mut pieces: Vec<Piece> = Vec::new();
    let mut at = offset;
    while !buffer.is_empty() {
        let (stream, until) = runs.at(at);
        let length = until.map_or(u64::MAX, |until| until - at).min(buffer.len() as u64);
        let length = usize::try_from(length).unwrap_or(buffer.len());
        let rest = if length == buffer.len() { Vec::new() } else { buffer.split_off(length) };
        pieces.push(Piece { offset: at, stream, bytes: buffer });
        at += length as u64;
        buffer = rest;
    }
    Ok(pieces)
}

fn read_full(file: impl AsFd, buffer: &mut [u8], mut offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match pread(&file, &mut buffer[filled..], offset)? {
            0 => break,
            length => {
                filled += length;
                offset += length as u64;
            }
        }
    }
    Ok(filled)
}

/// Writes a note at `place`, which is [`META`], [`VERDICT`] or, for a short one, [`TOLD`]; one that is too long is an error.
pub fn write_note(file: impl AsFd, place: u64, text: &[u8]) -> io::Result<()> {
    if text.len() as u64 > MAX_NOTE {
        return Err(Errno::MSGSIZE.into());
    }
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    let block = [&length.to_le_bytes()[..], text].concat();
    pwrite(file, &block, place)?;
    Ok(())
}

/// Reads what walls refused to the exec, as init saw it; nothing if nobody asked for that.
pub fn denied(file: impl AsFd) -> io::Result<Denials> {
    let Some(text) = read_note(file, DENIED)?.filter(|t| (t.len() as u64) < INDEX - DENIED) else {
        return Ok(Denials::default());
    };
    let damaged = |_| io::Error::new(io::ErrorKind::InvalidData, "a damaged log");
    let mut denials: Denials = postcard::from_bytes(&text).map_err(damaged)?;
    denials.list.truncate(MAX_DENIED);
    Ok(denials)
}

/// The longest note.
pub const MAX_NOTE: u64 = (VERDICT - META) - 4;

/// Reads a note back; `None` if there is none.
pub fn read_note(file: impl AsFd, place: u64) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    if read_full(&file, &mut length, place)? < 4 {
        return Ok(None);
    }
    let length = u64::from(u32::from_le_bytes(length));
    if length == 0 || length > MAX_NOTE {
        return Ok(None);
    }
    let mut text = vec![0; usize::try_from(length).unwrap_or(0)];
    let read = read_full(&file, &mut text, place + 4)?;
    Ok((read == text.len()).then_some(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    fn file() -> (OwnedFd, OwnedFd) {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        (file.try_clone().unwrap(), file)
    }

    fn all(file: &OwnedFd, from: u64) -> Vec<Piece> {
        let (mut runs, size) = (Runs::default(), size(file).unwrap());
        runs.extend(file, size).unwrap();
        read(file, &runs, from, size, usize::MAX / 2).unwrap()
    }

    fn text(pieces: &[Piece]) -> Vec<(u64, Stream, String)> {
        let text = |piece: &Piece| String::from_utf8(piece.bytes.clone()).unwrap();
        pieces.iter().map(|piece| (piece.offset, piece.stream, text(piece))).collect()
    }

    #[test]
    fn bytes_are_read_from_any_offset_with_their_streams() {
        let (ours, theirs) = file();
        let mut log = Log::new(theirs, None, Overflow::End);
        assert_eq!((size(&ours).unwrap(), all(&ours, 0)), (0, vec![]));
        for (stream, bytes) in
            [(Stream::Stdout, "ab"), (Stream::Stdout, "c"), (Stream::Stderr, "de")]
        {
            assert_eq!(log.append(stream, bytes.as_bytes()), Room::Left);
        }
        assert_eq!(log.append(Stream::Stdout, b"f"), Room::Left);
        let whole =
            [(0, Stream::Stdout, "abc"), (3, Stream::Stderr, "de"), (5, Stream::Stdout, "f")]
                .map(|(at, stream, text)| (at, stream, text.to_owned()));
        assert_eq!(text(&all(&ours, 0)), whole);
        assert_eq!(text(&all(&ours, 4))[0], (4, Stream::Stderr, "e".to_owned()));
        assert_eq!(head(&ours).unwrap(), Head::default());
    }

    #[test]
    fn a_full_log_says_where_it_was_cut_and_takes_no_more() {
        let (ours, theirs) = file();
        let mut log = Log::new(theirs, Some(4), Overflow::End);
        assert_eq!(log.append(Stream::Stdout, b"abcd"), Room::Left, "full, and not beyond");
        assert!(!head(&ours).unwrap().cut);
        assert_eq!(log.append(Stream::Stderr, b"e"), Room::Full);
        assert_eq!(log.append(Stream::Stdout, b"f"), Room::Full);
        assert_eq!((size(&ours).unwrap(), head(&ours).unwrap().cut), (4, true));
    }

    #[test]
    fn where_the_oldest_bytes_give_way_the_newest_are_there_and_the_space_is_bounded() {
        let (ours, theirs) = file();
        let limit = 1 << 20;
        let mut log = Log::new(theirs, Some(limit), Overflow::Forget);
        let block: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        for _ in 0..1000 {
            assert_eq!(log.append(Stream::Stdout, &block), Room::Left);
        }
        let (head, size) = (head(&ours).unwrap(), size(&ours).unwrap());
        assert_eq!((size, head.cut), (10_000_000, false));
        assert!(size - head.kept_from >= limit, "as much as was asked for is kept");
        let blocks = u64::try_from(fstat(&ours).unwrap().st_blocks).unwrap() * 512;
        assert!(blocks < 2 * limit, "{blocks} bytes are taken");
        let kept = all(&ours, head.kept_from);
        let (skipped, kept_bytes) = (head.kept_from % 10_000, size - head.kept_from);
        let bytes = block.iter().cycle().skip(usize::try_from(skipped).unwrap());
        let expected: Vec<u8> = bytes.take(usize::try_from(kept_bytes).unwrap()).copied().collect();
        assert!(kept[0].bytes == expected);
    }

    fn full_pipe(bytes: &[u8]) -> OwnedFd {
        let (from, to) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        assert_eq!(rustix::io::write(&to, bytes).unwrap(), bytes.len());
        from
    }

    #[test]
    fn what_is_moved_from_a_pipe_ends_at_the_limit_and_goes_on_only_with_a_run_that_has_begun() {
        let (ours, theirs) = file();
        let mut log = Log::new(theirs, Some(6), Overflow::End);
        let pipe = full_pipe(b"bcdefgh");
        assert_eq!(log.room_to_splice(Stream::Stdout), 0, "no run");
        log.append(Stream::Stderr, b"a");
        assert_eq!(log.room_to_splice(Stream::Stdout), 0, "the run of another");
        assert_eq!(log.splice(Stream::Stderr, &pipe, 2), Ok((2, Room::Left)));
        assert_eq!(log.splice(Stream::Stderr, &pipe, 1 << 20), Ok((3, Room::Left)));
        assert_eq!(text(&all(&ours, 0)), [(0, Stream::Stderr, "abcdef".to_owned())]);
        assert_eq!((log.room_to_splice(Stream::Stderr), head(&ours).unwrap().cut), (0, false));
        let mut left = [0; 8];
        assert_eq!(rustix::io::read(&pipe, &mut left), Ok(2), "what there is no room for stays");
        assert_eq!(log.append(Stream::Stderr, &left[..2]), Room::Full);
        assert_eq!((size(&ours).unwrap(), head(&ours).unwrap().cut), (6, true));
    }

    #[test]
    fn what_is_moved_from_a_pipe_has_the_oldest_bytes_give_way() {
        let (ours, theirs) = file();
        let mut log = Log::new(theirs, Some(64 << 10), Overflow::Forget);
        log.append(Stream::Stdout, b"a");
        for _ in 0..10 {
            let pipe = full_pipe(&[b'b'; 60_000]);
            assert_eq!(log.splice(Stream::Stdout, &pipe, 1 << 20), Ok((60_000, Room::Left)));
        }
        let (head, size) = (head(&ours).unwrap(), size(&ours).unwrap());
        assert_eq!((size, head.cut), (600_001, false));
        assert!(size - head.kept_from < 300_000, "{} are forgotten", head.kept_from);
        assert!(all(&ours, head.kept_from).iter().all(|p| p.bytes.iter().all(|b| *b == b'b')));
    }

    #[test]
    fn an_index_out_of_order_and_a_damaged_head_are_errors() {
        let (ours, theirs) = file();
        let mut log = Log::new(theirs, None, Overflow::End);
        log.append(Stream::Stdout, b"abc");
        log.append(Stream::Stderr, b"d");
        assert_eq!(all(&ours, 0).len(), 2, "control: it can be read before");
        pwrite(&ours, &1u64.to_le_bytes(), INDEX + 8).unwrap();
        assert!(Runs::default().extend(&ours, 4).is_err());
        pwrite(&ours, &[7; 20], 0).unwrap();
        assert!(head(&ours).is_err());
    }

    #[test]
    fn notes_are_read_back_and_an_absent_one_is_none() {
        let (ours, _theirs) = file();
        assert_eq!(read_note(&ours, META).unwrap(), None);
        write_note(&ours, META, b"{}").unwrap();
        assert_eq!(read_note(&ours, META).unwrap().as_deref(), Some(&b"{}"[..]));
        assert_eq!(read_note(&ours, VERDICT).unwrap(), None);
        let long = vec![0; usize::try_from(MAX_NOTE).unwrap() + 1];
        assert!(write_note(&ours, META, &long).is_err());
    }
}
