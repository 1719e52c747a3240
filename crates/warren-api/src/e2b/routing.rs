//! Whom a request is for: a sandbox, named by headers, by the host or by a signature, or the control
//! plane.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use hyper::body::{Frame, SizeHint};
use serde_json::json;
use subtle::ConstantTimeEq as _;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tower::ServiceExt as _;

use super::envd::{self, Whose};
use super::{Door, E2b, SandboxEntry};
use crate::audit::Note;
use crate::crowd::{Busy, Holding, Seat};
use crate::error::ApiError;
use crate::principal::Principal;
use crate::proxy::{self, PATIENCE, Target};
use crate::quota::{Admitted, Followed, is_stream};
use crate::server::Hangup;

const SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
const SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");
const TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");
/// What is for us, and for no server in a sandbox.
const OURS: [HeaderName; 4] =
    [SANDBOX_ID, SANDBOX_PORT, TRAFFIC_TOKEN, HeaderName::from_static(envd::TOKEN)];

/// Which port of which sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    id: String,
    port: u16,
}

/// Whom a request is for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum For {
    Sandbox(Place),
    /// The sandbox whose token made its signature.
    Signer(envd::Asked),
    Control,
}

/// The state of the router: the dialect, and what is not a sandbox's.
#[derive(Clone)]
struct Both {
    e2b: E2b,
    control: Router,
}

pub(super) fn router(e2b: &E2b, control: Router) -> Router {
    let both = Both { e2b: e2b.clone(), control };
    Router::new().fallback(route).with_state(both)
}

async fn route(State(Both { e2b, control }): State<Both>, mut request: Request) -> Response {
    name_host(&mut request);
    match addressee(&request) {
        Ok(For::Control) => control.oneshot(request).await.into_response(),
        Ok(For::Sandbox(place)) => enter(&e2b, &place, request).await,
        Ok(For::Signer(asked)) => {
            let running = e2b.0.directory.running().await;
            // Each is looked at, so that how long it takes says nothing about which it is.
            let by = |entry: &SandboxEntry| {
                entry.access_token.as_ref().is_some_and(|token| asked.signed.is_by(token))
            };
            let mut signers: Vec<_> = running.into_iter().filter(by).collect();
            match signers.pop() {
                Some(entry) => {
                    enter(&e2b, &Place { id: entry.id, port: envd::PORT }, request).await
                }
                None => refusal(StatusCode::UNAUTHORIZED, "invalid signature"),
            }
        }
        Err(reason) => refusal(StatusCode::BAD_REQUEST, &reason),
    }
}

/// Puts the name that a request was sent to where HTTP/1.1 has it: HTTP/2 has it in the address.
fn name_host(request: &mut Request) {
    let Some(name) = request.uri().authority().map(|name| name.as_str().to_owned()) else { return };
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    if let (Ok(path), Ok(name)) = (path.parse(), HeaderValue::from_str(&name)) {
        *request.uri_mut() = path;
        request.headers_mut().entry(header::HOST).or_insert(name);
    }
}

/// Finds out whom a request is for.
fn addressee(request: &Request) -> Result<For, String> {
    let headers = request.headers();
    let text = |name: &HeaderName| headers.get(name).map(|text| text.to_str().unwrap_or_default());
    match (text(&SANDBOX_ID), text(&SANDBOX_PORT)) {
        (Some(id), Some(port)) => {
            let port = port.parse().map_err(|_| format!("invalid {SANDBOX_PORT} header"))?;
            return Ok(For::Sandbox(Place { id: id.to_owned(), port }));
        }
        (Some(_), None) => return Err(format!("missing {SANDBOX_PORT} header")),
        (None, Some(_)) => return Err(format!("missing {SANDBOX_ID} header")),
        (None, None) => {}
    }
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    if let Some(place) = host.and_then(named) {
        return Ok(For::Sandbox(place));
    }
    if request.uri().path() == "/files" {
        let asked = envd::Asked::of(request)?;
        if asked.signed.signature.is_some() {
            return Ok(For::Signer(asked));
        }
    }
    Ok(For::Control)
}

/// Finds out whom a request is for, whatever it says.
#[cfg(feature = "fuzz")]
pub(crate) fn fuzz_routing(mut request: Request) {
    name_host(&mut request);
    let _ = addressee(&request);
    let _ = envd::Asked::of(&request);
}

/// Reads `<port>-<id>.<domain>`.
fn named(host: &str) -> Option<Place> {
    let (label, _) = host.split_once('.')?;
    let (port, id) = label.split_once('-')?;
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    if !digits || id.is_empty() || !id.chars().all(plain) {
        return None;
    }
    Some(Place { id: id.to_owned(), port: port.parse().ok()? })
}

/// What a visit of a tenant's own holds for as long as it lasts: its connection, its place among the
/// requests, its stream.
type Held = (Option<Busy>, Admitted, Followed);

/// Counts a visit as its tenant's.
fn account(e2b: &E2b, entry: &SandboxEntry, request: &Request) -> Result<Held, ApiError> {
    let ledger = &e2b.0.api.0.ledger;
    let (tenant, quotas) = (entry.tenant.clone(), entry.quotas);
    let (note, followed) = (Note::of(request), Followed::default());
    let principal =
        Principal { tenant, client: None, operator: false, quotas, note: note.clone(), followed };
    note.by(&principal, None);
    let seat = request.extensions().get::<Seat>().cloned();
    let admitted = ledger.admit(&principal)?;
    let followed = match is_stream(request) {
        true => ledger.follow(&principal)?,
        false => Followed::default(),
    };
    Ok((seat.map(Seat::occupy), admitted, followed))
}

/// Looks whom a request is from. Whoever shows nothing that is the tenant's spends nothing of it, and wakes nobody.
async fn enter(e2b: &E2b, place: &Place, request: Request) -> Response {
    let Some(door) = e2b.0.directory.door(&place.id) else { return not_found(&place.id) };
    let note = Note::of(&request);
    note.sandbox(&door.sandbox);
    if place.port != envd::PORT {
        note.port(place.port);
    }
    let whose = match place.port {
        envd::PORT => envd::whose(&door, &request),
        _ => keeps_out(&door, &request).map_or(Whose::Owners, Whose::Refused),
    };
    let is_owners = match whose {
        Whose::Owners => true,
        Whose::Nobodys => false,
        Whose::Refused(refused) => return refused,
    };
    if door.sleeps && !is_owners {
        return not_found(&place.id);
    }
    let found = e2b.0.directory.find(&place.id).await;
    let Some(entry) = found else { return not_found(&place.id) };
    match is_owners.then(|| account(e2b, &entry, &request)).transpose() {
        Ok(busy) => visit(e2b, entry, place.port, busy, request).await,
        Err(error) => refused(&error),
    }
}

/// Lets a request in, for as long as the sandbox is there.
async fn visit(
    e2b: &E2b,
    entry: SandboxEntry,
    port: u16,
    busy: Option<Held>,
    request: Request,
) -> Response {
    let (over, hangup) = (entry.over.clone(), request.extensions().get::<Hangup>().cloned());
    let answer = async {
        match port {
            envd::PORT => envd::serve(e2b, entry, request).await,
            port => forward(e2b, &entry, port, request).await,
        }
    };
    let response = tokio::select! {
        biased;
        response = answer => response,
        () = over.cancelled() => {
            // Whoever waits is not answered: a sandbox that is killed takes its connections along.
            hangup.as_ref().inspect(|hangup| hangup.now());
            return not_found("");
        }
    };
    let response = response
        .map(|body| Body::new(Cut { body, over: Box::pin(over.cancelled_owned()), hangup }));
    // A stream is under way until it ends.
    response.map(|body| Holding::body(body, busy))
}

/// Refuses a request that may not go to a server inside.
fn keeps_out(door: &Door, request: &Request) -> Option<Response> {
    let token = door.traffic_token.as_ref()?;
    let sent = request.headers().get(&TRAFFIC_TOKEN).map(HeaderValue::as_bytes);
    if bool::from(token.as_bytes().ct_eq(sent.unwrap_or_default())) {
        return None;
    }
    let message = match sent {
        Some(_) => "The traffic access token is not valid",
        None => "The traffic access token is missing: send e2b-traffic-access-token",
    };
    let mut response = about(&door.id, StatusCode::FORBIDDEN, message, None);
    // It is ours, and not an answer of the server inside: the log tells them apart by this.
    let error = ApiError::forbidden(message, "send the token that came with the sandbox");
    response.extensions_mut().insert(error);
    Some(response)
}

/// Hands a request that may go there to a server inside.
async fn forward(e2b: &E2b, entry: &SandboxEntry, port: u16, mut request: Request) -> Response {
    for name in &OURS {
        request.headers_mut().remove(name);
    }
    let mask = entry.host_mask.as_ref().map(|mask| mask.replace("${PORT}", &port.to_string()));
    let host = match mask {
        Some(mask) => HeaderValue::from_str(&mask).ok(),
        // By a name it was the sandbox's own; by an address it was ours, which means nothing inside.
        None => request.headers().get(header::HOST).filter(|host| is_own(host)).cloned(),
    };
    let (sandbox, tenant) = (entry.sandbox.clone(), entry.tenant.clone());
    let target = Target { sandbox, tenant, port, host };
    match proxy::proxy(&e2b.0.api, &target, request, PATIENCE).await {
        Ok(response) => response,
        Err(error) if error.code() == "port_closed" => {
            let message = "The sandbox is running but port is not open";
            about(&entry.id, StatusCode::BAD_GATEWAY, message, Some(port))
        }
        Err(error) => about(&entry.id, error.status(), &error.body().error.message, Some(port)),
    }
}

fn is_own(host: &HeaderValue) -> bool {
    host.to_str().is_ok_and(|host| named(host).is_some())
}

/// A body that is cut off, with its connection, when its sandbox is.
struct Cut {
    body: Body,
    over: Pin<Box<WaitForCancellationFutureOwned>>,
    hangup: Option<Hangup>,
}

impl HttpBody for Cut {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.over.as_mut().poll(cx).is_ready() {
            self.hangup.as_ref().inspect(|hangup| hangup.now());
            return Poll::Ready(Some(Err(axum::Error::new("the sandbox is gone"))));
        }
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Answers in the form that errors of envd and of the control plane have.
pub(super) fn refusal(status: StatusCode, message: &str) -> Response {
    let body = json!({ "code": status.as_u16(), "message": message });
    (status, axum::Json(body)).into_response()
}

/// Says in that form that there is too much of something, and when to come again.
fn refused(error: &ApiError) -> Response {
    let mut response = refusal(error.status(), &error.body().error.message);
    let native = error.clone().into_response();
    let after = native.headers().get(header::RETRY_AFTER).cloned();
    response.headers_mut().extend(after.map(|after| (header::RETRY_AFTER, after)));
    response.extensions_mut().insert(error.clone());
    response
}

fn about(id: &str, status: StatusCode, message: &str, port: Option<u16>) -> Response {
    let mut body = json!({ "sandboxId": id, "message": message, "code": status.as_u16() });
    if let Some(port) = port {
        body["port"] = port.into();
    }
    (status, axum::Json(body)).into_response()
}

/// What is said of a sandbox that does not run. SDKs look for this text.
fn not_found(id: &str) -> Response {
    about(id, StatusCode::BAD_GATEWAY, "The sandbox was not found", None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_names_a_port_of_a_sandbox() {
        let place = |port, id: &str| Some(Place { id: id.to_owned(), port });
        for (host, wanted) in [
            ("8080-abc1.e2b.test", place(8080, "abc1")),
            ("49983-abc1.e2b.test:443", place(49983, "abc1")),
            ("127.0.0.1:3000", None),
            ("localhost", None),
            ("api.e2b.test", None),
            ("x-abc1.e2b.test", None),
            ("8080-.e2b.test", None),
            ("8080-ab-c.e2b.test", None),
            ("99999-abc.e2b.test", None),
            ("-abc.e2b.test", None),
            ("8080-ABC.e2b.test", None),
        ] {
            assert_eq!(named(host), wanted, "{host}");
        }
    }

    #[test]
    fn headers_win_over_the_host_and_that_over_a_signature() {
        let of = |uri: &str, headers: &[(HeaderName, &str)]| {
            let mut request = Request::get(uri).body(Body::empty()).unwrap();
            for (name, value) in headers {
                request.headers_mut().insert(name, value.parse().unwrap());
            }
            name_host(&mut request);
            addressee(&request)
        };
        let sandbox = |id: &str, port| Ok(For::Sandbox(Place { id: id.to_owned(), port }));
        let (host, signed) = ((header::HOST, "1-b.test"), "/files?signature=v1_x");
        let both = [(SANDBOX_ID, "a"), (SANDBOX_PORT, "7"), host.clone()];
        assert_eq!(of(signed, &both), sandbox("a", 7));
        assert_eq!(of(signed, &[host]), sandbox("b", 1));
        assert_eq!(of("https://1-b.test/", &[]), sandbox("b", 1), "as HTTP/2 has it");
        assert!(matches!(of(signed, &[]), Ok(For::Signer(_))));
        assert_eq!(of("/files", &[]), Ok(For::Control));
        assert_eq!(of("/sandboxes?signature=x", &[]), Ok(For::Control));
        for bad in [
            &[(SANDBOX_ID, "a")][..],
            &[(SANDBOX_PORT, "7")],
            &[(SANDBOX_ID, "a"), (SANDBOX_PORT, "70000")],
            &[(SANDBOX_ID, "a"), (SANDBOX_PORT, "x")],
        ] {
            assert!(of("/", bad).is_err(), "{bad:?}");
        }
    }
}
