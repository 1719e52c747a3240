//! The control plane of E2B: makes, finds, pauses and ends sandboxes as its SDKs ask for it.
//!
//! A thin dialect: the manager has the sandboxes, the journal what E2B says of them (`Record`), and
//! here is when each one's time is up. Both generations of the API are served.

mod life;
mod list;
mod sandboxes;
mod snapshots;
mod templates;
pub(crate) mod wire;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{MethodRouter, delete, get, post, put};
use serde_json::json;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warren::SandboxError;
use warren::clock::Clocks;

pub use sandboxes::spec;

use super::record::{self, Record, State};
use super::{Door, SandboxDirectory, SandboxEntry};
use crate::error::ApiError;
use crate::extract::MAX_BODY;
use crate::principal::{Principal, authenticate, refuse_browsers};
use crate::{Api, rest};

/// How E2B's control plane behaves.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The domain below which ports of sandboxes have names; none if they are reached by headers alone.
    pub domain: Option<String>,
    /// Whether sandboxes can reach anything beyond themselves.
    pub reaches: bool,
}

/// The control plane. Clones are handles to the same one.
#[derive(Clone)]
pub struct Control(Arc<Inner>);

struct Inner {
    api: Api,
    settings: Settings,
    sandboxes: Mutex<HashMap<String, Arc<Live>>>,
    /// Some sandbox has another end than before.
    changed: Notify,
    workshop: Mutex<templates::Workshop>,
}

/// A sandbox that E2B's clients know, running or paused.
struct Live {
    id: String,
    record: Mutex<Record>,
    /// Held while its life changes, so that contradicting calls follow each other.
    turn: tokio::sync::Mutex<()>,
    /// When its time is up, by a clock that nobody can set.
    deadline: Mutex<Instant>,
    /// Cancelled when it is killed or paused.
    over: Mutex<CancellationToken>,
    samples: Mutex<life::Samples>,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("settings", &self.0.settings).finish_non_exhaustive()
    }
}

/// Reads what is asked of the control plane.
#[cfg(feature = "fuzz")]
pub(crate) fn fuzz(body: &[u8]) {
    sandboxes::fuzz(body);
    templates::fuzz(body);
}

/// Locks what is touched for moments; a panic elsewhere leaves plain values behind.
fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Live {
    fn new(record: Record) -> Self {
        let deadline = Instant::now() + record.left(&Clocks::now());
        Self {
            id: record.id(),
            record: Mutex::new(record),
            turn: tokio::sync::Mutex::default(),
            deadline: Mutex::new(deadline),
            over: Mutex::default(),
            samples: Mutex::default(),
        }
    }

    fn record(&self) -> Record {
        guard(&self.record).clone()
    }

    fn state(&self) -> State {
        guard(&self.record).state
    }

    fn deadline(&self) -> Instant {
        *guard(&self.deadline)
    }
}

impl Control {
    /// Takes up what E2B's clients were told by the daemon before, and begins to look after it.
    ///
    /// The API must have started.
    pub async fn start(api: &Api, settings: Settings) -> Result<Self, SandboxError> {
        let (_, notes) = api.0.journal.load().await?;
        let mut sandboxes = HashMap::new();
        for (name, note) in notes {
            if !name.starts_with(record::NOTE) {
                continue;
            }
            match serde_json::from_value::<Record>(note) {
                Ok(record) => {
                    sandboxes.insert(record.id(), Arc::new(Live::new(record)));
                }
                Err(error) => tracing::error!(name, %error, "a record cannot be read"),
            }
        }
        let changed = Notify::new();
        let inner = Inner {
            api: api.clone(),
            settings,
            sandboxes: Mutex::new(sandboxes),
            changed,
            workshop: Mutex::default(),
        };
        let this = Self(Arc::new(inner));
        this.forget_lost().await?;
        let api = &this.0.api;
        api.0.tasks.spawn(this.clone().keep_time());
        api.0.tasks.spawn(this.clone().keep_sampled());
        Ok(this)
    }

    fn api(&self) -> &Api {
        &self.0.api
    }

    fn domain(&self) -> Option<&str> {
        self.0.settings.domain.as_deref()
    }

    fn reaches(&self) -> bool {
        self.0.settings.reaches
    }

    fn all(&self) -> Vec<Arc<Live>> {
        guard(&self.0.sandboxes).values().cloned().collect()
    }

    fn get(&self, id: &str) -> Option<Arc<Live>> {
        guard(&self.0.sandboxes).get(id).cloned()
    }

    /// Returns the caller's sandbox of this id; what is another's does not exist.
    fn own(&self, who: &Principal, id: &str) -> Result<Arc<Live>, ApiError> {
        let found = self.get(id).filter(|live| {
            let record = guard(&live.record);
            who.note.sandbox(&record.sandbox);
            let own = *record.tenant == *who.tenant;
            if !own {
                who.note.foreign();
            }
            own
        });
        found.ok_or_else(|| not_found(id))
    }

    /// Writes a record, before anybody is told what it says.
    async fn write(&self, record: &Record) -> Result<(), ApiError> {
        let value = serde_json::to_value(record);
        let value = value.map_err(|_| ApiError::internal("cannot write JSON"))?;
        let note = (format!("{}{}", record::NOTE, record.id()), Some(value));
        let written = self.api().0.journal.record(Vec::new(), vec![note]).await;
        Ok(written.map_err(SandboxError::from)?)
    }

    /// Forgets a sandbox that is gone.
    async fn erase(&self, id: &str) {
        guard(&self.0.sandboxes).remove(id);
        let note = (format!("{}{id}", record::NOTE), None);
        if let Err(error) = self.api().0.journal.record(Vec::new(), vec![note]).await {
            // The next daemon finds that it is gone.
            tracing::warn!(%error, "cannot record that a sandbox is gone");
        }
    }

    /// Forgets what ended while nobody looked.
    async fn forget_lost(&self) -> Result<(), SandboxError> {
        for live in self.all() {
            let record = live.record();
            if self.api().manager().get_sandbox(&record.sandbox).await?.is_none() {
                self.erase(&live.id).await;
            }
        }
        Ok(())
    }
}

#[async_trait]
impl SandboxDirectory for Control {
    fn door(&self, id: &str) -> Option<Door> {
        let live = self.get(id)?;
        let record = live.record();
        let sleeps = matches!(record.state, State::Paused(_));
        let is_there = if sleeps { record.auto_resume } else { live.deadline() > Instant::now() };
        if !is_there {
            return None;
        }
        Some(Door {
            id: id.to_owned(),
            sandbox: record.sandbox,
            access_token: record.access_token,
            traffic_token: record.traffic_token,
            sleeps,
        })
    }

    async fn find(&self, id: &str) -> Option<SandboxEntry> {
        let live = self.get(id)?;
        if let State::Paused(_) = live.state() {
            if !guard(&live.record).auto_resume {
                return None;
            }
            let (this, woken) = (self.clone(), Arc::clone(&live));
            // To its end, even if whoever came goes away meanwhile.
            self.api().finish(async move { this.wake(&woken).await }).await.ok()?;
        }
        self.entry(&live).await
    }

    async fn running(&self) -> Vec<SandboxEntry> {
        let mut running = Vec::new();
        for live in self.all() {
            running.extend(self.entry(&live).await);
        }
        running
    }
}

impl Control {
    /// Returns what traffic needs to know of a sandbox that runs.
    async fn entry(&self, live: &Live) -> Option<SandboxEntry> {
        let (record, over) = (live.record(), guard(&live.over).clone());
        if record.state != State::Running || live.deadline() <= Instant::now() {
            return None;
        }
        let sandbox = match self.api().manager().get_sandbox(&record.sandbox).await {
            Ok(Some(sandbox)) => sandbox,
            // It ended by itself.
            Ok(None) => {
                over.cancel();
                self.erase(&live.id).await;
                return None;
            }
            Err(_) => return None,
        };
        let mask = record.network.as_ref().and_then(|network| network.mask_request_host.clone());
        Some(SandboxEntry {
            id: live.id.clone(),
            sandbox,
            tenant: record.tenant.into(),
            quotas: record.quotas,
            access_token: record.access_token,
            host_mask: mask,
            env: record.env.into_iter().collect(),
            user: record.user.unwrap_or_else(|| "user".to_owned()),
            workdir: record.workdir,
            over,
        })
    }
}

fn not_found(id: &str) -> ApiError {
    let id: String = id.chars().take(64).collect();
    let message = format!("sandbox \"{id}\" doesn't exist or you don't have access to it");
    ApiError::new(StatusCode::NOT_FOUND, "not_found", message)
}

fn bad_request(message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, "bad_request", message)
}

/// Starts the control plane and returns the router of the whole dialect, with the native one behind it.
pub async fn open(api: &Api, settings: Settings) -> Result<Router, SandboxError> {
    let control = Control::start(api, settings).await?;
    let dialect = super::E2b::new(api, Arc::new(control.clone()));
    Ok(super::router(&dialect, router(&control)))
}

/// One call of the control plane: its method, its path, and who answers.
type Route = (&'static str, &'static str, MethodRouter<Control>);

/// Every call that takes a key. What is not here is not served, and a test asks each as a stranger.
fn table() -> Vec<Route> {
    vec![
        ("POST", "/sandboxes", post(sandboxes::create_v1)),
        ("GET", "/sandboxes", get(list::list_v1)),
        ("POST", "/v2/sandboxes", post(sandboxes::create_v2)),
        ("GET", "/v2/sandboxes", get(list::list_v2)),
        ("GET", "/sandboxes/metrics", get(list::metrics_of_all)),
        ("GET", "/sandboxes/{id}", get(sandboxes::show)),
        ("DELETE", "/sandboxes/{id}", delete(sandboxes::kill)),
        ("POST", "/sandboxes/{id}/timeout", post(sandboxes::set_timeout)),
        ("POST", "/sandboxes/{id}/refreshes", post(sandboxes::refresh)),
        ("POST", "/sandboxes/{id}/connect", post(sandboxes::connect_v1)),
        ("POST", "/v2/sandboxes/{id}/connect", post(sandboxes::connect_v2)),
        ("POST", "/sandboxes/{id}/resume", post(sandboxes::resume)),
        ("POST", "/sandboxes/{id}/pause", post(sandboxes::pause)),
        ("POST", "/sandboxes/{id}/fork", post(snapshots::fork)),
        ("POST", "/sandboxes/{id}/snapshots", post(snapshots::create)),
        ("PUT", "/sandboxes/{id}/network", put(sandboxes::set_network)),
        ("GET", "/sandboxes/{id}/metrics", get(list::metrics)),
        ("GET", "/sandboxes/{id}/logs", get(list::logs)),
        ("GET", "/v2/sandboxes/{id}/logs", get(list::logs)),
        ("GET", "/snapshots", get(snapshots::list)),
        ("GET", "/templates", get(templates::list)),
        ("POST", "/v3/templates", post(templates::announce)),
        ("GET", "/templates/aliases/{name}", get(templates::alias)),
        ("POST", "/templates/tags", post(templates::tag)),
        ("DELETE", "/templates/tags", delete(templates::untag)),
        ("DELETE", "/templates/{id}", delete(snapshots::delete)),
        ("GET", "/templates/{id}/tags", get(templates::tags)),
        ("GET", "/templates/{id}/files/{hash}", get(templates::files)),
        ("POST", "/v2/templates/{id}/builds/{build}", post(templates::start)),
        ("GET", "/templates/{id}/builds/{build}/status", get(templates::status)),
    ]
}

/// Lists every call that takes a key, as a method and a path.
pub fn routes() -> impl Iterator<Item = (&'static str, &'static str)> {
    table().into_iter().map(|(method, path, _)| (method, path))
}

/// Returns the router of the control plane; what is none of E2B's goes to the native dialect.
pub fn router(control: &Control) -> Router {
    let api = control.api();
    let add = |router: Router<Control>, (_, path, answer): Route| router.route(path, answer);
    let paths = table()
        .into_iter()
        .fold(Router::new(), add)
        .route_layer(from_fn_with_state(api.clone(), authenticate))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(from_fn_with_state(api.clone(), refuse_browsers))
        .merge(Router::new().route("/templates/files/{token}", put(templates::send)))
        .layer(from_fn(in_their_words))
        .route("/health", get(async || StatusCode::NO_CONTENT))
        .with_state(control.clone());
    paths.fallback_service(rest::router(api))
}

/// Says in E2B's form what was refused.
async fn in_their_words(request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let began = std::time::Instant::now();
    let response = next.run(request).await;
    let status = response.status().as_u16();
    let tenant = response.extensions().get::<Principal>().map(|who| &*who.tenant);
    tracing::info!(%method, path, status, tenant, elapsed_ms = began.elapsed().as_millis(), "request");
    let Some(error) = response.extensions().get::<ApiError>().cloned() else { return response };
    let body = json!({ "code": error.status().as_u16(), "message": error.text() });
    let mut answer = (error.status(), axum::Json(body)).into_response();
    if let Some(after) = response.headers().get(axum::http::header::RETRY_AFTER) {
        answer.headers_mut().insert(axum::http::header::RETRY_AFTER, after.clone());
    }
    // For the audit log.
    answer.extensions_mut().insert(error);
    answer
}

/// Returns a random secret.
fn token() -> Result<String, ApiError> {
    let mut bytes = [0; 32];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|_| ApiError::internal("no random numbers"))?;
    Ok(crate::keys::hex(&bytes))
}
