//! Whom a request is for: a sandbox, named by headers, by the host or by a signature, or the control
//! plane.

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::json;
use tower::ServiceExt as _;

use super::E2b;

const SANDBOX_ID: &str = "e2b-sandbox-id";
const SANDBOX_PORT: &str = "e2b-sandbox-port";

/// Which port of which sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    id: String,
    port: u16,
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

async fn route(State(both): State<Both>, request: Request) -> Response {
    let place = match place(request.headers()) {
        Ok(Some(place)) => place,
        Ok(None) => return both.control.oneshot(request).await.into_response(),
        Err(reason) => return refusal(StatusCode::BAD_REQUEST, &reason),
    };
    match both.e2b.0.directory.find(&place.id).await {
        Some(_entry) => refusal(StatusCode::NOT_IMPLEMENTED, "not yet"),
        None => not_found(&place.id),
    }
}

/// Finds out which sandbox a request names, if any.
fn place(headers: &HeaderMap) -> Result<Option<Place>, String> {
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    match (text(SANDBOX_ID), text(SANDBOX_PORT)) {
        (Some(id), Some(port)) => {
            let port = port.parse().map_err(|_| format!("invalid port in {SANDBOX_PORT}"))?;
            return Ok(Some(Place { id: id.to_owned(), port }));
        }
        (Some(_), None) => return Err(format!("{SANDBOX_PORT} is missing")),
        (None, Some(_)) => return Err(format!("{SANDBOX_ID} is missing")),
        (None, None) => {}
    }
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    Ok(named(host))
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

fn refusal(status: StatusCode, message: &str) -> Response {
    let body = json!({ "code": status.as_u16(), "message": message });
    (status, axum::Json(body)).into_response()
}

/// What is said of a sandbox that does not run. SDKs look for this text.
fn not_found(id: &str) -> Response {
    let body = json!({ "sandboxId": id, "message": "The sandbox was not found", "code": 502 });
    (StatusCode::BAD_GATEWAY, axum::Json(body)).into_response()
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
}
