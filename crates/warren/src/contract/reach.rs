//! What a sandbox may reach for the time being.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{Destination, DestinationHost};

/// What a sandbox may reach of what its spec lets it, for the time being: all but what is denied. It never adds to
/// that.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reach {
    /// Networks that are not reached, also by a name that leads there.
    pub deny: Vec<Destination>,
    /// What is reached all the same. A name is, wherever it leads.
    pub allow: Vec<Destination>,
}

impl Reach {
    /// How many entries both lists may have together: each connection, and each request on it, is held against all of
    /// them.
    pub const MAX_ENTRIES: usize = 1_024;

    /// Returns that nothing is reached.
    pub fn nothing() -> Self {
        Self { deny: Destination::EVERY_ADDRESS.into(), allow: Vec::new() }
    }

    /// Reports whether names have to be among what is allowed: no others are even looked up.
    pub(crate) fn is_closed(&self) -> bool {
        let all_of = |list: &[Destination]| {
            Destination::EVERY_ADDRESS.iter().all(|every| list.contains(every))
        };
        all_of(&self.deny) && !all_of(&self.allow)
    }

    /// Decides about an address, and the canonical name that led there, if one did.
    pub(crate) fn lets_address(&self, name: Option<&str>, address: IpAddr, port: u16) -> bool {
        let address = address.to_canonical();
        let is = |list: &[Destination]| list.iter().any(|one| one.is_address(address, port));
        name.is_some_and(|name| self.names(name, port)) || is(&self.allow) || !is(&self.deny)
    }

    /// Reports whether a canonical name is among what is allowed.
    pub(crate) fn names(&self, name: &str, port: u16) -> bool {
        self.allow.iter().any(|one| one.is_name(name, port))
    }

    /// Returns the first denial that is of a name: where that leads is up to whoever answers for it.
    pub(crate) fn denied_name(&self) -> Option<&Destination> {
        self.deny.iter().find(|one| matches!(one.host, DestinationHost::Name(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reach(deny: &[&str], allow: &[&str]) -> Reach {
        let list = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        Reach { deny: list(deny), allow: list(allow) }
    }

    #[test]
    fn what_is_allowed_outranks_what_is_denied() {
        let all = &["0.0.0.0/0", "::/0"];
        let lets = |reach: &Reach, name: Option<&str>, address: &str| {
            let named = |name| !reach.is_closed() || reach.names(name, 443);
            name.is_none_or(named) && reach.lets_address(name, address.parse().unwrap(), 443)
        };
        for (deny, allow, name, address, expected) in [
            (&[][..], &[][..], Some("a.example"), "1.1.1.1", true),
            (&["8.8.8.8"], &[], None, "8.8.8.8", false),
            (&["8.8.8.8"], &[], None, "::ffff:8.8.8.8", false),
            (&["8.8.8.8"], &[], Some("a.example"), "8.8.8.8", false),
            (&["8.8.8.8"], &[], Some("a.example"), "1.1.1.1", true),
            (&["8.8.0.0/16"], &["8.8.8.8"], None, "8.8.8.8", true),
            (&["8.8.0.0/16"], &["8.8.8.8"], None, "8.8.4.4", false),
            (&["8.8.0.0/16"], &["a.example"], Some("a.example"), "8.8.4.4", true),
            (all, &[], None, "1.1.1.1", false),
            (all, &[], None, "2606:4700::1111", false),
            (all, &[], Some("a.example"), "1.1.1.1", false),
            (all, &["1.1.1.1"], None, "1.1.1.1", true),
            (all, &["1.1.1.1"], Some("a.example"), "1.1.1.1", false),
            (all, &["*.example"], Some("a.example"), "1.1.1.1", true),
            (all, &["*.example"], Some("a.example.evil"), "1.1.1.1", false),
            (all, &["a.example:80"], Some("a.example"), "1.1.1.1", false),
            (all, all, Some("a.example"), "1.1.1.1", true),
            (all, &["0.0.0.0/0"], None, "1.1.1.1", true),
            (all, &["0.0.0.0/0"], None, "2606:4700::1111", false),
        ] {
            let rules = reach(deny, allow);
            assert_eq!(lets(&rules, name, address), expected, "{rules:?} {name:?} {address}");
        }
        assert_eq!(Reach::nothing(), reach(all, &[]));
    }

    #[test]
    fn it_is_written_as_it_is_said() {
        let rules = reach(&["8.8.0.0/16"], &["*.a.example:443", "::1", "[::1]:80", "1.1.1.1:53"]);
        let written = serde_json::to_string(&rules).unwrap();
        let said =
            r#"{"deny":["8.8.0.0/16"],"allow":["*.a.example:443","::1","[::1]:80","1.1.1.1:53"]}"#;
        assert_eq!(written, said);
        assert_eq!(serde_json::from_str::<Reach>(&written).unwrap(), rules);
        for bad in [r#"{"deny":["http://a"]}"#, r#"{"denied":[]}"#, r#"{"allow":[1]}"#] {
            assert!(serde_json::from_str::<Reach>(bad).is_err(), "{bad}");
        }
    }
}
