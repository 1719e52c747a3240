//! TLS for a listener: a certificate of one's own, or one that is made here and trusted by nobody who
//! was not given it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::http::Version;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};

use crate::Peer;
use crate::server::{Connection, Listener};

/// A certificate with its key, both as PEM.
#[derive(Clone)]
pub struct Certificate {
    /// The chain, the server's own first.
    pub chain: String,
    /// The key of the first.
    pub key: String,
}

impl std::fmt::Debug for Certificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Certificate").field("chain", &self.chain).finish_non_exhaustive()
    }
}

impl Certificate {
    /// Makes one for a domain and every name right below it, and the authority that vouches for it,
    /// as PEM, for those who are to trust it. The key of the authority is forgotten at once.
    pub fn make(domain: &str) -> io::Result<(Self, String)> {
        let failed = |error: rcgen::Error| io::Error::other(error);
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        authority.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        authority.distinguished_name.push(DnType::CommonName, "Warren, for tests");
        let authority_key = KeyPair::generate().map_err(failed)?;
        let trusted = authority.self_signed(&authority_key).map_err(failed)?.pem();
        let names = vec![domain.to_owned(), format!("*.{domain}")];
        let mut server = CertificateParams::new(names).map_err(failed)?;
        server.distinguished_name.push(DnType::CommonName, domain);
        server.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().map_err(failed)?;
        let issuer = Issuer::new(authority, authority_key);
        let own = server.signed_by(&key, &issuer).map_err(failed)?;
        Ok((Self { chain: own.pem(), key: key.serialize_pem() }, trusted))
    }

    fn config(&self) -> io::Result<ServerConfig> {
        let invalid = |what: &str| {
            let message = format!("the certificate's {what} is not PEM");
            io::Error::new(io::ErrorKind::InvalidData, message)
        };
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(self.chain.as_bytes()).collect();
        let chain = chain.ok().filter(|chain| !chain.is_empty()).ok_or_else(|| invalid("chain"))?;
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes()).map_err(|_| invalid("key"))?;
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?;
        let mut config = builder
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}

/// A listener whose connections are encrypted.
pub struct TlsListener {
    tcp: TcpListener,
    acceptor: TlsAcceptor,
}

impl std::fmt::Debug for TlsListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsListener").field("tcp", &self.tcp).finish_non_exhaustive()
    }
}

impl TlsListener {
    /// Encrypts what comes to a listener.
    pub fn new(tcp: TcpListener, certificate: &Certificate) -> io::Result<Self> {
        Ok(Self { tcp, acceptor: Arc::new(certificate.config()?).into() })
    }
}

impl Listener for TlsListener {
    type Stream = Encrypted;

    async fn next(&self) -> io::Result<(Encrypted, Peer)> {
        let (stream, peer) = self.tcp.next().await?;
        // Greeted by whoever reads first, in a task of its own: one that is slow holds up nobody.
        Ok((Encrypted::Greeting(Box::new(self.acceptor.accept(stream))), peer))
    }
}

/// An encrypted connection, from its first byte on.
pub enum Encrypted {
    /// Nothing was said yet.
    Greeting(Box<Accept<TcpStream>>),
    /// Both sides know the keys.
    Open(Box<TlsStream<TcpStream>>),
    /// The other side could not be understood.
    Failed,
}

impl std::fmt::Debug for Encrypted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Encrypted")
    }
}

impl Encrypted {
    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<&mut TlsStream<TcpStream>>> {
        if let Self::Greeting(greeting) = self {
            match ready!(Pin::new(&mut **greeting).poll(cx)) {
                Ok(stream) => *self = Self::Open(Box::new(stream)),
                Err(error) => {
                    *self = Self::Failed;
                    return Poll::Ready(Err(error));
                }
            }
        }
        match self {
            Self::Open(stream) => Poll::Ready(Ok(stream)),
            Self::Greeting(_) | Self::Failed => {
                Poll::Ready(Err(io::ErrorKind::NotConnected.into()))
            }
        }
    }
}

impl Connection for Encrypted {
    fn reset(&self) {
        match self {
            Self::Greeting(greeting) => {
                if let Some(stream) = greeting.get_ref() {
                    stream.reset();
                }
            }
            Self::Open(stream) => stream.get_ref().0.reset(),
            Self::Failed => {}
        }
    }

    async fn agree(&mut self) -> io::Result<Version> {
        let stream = std::future::poll_fn(|cx| self.poll_open(cx).map_ok(|_| ())).await;
        stream?;
        let protocol = match self {
            Self::Open(stream) => stream.get_ref().1.alpn_protocol(),
            Self::Greeting(_) | Self::Failed => None,
        };
        Ok(if protocol == Some(b"h2") { Version::HTTP_2 } else { Version::HTTP_11 })
    }
}

impl AsyncRead for Encrypted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = ready!(self.poll_open(cx))?;
        Pin::new(stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Encrypted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let stream = ready!(self.poll_open(cx))?;
        Pin::new(stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let stream = ready!(self.poll_open(cx))?;
        Pin::new(stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut *self {
            Self::Open(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Greeting(_) | Self::Failed => Poll::Ready(Ok(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::pki_types::ServerName;
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};
    use tokio_util::task::TaskTracker;

    use super::*;

    #[tokio::test]
    async fn names_below_the_domain_are_vouched_for_and_no_others() {
        let (certificate, authority) = Certificate::make("e2b.test").unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap();
        let listener = TlsListener::new(tcp, &certificate).unwrap();
        let (tasks, more) = (TaskTracker::new(), TaskTracker::new());
        tasks.spawn(async move {
            while let Ok((mut stream, _)) = listener.next().await {
                more.spawn(async move {
                    let mut said = [0; 2];
                    if stream.read_exact(&mut said).await.is_ok() {
                        let _ = stream.write_all(&said).await;
                        let _ = stream.shutdown().await;
                    }
                });
            }
        });
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = TlsConnector::from(Arc::new(config));
        let ask = async |name: &'static str| {
            let stream = TcpStream::connect(address).await.unwrap();
            let mut stream = connector.connect(ServerName::try_from(name).unwrap(), stream).await?;
            stream.write_all(b"hi").await?;
            let mut said = Vec::new();
            stream.read_to_end(&mut said).await?;
            io::Result::Ok(said)
        };
        // Somebody who says nothing holds up nobody.
        let _silent = TcpStream::connect(address).await.unwrap();
        assert_eq!(ask("8080-abc.e2b.test").await.unwrap(), b"hi");
        assert_eq!(ask("e2b.test").await.unwrap(), b"hi");
        assert!(ask("evil.test").await.is_err());
        let bad = Certificate { key: "none".into(), ..certificate };
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        assert!(TlsListener::new(tcp, &bad).is_err());
    }
}
