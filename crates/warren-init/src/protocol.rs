//! What is said between the library, the launcher and init, and how it is packed.
//!
//! Each message is one packet of a SOCK_SEQPACKET socket: a tag, then the message in `postcard`.
//! One that is too long for a packet travels in a memory file. What comes *from* a sandbox is
//! never taken that way: it is short or it is refused.

use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use warren_sys::socket;

use crate::log::Overflow;
use crate::plan::Plan;

pub mod denied;
pub mod files;

/// The version of what is said here, and of the [logs](crate::log) that init writes.
///
/// An init outlives the daemon that made it, and the next daemon may be of another build. What changes a message that is
/// exchanged after [`Report::Ready`], or a log, raises this; what it was is kept in the test below. [`Request::Hello`] and
/// [`Request::End`] stay as they are for ever, so that every version can end what any other made.
pub const VERSION: u32 = 2;

/// The longest message that travels in the packet itself.
const MAX_INLINE: usize = 64 * 1024;
/// The longest message of all: the kernel takes no more arguments than fit in 2 MiB.
const MAX_LARGE: u64 = 8 * 1024 * 1024;
const INLINE: u8 = 0;
const LARGE: u8 = 1;

/// A step of the set-up that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What was tried, to be read after "cannot": "mount the overlay".
    pub step: String,
    /// On what; may be empty.
    pub path: String,
    /// What the kernel said.
    pub errno: i32,
}

/// What the launcher and init say while a sandbox is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// The process is there; carries its pidfd.
    Launched {
        /// PID 1 of the sandbox, as the launcher sees it.
        pid: i32,
        /// The first of its ids, if it has a range.
        base: Option<u32>,
    },
    /// One that is made ahead has done what it was told, and waits for the next [`Word`].
    Waiting,
    /// Every step is done and the walls were tried.
    Ready(Proof),
    /// It will not be; nothing is left but the control groups.
    Failed(Failure),
}

/// What is said to one that is made ahead, each time it waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Word<P = Box<Plan>> {
    /// Exceed a limit of its control groups that was lowered for the moment.
    Exceed(Lowered),
    /// Become this.
    Become(P),
}

/// A limit that was lowered so far that it costs little to exceed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lowered {
    /// There may be one process.
    Processes,
    /// There may be less memory than these are.
    Memory {
        /// How many huge pages to ask for, as nobody is killed for those.
        huge_pages: usize,
    },
}

/// The step of a [`Failure`] that is an attempt on a wall which got through; its path names the attempt.
pub const OPEN_WALL: &str = "rely on";

/// What init saw hold when it tried, after everything was in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// The version of Landlock that refused to open a directory outside.
    pub landlock_abi: u32,
    /// Owners of the host's files could be shifted into the sandbox's range.
    pub owners_shifted: bool,
    /// What was tried: the bits of [`tried`].
    pub tried: u32,
}

/// What init tries before it says that it is ready, one bit each.
pub mod tried {
    /// That it is the first process of a namespace whose parent is elsewhere.
    pub const PROCESSES: u32 = 1;
    /// That what the host shows cannot be written.
    pub const MOUNTS: u32 = 1 << 1;
    /// That a descriptor of the old root opens nothing.
    pub const LANDLOCK: u32 = 1 << 2;
    /// That it holds no capability but those that the plan has; read back.
    pub const CAPABILITIES: u32 = 1 << 3;
    /// That a call which needs no right is refused.
    pub const SECCOMP: u32 = 1 << 4;
    /// That no route leads out.
    pub const NETWORK: u32 = 1 << 5;
    /// Without namespaces: that a descriptor of the host's root lists nothing.
    pub const FILES: u32 = 1 << 6;
    /// Without namespaces: that nothing can be made where every user may, but for its own directory.
    pub const WRITES: u32 = 1 << 7;
    /// Without namespaces: that its warden, who is outside, cannot be signalled.
    pub const SIGNALS: u32 = 1 << 8;
    /// Without namespaces: that one who has the filters of a command gets no socket.
    pub const SOCKETS: u32 = 1 << 9;
    /// On a kernel of its own: that a path of the host's is not there.
    pub const HOST_PATH: u32 = 1 << 10;
    /// On a kernel of its own: that it is not the host's.
    pub const KERNEL: u32 = 1 << 11;
    /// In a container: that a descriptor of what is mounted nowhere inside opens nothing.
    pub const UNMOUNTED: u32 = 1 << 12;
    /// That no filesystem can be made.
    pub const MOUNTING: u32 = 1 << 13;
    /// That one who has the filter of a command cannot be traced.
    pub const TRACING: u32 = 1 << 14;
    /// That there is neither a raw nor a packet socket.
    pub const RAW_SOCKETS: u32 = 1 << 15;
    /// That no route leads to where clouds keep their secrets.
    pub const METADATA: u32 = 1 << 16;
    /// That a place on the loopback is free which is taken on the host's.
    pub const HOST_LOOPBACK: u32 = 1 << 17;
    /// That a file of `/proc` that everybody may read is empty.
    pub const MASKED: u32 = 1 << 18;
    /// That `/proc/sys` cannot be changed.
    pub const PROC_SYS: u32 = 1 << 19;
    /// That more room than there is cannot be taken.
    pub const ROOM: u32 = 1 << 20;
    /// That one who has the limit of a command gets no descriptor beyond it.
    pub const OPEN_FILES: u32 = 1 << 21;
    /// That a process too many is refused, by the kernel's count for the sandbox's user or by a control group whose limit
    /// was lowered for that.
    pub const PROCESS_LIMIT: u32 = 1 << 22;
    /// Without namespaces: that `/proc/sysrq-trigger` cannot be opened for writing.
    pub const PROC_WRITES: u32 = 1 << 23;
    /// On a kernel of its own: that the host's memory is not in `/proc`.
    pub const HOST_MEMORY: u32 = 1 << 28;
    /// That the memory of another process cannot be read.
    pub const MEMORY: u32 = 1 << 29;
    /// That a process of the host is not there to be traced.
    pub const HOST_PROCESS: u32 = 1 << 30;
    /// That memory beyond the limit of a control group, which was lowered for that, is refused.
    pub const MEMORY_LIMIT: u32 = 1 << 31;
    /// By the library: that the limit on memory, when it was written, was what was read back.
    pub const SET_MEMORY: u32 = 1 << 24;
    /// Likewise of processes.
    pub const SET_PROCESSES: u32 = 1 << 25;
    /// Likewise of the share of CPUs.
    pub const SET_CPU_WEIGHT: u32 = 1 << 26;
    /// Likewise of the time on CPUs.
    pub const SET_CPU_QUOTA: u32 = 1 << 27;
}

/// What is asked of init. The first descriptor of each is the socket to answer on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Run a command; the socket stays for [`ExecControl`] and [`ExecEvent`].
    Exec(Exec),
    /// Take up the command of this name again, which has a log; the socket is its own from now on,
    /// and the second descriptor is written to when the log grows. It is answered by
    /// [`ExecEvent::Started`], or by [`ExecEvent::Refused`] if no such command runs.
    Follow(String),
    /// Stop every command where it is; answered by [`Done`]. Without a socket for that, whoever asks has stopped
    /// them, and only their clocks are init's to stop.
    Suspend,
    /// Let them go on, or only their clocks; likewise.
    Resume,
    /// Try every wall from where a command stands; answered by [`Tries`].
    Probe(Probe),
    /// Say how things are, to one who was not there; answered by [`Standing`].
    Hello,
    /// End the sandbox; the socket closes when it is over.
    End,
    /// Connect to a port of the sandbox's own loopback; answered by [`Done`], which carries the
    /// socket. Whether anybody listens is known once that can be written to.
    Connect {
        /// Which of its addresses.
        to: Loopback,
        /// The port.
        port: u16,
    },
    /// Do something with files; answered by [`FileEvent`](files::FileEvent)s.
    Files(files::FileRequest),
    /// Hand out the filesystem of everything that was written; answered by [`Done`], which carries it.
    Scratch,
    /// The same for one of the sandbox's users: paths may begin at its home, what is made is its own,
    /// and entries are told in full.
    FilesAs {
        /// Its name.
        user: Vec<u8>,
        /// What.
        request: files::FileRequest,
    },
    /// Like [`Probe`](Self::Probe), and exceed memory so that nobody is killed for it.
    ProbeGently {
        /// What else to try.
        probe: Probe,
        /// How many huge pages to ask for, which are more than there may be.
        huge_pages: usize,
    },
    /// Hand out on this socket what commands connect to beyond the sandbox, each as an [`Outward`], and which names were
    /// refused to them, as those without a socket; and take back which of it was refused outside, each as a [`denied::Refused`]. Whoever asked for that before hears no more of it.
    Egress,
}

/// A connection of a command to somewhere beyond its sandbox, which carries its socket: this end is the destination's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outward {
    /// Where to.
    pub to: Toward,
    /// And to which port.
    pub port: u16,
}

/// What a command wants to reach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Toward {
    /// A host of this name.
    Name(String),
    /// An address.
    Address(IpAddr),
}

/// An address by which a sandbox reaches itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Loopback {
    /// 127.0.0.1.
    V4,
    /// ::1.
    V6,
}

/// A command to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// What it is called, if it has a log.
    pub name: String,
    /// The program: a path, or a name to be looked up in `PATH` of `env`.
    pub program: Vec<u8>,
    /// Its arguments, without the name.
    pub args: Vec<Vec<u8>>,
    /// Its whole environment, each as `NAME=value`.
    pub env: Vec<Vec<u8>>,
    /// The directory to start in.
    pub workdir: Vec<u8>,
    /// Who runs it: the commands' user if absent.
    pub user: Option<ExecUser>,
    /// Where its standard streams go.
    pub streams: Streams,
    /// When to end it.
    pub wall_ms: Option<u64>,
    /// How much time on a CPU it and what it starts may take.
    pub cpu_ms: Option<u64>,
    /// How many descriptors each process may have.
    pub open_files: Option<u64>,
    /// Whether an attached sandbox ends when it does.
    pub only: bool,
    /// Whether somebody waits to hear that its program runs, and not only how it ended.
    pub announced: bool,
    /// Whether it is followed, to tell what walls refused to it.
    pub explain: bool,
}

/// One of the sandbox's users, who runs a command.
///
/// `HOME`, `USER` and `LOGNAME` are its own unless the environment says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecUser {
    /// Its name in the sandbox's `/etc/passwd`.
    pub name: Vec<u8>,
    /// The directory to start in, instead of [`Exec::workdir`]: below its home, or absolute.
    pub workdir: Vec<u8>,
}

/// Where the standard streams of a command go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Streams {
    /// To the three descriptors that come with the request. Two more may follow: the reading ends
    /// of the last two, for init to empty once nobody else does.
    Given,
    /// To the [log](crate::log) that comes with the request, in front of the descriptor that is
    /// written to when it grows.
    Logged {
        /// What it reads.
        input: Input,
        /// The size of its terminal, lines and columns, if it is to have one.
        terminal: Option<(u16, u16)>,
        /// How many bytes the log may hold.
        limit: Option<u64>,
        /// What happens beyond.
        overflow: Overflow,
    },
    /// To a new terminal of the sandbox, whose other side comes with [`ExecEvent::Started`].
    Terminal {
        /// Lines.
        rows: u16,
        /// Characters in a line.
        columns: u16,
    },
}

/// What a command with a log reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Input {
    /// These bytes, and then, unless that is all, what [`ExecControl::Input`] brings.
    Stdin {
        /// The first of its input.
        first: Vec<u8>,
        /// Whether more may come.
        more: bool,
    },
    /// Nothing. What [`ExecControl::Input`] brings it reads from its descriptor 3, and what it writes
    /// there is in its log, after everything that it wrote before. Descriptors that come with the
    /// request between the socket and the log are its own from 4 on.
    Control,
}

/// What is asked of a running command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExecControl {
    /// Send this signal to it and its process group.
    Signal(i32),
    /// The terminal has a new size.
    Resize {
        /// Lines.
        rows: u16,
        /// Characters in a line.
        columns: u16,
    },
    /// End it and all it started.
    Kill,
    /// End all it started, but not itself.
    KillRest,
    /// More of its input; answered by [`ExecEvent::Input`].
    Input {
        /// Where in its input these bytes are. What init has already is passed over.
        offset: u64,
        /// They.
        bytes: Vec<u8>,
        /// Whether this is the end of its input.
        end: bool,
    },
    /// Say what it has used so far; answered by [`ExecEvent::Used`].
    Measure,
}

/// What becomes of a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExecEvent {
    /// It runs; carries the terminal if it has one.
    Started {
        /// Its pid, inside.
        pid: i32,
    },
    /// It could not be started.
    Refused {
        /// What could not be done.
        stage: Stage,
        /// What the kernel said.
        errno: i32,
    },
    /// A wall refused this to it; comes before it is over.
    Denied(denied::Denied),
    /// So many more refusals there were.
    DeniedMore(u32),
    /// It is over.
    Ended(Ended),
    /// How much of its input was taken. Whoever sent more waits for the next of these.
    Input {
        /// The offset of what is wanted next.
        taken: u64,
        /// Whether it reads any more.
        open: bool,
        /// Whether some was left that there was no room for: another of these follows once there is.
        full: bool,
    },
    /// What it has used so far.
    Used(Used),
}

/// What a command and all it started have used so far, and what became of it meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used {
    /// Time on a CPU, in microseconds.
    pub cpu_us: u64,
    /// Bytes read by it and by what it waited for, by whatever call.
    pub read_bytes: u64,
    /// Bytes written in the same way.
    pub written_bytes: u64,
    /// How often init ended what it started because all commands together held too much memory.
    pub memory_kills: u64,
    /// Whether the sandbox's filesystem is full.
    pub scratch_full: bool,
    /// Whether the sandbox is suspended.
    pub suspended: bool,
    /// For how long it was, since the command was started, in microseconds.
    pub stood_still_us: u64,
}

/// Which part of starting a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Making a process for it.
    Fork,
    /// Taking on its identity, limits and filter.
    Prepare,
    /// Becoming the user who is to run it: there is none (ENOENT), or it may not be.
    User,
    /// Entering its directory.
    Workdir,
    /// Executing its program.
    Program,
    /// The sandbox is suspended.
    Suspended,
    /// Being followed.
    Follow,
}

/// How a command ended and what it used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// How its first process ended.
    pub status: Status,
    /// Who ended it, if it was ended.
    pub stopped_by: Option<StoppedBy>,
    /// Whether the sandbox's filesystem was full at the end of a command that failed.
    pub scratch_full: bool,
    /// Time on a CPU, in microseconds, of all it started.
    pub cpu_us: u64,
    /// Time since it was started, in microseconds.
    pub wall_us: u64,
    /// Memory at its largest, in bytes.
    pub peak_bytes: u64,
    /// Bytes it read, by whatever call.
    pub read_bytes: u64,
    /// Bytes it wrote.
    pub written_bytes: u64,
    /// Processes and threads that were started in the sandbox from its own on, until its end.
    pub tasks_started: u64,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// By itself.
    Exited(i32),
    /// By a signal.
    Signalled(i32),
}

/// Who ended a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoppedBy {
    /// Its time was up.
    WallTime,
    /// Its time on the CPU was up.
    CpuTime,
    /// All commands together held too much memory.
    Memory,
    /// Its log was full.
    Output,
    /// The one who started it.
    Client,
    /// Nobody: it failed where no more processes could be started, as far as init can see.
    Processes,
}

/// The answer to [`Request::Suspend`], [`Request::Resume`] and [`Request::Connect`]: an errno, 0 for
/// success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done(pub i32);

/// The answer to [`Request::Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// Whether its commands are stopped.
    pub suspended: bool,
    /// How many run.
    pub running: u32,
    /// Whether something runs that a command left behind.
    pub left: bool,
}

/// What to try, and what of the host there is to be reached. What is absent is not tried.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// Where somebody listens on the host's own loopback.
    pub port: Option<u16>,
    /// The abstract name by which somebody listens on the host.
    pub socket: Option<Vec<u8>>,
    /// What to tell whoever listens there, so that it knows us.
    pub nonce: u64,
    /// A file or directory of the host that is none of the sandbox's.
    pub hidden: Option<String>,
    /// The host's namespaces: what each is called in `/proc/self/ns`, and its inode.
    pub namespaces: Vec<(String, u64)>,
    /// How many descriptors a command may have.
    pub open_files: Option<u64>,
    /// How many bytes may be written.
    pub write_bytes: Option<u64>,
    /// How many processes to start, which is more than there may be.
    pub processes: Option<u32>,
    /// How much memory to use, which is more than there may be: somebody is killed for it.
    pub memory_bytes: Option<u64>,
}

/// The answer to [`Request::Probe`] and [`Request::ProbeGently`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tries(pub Vec<Try>);

/// One attempt to get through a wall.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Try {
    /// What was tried.
    pub name: String,
    /// What happened.
    pub said: Said,
}

/// What happened when something was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Said {
    /// The kernel said this; 0 if it let us.
    Errno(i32),
    /// What is there is another than the host's.
    Apart,
    /// It is the host's own.
    Same,
    /// The one who tried was ended by this signal.
    Signalled(i32),
}

/// Sends `message` and `fds` as one packet.
pub fn send(socket: impl AsFd, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = postcard::to_allocvec(message).map_err(io::Error::other)?;
    let mut packet = Vec::with_capacity(bytes.len().min(MAX_INLINE) + 1);
    if bytes.len() <= MAX_INLINE {
        packet.push(INLINE);
        packet.extend_from_slice(&bytes);
        return socket::send(socket, &packet, fds);
    }
    if bytes.len() as u64 > MAX_LARGE {
        return Err(io::Error::from_raw_os_error(rustix::io::Errno::TOOBIG.raw_os_error()));
    }
    let large = warren_sys::fd::sealed("warren-message", &bytes)?;
    let mut all = vec![large.as_fd()];
    all.extend_from_slice(fds);
    socket::send(socket, &[LARGE], &all)
}

/// Receives a message from inside a sandbox; `None` when nobody is there any more.
pub fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut buffer = [0; 16 * 1024];
    let Some((length, fds)) = socket::receive(socket, &mut buffer)? else { return Ok(None) };
    Ok(Some((parse_inline(&buffer[..length])?, fds)))
}

/// Receives a message from outside, which is trusted and may be long.
pub fn receive_trusted<T: DeserializeOwned>(
    socket: impl AsFd,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    // As long as it has to be: most are short, and memory that was never used costs more than asking.
    let length = socket::next_length(&socket)?.clamp(1, MAX_INLINE + 1);
    let mut buffer = vec![0; length];
    let Some((length, mut fds)) = socket::receive(socket, &mut buffer)? else { return Ok(None) };
    if buffer[0] != LARGE {
        return Ok(Some((parse_inline(&buffer[..length])?, fds)));
    }
    if fds.is_empty() {
        return Err(malformed("a long message without its file"));
    }
    let mut bytes = Vec::new();
    let file = File::from(fds.remove(0));
    // The sender wrote through the same description, so its position is at the end.
    std::io::Seek::rewind(&mut &file)?;
    file.take(MAX_LARGE).read_to_end(&mut bytes)?;
    Ok(Some((parse(&bytes)?, fds)))
}

/// Understands one packet that must hold a whole message and nothing else.
pub fn parse_inline<T: DeserializeOwned>(packet: &[u8]) -> io::Result<T> {
    match packet.split_first() {
        Some((&INLINE, message)) => parse(message),
        _ => Err(malformed("an unknown kind of packet")),
    }
}

/// Writes a packet that has its message in it, as [`parse_inline`] reads it.
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub fn write_inline(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let message = postcard::to_allocvec(message).map_err(|_| malformed("a message"))?;
    Ok([&[INLINE], &message[..]].concat())
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(malformed("a message with something after it")),
        Err(_) => Err(malformed("a message that cannot be read")),
    }
}

fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::denied::Refused;

    fn command(argument: usize) -> Exec {
        Exec {
            name: String::new(),
            program: b"true".to_vec(),
            args: vec![vec![b'x'; argument]],
            env: vec![b"A=\xff".to_vec()],
            workdir: b"/".to_vec(),
            user: None,
            streams: Streams::Given,
            wall_ms: Some(1),
            cpu_ms: None,
            open_files: Some(3),
            only: false,
            announced: true,
            explain: false,
        }
    }

    #[test]
    fn short_and_long_messages_arrive_with_their_descriptors() {
        for size in [0, 1000, MAX_INLINE, 2 * 1024 * 1024] {
            let (a, b) = socket::pair().unwrap();
            let request = Request::Exec(command(size));
            send(&a, &request, &[a.as_fd()]).unwrap();
            let (received, fds) = receive_trusted::<Request>(&b).unwrap().unwrap();
            assert_eq!((received == request, fds.len()), (true, 1), "{size} bytes");
        }
    }

    #[test]
    fn a_message_past_all_bounds_is_refused_by_the_sender() {
        let (a, _b) = socket::pair().unwrap();
        let error = send(&a, &command(MAX_LARGE.try_into().unwrap()), &[]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::TOOBIG.raw_os_error()));
    }

    fn hex(message: &impl Serialize) -> String {
        let bytes = postcard::to_allocvec(message).unwrap();
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// What is said, as bytes.
    const VERSION_2: &str = "hello: 05\n\
         end: 06\n\
         exec: 000004747275650101780103413dff012f010175022f77010001010101185001e807000101000103000100\n\
         follow: 010165\n\
         suspend: 02\n\
         resume: 03\n\
         probe: 04000000000000000000\n\
         connect: 070150\n\
         files: 0800022f78\n\
         scratch: 09\n\
         files as: 0a017500022f78\n\
         measure: 05\n\
         input: 04ac02010701\n\
         started: 0004\n\
         refused: 010604\n\
         ended: 040112010301010203040506\n\
         taken: 05050100\n\
         used: 0601000000000002\n\
         done: 02\n\
         standing: 010200\n\
         probe gently: 0b00000000000000000003\n\
         denied a name: 020401610002\n\
         denied a call: 0202040100000000000201\n\
         egress: 0c\n\
         outward by name: 000161bb03\n\
         outward by address: 01000a00000116\n\
         denied a destination: 0206016150010001";

    /// A change here is a change for every init that runs while its daemon is replaced: [`VERSION`].
    #[test]
    fn c15_what_is_said_to_an_init_of_version_2_stays_as_it_was() {
        assert_eq!(VERSION, 2, "a new version has a list of its own");
        let (read, change) = (Input::Stdin { first: vec![1], more: true }, ExecControl::Measure);
        let logged = Streams::Logged {
            input: read,
            terminal: Some((24, 80)),
            limit: Some(1000),
            overflow: Overflow::End,
        };
        let user = ExecUser { name: b"u".to_vec(), workdir: b"/w".to_vec() };
        let exec = Exec { streams: logged, user: Some(user), ..command(1) };
        let stat = || files::FileRequest::Stat { path: b"/x".to_vec() };
        let as_user = Request::FilesAs { user: b"u".to_vec(), request: stat() };
        let input = ExecControl::Input { offset: 300, bytes: vec![7], end: true };
        let ended = Ended {
            status: Status::Signalled(9),
            stopped_by: Some(StoppedBy::Output),
            scratch_full: true,
            cpu_us: 1,
            wall_us: 2,
            peak_bytes: 3,
            read_bytes: 4,
            written_bytes: 5,
            tasks_started: 6,
        };
        let used = Used { cpu_us: 1, stood_still_us: 2, ..Used::default() };
        let standing = Standing { suspended: true, running: 2, left: false };
        let taken = ExecEvent::Input { taken: 5, open: true, full: false };
        let refused = ExecEvent::Refused { stage: Stage::Follow, errno: 2 };
        let gently = Request::ProbeGently { probe: Probe::default(), huge_pages: 3 };
        let name = denied::Denied { what: Refused::Name(b"a".to_vec()), errno: 0, count: 2 };
        let what = Refused::Call { nr: 4, args: [1, 0, 0, 0, 0, 0] };
        let call = denied::Denied { what, errno: 1, count: 1 };
        let address = [10, 0, 0, 1].into();
        let what =
            Refused::Destination { to: b"a".to_vec(), port: 80, why: denied::Barred::NotPublic };
        let destination = denied::Denied { what, errno: 0, count: 1 };
        let said = [
            ("hello", hex(&Request::Hello)),
            ("end", hex(&Request::End)),
            ("exec", hex(&Request::Exec(exec))),
            ("follow", hex(&Request::Follow("e".into()))),
            ("suspend", hex(&Request::Suspend)),
            ("resume", hex(&Request::Resume)),
            ("probe", hex(&Request::Probe(Probe::default()))),
            ("connect", hex(&Request::Connect { to: Loopback::V6, port: 80 })),
            ("files", hex(&Request::Files(stat()))),
            ("scratch", hex(&Request::Scratch)),
            ("files as", hex(&as_user)),
            ("measure", hex(&change)),
            ("input", hex(&input)),
            ("started", hex(&ExecEvent::Started { pid: 2 })),
            ("refused", hex(&refused)),
            ("ended", hex(&ExecEvent::Ended(ended))),
            ("taken", hex(&taken)),
            ("used", hex(&ExecEvent::Used(used))),
            ("done", hex(&Done(1))),
            ("standing", hex(&standing)),
            ("probe gently", hex(&gently)),
            ("denied a name", hex(&ExecEvent::Denied(name))),
            ("denied a call", hex(&ExecEvent::Denied(call))),
            ("egress", hex(&Request::Egress)),
            ("outward by name", hex(&Outward { to: Toward::Name("a".into()), port: 443 })),
            ("outward by address", hex(&Outward { to: Toward::Address(address), port: 22 })),
            ("denied a destination", hex(&ExecEvent::Denied(destination))),
        ];
        let said = said.map(|(what, bytes)| format!("{what}: {bytes}"));
        assert_eq!(said.join("\n"), VERSION_2);
    }

    #[test]
    fn a_sandbox_cannot_send_a_long_message_or_garbage() {
        let (a, b) = socket::pair().unwrap();
        socket::send(&a, &[LARGE], &[a.as_fd()]).unwrap();
        assert!(receive::<ExecEvent>(&b).is_err());
        let good = postcard::to_allocvec(&ExecEvent::Started { pid: 1 }).unwrap();
        let whole = [&[INLINE], &good[..]].concat();
        assert!(parse_inline::<ExecEvent>(&whole).is_ok(), "control: the whole message is read");
        for bad in [&[][..], &[INLINE], &[INLINE, 0xff], &[9, 0], &[&whole[..], b"x"].concat()] {
            assert!(parse_inline::<ExecEvent>(bad).is_err(), "{bad:?}");
        }
    }
}
