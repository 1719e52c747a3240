//! The snapshots that there are: records of what a sandbox was, each naming the layers it stands on.
//!
//! A record is written when all that it names is there, and while that is held, so that a snapshot is
//! whole or not there at all; what a killed process left without a record is collected. Taking and
//! restoring them is left to the backends, and who may do so to the manager.

mod archive;
#[cfg(feature = "fuzz")]
pub(crate) use archive::fuzz;

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use chrono::TimeDelta;

use crate::clock::Clocks;
use crate::layers::Layers;
use crate::layers::records::Records;
use crate::{
    Base, Capture, Result, SandboxError, SandboxId, SandboxSpec, Snapshot, SnapshotId,
    SnapshotKind, SnapshotOptions,
};

/// The directory of these records.
const KIND: &str = "snapshots";
/// How many snapshots one owner may have.
const MAX_SNAPSHOTS: usize = 10_000;

/// The snapshots in one store of layers.
#[derive(Debug, Clone)]
pub struct Snapshots {
    layers: Layers,
    records: Records,
}

/// Names that are about to be given, by owner: a snapshot takes a while, and no two may end with the
/// same name.
type Reserved = Mutex<BTreeSet<(std::path::PathBuf, Option<String>, String)>>;
static RESERVED: LazyLock<Arc<Reserved>> = LazyLock::new(Arc::default);

impl Snapshots {
    /// Returns those of a store.
    pub fn of(layers: &Layers) -> Self {
        Self { layers: layers.clone(), records: Records::of(layers, KIND) }
    }

    /// Returns the store of what they name.
    pub fn layers(&self) -> &Layers {
        &self.layers
    }

    /// Lists everybody's, the oldest first.
    pub fn all(&self) -> Result<Vec<Snapshot>> {
        let mut all = self.records.list::<Snapshot>()?;
        all.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        Ok(all)
    }

    /// Lists an owner's, the oldest first.
    pub fn list(&self, owner: Option<&str>) -> Result<Vec<Snapshot>> {
        let mut all = self.all()?;
        all.retain(|snapshot| snapshot.owner.as_deref() == owner);
        Ok(all)
    }

    /// Finds one of an owner by its id or its name.
    pub fn find(&self, owner: Option<&str>, id: &str) -> Result<Snapshot> {
        let unknown = || SandboxError::NotFound { what: "snapshot", id: id.to_owned() };
        if id.starts_with("snap-") {
            let found = self.records.get::<Snapshot>(id)?;
            return found.filter(|found| found.owner.as_deref() == owner).ok_or_else(unknown);
        }
        let named = |snapshot: &Snapshot| snapshot.name == id && !id.is_empty();
        self.list(owner)?.into_iter().find(named).ok_or_else(unknown)
    }

    /// Takes a name for a snapshot that is about to be, or says that it is taken.
    pub fn reserve(&self, owner: Option<&str>, name: &str) -> Result<Reservation> {
        let taken = || SandboxError::AlreadyExists { what: "snapshot", id: name.to_owned() };
        let key = (self.layers.root().to_owned(), owner.map(str::to_owned), name.to_owned());
        let mut reserved = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
        let all = self.list(owner)?;
        if all.len() >= MAX_SNAPSHOTS {
            return Err(SandboxError::Conflict {
                action: "keep one more snapshot".to_owned(),
                reason: format!("there are {MAX_SNAPSHOTS} already"),
            });
        }
        let known = !name.is_empty() && all.iter().any(|snapshot| snapshot.name == name);
        if known || (!name.is_empty() && !reserved.insert(key.clone())) {
            return Err(taken());
        }
        Ok(Reservation { snapshots: self.clone(), key })
    }

    /// Forgets one of an owner. Layers that nothing else names go with the next collection.
    pub fn remove(&self, owner: Option<&str>, id: &str) -> Result<Snapshot> {
        let found = self.find(owner, id)?;
        self.records.remove(found.id.as_str())?;
        Ok(found)
    }

    /// Forgets what has expired, and the savepoints of sandboxes that are gone.
    pub fn expire(&self, lives: impl Fn(&SandboxId) -> bool) -> Result<u64> {
        self.expire_by(&Clocks::now(), lives)
    }

    fn expire_by(&self, clocks: &Clocks, lives: impl Fn(&SandboxId) -> bool) -> Result<u64> {
        let mut forgotten = 0;
        for snapshot in self.records.list::<Snapshot>()? {
            let moment = snapshot.expires_moment.as_ref();
            let is_over = |at| clocks.until(at, moment).is_zero();
            let expired = snapshot.expires_at.is_some_and(is_over);
            let stray = snapshot.kind == SnapshotKind::Savepoint && !lives(&snapshot.sandbox_id);
            if expired || stray {
                self.records.remove(snapshot.id.as_str())?;
                forgotten += 1;
            }
        }
        Ok(forgotten)
    }

    /// Returns the savepoints of a sandbox, the oldest first.
    pub fn savepoints(&self, owner: Option<&str>, sandbox: &SandboxId) -> Result<Vec<Snapshot>> {
        let mut all = self.list(owner)?;
        all.retain(|one| one.kind == SnapshotKind::Savepoint && one.sandbox_id == *sandbox);
        Ok(all)
    }
}

/// A name that nobody else gets while this lives.
#[derive(Debug)]
pub struct Reservation {
    snapshots: Snapshots,
    key: (std::path::PathBuf, Option<String>, String),
}

impl Reservation {
    /// Writes the snapshot.
    pub fn put(
        self,
        sandbox_id: &SandboxId,
        spec: SandboxSpec,
        capture: &Capture,
        options: SnapshotOptions,
    ) -> Result<Snapshot> {
        let (bytes, entries) = self.snapshots.totals(&capture.base)?;
        let clocks = Clocks::now();
        let created_at = clocks.wall;
        let expires = |time| created_at.checked_add_signed(TimeDelta::from_std(time).ok()?);
        let snapshot = Snapshot {
            id: SnapshotId::new(),
            name: options.name,
            owner: self.key.1.clone(),
            kind: options.kind,
            labels: options.labels,
            sandbox_id: sandbox_id.clone(),
            spec,
            base: capture.base.clone(),
            created_at,
            expires_at: options.keep_for.and_then(expires),
            expires_moment: options.keep_for.and_then(|time| clocks.moment_in(time)),
            bytes,
            new_bytes: capture.new_bytes,
            entries,
        };
        self.snapshots.records.put(snapshot.id.as_str(), &snapshot)?;
        Ok(snapshot)
    }
}

impl Snapshots {
    fn totals(&self, base: &Base) -> Result<(u64, u64)> {
        let mut totals = (0, 0);
        for id in &base.changes {
            let info = self.layers.info(id)?;
            totals = (totals.0 + info.bytes, totals.1 + info.entries);
        }
        Ok(totals)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut reserved = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
        reserved.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Importer;
    use crate::layers::Held;

    fn capture(layers: &Layers, text: &str) -> Capture {
        let staging = layers.begin().unwrap();
        std::fs::write(staging.path().join("file"), text).unwrap();
        let (id, held) = staging.commit().unwrap();
        let base = Base { changes: vec![id], ..Base::default() };
        Capture { base, new_bytes: 1, paused: std::time::Duration::ZERO, held }
    }

    fn named(name: &str) -> SnapshotOptions {
        SnapshotOptions { name: name.to_owned(), ..SnapshotOptions::default() }
    }

    #[test]
    fn a_name_is_one_owners_and_given_once() {
        let directory = tempfile::tempdir().unwrap();
        let layers = Layers::open(directory.path()).unwrap();
        let snapshots = Snapshots::of(&layers);
        let capture = capture(&layers, "a");
        let id = SandboxId::new();
        let put = |owner: Option<&str>, name: &str| {
            let reserved = snapshots.reserve(owner, name)?;
            reserved.put(&id, SandboxSpec::default(), &capture, named(name))
        };
        let first = put(Some("a"), "one").unwrap();
        assert_eq!(first.bytes, 1);
        assert!(matches!(put(Some("a"), "one"), Err(SandboxError::AlreadyExists { .. })));
        put(Some("b"), "one").unwrap();
        put(None, "one").unwrap();
        let held = snapshots.reserve(Some("a"), "two").unwrap();
        assert!(snapshots.reserve(Some("a"), "two").is_err(), "somebody is about to");
        drop(held);
        snapshots.reserve(Some("a"), "two").unwrap();
        put(Some("a"), "").unwrap();
        put(Some("a"), "").unwrap();
        assert_eq!(snapshots.list(Some("a")).unwrap().len(), 3);
        assert_eq!(snapshots.find(Some("a"), "one").unwrap(), first);
        assert_eq!(snapshots.find(Some("a"), first.id.as_str()).unwrap(), first);
        for (owner, id) in [
            (Some("b"), first.id.as_str()),
            (None, first.id.as_str()),
            (Some("c"), "one"),
            (Some("a"), ""),
            (Some("a"), "snap-../x"),
        ] {
            assert!(
                matches!(snapshots.find(owner, id), Err(SandboxError::NotFound { .. })),
                "{id}"
            );
        }
    }

    #[test]
    fn layers_go_when_no_record_names_them_and_a_record_that_cannot_be_read_keeps_all() {
        let directory = tempfile::tempdir().unwrap();
        let layers = Layers::open(directory.path()).unwrap();
        let snapshots = Snapshots::of(&layers);
        let mut kept = Vec::new();
        for name in ["a", "b"] {
            let mut capture = capture(&layers, name);
            let reserved = snapshots.reserve(None, name).unwrap();
            let id = SandboxId::new();
            kept.push(reserved.put(&id, SandboxSpec::default(), &capture, named(name)).unwrap());
            capture.held = Held::default();
        }
        assert_eq!(layers.collect_unnamed([]).unwrap().layers, 0);
        snapshots.remove(None, "a").unwrap();
        let damaged = directory.path().join("records/snapshots/snap-x.json");
        std::fs::write(&damaged, "{").unwrap();
        assert!(layers.collect_unnamed([]).is_err());
        assert!(snapshots.list(None).unwrap_err().to_string().contains("snap-x"));
        std::fs::remove_file(damaged).unwrap();
        assert_eq!(layers.collect_unnamed([]).unwrap().layers, 1);
        assert!(layers.contains(&kept[1].base.changes[0]));
    }

    #[test]
    fn what_expired_and_savepoints_of_what_is_gone_are_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let layers = Layers::open(directory.path()).unwrap();
        let snapshots = Snapshots::of(&layers);
        let capture = capture(&layers, "a");
        let (lives, gone) = (SandboxId::new(), SandboxId::new());
        let put = |sandbox: &SandboxId, options: SnapshotOptions| {
            let reserved = snapshots.reserve(None, &options.name).unwrap();
            reserved.put(sandbox, SandboxSpec::default(), &capture, options).unwrap()
        };
        put(&gone, named("kept"));
        let moment = Some(std::time::Duration::from_nanos(1));
        put(&gone, SnapshotOptions { keep_for: moment, ..named("old") });
        let savepoint = SnapshotOptions { kind: SnapshotKind::Savepoint, ..named("") };
        put(&gone, savepoint.clone());
        let last = put(&lives, savepoint);
        assert_eq!(snapshots.expire(|id| *id == lives).unwrap(), 2);
        assert_eq!(snapshots.list(None).unwrap().len(), 2);
        assert_eq!(snapshots.savepoints(None, &lives).unwrap(), [last]);
    }

    #[test]
    fn b19_a_clock_that_is_set_neither_forgets_a_snapshot_nor_keeps_it() {
        const DAY: TimeDelta = TimeDelta::days(1);
        let directory = tempfile::tempdir().unwrap();
        let layers = Layers::open(directory.path()).unwrap();
        let snapshots = Snapshots::of(&layers);
        let capture = capture(&layers, "a");
        let hour = std::time::Duration::from_secs(3600);
        let put = || {
            let reserved = snapshots.reserve(None, "s").unwrap();
            let options = SnapshotOptions { keep_for: Some(hour), ..named("s") };
            reserved.put(&SandboxId::new(), SandboxSpec::default(), &capture, options).unwrap()
        };
        let put_before = put();
        let now = Clocks::now();
        let expire = |clocks: &Clocks| snapshots.expire_by(clocks, |_| true).unwrap();
        let set = |by| Clocks { wall: now.wall + by, boot: now.boot.clone() };
        assert_eq!([expire(&set(DAY)), expire(&now), expire(&set(-DAY))], [0, 0, 0]);
        let over = Clocks { boot: now.moment_in(hour), ..set(-DAY) };
        assert_eq!(expire(&over), 1, "its hour is over, whatever the wall says");
        // Control: a record of before, which has the wall clock alone.
        let old = Snapshot { expires_moment: None, ..put_before };
        snapshots.records.put(old.id.as_str(), &old).unwrap();
        assert_eq!([expire(&set(-DAY)), expire(&set(DAY))], [0, 1]);
    }

    /// Makes a tree of every kind of file.
    fn furnish(root: &std::path::Path) {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        std::fs::create_dir_all(root.join("d/empty")).unwrap();
        std::fs::write(root.join("d/file"), vec![7; 200_000]).unwrap();
        std::fs::hard_link(root.join("d/file"), root.join("second")).unwrap();
        symlink("/etc/passwd", root.join("link")).unwrap();
        let sparse = std::fs::File::create(root.join("sparse")).unwrap();
        sparse.set_len(1 << 33).unwrap();
        rustix::fs::mknodat(
            std::fs::File::open(root).unwrap(),
            "fifo",
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        std::fs::set_permissions(root.join("d/empty"), std::fs::Permissions::from_mode(0o000))
            .unwrap();
    }

    #[test]
    fn what_is_exported_is_the_same_where_it_is_imported() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let layers = Layers::open(here.path()).unwrap();
        let snapshots = Snapshots::of(&layers);
        let staging = layers.begin().unwrap();
        furnish(&staging.path());
        let (id, held) = staging.commit().unwrap();
        let base = Base { changes: vec![id], ..Base::default() };
        let capture = Capture { base, new_bytes: 1, paused: std::time::Duration::ZERO, held };
        let sandbox = SandboxId::new();
        let reserved = snapshots.reserve(None, "s").unwrap();
        let put = reserved.put(&sandbox, SandboxSpec::default(), &capture, named("s")).unwrap();
        let mut bytes = Vec::new();
        let mut file = snapshots.export(None, "s").unwrap();
        std::io::Read::read_to_end(&mut file, &mut bytes).unwrap();
        assert!(bytes.len() < 100_000, "holes and repetition cost little");

        let other = Snapshots::of(&Layers::open(there.path()).unwrap());
        let got = other.import(Some("b"), None, Importer::Tenant, &bytes[..]).unwrap();
        assert_eq!((&got.base, &got.name, got.bytes), (&put.base, &put.name, put.bytes));
        assert_ne!(got.id, put.id);
        let tree = other.layers().path(&got.base.changes[0]);
        assert_eq!(std::fs::read(tree.join("second")).unwrap(), vec![7; 200_000]);
        let again = other.import(Some("b"), None, Importer::Tenant, &bytes[..]).unwrap_err();
        assert_eq!(again.code(), "already_exists");
        assert_eq!(
            other.import(Some("b"), Some("t"), Importer::Tenant, &bytes[..]).unwrap().new_bytes,
            0
        );

        // Another does not learn that they are there.
        let others = other.import(Some("d"), None, Importer::Tenant, &bytes[..]).unwrap();
        assert_eq!(others.new_bytes, got.new_bytes);
        other.remove(Some("d"), "s").unwrap();

        // Whatever is wrong with it, nothing of it is left.
        let mut plain = Vec::new();
        zstd::stream::copy_decode(&bytes[..], &mut plain).unwrap();
        let packed = |plain: &[u8]| zstd::stream::encode_all(plain, 1).unwrap();
        assert!(
            other.import(Some("c"), None, Importer::Tenant, &packed(&plain)[..]).is_ok(),
            "control"
        );
        other.remove(Some("c"), "s").unwrap();
        for broken in 0..60 {
            let mut plain = plain.clone();
            let at = broken * plain.len() / 60;
            plain[at] ^= 0x55;
            assert!(
                other.import(Some("c"), None, Importer::Tenant, &packed(&plain)[..]).is_err(),
                "byte {at}"
            );
        }
        for cut in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            assert!(
                other.import(Some("c"), None, Importer::Tenant, &bytes[..cut]).is_err(),
                "cut at {cut}"
            );
        }
        let longer = packed(&[&plain[..], &[0; 512]].concat());
        assert!(other.import(Some("c"), None, Importer::Tenant, &longer[..]).is_err());
        assert!(other.list(Some("c")).unwrap().is_empty());
        assert_eq!(std::fs::read_dir(there.path().join("staging")).unwrap().count(), 0);
    }

    #[test]
    fn names_labels_and_times_are_bounded() {
        named("a.b-C_1").validate().unwrap();
        for bad in [".a", "-a", "a/b", "a b", "snap-1", "ä", &"x".repeat(129)] {
            assert!(named(bad).validate().is_err(), "{bad}");
        }
        let labels = [(String::new(), "x".to_owned())].into();
        assert!(SnapshotOptions { labels, ..named("a") }.validate().is_err());
        let keep_for = Some(std::time::Duration::ZERO);
        assert!(SnapshotOptions { keep_for, ..named("a") }.validate().is_err());
    }
}
