//! Layers: trees of files that never change, each kept once under the digest of what is in it.
//!
//! ```text
//! DIR/staging/<random>/tree     being filled, by whoever holds a lock on <random>
//! DIR/layers/<digest>/tree      there for good, with `layer.json` beside it
//! DIR/records/<kind>/<id>.json  what names layers, so that they are kept
//! ```
//!
//! A layer comes to be by one rename, so that none is ever seen half-made; what a killed process left
//! in `staging` is removed by the next one that looks. A layer in use is locked (shared) by whoever
//! uses it, and the kernel lets go of that lock with the process: [`collect`](Layers::collect) removes
//! what no record names and nobody has locked, while others work. Files are stored with the ids that
//! they have inside; a plain user's all belong to that user.

pub(crate) mod capture;
mod copy;
pub(crate) mod diff;
mod merge;
pub(crate) mod records;
pub(crate) mod stream;
pub(crate) mod tree;

pub(crate) use copy::copy;
pub use merge::Below;

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use chrono::{DateTime, Utc};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{LayerId, Result, SandboxError};

const STAGING: &str = "staging";
const LAYERS: &str = "layers";
const TREE: &str = "tree";
const INFO: &str = "layer.json";

/// The layers below one directory. Clones are handles to the same.
#[derive(Debug, Clone)]
pub struct Layers {
    root: Arc<PathBuf>,
}

/// What is known of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInfo {
    /// Its name.
    pub id: LayerId,
    /// Bytes in its files.
    pub bytes: u64,
    /// Its files, directories and other entries.
    pub entries: u64,
    /// When it was made.
    pub created_at: DateTime<Utc>,
}

/// What was removed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collected {
    /// Layers.
    pub layers: u64,
    /// Bytes in their files.
    pub bytes: u64,
}

impl Layers {
    /// Opens a store below `root`, which is made if it is not there and must be ours alone, and removes
    /// what others left half-made.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        for directory in [root.join(STAGING), root.join(LAYERS)] {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
            made.map_err(|error| SandboxError::step("create", &directory, error))?;
        }
        let owner = fs::metadata(&root).map_err(|error| failed("look at", &root, error))?;
        if owner.uid() != rustix::process::geteuid().as_raw() {
            let reason = format!("`{}` belongs to another user", root.display());
            return Err(SandboxError::invalid("state_dir", reason, "use a directory of your own"));
        }
        let layers = Self { root: Arc::new(root) };
        layers.remove_abandoned()?;
        layers.remove_unwritten();
        Ok(layers)
    }

    /// Returns where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Begins a layer.
    pub fn begin(&self) -> Result<Staging> {
        let path = self.root.join(STAGING).join(Uuid::new_v4().to_string());
        let begin = || {
            DirBuilder::new().mode(0o700).create(&path)?;
            let lock = File::open(&path)?;
            // Shared, as it will be kept: only who removes something wants it alone.
            flock(&lock, FlockOperation::LockShared)?;
            DirBuilder::new().mode(0o755).create(path.join(TREE))?;
            let tree = tree::open_root(&path.join(TREE))?;
            io::Result::Ok(Staging {
                layers: self.clone(),
                path: path.clone(),
                tree,
                lock: Some(lock),
            })
        };
        begin().map_err(|error| failed("begin a layer in", &path, error))
    }

    /// Returns where the tree of a layer is. It must not be changed, and is there for certain only
    /// while it is [held](Self::hold).
    pub fn path(&self, id: &LayerId) -> PathBuf {
        self.place(id).join(TREE)
    }

    fn place(&self, id: &LayerId) -> PathBuf {
        self.root.join(LAYERS).join(id.hex())
    }

    /// Tells whether there is such a layer.
    pub fn contains(&self, id: &LayerId) -> bool {
        self.place(id).is_dir()
    }

    /// Says how large a layer is.
    pub fn info(&self, id: &LayerId) -> Result<LayerInfo> {
        let path = self.place(id).join(INFO);
        let text = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => unknown(id),
            _ => failed("read", &path, error),
        })?;
        serde_json::from_slice(&text)
            .map_err(|error| failed("understand", &path, io::Error::other(error)))
    }

    /// Lists all layers, in the order of their names.
    pub fn list(&self) -> Result<Vec<LayerInfo>> {
        self.ids()?.iter().map(|id| self.info(id)).collect()
    }

    fn ids(&self) -> Result<BTreeSet<LayerId>> {
        let place = self.root.join(LAYERS);
        let entries = fs::read_dir(&place).map_err(|error| failed("list", &place, error))?;
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        Ok(names.filter_map(|hex| format!("sha256:{hex}").parse().ok()).collect())
    }

    /// Keeps layers from being removed for as long as the result lives, or says which one is missing.
    pub fn hold<'a>(&self, ids: impl IntoIterator<Item = &'a LayerId>) -> Result<Held> {
        let hold = |id: &LayerId| {
            let path = self.place(id);
            // One that is removed between the two calls was not held in time; the next look tells.
            loop {
                let held = File::open(&path).and_then(|lock| {
                    flock(&lock, FlockOperation::LockShared)?;
                    let (ours, there) = (lock.metadata()?, fs::metadata(&path)?);
                    Ok((lock, (ours.dev(), ours.ino()) == (there.dev(), there.ino())))
                });
                match held {
                    Ok((lock, true)) => return Ok(lock),
                    Ok((_, false)) => {}
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        return Err(unknown(id));
                    }
                    Err(error) => return Err(failed("hold", &path, error)),
                }
            }
        };
        let mut ids: Vec<_> = ids.into_iter().cloned().collect();
        ids.sort_unstable();
        ids.dedup();
        let locks = ids.iter().map(hold).collect::<Result<_>>()?;
        Ok(Held { ids, locks })
    }

    /// Removes every layer that is not among `named` and that nobody holds. For one who knows that nobody
    /// names another meanwhile.
    pub fn collect(&self, named: &BTreeSet<LayerId>) -> Result<Collected> {
        self.bury(self.take(self.ids()?.difference(named))?)
    }

    /// Takes layers that nobody holds, so that nobody can.
    fn take<'a>(&self, ids: impl IntoIterator<Item = &'a LayerId>) -> Result<Vec<Taken>> {
        let mut taken = Vec::new();
        for id in ids {
            let path = self.place(id);
            let lock = match File::open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(|error| failed("open", &path, error))?,
            };
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => {}
                Err(error) => return Err(failed("lock", &path, error.into())),
                Ok(()) => taken.push(Taken { id: id.clone(), _lock: lock }),
            }
        }
        Ok(taken)
    }

    /// Removes layers that were taken.
    fn bury(&self, taken: impl IntoIterator<Item = Taken>) -> Result<Collected> {
        let mut collected = Collected::default();
        for Taken { id, _lock } in taken {
            let path = self.place(&id);
            let bytes = self.info(&id).map(|info| info.bytes).unwrap_or_default();
            // From its name at once: nobody finds it half-removed. Ours until it is gone.
            let grave = self.root.join(STAGING).join(Uuid::new_v4().to_string());
            let removed = fs::rename(&path, &grave).and_then(|()| remove_tree(&grave));
            removed.map_err(|error| failed("remove", &path, error))?;
            collected.layers += 1;
            collected.bytes += bytes;
        }
        Ok(collected)
    }

    /// Removes what processes that are gone left in `staging`.
    fn remove_abandoned(&self) -> Result<()> {
        let place = self.root.join(STAGING);
        let entries = fs::read_dir(&place).map_err(|error| failed("list", &place, error))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            let Ok(lock) = File::open(&path) else { continue };
            if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
                remove_tree(&path).map_err(|error| failed("remove", &path, error))?;
            }
        }
        Ok(())
    }
}

/// A layer that nobody can hold while this lives.
#[derive(Debug)]
struct Taken {
    id: LayerId,
    _lock: File,
}

impl Taken {
    fn id(&self) -> &LayerId {
        &self.id
    }
}

/// Layers that are not removed while this lives.
#[derive(Debug, Default)]
pub struct Held {
    ids: Vec<LayerId>,
    /// Open directories, each with a shared lock.
    locks: Vec<File>,
}

impl Held {
    /// Returns which.
    pub fn ids(&self) -> &[LayerId] {
        &self.ids
    }

    /// Holds what `other` held as well.
    pub fn join(&mut self, other: Self) {
        self.ids.extend(other.ids);
        self.locks.extend(other.locks);
    }
}

/// A layer that is being made. Dropping it leaves nothing.
#[derive(Debug)]
pub struct Staging {
    layers: Layers,
    path: PathBuf,
    tree: OwnedFd,
    lock: Option<File>,
}

impl Staging {
    /// Returns the directory to be filled. Its own mode, owner and times are those of the root.
    pub fn tree(&self) -> BorrowedFd<'_> {
        self.tree.as_fd()
    }

    /// Returns where that directory is.
    pub fn path(&self) -> PathBuf {
        self.path.join(TREE)
    }

    /// Makes it a layer, which is there for good if it is named by a record before the result goes.
    pub fn commit(mut self) -> Result<(LayerId, Held)> {
        let tree = self.path();
        let digested = tree::digest(self.tree.as_fd());
        let (digest, totals) = digested.map_err(|error| failed("digest", &tree, error))?;
        let id = LayerId::of(digest);
        let info = LayerInfo {
            id: id.clone(),
            bytes: totals.bytes,
            entries: totals.entries,
            created_at: Utc::now(),
        };
        let written = serde_json::to_vec(&info).map_err(io::Error::other);
        let written = written.and_then(|text| File::create(self.path.join(INFO))?.write_all(&text));
        written.map_err(|error| failed("describe", &self.path, error))?;
        let place = self.layers.place(&id);
        loop {
            match fs::rename(&self.path, &place) {
                Ok(()) => {
                    let lock = self.lock.take().expect("taken once, here");
                    return Ok((id.clone(), Held { ids: vec![id], locks: vec![lock] }));
                }
                // The same is there already. This one goes when it is dropped.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists
                    ) =>
                {
                    match self.layers.hold([&id]) {
                        Ok(held) => return Ok((id, held)),
                        // Removed just now.
                        Err(SandboxError::NotFound { .. }) => {}
                        Err(error) => return Err(error),
                    }
                }
                Err(error) => return Err(failed("name", &place, error)),
            }
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.lock.is_some() {
            // What cannot be removed now is removed when the store is opened again.
            let _ = remove_tree(&self.path);
        }
    }
}

fn remove_tree(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Errno::INVAL.into());
    };
    let name = std::ffi::CString::new(name.as_encoded_bytes())?;
    tree::remove(tree::open_root(parent)?.as_fd(), &name)
}

fn failed(step: &str, path: &Path, source: io::Error) -> SandboxError {
    SandboxError::keeping(step, Some(path.to_owned()), source)
}

fn unknown(id: &LayerId) -> SandboxError {
    SandboxError::NotFound { what: "layer", id: id.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(layers: &Layers, text: &str) -> (LayerId, Held) {
        let staging = layers.begin().unwrap();
        fs::create_dir(staging.path().join("d")).unwrap();
        fs::write(staging.path().join("d/file"), text).unwrap();
        for path in ["d/file", "d", ""] {
            let time = std::time::SystemTime::UNIX_EPOCH;
            File::open(staging.path().join(path)).unwrap().set_modified(time).unwrap();
        }
        staging.commit().unwrap()
    }

    fn staged(directory: &Path) -> usize {
        fs::read_dir(directory.join(STAGING)).unwrap().count()
    }

    #[test]
    fn the_same_files_are_one_layer_and_others_are_another() {
        let directory = tempfile::tempdir().unwrap();
        let layers = Layers::open(directory.path()).unwrap();
        let (one, two) = (layer(&layers, "a"), layer(&layers, "a"));
        assert_eq!(one.0, two.0);
        assert_ne!(one.0, layer(&layers, "b").0);
        assert_eq!(layers.list().unwrap().len(), 2);
        let info = layers.info(&one.0).unwrap();
        assert_eq!((info.bytes, info.entries), (1, 2));
        assert_eq!(fs::read(layers.path(&one.0).join("d/file")).unwrap(), b"a");
        assert_eq!(staged(directory.path()), 0);
    }

    #[test]
    fn what_is_named_or_held_is_not_collected() {
        let directory = tempfile::tempdir().unwrap();
        let layers = Layers::open(directory.path()).unwrap();
        let (a, held) = layer(&layers, "a");
        let b = layer(&layers, "b").0;
        let c = layer(&layers, "c").0;
        let collected = layers.collect(&[b.clone()].into()).unwrap();
        assert_eq!((collected.layers, collected.bytes), (1, 1));
        assert!(layers.contains(&a) && layers.contains(&b) && !layers.contains(&c));
        assert!(matches!(layers.hold([&c]), Err(SandboxError::NotFound { .. })));
        // From another description, as another process would.
        let again = Layers::open(directory.path()).unwrap().hold([&a, &b]).unwrap();
        drop(held);
        assert_eq!(layers.collect(&BTreeSet::new()).unwrap().layers, 0);
        drop(again);
        assert_eq!(layers.collect(&BTreeSet::new()).unwrap().layers, 2);
        assert_eq!(staged(directory.path()), 0);
    }

    #[test]
    fn what_was_left_half_made_is_removed_but_not_what_somebody_works_on() {
        let directory = tempfile::tempdir().unwrap();
        let layers = Layers::open(directory.path()).unwrap();
        let working = layers.begin().unwrap();
        let left = directory.path().join(STAGING).join("left");
        fs::create_dir_all(left.join("tree/locked")).unwrap();
        fs::write(left.join("tree/locked/file"), "x").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o0);
        fs::set_permissions(left.join("tree/locked"), mode).unwrap();
        let other = Layers::open(directory.path()).unwrap();
        assert!(!left.exists());
        fs::write(working.path().join("file"), "y").unwrap();
        let (id, _held) = working.commit().unwrap();
        assert!(other.contains(&id));
        drop(layers.begin().unwrap());
        assert_eq!(staged(directory.path()), 0, "one that is given up leaves nothing");
    }

    #[test]
    fn holes_and_zeros_are_the_same_and_cost_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let sparse = File::create_new(path.join("sparse")).unwrap();
        sparse.set_len(1 << 40).unwrap();
        let digest = |name: &str| {
            let file = File::open(path.join(name)).unwrap();
            tree::file_digest(file.as_fd(), file.metadata().unwrap().len()).unwrap()
        };
        digest("sparse");
        let mut bytes = vec![0; 300_000];
        bytes[200_000] = 1;
        fs::write(path.join("full"), &bytes).unwrap();
        let holes = File::create_new(path.join("holes")).unwrap();
        holes.set_len(300_000).unwrap();
        rustix::io::pwrite(&holes, &[1], 200_000).unwrap();
        assert_eq!(digest("full"), digest("holes"));
        let same = |a: &str, b: &str| {
            let (a, b) = (File::open(path.join(a)).unwrap(), File::open(path.join(b)).unwrap());
            tree::same_contents(a.as_fd(), b.as_fd(), 300_000).unwrap()
        };
        assert!(same("full", "holes"));
        assert!(!same("full", "sparse") && !same("sparse", "holes"));
    }
}
