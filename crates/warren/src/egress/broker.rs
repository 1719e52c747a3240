//! Takes the connections that a sandbox makes beyond itself, and makes those that it may have.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketType, ipproto};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use warren_init::domain;
use warren_init::protocol::denied::{Barred, Refused};
use warren_init::protocol::{Outward, Request, Toward};
use warren_sys::net::{self, Lead};

use super::guard::{Flow, Guard, Refusal};
use super::{Policy, Rules, Verdict};
use crate::PortStream;
use crate::backend::linux::channel::Channel;

/// How long a name may take to be looked up, and a destination to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// For how long nothing may be said on a connection before it is asked whether the other end is still there.
const QUIET: Duration = Duration::from_secs(60);
/// How much is read at a time, in each direction.
const PIECE: usize = 16 << 10;
/// How many addresses of a name are tried, and how many are looked at to find them.
const MAX_TRIED: usize = 4;
const MAX_LOOKED_AT: usize = 32;
/// For how long nothing may be said by the one who has not yet said all, once the other has.
const HALF: Duration = Duration::from_secs(120);
/// How much of what nobody reads the kernel may keep of a connection, in each direction. It is the host's memory.
const BUFFER: u32 = 1 << 20;
/// How many connections of a sandbox take no place from others: it has these, whoever has all the rest.
const RESERVED: usize = 8;
/// How many may be made at once, and how long each takes of that: ports and tables are the host's.
const BURST: u32 = 256;
const PACE: Duration = Duration::from_millis(10);

/// Serves one sandbox until it is dropped, and then nothing of it is connected any more.
#[derive(Debug)]
pub(crate) struct Broker {
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
        task.spawn(serve(Arc::new(line), policy));
        Ok(Self { task })
    }
}

async fn serve(line: Arc<Channel>, policy: Arc<Policy>) {
    let own = Arc::new(Semaphore::new(policy.egress.options.connections.max(1)));
    let reserved = Arc::new(Semaphore::new(RESERVED));
    let mut connections = JoinSet::new();
    let (mut pace, mut names) = (Pace::new(Instant::now()), Pace::new(Instant::now()));
    loop {
        // Until there is a place nothing more is taken, and the sandbox alone waits.
        let Ok(place) = own.clone().acquire_owned().await else { return };
        let (outward, fds) = match line.receive::<Outward>().await {
            Ok(Some(handed)) => handed,
            // Its descriptor did not arrive, for want of room for one here: that connection is lost, and no other.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::MFILE) => continue,
            // Whoever sends nonsense is heard no more.
            Ok(None) | Err(_) => break,
        };
        if fds.is_empty() {
            // A name that init refused: nothing was connected. It sends fewer of them than would be waited for.
            tokio::time::sleep_until(names.next(Instant::now())).await;
            policy.barred.note(&told(&outward.to), None, Barred::NotAllowed);
            continue;
        }
        tokio::time::sleep_until(pace.next(Instant::now())).await;
        // Only now: who connects to nothing takes no place from others.
        let shared = match reserved.clone().try_acquire_owned() {
            Ok(reserved) => reserved,
            Err(_) => match policy.egress.places().clone().acquire_owned().await {
                Ok(shared) => shared,
                Err(_) => return,
            },
        };
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

/// How fast connections are made: [`BURST`] at once, and then one for each [`PACE`].
#[derive(Debug)]
struct Pace {
    /// When all that were made will have been paid for.
    paid: Instant,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Self { paid: now }
    }

    /// Says when the next may be made.
    fn next(&mut self, now: Instant) -> Instant {
        self.paid = self.paid.max(now) + PACE;
        let ahead = BURST * PACE;
        self.paid.checked_sub(ahead).map_or(now, |then| then.max(now))
    }
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
            policy.barred.note(&to, Some(port), why);
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
    async fn lapses(&self, policy: &Policy, mut changes: watch::Receiver<Rules>) {
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

/// Takes a socket that came out of a sandbox, if it is of a network that is not ours. Whoever is at the other end of one
/// that is not taken hears so.
fn taken(socket: OwnedFd) -> io::Result<PortStream> {
    // Until it is: on whatever way it is dropped, that is no orderly end.
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
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
            Verdict::Allowed if is_ours(policy, *address)? => {
                return Err(barred(Barred::NotPublic));
            }
            Verdict::Allowed => vec![*address],
            Verdict::NotAllowed => return Err(barred(Barred::NotAllowed)),
            Verdict::NotPublic => return Err(barred(Barred::NotPublic)),
        },
        Toward::Name(name) => {
            let known = domain::canonical(name.as_bytes()).filter(|one| one == name);
            if !known.is_some_and(|name| policy.allows_name(&name, port)) {
                return Err(barred(Barred::NotAllowed));
            }
            match policy.egress.host(name, port) {
                // Of any kind, but where its owner denies it.
                Some(Some(address)) => match policy.judge_lead(name, address, port) {
                    Verdict::Allowed | Verdict::NotPublic => vec![address],
                    Verdict::NotAllowed => return Err(barred(Barred::NotAllowed)),
                },
                Some(None) => return Err(barred(Barred::NotAllowed)),
                None => {
                    let found = tokio::time::timeout(PATIENCE, policy.look_up(name)).await;
                    let found = found.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
                    if found.is_empty() {
                        return Err(io::Error::from(io::ErrorKind::NotFound).into());
                    }
                    // What is dialled is what was looked at, whatever the name leads to a moment later.
                    let (mut good, mut denied) = (Vec::new(), false);
                    for address in found.into_iter().take(MAX_LOOKED_AT) {
                        match policy.judge_lead(name, address, port) {
                            Verdict::Allowed if good.len() < MAX_TRIED => {
                                if !is_ours(policy, address)? {
                                    good.push(address);
                                }
                            }
                            Verdict::Allowed | Verdict::NotPublic => {}
                            Verdict::NotAllowed => denied = true,
                        }
                    }
                    if good.is_empty() {
                        let why = if denied { Barred::NotAllowed } else { Barred::NotPublic };
                        return Err(barred(why));
                    }
                    good
                }
            }
        }
    };
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for address in addresses {
        let dialled = dial(SocketAddr::new(address.to_canonical(), port));
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

async fn dial(to: SocketAddr) -> io::Result<TcpStream> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Before it is connected, or the other end is promised more.
    socket.set_recv_buffer_size(BUFFER)?;
    socket.set_send_buffer_size(BUFFER)?;
    socket.connect(to).await
}

/// Reports whether an address is one of this host's own, where services may trust whoever comes from it, and was not let
/// be reached as that.
fn is_ours(policy: &Policy, address: IpAddr) -> io::Result<bool> {
    let address = address.to_canonical();
    Ok(net::lead(address)? == Lead::Here && !policy.may_be_ours(address))
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
    let progress = Progress::default();
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
            progress.note();
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
            progress.note();
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
            progress.note();
            if length == 0 {
                to_inside.shutdown().await?;
                return Ok::<_, Failed>(());
            }
            // For as long as the sandbox likes: it is its own place, and the server has said what it was asked for.
            progress.waits_inside.store(true, Ordering::Relaxed);
            to_inside.write_all(&piece[..length]).await?;
            progress.waits_inside.store(false, Ordering::Relaxed);
            progress.note();
        }
    };
    let (mut up, mut down) = (pin!(up), pin!(down));
    tokio::select! {
        all = &mut up => { all?; finish(down, &progress).await }
        all = &mut down => { all?; finish(up, &progress).await }
    }
}

/// How far a connection has come.
#[derive(Debug, Default)]
struct Progress {
    /// How often anything was read or passed on.
    steps: AtomicU64,
    /// Whether there is something that the sandbox does not read.
    waits_inside: AtomicBool,
}

impl Progress {
    fn note(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits for the other one to have said all, for as long as it says something: whoever is silent for ever would have its
/// place for ever.
async fn finish(
    mut rest: Pin<&mut impl Future<Output = Result<(), Failed>>>,
    progress: &Progress,
) -> Result<(), Failed> {
    loop {
        let before = progress.steps.load(Ordering::Relaxed);
        match tokio::time::timeout(HALF, &mut rest).await {
            Ok(all) => return all,
            Err(_) if progress.waits_inside.load(Ordering::Relaxed) => {}
            Err(_) if progress.steps.load(Ordering::Relaxed) == before => {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use tokio::net::TcpListener;

    use super::*;
    use crate::EgressOptions;
    use crate::egress::Egress;

    #[test]
    fn connections_are_made_in_a_burst_and_then_at_a_pace() {
        let now = Instant::now();
        let mut pace = Pace::new(now);
        let first: Vec<_> = (0..BURST).map(|_| pace.next(now)).collect();
        assert!(first.iter().all(|then| *then == now), "at once");
        assert_eq!(pace.next(now), now + PACE);
        assert_eq!(pace.next(now), now + 2 * PACE);
        let later = now + Duration::from_secs(3600);
        let again: Vec<_> = (0..BURST).map(|_| pace.next(later)).collect();
        assert!(again.iter().all(|then| *then == later), "no more than that is saved up");
        assert_eq!(pace.next(later), later + PACE);
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_silent_when_the_other_has_said_all_is_not_waited_for() {
        let progress = Progress::default();
        let began = Instant::now();
        let silent = pin!(std::future::pending());
        let ended = finish(silent, &progress).await;
        assert!(
            matches!(ended, Err(Failed::Broken(error)) if error.kind() == io::ErrorKind::TimedOut)
        );
        assert_eq!(began.elapsed(), HALF);
        let talks = pin!(async {
            for _ in 0..10 {
                tokio::time::sleep(HALF / 2).await;
                progress.note();
            }
            Ok(())
        });
        assert!(finish(talks, &progress).await.is_ok(), "control: one that goes on is");
    }

    fn nothing() -> Arc<Policy> {
        Policy::left(&crate::SandboxSpec::default(), false, &Egress::new(EgressOptions::default()))
    }

    /// Two ends of a connection over the loopback.
    async fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn a_sandbox_may_take_its_time_to_read_what_was_said_when_it_has_said_all_itself() {
        const LENGTH: usize = 32 << 20;
        let ((mut command, inside), (outside, mut server)) = (connected().await, connected().await);
        let policy = nothing();
        let relayed = async {
            let mut inside = PortStream::new(inside);
            relay(&policy, &mut inside, outside, 80, false).await
        };
        let serves = async {
            server.read_to_end(&mut Vec::new()).await.unwrap();
            let said = server.write_all(&vec![7; LENGTH]).await;
            said.and(server.shutdown().await)
        };
        let commands = async {
            command.shutdown().await.unwrap();
            // Until there is room nowhere any more.
            tokio::time::sleep(Duration::from_millis(300)).await;
            tokio::time::pause();
            tokio::time::sleep(3 * HALF).await;
            tokio::time::resume();
            let mut heard = Vec::new();
            command.read_to_end(&mut heard).await.map(|_| heard.len())
        };
        let (relayed, served, heard) = tokio::join!(relayed, serves, commands);
        assert!(relayed.is_ok() && served.is_ok(), "{relayed:?}, {served:?}");
        assert_eq!(heard.unwrap(), LENGTH);
    }

    #[tokio::test]
    async fn a_connection_that_there_is_no_descriptor_for_is_lost_and_the_next_is_not() {
        let (line, theirs) = Channel::pair().unwrap();
        let mut broker = JoinSet::new();
        broker.spawn(serve(Arc::new(line), nothing()));
        let outward = Outward { to: Toward::Address("1.1.1.1".parse().unwrap()), port: 80 };
        let ((_near, first), (mut second, handed)) = (connected().await, connected().await);
        // There is room for one more, and two come: so it is only then, and not when somebody looks.
        let had = getrlimit(Resource::Nofile);
        let free = first.as_fd().try_clone_to_owned().unwrap();
        let most = u64::try_from(free.as_raw_fd()).unwrap() + 1;
        drop(free);
        setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..had }).unwrap();
        let both = [first.as_fd(), first.as_fd()];
        warren_init::protocol::send(&theirs, &outward, &both).unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        setrlimit(Resource::Nofile, had).unwrap();
        assert!(broker.try_join_next().is_none(), "the broker goes on");
        warren_init::protocol::send(&theirs, &outward, &[handed.as_fd()]).unwrap();
        drop(handed);
        let heard = tokio::time::timeout(PATIENCE, second.read(&mut [0])).await.unwrap();
        // It is of our own network, and not taken: which is heard, and no orderly end.
        assert_eq!(heard.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        drop(theirs);
        broker.join_next().await.unwrap().unwrap();
    }
}
