//! Templates: what sandboxes are made from, by name.
//!
//! | file | its job |
//! | --- | --- |
//! | `file.rs` | the recipe of a template, as people write it |
//! | `build.rs` | from a recipe to layers, step by step, each in a sandbox of its own |
//! | `room.rs` | who builds and who waits |
//! | `context.rs` | the files that a recipe copies |
//! | `kept.rs` | what of builds outlives the process: those announced, and files sent for them |
//! | `begin.rs` | what happens in a sandbox that was made from one: its command, until it is ready |
//!
//! A template is one record that names its layers, written when all of them are there, so that one is
//! whole or not there at all. A build that is under way is the affair of the process that runs it:
//! killed, it leaves a note that it was, its sandbox ends with it, and its layers are collected.

mod begin;
mod build;
mod context;
mod file;
mod kept;
mod room;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

pub use begin::{Behalf, START, begin};
pub use build::{
    Build, BuildRequest, BuildStatus, Failure, LogEntry, LogLevel, Origin, Step, StepKind,
};
pub use context::{Context, Upload};
pub use file::{Recipe, parse};

use self::room::Room;
use crate::image::Registries;
use crate::layers::records::Records;
use crate::layers::{Held, Layers};
use crate::profile::ProfileUsers;
use crate::{Base, IsolationBackend, Result, SandboxError, SandboxSpec, Witness};

/// The directory of these records.
const KIND: &str = "templates";
/// The tag of a name that says none.
pub const DEFAULT_TAG: &str = "default";
const MAX_NAME: usize = 128;
/// How many templates one owner may have.
const MAX_TEMPLATES: usize = 1_000;
/// How many builds that are done, or wait, are remembered.
const MAX_REMEMBERED: usize = 1_000;

/// What a template is called: `name`, or `name:tag`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TemplateName {
    /// The name.
    pub name: String,
    /// Which one of that name.
    pub tag: String,
}

impl FromStr for TemplateName {
    type Err = SandboxError;

    fn from_str(text: &str) -> Result<Self> {
        let (name, tag) = text.split_once(':').unwrap_or((text, DEFAULT_TAG));
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let word = |word: &str| {
            !word.is_empty()
                && word.len() <= MAX_NAME
                && word.starts_with(|c: char| c.is_ascii_alphanumeric())
                && word.chars().all(plain)
        };
        if name.len() <= MAX_NAME && name.split('/').all(word) && word(tag) {
            return Ok(Self { name: name.to_owned(), tag: tag.to_owned() });
        }
        let shown: String = text.chars().take(MAX_NAME).collect();
        Err(SandboxError::invalid(
            "template",
            format!("`{}` is no name of a template", shown.escape_debug()),
            "a name is `name` or `name:tag`, of letters, digits, `.`, `_` and `-`",
        ))
    }
}

impl TryFrom<String> for TemplateName {
    type Error = SandboxError;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<TemplateName> for String {
    fn from(name: TemplateName) -> Self {
        name.to_string()
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.tag)
    }
}

/// The label of a sandbox that says who runs its commands, unless a command says otherwise: a user of the sandbox, by
/// name or number.
pub const USER_LABEL: &str = "warren.user";

/// What a sandbox has that is made from a template, unless its spec says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Defaults {
    /// Variables of the environment.
    pub environment: Vec<(String, String)>,
    /// Who runs commands, by a name of its `/etc/passwd`.
    pub user: Option<String>,
    /// Where commands start.
    pub workdir: Option<PathBuf>,
    /// The profile that it was built with.
    pub profile: Option<String>,
    /// What is started in each new sandbox, by a shell.
    pub start: Option<String>,
    /// What succeeds once that is ready.
    pub ready: Option<String>,
}

impl Defaults {
    /// Puts what is said here below what a spec says.
    pub fn apply(&self, spec: &mut SandboxSpec) {
        let usual = SandboxSpec::default();
        let own = std::mem::take(&mut spec.environment);
        let said = |name: &String| own.iter().any(|(own, _)| own == name);
        let below = self.environment.iter().filter(|(name, _)| !said(name)).cloned();
        spec.environment = below.collect();
        spec.environment.extend(own);
        if let Some(workdir) = &self.workdir
            && spec.workdir == usual.workdir
        {
            spec.workdir.clone_from(workdir);
        }
        if let Some(profile) = &self.profile
            && spec.profile == usual.profile
        {
            spec.profile.clone_from(profile);
        }
        let several = crate::profile::profile(&spec.profile)
            .is_some_and(|profile| matches!(profile.users, ProfileUsers::Several { .. }));
        if let Some(user) = &self.user
            && several
            && !spec.labels.iter().any(|(key, _)| key == USER_LABEL)
        {
            spec.labels.push((USER_LABEL.to_owned(), user.clone()));
        }
    }
}

/// What sandboxes can be made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Template {
    /// What it is found by: the id of the build that made it.
    pub id: Uuid,
    /// Whose it is.
    pub owner: String,
    /// Its name.
    pub name: String,
    /// Its tags, and since when it has each. Of two templates with the same one, the later has it.
    pub tags: BTreeMap<String, DateTime<Utc>>,
    /// What it was built from: `host`, an image, a template.
    pub origin: String,
    /// What a sandbox stands on.
    pub base: Base,
    /// What a sandbox has by default.
    pub defaults: Defaults,
    /// When it was built.
    pub created_at: DateTime<Utc>,
    /// Bytes in the files of all its layers.
    pub bytes: u64,
}

/// The templates in one store of layers, and who builds them. Clones are handles to the same.
#[derive(Clone, Debug)]
pub struct Templates {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    layers: Layers,
    records: Records,
    /// What steps of builds that were done before made.
    cache: Records,
    backend: Arc<dyn IsolationBackend>,
    registries: Registries,
    builds: Mutex<HashMap<Uuid, Arc<Build>>>,
    /// Held while records are changed, so that what was read is still so.
    turn: Mutex<()>,
    room: Arc<Room>,
    tasks: TaskTracker,
    stop: CancellationToken,
    /// Who hears of what steps run.
    witness: Mutex<Option<Arc<dyn Witness>>>,
}

impl Templates {
    /// Returns those in the store of a backend, in whose sandboxes steps will run.
    pub fn new(layers: Layers, backend: Arc<dyn IsolationBackend>, registries: Registries) -> Self {
        let inner = Inner {
            records: Records::of(&layers, KIND),
            cache: Records::of(&layers, build::CACHE),
            layers,
            backend,
            registries,
            builds: Mutex::default(),
            turn: Mutex::default(),
            room: Arc::default(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            witness: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Returns the store of what they stand on.
    pub fn layers(&self) -> &Layers {
        &self.inner.layers
    }

    /// Has somebody hear of every command that a build runs from now on.
    pub fn witnessed_by(&self, witness: Arc<dyn Witness>) {
        *self.inner.witness.lock().unwrap_or_else(PoisonError::into_inner) = Some(witness);
    }

    /// Ends every build, and waits until nothing is left of them.
    pub async fn shutdown(&self) {
        self.inner.stop.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }

    /// Lists an owner's, by name, the oldest of one name first.
    pub fn list(&self, owner: &str) -> Result<Vec<Template>> {
        let mut all = self.inner.records.list::<Template>()?;
        all.retain(|template| template.owner == owner);
        all.sort_by(|a, b| (&a.name, a.created_at, a.id).cmp(&(&b.name, b.created_at, b.id)));
        // A tag that was given to another one since is no tag of this one.
        let mut newest: HashMap<(String, String), DateTime<Utc>> = HashMap::new();
        for template in &all {
            for (tag, since) in &template.tags {
                let known = newest.entry((template.name.clone(), tag.clone())).or_insert(*since);
                *known = (*known).max(*since);
            }
        }
        for template in &mut all {
            let name = template.name.clone();
            template.tags.retain(|tag, since| newest[&(name.clone(), tag.clone())] == *since);
        }
        Ok(all)
    }

    /// Finds an owner's by its id, its name, or its name and tag.
    pub fn find(&self, owner: &str, name: &str) -> Result<Template> {
        let unknown = || SandboxError::NotFound { what: "template", id: name.to_owned() };
        let all = self.list(owner)?;
        if let Ok(id) = name.parse::<Uuid>() {
            return all.into_iter().find(|one| one.id == id).ok_or_else(unknown);
        }
        let wanted: TemplateName = name.parse()?;
        let has = |one: &Template| one.name == wanted.name && one.tags.contains_key(&wanted.tag);
        all.into_iter().find(has).ok_or_else(unknown)
    }

    /// Finds one as [`find`](Self::find) does, and keeps its layers until a sandbox stands on them.
    pub fn hold(&self, owner: &str, name: &str) -> Result<(Template, Held)> {
        let template = self.find(owner, name)?;
        match self.inner.layers.hold(template.base.all()) {
            Ok(held) => Ok((template, held)),
            // Removed just now.
            Err(SandboxError::NotFound { .. }) => {
                Err(SandboxError::NotFound { what: "template", id: name.to_owned() })
            }
            Err(error) => Err(error),
        }
    }

    /// Gives a template more tags, and takes them from others of the same name.
    pub fn tag(&self, owner: &str, name: &str, tags: &[String]) -> Result<Template> {
        let _turn = self.turn();
        let mut template = self.find(owner, name)?;
        let now = Utc::now();
        for tag in tags {
            let whole: TemplateName = format!("{}:{tag}", template.name).parse()?;
            template.tags.insert(whole.tag, now);
        }
        self.inner.records.put(&template.id.to_string(), &template)?;
        Ok(template)
    }

    /// Takes a tag from whatever has it.
    pub fn untag(&self, owner: &str, name: &TemplateName) -> Result<Template> {
        let _turn = self.turn();
        let mut template = self.find(owner, &name.to_string())?;
        // Whoever had it before would have it again.
        for mut other in self.inner.records.list::<Template>()? {
            let same = other.owner == owner && other.name == template.name;
            if same && other.tags.remove(&name.tag).is_some() {
                self.inner.records.put(&other.id.to_string(), &other)?;
            }
        }
        template.tags.remove(&name.tag);
        Ok(template)
    }

    /// Forgets a template by its id or its name and tag; by a name alone, all that have it. Sandboxes
    /// that were made from one live on. Returns those that went.
    pub fn remove(&self, owner: &str, name: &str) -> Result<Vec<Template>> {
        let _turn = self.turn();
        let whole = name.contains(':') || name.parse::<Uuid>().is_ok();
        let gone = if whole {
            vec![self.find(owner, name)?]
        } else {
            let mut all = self.list(owner)?;
            all.retain(|template| template.name == name);
            if all.is_empty() {
                return Err(SandboxError::NotFound { what: "template", id: name.to_owned() });
            }
            all
        };
        for template in &gone {
            self.inner.records.remove(&template.id.to_string())?;
        }
        Ok(gone)
    }

    /// Writes a template whose layers are there.
    fn put(&self, template: &Template) -> Result<()> {
        let _turn = self.turn();
        if self.list(&template.owner)?.len() >= MAX_TEMPLATES {
            return Err(SandboxError::Conflict {
                action: "keep one more template".to_owned(),
                reason: format!("there are {MAX_TEMPLATES} already"),
            });
        }
        self.inner.records.put(&template.id.to_string(), template)
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.inner.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn builds(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Build>>> {
        self.inner.builds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many bytes the files of all layers of a base have.
    fn bytes(&self, base: &Base) -> u64 {
        let of = |id| self.inner.layers.info(id).map(|info| info.bytes).unwrap_or_default();
        base.all().into_iter().map(of).sum()
    }

    /// Finds a build of an owner that is under way, or was not long ago.
    pub fn build(&self, owner: &str, id: Uuid) -> Result<Arc<Build>> {
        let found = self.builds().get(&id).filter(|build| build.owner() == owner).cloned();
        found.ok_or_else(|| SandboxError::NotFound { what: "build", id: id.to_string() })
    }

    /// Lists an owner's builds, the oldest first.
    pub fn list_builds(&self, owner: &str) -> Vec<Arc<Build>> {
        let builds = self.builds();
        let mut found: Vec<_> =
            builds.values().filter(|build| build.owner() == owner).cloned().collect();
        found.sort_by_key(|build| (build.created_at(), build.id()));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_named_by_plain_words() {
        let name: TemplateName = "python".parse().unwrap();
        assert_eq!(name.to_string(), "python:default");
        let name: TemplateName = "team/py-3.12:v1".parse().unwrap();
        assert_eq!((name.name.as_str(), name.tag.as_str()), ("team/py-3.12", "v1"));
        for bad in ["", ":", "a:", ":b", "a:b:c", "../x", "a//b", "a b", "-a", "ä", "a/", ".a"] {
            assert!(bad.parse::<TemplateName>().is_err(), "{bad}");
        }
        assert!("x".repeat(129).parse::<TemplateName>().is_err());
    }

    #[test]
    fn what_the_caller_says_holds_over_the_template() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let defaults = Defaults {
            environment: vec![pair("A", "template"), pair("B", "template")],
            workdir: Some("/srv".into()),
            profile: Some("dev".into()),
            ..Defaults::default()
        };
        let mut spec =
            SandboxSpec { environment: vec![pair("B", "caller")], ..SandboxSpec::default() };
        defaults.apply(&mut spec);
        assert_eq!(spec.environment, [pair("A", "template"), pair("B", "caller")]);
        assert_eq!((spec.workdir.to_str(), spec.profile.as_str()), (Some("/srv"), "dev"));
        let mut spec = SandboxSpec {
            workdir: "/mine".into(),
            profile: "strict".into(),
            ..SandboxSpec::default()
        };
        defaults.apply(&mut spec);
        assert_eq!((spec.workdir.to_str(), spec.profile.as_str()), (Some("/mine"), "strict"));
    }
}
