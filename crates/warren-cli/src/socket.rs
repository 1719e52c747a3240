//! The daemon's unix socket: who may use it, and what may lie at its path before.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{
    DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _,
};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;

use crate::failure::Failure;

/// A socket that is listened on. Dropping it removes it, if it is still ours.
#[derive(Debug)]
pub(crate) struct Socket {
    path: PathBuf,
    inode: u64,
}

impl Socket {
    /// Listens at a path, for our own user or a group as well.
    ///
    /// What lies there is removed only if it is a socket that nobody listens on.
    pub(crate) fn bind(path: &Path, group: Option<&str>) -> Result<(Self, UnixListener), Failure> {
        let group = group.map(find_group).transpose()?;
        let failed =
            |error| Failure::system(&format!("cannot listen on {}", path.display()), &error);
        if let Some(directory) = path.parent() {
            // A group that may use the socket must get to it.
            let mode = if group.is_some() { 0o755 } else { 0o700 };
            DirBuilder::new().recursive(true).mode(mode).create(directory).map_err(failed)?;
        }
        clear(path)?;
        // Nobody else may connect between the bind and the chmod. This is before any thread.
        let before = rustix::process::umask(Mode::from_raw_mode(0o177));
        let bound = UnixListener::bind(path);
        rustix::process::umask(before);
        let listener = bound.map_err(failed)?;
        let inode = fs::symlink_metadata(path).map_err(failed)?.ino();
        let this = Self { path: path.to_owned(), inode };
        if let Some(group) = group {
            std::os::unix::fs::chown(path, None, Some(group)).map_err(failed)?;
            fs::set_permissions(path, Permissions::from_mode(0o660)).map_err(failed)?;
        }
        listener.set_nonblocking(true).map_err(failed)?;
        Ok((this, listener))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|data| data.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn clear(path: &Path) -> Result<(), Failure> {
    let shown = path.display();
    let data = match fs::symlink_metadata(path) {
        Ok(data) => data,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Failure::system(&format!("cannot look at {shown}"), &error)),
    };
    if !data.file_type().is_socket() {
        return Err(Failure::fatal("socket", format!("{shown} is there and is no socket"))
            .with_hint("remove it, or choose another path: --socket PATH"));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(Failure::fatal("socket", format!("a daemon listens on {shown} already"))
            .with_hint("use that one, or choose another path: --socket PATH")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            let removed = fs::remove_file(path);
            removed.map_err(|error| Failure::system(&format!("cannot remove {shown}"), &error))
        }
        Err(error) => Err(Failure::system(&format!("cannot tell who listens on {shown}"), &error)),
    }
}

/// Finds a group by name or number.
fn find_group(name: &str) -> Result<u32, Failure> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    let number = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    });
    number.ok_or_else(|| {
        Failure::usage(format!("there is no group `{name}`"), "make it first: groupadd NAME")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_socket_that_nobody_listens_on_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run/warren.sock");
        let (socket, listener) = Socket::bind(&path, None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
        let refused = format!("{:?}", Socket::bind(&path, None).unwrap_err());
        assert!(refused.contains("listens on"), "{refused}");
        drop(listener);
        std::mem::forget(socket);
        let (socket, _listener) = Socket::bind(&path, Some("0")).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
        drop(socket);
        assert!(!path.exists());

        fs::write(&path, "mine").unwrap();
        assert!(Socket::bind(&path, None).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path().join("victim"), &link).unwrap();
        assert!(Socket::bind(&link, None).is_err());
        assert!(!directory.path().join("victim").exists());
    }

    #[test]
    fn a_group_is_found_by_name_or_number() {
        assert_eq!(find_group("root").unwrap(), 0);
        assert_eq!(find_group("1234").unwrap(), 1234);
        assert!(find_group("no-such-group").is_err());
    }
}
