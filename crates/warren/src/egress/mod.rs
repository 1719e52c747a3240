//! What a sandbox reaches beyond itself: decided, looked up and dialled outside of it.
//!
//! ```text
//! connect inside -> init's gate -> descriptor, name or address -> broker: policy -> resolve -> checked -> dialled
//!   what is said -> guard (who is meant, in TLS and HTTP) -> the destination
//! ```
//!
//! A sandbox has no way out; see `docs/design/egress.md`. `Policy` decides, purely; `broker` acts; `guard` reads what
//! is said first; `public` knows which addresses are everybody's; `barred` sums up what was refused.

pub(crate) mod barred;
pub(crate) mod broker;
pub(crate) mod guard;
mod public;
mod resolve;

use std::io;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use rustix::process::{Resource, getrlimit};
use tokio::sync::{Semaphore, watch};
use warren_init::domain;
use warren_init::plan::{self, Range};

pub(crate) use public::{is_public, overlaps_public};
pub use resolve::{Busy, Resolve, SystemResolver};

use self::barred::Tally;
use crate::contract::{has, width};
use crate::profile::Profile;
use crate::{Destination, DestinationHost, Reach, Result, SandboxError, SandboxSpec};

/// How many connections all sandboxes may have together, and what part of the descriptors that we may have: each has two.
const MAX_CONNECTIONS: usize = 4096;
const CONNECTIONS_SHARE: u64 = 4;
/// How many names may be looked up at once: for all sandboxes, each by a thread that cannot be stopped, and for each of
/// them. Some of these take no place from others: whoever asks what nobody answers holds up itself alone.
const MAX_LOOKUPS: usize = 256;
const LOOKUPS_EACH: usize = 8;
const LOOKUPS_RESERVED: usize = 1;

/// What whoever runs Warren says about what sandboxes may reach.
#[derive(Debug, Clone)]
pub struct EgressOptions {
    /// Whether any may reach anything.
    pub enabled: bool,
    /// Networks that are not public and may be reached all the same, by whoever is allowed to by name or number. Addresses
    /// of this host itself are not, unless each is listed on its own.
    pub private: Vec<Destination>,
    /// Networks that are public and are not reached all the same.
    pub closed: Vec<Destination>,
    /// Services whose names are not looked up. They may be anywhere, on this host as well.
    pub hosts: Vec<EgressHost>,
    /// How many connections each sandbox may have at a time.
    pub connections: usize,
    /// Looks up all other names.
    pub resolver: Arc<dyn Resolve>,
}

impl Default for EgressOptions {
    fn default() -> Self {
        Self {
            enabled: true,
            private: Vec::new(),
            closed: Vec::new(),
            hosts: Vec::new(),
            connections: 256,
            resolver: Arc::new(SystemResolver),
        }
    }
}

/// A service that sandboxes reach by a name that is nobody else's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressHost {
    /// Its canonical name.
    pub name: String,
    /// Its port. Nothing else of the host that it is on is meant.
    pub port: u16,
    /// Where it is.
    pub address: IpAddr,
}

impl FromStr for EgressHost {
    type Err = crate::NoDestination;

    /// Reads `NAME:PORT=ADDRESS`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (service, address) = text.split_once('=').ok_or(crate::NoDestination)?;
        let service: Destination = service.trim().parse()?;
        match (service.host, service.port, address.trim().parse()) {
            (DestinationHost::Name(name), Some(port), Ok(address)) if !name.starts_with('*') => {
                Ok(Self { name, port, address })
            }
            _ => Err(crate::NoDestination),
        }
    }
}

/// What all sandboxes go by that reach anything, of one backend or of several, and what they have together.
#[derive(Debug)]
pub struct Egress {
    options: EgressOptions,
    /// One for each connection that there may be; counted when the first is made.
    places: OnceLock<Arc<Semaphore>>,
    lookups: Arc<Semaphore>,
}

impl Egress {
    /// Returns one in which there is nobody yet.
    #[must_use]
    pub fn new(options: EgressOptions) -> Arc<Self> {
        let lookups = Arc::new(Semaphore::new(MAX_LOOKUPS));
        Arc::new(Self { options, places: OnceLock::new(), lookups })
    }

    /// Returns the places of connections. Not counted before there is one: a daemon has its descriptors only once it has
    /// its backends.
    fn places(&self) -> &Arc<Semaphore> {
        let limit = || getrlimit(Resource::Nofile).current;
        self.places.get_or_init(|| Arc::new(Semaphore::new(room_for_connections(limit()))))
    }
}

/// Says how many connections there may be with so many descriptors.
fn room_for_connections(descriptors: Option<u64>) -> usize {
    let share = descriptors.map(|all| usize::try_from(all / CONNECTIONS_SHARE));
    share.and_then(Result::ok).unwrap_or(MAX_CONNECTIONS).clamp(1, MAX_CONNECTIONS)
}

impl From<EgressOptions> for Arc<Egress> {
    fn from(options: EgressOptions) -> Self {
        Egress::new(options)
    }
}

/// What one sandbox may reach.
#[derive(Debug)]
pub(crate) struct Policy {
    egress: Arc<Egress>,
    allowed: Vec<Destination>,
    /// Whether everything public is.
    everything: bool,
    /// How much of that at the moment.
    reach: watch::Sender<Rules>,
    lookups: Arc<Semaphore>,
    /// Of these, those that take no place from others.
    reserved: Arc<Semaphore>,
    /// What it was refused.
    pub(crate) barred: Tally,
}

/// How much is reached, with what is read off it once: each request of a command is held against it.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    reach: Reach,
    is_closed: bool,
}

impl From<Reach> for Rules {
    fn from(reach: Reach) -> Self {
        Self { is_closed: reach.is_closed(), reach }
    }
}

/// Why something is not reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allowed,
    NotAllowed,
    NotPublic,
}

/// Reports whether a spec asks for anything beyond the sandbox's own loopback.
pub(crate) fn is_asked(spec: &SandboxSpec) -> bool {
    spec.network_enabled || !spec.allowed_network.is_empty()
}

impl Policy {
    /// Reads what a spec asks for, if it asks for anything; what nobody could have is refused.
    pub(crate) fn of(
        spec: &SandboxSpec,
        profile: &Profile,
        backend: &str,
        egress: &Arc<Egress>,
    ) -> Result<Option<Arc<Self>>> {
        if !is_asked(spec) {
            return Ok(None);
        }
        let unsupported = |feature: String, hint: &str| SandboxError::Unsupported {
            feature,
            backend: backend.to_owned(),
            hint: hint.to_owned(),
        };
        if !egress.options.enabled {
            let hint = "set `egress.enabled`, or leave `network_enabled` and `allowed_network` out";
            return Err(unsupported("a network for sandboxes: it is switched off".into(), hint));
        }
        if !profile.tcp {
            let feature = format!("a network in profile `{}`, which has no TCP", spec.profile);
            return Err(unsupported(feature, "use the profile `default`"));
        }
        let mut allowed = Vec::new();
        for (i, text) in spec.allowed_network.iter().enumerate() {
            let field = format!("allowed_network[{i}]");
            let destination: Destination = text.parse().map_err(|no: crate::NoDestination| {
                let reason = format!("`{}` is no destination", text.escape_debug());
                SandboxError::invalid(&field, reason, no.to_string())
            })?;
            egress.check(&field, &destination)?;
            allowed.push(destination);
        }
        let everything = allowed.is_empty();
        Ok(Some(Self::new(egress, allowed, everything)))
    }

    /// Reads what of a spec is left to a sandbox that there is already: whoever runs Warren may let less be reached than
    /// before. `any` tells whether there is a network for it at all.
    pub(crate) fn left(spec: &SandboxSpec, any: bool, egress: &Arc<Egress>) -> Arc<Self> {
        let any = any && egress.options.enabled;
        let asked = spec.allowed_network.iter().filter(|_| any);
        let parsed = asked.filter_map(|text| text.parse::<Destination>().ok());
        let allowed = parsed.filter(|one| egress.check("allowed_network", one).is_ok()).collect();
        // Not because nothing of a list is left.
        let everything = any && spec.allowed_network.is_empty();
        Self::new(egress, allowed, everything)
    }

    fn new(egress: &Arc<Egress>, allowed: Vec<Destination>, everything: bool) -> Arc<Self> {
        let room = |places| Arc::new(Semaphore::new(places));
        let (lookups, reserved) = (room(LOOKUPS_EACH), room(LOOKUPS_RESERVED));
        let (egress, reach, barred) = (egress.clone(), watch::Sender::default(), Tally::default());
        Arc::new(Self { egress, allowed, everything, reach, lookups, reserved, barred })
    }

    /// Reports whether it lets this be reached, as somebody wrote it.
    pub(crate) fn has(&self, text: &str) -> bool {
        text.parse().is_ok_and(|destination| self.allowed.contains(&destination))
    }

    /// Refuses what no sandbox could be let reach, or denied.
    pub(crate) fn check(&self, reach: &Reach) -> Result<()> {
        let (count, most) = (reach.deny.len() + reach.allow.len(), Reach::MAX_ENTRIES);
        if count > most {
            let (reason, hint) = (format!("there are {count} entries"), format!("at most {most}"));
            return Err(SandboxError::invalid("deny and allow", reason, hint));
        }
        if let Some(name) = reach.denied_name() {
            let hint = "deny everything, 0.0.0.0/0 and ::/0, and allow the rest";
            return Err(SandboxError::invalid("deny", format!("`{name}` is no network"), hint));
        }
        let allowed = reach.allow.iter().filter(|one| !Destination::EVERY_ADDRESS.contains(one));
        allowed.into_iter().try_for_each(|one| self.egress.check("allow", one))
    }

    /// Has this much of it be reached from now on.
    pub(crate) fn set_reach(&self, reach: Reach) {
        self.reach.send_replace(reach.into());
    }

    /// Returns how much of it is reached.
    pub(crate) fn reach(&self) -> Reach {
        self.reach.borrow().reach.clone()
    }

    /// Says what init takes on for it.
    pub(crate) fn plan(&self) -> plan::Egress {
        if self.everything {
            let private: Vec<_> = self.egress.private_ranges().collect();
            let mut closed = public::closed();
            closed.retain(|range| !private.contains(range));
            return plan::Egress {
                names: vec![domain::EVERY.to_owned()],
                ranges: public::EVERYTHING.into_iter().chain(private).collect(),
                closed,
            };
        }
        let mut planned = plan::Egress::default();
        for destination in &self.allowed {
            match &destination.host {
                DestinationHost::Name(name) => planned.names.push(name.clone()),
                DestinationHost::Range(address, bits) => {
                    planned.ranges.push(Range { address: *address, bits: *bits });
                }
            }
        }
        planned
    }

    /// Decides about the host of a canonical name, wherever that leads.
    pub(crate) fn allows_name(&self, name: &str, port: u16) -> bool {
        let allowed = || self.allowed.iter().any(|allowed| allowed.is_name(name, port));
        let rules = self.reach.borrow();
        (self.everything || allowed()) && (!rules.is_closed || rules.reach.names(name, port))
    }

    /// Decides about one address that an allowed name leads to.
    pub(crate) fn judge_lead(&self, name: &str, address: IpAddr, port: u16) -> Verdict {
        let (address, rules) = (address.to_canonical(), self.reach.borrow());
        match rules.reach.lets_address(Some(name), address, port) {
            true if self.may_dial(&rules.reach, Some(name), address, port) => Verdict::Allowed,
            true => Verdict::NotPublic,
            false => Verdict::NotAllowed,
        }
    }

    /// Decides about an address that was asked for as such.
    pub(crate) fn judge_address(&self, address: IpAddr, port: u16) -> Verdict {
        let (address, rules) = (address.to_canonical(), self.reach.borrow());
        let allowed = || self.allowed.iter().any(|allowed| allowed.is_address(address, port));
        match rules.reach.lets_address(None, address, port) && (self.everything || allowed()) {
            true if self.may_dial(&rules.reach, None, address, port) => Verdict::Allowed,
            true => Verdict::NotPublic,
            false => Verdict::NotAllowed,
        }
    }

    /// Reports whether an address is public, or let be reached although it is not, by who asked for it: whoever asked for
    /// everything asked for what is everybody's.
    fn may_dial(&self, reach: &Reach, name: Option<&str>, address: IpAddr, port: u16) -> bool {
        let options = &self.egress.options;
        let has = |list: &[Destination]| list.iter().any(|range| range.is_address(address, port));
        if is_public(address) {
            return !has(&options.closed);
        }
        let means = |one: &Destination| {
            let number = one.is_address(address, port) && !Destination::EVERY_ADDRESS.contains(one);
            number || name.is_some_and(|name| one.is_name(name, port))
        };
        has(&options.private) && self.allowed.iter().chain(&reach.allow).any(means)
    }

    /// Reports whether an address of this host itself was let be reached, one by one.
    fn may_be_ours(&self, address: IpAddr) -> bool {
        let exactly = |range: Range| range.address == address && range.bits == width(address);
        self.egress.private_ranges().any(exactly)
    }

    /// Waits until another name may be looked up.
    async fn look_up(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        let closed = |_| io::Error::from(io::ErrorKind::NotConnected);
        let own = self.lookups.clone().acquire_owned().await.map_err(closed)?;
        let place = tokio::select! {
            biased;
            reserved = self.reserved.clone().acquire_owned() => reserved,
            shared = self.egress.lookups.clone().acquire_owned() => shared,
        };
        let busy = Busy::new(own, place.map_err(closed)?);
        self.egress.options.resolver.resolve(name, busy).await
    }

    /// Reports whether what is said has to be looked at: where every name may be reached, it does not matter which is.
    fn is_guarded(&self) -> bool {
        !self.everything || self.reach.borrow().is_closed
    }
}

impl Egress {
    /// Refuses a network that nobody could be let reach.
    fn check(&self, field: &str, destination: &Destination) -> Result<()> {
        let DestinationHost::Range(address, bits) = destination.host else { return Ok(()) };
        let range = Range { address, bits };
        let invalid = |reason: &str, hint: &str| {
            Err(SandboxError::invalid(field, format!("`{destination}` {reason}"), hint))
        };
        if public::is_loopback(&range) {
            return invalid(
                "is the sandbox's own loopback, not the host's",
                "give the host's service a name in `egress.hosts`, and allow that name",
            );
        }
        if !public::overlaps_public(&range) && !self.has_private(&range) {
            return invalid(
                "is not public",
                "whoever runs the daemon can let it be reached: `egress.private`",
            );
        }
        Ok(())
    }

    fn private_ranges(&self) -> impl Iterator<Item = Range> {
        self.options.private.iter().filter_map(|private| match private.host {
            DestinationHost::Range(address, bits) => Some(Range { address, bits }),
            DestinationHost::Name(_) => None,
        })
    }

    fn has_private(&self, asked: &Range) -> bool {
        self.private_ranges().any(|own| own.bits <= asked.bits && has(&own, asked.address))
    }

    /// Returns where a service is that somebody gave this name; nowhere, if it is another of the same name.
    fn host(&self, name: &str, port: u16) -> Option<Option<IpAddr>> {
        let mut own = self.options.hosts.iter().filter(|host| host.name == name).peekable();
        own.peek()?;
        Some(own.find(|host| host.port == port).map(|host| host.address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(allowed: &[&str], options: EgressOptions) -> Result<Arc<Policy>> {
        let spec = SandboxSpec {
            network_enabled: allowed.is_empty(),
            allowed_network: allowed.iter().map(|text| (*text).to_owned()).collect(),
            ..SandboxSpec::default()
        };
        let profile = crate::profile::profile("default").unwrap();
        Ok(Policy::of(&spec, profile, "linux", &Egress::new(options))?.unwrap())
    }

    #[test]
    fn n6_what_is_not_public_is_not_reached_whatever_was_allowed() {
        let policy = policy(&["0.0.0.0/0", "::/0"], EgressOptions::default()).unwrap();
        for address in [
            "127.0.0.1",
            "10.0.0.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "169.254.169.254",
            "168.63.129.16",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "255.255.255.255",
            "192.0.2.1",
            "198.18.0.1",
            "::1",
            "::",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "2002:a00:1::",
            "ff02::1",
            "2001:db8::1",
        ] {
            let verdict = policy.judge_address(address.parse().unwrap(), 80);
            assert_eq!(verdict, Verdict::NotPublic, "{address}");
        }
        for address in ["1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:1.1.1.1"]
        {
            let verdict = policy.judge_address(address.parse().unwrap(), 80);
            assert_eq!(verdict, Verdict::Allowed, "control: {address}");
        }
    }

    #[test]
    fn what_cannot_be_reached_is_refused_when_it_is_asked_for() {
        let asked =
            |text: &str, options| policy(&[text], options).map(drop).map_err(|e| e.to_string());
        assert!(asked("10.0.0.0/8", EgressOptions::default()).unwrap_err().contains("not public"));
        assert!(asked("127.0.0.1", EgressOptions::default()).unwrap_err().contains("own loopback"));
        assert!(asked("::1", EgressOptions::default()).unwrap_err().contains("own loopback"));
        let private = || EgressOptions {
            private: vec!["10.0.0.0/8".parse().unwrap()],
            ..EgressOptions::default()
        };
        assert_eq!(asked("10.1.0.0/16", private()), Ok(()));
        assert!(asked("192.168.0.1", private()).unwrap_err().contains("not public"));
        let off = EgressOptions { enabled: false, ..EgressOptions::default() };
        assert!(asked("example.org", off).unwrap_err().contains("switched off"));
    }

    #[test]
    fn what_is_private_is_reached_by_who_asked_for_it_and_not_for_everything() {
        let options = || EgressOptions {
            private: vec!["10.0.0.0/8".parse().unwrap()],
            closed: vec!["1.1.1.0/24".parse().unwrap()],
            ..EgressOptions::default()
        };
        let address = "10.1.2.3".parse().unwrap();
        let everything = policy(&[], options()).unwrap();
        assert_eq!(everything.judge_address(address, 80), Verdict::NotPublic);
        assert_eq!(everything.judge_lead("evil.example", address, 80), Verdict::NotPublic);
        let public = "8.8.8.8".parse().unwrap();
        assert_eq!(everything.judge_address(public, 80), Verdict::Allowed, "control");
        let closed = "::ffff:1.1.1.1".parse().unwrap();
        assert_eq!(everything.judge_address(closed, 80), Verdict::NotPublic, "closed");
        let allow = vec!["10.1.0.0/16".parse().unwrap(), "a.example".parse().unwrap()];
        everything.set_reach(Reach { deny: Vec::new(), allow });
        assert_eq!(everything.judge_address(address, 80), Verdict::Allowed, "it was named");
        assert_eq!(everything.judge_lead("a.example", address, 80), Verdict::Allowed);
        assert_eq!(everything.judge_lead("b.example", address, 80), Verdict::Allowed, "by number");
        let far = "10.9.9.9".parse().unwrap();
        assert_eq!(everything.judge_lead("b.example", far, 80), Verdict::NotPublic);
        let all = policy(&["0.0.0.0/0", "*.example"], options()).unwrap();
        assert_eq!(all.judge_address(address, 80), Verdict::NotPublic);
        assert_eq!(all.judge_lead("a.example", address, 80), Verdict::Allowed, "by name");
        assert!(!all.may_be_ours(address), "a network is not the host in it");
    }

    #[test]
    fn a_service_of_the_host_is_one_port() {
        let host = |text: &str| text.parse::<EgressHost>();
        let hosts = vec![host("llm.internal:8080 = 127.0.0.1").unwrap()];
        let policy = policy(&[], EgressOptions { hosts, ..EgressOptions::default() }).unwrap();
        let at = |name, port| policy.egress.host(name, port);
        assert_eq!(at("llm.internal", 8080), Some(Some("127.0.0.1".parse().unwrap())));
        assert_eq!(at("llm.internal", 22), Some(None), "and is looked up nowhere else");
        assert_eq!(at("example.org", 8080), None);
        for odd in
            ["a=127.0.0.1", "a:1", "*.a:1=127.0.0.1", "1.1.1.1:1=127.0.0.1", "a:1=b", "a:0=::1"]
        {
            assert!(host(odd).is_err(), "{odd}");
        }
    }

    #[test]
    fn only_what_is_allowed_is() {
        let policy = policy(&["pypi.org:443", "1.1.1.1"], EgressOptions::default()).unwrap();
        assert!(policy.allows_name("pypi.org", 443) && !policy.allows_name("pypi.org", 80));
        assert!(!policy.allows_name("evil.example", 443));
        assert_eq!(policy.judge_address("1.1.1.1".parse().unwrap(), 22), Verdict::Allowed);
        assert_eq!(policy.judge_address("1.1.1.2".parse().unwrap(), 22), Verdict::NotAllowed);
    }

    #[test]
    fn no_more_rules_are_taken_than_can_be_gone_through_for_each_request() {
        let policy = policy(&[], EgressOptions::default()).unwrap();
        let name = || "a.example".parse().unwrap();
        let deny = Destination::EVERY_ADDRESS.to_vec();
        let mut reach = Reach { deny, allow: vec![name(); Reach::MAX_ENTRIES - 2] };
        assert!(policy.check(&reach).is_ok(), "control");
        reach.allow.push(name());
        let error = policy.check(&reach).unwrap_err();
        assert_eq!(error.code(), "invalid_spec", "{error}");
    }

    #[test]
    fn what_is_denied_is_known_at_once_of_all_rules_that_are_set() {
        let policy = policy(&[], EgressOptions::default()).unwrap();
        let closed = |policy: &Policy| policy.reach.borrow().is_closed;
        assert!(!closed(&policy) && policy.allows_name("a.example", 80) && !policy.is_guarded());
        policy.set_reach(Reach { allow: vec!["b.example".parse().unwrap()], ..Reach::nothing() });
        assert!(closed(&policy) && !policy.allows_name("a.example", 80) && policy.is_guarded());
        assert!(policy.allows_name("b.example", 80));
        policy.set_reach(Reach::default());
        assert!(!closed(&policy) && policy.allows_name("a.example", 80));
    }

    #[test]
    fn what_one_that_is_there_may_not_reach_any_more_is_dropped_and_the_rest_stays() {
        let asked = |allowed: &[&str]| SandboxSpec {
            network_enabled: allowed.is_empty(),
            allowed_network: allowed.iter().map(|text| (*text).to_owned()).collect(),
            ..SandboxSpec::default()
        };
        let egress = Egress::new(EgressOptions::default());
        let of = |texts: &[&str], any| Policy::left(&asked(texts), any, &egress);
        let (private, public) = ("10.1.2.3".parse().unwrap(), "1.1.1.1".parse().unwrap());
        let some = of(&["10.1.0.0/16", "pypi.org", "1.1.1.1", "no such thing"], true);
        assert!(some.allows_name("pypi.org", 443) && some.has("pypi.org"));
        assert_eq!(some.judge_address(public, 80), Verdict::Allowed);
        assert_eq!(some.judge_address(private, 80), Verdict::NotAllowed);
        assert!(!some.has("10.1.0.0/16") && !some.has("no such thing"));
        let plan = some.plan();
        assert_eq!((plan.names, plan.ranges.len()), (vec!["pypi.org".to_owned()], 1));
        // Nothing is left of a list, which is not the same as no list.
        let off = Egress::new(EgressOptions { enabled: false, ..EgressOptions::default() });
        for none in [
            of(&["10.1.0.0/16"], true),
            of(&["pypi.org"], false),
            of(&[], false),
            Policy::left(&asked(&[]), true, &off),
            Policy::left(&asked(&["pypi.org"]), true, &off),
        ] {
            assert!(!none.allows_name("pypi.org", 443) && none.plan().is_empty(), "{none:?}");
            assert_eq!(none.judge_address(public, 80), Verdict::NotAllowed, "{none:?}");
        }
        let all = of(&[], true);
        assert!(all.allows_name("pypi.org", 443), "control: everything is still everything");
    }

    #[test]
    fn connections_leave_descriptors_for_everything_else() {
        for (descriptors, room) in [
            (Some(4096), 1024),
            (Some(1024), 256),
            (Some(1 << 20), MAX_CONNECTIONS),
            (Some(u64::MAX), MAX_CONNECTIONS),
            (Some(3), 1),
            (None, MAX_CONNECTIONS),
        ] {
            assert_eq!(room_for_connections(descriptors), room, "{descriptors:?}");
        }
    }

    /// Never answers for some names, as a thread does not that nobody can stop.
    #[derive(Debug, Default)]
    struct Deaf {
        waiting: std::sync::Mutex<Vec<Busy>>,
    }

    #[async_trait::async_trait]
    impl Resolve for Deaf {
        async fn resolve(&self, name: &str, busy: Busy) -> io::Result<Vec<IpAddr>> {
            if name != "good.example" {
                self.waiting.lock().unwrap().push(busy);
                std::future::pending::<()>().await;
            }
            Ok(vec!["1.1.1.1".parse().unwrap()])
        }
    }

    #[tokio::test(start_paused = true)]
    async fn n11_names_that_nobody_answers_for_take_the_last_place_of_no_other_sandbox() {
        let resolver = Arc::new(Deaf::default());
        let options = EgressOptions { resolver: resolver.clone(), ..EgressOptions::default() };
        let egress = Egress::new(options);
        let spec = SandboxSpec::default();
        let sandbox = || Policy::left(&spec, false, &egress);
        let waiting = || resolver.waiting.lock().unwrap().len();
        // Each has the one place of its own besides.
        let hostile: Vec<_> =
            (0..MAX_LOOKUPS / (LOOKUPS_EACH - LOOKUPS_RESERVED) + 1).map(|_| sandbox()).collect();
        let mut asked = tokio::task::JoinSet::new();
        for policy in hostile.iter().cycle().take(hostile.len() * 2 * LOOKUPS_EACH) {
            let policy = Arc::clone(policy);
            asked.spawn(async move { policy.look_up("deaf.example").await });
        }
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        assert_eq!(waiting(), MAX_LOOKUPS + hostile.len(), "control: all places are taken");
        let honest = sandbox();
        let patience = std::time::Duration::from_secs(10);
        let all = (0..20).map(|_| honest.look_up("good.example"));
        let found = tokio::time::timeout(patience, futures_util::future::join_all(all)).await;
        assert!(found.expect("they are looked up").iter().all(Result::is_ok));
        assert_eq!(waiting(), MAX_LOOKUPS + hostile.len(), "and nobody made room for that");
    }
}
