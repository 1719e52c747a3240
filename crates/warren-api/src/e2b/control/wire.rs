//! What is sent and answered, with E2B's own names. What is sent and not named here is ignored.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::super::record::{OnTimeout, PauseMode, Record, State};

/// The version of envd that we are as good as.
pub(super) const ENVD_VERSION: &str = "0.6.13";
/// What stands for the client, which no release looks at.
const CLIENT: &str = "warren";

/// A sandbox that is asked for, by either generation of the API.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NewSandbox {
    #[serde(rename = "templateID")]
    pub(super) template_id: String,
    pub(super) timeout: Option<u64>,
    pub(super) metadata: Option<BTreeMap<String, String>>,
    pub(super) env_vars: Option<BTreeMap<String, String>>,
    pub(super) secure: Option<bool>,
    pub(super) auto_pause: Option<bool>,
    pub(super) auto_pause_memory: Option<bool>,
    pub(super) auto_resume: Option<AutoResume>,
    #[serde(rename = "allow_internet_access")]
    pub(super) allow_internet_access: Option<bool>,
    pub(super) network: Option<Network>,
    pub(super) iam: Option<Value>,
    pub(super) volume_mounts: Option<Vec<Value>>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct AutoResume {
    pub(super) enabled: bool,
}

/// What may come in and go out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Network {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) allow_public_traffic: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) allow_out: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) deny_out: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) egress_proxy: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mask_request_host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) https_ports: Option<Vec<u16>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dns_servers: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rules: Option<Value>,
    /// Only a change of the rules has it here.
    #[serde(rename = "allow_internet_access", skip_serializing)]
    pub(crate) allow_internet_access: Option<bool>,
}

impl Network {
    /// Says which rule makes no sense.
    pub(super) fn check(&self) -> Result<(), String> {
        let address = |text: &str| {
            let (ip, bits) = text.split_once('/').unwrap_or((text, ""));
            ip.parse::<std::net::IpAddr>().is_ok()
                && (bits.is_empty() || bits.parse::<u8>().is_ok())
        };
        let denied = self.deny_out.as_deref().unwrap_or_default();
        if let Some(odd) = denied.iter().find(|entry| !address(entry)) {
            return Err(format!("invalid denied entry: '{odd}' must be an IP address or a CIDR"));
        }
        let names = self.allow_out.iter().flatten().any(|entry| !address(entry));
        if names && !denied.iter().any(|entry| entry == "0.0.0.0/0") {
            return Err("when specifying allowed domains, you must include 'ALL_TRAFFIC' \
                        (0.0.0.0/0) in deny out to block all other traffic"
                .to_owned());
        }
        Ok(())
    }

    /// Returns it as it is shown: without a password.
    fn shown(&self) -> Self {
        let mut shown = self.clone();
        if let Some(Value::Object(proxy)) = &mut shown.egress_proxy {
            proxy.remove("password");
        }
        shown
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Lease {
    pub(super) timeout: Option<u64>,
    pub(super) duration: Option<u64>,
    pub(super) auto_pause: Option<bool>,
    pub(super) memory: Option<bool>,
    pub(super) count: Option<u32>,
    pub(super) name: Option<String>,
}

/// A sandbox as the one who made it or joined it sees it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SandboxView {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    envd_version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    traffic_access_token: Option<String>,
    domain: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<String>,
}

impl SandboxView {
    pub(super) fn of(record: &Record, domain: Option<&str>) -> Self {
        Self {
            template_id: record.template.clone(),
            sandbox_id: record.id(),
            client_id: CLIENT,
            envd_version: ENVD_VERSION,
            envd_access_token: record.access_token.clone(),
            traffic_access_token: record.traffic_token.clone(),
            domain: domain.map(str::to_owned),
            alias: record.alias.clone(),
        }
    }
}

/// A sandbox in a list.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListedView {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    started_at: DateTime<Utc>,
    end_at: DateTime<Utc>,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    state: &'static str,
    envd_version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<String>,
    metadata: BTreeMap<String, String>,
}

impl ListedView {
    pub(super) fn of(record: &Record) -> Self {
        Self {
            template_id: record.template.clone(),
            sandbox_id: record.id(),
            client_id: CLIENT,
            started_at: record.started_at,
            end_at: record.end_at,
            cpu_count: record.cpus,
            memory_mb: record.memory_mb,
            disk_size_mb: record.disk_mb,
            state: match record.state {
                State::Running => "running",
                State::Paused(_) => "paused",
            },
            envd_version: ENVD_VERSION,
            alias: record.alias.clone(),
            metadata: record.metadata.clone(),
        }
    }
}

/// A sandbox with all that is known of it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DetailView {
    #[serde(flatten)]
    listed: ListedView,
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    domain: Option<String>,
    allow_internet_access: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<Network>,
    lifecycle: Lifecycle,
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_mode: Option<&'static str>,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Lifecycle {
    auto_resume: bool,
    on_timeout: &'static str,
}

impl DetailView {
    pub(super) fn of(record: &Record, domain: Option<&str>) -> Self {
        Self {
            listed: ListedView::of(record),
            envd_access_token: record.access_token.clone(),
            domain: domain.map(str::to_owned),
            allow_internet_access: record.allow_internet,
            network: record.network.as_ref().map(Network::shown),
            lifecycle: Lifecycle {
                auto_resume: record.auto_resume,
                on_timeout: match record.on_timeout {
                    OnTimeout::Kill => "kill",
                    OnTimeout::Pause(_) => "pause",
                },
            },
            pause_mode: match record.state {
                State::Running => None,
                State::Paused(PauseMode::Full) => Some("full"),
                State::Paused(PauseMode::Filesystem) => Some("filesystem"),
            },
        }
    }
}

/// What a sandbox used at one moment.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MetricView {
    pub(super) timestamp: DateTime<Utc>,
    pub(super) timestamp_unix: i64,
    pub(super) cpu_count: u32,
    pub(super) cpu_used_pct: f64,
    pub(super) mem_used: u64,
    pub(super) mem_total: u64,
    pub(super) mem_cache: u64,
    pub(super) disk_used: u64,
    pub(super) disk_total: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_go_out_only_where_all_else_may_not() {
        let network = |allow: &[&str], deny: &[&str]| Network {
            allow_out: Some(allow.iter().map(|&one| one.to_owned()).collect()),
            deny_out: Some(deny.iter().map(|&one| one.to_owned()).collect()),
            ..Network::default()
        };
        assert!(network(&["1.1.1.1", "10.0.0.0/8"], &["8.8.8.8"]).check().is_ok());
        assert!(network(&["example.org"], &["0.0.0.0/0"]).check().is_ok());
        assert!(network(&["example.org"], &[]).check().is_err());
        assert!(network(&[], &["example.org"]).check().is_err());
    }

    #[test]
    fn a_password_of_a_proxy_is_not_shown() {
        let proxy = serde_json::json!({ "address": "a:1", "username": "u", "password": "secret" });
        let network = Network { egress_proxy: Some(proxy), ..Network::default() };
        let shown = serde_json::to_string(&network.shown()).unwrap();
        assert!(shown.contains("\"username\"") && !shown.contains("secret"), "{shown}");
    }
}
