//! `/v1/snapshots`, and what is made of sandboxes: snapshots, forks, differences.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts as _, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::oneshot;
use utoipa::{IntoParams, IntoResponses, ToSchema};
use warren::template::USER_LABEL;
use warren::{
    Base, DiffEntry, DiffKind, DiffOptions, DiffSide, ForkOptions, Importer, ResourceLimits,
    SandboxId, SandboxSession, Snapshot, SnapshotKind, SnapshotOptions,
};

use super::sandboxes::{ListQuery, acquired};
use super::wire::{AcquiredView, ListParams, NAME_LABEL, Page};
use crate::Api;
use crate::error::{ApiError, ErrorBody};
use crate::events::EventKind;
use crate::extract::{Body, Id, Parameters};
use crate::idempotency::{self, Answer};
use crate::principal::{Principal, split};

/// How many differences are listed at most.
const MAX_DIFF: usize = 100_000;

/// What a snapshot shall be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SnapshotBody {
    /// What it shall be called; no two of one client have the same.
    pub name: Option<String>,
    /// What shall be noted with it.
    pub labels: BTreeMap<String, String>,
    /// After how many seconds it is forgotten.
    pub keep_seconds: Option<u64>,
    /// Whether it is a place to go back to by `undo`, which goes with its sandbox.
    pub savepoint: bool,
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotView {
    /// Its id.
    pub id: String,
    /// What it is called, if it is called something.
    pub name: Option<String>,
    /// The client that has it.
    pub client: String,
    /// Whether it is a place to go back to, that goes with its sandbox.
    pub savepoint: bool,
    /// What was noted with it.
    pub labels: BTreeMap<String, String>,
    /// The sandbox that it was taken of.
    pub sandbox_id: String,
    /// When it was taken.
    pub created_at: DateTime<Utc>,
    /// When it is forgotten, if ever.
    pub expires_at: Option<DateTime<Utc>>,
    /// Bytes in the files of all that was written.
    pub bytes: u64,
    /// Bytes in the files that no snapshot before it had.
    pub new_bytes: u64,
    /// Files, directories and other entries of all that was written.
    pub entries: u64,
    /// The layers that it stands on, the lowest first.
    pub layers: Vec<String>,
}

impl From<&Snapshot> for SnapshotView {
    fn from(snapshot: &Snapshot) -> Self {
        let (_, client) = split(snapshot.owner.as_deref().unwrap_or_default());
        let layers = snapshot.base.layers.iter().chain(&snapshot.base.changes);
        Self {
            id: snapshot.id.to_string(),
            name: Some(snapshot.name.clone()).filter(|name| !name.is_empty()),
            client: client.to_owned(),
            savepoint: snapshot.kind == SnapshotKind::Savepoint,
            labels: snapshot.labels.clone(),
            sandbox_id: snapshot.sandbox_id.to_string(),
            created_at: snapshot.created_at,
            expires_at: snapshot.expires_at,
            bytes: snapshot.bytes,
            new_bytes: snapshot.new_bytes,
            entries: snapshot.entries,
            layers: layers.map(ToString::to_string).collect(),
        }
    }
}

/// What a fork shall make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ForkBody {
    /// How many sandboxes.
    pub count: u32,
    /// Whether fewer will do.
    pub partial: bool,
    /// Labels of each, instead of those of the origin.
    pub labels: Option<HashMap<String, String>>,
}

impl Default for ForkBody {
    fn default() -> Self {
        Self { count: 1, partial: false, labels: None }
    }
}

/// What a fork made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ForkView {
    /// The sandboxes, each with a session.
    pub items: Vec<AcquiredView>,
}

/// What to go back to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreBody {
    /// The id or the name of a snapshot.
    pub snapshot: String,
}

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChangeView {
    /// It was not there before.
    Added,
    /// It is otherwise.
    Changed,
    /// It is not there any more.
    Removed,
}

/// A file as it was or is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SideView {
    /// What it is: `file`, `directory`, `link`, `fifo`, `socket` or `device`.
    pub kind: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its permissions.
    pub mode: u32,
    /// Its owner, inside.
    pub uid: u32,
    /// Its group, inside.
    pub gid: u32,
    /// Where it leads, if it is a link.
    pub target: Option<String>,
    /// The digest of its contents, if it is a file and digests were asked for.
    pub sha256: Option<String>,
}

impl From<&DiffSide> for SideView {
    fn from(side: &DiffSide) -> Self {
        Self {
            kind: side.kind.name().to_owned(),
            size: side.size,
            mode: side.mode,
            uid: side.uid,
            gid: side.gid,
            target: side.target.clone(),
            sha256: side.sha256.clone(),
        }
    }
}

/// One difference.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiffEntryView {
    /// The path; what is no UTF-8 in it is replaced.
    pub path: String,
    /// What became of it.
    pub change: ChangeView,
    /// As it was.
    pub before: Option<SideView>,
    /// As it is.
    pub after: Option<SideView>,
    /// The difference of two texts, if patches were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patch: Option<String>,
}

impl From<&DiffEntry> for DiffEntryView {
    fn from(entry: &DiffEntry) -> Self {
        Self {
            path: entry.path.to_string_lossy().into_owned(),
            change: match entry.change {
                DiffKind::Added => ChangeView::Added,
                DiffKind::Changed => ChangeView::Changed,
                DiffKind::Removed => ChangeView::Removed,
            },
            before: entry.before.as_ref().map(Into::into),
            after: entry.after.as_ref().map(Into::into),
            patch: entry.patch.clone(),
        }
    }
}

/// What differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiffView {
    /// The differences, by path.
    pub items: Vec<DiffEntryView>,
    /// Whether there are more than are listed.
    pub truncated: bool,
}

/// What to compare.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "describes the query, which is read by hand to name what is wrong")]
pub(crate) struct DiffParams {
    /// The id or the name of the snapshot to compare with; what the sandbox was made from if absent.
    since: Option<String>,
    /// Only this path and what is below it; may be repeated.
    path: Option<String>,
    /// Whether to show how texts differ: `true` or `false`.
    patch: Option<bool>,
    /// Whether to digest the contents of files: `true` or `false`.
    digests: Option<bool>,
}

impl Api {
    /// Returns the caller's snapshots, the oldest first.
    async fn snapshots(&self, who: &Principal) -> Result<Vec<Snapshot>, ApiError> {
        let mut all = self.manager().list_snapshots().await?;
        all.retain(|snapshot| snapshot.owner.as_deref().is_some_and(|owner| who.owns(owner)));
        Ok(all)
    }

    /// Finds a snapshot of the caller by its id or its name.
    async fn find_snapshot(&self, who: &Principal, id: &str) -> Result<Snapshot, ApiError> {
        let mut found = self.snapshots(who).await?;
        found.retain(|one| one.id.as_str() == id || (!id.is_empty() && one.name == id));
        match found.len() {
            0 => Err(ApiError::not_found("snapshot", id)),
            1 => Ok(found.remove(0)),
            _ => Err(ApiError::new(
                StatusCode::CONFLICT,
                "ambiguous",
                format!("several clients have a snapshot `{}`", id.escape_debug()),
            )
            .with_hint("name it by its id, or say which client: x-warren-client")),
        }
    }

    /// Does work that may be repeated with the same key, and to its end whoever hangs up.
    async fn repeatable(
        &self,
        who: &Principal,
        headers: &HeaderMap,
        (place, digest): (&str, [u8; 32]),
        work: impl Future<Output = Result<Answer, ApiError>> + Send + 'static,
    ) -> Result<Response, ApiError> {
        if let Some(key) = idempotency::key(headers)? {
            let name = (std::sync::Arc::clone(&who.tenant), key);
            // The same body elsewhere is another request.
            let digest: [u8; 32] =
                Sha256::new().chain_update(place).chain_update(digest).finalize().into();
            let (this, key) = (self.clone(), name.clone());
            let work = async move {
                let answer = work.await?;
                this.0.repeatable.keep(&key, digest, &answer).await?;
                Ok(answer)
            };
            return self.0.repeatable.once(&self.0.tasks, name, digest, work).await;
        }
        self.finish(work).await.map(|answer| answer.into_response(false))
    }
}

fn first(sessions: Vec<SandboxSession>, id: &SandboxId) -> Result<SandboxSession, ApiError> {
    sessions.into_iter().next().ok_or_else(|| ApiError::not_found("sandbox", id.as_str()))
}

/// Saves a sandbox, which stands still for a moment.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/snapshots",
    tag = "snapshots",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("Idempotency-Key" = Option<String>, Header, description = "Makes repeating safe."),
    ),
    request_body = SnapshotBody,
    responses(
        (status = 201, body = SnapshotView),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, description = "The name is taken.", body = ErrorBody),
        (status = 429, description = "A quota is used up.", body = ErrorBody),
    )
)]
pub(crate) async fn create(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    headers: HeaderMap,
    body: Body<SnapshotBody>,
) -> Result<Response, ApiError> {
    let session = first(api.sandbox(&who, &id).await?.1, &id)?;
    let SnapshotBody { name, labels, keep_seconds, savepoint } = body.value;
    let options = SnapshotOptions {
        name: name.unwrap_or_default(),
        labels,
        keep_for: keep_seconds.map(Duration::from_secs),
        kind: if savepoint { SnapshotKind::Savepoint } else { SnapshotKind::Kept },
    };
    let (this, asker) = (api.clone(), who.clone());
    let work = async move {
        let _saving = this.save_one(&asker).await?;
        let snapshot = this.manager().snapshot(&session, &options).await?;
        this.0.events.happened(EventKind::SnapshotCreated, &session);
        Answer::json(StatusCode::CREATED, &SnapshotView::from(&snapshot))
    };
    api.repeatable(&who, &headers, (&format!("snapshots {id}"), body.digest), work).await
}

/// Lists the caller's snapshots, oldest first.
#[utoipa::path(
    get,
    path = "/v1/snapshots",
    tag = "snapshots",
    params(ListParams),
    responses((status = 200, body = Page<SnapshotView>), (status = 400, body = ErrorBody))
)]
pub(crate) async fn list(
    State(api): State<Api>,
    who: Principal,
    parameters: Parameters,
) -> Result<Json<Page<SnapshotView>>, ApiError> {
    let query = ListQuery::new(parameters)?;
    let mut items = Vec::new();
    for snapshot in api.snapshots(&who).await? {
        let has = |(key, value): &(String, String)| snapshot.labels.get(key) == Some(value);
        if query.labels.iter().all(has) {
            let place = (snapshot.created_at.timestamp_micros(), snapshot.id.to_string());
            items.push((place, SnapshotView::from(&snapshot)));
        }
    }
    Ok(Json(query.page(items)))
}

/// Shows a snapshot.
#[utoipa::path(
    get,
    path = "/v1/snapshots/{id}",
    tag = "snapshots",
    params(("id" = String, Path, description = "The id or the name of the snapshot.")),
    responses((status = 200, body = SnapshotView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn show(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
) -> Result<Json<SnapshotView>, ApiError> {
    Ok(Json((&api.find_snapshot(&who, id.as_str()).await?).into()))
}

/// Forgets a snapshot. What sandboxes and other snapshots stand on stays.
#[utoipa::path(
    delete,
    path = "/v1/snapshots/{id}",
    tag = "snapshots",
    params(("id" = String, Path, description = "The id or the name of the snapshot.")),
    responses((status = 204, description = "It is gone."), (status = 404, body = ErrorBody))
)]
pub(crate) async fn remove(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
) -> Result<StatusCode, ApiError> {
    let snapshot = api.find_snapshot(&who, id.as_str()).await?;
    let owner = snapshot.owner.clone().unwrap_or_default();
    let this = api.clone();
    api.finish(async move {
        this.manager().remove_snapshot(&owner, snapshot.id.as_str()).await?;
        this.0.events.happened_to(EventKind::SnapshotRemoved, &snapshot.sandbox_id, &owner);
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}

/// Makes a sandbox what a snapshot says. Its processes end; it keeps its id, its sessions and its spec.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/restore",
    tag = "snapshots",
    params(("id" = String, Path, description = "The sandbox.")),
    request_body = RestoreBody,
    responses(
        (status = 200, body = SnapshotView),
        (status = 404, body = ErrorBody),
        (status = 409, description = "The sandbox is suspended.", body = ErrorBody),
    )
)]
pub(crate) async fn restore(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    body: Body<RestoreBody>,
) -> Result<Json<SnapshotView>, ApiError> {
    let snapshot = api.find_snapshot(&who, &body.value.snapshot).await?;
    go_back(&api, &who, &id, Some(snapshot)).await
}

/// Goes back to a snapshot, or to the last savepoint.
async fn go_back(
    api: &Api,
    who: &Principal,
    id: &SandboxId,
    to: Option<Snapshot>,
) -> Result<Json<SnapshotView>, ApiError> {
    let session = first(api.sandbox(who, id).await?.1, id)?;
    let this = api.clone();
    api.finish(async move {
        let snapshot = match to {
            Some(snapshot) => {
                this.manager().restore(&session, &snapshot).await?;
                snapshot
            }
            None => this.manager().undo(&session).await?,
        };
        this.0.events.happened(EventKind::SandboxRestored, &session);
        Ok(Json((&snapshot).into()))
    })
    .await
}

/// Goes back to the last savepoint of a sandbox, which is used up by that.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/undo",
    tag = "snapshots",
    params(("id" = String, Path, description = "The sandbox.")),
    responses(
        (status = 200, body = SnapshotView),
        (status = 404, body = ErrorBody),
        (status = 409, description = "There is no savepoint.", body = ErrorBody),
    )
)]
pub(crate) async fn undo(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
) -> Result<Json<SnapshotView>, ApiError> {
    go_back(&api, &who, &id, None).await
}

/// What a fork is made of.
enum Origin {
    Live(SandboxSession),
    Saved(Box<Snapshot>),
}

impl Origin {
    /// Returns what its sandboxes are called, and how much of the host they may use.
    async fn terms(
        &self,
        api: &Api,
    ) -> Result<(BTreeMap<String, String>, ResourceLimits), ApiError> {
        Ok(match self {
            Self::Live(session) => {
                let id = &session.sandbox_id;
                let sandbox = api.manager().get_sandbox(id).await?;
                let sandbox = sandbox.ok_or_else(|| ApiError::not_found("sandbox", id.as_str()))?;
                (api.0.catalog.labels(id), sandbox.capabilities().limits.clone())
            }
            Self::Saved(snapshot) => {
                let spec = &snapshot.spec;
                (spec.labels.iter().cloned().collect(), spec.limits.clone())
            }
        })
    }

    /// Names it, so that the same request elsewhere is another.
    fn place(&self) -> String {
        match self {
            Self::Live(session) => format!("fork {}", session.sandbox_id),
            Self::Saved(snapshot) => format!("fork {}", snapshot.id),
        }
    }
}

/// A request for a fork.
pub(crate) struct ForkRequest {
    api: Api,
    who: Principal,
    id: SandboxId,
    headers: HeaderMap,
    body: Body<ForkBody>,
}

impl FromRequest<Api> for ForkRequest {
    type Rejection = ApiError;

    async fn from_request(request: Request, api: &Api) -> Result<Self, ApiError> {
        let (mut parts, body) = request.into_parts();
        let who = Principal::from_request_parts(&mut parts, api).await?;
        let Id(id) = Id::from_request_parts(&mut parts, api).await?;
        let headers = parts.headers.clone();
        let body = Body::from_request(Request::from_parts(parts, body), api).await?;
        Ok(Self { api: api.clone(), who, id, headers, body })
    }
}

/// How a fork may end.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "describes the answers, which are made by hand")]
enum ForkAnswers {
    /// The sandboxes.
    #[response(status = 201)]
    Made(ForkView),
    /// There is no such thing.
    #[response(status = 404)]
    Unknown(ErrorBody),
    /// A quota is used up.
    #[response(status = 429)]
    Quota(ErrorBody),
    /// As many sandboxes live as may.
    #[response(status = 503)]
    Full(ErrorBody),
}

/// What a fork is asked for with.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "describes the headers, which are read by hand")]
struct ForkHeaders {
    /// Makes repeating safe.
    #[param(rename = "Idempotency-Key")]
    key: Option<String>,
}

/// Makes sandboxes that are as this one is now: all of them, or none unless fewer will do.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/fork",
    tag = "snapshots",
    params(("id" = String, Path, description = "The sandbox."), ForkHeaders),
    request_body = ForkBody,
    responses(ForkAnswers)
)]
pub(crate) async fn fork(asked: ForkRequest) -> Result<Response, ApiError> {
    let session = first(asked.api.sandbox(&asked.who, &asked.id).await?.1, &asked.id)?;
    make_fork(asked, Origin::Live(session)).await
}

/// Makes sandboxes that are as a snapshot says: all of them, or none unless fewer will do.
#[utoipa::path(
    post,
    path = "/v1/snapshots/{id}/fork",
    tag = "snapshots",
    params(("id" = String, Path, description = "The id or the name of the snapshot."), ForkHeaders),
    request_body = ForkBody,
    responses(ForkAnswers)
)]
pub(crate) async fn fork_snapshot(asked: ForkRequest) -> Result<Response, ApiError> {
    let snapshot = asked.api.find_snapshot(&asked.who, asked.id.as_str()).await?;
    // It was looked at when it was imported, but not always by a version that did.
    asked.who.may_ask_for(&snapshot.spec)?;
    make_fork(asked, Origin::Saved(Box::new(snapshot))).await
}

async fn make_fork(asked: ForkRequest, origin: Origin) -> Result<Response, ApiError> {
    let ForkRequest { api, who, headers, body: Body { value, digest }, .. } = asked;
    let ((own, limits), place) = (origin.terms(&api).await?, origin.place());
    // Two may not have the same name, so that none of them has its origin's.
    let labels: HashMap<String, String> = match value.labels {
        Some(mut given) => {
            // Who runs commands there is what its files are made for.
            let user = own.get(USER_LABEL).map(|user| (USER_LABEL.to_owned(), user.clone()));
            given.extend(user);
            given
        }
        None => own.into_iter().filter(|(key, _)| key != NAME_LABEL).collect(),
    };
    if labels.contains_key(NAME_LABEL) {
        return Err(ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid_spec",
            "the sandboxes of a fork have no name",
        )
        .with_hint("give them another label"));
    }
    let options =
        ForkOptions { count: value.count, partial: value.partial, labels: Some(labels.clone()) };
    let labels = labels.into_iter().collect();
    let spec = warren::SandboxSpec { limits, labels, ..warren::SandboxSpec::default() };
    let (this, asker) = (api.clone(), who.clone());
    let work = async move {
        // A place for each, before any is made.
        let mut promises = Vec::new();
        for _ in 0..options.count.min(1_000) {
            match this.promise(&who, &spec).await {
                Ok(promise) => promises.push(promise),
                Err(_) if options.partial && !promises.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        let count = if options.partial {
            u32::try_from(promises.len()).unwrap_or(options.count)
        } else {
            options.count
        };
        let options = ForkOptions { count, ..options };
        let made = match &origin {
            Origin::Live(session) => this.manager().fork(session, &options).await?,
            Origin::Saved(snapshot) => {
                this.manager().fork_snapshot(snapshot, &options, &who.client_id()).await?
            }
        };
        let mut items = Vec::new();
        let mut promises = promises.into_iter();
        for (session, sandbox) in &made {
            let id = sandbox.id();
            if let Some(promise) = promises.next() {
                promise.keep(id, &sandbox.capabilities().limits);
            }
            let (tenant, _) = split(&session.client_id);
            this.0.catalog.promise(&tenant.into(), &spec)?.keep(tenant, id, &spec.labels);
            this.0.events.note(session);
            items.push(acquired(&this, session, &**sandbox, Some(true)));
        }
        Answer::json(StatusCode::CREATED, &ForkView { items }).map(|answer| (made, answer))
    };
    if idempotency::key(&headers)?.is_some() {
        let work = async move { work.await.map(|(_, answer)| answer) };
        return api.repeatable(&asker, &headers, (&place, digest), work).await;
    }
    let (sender, answer) = oneshot::channel();
    let this = api.clone();
    api.0.tasks.spawn(async move {
        // Whoever hung up does not know the sessions, and could not ask for them again.
        if let Err(Ok((made, _))) = sender.send(work.await) {
            for (session, _) in made {
                this.undo(&session).await;
            }
        }
    });
    let answer = answer.await.map_err(|_| ApiError::internal("the work was given up"))?;
    answer.map(|(_, answer)| answer.into_response(false))
}

/// Lists what is otherwise in a sandbox than it was.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/diff",
    tag = "snapshots",
    params(("id" = String, Path, description = "The sandbox."), DiffParams),
    responses(
        (status = 200, body = DiffView),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
    )
)]
pub(crate) async fn diff(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut given: Parameters,
) -> Result<Json<DiffView>, ApiError> {
    let options = DiffOptions {
        patch: given.flag("patch")?,
        digests: given.flag("digests")?,
        paths: given.all("path").into_iter().map(Into::into).collect(),
        limit: None,
    };
    let since = given.one("since")?;
    given.end()?;
    let since = match since {
        Some(id) => Some(api.find_snapshot(&who, &id).await?.base),
        None => None,
    };
    changes(&api, &who, &id, since, options).await.map(Json)
}

/// Compares a sandbox with what it was, as far as one answer takes.
pub(super) async fn changes(
    api: &Api,
    who: &Principal,
    id: &SandboxId,
    since: Option<Base>,
    options: DiffOptions,
) -> Result<DiffView, ApiError> {
    let (sandbox, _) = api.sandbox(who, id).await?;
    let options = DiffOptions { limit: Some(MAX_DIFF), ..options };
    let found =
        api.finish(async move { Ok(sandbox.diff(since.as_ref(), &options).await?) }).await?;
    let truncated = found.len() >= MAX_DIFF;
    Ok(DiffView { items: found.iter().map(Into::into).collect(), truncated })
}

/// Makes a savepoint of a sandbox.
pub(super) async fn savepoint(
    api: &Api,
    who: &Principal,
    id: &SandboxId,
) -> Result<Snapshot, ApiError> {
    let session = first(api.sandbox(who, id).await?.1, id)?;
    let (this, asker) = (api.clone(), who.clone());
    api.finish(async move {
        let _saving = this.save_one(&asker).await?;
        let saved = this.manager().savepoint(&session).await?;
        this.0.events.happened(EventKind::SnapshotCreated, &session);
        Ok(saved)
    })
    .await
}

/// How much of a file is sent at once.
const PIECE: usize = 256 << 10;

/// Sends a snapshot as one file: a tar, compressed by zstd, with digests of all that it holds.
#[utoipa::path(
    get,
    path = "/v1/snapshots/{id}/export",
    tag = "snapshots",
    params(("id" = String, Path, description = "The id or the name of the snapshot.")),
    responses(
        (status = 200, description = "The file.", content_type = "application/zstd"),
        (status = 404, body = ErrorBody),
    )
)]
pub(crate) async fn export(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let snapshot = api.find_snapshot(&who, id.as_str()).await?;
    let owner = snapshot.owner.clone().unwrap_or_default();
    let file = api.manager().export_snapshot(&owner, snapshot.id.as_str()).await?;
    let length = file.metadata().map(|found| found.len()).unwrap_or_default();
    let pieces = futures_util::stream::unfold(Some(file), async |file| {
        let mut file = file?;
        let read = tokio::task::spawn_blocking(move || {
            let mut piece = vec![0; PIECE];
            let read = std::io::Read::read(&mut file, &mut piece)?;
            piece.truncate(read);
            std::io::Result::Ok((piece, file))
        });
        match read.await.map_err(std::io::Error::other).and_then(|read| read) {
            Ok((piece, _)) if piece.is_empty() => None,
            Ok((piece, file)) => Some((Ok(axum::body::Bytes::from(piece)), Some(file))),
            Err(error) => Some((Err(error), None)),
        }
    });
    let mut response = Response::new(axum::body::Body::from_stream(pieces));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/zstd"));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    Ok(response)
}

/// What comes from a client, for somebody who waits for it on a thread of its own.
struct Incoming {
    pieces: tokio::sync::mpsc::Receiver<std::io::Result<axum::body::Bytes>>,
    rest: axum::body::Bytes,
}

impl std::io::Read for Incoming {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        while self.rest.is_empty() {
            match self.pieces.blocking_recv() {
                Some(piece) => self.rest = piece?,
                None => return Ok(0),
            }
        }
        let piece = self.rest.split_to(self.rest.len().min(bytes.len()));
        bytes[..piece.len()].copy_from_slice(&piece);
        Ok(piece.len())
    }
}

/// What a snapshot that is imported shall be called.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "describes the query, which is read by hand to name what is wrong")]
pub(crate) struct ImportParams {
    /// The name, if not the one that it was exported with.
    name: Option<String>,
}

/// Makes what was exported a snapshot of the caller. It is checked as it comes, and is there whole or not at all.
#[utoipa::path(
    post,
    path = "/v1/snapshots",
    tag = "snapshots",
    params(ImportParams),
    request_body(content_type = "application/zstd"),
    responses(
        (status = 201, body = SnapshotView),
        (status = 400, description = "It is damaged, no snapshot, or asks for what only the operator may.", body = ErrorBody),
        (status = 409, description = "The name is taken.", body = ErrorBody),
        (status = 429, description = "A quota is used up.", body = ErrorBody),
    )
)]
pub(crate) async fn import(
    State(api): State<Api>,
    who: Principal,
    mut given: Parameters,
    body: axum::body::Body,
) -> Result<Response, ApiError> {
    let name = given.one("name")?;
    given.end()?;
    let _saving = api.save_one(&who).await?;
    let (sender, pieces) = tokio::sync::mpsc::channel(4);
    let incoming = Incoming { pieces, rest: axum::body::Bytes::new() };
    let (manager, client) = (std::sync::Arc::clone(api.manager()), who.client_id());
    let importer = if who.operator { Importer::Operator } else { Importer::Tenant };
    let work =
        async move { manager.import_snapshot(&client, name, importer, Box::new(incoming)).await };
    let feed = async move {
        let mut body = body.into_data_stream();
        loop {
            let next =
                tokio::time::timeout(STALLED, futures_util::StreamExt::next(&mut body)).await;
            let piece = match next {
                Ok(None) => return,
                Ok(Some(piece)) => piece.map_err(std::io::Error::other),
                Err(_) => Err(std::io::ErrorKind::TimedOut.into()),
            };
            // Nobody takes it any more: the answer says why.
            if sender.send(piece).await.is_err() {
                return;
            }
        }
    };
    let (snapshot, ()) = tokio::join!(work, feed);
    let snapshot = snapshot?;
    let owner = snapshot.owner.as_deref().unwrap_or_default();
    api.0.events.happened_to(EventKind::SnapshotCreated, &snapshot.sandbox_id, owner);
    Ok(Answer::json(StatusCode::CREATED, &SnapshotView::from(&snapshot))?.into_response(false))
}

/// How long a client may send nothing.
const STALLED: Duration = Duration::from_secs(60);
