//! Trees of files as tar streams: packed from a directory, unpacked beneath one.
//!
//! Both ends of a copy use this, inside a sandbox and outside, and neither trusts the other: an
//! archive may have been written by an attacker, and the tree may change while it is walked. Every
//! name is resolved beneath the one directory that is given and through no link; nothing that is
//! unpacked is set-uid, a device or a FIFO; lengths are bounded before memory is taken for them.
//! POSIX (ustar, pax) and GNU long names are understood; sparse files are not, and are refused.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;

use crate::steps;

const BLOCK: usize = 512;
/// The longest path in an archive.
const MAX_PATH: usize = 4095;
/// The longest header that holds names and not files.
const MAX_EXTENDED: u64 = 64 * 1024;
/// How deep a tree is packed.
const MAX_DEPTH: usize = 200;
/// How many directories are kept writable until the end.
const MAX_DELAYED: usize = 10_000;
const CHUNK: usize = 256 * 1024;

/// What was packed or unpacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes in files.
    pub bytes: u64,
    /// What was left out: what cannot be read, or is neither file, directory nor link.
    pub skipped: u64,
}

/// Why it could not be gone on with.
#[derive(Debug)]
pub enum Trouble {
    /// A call failed, or the stream broke.
    Call {
        /// On what.
        path: Vec<u8>,
        /// What the kernel said.
        source: io::Error,
    },
    /// The archive makes no sense, or wants what it may not have.
    Refused {
        /// Which entry.
        path: Vec<u8>,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The tree has more levels than are walked.
    TooDeep {
        /// Where.
        path: Vec<u8>,
    },
}

type Result<T, E = Trouble> = std::result::Result<T, E>;

fn call(path: &[u8], error: impl Into<io::Error>) -> Trouble {
    Trouble::Call { path: path.to_vec(), source: error.into() }
}

fn refused(path: &[u8], why: &'static str) -> Trouble {
    Trouble::Refused { path: path.to_vec(), why }
}

// --- Reading ------------------------------------------------------------------------------------

/// What an entry of an archive is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// Another name of an earlier entry.
    HardLink,
    /// A symbolic link.
    Link,
    /// A directory.
    Directory,
    /// A FIFO.
    Fifo,
    /// A character or block device.
    Device,
}

/// One entry of an archive, as it says of itself: nothing here is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// Its name, which may lead anywhere.
    pub path: Vec<u8>,
    /// What it links to.
    pub link: Vec<u8>,
    /// Permissions, with the set-uid, set-gid and sticky bits.
    pub mode: u32,
    /// Its owner.
    pub uid: u64,
    /// Its group.
    pub gid: u64,
    /// When it was changed: seconds since 1970, and nanoseconds.
    pub modified: (i64, u32),
    /// How many bytes of contents follow.
    pub size: u64,
    /// Extended attributes: name and value.
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Reads an archive entry by entry; between two of them it is a reader of the contents of the first.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    extended: Extended,
    left: u64,
    padding: u64,
}

/// What headers before an entry say of it.
#[derive(Debug, Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    modified: Option<(i64, u32)>,
    attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

impl<R: Read> Read for Reader<R> {
    /// Reads the contents of the entry that was returned last.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let got = self.input.read(&mut buffer[..most])?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.left -= got as u64;
        Ok(got)
    }
}

impl<R: Read> Reader<R> {
    /// Reads what `input` holds.
    pub fn new(input: R) -> Self {
        Self { input, extended: Extended::default(), left: 0, padding: 0 }
    }

    /// Looks at what it reads from.
    pub fn get_ref(&self) -> &R {
        &self.input
    }

    /// Returns what it reads from, wherever it is by now.
    pub fn into_inner(self) -> R {
        self.input
    }

    /// Returns the next entry, past what was not read of the one before; `None` at the end.
    pub fn next_entry(&mut self) -> Result<Option<Header>> {
        let unread = self.left + self.padding;
        (self.left, self.padding) = (0, 0);
        skip(&mut self.input, unread)?;
        loop {
            let mut block = [0; BLOCK];
            if !self.block(&mut block)? || block.iter().all(|byte| *byte == 0) {
                return Ok(None);
            }
            check_sum(&block)?;
            let size = number(&block[124..136]).ok_or_else(|| refused(b"", "its size is none"))?;
            match block[156] {
                b'L' => self.extended.path = Some(terminated(self.extended(size)?)),
                b'K' => self.extended.link = Some(terminated(self.extended(size)?)),
                b'x' => self.pax(size)?,
                // About all that follow: a comment, mostly.
                b'g' => drop(self.extended(size)?),
                kind => {
                    let header = header(&block, kind, size, std::mem::take(&mut self.extended))?;
                    (self.left, self.padding) = (header.size, padding(header.size));
                    return Ok(Some(header));
                }
            }
        }
    }

    /// Reads one block; `false` if the stream ends before it.
    fn block(&mut self, block: &mut [u8; BLOCK]) -> Result<bool> {
        let mut filled = 0;
        while filled < BLOCK {
            match self.input.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return Err(refused(b"", "it ends within a block")),
                Ok(got) => filled += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(call(b"", error)),
            }
        }
        Ok(true)
    }

    /// Reads what stands for a name.
    fn extended(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > MAX_EXTENDED {
            return Err(refused(b"", "a name is too long"));
        }
        let mut bytes = vec![0; usize::try_from(size).unwrap_or_default()];
        self.input.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => refused(b"", "it ends within a name"),
            _ => call(b"", error),
        })?;
        skip(&mut self.input, padding(size))?;
        Ok(bytes)
    }

    /// Reads pax records: "LENGTH KEY=VALUE\n".
    fn pax(&mut self, size: u64) -> Result<()> {
        let bytes = self.extended(size)?;
        let mut rest = &bytes[..];
        let broken = || refused(b"", "a pax record cannot be read");
        while !rest.is_empty() {
            let space = rest.iter().position(|byte| *byte == b' ').ok_or_else(broken)?;
            let text = std::str::from_utf8(&rest[..space]).map_err(|_| broken())?;
            let length: usize = text.parse().map_err(|_| broken())?;
            let record = rest.get(space + 1..length).ok_or_else(broken)?;
            let record = record.strip_suffix(b"\n").ok_or_else(broken)?;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(broken)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            let text = || std::str::from_utf8(value).map_err(|_| broken());
            let number = || text()?.parse::<u64>().map_err(|_| broken());
            match key {
                b"path" => self.extended.path = Some(value.to_vec()),
                b"linkpath" => self.extended.link = Some(value.to_vec()),
                b"size" => self.extended.size = Some(number()?),
                b"uid" => self.extended.uid = Some(number()?),
                b"gid" => self.extended.gid = Some(number()?),
                b"mtime" => self.extended.modified = Some(moment(text()?).ok_or_else(broken)?),
                key if key.starts_with(b"GNU.sparse.") => {
                    return Err(refused(b"", "it is a sparse file"));
                }
                key => {
                    if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                        self.extended.attributes.push((name.to_vec(), value.to_vec()));
                    }
                }
            }
            rest = &rest[length..];
        }
        Ok(())
    }
}

fn header(block: &[u8; BLOCK], kind: u8, size: u64, extended: Extended) -> Result<Header> {
    let mut path = terminated(block[..100].to_vec());
    if &block[257..263] == b"ustar\0" && block[345] != 0 {
        path = [&terminated(block[345..500].to_vec())[..], b"/", &path].concat();
    }
    let path = extended.path.unwrap_or(path);
    let link = extended.link.unwrap_or_else(|| terminated(block[157..257].to_vec()));
    let size = extended.size.unwrap_or(size);
    let kind = match kind {
        // Before POSIX a directory was a file whose name ends so.
        b'0' | 0 | b'7' if path.ends_with(b"/") => Kind::Directory,
        b'0' | 0 | b'7' => Kind::File,
        b'1' => Kind::HardLink,
        b'2' => Kind::Link,
        b'3' | b'4' => Kind::Device,
        b'5' => Kind::Directory,
        b'6' => Kind::Fifo,
        b'S' => return Err(refused(&path, "it is a sparse file")),
        _ => return Err(refused(&path, "it is of an unknown kind")),
    };
    let mode = number(&block[100..108]).unwrap_or(0o644);
    let modified = number(&block[136..148]).and_then(|at| i64::try_from(at).ok());
    Ok(Header {
        kind,
        path,
        link,
        mode: u32::try_from(mode & 0o7777).unwrap_or(0o644),
        uid: extended.uid.or_else(|| number(&block[108..116])).unwrap_or_default(),
        gid: extended.gid.or_else(|| number(&block[116..124])).unwrap_or_default(),
        modified: extended.modified.unwrap_or((modified.unwrap_or_default(), 0)),
        size: if kind == Kind::File { size } else { 0 },
        attributes: extended.attributes,
    })
}

/// Reads seconds since 1970 with a fraction, as pax writes them: "-1.25" is 1.25 s before.
fn moment(text: &str) -> Option<(i64, u32)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    let digits = fraction.len().min(9);
    let nanos: u32 = match fraction.get(..digits)? {
        "" => 0,
        digits if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().ok()?,
        _ => return None,
    };
    let nanos = nanos * 10_u32.pow(u32::try_from(9 - digits).ok()?);
    if whole.starts_with('-') && nanos > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanos));
    }
    Some((seconds, nanos))
}

fn terminated(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes.truncate(end);
    bytes
}

/// Reads a number: octal digits, or the big-endian form that GNU uses for large ones.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let bytes =
            field.iter().enumerate().map(|(at, byte)| if at == 0 { byte & 0x7f } else { *byte });
        return bytes
            .into_iter()
            .try_fold(0_u64, |sum, byte| Some(sum.checked_mul(256)? | u64::from(byte)));
    }
    let text = field.iter().copied().skip_while(|byte| *byte == b' ');
    let digits = text.take_while(|byte| !matches!(byte, 0 | b' '));
    digits.into_iter().try_fold(0_u64, |sum, digit| match digit {
        b'0'..=b'7' => sum.checked_mul(8)?.checked_add(u64::from(digit - b'0')),
        _ => None,
    })
}

fn check_sum(block: &[u8; BLOCK]) -> Result<()> {
    (number(&block[148..156]) == Some(sum(block)))
        .then_some(())
        .ok_or_else(|| refused(b"", "it is no tar archive, or a damaged one"))
}

fn sum(block: &[u8; BLOCK]) -> u64 {
    let byte = |(at, byte): (usize, &u8)| if (148..156).contains(&at) { b' ' } else { *byte };
    block.iter().enumerate().map(byte).map(u64::from).sum()
}

fn padding(size: u64) -> u64 {
    size.next_multiple_of(BLOCK as u64).saturating_sub(size)
}

fn skip(input: &mut impl Read, bytes: u64) -> Result<()> {
    let copied = io::copy(&mut input.take(bytes), &mut io::sink());
    match copied {
        Ok(copied) if copied == bytes => Ok(()),
        Ok(_) => Err(refused(b"", "it ends too early")),
        Err(error) => Err(call(b"", error)),
    }
}

// --- Unpacking ----------------------------------------------------------------------------------

/// Unpacks a stream beneath `target`, and reads it to its end.
///
/// Files and links that are in the way are replaced, never written through; directories are kept.
/// After an error what was unpacked so far is there, but no half of a file.
pub fn unpack(input: &mut impl Read, target: BorrowedFd<'_>) -> Result<Moved> {
    let mut unpacker = Unpacker { target, parent: None, shut: Vec::new(), moved: Moved::default() };
    let mut reader = Reader::new(input);
    while let Some(mut header) = reader.next_entry()? {
        header.mode &= 0o777;
        unpacker.unpack(&header, &mut reader)?;
    }
    // Whoever sends may still be at the padding.
    io::copy(reader.into_inner(), &mut io::sink()).map_err(|error| call(b"", error))?;
    unpacker.finish();
    Ok(unpacker.moved)
}

struct Unpacker<'a> {
    target: BorrowedFd<'a>,
    /// The directory of the last entry, which is mostly that of the next.
    parent: Option<(Vec<u8>, OwnedFd)>,
    /// Directories that are to be shut once all is in them.
    shut: Vec<(Vec<u8>, u32)>,
    moved: Moved,
}

/// How names of an archive are resolved.
pub const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// Opens what an archive names beneath a directory, following no link on the way.
fn open_beneath(dir: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
    match rustix::fs::openat2(dir, path, flags, Mode::empty(), BENEATH) {
        // gVisor. What was cleaned has no `..` in it, so that one step at a time leads nowhere else.
        Err(Errno::NOSYS) => {}
        other => return other,
    }
    let (places, name) = halves(path);
    let mut place = None;
    for part in places.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
        let on_the_way = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let from = place.as_ref().map_or(dir, AsFd::as_fd);
        place = Some(rustix::fs::openat(from, part, on_the_way, Mode::empty())?);
    }
    let from = place.as_ref().map_or(dir, AsFd::as_fd);
    steps::open_name(from, name, flags, Mode::empty())
}

/// Checks a path of an archive and returns it without what means nothing; empty for the top itself.
pub fn clean(path: &[u8]) -> Result<Vec<u8>> {
    if path.len() > MAX_PATH {
        return Err(refused(&path[..64], "its path is too long"));
    }
    if path.starts_with(b"/") {
        return Err(refused(path, "its path is absolute"));
    }
    let mut parts = Vec::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err(refused(path, "its path leads out")),
            part if part.contains(&0) => return Err(refused(path, "its path has a NUL")),
            part => parts.push(part),
        }
    }
    Ok(parts.join(&b'/'))
}

/// Splits a clean path into its directory and its last part.
pub fn halves(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

impl Unpacker<'_> {
    fn unpack(&mut self, header: &Header, input: &mut impl Read) -> Result<()> {
        let path = clean(&header.path)?;
        if path.is_empty() {
            // The top itself: it is there, and its permissions are its own.
            return match header.kind {
                Kind::Directory => Ok(()),
                _ => Err(refused(&header.path, "it has no name")),
            };
        }
        let (dir, name) = halves(&path);
        let parent = self.parent(dir)?;
        match header.kind {
            Kind::Directory => self.directory(&parent, name, &path, header.mode)?,
            Kind::File => {
                write_file(&parent, name, header, input).map_err(|error| match error {
                    Trouble::Call { source, .. } => call(&path, source),
                    other => other,
                })?;
                self.moved.bytes += header.size;
            }
            Kind::Link => {
                replacing(&parent, name, || rustix::fs::symlinkat(&header.link[..], &parent, name))
                    .map_err(|error| call(&path, error))?
            }
            Kind::HardLink => self.hard_link(&parent, name, &path, &header.link)?,
            Kind::Device => return Err(refused(&path, "it is a device")),
            Kind::Fifo => return Err(refused(&path, "it is a FIFO")),
        }
        self.parent = Some((dir.to_vec(), parent));
        self.moved.entries += 1;
        Ok(())
    }

    /// Opens a directory beneath the target, and makes what is missing of it.
    fn parent(&mut self, path: &[u8]) -> Result<OwnedFd> {
        if let Some((known, dir)) = self.parent.take()
            && known == path
        {
            return Ok(dir);
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = |dir: BorrowedFd<'_>, name: &[u8]| open_beneath(dir, name, flags);
        let trap = |error| match error {
            Errno::LOOP | Errno::NOTDIR => refused(path, "a link or a file is on its way"),
            error => call(path, error),
        };
        if path.is_empty() {
            return open(self.target, b".").map_err(trap);
        }
        match open(self.target, path) {
            Ok(dir) => return Ok(dir),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(trap(error)),
        }
        let mut dir = open(self.target, b".").map_err(trap)?;
        for name in path.split(|byte| *byte == b'/') {
            match rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(call(path, error)),
            }
            dir = open(dir.as_fd(), name).map_err(trap)?;
        }
        Ok(dir)
    }

    fn directory(&mut self, parent: &OwnedFd, name: &[u8], path: &[u8], mode: u32) -> Result<()> {
        match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700 | mode)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(call(path, error)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = open_beneath(parent.as_fd(), name, flags);
        let made = made.map_err(|error| match error {
            Errno::LOOP | Errno::NOTDIR => refused(path, "something else is at its place"),
            error => call(path, error),
        })?;
        rustix::fs::fchmod(&made, Mode::from_raw_mode(0o700 | mode))
            .map_err(|error| call(path, error))?;
        if mode & 0o700 != 0o700 && self.shut.len() < MAX_DELAYED {
            self.shut.push((path.to_vec(), mode));
        }
        Ok(())
    }

    /// Gives a file that was unpacked before one more name.
    fn hard_link(
        &mut self,
        parent: &OwnedFd,
        name: &[u8],
        path: &[u8],
        target: &[u8],
    ) -> Result<()> {
        let target = clean(target)?;
        let (dir, old) = halves(&target);
        if old.is_empty() {
            return Err(refused(path, "it is a link to nothing"));
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let dir = if dir.is_empty() { b"." } else { dir };
        let dir = open_beneath(self.target, dir, flags);
        let dir = dir.map_err(|error| match error {
            Errno::LOOP | Errno::NOTDIR => refused(path, "a link is on the way to what it names"),
            error => call(path, error),
        })?;
        // Not followed: a link to a link is a link, and leads nowhere by itself.
        let linked = replacing(parent, name, || {
            rustix::fs::linkat(&dir, old, parent, name, AtFlags::empty())
        });
        linked.map_err(|error| call(path, error))
    }

    /// Takes away the rights that were lent to directories while they were filled.
    fn finish(&mut self) {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for (path, mode) in self.shut.iter().rev() {
            let place = open_beneath(self.target, path, flags);
            if let Ok(place) = place {
                let _ = rustix::fs::fchmod(place, Mode::from_raw_mode(*mode));
            }
        }
    }
}

/// Makes something at a name, instead of what is there unless that is a directory.
fn replacing<T>(
    parent: &OwnedFd,
    name: &[u8],
    mut make: impl FnMut() -> rustix::io::Result<T>,
) -> io::Result<T> {
    for _ in 0..16 {
        match make() {
            Err(Errno::EXIST) => rustix::fs::unlinkat(parent, name, AtFlags::empty())?,
            other => return Ok(other?),
        }
    }
    Err(Errno::EXIST.into())
}

fn write_file(parent: &OwnedFd, name: &[u8], header: &Header, input: &mut impl Read) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(0o600));
    let file = replacing(parent, name, open).map_err(|error| call(b"", error))?;
    let written = fill(&mut File::from(file.try_clone().map_err(|e| call(b"", e))?), header, input)
        .and_then(|()| {
            let mode = Mode::from_raw_mode(header.mode);
            rustix::fs::fchmod(&file, mode).map_err(|error| call(b"", error))?;
            let (tv_sec, nanos) = header.modified;
            let at = Timespec { tv_sec, tv_nsec: nanos.into() };
            // A time that the filesystem cannot hold is no reason to give up.
            let times = Timestamps { last_access: at, last_modification: at };
            let _ = rustix::fs::futimens(&file, &times);
            Ok(())
        });
    if written.is_err() {
        // Half a file under its name would look like a whole one.
        let _ = rustix::fs::unlinkat(parent, name, AtFlags::empty());
    }
    written
}

fn fill(file: &mut File, header: &Header, input: &mut impl Read) -> Result<()> {
    let size = usize::try_from(header.size).unwrap_or(CHUNK).clamp(1, CHUNK);
    let (mut left, mut buffer) = (header.size, vec![0; size]);
    while left > 0 {
        let want = usize::try_from(left).unwrap_or(CHUNK).min(buffer.len());
        match input.read(&mut buffer[..want]) {
            Ok(got) => {
                file.write_all(&buffer[..got]).map_err(|error| call(b"", error))?;
                left -= got as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(refused(&header.path, "the archive ends within it"));
            }
            Err(error) => return Err(call(b"", error)),
        }
    }
    Ok(())
}

// --- Packing ------------------------------------------------------------------------------------

/// Packs what is in a directory, or one file under the name that is given.
///
/// Links are packed as links and followed nowhere. What cannot be read is counted and left out.
pub fn pack(output: &mut impl Write, source: OwnedFd, name: &[u8]) -> Result<Moved> {
    pack_as(output, source, name, None)
}

/// As [`pack`], with these permissions for everything, if any are given.
pub fn pack_as(
    output: &mut impl Write,
    source: OwnedFd,
    name: &[u8],
    mode: Option<u32>,
) -> Result<Moved> {
    let mut moved = Moved::default();
    let stat = rustix::fs::fstat(&source).map_err(|error| call(name, error))?;
    if FileType::from_raw_mode(stat.st_mode).is_dir() {
        pack_tree(output, source, mode, &mut moved)?;
    } else {
        pack_file(output, name, File::from(source), &moded(stat, mode), &mut moved)?;
    }
    let end = [0; 2 * BLOCK];
    output.write_all(&end).map_err(|error| call(b"", error))?;
    Ok(moved)
}

fn moded(mut stat: Stat, mode: Option<u32>) -> Stat {
    if let Some(mode) = mode {
        stat.st_mode = stat.st_mode & !0o7777 | mode & 0o777;
    }
    stat
}

fn pack_tree(
    output: &mut impl Write,
    top: OwnedFd,
    mode: Option<u32>,
    moved: &mut Moved,
) -> Result<()> {
    let top = Dir::new(top).map_err(|error| call(b"", error))?;
    let mut levels = vec![(top, 0)];
    let mut path = Vec::new();
    while let Some((dir, length)) = levels.last_mut() {
        path.truncate(*length);
        let Some(found) = dir.read() else {
            levels.pop();
            continue;
        };
        let found = found.map_err(|error| call(&path, error))?;
        let name = found.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        let place = dir.fd().map_err(|error| call(&path, error))?;
        let Ok(stat) = rustix::fs::statat(place, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        let stat = moded(stat, mode);
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        let opened = |flags| {
            let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
            open_beneath(place, name, flags | OFlags::CLOEXEC).ok()
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let file = opened(OFlags::RDONLY).and_then(|file| {
                    // It may have become something else since.
                    let stat = rustix::fs::fstat(&file).ok()?;
                    let same = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
                    same.then_some((file, stat))
                });
                match file {
                    Some((file, stat)) => {
                        pack_file(output, &path, File::from(file), &moded(stat, mode), moved)?;
                    }
                    None => moved.skipped += 1,
                }
            }
            FileType::Directory => {
                let below = opened(OFlags::RDONLY | OFlags::DIRECTORY);
                let Some(below) = below.and_then(|below| Dir::new(below).ok()) else {
                    moved.skipped += 1;
                    continue;
                };
                if levels.len() >= MAX_DEPTH {
                    return Err(Trouble::TooDeep { path });
                }
                head(output, &[&path[..], b"/"].concat(), b'5', b"", &stat, 0)?;
                moved.entries += 1;
                let length = path.len();
                levels.push((below, length));
            }
            FileType::Symlink => match rustix::fs::readlinkat(place, name, Vec::new()) {
                Ok(target) => {
                    head(output, &path, b'2', target.as_bytes(), &stat, 0)?;
                    moved.entries += 1;
                }
                Err(_) => moved.skipped += 1,
            },
            _ => moved.skipped += 1,
        }
    }
    Ok(())
}

fn pack_file(
    output: &mut impl Write,
    path: &[u8],
    mut file: File,
    stat: &Stat,
    moved: &mut Moved,
) -> Result<()> {
    let size: u64 = stat.st_size.try_into().unwrap_or_default();
    head(output, path, b'0', b"", stat, size)?;
    let mut buffer = vec![0; usize::try_from(size).unwrap_or(CHUNK).clamp(1, CHUNK)];
    let mut left = size;
    let mut gone = false;
    while left > 0 {
        let want = usize::try_from(left).unwrap_or(CHUNK).min(buffer.len());
        let mut got = want;
        if !gone {
            got = match file.read(&mut buffer[..want]) {
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => 0,
            };
            if got == 0 {
                // It became shorter; the header has promised its length.
                gone = true;
                buffer.fill(0);
                continue;
            }
        }
        output.write_all(&buffer[..got]).map_err(|error| call(path, error))?;
        left -= got as u64;
    }
    let pad = usize::try_from(padding(size)).unwrap_or_default();
    output.write_all(&[0; BLOCK][..pad]).map_err(|error| call(path, error))?;
    moved.entries += 1;
    moved.bytes += size;
    Ok(())
}

/// Writes the header of an entry, after one of pax for what does not fit.
fn head(
    output: &mut impl Write,
    path: &[u8],
    kind: u8,
    link: &[u8],
    stat: &Stat,
    size: u64,
) -> Result<()> {
    let mut records = Vec::new();
    if path.len() > 100 {
        record(&mut records, b"path", path);
    }
    if link.len() > 100 {
        record(&mut records, b"linkpath", link);
    }
    // Eleven octal digits.
    if size >= 1 << 33 {
        record(&mut records, b"size", size.to_string().as_bytes());
    }
    let mut write = |bytes: &[u8]| output.write_all(bytes).map_err(|error| call(path, error));
    let modified = stat.st_mtime.try_into().unwrap_or_default();
    if !records.is_empty() {
        let length = records.len() as u64;
        write(&block(b"././@PaxHeader", b'x', b"", 0o644, length, 0))?;
        records.resize(records.len() + usize::try_from(padding(length)).unwrap_or_default(), 0);
        write(&records)?;
    }
    write(&block(path, kind, link, stat.st_mode & 0o777, size, modified))
}

fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    // Its length counts itself.
    let rest = key.len() + value.len() + 3;
    let mut length = rest;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(length.to_string().as_bytes());
    records.extend_from_slice(&[b" ", key, b"=", value, b"\n"].concat());
}

fn block(path: &[u8], kind: u8, link: &[u8], mode: u32, size: u64, modified: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &path[..path.len().min(100)]);
    put(100, format!("{mode:07o}").as_bytes());
    put(108, b"0000000");
    put(116, b"0000000");
    put(124, format!("{:011o}", size.min((1 << 33) - 1)).as_bytes());
    put(136, format!("{:011o}", modified.min((1 << 33) - 1)).as_bytes());
    put(156, &[kind]);
    put(157, &link[..link.len().min(100)]);
    put(257, b"ustar\x0000");
    let sum = format!("{:06o}\0 ", sum(&block));
    block[148..156].copy_from_slice(sum.as_bytes());
    block
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::{Path, PathBuf};

    use super::*;

    /// A directory of its own, removed at the end.
    struct Place(PathBuf);

    impl Place {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("warren-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            std::fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn open(&self) -> OwnedFd {
            File::open(&self.0).unwrap().into()
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn stat_of(mode: u32) -> Stat {
        let mut stat = rustix::fs::stat("/").unwrap();
        (stat.st_mode, stat.st_mtime) = (mode, 1_000_000_000);
        stat
    }

    /// An archive of these: name, kind, link or contents.
    fn archive(entries: &[(&[u8], u8, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (name, kind, what) in entries {
            let (link, contents) =
                if *kind == b'0' { (&b""[..], *what) } else { (*what, &b""[..]) };
            let size = contents.len() as u64;
            head(&mut bytes, name, *kind, link, &stat_of(0o6755), size).unwrap();
            bytes.extend_from_slice(contents);
            bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        }
        bytes.resize(bytes.len() + 2 * BLOCK, 0);
        bytes
    }

    fn unpack_at(bytes: &[u8], place: &Path) -> Result<Moved> {
        let dir: OwnedFd = File::open(place).unwrap().into();
        unpack(&mut &bytes[..], dir.as_fd())
    }

    #[test]
    fn a_tree_comes_out_as_it_went_in() {
        let (from, to) = (Place::new("pack"), Place::new("unpack"));
        let odd = std::ffi::OsStr::from_bytes(b"\xff\xfe");
        let deep = from.0.join("d".repeat(90)).join("e".repeat(90)).join("f".repeat(200));
        std::fs::create_dir_all(deep.parent().unwrap()).unwrap();
        std::fs::write(&deep, vec![7; 100_000]).unwrap();
        std::fs::write(from.0.join(odd), b"").unwrap();
        std::fs::set_permissions(from.0.join(odd), PermissionsExt::from_mode(0o4751)).unwrap();
        symlink("/etc/passwd", from.0.join("link")).unwrap();
        symlink("x".repeat(300), from.0.join("long")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            from.0.join("fifo"),
            FileType::Fifo,
            Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        std::fs::create_dir(from.0.join("shut")).unwrap();
        std::fs::write(from.0.join("shut/file"), b"in").unwrap();
        std::fs::set_permissions(from.0.join("shut"), PermissionsExt::from_mode(0o555)).unwrap();
        let mut bytes = Vec::new();
        let packed = pack(&mut bytes, from.open(), b"").unwrap();
        assert_eq!((packed.entries, packed.bytes, packed.skipped), (8, 100_002, 1));
        let unpacked = unpack_at(&bytes, &to.0).unwrap();
        assert_eq!((unpacked.entries, unpacked.bytes), (8, 100_002));
        let there = |path: &Path| to.0.join(path.strip_prefix(&from.0).unwrap());
        assert_eq!(std::fs::read(there(&deep)).unwrap(), vec![7; 100_000]);
        let mode = |name: &std::ffi::OsStr| {
            std::fs::symlink_metadata(to.0.join(name)).unwrap().permissions().mode() & 0o7777
        };
        assert_eq!((mode(odd), mode("shut".as_ref())), (0o751, 0o555), "no set-uid");
        assert_eq!(std::fs::read_link(to.0.join("link")).unwrap(), Path::new("/etc/passwd"));
        assert_eq!(std::fs::read_link(to.0.join("long")).unwrap().as_os_str().len(), 300);
        for place in [&from.0, &to.0] {
            std::fs::set_permissions(place.join("shut"), PermissionsExt::from_mode(0o755)).unwrap();
        }
    }

    #[test]
    fn tar_of_the_host_reads_what_is_packed_and_writes_what_is_unpacked() {
        let (from, to) = (Place::new("gnu-from"), Place::new("gnu-to"));
        let name = "n".repeat(150);
        std::fs::write(from.0.join(&name), b"long").unwrap();
        std::fs::hard_link(from.0.join(&name), from.0.join("second")).unwrap();
        for format in ["gnu", "pax", "ustar", "v7"] {
            if matches!(format, "ustar" | "v7") {
                let _ = std::fs::remove_file(from.0.join(&name));
            }
            let made = std::process::Command::new("tar")
                .args(["-c", "--format", format, "-C"])
                .arg(&from.0)
                .arg(".")
                .output()
                .unwrap();
            assert!(made.status.success());
            unpack_at(&made.stdout, &to.0).unwrap();
            assert_eq!(std::fs::read(to.0.join("second")).unwrap(), b"long", "{format}");
        }
        let mut bytes = Vec::new();
        pack(&mut bytes, to.open(), b"").unwrap();
        let file = to.0.join("archive.tar");
        std::fs::write(&file, bytes).unwrap();
        let list = std::process::Command::new("tar").arg("-tf").arg(&file).output().unwrap();
        let list = String::from_utf8(list.stdout).unwrap();
        let mut names: Vec<&str> = list.lines().collect();
        names.sort_unstable();
        assert_eq!(names, [name.as_str(), "second"]);
    }

    #[test]
    fn nothing_gets_out_of_the_directory() {
        let outer = Place::new("escape");
        let place = outer.0.join("inside");
        std::fs::write(outer.0.join("victim"), b"safe").unwrap();
        let fine = archive(&[(b"a/./b//c", b'0', b"x"), (b"./", b'5', b"")]);
        std::fs::create_dir(&place).unwrap();
        unpack_at(&fine, &place).unwrap();
        assert_eq!(std::fs::read(place.join("a/b/c")).unwrap(), b"x", "control: it does unpack");
        let cases: [(&str, Vec<u8>); 9] = [
            ("dots", archive(&[(b"../victim", b'0', b"bad")])),
            ("dots within", archive(&[(b"a/../../victim", b'0', b"bad")])),
            ("absolute", archive(&[(b"/tmp/warren-bad", b'0', b"bad")])),
            ("through a link", archive(&[(b"l", b'2', b".."), (b"l/victim", b'0', b"bad")])),
            ("directory over a link", archive(&[(b"m", b'2', b".."), (b"m", b'5', b"")])),
            ("hard link out", archive(&[(b"h", b'1', b"../victim")])),
            (
                "hard link through a link",
                archive(&[(b"n", b'2', b".."), (b"h", b'1', b"n/victim")]),
            ),
            ("device", archive(&[(b"null", b'3', b"")])),
            ("fifo", archive(&[(b"pipe", b'6', b"")])),
        ];
        for (name, bytes) in cases {
            let result = unpack_at(&bytes, &place);
            assert!(matches!(result, Err(Trouble::Refused { .. })), "{name}: {result:?}");
            assert_eq!(std::fs::read(outer.0.join("victim")).unwrap(), b"safe", "{name}");
        }
        // A link as the last part is replaced, not written through.
        let over = archive(&[(b"o", b'2', b"../victim"), (b"o", b'0', b"mine")]);
        unpack_at(&over, &place).unwrap();
        assert_eq!(std::fs::read(place.join("o")).unwrap(), b"mine");
        assert_eq!(std::fs::read(outer.0.join("victim")).unwrap(), b"safe");
        let mode = std::fs::metadata(place.join("o")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o755, "no set-uid");
    }

    #[test]
    fn nonsense_is_refused_and_takes_no_memory() {
        let place = Place::new("nonsense");
        let good = archive(&[(b"f", b'0', &[1; 2000])]);
        let cut = &good[..BLOCK + 1000];
        let mut huge = block(b"x", b'L', b"", 0, (1 << 33) - 1, 0).to_vec();
        huge.extend_from_slice(&[0; BLOCK]);
        let mut damaged = good.clone();
        damaged[0] ^= 1;
        let mut pax = block(b"x", b'x', b"", 0, 10, 0).to_vec();
        pax.extend_from_slice(b"99999 a=b\n");
        pax.resize(2 * BLOCK, 0);
        let sparse = archive(&[(b"s", b'S', b"")]);
        for (name, bytes) in [
            ("cut", cut),
            ("huge name", &huge),
            ("damaged", &damaged),
            ("pax", &pax),
            ("sparse", &sparse),
            ("text", &[b'a'; 4000]),
        ] {
            let result = unpack_at(bytes, &place.0);
            assert!(matches!(result, Err(Trouble::Refused { .. })), "{name}: {result:?}");
        }
        assert!(!place.0.join("f").exists(), "no half of a file is left");
        assert_eq!(unpack_at(b"", &place.0).unwrap(), Moved::default(), "nothing is an archive");
    }

    #[test]
    fn bytes_that_are_no_archive_never_panic() {
        let place = Place::new("fuzz");
        let good = archive(&[(b"a", b'0', b"x"), (b"b", b'2', b"a"), (b"c", b'5', b"")]);
        let mut seed: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut next = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed
        };
        for _ in 0..2_000 {
            let mut bytes = good.clone();
            for _ in 0..=next() % 4 {
                let at = usize::try_from(next()).unwrap() % bytes.len();
                bytes[at] = next().to_le_bytes()[0];
                let start = at / BLOCK * BLOCK;
                let mut header: [u8; BLOCK] = bytes[start..start + BLOCK].try_into().unwrap();
                let sum = format!("{:06o}\0 ", sum(&header));
                header[148..156].copy_from_slice(sum.as_bytes());
                bytes[start..start + BLOCK].copy_from_slice(&header);
            }
            let _ = unpack_at(&bytes, &place.0);
        }
    }
}
