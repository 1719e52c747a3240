//! What this host offers a sandbox: who we are, which control groups we may use, what is where.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use warren_sys::cgroup::{self, Layout};

/// What a path of the host is, links followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    Directory,
    Other,
}

/// What a sandbox can be built on.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) privilege: Privilege,
    pub(crate) groups: GroupSupport,
    /// Keeps the group that sandboxes are made in free of ourselves.
    _vacated: Option<Vacated>,
}

/// What we may do on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Privilege {
    /// We are root and may give each sandbox ids of its own.
    Root,
    /// We have one user and one group.
    User { uid: u32, gid: u32 },
}

/// Which control groups a sandbox can have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupSupport {
    /// The v2 directory below which groups may be made.
    pub(crate) v2: Option<PathBuf>,
    pub(crate) memory: Option<Controller>,
    pub(crate) pids: Option<Controller>,
    pub(crate) cpu: Option<Controller>,
    /// Whether a sandbox shares its user's processes and its disk with others of the host, for want of
    /// namespaces.
    pub(crate) shared: bool,
    /// Whether a sandbox has a kernel of its own, whose threads and memory are in these groups too.
    pub(crate) own_kernel: bool,
    /// How many files a process may have open at most, if that is bounded: a sandbox cannot raise it.
    pub(crate) open_files: Option<u64>,
}

/// Where a controller can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Controller {
    /// In a v1 hierarchy, below this directory.
    V1(PathBuf),
    /// In the v2 hierarchy.
    V2,
}

impl Controller {
    /// Names it for people.
    pub(crate) fn describe(&self, name: &str) -> String {
        match self {
            Self::V1(_) => format!("cgroup v1 {name}"),
            Self::V2 => format!("cgroup v2 {name}"),
        }
    }
}

impl Host {
    /// Looks at the host. Cheap, but not free: done once for each backend.
    pub(crate) fn detect() -> std::io::Result<Self> {
        let privilege = privilege();
        let layout = Layout::detect()?;
        let (groups, _vacated) = GroupSupport::detect(&layout, privilege);
        Ok(Self { privilege, groups, _vacated })
    }
}

fn privilege() -> Privilege {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // Root of a container may have too few ids to give some away; then it is a user like any other.
    if uid == 0 && maps_all_ids() { Privilege::Root } else { Privilege::User { uid, gid } }
}

/// Reports whether the user namespace we are in holds the ids that sandboxes take theirs from.
fn maps_all_ids() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.lines().any(|line| {
        let mut numbers = line.split_whitespace().filter_map(|number| number.parse::<u64>().ok());
        let (first, count) = (numbers.next(), numbers.nth(1));
        first == Some(0) && count.is_some_and(|count| count >= u64::from(u32::MAX))
    })
}

impl GroupSupport {
    fn detect(layout: &Layout, privilege: Privilege) -> (Self, Option<Vacated>) {
        let (mut support, mut vacated) = (Self::default(), None);
        if let Some(v2) = &layout.v2 {
            let candidates: Vec<&Path> = match privilege {
                // With controllers, a group that has processes cannot hand them down; the top can.
                Privilege::Root if !v2.controllers.is_empty() => vec![&v2.mount],
                Privilege::Root => vec![&v2.own],
                // The parent first, for the same reason: our own group has us in it.
                Privilege::User { .. } => v2.own.parent().into_iter().chain([&*v2.own]).collect(),
            };
            let usable = candidates.into_iter().find(|group| is_ours(group));
            if let Some(group) = usable {
                let useful = v2.controllers.iter().any(|name| WANTED.contains(&name.as_str()));
                if group == v2.own && useful && has_processes(group) {
                    vacated = Vacated::leave(group);
                }
                let handed_down = hand_down(group);
                let controller = |name| handed_down.contains(&name).then_some(Controller::V2);
                support.memory = controller("memory");
                support.pids = controller("pids");
                support.cpu = controller("cpu");
                support.v2 = Some(group.to_owned());
            }
        }
        let v1 = |name: &str| {
            let own = &layout.v1(name)?.own;
            let writable = rustix::fs::access(own, Access::WRITE_OK).is_ok();
            writable.then(|| Controller::V1(own.clone()))
        };
        support.memory = support.memory.or_else(|| v1("memory"));
        support.pids = support.pids.or_else(|| v1("pids"));
        support.cpu = support.cpu.or_else(|| v1("cpu"));
        support.open_files = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
        (support, vacated)
    }
}

/// A group that we left for one below it, because a group with processes hands nothing down.
///
/// That is how a delegated scope of systemd starts: with us as the only process at its top.
/// Dropping this goes back.
#[derive(Debug)]
struct Vacated {
    group: PathBuf,
    leaf: PathBuf,
}

impl Vacated {
    /// Leaves `group`, unless somebody else is in it too: others are not ours to move.
    fn leave(group: &Path) -> Option<Self> {
        let own = std::process::id();
        let is_ours = |pid: &str| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
            pid.parse() == Ok(own) || parent.is_some_and(|ppid| ppid.trim().parse() == Ok(own))
        };
        if !cgroup::read(group, "cgroup.procs").ok()?.lines().all(is_ours) {
            return None;
        }
        let leaf = group.join(format!("warren-self-{own}"));
        fs::create_dir(&leaf).ok()?;
        let vacated = Self { group: group.to_owned(), leaf };
        move_all(group, &vacated.leaf).is_ok().then_some(vacated)
    }
}

impl Drop for Vacated {
    fn drop(&mut self) {
        let down = cgroup::read(&self.group, "cgroup.subtree_control").unwrap_or_default();
        for name in down.split_whitespace() {
            let _ = cgroup::write(&self.group, "cgroup.subtree_control", &format!("-{name}"));
        }
        // Where a sandbox still lives this fails, and the group stays as it is.
        let _ = move_all(&self.leaf, &self.group);
        let _ = fs::remove_dir(&self.leaf);
    }
}

fn move_all(from: &Path, to: &Path) -> std::io::Result<()> {
    for pid in cgroup::read(from, "cgroup.procs")?.lines() {
        cgroup::write(to, "cgroup.procs", pid)?;
    }
    Ok(())
}

/// Reports whether we may make groups below `group` and put processes of ours there.
fn is_ours(group: &Path) -> bool {
    let writable = |path: &Path| rustix::fs::access(path, Access::WRITE_OK).is_ok();
    writable(group) && writable(&group.join("cgroup.procs"))
}

fn has_processes(group: &Path) -> bool {
    // The first bytes tell, and the list may be as long as that of the host's processes.
    let first =
        fs::File::open(group.join("cgroup.procs")).and_then(|mut list| list.read(&mut [0; 8]));
    first.is_ok_and(|length| length > 0)
}

/// The controllers that hold limits of ours.
const WANTED: [&str; 3] = ["memory", "pids", "cpu"];

/// Has the controllers that we use handed down below `group` and returns those that are.
fn hand_down(group: &Path) -> Vec<&'static str> {
    let list = |file| cgroup::read(group, file).unwrap_or_default();
    let has = |text: &str, name: &str| text.split_whitespace().any(|found| found == name);
    let (there, down) = (list("cgroup.controllers"), list("cgroup.subtree_control"));
    let missing = |name: &&str| has(&there, name) && !has(&down, name);
    // With processes in it the kernel refuses some controllers, and those it takes make the groups
    // below useless; only the very top may have both.
    let is_free = || !has_processes(group) || !group.join("cgroup.type").exists();
    if !WANTED.iter().any(missing) || !is_free() {
        return WANTED.into_iter().filter(|name| has(&down, name)).collect();
    }
    for name in WANTED.into_iter().filter(missing) {
        // Nobody's to give in some containers; what counts is what is read back.
        let _ = cgroup::write(group, "cgroup.subtree_control", &format!("+{name}"));
    }
    let down = list("cgroup.subtree_control");
    WANTED.into_iter().filter(|name| has(&down, name)).collect()
}

/// Looks at a path of the host, links followed; `None` if it is not there for us.
pub(crate) fn file_kind(path: &Path) -> Option<FileKind> {
    let metadata = fs::metadata(path).ok()?;
    Some(if metadata.is_dir() { FileKind::Directory } else { FileKind::Other })
}
