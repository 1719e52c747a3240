//! Requests that may be repeated: the same key and body get the same answer, and the work is done once.
//!
//! What runs is known here, what is done in the journal, and so after a restart too. A daemon that is
//! killed between the two has given no answer; repeating does the work again, and what the first try
//! made ends for want of use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use warren::SandboxError;

use crate::error::ApiError;
use crate::journal::Journal;

/// The header that carries the key.
pub const KEY_HEADER: &str = "idempotency-key";
const REPLAYED_HEADER: &str = "idempotency-replayed";
const MAX_KEY: usize = 255;

/// An answer that can be given again.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    status: StatusCode,
    body: Bytes,
}

impl Answer {
    pub(crate) fn json(status: StatusCode, body: &impl Serialize) -> Result<Self, ApiError> {
        let body = serde_json::to_vec(body).map_err(|_| ApiError::internal("cannot write JSON"))?;
        Ok(Self { status, body: body.into() })
    }

    pub(crate) fn into_response(self, is_replay: bool) -> Response {
        let mut response = (self.status, Body::from(self.body)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if is_replay {
            headers.insert(REPLAYED_HEADER, HeaderValue::from_static("true"));
        }
        response
    }
}

/// A tenant and the key that it chose.
pub(crate) type Name = (Arc<str>, String);
/// An answer, and whether it was given before.
type Outcome = Result<(Answer, bool), ApiError>;

#[derive(Debug)]
struct Entry {
    digest: [u8; 32],
    outcome: watch::Receiver<Option<Outcome>>,
}

/// The requests that can be repeated.
#[derive(Debug, Clone)]
pub(crate) struct Repeatable {
    running: Arc<Mutex<HashMap<Name, Entry>>>,
    journal: Arc<dyn Journal>,
}

impl Repeatable {
    pub(crate) fn new(journal: Arc<dyn Journal>) -> Self {
        Self { running: Arc::default(), journal }
    }

    fn running(&self) -> MutexGuard<'_, HashMap<Name, Entry>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does the work, unless the same was asked before: then waits for that and returns its answer.
    ///
    /// The work goes on if the caller hangs up, and [`keep`](Self::keep)s its answer. What failed is
    /// not kept, so that it can be tried again under the same key.
    pub(crate) async fn once<W: Future<Output = Result<Answer, ApiError>> + Send + 'static>(
        &self,
        tasks: &TaskTracker,
        name: Name,
        digest: [u8; 32],
        work: W,
    ) -> Result<Response, ApiError> {
        let (sender, own) = watch::channel(None);
        let (mut outcome, waits) = match self.enter(&name, digest, &own)? {
            Some(theirs) => (theirs, true),
            None => {
                let this = self.clone();
                tasks.spawn(async move {
                    let done = match this.recall(&name, digest).await {
                        Ok(Some(answer)) => Ok((answer, true)),
                        Ok(None) => work.await.map(|answer| (answer, false)),
                        Err(error) => Err(error),
                    };
                    this.running().remove(&name);
                    sender.send_replace(Some(done));
                });
                (own, false)
            }
        };
        let done = outcome.wait_for(Option::is_some).await;
        let done = done.ok().and_then(|done| done.clone());
        let (answer, kept) = done.ok_or_else(|| ApiError::internal("the work was given up"))??;
        Ok(answer.into_response(waits || kept))
    }

    /// Enters a request as ours to do, or returns what becomes of the same one that runs.
    fn enter(
        &self,
        name: &Name,
        digest: [u8; 32],
        outcome: &watch::Receiver<Option<Outcome>>,
    ) -> Result<Option<watch::Receiver<Option<Outcome>>>, ApiError> {
        let mut running = self.running();
        match running.get(name) {
            // A sender that is gone without a word panicked.
            Some(entry) if entry.outcome.has_changed().is_ok() => {
                let same = entry.digest == digest;
                same.then(|| Some(entry.outcome.clone())).ok_or_else(ApiError::idempotency_mismatch)
            }
            Some(_) | None => {
                running.insert(name.clone(), Entry { digest, outcome: outcome.clone() });
                Ok(None)
            }
        }
    }

    /// Keeps an answer, before it is given.
    pub(crate) async fn keep(
        &self,
        (tenant, key): &Name,
        digest: [u8; 32],
        answer: &Answer,
    ) -> Result<(), ApiError> {
        let (status, body) = (answer.status.as_u16(), String::from_utf8_lossy(&answer.body));
        let response = json!({ "status": status, "body": body });
        let kept = self.journal.remember(tenant, key, &digest, response).await;
        Ok(kept.map_err(SandboxError::from)?)
    }

    async fn recall(
        &self,
        (tenant, key): &Name,
        digest: [u8; 32],
    ) -> Result<Option<Answer>, ApiError> {
        let kept = self.journal.recall(tenant, key).await.map_err(SandboxError::from)?;
        let Some(kept) = kept else { return Ok(None) };
        if kept.request_hash != digest {
            return Err(ApiError::idempotency_mismatch());
        }
        let status = kept.response["status"].as_u64().and_then(|code| u16::try_from(code).ok());
        let status = status.and_then(|code| StatusCode::from_u16(code).ok());
        let body = kept.response["body"].as_str().map(|body| Bytes::from(body.to_owned()));
        let answer = status.zip(body).map(|(status, body)| Answer { status, body });
        answer.map(Some).ok_or_else(|| ApiError::internal("a kept answer cannot be read"))
    }
}

/// Reads the key of a request, if it has one.
pub(crate) fn key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(KEY_HEADER) else { return Ok(None) };
    match value.to_str() {
        Ok(key) if (1..=MAX_KEY).contains(&key.len()) => Ok(Some(key.to_owned())),
        Ok(_) | Err(_) => Err(ApiError::invalid_header(
            format!("`{KEY_HEADER}` is no key"),
            "a key has 1 to 255 visible ASCII characters; a UUID is a good one",
        )),
    }
}
