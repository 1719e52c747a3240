//! What a hostile workload does to a suspend and to a destroy, and what is claimed of the walls.
//!
//! The rest of the threat list is asked through the binary: `crates/warren-cli/tests/hostile`.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

#[path = "shared/plain_user.rs"]
mod plain_user;

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use warren::backend::LinuxBackend;
use warren::backend::linux::LinuxSandbox;
use warren::layers::Layers;
use warren::{
    Command, CreateOptions, ExecContext, IsolationBackend, Limit, ResourceLimits, Sandbox,
    SandboxId, SandboxSpec,
};

/// How long a sandbox may take to be gone: promise 5 of the threat list.
const GONE: Duration = Duration::from_secs(2);

/// The processes of a sandbox as the host sees them: state and time on a CPU, in ticks.
fn processes_of(sandbox: &LinuxSandbox) -> BTreeMap<i32, (char, u64)> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let of = |pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<_> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let ticks = fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?;
        Some((fields[1].parse::<i32>().ok()?, fields[0].chars().next()?, ticks))
    };
    let all: BTreeMap<i32, _> = pids.filter_map(|pid| Some((pid, of(pid)?))).collect();
    // By descent, because a plain user may not look at the namespaces of what is not dumpable.
    let below = |mut pid: i32| loop {
        match all.get(&pid) {
            Some((parent, ..)) if *parent == sandbox.pid() => return true,
            Some((parent, ..)) if *parent > 1 => pid = *parent,
            _ => return false,
        }
    };
    all.iter()
        .filter(|(pid, (_, state, _))| *state != 'Z' && below(**pid))
        .map(|(pid, (_, state, ticks))| (*pid, (*state, *ticks)))
        .collect()
}

async fn soon(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Runs a script that never ends beside the test.
fn set_off(sandbox: &LinuxSandbox, script: &str) -> tokio::task::JoinHandle<()> {
    let (sandbox, command) = (sandbox.clone(), Command::new("sh").args(["-c", script]));
    tokio::task::spawn_local(async move {
        // How it ends is not the question; most are destroyed.
        drop(sandbox.exec(&command, &ExecContext::default()).await);
    })
}

async fn destroy_in_time(sandbox: &LinuxSandbox, what: &str) {
    let start = Instant::now();
    sandbox.destroy().await.unwrap();
    let took = start.elapsed();
    assert!(took < GONE, "{what}: destroyed after {took:?}");
    let pid = sandbox.pid();
    soon(what, || processes_of(sandbox).is_empty()).await;
    soon(what, || !std::path::Path::new(&format!("/proc/{pid}/root")).exists()).await;
}

async fn on_one_thread(test: impl Future<Output = ()>) {
    tokio::task::LocalSet::new().run_until(test).await;
}

mod linux {
    use super::*;

    // S14
    #[tokio::test]
    async fn stopping_every_process_stops_no_suspend_resume_or_destroy() {
        on_one_thread(async {
            let backend = LinuxBackend::new().unwrap();
            for suspended_at_the_end in [false, true] {
                let sandbox = backend
                    .create(&SandboxSpec::default(), &CreateOptions::default())
                    .await
                    .unwrap();
                let script = "sleep 600 & sleep 600 & kill -STOP -1; kill -STOP $$; echo on";
                let running = set_off(&sandbox, script);
                let stopped = || {
                    let all = processes_of(&sandbox);
                    all.len() == 3 && all.values().all(|(state, _)| *state == 'T')
                };
                soon("control: it stopped itself and all others", stopped).await;
                sandbox.suspend().await.unwrap();
                sandbox.resume().await.unwrap();
                assert!(sandbox.is_alive().await);
                let output = sandbox.exec(&Command::new("true"), &ExecContext::default()).await;
                assert_eq!(output.unwrap().exit_code, 0, "others can still be started");
                if suspended_at_the_end {
                    sandbox.suspend().await.unwrap();
                }
                destroy_in_time(&sandbox, "all stopped").await;
                running.await.unwrap();
            }
        })
        .await;
    }

    // S15
    #[tokio::test]
    async fn a_fork_bomb_is_suspended_as_a_whole_and_destroyed_while_it_is() {
        on_one_thread(async {
            let backend = LinuxBackend::new().unwrap();
            let limits = ResourceLimits { max_processes: Some(48), ..ResourceLimits::default() };
            let spec = SandboxSpec { limits, ..SandboxSpec::default() };
            let options = CreateOptions { accept_missing: Limit::ALL.into(), ..Default::default() };
            let sandbox = backend.create(&spec, &options).await.unwrap();
            // A shell gives up when it cannot fork; this goes on for ever.
            let bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass";
            let running = set_off(&sandbox, &format!("exec python3 -c '{bomb}'"));
            let work = || processes_of(&sandbox).values().map(|(_, ticks)| ticks).sum::<u64>();
            soon("control: it forks", || processes_of(&sandbox).len() > 20).await;
            let before = work();
            soon("control: it is at work", || work() > before).await;
            for _ in 0..3 {
                sandbox.suspend().await.unwrap();
                // A signal reaches a process that is on a CPU at its next way into the kernel.
                tokio::time::sleep(Duration::from_millis(200)).await;
                let at_rest = processes_of(&sandbox);
                tokio::time::sleep(Duration::from_millis(300)).await;
                let later = processes_of(&sandbox);
                let same = at_rest.keys().eq(later.keys());
                assert!(same, "processes come or go while it is suspended: {at_rest:?} {later:?}");
                let ticks =
                    |all: &BTreeMap<i32, (char, u64)>| all.values().map(|p| p.1).sum::<u64>();
                assert_eq!(ticks(&at_rest), ticks(&later), "one of them runs: {later:?}");
                sandbox.resume().await.unwrap();
                let before = work();
                soon("control: it goes on", || work() > before).await;
            }
            sandbox.suspend().await.unwrap();
            destroy_in_time(&sandbox, "a suspended bomb").await;
            running.await.unwrap();
        })
        .await;
    }

    #[tokio::test]
    async fn of_two_who_make_a_sandbox_of_one_id_one_is_told_that_it_is_taken() {
        let backend = LinuxBackend::new().unwrap();
        for _ in 0..10 {
            let options = CreateOptions { id: Some(SandboxId::new()), ..Default::default() };
            let spec = SandboxSpec::default();
            let (one, other) =
                tokio::join!(backend.create(&spec, &options), backend.create(&spec, &options));
            let (made, refused) = match (one, other) {
                (Ok(made), Err(refused)) | (Err(refused), Ok(made)) => (made, refused),
                (one, other) => panic!("one of each: {one:?}, {other:?}"),
            };
            assert_eq!(refused.code(), "already_exists");
            let output = made.exec(&Command::new("true"), &ExecContext::default()).await;
            assert_eq!(output.unwrap().exit_code, 0, "the one that is there is whole");
            made.destroy().await.unwrap();
            let again = backend.create(&spec, &options).await.expect("control: it is free again");
            again.destroy().await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_creation_that_fails_or_is_given_up_leaves_its_id_free() {
        let backend = LinuxBackend::new().unwrap();
        let options = CreateOptions { id: Some(SandboxId::new()), ..Default::default() };
        let hurried =
            SandboxSpec { creation_timeout: Duration::from_nanos(1), ..SandboxSpec::default() };
        let mut given_up = None;
        for _ in 0..100 {
            match backend.create(&hurried, &options).await {
                // It was there before the clock, which ticks once in a millisecond, had ticked.
                Ok(made) => made.destroy().await.unwrap(),
                Err(error) => {
                    given_up = Some(error);
                    break;
                }
            }
        }
        let error = given_up.expect("control: one of them takes longer");
        assert_eq!(error.code(), "timeout", "control: {error}");
        let start = Instant::now();
        let made = loop {
            // What was begun is removed behind our back; until then the id is taken on the host.
            match backend.create(&SandboxSpec::default(), &options).await {
                Err(_) if start.elapsed() < Duration::from_secs(5) => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                made => break made.unwrap(),
            }
        };
        made.destroy().await.unwrap();
    }

    #[tokio::test]
    async fn every_layer_says_how_it_is_known_to_hold() {
        let backend = LinuxBackend::new().unwrap();
        let report = backend.examine().await;
        for layer in ["sandbox", "mounts", "processes", "proc", "network", "seccomp", "landlock"] {
            assert!(report.holds(layer), "{layer}: {report:#?}");
        }
        let cpu = report.findings.iter().find(|finding| finding.layer == "cpu").unwrap();
        let measured = cpu.detail.contains("a spinner was throttled");
        assert_eq!(cpu.holds, measured, "it holds if it was measured: {cpu:?}");
        assert_eq!(measured, rustix::process::geteuid().is_root(), "control: {cpu:?}");
        let sandbox =
            backend.create(&SandboxSpec::default(), &CreateOptions::default()).await.unwrap();
        for layer in sandbox.enforcement().layers {
            let known = ["tried", "made", "set", "read back"];
            let says = |word: &&str| layer.detail.contains(*word);
            assert!(known.iter().any(says), "{}: {}", layer.name, layer.detail);
        }
        sandbox.destroy().await.unwrap();
    }
}

/// Runs the cases of this very program once more, as `nobody`.
#[test]
fn the_same_holds_for_a_plain_user() {
    plain_user::rerun(&["linux::", "--test-threads", "1"]);
}

/// H9: what two sandboxes stand on is the same, and nothing that is to be each one's own.
#[tokio::test(flavor = "multi_thread")]
async fn two_sandboxes_of_one_ground_share_no_seed_and_no_identity() {
    let directory = tempfile::tempdir().unwrap();
    let layers = Layers::open(directory.path().join("storage")).unwrap();
    let backend = LinuxBackend::with_layers(None, layers).unwrap();
    let script = "cat /proc/sys/kernel/random/uuid; od -An -v -N16 -tx1 /dev/urandom; hostname; \
                  python3 -c 'import random; print(random.random())'; sha256sum /proc/self/auxv; \
                  cat /etc/machine-id 2>/dev/null || cat /proc/sys/kernel/random/uuid; cat /workspace/seed";
    let look = async |sandbox: &dyn Sandbox| {
        let command = Command::new("sh").args(["-c", script]);
        let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let first = backend.create_sandbox(&SandboxSpec::default()).await.unwrap();
    let seed = Command::new("sh").args(["-c", "od -An -N8 -tx1 /dev/urandom > /workspace/seed"]);
    first.exec(&seed, &ExecContext::default()).await.unwrap();
    let base = first.capture().await.unwrap().base;
    first.destroy().await.unwrap();
    let mut seen = Vec::new();
    for _ in 0..2 {
        let options = CreateOptions { base: base.clone(), ..CreateOptions::default() };
        let spec = SandboxSpec::default();
        let sandbox = backend.create_sandbox_with(&spec, &options).await.unwrap();
        seen.push(look(&*sandbox).await);
        sandbox.destroy().await.unwrap();
    }
    assert_eq!(seen[0].len(), 7, "{seen:?}");
    assert_eq!(seen[0][6], seen[1][6], "control: they do stand on the same: {seen:?}");
    for (one, other) in seen[0][..6].iter().zip(&seen[1]) {
        assert!(!one.is_empty() && one != other, "{seen:?}");
    }
    let host = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    assert!(host.is_empty() || !seen.concat().contains(&host.trim().to_owned()), "{seen:?}");
}
