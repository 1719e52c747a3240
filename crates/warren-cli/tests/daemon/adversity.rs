//! What befalls a daemon from outside: kills while it recovers, an init that hangs, files that somebody removed, no
//! descriptors left; and what a sandbox may try to reach of it.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Daemon, PATIENCE, Place};

/// The first process of a sandbox, as the host knows it.
pub(crate) fn init_of(sandbox: &str) -> String {
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let mut own = processes.filter(|path| {
        let read = |file: &str| fs::read_to_string(path.join(file)).unwrap_or_default();
        read("comm").trim() == "warren-init" && read("cgroup").contains(sandbox)
    });
    let path = own.next().expect("an init");
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

pub(crate) fn signal(name: &str, pid: &str) {
    assert!(Command::new("kill").args([name, pid]).status().unwrap().success());
}

#[test]
fn c7_killed_again_and_again_while_it_recovers_it_comes_back_with_all() {
    let daemon = Daemon::start_in(Place::with_backend("linux"), &[]);
    let ids: Vec<String> = (0..4).map(|_| daemon.ok(&["create"])).collect();
    for id in &ids {
        daemon.ok(&["exec", id, "--", "sh", "-c", "echo $$ > /workspace/kept"]);
    }
    let place = daemon.kill().into_place();
    let mut early = 0;
    for round in 0..100 {
        let mut command = place.warren(&["serve"]);
        let mut child =
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        // From its first step to the last before it serves, and a little beyond.
        std::thread::sleep(Duration::from_millis(round % 25));
        early += u32::from(UnixStream::connect(place.path("run/warren.sock")).is_err());
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(early > 0, "control: some were killed before they served");
    let daemon = Daemon::start_in(place, &[]);
    for id in &ids {
        let kept = daemon.ok(&["exec", id, "--", "cat", "/workspace/kept"]);
        assert!(!kept.is_empty(), "{id}");
        daemon.ok(&["kill", id]);
    }
    assert_eq!(daemon.ok(&["ls", "-q"]), "");
}

#[test]
fn c12_a_group_that_is_busy_is_reported_tried_again_and_gone_at_last() {
    let settings: &[(&str, &str)] = &[("WARREN_CLEANUP_INTERVAL", "300ms")];
    let daemon = Daemon::start_in(Place::with_settings("linux", settings), &[]);
    let (id, other) = (daemon.ok(&["create"]), daemon.ok(&["create"]));
    let layout = warren_sys::cgroup::Layout::detect().unwrap();
    let own = layout.v1("pids").map(|v1| &v1.own).or(layout.v2.as_ref().map(|v2| &v2.mount));
    let group = own.unwrap().join(format!("warren-{id}"));
    // Not of the sandbox, so that nobody ends it.
    let mut stranger = Command::new("sleep").arg("600").spawn().unwrap();
    fs::write(group.join("cgroup.procs"), stranger.id().to_string()).expect("control: its group");
    let began = Instant::now();
    let kill = daemon.place.warren(&["kill", &id]).spawn().unwrap();
    while began.elapsed() < Duration::from_secs(3) {
        let began = Instant::now();
        assert_eq!(daemon.ok(&["exec", &other, "--", "echo", "here"]), "here");
        assert!(began.elapsed() < Duration::from_secs(2), "others wait: {:?}", began.elapsed());
    }
    let seen = crate::support::outcome(kill.wait_with_output().unwrap());
    assert_eq!(seen.code, Some(125), "it is reported: {seen:?}");
    assert!(seen.stderr.contains("remove the control group"), "{seen:?}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    // And again, by whoever asks and by the daemon itself, which says so. From here on it is the same every 300 ms, for as
    // long as one likes.
    let busy = std::env::var("WARREN_BUSY_SECONDS").ok().and_then(|text| text.parse().ok());
    let busy = Duration::from_secs(busy.unwrap_or(0));
    let busy = busy.max(began.elapsed() + Duration::from_millis(700));
    while began.elapsed() < busy {
        assert_eq!(daemon.ok(&["exec", &other, "--", "echo", "here"]), "here");
        assert!(group.exists(), "control: it is busy still");
        std::thread::sleep(Duration::from_millis(300));
    }
    assert!(daemon.log().contains("remove the control group"), "{}", daemon.log());
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    let began = Instant::now();
    while group.exists() || daemon.ok(&["ls", "-q"]).contains(&id) {
        assert!(began.elapsed() < PATIENCE, "nobody tries again: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    daemon.ok(&["kill", &other]);
}

#[test]
fn c14_what_somebody_removed_under_a_live_daemon_is_reported_and_cleared_up() {
    let daemon = Daemon::start_in(Place::with_backend("linux"), &[]);
    let id = daemon.ok(&["create"]);
    assert_eq!(daemon.ok(&["exec", &id, "--", "echo", "here"]), "here", "control");
    let init = init_of(&id);
    let home = daemon.place.path("state/sandboxes").join(&id);
    fs::remove_dir_all(&home).expect("control: it has a directory");
    let seen = daemon.run(&["exec", &id, "--", "echo", "here"]);
    let works = seen.code == Some(0) && seen.stdout == "here\n";
    let says_why = seen.code == Some(125) && seen.stderr.starts_with("error: ");
    assert!(works || says_why, "{seen:?}");
    let _ = fs::remove_dir_all(daemon.place.path("run"));
    fs::create_dir_all(daemon.place.path("run")).unwrap();
    let gone = daemon.run(&["ls"]);
    assert_eq!(gone.code, Some(125), "without its socket it is not reached: {gone:?}");
    assert!(gone.stderr.contains("hint: "), "{gone:?}");
    let place = daemon.kill().into_place();
    let daemon = Daemon::start_in(place, &[]);
    daemon.run(&["kill", &id]);
    let began = Instant::now();
    while fs::metadata(format!("/proc/{init}/root")).is_ok() {
        assert!(began.elapsed() < PATIENCE, "its init is left");
        std::thread::sleep(Duration::from_millis(20));
    }
    let other = daemon.ok(&["create"]);
    assert_eq!(daemon.ok(&["exec", &other, "--", "echo", "here"]), "here");
}

#[test]
fn c17_without_descriptors_it_sheds_load_and_serves_again() {
    let daemon = Daemon::start();
    let (pid, socket) = (daemon.pid().to_string(), daemon.place.path("run/warren.sock"));
    let open = || fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    assert_eq!(daemon.ok(&["ls", "-q"]), "", "control: it serves");
    let most = (open() + 4).to_string();
    let limit = format!("--nofile={most}:{most}");
    assert!(Command::new("prlimit").args(["--pid", &pid, &limit]).status().unwrap().success());
    let crowd: Vec<_> = (0..40).filter_map(|_| UnixStream::connect(&socket).ok()).collect();
    assert!(crowd.len() > 20, "control: there are more than it can have");
    let began = Instant::now();
    while open() + 2 < most.parse().unwrap() {
        assert!(began.elapsed() < PATIENCE, "control: it takes what it can have");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(200));
    drop(crowd);
    let began = Instant::now();
    while daemon.run(&["ls", "-q"]).code != Some(0) {
        assert!(began.elapsed() < PATIENCE, "it does not serve again: {}", daemon.log());
    }
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}

#[test]
fn n12_the_daemon_is_not_reached_from_inside() {
    let place = Place::with_backend("linux");
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    place.run(&["key", "create", "alice"]);
    let daemon = Daemon::start_in(place, &["--listen", &address.to_string()]);
    let socket = daemon.place.path("run/warren.sock");
    TcpStream::connect(address).expect("control: from the host it is reached");
    UnixStream::connect(&socket).expect("control: by its socket too");
    // An answer counts: what leads out of a sandbox with a network takes a connection before it is known where it goes.
    let dial = format!(
        r#"import socket
def ask(family, to):
    with socket.socket(family) as s:
        s.settimeout(10); s.connect(to); s.send(b"GET /v1/health HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        if not s.recv(1): raise OSError("nothing said")
for family, to in [(2, ("127.0.0.1", {port})), (2, ("0.0.0.0", {port})), (2, ("localhost", {port})), (1, "{socket}"),
                   (1, "/run/warren/warren.sock")]:
    try: ask(family, to); print("reached", to)
    except OSError as error: print("refused")"#,
        port = address.port(),
        socket = socket.display(),
    );
    let control = Command::new("python3").args(["-c", &dial]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&control.stdout).matches("reached").count(), 4, "control");
    for options in [&["create"][..], &["create", "--network"]] {
        let id = daemon.ok(options);
        let seen = daemon.ok(&["exec", &id, "--", "python3", "-c", &dial]);
        assert_eq!(seen, ["refused"; 5].join("\n"), "{options:?}");
    }
}

#[test]
fn b15_what_a_caller_sends_is_one_line_of_the_log_and_drives_no_terminal() {
    use std::io::{Read as _, Write as _};
    let daemon = Daemon::start();
    let raw = |request: &str| {
        let mut stream = UnixStream::connect(daemon.place.path("run/warren.sock")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    let end = "Host: localhost\r\nConnection: close\r\n";
    for path in ["%0aforged%1b[2J", "..%2fforged", "a%00forged"] {
        let answer = raw(&format!("GET /v1/sandboxes/{path} HTTP/1.1\r\n{end}\r\n"));
        assert!(answer.starts_with("HTTP/1.1 4"), "{path}: {answer}");
        assert!(!answer.contains('\u{1b}'), "{path}: {answer}");
    }
    let agent = "User-Agent: x\u{1b}[2Jforged\r\n";
    raw(&format!("GET /v1/sandboxes HTTP/1.1\r\n{agent}{end}\r\n"));
    let body = "{\"name\":\"a\\nforged\\u001b[2J\"}";
    let head = format!("POST /v1/sandboxes HTTP/1.1\r\n{end}Content-Type: application/json\r\n");
    let answer = raw(&format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()));
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    let audit = daemon.run(&["audit", "show"]);
    for (what, text) in [("log", daemon.log()), ("audit", audit.stdout)] {
        assert!(
            !text.lines().any(|line| line.trim_start().starts_with("forged")),
            "{what}: {text}"
        );
        assert!(!text.contains("\u{1b}[2J"), "{what}: {text}");
    }
}
