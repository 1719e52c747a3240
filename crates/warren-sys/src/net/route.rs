//! Routes of a network that has no interface but its loopback.

use std::collections::HashSet;
use std::ffi::c_int;
use std::io;
use std::net::{IpAddr, Ipv4Addr};

use super::netlink::{Kernel, ROUTES, Request};

/// The addresses that begin with the first `bits` of `address`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Range {
    /// The first of them.
    pub address: IpAddr,
    /// How many bits they share.
    pub bits: u8,
}

/// What becomes of what is sent to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// It arrives here, as if each address were this machine's own.
    Here,
    /// It is refused at once: the host is unreachable.
    Nowhere,
}

/// Where what is sent to an address goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lead {
    /// To this machine itself, or to all of a network.
    Here,
    /// To another machine.
    Away,
    /// To nobody: there is no route.
    Nowhere,
}

/// Says where what is sent to `address` would go, by the routes of this thread's network. Nothing is sent.
///
/// See rtnetlink(7), RTM_GETROUTE.
pub fn lead(address: IpAddr) -> io::Result<Lead> {
    let (family, bits) =
        if address.is_ipv4() { (libc::AF_INET, 32) } else { (libc::AF_INET6, 128) };
    let family = u8::try_from(family).map_err(io::Error::other)?;
    let header = [family, bits, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut question = Request::default();
    question.message(libc::RTM_GETROUTE.into(), 0, &header, |message| match address {
        IpAddr::V4(address) => message.attribute(DESTINATION, &address.octets()),
        IpAddr::V6(address) => message.attribute(DESTINATION, &address.octets()),
    });
    /// Where struct rtmsg has its type.
    const TYPE: usize = 7;
    match Kernel::reach(ROUTES)?.tell(&question, libc::RTM_NEWROUTE.into()) {
        Ok(route) => match route.get(TYPE) {
            Some(&libc::RTN_UNICAST) => Ok(Lead::Away),
            Some(&libc::RTN_UNREACHABLE | &libc::RTN_PROHIBIT | &libc::RTN_BLACKHOLE) => {
                Ok(Lead::Nowhere)
            }
            // Local, broadcast, anycast and multicast ones.
            Some(_) => Ok(Lead::Here),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "a route without a type")),
        },
        Err(error) => match error.raw_os_error() {
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EAFNOSUPPORT) => {
                Ok(Lead::Nowhere)
            }
            // A hole has this errno, and so has nonsense: nothing of ours is.
            Some(libc::EINVAL) => Ok(Lead::Nowhere),
            _ => Err(error),
        },
    }
}

/// The index of `lo`, the same in every network namespace: see `loopback_net_init` in drivers/net/loopback.c.
const LOOPBACK: u32 = 1;

/// Adds a route for each range; of those that an address is in, the longest decides. See rtnetlink(7).
///
/// The loopback interface must be up. What it has of its own stays there: 127.0.0.1 and ::1 always, and the rest of
/// 127.0.0.0/8 if no range is longer than that. A range that is given twice the same way is added once.
///
/// # Errors
///
/// Returns the kernel's errno for the first range that it refuses, and leaves those before: `EEXIST` if there is a
/// route for that range, `EOPNOTSUPP` or `EAFNOSUPPORT` for IPv6 where the kernel has none. `EINVAL` if an address is
/// not the first of its range.
pub fn route(ranges: &[(Range, Way)]) -> io::Result<()> {
    let kernel = Kernel::reach(ROUTES)?;
    let mut added = HashSet::new();
    for &(range, way) in ranges {
        if added.insert((range, way)) {
            kernel.ask(&addition(range, way)?)?;
        }
    }
    Ok(())
}

/// Asks for one route.
fn addition(range: Range, way: Way) -> io::Result<Request> {
    // The kernel would refuse such an address of IPv4, and round one of IPv6 down.
    if !range.is_aligned() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let family = if range.address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let (kind, scope) = match way {
        Way::Here => (libc::RTN_LOCAL, libc::RT_SCOPE_HOST),
        Way::Nowhere => (libc::RTN_UNREACHABLE, libc::RT_SCOPE_UNIVERSE),
    };
    // The kernel asks its table `local` first, and `main` only if that has no answer: a longer range is sure to win
    // over a shorter one in the same table alone. In `main` they cannot collide with what `lo` itself has in `local`.
    let (table, origin) = (libc::RT_TABLE_MAIN, libc::RTPROT_STATIC);
    // struct rtmsg: family, bits of the destination, bits of the source, type of service, table, who made the route,
    // scope, type, and flags.
    let family = u8::try_from(family).map_err(io::Error::other)?;
    let header = [family, range.bits, 0, 0, table, origin, scope, kind, 0, 0, 0, 0];
    let flags = libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_EXCL;
    let mut request = Request::default();
    request.message(libc::RTM_NEWROUTE.into(), flags, &header, |message| {
        match range.address {
            IpAddr::V4(address) => message.attribute(DESTINATION, &address.octets()),
            IpAddr::V6(address) => message.attribute(DESTINATION, &address.octets()),
        }
        if way == Way::Here {
            message.attribute(libc::RTA_OIF.into(), &LOOPBACK.to_ne_bytes());
            // Without this a socket would send from the address that it sends to. If it then is given the port that
            // it asks for as its own as well, it is connected to itself. For IPv6 the kernel takes ::1 by itself.
            if range.address.is_ipv4() {
                let source = Ipv4Addr::LOCALHOST.octets();
                message.attribute(libc::RTA_PREFSRC.into(), &source);
            }
        }
    });
    Ok(request)
}

const DESTINATION: c_int = libc::RTA_DST as c_int;

impl Range {
    /// Whether `address` is its first address.
    fn is_aligned(&self) -> bool {
        let (address, width) = match self.address {
            IpAddr::V4(address) => (u128::from(address.to_bits()), 32),
            IpAddr::V6(address) => (address.to_bits(), 128),
        };
        // What remains has no bit set; all of an address may remain, and nothing.
        self.bits <= width
            && (address.trailing_zeros() >= u32::from(width - self.bits) || address == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_begins_with_its_address() {
        let aligned = |address: &str, bits| Range { address: address.parse().unwrap(), bits };
        for (address, bits) in
            [("0.0.0.0", 0), ("0.0.0.0", 32), ("10.0.0.0", 8), ("10.0.0.1", 32), ("128.0.0.0", 1)]
        {
            assert!(aligned(address, bits).is_aligned(), "{address}/{bits}");
        }
        for (address, bits) in [("::", 0), ("::", 128), ("fd00::", 8), ("::1", 128), ("8000::", 1)]
        {
            assert!(aligned(address, bits).is_aligned(), "{address}/{bits}");
        }
        for (address, bits) in [("10.0.0.1", 31), ("10.0.0.0", 6), ("1.0.0.0", 0), ("0.0.0.0", 33)]
        {
            assert!(!aligned(address, bits).is_aligned(), "{address}/{bits}");
        }
        for (address, bits) in [("::1", 127), ("fd00::", 7), ("1::", 0), ("::", 129)] {
            assert!(!aligned(address, bits).is_aligned(), "{address}/{bits}");
        }
    }
}
