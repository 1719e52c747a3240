//! `warren audit`: the daemon's log of every call, read from its files, whether or not it runs.

use std::path::PathBuf;

use chrono::{DateTime, Utc};
use serde_json::Value;
use warren_api::audit::{self, AuditError, Report};

use crate::args::{AuditAction, AuditPlaceArgs, AuditShowArgs, AuditVerifyArgs, SettingArgs};
use crate::config::{Config, Surroundings};
use crate::failure::{self, Failure};
use crate::output;
use crate::units::{self, Cap};

/// Where the log of a daemon is, within its state.
pub(crate) const DIRECTORY: &str = "audit";
/// The log is not what was written.
const BROKEN: u8 = 1;

impl From<AuditError> for Failure {
    fn from(error: AuditError) -> Self {
        let hint = match &error {
            AuditError::Key { .. } => {
                "without its key nothing vouches for a log: restore it, or move the log away"
            }
            AuditError::File { .. } => {
                "the log belongs to the daemon's user: use the same, or --state-dir"
            }
        };
        Failure::fatal("audit", failure::chain(&error)).with_hint(hint)
    }
}

fn directory(place: &AuditPlaceArgs) -> Result<PathBuf, Failure> {
    let (state_dir, config) = (place.state_dir.clone(), place.config.clone());
    let settings = SettingArgs { state_dir, config, ..SettingArgs::default() };
    let config = Config::load(&settings, &Surroundings::of_process())?;
    Ok(config.state_dir.join(DIRECTORY))
}

/// Checks or shows the log.
pub(crate) fn audit(action: &AuditAction) -> Result<u8, Failure> {
    match action {
        AuditAction::Verify(args) => verify(args),
        AuditAction::Show(args) => show(args),
    }
}

fn verify(args: &AuditVerifyArgs) -> Result<u8, Failure> {
    let report = match args.files.is_empty() {
        true => audit::verify(&directory(&args.place)?)?,
        false => audit::verify_files(args.files.clone())?,
    };
    let failed = |error| Failure::system("cannot write to stdout", &error);
    match args.place.json {
        true => output::print_json(&report).map_err(failed)?,
        false => output::print(told(&report).as_bytes()).map_err(failed)?,
    }
    Ok(if report.intact { 0 } else { BROKEN })
}

fn told(report: &Report) -> String {
    let mut text = String::new();
    for broken in &report.breaks {
        text.push_str(&format!("{}:{}: {}", broken.file.display(), broken.line, broken.what));
        for (word, value) in [("expected", &broken.expected), ("found", &broken.found)] {
            if let Some(value) = value {
                text.push_str(&format!("; {word} {}", value.escape_debug()));
            }
        }
        text.push('\n');
    }
    let word = if report.intact { "intact" } else { "BROKEN" };
    let files = if report.files == 1 { "1 file" } else { &format!("{} files", report.files) };
    text.push_str(&format!("{word}: {} records in {files}", report.records));
    if let (Some(first), Some(last), Some(sha256)) = (report.first, report.last, &report.sha256) {
        text.push_str(&format!(", {first} to {last}, which has the digest {sha256}"));
    }
    match report.sealed {
        Some(sealed) => text.push_str(&format!("; sealed up to {sealed}")),
        None => text.push_str("; without a seal"),
    }
    if report.torn > 0 {
        text.push_str(&format!("; a daemon was cut off while it wrote: {} times", report.torn));
    }
    text.push('\n');
    text
}

/// Reads a moment: a time in RFC 3339, or how long ago it was.
fn since(text: &str) -> Result<DateTime<Utc>, Failure> {
    if let Ok(moment) = DateTime::parse_from_rfc3339(text) {
        return Ok(moment.to_utc());
    }
    let ago = match units::time(text) {
        Ok(Cap::At(millis)) => {
            i64::try_from(millis).ok().and_then(chrono::TimeDelta::try_milliseconds)
        }
        Ok(Cap::Lifted) | Err(_) => None,
    };
    ago.and_then(|ago| Utc::now().checked_sub_signed(ago)).ok_or_else(|| {
        let hint = "write how long ago, as in 10m, or a moment, as in 2026-01-31T12:00:00Z";
        Failure::usage(format!("`{}` is no time", text.escape_debug()), hint)
    })
}

fn show(args: &AuditShowArgs) -> Result<u8, Failure> {
    let since = args.since.as_deref().map(since).transpose()?;
    let paths = audit::list(&directory(&args.place)?)?;
    let text = |record: &Value, name: &str| record[name].as_str().map(str::to_owned);
    let mut failure = None;
    audit::read(&paths, |line, record| {
        let at = text(&record, "time").and_then(|time| DateTime::parse_from_rfc3339(&time).ok());
        let own = |wanted: &Option<String>, name: &str| {
            wanted.as_ref().is_none_or(|wanted| {
                let found = text(&record, name).unwrap_or_default();
                // A tenant of a key is written `tenant:NAME`, and a user of this host `uid:NUMBER`.
                found == *wanted || found.strip_prefix("tenant:") == Some(wanted)
            })
        };
        let late = since.is_none_or(|since| at.is_some_and(|at| at >= since));
        if !late || !own(&args.tenant, "tenant") || !own(&args.sandbox, "sandbox") {
            return true;
        }
        let shown = if args.place.json { format!("{line}\n") } else { in_words(&record) };
        match output::print(shown.as_bytes()) {
            Ok(()) => true,
            Err(error) => {
                failure = Some(Failure::system("cannot write to stdout", &error));
                false
            }
        }
    })?;
    failure.map_or(Ok(0), Err)
}

/// Tells a record in a line. What is in it may come from anybody.
fn in_words(record: &Value) -> String {
    let word = |name: &str| match &record[name] {
        Value::String(text) => Some(text.escape_debug().to_string()),
        Value::Null => None,
        other => Some(other.to_string()),
    };
    let named = |name: &str| word(name).map(|value| format!("{name}={value}"));
    let kind = word("kind").unwrap_or_default();
    let mut words = vec![word("time"), Some(format!("{kind:<6}"))];
    words.push(Some(word("tenant").unwrap_or_else(|| "-".to_owned())));
    match kind.as_str() {
        "call" | "denial" => words.extend([
            word("method"),
            word("path"),
            Some(word("status").unwrap_or_else(|| "hung up".to_owned())),
            word("code"),
            named("sandbox"),
            named("port"),
            named("file"),
            (record["foreign"] == true).then(|| "foreign".to_owned()),
            word("peer"),
        ]),
        "exec" => words.extend([named("sandbox"), word("command")]),
        "end" => {
            let cause =
                record["cause"]["kind"].as_str().map(|kind| kind.escape_debug().to_string());
            words.extend([
                named("sandbox"),
                named("name"),
                cause,
                named("exit_code"),
                word("code"),
            ]);
            let refused = |denial: &Value| {
                let text = |name: &str| denial[name].as_str().unwrap_or_default().escape_debug();
                format!("denied: {}, by {}{};", text("what"), text("by"), times(&denial["count"]))
            };
            words.extend(record["denials"].as_array().into_iter().flatten().map(refused).map(Some));
        }
        "barred" => {
            let refused = |one: &Value| {
                let text = |name: &str| one[name].as_str().unwrap_or_default().escape_debug();
                let port = one["port"].as_u64().map(|port| format!(":{port}")).unwrap_or_default();
                format!("{}{port} {}{};", text("to"), text("why"), times(&one["count"]))
            };
            words.push(named("sandbox"));
            words.extend(record["list"].as_array().into_iter().flatten().map(refused).map(Some));
            words.push(named("others").filter(|_| record["others"] != 0));
        }
        "gone" => words.push(named("sandbox")),
        "strangers" => words.extend([named("count"), named("since"), named("until")]),
        _ => words.extend([named("found"), named("noted")]),
    }
    words.push(word("request"));
    let words: Vec<String> = words.into_iter().flatten().filter(|word| !word.is_empty()).collect();
    words.join(" ") + "\n"
}

/// Says how often something was, if that is more than once.
fn times(count: &Value) -> String {
    match count.as_u64() {
        None | Some(1) => String::new(),
        Some(count) => format!(" ({count} times)"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_record_is_one_line_that_cannot_drive_the_terminal() {
        let record = json!({
            "seq": 7, "time": "2026-01-31T12:00:00.000Z", "kind": "denial", "tenant": "tenant:a",
            "method": "GET", "path": "/v1/\u{1b}[2J\n", "status": 404, "code": "not_found",
            "sandbox": "sbx-1", "foreign": true, "peer": "127.0.0.1:5", "request": "req-1",
        });
        assert_eq!(
            in_words(&record),
            "2026-01-31T12:00:00.000Z denial tenant:a GET /v1/\\u{1b}[2J\\n 404 not_found \
             sandbox=sbx-1 foreign 127.0.0.1:5 req-1\n"
        );
        let exec =
            json!({ "kind": "exec", "tenant": "uid:0", "sandbox": "s", "command": ["a\u{7}"] });
        assert_eq!(in_words(&exec), "exec   uid:0 sandbox=s [\"a\\u0007\"]\n");
        let end = json!({
            "kind": "end", "tenant": "uid:0", "sandbox": "s", "name": "e", "exit_code": 1,
            "cause": { "kind": "exited", "code": 1 }, "request": "req-1",
            "denials": [{ "wall": "network", "what": "look up a\u{7}", "by": "it", "count": 2 }],
        });
        assert_eq!(
            in_words(&end),
            "end    uid:0 sandbox=s name=e exited exit_code=1 denied: look up a\\u{7}, by it \
             (2 times); req-1\n"
        );
        let barred = json!({
            "kind": "barred", "tenant": "uid:0", "sandbox": "s", "others": 3,
            "list": [{ "to": "b\u{1b}", "port": 80, "why": "not_allowed", "count": 9 }],
        });
        assert_eq!(
            in_words(&barred),
            "barred uid:0 sandbox=s b\\u{1b}:80 not_allowed (9 times); others=3\n"
        );
        let strangers = json!({ "kind": "strangers", "count": 7, "since": "a", "until": "b" });
        assert_eq!(in_words(&strangers), "strangers - count=7 since=a until=b\n");
    }

    #[test]
    fn a_moment_is_a_time_or_how_long_ago_it_was() {
        let minute = Utc::now() - since("1m").unwrap();
        assert!((59..=61).contains(&minute.num_seconds()), "{minute}");
        assert_eq!(since("2026-01-31T12:00:00Z").unwrap().timestamp(), 1_769_860_800);
        for wrong in ["", "yesterday", "none", "-1s", "99999999999999999999s"] {
            assert!(since(wrong).is_err(), "{wrong}");
        }
    }
}
