//! Snapshots and forks at the manager: whose they are (S2), at the limit (A6), and whole or not there at
//! all after a crash (D1 to D3).

use warren::backend::FakeBackend;
use warren::backend::fake::{Step, When};
use warren::layers::Layers;
use warren::store::memory::MemoryStore;
use warren::*;

use crate::support::*;

struct Place {
    backend: FakeBackend,
    layers: Layers,
    _directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let layers = Layers::open(directory.path()).unwrap();
        let backend = FakeBackend::new().with_layers(layers.clone());
        Self { backend, layers, _directory: directory }
    }
}

fn named(name: &str) -> SnapshotOptions {
    SnapshotOptions { name: name.to_owned(), ..SnapshotOptions::default() }
}

fn forks(count: u32) -> ForkOptions {
    ForkOptions { count, ..ForkOptions::default() }
}

async fn text(sandbox: &dyn Sandbox) -> String {
    let output = run(sandbox, "read").await.unwrap();
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

#[tokio::test(start_paused = true)]
async fn what_is_saved_comes_back_in_place_and_in_forks() {
    let place = Place::new();
    let manager = manager(&place.backend, poolless());
    let (session, sandbox) = acquire(&manager, "a").await;
    run(&*sandbox, "write first").await.unwrap();
    let first = manager.snapshot(&session, &named("first")).await.unwrap();
    run(&*sandbox, "write second").await.unwrap();
    let made = manager.fork(&session, &forks(3)).await.unwrap();
    assert_eq!(made.len(), 3);
    for (forked, copy) in &made {
        assert_eq!(text(&**copy).await, "second");
        assert!(manager.get_session(&forked.session_id).await.unwrap().is_some());
        assert_ne!(forked.sandbox_id, session.sandbox_id);
    }
    run(&*made[0].1, "write other").await.unwrap();
    assert_eq!(text(&*sandbox).await, "second", "each is its own");
    manager.restore(&session, &first).await.unwrap();
    assert_eq!(text(&*sandbox).await, "first");
    let old = manager.fork_snapshot(&first, &forks(1), "a").await.unwrap();
    assert_eq!(text(&*old[0].1).await, "first");
    // By the contract's own methods too.
    let id = sandbox.snapshot("again").await.unwrap();
    run(&*sandbox, "write third").await.unwrap();
    sandbox.restore(&id).await.unwrap();
    assert_eq!(text(&*sandbox).await, "first");
    assert_eq!(sandbox.restore("nope").await.unwrap_err().code(), "not_found");
    assert_eq!(sandbox.snapshot("again").await.unwrap_err().code(), "already_exists");
    assert_eq!(manager.list_snapshots().await.unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn undo_goes_back_one_savepoint_after_the_other() {
    let place = Place::new();
    let manager = manager(&place.backend, poolless());
    let (session, sandbox) = acquire(&manager, "a").await;
    for word in ["one", "two"] {
        run(&*sandbox, &format!("write {word}")).await.unwrap();
        manager.savepoint(&session).await.unwrap();
    }
    run(&*sandbox, "write three").await.unwrap();
    for word in ["two", "one"] {
        manager.undo(&session).await.unwrap();
        assert_eq!(text(&*sandbox).await, word);
    }
    assert_eq!(manager.undo(&session).await.unwrap_err().code(), "conflict");
    manager.savepoint(&session).await.unwrap();
    manager.terminate(&session).await.unwrap();
    manager.cleanup_expired().await.unwrap();
    assert!(manager.list_snapshots().await.unwrap().is_empty(), "they go with their sandbox");
    assert!(place.layers.list().unwrap().is_empty(), "and so do their layers");
}

#[tokio::test(start_paused = true)]
async fn s2_to_anybody_else_a_snapshot_does_not_exist() {
    let place = Place::new();
    let manager = manager(&place.backend, poolless());
    let (session, sandbox) = acquire(&manager, "a").await;
    let snapshot = manager.snapshot(&session, &named("mine")).await.unwrap();
    let (_, foreign) = acquire(&manager, "b").await;
    for id in ["mine", snapshot.id.as_str()] {
        assert_eq!(manager.get_snapshot("b", id).await.unwrap_err().code(), "not_found");
        assert_eq!(manager.remove_snapshot("b", id).await.unwrap_err().code(), "not_found");
        assert_eq!(foreign.restore(id).await.unwrap_err().code(), "not_found");
    }
    let stolen = SandboxSession { client_id: "b".to_owned(), ..session.clone() };
    assert_eq!(manager.snapshot(&stolen, &named("x")).await.unwrap_err().code(), "not_found");
    assert_eq!(manager.fork(&stolen, &forks(1)).await.unwrap_err().code(), "not_found");
    assert_eq!(manager.restore(&stolen, &snapshot).await.unwrap_err().code(), "not_found");
    assert_eq!(manager.undo(&stolen).await.unwrap_err().code(), "not_found");
    manager.get_snapshot("a", "mine").await.unwrap();
    drop(sandbox);
}

#[tokio::test(start_paused = true)]
async fn a6_a_fork_is_whole_or_not_at_all_unless_fewer_will_do() {
    let place = Place::new();
    let config = SandboxManagerConfig { max_sandboxes: 4, ..poolless() };
    let manager = manager(&place.backend, config);
    let (session, _sandbox) = acquire(&manager, "a").await;
    assert_eq!(manager.fork(&session, &forks(4)).await.unwrap_err().code(), "capacity");
    assert_eq!(manager.stats().await.active_sandboxes, 1);
    place.backend.fail(Step::Create, When::Nth(2));
    assert_eq!(manager.fork(&session, &forks(3)).await.unwrap_err().code(), "step_failed");
    assert_eq!((manager.stats().await.active_sandboxes, place.backend.counts().live), (1, 1));
    place.backend.fail(Step::Create, When::Nth(2));
    let partial = ForkOptions { partial: true, ..forks(3) };
    assert_eq!(manager.fork(&session, &partial).await.unwrap().len(), 2);
    // Three live, and four may.
    let most = ForkOptions { partial: true, ..forks(50) };
    assert_eq!(manager.fork(&session, &forks(2)).await.unwrap_err().code(), "capacity");
    assert_eq!(manager.fork(&session, &most).await.unwrap().len(), 1, "as many as there is room");
    assert_eq!(manager.fork(&session, &most).await.unwrap_err().code(), "capacity");
    assert_eq!((manager.stats().await.active_sandboxes, place.backend.counts().live), (4, 4));
    for bad in [0, 1_001] {
        assert_eq!(manager.fork(&session, &forks(bad)).await.unwrap_err().code(), "invalid_spec");
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_saved_or_restored_leaves_all_as_it_was() {
    let place = Place::new();
    let manager = manager(&place.backend, poolless());
    let (session, sandbox) = acquire(&manager, "a").await;
    run(&*sandbox, "write kept").await.unwrap();
    place.backend.fail(Step::Snapshot, When::Nth(1));
    assert_eq!(manager.snapshot(&session, &named("s")).await.unwrap_err().code(), "step_failed");
    assert!(manager.list_snapshots().await.unwrap().is_empty());
    let saved = manager.snapshot(&session, &named("s")).await.unwrap();
    run(&*sandbox, "write now").await.unwrap();
    place.backend.fail(Step::Restore, When::Nth(1));
    assert_eq!(manager.restore(&session, &saved).await.unwrap_err().code(), "step_failed");
    assert_eq!(text(&*sandbox).await, "now");
    manager.suspend(&session).await.unwrap();
    assert_eq!(manager.restore(&session, &saved).await.unwrap_err().code(), "suspended");
    manager.snapshot(&session, &named("still")).await.unwrap();
    manager.terminate(&session).await.unwrap();
    for outcome in [
        manager.snapshot(&session, &named("gone")).await.map(drop),
        manager.restore(&session, &saved).await,
        manager.fork(&session, &forks(1)).await.map(drop),
    ] {
        assert_eq!(outcome.unwrap_err().code(), "session_ended");
    }
    manager.remove_snapshot("a", "s").await.unwrap();
    manager.remove_snapshot("a", "still").await.unwrap();
    assert!(place.layers.list().unwrap().is_empty());
}

/// A runtime that dies with everything that runs on it, as a killed process does.
fn process() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().unwrap()
}

/// Lives until a write of the store, which is the last; tells whether there was such a write.
fn killed_at(write: u64, crash: fn(&MemoryStore, u64)) -> bool {
    let place = Place::new();
    let store = MemoryStore::new();
    let first = process();
    crash(&store, write);
    let finished = first.block_on(async {
        let life = async {
            let manager = opened(&place.backend, poolless(), &store).await;
            let (session, sandbox) = acquire(&manager, "a").await;
            run(&*sandbox, "write saved").await.unwrap();
            let saved = manager.snapshot(&session, &named("saved")).await.unwrap();
            run(&*sandbox, "write after").await.unwrap();
            manager.restore(&session, &saved).await.unwrap();
            manager.fork(&session, &forks(3)).await.unwrap();
        };
        tokio::time::timeout(20 * SECOND, life).await.is_ok()
    });
    let crashed = store.has_crashed();
    assert!(finished || crashed, "write {write}: stuck without a crash");
    place.backend.kill();
    drop(first);
    place.backend.restart();
    let store = store.reopen();
    process().block_on(async {
        let manager = opened(&place.backend, poolless(), &store).await;
        let sessions = manager.list_sessions().await.unwrap();
        let expected: &[usize] = if finished { &[4] } else { &[0, 1] };
        assert!(expected.contains(&sessions.len()), "write {write}: {} sessions", sessions.len());
        assert_eq!(place.backend.counts().live, sessions.len() as u64, "write {write}");
        let saved = manager.list_snapshots().await.unwrap();
        for session in &sessions {
            let sandbox = manager.get_sandbox(&session.sandbox_id).await.unwrap().unwrap();
            let text = text(&*sandbox).await;
            let known = ["", "saved", "after"].contains(&text.as_str());
            assert!(known && (saved.len() == 1 || text != "after"), "write {write}: {text}");
            manager.snapshot(session, &named(&session.session_id)).await.unwrap();
            manager.terminate(session).await.unwrap();
        }
        for snapshot in manager.list_snapshots().await.unwrap() {
            manager.remove_snapshot("a", snapshot.id.as_str()).await.unwrap();
        }
        assert!(place.layers.list().unwrap().is_empty(), "write {write}: nothing leaks");
        let forks = place.layers.root().join("records/forks").read_dir();
        assert!(forks.map_or(true, |mut forks| forks.next().is_none()), "write {write}");
    });
    !finished
}

#[test]
fn d1_a_kill_at_any_write_leaves_snapshots_and_forks_whole_or_not_there() {
    for crash in [MemoryStore::crash_before, MemoryStore::crash_after] {
        let mut write = 1;
        while killed_at(write, crash) {
            write += 1;
        }
        assert!(write > 8, "control: there are that many writes, and the last life was whole");
    }
}

#[test]
fn d1_a_sandbox_that_was_being_restored_is_made_anew_by_the_next_manager() {
    let place = Place::new();
    let store = MemoryStore::new();
    let first = process();
    let session = first.block_on(async {
        let manager = opened(&place.backend, poolless(), &store).await;
        let networked = SandboxSpec { network_enabled: true, ..spec() };
        let (session, sandbox) = manager.acquire(&networked, &options(), "a").await.unwrap();
        sandbox.set_reach(&Reach::nothing()).await.unwrap();
        run(&*sandbox, "write saved").await.unwrap();
        let saved = manager.snapshot(&session, &named("s")).await.unwrap();
        run(&*sandbox, "write lost").await.unwrap();
        place.backend.stall(Step::Restore, When::Always);
        tokio::select! {
            _ = manager.restore(&session, &saved) => panic!("it waits"),
            () = until("it is being restored", async || place.backend.stalled(Step::Restore) == 1) => {}
        }
        session
    });
    // Its processes are gone already, and so is whoever was to make new ones.
    place.backend.kill();
    drop(first);
    place.backend.crash(&session.sandbox_id);
    place.backend.release(Step::Restore);
    place.backend.restart();
    process().block_on(async {
        let manager = opened(&place.backend, poolless(), &store.reopen()).await;
        let sandbox = manager.get_sandbox(&session.sandbox_id).await.unwrap().unwrap();
        assert_eq!(text(&*sandbox).await, "saved");
        assert_eq!(sandbox.reach(), Reach::nothing(), "what was denied is denied again");
        assert_eq!(state(&manager, &session.session_id).await, Some(SessionState::Active));
        sandbox.set_reach(&Reach::default()).await.unwrap();
        assert_eq!(sandbox.reach(), Reach::default(), "control: what is told is what is said");
    });
}
