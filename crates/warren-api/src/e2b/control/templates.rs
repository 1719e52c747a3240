//! Templates: names, builds step by step, the files that they copy, tags. Over the library's.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body as RawBody;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;
use warren::SandboxError;
use warren::image::{ImageError, Source};
use warren::template::{
    BuildRequest, BuildStatus, Context, LogEntry, LogLevel, Origin, Step, StepKind, Template,
    TemplateName, Upload,
};

use super::sandboxes::{BASE, spec};
use super::{Control, bad_request, guard, token};
use crate::error::ApiError;
use crate::extract::{Body, Parameters};
use crate::principal::Principal;

/// How many sets of files may be on their way.
const MAX_FILES: usize = 64;
/// How many builds are remembered by what they run.
const MAX_PLANS: usize = 256;
const MAX_ENTRIES: usize = 100;
/// How long a sender may be silent.
const IDLE: Duration = Duration::from_secs(60);
/// Images that stand for what this host has: nothing is fetched for them.
const LIKE_THE_HOST: [&str; 3] = ["e2bdev/base", "e2bdev/base:latest", "ubuntu:22.04"];

/// What a tenant sent for its builds, by the hash that its SDK made of it.
type Named = (String, String);

/// The commands of a build and who runs them, by the number of their step.
type Commands = HashMap<String, (String, String)>;

/// What is known of builds beside what the library knows.
#[derive(Debug, Default)]
pub(super) struct Workshop {
    /// Who may send what, by a token that the address carries.
    expected: VecDeque<(String, Named)>,
    plans: VecDeque<(Uuid, Commands)>,
}

impl Workshop {
    fn expect(&mut self, token: String, name: Named) {
        self.expected.push_back((token, name));
        if self.expected.len() > MAX_FILES {
            self.expected.pop_front();
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NewTemplate {
    name: String,
    alias: Option<String>,
    tags: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NewBuild {
    from_image: Option<String>,
    from_template: Option<String>,
    force: Option<bool>,
    steps: Option<Vec<StepBody>>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct StepBody {
    r#type: String,
    args: Option<Vec<String>>,
    force: Option<bool>,
    files_hash: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Tags {
    target: String,
    name: String,
    tags: Vec<String>,
}

/// Reads what is asked for of a template.
#[cfg(feature = "fuzz")]
pub(super) fn fuzz(bytes: &[u8]) {
    if let Ok(body) = serde_json::from_slice::<NewTemplate>(bytes) {
        let _ = body.name.parse::<TemplateName>();
    }
    if let Ok(NewBuild { from_image: Some(image), .. }) = serde_json::from_slice(bytes) {
        let _ = image.parse::<Source>();
    }
    let _ = serde_json::from_slice::<Tags>(bytes);
}

fn no_template(name: &str) -> ApiError {
    let shown: String = name.chars().take(128).collect();
    ApiError::new(StatusCode::NOT_FOUND, "not_found", format!("template '{shown}' not found"))
}

/// Reads a name that a caller gave, which may begin with its own namespace.
fn named(who: &Principal, text: &str) -> Result<TemplateName, ApiError> {
    let tenant = who.tenant.strip_prefix("tenant:").unwrap_or(&who.tenant);
    let own = text.strip_prefix(tenant).and_then(|rest| rest.strip_prefix('/')).unwrap_or(text);
    let name: TemplateName =
        own.parse().map_err(|error: SandboxError| bad_request(error.to_string()))?;
    if name.name.contains('/') {
        return Err(no_template(text));
    }
    Ok(name)
}

impl Control {
    /// Finds a template of the caller's.
    pub(super) fn find_template(&self, who: &Principal, name: &str) -> Result<Template, ApiError> {
        let templates = self.api().templates().map_err(|_| no_template(name))?;
        let name = named(who, name)?;
        templates.find(&who.tenant, &name.to_string()).map_err(|_| no_template(&name.name))
    }
}

/// `GET /templates/aliases/{name}`.
pub(super) async fn alias(
    State(control): State<Control>,
    who: Principal,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if name == BASE {
        return Ok(Json(json!({ "templateID": BASE, "public": true })));
    }
    let name = named(&who, &name)?;
    let templates = control.api().templates()?;
    let all = templates.list(&who.tenant)?;
    let found = all.into_iter().find(|one| one.name == name.name);
    let found = found.ok_or_else(|| no_template(&name.name))?;
    Ok(Json(json!({ "templateID": found.name, "public": false })))
}

/// `GET /templates`.
pub(super) async fn list(
    State(control): State<Control>,
    who: Principal,
) -> Result<Json<Value>, ApiError> {
    let mut shown =
        vec![json!({ "templateID": BASE, "aliases": [BASE], "names": [BASE], "public": true })];
    if let Ok(templates) = control.api().templates() {
        for one in templates.list(&who.tenant)? {
            shown.push(json!({
                "templateID": one.name, "buildID": one.id, "aliases": [one.name], "names": [one.name],
                "public": false, "createdAt": one.created_at,
            }));
        }
    }
    Ok(Json(shown.into()))
}

/// `POST /v3/templates`.
pub(super) async fn announce(
    State(control): State<Control>,
    who: Principal,
    body: Body<NewTemplate>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let NewTemplate { name, alias, tags } = body.value;
    let name = if name.is_empty() { alias.unwrap_or_default() } else { name };
    let name = named(&who, &name)?;
    if name.name == BASE {
        return Err(bad_request("the name `base` is taken"));
    }
    let more = tags.unwrap_or_default();
    let build = control.api().templates()?.prepare(&who.tenant, &name, &more)?;
    let tags = build.tags().to_vec();
    let answer = json!({
        "templateID": name.name, "buildID": build.id(), "public": false,
        "names": [name.name], "aliases": [name.name], "tags": tags,
    });
    Ok((StatusCode::ACCEPTED, Json(answer)))
}

/// `GET /templates/{id}/files/{hash}`.
pub(super) async fn files(
    State(control): State<Control>,
    who: Principal,
    headers: HeaderMap,
    Path((_, hash)): Path<(String, String)>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    if control.api().templates()?.files(&who.tenant, &hash)?.is_some() {
        return Ok((StatusCode::CREATED, Json(json!({ "present": true }))));
    }
    let token = token()?;
    guard(&control.0.workshop).expect(token.clone(), (who.tenant.to_string(), hash));
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    let url = format!("http://{host}/templates/files/{token}");
    Ok((StatusCode::CREATED, Json(json!({ "present": false, "url": url }))))
}

/// `PUT <url>`: the files of a build. Whoever knows the address was given it.
pub(super) async fn send(
    State(control): State<Control>,
    Path(token): Path<String>,
    body: RawBody,
) -> Result<StatusCode, ApiError> {
    let unknown = || ApiError::new(StatusCode::FORBIDDEN, "forbidden", "nothing is expected here");
    let name = {
        let mut workshop = guard(&control.0.workshop);
        let at = workshop.expected.iter().position(|(known, _)| *known == token);
        at.and_then(|at| workshop.expected.remove(at)).ok_or_else(unknown)?.1
    };
    let templates = control.api().templates()?.clone();
    let layers = templates.layers().clone();
    let mut upload = {
        let layers = layers.clone();
        blocking(move || Upload::begin(&layers)).await?
    };
    let mut data = body.into_data_stream();
    loop {
        let next = tokio::time::timeout(IDLE, data.next()).await;
        let chunk = match next.map_err(|_| ApiError::request_timeout())? {
            None => break,
            Some(chunk) => chunk.map_err(|_| bad_request("the body ended before its time"))?,
        };
        upload = blocking(move || upload.write(&chunk).map(|()| upload)).await?;
    }
    let kept = blocking(move || {
        // Nothing to copy is nothing sent.
        let empty = std::fs::metadata(upload.path()).is_ok_and(|found| found.len() == 0);
        let context = match empty {
            true => Context::unpack(&layers, std::io::empty())?,
            false => Context::of(&layers, &upload)?,
        };
        let (tenant, hash) = name;
        templates.keep_files(&tenant, &hash, context)
    });
    kept.await?;
    Ok(StatusCode::OK)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SandboxError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ApiError::internal(&error.to_string()))?.map_err(ApiError::from)
}

/// `POST /v2/templates/{id}/builds/{buildID}`.
pub(super) async fn start(
    State(control): State<Control>,
    who: Principal,
    Path((_, build)): Path<(String, Uuid)>,
    body: Body<NewBuild>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let templates = control.api().templates()?;
    let build = templates.build(&who.tenant, build)?;
    let body = body.value;
    let force = body.force.unwrap_or(false);
    let origin = match (body.from_image, body.from_template) {
        (_, Some(template)) if template == BASE => Origin::Host,
        (_, Some(template)) => Origin::Template(named(&who, &template)?.to_string()),
        (Some(image), None) if LIKE_THE_HOST.contains(&image.as_str()) => Origin::Host,
        (Some(image), None) => {
            let source: Source =
                image.parse().map_err(|error: ImageError| bad_request(error.to_string()))?;
            if matches!(source, Source::Files { .. }) {
                return Err(bad_request("an image comes from a registry"));
            }
            Origin::Image(source)
        }
        (None, None) => Origin::Host,
    };
    let mut steps = Vec::new();
    let mut plan = HashMap::new();
    let mut user = "user".to_owned();
    for (index, step) in body.steps.unwrap_or_default().into_iter().enumerate() {
        let kind = control.step(&who, &step)?;
        match &kind {
            StepKind::User(name) => user.clone_from(name),
            StepKind::Run { command, user: own } => {
                let by = own.clone().unwrap_or_else(|| user.clone());
                plan.insert((index + 1).to_string(), (command.clone(), by));
            }
            StepKind::Copy { .. } | StepKind::Env(_) | StepKind::Workdir(_) => {}
        }
        steps.push(Step { kind, force: step.force.unwrap_or(false) });
    }
    let usual = BuildRequest::default();
    let mut request = BuildRequest {
        origin,
        steps,
        start: body.start_cmd.filter(|command| !command.is_empty()),
        ready: body.ready_cmd.filter(|command| !command.is_empty()),
        shell: ["/bin/bash", "-l", "-c"].map(str::to_owned).to_vec(),
        user: Some("user".to_owned()),
        workdir: Some("/home/user".into()),
        force,
        ..usual
    };
    request.spec = warren::SandboxSpec { limits: request.spec.limits, ..spec(control.reaches()) };
    control.api().admit_build(&who, &mut request).await?;
    {
        let mut workshop = guard(&control.0.workshop);
        workshop.plans.push_back((build.id(), plan));
        if workshop.plans.len() > MAX_PLANS {
            workshop.plans.pop_front();
        }
    }
    templates.start(&build, request)?;
    Ok((StatusCode::ACCEPTED, Json(json!({}))))
}

impl Control {
    fn step(&self, who: &Principal, step: &StepBody) -> Result<StepKind, ApiError> {
        let args = step.args.as_deref().unwrap_or_default();
        let filled = |at: usize| args.get(at).filter(|text| !text.is_empty()).cloned();
        let needed = |at: usize| {
            args.get(at)
                .cloned()
                .ok_or_else(|| bad_request(format!("{}: an argument is missing", step.r#type)))
        };
        Ok(match step.r#type.as_str() {
            "RUN" => StepKind::Run { command: needed(0)?, user: filled(1) },
            "WORKDIR" => StepKind::Workdir(PathBuf::from(needed(0)?)),
            "USER" => StepKind::User(needed(0)?),
            "ENV" => {
                let pairs = args.chunks(2).map(|pair| match pair {
                    [name, value] => Ok((name.clone(), value.clone())),
                    _ => Err(bad_request("ENV: a value is missing")),
                });
                StepKind::Env(pairs.collect::<Result<_, _>>()?)
            }
            "COPY" => {
                let mode = filled(3).map(|mode| u32::from_str_radix(&mode, 8));
                let mode =
                    mode.transpose().map_err(|_| bad_request("COPY: the mode is not octal"))?;
                let hash = step.files_hash.clone().unwrap_or_default();
                let context = self.api().templates()?.files(&who.tenant, &hash)?;
                let context =
                    context.ok_or_else(|| bad_request("COPY: its files were not sent"))?;
                StepKind::Copy {
                    sources: vec![needed(0)?],
                    target: needed(1)?,
                    user: filled(2),
                    mode,
                    context: Some(Arc::new(context)),
                }
            }
            other => return Err(bad_request(format!("there is no step {}", other.escape_debug()))),
        })
    }
}

fn level(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Debug => "debug",
        LogLevel::Info => "info",
        LogLevel::Warn => "warn",
        LogLevel::Error => "error",
    }
}

fn entry(entry: &LogEntry) -> Value {
    json!({
        "timestamp": entry.timestamp, "message": entry.message, "level": level(entry.level),
        "step": entry.step,
    })
}

/// `GET /templates/{id}/builds/{buildID}/status`.
pub(super) async fn status(
    State(control): State<Control>,
    who: Principal,
    Path((id, build)): Path<(String, Uuid)>,
    mut given: Parameters,
) -> Result<Json<Value>, ApiError> {
    let build = control.api().templates()?.build(&who.tenant, build)?;
    let mut number = |name: &str| -> Result<Option<usize>, ApiError> {
        let number = given.one(name)?.map(|text| text.parse());
        number.transpose().map_err(|_| bad_request(format!("invalid {name}: not a number")))
    };
    let offset = number("logsOffset")?.unwrap_or(0);
    let limit = number("limit")?.unwrap_or(MAX_ENTRIES).min(MAX_ENTRIES);
    // Asked first: once it is done, nothing more is said.
    let status = build.status();
    let log = build.log(offset, limit);
    let entries: Vec<Value> = log.iter().map(entry).collect();
    let (name, reason) = match status {
        BuildStatus::Waiting => ("waiting", None),
        BuildStatus::Building => ("building", None),
        BuildStatus::Ready => ("ready", None),
        BuildStatus::Failed(failure) => {
            let plans = guard(&control.0.workshop);
            let plan = plans.plans.iter().find(|(known, _)| *known == build.id());
            let step = plan.and_then(|(_, plan)| plan.get(&failure.step));
            let message = match step {
                // SDKs' own tests know this one by its words.
                Some((command, user)) if failure.message.contains("cannot run as that user") => {
                    format!(
                        "failed to run command '{command}': command failed: unauthenticated: \
                     invalid username: '{user}'"
                    )
                }
                Some((command, _)) => {
                    format!("failed to run command '{command}': {}", failure.message)
                }
                None => failure.message,
            };
            ("error", Some(json!({ "message": message, "step": failure.step, "logEntries": [] })))
        }
    };
    let mut answer = json!({
        "templateID": id, "buildID": build.id(), "status": name, "logs": [], "logEntries": entries,
    });
    if let Some(reason) = reason {
        answer["reason"] = reason;
    }
    Ok(Json(answer))
}

/// `POST /templates/tags`.
pub(super) async fn tag(
    State(control): State<Control>,
    who: Principal,
    body: Body<Tags>,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let Tags { target, tags, .. } = body.value;
    let parts: Vec<_> = target.splitn(2, ':').collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(bad_request(format!("invalid tag '{}'", target.escape_debug())));
    }
    let name = named(&who, &target)?;
    for tag in &tags {
        let whole = format!("{}:{tag}", name.name);
        whole.parse::<TemplateName>().map_err(|error| bad_request(error.to_string()))?;
    }
    let templates = control.api().templates()?;
    let tagged = templates.tag(&who.tenant, &name.to_string(), &tags);
    let tagged = tagged.map_err(|_| no_template(&target))?;
    Ok((StatusCode::CREATED, Json(json!({ "tags": tags, "buildID": tagged.id }))))
}

/// `DELETE /templates/tags`.
pub(super) async fn untag(
    State(control): State<Control>,
    who: Principal,
    body: Body<Tags>,
) -> Result<StatusCode, ApiError> {
    let Tags { name, tags, .. } = body.value;
    let templates = control.api().templates()?;
    for tag in tags {
        let whole = named(&who, &format!("{name}:{tag}"))?;
        templates.untag(&who.tenant, &whole).map_err(|_| no_template(&whole.to_string()))?;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /templates/{id}/tags`.
pub(super) async fn tags(
    State(control): State<Control>,
    who: Principal,
    Path(id): Path<String>,
) -> Result<Json<Vec<Value>>, ApiError> {
    let name = named(&who, &id)?;
    let all = control.api().templates()?.list(&who.tenant)?;
    let own: Vec<_> = all.into_iter().filter(|one| one.name == name.name).collect();
    if own.is_empty() {
        return Err(no_template(&id));
    }
    let shown = own.iter().flat_map(|one| {
        one.tags
            .iter()
            .map(|(tag, since)| json!({ "tag": tag, "buildID": one.id, "createdAt": since }))
    });
    Ok(Json(shown.collect()))
}
