//! What a sandbox reaches beyond itself, and what it does not: N6 to N9 and N11 of the threat list.
//!
//! Servers on this host's loopback are the world: 127.0.0.2 may be reached, 127.0.0.1 is what must never be.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]
#![expect(clippy::disallowed_methods, reason = "servers of a test end with its runtime")]

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use warren::backend::{LandlockBackend, LinuxBackend, LinuxSandbox, OciBackend, OciRuntime};
use warren::egress::{Busy, Resolve};
use warren::{
    Command, CreateOptions, DefaultSandboxManager, EgressOptions, ExecContext, Extent,
    IsolationBackend, PoolConfig, Reach, Sandbox, SandboxManager as _, SandboxManagerConfig,
    SandboxSelectionOptions, SandboxSession, SandboxSpec, Shutdown, Verdict,
};

#[path = "shared/plain_user.rs"]
mod plain_user;

/// Answers for each name with the next of what was given for it, and with the last of that again and again.
#[derive(Debug, Default)]
struct Script {
    answers: HashMap<&'static str, Vec<Vec<IpAddr>>>,
    asked: Mutex<HashMap<String, usize>>,
}

impl Script {
    fn times(&self, name: &str) -> usize {
        self.asked.lock().unwrap().get(name).copied().unwrap_or_default()
    }
}

#[async_trait]
impl Resolve for Script {
    async fn resolve(&self, name: &str, _: Busy) -> io::Result<Vec<IpAddr>> {
        let mut asked = self.asked.lock().unwrap();
        let times = asked.entry(name.to_owned()).or_default();
        *times += 1;
        let answers = self.answers.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(answers[(*times - 1).min(answers.len() - 1)].clone())
    }
}

fn script(answers: &[(&'static str, &[&[&str]])]) -> Arc<Script> {
    let address = |text: &&str| text.parse().unwrap();
    let list = |texts: &&[&str]| texts.iter().map(address).collect();
    let answers = answers.iter().map(|(name, all)| (*name, all.iter().map(list).collect()));
    Arc::new(Script { answers: answers.collect(), ..Script::default() })
}

/// A server that greets, keeps what it is told, and counts who is connected.
#[derive(Debug, Clone, Default)]
struct Server {
    port: u16,
    heard: Arc<Mutex<Vec<u8>>>,
    total: Arc<AtomicUsize>,
    now: Arc<AtomicUsize>,
}

impl Server {
    /// Listens on both addresses, at one port; returns the one that may be reached and the other.
    async fn pair(greeting: &'static str) -> (Self, Self) {
        loop {
            let good = TcpListener::bind("127.0.0.2:0").await.unwrap();
            let port = good.local_addr().unwrap().port();
            if let Ok(bad) = TcpListener::bind(("127.0.0.1", port)).await {
                return (Self::serve(good, greeting), Self::serve(bad, "bad"));
            }
        }
    }

    fn serve(listener: TcpListener, greeting: &'static str) -> Self {
        let server = Self { port: listener.local_addr().unwrap().port(), ..Self::default() };
        let seen = server.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let seen = seen.clone();
                seen.total.fetch_add(1, Ordering::SeqCst);
                seen.now.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    let _ = stream.write_all(greeting.as_bytes()).await;
                    let mut piece = [0; 4096];
                    while let Ok(length @ 1..) = stream.read(&mut piece).await {
                        seen.heard.lock().unwrap().extend_from_slice(&piece[..length]);
                    }
                    seen.now.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        server
    }

    fn heard(&self) -> String {
        String::from_utf8_lossy(&self.heard.lock().unwrap()).into_owned()
    }

    fn total(&self) -> usize {
        self.total.load(Ordering::SeqCst)
    }
}

fn options(resolver: Arc<Script>) -> EgressOptions {
    let private = vec!["127.0.0.2".parse().unwrap()];
    EgressOptions { private, resolver, ..EgressOptions::default() }
}

/// The same, with services that whoever may reach everything reaches as well.
fn serving(resolver: Arc<Script>, port: u16, hosts: &[(&str, &str)]) -> EgressOptions {
    let host = |(name, address): &(&str, &str)| format!("{name}:{port}={address}").parse().unwrap();
    EgressOptions { hosts: hosts.iter().map(host).collect(), ..options(resolver) }
}

/// The backends that have a network: each on its own, since each has to hold.
fn backends(options: &EgressOptions) -> Vec<LinuxBackend> {
    let mut all = vec![LinuxBackend::new().unwrap().reaching(options.clone())];
    if rustix::process::geteuid().is_root() {
        for runtime in [OciRuntime::Crun, OciRuntime::Runc] {
            let backend = OciBackend::new(runtime).unwrap().reaching(options.clone());
            all.push(backend.into_maker());
        }
    }
    all
}

fn allowing(allowed: &[&str]) -> SandboxSpec {
    SandboxSpec {
        network_enabled: allowed.is_empty(),
        allowed_network: allowed.iter().map(|text| (*text).to_owned()).collect(),
        ..SandboxSpec::default()
    }
}

async fn made(backend: &LinuxBackend, allowed: &[&str]) -> LinuxSandbox {
    backend.create(&allowing(allowed), &CreateOptions::default()).await.unwrap()
}

fn reach(deny: &[&str], allow: &[&str]) -> Reach {
    let list = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    Reach { deny: list(deny), allow: list(allow) }
}

const ALL: &[&str] = &["0.0.0.0/0", "::/0"];

/// What every script of these begins with: each says in one word what became of it.
const PRELUDE: &str = r#"
import socket, ssl, struct, sys, time
def word(error):
    return type(error).__name__
def say(host, port, data=b""):
    try:
        s = socket.create_connection((host, port), 10)
        s.settimeout(10)
        if data: s.sendall(data)
        return s.recv(400).decode("latin1").split("\r\n")[0] or "EOF"
    except Exception as e:
        return word(e)
def ask(*labels, kind=1):
    q = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0)
    for l in labels: q += bytes([len(l)]) + l
    q += b"\0" + struct.pack(">HH", kind, 1)
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(5)
    u.sendto(q, ("127.0.0.1", 53))
    a = u.recv(512)
    return a[3] & 15, struct.unpack(">H", a[6:8])[0]
"#;

async fn python(sandbox: &dyn Sandbox, script: &str) -> Vec<String> {
    let command = Command::new("python3").args(["-c", &format!("{PRELUDE}\n{script}")]);
    let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.exit_code, 0, "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(str::to_owned).collect()
}

mod reached {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_allowed_is_reached_and_nothing_else() {
        let names = script(&[("good.test", &[&["127.0.0.2"]]), ("other.test", &[&["127.0.0.2"]])]);
        for backend in backends(&options(names.clone())) {
            let (good, _bad) = Server::pair("hello\r\n").await;
            let port = good.port;
            let sandbox =
                made(&backend, &[&format!("good.test:{port}"), "203.0.113.0/24"][..1]).await;
            let can = sandbox.capabilities();
            assert!(can.has_network && can.allowed_destinations == [format!("good.test:{port}")]);
            let said = python(
                &sandbox,
                &format!(
                    "print(say('good.test', {port})); print(say('GOOD.test.', {port}))\n\
                     print(say('good.test', {port} + 1)); print(say('other.test', {port}))\n\
                     print(say('1.1.1.1', 80)); print(say('127.0.0.2', {port})); print(say('::1', {port}))\n\
                     print(say('2606:4700::1111', 80)); print(say('127.0.0.1', 1))\n\
                     u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
                     u.connect((socket.gethostbyname('good.test'), 443)); u.send(b'x'); u.settimeout(5)\n\
                     try: print(u.recv(1))\n\
                     except OSError as e: print(word(e))\n\
                     print(ask(b'good', b'test', kind=28), ask(b'other', b'test'))"
                ),
            )
            .await;
            let name = backend.name();
            assert_eq!(said[..2], ["hello", "hello"], "{name}: {said:?}");
            let others = [
                "ConnectionResetError",
                "gaierror",
                "OSError",
                "ConnectionRefusedError",
                "ConnectionRefusedError",
                "OSError",
                "ConnectionResetError",
                "ConnectionRefusedError",
                "(0, 0) (5, 0)",
            ];
            assert_eq!(said[2..], others, "{name}");
            assert_eq!((good.total(), names.times("other.test")), (2, 0), "{name}");
            sandbox.destroy().await.unwrap();
            names.asked.lock().unwrap().clear();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn bytes_go_both_ways_in_full_and_the_end_of_each_is_told() {
        let names = script(&[("good.test", &[&["127.0.0.2"]])]);
        let backend = LinuxBackend::new().unwrap().reaching(options(names));
        let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let sandbox = made(&backend, &["good.test"]).await;
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).await.unwrap();
            stream.write_all(&all).await.unwrap();
            all.len()
        });
        let said = python(
            &sandbox,
            &format!(
                "import hashlib, os\n\
                 data = b'\\x00' + os.urandom(5_000_000)\n\
                 s = socket.create_connection(('good.test', {port}))\n\
                 s.sendall(data); s.shutdown(socket.SHUT_WR)\n\
                 back = b''.join(iter(lambda: s.recv(65536), b''))\n\
                 print(back == data, len(back))"
            ),
        )
        .await;
        assert_eq!(said, ["True 5000001"]);
        assert_eq!(server.await.unwrap(), 5_000_001);
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn everything_public_is_asked_for_and_the_rest_has_no_way() {
        // An operator's network is not public, and nobody asked for it.
        let names = script(&[("own.test", &[&["127.0.0.2"]]), ("bad.test", &[&["127.0.0.1"]])]);
        for index in 0.. {
            let (good, bad) = Server::pair("hello\r\n").await;
            let port = good.port;
            let serving = serving(names.clone(), port, &[("good.test", "127.0.0.2")]);
            let Some(backend) = backends(&serving).into_iter().nth(index) else { break };
            let sandbox = made(&backend, &[]).await;
            let said = python(
                &sandbox,
                &format!(
                    "print(say('good.test', {port}), say('bad.test', {port}), say('own.test', {port}), say('good.test', {port} ^ 1))\n\
                     for a in ['10.0.0.1', '169.254.169.254', '192.168.0.1', 'fd00:ec2::254', 'fe80::1', '100.64.0.1']:\n\
                     \x20   print(say(a, 80))"
                ),
            )
            .await;
            let reset = "ConnectionResetError";
            assert_eq!(said[0], format!("hello {reset} {reset} {reset}"), "{}", backend.name());
            assert_eq!(said[1..], ["OSError"; 6], "{}", backend.name());
            assert_eq!((good.total(), bad.total()), (1, 0));
            let receipt = sandbox.verify(Extent::Everything).await.unwrap();
            assert_eq!(receipt.open().count(), 0, "{}: {receipt:?}", backend.name());
            let network = receipt.layers.iter().find(|layer| layer.layer == "network");
            assert_eq!(network.unwrap().verdict, Verdict::Held, "{}: {receipt:?}", backend.name());
            sandbox.destroy().await.unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn how_much_is_reached_can_be_changed_at_any_time() {
        let names = script(&[("third.test", &[&["127.0.0.1"]])]);
        for index in 0.. {
            let (good, _bad) = Server::pair("hello\r\n").await;
            let port = good.port;
            let hosts = [("good.test", "127.0.0.2"), ("other.test", "127.0.0.2")];
            let serving = serving(names.clone(), port, &hosts);
            let Some(backend) = backends(&serving).into_iter().nth(index) else { break };
            let sandbox = made(&backend, &[]).await;
            let name = backend.name().to_owned();
            let both = format!("print(say('good.test', {port}), say('other.test', {port}))");
            let reset = "ConnectionResetError";
            let port_of_good = format!("good.test:{port}");
            for (rules, said) in [
                (reach(&[], &[]), "hello hello".to_owned()),
                (reach(&["127.0.0.2"], &[]), format!("{reset} {reset}")),
                (reach(&["127.0.0.2"], &["other.test"]), format!("{reset} hello")),
                (reach(ALL, &[]), format!("{reset} {reset}")),
                (reach(ALL, &["1.1.1.1"]), format!("{reset} {reset}")),
                (reach(ALL, &[&port_of_good]), format!("hello {reset}")),
                (reach(&["8.8.8.8"], &[]), "hello hello".to_owned()),
            ] {
                sandbox.set_reach(&rules).await.unwrap();
                assert_eq!(sandbox.reach(), rules);
                assert_eq!(python(&sandbox, &both).await, [said], "{name}: {rules:?}");
            }
            let third = format!("print(say('third.test', {port}))");
            let asked = names.times("third.test");
            python(&sandbox, &third).await;
            assert_eq!(names.times("third.test"), asked + 1, "{name}: control: it is looked up");
            sandbox.set_reach(&reach(ALL, &["good.test"])).await.unwrap();
            python(&sandbox, &third).await;
            assert_eq!(names.times("third.test"), asked + 1, "{name}: it was not even looked up");
            let host = format!("GET / HTTP/1.1\\r\\nHost: other.test:{port}\\r\\n\\r\\n");
            let heard = good.heard();
            let fronted = format!("print(say('good.test', {port}, b'{host}')); time.sleep(0.2)");
            python(&sandbox, &fronted).await;
            assert_eq!(good.heard(), heard, "{name}: whom it says that it means counts");
            for bad in [reach(&[], &["10.0.0.1"]), reach(&["a.test"], &[]), reach(&[], &["::1"])] {
                let error = sandbox.set_reach(&bad).await.unwrap_err();
                assert_eq!(error.code(), "invalid_spec", "{bad:?}: {error}");
            }
            assert_eq!(sandbox.reach(), reach(ALL, &["good.test"]), "as it was");
            sandbox.destroy().await.unwrap();
            assert_eq!(sandbox.set_reach(&Reach::default()).await.unwrap_err().code(), "ended");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_stands_and_may_not_be_reached_any_more_is_ended_and_the_rest_is_not() {
        let (good, _bad) = Server::pair("hello\r\n").await;
        let port = good.port;
        let hosts = [("good.test", "127.0.0.2"), ("other.test", "127.0.0.3")];
        let backend = LinuxBackend::new().unwrap().reaching(serving(script(&[]), port, &hosts));
        let other = Server::serve(TcpListener::bind(("127.0.0.3", port)).await.unwrap(), "hi\r\n");
        let sandbox = Arc::new(made(&backend, &[]).await);
        let script = format!(
            "a = socket.create_connection(('good.test', {port})); a.recv(9)\n\
             b = socket.create_connection(('other.test', {port})); b.recv(9)\n\
             b.settimeout(20)\n\
             try: print(b.recv(1))\n\
             except OSError as e: print(word(e))\n\
             a.sendall(b'still'); a.shutdown(1); print(a.recv(1))"
        );
        let inside = sandbox.clone();
        let talk = tokio::spawn(async move { python(&*inside, &script).await });
        let start = Instant::now();
        while (good.now.load(Ordering::SeqCst), other.now.load(Ordering::SeqCst)) != (1, 1) {
            assert!(start.elapsed() < Duration::from_secs(10), "both are connected");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        sandbox.set_reach(&reach(&["127.0.0.3"], &[])).await.unwrap();
        assert_eq!(talk.await.unwrap(), ["ConnectionResetError", "b''"]);
        assert_eq!(good.heard(), "still");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_without_a_network_can_be_denied_anything_and_allowed_nothing() {
        let backend = LinuxBackend::new().unwrap();
        let spec = SandboxSpec::default();
        let sandbox = backend.create(&spec, &CreateOptions::default()).await.unwrap();
        sandbox.set_reach(&Reach::nothing()).await.unwrap();
        let error = sandbox.set_reach(&reach(ALL, &["good.test"])).await.unwrap_err();
        assert_eq!(error.code(), "conflict", "{error}");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_sandbox_that_ends_is_connected_no_more() {
        let names = script(&[("good.test", &[&["127.0.0.2"]])]);
        let backend = LinuxBackend::new().unwrap().reaching(options(names));
        let (good, _bad) = Server::pair("hello\r\n").await;
        let sandbox = made(&backend, &["good.test"]).await;
        let port = good.port;
        let script = format!(
            "import os\n\
             s = socket.create_connection(('good.test', {port})); s.recv(5)\n\
             if os.fork() == 0:\n\
             \x20   os.close(1); os.close(2); time.sleep(60)\n\
             print('left')"
        );
        assert_eq!(python(&sandbox, &script).await, ["left"]);
        assert_eq!(good.now.load(Ordering::SeqCst), 1, "control: it is connected");
        sandbox.destroy().await.unwrap();
        let start = Instant::now();
        while good.now.load(Ordering::SeqCst) > 0 {
            assert!(start.elapsed() < Duration::from_secs(5), "still connected");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

mod hostile {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_network_that_may_be_reached_is_not_this_host_in_it() {
        let names =
            script(&[("good.test", &[&["127.0.0.2"]]), ("wrapped.test", &[&["::ffff:127.0.0.2"]])]);
        let (server, _bad) = Server::pair("hello\r\n").await;
        let port = server.port;
        for (private, said) in [
            ("127.0.0.0/8", "ConnectionResetError ConnectionResetError"),
            ("127.0.0.2", "hello hello"),
        ] {
            let private = vec![private.parse().unwrap()];
            let options = EgressOptions { private, ..options(names.clone()) };
            let backend = LinuxBackend::new().unwrap().reaching(options);
            let sandbox = made(&backend, &["*.test"]).await;
            let script = format!("print(say('good.test', {port}), say('wrapped.test', {port}))");
            assert_eq!(python(&sandbox, &script).await, [said]);
            sandbox.destroy().await.unwrap();
        }
        assert_eq!(server.total(), 2);
    }

    /// Never answers for some names, and counts how many wait.
    #[derive(Debug, Default)]
    struct Deaf {
        waiting: Mutex<Vec<Busy>>,
    }

    #[async_trait]
    impl Resolve for Deaf {
        async fn resolve(&self, name: &str, busy: Busy) -> io::Result<Vec<IpAddr>> {
            if name == "good.test" {
                return Ok(vec!["127.0.0.2".parse().unwrap()]);
            }
            // As a thread does that nobody can stop.
            self.waiting.lock().unwrap().push(busy);
            std::future::pending().await
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn n11_names_that_nobody_answers_for_hold_up_no_other_sandbox() {
        let resolver = Arc::new(Deaf::default());
        let options = EgressOptions { resolver: resolver.clone(), ..options(script(&[])) };
        let backend = LinuxBackend::new().unwrap().reaching(options);
        let (good, _bad) = Server::pair("hello\r\n").await;
        let (hostile, other) =
            (made(&backend, &["*.test"]).await, made(&backend, &["*.test"]).await);
        let script = "s = []\n\
                      for n in range(40):\n\
                      \x20   s.append(socket.create_connection((f'n{n}.test', 80)))\n\
                      time.sleep(1); print('open')";
        assert_eq!(python(&hostile, script).await, ["open"]);
        assert_eq!(resolver.waiting.lock().unwrap().len(), 8, "the rest waits for its turn");
        let port = good.port;
        let said = python(&other, &format!("print(say('good.test', {port}))")).await;
        assert_eq!(said, ["hello"], "another sandbox does not");
        hostile.destroy().await.unwrap();
        other.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn n6_a_name_that_leads_to_what_is_not_public_is_not_dialled() {
        let bad: &[(&str, &[&[&str]])] = &[
            ("n0.test", &[&["127.0.0.1"]]),
            ("n1.test", &[&["10.0.0.1"]]),
            ("n2.test", &[&["172.16.0.1"]]),
            ("n3.test", &[&["192.168.0.1"]]),
            ("n4.test", &[&["169.254.169.254"]]),
            ("n5.test", &[&["100.64.0.1"]]),
            ("n6.test", &[&["::1"]]),
            ("n7.test", &[&["fc00::1"]]),
            ("n8.test", &[&["fe80::1"]]),
            ("n9.test", &[&["::ffff:127.0.0.1"]]),
            ("n10.test", &[&["64:ff9b::7f00:1"]]),
            ("n11.test", &[&["0.0.0.0"]]),
            ("n12.test", &[&["2002:7f00:1::"]]),
            ("good.test", &[&["127.0.0.2"]]),
        ];
        let names = script(bad);
        for backend in backends(&options(names.clone())) {
            let (good, never) = Server::pair("hello\r\n").await;
            let sandbox = made(&backend, &["*.test"]).await;
            let (count, port) = (bad.len() - 1, good.port);
            let script = format!(
                "for n in range({count}): print(say(f'n{{n}}.test', {port}))\n\
                 print(say('good.test', {port}))"
            );
            let said = python(&sandbox, &script).await;
            assert!(said[..count].iter().all(|one| one == "ConnectionResetError"), "{said:?}");
            assert_eq!(said[count], "hello", "control");
            assert_eq!((never.total(), good.total()), (0, 1), "{}", backend.name());
            assert!(bad.iter().all(|(name, _)| names.times(name) > 0), "control: looked up");
            sandbox.destroy().await.unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn n7_what_was_looked_at_is_dialled_and_looked_at_once() {
        let names = script(&[
            ("turns.test", &[&["127.0.0.2"], &["127.0.0.1"]]),
            ("both.test", &[&["127.0.0.1", "127.0.0.2"]]),
        ]);
        let backend = LinuxBackend::new().unwrap().reaching(options(names.clone()));
        let (good, never) = Server::pair("hello\r\n").await;
        let sandbox = made(&backend, &["*.test"]).await;
        let port = good.port;
        let said = python(
            &sandbox,
            &format!(
                "for _ in range(20): socket.gethostbyname('turns.test')\n\
                 print(say('turns.test', {port})); print(say('turns.test', {port})); print(say('both.test', {port}))"
            ),
        )
        .await;
        assert_eq!(said, ["hello", "ConnectionResetError", "hello"]);
        assert_eq!(
            names.times("turns.test"),
            2,
            "once for each connection, and not for a question"
        );
        assert_eq!((good.total(), never.total()), (2, 0));
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn n8_whoever_is_named_is_the_one_who_is_allowed() {
        let names = script(&[("good.test", &[&["127.0.0.2"]]), ("two.test", &[&["127.0.0.2"]])]);
        for backend in backends(&options(names)) {
            let (good, never) = Server::pair("").await;
            let port = good.port;
            let sandbox = made(&backend, &["good.test", "two.test"]).await;
            let script = r#"
def http(line, host):
    return say("good.test", PORT, f"{line}\r\nHost: {host}\r\nConnection: x\r\n\r\n".encode())
print(http("GET / HTTP/1.1", "evil.test"))
print(http("GET http://evil.test/ HTTP/1.1", "good.test"))
print(http("GET http://good.test@evil.test/ HTTP/1.1", "good.test"))
print(http("GET / HTTP/1.1", "good.test@evil.test"))
print(http("GET / HTTP/1.1", "evil.test."))
print(http("GET / HTTP/1.1", "127.0.0.1"))
print(http("GET / HTTP/1.1", "0x7f.1"))
print(http("GET / HTTP/1.1", "2130706433"))
print(http("GET / HTTP/1.1", "good.test%00.evil.test"))
print(http("CONNECT evil.test:443 HTTP/1.1", "good.test"))
print(http("GET / HTTP/1.1", "good.test\r\nHost: evil.test"))
for labels in [(b"evil", b"test"), (b"0x7f", b"1"), (b"2130706433",), (b"127", b"0", b"0", b"1"),
               (b"good", b"test\0"), (b"good", b"test", b"evil"), (b"b\xc3\xbccher", b"test"), (b"",)]:
    print(ask(*labels)[0] if labels != (b"",) else 5)
def tls(name):
    c = ssl.create_default_context(); c.check_hostname = False; c.verify_mode = ssl.CERT_NONE
    try:
        c.wrap_socket(socket.create_connection(("good.test", PORT), 3), server_hostname=name)
    except Exception as e:
        return word(e)
print(tls("evil.test"))
"#
            .replace("PORT", &port.to_string());
            let said = python(&sandbox, &script).await;
            assert!(said[..11].iter().all(|one| one == "HTTP/1.1 403 Forbidden"), "{said:?}");
            assert!(said[11..19].iter().all(|one| one == "5"), "{said:?}");
            assert_eq!(said[19], "ConnectionResetError", "{said:?}");
            assert_eq!((good.heard().as_str(), never.total()), ("", 0), "{}", backend.name());
            // Controls: what is allowed goes on, as it was said, on the same paths.
            let script = r#"
def go(data):
    s = socket.create_connection(("good.test", PORT), 5); s.sendall(data); s.close()
go(b"GET /1 HTTP/1.1\r\nHost: GOOD.test.\r\n\r\n")
go(b"GET http://two.test/2 HTTP/1.1\r\nHost: two.test:80\r\n\r\n")
c = ssl.create_default_context(); c.check_hostname = False; c.verify_mode = ssl.CERT_NONE
try: c.wrap_socket(socket.create_connection(("good.test", PORT), 1), server_hostname="two.test")
except Exception as e: pass
"#
            .replace("PORT", &port.to_string());
            python(&sandbox, &script).await;
            let start = Instant::now();
            let arrived = || {
                let heard = good.heard();
                ["GET /1 HTTP/1.1\r\nHost: GOOD.test.", "GET http://two.test/2", "two.test"]
                    .iter()
                    .all(|said| heard.contains(said))
                    && heard.contains('\u{16}')
            };
            while !arrived() {
                assert!(start.elapsed() < Duration::from_secs(5), "{:?}", good.heard());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            sandbox.destroy().await.unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn n9_what_servers_read_differently_goes_nowhere() {
        let names = script(&[("good.test", &[&["127.0.0.2"]])]);
        let backend = LinuxBackend::new().unwrap().reaching(options(names));
        let (good, _never) = Server::pair("").await;
        let sandbox = made(&backend, &["good.test"]).await;
        let script = r#"
H = b"Host: good.test\r\n"
for data in [
    b"POST / HTTP/1.1\r\n" + H + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\n" + H + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
    b"POST / HTTP/1.1\r\n" + H + b"Transfer-Encoding: chunked, identity\r\n\r\n",
    b"POST / HTTP/1.1\r\n" + H + b"Transfer-Encoding : chunked\r\n\r\n",
    b"GET / HTTP/1.1\nHost: good.test\n\n",
    b"GET / HTTP/1.1\r\n" + H + b"X: a\r\n b\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + H + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: a\r\n\r\n",
    b"\r\nGET / HTTP/1.1\r\n" + H + b"\r\n",
    b"GET /\r\n",
]:
    print(say("good.test", PORT, data))
print({"ConnectionResetError": "HTTP/1.1 403 Forbidden"}.get(say("good.test", PORT, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")))
s = socket.create_connection(("good.test", PORT), 5)
s.sendall(b"GET /first HTTP/1.1\r\n" + H + b"\r\nGET /second HTTP/1.1\r\nHost: evil.test\r\n\r\n")
print(s.recv(400).split(b"\r\n")[0].decode())
"#
        .replace("PORT", &good.port.to_string());
        let said = python(&sandbox, &script).await;
        assert!(said.iter().all(|one| one == "HTTP/1.1 403 Forbidden"), "{said:?}");
        let heard = good.heard();
        assert_eq!(heard, "GET /first HTTP/1.1\r\nHost: good.test\r\n\r\n", "and the control");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn n11_a_sandbox_has_its_connections_and_no_more() {
        let names = script(&[("good.test", &[&["127.0.0.2"]])]);
        let options = EgressOptions { connections: 8, ..options(names) };
        let backend = LinuxBackend::new().unwrap().reaching(options);
        let (good, _never) = Server::pair("hello\r\n").await;
        let (one, other) =
            (made(&backend, &["good.test"]).await, made(&backend, &["good.test"]).await);
        let port = good.port;
        // Half of those that get through say the beginning of a request, one says nothing more for ever.
        let hog = format!(
            "import select\n\
             waiting = []\n\
             for i in range(100):\n\
             \x20   s = socket.socket(); s.setblocking(False)\n\
             \x20   s.connect_ex((socket.gethostbyname('good.test'), {port})); waiting.append(s)\n\
             end = time.time() + 3; greeted = set()\n\
             while time.time() < end:\n\
             \x20   for s in select.select([s for s in waiting if s not in greeted], [], [], 0.1)[0]:\n\
             \x20       try:\n\
             \x20           if s.recv(7): greeted.add(s); s.send(b'GET / HT')\n\
             \x20       except OSError: pass\n\
             print(len(greeted))\n\
             first = list(greeted)\n\
             for s in first: s.close(); waiting.remove(s)\n\
             end = time.time() + 10; more = 0\n\
             while time.time() < end and not more:\n\
             \x20   for s in select.select(waiting, [], [], 0.1)[0]:\n\
             \x20       try: more += bool(s.recv(7))\n\
             \x20       except OSError: pass\n\
             print(more > 0)"
        );
        let busy = python(&one, &hog);
        let meanwhile = async {
            tokio::time::sleep(Duration::from_millis(1500)).await;
            python(&other, &format!("print(say('good.test', {port}))")).await
        };
        let (busy, meanwhile) = tokio::join!(busy, meanwhile);
        assert_eq!(meanwhile, ["hello"], "another sandbox has its own");
        assert_eq!(busy, ["8", "True"], "no more than its connections, and again when some end");
        one.destroy().await.unwrap();
        other.destroy().await.unwrap();
    }
}

/// Runs the cases of this very program once more, as `nobody`.
#[test]
fn the_same_holds_for_a_plain_user() {
    plain_user::rerun(&["reached::", "hostile::"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_is_refused_where_there_is_none_to_give() {
    let backends: [Box<dyn IsolationBackend>; 2] = [
        Box::new(LandlockBackend::new().unwrap()),
        Box::new(OciBackend::new(OciRuntime::Runsc).unwrap()),
    ];
    for backend in backends {
        for allowed in [&[][..], &["example.com"], &["1.1.1.1:53"]] {
            let error = backend.create_sandbox(&allowing(allowed)).await.unwrap_err();
            assert_eq!(error.code(), "unsupported", "{}: {error}", backend.name());
            assert!(error.hint().is_some());
        }
    }
    let backend = LinuxBackend::new().unwrap();
    for bad in [
        "user@example.com",
        "example.com%00.evil",
        "127.0.0.1",
        "0x7f.1",
        "2130706433",
        "0177.0.0.1",
        "::1",
        "10.0.0.0/8",
        "169.254.169.254",
        "100.64.0.0/10",
        "fe80::1",
        "64:ff9b::7f00:1",
        "::ffff:127.0.0.1",
    ] {
        let error = backend.create_sandbox(&allowing(&[bad])).await.unwrap_err();
        assert_eq!(error.code(), "invalid_spec", "{bad}: {error}");
        assert!(error.hint().is_some());
    }
    let off = EgressOptions { enabled: false, ..EgressOptions::default() };
    let error =
        backend.reaching(off).create_sandbox(&allowing(&["example.com"])).await.unwrap_err();
    assert_eq!(error.code(), "unsupported", "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_connects_while_nobody_is_there_is_served_by_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let names = script(&[("good.test", &[&["127.0.0.2"]])]);
    let (good, _never) = Server::pair("hello\r\n").await;
    let begin =
        || LinuxBackend::with_runtime(directory.path()).unwrap().reaching(options(names.clone()));
    let spec = allowing(&["good.test"]);
    let persistent = CreateOptions { persistent: true, ..CreateOptions::default() };
    let first = begin();
    let sandbox = first.create(&spec, &persistent).await.unwrap();
    let (id, anchor) = (sandbox.id().clone(), sandbox.anchor().unwrap());
    let port = good.port;
    let script = format!(
        "import os\n\
         if os.fork() == 0:\n\
         \x20   os.setsid(); os.close(1); os.close(2)\n\
         \x20   time.sleep(1); open('/tmp/said', 'w').write(say('good.test', {port}))\n\
         print('begun')"
    );
    assert_eq!(python(&sandbox, &script).await, ["begun"]);
    drop((sandbox, first));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(good.total(), 0, "control: nobody was there");
    let second = begin();
    let again = second.adopt(&id, &spec, &anchor).await.unwrap().expect("it lives");
    let wait = "end = time.time() + 5\n\
                import os\n\
                while time.time() < end and not (os.path.exists('/tmp/said') and open('/tmp/said').read()): time.sleep(0.05)\n\
                print(open('/tmp/said').read())";
    assert_eq!(python(&*again, wait).await, ["hello"]);
    // What was denied stays so, also for who made it anew.
    again.set_reach(&Reach::nothing()).await.unwrap();
    drop((again, second));
    let denied = begin();
    let again = denied.adopt(&id, &spec, &anchor).await.unwrap().expect("it lives");
    assert_eq!(again.reach(), Reach::nothing());
    let once = format!("print(say('good.test', {port}))");
    assert_eq!(python(&*again, &once).await, ["ConnectionResetError"]);
    std::fs::write(directory.path().join(id.as_str()).join("reach"), "{\"deny\":").unwrap();
    drop((again, denied));
    let unread = begin();
    let again = unread.adopt(&id, &spec, &anchor).await.unwrap().expect("it lives");
    assert_eq!(again.reach(), Reach::nothing(), "what cannot be read allows nothing");
    assert_eq!(python(&*again, &once).await, ["ConnectionResetError"]);
    // And whoever is told anew knows it again.
    again.set_reach(&Reach::default()).await.unwrap();
    assert_eq!(python(&*again, &once).await, ["hello"], "control");
    again.set_reach(&Reach::nothing()).await.unwrap();
    drop((again, unread));
    // One that may give nobody a network any more gives it to nobody, and ends nothing for that.
    let off = EgressOptions { enabled: false, ..options(names.clone()) };
    let third = LinuxBackend::with_runtime(directory.path()).unwrap().reaching(off);
    let again = third.adopt(&id, &spec, &anchor).await.unwrap().expect("it lives");
    assert!(!again.capabilities().has_network);
    let before = good.total();
    let refused = vec!["ConnectionResetError".to_owned()];
    assert_eq!((python(&*again, &once).await, good.total()), (refused, before));
    // What is denied meanwhile is denied when there is a network again.
    again.set_reach(&reach(&["127.0.0.2"], &[])).await.unwrap();
    drop((again, third));
    let last = begin();
    let again = last.adopt(&id, &spec, &anchor).await.unwrap().expect("it lives");
    assert_eq!(again.reach(), reach(&["127.0.0.2"], &[]));
    assert_eq!(python(&*again, &once).await, ["ConnectionResetError"]);
    again.set_reach(&Reach::default()).await.unwrap();
    assert_eq!(python(&*again, &once).await, ["hello"], "control");
    again.destroy().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_reach_less_than_before_keeps_the_rest_and_what_was_denied_also_when_made_anew() {
    let directory = tempfile::tempdir().unwrap();
    let names = script(&[("good.test", &[&["127.0.0.2"]]), ("other.test", &[&["127.0.0.2"]])]);
    let (good, _bad) = Server::pair("hello\r\n").await;
    let port = good.port;
    let begin = |private: &[&str]| {
        let layers = warren::layers::Layers::open(directory.path().join("layers")).unwrap();
        let private = private.iter().map(|text| text.parse().unwrap()).collect();
        let options = EgressOptions { private, ..options(names.clone()) };
        let homes = Some(directory.path().join("homes"));
        LinuxBackend::with_layers(homes, layers).unwrap().reaching(options)
    };
    let (first, spec) = (begin(&["127.0.0.2", "10.77.0.0/16"]), ["10.77.0.0/16", "*.test"]);
    let persistent = CreateOptions { persistent: true, ..CreateOptions::default() };
    let sandbox = first.create(&allowing(&spec), &persistent).await.unwrap();
    assert_eq!(sandbox.capabilities().allowed_destinations, spec, "control");
    let saved = sandbox.snapshot("saved").await.unwrap();
    let rules = reach(ALL, &["good.test"]);
    sandbox.set_reach(&rules).await.unwrap();
    let (id, anchor) = (sandbox.id().clone(), sandbox.anchor().unwrap());
    drop((sandbox, first));

    // Nobody may reach that network any more.
    let second = begin(&["127.0.0.2"]);
    let again = second.adopt(&id, &allowing(&spec), &anchor).await.unwrap().expect("it lives");
    let look = format!(
        "print(say('good.test', {port}), say('other.test', {port}), say('10.77.0.1', {port}))"
    );
    let can = again.capabilities();
    assert!(can.has_network && can.allowed_destinations == ["*.test"], "{can:?}");
    assert_eq!(again.reach(), rules);
    let before = "hello ConnectionResetError ConnectionResetError";
    assert_eq!(python(&*again, &look).await, [before], "it was made with a way there");
    again.restore(&saved).await.unwrap();
    assert_eq!(again.reach(), rules, "also when it is made anew");
    let made_anew = "hello ConnectionResetError OSError";
    assert_eq!(python(&*again, &look).await, [made_anew], "and has none any more");
    again.set_reach(&reach(ALL, &["*.test"])).await.unwrap();
    assert!(python(&*again, &look).await[0].starts_with("hello hello "), "control");

    // One that was made anew while nobody could tell what was denied.
    let anchor = again.anchor().unwrap();
    std::fs::write(directory.path().join("homes").join(id.as_str()).join("reach"), "?").unwrap();
    drop((again, second));
    let third = begin(&["127.0.0.2"]);
    let again = third.adopt(&id, &allowing(&spec), &anchor).await.unwrap().expect("it lives");
    again.restore(&saved).await.unwrap();
    assert_eq!(again.reach(), Reach::nothing());
    let nothing = python(&*again, &look).await;
    assert!(nothing[0].starts_with("ConnectionResetError ConnectionResetError "), "{nothing:?}");
    again.destroy().await.unwrap();
}

/// H6: of what a client looked up, connected to and was denied nothing reaches the next through the pool.
#[tokio::test(flavor = "multi_thread")]
async fn h6_names_connections_and_denials_of_a_client_reach_no_other_through_the_pool() {
    let names = script(&[("shared.test", &[&["127.0.0.2"]]), ("alices.test", &[&["127.0.0.2"]])]);
    for index in 0.. {
        let (good, _bad) = Server::pair("hello\r\n").await;
        let port = good.port;
        let Some(backend) = backends(&options(names.clone())).into_iter().nth(index) else { break };
        let kind = backend.name().to_owned();
        let pool = PoolConfig { min_warm: 2, warm_profiles: Vec::new(), ..PoolConfig::default() };
        let config = SandboxManagerConfig { pool, ..SandboxManagerConfig::default() };
        let manager = DefaultSandboxManager::new(vec![Arc::new(backend)], config);
        // Their names are known to both, as their spec says, and neither has looked one up.
        let spec = allowing(&["alices.test", "shared.test"]);
        manager.keep_warm(spec.clone()).unwrap();
        let take = async |client: &str| -> (SandboxSession, Arc<dyn Sandbox>) {
            let began = Instant::now();
            while manager.stats().await.pool_size == 0 {
                assert!(began.elapsed() < Duration::from_secs(20), "one is warm");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let options =
                SandboxSelectionOptions { use_pool: true, ..SandboxSelectionOptions::default() };
            manager.acquire(&spec, &options, client).await.unwrap()
        };
        let (session, sandbox) = take("alice").await;
        // A daemon of hers stays connected.
        let connects = format!(
            "import os\n\
             print(socket.gethostbyname('alices.test'))\n\
             print(say(socket.gethostbyname('alices.test'), {port}), say('shared.test', {port}))\n\
             sys.stdout.flush()\n\
             s = socket.create_connection(('alices.test', {port}), 10); s.recv(5)\n\
             if os.fork() == 0:\n\
             \x20   os.setsid(); os.close(0); os.close(1); os.close(2); time.sleep(600)"
        );
        let said = python(&*sandbox, &connects).await;
        let [address, hello] = &said[..] else { panic!("{kind}: {said:?}") };
        assert_eq!(hello, "hello hello", "{kind}: control: by its address it is reached");
        let connected = async |wanted: usize| {
            let began = Instant::now();
            while good.now.load(Ordering::SeqCst) != wanted {
                assert!(
                    began.elapsed() < Duration::from_secs(20),
                    "{kind}: not {wanted} connections"
                );
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        // Control: hers is there, and the others that are over are not counted.
        connected(1).await;
        let asked = |name: &str| names.times(name);
        let before = (asked("alices.test"), asked("shared.test"));
        sandbox.set_reach(&Reach::nothing()).await.unwrap();
        let once = format!("print(say('shared.test', {port}))");
        assert_eq!(python(&*sandbox, &once).await, ["ConnectionResetError"], "{kind}: control");
        manager.release(&session, false).await.unwrap();
        connected(0).await;
        for other in 0..5 {
            let (session, sandbox) = take(&format!("bob {other}")).await;
            assert_eq!(sandbox.reach(), Reach::default(), "{kind}: her denials are not his");
            // What her names stood for stands for nothing to whoever looked none up.
            let tries = format!(
                "print([line for line in open('/proc/net/tcp').readlines()[1:] if line.split()[3] == '01'])\n\
                 print(say('{address}', {port}))"
            );
            let said = python(&*sandbox, &tries).await;
            assert_eq!(said[0], "[]", "{kind}: a connection of somebody else");
            assert_ne!(said[1], "hello", "{kind}: by an address that he was never given");
            assert_eq!(asked("alices.test"), before.0, "{kind}");
            let once = format!("print(say('shared.test', {port}))");
            assert_eq!(python(&*sandbox, &once).await, ["hello"], "{kind}: control: his own way");
            assert_eq!(
                asked("shared.test"),
                before.1 + 1 + other,
                "{kind}: he looks it up himself"
            );
            manager.release(&session, other % 2 == 0).await.unwrap();
        }
        let rate = manager.stats().await.pool_hit_rate;
        assert!((rate - 1.0).abs() < 1e-9, "{kind}: control: all were warm: {rate}");
        manager.shutdown(Shutdown::StopAll).await;
    }
}
