//! What the tables hold, and the statements that read and write them.

use std::fmt;
use std::io;

use chrono::{DateTime, Utc};
use rusqlite::{Connection, OptionalExtension, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::StoreError;
use super::failure::{damaged, failure};
use crate::SandboxId;
use crate::store::{Change, Image, SandboxRecord, SessionRecord};

/// Something that happened, before it has an id. Times are kept to the microsecond.
#[derive(Debug, Clone, PartialEq)]
pub struct NewEvent {
    /// When it happened.
    pub at: DateTime<Utc>,
    /// What happened: "sandbox.created".
    pub kind: String,
    /// The sandbox it happened to.
    pub sandbox_id: Option<SandboxId>,
    /// The session it happened to.
    pub session_id: Option<String>,
    /// The client whose doing it was.
    pub client_id: Option<String>,
    /// What else there is to say.
    pub detail: Value,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Its place in the order of all events.
    pub id: i64,
    /// What happened.
    pub event: NewEvent,
}

/// The answer that was given to an idempotent request.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The hash of the request, to tell a repetition from another request under the same key.
    pub request_hash: Vec<u8>,
    /// What was answered.
    pub response: Value,
    /// When. Kept to the microsecond.
    pub at: DateTime<Utc>,
}

/// The setting that names the default sandbox.
const DEFAULT: &str = "default_sandbox";
/// What the name of a setting begins with that is somebody else's note.
const NOTE: &str = "note/";

/// One change, ready to be written.
#[derive(Debug)]
pub(super) enum Row {
    Put { table: Table, id: String, record: String },
    Drop { table: Table, id: String },
}

/// The tables whose rows are an id and a value.
#[derive(Debug, Clone, Copy)]
pub(super) enum Table {
    Sandboxes,
    Sessions,
    Settings,
}

impl Table {
    fn name(self) -> &'static str {
        match self {
            Self::Sandboxes => "sandboxes",
            Self::Sessions => "sessions",
            Self::Settings => "settings",
        }
    }

    /// Not `INSERT OR REPLACE`: what is there stays in its place, and half as many pages are written.
    fn put(self) -> &'static str {
        match self {
            Self::Sandboxes => {
                "INSERT INTO sandboxes (id, record, sum) VALUES (?, ?, ?) \
                 ON CONFLICT (id) DO UPDATE SET record = excluded.record, sum = excluded.sum"
            }
            Self::Sessions => {
                "INSERT INTO sessions (id, record, sum) VALUES (?, ?, ?) \
                 ON CONFLICT (id) DO UPDATE SET record = excluded.record, sum = excluded.sum"
            }
            Self::Settings => {
                "INSERT INTO settings (name, value, sum) VALUES (?, ?, ?) \
                 ON CONFLICT (name) DO UPDATE SET value = excluded.value, sum = excluded.sum"
            }
        }
    }

    fn drop(self) -> &'static str {
        match self {
            Self::Sandboxes => "DELETE FROM sandboxes WHERE id = ?",
            Self::Sessions => "DELETE FROM sessions WHERE id = ?",
            Self::Settings => "DELETE FROM settings WHERE name = ?",
        }
    }

    fn all(self) -> &'static str {
        match self {
            Self::Sandboxes => "SELECT id, record, sum FROM sandboxes ORDER BY id",
            Self::Sessions => "SELECT id, record, sum FROM sessions ORDER BY id",
            Self::Settings => "SELECT name, value, sum FROM settings ORDER BY name",
        }
    }
}

impl Row {
    pub(super) fn new(change: &Change) -> Result<Self, StoreError> {
        use Table::{Sandboxes, Sessions, Settings};
        Ok(match change {
            Change::PutSandbox(record) => {
                Self::Put { table: Sandboxes, id: record.id.0.clone(), record: encode(record)? }
            }
            Change::DropSandbox(id) => Self::Drop { table: Sandboxes, id: id.0.clone() },
            Change::PutSession(record) => Self::Put {
                table: Sessions,
                id: record.session.session_id.clone(),
                record: encode(record)?,
            },
            Change::DropSession(id) => Self::Drop { table: Sessions, id: id.clone() },
            Change::SetDefault(Some(id)) => {
                Self::Put { table: Settings, id: DEFAULT.to_owned(), record: encode(id)? }
            }
            Change::SetDefault(None) => Self::Drop { table: Settings, id: DEFAULT.to_owned() },
        })
    }

    /// Sets a note, or removes it.
    pub(super) fn note((name, value): &(String, Option<Value>)) -> Result<Self, StoreError> {
        let (table, id) = (Table::Settings, format!("{NOTE}{name}"));
        Ok(match value {
            Some(value) => Self::Put { table, id, record: encode(value)? },
            None => Self::Drop { table, id },
        })
    }

    pub(super) fn write(&self, db: &Connection) -> Result<(), StoreError> {
        let written = match self {
            Self::Put { table, id, record } => {
                let sum = checksum(&[table.name().as_bytes(), id.as_bytes(), record.as_bytes()]);
                db.prepare_cached(table.put())
                    .and_then(|mut put| put.execute(params![id, record, sum]))
            }
            Self::Drop { table, id } => {
                db.prepare_cached(table.drop()).and_then(|mut drop| drop.execute([id]))
            }
        };
        written.map(drop).map_err(failure("write to"))
    }
}

/// Reads everything that the manager applied.
pub(super) fn load(db: &Connection) -> Result<Image, StoreError> {
    let sandboxes = records(db, Table::Sandboxes, |record: &SandboxRecord| &record.id.0)?;
    let sessions =
        records(db, Table::Sessions, |record: &SessionRecord| &record.session.session_id)?;
    let mut default = None;
    for (name, value) in values(db, Table::Settings)? {
        // A setting that we do not know is of a later release.
        if name == DEFAULT {
            default = Some(decode("settings", &name, &value)?);
        }
    }
    Ok(Image { sandboxes, sessions, default })
}

/// Reads all notes.
pub(super) fn notes(db: &Connection) -> Result<Vec<(String, Value)>, StoreError> {
    let settings = values(db, Table::Settings)?;
    let notes = settings.iter().filter_map(|(name, value)| {
        let note = name.strip_prefix(NOTE)?;
        Some(decode("settings", name, value).map(|value| (note.to_owned(), value)))
    });
    notes.collect()
}

fn records<T: DeserializeOwned>(
    db: &Connection,
    table: Table,
    id_of: fn(&T) -> &String,
) -> Result<Vec<T>, StoreError> {
    let values = values(db, table)?;
    let decoded = values.iter().map(|(id, value)| {
        let record = decode(table.name(), id, value)?;
        if id_of(&record) == id {
            return Ok(record);
        }
        Err(unreadable(table.name(), id, "the record in it has another id"))
    });
    decoded.collect()
}

fn values(db: &Connection, table: Table) -> Result<Vec<(String, String)>, StoreError> {
    let failed = failure("read");
    let mut query = db.prepare_cached(table.all()).map_err(&failed)?;
    let mut rows = query.query([]).map_err(&failed)?;
    let mut values = Vec::new();
    while let Some(row) = rows.next().map_err(&failed)? {
        let (id, value): (String, String) =
            (row.get(0).map_err(&failed)?, row.get(1).map_err(&failed)?);
        let fields = [table.name().as_bytes(), id.as_bytes(), value.as_bytes()];
        check(table.name(), &id, &fields, row.get(2).map_err(&failed)?)?;
        values.push((id, value));
    }
    Ok(values)
}

pub(super) fn append_event(
    db: &Connection,
    event: &NewEvent,
    kept: u32,
) -> Result<i64, StoreError> {
    let failed = failure("write to");
    // The number that SQLite would give, known beforehand because the checksum covers it.
    let next = "SELECT max(ifnull((SELECT seq FROM sqlite_sequence WHERE name = 'events'), 0), \
                ifnull((SELECT max(id) FROM events), 0)) + 1";
    let insert = "INSERT INTO events \
                  (id, at, kind, sandbox_id, session_id, client_id, detail, sum) \
                  VALUES (?, ?, ?, ?, ?, ?, ?, ?)";
    let id: i64 = db
        .prepare_cached(next)
        .and_then(|mut next| next.query_row([], |row| row.get(0)))
        .map_err(&failed)?;
    let sandbox = event.sandbox_id.as_ref().map(SandboxId::as_str);
    let (session, client) = (&event.session_id, &event.client_id);
    let (at, detail) = (event.at.timestamp_micros(), encode(&event.detail)?);
    let sum = event_sum(id, event, &detail);
    db.prepare_cached(insert)
        .and_then(|mut insert| {
            insert.execute(params![id, at, event.kind, sandbox, session, client, detail, sum])
        })
        .map_err(&failed)?;
    // Ids have no gaps, since a number that was taken back is given again: so many ids, so many rows.
    db.prepare_cached("DELETE FROM events WHERE id <= ?")
        .and_then(|mut forget| forget.execute([id - i64::from(kept)]))
        .map_err(&failed)?;
    Ok(id)
}

pub(super) fn events_after(db: &Connection, id: i64, limit: u32) -> Result<Vec<Event>, StoreError> {
    let failed = failure("read");
    // They begin at 1. One with another number comes after nothing, and would be missed without a word.
    let lost = db
        .prepare_cached("SELECT min(id) FROM events")
        .and_then(|mut first| first.query_row([], |row| row.get::<_, Option<i64>>(0)))
        .map_err(&failed)?
        .filter(|first| *first < 1);
    if let Some(number) = lost {
        return Err(unreadable("events", &number.to_string(), "no event has that number"));
    }
    let sql = "SELECT id, at, kind, sandbox_id, session_id, client_id, detail, sum \
               FROM events WHERE id > ? ORDER BY id LIMIT ?";
    let mut query = db.prepare_cached(sql).map_err(&failed)?;
    let mut rows = query.query([id, i64::from(limit)]).map_err(&failed)?;
    let mut events = Vec::new();
    while let Some(row) = rows.next().map_err(&failed)? {
        let id: i64 = row.get(0).map_err(&failed)?;
        let name = id.to_string();
        let detail: String = row.get(6).map_err(&failed)?;
        let event = NewEvent {
            at: time("events", &name, row.get(1).map_err(&failed)?)?,
            kind: row.get(2).map_err(&failed)?,
            sandbox_id: row.get::<_, Option<String>>(3).map_err(&failed)?.map(SandboxId),
            session_id: row.get(4).map_err(&failed)?,
            client_id: row.get(5).map_err(&failed)?,
            detail: decode("events", &name, &detail)?,
        };
        compare("events", &name, event_sum(id, &event, &detail), row.get(7).map_err(&failed)?)?;
        events.push(Event { id, event });
    }
    Ok(events)
}

fn event_sum(id: i64, event: &NewEvent, detail: &str) -> i64 {
    let text = |text: Option<&str>| text.map_or(vec![0], |text| [&[1], text.as_bytes()].concat());
    checksum(&[
        &id.to_le_bytes(),
        &event.at.timestamp_micros().to_le_bytes(),
        event.kind.as_bytes(),
        &text(event.sandbox_id.as_ref().map(SandboxId::as_str)),
        &text(event.session_id.as_deref()),
        &text(event.client_id.as_deref()),
        detail.as_bytes(),
    ])
}

pub(super) fn remember(
    db: &Connection,
    tenant: &str,
    key: &str,
    answer: &Answer,
    kept: u32,
) -> Result<Option<Answer>, StoreError> {
    if let Some(earlier) = recall(db, tenant, key)? {
        return Ok(Some(earlier));
    }
    let failed = failure("write to");
    let sql = "INSERT INTO idempotency (tenant, key, request_hash, response, at, sum) \
               VALUES (?, ?, ?, ?, ?, ?)";
    let (at, response) = (answer.at.timestamp_micros(), encode(&answer.response)?);
    let sum = answer_sum(tenant, key, answer, &response);
    db.prepare_cached(sql)
        .and_then(|mut insert| {
            insert.execute(params![tenant, key, answer.request_hash, response, at, sum])
        })
        .map_err(&failed)?;
    db.prepare_cached("DELETE FROM idempotency WHERE number <= ?")
        .and_then(|mut forget| forget.execute([db.last_insert_rowid() - i64::from(kept)]))
        .map_err(&failed)?;
    Ok(None)
}

pub(super) fn recall(
    db: &Connection,
    tenant: &str,
    key: &str,
) -> Result<Option<Answer>, StoreError> {
    let sql =
        "SELECT request_hash, response, at, sum FROM idempotency WHERE tenant = ? AND key = ?";
    let row = db
        .prepare_cached(sql)
        .and_then(|mut query| {
            let row = query.query_row([tenant, key], |row| {
                Ok((row.get(0)?, row.get::<_, String>(1)?, row.get(2)?, row.get(3)?))
            });
            row.optional()
        })
        .map_err(failure("read"))?;
    let Some((request_hash, text, at, sum)) = row else { return Ok(None) };
    let response = decode("idempotency", key, &text)?;
    let answer = Answer { request_hash, response, at: time("idempotency", key, at)? };
    compare("idempotency", key, answer_sum(tenant, key, &answer, &text), sum)?;
    Ok(Some(answer))
}

fn answer_sum(tenant: &str, key: &str, answer: &Answer, response: &str) -> i64 {
    checksum(&[
        tenant.as_bytes(),
        key.as_bytes(),
        &answer.request_hash,
        response.as_bytes(),
        &answer.at.timestamp_micros().to_le_bytes(),
    ])
}

fn encode(value: &impl Serialize) -> Result<String, StoreError> {
    // A path that is no text is the one thing of ours that JSON cannot hold.
    serde_json::to_string(value).map_err(|e| {
        StoreError::io("encode a record for", io::Error::new(io::ErrorKind::InvalidInput, e))
    })
}

fn decode<T: DeserializeOwned>(table: &str, id: &str, json: &str) -> Result<T, StoreError> {
    serde_json::from_str(json).map_err(|e| unreadable(table, id, e))
}

fn time(table: &str, id: &str, micros: i64) -> Result<DateTime<Utc>, StoreError> {
    DateTime::from_timestamp_micros(micros)
        .ok_or_else(|| unreadable(table, id, format!("{micros} is no time")))
}

fn check(table: &str, id: &str, fields: &[&[u8]], stored: i64) -> Result<(), StoreError> {
    compare(table, id, checksum(fields), stored)
}

fn compare(table: &str, id: &str, computed: i64, stored: i64) -> Result<(), StoreError> {
    if computed == stored {
        return Ok(());
    }
    Err(unreadable(table, id, "its checksum is wrong"))
}

fn unreadable(table: &str, id: &str, why: impl fmt::Display) -> StoreError {
    damaged(format!("row `{}` of {table}: {why}", id.escape_debug()))
}

/// FNV-1a over the fields, each after its length. Every step can be undone, so any change of one
/// byte shows; it guards against broken disks and not against people.
fn checksum(fields: &[&[u8]]) -> i64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(PRIME);
    let hash = fields.iter().fold(OFFSET, |hash, field| {
        let hash = (field.len() as u64).to_le_bytes().iter().fold(hash, step);
        field.iter().fold(hash, step)
    });
    hash.cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::sqlite::schema;

    /// Returns tables with one sandbox, whose record is `record` and whose checksum is right.
    fn holding(record: &str) -> Connection {
        let db = Connection::open_in_memory().unwrap();
        schema::migrate(&db, 0, schema::STEPS).unwrap();
        let row =
            Row::Put { table: Table::Sandboxes, id: "a".to_owned(), record: record.to_owned() };
        row.write(&db).unwrap();
        db
    }

    const RECORD: &str = r#"{"id":"a","backend":"fake","spec":{},"phase":"Running","owner":null,
        "used":false,"anchor":null,"created_at":"2026-01-01T00:00:00Z"}"#;

    #[test]
    fn a_record_with_fields_of_a_later_release_still_loads() {
        let plain = load(&holding(RECORD)).unwrap();
        let later = RECORD.replacen('{', r#"{"colour":"red","mood":{"good":[1]},"#, 1);
        let later = later.replace(r#""spec":{}"#, r#""spec":{"gpu":1}"#);
        assert_eq!(load(&holding(&later)).unwrap(), plain);
        assert_eq!(plain.sandboxes.len(), 1, "control");
    }

    #[test]
    fn a_record_that_cannot_be_read_is_damage_that_names_its_row() {
        let other_id = RECORD.replace(r#""id":"a""#, r#""id":"b""#);
        for record in ["", "{", "{}", "null", "[]", &RECORD[..40], &other_id] {
            let error = load(&holding(record)).unwrap_err();
            assert!(matches!(error, StoreError::Damaged { .. }), "{record:?}: {error:?}");
            assert!(error.to_string().contains("row `a` of sandboxes"), "{record:?}: {error}");
        }
    }

    #[test]
    fn a_row_that_was_changed_behind_our_back_is_damage_that_names_it() {
        let db = holding(RECORD);
        db.execute_batch("UPDATE sandboxes SET record = replace(record, 'fake', 'cake')").unwrap();
        let error = load(&db).unwrap_err().to_string();
        assert!(error.contains("row `a` of sandboxes: its checksum is wrong"), "{error}");
    }

    #[test]
    fn an_event_whose_number_was_changed_is_noticed() {
        let db = holding(RECORD);
        let event = NewEvent {
            at: DateTime::UNIX_EPOCH,
            kind: "x".to_owned(),
            sandbox_id: None,
            session_id: None,
            client_id: None,
            detail: Value::Null,
        };
        assert_eq!(append_event(&db, &event, 10).unwrap(), 1);
        assert_eq!(events_after(&db, 0, 10).unwrap(), [Event { id: 1, event }], "control");
        for number in [3, 0, -1] {
            db.execute_batch(&format!("UPDATE events SET id = {number}")).unwrap();
            let error = events_after(&db, 0, 10).unwrap_err().to_string();
            assert!(error.contains(&format!("row `{number}` of events")), "{error}");
        }
    }

    #[test]
    fn a_checksum_tells_apart_what_differs_in_a_bit_or_in_where_a_field_ends() {
        let whole = checksum(&[b"sandbox", b"record"]);
        assert_ne!(whole, checksum(&[b"sandboxr", b"ecord"]));
        assert_ne!(whole, checksum(&[b"sandbox", b"\x73ecord"]));
        assert_eq!(whole, checksum(&[b"sandbox", b"record"]), "control");
        // The value is on disks: it may never change.
        assert_eq!(checksum(&[]), 0xcbf2_9ce4_8422_2325_u64.cast_signed());
    }
}
