//! How many sandboxes are kept warm.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How many pristine sandboxes the manager keeps ready, and of which profiles.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolConfig {
    /// Whether there is a pool at all.
    pub enabled: bool,
    /// How many are kept ready for each profile.
    pub min_warm: u32,
    /// How many there may ever be.
    pub max_warm: u32,
    /// How old one may grow before it is replaced.
    pub warm_ttl: Duration,
    /// The profiles that are kept warm.
    pub warm_profiles: Vec<String>,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            min_warm: 2,
            max_warm: 10,
            warm_ttl: Duration::from_secs(600),
            warm_profiles: vec!["default".to_owned()],
        }
    }
}
