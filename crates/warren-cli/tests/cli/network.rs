//! What a command may reach beyond its sandbox, and what it is told when it may not.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use crate::support::{Outcome, outcome, run, warren};

/// A server on this host's loopback that answers each request; returns its port.
fn server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let port = listener.local_addr().expect("it is bound").port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello");
        }
    });
    port
}

fn fetch(allowed: &str, url: &str, host: &str) -> Outcome {
    let script = format!(
        "import urllib.request as u\n\
         try: print(u.urlopen(u.Request('{url}', headers={{'Host': '{host}'}}), timeout=10).read().decode())\n\
         except OSError as e: raise SystemExit(str(e))"
    );
    let allowed = format!("--allow-net={allowed}");
    let mut command = warren(&["run", &allowed, "--", "python3", "-c", &script]);
    let port = url.rsplit(':').next().unwrap_or_default().trim_end_matches('/');
    let port = port.parse().unwrap_or(80_u16);
    outcome(command.env("WARREN_EGRESS_HOSTS", format!("web.internal:{port}=127.0.0.1")))
}

#[test]
fn what_is_allowed_is_reached_and_what_is_not_is_told_with_its_grant() {
    let port = server();
    let (url, allowed) = (format!("http://web.internal:{port}/"), format!("web.internal:{port}"));
    let reached = fetch(&allowed, &url, "web.internal");
    assert_eq!((reached.code, reached.stdout.as_str()), (Some(0), "hello\n"), "{reached:?}");
    let elsewhere = fetch(&allowed, &url, "evil.example");
    let told = format!(
        "denied: reach evil.example port {port}, by what the sandbox may reach; allowed by --allow-net evil.example:{port}\n"
    );
    assert!(elsewhere.stderr.ends_with(&told) && elsewhere.code == Some(1), "{elsewhere:?}");
    let other = fetch("web.internal:1", &url, "web.internal");
    let told = format!("; allowed by --allow-net web.internal:{port}\n");
    assert!(other.stderr.ends_with(&told), "{other:?}");
    let unknown = fetch(&allowed, "http://other.internal/", "other.internal");
    assert!(unknown.stderr.ends_with("; allowed by --allow-net other.internal\n"), "{unknown:?}");
}

#[test]
fn what_nobody_could_reach_is_refused_before_anything_is_made() {
    for (asked, said) in [
        ("127.0.0.1", "own loopback"),
        ("0x7f.1", "no destination"),
        ("http://pypi.org", "no destination"),
    ] {
        let refused = run(&[&format!("--allow-net={asked}"), "--", "true"]);
        assert_eq!((refused.code, refused.stdout.as_str()), (Some(2), ""), "{refused:?}");
        assert!(refused.stderr.contains(said) && refused.stderr.contains("hint: "), "{refused:?}");
    }
    let both = run(&["--network", "--allow-net=pypi.org", "--", "true"]);
    assert!(both.stderr.contains("cannot be used with"), "{both:?}");
    let strict = run(&["--profile=strict", "--network", "--", "true"]);
    assert!(strict.stderr.contains("no TCP"), "{strict:?}");
}
