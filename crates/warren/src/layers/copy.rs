//! A directory of the host, copied into a layer.

use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::fs::AtFlags;

use super::Staging;
use super::tree::{self, Form, Ids, Kind, MAX_DEPTH, Made, Meta, Writer};
use crate::{Result, SandboxError};

/// Copies everything below `from` but devices and sockets, following no link.
pub(crate) fn copy(from: BorrowedFd<'_>, staging: &Staging) -> Result<()> {
    let mut copier = Copier {
        top: staging.tree(),
        path: Vec::new(),
        writer: Writer::new(),
        ids: Ids::of_layers(),
        links: HashMap::new(),
        skipped: 0,
    };
    let copied = copier.directory(from, staging.tree(), 0).and_then(|()| {
        let meta = Meta::of(&rustix::fs::fstat(from)?);
        copier.writer.seal(staging.tree(), &Made::of(&meta, copier.ids, Vec::new()))
    });
    copied.map_err(|error| SandboxError::keeping("copy into", Some(staging.path()), error))?;
    if copier.skipped > 0 {
        tracing::debug!(skipped = copier.skipped, "devices and sockets were left out");
    }
    Ok(())
}

struct Copier<'a> {
    top: BorrowedFd<'a>,
    /// Where we are, below the top.
    path: Vec<u8>,
    writer: Writer,
    ids: Ids,
    /// Where each file that has several names was copied to first. Nobody else is in there.
    links: HashMap<(u64, u64), Vec<u8>>,
    skipped: u64,
}

impl Copier<'_> {
    fn directory(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        depth: usize,
    ) -> io::Result<()> {
        if depth >= MAX_DEPTH {
            return Err(tree::too_deep());
        }
        for name in tree::names(from)? {
            let length = self.path.len();
            if length > 0 {
                self.path.push(b'/');
            }
            self.path.extend_from_slice(name.to_bytes());
            self.entry(from, to, &name, depth)?;
            self.path.truncate(length);
        }
        Ok(())
    }

    fn entry(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        name: &CStr,
        depth: usize,
    ) -> io::Result<()> {
        let meta = Meta::at(from, name)?;
        if meta.nlink > 1 && meta.kind == Kind::File {
            if let Some(first) = self.links.get(&(meta.dev, meta.ino)) {
                return Ok(rustix::fs::linkat(self.top, &first[..], to, name, AtFlags::empty())?);
            }
            self.links.insert((meta.dev, meta.ino), self.path.clone());
        }
        let plain = Made::of(&meta, self.ids, Vec::new());
        match meta.kind {
            Kind::Directory => {
                let opened = tree::open_dir(from, name, &meta)?;
                let made = self.writer.directory(to, name)?;
                self.directory(opened.as_fd(), made.as_fd(), depth + 1)?;
                let xattrs = tree::xattrs(opened.as_fd(), Form::Plain)?;
                self.writer.seal(made.as_fd(), &Made { xattrs, ..plain })
            }
            Kind::File => {
                let opened = tree::open_file(from, name, &meta)?;
                let xattrs = tree::xattrs(opened.as_fd(), Form::Plain)?;
                self.writer.copy_file(opened.as_fd(), &meta, &Made { xattrs, ..plain }, to, name)
            }
            Kind::Symlink => self.writer.symlink(&tree::link_target(from, name)?, &plain, to, name),
            Kind::Fifo => self.writer.special(Kind::Fifo, &plain, to, name),
            Kind::Socket | Kind::Whiteout | Kind::Device => {
                self.skipped += 1;
                Ok(())
            }
        }
    }
}
