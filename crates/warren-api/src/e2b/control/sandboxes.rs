//! Sandboxes, one at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use chrono::Utc;
use warren::template::Template;
use warren::{
    ForkOptions, Reach, ResourceLimits, Sandbox, SandboxSelectionOptions, SandboxSession,
    SandboxSpec, Snapshot,
};

use super::super::record::{OnTimeout, PauseMode, Record, State as Life};
use super::life::{Time, lease};
use super::wire::{DetailView, Lease, Network, NewSandbox, SandboxView};
use super::{Control, Live, bad_request, guard, token};
use crate::error::ApiError;
use crate::extract::Body;
use crate::idempotency::{self, Answer};
use crate::principal::Principal;

/// The template that is there from the start.
pub(super) const BASE: &str = "base";
/// What a sandbox is given where its template does not say.
const CPUS: u32 = 2;
const MEMORY_MB: u64 = 2048;
const DISK_MB: u64 = 1024;

/// Which generation of the API asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Generation {
    First,
    Second,
}

impl Generation {
    /// How long a sandbox is wanted where nobody says.
    pub(super) fn timeout_s(self) -> u64 {
        match self {
            Self::First => 15,
            Self::Second => 300,
        }
    }
}

/// `POST /sandboxes`.
pub(super) async fn create_v1(
    State(control): State<Control>,
    who: Principal,
    headers: HeaderMap,
    body: Body<NewSandbox>,
) -> Result<Response, ApiError> {
    create(control, who, &headers, body, Generation::First).await
}

/// `POST /v2/sandboxes`.
pub(super) async fn create_v2(
    State(control): State<Control>,
    who: Principal,
    headers: HeaderMap,
    body: Body<NewSandbox>,
) -> Result<Response, ApiError> {
    create(control, who, &headers, body, Generation::Second).await
}

async fn create(
    control: Control,
    who: Principal,
    headers: &HeaderMap,
    body: Body<NewSandbox>,
    generation: Generation,
) -> Result<Response, ApiError> {
    let key = idempotency::key(headers)?;
    if let Some(key) = &key
        && !key
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
    {
        return Err(bad_request("invalid Idempotency-Key: lower-case letters, digits and `-`"));
    }
    let wanted = wanted(&body.value, generation)?;
    let api = control.api().clone();
    let work = {
        let (control, who) = (control.clone(), who.clone());
        Box::pin(async move {
            let record = control.make(&who, wanted, &body.value.template_id).await?;
            let view = SandboxView::of(&record, control.domain());
            Ok((record, Answer::json(StatusCode::CREATED, &view)?))
        })
    };
    let Some(key) = key else {
        // To its end, even if the client hangs up: an SDK that tries again does not know this one, and
        // its time will be up.
        let (_, answer) = api.finish(work).await?;
        return Ok(answer.into_response(false));
    };
    let (name, digest) = ((Arc::clone(&who.tenant), format!("e2b/{key}")), body.digest);
    let (this, kept_as) = (api.clone(), name.clone());
    let work = async move {
        let (record, answer) = work.await?;
        let kept = this.0.repeatable.keep(&kept_as, digest, &answer).await;
        if kept.is_err()
            && let Some(live) = control.get(&record.id())
        {
            let _turn = live.turn.lock().await;
            control.end(&live).await?;
        }
        kept.map(|()| answer)
    };
    api.0.repeatable.once(&api.0.tasks, name, digest, work).await
}

/// What is wanted of a sandbox beside where it comes from.
#[derive(Debug)]
struct Wanted {
    timeout_s: u64,
    access_token: Option<String>,
    traffic_token: Option<String>,
    on_timeout: OnTimeout,
    auto_resume: bool,
    reach: Reach,
    body: NewSandbox,
}

/// Checks what is asked for.
fn wanted(body: &NewSandbox, generation: Generation) -> Result<Wanted, ApiError> {
    if body.template_id.is_empty() {
        return Err(bad_request("templateID is missing"));
    }
    let timeout_s = body.timeout.unwrap_or_else(|| generation.timeout_s());
    let secure = generation == Generation::Second || body.secure.unwrap_or(false);
    let public = body.network.as_ref().and_then(|network| network.allow_public_traffic);
    let rules = body.network.clone().unwrap_or_default();
    let reach = rules.reach(body.allow_internet_access).map_err(bad_request)?;
    let is_closed = public == Some(false);
    if is_closed && !secure {
        return Err(bad_request(
            "You cannot restrict public traffic without secured access: set `secure` to true",
        ));
    }
    let pause = body.auto_pause.unwrap_or(false);
    let keeps_memory = body.auto_pause_memory.unwrap_or(true);
    let auto_resume = body.auto_resume.is_some_and(|auto| auto.enabled);
    if !keeps_memory && !pause {
        return Err(bad_request("autoPauseMemory can only be set to false when autoPause is on"));
    }
    if !keeps_memory && auto_resume {
        return Err(bad_request(
            "a filesystem-only auto-pause cannot be combined with auto-resume",
        ));
    }
    if body.volume_mounts.as_ref().is_some_and(|mounts| !mounts.is_empty()) {
        return Err(bad_request("volumes are not supported by this server"));
    }
    let tokens = body.iam.as_ref().and_then(|iam| iam.get("tokens"));
    if tokens.and_then(|tokens| tokens.as_object()).is_some_and(|tokens| !tokens.is_empty()) {
        return Err(bad_request("identity tokens are not supported by this server"));
    }
    Ok(Wanted {
        timeout_s,
        access_token: secure.then(token).transpose()?,
        traffic_token: is_closed.then(token).transpose()?,
        on_timeout: match (pause, keeps_memory) {
            (false, _) => OnTimeout::Kill,
            (true, true) => OnTimeout::Pause(PauseMode::Full),
            (true, false) => OnTimeout::Pause(PauseMode::Filesystem),
        },
        auto_resume,
        reach,
        body: body.clone(),
    })
}

/// Reads what is asked for of a sandbox.
#[cfg(feature = "fuzz")]
pub(super) fn fuzz(bytes: &[u8]) {
    if let Ok(body) = serde_json::from_slice::<NewSandbox>(bytes) {
        for generation in [Generation::First, Generation::Second] {
            if let Ok(wanted) = wanted(&body, generation) {
                // Ports that are not for everybody are those of a sandbox that is not either.
                assert!(wanted.traffic_token.is_none() || wanted.access_token.is_some());
                assert!(body.allow_internet_access != Some(false) || !wanted.reach.deny.is_empty());
            }
        }
    }
    if let Ok(rules) = serde_json::from_slice::<Network>(bytes) {
        let _ = rules.reach(None);
    }
    let _ = serde_json::from_slice::<Lease>(bytes);
}

/// A sandbox that was just made, and the session that has it.
type Made = (SandboxSession, Arc<dyn Sandbox>);

/// Where a sandbox comes from.
#[derive(Debug, Clone)]
pub(super) struct Origin {
    id: String,
    alias: Option<String>,
    ground: Ground,
}

/// What a sandbox stands on.
#[derive(Debug, Clone)]
enum Ground {
    Host,
    /// It is to be as another one was.
    Snapshot(Box<Snapshot>),
    Template(Box<Template>),
}

impl Control {
    /// Finds what a caller may make sandboxes from.
    pub(super) async fn origin(&self, who: &Principal, name: &str) -> Result<Origin, ApiError> {
        if name.strip_suffix(":default").unwrap_or(name) == BASE {
            let (id, alias) = (BASE.to_owned(), Some(BASE.to_owned()));
            return Ok(Origin { id, alias, ground: Ground::Host });
        }
        if let Some(snapshot) = self.find_snapshot(who, name).await? {
            let ground = Ground::Snapshot(Box::new(snapshot));
            return Ok(Origin { id: name.to_owned(), alias: None, ground });
        }
        let template = self.find_template(who, name)?;
        let alias = Some(template.name.clone());
        Ok(Origin {
            id: template.name.clone(),
            alias,
            ground: Ground::Template(Box::new(template)),
        })
    }

    /// Makes a sandbox and writes down what is said of it.
    async fn make(&self, who: &Principal, wanted: Wanted, name: &str) -> Result<Record, ApiError> {
        let origin = self.origin(who, name).await?;
        let mut spec = spec(self.reaches());
        let fresh = SandboxSelectionOptions {
            require_fresh: true,
            use_pool: true,
            ..SandboxSelectionOptions::default()
        };
        let (mut user, mut workdir, mut env) = (None, None, BTreeMap::new());
        let (session, sandbox) = match &origin.ground {
            Ground::Host => {
                let made = self.api().acquire(who, &spec, &fresh).await?;
                self.lead(made, &wanted.reach).await?
            }
            Ground::Snapshot(snapshot) => {
                let made = self.fork_one(who, snapshot).await?;
                self.lead(made, &wanted.reach).await?
            }
            Ground::Template(template) => {
                let defaults = &template.defaults;
                defaults.apply(&mut spec);
                let made = self.api().acquire_on(who, &spec, &template.base, &fresh).await?;
                // Before what the template has begin in it.
                let made = self.lead(made, &wanted.reach).await?;
                if let Err(error) = self.api().begin(who, &*made.1, defaults).await {
                    self.api().undo(&made.0).await;
                    return Err(error);
                }
                user.clone_from(&defaults.user);
                workdir = defaults.workdir.as_ref().map(|path| path.display().to_string());
                env.extend(defaults.environment.iter().cloned());
                made
            }
        };
        let Wanted {
            timeout_s, access_token, traffic_token, on_timeout, auto_resume, body, ..
        } = wanted;
        let now = Utc::now();
        env.extend(body.env_vars.unwrap_or_default());
        let record = Record {
            sandbox: sandbox.id().clone(),
            session: session.session_id.clone(),
            tenant: who.tenant.to_string(),
            quotas: who.quotas,
            template: origin.id,
            alias: origin.alias,
            metadata: body.metadata.unwrap_or_default(),
            env,
            user,
            workdir,
            access_token,
            traffic_token,
            started_at: now,
            end_at: now,
            end_moment: None,
            timeout_s,
            on_timeout,
            auto_resume,
            state: Life::Running,
            // What cannot be is not said to be.
            allow_internet: match sandbox.capabilities().has_network {
                true => body.allow_internet_access,
                false => Some(false),
            },
            network: body.network,
            cpus: CPUS,
            memory_mb: MEMORY_MB,
            disk_mb: DISK_MB,
        };
        self.add(record, timeout_s, &session).await
    }

    /// Has a new sandbox reach what it is to reach, before anything runs in it.
    async fn lead(&self, made: Made, reach: &Reach) -> Result<Made, ApiError> {
        if *reach != Reach::default()
            && let Err(error) = made.1.set_reach(reach).await
        {
            self.api().undo(&made.0).await;
            return Err(error.into());
        }
        Ok(made)
    }

    /// Makes one sandbox that is as a snapshot says.
    async fn fork_one(&self, who: &Principal, snapshot: &Snapshot) -> Result<Made, ApiError> {
        who.may_ask_for(&snapshot.spec)?;
        let promise = self.api().promise(who, &snapshot.spec).await?;
        let options = ForkOptions { count: 1, ..ForkOptions::default() };
        let made = self.api().manager().fork_snapshot(snapshot, &options, &who.client_id()).await?;
        let one = made.into_iter().next();
        let (session, sandbox) = one.ok_or_else(|| ApiError::internal("a fork made nothing"))?;
        promise.keep(sandbox.id(), &sandbox.capabilities().limits);
        self.api().0.events.note(&session);
        Ok((session, sandbox))
    }

    /// Writes down what is said of a new sandbox, and looks after it from now on.
    pub(super) async fn add(
        &self,
        mut record: Record,
        timeout_s: u64,
        session: &SandboxSession,
    ) -> Result<Record, ApiError> {
        let written = match lease(&mut record, timeout_s) {
            Ok(()) => self.write(&record).await,
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            self.api().undo(session).await;
            return Err(error);
        }
        let live = Arc::new(Live::new(record.clone()));
        guard(&self.0.sandboxes).insert(live.id.clone(), live);
        self.0.changed.notify_one();
        Ok(record)
    }

    /// Does something with a sandbox of the caller's, to its end, and nobody else meanwhile.
    pub(super) async fn with<T: Send + 'static, F>(
        &self,
        who: &Principal,
        id: &str,
        work: impl FnOnce(Self, Arc<Live>) -> F + Send + 'static,
    ) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>> + Send,
    {
        let live = self.own(who, id)?;
        let (this, who, id) = (self.clone(), who.clone(), id.to_owned());
        let done = async move {
            let _turn = live.turn.lock().await;
            // It may have ended while we waited for our turn.
            let known = this.own(&who, &id)?;
            work(this.clone(), known).await
        };
        self.api().finish(done).await
    }
}

/// What a sandbox of E2B's is, where the server's can reach anything and where they cannot.
pub fn spec(reaches: bool) -> SandboxSpec {
    SandboxSpec {
        profile: "dev".to_owned(),
        network_enabled: reaches,
        workdir: "/home/user".into(),
        limits: ResourceLimits {
            // What it writes is in memory, too.
            max_memory_bytes: Some(MEMORY_MB << 20),
            max_write_bytes: Some(DISK_MB << 20),
            max_processes: Some(1024),
            max_open_files: Some(4_096),
            max_output_bytes: Some(64 << 20),
            // Commands have deadlines of their own, and the sandbox has its time.
            max_cpu_time_ms: None,
            max_wall_time_ms: None,
            ..ResourceLimits::default()
        },
        creation_timeout: Duration::from_secs(30),
        ..SandboxSpec::default()
    }
}

/// `GET /sandboxes/{id}`.
pub(super) async fn show(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
) -> Result<Json<DetailView>, ApiError> {
    let live = control.own(&who, &id)?;
    Ok(Json(DetailView::of(&live.record(), control.domain())))
}

/// `DELETE /sandboxes/{id}`.
pub(super) async fn kill(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    control.with(&who, &id, async move |control, live| control.end(&live).await).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /sandboxes/{id}/timeout`.
pub(super) async fn set_timeout(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
    body: Body<Lease>,
) -> Result<StatusCode, ApiError> {
    let timeout_s = body.value.timeout.ok_or_else(|| bad_request("timeout is missing"))?;
    let work = async move |control: Control, live: Arc<Live>| {
        control.give_time(&live, timeout_s, Time::Exact).await
    };
    control.with(&who, &id, work).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /sandboxes/{id}/refreshes`.
pub(super) async fn refresh(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
    body: Body<Lease>,
) -> Result<StatusCode, ApiError> {
    let duration = body.value.duration.unwrap_or_else(|| Generation::First.timeout_s());
    let work = async move |control: Control, live: Arc<Live>| {
        control.give_time(&live, duration, Time::Longer).await
    };
    control.with(&who, &id, work).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /sandboxes/{id}/connect`.
pub(super) async fn connect_v1(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
    body: Body<Lease>,
) -> Result<Response, ApiError> {
    connect(&control, &who, &id, &body.value, Generation::First).await
}

/// `POST /v2/sandboxes/{id}/connect`.
pub(super) async fn connect_v2(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
    body: Body<Lease>,
) -> Result<Response, ApiError> {
    connect(&control, &who, &id, &body.value, Generation::Second).await
}

async fn connect(
    control: &Control,
    who: &Principal,
    id: &str,
    body: &Lease,
    generation: Generation,
) -> Result<Response, ApiError> {
    let timeout_s = body.timeout.unwrap_or_else(|| generation.timeout_s());
    let work = async move |control: Control, live: Arc<Live>| {
        let status = match live.state() {
            Life::Running => {
                control.give_time(&live, timeout_s, Time::Longer).await?;
                StatusCode::OK
            }
            Life::Paused(_) => {
                control.go_on(&live, timeout_s).await?;
                StatusCode::CREATED
            }
        };
        let view = SandboxView::of(&live.record(), control.domain());
        Ok((status, Json(view)).into_response())
    };
    control.with(who, id, work).await
}

/// `POST /sandboxes/{id}/resume`.
pub(super) async fn resume(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
    body: Body<Lease>,
) -> Result<Response, ApiError> {
    let body = body.value;
    let work = async move |control: Control, live: Arc<Live>| {
        if live.state() == Life::Running {
            let message = format!("sandbox \"{}\" is already running", live.id);
            return Err(ApiError::new(StatusCode::CONFLICT, "conflict", message));
        }
        if body.auto_pause == Some(true) {
            guard(&live.record).on_timeout = OnTimeout::Pause(PauseMode::Full);
        }
        let timeout_s = body.timeout.unwrap_or_else(|| Generation::First.timeout_s());
        control.go_on(&live, timeout_s).await?;
        let view = SandboxView::of(&live.record(), control.domain());
        Ok((StatusCode::CREATED, Json(view)).into_response())
    };
    control.with(&who, &id, work).await
}

/// `POST /sandboxes/{id}/pause`.
pub(super) async fn pause(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
    body: Body<Lease>,
) -> Result<StatusCode, ApiError> {
    let keeps_memory = body.value.memory.unwrap_or(true);
    let mode = if keeps_memory { PauseMode::Full } else { PauseMode::Filesystem };
    let work = async move |control: Control, live: Arc<Live>| {
        if live.state() != Life::Running {
            let message = format!("sandbox \"{}\" is already paused", live.id);
            return Err(ApiError::new(StatusCode::CONFLICT, "conflict", message));
        }
        control.stop_running(&live, mode).await
    };
    control.with(&who, &id, work).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `PUT /sandboxes/{id}/network`: the rules for what goes out, all of them anew.
pub(super) async fn set_network(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
    body: Body<Network>,
) -> Result<StatusCode, ApiError> {
    let rules = body.value;
    let reach = rules.reach(None).map_err(bad_request)?;
    let work = async move |control: Control, live: Arc<Live>| {
        let mut record = live.record();
        if record.state != Life::Running {
            let message = format!("sandbox \"{}\" is paused", live.id);
            return Err(ApiError::new(StatusCode::CONFLICT, "conflict", message));
        }
        let before = record.network.take().unwrap_or_default();
        let sandbox = control.api().manager().get_sandbox(&record.sandbox).await?;
        let sandbox = sandbox.ok_or_else(|| super::not_found(&live.id))?;
        sandbox.set_reach(&reach).await?;
        if sandbox.capabilities().has_network {
            record.allow_internet = rules.allow_internet_access;
        }
        record.network = Some(Network {
            allow_public_traffic: before.allow_public_traffic,
            mask_request_host: before.mask_request_host,
            https_ports: before.https_ports,
            ..rules
        });
        control.write(&record).await?;
        *guard(&live.record) = record;
        Ok(())
    };
    control.with(&who, &id, work).await?;
    Ok(StatusCode::NO_CONTENT)
}
