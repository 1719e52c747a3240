//! Who asks, and what is theirs.
//!
//! On the unix socket the kernel says who asks; on TCP a key does. A tenant is the wall between
//! callers: the manager only ever sees client ids that begin with it, so tenants can never meet. A
//! client is a name within a tenant, which callers choose themselves.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::Response;
use warren::{ExecContext, OperatorOnly, SandboxSession, SandboxSpec};

use crate::Api;
use crate::audit::Note;
use crate::crowd::{Holding, Seat};
use crate::error::ApiError;
use crate::keys::Quotas;
use crate::quota::{Followed, is_stream};

/// The header by which a caller names one of several clients within its tenant.
pub const CLIENT_HEADER: &str = "x-warren-client";
/// The client of a caller that names none.
const DEFAULT_CLIENT: &str = "default";
const MAX_CLIENT: usize = 128;

/// The other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// A process on this host, as the kernel knows it.
    Unix {
        /// Its user.
        uid: u32,
    },
    /// Anybody who can reach our address.
    Tcp {
        /// Where it comes from.
        from: SocketAddr,
        /// Where it came to, which its `Host` must name.
        to: SocketAddr,
    },
}

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Principal {
    pub(crate) tenant: Arc<str>,
    /// The client that was named; without one the caller has everything of its tenant.
    pub(crate) client: Option<Arc<str>>,
    /// Whether it has everything of everybody: root, or the daemon's own user.
    pub(crate) operator: bool,
    pub(crate) quotas: Quotas,
    /// What is noted of the request.
    pub(crate) note: Note,
    /// The stream that the request is for, if it is for one.
    pub(crate) followed: Followed,
}

impl Principal {
    /// Returns the client id that a new session has at the manager.
    pub(crate) fn client_id(&self) -> String {
        format!("{}/{}", self.tenant, self.client.as_deref().unwrap_or(DEFAULT_CLIENT))
    }

    /// Returns what a command is run with that this request asks for.
    pub(crate) fn context(&self) -> ExecContext {
        ExecContext { request_id: self.note.request(), ..ExecContext::default() }
    }

    /// Tells whether a client id of the manager is this caller's.
    pub(crate) fn owns(&self, client_id: &str) -> bool {
        if self.operator && self.client.is_none() {
            return true;
        }
        let (tenant, client) = split(client_id);
        (self.operator || tenant == &*self.tenant)
            && self.client.as_deref().is_none_or(|own| own == client)
    }

    /// Refuses a spec that says what only the operator may ask for, whoever wrote it and whenever.
    pub(crate) fn may_ask_for(&self, spec: &SandboxSpec) -> Result<(), ApiError> {
        let what = spec.operator_only().filter(|_| !self.operator);
        let Some(what) = what else { return Ok(()) };
        Err(ApiError::forbidden(
            what.to_string(),
            match what {
                // The daemon may see more of the host than the caller does.
                OperatorOnly::HostPaths => "copy the files into the sandbox instead",
                OperatorOnly::NoLimit(_) => "ask for a larger limit instead of none",
            },
        ))
    }

    /// Tells whether a session is this caller's.
    pub(crate) fn has(&self, session: &SandboxSession) -> bool {
        self.owns(&session.client_id)
    }
}

/// Splits a client id of the manager into tenant and client. A tenant has no `/` in its name.
pub(crate) fn split(client_id: &str) -> (&str, &str) {
    client_id.split_once('/').unwrap_or((client_id, ""))
}

impl<S: Sync> FromRequestParts<S> for Principal {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        // Without the layer that sets it there is nobody, so a forgotten layer opens nothing.
        parts.extensions.get().cloned().ok_or_else(ApiError::unauthenticated)
    }
}

/// Returns the tenant that a user of this host is.
pub fn tenant_of(uid: u32) -> String {
    format!("uid:{uid}")
}

/// Finds out who asks, or refuses.
pub(crate) async fn authenticate(
    State(api): State<Api>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let peer = request.extensions().get::<Peer>().copied();
    let client = named_client(request.headers())?;
    let note = Note::of(&request);
    let mut key_id = None;
    let mut principal = match peer {
        Some(Peer::Unix { uid }) => Principal {
            tenant: tenant_of(uid).into(),
            client,
            operator: uid == 0 || uid == rustix::process::geteuid().as_raw(),
            quotas: api.options().quotas,
            note: note.clone(),
            followed: Followed::default(),
        },
        Some(Peer::Tcp { .. }) => {
            let given = given_key(request.headers())?;
            let key = api.keys().and_then(|keys| keys.find(given));
            let key = key.ok_or_else(ApiError::unauthenticated)?;
            let tenant = format!("tenant:{}", key.tenant).into();
            key_id = Some(key.id);
            let quotas = key.quotas.or(api.options().quotas);
            let followed = Followed::default();
            Principal { tenant, client, operator: false, quotas, note: note.clone(), followed }
        }
        None => return Err(ApiError::unauthenticated()),
    };
    note.by(&principal, key_id.as_deref());
    let seat = request.extensions().get::<Seat>().cloned();
    if principal.operator {
        principal.quotas = Quotas::default();
    }
    let admitted = api.0.ledger.admit(&principal)?;
    if is_stream(&request) {
        principal.followed = api.0.ledger.follow(&principal)?;
    }
    let busy = (seat.map(Seat::occupy), admitted, principal.followed.clone());
    request.extensions_mut().insert(principal.clone());
    let mut response = next.run(request).await;
    // For the log.
    response.extensions_mut().insert(principal);
    // A stream is under way until it ends.
    Ok(response.map(|body| Holding::body(body, busy)))
}

/// Refuses what a browser was tricked into sending: another site's request, or one that reached us
/// under a name that is not ours (DNS rebinding).
pub(crate) async fn refuse_browsers(
    State(api): State<Api>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let headers = request.headers();
    if headers.contains_key(header::ORIGIN) {
        return Err(ApiError::forbidden(
            "requests of web pages are not taken",
            "call the API from a program, without an `Origin` header",
        ));
    }
    if let Some(Peer::Tcp { to, .. }) = request.extensions().get::<Peer>() {
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
        if !host.is_some_and(|host| is_our_host(host, *to, &api.options().allowed_hosts)) {
            return Err(ApiError::forbidden(
                "the `Host` of the request is not a name of this daemon",
                "use the address that it listens on, or add the name to `allowed_hosts`",
            ));
        }
    }
    Ok(next.run(request).await)
}

/// Tells whether a `Host` can only be ours. An address needs no name server, so none was tricked;
/// which address it is, and which port, depends on what forwards it to us.
fn is_our_host(host: &str, to: SocketAddr, allowed: &[String]) -> bool {
    let name = match host.rsplit_once(':') {
        // Digits alone: a number may have a sign, and a port has none.
        Some((name, port))
            if port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok() =>
        {
            name
        }
        _ => host,
    };
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    let is_address = match bare {
        Some(bare) => bare.parse::<Ipv6Addr>().is_ok(),
        None => name.parse::<Ipv4Addr>().is_ok(),
    };
    is_address
        || (to.ip().is_loopback() && name.eq_ignore_ascii_case("localhost"))
        || allowed.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
}

fn named_client(headers: &HeaderMap) -> Result<Option<Arc<str>>, ApiError> {
    let Some(value) = headers.get(CLIENT_HEADER) else { return Ok(None) };
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '@' | ':');
    match value.to_str() {
        Ok(name) if (1..=MAX_CLIENT).contains(&name.len()) && name.chars().all(plain) => {
            Ok(Some(name.into()))
        }
        Ok(_) | Err(_) => Err(ApiError::invalid_header(
            format!("`{CLIENT_HEADER}` is no name of a client"),
            "a client has up to 128 letters, digits, `-`, `_`, `.`, `@` and `:`",
        )),
    }
}

fn given_key(headers: &HeaderMap) -> Result<&str, ApiError> {
    let text = |name| headers.get(name).and_then(|value: &header::HeaderValue| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    let own = text(header::HeaderName::from_static("x-api-key"));
    match (bearer, own) {
        (Some(key), None) | (None, Some(key)) => Ok(key),
        // Two keys may be of two tenants; guessing which is meant helps nobody.
        (None, None) | (Some(_), Some(_)) => Err(ApiError::unauthenticated()),
    }
}

/// Asks whether a `Host` is ours. What is not an address and on no list never is.
#[cfg(feature = "fuzz")]
pub(crate) fn fuzz(host: &str) {
    let to = SocketAddr::from(([192, 0, 2, 1], 80));
    if is_our_host(host, to, &[]) {
        assert!(host.chars().all(|c| c.is_ascii_hexdigit() || ".:[]".contains(c)), "{host:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn principal(tenant: &str, client: Option<&str>, operator: bool) -> Principal {
        let (tenant, client) = (tenant.into(), client.map(Into::into));
        let (note, followed) = (Note::default(), Followed::default());
        Principal { tenant, client, operator, quotas: Quotas::default(), note, followed }
    }

    #[test]
    fn a_caller_owns_its_tenants_sessions_and_no_others() {
        for (who, client_id, owns) in [
            (principal("uid:1", None, false), "uid:1/default", true),
            (principal("uid:1", None, false), "uid:1/x", true),
            (principal("uid:1", None, false), "uid:10/default", false),
            (principal("uid:1", None, false), "uid:1", true),
            (principal("uid:1", Some("x"), false), "uid:1/x", true),
            (principal("uid:1", Some("x"), false), "uid:1/y", false),
            (principal("tenant:a", None, false), "uid:0/tenant:a", false),
            (principal("uid:0", None, true), "tenant:a/x", true),
            (principal("uid:0", Some("x"), true), "tenant:a/x", true),
            (principal("uid:0", Some("x"), true), "tenant:a/y", false),
        ] {
            assert_eq!(who.owns(client_id), owns, "{who:?} {client_id}");
        }
    }

    #[test]
    fn only_a_name_of_ours_is_a_host() {
        let to: SocketAddr = "127.0.0.1:8080".parse().unwrap();
        let allowed = ["warren.example".to_owned()];
        for (host, ours) in [
            ("127.0.0.1:8080", true),
            ("127.0.0.1", true),
            ("localhost:8080", true),
            ("LOCALHOST:8080", true),
            ("warren.example:8080", true),
            ("warren.example:81", true),
            ("192.0.2.7:81", true),
            ("[2001:db8::1]:81", true),
            ("::1", false),
            ("[127.0.0.1]", false),
            ("127.0.0.1:", false),
            ("127.0.0.1:99999", false),
            ("127.0.0.1:+80", false),
            ("127.0.0.1.evil.example", false),
            ("0x7f000001", false),
            ("127.1", false),
            ("evil.example:8080", false),
            ("localhost.evil.example", false),
            ("", false),
        ] {
            assert_eq!(is_our_host(host, to, &allowed), ours, "{host}");
        }
        let to: SocketAddr = "[::1]:80".parse().unwrap();
        assert!(is_our_host("[::1]:80", to, &[]) && is_our_host("[::1]", to, &[]));
        let public: SocketAddr = "192.0.2.1:80".parse().unwrap();
        assert!(!is_our_host("localhost", public, &[]), "a page on the host itself is no friend");
    }
}
