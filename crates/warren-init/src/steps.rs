//! Paths on a kernel without `openat2`, which gVisor's is: one name at a time, links by hand.
//!
//! The promise is the same: no link of `/proc` that leads to somebody's descriptor or root is followed. Such a link says
//! where it leads by a path from the root, or by what it is (`pipe:[7]`); those of `/proc` that are plain links, `self` and
//! `mounts`, name a neighbour. Nothing inside can mount, so `/proc` is the one place that has them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::{Errno, Result};

/// How many links in a row are followed, as the kernel has it.
pub(crate) const MAX_LINKS: usize = 40;
/// How what is on the way is opened.
const ON_THE_WAY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Which links a path may go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Links {
    /// The sandbox's own, wherever they lead.
    Plain,
    /// None, nor may the path leave where it begins.
    None,
}

/// Opens a path as `openat2` would, for those who have none.
pub(crate) fn open(
    from: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
    mode: Mode,
    links: Links,
) -> Result<OwnedFd> {
    let mut place = if path.starts_with(b"/") { top()? } else { step(from, b".")? };
    let mut names = Vec::new();
    push(&mut names, path);
    let mut followed = 0;
    while let Some(name) = names.pop() {
        let is_last = names.is_empty();
        if links == Links::None && name == b".." {
            return Err(Errno::XDEV);
        }
        if (!is_last || !flags.contains(OFlags::NOFOLLOW) || links == Links::None)
            && let Some(target) = link_at(&place, &name, is_last)?
        {
            // To open a link itself is to follow none.
            let itself = is_last && flags.contains(OFlags::PATH | OFlags::NOFOLLOW);
            followed += 1;
            if !itself {
                if links == Links::None || followed > MAX_LINKS || is_magic(&place, &target)? {
                    return Err(Errno::LOOP);
                }
                if target.starts_with(b"/") {
                    place = top()?;
                }
                push(&mut names, &target);
                continue;
            }
        }
        if is_last {
            let opened = open_name(place.as_fd(), &name, flags, mode)?;
            // What has become a link since is one link too many. The kernel says so itself, but not to who asks for the
            // place alone: he gets the link.
            let wants_its_end = flags.contains(OFlags::PATH) && !flags.contains(OFlags::NOFOLLOW);
            return if wants_its_end && is_link(&opened)? { Err(Errno::LOOP) } else { Ok(opened) };
        }
        place = step(place.as_fd(), &name)?;
    }
    Err(Errno::NOENT)
}

/// Opens what has a name in a directory, and follows no link.
///
/// gVisor's kernel follows one that is opened as a directory, whatever `O_NOFOLLOW` says, unless only its place is asked
/// for; and says EINVAL where it has just seen a file and then finds a link.
pub(crate) fn open_name(
    dir: BorrowedFd<'_>,
    name: &[u8],
    flags: OFlags,
    mode: Mode,
) -> Result<OwnedFd> {
    if flags.contains(OFlags::DIRECTORY) && !flags.contains(OFlags::PATH) {
        return rustix::fs::openat(step(dir, name)?, c".", flags, mode);
    }
    match rustix::fs::openat(dir, name, flags | OFlags::NOFOLLOW, mode) {
        Err(Errno::INVAL) => Err(Errno::LOOP),
        opened => opened,
    }
}

fn top() -> Result<OwnedFd> {
    step(CWD, b"/")
}

fn step(from: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd> {
    rustix::fs::openat(from, name, ON_THE_WAY, Mode::empty())
}

/// Puts the names of a path before those that are to come. What ends in a slash, or is one, is a directory: `.` in it.
fn push(names: &mut Vec<Vec<u8>>, path: &[u8]) {
    if path.ends_with(b"/") {
        names.push(b".".to_vec());
    }
    let parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty());
    names.extend(parts.rev().map(<[u8]>::to_vec));
}

/// Returns where a name leads, if it is a link. What is not there may be about to be made, if nothing follows.
fn link_at(place: &OwnedFd, name: &[u8], is_last: bool) -> Result<Option<Vec<u8>>> {
    match rustix::fs::readlinkat(place, name, Vec::new()) {
        Ok(target) => Ok(Some(target.into_bytes())),
        Err(Errno::INVAL) => Ok(None),
        Err(Errno::NOENT) if is_last => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_link(place: &OwnedFd) -> Result<bool> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(place)?.st_mode) == FileType::Symlink)
}

fn is_magic(place: &OwnedFd, target: &[u8]) -> Result<bool> {
    let device = rustix::fs::fstat(place)?.st_dev;
    let is_in_proc = rustix::fs::stat(c"/proc").is_ok_and(|proc| proc.st_dev == device);
    Ok(is_in_proc && (target.starts_with(b"/") || target.contains(&b':')))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::ResolveFlags;

    use super::*;

    fn inode(opened: Result<OwnedFd>) -> Result<(u64, u64)> {
        let stat = rustix::fs::fstat(opened?)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Opens a path by the kernel's own means and by steps.
    fn both(
        from: BorrowedFd<'_>,
        path: &str,
        flags: OFlags,
        links: Links,
    ) -> [Result<(u64, u64)>; 2] {
        let resolve = match links {
            Links::Plain => ResolveFlags::NO_MAGICLINKS,
            Links::None => {
                ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH
            }
        };
        let flags = flags | OFlags::CLOEXEC;
        let kernels = rustix::fs::openat2(from, path, flags, Mode::empty(), resolve);
        let ours = open(from, path.as_bytes(), flags, Mode::empty(), links);
        [inode(kernels), inode(ours)]
    }

    #[test]
    fn a_path_leads_where_the_kernel_says() {
        let directory = std::env::temp_dir().join(format!("warren-steps-{}", std::process::id()));
        let at = |name: &str| directory.join(name);
        std::fs::create_dir_all(at("d/e")).expect("directories");
        std::fs::write(at("d/e/f"), "text").expect("a file");
        for (target, name) in [
            ("e/f", "d/near"),
            ("d/e/", "slash"),
            ("../d/near", "d/chain"),
            ("/proc/self", "own"),
            ("round", "round"),
            ("nowhere", "dangling"),
            ("/", "root"),
            ("/proc/self/root", "magic"),
        ] {
            symlink(target, at(name)).expect("a link");
        }
        let top = rustix::fs::open(&directory, ON_THE_WAY, Mode::empty()).expect("it opens");
        let names = [
            "d",
            "d/",
            "d/e/f",
            "d/e/f/",
            "d/near",
            "d/near/",
            "slash",
            "slash/f",
            "d/chain",
            "round",
            "dangling",
            "dangling/x",
            "root",
            "root/usr",
            "d/../d/e",
            "d/e/..",
            ".",
            "..",
            "none",
            "d/none/x",
            "own/status",
            "own/exe",
            "own/cwd",
            "magic",
            "magic/usr",
            "/",
            "//",
            "/usr/bin",
            "/proc/mounts",
            "/proc/self/exe",
            "/proc/self/root/usr",
            "/proc/self/fd/1",
            "/proc/self/ns/net",
            "/proc/self/status",
        ];
        let mut opened = 0;
        for name in names {
            for flags in [
                OFlags::PATH,
                OFlags::PATH | OFlags::NOFOLLOW,
                OFlags::RDONLY,
                OFlags::RDONLY | OFlags::DIRECTORY,
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW,
            ] {
                let [kernels, ours] = both(top.as_fd(), name, flags, Links::Plain);
                assert_eq!(ours, kernels, "{name} {flags:?}");
                opened += usize::from(ours.is_ok());
            }
            if name.starts_with('/') {
                continue;
            }
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW;
            let [kernels, ours] = both(top.as_fd(), name, flags, Links::None);
            // What leaves and comes back is refused too, which nobody asks for.
            assert!(ours == kernels || name.contains(".."), "{name}: {ours:?}, not {kernels:?}");
            assert!(!(ours.is_ok() && name.contains("..")), "{name}");
        }
        std::fs::remove_dir_all(&directory).expect("it goes");
        assert!(opened > 30, "control: {opened}");
    }
}
