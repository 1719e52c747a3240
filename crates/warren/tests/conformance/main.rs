//! The conformance suite on every backend.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

#[path = "mod.rs"]
#[macro_use]
mod conformance;
#[path = "../shared/hardened.rs"]
mod hardened;
mod hygiene;
#[path = "../shared/plain_user.rs"]
mod plain_user;

use std::sync::Arc;

use conformance::{Expect, Given, Workdir};
use warren::backend::{
    FakeBackend, HostBackend, HostConfig, LandlockBackend, LinuxBackend, OciBackend, OciRuntime,
};
use warren::layers::Layers;
use warren::{CreateOptions, IsolationBackend, Limit, ResourceLimits, SandboxError, SandboxSpec};

fn given_fake() -> Given {
    let expect = Expect {
        runs_programs: false,
        workdir: Workdir::AsInTheSpec,
        snapshots: true,
        logs_and_files: false,
        unenforceable: [].into(),
    };
    let backend = FakeBackend::new();
    let counts = backend.clone();
    let left = move || {
        let counts = counts.counts();
        let left = (counts.live, counts.running, counts.created - counts.destroyed);
        if left == (0, 0, 0) { Vec::new() } else { vec![format!("{counts:?}")] }
    };
    Given { backend: Arc::new(backend), expect, left: Box::new(left) }
}

fn host(accept_no_isolation: bool, directory: &tempfile::TempDir) -> HostBackend {
    HostBackend::in_directory(HostConfig { accept_no_isolation }, directory.path())
}

fn given_host() -> Given {
    let expect = Expect {
        runs_programs: true,
        workdir: Workdir::Elsewhere,
        snapshots: false,
        logs_and_files: false,
        unenforceable: [
            Limit::Memory,
            Limit::CpuTime,
            Limit::Processes,
            Limit::OpenFiles,
            Limit::Write,
            Limit::CpuWeight,
            Limit::CpuQuota,
        ]
        .into(),
    };
    let directory = tempfile::tempdir().unwrap();
    let backend = Arc::new(host(true, &directory));
    let left = move || {
        let entries = std::fs::read_dir(directory.path()).unwrap();
        entries.map(|entry| entry.unwrap().path().display().to_string()).collect()
    };
    Given { backend, expect, left: Box::new(left) }
}

/// Lists the processes that descend from this one, its launcher left out.
fn sandboxed_processes() -> Vec<String> {
    let children = |pid: &str| {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let lists = tasks.map(|task| std::fs::read_to_string(task.path().join("children")));
        let pids = lists
            .flatten()
            .flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        pids.collect::<Vec<_>>()
    };
    // One that has ended is there until its parent looks, which the launcher does at once.
    let runs = |pid: &String| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
    };
    children("self").iter().flat_map(|launcher| children(launcher)).filter(runs).collect()
}

/// Returns what is expected of a backend that can do all there is.
fn full() -> Expect {
    Expect {
        runs_programs: true,
        workdir: Workdir::AsInTheSpec,
        snapshots: true,
        logs_and_files: true,
        unenforceable: [].into(),
    }
}

/// Makes a place for layers, which goes with what is returned first.
fn storage() -> (tempfile::TempDir, Layers) {
    let directory = tempfile::tempdir().unwrap();
    let layers = Layers::open(directory.path().join("storage")).unwrap();
    (directory, layers)
}

/// Lists layers that were begun there and never finished.
fn staged(storage: &tempfile::TempDir) -> impl Iterator<Item = String> + use<> {
    let entries = std::fs::read_dir(storage.path().join("storage/staging")).unwrap();
    entries.map(|entry| entry.unwrap().path().display().to_string())
}

fn given_linux() -> Given {
    // A plain user has no cgroup on a host that delegates none.
    let unenforceable = match rustix::process::geteuid().is_root() {
        true => [].into(),
        false => [Limit::Memory, Limit::CpuTime, Limit::CpuWeight, Limit::CpuQuota].into(),
    };
    let expect = Expect { unenforceable, ..full() };
    let (storage, layers) = storage();
    let backend = Arc::new(LinuxBackend::with_layers(None, layers).unwrap());
    let left = move || staged(&storage).chain(sandboxed_processes()).collect();
    Given { backend, expect, left: Box::new(left) }
}

/// A directory in which sandboxes of any user can have their own.
fn common_directory() -> tempfile::TempDir {
    let directory = tempfile::Builder::new().prefix("warren-test-").tempdir_in("/var/tmp").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
    std::fs::set_permissions(directory.path(), mode).unwrap();
    directory
}

fn given_landlock() -> Given {
    let unenforceable = match rustix::process::geteuid().is_root() {
        true => [Limit::Write].into(),
        false => [
            Limit::Memory,
            Limit::CpuTime,
            Limit::Processes,
            Limit::Write,
            Limit::CpuWeight,
            Limit::CpuQuota,
        ]
        .into(),
    };
    let expect = Expect { workdir: Workdir::Elsewhere, snapshots: false, unenforceable, ..full() };
    let directory = common_directory();
    let backend = LandlockBackend::new().unwrap().in_directory(directory.path());
    let left = move || {
        let entries = std::fs::read_dir(directory.path()).unwrap();
        let entries = entries.map(|entry| entry.unwrap().path().display().to_string());
        entries.chain(sandboxed_processes()).collect()
    };
    Given { backend: Arc::new(backend), expect, left: Box::new(left) }
}

conformance!(fake, given_fake());
conformance!(landlock, given_landlock());
/// Lists the children of this process that run: of a container, the one who guards it.
fn guards() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let lists = tasks.map(|task| std::fs::read_to_string(task.path().join("children")));
    lists
        .flatten()
        .flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

fn given_oci(runtime: OciRuntime) -> Given {
    // By init alone, which looks now and then.
    let unenforceable = match runtime {
        OciRuntime::Runsc => [Limit::Memory, Limit::Processes].into(),
        OciRuntime::Runc | OciRuntime::Crun => [].into(),
    };
    let expect = Expect { unenforceable, ..full() };
    let (storage, layers) = storage();
    let backend = Arc::new(OciBackend::with_layers(runtime, None, layers).unwrap());
    let left = move || staged(&storage).chain(guards()).collect();
    Given { backend, expect, left: Box::new(left) }
}

conformance!(runc, given_oci(OciRuntime::Runc));
conformance!(crun, given_oci(OciRuntime::Crun));
conformance!(runsc, given_oci(OciRuntime::Runsc));
conformance!(linux, given_linux());
conformance!(host, given_host());

/// Runs the linux cases of this very program once more, as `nobody`.
#[test]
fn the_linux_backend_conforms_for_a_plain_user_too() {
    plain_user::rerun(&["linux::", "--test-threads", "1"]);
}

#[test]
fn the_landlock_backend_conforms_for_a_plain_user_too() {
    plain_user::rerun(&["landlock::", "--test-threads", "1"]);
}

/// Likewise where nothing but Landlock can be had: a container with one user and no right, in which user
/// namespaces, mounts and `clone3` are refused.
#[test]
fn the_landlock_backend_conforms_in_a_hardened_container() {
    hardened::rerun(&["landlock::", "--test-threads", "1"]);
}

/// Control: that container refuses what the `linux` backend is made of.
#[test]
fn the_linux_backend_says_that_it_cannot_in_a_hardened_container() {
    hardened::rerun(&["linux_is_refused_in_a_container", "--ignored"]);
}

#[tokio::test]
#[ignore = "is run in a container by the case above"]
async fn linux_is_refused_in_a_container() {
    let backend = LinuxBackend::new().unwrap();
    let error = backend.create_sandbox(&SandboxSpec::default()).await.unwrap_err();
    assert_eq!(error.code(), "step_failed", "{error:?}");
    assert!(!backend.probe().await.unwrap().is_fully_isolated());
}

#[tokio::test]
async fn the_host_backend_creates_nothing_until_its_lack_of_isolation_is_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let wary = host(false, &directory);
    let error = wary.create_sandbox(&SandboxSpec::default()).await.unwrap_err();
    assert_eq!(error.to_string(), "the host backend does not support isolation of any kind here");
    assert!(error.hint().is_some() && !wary.health_check().await.unwrap().healthy);
    let accepted = host(true, &directory);
    accepted.create_sandbox(&SandboxSpec::default()).await.expect("control");
}

#[tokio::test]
async fn the_host_backend_says_in_every_capability_that_it_isolates_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let backend = host(true, &directory);
    let probed = backend.probe().await.unwrap();
    assert!(probed.is_soft_isolation() && !probed.is_fully_isolated());
    assert!(!probed.network_isolation && !probed.resource_limits && !probed.syscall_filtering);
    let sandbox = backend.create_sandbox(&SandboxSpec::default()).await.unwrap();
    let capabilities = sandbox.capabilities();
    assert!(capabilities.has_network && !capabilities.syscall_filter_active);
    let held = ResourceLimits {
        max_wall_time_ms: Some(120_000),
        max_output_bytes: Some(10 << 20),
        ..ResourceLimits::unlimited()
    };
    assert_eq!(capabilities.limits, held, "only what is held is claimed");
    assert!(sandbox.enforcement().layers.is_empty() && !sandbox.enforcement().warnings.is_empty());
}

#[tokio::test]
async fn the_host_backend_refuses_what_it_cannot_keep() {
    let directory = tempfile::tempdir().unwrap();
    let backend = host(true, &directory);
    type Change = fn(&mut SandboxSpec);
    let rows: [(Change, &str); 6] = [
        (|spec| spec.profile = "strict".into(), "unsupported"),
        (|spec| spec.seccomp_profile = Some("strict".into()), "unsupported"),
        (|spec| spec.allowed_network = vec!["example.org".into()], "unsupported"),
        (
            |spec| {
                spec.bind_mounts = vec![warren::BindMount {
                    source: "/usr".into(),
                    target: "/elsewhere".into(),
                    readonly: true,
                }];
            },
            "unsupported",
        ),
        (|spec| spec.limits.max_memory_bytes = Some(1 << 30), "limit_not_enforceable"),
        (|spec| spec.allowed_paths_ro = vec!["/no/such/path".into()], "step_failed"),
    ];
    for (i, (change, code)) in rows.into_iter().enumerate() {
        let mut spec = SandboxSpec::default();
        change(&mut spec);
        let error = backend.create_sandbox(&spec).await.unwrap_err();
        assert_eq!(error.code(), code, "row {i}: {error}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "row {i}");
    }
}

#[tokio::test]
async fn a_dropped_host_backend_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let backend = host(true, &directory);
    let sandbox = backend.create_sandbox(&SandboxSpec::default()).await.unwrap();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "control");
    drop(backend);
    assert!(sandbox.is_alive().await, "a handle keeps its sandbox");
    drop(sandbox);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn the_fake_backend_without_limits_refuses_the_one_that_was_demanded() {
    let backend = FakeBackend::new();
    backend.set_capabilities(|claims| claims.resource_limits = false);
    let options = CreateOptions { demanded: [Limit::Memory].into(), ..Default::default() };
    let error = backend.create_sandbox_with(&SandboxSpec::default(), &options).await.unwrap_err();
    assert!(matches!(error, SandboxError::LimitNotEnforceable { limit: Limit::Memory, .. }));
    assert_eq!(backend.counts().created, 0);
}
