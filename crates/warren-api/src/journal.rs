//! What the dialects know again after a restart: events, notes, and answers that may be asked for again.
//!
//! A [`Journal`] keeps; what is in it means something to the module that wrote it alone. A note is a
//! name and a value: `epoch`, `session/ID`, `numbers/TENANT` (events), `default/TENANT` (defaults).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use serde_json::Value;
use warren::store::StoreError;
use warren::store::sqlite::{Answer, NewEvent, SqliteStore};

/// How many events are kept.
pub const KEPT_EVENTS: u32 = 4_096;
/// How many answers are kept; the oldest goes first.
pub const KEPT_ANSWERS: u32 = 10_000;

/// Notes by name.
pub type Notes = BTreeMap<String, Value>;

/// Keeps what must outlive the daemon. What was recorded is there after a `kill -9`.
#[async_trait]
pub trait Journal: fmt::Debug + Send + Sync {
    /// Returns the events that are kept, oldest first, and all notes.
    async fn load(&self) -> Result<(Vec<NewEvent>, Notes), StoreError>;

    /// Appends events and sets notes, all or nothing. A note that is set to `None` is removed.
    async fn record(
        &self,
        events: Vec<NewEvent>,
        notes: Vec<(String, Option<Value>)>,
    ) -> Result<(), StoreError>;

    /// Keeps the answer to a tenant's request under the key that it chose.
    async fn remember(
        &self,
        tenant: &str,
        key: &str,
        request_hash: &[u8],
        response: Value,
    ) -> Result<(), StoreError>;

    /// Returns the answer that was given under a key, if it is still kept.
    async fn recall(&self, tenant: &str, key: &str) -> Result<Option<Answer>, StoreError>;
}

#[async_trait]
impl Journal for SqliteStore {
    async fn load(&self) -> Result<(Vec<NewEvent>, Notes), StoreError> {
        let events = self.events_after(0, u32::MAX).await?;
        let notes = self.notes().await?;
        Ok((events.into_iter().map(|kept| kept.event).collect(), notes.into_iter().collect()))
    }

    async fn record(
        &self,
        events: Vec<NewEvent>,
        notes: Vec<(String, Option<Value>)>,
    ) -> Result<(), StoreError> {
        self.append(events, notes).await.map(drop)
    }

    async fn remember(
        &self,
        tenant: &str,
        key: &str,
        request_hash: &[u8],
        response: Value,
    ) -> Result<(), StoreError> {
        SqliteStore::remember(self, tenant, key, request_hash, response).await.map(drop)
    }

    async fn recall(&self, tenant: &str, key: &str) -> Result<Option<Answer>, StoreError> {
        SqliteStore::recall(self, tenant, key).await
    }
}

/// A journal that ends with the process, for an API without a store.
#[derive(Debug, Default)]
pub struct MemoryJournal(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    events: VecDeque<NewEvent>,
    notes: Notes,
    answers: HashMap<(String, String), Answer>,
    ages: VecDeque<(String, String)>,
}

impl MemoryJournal {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Journal for MemoryJournal {
    async fn load(&self) -> Result<(Vec<NewEvent>, Notes), StoreError> {
        let kept = self.kept();
        Ok((kept.events.iter().cloned().collect(), kept.notes.clone()))
    }

    async fn record(
        &self,
        events: Vec<NewEvent>,
        notes: Vec<(String, Option<Value>)>,
    ) -> Result<(), StoreError> {
        let mut kept = self.kept();
        kept.events.extend(events);
        let extra = kept.events.len().saturating_sub(KEPT_EVENTS as usize);
        kept.events.drain(..extra);
        for (name, value) in notes {
            match value {
                Some(value) => kept.notes.insert(name, value),
                None => kept.notes.remove(&name),
            };
        }
        Ok(())
    }

    async fn remember(
        &self,
        tenant: &str,
        key: &str,
        request_hash: &[u8],
        response: Value,
    ) -> Result<(), StoreError> {
        let (mut kept, name) = (self.kept(), (tenant.to_owned(), key.to_owned()));
        let request_hash = request_hash.to_owned();
        let answer = Answer { request_hash, response, at: chrono::Utc::now() };
        kept.answers.insert(name.clone(), answer);
        kept.ages.push_back(name);
        if kept.ages.len() > KEPT_ANSWERS as usize
            && let Some(oldest) = kept.ages.pop_front()
        {
            kept.answers.remove(&oldest);
        }
        Ok(())
    }

    async fn recall(&self, tenant: &str, key: &str) -> Result<Option<Answer>, StoreError> {
        Ok(self.kept().answers.get(&(tenant.to_owned(), key.to_owned())).cloned())
    }
}
