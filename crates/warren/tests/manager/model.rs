//! Random calls on the manager, against a model that is simple enough to be seen to be right.
//!
//! A state machine of proptest: calls, failures and the passing of time are drawn, and shrunk when
//! they fail; after each call the manager's answer, its statistics and its sessions are compared
//! with the model's. One call comes after the other here; `history` is about many at once.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};
use tokio::runtime::{Builder, Runtime};
use warren::SessionState::{Active, Detached, Suspended};
use warren::backend::FakeBackend;
use warren::backend::fake::{Step, When};
use warren::*;

use crate::support::*;

/// How many runs are made, and how many calls in each.
const RUNS: u32 = 275;
const CALLS: usize = 400;
const MAX: usize = 8;
const MIN_WARM: usize = 2;
const CLIENTS: [&str; 3] = ["ann", "bob", "cyd"];
/// No call draws more often.
const ROLLS: usize = 10;

/// One call: which one, and what it draws its arguments from.
#[derive(Debug, Clone)]
struct Call {
    kind: u8,
    rolls: [u16; ROLLS],
}

/// Which calls there may be. An argument is a roll, and what it means depends on what there is when
/// the call is made, so that each call may follow on each: ids are known from answers alone, and the
/// model that they are compared with learns them there ([`Model`]).
#[derive(Debug)]
struct Calls;

impl ReferenceStateMachine for Calls {
    /// How many calls were made.
    type State = usize;
    type Transition = Call;

    fn init_state() -> BoxedStrategy<usize> {
        Just(0).boxed()
    }

    fn transitions(_: &usize) -> BoxedStrategy<Call> {
        let rolls = any::<[u16; ROLLS]>();
        (0..100_u8, rolls).prop_map(|(kind, rolls)| Call { kind, rolls }).boxed()
    }

    fn apply(made: usize, _: &Call) -> usize {
        made + 1
    }
}

/// What the arguments of a call are drawn from.
#[derive(Debug, Default)]
struct Dice(std::collections::VecDeque<u16>);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        usize::from(self.0.pop_front().expect("a call draws no more than its rolls")) % n
    }

    /// Draws what is so now and then; it shrinks to what is not.
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }
}

/// A session of the model.
#[derive(Debug, Clone)]
struct Session {
    shown: SandboxSession,
    state: SessionState,
    kept: bool,
    touched: Duration,
}

/// A sandbox of the model.
#[derive(Debug, Clone)]
struct Owned {
    owner: &'static str,
    spec: usize,
    suspended: bool,
    used: bool,
    /// In the order in which they began.
    sessions: Vec<String>,
}

#[derive(Debug, Default)]
struct Model {
    now: Duration,
    sandboxes: BTreeMap<SandboxId, Owned>,
    sessions: BTreeMap<String, Session>,
    ended: Vec<SandboxSession>,
    /// Sandboxes whose destruction failed.
    undead: BTreeMap<SandboxId, &'static str>,
    default: Option<SandboxId>,
    hits: u64,
    misses: u64,
    timeouts: u64,
}

impl Model {
    fn in_state(&self, state: SessionState) -> u64 {
        self.sessions.values().filter(|session| session.state == state).count() as u64
    }

    fn end(&mut self, id: &str) -> Option<SandboxId> {
        let session = self.sessions.remove(id).unwrap();
        self.ended.push(session.shown.clone());
        let sandbox = self.sandboxes.get_mut(&session.shown.sandbox_id).unwrap();
        sandbox.sessions.retain(|other| other != id);
        sandbox.sessions.is_empty().then(|| session.shown.sandbox_id.clone())
    }

    /// Ends a sandbox whose last session has ended; tells whether its destruction fails.
    fn destroy(&mut self, id: &SandboxId, fails: bool, timed_out: bool) {
        let owned = self.sandboxes.remove(id).unwrap();
        if self.default.as_ref() == Some(id) {
            self.default = None;
        }
        if fails {
            self.undead.insert(id.clone(), owned.owner);
        }
        self.timeouts += u64::from(timed_out);
    }

    fn wake(&mut self, id: &SandboxId) {
        let now = self.now;
        let sandbox = self.sandboxes.get_mut(id).unwrap();
        sandbox.suspended = false;
        for session in &sandbox.sessions {
            let session = self.sessions.get_mut(session).unwrap();
            if session.state == Suspended {
                session.state = Active;
                session.kept = false;
                session.touched = now;
            }
        }
    }

    fn expired(&self) -> Vec<String> {
        let expired = |session: &&Session| {
            let timeouts = &session.shown.timeouts;
            let allowed = match session.state {
                Active => timeouts.idle_timeout,
                Detached => timeouts.detach_timeout,
                Suspended | SessionState::Terminated => timeouts.suspend_timeout,
            };
            self.now - session.touched > allowed
        };
        let expired = self.sessions.values().filter(expired);
        expired.map(|session| session.shown.session_id.clone()).collect()
    }
}

struct World {
    backend: FakeBackend,
    manager: DefaultSandboxManager,
    dice: Dice,
    model: Model,
    specs: Vec<SandboxSpec>,
    began: tokio::time::Instant,
}

impl World {
    fn new() -> Self {
        let backend = FakeBackend::new();
        backend.set_unclaimable(|spec| spec.network_enabled);
        let config = SandboxManagerConfig {
            max_sandboxes: u32::try_from(MAX).unwrap(),
            // Sweeps are made by hand here, so that the model knows when.
            cleanup_interval: Duration::from_secs(1 << 40),
            pool: PoolConfig {
                min_warm: u32::try_from(MIN_WARM).unwrap(),
                max_warm: u32::try_from(MIN_WARM).unwrap(),
                warm_ttl: Duration::from_secs(1 << 40),
                ..PoolConfig::default()
            },
            default_timeouts: SessionTimeouts {
                idle_timeout: Duration::from_secs(20),
                detach_timeout: Duration::from_secs(40),
                suspend_timeout: Duration::from_secs(80),
            },
        };
        let labels = vec![("kind".to_owned(), "labelled".to_owned())];
        let specs = vec![
            spec(),
            SandboxSpec { labels, ..spec() },
            SandboxSpec { network_enabled: true, ..spec() },
        ];
        Self {
            manager: manager(&backend, config),
            backend,
            dice: Dice::default(),
            model: Model::default(),
            specs,
            began: tokio::time::Instant::now(),
        }
    }

    /// Lets the pool come to rest: as full as it may be in what room there is.
    async fn settle(&mut self) {
        let room = MAX - self.model.sandboxes.len() - self.model.undead.len();
        let warm = MIN_WARM.min(room) as u64;
        let manager = &self.manager;
        until("the pool rests", async || manager.stats().await.pool_size == warm).await;
        self.model.now = self.began.elapsed();
    }

    fn client(&mut self) -> &'static str {
        CLIENTS[self.dice.below(CLIENTS.len())]
    }

    /// Draws a session: one that lives, that has ended, that was never, or one of somebody else's.
    fn session(&mut self) -> SandboxSession {
        let (live, ended) = (self.model.sessions.len(), self.model.ended.len());
        match self.dice.below(20) {
            0 if ended > 0 => self.model.ended[ended - 1 - self.dice.below(ended.min(9))].clone(),
            1 => SandboxSession::new(SandboxId::from_string("sbx-never"), "ann"),
            2 if live > 0 => {
                let session = self.model.sessions.values().nth(self.dice.below(live)).unwrap();
                SandboxSession { client_id: "eve".into(), ..session.shown.clone() }
            }
            _ if live > 0 => {
                let nth = self.dice.below(live);
                self.model.sessions.values().nth(nth).unwrap().shown.clone()
            }
            _ => SandboxSession::new(SandboxId::from_string("sbx-never"), "ann"),
        }
    }

    fn fail(&mut self, step: Step, odds: usize) -> bool {
        let fails = self.dice.one_in(odds);
        if fails {
            self.backend.fail(step, When::Nth(1));
        }
        fails
    }

    async fn call(&mut self, call: &Call) -> &'static str {
        self.dice = Dice(call.rolls.into());
        match call.kind {
            0..=29 => self.acquire().await,
            30..=39 => self.attach().await,
            40..=47 => self.move_one("detach").await,
            48..=54 => self.move_one("suspend").await,
            55..=60 => self.move_one("resume").await,
            61..=66 => self.move_one("keep").await,
            67..=76 => self.move_one("end").await,
            77..=83 => self.exec().await,
            84..=86 => self.default().await,
            87..=93 => self.pass_time().await,
            _ => self.sweep().await,
        }
    }

    /// Notes that a sandbox was joined, by rule S6: with a session that rests, or a new one.
    fn note_join(&mut self, id: &SandboxId, session: &SandboxSession, kept: Option<&str>) {
        let model = &mut self.model;
        let resting = |state| {
            let there = model.sandboxes[id].sessions.iter().rev();
            there.map(|id| &model.sessions[id]).find(|session| session.state == state)
        };
        let expected = match kept {
            Some(kept) => Some(kept.to_owned()),
            None => resting(Suspended).or(resting(Detached)).map(|s| s.shown.session_id.clone()),
        };
        match expected {
            Some(expected) => {
                assert_eq!(session.session_id, expected, "it goes on with what rests")
            }
            None => {
                assert!(!model.sessions.contains_key(&session.session_id), "a new session");
                let sandbox = model.sandboxes.get_mut(id).unwrap();
                sandbox.sessions.push(session.session_id.clone());
            }
        }
        if model.sandboxes[id].suspended {
            model.wake(id);
        }
        let (shown, touched) = (session.clone(), model.now);
        let session = Session { shown, state: Active, kept: false, touched };
        model.sessions.insert(session.shown.session_id.clone(), session);
    }

    fn note_new(&mut self, owner: &'static str, spec: usize, session: &SandboxSession) {
        let sessions = vec![session.session_id.clone()];
        let owned = Owned { owner, spec, suspended: false, used: false, sessions };
        assert!(self.model.sandboxes.insert(session.sandbox_id.clone(), owned).is_none());
        let (shown, touched) = (session.clone(), self.model.now);
        let session = Session { shown, state: Active, kept: false, touched };
        self.model.sessions.insert(session.shown.session_id.clone(), session);
    }

    async fn acquire(&mut self) -> &'static str {
        let client = self.client();
        let spec = self.dice.below(self.specs.len());
        let mut options = options();
        options.use_pool = self.dice.one_in(2);
        options.require_fresh = self.dice.one_in(6);
        if self.dice.one_in(8) {
            options.required_labels.insert("kind".into(), "labelled".into());
        }
        if self.dice.one_in(8) {
            options.required_capabilities.network = Some(self.dice.one_in(2));
        }
        if self.dice.one_in(4) && !self.model.sandboxes.is_empty() {
            let nth = self.dice.below(self.model.sandboxes.len());
            options.preferred_id = self.model.sandboxes.keys().nth(nth).cloned();
        }
        let create_fails = self.fail(Step::Create, 12);
        let outcome = self.manager.acquire(&self.specs[spec], &options, client).await;
        self.backend.heal(Step::Create);
        let fits = |owned: &Owned| {
            let has = &self.specs[owned.spec];
            let labels = options.required_labels.is_empty() || !has.labels.is_empty();
            let network = options.required_capabilities.network;
            labels
                && network.is_none_or(|wanted| wanted == has.network_enabled)
                && !(options.require_fresh && owned.used)
        };
        let model = &self.model;
        // The first of these that applies is what has to have happened.
        if let Some(id) = &options.preferred_id {
            let owned = &model.sandboxes[id];
            if owned.owner != client {
                assert_eq!(outcome.unwrap_err().code(), "not_found");
                return "acquire: not theirs";
            }
            if fits(owned) {
                let (session, _) = outcome.unwrap();
                assert_eq!(session.sandbox_id, *id);
                self.note_join(&id.clone(), &session, None);
                return "acquire: preferred";
            }
        }
        let same = |owned: &Owned| owned.owner == client && owned.spec == spec && fits(owned);
        if options.preferred_id.is_none()
            && let Some(id) = model.default.clone().filter(|id| same(&model.sandboxes[id]))
        {
            let (session, _) = outcome.unwrap();
            assert_eq!(session.sandbox_id, id, "the default");
            self.note_join(&id, &session, None);
            return "acquire: default";
        }
        let kept: Vec<_> = model
            .sessions
            .values()
            .filter(|session| {
                let sandbox = &model.sandboxes[&session.shown.sandbox_id];
                session.kept && session.state == Detached && same(sandbox) && !options.require_fresh
            })
            .map(|session| session.shown.session_id.clone())
            .collect();
        if !kept.is_empty() {
            let (session, _) = outcome.unwrap();
            assert!(kept.contains(&session.session_id), "a kept one");
            self.note_join(&session.sandbox_id.clone(), &session, Some(&session.session_id));
            return "acquire: kept";
        }
        let wanted = &self.specs[spec];
        let labels = options.required_labels.is_empty() || !wanted.labels.is_empty();
        if !labels {
            assert_eq!(outcome.unwrap_err().code(), "no_match");
            return "acquire: no such label";
        }
        let lacks =
            options.required_capabilities.network.is_some_and(|n| n != wanted.network_enabled);
        let room = MAX - model.sandboxes.len() - model.undead.len();
        let warm = MIN_WARM.min(room);
        if options.use_pool {
            let claimable = !wanted.network_enabled && warm > 0;
            if claimable && !lacks {
                let (session, _) = outcome.unwrap();
                self.model.hits += 1;
                self.note_new(client, spec, &session);
                return "acquire: warm";
            }
            self.model.misses += 1;
        }
        let code = match () {
            () if room == 0 => "capacity",
            () if create_fails => "step_failed",
            () if lacks => "no_match",
            () => {
                let (session, _) = outcome.unwrap();
                self.note_new(client, spec, &session);
                return "acquire: new";
            }
        };
        let error = outcome.unwrap_err();
        // The pool may have met the failure that was meant for this call.
        if create_fails && error.code() != code {
            assert_eq!(error.code(), "no_match", "{error}");
        } else {
            assert_eq!(error.code(), code, "{error}");
        }
        "acquire: refused"
    }

    async fn attach(&mut self) -> &'static str {
        let client = self.client();
        let known = self.model.sandboxes.len();
        let id = match self.dice.below(8) {
            0 | 1 => SandboxId::from_string(format!("chosen-{}", self.dice.below(6))),
            2 if !self.model.undead.is_empty() => self.model.undead.keys().next().unwrap().clone(),
            _ if known > 0 => {
                let nth = self.dice.below(known);
                self.model.sandboxes.keys().nth(nth).unwrap().clone()
            }
            _ => SandboxId::from_string("sbx-never"),
        };
        let create_if_missing = self.dice.one_in(2);
        let resume_fails = self.fail(Step::Resume, 6);
        let request = AttachRequest { create_if_missing, ..attach_to(&id, client) };
        let outcome = self.manager.attach(request).await;
        self.backend.heal(Step::Resume);
        match self.model.undead.get(&id) {
            Some(owner) if *owner == client => drop(self.model.undead.remove(&id)),
            Some(_) => {
                assert_eq!(outcome.unwrap_err().code(), "not_found");
                return "attach: not theirs";
            }
            None => {}
        }
        let room = MAX - self.model.sandboxes.len() - self.model.undead.len();
        match self.model.sandboxes.get(&id) {
            Some(owned) if owned.owner != client => {
                assert_eq!(outcome.unwrap_err().code(), "not_found");
                "attach: not theirs"
            }
            Some(owned) if owned.suspended && resume_fails => {
                assert_eq!(outcome.unwrap_err().code(), "step_failed");
                "attach: could not resume"
            }
            Some(_) => {
                let joined = outcome.unwrap();
                assert!(!joined.newly_created && joined.session.sandbox_id == id);
                self.note_join(&id, &joined.session, None);
                "attach: joined"
            }
            None if !create_if_missing => {
                assert_eq!(outcome.unwrap_err().code(), "not_found");
                "attach: to nothing"
            }
            None if room == 0 => {
                assert_eq!(outcome.unwrap_err().code(), "capacity");
                "attach: no room"
            }
            None => {
                let joined = outcome.unwrap();
                assert!(joined.newly_created && joined.session.sandbox_id == id);
                self.note_new(client, 0, &joined.session);
                "attach: created"
            }
        }
    }

    async fn move_one(&mut self, wanted: &'static str) -> &'static str {
        let session = self.session();
        let (suspend_fails, resume_fails, destroy_fails) = match wanted {
            "suspend" => (self.fail(Step::Suspend, 6), false, false),
            "resume" => (false, self.fail(Step::Resume, 6), false),
            "end" => (false, false, self.fail(Step::Destroy, 8)),
            _ => (false, false, false),
        };
        let outcome = match wanted {
            "detach" => self.manager.detach(&session).await,
            "suspend" => self.manager.suspend(&session).await,
            "resume" => self.manager.resume(&session).await.map(|s| assert_eq!(s.state, Active)),
            "keep" => self.manager.release(&session, true).await,
            _ if self.dice.one_in(2) => self.manager.terminate(&session).await,
            _ => self.manager.release(&session, false).await,
        };
        for step in [Step::Suspend, Step::Resume, Step::Destroy] {
            self.backend.heal(step);
        }
        let outcome = outcome.map_err(|error| error.code());
        let model = &mut self.model;
        let id = &session.session_id;
        let known = model.sessions.get(id).filter(|s| s.shown.client_id == session.client_id);
        let Some(known) = known.cloned() else {
            let ended = model.ended.iter().any(|ended| ended.session_id == *id);
            let expected = match (ended, wanted) {
                (true, "end") => Ok(()),
                (true, _) => Err("session_ended"),
                (false, _) => Err("not_found"),
            };
            assert_eq!(outcome, expected, "{wanted}");
            return "move: unknown";
        };
        let sandbox_id = known.shown.sandbox_id.clone();
        let is_suspended = model.sandboxes[&sandbox_id].suspended;
        let other_active = model.sandboxes[&sandbox_id]
            .sessions
            .iter()
            .any(|other| other != id && model.sessions[other].state == Active);
        let now = model.now;
        let held = model.sessions.get_mut(id).unwrap();
        let mut enter = |state, kept| {
            (held.state, held.kept, held.touched) = (state, kept, now);
        };
        match (wanted, known.state) {
            ("end", _) => {
                let last = model.end(id);
                assert_eq!(outcome.is_err(), last.is_some() && destroy_fails);
                if let Some(last) = last {
                    model.destroy(&last, destroy_fails, false);
                }
                "end"
            }
            ("detach", Detached) | ("suspend", Suspended) | ("resume", Active) => {
                assert_eq!(outcome, Ok(()));
                "move: so already"
            }
            ("keep", Detached) => {
                assert_eq!(outcome, Ok(()));
                held.kept = true;
                "move: kept after all"
            }
            ("detach" | "keep", Active) => {
                assert_eq!(outcome, Ok(()));
                enter(Detached, wanted == "keep");
                "move: detached"
            }
            ("detach" | "keep", _) => {
                assert_eq!(outcome, Err("conflict"));
                "move: not legal"
            }
            ("suspend", _) if other_active => {
                assert_eq!(outcome, Err("conflict"));
                "suspend: shared"
            }
            ("suspend", _) if !is_suspended && suspend_fails => {
                assert_eq!(outcome, Err("step_failed"));
                "suspend: failed"
            }
            ("suspend", _) => {
                assert_eq!(outcome, Ok(()));
                enter(Suspended, known.kept);
                model.sandboxes.get_mut(&sandbox_id).unwrap().suspended = true;
                "suspend"
            }
            (_, _) if is_suspended && resume_fails => {
                assert_eq!(outcome, Err("step_failed"));
                "resume: failed"
            }
            (_, _) => {
                assert_eq!(outcome, Ok(()));
                enter(Active, false);
                if is_suspended {
                    model.wake(&sandbox_id);
                }
                "resume"
            }
        }
    }

    async fn exec(&mut self) -> &'static str {
        let known = self.model.sandboxes.len();
        if known == 0 {
            let none = SandboxId::from_string("sbx-never");
            assert!(self.manager.get_sandbox(&none).await.unwrap().is_none());
            return "exec: nowhere";
        }
        let nth = self.dice.below(known);
        let id = self.model.sandboxes.keys().nth(nth).unwrap().clone();
        let sandbox = self.manager.get_sandbox(&id).await.unwrap().unwrap();
        let outcome = run(&*sandbox, "sleep 1").await;
        self.model.now = self.began.elapsed();
        let model = &mut self.model;
        let owned = model.sandboxes.get_mut(&id).unwrap();
        if owned.suspended {
            assert_eq!(outcome.unwrap_err().code(), "suspended");
            return "exec: suspended";
        }
        outcome.unwrap();
        owned.used = true;
        for session in &owned.sessions {
            model.sessions.get_mut(session).unwrap().touched = model.now;
        }
        "exec"
    }

    async fn default(&mut self) -> &'static str {
        let known = self.model.sandboxes.len();
        let id = match self.dice.below(4) {
            0 => None,
            1 => Some(SandboxId::from_string("sbx-never")),
            _ if known > 0 => {
                let nth = self.dice.below(known);
                self.model.sandboxes.keys().nth(nth).cloned()
            }
            _ => None,
        };
        let outcome = self.manager.set_default_sandbox(id.clone()).await;
        if id.as_ref().is_some_and(|id| !self.model.sandboxes.contains_key(id)) {
            assert_eq!(outcome.unwrap_err().code(), "not_found");
            return "default: nothing";
        }
        outcome.unwrap();
        self.model.default = id;
        "default"
    }

    async fn pass_time(&mut self) -> &'static str {
        let seconds = self.dice.below(30) as u64;
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        self.model.now = self.began.elapsed();
        "time"
    }

    async fn sweep(&mut self) -> &'static str {
        self.model.now = self.began.elapsed();
        let expired = self.model.expired();
        let ended = self.manager.cleanup_expired().await.unwrap();
        assert_eq!(ended, expired.len() as u64, "{expired:?}");
        self.model.undead.clear();
        for id in expired {
            if let Some(last) = self.model.end(&id) {
                self.model.destroy(&last, false, true);
            }
        }
        "sweep"
    }

    async fn compare(&self) {
        let model = &self.model;
        let counts = self.backend.counts();
        let stats = self.manager.stats().await;
        let room = MAX - model.sandboxes.len() - model.undead.len();
        let claims = model.hits + model.misses;
        let expected = SandboxManagerStats {
            sandboxes_created: counts.created,
            active_sandboxes: (model.sandboxes.len() + model.undead.len()) as u64,
            active_sessions: model.in_state(Active),
            detached_sessions: model.in_state(Detached),
            pool_size: MIN_WARM.min(room) as u64,
            pool_hit_rate: if claims == 0 { 0.0 } else { model.hits as f64 / claims as f64 },
            avg_creation_time_ms: 0.0,
            timeout_destroys: model.timeouts,
        };
        assert_eq!(stats, expected);
        assert_eq!(counts.live, stats.active_sandboxes + stats.pool_size);
        assert!(counts.most_live <= MAX as u64);
        assert_eq!(counts.wrong_claims, 0);
        assert_eq!(self.manager.get_default_sandbox().await, model.default);
        let shown = self.manager.list_sessions().await.unwrap();
        assert_eq!(shown.len(), model.sessions.len());
        for session in shown {
            let known = &model.sessions[&session.session_id];
            assert_eq!(session.state, known.state);
            assert_eq!(session.sandbox_id, known.shown.sandbox_id);
        }
    }
}

/// How often each kind of outcome was met.
static MET: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// The manager, with the model that it is compared with.
struct Compared {
    runtime: Runtime,
    world: World,
}

impl StateMachineTest for Compared {
    type SystemUnderTest = Self;
    type Reference = Calls;

    fn init_test(_: &usize) -> Self {
        let mut runtime = Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().unwrap();
        let world = runtime.block_on(async {
            let mut world = World::new();
            world.settle().await;
            world
        });
        Self { runtime, world }
    }

    fn apply(mut this: Self, _: &usize, call: Call) -> Self {
        let world = &mut this.world;
        let met = this.runtime.block_on(async {
            world.settle().await;
            let met = world.call(&call).await;
            world.settle().await;
            met
        });
        *MET.lock().unwrap_or_else(PoisonError::into_inner).entry(met).or_default() += 1;
        this
    }

    fn check_invariants(this: &Self, _: &usize) {
        this.runtime.block_on(this.world.compare());
    }

    fn teardown(this: Self, _: usize) {
        this.runtime.block_on(this.world.manager.shutdown(Shutdown::StopAll));
        assert_eq!(this.world.backend.counts().live, 0);
    }
}

#[test]
fn s10_the_manager_does_what_its_model_does() {
    let config = Config { cases: RUNS, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new(config.clone());
    let outcome = runner.run(&Calls::sequential_strategy(CALLS), |(first, calls, seen)| {
        Compared::test_sequential(config.clone(), first, calls, seen);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    let met = MET.lock().unwrap_or_else(PoisonError::into_inner);
    let total: u64 = met.values().sum();
    eprintln!("{RUNS} runs, {total} calls");
    assert!(total >= 100_000, "{total} calls");
    // Each kind of outcome was met often enough to mean something.
    assert!(met.values().all(|count| *count >= 20) && met.len() >= 26, "{met:#?}");
}
