//! Around every request: a name for it, and what becomes of it into the log.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use warren::SandboxId;

use super::entry::bounded;
use super::{Audit, Call, Entry};
use crate::Api;
use crate::error::ApiError;
use crate::principal::{Peer, Principal};
use crate::rest::ports;

/// The header that names a request in its answer.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// What is answered whether or not it can be noted: it changes nothing, and tells of nobody.
pub(super) const OPEN: [&str; 2] = ["/v1/health", "/health"];
/// What the kernel knows of whoever comes from this host begins with.
pub(super) const LOCAL: &str = "uid:";
/// A path that ends with a secret.
const SECRET: &str = "/templates/files/";
/// What a query has that is noted: paths inside a sandbox. Anything else in it may be a secret.
const FILES: [&str; 3] = ["path", "from", "to"];

/// What is learnt of a request while it is answered. Clones are of the same request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Note(Arc<Mutex<Learnt>>);

#[derive(Debug, Clone, Default)]
struct Learnt {
    request: String,
    tenant: Option<Arc<str>>,
    client: Option<Arc<str>>,
    key: Option<String>,
    sandbox: Option<String>,
    session: Option<String>,
    port: Option<u16>,
    foreign: bool,
}

/// It says nothing of who somebody is.
impl PartialEq for Note {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Note {}

impl Note {
    /// Returns the note of a request; one that is not watched has one that nobody reads.
    pub(crate) fn of(request: &Request) -> Self {
        request.extensions().get().cloned().unwrap_or_default()
    }

    fn learnt(&self) -> MutexGuard<'_, Learnt> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the name of the request.
    pub(crate) fn request(&self) -> String {
        self.learnt().request.clone()
    }

    /// Notes who asks.
    pub(crate) fn by(&self, who: &Principal, key: Option<&str>) {
        let mut learnt = self.learnt();
        learnt.tenant = Some(Arc::clone(&who.tenant));
        learnt.client = who.client.clone();
        learnt.key = key.map(str::to_owned);
    }

    /// Notes which sandbox it is about.
    pub(crate) fn sandbox(&self, id: &SandboxId) {
        self.learnt().sandbox = Some(bounded(id.as_str()));
    }

    /// Notes which session it is about.
    pub(crate) fn session(&self, id: &str) {
        self.learnt().session = Some(bounded(id));
    }

    /// Notes that it is for a server inside, whose paths are not ours to note.
    pub(crate) fn port(&self, port: u16) {
        self.learnt().port = Some(port);
    }

    /// Notes that it was about what is somebody else's.
    pub(crate) fn foreign(&self) {
        self.learnt().foreign = true;
    }
}

/// Puts the log around a router. One that is inside another which has it is left alone.
pub(crate) fn around(api: &Api, router: Router) -> Router {
    router.layer(from_fn_with_state(api.clone(), watch))
}

async fn watch(State(api): State<Api>, mut request: Request, next: Next) -> Response {
    if request.extensions().get::<Note>().is_some() {
        return next.run(request).await;
    }
    let note = Note::default();
    let name = format!("req-{}", uuid::Uuid::new_v4().simple());
    note.learnt().request.clone_from(&name);
    request.extensions_mut().insert(note.clone());
    let mut response = match api.audit() {
        None => next.run(request).await,
        Some(audit) if !audit.is_ready() && !OPEN.contains(&request.uri().path()) => {
            ApiError::unwritable().into_response()
        }
        Some(audit) => {
            let asked = Asked {
                call: asked(&request),
                note,
                audit: Some(audit.clone()),
                began: Instant::now(),
                api: &api,
            };
            asked.answered(next.run(request).await).await
        }
    };
    if let Ok(name) = HeaderValue::from_str(&name) {
        response.headers_mut().insert(REQUEST_ID, name);
    }
    response
}

/// Notes what is asked for, and nothing that it carries.
fn asked(request: &Request) -> Call {
    let path = ports::own_part(request.uri().path());
    let path = match path.find(SECRET) {
        Some(at) => format!("{}...", &path[..at + SECRET.len()]),
        None => bounded(path),
    };
    let query = form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes());
    let mut files = query.filter(|(name, _)| FILES.contains(&&**name) && path.contains("/files"));
    let file = files.next().map(|(_, first)| {
        files.fold(bounded(&first), |all, (_, more)| format!("{all} {}", bounded(&more)))
    });
    Call {
        peer: match request.extensions().get::<Peer>() {
            Some(Peer::Unix { uid }) => format!("{LOCAL}{uid}"),
            Some(Peer::Tcp { from, .. }) => from.to_string(),
            None => String::new(),
        },
        method: bounded(request.method().as_str()),
        path,
        file: file.map(|file| bounded(&file)),
        ..Call::default()
    }
}

/// A request that is under way. Should its caller hang up, that is noted as well.
struct Asked<'a> {
    call: Call,
    note: Note,
    /// Absent once it is noted.
    audit: Option<Audit>,
    began: Instant,
    api: &'a Api,
}

impl Asked<'_> {
    async fn answered(mut self, response: Response) -> Response {
        let entry = self.entry(Some(&response));
        let Some(audit) = self.audit.take() else { return response };
        match audit.after(entry).await {
            Ok(()) => response,
            // The daemon ends. What was done is done, and whoever asked is not told that it was.
            Err(_) => ApiError::unwritable().into_response(),
        }
    }

    fn entry(&mut self, response: Option<&Response>) -> Entry {
        let mut call = std::mem::take(&mut self.call);
        let learnt = self.note.learnt().clone();
        call.request = learnt.request;
        call.tenant = learnt.tenant.map(|tenant| tenant.to_string());
        call.client = learnt.client.map(|client| client.to_string());
        call.key = learnt.key;
        call.sandbox = learnt.sandbox;
        call.session = learnt.session;
        call.foreign = learnt.foreign;
        call.elapsed_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if let Some(port) = learnt.port {
            call.port = Some(port);
            call.path = String::new();
            call.file = None;
        }
        let Some(response) = response else { return Entry::Call(Box::new(call)) };
        call.status = Some(response.status().as_u16());
        let error = response.extensions().get::<ApiError>();
        call.code = error.map(|error| error.code().to_owned());
        let refused = [
            StatusCode::UNAUTHORIZED,
            StatusCode::FORBIDDEN,
            StatusCode::NOT_FOUND,
            StatusCode::TOO_MANY_REQUESTS,
        ];
        // What a server inside answers is no answer of ours.
        let is_ours = error.is_some() || (learnt.port.is_none() && !call.path.contains("/ports/"));
        match refused.contains(&response.status()) && is_ours {
            true => Entry::Denial(Box::new(call)),
            false => Entry::Call(Box::new(call)),
        }
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let Some(audit) = self.audit.take() else { return };
        let entry = self.entry(None);
        // Only the end of everything is outside of a runtime, and then nobody is left to note it.
        if tokio::runtime::Handle::try_current().is_ok() {
            self.api.0.tasks.spawn(async move {
                // The daemon ends, and says so in its own log.
                let _ = audit.after(entry).await;
            });
        }
    }
}
