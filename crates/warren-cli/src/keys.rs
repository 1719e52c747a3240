//! `warren key`.

use serde::Serialize;
use warren_api::keys::{KeyError, KeyRecord, Keys, Quotas};

use crate::args::{KeyAction, KeyPlaceArgs, SettingArgs};
use crate::config::{Config, Surroundings};
use crate::failure::{self, Failure};
use crate::output::{self, say};
use crate::units::{Bytes, Cap};

/// Where the keys of a daemon are, within its state.
pub(crate) const FILE: &str = "keys.json";

/// What is shown of a key.
#[derive(Debug, Serialize)]
struct KeyView<'a> {
    id: &'a str,
    tenant: &'a str,
    created_at: String,
    quotas: Quotas,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
}

impl<'a> KeyView<'a> {
    fn new(record: &'a KeyRecord, key: Option<&'a str>) -> Self {
        let created_at = record.created_at.format("%Y-%m-%dT%H:%M:%SZ").to_string();
        Self { id: &record.id, tenant: &record.tenant, created_at, quotas: record.quotas, key }
    }
}

fn keys(place: &KeyPlaceArgs) -> Result<Keys, Failure> {
    let (state_dir, config) = (place.state_dir.clone(), place.config.clone());
    let settings = SettingArgs { state_dir, config, ..SettingArgs::default() };
    let config = Config::load(&settings, &Surroundings::of_process())?;
    Ok(Keys::at(config.state_dir.join(FILE)))
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Self {
        let hint = match &error {
            KeyError::Tenant { .. } => {
                let hint = "a tenant has up to 64 letters, digits, `-`, `_` and `.`";
                return Failure::usage(error.to_string(), hint);
            }
            KeyError::NotFound { .. } => "`warren key ls` lists the keys",
            KeyError::Exposed { .. } => "take the right to write it from others: chmod 600",
            KeyError::Damaged { .. } => "restore it, or move it away and make new keys",
            KeyError::File { .. } => {
                "keys belong to the daemon's user: use the same, or --state-dir"
            }
        };
        Failure::fatal("keys", failure::chain(&error)).with_hint(hint)
    }
}

/// Makes, lists or revokes API keys.
pub(crate) fn key(action: &KeyAction) -> Result<u8, Failure> {
    let failed = |error| Failure::system("cannot write to stdout", &error);
    match action {
        KeyAction::Create(args) => {
            let count = |cap: Option<Cap<u32>>| cap.and_then(Cap::bound).map(u64::from);
            let quotas = Quotas {
                sandboxes: count(args.max_sandboxes),
                memory_bytes: args.max_memory.and_then(Cap::bound),
                cpu_weight: count(args.max_cpu_weight),
                disk_bytes: args.max_disk.and_then(Cap::bound),
                snapshots: count(args.max_snapshots),
                execs: count(args.max_execs),
                streams: count(args.max_streams),
                requests_per_second: count(args.max_requests_per_second),
            };
            let (key, record) = keys(&args.place)?.create(&args.tenant, quotas)?;
            if args.place.json {
                output::print_json(&KeyView::new(&record, Some(&key))).map_err(failed)?;
            } else {
                output::print(format!("{key}\n").as_bytes()).map_err(failed)?;
                say(&format!("note: this is {}; it is not shown again", record.id));
            }
        }
        KeyAction::Ls(args) => {
            let records = keys(&args.place)?.list()?;
            if args.place.json {
                for record in &records {
                    output::print_json(&KeyView::new(record, None)).map_err(failed)?;
                }
                return Ok(0);
            }
            let shown = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
            let rows = records.iter().map(|record| {
                vec![
                    record.id.clone(),
                    record.tenant.clone(),
                    record.created_at.format("%Y-%m-%d %H:%M").to_string(),
                    shown(record.quotas.sandboxes.map(|count| count.to_string())),
                    shown(record.quotas.memory_bytes.map(|bytes| Bytes(bytes).to_string())),
                    shown(record.quotas.cpu_weight.map(|count| count.to_string())),
                    shown(record.quotas.disk_bytes.map(|bytes| Bytes(bytes).to_string())),
                    shown(record.quotas.snapshots.map(|count| count.to_string())),
                    shown(record.quotas.execs.map(|count| count.to_string())),
                    shown(record.quotas.streams.map(|count| count.to_string())),
                    shown(record.quotas.requests_per_second.map(|count| count.to_string())),
                ]
            });
            let head = [
                "ID",
                "TENANT",
                "CREATED",
                "SANDBOXES",
                "MEMORY",
                "CPU",
                "DISK",
                "SNAPSHOTS",
                "EXECS",
                "STREAMS",
                "REQ/S",
            ];
            let table = output::table(&head, rows.collect());
            output::print(table.as_bytes()).map_err(failed)?;
        }
        KeyAction::Revoke(args) => {
            let record = keys(&args.place)?.revoke(&args.id)?;
            if args.place.json {
                output::print_json(&KeyView::new(&record, None)).map_err(failed)?;
            }
        }
    }
    Ok(0)
}
