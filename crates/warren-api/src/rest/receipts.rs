//! What was tried of a sandbox: `/v1/sandboxes/{id}/receipt` and `/verify`.

use axum::Json;
use axum::extract::State;

use super::wire::{ReceiptKeyView, ReceiptView};
use crate::Api;
use crate::error::{ApiError, ErrorBody};
use crate::extract::Id;
use crate::principal::Principal;

/// Shows what was tried of a sandbox the last time, and what happened.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/receipt",
    tag = "receipts",
    params(("id" = String, Path, description = "The sandbox.")),
    responses((status = 200, body = ReceiptView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn show(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
) -> Result<Json<ReceiptView>, ApiError> {
    api.sandbox(&who, &id).await?;
    Ok(Json(api.manager().receipt(&id).await?.into()))
}

/// Tries the walls of a sandbox from inside. One that does not hold is destroyed.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/verify",
    tag = "receipts",
    params(("id" = String, Path, description = "The sandbox.")),
    responses(
        (status = 200, description = "Everything that was tried was refused.", body = ReceiptView),
        (status = 404, body = ErrorBody),
        (status = 409, description = "The sandbox is suspended.", body = ErrorBody),
        (status = 500, description = "It was open, and is gone.", body = ErrorBody),
    )
)]
pub(crate) async fn verify(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
) -> Result<Json<ReceiptView>, ApiError> {
    api.sandbox(&who, &id).await?;
    let _running = api.count_command(&who).await?;
    Ok(Json(api.manager().verify(&id).await?.into()))
}

/// Returns what receipts are checked with, without this daemon or any other.
#[utoipa::path(
    get,
    path = "/v1/receipt-key",
    tag = "receipts",
    responses((status = 200, body = ReceiptKeyView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn key(
    State(api): State<Api>,
    _who: Principal,
) -> Result<Json<ReceiptKeyView>, ApiError> {
    let public_key = api.manager().receipt_key();
    let public_key = public_key.ok_or_else(|| ApiError::not_found("key", "of receipts"))?;
    Ok(Json(ReceiptKeyView { public_key }))
}
