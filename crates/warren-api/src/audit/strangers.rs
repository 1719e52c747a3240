//! Requests of nobody known, which are summed up: whoever has no key shall not push out of the log what others did.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::entry::{Call, Entry, written};
use super::watch::{LOCAL, OPEN};

/// How many are written each by itself at once, and after how long one more is.
const BURST: u32 = 64;
const AGAIN: Duration = Duration::from_secs(60);
/// How long others are summed up before that is written.
const SUM_UP: Duration = Duration::from_secs(60);
/// How many kinds of them and how many who sent them are told apart.
const MOST_GROUPS: usize = 32;
const MOST_PEERS: usize = 16;

/// Requests of nobody known that were not written each by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Strangers {
    /// When the first was answered.
    pub since: String,
    /// When the last was.
    pub until: String,
    /// How many there were.
    pub count: u64,
    /// How many of which kind; of those for which there is no room it is known that they are among the count.
    pub groups: Vec<Group>,
    /// How many from where, likewise.
    pub peers: Vec<Source>,
}

/// Requests that came to the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// The answer, or none if the caller hung up before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The stable name of what went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Which sandbox they were about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// Which port inside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// How many.
    pub count: u64,
}

/// Requests from one place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Which: an address, without a port.
    pub peer: String,
    /// How many.
    pub count: u64,
}

/// Decides which of them are written.
#[derive(Debug)]
pub(super) struct Gate {
    /// How many more may be, and up to when that was counted.
    room: u32,
    counted: Instant,
    /// What is to be summed up, and since when.
    sum: Option<(Instant, Strangers)>,
}

impl Gate {
    pub(super) fn new(now: Instant) -> Self {
        Self { room: BURST, counted: now, sum: None }
    }

    /// Returns an entry that is to be written by itself; one that is not is in the next sum.
    pub(super) fn pass(
        &mut self,
        entry: Entry,
        time: DateTime<Utc>,
        now: Instant,
    ) -> Option<Entry> {
        let call = match &entry {
            Entry::Call(call) | Entry::Denial(call) if is_strange(call) => call,
            _ => return Some(entry),
        };
        while self.room < BURST && now.saturating_duration_since(self.counted) >= AGAIN {
            self.counted += AGAIN;
            self.room += 1;
        }
        if self.room == BURST {
            self.counted = now;
        }
        if self.room > 0 {
            self.room -= 1;
            return Some(entry);
        }
        let (_, sum) = self.sum.get_or_insert_with(|| {
            (now, Strangers { since: written(time), ..Strangers::default() })
        });
        sum.until = written(time);
        sum.add(call);
        None
    }

    /// Returns after how long there is a sum to be written, if there will be one.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let (since, _) = self.sum.as_ref()?;
        Some((*since + SUM_UP).saturating_duration_since(now))
    }

    /// Returns the sum that is to be written now; at the end, whatever there is.
    pub(super) fn due(&mut self, now: Instant, at_end: bool) -> Option<Entry> {
        let due = self.wait(now)?.is_zero() || at_end;
        let (_, sum) = self.sum.take_if(|_| due)?;
        Some(Entry::Strangers(Box::new(sum)))
    }
}

/// Tells whether anybody may have sent it: who has no key and comes by the network. What is for a sandbox is told to be its
/// tenant's, whoever sent it; somebody with its token did if it was done, but for what is done for everybody.
fn is_strange(call: &Call) -> bool {
    let known = call.key.is_some() || call.peer.starts_with(LOCAL);
    let done = call.status.is_some_and(|status| status < 400);
    let open = call.port.is_some() || OPEN.contains(&&*call.path) || call.method == "OPTIONS";
    !known && (call.tenant.is_none() || open || !done)
}

impl Strangers {
    fn add(&mut self, call: &Call) {
        self.count += 1;
        let Call { status, code, sandbox, port, peer, .. } = call;
        let same = |group: &&mut Group| {
            group.status == *status
                && group.code == *code
                && group.sandbox == *sandbox
                && group.port == *port
        };
        let room = self.groups.len() < MOST_GROUPS;
        match self.groups.iter_mut().find(same) {
            Some(group) => group.count += 1,
            None if room => self.groups.push(Group {
                status: *status,
                code: code.clone(),
                sandbox: sandbox.clone(),
                port: *port,
                count: 1,
            }),
            None => {}
        }
        // Each connection has a port of its own.
        let peer = peer.parse::<SocketAddr>().map_or(peer.clone(), |peer| peer.ip().to_string());
        let room = self.peers.len() < MOST_PEERS;
        match self.peers.iter_mut().find(|known| known.peer == peer) {
            Some(known) => known.count += 1,
            None if room => self.peers.push(Source { peer, count: 1 }),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_could_be_anybody_is_a_stranger() {
        let call = |peer: &str, key: Option<&str>, tenant: Option<&str>, status, path: &str| Call {
            peer: peer.to_owned(),
            key: key.map(str::to_owned),
            tenant: tenant.map(str::to_owned),
            status,
            path: path.to_owned(),
            ..Call::default()
        };
        let (away, alice) = ("192.0.2.1:5", Some("tenant:alice"));
        for (call, strange) in [
            (call("uid:1", None, Some("uid:1"), Some(404), "/x"), false),
            (call("uid:1", None, None, Some(200), "/v1/health"), false),
            (call(away, Some("k"), alice, Some(404), "/x"), false),
            (call(away, Some("k"), alice, None, "/x"), false),
            (call(away, None, None, Some(401), "/x"), true),
            (call(away, None, None, Some(200), "/v1/health"), true),
            (call(away, None, alice, Some(200), "/process.Process/Start"), false),
            (call(away, None, alice, Some(401), "/process.Process/Start"), true),
            (call(away, None, alice, None, "/process.Process/Start"), true),
            (call(away, None, alice, Some(204), "/health"), true),
            (Call { port: Some(80), ..call(away, None, alice, Some(200), "") }, true),
        ] {
            assert_eq!(is_strange(&call), strange, "{call:?}");
        }
    }

    fn denial(tenant: Option<&str>, peer: &str, code: &str) -> Entry {
        let tenant = tenant.map(str::to_owned);
        let (peer, code) = (peer.to_owned(), Some(code.to_owned()));
        let key = tenant.as_ref().map(|_| "key-1".to_owned());
        let call = Call { tenant, key, peer, code, status: Some(401), ..Call::default() };
        Entry::Denial(Box::new(call))
    }

    #[test]
    fn the_first_of_a_stranger_are_written_and_the_rest_is_one_line_that_counts_them() {
        let (now, time) = (Instant::now(), Utc::now());
        let mut gate = Gate::new(now);
        let mut pass = |entry| gate.pass(entry, time, now).is_some();
        let passed = (0..10_000)
            .filter(|i| pass(denial(None, &format!("192.0.2.1:{i}"), "unauthenticated")))
            .count();
        assert_eq!(passed, BURST as usize);
        assert!((0..100).all(|_| pass(denial(Some("uid:1"), "uid:1", "quota"))), "control: known");
        assert!(!pass(denial(None, "[2001:db8::1]:5", "forbidden")));
        assert_eq!(gate.due(now, false), None, "not yet");
        assert_eq!(gate.wait(now), Some(SUM_UP));
        let Some(Entry::Strangers(sum)) = gate.due(now + SUM_UP, false) else { panic!("a sum") };
        let hidden = 10_000 - u64::from(BURST);
        assert_eq!(sum.count, hidden + 1);
        let groups: Vec<_> =
            sum.groups.iter().map(|one| (one.code.as_deref(), one.count)).collect();
        assert_eq!(groups, [(Some("unauthenticated"), hidden), (Some("forbidden"), 1)]);
        let peers: Vec<_> = sum.peers.iter().map(|one| (one.peer.as_str(), one.count)).collect();
        assert_eq!(peers, [("192.0.2.1", hidden), ("2001:db8::1", 1)]);
        assert_eq!((gate.wait(now), gate.due(now + 2 * SUM_UP, true)), (None, None), "told once");
    }

    #[test]
    fn a_flood_of_a_day_from_everywhere_is_some_thousand_short_lines() {
        let (begin, time) = (Instant::now(), Utc::now());
        let mut gate = Gate::new(begin);
        let (mut written, mut bytes, mut counted) = (0, 0, 0);
        let mut line = |entry: &Entry| {
            written += 1;
            bytes += serde_json::to_vec(entry).unwrap().len();
            counted += match entry {
                Entry::Strangers(sum) => sum.count,
                _ => 1,
            };
        };
        for i in 0..86_400_u32 {
            let now = begin + Duration::from_secs(u64::from(i));
            let peer = format!("{}:1", std::net::Ipv4Addr::from(i));
            if let Some(one) = gate.pass(denial(None, &peer, &i.to_string()), time, now) {
                line(&one);
            }
            if let Some(sum) = gate.due(now, false) {
                line(&sum);
            }
        }
        let rest = gate.due(begin, true);
        rest.iter().for_each(&mut line);
        assert!(written < 3_100 && bytes < 8 << 20, "{written} lines, {bytes} bytes");
        assert_eq!(counted, 86_400, "each is counted");
    }
}
