//! Receipts: what attempts on a sandbox's walls come to, and who vouches for it.
//!
//! The attempts are made inside, by `warren-init`. What each of them means is in one table here, whatever the
//! backend; what a backend promises it says itself. See `docs/design/receipt.md`.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use chrono::{DateTime, Utc};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use warren_init::protocol::{self, Probe, Said, Tries, Try, tried};

use crate::backend::linux::limits::Setting;
use crate::{
    Bound, EnforcedLimit, Envelope, EnvelopeSignature, Extent, Limit, Receipt, ReceiptLayer,
    ReceiptTry, Result, SandboxCapabilities, SandboxError, SandboxId, SignedReceipt, Verdict,
};

/// What is signed.
const PAYLOAD_TYPE: &str = "application/vnd.warren.receipt.v1+json";
/// The longest receipt that is looked at.
const MAX_RECEIPT: usize = 1 << 20;
/// The namespaces that a sandbox has of its own.
const NAMESPACES: [&str; 7] = ["pid", "net", "ipc", "uts", "mnt", "user", "cgroup"];

/// The layers of a receipt, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wall {
    Filesystem,
    Network,
    Processes,
    Privileges,
    Syscalls,
    Limits,
}

impl Wall {
    const ALL: [Self; 6] = [
        Self::Filesystem,
        Self::Network,
        Self::Processes,
        Self::Privileges,
        Self::Syscalls,
        Self::Limits,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Filesystem => "filesystem",
            Self::Network => "network",
            Self::Processes => "processes",
            Self::Privileges => "privileges",
            Self::Syscalls => "syscalls",
            Self::Limits => "limits",
        }
    }
}

/// Which answers to an attempt are a refusal.
#[derive(Debug, Clone, Copy)]
enum Refusal {
    /// Any error.
    Any,
    /// These alone: with any other the call got past the wall and failed of itself.
    Only(&'static [Errno]),
    /// That what is there is another than the host's.
    Apart,
    /// That the one who tried was killed, or was not given it.
    Killed,
}

/// What one attempt is about.
#[derive(Debug)]
pub(crate) struct Meaning {
    name: &'static str,
    wall: Wall,
    what: &'static str,
    refusal: Refusal,
    by: &'static str,
    /// The kind of system call that it takes, if a filter alone holds it.
    category: Option<&'static str>,
    /// The limit that it is about.
    limit: Option<Limit>,
}

const FILTER: &[Errno] = &[Errno::PERM, Errno::NOSYS];

const fn wall(
    name: &'static str,
    wall: Wall,
    what: &'static str,
    refusal: Refusal,
    by: &'static str,
) -> Meaning {
    Meaning { name, wall, what, refusal, by, category: None, limit: None }
}

const fn call(name: &'static str, category: &'static str, what: &'static str) -> Meaning {
    let (refusal, by) = (Refusal::Only(FILTER), "the system call filter");
    let wall = Wall::Syscalls;
    Meaning { name, wall, what, refusal, by, category: Some(category), limit: None }
}

const fn limit(
    name: &'static str,
    of: Limit,
    what: &'static str,
    refusal: Refusal,
    by: &'static str,
) -> Meaning {
    Meaning { name, wall: Wall::Limits, what, refusal, by, category: None, limit: Some(of) }
}

use Refusal::{Any, Apart, Killed, Only};
use Wall::{Filesystem, Network, Privileges, Processes};

/// Every attempt that there is, by the name that `warren-init` gives it.
const MEANINGS: &[Meaning] = &[
    wall(
        "mount",
        Filesystem,
        "make a filesystem",
        Any,
        "no capability, and the system call filter",
    ),
    wall(
        "host file",
        Filesystem,
        "find a path of the host that it was not given",
        Any,
        "a root of its own",
    ),
    wall("write /usr", Filesystem, "make a file in /usr", Any, "a read-only mount, or its owner"),
    wall("device node", Filesystem, "make a device node", Any, "no capability"),
    wall(
        "write /proc/sys",
        Filesystem,
        "write /proc/sys/kernel/core_pattern",
        Any,
        "a /proc of its own",
    ),
    wall(
        "write /proc/sysrq-trigger",
        Filesystem,
        "write /proc/sysrq-trigger",
        Any,
        "a /proc of its own",
    ),
    wall("read /proc/kcore", Filesystem, "read /proc/kcore", Any, "a /proc of its own"),
    wall("read /proc/keys", Filesystem, "read /proc/keys", Any, "a /proc of its own"),
    wall("read /proc/timer_list", Filesystem, "read /proc/timer_list", Any, "a /proc of its own"),
    wall("read /proc/kallsyms", Filesystem, "read /proc/kallsyms", Any, "a /proc of its own"),
    wall(
        "mnt namespace",
        Filesystem,
        "be in the host's mount namespace",
        Apart,
        "a mount namespace",
    ),
    wall(
        "packet socket",
        Network,
        "open a packet socket",
        Any,
        "no capability, and the system call filter",
    ),
    wall(
        "raw socket",
        Network,
        "open a raw socket",
        Any,
        "no capability, and the system call filter",
    ),
    wall("vsock", Network, "open a socket to the hypervisor", Any, "the system call filter"),
    wall(
        "udp to 192.0.2.1",
        Network,
        "send to 192.0.2.1 by UDP",
        Any,
        "a network namespace without a route",
    ),
    wall(
        "tcp to 192.0.2.1",
        Network,
        "connect to 192.0.2.1 by TCP",
        Any,
        "a network namespace without a route",
    ),
    wall(
        "tcp to 169.254.169.254",
        Network,
        "connect to 169.254.169.254:80, where clouds keep their secrets",
        Any,
        "a network namespace without a route",
    ),
    wall(HOST_LOOPBACK, Network, "connect to the host's 127.0.0.1", Any, "a network namespace"),
    wall(
        HOST_SOCKET,
        Network,
        "connect to an abstract socket of the host",
        Any,
        "a network namespace, and Landlock",
    ),
    wall(
        "net namespace",
        Network,
        "be in the host's network namespace",
        Apart,
        "a network namespace",
    ),
    wall(
        "read /proc/1",
        Processes,
        "read the environment of PID 1",
        Any,
        "PID 1 is of another user, or sealed",
    ),
    wall(
        "pid namespace",
        Processes,
        "be in the host's process namespace",
        Apart,
        "a process namespace",
    ),
    wall("ipc namespace", Processes, "be in the host's IPC namespace", Apart, "an IPC namespace"),
    wall("uts namespace", Processes, "be in the host's UTS namespace", Apart, "a UTS namespace"),
    wall(
        "cgroup namespace",
        Processes,
        "be in the host's cgroup namespace",
        Apart,
        "a cgroup namespace",
    ),
    wall(
        "user namespace",
        Privileges,
        "be in the host's user namespace",
        Apart,
        "a user namespace",
    ),
    wall("become root", Privileges, "become root", Any, "no capability"),
    wall(
        "cgroup namespace of its own",
        Privileges,
        "make a cgroup namespace",
        Any,
        "no capability, and the system call filter",
    ),
    call(
        "user namespace of its own",
        "namespaces",
        "make a user namespace, where it would be root",
    ),
    call("ptrace", "debug", "ptrace"),
    call("keyctl", "keyring", "keyctl"),
    call("io_uring_setup", "io_uring", "io_uring_setup"),
    call("perf_event_open", "perf", "perf_event_open"),
    call("userfaultfd", "userfaultfd", "userfaultfd"),
    call("open_by_handle_at", "file_handle", "open_by_handle_at"),
    call("setns", "namespaces", "setns"),
    limit(
        "open files",
        Limit::OpenFiles,
        "open one file too many",
        Only(&[Errno::MFILE]),
        "a limit on each process",
    ),
    limit(
        "quota",
        Limit::Write,
        "take more room than there may be",
        Only(&[Errno::NOSPC, Errno::DQUOT]),
        "the size of its filesystem",
    ),
    limit(
        "processes",
        Limit::Processes,
        "start one process too many",
        Only(&[Errno::AGAIN]),
        "the kernel's count of processes",
    ),
    limit(
        "memory",
        Limit::Memory,
        "use more memory than there may be",
        Killed,
        "the kernel's count of memory",
    ),
];

/// What init tries of every sandbox before it is ready, each with what happened: it would not be ready if
/// anything else had.
const AT_CREATION: &[(u32, Wall, &str, &str, &str)] = &[
    (
        tried::MOUNTS,
        Filesystem,
        "make a directory in what the host shows",
        "EROFS",
        "a read-only mount",
    ),
    (tried::LANDLOCK, Filesystem, "open the old root by a descriptor", "EACCES", "Landlock"),
    (
        tried::UNMOUNTED,
        Filesystem,
        "open by a descriptor what is mounted nowhere inside",
        "EACCES",
        "Landlock",
    ),
    (tried::FILES, Filesystem, "list the host's / by a descriptor", "EACCES", "Landlock"),
    (tried::WRITES, Filesystem, "make a directory beside its own", "EACCES", "Landlock"),
    (
        tried::HOST_PATH,
        Filesystem,
        "find a path of the host that it was not given",
        "ENOENT",
        "a root of its own",
    ),
    (
        tried::MOUNTING,
        Filesystem,
        "make a filesystem",
        "EPERM",
        "no capability, and the system call filter",
    ),
    (tried::MASKED, Filesystem, "read /proc/cmdline", "empty, or not there", "a /proc of its own"),
    (tried::HOST_MEMORY, Filesystem, "read /proc/kcore", "not there", "a /proc of its own"),
    (tried::PROC_SYS, Filesystem, "change /proc/sys", "EROFS, or not there", "a /proc of its own"),
    (
        tried::PROC_WRITES,
        Filesystem,
        "write /proc/sysrq-trigger",
        "EACCES",
        "Landlock, and its owner",
    ),
    (tried::SOCKETS, Network, "open a socket", "EPERM", "the system call filter"),
    (tried::SIGNALS, Processes, "signal a process outside", "EPERM", "Landlock"),
    (tried::NETWORK, Network, "find a route to 192.0.2.1", "ENETUNREACH", "a network namespace"),
    (
        tried::METADATA,
        Network,
        "connect to 169.254.169.254:80, where clouds keep their secrets",
        "ENETUNREACH",
        "a network namespace without a route",
    ),
    (
        tried::METADATA,
        Network,
        "connect to [fd00:ec2::254]:80, where clouds keep their secrets",
        "no way there",
        "a network namespace without a route",
    ),
    (tried::HOST_LOOPBACK, Network, "share the host's 127.0.0.1", "apart", "a network namespace"),
    (
        tried::RAW_SOCKETS,
        Network,
        "open a raw socket",
        "refused",
        "no capability, and the system call filter",
    ),
    (
        tried::RAW_SOCKETS,
        Network,
        "open a packet socket",
        "refused",
        "no capability, and the system call filter",
    ),
    (
        tried::PROCESSES,
        Processes,
        "be in the host's process namespace",
        "apart",
        "a process namespace",
    ),
    (
        tried::CAPABILITIES,
        Privileges,
        "hold a capability that the profile has not",
        "none",
        "read back",
    ),
    (tried::SECCOMP, Wall::Syscalls, "keyctl", "EPERM", "the system call filter"),
    (tried::HOST_PROCESS, Processes, "trace a process of the host", "ESRCH", "a process namespace"),
    (tried::MEMORY, Wall::Syscalls, "process_vm_readv", "EPERM", "the system call filter"),
    (tried::TRACING, Wall::Syscalls, "ptrace", "EPERM", "the system call filter"),
    (tried::KERNEL, Wall::Syscalls, "be on the host's kernel", "apart", "a kernel of its own"),
];

/// Of those the limits, which are promised by the backend. One of a control group was exceeded while it was lowered, and
/// counts if the one that was asked for was read back.
const LIMITS_AT_CREATION: &[(u32, Limit, &str)] = &[
    (tried::OPEN_FILES, Limit::OpenFiles, "EBADF"),
    (tried::ROOM, Limit::Write, "ENOSPC"),
    (tried::PROCESS_LIMIT, Limit::Processes, "EAGAIN"),
    (tried::MEMORY_LIMIT | tried::SET_MEMORY, Limit::Memory, "EBUSY"),
];

/// What was read back of every sandbox when it was written.
const SET_AT_CREATION: &[(u32, Limit)] = &[
    (tried::SET_MEMORY, Limit::Memory),
    (tried::SET_PROCESSES, Limit::Processes),
    (tried::SET_CPU_WEIGHT, Limit::CpuWeight),
    (tried::SET_CPU_QUOTA, Limit::CpuQuota),
];

/// Returns the bit by which it is kept that a limit was read back.
pub(crate) fn set_bit(setting: &Setting) -> u32 {
    let of = setting.limit();
    SET_AT_CREATION.iter().find(|(_, limit)| Some(*limit) == of).map_or(0, |(bit, _)| *bit)
}

/// What a sandbox must not reach, tried against somebody who listens there.
pub(crate) const HOST_LOOPBACK: &str = "tcp to the host's 127.0.0.1";
const HOST_SOCKET: &str = "abstract socket of the host";

/// What a backend promises.
pub(crate) trait Promises {
    /// Tells whether it has such a wall.
    fn wall(&self, wall: Wall) -> bool;
    /// Returns what refuses an attempt, if it is promised that something does.
    fn attempt(&self, meaning: &Meaning) -> Option<&'static str>;
    /// Tells whether its filter refuses calls of this kind.
    fn call(&self, category: &str) -> bool;
    /// Returns how it holds a limit, if it does.
    fn limit(&self, limit: Limit) -> Option<&EnforcedLimit>;
}

/// What is refused without namespaces, too: the rest is what they alone keep apart, or of a `/proc` that is shared.
const BY_RULES: &[(&str, &str)] = &[
    ("mount", "no capability, and the system call filter"),
    ("write /usr", "Landlock"),
    ("device node", "no capability"),
    ("write /proc/sys", "Landlock"),
    ("write /proc/sysrq-trigger", "Landlock"),
    ("packet socket", "the system call filter"),
    ("raw socket", "the system call filter"),
    ("vsock", "the system call filter"),
    ("udp to 192.0.2.1", "the system call filter"),
    ("tcp to 192.0.2.1", "the system call filter"),
    ("tcp to 169.254.169.254", "the system call filter"),
    (HOST_LOOPBACK, "the system call filter"),
    (HOST_SOCKET, "the system call filter"),
    ("read /proc/1", "PID 1 is of another user, or sealed"),
    ("become root", "no capability"),
    ("cgroup namespace of its own", "no capability, and the system call filter"),
];

/// A sandbox of which nothing is promised.
#[derive(Debug)]
pub(crate) struct Nothing;

impl Promises for Nothing {
    fn wall(&self, _: Wall) -> bool {
        false
    }

    fn attempt(&self, _: &Meaning) -> Option<&'static str> {
        None
    }

    fn call(&self, _: &str) -> bool {
        false
    }

    fn limit(&self, _: Limit) -> Option<&EnforcedLimit> {
        None
    }
}

/// A sandbox with every wall, a filter that blocks these kinds of call, and these limits.
#[derive(Debug)]
pub(crate) struct Walled<'a> {
    /// Without them the walls refuse [`BY_RULES`] alone.
    pub(crate) namespaces: bool,
    pub(crate) blocked: &'a [String],
    pub(crate) limits: &'a [EnforcedLimit],
}

impl Promises for Walled<'_> {
    fn wall(&self, _: Wall) -> bool {
        true
    }

    fn attempt(&self, meaning: &Meaning) -> Option<&'static str> {
        if self.namespaces {
            return Some(meaning.by);
        }
        BY_RULES.iter().find(|(name, _)| *name == meaning.name).map(|(_, by)| *by)
    }

    fn call(&self, category: &str) -> bool {
        self.blocked.iter().any(|blocked| blocked == category)
    }

    fn limit(&self, limit: Limit) -> Option<&EnforcedLimit> {
        self.limits.iter().find(|enforced| enforced.limit == limit)
    }
}

/// What was tried of a sandbox, apart from what came of it.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) extent: Extent,
    pub(crate) at: DateTime<Utc>,
    pub(crate) took: Option<Duration>,
    pub(crate) tries: Vec<Try>,
    /// Limits that were read back from the kernel, and whether they are as they should be.
    pub(crate) read_back: Vec<(Limit, bool)>,
    /// What was tried when the sandbox was made, by the bits of [`tried`].
    pub(crate) at_creation: u32,
}

impl Receipt {
    /// Says what an attempt came to.
    pub(crate) fn new(
        id: &SandboxId,
        can: &SandboxCapabilities,
        promises: &dyn Promises,
        attempt: &Attempt,
    ) -> Self {
        let layers: Vec<_> =
            Wall::ALL.into_iter().map(|wall| layer(wall, promises, attempt)).collect();
        Self {
            version: 1,
            sandbox_id: id.clone(),
            backend: can.backend.clone(),
            profile: can.profile.clone(),
            warren: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: kernel(),
            extent: attempt.extent,
            tried_at: attempt.at,
            took_us: attempt.took.map(|took| u64::try_from(took.as_micros()).unwrap_or(u64::MAX)),
            verdict: together(layers.iter().map(|layer| layer.verdict)),
            layers,
        }
    }

    /// Says that nothing was tried of a sandbox whose backend does not try what it promises.
    pub fn untried(id: &SandboxId, can: &SandboxCapabilities) -> Self {
        let blocked = &can.blocked_syscall_categories;
        Self::without_tries(id, can, &Walled { namespaces: true, blocked, limits: &[] })
    }

    /// Says that nothing was tried of a sandbox of which nothing is promised.
    pub(crate) fn unpromised(id: &SandboxId, can: &SandboxCapabilities) -> Self {
        Self::without_tries(id, can, &Nothing)
    }

    fn without_tries(id: &SandboxId, can: &SandboxCapabilities, promises: &dyn Promises) -> Self {
        let attempt = Attempt {
            extent: Extent::Creation,
            at: can.created_at,
            took: None,
            tries: Vec::new(),
            read_back: Vec::new(),
            at_creation: 0,
        };
        Self::new(id, can, promises, &attempt)
    }
}

fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn layer(wall: Wall, promises: &dyn Promises, attempt: &Attempt) -> ReceiptLayer {
    let mut tries = Vec::new();
    let again = |what: &str| {
        let mut meant = MEANINGS.iter().filter(|meaning| meaning.what == what);
        meant.any(|meaning| attempt.tries.iter().any(|one| one.name == meaning.name))
    };
    for (bit, of, what, said, by) in AT_CREATION {
        // What was tried again since is told below.
        if *of == wall && attempt.at_creation & bit != 0 && !again(what) {
            let (what, said, by) = ((*what).to_owned(), (*said).to_owned(), (*by).to_owned());
            tries.push(ReceiptTry { what, said, verdict: Verdict::Held, by });
        }
    }
    for meaning in MEANINGS.iter().filter(|meaning| meaning.wall == wall) {
        tries.extend(judge(meaning, promises, attempt));
    }
    if wall == Wall::Limits {
        tries.extend(untried_limits(promises, attempt));
    }
    let promised =
        promises.wall(wall) || tries.iter().any(|one| one.verdict != Verdict::NotPromised);
    let verdict = match tries.is_empty() {
        true if promised => Verdict::NotTried,
        true => Verdict::NotPromised,
        false => together(tries.iter().map(|one| one.verdict)),
    };
    ReceiptLayer { layer: wall.name().to_owned(), verdict, tries }
}

/// Says what one attempt came to; `None` if it was not made.
fn judge(meaning: &Meaning, promises: &dyn Promises, attempt: &Attempt) -> Option<ReceiptTry> {
    let made = attempt.tries.iter().find(|one| one.name == meaning.name)?;
    let held = match (meaning.refusal, made.said) {
        (_, Said::Errno(0)) | (_, Said::Same) => false,
        (Any, Said::Errno(_)) | (Apart, Said::Apart) => true,
        (Only(which), Said::Errno(errno)) => which.iter().any(|one| one.raw_os_error() == errno),
        (Killed, Said::Signalled(9)) => true,
        (Killed, Said::Errno(errno)) => {
            [Errno::NOMEM, Errno::BUSY].map(Errno::raw_os_error).contains(&errno)
        }
        (Any | Only(_) | Killed, Said::Apart)
        | (Any | Only(_) | Apart | Killed, Said::Signalled(_))
        | (Apart, Said::Errno(_)) => false,
    };
    let (promised, by) = match (meaning.category, meaning.limit) {
        (Some(category), _) => (promises.call(category), meaning.by.to_owned()),
        (None, Some(limit)) => match promises.limit(limit) {
            Some(enforced) => (enforced.bound == Bound::Exact, enforced.by.clone()),
            None => (false, meaning.by.to_owned()),
        },
        (None, None) => {
            let by = promises.attempt(meaning);
            (by.is_some(), by.unwrap_or(meaning.by).to_owned())
        }
    };
    let verdict = match (promised, held) {
        (true, true) => Verdict::Held,
        (true, false) => Verdict::Open,
        (false, _) => Verdict::NotPromised,
    };
    Some(ReceiptTry { what: meaning.what.to_owned(), said: said(made.said), verdict, by })
}

/// Lists the limits that are promised and were not tried, or only read back.
fn untried_limits(promises: &dyn Promises, attempt: &Attempt) -> Vec<ReceiptTry> {
    let meaning = |limit: Limit| MEANINGS.iter().find(|meaning| meaning.limit == Some(limit));
    let was_tried = |limit: Limit| {
        let tries = |meaning: &Meaning| attempt.tries.iter().any(|one| one.name == meaning.name);
        meaning(limit).is_some_and(tries)
    };
    let had = |bits: u32| attempt.at_creation & bits == bits;
    let mut rest = Vec::new();
    for limit in Limit::ALL {
        let Some(enforced) = promises.limit(limit) else { continue };
        if was_tried(limit) {
            continue;
        }
        let back = attempt.read_back.iter().find(|(of, _)| *of == limit).copied();
        let at_creation = LIMITS_AT_CREATION.iter().find(|(bits, of, _)| {
            // However it held then: one that is another by now is not what was promised.
            *of == limit && had(*bits) && !matches!(back, Some((_, false)))
        });
        if let (Some((.., said)), Some(meaning), Bound::Exact) =
            (at_creation, meaning(limit), enforced.bound)
        {
            let (what, said, by) =
                (meaning.what.to_owned(), (*said).to_owned(), enforced.by.clone());
            rest.push(ReceiptTry { what, said, verdict: Verdict::Held, by });
            continue;
        }
        let set = SET_AT_CREATION.iter().any(|(bit, of)| *of == limit && had(*bit));
        let back = back.or_else(|| set.then_some((limit, true)));
        let (verdict, said) = match back {
            Some((_, true)) => (Verdict::Set, "read back"),
            Some((_, false)) => (Verdict::Open, "read back, and it is another"),
            None if enforced.bound == Bound::Nearest => (Verdict::NotPromised, "not exact"),
            None => (Verdict::NotTried, "not tried"),
        };
        let what = format!("exceed the limit on {limit}");
        rest.push(ReceiptTry { what, said: said.to_owned(), verdict, by: enforced.by.clone() });
    }
    rest
}

/// Says what several verdicts come to.
fn together(all: impl Iterator<Item = Verdict>) -> Verdict {
    let all: Vec<_> = all.filter(|verdict| *verdict != Verdict::NotPromised).collect();
    let has = |verdict: Verdict| all.contains(&verdict);
    if all.is_empty() {
        Verdict::NotPromised
    } else if has(Verdict::Open) {
        Verdict::Open
    } else if all.iter().all(|verdict| *verdict == Verdict::Held) {
        Verdict::Held
    } else if has(Verdict::Held) || has(Verdict::Partly) {
        Verdict::Partly
    } else if has(Verdict::Set) {
        Verdict::Set
    } else {
        Verdict::NotTried
    }
}

fn said(said: Said) -> String {
    match said {
        Said::Errno(0) => "let through".to_owned(),
        Said::Errno(errno) => errno_name(errno),
        Said::Apart => "apart".to_owned(),
        Said::Same => "the host's own".to_owned(),
        Said::Signalled(9) => "killed".to_owned(),
        Said::Signalled(signal) => format!("ended by signal {signal}"),
    }
}

/// Returns the name of an error, as errno(3) has it, or its number.
pub fn errno_name(errno: i32) -> String {
    const NAMES: &[(Errno, &str)] = &[
        (Errno::PERM, "EPERM"),
        (Errno::NOENT, "ENOENT"),
        (Errno::SRCH, "ESRCH"),
        (Errno::IO, "EIO"),
        (Errno::NXIO, "ENXIO"),
        (Errno::BADF, "EBADF"),
        (Errno::AGAIN, "EAGAIN"),
        (Errno::NOMEM, "ENOMEM"),
        (Errno::ACCESS, "EACCES"),
        (Errno::BUSY, "EBUSY"),
        (Errno::FAULT, "EFAULT"),
        (Errno::EXIST, "EEXIST"),
        (Errno::XDEV, "EXDEV"),
        (Errno::NODEV, "ENODEV"),
        (Errno::NOTDIR, "ENOTDIR"),
        (Errno::ISDIR, "EISDIR"),
        (Errno::INVAL, "EINVAL"),
        (Errno::MFILE, "EMFILE"),
        (Errno::NOSPC, "ENOSPC"),
        (Errno::ROFS, "EROFS"),
        (Errno::NOSYS, "ENOSYS"),
        (Errno::NODATA, "ENODATA"),
        (Errno::OVERFLOW, "EOVERFLOW"),
        (Errno::PROTONOSUPPORT, "EPROTONOSUPPORT"),
        (Errno::OPNOTSUPP, "EOPNOTSUPP"),
        (Errno::AFNOSUPPORT, "EAFNOSUPPORT"),
        (Errno::NETUNREACH, "ENETUNREACH"),
        (Errno::HOSTUNREACH, "EHOSTUNREACH"),
        (Errno::CONNREFUSED, "ECONNREFUSED"),
        (Errno::TIMEDOUT, "ETIMEDOUT"),
        (Errno::DQUOT, "EDQUOT"),
    ];
    let known = NAMES.iter().find(|(one, _)| one.raw_os_error() == errno);
    known.map_or_else(|| format!("errno {errno}"), |(_, name)| (*name).to_owned())
}

/// Somebody on the host whom a sandbox must not reach: tells by itself whether it was.
#[derive(Debug)]
pub(crate) struct Listening {
    tcp: Option<TcpListener>,
    unix: Option<(UnixListener, Vec<u8>)>,
    nonce: u64,
}

impl Listening {
    pub(crate) fn start() -> Self {
        let mut nonce = [0; 8];
        // So few bytes come at once or not at all (getrandom(2)).
        let _ = rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty());
        let nonce = u64::from_le_bytes(nonce);
        let name = format!("warren-{nonce:016x}").into_bytes();
        let unix = UnixAddr::from_abstract_name(&name)
            .and_then(|address| UnixListener::bind_addr(&address))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        Self { tcp: tcp.ok(), unix: unix.ok().map(|unix| (unix, name)), nonce }
    }

    /// Fills in whom to try to reach.
    pub(crate) fn be_named_in(&self, probe: &mut Probe) {
        let port = self.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok());
        probe.port = port.map(|address| address.port());
        probe.socket = self.unix.as_ref().map(|(_, name)| name.clone());
        probe.nonce = self.nonce;
    }

    /// Puts right what a sandbox says of whom it reached: somebody inside may listen by the same name.
    pub(crate) fn correct(&self, tries: &mut [Try]) {
        let reached = [(HOST_LOOPBACK, self.by_tcp()), (HOST_SOCKET, self.by_unix())];
        for (name, reached) in reached {
            let found = tries.iter_mut().find(|one| one.name == name);
            match (found, reached) {
                (Some(one), true) => one.said = Said::Errno(0),
                (Some(one), false) if one.said == Said::Errno(0) => one.said = Said::Apart,
                _ => {}
            }
        }
    }

    fn by_tcp(&self) -> bool {
        let mut came = self.tcp.iter().flat_map(|tcp| std::iter::from_fn(|| tcp.accept().ok()));
        // A stranger who came and says nothing is not waited for.
        came.any(|(stream, _): (TcpStream, _)| {
            stream.set_nonblocking(true).is_ok() && self.knows(stream)
        })
    }

    fn by_unix(&self) -> bool {
        let mut came =
            self.unix.iter().flat_map(|(unix, _)| std::iter::from_fn(|| unix.accept().ok()));
        came.any(|(stream, _): (UnixStream, _)| {
            stream.set_nonblocking(true).is_ok() && self.knows(stream)
        })
    }

    fn knows(&self, mut stream: impl io::Read) -> bool {
        let mut nonce = [0; 8];
        stream.read_exact(&mut nonce).is_ok() && nonce == self.nonce.to_le_bytes()
    }
}

/// Returns the namespaces that this process is in.
pub(crate) fn own_namespaces() -> Vec<(String, u64)> {
    let own = |name: &&str| {
        let inode = std::fs::metadata(format!("/proc/self/ns/{name}")).ok()?.ino();
        Some(((**name).to_owned(), inode))
    };
    NAMESPACES.iter().filter_map(own).collect()
}

/// What receipts are signed with: an Ed25519 key.
#[derive(Debug)]
pub struct ReceiptKey {
    pair: Ed25519KeyPair,
}

/// What comes before the bytes of an Ed25519 key in a file: RFC 8410, in the encoding of RFC 5958 and 5280.
const PRIVATE_HEAD: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];
const PUBLIC_HEAD: [u8; 12] =
    [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

impl ReceiptKey {
    /// Reads the key in a file, or makes one that its owner alone can read.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |step: &str| {
            let step = step.to_owned();
            move |source| SandboxError::Step { step, path: Some(path.to_owned()), source }
        };
        match File::open(path) {
            Ok(file) => Self::read(path, file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mut seed = [0; 32];
                let drawn =
                    rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty());
                if drawn.map_err(io::Error::from).map_err(failed("draw a key for"))? < seed.len() {
                    return Err(failed("draw a key for")(io::ErrorKind::UnexpectedEof.into()));
                }
                let text = pem("PRIVATE KEY", &[&PRIVATE_HEAD[..], &seed].concat());
                let write = || {
                    // Whole or not at all: a crash on the way leaves no half of a key.
                    let new = path.with_extension("new");
                    let mut options = OpenOptions::new();
                    let mut file =
                        options.create(true).truncate(true).write(true).mode(0o600).open(&new)?;
                    file.write_all(text.as_bytes())?;
                    file.sync_all()?;
                    std::fs::rename(&new, path)
                };
                write().map_err(failed("write"))?;
                Self::of(&seed)
            }
            Err(error) => Err(failed("open")(error)),
        }
    }

    fn read(path: &Path, file: File) -> Result<Self> {
        let refused = |reason: &str, hint: &str| {
            Err(SandboxError::invalid(format!("receipt key {}", path.display()), reason, hint))
        };
        let failed = |source| SandboxError::step("read", path, source);
        if file.metadata().map_err(failed)?.mode() & 0o077 != 0 {
            return refused(
                "others than its owner can read it",
                "chmod 600, or remove it for a new one",
            );
        }
        let mut text = String::new();
        file.take(4096).read_to_string(&mut text).map_err(failed)?;
        let der = unpem("PRIVATE KEY", &text).unwrap_or_default();
        match der.strip_prefix(&PRIVATE_HEAD[..]) {
            Some(seed) if seed.len() == 32 => Self::of(seed),
            _ => refused("it is no Ed25519 key in PEM", "remove it, and a new one is made"),
        }
    }

    fn of(seed: &[u8]) -> Result<Self> {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed);
        let pair = pair.map_err(|error| SandboxError::Internal { message: error.to_string() })?;
        Ok(Self { pair })
    }

    /// Returns what others check signatures with, in PEM.
    pub fn public(&self) -> String {
        pem("PUBLIC KEY", &[&PUBLIC_HEAD[..], self.pair.public_key().as_ref()].concat())
    }

    /// Returns what the key is called in signatures.
    pub fn id(&self) -> String {
        key_id(self.pair.public_key().as_ref())
    }

    /// Signs a receipt.
    pub fn sign(&self, receipt: Receipt) -> Result<SignedReceipt> {
        let payload = serde_json::to_vec(&receipt)
            .map_err(|error| SandboxError::Internal { message: error.to_string() })?;
        let signature = self.pair.sign(&to_sign(&payload));
        let signature =
            EnvelopeSignature { keyid: self.id(), sig: BASE64.encode(signature.as_ref()) };
        let envelope = Envelope {
            payload_type: PAYLOAD_TYPE.to_owned(),
            payload: BASE64.encode(payload),
            signatures: vec![signature],
        };
        Ok(SignedReceipt { receipt, envelope: Some(envelope) })
    }
}

fn key_id(public: &[u8]) -> String {
    Sha256::digest(public).iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Returns what is signed of a payload: DSSE's "pre-authentication encoding".
fn to_sign(payload: &[u8]) -> Vec<u8> {
    let (kind, length) = (PAYLOAD_TYPE, payload.len());
    let mut bytes = format!("DSSEv1 {} {kind} {length} ", kind.len()).into_bytes();
    bytes.extend_from_slice(payload);
    bytes
}

fn pem(what: &str, der: &[u8]) -> String {
    format!("-----BEGIN {what}-----\n{}\n-----END {what}-----\n", BASE64.encode(der))
}

fn unpem(what: &str, text: &str) -> Option<Vec<u8>> {
    let body = text.trim().strip_prefix(&format!("-----BEGIN {what}-----"))?;
    let body = body.strip_suffix(&format!("-----END {what}-----"))?;
    BASE64.decode(body.split_ascii_whitespace().collect::<String>()).ok()
}

/// Why a receipt is not believed.
#[derive(Debug, thiserror::Error)]
pub enum ReceiptFault {
    /// The file is no receipt.
    #[error("this is no receipt: {0}")]
    NotOne(String),
    /// The key is none.
    #[error("this is no public key: it is not Ed25519 in PEM")]
    Key,
    /// Nobody signed it.
    #[error("this receipt is not signed")]
    Unsigned,
    /// It was signed with another key.
    #[error("this receipt was signed with the key {found}, not with {wanted}")]
    OtherKey {
        /// The key that it names.
        found: String,
        /// The one that was given.
        wanted: String,
    },
    /// It was changed after it was signed.
    #[error("the signature does not fit: the receipt was changed, or somebody else signed it")]
    Forged,
    /// What is shown is not what was signed.
    #[error("what the receipt shows is not what was signed")]
    Differs,
}

/// Checks a receipt with a public key in PEM, and returns what was signed. Needs nobody else.
pub fn verify(text: &str, public: &str) -> Result<Receipt, ReceiptFault> {
    let der = unpem("PUBLIC KEY", public).ok_or(ReceiptFault::Key)?;
    let key = der.strip_prefix(&PUBLIC_HEAD[..]).filter(|key| key.len() == 32);
    let key = key.ok_or(ReceiptFault::Key)?;
    let not_one = |why: String| ReceiptFault::NotOne(why);
    if text.len() > MAX_RECEIPT {
        return Err(not_one(format!("it is longer than {MAX_RECEIPT} bytes")));
    }
    let signed: SignedReceipt =
        serde_json::from_str(text).map_err(|error| not_one(error.to_string()))?;
    let envelope = signed.envelope.ok_or(ReceiptFault::Unsigned)?;
    if envelope.payload_type != PAYLOAD_TYPE {
        return Err(not_one(format!("its payload is `{}`", envelope.payload_type.escape_debug())));
    }
    let decode = |text: &str| BASE64.decode(text).map_err(|error| not_one(error.to_string()));
    let payload = decode(&envelope.payload)?;
    let wanted = key_id(key);
    let ours = envelope.signatures.iter().find(|one| one.keyid == wanted);
    let Some(ours) = ours else {
        let found = envelope.signatures.first().map(|one| one.keyid.clone());
        let found = found.ok_or(ReceiptFault::Unsigned)?;
        return Err(ReceiptFault::OtherKey { found, wanted });
    };
    let signature = decode(&ours.sig)?;
    UnparsedPublicKey::new(&ED25519, key)
        .verify(&to_sign(&payload), &signature)
        .map_err(|_| ReceiptFault::Forged)?;
    let receipt: Receipt =
        serde_json::from_slice(&payload).map_err(|error| not_one(error.to_string()))?;
    if receipt == signed.receipt { Ok(receipt) } else { Err(ReceiptFault::Differs) }
}

/// Tries the walls around this very process, by a child of it: there are none.
///
/// Blocks until that has answered, for ten seconds at most.
pub(crate) fn try_bare(probe: &Probe) -> io::Result<Vec<Try>> {
    let image = warren_sys::fd::sealed("warren-probe", warren_init::IMAGE)?;
    let (ours, theirs) = warren_sys::socket::pair()?;
    protocol::send(&ours, probe, &[])?;
    let mut command = Command::new(format!("/proc/self/fd/{}", image.as_raw_fd()));
    command.arg0(warren_init::probe::NAME).env_clear().current_dir("/");
    let streams = command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = streams.spawn()?;
    drop(command);
    let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(&ours, PollFlags::IN)], Some(&patience))?;
    let answer = if ready == 0 { None } else { protocol::receive::<Tries>(&ours)? };
    let _ = child.kill();
    child.wait()?;
    let (Tries(tries), _) = answer.ok_or(io::ErrorKind::TimedOut)?;
    Ok(tries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn can() -> SandboxCapabilities {
        SandboxCapabilities {
            sandbox_id: "sbx-1".to_owned(),
            backend: "linux".to_owned(),
            profile: "default".to_owned(),
            can_write_filesystem: true,
            readable_paths: Vec::new(),
            writable_paths: Vec::new(),
            has_network: false,
            allowed_destinations: Vec::new(),
            limits: crate::ResourceLimits::default(),
            syscall_filter_active: true,
            blocked_syscall_categories: Vec::new(),
            is_persistent: false,
            created_at: DateTime::UNIX_EPOCH,
            time_remaining_ms: None,
        }
    }

    fn receipt(
        promises: &dyn Promises,
        tries: &[(&str, Said)],
        read_back: &[(Limit, bool)],
    ) -> Receipt {
        let one = |(name, said): &(&str, Said)| Try { name: (*name).to_owned(), said: *said };
        let attempt = Attempt {
            extent: Extent::Walls,
            at: DateTime::UNIX_EPOCH,
            took: None,
            tries: tries.iter().map(one).collect(),
            read_back: read_back.to_vec(),
            at_creation: 0,
        };
        Receipt::new(&SandboxId::from_string("sbx-1"), &can(), promises, &attempt)
    }

    fn verdict(receipt: &Receipt, layer: &str) -> Verdict {
        receipt.layers.iter().find(|one| one.layer == layer).unwrap().verdict
    }

    fn enforced(limit: Limit, bound: Bound) -> EnforcedLimit {
        EnforcedLimit { limit, value: 1, bound, by: "something".to_owned() }
    }

    #[test]
    fn each_attempt_is_held_or_open_by_what_the_kernel_said() {
        let errno = |errno: Errno| Said::Errno(errno.raw_os_error());
        let (blocked, limits) = (
            ["debug", "namespaces"].map(str::to_owned),
            [Limit::OpenFiles, Limit::Memory].map(|limit| enforced(limit, Bound::Exact)),
        );
        let walled = Walled { namespaces: true, blocked: &blocked, limits: &limits };
        for (name, layer, said, expected) in [
            ("mount", "filesystem", errno(Errno::PERM), Verdict::Held),
            ("mount", "filesystem", Said::Errno(0), Verdict::Open),
            ("mnt namespace", "filesystem", Said::Apart, Verdict::Held),
            ("mnt namespace", "filesystem", Said::Same, Verdict::Open),
            ("tcp to 169.254.169.254", "network", errno(Errno::NETUNREACH), Verdict::Held),
            ("tcp to 169.254.169.254", "network", Said::Errno(0), Verdict::Open),
            ("ptrace", "syscalls", errno(Errno::PERM), Verdict::Held),
            // It got as far as the call itself.
            ("ptrace", "syscalls", errno(Errno::FAULT), Verdict::Open),
            // The profile lets it.
            ("keyctl", "syscalls", Said::Errno(0), Verdict::NotPromised),
            ("open files", "limits", errno(Errno::MFILE), Verdict::Partly),
            ("open files", "limits", errno(Errno::INVAL), Verdict::Open),
            ("memory", "limits", Said::Signalled(9), Verdict::Partly),
            ("memory", "limits", Said::Errno(0), Verdict::Open),
            ("memory", "limits", Said::Signalled(11), Verdict::Open),
        ] {
            let made = receipt(&walled, &[(name, said)], &[]);
            assert_eq!(verdict(&made, layer), expected, "{name} {said:?}");
            assert_eq!(made.open().count(), usize::from(expected == Verdict::Open), "{name}");
            let nothing = receipt(&Nothing, &[(name, said)], &[]);
            assert_eq!(verdict(&nothing, layer), Verdict::NotPromised, "{name} {said:?}");
        }
    }

    #[test]
    fn nothing_is_said_to_hold_that_was_not_tried() {
        let limits = [Limit::Memory, Limit::WallTime, Limit::Processes, Limit::CpuWeight];
        let mut limits = limits.map(|limit| enforced(limit, Bound::Exact));
        let walled = Walled { namespaces: true, blocked: &[], limits: &limits };
        let made = receipt(&walled, &[], &[]);
        assert_eq!(made.verdict, Verdict::NotTried);
        assert!(made.tries().all(|one| one.verdict == Verdict::NotTried), "{made:?}");
        let made = receipt(&walled, &[], &[(Limit::Memory, true)]);
        assert_eq!(verdict(&made, "limits"), Verdict::Set);
        let made = receipt(&walled, &[], &[(Limit::Memory, false)]);
        assert_eq!(verdict(&made, "limits"), Verdict::Open);
        limits.iter_mut().for_each(|limit| limit.bound = Bound::Nearest);
        let made = receipt(&Walled { namespaces: true, blocked: &[], limits: &limits }, &[], &[]);
        assert_eq!(verdict(&made, "limits"), Verdict::NotPromised, "nearly is no promise");
        assert!(made.tries().all(|one| one.verdict == Verdict::NotPromised), "{made:?}");
    }

    #[test]
    fn what_held_before_it_was_asked_for_counts_for_a_limit_that_is_as_it_was_written() {
        let limits = [enforced(Limit::Memory, Bound::Exact)];
        let walled = Walled { namespaces: true, blocked: &[], limits: &limits };
        for (at_creation, read_back, expected) in [
            (tried::SET_MEMORY, None, Verdict::Set),
            (tried::MEMORY_LIMIT, None, Verdict::NotTried),
            (tried::MEMORY_LIMIT | tried::SET_MEMORY, None, Verdict::Held),
            (tried::MEMORY_LIMIT | tried::SET_MEMORY, Some(true), Verdict::Held),
            (tried::MEMORY_LIMIT | tried::SET_MEMORY, Some(false), Verdict::Open),
        ] {
            let attempt = Attempt {
                extent: Extent::Creation,
                at: DateTime::UNIX_EPOCH,
                took: None,
                tries: Vec::new(),
                read_back: read_back.map(|same| (Limit::Memory, same)).into_iter().collect(),
                at_creation,
            };
            let made = Receipt::new(&SandboxId::from_string("sbx-1"), &can(), &walled, &attempt);
            assert_eq!(verdict(&made, "limits"), expected, "{at_creation:#x} {read_back:?}");
        }
    }

    #[test]
    fn a_receipt_is_believed_with_the_key_alone_and_not_after_a_change() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("receipt.key");
        let key = ReceiptKey::open(&path).unwrap();
        let again = ReceiptKey::open(&path).unwrap();
        assert_eq!(key.public(), again.public(), "it is made once");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let other = ReceiptKey::open(&place.path().join("other.key")).unwrap();

        let made = receipt(&Nothing, &[("mount", Said::Errno(1))], &[]);
        let signed = key.sign(made.clone()).unwrap();
        let text = serde_json::to_string(&signed).unwrap();
        assert_eq!(verify(&text, &key.public()).unwrap(), made);

        let wrong = verify(&text, &other.public());
        assert!(matches!(wrong, Err(ReceiptFault::OtherKey { .. })), "{wrong:?}");
        let shown = text.replacen("EPERM", "EROFS", 1);
        assert!(matches!(verify(&shown, &key.public()), Err(ReceiptFault::Differs)));
        let mut forged = signed.clone();
        let envelope = forged.envelope.as_mut().unwrap();
        let payload = BASE64.decode(&envelope.payload).unwrap();
        let payload = String::from_utf8(payload).unwrap().replace("sbx-1", "sbx-2");
        envelope.payload = BASE64.encode(payload);
        let text = serde_json::to_string(&forged).unwrap();
        assert!(matches!(verify(&text, &key.public()), Err(ReceiptFault::Forged)));
        let bare = SignedReceipt { receipt: made, envelope: None };
        let text = serde_json::to_string(&bare).unwrap();
        assert!(matches!(verify(&text, &key.public()), Err(ReceiptFault::Unsigned)));
        for text in ["", "{}", "null", "[1]", &"x".repeat(MAX_RECEIPT + 1)] {
            assert!(matches!(verify(text, &key.public()), Err(ReceiptFault::NotOne(_))));
        }
        for public in ["", "-----BEGIN PUBLIC KEY-----", &std::fs::read_to_string(&path).unwrap()] {
            assert!(matches!(verify("{}", public), Err(ReceiptFault::Key)));
        }
    }

    #[test]
    fn a_key_that_others_can_read_or_that_is_none_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("receipt.key");
        ReceiptKey::open(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(ReceiptKey::open(&path).is_err());
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        ReceiptKey::open(&path).unwrap();
        std::fs::write(&path, "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
            .unwrap();
        assert!(ReceiptKey::open(&path).is_err());
    }
}
