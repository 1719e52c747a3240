//! What the API remembers of each sandbox beside what the manager tells: its labels and its owner.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use warren::{SandboxId, SandboxSpec};

use crate::error::ApiError;
use crate::rest::wire::NAME_LABEL;

/// The labels of all sandboxes, and the names that are taken.
#[derive(Debug, Clone, Default)]
pub(crate) struct Catalog(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    labels: HashMap<SandboxId, BTreeMap<String, String>>,
    names: HashMap<(Arc<str>, String), Holder>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Holder {
    /// Somebody makes a sandbox of this name.
    Promised,
    Sandbox(SandboxId),
}

/// A name that is kept for a sandbox in the making. Dropping it gives the name back.
#[derive(Debug)]
pub(crate) struct Name {
    catalog: Catalog,
    key: Option<(Arc<str>, String)>,
    /// Whose it was before, if it may be taken up again.
    pub(crate) before: Option<SandboxId>,
}

impl Catalog {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the name of a spec for its sandbox, if it has one.
    pub(crate) fn promise(&self, tenant: &Arc<str>, spec: &SandboxSpec) -> Result<Name, ApiError> {
        let name = spec.labels.iter().find(|(key, _)| key == NAME_LABEL);
        let key = name.map(|(_, name)| (Arc::clone(tenant), name.clone()));
        let mut before = None;
        if let Some(key) = &key {
            let mut entries = self.entries();
            match entries.names.insert(key.clone(), Holder::Promised) {
                None => {}
                Some(Holder::Sandbox(id)) => before = Some(id),
                Some(Holder::Promised) => return Err(taken(&key.1)),
            }
        }
        Ok(Name { catalog: self.clone(), key, before })
    }

    /// Remembers a sandbox.
    pub(crate) fn remember(&self, tenant: &str, id: &SandboxId, labels: &[(String, String)]) {
        let labels: BTreeMap<String, String> = labels.iter().cloned().collect();
        let mut entries = self.entries();
        if let Some(name) = labels.get(NAME_LABEL) {
            entries.names.insert((tenant.into(), name.clone()), Holder::Sandbox(id.clone()));
        }
        entries.labels.insert(id.clone(), labels);
    }

    pub(crate) fn labels(&self, id: &SandboxId) -> BTreeMap<String, String> {
        self.entries().labels.get(id).cloned().unwrap_or_default()
    }

    pub(crate) fn knows(&self, id: &SandboxId) -> bool {
        self.entries().labels.contains_key(id)
    }

    /// Forgets a sandbox that is gone.
    pub(crate) fn forget(&self, id: &SandboxId) {
        let mut entries = self.entries();
        entries.labels.remove(id);
        entries.names.retain(|_, holder| *holder != Holder::Sandbox(id.clone()));
    }
}

/// Says that a name is another sandbox's.
pub(crate) fn taken(name: &str) -> ApiError {
    warren::SandboxError::AlreadyExists { what: "sandbox", id: name.to_owned() }.into()
}

impl Name {
    /// Returns the name itself.
    pub(crate) fn text(&self) -> Option<&str> {
        self.key.as_ref().map(|(_, name)| name.as_str())
    }

    /// Notes that whoever had the name is gone.
    pub(crate) fn outlived(&mut self) {
        self.before = None;
    }

    /// Gives the name to the sandbox that was made.
    pub(crate) fn keep(mut self, tenant: &str, id: &SandboxId, labels: &[(String, String)]) {
        self.key = None;
        self.catalog.remember(tenant, id, labels);
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        let Some(key) = self.key.take() else { return };
        let mut entries = self.catalog.entries();
        match self.before.take() {
            Some(id) => entries.names.insert(key, Holder::Sandbox(id)),
            None => entries.names.remove(&key),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_belongs_to_one_sandbox_of_a_tenant() {
        let (catalog, tenant) = (Catalog::default(), Arc::from("a"));
        let labels = vec![(NAME_LABEL.to_owned(), "web".to_owned())];
        let spec = SandboxSpec { labels: labels.clone(), ..SandboxSpec::default() };
        let first = catalog.promise(&tenant, &spec).unwrap();
        assert_eq!(catalog.promise(&tenant, &spec).unwrap_err().code(), "already_exists");
        assert!(catalog.promise(&"b".into(), &spec).is_ok(), "another tenant has its own names");
        drop(first);
        let id = SandboxId::new();
        catalog.promise(&tenant, &spec).unwrap().keep("a", &id, &labels);
        assert_eq!(catalog.promise(&tenant, &spec).unwrap().before, Some(id.clone()));
        assert_eq!(catalog.promise(&tenant, &spec).unwrap().before, Some(id.clone()));
        catalog.forget(&id);
        assert_eq!(catalog.promise(&tenant, &spec).unwrap().before, None);
    }
}
