//! API keys: a random secret for each, of which only the hash is kept.
//!
//! They live in one file that `warren key` writes and the daemon reads, so that keys can be made
//! before there is a daemon, and one that is revoked is refused from the next request on. They are not
//! in the daemon's database, which is the daemon's alone while it runs: there would be two ways to
//! change a key, and none to revoke one while the database is damaged.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use chrono::{DateTime, Utc};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};
use utoipa::ToSchema;

const PREFIX: &str = "wrn_";
const E2B_PREFIX: &str = "e2b_";
const MAX_TENANT: usize = 64;

/// How much of everything one tenant may have at once. Absent means without a bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Quotas {
    /// Sandboxes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandboxes: Option<u64>,
    /// Memory that its sandboxes may use together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// CPU shares that its sandboxes may have together; one has 100 unless it asks for another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_weight: Option<u64>,
    /// What its sandboxes may write together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// Snapshots that it keeps, savepoints included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<u64>,
    /// Commands that run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub execs: Option<u64>,
    /// Streams that are followed: events, output, terminals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streams: Option<u64>,
    /// Requests in a second; after a rest as many come at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_second: Option<u64>,
}

impl Quotas {
    /// Takes what is absent from others.
    pub fn or(self, others: Self) -> Self {
        Self {
            sandboxes: self.sandboxes.or(others.sandboxes),
            memory_bytes: self.memory_bytes.or(others.memory_bytes),
            cpu_weight: self.cpu_weight.or(others.cpu_weight),
            disk_bytes: self.disk_bytes.or(others.disk_bytes),
            snapshots: self.snapshots.or(others.snapshots),
            execs: self.execs.or(others.execs),
            streams: self.streams.or(others.streams),
            requests_per_second: self.requests_per_second.or(others.requests_per_second),
        }
    }
}

/// What is kept of a key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyRecord {
    /// The name to revoke it by.
    pub id: String,
    /// Whom it stands for.
    pub tenant: String,
    /// SHA-256 of the key, in hexadecimal digits. A key is 160 random bits or more, so that no slower hash
    /// would make guessing it any harder.
    pub sha256: String,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// What its tenant may have. Of several keys of a tenant each has its own.
    #[serde(default)]
    pub quotas: Quotas,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFile {
    keys: Vec<KeyRecord>,
}

/// Why the keys could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file could not be read or written.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not what was written there.
    #[error("{} holds no keys of ours", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where it goes wrong.
        source: serde_json::Error,
    },
    /// Others than its owner may write the file.
    #[error("{} can be written by others than its owner", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
    },
    /// A tenant's name would not be one.
    #[error("`{}` is no name of a tenant", name.escape_debug())]
    Tenant {
        /// The name.
        name: String,
    },
    /// There is no such key.
    #[error("no key `{}`", id.escape_debug())]
    NotFound {
        /// The name that was given.
        id: String,
    },
}

/// What the file looked like when it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

/// The keys of one daemon.
#[derive(Debug)]
pub struct Keys {
    path: PathBuf,
    read: Mutex<Option<(Stamp, Arc<[KeyRecord]>)>>,
}

impl Keys {
    /// Looks after the keys in a file, which need not exist yet.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), read: Mutex::default() }
    }

    /// Makes a key and returns it; this is the only time that anybody sees it.
    pub fn create(&self, tenant: &str, quotas: Quotas) -> Result<(String, KeyRecord), KeyError> {
        let key = format!("{PREFIX}{}", hex(&self.random::<32>()?));
        self.keep(key, tenant, quotas)
    }

    /// Makes a key of the only form that some releases of E2B's SDKs take.
    pub fn create_for_e2b(
        &self,
        tenant: &str,
        quotas: Quotas,
    ) -> Result<(String, KeyRecord), KeyError> {
        let key = format!("{E2B_PREFIX}{}", hex(&self.random::<20>()?));
        self.keep(key, tenant, quotas)
    }

    /// Tells whether this is a key that lets somebody in.
    pub fn is_good(&self, key: &str) -> bool {
        self.find(key).is_some()
    }

    fn keep(
        &self,
        key: String,
        tenant: &str,
        quotas: Quotas,
    ) -> Result<(String, KeyRecord), KeyError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if !(1..=MAX_TENANT).contains(&tenant.len()) || !tenant.chars().all(plain) {
            return Err(KeyError::Tenant { name: tenant.to_owned() });
        }
        let record = KeyRecord {
            id: format!("key-{}", hex(&self.random::<6>()?)),
            tenant: tenant.to_owned(),
            sha256: hex(&Sha256::digest(key.as_bytes())),
            created_at: Utc::now(),
            quotas,
        };
        self.change(|keys| {
            keys.push(record.clone());
            Ok(())
        })?;
        Ok((key, record))
    }

    /// Returns what is kept of every key.
    pub fn list(&self) -> Result<Vec<KeyRecord>, KeyError> {
        Ok(self.current()?.to_vec())
    }

    /// Makes a key worthless.
    pub fn revoke(&self, id: &str) -> Result<KeyRecord, KeyError> {
        self.change(|keys| {
            let at = keys.iter().position(|key| key.id == id);
            at.map(|at| keys.remove(at)).ok_or_else(|| KeyError::NotFound { id: id.to_owned() })
        })
    }

    /// Finds whose key this is. Every key is compared in full, so that the time tells nothing.
    pub(crate) fn find(&self, given: &str) -> Option<KeyRecord> {
        let keys = match self.current() {
            Ok(keys) => keys,
            Err(error) => {
                // Nobody gets in by damaging the file.
                tracing::error!(%error, "cannot read the API keys");
                return None;
            }
        };
        let given = hex(&Sha256::digest(given.as_bytes()));
        position(&keys, given.as_bytes(), |a, b| a.ct_eq(b)).and_then(|at| keys.get(at).cloned())
    }

    fn current(&self) -> Result<Arc<[KeyRecord]>, KeyError> {
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Arc::default()),
            Err(source) => return Err(self.failed("open", source)),
        };
        let data = file.metadata().map_err(|source| self.failed("look at", source))?;
        if data.mode() & 0o022 != 0 {
            return Err(KeyError::Exposed { path: self.path.clone() });
        }
        // A change puts a new file in place, so what is the same file is the same text.
        let changed = (data.mtime(), data.mtime_nsec());
        let stamp = Stamp { inode: data.ino(), size: data.size(), changed };
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((seen, keys)) = &*read
            && *seen == stamp
        {
            return Ok(Arc::clone(keys));
        }
        let keys: KeyFile = serde_json::from_reader(io::BufReader::new(file))
            .map_err(|source| KeyError::Damaged { path: self.path.clone(), source })?;
        let keys: Arc<[KeyRecord]> = keys.keys.into();
        *read = Some((stamp, Arc::clone(&keys)));
        Ok(keys)
    }

    fn change<T>(
        &self,
        change: impl FnOnce(&mut Vec<KeyRecord>) -> Result<T, KeyError>,
    ) -> Result<T, KeyError> {
        let directory = self.path.parent().unwrap_or(Path::new("."));
        let private = fs::DirBuilder::new();
        create_private(private, directory)
            .map_err(|source| self.failed("make room for", source))?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(self.path.with_extension("lock"))
            .map_err(|source| self.failed("lock", source))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)
            .map_err(|error| self.failed("lock", error.into()))?;
        let mut keys = self.current()?.to_vec();
        let result = change(&mut keys)?;
        self.write(&KeyFile { keys }).map_err(|source| self.failed("write", source))?;
        Ok(result)
    }

    fn write(&self, keys: &KeyFile) -> io::Result<()> {
        let new = self.path.with_extension("new");
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .custom_flags(i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).unwrap_or_default())
            .open(&new)?;
        serde_json::to_writer_pretty(&mut file, keys)?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        // A power cut could take the rename back, and a revoked key would be good again.
        File::open(self.path.parent().unwrap_or(Path::new(".")))?.sync_all()
    }

    fn random<const N: usize>(&self) -> Result<[u8; N], KeyError> {
        let mut bytes = [0; N];
        // Up to 256 bytes come at once or not at all (getrandom(2)).
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| self.failed("draw random numbers for", error.into()))?;
        Ok(bytes)
    }

    fn failed(&self, action: &'static str, source: io::Error) -> KeyError {
        KeyError::File { action, path: self.path.clone(), source }
    }
}

/// Finds the key of a digest. Every one is compared, and the comparison alone says which it is: no
/// branch is taken before the last, and nothing but digests of the same length is compared.
fn position(
    keys: &[KeyRecord],
    given: &[u8],
    mut same: impl FnMut(&[u8], &[u8]) -> Choice,
) -> Option<usize> {
    let (mut found, mut at) = (Choice::from(0), u64::MAX);
    for (i, key) in (0_u64..).zip(keys) {
        let same = same(given, key.sha256.as_bytes());
        at.conditional_assign(&i, same);
        found |= same;
    }
    bool::from(found).then(|| usize::try_from(at).ok())?
}

/// Reads a file of keys.
#[cfg(feature = "fuzz")]
pub(crate) fn fuzz(bytes: &[u8]) {
    if let Ok(file) = serde_json::from_slice::<KeyFile>(bytes) {
        let _ = position(&file.keys, &[b'0'; 64], |a, b| a.ct_eq(b));
    }
}

fn create_private(mut builder: fs::DirBuilder, directory: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    builder.recursive(true).mode(0o700).create(directory)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_key_is_found_until_it_is_revoked_and_is_kept_nowhere() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state/keys.json");
        let keys = Keys::at(&path);
        assert_eq!(keys.find("wrn_x"), None, "no file is no key");
        let quotas = Quotas { sandboxes: Some(3), ..Quotas::default() };
        let (alice, alices) = keys.create("alice", quotas).unwrap();
        let (bob, bobs) = keys.create("bob", Quotas::default()).unwrap();
        assert_eq!(keys.find(&alice).as_ref(), Some(&alices));
        assert_eq!(keys.find(&bob).as_ref(), Some(&bobs));
        for wrong in ["", "wrn_", &alice[..alice.len() - 1], &alices.sha256, &format!("{alice} ")] {
            assert_eq!(keys.find(wrong), None, "{wrong}");
        }
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains(&alice) && !text.contains(&alice[4..]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);

        // Another process revokes it.
        Keys::at(&path).revoke(&alices.id).unwrap();
        assert_eq!(keys.find(&alice), None);
        assert_eq!(keys.find(&bob), Some(bobs));
        assert!(matches!(keys.revoke(&alices.id), Err(KeyError::NotFound { .. })));
    }

    #[test]
    fn a_damaged_or_exposed_file_lets_nobody_in_and_is_not_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys.json");
        let keys = Keys::at(&path);
        let (key, _) = keys.create("alice", Quotas::default()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(keys.find(&key), None);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(keys.find(&key).is_some(), "control");
        fs::write(&path, "{").unwrap();
        assert_eq!(keys.find(&key), None);
        assert!(matches!(keys.create("bob", Quotas::default()), Err(KeyError::Damaged { .. })));
        assert_eq!(fs::read_to_string(&path).unwrap(), "{");
    }

    #[test]
    fn every_key_is_compared_in_full_wherever_the_one_is_that_was_given() {
        let directory = tempfile::tempdir().unwrap();
        let keys = Keys::at(directory.path().join("keys.json"));
        let given: Vec<String> =
            (0..5).map(|i| keys.create(&format!("t{i}"), Quotas::default()).unwrap().0).collect();
        let records = keys.list().unwrap();
        let all = given.iter().map(String::as_str).zip((0..).map(Some));
        for (key, wanted) in all.chain([("wrn_none", None), ("", None), (&given[0][..9], None)]) {
            let digest = hex(&Sha256::digest(key.as_bytes()));
            let mut compared = Vec::new();
            let found = position(&records, digest.as_bytes(), |a, b| {
                compared.push((a.to_vec(), b.to_vec()));
                a.ct_eq(b)
            });
            assert_eq!(found, wanted, "{key}");
            let each = records
                .iter()
                .map(|record| (digest.clone().into_bytes(), record.sha256.clone().into_bytes()));
            assert_eq!(compared, each.collect::<Vec<_>>(), "each one once, and digests alone");
            assert!(compared.iter().all(|(a, b)| a.len() == 64 && b.len() == 64));
        }
    }

    #[test]
    fn what_a_key_leaves_open_others_say() {
        let own = Quotas { sandboxes: Some(1), ..Quotas::default() };
        let others = Quotas { sandboxes: Some(9), streams: Some(2), ..Quotas::default() };
        let both = own.or(others);
        assert_eq!((both.sandboxes, both.streams, both.execs), (Some(1), Some(2), None));
    }

    #[test]
    fn a_tenant_has_a_plain_name() {
        let directory = tempfile::tempdir().unwrap();
        let keys = Keys::at(directory.path().join("keys.json"));
        for name in ["", "a/b", "a b", "ü", "a\n", &"a".repeat(65)] {
            assert!(matches!(keys.create(name, Quotas::default()), Err(KeyError::Tenant { .. })));
        }
    }
}
