//! The harness: places to run an attempt in, and the host seen before and after.
//!
//! Other programs, other sandboxes among them, run on the same host, so "nothing is left" has to tell
//! ours from theirs. The test process is a subreaper: whatever it started, however often it forked
//! and whoever died in between, is its descendant, and nobody else's process is. Tests take turns by
//! a lock on a file, which holds between the threads of `cargo test` and the processes of nextest alike.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const NOBODY_ID: u32 = 65534;
/// No single command of this suite needs longer; one that does hangs.
const PATIENCE: Duration = Duration::from_secs(90);
/// How long a finished sandbox may take to be gone: promise 5 of the threat list.
const SETTLE: Duration = Duration::from_secs(2);

/// Who calls `warren`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    Root,
    Nobody,
    /// Root, and what it runs inside is root there: profile `dev`, by `sudo`.
    RootInside,
}

/// Who calls, and which backend makes the sandboxes: one column of the table in `docs/isolation.md`.
#[derive(Debug)]
pub(crate) struct Column {
    /// Where it notes what passed, for `ci/isolation`.
    pub(crate) name: &'static str,
    pub(crate) who: Who,
    pub(crate) backend: &'static str,
    /// What has to be accepted by whoever wants this backend.
    level: &'static str,
    /// Whether each attempt is made with every profile and as often as it takes. What a filter lets through is the
    /// same on every backend, so that for others than `linux` once will do.
    thorough: bool,
}

const fn linux(name: &'static str, who: Who) -> Column {
    Column { name, who, backend: "linux", level: "namespace", thorough: true }
}

const fn other(name: &'static str, who: Who, backend: &'static str, level: &'static str) -> Column {
    Column { name, who, backend, level, thorough: false }
}

pub(crate) static ROOT: Column = linux("linux-root", Who::Root);
pub(crate) static NOBODY: Column = linux("linux-nobody", Who::Nobody);
pub(crate) static ROOT_INSIDE: Column = linux("linux-dev", Who::RootInside);
pub(crate) static LANDLOCK: Column = other("landlock-root", Who::Root, "landlock", "process");
pub(crate) static LANDLOCK_NOBODY: Column =
    other("landlock-nobody", Who::Nobody, "landlock", "process");
pub(crate) static OCI_CRUN: Column = other("oci-crun", Who::Root, "oci-crun", "container");
pub(crate) static OCI_RUNC: Column = other("oci-runc", Who::Root, "oci-runc", "container");
pub(crate) static OCI_RUNSC: Column = other("oci-runsc", Who::Root, "oci-runsc", "kernel");

/// What the suite needs of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Feature {
    Root,
    Compiler,
    UserNamespaces,
    PidNamespaces,
    NetNamespaces,
    CgroupNamespaces,
    Overlay,
    Tmpfs,
    Seccomp,
    Landlock,
    MemoryCgroup,
    PidsCgroup,
    CpuCgroup,
    Freezer,
    SysvIpc,
    PosixQueues,
    Keyrings,
    IoUring,
    Bpf,
    PerfEvents,
    Userfaultfd,
    Fanotify,
    I386,
    PacketSockets,
    Ipv6,
    FileHandles,
}

impl Feature {
    pub(crate) const ALL: &[Self] = &[
        Self::Root,
        Self::Compiler,
        Self::UserNamespaces,
        Self::PidNamespaces,
        Self::NetNamespaces,
        Self::CgroupNamespaces,
        Self::Overlay,
        Self::Tmpfs,
        Self::Seccomp,
        Self::Landlock,
        Self::MemoryCgroup,
        Self::PidsCgroup,
        Self::CpuCgroup,
        Self::Freezer,
        Self::SysvIpc,
        Self::PosixQueues,
        Self::Keyrings,
        Self::IoUring,
        Self::Bpf,
        Self::PerfEvents,
        Self::Userfaultfd,
        Self::Fanotify,
        Self::I386,
        Self::PacketSockets,
        Self::Ipv6,
        Self::FileHandles,
    ];

    /// Tries the feature on this host.
    pub(crate) fn probe(self) -> Result<(), String> {
        match self {
            Self::Root => match rustix::process::geteuid().as_raw() {
                0 => Ok(()),
                uid => Err(format!("run by uid {uid}: only root can be both root and nobody")),
            },
            Self::Compiler => {
                let found = Command::new("cc").arg("--version").output();
                found.map(drop).map_err(|e| format!("cannot run cc: {e}"))
            }
            Self::UserNamespaces => answers("unshare user", |r| r == "OK"),
            Self::PidNamespaces => answers("unshare pid", |r| r == "OK"),
            Self::NetNamespaces => answers("unshare net", |r| r == "OK"),
            Self::CgroupNamespaces => answers("unshare cgroup", |r| r == "OK"),
            Self::Overlay => line_in("/proc/filesystems", "overlay"),
            Self::Tmpfs => line_in("/proc/filesystems", "tmpfs"),
            Self::Seccomp => exists("/proc/sys/kernel/seccomp/actions_avail"),
            // landlock_create_ruleset(NULL, 0, VERSION): the number is the ABI.
            Self::Landlock => answers("numbers 444 444", |r| r != "ENOSYS" && r != "EOPNOTSUPP"),
            Self::MemoryCgroup => line_in("/proc/cgroups", "memory"),
            Self::PidsCgroup => line_in("/proc/cgroups", "pids"),
            Self::CpuCgroup => line_in("/proc/cgroups", "cpu"),
            Self::Freezer => line_in("/proc/cgroups", "freezer"),
            Self::SysvIpc => exists("/proc/sysvipc/shm"),
            Self::PosixQueues => line_in("/proc/filesystems", "mqueue"),
            Self::Keyrings => exists("/proc/keys"),
            Self::IoUring => answers("sys io_uring_setup", |r| r == "OK"),
            Self::Bpf => answers("sys bpf", |r| r != "ENOSYS"),
            Self::PerfEvents => answers("sys perf_event_open", |r| r == "OK"),
            Self::Userfaultfd => answers("sys userfaultfd", |r| r == "OK"),
            Self::Fanotify => answers("sys fanotify_init", |r| r == "OK"),
            Self::I386 => answers("int80", |r| r == "OK"),
            Self::PacketSockets => answers("socket 17 3 0", |r| r == "OK"),
            Self::Ipv6 => answers("socket 10 1 0", |r| r == "OK"),
            Self::FileHandles => answers("sys open_by_handle_at", |r| r != "ENOSYS"),
        }
    }
}

fn exists(path: &str) -> Result<(), String> {
    fs::metadata(path).map(drop).map_err(|e| format!("{path}: {e}"))
}

fn line_in(path: &str, word: &str) -> Result<(), String> {
    let text = fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    let found = text.split_whitespace().any(|w| w == word);
    if found { Ok(()) } else { Err(format!("{path} does not list {word}")) }
}

/// Makes an attempt on the bare host, as whoever runs the tests.
pub(crate) fn answers(case: &str, good: impl Fn(&str) -> bool) -> Result<(), String> {
    let output = Command::new(built_probe()).args(case.split(' ')).output().unwrap();
    let answer = Answer::parse(std::str::from_utf8(&output.stdout).unwrap().trim());
    if good(&answer.result) { Ok(()) } else { Err(format!("{case}: {}", answer.result)) }
}

/// Fails the test, saying what is missing, on a host that cannot run it.
#[track_caller]
pub(crate) fn require(features: &[Feature]) {
    for feature in features {
        feature.probe().unwrap_or_else(|why| panic!("this host lacks {feature:?}: {why}"));
    }
}

/// Runs one test on a host of its own turn, and compares the host with before.
pub(crate) fn check(column: &'static Column, name: &str, test: fn(&Host)) {
    let record = column.forget(name);
    let turn = take_turn();
    let host = Host::prepare(column);
    test(&host);
    host.assert_unchanged();
    host.note(&record);
    drop((host, turn));
}

/// Runs one test for several columns at the same time, for what mostly waits.
pub(crate) fn check_at_once(columns: &[&'static Column], name: &str, test: fn(&Host)) {
    let records: Vec<_> = columns.iter().map(|column| column.forget(name)).collect();
    let turn = take_turn();
    let hosts: Vec<_> = columns.iter().map(|column| Host::prepare(column)).collect();
    let run = |host: Host| {
        thread::spawn(move || {
            test(&host);
            host
        })
    };
    let running: Vec<_> = hosts.into_iter().map(run).collect();
    // A host whose turn is over ends all that is left: none before the last.
    let done: Vec<_> = running.into_iter().map(thread::JoinHandle::join).collect();
    let failed = |why| std::panic::resume_unwind(why);
    let hosts: Vec<_> = done.into_iter().map(|host| host.unwrap_or_else(failed)).collect();
    for (host, record) in hosts.iter().zip(&records) {
        host.assert_unchanged();
        host.note(record);
    }
    drop((hosts, turn));
}

impl Column {
    /// Forgets that a test passed, and returns where that is noted.
    fn forget(&self, name: &str) -> PathBuf {
        require(&[Feature::Root, Feature::Compiler, Feature::UserNamespaces, Feature::Seccomp]);
        let records = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hostile").join(self.name);
        fs::create_dir_all(&records).unwrap();
        let record = records.join(name);
        let _ = fs::remove_file(&record);
        record
    }
}

/// Waits until nobody else's test runs on this host, for as long as this is held.
fn take_turn() -> File {
    let turn = File::create("/var/tmp/.warren-hostile.lock").unwrap();
    turn.lock().unwrap();
    turn
}

/// Builds the probe once per version of its source and returns where it is.
fn built_probe() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/probe/probe.c");
    let probe = Path::new(env!("CARGO_TARGET_TMPDIR")).join("probe");
    let changed = |p: &Path| fs::metadata(p).and_then(|m| m.modified()).ok();
    let lock = File::create(probe.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    if changed(&probe).is_none() || changed(&probe) < changed(&source) {
        let fresh = probe.with_extension("new");
        let status =
            Command::new("cc").args(["-O1", "-static", "-o"]).arg(&fresh).arg(&source).status();
        assert!(status.unwrap().success(), "cc cannot build {}", source.display());
        fs::rename(fresh, &probe).unwrap();
    }
    probe
}

/// The host during one test.
pub(crate) struct Host {
    column: &'static Column,
    /// What the backend says that it does not hold, and a test found so.
    gaps: RefCell<Vec<&'static str>>,
    /// Ours alone, outside of everything that a sandbox is given by default; world-readable.
    dir: tempfile::TempDir,
    before: Remains,
}

impl Host {
    fn prepare(column: &'static Column) -> Self {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
        let dir = tempfile::Builder::new().prefix("hostile-").tempdir_in("/var/tmp").unwrap();
        set_mode(dir.path(), 0o755);
        let (gaps, before) = (RefCell::default(), Remains::default());
        let mut host = Self { column, gaps, dir, before };
        let binary = std::env::var_os("WARREN_BIN").unwrap_or(env!("CARGO_BIN_EXE_warren").into());
        for (name, from) in [("warren", PathBuf::from(binary)), ("probe", built_probe())] {
            // A link where one can be: what is tested is large, and there are hundreds of tests.
            if fs::hard_link(&from, host.path(name)).is_err() {
                let copied = fs::copy(&from, host.path(name));
                copied.unwrap_or_else(|e| panic!("cannot copy {}: {e}", from.display()));
            }
            set_mode(&host.path(name), 0o755);
        }
        fs::create_dir(host.path("home")).unwrap();
        host.give(&host.path("home"));
        host.before = Remains::seen();
        host
    }

    pub(crate) fn who(&self) -> Who {
        self.column.who
    }

    /// Whether the sandboxes have namespaces, and so a root, ids and a view of processes of their own.
    pub(crate) fn has_namespaces(&self) -> bool {
        self.column.backend != "landlock"
    }

    /// Whether a sandbox has nothing of its own to be told by but rules: neither namespaces nor another user than the
    /// caller's.
    pub(crate) fn is_callers_own(&self) -> bool {
        !self.has_namespaces() && self.who() == Who::Nobody
    }

    /// Whether a container runtime puts up the walls.
    pub(crate) fn is_contained(&self) -> bool {
        self.column.backend.starts_with("oci-")
    }

    /// Whether the kernel that commands see is not the host's.
    pub(crate) fn has_own_kernel(&self) -> bool {
        self.column.backend == "oci-runsc"
    }

    /// A directory of the sandbox's own, in which its commands start.
    pub(crate) fn workspace(&self) -> &'static str {
        if self.has_namespaces() { "/workspace" } else { "." }
    }

    /// Asserts that a text is nowhere in what can be read of any process, but for command lines, which a backend
    /// without a view of processes of its own does not hide.
    #[track_caller]
    pub(crate) fn assert_hidden(&self, found: &Answer) {
        if self.has_namespaces() {
            assert_eq!(found.result, "none", "{found:?}");
            return;
        }
        let found = found.words("found");
        let more: Vec<_> = found.iter().filter(|place| !place.ends_with("/cmdline")).collect();
        assert!(more.is_empty(), "{more:?}");
        self.not_promised("hidden processes");
    }

    /// Whether an attempt is to be made in every way and as often as it takes.
    pub(crate) fn is_thorough(&self) -> bool {
        self.column.thorough
    }

    /// The profiles to try an attempt with.
    pub(crate) fn profiles(&self) -> &'static [&'static str] {
        if self.is_thorough() { &["default", "strict", "permissive"] } else { &["default"] }
    }

    /// Notes that a part of this case is not held here. Not for a test to decide: the backend must say so itself, by
    /// this layer among what `warren doctor` finds not to hold.
    #[track_caller]
    pub(crate) fn not_promised(&self, layer: &'static str) {
        let says = self.missing_layers().iter().any(|missing| missing == layer);
        assert!(says, "{} does not say that it lacks `{layer}`", self.column.backend);
        let mut gaps = self.gaps.borrow_mut();
        if !gaps.contains(&layer) {
            gaps.push(layer);
        }
    }

    /// The layers that the backend itself says it does not hold, for this caller; asked once for each build.
    fn missing_layers(&self) -> Vec<String> {
        let place =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("doctor-{}", self.column.name));
        let binary = self.path("warren");
        let built = fs::metadata(&binary).and_then(|meta| meta.modified()).unwrap();
        if fs::metadata(&place).and_then(|meta| meta.modified()).is_ok_and(|at| at > built) {
            return fs::read_to_string(place).unwrap().lines().map(str::to_owned).collect();
        }
        let mut command = self.bare().command(&[binary.to_str().unwrap(), "doctor", "--json"]);
        let output = command.stderr(Stdio::inherit()).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let backends = report["backends"].as_array().unwrap();
        let own = backends.iter().find(|one| one["name"] == self.column.backend).unwrap();
        let findings = own["findings"].as_array().unwrap().iter();
        let missing: Vec<_> = findings
            .filter(|finding| finding["holds"] == false)
            .map(|finding| finding["layer"].as_str().unwrap().to_owned())
            .collect();
        fs::write(place, missing.join("\n")).unwrap();
        missing
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The same, as text for a case or a flag.
    pub(crate) fn at(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Makes `path` the calling user's.
    pub(crate) fn give(&self, path: &Path) {
        if self.who() == Who::Nobody {
            chown(path, Some(NOBODY_ID), Some(NOBODY_ID)).unwrap();
        }
    }

    /// A file that everybody may read, or only its owner.
    pub(crate) fn file(&self, name: &str, mode: u32, text: &str) -> String {
        fs::write(self.path(name), text).unwrap();
        set_mode(&self.path(name), mode);
        self.at(name)
    }

    /// A directory that everybody may use.
    pub(crate) fn open_dir(&self, name: &str) -> String {
        fs::create_dir_all(self.path(name)).unwrap();
        set_mode(&self.path(name), 0o777);
        self.at(name)
    }

    /// A sandbox of the default profile, started by the caller of this test.
    pub(crate) fn sandbox(&self) -> Place<'_> {
        let probe = self.at("probe");
        let Column { backend, level, .. } = self.column;
        let flags = ["--backend", backend, "--isolation", level, "--ro", &probe];
        Place { warren: Some(flags.map(OsString::from).to_vec()), ..self.bare() }
    }

    /// The host itself, as the caller of this test: where attempts succeed that need no privilege.
    pub(crate) fn bare(&self) -> Place<'_> {
        Place { who: self.who(), ..self.bare_root() }
    }

    /// The host itself, as root: where attempts succeed.
    pub(crate) fn bare_root(&self) -> Place<'_> {
        let cwd = self.path("home");
        let (outer, around, env) = (vec![], vec![], vec![]);
        Place { host: self, who: Who::Root, outer, around, warren: None, env, cwd }
    }

    /// The host as root in a mount namespace of its own, for attempts that would harm the host.
    pub(crate) fn bare_mounts(&self) -> Place<'_> {
        self.bare_root().around(["unshare", "--mount"])
    }

    /// Notes for `ci/isolation` that whoever got so far was contained, or what of it is not promised.
    fn note(&self, record: &Path) {
        let gaps = self.gaps.borrow();
        let verdict = match gaps.as_slice() {
            [] => "contained".to_owned(),
            gaps => format!("not promised: {}", gaps.join(", ")),
        };
        fs::write(record, format!("{verdict}\n")).unwrap();
    }

    fn assert_unchanged(&self) {
        let start = Instant::now();
        let mut alone_since = start;
        loop {
            let left = Remains::seen().since(&self.before);
            if left.is_empty() {
                return;
            }
            // A sandbox of somebody else comes and goes with files and groups of its own, and for an
            // instant there is none of its processes: count only the time that nobody was there.
            if foreign_warren() {
                alone_since = Instant::now();
            }
            let lost = alone_since.elapsed() > SETTLE || start.elapsed() > 15 * SETTLE;
            assert!(!lost, "left on the host: {left:#?}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Host {
    /// Ends what a failed test left, so that the next one starts on a clean host.
    fn drop(&mut self) {
        for _ in 0..50 {
            let left = descendants();
            if left.is_empty() {
                return;
            }
            for pid in left {
                let pid = Pid::from_raw(pid).unwrap();
                let _ = kill_process(pid, Signal::KILL);
                let _ = waitpid(Some(pid), WaitOptions::NOHANG);
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// What a sandbox could leave behind.
#[derive(Debug, Default)]
struct Remains {
    processes: BTreeSet<String>,
    mounts: BTreeSet<String>,
    cgroups: BTreeSet<String>,
    namespaces: BTreeSet<String>,
    files: BTreeSet<String>,
}

impl Remains {
    fn seen() -> Self {
        let pids = descendants();
        let mut seen = Self::default();
        for pid in &pids {
            let text = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            seen.processes.insert(format!("{pid} {}", String::from_utf8_lossy(&text)));
            seen.namespaces.extend(namespaces(*pid).into_iter().map(|(_, link)| link));
        }
        // A namespace without a process lives on in a mount, and then it is in this list.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        seen.mounts = mounts.lines().map(str::to_owned).collect();
        cgroups_below(Path::new("/sys/fs/cgroup"), &mut seen.cgroups);
        for dir in ["/run/warren", "/dev/shm", "/dev/mqueue", "/tmp", "/var/tmp", "/run"] {
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                // In the directories of everybody only what has our name on it is ours.
                if dir == "/run/warren" || name.contains("warren") || name.contains("sbx-") {
                    seen.files.insert(format!("{dir}/{name}"));
                }
            }
        }
        let segments = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
        seen.files.extend(segments.lines().skip(1).map(|l| {
            format!("sysv {}", l.split_whitespace().take(2).collect::<Vec<_>>().join(" "))
        }));
        // What is called after a sandbox that a stranger's process is in is that stranger's.
        let strangers = foreign_sandboxes();
        for set in [&mut seen.cgroups, &mut seen.files] {
            set.retain(|entry| sandbox_in(entry).is_none_or(|id| !strangers.contains(id)));
        }
        seen
    }

    fn since(self, before: &Self) -> Self {
        let new = |now: BTreeSet<String>, old: &BTreeSet<String>| &now - old;
        Self {
            processes: new(self.processes, &before.processes),
            mounts: new(self.mounts, &before.mounts),
            cgroups: new(self.cgroups, &before.cgroups),
            namespaces: new(self.namespaces, &before.namespaces),
            files: new(self.files, &before.files),
        }
    }

    fn is_empty(&self) -> bool {
        let all = [&self.processes, &self.mounts, &self.cgroups, &self.namespaces, &self.files];
        all.iter().all(|set| set.is_empty())
    }
}

/// Collects the cgroups that bear our name, but not those in which a stranger's process runs.
fn cgroups_below(dir: &Path, seen: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|t| t.is_dir()) {
            continue;
        }
        let path = entry.path();
        let text = path.to_string_lossy().into_owned();
        if ["warren", "sbx-"].iter().any(|ours| text.contains(ours)) && !strangers_in(&path) {
            seen.insert(text);
        }
        cgroups_below(&path, seen);
    }
}

fn strangers_in(dir: &Path) -> bool {
    let ours = descendants();
    let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    procs.lines().filter_map(|l| l.parse().ok()).any(|pid: i32| !ours.contains(&pid))
        || fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .any(|e| e.file_type().is_ok_and(|t| t.is_dir()) && strangers_in(&e.path()))
}

/// The id of a sandbox in a path, if there is one.
fn sandbox_in(text: &str) -> Option<&str> {
    let id = &text[text.find("sbx-")?..];
    id.get(..40)
}

/// The sandboxes that processes which are not ours are in, or were made for.
fn foreign_sandboxes() -> BTreeSet<String> {
    let ours = descendants();
    let mut found = BTreeSet::new();
    for pid in all_pids().into_iter().filter(|pid| !ours.contains(pid)) {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        found.extend(groups.lines().filter_map(sandbox_in).map(str::to_owned));
    }
    found
}

fn foreign_warren() -> bool {
    let ours = descendants();
    let lives = |pid: &i32| parent_and_state(*pid).is_some_and(|(_, state)| state != 'Z');
    all_pids().into_iter().filter(|pid| !ours.contains(pid)).filter(lives).any(|pid| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.starts_with("warren"))
    })
}

fn all_pids() -> Vec<i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// The parent and state of a process, from /proc/PID/stat.
fn parent_and_state(pid: i32) -> Option<(i32, char)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut rest = stat.rsplit_once(") ")?.1.split(' ');
    let state = rest.next()?.chars().next()?;
    Some((rest.next()?.parse().ok()?, state))
}

/// Every living process that this test started, directly or not.
fn descendants() -> BTreeSet<i32> {
    let own = i32::try_from(std::process::id()).unwrap();
    descendants_of(own)
}

/// Every living process below `ancestor`. A zombie is dead already; its reaper has been told.
pub(crate) fn descendants_of(ancestor: i32) -> BTreeSet<i32> {
    let all: Vec<_> = all_pids()
        .into_iter()
        .filter_map(|pid| parent_and_state(pid).map(|(parent, state)| (pid, parent, state)))
        .collect();
    let mut found = BTreeSet::from([ancestor]);
    loop {
        let is_next =
            |(pid, parent, _): &&(i32, i32, char)| found.contains(parent) && !found.contains(pid);
        let next: Vec<i32> = all.iter().filter(is_next).map(|p| p.0).collect();
        if next.is_empty() {
            break;
        }
        found.extend(next);
    }
    found.remove(&ancestor);
    found.retain(|pid| all.iter().any(|(p, _, state)| p == pid && *state != 'Z'));
    found
}

/// The namespaces of a process: kind and link.
pub(crate) fn namespaces(pid: i32) -> Vec<(String, String)> {
    let entries = fs::read_dir(format!("/proc/{pid}/ns")).into_iter().flatten().flatten();
    entries
        .filter_map(|e| {
            let link = fs::read_link(e.path()).ok()?.to_string_lossy().into_owned();
            Some((e.file_name().to_string_lossy().into_owned(), link))
        })
        .collect()
}

/// A place to make attempts in: the host itself, or a sandbox on it.
#[derive(Clone)]
pub(crate) struct Place<'h> {
    host: &'h Host,
    who: Who,
    outer: Vec<OsString>,
    around: Vec<OsString>,
    warren: Option<Vec<OsString>>,
    env: Vec<(OsString, OsString)>,
    cwd: PathBuf,
}

impl Place<'_> {
    /// Adds flags of `warren run`, separated by spaces.
    pub(crate) fn with(mut self, flags: &str) -> Self {
        let warren = self.warren.as_mut().expect("only a sandbox has flags");
        warren.extend(flags.split(' ').map(OsString::from));
        self
    }

    /// Adds one flag as it is.
    pub(crate) fn flag(mut self, flag: impl Into<OsString>) -> Self {
        self.warren.as_mut().expect("only a sandbox has flags").push(flag.into());
        self
    }

    /// Reports whether it is the host itself.
    pub(crate) fn is_bare(&self) -> bool {
        self.warren.is_none()
    }

    /// Puts a command around everything that is run here, as root.
    pub(crate) fn within<S: AsRef<OsStr>>(mut self, command: impl IntoIterator<Item = S>) -> Self {
        self.outer.extend(command.into_iter().map(|s| s.as_ref().to_owned()));
        self
    }

    /// Puts a command around everything that is run here, as the same user.
    pub(crate) fn around<S: AsRef<OsStr>>(mut self, command: impl IntoIterator<Item = S>) -> Self {
        self.around.extend(command.into_iter().map(|s| s.as_ref().to_owned()));
        self
    }

    /// Sets a variable of the caller's environment.
    pub(crate) fn env(mut self, key: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((key.into(), value.into()));
        self
    }

    /// Sets the caller's working directory.
    pub(crate) fn cwd(mut self, dir: impl Into<PathBuf>) -> Self {
        self.cwd = dir.into();
        self
    }

    /// The command line that runs `args` here.
    pub(crate) fn command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        let mut words = self.outer.clone();
        if self.who == Who::Nobody {
            words.extend(
                "setpriv --reuid 65534 --regid 65534 --clear-groups".split(' ').map(Into::into),
            );
        }
        words.extend(self.around.iter().cloned());
        if let Some(flags) = &self.warren {
            words.extend([self.host.path("warren").into(), "run".into()]);
            if self.who == Who::RootInside {
                // Whatever profile is asked for: only one has a root.
                let named = flags.iter().position(|flag| flag == "--profile");
                let (before, after) = flags.split_at(named.unwrap_or(flags.len()));
                words.extend(before.iter().chain(after.iter().skip(2)).cloned());
                words.extend(["--profile", "dev"].map(OsString::from));
            } else {
                words.extend(flags.iter().cloned());
            }
            words.push("--".into());
            if self.who == Who::RootInside {
                words.extend(["/usr/bin/sudo", "-E", "--"].map(OsString::from));
            }
        }
        words.extend(args.iter().map(|a| a.as_ref().to_owned()));
        let mut command = Command::new(&words[0]);
        // A group of its own: a signal that a sandbox sends to its caller's group must not end the test.
        command.process_group(0);
        command.args(&words[1..]).current_dir(&self.cwd).stdin(Stdio::null());
        command
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("HOME", self.host.path("home")).envs(self.env.iter().cloned());
        command
    }

    /// Runs a command to its end.
    pub(crate) fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> Ended {
        finish(self.command(args))
    }

    /// The command line of some cases of the probe.
    pub(crate) fn probe_line<S: AsRef<str>>(&self, cases: &[S]) -> Vec<String> {
        let cases: Vec<&str> = cases.iter().map(AsRef::as_ref).collect();
        let line = cases.join(" + ");
        std::iter::once(self.host.at("probe")).chain(line.split(' ').map(str::to_owned)).collect()
    }

    /// Makes the attempts, all in one run, and returns an answer for each.
    #[track_caller]
    pub(crate) fn ask_all<S: AsRef<str>>(&self, cases: &[S]) -> Vec<Answer> {
        let ended = self.run(&self.probe_line(cases));
        let answers: Vec<_> = ended.text().lines().map(Answer::parse).collect();
        assert_eq!(answers.len(), cases.len(), "an answer to each attempt: {ended:#?}");
        answers
    }

    /// Makes one attempt.
    #[track_caller]
    pub(crate) fn ask(&self, case: &str) -> Answer {
        self.ask_all(&[case]).remove(0)
    }

    /// Asserts that every attempt was answered in one of these ways, and lists all that were not.
    #[track_caller]
    pub(crate) fn refuses<S: AsRef<str>>(&self, cases: &[S], answers: &[&str]) {
        let wrong: Vec<_> = cases
            .iter()
            .zip(self.ask_all(cases))
            .filter(|(_, a)| !answers.contains(&a.result.as_str()))
            .map(|(case, a)| format!("{}: {} {}", case.as_ref(), a.result, a.detail))
            .collect();
        assert!(wrong.is_empty(), "expected {answers:?} here, but\n{}", wrong.join("\n"));
    }

    /// Asserts that every attempt succeeds here: the control of a refusal elsewhere.
    #[track_caller]
    pub(crate) fn allows<S: AsRef<str>>(&self, cases: &[S]) {
        self.refuses(cases, &["OK"]);
    }

    /// Runs a command in a sandbox with `--json`.
    #[track_caller]
    pub(crate) fn report<S: AsRef<OsStr>>(&self, args: &[S]) -> Report {
        let ended = self.clone().flag("--json").run(args);
        let value = serde_json::from_slice(&ended.stdout);
        Report(value.unwrap_or_else(|e| panic!("no JSON object ({e}): {ended:#?}")))
    }

    /// Makes attempts in a sandbox with `--json`.
    #[track_caller]
    pub(crate) fn probe_report(&self, case: &str) -> Report {
        self.report(&self.probe_line(&[case]))
    }

    /// Starts cases of the probe, the last of which goes on, and waits for a line of each.
    #[track_caller]
    pub(crate) fn start<S: AsRef<str>>(&self, cases: &[S]) -> Running {
        self.start_first(cases, cases.len())
    }

    /// Likewise, and waits for a line of each of the first so many.
    #[track_caller]
    pub(crate) fn start_first<S: AsRef<str>>(&self, cases: &[S], first: usize) -> Running {
        let mut command = self.command(&self.probe_line(cases));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut ready = vec![];
        for _ in 0..first {
            let mut line = String::new();
            out.read_line(&mut line).unwrap();
            if line.is_empty() {
                let mut why = String::new();
                child.stderr.take().unwrap().read_to_string(&mut why).unwrap();
                panic!("it ended before it was ready: {:?} {why}", child.wait());
            }
            ready.push(Answer::parse(line.trim_end()));
        }
        Running { child, ready }
    }
}

/// Something that a test keeps running; ends with its standard input, or with the value.
pub(crate) struct Running {
    pub(crate) child: Child,
    pub(crate) ready: Vec<Answer>,
}

impl Running {
    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid()).unwrap(), signal).unwrap();
    }

    /// What the last case said when it was ready.
    pub(crate) fn said(&self, key: &str) -> String {
        self.ready.last().unwrap().field(key).to_owned()
    }

    /// Lets go of it and waits for its end.
    pub(crate) fn end(mut self) -> Ended {
        self.wait()
    }

    fn wait(&mut self) -> Ended {
        drop(self.child.stdin.take());
        self.wait_only()
    }

    /// Waits for its end without letting go.
    pub(crate) fn wait_only(&mut self) -> Ended {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < PATIENCE, "it does not end");
            thread::sleep(Duration::from_millis(10));
        };
        let (code, signal) = (status.code(), status.signal());
        let none = String::new();
        Ended { code, signal, stdout: vec![], stderr: none, took: start.elapsed() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if thread::panicking() {
            drop(self.child.kill());
        }
        drop(self.child.wait());
    }
}

/// What became of a command.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

impl Ended {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Asserts that warren itself refused: its own exit code, a message, and no crash.
    #[track_caller]
    pub(crate) fn assert_clean_error(&self, why: &str) {
        let clean = matches!(self.code, Some(2 | 125 | 126 | 127));
        assert!(clean && !self.stderr.is_empty(), "{why}: a clean error, not {self:#?}");
        assert!(!self.stderr.contains("panicked"), "{why}: {}", self.stderr);
    }
}

/// Runs a command to its end, or fails the test when it hangs.
pub(crate) fn finish(mut command: Command) -> Ended {
    let start = Instant::now();
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let out = thread::spawn(move || {
        let mut bytes = vec![];
        out.read_to_end(&mut bytes).map(|_| bytes)
    });
    let err = thread::spawn(move || {
        let mut bytes = vec![];
        err.read_to_end(&mut bytes).map(|_| bytes)
    });
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("hangs: {command:?}");
        }
        thread::sleep(Duration::from_millis(3));
    };
    let took = start.elapsed();
    // A pipe that stays open after the end is a process that stayed; give it the time to settle.
    while !(out.is_finished() && err.is_finished()) {
        assert!(start.elapsed() < took + SETTLE, "something holds the output of {command:?}");
        thread::sleep(Duration::from_millis(3));
    }
    Ended {
        code: status.code(),
        signal: status.signal(),
        stdout: out.join().unwrap().unwrap(),
        stderr: String::from_utf8_lossy(&err.join().unwrap().unwrap()).into_owned(),
        took,
    }
}

/// One line of the probe.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) result: String,
    pub(crate) detail: String,
}

impl Answer {
    pub(crate) fn parse(line: &str) -> Self {
        let rest = line.split_once(" result=");
        let rest = rest.unwrap_or_else(|| panic!("not a line of the probe: {line}")).1;
        let (result, detail) = rest.split_once(' ').unwrap_or((rest, ""));
        Self { result: result.to_owned(), detail: detail.to_owned() }
    }

    /// The value of `key=value` in the detail.
    #[track_caller]
    pub(crate) fn field(&self, key: &str) -> &str {
        let mut words = self.detail.split(' ');
        let found = words.find_map(|w| w.strip_prefix(key)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("no {key} in {self:?}"))
    }

    #[track_caller]
    pub(crate) fn number(&self, key: &str) -> u64 {
        self.field(key).parse().unwrap()
    }

    /// The words after `key=`, to the end of the line.
    #[track_caller]
    pub(crate) fn words(&self, key: &str) -> BTreeSet<&str> {
        let rest = self.detail.split_once(&format!("{key}="));
        rest.unwrap_or_else(|| panic!("no {key} in {self:?}")).1.split_whitespace().collect()
    }
}

/// The object that `warren run --json` prints.
#[derive(Debug)]
pub(crate) struct Report(pub(crate) serde_json::Value);

impl Report {
    pub(crate) fn cause(&self) -> &str {
        self.0["cause"]["kind"].as_str().unwrap_or("none")
    }

    pub(crate) fn code(&self) -> i64 {
        self.0["exit_code"].as_i64().unwrap_or(-1)
    }

    pub(crate) fn stdout(&self) -> &str {
        self.0["stdout"].as_str().unwrap_or("")
    }
}
