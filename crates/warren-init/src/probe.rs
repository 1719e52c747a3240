//! Tries every wall from where a command stands, and says what happened.
//!
//! In a sandbox it is a copy of init with the rights of a command; anywhere else the program itself, under
//! the name of [`NAME`]. What it tries changes nothing where it is let through: what it makes it removes.

use std::ffi::{CStr, OsStr};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Ipv4Addr, SocketAddrUnix, SocketAddrV4, SocketFlags, SocketType, sockopt,
};
use warren_sys::process::{self, End, SingleThreaded};
use warren_sys::surface::{self, Guarded};
use warren_sys::{fd, keyring, memory};

use crate::exec::{self, Starter};
use crate::protocol::{self, Probe, Said, Tries, Try};

/// What the program is called when it is to try the walls around it.
pub const NAME: &str = "warren-probe";
/// How long a connection may take that is let through: to the host itself, which answers at once.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// What is made if the wall before it is open, and removed again.
const TRACE: &str = ".warren-probe";

/// Reports whether this program was called by that name.
pub fn is_meant() -> bool {
    std::env::args_os().next().as_deref() == Some(OsStr::new(NAME))
}

/// Tries what descriptor 0 asks for, and answers there. Does not return.
pub fn main() -> ! {
    let answered = || -> io::Result<()> {
        let (socket, proof) = (fd::inherited(0)?, SingleThreaded::claim()?);
        let asked = protocol::receive_trusted::<Probe>(&socket)?;
        let (probe, _) = asked.ok_or(io::ErrorKind::UnexpectedEof)?;
        protocol::send(&socket, &Tries(tries(&proof, &probe, None)), &[])
    };
    process::exit_now(i32::from(answered().is_err()))
}

/// Answers on `reply` from a process with the rights of a command.
///
/// Of memory so many huge pages are asked for, if any: nobody is killed for those.
pub(crate) fn run(starter: &Starter, reply: &OwnedFd, probe: &Probe, huge_pages: Option<usize>) {
    match surface::fork_plainly(&starter.proof) {
        Ok(None) => {
            let ready = fd::close_all_except(&[reply]).is_ok()
                && exec::bound_files(probe.open_files).is_ok()
                && starter.become_user(None).is_ok()
                && starter.install_filters().is_ok();
            if ready {
                process::default_signals();
                let tries = Tries(tries(&starter.proof, probe, huge_pages));
                let _ = protocol::send(reply, &tries, &[]);
            }
            process::exit_now(0)
        }
        Ok(Some(_)) => {}
        // The asker sees its socket close without an answer.
        Err(_) => {}
    }
}

/// What was tried so far.
struct Notes(Vec<Try>);

impl Notes {
    fn said(&mut self, name: impl Into<String>, said: Said) {
        self.0.push(Try { name: name.into(), said });
    }

    fn note<T>(&mut self, name: &str, result: Result<T, Errno>) {
        self.said(name, Said::Errno(result.err().map_or(0, Errno::raw_os_error)));
    }

    fn asked(&mut self, name: &str, result: io::Result<()>) {
        self.said(name, Said::Errno(result.err().map_or(0, |e| e.raw_os_error().unwrap_or(-1))));
    }
}

fn tries(proof: &SingleThreaded, probe: &Probe, huge_pages: Option<usize>) -> Vec<Try> {
    let mut notes = Notes(Vec::new());
    files(&mut notes, probe);
    network(&mut notes, probe);
    processes(&mut notes, probe);
    // Before what changes this process, if it is let.
    limits(&mut notes, proof, probe);
    if let Some(taken) = huge_pages.and_then(memory::exceed) {
        notes.asked("memory", taken);
    }
    calls(&mut notes);
    privileges(&mut notes);
    notes.0
}

fn files(notes: &mut Notes, probe: &Probe) {
    notes.note("mount", rustix::mount::fsopen(c"tmpfs", rustix::mount::FsOpenFlags::empty()));
    if let Some(hidden) = &probe.hidden {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        notes.note("host file", rustix::fs::open(hidden.as_str(), flags, Mode::empty()));
    }
    for (name, path, flags) in [
        ("write /proc/sys", c"/proc/sys/kernel/core_pattern", OFlags::WRONLY),
        ("write /proc/sysrq-trigger", c"/proc/sysrq-trigger", OFlags::WRONLY),
        ("read /proc/kcore", c"/proc/kcore", OFlags::RDONLY),
        ("read /proc/keys", c"/proc/keys", OFlags::RDONLY),
        ("read /proc/timer_list", c"/proc/timer_list", OFlags::RDONLY),
        ("read /proc/kallsyms", c"/proc/kallsyms", OFlags::RDONLY),
    ] {
        notes.note(name, open_and_read(path, flags));
    }
    let (path, flags) = (format!("/usr/{TRACE}"), OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL);
    let made = rustix::fs::open(&path, flags | OFlags::CLOEXEC, Mode::RUSR);
    if made.is_ok() {
        let _ = rustix::fs::unlink(&path);
    }
    notes.note("write /usr", made);
    let (path, device) = (format!("/tmp/{TRACE}"), rustix::fs::makedev(1, 1));
    let kind = rustix::fs::FileType::CharacterDevice;
    let made = rustix::fs::mknodat(CWD, &path, kind, Mode::RUSR, device);
    if made.is_ok() {
        let _ = rustix::fs::unlinkat(CWD, &path, AtFlags::empty());
    }
    notes.note("device node", made);
}

/// Opens a file and, for reading, takes a byte: one that seems empty tells nothing, and what is written to the device that
/// stands for what is masked goes nowhere.
fn open_and_read(path: &CStr, flags: OFlags) -> Result<(), Errno> {
    let file = rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?;
    if flags.contains(OFlags::WRONLY) {
        let found = rustix::fs::fstat(&file)?;
        let is_device = rustix::fs::FileType::from_raw_mode(found.st_mode).is_char_device();
        let is_null = is_device && found.st_rdev == rustix::fs::makedev(1, 3);
        return if is_null { Err(Errno::NODATA) } else { Ok(()) };
    }
    match rustix::io::read(&file, &mut [0; 1])? {
        0 => Err(Errno::NODATA),
        _ => Ok(()),
    }
}

fn network(notes: &mut Notes, probe: &Probe) {
    let open = |family, kind, protocol| {
        rustix::net::socket_with(
            family,
            kind,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            protocol,
        )
    };
    let icmp = Some(rustix::net::ipproto::ICMP);
    notes.note("packet socket", open(AddressFamily::PACKET, SocketType::RAW, None));
    notes.note("raw socket", open(AddressFamily::INET, SocketType::RAW, icmp));
    notes.note("vsock", open(AddressFamily::VSOCK, SocketType::STREAM, None));
    let elsewhere = Ipv4Addr::new(192, 0, 2, 1);
    for (name, kind, address, port) in [
        ("udp to 192.0.2.1", SocketType::DGRAM, elsewhere, 9),
        ("tcp to 192.0.2.1", SocketType::STREAM, elsewhere, 9),
        ("tcp to 169.254.169.254", SocketType::STREAM, Ipv4Addr::new(169, 254, 169, 254), 80),
    ] {
        let to = SocketAddrV4::new(address, port);
        let begun = open(AddressFamily::INET, kind, None)
            .and_then(|socket| rustix::net::connect(&socket, &to));
        // It is on its way: that nobody answers is none of the wall's doing.
        notes.note(name, begun.or_else(|error| allowed(error == Errno::INPROGRESS, error)));
    }
    if let Some(port) = probe.port {
        let reached = open(AddressFamily::INET, SocketType::STREAM, None).and_then(|socket| {
            let to = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
            let begun = rustix::net::connect(&socket, &to);
            begun.or_else(|error| allowed(error == Errno::INPROGRESS, error))?;
            poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&PATIENCE))?;
            sockopt::socket_error(&socket)??;
            rustix::io::write(&socket, &probe.nonce.to_le_bytes()).map(drop)
        });
        notes.note("tcp to the host's 127.0.0.1", reached);
    }
    if let Some(name) = &probe.socket {
        let reached = SocketAddrUnix::new_abstract_name(name).and_then(|to| {
            let socket = open(AddressFamily::UNIX, SocketType::STREAM, None)?;
            rustix::net::connect(&socket, &to)?;
            rustix::io::write(&socket, &probe.nonce.to_le_bytes()).map(drop)
        });
        notes.note("abstract socket of the host", reached);
    }
}

fn allowed(is: bool, error: Errno) -> Result<(), Errno> {
    if is { Ok(()) } else { Err(error) }
}

fn processes(notes: &mut Notes, probe: &Probe) {
    notes.note("read /proc/1", open_and_read(c"/proc/1/environ", OFlags::RDONLY));
    for (name, inode) in &probe.namespaces {
        // Through the link, to what it leads to: that is the namespace itself.
        let Ok(own) = std::fs::metadata(format!("/proc/self/ns/{name}")) else { continue };
        let said = if own.ino() == *inode { Said::Same } else { Said::Apart };
        notes.said(format!("{name} namespace"), said);
    }
}

fn limits(notes: &mut Notes, proof: &SingleThreaded, probe: &Probe) {
    if let Some(most) = probe.open_files {
        notes.note("open files", exceed_files(most));
    }
    if let Some(most) = probe.write_bytes {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(c"/dev/shm", flags, Mode::RUSR | Mode::WUSR);
        // More than there is at once: refused before anything is taken, and given back if it is not.
        let taken = file.and_then(|file| {
            rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, most.saturating_add(1 << 16))
        });
        // A kernel that cannot be asked in that way has said nothing of the limit.
        if taken != Err(Errno::OPNOTSUPP) {
            notes.note("quota", taken);
        }
    }
    if let Some(more) = probe.processes {
        notes.asked("processes", exceed_processes(proof, more));
    }
    if let Some(more) = probe.memory_bytes {
        let said = match exceed_memory(proof, more) {
            Ok(End::Signalled(signal)) => Said::Signalled(signal),
            Ok(End::Exited(errno)) => Said::Errno(errno),
            Err(error) => Said::Errno(error.raw_os_error().unwrap_or(-1)),
        };
        notes.said("memory", said);
    }
}

/// Takes the last descriptor that there may be, and one more.
fn exceed_files(most: u64) -> Result<(), Errno> {
    let some = rustix::fs::open(c"/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let last = i32::try_from(most.saturating_sub(1)).map_err(|_| Errno::OVERFLOW)?;
    let _last = rustix::io::fcntl_dupfd_cloexec(&some, last).map_err(|_| Errno::INVAL)?;
    rustix::io::fcntl_dupfd_cloexec(&some, last).map(drop)
}

/// Starts processes that live until all are there, or one is refused.
fn exceed_processes(proof: &SingleThreaded, more: u32) -> io::Result<()> {
    let (wait, go) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let mut children = Vec::new();
    let outcome = (0..more).try_for_each(|_| match surface::fork_plainly(proof)? {
        Some(child) => {
            children.push(child);
            Ok(())
        }
        None => {
            // However this one's parent ends, its end of the pipe closes.
            if fd::close_all_except(&[&wait]).is_ok() {
                let _ = rustix::io::read(&wait, &mut [0; 1]);
            }
            process::exit_now(0)
        }
    });
    drop(go);
    children.into_iter().for_each(|child| drop(process::reap(child)));
    outcome
}

/// Has a copy of this process use so much memory.
fn exceed_memory(proof: &SingleThreaded, bytes: u64) -> io::Result<End> {
    match surface::fork_plainly(proof)? {
        Some(child) => process::reap(child).map(|(end, _)| end),
        None => {
            let mut memory: Vec<u8> = Vec::new();
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            if memory.try_reserve_exact(bytes).is_err() {
                process::exit_now(Errno::NOMEM.raw_os_error());
            }
            memory.resize(bytes, 1);
            // Read back, so that nobody finds out that nobody reads it.
            let used = std::hint::black_box(&memory).last().copied();
            process::exit_now(if used == Some(1) { 0 } else { Errno::NODATA.raw_os_error() })
        }
    }
}

fn calls(notes: &mut Notes) {
    notes.asked("keyctl", keyring::ask());
    notes.asked("io_uring_setup", Guarded::IoUring.ask());
    notes.asked("perf_event_open", Guarded::Perf.ask());
    notes.asked("userfaultfd", Guarded::Userfaultfd.ask());
    notes.asked("open_by_handle_at", Guarded::FileHandle.ask());
    notes.asked("setns", Guarded::Setns.ask());
}

fn privileges(notes: &mut Notes) {
    // Before it may be in a namespace where nobody is root.
    notes.note("become root", rustix::thread::set_thread_uid(rustix::process::Uid::ROOT));
    notes.asked("cgroup namespace of its own", process::new_cgroup_namespace());
    notes.asked("user namespace of its own", Guarded::UserNamespace.ask());
    // Last: whoever may would be traced from here on.
    notes.asked("ptrace", Guarded::Ptrace.ask());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_masked_can_be_neither_read_nor_written() {
        for flags in [OFlags::RDONLY, OFlags::WRONLY] {
            assert_eq!(open_and_read(c"/dev/null", flags), Err(Errno::NODATA));
            let name = format!("/tmp/warren-probe-{}-{}", std::process::id(), flags.bits());
            std::fs::write(&name, "x").unwrap();
            let path = std::ffi::CString::new(name.as_str()).unwrap();
            let got = open_and_read(&path, flags);
            std::fs::remove_file(&name).unwrap();
            assert_eq!(got, Ok(()), "control: a file that is there");
        }
        assert_eq!(open_and_read(c"/dev/zero", OFlags::WRONLY), Ok(()), "control: another device");
    }
}
