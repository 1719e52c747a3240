//! From a recipe to layers: each step in a sandbox of its own, or known from before.

use std::any::Any;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Behalf, Context, Defaults, Template, TemplateName, Templates, Upload};
use crate::image::{self, Bounds, Digest, Progress, Source};
use crate::layers::Held;
use crate::{
    Base, Command, CreateOptions, ExecOptions, ExecUser, FoundExec, HostTools, Limit, LogOverflow,
    LogStream, LogWait, Result, Sandbox, SandboxError, SandboxFiles, SandboxSpec,
};

/// The directory of records of steps that were done.
pub(super) const CACHE: &str = "build-cache";
/// How many of them are kept.
const MAX_CACHED: usize = 2_000;
const MAX_STEPS: usize = 1_000;
/// How much a build may say.
const MAX_ENTRIES: usize = 20_000;
const MAX_MESSAGE: usize = 8 << 10;
const CHUNK: usize = 64 << 10;
/// How long what a template starts may take to be ready.
const READY: Duration = Duration::from_secs(120);

/// What a template begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The host's toolchain.
    Host,
    /// Another template of the same owner.
    Template(String),
    /// An image, from wherever.
    Image(Source),
    /// What was sent with the request: a root in an archive, or an image in one.
    Upload,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Template(name) => write!(f, "template:{name}"),
            Self::Image(source) => source.fmt(f),
            Self::Upload => f.write_str("upload"),
        }
    }
}

/// One step of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What is done.
    pub kind: StepKind,
    /// Whether it is done even if it was before; those after it are, too.
    pub force: bool,
}

/// What a step does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Runs a command by the shell.
    Run {
        /// The command.
        command: String,
        /// Who runs it, if not the current user.
        user: Option<String>,
    },
    /// Copies files of the context.
    Copy {
        /// What: paths in the context.
        sources: Vec<String>,
        /// Where to: as Docker has it, a directory if it ends with `/` or a directory is copied.
        target: String,
        /// Whose it is then, if not the current user's.
        user: Option<String>,
        /// Permissions of all of it.
        mode: Option<u32>,
        /// The files, if not those of the whole build.
        context: Option<Arc<Context>>,
    },
    /// Sets variables.
    Env(Vec<(String, String)>),
    /// Makes a directory, and goes there.
    Workdir(PathBuf),
    /// Goes on as another user.
    User(String),
}

impl fmt::Display for StepKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run { command, .. } => write!(f, "RUN {command}"),
            Self::Copy { sources, target, .. } => write!(f, "COPY {} {target}", sources.join(" ")),
            Self::Env(variables) => {
                let names: Vec<_> = variables.iter().map(|(name, _)| name.as_str()).collect();
                write!(f, "ENV {}", names.join(" "))
            }
            Self::Workdir(path) => write!(f, "WORKDIR {}", path.display()),
            Self::User(name) => write!(f, "USER {name}"),
        }
    }
}

/// What is to be built.
#[derive(Clone, Debug)]
pub struct BuildRequest {
    /// What it begins with.
    pub origin: Origin,
    /// What is done then.
    pub steps: Vec<Step>,
    /// What is started in each sandbox.
    pub start: Option<String>,
    /// What succeeds once that is ready.
    pub ready: Option<String>,
    /// What runs commands: a program and what comes before the command.
    pub shell: Vec<String>,
    /// Who runs steps and where, before any step says otherwise.
    pub user: Option<String>,
    /// See [`user`](Self::user).
    pub workdir: Option<PathBuf>,
    /// What the sandboxes of the steps are; its profile is the template's, too.
    pub spec: SandboxSpec,
    /// Limits of these sandboxes that this host need not be able to hold: nobody asked for them.
    pub accept_missing: BTreeSet<Limit>,
    /// The files that are copied.
    pub context: Option<Arc<Context>>,
    /// What [`Origin::Upload`] begins with.
    pub upload: Option<Arc<Upload>>,
    /// Whether nothing is taken from before.
    pub force: bool,
    /// What whoever asks for the build holds for it: dropped once it is over, before anybody is told.
    pub held: Option<Arc<dyn Any + Send + Sync>>,
}

impl Default for BuildRequest {
    fn default() -> Self {
        let mut spec = SandboxSpec::default();
        let limits = &mut spec.limits;
        limits.max_memory_bytes = Some(4 << 30);
        limits.max_write_bytes = Some(2 << 30);
        limits.max_wall_time_ms = Some(30 * 60_000);
        limits.max_cpu_time_ms = Some(30 * 60_000);
        limits.max_processes = Some(1024);
        limits.max_open_files = Some(4096);
        Self {
            origin: Origin::Host,
            steps: Vec::new(),
            start: None,
            ready: None,
            shell: vec!["/bin/sh".to_owned(), "-c".to_owned()],
            user: None,
            workdir: None,
            accept_missing: spec.limits.non_default(),
            spec,
            context: None,
            upload: None,
            force: false,
            held: None,
        }
    }
}

impl BuildRequest {
    fn options(&self, base: &Base) -> CreateOptions {
        let accept_missing = self.accept_missing.clone();
        CreateOptions { base: base.clone(), accept_missing, ..CreateOptions::default() }
    }
}

/// How far a build has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum BuildStatus {
    /// It was announced.
    Waiting,
    /// It is under way.
    Building,
    /// The template is there.
    Ready,
    /// There is no template.
    Failed(Failure),
}

impl BuildStatus {
    /// Tells whether nothing more will happen.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Ready | Self::Failed(_))
    }
}

/// Why a build failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Where: `base`, the number of a step from 1, or `finalize`.
    pub step: String,
    /// Why.
    pub message: String,
}

/// How much something matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogLevel {
    /// To who looks for a fault.
    Debug,
    /// To who wants to see that something happens.
    Info,
    /// Something may be wrong.
    Warn,
    /// It failed.
    Error,
}

/// Something that a build said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    /// When.
    pub timestamp: DateTime<Utc>,
    /// How much it matters.
    pub level: LogLevel,
    /// What.
    pub message: String,
    /// In which step; see [`Failure::step`].
    pub step: Option<String>,
}

/// A build that was announced, is under way, or is done.
#[derive(Debug)]
pub struct Build {
    pub(super) id: Uuid,
    pub(super) owner: String,
    pub(super) name: String,
    pub(super) tags: Vec<String>,
    pub(super) created_at: DateTime<Utc>,
    pub(super) status: watch::Sender<BuildStatus>,
    pub(super) log: Mutex<Vec<LogEntry>>,
    pub(super) cancel: CancellationToken,
}

impl Build {
    /// Returns what it is found by, and then its template.
    pub fn id(&self) -> Uuid {
        self.id
    }

    /// Returns whose it is.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// Returns what its template will be called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the tags that its template will have.
    pub fn tags(&self) -> &[String] {
        &self.tags
    }

    /// Returns when it was announced.
    pub fn created_at(&self) -> DateTime<Utc> {
        self.created_at
    }

    /// Says how far it has come.
    pub fn status(&self) -> BuildStatus {
        self.status.borrow().clone()
    }

    /// Waits until nothing more will happen.
    pub async fn wait(&self) -> BuildStatus {
        let mut watch = self.status.subscribe();
        match watch.wait_for(BuildStatus::is_final).await {
            Ok(status) => status.clone(),
            Err(_) => self.status(),
        }
    }

    /// Waits until it has said more than `seen` entries, or is done.
    pub async fn more(&self, seen: usize) {
        let mut watch = self.status.subscribe();
        while self.entries().len() <= seen && !watch.borrow_and_update().is_final() {
            if watch.changed().await.is_err() {
                return;
            }
        }
    }

    /// Returns what it said, from the entry `offset` on.
    pub fn log(&self, offset: usize, limit: usize) -> Vec<LogEntry> {
        self.entries().iter().skip(offset).take(limit).cloned().collect()
    }

    /// Ends it. What it did so far is thrown away.
    pub fn cancel(&self) {
        self.cancel.cancel();
    }

    fn entries(&self) -> MutexGuard<'_, Vec<LogEntry>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn say(&self, step: &str, level: LogLevel, message: &str) {
        let mut entries = self.entries();
        let message = match entries.len() {
            full if full > MAX_ENTRIES => return,
            full if full == MAX_ENTRIES => "more was said than is kept",
            _ => message,
        };
        let mut end = message.len().min(MAX_MESSAGE);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        let message = message[..end].to_owned();
        entries.push(LogEntry {
            timestamp: Utc::now(),
            level,
            message,
            step: Some(step.to_owned()),
        });
        drop(entries);
        // Whoever waits for more looks again.
        self.status.send_modify(|_| {});
    }
}

/// Where a build stands between two steps.
struct State {
    base: Base,
    defaults: Defaults,
    held: Held,
    /// Whether what follows may be known from before.
    cached: bool,
}

/// What is remembered of a step.
#[derive(Serialize, Deserialize)]
struct Cached {
    base: Base,
    created_at: DateTime<Utc>,
}

/// What makes a step the same as one before.
#[derive(Serialize)]
struct Key<'a> {
    parent: &'a Base,
    step: String,
    environment: &'a [(String, String)],
    workdir: Option<&'a Path>,
    user: Option<&'a str>,
    shell: &'a [String],
    profile: &'a str,
    files: Vec<Digest>,
}

impl Templates {
    /// Announces a build of a template with a name and a tag, and more tags.
    pub fn prepare(&self, owner: &str, name: &TemplateName, more: &[String]) -> Result<Arc<Build>> {
        let mut tags = vec![name.tag.clone()];
        for tag in more {
            let whole: TemplateName = format!("{}:{tag}", name.name).parse()?;
            tags.push(whole.tag);
        }
        let build = Arc::new(Build {
            id: Uuid::new_v4(),
            owner: owner.to_owned(),
            name: name.name.clone(),
            tags,
            created_at: Utc::now(),
            status: watch::Sender::new(BuildStatus::Waiting),
            log: Mutex::default(),
            cancel: self.inner.stop.child_token(),
        });
        let mut builds = self.builds();
        if builds.len() >= super::MAX_REMEMBERED {
            match oldest_of_most(&builds) {
                Some(idle) => {
                    builds.remove(&idle.id);
                    self.give_up(&idle);
                    self.forget(idle.id);
                }
                None => {
                    return Err(SandboxError::Conflict {
                        action: "build one more template".to_owned(),
                        reason: format!("{} builds are under way", builds.len()),
                    });
                }
            }
        }
        self.note(&build, false)?;
        builds.insert(build.id, Arc::clone(&build));
        Ok(build)
    }

    /// Ends a build that was announced and not started, and tells whether it was one.
    pub fn give_up(&self, build: &Build) -> bool {
        let given_up = build.status.send_if_modified(|status| {
            let waits = *status == BuildStatus::Waiting;
            if waits {
                let message = chain(&cancelled());
                *status = BuildStatus::Failed(Failure { step: "base".to_owned(), message });
            }
            waits
        });
        if given_up {
            self.forget(build.id);
        }
        given_up
    }

    /// Starts a build that was announced; it goes on by itself.
    pub fn start(&self, build: &Arc<Build>, mut request: BuildRequest) -> Result<()> {
        if request.steps.len() > MAX_STEPS {
            let reason = format!("{} steps are more than {MAX_STEPS}", request.steps.len());
            return Err(SandboxError::invalid("steps", reason, "do more in one step"));
        }
        if request.shell.is_empty() {
            return Err(SandboxError::invalid("shell", "it is empty", "name a program"));
        }
        request.spec.validate()?;
        if self.inner.stop.is_cancelled() {
            return Err(SandboxError::ShuttingDown);
        }
        let begun = build.status.send_if_modified(|status| {
            let waits = *status == BuildStatus::Waiting;
            if waits {
                *status = BuildStatus::Building;
            }
            waits
        });
        if !begun {
            return Err(SandboxError::Conflict {
                action: format!("start build `{}`", build.id),
                reason: "it was started or ended before".to_owned(),
            });
        }
        let (templates, build) = (self.clone(), Arc::clone(build));
        let noted = self.note(&build, true);
        let held = request.held.take();
        self.inner.tasks.spawn(async move {
            let done = match noted {
                Ok(()) => templates.run(&build, request).await,
                Err(error) => Err(Failure { step: "base".to_owned(), message: chain(&error) }),
            };
            templates.forget(build.id);
            let status = match done {
                Ok(()) => BuildStatus::Ready,
                Err(failure) => {
                    build.say(&failure.step, LogLevel::Error, &failure.message);
                    BuildStatus::Failed(failure)
                }
            };
            // Whoever is told that it is over may begin the next one at once.
            drop(held);
            build.status.send_replace(status);
        });
        Ok(())
    }

    async fn run(&self, build: &Arc<Build>, request: BuildRequest) -> Result<(), Failure> {
        let at = |step: &str| {
            let step = step.to_owned();
            move |error: SandboxError| Failure { step, message: chain(&error) }
        };
        let _place = tokio::select! {
            place = self.inner.room.enter(&build.owner) => place,
            () = build.cancel.cancelled() => return Err(at("base")(cancelled())),
        };
        build.say("base", LogLevel::Info, &format!("FROM {}", request.origin));
        let mut state = self.origin(build, &request).await.map_err(at("base"))?;
        for (index, step) in request.steps.iter().enumerate() {
            let number = (index + 1).to_string();
            build.say(&number, LogLevel::Info, &step.kind.to_string());
            state.cached &= !step.force;
            let done = self.step(build, &request, step, &number, &mut state).await;
            done.map_err(at(&number))?;
        }
        state.defaults.start = request.start.clone().or(state.defaults.start);
        state.defaults.ready = request.ready.clone().or(state.defaults.ready);
        state.defaults.profile = Some(request.spec.profile.clone());
        self.finish(build, &request, state).await.map_err(at("finalize"))
    }

    /// Finds what the template begins with.
    async fn origin(&self, build: &Arc<Build>, request: &BuildRequest) -> Result<State> {
        let (base, mut defaults, held) = match &request.origin {
            Origin::Host => (Base::default(), Defaults::default(), Held::default()),
            Origin::Template(name) => {
                let (template, held) = self.hold(&build.owner, name)?;
                (template.base, template.defaults, held)
            }
            Origin::Image(_) | Origin::Upload => {
                let source = match (&request.origin, &request.upload) {
                    (Origin::Image(source), _) => source.clone(),
                    (_, Some(upload)) => Source::from(upload.path()),
                    (_, None) => {
                        let hint = "send an archive with the request";
                        return Err(SandboxError::invalid("upload", "nothing was sent", hint));
                    }
                };
                let inner = Arc::clone(&self.inner);
                let listener = Arc::clone(build);
                let stop = build.cancel.clone();
                let work = move || {
                    let (layers, known) = (&inner.layers, &inner.registries);
                    image::pull(&source, layers, known, Bounds::default(), &stop, &mut |progress| {
                        listener.say("base", LogLevel::Info, &told(&progress));
                    })
                };
                let image = tokio::task::spawn_blocking(work).await;
                let image =
                    image.map_err(|error| SandboxError::Internal { message: error.to_string() })?;
                if build.cancel.is_cancelled() {
                    return Err(cancelled());
                }
                let image = image?;
                let user = image
                    .config
                    .user
                    .as_deref()
                    .map(|user| user.split(':').next().unwrap_or_default().to_owned());
                let defaults = Defaults {
                    environment: image.config.environment,
                    user: user.filter(|user| !user.is_empty()),
                    workdir: image.config.workdir,
                    ..Defaults::default()
                };
                let layers = image.layers;
                let host_tools = HostTools::Hidden;
                (Base { layers, host_tools, ..Base::default() }, defaults, image.held)
            }
        };
        defaults.user = request.user.clone().or(defaults.user);
        defaults.workdir = request.workdir.clone().or(defaults.workdir);
        Ok(State { base, defaults, held, cached: !request.force })
    }

    async fn step(
        &self,
        build: &Arc<Build>,
        request: &BuildRequest,
        step: &Step,
        number: &str,
        state: &mut State,
    ) -> Result<()> {
        let mut files = Vec::new();
        match &step.kind {
            StepKind::Env(variables) => {
                for (name, value) in variables {
                    state.defaults.environment.retain(|(known, _)| known != name);
                    state.defaults.environment.push((name.clone(), value.clone()));
                }
                return Ok(());
            }
            StepKind::User(name) => {
                state.defaults.user = Some(name.clone());
                return Ok(());
            }
            StepKind::Workdir(path) => {
                let before = state.defaults.workdir.clone();
                let before = before.unwrap_or_else(|| request.spec.workdir.clone());
                state.defaults.workdir = Some(before.join(path));
            }
            StepKind::Copy { sources, context, .. } => {
                let context = context.as_ref().or(request.context.as_ref()).ok_or_else(|| {
                    let hint = "send the files with the recipe";
                    SandboxError::invalid("context", "there are no files to copy", hint)
                })?;
                for source in sources {
                    files.push(context.digest(source)?);
                }
            }
            StepKind::Run { .. } => {}
        }
        let key = Key {
            parent: &state.base,
            step: format!("{:?}", Unlinked(&step.kind)),
            environment: &state.defaults.environment,
            workdir: state.defaults.workdir.as_deref(),
            user: state.defaults.user.as_deref(),
            shell: &request.shell,
            profile: &request.spec.profile,
            files,
        };
        let key = serde_json::to_vec(&key)
            .map_err(|error| SandboxError::Internal { message: error.to_string() })?;
        let key = Digest::of(&[build.owner.as_bytes(), b"\0", &key].concat());
        if state.cached && self.recall(&key, state)? {
            build.say(number, LogLevel::Info, "known from before");
            return Ok(());
        }
        // What comes after a step that was done anew stands on what it made; were that the same
        // as before, so is the key of what comes next.
        let options = request.options(&state.base);
        let sandbox = self.inner.backend.create_sandbox_with(&request.spec, &options).await?;
        let worked = tokio::select! {
            worked = self.work(build, request, step, number, &*sandbox, &state.defaults) => worked,
            () = build.cancel.cancelled() => Err(cancelled()),
        };
        let captured = match worked {
            Ok(()) => sandbox.capture().await,
            Err(error) => Err(error),
        };
        let destroyed = sandbox.destroy().await;
        self.behalf(build).barred(&*sandbox);
        let captured = captured?;
        destroyed?;
        state.base = captured.base;
        state.held.join(captured.held);
        self.remember(&key, &state.base)
    }

    fn recall(&self, key: &Digest, state: &mut State) -> Result<bool> {
        let Some(cached) = self.inner.cache.get::<Cached>(key.hex())? else { return Ok(false) };
        match self.inner.layers.hold(cached.base.all()) {
            Ok(held) => {
                state.held.join(held);
                state.base = cached.base;
                Ok(true)
            }
            Err(SandboxError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn remember(&self, key: &Digest, base: &Base) -> Result<()> {
        let cached = Cached { base: base.clone(), created_at: Utc::now() };
        self.inner.cache.put(key.hex(), &cached)?;
        let ids = self.inner.cache.ids()?;
        if ids.len() > MAX_CACHED {
            let mut known = Vec::with_capacity(ids.len());
            for id in ids {
                known.extend(self.inner.cache.get::<Cached>(&id)?.map(|one| (one.created_at, id)));
            }
            known.sort_unstable();
            for (_, id) in known.iter().take(known.len() / 10) {
                self.inner.cache.remove(id)?;
            }
        }
        Ok(())
    }

    /// Forgets what steps made, so that the next build does all of them.
    pub fn forget_steps(&self) -> Result<u64> {
        let ids = self.inner.cache.ids()?;
        for id in &ids {
            self.inner.cache.remove(id)?;
        }
        Ok(ids.len() as u64)
    }

    async fn work(
        &self,
        build: &Build,
        request: &BuildRequest,
        step: &Step,
        number: &str,
        sandbox: &dyn Sandbox,
        defaults: &Defaults,
    ) -> Result<()> {
        let files_of = |user: Option<&String>| -> Result<Files<'_>> {
            let found = match user.or(defaults.user.as_ref()) {
                Some(user) => sandbox.files_of(user).map(Files::Of),
                None => sandbox.files().map(Files::Usual),
            };
            found.ok_or_else(|| SandboxError::Unsupported {
                feature: "files of a sandbox".to_owned(),
                backend: sandbox.capabilities().backend.clone(),
                hint: "choose another backend".to_owned(),
            })
        };
        match &step.kind {
            StepKind::Env(_) | StepKind::User(_) => Ok(()),
            StepKind::Workdir(_) => {
                let Some(path) = &defaults.workdir else { return Ok(()) };
                files_of(None)?.get().make_directory(path, None, true).await.map(drop)
            }
            StepKind::Copy { sources, target, user, mode, context } => {
                let context = context.as_ref().or(request.context.as_ref());
                let context = context.expect("looked at when the step began");
                let workdir = defaults.workdir.as_deref().unwrap_or(&request.spec.workdir);
                let files = files_of(user.as_ref())?;
                for source in sources {
                    let several = sources.len() > 1;
                    context.copy(source, workdir, target, several, *mode, files.get()).await?;
                }
                Ok(())
            }
            StepKind::Run { command, user } => {
                let user = user.as_ref().or(defaults.user.as_ref());
                let program = shell(&request.shell, command, defaults, &request.spec);
                let options = ExecOptions {
                    user: user.map(|name| ExecUser { name: name.clone(), workdir: None }),
                    overflow: LogOverflow::Forget,
                    ..ExecOptions::default()
                };
                let behalf = self.behalf(build);
                let exec = behalf.start(sandbox, &program, options).await?;
                follow(build, number, &exec, command).await
            }
        }
    }

    /// Says for whom a build has commands run: nobody asks for each, and no manager has its sandboxes.
    fn behalf(&self, build: &Build) -> Behalf {
        let witness = self.inner.witness.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (client, request) = (build.owner.clone(), format!("build-{}", build.id));
        Behalf::new(witness, client, request).telling(self.inner.tasks.clone())
    }

    /// Tries what is started in sandboxes, and writes the template.
    async fn finish(&self, build: &Build, request: &BuildRequest, state: State) -> Result<()> {
        if state.defaults.start.is_some() || state.defaults.ready.is_some() {
            build.say("finalize", LogLevel::Info, "trying what is started in each sandbox");
            let options = request.options(&state.base);
            let mut spec = request.spec.clone();
            state.defaults.apply(&mut spec);
            let sandbox = self.inner.backend.create_sandbox_with(&spec, &options).await?;
            let behalf = self.behalf(build);
            let begun = tokio::select! {
                begun = super::begin(&*sandbox, &state.defaults, READY, &behalf) => begun,
                () = build.cancel.cancelled() => Err(cancelled()),
            };
            let destroyed = sandbox.destroy().await;
            behalf.barred(&*sandbox);
            begun?;
            destroyed?;
        }
        if build.cancel.is_cancelled() {
            return Err(cancelled());
        }
        let now = Utc::now();
        let template = Template {
            id: build.id,
            owner: build.owner.clone(),
            name: build.name.clone(),
            tags: build.tags.iter().map(|tag| (tag.clone(), now)).collect(),
            origin: request.origin.to_string(),
            bytes: self.bytes(&state.base),
            base: state.base,
            defaults: state.defaults,
            created_at: now,
        };
        self.put(&template)?;
        // Named now; no longer ours to hold.
        drop(state.held);
        build.say(
            "finalize",
            LogLevel::Info,
            &format!("{}:{} is there", template.name, build.tags[0]),
        );
        Ok(())
    }
}

/// Finds the oldest build that is not under way of the owner who has most of them: nobody's are forgotten
/// for what another has.
fn oldest_of_most(builds: &HashMap<Uuid, Arc<Build>>) -> Option<Arc<Build>> {
    let idle: Vec<_> =
        builds.values().filter(|build| build.status() != BuildStatus::Building).collect();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for build in &idle {
        *counts.entry(&build.owner).or_default() += 1;
    }
    let rank = |build: &&&Arc<Build>| (Reverse(counts[build.owner.as_str()]), build.created_at);
    idle.iter().min_by_key(rank).map(|build| Arc::clone(build))
}

/// The files of a sandbox, as one of its users has them or as usual.
enum Files<'a> {
    Usual(&'a dyn SandboxFiles),
    Of(Arc<dyn SandboxFiles>),
}

impl Files<'_> {
    fn get(&self) -> &dyn SandboxFiles {
        match self {
            Self::Usual(files) => *files,
            Self::Of(files) => &**files,
        }
    }
}

/// A step without the place that its files happen to be at.
struct Unlinked<'a>(&'a StepKind);

impl fmt::Debug for Unlinked<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            StepKind::Copy { sources, target, user, mode, context: _ } => {
                write!(f, "COPY {sources:?} {target:?} {user:?} {mode:?}")
            }
            other => write!(f, "{other:?}"),
        }
    }
}

/// Returns a command that a shell runs with what a template has by default.
pub(super) fn shell(
    shell: &[String],
    command: &str,
    defaults: &Defaults,
    spec: &SandboxSpec,
) -> Command {
    let arguments = shell[1..].iter().cloned().chain([command.to_owned()]);
    let mut program = Command::new(&shell[0]).args(arguments.collect::<Vec<_>>());
    program = program.workdir(defaults.workdir.as_deref().unwrap_or(&spec.workdir));
    for (name, value) in &defaults.environment {
        program = program.env(name, value);
    }
    program
}

/// Waits for the end of a command, and has the build say what it says.
async fn follow(build: &Build, number: &str, exec: &FoundExec, shown: &str) -> Result<()> {
    let mut offset = 0;
    let mut lines = [Vec::new(), Vec::new()];
    loop {
        let read = exec.read(offset, CHUNK, LogWait::More).await?;
        offset = read.next;
        for piece in read.pieces {
            let (line, level) = match piece.stream {
                LogStream::Stderr => (&mut lines[1], LogLevel::Warn),
                LogStream::Stdout | LogStream::Control => (&mut lines[0], LogLevel::Info),
            };
            for byte in piece.bytes {
                if byte == b'\n' || line.len() >= MAX_MESSAGE {
                    build.say(number, level, &String::from_utf8_lossy(line));
                    line.clear();
                }
                if byte != b'\n' {
                    line.push(byte);
                }
            }
        }
        if read.ended {
            break;
        }
    }
    for (line, level) in lines.iter().zip([LogLevel::Info, LogLevel::Warn]) {
        if !line.is_empty() {
            build.say(number, level, &String::from_utf8_lossy(line));
        }
    }
    let end = exec.wait().await?;
    if end.exit_code == 0 {
        return Ok(());
    }
    Err(SandboxError::Conflict {
        action: format!("run `{shown}`"),
        reason: format!("it ended with exit code {} ({:?})", end.exit_code, end.cause),
    })
}

/// Says how far a pull has come.
fn told(progress: &Progress) -> String {
    match progress {
        Progress::Layer { number, count, bytes: Some(bytes) } => {
            format!("layer {number} of {count}: {bytes} bytes to read")
        }
        Progress::Layer { number, count, bytes: None } => format!("layer {number} of {count}"),
        Progress::Have { number, count, layer } => format!("layer {number} of {count}: {layer}"),
    }
}

fn cancelled() -> SandboxError {
    SandboxError::Conflict { action: "go on".to_owned(), reason: "the build was ended".to_owned() }
}

/// Returns an error with all that is behind it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    text
}
