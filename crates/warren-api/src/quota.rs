//! How much each tenant has, counted so that no concurrency gets past a quota.
//!
//! A sandbox counts from before it is asked for until it is known to be gone. What is not asked for
//! through us, such as a session that times out, is noticed when a quota is reached: only then is it
//! worth asking the manager which of the tenant's sandboxes still live. After a restart the counts are
//! made anew from what the manager has: none is kept that could drift from it.
//!
//! A build of a template counts as the sandbox that its steps run in, one after the other, from when it is
//! asked for until it is over. Of commands that an earlier daemon started the ends are looked for.
//!
//! Snapshots are counted where they are, each time that one more is to be made: the books know only how
//! many are being made meanwhile.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::Request;
use axum::http::header;
use tokio::sync::Notify;
use tokio::time::Instant;
use warren::{ResourceLimits, SandboxId};

use crate::error::ApiError;
use crate::keys::Quotas;
use crate::principal::Principal;
use crate::rest::wire::{QuotaView, UsedView};

/// How many requests of one tenant may be under way, streams included: nobody has all connections.
const MAX_REQUESTS: u64 = 256;
/// How many builds of templates one tenant may have under way, those included that wait for their files.
const MAX_BUILDS: u64 = 4;
/// The share of the CPU that a sandbox has which asks for none.
const USUAL_WEIGHT: u64 = 100;

/// What all tenants have.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Books>>);

#[derive(Debug, Default)]
struct Books {
    tenants: HashMap<Arc<str>, Account>,
    clock: u64,
    /// Tells that a snapshot has been made, or will not be.
    saved: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Account {
    held: HashMap<SandboxId, Held>,
    /// What has been promised, by the number of the promise.
    pending: HashMap<u64, Size>,
    execs: u64,
    /// Builds of templates.
    builds: u64,
    streams: u64,
    requests: u64,
    /// Snapshots that are being made.
    saving: u64,
    /// How many are no longer being made.
    saved: u64,
    bucket: Option<Bucket>,
    /// What the tenant was last said to be allowed.
    quotas: Quotas,
}

/// How much of the host a sandbox may use. Absent is without a bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Size {
    memory: Option<u64>,
    disk: Option<u64>,
    cpu_weight: u64,
}

impl Size {
    /// Returns how much a sandbox may use that has these limits.
    pub(crate) fn of(limits: &ResourceLimits) -> Self {
        Self {
            memory: limits.max_memory_bytes,
            disk: limits.max_write_bytes,
            cpu_weight: limits.cpu_weight.map_or(USUAL_WEIGHT, u64::from),
        }
    }

    /// Returns the more of each.
    fn or_more(self, other: Self) -> Self {
        Self {
            memory: self.memory.max(other.memory),
            disk: self.disk.max(other.disk),
            cpu_weight: self.cpu_weight.max(other.cpu_weight),
        }
    }
}

/// What several sandboxes may use together: memory, disk, shares of the CPU.
type Sum = (u64, u64, u64);

/// A sandbox that a tenant has.
#[derive(Debug)]
struct Held {
    size: Size,
    /// When it was noted, by the books' own clock.
    since: u64,
}

/// What is left of a tenant's requests of this second.
#[derive(Debug)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Bucket {
    /// Takes one, or says after which time there will be one.
    fn take(&mut self, rate: u64, now: Instant) -> Result<(), Duration> {
        #[expect(clippy::cast_precision_loss, reason = "nobody can send so many")]
        let rate = rate as f64;
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.left = (self.left + passed * rate).min(rate.max(1.0));
        self.at = now;
        if self.left >= 1.0 {
            self.left -= 1.0;
            return Ok(());
        }
        let missing = (1.0 - self.left) / rate;
        Err(Duration::try_from_secs_f64(missing).unwrap_or(Duration::from_secs(3_600)))
    }
}

impl Account {
    fn sandboxes(&self) -> u64 {
        (self.held.len() + self.pending.len()) as u64
    }

    fn sum(&self) -> Sum {
        let held = self.held.values().map(|held| &held.size);
        held.chain(self.pending.values()).fold((0, 0, 0), |(memory, disk, cpu), size| {
            (
                memory.saturating_add(size.memory.unwrap_or(0)),
                disk.saturating_add(size.disk.unwrap_or(0)),
                cpu.saturating_add(size.cpu_weight),
            )
        })
    }

    /// Tells whether there is nothing to remember. A bucket that is empty is something: whoever forgot
    /// it would fill it.
    fn is_empty(&self) -> bool {
        // A number that began anew could be taken for the one from before.
        let busy = self.execs + self.builds + self.streams + self.requests;
        let busy = busy + self.saving + self.saved;
        let rested = |bucket: &Bucket| bucket.at.elapsed() >= Duration::from_secs(1);
        let none = self.held.is_empty() && self.pending.is_empty();
        none && busy == 0 && self.bucket.as_ref().is_none_or(rested)
    }
}

/// A sandbox that has been promised and is not there yet. Dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Promise {
    ledger: Ledger,
    tenant: Arc<str>,
    number: u64,
}

/// A command that runs. Dropping it says that it does no more.
#[derive(Debug)]
pub(crate) struct Running {
    ledger: Ledger,
    tenant: Arc<str>,
}

/// A template that is being built. Dropping it says that it is no more.
#[derive(Debug)]
pub(crate) struct Building {
    ledger: Ledger,
    tenant: Arc<str>,
}

/// A snapshot that is being made. Dropping it says that it is there, or will not be.
#[derive(Debug)]
pub(crate) struct Saving {
    ledger: Ledger,
    tenant: Arc<str>,
}

/// A moment of a tenant's snapshots, to tell whether one has been made since.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counted(u64);

/// A request that is under way. Dropping it says that it is no more.
#[derive(Debug)]
pub(crate) struct Admitted {
    ledger: Ledger,
    tenant: Arc<str>,
}

/// A stream that is followed, if the request is for one. When the last clone is dropped it is no more.
#[derive(Debug, Clone, Default)]
pub(crate) struct Followed(
    #[expect(dead_code, reason = "it is there to be dropped")] Option<Arc<Following>>,
);

/// It says nothing of who somebody is.
impl PartialEq for Followed {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Followed {}

#[derive(Debug)]
struct Following {
    ledger: Ledger,
    tenant: Arc<str>,
}

/// Tells whether a request is for a stream, as far as can be told before it is answered.
pub(crate) fn is_stream(request: &Request) -> bool {
    let headers = request.headers();
    let path = request.uri().path();
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with("application/connect+"))
        || path == "/v1/events"
        || (path.starts_with("/v1/sandboxes/")
            // What a server inside is asked; a command may be called so.
            && path.split('/').nth(4) != Some("ports")
            && (path.ends_with("/stream")
                || path.ends_with("/files/watch")
                || headers.contains_key(header::UPGRADE)))
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
        size: Size,
    ) -> Result<Promise, ApiError> {
        let mut books = self.books();
        books.clock += 1;
        let number = books.clock;
        let account = books.tenants.entry(Arc::clone(tenant)).or_default();
        if let Some(limit) = quotas.sandboxes
            && account.sandboxes() >= limit
        {
            return Err(ApiError::quota("sandboxes", limit));
        }
        let (memory, disk, cpu) = account.sum();
        for (limit, has, more, what) in [
            (quotas.memory_bytes, memory, size.memory, "bytes of memory"),
            (quotas.disk_bytes, disk, size.disk, "bytes to be written"),
            (quotas.cpu_weight, cpu, Some(size.cpu_weight), "shares of the CPU"),
        ] {
            // Without a bound it could use all there is.
            let then = has.saturating_add(more.unwrap_or(u64::MAX));
            if let Some(limit) = limit
                && then > limit
            {
                return Err(ApiError::quota(what, limit));
            }
        }
        account.pending.insert(number, size);
        Ok(Promise { ledger: self.clone(), tenant: Arc::clone(tenant), number })
    }

    /// Notes a sandbox that a tenant has, however it came by it.
    pub(crate) fn note(&self, tenant: &str, id: &SandboxId, size: Size) {
        let mut books = self.books();
        books.clock += 1;
        let held = Held { size, since: books.clock };
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
        account.quotas = who.quotas;
        if account.requests >= MAX_REQUESTS && !who.operator {
            return Err(ApiError::quota("requests at once", MAX_REQUESTS));
        }
        if let Some(rate) = who.quotas.requests_per_second {
            let now = Instant::now();
            #[expect(clippy::cast_precision_loss, reason = "nobody can send so many")]
            let full = || Bucket { left: rate as f64, at: now };
            let bucket = account.bucket.get_or_insert_with(full);
            bucket.take(rate, now).map_err(|after| ApiError::too_fast(rate, after))?;
        }
        account.requests += 1;
        Ok(Admitted { ledger: self.clone(), tenant: Arc::clone(&who.tenant) })
    }

    /// Lets a caller follow one more stream, if its quota does.
    pub(crate) fn follow(&self, who: &Principal) -> Result<Followed, ApiError> {
        let mut books = self.books();
        let account = books.tenants.entry(Arc::clone(&who.tenant)).or_default();
        if let Some(limit) = who.quotas.streams
            && account.streams >= limit
        {
            return Err(ApiError::quota("streams at once", limit));
        }
        account.streams += 1;
        let following = Following { ledger: self.clone(), tenant: Arc::clone(&who.tenant) };
        Ok(Followed(Some(Arc::new(following))))
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

    /// Counts a command that runs already, whatever the quota is.
    pub(crate) fn run_on(&self, tenant: &Arc<str>) -> Running {
        self.books().tenants.entry(Arc::clone(tenant)).or_default().execs += 1;
        Running { ledger: self.clone(), tenant: Arc::clone(tenant) }
    }

    /// Lets a tenant build one more template. What its steps use is counted apart.
    pub(crate) fn build(&self, tenant: &Arc<str>) -> Result<Building, ApiError> {
        let mut books = self.books();
        let account = books.tenants.entry(Arc::clone(tenant)).or_default();
        if account.builds >= MAX_BUILDS {
            let hint = "wait for one, or end it";
            return Err(ApiError::quota("builds at once", MAX_BUILDS).with_hint(hint));
        }
        account.builds += 1;
        Ok(Building { ledger: self.clone(), tenant: Arc::clone(tenant) })
    }

    /// Returns this moment, to be taken before a tenant's snapshots are counted.
    pub(crate) fn before_counting(&self, tenant: &Arc<str>) -> Counted {
        Counted(self.books().tenants.get(tenant).map_or(0, |account| account.saved))
    }

    /// Lets a tenant make one more snapshot, if so many more fit by a count that is still true.
    pub(crate) fn save(&self, tenant: &Arc<str>, room: u64, at: Counted) -> Option<Saving> {
        let mut books = self.books();
        let account = books.tenants.entry(Arc::clone(tenant)).or_default();
        if account.saved != at.0 || account.saving >= room {
            return None;
        }
        account.saving += 1;
        Some(Saving { ledger: self.clone(), tenant: Arc::clone(tenant) })
    }

    /// Lets a tenant make one more snapshot that has no bound.
    pub(crate) fn save_unbounded(&self, tenant: &Arc<str>) -> Saving {
        self.books().tenants.entry(Arc::clone(tenant)).or_default().saving += 1;
        Saving { ledger: self.clone(), tenant: Arc::clone(tenant) }
    }

    /// Returns who tells that a snapshot is no longer being made.
    pub(crate) fn saved(&self) -> Arc<Notify> {
        Arc::clone(&self.books().saved)
    }

    /// Tells how much a caller has of everything; the operator, how much everybody has.
    pub(crate) fn used(&self, who: &Principal) -> Vec<QuotaView> {
        let books = self.books();
        let own = books.tenants.iter().filter(|(tenant, _)| who.operator || **tenant == who.tenant);
        let mut all: Vec<_> = own.map(|(tenant, account)| account.view(tenant)).collect();
        all.sort_by(|a, b| a.tenant.cmp(&b.tenant));
        all
    }
}

impl Account {
    fn view(&self, tenant: &str) -> QuotaView {
        let (memory_bytes, disk_bytes, cpu_weight) = self.sum();
        let used = UsedView {
            sandboxes: self.sandboxes(),
            memory_bytes,
            cpu_weight,
            disk_bytes,
            // Counted where they are, by whoever shows this.
            snapshots: 0,
            execs: self.execs,
            streams: self.streams,
            requests: self.requests,
        };
        QuotaView { tenant: tenant.to_owned(), used, quotas: self.quotas }
    }
}

impl Promise {
    /// Turns the promise into the sandbox, at one moment: it is never counted twice, nor not at all.
    ///
    /// It counts by what it was promised and by what it has, whichever is more. One that is there already, and was only
    /// joined, goes on to count as it did: what its guest asked for is not what it has.
    pub(crate) fn keep(self, id: &SandboxId, has: &ResourceLimits) {
        self.settle(Some((id, Size::of(has))));
    }

    fn settle(&self, made: Option<(&SandboxId, Size)>) {
        let mut books = self.ledger.books();
        books.clock += 1;
        let since = books.clock;
        let Some(account) = books.tenants.get_mut(&self.tenant) else { return };
        // Once: a promise that was kept is dropped as well.
        let Some(size) = account.pending.remove(&self.number) else { return };
        if let Some((id, has)) = made {
            let size = size.or_more(has);
            account.held.entry(id.clone()).or_insert(Held { size, since }).since = since;
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

impl Drop for Building {
    fn drop(&mut self) {
        if let Some(account) = self.ledger.books().tenants.get_mut(&self.tenant) {
            account.builds -= 1;
        }
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        let mut books = self.ledger.books();
        if let Some(account) = books.tenants.get_mut(&self.tenant) {
            account.saving -= 1;
            account.saved += 1;
        }
        books.saved.notify_waiters();
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        if let Some(account) = self.ledger.books().tenants.get_mut(&self.tenant) {
            account.streams -= 1;
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
        let (sandboxes, memory_bytes) = (Some(sandboxes), Some(memory_bytes));
        Quotas { sandboxes, memory_bytes, execs: Some(1), ..Quotas::default() }
    }

    fn of(memory: impl Into<Option<u64>>) -> Size {
        Size { memory: memory.into(), disk: Some(1), cpu_weight: 1 }
    }

    fn has(memory: u64) -> ResourceLimits {
        ResourceLimits { max_memory_bytes: Some(memory), ..ResourceLimits::default() }
    }

    #[test]
    fn a_stream_is_one_whatever_its_command_is_called() {
        for (path, stream) in [
            ("/v1/events", true),
            ("/v1/sandboxes/x/execs/y/stream", true),
            ("/v1/sandboxes/x/execs/ports/stream", true),
            ("/v1/sandboxes/x/ports/80/stream", false),
            ("/v1/sandboxes/x/execs/y", false),
        ] {
            let request = Request::get(path).body(axum::body::Body::empty()).unwrap();
            assert_eq!(is_stream(&request), stream, "{path}");
        }
    }

    #[test]
    fn a_promise_counts_until_it_is_kept_or_broken() {
        let (ledger, tenant) = (Ledger::default(), "a".into());
        let quotas = quotas(2, 100);
        let first = ledger.promise(&tenant, &quotas, of(40)).unwrap();
        let second = ledger.promise(&tenant, &quotas, of(40)).unwrap();
        assert_eq!(ledger.promise(&tenant, &quotas, of(1)).unwrap_err().code(), "quota");
        drop(first);
        let id = SandboxId::from_string("x");
        second.keep(&id, &has(40));
        assert_eq!(ledger.promise(&tenant, &quotas, of(61)).unwrap_err().code(), "quota");
        assert_eq!(ledger.promise(&tenant, &quotas, of(None)).unwrap_err().code(), "quota");
        // The manager gave the one that it had, which is no smaller for that, nor larger.
        for asked in [1, 60] {
            ledger.promise(&tenant, &quotas, of(asked)).unwrap().keep(&id, &has(40));
            assert_eq!(ledger.promise(&tenant, &quotas, of(61)).unwrap_err().code(), "quota");
            assert!(ledger.promise(&tenant, &quotas, of(60)).is_ok(), "one sandbox counts once");
        }
        ledger.forget(&id);
        ledger.promise(&tenant, &quotas, of(1)).unwrap().keep(&id, &has(90));
        assert_eq!(ledger.promise(&tenant, &quotas, of(11)).unwrap_err().code(), "quota");
        ledger.forget(&id);
        assert!(ledger.promise(&tenant, &quotas, of(100)).is_ok());
        assert!(ledger.promise(&"b".into(), &quotas, of(100)).is_ok(), "another's count");
    }

    #[test]
    fn what_was_noted_after_the_living_were_listed_stays() {
        let ledger = Ledger::default();
        let (old, new) = (SandboxId::from_string("old"), SandboxId::from_string("new"));
        ledger.note("a", &old, of(1));
        let moment = ledger.moment();
        ledger.note("a", &new, of(1));
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

    fn who(quotas: Quotas) -> Principal {
        let (tenant, note, followed) = ("a".into(), Default::default(), Followed::default());
        Principal { tenant, client: None, operator: false, quotas, note, followed }
    }

    #[test]
    fn disk_and_shares_of_the_cpu_are_counted_by_what_each_sandbox_may_use() {
        let (ledger, tenant) = (Ledger::default(), "a".into());
        let quotas = Quotas { disk_bytes: Some(100), cpu_weight: Some(250), ..Quotas::default() };
        let limits = |disk, weight| ResourceLimits {
            max_write_bytes: disk,
            cpu_weight: weight,
            ..ResourceLimits::default()
        };
        let promise =
            |disk, weight| ledger.promise(&tenant, &quotas, Size::of(&limits(disk, weight)));
        let first = promise(Some(60), None).unwrap();
        assert_eq!(promise(Some(41), None).unwrap_err().code(), "quota", "disk");
        assert_eq!(promise(None, None).unwrap_err().code(), "quota", "as much as there is");
        assert_eq!(promise(Some(1), Some(151)).unwrap_err().code(), "quota", "the usual is 100");
        let second = promise(Some(40), Some(150)).unwrap();
        assert_eq!(promise(Some(0), Some(1)).unwrap_err().code(), "quota", "all is promised");
        drop(second);
        first.keep(&SandboxId::from_string("x"), &limits(Some(60), Some(100)));
        assert!(promise(Some(40), Some(150)).is_ok());
        let unbounded = Ledger::default();
        let free = Quotas::default();
        let all: Vec<_> = (0..3)
            .map(|_| unbounded.promise(&tenant, &free, Size::of(&ResourceLimits::unlimited())))
            .collect();
        drop(all);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_come_at_their_rate_and_after_a_rest_at_once() {
        let ledger = Ledger::default();
        let who = who(Quotas { requests_per_second: Some(4), ..Quotas::default() });
        for _ in 0..4 {
            ledger.admit(&who).unwrap();
        }
        let refused = ledger.admit(&who).unwrap_err();
        assert_eq!((refused.status().as_u16(), refused.code()), (429, "rate"));
        // Nobody gets more by having nothing for a moment.
        ledger.forget(&SandboxId::from_string("x"));
        assert!(ledger.admit(&who).is_err());
        tokio::time::advance(Duration::from_millis(249)).await;
        assert!(ledger.admit(&who).is_err());
        tokio::time::advance(Duration::from_millis(2)).await;
        ledger.admit(&who).unwrap();
        assert!(ledger.admit(&who).is_err(), "one was there");
        tokio::time::advance(Duration::from_secs(3_600)).await;
        let at_once = (0..100).filter(|_| ledger.admit(&who).is_ok()).count();
        assert_eq!(at_once, 4, "however long the rest");
        let none = super::tests::who(Quotas { requests_per_second: Some(0), ..Quotas::default() });
        assert!(Ledger::default().admit(&none).is_err(), "none at all is none at all");
    }

    #[test]
    fn a_stream_counts_until_the_last_who_knows_of_it_is_gone() {
        let ledger = Ledger::default();
        let who = who(Quotas { streams: Some(1), ..Quotas::default() });
        let first = ledger.follow(&who).unwrap();
        let again = first.clone();
        assert_eq!(ledger.follow(&who).unwrap_err().code(), "quota");
        drop(first);
        assert_eq!(ledger.follow(&who).unwrap_err().code(), "quota");
        drop(again);
        assert!(ledger.follow(&who).is_ok());
        let used = ledger.used(&who);
        assert_eq!((used.len(), used[0].used.streams), (1, 0));
    }
}
