//! Files in and out of a real sandbox, by the daemon's API and by `warren cp`.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Daemon, PATIENCE, Place, outcome};

/// A daemon that ends its sandboxes when it ends.
struct Running {
    daemon: Option<Daemon>,
    id: String,
}

impl Running {
    fn start(create: &[&str]) -> Self {
        let daemon = Daemon::start_in(Place::with_backend("linux"), &["--stop-all"]);
        let args = [&["create", "--name", "web"], create].concat();
        let id = daemon.ok(&args);
        Self { daemon: Some(daemon), id }
    }

    fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().unwrap()
    }

    fn sh(&self, script: &str) -> String {
        self.daemon().ok(&["exec", "web", "--", "sh", "-c", script])
    }

    fn end(mut self) {
        let (code, daemon) = self.daemon.take().unwrap().end("TERM");
        assert_eq!(code, Some(0), "{}", daemon.log());
    }

    /// Sends a request to the socket and returns the status, the head and the body.
    fn ask(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> (u16, String, Vec<u8>) {
        let socket = self.daemon().place.path("run/warren.sock");
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let length = body.len();
        let path = path.replace("{id}", &self.id);
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\
             Connection: close\r\n{headers}\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        let _ = stream.write_all(body);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(answer[..end].to_vec()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = &answer[end + 4..];
        let chunked = head.contains("transfer-encoding: chunked");
        (status, head, if chunked { unchunked(body) } else { body.to_vec() })
    }
}

/// Puts a body together that came in chunks.
fn unchunked(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = rest.windows(2).position(|two| two == b"\r\n") {
        let size = std::str::from_utf8(&rest[..end]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        body.extend_from_slice(&rest[end + 2..end + 2 + size]);
        rest = &rest[end + 2 + size + 2..];
    }
    body
}

fn json(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap()
}

#[test]
fn cp_moves_files_trees_and_streams_both_ways() {
    let running = Running::start(&[]);
    let daemon = running.daemon();
    let tree = daemon.place.path("tree");
    std::fs::create_dir_all(tree.join("sub/empty")).unwrap();
    std::fs::write(tree.join("sub/data"), vec![7; 3_000_000]).unwrap();
    std::fs::write(tree.join(OsStr::from_bytes(b"odd-\xff")), b"odd").unwrap();
    std::os::unix::fs::symlink("sub/data", tree.join("link")).unwrap();
    std::fs::set_permissions(tree.join("sub/data"), PermissionsExt::from_mode(0o751)).unwrap();
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();

    // A file, into a directory and to a name.
    daemon.ok(&["cp", &text(&tree.join("sub/data")), "web:/workspace"]);
    daemon.ok(&["cp", &text(&tree.join("sub/data")), "web:/workspace/new/name"]);
    assert_eq!(
        running.sh("cd /workspace; cmp data new/name && stat -c '%a %s %u' data"),
        "751 3000000 1000"
    );
    let back = daemon.place.path("back");
    daemon.ok(&["cp", "web:/workspace/data", &text(&back)]);
    assert_eq!(std::fs::read(&back).unwrap(), vec![7; 3_000_000]);
    assert_eq!(std::fs::metadata(&back).unwrap().permissions().mode() & 0o777, 0o751);
    // A tree, in and out.
    daemon.ok(&["cp", &text(&tree), "web:/workspace/t"]);
    daemon.ok(&["cp", &text(&tree), "web:/workspace"]);
    assert_eq!(
        running.sh("cd /workspace; diff -r t tree && readlink t/link; ls -d t/sub/empty"),
        "sub/data\nt/sub/empty"
    );
    let out = daemon.place.path("out");
    daemon.ok(&["cp", "web:/workspace/t", &text(&out)]);
    let same = std::process::Command::new("diff").arg("-r").args([&tree, &out]).output().unwrap();
    assert!(same.status.success(), "{same:?}");
    assert!(out.join(OsStr::from_bytes(b"odd-\xff")).exists());
    // Streams.
    let mut child = daemon
        .place
        .warren(&["cp", "-", "web:/workspace/stream"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"through a pipe").unwrap();
    let copied = outcome(child.wait_with_output().unwrap());
    assert_eq!((copied.code, copied.stderr.as_str()), (Some(0), ""), "{copied:?}");
    assert_eq!(daemon.ok(&["cp", "web:/workspace/stream", "-"]), "through a pipe");
    assert_eq!(daemon.ok(&["files", "cat", "web:/workspace/stream"]), "through a pipe");
    // What makes no sense is said before anything is done.
    for (args, code, part) in [
        (["cp", "a", "b"], 2, "neither end"),
        (["cp", "web:/a", "web:/b"], 2, "both ends"),
        (["cp", "web:a", "b"], 2, "begins with `/`"),
        (["cp", "web:/workspace/nope", "b"], 125, "there is nothing"),
        (["cp", "nope:/x", "b"], 125, "no sandbox `nope`"),
        (["cp", "/nonexistent", "web:/x"], 125, "cannot read /nonexistent"),
        (["cp", "/dev/null", "web:/workspace/x"], 2, "is no file"),
    ] {
        let seen = daemon.run(&args);
        assert_eq!(seen.code, Some(code), "{args:?}: {seen:?}");
        assert!(seen.stderr.contains(part), "{args:?}: {seen:?}");
    }
    running.end();
}

#[test]
fn cp_out_of_a_hostile_sandbox_writes_only_where_it_was_told() {
    let running = Running::start(&[]);
    let daemon = running.daemon();
    let victim = daemon.place.path("victim");
    std::fs::write(&victim, "safe").unwrap();
    let host = daemon.place.path("").display().to_string();
    running.sh(&format!(
        "mkdir /workspace/t; cd /workspace/t; ln -s {host} way; ln -s {host}/victim victim; \
         mkfifo fifo; echo x > plain"
    ));
    let out = daemon.place.path("out");
    daemon.ok(&["cp", "web:/workspace/t", out.to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(out.join("plain")).unwrap(), "x\n");
    // The links are there now; a second copy must not go through them.
    running
        .sh("cd /workspace/t; rm way victim; mkdir way; echo bad > way/victim; echo bad > victim");
    let second = daemon.run(&["cp", "web:/workspace/t/.", out.to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "safe", "{second:?}");
    running.end();
}

#[test]
fn files_are_listed_made_moved_removed_and_watched() {
    let running = Running::start(&[]);
    let daemon = running.daemon();
    daemon.ok(&["files", "mkdir", "-p", "web:/workspace/a/b"]);
    let mut write = daemon.place.warren(&["files", "write", "--mode", "600", "web:/workspace/a/f"]);
    let mut child = write.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"12345").unwrap();
    assert_eq!(outcome(child.wait_with_output().unwrap()).code, Some(0));
    let listed = daemon.ok(&["files", "ls", "web:/workspace/a"]);
    let lines: Vec<&str> = listed.lines().collect();
    assert!(lines[0].starts_with("MODE") && lines[1].starts_with("d0755"), "{listed}");
    assert!(lines[2].starts_with("-0600") && lines[2].ends_with('f'), "{listed}");
    let objects = daemon.ok(&["files", "ls", "--json", "--depth", "3", "web:/workspace"]);
    let paths: Vec<String> = objects
        .lines()
        .map(|line| {
            serde_json::from_str::<Value>(line).unwrap()["path"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(paths, ["a", "a/b", "a/f"]);
    daemon.ok(&["files", "mv", "web:/workspace/a/f", "/workspace/a/g"]);
    let stat: Value =
        serde_json::from_str(&daemon.ok(&["files", "stat", "--json", "web:/workspace/a/g"]))
            .unwrap();
    assert_eq!((stat["size"].as_u64(), stat["mode"].as_str()), (Some(5), Some("0600")));

    let mut watch = daemon.place.warren(&["files", "watch", "-r", "--json", "web:/workspace"]);
    let mut watch = watch.spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(watch.stdout.take().unwrap()));
    let (began, mut seen) = (Instant::now(), false);
    while !seen {
        assert!(began.elapsed() < PATIENCE, "no event");
        running.sh("touch /workspace/a/b/event");
        std::thread::sleep(Duration::from_millis(100));
        if began.elapsed() > Duration::from_millis(300) {
            let line = lines.next().unwrap().unwrap();
            seen = line.contains("\"path\":\"a/b/event\"");
        }
    }
    watch.kill().unwrap();
    watch.wait().unwrap();
    let full = daemon.run(&["files", "rm", "web:/workspace/a"]);
    assert_eq!(full.code, Some(125));
    assert!(full.stderr.contains("it is not empty\nhint: remove it recursively"), "{full:?}");
    daemon.ok(&["files", "rm", "-r", "web:/workspace/a"]);
    assert_eq!(running.sh("ls -A /workspace"), "");
    running.end();
}

#[test]
fn the_api_serves_ranges_types_its_refusals_and_takes_any_name() {
    let running = Running::start(&["--disk", "8M"]);
    let files = "/v1/sandboxes/{id}/files";
    let ask = |method: &str, query: &str, headers: &str, body: &[u8]| {
        running.ask(method, &format!("{files}{query}"), headers, body)
    };
    let odd = "?path=/workspace/%ff%20x";
    let (status, _, body) = ask("PUT", &format!("{odd}&mode=0640"), "", b"0123456789");
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
    let entry = json(&body);
    assert_eq!(
        (entry["path_base64"].as_str(), entry["mode"].as_str()),
        (Some("L3dvcmtzcGFjZS//IHg="), Some("0640"))
    );
    for (range, status, expected, content) in [
        ("", 200, &b"0123456789"[..], ""),
        ("Range: bytes=2-4\r\n", 206, b"234", "content-range: bytes 2-4/10"),
        ("Range: bytes=7-\r\n", 206, b"789", "content-range: bytes 7-9/10"),
        ("Range: bytes=-2\r\n", 206, b"89", "content-range: bytes 8-9/10"),
        ("Range: bytes=5-999\r\n", 206, b"56789", "content-range: bytes 5-9/10"),
        ("Range: bytes=0-1,3-4\r\n", 200, b"0123456789", ""),
    ] {
        let (seen, head, body) = ask("GET", odd, range, b"");
        assert_eq!((seen, &body[..]), (status, expected), "{range}");
        assert!(head.contains(content), "{range}: {head}");
        assert!(head.contains("x-content-type-options: nosniff"), "{head}");
    }
    let (status, head, _) = ask("GET", odd, "Range: bytes=10-\r\n", b"");
    assert_eq!(status, 416);
    assert!(head.contains("content-range: bytes */10"), "{head}");
    let (status, _, _) = ask("PATCH", odd, "", b"ab");
    assert_eq!(status, 200);
    let (_, _, body) = ask("GET", odd, "", b"");
    assert_eq!(body, b"0123456789ab");
    let (_, _, body) = ask("GET", "/list?path=/workspace", "", b"");
    let listed = json(&body);
    assert_eq!(listed["entries"].as_array().unwrap().len(), 1);
    assert_eq!(listed["truncated"], false);

    running.sh("mkfifo /workspace/fifo; mkdir /workspace/dir");
    let big = vec![0; 12 << 20];
    for (method, query, body, status, code) in [
        ("GET", "?path=/workspace/nope", &b""[..], 404, "file_not_found"),
        ("GET", "?path=/workspace/fifo", b"", 422, "not_regular"),
        ("PUT", "?path=/workspace/fifo", b"x", 422, "not_regular"),
        ("GET", "?path=/dev/zero", b"", 422, "not_regular"),
        ("GET", "?path=/workspace/dir", b"", 422, "is_directory"),
        ("GET", "?path=/proc/self/root/etc/passwd", b"", 422, "link_loop"),
        ("GET", "?path=relative", b"", 400, "invalid_path"),
        ("GET", "?path=/a%00b", b"", 400, "invalid_path"),
        ("GET", "?path=", b"", 400, "invalid_path"),
        ("GET", "", b"", 400, "invalid_query"),
        ("GET", "?path=/x&path=/y", b"", 400, "invalid_query"),
        ("GET", "?path=/x&nope=1", b"", 400, "invalid_query"),
        ("PUT", "?path=/workspace/x&mode=4755", b"x", 400, "invalid_query"),
        ("PUT", "?path=/usr/x", b"x", 403, "read_only"),
        ("PUT", "?path=/workspace/dir&exclusive=true", b"x", 409, "file_exists"),
        ("DELETE", "?path=/workspace/nope", b"", 404, "file_not_found"),
        ("PUT", "?path=/workspace/big", &big, 507, "no_space"),
        ("PUT", "/tar?path=/workspace/dir", b"nonsense", 422, "invalid_archive"),
        ("GET", "/list?path=/workspace/fifo", b"", 422, "not_directory"),
        ("GET", "/list?path=/workspace&depth=0", b"", 400, "invalid_query"),
        ("GET", "/watch?path=/workspace/nope", b"", 404, "file_not_found"),
    ] {
        let (seen, _, body) = ask(method, query, "", body);
        let text = String::from_utf8_lossy(&body).into_owned();
        assert_eq!(seen, status, "{method} {query}: {text}");
        assert!(text.contains(&format!("\"code\":\"{code}\"")), "{method} {query}: {text}");
        assert!(text.contains("\"hint\":\""), "{method} {query}: {text}");
    }
    assert_eq!(running.sh("ls -A /workspace | wc -l"), "3", "no part is left");
    // A suspended sandbox refuses, and at once.
    running.daemon().ok(&["suspend", "web"]);
    let began = Instant::now();
    let (status, _, body) = ask("GET", odd, "", b"");
    assert_eq!(status, 409, "{}", String::from_utf8_lossy(&body));
    assert!(began.elapsed() < Duration::from_secs(5));
    running.daemon().ok(&["resume", "web"]);
    assert_eq!(ask("GET", odd, "", b"").0, 200);
    running.end();
}

#[test]
fn a_tenant_finds_no_file_of_another() {
    let place = Place::with_backend("linux");
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let key = |tenant: &str| {
        let made = place.run(&["key", "create", tenant, "--json"]);
        let key: Value = serde_json::from_str(&made.stdout).unwrap();
        key["key"].as_str().unwrap().to_owned()
    };
    let (alice, bob) = (key("alice"), key("bob"));
    let daemon = Daemon::start_in(place.clone(), &["--listen", &address, "--stop-all"]);
    let ask = |key: &str, method: &str, path: &str| {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\n\
             Content-Length: 0\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    };
    let made = ask(&alice, "POST", "/v1/sandboxes");
    assert!(made.starts_with("HTTP/1.1 201"), "{made}");
    let body = made.split("\r\n\r\n").nth(1).unwrap();
    let made: Value = serde_json::from_str(body).unwrap();
    let id = made["sandbox"]["id"].as_str().unwrap();
    for (method, rest) in [
        ("GET", "?path=/etc/passwd"),
        ("PUT", "?path=/workspace/x"),
        ("PATCH", "?path=/workspace/x"),
        ("DELETE", "?path=/workspace/x"),
        ("GET", "/stat?path=/etc/passwd"),
        ("GET", "/list?path=/"),
        ("POST", "/mkdir?path=/workspace/d"),
        ("POST", "/move?from=/workspace/d&to=/workspace/e"),
        ("GET", "/watch?path=/workspace"),
        ("GET", "/tar?path=/etc"),
        ("PUT", "/tar?path=/workspace"),
    ] {
        let other = ask(&bob, method, &format!("/v1/sandboxes/{id}/files{rest}"));
        let unknown = ask(&bob, method, &format!("/v1/sandboxes/sbx-unknown/files{rest}"));
        let body = |answer: &str| answer.split("\r\n\r\n").nth(1).unwrap().to_owned();
        assert!(other.starts_with("HTTP/1.1 404"), "{method} {rest}: {other}");
        assert_eq!(body(&other).replace(id, "sbx-unknown"), body(&unknown), "{method} {rest}");
    }
    let own = ask(&alice, "GET", &format!("/v1/sandboxes/{id}/files/stat?path=/etc/passwd"));
    assert!(own.starts_with("HTTP/1.1 200"), "control: its owner does: {own}");
    let (code, daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0), "{}", daemon.log());
}
