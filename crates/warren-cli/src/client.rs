//! A small HTTP client for the daemon's unix socket.

use std::io;
use std::path::{Path, PathBuf};

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::client::conn::http1;
use hyper::header::HeaderValue;
use hyper::upgrade::Upgraded;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Error as WebSocketError;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use warren_api::{CLIENT_HEADER, ErrorBody};

use crate::args::{ClientArgs, SettingArgs};
use crate::config::{Config, Surroundings};
use crate::failure::Failure;
use crate::files::Outlet;
use crate::signals::Signals;

/// What is sent with a request.
type Sent = UnsyncBoxBody<Bytes, io::Error>;

fn whole(body: Option<Vec<u8>>) -> Sent {
    UnsyncBoxBody::new(
        Full::new(Bytes::from(body.unwrap_or_default())).map_err(|never| match never {}),
    )
}

/// The daemon, as its clients see it.
#[derive(Debug)]
pub(crate) struct Client {
    socket: PathBuf,
    name: Option<String>,
    runtime: Runtime,
}

/// A conversation about one exec.
pub(crate) type Attachment = WebSocketStream<UnixStream>;

/// A connection to a port inside a sandbox.
pub(crate) type Tunnel = TokioIo<Upgraded>;

/// Connects to one port inside a sandbox, as often as is asked.
#[derive(Debug, Clone)]
pub(crate) struct Dialer {
    socket: PathBuf,
    name: Option<String>,
    path: String,
}

impl Dialer {
    /// Opens one more connection.
    pub(crate) async fn dial(&self) -> Result<Tunnel, Failure> {
        let stream = UnixStream::connect(&self.socket);
        let stream = stream.await.map_err(|error| unreachable_daemon(&self.socket, &error))?;
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| broke(&self.socket, &error))?;
        let mut request = Request::get(&self.path)
            .header(header::HOST, "localhost")
            .header(header::CONNECTION, "upgrade")
            .header(header::UPGRADE, "tcp");
        if let Some(name) = &self.name {
            request = request.header(CLIENT_HEADER, name);
        }
        let request = request.body(Empty::<Bytes>::new()).map_err(|error| {
            Failure::usage(format!("cannot ask the daemon that: {error}"), "use plain ASCII")
        })?;
        let exchange = async {
            let sent = sender.send_request(request).await;
            let response = sent.map_err(|error| broke(&self.socket, &error))?;
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                return Err(refusal(&self.socket, response).await);
            }
            let upgraded = hyper::upgrade::on(response).await;
            upgraded.map(TokioIo::new).map_err(|error| broke(&self.socket, &error))
        };
        let connection = connection.with_upgrades();
        tokio::pin!(exchange, connection);
        tokio::select! {
            biased;
            done = &mut exchange => done,
            _ = &mut connection => exchange.await,
        }
    }
}

impl Client {
    /// Returns what connects to a port inside a sandbox.
    pub(crate) fn dialer(&self, path: String) -> Dialer {
        Dialer { socket: self.socket.clone(), name: self.name.clone(), path }
    }

    /// Does something that waits.
    pub(crate) fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// Finds out where the daemon is.
    pub(crate) fn new(args: &ClientArgs) -> Result<Self, Failure> {
        let settings = SettingArgs { socket: args.socket.clone(), ..SettingArgs::default() };
        let socket = Config::load(&settings, &Surroundings::of_process())?.socket;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Failure::system("cannot start", &error))?;
        Ok(Self { socket, name: args.client.clone(), runtime })
    }

    /// Asks for something and reads the answer.
    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.parsed(&self.ask(Method::GET, path, None, &[])?)
    }

    /// Sends something and reads the answer.
    pub(crate) fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        headers: &[(&str, &str)],
    ) -> Result<T, Failure> {
        let body = serde_json::to_vec(body).map_err(|error| self.garbled(&error.to_string()))?;
        self.parsed(&self.ask(method, path, Some(body), headers)?)
    }

    /// The same, for one who waits.
    pub(crate) async fn get_async<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.parsed(&self.ask_async(Method::GET, path, None, &[]).await?)
    }

    /// Sends something that is not answered.
    pub(crate) fn post(&self, path: &str, body: &impl Serialize) -> Result<(), Failure> {
        self.runtime.block_on(self.post_async(path, body))
    }

    /// The same, for one who waits.
    pub(crate) async fn post_async(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<(), Failure> {
        let body = serde_json::to_vec(body).map_err(|error| self.garbled(&error.to_string()))?;
        self.ask_async(Method::POST, path, Some(body), &[]).await.map(drop)
    }

    /// Sends bytes and reads the answer.
    pub(crate) async fn put_bytes<T: DeserializeOwned>(
        &self,
        path: &str,
        bytes: &[u8],
    ) -> Result<T, Failure> {
        let kind = [("content-type", "application/octet-stream")];
        self.parsed(&self.ask_async(Method::PUT, path, Some(bytes.to_vec()), &kind).await?)
    }

    /// Begins a conversation about an exec.
    pub(crate) async fn attach(&self, path: &str) -> Result<Attachment, Failure> {
        let stream = UnixStream::connect(&self.socket);
        let stream = stream.await.map_err(|error| unreachable_daemon(&self.socket, &error))?;
        let request = format!("ws://localhost{path}").into_client_request();
        let mut request = request.map_err(|error| self.garbled(&error.to_string()))?;
        if let Some(name) = &self.name {
            let value = HeaderValue::from_str(name).map_err(|error| {
                Failure::usage(format!("cannot ask the daemon that: {error}"), "use plain ASCII")
            })?;
            request.headers_mut().insert(CLIENT_HEADER, value);
        }
        match tokio_tungstenite::client_async(request, stream).await {
            Ok((socket, _)) => Ok(socket),
            Err(WebSocketError::Http(response)) => {
                let body = response.body().as_deref().unwrap_or_default();
                Err(match serde_json::from_slice::<ErrorBody>(body) {
                    Ok(body) => Failure::answered(response.status().as_u16(), body.error),
                    Err(_) => self.garbled(&format!("{} without a reason", response.status())),
                })
            }
            Err(error) => Err(hung_up(&self.socket, &error.to_string())),
        }
    }

    /// Sends something and reads the answer. A signal to us meanwhile is sent on to `interrupt`, which
    /// is to have the answer come.
    pub(crate) fn send_interruptibly<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        interrupt: &str,
    ) -> Result<T, Failure> {
        let body = serde_json::to_vec(body).map_err(|error| self.garbled(&error.to_string()))?;
        let answer = self.ask_async(Method::POST, path, Some(body), &[]);
        let answer = self.runtime.block_on(self.interruptibly(interrupt, answer))?;
        self.parsed(&answer)
    }

    /// Ends or unsets something.
    pub(crate) fn delete(&self, path: &str) -> Result<(), Failure> {
        self.ask(Method::DELETE, path, None, &[]).map(|_| ())
    }

    /// Follows a stream of events and hands on each with its name, until it ends.
    pub(crate) fn follow(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        each: impl FnMut(&str, &str) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.runtime.block_on(self.events(Method::GET, path, None, headers, each))
    }

    /// Asks for something and follows what comes of it, as [`follow`](Self::follow) does; a signal
    /// meanwhile has the daemon interrupt it.
    pub(crate) fn follow_interruptibly(
        &self,
        path: &str,
        body: &impl Serialize,
        interrupt: &str,
        each: impl FnMut(&str, &str) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let body = serde_json::to_vec(body).map_err(|error| self.garbled(&error.to_string()))?;
        let events = self.events(Method::POST, path, Some(body), &[], each);
        self.runtime.block_on(self.interruptibly(interrupt, events))
    }

    async fn events(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        headers: &[(&str, &str)],
        mut each: impl FnMut(&str, &str) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.converse(method, path, whole(body), headers, async |response| {
            let mut body = self.checked(response).await?;
            let mut pending = Vec::new();
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| self.broke(&error))?;
                pending.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
                while let Some(end) = pending.windows(2).position(|two| two == b"\n\n") {
                    let event: Vec<u8> = pending.drain(..end + 2).collect();
                    let text = String::from_utf8_lossy(&event);
                    let field = |name| text.lines().find_map(|line| line.strip_prefix(name));
                    if let (Some(kind), Some(data)) = (field("event: "), field("data: ")) {
                        each(kind, data)?;
                    }
                }
            }
            Ok(())
        })
        .await
    }

    /// Waits for an answer, and has the daemon interrupt the work at each signal.
    async fn interruptibly<T>(
        &self,
        interrupt: &str,
        answer: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let signals = Signals::listen(false);
        let mut signals =
            signals.map_err(|error| Failure::system("cannot listen to signals", &error))?;
        tokio::pin!(answer);
        loop {
            tokio::select! {
                answer = &mut answer => return answer,
                _ = signals.next() => {
                    self.ask_async(Method::POST, interrupt, None, &[]).await?;
                }
            }
        }
    }

    /// Sends what `make` writes, on a thread of its own, and reads the answer.
    pub(crate) fn upload<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        kind: Option<&str>,
        make: impl FnOnce(&Outlet) -> Result<(), Failure> + Send,
    ) -> Result<T, Failure> {
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let frames = futures_util::stream::unfold(receiver, async |mut receiver| {
            let chunk: io::Result<Bytes> = receiver.recv().await?;
            Some((chunk.map(Frame::data), receiver))
        });
        let body = UnsyncBoxBody::new(StreamBody::new(frames));
        let headers = [(header::CONTENT_TYPE.as_str(), kind.unwrap_or("application/octet-stream"))];
        std::thread::scope(|scope| {
            let maker = scope.spawn(move || {
                let outlet = Outlet(sender);
                let made = make(&outlet);
                if made.is_err() {
                    // Without an end: the daemon must not take it for the whole.
                    let _ = outlet.0.blocking_send(Err(io::ErrorKind::Interrupted.into()));
                }
                made
            });
            let answer = self.runtime.block_on(self.converse(
                method,
                path,
                body,
                &headers,
                async |response| {
                    let body = self.checked(response).await?;
                    Ok(body.collect().await.map_err(|error| self.broke(&error))?.to_bytes())
                },
            ));
            // What went wrong here explains whatever the daemon made of it.
            let made = maker.join().unwrap_or_else(|_| Err(Failure::fatal("internal", "a bug")));
            made.and(answer).and_then(|bytes| self.parsed(&bytes))
        })
    }

    /// Asks for bytes and hands them on as they come.
    pub(crate) fn download(
        &self,
        path: &str,
        head: impl FnOnce(&hyper::HeaderMap),
        mut each: impl FnMut(Bytes) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.runtime.block_on(self.converse(
            Method::GET,
            path,
            whole(None),
            &[],
            async |response| {
                head(response.headers());
                let mut body = self.checked(response).await?;
                while let Some(frame) = body.frame().await {
                    let frame = frame.map_err(|error| self.broke(&error))?;
                    if let Ok(data) = frame.into_data() {
                        each(data)?;
                    }
                }
                Ok(())
            },
        ))
    }

    fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        headers: &[(&str, &str)],
    ) -> Result<Bytes, Failure> {
        self.runtime.block_on(self.ask_async(method, path, body, headers))
    }

    async fn ask_async(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        headers: &[(&str, &str)],
    ) -> Result<Bytes, Failure> {
        self.converse(method, path, whole(body), headers, async |response| {
            let body = self.checked(response).await?;
            Ok(body.collect().await.map_err(|error| self.broke(&error))?.to_bytes())
        })
        .await
    }

    async fn converse<T>(
        &self,
        method: Method,
        path: &str,
        body: Sent,
        headers: &[(&str, &str)],
        answer: impl AsyncFnOnce(Response<Incoming>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let stream = UnixStream::connect(&self.socket);
        let stream = stream.await.map_err(|error| unreachable_daemon(&self.socket, &error))?;
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| self.broke(&error))?;
        let mut request =
            Request::builder().method(method).uri(path).header(header::HOST, "localhost");
        if !headers.iter().any(|(name, _)| *name == header::CONTENT_TYPE.as_str()) {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(name) = &self.name {
            request = request.header(CLIENT_HEADER, name);
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(body).map_err(|error| {
            Failure::usage(format!("cannot ask the daemon that: {error}"), "use plain ASCII")
        })?;
        let exchange = async {
            let response =
                sender.send_request(request).await.map_err(|error| self.broke(&error))?;
            answer(response).await
        };
        tokio::pin!(exchange, connection);
        tokio::select! {
            biased;
            done = &mut exchange => done,
            // The last bytes of the answer may still be on their way to us.
            _ = &mut connection => exchange.await,
        }
    }

    async fn checked(&self, response: Response<Incoming>) -> Result<Incoming, Failure> {
        let status = response.status();
        if status.is_success() {
            return Ok(response.into_body());
        }
        Err(refusal(&self.socket, response).await)
    }

    fn parsed<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, Failure> {
        serde_json::from_slice(bytes).map_err(|error| self.garbled(&error.to_string()))
    }

    fn garbled(&self, what: &str) -> Failure {
        garbled(&self.socket, what)
    }

    fn broke(&self, error: &hyper::Error) -> Failure {
        broke(&self.socket, error)
    }
}

/// Reads why the daemon did not do what it was asked.
async fn refusal(socket: &Path, response: Response<Incoming>) -> Failure {
    let status = response.status();
    let bytes = match response.into_body().collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return broke(socket, &error),
    };
    match serde_json::from_slice::<ErrorBody>(&bytes) {
        Ok(body) => Failure::answered(status.as_u16(), body.error),
        Err(_) => garbled(socket, &format!("{status} without a reason")),
    }
}

fn garbled(socket: &Path, what: &str) -> Failure {
    let message = format!("the daemon at {} answered nonsense: {what}", socket.display());
    Failure::fatal("daemon", message).with_hint("is it of another version?")
}

fn broke(socket: &Path, error: &hyper::Error) -> Failure {
    hung_up(socket, &error.to_string())
}

fn hung_up(socket: &Path, error: &str) -> Failure {
    let message = format!("the daemon at {} hung up: {error}", socket.display());
    Failure::fatal("daemon_gone", message)
        .with_hint("its log says why; `warren serve` starts it again")
}

fn unreachable_daemon(socket: &Path, error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            Failure::fatal("no_daemon", format!("no daemon at {}", socket.display()))
                .with_hint("start one: warren serve")
        }
        io::ErrorKind::PermissionDenied => {
            let message = format!("you may not talk to the daemon at {}", socket.display());
            Failure::fatal("no_daemon", message).with_hint(
                "ask its owner to serve with a group of yours: warren serve --group NAME",
            )
        }
        // One that died with us in its queue.
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            hung_up(socket, &error.to_string())
        }
        _ => Failure::system(&format!("cannot reach the daemon at {}", socket.display()), error),
    }
}
