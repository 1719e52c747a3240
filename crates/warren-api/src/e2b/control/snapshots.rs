//! Snapshots and forks, over the manager's.
//!
//! To E2B a snapshot is a template that a sandbox made: it is named `<id>:<tag>`, or
//! `<namespace>/<name>:<tag>`, and sandboxes are created from it.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::Serialize;
use serde_json::{Value, json};
use warren::{ForkOptions, Snapshot, SnapshotKind, SnapshotOptions};

use super::super::record::{OnTimeout, Record, State as Life};
use super::list::{Page, page};
use super::sandboxes::Generation;
use super::wire::{Lease, SandboxView};
use super::{Control, Live, bad_request};
use crate::error::ApiError;
use crate::extract::{Body, Parameters};
use crate::principal::{self, Principal};

/// Marks the snapshots that E2B's clients see, and says what they call them.
const NAME: &str = "e2b.name";
const TAG: &str = "e2b.tag";
/// What a snapshot without a tag is tagged.
const DEFAULT_TAG: &str = "default";
const MAX_FORKS: u32 = 20;

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SnapshotView {
    #[serde(rename = "snapshotID")]
    id: String,
    names: Vec<String>,
}

/// Returns the part of a tenant that is its name.
fn namespace(tenant: &str) -> &str {
    tenant.strip_prefix("tenant:").unwrap_or(tenant)
}

fn digits(snapshot: &Snapshot) -> String {
    snapshot.id.as_str().trim_start_matches("snap-").replace('-', "")
}

fn tag(snapshot: &Snapshot) -> &str {
    snapshot.labels.get(TAG).map_or(DEFAULT_TAG, String::as_str)
}

fn view(who: &Principal, snapshot: &Snapshot) -> SnapshotView {
    let tag = tag(snapshot);
    match snapshot.labels.get(NAME).filter(|name| !name.is_empty()) {
        Some(name) => {
            let full = format!("{}/{name}:{tag}", namespace(&who.tenant));
            SnapshotView { id: full.clone(), names: vec![full] }
        }
        None => SnapshotView { id: format!("{}:{tag}", digits(snapshot)), names: Vec::new() },
    }
}

/// Splits a name into what it names and its tag.
fn split(name: &str) -> (&str, &str) {
    name.rsplit_once(':').unwrap_or((name, DEFAULT_TAG))
}

impl Control {
    /// Returns the snapshots that the caller may see, the newest first.
    async fn snapshots(&self, who: &Principal) -> Result<Vec<Snapshot>, ApiError> {
        let mut all = self.api().manager().list_snapshots().await?;
        all.retain(|snapshot| {
            let own = snapshot.owner.as_deref().is_some_and(|owner| who.owns(owner));
            own && snapshot.kind == SnapshotKind::Kept && snapshot.labels.contains_key(NAME)
        });
        all.reverse();
        Ok(all)
    }

    /// Finds a snapshot by what E2B calls it.
    pub(super) async fn find_snapshot(
        &self,
        who: &Principal,
        name: &str,
    ) -> Result<Option<Snapshot>, ApiError> {
        let (wanted, wanted_tag) = split(name);
        let own =
            wanted.strip_prefix(namespace(&who.tenant)).and_then(|rest| rest.strip_prefix('/'));
        let alias = own.unwrap_or(wanted);
        let mut all = self.snapshots(who).await?.into_iter();
        Ok(all.find(|one| {
            let named = one.labels.get(NAME).is_some_and(|name| !name.is_empty() && name == alias);
            tag(one) == wanted_tag && (named || digits(one) == wanted)
        }))
    }
}

/// `POST /sandboxes/{id}/snapshots`.
pub(super) async fn create(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
    body: Body<Lease>,
) -> Result<(StatusCode, Json<SnapshotView>), ApiError> {
    let given = body.value.name.unwrap_or_default();
    let (name, tag) = split(&given);
    let plain = |text: &str| {
        text.len() <= 128 && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    if !plain(name) || !plain(tag) {
        return Err(bad_request(format!("invalid snapshot name: '{}'", given.escape_debug())));
    }
    let labels: BTreeMap<String, String> =
        [(NAME.to_owned(), name.to_owned()), (TAG.to_owned(), tag.to_owned())].into();
    let asked_by = who.clone();
    let work = async move |control: Control, live: Arc<Live>| {
        let record = live.record();
        let session = control.session(&record).await?;
        // A name stands for the newest.
        let before = match labels.get(NAME).filter(|name| !name.is_empty()) {
            Some(name) => {
                let name = format!("{name}:{}", labels[TAG]);
                control.find_snapshot(&asked_by, &name).await?
            }
            None => None,
        };
        let _saving = control.api().save_one(&asked_by).await?;
        let options = SnapshotOptions { labels, ..SnapshotOptions::default() };
        let taken = control.api().manager().snapshot(&session, &options).await?;
        if let Some(before) = before {
            let owner = before.owner.clone().unwrap_or_default();
            control.api().manager().remove_snapshot(&owner, before.id.as_str()).await?;
        }
        Ok((StatusCode::CREATED, Json(view(&asked_by, &taken))))
    };
    control.with(&who, &id, work).await
}

/// `GET /snapshots`.
pub(super) async fn list(
    State(control): State<Control>,
    who: Principal,
    mut given: Parameters,
) -> Result<Page<SnapshotView>, ApiError> {
    let sandbox = given.one("sandboxID")?;
    let name = given.one("name")?;
    let found = match &name {
        Some(name) => control.find_snapshot(&who, name).await?.into_iter().collect(),
        None => control.snapshots(&who).await?,
    };
    let of = |one: &Snapshot| {
        sandbox.as_ref().is_none_or(|id| super::super::record::short(&one.sandbox_id) == *id)
    };
    let items = found.iter().filter(|one| of(one)).map(|one| {
        let at = u64::try_from(one.created_at.timestamp_micros()).unwrap_or_default();
        (format!("{:016x}{}", u64::MAX - at, digits(one)), view(&who, one))
    });
    page(&mut given, items.collect())
}

/// `POST /sandboxes/{id}/fork`.
pub(super) async fn fork(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
    body: Body<Lease>,
) -> Result<(StatusCode, Json<Vec<Value>>), ApiError> {
    let count = body.value.count.unwrap_or(1);
    if !(1..=MAX_FORKS).contains(&count) {
        return Err(bad_request(format!("count must be between 1 and {MAX_FORKS}")));
    }
    let timeout_s = body.value.timeout.unwrap_or_else(|| Generation::Second.timeout_s());
    let asked_by = who.clone();
    let work = async move |control: Control, live: Arc<Live>| {
        let origin = live.record();
        let session = control.session(&origin).await?;
        let mut spec = super::sandboxes::spec(control.reaches());
        // It may have been made from what is larger than E2B's are.
        if let Some(sandbox) = control.api().manager().get_sandbox(&origin.sandbox).await? {
            let (asked, has) = (&mut spec.limits, &sandbox.capabilities().limits);
            asked.max_memory_bytes = asked.max_memory_bytes.max(has.max_memory_bytes);
            asked.max_write_bytes = asked.max_write_bytes.max(has.max_write_bytes);
            asked.cpu_weight = asked.cpu_weight.max(has.cpu_weight);
        }
        let mut promises = Vec::new();
        for _ in 0..count {
            promises.push(control.api().promise(&asked_by, &spec).await?);
        }
        let options = ForkOptions { count, ..ForkOptions::default() };
        let forks = control.api().manager().fork(&session, &options).await?;
        let mut shown = Vec::new();
        for ((session, sandbox), promise) in forks.into_iter().zip(promises) {
            promise.keep(sandbox.id(), &sandbox.capabilities().limits);
            control.api().0.events.note(&session);
            let record = Record {
                sandbox: sandbox.id().clone(),
                session: session.session_id.clone(),
                access_token: origin.access_token.as_ref().map(|_| super::token()).transpose()?,
                traffic_token: origin.traffic_token.as_ref().map(|_| super::token()).transpose()?,
                state: Life::Running,
                on_timeout: OnTimeout::Kill,
                auto_resume: false,
                started_at: chrono::Utc::now(),
                ..origin.clone()
            };
            let added = control.add(record, timeout_s, &session).await?;
            shown.push(json!({ "sandbox": SandboxView::of(&added, control.domain()) }));
        }
        Ok((StatusCode::CREATED, Json(shown)))
    };
    control.with(&who, &id, work).await
}

/// `DELETE /templates/{id}`: a snapshot, or a template.
pub(super) async fn delete(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    if let Some(snapshot) = control.find_snapshot(&who, &id).await? {
        let owner = snapshot.owner.clone().unwrap_or_default();
        debug_assert_eq!(principal::split(&owner).0, &*who.tenant, "it was the caller's own");
        control.api().manager().remove_snapshot(&owner, snapshot.id.as_str()).await?;
        return Ok(StatusCode::NO_CONTENT);
    }
    if id == super::sandboxes::BASE {
        return Err(bad_request("this template cannot be deleted"));
    }
    let template = control.find_template(&who, &id)?;
    // By its name all that have it go, whatever their tags.
    let name = if id.contains(':') { id } else { template.name };
    let templates = control.api().templates()?.clone();
    let gone = tokio::task::spawn_blocking(move || templates.remove(&who.tenant, &name)).await;
    gone.map_err(|error| ApiError::internal(&error.to_string()))??;
    Ok(StatusCode::NO_CONTENT)
}
