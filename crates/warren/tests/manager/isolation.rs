//! Levels: a caller asks for a minimum, and gets the cheapest that proves it or an error.

use std::sync::Arc;

use warren::backend::FakeBackend;
use warren::backend::fake::{Step, When};
use warren::*;

use crate::support::*;

/// A ladder of four, named by their levels and given in no particular order.
fn ladder(config: SandboxManagerConfig) -> ([FakeBackend; 4], DefaultSandboxManager) {
    let rungs = IsolationLevel::ALL.map(|level| {
        let backend = FakeBackend::named(level.name());
        backend.set_level(Some(level));
        if level == IsolationLevel::Process {
            backend.set_capabilities(|claims| claims.process_isolation = false);
        }
        backend
    });
    let order = [2, 0, 3, 1];
    let backends = order.map(|at| Arc::new(rungs[at].clone()) as Arc<dyn IsolationBackend>);
    let manager = DefaultSandboxManager::new(backends.to_vec(), config);
    (rungs, manager)
}

fn asking(isolation: IsolationRequirements) -> AcquireOptions {
    AcquireOptions { isolation, ..AcquireOptions::default() }
}

fn at_least(level: IsolationLevel) -> AcquireOptions {
    asking(IsolationRequirements::at_least(level))
}

fn requiring(guarantee: Guarantee) -> AcquireOptions {
    asking(IsolationRequirements { level: None, require: [guarantee].into() })
}

async fn backend_for(manager: &DefaultSandboxManager, options: &AcquireOptions) -> Result<String> {
    let options = AcquireOptions {
        select: SandboxSelectionOptions { require_fresh: true, ..options.select.clone() },
        ..options.clone()
    };
    let acquired = manager.acquire_with(&spec(), &options, "c").await;
    acquired.map(|(_, sandbox)| sandbox.capabilities().backend.clone())
}

#[tokio::test(start_paused = true)]
async fn a5_the_cheapest_backend_that_proves_the_level_is_taken() {
    let (_, manager) = ladder(poolless());
    for level in IsolationLevel::ALL {
        assert_eq!(backend_for(&manager, &at_least(level)).await.unwrap(), level.name());
    }
    let default = backend_for(&manager, &AcquireOptions::default()).await.unwrap();
    assert_eq!(default, "namespace", "every wall stands unless less is asked for by name");
}

#[tokio::test(start_paused = true)]
async fn a5_a_rung_that_does_not_prove_its_walls_is_passed_over_and_never_below() {
    let (rungs, manager) = ladder(poolless());
    rungs[1].set_capabilities(|claims| claims.network_isolation = false);
    rungs[2].fail(Step::Probe, When::Always);
    let up = backend_for(&manager, &at_least(IsolationLevel::Namespace)).await.unwrap();
    assert_eq!(up, "kernel", "what is not proved is not there");
    rungs[3].set_capabilities(|claims| claims.syscall_filtering = false);
    let (_, manager) = (0, {
        let backends = rungs.clone().map(|rung| Arc::new(rung) as Arc<dyn IsolationBackend>);
        DefaultSandboxManager::new(backends.to_vec(), poolless())
    });
    let error = backend_for(&manager, &at_least(IsolationLevel::Namespace)).await.unwrap_err();
    assert_eq!(error.code(), "no_match");
    let text = error.to_string();
    for lack in [
        "backend `process` lacks isolation level `namespace` (it has process), process isolation",
        "backend `namespace` lacks network isolation",
        "backend `container` lacks an answer",
        "backend `kernel` lacks a system call filter",
    ] {
        assert!(text.contains(lack), "`{text}` does not say `{lack}`");
    }
    assert_eq!(rungs[0].counts().created, 0, "no downgrade");
}

#[tokio::test(start_paused = true)]
async fn a5_each_guarantee_can_be_required_on_its_own() {
    for (guarantee, take) in [
        (
            Guarantee::Filesystem,
            (|c| c.filesystem_isolation = false) as fn(&mut BackendCapabilities),
        ),
        (Guarantee::Network, |c| c.network_isolation = false),
        (Guarantee::Process, |c| c.process_isolation = false),
        (Guarantee::Limits, |c| c.resource_limits = false),
        (Guarantee::Syscalls, |c| c.syscall_filtering = false),
    ] {
        let (rungs, manager) = ladder(poolless());
        rungs[1].set_capabilities(take);
        let chosen = backend_for(&manager, &requiring(guarantee)).await.unwrap();
        assert_eq!(chosen, "container", "{guarantee}");
        let (_, control) = ladder(poolless());
        assert_eq!(backend_for(&control, &requiring(guarantee)).await.unwrap(), "namespace");
    }
}

#[tokio::test(start_paused = true)]
async fn a3_a_backend_chosen_by_name_must_still_be_as_strong_as_is_required() {
    let (_, manager) = ladder(poolless());
    let named = |name: &str, level| AcquireOptions {
        select: SandboxSelectionOptions { preferred_backend: Some(name.into()), ..options() },
        ..at_least(level)
    };
    let weak = named("namespace", IsolationLevel::Kernel);
    let error = backend_for(&manager, &weak).await.unwrap_err();
    assert!(error.to_string().contains("(it has namespace)"), "{error}");
    assert!(!error.to_string().contains("`container`"), "only the one that was named: {error}");
    let strong = named("kernel", IsolationLevel::Namespace);
    assert_eq!(backend_for(&manager, &strong).await.unwrap(), "kernel");
}

#[tokio::test(start_paused = true)]
async fn a4_the_level_is_checked_on_every_path() {
    let (rungs, manager) = ladder(pooled(1, 1));
    until("one is warm", async || manager.stats().await.pool_size == 1).await;
    let kernel = at_least(IsolationLevel::Kernel);

    // Warm: of another rung, so it is not taken.
    let from_pool = AcquireOptions { select: from_pool(), ..kernel.clone() };
    let (made, sandbox) = manager.acquire_with(&spec(), &from_pool, "c").await.unwrap();
    assert_eq!(sandbox.capabilities().backend, "kernel");
    assert_eq!(rungs[1].counts().claimed, 0);
    manager.terminate(&made).await.unwrap();

    // Preferred and attached to: refused by name.
    let (weak, _) = acquire(&manager, "c").await;
    let preferred = AcquireOptions { select: preferring(&weak.sandbox_id), ..kernel.clone() };
    let (other, _) = manager.acquire_with(&spec(), &preferred, "c").await.unwrap();
    assert_ne!(other.sandbox_id, weak.sandbox_id);
    let attach = attach_to(&weak.sandbox_id, "c");
    let error = manager.attach_with(attach.clone(), &kernel.isolation).await.unwrap_err();
    assert_eq!(error.code(), "no_match", "{error}");
    manager.attach(attach).await.expect("control");

    // Kept: not given for more than it is.
    manager.release(&weak, true).await.unwrap();
    let (new, sandbox) = manager.acquire_with(&spec(), &kernel, "c").await.unwrap();
    assert_ne!(new.sandbox_id, weak.sandbox_id);
    assert_eq!(sandbox.capabilities().backend, "kernel");

    // Made by attaching.
    let missing = AttachRequest {
        create_if_missing: true,
        ..attach_to(&SandboxId::from_string("sbx-new"), "c")
    };
    let made = manager.attach_with(missing, &kernel.isolation).await.unwrap();
    assert_eq!((made.newly_created, &*made.capabilities.backend), (true, "kernel"));
}

#[tokio::test(start_paused = true)]
async fn a4_required_limits_are_demanded_at_creation_even_those_that_are_the_default() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    // It proves limits, and then does not hold them: the sandbox is not handed out.
    backend.set_capabilities(|_| {});
    assert_eq!(backend_for(&manager, &requiring(Guarantee::Limits)).await.unwrap(), "fake");
    backend.set_capabilities(|claims| claims.resource_limits = false);
    let error = backend_for(&manager, &requiring(Guarantee::Limits)).await.unwrap_err();
    assert_eq!(error.code(), "limit_not_enforceable", "{error}");
    assert_eq!(backend.counts().live, 1, "nothing is left of the one that was refused");
    backend_for(&manager, &AcquireOptions::default()).await.expect("control: not asked for");
}
