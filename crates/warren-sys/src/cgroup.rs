//! Control groups: finding them, reading and writing their files, removing them.
//!
//! Which file means which limit is for the caller to know.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where this process is in the host's control groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// The v2 hierarchy, if one is mounted.
    pub v2: Option<Hierarchy>,
    /// The v1 hierarchies, one for each controller that is mounted.
    pub v1: Vec<(String, Hierarchy)>,
}

/// One hierarchy, as this process sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hierarchy {
    /// The directory that the hierarchy is mounted on.
    pub mount: PathBuf,
    /// The directory of this process's own group.
    pub own: PathBuf,
    /// For v2, the controllers that can be handed down from the top; empty for v1.
    pub controllers: Vec<String>,
}

impl Layout {
    /// Reads `/proc/self/mountinfo` and `/proc/self/cgroup`.
    pub fn detect() -> io::Result<Self> {
        let mounts = whole(Path::new("/proc/self/mountinfo"))?;
        let own = whole(Path::new("/proc/self/cgroup"))?;
        let mut layout = Self::parse(&mounts, &own);
        if let Some(v2) = &mut layout.v2 {
            let controllers = whole(&v2.mount.join("cgroup.controllers")).unwrap_or_default();
            v2.controllers = controllers.split_whitespace().map(str::to_owned).collect();
        }
        Ok(layout)
    }

    /// Understands the text of the two files.
    pub fn parse(mountinfo: &str, own: &str) -> Self {
        let mut layout = Self::default();
        for line in mountinfo.lines() {
            let Some((mount, kind, options)) = cgroup_mount(line) else { continue };
            if kind == "cgroup2" {
                // The first one is the host's; later ones are somebody's copies.
                if layout.v2.is_none() {
                    let own = own_path(own, |controllers| controllers.is_empty());
                    layout.v2 = Some(Hierarchy::at(mount, own));
                }
                continue;
            }
            for name in options.split(',') {
                let own = own_path(own, |controllers| controllers.split(',').any(|c| c == name));
                if own.is_some() && layout.v1(name).is_none() {
                    layout.v1.push((name.to_owned(), Hierarchy::at(mount.clone(), own)));
                }
            }
        }
        layout
    }

    /// Returns the v1 hierarchy of `controller`.
    pub fn v1(&self, controller: &str) -> Option<&Hierarchy> {
        self.v1.iter().find(|(name, _)| name == controller).map(|(_, hierarchy)| hierarchy)
    }
}

impl Hierarchy {
    fn at(mount: PathBuf, own: Option<&str>) -> Self {
        let own = mount.join(own.unwrap_or("/").trim_start_matches('/'));
        Self { mount, own, controllers: Vec::new() }
    }
}

/// Splits a line of mountinfo into mount point, type and super options, if it is of a cgroup.
fn cgroup_mount(line: &str) -> Option<(PathBuf, &str, &str)> {
    let (left, right) = line.split_once(" - ")?;
    let mut right = right.split(' ');
    let (kind, options) = (right.next()?, right.nth(1)?);
    let mount = left.split(' ').nth(4)?;
    kind.starts_with("cgroup").then(|| (PathBuf::from(mount.replace("\\040", " ")), kind, options))
}

/// Finds the group of this process in the hierarchy whose controllers satisfy `wanted`.
fn own_path(own: &str, wanted: impl Fn(&str) -> bool) -> Option<&str> {
    own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        wanted(controllers).then_some(path)
    })
}

/// How often a group that is to stand still is looked at before the kernel is asked to say when it does.
pub const EAGER_LOOKS: u32 = 400;

/// Writes one value to a file of a group.
pub fn write(group: &Path, file: &str, value: &str) -> io::Result<()> {
    // Never created: a missing file means that the kernel has no such knob.
    let mut options = fs::OpenOptions::new();
    io::Write::write_all(&mut options.write(true).open(group.join(file))?, value.as_bytes())
}

/// Writes one value to a file of a group, and returns what the kernel made of it.
pub fn set(group: &Path, file: &str, value: &str) -> io::Result<String> {
    let mut options = fs::OpenOptions::new();
    let mut file = options.read(true).write(true).open(group.join(file))?;
    io::Write::write_all(&mut file, value.as_bytes())?;
    // By the same descriptor: to find the file takes longer than to read it. A value is short.
    let mut text = [0; 128];
    let length = std::os::unix::fs::FileExt::read_at(&file, &mut text, 0)?;
    Ok(String::from_utf8_lossy(&text[..length]).trim_end().to_owned())
}

/// Reads one file of a group.
pub fn read(group: &Path, file: &str) -> io::Result<String> {
    whole(&group.join(file))
}

/// Reads a file of the kernel's, most of which are whole in one piece: they tell no size, for which
/// [`fs::read_to_string`] begins with a few bytes, and some are composed anew for each piece.
fn whole(path: &Path) -> io::Result<String> {
    let mut text = String::with_capacity(8 << 10);
    File::open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

/// Finds the number after `key` in text made of lines "key number".
pub fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Removes a group and the groups below it, waiting for processes that are on their way out.
pub fn remove(group: &Path, patience: Duration) -> io::Result<()> {
    let deadline = Instant::now() + patience;
    let mut pause = Duration::from_micros(50);
    loop {
        match remove_once(group) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if Instant::now() >= deadline => return Err(error),
            // EBUSY: the last process is dead but not yet gone. The v2 hierarchy could tell when
            // it is empty; v1 cannot, and this is nearly always over at the first look.
            Err(_) => std::thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

fn remove_once(group: &Path) -> io::Result<()> {
    match rustix::fs::rmdir(group) {
        Ok(()) => return Ok(()),
        Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(_) => {}
    }
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_once(&entry.path())?;
        }
    }
    Ok(rustix::fs::rmdir(group)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
25 1 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
26 25 0:23 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
27 25 0:24 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
28 25 0:25 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
29 25 0:26 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn a_hybrid_host_has_both_kinds() {
        let own = "3:memory:/a/b\n2:cpu,cpuacct:/\n1:name=systemd:/x\n0::/u\n";
        let layout = Layout::parse(HYBRID, own);
        let v2 = layout.v2.as_ref().unwrap();
        assert_eq!(v2.own, Path::new("/sys/fs/cgroup/unified/u"));
        assert_eq!(layout.v1("memory").unwrap().own, Path::new("/sys/fs/cgroup/memory/a/b"));
        assert_eq!(layout.v1("cpuacct").unwrap().own, Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert_eq!(layout.v1("pids"), None);
    }

    #[test]
    fn a_v2_host_has_no_v1() {
        let layout = Layout::parse(
            "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
            "0::/user.slice/user-1000.slice/session-1.scope\n",
        );
        assert!(layout.v1.is_empty());
        let own = Path::new("/sys/fs/cgroup/user.slice/user-1000.slice/session-1.scope");
        assert_eq!(layout.v2.unwrap().own, own);
    }

    #[test]
    fn nothing_is_found_where_nothing_is() {
        assert_eq!(Layout::parse("", ""), Layout::default());
        assert_eq!(Layout::parse("garbage - cgroup", "::::"), Layout::default());
    }

    #[test]
    fn a_field_is_the_number_after_its_name_alone() {
        let text = "oom 1\noom_kill 23\nmax 4\n";
        assert_eq!(field(text, "oom_kill"), Some(23));
        assert_eq!(field(text, "oom"), Some(1));
        assert_eq!(field(text, "low"), None);
    }
}
