//! What differs between two stacks of layers, as whoever looks through them would see it.
//!
//! Two stacks mostly stand on the same ground, and what only that has is not looked at: the cost is
//! that of what lies above it.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::rc::Rc;

use sha2::{Digest as _, Sha256};

use super::tree::{self, Ids, Kind, MAX_DEPTH, Meta, Opened};
use crate::{DiffEntry, DiffKind, DiffOptions, DiffSide, FileKind};

/// The largest file that is shown as a patch.
const MAX_PATCH: u64 = 256 << 10;
/// How many bytes are digested for one comparison. A file has holes for nothing, and each has to be read.
pub(crate) const MAX_DIGESTED: u64 = 16 << 30;
/// How many lines around a change are shown.
const CONTEXT: usize = 3;

/// One tree of a stack.
#[derive(Debug)]
pub(crate) struct Tree {
    /// Tells it from others: two with the same are the same.
    pub(crate) tag: String,
    pub(crate) dir: OwnedFd,
    /// Where it belongs: empty for the root.
    pub(crate) at: Vec<CString>,
    /// Whether it hides everything below it.
    pub(crate) whole: bool,
    pub(crate) ids: Ids,
}

/// Trees over each other, the highest first.
#[derive(Debug)]
pub(crate) struct Stack(pub(crate) Vec<Rc<Tree>>);

/// A directory as it is seen through a stack: in which trees it is, the highest first.
#[derive(Clone)]
struct Dirs(Vec<(Rc<Tree>, Rc<dyn AsFd>)>);

enum Found {
    Nothing,
    File { tree: Rc<Tree>, dir: Rc<dyn AsFd>, meta: Meta },
    Directory { dirs: Dirs, meta: Meta, ids: Ids },
}

struct Held(Opened);

impl AsFd for Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

struct Shared(Rc<Tree>);

impl AsFd for Shared {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.dir.as_fd()
    }
}

/// Lists what is otherwise in `after` than in `before`.
pub(crate) fn diff(
    before: &Stack,
    after: &Stack,
    options: &DiffOptions,
) -> io::Result<Vec<DiffEntry>> {
    let (path, found) = (Vec::new(), Vec::new());
    let mut walk = Walk { before, after, options, path, found, digested: 0 };
    let (a, b) = (root(before), root(after));
    walk.directory(&a, &b)?;
    Ok(walk.found)
}

fn root(stack: &Stack) -> Dirs {
    let own = stack.0.iter().filter(|tree| tree.at.is_empty());
    Dirs(
        own.map(|tree| (Rc::clone(tree), Rc::new(Shared(Rc::clone(tree))) as Rc<dyn AsFd>))
            .collect(),
    )
}

struct Walk<'a> {
    before: &'a Stack,
    after: &'a Stack,
    options: &'a DiffOptions,
    path: Vec<CString>,
    found: Vec<DiffEntry>,
    digested: u64,
}

impl Walk<'_> {
    fn is_full(&self) -> bool {
        self.options.limit.is_some_and(|limit| self.found.len() >= limit)
    }

    /// Returns the trees of a stack that begin at a name of this directory.
    fn planted(&self, stack: &Stack, name: Option<&CStr>) -> Vec<Rc<Tree>> {
        let here = |tree: &&Rc<Tree>| {
            tree.at.len() == self.path.len() + 1
                && tree.at[..self.path.len()] == self.path
                && name.is_none_or(|name| *tree.at[self.path.len()] == *name)
        };
        stack.0.iter().filter(here).cloned().collect()
    }

    fn directory(&mut self, a: &Dirs, b: &Dirs) -> io::Result<()> {
        if self.path.len() >= MAX_DEPTH {
            return Err(tree::too_deep());
        }
        let shared = a.0.iter().rev().zip(b.0.iter().rev());
        let shared = shared.take_while(|((a, _), (b, _))| a.tag == b.tag).count();
        let mut names = BTreeSet::new();
        for dirs in [a, b] {
            for (_, dir) in &dirs.0[..dirs.0.len() - shared] {
                names.extend(tree::names(dir.as_fd())?);
            }
        }
        for stack in [self.before, self.after] {
            for tree in self.planted(stack, None) {
                names.insert(tree.at[self.path.len()].clone());
            }
        }
        for name in names {
            if self.is_full() {
                return Ok(());
            }
            let was = self.resolve(self.before, a, &name)?;
            let is = self.resolve(self.after, b, &name)?;
            self.path.push(name);
            self.entry(was, is)?;
            self.path.pop();
        }
        Ok(())
    }

    /// Finds what a name of a directory means.
    fn resolve(&self, stack: &Stack, dirs: &Dirs, name: &CStr) -> io::Result<Found> {
        let mut found: Vec<(Rc<Tree>, Rc<dyn AsFd>)> = Vec::new();
        let mut first: Option<(Meta, Ids)> = None;
        for tree in self.planted(stack, Some(name)) {
            let meta = Meta::of(&rustix::fs::fstat(&tree.dir)?);
            first.get_or_insert((meta, tree.ids));
            let whole = tree.whole;
            found.push((Rc::clone(&tree), Rc::new(Shared(tree))));
            if whole {
                let (meta, ids) = first.expect("set above");
                return Ok(Found::Directory { dirs: Dirs(found), meta, ids });
            }
        }
        for (tree, dir) in &dirs.0 {
            let meta = match Meta::at(dir.as_fd(), name) {
                Ok(meta) => meta,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            if meta.kind != Kind::Directory {
                if found.is_empty() && meta.kind != Kind::Whiteout {
                    let (tree, dir) = (Rc::clone(tree), Rc::clone(dir));
                    return Ok(Found::File { tree, dir, meta });
                }
                break;
            }
            let opened = tree::open_dir(dir.as_fd(), name, &meta)?;
            let opaque = tree::is_opaque(opened.as_fd());
            first.get_or_insert((meta, tree.ids));
            found.push((Rc::clone(tree), Rc::new(Held(opened))));
            if opaque {
                break;
            }
        }
        Ok(match first {
            Some((meta, ids)) => Found::Directory { dirs: Dirs(found), meta, ids },
            None => Found::Nothing,
        })
    }

    fn entry(&mut self, was: Found, is: Found) -> io::Result<()> {
        use Found::{Directory, File, Nothing};
        match (was, is) {
            (Nothing, Nothing) => Ok(()),
            (Nothing, File { tree, dir, meta }) => {
                let side = self.side(&tree, &dir, &meta)?;
                self.note(DiffKind::Added, None, Some(side))
            }
            (File { tree, dir, meta }, Nothing) => {
                let side = self.side(&tree, &dir, &meta)?;
                self.note(DiffKind::Removed, Some(side), None)
            }
            (Nothing, Directory { dirs, meta, ids }) => {
                self.note(DiffKind::Added, None, Some((plain(&meta, ids), None)))?;
                self.directory(&Dirs(Vec::new()), &dirs)
            }
            (Directory { dirs, meta, ids }, Nothing) => {
                self.note(DiffKind::Removed, Some((plain(&meta, ids), None)), None)?;
                self.directory(&dirs, &Dirs(Vec::new()))
            }
            (
                Directory { dirs: a, meta: was, ids: from },
                Directory { dirs: b, meta: is, ids: to },
            ) => {
                let (x, y) = (plain(&was, from), plain(&is, to));
                if (x.mode, x.uid, x.gid) != (y.mode, y.uid, y.gid) {
                    self.note(DiffKind::Changed, Some((x, None)), Some((y, None)))?;
                }
                self.directory(&a, &b)
            }
            (File { tree, dir, meta }, Directory { dirs, meta: is, ids }) => {
                let side = self.side(&tree, &dir, &meta)?;
                self.note(DiffKind::Changed, Some(side), Some((plain(&is, ids), None)))?;
                self.directory(&Dirs(Vec::new()), &dirs)
            }
            (Directory { dirs, meta: was, ids }, File { tree, dir, meta }) => {
                let side = self.side(&tree, &dir, &meta)?;
                self.note(DiffKind::Changed, Some((plain(&was, ids), None)), Some(side))?;
                self.directory(&dirs, &Dirs(Vec::new()))
            }
            (File { tree: a, dir: from, meta: was }, File { tree: b, dir: to, meta: is }) => {
                if a.tag == b.tag {
                    return Ok(());
                }
                let (x, y) = (self.side(&a, &from, &was)?, self.side(&b, &to, &is)?);
                let same = (x.0.kind, x.0.size, x.0.mode, x.0.uid, x.0.gid, &x.0.target)
                    == (y.0.kind, y.0.size, y.0.mode, y.0.uid, y.0.gid, &y.0.target);
                let same = same
                    && match (&x.1, &y.1) {
                        (Some(x), Some(y)) => tree::same_contents(x.as_fd(), y.as_fd(), is.size)?,
                        _ => true,
                    };
                if same { Ok(()) } else { self.note(DiffKind::Changed, Some(x), Some(y)) }
            }
        }
    }

    /// Describes a file, and opens it if it is a regular one.
    fn side(
        &self,
        tree: &Rc<Tree>,
        dir: &Rc<dyn AsFd>,
        meta: &Meta,
    ) -> io::Result<(DiffSide, Option<Opened>)> {
        let name = self.path.last().expect("a file has a name");
        let mut side = plain(meta, tree.ids);
        let mut opened = None;
        match meta.kind {
            Kind::Symlink => {
                let target = tree::link_target((**dir).as_fd(), name)?;
                side.target = Some(target.to_string_lossy().into_owned());
            }
            Kind::File => opened = Some(tree::open_file((**dir).as_fd(), name, meta)?),
            _ => {}
        }
        Ok((side, opened))
    }

    fn note(
        &mut self,
        change: DiffKind,
        before: Option<(DiffSide, Option<Opened>)>,
        after: Option<(DiffSide, Option<Opened>)>,
    ) -> io::Result<()> {
        let names: Vec<&[u8]> = self.path.iter().map(|name| name.as_bytes()).collect();
        let path = [b"/", names.join(&b'/').as_slice()].concat();
        let path = PathBuf::from(OsString::from_vec(path));
        if !self.options.paths.is_empty()
            && !self.options.paths.iter().any(|wanted| path.starts_with(wanted))
        {
            return Ok(());
        }
        if self.is_full() {
            return Ok(());
        }
        let mut patch = None;
        if self.options.patch {
            let text = |side: &Option<(DiffSide, Option<Opened>)>| match side {
                None => Ok(Some(String::new())),
                Some((side, Some(file))) if side.size <= MAX_PATCH => text(file.as_fd(), side.size),
                Some(_) => Ok(None),
            };
            if let (Some(a), Some(b)) = (text(&before)?, text(&after)?) {
                patch = (a != b).then(|| unified(&path.to_string_lossy(), change, &a, &b));
            }
        }
        let (before, after) = (self.finish(before)?, self.finish(after)?);
        self.found.push(DiffEntry { path, change, before, after, patch });
        Ok(())
    }
}

impl Walk<'_> {
    /// Digests a file if that is asked for, as long as there is not too much to digest.
    fn finish(&mut self, side: Option<(DiffSide, Option<Opened>)>) -> io::Result<Option<DiffSide>> {
        let Some((mut side, file)) = side else { return Ok(None) };
        if let (true, Some(file)) = (self.options.digests, file) {
            self.digested = self.digested.saturating_add(side.size);
            if self.digested > MAX_DIGESTED {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            side.sha256 = Some(sha256(file.as_fd(), side.size)?);
        }
        Ok(Some(side))
    }
}

fn plain(meta: &Meta, ids: Ids) -> DiffSide {
    let (uid, gid) = ids.inside(meta.uid, meta.gid);
    DiffSide {
        kind: match meta.kind {
            Kind::Directory => FileKind::Directory,
            Kind::File => FileKind::File,
            Kind::Symlink => FileKind::Link,
            Kind::Fifo => FileKind::Fifo,
            Kind::Socket => FileKind::Socket,
            Kind::Whiteout | Kind::Device => FileKind::Device,
        },
        size: if meta.kind == Kind::File { meta.size } else { 0 },
        mode: meta.mode,
        uid,
        gid,
        target: None,
        sha256: None,
    }
}

/// Reads a file as text, if it is some.
fn text(file: BorrowedFd<'_>, size: u64) -> io::Result<Option<String>> {
    let mut bytes = vec![0; usize::try_from(size).unwrap_or_default()];
    let mut got = 0;
    while got < bytes.len() {
        match rustix::io::pread(file, &mut bytes[got..], got as u64)? {
            0 => break,
            more => got += more,
        }
    }
    bytes.truncate(got);
    if bytes.contains(&0) {
        return Ok(None);
    }
    Ok(String::from_utf8(bytes).ok())
}

fn unified(path: &str, change: DiffKind, a: &str, b: &str) -> String {
    let name = |prefix: char, absent: bool| match absent {
        true => "/dev/null".to_owned(),
        false => format!("{prefix}{path}"),
    };
    let (from, to) = (name('a', change == DiffKind::Added), name('b', change == DiffKind::Removed));
    similar::TextDiff::from_lines(a, b)
        .unified_diff()
        .context_radius(CONTEXT)
        .header(&from, &to)
        .to_string()
}

fn sha256(file: BorrowedFd<'_>, size: u64) -> io::Result<String> {
    let (mut hash, mut at, mut buffer) = (Sha256::new(), 0_u64, vec![0; 64 * 1024]);
    // No more than was counted, whatever it is by now.
    while at < size {
        let left = usize::try_from(size - at).unwrap_or(usize::MAX).min(buffer.len());
        match rustix::io::pread(file, &mut buffer[..left], at)? {
            0 => break,
            more => {
                hash.update(&buffer[..more]);
                at += more as u64;
            }
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
