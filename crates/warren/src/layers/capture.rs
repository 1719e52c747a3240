//! Making a layer of what a sandbox wrote, or of what it wrote since the last one.
//!
//! What is written to an overlay is a tree in which a file stands for itself, a whiteout for a file
//! that was removed, and an opaque directory for one that was made anew: the form of a layer. The first
//! capture copies it all. The next ones compare what the kernel says of each file with what it said
//! then, and hold what differs, so that the old layers and the new one together are the tree again.
//! Where that cannot be said by a layer on top, everything is copied once more.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{Mode, OFlags};

use super::tree::{self, Form, Ids, Kind, MAX_DEPTH, Made, Meta, Opened, Writer, Xattrs};

/// Two changes of a file may have the same time if they are closer than this.
const TICK: Duration = Duration::from_millis(40);

/// One place that a sandbox writes to.
#[derive(Debug)]
pub(crate) struct Source {
    /// The tree of what was written.
    pub(crate) dir: OwnedFd,
    /// Where it belongs: empty for the root, else the names that lead there.
    pub(crate) at: Vec<CString>,
    /// Whether it is all there is at that place, and was written without an overlay.
    pub(crate) whole: bool,
}

/// What the tree was like when it was captured.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    meta: Meta,
    opaque: bool,
    /// Whether a change since then must show in what the kernel says of it.
    settled: bool,
    /// In which of the layers since the sandbox was made it is.
    layer: usize,
    children: BTreeMap<CString, Node>,
}

impl Node {
    /// Lists the files below it that have several names, each with the time of its last change.
    fn linked(&self) -> HashSet<(u64, (i64, i64))> {
        let mut linked = HashSet::new();
        let mut rest = vec![self];
        while let Some(node) = rest.pop() {
            if node.meta.kind != Kind::Directory && node.meta.nlink > 1 {
                linked.insert((node.meta.ino, node.meta.ctime));
            }
            rest.extend(node.children.values());
        }
        linked
    }
}

/// What was captured of a sandbox before.
#[derive(Debug)]
pub(crate) struct Previous<'a> {
    pub(crate) root: &'a Node,
    /// The trees of the layers that hold it, oldest first.
    pub(crate) layers: Vec<OwnedFd>,
}

/// Why a capture did not come to its end.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The difference cannot be said by a layer on top of the others.
    NeedsAll,
    /// This path could not be copied.
    At(Vec<u8>, io::Error),
}

/// What was captured.
#[derive(Debug)]
pub(crate) struct Captured {
    pub(crate) root: Node,
    /// Whether there is anything in the new layer.
    pub(crate) changed: bool,
}

/// Copies what is new in `sources` to `out`. The sandbox stands still meanwhile; `idle` says that no
/// process of it is there at all, so that none can have a file mapped.
pub(crate) fn capture(
    sources: &[Source],
    ids: Ids,
    out: BorrowedFd<'_>,
    previous: Option<&Previous<'_>>,
    idle: bool,
) -> Result<Captured, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let settled = now.saturating_sub(TICK);
    let settled =
        (i64::try_from(settled.as_secs()).unwrap_or(i64::MAX), i64::from(settled.subsec_nanos()));
    let mut capture = Capture {
        sources,
        ids,
        writer: Writer::new(),
        previous: previous.map(|previous| previous.layers.as_slice()).unwrap_or_default(),
        layer: previous.map_or(0, |previous| previous.layers.len()),
        settled,
        idle,
        links: HashMap::new(),
        linked: previous.map(|previous| previous.root.linked()).unwrap_or_default(),
        frames: Vec::new(),
        names: Vec::new(),
        late: Vec::new(),
        form: Form::Layer,
        changed: false,
    };
    let root = sources.iter().find(|source| source.at.is_empty());
    let Some(root) = root else {
        return Err(Failure::At(Vec::new(), io::ErrorKind::NotFound.into()));
    };
    let run = |capture: &mut Capture<'_>| {
        let out = out.try_clone_to_owned()?;
        let meta = Meta::of(&rustix::fs::fstat(&root.dir)?);
        let made = Made::of(&meta, ids, tree::xattrs(root.dir.as_fd(), Form::Layer)?);
        capture.frames.push(Frame {
            name: CString::default(),
            out: Some(out),
            made,
            opaque: false,
        });
        let before = previous.map(|previous| previous.root);
        let children = capture.directory(root.dir.as_fd(), before)?;
        let same = before.is_some_and(|before| capture.is_same(&before.meta, &meta));
        capture.changed |= !same;
        if let Some(Frame { out: Some(out), made, .. }) = capture.frames.pop() {
            for (names, made) in &capture.late {
                let way = descend(out.as_fd(), names)?;
                let place = way.last().map_or(out.as_fd(), AsFd::as_fd);
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let dir = rustix::fs::openat(place, c".", flags, Mode::empty())?;
                capture.writer.seal(dir.as_fd(), made)?;
            }
            capture.writer.seal(out.as_fd(), &made)?;
        }
        Ok(capture.node(meta, false, children))
    };
    match run(&mut capture) {
        Ok(root) => Ok(Captured { root, changed: capture.changed }),
        Err(Stop::NeedsAll) => Err(Failure::NeedsAll),
        Err(Stop::Io(error)) => {
            let names: Vec<&[u8]> = capture.names.iter().map(|name| name.as_bytes()).collect();
            Err(Failure::At(names.join(&b'/'), error))
        }
    }
}

/// Why a walk ends early.
enum Stop {
    NeedsAll,
    Io(io::Error),
}

impl<E: Into<io::Error>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Io(error.into())
    }
}

/// A directory on the way to where we are.
struct Frame {
    name: CString,
    /// The same directory in the new layer, once something of it is there.
    out: Option<OwnedFd>,
    made: Made,
    opaque: bool,
}

struct Capture<'a> {
    sources: &'a [Source],
    ids: Ids,
    writer: Writer,
    previous: &'a [OwnedFd],
    layer: usize,
    settled: (i64, i64),
    idle: bool,
    /// Where the first name of each file with several is in the new layer.
    links: HashMap<(u64, u64), Vec<CString>>,
    /// Files with several names that were captured before.
    linked: HashSet<(u64, (i64, i64))>,
    frames: Vec<Frame>,
    /// The names that lead to where we are.
    names: Vec<CString>,
    /// Directories that cannot be entered once they are as they shall be, inner ones first: a file in
    /// them may still get another name.
    late: Vec<(Vec<CString>, Made)>,
    form: Form,
    changed: bool,
}

impl Capture<'_> {
    fn node(&self, meta: Meta, opaque: bool, children: BTreeMap<CString, Node>) -> Node {
        let settled = self.idle && meta.ctime < self.settled;
        Node { meta, opaque, settled, layer: self.layer, children }
    }

    /// Tells whether the kernel says the same of two, as far as anybody inside could see.
    fn is_same(&self, a: &Meta, b: &Meta) -> bool {
        (a.kind, a.mode, a.uid, a.gid, a.mtime) == (b.kind, b.mode, b.uid, b.gid, b.mtime)
            && (a.kind == Kind::Directory || (a.size, a.nlink, a.ino) == (b.size, b.nlink, b.ino))
            && (a.kind == Kind::Directory || a.ctime == b.ctime)
    }

    /// Captures the entries of a directory, and says what they were like.
    fn directory(
        &mut self,
        dir: BorrowedFd<'_>,
        before: Option<&Node>,
    ) -> Result<BTreeMap<CString, Node>, Stop> {
        if self.names.len() >= MAX_DEPTH {
            return Err(tree::too_deep().into());
        }
        let mut children = BTreeMap::new();
        for name in tree::names(dir)? {
            self.names.push(name.clone());
            // What another source says of a place holds.
            if !self.sources.iter().any(|source| source.at == self.names) {
                let was = before.and_then(|before| before.children.get(&name));
                let node = self.entry(dir, &name, was)?;
                children.insert(name, node);
            }
            self.names.pop();
        }
        let (sources, depth) = (self.sources, self.names.len());
        for source in sources {
            if source.at.len() == depth + 1 && source.at[..depth] == self.names {
                let name = source.at[depth].clone();
                let was = before.and_then(|before| before.children.get(&name));
                self.names.push(name.clone());
                let meta = Meta::of(&rustix::fs::fstat(&source.dir)?);
                self.form = if source.whole { Form::Plain } else { Form::Layer };
                let node = self.subdirectory(source.dir.as_fd(), &name, meta, source.whole, was)?;
                self.form = Form::Layer;
                children.insert(name, node);
                self.names.pop();
            }
        }
        for (name, was) in before.into_iter().flat_map(|before| &before.children) {
            if children.contains_key(name) {
                continue;
            }
            if was.meta.kind == Kind::Whiteout {
                // What it hid is there again: no layer on top can say so.
                return Err(Stop::NeedsAll);
            }
            self.changed = true;
            self.make_frames()?;
            let out = self.out();
            self.writer.whiteout(out.as_fd(), name)?;
        }
        Ok(children)
    }

    fn entry(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &CStr,
        was: Option<&Node>,
    ) -> Result<Node, Stop> {
        let meta = Meta::at(dir, name)?;
        if meta.kind == Kind::Directory {
            let opened = tree::open_dir(dir, name, &meta)?;
            let opaque = self.form == Form::Layer && tree::is_opaque(opened.as_fd());
            return self.subdirectory(opened.as_fd(), name, meta, opaque, was);
        }
        let node = |capture: &Self| capture.node(meta, false, BTreeMap::new());
        if meta.kind == Kind::Whiteout {
            if was.is_none_or(|was| was.meta.kind != Kind::Whiteout) {
                self.changed = true;
                self.make_frames()?;
                self.writer.whiteout(self.out().as_fd(), name)?;
            }
            return Ok(node(self));
        }
        let mut opened = match meta.kind {
            Kind::File => Some(tree::open_file(dir, name, &meta)?),
            _ => None,
        };
        if let Some(was) = was
            && self.is_unchanged(was, &meta, opened.as_ref())?
        {
            return Ok(Node { layer: was.layer, ..node(self) });
        }
        if meta.nlink > 1 && self.linked.contains(&(meta.ino, meta.ctime)) {
            // It came here with its directory: its other names are in a layer below, where it cannot be linked to.
            return Err(Stop::NeedsAll);
        }
        self.changed = true;
        self.make_frames()?;
        self.copy(dir, name, &meta, opened.take())?;
        Ok(node(self))
    }

    /// Tells whether a file is what it was when it was captured.
    fn is_unchanged(&self, was: &Node, meta: &Meta, opened: Option<&Opened>) -> Result<bool, Stop> {
        if !self.is_same(&was.meta, meta) {
            return Ok(false);
        }
        let Some(opened) = opened else { return Ok(true) };
        if was.settled {
            return Ok(true);
        }
        // Whoever has a file mapped changes it without a trace; two changes in one tick have one
        // time. Neither is likely: look at the bytes rather than copy them.
        let Some(layer) = self.previous.get(was.layer) else { return Ok(false) };
        let Some((last, parents)) = self.names.split_last() else { return Ok(false) };
        let kept = descend(layer.as_fd(), parents).and_then(|parent| {
            let kept = Meta::at(parent.last().map_or(layer.as_fd(), AsFd::as_fd), last)?;
            let dir = parent.last().map_or(layer.as_fd(), AsFd::as_fd);
            Ok((kept, tree::open_file(dir, last, &kept)?))
        });
        match kept {
            Ok((kept, file)) if kept.size == meta.size => {
                Ok(tree::same_contents(opened.as_fd(), file.as_fd(), meta.size)?
                    && tree::xattrs(opened.as_fd(), self.form)?
                        == tree::xattrs(file.as_fd(), Form::Layer)?)
            }
            Ok(_) | Err(_) => Ok(false),
        }
    }

    fn subdirectory(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &CStr,
        meta: Meta,
        opaque: bool,
        was: Option<&Node>,
    ) -> Result<Node, Stop> {
        let before = match was {
            Some(was) if was.meta.kind == Kind::Directory && was.opaque == opaque => Some(was),
            // Only what hides all that is below can stand for something else that did.
            Some(_) if !opaque => return Err(Stop::NeedsAll),
            Some(_) | None => None,
        };
        let xattrs: Xattrs = tree::xattrs(dir, self.form)?;
        let made = Made::of(&meta, self.ids, xattrs);
        // On top of a layer in which it is opaque it must not be: it would hide that layer too.
        let frame =
            Frame { name: name.to_owned(), out: None, made, opaque: opaque && before.is_none() };
        self.frames.push(frame);
        let same = before.is_some_and(|before| {
            self.is_same(&before.meta, &meta) && before.meta.ctime == meta.ctime && before.settled
        });
        if !same {
            self.changed |= before.is_none_or(|before| before.meta.ctime != meta.ctime);
            self.make_frames()?;
        }
        let children = self.directory(dir, before)?;
        if let Some(Frame { out: Some(out), made, opaque, .. }) = self.frames.pop() {
            if opaque {
                self.writer.make_opaque(out.as_fd())?;
            }
            if made.mode & 0o100 == 0 {
                self.late.push((self.names.clone(), made));
            } else {
                self.writer.seal(out.as_fd(), &made)?;
            }
        }
        Ok(self.node(meta, opaque, children))
    }

    /// Makes the directories of the new layer that lead to where we are.
    fn make_frames(&mut self) -> io::Result<()> {
        for index in 1..self.frames.len() {
            if self.frames[index].out.is_none() {
                let parent =
                    self.frames[index - 1].out.as_ref().expect("made one before the other");
                let made = self.writer.directory(parent.as_fd(), &self.frames[index].name)?;
                self.frames[index].out = Some(made);
            }
        }
        Ok(())
    }

    /// The directory of the new layer where we are; it is there after `make_frames`.
    fn out(&self) -> &OwnedFd {
        let out = self.frames.last().and_then(|frame| frame.out.as_ref());
        out.expect("the way to it was made")
    }

    fn copy(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &CStr,
        meta: &Meta,
        opened: Option<Opened>,
    ) -> io::Result<()> {
        let key = (meta.dev, meta.ino);
        if meta.nlink > 1 {
            if let Some(first) = self.links.get(&key) {
                let root = self.frames[0].out.as_ref().expect("the root is there");
                let Some((last, parents)) = first.split_last() else { return Ok(()) };
                let way = descend(root.as_fd(), parents)?;
                let from = way.last().map_or(root.as_fd(), AsFd::as_fd);
                let flags = rustix::fs::AtFlags::empty();
                return Ok(rustix::fs::linkat(from, last, self.out(), name, flags)?);
            }
            self.links.insert(key, self.names.clone());
        }
        let out = self.out().as_fd();
        let plain = Made::of(meta, self.ids, Vec::new());
        match (meta.kind, &opened) {
            (Kind::File, Some(file)) => {
                let made = Made { xattrs: tree::xattrs(file.as_fd(), self.form)?, ..plain };
                self.writer.copy_file(file.as_fd(), meta, &made, out, name)
            }
            (Kind::Symlink, _) => {
                self.writer.symlink(&tree::link_target(dir, name)?, &plain, out, name)
            }
            (Kind::Fifo | Kind::Socket, _) => self.writer.special(meta.kind, &plain, out, name),
            // No sandbox can make a device, so that there is none.
            (Kind::Device | Kind::Directory | Kind::Whiteout | Kind::File, _) => {
                Err(io::ErrorKind::InvalidData.into())
            }
        }
    }
}

/// Opens one directory after the other, following no link.
fn descend(root: BorrowedFd<'_>, names: &[CString]) -> io::Result<Vec<OwnedFd>> {
    let mut way: Vec<OwnedFd> = Vec::new();
    for name in names {
        let parent = way.last().map_or(root, AsFd::as_fd);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let next = rustix::fs::openat(parent, name, flags, Mode::empty())?;
        way = vec![next];
    }
    Ok(way)
}
