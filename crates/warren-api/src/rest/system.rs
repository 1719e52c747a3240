//! What is about the daemon and not about one sandbox: the default, numbers, health, events.

use std::collections::HashSet;
use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::Stream;
use warren::{SandboxId, SessionState};

use super::sandboxes;
use super::wire::{
    CleanupView, DefaultBody, DefaultView, ExecBody, ExecView, HealthView, ManagerStatsView,
    QuotaListView, StatsView,
};
use crate::error::{ApiError, ErrorBody};
use crate::events::{EventView, Item, Reader};
use crate::extract::{Body, plain};
use crate::principal::Principal;
use crate::{Api, events};

/// How often a stream says that it is still there.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

async fn default_of(api: &Api, who: &Principal) -> Result<Option<SandboxId>, ApiError> {
    let id = if who.operator {
        api.manager().get_default_sandbox().await
    } else {
        api.0.defaults.lock().await.get(&who.tenant).cloned()
    };
    let Some(id) = id else { return Ok(None) };
    // It may have ended, and nobody noticed yet.
    Ok(api.sandbox(who, &id).await.is_ok().then_some(id))
}

async fn put_default(api: &Api, who: &Principal, id: Option<SandboxId>) -> Result<(), ApiError> {
    let set = match who.operator {
        true => api.manager().set_default_sandbox(id).await,
        false => api.set_default(&who.tenant, id).await,
    };
    Ok(set?)
}

/// Tells which sandbox is used when the caller names none.
#[utoipa::path(
    get,
    path = "/v1/default",
    tag = "default",
    responses((status = 200, body = DefaultView))
)]
pub(crate) async fn get_default(
    State(api): State<Api>,
    who: Principal,
) -> Result<Json<DefaultView>, ApiError> {
    let sandbox_id = default_of(&api, &who).await?.map(|id| id.to_string());
    Ok(Json(DefaultView { sandbox_id }))
}

/// Sets which sandbox is used when the caller names none.
#[utoipa::path(
    put,
    path = "/v1/default",
    tag = "default",
    request_body = DefaultBody,
    responses((status = 200, body = DefaultView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn set_default(
    State(api): State<Api>,
    who: Principal,
    body: Body<DefaultBody>,
) -> Result<Json<DefaultView>, ApiError> {
    let id = plain(body.value.sandbox_id)?;
    api.sandbox(&who, &id).await?;
    put_default(&api, &who, Some(id.clone())).await?;
    Ok(Json(DefaultView { sandbox_id: Some(id.to_string()) }))
}

/// Uses no sandbox when the caller names none.
#[utoipa::path(
    delete,
    path = "/v1/default",
    tag = "default",
    responses((status = 204, description = "There is none now."))
)]
pub(crate) async fn unset_default(
    State(api): State<Api>,
    who: Principal,
) -> Result<StatusCode, ApiError> {
    put_default(&api, &who, None).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Runs a command to its end in the default sandbox.
#[utoipa::path(
    post,
    path = "/v1/default/exec",
    tag = "default",
    request_body = ExecBody,
    responses((status = 200, body = ExecView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn exec_default(
    State(api): State<Api>,
    who: Principal,
    body: Body<ExecBody>,
) -> Result<Json<ExecView>, ApiError> {
    let id = default_of(&api, &who).await?;
    let id = id.ok_or_else(|| {
        ApiError::new(StatusCode::NOT_FOUND, "no_default", "there is no default sandbox")
            .with_hint("name a sandbox, or set the default: PUT /v1/default")
    })?;
    sandboxes::run(&api, &who, &id, body.value).await.map(Json)
}

/// Ends what is past its time now, instead of at the next sweep. For the operator alone: it is
/// everybody's sessions that it looks at.
#[utoipa::path(
    post,
    path = "/v1/cleanup",
    tag = "system",
    responses((status = 200, body = CleanupView), (status = 403, body = ErrorBody))
)]
pub(crate) async fn cleanup(
    State(api): State<Api>,
    who: Principal,
) -> Result<Json<CleanupView>, ApiError> {
    if !who.operator {
        return Err(ApiError::forbidden(
            "only the operator may sweep",
            "wait: what is past its time ends by itself",
        ));
    }
    Ok(Json(CleanupView { ended: api.manager().cleanup_expired().await? }))
}

/// Returns the numbers of this moment.
#[utoipa::path(
    get,
    path = "/v1/stats",
    tag = "daemon",
    responses((status = 200, body = StatsView))
)]
pub(crate) async fn stats(
    State(api): State<Api>,
    who: Principal,
) -> Result<Json<StatsView>, ApiError> {
    let sessions = api.sessions(&who).await?;
    let count = |state| sessions.iter().filter(|session| session.state == state).count() as u64;
    let sandboxes: HashSet<&SandboxId> = sessions.iter().map(|one| &one.sandbox_id).collect();
    let manager = match who.operator {
        true => Some(api.manager().stats().await),
        false => None,
    };
    Ok(Json(StatsView {
        active_sandboxes: sandboxes.len() as u64,
        active_sessions: count(SessionState::Active),
        detached_sessions: count(SessionState::Detached),
        suspended_sessions: count(SessionState::Suspended),
        manager: manager.map(|stats| ManagerStatsView {
            sandboxes_created: stats.sandboxes_created,
            active_sandboxes: stats.active_sandboxes,
            pool_size: stats.pool_size,
            pool_hit_rate: stats.pool_hit_rate,
            avg_creation_time_ms: stats.avg_creation_time_ms,
            timeout_destroys: stats.timeout_destroys,
        }),
    }))
}

/// Returns how much the caller has of everything, and how much it may; to the operator, how much
/// everybody has.
#[utoipa::path(
    get,
    path = "/v1/quotas",
    tag = "daemon",
    responses((status = 200, body = QuotaListView))
)]
pub(crate) async fn quotas(
    State(api): State<Api>,
    who: Principal,
) -> Result<Json<QuotaListView>, ApiError> {
    let mut kept = api.kept_snapshots().await?;
    let mut items = api.0.ledger.used(&who);
    for item in &mut items {
        item.used.snapshots = kept.remove(&item.tenant).unwrap_or(0);
    }
    Ok(Json(QuotaListView { items }))
}

/// Tells whether the daemon can make sandboxes. Needs no key.
#[utoipa::path(
    get,
    path = "/v1/health",
    tag = "daemon",
    security(()),
    responses((status = 200, body = HealthView), (status = 503, body = HealthView))
)]
pub(crate) async fn health(State(api): State<Api>) -> (StatusCode, Json<HealthView>) {
    let healthy = api.manager().health().await.unwrap_or(false);
    let status = if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(HealthView { healthy, version: env!("CARGO_PKG_VERSION").to_owned() }))
}

/// Follows what happens to the caller's sessions and sandboxes, as Server-Sent Events.
///
/// An event `gap` says that some are lost and everything should be looked at anew.
#[utoipa::path(
    get,
    path = "/v1/events",
    tag = "daemon",
    params(("Last-Event-ID" = Option<String>, Header, description = "Go on after this one.")),
    responses((status = 200, content_type = "text/event-stream", body = EventView))
)]
pub(crate) async fn events(
    State(api): State<Api>,
    who: Principal,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let last = match headers.get("last-event-id").map(|id| id.to_str()) {
        None => None,
        Some(Ok(id)) => Some(id),
        Some(Err(_)) => {
            let hint = "send the id of an event as it came";
            return Err(ApiError::invalid_header("`Last-Event-ID` is no id", hint));
        }
    };
    let reader = api.0.events.read(who, last);
    let stop = api.0.stop.clone();
    let stream = futures_util::stream::unfold((reader, stop), async |(mut reader, stop)| {
        let item = stop.run_until_cancelled(Reader::next(&mut reader)).await??;
        Some((Ok(written(item)), (reader, stop)))
    });
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

fn written(item: events::Item) -> Event {
    match item {
        Item::Event(event) => {
            let named = Event::default().id(event.id.clone()).event(event.kind.name());
            named.json_data(&event).unwrap_or_default()
        }
        Item::Gap => Event::default().event("gap").data("{}"),
    }
}
