//! Connections to servers inside a sandbox of the linux backend.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use warren::backend::{FakeBackend, LinuxBackend};
use warren::{
    Command, CreateOptions, DefaultSandboxManager, ExecContext, PoolConfig, Sandbox, SandboxError,
    SandboxManager, SandboxManagerConfig, SandboxSelectionOptions, SandboxSpec, SessionTimeouts,
};

async fn sh(sandbox: &dyn Sandbox, script: &str) -> String {
    let command = Command::new("sh").args(["-c", script]);
    let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Starts a server that sends back what it gets, and waits until it listens.
async fn echo(sandbox: &dyn Sandbox, address: &str, port: u16) {
    let family = if address.contains(':') { "socket.AF_INET6" } else { "socket.AF_INET" };
    let server = format!(
        "import socket, threading\n\
         s = socket.create_server(('{address}', {port}), family={family})\n\
         print(flush=True)\n\
         def serve(c):\n\
         \x20   while d := c.recv(65536): c.sendall(d)\n\
         \x20   c.close()\n\
         while True: threading.Thread(target=serve, args=s.accept()[:1], daemon=True).start()\n"
    );
    // It says a line when it listens, and goes on without its shell.
    let script = format!(
        "cat > /tmp/{port}.py <<'E'\n{server}E\nmkfifo /tmp/{port}\n\
         python3 /tmp/{port}.py > /tmp/{port} 2> /dev/null & head -n 1 /tmp/{port} > /dev/null"
    );
    sh(sandbox, &script).await;
}

async fn sandbox(profile: &str) -> (LinuxBackend, impl Sandbox) {
    let backend = LinuxBackend::new().unwrap();
    let spec = SandboxSpec { profile: profile.to_owned(), ..SandboxSpec::default() };
    let made = backend.create(&spec, &CreateOptions::default()).await.unwrap();
    (backend, made)
}

async fn refused(sandbox: &dyn Sandbox, port: u16) -> SandboxError {
    let began = Instant::now();
    let error = sandbox.connect(port).await.unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(2), "at once: {error}");
    error
}

#[tokio::test]
async fn a_server_is_reached_on_whichever_loopback_it_listens() {
    let (_backend, sandbox) = sandbox("default").await;
    for (port, address) in [(8_001, "127.0.0.1"), (8_002, "0.0.0.0"), (8_003, "::1")] {
        assert_eq!(refused(&sandbox, port).await.code(), "port_closed", "control: {address}");
        echo(&sandbox, address, port).await;
        let mut stream = sandbox.connect(port).await.unwrap();
        stream.write_all(address.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut back = String::new();
        stream.read_to_string(&mut back).await.unwrap();
        assert_eq!(back, address);
    }
    let error = refused(&sandbox, 0).await;
    assert_eq!(error.code(), "invalid_spec");
    sandbox.destroy().await.unwrap();
}

#[tokio::test]
async fn only_the_sandboxs_own_ports_are_reached() {
    let host = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = host.local_addr().unwrap().port();
    std::net::TcpStream::connect(("127.0.0.1", port)).expect("control: the host is listening");
    let (_one, first) = sandbox("default").await;
    let (_two, second) = sandbox("default").await;
    echo(&first, "127.0.0.1", 8_000).await;
    first.connect(8_000).await.unwrap();
    assert_eq!(refused(&first, port).await.code(), "port_closed", "the host's");
    assert_eq!(refused(&second, 8_000).await.code(), "port_closed", "another sandbox's");
    // Ports that the kernel gives out itself: a socket must not be connected to itself.
    for port in (40_000..41_000).step_by(10) {
        assert_eq!(refused(&second, port).await.code(), "port_closed", "{port}");
    }
}

#[tokio::test]
async fn a_suspended_or_ended_sandbox_refuses_at_once_and_an_open_connection_goes_on() {
    let (_backend, sandbox) = sandbox("default").await;
    echo(&sandbox, "127.0.0.1", 8_000).await;
    let mut stream = sandbox.connect(8_000).await.unwrap();
    sandbox.suspend().await.unwrap();
    assert_eq!(refused(&sandbox, 8_000).await.code(), "suspended");
    stream.write_all(b"later").await.unwrap();
    sandbox.resume().await.unwrap();
    let mut back = [0; 5];
    stream.read_exact(&mut back).await.unwrap();
    assert_eq!(&back, b"later");
    sandbox.destroy().await.unwrap();
    assert_eq!(refused(&sandbox, 8_000).await.code(), "ended");
    let end = tokio::time::timeout(Duration::from_secs(5), stream.read(&mut back)).await;
    assert!(matches!(end, Ok(Ok(0) | Err(_))), "the kernel closed it: {end:?}");
}

#[tokio::test]
async fn strict_has_no_tcp_and_says_so() {
    let (_backend, sandbox) = sandbox("strict").await;
    let error = refused(&sandbox, 8_000).await;
    assert_eq!(error.code(), "unsupported");
    assert!(error.hint().unwrap().contains("strict"), "{error}");
    assert_eq!(sh(&sandbox, "echo fine").await, "fine", "init is none the worse");
}

#[tokio::test]
async fn a_server_that_accepts_nothing_times_out_and_holds_up_nobody() {
    let (_backend, sandbox) = sandbox("default").await;
    let server = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 8000)); \
                  s.listen(0); print(flush=True); time.sleep(60)";
    let script =
        format!("mkfifo /tmp/p; python3 -c \"{server}\" > /tmp/p 2> /dev/null & head -n 1 /tmp/p");
    sh(&sandbox, &script).await;
    let _first = sandbox.connect(8_000).await.unwrap();
    let waiting = sandbox.connect(8_000);
    let meanwhile = async {
        let began = Instant::now();
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(sh(&sandbox, "echo fine").await, "fine");
        assert!(began.elapsed() < Duration::from_secs(4), "init was not held up");
    };
    let (waited, ()) = tokio::join!(waiting, meanwhile);
    assert_eq!(waited.unwrap_err().code(), "timeout");
}

#[tokio::test]
async fn a_thousand_connections_leave_no_descriptor_behind() {
    let (_backend, sandbox) = sandbox("default").await;
    echo(&sandbox, "127.0.0.1", 8_000).await;
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    sandbox.connect(8_000).await.unwrap();
    let before = open();
    for _ in 0..1_000 {
        let mut stream = sandbox.connect(8_000).await.unwrap();
        stream.write_all(b"x").await.unwrap();
        stream.read_exact(&mut [0]).await.unwrap();
    }
    assert!(open() <= before + 1, "{} and {before}", open());
    // Init has none either, or it could not start a command.
    assert_eq!(sh(&sandbox, "echo fine").await, "fine");
}

/// S3, in real time because real sockets do not wait for a paused clock.
#[tokio::test]
async fn s3_while_a_connection_is_open_its_session_is_not_idle() {
    let backend = FakeBackend::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    backend.open_port(80, listener.local_addr().unwrap());
    let pool = PoolConfig { enabled: false, ..PoolConfig::default() };
    let idle = Duration::from_millis(300);
    let config = SandboxManagerConfig {
        pool,
        default_timeouts: SessionTimeouts { idle_timeout: idle, ..SessionTimeouts::default() },
        cleanup_interval: Duration::from_millis(20),
        ..SandboxManagerConfig::default()
    };
    let manager = DefaultSandboxManager::new(vec![Arc::new(backend)], config);
    let options = SandboxSelectionOptions::default();
    let (session, sandbox) = manager.acquire(&SandboxSpec::default(), &options, "c").await.unwrap();
    let stream = sandbox.connect(80).await.unwrap();
    assert_eq!(sandbox.connect(81).await.unwrap_err().code(), "port_closed");
    tokio::time::sleep(idle * 4).await;
    let lives = async || manager.get_session(&session.session_id).await.unwrap().is_some();
    assert!(lives().await, "it is in use");
    drop(stream);
    let began = Instant::now();
    while lives().await {
        assert!(began.elapsed() < Duration::from_secs(10), "control: it ends when it is not");
        tokio::time::sleep(idle / 10).await;
    }
    assert_eq!(sandbox.connect(80).await.unwrap_err().code(), "ended");
}
