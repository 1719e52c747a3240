//! What SQLite says, as the store's own errors.

use std::io;

use rusqlite::{Error, ErrorCode};

use super::StoreError;

/// What a person can do about a damaged store.
const HINT: &str = "nothing was changed; restore it from a backup, or move its directory aside to \
                    begin with an empty one";

/// Makes a [`StoreError::Damaged`] that says what to do.
pub(super) fn damaged(what: impl std::fmt::Display) -> StoreError {
    StoreError::Damaged { reason: format!("{what} ({HINT})") }
}

/// Returns what an error of SQLite's means to whoever tried to `action` the store.
pub(super) fn failure(action: &'static str) -> impl Fn(Error) -> StoreError {
    move |error| {
        let Error::SqliteFailure(code, _) = &error else {
            return match error {
                Error::FromSqlConversionFailure(..)
                | Error::IntegralValueOutOfRange(..)
                | Error::InvalidColumnType(..)
                | Error::Utf8Error(..) => damaged(error),
                other => StoreError::io(action, io::Error::other(other)),
            };
        };
        let kind = match code.code {
            ErrorCode::DiskFull => return StoreError::Full,
            ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase => return damaged(error),
            ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked => return StoreError::Busy,
            ErrorCode::ReadOnly => io::ErrorKind::ReadOnlyFilesystem,
            ErrorCode::TooBig => io::ErrorKind::FileTooLarge,
            _ => io::ErrorKind::Other,
        };
        StoreError::io(action, io::Error::new(kind, error))
    }
}
