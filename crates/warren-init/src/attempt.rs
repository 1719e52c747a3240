//! What init tries of its own walls before it says that it is ready: one or two system calls for each.
//!
//! What gets through is the end of the launch. Each attempt is made where one wall alone can refuse it, or says by its
//! errno which did. [`probe`](crate::probe) tries more, in a process of its own, for whoever asks. See
//! `docs/design/receipt.md`.

use std::ffi::CStr;
use std::io;

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, OFlags, Timespec as Time, Timestamps, UTIME_NOW,
};
use rustix::io::Errno;
use rustix::mount::{FsOpenFlags, fsopen};
use rustix::net::{
    AddressFamily, Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6, SocketFlags, SocketType, bind,
    connect, ipproto, socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use warren_sys::memory;
use warren_sys::process::{self, SingleThreaded};
use warren_sys::seccomp::Instruction;
use warren_sys::spawn::{Refused, Step, Trial};
use warren_sys::surface::{self, Guarded};

use crate::launcher::step;
use crate::plan::{Plan, Users, Walls};
use crate::protocol::{self, Failure, Lowered, tried};

/// Attempts on walls that are there in more than one way, as [`holds`] names them.
pub(crate) const NO_WAY_OUT: &str = "network: find a route to 192.0.2.1";
pub(crate) const OWN_PROCESSES: &str = "processes: be in the host's process namespace";
pub(crate) const NO_CAPABILITY: &str = "privileges: hold a capability that the profile has not";
pub(crate) const NO_KEYCTL: &str = "syscalls: keyctl";

/// What the kernel says where no way leads.
const NOWHERE: [Errno; 4] =
    [Errno::NETUNREACH, Errno::HOSTUNREACH, Errno::ADDRNOTAVAIL, Errno::AFNOSUPPORT];
/// Where clouds keep their secrets.
const METADATA: [Ipv4Addr; 1] = [Ipv4Addr::new(169, 254, 169, 254)];
const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
/// Everybody may read it where it is not masked, so that nothing else can be what hides it.
const READABLE: &str = "cmdline";
/// More than there is.
const BEYOND: u64 = 64 << 10;
/// The most room of which more can be asked for at once.
const MOST_ROOM: u64 = 1 << 60;

/// A wall that was put up but does not hold is an error like any other: it names the wall and the attempt.
pub(crate) fn holds(attempt: &str, held: bool) -> Result<(), Failure> {
    let failed = Err(Errno::NOTRECOVERABLE.into());
    if held { Ok(()) } else { step(protocol::OPEN_WALL, attempt, failed) }
}

/// Looks for a way out of this network namespace, and sends nothing out. Before the filter, which may let nobody make
/// such a socket: the namespace alone is to be tried. `host_port` is taken on the host's own loopback.
pub(crate) fn network(host_port: Option<u16>) -> Result<u32, Failure> {
    let datagram = |family| socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let mut done = tried::NETWORK | tried::METADATA;
    // Before any socket of ours has a port: whoever is connected gets one, of the same that the host has given out.
    if let Some(port) = host_port {
        let taken = datagram(AddressFamily::INET)
            .and_then(|socket| bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, port)));
        // Who gets a place that somebody has on the host's has another loopback. Where it is not up yet, nobody has one.
        let apart = matches!(taken, Ok(()) | Err(Errno::ADDRNOTAVAIL));
        holds("network: share the host's 127.0.0.1", apart)?;
        done |= tried::HOST_LOOPBACK;
    }
    // One is enough: it is connected by a route alone, and takes another address when it has none.
    let socket = datagram(AddressFamily::INET).map_err(io::Error::from);
    let socket = step("open", "a socket", socket)?;
    let to = |address, port| connect(&socket, &SocketAddrV4::new(address, port));
    holds(NO_WAY_OUT, leads_nowhere(to(Ipv4Addr::new(192, 0, 2, 1), 9)))?;
    let v6 = datagram(AddressFamily::INET6)
        .and_then(|socket| connect(&socket, &SocketAddrV6::new(METADATA_V6, 80, 0, 0)));
    let nowhere = METADATA.into_iter().all(|address| leads_nowhere(to(address, 80)));
    holds("network: connect to 169.254.169.254:80", nowhere)?;
    holds("network: connect to [fd00:ec2::254]:80", leads_nowhere(v6))?;
    Ok(done)
}

fn leads_nowhere(connected: Result<(), Errno>) -> bool {
    connected.is_err_and(|error| NOWHERE.contains(&error))
}

/// Tries to read what is masked of `/proc`, and to change what is not to be changed: no right is of any use there, so
/// that it is tried by one who still has some.
pub(crate) fn proc(plan: &Plan) -> Result<u32, Failure> {
    let mut done = 0;
    if plan.proc.masked.iter().any(|name| name == READABLE) {
        let read = read_byte(c"/proc/cmdline");
        holds("filesystem: read /proc/cmdline", !matches!(read, Ok(1..)))?;
        done |= tried::MASKED;
    }
    if plan.proc.read_only.iter().any(|name| name == "sys") {
        // The kernel looks at the mount before it looks at any permission, so that this is its word.
        let refused = touch(c"/proc/sys").err();
        // Where `/proc` has processes alone, it is not there.
        let held = [Some(Errno::ROFS), Some(Errno::NOENT)].contains(&refused);
        holds("filesystem: change /proc/sys", held)?;
        done |= tried::PROC_SYS;
    }
    Ok(done)
}

/// Looks for the memory of the host in a `/proc` whose kernel is another.
pub(crate) fn host_memory() -> Result<u32, Failure> {
    let read = read_byte(c"/proc/kcore");
    holds("filesystem: read /proc/kcore", !matches!(read, Ok(1..)))?;
    Ok(tried::HOST_MEMORY)
}

/// Tries to make a filesystem.
pub(crate) fn mounting() -> Result<u32, Failure> {
    let made = fsopen(c"tmpfs", FsOpenFlags::empty());
    holds("filesystem: make a filesystem", made.err() == Some(Errno::PERM))?;
    Ok(tried::MOUNTING)
}

fn read_byte(path: &CStr) -> Result<usize, Errno> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::read(file, &mut [0; 1])
}

fn touch(path: &CStr) -> Result<(), Errno> {
    let now = Time { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::empty())
}

/// Asks for sockets by which one sees what others send.
pub(crate) fn raw_sockets() -> Result<u32, Failure> {
    for (attempt, family, protocol) in [
        ("network: open a raw socket", AddressFamily::INET, Some(ipproto::ICMP)),
        ("network: open a packet socket", AddressFamily::PACKET, None),
    ] {
        let made = socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, protocol);
        let held = made.is_err_and(|error| [Errno::PERM, Errno::AFNOSUPPORT].contains(&error));
        holds(attempt, held)?;
    }
    Ok(tried::RAW_SOCKETS)
}

/// Asks for more room than the filesystem of all that is written has: refused before anything is taken.
pub(crate) fn room(plan: &Plan) -> Result<u32, Failure> {
    if plan.scratch.bytes == 0 || plan.scratch.bytes > MOST_ROOM {
        return Ok(0);
    }
    let taken = take_room(plan.scratch.bytes + BEYOND);
    // A kernel that cannot be asked in that way has said nothing of the limit.
    if taken == Err(Errno::OPNOTSUPP) {
        return Ok(0);
    }
    holds("limits: take more room than there may be", taken == Err(Errno::NOSPC))?;
    Ok(tried::ROOM)
}

fn take_room(bytes: u64) -> Result<(), Errno> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(c"/dev/shm", flags, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes)
}

/// Tries to have a process too many, where the kernel counts those of the sandbox's user: there may be this one alone
/// for the moment. A control group that refuses one writes to the host's log, so it is asked by [`exceed`] alone.
pub(crate) fn processes(plan: &Plan) -> Result<u32, Failure> {
    if plan.bounds.processes.is_none() {
        return Ok(0);
    }
    let limit = getrlimit(Resource::Nproc);
    let allow = |current| setrlimit(Resource::Nproc, Rlimit { current, ..limit });
    step("limit", "processes", allow(Some(1)).map_err(io::Error::from))?;
    let tried = one_process_too_many();
    step("limit", "processes", allow(limit.current).map_err(io::Error::from))?;
    tried
}

/// Exceeds a limit of the control groups, which the library lowered for the moment: for one whom nobody waits for, as it
/// takes long or is told to the host's log. The limits that a spec asks for are set later, in the same groups.
pub(crate) fn exceed(lowered: Lowered) -> Result<u32, Failure> {
    match lowered {
        Lowered::Processes => one_process_too_many(),
        Lowered::Memory { huge_pages } => memory(huge_pages),
    }
}

fn one_process_too_many() -> Result<u32, Failure> {
    let proof = step("have", "one thread", SingleThreaded::claim())?;
    let made = surface::fork_plainly(&proof);
    match made {
        Ok(None) => process::exit_now(0),
        Ok(Some(child)) => drop(process::reap(child)),
        Err(_) => {}
    }
    let refused = made.err().and_then(|error| error.raw_os_error());
    let held = refused == Some(Errno::AGAIN.raw_os_error());
    holds("limits: start one process too many", held)?;
    Ok(tried::PROCESS_LIMIT)
}

/// Asks for so many huge pages. A kernel that cannot be asked in that way has said nothing of the limit.
fn memory(huge_pages: usize) -> Result<u32, Failure> {
    let Some(taken) = memory::exceed(huge_pages) else { return Ok(0) };
    holds("limits: use more memory than there may be", taken.is_err())?;
    Ok(tried::MEMORY_LIMIT)
}

/// Tries to read and to follow what others do: the first is refused to init as it is to commands, and the host's
/// processes have no number here. That commands cannot trace each other is for [`as_command`], and for each of them
/// before it runs.
pub(crate) fn others(plan: &Plan) -> Result<u32, Failure> {
    let mut done = 0;
    if plan.promised.no_tracing {
        let refused = Guarded::ReadMemory.ask().err().and_then(|error| error.raw_os_error());
        let held = refused == Some(Errno::PERM.raw_os_error());
        holds("syscalls: process_vm_readv", held)?;
        done |= tried::MEMORY;
    }
    // The first of any namespace is itself.
    if let Some(pid) = plan.promised.host_pid.filter(|pid| *pid > 1) {
        let refused = surface::seize(pid).err().and_then(|error| error.raw_os_error());
        let held = refused == Some(Errno::SRCH.raw_os_error());
        holds("processes: trace a process of the host", held)?;
        done |= tried::HOST_PROCESS;
    }
    Ok(done)
}

/// Tries what a command's own filters and limits refuse, in a process that has them.
///
/// It costs more than all else that is tried: a process, and above all its filters.
pub(crate) fn as_command(plan: &Plan) -> Result<u32, Failure> {
    let (steps, bits) = steps(plan);
    if bits == 0 {
        return Ok(0);
    }
    let (steps, attempts): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
    let proof = step("have", "one thread", SingleThreaded::claim())?;
    let held = Trial::begin(&proof, steps).and_then(Trial::end);
    match step("hold", "a trial", held)?.map(|step| attempts.get(step).copied()) {
        None => Ok(bits),
        Some(Some("") | None) => step("prepare", "a trial", Err(Errno::NOTRECOVERABLE.into())),
        Some(Some(attempt)) => holds(attempt, false).map(|()| 0),
    }
}

/// Lists what a command's process does, and what is tried then.
fn steps(plan: &Plan) -> (Vec<(Step, &'static str)>, u32) {
    let mut steps = Vec::new();
    // To install filters, where nobody renounced new privileges.
    steps
        .extend(matches!(plan.users, Users::Several { .. }).then_some((Step::UseCapabilities, "")));
    let most = getrlimit(Resource::Nofile).maximum;
    let files = plan.promised.open_files.map(|files| most.map_or(files, |most| files.min(most)));
    steps.extend(files.map(|files| (Step::Limit(Resource::Nofile, files), "")));
    for program in &plan.filter.workload {
        let program: Vec<_> = program.iter().copied().map(Instruction::from_bits).collect();
        steps.push((Step::Filter(program.into()), ""));
    }
    let mut bits = 0;
    if plan.promised.no_tracing {
        steps.push((Step::Expect(Refused::Tracing), "syscalls: ptrace"));
        bits |= tried::TRACING;
    }
    if let Some(files) = files {
        let attempt = "limits: open one file too many";
        steps.push((Step::Expect(Refused::Descriptor(files)), attempt));
        bits |= tried::OPEN_FILES;
    }
    if let Walls::Rules(_) = plan.walls {
        let attempt = "network: open a socket";
        steps.extend(
            SOCKETS.map(|(family, kind)| (Step::Expect(Refused::Socket(family, kind)), attempt)),
        );
        bits |= tried::SOCKETS;
    }
    (steps, bits)
}

/// AF_UNIX, AF_INET and AF_INET6 with SOCK_STREAM, and AF_INET with SOCK_DGRAM. See socket(2).
const SOCKETS: [(u64, u64); 4] = [(1, 1), (2, 1), (10, 1), (2, 2)];

#[cfg(test)]
mod tests {
    mod needs_root {
        use warren_sys::{net, process};

        use crate::attempt::network;

        #[test]
        fn a_loopback_of_its_own_is_never_taken_for_the_hosts() {
            const PORT: u16 = 40_001;
            let tries = std::thread::spawn(|| {
                process::new_network_namespace().unwrap();
                net::loopback_up().unwrap();
                // Whoever is given a port gets the host's, or the other that a second socket needs.
                let range = format!("{} {PORT}", PORT - 1);
                std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", range).unwrap();
                let tries = (0..64).map(|_| network(Some(PORT)));
                let tries: Result<Vec<_>, _> = tries.collect();
                let _held = std::net::UdpSocket::bind(("127.0.0.1", PORT)).unwrap();
                (tries, network(Some(PORT)))
            });
            let (apart, shared) = tries.join().unwrap();
            assert_eq!(apart.map(|tries| tries.len()), Ok(64));
            let shared = shared.expect_err("control: somebody has the place");
            assert_eq!(shared.path, "network: share the host's 127.0.0.1", "{shared:?}");
        }
    }
}
