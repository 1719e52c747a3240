//! Connections: who is at the other end, how much they may send, and when they end.

use std::io;
use std::pin::Pin;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Version};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustix::io::Errno;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use crate::Peer;
use crate::crowd::{Crowd, Patient, Place};

/// How many connections a listener has at once.
const MAX_CONNECTIONS: usize = 1_024;
/// How many more are told so at once; the rest hears nothing.
const MAX_REFUSALS: usize = 64;
const REFUSAL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
    retry-after: 1\r\nconnection: close\r\n\r\n\
    {\"error\":{\"code\":\"busy\",\"message\":\"too many requests are under way\",\
    \"hint\":\"try again in a moment, or fewer at once\"}}";
/// How long the head of a request may take, and an idle connection may stay.
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
const MAX_HEADERS: usize = 64;
const MAX_HEAD: u32 = 32 << 10;
/// How many requests one HTTP/2 connection has under way at once.
const MAX_STREAMS: u32 = 100;
/// How long to wait when the host has nothing left for a connection.
const BREATHER: Duration = Duration::from_millis(100);

/// How much may be under way to a client on the same host that is sent more than fits the usual size.
const SEND_BUFFER: usize = 512 << 10;

/// What a connection is read and written by.
pub trait Connection: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Has the other end see, when this is dropped, that it was cut off and did not just end.
    fn reset(&self) {}

    /// Lets more be under way to the other end, if that can be.
    fn widen(&self) {}

    /// Finds out which HTTP the other end wants to speak.
    fn agree(&mut self) -> impl Future<Output = io::Result<Version>> + Send {
        std::future::ready(Ok(Version::HTTP_11))
    }
}

impl Connection for UnixStream {
    fn widen(&self) {
        // The usual size holds less than one piece of a log, and each is then sent in turns with whoever reads.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(self, SEND_BUFFER);
    }
}

#[cfg(test)]
impl Connection for tokio::io::DuplexStream {}

impl Connection for TcpStream {
    fn reset(&self) {
        // What was not sent yet is thrown away, and the other end gets a reset. See socket(7).
        let _ = rustix::net::sockopt::set_socket_linger(self, Some(Duration::ZERO));
    }
}

/// Where connections come from.
pub trait Listener: Send + Sync + 'static {
    /// What a connection is read and written by.
    type Stream: Connection;

    /// Waits for the next connection.
    fn next(&self) -> impl Future<Output = io::Result<(Self::Stream, Peer)>> + Send;
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<(UnixStream, Peer)> {
        let (stream, _) = self.accept().await?;
        let peer = Peer::Unix { uid: stream.peer_cred()?.uid() };
        Ok((stream, peer))
    }
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<(TcpStream, Peer)> {
        let (stream, from) = self.accept().await?;
        stream.set_nodelay(true)?;
        let peer = Peer::Tcp { from, to: stream.local_addr()? };
        Ok((stream, peer))
    }
}

/// Cuts off the connection of a request at once, as if the daemon were gone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hangup(CancellationToken);

impl Hangup {
    pub(crate) fn now(&self) {
        self.0.cancel();
    }

    pub(crate) fn is_now(&self) -> bool {
        self.0.is_cancelled()
    }
}

/// The listeners of a daemon and the connections that they took.
#[derive(Debug, Clone, Default)]
pub struct Server {
    tasks: TaskTracker,
    /// Takes no new request.
    closing: CancellationToken,
    /// Drops the requests that still run.
    giving_up: CancellationToken,
}

impl Server {
    /// Makes one that listens to nobody yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Serves whoever connects: on a unix socket each as the user that the kernel says it is.
    pub fn serve(&self, listener: impl Listener, router: Router) {
        let this = self.clone();
        self.tasks.spawn(async move { this.accept(&listener, router).await });
    }

    /// Takes no more requests and waits for those that run, for as long as `patience` lasts.
    pub async fn close(&self, patience: Duration) {
        self.closing.cancel();
        self.tasks.close();
        if tokio::time::timeout(patience, self.tasks.wait()).await.is_err() {
            tracing::warn!(connections = self.tasks.len(), "requests did not end in time");
            self.giving_up.cancel();
            self.tasks.wait().await;
        }
    }

    async fn accept(&self, listener: &impl Listener, router: Router) {
        let (crowd, refused) = (Crowd::default(), Crowd::default());
        loop {
            let Some(accepted) = self.closing.run_until_cancelled(listener.next()).await else {
                return;
            };
            match accepted {
                Ok((stream, peer)) => {
                    let (this, router) = (self.clone(), router.clone());
                    let mut stream = Patient::new(stream);
                    if let Some(place) = crowd.enter(MAX_CONNECTIONS) {
                        self.tasks.spawn(async move {
                            this.converse(stream, peer, &place, router).await;
                        });
                    } else if let Some(place) = refused.enter(MAX_REFUSALS) {
                        self.tasks.spawn(async move {
                            let say = async {
                                // Whoever does not listen is not told.
                                let _ = stream.write_all(REFUSAL).await;
                                let _ = stream.shutdown().await;
                            };
                            place.leave.run_until_cancelled(say).await;
                        });
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection");
                    let scarce = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
                    // Anything else is a peer that has gone already.
                    if Errno::from_io_error(&error).is_some_and(|errno| scarce.contains(&errno)) {
                        crowd.shed();
                        tokio::time::sleep(BREATHER).await;
                    }
                }
            }
        }
    }

    async fn converse<S: Connection>(
        &self,
        mut stream: Patient<S>,
        peer: Peer,
        place: &Place,
        router: Router,
    ) {
        let agreed = async { tokio::time::timeout(HEAD_TIMEOUT, stream.agree()).await };
        let agreed = tokio::select! {
            agreed = agreed => agreed,
            () = place.leave.cancelled() => return,
            () = self.closing.cancelled() => return,
        };
        let Ok(Ok(version)) = agreed else { return };
        let (seat, hangup) = (place.seat(), stream.hangup());
        let cut = hangup.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(peer);
            request.extensions_mut().insert(hangup.clone());
            request.extensions_mut().insert(seat.clone());
            router.clone().oneshot(request.map(Body::new))
        });
        let stream = TokioIo::new(stream);
        if version == Version::HTTP_2 {
            let connection = http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .max_concurrent_streams(MAX_STREAMS)
                .max_header_list_size(MAX_HEAD)
                // One that does not answer is gone.
                .keep_alive_interval(HEAD_TIMEOUT)
                .serve_connection(stream, service);
            return self.see_through(connection, |it| it.graceful_shutdown(), place, &cut).await;
        }
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_HEAD as usize)
            .serve_connection(stream, service)
            .with_upgrades();
        self.see_through(connection, |it| it.graceful_shutdown(), place, &cut).await;
    }

    /// Serves a connection until it ends, or has no reason to go on.
    async fn see_through<C: Future<Output = hyper::Result<()>>>(
        &self,
        connection: C,
        end: impl FnOnce(Pin<&mut C>),
        place: &Place,
        cut: &Hangup,
    ) {
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = place.leave.cancelled() => return,
            () = cut.0.cancelled() => return,
            () = self.closing.cancelled() => {
                end(connection.as_mut());
                tokio::select! {
                    ended = connection => ended,
                    () = cut.0.cancelled() => return,
                    () = self.giving_up.cancelled() => return,
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection broke");
        }
    }
}
