//! Looks up names.

use std::fmt;
use std::io;
use std::net::{IpAddr, ToSocketAddrs as _};

use async_trait::async_trait;
use tokio::sync::OwnedSemaphorePermit;

/// Says that a name is being looked up, until it is dropped. There are so many of them.
#[derive(Debug)]
pub struct Busy {
    _permits: [OwnedSemaphorePermit; 2],
}

impl Busy {
    pub(super) fn new(own: OwnedSemaphorePermit, shared: OwnedSemaphorePermit) -> Self {
        Self { _permits: [own, shared] }
    }
}

/// Finds the addresses of a name.
#[async_trait]
pub trait Resolve: fmt::Debug + Send + Sync {
    /// Returns them, the best first. What is not public among them is not dialled.
    ///
    /// Whoever asked may have stopped waiting: `busy` is to be kept for as long as anything goes on for it.
    async fn resolve(&self, name: &str, busy: Busy) -> io::Result<Vec<IpAddr>>;
}

/// Asks as every other program of this host does.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemResolver;

#[async_trait]
impl Resolve for SystemResolver {
    async fn resolve(&self, name: &str, busy: Busy) -> io::Result<Vec<IpAddr>> {
        // With the dot it is this very name, and not one below the domain of the host.
        let name = format!("{name}.");
        let look = move || {
            let _busy = busy;
            (name, 0).to_socket_addrs().map(|found| found.map(|address| address.ip()).collect())
        };
        tokio::task::spawn_blocking(look).await.map_err(io::Error::other)?
    }
}
