//! A daemon of one's own, with a backend that has no kernel in it.

use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// No test waits longer, whatever is stuck.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon that runs. Dropping it ends it.
pub(crate) struct Daemon {
    child: Option<Child>,
    pub(crate) place: Place,
    /// What it tells the service manager, after that it is ready.
    pub(crate) notices: UnixDatagram,
}

/// Where a daemon has everything.
#[derive(Clone)]
pub(crate) struct Place {
    directory: std::sync::Arc<tempfile::TempDir>,
    backend: &'static str,
    /// More settings, as they are in the environment.
    settings: &'static [(&'static str, &'static str)],
    /// The binary, if it is not the one that was built with the tests.
    program: Option<PathBuf>,
}

/// What a run of the binary gave.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Place {
    pub(crate) fn new() -> Self {
        Self::with_backend("fake")
    }

    pub(crate) fn with_backend(backend: &'static str) -> Self {
        Self::with_settings(backend, &[])
    }

    pub(crate) fn with_settings(
        backend: &'static str,
        settings: &'static [(&'static str, &'static str)],
    ) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        Self { directory: directory.into(), backend, settings, program: None }
    }

    /// Has another build of the binary be the daemon.
    pub(crate) fn with_program(self, program: Option<PathBuf>) -> Self {
        Self { program, ..self }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Makes a command for the binary that finds everything here.
    pub(crate) fn warren(&self, args: &[&str]) -> Command {
        let built = || env!("CARGO_BIN_EXE_warren").into();
        let mut command = Command::new(self.program.clone().unwrap_or_else(built));
        command
            .args(args)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", self.directory.path())
            .env("WARREN_SOCKET", self.path("run/warren.sock"))
            .env("WARREN_STATE_DIR", self.path("state"))
            .env("WARREN_BACKENDS", self.backend)
            .envs(self.settings.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Outcome {
        outcome(self.warren(args).output().expect("the program runs"))
    }
}

pub(crate) fn outcome(output: Output) -> Outcome {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    Outcome { code: output.status.code(), stdout, stderr }
}

impl Daemon {
    pub(crate) fn start() -> Self {
        Self::start_in(Place::new(), &[])
    }

    /// Starts one and waits until it says that it is ready.
    pub(crate) fn start_in(place: Place, args: &[&str]) -> Self {
        let notify = place.path("notify");
        let _ = std::fs::remove_file(&notify);
        let socket = UnixDatagram::bind(&notify).expect("a socket");
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut command = place.warren(&["serve"]);
        let log = std::fs::File::create(place.path("log")).expect("a log");
        let child = command.args(args).env("NOTIFY_SOCKET", &notify).stderr(log).spawn();
        let child = Some(child.expect("the daemon starts"));
        let this = Self { child, place, notices: socket };
        assert_eq!(this.notice(), "READY=1");
        this
    }

    /// Waits for what it tells the service manager next.
    pub(crate) fn notice(&self) -> String {
        let mut buffer = [0; 64];
        let length = loop {
            match self.notices.recv(&mut buffer) {
                // Whoever was frozen for a while is told so like this.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("no word ({error}): {}", self.log()),
                Ok(length) => break length,
            }
        };
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    pub(crate) fn run(&self, args: &[&str]) -> Outcome {
        self.place.run(args)
    }

    /// Runs what must succeed and returns what it printed, without the last line's end.
    #[track_caller]
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let seen = self.run(args);
        assert_eq!((seen.code, seen.stderr.as_str()), (Some(0), ""), "{args:?}: {seen:?}");
        seen.stdout.trim_end().to_owned()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.place.path("log")).unwrap_or_default()
    }

    /// Sends a signal and waits for the end.
    pub(crate) fn end(mut self, signal: &str) -> (Option<i32>, Self) {
        let mut child = self.child.take().expect("it runs");
        let id = child.id().to_string();
        let sent = Command::new("kill").args([&format!("-{signal}"), &id]).status();
        assert!(sent.expect("kill runs").success());
        let began = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().expect("a status") {
                break status;
            }
            assert!(began.elapsed() < PATIENCE, "it does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        };
        (status.code(), self)
    }

    /// Kills it at once, as nothing can be that is told to.
    pub(crate) fn kill(mut self) -> Self {
        let mut child = self.child.take().expect("it runs");
        child.kill().expect("it is killed");
        let status = child.wait().expect("a status");
        assert_eq!(status.code(), None, "control: it was killed: {}", self.log());
        self
    }

    pub(crate) fn into_place(mut self) -> Place {
        assert!(self.child.is_none(), "end it first");
        std::mem::replace(&mut self.place, Place::new())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        // What it kept is made to stay, what is warm too: the last one takes it all along.
        if !matches!(self.place.backend, "fake" | "host") {
            stop_all(&self.place);
        }
    }
}

/// Ends everything that daemons left in a place.
fn stop_all(place: &Place) {
    let notify = place.path("last");
    let _ = std::fs::remove_file(&notify);
    let Ok(socket) = UnixDatagram::bind(&notify) else { return };
    let _ = socket.set_read_timeout(Some(PATIENCE));
    let mut command = place.warren(&["serve", "--stop-all"]);
    let Ok(mut last) = command.env("NOTIFY_SOCKET", &notify).stderr(Stdio::null()).spawn() else {
        return;
    };
    // One that cannot start has nothing to end.
    let _ = socket.recv(&mut [0; 64]);
    let _ = Command::new("kill").args(["-TERM", &last.id().to_string()]).status();
    let _ = last.wait();
}

/// Greets whoever comes; returns at which port of this host.
pub(crate) fn greet() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let port = listener.local_addr().expect("it is bound").port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = std::io::Write::write_all(&mut &stream, b"hello");
        }
    });
    port
}
