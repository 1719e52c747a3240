//! Takes the connections that a sandbox makes beyond itself, and makes those that it may have.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketType, ipproto};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use warren_init::domain;
use warren_init::protocol::denied::{Barred, Refused};
use warren_init::protocol::{Outward, Request, Toward};
use warren_sys::net;

use super::guard::{Flow, Guard, Refusal};
use super::{Policy, Verdict};
use crate::backend::linux::channel::Channel;
use crate::{PortStream, Reach};

/// How long a name may take to be looked up, and a destination to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// For how long nothing may be said on a connection before it is asked whether the other end is still there.
const QUIET: Duration = Duration::from_secs(60);
/// How much is read at a time, in each direction.
const PIECE: usize = 16 << 10;
/// How many addresses of a name are tried.
const MAX_TRIED: usize = 4;

/// Serves one sandbox until it is dropped, and then nothing of it is connected any more.
#[derive(Debug)]
pub(crate) struct Broker {
    policy: Arc<Policy>,
    #[expect(dead_code, reason = "dropping it is what ends it")]
    task: JoinSet<()>,
}

impl Broker {
    /// Has the init behind `control` hand out what its commands connect to.
    pub(crate) async fn start(control: &Channel, policy: Arc<Policy>) -> io::Result<Self> {
        let (line, theirs) = Channel::pair()?;
        control.send(&Request::Egress, &[theirs.as_fd()]).await?;
        drop(theirs);
        let mut task = JoinSet::new();
        task.spawn(serve(Arc::new(line), policy.clone()));
        Ok(Self { policy, task })
    }

    /// Returns what it goes by.
    pub(crate) fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }
}

async fn serve(line: Arc<Channel>, policy: Arc<Policy>) {
    let own = Arc::new(Semaphore::new(policy.egress.options.connections.max(1)));
    let mut connections = JoinSet::new();
    loop {
        // Until there is a place nothing more is taken, and the sandbox alone waits.
        let Ok(place) = own.clone().acquire_owned().await else { return };
        // Whoever sends nonsense is heard no more.
        let Ok(Some((outward, fds))) = line.receive::<Outward>().await else { break };
        // Only now: who connects to nothing takes no place from others.
        let Ok(shared) = policy.egress.places.clone().acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        let (line, policy) = (line.clone(), policy.clone());
        connections.spawn(async move {
            let _places = (place, shared);
            connect(&line, &policy, outward, fds).await;
        });
    }
    // Init is gone, or has another broker; what stands may go on.
    while connections.join_next().await.is_some() {}
}

/// Why a connection came to nothing.
#[derive(Debug)]
enum Failed {
    /// A wall.
    Barred { to: String, why: Barred, http: bool },
    /// Anything else.
    Broken(io::Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

async fn connect(line: &Channel, policy: &Policy, outward: Outward, mut fds: Vec<OwnedFd>) {
    let (Some(socket), true) = (fds.pop(), fds.is_empty()) else { return };
    let Outward { to, port } = outward;
    let Ok(mut inside) = taken(socket) else { return };
    let went = async {
        // Before anything is decided: what changes meanwhile is a change.
        let changes = policy.reach.subscribe();
        let (outside, guarded) = reach(policy, &to, port).await?;
        let standing = Standing { to: &to, port, address: outside.peer_addr()?.ip(), guarded };
        tokio::select! {
            biased;
            () = standing.lapses(policy, changes) => {
                Err(Failed::Barred { to: told(&to), why: Barred::NotAllowed, http: false })
            }
            went = relay(policy, &mut inside, outside, port, guarded) => went,
        }
    };
    match went.await {
        Ok(()) => tracing::debug!(?to, port, "a sandbox was connected"),
        Err(Failed::Broken(error)) => {
            tracing::debug!(?to, port, %error, "a sandbox was not connected");
            inside.reset();
        }
        Err(Failed::Barred { to, why, http }) => {
            tracing::debug!(to, port, ?why, "a sandbox was refused a destination");
            // First: whoever hears of the end may end, too, and is then told why.
            line.try_send(&Refused::Destination { to: to.clone().into_bytes(), port, why });
            if http {
                let said = format!("warren: {to} is not allowed\n");
                let length = said.len();
                let head =
                    "HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Type: text/plain\r\n";
                let answer = format!("{head}Content-Length: {length}\r\n\r\n{said}");
                // What the client still sends is not waited for: it may never end.
                let _ = tokio::time::timeout(PATIENCE, inside.write_all(answer.as_bytes())).await;
                let _ = inside.shutdown().await;
            } else {
                inside.reset();
            }
        }
    }
}

/// A connection that was made, and by what.
#[derive(Debug)]
struct Standing<'a> {
    to: &'a Toward,
    port: u16,
    /// Where it went.
    address: IpAddr,
    /// Whether what is said on it is looked at.
    guarded: bool,
}

impl Standing<'_> {
    /// Waits until it may stand no more.
    async fn lapses(&self, policy: &Policy, mut changes: watch::Receiver<Reach>) {
        // The policy outlives us, and so somebody who could change it.
        while changes.changed().await.is_ok() {
            if !self.may_stand(policy) {
                return;
            }
        }
        std::future::pending().await
    }

    /// Decides anew. Whom a command said that it meant is not known any more: where that counted, or does now, there
    /// has to be another connection.
    fn may_stand(&self, policy: &Policy) -> bool {
        match self.to {
            Toward::Address(address) => {
                policy.judge_address(*address, self.port) == Verdict::Allowed
            }
            Toward::Name(name) => {
                !self.guarded
                    && !policy.is_guarded()
                    // What is not public was let be reached when it was dialled.
                    && policy.judge_lead(name, self.address, self.port) != Verdict::NotAllowed
            }
        }
    }
}

/// Takes a socket that came out of a sandbox, if it is of a network that is not ours.
fn taken(socket: OwnedFd) -> io::Result<PortStream> {
    let nonsense = || io::Error::new(io::ErrorKind::InvalidData, "no connection of a sandbox");
    let family = sockopt::socket_domain(&socket)?;
    let is_tcp = [AddressFamily::INET, AddressFamily::INET6].contains(&family)
        && sockopt::socket_type(&socket)? == SocketType::STREAM
        && sockopt::socket_protocol(&socket)? == Some(ipproto::TCP);
    let own = net::own_namespace()?;
    if !is_tcp || net::namespace_of(&socket)?.is_some_and(|there| Some(there) == own) {
        return Err(nonsense());
    }
    sockopt::set_socket_linger(&socket, None)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    Ok(PortStream::new(TcpStream::from_std(socket.into())?))
}

/// Connects to a destination that may be reached, and says whether what is said there has to be looked at.
async fn reach(policy: &Policy, to: &Toward, port: u16) -> Result<(TcpStream, bool), Failed> {
    let barred = |why| Failed::Barred { to: told(to), why, http: false };
    let addresses = match to {
        Toward::Address(address) => match policy.judge_address(*address, port) {
            Verdict::Allowed if is_ours(*address) => return Err(barred(Barred::NotPublic)),
            Verdict::Allowed => vec![*address],
            Verdict::NotAllowed => return Err(barred(Barred::NotAllowed)),
            Verdict::NotPublic => return Err(barred(Barred::NotPublic)),
        },
        Toward::Name(name) => {
            let known = domain::canonical(name.as_bytes()).filter(|one| one == name);
            if !known.is_some_and(|name| policy.allows_name(&name, port)) {
                return Err(barred(Barred::NotAllowed));
            }
            match policy.egress.host(name) {
                // Of any kind, but where its owner denies it.
                Some(address) => match policy.judge_lead(name, address, port) {
                    Verdict::Allowed | Verdict::NotPublic => vec![address],
                    Verdict::NotAllowed => return Err(barred(Barred::NotAllowed)),
                },
                None => {
                    let found = policy.egress.options.resolver.resolve(name);
                    let found = tokio::time::timeout(PATIENCE, found).await;
                    let mut found =
                        found.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
                    if found.is_empty() {
                        return Err(io::Error::from(io::ErrorKind::NotFound).into());
                    }
                    // What is dialled is what was looked at, whatever the name leads to a moment later.
                    let mut denied = false;
                    found.retain(|address| match policy.judge_lead(name, *address, port) {
                        Verdict::Allowed => !is_ours(*address),
                        Verdict::NotPublic => false,
                        Verdict::NotAllowed => {
                            denied = true;
                            false
                        }
                    });
                    if found.is_empty() {
                        let why = if denied { Barred::NotAllowed } else { Barred::NotPublic };
                        return Err(barred(why));
                    }
                    found
                }
            }
        }
    };
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in addresses.into_iter().take(MAX_TRIED) {
        let dialled = TcpStream::connect(SocketAddr::new(address.to_canonical(), port));
        match tokio::time::timeout(PATIENCE, dialled).await {
            Ok(Ok(stream)) => {
                stream.set_nodelay(true)?;
                sockopt::set_socket_keepalive(&stream, true).map_err(io::Error::from)?;
                sockopt::set_tcp_keepidle(&stream, QUIET).map_err(io::Error::from)?;
                let by_name = matches!(to, Toward::Name(_));
                return Ok((stream, by_name && policy.is_guarded()));
            }
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last.into())
}

/// Reports whether an address is one of this host's own: services here may trust whoever comes from it.
///
/// A datagram socket that is connected to it sends nothing, and would come from the very same address.
fn is_ours(address: IpAddr) -> bool {
    // What somebody let be reached by name of its network is meant, and is no public address.
    if !super::public::is_public(address.to_canonical()) {
        return false;
    }
    let any: IpAddr = match address {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let own = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((address, 9))?;
        socket.local_addr()
    });
    own.is_ok_and(|own| own.ip() == address)
}

fn told(to: &Toward) -> String {
    match to {
        Toward::Name(name) => name.chars().filter(|c| !c.is_control()).take(253).collect(),
        Toward::Address(address) => address.to_string(),
    }
}

/// Passes on what both say until both have said all.
async fn relay(
    policy: &Policy,
    inside: &mut PortStream,
    mut outside: TcpStream,
    port: u16,
    guarded: bool,
) -> Result<(), Failed> {
    let (mut from_inside, mut to_inside) = tokio::io::split(inside);
    let (mut from_outside, mut to_outside) = outside.split();
    let up = async {
        let mut guard = guarded.then(|| Guard::new(|name: &str| policy.allows_name(name, port)));
        let refused = |Refusal { name, http, .. }: Refusal| {
            let why = if name.is_some() { Barred::NotAllowed } else { Barred::Unclear };
            let to = name.unwrap_or_else(|| "what the command said".to_owned());
            Failed::Barred { to, why, http }
        };
        let (mut piece, mut out) = (vec![0; PIECE], Vec::new());
        loop {
            let length = from_inside.read(&mut piece).await?;
            out.clear();
            match &mut guard {
                Some(watching) if length > 0 => {
                    let flow = watching.feed(&piece[..length], &mut out);
                    // What was said before it is said all the same.
                    to_outside.write_all(&out).await?;
                    if flow.map_err(refused)? == Flow::Free {
                        guard = None;
                    }
                }
                Some(watching) => {
                    let whole = watching.finish(&mut out);
                    to_outside.write_all(&out).await?;
                    whole.map_err(refused)?;
                }
                None => to_outside.write_all(&piece[..length]).await?,
            }
            if length == 0 {
                to_outside.shutdown().await?;
                return Ok::<_, Failed>(());
            }
        }
    };
    let down = async {
        let mut piece = vec![0; PIECE];
        loop {
            let length = from_outside.read(&mut piece).await?;
            if length == 0 {
                to_inside.shutdown().await?;
                return Ok::<_, Failed>(());
            }
            to_inside.write_all(&piece[..length]).await?;
        }
    };
    tokio::try_join!(up, down).map(drop)
}
