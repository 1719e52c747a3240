//! The file: whose it is, whether it can be trusted, and who may use it.
//!
//! Everything is checked before anything is written, and while it is being checked SQLite is told
//! not to tidy up: what is refused stays as it was, for whoever wants to save it.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::limits::Limit;
use rusqlite::{Connection, OpenFlags};

use super::StoreError;
use super::failure::{damaged, failure};
use super::schema::{self, Found, STEPS};

/// How long the lock of a daemon that was killed may outlive it.
const LAST_CHILD: Duration = Duration::from_millis(500);
/// How long a foreign reader of the file (a backup, a person) is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest value of a row. A record is a few kilobytes; what is beyond this is a mistake.
const MAX_VALUE: i32 = 16 << 20;
/// How much of the log is kept on disk for reuse once its commits are in the file itself.
const LOG_KEPT: i64 = 4 << 20;
/// How many prepared statements are kept: more than there are.
const STATEMENTS: usize = 32;
const LOG_HEADER: usize = 32;

/// The open file. The fields are dropped in this order: the lock goes last.
#[derive(Debug)]
pub(super) struct StoreFile {
    pub(super) db: Connection,
    pub(super) path: PathBuf,
    _lock: Lock,
}

/// Opens the store at `path`, or makes it where there never was one.
pub(super) fn open(path: &Path) -> Result<StoreFile, StoreError> {
    // Absolute: SQLite would take a name that begins with "file:" for a URI.
    let path = std::path::absolute(path).map_err(|e| StoreError::io("find", e))?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(|e| StoreError::io("make the directory of", e))?;
    let lock = Lock::take(&beside(&path, ".lock"))?;

    let marker = beside(&path, ".made");
    let made = exists(&marker)?;
    let log = beside(&path, "-wal");
    prepare(&path, &log, made)?;
    check_log(&log)?;

    let db = connect(&path)?;
    match schema::identify(&db)? {
        Found::Nothing if made => {
            return Err(damaged("there was a store here, and now the file is empty"));
        }
        Found::Nothing => {
            use_log(&db)?;
            schema::migrate(&db, 0, STEPS)?;
        }
        Found::Version(version) if version > STEPS.len() => return Err(newer(version)),
        Found::Version(version) => {
            check(&db, version)?;
            use_log(&db)?;
            schema::migrate(&db, version, STEPS)?;
        }
    }
    if !made {
        // The tables must be on the disk before something says that they were: after a power cut
        // in between, an empty file is still a new one.
        sync_log(&db)?;
        mark(&marker, directory)?;
    }
    let tidy = db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false);
    tidy.map_err(failure("open"))?;
    Ok(StoreFile { db, path, _lock: lock })
}

/// Returns the path of what lies beside the file, as SQLite names it: the suffix after everything.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

fn exists(path: &Path) -> Result<bool, StoreError> {
    path.try_exists().map_err(|e| StoreError::io("find", e))
}

/// The lock that says "in use", held until it is dropped or the process ends, however it ends.
#[derive(Debug)]
struct Lock(File);

impl Lock {
    fn take(path: &Path) -> Result<Self, StoreError> {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(path).map_err(|e| StoreError::io("open the lock of", e))?;
        let began = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self(file)),
                // A child that the last daemon was starting when it was killed shares its lock until
                // the child's exec, a moment later.
                Err(TryLockError::WouldBlock) if began.elapsed() < LAST_CHILD => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(TryLockError::WouldBlock) => return Err(StoreError::Busy),
                Err(TryLockError::Error(e)) => return Err(StoreError::io("lock", e)),
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough while such a child lives. What cannot be unlocked ends with us.
        drop(self.0.unlock());
    }
}

/// Makes an empty file where there never was a store, and refuses to where there was one.
///
/// SQLite itself would take an empty file for a new database, and throw away the log beside it.
fn prepare(path: &Path, log: &Path, made: bool) -> Result<(), StoreError> {
    let length = match fs::metadata(path) {
        Ok(file) if file.is_file() => Some(file.len()),
        Ok(_) => return Err(damaged("it is no regular file")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => return Err(StoreError::io("find", e)),
    };
    match length {
        Some(1..) => return Ok(()),
        Some(0) if made => {
            return Err(damaged("there was a store here, and now the file is empty"));
        }
        None if made => return Err(damaged("there was a store here, and now the file is gone")),
        _ if exists(log)? => return Err(damaged("the file is gone, and its log is still there")),
        Some(0) | None => {}
    }
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(path);
    file.map(drop).map_err(|e| StoreError::io("create", e))
}

/// Checks the header of the log, because SQLite takes a log with a damaged one for no log at all and
/// so would lose every commit in it.
///
/// The header is synced before the first commit is written after it, so no power cut explains one
/// that is wrong. A commit further on that is damaged cannot be told from one that a power cut tore.
/// See <https://www.sqlite.org/fileformat2.html#walformat>.
fn check_log(path: &Path) -> Result<(), StoreError> {
    let failed = |e| StoreError::io("read the log of", e);
    let mut header = Vec::with_capacity(LOG_HEADER + 1);
    match File::open(path) {
        Ok(file) => file.take(LOG_HEADER as u64 + 1).read_to_end(&mut header).map_err(failed)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed(e)),
    };
    if header.len() <= LOG_HEADER || is_log_header(&header[..LOG_HEADER]) {
        return Ok(());
    }
    Err(damaged("the header of its log is wrong"))
}

fn is_log_header(header: &[u8]) -> bool {
    const MAGIC: u32 = 0x377f_0682;
    let words = |read: fn([u8; 4]) -> u32| {
        header.as_chunks::<4>().0.iter().map(|&word| read(word)).collect::<Vec<u32>>()
    };
    let stored = words(u32::from_be_bytes);
    let Some(big_endian) = stored.first().and_then(|magic| magic.checked_sub(MAGIC)) else {
        return false;
    };
    let summed = match big_endian {
        0 => words(u32::from_le_bytes),
        1 => words(u32::from_be_bytes),
        _ => return false,
    };
    let (sum, _) = summed.as_chunks::<2>();
    let (first, second) = sum.iter().take(3).fold((0u32, 0u32), |(a, b), &[x, y]| {
        let a = a.wrapping_add(x).wrapping_add(b);
        (a, b.wrapping_add(y).wrapping_add(a))
    });
    stored.get(6..8) == Some(&[first, second])
}

/// Opens the file so that nothing is written yet, not even by closing it again.
fn connect(path: &Path) -> Result<Connection, StoreError> {
    let failed = failure("open");
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let db = Connection::open_with_flags(path, flags).map_err(&failed)?;
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(&failed)?;
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true).map_err(&failed)?;
    db.set_limit(Limit::SQLITE_LIMIT_LENGTH, MAX_VALUE).map_err(&failed)?;
    db.set_prepared_statement_cache_capacity(STATEMENTS);
    db.busy_timeout(PATIENCE).map_err(&failed)?;
    // Exclusive: a second line behind our lock, and no shared memory file to lose or to trust.
    for (name, value) in [
        ("locking_mode", "EXCLUSIVE"),
        ("foreign_keys", "ON"),
        ("trusted_schema", "OFF"),
        ("cell_size_check", "ON"),
        // The environment of a sandbox that ended is nobody's any more, and may be a secret.
        ("secure_delete", "ON"),
    ] {
        db.pragma_update(None, name, value).map_err(&failed)?;
    }
    Ok(db)
}

/// Checks the whole of a store whose version we know.
fn check(db: &Connection, version: usize) -> Result<(), StoreError> {
    let failed = failure("check");
    if db.is_readonly("main").map_err(&failed)? {
        let reason = "the file cannot be written, or its header says so";
        return Err(StoreError::io(
            "open",
            io::Error::new(io::ErrorKind::PermissionDenied, reason),
        ));
    }
    // Not quick_check, which does not compare the indices with the tables. Retention keeps it short.
    let found: String =
        db.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0)).map_err(&failed)?;
    if found != "ok" {
        return Err(damaged(found.trim_start_matches("*** in database main ***\n")));
    }
    schema::check(db, version)
}

/// Has SQLite append commits to a log. They are synced when the log is taken over into the file.
fn use_log(db: &Connection) -> Result<(), StoreError> {
    let failed = failure("open");
    let mode = db.query_row("PRAGMA journal_mode = WAL", [], |row| row.get::<_, String>(0));
    let mode = mode.map_err(&failed)?;
    if mode != "wal" {
        let reason = format!("its file system allows journal mode {mode} only, not wal");
        return Err(StoreError::io("open", io::Error::new(io::ErrorKind::Unsupported, reason)));
    }
    db.pragma_update(None, "synchronous", "NORMAL").map_err(&failed)?;
    db.pragma_update(None, "journal_size_limit", LOG_KEPT).map_err(&failed)
}

/// Takes the log over into the file, and waits until the disk has it.
fn sync_log(db: &Connection) -> Result<(), StoreError> {
    let busy = db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get::<_, i64>(0));
    match busy.map_err(failure("write to"))? {
        0 => Ok(()),
        _ => Err(StoreError::Busy),
    }
}

/// Notes for good that there is a store.
fn mark(marker: &Path, directory: &Path) -> Result<(), StoreError> {
    let failed = |e| StoreError::io("mark", e);
    let mut options = OpenOptions::new();
    let mut file =
        options.write(true).create(true).truncate(true).mode(0o600).open(marker).map_err(failed)?;
    file.write_all(b"There is a Warren store beside this file: should it be gone, it was lost.\n")
        .and_then(|()| file.sync_all())
        .and_then(|()| File::open(directory)?.sync_all())
        .map_err(failed)
}

fn newer(version: usize) -> StoreError {
    let reason = format!(
        "it has version {version} and this program knows up to {}: start the newer warren that \
         wrote it",
        STEPS.len()
    );
    StoreError::io("open", io::Error::new(io::ErrorKind::Unsupported, reason))
}
