//! From a copy of the launcher to init: applies a plan, step by step, then locks the door.
//!
//! Everything is done by descriptor. Sources are opened before anything is mounted over; targets
//! are opened below the new root without following a link; nothing here takes a path below a
//! directory that a sandbox could have written.

use std::borrow::Cow;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Resource, Signal};
use serde::{Deserialize, Serialize};
use warren_sys::landlock::{self, Access, Kind, Ruleset};
use warren_sys::mount::{self, Attributes};
use warren_sys::{cred, fd, keyring, net, process};

use crate::account::{self, Census, Meter};
use crate::attempt::{self, NO_CAPABILITY, NO_KEYCTL, OWN_PROCESSES, holds};
use crate::gate::Gate;
use crate::launcher::step;
use crate::names::Names;
use crate::plan::{
    self, Entry, EntryKind, INIT_ID, Identity, Lifetime, OWN_PROC, Owner, Owners, Plan, Promised,
    Scratch, TMP, UPPER, Users, WORKLOAD_ID, Walls,
};
use crate::protocol::{self, Failure, Proof, Report, Word, tried};
use crate::refusals::Refusals;
use crate::sentry;
use crate::serve::{self, Kept};

/// What one who is put into a container is told; carries the control socket, the scratch and what
/// else is named.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Begin {
    pub(crate) plan: Plan,
    /// Whether all mounts have their owners shifted.
    pub(crate) shifted: bool,
    /// Whether its v2 control group comes next.
    pub(crate) work: bool,
    /// Whether the mark of its ids comes next.
    pub(crate) lock: bool,
    /// Whether what it listens on comes next.
    pub(crate) listener: bool,
    /// What it must not find, if it has a kernel of its own.
    pub(crate) outside: Outside,
}

/// What only the host is or has.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Outside {
    /// A path that is there.
    pub(crate) path: String,
    /// Which kernel it says that it is.
    pub(crate) kernel: String,
}

impl Outside {
    /// Says which kernel this is.
    pub(crate) fn kernel() -> String {
        let own = rustix::system::uname();
        format!("{} {}", own.release().to_string_lossy(), own.version().to_string_lossy())
    }
}

/// Goes on as init of a container whose walls a runtime has put up: descriptor 0 is the socket of the
/// one who had it put up.
pub(crate) fn become_contained() -> ! {
    let Ok(line) = fd::inherited(0) else { process::exit_now(1) };
    let _ = poll(&mut [PollFd::new(&line, PollFlags::IN)], None);
    let Ok(Some((begin, fds))) = protocol::receive_trusted::<Begin>(&line) else {
        process::exit_now(1)
    };
    if begin.plan.walls == Walls::OwnKernel {
        sentry::go_on(begin, line, fds);
    }
    // Its number is that of a standard stream, which is replaced below.
    std::mem::forget(line);
    let Begin { plan, shifted, work, lock, listener, .. } = begin;
    let mut fds = fds.into_iter();
    let (Some(control), Some(scratch)) = (fds.next(), fds.next()) else { process::exit_now(1) };
    let mut next = |is_there: bool| if is_there { fds.next() } else { None };
    let (work, lock, listener) = (next(work), next(lock), next(listener));
    let inherited = Inherited { work, listener, lock, network: true, names: None, base: None };
    let mut keep = vec![&control, &scratch];
    keep.extend([&inherited.work, &inherited.listener, &inherited.lock].into_iter().flatten());
    let closed = fd::close_all_except(&keep).and_then(|()| fd::occupy_streams(c"/dev/null"));
    process::ignore_group_signals();
    let ready = step("close what was inherited", "", closed)
        .and_then(|()| settle_in(&plan, shifted, inherited.work.as_ref(), &scratch));
    match ready {
        Ok((proof, settled)) => {
            let _ = protocol::send(&control, &Report::Ready(proof), &[]);
            let Settled { meter, census, refusals, names, gate } = settled;
            let inherited = Inherited { names, ..inherited };
            let scratch = Some(scratch);
            let kept = Kept { scratch, meter, census, refusals, gate, own: None, written: None };
            serve::serve(&plan, &control, inherited, kept)
        }
        Err(failure) => {
            let _ = protocol::send(&control, &Report::Failed(failure), &[]);
        }
    }
    process::exit_now(1)
}

/// What init has in a container, when it has settled in.
struct Settled {
    meter: Meter,
    census: Census,
    refusals: Option<Refusals>,
    names: Option<Names>,
    gate: Option<Gate>,
}

/// Does in a container what its runtime leaves to be done, and tries what it did.
fn settle_in(
    plan: &Plan,
    shifted: bool,
    work: Option<&OwnedFd>,
    scratch: &OwnedFd,
) -> Result<(Proof, Settled), Failure> {
    rustix::process::umask(Mode::empty());
    let meter = step("open", "/proc/self/io", Meter::open())?;
    step("leave the groups of", "the runtime", cred::leave_groups())?;
    // First: in a network that is not its own it could not do the next step.
    let network = attempt::network(plan.promised.host_port)?;
    step("bring up", "lo", net::loopback_up())?;
    let names = listen_for_names(plan)?;
    let gate = plan.egress.as_ref().map(Gate::open).transpose()?;
    let census = step("open", OWN_PROC, take_census(Census::of))?;
    hide_boot_id(plan)?;
    step("clear", "/dev", forget_masks(plan, scratch.as_fd()))?;
    step("restrict", "/dev", mount::restrict_only("/dev", DEV_ATTRIBUTES))?;
    step("open", "/dev/null", quiet_streams())?;
    let tried = network | attempt::proc(plan)? | attempt::as_command(plan)?;
    let refusals = lock_down(plan, work, &census)?;
    // The scratch is mounted nowhere inside, so that only Landlock keeps one out who holds it.
    let tried = tried | prove(plan, scratch, tried::UNMOUNTED)?;
    let landlock_abi = landlock::abi().unwrap_or_default();
    let proof = Proof { landlock_abi, owners_shifted: shifted, tried };
    Ok((proof, Settled { meter, census, refusals, names, gate }))
}

/// Listens to who asks for names, in a network that is the sandbox's own by now.
///
/// Not a promise, unless some may be reached: where it cannot be, nobody is told which names were asked for. Nor where
/// commands have rights over their network, and may want to have a name server there.
fn listen_for_names(plan: &Plan) -> Result<Option<Names>, Failure> {
    match (&plan.egress, plan.users) {
        (Some(_), _) => step("listen for", "names", Names::listen()).map(Some),
        (None, Users::One) => Ok(Names::listen().ok()),
        (None, Users::Several { .. }) => Ok(None),
    }
}

/// Takes hold of the view of `/proc` that the runtime mounted for init alone, and of its name.
pub(crate) fn take_census(census: fn(OwnedFd) -> Census) -> io::Result<Census> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let proc = rustix::fs::open(OWN_PROC, flags, Mode::empty())?;
    mount::detach(OWN_PROC)?;
    Ok(census(proc))
}

/// What the launcher says when the child may begin; carries the mounts it prepared, and what the child
/// writes to so as to join its v1 control groups.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Go {
    /// Whether all of the mounts have their owners shifted.
    pub(crate) shifted: bool,
    /// How many groups there are.
    pub(crate) doors: usize,
}

/// What init keeps of the launcher's descriptors.
#[derive(Debug)]
pub(crate) struct Inherited {
    /// Its v2 control group.
    pub(crate) work: Option<OwnedFd>,
    /// Where it can be found after the one who asked for it is gone.
    pub(crate) listener: Option<OwnedFd>,
    /// The mark that its ids are in use; it holds as long as it is open.
    pub(crate) lock: Option<OwnedFd>,
    /// Whether it was born into a network namespace of its own.
    pub(crate) network: bool,
    /// What hears who asks for names there, if anything does.
    pub(crate) names: Option<Names>,
    /// The first of its ids on the host, if it has a range.
    pub(crate) base: Option<u32>,
}

/// Goes on as init of a new sandbox, in a fresh copy of the launcher, if it got so far. Does not
/// return.
pub(crate) fn become_init(
    plan: &Plan,
    control: &OwnedFd,
    go: &OwnedFd,
    mut inherited: Inherited,
    so_far: Result<(), Failure>,
) -> ! {
    let mut keep = vec![control, go];
    keep.extend([&inherited.work, &inherited.listener, &inherited.lock].into_iter().flatten());
    keep.extend(inherited.names.as_ref().map(Names::socket));
    let closed = fd::close_all_except(&keep).and_then(|()| fd::occupy_streams(c"/dev/null"));
    let closed = step("close what was inherited", "", closed);
    let walled = so_far.and(closed).and_then(|()| {
        if inherited.network {
            return Ok(());
        }
        // While the launcher does its part: this takes longer than all that.
        step("create the network namespace", "", process::new_network_namespace())?;
        step("bring up", "lo", net::loopback_up())?;
        inherited.names = listen_for_names(plan)?;
        Ok(())
    });
    let begun = walled.and_then(|()| {
        let (go, mut trees) = step("wait for the launcher", "", wait_for_go(go))?;
        // Closed behind it: they lead to the host.
        for door in trees.split_off(trees.len().saturating_sub(go.doors)) {
            let joined = rustix::io::write(&door, b"0").map_err(io::Error::from);
            step("join", "a control group", joined)?;
        }
        begin(plan, trees, go.shifted)
    });
    let ready = begun.and_then(|mut begun| {
        let plan = match plan.ahead {
            true => {
                inherited.work.iter().for_each(|group| account::part_ahead(plan, group));
                Cow::Owned(wait_for_rest(control, &mut begun)?)
            }
            false => Cow::Borrowed(plan),
        };
        Ok((finish(&plan, begun, inherited.work.as_ref())?, plan))
    });
    match ready {
        Ok(((proof, kept), plan)) => {
            let _ = protocol::send(control, &Report::Ready(proof), &[]);
            // Whoever waited for it goes first.
            rustix::thread::sched_yield();
            serve::serve(&plan, control, inherited, kept)
        }
        Err(failure) => {
            let _ = protocol::send(control, &Report::Failed(failure), &[]);
        }
    }
    process::exit_now(1)
}

/// Waits for what one that was begun ahead is to be, as long as there is anybody to say so, and tries meanwhile what it
/// is told to.
fn wait_for_rest(control: &OwnedFd, begun: &mut Begun) -> Result<Plan, Failure> {
    loop {
        match step("wait for", "the rest of the plan", next_word(control))? {
            Word::Exceed(lowered) => begun.tried |= attempt::exceed(lowered)?,
            Word::Become(plan) => return Ok(*plan),
        }
    }
}

fn next_word(control: &OwnedFd) -> io::Result<Word> {
    protocol::send(control, &Report::Waiting, &[])?;
    poll(&mut [PollFd::new(control, PollFlags::IN)], None)?;
    let received = protocol::receive_trusted(control)?;
    received.map(|(word, _)| word).ok_or_else(|| io::ErrorKind::BrokenPipe.into())
}

pub(crate) fn wait_for_go(go: &OwnedFd) -> io::Result<(Go, Vec<OwnedFd>)> {
    poll(&mut [PollFd::new(go, PollFlags::IN)], None)?;
    protocol::receive_trusted(go)?.ok_or_else(|| io::ErrorKind::BrokenPipe.into())
}

/// Returns what a part of the host may not do inside.
pub(crate) fn bind_attributes(planned: &plan::Mount) -> Attributes {
    Attributes { read_only: !planned.writable, no_devices: true, ..Attributes::default() }
}

/// What a layer may not do inside.
pub(crate) const LAYER: Attributes =
    Attributes { read_only: true, no_devices: true, no_exec: false, set_ids: false };

/// Clones a part of the host. What the caller binds may lie where a sandbox could write, so that a
/// link on the way may be a trap; what the profile shows is the host's own, links and all.
pub(crate) fn clone_source(planned: &plan::Mount) -> io::Result<OwnedFd> {
    let source = Path::new(&planned.source);
    match planned.owners {
        Owners::Workload => mount::clone_tree_without_links(source),
        Owners::Shifted | Owners::Nobody => mount::clone_tree(source),
    }
}

/// A sandbox that has all but its limits and its locks.
struct Begun {
    scratch: OwnedFd,
    size: Scratch,
    meter: Meter,
    census: Census,
    /// The old root, which must be out of reach even for one who holds it.
    outside: OwnedFd,
    /// What was tried so far.
    tried: u32,
    /// The way to what may be reached.
    gate: Option<Gate>,
    /// What was tried from where a command stands, and with which filters and limits.
    trial: Option<(u32, Vec<Vec<u64>>, Promised)>,
    shifted: bool,
}

/// Does what needs rights: the namespaces, the root and all that is mounted in it.
fn begin(plan: &Plan, trees: Vec<OwnedFd>, shifted: bool) -> Result<Begun, Failure> {
    // What is made here has exactly the mode that is meant.
    rustix::process::umask(Mode::empty());
    // Before the first change of identity, which makes it root's of the host.
    let meter = step("open", "/proc/self/io", Meter::open())?;
    if plan.identity == Identity::Range {
        step("leave the groups of", "the launcher", cred::leave_groups())?;
        step("become", "root of the sandbox", cred::become_only(0))?;
    }
    if let Identity::Single { .. } = plan.identity {
        leave_inotify_to_others();
    }
    step("create the cgroup namespace", "", process::new_cgroup_namespace())?;
    step("make the mounts private", "/", mount::make_private())?;
    let trees = match plan.identity {
        Identity::Range => trees,
        Identity::Single { .. } => clone_sources(plan)?,
    };
    // Opened now, tried at the end.
    let outside = step("open", "/", mount::open_place(CWD, c"/"))?;
    // Overlay takes only layers that are mounted somewhere. This place vanishes with the old root.
    let place = step("open", "/dev", mount::open_place(CWD, c"/dev"))?;
    let (root, scratch) = build_root(plan, &trees, place.as_fd(), Ids::inside(plan))?;
    mount_proc(plan, root.as_fd())?;
    drop(trees);
    let census = step("mount", "init's own /proc", new_census())?;
    step("set the host name", &plan.hostname, set_hostname(&plan.hostname))?;
    // Before there is a door: the namespace alone is to be tried.
    let network = attempt::network(plan.promised.host_port)?;
    let gate = plan.egress.as_ref().map(Gate::open).transpose()?;
    step("enter the new root", "", mount::pivot_to(root.as_fd()))?;
    drop(root);
    mask_proc(plan)?;
    step("clear", "/dev", forget_masks(plan, scratch.as_fd()))?;
    step("open", "/dev/null", quiet_streams())?;
    let tried = network | attempt::proc(plan)?;
    // Nobody waits for one that is made ahead.
    let trial = match plan.ahead {
        true => Some((attempt::as_command(plan)?, plan.filter.workload.clone(), plan.promised)),
        false => None,
    };
    let size = plan.scratch;
    Ok(Begun { scratch, size, meter, census, outside, tried, gate, trial, shifted })
}

/// Gives up all rights, and tries what must fail then.
fn finish(plan: &Plan, begun: Begun, work: Option<&OwnedFd>) -> Result<(Proof, Kept), Failure> {
    let Begun { scratch, size, meter, census, outside, tried, gate, trial, shifted } = begun;
    if plan.scratch != size {
        step("resize", "the writable layer", resize(scratch.as_fd(), plan.scratch))?;
    }
    let refusals = lock_down(plan, work, &census)?;
    let same = |(_, filters, promised): &(u32, Vec<Vec<u64>>, Promised)| {
        *filters == plan.filter.workload && *promised == plan.promised
    };
    let trial = trial.filter(same).map_or(0, |(bits, ..)| bits);
    let tried = tried | trial | prove(plan, &outside, tried::LANDLOCK)?;
    let landlock_abi = landlock::abi().unwrap_or_default();
    let proof = Proof { landlock_abi, owners_shifted: shifted, tried };
    let scratch = Some(scratch);
    Ok((proof, Kept { scratch, meter, census, refusals, gate, own: None, written: None }))
}

/// Bounds what the sandbox takes of the inotify quota of the one user that it and its caller are.
///
/// Not a promise: where a container shows this file read-only, the user's own quota is the bound.
fn leave_inotify_to_others() {
    for (file, most) in [("max_inotify_instances", "32"), ("max_inotify_watches", "65536")] {
        let _ = std::fs::write(format!("/proc/sys/user/{file}"), most);
    }
}

fn set_hostname(name: &str) -> io::Result<()> {
    Ok(rustix::system::sethostname(name.as_bytes())?)
}

/// Clones the mounts of the plan and its layers, where no launcher with more rights did.
fn clone_sources(plan: &Plan) -> Result<Vec<OwnedFd>, Failure> {
    let restricted = |source: &String, tree: io::Result<OwnedFd>, attributes| {
        let tree = step("open", source, tree)?;
        step("restrict", source, mount::restrict(tree.as_fd(), attributes, None))?;
        Ok(tree)
    };
    let mounts = plan.mounts.iter().map(|planned| {
        restricted(&planned.source, clone_source(planned), bind_attributes(planned))
    });
    let layers = plan.root.layers();
    let layers = layers
        .map(|path| restricted(path, mount::clone_tree_without_links(Path::new(path)), LAYER));
    let shown = plan.overlays.iter().map(|planned| &planned.source);
    let shown = shown.map(|path| restricted(path, mount::clone_tree(Path::new(path)), LAYER));
    mounts.chain(layers).chain(shown).collect()
}

/// Mounts the whole root of the sandbox and returns it, with what holds all that is written to it; the
/// old one is still in place. The trees are those of the mounts, the layers and the overlays.
///
/// `place` is where the scratch is attached; there is no `/proc` in it yet.
pub(crate) fn build_root(
    plan: &Plan,
    trees: &[OwnedFd],
    place: BorrowedFd<'_>,
    ids: Ids,
) -> Result<(OwnedFd, OwnedFd), Failure> {
    let (mounts, trees) = trees.split_at(plan.mounts.len().min(trees.len()));
    let (layers, shown) = trees.split_at(plan.root.layers().count().min(trees.len()));
    let devices = clone_devices(plan)?;
    let scratch = step("mount a tmpfs for", "the writable layer", new_scratch(plan, ids))?;
    step("attach", "the writable layer", mount::attach(scratch.as_fd(), place))?;
    for (name, mode) in SCRATCH {
        step("create", name, make_directory(scratch.as_fd(), name, mode, ids.of(Owner::System)))?;
    }
    furnish(plan, scratch.as_fd(), ids)?;
    let mut stack = Stack { scratch: scratch.as_fd(), next: 0, ids };
    let lowest = stack.push_all(&layers[..plan.root.below.len()])?;
    let changes = stack.push_all(&layers[plan.root.below.len()..])?;
    let lower = ["lower".to_owned()];
    let lowers = lowest.iter().chain(&lower).chain(&changes);
    if let Some(top) = layers[plan.root.below.len()..].last() {
        step("be like", "the last layer", be_like(scratch.as_fd(), UPPER, top.as_fd()))?;
    }
    let made = new_overlay(scratch.as_fd(), lowers, UPPER, "work", plan.users);
    let root = step("mount the overlay on", "/", made)?;
    let place = step("open", "root", mount::target(scratch.as_fd(), "root"))?;
    step("attach", "/", mount::attach(root.as_fd(), place.as_fd()))?;

    let root_fd = root.as_fd();
    // Before the mounts of the plan, some of which may be below these.
    mount_dev(plan, root_fd, scratch.as_fd(), &devices, ids)?;
    if plan.root.above.is_empty() {
        let tmp = step("clone", "/tmp", mount::clone_at(scratch.as_fd(), TMP))?;
        attach_at(root_fd, "/tmp", &tmp)?;
    }
    for (index, (planned, tree)) in plan.overlays.iter().zip(shown).enumerate() {
        let overlay = writable_view(plan, &mut stack, index, tree, layers)?;
        attach_at(root_fd, &planned.target, &overlay)?;
    }
    for (planned, tree) in plan.mounts.iter().zip(mounts) {
        attach_at(root_fd, &planned.target, tree)?;
    }
    Ok((root, scratch))
}

/// Where layers are mounted so that overlays can take them: directories of the scratch, named by
/// numbers, because the kernel takes no more than 255 bytes of names.
struct Stack<'a> {
    scratch: BorrowedFd<'a>,
    next: u32,
    ids: Ids,
}

/// Whose what is made for a sandbox is, by the ids of the one who makes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ids {
    /// The id of the sandbox's root; 0 for one who is it.
    base: u32,
    /// Whether commands have an id of their own.
    apart: bool,
}

impl Ids {
    /// For one who has the ids of the sandbox.
    fn inside(plan: &Plan) -> Self {
        Self { base: 0, apart: plan.identity == Identity::Range }
    }

    /// For root of the host, where the sandbox's ids begin at `base`.
    pub(crate) fn outside(base: u32) -> Self {
        Self { base, apart: true }
    }

    /// Returns whom something has to be given to, unless it is theirs already.
    pub(crate) fn of(self, owner: Owner) -> Option<u32> {
        match owner {
            Owner::Workload if self.apart => Some(self.base + WORKLOAD_ID),
            Owner::Workload | Owner::System => (self.base > 0).then_some(self.base),
        }
    }
}

impl Stack<'_> {
    fn push(&mut self, tree: BorrowedFd<'_>) -> io::Result<String> {
        let name = self.next.to_string();
        self.next += 1;
        make_directory(self.scratch, &name, 0o700, self.ids.of(Owner::System))?;
        mount::attach(tree, mount::target(self.scratch, &name)?.as_fd())?;
        Ok(name)
    }

    fn push_all(&mut self, trees: &[OwnedFd]) -> Result<Vec<String>, Failure> {
        let push = |tree: &OwnedFd| step("attach", "a layer", self.push(tree.as_fd()));
        trees.iter().map(push).collect()
    }
}

/// Mounts an overlay of a part of the host and of what the layers of the root have there.
fn writable_view(
    plan: &Plan,
    stack: &mut Stack<'_>,
    index: usize,
    tree: &OwnedFd,
    layers: &[OwnedFd],
) -> Result<OwnedFd, Failure> {
    let (scratch, planned) = (stack.scratch, &plan.overlays[index]);
    let mut lowers = vec![step("attach", &planned.source, stack.push(tree.as_fd()))?];
    if planned.veiled {
        let veil =
            step("mount a veil over", &planned.source, new_veil(scratch, &lowers[0], stack.ids))?;
        lowers = vec![step("attach", &planned.source, stack.push(veil.as_fd()))?];
    }
    let below = format!("{}/", planned.target);
    if plan.skeleton.iter().any(|entry| entry.path.starts_with(&below)) {
        lowers.push(format!("lower{}", planned.target));
    }
    let mut top = step("clone", &planned.source, tree.try_clone())?;
    for layer in layers {
        // Whoever wrote a layer may have put anything there; only a directory has a say.
        let Ok(place) = mount::target(layer.as_fd(), &planned.target) else { continue };
        let is_dir = rustix::fs::fstat(&place)
            .is_ok_and(|found| rustix::fs::FileType::from_raw_mode(found.st_mode).is_dir());
        if is_dir {
            top = step("clone", &planned.target, mount::clone_place(place.as_fd()))?;
            lowers.push(step("attach", &planned.target, stack.push(top.as_fd()))?);
        }
    }
    let (upper, work) = (plan::overlay_upper(index), format!("work-{index}"));
    for (name, mode) in [(&upper, 0o755), (&work, 0o700)] {
        step("create", name, make_directory(scratch, name, mode, stack.ids.of(Owner::System)))?;
    }
    step("be like", &planned.target, be_like(scratch, &upper, top.as_fd()))?;
    let made = new_overlay(scratch, lowers.iter(), &upper, &work, plan.users);
    step("mount the overlay on", &planned.target, made)
}

/// Gives a directory of the scratch the owner, mode and times of another, which it will stand for.
fn be_like(scratch: BorrowedFd<'_>, name: &str, other: BorrowedFd<'_>) -> io::Result<()> {
    let like = rustix::fs::fstat(other)?;
    let (uid, gid) =
        (rustix::fs::Uid::from_raw(like.st_uid), rustix::fs::Gid::from_raw(like.st_gid));
    // One that has no id inside stays whose it is.
    let _ = rustix::fs::chownat(scratch, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW);
    let mode = Mode::from_raw_mode(like.st_mode & 0o7777);
    Ok(rustix::fs::chmodat(scratch, name, mode, AtFlags::empty())?)
}

/// What becomes `/dev`.
const DEV: &str = "dev";
/// Read-only still lets a device be written; it keeps its mode and owner as they are.
const DEV_ATTRIBUTES: Attributes =
    Attributes { read_only: true, no_exec: true, no_devices: false, set_ids: false };
/// What a sandbox with several users reads as its boot id.
const BOOT_ID: &str = "/dev/.boot-id";

/// The directories of the scratch filesystem.
const SCRATCH: [(&str, u32); 8] = [
    ("lower", 0o755),
    (UPPER, 0o755),
    ("work", 0o700),
    ("root", 0o755),
    (DEV, 0o755),
    // What stands for a directory that is masked.
    ("dev/.empty", 0o555),
    (TMP, 0o1777),
    ("shm", 0o1777),
];

fn new_scratch(plan: &Plan, ids: Ids) -> io::Result<OwnedFd> {
    let (bytes, inodes) = (plan.scratch.bytes.to_string(), plan.scratch.inodes.to_string());
    let owner = ids.base.to_string();
    let mut options = vec![("mode", "0755"), ("nr_inodes", inodes.as_str())];
    if ids.base > 0 {
        options.extend([("uid", owner.as_str()), ("gid", owner.as_str())]);
    }
    if plan.scratch.bytes > 0 {
        options.push(("size", &bytes));
    }
    mount::new("tmpfs", &options, &[], Attributes { no_devices: true, ..Attributes::default() })
}

/// Bounds what was mounted before anybody knew how much the sandbox may write.
fn resize(scratch: BorrowedFd<'_>, size: Scratch) -> io::Result<()> {
    let (bytes, inodes) = (size.bytes.to_string(), size.inodes.to_string());
    let mut options = vec![("nr_inodes", inodes.as_str())];
    if size.bytes > 0 {
        options.push(("size", &bytes));
    }
    mount::reconfigure(scratch, &options)
}

fn new_overlay<'a>(
    scratch: BorrowedFd<'_>,
    lowers: impl DoubleEndedIterator<Item = &'a String>,
    upper: &str,
    work: &str,
    users: Users,
) -> io::Result<OwnedFd> {
    // The layers are named relative to the working directory, so that no path is walked that was
    // not made just now.
    rustix::process::fchdir(scratch)?;
    // The kernel wants the highest first.
    let lowers = lowers.rev().map(String::as_str).collect::<Vec<_>>().join(":");
    let layers = [("lowerdir", lowers.as_str()), ("upperdir", upper), ("workdir", work)];
    let set_ids = matches!(users, Users::Several { .. });
    let attributes = Attributes { no_devices: true, set_ids, ..Attributes::default() };
    mount::new("overlay", &layers, &["userxattr"], attributes)
}

/// Mounts a view of a part of the host in which nobody may more than everybody may on the host.
///
/// Its files are those of the sandbox's root, as they must be for root to replace them, and root looks
/// past the rights of its own files. But overlay asks twice: what it shows, for the one who asks, and
/// what is below, for the one who mounted it. Who mounts this is neither root nor in its group.
fn new_veil(scratch: BorrowedFd<'_>, name: &str, ids: Ids) -> io::Result<OwnedFd> {
    rustix::process::fchdir(scratch)?;
    // Without an upper layer the kernel wants two; the other one is empty.
    let layers = format!("{name}:dev/.empty");
    let attributes = Attributes { read_only: true, no_devices: true, ..Attributes::default() };
    cred::with_files_as(ids.base + INIT_ID, || {
        mount::new("overlay", &[("lowerdir", &layers)], &["userxattr"], attributes)
    })
}

pub(crate) fn attach_at(root: BorrowedFd<'_>, path: &str, tree: &OwnedFd) -> Result<(), Failure> {
    let target = step("open the mount target", path, mount::target(root, path))?;
    step("mount", path, mount::attach(tree.as_fd(), target.as_fd()))
}

/// Makes the entries of the plan in the lower layer.
fn furnish(plan: &Plan, scratch: BorrowedFd<'_>, ids: Ids) -> Result<(), Failure> {
    let lower = step("open", "lower", mount::target(scratch, "lower"))?;
    for entry in &plan.skeleton {
        // `/tmp` may be a mount of its own, over the entry of that name in the lower layer.
        let own_tmp = plan.root.above.is_empty() && entry.path.starts_with("/tmp/");
        let own_dev = entry.path.starts_with("/dev/");
        let place = if own_tmp || own_dev { scratch } else { lower.as_fd() };
        step("create", &entry.path, make_entry(place, entry, ids))?;
    }
    Ok(())
}

fn make_entry(lower: BorrowedFd<'_>, entry: &Entry, ids: Ids) -> io::Result<()> {
    let path = entry.path.trim_start_matches('/');
    let owner = ids.of(entry.owner);
    match &entry.kind {
        EntryKind::Directory(mode) => make_directory(lower, path, *mode, owner),
        EntryKind::Link(target) => {
            rustix::fs::symlinkat(target.as_str(), lower, path)?;
            give(lower, path, ids.of(Owner::System))
        }
        EntryKind::File(contents) => {
            make_file(lower, path, contents, 0o644)?;
            give(lower, path, ids.of(Owner::System))
        }
        EntryKind::OwnProgram => {
            make_file(lower, path, &own_program()?, 0o755)?;
            // Before its mode: a change of owner takes set-user-id away.
            give(lower, path, ids.of(Owner::System))?;
            let mode = Mode::from_raw_mode(0o4755);
            Ok(rustix::fs::chmodat(lower, path, mode, AtFlags::empty())?)
        }
    }
}

/// Returns the program that this code is in, or has embedded.
#[cfg(not(warren_init_image))]
pub(crate) fn own_program() -> io::Result<std::borrow::Cow<'static, [u8]>> {
    Ok(crate::IMAGE.into())
}

/// Returns this program. It runs from a sealed memory file: what is read is what was embedded.
#[cfg(warren_init_image)]
pub(crate) fn own_program() -> io::Result<std::borrow::Cow<'static, [u8]>> {
    std::fs::read("/proc/self/exe").map(Into::into)
}

pub(crate) fn make_file(
    parent: BorrowedFd<'_>,
    path: &str,
    contents: &[u8],
    mode: u32,
) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(parent, path, flags, Mode::from_raw_mode(mode))?;
    io::Write::write_all(&mut std::fs::File::from(file), contents)
}

fn make_directory(
    parent: BorrowedFd<'_>,
    path: &str,
    mode: u32,
    owner: Option<u32>,
) -> io::Result<()> {
    rustix::fs::mkdirat(parent, path, Mode::from_raw_mode(mode))?;
    give(parent, path, owner)
}

/// Makes somebody the owner, if anybody is named.
pub(crate) fn give(parent: BorrowedFd<'_>, path: &str, owner: Option<u32>) -> io::Result<()> {
    if let Some(id) = owner {
        let (uid, gid) = (rustix::fs::Uid::from_raw(id), rustix::fs::Gid::from_raw(id));
        rustix::fs::chownat(parent, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}

fn clone_devices(plan: &Plan) -> Result<Vec<OwnedFd>, Failure> {
    let clone = |name: &String| {
        let path = format!("/dev/{name}");
        step("open", &path, mount::clone_tree(Path::new(&path)))
    };
    plan.devices.iter().map(clone).collect()
}

fn mount_dev(
    plan: &Plan,
    root: BorrowedFd<'_>,
    scratch: BorrowedFd<'_>,
    devices: &[OwnedFd],
    ids: Ids,
) -> Result<(), Failure> {
    // Not in the overlay, where each name takes longer to be found.
    let dev = step("clone", "/dev", mount::clone_at(scratch, DEV))?;
    attach_at(root, "/dev", &dev)?;
    let attach = |tree: &OwnedFd, name: &str| {
        step("mount", name, mount::attach_in(tree.as_fd(), dev.as_fd(), name))
    };
    for (name, tree) in plan.devices.iter().zip(devices) {
        attach(tree, name)?;
    }
    if let Users::Several { .. } = plan.users {
        step("create", BOOT_ID, make_file(scratch, &BOOT_ID[1..], &new_boot_id(), 0o444))?;
        step("give away", BOOT_ID, give(scratch, &BOOT_ID[1..], ids.of(Owner::System)))?;
    }
    let restrict = |tree: &OwnedFd| {
        step("restrict", "/dev", mount::restrict(tree.as_fd(), DEV_ATTRIBUTES, None))
    };
    match ids.base {
        0 => restrict(&dev)?,
        // A runtime may have something to add; init makes the directory read-only then.
        _ => devices.iter().try_for_each(restrict)?,
    }
    attach(&step("clone", "/dev/shm", mount::clone_at(scratch, "shm"))?, "shm")?;
    let attributes = Attributes { no_exec: true, ..Attributes::default() };
    // The host has 4096 terminals for all; without a bound one sandbox can take those of the others.
    let options = [("mode", "0620"), ("ptmxmode", "0666"), ("max", "64")];
    let terminals = step("mount", "/dev/pts", mount::new("devpts", &options, &[], attributes))?;
    attach(&terminals, "pts")
}

fn mount_proc(plan: &Plan, root: BorrowedFd<'_>) -> Result<(), Failure> {
    let planned = &plan.proc;
    let attributes = Attributes { no_devices: true, no_exec: true, ..Attributes::default() };
    let mut options = match plan.users {
        // Invisible: init, which nobody may trace, is not even listed.
        Users::One => vec![("hidepid", "invisible")],
        // Root sees what its users run, though it may trace nobody.
        Users::Several { .. } => Vec::new(),
    };
    if planned.pids_only {
        options.push(("subset", "pid"));
    }
    let proc = step("mount", "/proc", mount::new("proc", &options, &[], attributes))?;
    attach_at(root, "/proc", &proc)
}

/// Hides what is to be hidden in the new `/proc`, and keeps the rest as it is.
///
/// By paths, since there are many and each is one call: `/proc` and `/dev` are mounts of ours by now,
/// and nothing but init has run in this root.
fn mask_proc(plan: &Plan) -> Result<(), Failure> {
    let planned = &plan.proc;
    let read_only =
        Attributes { read_only: true, no_devices: true, no_exec: true, ..Attributes::default() };
    for name in &planned.read_only {
        let path = format!("/proc/{name}");
        match mount::bind(&path, &path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            bound => step("mount", &path, bound)?,
        }
        step("restrict", &path, mount::restrict_at(&path, read_only))?;
    }
    for name in &planned.masked {
        let path = format!("/proc/{name}");
        // Asked first: a mount that is refused, of a file on a directory, has the kernel wait for all CPUs.
        let is_dir = match rustix::fs::stat(path.as_str()) {
            Ok(found) => rustix::fs::FileType::from_raw_mode(found.st_mode).is_dir(),
            Err(Errno::NOENT) => continue,
            Err(error) => return step("look at", &path, Err(error.into())),
        };
        // What stands for a file is read-only already, as all devices are.
        let stand_in = if is_dir { "/dev/.empty" } else { "/dev/null" };
        step("mount", &path, mount::bind(stand_in, &path))?;
    }
    hide_boot_id(plan)
}

/// Has a sandbox with several users read a boot id of its own.
fn hide_boot_id(plan: &Plan) -> Result<(), Failure> {
    match plan.users {
        Users::One => Ok(()),
        // The sandbox was started now, whenever the host was.
        Users::Several { .. } => match mount::bind(BOOT_ID, "/proc/sys/kernel/random/boot_id") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            bound => step("mount", BOOT_ID, bound),
        },
    }
}

/// Returns a random UUID as the kernel writes it.
fn new_boot_id() -> Vec<u8> {
    let mut bytes = [0; 16];
    // Up to 256 bytes come at once or not at all (getrandom(2)).
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = String::new();
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text.push('\n');
    text.into_bytes()
}

/// Removes the names of what masks parts of `/proc`; it stays where it is mounted.
fn forget_masks(plan: &Plan, scratch: BorrowedFd<'_>) -> io::Result<()> {
    rustix::fs::unlinkat(scratch, "dev/.empty", AtFlags::REMOVEDIR)?;
    if let Users::Several { .. } = plan.users {
        rustix::fs::unlinkat(scratch, &BOOT_ID[1..], AtFlags::empty())?;
    }
    Ok(())
}

/// Mounts a view of `/proc` for init alone, in which no process can hide from it.
fn new_census() -> io::Result<Census> {
    let attributes =
        Attributes { read_only: true, no_devices: true, no_exec: true, ..Attributes::default() };
    Ok(Census::of(mount::new("proc", &[("subset", "pid")], &[], attributes)?))
}

/// Points the standard streams of init at the sandbox's own null device.
fn quiet_streams() -> io::Result<()> {
    let null = rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    for number in 0..3 {
        fd::install_as(&null, number)?;
    }
    Ok(())
}

/// What no sandbox needs much of.
pub(crate) const LOWERED: [(Resource, u64); 5] = [
    // Not 0: a core that the host pipes to a program of its own, as root, is bounded by nothing
    // but this value, at which the kernel gives up. A file that short is not written. See core(5).
    (Resource::Core, 1),
    (Resource::Rtprio, 0),
    (Resource::Nice, 0),
    (Resource::Memlock, 8 << 20),
    // A plain user's sandboxes queue signals on the user's own account: leave most of it.
    (Resource::Sigpending, 16 << 10),
];

/// Lowers it.
pub(crate) fn lower_limits() -> Result<(), Failure> {
    for (resource, value) in LOWERED {
        step("limit", "the sandbox", lower_limit(resource, value))?;
    }
    Ok(())
}

/// Gives up every right that was needed so far, and that could be used against the host.
fn lock_down(
    plan: &Plan,
    work: Option<&OwnedFd>,
    census: &Census,
) -> Result<Option<Refusals>, Failure> {
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let _ = rustix::thread::set_name(c"warren-init");
    lower_limits()?;
    if let Some(processes) = plan.bounds.processes {
        // One more, for init.
        step("limit", "processes", process::limit(Resource::Nproc, processes + 1))?;
    }
    if let Some(bytes) = plan.bounds.memory {
        step("limit", "memory", process::limit(Resource::Data, bytes))?;
    }
    step("create a session keyring", "", keyring::new_session())?;
    let id = plan.identity.init_id();
    match plan.users {
        Users::One => {
            step("empty the bounding set", "", cred::forbid_capabilities())?;
            if plan.identity == Identity::Range {
                step("become", "the user of init", cred::become_split(id, WORKLOAD_ID))?;
            }
            step("drop the capabilities", "", cred::drop_capabilities())?;
            let forbidden = rustix::thread::set_no_new_privs(true);
            step("forbid new privileges", "", forbidden.map_err(io::Error::from))?;
        }
        // Programs may set their user here, so `no_new_privs` cannot be. The bounding set is what is
        // left of the way up, and the walls below are put up by right instead of by renouncement.
        Users::Several { capabilities } => {
            step("bound the capabilities", "", cred::bound_capabilities(capabilities))?;
            let kept = cred::become_split_keeping(id, WORKLOAD_ID, capabilities);
            step("become", "the user of init", kept)?;
        }
    }
    let sealed = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    step("seal", "init", sealed.map_err(io::Error::from))?;
    if plan.lifetime == Lifetime::Attached {
        // After the last change of identity, which clears it.
        let set = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
        step("bind to the launcher", "", set.map_err(io::Error::from))?;
    }
    step("restrict by Landlock", "", restrict(&plan.landlock, work, census))?;
    let refusals = Refusals::install(&plan.filter.init);
    let refusals = step("install the seccomp filter", "", refusals)?;
    match plan.users {
        Users::One => {}
        Users::Several { .. } => step("rest", "the capabilities", cred::rest_capabilities())?,
    }
    Ok(refusals)
}

/// Lowers a limit to `value` if it is higher.
pub(crate) fn lower_limit(resource: Resource, value: u64) -> io::Result<()> {
    let now = rustix::process::getrlimit(resource);
    let value = now.maximum.unwrap_or(u64::MAX).min(value);
    process::limit(resource, value)
}

fn restrict(planned: &plan::Landlock, work: Option<&OwnedFd>, census: &Census) -> io::Result<()> {
    let rules = Ruleset::new(landlock::abi()?, planned.tcp)?;
    let root = mount::open_place(CWD, c"/")?;
    rules.allow(root.as_fd(), Kind::Directory, Access::Read)?;
    // Mounted nowhere, so that only init, which has a descriptor of it, gets there.
    rules.allow(census.place(), Kind::Directory, Access::Read)?;
    if let Some(work) = work {
        // For init alone: a command has no descriptor of it, no path to it, and is not its owner.
        rules.allow(work.as_fd(), Kind::Directory, Access::Full)?;
    }
    for path in &planned.writable {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let place = rustix::fs::open(path.as_str(), flags, Mode::empty())?;
        let mode = rustix::fs::fstat(&place)?.st_mode;
        let is_dir = rustix::fs::FileType::from_raw_mode(mode).is_dir();
        let kind = if is_dir { Kind::Directory } else { Kind::File };
        rules.allow(place.as_fd(), kind, Access::Full)?;
    }
    rules.restrict()
}

/// Tries what must fail now, and says what that was; opening `outside` is `which` of them.
fn prove(plan: &Plan, outside: &OwnedFd, which: u32) -> Result<u32, Failure> {
    // First in its namespace, and with a parent that is in another.
    let first = rustix::process::getpid() == rustix::process::Pid::INIT;
    holds(OWN_PROCESSES, first && rustix::process::getppid().is_none())?;
    let mounts = prove_read_only(plan)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(outside, c".", flags, Mode::empty());
    holds("filesystem: open what is outside by a descriptor", opened.err() == Some(Errno::ACCESS))?;
    let bounded = match plan.users {
        Users::One => cred::holds_nothing(),
        Users::Several { capabilities } => cred::holds_at_most(capabilities),
    };
    holds(NO_CAPABILITY, bounded.unwrap_or(false))?;
    // No right is needed for this call, so that only the filter can be what refuses it.
    let refused = keyring::ask().err().and_then(|error| error.raw_os_error());
    holds(NO_KEYCTL, refused == Some(Errno::PERM.raw_os_error()))?;
    let own = tried::PROCESSES | mounts | which | tried::CAPABILITIES | tried::SECCOMP;
    let more = attempt::mounting()? | attempt::raw_sockets()? | attempt::others(plan)?;
    Ok(own | more | attempt::room(plan)? | attempt::processes(plan)?)
}

/// Tries to write to what the host shows, and says whether there was any.
pub(crate) fn prove_read_only(plan: &Plan) -> Result<u32, Failure> {
    let read_only = plan.mounts.iter().filter(|planned| !planned.writable);
    // The kernel looks at the mount before it looks at any permission, so that this is its word. A
    // file that is mounted says something else; the next may be a directory.
    let tried = read_only
        .map(|planned| {
            let path = format!("{}/.warren", planned.target);
            rustix::fs::mkdirat(CWD, path, Mode::empty()).err()
        })
        .find(|refused| *refused != Some(Errno::NOTDIR));
    holds(
        "filesystem: make a directory in what the host shows",
        tried.is_none_or(|refused| refused == Some(Errno::ROFS)),
    )?;
    Ok(if tried.is_some() { tried::MOUNTS } else { 0 })
}
