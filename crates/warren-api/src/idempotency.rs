//! Requests that may be repeated: the same key and body get the same answer, and the work is done once.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::error::ApiError;

/// The header that carries the key.
pub const KEY_HEADER: &str = "idempotency-key";
const REPLAYED_HEADER: &str = "idempotency-replayed";
const MAX_KEY: usize = 255;
/// For how long an answer is kept.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3_600);
/// How many are kept; the oldest goes first.
const KEPT: usize = 10_000;

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

type Outcome = Result<Answer, ApiError>;
type Name = (Arc<str>, String);

#[derive(Debug)]
struct Entry {
    digest: [u8; 32],
    outcome: watch::Receiver<Option<Outcome>>,
}

#[derive(Debug, Default)]
struct Entries {
    by_name: HashMap<Name, Entry>,
    ages: VecDeque<(Instant, Name)>,
}

/// The requests that can be repeated.
#[derive(Debug, Clone, Default)]
pub(crate) struct Repeatable(Arc<Mutex<Entries>>);

impl Repeatable {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does the work, unless the same was asked before: then waits for that and returns its answer.
    ///
    /// The work goes on if the caller hangs up. What failed is forgotten, so that it can be tried
    /// again under the same key.
    pub(crate) async fn once<W: Future<Output = Outcome> + Send + 'static>(
        &self,
        tasks: &TaskTracker,
        name: Name,
        digest: [u8; 32],
        work: impl FnOnce() -> W,
    ) -> Result<Response, ApiError> {
        let (sender, own) = watch::channel(None);
        let (mut outcome, is_replay) = match self.enter(&name, digest, &own)? {
            Some(theirs) => (theirs, true),
            None => {
                let (this, work) = (self.clone(), work());
                tasks.spawn(async move {
                    let done = work.await;
                    if done.is_err() {
                        this.entries().by_name.remove(&name);
                    }
                    sender.send_replace(Some(done));
                });
                (own, false)
            }
        };
        let done = outcome.wait_for(Option::is_some).await;
        let done = done.ok().and_then(|done| done.clone());
        let answer = done.ok_or_else(|| ApiError::internal("the work was given up"))??;
        Ok(answer.into_response(is_replay))
    }

    /// Enters a request as ours to do, or returns what becomes of the one that came before.
    fn enter(
        &self,
        name: &Name,
        digest: [u8; 32],
        outcome: &watch::Receiver<Option<Outcome>>,
    ) -> Result<Option<watch::Receiver<Option<Outcome>>>, ApiError> {
        let mut entries = self.entries();
        match entries.by_name.get(name) {
            Some(entry) if entry.digest == digest => return Ok(Some(entry.outcome.clone())),
            Some(_) => return Err(ApiError::idempotency_mismatch()),
            None => {}
        }
        while let Some((at, oldest)) = entries.ages.front()
            && (at.elapsed() > KEPT_FOR || entries.by_name.len() >= KEPT)
        {
            let oldest = oldest.clone();
            entries.ages.pop_front();
            entries.by_name.remove(&oldest);
        }
        entries.ages.push_back((Instant::now(), name.clone()));
        entries.by_name.insert(name.clone(), Entry { digest, outcome: outcome.clone() });
        Ok(None)
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
