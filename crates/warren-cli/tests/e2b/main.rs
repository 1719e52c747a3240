//! E2B's own SDKs, as they are published, against a daemon with real sandboxes.
//!
//! Needs root, and pip and npm with their registries: packages are installed below `.test-env` once.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

/// The releases that E2B's own tests belong to, and whatever is newest.
const PYTHON: [&str; 2] = ["e2b==2.45.1", "e2b"];
const NODE: [&str; 2] = ["e2b@2.45.0", "e2b@latest"];

/// A daemon that speaks E2B. Dropping it ends it, and all its sandboxes.
struct Daemon {
    child: Child,
    directory: tempfile::TempDir,
    /// What it printed, as variables.
    variables: Vec<(String, String)>,
}

impl Daemon {
    fn start() -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), "127.0.0.1:0", &[])
    }

    fn start_in(directory: tempfile::TempDir, listen: &str, more: &[&str]) -> Self {
        Self::start_as(warren(directory.path()), directory, listen, more)
    }

    fn start_as(
        mut command: Command,
        directory: tempfile::TempDir,
        listen: &str,
        more: &[&str],
    ) -> Self {
        let log =
            fs::OpenOptions::new().create(true).append(true).open(directory.path().join("log"));
        command.args(["serve", "--e2b", "--listen", listen]).args(more);
        let mut child = command.stderr(log.unwrap()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let variables: Vec<_> = (0..3)
            .map(|_| {
                let line = lines.next().expect("three lines, before it serves").unwrap();
                let (name, value) = line.strip_prefix("export ").unwrap().split_once('=').unwrap();
                (name.to_owned(), value.to_owned())
            })
            .collect();
        let names: Vec<_> = variables.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY"]);
        Self { child, directory, variables }
    }

    fn address(&self) -> String {
        self.variables[0].1.trim_start_matches("http://").to_owned()
    }

    /// Kills it as a power cut would, and starts another in its place.
    fn restart(mut self) -> Self {
        let address = self.address();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let directory = std::mem::replace(&mut self.directory, tempfile::tempdir().unwrap());
        let again = Self::start_in(directory, &address, &[]);
        assert_eq!(again.variables, self.variables, "the key of the first start is still good");
        again
    }

    /// Runs a script with an SDK and fails with what it said.
    fn run(&self, mut command: Command) -> String {
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        let Output { status, stdout, stderr } = command.output().unwrap();
        let (stdout, stderr) =
            (String::from_utf8_lossy(&stdout).into_owned(), String::from_utf8_lossy(&stderr));
        let log = fs::read_to_string(self.directory.path().join("log")).unwrap();
        let tail: Vec<_> = log.lines().rev().take(20).collect();
        assert!(status.success(), "{stdout}\n{stderr}\n{tail:#?}");
        stdout
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Whatever was left running goes with the next.
        let mut last = warren(self.directory.path()).args(["serve", "--stop-all"]).spawn().unwrap();
        let socket = self.directory.path().join("run/warren.sock");
        let start = Instant::now();
        while std::os::unix::net::UnixStream::connect(&socket).is_err()
            && start.elapsed() < Duration::from_secs(20)
        {
            std::thread::sleep(Duration::from_millis(20));
        }
        let pid = rustix::process::Pid::from_child(&last);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = last.wait();
    }
}

fn warren(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warren"));
    command
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", directory)
        .env("WARREN_SOCKET", directory.join("run/warren.sock"))
        .env("WARREN_STATE_DIR", directory.join("state"))
        // What is warm comes and goes by itself, and these tests count.
        .env("WARREN_POOL_ENABLED", "false")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

/// Returns a place where packages are, after `install` put them there once.
fn installed(name: &str, install: impl FnOnce(&Path) -> Command) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.test-env");
    fs::create_dir_all(&root).unwrap();
    let place = root.join(name);
    let lock = fs::File::create(root.join(format!("{name}.lock"))).unwrap();
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
    if !place.join(".done").exists() {
        fs::create_dir_all(&place).unwrap();
        let done = install(&place).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "this host cannot install {name}: {said}");
        fs::write(place.join(".done"), "").unwrap();
    }
    place
}

fn python(package: &str, script: &str) -> Command {
    let place = installed(&format!("sdk-py-{}", package.replace("==", "-")), |place| {
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "-q", "--disable-pip-version-check", "--target"]);
        pip.arg(place).arg(package);
        pip
    });
    let mut command = Command::new("python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2b").join(script));
    command.env("PYTHONPATH", place).env("PYTHONDONTWRITEBYTECODE", "1").env("NO_PROXY", "*");
    command
}

fn node(package: &str, script: &str) -> Command {
    let place = installed(&format!("sdk-js-{}", package.replace('@', "-")), |place| {
        fs::write(place.join("package.json"), "{\"private\":true}").unwrap();
        let mut npm = Command::new("npm");
        npm.args(["install", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]);
        npm.arg(package).current_dir(place);
        npm
    });
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2b").join(script);
    // Packages are looked for beside the script.
    fs::copy(&source, place.join(script)).unwrap();
    let mut command = Command::new("node");
    command.arg(place.join(script)).env("NO_PROXY", "*");
    command
}

/// What of sandboxes is on the host.
fn remains() -> BTreeSet<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let mounts = mounts.lines().filter(|line| line.contains("warren")).map(str::to_owned);
    let mut found: BTreeSet<String> = mounts.collect();
    for top in ["/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids"] {
        let mut waiting = vec![PathBuf::from(top)];
        while let Some(directory) = waiting.pop() {
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    let name = entry.path().to_string_lossy().into_owned();
                    if name.contains("sbx-") {
                        found.insert(name);
                    } else if name.matches('/').count() < 9 {
                        waiting.push(entry.path());
                    }
                }
            }
        }
    }
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let comm = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if comm.trim() == "warren-init" {
            found.insert(format!("init {}", entry.file_name().to_string_lossy()));
        }
    }
    found
}

mod needs_root_and_registries {
    use super::*;

    #[test]
    fn every_call_of_the_control_plane_works_with_the_python_sdks() {
        let daemon = Daemon::start();
        for package in PYTHON {
            let said = daemon.run(python(package, "control.py"));
            assert!(said.ends_with("done\n"), "{package}: {said}");
        }
    }

    #[test]
    fn every_call_of_the_control_plane_works_with_the_js_sdks() {
        let daemon = Daemon::start();
        for package in NODE {
            let said = daemon.run(node(package, "control.mjs"));
            assert!(said.ends_with("done\n"), "{package}: {said}");
        }
    }

    #[test]
    fn every_call_to_a_sandbox_works_with_the_python_sdks() {
        let daemon = Daemon::start();
        for package in PYTHON {
            let said = daemon.run(python(package, "envd.py"));
            assert!(said.ends_with("done\n"), "{package}: {said}");
        }
    }

    #[test]
    fn every_call_to_a_sandbox_works_with_the_js_sdks() {
        let daemon = Daemon::start();
        for package in NODE {
            let said = daemon.run(node(package, "envd.mjs"));
            assert!(said.ends_with("done\n"), "{package}: {said}");
        }
    }

    #[test]
    fn ports_have_names_over_tls_with_a_token_and_another_host() {
        let directory = tempfile::tempdir().unwrap();
        let tls = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let address = tls.to_string();
        let more = ["--e2b-domain", "e2b.test", "--e2b-tls", &address];
        let daemon = Daemon::start_in(directory, "127.0.0.1:0", &more);
        let mut script = python(PYTHON[0], "names.py");
        script.arg(tls.port().to_string()).arg(daemon.directory.path().join("state/e2b-ca.pem"));
        assert_eq!(daemon.run(script), "done\n");
    }

    /// Greets whoever comes; returns at which port of this host.
    fn greet() -> u16 {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = std::io::Write::write_all(&mut &stream, b"hello");
            }
        });
        port
    }

    #[test]
    fn what_an_sdk_lets_a_sandbox_reach_it_reaches_and_nothing_else() {
        let port = greet().to_string();
        let start = |directory: tempfile::TempDir, listen: &str| {
            let mut command = warren(directory.path());
            let hosts = ["good.test", "other.test"].map(|name| format!("{name}:{port}=127.0.0.1"));
            command.env("WARREN_EGRESS_HOSTS", hosts.join(","));
            Daemon::start_as(command, directory, listen, &[])
        };
        let mut daemon = start(tempfile::tempdir().unwrap(), "127.0.0.1:0");
        for package in PYTHON {
            let mut script = python(package, "network.py");
            let said = daemon.run({
                script.arg(&port);
                script
            });
            // The rules outlive a killed daemon as the sandbox does.
            let address = daemon.address();
            daemon.child.kill().unwrap();
            daemon.child.wait().unwrap();
            let directory = std::mem::replace(&mut daemon.directory, tempfile::tempdir().unwrap());
            daemon = start(directory, &address);
            let mut after = python(package, "reached.py");
            after.arg(&port).arg(said.trim());
            assert_eq!(daemon.run(after), "done\n", "{package}");
        }
    }

    #[test]
    fn where_nothing_may_be_reached_an_sdk_is_told_so() {
        let directory = tempfile::tempdir().unwrap();
        let mut command = warren(directory.path());
        command.env("WARREN_EGRESS_ENABLED", "false");
        let daemon = Daemon::start_as(command, directory, "127.0.0.1:0", &[]);
        assert_eq!(daemon.run(python(PYTHON[0], "unreached.py")), "done\n");
    }

    #[test]
    fn what_an_sdk_knows_of_a_sandbox_outlives_a_killed_daemon() {
        let daemon = Daemon::start();
        let id = daemon.run(python(PYTHON[0], "before.py"));
        let daemon = daemon.restart();
        let mut after = python(PYTHON[0], "after.py");
        after.arg(id.trim());
        assert_eq!(daemon.run(after), "done\n");
    }

    /// Waits until no more than that is on the host that was not there before.
    fn await_gone(before: &BTreeSet<String>, is_enough: impl Fn(&[String]) -> bool) {
        let start = Instant::now();
        loop {
            let left: Vec<_> = remains().difference(before).cloned().collect();
            if is_enough(&left) {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(10), "{left:#?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    #[test]
    fn a_hundred_sandboxes_that_an_sdk_made_leave_nothing_on_the_host() {
        let at_first = remains();
        let daemon = Daemon::start();
        // What is warm is the daemon's, and there already.
        let before = remains();
        assert_eq!(daemon.run(python(PYTHON[0], "hundred.py")), "done\n");
        // The next is begun before anybody asks for it: it has its control groups, and nothing runs in it.
        let of_one = |left: &[String]| {
            let names: BTreeSet<_> = left.iter().map(|path| path.rsplit('/').next()).collect();
            names.len() <= 1 && left.iter().all(|path| path.starts_with("/sys/fs/cgroup"))
        };
        await_gone(&before, of_one);
        drop(daemon);
        await_gone(&at_first, <[String]>::is_empty);
    }

    #[test]
    fn who_does_not_do_as_the_sdks_do_is_answered_at_once_and_in_their_words() {
        let daemon = Daemon::start();
        assert_eq!(daemon.run(python(PYTHON[0], "protocol.py")), "done\n");
    }

    #[test]
    fn without_a_good_key_nobody_gets_in() {
        let daemon = Daemon::start();
        let said = daemon.run(python(PYTHON[0], "refused.py"));
        assert_eq!(said, "done\n");
    }
}
