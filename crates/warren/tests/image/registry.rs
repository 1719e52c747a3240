//! Images from registries: Debian's own on loopback, and ones that mean no good.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base64::Engine as _;
use tokio_util::sync::CancellationToken;
use warren::SandboxError;
use warren::image::{Bounds, Digest, KnownRegistry, Login, Registries, Source, pull};

use crate::oci::{Layout, architecture, descriptor, tool};
use crate::sources::Place;
use crate::tar::Tar;

/// What knows one registry, at which a user may be somebody.
fn known(registry: &str, plain_http: bool, login: Option<(&str, &str)>) -> Registries {
    let login =
        login.map(|(user, password)| Login { user: user.into(), password: password.into() });
    let known = KnownRegistry { plain_http, login };
    Registries { known: BTreeMap::from([(registry.to_owned(), known)]), authorities: None }
}

/// Debian's registry, for as long as this lives.
struct DockerRegistry {
    child: Child,
    port: u16,
}

impl DockerRegistry {
    fn start(place: &Place, extra: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = format!(
            "version: 0.1\nlog: {{ level: error }}\nstorage: {{ filesystem: {{ rootdirectory: {} }} }}\n\
             http:\n  addr: 127.0.0.1:{port}\n  secret: x\n{extra}",
            place.at("registry").display(),
        );
        fs::write(place.at("registry.yml"), config).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(place.at("registry.yml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("`docker-registry` (./test installs it)");
        let started = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(started.elapsed() < Duration::from_secs(60), "the registry does not start");
            std::thread::yield_now();
        }
        Self { child, port }
    }

    fn host(&self) -> String {
        format!("localhost:{}", self.port)
    }
}

impl Drop for DockerRegistry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn layout(place: &Place) -> Layout {
    let lower = Tar::default().file("lower", "1").file("both", "1").bytes();
    let upper = Tar::default().file("both", "2").bytes();
    Layout::new(&place.at("layout"), &[lower, upper])
}

#[test]
fn an_image_comes_from_debians_registry_and_is_unpacked_once() {
    let place = Place::new();
    let layout = layout(&place);
    let registry = DockerRegistry::start(&place, "");
    let host = registry.host();
    let from = format!("oci:{}:latest", layout.path.display());
    let push = |to: &str, more: &[&str]| {
        let to = format!("docker://{host}/{to}");
        let args = ["--insecure-policy", "copy", "-q", "--dest-tls-verify=false"];
        tool("skopeo", &[&args[..], more, &[&from, &to]].concat());
    };
    push("team/oci:1", &[]);
    push("team/docker:1", &["--format", "v2s2"]);
    let registries = known(&host, true, None);
    let (image, unpacked) = place.pull_with(&format!("{host}/team/oci:1"), &registries).unwrap();
    assert_eq!((image.layers.len(), unpacked), (2, 2));
    assert_eq!(place.read(&image.layers[1], "both").as_deref(), Some("2"));
    assert_eq!(image.config.workdir.as_deref(), Some(std::path::Path::new("/srv")));
    let (same, unpacked) = place.pull_with(&format!("{host}/team/docker:1"), &registries).unwrap();
    assert_eq!((&same.layers, unpacked), (&image.layers, 0), "known by what is in them");
    let digest = Digest::of(&layout.manifest);
    let pinned = format!("{host}/team/oci@{digest}");
    assert_eq!(place.pull_with(&pinned, &registries).unwrap().0.layers, image.layers);
    for missing in ["team/oci:2", "nobody/nothing"] {
        let error = place.pull_with(&format!("{host}/{missing}"), &registries).unwrap_err();
        assert!(matches!(error, SandboxError::NotFound { what: "image", .. }), "{error}");
    }
    // Nobody who merely names an image gets this host to talk to itself.
    let error = place.pull(&format!("{host}/team/oci:1")).unwrap_err();
    let chain = format!("{:#}", anyhow::Error::from(error));
    assert!(chain.contains("not public"), "{chain}");
}

#[test]
fn a_registry_with_tls_is_believed_by_its_certificate() {
    let place = Place::new();
    let layout = layout(&place);
    let (key, certificate) = (place.at("key.pem"), place.at("certificate.pem"));
    tool(
        "openssl",
        &[
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-keyout",
            key.to_str().unwrap(),
            "-out",
            certificate.to_str().unwrap(),
        ],
    );
    let extra =
        format!("  tls: {{ certificate: {}, key: {} }}\n", certificate.display(), key.display());
    let registry = DockerRegistry::start(&place, &extra);
    let host = registry.host();
    let from = format!("oci:{}:latest", layout.path.display());
    let to = format!("docker://{host}/a/b:1");
    tool("skopeo", &["--insecure-policy", "copy", "-q", "--dest-tls-verify=false", &from, &to]);
    let name = format!("{host}/a/b:1");
    let mut registries = known(&host, false, None);
    let error = place.pull_with(&name, &registries).unwrap_err();
    let chain = format!("{:#}", anyhow::Error::from(error));
    assert!(chain.contains("certificate"), "the host does not know this authority: {chain}");
    registries.authorities = Some(certificate);
    let (image, _) = place.pull_with(&name, &registries).unwrap();
    assert_eq!(image.layers.len(), 2);
    registries.known.get_mut(&host).unwrap().plain_http = true;
    place.pull_with(&name, &registries).expect_err("control: it does speak TLS");
}

/// What a request was: its path with query, and its headers by lower-case names.
#[derive(Debug, Clone)]
struct Asked {
    path: String,
    headers: BTreeMap<String, String>,
}

type Answer = (u16, Vec<(String, String)>, Vec<u8>);

/// A registry that answers as it is told.
struct Scripted {
    port: u16,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Scripted {
    fn start(answer: impl Fn(&Asked, u16) -> Answer + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        // Ends with the process: it waits for the next connection for ever.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
                let Some(first) = lines.next() else { continue };
                let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
                let headers = lines.take_while(|line| !line.is_empty());
                let headers = headers.filter_map(|line| {
                    let (name, value) = line.split_once(": ")?;
                    Some((name.to_ascii_lowercase(), value.to_owned()))
                });
                let one = Asked { path, headers: headers.collect() };
                let (status, headers, body) = answer(&one, port);
                seen.lock().unwrap().push(one);
                let mut reply = format!("HTTP/1.1 {status} x\r\nconnection: close\r\n");
                if !headers.iter().any(|(name, _)| name == "content-length") {
                    reply.push_str(&format!("content-length: {}\r\n", body.len()));
                }
                for (name, value) in headers {
                    reply.push_str(&format!("{name}: {value}\r\n"));
                }
                reply.push_str("\r\n");
                let _ = (&stream).write_all(reply.as_bytes());
                let _ = (&stream).write_all(&body);
            }
        });
        Self { port, asked }
    }

    fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn paths(&self) -> Vec<String> {
        self.asked.lock().unwrap().iter().map(|asked| asked.path.clone()).collect()
    }
}

/// The parts of an image, by the path that a registry serves them at.
fn served(layout: &Layout) -> BTreeMap<String, Vec<u8>> {
    let blobs = layout.layers.iter().chain([&layout.config]);
    let mut all: BTreeMap<_, _> =
        blobs.map(|blob| (format!("/v2/x/y/blobs/{}", Digest::of(blob)), blob.clone())).collect();
    all.insert("/v2/x/y/manifests/1".to_owned(), layout.manifest.clone());
    all
}

fn found(parts: &BTreeMap<String, Vec<u8>>, path: &str) -> Answer {
    match parts.get(path) {
        Some(bytes) => (200, Vec::new(), bytes.clone()),
        None => (404, Vec::new(), Vec::new()),
    }
}

fn header(name: &str, value: impl Into<String>) -> Vec<(String, String)> {
    vec![(name.to_owned(), value.into())]
}

#[test]
fn who_may_read_is_asked_as_the_registry_says() {
    let place = Place::new();
    let layout = layout(&place);
    let basic = format!("Basic {}", base64::engine::general_purpose::STANDARD.encode("me:s3cret"));
    // By a token, for which one says who one is; or for nothing.
    for (login, expected) in [(Some(("me", "s3cret")), Some(basic.clone())), (None, None)] {
        let (parts, wanted) = (served(&layout), expected.clone());
        let registry = Scripted::start(move |asked, port| {
            if let Some(query) = asked.path.strip_prefix("/token?") {
                assert_eq!(asked.headers.get("authorization"), wanted.as_ref());
                assert_eq!(query, "service=our%20registry&scope=repository%3Ax%2Fy%3Apull");
                return (200, Vec::new(), br#"{"access_token":"t0ken"}"#.to_vec());
            }
            match asked.headers.get("authorization").map(String::as_str) {
                Some("Bearer t0ken") => found(&parts, &asked.path),
                _ => {
                    let realm = format!("http://127.0.0.1:{port}/token");
                    let challenge = format!(r#"Bearer realm="{realm}",service="our registry""#);
                    (401, header("www-authenticate", challenge), Vec::new())
                }
            }
        });
        let fresh = Place::new();
        let host = registry.host();
        let (image, _) =
            fresh.pull_with(&format!("{host}/x/y:1"), &known(&host, true, login)).unwrap();
        assert_eq!(image.layers.len(), 2);
        let tokens = registry.paths().iter().filter(|path| path.starts_with("/token")).count();
        assert_eq!(tokens, 1, "one token is enough: {:?}", registry.paths());
    }
    // By name and password; and not at all.
    let parts = served(&layout);
    let registry = Scripted::start(move |asked, _| {
        if asked.headers.get("authorization") == Some(&basic) {
            return found(&parts, &asked.path);
        }
        (401, header("www-authenticate", r#"Basic realm="x""#), Vec::new())
    });
    let host = registry.host();
    let name = format!("{host}/x/y:1");
    place.pull_with(&name, &known(&host, true, Some(("me", "s3cret")))).unwrap();
    for login in [None, Some(("me", "wrong"))] {
        let error = Place::new().pull_with(&name, &known(&host, true, login)).unwrap_err();
        assert!(error.to_string().contains("does not let us have"), "{error}");
    }
}

#[test]
fn answers_lead_on_but_not_anywhere_and_tell_nobody_who_we_are() {
    let place = Place::new();
    let layout = layout(&place);
    let parts = served(&layout);
    let elsewhere = Scripted::start(move |asked, _| found(&parts, &asked.path));
    let (there, parts) = (elsewhere.host(), served(&layout));
    let registry = Scripted::start(move |asked, _| {
        if !asked.headers.contains_key("authorization") {
            return (401, header("www-authenticate", "Basic"), Vec::new());
        }
        match asked.path.contains("/blobs/") {
            true => (307, header("location", format!("http://{there}{}", asked.path)), Vec::new()),
            false => found(&parts, &asked.path),
        }
    });
    let host = registry.host();
    let login = Some(("me", "s3cret"));
    let (image, _) = place.pull_with(&format!("{host}/x/y:1"), &known(&host, true, login)).unwrap();
    assert_eq!(image.layers.len(), 2);
    let told = elsewhere.asked.lock().unwrap().clone();
    assert_eq!(told.len(), 3);
    assert!(told.iter().all(|asked| !asked.headers.contains_key("authorization")), "{told:?}");

    let round =
        Scripted::start(|asked, _| (302, header("location", asked.path.clone()), Vec::new()));
    let host = round.host();
    let error = Place::new().pull_with(&format!("{host}/x/y:1"), &known(&host, true, None));
    assert!(error.unwrap_err().to_string().contains("too many times"));
    assert!(round.paths().len() <= 6);
    for location in ["ftp://a/b", "file:///etc/passwd", "nowhere", "http://u:p@127.0.0.1/", ""] {
        let lost = Scripted::start(move |_, _| (302, header("location", location), Vec::new()));
        let host = lost.host();
        Place::new().pull_with(&format!("{host}/x/y:1"), &known(&host, true, None)).unwrap_err();
    }
}

#[test]
fn of_many_platforms_the_own_one_comes() {
    let place = Place::new();
    let layout = layout(&place);
    let platform = |bytes: &[u8], architecture: &str| {
        let mut one = descriptor("application/vnd.oci.image.manifest.v1+json", bytes);
        one["platform"] = serde_json::json!({ "os": "linux", "architecture": architecture });
        one
    };
    let list = |entries: Vec<serde_json::Value>| {
        serde_json::json!({ "schemaVersion": 2, "manifests": entries }).to_string().into_bytes()
    };
    let many =
        list(vec![platform(b"other", "riscv64"), platform(&layout.manifest, architecture())]);
    let none = list(vec![platform(b"other", "riscv64")]);
    let mut parts = served(&layout);
    let manifest = format!("/v2/x/y/manifests/{}", Digest::of(&layout.manifest));
    parts.insert(manifest, layout.manifest.clone());
    parts.insert("/v2/x/y/manifests/many".to_owned(), many);
    parts.insert("/v2/x/y/manifests/none".to_owned(), none);
    let registry = Scripted::start(move |asked, _| {
        assert!(asked.headers["accept"].contains('/'));
        found(&parts, &asked.path)
    });
    let host = registry.host();
    let registries = known(&host, true, None);
    let (image, _) = place.pull_with(&format!("{host}/x/y:many"), &registries).unwrap();
    assert_eq!(image.layers.len(), 2);
    let error = place.pull_with(&format!("{host}/x/y:none"), &registries).unwrap_err();
    assert!(matches!(error, SandboxError::NotFound { .. }), "{error}");
}

#[test]
fn a_registry_that_lies_leaves_nothing() {
    let place = Place::new();
    let layout = layout(&place);
    let layer = format!("/v2/x/y/blobs/{}", Digest::of(&layout.layers[0]));
    let manifest = "/v2/x/y/manifests/1".to_owned();
    let cut = |bytes: &[u8]| {
        let length = bytes.len().to_string();
        (200, header("content-length", length), bytes[..bytes.len() / 2].to_vec())
    };
    let short = layout.layers[0][..layout.layers[0].len() - 9].to_vec();
    let endless = vec![0; layout.layers[0].len() + 10_000];
    let rows: Vec<(&str, String, Answer)> = vec![
        ("the body breaks off", layer.clone(), cut(&layout.layers[0])),
        ("the body is short", layer.clone(), (200, Vec::new(), short)),
        ("the body is too long", layer.clone(), (200, Vec::new(), endless)),
        ("another layer", layer.clone(), (200, Vec::new(), layout.layers[1].clone())),
        ("no layer", layer.clone(), (404, Vec::new(), Vec::new())),
        ("it is broken", layer, (500, Vec::new(), b"oops".to_vec())),
        ("no manifest", manifest.clone(), (200, Vec::new(), b"<html>".to_vec())),
        ("a huge manifest", manifest.clone(), (200, Vec::new(), vec![b' '; 5 << 20])),
        ("it leads in circles", manifest, {
            let index = serde_json::json!({
                "schemaVersion": 2, "manifests": [descriptor("", b"nothing")],
            });
            (200, Vec::new(), index.to_string().into_bytes())
        }),
    ];
    for (name, path, answer) in rows {
        let parts = served(&layout);
        let registry = Scripted::start(move |asked, _| {
            if asked.path == path { answer.clone() } else { found(&parts, &asked.path) }
        });
        let (fresh, host) = (Place::new(), registry.host());
        let error = fresh.pull_with(&format!("{host}/x/y:1"), &known(&host, true, None));
        error.map(|(image, _)| image.layers).expect_err(name);
        fresh.assert_empty();
    }
    let name = "127.0.0.1:1/x/y:1";
    place.pull_with(name, &known("127.0.0.1:1", true, None)).expect_err("nobody listens");
}

#[test]
fn a_registry_that_never_answers_holds_up_nobody_who_wants_no_more() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let source: Source = format!("{host}/x/y:1").parse().unwrap();
    let (place, registries) = (Place::new(), known(&host, true, None));
    let stop = CancellationToken::new();
    let error = std::thread::scope(|scope| {
        let pulled = scope.spawn(|| {
            pull(&source, &place.layers, &registries, Bounds::default(), &stop, &mut |_| {})
        });
        let _asked = listener.accept().unwrap();
        stop.cancel();
        pulled.join().unwrap().map(|image| image.layers).unwrap_err()
    });
    let chain = format!("{:#}", anyhow::Error::from(error));
    assert!(chain.contains("nobody waits"), "{chain}");
    place.assert_empty();
}
