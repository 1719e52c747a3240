//! How much each tenant has, counted so that no concurrency gets past a quota.
//!
//! A sandbox counts from before it is asked for until it is known to be gone. What is not asked for
//! through us, such as a session that times out, is noticed when a quota is reached: only then is it
//! worth asking the manager which of the tenant's sandboxes still live.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use warren::SandboxId;

use crate::error::ApiError;
use crate::keys::Quotas;
use crate::principal::Principal;

/// How many requests of one tenant may be under way, streams included: nobody has all connections.
const MAX_REQUESTS: u64 = 256;

/// What all tenants have.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Books>>);

#[derive(Debug, Default)]
struct Books {
    tenants: HashMap<Arc<str>, Account>,
    clock: u64,
}

#[derive(Debug, Default)]
struct Account {
    held: HashMap<SandboxId, Held>,
    pending: u64,
    pending_memory: u64,
    execs: u64,
    requests: u64,
}

/// A sandbox that a tenant has.
#[derive(Debug)]
struct Held {
    memory: u64,
    /// When it was noted, by the books' own clock.
    since: u64,
}

impl Account {
    fn sandboxes(&self) -> u64 {
        self.held.len() as u64 + self.pending
    }

    fn memory(&self) -> u64 {
        let held = self.held.values().map(|held| held.memory);
        held.fold(self.pending_memory, u64::saturating_add)
    }

    fn is_empty(&self) -> bool {
        self.held.is_empty() && self.pending == 0 && self.execs == 0 && self.requests == 0
    }
}

/// A sandbox that has been promised and is not there yet. Dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Promise {
    ledger: Ledger,
    tenant: Arc<str>,
    memory: u64,
    is_settled: bool,
}

/// A command that runs. Dropping it says that it does no more.
#[derive(Debug)]
pub(crate) struct Running {
    ledger: Ledger,
    tenant: Arc<str>,
}

/// A request that is under way. Dropping it says that it is no more.
#[derive(Debug)]
pub(crate) struct Admitted {
    ledger: Ledger,
    tenant: Arc<str>,
}

/// A moment of the books, to tell what was noted after it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment(u64);

impl Ledger {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Promises a tenant one more sandbox, or says which quota is in the way.
    pub(crate) fn promise(
        &self,
        tenant: &Arc<str>,
        quotas: &Quotas,
        memory: Option<u64>,
    ) -> Result<Promise, ApiError> {
        let mut books = self.books();
        let account = books.tenants.entry(Arc::clone(tenant)).or_default();
        if let Some(limit) = quotas.sandboxes
            && account.sandboxes() >= limit
        {
            return Err(ApiError::quota("sandboxes", limit));
        }
        if let Some(limit) = quotas.memory_bytes {
            // Without a bound it could use all there is.
            let more = memory.unwrap_or(u64::MAX);
            if account.memory().saturating_add(more) > limit {
                return Err(ApiError::quota("bytes of memory", limit));
            }
        }
        let memory = memory.unwrap_or(0);
        account.pending += 1;
        account.pending_memory = account.pending_memory.saturating_add(memory);
        let (ledger, tenant) = (self.clone(), Arc::clone(tenant));
        Ok(Promise { ledger, tenant, memory, is_settled: false })
    }

    /// Notes a sandbox that a tenant has, however it came by it.
    pub(crate) fn note(&self, tenant: &str, id: &SandboxId, memory: u64) {
        let mut books = self.books();
        books.clock += 1;
        let held = Held { memory, since: books.clock };
        books.tenants.entry(tenant.into()).or_default().held.insert(id.clone(), held);
    }

    /// Notes that a sandbox is gone.
    pub(crate) fn forget(&self, id: &SandboxId) {
        let mut books = self.books();
        books.tenants.retain(|_, account| {
            account.held.remove(id);
            !account.is_empty()
        });
    }

    /// Returns this moment, to be taken before the living are listed.
    pub(crate) fn moment(&self) -> Moment {
        Moment(self.books().clock)
    }

    /// Forgets a tenant's sandboxes that were not among the living, except those noted since.
    pub(crate) fn settle(&self, tenant: &str, moment: Moment, living: &HashSet<SandboxId>) {
        if let Some(account) = self.books().tenants.get_mut(tenant) {
            account.held.retain(|id, held| held.since > moment.0 || living.contains(id));
        }
    }

    /// Lets a caller begin one more request. The operator always may, to look what is the matter.
    pub(crate) fn admit(&self, who: &Principal) -> Result<Admitted, ApiError> {
        let mut books = self.books();
        let account = books.tenants.entry(Arc::clone(&who.tenant)).or_default();
        if account.requests >= MAX_REQUESTS && !who.operator {
            return Err(ApiError::quota("requests at once", MAX_REQUESTS));
        }
        account.requests += 1;
        Ok(Admitted { ledger: self.clone(), tenant: Arc::clone(&who.tenant) })
    }

    /// Lets a tenant run one more command, if its quota does.
    pub(crate) fn run(&self, tenant: &Arc<str>, quotas: &Quotas) -> Result<Running, ApiError> {
        let mut books = self.books();
        let account = books.tenants.entry(Arc::clone(tenant)).or_default();
        if let Some(limit) = quotas.execs
            && account.execs >= limit
        {
            return Err(ApiError::quota("commands at once", limit));
        }
        account.execs += 1;
        Ok(Running { ledger: self.clone(), tenant: Arc::clone(tenant) })
    }
}

impl Promise {
    /// Turns the promise into the sandbox, at one moment: it is never counted twice, nor not at all.
    pub(crate) fn keep(mut self, id: &SandboxId) {
        self.settle(Some(id));
    }

    fn settle(&mut self, id: Option<&SandboxId>) {
        if std::mem::replace(&mut self.is_settled, true) {
            return;
        }
        let mut books = self.ledger.books();
        books.clock += 1;
        let held = Held { memory: self.memory, since: books.clock };
        let Some(account) = books.tenants.get_mut(&self.tenant) else { return };
        account.pending -= 1;
        account.pending_memory -= self.memory;
        if let Some(id) = id {
            account.held.insert(id.clone(), held);
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.settle(None);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(account) = self.ledger.books().tenants.get_mut(&self.tenant) {
            account.execs -= 1;
        }
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        if let Some(account) = self.ledger.books().tenants.get_mut(&self.tenant) {
            account.requests -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quotas(sandboxes: u64, memory_bytes: u64) -> Quotas {
        Quotas { sandboxes: Some(sandboxes), memory_bytes: Some(memory_bytes), execs: Some(1) }
    }

    #[test]
    fn a_promise_counts_until_it_is_kept_or_broken() {
        let (ledger, tenant) = (Ledger::default(), "a".into());
        let quotas = quotas(2, 100);
        let first = ledger.promise(&tenant, &quotas, Some(40)).unwrap();
        let second = ledger.promise(&tenant, &quotas, Some(40)).unwrap();
        assert_eq!(ledger.promise(&tenant, &quotas, Some(1)).unwrap_err().code(), "quota");
        drop(first);
        let id = SandboxId::from_string("x");
        second.keep(&id);
        assert_eq!(ledger.promise(&tenant, &quotas, Some(61)).unwrap_err().code(), "quota");
        assert_eq!(ledger.promise(&tenant, &quotas, None).unwrap_err().code(), "quota");
        let again = ledger.promise(&tenant, &quotas, Some(60)).unwrap();
        // The manager gave the one that it had.
        again.keep(&id);
        assert!(ledger.promise(&tenant, &quotas, Some(1)).is_ok(), "one sandbox counts once");
        ledger.forget(&id);
        assert!(ledger.promise(&tenant, &quotas, Some(100)).is_ok());
        assert!(ledger.promise(&"b".into(), &quotas, Some(100)).is_ok(), "another's count");
    }

    #[test]
    fn what_was_noted_after_the_living_were_listed_stays() {
        let ledger = Ledger::default();
        let (old, new) = (SandboxId::from_string("old"), SandboxId::from_string("new"));
        ledger.note("a", &old, 1);
        let moment = ledger.moment();
        ledger.note("a", &new, 1);
        ledger.settle("a", moment, &HashSet::new());
        let held: Vec<_> = ledger.books().tenants["a"].held.keys().cloned().collect();
        assert_eq!(held, [new]);
    }

    #[test]
    fn commands_in_flight_are_counted() {
        let (ledger, tenant) = (Ledger::default(), "a".into());
        let first = ledger.run(&tenant, &quotas(1, 1)).unwrap();
        assert_eq!(ledger.run(&tenant, &quotas(1, 1)).unwrap_err().code(), "quota");
        drop(first);
        assert!(ledger.run(&tenant, &quotas(1, 1)).is_ok());
    }
}
