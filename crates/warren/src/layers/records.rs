//! What names layers: a directory of small files for each kind of record, each written by one rename.
//!
//! A record is any JSON object with a `base`, whatever else it says; what no record names may be
//! collected.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Collected, Layers, failed};
use crate::{Base, LayerId, Result, SandboxError};

const RECORDS: &str = "records";
const SUFFIX: &str = ".json";
/// The longest record.
const MAX_RECORD: u64 = 4 << 20;

/// The records of one kind.
#[derive(Debug, Clone)]
pub(crate) struct Records {
    directory: PathBuf,
}

/// What every record says.
#[derive(Debug, Deserialize)]
struct Named {
    base: Base,
}

impl Records {
    /// Finds the records of a kind, which is a word of ours.
    pub(crate) fn of(layers: &Layers, kind: &'static str) -> Self {
        Self { directory: layers.root().join(RECORDS).join(kind) }
    }

    /// Names the file of a record. An id with a slash in it is nobody's.
    fn path(&self, id: &str) -> Option<PathBuf> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let fits =
            !id.is_empty() && id.len() <= 200 && !id.starts_with('.') && id.chars().all(plain);
        fits.then(|| self.directory.join(format!("{id}{SUFFIX}")))
    }

    /// Writes a record, new or changed. It is there as a whole, or as it was.
    pub(crate) fn put(&self, id: &str, record: &impl Serialize) -> Result<()> {
        let path = self.path(id);
        let path =
            path.ok_or_else(|| SandboxError::invalid("id", format!("`{id}` is none"), ""))?;
        let temporary = self.directory.join(format!(".{}", Uuid::new_v4()));
        let write = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
            let text = serde_json::to_vec(record).map_err(io::Error::other)?;
            if text.len() as u64 > MAX_RECORD {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(&temporary)?;
            file.write_all(&text)?;
            file.sync_data()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(|error| {
            let _ = fs::remove_file(&temporary);
            failed("write", &path, error)
        })
    }

    /// Reads a record.
    pub(crate) fn get<T: DeserializeOwned>(&self, id: &str) -> Result<Option<T>> {
        let Some(path) = self.path(id) else { return Ok(None) };
        let read = || {
            let file = match File::open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                other => other?,
            };
            let mut text = Vec::new();
            file.take(MAX_RECORD).read_to_end(&mut text)?;
            Ok(Some(serde_json::from_slice(&text)?))
        };
        read().map_err(|error: io::Error| failed("read", &path, error))
    }

    /// Reads all records. One that cannot be read is an error that names it.
    pub(crate) fn list<T: DeserializeOwned>(&self) -> Result<Vec<T>> {
        let ids = self.ids()?;
        let mut records = Vec::with_capacity(ids.len());
        for id in ids {
            // One that was removed meanwhile is none.
            records.extend(self.get(&id)?);
        }
        Ok(records)
    }

    /// Lists what records there are.
    pub(crate) fn ids(&self) -> Result<BTreeSet<String>> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            other => other.map_err(|error| failed("list", &self.directory, error))?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let id = |name: String| Some(name.strip_suffix(SUFFIX)?.to_owned());
        Ok(names.filter(|name| !name.starts_with('.')).filter_map(id).collect())
    }

    /// Removes all of them.
    pub(crate) fn clear(&self) -> Result<()> {
        self.ids()?.iter().try_for_each(|id| self.remove(id))
    }

    /// Removes a record; one that is gone already is as good.
    pub(crate) fn remove(&self, id: &str) -> Result<()> {
        let Some(path) = self.path(id) else { return Ok(()) };
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove", &path, error))
            }
            _ => Ok(()),
        }
    }
}

impl Layers {
    /// Returns every layer that a record of any kind names.
    pub fn named(&self) -> Result<BTreeSet<LayerId>> {
        let place = self.root().join(RECORDS);
        let kinds = match fs::read_dir(&place) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            other => other.map_err(|error| failed("list", &place, error))?,
        };
        let mut named = BTreeSet::new();
        for directory in kinds.flatten().map(|kind| kind.path()) {
            for Named { base } in (Records { directory }).list::<Named>()? {
                named.extend(base.layers.into_iter().chain(base.changes));
            }
        }
        Ok(named)
    }

    /// Removes every layer that no record names, nobody holds and is not `known` to be in use. A record that cannot be read stops
    /// that: nobody knows what it names.
    pub fn collect_unnamed(&self, known: impl IntoIterator<Item = LayerId>) -> Result<Collected> {
        let mut spared = self.named()?;
        spared.extend(known);
        let taken = self.take(self.ids()?.difference(&spared))?;
        // Once more, now that nobody else has them: whoever writes a record holds what it names until it
        // is written, so that each that was written while we looked is there by now.
        let named = self.named()?;
        self.bury(taken.into_iter().filter(|taken| !named.contains(taken.id())))
    }

    /// Removes what a killed process left of records that it did not come to write.
    pub(super) fn remove_unwritten(&self) {
        let kinds = fs::read_dir(self.root().join(RECORDS)).into_iter().flatten().flatten();
        for file in kinds.flat_map(|kind| fs::read_dir(kind.path())).flatten().flatten() {
            if file.file_name().as_encoded_bytes().starts_with(b".") {
                let _ = fs::remove_file(file.path());
            }
        }
    }
}
