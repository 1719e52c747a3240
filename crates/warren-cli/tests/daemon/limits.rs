//! Peers that take what is not theirs: time, connections, memory (THREATS B6, B8, B13).

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;

use crate::support::{Daemon, PATIENCE, Place};

/// Within this everybody else is served.
pub(crate) const PROMPT: Duration = Duration::from_secs(5);

pub(crate) trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// A daemon on both kinds of socket.
pub(crate) struct Both {
    daemon: Daemon,
    address: String,
    keys: Vec<String>,
}

/// One of its sockets, as a caller knows it.
#[derive(Clone)]
pub(crate) struct Door {
    path: Option<PathBuf>,
    address: String,
    key: String,
}

impl Both {
    fn start(tenants: &[&str]) -> Self {
        Self::start_in(Place::new(), tenants)
    }

    pub(crate) fn start_in(place: Place, tenants: &[&str]) -> Self {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let key = |tenant: &&str| {
            let made: Value =
                serde_json::from_str(&place.run(&["key", "create", tenant, "--json"]).stdout)
                    .unwrap();
            made["key"].as_str().unwrap().to_owned()
        };
        let keys = tenants.iter().map(key).collect();
        let daemon = Daemon::start_in(place, &["--listen", &address]);
        Self { daemon, address, keys }
    }

    fn doors(&self) -> [Door; 2] {
        let tcp = self.door(0);
        [Door { path: Some(self.daemon.place.path("run/warren.sock")), ..tcp.clone() }, tcp]
    }

    pub(crate) fn door(&self, tenant: usize) -> Door {
        Door { path: None, address: self.address.clone(), key: self.keys[tenant].clone() }
    }

    /// The most memory that it ever had, in bytes.
    pub(crate) fn peak(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.daemon.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// How many connections over TCP it has and has not closed. See proc_net(5), `tcp`.
    pub(crate) fn connections(&self) -> usize {
        const ESTABLISHED: &str = "01";
        const CLOSE_WAIT: &str = "08";
        let (_, port) = self.address.rsplit_once(':').unwrap();
        let own = format!("0100007F:{:04X}", port.parse::<u16>().unwrap());
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let is_open = |line: &&str| {
            let mut fields = line.split_whitespace().skip(1);
            let (local, _, state) = (fields.next(), fields.next(), fields.next());
            local == Some(&own) && [Some(ESTABLISHED), Some(CLOSE_WAIT)].contains(&state)
        };
        table.lines().filter(is_open).count()
    }
}

impl Door {
    fn name(&self) -> &'static str {
        if self.path.is_some() { "unix" } else { "tcp" }
    }

    pub(crate) fn connect(&self) -> Box<dyn Stream> {
        match &self.path {
            Some(path) => {
                let stream = UnixStream::connect(path).expect("it listens");
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                Box::new(stream)
            }
            None => {
                let stream = TcpStream::connect(&self.address).expect("it listens");
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.set_write_timeout(Some(PATIENCE)).unwrap();
                Box::new(stream)
            }
        }
    }

    /// Returns the head of a request, with more lines if there are any.
    pub(crate) fn head(&self, request: &str, more: &str) -> String {
        let (address, key) = (&self.address, &self.key);
        format!("{request} HTTP/1.1\r\nHost: {address}\r\nX-Api-Key: {key}\r\n{more}\r\n")
    }

    pub(crate) fn ask(&self, request: &str, more: &str) -> String {
        let mut stream = self.connect();
        stream
            .write_all(self.head(request, &format!("Connection: close\r\n{more}")).as_bytes())
            .unwrap();
        answer(&mut stream)
    }

    pub(crate) fn get(&self, path: &str) -> Value {
        parsed(&self.ask(&format!("GET {path}"), ""))
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Value {
        let (mut stream, body) = (self.connect(), body.to_string());
        let length = body.len();
        let more = format!(
            "Connection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
        );
        let head = self.head(&format!("POST {path}"), &more);
        stream.write_all((head + &body).as_bytes()).unwrap();
        parsed(&answer(&mut stream))
    }

    /// Asks for something small and checks that it comes at once.
    #[track_caller]
    pub(crate) fn is_served(&self) {
        let began = Instant::now();
        let seen = self.ask("GET /v1/sandboxes", "");
        assert!(seen.starts_with("HTTP/1.1 200"), "{}: {seen}", self.name());
        assert!(began.elapsed() < PROMPT, "{}: {:?}", self.name(), began.elapsed());
    }
}

/// Returns what a good answer says.
#[track_caller]
fn parsed(answer: &str) -> Value {
    assert!(answer.starts_with("HTTP/1.1 2"), "{answer}");
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

/// Reads until the other end is closed.
fn answer(stream: &mut Box<dyn Stream>) -> String {
    let mut bytes = Vec::new();
    // What came before a reset counts.
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Sends the same again and again, and returns how much was taken.
fn pour(stream: &mut Box<dyn Stream>, bytes: &[u8], most: usize) -> usize {
    let mut sent = 0;
    while sent < most && stream.write_all(bytes).is_ok() {
        sent += bytes.len();
    }
    sent
}

#[test]
fn b8_whoever_keeps_us_waiting_is_cut_off_and_others_are_served() {
    let both = Both::start(&["alice"]);
    let slow_head = |door: &Door| {
        let (mut stream, head) =
            (door.connect(), door.head("GET /v1/sandboxes", &"A: b\r\n".repeat(20)));
        for byte in head.as_bytes() {
            if stream.write_all(&[*byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        panic!("{}: the whole head was taken", door.name());
    };
    let no_body = |door: &Door| {
        let mut stream = door.connect();
        let more = "Content-Type: application/json\r\nContent-Length: 100\r\n";
        stream.write_all(door.head("POST /v1/sandboxes", more).as_bytes()).unwrap();
        stream.write_all(b"{").unwrap();
        let seen = answer(&mut stream);
        assert!(seen.starts_with("HTTP/1.1 408"), "{}: {seen}", door.name());
    };
    let silent = |door: &Door| {
        let seen = answer(&mut door.connect());
        assert!(seen.is_empty() || seen.starts_with("HTTP/1.1 408"), "{}: {seen}", door.name());
    };
    let deaf = |door: &Door| {
        let mut stream = door.connect();
        let head = door.head("GET /v1/openapi.json", "");
        // It takes no more once nobody reads what it says, and then it goes.
        let began = Instant::now();
        let sent = pour(&mut stream, head.repeat(64).as_bytes(), 64 << 20);
        assert!(sent < 64 << 20, "{}: all was taken", door.name());
        assert!(began.elapsed() < PATIENCE, "{}: it waits still", door.name());
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        let mut attacks = Vec::new();
        for door in both.doors() {
            for attack in [&slow_head as &(dyn Fn(&Door) + Sync), &no_body, &silent, &deaf] {
                let door = door.clone();
                attacks.push(scope.spawn(move || attack(&door)));
            }
        }
        while attacks.iter().any(|attack| !attack.is_finished()) {
            both.doors().iter().for_each(Door::is_served);
            assert!(began.elapsed() < 2 * PATIENCE, "somebody is still waited for");
            std::thread::sleep(Duration::from_millis(200));
        }
    });
    assert_eq!(both.daemon.ok(&["ls", "-q"]), "");
}

#[test]
fn b8_idle_connections_make_room_for_whoever_comes() {
    let had = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: had.maximum, ..had }).unwrap();
    let both = Both::start(&["alice"]);
    for door in both.doors() {
        let mut idle: Vec<_> = (0..1_500).map(|_| door.connect()).collect();
        // Half of a head is no better than nothing.
        for stream in idle.iter_mut().step_by(2) {
            let _ = stream.write_all(b"GET /v1/sand");
        }
        door.is_served();
        let began = Instant::now();
        let seen = answer(&mut idle[0]);
        assert_eq!((seen.as_str(), began.elapsed() < PROMPT), ("", true), "the first had to go");
        let last = idle.last_mut().unwrap();
        last.write_all(door.head("GET /v1/health", "Connection: close\r\n").as_bytes()).unwrap();
        assert!(answer(last).starts_with("HTTP/1.1 200"), "{}: the last may stay", door.name());
    }
}

#[test]
fn b8_a_tenant_has_so_many_streams_and_when_all_are_busy_the_next_is_told_so() {
    let had = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: had.maximum, ..had }).unwrap();
    let both = Both::start(&["a", "b", "c", "d", "e"]);
    let mut streams = Vec::new();
    for tenant in 0..4 {
        let door = both.door(tenant);
        for _ in 0..256 {
            let (mut stream, mut head) = (door.connect(), [0; 12]);
            stream.write_all(door.head("GET /v1/events", "").as_bytes()).unwrap();
            stream.read_exact(&mut head).unwrap();
            assert_eq!(&head, b"HTTP/1.1 200");
            streams.push(stream);
        }
        if tenant == 0 {
            let more = door.ask("GET /v1/events", "");
            assert!(
                more.starts_with("HTTP/1.1 429") && more.contains("requests at once"),
                "{more}"
            );
            both.door(4).is_served();
        }
    }
    let refused = both.door(4).ask("GET /v1/sandboxes", "");
    assert!(
        refused.starts_with("HTTP/1.1 503") && refused.contains("\"code\":\"busy\""),
        "{refused}"
    );
    let (_, body) = refused.split_once("\r\n\r\n").unwrap();
    serde_json::from_str::<Value>(body).expect("JSON");
    both.doors()[0].is_served();
    streams.truncate(1_000);
    let began = Instant::now();
    while !both.door(4).ask("GET /v1/sandboxes", "").starts_with("HTTP/1.1 200") {
        assert!(began.elapsed() < PROMPT, "there is room again");
    }
}

#[test]
fn b6_what_is_too_large_is_refused_without_memory_for_it() {
    let both = Both::start(&["alice"]);
    both.doors().iter().for_each(Door::is_served);
    let before = both.peak();
    let json = "Content-Type: application/json\r\n";
    let block = vec![b'['; 64 << 10];
    for door in both.doors() {
        let refused = |what: &str, stream: &mut Box<dyn Stream>, status: &str| {
            let seen = answer(stream);
            assert!(seen.starts_with(status), "{} {what}: {seen}", door.name());
        };
        let mut stream = door.connect();
        let head =
            door.head("POST /v1/sandboxes", &format!("{json}Content-Length: {}\r\n", 1 << 30));
        stream.write_all(head.as_bytes()).unwrap();
        let sent = pour(&mut stream, &block, 1 << 30);
        assert!(sent < 1 << 30, "{}: it does not take all of it", door.name());
        // One that was sent against all refusals may be reset; one that waits for the answer has it.
        let mut stream = door.connect();
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&block).unwrap();
        refused("length", &mut stream, "HTTP/1.1 413");

        let mut stream = door.connect();
        let head =
            door.head("POST /v1/sandboxes", &format!("{json}Transfer-Encoding: chunked\r\n"));
        stream.write_all(head.as_bytes()).unwrap();
        let chunk = [b"10000\r\n", &block[..], b"\r\n"].concat();
        pour(&mut stream, &chunk, 17 * chunk.len());
        refused("chunks", &mut stream, "HTTP/1.1 413");

        let mut stream = door.connect();
        let _ = stream.write_all(
            door.head("GET /v1/sandboxes", &format!("A: {}\r\n", "a".repeat(1 << 20))).as_bytes(),
        );
        refused("head", &mut stream, "HTTP/1.1 431");

        let keys: String = (0..90_000).map(|n| format!("\"{n}\":\"\",")).collect();
        let many = format!("{{\"labels\":{{{keys}\"a\":\"\"}}}}");
        for (what, body) in [
            ("deep", "[".repeat(1_000_000)),
            ("deep", format!("{{\"labels\":{}", "{\"a\":".repeat(100_000))),
            ("many keys", many),
            ("twice", "{\"name\":\"a\",\"name\":\"b\"}".to_owned()),
            ("twice", "{\"labels\":{\"a\":\"a\",\"a\":\"b\"}}".to_owned()),
        ] {
            let mut stream = door.connect();
            let more = format!("{json}Connection: close\r\nContent-Length: {}\r\n", body.len());
            stream.write_all(door.head("POST /v1/sandboxes", &more).as_bytes()).unwrap();
            stream.write_all(body.as_bytes()).unwrap();
            refused(what, &mut stream, "HTTP/1.1 400");
        }
        door.is_served();
    }
    let grown = both.peak() - before;
    assert!(grown < 64 << 20, "{} MiB more", grown >> 20);
    assert_eq!(both.daemon.ok(&["ls", "-q"]), "", "nothing was made of it");
}

#[test]
fn b13_a_name_that_is_not_ours_is_refused_on_tcp() {
    let both = Both::start(&["alice"]);
    let door = both.door(0);
    for (host, status) in [
        ("evil.example", "HTTP/1.1 403"),
        ("127.0.0.1.evil.example", "HTTP/1.1 403"),
        ("localhost", "HTTP/1.1 200"),
        ("192.0.2.1:8443", "HTTP/1.1 200"),
    ] {
        let request = format!(
            "GET /v1/sandboxes HTTP/1.1\r\nHost: {host}\r\nX-Api-Key: {}\r\nConnection: close\r\n\r\n",
            door.key
        );
        let mut stream = door.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let seen = answer(&mut stream);
        assert!(seen.starts_with(status), "{host}: {seen}");
    }
}
