//! `/v1/sessions`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use warren::{SandboxError, SandboxManager, SandboxSession};

use super::sandboxes::{self, ListQuery};
use super::wire::{
    AcquiredView, AttachBody, ListParams, Page, ReleaseBody, SessionView, SuspendBody,
};
use crate::Api;
use crate::error::{ApiError, ErrorBody};
use crate::extract::{Body, Id, Parameters};
use crate::principal::Principal;

/// Lists the caller's sessions, oldest first.
#[utoipa::path(
    get,
    path = "/v1/sessions",
    tag = "sessions",
    params(ListParams),
    responses((status = 200, body = Page<SessionView>), (status = 400, body = ErrorBody))
)]
pub(crate) async fn list(
    State(api): State<Api>,
    who: Principal,
    parameters: Parameters,
) -> Result<Json<Page<SessionView>>, ApiError> {
    let query = ListQuery::new(parameters)?;
    let mut items = Vec::new();
    for session in api.sessions(&who).await? {
        let labels = api.0.catalog.labels(&session.sandbox_id);
        let has = |(key, value): &(String, String)| labels.get(key) == Some(value);
        let shown = SessionView::from(&session);
        if query.admits(shown.state) && query.labels.iter().all(has) {
            items.push(((shown.created_at.timestamp_micros(), shown.id.clone()), shown));
        }
    }
    Ok(Json(query.page(items)))
}

/// Shows a session.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session.")),
    responses((status = 200, body = SessionView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn show(Named { session, .. }: Named) -> Json<SessionView> {
    Json((&session).into())
}

/// Joins the sandbox of a session again.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/attach",
    tag = "sessions",
    params(("id" = String, Path, description = "The session.")),
    responses((status = 200, body = AcquiredView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn attach(
    who: Principal,
    Named { api, session }: Named,
) -> Result<Json<AcquiredView>, ApiError> {
    let this = api.clone();
    api.finish(async move {
        let sandbox_id = session.sandbox_id.clone();
        sandboxes::join(&this, &who, sandbox_id, AttachBody::default()).await.map(Json)
    })
    .await
}

/// A session that a request names, and what is needed to change it.
#[derive(Debug)]
pub(crate) struct Named {
    api: Api,
    session: SandboxSession,
}

impl FromRequestParts<Api> for Named {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, ApiError> {
        let who = Principal::from_request_parts(parts, api).await?;
        let Id(id) = Id::from_request_parts(parts, api).await?;
        Ok(Self { session: api.session(&who, id.as_str()).await?, api: api.clone() })
    }
}

/// Changes a session and shows what became of it.
async fn change<W: Future<Output = Result<(), SandboxError>> + Send>(
    Named { api, session }: Named,
    change: impl FnOnce(Arc<dyn SandboxManager>, SandboxSession) -> W + Send + 'static,
) -> Result<Json<SessionView>, ApiError> {
    let this = api.clone();
    api.finish(async move {
        let changed = change(Arc::clone(this.manager()), session.clone()).await;
        let now = this.look_at(&session).await?;
        changed?;
        Ok(Json((&now).into()))
    })
    .await
}

/// Leaves a sandbox; its processes go on.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/detach",
    tag = "sessions",
    params(("id" = String, Path, description = "The session.")),
    responses(
        (status = 200, body = SessionView),
        (status = 404, body = ErrorBody),
        (status = 409, description = "The move is not a legal one.", body = ErrorBody),
    )
)]
pub(crate) async fn detach(named: Named) -> Result<Json<SessionView>, ApiError> {
    change(named, async |manager, session| manager.detach(&session).await).await
}

/// Stops every process of a session's sandbox.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/suspend",
    tag = "sessions",
    params(("id" = String, Path, description = "The session.")),
    request_body = SuspendBody,
    responses(
        (status = 200, body = SessionView),
        (status = 404, body = ErrorBody),
        (status = 409, description = "Another session is active, or there is no room on disk.", body = ErrorBody),
        (status = 422, description = "This host has no swap.", body = ErrorBody),
    )
)]
pub(crate) async fn suspend(
    named: Named,
    body: Body<SuspendBody>,
) -> Result<Json<SessionView>, ApiError> {
    let to_disk = body.value.to_disk;
    let suspend =
        async move |manager: Arc<dyn SandboxManager>, session: SandboxSession| match to_disk {
            true => manager.suspend_to_disk(&session).await,
            false => manager.suspend(&session).await,
        };
    change(named, suspend).await
}

/// Lets the processes of a session's sandbox continue.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/resume",
    tag = "sessions",
    params(("id" = String, Path, description = "The session.")),
    responses(
        (status = 200, body = SessionView),
        (status = 404, body = ErrorBody),
        (status = 409, description = "The move is not a legal one.", body = ErrorBody),
    )
)]
pub(crate) async fn resume(named: Named) -> Result<Json<SessionView>, ApiError> {
    let resume = async |manager: Arc<dyn SandboxManager>, session: SandboxSession| {
        manager.resume(&session).await.map(|_| ())
    };
    change(named, resume).await
}

/// Gives a sandbox back; kept alive, it waits for the same client.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/release",
    tag = "sessions",
    params(("id" = String, Path, description = "The session.")),
    request_body = ReleaseBody,
    responses(
        (status = 200, body = SessionView),
        (status = 404, body = ErrorBody),
        (status = 409, description = "The move is not a legal one.", body = ErrorBody),
    )
)]
pub(crate) async fn release(
    named: Named,
    body: Body<ReleaseBody>,
) -> Result<Json<SessionView>, ApiError> {
    let keep_alive = body.value.keep_alive;
    let release = async move |manager: Arc<dyn SandboxManager>, session: SandboxSession| {
        manager.release(&session, keep_alive).await
    };
    change(named, release).await
}

/// Ends a session, and with the last one its sandbox.
#[utoipa::path(
    delete,
    path = "/v1/sessions/{id}",
    tag = "sessions",
    params(("id" = String, Path, description = "The session.")),
    responses((status = 204, description = "It ended."), (status = 404, body = ErrorBody))
)]
pub(crate) async fn terminate(named: Named) -> Result<StatusCode, ApiError> {
    let terminate = async |manager: Arc<dyn SandboxManager>, session: SandboxSession| {
        manager.terminate(&session).await
    };
    change(named, terminate).await.map(|_| StatusCode::NO_CONTENT)
}
