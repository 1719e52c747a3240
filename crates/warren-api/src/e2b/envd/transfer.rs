//! `/files`: whole files in and out, with the metadata that goes with them.

use std::collections::{BTreeMap, HashSet};
use std::io;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use warren::{
    FileEntry, FileFault, FileSource, SandboxError, SandboxFiles, WriteMode, WriteOptions,
};

use super::encoding::{self, Encoding};
use super::filesystem::{METADATA, metadata};
use super::signature::{Operation, Signed};
use super::{Call, TOKEN};
use crate::e2b::routing::refusal;

/// What the headers that carry metadata begin with.
const HEADER: &str = "x-metadata-";
/// How long a key may be, and all of them with their values and prefixes.
const MAX_KEY: usize = 255 - METADATA.len();
const MAX_METADATA: usize = 4096;
/// How many files come in one request at most.
const MAX_FILES: usize = 1_000;
/// What becomes of what was there: the same file, emptied. A name of another that is moved here would
/// be seen by whoever watches.
const IN_PLACE: WriteOptions = WriteOptions { how: WriteMode::InPlace, mode: None, parents: true };

/// What a request on `/files` asks for, beside its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Asked {
    /// The path, if it was given at all.
    pub(in super::super) path: Option<String>,
    pub(in super::super) signed: Signed,
}

impl Asked {
    /// Reads it off a request; the reason why that makes no sense is the error.
    pub(in super::super) fn of(request: &Request) -> Result<Self, &'static str> {
        let query = request.uri().query().unwrap_or_default();
        let mut parameters: BTreeMap<String, String> = BTreeMap::new();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            // The first of several counts.
            parameters.entry(name.into_owned()).or_insert_with(|| value.into_owned());
        }
        let operation = match *request.method() {
            Method::POST => Operation::Write,
            _ => Operation::Read,
        };
        let expiration = parameters.remove("signature_expiration");
        let expiration = expiration.map(|text| text.parse().map_err(|_| "signature_expiration"));
        let path = parameters.remove("path");
        Ok(Self {
            signed: Signed {
                path: path.clone().unwrap_or_default(),
                operation,
                username: parameters.remove("username"),
                signature: parameters.remove("signature"),
                expiration: expiration.transpose().map_err(|_| "invalid signature_expiration")?,
            },
            path,
        })
    }
}

/// Why a file did not come or go.
struct Refused(StatusCode, String);

impl Refused {
    fn bad(message: impl Into<String>) -> Self {
        Self(StatusCode::BAD_REQUEST, message.into())
    }

    /// Says why something could not be done with a file.
    fn of(path: &str, user: &str) -> impl Fn(SandboxError) -> Self {
        let (path, user) = (path.escape_debug().to_string(), user.escape_debug().to_string());
        move |error| {
            let SandboxError::File { kind, .. } = &error else {
                tracing::warn!(error = &error as &dyn std::error::Error, "envd: a file failed");
                return Self(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
            };
            match kind {
                FileFault::NotFound => {
                    Self(StatusCode::NOT_FOUND, format!("path '{path}' does not exist"))
                }
                FileFault::IsDirectory => Self::bad(format!("path '{path}' is a directory")),
                FileFault::NoUser => Self(
                    StatusCode::UNAUTHORIZED,
                    format!("error looking up user '{user}': user: unknown user {user}"),
                ),
                FileFault::NoSpace => Self(
                    StatusCode::INSUFFICIENT_STORAGE,
                    "not enough disk space available".to_owned(),
                ),
                FileFault::NotDirectory
                | FileFault::Special
                | FileFault::InvalidPath
                | FileFault::Loop
                | FileFault::Interrupted => Self::bad(error.to_string()),
                FileFault::Denied | FileFault::ReadOnly => {
                    Self(StatusCode::FORBIDDEN, error.to_string())
                }
                FileFault::Busy => Self(StatusCode::TOO_MANY_REQUESTS, error.to_string()),
                _ => Self(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
            }
        }
    }
}

/// Refuses a request on `/files` that shows neither the token of a secured sandbox nor a signature by it.
pub(super) fn refuses(token: &str, request: &Request) -> Option<Response> {
    let asked = match Asked::of(request) {
        Ok(asked) => asked,
        Err(reason) => return Some(refusal(StatusCode::BAD_REQUEST, reason)),
    };
    let sent = request.headers().get(TOKEN).map(HeaderValue::as_bytes);
    let now = chrono::Utc::now().timestamp();
    let refused = asked.signed.check(token, sent, now).err();
    refused.map(|reason| refusal(StatusCode::UNAUTHORIZED, reason))
}

/// Serves `/files` to whoever may.
pub(super) async fn serve(call: &Call, request: Request) -> Response {
    let asked = match Asked::of(&request) {
        Ok(asked) => asked,
        Err(reason) => return refusal(StatusCode::BAD_REQUEST, reason),
    };
    let user = asked.signed.username.clone().unwrap_or_else(|| call.entry.user.clone());
    let Some(files) = call.entry.sandbox.files_of(&user) else {
        return refusal(StatusCode::NOT_IMPLEMENTED, "this sandbox has no files");
    };
    let done = match *request.method() {
        Method::GET | Method::HEAD => download(call, &*files, &user, &asked).await,
        Method::POST => {
            let written = upload(call, &*files, &user, &asked, request).await;
            written.map(|written| axum::Json(written).into_response())
        }
        _ => return refusal(StatusCode::METHOD_NOT_ALLOWED, "method not allowed"),
    };
    done.unwrap_or_else(|Refused(status, message)| refusal(status, &message))
}

async fn download(
    call: &Call,
    files: &dyn SandboxFiles,
    user: &str,
    asked: &Asked,
) -> Result<Response, Refused> {
    let path = asked.path.as_deref().unwrap_or_default();
    let refused = Refused::of(path, user);
    let mut contents = files.read(&call.path(path), 0, None).await.map_err(&refused)?;
    let mut encoding = encoding::accepted(&call.headers).ok_or_else(|| {
        Refused(StatusCode::NOT_ACCEPTABLE, "no acceptable encoding found".to_owned())
    })?;
    let mut response = Response::new(Body::empty());
    let part = contents.length.filter(|length| *length > 0);
    if let Some(length) = part
        && let Some(part) = range(&call.headers, length)
    {
        let told = |what: String| HeaderValue::from_str(&format!("bytes {what}/{length}")).ok();
        let Some((first, last)) = part else {
            let mut refused = refusal(StatusCode::RANGE_NOT_SATISFIABLE, "invalid range");
            refused
                .headers_mut()
                .extend(told("*".to_owned()).map(|at| (header::CONTENT_RANGE, at)));
            return Ok(refused);
        };
        let count = last - first + 1;
        contents = files.read(&call.path(path), first, Some(count)).await.map_err(&refused)?;
        contents.length = Some(count);
        encoding = Encoding::Identity;
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        let at = told(format!("{first}-{last}"));
        response.headers_mut().extend(at.map(|at| (header::CONTENT_RANGE, at)));
    }
    let answer = response.headers_mut();
    answer.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    answer.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    answer.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    answer.insert(header::CONTENT_DISPOSITION, disposition(&contents.entry));
    // A file that says that it is empty may not be, and of one that is clients want to be told.
    let first = match contents.length {
        None | Some(0) => contents.data.next().await.transpose().map_err(&refused)?,
        Some(_) => Some(Vec::new()),
    };
    let Some(first) = first else {
        answer.insert(header::CONTENT_LENGTH, HeaderValue::from_static("0"));
        return Ok(response);
    };
    let data = contents.data.map(|chunk| chunk.map_err(io::Error::other));
    let first = futures_util::stream::iter((!first.is_empty()).then_some(Ok(first)));
    let data: encoding::Chunks<io::Error> = Box::pin(first.chain(data));
    let body = match encoding {
        Encoding::Gzip => {
            answer.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            Body::from_stream(encoding::pack(data))
        }
        Encoding::Identity => {
            if let Some(length) = contents.length {
                answer.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
            }
            Body::from_stream(data)
        }
    };
    *response.body_mut() = body;
    Ok(response)
}

/// Reads which part of so many bytes is asked for, from its first to its last. `None` if it is all of
/// them, also if what is asked for makes no sense or is several; `Some(None)` if there is no such part.
fn range(headers: &HeaderMap, length: u64) -> Option<Option<(u64, u64)>> {
    let given = headers.get(header::RANGE)?.to_str().ok()?.strip_prefix("bytes=")?;
    let (first, last) = given.trim().split_once('-')?;
    let number = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More than there are digits for is past the end of everything.
        true => Some(text.parse().unwrap_or(u64::MAX)),
        false => None,
    };
    let end = length - 1;
    match (first, last) {
        ("", "") => None,
        ("", count) => {
            let count: u64 = number(count)?;
            Some((count > 0).then(|| (length.saturating_sub(count), end)))
        }
        (first, "") => number(first).map(|first| (first <= end).then_some((first, end))),
        (first, last) => {
            let (first, last): (u64, u64) = (number(first)?, number(last)?);
            if last < first {
                return None;
            }
            Some((first <= end).then_some((first, last.min(end))))
        }
    }
}

fn disposition(entry: &FileEntry) -> HeaderValue {
    let name = entry.path.file_name().unwrap_or_default().to_string_lossy();
    let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\\') || c == ' ';
    let name: String = name.chars().map(|c| if plain(c) { c } else { '_' }).collect();
    let value = HeaderValue::from_str(&format!("inline; filename=\"{name}\""));
    value.unwrap_or_else(|_| HeaderValue::from_static("inline"))
}

async fn upload(
    call: &Call,
    files: &dyn SandboxFiles,
    user: &str,
    asked: &Asked,
    request: Request,
) -> Result<Value, Refused> {
    let (head, body) = request.into_parts();
    let wanted = wanted_metadata(&head.headers).map_err(Refused::bad)?;
    let encoding = encoding::sent(&head.headers).map_err(|other| {
        Refused::bad(format!("unsupported Content-Encoding: {}", other.escape_debug()))
    })?;
    let body = body.into_data_stream().map(|chunk| chunk.map(Vec::from).map_err(io::Error::other));
    let body: encoding::Chunks<io::Error> = match encoding {
        Encoding::Identity => Box::pin(body),
        Encoding::Gzip => encoding::unpack(Box::pin(body)),
    };
    let kind = head.headers.get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let media = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if media == "application/octet-stream" {
        let path = asked
            .path
            .as_deref()
            .ok_or_else(|| Refused::bad("path query parameter is required for raw body upload"))?;
        let written = put(call, files, user, path, &wanted, body).await?;
        return Ok(json!([written]));
    }
    if !media.starts_with("multipart/") {
        return Err(Refused::bad(format!(
            "unsupported content type: {}, expected multipart/form-data or \
             application/octet-stream",
            kind.escape_debug()
        )));
    }
    let broken = |error: multer::Error| Refused::bad(format!("error reading form: {error}"));
    let boundary = multer::parse_boundary(kind).map_err(broken)?;
    let mut form = multer::Multipart::new(body, boundary);
    let (mut written, mut seen) = (Vec::new(), HashSet::new());
    while let Some(field) = form.next_field().await.map_err(broken)? {
        if field.name() != Some("file") {
            continue;
        }
        // Where there are several, each says itself where it goes.
        let path = asked.path.as_deref().or(field.file_name()).map(str::to_owned);
        let path = path.ok_or_else(|| Refused::bad("a file has no name"))?;
        if !seen.insert(path.clone()) {
            let path = path.escape_debug();
            return Err(Refused::bad(format!(
                "you cannot upload multiple files to the same path '{path}' in one upload request"
            )));
        }
        if seen.len() > MAX_FILES {
            return Err(Refused::bad(format!("more than {MAX_FILES} files in one request")));
        }
        let data = field.map(|chunk| chunk.map(Vec::from).map_err(io::Error::other));
        written.push(put(call, files, user, &path, &wanted, Box::pin(data)).await?);
    }
    Ok(Value::Array(written))
}

/// Writes one file, with the metadata it is to have and no other.
async fn put(
    call: &Call,
    files: &dyn SandboxFiles,
    user: &str,
    path: &str,
    wanted: &[(String, Vec<u8>)],
    data: encoding::Chunks<io::Error>,
) -> Result<Value, Refused> {
    let (place, refused) = (call.path(path), Refused::of(path, user));
    let data: FileSource = encoding::joined(data);
    let mut entry = files.write(&place, IN_PLACE, data).await.map_err(&refused)?;
    let had = entry.details.iter().flat_map(|details| &details.attributes);
    let had: Vec<_> = had.filter(|(name, _)| name.starts_with(METADATA)).cloned().collect();
    // Only if there is anything to change: whoever watches is told of that, too.
    if had != wanted {
        match files.set_attributes(&place, METADATA, wanted).await {
            Ok(described) => entry.details = described.details,
            // Not every filesystem has them; what was written is there all the same.
            Err(SandboxError::File { kind: FileFault::Other, .. }) => {}
            Err(error) => return Err(refused(error)),
        }
    }
    let name = entry.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut told =
        json!({ "path": entry.path.display().to_string(), "name": name, "type": "file" });
    let metadata = metadata(&entry);
    if !metadata.is_empty() {
        told["metadata"] = json!(metadata);
    }
    Ok(told)
}

/// Reads the metadata that a request brings, sorted by name; the reason against it is the error.
fn wanted_metadata(headers: &HeaderMap) -> Result<Vec<(String, Vec<u8>)>, String> {
    let mut wanted = BTreeMap::new();
    let mut total = 0;
    for name in headers.keys() {
        let Some(key) = name.as_str().strip_prefix(HEADER).filter(|key| !key.is_empty()) else {
            continue;
        };
        let value = headers.get(name).map(HeaderValue::as_bytes).unwrap_or_default();
        if key.len() > MAX_KEY {
            return Err(format!("invalid metadata: metadata key exceeds {MAX_KEY} bytes"));
        }
        if let Some(byte) = value.iter().find(|byte| !(0x20..=0x7e).contains(*byte)) {
            return Err(format!(
                "invalid metadata: metadata value for key \"{key}\" contains non-printable-ASCII \
                 byte 0x{byte:02x}"
            ));
        }
        total += METADATA.len() + key.len() + value.len();
        wanted.insert(format!("{METADATA}{key}"), value.to_vec());
    }
    if total > MAX_METADATA {
        return Err(format!(
            "invalid metadata: total metadata size {total} exceeds {MAX_METADATA} bytes"
        ));
    }
    Ok(wanted.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_comes_in_headers_and_is_bounded() {
        let of = |pairs: &[(&str, &str)]| {
            let pair = |(name, value): &(&str, &str)| {
                (name.parse::<header::HeaderName>().unwrap(), value.parse().unwrap())
            };
            wanted_metadata(&pairs.iter().map(pair).collect())
        };
        let good = of(&[("X-Metadata-B", "2"), ("x-metadata-a", "1"), ("x-other", "3")]).unwrap();
        let names: Vec<_> = good.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["user.e2b.a", "user.e2b.b"]);
        assert!(of(&[("x-metadata-a", "ä")]).is_err());
        assert!(of(&[("x-metadata-a", &"v".repeat(MAX_METADATA))]).is_err());
        assert!(of(&[(&format!("x-metadata-{}", "k".repeat(MAX_KEY + 1)), "v")]).is_err());
        assert_eq!(of(&[("x-metadata-", "v")]).unwrap(), []);
    }

    #[test]
    fn a_part_of_a_file_is_one_range_within_it() {
        let of = |value: &'static str| {
            let pair = (header::RANGE, HeaderValue::from_static(value));
            range(&[pair].into_iter().collect(), 10)
        };
        for (value, part) in [
            ("bytes=0-3", (0, 3)),
            ("bytes=4-", (4, 9)),
            ("bytes=-3", (7, 9)),
            ("bytes=-99", (0, 9)),
            ("bytes=9-99999999999999999999999", (9, 9)),
        ] {
            assert_eq!(of(value), Some(Some(part)), "{value}");
        }
        for none in ["bytes=10-", "bytes=-0", "bytes=99999999999999999999999-"] {
            assert_eq!(of(none), Some(None), "{none}");
        }
        for all in ["", "bytes", "bytes=", "bytes=-", "bytes=3-1", "bytes=0-1,3-4", "lines=1-2"] {
            assert_eq!(of(all), None, "{all}");
        }
        assert_eq!(range(&HeaderMap::new(), 10), None);
    }

    #[test]
    fn what_is_asked_for_is_in_the_query() {
        let asked = |uri: &str| Asked::of(&Request::get(uri).body(Body::empty()).unwrap());
        let good = asked("/files?path=%2Fa%20b&username=u&signature=v1_x&signature_expiration=5");
        let Asked { path, signed } = good.unwrap();
        assert_eq!((path.as_deref(), signed.path.as_str()), (Some("/a b"), "/a b"));
        assert_eq!((signed.username.as_deref(), signed.expiration), (Some("u"), Some(5)));
        assert!(asked("/files?signature_expiration=soon").is_err());
        assert_eq!(asked("/files").unwrap().path, None);
    }
}
