//! Sandboxes of the linux backend that outlive the process, here the backend, that made them.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::time::Duration;

use warren::backend::LinuxBackend;
use warren::{
    Command, CreateOptions, ExecContext, ExecOptions, IsolationBackend, LogOverflow,
    ResourceLimits, Sandbox, SandboxId, SandboxSpec,
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
        let (backend, id) = (self.backend(), self.id.clone());
        let reclaim = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(backend.reclaim(&id))
        };
        std::thread::spawn(reclaim).join().unwrap().unwrap();
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
