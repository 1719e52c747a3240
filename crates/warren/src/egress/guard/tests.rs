use std::sync::Arc;

use proptest::prelude::*;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::version::{TLS12, TLS13};
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, RootCertStore, SupportedProtocolVersion,
};

use super::*;

/// Whatever is sent is to be judged alike however it is cut.
#[track_caller]
fn sent(bytes: &[u8]) -> (Result<Flow, Refusal>, Vec<u8>) {
    let whole = watch([bytes]);
    assert_eq!(whole, watch(bytes.chunks(1)), "byte by byte");
    // At each byte of what is short, and at some of what is long.
    let step = if bytes.len() > 1024 { bytes.len() / 16 } else { 1 };
    for cut in (0..bytes.len()).step_by(step) {
        let (first, second) = bytes.split_at(cut);
        assert_eq!(whole, watch([first, second]), "cut at {cut}");
    }
    assert_eq!(whole.1, bytes[..whole.1.len()], "what goes on is what came");
    whole
}

#[track_caller]
fn passes(bytes: impl AsRef<[u8]>, flow: Flow) {
    let bytes = bytes.as_ref();
    let shown = bytes.escape_ascii();
    assert_eq!(sent(bytes), (Ok(flow), bytes.to_vec()), "{shown}");
}

/// Only what is in `before` goes on.
#[track_caller]
fn refused_after(before: &[u8], bytes: &[u8]) -> Refusal {
    let all = [before, bytes].concat();
    let (verdict, out) = sent(&all);
    let shown = all.escape_ascii();
    let refusal = verdict.err().unwrap_or_else(|| panic!("passes: {shown}"));
    assert_eq!(out.escape_ascii().to_string(), before.escape_ascii().to_string(), "{shown}");
    refusal
}

#[track_caller]
fn refused(bytes: impl AsRef<[u8]>) -> Refusal {
    refused_after(b"", bytes.as_ref())
}

fn not_allowed(name: &str, http: bool) -> Refusal {
    Refusal { name: Some(name.to_owned()), why: "a name that is not allowed", http }
}

/// A request with these fields instead of Host.
fn get(fields: &str) -> String {
    format!("GET / HTTP/1.1\r\n{fields}\r\n")
}

/// A request with these fields after Host, and what follows them.
fn post(rest: &str) -> String {
    format!("POST /a HTTP/1.1\r\nHost: ok.example\r\n{rest}")
}

#[test]
fn a_name_has_one_way_to_be_written_and_an_address_is_none() {
    let label = "a".repeat(63);
    let longest = format!("{label}.{label}.{label}.{}", "b".repeat(61));
    assert_eq!(longest.len(), 253);
    for (name, wanted) in [
        ("ok.example", "ok.example"),
        ("OK.Example.", "ok.example"),
        ("localhost", "localhost"),
        ("_dmarc.a-b.c", "_dmarc.a-b.c"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("1.2.3.4.example", "1.2.3.4.example"),
        ("0xygen", "0xygen"),
        (&longest, &longest),
        (&format!("{longest}."), &longest),
    ] {
        assert_eq!(canonical(name.as_bytes()).as_deref(), Some(wanted), "{name}");
    }
    for name in [
        "",
        ".",
        "a..b",
        ".a",
        "a..",
        "ok.example:80",
        "user@ok.example",
        "a b",
        " a",
        "a\t",
        "a\0",
        "a%00",
        "a%2eb",
        "bücher.example",
        "ｏk.example",
        "a/b",
        "a\\b",
        "a,b",
        "[::1]",
        "::1",
        "127.0.0.1",
        "127.0.0.1.",
        "2130706433",
        "0177.1",
        "0x7f.1",
        "0x7f000001",
        "1.0X7F",
        "a.0x",
        "a.1",
        "*.example",
    ] {
        assert_eq!(canonical(name.as_bytes()), None, "{name}");
    }
    assert_eq!(canonical(format!("a{longest}").as_bytes()), None);
    assert_eq!(canonical(format!("{label}a.example").as_bytes()), None);
    assert_eq!(canonical(b"a\xff"), None);
}

#[test]
fn what_no_server_takes_for_tls_or_http_passes_unread() {
    use Flow::{Free, Watched};
    for (bytes, flow) in [
        (&b"EHLO a\r\nMAIL FROM:<a@b>\r\n"[..], Free),
        (b"SSH-2.0-x y\r\n", Free),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n\0\0", Free),
        (b"*1\r\n$4\r\nPING\r\n", Free),
        (b"USER getter\n", Free),
        (b"GETTER a\n", Free),
        (b"@RSYNCD: 31.0\n", Free),
        (b"a001 LOGIN a b\r\n", Free),
        // These wait for an answer before there is a whole line.
        (b"AMQP\0", Watched),
        (b"003egit-upload-pack /project.git\0host=ok.example\0", Watched),
        (b"003egit-upload-pack /project.git\0host=ok.example\0\0version=2\x000032want 7\n", Free),
        (b"( 2 (", Free),
        (b"<?xml version='1.0'?><stream:stream x", Free),
        (b"<stream:stream to='ok.example' v", Free),
        (b"{\"id\": 1, \"", Free),
        (b"\0", Watched),
        (b"\x05\x01\0", Watched),
        (b"\x10\x0c\0\x04MQTT", Watched),
        // The length of what follows, and no line.
        (b"\x10\x0d\0\x04MQTT\x04\x02", Watched),
        (b"\0\0\0\x0a\0\x03\0\0user\0a\0", Watched),
        (b"\x80\x2e\x01", Watched),
        (b"\x16\x20", Watched),
        (b"\xff\xfe\x01", Watched),
        // Undecided to the end, and then too little to matter.
        (b"", Watched),
        (b"ping", Watched),
        (b"hello world", Watched),
        (b"( 2", Watched),
        (b"<a b HTT", Watched),
    ] {
        passes(bytes, flow);
    }
    let mut guard = Guard::new(|_| false);
    let mut out = Vec::new();
    assert_eq!(guard.feed(b"hello world", &mut out), Ok(Watched));
    assert_eq!(out, b"", "held until it is known for what it is");
    assert_eq!(guard.feed(b"\n!", &mut out), Ok(Free));
    assert_eq!(out, b"hello world\n!");
    out.clear();
    let mut guard = Guard::new(|_| false);
    assert_eq!(guard.feed(b"\x05\x01\0", &mut out), Ok(Watched));
    assert_eq!(out, b"\x05\x01\0", "what has no lines is not held until one ends");
}

#[test]
fn n9_a_request_is_read_whatever_a_server_may_pass_over_before_or_in_it() {
    // Netty passes over all that controls, and white space, before each request.
    let mut before: Vec<Vec<u8>> = (0..=0x1f).chain(0x7f..=0xa0).map(|byte| vec![byte]).collect();
    let more: [&[u8]; 9] = [
        b"\x01\x02\x03",
        b" \x01",
        b"\t\x01 ",
        b"\x01\r\n",
        b"\0\n\n\t",
        b"\x80\x01",
        b"\x0e\x9f\x85",
        b"\x16\x18",
        b"\x18\x7f",
    ];
    before.extend(more.map(<[u8]>::to_vec));
    let evil = b"\r\nHost: evil.example\r\n\r\n";
    for before in &before {
        for line in [
            &b"GET / HTTP/1.1"[..],
            b"GET / HTTP/1.1\0",
            b"PROPFIND /a HTTP/1.1",
            b"F(O /a hTTp/1.1",
            b"FOO /a BAR",
            b"FOO http://evil.example/",
            b"get x",
        ] {
            let all = [&before[..], line, evil].concat();
            let (verdict, out) = sent(&all);
            let shown = all.escape_ascii();
            assert!(verdict.is_err(), "{shown}");
            assert!(out.len() <= before.len() + line.len(), "its line does not end: {shown}");
        }
    }
    // In the middle of one likewise: without the version it is what git says.
    for line in [&b"PROPFIND /\x01 HTTP/1.1"[..], b"FOO\x01 / HTTP/1.1", b"FOO /\0\0 hTTp/1.1"] {
        let (verdict, out) = sent(&[line, evil].concat());
        assert!(verdict.is_err_and(|refusal| refusal.http), "{}", line.escape_ascii());
        assert!(out.len() < line.len());
    }
    // However long, and nothing of it is held.
    let long = [&b"\x01FOO /"[..], &vec![b'a'; 4 * MAX_LINE], b" HTTP/1.1", evil].concat();
    assert!(sent(&long).0.is_err());
    // Not whole.
    for half in [&b"\x01GET"[..], b"\x01FOO /"] {
        assert!(sent(half).0.is_err());
    }
    for (bytes, flow) in [
        (&b"\x01EHLO a\r\nGET / HTTP/1.1\r\n"[..], Flow::Free),
        (b"\x16EHLO a\n", Flow::Free),
        (b"\0\0\0\x08\x04\xd2\x16\x2f", Flow::Watched),
        (b"\x01GETTER", Flow::Watched),
        (b"\x01hhttttp:/", Flow::Watched),
    ] {
        passes(bytes, flow);
    }
}

#[test]
fn what_a_lenient_server_may_take_for_http_is_strictly_that_or_refused() {
    let rest = "\r\nHost: ok.example\r\n\r\n";
    passes(format!("GET / HTTP/1.1{rest}"), Flow::Watched);
    for line in [
        "get /",
        "GET /path",
        "GET",
        "GET\t/ HTTP/1.1",
        "GET  / HTTP/1.1",
        "GET /  HTTP/1.1",
        "GET / HTTP/1.1 ",
        "GET / HTTP/1.1\t",
        "GET / http/1.1",
        "GET / HTTP/1.1\r",
        "GET / HTTP/1.2",
        "GET / HTTP/0.9",
        "GET / HTTP/1.10",
        "GET / HTTP/01.1",
        "GET / HTTP/",
        "GET /\rHTTP/1.1",
        "GET\r/ HTTP/1.1",
        "GET\x0b/\x0cHTTP/1.1",
        "GET\u{a0}/",
        "GET / RTSP/1.0",
        " GET / HTTP/1.1",
        "\tGET /",
        "\x0bGET /",
        "FOO\t/ hTTp/1.1",
        "FOO / BAR",
        "PROXY TCP4 192.0.2.1 192.0.2.2 1 2",
        "FOO /",
        "FOO HTTPS://evil.example/ BAR",
        "F(O / HTTP/1.1",
        "{F\u{85}y / HTTP/1.1",
        "{F\t/\tHTTP/1.1",
        "<F / HTTP/1.1",
        "<F / \rHTTP/1.1",
        "\u{ff}FOO / HTTP/1.1",
        "ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFG / HTTP/1.1",
        "GET /a b HTTP/1.1",
        "GET /ä HTTP/1.1",
        "GET /a\u{7f} HTTP/1.1",
        " ",
        "\t \x0b",
    ] {
        // In Latin-1, as servers read it.
        let latin: Vec<u8> =
            format!("{line}{rest}").chars().map(|c| u8::try_from(u32::from(c)).unwrap()).collect();
        let refusal = refused(latin);
        assert!(refusal.http && refusal.name.is_none(), "{line:?}: {refusal:?}");
    }
    for line in [
        &b"\r\nGET / HTTP/1.1\r\n"[..],
        b"\n",
        b"\r",
        b"GET\0",
        b"get \x01",
        b"GET /\0",
        b"FOO / HTTP/1.1\0",
        b"GET / HTTP/1.1\nHost: ok.example\n\n",
        b"GET / HTTP/1.1\nHost: ok.example\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: ok.example\n\r\n",
        b"GET / HTTP/1.1\r\nHost: ok.example\r\n\n",
        b"GET / HTTP/1.1\rHost: ok.example\r\r",
        // Not whole.
        b"GET",
        b"FOO / HTTP/1.1",
        b"GET / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nHost: ok.example\r\n",
        b"GET / HTTP/1.1\r\nHost: ok.example\r\n\r",
    ] {
        assert!(refused(line).http);
    }
    for preface in ["PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET / HTTP/2.0\r\n"] {
        assert_eq!(refused(preface), Refusal::tls("HTTP/2 in the clear"));
    }
}

#[test]
fn a_request_goes_on_if_its_one_host_is_allowed() {
    for host in ["ok.example", "OK.example.", "a.ok.example:8080", "  ok.example  "] {
        passes(get(&format!("Host: {host}\r\n")), Flow::Watched);
        passes(
            get(&format!("Accept: */*\r\nhOST:{host}\r\nX:\r\nY: a\tb\u{e4}\r\n")),
            Flow::Watched,
        );
    }
    for request in [
        "GET / HTTP/1.0\r\nHost: ok.example\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: ok.example\r\n\r\n",
        "PROPFIND /a?b=http://evil.example/ HTTP/1.1\r\nHost: ok.example\r\n\r\n",
        "GET http://OK.example./ HTTP/1.1\r\nHost: ok.example:80\r\n\r\n",
        "GET http://ok.example:80/a HTTP/1.1\r\nHost: ok.example\r\n\r\n",
    ] {
        passes(request, Flow::Watched);
    }
    for (host, name) in [
        ("evil.example", "evil.example"),
        ("EVIL.example.:443", "evil.example"),
        ("ok.example.evil.example", "ok.example.evil.example"),
    ] {
        assert_eq!(refused(get(&format!("Host: {host}\r\n"))), not_allowed(name, true));
    }
    for fields in [
        "",
        "Host:\r\n",
        "Host: ok.example\r\nHost: ok.example\r\n",
        "Host: ok.example\r\nhost: evil.example\r\n",
        "Host: evil@ok.example\r\n",
        "Host: ok.example, evil.example\r\n",
        "Host: ok.example evil.example\r\n",
        "Host: evil.example\0.ok.example\r\n",
        "Host: evil.example%00.ok.example\r\n",
        "Host: ok%2eexample\r\n",
        "Host: ok.example:\r\n",
        "Host: ok.example:+80\r\n",
        "Host: ok.example:65536\r\n",
        "Host: ok.example:80:80\r\n",
        "Host: ok.example:80@evil\r\n",
        "Host:\tok.example\r\n",
        "Host: ok.example\t\r\n",
        "Host: ok.example..\r\n",
        "Host: http://ok.example\r\n",
        "Host: ok.example/\r\n",
        "Host: [::1]\r\n",
        "Host: 127.0.0.1\r\n",
        "Host: 2130706433\r\n",
        "Host: 0x7f.1\r\n",
        "Host : ok.example\r\n",
        " Host: ok.example\r\n",
        "Host: ok.example\r\n evil.example\r\n",
        "X: a\r\n\tb\r\nHost: ok.example\r\n",
        "Host: ok.example\r\nX\r\n",
        "Host: ok.example\r\n: x\r\n",
        "Host: ok.example\r\nX y: z\r\n",
        "Host: ok.example\r\nX\u{e4}: z\r\n",
        "Host: ok.example\r\nX: a\rHost: evil.example\r\n",
        "Host: ok.example\r\nX: \x07\r\n",
    ] {
        let refusal = refused(get(fields));
        assert!(refusal.http && refusal.name.is_none(), "{fields:?}: {refusal:?}");
    }
    for line in [
        "GET http://evil.example/ HTTP/1.1",
        "GET http://a.ok.example/ HTTP/1.1",
        "GET http://evil@ok.example/ HTTP/1.1",
        "GET http://ok.example@evil.example/ HTTP/1.1",
        "GET http://evil.example\\@ok.example/ HTTP/1.1",
        "GET http://ok.example HTTP/1.1",
        "GET http://ok.example?/ HTTP/1.1",
        "GET http:/// HTTP/1.1",
        "GET https://ok.example/ HTTP/1.1",
        "GET HTTP://ok.example/ HTTP/1.1",
        "GET ok.example HTTP/1.1",
        "GET * HTTP/1.1",
        "GET ? HTTP/1.1",
        "CONNECT ok.example:443 HTTP/1.1",
        "connect / HTTP/1.1",
    ] {
        let refusal = refused(format!("{line}\r\nHost: ok.example\r\n\r\n"));
        assert!(refusal.http && refusal.name.is_none(), "{line}: {refusal:?}");
    }
}

#[test]
fn the_end_of_a_body_is_where_every_server_finds_it() {
    for rest in [
        "Content-Length: 5\r\n\r\nhello",
        "Content-Length: 0\r\n\r\n",
        "Content-Length: 9223372036854775807\r\n\r\nhello",
        "Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
        "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0000000B\r\n\n\r\n0\r\n\r\nGET\r\n0\r\nX: y\r\n\r\n",
        // The rest never comes. What came was judged.
        "Content-Length: 6\r\n\r\nhello",
        "Transfer-Encoding: chunked\r\n\r\n6\r\nhello",
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello",
    ] {
        passes(post(rest), Flow::Watched);
    }
    passes(get("Host: ok.example\r\nContent-Length: 0\r\n"), Flow::Watched);
    for fields in [
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: 5, 5",
        "Content-Length: +5",
        "Content-Length: -5",
        "Content-Length: 0x5",
        "Content-Length: 5 5",
        "Content-Length:",
        "Content-Length:\t5",
        "Content-Length: 9223372036854775808",
        "Content-Length: 18446744073709551616",
        "Content-Length : 5",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked, chunked",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: identity",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: Chunked",
        "Transfer-Encoding:\tchunked",
        "Transfer-Encoding: chunked\t",
        "Transfer-Encoding: \"chunked\"",
        "Transfer-Encoding:\r\n chunked",
        "Transfer-Encoding:",
        "Expect: y 100-continue",
        "Expect: 100-continue\r\nExpect: 100-continue",
        "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
        "Connection: Upgrade\r\nupgrade: websocket",
        "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    ] {
        assert!(refused(post(&format!("{fields}\r\n\r\n"))).http);
    }
    assert!(
        refused("POST / HTTP/1.0\r\nHost: ok.example\r\nTransfer-Encoding: chunked\r\n\r\n").http
    );
    for fields in ["Content-Length: 5\r\n", "Transfer-Encoding: chunked\r\n"] {
        let refusal = refused(get(&format!("Host: ok.example\r\n{fields}")));
        assert_eq!(refusal, Refusal::http("a body where there is none"));
    }
    let head = post("Transfer-Encoding: chunked\r\n\r\n");
    for (before, after) in [
        ("", "\r\n"),
        ("", "5;x=y\r\n"),
        ("", "5 \r\n"),
        ("", " 5\r\n"),
        ("", "+5\r\n"),
        ("", "0x5\r\n"),
        ("", "5\n"),
        ("", "5\rX"),
        ("", "-0\r\n"),
        ("", "8000000000000000\r\n"),
        ("", "FFFFFFFFFFFFFFFF\r\n"),
        ("", "00000000000000005\r\n"),
        ("", "5"),
        ("5\r\nhello", "5\r\n"),
        ("5\r\nhello", "\n"),
        ("5\r\nhello", "\rX"),
        ("5\r\nhello", "!\r\n"),
        ("5\r\nhello", "\r"),
        ("0\r\n", "\n"),
        ("0\r\n", "GET / HTTP/1.1\r\n"),
        ("0\r\n", "X : y\r\n\r\n"),
        ("0\r\n", " x\r\n\r\n"),
        ("0\r\n", "Host: ok.example\r\n\r\n"),
        ("0\r\n", "content-length: 5\r\n\r\n"),
        ("0\r\n", "X: y\r\n"),
    ] {
        assert!(refused_after(format!("{head}{before}").as_bytes(), after.as_bytes()).http);
    }
}

#[test]
fn every_request_of_a_connection_is_judged() {
    let evil = get("Host: evil.example\r\n");
    for first in [
        get("Host: ok.example\r\n"),
        "GET / HTTP/1.0\r\nHost: ok.example\r\n\r\n".to_owned(),
        get("Host: ok.example\r\nConnection: close\r\n"),
        post("Content-Length: 5\r\n\r\nhello"),
        post("Content-Length: 0\r\n\r\n"),
        post("\r\n"),
        post("Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
        post("Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\r\n\r\n"),
    ] {
        passes(format!("{first}{first}{first}"), Flow::Watched);
        let refusal = refused_after(first.as_bytes(), evil.as_bytes());
        assert_eq!(refusal, not_allowed("evil.example", true));
        for next in ["\r\n", "\n", "ping\r\n", "EHLO a\r\n", "\0\r\n", "PRI * HTTP/2.0\r\n", "GET"]
        {
            refused_after(first.as_bytes(), next.as_bytes());
        }
    }
    // A body is no request, whatever it says.
    passes(post(&format!("Content-Length: {}\r\n\r\n{evil}", evil.len())), Flow::Watched);
}

#[test]
fn no_more_is_held_than_a_head_may_have() {
    let line = |length: usize| {
        let rest = " HTTP/1.1\r\n";
        format!("GET /{}{rest}", "a".repeat(length - "GET /".len() - rest.len()))
    };
    let host = "Host: ok.example\r\n\r\n";
    passes(format!("{}{host}", line(MAX_LINE)), Flow::Watched);
    assert!(refused(format!("{}{host}", line(MAX_LINE + 1))).http);
    let head = |length: usize| {
        let start = "GET / HTTP/1.1\r\nX: ";
        format!("{start}{}\r\n{host}", "a".repeat(length - start.len() - 2 - host.len()))
    };
    passes(head(http::MAX_HEAD), Flow::Watched);
    assert!(refused(head(http::MAX_HEAD + 1)).http);
    passes(get(&format!("{}Host: ok.example\r\n", "X: y\r\n".repeat(127))), Flow::Watched);
    assert!(refused(get(&format!("{}Host: ok.example\r\n", "X: y\r\n".repeat(128)))).http);
    let chunked = post("Transfer-Encoding: chunked\r\n\r\n0\r\n");
    passes(format!("{chunked}{}\r\n", "X: y\r\n".repeat(128)), Flow::Watched);
    refused_after(chunked.as_bytes(), "X: y\r\n".repeat(129).as_bytes());
    refused_after(chunked.as_bytes(), "a".repeat(40 << 10).as_bytes());
    assert_eq!(refused("a".repeat(40 << 10)), Refusal::tls("a first line that is too long"));
    assert_eq!(
        refused(format!("GET {}", "a".repeat(40 << 10))).why,
        "a first line that is too long"
    );
    // A body may have any length, and is not held.
    let mut guard = Guard::new(|_| true);
    let mut out = Vec::new();
    guard.feed(post("Content-Length: 1000000\r\n\r\n").as_bytes(), &mut out).unwrap();
    for _ in 0..100 {
        out.clear();
        assert_eq!(guard.feed(&[0; 10_000], &mut out), Ok(Flow::Watched));
        assert_eq!((out.len(), guard.held()), (10_000, 0));
    }
}

/// What a real client sends first.
fn rustls_hello(name: Option<&str>, version: &'static SupportedProtocolVersion) -> Vec<u8> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let name = name.unwrap_or("127.0.0.1").to_owned().try_into().unwrap();
    let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

/// What has its length before it, in so many bytes.
fn with_length(bytes: usize, rest: &[u8]) -> Vec<u8> {
    [&rest.len().to_be_bytes()[size_of::<usize>() - bytes..], rest].concat()
}

fn extension(kind: u16, rest: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &with_length(2, rest)].concat()
}

fn server_name(name: &[u8]) -> Vec<u8> {
    let entry = [&[0][..], &with_length(2, name)].concat();
    extension(0, &with_length(2, &entry))
}

/// Where TLS 1.3 says that it is.
fn versions() -> Vec<u8> {
    extension(43, &[2, 3, 4])
}

/// The body of a hello with these extensions, or with none that it could have any.
fn hello(extensions: Option<&[Vec<u8>]>) -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    if let Some(extensions) = extensions {
        body.extend(with_length(2, &extensions.concat()));
    }
    body
}

fn record(kind: u8, rest: &[u8]) -> Vec<u8> {
    [&[kind, 3, 1][..], &with_length(2, rest)].concat()
}

/// A message of the handshake in records of a size.
fn records(kind: u8, body: &[u8], size: usize) -> Vec<u8> {
    let message = [&[kind][..], &with_length(3, body)].concat();
    message.chunks(size).flat_map(|piece| record(0x16, piece)).collect()
}

fn hello_records(extensions: &[Vec<u8>]) -> Vec<u8> {
    records(1, &hello(Some(extensions)), 1 << 14)
}

#[test]
fn a_hello_goes_on_if_the_name_in_it_is_allowed() {
    for version in [&TLS12, &TLS13] {
        let good = rustls_hello(Some("ok.example"), version);
        passes(&good, Flow::Watched);
        passes(rustls_hello(None, version), Flow::Watched);
        let refusal = refused(rustls_hello(Some("evil.example"), version));
        assert_eq!(refusal, not_allowed("evil.example", false));
        for size in [1, 3, 100] {
            passes(records(1, &good[5 + 4..], size), Flow::Watched);
        }
        let (short, _) = good.split_at(good.len() - 1);
        assert_eq!(refused(short), Refusal::tls("a hello that is not whole"));
    }
    passes(records(1, &hello(None), 100), Flow::Free);
    passes(hello_records(&[]), Flow::Free);
    for name in ["ok.example", "OK.example."] {
        passes(hello_records(&[extension(0x0a0a, b""), server_name(name.as_bytes())]), Flow::Free);
    }
    // An encrypted hello is between the client and the server of the name outside.
    passes(hello_records(&[server_name(b"ok.example"), extension(0xfe0d, b"evil")]), Flow::Free);
    let refusal = refused(hello_records(&[server_name(b"EVIL.example."), versions()]));
    assert_eq!(refusal, not_allowed("evil.example", false));
}

#[test]
fn a_hello_that_is_not_strictly_one_is_refused() {
    let good = hello(Some(&[server_name(b"ok.example")]));
    passes(records(1, &good, 1 << 14), Flow::Free);
    for length in 0..good.len() {
        if length != hello(None).len() {
            refused(records(1, &good[..length], 1 << 14));
        }
    }
    refused(records(1, &[&good[..], &[0]].concat(), 1 << 14));
    refused(records(2, &good, 1 << 14));
    let two_names = [with_length(2, b"ok.example"), with_length(2, b"ok.example")].join(&0);
    for extensions in [
        vec![server_name(b"ok.example"), server_name(b"ok.example")],
        vec![server_name(b"ok.example"), versions(), server_name(b"evil.example")],
        vec![extension(0, &with_length(2, &[&[0][..], &two_names].concat()))],
        vec![extension(0, &with_length(2, &[&[1][..], &with_length(2, b"ok.example")].concat()))],
        vec![extension(0, b"")],
        vec![extension(0, &[0, 0])],
        vec![extension(0, &[0, 1, 0])],
        vec![[&server_name(b"ok.example")[..], &[0]].concat()],
        vec![server_name(b"")],
        vec![server_name(b"ok.example\0")],
        vec![server_name(b"evil.example\0.ok.example")],
        vec![server_name(b"ok.example:443")],
        vec![server_name(b"127.0.0.1")],
        vec![server_name(b"0x7f.1")],
        vec![server_name(b"*.ok.example")],
        vec![server_name("ök.example".as_bytes())],
        vec![vec![0]],
    ] {
        let refusal = refused(hello_records(&extensions));
        assert_eq!(refusal, Refusal::tls("a hello that cannot be read"), "{extensions:?}");
    }
    let whole = records(1, &good, 1 << 14);
    let halves = records(1, &good, 30);
    let (first, second) = halves.split_at(35);
    for bytes in [
        // Between its records is nothing else, not even nothing.
        [first, &record(0x16, b""), second].concat(),
        [first, &record(0x15, &[1, 0]), second].concat(),
        [first, &record(0x14, &[1]), second].concat(),
        [first, &record(0x17, &[1]), second].concat(),
        [&record(0x16, b""), &whole[..]].concat(),
        // Nor before them: some servers would pass over it.
        [&record(0x15, &[1, 0x5a]), &whole[..]].concat(),
        [&record(0x14, &[1]), &whole[..]].concat(),
        [&record(0x17, &[1]), &whole[..]].concat(),
        [&record(0x18, &[1]), &whole[..]].concat(),
        // Of another version, which some servers take.
        [&[0x16, 2], &whole[2..]].concat(),
        [&[0x16, 0], &whole[2..]].concat(),
        [first, &[0x16, 4], &second[2..]].concat(),
        // Two in one record.
        record(0x16, &[&whole[5..], &whole[5..]].concat()),
        b"\x16\x03\x01\x40\x01".to_vec(),
        b"\x16\x03\x01\x00\x04\x01\x00\x40\x01".to_vec(),
        b"\x16".to_vec(),
        b"\x15".to_vec(),
        b"\x16\x03".to_vec(),
        b"\x16\x03\x01\x00\x04\x01".to_vec(),
    ] {
        let refusal = refused(bytes);
        assert!(!refusal.http && refusal.name.is_none(), "{refusal:?}");
    }
    let longest = |length: usize| {
        let name = server_name(b"ok.example");
        let rest = length - hello(Some(&[name.clone(), extension(1, b"")])).len();
        hello(Some(&[name, extension(1, &vec![0; rest])]))
    };
    passes(records(1, &longest(16 << 10), 1 << 14), Flow::Free);
    assert_eq!(
        refused(records(1, &longest((16 << 10) + 1), 1 << 14)).why,
        "a hello that is too long"
    );
    assert_eq!(refused(records(1, &longest(16 << 10), 1)).why, "a hello in too many records");
}

#[test]
fn a_second_hello_is_judged_like_the_first() {
    let first = [server_name(b"ok.example"), versions()];
    let early = [server_name(b"ok.example"), versions(), extension(42, b"")];
    let evil = hello(Some(&[server_name(b"evil.example"), versions()]));
    let (ccs, data) = (record(0x14, &[1]), record(0x17, b"data"));
    let alert = record(0x15, &[1, 0x5a]);
    for before in [
        hello_records(&first),
        hello_records(&[versions()]),
        [hello_records(&first), ccs.clone()].concat(),
        [hello_records(&first), alert, ccs.clone()].concat(),
        [hello_records(&early), data.clone(), data.clone()].concat(),
        [hello_records(&early), ccs.clone(), data.clone(), ccs.clone()].concat(),
    ] {
        passes(&before, Flow::Watched);
        passes([&before[..], &hello_records(&first)].concat(), Flow::Free);
        for size in [1, 2, 7, 1 << 14] {
            let refusal = refused_after(&before, &records(1, &evil, size));
            assert_eq!(refusal, not_allowed("evil.example", false));
        }
        let halves = records(1, &evil, 30);
        let (half, other) = halves.split_at(35);
        for between in [&ccs, &data] {
            refused_after(&before, &[half, between, other].concat());
        }
        let long = [evil.clone(), vec![0; 1 << 16]].concat();
        refused_after(&before, &records(1, &long, 1 << 14));
        refused_after(&before, &record(0x16, b""));
        refused_after(&before, &record(0x18, b"a"));
        // What TLS 1.2 goes on with: a key, or what is encrypted already.
        passes([&before[..], &records(16, b"key", 100)].concat(), Flow::Free);
        passes([&before[..], &record(0x16, b"\xc0\xff\xee")].concat(), Flow::Free);
        passes([&before[..], &record(0x16, b"\x01\xff\xee")].concat(), Flow::Free);
    }
    // Data ends the handshake of whoever did not announce any.
    passes([hello_records(&first), ccs, data].concat(), Flow::Free);
}

proptest! {
    #[test]
    fn how_it_is_cut_makes_no_difference(
        parts in prop::collection::vec(
            prop_oneof![
                prop::sample::select(vec![
                    &b"GET / HTTP/1.1\r\n"[..], b"POST http://ok.example/ HTTP/1.1\r\n", b"Host: ok.example\r\n",
                    b"Host: evil.example\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"\r\n",
                    b"hello", b"5\r\nhello\r\n", b"0\r\n", b"\n", b" ", b"\0", b"\x01", b"\x16", b"{", b"EHLO a", b"X: y\r\n",
                ])
                .prop_map(<[u8]>::to_vec),
                prop::sample::select(vec![
                    hello_records(&[server_name(b"ok.example")]),
                    hello_records(&[server_name(b"ok.example"), versions(), extension(42, b"")]),
                    records(1, &hello(Some(&[server_name(b"evil.example")])), 9),
                    record(0x14, &[1]), record(0x17, b"data"), record(0x16, b"\x10"),
                ]),
                prop::collection::vec(any::<u8>(), 0..4),
            ],
            0..12,
        ),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let bytes = parts.concat();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let (verdict, out) = watch([&bytes[..]]);
        prop_assert_eq!(&out, &bytes[..out.len()]);
        let whole = (verdict, out);
        prop_assert_eq!(&whole, &watch(cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]])));
        prop_assert_eq!(&whole, &watch(bytes.chunks(1)));
    }
}
