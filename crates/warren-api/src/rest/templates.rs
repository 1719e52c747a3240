//! `/v1/templates`: what sandboxes are made from, and how it is built.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::body::Body as RawBody;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;
use warren::image::Source;
use warren::template::{
    self, Build, BuildRequest, BuildStatus, Context, Defaults, LogEntry, LogLevel, Origin,
    Template, TemplateName, Templates, Upload,
};
use warren::{HostTools, Limit, Sandbox, SandboxError};

use super::wire::{LimitsBody, Page};
use crate::Api;
use crate::error::{ApiError, ErrorBody};
use crate::extract::{Body, Parameters};
use crate::keys::Quotas;
use crate::principal::Principal;

/// How long a sender of files may be silent.
const IDLE: Duration = Duration::from_secs(30);
/// How many builds wait for their files.
const MAX_PENDING: usize = 100;
/// How long one of them does: what it would use counts against its tenant meanwhile.
const FILES_TIME: Duration = Duration::from_secs(60 * 60);
/// How long a request waits for more to be said.
const WAIT: Duration = Duration::from_secs(30);
const MAX_ENTRIES: usize = 1_000;
/// How long what a template starts may take to be ready.
const READY: Duration = Duration::from_secs(60);

/// Builds that wait for the files that they copy.
pub(crate) type Pending = Mutex<HashMap<Uuid, BuildRequest>>;

/// Lowers limits that nobody asked for to all that the tenant may have: those of a build are large.
pub(crate) fn lower(request: &mut BuildRequest, quotas: &Quotas) {
    let BuildRequest { spec, accept_missing, .. } = request;
    let (memory, disk) = (&mut spec.limits.max_memory_bytes, &mut spec.limits.max_write_bytes);
    for (limit, value, most) in
        [(Limit::Memory, memory, quotas.memory_bytes), (Limit::Write, disk, quotas.disk_bytes)]
    {
        // None at all is no limit that a sandbox can have: that is for the quota to refuse.
        if let Some(most) = most.map(|most| most.max(1))
            && accept_missing.contains(&limit)
        {
            *value = Some(value.map_or(most, |value| value.min(most)));
        }
    }
}

/// What to build.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BuildBody {
    /// What the template will be called: `name` or `name:tag`.
    pub name: String,
    /// More tags that it will have.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// The steps, as in a Dockerfile: FROM, RUN, COPY, ENV, WORKDIR, USER, CMD, HEALTHCHECK CMD.
    pub recipe: String,
    /// Whether files follow, by a PUT to the build's `files`: those that COPY copies, or the image that
    /// `FROM upload` begins with.
    pub files: bool,
    /// The profile of the sandboxes that steps run in, and of those that are made from the template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// The limits of the sandboxes that steps run in.
    pub limits: LimitsBody,
    /// Whether steps have a network beyond their own loopback; sandboxes have what they ask for themselves.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub network_enabled: bool,
    /// Where steps may connect to: host, host:port, `*.domain` or CIDR.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allowed_network: Vec<String>,
    /// Whether every step is done, known from before or not.
    pub no_cache: bool,
}

/// How far a build has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BuildState {
    /// It waits for its files.
    Waiting,
    /// It is under way.
    Building,
    /// The template is there.
    Ready,
    /// There is no template.
    Failed,
}

/// A build.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct BuildView {
    /// Its id, which will be the template's.
    #[schema(value_type = String)]
    pub id: Uuid,
    /// What the template will be called.
    pub name: String,
    /// The tags that it will have.
    pub tags: Vec<String>,
    /// How far it has come.
    pub state: BuildState,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<BuildFailureView>,
    /// When it was asked for.
    pub created_at: DateTime<Utc>,
    /// What it said, from the entry that was asked for.
    pub log: Vec<BuildEntryView>,
    /// The offset of what it says next.
    pub next: usize,
}

/// Why a build failed.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct BuildFailureView {
    /// Where: `base`, the number of a step, or `finalize`.
    pub step: String,
    /// Why.
    pub message: String,
}

/// Something that a build said.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct BuildEntryView {
    /// When.
    pub timestamp: DateTime<Utc>,
    /// `debug`, `info`, `warn` or `error`.
    pub level: String,
    /// What.
    pub message: String,
    /// Where: `base`, the number of a step, or `finalize`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

impl From<LogEntry> for BuildEntryView {
    fn from(entry: LogEntry) -> Self {
        let level = match entry.level {
            LogLevel::Debug => "debug",
            LogLevel::Info => "info",
            LogLevel::Warn => "warn",
            LogLevel::Error => "error",
        };
        let LogEntry { timestamp, message, step, .. } = entry;
        Self { timestamp, level: level.to_owned(), message, step }
    }
}

impl BuildView {
    fn new(build: &Build, offset: usize, limit: usize) -> Self {
        // Asked first: once it is done, nothing more is said.
        let status = build.status();
        let log: Vec<_> = build.log(offset, limit).into_iter().map(BuildEntryView::from).collect();
        let (state, failure) = match status {
            BuildStatus::Waiting => (BuildState::Waiting, None),
            BuildStatus::Building => (BuildState::Building, None),
            BuildStatus::Ready => (BuildState::Ready, None),
            BuildStatus::Failed(failure) => {
                let view = BuildFailureView { step: failure.step, message: failure.message };
                (BuildState::Failed, Some(view))
            }
        };
        Self {
            id: build.id(),
            name: build.name().to_owned(),
            tags: build.tags().to_vec(),
            state,
            failure,
            created_at: build.created_at(),
            next: offset + log.len(),
            log,
        }
    }
}

/// What sandboxes can be made from.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TemplateView {
    /// Its id.
    #[schema(value_type = String)]
    pub id: Uuid,
    /// Its name.
    pub name: String,
    /// Its tags.
    pub tags: Vec<String>,
    /// What it was built from.
    pub origin: String,
    /// When it was built.
    pub created_at: DateTime<Utc>,
    /// Bytes in the files of its layers.
    pub bytes: u64,
    /// How many layers it stands on.
    pub layers: usize,
    /// Whether the host's toolchain is seen.
    pub host_tools: bool,
    /// The environment of commands, below what a sandbox says.
    pub environment: BTreeMap<String, String>,
    /// Where commands start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// Who is meant to run them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The profile of sandboxes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// What is started in each.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<String>,
    /// What succeeds once that is ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<String>,
}

impl From<Template> for TemplateView {
    fn from(template: Template) -> Self {
        let Defaults { environment, user, workdir, profile, start, ready } = template.defaults;
        Self {
            id: template.id,
            name: template.name,
            tags: template.tags.into_keys().collect(),
            origin: template.origin,
            created_at: template.created_at,
            bytes: template.bytes,
            layers: template.base.all().len(),
            host_tools: template.base.host_tools == HostTools::Shown,
            environment: environment.into_iter().collect(),
            workdir: workdir.map(|path| path.display().to_string()),
            user,
            profile,
            start,
            ready,
        }
    }
}

pub(super) fn patient() -> OpenApiRouter<Api> {
    OpenApiRouter::new().routes(routes!(send)).routes(routes!(show_build, cancel))
}

pub(super) fn prompt() -> OpenApiRouter<Api> {
    OpenApiRouter::new()
        .routes(routes!(build))
        .routes(routes!(list))
        .routes(routes!(show, remove))
        .routes(routes!(tag, untag))
}

impl Api {
    /// Returns the templates, if this daemon has a place for them.
    pub(crate) fn templates(&self) -> Result<&Templates, ApiError> {
        self.options().templates.as_ref().ok_or_else(|| {
            let error = SandboxError::Unsupported {
                feature: "templates".to_owned(),
                backend: "this daemon's".to_owned(),
                hint: "serve with the linux backend".to_owned(),
            };
            error.into()
        })
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<Uuid, BuildRequest>> {
        self.0.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a build wait for its files, for a time, or says that too many do.
    fn expect_files(
        &self,
        templates: &Templates,
        build: &Arc<Build>,
        request: BuildRequest,
    ) -> bool {
        {
            let mut pending = self.pending();
            if pending.len() >= MAX_PENDING {
                return false;
            }
            pending.insert(build.id(), request);
        }
        let (api, templates, build) = (self.clone(), templates.clone(), Arc::clone(build));
        self.0.tasks.spawn(async move {
            let over = tokio::time::timeout(FILES_TIME, build.wait());
            if api.0.stop.run_until_cancelled(over).await.is_some() {
                api.pending().remove(&build.id());
                templates.give_up(&build);
            }
        });
        true
    }

    /// Starts what a template starts in a sandbox that was just made from it.
    pub(crate) async fn begin(
        &self,
        who: &Principal,
        sandbox: &dyn Sandbox,
        defaults: &Defaults,
    ) -> Result<(), ApiError> {
        let behalf = self.behalf(who);
        let begun = template::begin(sandbox, defaults, READY, &behalf).await;
        begun.map_err(|error| match self.audit() {
            Some(audit) if !audit.is_ready() => ApiError::unwritable(),
            Some(_) | None => error.into(),
        })
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SandboxError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ApiError::internal(&error.to_string()))?.map_err(ApiError::from)
}

/// Builds a template.
#[utoipa::path(
    post,
    path = "/v1/templates/builds",
    tag = "templates",
    request_body = BuildBody,
    responses(
        (status = 202, description = "It is under way, or waits for its files.", body = BuildView),
        (status = 400, body = ErrorBody),
        (status = 403, description = "Only the operator may name files of the host.", body = ErrorBody),
        (status = 429, description = "Too many are under way.", body = ErrorBody),
    )
)]
pub(crate) async fn build(
    State(api): State<Api>,
    who: Principal,
    body: Body<BuildBody>,
) -> Result<(StatusCode, Json<BuildView>), ApiError> {
    let templates = api.templates()?;
    let body = body.value;
    let name: TemplateName = body.name.parse()?;
    let recipe = template::parse(&body.recipe)?;
    if matches!(&recipe.origin, Origin::Image(Source::Files { .. })) && !who.operator {
        return Err(ApiError::forbidden(
            "only the operator may name files of the host",
            "send the image along: FROM upload",
        ));
    }
    if body.limits.lifts_any() && !who.operator {
        return Err(ApiError::forbidden(
            "only the operator may take a limit away",
            "ask for a larger limit instead of `null`",
        ));
    }
    let mut request = BuildRequest {
        origin: recipe.origin,
        steps: recipe.steps,
        start: recipe.start,
        ready: recipe.ready,
        force: body.no_cache,
        ..BuildRequest::default()
    };
    let usual = request.spec.limits.clone();
    body.limits.lay_over(&mut request.spec.limits);
    // What was asked for by name is held, or nothing is built.
    request.accept_missing.retain(|limit| request.spec.limits.get(*limit) == usual.get(*limit));
    if let Some(profile) = body.profile {
        request.spec.profile = profile;
    }
    request.spec.network_enabled = body.network_enabled;
    request.spec.allowed_network = body.allowed_network;
    request.spec.validate()?;
    api.admit_build(&who, &mut request).await?;
    let build = templates.prepare(&who.tenant, &name, &body.tags)?;
    if body.files {
        if !api.expect_files(templates, &build, request) {
            templates.give_up(&build);
            return Err(ApiError::quota("builds that wait for files", MAX_PENDING as u64));
        }
    } else if let Err(error) = templates.start(&build, request) {
        templates.give_up(&build);
        return Err(error.into());
    }
    Ok((StatusCode::ACCEPTED, Json(BuildView::new(&build, 0, 0))))
}

fn id(text: &str) -> Result<Uuid, ApiError> {
    text.parse().map_err(|_| ApiError::not_found("build", text))
}

/// Sends the files of a build, as a tar archive, compressed or not, and starts it.
#[utoipa::path(
    put,
    path = "/v1/templates/builds/{id}/files",
    tag = "templates",
    params(("id" = String, Path, description = "The build.")),
    request_body(content = String, content_type = "application/x-tar"),
    responses(
        (status = 202, description = "It is under way.", body = BuildView),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, description = "It waits for no files.", body = ErrorBody),
    )
)]
pub(crate) async fn send(
    State(api): State<Api>,
    who: Principal,
    Path(name): Path<String>,
    body: RawBody,
) -> Result<(StatusCode, Json<BuildView>), ApiError> {
    let templates = api.templates()?.clone();
    let build = templates.build(&who.tenant, id(&name)?)?;
    let mut upload = Upload::begin(templates.layers())?;
    let mut pieces = body.into_data_stream();
    loop {
        let next = tokio::time::timeout(IDLE, pieces.next()).await;
        let Some(piece) = next.map_err(|_| ApiError::request_timeout())? else { break };
        let piece = piece.map_err(|error| ApiError::internal(&error.to_string()))?;
        upload = blocking(move || upload.write(&piece).map(|()| upload)).await?;
    }
    let request = api.pending().remove(&build.id());
    let mut request = request.ok_or_else(|| SandboxError::Conflict {
        action: "send files".to_owned(),
        reason: "the build waits for none".to_owned(),
    })?;
    let begun = async {
        let upload = Arc::new(upload);
        if request.origin == Origin::Upload {
            request.upload = Some(upload);
        } else {
            let layers = templates.layers().clone();
            let context = blocking(move || Context::of(&layers, &upload)).await?;
            request.context = Some(Arc::new(context));
        }
        Ok::<_, ApiError>(templates.start(&build, request)?)
    };
    if let Err(error) = begun.await {
        // Nobody waits for other files.
        templates.give_up(&build);
        return Err(error);
    }
    Ok((StatusCode::ACCEPTED, Json(BuildView::new(&build, 0, 0))))
}

/// Shows a build and what it said.
#[utoipa::path(
    get,
    path = "/v1/templates/builds/{id}",
    tag = "templates",
    params(
        ("id" = String, Path, description = "The build."),
        ("offset" = Option<usize>, Query, description = "The first entry of its log."),
        ("wait" = Option<bool>, Query, description = "Whether to wait for a while until there is more."),
    ),
    responses((status = 200, body = BuildView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn show_build(
    State(api): State<Api>,
    who: Principal,
    Path(name): Path<String>,
    mut query: Parameters,
) -> Result<Json<BuildView>, ApiError> {
    let build = api.templates()?.build(&who.tenant, id(&name)?)?;
    let offset = match query.one("offset")?.map(|text| text.parse::<usize>()) {
        None => 0,
        Some(Ok(offset)) => offset,
        Some(Err(_)) => {
            return Err(ApiError::invalid_query("`offset` is no number", "count from 0"));
        }
    };
    let wait = match query.one("wait")?.as_deref() {
        None | Some("false") => false,
        Some("true") => true,
        Some(_) => return Err(ApiError::invalid_query("`wait` is neither", "true or false")),
    };
    query.end()?;
    if wait {
        // Whether there is more or not, the answer tells.
        let _ = tokio::time::timeout(WAIT, build.more(offset)).await;
    }
    Ok(Json(BuildView::new(&build, offset, MAX_ENTRIES)))
}

/// Ends a build. What it did so far is thrown away.
#[utoipa::path(
    delete,
    path = "/v1/templates/builds/{id}",
    tag = "templates",
    params(("id" = String, Path, description = "The build.")),
    responses((status = 204, description = "It is over."), (status = 404, body = ErrorBody))
)]
pub(crate) async fn cancel(
    State(api): State<Api>,
    who: Principal,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    let templates = api.templates()?;
    let build = templates.build(&who.tenant, id(&name)?)?;
    build.cancel();
    api.pending().remove(&build.id());
    if !templates.give_up(&build) {
        build.wait().await;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Lists the caller's templates.
#[utoipa::path(
    get,
    path = "/v1/templates",
    tag = "templates",
    responses((status = 200, body = Page<TemplateView>))
)]
pub(crate) async fn list(
    State(api): State<Api>,
    who: Principal,
    query: Parameters,
) -> Result<Json<Page<TemplateView>>, ApiError> {
    query.end()?;
    let templates = api.templates()?.clone();
    let items = blocking(move || templates.list(&who.tenant)).await?;
    Ok(Json(Page { items: items.into_iter().map(TemplateView::from).collect(), next: None }))
}

/// Shows a template.
#[utoipa::path(
    get,
    path = "/v1/templates/{name}",
    tag = "templates",
    params(("name" = String, Path, description = "Its name, with a tag or without, or its id.")),
    responses((status = 200, body = TemplateView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn show(
    State(api): State<Api>,
    who: Principal,
    Path(name): Path<String>,
) -> Result<Json<TemplateView>, ApiError> {
    let templates = api.templates()?.clone();
    Ok(Json(blocking(move || templates.find(&who.tenant, &name)).await?.into()))
}

/// Forgets a template; by a name without a tag, all that have it. Sandboxes made from it live on.
#[utoipa::path(
    delete,
    path = "/v1/templates/{name}",
    tag = "templates",
    params(("name" = String, Path, description = "Its name, with a tag or without, or its id.")),
    responses((status = 204, description = "It is gone."), (status = 404, body = ErrorBody))
)]
pub(crate) async fn remove(
    State(api): State<Api>,
    who: Principal,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    let templates = api.templates()?.clone();
    blocking(move || templates.remove(&who.tenant, &name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Gives a template one more tag, and takes it from whichever had it.
#[utoipa::path(
    put,
    path = "/v1/templates/{name}/tags/{tag}",
    tag = "templates",
    params(
        ("name" = String, Path, description = "Its name, with a tag or without, or its id."),
        ("tag" = String, Path, description = "The tag."),
    ),
    responses(
        (status = 200, body = TemplateView),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
    )
)]
pub(crate) async fn tag(
    State(api): State<Api>,
    who: Principal,
    Path((name, tag)): Path<(String, String)>,
) -> Result<Json<TemplateView>, ApiError> {
    let templates = api.templates()?.clone();
    Ok(Json(blocking(move || templates.tag(&who.tenant, &name, &[tag])).await?.into()))
}

/// Takes a tag from a template.
#[utoipa::path(
    delete,
    path = "/v1/templates/{name}/tags/{tag}",
    tag = "templates",
    params(
        ("name" = String, Path, description = "Its name, without a tag."),
        ("tag" = String, Path, description = "The tag."),
    ),
    responses((status = 204, description = "It has it no more."), (status = 404, body = ErrorBody))
)]
pub(crate) async fn untag(
    State(api): State<Api>,
    who: Principal,
    Path((name, tag)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    let templates = api.templates()?.clone();
    blocking(move || {
        let whole: TemplateName = format!("{name}:{tag}").parse()?;
        templates.untag(&who.tenant, &whole)
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}
