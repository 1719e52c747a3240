//! What was tried of a sandbox when it was made, whoever put up its walls; and what becomes of one whose walls do not hold.

use std::path::Path;

use warren::backend::{LandlockBackend, LinuxSandbox, OciBackend, OciRuntime};
use warren::layers::Layers;
use warren::{
    CreateOptions, Extent, IsolationBackend, Receipt, Sandbox as _, SandboxError, SandboxId,
    SandboxSpec, Verdict,
};
use warren_sys::seccomp::{self, Instruction};

/// Calls that put up a wall: landlock_restrict_self(2), which has one number everywhere, and seccomp(2).
const RESTRICT_SELF: u32 = 446;
const SECCOMP: u32 = if cfg!(target_arch = "x86_64") { 317 } else { 277 };
/// What every backend promises of a process that it starts.
const ALIKE: [(&str, &str); 2] =
    [("privileges", "hold a capability that the profile has not"), ("syscalls", "keyctl")];
/// What one promises that has a network and processes of its own.
const APART: [(&str, &str); 3] = [
    ("filesystem", "make a directory in what the host shows"),
    ("network", "find a route to 192.0.2.1"),
    ("processes", "be in the host's process namespace"),
];

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
        // Limits are tried by whoever asks for that.
        let verdict = if layer.layer == "limits" { Verdict::NotTried } else { Verdict::Held };
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

/// Has the kernel say that a call of this thread's, and of what it starts, was done, without doing it.
fn lie_about(call: u32) {
    let step = |code, jf, k| Instruction { code, jt: 0, jf, k };
    // Load the number of the call; if it is this one, SECCOMP_RET_ERRNO with no error, else SECCOMP_RET_ALLOW.
    let program = [
        step(0x20, 0, 0),
        step(0x15, 1, call),
        step(0x06, 0, 0x0005_0000),
        step(0x06, 0, 0x7fff_0000),
    ];
    rustix::thread::set_no_new_privs(true).unwrap();
    seccomp::install(&program).unwrap();
}

/// Expects that a sandbox is refused for this attempt.
fn refused_for(made: Result<LinuxSandbox, SandboxError>, id: &SandboxId, attempt: &str) {
    let error = made.expect_err(attempt);
    let SandboxError::WallOpen { id: open_id, open } = &error else { panic!("{error:?}") };
    assert_eq!((open_id, open.as_slice()), (id, &[attempt.to_owned()][..]), "{error}");
}

/// As a kernel would do it that does not know of Landlock what it says it does.
async fn a_wall_of_rules_that_is_not_there_is_no_sandbox(call: u32, attempt: &str) {
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
    lie_about(call);
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

mod needs_root {
    use super::*;

    #[tokio::test]
    async fn a_container_of_crun_was_tried() {
        let own = [("filesystem", "open by a descriptor what is mounted nowhere inside")];
        container_was_tried(OciRuntime::Crun, &own).await;
    }

    #[tokio::test]
    async fn a_container_of_runc_was_tried() {
        let own = [("filesystem", "open by a descriptor what is mounted nowhere inside")];
        container_was_tried(OciRuntime::Runc, &own).await;
    }

    #[tokio::test]
    async fn a_kernel_of_its_own_was_tried() {
        let own = [
            ("filesystem", "find a path of the host that it was not given"),
            ("syscalls", "be on the host's kernel"),
        ];
        container_was_tried(OciRuntime::Runsc, &own).await;
    }

    #[tokio::test]
    async fn a_container_that_the_kernel_does_not_hold_is_no_sandbox() {
        a_wall_of_a_container_that_is_not_there_is_no_sandbox(OciRuntime::Crun).await;
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
    let call = SECCOMP;
    a_wall_of_rules_that_is_not_there_is_no_sandbox(call, "syscalls: keyctl").await;
}

#[tokio::test]
async fn anybody_is_refused_rules_that_the_kernel_does_not_hold() {
    // Where the sandbox is another user, that user cannot signal the caller in any case.
    let attempt = match rustix::process::geteuid().is_root() {
        true => "filesystem: list / by a descriptor",
        false => "processes: signal the one who made the sandbox",
    };
    a_wall_of_rules_that_is_not_there_is_no_sandbox(RESTRICT_SELF, attempt).await;
}
