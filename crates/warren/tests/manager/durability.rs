//! Rules D1 to D3, on a store that dies with its process or fails.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use warren::SessionState::{Active, Detached, Suspended};
use warren::backend::FakeBackend;
use warren::backend::fake::{Step, When};
use warren::store::memory::MemoryStore;
use warren::store::{Change, Image, Phase, Store, StoreError};
use warren::*;

use crate::support::*;

/// A runtime that dies with everything that runs on it, as a killed process does.
fn process() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().unwrap()
}

/// What clients were told: sessions, their state and whether they may have changed since.
#[derive(Debug, Default)]
struct Told {
    sessions: BTreeMap<String, Option<SessionState>>,
    default: Option<SandboxId>,
}

type Shared = Arc<Mutex<Told>>;

/// Does a bit of everything and notes what was acknowledged. A session that a call is under way on
/// is noted as `None`: that call may or may not have taken effect.
async fn work(manager: &DefaultSandboxManager, told: &Shared) -> Result<()> {
    let note = |session: &SandboxSession, state: Option<SessionState>| {
        told.lock().unwrap().sessions.insert(session.session_id.clone(), state);
    };
    let forget = |session: &SandboxSession| {
        told.lock().unwrap().sessions.remove(&session.session_id);
    };
    let (one, sandbox) = manager.acquire(&spec(), &options(), "a").await?;
    note(&one, Some(Active));
    run(&*sandbox, "true").await?;
    let (two, _) = manager.acquire(&spec(), &from_pool(), "b").await?;
    note(&two, Some(Active));
    manager.set_default_sandbox(Some(two.sandbox_id.clone())).await?;
    told.lock().unwrap().default = Some(two.sandbox_id.clone());
    let shared = manager.attach(attach_to(&one.sandbox_id, "a")).await?.session;
    note(&shared, Some(Active));
    note(&shared, None);
    manager.detach(&shared).await?;
    note(&shared, Some(Detached));
    note(&one, None);
    manager.suspend(&one).await?;
    note(&one, Some(Suspended));
    note(&one, None);
    manager.resume(&one).await?;
    note(&one, Some(Active));
    note(&two, None);
    manager.release(&two, true).await?;
    note(&two, Some(Detached));
    note(&two, None);
    manager.acquire(&spec(), &options(), "b").await?;
    note(&two, Some(Active));
    let id = SandboxId::from_string("chosen");
    let request = AttachRequest { create_if_missing: true, ..attach_to(&id, "c") };
    let chosen = manager.attach(request).await?.session;
    note(&chosen, Some(Active));
    note(&chosen, None);
    manager.suspend(&chosen).await?;
    note(&chosen, Some(Suspended));
    note(&shared, None);
    manager.release(&shared, false).await?;
    forget(&shared);
    let (short, _) = manager.acquire(&spec(), &from_pool(), "d").await?;
    note(&short, Some(Active));
    note(&short, None);
    manager.terminate(&short).await?;
    forget(&short);
    Ok(())
}

fn killed(told: &Shared, sessions: &[SandboxSession], at: &str) {
    let told = told.lock().unwrap();
    for (id, state) in &told.sessions {
        let found = sessions.iter().find(|session| session.session_id == *id);
        match (state, found) {
            (Some(state), Some(found)) => assert_eq!(found.state, *state, "{at}: {id}"),
            (Some(state), None) => panic!("{at}: session {id} was acknowledged as {state:?}, lost"),
            (None, _) => {}
        }
    }
}

/// Lives one life that is killed at a write, then checks the next. Tells whether it was killed.
fn one_crash(kill: impl Fn(&MemoryStore), at: &str) -> bool {
    let backend = FakeBackend::new();
    let store = MemoryStore::new();
    let told = Shared::default();
    let first = process();
    kill(&store);
    let finished = first.block_on(async {
        let work = async {
            let manager = opened(&backend, pooled(1, 2), &store).await;
            work(&manager, &told).await.unwrap();
            tokio::time::sleep(SECOND).await;
        };
        tokio::time::timeout(20 * SECOND, work).await.is_ok()
    });
    let crashed = store.has_crashed();
    assert!(finished || crashed, "{at}: stuck without a crash");
    backend.kill();
    drop(first);
    backend.restart();

    let store = store.reopen();
    process().block_on(async {
        let manager = opened(&backend, pooled(1, 2), &store).await;
        let sessions = manager.list_sessions().await.unwrap();
        killed(&told, &sessions, at);
        // Nothing is left that belongs to nobody, and each session's sandbox works.
        until("the pool is full", async || manager.stats().await.pool_size == 1).await;
        let owned: BTreeSet<_> = sessions.iter().map(|s| s.sandbox_id.clone()).collect();
        let remains = backend.remains().await.unwrap();
        let stored: BTreeSet<_> = store.image().sandboxes.into_iter().map(|r| r.id).collect();
        assert_eq!(remains.iter().cloned().collect::<BTreeSet<_>>(), stored, "{at}");
        assert_eq!(remains.len(), owned.len() + 1, "{at}: {remains:?}");
        for session in &sessions {
            manager.resume(session).await.unwrap();
            let sandbox = manager.get_sandbox(&session.sandbox_id).await.unwrap().unwrap();
            run(&*sandbox, "true").await.unwrap();
        }
        let default = told.lock().unwrap().default.clone();
        if default.is_some() {
            assert_eq!(manager.get_default_sandbox().await, default, "{at}");
        }
        for session in &sessions {
            manager.terminate(session).await.unwrap();
        }
        manager.shutdown(Shutdown::StopAll).await;
        assert!(backend.remains().await.unwrap().is_empty(), "{at}");
        assert_eq!(store.image(), warren::store::Image::default(), "{at}");
    });
    crashed
}

#[test]
fn d1_killed_at_each_write_no_acknowledged_session_is_lost_and_nothing_is_left() {
    let mut crashes = 0;
    for n in 1.. {
        let before = one_crash(|store| store.crash_before(n), &format!("before write {n}"));
        let after = one_crash(|store| store.crash_after(n), &format!("after write {n}"));
        if !before && !after {
            break;
        }
        crashes += 2;
    }
    assert!(crashes > 40, "control: only {crashes} crashes");
}

#[test]
fn d1_a_creation_or_an_end_that_was_killed_half_way_is_finished() {
    for step in [Step::Create, Step::Destroy, Step::Claim] {
        let backend = FakeBackend::new();
        let store = MemoryStore::new();
        let first = process();
        first.block_on(async {
            let manager = opened(&backend, pooled(1, 1), &store).await;
            until("one is warm", async || manager.stats().await.pool_size == 1).await;
            let (session, _) = acquire(&manager, "c").await;
            backend.stall(step, When::Always);
            let halfway = async {
                match step {
                    Step::Destroy => manager.release(&session, false).await.unwrap(),
                    _ => drop(manager.acquire(&spec(), &from_pool(), "c").await.unwrap()),
                }
                drop(manager.acquire(&spec(), &options(), "c").await.unwrap());
            };
            assert!(tokio::time::timeout(SECOND, halfway).await.is_err());
            backend.kill();
        });
        drop(first);
        backend.restart();
        backend.release(step);
        assert!(backend.counts().live > 0, "control: sandboxes outlive the process");
        process().block_on(async {
            let store = store.reopen();
            let manager = opened(&backend, poolless(), &store).await;
            let sessions = manager.list_sessions().await.unwrap();
            let mut owned: Vec<_> = sessions.iter().map(|s| s.sandbox_id.clone()).collect();
            owned.sort();
            assert_eq!(backend.remains().await.unwrap(), owned, "{step:?}");
            assert_eq!(store.image().sandboxes.len(), owned.len());
        });
    }
}

#[tokio::test(start_paused = true)]
async fn d1_rest_goes_on_over_a_restart_and_what_runs_runs_on() {
    let backend = FakeBackend::new();
    let store = MemoryStore::new();
    let first = opened(&backend, poolless(), &store).await;
    let (session, _) = acquire(&first, "c").await;
    tokio::time::sleep(200 * SECOND).await;
    first.get_sandbox(&session.sandbox_id).await.unwrap().unwrap().resource_usage().await.unwrap();
    tokio::time::sleep(200 * SECOND).await;
    first.shutdown(Shutdown::LeaveRunning).await;
    assert_eq!(backend.counts().live, 1);

    let second = opened(&backend, poolless(), &store).await;
    let (again, _) = second.acquire(&spec(), &preferring(&session.sandbox_id), "c").await.unwrap();
    second.terminate(&again).await.unwrap();
    assert_eq!(state(&second, &session.session_id).await, Some(Active));
    tokio::time::sleep(361 * SECOND).await;
    assert_eq!(state(&second, &session.session_id).await, None);
    assert_eq!((backend.counts().live, second.stats().await.timeout_destroys), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn d1_a_backend_that_does_not_answer_loses_no_record() {
    let backend = FakeBackend::new();
    let store = MemoryStore::new();
    let first = opened(&backend, poolless(), &store).await;
    let (session, _) = acquire(&first, "c").await;
    first.shutdown(Shutdown::LeaveRunning).await;
    let before = store.image();
    backend.fail(Step::Adopt, When::Nth(1));
    let second = opened(&backend, poolless(), &store).await;
    assert_eq!((store.image(), backend.counts().live), (before, 1));
    second.shutdown(Shutdown::LeaveRunning).await;
    let third = opened(&backend, poolless(), &store).await;
    assert_eq!(state(&third, &session.session_id).await, Some(Active));
}

#[tokio::test(start_paused = true)]
async fn d1_what_could_not_be_taken_over_is_tried_again_by_each_sweep() {
    let backend = FakeBackend::new();
    let store = MemoryStore::new();
    let first = opened(&backend, poolless(), &store).await;
    let (active, _) = acquire(&first, "c").await;
    let (stopped, _) = acquire(&first, "c").await;
    first.suspend(&stopped).await.unwrap();
    let (lost, _) = acquire(&first, "c").await;
    first.set_default_sandbox(Some(lost.sandbox_id.clone())).await.unwrap();
    first.shutdown(Shutdown::LeaveRunning).await;
    let options = CreateOptions { persistent: true, ..CreateOptions::default() };
    let stray = backend.create_sandbox_with(&spec(), &options).await.unwrap();

    backend.fail(Step::Adopt, When::Always);
    backend.fail(Step::Reclaim, When::Always);
    let config = SandboxManagerConfig { max_sandboxes: 3, ..poolless() };
    let second = opened(&backend, config, &store).await;
    assert_eq!(state(&second, &active.session_id).await, None, "control: it cannot be reached");
    let full = second.acquire(&spec(), &crate::support::options(), "c").await.unwrap_err();
    assert_eq!(full.code(), "capacity", "they are on the host all the same");
    assert!(stray.is_alive().await);
    backend.crash(&lost.sandbox_id);
    tokio::time::sleep(61 * SECOND).await;
    assert_eq!(state(&second, &active.session_id).await, None);

    backend.heal(Step::Adopt);
    backend.heal(Step::Reclaim);
    tokio::time::sleep(61 * SECOND).await;
    assert_eq!(state(&second, &active.session_id).await, Some(Active));
    assert_eq!(state(&second, &stopped.session_id).await, Some(Suspended));
    assert_eq!(state(&second, &lost.session_id).await, None);
    assert_eq!(second.get_default_sandbox().await, None);
    assert!(!stray.is_alive().await, "nor is a stray left");
    second.resume(&stopped).await.unwrap();
    for session in [&active, &stopped] {
        let sandbox = second.get_sandbox(&session.sandbox_id).await.unwrap().unwrap();
        run(&*sandbox, "true").await.unwrap();
        second.terminate(session).await.unwrap();
    }
    assert_eq!(store.image(), warren::store::Image::default());
    assert!(backend.remains().await.unwrap().is_empty());
}

/// A store whose writes wait while it is told to hang, and are then made in their order.
#[derive(Debug)]
struct Hanging {
    store: MemoryStore,
    hangs: tokio::sync::watch::Sender<bool>,
    writes: tokio::sync::mpsc::UnboundedSender<Write>,
}

type Write = (Vec<Change>, tokio::sync::oneshot::Sender<Result<(), StoreError>>);

impl Hanging {
    fn new(store: MemoryStore) -> (Arc<Self>, impl Future<Output = ()>) {
        let (hangs, mut hanging) = tokio::sync::watch::channel(false);
        let (writes, mut due) = tokio::sync::mpsc::unbounded_channel::<Write>();
        let writer = {
            let store = store.clone();
            async move {
                while let Some((changes, done)) = due.recv().await {
                    let _ = hanging.wait_for(|hangs| !hangs).await;
                    // The asker may have given up; a writer's thread would not know either.
                    let _ = done.send(store.apply(changes).await);
                }
            }
        };
        (Arc::new(Self { store, hangs, writes }), writer)
    }
}

#[async_trait::async_trait]
impl Store for Hanging {
    async fn load(&self) -> Result<Image, StoreError> {
        self.store.load().await
    }

    async fn apply(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        let (done, written) = tokio::sync::oneshot::channel();
        self.writes.send((changes, done)).map_err(|_| StoreError::Closed)?;
        written.await.map_err(|_| StoreError::Closed)?
    }
}

#[tokio::test(start_paused = true)]
async fn d3_a_store_that_hangs_holds_up_nobody_for_ever_and_is_told_the_truth_later() {
    let backend = FakeBackend::new();
    let memory = MemoryStore::new();
    let (store, writer) = Hanging::new(memory.clone());
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(writer);
    let backends: Vec<Arc<dyn IsolationBackend>> = vec![Arc::new(backend.clone())];
    let manager =
        DefaultSandboxManager::open(backends, poolless(), Arc::clone(&store) as _).await.unwrap();
    let (session, _) = acquire(&manager, "c").await;
    let (ending, _) = acquire(&manager, "d").await;
    let before = memory.image();

    store.hangs.send_replace(true);
    let began = tokio::time::Instant::now();
    let created = manager.acquire(&spec(), &from_pool(), "e").await.unwrap_err();
    let suspended = manager.suspend(&session).await.unwrap_err();
    let default = manager.set_default_sandbox(Some(session.sandbox_id.clone())).await.unwrap_err();
    for error in [&created, &suspended, &default] {
        assert_eq!(error.code(), "store_unavailable", "{error}");
    }
    // An end is not held up: the store is told later.
    manager.terminate(&ending).await.unwrap();
    assert!(began.elapsed() < 300 * SECOND, "{:?}", began.elapsed());
    assert_eq!(state(&manager, &session.session_id).await, Some(Active));
    assert_eq!((backend.counts().live, memory.image()), (1, before));

    // What was given up is written late, and then what is so in truth.
    store.hangs.send_replace(false);
    tokio::time::sleep(SECOND).await;
    manager.cleanup_expired().await.unwrap();
    let image = memory.image();
    assert_eq!((image.sandboxes.len(), image.sessions.len(), image.default), (1, 1, None));
    assert_eq!(image.sandboxes[0].phase, Phase::Running);
    assert_eq!(image.sessions[0].session.state, Active);
    manager.terminate(&session).await.unwrap();
    assert_eq!(memory.image(), Image::default());
}

#[tokio::test(start_paused = true)]
async fn d2_a_record_is_there_before_the_kernel_is_touched() {
    let backend = FakeBackend::new();
    let store = MemoryStore::new();
    let manager = opened(&backend, poolless(), &store).await;
    let phase = || store.image().sandboxes.first().map(|record| record.phase);
    let (spec, options) = (spec(), options());
    backend.stall(Step::Create, When::Always);
    let look = async |step, expected| {
        until("it waits", async || backend.stalled(step) == 1).await;
        assert_eq!(phase(), Some(expected), "{step:?}");
        backend.release(step);
    };
    let acquire = manager.acquire(&spec, &options, "c");
    let (acquired, ()) = tokio::join!(acquire, look(Step::Create, Phase::Creating));
    let (session, _) = acquired.unwrap();
    assert_eq!(phase(), Some(Phase::Running));
    let record = store.image().sandboxes.remove(0);
    assert_eq!(record.anchor, Some(format!("fake:{}:0", record.id)));
    backend.stall(Step::Suspend, When::Always);
    let (suspended, ()) =
        tokio::join!(manager.suspend(&session), look(Step::Suspend, Phase::Suspended));
    suspended.unwrap();
    backend.stall(Step::Destroy, When::Always);
    let (ended, ()) =
        tokio::join!(manager.terminate(&session), look(Step::Destroy, Phase::Destroying));
    ended.unwrap();
    assert_eq!(store.image(), warren::store::Image::default(), "done is durable");
}

#[tokio::test(start_paused = true)]
async fn d3_a_full_store_stops_new_work_and_loses_nothing() {
    let backend = FakeBackend::new();
    let store = MemoryStore::new();
    let manager = opened(&backend, poolless(), &store).await;
    let (one, sandbox) = acquire(&manager, "c").await;
    let (two, _) = acquire(&manager, "c").await;
    let before = store.image();
    store.fill_at(1);
    let error = manager.acquire(&spec(), &options(), "c").await.unwrap_err();
    assert_eq!((error.code(), backend.counts().created), ("store_unavailable", 2));
    assert!(error.hint().unwrap().contains("room"));
    for outcome in [
        manager.detach(&one).await,
        manager.suspend(&one).await,
        manager.attach(attach_to(&one.sandbox_id, "c")).await.map(drop),
        manager.set_default_sandbox(Some(one.sandbox_id.clone())).await,
    ] {
        assert_eq!(outcome.unwrap_err().code(), "store_unavailable");
    }
    run(&*sandbox, "true").await.expect("what runs, runs");
    assert_eq!(state(&manager, &one.session_id).await, Some(Active));
    assert_eq!(store.image(), before);

    manager.terminate(&two).await.expect("ending works");
    assert_eq!(backend.counts().live, 1);
    store.heal();
    manager.cleanup_expired().await.unwrap();
    assert_eq!(store.image().sandboxes.len(), 1, "and is written when it can be");
    acquire(&manager, "c").await;
    assert_eq!(store.load().await.unwrap().sessions.len(), 2);
}

#[test]
fn d3_a_write_that_fails_leaves_the_manager_and_the_host_in_step() {
    for n in 1..80 {
        let backend = FakeBackend::new();
        let store = MemoryStore::new();
        process().block_on(async {
            let manager = opened(&backend, pooled(1, 2), &store).await;
            store.fail_nth(n);
            let _ = work(&manager, &Shared::default()).await;
            tokio::time::sleep(61 * SECOND).await;
            for session in manager.list_sessions().await.unwrap() {
                manager.terminate(&session).await.unwrap();
            }
            let stats = manager.stats().await;
            assert_eq!((stats.active_sandboxes, stats.active_sessions), (0, 0), "write {n}");
            manager.shutdown(Shutdown::StopAll).await;
            assert!(backend.remains().await.unwrap().is_empty(), "write {n}");
        });
    }
}

#[tokio::test(start_paused = true)]
async fn touching_is_not_written_at_each_command() {
    let backend = FakeBackend::new();
    let store = MemoryStore::new();
    let manager = opened(&backend, poolless(), &store).await;
    let (_, sandbox) = acquire(&manager, "c").await;
    let before = store.writes();
    for _ in 0..100 {
        run(&*sandbox, "sleep 0.1").await.unwrap();
    }
    let writes = store.writes() - before;
    assert!((1..=3).contains(&writes), "{writes} writes in ten seconds of commands");
}

#[tokio::test(start_paused = true)]
async fn d1_what_the_host_has_and_no_record_names_is_removed() {
    let backend = FakeBackend::new();
    let store = MemoryStore::new();
    let first = opened(&backend, poolless(), &store).await;
    let (session, _) = acquire(&first, "c").await;
    first.shutdown(Shutdown::LeaveRunning).await;
    let options = CreateOptions { persistent: true, ..CreateOptions::default() };
    let stray = backend.create_sandbox_with(&spec(), &options).await.unwrap();
    let _second = opened(&backend, poolless(), &store).await;
    assert!(!stray.is_alive().await);
    assert_eq!(backend.remains().await.unwrap(), [session.sandbox_id]);
}
