//! A daemon without sockets: requests go straight to the router, each with its peer.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Method, Request, Response, header};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tower::ServiceExt as _;
use warren::backend::{FakeBackend, LinuxBackend};
use warren::image::Registries;
use warren::layers::Layers;
use warren::template::Templates;
use warren::{DefaultSandboxManager, PoolConfig, SandboxManagerConfig};
use warren_api::audit::{Audit, Limits};
use warren_api::journal::{Journal as _, MemoryJournal};
use warren_api::keys::{Keys, Quotas};
use warren_api::{Api, Options, Peer, rest};

/// A user that is neither root nor the daemon's own.
pub(crate) const ALICE: Peer = Peer::Unix { uid: 4_000_001 };
pub(crate) const BOB: Peer = Peer::Unix { uid: 4_000_002 };
pub(crate) const ROOT: Peer = Peer::Unix { uid: 0 };

pub(crate) struct Daemon {
    pub(crate) api: Api,
    pub(crate) router: Router,
    pub(crate) backend: FakeBackend,
    pub(crate) manager: DefaultSandboxManager,
    pub(crate) state: tempfile::TempDir,
    journal: Arc<MemoryJournal>,
    audit: Option<Audit>,
}

/// An answer, whole.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) bytes: Bytes,
}

impl Answer {
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.bytes))
    }

    /// Returns the code of a refusal, having checked its shape.
    #[track_caller]
    pub(crate) fn code(&self) -> String {
        let body = self.json();
        let error = &body["error"];
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}");
        assert!(error["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{body}");
        error["code"].as_str().expect("a code").to_owned()
    }

    #[track_caller]
    pub(crate) fn expect(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{:?}", self.bytes);
        if self.bytes.is_empty() { Value::Null } else { self.json() }
    }
}

/// Templates whose steps would run in sandboxes that are none.
fn templates(backend: &FakeBackend, state: &tempfile::TempDir) -> Templates {
    let layers = Layers::open(state.path().join("storage")).expect("a store of layers");
    Templates::new(layers, Arc::new(backend.clone()), Registries::default())
}

impl Daemon {
    pub(crate) async fn new() -> Self {
        Self::with(SandboxManagerConfig::default()).await
    }

    /// Makes one that notes everything.
    pub(crate) async fn audited() -> Self {
        Self::audited_within(Limits::default()).await
    }

    pub(crate) async fn audited_within(limits: Limits) -> Self {
        Self::made(SandboxManagerConfig::default(), Some(limits)).await
    }

    /// Takes what E2B's clients say as well.
    pub(crate) async fn speaking_e2b(self) -> Self {
        let settings = warren_api::e2b::control::Settings::default();
        let router = warren_api::e2b::control::open(&self.api, settings).await.expect("E2B");
        Self { router, ..self }
    }

    /// Ends it, and returns what is left.
    pub(crate) async fn end(self) -> tempfile::TempDir {
        self.api.stop().await;
        self.api.noted().await;
        if let Some(audit) = &self.audit {
            audit.stop().await;
        }
        self.state
    }

    pub(crate) async fn with(config: SandboxManagerConfig) -> Self {
        Self::made(config, None).await
    }

    async fn made(config: SandboxManagerConfig, audited: Option<Limits>) -> Self {
        let state = tempfile::tempdir().expect("a directory");
        let layers = Layers::open(state.path().join("storage")).expect("a store");
        let backend = FakeBackend::new().with_layers(layers);
        let pool = PoolConfig { enabled: false, ..PoolConfig::default() };
        let config = SandboxManagerConfig { pool, ..config };
        let manager = DefaultSandboxManager::new(vec![Arc::new(backend.clone())], config);
        let open = |limits| Audit::open(&state.path().join("audit"), limits).expect("a log");
        let audit = audited.map(open);
        Self::over(backend, manager, state, Arc::default(), audit).await
    }

    /// Makes one whose sandboxes are real, and that speaks E2B.
    pub(crate) async fn on_linux() -> Self {
        let state = tempfile::tempdir().expect("a directory");
        let linux = LinuxBackend::new().expect("the linux backend");
        let pool = PoolConfig { enabled: false, ..PoolConfig::default() };
        let config = SandboxManagerConfig { pool, ..SandboxManagerConfig::default() };
        let manager = DefaultSandboxManager::new(vec![Arc::new(linux)], config);
        let made = Self::over(FakeBackend::new(), manager, state, Arc::default(), None).await;
        made.speak_e2b().await
    }

    async fn over(
        backend: FakeBackend,
        manager: DefaultSandboxManager,
        state: tempfile::TempDir,
        journal: Arc<MemoryJournal>,
        audit: Option<Audit>,
    ) -> Self {
        let templates = templates(&backend, &state);
        templates.take_up().expect("what was announced");
        let options = Options {
            keys: Some(Keys::at(state.path().join("keys.json"))),
            journal: Some(Arc::clone(&journal) as _),
            templates: Some(templates),
            audit: audit.clone(),
            ..Options::default()
        };
        let api = Api::new(Arc::new(manager.clone()), options);
        api.start().await.expect("an API");
        Self { router: rest::router(&api), api, backend, manager, state, journal, audit }
    }

    /// Forgets all but what the manager and the journal have.
    pub(crate) async fn restart(self) -> Self {
        self.api.stop().await;
        Self::over(self.backend, self.manager, self.state, self.journal, self.audit).await
    }

    /// Ends it and starts it anew, with what `change` makes of what E2B's clients were told of each sandbox.
    pub(crate) async fn restart_with(self, change: impl Fn(&mut Value)) -> Self {
        self.api.stop().await;
        let (_, notes) = self.journal.load().await.expect("notes");
        let of_e2b = notes.into_iter().filter(|(name, _)| name.starts_with("e2b/sandbox/"));
        let changed = of_e2b.map(|(name, mut note)| {
            change(&mut note);
            (name, Some(note))
        });
        self.journal.record(Vec::new(), changed.collect()).await.expect("written");
        self.restart().await.speak_e2b().await
    }

    /// Has it speak E2B, with what the journal has of it.
    pub(crate) async fn speak_e2b(self) -> Self {
        let settings = warren_api::e2b::control::Settings::default();
        let router = warren_api::e2b::control::open(&self.api, settings).await.expect("a router");
        Self { router, ..self }
    }

    pub(crate) fn key(&self, tenant: &str, quotas: Quotas) -> String {
        self.keys().create(tenant, quotas).expect("a key").0
    }

    pub(crate) fn keys(&self) -> Keys {
        Keys::at(self.state.path().join("keys.json"))
    }

    pub(crate) async fn call(&self, peer: Peer, method: &str, path: &str, body: Value) -> Answer {
        self.call_with(peer, method, path, body, &[]).await
    }

    pub(crate) async fn call_with(
        &self,
        peer: Peer,
        method: &str,
        path: &str,
        body: Value,
        headers: &[(&str, &str)],
    ) -> Answer {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let mut all = vec![("content-type", "application/json")];
        all.extend_from_slice(headers);
        self.send(peer, method, path, body, &all).await
    }

    pub(crate) async fn send(
        &self,
        peer: Peer,
        method: &str,
        path: &str,
        body: Vec<u8>,
        headers: &[(&str, &str)],
    ) -> Answer {
        read(self.open(peer, method, path, body, headers).await).await
    }

    /// Sends a request and leaves the body of the answer to the caller.
    pub(crate) async fn open(
        &self,
        peer: Peer,
        method: &str,
        path: &str,
        body: Vec<u8>,
        headers: &[(&str, &str)],
    ) -> Response<Body> {
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        let mut request = Request::builder().method(method).uri(path).extension(peer);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body)).expect("a request");
        let answer = self.router.clone().oneshot(request);
        let answer = tokio::time::timeout(Duration::from_secs(30), answer).await;
        answer.expect("an answer in time").expect("infallible")
    }

    pub(crate) async fn create(&self, peer: Peer, body: Value) -> (String, String) {
        let made = self.call(peer, "POST", "/v1/sandboxes", body).await.expect(201);
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        (text(&made["sandbox"]["id"]), text(&made["session"]["id"]))
    }

    pub(crate) async fn state_of(&self, peer: Peer, session: &str) -> String {
        let answer = self.call(peer, "GET", &format!("/v1/sessions/{session}"), Value::Null).await;
        match answer.status {
            404 => "terminated".to_owned(),
            _ => answer.expect(200)["state"].as_str().expect("a state").to_owned(),
        }
    }
}

pub(crate) async fn read(response: Response<Body>) -> Answer {
    let (head, body) = response.into_parts();
    let bytes = body.collect().await.expect("a body").to_bytes();
    let headers = head
        .headers
        .iter()
        // Each request has a moment and a name of its own.
        .filter(|(name, _)| *name != header::DATE && *name != "x-request-id")
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into()))
        .collect();
    Answer { status: head.status.as_u16(), headers, bytes }
}

/// A peer on TCP.
pub(crate) fn tcp() -> Peer {
    let address = |text: &str| text.parse().expect("an address");
    Peer::Tcp { from: address("127.0.0.1:50000"), to: address("127.0.0.1:8080") }
}

pub(crate) fn echo() -> Value {
    json!({ "program": "echo", "args": ["hi"] })
}
