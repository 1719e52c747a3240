//! What is sent and answered, with E2B's own names. What is sent and not named here is ignored.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use warren::{Destination, DestinationHost, Reach};

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
    pub(crate) allow_public_traffic: Option<bool>,
    pub(crate) allow_out: Option<Vec<String>>,
    pub(crate) deny_out: Option<Vec<String>>,
    pub(crate) egress_proxy: Option<Value>,
    pub(crate) mask_request_host: Option<String>,
    pub(crate) https_ports: Option<Vec<u16>>,
    pub(crate) dns_servers: Option<Vec<String>>,
    pub(crate) rules: Option<Value>,
    /// Only a change of the rules has it here.
    #[serde(rename = "allow_internet_access", skip_serializing)]
    pub(crate) allow_internet_access: Option<bool>,
}

impl Network {
    /// Says what may be reached by these rules, which one makes no sense, or which is not kept here.
    pub(super) fn reach(&self, internet: Option<bool>) -> Result<Reach, String> {
        let entry = |kind: &str, text: &String, what: &str| {
            let bad = |_| format!("invalid {kind} entry: '{text}' must be {what}");
            text.parse::<Destination>().map_err(bad)
        };
        let is_name = |one: &Destination| matches!(one.host, DestinationHost::Name(_));
        let most = Reach::MAX_ENTRIES;
        let bounded = |count: usize| match count > most {
            true => Err(format!("too many entries: allowOut and denyOut may have {most} together")),
            false => Ok(()),
        };
        let count = |list: &Option<Vec<String>>| list.as_ref().map_or(0, Vec::len);
        bounded(count(&self.deny_out) + count(&self.allow_out))?;
        let mut reach = Reach::default();
        for text in self.deny_out.iter().flatten() {
            let what = "an IP address or a CIDR";
            let denied = entry("denied", text, what)?;
            if is_name(&denied) || denied.port.is_some() {
                return Err(format!("invalid denied entry: '{text}' must be {what}"));
            }
            reach.deny.push(denied);
        }
        for text in self.allow_out.iter().flatten() {
            reach.allow.push(entry("allowed", text, "an IP address, a CIDR or a domain")?);
        }
        // All traffic is written as that of IPv4, and meant.
        let [v4, v6] = Destination::EVERY_ADDRESS;
        if internet.or(self.allow_internet_access) == Some(false) {
            reach.deny.push(v4.clone());
        }
        for list in [&mut reach.deny, &mut reach.allow] {
            if list.contains(&v4) {
                list.push(v6.clone());
            }
        }
        bounded(reach.deny.len() + reach.allow.len())?;
        if reach.allow.iter().any(is_name) && !reach.deny.contains(&v4) {
            return Err("when specifying allowed domains, you must include 'ALL_TRAFFIC' \
                        (0.0.0.0/0) in deny out to block all other traffic"
                .to_owned());
        }
        let asks = |value: &Option<Value>| match value {
            Some(Value::Object(fields)) => !fields.is_empty(),
            Some(value) => !value.is_null(),
            None => false,
        };
        let filled = |list: &Option<Vec<String>>| list.as_ref().is_some_and(|all| !all.is_empty());
        let unkept = [
            ("egressProxy", asks(&self.egress_proxy)),
            ("httpsPorts", self.https_ports.as_ref().is_some_and(|ports| !ports.is_empty())),
            ("dnsServers", filled(&self.dns_servers)),
            ("rules", asks(&self.rules)),
        ];
        match unkept.iter().find(|(_, asked)| *asked) {
            Some((name, _)) => Err(format!(
                "network.{name} is not supported by this server: its sandboxes reach what they may \
                 as the server itself does, by TCP alone"
            )),
            None => Ok(reach),
        }
    }

    /// Returns it as it is shown: what was said, without a password.
    fn shown(&self) -> Value {
        let mut shown = serde_json::to_value(self).unwrap_or_default();
        if let Value::Object(fields) = &mut shown {
            fields.retain(|_, field| !field.is_null());
            if let Some(Value::Object(proxy)) = fields.get_mut("egressProxy") {
                proxy.remove("password");
            }
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

/// What is said of a sandbox wherever one is shown.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    envd_version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    alias: Option<String>,
}

impl Head {
    fn of(record: &Record) -> Self {
        Self {
            template_id: record.template.clone(),
            sandbox_id: record.id(),
            client_id: CLIENT,
            envd_version: ENVD_VERSION,
            alias: record.alias.clone(),
        }
    }
}

/// A sandbox as the one who made it or joined it sees it.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SandboxView {
    #[serde(flatten)]
    head: Head,
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    traffic_access_token: Option<String>,
    domain: Option<String>,
}

impl SandboxView {
    pub(super) fn of(record: &Record, domain: Option<&str>) -> Self {
        Self {
            head: Head::of(record),
            envd_access_token: record.access_token.clone(),
            traffic_access_token: record.traffic_token.clone(),
            domain: domain.map(str::to_owned),
        }
    }
}

/// A sandbox in a list.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListedView {
    #[serde(flatten)]
    head: Head,
    started_at: DateTime<Utc>,
    end_at: DateTime<Utc>,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u64,
    state: &'static str,
    metadata: BTreeMap<String, String>,
}

impl ListedView {
    pub(super) fn of(record: &Record) -> Self {
        Self {
            head: Head::of(record),
            started_at: record.started_at,
            end_at: record.end_at,
            cpu_count: record.cpus,
            memory_mb: record.memory_mb,
            disk_size_mb: record.disk_mb,
            state: match record.state {
                State::Running => "running",
                State::Paused(_) => "paused",
            },
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
    network: Option<Value>,
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
    fn rules_that_make_no_sense_are_refused_first() {
        let network = |allow: &[&str], deny: &[&str]| Network {
            allow_out: Some(allow.iter().map(|&one| one.to_owned()).collect()),
            deny_out: Some(deny.iter().map(|&one| one.to_owned()).collect()),
            ..Network::default()
        };
        let why = |allow: &[&str], deny: &[&str]| network(allow, deny).reach(None).unwrap_err();
        let reach = |allow: &[&str], deny: &[&str]| network(allow, deny).reach(None).unwrap();
        assert_eq!(reach(&[], &[]), Reach::default());
        assert_eq!(reach(&[], &["0.0.0.0/0"]), Reach::nothing(), "of IPv6 as well");
        assert_eq!(reach(&[], &["8.8.8.8", "10.0.0.0/8"]).deny.len(), 2);
        assert_eq!(network(&[], &[]).reach(Some(false)).unwrap(), Reach::nothing());
        assert_eq!(network(&["1.1.1.1"], &[]).reach(Some(false)).unwrap().allow.len(), 1);
        assert!(why(&["example.org"], &[]).contains("ALL_TRAFFIC"));
        assert!(why(&[], &["example.org"]).contains("invalid denied entry"));
        assert!(why(&[], &["1.1.1.1:80"]).contains("invalid denied entry"));
        assert!(why(&["http://a"], &["0.0.0.0/0"]).contains("invalid allowed entry"));
        assert_eq!(reach(&["*.example.org"], &["0.0.0.0/0"]).allow.len(), 1);
        assert_eq!(reach(&["0.0.0.0/0"], &["0.0.0.0/0"]).allow, Destination::EVERY_ADDRESS);
    }

    #[test]
    fn there_are_no_more_rules_than_can_be_gone_through_for_each_connection() {
        let network = |allow: usize, deny: usize| Network {
            allow_out: Some(vec!["1.1.1.1".to_owned(); allow]),
            deny_out: Some(vec!["0.0.0.0/0".to_owned(); deny]),
            ..Network::default()
        };
        // All traffic is of IPv6 as well, which is one more.
        for (allow, deny) in [(Reach::MAX_ENTRIES, 0), (Reach::MAX_ENTRIES - 2, 1)] {
            let reach = network(allow, deny).reach(None).unwrap();
            assert_eq!(reach.allow.len() + reach.deny.len(), Reach::MAX_ENTRIES, "control");
        }
        for (allow, deny) in
            [(Reach::MAX_ENTRIES + 1, 0), (Reach::MAX_ENTRIES - 1, 1), (0, 170_000), (170_000, 0)]
        {
            let why = network(allow, deny).reach(None).unwrap_err();
            assert!(why.contains("too many entries"), "{allow} {deny}: {why}");
        }
    }

    #[test]
    fn what_is_not_kept_here_is_refused_and_what_says_nothing_is_not() {
        let check = |text: &str| serde_json::from_str::<Network>(text).unwrap().reach(None);
        for asked in [
            r#"{"egressProxy":{"address":"a:1"}}"#,
            r#"{"dnsServers":["1.1.1.1"]}"#,
            r#"{"httpsPorts":[443]}"#,
            r#"{"rules":{"example.org":[]}}"#,
        ] {
            assert!(check(asked).is_err_and(|why| why.contains("not supported")), "{asked}");
        }
        for nothing in [
            "{}",
            r#"{"egressProxy":null,"dnsServers":[],"httpsPorts":null,"rules":{},"allowOut":[]}"#,
            r#"{"allow_internet_access":true,"allowPublicTraffic":false,"maskRequestHost":"a"}"#,
        ] {
            assert_eq!(check(nothing), Ok(Reach::default()), "{nothing}");
        }
        assert_eq!(check(r#"{"allow_internet_access":false}"#), Ok(Reach::nothing()));
    }

    #[test]
    fn a_password_of_a_proxy_is_not_shown() {
        let proxy = serde_json::json!({ "address": "a:1", "username": "u", "password": "secret" });
        let network = Network { egress_proxy: Some(proxy), ..Network::default() };
        let shown = network.shown().to_string();
        assert!(shown.contains("\"username\"") && !shown.contains("secret"), "{shown}");
        assert!(!shown.contains("null"), "{shown}");
    }
}
