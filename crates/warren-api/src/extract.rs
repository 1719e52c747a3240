//! What a request carries, checked at the edge.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::header;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::Body as _;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use warren::SandboxId;

use crate::error::ApiError;
use crate::rest::ports;

/// The largest body that is read.
pub const MAX_BODY: usize = 1 << 20;
const BODY_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(20);

/// A JSON body.
#[derive(Debug)]
pub(crate) struct Body<T> {
    pub(crate) value: T,
    /// SHA-256 of the body as it was sent.
    pub(crate) digest: [u8; 32],
}

impl<T: DeserializeOwned, S: Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let is_json = request.headers().get(header::CONTENT_TYPE).is_some_and(|kind| {
            let kind = kind.to_str().unwrap_or_default();
            let (kind, parameters) = kind.split_once(';').unwrap_or((kind, ""));
            let parameters = parameters.trim().to_ascii_lowercase();
            kind.trim().eq_ignore_ascii_case("application/json")
                && matches!(parameters.as_str(), "" | "charset=utf-8")
        });
        let bytes = read(request).await?;
        // No body at all is an empty object, which needs no media type.
        if bytes.is_empty() {
            let value = serde_json::from_slice(b"{}").map_err(|e| ApiError::invalid_json(&e))?;
            return Ok(Self { value, digest: Sha256::digest(b"{}").into() });
        }
        if !is_json {
            return Err(ApiError::media_type());
        }
        let value = serde_json::from_slice(&bytes).map_err(|e| ApiError::invalid_json(&e))?;
        Ok(Self { value, digest: Sha256::digest(&bytes).into() })
    }
}

/// A body that is bytes and no more. It has the same bounds as any other.
#[derive(Debug)]
pub(crate) struct Raw(pub(crate) Bytes);

impl<S: Sync> FromRequest<S> for Raw {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        read(request).await.map(Self)
    }
}

async fn read(request: Request) -> Result<Bytes, ApiError> {
    if request.body().size_hint().lower() > MAX_BODY as u64 {
        return Err(ApiError::body_too_large(MAX_BODY));
    }
    let body = Limited::new(request.into_body(), MAX_BODY).collect();
    match tokio::time::timeout(BODY_TIMEOUT, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::body_too_large(MAX_BODY)),
        Ok(Err(_)) => Err(ApiError::new(
            axum::http::StatusCode::BAD_REQUEST,
            "invalid_body",
            "the body ended before its time",
        )
        .with_hint("send as many bytes as `Content-Length` says")),
        Err(_) => Err(ApiError::request_timeout()),
    }
}

/// An id in the path.
#[derive(Debug)]
pub(crate) struct Id(pub(crate) SandboxId);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(id) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::invalid_id("the id is no text"))?;
        plain(id).map(Self)
    }
}

/// Checks an id; those of sessions obey the same rule.
pub(crate) fn plain(id: String) -> Result<SandboxId, ApiError> {
    let id = SandboxId::from_string(id);
    id.validate().map_err(|error| ApiError::invalid_id(error.to_string()))?;
    Ok(id)
}

/// Refuses paths that could be read in two ways. Nothing in ours needs an escape.
pub(crate) async fn refuse_odd_paths(request: Request, next: Next) -> Result<Response, ApiError> {
    // What follows a port is the affair of the server there.
    let path = ports::own_part(request.uri().path());
    if path.contains(['%', '\\']) {
        return Err(ApiError::invalid_id("the path has an escaped character"));
    }
    if path != "/" && path.split('/').skip(1).any(|part| matches!(part, "" | "." | "..")) {
        return Err(ApiError::invalid_id("the path has an empty part, `.` or `..`"));
    }
    Ok(next.run(request).await)
}

/// The parameters of a query, each used up by asking for it.
#[derive(Debug)]
pub(crate) struct Parameters(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for Parameters {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let query = Query::<Vec<(String, String)>>::from_request_parts(parts, state).await;
        query
            .map(|Query(pairs)| Self(pairs))
            .map_err(|_| ApiError::invalid_query("the query cannot be read", "write it as a=b&c=d"))
    }
}

impl Parameters {
    /// Takes a parameter that is true or false, and false if it is not given.
    pub(crate) fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.one(name)?.as_deref() {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(ApiError::invalid_query(
                format!("`{name}` is neither true nor false"),
                format!("write {name}=true"),
            )),
        }
    }

    /// Takes every value of a parameter.
    pub(crate) fn all(&mut self, name: &str) -> Vec<String> {
        self.0.extract_if(.., |(key, _)| key == name).map(|(_, value)| value).collect()
    }

    /// Takes the value of a parameter that is given once at most.
    pub(crate) fn one(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let mut values = self.all(name);
        match values.len() {
            0 | 1 => Ok(values.pop()),
            _ => Err(ApiError::invalid_query(format!("`{name}` is given twice"), "give it once")),
        }
    }

    /// Refuses what nobody asked for.
    pub(crate) fn end(self) -> Result<(), ApiError> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::invalid_query(
                format!("there is no parameter `{}`", name.escape_debug()),
                "docs/openapi.json lists the parameters",
            )),
        }
    }
}
