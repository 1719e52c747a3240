//! `/v1/sandboxes`.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use tokio::sync::oneshot;
use utoipa::IntoParams;
use uuid::Uuid;
use warren::denial;
use warren::layers::Held;
use warren::template::Defaults;
use warren::{
    AcquireOptions, AttachRequest, Base, DiffOptions, ExecId, ExecOptions, Explain, Sandbox,
    SandboxError, SandboxId, SandboxSession, SandboxSpec,
};

use super::wire::{
    AcquiredView, AttachBody, CreateSandboxBody, ExecBody, ExecView, ListParams, Page,
    SandboxDetailView, SandboxView, SavepointView, SessionView, StateView,
};
use super::{execs, snapshots};
use crate::audit::noted;
use crate::error::{ApiError, ErrorBody};
use crate::extract::{Body, Id, Parameters};
use crate::idempotency::{self, Answer};
use crate::principal::Principal;
use crate::{Api, principal};

/// Gives the caller a sandbox and begins a session on it.
///
/// With an `Idempotency-Key`, the same key and body get the same answer, and one sandbox.
#[utoipa::path(
    post,
    path = "/v1/sandboxes",
    tag = "sandboxes",
    params(("Idempotency-Key" = Option<String>, Header, description = "Makes repeating safe.")),
    request_body = CreateSandboxBody,
    responses(
        (status = 201, body = AcquiredView),
        (status = 400, body = ErrorBody),
        (status = 409, description = "The name is taken, or the key was used.", body = ErrorBody),
        (status = 422, description = "Nothing can give what was asked.", body = ErrorBody),
        (status = 429, description = "A quota is used up.", body = ErrorBody),
        (status = 503, description = "As many sandboxes live as may.", body = ErrorBody),
    )
)]
pub(crate) async fn create(
    State(api): State<Api>,
    who: Principal,
    headers: HeaderMap,
    body: Body<CreateSandboxBody>,
) -> Result<Response, ApiError> {
    let (mut spec, select) = (checked(&who, &body.value)?, body.value.options()?);
    let isolation = body.value.isolation()?;
    let ground = ground(&api, &who, &body.value, &mut spec).await?;
    let options = AcquireOptions { select, base: ground.base.clone(), isolation };
    let key = idempotency::key(&headers)?;
    let verify = body.value.verify;
    let work = {
        let (api, who) = (api.clone(), who.clone());
        async move {
            let (session, sandbox) = api.acquire_with(&who, &spec, &options).await?;
            if verify && let Err(error) = api.manager().verify(sandbox.id()).await {
                api.undo(&session).await;
                return Err(error.into());
            }
            if let Err(error) = api.begin(&who, &*sandbox, &ground.defaults).await {
                api.undo(&session).await;
                return Err(error);
            }
            let view = acquired(&api, &session, &*sandbox, None);
            Answer::json(StatusCode::CREATED, &view).map(|answer| (session, answer))
        }
    };
    if let Some(key) = key {
        let (this, name) = (api.clone(), (Arc::clone(&who.tenant), key));
        let (key, digest) = (name.clone(), body.digest);
        let work = async move {
            let (session, answer) = work.await?;
            let kept = this.0.repeatable.keep(&key, digest, &answer).await;
            if kept.is_err() {
                this.undo(&session).await;
            }
            kept.map(|()| answer)
        };
        return api.0.repeatable.once(&api.0.tasks, name, digest, work).await;
    }
    let (sender, answer) = oneshot::channel();
    let this = api.clone();
    api.0.tasks.spawn(async move {
        let done = work.await;
        // Whoever hung up does not know the session, and could not ask for it again.
        if let Err(Ok((session, _))) = sender.send(done) {
            this.undo(&session).await;
        }
    });
    let answer = answer.await.map_err(|_| ApiError::internal("the work was given up"))?;
    answer.map(|(_, answer)| answer.into_response(false))
}

/// What a sandbox is made from.
#[derive(Default)]
pub(super) struct Ground {
    pub(super) base: Base,
    pub(super) defaults: Defaults,
    /// Keeps the layers until the sandbox does.
    pub(super) held: Held,
}

/// Finds the template that is asked for, and puts what it has below what the spec says.
pub(super) async fn ground(
    api: &Api,
    who: &Principal,
    body: &CreateSandboxBody,
    spec: &mut SandboxSpec,
) -> Result<Ground, ApiError> {
    let Some(name) = body.template.clone() else { return Ok(Ground::default()) };
    let (templates, tenant) = (api.templates()?.clone(), Arc::clone(&who.tenant));
    let found = tokio::task::spawn_blocking(move || templates.hold(&tenant, &name)).await;
    let (template, held) = found.map_err(|error| ApiError::internal(&error.to_string()))??;
    template.defaults.apply(spec);
    spec.validate()?;
    Ok(Ground { base: template.base, defaults: template.defaults, held })
}

/// Checks what only the operator may ask for, and returns the spec.
pub(super) fn checked(who: &Principal, body: &CreateSandboxBody) -> Result<SandboxSpec, ApiError> {
    let spec = body.spec()?;
    if who.operator {
        return Ok(spec);
    }
    who.may_ask_for(&spec)?;
    // Nor those of time, which sandboxes of E2B's do without.
    if body.limits.lifts_any() {
        return Err(ApiError::forbidden(
            "only the operator may take a limit away",
            "ask for a larger limit instead of `null`",
        ));
    }
    Ok(spec)
}

pub(super) fn acquired(
    api: &Api,
    session: &SandboxSession,
    sandbox: &dyn Sandbox,
    newly_created: Option<bool>,
) -> AcquiredView {
    let shown = SessionView::from(session);
    AcquiredView { sandbox: view(api, sandbox, vec![shown.clone()]), session: shown, newly_created }
}

fn view(api: &Api, sandbox: &dyn Sandbox, sessions: Vec<SessionView>) -> SandboxView {
    SandboxView::new(sandbox.capabilities(), api.0.catalog.labels(sandbox.id()), sessions)
}

/// Lists the caller's sandboxes, oldest first.
#[utoipa::path(
    get,
    path = "/v1/sandboxes",
    tag = "sandboxes",
    params(ListParams),
    responses((status = 200, body = Page<SandboxView>), (status = 400, body = ErrorBody))
)]
pub(crate) async fn list(
    State(api): State<Api>,
    who: Principal,
    parameters: Parameters,
) -> Result<Json<Page<SandboxView>>, ApiError> {
    let query = ListQuery::new(parameters)?;
    let mut by_sandbox: HashMap<SandboxId, Vec<SessionView>> = HashMap::new();
    for session in api.sessions(&who).await? {
        let shown = SessionView::from(&session);
        by_sandbox.entry(session.sandbox_id).or_default().push(shown);
    }
    let mut items = Vec::new();
    for (id, sessions) in by_sandbox {
        // One that ended since is not there.
        let Some(sandbox) = api.manager().get_sandbox(&id).await? else { continue };
        let shown = view(&api, &*sandbox, sessions);
        let has = |(key, value): &(String, String)| shown.labels.get(key) == Some(value);
        if query.admits(shown.state) && query.labels.iter().all(has) {
            items.push(((shown.created_at.timestamp_micros(), shown.id.clone()), shown));
        }
    }
    Ok(Json(query.page(items)))
}

/// What a list is asked for.
#[derive(Debug)]
pub(super) struct ListQuery {
    limit: usize,
    after: Option<Place>,
    states: Vec<StateView>,
    pub(super) labels: Vec<(String, String)>,
}

/// A place in a list: when something was made, in microseconds, and its id.
type Place = (i64, String);

impl ListQuery {
    pub(super) fn new(mut given: Parameters) -> Result<Self, ApiError> {
        let limit = match given.one("limit")?.map(|limit| limit.parse::<usize>()) {
            None => 100,
            Some(Ok(limit @ 1..=1_000)) => limit,
            Some(_) => {
                return Err(ApiError::invalid_query("`limit` is no number of items", "1 to 1000"));
            }
        };
        let place = |text: String| {
            let (at, id) = text.split_once('.')?;
            Some((i64::from_str_radix(at, 16).ok()?, id.to_owned()))
        };
        let after = match given.one("after")?.map(place) {
            None => None,
            Some(Some(place)) => Some(place),
            Some(None) => {
                let hint = "send the `next` of the page before";
                return Err(ApiError::invalid_query("`after` is no place in a list", hint));
            }
        };
        let state = |name: String| {
            StateView::ALL.into_iter().find(|state| state.name() == name).ok_or_else(|| {
                ApiError::invalid_query(
                    format!("there is no state `{}`", name.escape_debug()),
                    format!("the states are {}", StateView::ALL.map(StateView::name).join(", ")),
                )
            })
        };
        let label = |text: String| match text.split_once('=') {
            Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
            None => Err(ApiError::invalid_query("`label` is no label", "write label=KEY=VALUE")),
        };
        let states = given.all("state").into_iter().map(state).collect::<Result<_, _>>()?;
        let labels = given.all("label").into_iter().map(label).collect::<Result<_, _>>()?;
        given.end()?;
        Ok(Self { limit, after, states, labels })
    }

    pub(super) fn admits(&self, state: StateView) -> bool {
        self.states.is_empty() || self.states.contains(&state)
    }

    /// Cuts out the page that is asked for.
    pub(super) fn page<T>(&self, mut items: Vec<(Place, T)>) -> Page<T> {
        items.sort_by(|(a, _), (b, _)| a.cmp(b));
        items.retain(|(place, _)| self.after.as_ref().is_none_or(|after| place > after));
        let more = items.len() > self.limit;
        items.truncate(self.limit);
        let last = items.last().filter(|_| more);
        let next = last.map(|((at, id), _)| format!("{at:x}.{id}"));
        Page { items: items.into_iter().map(|(_, item)| item).collect(), next }
    }
}

/// Shows a sandbox with all that is known of it.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox.")),
    responses((status = 200, body = SandboxDetailView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn show(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
) -> Result<Json<SandboxDetailView>, ApiError> {
    let (sandbox, sessions) = api.sandbox(&who, &id).await?;
    let sessions = sessions.iter().map(SessionView::from).collect();
    Ok(Json(SandboxDetailView {
        sandbox: view(&api, &*sandbox, sessions),
        capabilities: sandbox.capabilities().clone(),
        enforcement: sandbox.enforcement(),
        usage: sandbox.resource_usage().await.ok().map(Into::into),
        receipt: api.manager().receipt(&id).await.ok().map(Into::into),
    }))
}

/// Ends every session on a sandbox, and so the sandbox.
#[utoipa::path(
    delete,
    path = "/v1/sandboxes/{id}",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox.")),
    responses((status = 204, description = "It is gone."), (status = 404, body = ErrorBody))
)]
pub(crate) async fn destroy(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
) -> Result<StatusCode, ApiError> {
    let (_, sessions) = api.sandbox(&who, &id).await?;
    let this = api.clone();
    api.finish(async move {
        for session in sessions {
            let ended = this.manager().terminate(&session).await;
            this.look_at(&session).await?;
            ended?;
        }
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}

/// How to run a command.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "describes the query, which is read by hand to name what is wrong")]
pub(crate) struct RunParams {
    /// Whether to make a savepoint first, and to tell what changed since: `true` or `false`.
    savepoint: Option<bool>,
}

/// Runs a command to its end. Hanging up ends the command.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/exec",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox."), RunParams),
    request_body = ExecBody,
    responses(
        (status = 200, description = "It ran, whatever its exit code.", body = ExecView),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, description = "The sandbox is suspended.", body = ErrorBody),
        (status = 422, description = "It could not be started.", body = ErrorBody),
        (status = 429, description = "A quota is used up.", body = ErrorBody),
    )
)]
pub(crate) async fn exec(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut given: Parameters,
    body: Body<ExecBody>,
) -> Result<Json<ExecView>, ApiError> {
    let savepoint = given.flag("savepoint")?;
    given.end()?;
    if !savepoint {
        return run(&api, &who, &id, body.value).await.map(Json);
    }
    let saved = snapshots::savepoint(&api, &who, &id).await?;
    let mut ran = run(&api, &who, &id, body.value).await?;
    let changes = snapshots::changes(&api, &who, &id, Some(saved.base), DiffOptions::default());
    ran.savepoint = Some(SavepointView { id: saved.id.0, changes: changes.await? });
    Ok(Json(ran))
}

pub(super) async fn run(
    api: &Api,
    who: &Principal,
    id: &SandboxId,
    body: ExecBody,
) -> Result<ExecView, ApiError> {
    let asked = body.explain;
    let command = body.command()?;
    let (sandbox, _) = api.sandbox(who, id).await?;
    let explain = execs::explain(api, who, &*sandbox, asked);
    if explain != Explain::Nothing {
        let name = ExecId::new();
        let _running = api.run_one(who, noted(id, Some(name.as_str()), &command)).await?;
        let options = ExecOptions { id: Some(name), explain, ..ExecOptions::default() };
        let exec = sandbox.start_exec(&command, &who.context(), &options).await?;
        return execs::outcome(api, exec).await;
    }
    run_in(api, who, &*sandbox, &command).await
}

/// Runs a command to its end in a sandbox that is the caller's.
pub(super) async fn run_in(
    api: &Api,
    who: &Principal,
    sandbox: &dyn Sandbox,
    command: &warren::Command,
) -> Result<ExecView, ApiError> {
    let _running = api.run_one(who, noted(sandbox.id(), None, command)).await?;
    let report = sandbox.exec_report(command, &who.context()).await?;
    let mut view = ExecView::from(report);
    if view.denials.is_empty() {
        view.denials.extend(denial::of_cause(&view.cause, &sandbox.enforcement().limits));
    }
    Ok(view)
}

/// Joins a sandbox, or makes one that has the id asked for: `sbx-` and a version 4 UUID.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/attach",
    tag = "sandboxes",
    params(("id" = String, Path, description = "The sandbox.")),
    request_body = AttachBody,
    responses(
        (status = 200, body = AcquiredView),
        (status = 400, body = ErrorBody),
        (status = 403, description = "The id is not random.", body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 429, description = "A quota is used up.", body = ErrorBody),
    )
)]
pub(crate) async fn attach(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    body: Body<AttachBody>,
) -> Result<Json<AcquiredView>, ApiError> {
    let this = api.clone();
    api.finish(async move { join(&this, &who, id, body.value).await.map(Json) }).await
}

/// Checks that the caller may choose this id. Ids are one for all tenants, so whoever could choose any
/// could find out which ones others have; nobody has a random one by chance.
fn choosable(who: &Principal, id: &SandboxId) -> Result<(), ApiError> {
    let uuid = id.as_str().strip_prefix("sbx-").filter(|uuid| {
        // One spelling each: the id is compared as it is written.
        Uuid::try_parse(uuid)
            .is_ok_and(|read| read.get_version_num() == 4 && read.to_string() == *uuid)
    });
    if who.operator || uuid.is_some() {
        return Ok(());
    }
    Err(ApiError::forbidden(
        "only the operator may choose an id that is not random",
        "write `sbx-` and a version 4 UUID, or choose a name: POST /v1/sandboxes with `name`",
    ))
}

pub(super) async fn join(
    api: &Api,
    who: &Principal,
    id: SandboxId,
    body: AttachBody,
) -> Result<AcquiredView, ApiError> {
    if body.create.as_ref().is_some_and(|create| create.template.is_some()) {
        return Err(SandboxError::invalid(
            "create.template",
            "a sandbox with an id of its own is made from no template",
            "create one without choosing its id",
        )
        .into());
    }
    let create = body.create.unwrap_or_default();
    let (spec, isolation) = (checked(who, &create)?, create.isolation()?);
    let known = api.sandbox(who, &id).await;
    let (client_id, made) = match (known, body.create_if_missing) {
        // It is joined as whoever has it, so that the manager knows the owner again.
        (Ok((_, sessions)), _) => {
            let owner = sessions.into_iter().map(|session| session.client_id).next();
            (owner.unwrap_or_else(|| who.client_id()), None)
        }
        (Err(_), true) => {
            choosable(who, &id)?;
            let name = api.0.catalog.promise(&who.tenant, &spec)?;
            if let (Some(_), Some(text)) = (&name.before, name.text()) {
                return Err(crate::catalog::taken(text));
            }
            (who.client_id(), Some((api.promise(who, &spec).await?, name)))
        }
        (Err(error), false) => return Err(error),
    };
    let request = AttachRequest {
        sandbox_id: id.clone(),
        client_id: client_id.clone(),
        create_if_missing: body.create_if_missing,
        create_spec: Some(spec.clone()),
    };
    let result =
        api.manager().attach_with(request, &isolation).await.map_err(|error| match error {
            // Whose it is, is nobody's business.
            warren::SandboxError::AlreadyExists { .. } => {
                ApiError::not_found("sandbox", id.as_str())
            }
            other => other.into(),
        })?;
    if let Some((promise, name)) = made {
        promise.keep(&id, &result.capabilities.limits);
        name.keep(principal::split(&client_id).0, &id, &spec.labels);
    }
    api.0.events.note(&result.session);
    let shown = SessionView::from(&result.session);
    let labels = api.0.catalog.labels(&id);
    Ok(AcquiredView {
        sandbox: SandboxView::new(&result.capabilities, labels, vec![shown.clone()]),
        session: shown,
        newly_created: Some(result.newly_created),
    })
}
