//! Servers inside a sandbox, reached through the daemon.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Daemon, PATIENCE, Place, outcome};

const HTTP: u16 = 8_000;
const WEBSOCKET: u16 = 8_001;
const HOSTILE: u16 = 8_002;
const ECHO: u16 = 8_003;
const FLOOD: u16 = 8_004;

/// A daemon with one sandbox, in which the servers of `server.py` listen.
struct Site {
    daemon: Daemon,
    id: String,
}

/// An answer, whole.
#[derive(Debug)]
struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Answer {
    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the status and code of a refusal of ours, which always has a hint.
    #[track_caller]
    fn refusal(&self) -> (u16, String) {
        let body = self.json();
        assert!(body["error"]["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{body}");
        (self.status, body["error"]["code"].as_str().unwrap().to_owned())
    }

    fn header(&self, name: &str) -> Vec<&str> {
        let named = self.headers.iter().filter(|(key, _)| key == name);
        named.map(|(_, value)| value.as_str()).collect()
    }
}

/// Reads the head of an answer.
fn read_head(reader: &mut impl std::io::BufRead) -> Result<(u16, Vec<(String, String)>), String> {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).ok_or_else(|| format!("no answer: {line:?}"))?;
    let status = status.parse().unwrap();
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.push((name.to_lowercase(), value.trim().to_owned()));
    }
    Ok((status, headers))
}

/// Reads one answer; `Err` if it breaks off.
fn read_answer(reader: &mut impl std::io::BufRead, has_body: bool) -> Result<Answer, String> {
    let (status, headers) = read_head(reader)?;
    let mut answer = Answer { status, headers, body: Vec::new() };
    let length = answer.header("content-length").first().map(|text| text.parse::<u64>().unwrap());
    if !has_body || status == 101 {
        return Ok(answer);
    }
    if let Some(length) = length {
        reader.take(length).read_to_end(&mut answer.body).map_err(|e| e.to_string())?;
        let whole = answer.body.len() as u64 == length;
        return if whole { Ok(answer) } else { Err("short".to_owned()) };
    }
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).map_err(|e| e.to_string())?;
        let size = u64::from_str_radix(line.trim(), 16).map_err(|e| e.to_string())?;
        let before = answer.body.len() as u64;
        reader.by_ref().take(size).read_to_end(&mut answer.body).map_err(|e| e.to_string())?;
        if answer.body.len() as u64 != before + size {
            return Err("short".to_owned());
        }
        reader.read_line(&mut line).map_err(|e| e.to_string())?;
        if size == 0 {
            return Ok(answer);
        }
    }
}

impl Site {
    fn new() -> Self {
        Self::in_place(Place::with_backend("linux"), &[])
    }

    fn in_place(place: Place, args: &[&str]) -> Self {
        let daemon = Daemon::start_in(place, args);
        let id = daemon.ok(&["create", "--name", "web"]);
        let this = Self { daemon, id };
        this.serve();
        this
    }

    /// Starts the servers and waits until they listen.
    fn serve(&self) {
        let script = "cat > /tmp/server.py; mkfifo /tmp/said; \
                      python3 /tmp/server.py > /tmp/said 2> /tmp/errors & head -n 1 /tmp/said";
        let mut child = self
            .daemon
            .place
            .warren(&["exec", "-i", "web", "--", "sh", "-c", script])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(include_bytes!("server.py")).unwrap();
        let seen = outcome(child.wait_with_output().unwrap());
        assert_eq!((seen.code, seen.stdout.as_str()), (Some(0), "listening\n"), "{seen:?}");
    }

    fn path(&self, port: u16, path: &str) -> String {
        format!("/v1/sandboxes/{}/ports/{port}{path}", self.id)
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.daemon.place.path("run/warren.sock")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn try_ask(&self, head: &str, port: u16, path: &str, body: &[u8]) -> Result<Answer, String> {
        let (method, headers) = head.split_once('\n').unwrap_or((head, ""));
        let mut stream = self.connect();
        let headers = headers.replace('\n', "\r\n");
        write!(
            stream,
            "{method} {} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
            self.path(port, path),
            body.len()
        )
        .unwrap();
        stream.write_all(body).unwrap();
        read_answer(&mut BufReader::new(stream), method != "HEAD")
    }

    #[track_caller]
    fn ask(&self, head: &str, port: u16, path: &str, body: &[u8]) -> Answer {
        self.try_ask(head, port, path, body).unwrap()
    }

    #[track_caller]
    fn get(&self, port: u16, path: &str) -> Answer {
        self.ask("GET", port, path, b"")
    }

    /// Opens a tunnel to a port.
    #[track_caller]
    fn tunnel(&self, port: u16) -> UnixStream {
        let mut stream = self.connect();
        let path = self.path(port, "");
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        .unwrap();
        // Byte by byte: what follows the head is not ours to read.
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap();
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        stream
    }

    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.daemon.pid())).unwrap().count()
    }

    /// Returns the most memory that the daemon ever had, in kilobytes.
    fn peak(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.daemon.pid()));
        let status = status.unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Waits until the daemon has no more descriptors than it had.
    #[track_caller]
    fn settles_to(&self, before: usize) {
        let began = Instant::now();
        while self.descriptors() > before {
            assert!(began.elapsed() < PATIENCE, "{} of {before}", self.descriptors());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the sandbox, and with it everything on the host.
    fn end(self) {
        self.daemon.ok(&["kill", "web"]);
        assert_eq!(self.daemon.ok(&["ls", "-q"]), "");
        let groups = Command::new("find")
            .args(["/sys/fs/cgroup", "-maxdepth", "4", "-name", &format!("*{}*", self.id)])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8(groups.stdout).unwrap(), "", "no group is left");
        let running = Command::new("pgrep").args(["-f", &self.id]).output().unwrap();
        assert_eq!(String::from_utf8(running.stdout).unwrap(), "", "no process is left");
        let (code, daemon) = self.daemon.end("TERM");
        assert_eq!(code, Some(0), "{}", daemon.log());
    }
}

#[test]
fn every_request_reaches_the_server_as_it_was_sent() {
    let site = Site::new();
    for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND"] {
        let seen = site.ask(method, HTTP, "/a//b/../%2e%ff?q=%20&r", b"body").json();
        assert_eq!((&seen["method"], &seen["length"]), (&method.into(), &4.into()));
        assert_eq!(seen["path"], "/a//b/../%2e%ff?q=%20&r");
    }
    let head = site.ask("HEAD", HTTP, "/", b"");
    assert_eq!((head.status, head.body.len()), (200, 0));
    let seen = site.get(HTTP, "/").json();
    let has = |name: &str, value: &str| {
        seen["headers"].as_array().unwrap().contains(&serde_json::json!([name, value]))
    };
    assert!(has("host", "localhost:8000") && has("x-forwarded-host", "x"), "{seen}");
    assert!(has("x-forwarded-prefix", &site.path(HTTP, "")), "{seen}");
    assert_eq!(seen["from"], "127.0.0.1");

    assert_eq!(site.get(HTTP, "/chunked").body, b"xxx");
    let chunked = "POST\nTransfer-Encoding: chunked\n";
    let mut stream = site.connect();
    let head = chunked.split_once('\n').unwrap().1.trim();
    let path = site.path(HTTP, "/");
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    .unwrap();
    // The same connection is used again, also after a refusal, and for the API itself.
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    assert_eq!(read_answer(&mut reader, true).unwrap().json()["length"], 5);
    for (path, status) in [
        (site.path(HTTP, "/"), 200),
        (site.path(1, "/"), 502),
        (site.path(HTTP, "/again"), 200),
        ("/v1/health".to_owned(), 200),
    ] {
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        assert_eq!(read_answer(&mut reader, true).unwrap().status, status, "{path}");
    }

    let page = site.get(HTTP, "/cookie");
    assert_eq!(page.header("set-cookie"), [""; 0], "{page:?}");
    assert_eq!(page.header("clear-site-data"), [""; 0], "{page:?}");
    assert_eq!(page.header("x-hop"), [""; 0], "{page:?}");
    let policies = page.header("content-security-policy");
    assert_eq!(policies, ["default-src 'none'", "sandbox allow-forms allow-scripts"]);
    assert_eq!(page.header("x-content-type-options"), ["nosniff"]);
    site.end();
}

#[test]
fn bodies_of_any_length_go_both_ways_in_little_memory() {
    const SIZE: usize = 100 << 20;
    let site = Site::new();
    site.ask("POST", HTTP, "/", b"warm");
    let before = site.peak();
    let body = (0..=255).collect::<Vec<u8>>().repeat(SIZE / 256);
    let seen = site.ask("POST", HTTP, "/", &body).json();
    assert_eq!(seen["length"], SIZE);
    let sum = {
        let mut child =
            Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(&body).unwrap();
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
    };
    assert!(sum.starts_with(seen["digest"].as_str().unwrap()), "{sum} {seen}");
    let answer = site.get(HTTP, &format!("/big?{SIZE}"));
    assert!(answer.body == body, "it arrived as it was");
    // One that does not read holds up nobody, and takes no memory.
    let mut lazy = site.connect();
    write!(lazy, "GET {} HTTP/1.1\r\nHost: x\r\n\r\n", site.path(HTTP, "/forever")).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(site.get(HTTP, "/").status, 200);
    let grown = site.peak() - before;
    assert!(grown < 16 << 10, "{grown} kB more");
    drop(lazy);
    site.end();
}

#[test]
fn a_websocket_goes_through() {
    let site = Site::new();
    let mut stream = site.connect();
    write!(
        stream,
        "GET {} HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        site.path(WEBSOCKET, "/chat")
    )
    .unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let answer = read_answer(&mut reader, false).unwrap();
    assert_eq!(answer.status, 101, "{answer:?}");
    // The example of RFC 6455, 1.3.
    assert_eq!(answer.header("sec-websocket-accept"), ["s3pPLMBiTxaQ9kYGzzhZRbK+xOo="]);
    assert_eq!(answer.header("upgrade"), ["websocket"]);
    let mask = [1, 2, 3, 4];
    let mut say = |opcode: u8, data: &[u8]| {
        let mut frame = vec![0x80 | opcode, 0x80 | 126];
        frame.extend(u16::try_from(data.len()).unwrap().to_be_bytes());
        frame.extend(mask);
        frame.extend(data.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
        stream.write_all(&frame).unwrap();
    };
    for length in [1_000_usize, 60_000] {
        let data = vec![length.to_le_bytes()[0]; length];
        say(2, &data);
        let mut head = [0; 4];
        reader.read_exact(&mut head).unwrap();
        assert_eq!(head[..2], [0x82, 126]);
        let mut back = vec![0; usize::from(u16::from_be_bytes([head[2], head[3]]))];
        reader.read_exact(&mut back).unwrap();
        assert_eq!(back, data);
    }
    say(8, &[0; 126]);
    let mut rest = Vec::new();
    reader.read_to_end(&mut rest).unwrap();
    assert_eq!((rest[0], rest.len()), (0x88, 130), "the end comes through as well");
    // One that does not switch answers as ever.
    let plain = site.ask("GET\nUpgrade: websocket\n", HTTP, "/", b"");
    assert_eq!(plain.status, 200);
    site.end();
}

#[test]
fn a_hostile_server_harms_only_its_own_answer() {
    let site = Site::new();
    let before = site.descriptors();
    for (path, status) in [
        ("/garbage", 502),
        ("/endless-headers", 502),
        ("/endless-header", 502),
        ("/many-headers", 502),
        ("/closes", 502),
        ("/closes-in-head", 502),
        ("/two-lengths", 502),
        ("/switches", 502),
    ] {
        let seen = site.get(HOSTILE, path).refusal();
        assert_eq!(seen, (status, "bad_server".to_owned()), "{path}");
    }
    for path in ["/silent", "/endless-continue"] {
        let seen = site.ask("GET\nX-Warren-Timeout-Ms: 300\n", HOSTILE, path, b"").refusal();
        assert_eq!(seen, (504, "slow_server".to_owned()), "{path}");
    }
    for path in ["/breaks-off", "/breaks-chunk"] {
        site.try_ask("GET", HOSTILE, path, b"").expect_err("it must not look whole");
    }
    assert_eq!(site.get(HOSTILE, "/splits").body, b"ok", "the rest is nobody's answer");
    assert_eq!(site.get(HOSTILE, "/old").body, b"to the end");
    let mut stream = site.connect();
    write!(stream, "GET {} HTTP/1.1\r\nHost: x\r\n\r\n", site.path(HTTP, "/forever")).unwrap();
    stream.read_exact(&mut vec![0; 10 << 20]).unwrap();
    drop(stream);
    assert_eq!(site.get(HTTP, "/").status, 200, "control: the others answer");
    site.settles_to(before);
    site.end();
}

#[test]
fn what_cannot_be_reached_says_why() {
    let site = Site::new();
    let closed = site.get(4_444, "/");
    assert_eq!(closed.refusal(), (502, "port_closed".to_owned()));
    let error = &closed.json()["error"];
    assert_eq!(error["message"], "nothing listens on port 4444 inside the sandbox");
    for port in ["0", "65536", "x", "+80", "-1", "080000"] {
        let mut stream = site.connect();
        let path = format!("/v1/sandboxes/{}/ports/{port}/", site.id);
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let answer = read_answer(&mut BufReader::new(stream), true).unwrap();
        assert_eq!(answer.refusal(), (400, "invalid_port".to_owned()), "{port}");
    }
    let slow = site.ask("GET\nX-Warren-Timeout-Ms: 200\n", HTTP, "/slow", b"");
    assert_eq!(slow.refusal(), (504, "slow_server".to_owned()));
    let wrong = site.ask("GET\nX-Warren-Timeout-Ms: soon\n", HTTP, "/", b"");
    assert_eq!(wrong.refusal(), (400, "invalid_header".to_owned()));
    assert_eq!(site.get(HTTP, "").refusal(), (426, "upgrade_required".to_owned()));
    let page = site.ask("GET\nOrigin: http://evil.example\n", HTTP, "/", b"");
    assert_eq!(page.status, 403, "no web page gets here");

    // All places are taken, and free again when their holders are gone.
    let tunnels: Vec<UnixStream> = (0..128).map(|_| site.tunnel(ECHO)).collect();
    assert_eq!(site.get(HTTP, "/").refusal(), (429, "too_many_connections".to_owned()));
    drop(tunnels);
    let began = Instant::now();
    while site.get(HTTP, "/").status != 200 {
        assert!(began.elapsed() < PATIENCE);
    }

    site.daemon.ok(&["suspend", "web"]);
    assert_eq!(site.get(HTTP, "/").refusal(), (409, "suspended".to_owned()));
    site.daemon.ok(&["resume", "web"]);
    assert_eq!(site.get(HTTP, "/").status, 200);
    site.daemon.ok(&["create", "--name", "walled", "--profile", "strict"]);
    let walled = site.daemon.run(&["port", "--stdio", "walled", "80"]);
    assert!(walled.stderr.contains("`strict` has no TCP"), "{walled:?}");
    site.daemon.ok(&["kill", "walled"]);
    site.end();
}

#[test]
fn no_key_of_ours_goes_in() {
    let place = Place::with_backend("linux");
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let made = place.run(&["key", "create", "alice", "--json"]);
    let key: Value = serde_json::from_str(&made.stdout).unwrap();
    let secret = key["key"].as_str().unwrap().to_owned();
    let daemon = Daemon::start_in(place, &["--listen", &address]);
    let ask = |method: &str, path: &str, headers: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\n{headers}Content-Length: 0\r\n\
             Connection: close\r\n\r\n"
        )
        .unwrap();
        read_answer(&mut BufReader::new(stream), true).unwrap()
    };
    let bearer = format!("Authorization: Bearer {secret}\r\n");
    let made = ask("POST", "/v1/sandboxes", &bearer).json();
    let id = made["sandbox"]["id"].as_str().unwrap().to_owned();
    daemon.ok(&["attach", &id]);
    let site = Site { daemon, id: id.clone() };
    let script = "python3 -u -c \"$0\" > /dev/null 2>&1 & sleep 0.5";
    let server = include_str!("server.py");
    site.daemon.ok(&["exec", &id, "--", "sh", "-c", script, server]);
    let path = site.path(HTTP, "/");
    for headers in [
        format!("{bearer}Cookie: k={secret}\r\nX-Warren-Client: default\r\n"),
        format!("X-Api-Key: {secret}\r\nX-Warren-Forward-Authorization: Basic dTpw\r\n"),
        format!("X-Api-Key: {secret}\r\nConnection: x-other\r\nAuthorization: Basic {secret}\r\n"),
    ] {
        let answer = ask("GET", &path, &headers);
        let text = String::from_utf8(answer.body.clone()).unwrap();
        assert_eq!(answer.status, 200, "{text}");
        assert!(!text.contains(&secret) && !text.contains("x-warren"), "{text}");
        assert!(text.contains("[\"x-forwarded-for\", \"127.0.0.1\"]"), "{text}");
        let theirs = text.contains("[\"authorization\", \"Basic dTpw\"]");
        assert_eq!(theirs, headers.contains("Forward-Authorization"), "{text}");
    }
    assert_eq!(ask("GET", &path, "").status, 401);
    assert!(!site.daemon.log().contains(&secret), "nor into the log");
    site.daemon.ok(&["kill", &id]);
    let (code, _daemon) = site.daemon.end("TERM");
    assert_eq!(code, Some(0));
}

#[test]
fn warren_port_brings_a_port_to_this_host() {
    let site = Site::new();
    let mut child = site.daemon.place.warren(&["port", "web", "8003"]).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().to_owned();
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let mut streams: Vec<TcpStream> =
        (0..20).map(|_| TcpStream::connect(&address).unwrap()).collect();
    for (index, stream) in streams.iter_mut().enumerate() {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(format!("{index}").as_bytes()).unwrap();
    }
    for (index, stream) in streams.iter_mut().enumerate().rev() {
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut back = String::new();
        stream.read_to_string(&mut back).unwrap();
        assert_eq!(back, index.to_string(), "each has its own, and ends by itself");
    }
    let interrupt = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(interrupt.success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    TcpStream::connect(&address).expect_err("it is gone");

    let mut child = site
        .daemon
        .place
        .warren(&["port", "--json", "web", "4444", "--listen", "0"])
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let shown: Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&shown["sandbox_id"], &shown["port"]), (&site.id.clone().into(), &4_444.into()));
    let address = shown["address"].as_str().unwrap();
    assert_eq!(shown["url"], format!("http://{address}/"));
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut rest = Vec::new();
    assert!(stream.read_to_end(&mut rest).is_err(), "closed hard, as where nothing listens");
    child.kill().unwrap();
    let seen = outcome(child.wait_with_output().unwrap());
    assert!(seen.stderr.contains("nothing listens on port 4444"), "{seen:?}");

    let mut child = site
        .daemon
        .place
        .warren(&["port", "--stdio", "web", "8003"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    // More than all buffers on the way hold, so that both ways must go at once.
    let body: Vec<u8> = (0..=255).cycle().take(8 << 20).collect();
    let mut stdin = child.stdin.take().unwrap();
    let sent = body.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let mut back = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut back).unwrap();
    writer.join().unwrap().unwrap();
    assert!(back == body, "{} of {}", back.len(), body.len());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let seen = site.daemon.run(&["port", "--stdio", "web", "4444"]);
    assert_eq!(seen.code, Some(125));
    assert!(seen.stderr.contains("hint: start a server"), "{seen:?}");
    let seen = site.daemon.run(&["port", "web", "0"]);
    assert_eq!(seen.code, Some(2), "{seen:?}");
    site.end();
}

#[test]
fn a_connection_ends_with_its_sandbox_and_with_the_daemon() {
    let site = Site::new();
    let before = site.descriptors();
    // One that is read and one that is not: nothing inside can close that for the daemon.
    let mut idle = site.tunnel(ECHO);
    let unread = site.tunnel(FLOOD);
    let mut streaming = site.connect();
    let path = site.path(HTTP, "/slow");
    write!(streaming, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    site.daemon.ok(&["kill", "web"]);
    let mut rest = Vec::new();
    let _ = idle.read_to_end(&mut rest);
    assert_eq!(rest, b"");
    let _ = streaming.read_to_end(&mut rest);
    assert!(rest.starts_with(b"HTTP/1.1 502 "), "{}", String::from_utf8_lossy(&rest));
    drop((idle, streaming));
    // The one that is still open on our side holds one descriptor of its own at most.
    site.settles_to(before);
    drop(unread);

    site.daemon.ok(&["create", "--name", "web"]);
    let id = site.daemon.ok(&["ls", "-q"]);
    let site = Site { id, ..site };
    site.serve();
    let mut open = site.tunnel(ECHO);
    let began = Instant::now();
    let (code, daemon) = site.daemon.end("TERM");
    assert_eq!(code, Some(0), "{}", daemon.log());
    assert!(began.elapsed() < Duration::from_secs(5), "an open tunnel holds up nothing");
    assert_eq!(open.read(&mut [0]).unwrap_or(0), 0);
    let daemon = Daemon::start_in(daemon.into_place(), &["--stop-all"]);
    let (code, daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0), "{}", daemon.log());
}
