//! What of builds outlives the process: those that were announced, and files that were sent for them.
//!
//! An announced build waits for its start as it did before. One that was under way is known to have
//! failed, so that whoever asks for it is told, and not left to guess from its absence. Files become a
//! layer, named by a record like everything else in the store.

use std::sync::{Arc, Mutex};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use uuid::Uuid;

use super::build::{Build, BuildStatus, Failure, LogLevel};
use super::{Context, Templates};
use crate::layers::records::Records;
use crate::{Base, Result, SandboxError};

/// The directories of these records.
pub(super) const BUILDS: &str = "builds";
pub(super) const FILES: &str = "build-files";
/// How many sets of files are kept for one owner; the oldest goes first.
const MAX_FILES: usize = 64;

/// A build that is not done.
#[derive(Debug, Serialize, Deserialize)]
struct Announced {
    /// It stands on nothing; every record says so.
    base: Base,
    id: Uuid,
    owner: String,
    name: String,
    tags: Vec<String>,
    created_at: DateTime<Utc>,
    begun: bool,
}

/// Files that were sent.
#[derive(Debug, Serialize, Deserialize)]
struct Sent {
    base: Base,
    owner: String,
    hash: String,
    sent_at: DateTime<Utc>,
}

impl Sent {
    /// Returns by what it is found. Owner and hash are anybody's words.
    fn id(owner: &str, hash: &str) -> String {
        let mut digest = Sha256::new();
        digest.update((owner.len() as u64).to_le_bytes());
        digest.update(owner);
        digest.update(hash);
        digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl Templates {
    /// Takes up the builds that the process before left: for the one who serves them alone, before it
    /// does.
    pub fn take_up(&self) -> Result<()> {
        let records = self.announced();
        for left in records.list::<Announced>()? {
            let status = match left.begun {
                false => BuildStatus::Waiting,
                true => BuildStatus::Failed(Failure {
                    step: "base".to_owned(),
                    message: "the daemon ended while this was being built: build it again"
                        .to_owned(),
                }),
            };
            let build = Build {
                id: left.id,
                owner: left.owner,
                name: left.name,
                tags: left.tags,
                created_at: left.created_at,
                status: watch::Sender::new(status.clone()),
                log: Mutex::default(),
                cancel: self.inner.stop.child_token(),
            };
            if let BuildStatus::Failed(failure) = status {
                build.say(&failure.step, LogLevel::Error, &failure.message);
                records.remove(&left.id.to_string())?;
            }
            self.builds().insert(left.id, Arc::new(build));
        }
        Ok(())
    }

    fn announced(&self) -> Records {
        Records::of(&self.inner.layers, BUILDS)
    }

    /// Writes down that a build was announced, or has begun.
    pub(super) fn note(&self, build: &Build, begun: bool) -> Result<()> {
        let record = Announced {
            base: Base::default(),
            id: build.id,
            owner: build.owner.clone(),
            name: build.name.clone(),
            tags: build.tags.clone(),
            created_at: build.created_at,
            begun,
        };
        self.announced().put(&build.id.to_string(), &record)
    }

    /// Forgets a build that is done, or will not be.
    pub(super) fn forget(&self, id: Uuid) {
        if let Err(error) = self.announced().remove(&id.to_string()) {
            // The next process takes it for one that failed.
            tracing::warn!(%id, %error, "cannot record that a build is done");
        }
    }

    /// Keeps files for an owner's builds to come, by a name that the owner chose. Blocks.
    pub fn keep_files(&self, owner: &str, hash: &str, context: Context) -> Result<()> {
        let records = Records::of(&self.inner.layers, FILES);
        let (layer, held) = context.commit()?;
        let base = Base { layers: vec![layer], ..Base::default() };
        let (owner, hash) = (owner.to_owned(), hash.to_owned());
        let (id, sent_at) = (Sent::id(&owner, &hash), Utc::now());
        let _turn = self.turn();
        let mut own = records.list::<Sent>()?;
        own.retain(|sent| sent.owner == owner && sent.hash != hash);
        records.put(&id, &Sent { base, owner, hash, sent_at })?;
        drop(held);
        own.sort_by_key(|sent| sent.sent_at);
        let surplus = (own.len() + 1).saturating_sub(MAX_FILES);
        own[..surplus]
            .iter()
            .try_for_each(|sent| records.remove(&Sent::id(&sent.owner, &sent.hash)))
    }

    /// Returns files that were kept, for as long as this is held.
    pub fn files(&self, owner: &str, hash: &str) -> Result<Option<Context>> {
        let records = Records::of(&self.inner.layers, FILES);
        let Some(sent) = records.get::<Sent>(&Sent::id(owner, hash))? else { return Ok(None) };
        let Some(layer) = sent.base.layers.first() else { return Ok(None) };
        match self.inner.layers.hold([layer]) {
            Ok(held) => Context::kept(&self.inner.layers, layer, held).map(Some),
            Err(SandboxError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::backend::FakeBackend;
    use crate::image::Registries;
    use crate::layers::Layers;
    use crate::template::TemplateName;

    use super::*;

    fn open(directory: &std::path::Path) -> Templates {
        let layers = Layers::open(directory).unwrap();
        Templates::new(layers, Arc::new(FakeBackend::new()), Registries::default())
    }

    #[tokio::test]
    async fn an_announced_build_waits_on_and_one_that_was_under_way_is_said_to_have_failed() {
        let directory = tempfile::tempdir().unwrap();
        let name: TemplateName = "mine".parse().unwrap();
        let (waits, begun) = {
            let templates = open(directory.path());
            let waits = templates.prepare("ann", &name, &["v1".to_owned()]).unwrap();
            let begun = templates.prepare("ann", &name, &[]).unwrap();
            templates.note(&begun, true).unwrap();
            (waits.id(), begun.id())
        };
        let templates = open(directory.path());
        assert!(templates.build("ann", waits).is_err(), "control: nobody serves them yet");
        templates.take_up().unwrap();
        let build = templates.build("ann", waits).unwrap();
        assert_eq!((build.status(), build.name()), (BuildStatus::Waiting, "mine"));
        assert_eq!(build.tags(), ["default", "v1"]);
        assert!(templates.build("ben", waits).is_err());
        let failed = templates.build("ann", begun).unwrap();
        assert!(matches!(failed.wait().await, BuildStatus::Failed(_)));
        assert_eq!(failed.log(0, 9).len(), 1, "and says why");
        templates.start(&build, super::super::BuildRequest::default()).unwrap();
        assert_eq!(build.wait().await, BuildStatus::Ready);
        templates.shutdown().await;
        let again = open(directory.path());
        again.take_up().unwrap();
        assert!(again.list_builds("ann").is_empty(), "what is done is not taken up");
    }

    #[tokio::test]
    async fn nobodys_build_is_forgotten_for_what_another_announces() {
        let directory = tempfile::tempdir().unwrap();
        let templates = open(directory.path());
        let name: TemplateName = "mine".parse().unwrap();
        let bens = templates.prepare("ben", &name, &[]).unwrap();
        let first = templates.prepare("ann", &name, &[]).unwrap();
        for _ in 0..super::super::MAX_REMEMBERED {
            templates.prepare("ann", &name, &[]).unwrap();
        }
        assert!(templates.build("ann", first.id()).is_err(), "control: it is forgotten");
        assert!(matches!(first.status(), BuildStatus::Failed(_)), "and whoever waits is told");
        assert_eq!(templates.build("ben", bens.id()).unwrap().status(), BuildStatus::Waiting);
        assert!(templates.give_up(&bens) && !templates.give_up(&bens));
        let request = super::super::BuildRequest::default();
        assert!(templates.start(&bens, request).is_err(), "it is over");
    }

    #[test]
    fn files_are_kept_for_one_owner_and_only_so_many() {
        let directory = tempfile::tempdir().unwrap();
        let templates = open(directory.path());
        let empty =
            |templates: &Templates| Context::unpack(templates.layers(), std::io::empty()).unwrap();
        templates.keep_files("ann", "h", empty(&templates)).unwrap();
        let templates = open(directory.path());
        assert!(templates.files("ann", "h").unwrap().is_some(), "they outlive the process");
        assert!(templates.files("ben", "h").unwrap().is_none());
        assert!(templates.files("ann", "../h").unwrap().is_none());
        let held = templates.files("ann", "h").unwrap().unwrap();
        for number in 0..MAX_FILES {
            templates.keep_files("ann", &number.to_string(), empty(&templates)).unwrap();
        }
        assert!(templates.files("ann", "h").unwrap().is_none(), "the oldest went");
        assert!(templates.files("ann", "0").unwrap().is_some());
        held.digest(".").unwrap();
    }
}
