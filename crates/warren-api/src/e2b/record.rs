//! What E2B needs to know of a sandbox beyond its session: kept in the daemon's journal, so that it
//! outlives a `kill -9` like the sandbox itself.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use warren::SandboxId;
use warren::clock::{BootMoment, Clocks};

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
    /// The same by the clock of the host's run, which nobody can set. Records of before have none.
    #[serde(default)]
    pub(crate) end_moment: Option<BootMoment>,
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
    /// Notes that it ends so long from now.
    pub(crate) fn lease(&mut self, timeout_s: u64, clocks: &Clocks) {
        let time = i64::try_from(timeout_s).ok().and_then(TimeDelta::try_seconds);
        self.end_at = clocks.wall + time.unwrap_or_default();
        self.end_moment = clocks.moment_in(Duration::from_secs(timeout_s));
        self.timeout_s = timeout_s;
    }

    /// Returns how much of its time is left. That is never more than it was last given, also if the host was started anew
    /// with a clock that went back.
    pub(crate) fn left(&self, clocks: &Clocks) -> Duration {
        let left = clocks.until(self.end_at, self.end_moment.as_ref());
        left.min(Duration::from_secs(self.timeout_s))
    }

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
