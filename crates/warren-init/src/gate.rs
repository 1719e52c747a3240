//! The one door of a sandbox that may reach something: what its commands connect to is handed to whoever decides.
//!
//! No way leads out of its network. What it may ask for is routed to its own loopback, and the kernel gives such
//! connections to init (TPROXY), which hands them out by descriptor with where they were meant to go. Nothing that is
//! said on them passes init, and what init says of them is checked outside.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, getsockname, sockopt};
use warren_sys::net::{self, Way};

use crate::domain;
use crate::launcher::step;
use crate::names::Book;
use crate::plan::{Egress, Range};
use crate::protocol::denied::Refused;
use crate::protocol::{self, Failure, Outward, Toward};

/// How many connections are handed out before init looks at what else there is to do.
const AT_ONCE: usize = 16;
/// How many may wait while nobody takes them.
const BACKLOG: i32 = 128;
/// How many refused names are told in one second; whoever asks for more is known by those.
const NAMES: u32 = 64;
/// Where init listens, on the loopback alone: what nobody else has any use for (RFC 1078).
const PORT: u16 = 1;

/// The door.
#[derive(Debug)]
pub(crate) struct Gate {
    listeners: Vec<OwnedFd>,
    book: Book,
    /// To the one who decides, if it is there.
    line: Option<OwnedFd>,
    /// What that one has no room for at the moment.
    waiting: Option<(Outward, OwnedFd)>,
    /// How many names were told since when.
    told: (u32, Option<Instant>),
}

impl Gate {
    /// Opens it, in a network of this process's own whose loopback is up. Needs rights over that.
    pub(crate) fn open(egress: &Egress) -> Result<Self, Failure> {
        let here = [Book::RANGE].iter().chain(&egress.ranges).map(|range| (range, Way::Here));
        let nowhere = egress.closed.iter().map(|range| (range, Way::Nowhere));
        let (v4, v6): (Vec<_>, Vec<_>) =
            here.chain(nowhere).partition(|(range, _)| range.address.is_ipv4());
        let mut listeners = Vec::new();
        for (address, ranges) in
            [(IpAddr::V4(Ipv4Addr::LOCALHOST), v4), (Ipv6Addr::LOCALHOST.into(), v6)]
        {
            match net::listen_transparently(SocketAddr::new(address, PORT), BACKLOG) {
                // Without IPv6 nobody inside has a socket of it either.
                Err(error) if address.is_ipv6() && lacks_family(&error) => continue,
                listening => {
                    let place = format!("port {PORT} of {address}");
                    listeners.push(step("listen at", &place, listening)?);
                }
            }
            let ranges: Vec<_> =
                ranges.into_iter().map(|(range, way)| (as_net(range), way)).collect();
            step("route", "what may be reached", net::route(&ranges))?;
        }
        step("divert", "connections to what may be reached", net::divert_tcp(PORT))?;
        let book = Book::new(&egress.names);
        Ok(Self { listeners, book, line: None, waiting: None, told: (0, None) })
    }

    pub(crate) fn book(&mut self) -> &mut Book {
        &mut self.book
    }

    /// Hands out what comes to this one from now on.
    pub(crate) fn lead_to(&mut self, line: OwnedFd) {
        self.line = Some(line);
    }

    /// Tells whoever decides that a name was refused here: without a socket, since nothing was connected. One that has no
    /// room for it does without.
    pub(crate) fn tell_refused(&mut self, name: &[u8]) {
        let now = Instant::now();
        let (count, since) = &mut self.told;
        if since.is_none_or(|since| now.saturating_duration_since(since) >= Duration::from_secs(1))
        {
            (*count, *since) = (0, Some(now));
        }
        let Some(line) = self.line.as_ref().filter(|_| *count < NAMES) else { return };
        *count += 1;
        let said = || String::from_utf8_lossy(name).into_owned();
        let name = domain::canonical(name).unwrap_or_else(said);
        let _ = protocol::send(line, &Outward { to: Toward::Name(name), port: 0 }, &[]);
    }

    /// Returns what to watch, and for what: nothing that nobody would take.
    pub(crate) fn watched(&self) -> impl Iterator<Item = (&OwnedFd, PollFlags)> {
        let full = self.waiting.is_some();
        let flags = if full { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let line = self.line.iter().map(move |line| (line, flags));
        let taken = self.line.is_some() && !full;
        let listeners = self.listeners.iter().filter(move |_| taken);
        line.chain(listeners.map(|listener| (listener, PollFlags::IN)))
    }

    /// Deals with what is ready, in the order of [`watched`](Self::watched), and returns what was refused outside.
    pub(crate) fn ready(&mut self, next: &mut impl FnMut() -> bool) -> Vec<Refused> {
        let ready: Vec<bool> = self.watched().map(|_| next()).collect();
        if !ready.contains(&true) {
            return Vec::new();
        }
        let refused = self.hear();
        if let Some((outward, socket)) = self.waiting.take() {
            self.hand_out(outward, socket);
        }
        for _ in 0..AT_ONCE {
            if self.line.is_none() || self.waiting.is_some() {
                break;
            }
            let Some(socket) = self.accept() else { break };
            match self.meant(&socket) {
                Some(outward) => self.hand_out(outward, socket),
                None => reset(&socket),
            }
        }
        refused
    }

    /// Takes what the one who decides has to say.
    fn hear(&mut self) -> Vec<Refused> {
        let mut refused = Vec::new();
        while let Some(line) = &self.line {
            match protocol::receive_trusted::<Refused>(line) {
                Ok(Some((what, _))) if refused.len() < AT_ONCE => refused.push(what),
                Ok(Some(_)) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // What comes now waits for the next one.
                Ok(None) | Err(_) => self.line = None,
            }
        }
        refused
    }

    fn accept(&self) -> Option<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        self.listeners.iter().find_map(|listener| accept_with(listener, flags).ok())
    }

    /// Says where a connection was meant to go; `None` if to nowhere that there is.
    fn meant(&self, socket: &OwnedFd) -> Option<Outward> {
        let own = SocketAddr::try_from(getsockname(socket).ok()?).ok()?;
        let (address, port) = (own.ip().to_canonical(), own.port());
        let to = match address {
            // To ourselves, by somebody who looked for this port.
            address if address.is_loopback() => return None,
            IpAddr::V4(given) if Book::gives(given) => {
                Toward::Name(self.book.name_of(given)?.to_owned())
            }
            address => Toward::Address(address),
        };
        Some(Outward { to, port })
    }

    fn hand_out(&mut self, outward: Outward, socket: OwnedFd) {
        let Some(line) = &self.line else {
            self.waiting = Some((outward, socket));
            return;
        };
        match protocol::send(line, &outward, &[socket.as_fd()]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.waiting = Some((outward, socket));
            }
            Ok(()) => {}
            Err(error) if is_gone(&error) => {
                (self.line, self.waiting) = (None, Some((outward, socket)));
            }
            // That one is lost, as for want of descriptors, and no other.
            Err(_) => reset(&socket),
        }
    }
}

/// Has whoever connected hear that nobody is there.
fn reset(socket: &OwnedFd) {
    let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}

/// Reports whether the other end of a socket is no more.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
        || error.kind() == io::ErrorKind::NotConnected
}

fn as_net(range: &Range) -> net::Range {
    net::Range { address: range.address, bits: range.bits }
}

fn lacks_family(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}
