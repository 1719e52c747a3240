//! What one client leaves in a sandbox reaches no other through the pool (4.10 of the threats, H1 to H8).
//!
//! Whatever can be left is left by `canaries.py`, which then looks for it where it was left: what a look does not find
//! there shows nothing elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use warren::backend::{LandlockBackend, LinuxBackend, OciBackend, OciRuntime};
use warren::{
    Command, DefaultSandboxManager, ExecContext, ExecId, ExecOptions, IsolationBackend, PoolConfig,
    Sandbox, SandboxId, SandboxManager as _, SandboxManagerConfig, SandboxSelectionOptions,
    SandboxSession, SandboxSpec, Shutdown,
};

const SCRIPT: &str = include_str!("canaries.py");
/// Where the stubborn daemon listens.
const PORT: u16 = 4711;

/// A backend, and how often something is left there and how many others come after each time.
struct Ground {
    backend: Arc<dyn IsolationBackend>,
    rounds: usize,
    others: usize,
}

/// What can be left in no sandbox that has a root of its own: its user owns no more of it than its own places.
const REFUSED: &[&str] = &[
    "h1 /",
    "h1 /dev",
    "h1 /dev/mqueue",
    "h1 /etc",
    "h1 /home",
    "h1 /mnt",
    "h1 /opt",
    "h1 /run",
    "h1 /srv",
    "h1 /sys/fs/cgroup",
    "h1 /usr/lib/python3/dist-packages",
    "h1 /usr/local/bin",
    "h1 /var",
    "h1 /var/spool/cron/crontabs",
    "h2 mqueue",
    "h3 key",
    "h7 hosts",
    "h7 ld.so.preload",
    "h7 sitecustomize",
];

#[derive(Debug, Deserialize)]
struct Left {
    left: BTreeSet<String>,
    refused: BTreeMap<String, String>,
}

#[derive(Debug, PartialEq, Deserialize)]
struct Seen {
    found: BTreeSet<String>,
    modes: BTreeMap<String, String>,
    environment: BTreeMap<String, String>,
    processes: Vec<String>,
    listens: Vec<String>,
    routes: Vec<String>,
    neighbours: Vec<String>,
    hosts: Vec<String>,
}

fn manager(ground: &Ground, min_warm: u32) -> DefaultSandboxManager {
    let pool = PoolConfig { min_warm, max_warm: 2 * min_warm, ..PoolConfig::default() };
    let config = SandboxManagerConfig { pool, ..SandboxManagerConfig::default() };
    DefaultSandboxManager::new(vec![Arc::clone(&ground.backend)], config)
}

async fn soon(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < Duration::from_secs(30), "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Takes a sandbox for a client, from the pool once something is in it.
async fn take(
    manager: &DefaultSandboxManager,
    spec: &SandboxSpec,
    client: &str,
) -> (SandboxSession, Arc<dyn Sandbox>) {
    soon("one is warm", async || manager.stats().await.pool_size > 0).await;
    let options = SandboxSelectionOptions { use_pool: true, ..SandboxSelectionOptions::default() };
    manager.acquire(spec, &options, client).await.unwrap()
}

/// Runs the script in a sandbox. The word comes by stdin, so that nothing of it is there but what was left.
async fn ask<T: for<'a> Deserialize<'a>>(sandbox: &dyn Sandbox, mode: &str, word: &str) -> T {
    let command = Command::new("/usr/bin/python3").args(["-c", SCRIPT, mode]).stdin(word);
    let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    let read = serde_json::from_str(&said);
    read.unwrap_or_else(|why| panic!("{mode}: {why}: {} {said} {error}", output.exit_code))
}

/// A client's own secrets, in everything that a spec has room for.
fn secretive(word: &str) -> SandboxSpec {
    SandboxSpec {
        environment: vec![("WARREN_SECRET".into(), word.to_owned())],
        labels: vec![("secret".into(), word.to_owned())],
        ..SandboxSpec::default()
    }
}

/// What everybody else asks for, with a variable of their own.
fn usual() -> SandboxSpec {
    SandboxSpec { environment: vec![("OWN".into(), "own".into())], ..SandboxSpec::default() }
}

/// Leaves one of everything that can be left.
async fn soil(sandbox: &dyn Sandbox, word: &str) -> BTreeSet<String> {
    let Left { mut left, refused } = ask(sandbox, "leave", word).await;
    let there: Vec<&str> = refused.keys().map(String::as_str).collect();
    assert_eq!(there, REFUSED, "what can be left is otherwise: {refused:?}");
    left.insert("h5 environment".to_owned());
    // Modes are no thing to be found: they are compared.
    assert!(left.remove("h1 modes") && left.iter().any(|name| name == "h4 daemon"));
    let named = ExecOptions { id: Some(ExecId("job".into())), ..ExecOptions::default() };
    let sleep = Command::new("sleep").args(["600"]);
    sandbox.start_exec(&sleep, &ExecContext::default(), &named).await.unwrap();
    sandbox.connect(PORT).await.expect("control: who has it reaches what listens");
    left
}

/// Shows that a look finds all of what was left.
async fn find_all(sandbox: &dyn Sandbox, left: &BTreeSet<String>, word: &str) -> Seen {
    let seen: Seen = ask(sandbox, "look", word).await;
    let missed: Vec<_> = left.difference(&seen.found).collect();
    assert!(missed.is_empty(), "control: the look misses {missed:?} of what is there: {seen:?}");
    seen
}

/// Shows that another client has nothing of it.
async fn find_none(sandbox: &dyn Sandbox, clean: &Seen, word: &str) {
    assert!(sandbox.list_execs().await.unwrap().is_empty(), "commands of somebody else");
    assert!(sandbox.find_exec(&ExecId("job".into())).await.unwrap().is_none());
    assert_eq!(sandbox.connect(PORT).await.unwrap_err().code(), "port_closed");
    let capabilities = format!("{:?}", sandbox.capabilities());
    assert!(!capabilities.contains(word), "{capabilities}");
    let seen: Seen = ask(sandbox, "look", word).await;
    assert!(seen.found.is_empty(), "left by another: {:?}", seen.found);
    assert_eq!(seen.environment["OWN"], "own", "control: what it asked for itself it has");
    assert_eq!(seen.processes, [""; 0], "a process that is not its own");
    assert_eq!(seen, *clean, "as in one that nobody had before");
}

/// Lists the processes of the host that have a word in their command line.
fn processes_with(word: &str) -> Vec<String> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let lines = all.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).into_owned());
    lines.filter(|line| line.contains(word)).collect()
}

/// H1 to H7: files, System V and POSIX memory and queues, keys, a daemon, secrets, ports, what shells and programs read.
async fn what_is_left_reaches_nobody_else(ground: Ground) {
    let manager = manager(&ground, 3);
    // What one that nobody had before is like.
    let fresh = ground.backend.create_sandbox(&usual()).await.unwrap();
    let clean: Seen = ask(&*fresh, "look", "nobodys-word").await;
    fresh.destroy().await.unwrap();
    let mut kept = Vec::new();
    let mut given = BTreeSet::new();
    for round in 0..ground.rounds {
        let word = format!("{}{round}", SandboxId::new().as_str().replace('-', ""));
        let alice = format!("alice {round}");
        let (session, sandbox) = take(&manager, &secretive(&word), &alice).await;
        assert!(given.insert(session.sandbox_id.clone()), "given twice");
        let left = soil(&*sandbox, &word).await;
        let seen = find_all(&*sandbox, &left, &word).await;
        assert_ne!(seen.modes, clean.modes, "control: modes are compared");
        assert_ne!(seen.listens, clean.listens, "control: what listens is");
        assert!(!processes_with(&word).is_empty(), "control: the host sees its daemon");
        let keeps = round % 2 == 0;
        manager.release(&session, keeps).await.unwrap();
        for other in 0..ground.others {
            let bob = format!("bob {round} {other}");
            let (session, sandbox) = take(&manager, &usual(), &bob).await;
            assert!(given.insert(session.sandbox_id.clone()), "given twice");
            find_none(&*sandbox, &clean, &word).await;
            manager.release(&session, other % 2 == 0).await.unwrap();
        }
        match keeps {
            true => kept.push((alice, word, left)),
            false => soon("its daemon is gone", async || processes_with(&word).is_empty()).await,
        }
    }
    let rate = manager.stats().await.pool_hit_rate;
    assert!((rate - 1.0).abs() < 1e-9, "control: all were warm: {rate}");
    // What was kept waited for whom it was kept for, with all that was left.
    for (alice, word, left) in kept {
        let (_, sandbox) = take(&manager, &secretive(&word), &alice).await;
        find_all(&*sandbox, &left, &word).await;
    }
    manager.shutdown(Shutdown::StopAll).await;
    assert_eq!(ground.backend.list_sandboxes().await.unwrap(), []);
}

fn linux() -> Ground {
    let backend = Arc::new(LinuxBackend::new().unwrap());
    Ground { backend, rounds: 10, others: 5 }
}

#[tokio::test(flavor = "multi_thread")]
async fn h1_h2_h3_h4_h5_h6_h7_what_a_client_leaves_reaches_no_other_on_linux() {
    what_is_left_reaches_nobody_else(linux()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn h1_h2_h3_h4_h5_h6_h7_what_a_client_leaves_reaches_no_other_on_crun() {
    let backend = Arc::new(OciBackend::new(OciRuntime::Crun).unwrap());
    what_is_left_reaches_nobody_else(Ground { backend, rounds: 2, others: 3 }).await;
}

/// H3: elsewhere than in a sandbox a key is left, and the same look finds it.
#[test]
fn h3_control_the_look_finds_a_key_where_one_can_be_left() {
    let mut child = std::process::Command::new("/usr/bin/python3")
        .args(["-c", SCRIPT, "keys"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, SandboxId::new().as_str().as_bytes()).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said.trim(), r#"{"found": true}"#);
}

/// What the host's control groups say of a sandbox: its limits, whether it stands still, and how many groups it has.
fn groups_of(id: &SandboxId) -> BTreeMap<String, String> {
    const TOLD: [&str; 10] = [
        "memory.limit_in_bytes",
        "memory.max",
        "memory.memsw.limit_in_bytes",
        "memory.swap.max",
        "pids.max",
        "cpu.shares",
        "cpu.weight",
        "cpu.cfs_quota_us",
        "freezer.state",
        "cgroup.freeze",
    ];
    let mut found = BTreeMap::new();
    let mut look = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(directory) = look.pop() {
        let entries: Vec<_> = fs::read_dir(&directory).into_iter().flatten().flatten().collect();
        let is_its = directory.to_string_lossy().contains(id.as_str());
        if is_its {
            // What it is called where it is, whichever sandbox it is of.
            let name = directory.display().to_string().replace(id.as_str(), "ID");
            for file in TOLD {
                if let Ok(value) = fs::read_to_string(directory.join(file)) {
                    found.insert(format!("{name}/{file}"), value.trim().to_owned());
                }
            }
            found.insert(name, String::new());
        }
        let below =
            entries.iter().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        look.extend(below.map(std::fs::DirEntry::path));
    }
    found
}

/// What a sandbox may use, by all who hold it to that.
async fn terms_of(sandbox: &dyn Sandbox) -> (BTreeMap<String, String>, String, String) {
    let mut groups = groups_of(sandbox.id());
    // Those of single commands come and go.
    groups.retain(|name, _| !name.contains("/commands"));
    assert!(!groups.is_empty(), "control: they are found");
    let told = format!("{:?} {:?}", sandbox.capabilities().limits, sandbox.enforcement().limits);
    let script = "ulimit -a; ulimit -Ha; nice; cat /proc/self/oom_score_adj";
    let command = Command::new("bash").args(["-c", script]);
    let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
    let own = String::from_utf8(output.stdout).unwrap();
    assert!(own.contains("open files"), "control: {own}");
    (groups, told, own)
}

#[tokio::test(flavor = "multi_thread")]
async fn h8_limits_counters_and_what_stands_still_reach_no_other_on_linux() {
    const MEMORY: u64 = 100 << 20;
    const WRITTEN: u64 = 8 << 20;
    const CPU_MS: u64 = 400;
    let ground = linux();
    let manager = manager(&ground, 3);
    let fresh = ground.backend.create_sandbox(&usual()).await.unwrap();
    let clean = terms_of(&*fresh).await;
    fresh.destroy().await.unwrap();
    for (round, (memory, processes)) in [(1 << 30, 200), (192 << 20, 16)].into_iter().enumerate() {
        let mut spec = usual();
        spec.limits.max_memory_bytes = Some(memory);
        spec.limits.max_processes = Some(processes);
        let (session, sandbox) = take(&manager, &spec, &format!("alice {round}")).await;
        let terms = terms_of(&*sandbox).await;
        assert_ne!((&terms.0, &terms.1), (&clean.0, &clean.1), "control: its limits are its own");
        let script = format!(
            "import subprocess, time; kept = bytearray({MEMORY}); \
             open('/workspace/much', 'wb').write(bytes({WRITTEN})); \
             [subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3, stderr=-3) for _ in 'abc']\n\
             while time.process_time() < {CPU_MS} / 800: pass"
        );
        let command = Command::new("/usr/bin/python3").args(["-c", &script]);
        let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
        assert_eq!(output.exit_code, 0, "{}", String::from_utf8_lossy(&output.stderr));
        let used = sandbox.resource_usage().await.unwrap();
        let much = used.peak_memory_bytes >= MEMORY
            && used.bytes_written >= WRITTEN
            && used.cpu_time_ms >= CPU_MS;
        assert!(much, "control: what was used is counted: {used:?}");
        let before = groups_of(sandbox.id());
        manager.suspend(&session).await.unwrap();
        assert_ne!(groups_of(sandbox.id()), before, "control: that it stands still is seen");
        if round % 2 == 0 {
            manager.terminate(&session).await.unwrap();
            let gone = async || groups_of(&session.sandbox_id).is_empty();
            soon("its groups are gone, with all that stood still in them", gone).await;
        }
        for other in 0..4 {
            let bob = format!("bob {round} {other}");
            let (session, sandbox) = take(&manager, &usual(), &bob).await;
            let used = sandbox.resource_usage().await.unwrap();
            let little = used.peak_memory_bytes < MEMORY / 2
                && (used.bytes_written, used.bytes_read) == (0, 0)
                && used.cpu_time_ms < CPU_MS / 2;
            assert!(little, "counted for another: {used:?}");
            assert_eq!(terms_of(&*sandbox).await, clean, "as of one that nobody had before");
            manager.release(&session, other % 2 == 0).await.unwrap();
        }
    }
    let rate = manager.stats().await.pool_hit_rate;
    assert!((rate - 1.0).abs() < 1e-9, "control: all were warm: {rate}");
    manager.shutdown(Shutdown::StopAll).await;
    assert_eq!(ground.backend.list_sandboxes().await.unwrap(), []);
}

/// H1, H4: what has no namespaces is taken by who asks for it by name, and none of it is kept warm: each client has one that
/// was made for it.
#[tokio::test(flavor = "multi_thread")]
async fn h1_h4_what_a_client_leaves_reaches_no_other_on_landlock_of_which_nothing_is_warm() {
    let directory = crate::common_directory();
    let backend = LandlockBackend::new().unwrap().in_directory(directory.path());
    let ground = Ground { backend: Arc::new(backend), rounds: 10, others: 0 };
    let manager = manager(&ground, 2);
    let mut given = BTreeSet::new();
    for round in 0..ground.rounds {
        let options = SandboxSelectionOptions {
            preferred_backend: Some("landlock".to_owned()),
            use_pool: true,
            ..SandboxSelectionOptions::default()
        };
        let client = format!("client {round}");
        let (session, sandbox) = manager.acquire(&usual(), &options, &client).await.unwrap();
        assert!(given.insert(session.sandbox_id.clone()), "given twice");
        let run = async |script: &str| {
            let command = Command::new("sh").args(["-c", script]);
            let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let word = SandboxId::new();
        let look = "find \"$HOME\" \"$PWD\" \"$TMPDIR\" -name 'canary*'";
        assert_eq!(run(look).await, "", "left by another");
        // It says nothing to anybody, or whoever waits for its output would wait for it.
        let leave = format!(
            "for p in \"$HOME\" \"$PWD\" \"$TMPDIR\"; do echo x > \"$p/canary\" || exit; done; \
             echo 'sleep 600; :' > canary-{word}; setsid sh canary-{word} > /dev/null 2>&1 & echo left"
        );
        assert_eq!(run(&leave).await, "left\n");
        let found = run(look).await;
        assert!(found.lines().count() >= 3, "control: the look finds it: {found}");
        let daemon = format!("sh\0canary-{word}");
        soon("control: its daemon runs", async || !processes_with(&daemon).is_empty()).await;
        let keeps = round % 2 == 0;
        manager.release(&session, keeps).await.unwrap();
        assert!(keeps || processes_with(&daemon).is_empty(), "its daemon is gone with it");
    }
    let stats = manager.stats().await;
    assert_eq!((stats.pool_size, stats.pool_hit_rate), (0, 0.0), "nothing warm was given");
    manager.shutdown(Shutdown::StopAll).await;
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "and nothing is left");
}
