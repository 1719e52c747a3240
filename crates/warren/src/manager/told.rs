//! What whoever keeps account of commands is told, and when.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::time::sleep;

use super::Inner;
use super::guarded::Guarded;
use crate::{ExecEnd, ExecHandle, Outcome, Result, Run, Sandbox, SandboxId, Witness};

/// How often a look is taken at what sandboxes were refused.
const LOOK: Duration = Duration::from_secs(1);

/// Who is told, and what nobody was there to be told.
#[derive(Debug, Default)]
pub(super) struct Telling {
    witness: Option<Arc<dyn Witness>>,
    /// Sandboxes that had ended when the manager was opened, and whose they were.
    gone: Vec<(SandboxId, String)>,
}

impl Inner {
    pub(super) fn witness(&self) -> Option<Arc<dyn Witness>> {
        let telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        telling.witness.clone()
    }

    /// Has somebody be told from now on, and of what is there to be told already.
    pub(super) async fn tell(self: &Arc<Self>, witness: Arc<dyn Witness>) {
        let gone = {
            let mut telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
            telling.witness = Some(Arc::clone(&witness));
            std::mem::take(&mut telling.gone)
        };
        for (sandbox, client) in gone {
            witness.gone(&sandbox, &client);
        }
        // Those that run are watched already, and whoever does finds somebody to tell from now on.
        for handle in self.handles() {
            Guarded::new(Arc::clone(self), handle, None).tell_ended().await;
        }
    }

    /// Tells that a sandbox has ended while nobody was there, or keeps it until there is somebody to tell.
    pub(super) fn tell_gone(&self, sandbox: &SandboxId, client: &str) {
        let mut telling = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        match &telling.witness {
            Some(witness) => witness.gone(sandbox, client),
            None => telling.gone.push((sandbox.clone(), client.to_owned())),
        }
    }

    /// Tells what an exec came to, unless somebody did.
    pub(super) fn tell_end(
        &self,
        exec: &dyn ExecHandle,
        sandbox: &SandboxId,
        client: &str,
        end: &Result<ExecEnd>,
    ) {
        let Some(witness) = self.witness() else { return };
        if !exec.claim_end() {
            return;
        }
        let info = exec.info();
        let run = Run { sandbox, client, request: &info.request_id, name: Some(exec.id()) };
        if witness.ended(&run, &Outcome::of(end)) {
            exec.end_was_told();
        }
    }

    /// Returns whose a sandbox is, as far as that is still known.
    pub(super) fn client_of(&self, sandbox: &SandboxId) -> String {
        let registry = self.registry();
        let entry = registry.sandboxes.get(sandbox);
        entry.and_then(|entry| entry.owner.clone()).unwrap_or_default()
    }

    fn handles(&self) -> Vec<Arc<dyn Sandbox>> {
        self.registry().sandboxes.values().filter_map(|entry| entry.handle.clone()).collect()
    }

    /// Tells what sandboxes were refused; with `all`, also of those of which it was told lately.
    pub(super) fn tell_barred(&self, all: bool) {
        let Some(witness) = self.witness() else { return };
        for handle in self.handles() {
            if let Some(barred) = handle.take_barred(all) {
                witness.barred(handle.id(), &self.client_of(handle.id()), &barred);
            }
        }
    }

    /// Tells it now and then, until the manager stops.
    pub(super) async fn keep_told(self: Arc<Self>) {
        while self.stop.run_until_cancelled(sleep(LOOK)).await.is_some() {
            self.tell_barred(false);
        }
    }
}
