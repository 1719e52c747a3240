//! The dialect of E2B: what its SDKs speak to a control plane and to a sandbox, on one port.
//!
//! `routing` tells sandbox traffic from the control plane. Traffic goes to `envd`, which is in
//! the sandbox where it comes from and is us here, or to a port inside. Which sandboxes there are
//! is for the control plane to know: it keeps the [`SandboxDirectory`].

pub mod control;
mod directory;
mod envd;
mod record;
mod routing;

use std::fmt;
use std::sync::Arc;

use axum::Router;

pub use directory::{Door, SandboxDirectory, SandboxEntry};

use crate::{Api, audit};

#[cfg(feature = "fuzz")]
pub(crate) use envd::fuzz;
#[cfg(feature = "fuzz")]
pub(crate) use routing::fuzz_routing;

/// The dialect of E2B before one manager. Clones are handles to the same one.
#[derive(Clone)]
pub struct E2b(Arc<Inner>);

struct Inner {
    api: Api,
    directory: Arc<dyn SandboxDirectory>,
    watchers: envd::Watchers,
}

impl fmt::Debug for E2b {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("E2b").finish_non_exhaustive()
    }
}

impl E2b {
    /// Puts the dialect before a manager.
    pub fn new(api: &Api, directory: Arc<dyn SandboxDirectory>) -> Self {
        Self(Arc::new(Inner { api: api.clone(), directory, watchers: Default::default() }))
    }
}

/// Lists every call to a sandbox's envd, as a method and a path.
pub fn envd_routes() -> impl Iterator<Item = (&'static str, &'static str)> {
    envd::routes()
}

/// Returns the router of the whole dialect: traffic of sandboxes, and everything else to `control`.
///
/// Each request must carry its [`Peer`](crate::Peer).
pub fn router(e2b: &E2b, control: Router) -> Router {
    audit::around(&e2b.0.api, routing::router(e2b, control))
}
