//! A disk that is full or fails: the caller hears of it, the store lives, and goes on when it can.

use std::path::PathBuf;
use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use warren::store::sqlite::SqliteStore;
use warren::store::{Change, Store, StoreError};

use crate::support::{block_on, db, fast_dir, image, number, numbered, sandbox};

/// Returns changes that need some 20 kB and carry a number.
fn large(number: u64) -> Vec<Change> {
    let mut changes = numbered("counter", number);
    let mut record = sandbox(&format!("large-{number}"), number);
    record.backend = "x".repeat(20_000);
    changes.push(Change::PutSandbox(record));
    changes
}

/// Applies until it fails, and returns the last number that was acknowledged and what failed.
fn until_it_fails(store: &SqliteStore) -> (u64, StoreError) {
    for n in 1..1_000 {
        if let Err(error) = block_on(store.apply(large(n))) {
            return (n - 1, error);
        }
    }
    panic!("20 MB fitted in");
}

const LIMITED: &str = "WARREN_TEST_LIMITED";

/// A file size limit is an error that SQLite does not take for a full disk, so it stands for all of
/// them. It holds for a process, so the test is run again in one of its own.
#[test]
fn a_disk_that_fails_fails_the_call_and_serves_again_once_it_works() {
    let Some(path) = std::env::var_os(LIMITED).map(PathBuf::from) else {
        let dir = fast_dir();
        let name = "full::a_disk_that_fails_fails_the_call_and_serves_again_once_it_works";
        // Ignored signals are inherited: without this, the limit would kill and not fail.
        let script = r#"trap "" XFSZ; ulimit -S -f 1024; exec "$0" --exact "$1" --nocapture"#;
        let output = Command::new("sh")
            .args(["-c", script])
            .arg(std::env::current_exe().unwrap())
            .arg(name)
            .env(LIMITED, db(dir.path()))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "control");
        return;
    };
    let store = SqliteStore::open(&path).unwrap();
    let (acknowledged, error) = until_it_fails(&store);
    assert!(matches!(error, StoreError::Io { .. }), "{error:?}");
    assert!(acknowledged > 0, "control: there was room for some");
    let held = block_on(store.load()).unwrap();
    assert_eq!(number(&held, "counter"), Some(acknowledged), "it still holds what it held");

    let hard = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: hard, maximum: hard }).unwrap();
    block_on(store.apply(large(acknowledged + 1))).unwrap();
    drop(store);
    assert_eq!(number(&image(&path).unwrap(), "counter"), Some(acknowledged + 1));
}

mod needs_root {
    use std::fs;
    use std::path::Path;

    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
    use tempfile::TempDir;

    use super::*;

    /// A file system of its own with little room.
    struct SmallDisk(TempDir);

    impl SmallDisk {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let options = c"size=1536k";
            mount("tmpfs", dir.path(), "tmpfs", MountFlags::empty(), options).unwrap();
            Self(dir)
        }

        fn path(&self) -> &Path {
            self.0.path()
        }
    }

    impl Drop for SmallDisk {
        fn drop(&mut self) {
            unmount(self.path(), UnmountFlags::DETACH).unwrap();
        }
    }

    #[test]
    fn a_full_disk_fails_the_call_and_serves_again_once_there_is_room() {
        let disk = SmallDisk::new();
        let path = db(disk.path());
        let store = SqliteStore::open(&path).unwrap();
        let ballast = disk.path().join("ballast");
        fs::write(&ballast, vec![0; 512 << 10]).unwrap();

        let (acknowledged, error) = until_it_fails(&store);
        assert!(matches!(error, StoreError::Full), "{error:?}");
        assert!(acknowledged > 5, "control: there was room for some ({acknowledged})");
        for _ in 0..3 {
            let again = block_on(store.apply(large(acknowledged + 1)));
            assert!(matches!(again, Err(StoreError::Full)), "{again:?}");
        }
        let held = block_on(store.load()).unwrap();
        assert_eq!(number(&held, "counter"), Some(acknowledged), "it still holds what it held");

        fs::remove_file(&ballast).unwrap();
        block_on(store.apply(large(acknowledged + 1))).unwrap();
        drop(store);
        let held = image(&path).unwrap();
        assert_eq!(number(&held, "counter"), Some(acknowledged + 1));
        assert_eq!(held.sandboxes.len() as u64, acknowledged + 2, "and nothing of what failed");
    }

    #[test]
    fn a_store_that_was_full_when_it_was_closed_opens_with_all_it_held() {
        let disk = SmallDisk::new();
        let path = db(disk.path());
        let store = SqliteStore::open(&path).unwrap();
        let (acknowledged, _) = until_it_fails(&store);
        // Not even the log can be taken over now.
        let mut ballast = fs::File::create(disk.path().join("ballast")).unwrap();
        std::io::copy(&mut std::io::repeat(0), &mut ballast).unwrap_err();
        drop(store);
        assert_eq!(number(&image(&path).unwrap(), "counter"), Some(acknowledged));
    }
}
