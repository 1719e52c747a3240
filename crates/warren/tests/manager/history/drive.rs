//! Has clients do what a program says, all at once, and writes down what they see.
//!
//! One thread and a paused clock: who runs when is decided by the pauses that the program and its
//! pace say, so that the same program gives the same history but for the order of random ids.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warren::backend::FakeBackend;
use warren::backend::fake::{Step, When};
use warren::*;

use super::program::{Deed, Pause, Program, What};
use super::search::{Event, History};
use super::spec::{Acquire, Answer, CHOSEN, Call, Fault, NEVER, Op, RESTS, Rules, Shown, Wanted};
use crate::support::*;

const MAX: usize = 4;
const WARM: usize = 2;
/// Two tasks in three share a client; to somebody called eve nothing belongs.
const CLIENTS: [&str; 3] = ["ann", "bob", "eve"];
const EVE: u8 = 2;

/// Puts something between the clients and the manager, to see it found out.
pub(super) type Wrap<'a> = &'a dyn Fn(DefaultSandboxManager) -> Arc<dyn SandboxManager>;

/// What the clients share.
struct Stage {
    manager: Arc<dyn SandboxManager>,
    backend: FakeBackend,
    began: Instant,
    pooled: bool,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    history: History,
    sandboxes: BTreeMap<SandboxId, u8>,
    sessions: BTreeMap<String, u8>,
    /// Every session that a client was given, and the sandbox as it was given with it.
    given: Vec<(SandboxSession, Option<Arc<dyn Sandbox>>)>,
}

impl Seen {
    fn sandbox(&mut self, id: &SandboxId) -> u8 {
        let next = NEVER + 1 + u8::try_from(self.sandboxes.len()).unwrap() - CHOSEN;
        *self.sandboxes.entry(id.clone()).or_insert(next)
    }

    fn session(&mut self, id: &str) -> u8 {
        let next = u8::try_from(self.sessions.len()).unwrap();
        *self.sessions.entry(id.to_owned()).or_insert(next)
    }

    fn pick(&self, pick: u8) -> Option<(SandboxSession, Option<Arc<dyn Sandbox>>)> {
        let last = self.given.len().checked_sub(1)?;
        // Rather one of the last: they are more likely to live.
        let back = usize::from(pick) % self.given.len().min(6);
        Some(self.given[last - back].clone())
    }
}

fn chosen(no: u8) -> SandboxId {
    SandboxId::from_string(format!("chosen-{no}"))
}

fn specs() -> [SandboxSpec; 3] {
    let labels = vec![("kind".to_owned(), "labelled".to_owned())];
    [spec(), SandboxSpec { labels, ..spec() }, SandboxSpec { network_enabled: true, ..spec() }]
}

fn step(fault: Fault) -> Step {
    match fault {
        Fault::Create => Step::Create,
        Fault::Suspend => Step::Suspend,
        Fault::Resume => Step::Resume,
        Fault::Destroy => Step::Destroy,
        Fault::Exec => Step::Exec,
    }
}

fn refused(error: SandboxError) -> Answer {
    Answer::Refused(error.code())
}

impl Stage {
    fn now(&self) -> u32 {
        u32::try_from(self.began.elapsed().as_millis()).unwrap()
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap()
    }

    /// Makes a call, and notes when it began and what it answered.
    async fn note(&self, call: Call, doing: impl Future<Output = Answer>) {
        let from = self.now();
        let no = {
            let history = &mut self.seen().history;
            let no = history.ops.len();
            let answer = Answer::Done;
            history.ops.push(Op { no: u8::try_from(no).unwrap(), call, answer, from, to: from });
            history.events.push(Event::Begins(no));
            no
        };
        let answer = doing.await;
        let to = self.now();
        let history = &mut self.seen().history;
        history.events.push(Event::Answers(no));
        let op = &mut history.ops[no];
        (op.answer, op.to) = (answer, to);
    }

    fn given(&self, session: SandboxSession, held: Option<Arc<dyn Sandbox>>, new: bool) -> Answer {
        let mut seen = self.seen();
        let sandbox = seen.sandbox(&session.sandbox_id);
        let no = seen.session(&session.session_id);
        seen.given.push((session, held));
        Answer::Joined { session: no, sandbox, new }
    }

    async fn acquire(&self, asked: Acquire, preferred_id: Option<SandboxId>) {
        let mut options = SandboxSelectionOptions {
            preferred_id,
            use_pool: asked.pool,
            require_fresh: asked.fresh,
            ..options()
        };
        if asked.labelled {
            options.required_labels.insert("kind".into(), "labelled".into());
        }
        options.required_capabilities.network = asked.network;
        let (spec, client) = (specs()[usize::from(asked.spec)].clone(), usize::from(asked.client));
        self.note(Call::Acquire(asked), async {
            match self.manager.acquire(&spec, &options, CLIENTS[client]).await {
                Ok((session, sandbox)) => self.given(session, Some(sandbox), false),
                Err(error) => refused(error),
            }
        })
        .await;
    }

    async fn attach(&self, client: u8, id: SandboxId, create: bool) {
        let sandbox = self.seen().sandbox(&id);
        let client_id = CLIENTS[usize::from(client)];
        let request = AttachRequest { create_if_missing: create, ..attach_to(&id, client_id) };
        self.note(Call::Attach { client, sandbox, create }, async {
            match self.manager.attach(request).await {
                Ok(joined) => self.given(joined.session, None, joined.newly_created),
                Err(error) => refused(error),
            }
        })
        .await;
    }

    async fn move_session(&self, session: SandboxSession, wanted: Wanted) {
        let manager = &self.manager;
        let client = CLIENTS.iter().position(|client| *client == session.client_id);
        let client = client.map_or(EVE, |client| u8::try_from(client).unwrap());
        let no = self.seen().session(&session.session_id);
        self.note(Call::Move { client, session: no, wanted }, async {
            let outcome = match wanted {
                Wanted::Detach => manager.detach(&session).await,
                Wanted::Keep => manager.release(&session, true).await,
                Wanted::Suspend => manager.suspend(&session).await,
                Wanted::Resume => match manager.resume(&session).await {
                    Ok(resumed) if resumed.state != SessionState::Active => {
                        return Answer::Refused("not active");
                    }
                    other => other.map(drop),
                },
                Wanted::End if self.now().is_multiple_of(2) => manager.terminate(&session).await,
                Wanted::End => manager.release(&session, false).await,
            };
            outcome.map_or_else(refused, |()| Answer::Done)
        })
        .await;
    }

    fn shown(&self, session: Option<SandboxSession>) -> Answer {
        Answer::Session(session.map(|session| {
            let no = self.seen().session(&session.session_id);
            (no, session.state)
        }))
    }

    async fn list(&self) {
        self.note(Call::List, async {
            let all = self.manager.list_sessions().await.unwrap();
            let mut seen = self.seen();
            let mut number = |session: SandboxSession| {
                let sandbox = seen.sandbox(&session.sandbox_id);
                (seen.session(&session.session_id), (sandbox, session.state))
            };
            Answer::Sessions(all.into_iter().map(&mut number).collect())
        })
        .await;
    }

    async fn stats(&self) {
        self.note(Call::Stats, async {
            let stats = self.manager.stats().await;
            Answer::Stats(Shown {
                created: if self.pooled { 0 } else { stats.sandboxes_created },
                sandboxes: stats.active_sandboxes,
                active: stats.active_sessions,
                detached: stats.detached_sessions,
                hit_rate: stats.pool_hit_rate,
                timeouts: stats.timeout_destroys,
            })
        })
        .await;
    }

    async fn default(&self) {
        self.note(Call::GetDefault, async {
            let default = self.manager.get_default_sandbox().await;
            Answer::Default(default.map(|id| self.seen().sandbox(&id)))
        })
        .await;
    }

    async fn sweep(&self) {
        self.note(Call::Sweep, async {
            self.manager.cleanup_expired().await.map_or_else(refused, Answer::Count)
        })
        .await;
    }

    async fn play(&self, client: u8, what: What) {
        let pick = |pick| self.seen().pick(pick);
        let made_up = || {
            // Nobody was ever given this one.
            let mut session = SandboxSession::new(SandboxId::from_string("never"), "ann");
            session.session_id = "sess-never".to_owned();
            session
        };
        match what {
            What::Acquire { spec, pool, fresh, labelled, network } => {
                let preferred = None;
                let asked = Acquire { client, spec, pool, fresh, labelled, network, preferred };
                self.acquire(asked, None).await;
            }
            What::Prefer { pick: no, fresh } => {
                let id = pick(no).map_or_else(|| chosen(0), |(session, _)| session.sandbox_id);
                let preferred = Some(self.seen().sandbox(&id));
                let (pool, labelled, network) = (no % 2 == 0, no % 16 == 3, None);
                let spec = no % 3;
                let asked = Acquire { client, spec, pool, fresh, labelled, network, preferred };
                self.acquire(asked, Some(id)).await;
            }
            What::AttachChosen { id, create } => self.attach(client, chosen(id), create).await,
            What::Attach { pick: no, create, foreign } => {
                let (id, owner) = match pick(no) {
                    Some((session, _)) => (session.sandbox_id, session.client_id),
                    None => (chosen(0), CLIENTS[0].to_owned()),
                };
                let owner = CLIENTS.iter().position(|client| *client == owner).unwrap();
                // An id that the manager made is not to be made again: it was made once.
                let create = create && id.as_str().starts_with("chosen");
                let client = if foreign { EVE } else { u8::try_from(owner).unwrap() };
                self.attach(client, id, create).await;
            }
            What::Move { pick: no, wanted, foreign } => {
                let mut session = pick(no).map_or_else(made_up, |(session, _)| session);
                if foreign {
                    session.client_id = CLIENTS[usize::from(EVE)].to_owned();
                }
                self.move_session(session, wanted).await;
            }
            What::Exec { pick: no } => {
                let Some((session, Some(held))) = pick(no) else { return };
                let (no, sandbox) = {
                    let mut seen = self.seen();
                    (seen.session(&session.session_id), seen.sandbox(&session.sandbox_id))
                };
                self.note(Call::Exec { session: no, sandbox }, async {
                    run(&*held, "true").await.map_or_else(refused, |_| Answer::Done)
                })
                .await;
            }
            What::SetDefault { pick: no } => {
                let id = no.and_then(pick).map(|(session, _)| session.sandbox_id);
                let sandbox = id.as_ref().map(|id| self.seen().sandbox(id));
                self.note(Call::SetDefault(sandbox), async {
                    let outcome = self.manager.set_default_sandbox(id).await;
                    outcome.map_or_else(refused, |()| Answer::Done)
                })
                .await;
            }
            What::GetDefault => self.default().await,
            What::Sweep => self.sweep().await,
            What::List => self.list().await,
            What::Stats => self.stats().await,
            What::GetSession { pick: no } => {
                let session = pick(no).map_or_else(made_up, |(session, _)| session);
                let no = self.seen().session(&session.session_id);
                self.note(Call::GetSession(no), async {
                    self.shown(self.manager.get_session(&session.session_id).await.unwrap())
                })
                .await;
            }
            What::BySandbox { pick: no } => {
                let id = pick(no).map_or_else(|| chosen(0), |(session, _)| session.sandbox_id);
                let sandbox = self.seen().sandbox(&id);
                self.note(Call::BySandbox(sandbox), async {
                    self.shown(self.manager.get_session_by_sandbox(&id).await.unwrap())
                })
                .await;
            }
            What::ByClient => {
                self.note(Call::ByClient(client), async {
                    let name = CLIENTS[usize::from(client)];
                    self.shown(self.manager.get_session_by_client(name).await.unwrap())
                })
                .await;
            }
            What::Arm(fault) => {
                self.note(Call::Arm(fault), async {
                    self.backend.fail(step(fault), When::Nth(1));
                    Answer::Done
                })
                .await;
            }
            What::Wait { seconds } => {
                self.note(Call::Wait, async {
                    tokio::time::sleep(Duration::from_secs(seconds.into())).await;
                    Answer::Done
                })
                .await;
            }
        }
    }
}

/// Has the clients do what the program says, and returns what they saw. When all are done, the
/// list, the statistics and the default are looked at once more, in peace.
pub(super) fn drive(program: &Program, wrap: Wrap<'_>) -> (Rules, History) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let backend = FakeBackend::new();
        backend.set_unclaimable(|spec| spec.network_enabled);
        backend.set_pace(program.pace);
        let warm = if program.pooled { u32::try_from(WARM).unwrap() } else { 0 };
        let far = Duration::from_secs(1 << 40);
        let [idle, detach, suspend] = RESTS.map(|rest| Duration::from_millis(rest.into()));
        let pool = PoolConfig {
            enabled: program.pooled,
            min_warm: warm,
            max_warm: warm,
            warm_ttl: far,
            ..PoolConfig::default()
        };
        let config = SandboxManagerConfig {
            max_sandboxes: u32::try_from(MAX).unwrap(),
            // Sweeps are calls here, so that it is known when they are.
            cleanup_interval: far,
            pool,
            default_timeouts: SessionTimeouts {
                idle_timeout: idle,
                detach_timeout: detach,
                suspend_timeout: suspend,
            },
        };
        let inner = manager(&backend, config);
        let mut seen = Seen::default();
        for no in 0..CHOSEN {
            seen.sandboxes.insert(chosen(no), no);
        }
        let stage = Arc::new(Stage {
            manager: wrap(inner.clone()),
            backend: backend.clone(),
            began: Instant::now(),
            pooled: program.pooled,
            seen: Mutex::new(seen),
        });
        let mut tasks = tokio::task::JoinSet::new();
        for (no, deeds) in program.clients.iter().enumerate() {
            let (stage, deeds) = (Arc::clone(&stage), deeds.clone());
            let client = u8::from(no % 3 == 2);
            tasks.spawn(async move {
                for Deed { pause, what } in deeds {
                    match pause {
                        Pause::Turns(turns) => {
                            for _ in 0..turns {
                                tokio::task::yield_now().await;
                            }
                        }
                        Pause::Millis(time) => {
                            tokio::time::sleep(Duration::from_millis(time.into())).await;
                        }
                        Pause::Seconds(time) => {
                            tokio::time::sleep(Duration::from_secs(time.into())).await;
                        }
                    }
                    stage.play(client, what).await;
                }
            });
        }
        let patience = tokio::time::timeout(Duration::from_secs(3_600), tasks.join_all());
        patience.await.expect("every call is answered");
        stage.list().await;
        stage.stats().await;
        stage.default().await;
        let counts = backend.counts();
        assert!(counts.most_live <= MAX as u64, "{counts:?}");
        assert_eq!(counts.wrong_claims, 0, "{counts:?}");
        for fault in [Fault::Create, Fault::Suspend, Fault::Resume, Fault::Destroy, Fault::Exec] {
            backend.heal(step(fault));
        }
        inner.shutdown(Shutdown::StopAll).await;
        assert_eq!(backend.counts().live, 0, "nothing is left");
        let history = std::mem::take(&mut stage.seen().history);
        let warm = if program.pooled { WARM } else { 0 };
        (Rules { max: MAX, warm }, history)
    })
}
