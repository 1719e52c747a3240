//! `/v1/run`: a sandbox for one command.

use axum::Json;
use axum::extract::State;
use tokio::sync::oneshot;
use warren::{AcquireOptions, SandboxError, SandboxSelectionOptions};

use super::sandboxes::{Ground, checked, ground, run_in};
use super::wire::{CreateSandboxBody, ExecView, RunBody};
use crate::Api;
use crate::error::{ApiError, ErrorBody};
use crate::extract::Body;
use crate::principal::Principal;

/// Runs a command to its end in a sandbox of its own, which ends with it.
///
/// One request instead of three, and the caller does not wait for the end of the sandbox. Hanging up
/// ends the command and the sandbox.
#[utoipa::path(
    post,
    path = "/v1/run",
    tag = "sandboxes",
    request_body = RunBody,
    responses(
        (status = 200, description = "It ran, whatever its exit code.", body = ExecView),
        (status = 400, body = ErrorBody),
        (status = 403, description = "Only the operator may ask for that.", body = ErrorBody),
        (status = 422, description = "Nothing can give what was asked.", body = ErrorBody),
        (status = 429, description = "A quota is used up.", body = ErrorBody),
        (status = 503, description = "As many sandboxes live as may.", body = ErrorBody),
    )
)]
pub(crate) async fn run(
    State(api): State<Api>,
    who: Principal,
    body: Body<RunBody>,
) -> Result<Json<ExecView>, ApiError> {
    let RunBody { command, sandbox: asked } = body.value;
    let command = command.command()?;
    let (mut spec, select) = (checked(&who, &asked)?, selection(&asked)?);
    let isolation = asked.isolation()?;
    let Ground { base, defaults, held } = ground(&api, &who, &asked, &mut spec).await?;
    let options = AcquireOptions { select, base, isolation };
    let (mut sender, answer) = oneshot::channel();
    let this = api.clone();
    // A task of its own: whoever hangs up leaves nothing behind.
    api.0.tasks.spawn(async move {
        let (session, sandbox) = match this.acquire_with(&who, &spec, &options).await {
            Ok(acquired) => acquired,
            Err(error) => return drop(sender.send(Err(error))),
        };
        drop(held);
        let work = async {
            if asked.verify {
                this.manager().verify(sandbox.id()).await?;
            }
            this.begin(&who, &*sandbox, &defaults).await?;
            run_in(&this, &who, &*sandbox, &command).await
        };
        let ran = tokio::select! {
            ran = work => Some(ran),
            () = sender.closed() => None,
        };
        if let Some(ran) = ran {
            // Who has hung up by now does not hear of it.
            let _ = sender.send(ran);
        }
        this.undo(&session).await;
    });
    let answer = answer.await.map_err(|_| ApiError::internal("the work was given up"))?;
    answer.map(Json)
}

/// Returns which sandbox may be taken: one that is nobody's and that nothing has run in.
fn selection(asked: &CreateSandboxBody) -> Result<SandboxSelectionOptions, ApiError> {
    let refuse = |field, reason| {
        let hint = "create a sandbox to use it more than once: POST /v1/sandboxes";
        Err(SandboxError::invalid(field, reason, hint).into())
    };
    if asked.name.is_some() || asked.labels.contains_key(super::wire::NAME_LABEL) {
        return refuse("sandbox.name", "what ends with its command cannot be called by a name");
    }
    if asked.select.preferred_id.is_some() {
        return refuse("sandbox.select.preferred_id", "the sandbox is always a new one");
    }
    let options = asked.options()?;
    Ok(SandboxSelectionOptions { require_fresh: true, use_pool: true, ..options })
}
