//! Where a sandbox may connect to.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use warren_init::domain;
use warren_init::plan::Range;

/// One entry of `allowed_network`: a host, `*.domain`, address or network, and perhaps one port of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Destination {
    /// Whom.
    pub host: DestinationHost,
    /// Which of its ports; all of them if absent.
    pub port: Option<u16>,
}

/// Whom a [`Destination`] means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DestinationHost {
    /// The host of this name, or with `*.` in front all below it, in lower case.
    Name(String),
    /// All addresses that begin with the same bits as this one.
    Range(IpAddr, u8),
}

/// A text that is no destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoDestination;

impl fmt::Display for NoDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("write a host, host:port, *.domain, or a network such as 10.0.0.0/8")
    }
}

impl std::error::Error for NoDestination {}

impl FromStr for Destination {
    type Err = NoDestination;

    fn from_str(text: &str) -> Result<Self, NoDestination> {
        if let Some((address, bits)) = text.split_once('/') {
            let address: IpAddr = address.parse().map_err(|_| NoDestination)?;
            let bits = decimal(bits).and_then(|bits| u8::try_from(bits).ok());
            let bits = bits.filter(|bits| *bits <= width(address)).ok_or(NoDestination)?;
            let (address, bits) = canonical(first(address, bits), bits)?;
            let host = DestinationHost::Range(address, bits);
            return Ok(Self { host, port: None });
        }
        if let Ok(address) = text.parse() {
            return Ok(Self { host: one(address), port: None });
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => {
                let port = decimal(port).filter(|port| *port > 0).ok_or(NoDestination)?;
                (host, Some(port))
            }
            None => (text, None),
        };
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match (bracketed, host.parse()) {
            (Some(address), _) => match address.parse() {
                Ok(address @ IpAddr::V6(_)) => one(address),
                _ => return Err(NoDestination),
            },
            (None, Ok(address @ IpAddr::V4(_))) => one(address),
            (None, _) => {
                let (wild, name) = match host.strip_prefix("*.") {
                    Some(name) => ("*.", name),
                    None => ("", host),
                };
                let name = domain::canonical(name.as_bytes()).ok_or(NoDestination)?;
                DestinationHost::Name(format!("{wild}{name}"))
            }
        };
        Ok(Self { host, port })
    }
}

impl TryFrom<String> for Destination {
    type Error = NoDestination;

    fn try_from(text: String) -> Result<Self, NoDestination> {
        text.parse()
    }
}

impl From<Destination> for String {
    fn from(destination: Destination) -> Self {
        destination.to_string()
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.host, self.port) {
            (DestinationHost::Name(name), None) => f.write_str(name),
            (DestinationHost::Name(name), Some(port)) => write!(f, "{name}:{port}"),
            (DestinationHost::Range(address, bits), _) if *bits < width(*address) => {
                write!(f, "{address}/{bits}")
            }
            (DestinationHost::Range(address, _), None) => write!(f, "{address}"),
            (DestinationHost::Range(address, _), Some(port)) => {
                write!(f, "{}", SocketAddr::new(*address, port))
            }
        }
    }
}

impl Destination {
    /// Every address that there is.
    pub const EVERY_ADDRESS: [Self; 2] = [
        Self { host: DestinationHost::Range(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0), port: None },
        Self { host: DestinationHost::Range(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0), port: None },
    ];

    /// Reports whether this means the host of a canonical name.
    pub fn is_name(&self, name: &str, port: u16) -> bool {
        let DestinationHost::Name(pattern) = &self.host else { return false };
        self.port.is_none_or(|own| own == port) && domain::matches(pattern, name)
    }

    /// Reports whether this means addresses none of which is public.
    pub fn is_private(&self) -> bool {
        let DestinationHost::Range(address, bits) = self.host else { return false };
        !crate::egress::overlaps_public(&Range { address, bits })
    }

    /// Reports whether this means an address.
    pub fn is_address(&self, address: IpAddr, port: u16) -> bool {
        let DestinationHost::Range(first, bits) = self.host else { return false };
        self.port.is_none_or(|own| own == port) && has(&Range { address: first, bits }, address)
    }
}

fn one(address: IpAddr) -> DestinationHost {
    let address = address.to_canonical();
    DestinationHost::Range(address, width(address))
}

/// Writes a network of IPv4 that is wrapped in IPv6 as what it is. One that has others as well would mean what nobody
/// asks about, since an address is never wrapped when it is decided about.
fn canonical(address: IpAddr, bits: u8) -> Result<(IpAddr, u8), NoDestination> {
    match (address, address.to_canonical()) {
        (IpAddr::V6(_), IpAddr::V4(inner)) => {
            let bits = bits.checked_sub(96).ok_or(NoDestination)?;
            Ok((inner.into(), bits))
        }
        _ => Ok((address, bits)),
    }
}

/// Returns the first address that has these bits in common with another.
fn first(address: IpAddr, bits: u8) -> IpAddr {
    let left = u32::from(width(address) - bits);
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(left).unwrap_or(0);
            Ipv4Addr::from(u32::from(address) & mask).into()
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(left).unwrap_or(0);
            Ipv6Addr::from(u128::from(address) & mask).into()
        }
    }
}

/// Returns how many bits an address has.
pub(crate) fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn decimal(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if digits { text.parse().ok() } else { None }
}

/// Reports whether a range has an address.
pub(crate) fn has(range: &Range, address: IpAddr) -> bool {
    let bits = |address: IpAddr| match address {
        IpAddr::V4(address) => (u128::from(u32::from(address)) << 96, false),
        IpAddr::V6(address) => (u128::from(address), true),
    };
    let ((first, v6), (own, own_v6)) = (bits(range.address), bits(address));
    let left = 128 - u32::from(range.bits.min(width(range.address)));
    v6 == own_v6 && (first ^ own).checked_shr(left).unwrap_or(0) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_means_what_it_says_and_nothing_else() {
        let means = |text: &str, name: &str, port| {
            let destination: Destination = text.parse().unwrap();
            match name.parse() {
                Ok(address) => destination.is_address(address, port),
                Err(_) => destination.is_name(name, port),
            }
        };
        for (text, name, port, expected) in [
            ("example.org", "example.org", 443, true),
            ("Example.Org.", "example.org", 1, true),
            ("example.org:443", "example.org", 443, true),
            ("example.org:443", "example.org", 80, false),
            ("example.org", "a.example.org", 443, false),
            ("*.example.org", "a.example.org", 443, true),
            ("*.example.org:443", "example.org", 443, false),
            ("10.0.0.0/8", "10.255.0.1", 22, true),
            ("10.9.9.9/8", "10.255.0.1", 22, true),
            ("10.0.0.0/8", "11.0.0.1", 22, false),
            ("10.1.2.3:80", "10.1.2.3", 80, true),
            ("10.1.2.3:80", "10.1.2.3", 81, false),
            ("10.1.2.3", "10.1.2.4", 80, false),
            ("0.0.0.0/0", "1.1.1.1", 80, true),
            ("0.0.0.0/0", "2001:db8::1", 80, false),
            ("::/0", "2001:db8::1", 80, true),
            ("2001:db8::/32", "2001:db8::1", 80, true),
            ("2001:db8::/32", "2001:db9::1", 80, false),
            ("[2001:db8::1]:80", "2001:db8::1", 80, true),
            ("::ffff:8.8.8.8", "8.8.8.8", 80, true),
            ("[::ffff:8.8.8.8]:80", "8.8.8.8", 80, true),
            ("::ffff:8.8.0.0/112", "8.8.8.8", 80, true),
            ("::ffff:8.8.0.0/112", "8.9.0.1", 80, false),
        ] {
            assert_eq!(means(text, name, port), expected, "{text} {name}:{port}");
        }
    }

    #[test]
    fn what_is_private_has_nothing_public() {
        for (text, expected) in [
            ("10.0.0.0/8", true),
            ("192.168.1.1:80", true),
            ("fd00::/8", true),
            ("::ffff:10.0.0.1", true),
            ("127.0.0.1", true),
            ("0.0.0.0/0", false),
            ("::/0", false),
            ("8.0.0.0/6", false),
            ("1.1.1.1", false),
            ("a.internal", false),
        ] {
            assert_eq!(text.parse::<Destination>().unwrap().is_private(), expected, "{text}");
        }
    }

    #[test]
    fn no_destination_is_told_from_one() {
        for text in [
            "",
            "*",
            "a b",
            "a:0",
            "a:99999",
            "a:+1",
            "10.0.0.0/33",
            "::/129",
            "http://a",
            "a/8",
            "0x7f.1",
            "2130706433",
            "0177.0.0.1",
            "user@a",
            "a%00",
            "*.*.a",
            "b\u{fc}cher.example",
            "[10.0.0.1]:80",
            "[a]:80",
        ] {
            assert_eq!(text.parse::<Destination>(), Err(NoDestination), "{text}");
        }
    }
}
