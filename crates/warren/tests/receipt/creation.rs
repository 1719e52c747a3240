//! What was tried of a sandbox when it was made, whoever put up its walls; and what becomes of one whose walls do not hold.

use std::path::{Path, PathBuf};
use std::time::Duration;

use warren::backend::{LandlockBackend, LinuxBackend, LinuxSandbox, OciBackend, OciRuntime};
use warren::layers::Layers;
use warren::{
    Command, CreateOptions, ExecContext, Extent, IsolationBackend, Receipt, Sandbox as _,
    SandboxError, SandboxId, SandboxSpec, Verdict,
};
use warren_sys::seccomp::{self, Instruction};
use warren_sys::{mount, process};

/// Calls that put up a wall: landlock_restrict_self(2), which has one number everywhere, and seccomp(2).
const RESTRICT_SELF: u32 = 446;
const SECCOMP: u32 = by_machine(317, 277);
/// What every backend promises of a process that it starts.
const ALIKE: [(&str, &str); 7] = [
    ("filesystem", "make a filesystem"),
    ("limits", "open one file too many"),
    ("network", "open a packet socket"),
    ("network", "open a raw socket"),
    ("privileges", "hold a capability that the profile has not"),
    ("syscalls", "keyctl"),
    ("syscalls", "ptrace"),
];
/// What one promises that has a network and processes of its own.
const APART: [(&str, &str); 8] = [
    ("filesystem", "make a directory in what the host shows"),
    ("network", "connect to 169.254.169.254:80, where clouds keep their secrets"),
    ("network", "connect to [fd00:ec2::254]:80, where clouds keep their secrets"),
    ("network", "find a route to 192.0.2.1"),
    ("network", "share the host's 127.0.0.1"),
    ("processes", "be in the host's process namespace"),
    ("processes", "trace a process of the host"),
    ("syscalls", "process_vm_readv"),
];
/// What one promises whose root is on a filesystem of the host's kernel.
const ROOTED: [(&str, &str); 3] = [
    ("filesystem", "change /proc/sys"),
    ("filesystem", "read /proc/cmdline"),
    ("limits", "take more room than there may be"),
];

/// Chooses the number that a call has here.
pub(crate) const fn by_machine(x86_64: u32, aarch64: u32) -> u32 {
    if cfg!(target_arch = "x86_64") { x86_64 } else { aarch64 }
}

/// Lists what held of a receipt.
fn held(receipt: &Receipt) -> Vec<(&str, &str)> {
    let layers = receipt.layers.iter();
    let tries = layers.flat_map(|layer| layer.tries.iter().map(|one| (&*layer.layer, one)));
    let held = tries.filter(|(_, one)| one.verdict == Verdict::Held);
    let mut held: Vec<_> = held.map(|(layer, one)| (layer, &*one.what)).collect();
    held.sort_unstable();
    held
}

fn options() -> CreateOptions {
    CreateOptions { id: Some(SandboxId::new()), persistent: true, ..CreateOptions::default() }
}

/// Makes a sandbox that stays, and sees to it that exactly this was tried of it, for its next owner, too; and that all its walls
/// hold when they are tried in full.
async fn was_tried<B: IsolationBackend>(
    open: impl Fn() -> B,
    create: impl AsyncFn(&B, &CreateOptions) -> LinuxSandbox,
    expected: &[(&str, &str)],
) {
    let mut expected = [expected, &ALIKE].concat();
    expected.sort_unstable();
    let (first, options) = (open(), options());
    let sandbox = create(&first, &options).await;
    let receipt = sandbox.receipt();
    assert_eq!((receipt.extent, receipt.verdict), (Extent::Creation, Verdict::Partly));
    assert_eq!(held(&receipt), expected, "{receipt:#?}");
    for layer in &receipt.layers {
        // Memory and the number of processes are tried by whoever asks for that.
        let verdict = if layer.layer == "limits" { Verdict::Partly } else { Verdict::Held };
        assert_eq!(layer.verdict, verdict, "{layer:#?}");
    }
    let (id, anchor) = (sandbox.id().clone(), sandbox.anchor().unwrap());
    drop((sandbox, first));
    let second = open();
    let sandbox = second.adopt(&id, &SandboxSpec::default(), &anchor).await.unwrap().unwrap();
    assert_eq!(sandbox.receipt(), receipt, "the next owner knows what was tried, and when");
    let walls = sandbox.verify(Extent::Walls).await.unwrap();
    assert_eq!(walls.open().count(), 0, "{walls:#?}");
    for layer in walls.layers.iter().filter(|layer| layer.layer != "limits") {
        assert_eq!(layer.verdict, Verdict::Held, "{layer:#?}");
    }
    sandbox.destroy().await.unwrap();
}

async fn landlock_was_tried() {
    let directory = tempfile::tempdir().unwrap();
    let open = || LandlockBackend::with_runtime(directory.path().join("homes")).unwrap();
    let create = async |backend: &LandlockBackend, options: &CreateOptions| {
        backend.create(&SandboxSpec::default(), options).await.unwrap()
    };
    let expected = [
        ("filesystem", "list the host's / by a descriptor"),
        ("filesystem", "make a directory beside its own"),
        ("filesystem", "write /proc/sysrq-trigger"),
        ("network", "open a socket"),
        ("processes", "signal a process outside"),
    ];
    was_tried(open, create, &expected).await;
}

async fn container_was_tried(runtime: OciRuntime, own: &[(&str, &str)]) {
    let directory = tempfile::tempdir().unwrap();
    let layers = Layers::open(directory.path().join("storage")).unwrap();
    let homes = directory.path().join("homes");
    let open = || OciBackend::with_layers(runtime, Some(homes.clone()), layers.clone()).unwrap();
    let create = async |backend: &OciBackend, options: &CreateOptions| {
        backend.create(&SandboxSpec::default(), options).await.unwrap()
    };
    was_tried(open, create, &[&APART, own].concat()).await;
}

/// What an argument of a call is, as far as its low half tells.
#[derive(Clone, Copy)]
pub(crate) enum Argument {
    Is(u32),
    IsNot(u32),
}

/// Has the kernel say that a call of this thread's, and of what it starts, was done, without doing it.
fn lie_about(call: u32) {
    lie_about_some(call, &[]);
}

/// Likewise, if its arguments of these numbers are such.
pub(crate) fn lie_about_some(call: u32, which: &[(u32, Argument)]) {
    answer(call, which, 0);
}

/// Has the kernel answer such a call with an error, or none, without doing it.
fn answer(call: u32, which: &[(u32, Argument)], error: u32) {
    rustix::thread::set_no_new_privs(true).unwrap();
    // SECCOMP_RET_ERRNO.
    seccomp::install(&program(call, which, 0x0005_0000 | error)).unwrap();
}

/// Writes a filter that returns this for such a call.
pub(crate) fn program(call: u32, which: &[(u32, Argument)], returned: u32) -> Vec<Instruction> {
    let step = |code, jt, jf, k| Instruction { code, jt, jf, k };
    // If it is another call, or one of another kind, on to the last instruction.
    let mut program = vec![step(0x20, 0, 0, 0), step(0x15, 0, 0, call)];
    for (number, argument) in which {
        program.push(step(0x20, 0, 0, 16 + 8 * number));
        let (Argument::Is(value) | Argument::IsNot(value)) = argument;
        program.push(step(0x15, 0, 0, *value));
    }
    // And SECCOMP_RET_ALLOW.
    program.extend([step(0x06, 0, 0, returned), step(0x06, 0, 0, 0x7fff_0000)]);
    let last = program.len() - 1;
    let arguments = which.iter().map(|(_, wanted)| *wanted);
    let wanted = std::iter::once(Argument::Is(call)).chain(arguments);
    for (index, wanted) in wanted.enumerate() {
        let test = 2 * index + 1;
        let on = u8::try_from(last - test - 1).unwrap();
        match wanted {
            Argument::Is(_) => program[test].jf = on,
            Argument::IsNot(_) => program[test].jt = on,
        }
    }
    program
}

/// Likewise of a limit, by its number: prlimit64(2) with a new one.
fn lie_about_limit(limit: u32) {
    let which = [(1, Argument::Is(limit)), (2, Argument::IsNot(0))];
    lie_about_some(by_machine(302, 261), &which);
}

/// Likewise of a limit on descriptors.
fn lie_about_open_files() {
    lie_about_limit(7);
}

/// Likewise, where no filter of the sandbox's own, whose word would count for more, holds any other call than the one
/// that shows whether it is there.
fn lie_about_some_without_filters(call: u32, which: &[(u32, Argument)]) {
    const KEYCTL: u32 = by_machine(250, 219);
    const EPERM: u32 = 1;
    lie_about_some(call, which);
    // What asks for a key ring, by which it is tried; one is made before that.
    answer(KEYCTL, &[(0, Argument::Is(0))], EPERM);
    lie_about(SECCOMP);
}

/// Likewise of a socket of a family by which one sees what others send: socket(2) with SOCK_RAW and SOCK_CLOEXEC.
fn lie_about_raw_sockets(family: u32) {
    let which = [(0, Argument::Is(family)), (1, Argument::Is(0x8_0003))];
    lie_about_some_without_filters(by_machine(41, 198), &which);
}

/// Makes a sandbox where the kernel does as it says, and then where it does not, and expects that the other is refused for this
/// attempt and leaves nothing.
async fn a_lie_is_no_sandbox(lie: impl FnOnce(), attempt: &str) {
    let make = async || {
        let options = CreateOptions { persistent: false, ..options() };
        let id = options.id.clone().unwrap();
        let backend = LinuxBackend::new().unwrap();
        let made = backend.create(&SandboxSpec::default(), &options).await;
        (id, made, backend)
    };
    let (id, sound, _backend) = make().await;
    assert!(!groups_of(&id).is_empty() || !rustix::process::geteuid().is_root(), "control");
    sound.expect("control: the kernel does as it says").destroy().await.unwrap();
    lie();
    let (id, made, _backend) = make().await;
    refused_for(made, &id, attempt);
    assert_eq!(groups_of(&id), Vec::<PathBuf>::new(), "nothing is left");
}

/// Finds the control groups of a sandbox, wherever they are.
pub(crate) fn groups_of(id: &SandboxId) -> Vec<PathBuf> {
    let layout = warren_sys::cgroup::Layout::detect().unwrap();
    let all = layout.v1.iter().map(|(_, hierarchy)| hierarchy).chain(&layout.v2);
    let places = all.map(|hierarchy| hierarchy.own.join(format!("warren-{id}")));
    places.filter(|place| place.exists()).collect()
}

/// Expects that a sandbox is refused for this attempt.
pub(crate) fn refused_for(made: Result<LinuxSandbox, SandboxError>, id: &SandboxId, attempt: &str) {
    let error = made.expect_err(attempt);
    let SandboxError::WallOpen { id: open_id, open } = &error else { panic!("{error:?}") };
    assert_eq!((open_id, open.as_slice()), (id, &[attempt.to_owned()][..]), "{error}");
}

/// As a kernel would do it that does not know of Landlock what it says it does.
async fn a_wall_of_rules_that_is_not_there_is_no_sandbox(lie: impl FnOnce(), attempt: &str) {
    let spec = SandboxSpec::default();
    let make = async || {
        let options = CreateOptions { persistent: false, ..options() };
        let id = options.id.clone().unwrap();
        let backend = LandlockBackend::new().unwrap();
        let made = backend.create(&spec, &options).await;
        (id, made, backend)
    };
    let place = |id: &SandboxId| Path::new("/var/tmp").join(format!("warren-{id}"));
    let (id, sound, _backend) = make().await;
    assert!(place(&id).exists(), "control: {}", place(&id).display());
    sound.expect("control: the kernel does as it says").destroy().await.unwrap();
    lie();
    let (id, made, _backend) = make().await;
    refused_for(made, &id, attempt);
    assert!(!place(&id).exists(), "nothing is left");
}

/// Likewise in a container.
async fn a_wall_of_a_container_that_is_not_there_is_no_sandbox(runtime: OciRuntime) {
    let make = async || {
        let options = CreateOptions { persistent: false, ..options() };
        let id = options.id.clone().unwrap();
        let backend = OciBackend::new(runtime).unwrap();
        let made = backend.create(&SandboxSpec::default(), &options).await;
        (id, made, backend)
    };
    let place = |id: &SandboxId| warren::backend::oci::place().join(id.as_str());
    let (id, sound, _backend) = make().await;
    assert!(place(&id).exists(), "control: {}", place(&id).display());
    sound.expect("control: the kernel does as it says").destroy().await.unwrap();
    lie_about(RESTRICT_SELF);
    let (id, made, _backend) = make().await;
    refused_for(made, &id, "filesystem: open what is outside by a descriptor");
    assert!(!place(&id).exists(), "nothing is left");
}

/// Puts a runtime in the place of another, for this thread and what it starts: it changes what it was told, by a script for
/// sed(1), before it hands that on to the real one.
fn bend(runtime: OciRuntime, script: &str) -> tempfile::TempDir {
    // Where they are looked for first.
    const FIRST: &str = "/usr/local/sbin";
    let name = runtime.program();
    let places = ["/usr/local/bin", "/usr/sbin", "/usr/bin"].map(|place| format!("{place}/{name}"));
    let real = places.iter().find(|path| Path::new(path).is_file()).unwrap();
    let text = format!(
        "#!/bin/sh\nfor word do\n  [ \"$last\" = --bundle ] && sed -i '{script}' \"$word/config.json\"\n  \
         last=$word\ndone\nexec {real} \"$@\"\n"
    );
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join(name);
    std::fs::write(&program, text).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, open).unwrap();
    process::new_mount_namespace().unwrap();
    mount::make_private().unwrap();
    mount::bind(directory.path().to_str().unwrap(), FIRST).unwrap();
    directory
}

/// Expects that what a runtime makes is refused for such an attempt once it leaves something out, and that nothing is left.
async fn a_bent_runtime_makes_no_sandbox(runtime: OciRuntime, script: &str, attempt: &str) {
    let make = async || {
        let options = CreateOptions { persistent: false, ..options() };
        let id = options.id.clone().unwrap();
        let backend = OciBackend::new(runtime).unwrap();
        let made = backend.create(&SandboxSpec::default(), &options).await;
        (id, made, backend)
    };
    let place = |id: &SandboxId| warren::backend::oci::place().join(id.as_str());
    let _plain = bend(runtime, "s/nothing/nothing/");
    let (id, sound, _backend) = make().await;
    assert!(place(&id).exists(), "control: {}", place(&id).display());
    sound.expect("control: it does what it is told").destroy().await.unwrap();
    let _bent = bend(runtime, script);
    let (id, made, _backend) = make().await;
    let error = made.expect_err(attempt);
    let SandboxError::WallOpen { id: open_id, open } = &error else { panic!("{error:?}") };
    assert_eq!(open_id, &id);
    assert!(open.len() == 1 && open[0].starts_with(attempt), "{open:?}");
    assert!(!place(&id).exists(), "nothing is left");
    assert_eq!(groups_of(&id), Vec::<PathBuf>::new(), "nothing is left");
}

/// Scripts that take a wall out of a container's configuration, or put a hole into it.
const NO_NETWORK: &str = r#"s/{"type":"network"},//"#;
const NO_MASKS: &str = r#"s/"maskedPaths":\[[^]]*\]/"maskedPaths":[]/"#;
const SHOWN: &str = r#"s|"mounts":\[|&{"destination":"/run","type":"bind","source":"/run","options":["rbind","ro"]},|"#;
const NO_READONLY: &str = r#"s/"readonlyPaths":\[[^]]*\]/"readonlyPaths":[]/"#;

mod needs_root {
    use super::*;

    #[tokio::test]
    async fn runc_that_shares_the_hosts_network_makes_no_sandbox() {
        let attempt = "network: share the host's 127.0.0.1";
        a_bent_runtime_makes_no_sandbox(OciRuntime::Runc, NO_NETWORK, attempt).await;
    }

    #[tokio::test]
    async fn runc_that_masks_nothing_makes_no_sandbox() {
        let attempt = "filesystem: read /proc/cmdline";
        a_bent_runtime_makes_no_sandbox(OciRuntime::Runc, NO_MASKS, attempt).await;
    }

    #[tokio::test]
    async fn crun_that_leaves_proc_writable_makes_no_sandbox() {
        let attempt = "filesystem: change /proc/sys";
        a_bent_runtime_makes_no_sandbox(OciRuntime::Crun, NO_READONLY, attempt).await;
    }

    #[tokio::test]
    async fn runsc_that_shows_a_place_of_the_host_makes_no_sandbox() {
        let attempt = "filesystem: find a path of the host that it was not given";
        a_bent_runtime_makes_no_sandbox(OciRuntime::Runsc, SHOWN, attempt).await;
    }

    #[tokio::test]
    async fn a_container_of_crun_was_tried() {
        let own = [("filesystem", "open by a descriptor what is mounted nowhere inside")];
        container_was_tried(OciRuntime::Crun, &[&ROOTED[..], &own].concat()).await;
    }

    #[tokio::test]
    async fn a_container_of_runc_was_tried() {
        let own = [("filesystem", "open by a descriptor what is mounted nowhere inside")];
        container_was_tried(OciRuntime::Runc, &[&ROOTED[..], &own].concat()).await;
    }

    #[tokio::test]
    async fn a_kernel_of_its_own_was_tried() {
        let own = [
            ("filesystem", "find a path of the host that it was not given"),
            ("filesystem", "read /proc/kcore"),
            ("syscalls", "be on the host's kernel"),
        ];
        container_was_tried(OciRuntime::Runsc, &own).await;
    }

    #[tokio::test]
    async fn a_container_that_the_kernel_does_not_hold_is_no_sandbox() {
        a_wall_of_a_container_that_is_not_there_is_no_sandbox(OciRuntime::Crun).await;
    }

    const MEMORY: &str = "use more memory than there may be";

    /// Makes a sandbox, tries what is tried of one in a pool, and returns what came of memory and how many were killed.
    async fn memory_of_one_in_a_pool() -> (Option<(String, Verdict)>, u64) {
        let backend = LinuxBackend::new().unwrap();
        let made = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await;
        let sandbox = made.unwrap();
        let receipt = sandbox.verify(Extent::Pristine).await.unwrap();
        let groups = groups_of(sandbox.id());
        let killed = groups.iter().flat_map(|group| {
            let read = |file| warren_sys::cgroup::read(group, file).ok();
            let count = |text: String| warren_sys::cgroup::field(&text, "oom_kill");
            ["memory.events", "memory.oom_control"].into_iter().filter_map(read).filter_map(count)
        });
        let killed = killed.collect::<Vec<_>>();
        assert_eq!(killed.len(), 1, "control: the group that counts them is found: {groups:?}");
        sandbox.destroy().await.unwrap();
        let memory = receipt.tries().find(|one| one.what == MEMORY);
        (memory.map(|one| (one.said.clone(), one.verdict)), killed[0])
    }

    #[tokio::test]
    async fn memory_is_tried_in_a_pool_and_nobody_is_killed() {
        // Where the host has no huge pages to ask for, it is read back and no more.
        let can_ask = warren_sys::memory::take_huge_pages(1).is_ok();
        let expected = can_ask.then(|| ("EBUSY".to_owned(), Verdict::Held));
        assert_eq!(memory_of_one_in_a_pool().await, (expected, 0));
    }

    #[tokio::test]
    async fn memory_without_end_is_found_in_a_pool() {
        // madvise(2) with MADV_COLLAPSE.
        lie_about_some(by_machine(28, 233), &[(2, Argument::Is(25))]);
        let open = Some(("let through".to_owned(), Verdict::Open));
        assert_eq!(memory_of_one_in_a_pool().await, (open, 0));
    }

    #[test]
    fn without_namespaces_it_holds_for_a_plain_user_too() {
        let cases = ["anybody_", "--test-threads", "1"];
        crate::plain_user::rerun(&cases);
    }
}

#[tokio::test]
async fn anybody_has_each_kind_of_wall_tried() {
    landlock_was_tried().await;
}

#[tokio::test]
async fn anybody_is_refused_filters_that_the_kernel_does_not_hold() {
    let lie = || lie_about(SECCOMP);
    a_wall_of_rules_that_is_not_there_is_no_sandbox(lie, "syscalls: keyctl").await;
}

#[tokio::test]
async fn anybody_is_refused_rules_that_the_kernel_does_not_hold() {
    // Where the sandbox is another user, that user cannot signal the caller in any case.
    let attempt = match rustix::process::geteuid().is_root() {
        true => "filesystem: list / by a descriptor",
        false => "processes: signal the one who made the sandbox",
    };
    let lie = || lie_about(RESTRICT_SELF);
    a_wall_of_rules_that_is_not_there_is_no_sandbox(lie, attempt).await;
}

#[tokio::test]
async fn anybody_is_refused_room_that_has_no_end() {
    // fallocate(2).
    let lie = || lie_about(by_machine(285, 47));
    a_lie_is_no_sandbox(lie, "limits: take more room than there may be").await;
}

#[tokio::test]
async fn anybody_is_refused_descriptors_that_have_no_end() {
    let attempt = "limits: open one file too many";
    a_wall_of_rules_that_is_not_there_is_no_sandbox(lie_about_open_files, attempt).await;
}

#[tokio::test]
async fn anybody_runs_no_command_whose_limit_the_kernel_does_not_hold() {
    // Where no process tries it at creation, each command's own does.
    let run = async || {
        let backend = LinuxBackend::new().unwrap();
        let sandbox = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await;
        let sandbox = sandbox.unwrap();
        let ran = sandbox.exec(&Command::new("/bin/true"), &ExecContext::default()).await;
        sandbox.destroy().await.unwrap();
        ran
    };
    assert_eq!(run().await.expect("control: the kernel does as it says").exit_code, 0);
    lie_about_open_files();
    let error = run().await.expect_err("a limit that does not hold");
    assert!(matches!(error, SandboxError::Program { .. }), "{error:?}");
}

#[tokio::test]
async fn anybody_has_the_filters_of_commands_tried_where_nobody_waits_for_it() {
    let tried = ["open one file too many", "ptrace"];
    let backend = LinuxBackend::new().unwrap().beginning_ahead();
    let make = async |spec: &SandboxSpec| {
        let sandbox = backend.create(spec, &CreateOptions::default()).await.unwrap();
        let receipt = sandbox.receipt();
        sandbox.destroy().await.unwrap();
        tried.map(|what| held(&receipt).iter().any(|(_, held)| *held == what))
    };
    let spec = SandboxSpec::default();
    assert_eq!(make(&spec).await, [false; 2], "control: it was made while its caller waited");
    let mut ahead = [false; 2];
    for _ in 0..200 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        ahead = make(&spec).await;
        if ahead[0] {
            break;
        }
    }
    assert_eq!(ahead, [true; 2]);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let other = SandboxSpec { seccomp_profile: Some("strict".to_owned()), ..spec };
    assert_eq!(make(&other).await, [false; 2], "with other filters than those that it has");
}

#[tokio::test]
async fn anybody_is_refused_settings_of_the_kernel_that_can_be_changed() {
    // utimensat(2).
    let lie = || lie_about(by_machine(280, 88));
    a_lie_is_no_sandbox(lie, "filesystem: change /proc/sys").await;
}

#[tokio::test]
async fn anybody_is_refused_a_network_with_a_way_out() {
    // connect(2).
    let lie = || lie_about(by_machine(42, 203));
    a_lie_is_no_sandbox(lie, "network: find a route to 192.0.2.1").await;
}

#[tokio::test]
async fn anybody_is_refused_a_way_to_the_secrets_of_a_cloud() {
    // connect(2) to what has the length of an IPv6 address.
    let lie = || lie_about_some(by_machine(42, 203), &[(2, Argument::Is(28))]);
    a_lie_is_no_sandbox(lie, "network: connect to [fd00:ec2::254]:80").await;
}

#[tokio::test]
async fn anybody_is_refused_raw_sockets_that_can_be_had() {
    // AF_INET.
    let lie = || lie_about_raw_sockets(2);
    a_lie_is_no_sandbox(lie, "network: open a raw socket").await;
}

#[tokio::test]
async fn anybody_is_refused_packet_sockets_that_can_be_had() {
    // AF_PACKET.
    let lie = || lie_about_raw_sockets(17);
    a_lie_is_no_sandbox(lie, "network: open a packet socket").await;
}

#[tokio::test]
async fn anybody_is_refused_filesystems_that_can_be_made() {
    // fsopen(2) without flags: who makes the root says FSOPEN_CLOEXEC.
    let lie = || lie_about_some_without_filters(430, &[(1, Argument::Is(0))]);
    a_lie_is_no_sandbox(lie, "filesystem: make a filesystem").await;
}

#[tokio::test]
async fn anybody_is_refused_processes_that_have_no_end() {
    const PROCESSES: u32 = 6;
    if !rustix::process::geteuid().is_root() {
        let attempt = "limits: start one process too many";
        return a_lie_is_no_sandbox(|| lie_about_limit(PROCESSES), attempt).await;
    }
    lie_about_limit(PROCESSES);
    let backend = LinuxBackend::new().unwrap();
    let made = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await;
    let made = made.expect("a control group holds them, whatever else does not");
    made.destroy().await.unwrap();
}

#[tokio::test]
async fn anybody_is_refused_processes_that_belong_to_others() {
    // ptrace(2).
    let lie = || lie_about(by_machine(101, 117));
    a_lie_is_no_sandbox(lie, "processes: trace a process of the host").await;
}
