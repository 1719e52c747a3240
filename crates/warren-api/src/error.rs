//! What is answered when there is no answer: one code, status and hint for each thing that goes wrong.
//!
//! The client gets the code and what was tried; the log gets the whole chain of causes.

use std::error::Error;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use warren::{FileFault, SandboxError};

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    status: StatusCode,
    code: &'static str,
    message: String,
    hint: Option<String>,
    retry_after: Option<Duration>,
}

/// The body of every refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// What went wrong.
    pub error: ErrorView,
}

/// What went wrong, for people and for programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorView {
    /// The stable name of this kind of error.
    #[schema(example = "not_found")]
    pub code: String,
    /// What was tried and why it failed.
    pub message: String,
    /// What the caller could do about it.
    pub hint: Option<String>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), hint: None, retry_after: None }
    }

    pub(crate) fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Returns the HTTP status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns the stable name of this kind of error.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// Returns what went wrong and what could be done about it.
    pub(crate) fn text(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{}; {hint}", self.message),
            None => self.message.clone(),
        }
    }

    /// Returns the body that is sent.
    pub(crate) fn body(&self) -> ErrorBody {
        let (code, message, hint) = (self.code.to_owned(), self.message.clone(), self.hint.clone());
        ErrorBody { error: ErrorView { code, message, hint } }
    }

    /// What does not exist, or is somebody else's: nobody can tell which.
    pub(crate) fn not_found(what: &'static str, id: &str) -> Self {
        SandboxError::NotFound { what, id: id.to_owned() }.into()
    }

    pub(crate) fn invalid_json(error: &serde_json::Error) -> Self {
        let (code, hint) = match error.classify() {
            serde_json::error::Category::Data => {
                ("invalid_body", "docs/openapi.json lists the fields and their types")
            }
            serde_json::error::Category::Io
            | serde_json::error::Category::Syntax
            | serde_json::error::Category::Eof => ("invalid_json", "send one JSON object"),
        };
        // The error itself says "at line 1 column 7".
        Self::new(StatusCode::BAD_REQUEST, code, format!("cannot read the body: {error}"))
            .with_hint(hint)
    }

    pub(crate) fn body_too_large(limit: usize) -> Self {
        let message = format!("the body is larger than {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
            .with_hint("pass large data through a file of the sandbox")
    }

    pub(crate) fn media_type() -> Self {
        let message = "the body is not said to be JSON";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "media_type", message)
            .with_hint("send `Content-Type: application/json`")
    }

    pub(crate) fn invalid_id(reason: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_id", reason).with_hint(
            "an id has up to 128 letters, digits, `-`, `_` and `.`, and begins with no `.` or `-`",
        )
    }

    pub(crate) fn invalid_query(reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_query", reason).with_hint(hint)
    }

    pub(crate) fn invalid_header(reason: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_header", reason).with_hint(hint)
    }

    pub(crate) fn unauthenticated() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthenticated", "no valid API key was sent")
            .with_hint("send `Authorization: Bearer KEY`; `warren key create` makes one")
    }

    pub(crate) fn forbidden(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", message).with_hint(hint)
    }

    pub(crate) fn quota(what: &str, limit: u64) -> Self {
        let message = format!("the quota of this tenant is used up: {limit} {what}");
        let mut error = Self::new(StatusCode::TOO_MANY_REQUESTS, "quota", message).with_hint(
            "end a sandbox or wait for a command, or ask the operator for a larger quota",
        );
        error.retry_after = Some(Duration::from_secs(1));
        error
    }

    pub(crate) fn too_fast(rate: u64, after: Duration) -> Self {
        let message = format!("this tenant sends more than {rate} requests in a second");
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate", message);
        Self { retry_after: Some(after), ..error }
            .with_hint("wait as long as `Retry-After` says, or ask the operator for a larger quota")
    }

    pub(crate) fn idempotency_mismatch() -> Self {
        let message = "this idempotency key was used for another request";
        Self::new(StatusCode::CONFLICT, "idempotency_mismatch", message)
            .with_hint("use a new key for a new request, and the same body to repeat one")
    }

    pub(crate) fn no_route() -> Self {
        Self::new(StatusCode::NOT_FOUND, "no_route", "there is nothing at this path")
            .with_hint("GET /v1/openapi.json lists the paths")
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "this path does not know this method";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
            .with_hint("GET /v1/openapi.json lists the methods")
    }

    pub(crate) fn request_timeout() -> Self {
        let message = "the request took too long";
        Self::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
            .with_hint("send the whole request at once, and try again")
    }

    pub(crate) fn invalid_port() -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_port", "the path names no port")
            .with_hint("a port is a number from 1 to 65535")
    }

    /// A server inside a sandbox did not answer as one should.
    pub(crate) fn bad_server(port: u16, why: &str) -> Self {
        let message = format!("the server on port {port} inside the sandbox did not answer: {why}");
        Self::new(StatusCode::BAD_GATEWAY, "bad_server", message)
            .with_hint("check that it speaks HTTP/1.1; for anything else there is `warren port`")
    }

    pub(crate) fn slow_server(port: u16, after: Duration) -> Self {
        let message =
            format!("the server on port {port} inside the sandbox did not answer within {after:?}");
        Self::new(StatusCode::GATEWAY_TIMEOUT, "slow_server", message)
            .with_hint("look at what the server is doing, or allow more with `x-warren-timeout-ms`")
    }

    pub(crate) fn too_many_connections(what: &str, limit: usize) -> Self {
        let message = format!("the {what} has {limit} open connections to its ports");
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "too_many_connections", message);
        Self { retry_after: Some(Duration::from_secs(1)), ..error }.with_hint("close some of them")
    }

    pub(crate) fn upgrade_required() -> Self {
        let message = "this path takes plain TCP, and the request did not ask for it";
        Self::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", message).with_hint(
            "send `Connection: upgrade` and `Upgrade: tcp`, or write a `/` after the port for HTTP",
        )
    }

    /// Nothing is done that cannot be noted.
    pub(crate) fn unwritable() -> Self {
        let message = "the audit log cannot be written, and nothing is done that it does not have";
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "audit_unavailable", message);
        Self { retry_after: Some(Duration::from_secs(1)), ..error }
            .with_hint("try again in a moment; the operator sees why in the daemon's log")
    }

    pub(crate) fn internal(what: &str) -> Self {
        tracing::error!(what, "internal error");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", format!("internal error: {what}"))
            .with_hint("this is a bug of Warren's; the daemon's log says more")
    }
}

impl From<SandboxError> for ApiError {
    fn from(error: SandboxError) -> Self {
        let mut retry_after = None;
        // No `_` arm: a new error makes the compiler ask for its status.
        let status = match &error {
            SandboxError::InvalidSpec { .. } => StatusCode::BAD_REQUEST,
            SandboxError::Unsupported { .. }
            | SandboxError::LimitNotEnforceable { .. }
            | SandboxError::NoMatch { .. }
            | SandboxError::Program { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            SandboxError::NotFound { .. } => StatusCode::NOT_FOUND,
            SandboxError::AlreadyExists { .. }
            | SandboxError::Suspended { .. }
            | SandboxError::Conflict { .. } => StatusCode::CONFLICT,
            SandboxError::Ended { .. } | SandboxError::SessionEnded { .. } => StatusCode::GONE,
            SandboxError::File { kind, .. } => {
                retry_after = (*kind == FileFault::Busy).then_some(Duration::from_secs(1));
                file_status(*kind)
            }
            SandboxError::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            SandboxError::Timeout { .. } => StatusCode::GATEWAY_TIMEOUT,
            SandboxError::PortClosed { .. } => StatusCode::BAD_GATEWAY,
            SandboxError::Capacity { retry_after: after, .. } => {
                retry_after = Some(*after);
                StatusCode::SERVICE_UNAVAILABLE
            }
            SandboxError::ShuttingDown => {
                retry_after = Some(Duration::from_secs(1));
                StatusCode::SERVICE_UNAVAILABLE
            }
            SandboxError::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
            SandboxError::Step { .. }
            | SandboxError::WallOpen { .. }
            | SandboxError::Internal { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        // A closed port and a full disk are the sandbox's affair, and a client can ask for many.
        let own = [StatusCode::BAD_GATEWAY, StatusCode::INSUFFICIENT_STORAGE];
        if status.is_server_error() && !own.contains(&status) {
            tracing::error!(code = error.code(), chain = chain(&error), "request failed");
        }
        let hint = error.hint().unwrap_or("the daemon's log says more").to_owned();
        Self {
            status,
            code: error.code(),
            message: error.to_string(),
            hint: Some(hint),
            retry_after,
        }
    }
}

fn file_status(kind: FileFault) -> StatusCode {
    match kind {
        FileFault::NotFound | FileFault::NoUser => StatusCode::NOT_FOUND,
        FileFault::Exists | FileFault::NotEmpty => StatusCode::CONFLICT,
        FileFault::IsDirectory
        | FileFault::NotDirectory
        | FileFault::Special
        | FileFault::Loop
        | FileFault::InvalidArchive
        | FileFault::TooMany
        | FileFault::Other => StatusCode::UNPROCESSABLE_ENTITY,
        FileFault::Denied | FileFault::ReadOnly => StatusCode::FORBIDDEN,
        FileFault::NoSpace | FileFault::Killed => StatusCode::INSUFFICIENT_STORAGE,
        FileFault::InvalidPath | FileFault::Interrupted => StatusCode::BAD_REQUEST,
        FileFault::Busy => StatusCode::TOO_MANY_REQUESTS,
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        // Another dialect says it in its own words.
        response.extensions_mut().insert(self.clone());
        let headers = response.headers_mut();
        if let Some(after) = self.retry_after {
            // Whole seconds, rounded up: earlier would be too early.
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if self.status == StatusCode::UPGRADE_REQUIRED {
            headers.insert(header::UPGRADE, HeaderValue::from_static("tcp"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use warren::{Limit, ProgramFault, SandboxId};

    use super::*;

    #[test]
    fn every_error_has_its_status_and_code_and_a_hint() {
        let text = String::new;
        let id = || SandboxId::from_string("sbx-1");
        let source = || io::Error::other("EPERM");
        let (program, kind) = ("x".to_owned(), ProgramFault::NotFound);
        let after = Duration::from_millis(1_500);
        for (error, status, code) in [
            (SandboxError::invalid("f", "r", "h"), 400, "invalid_spec"),
            (
                SandboxError::Unsupported { feature: text(), backend: text(), hint: text() },
                422,
                "unsupported",
            ),
            (
                SandboxError::LimitNotEnforceable {
                    limit: Limit::Memory,
                    reason: text(),
                    hint: text(),
                },
                422,
                "limit_not_enforceable",
            ),
            (SandboxError::NotFound { what: "sandbox", id: text() }, 404, "not_found"),
            (SandboxError::AlreadyExists { what: "sandbox", id: text() }, 409, "already_exists"),
            (SandboxError::Ended { id: id() }, 410, "ended"),
            (SandboxError::SessionEnded { id: text() }, 410, "session_ended"),
            (SandboxError::Suspended { id: id() }, 409, "suspended"),
            (SandboxError::Timeout { what: text(), after }, 504, "timeout"),
            (SandboxError::step("mount", "/x", source()), 500, "step_failed"),
            (SandboxError::Program { program, kind, source: source() }, 422, "program_not_found"),
            (SandboxError::PortClosed { port: 1, source: source() }, 502, "port_closed"),
            (SandboxError::TooLarge { what: text(), limit: 1 }, 413, "too_large"),
            (SandboxError::Capacity { limit: 1, retry_after: after }, 503, "capacity"),
            (SandboxError::NoMatch { missing: Vec::new() }, 422, "no_match"),
            (SandboxError::Conflict { action: text(), reason: text() }, 409, "conflict"),
            (SandboxError::ShuttingDown, 503, "shutting_down"),
            (SandboxError::Internal { message: text() }, 500, "internal"),
        ] {
            let answer = ApiError::from(error);
            assert_eq!((answer.status.as_u16(), answer.code), (status, code));
            assert!(answer.hint.is_some(), "{code} has a hint");
        }
    }

    #[test]
    fn a_time_to_retry_is_rounded_up_to_whole_seconds() {
        let retry_after = Duration::from_millis(1_500);
        let error = ApiError::from(SandboxError::Capacity { limit: 1, retry_after });
        assert_eq!(error.into_response().headers()[header::RETRY_AFTER], "2");
    }
}
