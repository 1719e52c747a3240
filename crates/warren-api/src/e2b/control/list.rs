//! Lists: sandboxes, what they use, what they said.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue};
use chrono::{DateTime, Utc};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::super::record::{Record, State as Life};
use super::wire::{ListedView, MetricView};
use super::{Control, bad_request, guard};
use crate::error::ApiError;
use crate::extract::Parameters;
use crate::principal::Principal;

/// Where the next page begins; not there after the last.
const NEXT: &str = "x-next-token";
const MAX_PAGE: usize = 100;

/// A page of a list, with the way to the next.
pub(super) type Page<T> = (HeaderMap, Json<Vec<T>>);

/// What a list of sandboxes is asked for.
#[derive(Debug, Default)]
struct Query {
    metadata: BTreeMap<String, String>,
    running: bool,
    paused: bool,
    template: Option<String>,
    started_after: Option<DateTime<Utc>>,
    oldest_first: bool,
}

impl Query {
    fn new(given: &mut Parameters) -> Result<Self, ApiError> {
        let mut query = Self::default();
        if let Some(text) = given.one("metadata")? {
            query.metadata = pairs(&text)?;
        }
        let states = given.all("state");
        let states: Vec<&str> = states.iter().flat_map(|text| text.split(',')).collect();
        for state in &states {
            match *state {
                "running" => query.running = true,
                "paused" => query.paused = true,
                "" => {}
                other => return Err(bad_request(format!("invalid state: {other}"))),
            }
        }
        if !query.running && !query.paused {
            (query.running, query.paused) = (true, true);
        }
        query.template = given.one("template")?;
        if let Some(text) = given.one("startedAfter")? {
            let time = DateTime::parse_from_rfc3339(&text);
            let time =
                time.map_err(|_| bad_request("invalid startedAfter: not a date and time"))?;
            query.started_after = Some(time.to_utc());
        }
        query.oldest_first = match given.one("order")?.as_deref() {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(other) => return Err(bad_request(format!("invalid order: {other}"))),
        };
        Ok(query)
    }

    fn admits(&self, record: &Record) -> bool {
        let state = match record.state {
            Life::Running => self.running,
            Life::Paused(_) => self.paused,
        };
        let has = |(key, value): (&String, &String)| record.metadata.get(key) == Some(value);
        let template = self.template.as_ref().is_none_or(|wanted| {
            *wanted == record.template || Some(wanted) == record.alias.as_ref()
        });
        state
            && template
            && self.metadata.iter().all(has)
            && self.started_after.is_none_or(|after| record.started_at >= after)
    }
}

/// Reads `k=v&…` whose keys and values were percent-encoded before they were form-encoded.
fn pairs(text: &str) -> Result<BTreeMap<String, String>, ApiError> {
    let decode = |text: &str| -> Result<String, ApiError> {
        let form = text.replace('+', " ");
        let once = percent_decode_str(&form).decode_utf8();
        let once = once.map_err(|_| bad_request("invalid metadata: not UTF-8"))?;
        let twice = percent_decode_str(&once).decode_utf8();
        Ok(twice.map_err(|_| bad_request("invalid metadata: not UTF-8"))?.into_owned())
    };
    let parts = text.split('&').filter(|part| !part.is_empty());
    parts
        .map(|part| {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            Ok((decode(key)?, decode(value)?))
        })
        .collect()
}

/// Cuts out the page that is asked for. Items come in their order, each with a token of its own.
pub(super) fn page<T>(
    given: &mut Parameters,
    items: Vec<(String, T)>,
) -> Result<Page<T>, ApiError> {
    let limit = match given.one("limit")?.map(|limit| limit.parse::<usize>()) {
        None => MAX_PAGE,
        Some(Ok(limit @ 1..)) => limit.min(MAX_PAGE),
        Some(_) => return Err(bad_request("invalid limit: must be at least 1")),
    };
    let from = match given.one("nextToken")?.filter(|token| !token.is_empty()) {
        None => 0,
        Some(token) => {
            // What it names may be gone by now: tokens sort like what they stand for.
            items.iter().position(|(own, _)| *own > token).unwrap_or(items.len())
        }
    };
    let mut shown: Vec<(String, T)> = items.into_iter().skip(from).take(limit + 1).collect();
    let mut headers = HeaderMap::new();
    if shown.len() > limit {
        shown.truncate(limit);
        let token = shown.last().and_then(|(token, _)| HeaderValue::from_str(token).ok());
        headers.extend(token.map(|token| (axum::http::HeaderName::from_static(NEXT), token)));
    }
    Ok((headers, Json(shown.into_iter().map(|(_, item)| item).collect())))
}

impl Control {
    /// Returns what the caller has, in order, each with a token that sorts in that order.
    fn listed(&self, who: &Principal, query: &Query) -> Vec<(String, ListedView)> {
        let own = self.all().into_iter().map(|live| live.record());
        let own = own.filter(|record| *record.tenant == *who.tenant && query.admits(record));
        let mut items: Vec<_> = own
            .map(|record| {
                let at = u64::try_from(record.started_at.timestamp_micros()).unwrap_or_default();
                let at = if query.oldest_first { at } else { u64::MAX - at };
                (format!("{at:016x}{}", record.id()), ListedView::of(&record))
            })
            .collect();
        items.sort_by(|(a, _), (b, _)| a.cmp(b));
        items
    }
}

/// `GET /v2/sandboxes`.
pub(super) async fn list_v2(
    State(control): State<Control>,
    who: Principal,
    mut given: Parameters,
) -> Result<Page<ListedView>, ApiError> {
    let query = Query::new(&mut given)?;
    let items = control.listed(&who, &query);
    let running = control.listed(&who, &Query { running: true, ..Query::default() }).len();
    let (mut headers, body) = page(&mut given, items)?;
    headers.insert("x-total-running", HeaderValue::from(running));
    Ok((headers, body))
}

/// `GET /sandboxes`: those that run, all of them.
pub(super) async fn list_v1(
    State(control): State<Control>,
    who: Principal,
    mut given: Parameters,
) -> Result<Json<Vec<ListedView>>, ApiError> {
    let query = Query { paused: false, running: true, ..Query::new(&mut given)? };
    Ok(Json(control.listed(&who, &query).into_iter().map(|(_, item)| item).collect()))
}

/// `GET /sandboxes/{id}/metrics`.
pub(super) async fn metrics(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
    mut given: Parameters,
) -> Result<Json<Vec<MetricView>>, ApiError> {
    let live = control.own(&who, &id)?;
    let mut second = |name: &str| -> Result<Option<i64>, ApiError> {
        let text = given.one(name)?;
        let number = text.map(|text| text.parse());
        number.transpose().map_err(|_| bad_request(format!("invalid {name}: not a number")))
    };
    let (start, end) = (second("start")?, second("end")?);
    if guard(&live.samples).all().next().is_none() {
        control.sample(&live).await;
    }
    let within = |one: &&MetricView| {
        start.is_none_or(|start| one.timestamp_unix >= start)
            && end.is_none_or(|end| one.timestamp_unix <= end)
    };
    Ok(Json(guard(&live.samples).all().filter(within).copied().collect()))
}

/// `GET /sandboxes/metrics`: the newest of each.
pub(super) async fn metrics_of_all(
    State(control): State<Control>,
    who: Principal,
    mut given: Parameters,
) -> Result<Json<Value>, ApiError> {
    let mut shown = serde_json::Map::new();
    for id in given.all("sandbox_ids").iter().flat_map(|ids| ids.split(',')) {
        // What is another's does not exist.
        let Ok(live) = control.own(&who, id) else { continue };
        let newest = guard(&live.samples).all().next_back().copied();
        shown.extend(newest.map(|one| (id.to_owned(), json!(one))));
    }
    Ok(Json(json!({ "sandboxes": shown })))
}

/// `GET /sandboxes/{id}/logs`: which commands were started in it.
pub(super) async fn logs(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
    mut given: Parameters,
) -> Result<Json<Value>, ApiError> {
    let record = control.own(&who, &id)?.record();
    let limit = given.one("limit")?.and_then(|limit| limit.parse().ok()).unwrap_or(1_000_usize);
    let sandbox = control.api().manager().get_sandbox(&record.sandbox).await?;
    let mut entries = Vec::new();
    if let Some(sandbox) = sandbox {
        for exec in sandbox.list_execs().await? {
            let info = exec.info();
            let line = format!("started: {}", info.command.join(" "));
            entries.push((info.started_at, line));
        }
    }
    if given.one("direction")?.as_deref() == Some("backward") {
        entries.reverse();
    }
    let shown = entries.into_iter().take(limit);
    let old: Vec<Value> = shown
        .clone()
        .map(|(at, line)| json!({ "timestamp": at, "line": line, "message": line, "level": "info", "fields": {} }))
        .collect();
    Ok(Json(json!({ "logs": old, "logEntries": old })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_was_encoded_twice() {
        // What `Query` leaves of `metadata=a%2520b%3D1%2526`.
        let read = pairs("a%20b=1%26&c=x%252By").unwrap();
        assert_eq!(read.get("a b").map(String::as_str), Some("1&"));
        assert_eq!(read.get("c").map(String::as_str), Some("x+y"));
        assert!(pairs("a=%ff").is_err());
        assert!(pairs("").unwrap().is_empty());
    }
}
