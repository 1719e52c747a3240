//! Limits that are exceeded before anybody waits for the sandbox; and what becomes of those that do not hold.

use std::path::{Path, PathBuf};
use std::time::Duration;

use warren::backend::linux::Stdio;
use warren::backend::{LinuxBackend, LinuxSandbox};
use warren::{
    Base, Command, CreateOptions, ExecCause, ExecContext, Explain, Extent, IsolationBackend as _,
    Receipt, ResourceLimits, Sandbox as _, SandboxError, SandboxId, SandboxSpec, Verdict,
};
use warren_sys::cgroup;
use warren_sys::notify::{self, Listener};

use crate::creation::{Argument, by_machine, groups_of, lie_about_some, program, refused_for};

const MEMORY: &str = "use more memory than there may be";
const PROCESSES: &str = "start one process too many";
/// All that is written to the groups while limits are tried.
const WRITTEN: [&str; 6] = [
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.swappiness",
    "memory.max",
    "memory.swap.max",
    "pids.max",
];
/// madvise(2), and MADV_COLLAPSE as its third argument.
const MADVISE: u32 = by_machine(28, 233);
const COLLAPSE: [(u32, Argument); 1] = [(2, Argument::Is(25))];

/// Starts a backend whose sandboxes have their directories here, and its launcher under a filter that nobody else is under.
fn backend_under<T: Send + 'static>(
    homes: &Path,
    filter: impl FnOnce() -> T + Send + 'static,
) -> (LinuxBackend, T) {
    let (runtime, homes) = (tokio::runtime::Handle::current(), homes.to_owned());
    let start = move || {
        let _entered = runtime.enter();
        let filter = filter();
        (LinuxBackend::with_runtime(homes).unwrap().beginning_ahead(), filter)
    };
    std::thread::spawn(start).join().unwrap()
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let found = async {
        loop {
            match look() {
                Some(found) => return found,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), found).await.expect(what)
}

/// Waits until the next sandbox is begun.
async fn next(backend: &LinuxBackend) -> SandboxId {
    let spec = SandboxSpec::default();
    until("the next is begun", || backend.next_id(&spec, &Base::default())).await
}

async fn create(
    backend: &LinuxBackend,
    spec: &SandboxSpec,
    id: &SandboxId,
) -> Result<LinuxSandbox, SandboxError> {
    let options =
        CreateOptions { id: Some(id.clone()), persistent: true, ..CreateOptions::default() };
    backend.create(spec, &options).await
}

/// Says what came of an attempt on a limit, or of the limit that was not tried.
fn said(receipt: &Receipt, what: &str, limit: &str) -> (String, Verdict) {
    let untried = format!("exceed the limit on {limit}");
    let mut tries = receipt.tries().filter(|one| one.what == what || one.what == untried);
    let one = tries.next().unwrap();
    assert_eq!(tries.count(), 0, "it is told once: {receipt:#?}");
    (one.said.clone(), one.verdict)
}

fn both(receipt: &Receipt) -> [(String, Verdict); 2] {
    [said(receipt, MEMORY, "memory"), said(receipt, PROCESSES, "processes")]
}

fn read_back() -> (String, Verdict) {
    ("read back".to_owned(), Verdict::Set)
}

/// What both come to on this host where they are exceeded: one without huge pages cannot answer of memory.
fn exceeded() -> [(String, Verdict); 2] {
    let can_ask = warren_sys::memory::take_huge_pages(1).is_ok();
    let memory = if can_ask { ("EBUSY".to_owned(), Verdict::Held) } else { read_back() };
    [memory, ("EAGAIN".to_owned(), Verdict::Held)]
}

/// Reads what is written to a group while limits are tried.
fn written(group: &Path) -> Vec<(&'static str, String)> {
    let read = |file| Some((file, cgroup::read(group, file).ok()?.trim().to_owned()));
    WRITTEN.into_iter().filter_map(read).collect()
}

/// Reads the same of a group that nobody has written to.
fn of_a_new_one(group: &Path) -> Vec<(&'static str, String)> {
    let other = group.with_file_name(format!("warren-test-{}", SandboxId::new()));
    std::fs::create_dir(&other).unwrap();
    let written = written(&other);
    std::fs::remove_dir(&other).unwrap();
    written
}

/// Adds up a counter of the groups.
fn count(groups: &[PathBuf], files: &[&str], field: &str) -> u64 {
    let all = groups.iter().flat_map(|group| files.iter().map(|file| cgroup::read(group, file)));
    all.filter_map(|text| cgroup::field(&text.ok()?, field)).sum()
}

/// Lists the directories of sandboxes, which are made before all else of them and removed last.
fn names(homes: &Path) -> Vec<String> {
    let all = std::fs::read_dir(homes).unwrap().flatten();
    all.map(|home| home.file_name().into_string().unwrap()).collect()
}

/// Expects that none is made once the next was tried, for this attempt, and that nothing of that is left.
async fn none_is_made_for(backend: &LinuxBackend, homes: &Path, attempt: &str) {
    let spec = SandboxSpec::default();
    let (first, second) = (SandboxId::new(), SandboxId::new());
    let made = create(backend, &spec, &first).await.expect("control: it was not tried then");
    assert_eq!(both(&made.receipt()), [read_back(), read_back()]);
    let refused = async {
        loop {
            match create(backend, &spec, &second).await {
                Err(error) => return error,
                Ok(made) => made.destroy().await.unwrap(),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let error = tokio::time::timeout(Duration::from_secs(20), refused).await.expect(attempt);
    refused_for(Err(error), &second, attempt);
    // Not until it holds, whatever else they are.
    let bound = SandboxSpec { allowed_paths_ro: vec!["/usr".into()], ..spec };
    refused_for(create(backend, &bound, &second).await, &second, attempt);
    assert_eq!(groups_of(&second), Vec::<PathBuf>::new());
    let alone = || (names(homes) == [first.as_str()]).then_some(());
    until("what was open has ended", alone).await;
    made.destroy().await.unwrap();
}

/// Has all in a launcher's care be in no control group of v1: they join by writing one byte. Of v2 they are born members, so
/// that memory is what has no end there.
fn lie_about_groups() -> &'static str {
    let layout = cgroup::Layout::detect().unwrap();
    match layout.v1("pids") {
        Some(_) => {
            lie_about_some(by_machine(1, 64), &[(2, Argument::Is(1))]);
            PROCESSES
        }
        None => {
            lie_about_some(MADVISE, &COLLAPSE);
            MEMORY
        }
    }
}

/// Holds whoever asks for a huge page until this is gone.
fn hold_who_asks_for_memory() -> Listener {
    rustix::thread::set_no_new_privs(true).unwrap();
    // SECCOMP_RET_USER_NOTIF.
    notify::install(&program(MADVISE, &COLLAPSE, 0x7fc0_0000)).unwrap()
}

mod needs_root {
    use super::*;

    #[tokio::test]
    async fn limits_of_one_whom_nobody_waits_for_are_exceeded_and_are_its_own_then() {
        let homes = tempfile::tempdir().unwrap();
        let (backend, ()) = backend_under(homes.path(), || ());
        let (spec, first) = (SandboxSpec::default(), SandboxId::new());
        let made = create(&backend, &spec, &first).await.unwrap();
        assert_eq!(both(&made.receipt()), [read_back(), read_back()], "control: somebody waited");
        let id = next(&backend).await;
        let groups = groups_of(&id);
        let as_new: Vec<_> = groups.iter().map(|group| of_a_new_one(group)).collect();
        let now: Vec<_> = groups.iter().map(|group| written(group)).collect();
        assert!(as_new.concat().len() >= 2, "control: {as_new:?}");
        assert_eq!(now, as_new, "what was lowered is as it was");
        let limits = ResourceLimits {
            max_memory_bytes: Some(96 << 20),
            max_processes: Some(20),
            ..ResourceLimits::default()
        };
        let spec = SandboxSpec { limits, ..spec };
        let second = create(&backend, &spec, &id).await.unwrap();
        assert_eq!(both(&second.receipt()), exceeded());
        let now: Vec<_> = groups.iter().flat_map(|group| written(group)).collect();
        for (files, value) in
            [(&WRITTEN[..1], 96 << 20), (&WRITTEN[3..4], 96 << 20), (&WRITTEN[5..], 21)]
        {
            let mut found = now.iter().filter(|(file, _)| files.contains(file));
            assert!(found.all(|(_, found)| *found == value.to_string()), "{now:?}");
        }
        let killed = count(&groups, &["memory.events", "memory.oom_control"], "oom_kill");
        assert_eq!((killed, count(&groups, &["pids.events"], "max")), (0, 1));
        let receipt = second.verify(Extent::Walls).await.unwrap();
        assert_eq!(both(&receipt), exceeded(), "it is not tried again, and still known");
        // However it held then.
        let group = groups.iter().find(|group| group.join("pids.max").exists()).unwrap();
        cgroup::write(group, "pids.max", "1000").unwrap();
        let receipt = second.verify(Extent::Walls).await.unwrap();
        let another = ("read back, and it is another".to_owned(), Verdict::Open);
        assert_eq!(said(&receipt, PROCESSES, "processes"), another);
        second.destroy().await.unwrap();
        made.destroy().await.unwrap();
    }

    #[tokio::test]
    async fn what_the_kernel_refused_to_us_is_not_why_a_command_failed() {
        let backend = LinuxBackend::new().unwrap().beginning_ahead();
        let (spec, context) = (SandboxSpec::default(), ExecContext::default());
        let made = backend.create(&spec, &CreateOptions::default()).await.unwrap();
        let options = CreateOptions { id: Some(next(&backend).await), ..CreateOptions::default() };
        let failing = Command::new("/bin/false");
        let run =
            backend.create_for(&spec, &options, &failing, &context, Stdio::Pipes, Explain::Nothing);
        let (second, mut run) = run.await.unwrap();
        assert_eq!(both(&second.receipt()), exceeded(), "control: it was begun ahead");
        assert_eq!(run.wait().await.unwrap().cause, ExecCause::Exited { code: 1 });
        made.destroy().await.unwrap();
    }

    #[tokio::test]
    async fn memory_without_end_is_found_while_nobody_waits_and_none_is_made() {
        let homes = tempfile::tempdir().unwrap();
        let (backend, ()) = backend_under(homes.path(), || lie_about_some(MADVISE, &COLLAPSE));
        none_is_made_for(&backend, homes.path(), &format!("limits: {MEMORY}")).await;
    }

    #[tokio::test]
    async fn one_that_is_in_no_group_is_found_and_none_is_made_until_that_is_mended() {
        let homes = tempfile::tempdir().unwrap();
        let (backend, attempt) = backend_under(homes.path(), lie_about_groups);
        none_is_made_for(&backend, homes.path(), &format!("limits: {attempt}")).await;
        // The next launcher is told the truth.
        for pid in children() {
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
        let (spec, id) = (SandboxSpec::default(), SandboxId::new());
        let mended = async {
            loop {
                match create(&backend, &spec, &id).await {
                    Ok(made) => return made,
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            }
        };
        let made = tokio::time::timeout(Duration::from_secs(20), mended).await.unwrap();
        made.destroy().await.unwrap();
    }

    /// Lists the children of this process.
    fn children() -> Vec<rustix::process::Pid> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let all = tasks.map(|task| std::fs::read_to_string(task.path().join("children")).unwrap());
        let all: Vec<_> = all.flat_map(|all| numbers(&all)).collect();
        all.into_iter().filter_map(rustix::process::Pid::from_raw).collect()
    }

    fn numbers(text: &str) -> Vec<i32> {
        text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    }

    #[test]
    fn whoever_asks_while_limits_are_tried_does_not_wait_and_nothing_is_left_should_it_be_given_up()
    {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let (spec, homes) = (SandboxSpec::default(), tempfile::tempdir().unwrap());
        let [first, second] = [(); 2].map(|()| SandboxId::new());
        let (held, _backend) = runtime.block_on(async {
            let (backend, listener) = backend_under(homes.path(), hold_who_asks_for_memory);
            let made = create(&backend, &spec, &first).await.unwrap();
            until("memory is asked for", || listener.next()).await;
            let held = names(homes.path()).into_iter().find(|name| *name != first.as_str());
            let held = SandboxId::from_string(held.unwrap());
            let groups = groups_of(&held);
            let lowered = groups.iter().flat_map(|group| written(group)).find(|(file, value)| {
                let value = value.parse::<u64>().unwrap_or(u64::MAX);
                ["memory.limit_in_bytes", "memory.max"].contains(file) && value < 32 << 20
            });
            assert!(lowered.is_some(), "control: it is in the middle: {groups:?}");
            assert_eq!(backend.next_id(&spec, &Base::default()), None, "it is nobody's yet");
            let patience = Duration::from_secs(10);
            let other = tokio::time::timeout(patience, create(&backend, &spec, &second)).await;
            let other = other.expect("it is made without the other").unwrap();
            assert_eq!(both(&other.receipt()), [read_back(), read_back()]);
            assert_eq!(
                backend.next_id(&spec, &Base::default()),
                None,
                "control: it is still tried"
            );
            other.destroy().await.unwrap();
            made.destroy().await.unwrap();
            (held, (backend, listener))
        });
        assert!(!groups_of(&held).is_empty(), "control");
        drop(runtime);
        assert_eq!(groups_of(&held), Vec::<PathBuf>::new(), "nothing is left");
        assert_eq!(names(homes.path()), Vec::<String>::new(), "nothing is left");
    }
}
