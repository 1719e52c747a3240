//! Images in a registry, over HTTP(S).
//!
//! A small client of our own: a pull is a handful of GETs, and the crates for it bring some 170 others
//! along. It blocks, with a runtime of its own, because what it brings is unpacked as it comes.
//!
//! Whoever names an image chooses whom this host talks to. So a registry that the configuration does
//! not name is spoken to over TLS and at a public address only, and so is whatever it leads on to.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use base64::Engine as _;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, AUTHORIZATION, HOST, LOCATION, USER_AGENT, WWW_AUTHENTICATE};
use hyper::http::uri::Scheme;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_util::sync::CancellationToken;

use super::manifest::{
    self, Config, Descriptor, Found, MANIFESTS, MAX_DOCUMENT, MAX_INDEXES, Manifest,
};
use super::{Digest, ImageError, Reference};
use crate::egress;

/// How long a registry may take to be reached or to answer, and between two pieces of an answer.
const PATIENCE: Duration = Duration::from_secs(60);
const MAX_REDIRECTS: usize = 5;
/// Where hosts keep the certificates that they trust.
const AUTHORITIES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// What is known of registries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registries {
    /// By the name that images have: `docker.io`, `localhost:5000`. These may be anywhere.
    pub known: BTreeMap<String, KnownRegistry>,
    /// A file of certificates (PEM) to trust instead of the host's.
    pub authorities: Option<PathBuf>,
}

/// A registry that the configuration names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownRegistry {
    /// Whether it is spoken to without TLS.
    pub plain_http: bool,
    /// Who we are there.
    pub login: Option<Login>,
}

/// A user and a password.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The user.
    pub user: String,
    /// The password, or a token in its place.
    pub password: String,
}

impl Login {
    /// Reads one as HTTP and Docker's files have it: base64 of `user:password`.
    pub fn decode(text: &str) -> Option<Self> {
        let pair = base64::engine::general_purpose::STANDARD.decode(text.trim()).ok()?;
        let pair = String::from_utf8(pair).ok()?;
        let (user, password) = pair.split_once(':')?;
        Some(Self { user: user.to_owned(), password: password.to_owned() })
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("user", &self.user).finish_non_exhaustive()
    }
}

/// What may be talked to for the sake of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reach {
    /// Any address, not only public ones.
    anywhere: bool,
    /// Without TLS.
    plain_http: bool,
}

/// One image in a registry, being read.
pub(super) struct Pull<'a> {
    runtime: Runtime,
    reference: &'a Reference,
    stop: &'a CancellationToken,
    login: Option<Login>,
    reach: Reach,
    authorities: Option<PathBuf>,
    tls: OnceLock<TlsConnector>,
    authorization: Option<String>,
}

impl fmt::Debug for Pull<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pull").field("reference", &self.reference).finish_non_exhaustive()
    }
}

impl<'a> Pull<'a> {
    pub(super) fn new(
        reference: &'a Reference,
        known: &Registries,
        stop: &'a CancellationToken,
    ) -> Result<Self, ImageError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let named = known.known.get(&reference.registry);
        Ok(Self {
            runtime: runtime.map_err(|error| ImageError::call("start a client", error))?,
            reference,
            stop,
            login: named.and_then(|named| named.login.clone()),
            reach: Reach {
                anywhere: named.is_some(),
                plain_http: named.is_some_and(|named| named.plain_http),
            },
            authorities: known.authorities.clone(),
            tls: OnceLock::new(),
            authorization: None,
        })
    }

    /// Reads what the image is.
    pub(super) fn manifest(&mut self) -> Result<(Manifest, Config), ImageError> {
        let mut selector = self.reference.selector().to_owned();
        let mut expected = self.reference.digest.clone();
        for _ in 0..MAX_INDEXES {
            let bytes = self.document("manifests", &selector, &MANIFESTS.join(", "))?;
            if let Some(expected) = &expected {
                expected.check("the manifest", Digest::of(&bytes))?;
            }
            match manifest::read(&bytes, None)? {
                Found::Document(descriptor) => {
                    selector = descriptor.digest.as_str().to_owned();
                    expected = Some(descriptor.digest);
                }
                Found::Manifest(found) => {
                    let digest = &found.config.digest;
                    let bytes = self.document("blobs", digest.as_str(), "*/*")?;
                    digest.check("the configuration", Digest::of(&bytes))?;
                    let config = Config::read(&bytes, found.layers.len())?;
                    return Ok((found, config));
                }
            }
        }
        Err(ImageError::refused("the index", "it leads to too many others"))
    }

    /// Begins to read a layer. Whether it is the one that was named shows at its end.
    pub(super) fn layer(&mut self, layer: &Descriptor) -> Result<impl Read + '_, ImageError> {
        let response = self.get("blobs", layer.digest.as_str(), "*/*")?;
        Ok(self.body(response))
    }

    fn body(&self, response: Response<Incoming>) -> Body<'_> {
        let (body, piece) = (response.into_body(), Bytes::new());
        Body { runtime: &self.runtime, stop: self.stop, body, piece }
    }

    fn document(&mut self, kind: &str, name: &str, accept: &str) -> Result<Vec<u8>, ImageError> {
        let response = self.get(kind, name, accept)?;
        let body = self.body(response);
        read_all(body, kind)
    }

    /// Asks for a part of the image, with whatever right it turns out to take.
    fn get(
        &mut self,
        kind: &str,
        name: &str,
        accept: &str,
    ) -> Result<Response<Incoming>, ImageError> {
        let scheme = if self.reach.plain_http { "http" } else { "https" };
        let (host, repository) = (self.reference.host(), &self.reference.repository);
        let uri = uri(&format!("{scheme}://{host}/v2/{repository}/{kind}/{name}"))?;
        let mut response = self.fetch(uri.clone(), accept, self.authorization.clone())?;
        if response.status() == StatusCode::UNAUTHORIZED {
            let challenge = response.headers().get(WWW_AUTHENTICATE);
            let challenge = challenge.and_then(|value| value.to_str().ok()).unwrap_or_default();
            let authorization = self.answer(challenge)?;
            response = self.fetch(uri, accept, Some(authorization.clone()))?;
            self.authorization = Some(authorization);
        }
        match response.status() {
            StatusCode::OK => Ok(response),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(self.denied()),
            StatusCode::NOT_FOUND => Err(ImageError::NotFound {
                name: self.reference.to_string(),
                why: format!("`{host}` has no such {}", kind.trim_end_matches('s')),
            }),
            status => {
                let source = io::Error::other(format!("it answers {status}"));
                Err(ImageError::call(format!("get {} from {host}", self.reference), source))
            }
        }
    }

    fn denied(&self) -> ImageError {
        let registry = self.reference.registry.clone();
        ImageError::Denied { registry, name: self.reference.to_string() }
    }

    /// Answers what a registry says that it takes to be let in.
    fn answer(&self, challenge: &str) -> Result<String, ImageError> {
        let (scheme, parameters) = challenge.split_once(' ').unwrap_or((challenge, ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return self.login.as_ref().map(basic).ok_or_else(|| self.denied());
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(self.denied());
        }
        let parameters = parameters_of(parameters);
        let realm = parameters.get("realm").ok_or_else(|| {
            ImageError::refused("the registry's answer", "it says not where to get a token")
        })?;
        let scope = format!("repository:{}:pull", self.reference.repository);
        let mut query = format!("scope={}", escape(parameters.get("scope").unwrap_or(&scope)));
        if let Some(service) = parameters.get("service") {
            query = format!("service={}&{query}", escape(service));
        }
        let joint = if realm.contains('?') { '&' } else { '?' };
        let place = uri(&format!("{realm}{joint}{query}"))?;
        let response = self.fetch(place, "application/json", self.login.as_ref().map(basic))?;
        if response.status() != StatusCode::OK {
            return Err(self.denied());
        }
        let body = self.body(response);
        let token: Token = manifest::parse(&read_all(body, "token")?, "the token")?;
        let token = token.token.or(token.access_token).filter(|token| !token.is_empty());
        Ok(format!("Bearer {}", token.ok_or_else(|| self.denied())?))
    }

    /// Asks once, and again wherever the answer leads. Who we are is told to the first alone.
    fn fetch(
        &self,
        mut place: Uri,
        accept: &str,
        mut authorization: Option<String>,
    ) -> Result<Response<Incoming>, ImageError> {
        for _ in 0..=MAX_REDIRECTS {
            let response =
                self.runtime.block_on(self.ask(&place, accept, authorization.as_deref()));
            let response = response?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
            let location = location.ok_or_else(|| {
                ImageError::refused("the registry's answer", "it leads on to nowhere")
            })?;
            let next = if location.starts_with('/') {
                let scheme = place.scheme_str().unwrap_or("https");
                let host = place.authority().map(|host| host.as_str()).unwrap_or_default();
                uri(&format!("{scheme}://{host}{location}"))?
            } else {
                uri(location)?
            };
            if next.authority() != place.authority() || next.scheme() != place.scheme() {
                authorization = None;
            }
            place = next;
        }
        Err(ImageError::refused("the registry's answer", "it leads on too many times"))
    }

    async fn ask(
        &self,
        place: &Uri,
        accept: &str,
        authorization: Option<&str>,
    ) -> Result<Response<Incoming>, ImageError> {
        let failed = |error: io::Error| ImageError::call(format!("get {place}"), error);
        let request = Request::get(place.path_and_query().map_or("/", |path| path.as_str()))
            .header(HOST, place.authority().map(|host| host.as_str()).unwrap_or_default())
            .header(USER_AGENT, concat!("warren/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, accept);
        let request = match authorization {
            Some(value) => request.header(AUTHORIZATION, value),
            None => request,
        };
        let request = request
            .body(Empty::<Bytes>::new())
            .map_err(|error| ImageError::refused("the request", error.to_string()))?;
        let answered = async {
            let stream = self.connect(place).await?;
            if place.scheme() == Some(&Scheme::HTTPS) {
                let host = place.host().unwrap_or_default().trim_matches(['[', ']']);
                let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
                let stream = self.tls()?.connect(name, stream).await?;
                send(&self.runtime, stream, request).await
            } else {
                send(&self.runtime, stream, request).await
            }
        };
        let answered = self.stop.run_until_cancelled(timeout(PATIENCE, answered)).await;
        let answered = answered.ok_or_else(|| failed(super::stopped()))?;
        answered.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(failed)
    }

    /// Connects to one of the addresses that may be talked to.
    async fn connect(&self, place: &Uri) -> io::Result<TcpStream> {
        let denied = |why: &str| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        let default = match place.scheme_str() {
            Some("https") => 443,
            Some("http") if self.reach.plain_http => 80,
            Some("http") => {
                return denied("it is no registry that is spoken to without TLS");
            }
            _ => return denied("it is neither http nor https"),
        };
        let host = place.host().unwrap_or_default().trim_matches(['[', ']']);
        let port = place.port_u16().unwrap_or(default);
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in tokio::net::lookup_host((host, port)).await? {
            if !self.reach.anywhere && !is_public(address) {
                last = io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "its address is not public, and the configuration does not name it",
                );
                continue;
            }
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn tls(&self) -> io::Result<&TlsConnector> {
        if let Some(tls) = self.tls.get() {
            return Ok(tls);
        }
        let own = self.authorities.clone().into_iter();
        let hosts = AUTHORITIES.iter().map(PathBuf::from);
        let file = own.chain(hosts).find(|path| path.exists()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, "this host has no list of trusted certificates")
        })?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(&file).map_err(io::Error::other)? {
            // One that cannot be read is one that is not trusted.
            let _ = certificate.map(|certificate| roots.add(certificate));
        }
        let config = ClientConfig::builder_with_provider(Arc::new(
            tokio_rustls::rustls::crypto::ring::default_provider(),
        ))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
        Ok(self.tls.get_or_init(|| TlsConnector::from(Arc::new(config))))
    }
}

async fn send(
    runtime: &Runtime,
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    request: Request<Empty<Bytes>>,
) -> io::Result<Response<Incoming>> {
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.map_err(io::Error::other)?;
    // Goes on only while somebody reads; ends with the body or with the runtime.
    runtime.spawn(async {
        let _ = connection.await;
    });
    sender.send_request(request).await.map_err(io::Error::other)
}

#[derive(Deserialize)]
struct Token {
    #[serde(default)]
    token: Option<String>,
    #[serde(default)]
    access_token: Option<String>,
}

/// The body of an answer, read as it comes.
struct Body<'a> {
    runtime: &'a Runtime,
    stop: &'a CancellationToken,
    body: Incoming,
    piece: Bytes,
}

impl Read for Body<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            let next = async { timeout(PATIENCE, self.body.frame()).await };
            let next = self.runtime.block_on(self.stop.run_until_cancelled(next));
            match next.ok_or_else(super::stopped)?.map_err(|_| io::ErrorKind::TimedOut)? {
                None => return Ok(0),
                Some(frame) => {
                    let frame = frame.map_err(io::Error::other)?;
                    self.piece = frame.into_data().unwrap_or_default();
                }
            }
        }
        let count = self.piece.len().min(buffer.len());
        buffer[..count].copy_from_slice(&self.piece.split_to(count));
        Ok(count)
    }
}

fn read_all(body: impl Read, what: &str) -> Result<Vec<u8>, ImageError> {
    let mut bytes = Vec::new();
    let read = body.take(MAX_DOCUMENT + 1).read_to_end(&mut bytes);
    read.map_err(|error| ImageError::call("read the registry's answer", error))?;
    if bytes.len() as u64 > MAX_DOCUMENT {
        let what = format!("the registry's answer ({what})");
        return Err(ImageError::TooLarge { what, limit: MAX_DOCUMENT, unit: "bytes" });
    }
    Ok(bytes)
}

fn uri(text: &str) -> Result<Uri, ImageError> {
    let parsed = text.parse::<Uri>().ok().filter(|uri| uri.host().is_some());
    // A word alone is taken for a host.
    let parsed = parsed.filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
    let parsed = parsed.filter(|uri| !uri.authority().is_some_and(|a| a.as_str().contains('@')));
    parsed.ok_or_else(|| {
        let shown: String = text.chars().take(200).collect();
        ImageError::refused(format!("the address `{}`", shown.escape_debug()), "it leads nowhere")
    })
}

fn basic(login: &Login) -> String {
    let pair = format!("{}:{}", login.user, login.password);
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(pair))
}

/// Reads `a="x",b=y`.
fn parameters_of(text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut rest = text.trim();
    while let Some((name, value)) = rest.split_once('=') {
        let (value, after) = match value.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => value.split_at(value.find(',').unwrap_or(value.len())),
        };
        found.insert(name.trim().to_ascii_lowercase(), value.to_owned());
        rest = after.trim_start().trim_start_matches(',').trim_start();
    }
    found
}

fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

/// Tells whether an address is one of the Internet at large.
fn is_public(address: SocketAddr) -> bool {
    egress::is_public(address.ip().to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_internet_are_public() {
        let public = |text: &str| is_public(SocketAddr::new(text.parse().unwrap(), 443));
        for text in ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"] {
            assert!(public(text), "{text}");
        }
        for text in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "168.63.129.16",
            "0.0.0.0",
            "100.64.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "198.18.0.1",
            "192.0.0.8",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "2001::1",
            "2001:db8::1",
            "ff02::1",
        ] {
            assert!(!public(text), "{text}");
        }
    }

    #[test]
    fn a_challenge_is_read_as_it_is_written_everywhere() {
        let found = parameters_of(
            r#"realm="https://a/t?x=1",service=reg, scope="repository:a/b:pull,push""#,
        );
        assert_eq!(found["realm"], "https://a/t?x=1");
        assert_eq!(found["service"], "reg");
        assert_eq!(found["scope"], "repository:a/b:pull,push");
        for text in ["", "=", "a", "a=\"", "a=\"b", ",,,", "a=,b="] {
            parameters_of(text);
        }
        assert_eq!(escape("a b/ä&="), "a%20b%2F%C3%A4%26%3D");
    }

    #[test]
    fn nobody_is_told_our_name_by_an_address() {
        for text in ["http://user:pass@host/x", "/x", "", "ftp", "http:///x"] {
            assert!(uri(text).is_err(), "{text}");
        }
        assert_eq!(
            format!("{:?}", Login { user: "a".into(), password: "s3cret".into() }).find("s3cret"),
            None
        );
    }
}
