//! Whoever reads a command's output slowly, or not at all (THREATS S8).

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::io::{self, BufRead as _, BufReader, Read};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

use crate::limits::{Both, Door, PROMPT, Stream};
use crate::support::{PATIENCE, Place};

/// How many read slowly, all the time.
const SLOW: usize = 8;
/// How many read nothing at all.
const DEAF: usize = 32;
/// How many more are tried once a tenant has as many streams as it may.
const BEYOND: usize = 10_000;

/// Reads a little, and rests.
struct Paced(Box<dyn Stream>);

impl Read for Paced {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        std::thread::sleep(Duration::from_millis(200));
        let little = buffer.len().min(16 << 10);
        self.0.read(&mut buffer[..little])
    }
}

/// What a slow reader saw.
#[derive(Debug, Default)]
struct Seen {
    bytes: u64,
    skipped: u64,
    next: u64,
}

impl Seen {
    /// Takes in an event, and checks that nothing is missing before it but what was said to be.
    fn take(&mut self, event: &str) {
        let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name));
        let data: Option<Value> = field("data: ").map(|data| serde_json::from_str(data).unwrap());
        match (field("event: "), data) {
            (Some("stdout"), Some(data)) => {
                assert_eq!(data["offset"], self.next, "no gap, nothing twice: {event}");
                let length = data["text"].as_str().unwrap().len() as u64;
                (self.bytes, self.next) = (self.bytes + length, self.next + length);
            }
            (Some("skipped"), Some(data)) => {
                let bytes = data["bytes"].as_u64().unwrap();
                (self.skipped, self.next) = (self.skipped + bytes, self.next + bytes);
            }
            // To keep the connection.
            (None, None) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Follows a stream slowly until then.
fn follow(door: &Door, path: &str, until: Instant) -> Seen {
    let mut stream = door.connect();
    stream.write_all(door.head(&format!("GET {path}"), "").as_bytes()).unwrap();
    let mut reader = BufReader::with_capacity(16 << 10, Paced(stream));
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "it answers");
    }
    let (mut seen, mut text) = (Seen::default(), Vec::new());
    while Instant::now() < until {
        line.clear();
        reader.read_line(&mut line).unwrap();
        let length = usize::from_str_radix(line.trim_end(), 16).expect("it goes on");
        let mut chunk = vec![0; length + 2];
        reader.read_exact(&mut chunk).unwrap();
        text.extend_from_slice(&chunk[..length]);
        while let Some(end) = text.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = text.drain(..end + 2).collect();
            seen.take(std::str::from_utf8(&event).unwrap());
        }
    }
    seen
}

/// Begins to read a stream, and returns it if it was given one.
fn begin(door: &Door, path: &str) -> Option<Box<dyn Stream>> {
    let (mut stream, mut head) = (door.connect(), [0; 12]);
    stream.write_all(door.head(&format!("GET {path}"), "").as_bytes()).unwrap();
    stream.read_exact(&mut head).unwrap();
    match &head {
        b"HTTP/1.1 200" => Some(stream),
        b"HTTP/1.1 429" => None,
        other => panic!("{:?}", String::from_utf8_lossy(other)),
    }
}

/// For half a minute, or `WARREN_SLOW_SECONDS=3600 cargo nextest run -P soak --test daemon s8_`.
#[test]
fn s8_readers_that_are_slow_or_deaf_are_bounded_and_hold_up_nobody() {
    let seconds = std::env::var("WARREN_SLOW_SECONDS").map_or(30, |text| text.parse().unwrap());
    let had = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: had.maximum, ..had }).unwrap();
    let both = Both::start_in(Place::with_backend("linux"), &["alice", "bob"]);
    let (alice, bob) = (both.door(0), both.door(1));
    let day_ms = 86_400_000;
    let limits = json!({ "max_cpu_time_ms": day_ms, "max_wall_time_ms": day_ms });
    let id = alice.post("/v1/sandboxes", &json!({ "limits": limits }))["sandbox"]["id"].clone();
    let execs = format!("/v1/sandboxes/{}/execs", id.as_str().unwrap());
    // More at once than anybody's sockets hold, then faster than the slow ones read.
    let script = "n=1; seq 2000000; while sleep 0.1; do seq $n $((n += 10000)); done";
    let command = json!({ "program": "sh", "args": ["-c", script] });
    alice.post(&execs, &json!({ "id": "flood", "command": command, "overflow": "forget" }));
    let (exec, path) = (format!("{execs}/flood"), format!("{execs}/flood/stream"));
    let written = || alice.get(&exec)["logged"].as_u64().unwrap();
    let quiet = json!({ "program": "sleep", "args": ["infinity"] });
    alice.post(&execs, &json!({ "id": "quiet", "command": quiet }));
    let wait_for = |most: usize, what: &str| {
        let began = Instant::now();
        while both.connections() > most {
            assert!(began.elapsed() < PATIENCE, "{what}: {} are still there", both.connections());
            bob.is_served();
            std::thread::sleep(Duration::from_millis(200));
        }
    };
    // As many attachments as alice may have; those beyond are told so, one like the other.
    let attached: Vec<_> = std::iter::from_fn(|| begin(&alice, &format!("{execs}/quiet/stream")))
        .take(1_000)
        .collect();
    assert!((100..1_000).contains(&attached.len()), "{} at once", attached.len());
    assert!(both.connections() >= attached.len(), "control: they are counted");
    for _ in 0..BEYOND {
        assert!(begin(&alice, &path).is_none(), "there is one more");
    }
    bob.is_served();
    drop(attached);
    wait_for(0, "those who hung up");

    let until = Instant::now() + Duration::from_secs(seconds);
    while written() < 10 << 20 {
        assert!(Instant::now() < until, "there is something to read");
        std::thread::sleep(Duration::from_millis(50));
    }
    let before = both.peak();
    std::thread::scope(|scope| {
        let slow: Vec<_> =
            (0..SLOW).map(|_| scope.spawn(|| follow(&alice, &path, until))).collect();
        let deaf: Vec<_> =
            (0..DEAF).map(|_| begin(&alice, &path).expect("there is room")).collect();
        // They are let go, and the others are not.
        wait_for(SLOW, "those who read nothing");
        assert_eq!(both.connections(), SLOW, "slow is not deaf");
        let (mut far, mut moved) = (written(), Instant::now());
        while Instant::now() < until {
            bob.is_served();
            alice.is_served();
            std::thread::sleep(Duration::from_secs(1));
            let now = written();
            if now > far {
                (far, moved) = (now, Instant::now());
            }
            // A busy host may have it wait for a moment; a reader would for as long as it is there.
            let still = moved.elapsed();
            assert!(still < PROMPT, "the command goes on: {far} bytes, still for {still:?}");
        }
        for one in slow {
            let seen = one.join().unwrap();
            eprintln!("a slow reader: {seen:?}");
            assert!(seen.bytes > 16 << 10, "{seen:?}");
            assert!(seen.skipped > 0, "control: it was slower than the command: {seen:?}");
        }
        let most = both.peak() - before;
        let each = most / (DEAF + SLOW) as u64;
        eprintln!("{} streams took {most} bytes at the most, {each} each", DEAF + SLOW);
        assert!(each < 1 << 20, "{each} bytes for each stream");
        drop(deaf);
    });
    let ended = alice.ask(&format!("POST {exec}/kill"), "Content-Length: 0\r\n");
    assert!(ended.starts_with("HTTP/1.1 2"), "{ended}");
    let began = Instant::now();
    while alice.get(&exec)["end"].is_null() {
        assert!(began.elapsed() < PROMPT, "it ends");
    }
}
