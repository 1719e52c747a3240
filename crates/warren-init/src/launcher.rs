//! The launcher: copies itself into the namespaces of each new sandbox.
//!
//! It does what needs the privileges of whoever started Warren and must not happen in a process
//! with threads: the clone itself, the id maps, shifting the owners of mounts. When the library's
//! end of the socket closes it ends what was attached to the library and removes what that leaves.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Resource, Signal};
use warren_sys::heir::Heir;
use warren_sys::mount;
use warren_sys::process::{self, Fork, Namespaces, SingleThreaded};
use warren_sys::{cgroup, cred, fd, net, socket};

use crate::apply::{self, Go, Inherited};
use crate::names::Names;
use crate::plan::{INIT_ID, Identity, Lifetime, Owners, Plan, RANGE, Users, WORKLOAD_ID, Walls};
use crate::protocol::{self, Failure, Report};
use crate::warden;

/// Where the ranges of ids that are in use are noted, one byte each, by locks.
const IDS: &str = "/run/warren/ranges";
/// How many ranges one file there has: the kernel keeps the locks of a file in a list.
const FILE_RANGES: u32 = 1024;
/// The first id of the first range: above what distributions and container managers hand out.
const FIRST_ID: u32 = 0x7000_0000;
/// How many ranges there are before ids run out.
const RANGES: u32 = 0x8000;
/// How far the first ids of two ranges are apart. More than a range: the kernel finds what it knows of
/// a user in 128 lists, by `(uid >> 7) + uid`, and the same id of all ranges would be in one list.
const STRIDE: u32 = RANGE + 128;
/// Where the kernel says how many namespaces may be had from here.
const LIMITS: &str = "/proc/sys/user";
/// How long a control group may take to become empty after its last process was killed.
const PATIENCE: Duration = Duration::from_secs(10);

/// A sandbox that ends with the library.
struct Attached {
    /// To end it by, where no control group can be, and the signal that does it.
    pidfd: Option<(OwnedFd, Signal)>,
    /// What it has beside them.
    directory: Option<PathBuf>,
    cgroups: Vec<PathBuf>,
}

impl Attached {
    /// Reports whether nothing is left to be cleared up. The library removes the groups, unless it dies
    /// between the end of a sandbox and that.
    fn is_gone(&self) -> bool {
        match &self.pidfd {
            Some((pidfd, _)) => {
                let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
                let ended = poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0);
                ended && self.cgroups.iter().all(|group| !group.exists())
            }
            None => self.cgroups.iter().all(|group| !group.exists()),
        }
    }
}

struct Launcher {
    maker: Maker,
    attached: Vec<Attached>,
    /// When to look next which of them are gone: once they are twice as many as were left then.
    next_look: usize,
}

/// Makes sandboxes as children of this process.
#[derive(Debug)]
pub(crate) struct Maker {
    pub(crate) proof: SingleThreaded,
    next_range: u32,
    /// Whether this process is in an empty network namespace that nobody else has been in.
    network: bool,
    /// What hears who asks for names there.
    names: Option<Names>,
}

/// A sandbox that waits for its first word.
struct Made {
    child: Pid,
    pidfd: OwnedFd,
    base: Option<u32>,
    line: OwnedFd,
    parts: Parts,
}

/// What a new sandbox is given of the outside.
struct Parts {
    trees: Vec<OwnedFd>,
    shifted: bool,
    /// What it writes to so as to join its v1 control groups.
    doors: Vec<OwnedFd>,
}

impl Made {
    /// Lets it begin.
    fn go(&self) {
        let Parts { trees, shifted, doors } = &self.parts;
        let fds: Vec<_> = trees.iter().chain(doors).map(AsFd::as_fd).collect();
        let go = Go { shifted: *shifted, doors: doors.len() };
        // A child that is gone is found out by whoever waits for its report.
        let _ = protocol::send(&self.line, &go, &fds);
    }
}

/// A sandbox that is a child of this process, which has to reap it.
#[derive(Debug)]
pub struct Launched {
    /// PID 1 of the sandbox.
    pub pid: i32,
    /// The same, by descriptor.
    pub pidfd: OwnedFd,
    /// The first of its ids, if it has a range.
    pub base: Option<u32>,
}

/// Makes a sandbox as a child of this very process; whether it comes to stand is said on `control`.
///
/// For a small program that makes one and has no threads: a copy of it becomes init. While that makes
/// its namespaces, `meanwhile` is done here: it makes the v1 control groups of the plan. Should it fail,
/// nothing is left.
pub fn launch<E>(
    proof: SingleThreaded,
    plan: &Plan,
    control: &OwnedFd,
    listener: Option<OwnedFd>,
    meanwhile: impl FnOnce() -> Result<(), E>,
) -> Result<Result<Launched, E>, Failure> {
    let apart = || step("stand apart from", "the caller", stand_apart());
    let made = match Maker::new(proof).make(plan, control, listener, apart, meanwhile)? {
        Ok(made) => made,
        Err(error) => return Ok(Err(error)),
    };
    made.go();
    let Made { child, pidfd, base, .. } = made;
    Ok(Ok(Launched { pid: child.as_raw_nonzero().get(), pidfd, base }))
}

/// A process that removes control groups should this one die before it does so itself.
#[derive(Debug)]
pub enum Guard {
    /// It knows of groups alone.
    Heir(Heir),
    /// A copy of this process, which can do more.
    Copy {
        /// The process.
        child: Pid,
        /// There until the end.
        line: OwnedFd,
    },
}

impl Guard {
    /// Starts it, before the groups are made.
    ///
    /// With them goes the directory of a sandbox that has one.
    pub fn start(
        proof: &SingleThreaded,
        groups: Vec<PathBuf>,
        directory: Option<&Path>,
    ) -> io::Result<Self> {
        if directory.is_none() {
            return Ok(Self::Heir(Heir::start(proof, &groups)?));
        }
        let (ours, theirs) = socket::pair()?;
        match process::fork(proof, Namespaces::NONE, None)? {
            Fork::Child => {
                let _ = fd::close_all_except(&[&theirs]);
                let _ = rustix::process::setsid();
                process::ignore_group_signals();
                let _ = rustix::thread::set_name(c"warren-guard");
                while let Err(rustix::io::Errno::INTR) =
                    poll(&mut [PollFd::new(&theirs, PollFlags::IN)], None)
                {}
                remove_all(&groups);
                directory.into_iter().for_each(warden::remove_directory);
                process::exit_now(0)
            }
            Fork::Parent { child, .. } => Ok(Self::Copy { child, line: ours }),
        }
    }

    /// Lets it go: the groups are gone. One that is only dropped removes them, for as long as that takes.
    pub fn dismiss(self) {
        match self {
            Self::Heir(heir) => heir.dismiss(),
            Self::Copy { child, line: _line } => {
                let _ = process::signal_raw(child.as_raw_nonzero().get(), Signal::KILL.as_raw());
                let _ = process::reap(child);
            }
        }
    }
}

/// Ends what is in control groups and removes them.
pub(crate) fn remove_all(groups: &[PathBuf]) {
    for group in groups {
        let _ = cgroup::write(group, "cgroup.kill", "1");
    }
    for group in groups {
        let _ = cgroup::remove(group, PATIENCE);
    }
}

/// Leaves behind what a sandbox must not have of whoever started us.
pub(crate) fn stand_apart() -> io::Result<()> {
    // A signal meant for the group of the caller must not take the one away who clears up after it.
    let _ = rustix::process::setsid();
    process::ignore_group_signals();
    // A daemon may be spared when memory runs out; what it runs for others may not.
    bear_ones_share()?;
    // Where nothing may be raised, 0 stays 0: see `apply::lock_down` for what a sandbox wants of it.
    let _ = process::limit(Resource::Core, 1);
    Ok(())
}

/// Serves the library until it is gone, then clears up.
pub fn main() {
    // Nobody reads what this process would say; an error here shows at the library as a launcher
    // that is gone.
    let Ok(proof) = SingleThreaded::claim() else { return };
    if stand_apart().is_err() {
        return;
    }
    let Ok(client) = fd::inherited(0) else { return };
    // The kernel does it for us, and does not look through all of them for the one that ended.
    process::leave_reaping_to_the_kernel();
    let _ = rustix::thread::set_name(c"warren-launcher");
    let mut launcher = Launcher { maker: Maker::new(proof), attached: Vec::new(), next_look: 16 };
    launcher.serve(&client);
    launcher.clear_up();
}

impl Launcher {
    fn serve(&mut self, client: &OwnedFd) {
        loop {
            let mut fds = [PollFd::new(client, PollFlags::IN)];
            if poll(&mut fds, Some(&Timespec::default())) == Ok(0) {
                self.maker.prepare_network();
            }
            match poll(&mut [PollFd::new(client, PollFlags::IN)], None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
            match protocol::receive_trusted::<Plan>(client) {
                // Its socket and, if it is to be found again later, where it listens.
                Ok(Some((plan, mut fds))) if (1..=2).contains(&fds.len()) => {
                    let listener = (fds.len() == 2).then(|| fds.remove(1));
                    self.launch(&plan, &fds[0], listener);
                }
                // One request that did not fit, or whose descriptors did not, harms no other.
                // The one who asked sees its socket close.
                Ok(Some(_)) => {}
                Err(error) if is_about_one_message(&error) => {}
                Ok(None) | Err(_) => return,
            }
        }
    }

    /// Ends what was attached to the library and removes its control groups.
    fn clear_up(mut self) {
        // What has ended has removed its own.
        self.attached.retain(|attached| !attached.is_gone());
        let pidfds = self.attached.iter().flat_map(|attached| &attached.pidfd);
        for (pidfd, signal) in pidfds.clone() {
            let _ = rustix::process::pidfd_send_signal(pidfd, *signal);
        }
        for (pidfd, _) in pidfds {
            let _ = poll(&mut [PollFd::new(pidfd, PollFlags::IN)], None);
        }
        let groups = self.attached.iter().flat_map(|one| &one.cgroups).cloned();
        remove_all(&groups.collect::<Vec<_>>());
        let directories = self.attached.iter().flat_map(|one| &one.directory);
        directories.for_each(|directory| warden::remove_directory(directory));
    }

    /// Remembers a sandbox that ends with the library, and forgets those that are gone.
    fn attach(&mut self, plan: &Plan, pidfd: OwnedFd) {
        let directory = match &plan.walls {
            Walls::Namespaces | Walls::OwnKernel => None,
            Walls::Rules(rules) => Some(PathBuf::from(&rules.directory)),
        };
        let alone = plan.cgroups.v2.is_none() || directory.is_some();
        let pidfd = alone.then_some((pidfd, ends_by(&plan.walls)));
        let cgroups = plan.cgroups.v2.iter().chain(&plan.cgroups.v1).map(PathBuf::from).collect();
        self.attached.push(Attached { pidfd, directory, cgroups });
        if self.attached.len() >= self.next_look {
            self.attached.retain(|attached| !attached.is_gone());
            self.next_look = self.attached.len().max(8) * 2;
        }
    }

    /// Makes one sandbox; whatever goes wrong is said on `control`.
    fn launch(&mut self, plan: &Plan, control: &OwnedFd, listener: Option<OwnedFd>) {
        let nothing = || Ok::<(), Infallible>(());
        let made = match self.maker.make(plan, control, listener, || Ok(()), nothing) {
            Ok(Ok(made)) => made,
            Err(failure) => {
                // The library may have given up meanwhile.
                let _ = protocol::send(control, &Report::Failed(failure), &[]);
                return;
            }
        };
        let report = Report::Launched { pid: made.child.as_raw_nonzero().get(), base: made.base };
        // If the library is gone, the child finds out by itself.
        let _ = protocol::send(control, &report, &[made.pidfd.as_fd()]);
        made.go();
        if plan.lifetime == Lifetime::Attached {
            self.attach(plan, made.pidfd);
        }
    }
}

impl Maker {
    pub(crate) fn new(proof: SingleThreaded) -> Self {
        // Before Linux 6.4 these are read from a file that a sealed process may not open.
        let _ = (rustix::param::page_size(), rustix::param::clock_ticks_per_second());
        let next_range = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs() % RANGES;
        Self { proof, next_range, network: false, names: None }
    }

    /// Enters a network namespace that the next sandbox is born into. It takes longer to make than all
    /// others together, so that is for when there is nothing else to do. Without the right to it, a
    /// sandbox makes its own.
    fn prepare_network(&mut self) {
        let made = || process::new_network_namespace().and_then(|()| net::loopback_up());
        if !self.network && made().is_ok() {
            (self.network, self.names) = (true, Names::listen().ok());
        }
    }

    /// Makes one sandbox, which does what `first` says before all else, while `meanwhile` is done here.
    fn make<E>(
        &mut self,
        plan: &Plan,
        control: &OwnedFd,
        listener: Option<OwnedFd>,
        first: impl FnOnce() -> Result<(), Failure>,
        meanwhile: impl FnOnce() -> Result<(), E>,
    ) -> Result<Result<Made, E>, Failure> {
        let ids = match plan.identity {
            Identity::Range => Some(step("reserve a range of ids in", IDS, self.reserve_ids())?),
            Identity::Single { .. } => None,
        };
        let base = ids.as_ref().map(|(_, base)| *base);
        let group = step("open the control group", "", open_group(plan, base))?;
        let (line, theirs) = step("make a socket", "", socket::pair())?;
        // One that has rights over its network, or opens a door in it, has to be the one who makes it.
        let plain = plan.users == Users::One && plan.egress.is_none();
        let own = plain && plan.walls == Walls::Namespaces;
        let network = self.network && own;
        let cgroup = group.as_ref().map(AsFd::as_fd);
        let (namespaces, acts) = match plan.walls {
            Walls::Namespaces | Walls::OwnKernel => (Namespaces::SANDBOX, base.is_some()),
            Walls::Rules(_) => (Namespaces::NONE, false),
        };
        // What the sandbox uses up of the kernel's quotas for each user is to be missing nowhere else.
        let act_as = |id: u32| if acts { cred::act_as(id) } else { Ok(()) };
        step("act as", "the root of the sandbox", act_as(base.unwrap_or_default()))?;
        let forked = process::fork(&self.proof, namespaces, cgroup);
        if !matches!(forked, Ok(Fork::Child)) {
            step("act as", "root again", act_as(0))?;
        }
        let lacking = forked.as_ref().err().map(lacking_namespaces).unwrap_or_default();
        let (child, pidfd) = match step("create the namespaces", &lacking, forked)? {
            Fork::Child => {
                process::reap_again();
                let lock = ids.map(|(file, _)| OwnedFd::from(file));
                let names = self.names.take().filter(|_| network);
                let inherited = Inherited { work: group, listener, lock, network, names, base };
                match &plan.walls {
                    Walls::Namespaces | Walls::OwnKernel => {
                        apply::become_init(plan, control, &theirs, inherited, first())
                    }
                    Walls::Rules(rules) => {
                        let planned = (plan, rules);
                        let proof = &self.proof;
                        warden::become_warden(proof, planned, control, &theirs, inherited, first())
                    }
                }
            }
            Fork::Parent { child, pidfd } => (child, pidfd),
        };
        drop(theirs);
        // From now on it is the child's.
        if network {
            (self.network, self.names) = (false, None);
        }
        let furnished = meanwhile().map(|()| self.furnish(plan, base, child));
        if !matches!(furnished, Ok(Ok(_))) {
            let _ = rustix::process::pidfd_send_signal(&pidfd, Signal::KILL);
            let _ = process::reap(child);
        }
        match furnished {
            Ok(furnished) => Ok(Ok(Made { child, pidfd, base, line, parts: furnished? })),
            Err(error) => Ok(Err(error)),
        }
    }

    /// Does for a new child what needs the privileges of the outside.
    fn furnish(&self, plan: &Plan, base: Option<u32>, child: Pid) -> Result<Parts, Failure> {
        let open_doors = || {
            let doors = plan.cgroups.v1.iter().map(|group| step("open", group, open_door(group)));
            doors.collect::<Result<Vec<_>, _>>()
        };
        if let Walls::Rules(_) = plan.walls {
            return Ok(Parts { trees: Vec::new(), shifted: false, doors: open_doors()? });
        }
        step("map the ids of", "the sandbox", map_ids(child, plan.identity, base))?;
        let doors = open_doors()?;
        let (trees, shifted) = match base {
            Some(base) => {
                let namespace = user_namespace(child);
                let namespace = step("open the user namespace of", "the sandbox", namespace)?;
                self.shift_mounts(plan, base, &namespace)?
            }
            None => (Vec::new(), false),
        };
        Ok(Parts { trees, shifted, doors })
    }

    /// Clones every mount of the plan, with owners as the sandbox is to see them.
    pub(crate) fn shift_mounts(
        &self,
        plan: &Plan,
        base: u32,
        namespace: &OwnedFd,
    ) -> Result<(Vec<OwnedFd>, bool), Failure> {
        let mut owners = HashMap::new();
        let (mut trees, mut shifted) = (Vec::with_capacity(plan.mounts.len()), true);
        for planned in &plan.mounts {
            let source = &planned.source;
            let tree = step("open", source, apply::clone_source(planned))?;
            let namespace = match planned.owners {
                Owners::Nobody => None,
                Owners::Shifted => Some(namespace),
                Owners::Workload => {
                    // Of what was opened: by now the path may lead elsewhere.
                    let owner = rustix::fs::fstat(&tree).map_err(io::Error::from);
                    let owner = step("look at", source, owner)?;
                    let key = (owner.st_uid, owner.st_gid);
                    if let std::collections::hash_map::Entry::Vacant(entry) = owners.entry(key) {
                        let made = self.mapped_namespace(0, key, base + WORKLOAD_ID, 1);
                        entry.insert(step("map the owner of", source, made)?);
                    }
                    Some(&owners[&key])
                }
            };
            let attributes = apply::bind_attributes(planned);
            let namespace = namespace.map(AsFd::as_fd);
            match mount::restrict(tree.as_fd(), attributes, namespace) {
                Ok(()) => {}
                // The filesystem has no such thing. What is only read is still readable by its
                // permissions for others; what is to be written would belong to nobody.
                Err(_) if !planned.writable && namespace.is_some() => {
                    shifted = false;
                    step("restrict", source, mount::restrict(tree.as_fd(), attributes, None))?;
                }
                Err(error) => return step("shift the owners of", source, Err(error)),
            }
            trees.push(tree);
        }
        // Layers have the ids of the inside, so that one that cannot be shifted is of no use.
        for path in plan.root.layers() {
            let tree = step("open", path, mount::clone_tree_without_links(Path::new(path)))?;
            let restricted = mount::restrict(tree.as_fd(), apply::LAYER, Some(namespace.as_fd()));
            step("shift the owners of", path, restricted)?;
            trees.push(tree);
        }
        for path in plan.overlays.iter().map(|planned| &planned.source) {
            let tree = step("open", path, mount::clone_tree(Path::new(path)))?;
            let restricted = mount::restrict(tree.as_fd(), apply::LAYER, Some(namespace.as_fd()));
            step("shift the owners of", path, restricted)?;
            trees.push(tree);
        }
        Ok((trees, shifted))
    }

    /// Returns a user namespace that maps ids, from these on, to ids of the host, and is on the account of `owner`.
    pub(crate) fn mapped_namespace(
        &self,
        owner: u32,
        (uid, gid): (u32, u32),
        id: u32,
        count: u32,
    ) -> io::Result<OwnedFd> {
        let (ours, theirs) = socket::pair()?;
        let act_as = |id: u32| if owner == 0 { Ok(()) } else { cred::act_as(id) };
        act_as(owner)?;
        let forked = process::fork(&self.proof, Namespaces::USER, None);
        if !matches!(forked, Ok(Fork::Child)) {
            act_as(0)?;
        }
        match forked? {
            Fork::Child => {
                drop(ours);
                let _ = poll(&mut [PollFd::new(&theirs, PollFlags::IN)], None);
                process::exit_now(0)
            }
            Fork::Parent { child, pidfd } => {
                let made = write_map(child, "uid_map", uid, id, count)
                    .and_then(|()| write_map(child, "gid_map", gid, id, count))
                    .and_then(|()| user_namespace(child));
                let _ = rustix::process::pidfd_send_signal(&pidfd, Signal::KILL);
                let _ = process::reap(child);
                made
            }
        }
    }

    fn reserve_ids(&mut self) -> io::Result<(File, u32)> {
        let (file, range) = reserve_range(self.next_range)?;
        self.next_range = (range + 1) % RANGES;
        Ok((file, FIRST_ID + range * STRIDE))
    }
}

/// Finds a range of ids that nobody has, beginning to look at one, and holds it for as long as the file is
/// open anywhere; returns the first of its ids.
pub fn reserve_ids(first: u32) -> io::Result<(File, u32)> {
    let (file, range) = reserve_range(first % RANGES)?;
    Ok((file, FIRST_ID + range * STRIDE))
}

fn reserve_range(first: u32) -> io::Result<(File, u32)> {
    let (mut next, mut tried) = (first, 0);
    while tried < RANGES {
        // An open file of its own for each sandbox: the lock belongs to it.
        let file = open_ranges(next / FILE_RANGES)?;
        loop {
            let range = next;
            next = (range + 1) % RANGES;
            tried += 1;
            if fd::try_lock_byte(&file, i64::from(range % FILE_RANGES))? {
                return Ok((file, range));
            }
            if next.is_multiple_of(FILE_RANGES) {
                break;
            }
        }
    }
    Err(io::Error::from_raw_os_error(rustix::io::Errno::AGAIN.raw_os_error()))
}

/// Returns the signal at which the first process of a sandbox ends with all the others: the kernel sees to
/// it for PID 1 of a namespace, a warden does it itself.
pub fn ends_by(walls: &Walls) -> Signal {
    match walls {
        Walls::Namespaces | Walls::OwnKernel => Signal::KILL,
        Walls::Rules(_) => Signal::TERM,
    }
}

/// Opens one of the files in which ranges are noted. All are made with the first, and stay.
fn open_ranges(number: u32) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600).truncate(false);
    let open =
        |options: &std::fs::OpenOptions, number: u32| options.open(format!("{IDS}/{number}"));
    match open(&options, number) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            std::fs::create_dir_all(IDS)?;
            options.create(true);
            (0..RANGES / FILE_RANGES).try_for_each(|number| open(&options, number).map(drop))?;
            open(&options, number)
        }
        opened => opened,
    }
}

/// Gives up being spared by the OOM killer. Anybody may raise this; only root may lower it again.
fn bear_ones_share() -> io::Result<()> {
    const SCORE: &str = "/proc/self/oom_score_adj";
    if is_spared(&std::fs::read_to_string(SCORE)?) { std::fs::write(SCORE, "0") } else { Ok(()) }
}

/// Reports whether a score keeps the OOM killer away. A positive one is the caller's wish, and stays.
fn is_spared(score: &str) -> bool {
    score.trim_start().starts_with('-')
}

/// Tells an error that leaves the socket as good as before from one that ends the conversation.
pub(crate) fn is_about_one_message(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::InvalidData)
}

/// Names the step that failed.
pub(crate) fn step<T>(step: &str, path: &str, result: io::Result<T>) -> Result<T, Failure> {
    result.map_err(|error| Failure {
        step: step.to_owned(),
        path: path.to_owned(),
        errno: error.raw_os_error().unwrap_or_default(),
    })
}

/// Says which namespaces nobody here may have, as far as the kernel's limits are why: of all that were asked for at
/// once it says only that one is too many.
fn lacking_namespaces(error: &io::Error) -> String {
    if error.raw_os_error() != Some(rustix::io::Errno::NOSPC.raw_os_error()) {
        return String::new();
    }
    let most = |kind: &str| std::fs::read_to_string(format!("{LIMITS}/max_{kind}_namespaces"));
    let kinds = ["user", "mnt", "pid", "ipc", "uts"].into_iter();
    let none = kinds.filter(|kind| most(kind).is_ok_and(|most| most.trim() == "0"));
    let none: Vec<_> =
        none.map(|kind| format!("{kind} (user.max_{kind}_namespaces is 0)")).collect();
    none.join(", ")
}

/// Opens the v2 group of the plan and gives it to init, but none of the limits in it.
pub(crate) fn open_group(plan: &Plan, base: Option<u32>) -> io::Result<Option<OwnedFd>> {
    let Some(group) = plan.cgroups.v2.as_deref().map(Path::new) else { return Ok(None) };
    if let Some(base) = base {
        let id = Some(base + INIT_ID);
        // What it takes to make groups below, and to start commands in them.
        std::os::unix::fs::chown(group, id, id)?;
        std::os::unix::fs::chown(group.join("cgroup.procs"), id, id)?;
    }
    Ok(Some(File::open(group)?.into()))
}

/// Opens what a process writes to that joins a v1 group.
///
/// `tasks`, not `cgroup.procs`, and by the process itself: to move another, or one that may have
/// threads, the kernel waits for an RCU grace period, which takes milliseconds where a CPU is busy.
pub(crate) fn open_door(group: &str) -> io::Result<OwnedFd> {
    Ok(File::options().write(true).open(Path::new(group).join("tasks"))?.into())
}

fn map_ids(child: Pid, identity: Identity, base: Option<u32>) -> io::Result<()> {
    match (identity, base) {
        (Identity::Single { uid, gid }, _) => {
            // Without privileges a group can be mapped only by one who gave up setgroups(2).
            std::fs::write(proc_file(child, "setgroups"), "deny")?;
            write_map(child, "uid_map", WORKLOAD_ID, uid, 1)?;
            write_map(child, "gid_map", WORKLOAD_ID, gid, 1)
        }
        (Identity::Range, Some(base)) => {
            write_map(child, "uid_map", 0, base, RANGE)?;
            write_map(child, "gid_map", 0, base, RANGE)
        }
        (Identity::Range, None) => unreachable!("a range is reserved before it is mapped"),
    }
}

fn write_map(child: Pid, file: &str, inside: u32, outside: u32, count: u32) -> io::Result<()> {
    std::fs::write(proc_file(child, file), format!("{inside} {outside} {count}\n"))
}

fn user_namespace(child: Pid) -> io::Result<OwnedFd> {
    Ok(File::open(proc_file(child, "ns/user"))?.into())
}

/// A file of a child that waits for us; nobody else has its number so soon, should it be gone.
fn proc_file(child: Pid, file: &str) -> String {
    format!("/proc/{}/{file}", child.as_raw_nonzero())
}

/// Empties a signalfd.
pub(crate) fn drain(signals: &OwnedFd) {
    let mut buffer = [0; 1024];
    while rustix::io::read(signals, &mut buffer).is_ok_and(|length| length > 0) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_negative_score_is_raised() {
        assert!(is_spared("-1\n") && is_spared("-1000\n"));
        assert!(!is_spared("0\n") && !is_spared("500\n"));
    }
}
