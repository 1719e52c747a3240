//! `/v1/sandboxes/{id}/ports/{port}`: servers inside a sandbox.
//!
//! Every server inside every sandbox shares one origin with the API here, and is hostile to it and
//! to the others. So, on this path:
//!
//! - Credentials of ours do not go in: neither `Authorization` nor `X-Api-Key` nor any `X-Warren-*`.
//!   A server that wants an `Authorization` of its own gets what `X-Warren-Forward-Authorization`
//!   says.
//! - Cookies go neither way. One set by a server would be sent to all others, and one of the API's,
//!   should it ever have any, to them. The API itself is authenticated by headers alone, so a page
//!   from here that a browser shows has nobody's rights.
//! - A page is shown in a sandbox of the browser's own (`Content-Security-Policy: sandbox`), that
//!   is without an origin: behind a front that adds a key to every request, its scripts would
//!   otherwise be let in here as whoever looks at it. From there they have `Origin: null`, and every
//!   request with an `Origin` is refused. The type of a page is what its server says (`nosniff`).
//! - What would hold for the whole origin is taken out of an answer ([`OF_THE_ORIGIN`]).
//!
//! `warren port`, and names of its own for each port, have none of these restrictions: there each
//! server has its own origin.

use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::uri::{PathAndQuery, Uri};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::Response;

use crate::Api;
use crate::error::{ApiError, ErrorBody};
use crate::extract::plain;
use crate::principal::Principal;
use crate::proxy::{self, PATIENCE, Target};

/// How many parts of a path are ours: `/v1/sandboxes/{id}/ports/{port}`.
const OWN_PARTS: usize = 5;
/// The header that says how long a server may take to begin its answer.
const TIMEOUT_HEADER: &str = "x-warren-timeout-ms";
const MAX_TIMEOUT_MS: u64 = 3_600_000;
/// The header whose value the server gets as `Authorization`.
const AUTHORIZATION_HEADER: &str = "x-warren-forward-authorization";
const PREFIX_HEADER: HeaderName = HeaderName::from_static("x-forwarded-prefix");

/// What only the whole origin could be meant by.
const OF_THE_ORIGIN: [HeaderName; 5] = [
    header::SET_COOKIE,
    header::STRICT_TRANSPORT_SECURITY,
    header::ALT_SVC,
    HeaderName::from_static("clear-site-data"),
    HeaderName::from_static("service-worker-allowed"),
];

/// Returns the part of a path that we have a say in: all of it, or what comes before the path of a
/// server inside a sandbox.
pub(crate) fn own_part(path: &str) -> &str {
    let mut parts = path.split('/').skip(1);
    let is_port = parts.next() == Some("v1")
        && parts.next() == Some("sandboxes")
        && parts.next().is_some()
        && parts.next() == Some("ports");
    let end = path.match_indices('/').nth(OWN_PARTS).filter(|_| is_port);
    end.map_or(path, |(end, _)| &path[..end])
}

/// Finds the sandbox and the port that a path names.
///
/// The path is read as it is: the part of it that is the server's need not be UTF-8.
async fn target(api: &Api, who: &Principal, path: &str) -> Result<Target, ApiError> {
    let mut parts = own_part(path).split('/').skip(3);
    let (id, port) = (parts.next().unwrap_or_default(), parts.nth(1).unwrap_or_default());
    let id = plain(id.to_owned())?;
    // Before the port: whose sandbox it is, is nobody's business.
    let (sandbox, _) = api.sandbox(who, &id).await?;
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|port| digits && *port > 0);
    let port = port.ok_or_else(ApiError::invalid_port)?;
    Ok(Target { sandbox, tenant: who.tenant.clone(), port, host: None })
}

/// Opens a TCP connection to a port inside a sandbox.
///
/// After the answer 101 the connection is the port's own, bytes both ways. For HTTP write a `/` after
/// the port.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/ports/{port}",
    tag = "ports",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("port" = u16, Path, description = "The port."),
        ("Connection" = String, Header, description = "`upgrade`"),
        ("Upgrade" = String, Header, description = "`tcp`"),
    ),
    responses(
        (status = 101, description = "It is open."),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, description = "The sandbox is suspended.", body = ErrorBody),
        (status = 422, description = "The sandbox has no TCP.", body = ErrorBody),
        (status = 426, description = "It was not asked for TCP.", body = ErrorBody),
        (status = 429, description = "Too many connections are open.", body = ErrorBody),
        (status = 502, description = "Nothing listens on the port.", body = ErrorBody),
        (status = 504, description = "It takes no connections.", body = ErrorBody),
    )
)]
pub(crate) async fn open(
    State(api): State<Api>,
    who: Principal,
    request: Request,
) -> Result<Response, ApiError> {
    let target = target(&api, &who, request.uri().path()).await?;
    let tcp = HeaderValue::from_static("tcp");
    match proxy::upgrade_of(request.headers()) {
        Some(asked) if asked.as_bytes().eq_ignore_ascii_case(tcp.as_bytes()) => {
            proxy::join(&api, &target, request, &tcp).await
        }
        Some(_) | None => Err(ApiError::upgrade_required()),
    }
}

/// Hands a request to a server inside a sandbox, and its answer back.
///
/// Every method goes through, and bodies of any length; so does an upgrade, to WebSocket for one.
/// The server sees the path after the port. `Authorization`, `X-Api-Key` and cookies do not go in;
/// what `X-Warren-Forward-Authorization` says does, as `Authorization`.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/ports/{port}/{path}",
    tag = "ports",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("port" = u16, Path, description = "The port."),
        ("path" = String, Path, description = "The path that the server is asked for; any text."),
        ("X-Warren-Timeout-Ms" = Option<u64>, Header,
            description = "How long the server may take to begin its answer; a minute if absent."),
        ("X-Warren-Forward-Authorization" = Option<String>, Header,
            description = "What the server gets as `Authorization`."),
    ),
    responses(
        (status = "default", description = "Whatever the server answers."),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, description = "The sandbox is suspended.", body = ErrorBody),
        (status = 422, description = "The sandbox has no TCP.", body = ErrorBody),
        (status = 429, description = "Too many connections are open.", body = ErrorBody),
        (status = 502, description = "Nothing listens on the port, or it is no HTTP.",
            body = ErrorBody),
        (status = 504, description = "The server did not answer in time.", body = ErrorBody),
    )
)]
pub(crate) async fn forward(
    State(api): State<Api>,
    who: Principal,
    mut request: Request,
) -> Result<Response, ApiError> {
    let target = target(&api, &who, request.uri().path()).await?;
    let patience = patience(request.headers())?;
    let uri = request.uri();
    let prefix = own_part(uri.path()).to_owned();
    *request.uri_mut() = server_uri(uri, prefix.len())?;
    disarm(request.headers_mut());
    let prefix = HeaderValue::from_str(&prefix);
    let prefix = prefix.map_err(|_| ApiError::internal("a path that is no header"))?;
    request.headers_mut().insert(PREFIX_HEADER, prefix);
    let mut response = proxy::proxy(&api, &target, request, patience).await?;
    confine(response.headers_mut());
    Ok(response)
}

/// Cuts our part off a URI.
fn server_uri(uri: &Uri, ours: usize) -> Result<Uri, ApiError> {
    let text = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    text[ours..].parse().map_err(|_| ApiError::internal("a path that is none without our part"))
}

fn patience(headers: &HeaderMap) -> Result<Duration, ApiError> {
    let Some(value) = headers.get(TIMEOUT_HEADER) else { return Ok(PATIENCE) };
    match value.to_str().ok().and_then(|value| value.parse().ok()) {
        Some(ms @ 1..=MAX_TIMEOUT_MS) => Ok(Duration::from_millis(ms)),
        Some(_) | None => Err(ApiError::invalid_header(
            format!("`{TIMEOUT_HEADER}` is no time"),
            format!("write milliseconds, up to {MAX_TIMEOUT_MS}"),
        )),
    }
}

/// Takes out of a request what is ours.
fn disarm(headers: &mut HeaderMap) {
    let authorization = headers.remove(AUTHORIZATION_HEADER);
    let ours = |name: &HeaderName| {
        *name == header::AUTHORIZATION
            || *name == header::COOKIE
            || *name == "x-api-key"
            || name.as_str().starts_with("x-warren-")
    };
    let names: Vec<HeaderName> = headers.keys().filter(|name| ours(name)).cloned().collect();
    for name in names {
        headers.remove(name);
    }
    headers.extend(authorization.map(|value| (header::AUTHORIZATION, value)));
}

/// Takes out of an answer what could reach beyond it.
fn confine(headers: &mut HeaderMap) {
    for name in &OF_THE_ORIGIN {
        headers.remove(name);
    }
    // Beside the server's own, should it have one: a browser obeys them all.
    let policy = HeaderValue::from_static("sandbox allow-forms allow-scripts");
    headers.append(header::CONTENT_SECURITY_POLICY, policy);
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_a_port_is_not_ours() {
        for (path, ours) in [
            ("/v1/sandboxes/x/ports/80/a//b/../%ff", "/v1/sandboxes/x/ports/80"),
            ("/v1/sandboxes/x/ports/80/", "/v1/sandboxes/x/ports/80"),
            ("/v1/sandboxes/x/ports/80", "/v1/sandboxes/x/ports/80"),
            ("/v1/sandboxes/x/port/80/%", "/v1/sandboxes/x/port/80/%"),
            ("/v1/sandboxes/ports/80/a/%", "/v1/sandboxes/ports/80/a/%"),
            ("/v1/sandboxes//ports/80/%", "/v1/sandboxes//ports/80"),
            ("/v2/sandboxes/x/ports/80/%", "/v2/sandboxes/x/ports/80/%"),
            ("/", "/"),
            ("", ""),
        ] {
            assert_eq!(own_part(path), ours);
        }
    }

    #[test]
    fn the_server_is_asked_for_exactly_what_follows() {
        for rest in ["/", "/a//b", "/a/../%2e%ff", "/?q=1&r", "/a?/v1/%2f"] {
            let uri: Uri = format!("/v1/sandboxes/x/ports/80{rest}").parse().unwrap();
            let ours = own_part(uri.path()).len();
            assert_eq!(server_uri(&uri, ours).unwrap().to_string(), rest);
        }
    }

    #[test]
    fn nothing_of_ours_goes_in() {
        let mut headers: HeaderMap = [
            ("authorization", "Bearer wrn_secret"),
            ("x-api-key", "wrn_secret"),
            ("x-warren-client", "me"),
            ("x-warren-timeout-ms", "1"),
            ("x-warren-anything", "1"),
            ("cookie", "a=b"),
            ("x-warren-forward-authorization", "Bearer theirs"),
            ("accept", "*/*"),
        ]
        .into_iter()
        .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
        .collect();
        disarm(&mut headers);
        assert_eq!(headers.len(), 2, "{headers:?}");
        assert_eq!(
            (&headers["authorization"], &headers["accept"]),
            (&HeaderValue::from_static("Bearer theirs"), &HeaderValue::from_static("*/*"))
        );
    }
}
