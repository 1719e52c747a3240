//! A reverse proxy to servers inside sandboxes: HTTP/1.1, any upgrade of it, and plain TCP.
//!
//! What answers was written by whoever the sandbox is held against. Its head is bounded in size,
//! number and time; its body streams through buffers of a fixed size and is never looked at. Each
//! request has a connection of its own, so that nothing one server or client leaves behind on a
//! connection reaches the next. A connection lives no longer than its client, its sandbox and the
//! daemon, and counts as work of the sandbox's sessions while it does.
//!
//! Only ports of the sandbox's own loopback can be reached: where a connection goes is decided by
//! the sandbox that the caller was let into, never by what the request or the answer says.
//!
//! What of a request may go in and what of an answer may come out depends on who shares the origin
//! with it, and is left to each dialect; [`proxy`] passes on every header but those that belong to
//! one connection alone.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Version, header};
use axum::response::{IntoResponse as _, Response};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::client::conn::http1;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use warren::{PortStream, Sandbox, SandboxId};

use crate::error::ApiError;
use crate::{Api, Peer};

/// How many connections there may be to one sandbox at once.
pub(crate) const MAX_PER_SANDBOX: usize = 128;
/// How many connections there may be to all sandboxes of one tenant at once.
pub(crate) const MAX_PER_TENANT: usize = 512;
/// How long a server may take to begin its answer, from the last byte of the request on.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// How many headers an answer may have, and how large its head may be.
const MAX_HEADERS: usize = 100;
const MAX_HEAD: usize = 64 << 10;
/// How much is read at once between two ends of a tunnel.
const CHUNK: usize = 32 << 10;
/// How often a connection is asked whether its sandbox is still there. The kernel closes a server's
/// sockets with it, so this only matters to one whose client does not read.
const LOOK: Duration = Duration::from_secs(1);

/// Headers that are about one connection and not about the message (RFC 9110, 7.6.1).
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];
/// Headers that say where a request came from; the client's own are not believed.
const FORWARDED: [HeaderName; 5] = [
    header::FORWARDED,
    HeaderName::from_static("x-forwarded-for"),
    HeaderName::from_static("x-forwarded-host"),
    HeaderName::from_static("x-forwarded-proto"),
    HeaderName::from_static("x-real-ip"),
];

/// Where a request goes.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) sandbox: Arc<dyn Sandbox>,
    pub(crate) tenant: Arc<str>,
    pub(crate) port: u16,
    /// What the server gets as `Host`; an address of its own if absent.
    pub(crate) host: Option<HeaderValue>,
}

/// Counts connections.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ports(Arc<Mutex<Open>>);

#[derive(Debug, Default)]
struct Open {
    sandboxes: HashMap<SandboxId, usize>,
    tenants: HashMap<Arc<str>, usize>,
}

/// One connection, counted as long as this lives.
#[derive(Debug)]
struct Place {
    ports: Ports,
    sandbox: SandboxId,
    tenant: Arc<str>,
}

impl Ports {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, sandbox: &SandboxId, tenant: &Arc<str>) -> Result<Place, ApiError> {
        let mut open = self.open();
        let has = |count: Option<&usize>| count.copied().unwrap_or(0);
        if has(open.sandboxes.get(sandbox)) >= MAX_PER_SANDBOX {
            return Err(ApiError::too_many_connections("sandbox", MAX_PER_SANDBOX));
        }
        if has(open.tenants.get(tenant)) >= MAX_PER_TENANT {
            return Err(ApiError::too_many_connections("tenant", MAX_PER_TENANT));
        }
        *open.sandboxes.entry(sandbox.clone()).or_default() += 1;
        *open.tenants.entry(Arc::clone(tenant)).or_default() += 1;
        let (sandbox, tenant) = (sandbox.clone(), Arc::clone(tenant));
        Ok(Place { ports: self.clone(), sandbox, tenant })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        fn less<K: std::hash::Hash + Eq>(counts: &mut HashMap<K, usize>, key: &K) {
            match counts.get_mut(key) {
                Some(count @ 2..) => *count -= 1,
                _ => drop(counts.remove(key)),
            }
        }
        let mut open = self.ports.open();
        less(&mut open.sandboxes, &self.sandbox);
        less(&mut open.tenants, &self.tenant);
    }
}

/// Connects to the port, and counts the connection for as long as it is open.
async fn connect(api: &Api, target: &Target) -> Result<PortStream, ApiError> {
    let place = api.0.ports.take(target.sandbox.id(), &target.tenant)?;
    Ok(target.sandbox.connect(target.port).await?.holding(place))
}

/// Waits until a connection has no reason to be any more, whatever its ends are doing.
async fn over(api: Api, sandbox: Arc<dyn Sandbox>) {
    let gone = async {
        loop {
            tokio::time::sleep(LOOK).await;
            if !sandbox.is_alive().await {
                return;
            }
        }
    };
    tokio::select! {
        () = api.0.stop.cancelled() => {}
        () = gone => {}
    }
}

/// Hands a request to the server on a port of a sandbox, and its answer back.
///
/// The path of the request is the one that the server is asked for. Credentials of ours must be
/// gone from it already.
pub(crate) async fn proxy(
    api: &Api,
    target: &Target,
    mut request: Request,
    patience: Duration,
) -> Result<Response, ApiError> {
    let port = target.port;
    let wanted = upgrade_of(request.headers());
    let client = wanted.is_some().then(|| hyper::upgrade::on(&mut request));
    let stream = connect(api, target).await?;
    let (watch, heard) = Heard::new();
    let request = outgoing(request, target, wanted.as_ref(), heard)?;

    let handshake = http1::Builder::new()
        // As most clients write them, for a server that is told who it is and looks for `Host`.
        .title_case_headers(target.host.is_some())
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD)
        .handshake(TokioIo::new(stream))
        .await;
    let (mut sender, connection) = handshake.map_err(|error| broken(port, &error))?;
    // Dropped with this future or with the body of the answer, whichever is the last to be used.
    let cancelled = CancellationToken::new();
    let guard = cancelled.clone().drop_guard();
    let over = over(api.clone(), Arc::clone(&target.sandbox));
    api.0.tasks.spawn(async move {
        tokio::select! {
            _ = connection.with_upgrades() => {}
            () = cancelled.cancelled() => {}
            () = over => {}
        }
    });

    let answer = tokio::select! {
        answer = sender.send_request(request) => answer.map_err(|error| broken(port, &error))?,
        () = watch.quiet_for(patience) => return Err(ApiError::slow_server(port, patience)),
    };
    let (mut head, body) = answer.into_parts();
    head.version = Version::HTTP_11;
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        let given = upgrade_of(&head.headers);
        let (Some(client), Some(given)) = (client, given) else {
            return Err(ApiError::bad_server(port, "it switched protocols unasked"));
        };
        strip(&mut head.headers);
        offer(&mut head.headers, &given);
        let server = head.extensions.remove::<OnUpgrade>();
        let server = server.ok_or_else(|| ApiError::internal("an upgrade without a connection"))?;
        head.extensions.clear();
        tunnel(api, target, client, async move { server.await.ok().map(TokioIo::new) });
        // From here on the connection is the tunnel's.
        guard.disarm();
        return Ok(Response::from_parts(head, Body::empty()));
    }
    strip(&mut head.headers);
    head.extensions.clear();
    Ok(Response::from_parts(head, Body::new(Answer { body, _guard: guard })))
}

/// Joins the client's connection to the port itself: bytes both ways.
pub(crate) async fn join(
    api: &Api,
    target: &Target,
    mut request: Request,
    protocol: &HeaderValue,
) -> Result<Response, ApiError> {
    let client = hyper::upgrade::on(&mut request);
    let stream = connect(api, target).await?;
    tunnel(api, target, client, async move { Some(stream) });
    let mut response = StatusCode::SWITCHING_PROTOCOLS.into_response();
    offer(response.headers_mut(), protocol);
    Ok(response)
}

/// Copies bytes both ways until both have ended, or there is no reason to go on.
fn tunnel<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    api: &Api,
    target: &Target,
    client: OnUpgrade,
    server: impl Future<Output = Option<S>> + Send + 'static,
) {
    let over = over(api.clone(), Arc::clone(&target.sandbox));
    api.0.tasks.spawn(async move {
        let copy = async {
            let (Ok(client), Some(mut server)) = tokio::join!(client, server) else { return };
            let mut client: TokioIo<Upgraded> = TokioIo::new(client);
            // However it ends, both are closed then, and each end sees that.
            let _ =
                tokio::io::copy_bidirectional_with_sizes(&mut client, &mut server, CHUNK, CHUNK)
                    .await;
        };
        tokio::select! {
            () = copy => {}
            () = over => {}
        }
    });
}

/// Returns the protocol that a message asks to switch to, or switches to.
pub(crate) fn upgrade_of(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut options = headers.get_all(header::CONNECTION).into_iter();
    let asks = options.any(|value| {
        let value = value.to_str().unwrap_or_default();
        value.split(',').any(|option| option.trim().eq_ignore_ascii_case("upgrade"))
    });
    headers.get(header::UPGRADE).filter(|_| asks).cloned()
}

fn offer(headers: &mut HeaderMap, protocol: &HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, protocol.clone());
}

/// Removes what is about one connection alone, also what a message itself says is.
fn strip(headers: &mut HeaderMap) {
    let mut named = Vec::new();
    for value in headers.get_all(header::CONNECTION) {
        let value = value.to_str().unwrap_or_default();
        named.extend(value.split(',').filter_map(|name| name.trim().parse::<HeaderName>().ok()));
    }
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

/// Makes the request as the server gets it.
fn outgoing(
    request: Request,
    target: &Target,
    upgrade: Option<&HeaderValue>,
    heard: Heard,
) -> Result<hyper::Request<Said>, ApiError> {
    let (mut head, body) = request.into_parts();
    let headers = &mut head.headers;
    strip(headers);
    // The body is sent at once, without waiting to be asked for it.
    headers.remove(header::EXPECT);
    for name in &FORWARDED {
        headers.remove(name);
    }
    let host = headers.remove(header::HOST);
    if let Some(host) = host {
        headers.insert("x-forwarded-host", host);
    }
    headers.insert("x-forwarded-proto", HeaderValue::from_static("http"));
    if let Some(Peer::Tcp { from, .. }) = head.extensions.get::<Peer>() {
        let from = HeaderValue::from_str(&from.ip().to_string());
        headers.extend(from.ok().map(|from| (HeaderName::from_static("x-forwarded-for"), from)));
    }
    let host = match &target.host {
        Some(host) => host.clone(),
        // What servers made for development take without being told to.
        None => HeaderValue::from_str(&format!("localhost:{}", target.port))
            .map_err(|_| ApiError::internal("a host of digits"))?,
    };
    headers.insert(header::HOST, host);
    if let Some(protocol) = upgrade {
        offer(headers, protocol);
    }
    head.version = Version::HTTP_11;
    // Of no use outside, and the client's own upgrade must not be found here.
    head.extensions.clear();
    Ok(hyper::Request::from_parts(head, Said { body, heard }))
}

fn broken(port: u16, error: &hyper::Error) -> ApiError {
    let why = if error.is_parse_too_large() {
        "the head of its answer is too large"
    } else if error.is_parse() || error.is_parse_status() {
        "its answer is no HTTP, or has too many headers"
    } else if error.is_user() || error.is_body_write_aborted() {
        "the body of the request broke off"
    } else {
        "it closed the connection before its answer"
    };
    ApiError::bad_server(port, why)
}

/// When the client was last heard.
#[derive(Debug, Clone)]
struct Heard(Arc<Mutex<Instant>>);

impl Heard {
    fn new() -> (Self, Self) {
        let this = Self(Arc::new(Mutex::new(Instant::now())));
        (this.clone(), this)
    }

    fn now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Waits until nothing was heard for this long.
    async fn quiet_for(&self, patience: Duration) {
        loop {
            let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if last.elapsed() >= patience {
                return;
            }
            tokio::time::sleep_until(last + patience).await;
        }
    }
}

/// The body of a request, on its way in.
#[derive(Debug)]
struct Said {
    body: Body,
    heard: Heard,
}

impl HttpBody for Said {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if frame.is_ready() {
            self.heard.now();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer, on its way out; its connection goes with it.
#[derive(Debug)]
struct Answer {
    body: Incoming,
    _guard: DropGuard,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn what_is_about_one_connection_stays_on_it() {
        let mut given = headers(&[
            ("connection", "close, X-Secret"),
            ("x-secret", "1"),
            ("te", "trailers"),
            ("transfer-encoding", "chunked"),
            ("proxy-authorization", "x"),
            ("upgrade", "websocket"),
            ("x-kept", "1"),
        ]);
        strip(&mut given);
        assert_eq!(given, headers(&[("x-kept", "1")]));
    }

    #[test]
    fn an_upgrade_is_asked_for_in_two_headers() {
        for (pairs, asks) in [
            (&[("connection", "Upgrade"), ("upgrade", "websocket")][..], true),
            (&[("connection", "keep-alive, UPGRADE"), ("upgrade", "x")], true),
            (&[("upgrade", "websocket")], false),
            (&[("connection", "upgrade")], false),
            (&[("connection", "close"), ("upgrade", "x")], false),
        ] {
            assert_eq!(upgrade_of(&headers(pairs)).is_some(), asks, "{pairs:?}");
        }
    }

    #[test]
    fn a_place_is_free_again_when_its_connection_is_gone() {
        let (ports, tenant) = (Ports::default(), Arc::from("a"));
        let sandbox = SandboxId::from_string("sbx-1");
        let mut places: Vec<Place> =
            (0..MAX_PER_SANDBOX).map(|_| ports.take(&sandbox, &tenant).unwrap()).collect();
        let refused = ports.take(&sandbox, &tenant).unwrap_err();
        assert_eq!((refused.status().as_u16(), refused.code()), (429, "too_many_connections"));
        let other = SandboxId::from_string("sbx-2");
        places.push(ports.take(&other, &tenant).unwrap());
        places.remove(0);
        places.push(ports.take(&sandbox, &tenant).unwrap());
        places.clear();
        let open = ports.open();
        assert!(open.sandboxes.is_empty() && open.tenants.is_empty(), "nothing is kept");
    }

    #[test]
    fn one_tenant_cannot_have_every_connection() {
        let (ports, tenant) = (Ports::default(), Arc::from("a"));
        let id = |i: usize| SandboxId::from_string(format!("sbx-{i}"));
        let _places: Vec<Place> =
            (0..MAX_PER_TENANT).map(|i| ports.take(&id(i), &tenant).unwrap()).collect();
        assert!(ports.take(&id(MAX_PER_TENANT), &tenant).is_err());
        ports.take(&id(0), &Arc::from("b")).unwrap();
    }
}
