//! The native dialect: `/v1`, described by `docs/openapi.json`.

pub mod execs;
pub mod files;
pub(crate) mod ports;
mod receipts;
mod run;
mod sandboxes;
mod sessions;
pub mod shells;
pub mod snapshots;
mod system;
pub mod templates;
pub mod wire;

use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{any, get};
use utoipa::openapi::OpenApi as Document;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::{Modify, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::ApiError;
use crate::extract::{MAX_BODY, refuse_odd_paths};
use crate::principal::{Principal, authenticate, refuse_browsers};
use crate::{Api, ErrorBody, audit};

/// How long a request may take that neither makes a sandbox nor runs a command nor follows events.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "Warren",
        description = "Sandboxes for AI agents and other untrusted code. On the unix socket the \
                       caller is the user at the other end; on TCP it is the tenant of an API key. \
                       What is another tenant's does not exist."
    ),
    paths(ports::forward),
    components(schemas(ErrorBody)),
    modifiers(&Keys),
    security(("key" = []))
)]
struct Description;

struct Keys;

impl Modify for Keys {
    fn modify(&self, document: &mut Document) {
        let components = document.components.get_or_insert_default();
        let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        components.add_security_scheme("key", bearer);
    }
}

fn parts(api: &Api) -> (Router<Api>, Document) {
    let patient = OpenApiRouter::new()
        .routes(routes!(sandboxes::create))
        .routes(routes!(sandboxes::exec))
        .routes(routes!(run::run))
        .routes(routes!(sandboxes::attach))
        .routes(routes!(shells::run))
        .routes(routes!(shells::stream))
        .routes(routes!(system::exec_default))
        .routes(routes!(system::events))
        .routes(routes!(execs::start))
        .routes(routes!(execs::wait))
        .routes(routes!(execs::write))
        .routes(routes!(execs::log))
        .routes(routes!(execs::stream))
        .routes(routes!(execs::attach))
        .routes(routes!(snapshots::create))
        .routes(routes!(snapshots::restore))
        .routes(routes!(snapshots::undo))
        .routes(routes!(snapshots::fork))
        .routes(routes!(snapshots::fork_snapshot))
        .routes(routes!(snapshots::diff))
        .routes(routes!(snapshots::export))
        .routes(routes!(snapshots::import))
        .merge(files::router())
        .merge(templates::patient())
        .routes(routes!(ports::open))
        .route("/v1/sandboxes/{id}/ports/{port}/", any(ports::forward))
        .route("/v1/sandboxes/{id}/ports/{port}/{*path}", any(ports::forward));
    let prompt = OpenApiRouter::new()
        .routes(routes!(sandboxes::list))
        .routes(routes!(sandboxes::show, sandboxes::destroy))
        .routes(routes!(receipts::show))
        .routes(routes!(receipts::verify))
        .routes(routes!(receipts::key))
        .routes(routes!(execs::list))
        .routes(routes!(execs::show, execs::forget))
        .routes(routes!(execs::signal))
        .routes(routes!(execs::kill))
        .routes(routes!(execs::resize))
        .routes(routes!(shells::list))
        .routes(routes!(shells::show, shells::close))
        .routes(routes!(shells::interrupt))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::show, snapshots::remove))
        .routes(routes!(sessions::list))
        .routes(routes!(sessions::show, sessions::terminate))
        .routes(routes!(sessions::attach))
        .routes(routes!(sessions::detach))
        .routes(routes!(sessions::suspend))
        .routes(routes!(sessions::resume))
        .routes(routes!(sessions::release))
        .routes(routes!(system::get_default, system::set_default, system::unset_default))
        .routes(routes!(system::stats))
        .routes(routes!(system::quotas))
        .routes(routes!(system::cleanup))
        .merge(templates::prompt())
        .route_layer(from_fn(hurry));
    let open = OpenApiRouter::new().routes(routes!(system::health));
    OpenApiRouter::with_openapi(Description::openapi())
        .merge(patient)
        .merge(prompt)
        .route_layer(from_fn_with_state(api.clone(), authenticate))
        .merge(open)
        .split_for_parts()
}

/// Returns the router of the native dialect. Each request must carry its [`Peer`](crate::Peer).
pub fn router(api: &Api) -> Router {
    let (router, document) = parts(api);
    let document = async move || axum::Json(document.clone());
    let router = router
        .route("/v1/openapi.json", get(document))
        .fallback(async || ApiError::no_route())
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(from_fn(refuse_odd_paths))
        .layer(from_fn_with_state(api.clone(), refuse_browsers))
        .layer(from_fn(log))
        .with_state(api.clone());
    audit::around(api, router)
}

/// Returns the description of the native dialect, as it is published in `docs/openapi.json`.
pub fn description(api: &Api) -> String {
    let document = parts(api).1.to_pretty_json();
    // It is text and numbers alone, which are always JSON.
    document.expect("a description can be written") + "\n"
}

async fn hurry(request: Request, next: Next) -> Result<Response, ApiError> {
    let answer = tokio::time::timeout(PATIENCE, next.run(request)).await;
    answer.map_err(|_| ApiError::request_timeout())
}

/// Notes each request: what was asked and what became of it, never what it carried.
async fn log(request: Request, next: Next) -> Response {
    let (method, path) =
        (request.method().clone(), ports::own_part(request.uri().path()).to_owned());
    let began = Instant::now();
    let response = next.run(request).await;
    let (status, tenant) = (response.status().as_u16(), response.extensions().get::<Principal>());
    let tenant = tenant.map(|who| &*who.tenant);
    let elapsed_ms = began.elapsed().as_millis();
    tracing::info!(%method, path, status, tenant, elapsed_ms, "request");
    response
}
