//! Leading connections to one listener, whatever address they are for.
#![expect(unsafe_code, reason = "IP_TRANSPARENT has no safe wrapper")]

use std::ffi::c_int;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, listen, netlink, socket_with, sockopt,
};

use super::netlink::{Kernel, Request};

// From the kernel's linux/netfilter/nf_tables.h, where `libc` has the messages and not the attributes.
const NFTA_LIST_ELEM: c_int = 1;
const NFTA_TABLE_NAME: c_int = 1;
const NFTA_CHAIN_TABLE: c_int = 1;
const NFTA_CHAIN_NAME: c_int = 3;
const NFTA_CHAIN_HOOK: c_int = 4;
const NFTA_CHAIN_POLICY: c_int = 5;
const NFTA_CHAIN_TYPE: c_int = 7;
const NFTA_HOOK_HOOKNUM: c_int = 1;
const NFTA_HOOK_PRIORITY: c_int = 2;
const NFTA_RULE_TABLE: c_int = 1;
const NFTA_RULE_CHAIN: c_int = 2;
const NFTA_RULE_EXPRESSIONS: c_int = 4;
const NFTA_EXPR_NAME: c_int = 1;
const NFTA_EXPR_DATA: c_int = 2;
const NFTA_DATA_VALUE: c_int = 1;
const NFTA_META_DREG: c_int = 1;
const NFTA_META_KEY: c_int = 2;
const NFTA_CMP_SREG: c_int = 1;
const NFTA_CMP_OP: c_int = 2;
const NFTA_CMP_DATA: c_int = 3;
const NFTA_PAYLOAD_DREG: c_int = 1;
const NFTA_PAYLOAD_BASE: c_int = 2;
const NFTA_PAYLOAD_OFFSET: c_int = 3;
const NFTA_PAYLOAD_LEN: c_int = 4;
const NFTA_IMMEDIATE_DREG: c_int = 1;
const NFTA_IMMEDIATE_DATA: c_int = 2;
const NFTA_TPROXY_FAMILY: c_int = 1;
const NFTA_TPROXY_REG_ADDR: c_int = 2;
const NFTA_TPROXY_REG_PORT: c_int = 3;

/// NF_IP_PRI_MANGLE, from linux/netfilter_ipv4.h: before anything that could rewrite an address.
const PRIORITY: c_int = -150;

const TABLE: &str = "warren";
const CHAIN: &str = "divert";

/// Leads every TCP connection that arrives here, but for those to the loopback's own addresses, to what listens
/// transparently at `port` of 127.0.0.1 and ::1. See [`listen_transparently`], and "tproxy" in nft(8).
///
/// A connection that nobody listens for there goes on to where it was for. It is all or nothing, and the same as
///
/// ```text
/// table inet warren {
///     chain divert {
///         type filter hook prerouting priority -150; policy accept;
///         meta nfproto ipv4 meta l4proto tcp ip daddr != 127.0.0.0/8 tproxy ip to 127.0.0.1:PORT
///         meta nfproto ipv6 meta l4proto tcp ip6 daddr != ::1 tproxy ip6 to [::1]:PORT
///     }
/// }
/// ```
///
/// # Errors
///
/// Returns the kernel's errno: `EEXIST` if it was done before, `EINVAL` for port 0.
pub fn divert_tcp(port: u16) -> io::Result<()> {
    if port == 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut batch = Request::default();
    let begin = family_header(libc::AF_UNSPEC, libc::NFNL_SUBSYS_NFTABLES);
    batch.message(libc::NFNL_MSG_BATCH_BEGIN, 0, &begin, |_| {});
    batch.change(libc::NFT_MSG_NEWTABLE, libc::NLM_F_EXCL, |table| {
        table.text(NFTA_TABLE_NAME, TABLE);
    });
    batch.change(libc::NFT_MSG_NEWCHAIN, libc::NLM_F_EXCL, |chain| {
        chain.text(NFTA_CHAIN_TABLE, TABLE);
        chain.text(NFTA_CHAIN_NAME, CHAIN);
        chain.text(NFTA_CHAIN_TYPE, "filter");
        chain.number(NFTA_CHAIN_POLICY, libc::NF_ACCEPT);
        chain.nest(NFTA_CHAIN_HOOK, |hook| {
            hook.number(NFTA_HOOK_HOOKNUM, libc::NF_INET_PRE_ROUTING);
            hook.number(NFTA_HOOK_PRIORITY, PRIORITY);
        });
    });
    for address in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()] {
        batch.change(libc::NFT_MSG_NEWRULE, libc::NLM_F_APPEND, |rule| {
            rule.text(NFTA_RULE_TABLE, TABLE);
            rule.text(NFTA_RULE_CHAIN, CHAIN);
            rule.nest(NFTA_RULE_EXPRESSIONS, |rule| divert_to(rule, address, port));
        });
    }
    batch.message(libc::NFNL_MSG_BATCH_END, 0, &begin, |_| {});
    Kernel::reach(Some(netlink::NETFILTER))?.ask(&batch)
}

/// Writes a rule: what is TCP of the family of `address`, and not for the loopback, goes to there.
fn divert_to(rule: &mut Request, address: IpAddr, port: u16) {
    let (v4, v6);
    // All of 127.0.0.0/8 is the loopback's, and one address of IPv6; where a header has its destination.
    let (family, destination, own, address): (_, _, &[u8], &[u8]) = match address {
        IpAddr::V4(address) => {
            v4 = address.octets();
            (libc::NFPROTO_IPV4, 16, &v4[..1], &v4)
        }
        IpAddr::V6(address) => {
            v6 = address.octets();
            (libc::NFPROTO_IPV6, 24, &v6, &v6)
        }
    };
    rule.load_meta(libc::NFT_META_NFPROTO);
    rule.compare(libc::NFT_CMP_EQ, &[low_byte(family)]);
    rule.load_meta(libc::NFT_META_L4PROTO);
    rule.compare(libc::NFT_CMP_EQ, &[low_byte(libc::IPPROTO_TCP)]);
    rule.load_header(destination, own.len());
    rule.compare(libc::NFT_CMP_NEQ, own);
    rule.load_value(libc::NFT_REG_1, address);
    rule.load_value(libc::NFT_REG_2, &port.to_be_bytes());
    rule.expression("tproxy", |tproxy| {
        tproxy.number(NFTA_TPROXY_FAMILY, family);
        tproxy.number(NFTA_TPROXY_REG_ADDR, libc::NFT_REG_1);
        tproxy.number(NFTA_TPROXY_REG_PORT, libc::NFT_REG_2);
    });
}

/// struct nfgenmsg: a family, version 0, and which subsystem a batch is for.
fn family_header(family: c_int, subsystem: c_int) -> [u8; 4] {
    [low_byte(family), 0, 0, low_byte(subsystem)]
}

fn low_byte(number: c_int) -> u8 {
    number.to_le_bytes()[0]
}

/// What nftables is told, in its own words: it takes numbers with their highest byte first, and texts with a NUL.
impl Request {
    fn change(&mut self, kind: c_int, flags: c_int, body: impl FnOnce(&mut Self)) {
        let kind = libc::NFNL_SUBSYS_NFTABLES << 8 | kind;
        let flags = flags | libc::NLM_F_ACK | libc::NLM_F_CREATE;
        self.message(kind, flags, &family_header(libc::NFPROTO_INET, 0), body);
    }

    fn number(&mut self, kind: c_int, number: c_int) {
        self.attribute(kind, &number.to_be_bytes());
    }

    fn text(&mut self, kind: c_int, text: &str) {
        self.attribute(kind, &[text.as_bytes(), b"\0"].concat());
    }

    fn expression(&mut self, name: &str, data: impl FnOnce(&mut Self)) {
        self.nest(NFTA_LIST_ELEM, |element| {
            element.text(NFTA_EXPR_NAME, name);
            element.nest(NFTA_EXPR_DATA, data);
        });
    }

    /// Loads what is known of a packet, for the next comparison.
    fn load_meta(&mut self, key: c_int) {
        self.expression("meta", |meta| {
            meta.number(NFTA_META_KEY, key);
            meta.number(NFTA_META_DREG, libc::NFT_REG_1);
        });
    }

    /// Loads a piece of the header of IP, for the next comparison.
    fn load_header(&mut self, offset: c_int, length: usize) {
        self.expression("payload", |payload| {
            payload.number(NFTA_PAYLOAD_DREG, libc::NFT_REG_1);
            payload.number(NFTA_PAYLOAD_BASE, libc::NFT_PAYLOAD_NETWORK_HEADER);
            payload.number(NFTA_PAYLOAD_OFFSET, offset);
            payload.number(NFTA_PAYLOAD_LEN, c_int::try_from(length).expect("an address"));
        });
    }

    /// Ends the rule for a packet whose loaded value does not compare.
    fn compare(&mut self, operator: c_int, value: &[u8]) {
        self.expression("cmp", |cmp| {
            cmp.number(NFTA_CMP_SREG, libc::NFT_REG_1);
            cmp.number(NFTA_CMP_OP, operator);
            cmp.nest(NFTA_CMP_DATA, |data| data.attribute(NFTA_DATA_VALUE, value));
        });
    }

    fn load_value(&mut self, register: c_int, value: &[u8]) {
        self.expression("immediate", |immediate| {
            immediate.number(NFTA_IMMEDIATE_DREG, register);
            immediate.nest(NFTA_IMMEDIATE_DATA, |data| data.attribute(NFTA_DATA_VALUE, value));
        });
    }
}

/// Listens for TCP at `address`, and for what is led there: the own address of an accepted socket is the one that its
/// peer asked for.
///
/// The listener is non-blocking and close-on-exec; one for IPv6 takes no IPv4. Needs CAP_NET_ADMIN in the user
/// namespace that the network is of. See ip(7), IP_TRANSPARENT.
pub fn listen_transparently(address: SocketAddr, backlog: i32) -> io::Result<OwnedFd> {
    let (family, level, option) = match address {
        SocketAddr::V4(_) => (AddressFamily::INET, libc::SOL_IP, libc::IP_TRANSPARENT),
        SocketAddr::V6(_) => (AddressFamily::INET6, libc::SOL_IPV6, libc::IPV6_TRANSPARENT),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    let on: c_int = 1;
    let length = libc::socklen_t::try_from(size_of::<c_int>()).map_err(io::Error::other)?;
    // SAFETY: the descriptor is open because it is owned; the kernel reads `length` bytes of `on`, which has that size
    // and outlives the call.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const on).cast(), length)
    };
    crate::check(result)?;
    bind(&socket, &address)?;
    listen(&socket, backlog)?;
    Ok(socket)
}
