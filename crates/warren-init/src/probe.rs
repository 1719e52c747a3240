//! Tries every wall from where a command stands, and says what the kernel answered.

use std::os::fd::OwnedFd;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Ipv4Addr, SocketAddrV4, SocketFlags, SocketType};
use warren_sys::process::{self, Fork, Namespaces};
use warren_sys::{fd, keyring};

use crate::exec::Starter;
use crate::protocol::{self, Tries, Try};

/// Answers on `reply` from a process with the rights of a command. Somebody listens on `port` of the
/// host's loopback.
pub(crate) fn run(starter: &Starter, reply: &OwnedFd, port: u16) {
    match process::fork(&starter.proof, Namespaces::NONE, None) {
        Ok(Fork::Child) => {
            let ready = fd::close_all_except(&[reply]).is_ok()
                && starter.become_user(None).is_ok()
                && starter.install_filters().is_ok();
            if ready {
                let _ = protocol::send(reply, &Tries(tries(port)), &[]);
            }
            process::exit_now(0)
        }
        Ok(Fork::Parent { .. }) => {}
        // The asker sees its socket close without an answer.
        Err(_) => {}
    }
}

fn tries(port: u16) -> Vec<Try> {
    let mut tries = Vec::new();
    let mut note = |name: &str, result: Result<(), Errno>| {
        let errno = result.err().map_or(0, Errno::raw_os_error);
        tries.push(Try { name: name.to_owned(), errno });
    };
    let kernel = |result: std::io::Result<()>| {
        result.map_err(|error| Errno::from_raw_os_error(error.raw_os_error().unwrap_or(-1)))
    };
    note("mount", rustix::mount::fsopen(c"tmpfs", rustix::mount::FsOpenFlags::empty()).map(drop));
    note("keyring", kernel(keyring::ask()));
    note("cgroup namespace", kernel(process::new_cgroup_namespace()));
    for (name, family, kind) in [
        ("packet socket", AddressFamily::PACKET, SocketType::RAW),
        ("raw socket", AddressFamily::INET, SocketType::RAW),
        ("vsock", AddressFamily::VSOCK, SocketType::STREAM),
    ] {
        let opened = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None);
        note(name, opened.map(drop));
    }
    for (name, kind, address, port) in [
        ("udp to 192.0.2.1", SocketType::DGRAM, Ipv4Addr::new(192, 0, 2, 1), 9),
        ("tcp to 192.0.2.1", SocketType::STREAM, Ipv4Addr::new(192, 0, 2, 1), 9),
        ("tcp to the host's 127.0.0.1", SocketType::STREAM, Ipv4Addr::LOCALHOST, port),
    ] {
        let socket =
            rustix::net::socket_with(AddressFamily::INET, kind, SocketFlags::CLOEXEC, None);
        let to = SocketAddrV4::new(address, port);
        note(name, socket.and_then(|socket| rustix::net::connect(&socket, &to)));
    }
    for (name, path, flags) in [
        ("write /proc/sys", c"/proc/sys/kernel/core_pattern", OFlags::WRONLY),
        ("read /proc/kcore", c"/proc/kcore", OFlags::RDONLY),
        ("write /usr", c"/usr/.warren-probe", OFlags::WRONLY.union(OFlags::CREATE)),
        ("read /proc/1", c"/proc/1/environ", OFlags::RDONLY),
    ] {
        note(name, open_and_read(path, flags));
    }
    note("become root", rustix::thread::set_thread_uid(rustix::process::Uid::ROOT));
    let device = rustix::fs::makedev(1, 1);
    let made = rustix::fs::mknodat(
        CWD,
        c"/tmp/.warren-probe",
        rustix::fs::FileType::CharacterDevice,
        Mode::RUSR,
        device,
    );
    note("device node", made);
    let stopped = process::signal_raw(1, rustix::process::Signal::KILL.as_raw());
    note("signal init", kernel(stopped));
    tries
}

/// Opens a file and, for reading, takes a byte: one that seems empty tells nothing.
fn open_and_read(path: &std::ffi::CStr, flags: OFlags) -> Result<(), Errno> {
    let file = rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::RUSR)?;
    if flags.contains(OFlags::WRONLY) {
        return Ok(());
    }
    match rustix::io::read(&file, &mut [0; 1])? {
        0 => Err(Errno::NODATA),
        _ => Ok(()),
    }
}
