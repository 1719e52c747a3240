//! A layer of an image, from a tar stream to a directory that overlay can stand on.
//!
//! Whiteouts become overlay's own (a character device 0:0, which Linux lets anybody make, and
//! `user.overlay.opaque`), so that what the layer removes is not seen of the layers below it. They
//! never remove anything of the layer itself, whatever comes first in the stream.
//!
//! A layer may have been written by an attacker: names are resolved beneath the directory and through
//! no link, devices are left out, attributes that overlay reads are refused, and entries, bytes and
//! the memory for what has to wait for the end are bounded. After an error the directory holds
//! something; whoever asked throws it away.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use warren_init::archive::{BENEATH, Header, Kind, Reader, clean, halves};
use warren_init::plan::RANGE;

use super::{Digest, Hashing, ImageError};

/// A name that begins so removes the name behind it.
const WHITEOUT: &[u8] = b".wh.";
/// This one removes all that is below its directory.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Other names of a filesystem of old that mean nothing to anybody else.
const OLD_MARKS: &[u8] = b".wh..wh.";
const OPAQUE_ATTRIBUTE: &str = "user.overlay.opaque";
/// How many bytes of names may wait for the end of the stream.
const MAX_WAITING: usize = 64 << 20;
/// How many directories may lie in each other.
const MAX_DEPTH: usize = 200;
const PIECE: usize = 4096;
const CHUNK: usize = 64 * PIECE;

/// How much of a layer is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes of the stream when it is decompressed.
    pub bytes: u64,
}

impl Owners {
    /// Returns what holds for layers of whoever this process runs as.
    pub fn of_layers() -> Self {
        if rustix::process::geteuid().is_root() { Self::Kept } else { Self::Mine }
    }
}

impl Default for Bounds {
    fn default() -> Self {
        Self { entries: 2_000_000, bytes: 64 << 30 }
    }
}

/// Whose the files of a layer are on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owners {
    /// Each id as it is inside: a sandbox sees them through a mount that shifts them. Needs root.
    Kept,
    /// All of them whoever unpacks them, who is the only one inside as well. What its owner could
    /// not read gets that right: there is no root inside who could read it without.
    Mine,
}

/// What a layer turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unpacked {
    /// The digest of the stream as it came.
    pub digest: Digest,
    /// How long it was.
    pub size: u64,
    /// The digest of the tar archive in it.
    pub diff_id: Digest,
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes in files.
    pub bytes: u64,
    /// Devices, which are left out.
    pub skipped: u64,
    /// Whether it hides everything below it.
    pub hides_all: bool,
    /// Whether it took anything from the layers below, and would be another one on others.
    pub from_below: bool,
}

/// Where a layer is unpacked to.
#[derive(Debug)]
pub struct Onto<'a> {
    /// An empty directory.
    pub target: BorrowedFd<'a>,
    /// The layers that it will lie on, the uppermost first. A directory that the layer has something
    /// in but says nothing of is as it is there.
    pub below: Vec<PathBuf>,
    /// Whose the files will be.
    pub owners: Owners,
    /// How much is taken.
    pub bounds: Bounds,
}

/// Unpacks a layer (tar, alone or compressed by gzip or zstd) and reads it to its end.
pub fn unpack(input: impl Read, onto: &Onto<'_>) -> Result<Unpacked, ImageError> {
    let bounds = onto.bounds;
    let mut compressed = BufReader::with_capacity(CHUNK, Hashing::new(input));
    let (mut layer, diff_id) = {
        let plain: Box<dyn Read + '_> = decompressed(&mut compressed)?;
        let bounded = Bounded { input: plain, left: bounds.bytes };
        let mut reader = Reader::new(Hashing::new(bounded));
        let mut layer = Layer::new(onto);
        layer.read(&mut reader).map_err(|error| too_large(error, bounds))?;
        let mut rest = reader.into_inner();
        let drained = io::copy(&mut rest, &mut io::sink());
        drained.map_err(|error| too_large(ImageError::call("read the layer", error), bounds))?;
        (layer, rest.finish().1)
    };
    io::copy(&mut compressed, &mut io::sink())
        .map_err(|error| ImageError::call("read the layer", error))?;
    layer.finish()?;
    let (size, digest) = compressed.into_inner().finish();
    Ok(Unpacked {
        digest,
        size,
        diff_id,
        entries: layer.entries,
        bytes: layer.bytes,
        skipped: layer.skipped,
        hides_all: layer.hides_all,
        from_below: layer.from_below,
    })
}

/// Returns a reader of what is in a stream, told by its first bytes.
pub(crate) fn decompressed<'a>(
    input: &'a mut impl BufRead,
) -> Result<Box<dyn Read + 'a>, ImageError> {
    let read = |error| ImageError::call("read the layer", error);
    let head = input.fill_buf().map_err(read)?;
    Ok(match head {
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            Box::new(zstd::stream::read::Decoder::with_buffer(input).map_err(read)?)
        }
        _ => Box::new(input),
    })
}

/// A reader that gives so much and no more.
struct Bounded<R> {
    input: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.input.read(buffer)?;
        self.left = self.left.checked_sub(got as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(got)
    }
}

fn too_large(error: ImageError, bounds: Bounds) -> ImageError {
    match error {
        ImageError::Call { source, .. } if source.kind() == io::ErrorKind::FileTooLarge => {
            let what = "the layer".to_owned();
            ImageError::TooLarge { what, limit: bounds.bytes, unit: "bytes" }
        }
        other => other,
    }
}

fn shown(path: &[u8]) -> String {
    format!("`{}`", String::from_utf8_lossy(path).escape_debug())
}

fn refused(path: &[u8], why: &str) -> ImageError {
    ImageError::refused(shown(path), why)
}

fn call(path: &[u8], error: impl Into<io::Error>) -> ImageError {
    ImageError::call(format!("unpack {}", shown(path)), error)
}

/// What a name already is in the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum There {
    Nothing,
    Whiteout,
    Directory,
    Other,
}

struct Layer<'a> {
    target: BorrowedFd<'a>,
    below: &'a [PathBuf],
    owners: Owners,
    bounds: Bounds,
    /// The directory of the last entry, which is mostly that of the next.
    parent: Option<(Vec<u8>, OwnedFd)>,
    /// Directories, which get their rights and times once all is in them.
    waiting: Vec<(Vec<u8>, Header)>,
    waiting_bytes: usize,
    buffer: Vec<u8>,
    entries: u64,
    bytes: u64,
    skipped: u64,
    hides_all: bool,
    from_below: bool,
}

impl<'a> Layer<'a> {
    fn new(onto: &'a Onto<'_>) -> Self {
        Self {
            target: onto.target,
            below: &onto.below,
            owners: onto.owners,
            bounds: onto.bounds,
            parent: None,
            waiting: Vec::new(),
            waiting_bytes: 0,
            buffer: vec![0; CHUNK],
            entries: 0,
            bytes: 0,
            skipped: 0,
            hides_all: false,
            from_below: false,
        }
    }

    fn read(&mut self, reader: &mut Reader<impl Read>) -> Result<(), ImageError> {
        // A layer that says nothing of its top is the same whenever it is unpacked.
        self.wait(Vec::new(), plain_directory())?;
        while let Some(header) = reader.next_entry()? {
            self.entries += 1;
            if self.entries > self.bounds.entries {
                let what = "the layer".to_owned();
                return Err(ImageError::TooLarge {
                    what,
                    limit: self.bounds.entries,
                    unit: "entries",
                });
            }
            self.entry(header, reader)?;
        }
        Ok(())
    }

    fn entry(&mut self, header: Header, input: &mut impl Read) -> Result<(), ImageError> {
        let path = clean(&header.path)?;
        if path.is_empty() {
            return match header.kind {
                Kind::Directory => self.wait(path, header),
                _ => Err(refused(&header.path, "it has no name")),
            };
        }
        if path.iter().filter(|byte| **byte == b'/').count() >= MAX_DEPTH {
            return Err(refused(&path[..64], "it is too deep a tree"));
        }
        let (dir, name) = halves(&path);
        if dir.split(|byte| *byte == b'/').any(|part| part.starts_with(WHITEOUT)) {
            return Err(refused(&path, "it is below something that is removed"));
        }
        let parent = self.parent(dir)?;
        if name.starts_with(WHITEOUT) {
            self.remove(&parent, dir, name, &path)?;
        } else {
            self.make(&parent, name, &path, header, input)?;
        }
        self.parent = Some((dir.to_vec(), parent));
        Ok(())
    }

    /// Makes what the entry stands for.
    fn make(
        &mut self,
        parent: &OwnedFd,
        name: &[u8],
        path: &[u8],
        header: Header,
        input: &mut impl Read,
    ) -> Result<(), ImageError> {
        let failed = |error: Errno| call(path, error);
        match header.kind {
            Kind::Device => {
                // Nothing inside could open it, and 0:0 would remove what is below.
                self.skipped += 1;
                return Ok(());
            }
            Kind::Directory => {
                self.directory(parent, name, path)?;
                return self.wait(path.to_vec(), header);
            }
            Kind::HardLink => {
                self.clear(parent, name, path)?;
                return self.hard_link(parent, name, path, &header.link);
            }
            Kind::File => {
                self.clear(parent, name, path)?;
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
                let mode = Mode::from_raw_mode(0o600);
                let file = rustix::fs::openat(parent, name, flags | OFlags::CLOEXEC, mode);
                let file = File::from(file.map_err(failed)?);
                self.fill(&file, &header, input).map_err(|error| match error.kind() {
                    io::ErrorKind::UnexpectedEof => refused(path, "the layer ends within it"),
                    _ => call(path, error),
                })?;
                self.bytes += header.size;
                return self.adorn(file.as_fd(), path, &header);
            }
            Kind::Link => {
                self.clear(parent, name, path)?;
                rustix::fs::symlinkat(&header.link[..], parent, name).map_err(failed)?;
            }
            Kind::Fifo => {
                self.clear(parent, name, path)?;
                let mode = Mode::from_raw_mode(0o600);
                rustix::fs::mknodat(parent, name, FileType::Fifo, mode, 0).map_err(failed)?;
                // Not followed, and of a FIFO that was made just now.
                let mode = Mode::from_raw_mode(header.mode);
                rustix::fs::chmodat(parent, name, mode, AtFlags::empty()).map_err(failed)?;
            }
        }
        if let Some((uid, gid)) = self.owner(path, &header)? {
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            rustix::fs::chownat(parent, name, Some(uid), Some(gid), flags).map_err(failed)?;
        }
        let times = times(&header);
        // A time that the filesystem cannot hold is no reason to give up.
        let _ = rustix::fs::utimensat(parent, name, &times, AtFlags::SYMLINK_NOFOLLOW);
        Ok(())
    }

    /// Says of a name, or of all of a directory, that nothing of the layers below is seen.
    fn remove(
        &mut self,
        parent: &OwnedFd,
        dir: &[u8],
        name: &[u8],
        path: &[u8],
    ) -> Result<(), ImageError> {
        if name == OPAQUE {
            // Overlay looks for the mark on no layer's top.
            if dir.is_empty() {
                self.hides_all = true;
                return Ok(());
            }
            return set_opaque(parent, path);
        }
        if name.starts_with(OLD_MARKS) {
            self.skipped += 1;
            return Ok(());
        }
        let gone = &name[WHITEOUT.len()..];
        if matches!(gone, b"" | b"." | b"..") {
            return Err(refused(path, "it removes nothing that has a name"));
        }
        match there(parent, gone, path)? {
            There::Nothing => {
                let mode = Mode::from_raw_mode(0o600);
                rustix::fs::mknodat(parent, gone, FileType::CharacterDevice, mode, 0)
                    .map_err(|error| call(path, error))
            }
            // What the layer itself has stays; a directory is then all that there is of it.
            There::Directory => set_opaque(&self.open(parent.as_fd(), gone, path)?, path),
            There::Whiteout | There::Other => Ok(()),
        }
    }

    /// Makes way for what is no directory.
    fn clear(&mut self, parent: &OwnedFd, name: &[u8], path: &[u8]) -> Result<(), ImageError> {
        let flags = match there(parent, name, path)? {
            There::Nothing => return Ok(()),
            There::Directory => AtFlags::REMOVEDIR,
            There::Whiteout | There::Other => AtFlags::empty(),
        };
        // The directory may be the one that is kept open; its name is gone then.
        self.parent = None;
        rustix::fs::unlinkat(parent, name, flags).map_err(|error| match error {
            Errno::NOTEMPTY | Errno::EXIST => refused(path, "a directory is at its place"),
            error => call(path, error),
        })
    }

    fn directory(&mut self, parent: &OwnedFd, name: &[u8], path: &[u8]) -> Result<(), ImageError> {
        let before = there(parent, name, path)?;
        match before {
            There::Directory => return Ok(()),
            There::Nothing => {}
            There::Whiteout | There::Other => {
                rustix::fs::unlinkat(parent, name, AtFlags::empty())
                    .map_err(|error| call(path, error))?;
            }
        }
        rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700))
            .map_err(|error| call(path, error))?;
        if before == There::Whiteout {
            set_opaque(&self.open(parent.as_fd(), name, path)?, path)?;
        }
        Ok(())
    }

    /// Gives a file of this layer one more name.
    fn hard_link(
        &self,
        parent: &OwnedFd,
        name: &[u8],
        path: &[u8],
        target: &[u8],
    ) -> Result<(), ImageError> {
        let target = clean(target).map_err(|_| refused(path, "it links to what is outside"))?;
        let (dir, old) = halves(&target);
        let dir = if dir.is_empty() { b"." } else { dir };
        let lost = || refused(path, "it links to what is not in the layer");
        let dir = match self.open(self.target, dir, path) {
            Ok(dir) if !old.is_empty() => dir,
            Ok(_) => return Err(lost()),
            Err(ImageError::Call { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(lost());
            }
            Err(error) => return Err(error),
        };
        match there(&dir, old, path)? {
            There::Other => {}
            There::Nothing | There::Whiteout => return Err(lost()),
            There::Directory => return Err(refused(path, "it links to a directory")),
        }
        // Not followed: a link to a link is a link, and leads nowhere by itself.
        rustix::fs::linkat(&dir, old, parent, name, AtFlags::empty())
            .map_err(|error| call(path, error))
    }

    /// Opens a directory beneath the target, and makes what is missing of it.
    fn parent(&mut self, path: &[u8]) -> Result<OwnedFd, ImageError> {
        if let Some((known, dir)) = self.parent.take()
            && known == path
        {
            return Ok(dir);
        }
        if path.is_empty() {
            return self.open(self.target, b".", path);
        }
        match self.open(self.target, path, path) {
            Err(ImageError::Call { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            opened => return opened,
        }
        let mut dir = self.open(self.target, b".", path)?;
        let mut length = 0;
        for name in path.split(|byte| *byte == b'/') {
            length += name.len() + 1;
            let before = there(&dir, name, path)?;
            match before {
                There::Directory => {}
                There::Nothing | There::Whiteout => self.directory(&dir, name, path)?,
                There::Other => return Err(refused(path, "a link or a file is on its way")),
            }
            dir = self.open(dir.as_fd(), name, path)?;
            if before == There::Nothing {
                self.inherit(&path[..length - 1])?;
            } else if before == There::Whiteout {
                self.wait(path[..length - 1].to_vec(), plain_directory())?;
            }
        }
        Ok(dir)
    }

    /// Has a directory that the layer says nothing of be as it is below, or a plain one. Should the
    /// layer say something of it after all, that comes later and holds.
    fn inherit(&mut self, path: &[u8]) -> Result<(), ImageError> {
        let mut header = plain_directory();
        let name = std::ffi::OsStr::from_bytes(path);
        let found = self.below.iter().find_map(|layer| {
            let layer = File::open(layer).ok()?;
            let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let found = rustix::fs::openat2(&layer, name, flags, Mode::empty(), BENEATH).ok()?;
            rustix::fs::fstat(&found).ok()
        });
        if let Some(stat) = found
            && FileType::from_raw_mode(stat.st_mode).is_dir()
        {
            (header.mode, header.uid, header.gid) =
                (stat.st_mode & 0o7777, stat.st_uid.into(), stat.st_gid.into());
            let nanos = u32::try_from(stat.st_mtime_nsec).unwrap_or_default();
            header.modified = (stat.st_mtime, nanos);
            self.from_below = true;
        }
        self.wait(path.to_vec(), header)
    }

    /// Opens a directory, through no link.
    fn open(&self, dir: BorrowedFd<'_>, name: &[u8], path: &[u8]) -> Result<OwnedFd, ImageError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat2(dir, name, flags, Mode::empty(), BENEATH).map_err(|error| match error {
            Errno::LOOP | Errno::NOTDIR => refused(path, "a link or a file is on its way"),
            error => call(path, error),
        })
    }

    /// Has a directory wait for the end, when its own rights can hold nobody up any more.
    fn wait(&mut self, path: Vec<u8>, header: Header) -> Result<(), ImageError> {
        let attributes: usize = header.attributes.iter().map(|(n, v)| n.len() + v.len()).sum();
        self.waiting_bytes += path.len() + attributes + size_of::<(Vec<u8>, Header)>();
        if self.waiting_bytes > MAX_WAITING {
            let limit = MAX_WAITING as u64;
            let what = "the names of the layer's directories".to_owned();
            return Err(ImageError::TooLarge { what, limit, unit: "bytes" });
        }
        let header = Header { path: Vec::new(), ..header };
        self.waiting.push((path, header));
        Ok(())
    }

    fn finish(&mut self) -> Result<(), ImageError> {
        self.parent = None;
        // In the order of the stream: of a name that is there twice, the last holds.
        for (path, header) in std::mem::take(&mut self.waiting) {
            let name = if path.is_empty() { &b"."[..] } else { &path };
            let dir = match self.open(self.target, name, &path) {
                // Something else took its place later in the stream.
                Err(ImageError::Refused { .. }) => continue,
                Err(ImageError::Call { source, .. })
                    if source.kind() == io::ErrorKind::NotFound =>
                {
                    continue;
                }
                opened => opened?,
            };
            self.adorn(dir.as_fd(), &path, &header)?;
        }
        Ok(())
    }

    /// Writes the contents of a file; what is zero is a hole.
    fn fill(&mut self, mut file: &File, header: &Header, input: &mut impl Read) -> io::Result<()> {
        let mut left = header.size;
        while left > 0 {
            let want = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
            input.read_exact(&mut self.buffer[..want])?;
            left -= want as u64;
            if self.buffer[..want].iter().all(|byte| *byte == 0) {
                file.seek(SeekFrom::Current(i64::try_from(want).unwrap_or_default()))?;
            } else {
                file.write_all(&self.buffer[..want])?;
            }
        }
        Ok(rustix::fs::ftruncate(file, header.size)?)
    }

    fn owner(&self, path: &[u8], header: &Header) -> Result<Option<(Uid, Gid)>, ImageError> {
        if self.owners == Owners::Mine {
            return Ok(None);
        }
        let id = |id: u64| {
            let id = u32::try_from(id).ok().filter(|id| *id < RANGE);
            id.ok_or_else(|| refused(path, "its owner is none of the 65536 ids of a sandbox"))
        };
        Ok(Some((Uid::from_raw(id(header.uid)?), Gid::from_raw(id(header.gid)?))))
    }

    /// Gives a file or a directory its owner, rights, attributes and times, in the order in which the
    /// kernel takes none of them back.
    fn adorn(&self, place: BorrowedFd<'_>, path: &[u8], header: &Header) -> Result<(), ImageError> {
        let failed = |error: Errno| call(path, error);
        if let Some((uid, gid)) = self.owner(path, header)? {
            rustix::fs::fchown(place, Some(uid), Some(gid)).map_err(failed)?;
        }
        let lent = match (self.owners, header.kind) {
            (Owners::Kept, _) => 0,
            (Owners::Mine, Kind::Directory) => 0o700,
            (Owners::Mine, _) => 0o400,
        };
        let mode = Mode::from_raw_mode(header.mode | lent);
        rustix::fs::fchmod(place, mode).map_err(failed)?;
        for (name, value) in &header.attributes {
            if name.starts_with(b"user.overlay.") || name.starts_with(b"trusted.overlay.") {
                return Err(refused(path, "it has an attribute that overlay reads"));
            }
            let kept = name.starts_with(b"user.")
                || (name == b"security.capability" && self.owners == Owners::Kept);
            if kept {
                let set = rustix::fs::fsetxattr(place, &name[..], value, XattrFlags::empty());
                set.map_err(failed)?;
            }
        }
        let _ = rustix::fs::futimens(place, &times(header));
        Ok(())
    }
}

/// A directory of which nothing is known.
fn plain_directory() -> Header {
    Header {
        kind: Kind::Directory,
        path: Vec::new(),
        link: Vec::new(),
        mode: 0o755,
        uid: 0,
        gid: 0,
        modified: (0, 0),
        size: 0,
        attributes: Vec::new(),
    }
}

fn times(header: &Header) -> Timestamps {
    let (tv_sec, nanos) = header.modified;
    let at = Timespec { tv_sec, tv_nsec: nanos.into() };
    Timestamps { last_access: at, last_modification: at }
}

fn there(parent: &OwnedFd, name: &[u8], path: &[u8]) -> Result<There, ImageError> {
    match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => Ok(There::Nothing),
        Err(error) => Err(call(path, error)),
        Ok(stat) => Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => There::Directory,
            FileType::CharacterDevice => There::Whiteout,
            _ => There::Other,
        }),
    }
}

fn set_opaque(dir: &OwnedFd, path: &[u8]) -> Result<(), ImageError> {
    rustix::fs::fsetxattr(dir, OPAQUE_ATTRIBUTE, b"y", XattrFlags::empty())
        .map_err(|error| call(path, error))
}
