//! A network of its own that has a loopback and one door, as root of the host and as nobody.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "a child of one thread can be had by fork alone")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::any::Any;
use std::fmt::Debug;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{DumpableBehavior, Pid, WaitOptions, getgid, getuid, waitpid};
use warren_sys::net::{
    Lead, Range, Way, divert_tcp, lead, listen_transparently, loopback_up, route,
};
use warren_sys::net::{Way::Here, Way::Nowhere};
use warren_sys::{cred, process};

const PORT: u16 = 1;
const NOBODY: u32 = 65534;

/// Runs `body` in a network namespace of its own, as root of a user namespace of its own, and returns what it tells.
///
/// With root's rights it is run once more as nobody. Nothing outlives the child.
#[track_caller]
fn inside<T: Debug + PartialEq>(body: impl Fn() -> T) -> String {
    let own = in_child(None, &body);
    if getuid().is_root() {
        assert_eq!(in_child(Some(NOBODY), &body), own, "nobody fares as root does");
    }
    own
}

#[track_caller]
fn in_child<T: Debug>(id: Option<u32>, body: impl Fn() -> T) -> String {
    let (mut told, mut telling) = io::pipe().unwrap();
    // SAFETY: the child is a copy of this thread alone, and never returns. The allocator's locks are free after a
    // fork; others it takes only if it panics, and is ended if one of those is held for ever.
    match unsafe { libc::fork() } {
        -1 => panic!("cannot fork: {}", io::Error::last_os_error()),
        0 => {
            drop(told);
            // SAFETY: alarm takes a number. It ends a child that waits for ever, and the test fails.
            unsafe { libc::alarm(20) };
            let result = catch_unwind(AssertUnwindSafe(|| {
                isolate(id).expect("cannot make the namespaces");
                format!("{:?}", body())
            }));
            let text = result.unwrap_or_else(|panic| format!("panic: {}", message(&*panic)));
            let is_told = telling.write_all(text.as_bytes()).is_ok();
            // SAFETY: _exit does not return, and runs nothing of what was copied.
            unsafe { libc::_exit(i32::from(!is_told)) }
        }
        child => {
            drop(telling);
            let mut text = String::new();
            told.read_to_string(&mut text).unwrap();
            let (_, status) = waitpid(Pid::from_raw(child), WaitOptions::empty()).unwrap().unwrap();
            assert_eq!(status.exit_status(), Some(0), "as {id:?}: {text}");
            assert!(!text.starts_with("panic: "), "as {id:?}: {text}");
            text
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("?")
}

/// Becomes `id`, and then root of a user namespace that owns an empty network.
fn isolate(id: Option<u32>) -> io::Result<()> {
    if let Some(id) = id {
        cred::leave_groups()?;
        cred::become_only(id)?;
        // The files below are root's otherwise.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    }
    let (uid, gid) = (getuid().as_raw(), getgid().as_raw());
    // SAFETY: unshare takes flags; CLONE_NEWUSER touches no memory and no descriptor.
    if unsafe { libc::unshare(libc::CLONE_NEWUSER) } != 0 {
        return Err(io::Error::last_os_error());
    }
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("0 {gid} 1"))?;
    process::new_network_namespace()?;
    loopback_up()
}

fn at(address: &str) -> SocketAddr {
    address.parse().unwrap()
}

/// Reads "10.0.0.0/8".
fn range(text: &str) -> Range {
    let (address, bits) = text.split_once('/').unwrap();
    Range { address: address.parse().unwrap(), bits: bits.parse().unwrap() }
}

fn routes(ways: &[(&str, Way)]) -> Result<(), i32> {
    let ways: Vec<_> = ways.iter().map(|&(text, way)| (range(text), way)).collect();
    errno(route(&ways))
}

fn errno<T>(result: io::Result<T>) -> Result<T, i32> {
    result.map_err(|error| error.raw_os_error().expect("an errno"))
}

/// What listens behind the door, for both families.
struct Door([TcpListener; 2]);

impl Door {
    fn open() -> Self {
        Self(["127.0.0.1", "::1"].map(|address| {
            let address = SocketAddr::new(address.parse().unwrap(), PORT);
            listen_transparently(address, 16).unwrap().into()
        }))
    }

    /// Takes a connection. The last step of one may be a moment later than the return of its `connect`.
    fn accept(&self) -> TcpStream {
        let [v4, v6] = &self.0;
        let mut fds = [PollFd::new(v4, PollFlags::IN), PollFd::new(v6, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 5, tv_nsec: 0 })).unwrap();
        self.next().expect("nobody came")
    }

    /// Takes a connection if one is there now.
    fn next(&self) -> Option<TcpStream> {
        self.0.iter().find_map(|listener| match listener.accept() {
            Ok((stream, _)) => Some(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => panic!("cannot accept: {error}"),
        })
    }
}

/// Connects, talks with whoever is behind the door, and tells whom that was asked for.
fn visit(door: &Door, address: &str) -> Result<String, i32> {
    let mut client = errno(TcpStream::connect_timeout(&at(address), Duration::from_secs(5)))?;
    let mut server = door.accept();
    assert_eq!(client.peer_addr().unwrap(), at(address));
    assert_eq!(client.local_addr().unwrap(), server.peer_addr().unwrap());
    server.set_nonblocking(false).unwrap();
    let (mut there, mut back) = ([0; 5], [0; 4]);
    client.write_all(b"there").unwrap();
    server.read_exact(&mut there).unwrap();
    server.write_all(b"back").unwrap();
    client.read_exact(&mut back).unwrap();
    assert_eq!((&there, &back), (b"there", b"back"));
    Ok(server.local_addr().unwrap().to_string())
}

/// Opens the door to some addresses.
fn open_to(ways: &[(&str, Way)]) -> Door {
    routes(ways).unwrap();
    divert_tcp(PORT).unwrap();
    Door::open()
}

const RANGES: [(&str, Way); 2] = [("198.18.0.0/15", Here), ("2001:db8::/32", Here)];
const GUESTS: [&str; 2] = ["198.18.3.4:443", "[2001:db8::3:4]:443"];

mod needs_userns {
    use super::*;

    #[test]
    fn a_connection_to_a_range_arrives_with_the_address_that_was_asked_for() {
        let arrived = inside(|| {
            let door = open_to(&RANGES);
            GUESTS.map(|guest| visit(&door, guest) == Ok(guest.to_owned()))
        });
        assert_eq!(arrived, "[true, true]");
    }

    #[test]
    fn without_a_diversion_the_same_connection_is_refused() {
        let refused = inside(|| {
            routes(&RANGES).unwrap();
            let door = Door::open();
            GUESTS.map(|guest| visit(&door, guest))
        });
        assert_eq!(refused, format!("[Err({0}), Err({0})]", libc::ECONNREFUSED));
    }

    #[test]
    fn without_a_listener_a_diverted_connection_is_refused() {
        let refused = inside(|| {
            drop(open_to(&RANGES));
            GUESTS.map(|guest| errno(TcpStream::connect(at(guest)).map(drop)))
        });
        assert_eq!(refused, format!("[Err({0}), Err({0})]", libc::ECONNREFUSED));
    }

    #[test]
    fn what_no_route_leads_to_is_unreachable() {
        let unreachable = inside(|| {
            let door = open_to(&RANGES);
            ["8.8.8.8:53", "198.20.0.1:443", "[2001:4860::8888]:53"].map(|far| visit(&door, far))
        });
        assert_eq!(unreachable, format!("[Err({0}), Err({0}), Err({0})]", libc::ENETUNREACH));
    }

    #[test]
    fn the_longest_range_decides() {
        let there = inside(|| {
            let door = open_to(&[
                ("0.0.0.0/0", Here),
                ("10.0.0.0/8", Nowhere),
                ("10.1.0.0/16", Here),
                ("10.1.2.3/32", Nowhere),
                ("::/0", Here),
                ("fd00::/8", Nowhere),
                ("fd01::/16", Here),
                ("fd01::23/128", Nowhere),
            ]);
            let visit = |address: &str| visit(&door, address).map(|door| door == address);
            let v4 = ["8.8.8.8:1", "10.0.1.2:1", "10.1.0.1:1", "10.1.2.3:1", "10.1.2.4:1"];
            let v6 = ["[2001::8]:1", "[fd00::1]:1", "[fd01::1]:1", "[fd01::23]:1", "[fd01::24]:1"];
            let own = ["127.0.0.1:1", "[::1]:1"];
            (v4.map(visit), v6.map(visit), own.map(visit))
        });
        let by_length = "[Ok(true), Err(113), Ok(true), Err(113), Ok(true)]";
        assert_eq!(there, format!("({by_length}, {by_length}, [Ok(true), Ok(true)])"));
    }

    #[test]
    fn the_order_of_ranges_does_not_matter() {
        let there = inside(|| {
            let ways = [("10.1.0.0/16", Here), ("10.0.0.0/8", Nowhere), ("0.0.0.0/0", Here)];
            let door = open_to(&ways);
            ["8.8.8.8:1", "10.0.1.2:1", "10.1.0.1:1"].map(|to| visit(&door, to).map(drop))
        });
        assert_eq!(there, "[Ok(()), Err(113), Ok(())]");
    }

    #[test]
    fn the_loopback_is_its_own_whatever_the_ranges_say() {
        let there = inside(|| {
            let ways = [("127.0.0.0/8", Nowhere), ("::1/128", Nowhere), ("::/0", Nowhere)];
            let door = open_to(&ways);
            let at_door = ["127.0.0.1:1", "[::1]:1"].map(|own| visit(&door, own));
            let other = TcpListener::bind("127.0.0.1:8080").unwrap();
            let _client = TcpStream::connect(at("127.0.0.1:8080")).unwrap();
            let beside = (other.accept().is_ok(), door.next().is_none());
            let nobody = ["127.0.0.1:9", "127.0.0.2:1", "[::1]:9"].map(|own| visit(&door, own));
            (at_door, beside, nobody)
        });
        let at_door = "[Ok(\"127.0.0.1:1\"), Ok(\"[::1]:1\")]";
        let refused = "[Err(111), Err(111), Err(111)]";
        assert_eq!(there, format!("({at_door}, (true, true), {refused})"));
    }

    #[test]
    fn a_port_that_the_client_has_itself_is_no_connection_to_itself() {
        for to in ["198.18.3.4:40000", "[2001:db8::3:4]:40000"] {
            let arrived = inside(|| {
                let door = open_to(&RANGES);
                std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40000").unwrap();
                visit(&door, to)
            });
            assert_eq!(arrived, format!("Ok({to:?})"));
        }
    }

    #[test]
    fn who_listens_at_every_address_gets_nothing_that_is_for_the_door() {
        let arrived = inside(|| {
            let others = ["0.0.0.0:443", "[::]:444"].map(|any| TcpListener::bind(any).unwrap());
            routes(&RANGES).unwrap();
            let before = TcpStream::connect(at(GUESTS[0])).map(|_| others[0].accept().is_ok());
            divert_tcp(PORT).unwrap();
            let door = Door::open();
            (before.unwrap(), visit(&door, GUESTS[0]), visit(&door, "[2001:db8::1]:444"))
        });
        let at_door = "Ok(\"198.18.3.4:443\"), Ok(\"[2001:db8::1]:444\")";
        assert_eq!(arrived, format!("(true, {at_door})"), "it would without the diversion");
    }

    #[test]
    fn datagrams_do_not_come_to_the_door() {
        let told = inside(|| {
            let door = open_to(&RANGES);
            [("0.0.0.0:0", "198.18.3.4"), ("[::]:0", "2001:db8::3:4")].map(|(from, to)| {
                let to = |port| SocketAddr::new(to.parse().unwrap(), port);
                let socket = UdpSocket::bind(from).unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                let refused = [PORT, 443].map(|port| {
                    socket.connect(to(port)).unwrap();
                    socket.send(b"?").unwrap();
                    errno(socket.recv(&mut [0; 8]))
                });
                // Control: they do arrive at what has that port in here.
                let other = UdpSocket::bind(at(from)).unwrap();
                socket.connect(to(other.local_addr().unwrap().port())).unwrap();
                socket.send(b"?").unwrap();
                other.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                (refused, other.recv(&mut [0; 8]).is_ok(), door.next().is_none())
            })
        });
        assert_eq!(
            told,
            "[([Err(111), Err(111)], true, true), ([Err(111), Err(111)], true, true)]"
        );
    }

    #[test]
    fn a_range_twice_is_one_and_two_ways_for_it_are_an_error() {
        let told = inside(|| {
            let twice = routes(&[RANGES[0], RANGES[1], RANGES[0], RANGES[1]]);
            let again = RANGES.map(|way| routes(&[way]));
            let both = RANGES.map(|(text, _)| routes(&[(text, Nowhere)]));
            let within = routes(&[("198.18.0.1/15", Here)]);
            let beyond = routes(&[("0.0.0.0/33", Here)]);
            (twice, again, both, within, beyond, routes(&[]))
        });
        assert_eq!(
            told,
            "(Ok(()), [Err(17), Err(17)], [Err(17), Err(17)], Err(22), Err(22), Ok(()))"
        );
    }

    #[test]
    fn a_second_diversion_is_an_error_and_changes_nothing() {
        let told = inside(|| {
            let door = open_to(&RANGES);
            let second = [PORT + 1, PORT, 0].map(|port| errno(divert_tcp(port)));
            (second, visit(&door, GUESTS[0]).is_ok())
        });
        assert_eq!(told, "([Err(17), Err(17), Err(22)], true)");
    }

    #[test]
    fn without_rights_on_the_network_there_is_no_door() {
        let told = inside(|| {
            let allowed = routes(&RANGES[..1]);
            cred::drop_capabilities().unwrap();
            let route = RANGES.map(|way| routes(&[way]));
            let listen = listen_transparently(at("127.0.0.1:4000"), 1).map(drop);
            (allowed, route, errno(divert_tcp(PORT)), errno(listen))
        });
        assert_eq!(told, "(Ok(()), [Err(1), Err(1)], Err(1), Err(1))");
    }

    #[test]
    fn a_listener_waits_for_nothing_and_is_not_inherited() {
        let told = inside(|| {
            ["127.0.0.1:1", "[::1]:1"].map(|address| {
                let listener = listen_transparently(at(address), 1).unwrap();
                let is_closed =
                    rustix::io::fcntl_getfd(&listener).unwrap() == rustix::io::FdFlags::CLOEXEC;
                let started = Instant::now();
                let accepted = TcpListener::from(listener).accept();
                let kind = accepted.map(drop).map_err(|error| error.kind());
                (is_closed, kind, started.elapsed() < Duration::from_secs(5))
            })
        });
        assert_eq!(told, "[(true, Err(WouldBlock), true), (true, Err(WouldBlock), true)]");
    }

    #[test]
    fn where_an_address_leads_is_told_by_the_kernel_and_nothing_is_sent() {
        let leads = |address: &str| lead(address.parse().unwrap()).unwrap();
        let told = inside(|| {
            assert_eq!(leads("192.0.2.1"), Lead::Nowhere, "before there is anything");
            loopback_up().unwrap();
            route(&[
                (Range { address: "192.0.2.0".parse().unwrap(), bits: 24 }, Here),
                (Range { address: "192.0.2.9".parse().unwrap(), bits: 32 }, Nowhere),
                (Range { address: "2001:db8::".parse().unwrap(), bits: 32 }, Here),
            ])
            .unwrap();
            for own in ["127.0.0.1", "127.1.2.3", "192.0.2.1", "::1", "2001:db8::1"] {
                assert_eq!(leads(own), Lead::Here, "{own}");
            }
            for other in ["192.0.2.9", "198.51.100.1", "2001:db9::1"] {
                assert_eq!(leads(other), Lead::Nowhere, "{other}");
            }
        });
        assert_eq!(told, "()");
        assert_eq!(leads("127.0.0.1"), Lead::Here, "the host's own");
    }
}
