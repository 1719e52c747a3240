//! What E2B needs to know of a sandbox beyond its session: kept in the daemon's journal, so that it
//! outlives a `kill -9` like the sandbox itself.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use warren::SandboxId;

use super::control::wire::Network;
use crate::keys::Quotas;

/// The notes of the journal that these are.
pub(super) const NOTE: &str = "e2b/sandbox/";

/// What is kept of one sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The sandbox at the manager.
    pub(crate) sandbox: SandboxId,
    /// The session that keeps it.
    pub(crate) session: String,
    /// Whose it is.
    pub(crate) tenant: String,
    /// What its tenant may have, by the key that made it.
    pub(crate) quotas: Quotas,
    /// What it was made from.
    pub(crate) template: String,
    /// A name of that.
    pub(crate) alias: Option<String>,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) access_token: Option<String>,
    pub(crate) traffic_token: Option<String>,
    pub(crate) started_at: DateTime<Utc>,
    pub(crate) end_at: DateTime<Utc>,
    /// For how long it was last asked for.
    pub(crate) timeout_s: u64,
    pub(crate) on_timeout: OnTimeout,
    pub(crate) auto_resume: bool,
    pub(crate) state: State,
    pub(crate) allow_internet: Option<bool>,
    pub(crate) network: Option<Network>,
    /// Who runs commands where nobody says, by its template.
    #[serde(default)]
    pub(crate) user: Option<String>,
    /// Where commands run where nobody says, by its template.
    #[serde(default)]
    pub(crate) workdir: Option<String>,
    pub(crate) cpus: u32,
    pub(crate) memory_mb: u64,
    pub(crate) disk_mb: u64,
}

/// What becomes of a sandbox when its time is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OnTimeout {
    Kill,
    Pause(PauseMode),
}

/// What of a sandbox a pause keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PauseMode {
    /// Everything: processes go on where they were.
    Full,
    /// Its files; it is booted anew.
    Filesystem,
}

/// Whether a sandbox runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    Running,
    Paused(PauseMode),
}

impl Record {
    /// Returns the id by which E2B's clients know it.
    pub(crate) fn id(&self) -> String {
        short(&self.sandbox)
    }
}

/// Returns the digits of a sandbox's UUID: E2B's ids are lower-case letters and digits alone.
pub(crate) fn short(id: &SandboxId) -> String {
    id.as_str().trim_start_matches("sbx-").replace('-', "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_the_digits_of_the_uuid() {
        let id = SandboxId::from_string("sbx-0b6a8f3e-4f0e-4a2b-9c1d-0123456789ab");
        assert_eq!(short(&id), "0b6a8f3e4f0e4a2b9c1d0123456789ab");
        assert_eq!(short(&SandboxId::new()).len(), 32);
    }
}
