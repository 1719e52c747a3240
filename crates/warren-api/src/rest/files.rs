//! `/v1/sandboxes/{id}/files`: the files of a sandbox.
//!
//! Bytes stream both ways and are never held whole. A path is a parameter of the query, where any
//! byte can be written as `%XX`; in answers, a path that is no UTF-8 comes in base64 as well.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use chrono::{DateTime, Utc};
use futures_util::{Stream, StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, mpsc};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use warren::{
    FileChange, FileContents, FileEntry, FileSource, FileStream, ListItem, ListOptions,
    RenameOptions, Sandbox, SandboxError, SandboxFiles, SandboxId, WriteMode, WriteOptions,
};

use crate::Api;
use crate::error::{ApiError, ErrorBody};
use crate::extract::Id;
use crate::principal::Principal;

/// How long a client may neither send nor take anything.
const IDLE: Duration = Duration::from_secs(60);
/// How long a refused upload is still read, so that its sender gets to see the answer.
const LEFTOVERS: Duration = Duration::from_secs(5);
/// How often a watch says that it is there.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
const MAX_LIST: u32 = 1_000_000;

pub(super) fn router() -> OpenApiRouter<Api> {
    OpenApiRouter::new()
        .routes(routes!(read, write, append, remove))
        .routes(routes!(stat))
        .routes(routes!(list))
        .routes(routes!(make_directory))
        .routes(routes!(rename))
        .routes(routes!(watch))
        .routes(routes!(export, import))
}

/// What is at a path of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileEntryView {
    /// Its path: as it was asked for, or relative to the directory that is listed.
    pub path: String,
    /// The same in base64, if it is no UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// What it is: file, directory, link, fifo, socket or device.
    pub kind: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its permissions, in octal.
    #[schema(example = "0644")]
    pub mode: String,
    /// Its owner, inside.
    pub uid: u32,
    /// Its group, inside.
    pub gid: u32,
    /// How many names it has.
    pub links: u64,
    /// When its contents changed.
    pub modified_at: DateTime<Utc>,
    /// When it was read.
    pub accessed_at: DateTime<Utc>,
    /// When anything about it changed.
    pub changed_at: DateTime<Utc>,
    /// Where a link leads, as it is written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The same in base64, if it is no UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_base64: Option<String>,
    /// Where a link ends; absent in lists, and if it ends nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resolved: Option<String>,
    /// What is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resolved_kind: Option<String>,
}

impl From<FileEntry> for FileEntryView {
    fn from(entry: FileEntry) -> Self {
        let (path, path_base64) = shown(&entry.path);
        let target = entry.target.as_deref().map(shown);
        let resolved = entry.resolved.map(|(path, kind, _)| (shown(&path).0, kind.name()));
        Self {
            path,
            path_base64,
            kind: entry.kind.name().to_owned(),
            size: entry.size,
            mode: format!("{:04o}", entry.mode),
            uid: entry.uid,
            gid: entry.gid,
            links: entry.links,
            modified_at: entry.modified,
            accessed_at: entry.accessed,
            changed_at: entry.changed,
            target: target.as_ref().map(|(text, _)| text.clone()),
            target_base64: target.and_then(|(_, exact)| exact),
            resolved: resolved.as_ref().map(|(path, _)| path.clone()),
            resolved_kind: resolved.map(|(_, kind)| kind.to_owned()),
        }
    }
}

/// What is in a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileListView {
    /// The entries, in no order.
    pub entries: Vec<FileEntryView>,
    /// Whether there is more than was asked for.
    pub truncated: bool,
}

/// Something that happened in a directory that is watched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileChangeView {
    /// What: create, write, remove, rename, chmod, or lost for what is not told.
    pub kind: String,
    /// To what: relative to the directory that is watched, empty for itself.
    pub path: String,
    /// The same in base64, if it is no UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// Whether that is a directory.
    pub directory: bool,
}

impl From<FileChange> for FileChangeView {
    fn from(change: FileChange) -> Self {
        let (path, path_base64) = shown(&change.path);
        Self { kind: change.kind.name().to_owned(), path, path_base64, directory: change.directory }
    }
}

/// What was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemovedView {
    /// How many files, directories and links.
    pub entries: u64,
}

/// What was unpacked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TreeView {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes in files.
    pub bytes: u64,
}

/// Shows a path as text, and exactly where the text would not be exact.
fn shown(path: &Path) -> (String, Option<String>) {
    let bytes = path.as_os_str().as_bytes();
    let exact = std::str::from_utf8(bytes).is_err().then(|| BASE64.encode(bytes));
    (path.display().to_string(), exact)
}

/// The parameters of a query, each used up by asking for it. Values are bytes.
#[derive(Debug)]
pub(crate) struct FileQuery(Vec<(String, Vec<u8>)>);

impl<S: Send + Sync> FromRequestParts<S> for FileQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Self::parse(parts.uri.query().unwrap_or_default())
    }
}

impl FileQuery {
    fn parse(query: &str) -> Result<Self, ApiError> {
        let pair = |part: &str| {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let name = String::from_utf8(unescaped(name)?).ok()?;
            Some((name, unescaped(value)?))
        };
        let parts = query.split('&').filter(|part| !part.is_empty());
        parts.map(pair).collect::<Option<_>>().map(Self).ok_or_else(|| {
            ApiError::invalid_query("the query cannot be read", "write it as a=b&c=%20d")
        })
    }

    fn one(&mut self, name: &str) -> Result<Option<Vec<u8>>, ApiError> {
        let mut values = self.0.extract_if(.., |(key, _)| key == name);
        let value = values.next().map(|(_, value)| value);
        if values.next().is_some() {
            return Err(ApiError::invalid_query(
                format!("`{name}` is given twice"),
                "give it once",
            ));
        }
        Ok(value)
    }

    fn path(&mut self, name: &str) -> Result<PathBuf, ApiError> {
        let hint = "write it as path=/workspace/file";
        match self.one(name)? {
            Some(bytes) => Ok(OsString::from_vec(bytes).into()),
            None => Err(ApiError::invalid_query(format!("there is no `{name}`"), hint)),
        }
    }

    fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.one(name)?.as_deref() {
            None | Some(b"false") => Ok(false),
            Some(b"true") => Ok(true),
            Some(_) => Err(ApiError::invalid_query(
                format!("`{name}` is neither true nor false"),
                "write true or false",
            )),
        }
    }

    fn number(&mut self, name: &str, radix: u32) -> Result<Option<u32>, ApiError> {
        let Some(bytes) = self.one(name)? else { return Ok(None) };
        let text = std::str::from_utf8(&bytes).ok();
        let number = text.and_then(|text| u32::from_str_radix(text, radix).ok());
        number.map(Some).ok_or_else(|| {
            let hint = if radix == 8 { "write it in octal, as in 0644" } else { "write a number" };
            ApiError::invalid_query(format!("`{name}` is no number"), hint)
        })
    }

    fn mode(&mut self) -> Result<Option<u32>, ApiError> {
        match self.number("mode", 8)? {
            Some(mode) if mode > 0o1777 => Err(ApiError::invalid_query(
                "`mode` has bits that cannot be set",
                "up to 1777 in octal; never set-uid or set-gid",
            )),
            mode => Ok(mode),
        }
    }

    /// Refuses what nobody asked for.
    fn end(self) -> Result<(), ApiError> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::invalid_query(
                format!("there is no parameter `{}`", name.escape_debug()),
                "docs/openapi.json lists the parameters",
            )),
        }
    }
}

/// Undoes the escapes of a query, into bytes.
fn unescaped(text: &str) -> Option<Vec<u8>> {
    let mut bytes = text.bytes();
    let mut plain = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        plain.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                let (high, low) = (digit(bytes.next()?)?, digit(bytes.next()?)?);
                u8::try_from(high * 16 + low).ok()?
            }
            byte => byte,
        });
    }
    Some(plain)
}

/// A sandbox whose files the caller may use.
async fn sandbox(api: &Api, who: &Principal, id: &SandboxId) -> Result<Arc<dyn Sandbox>, ApiError> {
    Ok(api.sandbox(who, id).await?.0)
}

fn files(sandbox: &dyn Sandbox) -> Result<&dyn SandboxFiles, ApiError> {
    sandbox.files().ok_or_else(|| {
        ApiError::from(SandboxError::Unsupported {
            feature: "files".to_owned(),
            backend: sandbox.capabilities().backend.clone(),
            hint: "run a command that reads or writes them".to_owned(),
        })
    })
}

/// Hands a stream to a client that may be slow, and ends it if the client stands still.
fn streamed<T: Send + 'static, S: Stream<Item = T> + Send + Unpin + 'static>(
    api: &Api,
    mut from: S,
) -> impl Stream<Item = T> + Send + use<T, S> {
    let (sender, receiver) = mpsc::channel(1);
    let stop = api.0.stop.clone();
    api.0.tasks.spawn(async move {
        loop {
            let item = tokio::select! {
                biased;
                () = sender.closed() => return,
                () = stop.cancelled() => return,
                item = from.next() => item,
            };
            let Some(item) = item else { return };
            if !matches!(tokio::time::timeout(IDLE, sender.send(item)).await, Ok(Ok(()))) {
                return;
            }
        }
    });
    stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)))
}

/// Makes a body of bytes that come from a sandbox. An error in it breaks the connection off, so that
/// nobody takes a part for the whole.
fn body(api: &Api, data: FileStream<Vec<u8>>) -> Body {
    // One that is given up ends without its last word, which must not look like an end.
    let data = data.map(Some).chain(stream::once(async { None }));
    let whole = streamed(api, Box::pin(data));
    Body::from_stream(stream::unfold(Some(Box::pin(whole)), async |state| {
        let mut whole = state?;
        match whole.next().await {
            Some(Some(Ok(chunk))) => Some((Ok(Bytes::from(chunk)), Some(whole))),
            Some(Some(Err(error))) => {
                tracing::info!(code = error.code(), "a download broke off");
                Some((Err(std::io::Error::other(error)), None))
            }
            Some(None) => None,
            None => Some((Err(std::io::ErrorKind::TimedOut.into()), None)),
        }
    }))
}

/// The body of an upload.
struct Upload(Arc<Mutex<BodyDataStream>>);

impl Upload {
    fn new(body: Body) -> Self {
        Self(Arc::new(Mutex::new(body.into_data_stream())))
    }

    fn source(&self) -> FileSource {
        Box::pin(stream::unfold(Some(Arc::clone(&self.0)), async |state| {
            let body = state?;
            let next = tokio::time::timeout(IDLE, async { body.lock().await.next().await }).await;
            match next {
                Ok(Some(Ok(chunk))) => Some((Ok(chunk.into()), Some(body))),
                Ok(Some(Err(error))) => Some((Err(std::io::Error::other(error)), None)),
                Ok(None) => None,
                Err(_) => Some((Err(std::io::ErrorKind::TimedOut.into()), None)),
            }
        }))
    }

    /// Reads on for a while what is no longer wanted: whoever sends it reads the answer only then.
    async fn answer<T>(self, result: Result<T, SandboxError>) -> Result<T, ApiError> {
        if result.is_err() {
            let rest = async {
                let mut body = self.0.lock().await;
                while let Some(Ok(_)) = body.next().await {}
            };
            let _ = tokio::time::timeout(LEFTOVERS, rest).await;
        }
        result.map_err(ApiError::from)
    }
}

/// Which part of a file is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Range {
    Whole,
    From { first: u64, length: Option<u64> },
    Last(u64),
}

/// Understands a `Range` header; whatever is not one plain range means the whole file.
fn range(headers: &HeaderMap) -> Range {
    let given = headers.get(header::RANGE).and_then(|value| value.to_str().ok());
    let Some((first, last)) = given
        .and_then(|text| text.strip_prefix("bytes="))
        .and_then(|text| text.trim().split_once('-'))
    else {
        return Range::Whole;
    };
    match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) if first <= last => {
            Range::From { first, length: (last - first).checked_add(1) }
        }
        (Ok(first), Err(_)) if last.is_empty() => Range::From { first, length: None },
        (Err(_), Ok(last)) if first.is_empty() => Range::Last(last),
        _ => Range::Whole,
    }
}

/// Reads a file, or a part of it.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/files",
    tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("path" = String, Query, description = "The file; absolute, inside the sandbox."),
        ("Range" = Option<String>, Header, description = "One range of bytes: `bytes=0-99`."),
    ),
    responses(
        (status = 200, description = "The bytes.", content_type = "application/octet-stream", body = String),
        (status = 206, description = "The part.", content_type = "application/octet-stream", body = String),
        (status = 404, body = ErrorBody),
        (status = 409, description = "The sandbox is suspended.", body = ErrorBody),
        (status = 416, description = "It has no such part.", body = ErrorBody),
        (status = 422, description = "It is no regular file.", body = ErrorBody),
    )
)]
pub(crate) async fn read(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut query: FileQuery,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let path = query.path("path")?;
    query.end()?;
    let sandbox = sandbox(&api, &who, &id).await?;
    let files = files(&*sandbox)?;
    let (first, length) = match range(&headers) {
        Range::Whole => (0, None),
        Range::From { first, length } => (first, length),
        Range::Last(length) => {
            let size = files.read(&path, 0, Some(0)).await?.entry.size;
            (size.saturating_sub(length), Some(length))
        }
    };
    let mut contents = files.read(&path, first, length).await?;
    let size = contents.entry.size;
    let mut partial = range(&headers) != Range::Whole;
    if partial && size == 0 {
        // Its size is not known, or it has none: a part of it means nothing.
        (contents, partial) = (files.read(&path, 0, None).await?, false);
    }
    if partial && first >= size {
        let error = ApiError::new(
            StatusCode::RANGE_NOT_SATISFIABLE,
            "no_range",
            format!("the file has {size} bytes"),
        );
        let mut response = error.with_hint("ask for a part that is there").into_response();
        if let Ok(value) = HeaderValue::try_from(format!("bytes */{size}")) {
            response.headers_mut().insert(header::CONTENT_RANGE, value);
        }
        return Ok(response);
    }
    let FileContents { length, data, .. } = contents;
    let mut response = binary(&api, data, "application/octet-stream");
    let headers = response.headers_mut();
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Some(length) = length {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
        let last = first + length.saturating_sub(1);
        let part = HeaderValue::try_from(format!("bytes {first}-{last}/{size}"));
        if let (true, Ok(part)) = (partial, part) {
            headers.insert(header::CONTENT_RANGE, part);
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        }
    }
    Ok(response)
}

/// Answers with what an untrusted sandbox wrote: never to be shown by a browser as a page of ours.
fn binary(api: &Api, data: FileStream<Vec<u8>>, kind: &'static str) -> Response {
    let mut response = Response::new(body(api, data));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    response
}

/// Writes a file: whole when all has arrived, or not at all.
#[utoipa::path(
    put,
    path = "/v1/sandboxes/{id}/files",
    tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("path" = String, Query, description = "The file; links are followed, inside."),
        ("mode" = Option<String>, Query, description = "Its permissions, in octal; never set-uid."),
        ("parents" = Option<bool>, Query, description = "Make the directories on the way."),
        ("exclusive" = Option<bool>, Query, description = "Fail if there is something already."),
        ("in_place" = Option<bool>, Query, description = "Write into the file that is there, as bytes come."),
    ),
    request_body(content = String, content_type = "application/octet-stream"),
    responses(
        (status = 200, body = FileEntryView),
        (status = 400, description = "The path is none, or the body was cut off.", body = ErrorBody),
        (status = 403, description = "The sandbox's user may not.", body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, description = "There is something already, or the sandbox is suspended.", body = ErrorBody),
        (status = 422, description = "A directory, FIFO, device or socket is there.", body = ErrorBody),
        (status = 507, description = "The sandbox's disk is full; what was there still is.", body = ErrorBody),
    )
)]
pub(crate) async fn write(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut query: FileQuery,
    body: Body,
) -> Result<Json<FileEntryView>, ApiError> {
    let how = match (query.flag("exclusive")?, query.flag("in_place")?) {
        (false, false) => WriteMode::Replace,
        (true, false) => WriteMode::New,
        (false, true) => WriteMode::InPlace,
        (true, true) => {
            let hint = "choose one of them";
            return Err(ApiError::invalid_query("`exclusive` and `in_place` exclude", hint));
        }
    };
    put(&api, &who, &id, query, how, body).await
}

/// Adds to a file, or makes it.
#[utoipa::path(
    patch,
    path = "/v1/sandboxes/{id}/files",
    tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("path" = String, Query, description = "The file; links are followed, inside."),
        ("mode" = Option<String>, Query, description = "Its permissions, in octal; never set-uid."),
        ("parents" = Option<bool>, Query, description = "Make the directories on the way."),
    ),
    request_body(content = String, content_type = "application/octet-stream"),
    responses(
        (status = 200, body = FileEntryView),
        (status = 404, body = ErrorBody),
        (status = 422, description = "A directory, FIFO, device or socket is there.", body = ErrorBody),
        (status = 507, description = "The disk is full; what fitted is there.", body = ErrorBody),
    )
)]
pub(crate) async fn append(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    query: FileQuery,
    body: Body,
) -> Result<Json<FileEntryView>, ApiError> {
    put(&api, &who, &id, query, WriteMode::Append, body).await
}

async fn put(
    api: &Api,
    who: &Principal,
    id: &SandboxId,
    mut query: FileQuery,
    how: WriteMode,
    body: Body,
) -> Result<Json<FileEntryView>, ApiError> {
    let path = query.path("path")?;
    let options = WriteOptions { how, mode: query.mode()?, parents: query.flag("parents")? };
    query.end()?;
    let sandbox = sandbox(api, who, id).await?;
    let upload = Upload::new(body);
    let written = files(&*sandbox)?.write(&path, options, upload.source()).await;
    upload.answer(written).await.map(|entry| Json(entry.into()))
}

/// Removes a file, a link or a directory. No link is followed.
#[utoipa::path(
    delete,
    path = "/v1/sandboxes/{id}/files",
    tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("path" = String, Query, description = "What to remove."),
        ("recursive" = Option<bool>, Query, description = "With all that is in it."),
    ),
    responses(
        (status = 200, body = RemovedView),
        (status = 404, body = ErrorBody),
        (status = 409, description = "It is not empty.", body = ErrorBody),
    )
)]
pub(crate) async fn remove(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut query: FileQuery,
) -> Result<Json<RemovedView>, ApiError> {
    let (path, recursive) = (query.path("path")?, query.flag("recursive")?);
    query.end()?;
    let sandbox = sandbox(&api, &who, &id).await?;
    let entries = files(&*sandbox)?.remove(&path, recursive).await?;
    Ok(Json(RemovedView { entries }))
}

/// Says what is at a path. A link is not followed.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/files/stat",
    tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("path" = String, Query, description = "The path."),
    ),
    responses((status = 200, body = FileEntryView), (status = 404, body = ErrorBody))
)]
pub(crate) async fn stat(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut query: FileQuery,
) -> Result<Json<FileEntryView>, ApiError> {
    let path = query.path("path")?;
    query.end()?;
    let sandbox = sandbox(&api, &who, &id).await?;
    Ok(Json(files(&*sandbox)?.stat(&path).await?.into()))
}

/// Lists a directory, as it is read: the answer streams.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/files/list",
    tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("path" = String, Query, description = "The directory."),
        ("depth" = Option<u16>, Query, description = "How deep, 1 to 64; 1 if absent."),
        ("limit" = Option<u32>, Query, description = "How many entries, up to 1000000; 100000 if absent."),
    ),
    responses(
        (status = 200, body = FileListView),
        (status = 404, body = ErrorBody),
        (status = 422, description = "It is no directory.", body = ErrorBody),
    )
)]
pub(crate) async fn list(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut query: FileQuery,
) -> Result<Response, ApiError> {
    let path = query.path("path")?;
    let depth = query.number("depth", 10)?.unwrap_or(1);
    let limit = query.number("limit", 10)?.unwrap_or(ListOptions::default().limit);
    query.end()?;
    let depth = u16::try_from(depth).ok().filter(|depth| (1..=64).contains(depth));
    let depth = depth.ok_or_else(|| ApiError::invalid_query("`depth` is none", "1 to 64"))?;
    if limit > MAX_LIST {
        return Err(ApiError::invalid_query("`limit` is too large", "up to 1000000"));
    }
    let sandbox = sandbox(&api, &who, &id).await?;
    let listing = files(&*sandbox)?.list(&path, ListOptions { depth, limit }).await?;
    let mut response = Response::new(body(&api, written_list(listing.items)));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    Ok(response)
}

/// Writes a [`FileListView`] piece by piece.
fn written_list(items: FileStream<ListItem>) -> FileStream<Vec<u8>> {
    // Many at once: a piece for each would be as many writes.
    let items = items.ready_chunks(256);
    Box::pin(stream::try_unfold((Some(items), true), async |(items, first)| {
        let Some(mut items) = items else { return Ok(None) };
        let mut text = if first { b"{\"entries\":[".to_vec() } else { Vec::new() };
        let Some(batch) = items.next().await else { return Ok(None) };
        let mut comma = !first;
        for item in batch {
            match item? {
                ListItem::Entry(entry) => {
                    if comma {
                        text.push(b',');
                    }
                    comma = true;
                    let view = FileEntryView::from(entry);
                    serde_json::to_writer(&mut text, &view)
                        .map_err(|error| SandboxError::Internal { message: error.to_string() })?;
                }
                ListItem::End { truncated } => {
                    text.extend_from_slice(format!("],\"truncated\":{truncated}}}\n").as_bytes());
                    return Ok(Some((text, (None, false))));
                }
            }
        }
        Ok(Some((text, (Some(items), false))))
    }))
}

/// Makes a directory.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/files/mkdir",
    tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("path" = String, Query, description = "The directory."),
        ("mode" = Option<String>, Query, description = "Its permissions, in octal; 0755 if absent."),
        ("parents" = Option<bool>, Query, description = "Make those on the way; one that is there is no error."),
    ),
    responses(
        (status = 200, body = FileEntryView),
        (status = 404, body = ErrorBody),
        (status = 409, description = "There is something already.", body = ErrorBody),
    )
)]
pub(crate) async fn make_directory(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut query: FileQuery,
) -> Result<Json<FileEntryView>, ApiError> {
    let (path, mode, parents) = (query.path("path")?, query.mode()?, query.flag("parents")?);
    query.end()?;
    let sandbox = sandbox(&api, &who, &id).await?;
    Ok(Json(files(&*sandbox)?.make_directory(&path, mode, parents).await?.into()))
}

/// Gives something another name.
#[utoipa::path(
    post,
    path = "/v1/sandboxes/{id}/files/move",
    tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("from" = String, Query, description = "What; a link itself, not what it leads to."),
        ("to" = String, Query, description = "Its new path."),
        ("replace" = Option<bool>, Query, description = "Even if there is something."),
        ("parents" = Option<bool>, Query, description = "Make the directories on the way."),
    ),
    responses(
        (status = 200, body = FileEntryView),
        (status = 404, body = ErrorBody),
        (status = 409, description = "There is something already.", body = ErrorBody),
    )
)]
pub(crate) async fn rename(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut query: FileQuery,
) -> Result<Json<FileEntryView>, ApiError> {
    let (from, to) = (query.path("from")?, query.path("to")?);
    let options =
        RenameOptions { replace: query.flag("replace")?, parents: query.flag("parents")? };
    query.end()?;
    let sandbox = sandbox(&api, &who, &id).await?;
    Ok(Json(files(&*sandbox)?.rename(&from, &to, options).await?.into()))
}

/// Tells what happens in a directory, as Server-Sent Events.
///
/// It is watched when the answer begins. An event `error` ends it and carries the reason.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/files/watch",
    tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("path" = String, Query, description = "The directory."),
        ("recursive" = Option<bool>, Query, description = "With all below it, up to 8192 directories."),
    ),
    responses(
        (status = 200, content_type = "text/event-stream", body = FileChangeView),
        (status = 404, body = ErrorBody),
        (status = 422, description = "It is no directory, or has too many.", body = ErrorBody),
        (status = 429, description = "The sandbox serves as many as it can.", body = ErrorBody),
    )
)]
pub(crate) async fn watch(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut query: FileQuery,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, ApiError> {
    let (path, recursive) = (query.path("path")?, query.flag("recursive")?);
    query.end()?;
    let sandbox = sandbox(&api, &who, &id).await?;
    let changes = files(&*sandbox)?.watch(&path, recursive).await?;
    let events = changes.map(|change| {
        let event = match change {
            Ok(change) => {
                let kind = change.kind.name();
                Event::default().event(kind).json_data(FileChangeView::from(change))
            }
            Err(error) => Event::default().event("error").json_data(ApiError::from(error).body()),
        };
        Ok(event.unwrap_or_default())
    });
    let events = streamed(&api, Box::pin(events));
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

/// Packs a directory, or one file, as a tar archive.
#[utoipa::path(
    get,
    path = "/v1/sandboxes/{id}/files/tar",
    tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("path" = String, Query, description = "The directory; names in the archive are relative to it."),
    ),
    responses(
        (status = 200, description = "A tar archive.", content_type = "application/x-tar", body = String),
        (status = 404, body = ErrorBody),
        (status = 422, description = "It is neither a file nor a directory.", body = ErrorBody),
    )
)]
pub(crate) async fn export(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut query: FileQuery,
) -> Result<Response, ApiError> {
    let path = query.path("path")?;
    query.end()?;
    let sandbox = sandbox(&api, &who, &id).await?;
    let contents = files(&*sandbox)?.export_tar(&path).await?;
    let mut response = binary(&api, contents.data, "application/x-tar");
    let kind = HeaderValue::from_static(contents.entry.kind.name());
    response.headers_mut().insert(KIND_HEADER, kind);
    Ok(response)
}

/// Says whether a tar holds what is in a `directory`, or one `file`.
pub const KIND_HEADER: &str = "x-warren-kind";

/// Unpacks a tar archive into a directory. Nothing in it gets out of there.
#[utoipa::path(
    put,
    path = "/v1/sandboxes/{id}/files/tar",
    tag = "files",
    params(
        ("id" = String, Path, description = "The sandbox."),
        ("path" = String, Query, description = "The directory."),
        ("parents" = Option<bool>, Query, description = "Make it, and those on the way."),
    ),
    request_body(content = String, content_type = "application/x-tar"),
    responses(
        (status = 200, body = TreeView),
        (status = 404, body = ErrorBody),
        (status = 422, description = "The archive is refused.", body = ErrorBody),
        (status = 507, description = "The disk is full; what fitted is there.", body = ErrorBody),
    )
)]
pub(crate) async fn import(
    State(api): State<Api>,
    who: Principal,
    Id(id): Id,
    mut query: FileQuery,
    body: Body,
) -> Result<Json<TreeView>, ApiError> {
    let (path, parents) = (query.path("path")?, query.flag("parents")?);
    query.end()?;
    let sandbox = sandbox(&api, &who, &id).await?;
    let upload = Upload::new(body);
    let unpacked = files(&*sandbox)?.import_tar(&path, parents, upload.source()).await;
    let done = upload.answer(unpacked).await?;
    Ok(Json(TreeView { entries: done.entries, bytes: done.bytes }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_carries_any_byte() {
        let mut query = FileQuery::parse("path=%2Fw%FF+x%00&parents=true&&mode=0644").unwrap();
        assert_eq!(query.path("path").unwrap().as_os_str().as_bytes(), b"/w\xff x\0");
        assert!(query.flag("parents").unwrap());
        assert_eq!(query.mode().unwrap(), Some(0o644));
        query.end().unwrap();
        for bad in ["path=%2", "path=%zz", "%ff=1"] {
            assert!(FileQuery::parse(bad).is_err(), "{bad}");
        }
        for bad in ["mode=4755", "mode=9", "mode=", "mode=0644&mode=0644"] {
            assert!(FileQuery::parse(bad).unwrap().mode().is_err(), "{bad}");
        }
        assert!(FileQuery::parse("path=/x&paht=/y").unwrap().end().is_err());
    }

    #[test]
    fn a_range_is_understood_or_means_all() {
        for (text, expected) in [
            ("bytes=0-99", Range::From { first: 0, length: Some(100) }),
            ("bytes=5-5", Range::From { first: 5, length: Some(1) }),
            ("bytes=7-", Range::From { first: 7, length: None }),
            ("bytes=-3", Range::Last(3)),
            ("bytes=9-3", Range::Whole),
            ("bytes=0-1,4-5", Range::Whole),
            ("bytes=-", Range::Whole),
            ("lines=1-2", Range::Whole),
            ("bytes=0-18446744073709551615", Range::From { first: 0, length: None }),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::RANGE, HeaderValue::from_static(text));
            assert_eq!(range(&headers), expected, "{text}");
        }
    }
}
