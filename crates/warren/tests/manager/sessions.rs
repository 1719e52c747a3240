//! Rules S1 to S11.

use std::sync::Arc;
use std::time::Duration;

use warren::SessionState::{Active, Detached, Suspended};
use warren::backend::FakeBackend;
use warren::backend::fake::{Step, When};
use warren::*;

use crate::support::*;

#[tokio::test(start_paused = true)]
async fn s1_a_sandbox_ends_with_its_last_session_and_no_sooner() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (one, first) = acquire(&manager, "c").await;
    let two = manager.attach(attach_to(&one.sandbox_id, "c")).await.unwrap().session;
    assert_ne!(one.session_id, two.session_id);
    manager.release(&one, false).await.unwrap();
    assert_eq!(backend.counts().live, 1, "the other session holds it");
    assert_eq!(run(&*first, "true").await.unwrap_err().code(), "session_ended");
    let sandbox = manager.get_sandbox(&two.sandbox_id).await.unwrap().unwrap();
    run(&*sandbox, "true").await.unwrap();
    manager.terminate(&two).await.unwrap();
    assert_eq!(backend.counts().live, 0);
    assert_eq!(run(&*sandbox, "true").await.unwrap_err().code(), "ended");
    assert!(!sandbox.is_alive().await);
}

#[tokio::test(start_paused = true)]
async fn s1_a_sandbox_that_cannot_be_destroyed_is_tried_again() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (session, _) = acquire(&manager, "c").await;
    backend.fail(Step::Destroy, When::Nth(1));
    assert!(manager.release(&session, false).await.is_err());
    assert_eq!(state(&manager, &session.session_id).await, None, "the session has ended");
    assert_eq!(manager.stats().await.active_sandboxes, 1, "the sandbox has not");
    tokio::time::sleep(61 * SECOND).await;
    assert_eq!((backend.counts().live, manager.stats().await.active_sandboxes), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn s2_to_anybody_else_it_does_not_exist() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (session, _) = acquire(&manager, "owner").await;
    let forged = SandboxSession { client_id: "thief".into(), ..session.clone() };
    let none = SandboxSession { session_id: "sess-none".into(), ..session.clone() };
    for (named, id) in [(forged, session.session_id.clone()), (none, "sess-none".into())] {
        let outcomes = [
            manager.detach(&named).await,
            manager.suspend(&named).await,
            manager.resume(&named).await.map(drop),
            manager.terminate(&named).await,
            manager.release(&named, true).await,
            manager.release(&named, false).await,
        ];
        for outcome in outcomes {
            assert_eq!(outcome.unwrap_err().to_string(), format!("no session `{id}`"));
        }
    }
    for create_if_missing in [false, true] {
        let request = attach_to(&session.sandbox_id, "thief");
        let request = AttachRequest { create_if_missing, ..request };
        assert_eq!(manager.attach(request).await.unwrap_err().code(), "not_found");
    }
    assert_eq!(state(&manager, &session.session_id).await, Some(Active));
    assert!(manager.get_session_by_client("thief").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn s3_while_a_command_runs_its_session_is_not_idle() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let mut spec = spec();
    spec.limits.max_wall_time_ms = None;
    let (session, sandbox) = manager.acquire(&spec, &options(), "c").await.unwrap();
    let by_id = manager.get_sandbox(&session.sandbox_id).await.unwrap().unwrap();
    run(&*sandbox, "sleep 1000").await.unwrap();
    assert_eq!(state(&manager, &session.session_id).await, Some(Active));
    run(&*by_id, "sleep 1000").await.unwrap();
    assert_eq!(state(&manager, &session.session_id).await, Some(Active));
    for _ in 0..10 {
        tokio::time::sleep(200 * SECOND).await;
        by_id.resource_usage().await.unwrap();
    }
    assert_eq!(state(&manager, &session.session_id).await, Some(Active), "each call touches it");
    tokio::time::sleep(361 * SECOND).await;
    assert_eq!(state(&manager, &session.session_id).await, None, "control");
    assert_eq!(manager.stats().await.timeout_destroys, 1);
}

#[tokio::test(start_paused = true)]
async fn s4_only_legal_moves_and_what_is_already_so_succeeds() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (session, _) = acquire(&manager, "c").await;
    let id = &session.session_id;
    manager.resume(&session).await.unwrap();
    manager.detach(&session).await.unwrap();
    manager.detach(&session).await.unwrap();
    assert_eq!(state(&manager, id).await, Some(Detached));
    manager.suspend(&session).await.unwrap();
    manager.suspend(&session).await.unwrap();
    assert_eq!(state(&manager, id).await, Some(Suspended));
    assert_eq!(manager.detach(&session).await.unwrap_err().code(), "conflict");
    assert_eq!(manager.release(&session, true).await.unwrap_err().code(), "conflict");
    assert_eq!(state(&manager, id).await, Some(Suspended), "a refusal changes nothing");
    assert_eq!(manager.resume(&session).await.unwrap().state, Active);
    manager.detach(&session).await.unwrap();
    assert_eq!(manager.resume(&session).await.unwrap().state, Active);
    manager.suspend(&session).await.unwrap();
    manager.terminate(&session).await.unwrap();
    manager.terminate(&session).await.unwrap();
    manager.release(&session, false).await.unwrap();
    for outcome in [
        manager.detach(&session).await,
        manager.suspend(&session).await,
        manager.resume(&session).await.map(drop),
        manager.release(&session, true).await,
    ] {
        assert_eq!(outcome.unwrap_err().code(), "session_ended");
    }
}

#[tokio::test(start_paused = true)]
async fn s5_a_kept_sandbox_waits_for_its_client_until_the_detach_timeout() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (session, sandbox) = acquire(&manager, "c").await;
    manager.release(&session, true).await.unwrap();
    assert_eq!(state(&manager, &session.session_id).await, Some(Detached));
    tokio::time::sleep(3_500 * SECOND).await;
    let (again, _) = acquire(&manager, "c").await;
    assert_eq!((&again.session_id, again.state), (&session.session_id, Active));
    run(&*sandbox, "true").await.expect("and the first handle is good as well");
    manager.release(&again, true).await.unwrap();
    tokio::time::sleep(3_661 * SECOND).await;
    assert_eq!((backend.counts().live, manager.stats().await.timeout_destroys), (0, 1));
    let (gone, _) = acquire(&manager, "c").await;
    assert_ne!(gone.sandbox_id, session.sandbox_id);
    manager.release(&gone, false).await.unwrap();
    assert_eq!(backend.counts().live, 0);
}

#[tokio::test(start_paused = true)]
async fn s6_attach_joins_resumes_or_creates_with_the_id_asked_for() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let id = SandboxId::from_string("mine");
    let missing = manager.attach(attach_to(&id, "c")).await.unwrap_err();
    assert_eq!(missing.to_string(), "no sandbox `mine`");
    let create = AttachRequest { create_if_missing: true, ..attach_to(&id, "c") };
    let created = manager.attach(create.clone()).await.unwrap();
    assert!(created.newly_created && created.session.sandbox_id == id);
    assert_eq!(created.capabilities.sandbox_id, "mine");
    let joined = manager.attach(create.clone()).await.unwrap();
    assert!(!joined.newly_created && joined.session.session_id != created.session.session_id);
    manager.terminate(&joined.session).await.unwrap();
    manager.suspend(&created.session).await.unwrap();
    let resumed = manager.attach(create.clone()).await.unwrap();
    assert_eq!(resumed.session.session_id, created.session.session_id);
    assert_eq!(resumed.session.state, Active);
    let sandbox = manager.get_sandbox(&id).await.unwrap().unwrap();
    run(&*sandbox, "true").await.unwrap();
    for bad in ["../up", "a/b", ""] {
        let sandbox_id = SandboxId::from_string(bad);
        let error = manager.attach(AttachRequest { sandbox_id, ..create.clone() }).await;
        assert_eq!(error.unwrap_err().code(), "invalid_spec", "{bad}");
    }
}

#[tokio::test(start_paused = true)]
async fn s6_those_that_wait_for_an_end_all_join_what_the_first_makes() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let id = SandboxId::from_string("mine");
    let request = AttachRequest { create_if_missing: true, ..attach_to(&id, "c") };
    let first = manager.attach(request.clone()).await.unwrap().session;
    backend.stall(Step::Destroy, When::Nth(1));
    let release = async {
        tokio::time::sleep(SECOND).await;
        backend.release(Step::Destroy);
    };
    let (ended, one, other, ()) = tokio::join!(
        manager.terminate(&first),
        manager.attach(request.clone()),
        manager.attach(request.clone()),
        release,
    );
    ended.unwrap();
    let (one, other) = (one.unwrap(), other.unwrap());
    assert_ne!(one.newly_created, other.newly_created, "one of them makes it");
    assert_eq!((one.session.sandbox_id, other.session.sandbox_id), (id.clone(), id));
}

#[tokio::test(start_paused = true)]
async fn s6_many_that_attach_at_once_make_one_sandbox() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let id = SandboxId::from_string("shared");
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let manager = manager.clone();
        let request = AttachRequest { create_if_missing: true, ..attach_to(&id, "c") };
        calls.spawn(async move { manager.attach(request).await.unwrap().newly_created });
    }
    let made = calls.join_all().await.into_iter().filter(|new| *new).count();
    assert_eq!((made, backend.counts().created, manager.stats().await.active_sessions), (1, 1, 16));
}

#[tokio::test(start_paused = true)]
async fn s7_suspend_stops_the_sandbox_and_resume_lets_it_go_on() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (session, sandbox) = acquire(&manager, "c").await;
    let running = Arc::clone(&sandbox);
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move { run(&*running, "sleep 10; echo done").await.unwrap() });
    tokio::time::sleep(5 * SECOND).await;
    manager.suspend(&session).await.unwrap();
    assert_eq!(run(&*sandbox, "true").await.unwrap_err().code(), "suspended");
    tokio::time::sleep(1_000 * SECOND).await;
    assert_eq!(tasks.len(), 1, "no time passes inside");
    manager.resume(&session).await.unwrap();
    let output = tasks.join_next().await.unwrap().unwrap();
    assert_eq!(output.stdout, b"done\n");
    run(&*sandbox, "true").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn s7_a_shared_sandbox_is_not_suspended_under_an_active_session() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (one, sandbox) = acquire(&manager, "c").await;
    let two = manager.attach(attach_to(&one.sandbox_id, "c")).await.unwrap().session;
    let error = manager.suspend(&one).await.unwrap_err();
    assert_eq!(error.code(), "conflict");
    assert!(error.to_string().contains(&two.session_id), "{error}");
    run(&*sandbox, "true").await.unwrap();
    manager.detach(&two).await.unwrap();
    manager.suspend(&one).await.unwrap();
    assert_eq!(state(&manager, &two.session_id).await, Some(Detached));

    backend.fail(Step::Resume, When::Nth(1));
    assert!(manager.resume(&one).await.is_err());
    assert_eq!(state(&manager, &one.session_id).await, Some(Suspended), "it failed and says so");
    manager.resume(&one).await.unwrap();
    backend.fail(Step::Suspend, When::Nth(1));
    assert!(manager.suspend(&one).await.is_err());
    run(&*sandbox, "true").await.expect("a suspend that failed leaves it running");
}

#[tokio::test(start_paused = true)]
async fn s8_detach_leaves_what_runs_running() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (session, sandbox) = acquire(&manager, "c").await;
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move { run(&*sandbox, "sleep 60; echo done").await.unwrap() });
    tokio::time::sleep(SECOND).await;
    manager.detach(&session).await.unwrap();
    tokio::time::sleep(SECOND).await;
    assert_eq!(backend.counts().running, 1);
    let again = manager.attach(attach_to(&session.sandbox_id, "c")).await.unwrap().session;
    assert_eq!((again.session_id, again.state), (session.session_id, Active));
    assert_eq!(tasks.join_next().await.unwrap().unwrap().stdout, b"done\n");
}

#[tokio::test(start_paused = true)]
async fn s9_the_sweeper_ends_what_timed_out_in_each_state_by_itself() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    for (timeout, state) in [(300, Active), (3_600, Detached), (86_400, Suspended)] {
        let (session, _) = acquire(&manager, "c").await;
        match state {
            Detached => manager.detach(&session).await.unwrap(),
            Suspended => manager.suspend(&session).await.unwrap(),
            Active | SessionState::Terminated => {}
        }
        tokio::time::sleep(Duration::from_secs(timeout - 1)).await;
        assert_eq!(self::state(&manager, &session.session_id).await, Some(state));
        tokio::time::sleep(62 * SECOND).await;
        assert_eq!(self::state(&manager, &session.session_id).await, None, "{state:?}");
        assert_eq!(backend.counts().live, 0);
    }
    assert_eq!(manager.stats().await.timeout_destroys, 3);
}

#[tokio::test(start_paused = true)]
async fn s9_a_session_touched_while_the_sweep_runs_survives_it() {
    let backend = FakeBackend::new();
    let config = SandboxManagerConfig { cleanup_interval: 86_400 * SECOND, ..poolless() };
    let manager = manager(&backend, config);
    let (touched, sandbox) = acquire(&manager, "c").await;
    let (other, _) = acquire(&manager, "c").await;
    // The sweep comes to `touched` only when what its sandbox does now is done.
    backend.stall(Step::Suspend, When::Nth(1));
    let second = manager.attach(attach_to(&touched.sandbox_id, "c")).await.unwrap().session;
    manager.detach(&second).await.unwrap();
    tokio::time::sleep(301 * SECOND).await;
    let suspending = manager.suspend(&touched);
    let sweeping = async {
        tokio::time::sleep(SECOND).await;
        manager.cleanup_expired().await.unwrap()
    };
    let touching = async {
        tokio::time::sleep(2 * SECOND).await;
        sandbox.resource_usage().await.unwrap();
        assert_eq!(state(&manager, &other.session_id).await, None, "the sweep has begun");
        backend.release(Step::Suspend);
    };
    let (suspended, ended, ()) = tokio::join!(suspending, sweeping, touching);
    suspended.unwrap();
    assert_eq!(ended, 1);
    assert_eq!(state(&manager, &touched.session_id).await, Some(Suspended));
}

#[tokio::test(start_paused = true)]
async fn s9_a_sandbox_that_died_takes_its_sessions_with_it() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let (session, _) = acquire(&manager, "c").await;
    manager.set_default_sandbox(Some(session.sandbox_id.clone())).await.unwrap();
    backend.crash(&session.sandbox_id);
    tokio::time::sleep(61 * SECOND).await;
    assert_eq!(state(&manager, &session.session_id).await, None);
    let stats = manager.stats().await;
    assert_eq!((stats.active_sandboxes, stats.timeout_destroys), (0, 0));
    assert_eq!(manager.get_default_sandbox().await, None);
}

#[tokio::test(start_paused = true)]
async fn s10_statistics_say_what_there_is() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    backend.stall(Step::Create, When::Nth(2));
    let (one, _) = acquire(&manager, "c").await;
    let release = async {
        tokio::time::sleep(3 * SECOND).await;
        backend.release(Step::Create);
    };
    let ((two, _), ()) = tokio::join!(acquire(&manager, "c"), release);
    manager.detach(&two).await.unwrap();
    let expected = SandboxManagerStats {
        sandboxes_created: 2,
        active_sandboxes: 2,
        active_sessions: 1,
        detached_sessions: 1,
        avg_creation_time_ms: 1_500.0,
        ..SandboxManagerStats::default()
    };
    assert_eq!(manager.stats().await, expected);
    manager.release(&one, false).await.unwrap();
    manager.release(&two, false).await.unwrap();
    let left = SandboxManagerStats {
        active_sandboxes: 0,
        active_sessions: 0,
        detached_sessions: 0,
        ..expected
    };
    assert_eq!(manager.stats().await, left);
}

#[tokio::test(start_paused = true)]
async fn s11_the_default_sandbox_is_used_when_none_is_named_and_unset_with_its_end() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    let none = SandboxId::from_string("none");
    assert!(manager.set_default_sandbox(Some(none)).await.is_err());
    let (session, _) = acquire(&manager, "c").await;
    let id = session.sandbox_id.clone();
    manager.set_default_sandbox(Some(id.clone())).await.unwrap();
    assert_eq!(manager.get_default_sandbox().await, Some(id.clone()));
    let (other, _) = acquire(&manager, "c").await;
    assert_eq!(other.sandbox_id, id);
    let (theirs, _) = acquire(&manager, "d").await;
    assert_ne!(theirs.sandbox_id, id, "it is not theirs");
    let network = SandboxSpec { network_enabled: true, ..spec() };
    let (different, _) = manager.acquire(&network, &options(), "c").await.unwrap();
    assert_ne!(different.sandbox_id, id, "it is not what was asked for");

    manager.release(&session, false).await.unwrap();
    assert_eq!(manager.get_default_sandbox().await, Some(id), "it lives");
    manager.release(&other, false).await.unwrap();
    assert_eq!(manager.get_default_sandbox().await, None);
    manager.set_default_sandbox(Some(theirs.sandbox_id)).await.unwrap();
    manager.set_default_sandbox(None).await.unwrap();
    assert_eq!(manager.get_default_sandbox().await, None);
}

#[tokio::test(start_paused = true)]
async fn calls_that_contradict_each_other_end_in_one_legal_state() {
    let backend = FakeBackend::new();
    let manager = manager(&backend, poolless());
    for round in 0..200_u32 {
        let (session, _) = acquire(&manager, "c").await;
        let mut calls = tokio::task::JoinSet::new();
        for i in 0..8 {
            let (manager, session) = (manager.clone(), session.clone());
            calls.spawn(async move {
                let outcome = match (i + round) % 4 {
                    0 => manager.suspend(&session).await,
                    1 => manager.resume(&session).await.map(drop),
                    2 => manager.detach(&session).await,
                    _ if i > 3 => manager.terminate(&session).await,
                    _ => manager.release(&session, true).await,
                };
                outcome.map_err(|error| error.code())
            });
        }
        for outcome in calls.join_all().await {
            assert!(matches!(outcome, Ok(()) | Err("conflict" | "session_ended")), "{outcome:?}");
        }
        assert_eq!(state(&manager, &session.session_id).await, None, "one of them ended it");
        assert_eq!(backend.counts().live, 0);
    }
}
