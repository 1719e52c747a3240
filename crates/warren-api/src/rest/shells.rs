//! `/v1/sandboxes/{id}/shells`: commands in one shell that keeps its state.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts as _, Path, Request, State};
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use chrono::{DateTime, Utc};
use futures_util::Stream;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use utoipa::{IntoParams, IntoResponses, ToSchema};
use warren::shell::{Shell, ShellCommand, ShellInfo, ShellOptions, ShellOutput, ShellState};
use warren::{ExecCause, LogPiece, Sandbox, SandboxError, SandboxId};

use super::execs::{self, KEEP_ALIVE, PieceView};
use super::wire::{self, Page};
use crate::Api;
use crate::audit::{self, End, Exec};
use crate::error::{ApiError, ErrorBody};
use crate::extract::{Body, Id, plain};
use crate::principal::Principal;

/// How many pieces of output wait for one who streams.
const PIECES: usize = 16;
/// How long an answer waits for the first of them, so that a refusal still has its own status.
const REFUSAL: Duration = Duration::from_millis(500);

/// A command for a shell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ShellRunBody {
    /// What the shell is to evaluate: anything that could be a script.
    pub command: String,
    /// What it reads from stdin, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    /// What it reads from stdin, in base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin_base64: Option<String>,
    /// How long it may take; the sandbox's own limit holds too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// How much it may write; the sandbox's own limit holds too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_output_bytes: Option<u64>,
    /// Where a shell begins that is new; the sandbox's own directory if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// The environment that a shell begins with that is new, beside the sandbox's own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

/// What a command in a shell gave, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShellRunView {
    /// The status that the shell gave it, or the one that stands for what was done to it.
    pub exit_code: i32,
    /// How it ended: what the kernel counted (`out_of_memory`, `too_many_processes`, `disk_quota`), the
    /// signal that ended the program that failed, or what was done to it (`timed_out`, `output_limit`,
    /// `cpu_time`). `signalled` with signal 2 is a command that was interrupted. Where there is no bash
    /// a signal shows as `exited` with 128 and its number.
    #[schema(value_type = Object, example = json!({"kind": "exited", "code": 0}))]
    pub cause: ExecCause,
    /// What was written to stdout meanwhile, as text.
    pub stdout: String,
    /// The same in base64, where it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_base64: Option<String>,
    /// What was written to stderr meanwhile, as text.
    pub stderr: String,
    /// The same in base64, where it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_base64: Option<String>,
    /// Whether there was more output than was kept.
    pub truncated: bool,
    /// What was used meanwhile.
    pub usage: ShellUsageView,
    /// Where in the log of the exec its output begins.
    pub log_begin: u64,
    /// Where in the log of the exec its output ends.
    pub log_end: u64,
    /// The exec that the shell is.
    pub exec_id: String,
    /// Whether the shell was made for this command, so that it has nothing of earlier ones.
    pub shell_is_new: bool,
    /// Whether the shell ended with this command; the next one gets a new shell.
    pub shell_ended: bool,
}

/// What was used while a command ran, by it and by what earlier ones left running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShellUsageView {
    /// CPU time, user and system.
    pub cpu_time_ms: u64,
    /// Time by the clock.
    pub wall_time_ms: u64,
    /// What was written to stdout and stderr, kept or not.
    pub output_bytes: u64,
    /// The most memory that the sandbox held at once, where that is counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_memory_bytes: Option<u64>,
    /// Bytes read, by whatever call, by the shell and by what it waited for.
    pub bytes_read: u64,
    /// Bytes written in the same way.
    pub bytes_written: u64,
}

/// A shell at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ShellView {
    /// Its name.
    pub name: String,
    /// The exec that it is.
    pub exec_id: String,
    /// Its pid inside the sandbox.
    pub pid: Option<i32>,
    /// When it was made.
    pub started_at: DateTime<Utc>,
    /// How many bytes its log has taken.
    pub logged: u64,
    /// Whether it has ended.
    pub ended: bool,
    /// How, once it has.
    #[schema(value_type = Option<Object>)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<ExecCause>,
}

/// Whether there was something to interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InterruptView {
    /// Whether a command ran, and was stopped.
    pub interrupted: bool,
    /// Whether the shell ended with it.
    pub shell_ended: bool,
}

impl ShellRunBody {
    /// Sets what it reads from stdin, as text where it is text.
    pub fn set_stdin(&mut self, bytes: Vec<u8>) {
        match String::from_utf8(bytes) {
            Ok(text) => self.stdin = Some(text),
            Err(error) => self.stdin_base64 = Some(BASE64.encode(error.into_bytes())),
        }
    }
}

impl From<ShellInfo> for ShellView {
    fn from(info: ShellInfo) -> Self {
        Self {
            name: info.name,
            exec_id: info.exec_id.0,
            pid: info.pid,
            started_at: info.started_at,
            logged: info.logged,
            ended: info.end.is_some(),
            cause: info.end.map(|end| end.cause),
        }
    }
}

impl ShellRunView {
    fn new(output: ShellOutput, shell: &Shell, is_new: bool) -> Self {
        let exact =
            |bytes: &[u8]| std::str::from_utf8(bytes).is_err().then(|| BASE64.encode(bytes));
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            exit_code: output.exit_code,
            cause: output.cause,
            stdout_base64: exact(&output.stdout),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr_base64: exact(&output.stderr),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            truncated: output.truncated,
            usage: ShellUsageView {
                cpu_time_ms: millis(output.usage.cpu_time),
                wall_time_ms: millis(output.usage.wall_time),
                output_bytes: output.usage.output_bytes,
                peak_memory_bytes: output.usage.peak_memory_bytes,
                bytes_read: output.usage.bytes_read,
                bytes_written: output.usage.bytes_written,
            },
            log_begin: output.begin,
            log_end: output.end,
            exec_id: shell.exec().id().0.clone(),
            shell_is_new: is_new,
            shell_ended: output.shell == ShellState::Ended,
        }
    }

    fn without_output(self) -> Self {
        let (stdout, stderr) = (String::new(), String::new());
        Self { stdout, stderr, stdout_base64: None, stderr_base64: None, ..self }
    }

    /// Returns the bytes that were written to stdout and to stderr.
    pub fn bytes(&self) -> (Vec<u8>, Vec<u8>) {
        let exact = |text: &str, encoded: Option<&String>| {
            let decoded = encoded.and_then(|encoded| BASE64.decode(encoded).ok());
            decoded.unwrap_or_else(|| text.as_bytes().to_vec())
        };
        (
            exact(&self.stdout, self.stdout_base64.as_ref()),
            exact(&self.stderr, self.stderr_base64.as_ref()),
        )
    }
}

/// A sandbox and the name of a shell in it, from the path.
type Place = Path<(String, String)>;

async fn sandbox(api: &Api, who: &Principal, id: String) -> Result<Arc<dyn Sandbox>, ApiError> {
    let id: SandboxId = plain(id)?;
    Ok(api.sandbox(who, &id).await?.0)
}

async fn find(api: &Api, who: &Principal, place: Place) -> Result<Arc<Shell>, ApiError> {
    let Path((id, name)) = place;
    let sandbox = sandbox(api, who, id).await?;
    let found = api.0.shells.find(&sandbox, &name).await?;
    found.ok_or_else(|| ApiError::not_found("shell", &name))
}

/// A request to run a command in a shell.
pub(crate) struct RunRequest {
    api: Api,
    who: Principal,
    place: Place,
    body: ShellRunBody,
}

impl FromRequest<Api> for RunRequest {
    type Rejection = ApiError;

    async fn from_request(request: Request, api: &Api) -> Result<Self, ApiError> {
        let (mut parts, body) = request.into_parts();
        let who = Principal::from_request_parts(&mut parts, api).await?;
        let place = Place::from_request_parts(&mut parts, api).await;
        let place = place.map_err(|_| ApiError::invalid_id("the id is no text"))?;
        let Body { value: body, .. } =
            Body::from_request(Request::from_parts(parts, body), api).await?;
        Ok(Self { api: api.clone(), who, place, body })
    }
}

/// Which shell.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "describes the path, which is read by hand")]
struct ShellPlace {
    /// The sandbox.
    id: String,
    /// The shell.
    name: String,
}

/// Why a command may not run.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "describes the answers, which are made by hand")]
enum RunRefusals {
    /// The command makes no sense.
    #[response(status = 400)]
    Invalid(ErrorBody),
    /// There is no such sandbox.
    #[response(status = 404)]
    Unknown(ErrorBody),
    /// Another command runs in the shell, or the sandbox is suspended.
    #[response(status = 409)]
    Busy(ErrorBody),
    /// A quota is used up.
    #[response(status = 429)]
    Quota(ErrorBody),
}

/// Runs a command in a shell that keeps its directory, variables and functions, and makes the shell if
/// there is none. Hanging up leaves the command to run.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/shells/{name}/run",
    tag = "shells",
    params(ShellPlace),
    request_body = ShellRunBody,
    responses(
        (status = 200, description = "It ran, whatever its exit code.", body = ShellRunView),
        RunRefusals,
    )
)]
pub(crate) async fn run(asked: RunRequest) -> Result<Json<ShellRunView>, ApiError> {
    let work = begin(asked, None).await?;
    let ran = work.await.unwrap_or_else(|error| Err(ApiError::internal(&error.to_string())));
    ran.map(Json)
}

/// Has a command run to its end, whoever waits for it: a shell is left as its next caller expects it.
async fn begin(
    asked: RunRequest,
    stream: Option<mpsc::Sender<LogPiece>>,
) -> Result<Work, ApiError> {
    let RunRequest { api, who, place: Path((id, name)), body } = asked;
    let command = ShellCommand {
        command: body.command,
        timeout: body.timeout_ms.map(Duration::from_millis),
        max_output_bytes: body.max_output_bytes,
        stdin: wire::stdin(body.stdin, body.stdin_base64)?,
    };
    command.validate()?;
    let sandbox = sandbox(&api, &who, id).await?;
    let exec = Exec {
        sandbox: sandbox.id().to_string(),
        name: Some(name.clone()),
        workdir: body.workdir.clone(),
        ..Exec::default()
    };
    let exec = exec.command(std::iter::once(command.command.as_str()));
    let exec = exec.variables(body.env.keys().map(String::as_str));
    let running = api.run_one(&who, exec).await?;
    let end = End {
        request: who.note.request(),
        place: audit::Place::new(sandbox.id().as_str(), &who.client_id()),
        name: Some(name.clone()),
        ..End::default()
    };
    let options = ShellOptions {
        name,
        workdir: body.workdir.map(PathBuf::from),
        env: body.env,
        ..ShellOptions::default()
    };
    let this = api.clone();
    Ok(api.0.tasks.spawn(async move {
        let _running = running;
        let ran = async {
            let (shell, is_new) = this.0.shells.open(sandbox, &options).await?;
            let run = async {
                match stream {
                    Some(stream) => shell.run_streaming(&command, stream).await,
                    None => shell.run(&command).await,
                }
            };
            let ran = tokio::select! {
                ran = run => ran?,
                // The daemon ends; the command need not.
                () = this.0.stop.cancelled() => return Err(SandboxError::ShuttingDown),
            };
            Ok((ran, shell, is_new))
        };
        let ran = ran.await;
        this.ended(match &ran {
            Ok((ran, ..)) => End {
                cause: Some(ran.cause.clone()),
                exit_code: Some(ran.exit_code),
                elapsed_ms: Some(wire::millis(ran.usage.wall_time)),
                ..end
            },
            Err(error) => End { code: Some(error.code().to_owned()), ..end },
        })
        .await;
        let (ran, shell, is_new) = ran?;
        Ok(ShellRunView::new(ran, &shell, is_new))
    }))
}

/// A command that runs.
type Work = JoinHandle<Result<ShellRunView, ApiError>>;

/// Runs a command in a shell as `run` does, and sends its output as it comes, as Server-Sent Events.
///
/// The events are `stdout` and `stderr`, with the bytes and their place in the log of the shell's exec,
/// and at last `end`, with what `run` answers but for the output; or `error`, if the shell or its
/// sandbox is lost meanwhile. Hanging up leaves the command to run, and a reader that is too slow for
/// its timeout misses the rest: both can read it in the log.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/shells/{name}/stream",
    tag = "shells",
    params(ShellPlace),
    request_body = ShellRunBody,
    responses(
        (status = 200, content_type = "text/event-stream", body = PieceView),
        RunRefusals,
    )
)]
pub(crate) async fn stream(
    asked: RunRequest,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let (pieces_tx, mut pieces) = mpsc::channel(PIECES);
    let work = begin(asked, Some(pieces_tx)).await?;
    let (first, work) = match tokio::time::timeout(REFUSAL, pieces.recv()).await {
        Ok(Some(piece)) => (execs::event(piece), Some(work)),
        // It is over, or was never begun.
        Ok(None) => {
            let ended = work.await;
            let ended = ended.unwrap_or_else(|error| Err(ApiError::internal(&error.to_string())));
            (end(Ok(ended?)), None)
        }
        Err(_) => (None, Some(work)),
    };
    let rest = futures_util::stream::unfold((pieces, work), async |(mut pieces, work)| {
        let mut work = work?;
        match pieces.recv().await {
            Some(piece) => Some((execs::event(piece), (pieces, Some(work)))),
            None => {
                let ended = (&mut work).await;
                let ended =
                    ended.unwrap_or_else(|error| Err(ApiError::internal(&error.to_string())));
                Some((end(ended), (pieces, None)))
            }
        }
    });
    let events = futures_util::StreamExt::chain(futures_util::stream::iter([first]), rest);
    let events = futures_util::StreamExt::filter_map(events, async |event| event.map(Ok));
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

/// Tells the end of a command whose output was sent.
fn end(ended: Result<ShellRunView, ApiError>) -> Option<Event> {
    match ended {
        Ok(view) => Event::default().event("end").json_data(view.without_output()).ok(),
        Err(error) => Event::default().event("error").json_data(error.body()).ok(),
    }
}

/// Stops the command that runs in a shell and waits until it has; the shell keeps its state.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/shells/{name}/interrupt",
    tag = "shells",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("name" = String, Path, description = "The shell."),
    ),
    responses((status = 200, body = InterruptView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn interrupt(
    State(api): State<Api>,
    who: Principal,
    place: Place,
) -> Result<Json<InterruptView>, ApiError> {
    let shell = find(&api, &who, place).await?;
    let interrupted = shell.interrupt().await?;
    Ok(Json(InterruptView { interrupted, shell_ended: shell.has_ended() }))
}

/// Lists the shells of a sandbox, the oldest first, with those that ended and are remembered.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/shells",
    tag = "shells",
    params(("id" = String, Path, description = "The sandbox.")),
    responses((status = 200, body = Page<ShellView>), (status = 404, body = ErrorBody))
)]
pub(crate) async fn list(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
) -> Result<Json<Page<ShellView>>, ApiError> {
    let (sandbox, _) = api.sandbox(&who, &id).await?;
    let items = Shell::list(&*sandbox).await?.into_iter().map(Into::into).collect();
    Ok(Json(Page { items, next: None }))
}

/// Shows a shell.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/shells/{name}",
    tag = "shells",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("name" = String, Path, description = "The shell."),
    ),
    responses((status = 200, body = ShellView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn show(
    State(api): State<Api>,
    who: Principal,
    place: Place,
) -> Result<Json<ShellView>, ApiError> {
    Ok(Json(find(&api, &who, place).await?.info().into()))
}

/// Ends a shell with everything it started, and removes it with its log.
#[utoipa::path(
    delete,
    path = "/v1/sandboxes/{id}/shells/{name}",
    tag = "shells",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("name" = String, Path, description = "The shell."),
    ),
    responses((status = 204, description = "It is gone."), (status = 404, body = ErrorBody))
)]
pub(crate) async fn close(
    State(api): State<Api>,
    who: Principal,
    place: Place,
) -> Result<StatusCode, ApiError> {
    let shell = find(&api, &who, place).await?;
    api.finish(async move {
        shell.close().await?;
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}
