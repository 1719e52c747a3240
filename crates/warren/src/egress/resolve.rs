//! Looks up names.

use std::fmt;
use std::io;
use std::net::IpAddr;

use async_trait::async_trait;

/// Finds the addresses of a name.
#[async_trait]
pub trait Resolve: fmt::Debug + Send + Sync {
    /// Returns them, the best first. What is not public among them is not dialled.
    async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>>;
}

/// Asks as every other program of this host does.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemResolver;

#[async_trait]
impl Resolve for SystemResolver {
    async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        // With the dot it is this very name, and not one below the domain of the host.
        let found = tokio::net::lookup_host((format!("{name}."), 0)).await?;
        Ok(found.map(|address| address.ip()).collect())
    }
}
