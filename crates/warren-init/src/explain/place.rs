//! What is at a path that another process named: looked at with that process's own rights.
//!
//! The one who looks is the commands' user and in the same root, so that the permissions it meets are
//! those that the command met. Nothing is opened but to be looked at (`O_PATH`), and no link of `/proc`
//! is passed, which would lead elsewhere for the one who looks.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};
use rustix::io::Errno;
use rustix::process::Pid;

use super::calls::Named;
use super::judge::{Found, Mount, parent};
use crate::protocol::denied::Right;

/// The longest path that is looked at. See PATH_MAX in path_resolution(7).
pub(crate) const MAX_PATH: usize = 4096;
/// How many parts of a path may be missing.
const MAX_MISSING: usize = 64;

/// Looks at paths.
#[derive(Debug)]
pub(crate) struct Surveyor {
    /// A view of `/proc` that hides nobody.
    pub(crate) proc: OwnedFd,
    mounts: Option<Vec<(u64, Mount)>>,
}

impl Surveyor {
    pub(crate) fn new(proc: OwnedFd) -> Self {
        Self { proc, mounts: None }
    }

    /// Looks at what `pid` named; also says what it wanted, which may depend on what is there. `None`
    /// if it cannot be looked at: then it is no wall's, or nobody can tell.
    pub(crate) fn look(&mut self, pid: Pid, named: &Named, path: &[u8]) -> Option<(Right, Found)> {
        let is_links = |part: &[u8]| matches!(part, b"self" | b"thread-self");
        if path.is_empty() || path.split(|byte| *byte == b'/').any(is_links) {
            return None;
        }
        let base = if path[0] == b'/' { None } else { Some(self.base(pid, named.base)?) };
        let base = base.as_ref().map_or(CWD, AsFd::as_fd);
        let mut there = trimmed(path);
        // What is made or removed is looked for in what holds it; a link there is the thing itself.
        let by_holder = matches!(named.right, Right::Create | Right::Remove);
        let (mut missing, mut wanted) = (Vec::new(), named.right);
        if by_holder {
            missing.push(last(there)?);
            there = holder(there);
        }
        let place = loop {
            match open(base, there) {
                Ok(place) => break place,
                Err(Errno::NOENT) if missing.len() < MAX_MISSING && there != b"/" => {
                    missing.push(last(there)?);
                    there = holder(there);
                    wanted = named.absent;
                }
                Err(_) => return None,
            }
        };
        let place_path = path_of(&place)?;
        let mut path = place_path.clone();
        for part in missing.iter().rev() {
            if path != b"/" {
                path.push(b'/');
            }
            path.extend_from_slice(part);
        }
        let mount = self.mount_of(&place)?;
        let permitted = is_permitted(&place, wanted);
        let found = match by_holder && exists(&place, missing.last().copied()) {
            true => Found { place: path.clone(), path, mount, permitted },
            false => Found { path, place: place_path, mount, permitted },
        };
        Some((wanted, found))
    }

    /// Opens what relative paths of `pid` begin at.
    fn base(&self, pid: Pid, fd: Option<i32>) -> Option<OwnedFd> {
        let pid = pid.as_raw_nonzero();
        let path = match fd {
            Some(fd) => format!("{pid}/fd/{fd}"),
            None => format!("{pid}/cwd"),
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::openat(&self.proc, path, flags, Mode::empty()).ok()
    }

    /// Reports whether a signal waits that lets a stopped process go on.
    pub(crate) fn is_told_to_go_on(&self, pid: Pid) -> bool {
        let path = format!("{}/status", pid.as_raw_nonzero());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::openat(&self.proc, path, flags, Mode::empty()) else {
            return false;
        };
        let mut buffer = [0; 4096];
        let length = rustix::io::read(&file, &mut buffer).unwrap_or(0);
        let text = String::from_utf8_lossy(&buffer[..length]);
        let waits = |line: &str| {
            let bits = line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:"));
            let bits = bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
            bits.is_some_and(|bits| bits & 1 << (libc::SIGCONT - 1) != 0)
        };
        text.lines().any(waits)
    }

    fn mount_of(&mut self, place: &OwnedFd) -> Option<Mount> {
        let told = statx(place, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
        if self.mounts.is_none() {
            // Nobody inside can mount anything, so that they stay what they are.
            let text = std::fs::read("/proc/self/mountinfo").ok()?;
            self.mounts = Some(mounts(&text));
        }
        let known = self.mounts.iter().flatten().find(|(id, _)| *id == told.stx_mnt_id);
        known.map(|(_, mount)| mount.clone())
    }
}

fn open(base: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    openat2(base, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
}

/// Returns the path of something that is open, if it has one in this root.
fn path_of(place: &OwnedFd) -> Option<Vec<u8>> {
    let link = format!("/proc/self/fd/{}", place.as_raw_fd());
    let path = rustix::fs::readlink(link, Vec::new()).ok()?.into_bytes();
    let own = format!("/proc/{}", rustix::process::getpid().as_raw_nonzero());
    let fits = path.starts_with(b"/") && !path.ends_with(b" (deleted)");
    (fits && !path.starts_with(own.as_bytes())).then_some(path)
}

/// Reports whether the permissions of what is there allow something, whatever walls say.
fn is_permitted(place: &OwnedFd, right: Right) -> bool {
    let access = match right {
        Right::Read => Access::READ_OK,
        Right::Write => Access::WRITE_OK,
        Right::Create | Right::Remove => Access::WRITE_OK | Access::EXEC_OK,
        Right::Execute => Access::EXEC_OK,
        Right::Change => return true,
    };
    let link = format!("/proc/self/fd/{}", place.as_raw_fd());
    rustix::fs::accessat(CWD, link, access, AtFlags::EACCESS).is_ok()
}

fn exists(place: &OwnedFd, name: Option<&[u8]>) -> bool {
    name.is_some_and(|name| rustix::fs::statat(place, name, AtFlags::SYMLINK_NOFOLLOW).is_ok())
}

/// Leaves out slashes at the end.
fn trimmed(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(1, |at| at + 1);
    &path[..end]
}

/// Returns the last part of a path, if it is a plain name.
fn last(path: &[u8]) -> Option<&[u8]> {
    let part = path.rsplit(|byte| *byte == b'/').next()?;
    (!matches!(part, b"" | b"." | b"..")).then_some(part)
}

/// Returns what a path is in front of its last part.
fn holder(path: &[u8]) -> &[u8] {
    if path.contains(&b'/') { trimmed(parent(path)) } else { b"." }
}

/// Reads the mounts of this process. See proc(5), mountinfo.
fn mounts(text: &[u8]) -> Vec<(u64, Mount)> {
    text.split(|byte| *byte == b'\n').filter_map(mount).collect()
}

fn mount(line: &[u8]) -> Option<(u64, Mount)> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let id = std::str::from_utf8(fields.first()?).ok()?.parse().ok()?;
    let has = |options: &[u8], name: &[u8]| options.split(|b| *b == b',').any(|o| o == name);
    let (own, whole) = (fields.get(5)?, fields.last()?);
    let read_only = has(own, b"ro") || has(whole, b"ro");
    let (point, no_execute) = (unescaped(fields.get(4)?), has(own, b"noexec"));
    Some((id, Mount { point, read_only, no_execute }))
}

/// Undoes what the kernel does to spaces and the like in a path: a backslash and three digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut path = Vec::new();
    let mut rest = field;
    while let [byte, after @ ..] = rest {
        let digits = after.get(..3).filter(|_| *byte == b'\\');
        let code = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
            Some(code) => {
                path.push(code);
                rest = &after[3..];
            }
            None => {
                path.push(*byte);
                rest = after;
            }
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_read_with_its_options_and_its_odd_name() {
        let text = b"22 1 0:21 / / rw,relatime - overlay overlay rw,lowerdir=/a\n\
            23 22 8:1 /usr /a\\040b ro,noexec shared:1 - ext4 /dev/sda rw\n\
            24 22 0:5 / /c rw,nosuid - tmpfs none ro,size=1k\nnonsense\n";
        let mounts = mounts(text);
        let expect = |point: &str, read_only, no_execute| Mount {
            point: point.into(),
            read_only,
            no_execute,
        };
        assert_eq!(
            mounts,
            [
                (22, expect("/", false, false)),
                (23, expect("/a b", true, true)),
                (24, expect("/c", true, false)),
            ]
        );
    }

    #[test]
    fn a_path_is_taken_apart_from_its_end() {
        assert_eq!(
            (trimmed(b"/a//"), trimmed(b"//"), trimmed(b"a")),
            (&b"/a"[..], &b"/"[..], &b"a"[..])
        );
        assert_eq!(
            (holder(b"/a"), holder(b"a"), holder(b"a/b")),
            (&b"/"[..], &b"."[..], &b"a"[..])
        );
        assert_eq!((last(b"/a/b"), last(b".."), last(b"a/..")), (Some(&b"b"[..]), None, None));
    }

    #[test]
    fn what_is_there_and_what_is_missing_of_a_path_is_told() {
        let proc = rustix::fs::open(c"/proc", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let mut surveyor = Surveyor::new(proc.unwrap());
        let me = rustix::process::getpid();
        let mut look = |path: &str, right, absent| {
            let named = Named { base: None, pointer: 0, right, absent };
            surveyor.look(me, &named, path.as_bytes())
        };
        let (right, found) = look("/usr/nope/nor/this", Right::Write, Right::Create).unwrap();
        assert_eq!(right, Right::Create);
        assert_eq!((&found.path[..], &found.place[..]), (&b"/usr/nope/nor/this"[..], &b"/usr"[..]));
        let (right, found) = look("/usr/", Right::Read, Right::Create).unwrap();
        assert_eq!((right, found.path == found.place), (Right::Read, true));
        let (_, found) = look("/usr/nope", Right::Create, Right::Create).unwrap();
        assert_eq!((&found.path[..], &found.place[..]), (&b"/usr/nope"[..], &b"/usr"[..]));
        let (_, found) = look("/usr/bin", Right::Remove, Right::Remove).unwrap();
        assert_eq!(found.path, found.place);
        for odd in ["", "/proc/self/fd/0", "/usr/nope/../x"] {
            assert_eq!(look(odd, Right::Read, Right::Read), None, "{odd}");
        }
        let (_, found) = look("nope", Right::Read, Right::Read).unwrap();
        assert_eq!(
            found.place,
            std::env::current_dir().unwrap().into_os_string().into_encoded_bytes()
        );
    }
}
