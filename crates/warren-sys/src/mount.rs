//! Mounts by descriptor: the calls of the "new mount API" that `rustix` lacks, and short forms of
//! those it has.
//!
//! Nothing here takes a path below a directory that somebody else may write: sources are opened
//! first, targets are descriptors.
#![expect(unsafe_code, reason = "mount_setattr has no safe wrapper")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags,
};

/// What a mount refuses, whoever asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// No writes.
    pub read_only: bool,
    /// No devices work.
    pub no_devices: bool,
    /// No program can be executed.
    pub no_exec: bool,
    /// Set-user-id programs mean something: their owner, should it be one of the user namespace of
    /// whoever executes them. Elsewhere they never gain anything; see no_new_privs.
    pub set_ids: bool,
}

impl Attributes {
    fn bits(self) -> u64 {
        let mut bits = if self.set_ids { 0 } else { libc::MOUNT_ATTR_NOSUID };
        if self.read_only {
            bits |= libc::MOUNT_ATTR_RDONLY;
        }
        if self.no_devices {
            bits |= libc::MOUNT_ATTR_NODEV;
        }
        if self.no_exec {
            bits |= libc::MOUNT_ATTR_NOEXEC;
        }
        bits
    }
}

/// Clones the mount tree at `path`, detached from any namespace. See open_tree(2), Linux 5.2.
pub fn clone_tree(path: &Path) -> io::Result<OwnedFd> {
    clone(rustix::fs::CWD, path, OpenTreeFlags::AT_RECURSIVE)
}

/// As [`clone_tree`], but refuses with ELOOP if any part of `path` is a link.
pub fn clone_tree_without_links(path: &Path) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let place = rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), resolve)?;
    let flags = OpenTreeFlags::AT_RECURSIVE | OpenTreeFlags::AT_EMPTY_PATH;
    clone(place.as_fd(), Path::new(""), flags)
}

/// Clones the one mount that `dir/path` is on, from there downwards.
pub fn clone_at(dir: BorrowedFd<'_>, path: &str) -> io::Result<OwnedFd> {
    clone(dir, Path::new(path), OpenTreeFlags::AT_SYMLINK_NOFOLLOW)
}

/// Clones the one mount that `place` is on, from there downwards.
pub fn clone_place(place: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    clone(place, Path::new(""), OpenTreeFlags::AT_EMPTY_PATH)
}

fn clone(dir: BorrowedFd<'_>, path: &Path, flags: OpenTreeFlags) -> io::Result<OwnedFd> {
    let flags = flags | OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    Ok(rustix::mount::open_tree(dir, path, flags)?)
}

/// Attaches a detached tree at `name` in the directory `dir`, following no link there.
pub fn attach_in(tree: BorrowedFd<'_>, dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(rustix::mount::move_mount(tree, c"", dir, name, flags)?)
}

/// Binds `source` over `target`, in one call and by their paths: for whoever has just made all that
/// leads there, and whom nobody else can have followed yet.
pub fn bind(source: &str, target: &str) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(source, target)?)
}

/// Sets `attributes` on what is mounted at `path`; see [`bind`].
pub fn restrict_at(path: &str, attributes: Attributes) -> io::Result<()> {
    let place = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    restrict(place.as_fd(), attributes, None)
}

/// Sets `attributes` on a whole detached tree and, if given, shifts the owners of its files as
/// `user_namespace` maps them. See mount_setattr(2), Linux 5.12.
pub fn restrict(
    tree: BorrowedFd<'_>,
    attributes: Attributes,
    user_namespace: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    set_attributes(tree, attributes, user_namespace, libc::AT_RECURSIVE)
}

/// Sets `attributes` on what is mounted at `path`, and on nothing that is mounted below it; see
/// [`bind`].
pub fn restrict_only(path: &str, attributes: Attributes) -> io::Result<()> {
    let place = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    set_attributes(place.as_fd(), attributes, None, 0)
}

fn set_attributes(
    tree: BorrowedFd<'_>,
    attributes: Attributes,
    user_namespace: Option<BorrowedFd<'_>>,
    recursive: libc::c_int,
) -> io::Result<()> {
    let mut attr = libc::mount_attr {
        attr_set: attributes.bits(),
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    if let Some(namespace) = user_namespace {
        attr.attr_set |= libc::MOUNT_ATTR_IDMAP;
        attr.userns_fd = u64::from(namespace.as_raw_fd().unsigned_abs());
    }
    // SAFETY: the path is a terminated empty string and `attr` an initialised structure of the
    // size passed; both outlive the call, which writes to neither.
    crate::check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | recursive,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    })
    .map(drop)
}

/// Mounts a new filesystem of `kind` with `options`, detached. See fsopen(2), fsmount(2).
pub fn new(
    kind: &str,
    options: &[(&str, &str)],
    flags: &[&str],
    attributes: Attributes,
) -> io::Result<OwnedFd> {
    let fs = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for flag in flags {
        rustix::mount::fsconfig_set_flag(fs.as_fd(), *flag)?;
    }
    for (key, value) in options {
        rustix::mount::fsconfig_set_string(fs.as_fd(), *key, *value)?;
    }
    rustix::mount::fsconfig_create(fs.as_fd())?;
    let attributes = MountAttrFlags::from_bits_retain(
        u32::try_from(attributes.bits()).expect("mount attributes fit 32 bits"),
    );
    Ok(rustix::mount::fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// Changes options of the filesystem that `place` is the root of. See fspick(2).
pub fn reconfigure(place: BorrowedFd<'_>, options: &[(&str, &str)]) -> io::Result<()> {
    let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH;
    let fs = rustix::mount::fspick(place, c"", flags)?;
    for (key, value) in options {
        rustix::mount::fsconfig_set_string(fs.as_fd(), *key, *value)?;
    }
    Ok(rustix::mount::fsconfig_reconfigure(fs.as_fd())?)
}

/// Attaches a detached tree at the directory or file that `target` refers to.
pub fn attach(tree: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(tree, c"", target, c"", flags)?)
}

/// Opens `path` below `root` to be used as a mount target, following no link on the way.
pub fn target(root: BorrowedFd<'_>, path: &str) -> io::Result<OwnedFd> {
    let path = path.trim_start_matches('/');
    let path = if path.is_empty() { "." } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(root, path, flags, Mode::empty(), resolve)?)
}

/// Makes `root`, which must be mounted, the root directory of this mount namespace and lets go of
/// all that was mounted before. See pivot_root(2), "pivot_root(".", ".")".
pub fn pivot_to(root: BorrowedFd<'_>) -> io::Result<()> {
    rustix::process::fchdir(root)?;
    rustix::process::pivot_root(c".", c".")?;
    // The old root now lies over the new one; what "." reaches is the old one.
    rustix::mount::unmount(c".", UnmountFlags::DETACH)?;
    Ok(rustix::process::chdir(c"/")?)
}

/// Stops mounts and unmounts from travelling between this namespace and any other.
pub fn make_private() -> io::Result<()> {
    use rustix::mount::MountPropagationFlags;
    let flags = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    Ok(rustix::mount::mount_change(c"/", flags)?)
}

/// Mounts the v1 control groups of one controller at `path`. See cgroups(7).
pub fn new_v1_groups(path: &str, controller: &str) -> io::Result<()> {
    let controller = std::ffi::CString::new(controller)?;
    let flags = rustix::mount::MountFlags::empty();
    Ok(rustix::mount::mount(c"cgroup", path, c"cgroup", flags, controller.as_c_str())?)
}

/// Takes what is mounted at `path` out of this mount namespace. Whoever has it open keeps it.
pub fn detach(path: &str) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::DETACH)?)
}

/// Opens `path` without reading it, to be used as a place.
pub fn open_place(dir: BorrowedFd<'_>, path: &CStr) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(dir, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Reports whether `path` under `dir` exists, following no link.
pub fn exists_at(dir: BorrowedFd<'_>, path: &str) -> bool {
    rustix::fs::statat(dir, path, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}
