//! The tables, as steps from one version to the next.
//!
//! A step that was released is never edited: the next one is added after it. What is queried is a
//! column, the rest of a record is JSON; `sum` is the checksum of the row's other columns.

use rusqlite::{Connection, Transaction, TransactionBehavior};

use super::StoreError;
use super::failure::{damaged, failure};

/// "Wrrn", where SQLite keeps whose file this is.
const APPLICATION: i64 = 0x5772_726e;

/// The n-th step leads from version n to n + 1.
pub(super) const STEPS: &[&str] = &["
    CREATE TABLE sandboxes (
        id TEXT NOT NULL PRIMARY KEY,
        record TEXT NOT NULL,
        sum INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE sessions (
        id TEXT NOT NULL PRIMARY KEY,
        record TEXT NOT NULL,
        sum INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE settings (
        name TEXT NOT NULL PRIMARY KEY,
        value TEXT NOT NULL,
        sum INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE events (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at INTEGER NOT NULL,
        kind TEXT NOT NULL,
        sandbox_id TEXT,
        session_id TEXT,
        client_id TEXT,
        detail TEXT NOT NULL,
        sum INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE keys (
        id TEXT NOT NULL PRIMARY KEY,
        tenant TEXT NOT NULL,
        hash BLOB NOT NULL,
        created_at INTEGER NOT NULL,
        quotas TEXT NOT NULL,
        revoked INTEGER NOT NULL,
        sum INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE idempotency (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        tenant TEXT NOT NULL,
        key TEXT NOT NULL,
        request_hash BLOB NOT NULL,
        response TEXT NOT NULL,
        at INTEGER NOT NULL,
        sum INTEGER NOT NULL,
        UNIQUE (tenant, key)
    ) STRICT;
", "
    -- API keys are in a file of their own, which `warren key` can change while a daemon has the store.
    DROP TABLE keys;
"];

/// What a file says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// A database with nothing in it.
    Nothing,
    /// A store of this version, which may be newer than we know.
    Version(usize),
}

/// Reads whose file this is and of which version, without a change to it.
pub(super) fn identify(db: &Connection) -> Result<Found, StoreError> {
    let version = number(db, "PRAGMA user_version")?;
    let application = number(db, "PRAGMA application_id")?;
    let objects = number(db, "SELECT count(*) FROM sqlite_schema")?;
    match (usize::try_from(version), application) {
        (Ok(0), 0) if objects == 0 => Ok(Found::Nothing),
        (Ok(version), APPLICATION) if version > 0 => Ok(Found::Version(version)),
        _ => Err(damaged("the file is a database, but none of Warren's")),
    }
}

/// Checks that a store of a version we know has exactly the tables of that version.
///
/// The expected ones are made in memory by the same steps, so there is no second list to keep.
pub(super) fn check(db: &Connection, version: usize) -> Result<(), StoreError> {
    let expected = Connection::open_in_memory().map_err(failure("check the tables of"))?;
    migrate(&expected, 0, &STEPS[..version])?;
    if tables(db)? == tables(&expected)? {
        return Ok(());
    }
    Err(damaged(format!("the tables are not those of version {version}")))
}

/// Brings a store of version `from` to that of the last step, each step in one transaction.
pub(super) fn migrate(db: &Connection, from: usize, steps: &[&str]) -> Result<(), StoreError> {
    let failed = failure("migrate");
    for (version, step) in (1..).zip(steps).skip(from) {
        let step = format!(
            "{step}; PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {version};"
        );
        let change = Transaction::new_unchecked(db, TransactionBehavior::Immediate);
        let change = change.map_err(&failed)?;
        change.execute_batch(&step).map_err(&failed)?;
        change.commit().map_err(&failed)?;
    }
    Ok(())
}

fn tables(db: &Connection) -> Result<Vec<(String, String, Option<String>)>, StoreError> {
    let failed = failure("read the tables of");
    let sql = "SELECT name, tbl_name, sql FROM sqlite_schema ORDER BY type, name";
    let mut query = db.prepare(sql).map_err(&failed)?;
    let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)));
    rows.and_then(Iterator::collect).map_err(&failed)
}

fn number(db: &Connection, sql: &str) -> Result<i64, StoreError> {
    db.query_row(sql, [], |row| row.get(0)).map_err(failure("read the header of"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "CREATE TABLE a (x INTEGER); INSERT INTO a VALUES (1)";
    const SECOND: &str = "ALTER TABLE a ADD COLUMN y INTEGER; UPDATE a SET y = x + 1";

    fn version(db: &Connection) -> i64 {
        number(db, "PRAGMA user_version").unwrap()
    }

    #[test]
    fn an_old_store_is_brought_forward_step_by_step_with_its_rows() {
        let db = Connection::open_in_memory().unwrap();
        migrate(&db, 0, &[FIRST]).unwrap();
        assert_eq!(version(&db), 1);
        migrate(&db, 1, &[FIRST, SECOND]).unwrap();
        assert_eq!((version(&db), number(&db, "SELECT y FROM a").unwrap()), (2, 2));
        migrate(&db, 2, &[FIRST, SECOND]).unwrap();
        assert_eq!(version(&db), 2, "nothing is left to do");
    }

    #[test]
    fn a_step_that_fails_half_way_leaves_the_version_before_it() {
        let db = Connection::open_in_memory().unwrap();
        migrate(&db, 0, &[FIRST]).unwrap();
        let broken = "UPDATE a SET x = 7; CREATE TABLE a (x INTEGER)";
        migrate(&db, 1, &[FIRST, broken]).unwrap_err();
        assert_eq!((version(&db), number(&db, "SELECT x FROM a").unwrap()), (1, 1));
        migrate(&db, 1, &[FIRST, SECOND]).unwrap();
        assert_eq!(version(&db), 2, "control: the step as it should have been");
    }

    #[test]
    fn a_database_of_somebody_else_is_none_of_ours() {
        let db = Connection::open_in_memory().unwrap();
        assert_eq!(identify(&db).unwrap(), Found::Nothing);
        db.execute_batch("CREATE TABLE cookies (x)").unwrap();
        identify(&db).unwrap_err();
    }

    #[test]
    fn a_table_that_was_changed_by_hand_is_noticed() {
        let db = Connection::open_in_memory().unwrap();
        migrate(&db, 0, STEPS).unwrap();
        check(&db, STEPS.len()).unwrap();
        db.execute_batch("ALTER TABLE events ADD COLUMN extra TEXT").unwrap();
        check(&db, STEPS.len()).unwrap_err();
    }
}
