//! What a sandbox is to be, in steps that need no more decisions.
//!
//! A [`Plan`] is decided outside, by somebody who knows the spec, the profile and the host, and
//! applied inside by init, which knows none of them. Paths are inside the sandbox unless their
//! name says `source`.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The user and group that commands run as, inside.
pub const WORKLOAD_ID: u32 = 1000;
/// The user and group that init keeps for itself where more than one id is mapped.
pub const INIT_ID: u32 = 998;
/// How many ids a sandbox has when it has a range of its own.
pub const RANGE: u32 = 65_536;

/// Everything needed to make one sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What `hostname` says.
    pub hostname: String,
    /// Which ids the sandbox has.
    pub identity: Identity,
    /// Which of them commands may have.
    pub users: Users,
    /// What becomes of it when the one who asked for it is gone.
    pub lifetime: Lifetime,
    /// The one bounded filesystem that holds everything it writes.
    pub scratch: Scratch,
    /// What its root stands on beside the skeleton.
    pub root: Root,
    /// Directories, files and links of its root, parents first.
    pub skeleton: Vec<Entry>,
    /// Parts of the host that seem writable: what is written to them goes to the scratch.
    pub overlays: Vec<Overlay>,
    /// What of the host it sees, outer targets first.
    pub mounts: Vec<Mount>,
    /// Names of the device nodes of the host that it gets in `/dev`.
    pub devices: Vec<String>,
    /// How its `/proc` looks.
    pub proc: Proc,
    /// The second wall behind the mounts.
    pub landlock: Landlock,
    /// The seccomp programs, each instruction as its eight bytes.
    pub filter: Filter,
    /// The control groups it is put in; they exist already.
    pub cgroups: Cgroups,
    /// Bounds that init has to keep itself.
    pub bounds: Bounds,
    /// What it is walled off by.
    pub walls: Walls,
    /// What is promised of its commands.
    pub promised: Promised,
    /// What it may ask to reach beyond itself, if anything.
    pub egress: Option<Egress>,
    /// Whether it is made before anybody asked for it: init does what no spec changes, and waits on its
    /// control socket for a plan that [`completes`](Plan::completes) this one.
    pub ahead: bool,
}

impl Plan {
    /// Reports whether a sandbox that was begun by another plan can become what this one says: they
    /// differ in nothing but what is done last.
    pub fn completes(&self, begun: &Self) -> bool {
        let Self {
            hostname,
            identity,
            users,
            lifetime,
            scratch,
            root,
            skeleton,
            overlays,
            mounts,
            devices,
            proc,
            walls,
            egress,
            // Whoever made them knows whether they are those that are wanted.
            cgroups: _,
            landlock: _,
            filter: _,
            bounds: _,
            promised: _,
            ahead: _,
        } = begun;
        // A filesystem that was made without a bound never gets one.
        let bounded = (self.scratch.bytes == 0) == (scratch.bytes == 0);
        bounded
            && (self.identity, self.users, self.lifetime) == (*identity, *users, *lifetime)
            && (&self.hostname, &self.root, &self.skeleton) == (hostname, root, skeleton)
            && (&self.overlays, &self.mounts, &self.devices) == (overlays, mounts, devices)
            && (&self.proc, &self.walls, &self.egress) == (proc, walls, egress)
    }
}

/// What a sandbox may ask to reach beyond itself.
///
/// No way leads out of its network all the same: what it connects to is init, which hands the connection to whoever
/// decides about it, outside. What is said here is only what init takes on for that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Egress {
    /// The names that get an address, as [`domain::matches`](crate::domain::matches) reads them.
    pub names: Vec<String>,
    /// The addresses that can be connected to beside those.
    pub ranges: Vec<Range>,
    /// Those of them that cannot, unless a longer range says otherwise.
    pub closed: Vec<Range>,
}

impl Egress {
    /// Reports whether there is nothing to connect to.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty() && self.ranges.is_empty()
    }
}

/// All addresses that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Range {
    /// One of them.
    pub address: IpAddr,
    /// How many bits.
    pub bits: u8,
}

/// What is promised of a sandbox's commands and the rest of its plan does not say; tried before it is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promised {
    /// That none traces another.
    pub no_tracing: bool,
    /// How many descriptors each of their processes may have.
    pub open_files: Option<u64>,
    /// That none has the place at this port of the host's own loopback, which is taken.
    pub host_port: Option<u16>,
    /// That none traces this process of the host.
    pub host_pid: Option<i32>,
}

/// What a sandbox is walled off by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Walls {
    /// Namespaces, with a root of its own; and rules behind them.
    #[default]
    Namespaces,
    /// Rules alone: it is made of processes of the host, and paths inside are those of the host.
    Rules(Rules),
    /// A kernel of its own, which a container runtime brings along: gVisor.
    OwnKernel,
}

/// The rules of a sandbox that has nothing else. Paths are those of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Its own directory, which is made with it and removed with it.
    pub directory: String,
    /// Where commands run, below its [`WORKSPACE`]; empty for that itself.
    pub workdir: String,
    /// What of the host's own may be read and executed, links and all.
    pub system: Vec<String>,
    /// What the caller shows to be read and executed. It may lie where a sandbox could write, so that a link on the way
    /// may be a trap, set after it was looked at: none is followed.
    pub readable: Vec<String>,
    /// Likewise, what may be written too.
    pub writable: Vec<String>,
    /// The most that one file may have.
    pub file_bytes: Option<u64>,
    /// What its marks begin with, so that they are no other sandbox's: less than 2 to the power of
    /// [`NONCE_BITS`].
    pub nonce: u64,
}

/// How many bits of a mark tell sandboxes apart.
pub const NONCE_BITS: u32 = 40;
/// How many bits of a mark tell commands apart.
pub const COMMAND_BITS: u32 = 20;

/// Below the directory of a sandbox without namespaces: where commands run.
pub const WORKSPACE: &str = "workspace";
/// Below it: their home.
pub const HOME: &str = "home";
/// Below it: what is of no worth.
pub const SCRATCH: &str = "tmp";

/// Which ids of the host the sandbox's ids are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Identity {
    /// [`RANGE`] ids that no other sandbox has, found by the launcher. Needs root.
    Range,
    /// One id, that of whoever starts it, as [`WORKLOAD_ID`].
    Single {
        /// The user of the host.
        uid: u32,
        /// The group of the host.
        gid: u32,
    },
}

impl Identity {
    /// Returns the id that init keeps as its real one.
    pub fn init_id(self) -> u32 {
        match self {
            Self::Range => INIT_ID,
            Self::Single { .. } => WORKLOAD_ID,
        }
    }
}

/// Which users commands may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Users {
    /// [`WORKLOAD_ID`] for good: nothing it executes is anybody else.
    One,
    /// Any but init's. Set-user-id programs of the sandbox's own root are what they say, and its root,
    /// which is nobody on the host, has these capabilities in the sandbox's own user namespace.
    Several {
        /// By the bits of capabilities(7).
        capabilities: u64,
    },
}

/// What becomes of a sandbox when the one who asked for it is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lifetime {
    /// It ends, and nothing of it is left.
    Attached,
    /// It goes on.
    Detached,
}

/// The size of what a sandbox may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scratch {
    /// Bytes; 0 for as much as the kernel gives by default.
    pub bytes: u64,
    /// Files and directories.
    pub inodes: u64,
}

/// The read-only layers of a root: directories of the host, the lowest first. Their owners are those
/// that they have inside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// Below the skeleton.
    pub below: Vec<String>,
    /// Above the skeleton: what was written before. With any of them `/tmp` is a part of the root,
    /// because they may hold some of it.
    pub above: Vec<String>,
}

impl Root {
    /// Returns all of them, the lowest first.
    pub fn layers(&self) -> impl Iterator<Item = &String> {
        self.below.iter().chain(&self.above)
    }
}

/// A directory of the host that seems writable, over which lies what layers have at the same place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// What, on the host.
    pub source: String,
    /// Where, inside; the skeleton has it.
    pub target: String,
    /// Whether what not everybody may read there is closed to the sandbox's root, too.
    pub veiled: bool,
}

/// The directory of the scratch that holds the skeleton.
pub const LOWER: &str = "lower";
/// The directory of the scratch that holds what was written to the root.
pub const UPPER: &str = "upper";
/// The directory of the scratch that holds what was written to `/tmp`, where it is not the root's.
pub const TMP: &str = "tmp";

/// The directory of the scratch that holds what was written to an overlay of the plan.
pub fn overlay_upper(index: usize) -> String {
    format!("{UPPER}-{index}")
}

/// The directory, for root alone, of what init needs to begin in a container.
pub const OWN_PLACE: &str = "/.warren";
/// Where init is in a container. The mount came with the root, so that nobody inside can take it away.
pub const OWN_PROGRAM: &str = "/.warren/init";
/// Where a container has a view of `/proc` for init, until that has taken hold of it.
pub const OWN_PROC: &str = "/.warren/proc";
/// Where a container with a kernel of its own has that kernel's control groups, until init has taken hold
/// of them: one for all commands, and one in which each has its own.
pub const OWN_GROUPS: [&str; 2] = ["/.warren/pids", "/.warren/cpu"];
/// Where root of the host finds what a container stands on, in the mounts of the one who guards it.
pub const STAGE: &str = "/run/warren/stage";
/// The user namespace that a container runtime is to put the container in: one on the account of the sandbox's own
/// user, where what a runtime makes would be on root's.
pub const STAGE_USERS: &str = "/run/warren/stage/users";
/// The directory of the stage that is the root of the container.
pub const STAGE_ROOT: &str = "/run/warren/stage/root";

/// A sandbox whose walls a container runtime puts up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// What it is to be; the runtime's configuration, in its bundle, says the same.
    pub plan: Plan,
    /// The first of its ids.
    pub base: u32,
    /// Its directory, which is removed last of all.
    pub bundle: String,
    /// What starts it, program and arguments.
    pub start: Vec<String>,
    /// What removes it once it has ended.
    pub delete: Vec<String>,
    /// Mounts of the host that the runtime is not to see.
    pub hidden: Vec<String>,
    /// All control groups that it or its runtime may have.
    pub groups: Vec<String>,
    /// Whether the runtime is started in the control groups of the plan, because it puts nothing in any itself.
    pub join: bool,
    /// How long the runtime may take, in milliseconds.
    pub patience_ms: u64,
}

/// The file of a bundle in which a runtime notes the first process.
pub const PID_FILE: &str = "pid";
/// The file of a bundle that what the runtime says goes to.
pub const LOG_FILE: &str = "log";
/// The file of a bundle whose first byte is locked by the one who guards the container.
pub const LOCK_FILE: &str = "lock";

/// One entry of the root that is there from the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Where.
    pub path: String,
    /// What.
    pub kind: EntryKind,
    /// Whose.
    pub owner: Owner,
}

/// What an entry is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryKind {
    /// A directory with these permissions.
    Directory(u32),
    /// A file with these contents that everybody may read.
    File(Vec<u8>),
    /// A symbolic link to this.
    Link(String),
    /// This very program, set-user-id; it goes by the name that it is called by.
    OwnProgram,
}

/// Whose an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Owner {
    /// Nobody's in particular: root's, where the sandbox has one.
    System,
    /// The commands'.
    Workload,
}

/// A part of the host that the sandbox sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// What, on the host.
    pub source: String,
    /// Where, inside; it must be there already, by the skeleton or by an earlier mount.
    pub target: String,
    /// Whether it can be changed.
    pub writable: bool,
    /// How its owners look inside, where the sandbox has a range of ids.
    pub owners: Owners,
}

/// How the owners of files of the host look inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Owners {
    /// Each id as the same id of the sandbox: root's files are the sandbox's root's.
    Shifted,
    /// The owner of the source as the commands' user, all others as nobody.
    Workload,
    /// All as nobody, over whose files the sandbox's root has no right.
    Nobody,
}

/// How `/proc` looks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proc {
    /// Files and directories that seem empty, below `/proc`; what the kernel lacks is passed over.
    pub masked: Vec<String>,
    /// What cannot be written, below `/proc`.
    pub read_only: Vec<String>,
    /// Whether it shows processes and nothing else.
    pub pids_only: bool,
}

/// The second wall behind the mounts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Landlock {
    /// Where writing is allowed; reading is allowed everywhere inside.
    pub writable: Vec<String>,
    /// Whether TCP may be used at all, inside the sandbox's own network.
    pub tcp: bool,
}

/// The seccomp programs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    /// In force on init and all it starts.
    pub init: Vec<u64>,
    /// In force, on top, on commands.
    pub workload: Vec<Vec<u64>>,
}

/// The control groups of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cgroups {
    /// Its directory in the v2 hierarchy. Init is in it, each command in a group somewhere below.
    pub v2: Option<String>,
    /// Its directories in v1 hierarchies.
    pub v1: Vec<String>,
    /// Whether the groups of commands are in one of their own, [`COMMANDS`], so that all of them are
    /// frozen by one write: not worth making for a single command.
    pub parted: bool,
}

/// The group below a sandbox's that holds the groups of its commands.
pub const COMMANDS: &str = "commands";

/// Bounds that init has to keep because no cgroup does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// Resident bytes of all commands together, looked at now and then.
    pub memory: Option<u64>,
    /// Processes and threads, by RLIMIT_NPROC, which counts in the sandbox's user namespace; on a kernel of
    /// its own by a control group there.
    pub processes: Option<u64>,
    /// How nice commands are to the rest of the host; 0 is the same as everybody.
    pub nice: i32,
}
