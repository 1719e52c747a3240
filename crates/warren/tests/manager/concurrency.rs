//! Many callers at once, on many threads.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use warren::backend::FakeBackend;
use warren::backend::fake::{Step, When};
use warren::*;

use crate::support::*;

const TASKS: u64 = 64;
const ROUNDS: u64 = 10_000;
const MAX: u32 = 24;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a6_p5_sixty_four_tasks_acquire_and_release_ten_thousand_times() {
    let backend = FakeBackend::new();
    let mut config = SandboxManagerConfig { max_sandboxes: MAX, ..pooled(4, 8) };
    config.cleanup_interval = std::time::Duration::from_millis(5);
    let manager = manager(&backend, config);
    let (done, refused) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let held: Arc<Mutex<HashSet<SandboxId>>> = Arc::default();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let (manager, held) = (manager.clone(), Arc::clone(&held));
        let (done, refused) = (Arc::clone(&done), Arc::clone(&refused));
        tasks.spawn(async move {
            let client = format!("client {task}");
            let options = if task % 3 == 0 { options() } else { from_pool() };
            while done.fetch_add(1, Ordering::Relaxed) < ROUNDS {
                let (session, sandbox) = loop {
                    match manager.acquire(&spec(), &options, &client).await {
                        Ok(acquired) => break acquired,
                        Err(SandboxError::Capacity { limit: MAX, .. }) => {
                            refused.fetch_add(1, Ordering::Relaxed);
                            tokio::time::sleep(std::time::Duration::from_micros(200)).await;
                        }
                        Err(error) => panic!("{error}"),
                    }
                };
                let is_mine = held.lock().unwrap().insert(session.sandbox_id.clone());
                assert!(is_mine, "{} was given to two", session.sandbox_id);
                run(&*sandbox, "true").await.unwrap();
                held.lock().unwrap().remove(&session.sandbox_id);
                manager.release(&session, false).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    let counts = backend.counts();
    assert!(counts.most_live <= u64::from(MAX), "{counts:?}");
    assert_eq!((counts.wrong_claims, counts.execs), (0, ROUNDS), "{counts:?}");
    assert!(counts.claimed > 0 && refused.load(Ordering::Relaxed) > 0, "control: {counts:?}");
    let stats = manager.stats().await;
    assert_eq!((stats.active_sandboxes, stats.active_sessions), (0, 0));
    assert_eq!(stats.sandboxes_created, counts.created);
    manager.shutdown(Shutdown::StopAll).await;
    assert_eq!(backend.counts().live, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn callers_that_give_up_at_any_moment_leave_nothing() {
    let backend = FakeBackend::new();
    let config = SandboxManagerConfig { max_sandboxes: 16, ..pooled(2, 4) };
    let manager = manager(&backend, config);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..1_000_u64 {
        let manager = manager.clone();
        tasks.spawn(async move {
            let (spec, options) = (spec(), from_pool());
            let given_up = manager.acquire(&spec, &options, "c");
            // Polled a few times and then dropped.
            let mut given_up = std::pin::pin!(given_up);
            for _ in 0..task % 4 {
                tokio::select! {
                    biased;
                    acquired = &mut given_up => {
                        if let Ok((session, _)) = acquired {
                            manager.release(&session, false).await.unwrap();
                        }
                        return;
                    }
                    () = tokio::task::yield_now() => {}
                }
            }
        });
    }
    tasks.join_all().await;
    for _ in 0..2_000 {
        let stats = manager.stats().await;
        if (stats.active_sandboxes, stats.active_sessions) == (0, 0)
            && backend.counts().live == stats.pool_size
        {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    let stats = manager.stats().await;
    assert_eq!((stats.active_sandboxes, stats.active_sessions), (0, 0));
    assert!(backend.counts().most_live <= 16);
    manager.shutdown(Shutdown::StopAll).await;
    assert_eq!(backend.counts().live, 0);
}

/// Draws numbers; the same for the same seed.
fn roll(dice: &mut u64, n: u64) -> u64 {
    *dice ^= *dice << 13;
    *dice ^= *dice >> 7;
    *dice ^= *dice << 17;
    (*dice >> 11) % n
}

/// Makes random calls, some of them given up half-way, on what all the tasks share.
async fn stir(manager: DefaultSandboxManager, all: Arc<Mutex<Vec<SandboxSession>>>, seed: u64) {
    let mut dice = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let clients = ["ann", "bob", "cyd"];
    for _ in 0..400 {
        let nth = |dice: &mut u64, len: usize| usize::try_from(roll(dice, len as u64)).unwrap();
        let client = clients[nth(&mut dice, clients.len())];
        let session = {
            let all = all.lock().unwrap();
            let recent = all.len().min(24);
            (recent > 0).then(|| all[all.len() - 1 - nth(&mut dice, recent)].clone())
        };
        let kind = roll(&mut dice, 20);
        let options = if kind.is_multiple_of(2) { from_pool() } else { options() };
        let call = async {
            match (kind, &session) {
                (0..=5, _) | (_, None) => {
                    let (session, sandbox) = manager.acquire(&spec(), &options, client).await?;
                    all.lock().unwrap().push(session);
                    run(&*sandbox, "true").await.map(drop)
                }
                (6..=7, Some(session)) => {
                    let request = attach_to(&session.sandbox_id, &session.client_id);
                    let joined = manager.attach(request).await?;
                    all.lock().unwrap().push(joined.session);
                    Ok(())
                }
                (8..=9, Some(session)) => manager.detach(session).await,
                (10..=11, Some(session)) => manager.suspend(session).await,
                (12..=13, Some(session)) => manager.resume(session).await.map(drop),
                (14, Some(session)) => manager.release(session, true).await,
                (15..=17, Some(session)) => manager.terminate(session).await,
                (18, Some(session)) => {
                    manager.set_default_sandbox(Some(session.sandbox_id.clone())).await
                }
                (_, Some(_)) => manager.cleanup_expired().await.map(drop),
            }
        };
        let patience = if roll(&mut dice, 5) == 0 { roll(&mut dice, 3) } else { 200 };
        match tokio::time::timeout(std::time::Duration::from_millis(patience), call).await {
            Ok(Ok(())) | Err(_) => {}
            Ok(Err(error)) => {
                let expected = [
                    "capacity",
                    "conflict",
                    "ended",
                    "not_found",
                    "session_ended",
                    "step_failed",
                    "suspended",
                ];
                assert!(expected.contains(&error.code()), "{error}");
            }
        }
    }
}

/// All calls at once from many tasks, with steps that fail and callers that give up: whatever the
/// order, the limit holds, and what there is in the end is exactly what the registry says.
#[test]
fn all_calls_at_once_keep_every_invariant() {
    for seed in 1..=8_u64 {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        runtime.worker_threads(4).enable_time().build().unwrap().block_on(async {
            let backend = FakeBackend::new();
            let config = SandboxManagerConfig { max_sandboxes: 10, ..pooled(2, 3) };
            let manager = manager(&backend, config);
            let all: Arc<Mutex<Vec<SandboxSession>>> = Arc::default();
            for step in [Step::Create, Step::Suspend, Step::Resume, Step::Destroy, Step::Claim] {
                for n in 1..=20 {
                    backend.fail(step, When::Nth(n * 7 + seed));
                }
            }
            let mut tasks = tokio::task::JoinSet::new();
            for task in 0..16 {
                tasks.spawn(stir(manager.clone(), Arc::clone(&all), seed * 100 + task));
            }
            tasks.join_all().await;
            for step in [Step::Create, Step::Suspend, Step::Resume, Step::Destroy, Step::Claim] {
                backend.heal(step);
            }
            // What was given up is taken back, and what could not be destroyed is.
            for _ in 0..200 {
                manager.cleanup_expired().await.unwrap();
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
            let counts = backend.counts();
            assert!(counts.most_live <= 10 && counts.wrong_claims == 0, "{counts:?}");
            let sessions = manager.list_sessions().await.unwrap();
            let owned: HashSet<_> = sessions.iter().map(|s| s.sandbox_id.clone()).collect();
            let stats = manager.stats().await;
            assert_eq!(stats.active_sandboxes, owned.len() as u64, "seed {seed}");
            assert_eq!(counts.live, stats.active_sandboxes + stats.pool_size, "seed {seed}");
            for id in &owned {
                let sessions: Vec<_> = sessions.iter().filter(|s| s.sandbox_id == *id).collect();
                let sandbox = manager.get_sandbox(id).await.unwrap().unwrap();
                let stopped = run(&*sandbox, "true").await.is_err();
                let is = |state| sessions.iter().any(|session| session.state == state);
                assert!(!stopped || !is(SessionState::Active), "seed {seed}: {sessions:?}");
                assert!(stopped || !is(SessionState::Suspended), "seed {seed}: {sessions:?}");
                let owners: HashSet<_> = sessions.iter().map(|s| &s.client_id).collect();
                assert_eq!(owners.len(), 1, "seed {seed}: {sessions:?}");
            }
            for session in &sessions {
                manager.terminate(session).await.unwrap();
            }
            assert_eq!(manager.stats().await.active_sandboxes, 0);
            manager.shutdown(Shutdown::StopAll).await;
            assert_eq!(backend.counts().live, 0);
        });
    }
}
