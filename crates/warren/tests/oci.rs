//! Sandboxes whose walls a container runtime puts up: what is theirs beside the conformance suite.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use warren::backend::oci::place;
use warren::backend::{LinuxSandbox, OciBackend, OciRuntime};
use warren::layers::Layers;
use warren::{
    Command, CreateOptions, ExecContext, ExecOptions, ExecUser, Explain, FileFault, FileKind,
    IsolationBackend, Limit, ListItem, ListOptions, LogWait, RenameOptions, ResourceLimits,
    Sandbox, SandboxId, SandboxSpec, WriteOptions,
};

/// Lists what the host has of a sandbox: its bundle, control groups, processes.
fn remains(id: &SandboxId) -> Vec<String> {
    let mut found: Vec<PathBuf> = Vec::new();
    let mut look = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(directory) = look.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            match entry.file_name().to_string_lossy().contains(id.as_str()) {
                true => found.push(entry.path()),
                false => look.push(entry.path()),
            }
        }
    }
    found.extend(Some(place().join(id.as_str())).filter(|bundle| bundle.exists()));
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let groups = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command);
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z')) {
            // Ended, and to be reaped by somebody who is not ours once its guard is gone.
            continue;
        }
        if groups.contains(id.as_str()) || command.contains(id.as_str()) {
            found.push(entry.path());
        }
    }
    found.iter().map(|path| path.display().to_string()).collect()
}

async fn soon(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn sh(sandbox: &dyn Sandbox, script: &str) -> String {
    let command = Command::new("sh").args(["-c", script]);
    let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    assert_eq!(output.exit_code, 0, "{script}: {} {}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Where the guard of a sandbox notes itself.
fn guard_of(bundle: &Path) -> i32 {
    fs::read_to_string(bundle.join("lock")).unwrap().trim().parse().unwrap()
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

async fn every_wall_and_every_limit_holds(runtime: OciRuntime) {
    let backend = OciBackend::new(runtime).unwrap();
    let inspection = backend.inspect().await.unwrap();
    for layer in [
        "sandbox",
        "mounts",
        "processes",
        "proc",
        "network",
        "capabilities",
        "seccomp",
        if runtime == OciRuntime::Runsc { "kernel" } else { "landlock" },
        // Not exactly, on a kernel of its own.
        if runtime == OciRuntime::Runsc { "cpu" } else { "memory" },
        "cpu",
        "quota",
        if runtime == OciRuntime::Runsc { "quota" } else { "processes limit" },
        "suspend",
        "removal",
    ] {
        let holds = |found: &&warren::Finding| found.layer == layer && found.holds;
        assert!(inspection.findings.iter().any(|found| holds(&found)), "{layer}: {inspection:#?}");
    }
    let capabilities = inspection.capabilities;
    assert!(capabilities.is_fully_isolated(), "{capabilities:?}");
    assert_eq!(capabilities.resource_limits, runtime != OciRuntime::Runsc, "{capabilities:?}");
    assert_eq!(capabilities.name, runtime.name());
}

/// R5 of the threat list, and D1, D5, P7, V1.
async fn seen_from_the_host_a_command_is_nobody(runtime: OciRuntime) {
    let backend = OciBackend::new(runtime).unwrap();
    let sandbox = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await.unwrap();
    let id = sandbox.id().clone();
    assert!(!remains(&id).is_empty(), "control: something of it is seen while it is there");
    let script = "ls -l /proc/self/fd | wc -l; cat /proc/1/environ 2>/dev/null | wc -c; ls /dev; \
                  touch /dev/x /usr/x 2>/dev/null || echo refused; sleep 60";
    let command = Command::new("sh").args(["-c", script]);
    let exec = sandbox
        .start_exec(&command, &ExecContext::default(), &ExecOptions::default())
        .await
        .unwrap();
    // The commands' processes are below init, in groups of their own.
    let below = || {
        let all = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
        all.filter(|path| {
            let status = fs::read_to_string(path.join("status")).unwrap_or_default();
            status.contains(&format!("\nPPid:\t{}\n", sandbox.pid())) && status.contains("sh\n")
        })
        .collect::<Vec<_>>()
    };
    soon("the command runs", || !below().is_empty()).await;
    let path = below().remove(0);
    let status = fs::read_to_string(path.join("status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
        line.unwrap().split_whitespace().next().unwrap().to_owned()
    };
    assert!(field("Uid").parse::<u32>().unwrap() > 0x7000_0000, "{status}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    assert_eq!((field("NoNewPrivs").as_str(), field("Seccomp").as_str()), ("1", "2"));
    for kind in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"] {
        let own = fs::read_link(path.join("ns").join(kind)).unwrap();
        assert_ne!(own, fs::read_link(format!("/proc/self/ns/{kind}")).unwrap(), "{kind}");
    }
    let groups = fs::read_to_string(path.join("cgroup")).unwrap();
    assert!(groups.matches(id.as_str()).count() >= 2, "{groups}");
    let mut said = String::new();
    let mut at = 0;
    while !said.contains("refused") {
        let log = exec.read(at, usize::MAX, warren::LogWait::More).await.unwrap();
        at = log.next;
        said.extend(log.pieces.iter().map(|piece| String::from_utf8_lossy(&piece.bytes)));
    }
    assert!(said.contains("null") && !said.contains("vda") && !said.contains("kmsg"), "{said}");
    drop(exec);
    sandbox.destroy().await.unwrap();
    assert_eq!(remains(&id), [""; 0]);
}

/// S14 and S15 of the threat list.
async fn a_bomb_and_a_stopped_sandbox_are_paused_and_destroyed(runtime: OciRuntime) {
    let backend = OciBackend::new(runtime).unwrap();
    let limits = ResourceLimits { max_processes: Some(8), ..ResourceLimits::default() };
    let spec = SandboxSpec { limits, ..SandboxSpec::default() };
    // A kernel of its own holds it, but not exactly.
    let accepted = (runtime == OciRuntime::Runsc).then_some(Limit::Processes);
    let demanded = CreateOptions {
        demanded: [Limit::Processes].into(),
        accept_missing: accepted.into_iter().collect(),
        ..CreateOptions::default()
    };
    for script in [
        "while :; do sh -c 'while :; do :; done' & done",
        "sleep 600 & sleep 600 & kill -STOP -1; kill -STOP $$",
    ] {
        let sandbox = backend.create(&spec, &demanded).await.unwrap();
        let id = sandbox.id().clone();
        let command = Command::new("sh").args(["-c", script]);
        let running =
            sandbox.start_exec(&command, &ExecContext::default(), &ExecOptions::default()).await;
        running.unwrap();
        sandbox.suspend().await.unwrap();
        let error = sandbox.exec(&Command::new("true"), &ExecContext::default()).await.unwrap_err();
        assert_eq!(error.code(), "suspended");
        sandbox.resume().await.unwrap();
        sandbox.suspend().await.unwrap();
        sandbox.destroy().await.unwrap();
        assert_eq!(remains(&id), [""; 0], "{script}");
    }
}

async fn what_was_written_is_saved_restored_and_forked(runtime: OciRuntime) {
    let directory = tempfile::tempdir().unwrap();
    let layers = Layers::open(directory.path().join("storage")).unwrap();
    let backend = OciBackend::with_layers(runtime, None, layers).unwrap();
    let sandbox = backend.create_sandbox(&SandboxSpec::default()).await.unwrap();
    let id = sandbox.id().clone();
    sh(&*sandbox, "echo one > /workspace/file; mkdir -p /tmp/d; echo two > /tmp/d/f").await;
    let capture = sandbox.capture().await.unwrap();
    let saved = sandbox.snapshot("first").await.unwrap();
    sh(&*sandbox, "echo changed > /workspace/file; rm -r /tmp/d; echo > /workspace/new").await;
    let options = CreateOptions { base: capture.base.clone(), ..CreateOptions::default() };
    let fork = backend.create_sandbox_with(&SandboxSpec::default(), &options).await.unwrap();
    // Not by `ls`, which has no way to ask gVisor of 2022.
    let look = "cat /workspace/file /tmp/d/f; test -O /workspace/file && id -u";
    assert_eq!(sh(&*fork, look).await, "one\ntwo\n1000", "a fork");
    // One that is paused is saved as it stands.
    fork.suspend().await.unwrap();
    let began = Instant::now();
    let of_paused = fork.capture().await.unwrap();
    assert_eq!(of_paused.base.layers, capture.base.layers);
    sandbox.restore(&saved).await.unwrap();
    assert_eq!(sh(&*sandbox, look).await, "one\ntwo\n1000", "restored");
    // Neither asks somebody who is paused, nor takes what was made anew for what is to go.
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    assert_eq!(sh(&*sandbox, "cd /workspace; echo *").await, "file");
    fork.destroy().await.unwrap();
    sandbox.destroy().await.unwrap();
    assert_eq!(remains(&id), [""; 0]);
}

async fn files_are_written_listed_moved_and_read_from_outside(runtime: OciRuntime) {
    let backend = OciBackend::new(runtime).unwrap();
    let sandbox = backend.create_sandbox(&SandboxSpec::default()).await.unwrap();
    let (files, path) = (sandbox.files().unwrap(), Path::new);
    let text = |text: &str| -> warren::FileSource {
        Box::pin(futures_util::stream::iter(vec![Ok(text.as_bytes().to_vec())]))
    };
    let refused = |error: warren::SandboxError| match error {
        warren::SandboxError::File { kind, .. } => kind,
        error => panic!("{error}"),
    };
    let deep = WriteOptions { parents: true, ..WriteOptions::default() };
    files.write(path("/workspace/d/e/f"), deep, text("said\n")).await.unwrap();
    sh(
        &*sandbox,
        "cd /workspace; cp d/e/f own; ln -s d/e near; ln -s /proc/self/root/workspace far",
    )
    .await;
    assert_eq!(files.stat(path("/workspace/own")).await.unwrap().size, 5);
    let link = files.stat(path("/workspace/near")).await.unwrap();
    assert_eq!((link.kind, link.target.as_deref()), (FileKind::Link, Some(path("d/e"))));
    let read = async |name| {
        let data = files.read(path(name), 0, None).await?.data;
        let chunks: Vec<_> = data.collect().await;
        chunks.into_iter().collect::<warren::Result<Vec<_>>>().map(|chunks| chunks.concat())
    };
    assert_eq!(read("/workspace/near/f").await.unwrap(), b"said\n", "by a link of its own");
    // One of the kernel's leads to whatever the one who asks has.
    assert_eq!(refused(read("/workspace/far/own").await.unwrap_err()), FileFault::Loop);
    assert_eq!(refused(read("/workspace/none").await.unwrap_err()), FileFault::NotFound);
    let moved = RenameOptions::default();
    files.rename(path("/workspace/near/f"), path("/workspace/g"), moved).await.unwrap();
    let options = ListOptions { depth: 3, limit: 100 };
    let items: Vec<_> =
        files.list(path("/workspace"), options).await.unwrap().items.collect().await;
    let mut names: Vec<_> = items
        .into_iter()
        .filter_map(|item| match item.unwrap() {
            ListItem::Entry(entry) => Some(entry.path.display().to_string()),
            _ => None,
        })
        .collect();
    names.sort();
    assert_eq!(names, ["d", "d/e", "far", "g", "near", "own"]);
    files.remove(path("/workspace/d"), true).await.unwrap();
    assert_eq!(sh(&*sandbox, "cd /workspace; echo *; cat g").await, "far g near own\nsaid");
    sandbox.destroy().await.unwrap();
}

async fn one_that_is_to_stay_is_adopted_paused_or_not_and_goes_even_without_its_guard(
    runtime: OciRuntime,
) {
    let directory = tempfile::tempdir().unwrap();
    let homes = directory.path().join("homes");
    let layers = Layers::open(directory.path().join("storage")).unwrap();
    let open = || OciBackend::with_layers(runtime, Some(homes.clone()), layers.clone()).unwrap();
    let (id, spec) = (SandboxId::new(), SandboxSpec::default());
    let options =
        CreateOptions { id: Some(id.clone()), persistent: true, ..CreateOptions::default() };
    let first = open();
    let made: LinuxSandbox = first.create(&spec, &options).await.unwrap();
    sh(&made, "echo kept > /workspace/file").await;
    made.suspend().await.unwrap();
    let anchor = made.anchor().unwrap();
    drop((made, first));
    let second = open();
    let adopted = second.adopt(&id, &spec, &anchor).await.unwrap().unwrap();
    let error = adopted.exec(&Command::new("true"), &ExecContext::default()).await.unwrap_err();
    assert_eq!(error.code(), "suspended");
    adopted.resume().await.unwrap();
    assert_eq!(sh(&*adopted, "cat /workspace/file").await, "kept");
    adopted.capture().await.unwrap();
    assert_eq!(second.remains().await.unwrap(), std::slice::from_ref(&id), "control");
    kill(guard_of(&homes.join(id.as_str()).join("oci")));
    assert_eq!(sh(&*adopted, "cat /workspace/file").await, "kept", "it goes on unguarded");
    adopted.destroy().await.unwrap();
    assert_eq!((remains(&id), second.remains().await.unwrap()), (vec![], vec![]));
    // One that nobody adopts is reclaimed, paused or not.
    let made = second.create(&spec, &options).await.unwrap();
    made.suspend().await.unwrap();
    drop(made);
    second.reclaim(&id).await.unwrap();
    assert_eq!((remains(&id), second.remains().await.unwrap()), (vec![], vec![]));
}

async fn a_root_of_its_own_is_root_inside_alone(runtime: OciRuntime) {
    let backend = OciBackend::new(runtime).unwrap();
    let spec = SandboxSpec { profile: "dev".to_owned(), ..SandboxSpec::default() };
    let sandbox = backend.create(&spec, &CreateOptions::default()).await.unwrap();
    let user = Some(ExecUser { name: "root".to_owned(), workdir: None });
    let script = "id -u; touch /etc/x /usr/x && echo wrote; chown user /etc/x; mount -t tmpfs t /mnt || echo refused";
    let command = Command::new("sh").args(["-c", script]);
    let options = ExecOptions { user, ..ExecOptions::default() };
    let exec = sandbox.start_exec(&command, &ExecContext::default(), &options).await.unwrap();
    exec.wait().await.unwrap();
    let log = exec.read(0, usize::MAX, warren::LogWait::More).await.unwrap();
    let out = log.pieces.iter().filter(|piece| piece.stream == warren::LogStream::Stdout);
    let out: Vec<u8> = out.flat_map(|piece| piece.bytes.clone()).collect();
    assert_eq!(String::from_utf8(out).unwrap(), "0\nwrote\nrefused\n");
    assert_eq!(
        sh(&sandbox, "id -u; sudo id -u; ls -n /etc/x | cut -d' ' -f3").await,
        "1000\n0\n1000"
    );
    sandbox.destroy().await.unwrap();
}

/// What a program is told of the kernel that it runs on.
async fn kernel_of(runtime: OciRuntime) -> String {
    let backend = OciBackend::new(runtime).unwrap();
    let sandbox = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await.unwrap();
    let said = sh(&sandbox, "cat /proc/version; uname -r").await;
    sandbox.destroy().await.unwrap();
    said
}

/// R1 of the threat list: a hole in the host's kernel is none that a command can reach.
async fn its_kernel_is_not_the_hosts(runtime: OciRuntime) {
    let host = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let shared = kernel_of(OciRuntime::Runc).await;
    assert!(shared.contains(host.trim()), "control: by runc it is the host's: {shared}");
    let own = kernel_of(runtime).await;
    assert!(!own.contains(host.trim()) && own.ends_with("4.4.0"), "{own}");
    assert_eq!(runtime.level(), warren::IsolationLevel::Kernel);
    // Seen from the host a command is no process that runs its program, but a place for that to be traced in.
    let backend = OciBackend::new(runtime).unwrap();
    let sandbox = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await.unwrap();
    let command = Command::new("sleep").args(["31.4159"]);
    let (ctx, options) = (ExecContext::default(), ExecOptions::default());
    sandbox.start_exec(&command, &ctx, &options).await.unwrap();
    let all = fs::read_dir("/proc").unwrap().flatten();
    let runs = all.filter(|entry| {
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        command.windows(7).any(|bytes| bytes == b"31.4159")
    });
    assert_eq!(runs.count(), 0);
    let inside = sh(&sandbox, "cat /proc/*/cmdline | tr '\\0' ' '").await;
    assert!(inside.contains("sleep 31.4159"), "control: {inside}");
    let id = sandbox.id().clone();
    sandbox.destroy().await.unwrap();
    assert_eq!(remains(&id), [""; 0]);
}

/// Why a command failed is told of a container as of any other sandbox, and it is the same command.
async fn what_walls_refuse_is_told_and_changes_nothing(runtime: OciRuntime) {
    let backend = OciBackend::new(runtime).unwrap();
    let sandbox = backend.create_sandbox(&SandboxSpec::default()).await.unwrap();
    let script = "import ctypes, os, socket
def attempt(what):
    try: what()
    except OSError as error: print(error.errno)
attempt(lambda: open('/etc/shadow'))
attempt(lambda: os.mkdir('/usr/lib/warren-x'))
attempt(lambda: open('/etc/warren-x', 'w'))
attempt(lambda: socket.create_connection(('169.254.169.254', 80)))
print(ctypes.CDLL(None).mount(b'a', b'/tmp', b'tmpfs', 0, None))
attempt(lambda: open('/tmp/absent'))
raise SystemExit(3)";
    let command = Command::new("python3").args(["-c", script]);
    let mut seen = Vec::new();
    for explain in [Explain::Nothing, Explain::Host] {
        let options = ExecOptions { explain, ..ExecOptions::default() };
        let exec = sandbox.start_exec(&command, &ExecContext::default(), &options).await.unwrap();
        let end = exec.wait().await.unwrap();
        let read = exec.read(0, 1_000, LogWait::Never).await.unwrap();
        let said = read.pieces.into_iter().flat_map(|piece| piece.bytes).collect();
        seen.push((end.exit_code, String::from_utf8(said).unwrap(), end.denials));
    }
    let (followed, alone) = (seen.pop().unwrap(), seen.pop().unwrap());
    assert_eq!((followed.0, &followed.1), (alone.0, &alone.1));
    assert_eq!((alone.0, alone.1.as_str()), (3, "2\n30\n13\n101\n-1\n2\n"), "control");
    let told = |denials: &[warren::Denial]| -> Vec<(String, String)> {
        denials
            .iter()
            .map(|denial| (denial.wall.as_str().to_owned(), denial.what.clone()))
            .collect()
    };
    let of = |wall: &str, what: &str| (wall.to_owned(), what.to_owned());
    assert_eq!(told(&alone.2), [of("seccomp", "call mount")], "without asking");
    assert_eq!(
        told(&followed.2),
        [
            of("mount", "read /etc/shadow"),
            of("mount", "create /usr/lib/warren-x"),
            of("landlock", "create /etc/warren-x"),
            of("network", "reach 169.254.169.254 port 80"),
            of("seccomp", "call mount"),
        ]
    );
    sandbox.destroy().await.unwrap();
}

/// What a kernel of its own has no way for is an error that says so.
async fn what_it_cannot_do_is_said(runtime: OciRuntime) {
    let backend = OciBackend::new(runtime).unwrap();
    let unsupported = |error: warren::SandboxError| match error {
        warren::SandboxError::Unsupported { backend, .. } => assert_eq!(backend, runtime.name()),
        error => panic!("{error}"),
    };
    let spec = SandboxSpec { profile: "dev".to_owned(), ..SandboxSpec::default() };
    unsupported(backend.create(&spec, &CreateOptions::default()).await.unwrap_err());
    let sandbox = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await.unwrap();
    unsupported(sandbox.connect(8080).await.unwrap_err());
    let terminal = warren::backend::linux::Stdio::Terminal { rows: 24, columns: 80 };
    let command = Command::new("true");
    unsupported(sandbox.start(&command, &ExecContext::default(), terminal).await.unwrap_err());
    let followed = ExecOptions { explain: Explain::Inside, ..ExecOptions::default() };
    let started = sandbox.start_exec(&command, &ExecContext::default(), &followed).await;
    unsupported(started.unwrap_err());
    assert_eq!(sh(&sandbox, "echo fine").await, "fine", "control");
    sandbox.destroy().await.unwrap();
}

/// Makes a sandbox that ends with this process and then waits to be killed.
#[expect(clippy::print_stdout, reason = "its parent reads it")]
async fn wait_to_be_killed(runtime: OciRuntime, suspended: bool) {
    let backend = OciBackend::new(runtime).unwrap();
    let sandbox = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await.unwrap();
    sh(&sandbox, "tail -f /dev/null > /dev/null 2>&1 &").await;
    if suspended {
        sandbox.suspend().await.unwrap();
    }
    println!("made {}", sandbox.id());
    std::future::pending::<()>().await;
}

async fn a_maker_that_is_killed_leaves_nothing(name: &str) {
    use std::io::{BufRead as _, BufReader};
    for case in ["killed", "killed_suspended"] {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture"])
            .arg(format!("{name}::{case}"))
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let made = lines.map_while(std::io::Result::ok).find_map(|line| {
            line.split_once("made ").map(|(_, id)| SandboxId::from_string(id.trim()))
        });
        let id = made.expect("a sandbox was made");
        assert!(!remains(&id).is_empty(), "control");
        child.kill().unwrap();
        child.wait().unwrap();
        soon("nothing is left", || remains(&id).is_empty()).await;
    }
}

macro_rules! cases {
    ($name:ident, $runtime:expr, [$($case:ident),* $(,)?]) => {
        mod $name {
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $case() {
                    super::$case($runtime).await;
                }
            )*

            #[tokio::test(flavor = "multi_thread")]
            async fn a_maker_that_is_killed_leaves_nothing() {
                super::a_maker_that_is_killed_leaves_nothing(stringify!($name)).await;
            }

            #[tokio::test]
            #[ignore = "waits for ever; run by the test above"]
            async fn killed() {
                wait_to_be_killed($runtime, false).await;
            }

            #[tokio::test]
            #[ignore = "waits for ever; run by the test above"]
            async fn killed_suspended() {
                wait_to_be_killed($runtime, true).await;
            }
        }
    };
    ($name:ident, $runtime:expr) => {
        cases!($name, $runtime, [
            every_wall_and_every_limit_holds,
            seen_from_the_host_a_command_is_nobody,
            a_bomb_and_a_stopped_sandbox_are_paused_and_destroyed,
            what_was_written_is_saved_restored_and_forked,
            files_are_written_listed_moved_and_read_from_outside,
            one_that_is_to_stay_is_adopted_paused_or_not_and_goes_even_without_its_guard,
            a_root_of_its_own_is_root_inside_alone,
            what_walls_refuse_is_told_and_changes_nothing,
        ]);
    };
}

cases!(runc, OciRuntime::Runc);
cases!(crun, OciRuntime::Crun);
cases!(
    runsc,
    OciRuntime::Runsc,
    [
        every_wall_and_every_limit_holds,
        its_kernel_is_not_the_hosts,
        a_bomb_and_a_stopped_sandbox_are_paused_and_destroyed,
        what_was_written_is_saved_restored_and_forked,
        files_are_written_listed_moved_and_read_from_outside,
        one_that_is_to_stay_is_adopted_paused_or_not_and_goes_even_without_its_guard,
        what_it_cannot_do_is_said,
    ]
);
