//! What a worker does with the files of the sandbox it is in.
//!
//! It has the rights of a command and stands in the sandbox's root, so whatever a path leads to is
//! the sandbox's own. What is left to guard against is a trap: a link of `/proc` to a descriptor or
//! a root, a FIFO that never answers, a name that changes under way. Names are therefore resolved by
//! `openat2` without magic links, opened without waiting, and looked at before they are used.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat, XattrFlags,
};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};

use crate::archive;
use crate::protocol;
use crate::protocol::files::{
    Entry, Fault, FaultKind, FileControl, FileEvent, FileRequest, Kind, MAX_ATTRIBUTES, MAX_DEPTH,
    MAX_PATH, More, PACKET, Summary, Time, WriteHow,
};
use crate::steps::{self, Links, MAX_LINKS};
use crate::users::{Names, User};
use crate::watch;

/// How much is moved at once.
const CHUNK: usize = 256 * 1024;
/// What may be set; never set-uid or set-gid.
const MODE: u32 = 0o1777;

pub(crate) type Result<T, E = Fault> = std::result::Result<T, E>;

/// One of the sandbox's users, for whom a worker works.
#[derive(Debug)]
pub(crate) struct Caller {
    user: User,
    names: Names,
}

/// For whom a worker works: nobody in particular, or one of the sandbox's users.
pub(crate) type Who<'a> = Option<&'a Caller>;

impl Caller {
    fn find(name: &[u8]) -> Result<Self> {
        let user = User::find(name).map_err(call)?.ok_or_else(|| fault(FaultKind::User))?;
        Ok(Self { user, names: Names::read() })
    }

    /// Puts the paths of a request where they are for this user.
    fn place(&self, request: &FileRequest) -> Result<FileRequest> {
        let mut request = request.clone();
        for path in request.paths() {
            *path = self.user.place(path).ok_or_else(|| fault(FaultKind::Path))?;
        }
        Ok(request)
    }

    fn ids(&self) -> (Option<Uid>, Option<Gid>) {
        (Some(Uid::from_raw(self.user.uid)), Some(Gid::from_raw(self.user.gid)))
    }

    fn more(&self, entry: &Entry, attributes: Vec<(Vec<u8>, Vec<u8>)>) -> More {
        let (owner, group) = (self.names.user(entry.uid), self.names.group(entry.gid));
        More { owner, group, attributes }
    }
}

/// Makes something that is open the caller's.
fn give(who: Who<'_>, place: &impl AsFd) -> Result<()> {
    let Some((uid, gid)) = who.map(Caller::ids) else { return Ok(()) };
    rustix::fs::fchown(place, uid, gid).map_err(not_given)
}

/// An id that the sandbox does not have cannot be given anything either.
fn not_given(error: Errno) -> Fault {
    call(if error == Errno::INVAL { Errno::PERM } else { error })
}

/// Serves one request to its end, of one of the sandbox's users if one is named.
pub(crate) fn serve(
    request: &FileRequest,
    user: Option<&[u8]>,
    channel: &OwnedFd,
    data: Option<OwnedFd>,
) {
    let done = match user {
        None => handle(request, None, channel, data),
        Some(user) => Caller::find(user)
            .and_then(|caller| handle(&caller.place(request)?, Some(&caller), channel, data)),
    };
    if let Err(fault) = done {
        let _ = protocol::send(channel, &FileEvent::Failed(fault), &[]);
    }
}

fn handle(
    request: &FileRequest,
    who: Who<'_>,
    channel: &OwnedFd,
    data: Option<OwnedFd>,
) -> Result<()> {
    match request {
        FileRequest::Stat { path } => stat(path, who).and_then(|entry| tell_entry(channel, entry)),
        FileRequest::List { path, depth, limit } => list(path, *depth, *limit, who, channel),
        FileRequest::Read { path, offset, length } => {
            read(path, *offset, *length, who, channel, data)
        }
        FileRequest::Write { path, how, mode, parents } => {
            write(path, *how, *mode, *parents, who, channel, data)
                .and_then(|entry| tell_entry(channel, entry))
        }
        FileRequest::MakeDirectory { path, mode, parents } => {
            make_directory(path, *mode, *parents, who).and_then(|entry| tell_entry(channel, entry))
        }
        FileRequest::Move { from, to, replace, parents } => {
            rename(from, to, *replace, *parents, who).and_then(|entry| tell_entry(channel, entry))
        }
        FileRequest::Remove { path, recursive } => {
            remove(path, *recursive, channel).and_then(|done| tell(channel, &FileEvent::Done(done)))
        }
        FileRequest::Watch { path, recursive } => watch::watch(path, *recursive, who, channel),
        FileRequest::SetAttributes { path, prefix, attributes } => {
            set_attributes(path, prefix, attributes, who)
                .and_then(|entry| tell_entry(channel, entry))
        }
        FileRequest::Import { path, parents } => import(path, *parents, who, channel, data),
        FileRequest::Export { path } => export(path, channel, data),
    }
}

/// Makes a fault of what the kernel said.
pub(crate) fn call(error: impl Into<io::Error>) -> Fault {
    let errno = error.into().raw_os_error().unwrap_or(Errno::IO.raw_os_error());
    Fault { kind: FaultKind::Call, errno, written: 0, detail: Vec::new() }
}

pub(crate) fn fault(kind: FaultKind) -> Fault {
    Fault { kind, errno: 0, written: 0, detail: Vec::new() }
}

pub(crate) fn tell(channel: &OwnedFd, event: &FileEvent) -> Result<()> {
    protocol::send(channel, event, &[]).map_err(call)
}

fn tell_entry(channel: &OwnedFd, entry: Entry) -> Result<()> {
    tell(channel, &FileEvent::Entries(vec![within(entry, MESSAGE)]))
}

/// How much one entry may say: what comes from a sandbox is short, or refused.
const MESSAGE: usize = 14 * 1024;

/// Says how long an entry is, near enough.
pub(crate) fn weight(entry: &Entry) -> usize {
    let target = entry.target.as_ref().map_or(0, Vec::len);
    let resolved = entry.resolved.as_ref().map_or(0, |(path, ..)| path.len());
    let more = entry.more.as_ref().map_or(0, |more| {
        let attributes = more.attributes.iter().map(|(name, value)| 8 + name.len() + value.len());
        more.owner.len() + more.group.len() + attributes.sum::<usize>()
    });
    96 + entry.path.len() + target + resolved + more
}

/// Leaves out of an entry what does not fit.
pub(crate) fn within(mut entry: Entry, most: usize) -> Entry {
    if weight(&entry) > most
        && let Some(more) = &mut entry.more
    {
        more.attributes.clear();
    }
    if weight(&entry) > most {
        entry.resolved = None;
    }
    if weight(&entry) > most {
        entry.target = None;
    }
    entry
}

/// Reads the extended attributes `user.*` of what is open, even if only as a place.
fn attributes(place: &OwnedFd) -> Vec<(Vec<u8>, Vec<u8>)> {
    attributes_at(format!("/proc/self/fd/{}", place.as_raw_fd()).as_bytes())
}

/// Reads the extended attributes `user.*` of what is at a path. What cannot be read has none.
fn attributes_at(path: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut names = vec![0; 64 << 10];
    let length = rustix::fs::listxattr(path, &mut names[..]).unwrap_or_default();
    let mut found = Vec::new();
    let mut left = MAX_ATTRIBUTES;
    for name in names[..length].split(|byte| *byte == 0) {
        if !name.starts_with(b"user.") {
            continue;
        }
        let mut value = vec![0; left];
        match rustix::fs::getxattr(path, name, &mut value[..]) {
            Ok(length) => value.truncate(length),
            Err(Errno::RANGE) => return Vec::new(),
            Err(_) => continue,
        }
        let Some(less) = left.checked_sub(8 + name.len() + value.len()) else { return Vec::new() };
        left = less;
        found.push((name.to_vec(), value));
    }
    found.sort();
    found
}

/// Adds to an entry what its caller is told in full.
fn in_full(
    mut entry: Entry,
    who: Who<'_>,
    attributes: impl FnOnce() -> Vec<(Vec<u8>, Vec<u8>)>,
) -> Entry {
    entry.more = who.map(|caller| caller.more(&entry, attributes()));
    entry
}

fn set_attributes(
    path: &[u8],
    prefix: &[u8],
    wanted: &[(Vec<u8>, Vec<u8>)],
    who: Who<'_>,
) -> Result<Entry> {
    let place = open(path, OFlags::PATH, 0)?;
    let named = |name: &[u8]| name.starts_with(prefix) && !name.contains(&0);
    if !prefix.starts_with(b"user.") || !wanted.iter().all(|(name, _)| named(name)) {
        return Err(call(Errno::INVAL));
    }
    let by = format!("/proc/self/fd/{}", place.as_raw_fd());
    let had = attributes(&place);
    for (name, _) in had.iter().filter(|(name, _)| name.starts_with(prefix)) {
        if !wanted.iter().any(|(wanted, _)| wanted == name) {
            rustix::fs::removexattr(&by, &name[..]).map_err(call)?;
        }
    }
    for (name, value) in wanted.iter().filter(|pair| !had.contains(pair)) {
        rustix::fs::setxattr(&by, &name[..], value, XattrFlags::empty()).map_err(call)?;
    }
    stat(path, who)
}

fn check(path: &[u8]) -> Result<()> {
    if !path.starts_with(b"/") || path.contains(&0) {
        return Err(fault(FaultKind::Path));
    }
    if path.len() > MAX_PATH { Err(call(Errno::NAMETOOLONG)) } else { Ok(()) }
}

/// Opens what a caller named, following the sandbox's own links and none of the kernel's.
pub(crate) fn open(path: &[u8], flags: OFlags, mode: u32) -> Result<OwnedFd> {
    check(path)?;
    let mode = Mode::from_raw_mode(mode & MODE);
    let flags = unhurried(flags);
    resolve(CWD, path, flags, mode, Links::Plain).map_err(call)
}

/// Opens a path as far as its links are to be followed, by whichever means the kernel has.
fn resolve(
    from: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
    mode: Mode,
    links: Links,
) -> rustix::io::Result<OwnedFd> {
    let how = match links {
        Links::Plain => ResolveFlags::NO_MAGICLINKS,
        Links::None => archive::BENEATH,
    };
    match rustix::fs::openat2(from, path, flags, mode, how) {
        Err(Errno::NOSYS) => steps::open(from, path, flags, mode, links),
        opened => opened,
    }
}

/// Adds what keeps an open from waiting, where it could: the kernel takes no more with O_PATH.
fn unhurried(flags: OFlags) -> OFlags {
    let waits = !flags.contains(OFlags::PATH);
    let more = if waits { OFlags::NOCTTY | OFlags::NONBLOCK } else { OFlags::empty() };
    flags | more | OFlags::CLOEXEC
}

/// Opens an entry of a directory, and nothing that it may lead to.
pub(crate) fn open_at(dir: BorrowedFd<'_>, name: &[u8], flags: OFlags) -> io::Result<OwnedFd> {
    let flags = unhurried(flags) | OFlags::NOFOLLOW;
    Ok(resolve(dir, name, flags, Mode::empty(), Links::None)?)
}

/// Opens a directory that a caller named.
pub(crate) fn open_directory(path: &[u8]) -> Result<OwnedFd> {
    open(path, OFlags::RDONLY | OFlags::DIRECTORY, 0).map_err(|error| match error.errno {
        errno if errno == Errno::NOTDIR.raw_os_error() => fault(FaultKind::NotDirectory),
        _ => error,
    })
}

/// Looks at an open file and lets only a regular one pass.
fn regular(file: &OwnedFd) -> Result<Stat> {
    let stat = rustix::fs::fstat(file).map_err(call)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(stat),
        FileType::Directory => Err(fault(FaultKind::Directory)),
        _ => Err(fault(FaultKind::Special)),
    }
}

fn kind(stat: &Stat) -> Kind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Link,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        _ => Kind::Device,
    }
}

fn entry(path: &[u8], stat: &Stat) -> Entry {
    let nanos = |value: u64| u32::try_from(value).unwrap_or_default();
    let time = |seconds, value| Time { seconds, nanos: nanos(value) };
    Entry {
        path: path.to_vec(),
        kind: kind(stat),
        size: stat.st_size.try_into().unwrap_or_default(),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        #[allow(clippy::useless_conversion, reason = "it is narrower on arm64")]
        links: stat.st_nlink.into(),
        modified: time(stat.st_mtime, stat.st_mtime_nsec),
        accessed: time(stat.st_atime, stat.st_atime_nsec),
        changed: time(stat.st_ctime, stat.st_ctime_nsec),
        target: None,
        resolved: None,
        more: None,
    }
}

fn link_target(dir: BorrowedFd<'_>, name: &[u8]) -> Option<Vec<u8>> {
    let target = rustix::fs::readlinkat(dir, name, Vec::new()).ok()?.into_bytes();
    (target.len() <= MAX_PATH).then_some(target)
}

/// Splits a path into its directory, opened, and the name in it.
///
/// The directory is followed through links, the name is not. A path that ends in a slash names the
/// same as without it. With `parents` the directories on the way are made, for whom it says.
fn split(path: &[u8], parents: Option<Who<'_>>) -> Result<(OwnedFd, Vec<u8>)> {
    check(path)?;
    let (parent, name) = halves(path);
    if matches!(name, b"" | b"." | b"..") {
        // The root, or something that is no name.
        return Err(call(Errno::BUSY));
    }
    if name.len() > 255 {
        return Err(call(Errno::NAMETOOLONG));
    }
    if let Some(who) = parents {
        make_parents(parent, who)?;
    }
    Ok((open(parent, OFlags::PATH | OFlags::DIRECTORY, 0)?, name.to_vec()))
}

fn halves(path: &[u8]) -> (&[u8], &[u8]) {
    let mut path = path;
    while path.len() > 1 && path.ends_with(b"/") {
        path = &path[..path.len() - 1];
    }
    let slash = path.iter().rposition(|byte| *byte == b'/').unwrap_or_default();
    (if slash == 0 { b"/" } else { &path[..slash] }, &path[slash + 1..])
}

/// Makes an entry of a directory the caller's.
fn give_at(who: Who<'_>, dir: &OwnedFd, name: &[u8]) -> Result<()> {
    let Some((uid, gid)) = who.map(Caller::ids) else { return Ok(()) };
    rustix::fs::chownat(dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(not_given)
}

/// Makes a directory and those on the way, each where the links before it lead.
fn make_parents(path: &[u8], who: Who<'_>) -> Result<()> {
    if open(path, OFlags::PATH | OFlags::DIRECTORY, 0).is_ok() {
        return Ok(());
    }
    let mut at = 0;
    while at < path.len() {
        let next = path[at + 1..].iter().position(|byte| *byte == b'/');
        let end = next.map_or(path.len(), |next| at + 1 + next);
        let (so_far, name) = (&path[..end], &path[at + 1..end]);
        if !matches!(name, b"" | b"." | b"..") {
            let parent = open(if at == 0 { b"/" } else { &path[..at] }, OFlags::PATH, 0)?;
            match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
                Ok(()) => give_at(who, &parent, name)?,
                Err(Errno::EXIST) => {}
                Err(error) => return Err(call(error)),
            }
        }
        // A link to nowhere is there, and is no directory.
        if rustix::fs::fstat(open(so_far, OFlags::PATH, 0)?)
            .is_ok_and(|stat| kind(&stat) != Kind::Directory)
        {
            return Err(fault(FaultKind::NotDirectory));
        }
        at = end;
    }
    Ok(())
}

pub(crate) fn stat(path: &[u8], who: Who<'_>) -> Result<Entry> {
    let place = open(path, OFlags::PATH | OFlags::NOFOLLOW, 0)?;
    let mut entry = entry(path, &rustix::fs::fstat(&place).map_err(call)?);
    let mut end = Some(place);
    if entry.kind == Kind::Link {
        entry.target = end.as_ref().and_then(|link| link_target(link.as_fd(), b""));
        end = open(path, OFlags::PATH, 0).ok();
        entry.resolved = end.as_ref().and_then(resolved);
    }
    Ok(in_full(entry, who, || end.as_ref().map(attributes).unwrap_or_default()))
}

/// Says what a link leads to that was followed to its end.
fn resolved(end: &OwnedFd) -> Option<(Vec<u8>, Kind, u32)> {
    let stat = rustix::fs::fstat(end).ok()?;
    Some((path_of(end)?, kind(&stat), stat.st_mode & 0o7777))
}

/// Asks the kernel for the path of something open, as it is seen from the root.
pub(crate) fn path_of(place: &OwnedFd) -> Option<Vec<u8>> {
    link_target(CWD, format!("/proc/self/fd/{}", place.as_raw_fd()).as_bytes())
}

/// Sends entries in packets of a bounded size.
struct Teller<'a> {
    channel: &'a OwnedFd,
    batch: Vec<Entry>,
    size: usize,
}

impl Teller<'_> {
    fn push(&mut self, entry: Entry) -> Result<()> {
        let entry = within(entry, MESSAGE);
        let weight = weight(&entry);
        if self.size + weight > MESSAGE {
            self.flush()?;
        }
        self.size += weight;
        self.batch.push(entry);
        if self.size >= PACKET { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        self.size = 0;
        if self.batch.is_empty() {
            return Ok(());
        }
        tell(self.channel, &FileEvent::Entries(std::mem::take(&mut self.batch)))
    }
}

fn list(path: &[u8], depth: u16, limit: u32, who: Who<'_>, channel: &OwnedFd) -> Result<()> {
    let top = Dir::new(open_directory(path)?).map_err(call)?;
    let mut teller = Teller { channel, batch: Vec::new(), size: 0 };
    let mut done = Summary::default();
    let depth = usize::from(depth.clamp(1, MAX_DEPTH));
    // Each level that is open, and how long the path to it is.
    let mut levels = vec![(top, 0)];
    let mut path = Vec::new();
    while let Some((dir, length)) = levels.last_mut() {
        path.truncate(*length);
        let Some(found) = dir.read() else {
            levels.pop();
            continue;
        };
        let found = found.map_err(call)?;
        let name = found.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        if done.entries >= u64::from(limit) {
            done.truncated = true;
            break;
        }
        let place = dir.fd().map_err(call)?;
        // What is gone meanwhile is not there.
        let Ok(stat) = rustix::fs::statat(place, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        if path.len() + 1 + name.len() > MAX_PATH {
            done.truncated = true;
            continue;
        }
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        let mut entry = entry(&path, &stat);
        let is_link = entry.kind == Kind::Link;
        if is_link {
            entry.target = link_target(place, name);
        }
        if who.is_some() {
            let flags = OFlags::PATH | if is_link { OFlags::empty() } else { OFlags::NOFOLLOW };
            let flags = flags | OFlags::CLOEXEC;
            let end = resolve(place, name, flags, Mode::empty(), Links::Plain).ok();
            entry.resolved = end.as_ref().filter(|_| is_link).and_then(resolved);
            entry = in_full(entry, who, || end.as_ref().map(attributes).unwrap_or_default());
        }
        let below = (entry.kind == Kind::Directory && levels.len() < depth).then(|| {
            let place = levels.last().and_then(|(dir, _)| dir.fd().ok())?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            Dir::new(open_at(place, name, flags).ok()?).ok()
        });
        teller.push(entry)?;
        done.entries += 1;
        match below {
            Some(Some(below)) => levels.push((below, path.len())),
            // It may not be read.
            Some(None) => done.skipped += 1,
            None => {}
        }
    }
    teller.flush()?;
    tell(channel, &FileEvent::Done(done))
}

fn pipe(data: Option<OwnedFd>) -> Result<File> {
    data.map(File::from).ok_or_else(|| call(Errno::BADF))
}

fn read(
    path: &[u8],
    offset: u64,
    length: Option<u64>,
    who: Who<'_>,
    channel: &OwnedFd,
    data: Option<OwnedFd>,
) -> Result<()> {
    let mut out = pipe(data)?;
    // Looked at before it is opened: to open some devices is to do something to them.
    let place = open(path, OFlags::PATH, 0)?;
    regular(&place)?;
    let file = open(path, OFlags::RDONLY, 0)?;
    let stat = regular(&file)?;
    let size: u64 = stat.st_size.try_into().unwrap_or_default();
    tell_entry(channel, in_full(entry(path, &stat), who, || attributes(&file)))?;
    // Files of /proc say that they are empty, and are not.
    let known = if size == 0 { u64::MAX } else { size.saturating_sub(offset) };
    let mut left = length.unwrap_or(u64::MAX).min(known);
    let (mut at, mut buffer) = (offset, vec![0; CHUNK]);
    let mut bytes = 0;
    while left > 0 {
        let want = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
        let got = match rustix::io::pread(&file, &mut buffer[..want], at) {
            Ok(got) => got,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(Fault { written: bytes, ..call(error) }),
        };
        if got == 0 {
            break;
        }
        out.write_all(&buffer[..got]).map_err(call)?;
        let got = got as u64;
        (at, left, bytes) = (at + got, left - got, bytes + got);
    }
    drop(out);
    tell(channel, &FileEvent::Done(Summary { bytes, ..Summary::default() }))
}

/// Waits until the one who sends says that all was sent.
fn committed(channel: &OwnedFd, received: u64) -> Result<()> {
    match protocol::receive_trusted::<FileControl>(channel) {
        Ok(Some((FileControl::Commit(sent), _))) if sent == received => Ok(()),
        Ok(_) => Err(Fault { written: received, ..fault(FaultKind::Cut) }),
        Err(error) => Err(Fault { written: received, ..call(error) }),
    }
}

/// Moves all that comes through the pipe into a file.
fn fill(file: &mut File, data: &mut File) -> Result<u64> {
    let (mut bytes, mut buffer) = (0, vec![0; CHUNK]);
    loop {
        let got = match data.read(&mut buffer) {
            Ok(0) => return Ok(bytes),
            Ok(got) => got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Fault { written: bytes, ..call(error) }),
        };
        file.write_all(&buffer[..got]).map_err(|error| Fault { written: bytes, ..call(error) })?;
        if (bytes..bytes + got as u64).contains(&MUCH) {
            stand_out();
        }
        bytes += got as u64;
    }
}

/// How much is written before memory may run out over it.
const MUCH: u64 = 1 << 20;

/// Becomes larger than init is.
///
/// When a sandbox has no memory left, the kernel ends the largest process, and what is written to a
/// filesystem in memory is nobody's size. It is to be the one who writes, and not init, with which all ends.
/// Nobody may lower its own score, and the file to raise it by is not ours: we cannot be dumped.
fn stand_out() {
    let ballast = vec![1_u8; 2 << 20];
    std::mem::forget(std::hint::black_box(ballast));
}

fn write(
    path: &[u8],
    how: WriteHow,
    mode: Option<u32>,
    parents: bool,
    who: Who<'_>,
    channel: &OwnedFd,
    data: Option<OwnedFd>,
) -> Result<Entry> {
    let data = pipe(data)?;
    check(path)?;
    if path.ends_with(b"/") {
        return Err(fault(FaultKind::Directory));
    }
    if parents {
        make_parents(halves(path).0, who)?;
    }
    match how {
        WriteHow::Replace => replace(path, mode, who, channel, data),
        WriteHow::New => {
            let (dir, name) = split(path, None)?;
            if rustix::fs::statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
                return Err(call(Errno::EXIST));
            }
            let (mode, flags) = (mode.unwrap_or(0o644), RenameFlags::NOREPLACE);
            write_new(&dir, &name, mode, flags, who, channel, data)?;
            stat(path, who)
        }
        WriteHow::Append => write_along(path, OFlags::APPEND, mode, who, channel, data),
        WriteHow::InPlace => write_along(path, OFlags::TRUNC, mode, who, channel, data),
    }
}

/// Writes into the file itself.
fn write_along(
    path: &[u8],
    flag: OFlags,
    mode: Option<u32>,
    who: Who<'_>,
    channel: &OwnedFd,
    mut data: File,
) -> Result<Entry> {
    if let Ok(place) = open(path, OFlags::PATH, 0) {
        regular(&place)?;
    }
    // Emptied only when it is known to be a file.
    let flags = OFlags::WRONLY | OFlags::CREATE | (flag - OFlags::TRUNC);
    let file = open(path, flags, mode.unwrap_or(0o644)).map_err(|error| {
        // What opening a FIFO for writing without waiting says.
        let fifo = error.errno == Errno::NXIO.raw_os_error();
        if fifo { fault(FaultKind::Special) } else { error }
    })?;
    let had = regular(&file)?;
    give(who, &file)?;
    // Whoever watches is told of each change, so none is made that is none.
    if flag.contains(OFlags::TRUNC) && had.st_size > 0 {
        rustix::fs::ftruncate(&file, 0).map_err(call)?;
    }
    if let Some(mode) = mode {
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & MODE)).map_err(call)?;
    }
    tell(channel, &FileEvent::Ready)?;
    let mut file = File::from(file);
    let bytes = fill(&mut file, &mut data)?;
    committed(channel, bytes)?;
    let (file, stat) = (OwnedFd::from(file.try_clone().map_err(call)?), rustix::fs::fstat(&file));
    Ok(in_full(entry(path, &stat.map_err(call)?), who, || attributes(&file)))
}

/// Replaces a file at one moment; through a link, the file that it leads to.
fn replace(
    path: &[u8],
    mode: Option<u32>,
    who: Who<'_>,
    channel: &OwnedFd,
    data: File,
) -> Result<Entry> {
    let mut path = path.to_vec();
    for _ in 0..MAX_LINKS {
        let (dir, name) = split(&path, None)?;
        let found = match rustix::fs::statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(stat),
            Err(Errno::NOENT) => None,
            Err(error) => return Err(call(error)),
        };
        let mode = match found.map(|stat| (kind(&stat), stat.st_mode)) {
            Some((Kind::Link, _)) => {
                let target = link_target(dir.as_fd(), &name).ok_or_else(|| call(Errno::LOOP))?;
                path = beside(&path, &target);
                continue;
            }
            Some((Kind::Directory, _)) => return Err(fault(FaultKind::Directory)),
            Some((Kind::Fifo | Kind::Socket | Kind::Device, _)) => {
                return Err(fault(FaultKind::Special));
            }
            Some((Kind::File, had)) => mode.unwrap_or(had & 0o777),
            None => mode.unwrap_or(0o644),
        };
        write_new(&dir, &name, mode, RenameFlags::empty(), who, channel, data)?;
        let stat = rustix::fs::statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(call)?;
        return Ok(in_full(entry(&path, &stat), who, || attributes_at(&path)));
    }
    Err(call(Errno::LOOP))
}

/// Returns where a link leads that is at `path`.
fn beside(path: &[u8], target: &[u8]) -> Vec<u8> {
    if target.starts_with(b"/") {
        return target.to_vec();
    }
    [halves(path).0, b"/", target].concat()
}

/// Writes under another name first, so that the right one never names half a file.
fn write_new(
    dir: &OwnedFd,
    name: &[u8],
    mode: u32,
    flags: RenameFlags,
    who: Who<'_>,
    channel: &OwnedFd,
    mut data: File,
) -> Result<()> {
    let draft = Draft::new(dir)?;
    give(who, &draft.file)?;
    tell(channel, &FileEvent::Ready)?;
    let mut file = &draft.file;
    let bytes = {
        let mut file = file.try_clone().map_err(call)?;
        fill(&mut file, &mut data)?
    };
    file.flush().map_err(call)?;
    rustix::fs::fchmod(file, Mode::from_raw_mode(mode & MODE)).map_err(call)?;
    committed(channel, bytes)?;
    draft.publish(name, flags).map_err(call)
}

/// A file that has no lasting name yet. It goes with this, and with the worker, however that ends.
struct Draft<'a> {
    dir: &'a OwnedFd,
    file: File,
    /// The name it has meanwhile, on a filesystem that has no files without one.
    name: Option<Vec<u8>>,
}

impl<'a> Draft<'a> {
    fn new(dir: &'a OwnedFd) -> Result<Self> {
        // Without a name: should the worker be killed, for want of memory say, nothing is left.
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        match rustix::fs::openat(dir, c".", flags, Mode::from_raw_mode(0o600)) {
            Ok(file) => Ok(Self { dir, file: file.into(), name: None }),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOENT) => Self::named(dir),
            Err(error) => Err(call(error)),
        }
    }

    fn named(dir: &'a OwnedFd) -> Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let flags = flags | OFlags::CLOEXEC;
        for _ in 0..16 {
            let name = temporary_name();
            match rustix::fs::openat(dir, &name, flags, Mode::from_raw_mode(0o600)) {
                Ok(file) => return Ok(Self { dir, file: file.into(), name: Some(name) }),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(call(error)),
            }
        }
        Err(call(Errno::EXIST))
    }

    /// Gives it its name, instead of what has it now unless the flags say otherwise.
    fn publish(mut self, name: &[u8], flags: RenameFlags) -> io::Result<()> {
        if self.name.is_none() {
            match self.link(name) {
                Err(Errno::EXIST) if flags.is_empty() => {
                    // A link replaces nothing; a name that is moved does.
                    let meanwhile = temporary_name();
                    self.link(&meanwhile)?;
                    self.name = Some(meanwhile);
                }
                other => return Ok(other?),
            }
        }
        if let Some(meanwhile) = &self.name {
            rustix::fs::renameat_with(self.dir, meanwhile, self.dir, name, flags)?;
            self.name = None;
        }
        Ok(())
    }

    fn link(&self, name: &[u8]) -> rustix::io::Result<()> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::linkat(CWD, path, self.dir, name, AtFlags::SYMLINK_FOLLOW)
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            let _ = rustix::fs::unlinkat(self.dir, name, AtFlags::empty());
        }
    }
}

/// Returns a name that nobody can foresee.
fn temporary_name() -> Vec<u8> {
    let mut bytes = [0; 12];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(".warren-{hex}").into_bytes()
}

fn make_directory(path: &[u8], mode: u32, parents: bool, who: Who<'_>) -> Result<Entry> {
    let (dir, name) = match split(path, parents.then_some(who)) {
        Ok(split) => split,
        // The root itself is there already.
        Err(error) if error.errno == Errno::BUSY.raw_os_error() => {
            return if parents { stat(path, who) } else { Err(call(Errno::EXIST)) };
        }
        Err(error) => return Err(error),
    };
    match rustix::fs::mkdirat(&dir, &name, Mode::from_raw_mode(mode & MODE)) {
        Ok(()) => {
            give_at(who, &dir, &name)?;
            // The mode of mkdir alone is less than was asked for, by the umask.
            let made = open_at(dir.as_fd(), &name, OFlags::RDONLY | OFlags::DIRECTORY);
            if let Ok(made) = made {
                rustix::fs::fchmod(made, Mode::from_raw_mode(mode & MODE)).map_err(call)?;
            }
        }
        Err(Errno::EXIST) if parents => {
            open_directory(path)?;
        }
        Err(error) => return Err(call(error)),
    }
    stat(path, who)
}

fn rename(from: &[u8], to: &[u8], replace: bool, parents: bool, who: Who<'_>) -> Result<Entry> {
    let (old_dir, old_name) = split(from, None)?;
    // Before any directory is made for something that is not there.
    rustix::fs::statat(&old_dir, &old_name, AtFlags::SYMLINK_NOFOLLOW).map_err(call)?;
    let (new_dir, new_name) = split(to, parents.then_some(who))?;
    let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    match rustix::fs::renameat_with(&old_dir, &old_name, &new_dir, &new_name, flags) {
        Ok(()) => {}
        Err(Errno::XDEV) => move_across(&old_dir, &old_name, &new_dir, &new_name, replace)?,
        Err(error) => return Err(call(error)),
    }
    stat(to, who)
}

/// Moves a file to another filesystem of the sandbox, `/tmp` say: whole, then the old one goes.
fn move_across(
    old_dir: &OwnedFd,
    old_name: &[u8],
    new_dir: &OwnedFd,
    new_name: &[u8],
    replace: bool,
) -> Result<()> {
    let source = open_at(old_dir.as_fd(), old_name, OFlags::RDONLY).map_err(call)?;
    // A tree is not moved in one step, and half a tree is worse than none.
    let had = regular(&source).map_err(|error| match error.kind {
        FaultKind::Directory => call(Errno::XDEV),
        _ => error,
    })?;
    let draft = Draft::new(new_dir)?;
    io::copy(&mut File::from(source), &mut &draft.file).map_err(call)?;
    let mode = Mode::from_raw_mode(had.st_mode & 0o777);
    // Whose it was, it stays, where that is for us to say.
    let (uid, gid) = (Uid::from_raw(had.st_uid), Gid::from_raw(had.st_gid));
    let _ = rustix::fs::fchown(&draft.file, Some(uid), Some(gid));
    rustix::fs::fchmod(&draft.file, mode).map_err(call)?;
    let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    draft.publish(new_name, flags).map_err(call)?;
    rustix::fs::unlinkat(old_dir, old_name, AtFlags::empty()).map_err(call)
}

fn remove(path: &[u8], recursive: bool, channel: &OwnedFd) -> Result<Summary> {
    let (dir, name) = split(path, None)?;
    let mut done = Summary::default();
    let found = rustix::fs::statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(call)?;
    if kind(&found) != Kind::Directory {
        rustix::fs::unlinkat(&dir, &name, AtFlags::empty()).map_err(call)?;
        return Ok(Summary { entries: 1, ..done });
    }
    if recursive {
        let top = open_to_empty(dir.as_fd(), &name).map_err(call)?;
        empty(&top, 0, &mut done, channel)?;
    }
    rustix::fs::unlinkat(&dir, &name, AtFlags::REMOVEDIR).map_err(call)?;
    done.entries += 1;
    Ok(done)
}

/// Opens a directory to remove what is in it, even one that its owner shut.
fn open_to_empty(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let opened = match open_at(dir, name, flags) {
        Err(error) if error.raw_os_error() == Some(Errno::ACCESS.raw_os_error()) => {
            let place = open_at(dir, name, OFlags::PATH | OFlags::DIRECTORY)?;
            // By descriptor, so that it is this one and nothing that has its name by now.
            let path = format!("/proc/self/fd/{}", place.as_raw_fd());
            rustix::fs::chmodat(CWD, path, Mode::from_raw_mode(0o700), AtFlags::empty())?;
            open_at(dir, name, flags)?
        }
        other => other?,
    };
    let mode = rustix::fs::fstat(&opened)?.st_mode;
    if mode & 0o700 != 0o700 {
        rustix::fs::fchmod(&opened, Mode::from_raw_mode(mode & 0o777 | 0o700))?;
    }
    Ok(opened)
}

/// How deep a tree is walked where its branches cannot be moved up.
const MAX_NESTED: usize = 256;

/// Removes everything in a directory.
///
/// What is nested is moved up first, so that two open directories are enough for any depth.
fn empty(top: &OwnedFd, nested: usize, done: &mut Summary, channel: &OwnedFd) -> Result<()> {
    let mut raised: u64 = 0;
    // Somebody may make new things as fast as they are removed.
    for _ in 0..10_000_000_u64 {
        let mut progress = false;
        let mut dir = Dir::read_from(top).map_err(call)?;
        while let Some(found) = dir.read() {
            let found = found.map_err(call)?;
            let name = found.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            progress = true;
            if done.entries.is_multiple_of(1024) && hung_up(channel) {
                return Err(call(Errno::PIPE));
            }
            if unlink(top.as_fd(), name)? {
                done.entries += 1;
                continue;
            }
            raise(top, name, &mut raised, nested, done, channel)?;
        }
        if !progress {
            return Ok(());
        }
    }
    Err(call(Errno::NOTEMPTY))
}

/// Removes what is at a name; `false` if it is a directory with something in it.
fn unlink(dir: BorrowedFd<'_>, name: &[u8]) -> Result<bool> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(true),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(call(error)),
    }
    match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::NOTEMPTY | Errno::EXIST | Errno::ACCESS) => Ok(false),
        Err(error) => Err(call(error)),
    }
}

/// Takes apart one directory of `top`: files go, directories move up into `top`.
fn raise(
    top: &OwnedFd,
    name: &[u8],
    raised: &mut u64,
    nested: usize,
    done: &mut Summary,
    channel: &OwnedFd,
) -> Result<()> {
    let branch = match open_to_empty(top.as_fd(), name) {
        Ok(branch) => branch,
        Err(error) if error.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => return Ok(()),
        Err(error) => return Err(call(error)),
    };
    let mut dir = Dir::read_from(&branch).map_err(call)?;
    while let Some(found) = dir.read() {
        let found = found.map_err(call)?;
        let inner = found.file_name().to_bytes();
        if matches!(inner, b"." | b"..") {
            continue;
        }
        if unlink(branch.as_fd(), inner)? {
            done.entries += 1;
            continue;
        }
        // A directory can be moved by one who may write to it.
        drop(open_to_empty(branch.as_fd(), inner).map_err(call)?);
        *raised += 1;
        let place = format!(".warren-{raised}-{nested}").into_bytes();
        let flags = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&branch, inner, top, &place, flags) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::EXIST) => continue,
            // Another filesystem, or a lower layer: go down instead, as far as descriptors last.
            Err(_) if nested < MAX_NESTED => {
                let below = open_to_empty(branch.as_fd(), inner).map_err(call)?;
                empty(&below, nested + 1, done, channel)?;
                unlink(branch.as_fd(), inner)?;
            }
            Err(error) => return Err(call(error)),
        }
    }
    drop(dir);
    if unlink(top.as_fd(), name)? {
        done.entries += 1;
    }
    Ok(())
}

/// Tells whether nobody is at the other end any more.
pub(crate) fn hung_up(channel: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(channel, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

fn archived(error: archive::Trouble) -> Fault {
    match error {
        archive::Trouble::Call { path, source } => Fault { detail: short(&path), ..call(source) },
        archive::Trouble::Refused { path, why } => {
            let detail = [&short(&path)[..], b": ", why.as_bytes()].concat();
            Fault { detail, ..fault(FaultKind::Archive) }
        }
        archive::Trouble::TooDeep { path } => {
            Fault { detail: short(&path), ..fault(FaultKind::TooMany) }
        }
    }
}

fn short(path: &[u8]) -> Vec<u8> {
    path[..path.len().min(1024)].to_vec()
}

/// Counts what is read.
struct Counted(File, u64);

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.0.read(buffer)?;
        self.1 += got as u64;
        Ok(got)
    }
}

fn import(
    path: &[u8],
    parents: bool,
    who: Who<'_>,
    channel: &OwnedFd,
    data: Option<OwnedFd>,
) -> Result<()> {
    let mut data = Counted(pipe(data)?, 0);
    check(path)?;
    if parents {
        make_parents(path, who)?;
    }
    let target = open_directory(path)?;
    tell(channel, &FileEvent::Ready)?;
    stand_out();
    let done = archive::unpack(&mut data, target.as_fd()).map_err(archived)?;
    committed(channel, data.1)?;
    let (entries, bytes) = (done.entries, done.bytes);
    tell(channel, &FileEvent::Done(Summary { entries, bytes, ..Summary::default() }))
}

fn export(path: &[u8], channel: &OwnedFd, data: Option<OwnedFd>) -> Result<()> {
    let out = pipe(data)?;
    let place = open(path, OFlags::PATH, 0)?;
    let stat = rustix::fs::fstat(&place).map_err(call)?;
    let whole = kind(&stat) == Kind::Directory;
    if !whole {
        regular(&place)?;
    }
    let flags = if whole { OFlags::RDONLY | OFlags::DIRECTORY } else { OFlags::RDONLY };
    let source = open(path, flags, 0)?;
    if !whole {
        regular(&source)?;
    }
    tell_entry(channel, entry(path, &stat))?;
    let mut out = io::BufWriter::with_capacity(CHUNK, out);
    let done = archive::pack(&mut out, source, halves(path).1).map_err(archived)?;
    out.flush().map_err(call)?;
    drop(out);
    let (entries, bytes, skipped) = (done.entries, done.bytes, done.skipped);
    tell(channel, &FileEvent::Done(Summary { entries, bytes, skipped, truncated: false }))
}
