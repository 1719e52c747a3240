//! A layer as a stream of bytes, to be moved to another store.
//!
//! Frames, each a length and a message in `postcard`: the tree in the order of its digest, a file's bytes after it
//! without its holes. What comes in may be anybody's: names are single and in order, nothing is named twice,
//! depth, entries and bytes are bounded, and nothing is followed.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use super::tree::{self, Form, Ids, Kind, MAX_DEPTH, Made, Meta, Writer};

/// The longest frame: a piece of a file with room to spare, or a file with all its attributes.
const MAX_FRAME: usize = 1 << 20;
const MAX_ENTRIES: u64 = 1_000_000;

#[derive(Debug, Serialize, Deserialize)]
struct Attributes {
    mode: u32,
    owner: (u32, u32),
    mtime: (i64, i64),
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

#[derive(Debug, Serialize, Deserialize)]
enum Frame {
    /// The tree begins; these are the attributes of its root.
    Root(Attributes),
    Directory {
        name: Vec<u8>,
        attributes: Attributes,
        opaque: bool,
    },
    /// The directory, or the tree, is over.
    End,
    File {
        name: Vec<u8>,
        attributes: Attributes,
        size: u64,
    },
    /// A part of the file that came last.
    Bytes {
        at: u64,
        bytes: Vec<u8>,
    },
    /// Another name of a file that came before.
    Link {
        name: Vec<u8>,
        path: Vec<Vec<u8>>,
    },
    Symlink {
        name: Vec<u8>,
        attributes: Attributes,
        target: Vec<u8>,
    },
    Fifo {
        name: Vec<u8>,
        attributes: Attributes,
    },
    Socket {
        name: Vec<u8>,
        attributes: Attributes,
    },
    Whiteout {
        name: Vec<u8>,
    },
}

impl Attributes {
    fn of(made: Made) -> Self {
        let own = |(name, value): (CString, Vec<u8>)| (name.into_bytes(), value);
        let xattrs = made.xattrs.into_iter().map(own).collect();
        Self { mode: made.mode, owner: made.owner, mtime: made.mtime, xattrs }
    }

    fn made(self) -> io::Result<Made> {
        let own = |(name, value): (Vec<u8>, Vec<u8>)| {
            let plain = name.starts_with(b"user.")
                && (!name.starts_with(b"user.overlay.")
                    || name.starts_with(b"user.overlay.overlay."));
            let name = CString::new(name).ok().filter(|_| plain && value.len() <= 64 << 10);
            Ok((name.ok_or_else(|| bad("an attribute that no sandbox could set"))?, value))
        };
        let xattrs = self.xattrs.into_iter().map(own).collect::<io::Result<_>>()?;
        let sane = self.mode <= 0o7777 && (0..1_000_000_000).contains(&self.mtime.1);
        if !sane || self.owner.0 > 65_535 || self.owner.1 > 65_535 {
            return Err(bad("a mode, an owner or a time that nothing has"));
        }
        Ok(Made { mode: self.mode, owner: self.owner, mtime: self.mtime, xattrs })
    }
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the layer has {what}"))
}

fn put(out: &mut impl Write, frame: &Frame) -> io::Result<()> {
    let bytes = postcard::to_allocvec(frame).map_err(io::Error::other)?;
    if bytes.len() > MAX_FRAME {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(&bytes)
}

/// Writes a layer.
pub(crate) fn write(root: BorrowedFd<'_>, out: &mut impl Write) -> io::Result<()> {
    let ids = Ids::of_layers();
    let meta = Meta::of(&rustix::fs::fstat(root)?);
    let made = Made::of(&meta, ids, tree::xattrs(root, Form::Layer)?);
    put(out, &Frame::Root(Attributes::of(made)))?;
    let mut sender = Sender { out, ids, links: HashMap::new(), path: Vec::new() };
    sender.directory(root)
}

struct Sender<'a, W> {
    out: &'a mut W,
    ids: Ids,
    links: HashMap<(u64, u64), Vec<Vec<u8>>>,
    path: Vec<Vec<u8>>,
}

impl<W: Write> Sender<'_, W> {
    fn directory(&mut self, dir: BorrowedFd<'_>) -> io::Result<()> {
        if self.path.len() >= MAX_DEPTH {
            return Err(tree::too_deep());
        }
        for name in tree::names(dir)? {
            self.path.push(name.to_bytes().to_vec());
            self.entry(dir, &name)?;
            self.path.pop();
        }
        put(self.out, &Frame::End)
    }

    fn entry(&mut self, dir: BorrowedFd<'_>, entry: &CStr) -> io::Result<()> {
        let meta = Meta::at(dir, entry)?;
        let name = entry.to_bytes().to_vec();
        if meta.nlink > 1 && meta.kind != Kind::Directory && meta.kind != Kind::Whiteout {
            if let Some(path) = self.links.get(&(meta.dev, meta.ino)).cloned() {
                return put(self.out, &Frame::Link { name, path });
            }
            self.links.insert((meta.dev, meta.ino), self.path.clone());
        }
        let plain = Made::of(&meta, self.ids, Vec::new());
        match meta.kind {
            Kind::Directory => {
                let opened = tree::open_dir(dir, entry, &meta)?;
                let xattrs = tree::xattrs(opened.as_fd(), Form::Layer)?;
                let attributes = Attributes::of(Made { xattrs, ..plain });
                let opaque = tree::is_opaque(opened.as_fd());
                put(self.out, &Frame::Directory { name, attributes, opaque })?;
                self.directory(opened.as_fd())
            }
            Kind::File => {
                let opened = tree::open_file(dir, entry, &meta)?;
                let xattrs = tree::xattrs(opened.as_fd(), Form::Layer)?;
                let attributes = Attributes::of(Made { xattrs, ..plain });
                put(self.out, &Frame::File { name, attributes, size: meta.size })?;
                tree::for_each_chunk(opened.as_fd(), meta.size, |at, bytes| {
                    put(self.out, &Frame::Bytes { at, bytes: bytes.to_vec() })
                })
            }
            Kind::Symlink => {
                let target = tree::link_target(dir, entry)?.into_bytes();
                let attributes = Attributes::of(plain);
                put(self.out, &Frame::Symlink { name, attributes, target })
            }
            Kind::Fifo => put(self.out, &Frame::Fifo { name, attributes: Attributes::of(plain) }),
            Kind::Socket => {
                put(self.out, &Frame::Socket { name, attributes: Attributes::of(plain) })
            }
            Kind::Whiteout => put(self.out, &Frame::Whiteout { name }),
            Kind::Device => Err(bad("a device")),
        }
    }
}

/// Reads a layer into an empty directory, of at most this many bytes.
pub(crate) fn read(input: &mut impl Read, root: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let mut receiver = Receiver {
        input,
        writer: Writer::new(),
        root: root.try_clone_to_owned()?,
        next: None,
        entries: 0,
        bytes,
        late: Vec::new(),
        path: Vec::new(),
    };
    let Frame::Root(attributes) = receiver.take()? else { return Err(bad("no beginning")) };
    let made = attributes.made()?;
    receiver.directory(root)?;
    for (path, made) in std::mem::take(&mut receiver.late) {
        let dir = descend(root, &path)?;
        receiver.writer.seal(dir.as_fd(), &made)?;
    }
    receiver.writer.seal(root, &made)?;
    if receiver.next.is_some() || receiver.input.read(&mut [0])? != 0 {
        return Err(bad("something after its end"));
    }
    Ok(())
}

/// Reads a layer into a directory that is thrown away. Each frame is given its length, for bytes that
/// happen to have the right one are rare.
#[cfg(feature = "fuzz")]
pub(crate) fn fuzz(data: &[u8]) {
    use std::sync::OnceLock;
    static PLACE: OnceLock<std::path::PathBuf> = OnceLock::new();
    let place = PLACE.get_or_init(|| format!("/dev/shm/warren-fuzz-{}", std::process::id()).into());
    let _ = std::fs::remove_dir_all(place);
    std::fs::create_dir(place).expect("a directory");
    let root = std::fs::File::open(place).expect("a directory");
    let mut framed = Vec::new();
    let mut rest = data;
    while let Some((length, after)) = rest.split_first() {
        let (frame, after) = after.split_at(usize::from(*length).min(after.len()));
        framed.extend(u32::from(*length).to_le_bytes());
        framed.extend(frame);
        rest = after;
    }
    let _ = read(&mut &data[..], root.as_fd(), 1 << 16);
    let _ = read(&mut &framed[..], root.as_fd(), 1 << 16);
    let _ = std::fs::remove_dir_all(place);
}

struct Receiver<'a, R> {
    input: &'a mut R,
    writer: Writer,
    root: OwnedFd,
    next: Option<Frame>,
    entries: u64,
    /// What may still come.
    bytes: u64,
    /// Directories that cannot be entered once they are as they shall be, inner ones first.
    late: Vec<(Vec<CString>, Made)>,
    path: Vec<CString>,
}

impl<R: Read> Receiver<'_, R> {
    fn take(&mut self) -> io::Result<Frame> {
        if let Some(frame) = self.next.take() {
            return Ok(frame);
        }
        let mut length = [0; 4];
        self.input.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_FRAME {
            return Err(bad("a piece that is too long"));
        }
        let mut frame = vec![0; length];
        self.input.read_exact(&mut frame)?;
        match postcard::take_from_bytes(&frame) {
            Ok((frame, [])) => Ok(frame),
            _ => Err(bad("a piece that cannot be read")),
        }
    }

    /// Checks a name: it is one, and comes after the last.
    fn name(&mut self, name: Vec<u8>, last: &mut Option<CString>) -> io::Result<CString> {
        self.entries += 1;
        let plain = !name.is_empty()
            && name.len() <= 255
            && !name.contains(&b'/')
            && name != b"."
            && name != b"..";
        let name =
            CString::new(name).ok().filter(|_| plain).ok_or_else(|| bad("a name that is none"))?;
        if last.as_ref().is_some_and(|last| *last >= name) || self.entries > MAX_ENTRIES {
            return Err(bad("names that are out of order, or too many"));
        }
        *last = Some(name.clone());
        Ok(name)
    }

    fn directory(&mut self, dir: BorrowedFd<'_>) -> io::Result<()> {
        if self.path.len() >= MAX_DEPTH {
            return Err(tree::too_deep());
        }
        let mut last = None;
        loop {
            match self.take()? {
                Frame::End => return Ok(()),
                Frame::Root(_) | Frame::Bytes { .. } => return Err(bad("a piece out of place")),
                Frame::Directory { name, attributes, opaque } => {
                    let (name, made) = (self.name(name, &mut last)?, attributes.made()?);
                    let inner = self.writer.directory(dir, &name)?;
                    self.path.push(name);
                    self.directory(inner.as_fd())?;
                    if opaque {
                        self.writer.make_opaque(inner.as_fd())?;
                    }
                    if made.mode & 0o100 == 0 {
                        self.late.push((self.path.clone(), made));
                    } else {
                        self.writer.seal(inner.as_fd(), &made)?;
                    }
                    self.path.pop();
                }
                Frame::File { name, attributes, size } => {
                    let (name, made) = (self.name(name, &mut last)?, attributes.made()?);
                    let file = self.writer.file(dir, &name)?;
                    self.contents(file.as_fd(), size)?;
                    rustix::fs::ftruncate(&file, size)?;
                    self.writer.seal(file.as_fd(), &made)?;
                }
                Frame::Link { name, path } => {
                    let name = self.name(name, &mut last)?;
                    let path = path.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>()?;
                    let odd = |part: &CString| {
                        let bytes = part.as_bytes();
                        bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/')
                    };
                    let Some((first, way)) = path.split_last() else { return Err(bad("no name")) };
                    if path.iter().any(odd) || path.len() > MAX_DEPTH {
                        return Err(bad("a link that leads out of it"));
                    }
                    let from = descend(self.root.as_fd(), way)?;
                    if Meta::at(from.as_fd(), first)?.kind == Kind::Directory {
                        return Err(bad("a second name for a directory"));
                    }
                    rustix::fs::linkat(&from, first, dir, &name, rustix::fs::AtFlags::empty())?;
                }
                Frame::Symlink { name, attributes, target } => {
                    let (name, made) = (self.name(name, &mut last)?, attributes.made()?);
                    let target = CString::new(target).map_err(|_| bad("a link to nowhere"))?;
                    self.writer.symlink(&target, &made, dir, &name)?;
                }
                Frame::Fifo { name, attributes } => {
                    let (name, made) = (self.name(name, &mut last)?, attributes.made()?);
                    self.writer.special(Kind::Fifo, &made, dir, &name)?;
                }
                Frame::Socket { name, attributes } => {
                    let (name, made) = (self.name(name, &mut last)?, attributes.made()?);
                    self.writer.special(Kind::Socket, &made, dir, &name)?;
                }
                Frame::Whiteout { name } => {
                    let name = self.name(name, &mut last)?;
                    self.writer.whiteout(dir, &name)?;
                }
            }
        }
    }

    /// Takes the pieces of a file, which come in order and lie within it.
    fn contents(&mut self, file: BorrowedFd<'_>, size: u64) -> io::Result<()> {
        let mut at = 0;
        loop {
            match self.take()? {
                Frame::Bytes { at: begin, bytes } => {
                    let end = begin.checked_add(bytes.len() as u64);
                    let end = end.filter(|end| begin >= at && *end <= size && !bytes.is_empty());
                    let end = end.ok_or_else(|| bad("a piece that is not in its file"))?;
                    self.bytes = self
                        .bytes
                        .checked_sub(bytes.len() as u64)
                        .ok_or_else(|| bad("more in it than was said"))?;
                    let (mut begin, mut bytes) = (begin, &bytes[..]);
                    while !bytes.is_empty() {
                        let written = rustix::io::pwrite(file, bytes, begin)?;
                        begin += written as u64;
                        bytes = &bytes[written..];
                    }
                    at = end;
                }
                other => {
                    self.next = Some(other);
                    return Ok(());
                }
            }
        }
    }
}

/// Opens a directory of a tree that is being written, following no link.
fn descend(root: BorrowedFd<'_>, names: &[CString]) -> io::Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut dir = rustix::fs::openat(root, c".", flags, Mode::empty())?;
    for name in names {
        dir = rustix::fs::openat(&dir, name, flags, Mode::empty())?;
    }
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes() -> Attributes {
        Attributes { mode: 0o755, owner: (0, 0), mtime: (0, 0), xattrs: Vec::new() }
    }

    fn with_xattr(name: &[u8]) -> Attributes {
        Attributes { xattrs: vec![(name.to_vec(), b"y".to_vec())], ..attributes() }
    }

    fn file(name: &[u8], attributes: Attributes) -> Frame {
        Frame::File { name: name.to_vec(), attributes, size: 0 }
    }

    fn link(path: &[&[u8]]) -> Frame {
        let path = path.iter().map(|part| part.to_vec()).collect();
        Frame::Link { name: b"z".to_vec(), path }
    }

    fn directory(name: &[u8]) -> Frame {
        Frame::Directory { name: name.to_vec(), attributes: attributes(), opaque: false }
    }

    fn read_all(frames: Vec<Frame>) -> io::Result<()> {
        let mut bytes = Vec::new();
        for frame in [Frame::Root(attributes())].into_iter().chain(frames).chain([Frame::End]) {
            put(&mut bytes, &frame)?;
        }
        let outside = tempfile::tempdir().unwrap();
        let inside = outside.path().join("layer");
        std::fs::create_dir(&inside).unwrap();
        let done = read(&mut &bytes[..], tree::open_root(&inside).unwrap().as_fd(), 1 << 20);
        let there = std::fs::read_dir(outside.path()).unwrap().count();
        assert_eq!(there, 1, "nothing got out");
        done
    }

    #[test]
    fn a_layer_of_an_attacker_is_refused_and_nothing_gets_out() {
        let symlink = |target: &[u8]| Frame::Symlink {
            name: b"out".to_vec(),
            attributes: attributes(),
            target: target.to_vec(),
        };
        read_all(vec![file(b"a", attributes()), link(&[b"a"])]).unwrap();
        read_all(vec![symlink(b"/etc/passwd")]).unwrap();
        let long = [b'x'; 256];
        let plain = |name: &[u8]| vec![file(name, attributes())];
        let strange = |owner, mode| vec![file(b"a", Attributes { owner, mode, ..attributes() })];
        let deep = (0..=MAX_DEPTH).map(|_| directory(b"d"));
        let bytes = || Frame::Bytes { at: 0, bytes: vec![1] };
        for (what, frames) in [
            ("up", plain(b"..")),
            ("itself", plain(b".")),
            ("a path", plain(b"../../etc/cron.d/x")),
            ("an absolute path", plain(b"/etc/passwd")),
            ("no name", plain(b"")),
            ("a zero", plain(b"a\0b")),
            ("too long", plain(&long)),
            ("a directory above", vec![directory(b".."), file(b"x", attributes()), Frame::End]),
            ("twice", vec![file(b"a", attributes()), file(b"a", attributes())]),
            ("a directory over a link", vec![symlink(b".."), directory(b"out"), Frame::End]),
            ("out of order", vec![file(b"b", attributes()), file(b"a", attributes())]),
            ("a link up", vec![link(&[b"..", b"..", b"etc", b"passwd"])]),
            ("a link to a path", vec![link(&[b"../../etc/passwd"])]),
            ("a link through a link", vec![symlink(b"/etc"), link(&[b"out", b"passwd"])]),
            ("a link to a directory", vec![directory(b"d"), Frame::End, link(&[b"d"])]),
            ("a link to nothing", vec![link(&[])]),
            ("a mark of overlayfs", vec![file(b"a", with_xattr(b"user.overlay.redirect"))]),
            ("a capability", vec![file(b"a", with_xattr(b"security.capability"))]),
            ("an owner of the host", strange((65_536, 0), 0o755)),
            ("no such mode", strange((0, 0), 0o20_755)),
            ("bytes of nobody", vec![bytes()]),
            ("bytes beyond", vec![file(b"a", attributes()), bytes()]),
            ("without end", deep.collect()),
        ] {
            let error = read_all(frames).expect_err(what);
            assert!(!error.to_string().is_empty(), "{what}");
        }
    }
}
