//! What a hostile workload tries where there are rules and no namespaces, each with its control.
//!
//! Run as root, as a plain user, whose own files and processes are then what is attacked, and in a container
//! that gives nothing but Landlock.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

#[path = "shared/hardened.rs"]
mod hardened;
#[path = "shared/plain_user.rs"]
mod plain_user;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use warren::backend::LandlockBackend;
use warren::backend::linux::LinuxSandbox;
use warren::{
    BindMount, Command, CreateOptions, ExecCause, ExecContext, IsolationBackend as _,
    IsolationLevel, IsolationRequirements, ResourceLimits, Sandbox as _, SandboxId, SandboxSpec,
};

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A directory that every user may come to.
fn common_directory() -> tempfile::TempDir {
    let directory = tempfile::Builder::new().prefix("warren-test-").tempdir_in("/var/tmp").unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    directory
}

/// A file of the host that anybody may read, and that is the caller's.
fn secret(directory: &Path) -> PathBuf {
    let path = directory.join("secret");
    fs::write(&path, "s3cret\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    path
}

/// A process of the host, of the caller's own, that goes with this value.
struct Victim(Child);

impl Victim {
    fn start() -> Self {
        let child = std::process::Command::new("sleep")
            .arg("1000")
            .env("WARREN_TEST_SECRET", "s3cret")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        // Until it is that program, what is read of it is this one's.
        let comm = format!("/proc/{}/comm", child.id());
        let start = Instant::now();
        while fs::read_to_string(&comm).unwrap() != "sleep\n" {
            assert!(start.elapsed() < Duration::from_secs(10));
        }
        Self(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn run(sandbox: &LinuxSandbox, script: &str) -> (ExecCause, String, String) {
    let command = Command::new("/bin/bash").args(["-c", script]);
    let report = sandbox.exec_report(&command, &ExecContext::default()).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (report.cause, text(report.output.stdout), text(report.output.stderr))
}

/// Runs a script that is to fail and to say nothing on stdout.
async fn refused(sandbox: &LinuxSandbox, what: &str, script: &str) {
    let (cause, stdout, stderr) = run(sandbox, script).await;
    assert_ne!(cause, ExecCause::Exited { code: 0 }, "{what}: {stdout}{stderr}");
    assert_eq!(stdout, "", "{what}");
}

async fn works(sandbox: &LinuxSandbox, script: &str) -> String {
    let (cause, stdout, stderr) = run(sandbox, script).await;
    assert_eq!(cause, ExecCause::Exited { code: 0 }, "{script}: {stdout}{stderr}");
    stdout
}

async fn create(backend: &LandlockBackend, spec: &SandboxSpec) -> LinuxSandbox {
    backend.create(spec, &CreateOptions::default()).await.unwrap()
}

/// Counts the processes of the host whose command line has a word in it.
fn processes_with(word: &str) -> usize {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let lines = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines.filter(|line| String::from_utf8_lossy(line).split('\0').any(|part| part == word)).count()
}

async fn soon(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn bytes(text: &str) -> warren::FileSource {
    Box::pin(futures_util::stream::iter([Ok(text.as_bytes().to_vec())]))
}

mod cases {
    use super::*;

    #[tokio::test]
    async fn files_of_the_host_are_out_of_reach_and_stay_as_they_are() {
        let directory = common_directory();
        let backend = LandlockBackend::new().unwrap().in_directory(directory.path());
        let secret = secret(directory.path());
        let path = secret.display();
        let before = fs::metadata(&secret).unwrap();
        let sandbox = create(&backend, &SandboxSpec::default()).await;
        for (what, script) in [
            ("reading", format!("cat {path}")),
            ("by a link", format!("ln -s {path} link; cat link")),
            ("by a hard link", format!("ln {path} hard; cat hard")),
            ("by its own root", format!("cat /proc/self/root{path}")),
            ("by a way up", format!("cat ../../../../../../../../..{path}")),
            ("writing", format!("echo x >> {path}")),
            ("emptying", format!("truncate -s 0 {path} || : > {path}")),
            ("removing", format!("rm -f {path}")),
            ("renaming", format!("mv {path} stolen")),
            ("replacing", format!("echo x > own; mv -f own {path}")),
            ("its mode", format!("chmod 777 {path}")),
            ("its times", format!("touch -d 2001-01-01 {path}")),
            ("its owner", format!("chown 1234 {path}")),
            (
                "an attribute",
                format!("python3 -c 'import os; os.setxattr(\"{path}\", \"user.x\", b\"y\")'"),
            ),
            ("listing", format!("ls {}", directory.path().display())),
            ("the shadow file", "cat /etc/shadow".to_owned()),
            ("shared memory", "echo x > /dev/shm/warren-test".to_owned()),
            ("a home", "ls /root /home".to_owned()),
            ("programs", "echo x > /usr/bin/warren-test".to_owned()),
        ] {
            refused(&sandbox, what, &script).await;
        }
        let after = fs::metadata(&secret).unwrap();
        assert_eq!(fs::read_to_string(&secret).unwrap(), "s3cret\n");
        let of = |found: &fs::Metadata| (found.mode(), found.uid(), found.mtime(), found.nlink());
        assert_eq!(of(&after), of(&before));
        // Controls: it can work with its own, and read what it is given.
        works(&sandbox, "echo x > own && cat own && mkdir d && mv own d/ && rm -r d").await;
        works(&sandbox, "touch \"$HOME/a\" \"$TMPDIR/b\" && python3 -c 'print(1)'").await;
        sandbox.destroy().await.unwrap();
        let shown = SandboxSpec { allowed_paths_ro: vec![secret.clone()], ..Default::default() };
        let sandbox = create(&backend, &shown).await;
        assert_eq!(works(&sandbox, &format!("cat {path}")).await, "s3cret\n");
        for (what, script) in [
            ("writing what is read-only", format!("echo x >> {path}")),
            ("its mode, by a descriptor", {
                format!("python3 -c 'import os; os.fchmod(os.open(\"{path}\", 0), 0o777)'")
            }),
            ("its times, by a descriptor", {
                format!("python3 -c 'import os; os.utime(os.open(\"{path}\", 0), (1, 1))'")
            }),
        ] {
            refused(&sandbox, what, &script).await;
        }
        assert_eq!(of(&fs::metadata(&secret).unwrap()), of(&before));
        sandbox.destroy().await.unwrap();
        let left: Vec<_> = fs::read_dir(directory.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "the secret alone: {left:?}");
    }

    #[tokio::test]
    async fn processes_of_the_host_cannot_be_touched() {
        let directory = common_directory();
        let backend = LandlockBackend::new().unwrap().in_directory(directory.path());
        let sandbox = create(&backend, &SandboxSpec::default()).await;
        let mut victim = Victim::start();
        let pid = victim.pid();
        // A program that has just been executed may not have its variables yet.
        let environ = || fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
        soon("control: whoever may, reads it", || environ().contains("s3cret")).await;
        for (what, script) in [
            ("a signal", format!("kill -9 {pid}")),
            ("a question", format!("kill -0 {pid}")),
            ("environment", format!("cat /proc/{pid}/environ")),
            ("memory", format!("head -c 1 /proc/{pid}/mem")),
            ("maps", format!("cat /proc/{pid}/maps")),
            ("its root", format!("ls /proc/{pid}/root/")),
            ("a descriptor", format!("readlink /proc/{pid}/fd/0")),
            ("what it has open", format!("cat /proc/{pid}/fd/0")),
            ("a limit", format!("prlimit --pid {pid} --cpu=1")),
            ("a priority", format!("renice -n 19 -p {pid} >/dev/null")),
            ("a CPU", format!("taskset -p 1 {pid} >/dev/null")),
            ("the score", format!("echo 1000 > /proc/{pid}/oom_score_adj")),
            ("shared memory", "ipcmk -M 100 >/dev/null".to_owned()),
            ("a namespace", "unshare -U true".to_owned()),
            ("its warden", "kill -9 $(awk '/^PPid/ {print $2}' /proc/$PPID/status)".to_owned()),
        ] {
            refused(&sandbox, what, &script).await;
        }
        assert!(victim.lives());
        let nice = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let nice = nice.rsplit_once(") ").unwrap().1.split(' ').nth(16).unwrap().to_owned();
        assert_eq!(nice, "0", "as nice as before");
        // Controls: its own it can signal, and limits of its own it can lower.
        works(&sandbox, "sleep 100 & kill -9 $!; ulimit -n 20").await;
        let status = works(&sandbox, "cat /proc/self/status; id -u").await;
        let has =
            |line: &str| status.lines().any(|found| found.split_whitespace().eq(line.split(' ')));
        assert!(has("NoNewPrivs: 1") && has("CapEff: 0000000000000000"), "{status}");
        assert!(has("Seccomp: 2"), "{status}");
        assert_ne!(status.lines().last(), Some("0"), "never root of the host");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test]
    async fn nothing_is_reached_by_a_socket() {
        let directory = common_directory();
        let backend = LandlockBackend::new().unwrap().in_directory(directory.path());
        let sandbox = create(&backend, &SandboxSpec::default()).await;
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = tcp.local_addr().unwrap().port();
        let place = directory.path().join("socket");
        let _unix = std::os::unix::net::UnixListener::bind(&place).unwrap();
        let python = |lines: &str| format!("python3 -c '\nimport socket\n{lines}\nprint(1)'");
        let connects = python(&format!("socket.create_connection((\"127.0.0.1\", {port}))"));
        let control = std::process::Command::new("bash").args(["-c", &connects]).output().unwrap();
        assert_eq!(control.stdout, b"1\n", "control: {control:?}");
        for (what, lines) in [
            ("tcp", format!("socket.create_connection((\"127.0.0.1\", {port}))")),
            ("udp", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)".to_owned()),
            ("a path", format!("s = socket.socket(socket.AF_UNIX)\ns.connect({place:?})")),
            ("an abstract name", "socket.socket(socket.AF_UNIX).bind(\"\\0warren\")".to_owned()),
            ("a pair that sends anywhere", "socket.socketpair(type=socket.SOCK_DGRAM)".to_owned()),
            ("netlink", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)".to_owned()),
        ] {
            refused(&sandbox, what, &python(&lines)).await;
        }
        works(&sandbox, &python("socket.socketpair()")).await;
        let error = sandbox.connect(port).await.unwrap_err();
        assert_eq!(error.code(), "unsupported");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test]
    async fn nothing_outlives_a_sandbox_whatever_it_does() {
        let directory = common_directory();
        let backend = LandlockBackend::new().unwrap().in_directory(directory.path());
        let word = format!("31337.{}7", std::process::id());
        let hide = format!(
            "trap '' TERM HUP INT; (setsid sleep {word} </dev/null >/dev/null 2>&1 & setsid \
             setsid sleep {word} </dev/null >/dev/null 2>&1 &); mkdir -p a/b; chmod 000 a || :"
        );
        let sandbox = create(&backend, &SandboxSpec::default()).await;
        works(&sandbox, &hide).await;
        soon("control: they run", || processes_with(&word) == 2).await;
        sandbox.destroy().await.unwrap();
        soon("they are gone", || processes_with(&word) == 0).await;
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);

        // Whoever could end init would end its own sandbox, and leave nothing behind either.
        let sandbox = create(&backend, &SandboxSpec::default()).await;
        works(&sandbox, &hide).await;
        soon("control: they run", || processes_with(&word) == 2).await;
        let command = Command::new("/bin/bash").args(["-c", "kill -9 $PPID; sleep 0.2; echo on"]);
        let ended = sandbox.exec_report(&command, &ExecContext::default()).await;
        if is_root() {
            assert_eq!(
                ended.unwrap().output.stdout,
                b"on\n",
                "another user's init is out of reach"
            );
            sandbox.destroy().await.unwrap();
        } else {
            drop(ended);
            let start = Instant::now();
            while sandbox.is_alive().await {
                assert!(start.elapsed() < Duration::from_secs(10), "the sandbox has ended");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        soon("nothing is left", || processes_with(&word) == 0).await;
        drop(sandbox);
        drop(backend);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_sandbox_whose_warden_was_killed_leaves_nothing_either() {
        let directory = common_directory();
        let backend = LandlockBackend::new().unwrap().in_directory(directory.path());
        let word = format!("31337.{}9", std::process::id());
        let sandbox = create(&backend, &SandboxSpec::default()).await;
        works(&sandbox, &format!("setsid sleep {word} </dev/null >/dev/null 2>&1 &")).await;
        soon("control: it runs", || processes_with(&word) == 1).await;
        // As an operator might, or the kernel when memory runs out.
        let warden = rustix::process::Pid::from_raw(sandbox.pid()).unwrap();
        rustix::process::kill_process(warden, rustix::process::Signal::KILL).unwrap();
        sandbox.destroy().await.unwrap();
        soon("it is gone", || processes_with(&word) == 0).await;
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn what_cannot_be_held_is_refused_and_what_is_held_is_said() {
        let directory = common_directory();
        let backend = LandlockBackend::new().unwrap().in_directory(directory.path());
        let proved = backend.probe().await.unwrap();
        let process = IsolationRequirements::at_least(IsolationLevel::Process);
        assert_eq!(process.lacking(backend.level(), &proved), Vec::<String>::new(), "{proved:?}");
        assert!(!proved.process_isolation && !proved.resource_limits && !proved.snapshots);
        assert!(!proved.available_profiles.iter().any(|name| name == "dev"), "{proved:?}");
        type Change = fn(&mut SandboxSpec);
        let rows: [(&str, Change); 7] = [
            ("unsupported", |spec| spec.network_enabled = true),
            ("unsupported", |spec| spec.profile = "dev".into()),
            ("unsupported", |spec| {
                spec.bind_mounts = vec![BindMount {
                    source: "/usr".into(),
                    target: "/elsewhere".into(),
                    readonly: true,
                }];
            }),
            ("invalid_spec", |spec| spec.workdir = "/opt".into()),
            ("invalid_spec", |spec| spec.allowed_paths_ro = vec!["/no/such/place".into()]),
            ("limit_not_enforceable", |spec| spec.limits.max_write_bytes = Some(1 << 20)),
            ("invalid_spec", |spec| spec.allowed_paths_rw = vec!["/bin/x".into()]),
        ];
        for (index, (code, change)) in rows.into_iter().enumerate() {
            let mut spec = SandboxSpec::default();
            change(&mut spec);
            let error = backend.create_sandbox(&spec).await.unwrap_err();
            assert_eq!(error.code(), code, "row {index}: {error}");
            assert!(error.hint().is_some(), "row {index}");
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);

        // Each file is bounded where all together are not.
        let limits = ResourceLimits { max_write_bytes: Some(1 << 20), ..Default::default() };
        let spec = SandboxSpec { limits, workdir: "/workspace/a/b".into(), ..Default::default() };
        let accept = [warren::Limit::Write].into();
        let options = CreateOptions { accept_missing: accept, ..CreateOptions::default() };
        let sandbox = backend.create(&spec, &options).await.unwrap();
        refused(&sandbox, "a large file", "head -c 2000000 /dev/zero > large").await;
        let own = works(&sandbox, "pwd").await;
        let writable = &sandbox.capabilities().writable_paths;
        assert!(
            own.ends_with("/workspace/a/b\n")
                && writable.iter().any(|path| own.starts_with(path.to_str().unwrap()))
        );
        let files = sandbox.files().unwrap();
        let path = format!("{}/note", own.trim());
        files.write(Path::new(&path), Default::default(), bytes("n")).await.unwrap();
        assert_eq!(works(&sandbox, "cat note").await, "n");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test]
    async fn one_that_outlives_its_maker_is_found_again_and_ends_whole() {
        let directory = common_directory();
        let runtime = tempfile::tempdir().unwrap();
        let start = || {
            LandlockBackend::with_runtime(runtime.path()).unwrap().in_directory(directory.path())
        };
        let backend = start();
        let id = SandboxId::new();
        let options =
            CreateOptions { id: Some(id.clone()), persistent: true, ..CreateOptions::default() };
        let spec = SandboxSpec::default();
        let sandbox = backend.create(&spec, &options).await.unwrap();
        let word = format!("31337.{}8", std::process::id());
        works(
            &sandbox,
            &format!("echo kept > file; setsid sleep {word} </dev/null >/dev/null 2>&1 &"),
        )
        .await;
        let anchor = sandbox.anchor().unwrap();
        drop((sandbox, backend));
        soon("it goes on", || processes_with(&word) == 1).await;
        let backend = start();
        assert_eq!(backend.remains().await.unwrap(), std::slice::from_ref(&id));
        let found = backend.adopt(&id, &spec, &anchor).await.unwrap().expect("it is there");
        let cat = Command::new("cat").args(["file"]);
        assert_eq!(found.exec(&cat, &ExecContext::default()).await.unwrap().stdout, b"kept\n");
        found.destroy().await.unwrap();
        soon("it has ended", || processes_with(&word) == 0).await;
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        assert_eq!(fs::read_dir(runtime.path()).unwrap().count(), 0);
    }
}

#[test]
fn rules_hold_for_a_plain_user_too() {
    plain_user::rerun(&["cases::", "--test-threads", "1"]);
}

#[test]
fn rules_hold_in_a_hardened_container_too() {
    hardened::rerun(&["cases::", "--test-threads", "1"]);
}
