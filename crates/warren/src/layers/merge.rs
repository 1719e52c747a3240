//! Several layers as one: a chain of them has an end, because the kernel stacks only so many.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::tree::{self, Form, Ids, Kind, MAX_DEPTH, Made, Meta, Opened, Writer};
use super::{Held, Layers, failed};
use crate::{LayerId, Result};

/// What layers that are merged stand on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Below {
    /// Nothing: they are the lowest.
    Nothing,
    /// Something that they may hide parts of.
    Something,
}

impl Layers {
    /// Makes one layer of some, the lowest first, that says the same of what is below; and one below it, where that is needed.
    ///
    /// A mark that something is gone is itself seen in a directory that no other layer has. Whether one has is not known here, so
    /// such directories are in a second layer too.
    pub fn merge(&self, ids: &[LayerId], below: Below) -> Result<(Vec<LayerId>, Held)> {
        let mut held = self.hold(ids)?;
        let staging = self.begin()?;
        let failed = |error: io::Error| failed("merge layers in", &staging.path(), error);
        let marked = merge(self, ids, below, staging.tree()).map_err(failed)?;
        let mut merged = Vec::new();
        if marked.iter().any(|path| !path.is_empty()) {
            let ground = self.begin()?;
            lay(ground.tree(), &marked).map_err(failed)?;
            let (id, kept) = ground.commit()?;
            merged.push(id);
            held.join(kept);
        }
        let (id, kept) = staging.commit()?;
        merged.push(id);
        held.join(kept);
        Ok((merged, held))
    }
}

/// Merges trees into an empty one, and returns which directories have marks in them that something is gone.
fn merge(
    layers: &Layers,
    ids: &[LayerId],
    below: Below,
    out: BorrowedFd<'_>,
) -> io::Result<BTreeSet<Vec<CString>>> {
    let trees = ids.iter().rev().map(|id| tree::open_root(&layers.path(id)));
    let trees = trees.collect::<io::Result<Vec<_>>>()?;
    let mut merger = Merger {
        root: out,
        ids: Ids::of_layers(),
        writer: Writer::new(),
        links: HashMap::new(),
        path: Vec::new(),
        late: Vec::new(),
        marked: BTreeSet::new(),
    };
    let trees: Vec<_> = trees.iter().map(AsFd::as_fd).collect();
    merger.directory(&trees, out, below)?;
    for (path, made) in &merger.late {
        let place = descend(out, path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(&place, c".", flags, Mode::empty())?;
        merger.writer.seal(dir.as_fd(), made)?;
    }
    if let Some(top) = trees.first() {
        let made = merger.made(*top, &Meta::of(&rustix::fs::fstat(top)?))?;
        merger.writer.seal(out, &made)?;
    }
    Ok(merger.marked)
}

/// Makes empty directories.
fn lay(root: BorrowedFd<'_>, paths: &BTreeSet<Vec<CString>>) -> io::Result<()> {
    for path in paths {
        for depth in 0..path.len() {
            let parent = descend(root, &path[..depth])?;
            match rustix::fs::mkdirat(&parent, &path[depth], Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

struct Merger<'a> {
    root: BorrowedFd<'a>,
    ids: Ids,
    writer: Writer,
    /// Where the first name of each file with several is in the new layer.
    links: HashMap<(u64, u64), Vec<CString>>,
    /// The names that lead to where we are.
    path: Vec<CString>,
    /// Directories that cannot be entered once they are as they shall be, inner ones first.
    late: Vec<(Vec<CString>, Made)>,
    /// Directories with marks in them that something is gone.
    marked: BTreeSet<Vec<CString>>,
}

impl Merger<'_> {
    fn made(&self, file: BorrowedFd<'_>, meta: &Meta) -> io::Result<Made> {
        Ok(Made::of(meta, self.ids, tree::xattrs(file, Form::Layer)?))
    }

    /// Merges directories of one name, the highest first.
    fn directory(
        &mut self,
        dirs: &[BorrowedFd<'_>],
        out: BorrowedFd<'_>,
        below: Below,
    ) -> io::Result<()> {
        if self.path.len() >= MAX_DEPTH {
            return Err(tree::too_deep());
        }
        let mut names = BTreeSet::new();
        for dir in dirs {
            names.extend(tree::names(*dir)?);
        }
        for name in names {
            self.path.push(name.clone());
            self.entry(dirs, &name, out, below)?;
            self.path.pop();
        }
        Ok(())
    }

    fn entry(
        &mut self,
        dirs: &[BorrowedFd<'_>],
        name: &CStr,
        out: BorrowedFd<'_>,
        below: Below,
    ) -> io::Result<()> {
        let mut found = dirs.iter().filter_map(|dir| match Meta::at(*dir, name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            other => Some(other.map(|meta| (*dir, meta))),
        });
        // The highest that says anything of it holds.
        let Some(first) = found.next() else { return Ok(()) };
        let (dir, meta) = first?;
        if meta.kind == Kind::Whiteout {
            if below == Below::Nothing {
                return Ok(());
            }
            self.marked.insert(self.path[..self.path.len() - 1].to_vec());
            return self.writer.whiteout(out, name);
        }
        if meta.kind != Kind::Directory {
            return self.copy(dir, name, &meta, out);
        }
        let mut opened = vec![tree::open_dir(dir, name, &meta)?];
        let mut opaque = tree::is_opaque(opened[0].as_fd());
        while !opaque && let Some(below) = found.next() {
            let (dir, meta) = below?;
            // Whatever else is there hides all that is below it.
            opaque = meta.kind != Kind::Directory;
            if !opaque {
                let next = tree::open_dir(dir, name, &meta)?;
                opaque = tree::is_opaque(next.as_fd());
                opened.push(next);
            }
        }
        let made = self.made(opened[0].as_fd(), &meta)?;
        let inner = self.writer.directory(out, name)?;
        let opened: Vec<_> = opened.iter().map(Opened::as_fd).collect();
        let below = if opaque { Below::Nothing } else { below };
        self.directory(&opened, inner.as_fd(), below)?;
        if opaque {
            self.writer.make_opaque(inner.as_fd())?;
        }
        if made.mode & 0o100 == 0 {
            self.late.push((self.path.clone(), made));
            return Ok(());
        }
        self.writer.seal(inner.as_fd(), &made)
    }

    fn copy(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &CStr,
        meta: &Meta,
        out: BorrowedFd<'_>,
    ) -> io::Result<()> {
        if meta.nlink > 1 {
            let key = (meta.dev, meta.ino);
            if let Some((last, way)) = self.links.get(&key).and_then(|first| first.split_last()) {
                let from = descend(self.root, way)?;
                return Ok(rustix::fs::linkat(&from, last, out, name, AtFlags::empty())?);
            }
            self.links.insert(key, self.path.clone());
        }
        let plain = Made::of(meta, self.ids, Vec::new());
        match meta.kind {
            Kind::File => {
                let file = tree::open_file(dir, name, meta)?;
                let made = self.made(file.as_fd(), meta)?;
                self.writer.copy_file(file.as_fd(), meta, &made, out, name)
            }
            Kind::Symlink => self.writer.symlink(&tree::link_target(dir, name)?, &plain, out, name),
            Kind::Fifo | Kind::Socket => self.writer.special(meta.kind, &plain, out, name),
            Kind::Directory | Kind::Whiteout | Kind::Device => {
                Err(io::ErrorKind::InvalidData.into())
            }
        }
    }
}

/// Finds a directory of the tree that is being written; it need not be one that can be read.
fn descend(root: BorrowedFd<'_>, names: &[CString]) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut dir = rustix::fs::openat(root, c".", flags, Mode::empty())?;
    for name in names {
        dir = rustix::fs::openat(&dir, name, flags, Mode::empty())?;
    }
    Ok(dir)
}
