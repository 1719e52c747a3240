//! Receipts of real sandboxes: what is promised holds, and each attempt gets through where no wall is.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

use std::collections::BTreeMap;

use warren::backend::{HostBackend, HostConfig, LinuxBackend};
use warren::{
    Command, CreateOptions, ExecContext, Extent, IsolationBackend, Receipt, ResourceLimits,
    Sandbox, SandboxError, SandboxSpec, Verdict,
};

#[path = "receipt/ahead.rs"]
mod ahead;
#[path = "receipt/creation.rs"]
mod creation;
#[path = "shared/plain_user.rs"]
mod plain_user;

/// What was tried, and what came of it: the kernel's word and the verdict.
fn by_name(receipt: &Receipt) -> BTreeMap<String, (String, Verdict)> {
    receipt.tries().map(|one| (one.what.clone(), (one.said.clone(), one.verdict))).collect()
}

async fn bare(extent: Extent) -> Receipt {
    let backend = HostBackend::new(HostConfig { accept_no_isolation: true });
    let sandbox = backend.create_sandbox(&SandboxSpec::default()).await.unwrap();
    let receipt = sandbox.verify(extent).await.unwrap();
    sandbox.destroy().await.unwrap();
    receipt
}

async fn walled(spec: &SandboxSpec, extent: Extent) -> Receipt {
    let backend = LinuxBackend::new().unwrap();
    let sandbox = backend.create(spec, &CreateOptions::default()).await.unwrap();
    let receipt = sandbox.verify(extent).await.unwrap();
    sandbox.destroy().await.unwrap();
    receipt
}

mod needs_root {
    use super::*;

    /// What a host may lack or keep even from root, so that there is nothing behind the wall; the hostile
    /// suite has controls for these.
    const MAY_LACK: [&str; 4] = [
        "open a socket to the hypervisor",
        "read /proc/kcore",
        "write /proc/sysrq-trigger",
        "read the environment of PID 1",
    ];

    #[tokio::test(flavor = "multi_thread")]
    async fn every_attempt_is_refused_inside_and_gets_through_where_no_wall_is() {
        let inside = walled(&SandboxSpec::default(), Extent::Everything).await;
        let outside = bare(Extent::Everything).await;
        let (inside_by, outside_by) = (by_name(&inside), by_name(&outside));
        assert_eq!(inside.open().count(), 0, "{inside_by:#?}");
        assert_eq!(outside.verdict, Verdict::NotPromised, "the host backend promises nothing");
        for (what, (said, verdict)) in &inside_by {
            let untried = [Verdict::NotTried, Verdict::Set].contains(verdict);
            if untried || what.starts_with("hold") || what.starts_with("find a route") {
                continue;
            }
            assert_eq!(*verdict, Verdict::Held, "{what}: {said}");
        }
        let mut tried = 0;
        for (what, (said, verdict)) in &outside_by {
            assert_eq!(*verdict, Verdict::NotPromised, "{what}");
            let (kept, _) = inside_by.get(what).unwrap_or_else(|| panic!("inside: {what}?"));
            tried += 1;
            let control = said != kept || MAY_LACK.contains(&what.as_str());
            assert!(control, "control: {what} is `{said}` outside and `{kept}` inside");
        }
        assert_eq!(tried, 40, "everything was tried outside: {outside_by:#?}");
        for layer in &inside.layers {
            let expected = if layer.layer == "limits" { Verdict::Partly } else { Verdict::Held };
            assert_eq!(layer.verdict, expected, "{layer:#?}");
        }
        let limits = inside.layers.iter().find(|layer| layer.layer == "limits").unwrap();
        let held = limits.tries.iter().filter(|one| one.verdict == Verdict::Held).count();
        assert_eq!(held, 4, "files, room, processes and memory: {limits:#?}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn limits_are_as_before_after_they_were_tried() {
        let limits = ResourceLimits {
            max_memory_bytes: Some(96 << 20),
            max_processes: Some(20),
            ..ResourceLimits::default()
        };
        let backend = LinuxBackend::new().unwrap();
        let spec = SandboxSpec { limits, ..SandboxSpec::default() };
        let sandbox = backend.create(&spec, &CreateOptions::default()).await.unwrap();
        let before = sandbox.verify(Extent::Walls).await.unwrap();
        let set = |receipt: &Receipt| {
            let all = receipt.tries().filter(|one| one.verdict == Verdict::Set);
            all.map(|one| one.what.clone()).collect::<Vec<_>>()
        };
        assert_eq!(
            set(&before),
            ["memory", "processes", "cpu-weight"]
                .map(|limit| format!("exceed the limit on {limit}")),
            "read back, and not tried"
        );
        sandbox.verify(Extent::Everything).await.unwrap();
        let after = sandbox.verify(Extent::Walls).await.unwrap();
        assert_eq!(set(&before), set(&after));
        // More than there was while the limits were tried.
        let script = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 5 & done; head -c 48M /dev/zero | tail -c 48M | wc -c";
        let command = Command::new("/bin/sh").args(["-c", script]);
        let report = sandbox.exec_report(&command, &ExecContext::default()).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&report.output.stdout).trim(), "50331648", "{report:?}");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_profile_that_lets_a_call_through_does_not_promise_it() {
        let spec = SandboxSpec { profile: "permissive".to_owned(), ..SandboxSpec::default() };
        let receipt = walled(&spec, Extent::Walls).await;
        let tries = by_name(&receipt);
        assert_eq!(tries["ptrace"], ("let through".to_owned(), Verdict::NotPromised));
        assert_eq!((receipt.open().count(), tries["keyctl"].1), (0, Verdict::Held));
        let spec = SandboxSpec { profile: "dev".to_owned(), ..SandboxSpec::default() };
        let receipt = walled(&spec, Extent::Pristine).await;
        assert_eq!(receipt.open().count(), 0, "{:#?}", by_name(&receipt));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_was_tried_at_creation_is_said_and_no_more() {
        let backend = LinuxBackend::new().unwrap();
        let sandbox =
            backend.create(&SandboxSpec::default(), &CreateOptions::default()).await.unwrap();
        let receipt = sandbox.receipt();
        assert_eq!((receipt.extent, receipt.verdict), (Extent::Creation, Verdict::Partly));
        let held = receipt.tries().filter(|one| one.verdict == Verdict::Held).count();
        assert_eq!(held, 17, "{receipt:#?}");
        let limits = receipt.layers.iter().find(|layer| layer.layer == "limits").unwrap();
        assert_eq!(limits.verdict, Verdict::Partly);
        sandbox.suspend().await.unwrap();
        let error = sandbox.verify(Extent::Walls).await.unwrap_err();
        assert!(matches!(error, SandboxError::Suspended { .. }));
        sandbox.destroy().await.unwrap();
        assert!(matches!(sandbox.verify(Extent::Walls).await, Err(SandboxError::Ended { .. })));
    }

    #[test]
    fn the_same_holds_for_a_plain_user() {
        plain_user::rerun(&["a_sandbox_holds_what_its_receipt_says", "--test-threads", "1"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_holds_what_its_receipt_says() {
    let receipt = walled(&SandboxSpec::default(), Extent::Everything).await;
    let tries = by_name(&receipt);
    assert_eq!(receipt.open().count(), 0, "{tries:#?}");
    let held = receipt.tries().filter(|one| one.verdict == Verdict::Held).count();
    assert!(held > 35, "{tries:#?}");
    if !rustix::process::geteuid().is_root() {
        let (_, memory) = &tries["exceed the limit on memory"];
        assert_eq!(*memory, Verdict::NotPromised, "watched, and not exact: {tries:#?}");
    }
}
