//! What runs inside a sandbox of E2B's and answers on port 49983; here it is the daemon that does,
//! through the manager, so that nothing of it is in the sandbox's reach.

mod connect;
mod encoding;
mod filesystem;
mod process;
mod signature;
mod transfer;
mod wire;

use std::path::PathBuf;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::Stream;
use subtle::ConstantTimeEq as _;

use self::connect::{Failure, Incoming, Shape, Wire};
use super::routing::refusal;
use super::{Door, E2b, SandboxEntry};
use crate::audit::Note;
use crate::principal::Principal;

pub(super) use filesystem::Watchers;
pub(super) use transfer::Asked;

#[cfg(feature = "fuzz")]
pub(crate) use connect::fuzz;

/// The port that envd answers on.
pub(super) const PORT: u16 = 49983;
/// The header that carries a secured sandbox's token.
pub(super) const TOKEN: &str = "x-access-token";
const KEEPALIVE: &str = "keepalive-ping-interval";
const DEFAULT_KEEPALIVE: Duration = Duration::from_secs(90);

/// One call, and whom it is for.
struct Call {
    e2b: E2b,
    entry: SandboxEntry,
    headers: HeaderMap,
    /// The user that was named.
    user: Option<String>,
    /// What is noted of it.
    note: Note,
}

impl Call {
    fn new(e2b: &E2b, entry: SandboxEntry, headers: HeaderMap, note: Note) -> Self {
        let user = named_user(&headers);
        Self { e2b: e2b.clone(), entry, headers, user, note }
    }

    /// Returns whose sandbox it is, who is whom the daemon knows to ask.
    fn who(&self) -> Principal {
        let (tenant, quotas) = (self.entry.tenant.clone(), self.entry.quotas);
        let (note, followed) = (self.note.clone(), Default::default());
        Principal { tenant, client: None, operator: false, quotas, note, followed }
    }

    /// Returns who asks, of the sandbox's own users.
    fn user(&self) -> Result<&str, Failure> {
        let user = self.user.as_deref().unwrap_or(&self.entry.user);
        if user.is_empty() { Err(Failure::no_user(user)) } else { Ok(user) }
    }

    /// Returns a path as the sandbox's files take it; without any it is where commands begin.
    fn path(&self, path: &str) -> PathBuf {
        match (path, &self.entry.workdir) {
            ("", Some(workdir)) => workdir.into(),
            (path, _) => path.into(),
        }
    }

    /// Returns where a command begins that asks to begin there.
    fn place(&self, cwd: Option<&str>) -> Option<String> {
        cwd.filter(|cwd| !cwd.is_empty()).map(str::to_owned).or_else(|| self.entry.workdir.clone())
    }

    fn deadline(&self) -> Result<Option<Duration>, Failure> {
        connect::deadline(&self.headers)
    }

    /// Returns after how much silence a stream gives a sign of life.
    fn keepalive(&self) -> Duration {
        let given = self.headers.get(KEEPALIVE).and_then(|value| value.to_str().ok()?.parse().ok());
        // Whoever asks for more than once a second gets that.
        given
            .map_or(DEFAULT_KEEPALIVE, |seconds: u64| Duration::from_secs(seconds.clamp(1, 86_400)))
    }
}

/// Returns the user that `Authorization: Basic` names. The password is no credential.
fn named_user(headers: &HeaderMap) -> Option<String> {
    let given = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, value) = given.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let text = String::from_utf8(STANDARD.decode(value.trim()).ok()?).ok()?;
    Some(text.split_once(':')?.0.to_owned())
}

/// Whose a request is.
#[derive(Debug)]
pub(super) enum Whose {
    /// The tenant's of the sandbox: it was shown what only that has, or there is nothing to show.
    Owners,
    /// Nobody's: what is asked for needs nothing.
    Nobodys,
    /// Nobody's either, with what it is answered: it is not let in.
    Refused(Response),
}

/// Tells whose a request is, before anything is done for it.
pub(super) fn whose(door: &Door, request: &Request) -> Whose {
    let Some(token) = &door.access_token else { return Whose::Owners };
    let sent = request.headers().get(TOKEN).map(HeaderValue::as_bytes);
    let shown = bool::from(token.as_bytes().ct_eq(sent.unwrap_or_default()));
    match Endpoint::of(request) {
        _ if shown => Whose::Owners,
        _ if *request.method() == Method::OPTIONS => Whose::Nobodys,
        // That it is there at all everybody may know who knows its id.
        Some(Endpoint::Health) => Whose::Nobodys,
        Some(Endpoint::Files) => match transfer::refuses(token, request) {
            None => Whose::Owners,
            Some(refused) => Whose::Refused(shared(refused)),
        },
        _ => {
            let message = "unauthorized access, please provide a valid access token or method \
                           signing if supported";
            Whose::Refused(shared(refusal(StatusCode::UNAUTHORIZED, message)))
        }
    }
}

/// Answers a request to a sandbox's envd that was let in.
pub(super) async fn serve(e2b: &E2b, entry: SandboxEntry, request: Request) -> Response {
    shared(if *request.method() == Method::OPTIONS {
        preflight(request.headers())
    } else {
        dispatch(e2b, entry, request).await
    })
}

/// Lets pages of all sites read an answer.
fn shared(mut response: Response) -> Response {
    let any = HeaderValue::from_static("*");
    response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, any.clone());
    response.headers_mut().insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, any);
    response
}

/// Tells a browser that it may: whoever has the token may use it from anywhere.
fn preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers
        .insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, PUT"));
    let wanted = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    headers.extend(wanted.map(|wanted| (header::ACCESS_CONTROL_ALLOW_HEADERS, wanted)));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("7200"));
    response
}

/// What envd is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Endpoint {
    Health,
    Files,
    Envs,
    Metrics,
    List,
    Start,
    Connect,
    SendInput,
    StreamInput,
    SendSignal,
    CloseStdin,
    Update,
    Stat,
    MakeDir,
    Move,
    ListDir,
    Remove,
    WatchDir,
    CreateWatcher,
    WatcherEvents,
    RemoveWatcher,
}

/// Every call there is, by its method and path: what is not here is not served, and a test asks each
/// without the sandbox's token.
const ENDPOINTS: [(&str, &str, Endpoint); 22] = [
    ("GET", "/health", Endpoint::Health),
    ("GET", "/files", Endpoint::Files),
    ("POST", "/files", Endpoint::Files),
    ("GET", "/envs", Endpoint::Envs),
    ("GET", "/metrics", Endpoint::Metrics),
    ("POST", "/process.Process/List", Endpoint::List),
    ("POST", "/process.Process/Start", Endpoint::Start),
    ("POST", "/process.Process/Connect", Endpoint::Connect),
    ("POST", "/process.Process/SendInput", Endpoint::SendInput),
    ("POST", "/process.Process/StreamInput", Endpoint::StreamInput),
    ("POST", "/process.Process/SendSignal", Endpoint::SendSignal),
    ("POST", "/process.Process/CloseStdin", Endpoint::CloseStdin),
    ("POST", "/process.Process/Update", Endpoint::Update),
    ("POST", "/filesystem.Filesystem/Stat", Endpoint::Stat),
    ("POST", "/filesystem.Filesystem/MakeDir", Endpoint::MakeDir),
    ("POST", "/filesystem.Filesystem/Move", Endpoint::Move),
    ("POST", "/filesystem.Filesystem/ListDir", Endpoint::ListDir),
    ("POST", "/filesystem.Filesystem/Remove", Endpoint::Remove),
    ("POST", "/filesystem.Filesystem/WatchDir", Endpoint::WatchDir),
    ("POST", "/filesystem.Filesystem/CreateWatcher", Endpoint::CreateWatcher),
    ("POST", "/filesystem.Filesystem/GetWatcherEvents", Endpoint::WatcherEvents),
    ("POST", "/filesystem.Filesystem/RemoveWatcher", Endpoint::RemoveWatcher),
];

/// Lists every call, as a method and a path.
pub(super) fn routes() -> impl Iterator<Item = (&'static str, &'static str)> {
    ENDPOINTS.into_iter().map(|(method, path, _)| (method, path))
}

impl Endpoint {
    /// Returns what a request asks for, if there is such a call.
    fn of(request: &Request) -> Option<Self> {
        let verb = match *request.method() {
            Method::HEAD => "GET",
            _ => request.method().as_str(),
        };
        let found = ENDPOINTS.iter().find(|(by, at, _)| (*by, *at) == (verb, request.uri().path()));
        found.map(|(.., endpoint)| *endpoint)
    }
}

async fn dispatch(e2b: &E2b, entry: SandboxEntry, request: Request) -> Response {
    let path = request.uri().path();
    let is_there = ENDPOINTS.iter().any(|(_, at, _)| *at == path);
    let endpoint = Endpoint::of(&request);
    let call = Call::new(e2b, entry, request.headers().clone(), Note::of(&request));
    match endpoint {
        Some(endpoint) => answer(&call, endpoint, request).await,
        None if is_there => refusal(StatusCode::METHOD_NOT_ALLOWED, "method not allowed"),
        None => refusal(StatusCode::NOT_FOUND, "not found"),
    }
}

/// Answers whoever may ask.
async fn answer(call: &Call, endpoint: Endpoint, request: Request) -> Response {
    let shape = Shape::of(&call.headers);
    let (head, body) = request.into_parts();
    match endpoint {
        Endpoint::Files => transfer::serve(call, Request::from_parts(head, body)).await,
        Endpoint::Health => {
            (StatusCode::NO_CONTENT, [(header::CACHE_CONTROL, "no-store")]).into_response()
        }
        Endpoint::Envs => {
            let envs: serde_json::Map<_, _> =
                call.entry.env.iter().map(|(k, v)| (k.clone(), v.clone().into())).collect();
            ([(header::CACHE_CONTROL, "no-store")], axum::Json(envs)).into_response()
        }
        Endpoint::Metrics => metrics(call).await,
        Endpoint::List => unary(call, shape, body, process::list).await,
        Endpoint::Start => streamed(call, shape, body, process::start).await,
        Endpoint::Connect => streamed(call, shape, body, process::connect).await,
        Endpoint::SendInput => unary(call, shape, body, process::send_input).await,
        Endpoint::StreamInput => stream_input(call, shape, body).await,
        Endpoint::SendSignal => unary(call, shape, body, process::send_signal).await,
        Endpoint::CloseStdin => unary(call, shape, body, process::close_stdin).await,
        Endpoint::Update => unary(call, shape, body, process::update).await,
        Endpoint::Stat => unary(call, shape, body, filesystem::stat).await,
        Endpoint::MakeDir => unary(call, shape, body, filesystem::make_dir).await,
        Endpoint::Move => unary(call, shape, body, filesystem::rename).await,
        Endpoint::ListDir => unary(call, shape, body, filesystem::list_dir).await,
        Endpoint::Remove => unary(call, shape, body, filesystem::remove).await,
        Endpoint::WatchDir => streamed(call, shape, body, filesystem::watch_dir).await,
        Endpoint::CreateWatcher => unary(call, shape, body, filesystem::create_watcher).await,
        Endpoint::WatcherEvents => unary(call, shape, body, filesystem::watcher_events).await,
        Endpoint::RemoveWatcher => unary(call, shape, body, filesystem::remove_watcher).await,
    }
}

/// Refuses a message that is none, or a stream where one message is wanted, or the other way round.
fn wrong_shape() -> Response {
    let mut response = refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported content type");
    let accepted = "application/json, application/proto, application/connect+json, \
                    application/connect+proto";
    let name = header::HeaderName::from_static("accept-post");
    response.headers_mut().insert(name, HeaderValue::from_static(accepted));
    response
}

/// Serves a call with one answer.
async fn unary<'a, Q: Wire, A: Wire, F>(
    call: &'a Call,
    shape: Option<Shape>,
    body: Body,
    method: impl FnOnce(&'a Call, Q) -> F + Send,
) -> Response
where
    F: Future<Output = Result<A, Failure>> + Send + 'a,
{
    let Some(Shape::Unary(codec)) = shape else { return wrong_shape() };
    let done = async {
        let deadline = call.deadline()?;
        let work = async {
            let request = connect::read_unary(codec, &call.headers, body).await?;
            method(call, request).await
        };
        connect::within(deadline, work).await
    };
    connect::answer(codec, done.await)
}

/// Serves a call that is answered by a stream.
async fn streamed<'a, Q: Wire, A: Wire, S, F>(
    call: &'a Call,
    shape: Option<Shape>,
    body: Body,
    method: impl FnOnce(&'a Call, Q) -> F + Send,
) -> Response
where
    F: Future<Output = Result<S, Failure>> + Send + 'a,
    S: Stream<Item = Result<A, Failure>> + Send + 'static,
{
    let Some(Shape::Stream(codec)) = shape else { return wrong_shape() };
    let begun = async {
        let request = Incoming::new(codec, &call.headers, body)?.only().await?;
        method(call, request).await
    };
    match begun.await {
        Ok(messages) => connect::stream_answer(codec, messages),
        Err(failure) => failure.streamed(codec),
    }
}

async fn stream_input(call: &Call, shape: Option<Shape>, body: Body) -> Response {
    let Some(Shape::Stream(codec)) = shape else { return wrong_shape() };
    let done = async {
        let deadline = call.deadline()?;
        let incoming = Incoming::new(codec, &call.headers, body)?;
        connect::within(deadline, process::stream_input(call, incoming)).await
    };
    let done = done.await;
    connect::stream_answer(codec, futures_util::stream::iter([done]))
}

/// Says what the sandbox uses.
async fn metrics(call: &Call) -> Response {
    let usage = match call.entry.sandbox.resource_usage().await {
        Ok(usage) => usage,
        Err(error) => return refusal(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    };
    let limits = &call.entry.sandbox.capabilities().limits;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let wall = usage.wall_time_ms.max(1) as f64;
    let percent = (usage.cpu_time_ms as f64 / wall * 10_000.0).round() / 100.0;
    let total = limits.max_memory_bytes.unwrap_or_default();
    let body = serde_json::json!({
        "ts": chrono::Utc::now().timestamp(),
        "cpu_count": cpus,
        "cpu_used_pct": percent,
        "mem_total": total,
        "mem_used": usage.peak_memory_bytes,
        "mem_total_mib": total >> 20,
        "mem_used_mib": usage.peak_memory_bytes >> 20,
        "mem_cache": 0,
        "disk_used": usage.bytes_written,
        "disk_total": limits.max_write_bytes.unwrap_or_default(),
    });
    ([(header::CACHE_CONTROL, "no-store")], axum::Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_named_without_a_password() {
        let of = |value: &'static str| {
            named_user(
                &[(header::AUTHORIZATION, HeaderValue::from_static(value))].into_iter().collect(),
            )
        };
        assert_eq!(of("Basic cm9vdDo=").as_deref(), Some("root"));
        assert_eq!(of("basic dXNlcjpwYXNz").as_deref(), Some("user"));
        for none in ["Bearer x", "Basic", "Basic !!!", "Basic cm9vdA=="] {
            assert_eq!(of(none), None, "{none}");
        }
    }
}
