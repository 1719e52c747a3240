//! Which sandboxes there are, as E2B's clients name them.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;
use warren::{Sandbox, SandboxId};

use crate::keys::Quotas;

/// The sandboxes that can be reached by E2B's ids. The control plane keeps it; whoever brings traffic
/// to a sandbox looks there.
#[async_trait]
pub trait SandboxDirectory: Send + Sync {
    /// Tells what has to be shown at a sandbox that [`find`](Self::find) would find. It wakes none.
    fn door(&self, id: &str) -> Option<Door>;

    /// Finds a sandbox that runs. One that is paused and to be woken by traffic is woken first.
    ///
    /// `None` for everything else (unknown, killed, expired, paused): nobody can tell which.
    async fn find(&self, id: &str) -> Option<SandboxEntry>;

    /// Lists those that run, for a signed URL that does not say whose it is.
    async fn running(&self) -> Vec<SandboxEntry>;
}

/// What has to be shown at a sandbox before anything is done for whoever comes.
#[derive(Clone)]
pub struct Door {
    /// The id that E2B's clients know it by.
    pub id: String,
    /// The sandbox.
    pub sandbox: SandboxId,
    /// What `X-Access-Token` must be, if it is secured.
    pub access_token: Option<String>,
    /// What `e2b-traffic-access-token` must be for every port but envd's, if not everybody may come.
    pub traffic_token: Option<String>,
    /// Whether it is paused, and would be woken.
    pub sleeps: bool,
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door").field("id", &self.id).finish_non_exhaustive()
    }
}

/// A sandbox that runs, and what its clients and its traffic need to know of it.
#[derive(Clone)]
pub struct SandboxEntry {
    /// Its id: lower-case letters and digits.
    pub id: String,
    /// It.
    pub sandbox: Arc<dyn Sandbox>,
    /// Whose it is.
    pub tenant: Arc<str>,
    /// What that tenant may have.
    pub quotas: Quotas,
    /// What `X-Access-Token` must be, if it is secured.
    pub access_token: Option<String>,
    /// What its servers get as `Host`, `${PORT}` standing for the port.
    pub host_mask: Option<String>,
    /// What every command has in its environment.
    pub env: Vec<(String, String)>,
    /// Who runs commands and owns files where a request does not say: `user`.
    pub user: String,
    /// Where commands run that do not say: the user's home if absent.
    pub workdir: Option<String>,
    /// Cancelled when it is killed or paused: what streams from it is cut off then.
    pub over: CancellationToken,
}

impl fmt::Debug for SandboxEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SandboxEntry").field("id", &self.id).finish_non_exhaustive()
    }
}
