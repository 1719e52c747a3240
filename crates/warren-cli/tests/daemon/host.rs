//! What there is on the host, to be compared with before.
//!
//! Others may make sandboxes on the same host meanwhile, so what is new is looked at closely: a
//! process is ours if it descends from this one, which takes in the orphans of its daemons; a
//! control group is left behind if one of our processes is in it, or nobody; a namespace, if one of
//! our processes or a mount holds it. Mounts and directories must be as they were.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

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
    fn left_since(&self, before: &Self) -> Vec<String> {
        let ours = descendants();
        let mut left: Vec<_> = ours.values().map(|process| format!("{process:?}")).collect();
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
                left.push(format!("control group {}", group.display()));
            }
        }
        // A mounted namespace is a line of these, too.
        let mounts = self.mounts.symmetric_difference(&before.mounts);
        left.extend(mounts.map(|mount| format!("mount {mount}")));
        let directories = self.directories.symmetric_difference(&before.directories);
        left.extend(directories.map(|path| format!("directory {}", path.display())));
        left.extend(ours.keys().flat_map(|pid| namespaces(*pid)));
        left
    }

    /// Waits until there is nothing that was not there before: what is dead takes its time to go.
    #[track_caller]
    pub(crate) fn assert_restored(&self, directories: &[&Path], patience: Duration) {
        let deadline = Instant::now() + patience;
        loop {
            let left = Self::look(directories).left_since(self);
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
