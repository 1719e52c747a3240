//! The sandboxes of a manager, and what is asked about all of them at once.
//!
//! Whether there is room and what the pool holds is asked for each sandbox that is made or claimed. So
//! it is not counted then, but kept: whoever changes an entry changes the account with it.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::ops::{Deref, DerefMut};

use super::registry::Entry;
use crate::SandboxId;

/// Every sandbox by its id.
#[derive(Debug, Default)]
pub(super) struct Sandboxes {
    entries: BTreeMap<SandboxId, Entry>,
    account: Account,
}

/// What is known of all sandboxes together.
#[derive(Debug, Default)]
struct Account {
    /// Those of the pool.
    pooled: BTreeSet<SandboxId>,
    /// How many places are taken on each backend.
    places: BTreeMap<usize, u32>,
}

/// What the account says of one sandbox.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Standing {
    pooled: bool,
    place: Option<usize>,
}

impl Standing {
    fn of(entry: &Entry) -> Self {
        Self { pooled: entry.is_pooled(), place: (!entry.ceded).then_some(entry.backend) }
    }
}

impl Account {
    fn enter(&mut self, id: &SandboxId, standing: Standing) {
        if standing.pooled {
            self.pooled.insert(id.clone());
        }
        if let Some(backend) = standing.place {
            *self.places.entry(backend).or_default() += 1;
        }
    }

    fn strike(&mut self, id: &SandboxId, standing: Standing) {
        if standing.pooled {
            self.pooled.remove(id);
        }
        if let Some(places) = standing.place.and_then(|backend| self.places.get_mut(&backend)) {
            *places = places.saturating_sub(1);
        }
    }
}

impl Sandboxes {
    pub(super) fn get(&self, id: &SandboxId) -> Option<&Entry> {
        self.entries.get(id)
    }

    /// Returns an entry that may be changed.
    pub(super) fn get_mut(&mut self, id: &SandboxId) -> Option<Changing<'_>> {
        let (id, entry) = self.entries.range_mut(id..=id).next()?;
        let before = Standing::of(entry);
        Some(Changing { id, entry, before, account: &mut self.account })
    }

    pub(super) fn contains_key(&self, id: &SandboxId) -> bool {
        self.entries.contains_key(id)
    }

    pub(super) fn insert(&mut self, id: SandboxId, entry: Entry) {
        self.remove(&id);
        self.account.enter(&id, Standing::of(&entry));
        self.entries.insert(id, entry);
    }

    pub(super) fn remove(&mut self, id: &SandboxId) -> Option<Entry> {
        let entry = self.entries.remove(id)?;
        self.account.strike(id, Standing::of(&entry));
        Some(entry)
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn iter(&self) -> btree_map::Iter<'_, SandboxId, Entry> {
        self.entries.iter()
    }

    pub(super) fn values(&self) -> btree_map::Values<'_, SandboxId, Entry> {
        self.entries.values()
    }

    /// Returns those that are nobody's yet, or only about to become somebody's.
    pub(super) fn pooled(&self) -> impl Iterator<Item = (&SandboxId, &Entry)> {
        self.account.pooled.iter().filter_map(|id| Some((id, self.entries.get(id)?)))
    }

    /// Returns how many places are taken, on one backend or on all.
    pub(super) fn places(&self, backend: Option<usize>) -> u32 {
        match backend {
            Some(backend) => self.account.places.get(&backend).copied().unwrap_or_default(),
            None => self.account.places.values().sum(),
        }
    }
}

/// An entry that is being changed.
pub(super) struct Changing<'a> {
    id: &'a SandboxId,
    entry: &'a mut Entry,
    before: Standing,
    account: &'a mut Account,
}

impl Deref for Changing<'_> {
    type Target = Entry;

    fn deref(&self) -> &Entry {
        self.entry
    }
}

impl DerefMut for Changing<'_> {
    fn deref_mut(&mut self) -> &mut Entry {
        self.entry
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let after = Standing::of(self.entry);
        if after != self.before {
            self.account.strike(self.id, self.before);
            self.account.enter(self.id, after);
        }
    }
}
