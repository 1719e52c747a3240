//! Sandboxes of the linux backend that outlive the process, here the backend, that made them.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use warren::backend::LinuxBackend;
use warren::store::memory::MemoryStore;
use warren::store::{Change, Store as _};
use warren::{
    Base, Command, CreateOptions, DefaultSandboxManager, ExecContext, ExecOptions,
    IsolationBackend, LogOverflow, PoolConfig, ResourceLimits, Sandbox, SandboxId,
    SandboxManager as _, SandboxManagerConfig, SandboxSelectionOptions, SandboxSpec,
};

fn persistent(id: &SandboxId) -> CreateOptions {
    CreateOptions { id: Some(id.clone()), persistent: true, ..CreateOptions::default() }
}

async fn sh(sandbox: &dyn Sandbox, script: &str) -> String {
    let command = Command::new("sh").args(["-c", script]);
    let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

struct Place {
    directory: tempfile::TempDir,
    id: SandboxId,
    spec: SandboxSpec,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { directory, id: SandboxId::new(), spec: SandboxSpec::default() }
    }

    fn backend(&self) -> LinuxBackend {
        LinuxBackend::with_runtime(self.directory.path()).unwrap()
    }

    async fn left(&self, backend: &LinuxBackend) -> bool {
        backend.remains().await.unwrap().contains(&self.id)
    }
}

/// A test that fails half-way must not leave behind what is made to stay.
impl Drop for Place {
    fn drop(&mut self) {
        let backend = self.backend();
        let reclaim = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                for id in backend.remains().await.unwrap() {
                    backend.reclaim(&id).await.unwrap();
                }
            });
        };
        std::thread::spawn(reclaim).join().unwrap();
    }
}

#[tokio::test]
async fn a_persistent_sandbox_goes_on_without_its_maker_and_is_adopted_as_it_was() {
    let place = Place::new();
    let first = place.backend();
    let made = first.create(&place.spec, &persistent(&place.id)).await.unwrap();
    assert!(made.capabilities().is_persistent);
    sh(&made, "echo kept > /workspace/file; tail -f /dev/null > /dev/null 2>&1 &").await;
    let (anchor, pid) = (made.anchor().unwrap(), made.pid());
    drop((made, first));

    let second = place.backend();
    let adopted = second.adopt(&place.id, &place.spec, &anchor).await.unwrap().unwrap();
    // It may not have come to its own name when its shell returned.
    let look =
        "cat /workspace/file; for i in $(seq 100); do pgrep -x tail && exit; sleep 0.05; done";
    let seen = sh(&*adopted, look).await;
    assert!(seen.starts_with("kept\n"), "{seen}");
    assert!(second.list_sandboxes().await.unwrap().contains(&place.id));
    assert!(place.left(&second).await, "control: it is seen while it is there");
    adopted.destroy().await.unwrap();
    assert!(!place.left(&second).await);
    assert!(!std::path::Path::new(&format!("/proc/{pid}/root")).exists());
}

#[tokio::test]
async fn a_command_outlives_whoever_read_its_output() {
    let place = Place::new();
    let backend = place.backend();
    let made = backend.create(&place.spec, &persistent(&place.id)).await.unwrap();
    let anchor = made.anchor().unwrap();
    // Far more than a pipe holds, and not a word to anybody but its reader.
    let script =
        "while :; do head -c 100000 /dev/zero; date +%s%N > /workspace/beat; sleep 0.01; done";
    let command = Command::new("sh").args(["-c", script]);
    let forgets = ExecOptions { overflow: LogOverflow::Forget, ..ExecOptions::default() };
    made.start_exec(&command, &ExecContext::default(), &forgets).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    drop((made, backend));
    let backend = place.backend();
    let adopted = backend.adopt(&place.id, &place.spec, &anchor).await.unwrap().unwrap();
    let before = sh(&*adopted, "cat /workspace/beat").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_ne!(sh(&*adopted, "cat /workspace/beat").await, before, "it is still at work");
    adopted.destroy().await.unwrap();
}

#[tokio::test]
async fn a_suspended_sandbox_is_adopted_suspended() {
    let place = Place::new();
    let made = place.backend().create(&place.spec, &persistent(&place.id)).await.unwrap();
    made.suspend().await.unwrap();
    let anchor = made.anchor().unwrap();
    drop(made);
    let backend = place.backend();
    let adopted = backend.adopt(&place.id, &place.spec, &anchor).await.unwrap().unwrap();
    let refused = adopted.exec(&Command::new("true"), &ExecContext::default()).await.unwrap_err();
    assert_eq!(refused.code(), "suspended");
    adopted.resume().await.unwrap();
    assert_eq!(sh(&*adopted, "echo on").await, "on");
    adopted.destroy().await.unwrap();
}

/// Finds the group that commands have to themselves. A plain user may have none: there init alone stops and continues
/// them.
fn commands(id: &SandboxId) -> Option<String> {
    let groups = groups(id);
    let mut commands = groups.lines().map(|group| format!("{group}/commands"));
    commands.find(|commands| std::fs::exists(format!("{commands}/cgroup.freeze")).unwrap())
}

/// Init is told of a turn and not waited for: it hears of each in its time, and undoes none.
#[tokio::test]
async fn turned_over_and_over_it_stands_still_whenever_it_is_said_to() {
    let place = Place::new();
    let backend = place.backend();
    let made = backend.create(&place.spec, &persistent(&place.id)).await.unwrap();
    let Some(commands) = commands(&place.id) else { return made.destroy().await.unwrap() };
    let stand_still = || {
        let events = std::fs::read_to_string(format!("{commands}/cgroup.events")).unwrap();
        events.contains("frozen 1")
    };
    sh(&made, "while :; do :; done >/dev/null 2>&1 &").await;
    for turn in 0..200 {
        made.suspend().await.unwrap();
        let since = Instant::now();
        while since.elapsed() < Duration::from_millis(1) {
            assert!(stand_still(), "turn {turn}, after {:?}", since.elapsed());
        }
        made.resume().await.unwrap();
        assert!(!stand_still(), "turn {turn}");
    }
    assert_eq!(sh(&made, "echo on").await, "on");
    made.destroy().await.unwrap();
}

/// Who suspends stops the group of the commands and then tells init; being killed in between is what is done
/// here by hand, in both directions.
#[tokio::test]
async fn one_whose_keeper_was_killed_in_the_middle_of_a_turn_is_as_its_group_says() {
    let place = Place::new();
    let made = place.backend().create(&place.spec, &persistent(&place.id)).await.unwrap();
    let anchor = made.anchor().unwrap();
    let Some(commands) = commands(&place.id) else { return made.destroy().await.unwrap() };
    let switch = format!("{commands}/cgroup.freeze");
    drop(made);
    for (written, is_suspended) in [("1", true), ("0", false)] {
        std::fs::write(&switch, written).unwrap();
        let backend = place.backend();
        let adopted = backend.adopt(&place.id, &place.spec, &anchor).await.unwrap().unwrap();
        let command = Command::new("true");
        let ran = adopted.exec(&command, &ExecContext::default()).await;
        assert_eq!(ran.is_err_and(|error| error.code() == "suspended"), is_suspended, "{written}");
    }
    let backend = place.backend();
    let adopted = backend.adopt(&place.id, &place.spec, &anchor).await.unwrap().unwrap();
    assert_eq!(sh(&*adopted, "echo on").await, "on", "and init has heard of it");
    adopted.destroy().await.unwrap();
}

#[tokio::test]
async fn what_is_gone_or_a_stranger_is_not_adopted_and_nothing_of_it_is_left() {
    for case in ["ended", "reused pid", "other boot", "other sandbox", "garbage"] {
        let place = Place::new();
        let backend = place.backend();
        let made = backend.create(&place.spec, &persistent(&place.id)).await.unwrap();
        let anchor = made.anchor().unwrap();
        let pid = made.pid();
        drop(made);
        let parsed: serde_json::Value = serde_json::from_str(&anchor).unwrap();
        let mut changed = parsed.clone();
        match case {
            "ended" => rustix::process::kill_process(
                rustix::process::Pid::from_raw(pid).unwrap(),
                rustix::process::Signal::KILL,
            )
            .unwrap(),
            "reused pid" => changed["start_time"] = 1.into(),
            "other boot" => changed["boot_id"] = "another".into(),
            // A process that runs and was started when it says, but is in nobody's groups: ours.
            "other sandbox" => {
                let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
                let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
                changed["pid"] = std::process::id().into();
                changed["start_time"] = fields[19].parse::<u64>().unwrap().into();
            }
            _ => changed = "garbage".into(),
        }
        let adopted = backend.adopt(&place.id, &place.spec, &changed.to_string()).await.unwrap();
        assert!(adopted.is_none(), "{case}");
        assert!(!place.left(&backend).await, "{case}");
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!std::path::Path::new(&format!("/proc/{pid}/root")).exists(), "{case}");
    }
}

/// What this build says to its inits.
const OWN: u32 = warren_init::protocol::VERSION;

/// An anchor as a daemon of another version would have left it.
fn of_version(anchor: &str, version: Option<u32>) -> String {
    let mut changed: serde_json::Value = serde_json::from_str(anchor).unwrap();
    match version {
        Some(version) => changed["protocol"] = version.into(),
        None => drop(changed.as_object_mut().unwrap().remove("protocol")),
    }
    // Whatever else such a version wrote, this one does not have to understand it.
    changed["of_tomorrow"] = "unknown".into();
    if version.is_some_and(|version| version != OWN) {
        changed.as_object_mut().unwrap().remove("groups");
    }
    changed.to_string()
}

#[tokio::test]
async fn c15_an_init_of_another_version_is_left_alone_until_its_own_daemon_is_back() {
    let place = Place::new();
    let made = place.backend().create(&place.spec, &persistent(&place.id)).await.unwrap();
    sh(&made, "sleep 1000 > /dev/null 2>&1 & echo $! > /workspace/pid").await;
    let (anchor, pid) = (made.anchor().unwrap(), made.pid());
    drop(made);
    let lives = || std::path::Path::new(&format!("/proc/{pid}/root")).exists();
    // The first did not say which it was.
    for (written, version) in [(Some(0), 0), (None, 1), (Some(1), 1), (Some(OWN + 1), OWN + 1)] {
        let backend = place.backend();
        let other = of_version(&anchor, written);
        let error = backend.adopt(&place.id, &place.spec, &other).await.unwrap_err();
        assert_eq!(error.code(), "unsupported", "{version}: {error}");
        assert!(error.to_string().contains(&format!("of version {version}")), "{error}");
        assert!(lives() && place.left(&backend).await, "{version}: it runs on");
    }
    // A newer one of the same version wrote more.
    {
        let backend = place.backend();
        let anchor = of_version(&anchor, Some(OWN));
        let adopted = backend.adopt(&place.id, &place.spec, &anchor).await.unwrap().unwrap();
        let seen = sh(&*adopted, "kill -0 $(cat /workspace/pid) && echo still").await;
        assert_eq!(seen, "still", "what it ran goes on");
    }
    // What is gone is no version's.
    let backend = place.backend();
    let init = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(init, rustix::process::Signal::KILL).unwrap();
    let (began, other) = (std::time::Instant::now(), of_version(&anchor, Some(OWN + 1)));
    // It takes a moment to be gone, and whoever is asked before that is asked again.
    while backend.adopt(&place.id, &place.spec, &other).await.is_err() {
        assert!(
            began.elapsed() < Duration::from_secs(5),
            "it was killed, and is still thought to run"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!lives());
    assert!(!place.left(&backend).await);
}

#[tokio::test]
async fn c15_sessions_live_through_a_daemon_of_another_version_and_back() {
    let place = Place::new();
    let store = MemoryStore::default();
    let open = async || {
        let backends: Vec<Arc<dyn IsolationBackend>> = vec![Arc::new(place.backend())];
        let pool = PoolConfig { enabled: false, ..PoolConfig::default() };
        let config = SandboxManagerConfig { pool, ..SandboxManagerConfig::default() };
        DefaultSandboxManager::open(backends, config, Arc::new(store.clone())).await.unwrap()
    };
    let rewrite = async |id: &SandboxId, version: u32| {
        let all = store.load().await.unwrap().sandboxes;
        let mut record = all.into_iter().find(|record| record.id == *id).expect("it is recorded");
        let mut anchor: serde_json::Value =
            serde_json::from_str(record.anchor.as_ref().unwrap()).unwrap();
        anchor["protocol"] = version.into();
        record.anchor = Some(anchor.to_string());
        store.apply(vec![Change::PutSandbox(record)]).await.unwrap();
    };
    let manager = open().await;
    let options = SandboxSelectionOptions::default();
    let (session, sandbox) = manager.acquire(&place.spec, &options, "a").await.unwrap();
    let (other, beside) = manager.acquire(&place.spec, &options, "a").await.unwrap();
    sh(&*sandbox, "echo kept > /workspace/file").await;
    let id = session.sandbox_id.clone();
    drop((sandbox, beside, manager));
    rewrite(&id, OWN + 1).await;

    let manager = open().await;
    let gone = manager.get_session(&session.session_id).await.unwrap();
    assert!(gone.is_none(), "nobody is let into what is not understood: {gone:?}");
    let beside = manager.get_sandbox(&other.sandbox_id).await.unwrap().expect("the others serve");
    assert_eq!(sh(&*beside, "echo here").await, "here");
    drop((beside, manager));
    rewrite(&id, OWN).await;

    let manager = open().await;
    let found = manager.get_sandbox(&id).await.unwrap().expect("it is back");
    assert_eq!(sh(&*found, "cat /workspace/file").await, "kept");
    let session =
        manager.get_session(&session.session_id).await.unwrap().expect("with its session");
    for session in [session, other] {
        manager.terminate(&session).await.unwrap();
    }
    assert!(place.backend().remains().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_sandbox_that_nobody_recorded_is_found_and_reclaimed() {
    let place = Place::new();
    let backend = place.backend();
    let made = backend.create(&place.spec, &persistent(&place.id)).await.unwrap();
    let pid = made.pid();
    drop((made, backend));
    let backend = place.backend();
    assert!(place.left(&backend).await, "control");
    backend.reclaim(&place.id).await.unwrap();
    assert!(!place.left(&backend).await);
    assert!(!std::path::Path::new(&format!("/proc/{pid}/root")).exists());
    backend.reclaim(&place.id).await.unwrap();
}

#[tokio::test]
async fn a_creation_that_fails_leaves_no_directory() {
    let place = Place::new();
    let backend = place.backend();
    let spec = SandboxSpec {
        bind_mounts: vec![warren::BindMount {
            source: "/usr".into(),
            target: "/usr/share/no/such/place".into(),
            readonly: true,
        }],
        ..SandboxSpec::default()
    };
    backend.create(&spec, &persistent(&place.id)).await.unwrap_err();
    assert!(!place.left(&backend).await);
    assert_eq!(std::fs::read_dir(place.directory.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_warm_sandbox_takes_on_what_its_claimant_asks_or_stays_as_it_is() {
    let backend = LinuxBackend::new().unwrap();
    let warm = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await.unwrap();
    let other_disk = ResourceLimits { max_write_bytes: Some(1 << 20), ..Default::default() };
    for refused in [
        SandboxSpec { limits: other_disk, ..SandboxSpec::default() },
        SandboxSpec { allowed_paths_ro: vec!["/usr/share".into()], ..SandboxSpec::default() },
        SandboxSpec { profile: "strict".into(), ..SandboxSpec::default() },
        SandboxSpec { network_enabled: true, ..SandboxSpec::default() },
    ] {
        assert!(warm.claim(&refused).await.unwrap().is_none(), "{refused:?}");
    }
    for memory in [64_u64 << 20, 1 << 30] {
        let spec = SandboxSpec {
            environment: vec![("WHOSE".into(), "mine".into())],
            limits: ResourceLimits {
                max_memory_bytes: Some(memory),
                max_processes: Some(8),
                max_open_files: Some(32),
                ..ResourceLimits::default()
            },
            ..SandboxSpec::default()
        };
        let claimed = warm.claim(&spec).await.unwrap().expect("it can be what is asked for");
        assert_eq!(claimed.id(), warm.id());
        assert_eq!(claimed.capabilities().limits, spec.limits);
        assert_eq!(sh(&*claimed, "echo $WHOSE $(ulimit -n)").await, "mine 32");
        let again = backend.get_sandbox(warm.id()).await.unwrap().unwrap();
        assert_eq!(again.capabilities().limits, spec.limits, "everybody sees the new terms");
        let grab = format!("head -c {} /dev/zero | tail", memory * 2);
        let command = Command::new("sh").args(["-c", &grab]);
        let report = claimed.exec_report(&command, &ExecContext::default()).await.unwrap();
        assert_eq!(report.cause, warren::ExecCause::OutOfMemory, "the new limit holds");
    }
    warm.destroy().await.unwrap();
}

/// Waits until the next sandbox was begun, and returns its id.
async fn next(backend: &LinuxBackend, spec: &SandboxSpec) -> SandboxId {
    let found = async {
        loop {
            match backend.next_id(spec, &Base::default()) {
                Some(id) => return id,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), found).await.expect("the next is begun")
}

/// Finds the control groups of a sandbox, wherever they are.
fn groups(id: &SandboxId) -> String {
    let find = std::process::Command::new("find")
        .args(["/sys/fs/cgroup", "-type", "d", "-name", &format!("warren-{id}")])
        .output();
    String::from_utf8(find.unwrap().stdout).unwrap()
}

#[tokio::test]
async fn one_that_was_begun_ahead_is_what_its_own_spec_says_and_nothing_else() {
    let place = Place::new();
    let backend = place.backend().beginning_ahead();
    assert_eq!(backend.next_id(&place.spec, &Base::default()), None, "control: none is there yet");
    let first = backend.create(&place.spec, &persistent(&place.id)).await.unwrap();
    let small = SandboxSpec {
        environment: vec![("COLOUR".into(), "blue".into())],
        limits: ResourceLimits {
            max_write_bytes: Some(4 << 20),
            max_open_files: Some(77),
            ..ResourceLimits::default()
        },
        ..SandboxSpec::default()
    };
    let id = next(&backend, &small).await;
    let bound = SandboxSpec { allowed_paths_ro: vec!["/usr".into()], ..SandboxSpec::default() };
    assert_eq!(backend.next_id(&bound, &Base::default()), None, "it would need another mount");
    let strict = SandboxSpec { profile: "strict".into(), ..SandboxSpec::default() };
    assert_eq!(backend.next_id(&strict, &Base::default()), None, "it would need another root");

    let second = backend.create(&small, &persistent(&id)).await.unwrap();
    assert_eq!(second.id(), &id);
    let look = "echo $COLOUR; ulimit -n; head -c 8M /dev/zero > /tmp/big || echo full; wc -c < /tmp/big; \
                id -u; cat /proc/sys/kernel/hostname";
    let (of_first, of_second) = (sh(&first, look).await, sh(&second, look).await);
    let name = |id: &SandboxId| format!("warren-{}", &id.as_str()[4..12]);
    let lines: Vec<_> = of_second.lines().collect();
    assert_eq!((lines[0], lines[1], lines[2]), ("blue", "77", "full"), "{of_second}");
    assert!(lines[3].parse::<u64>().unwrap() <= 4 << 20, "{of_second}");
    assert_eq!((lines[4], lines[5]), ("1000", name(&id).as_str()), "{of_second}");
    assert!(!of_first.contains("full") && of_first.contains(&(8 << 20).to_string()), "{of_first}");
    assert!(of_first.contains(&name(&place.id)), "{of_first}");
    let receipt = second.verify(warren::Extent::Walls).await.unwrap();
    assert_eq!(receipt.open().count(), 0, "{receipt:?}");

    // It outlives us like any other.
    let anchor = second.anchor().unwrap();
    drop((first, second, backend));
    let later = place.backend();
    let found = later.adopt(&id, &small, &anchor).await.unwrap().expect("it goes on");
    assert_eq!(sh(&*found, "echo $COLOUR").await, "blue");
    found.destroy().await.unwrap();
    assert_eq!(groups(&id), "");
}

#[tokio::test]
async fn what_was_begun_for_nobody_is_nobodys_and_goes_with_its_backend() {
    let place = Place::new();
    let backend = place.backend().beginning_ahead();
    let made = backend.create(&place.spec, &persistent(&place.id)).await.unwrap();
    let id = next(&backend, &place.spec).await;
    let home = place.directory.path().join(id.as_str());
    assert!(home.exists(), "control: it has a directory");
    assert!(!backend.remains().await.unwrap().contains(&id));
    assert!(!backend.list_sandboxes().await.unwrap().contains(&id));
    assert!(backend.get_sandbox(&id).await.unwrap().is_none());
    // It gives way to another of the kind that is wanted now.
    let elsewhere = SandboxSpec { workdir: "/srv/work".into(), ..SandboxSpec::default() };
    assert_eq!(backend.next_id(&elsewhere, &Base::default()), None);
    let (a, b) = (SandboxId::new(), SandboxId::new());
    for id in [&a, &b] {
        let other = backend.create(&elsewhere, &persistent(id)).await.unwrap();
        other.destroy().await.unwrap();
    }
    let other = next(&backend, &elsewhere).await;
    assert!(!home.exists() && other != id);
    let third = backend.create(&elsewhere, &persistent(&other)).await.unwrap();
    assert_eq!(sh(&third, "pwd; touch file && echo written").await, "/srv/work\nwritten");
    third.destroy().await.unwrap();
    let last = next(&backend, &elsewhere).await;

    made.destroy().await.unwrap();
    drop((made, third, backend));
    assert!(!place.directory.path().join(last.as_str()).exists());
    for id in [id, other, last] {
        assert_eq!(groups(&id), "");
    }
}

#[tokio::test]
async fn the_walls_of_one_that_was_begun_ahead_hold_in_every_profile() {
    let is_root = rustix::process::geteuid().is_root();
    for profile in ["default", "strict", "dev"] {
        // Several users need root.
        if profile == "dev" && !is_root {
            continue;
        }
        let place = Place::new();
        let backend = place.backend().beginning_ahead();
        let spec = SandboxSpec { profile: profile.to_owned(), ..SandboxSpec::default() };
        let first = backend.create(&spec, &persistent(&place.id)).await.unwrap();
        let id = next(&backend, &spec).await;
        let second = backend.create(&spec, &persistent(&id)).await.unwrap();
        let mut verdicts = Vec::new();
        for sandbox in [&first, &second] {
            let receipt = sandbox.verify(warren::Extent::Everything).await;
            let receipt = receipt.unwrap_or_else(|error| panic!("{profile}: {error}"));
            assert_eq!(receipt.open().count(), 0, "{profile}: {receipt:?}");
            let held = receipt.tries().map(|made| (made.what.clone(), made.verdict));
            verdicts.push(held.collect::<Vec<_>>());
            assert_eq!(sandbox.enforcement().warnings, first.enforcement().warnings, "{profile}");
        }
        assert_eq!(verdicts[0], verdicts[1], "{profile}: as one that was made at once");
        first.destroy().await.unwrap();
        second.destroy().await.unwrap();
    }
}

#[tokio::test]
async fn one_that_was_killed_while_it_waited_is_made_anew() {
    let place = Place::new();
    let backend = place.backend().beginning_ahead();
    let first = backend.create(&place.spec, &persistent(&place.id)).await.unwrap();
    let id = next(&backend, &place.spec).await;
    let groups = groups(&id);
    // Without a control group nobody can tell which process it is.
    let Some(group) = groups.lines().next() else { return };
    let waiting = std::fs::read_to_string(format!("{group}/cgroup.procs")).unwrap();
    // For a moment it has a process in which walls are tried, as a command meets them.
    let pids = waiting.lines().map(|pid| pid.parse::<i32>().unwrap());
    let pid = pids.min().expect("control: it is a process");
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    // Its end is seen by a descriptor a moment after the signal.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(backend.next_id(&place.spec, &Base::default()), Some(id.clone()), "control");
    let second = backend.create(&place.spec, &persistent(&id)).await.unwrap();
    assert_eq!(sh(&second, "echo here").await, "here");
    first.destroy().await.unwrap();
    second.destroy().await.unwrap();
}
