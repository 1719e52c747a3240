//! What there is on the host, to be compared with before.
//!
//! Others may make sandboxes on the same host meanwhile, so what is new is looked at closely: a
//! process is ours if it descends from this one, which takes in the orphans of its daemons; a
//! control group is left behind if one of our processes is in it, or nobody; a namespace, if one of
//! our processes or a mount holds it. Mounts and directories must be as they were. Where others are at work beside
//! us, only what bears the [`Names`] of our own sandboxes counts.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::process::{Pid, WaitOptions, getpid, set_child_subreaper, waitpid};

/// A process, as the host knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) name: String,
    pub(crate) state: String,
    parent: i32,
    pub(crate) started: u64,
}

impl Process {
    pub(crate) fn read(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may hold anything, a bracket too; what follows the last one is plain.
        let (head, tail) = stat.rsplit_once(')')?;
        let name = head.split_once('(')?.1.to_owned();
        let fields: Vec<_> = tail.split_whitespace().collect();
        let parent = fields.get(1)?.parse().ok()?;
        let started = fields.get(19)?.parse().ok()?;
        Some(Self { pid, name, state: (*fields.first()?).to_owned(), parent, started })
    }

    /// Returns every process there is.
    pub(crate) fn all() -> Vec<Self> {
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter_map(Self::read).collect()
    }

    /// Finds the one that was started with this word among its arguments, which may take a moment:
    /// it is forked first.
    pub(crate) fn with_argument(word: &str) -> Option<Self> {
        let has = |process: &Self| {
            let line = fs::read(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
            line.split(|byte| *byte == 0).any(|argument| argument == word.as_bytes())
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match Self::all().into_iter().find(has) {
                None if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                found => return found,
            }
        }
    }

    /// Returns how often it has gone to sleep by itself: one that does nothing does not.
    pub(crate) fn turns(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse().ok()
    }
}

/// Returns every process that descends from this one.
fn descendants() -> BTreeMap<i32, Process> {
    let all: BTreeMap<i32, Process> = Process::all().into_iter().map(|p| (p.pid, p)).collect();
    let me = getpid().as_raw_nonzero().get();
    let is_ours = |process: &Process| {
        let mut parent = process.parent;
        while parent != me {
            match all.get(&parent) {
                Some(next) => parent = next.parent,
                None => return false,
            }
        }
        true
    };
    all.values().filter(|process| is_ours(process)).map(|p| (p.pid, p.clone())).collect()
}

/// Takes in orphans and buries those that died, as the first process of a host does.
#[derive(Debug, Default)]
pub(crate) struct Undertaker {
    /// The daemon, whose end is waited for by another.
    pub(crate) spare: AtomicU32,
    pub(crate) done: AtomicBool,
}

impl Undertaker {
    pub(crate) fn new() -> Self {
        set_child_subreaper(Some(getpid())).unwrap();
        Self::default()
    }

    /// Buries until told that all is done.
    pub(crate) fn work(&self) {
        let me = getpid().as_raw_nonzero().get();
        while !self.done.load(Ordering::SeqCst) {
            for process in Process::all() {
                let spared = process.pid.unsigned_abs() == self.spare.load(Ordering::SeqCst);
                if process.parent == me && process.state == "Z" && !spared {
                    let _ = waitpid(Pid::from_raw(process.pid), WaitOptions::NOHANG);
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// What can be left of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Process,
    Group,
    Mount,
    Directory,
    Namespace,
}

/// The names of every sandbox that daemons made in a place: told by the kernel as each gets its directory, which is
/// made before anything else of it is.
pub(crate) struct Names {
    watch: OwnedFd,
    /// Those of sandboxes, and of the place itself.
    seen: BTreeSet<String>,
}

impl Names {
    /// Watches the directories in which sandboxes of a place get their own.
    pub(crate) fn of(place: &Path, homes: &[PathBuf]) -> Self {
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        for home in homes {
            inotify::add_watch(&watch, home, WatchFlags::CREATE | WatchFlags::ONLYDIR).unwrap();
        }
        Self { watch, seen: [place.to_str().unwrap().to_owned()].into() }
    }

    /// Takes in what is new. The kernel keeps some thousand names, so this is to be done now and then.
    pub(crate) fn note(&mut self) {
        let mut buffer = [const { MaybeUninit::uninit() }; 4096];
        let mut reader = inotify::Reader::new(&self.watch, &mut buffer);
        while let Ok(event) = reader.next() {
            let lost = event.events().contains(ReadFlags::QUEUE_OVERFLOW);
            assert!(!lost, "control: every name was seen");
            self.seen.extend(event.file_name().map(|name| name.to_str().unwrap().to_owned()));
        }
    }

    /// Returns how many sandboxes there were.
    pub(crate) fn count(&self) -> usize {
        self.seen.len() - 1
    }

    fn are_in(&self, text: &str) -> bool {
        self.seen.iter().any(|name| text.contains(name.as_str()))
    }
}

/// What there is of mounts, control groups and directories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    mounts: BTreeSet<String>,
    groups: BTreeSet<PathBuf>,
    directories: BTreeSet<PathBuf>,
}

impl Host {
    /// Looks at the host, and at these directories on it.
    pub(crate) fn look(directories: &[&Path]) -> Self {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mut groups = BTreeSet::new();
        walk(Path::new("/sys/fs/cgroup"), &mut |path, is_dir| {
            if is_dir {
                groups.insert(path.to_owned());
            }
        });
        let mut all = BTreeSet::new();
        for directory in directories {
            walk(directory, &mut |path, _| {
                all.insert(path.to_owned());
            });
        }
        let mounts = mounts.lines().map(str::to_owned).collect();
        Self { mounts, groups, directories: all }
    }

    /// Returns what was not there before and is ours, or nobody's.
    fn left_since(&self, before: &Self) -> Vec<(Kind, String)> {
        let ours = descendants();
        let mut left: Vec<_> =
            ours.values().map(|process| (Kind::Process, format!("{process:?}"))).collect();
        for group in self.groups.difference(&before.groups) {
            let members = fs::read_to_string(group.join("cgroup.procs"));
            // One that is gone by now is not left.
            let Ok(members) = members else { continue };
            let mut members = members.lines().filter_map(|pid| pid.parse::<i32>().ok()).peekable();
            let parent_of_some = fs::read_dir(group)
                .into_iter()
                .flatten()
                .flatten()
                .any(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            let is_nobodys = members.peek().is_none() && !parent_of_some;
            if is_nobodys || members.any(|pid| ours.contains_key(&pid)) {
                left.push((Kind::Group, group.display().to_string()));
            }
        }
        // A mounted namespace is a line of these, too.
        let mounts = self.mounts.symmetric_difference(&before.mounts);
        left.extend(mounts.map(|mount| (Kind::Mount, mount.clone())));
        let directories = self.directories.symmetric_difference(&before.directories);
        left.extend(directories.map(|path| (Kind::Directory, path.display().to_string())));
        let held = ours.keys().flat_map(|pid| namespaces(*pid));
        left.extend(held.map(|name| (Kind::Namespace, name)));
        left
    }

    /// Returns what there is now that was not there before. With names, only what bears one of them: others may be at
    /// work on this host. Processes, and with them namespaces, are known by whose children they are.
    pub(crate) fn left(&self, directories: &[&Path], names: Option<&Names>) -> Vec<(Kind, String)> {
        let mut left = Self::look(directories).left_since(self);
        if let Some(names) = names {
            left.retain(|(kind, text)| {
                matches!(kind, Kind::Process | Kind::Namespace) || names.are_in(text)
            });
        }
        left
    }

    /// Waits until there is nothing that was not there before: what is dead takes its time to go.
    #[track_caller]
    pub(crate) fn assert_restored(
        &self,
        directories: &[&Path],
        names: Option<&Names>,
        patience: Duration,
    ) {
        let deadline = Instant::now() + patience;
        loop {
            let left = self.left(directories, names);
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "left on the host: {left:#?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Returns the namespaces of a process that are not ours as well.
fn namespaces(pid: i32) -> Vec<String> {
    let read = |pid: &str| -> BTreeSet<PathBuf> {
        let entries = fs::read_dir(format!("/proc/{pid}/ns")).into_iter().flatten().flatten();
        entries.filter_map(|entry| fs::read_link(entry.path()).ok()).collect()
    };
    let (its, own) = (read(&pid.to_string()), read("self"));
    its.difference(&own).map(|name| format!("namespace {} of {pid}", name.display())).collect()
}

/// Shows each file and directory below one, and whether it is a directory.
fn walk(directory: &Path, see: &mut impl FnMut(&Path, bool)) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        see(&entry.path(), is_dir);
        if is_dir {
            walk(&entry.path(), see);
        }
    }
}
