//! `/v1/sandboxes/{id}/execs`: commands that are there on their own, with a log to be read from any
//! offset.
//!
//! A log is read as bytes (`log`), as Server-Sent Events (`stream`), or over a WebSocket that takes
//! input as well (`attach`). All three begin at an offset and end with the exec, so that a reader who
//! lost its connection, or whose daemon was killed, goes on where it was.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::body::{Body as RawBody, Bytes};
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{FromRequestParts, Path, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use chrono::{DateTime, Utc};
use futures_util::Stream;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;
use warren::denial;
use warren::{
    Denial, ExecCause, ExecEnd, ExecId, ExecInfo, ExecInput, ExecOptions, ExecOutput, ExecReport,
    Explain, FoundExec, LogOverflow, LogPiece, LogRead, LogStream, LogWait, Sandbox, SandboxError,
    SandboxId, TerminalSize,
};

use super::wire::{EXPLAIN_LABEL, EXPLAINED, ExecBody, ExecView, UsageView, millis};
use crate::Api;
use crate::audit::noted;
use crate::error::{ApiError, ErrorBody};
use crate::extract::{Body, Id, Parameters, Raw, plain};
use crate::principal::Principal;

/// The most that one piece of a stream carries.
const CHUNK: usize = 256 << 10;
/// The most that is returned of a log at once, and what is if nobody says.
const MAX_LOG: usize = 16 << 20;
const USUAL_LOG: usize = 1 << 20;
/// The longest that one request waits.
const MAX_WAIT: Duration = Duration::from_secs(3600);
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long a reader on a WebSocket may take for one piece before it is let go; it can come back.
const READER_PATIENCE: Duration = Duration::from_secs(60);
/// How large a message on a WebSocket may be.
const MAX_MESSAGE: usize = 1 << 20;

/// Where the log begins that is sent, where it goes on, and what became of it.
const NEXT: &str = "warren-next-offset";
const SKIPPED: &str = "warren-skipped";
const CUT: &str = "warren-cut";
const ENDED: &str = "warren-ended";

/// A command to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartExecBody {
    /// Its name; repeating the same request returns the same run. One is made up if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The command.
    pub command: ExecBody,
    /// Whether it takes input after its `stdin`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub open_stdin: bool,
    /// The size of its terminal, if it is to have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalBody>,
    /// What happens when it writes more than `max_output_bytes`: `end` (it is ended) or `forget` (it
    /// goes on, and the oldest output is forgotten).
    #[serde(default)]
    #[schema(value_type = String)]
    pub overflow: LogOverflow,
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TerminalBody {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

impl From<TerminalBody> for TerminalSize {
    fn from(body: TerminalBody) -> Self {
        Self { rows: body.rows, columns: body.columns }
    }
}

/// A signal to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignalBody {
    /// Its number, 1 to 64.
    pub signal: i32,
}

/// An exec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecInfoView {
    /// Its name.
    pub id: String,
    /// Its program and arguments; a long one is shortened.
    pub command: Vec<String>,
    /// Its pid inside the sandbox, once its program runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Whether it has a terminal.
    pub terminal: bool,
    /// When it was asked for.
    pub started_at: DateTime<Utc>,
    /// How many bytes its log has taken: where the next will be.
    pub logged: u64,
    /// How much input it has taken.
    pub input_taken: u64,
    /// Whether it takes more.
    pub input_open: bool,
    /// How it ended, once it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<ExecEndView>,
}

/// How an exec ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecEndView {
    /// Its exit code, or the one that stands for how it ended.
    pub exit_code: i32,
    /// How it ended.
    #[schema(value_type = Object, example = json!({"kind": "exited", "code": 0}))]
    pub cause: ExecCause,
    /// How long it took.
    pub duration_ms: u64,
    /// What it used.
    pub usage: UsageView,
    /// Processes and threads that were started in the sandbox from its own on, until its end.
    pub tasks_started: u64,
    /// When it was seen to end.
    pub ended_at: DateTime<Utc>,
    /// The limit that ended it, if one did; of one that failed the system calls that were refused to it;
    /// and, with `explain`, whatever else walls refused to it. Each with what would allow it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub denials: Vec<Denial>,
}

impl From<ExecEnd> for ExecEndView {
    fn from(end: ExecEnd) -> Self {
        let ExecEnd { cause, exit_code, duration, usage, tasks_started, ended_at, denials } = end;
        let (duration_ms, usage) = (millis(duration), usage.into());
        Self { exit_code, cause, duration_ms, usage, tasks_started, ended_at, denials }
    }
}

impl From<ExecInfo> for ExecInfoView {
    fn from(info: ExecInfo) -> Self {
        Self {
            id: info.id.0,
            command: info.command,
            pid: info.pid,
            terminal: info.terminal,
            started_at: info.started_at,
            logged: info.logged,
            input_taken: info.input_taken,
            input_open: info.input_open,
            end: info.end.map(Into::into),
        }
    }
}

/// All execs of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecListView {
    /// The oldest first.
    pub items: Vec<ExecInfoView>,
}

/// Bytes of a log, in one event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PieceView {
    /// Where in the log the first of them is.
    pub offset: u64,
    /// They, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// They, in base64, where they are no text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
}

impl PieceView {
    /// Returns the bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let decoded = self.base64.as_ref().and_then(|encoded| BASE64.decode(encoded).ok());
        decoded.unwrap_or_else(|| self.text.clone().unwrap_or_default().into_bytes())
    }
}

/// How much input was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InputView {
    /// The offset of what is wanted next.
    pub taken: u64,
}

/// What is said over a WebSocket beside the bytes.
///
/// Bytes of the log come as binary messages: one byte for the stream (0 stdout, 1 stderr, 2 control),
/// eight for the offset (the highest first), then they. Binary messages of the client are input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AttachText {
    /// To the client: so many bytes were asked for and are forgotten.
    Skipped {
        /// How many.
        bytes: u64,
    },
    /// To the client: it is over, and nothing follows.
    End {
        /// The exec.
        exec: Box<ExecInfoView>,
        /// Whether more was written than the log holds.
        cut: bool,
    },
    /// To the client: what it sent was not taken.
    Refused {
        /// Why.
        error: String,
    },
    /// To the exec: its terminal has another size.
    Resize {
        /// Lines.
        rows: u16,
        /// Characters in a line.
        columns: u16,
    },
    /// To the exec: a signal.
    Signal {
        /// Its number.
        signal: i32,
    },
    /// To the exec: the end of its input.
    EndInput,
}

/// Who may write to which exec: one connection at a time.
#[derive(Debug, Default)]
pub(crate) struct Writers(
    Mutex<HashMap<(SandboxId, ExecId), (u64, CancellationToken)>>,
    Mutex<u64>,
);

/// The right to write to an exec. Dropping it gives it back.
#[derive(Debug)]
struct Turn {
    api: Api,
    key: (SandboxId, ExecId),
    number: u64,
    /// Cancelled when somebody else takes it.
    taken: CancellationToken,
}

impl Writers {
    fn take(api: &Api, key: (SandboxId, ExecId), steal: bool) -> Result<Turn, ApiError> {
        let writers = &api.0.writers;
        let mut held = writers.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, other)) = held.get(&key) {
            if !steal {
                return Err(ApiError::new(
                    StatusCode::CONFLICT,
                    "writer_present",
                    format!("somebody else writes to exec `{}`", key.1),
                )
                .with_hint("watch it, or take over with `steal=true`"));
            }
            other.cancel();
        }
        let mut next = writers.1.lock().unwrap_or_else(PoisonError::into_inner);
        *next += 1;
        let taken = CancellationToken::new();
        held.insert(key.clone(), (*next, taken.clone()));
        Ok(Turn { api: api.clone(), key, number: *next, taken })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut held = self.api.0.writers.0.lock().unwrap_or_else(PoisonError::into_inner);
        if held.get(&self.key).is_some_and(|(number, _)| *number == self.number) {
            held.remove(&self.key);
        }
    }
}

/// An exec that a path names, by its name or by its pid.
pub(crate) struct Named {
    sandbox: SandboxId,
    exec: String,
}

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = Path::<(String, String)>::from_request_parts(parts, state).await;
        let Path((sandbox, exec)) = path.map_err(|_| ApiError::invalid_id("the id is no text"))?;
        Ok(Self { sandbox: plain(sandbox)?, exec })
    }
}

impl Named {
    async fn find(&self, api: &Api, who: &Principal) -> Result<FoundExec, ApiError> {
        let (sandbox, _) = api.sandbox(who, &self.sandbox).await?;
        let id = ExecId(self.exec.clone());
        id.validate().map_err(|error| ApiError::invalid_id(error.to_string()))?;
        if let Some(exec) = sandbox.find_exec(&id).await? {
            return Ok(exec);
        }
        let pid = self.exec.parse::<i32>().ok();
        let all = if pid.is_some() { sandbox.list_execs().await? } else { Vec::new() };
        // A pid is somebody else's once its process is gone.
        let runs = |exec: &&FoundExec| {
            let info = exec.info();
            info.pid == pid && info.end.is_none()
        };
        let found = all.iter().find(runs).cloned();
        found.ok_or_else(|| ApiError::not_found("exec", &self.exec))
    }
}

/// Starts a command that goes on whoever listens.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/execs",
    tag = "execs",
    params(("id" = String, Path, description = "The sandbox.")),
    request_body = StartExecBody,
    responses(
        (status = 201, description = "It runs, or ran already by this name.", body = ExecInfoView),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, description = "The sandbox is suspended, or the name is another command's.", body = ErrorBody),
        (status = 422, description = "It could not be started.", body = ErrorBody),
        (status = 429, description = "A quota is used up.", body = ErrorBody),
    )
)]
pub(crate) async fn start(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    body: Body<StartExecBody>,
) -> Result<(StatusCode, Json<ExecInfoView>), ApiError> {
    let StartExecBody { id: name, command, open_stdin, terminal, overflow } = body.value;
    let options = ExecOptions {
        id: name.map(ExecId),
        input: if open_stdin { ExecInput::Open } else { ExecInput::Closed },
        terminal: terminal.map(Into::into),
        overflow,
        ..ExecOptions::default()
    };
    let exec = begin(&api, &who, &id, command, &options).await?;
    Ok((StatusCode::CREATED, Json(exec.info().into())))
}

/// Says how much is explained of a command: all of it if that was `asked`, or if it was chosen for the daemon or
/// for this sandbox, and can be. What files the host has is for the operator alone, who may show them to
/// sandboxes.
pub(super) fn explain(api: &Api, who: &Principal, sandbox: &dyn Sandbox, asked: bool) -> Explain {
    let chosen = || {
        let labels = api.0.catalog.labels(sandbox.id());
        let here = labels.get(EXPLAIN_LABEL).is_some_and(|said| said == EXPLAINED);
        (here || api.0.options.explain) && denial::can_be_followed(sandbox.capabilities())
    };
    match (asked || chosen(), who.operator) {
        (false, _) => Explain::Nothing,
        (true, false) => Explain::Inside,
        (true, true) => Explain::Host,
    }
}

/// An exec that nobody can ask for again: it ends and is forgotten with whoever waits for it.
struct Passing {
    api: Api,
    exec: FoundExec,
}

impl Drop for Passing {
    fn drop(&mut self) {
        let exec = Arc::clone(&self.exec);
        self.api.0.tasks.spawn(async move {
            let _ = exec.kill().await;
            let _ = exec.wait().await;
            let _ = exec.forget().await;
        });
    }
}

/// Waits for an exec that nobody else knows of, and returns all that it gave.
pub(super) async fn outcome(api: &Api, exec: FoundExec) -> Result<ExecView, ApiError> {
    let passing = Passing { api: api.clone(), exec };
    let exec = &passing.exec;
    let end = exec.wait().await?;
    let (mut stdout, mut stderr, mut at) = (Vec::new(), Vec::new(), 0);
    loop {
        let read = exec.read(at, CHUNK, LogWait::Never).await?;
        for LogPiece { stream, bytes, .. } in read.pieces {
            match stream {
                LogStream::Stdout => stdout.extend_from_slice(&bytes),
                LogStream::Stderr => stderr.extend_from_slice(&bytes),
                LogStream::Control => {}
            }
        }
        if read.ended || read.next == at {
            break;
        }
        at = read.next;
    }
    let ExecEnd { cause, exit_code, duration, usage, denials, .. } = end;
    let output = ExecOutput {
        exit_code,
        stdout,
        stderr,
        duration,
        resource_usage: Some(usage),
        ..ExecOutput::default()
    };
    Ok(ExecView { denials, ..ExecReport::with_exit_code(output, cause).into() })
}

/// Starts an exec, and counts it until it ends.
async fn begin(
    api: &Api,
    who: &Principal,
    id: &SandboxId,
    command: ExecBody,
    options: &ExecOptions,
) -> Result<FoundExec, ApiError> {
    let asked = command.explain;
    let command = command.command()?;
    let (sandbox, _) = api.sandbox(who, id).await?;
    // Named here, so that its end can be told from others in the log.
    let name = options.id.clone().unwrap_or_default();
    let running = api.run_one(who, noted(id, Some(name.as_str()), &command)).await?;
    let explain = explain(api, who, &*sandbox, asked);
    let options = &ExecOptions { id: Some(name), explain, ..options.clone() };
    let exec = sandbox.start_exec(&command, &who.context(), options).await?;
    let (stop, watched) = (api.0.stop.clone(), Arc::clone(&exec));
    api.0.tasks.spawn(async move {
        stop.run_until_cancelled(watched.wait()).await;
        drop(running);
    });
    Ok(exec)
}

/// Lists a sandbox's execs: those that run, and those that ended and are remembered.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/execs",
    tag = "execs",
    params(("id" = String, Path, description = "The sandbox.")),
    responses((status = 200, body = ExecListView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn list(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
) -> Result<Json<ExecListView>, ApiError> {
    let (sandbox, _) = api.sandbox(&who, &id).await?;
    let items = sandbox.list_execs().await?.iter().map(|exec| exec.info().into()).collect();
    Ok(Json(ExecListView { items }))
}

/// Shows an exec.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/execs/{exec}",
    tag = "execs",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("exec" = String, Path, description = "Its name, or the pid of one that runs."),
    ),
    responses((status = 200, body = ExecInfoView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn show(
    State(api): State<Api>,
    who: Principal,
    named: Named,
) -> Result<Json<ExecInfoView>, ApiError> {
    Ok(Json(named.find(&api, &who).await?.info().into()))
}

/// Forgets an exec that has ended, with its log.
#[utoipa::path(
    delete,
    path = "/v1/sandboxes/{id}/execs/{exec}",
    tag = "execs",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("exec" = String, Path, description = "Its name."),
    ),
    responses(
        (status = 204, description = "It is forgotten."),
        (status = 404, body = ErrorBody),
        (status = 409, description = "It still runs.", body = ErrorBody),
    )
)]
pub(crate) async fn forget(
    State(api): State<Api>,
    who: Principal,
    named: Named,
) -> Result<StatusCode, ApiError> {
    named.find(&api, &who).await?.forget().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Waits until an exec has ended, or for a time.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/execs/{exec}/wait",
    tag = "execs",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("exec" = String, Path, description = "Its name, or the pid of one that runs."),
        ("timeout_ms" = Option<u64>, Query, description = "How long to wait; an hour at most."),
    ),
    responses(
        (status = 200, description = "`end` says how it ended, if it has.", body = ExecInfoView),
        (status = 404, body = ErrorBody),
    )
)]
pub(crate) async fn wait(
    State(api): State<Api>,
    who: Principal,
    named: Named,
    mut parameters: Parameters,
) -> Result<Json<ExecInfoView>, ApiError> {
    let patience = number(&mut parameters, "timeout_ms")?.map(Duration::from_millis);
    parameters.end()?;
    let exec = named.find(&api, &who).await?;
    let waited = tokio::time::timeout(patience.unwrap_or(MAX_WAIT).min(MAX_WAIT), exec.wait());
    match api.0.stop.run_until_cancelled(waited).await {
        Some(Ok(Err(error))) => Err(error.into()),
        Some(Ok(Ok(_)) | Err(_)) | None => Ok(Json(exec.info().into())),
    }
}

fn number(parameters: &mut Parameters, name: &str) -> Result<Option<u64>, ApiError> {
    let Some(text) = parameters.one(name)? else { return Ok(None) };
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| plain);
    let bad = || ApiError::invalid_query(format!("`{name}` is no number"), "digits alone");
    number.ok_or_else(bad).map(Some)
}

fn flag(parameters: &mut Parameters, name: &str) -> Result<bool, ApiError> {
    match parameters.one(name)?.as_deref() {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => {
            Err(ApiError::invalid_query(format!("`{name}` is neither"), "`true` or `false`"))
        }
    }
}

/// Sends a signal to an exec's process group.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/execs/{exec}/signal",
    tag = "execs",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("exec" = String, Path, description = "Its name, or the pid of one that runs."),
    ),
    request_body = SignalBody,
    responses(
        (status = 204, description = "It was sent, unless the exec has ended."),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
    )
)]
pub(crate) async fn signal(
    State(api): State<Api>,
    who: Principal,
    named: Named,
    body: Body<SignalBody>,
) -> Result<StatusCode, ApiError> {
    named.find(&api, &who).await?.signal(body.value.signal).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Ends an exec and everything it started.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/execs/{exec}/kill",
    tag = "execs",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("exec" = String, Path, description = "Its name, or the pid of one that runs."),
    ),
    responses(
        (status = 204, description = "It is being ended; `wait` says when it is over."),
        (status = 404, body = ErrorBody),
    )
)]
pub(crate) async fn kill(
    State(api): State<Api>,
    who: Principal,
    named: Named,
) -> Result<StatusCode, ApiError> {
    named.find(&api, &who).await?.kill().await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Gives an exec's terminal another size.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/execs/{exec}/resize",
    tag = "execs",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("exec" = String, Path, description = "Its name, or the pid of one that runs."),
    ),
    request_body = TerminalBody,
    responses((status = 204, description = "It has."), (status = 404, body = ErrorBody))
)]
pub(crate) async fn resize(
    State(api): State<Api>,
    who: Principal,
    named: Named,
    body: Body<TerminalBody>,
) -> Result<StatusCode, ApiError> {
    named.find(&api, &who).await?.resize(body.value.into()).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Gives an exec input, as bytes. With an offset, repeating is safe.
#[utoipa::path(
    put,
    path = "/v1/sandboxes/{id}/execs/{exec}/stdin",
    tag = "execs",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("exec" = String, Path, description = "Its name, or the pid of one that runs."),
        ("offset" = Option<u64>, Query, description = "Where in its input these bytes are."),
        ("end" = Option<bool>, Query, description = "Whether nothing follows."),
    ),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses(
        (status = 200, description = "They are taken.", body = InputView),
        (status = 404, body = ErrorBody),
        (status = 409, description = "It reads no more, or some are missing.", body = ErrorBody),
        (status = 413, body = ErrorBody),
    )
)]
pub(crate) async fn write(
    State(api): State<Api>,
    who: Principal,
    named: Named,
    mut parameters: Parameters,
    Raw(bytes): Raw,
) -> Result<Json<InputView>, ApiError> {
    let (offset, end) = (number(&mut parameters, "offset")?, flag(&mut parameters, "end")?);
    parameters.end()?;
    let exec = named.find(&api, &who).await?;
    // A command that does not read keeps whoever writes waiting, but not for ever.
    let write = tokio::time::timeout(MAX_WAIT, exec.write_input(offset, &bytes, end));
    let taken = write.await.map_err(|_| ApiError::request_timeout())??;
    Ok(Json(InputView { taken }))
}

/// Which of the streams are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    All,
    One(LogStream),
}

impl Wanted {
    fn parse(parameters: &mut Parameters) -> Result<Self, ApiError> {
        Ok(match parameters.one("stream")?.as_deref() {
            None | Some("all") => Self::All,
            Some("stdout") => Self::One(LogStream::Stdout),
            Some("stderr") => Self::One(LogStream::Stderr),
            Some("control") => Self::One(LogStream::Control),
            Some(_) => {
                let hint = "`all`, `stdout`, `stderr` or `control`";
                return Err(ApiError::invalid_query("there is no such stream", hint));
            }
        })
    }

    fn has(self, stream: LogStream) -> bool {
        match self {
            Self::All => stream != LogStream::Control,
            Self::One(one) => one == stream,
        }
    }
}

/// Reads an exec's log, as bytes.
///
/// Without `follow` the headers say where to go on (`Warren-Next-Offset`), how much was forgotten
/// (`Warren-Skipped`), whether the log was cut (`Warren-Cut`) and whether this is its end
/// (`Warren-Ended`). With it the answer goes on until the exec has ended.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/execs/{exec}/log",
    tag = "execs",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("exec" = String, Path, description = "Its name, or the pid of one that runs."),
        ("offset" = Option<u64>, Query, description = "Where to begin."),
        ("limit" = Option<u64>, Query, description = "How many bytes at most, without `follow`."),
        ("stream" = Option<String>, Query, description = "`all`, `stdout`, `stderr` or `control`."),
        ("follow" = Option<bool>, Query, description = "Whether to go on until it has ended."),
    ),
    responses(
        (status = 200, content_type = "application/octet-stream", body = Vec<u8>),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
    )
)]
pub(crate) async fn log(
    State(api): State<Api>,
    who: Principal,
    named: Named,
    mut parameters: Parameters,
) -> Result<Response, ApiError> {
    let offset = number(&mut parameters, "offset")?.unwrap_or(0);
    let limit = number(&mut parameters, "limit")?;
    let (wanted, follow) = (Wanted::parse(&mut parameters)?, flag(&mut parameters, "follow")?);
    parameters.end()?;
    let exec = named.find(&api, &who).await?;
    let kind = [(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"))];
    if follow {
        let state = Some((exec, offset, api.0.stop.clone()));
        let pieces = futures_util::stream::unfold(state, move |state| async move {
            let (exec, offset, stop) = state?;
            let read = exec.read(offset, CHUNK, LogWait::More);
            let read = stop.run_until_cancelled(read).await?;
            Some(match read {
                Ok(read) => {
                    let next = (!read.ended).then_some((exec, read.next, stop));
                    (Ok(joined(read.pieces, wanted)), next)
                }
                // The answer is broken off: there is no other way to say that it is not whole.
                Err(error) => (Err(error), None),
            })
        });
        return Ok((kind, RawBody::from_stream(pieces)).into_response());
    }
    let most = limit.map_or(USUAL_LOG, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    let most = most.min(MAX_LOG);
    let (mut bytes, mut left, mut skipped) = (Vec::new(), most, 0);
    let mut last = LogRead { next: offset, ..LogRead::default() };
    while left > 0 && !last.ended {
        let mut read = exec.read(last.next, left, LogWait::Never).await?;
        let pieces = std::mem::take(&mut read.pieces);
        let length: usize = pieces.iter().map(|piece| piece.bytes.len()).sum();
        skipped += read.skipped;
        left -= length.min(left);
        bytes.extend_from_slice(&joined(pieces, wanted));
        last = read;
        if length == 0 {
            break;
        }
    }
    let mut headers = HeaderMap::new();
    let numbers = [(NEXT, last.next), (SKIPPED, skipped)];
    headers.extend(numbers.map(|(name, number)| (header_name(name), HeaderValue::from(number))));
    let flags = [(CUT, last.cut), (ENDED, last.ended)];
    let yes = |flag| HeaderValue::from_static(if flag { "true" } else { "false" });
    headers.extend(flags.map(|(name, flag)| (header_name(name), yes(flag))));
    Ok((kind, headers, bytes).into_response())
}

fn header_name(name: &'static str) -> header::HeaderName {
    header::HeaderName::from_static(name)
}

/// Joins the bytes of the streams that are wanted; those of one piece are not copied.
fn joined(mut pieces: Vec<LogPiece>, wanted: Wanted) -> Bytes {
    pieces.retain(|piece| wanted.has(piece.stream));
    match pieces.len() {
        1 => pieces.remove(0).bytes.into(),
        _ => pieces.into_iter().flat_map(|piece| piece.bytes).collect::<Vec<u8>>().into(),
    }
}

/// Follows an exec's log as Server-Sent Events, from any offset to its end.
///
/// The events are `stdout`, `stderr` and `control`, with the bytes; `skipped`, where some are
/// forgotten; and at last `end`, with the exec. The id of each is the offset to go on from.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/execs/{exec}/stream",
    tag = "execs",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("exec" = String, Path, description = "Its name, or the pid of one that runs."),
        ("offset" = Option<u64>, Query, description = "Where to begin."),
        ("Last-Event-ID" = Option<String>, Header, description = "Go on after this one."),
    ),
    responses(
        (status = 200, content_type = "text/event-stream", body = PieceView),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
    )
)]
pub(crate) async fn stream(
    State(api): State<Api>,
    who: Principal,
    named: Named,
    mut parameters: Parameters,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let asked = number(&mut parameters, "offset")?;
    parameters.end()?;
    let last = headers.get("last-event-id").map(|id| id.to_str().ok()?.parse::<u64>().ok());
    let offset = match last {
        // Whoever comes back by itself does not change its query.
        Some(Some(last)) => last,
        Some(None) => {
            let hint = "send the id of an event as it came";
            return Err(ApiError::invalid_header("`Last-Event-ID` is no offset", hint));
        }
        None => asked.unwrap_or(0),
    };
    let exec = named.find(&api, &who).await?;
    let state = Some((exec, offset, api.0.stop.clone()));
    let events = futures_util::stream::unfold(state, async |state| {
        let (exec, offset, stop) = state?;
        let read = stop.run_until_cancelled(exec.read(offset, CHUNK, LogWait::More)).await?;
        let Ok(read) = read else { return None };
        let (next, ended) = (read.next, read.ended);
        let events = events(&exec, read);
        Some((events, (!ended).then_some((exec, next, stop))))
    });
    let events = futures_util::StreamExt::flat_map(events, futures_util::stream::iter);
    Ok(Sse::new(futures_util::StreamExt::map(events, Ok))
        .keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

fn events(exec: &FoundExec, read: LogRead) -> Vec<Event> {
    let mut events = Vec::new();
    if read.skipped > 0 {
        let said = Event::default().event("skipped");
        events.extend(said.json_data(AttachText::Skipped { bytes: read.skipped }));
    }
    for piece in read.pieces {
        events.extend(event(piece));
    }
    if read.ended {
        let exec = Box::new(exec.info().into());
        let said = Event::default().id(read.next.to_string()).event("end");
        events.extend(said.json_data(AttachText::End { exec, cut: read.cut }));
    }
    events
}

/// Tells bytes of a log.
pub(super) fn event(piece: LogPiece) -> Option<Event> {
    let next = piece.offset + piece.bytes.len() as u64;
    let (text, base64) = match String::from_utf8(piece.bytes) {
        Ok(text) => (Some(text), None),
        Err(error) => (None, Some(BASE64.encode(error.as_bytes()))),
    };
    let view = PieceView { offset: piece.offset, text, base64 };
    let said = Event::default().id(next.to_string()).event(stream_name(piece.stream));
    said.json_data(view).ok()
}

fn stream_name(stream: LogStream) -> &'static str {
    match stream {
        LogStream::Stdout => "stdout",
        LogStream::Stderr => "stderr",
        LogStream::Control => "control",
    }
}

/// Follows an exec's log over a WebSocket, and gives it input.
///
/// Any number may watch; one writes. See [`AttachText`] for what is said.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/execs/{exec}/attach",
    tag = "execs",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("exec" = String, Path, description = "Its name, or the pid of one that runs."),
        ("offset" = Option<u64>, Query, description = "Where to begin."),
        ("write" = Option<bool>, Query, description = "Whether to write to it as well."),
        ("steal" = Option<bool>, Query, description = "Whether to take over from who writes now."),
    ),
    responses(
        (status = 101, description = "Messages follow.", body = AttachText),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, description = "Somebody else writes.", body = ErrorBody),
    )
)]
pub(crate) async fn attach(
    State(api): State<Api>,
    who: Principal,
    named: Named,
    mut parameters: Parameters,
    upgrade: Result<WebSocketUpgrade, axum::extract::ws::rejection::WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let offset = number(&mut parameters, "offset")?.unwrap_or(0);
    let (write, steal) = (flag(&mut parameters, "write")?, flag(&mut parameters, "steal")?);
    parameters.end()?;
    let exec = named.find(&api, &who).await?;
    let upgrade = upgrade.map_err(|_| ApiError::upgrade_required())?;
    let key = (named.sandbox.clone(), exec.id().clone());
    let turn = write.then(|| Writers::take(&api, key, steal)).transpose()?;
    let stop = api.0.stop.clone();
    let upgrade = upgrade.max_message_size(MAX_MESSAGE).max_frame_size(MAX_MESSAGE);
    let followed = who.followed;
    Ok(upgrade.on_upgrade(async move |socket| {
        let _followed = followed;
        stop.run_until_cancelled(converse(socket, exec, offset, turn)).await;
    }))
}

/// Sends what the exec writes and takes what the client says, until one of them is done.
async fn converse(mut socket: WebSocket, exec: FoundExec, mut offset: u64, turn: Option<Turn>) {
    let taken = turn.as_ref().map_or_else(CancellationToken::new, |turn| turn.taken.clone());
    // Input waits for the command to read it, and output must not wait for that.
    let (to_exec, mut inputs) = tokio::sync::mpsc::channel::<Message>(4);
    let writer = Arc::clone(&exec);
    let (refusals, mut refused) = tokio::sync::mpsc::channel::<String>(4);
    let write = async move {
        while let Some(message) = inputs.recv().await {
            if let Err(error) = obey(&writer, message).await
                && refusals.send(error).await.is_err()
            {
                return;
            }
        }
    };
    tokio::pin!(write);
    loop {
        let said = tokio::select! {
            read = exec.read(offset, CHUNK, LogWait::More) => match read {
                Ok(read) => {
                    offset = read.next;
                    tell(&mut socket, &exec, read).await
                }
                Err(error) => refuse(&mut socket, error.to_string()).await.and(None),
            },
            Some(error) = refused.recv() => refuse(&mut socket, error).await,
            () = taken.cancelled() => {
                let _ = refuse(&mut socket, "somebody else writes now".to_owned()).await;
                None
            }
            message = socket.recv() => match message {
                Some(Ok(Message::Close(_)) | Err(_)) | None => {
                    // What it sent before it left is the exec's all the same.
                    drop(to_exec);
                    let rest = tokio::time::timeout(READER_PATIENCE, write);
                    tokio::select! {
                        _ = rest => {}
                        _ = exec.wait() => {}
                    }
                    return;
                }
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => Some(()),
                // Nothing is no input, however often it is sent.
                Some(Ok(Message::Binary(bytes))) if bytes.is_empty() => Some(()),
                Some(Ok(_)) if turn.is_none() => {
                    refuse(&mut socket, "you watch, and do not write".to_owned()).await
                }
                // A client that sends faster than the command reads is not read from meanwhile.
                Some(Ok(message)) => {
                    tokio::select! {
                        sent = to_exec.send(message) => sent.ok(),
                        () = &mut write => None,
                        _ = exec.wait() => Some(()),
                    }
                }
            },
            () = &mut write => None,
        };
        if said.is_none() {
            break;
        }
    }
    let done = axum::extract::ws::CloseFrame { code: close_code::NORMAL, reason: "".into() };
    let close = socket.send(Message::Close(Some(done)));
    let _ = tokio::time::timeout(READER_PATIENCE, close).await;
}

/// Does what a client says; returns why not, if it cannot.
async fn obey(exec: &FoundExec, message: Message) -> Result<(), String> {
    let done = match message {
        Message::Binary(bytes) => exec.write_input(None, &bytes, false).await.map(drop),
        Message::Text(text) => match serde_json::from_str(&text) {
            Ok(AttachText::Resize { rows, columns }) => {
                exec.resize(TerminalSize { rows, columns }).await
            }
            Ok(AttachText::Signal { signal }) => exec.signal(signal).await,
            Ok(AttachText::EndInput) => exec.write_input(None, &[], true).await.map(drop),
            Ok(
                AttachText::Skipped { .. } | AttachText::End { .. } | AttachText::Refused { .. },
            ) => {
                return Err("that is for us to say".to_owned());
            }
            Err(error) => return Err(format!("cannot be understood: {error}")),
        },
        Message::Ping(_) | Message::Pong(_) | Message::Close(_) => Ok(()),
    };
    done.map_err(|error: SandboxError| error.to_string())
}

/// Tells a client what was read; `None` if that was all.
async fn tell(socket: &mut WebSocket, exec: &FoundExec, read: LogRead) -> Option<()> {
    if read.skipped > 0 {
        send_text(socket, &AttachText::Skipped { bytes: read.skipped }).await?;
    }
    for piece in read.pieces {
        let stream = match piece.stream {
            LogStream::Stdout => 0,
            LogStream::Stderr => 1,
            LogStream::Control => 2,
        };
        let head = [&[stream][..], &piece.offset.to_be_bytes()].concat();
        send(socket, Message::Binary([head, piece.bytes].concat().into())).await?;
    }
    if read.ended {
        let exec = Box::new(exec.info().into());
        send_text(socket, &AttachText::End { exec, cut: read.cut }).await?;
        return None;
    }
    Some(())
}

async fn refuse(socket: &mut WebSocket, error: String) -> Option<()> {
    send_text(socket, &AttachText::Refused { error }).await
}

async fn send_text(socket: &mut WebSocket, text: &AttachText) -> Option<()> {
    let text = serde_json::to_string(text).ok()?;
    send(socket, Message::Text(text.into())).await
}

/// Sends one message to a client that reads; one that does not is let go, and can come back.
async fn send(socket: &mut WebSocket, message: Message) -> Option<()> {
    let sent = tokio::time::timeout(READER_PATIENCE, socket.send(message)).await;
    sent.ok()?.ok()
}
