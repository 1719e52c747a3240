//! The Connect protocol, as far as envd's clients use it: calls with one answer, and streams.
//!
//! A call with one answer is a plain POST. A stream is a body of frames, a byte of flags and four of
//! length before each; the last says how it ended, so that its HTTP status is always 200. Bodies
//! and frames are bounded, and what cannot be read is answered by an error that says so.

use std::io::Write as _;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use flate2::write::GzDecoder;
use futures_util::{Stream, StreamExt as _, stream};
use http_body_util::BodyExt as _;
use prost::Message;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use warren::{FileFault, ProgramFault, SandboxError};

use crate::error::ApiError;

/// The longest message that is taken.
pub(super) const MAX_MESSAGE: usize = 16 << 20;
const TIMEOUT: &str = "connect-timeout-ms";
/// How long whoever sends a message may be silent in the middle of it.
const IDLE: Duration = Duration::from_secs(60);
/// The longest deadline that means anything: a hundred days, as the protocol has digits for.
const MAX_TIMEOUT: u64 = 9_999_999_999;

/// What can be done with a message.
pub(super) trait Wire: Message + Default + Serialize + DeserializeOwned + 'static {}

impl<M: Message + Default + Serialize + DeserializeOwned + 'static> Wire for M {}

/// How a message is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Codec {
    Json,
    Proto,
}

/// What is wrong with a call, by the codes that the protocol has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Code {
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Unimplemented,
    Internal,
    Unavailable,
    Unauthenticated,
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) code: Code,
    pub(super) message: String,
}

impl Code {
    fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::InvalidArgument => "invalid_argument",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::PermissionDenied => "permission_denied",
            Self::ResourceExhausted => "resource_exhausted",
            Self::FailedPrecondition => "failed_precondition",
            Self::Unimplemented => "unimplemented",
            Self::Internal => "internal",
            Self::Unavailable => "unavailable",
            Self::Unauthenticated => "unauthenticated",
        }
    }

    /// The status of an answer that is not a stream.
    fn status(self) -> StatusCode {
        match self {
            Self::InvalidArgument | Self::FailedPrecondition => StatusCode::BAD_REQUEST,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::PermissionDenied => StatusCode::FORBIDDEN,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::AlreadyExists => StatusCode::CONFLICT,
            Self::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Self::Unknown | Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        }
    }
}

impl Failure {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    pub(super) fn deadline() -> Self {
        Self::new(Code::DeadlineExceeded, "context deadline exceeded")
    }

    /// A user that the sandbox does not have.
    pub(super) fn no_user(name: &str) -> Self {
        let name = name.escape_debug();
        Self::new(Code::Unauthenticated, format!("invalid username: '{name}'"))
    }

    fn body(&self) -> Value {
        json!({ "code": self.code.name(), "message": self.message })
    }

    pub(super) fn unary(&self) -> Response {
        (self.code.status(), axum::Json(self.body())).into_response()
    }

    /// Answers a stream that failed before it began.
    pub(super) fn streamed(&self, codec: Codec) -> Response {
        frames(codec, Body::from(end_frame(Some(self))))
    }
}

impl From<SandboxError> for Failure {
    fn from(error: SandboxError) -> Self {
        let code = match &error {
            SandboxError::InvalidSpec { .. } | SandboxError::TooLarge { .. } => {
                Code::InvalidArgument
            }
            SandboxError::NotFound { .. } => Code::NotFound,
            SandboxError::AlreadyExists { .. } => Code::AlreadyExists,
            SandboxError::Program { kind, .. } => match kind {
                ProgramFault::User => Code::Unauthenticated,
                ProgramFault::NoProcess => Code::ResourceExhausted,
                ProgramFault::NotFound
                | ProgramFault::NotExecutable
                | ProgramFault::Workdir
                | ProgramFault::Other => Code::InvalidArgument,
            },
            SandboxError::File { kind, .. } => match kind {
                FileFault::NotFound => Code::NotFound,
                FileFault::Exists => Code::AlreadyExists,
                FileFault::NoUser => Code::Unauthenticated,
                FileFault::IsDirectory
                | FileFault::NotDirectory
                | FileFault::Special
                | FileFault::InvalidPath => Code::InvalidArgument,
                FileFault::Loop => Code::FailedPrecondition,
                FileFault::Denied | FileFault::ReadOnly => Code::PermissionDenied,
                FileFault::NoSpace | FileFault::Busy | FileFault::TooMany => {
                    Code::ResourceExhausted
                }
                FileFault::NotEmpty
                | FileFault::InvalidArchive
                | FileFault::Interrupted
                | FileFault::Killed
                | FileFault::Other => Code::Internal,
            },
            SandboxError::Ended { .. }
            | SandboxError::Suspended { .. }
            | SandboxError::SessionEnded { .. }
            | SandboxError::ShuttingDown => Code::Unavailable,
            SandboxError::Timeout { .. } => Code::DeadlineExceeded,
            SandboxError::Unsupported { .. } => Code::Unimplemented,
            SandboxError::Conflict { .. } => Code::FailedPrecondition,
            SandboxError::Capacity { .. } => Code::ResourceExhausted,
            _ => Code::Internal,
        };
        if code == Code::Internal {
            tracing::warn!(error = &error as &dyn std::error::Error, "envd: a call failed");
        }
        Self::new(code, error.to_string())
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        let code = match error.status() {
            StatusCode::TOO_MANY_REQUESTS => Code::ResourceExhausted,
            StatusCode::BAD_REQUEST => Code::InvalidArgument,
            StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
            _ => Code::Internal,
        };
        Self::new(code, error.body().error.message)
    }
}

/// What kind of call a request is, by its `Content-Type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Unary(Codec),
    Stream(Codec),
}

impl Shape {
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let given = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        let (kind, _) = given.split_once(';').unwrap_or((given, ""));
        match kind.trim().to_ascii_lowercase().as_str() {
            "application/json" => Some(Self::Unary(Codec::Json)),
            "application/proto" => Some(Self::Unary(Codec::Proto)),
            "application/connect+json" => Some(Self::Stream(Codec::Json)),
            "application/connect+proto" => Some(Self::Stream(Codec::Proto)),
            _ => None,
        }
    }
}

/// Returns how long a call may take, if it says.
pub(super) fn deadline(headers: &HeaderMap) -> Result<Option<Duration>, Failure> {
    let Some(given) = headers.get(TIMEOUT) else { return Ok(None) };
    let millis = given.to_str().ok().and_then(|text| text.parse::<u64>().ok());
    match millis {
        Some(0) => Ok(None),
        Some(millis) if millis <= MAX_TIMEOUT => Ok(Some(Duration::from_millis(millis))),
        Some(_) | None => Err(Failure::invalid(format!("invalid {TIMEOUT}"))),
    }
}

/// Does work within its deadline.
pub(super) async fn within<T>(
    deadline: Option<Duration>,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    match deadline {
        None => work.await,
        Some(after) => {
            tokio::time::timeout(after, work).await.unwrap_or_else(|_| Err(Failure::deadline()))
        }
    }
}

/// How a message was made shorter on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
}

impl Compression {
    fn of(headers: &HeaderMap, name: &str) -> Result<Self, Failure> {
        match headers.get(name).map(HeaderValue::as_bytes) {
            None | Some(b"" | b"identity") => Ok(Self::None),
            Some(b"gzip") => Ok(Self::Gzip),
            Some(_) => {
                let message = "unknown compression: supported encodings are gzip and identity";
                Err(Failure::new(Code::Unimplemented, message))
            }
        }
    }

    fn undo(self, bytes: Bytes) -> Result<Bytes, Failure> {
        match self {
            Self::None => Ok(bytes),
            Self::Gzip => gunzip(&bytes).map(Bytes::from),
        }
    }
}

/// Unpacks a message, step by step: a few bytes may stand for very many.
fn gunzip(bytes: &[u8]) -> Result<Vec<u8>, Failure> {
    let broken = |_| Failure::invalid("the message is no gzip");
    let mut decoder = GzDecoder::new(Vec::new());
    for chunk in bytes.chunks(1 << 10) {
        decoder.write_all(chunk).map_err(broken)?;
        if decoder.get_ref().len() > MAX_MESSAGE {
            return Err(too_long());
        }
    }
    decoder.finish().map_err(broken)
}

fn too_long() -> Failure {
    let message = format!("message is larger than {MAX_MESSAGE} bytes");
    Failure::new(Code::ResourceExhausted, message)
}

impl Codec {
    pub(super) fn read<M: Wire>(self, bytes: &[u8]) -> Result<M, Failure> {
        match self {
            Self::Json => {
                // An empty body is what some clients send for an empty message.
                let bytes = if bytes.is_empty() { b"{}" } else { bytes };
                let invalid = |error| Failure::invalid(format!("unmarshal message: {error}"));
                let mut value: Value = serde_json::from_slice(bytes).map_err(invalid)?;
                forget_nulls(&mut value);
                if !value.is_object() {
                    return Err(Failure::invalid("unmarshal message: it is no object"));
                }
                serde_json::from_value(value).map_err(invalid)
            }
            Self::Proto => M::decode(bytes)
                .map_err(|error| Failure::invalid(format!("unmarshal message: {error}"))),
        }
    }

    fn write<M: Wire>(self, message: &M) -> Vec<u8> {
        match self {
            // Text, numbers and maps with keys of text, which are always JSON.
            Self::Json => serde_json::to_vec(message).expect("a message can be written"),
            Self::Proto => message.encode_to_vec(),
        }
    }

    fn frame<M: Wire>(self, message: &M) -> Bytes {
        frame(0, &self.write(message))
    }
}

/// A field that is null is one that is not there.
fn forget_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(forget_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(forget_nulls),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Marks a frame as made shorter.
const COMPRESSED: u8 = 1;
/// Marks the last frame of a stream.
const LAST: u8 = 2;
const HEAD: usize = 5;

fn frame(flags: u8, message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    [&[flags], &length.to_be_bytes()[..], message].concat().into()
}

/// The last frame of a stream: how it ended.
fn end_frame(failure: Option<&Failure>) -> Bytes {
    let body = failure.map_or_else(|| json!({}), |failure| json!({ "error": failure.body() }));
    frame(LAST, body.to_string().as_bytes())
}

fn frames(codec: Codec, body: Body) -> Response {
    let kind = match codec {
        Codec::Json => "application/connect+json",
        Codec::Proto => "application/connect+proto",
    };
    ([(header::CONTENT_TYPE, kind)], body).into_response()
}

/// Reads the whole of a call with one message.
pub(super) async fn read_unary<M: Wire>(
    codec: Codec,
    headers: &HeaderMap,
    body: Body,
) -> Result<M, Failure> {
    let compression = Compression::of(headers, header::CONTENT_ENCODING.as_str())?;
    let bytes = read_all(body).await?;
    codec.read(&compression.undo(bytes)?)
}

async fn read_all(mut body: Body) -> Result<Bytes, Failure> {
    let mut all = Vec::new();
    while let Some(piece) = next_piece(&mut body, Some(IDLE)).await? {
        all.extend_from_slice(&piece);
        if all.len() > MAX_MESSAGE {
            return Err(too_long());
        }
    }
    Ok(all.into())
}

/// Waits for more of a body, for as long as its sender may be silent; `None` at its end.
async fn next_piece(body: &mut Body, idle: Option<Duration>) -> Result<Option<Bytes>, Failure> {
    let frame = match idle {
        None => body.frame().await,
        Some(idle) => tokio::time::timeout(idle, body.frame()).await.map_err(|_| {
            Failure::new(Code::DeadlineExceeded, "the message did not come to its end in time")
        })?,
    };
    match frame {
        None => Ok(None),
        Some(Ok(frame)) => Ok(Some(frame.into_data().unwrap_or_default())),
        Some(Err(_)) => Err(Failure::new(Code::Unknown, "the request broke off")),
    }
}

/// Answers a call with one message.
pub(super) fn answer<M: Wire>(codec: Codec, done: Result<M, Failure>) -> Response {
    let message = match done {
        Ok(message) => message,
        Err(failure) => return failure.unary(),
    };
    let kind = match codec {
        Codec::Json => "application/json",
        Codec::Proto => "application/proto",
    };
    ([(header::CONTENT_TYPE, kind)], codec.write(&message)).into_response()
}

/// Answers a call by a stream, which ends where `messages` do.
pub(super) fn stream_answer<M: Wire>(
    codec: Codec,
    messages: impl Stream<Item = Result<M, Failure>> + Send + 'static,
) -> Response {
    let begun = stream::unfold(Some(Box::pin(messages)), move |messages| async move {
        let mut messages = messages?;
        let (frame, rest) = match messages.next().await {
            Some(Ok(message)) => (codec.frame(&message), Some(messages)),
            Some(Err(failure)) => (end_frame(Some(&failure)), None),
            None => (end_frame(None), None),
        };
        Some((Ok::<_, std::convert::Infallible>(frame), rest))
    });
    frames(codec, Body::from_stream(begun))
}

/// The messages of a request that is a stream, as they come.
pub(super) struct Incoming {
    codec: Codec,
    compression: Compression,
    body: Body,
    buffer: Vec<u8>,
    /// Where in it the next frame begins. What was read is dropped with the next piece and not with each frame, of which a piece
    /// may have as many as it has bytes.
    at: usize,
    /// How long its sender may be silent: for ever between messages, unless there is to be one alone.
    idle: Option<Duration>,
}

impl Incoming {
    pub(super) fn new(codec: Codec, headers: &HeaderMap, body: Body) -> Result<Self, Failure> {
        let compression = Compression::of(headers, "connect-content-encoding")?;
        Ok(Self { codec, compression, body, buffer: Vec::new(), at: 0, idle: None })
    }

    /// Reads the one message of a call that is answered by a stream.
    pub(super) async fn only<M: Wire>(mut self) -> Result<M, Failure> {
        self.idle = Some(IDLE);
        let message = self.next().await?;
        let message = message.ok_or_else(|| Failure::invalid("a message is missing"))?;
        match self.next::<M>().await? {
            None => Ok(message),
            Some(_) => Err(Failure::invalid("there is more than one message")),
        }
    }

    /// Waits for the next message; `None` when there are no more.
    pub(super) async fn next<M: Wire>(&mut self) -> Result<Option<M>, Failure> {
        loop {
            if let Some((flags, message)) = self.take()? {
                if flags & LAST != 0 {
                    return Ok(None);
                }
                let compression = match flags & COMPRESSED {
                    0 => Compression::None,
                    _ if self.compression == Compression::None => {
                        let message = "a compressed message without Connect-Content-Encoding";
                        return Err(Failure::invalid(message));
                    }
                    _ => self.compression,
                };
                return self.codec.read(&compression.undo(message)?).map(Some);
            }
            self.buffer.drain(..std::mem::take(&mut self.at));
            let idle = self.idle.or((!self.buffer.is_empty()).then_some(IDLE));
            match next_piece(&mut self.body, idle).await? {
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(Failure::invalid("the stream ends inside a message")),
                Some(piece) => self.buffer.extend(piece),
            }
        }
    }

    /// Takes a whole frame, if there is one.
    fn take(&mut self) -> Result<Option<(u8, Bytes)>, Failure> {
        let left = &self.buffer[self.at..];
        let Some((head, left)) = left.split_first_chunk::<HEAD>() else { return Ok(None) };
        let [flags, length @ ..] = *head;
        let length = u32::from_be_bytes(length) as usize;
        if length > MAX_MESSAGE {
            return Err(too_long());
        }
        if flags & !(COMPRESSED | LAST) != 0 {
            return Err(Failure::invalid("a frame has flags that mean nothing"));
        }
        let Some(message) = left.get(..length) else { return Ok(None) };
        self.at += HEAD + length;
        Ok(Some((flags, Bytes::copy_from_slice(message))))
    }
}

/// Reads frames and messages. What is understood is written again as it was understood.
#[cfg(feature = "fuzz")]
pub(crate) fn fuzz(data: &[u8]) {
    use futures_util::FutureExt as _;

    use super::wire::{StartRequest, StreamInputRequest, UpdateRequest};

    fn both<M: Wire + PartialEq>(shape: Shape, gzip: bool, bytes: &[u8]) {
        let (Shape::Unary(codec) | Shape::Stream(codec)) = shape;
        let mut headers = HeaderMap::new();
        if gzip {
            for name in ["content-encoding", "connect-content-encoding"] {
                headers.insert(name, HeaderValue::from_static("gzip"));
            }
        }
        let body = Body::from(bytes.to_vec());
        let check = |message: M| {
            if codec == Codec::Proto {
                let again = codec.read::<M>(&codec.write(&message));
                assert!(again.is_ok_and(|again| again == message), "it says something else");
            }
        };
        match shape {
            Shape::Unary(_) => {
                let read = read_unary::<M>(codec, &headers, body).now_or_never();
                if let Some(Ok(message)) = read {
                    check(message);
                }
            }
            Shape::Stream(_) => {
                let Ok(mut incoming) = Incoming::new(codec, &headers, body) else { return };
                while let Some(Ok(Some(message))) = incoming.next::<M>().now_or_never() {
                    check(message);
                }
            }
        }
    }

    // A body that does not come has its time, and time is a runtime's. All of these are here at once.
    static CLOCK: std::sync::LazyLock<tokio::runtime::Runtime> = std::sync::LazyLock::new(|| {
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime")
    });
    let _entered = CLOCK.enter();
    let Some((kind, bytes)) = data.split_first() else { return };
    let codec = if kind & 1 == 0 { Codec::Json } else { Codec::Proto };
    let shape = if kind & 2 == 0 { Shape::Unary(codec) } else { Shape::Stream(codec) };
    let gzip = kind & 4 != 0;
    match kind >> 3 {
        0..11 => both::<StartRequest>(shape, gzip, bytes),
        11..22 => both::<StreamInputRequest>(shape, gzip, bytes),
        _ => both::<UpdateRequest>(shape, gzip, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::super::wire::ProcessSelector;
    use super::*;

    fn incoming(bytes: &[u8]) -> Incoming {
        Incoming::new(Codec::Json, &HeaderMap::new(), Body::from(bytes.to_vec())).unwrap()
    }

    async fn fails(bytes: &[u8]) -> Code {
        incoming(bytes).only::<ProcessSelector>().await.unwrap_err().code
    }

    #[tokio::test]
    async fn frames_are_read_however_they_are_cut_and_refused_if_they_are_none() {
        let good = frame(0, br#"{"pid":7}"#);
        assert_eq!(incoming(&good).only::<ProcessSelector>().await.unwrap().pid, Some(7));
        let bits = good.iter().map(|byte| Ok::<_, std::io::Error>(Bytes::from(vec![*byte])));
        let bits = Body::from_stream(stream::iter(bits.collect::<Vec<_>>()));
        let cut = Incoming::new(Codec::Json, &HeaderMap::new(), bits).unwrap();
        assert_eq!(cut.only::<ProcessSelector>().await.unwrap().pid, Some(7));
        assert_eq!(fails(b"").await, Code::InvalidArgument, "a message is missing");
        assert_eq!(fails(&good[..7]).await, Code::InvalidArgument, "it ends inside");
        assert_eq!(fails(&[&good[..], &good].concat()).await, Code::InvalidArgument, "two");
        assert_eq!(fails(&frame(0, b"{")).await, Code::InvalidArgument);
        assert_eq!(fails(&frame(0, b"[]")).await, Code::InvalidArgument);
        assert_eq!(fails(&frame(1, b"{}")).await, Code::InvalidArgument, "not compressed");
        assert_eq!(fails(&frame(0x80, b"{}")).await, Code::InvalidArgument);
        assert_eq!(fails(&[0, 0xff, 0xff, 0xff, 0xff, b'{']).await, Code::ResourceExhausted);
        let deep = [b"[".repeat(100_000), b"]".repeat(100_000)].concat();
        assert_eq!(fails(&frame(0, &deep)).await, Code::InvalidArgument);
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_falls_silent_inside_a_message_is_told_so_and_between_two_is_waited_for() {
        let good = frame(0, br#"{"pid":7}"#);
        let silent = |first: &[u8]| {
            let first = Ok::<_, std::io::Error>(Bytes::copy_from_slice(first));
            Body::from_stream(stream::iter([first]).chain(stream::pending()))
        };
        let incoming =
            |first: &[u8]| Incoming::new(Codec::Json, &HeaderMap::new(), silent(first)).unwrap();
        for first in [&good[..3], &good[..7], &good] {
            let failure = incoming(first).only::<ProcessSelector>().await.unwrap_err();
            assert_eq!(failure.code, Code::DeadlineExceeded, "{first:?}");
        }
        let headers = HeaderMap::new();
        let read = read_unary::<ProcessSelector>(Codec::Json, &headers, silent(b"{"));
        assert_eq!(read.await.unwrap_err().code, Code::DeadlineExceeded);
        let mut several = incoming(&good);
        assert_eq!(several.next::<ProcessSelector>().await.unwrap().unwrap().pid, Some(7));
        let hour = Duration::from_secs(3600);
        let next = tokio::time::timeout(hour, several.next::<ProcessSelector>()).await;
        assert!(next.is_err(), "a stream of input may be silent: {next:?}");
        let mut cut = incoming(&[&good[..], &good[..2]].concat());
        cut.next::<ProcessSelector>().await.unwrap();
        let failure = cut.next::<ProcessSelector>().await.unwrap_err();
        assert_eq!(failure.code, Code::DeadlineExceeded);
    }

    #[tokio::test]
    async fn b7_a_million_empty_frames_are_read_in_a_moment() {
        let (million, last) = (frame(0, b"").repeat(1_000_000), frame(0, b"\x08\x07"));
        let body = Body::from([&million[..], &last].concat());
        let mut incoming = Incoming::new(Codec::Proto, &HeaderMap::new(), body).unwrap();
        let began = std::time::Instant::now();
        for _ in 0..1_000_000 {
            assert_eq!(incoming.next::<ProcessSelector>().await.unwrap().unwrap().pid, None);
        }
        let last = incoming.next::<ProcessSelector>().await.unwrap();
        assert_eq!(last.unwrap().pid, Some(7), "control: what follows them arrives");
        assert!(incoming.next::<ProcessSelector>().await.unwrap().is_none());
        // By what is left to be read for each, it would be hours.
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        assert_eq!(
            fails(&frame(0, b"").repeat(1_000_000)).await,
            Code::InvalidArgument,
            "one alone"
        );
    }

    #[tokio::test]
    async fn a_compressed_message_is_read_and_a_bomb_is_not() {
        let pack = |bytes: &[u8]| {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), Default::default());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        };
        let headers = [("connect-content-encoding", "gzip")];
        let headers: HeaderMap = headers
            .into_iter()
            .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
            .collect();
        let read = async |packed: &[u8]| {
            let body = Body::from(frame(COMPRESSED, packed));
            let incoming = Incoming::new(Codec::Json, &headers, body).unwrap();
            incoming.only::<ProcessSelector>().await
        };
        assert_eq!(read(&pack(br#"{"pid":7}"#)).await.unwrap().pid, Some(7));
        assert_eq!(read(b"no gzip").await.unwrap_err().code, Code::InvalidArgument);
        let bomb = pack(&vec![b' '; MAX_MESSAGE + (2 << 20)]);
        assert_eq!(read(&bomb).await.unwrap_err().code, Code::ResourceExhausted);
    }

    #[test]
    fn deadlines_are_numbers_and_none_is_none() {
        let of = |value: &'static str| {
            deadline(
                &[(TIMEOUT.parse().unwrap(), HeaderValue::from_static(value))]
                    .into_iter()
                    .collect(),
            )
        };
        assert_eq!(deadline(&HeaderMap::new()), Ok(None));
        assert_eq!(of("0"), Ok(None));
        assert_eq!(of("1500"), Ok(Some(Duration::from_millis(1500))));
        for bad in ["", "-1", "1.5", "99999999999", "x"] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_null_is_as_good_as_nothing() {
        let read: ProcessSelector = Codec::Json.read(br#"{"pid":null,"tag":"a"}"#).unwrap();
        assert_eq!((read.pid, read.tag.as_deref()), (None, Some("a")));
        assert_eq!(Codec::Json.read::<ProcessSelector>(b"").unwrap(), ProcessSelector::default());
        assert!(Codec::Proto.read::<ProcessSelector>(&[8]).is_err());
    }
}
