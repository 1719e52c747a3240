//! Which addresses are everybody's.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use warren_init::plan::Range;

use crate::contract::has;

/// All addresses there are.
pub(super) const EVERYTHING: [Range; 2] = [
    Range { address: IpAddr::V4(Ipv4Addr::UNSPECIFIED), bits: 0 },
    // Of IPv6 the part that is given out (RFC 4291, 2.4): all others are for special use.
    Range { address: IpAddr::V6(Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0)), bits: 3 },
];

/// What of IPv4 is for special use. See IANA's registry (RFC 6890).
const SPECIAL_V4: [([u8; 4], u8); 16] = [
    ([0, 0, 0, 0], 8),
    ([10, 0, 0, 0], 8),
    ([100, 64, 0, 0], 10),
    ([127, 0, 0, 0], 8),
    ([169, 254, 0, 0], 16),
    // Azure's own for its machines, in no registry: it answers as 169.254.169.254 does, and gives more away.
    ([168, 63, 129, 16], 32),
    ([172, 16, 0, 0], 12),
    ([192, 0, 0, 0], 24),
    ([192, 0, 2, 0], 24),
    ([192, 88, 99, 0], 24),
    ([192, 168, 0, 0], 16),
    ([198, 18, 0, 0], 15),
    ([198, 51, 100, 0], 24),
    ([203, 0, 113, 0], 24),
    ([224, 0, 0, 0], 4),
    ([240, 0, 0, 0], 4),
];

/// What is so of the part of IPv6 that is given out: protocols, documentation, and what wraps an address of IPv4.
const SPECIAL_V6: [([u16; 2], u8); 4] =
    [([0x2001, 0], 23), ([0x2001, 0xdb8], 32), ([0x2002, 0], 16), ([0x3fff, 0], 20)];

fn special() -> impl Iterator<Item = Range> {
    let v4 = SPECIAL_V4.into_iter().map(|(address, bits)| Range { address: address.into(), bits });
    let v6 = SPECIAL_V6.into_iter().map(|([a, b], bits)| Range {
        address: Ipv6Addr::new(a, b, 0, 0, 0, 0, 0, 0).into(),
        bits,
    });
    v4.chain(v6)
}

/// Reports whether an address is one of the public Internet's.
pub(crate) fn is_public(address: IpAddr) -> bool {
    EVERYTHING.iter().any(|range| has(range, address))
        && !special().any(|range| has(&range, address))
}

/// Returns what is not, of [`EVERYTHING`], but for what is the loopback's anyway.
pub(super) fn closed() -> Vec<Range> {
    // The names' addresses are in one of them, and have to lead here.
    let own =
        |range: &Range| has(range, IpAddr::V4(Ipv4Addr::new(198, 18, 0, 1))) || is_loopback(range);
    special().filter(|range| !own(range)).collect()
}

/// Reports whether a range is of a loopback.
pub(super) fn is_loopback(range: &Range) -> bool {
    let address = range.address.to_canonical();
    address.is_loopback() && range.bits >= 8
}

/// Reports whether some of a range is public.
pub(crate) fn overlaps_public(range: &Range) -> bool {
    let within =
        |outer: &Range| outer.bits <= range.bits && has(outer, range.address.to_canonical());
    !special().any(|outer| within(&outer))
        && EVERYTHING.iter().any(|all| within(all) || has(range, all.address))
}
