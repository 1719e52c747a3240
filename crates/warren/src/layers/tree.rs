//! Trees of files that somebody else wrote: looked at, copied and removed by descriptor.
//!
//! Whoever filled a tree may have put anything there. So each step takes one name below an open
//! directory and follows no link, nothing but a regular file or a directory is ever opened, and what
//! is too deep is refused.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, SeekFrom, Stat, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use warren_init::plan::WORKLOAD_ID;

/// How many directories may lie in each other. Each costs two descriptors while it is walked.
pub(crate) const MAX_DEPTH: usize = 256;
/// What is compared, hashed and left out as a hole at once.
const CHUNK: usize = 64 * 1024;
/// How overlayfs marks a directory that hides what is below it.
pub(crate) const OPAQUE: &CStr = c"user.overlay.opaque";
/// What overlayfs keeps for itself. What a sandbox itself calls so is stored with the prefix doubled.
const OVERLAY: &[u8] = b"user.overlay.";
const ESCAPED: &[u8] = b"user.overlay.overlay.";
/// How many bytes of extended attributes one file may have.
const MAX_XATTRS: usize = 256 * 1024;
/// Who owns what has no owner inside.
const NOBODY: u32 = 65_534;

/// What an entry of a tree is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Directory,
    File,
    Symlink,
    Fifo,
    Socket,
    /// The mark of overlayfs that there is nothing of this name, whatever is below.
    Whiteout,
    /// A device, which no sandbox can make.
    Device,
}

/// What the kernel says of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Meta {
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    pub(crate) mtime: (i64, i64),
    pub(crate) ctime: (i64, i64),
    pub(crate) dev: u64,
    pub(crate) ino: u64,
    pub(crate) nlink: u64,
}

impl Meta {
    pub(crate) fn of(stat: &Stat) -> Self {
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => Kind::Directory,
            FileType::RegularFile => Kind::File,
            FileType::Symlink => Kind::Symlink,
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            FileType::CharacterDevice if stat.st_rdev == 0 => Kind::Whiteout,
            _ => Kind::Device,
        };
        Self {
            kind,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            size: u64::try_from(stat.st_size).unwrap_or_default(),
            mtime: (stat.st_mtime, i64::try_from(stat.st_mtime_nsec).unwrap_or_default()),
            ctime: (stat.st_ctime, i64::try_from(stat.st_ctime_nsec).unwrap_or_default()),
            dev: stat.st_dev,
            ino: stat.st_ino,
            nlink: stat.st_nlink,
        }
    }

    /// Looks at an entry, following no link.
    pub(crate) fn at(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Self> {
        Ok(Self::of(&rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?))
    }
}

/// Which id of the inside an id of a file stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ids {
    /// Files have the ids of the inside: a layer, as root keeps it.
    Same,
    /// Files of a live sandbox, whose ids begin here.
    From(u32),
    /// Everything is one user's, who is the commands' user inside.
    Single { uid: u32, gid: u32 },
}

impl Ids {
    /// How layers are kept by whoever we are.
    pub(crate) fn of_layers() -> Self {
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        if uid.is_root() {
            return Self::Same;
        }
        Self::Single { uid: uid.as_raw(), gid: gid.as_raw() }
    }

    pub(crate) fn inside(self, uid: u32, gid: u32) -> (u32, u32) {
        match self {
            Self::Same => (uid, gid),
            Self::From(base) => {
                let shift = |id: u32| {
                    id.checked_sub(base)
                        .filter(|id| *id < warren_init::plan::RANGE)
                        .unwrap_or(NOBODY)
                };
                (shift(uid), shift(gid))
            }
            Self::Single { uid: own, gid: group } => (
                if uid == own { WORKLOAD_ID } else { uid },
                if gid == group { WORKLOAD_ID } else { gid },
            ),
        }
    }

    /// Tells whether files can be given to others, and read whatever their mode.
    fn is_root(self) -> bool {
        !matches!(self, Self::Single { .. })
    }
}

/// An open file or directory, whose mode is as it was again when this goes.
///
/// A plain user cannot read what its own sandbox made unreadable, so it lends itself the right for
/// as long as it looks. Nobody inside sees that: the sandbox is stopped, or the tree is a layer's.
#[derive(Debug)]
pub(crate) struct Opened {
    fd: OwnedFd,
    restore: Option<u32>,
}

impl AsFd for Opened {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(mode) = self.restore {
            let _ = rustix::fs::fchmod(&self.fd, Mode::from_raw_mode(mode));
        }
    }
}

fn open(dir: BorrowedFd<'_>, name: &CStr, meta: &Meta) -> io::Result<Opened> {
    let (kind, right) = match meta.kind {
        Kind::Directory => (OFlags::DIRECTORY, 0o500),
        _ => (OFlags::NONBLOCK, 0o400),
    };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NOCTTY | kind;
    let own = meta.uid == rustix::process::geteuid().as_raw();
    let lends = own && meta.mode & right != right && meta.uid != 0;
    if lends {
        let mode = Mode::from_raw_mode(meta.mode | right);
        // Only ever on what `meta` was just read from; the kernel follows no link that is last here
        // but one, and a directory of ours has none that somebody could put in its place meanwhile.
        rustix::fs::chmodat(dir, name, mode, AtFlags::empty())?;
    }
    let opened = rustix::fs::openat(dir, name, flags, Mode::empty());
    let restore = lends.then_some(meta.mode);
    let opened = match opened {
        Ok(fd) => Opened { fd, restore },
        Err(error) => {
            if let Some(mode) = restore {
                let _ = rustix::fs::chmodat(dir, name, Mode::from_raw_mode(mode), AtFlags::empty());
            }
            return Err(error.into());
        }
    };
    let found = Meta::of(&rustix::fs::fstat(&opened)?);
    if (found.dev, found.ino, found.kind) != (meta.dev, meta.ino, meta.kind) {
        return Err(Errno::STALE.into());
    }
    Ok(opened)
}

/// Opens a directory of which `meta` was just read.
pub(crate) fn open_dir(dir: BorrowedFd<'_>, name: &CStr, meta: &Meta) -> io::Result<Opened> {
    open(dir, name, meta)
}

/// Opens a regular file of which `meta` was just read.
pub(crate) fn open_file(dir: BorrowedFd<'_>, name: &CStr, meta: &Meta) -> io::Result<Opened> {
    if meta.kind != Kind::File {
        return Err(Errno::INVAL.into());
    }
    open(dir, name, meta)
}

/// Opens a directory by its path on the host, following no link at its end.
pub(crate) fn open_root(path: &std::path::Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Lists the names in a directory in the order of their bytes.
pub(crate) fn names(dir: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Reads where a symbolic link leads.
pub(crate) fn link_target(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<CString> {
    Ok(rustix::fs::readlinkat(dir, name, Vec::new())?)
}

/// Reports whether a directory hides what is below it.
pub(crate) fn is_opaque(dir: BorrowedFd<'_>) -> bool {
    let mut value = [0; 2];
    matches!(rustix::fs::fgetxattr(dir, OPAQUE, &mut value[..]), Ok(1) if value[0] == b'y')
}

/// The extended attributes of a file or directory that are the sandbox's own, by their names.
pub(crate) type Xattrs = Vec<(CString, Vec<u8>)>;

/// What the attributes of a tree that begin like those of overlayfs are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Those of overlayfs, which wrote the tree.
    Layer,
    /// Those of a sandbox: no overlay ever saw this tree.
    Plain,
}

/// Reads the `user.` attributes, without those of overlayfs itself, as a layer has them.
pub(crate) fn xattrs(file: BorrowedFd<'_>, form: Form) -> io::Result<Xattrs> {
    let mut list = vec![0; 1024];
    let length = loop {
        match rustix::fs::flistxattr(file, &mut list[..]) {
            Ok(length) => break length,
            Err(Errno::RANGE) if list.len() < MAX_XATTRS => list.resize(list.len() * 4, 0),
            Err(Errno::NOTSUP) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        }
    };
    let mut found = Vec::new();
    for name in list[..length].split(|byte| *byte == 0) {
        let is_ours = name.starts_with(OVERLAY) && !name.starts_with(ESCAPED);
        let own = name.starts_with(b"user.") && (!is_ours || form == Form::Plain);
        if !own {
            continue;
        }
        let Ok(name) = CString::new(name) else { continue };
        let mut value = vec![0; 64 * 1024];
        let length = rustix::fs::fgetxattr(file, &name, &mut value[..])?;
        value.truncate(length);
        let kept = match (form, name.as_bytes().strip_prefix(OVERLAY)) {
            (Form::Plain, Some(rest)) => CString::new([ESCAPED, rest].concat())?,
            (Form::Layer, _) | (Form::Plain, None) => name,
        };
        found.push((kept, value));
    }
    found.sort_unstable();
    Ok(found)
}

/// Calls `each` for every chunk of a file that is not all zeros, with its offset.
///
/// Holes cost nothing, however large; and what is a hole on one filesystem and zeros on another is
/// the same here. What the file grows by meanwhile is left out.
pub(crate) fn for_each_chunk(
    file: BorrowedFd<'_>,
    size: u64,
    mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; usize::try_from(size).unwrap_or(CHUNK).min(CHUNK)];
    let mut at = 0;
    while at < size {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            // Chunks begin where they would in a file without holes.
            Ok(data) => data.max(at) / CHUNK as u64 * CHUNK as u64,
            Err(Errno::NXIO) => return Ok(()),
            Err(Errno::INVAL) => at,
            Err(error) => return Err(error.into()),
        };
        let end = match rustix::fs::seek(file, SeekFrom::Hole(at)) {
            Ok(hole) if hole > at => hole.min(size),
            // It begins with a hole that is shorter than a chunk.
            Ok(_) => (at + CHUNK as u64).min(size),
            Err(_) => size,
        };
        while at < end {
            let want = usize::try_from(size - at).unwrap_or(CHUNK).min(CHUNK);
            let mut got = 0;
            while got < want {
                match rustix::io::pread(file, &mut buffer[got..want], at + got as u64)? {
                    0 => break,
                    more => got += more,
                }
            }
            if got == 0 {
                return Ok(());
            }
            if buffer[..got].iter().any(|byte| *byte != 0) {
                each(at, &buffer[..got])?;
            }
            at += got as u64;
        }
    }
    Ok(())
}

/// Returns the digest of a file's contents.
pub(crate) fn file_digest(file: BorrowedFd<'_>, size: u64) -> io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    for_each_chunk(file, size, |at, bytes| {
        hash.update(at.to_le_bytes());
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
        Ok(())
    })?;
    hash.update(size.to_le_bytes());
    Ok(hash.finalize().into())
}

/// Reports whether two files hold the same.
pub(crate) fn same_contents(a: BorrowedFd<'_>, b: BorrowedFd<'_>, size: u64) -> io::Result<bool> {
    // Only what is not zero is looked at, on both sides.
    let covers = |a: BorrowedFd<'_>, b: BorrowedFd<'_>| {
        let (mut same, mut other) = (true, vec![0; CHUNK]);
        for_each_chunk(a, size, |at, bytes| {
            let mut got = 0;
            while same && got < bytes.len() {
                match rustix::io::pread(b, &mut other[got..bytes.len()], at + got as u64)? {
                    0 => break,
                    more => got += more,
                }
            }
            same &= got == bytes.len() && other[..got] == *bytes;
            Ok(())
        })?;
        io::Result::Ok(same)
    };
    Ok(covers(a, b)? && covers(b, a)?)
}

/// Copies a file's contents into an empty one: by reference where the filesystem can, else what is not
/// zero of it.
fn copy_contents(from: BorrowedFd<'_>, to: BorrowedFd<'_>, size: u64) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    for_each_chunk(from, size, |mut at, mut bytes| {
        while !bytes.is_empty() {
            let written = rustix::io::pwrite(to, bytes, at)?;
            at += written as u64;
            bytes = &bytes[written..];
        }
        Ok(())
    })?;
    Ok(rustix::fs::ftruncate(to, size)?)
}

/// What an entry is made of, apart from a directory's entries and a file's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Made {
    pub(crate) mode: u32,
    /// Owner and group of the inside.
    pub(crate) owner: (u32, u32),
    pub(crate) mtime: (i64, i64),
    pub(crate) xattrs: Xattrs,
}

impl Made {
    pub(crate) fn of(meta: &Meta, ids: Ids, xattrs: Xattrs) -> Self {
        let owner = ids.inside(meta.uid, meta.gid);
        Self { mode: meta.mode, owner, mtime: meta.mtime, xattrs }
    }

    fn times(&self) -> Timestamps {
        let time = Timespec { tv_sec: self.mtime.0, tv_nsec: self.mtime.1 };
        Timestamps { last_access: time, last_modification: time }
    }
}

fn ids(owner: (u32, u32)) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(owner.0)), Some(Gid::from_raw(owner.1)))
}

/// Writes trees as layers are kept.
#[derive(Debug)]
pub(crate) struct Writer {
    ids: Ids,
}

impl Writer {
    pub(crate) fn new() -> Self {
        Self { ids: Ids::of_layers() }
    }

    /// Makes a directory to be filled, and opens it. [`seal`](Self::seal) gives it what it shall have.
    pub(crate) fn directory(&self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
        rustix::fs::mkdirat(dir, name, Mode::RWXU)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(dir, name, flags, Mode::empty())?)
    }

    /// Gives an open file or directory its attributes, last of all.
    pub(crate) fn seal(&self, file: BorrowedFd<'_>, made: &Made) -> io::Result<()> {
        for (name, value) in &made.xattrs {
            rustix::fs::fsetxattr(file, name, value, XattrFlags::empty())?;
        }
        if self.ids.is_root() {
            let (uid, gid) = ids(made.owner);
            rustix::fs::fchown(file, uid, gid)?;
        }
        rustix::fs::fchmod(file, Mode::from_raw_mode(made.mode))?;
        Ok(rustix::fs::futimens(file, &made.times())?)
    }

    /// Makes a new empty file to be filled and then sealed.
    pub(crate) fn file(&self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(dir, name, flags, Mode::RUSR | Mode::WUSR)?)
    }

    /// Copies a regular file.
    pub(crate) fn copy_file(
        &self,
        from: BorrowedFd<'_>,
        meta: &Meta,
        made: &Made,
        dir: BorrowedFd<'_>,
        name: &CStr,
    ) -> io::Result<()> {
        let to = self.file(dir, name)?;
        copy_contents(from, to.as_fd(), meta.size)?;
        self.seal(to.as_fd(), made)
    }

    /// Makes a symbolic link.
    pub(crate) fn symlink(
        &self,
        target: &CStr,
        made: &Made,
        dir: BorrowedFd<'_>,
        name: &CStr,
    ) -> io::Result<()> {
        rustix::fs::symlinkat(target, dir, name)?;
        self.seal_at(made, dir, name)
    }

    /// Makes a FIFO or a socket that nobody listens on.
    pub(crate) fn special(
        &self,
        kind: Kind,
        made: &Made,
        dir: BorrowedFd<'_>,
        name: &CStr,
    ) -> io::Result<()> {
        let file_type = if kind == Kind::Socket { FileType::Socket } else { FileType::Fifo };
        rustix::fs::mknodat(dir, name, file_type, Mode::RUSR | Mode::WUSR, 0)?;
        rustix::fs::chmodat(dir, name, Mode::from_raw_mode(made.mode), AtFlags::empty())?;
        self.seal_at(made, dir, name)?;
        // A change of owner takes set-id bits away.
        Ok(rustix::fs::chmodat(dir, name, Mode::from_raw_mode(made.mode), AtFlags::empty())?)
    }

    fn seal_at(&self, made: &Made, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        if self.ids.is_root() {
            let (uid, gid) = ids(made.owner);
            rustix::fs::chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(rustix::fs::utimensat(dir, name, &made.times(), AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Marks that there is nothing of this name. Anybody may make this one device. See mknod(2),
    /// Linux 5.8.
    pub(crate) fn whiteout(&self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        Ok(rustix::fs::mknodat(dir, name, FileType::CharacterDevice, Mode::empty(), 0)?)
    }

    /// Marks that a directory hides what is below it.
    pub(crate) fn make_opaque(&self, dir: BorrowedFd<'_>) -> io::Result<()> {
        Ok(rustix::fs::fsetxattr(dir, OPAQUE, b"y", XattrFlags::empty())?)
    }
}

/// What a tree holds, in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Bytes in regular files, each file once.
    pub(crate) bytes: u64,
    /// Entries of any kind.
    pub(crate) entries: u64,
}

/// Returns the digest of a whole tree: of its names, kinds, modes, owners, times, attributes, links
/// and contents, in one order that depends on nothing else.
pub(crate) fn digest(root: BorrowedFd<'_>) -> io::Result<([u8; 32], Totals)> {
    let meta = Meta::of(&rustix::fs::fstat(root)?);
    let mut digester = Digester {
        hash: Sha256::new(),
        ids: Ids::of_layers(),
        links: HashMap::new(),
        path: Vec::new(),
        totals: Totals::default(),
    };
    digester.hash.update(b"warren layer 1\n");
    digester.made(&Made::of(&meta, digester.ids, xattrs(root, Form::Layer)?));
    digester.directory(root, 0)?;
    Ok((digester.hash.finalize().into(), digester.totals))
}

struct Digester {
    hash: Sha256,
    ids: Ids,
    /// The first path of each file that has several names.
    links: HashMap<(u64, u64), Vec<u8>>,
    path: Vec<u8>,
    totals: Totals,
}

impl Digester {
    fn field(&mut self, bytes: &[u8]) {
        self.hash.update((bytes.len() as u64).to_le_bytes());
        self.hash.update(bytes);
    }

    fn made(&mut self, made: &Made) {
        self.hash.update(made.mode.to_le_bytes());
        self.hash.update(made.owner.0.to_le_bytes());
        self.hash.update(made.owner.1.to_le_bytes());
        self.hash.update(made.mtime.0.to_le_bytes());
        self.hash.update(made.mtime.1.to_le_bytes());
        self.hash.update((made.xattrs.len() as u64).to_le_bytes());
        for (name, value) in &made.xattrs {
            self.field(name.as_bytes());
            self.field(value);
        }
    }

    fn directory(&mut self, dir: BorrowedFd<'_>, depth: usize) -> io::Result<()> {
        if depth >= MAX_DEPTH {
            return Err(too_deep());
        }
        for name in names(dir)? {
            let length = self.path.len();
            self.path.push(b'/');
            self.path.extend_from_slice(name.as_bytes());
            self.entry(dir, &name, depth)?;
            self.path.truncate(length);
        }
        // The end of a directory, which is the name of nothing.
        self.field(b"/");
        Ok(())
    }

    fn entry(&mut self, dir: BorrowedFd<'_>, name: &CStr, depth: usize) -> io::Result<()> {
        let meta = Meta::at(dir, name)?;
        self.totals.entries += 1;
        self.field(name.to_bytes());
        if meta.nlink > 1 && meta.kind != Kind::Directory && meta.kind != Kind::Whiteout {
            let path = self.path.clone();
            if let Some(first) = self.links.get(&(meta.dev, meta.ino)).cloned() {
                self.hash.update(b"h");
                self.field(&first);
                return Ok(());
            }
            self.links.insert((meta.dev, meta.ino), path);
        }
        let plain = Made::of(&meta, self.ids, Vec::new());
        match meta.kind {
            Kind::Directory => {
                let opened = open_dir(dir, name, &meta)?;
                self.hash.update(if is_opaque(opened.as_fd()) { b"D" } else { b"d" });
                self.made(&Made { xattrs: xattrs(opened.as_fd(), Form::Layer)?, ..plain });
                self.directory(opened.as_fd(), depth + 1)?;
            }
            Kind::File => {
                let opened = open_file(dir, name, &meta)?;
                self.hash.update(b"f");
                self.made(&Made { xattrs: xattrs(opened.as_fd(), Form::Layer)?, ..plain });
                self.hash.update(meta.size.to_le_bytes());
                self.hash.update(file_digest(opened.as_fd(), meta.size)?);
                self.totals.bytes += meta.size;
            }
            Kind::Symlink => {
                self.hash.update(b"l");
                // The mode of a link is whatever its filesystem says, and means nothing.
                self.made(&Made { mode: 0o777, ..plain });
                let target = link_target(dir, name)?;
                self.field(target.to_bytes());
            }
            Kind::Fifo | Kind::Socket => {
                self.hash.update(if meta.kind == Kind::Fifo { b"p" } else { b"s" });
                self.made(&plain);
            }
            Kind::Whiteout => self.hash.update(b"w"),
            Kind::Device => return Err(device()),
        }
        Ok(())
    }
}

/// Says that a tree is deeper than we go.
pub(crate) fn too_deep() -> io::Error {
    let text = format!("directories lie more than {MAX_DEPTH} deep in each other");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn device() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a layer holds a device")
}

/// Removes a directory that is ours, with all it holds, whatever its modes.
pub(crate) fn remove(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let meta = match Meta::at(parent, name) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if meta.kind != Kind::Directory {
        return Ok(rustix::fs::unlinkat(parent, name, AtFlags::empty())?);
    }
    if meta.mode & 0o700 != 0o700 {
        rustix::fs::chmodat(parent, name, Mode::RWXU, AtFlags::empty())?;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    for name in names(dir.as_fd())? {
        // Most are no directories: try what is right for those.
        match rustix::fs::unlinkat(&dir, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM) => remove(dir.as_fd(), &name)?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}
