//! A small HTTP client for the daemon's unix socket.

use std::io;
use std::path::{Path, PathBuf};

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use warren_api::{CLIENT_HEADER, ErrorBody};

use crate::args::{ClientArgs, SettingArgs};
use crate::config::{Config, Surroundings};
use crate::failure::Failure;
use crate::signals::Signals;

/// The daemon, as its clients see it.
#[derive(Debug)]
pub(crate) struct Client {
    socket: PathBuf,
    name: Option<String>,
    runtime: Runtime,
}

impl Client {
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

    /// Sends something and reads the answer. A signal to us meanwhile is sent on to `interrupt`, which
    /// is to have the answer come.
    pub(crate) fn send_interruptibly<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        interrupt: &str,
    ) -> Result<T, Failure> {
        let body = serde_json::to_vec(body).map_err(|error| self.garbled(&error.to_string()))?;
        let whole = async |response| {
            let body = self.checked(response).await?;
            Ok(body.collect().await.map_err(|error| self.broke(&error))?.to_bytes())
        };
        let answer = self.runtime.block_on(async {
            let signals = Signals::listen(false);
            let mut signals =
                signals.map_err(|error| Failure::system("cannot listen to signals", &error))?;
            let answer = self.converse(Method::POST, path, Some(body), &[], whole);
            tokio::pin!(answer);
            loop {
                tokio::select! {
                    answer = &mut answer => return answer,
                    _ = signals.next() => {
                        self.converse(Method::POST, interrupt, None, &[], whole).await?;
                    }
                }
            }
        });
        self.parsed(&answer?)
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
        mut each: impl FnMut(&str, &str) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        self.runtime.block_on(self.converse(Method::GET, path, None, headers, async |response| {
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
        }))
    }

    fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        headers: &[(&str, &str)],
    ) -> Result<Bytes, Failure> {
        self.runtime.block_on(self.converse(method, path, body, headers, async |response| {
            let body = self.checked(response).await?;
            Ok(body.collect().await.map_err(|error| self.broke(&error))?.to_bytes())
        }))
    }

    async fn converse<T>(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        headers: &[(&str, &str)],
        answer: impl AsyncFnOnce(Response<Incoming>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let stream = UnixStream::connect(&self.socket);
        let stream = stream.await.map_err(|error| unreachable_daemon(&self.socket, &error))?;
        let handshake = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| self.broke(&error))?;
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(name) = &self.name {
            request = request.header(CLIENT_HEADER, name);
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = Full::new(Bytes::from(body.unwrap_or_default()));
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
        let body = response.into_body();
        if status.is_success() {
            return Ok(body);
        }
        let bytes = body.collect().await.map_err(|error| self.broke(&error))?.to_bytes();
        match serde_json::from_slice::<ErrorBody>(&bytes) {
            Ok(body) => Err(Failure::answered(status.as_u16(), body.error)),
            Err(_) => Err(self.garbled(&format!("{status} without a reason"))),
        }
    }

    fn parsed<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, Failure> {
        serde_json::from_slice(bytes).map_err(|error| self.garbled(&error.to_string()))
    }

    fn garbled(&self, what: &str) -> Failure {
        let message = format!("the daemon at {} answered nonsense: {what}", self.socket.display());
        Failure::fatal("daemon", message).with_hint("is it of another version?")
    }

    fn broke(&self, error: &hyper::Error) -> Failure {
        let message = format!("the daemon at {} hung up: {error}", self.socket.display());
        Failure::fatal("daemon", message)
            .with_hint("its log says why; `warren serve` starts it again")
    }
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
        _ => Failure::system(&format!("cannot reach the daemon at {}", socket.display()), error),
    }
}
