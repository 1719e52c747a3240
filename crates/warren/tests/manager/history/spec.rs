//! What the manager may do, as a machine of small steps.
//!
//! A call is not always one step: an acquire looks for what is kept, takes a place and has a sandbox
//! made, and others may come between. So a call goes through places ([`At`]) between its beginning
//! and its answer, and each step from one to the next happens at one moment. What is one step here
//! is what callers may rely on to be:
//!
//! | call | its steps |
//! | --- | --- |
//! | the reads, statistics and the whole list included | one: they show one moment, and all of it |
//! | detach, keep, resume, join | one, once the sandbox is not in the midst of something else |
//! | suspend | two: nothing begins any more, then everything stands still (or goes on as before) |
//! | end of a session | one; its sandbox gives its place back in another |
//! | acquire, attach that creates | look, take a place, be made; a failure gives the place back |
//! | exec | begin, end |
//! | sweep | one for each sandbox there is when it begins, in any order |

use std::collections::BTreeMap;

use warren::SessionState::{self, Active, Detached, Suspended};

pub(super) type SandboxNo = u8;
pub(super) type SessionNo = u8;
pub(super) type ClientNo = u8;

/// Ids that clients choose themselves when they attach.
pub(super) const CHOSEN: u8 = 2;
/// An id that there never is.
pub(super) const NEVER: u8 = CHOSEN;
/// How long sessions may rest, in milliseconds: active, detached, suspended.
pub(super) const RESTS: [u32; 3] = [20_000, 40_000, 80_000];

/// A step of the backend that may be told to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Fault {
    Create,
    Suspend,
    Resume,
    Destroy,
    Exec,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Wanted {
    Detach,
    Keep,
    Suspend,
    Resume,
    End,
}

/// What a client asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Call {
    Acquire(Acquire),
    Attach { client: ClientNo, sandbox: SandboxNo, create: bool },
    Move { client: ClientNo, session: SessionNo, wanted: Wanted },
    Exec { session: SessionNo, sandbox: SandboxNo },
    SetDefault(Option<SandboxNo>),
    GetDefault,
    Sweep,
    List,
    Stats,
    GetSession(SessionNo),
    BySandbox(SandboxNo),
    ByClient(ClientNo),
    Arm(Fault),
    Wait,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Acquire {
    pub(super) client: ClientNo,
    pub(super) spec: u8,
    pub(super) pool: bool,
    pub(super) fresh: bool,
    pub(super) labelled: bool,
    pub(super) network: Option<bool>,
    pub(super) preferred: Option<SandboxNo>,
}

/// What a client was told.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Answer {
    Joined { session: SessionNo, sandbox: SandboxNo, new: bool },
    Done,
    Refused(&'static str),
    Count(u64),
    Default(Option<SandboxNo>),
    Session(Option<(SessionNo, SessionState)>),
    Sessions(BTreeMap<SessionNo, (SandboxNo, SessionState)>),
    Stats(Shown),
}

/// Statistics; what the pool does by itself is left out where there is one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Shown {
    pub(super) created: u64,
    pub(super) sandboxes: u64,
    pub(super) active: u64,
    pub(super) detached: u64,
    pub(super) hit_rate: f64,
    pub(super) timeouts: u64,
}

/// One call as it was seen from outside.
#[derive(Debug, Clone)]
pub(super) struct Op {
    pub(super) no: u8,
    pub(super) call: Call,
    pub(super) answer: Answer,
    /// When it began and was answered, in milliseconds.
    pub(super) from: u32,
    pub(super) to: u32,
}

/// What the manager was told to keep to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Rules {
    pub(super) max: usize,
    /// How many may be warm: what the pool does by itself is seen from outside only by its effects.
    pub(super) warm: usize,
}

/// What a spec asks for: the second bears a label, the third has a network.
fn is_labelled(spec: u8) -> bool {
    spec == 1
}
fn has_network(spec: u8) -> bool {
    spec == 2
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Life {
    Creating,
    Running,
    Suspended,
    Ending,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Owned {
    owner: ClientNo,
    spec: u8,
    life: Life,
    /// Whether its processes stand still.
    frozen: bool,
    used: bool,
    /// Whether a call is in the midst of something with it, so that others wait.
    taken: bool,
    timed_out: bool,
    /// Which call made it: an id may be used again.
    born: u8,
    /// In the order in which they began.
    sessions: Vec<SessionNo>,
}

impl Owned {
    fn lives(&self) -> bool {
        matches!(self.life, Life::Running | Life::Suspended)
    }

    fn fits(&self, asked: &Acquire) -> bool {
        fits(self.spec, asked) && !(asked.fresh && self.used)
    }
}

fn fits(spec: u8, asked: &Acquire) -> bool {
    (!asked.labelled || is_labelled(spec)) && asked.network.is_none_or(|n| n == has_network(spec))
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Session {
    sandbox: SandboxNo,
    client: ClientNo,
    state: SessionState,
    kept: bool,
    busy: u8,
    /// When it was last used: not before, and not after.
    touched: (u32, u32),
}

/// Where everything stands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct Model {
    rules: Rules,
    sandboxes: BTreeMap<SandboxNo, Owned>,
    sessions: BTreeMap<SessionNo, Session>,
    ended: BTreeMap<SessionNo, ClientNo>,
    default: Option<SandboxNo>,
    armed: u8,
    made: u128,
    created: u64,
    timeouts: u64,
    hits: u64,
    misses: u64,
}

/// A sandbox that a call has seen, and which call made it: an id may be used again.
type Seen = (SandboxNo, u8);

/// How far a call has come.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum At {
    Begun,
    /// An acquire has seen that the sandbox it prefers would do.
    Preferring(SandboxNo, u8),
    /// An acquire looks for what is kept.
    Looking,
    /// It has seen these, and tries one after the other.
    Trying(Option<Seen>, Vec<(SessionNo, Seen)>),
    /// It takes a warm one.
    Claiming,
    /// The warm one has not what was asked for, and is destroyed.
    Losing(SandboxNo),
    /// It takes a place for a new one.
    Placing,
    /// The sandbox is made.
    Making(SandboxNo),
    /// Its making has failed, and what there is of it is removed.
    Leaving(SandboxNo),
    /// An attach joins what it has seen.
    Joining(SandboxNo),
    /// The session's sandbox is asked to move it.
    Moving(SandboxNo),
    /// Nothing begins in the sandbox any more.
    Stopping(SandboxNo),
    /// The sandbox is destroyed, and then the call is answered; with an error if that fails.
    Ending(SandboxNo, Ending),
    /// A command runs in the sandbox that this call made.
    Running(u8),
    /// The sandbox is asked to be the default.
    Preferred(SandboxNo, u8),
    /// A sweep has these before it, has these in the midst of their end, and has counted so many.
    Tending(Vec<(SandboxNo, u8)>, Vec<SandboxNo>, u64),
    /// The answer is as it was.
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Ending {
    /// The last session was ended.
    Asked,
    /// It had not what was asked for.
    Unfit,
}

/// What came of joining a sandbox.
enum Outcome {
    Joined(SessionNo),
    Gone,
    Unfit,
    Failed,
}

type Steps = Vec<(Model, At)>;

impl Model {
    pub(super) fn new(rules: Rules) -> Self {
        Self { rules, ..Self::default() }
    }

    /// Returns every step that a call may make from here; only those that agree with its answer.
    pub(super) fn steps(&self, op: &Op, at: &At) -> Steps {
        let mut steps = Steps::new();
        match (at, &op.call) {
            (At::Done, _) => {}
            (At::Begun, Call::Acquire(asked)) => self.begin_acquire(op, asked, &mut steps),
            (At::Begun, Call::Attach { client, sandbox, create }) => {
                let next = match self.sandboxes.get(sandbox) {
                    Some(there) if there.owner == *client => Some(At::Joining(*sandbox)),
                    Some(_) => None,
                    None => create.then_some(At::Placing),
                };
                match next {
                    Some(next) => steps.push((self.clone(), next)),
                    None => self.clone().answers(op, Answer::Refused("not_found"), &mut steps),
                }
            }
            (At::Begun, Call::Move { client, session, wanted }) => {
                let answer = match (self.sessions.get(session), self.ended.get(session)) {
                    (Some(held), _) if held.client == *client => {
                        steps.push((self.clone(), At::Moving(held.sandbox)));
                        return steps;
                    }
                    (None, Some(of)) if of == client => match wanted {
                        Wanted::End => Answer::Done,
                        _ => Answer::Refused("session_ended"),
                    },
                    _ => Answer::Refused("not_found"),
                };
                self.clone().answers(op, answer, &mut steps);
            }
            (At::Begun, Call::Exec { session, sandbox }) => {
                self.begin_exec(op, *session, *sandbox, &mut steps);
            }
            (At::Begun, Call::SetDefault(Some(sandbox))) => match self.sandboxes.get(sandbox) {
                Some(there) if there.lives() => {
                    steps.push((self.clone(), At::Preferred(*sandbox, there.born)));
                }
                _ => self.clone().answers(op, Answer::Refused("not_found"), &mut steps),
            },
            (At::Begun, Call::Sweep) => {
                let settled = self.sandboxes.iter().filter(|(_, s)| s.life != Life::Creating);
                let all = settled.map(|(no, there)| (*no, there.born)).collect();
                self.clone().tends(op, all, Vec::new(), 0, &mut steps);
            }
            (At::Begun, call) => self.at_once(op, call, &mut steps),
            (At::Preferring(sandbox, born), Call::Acquire(asked)) => {
                let seen = (*sandbox, Some(*born));
                for (next, outcome) in self.join(op, asked.client, seen, None, asked.fresh) {
                    match outcome {
                        Outcome::Joined(session) => next.joins(op, session, *sandbox, &mut steps),
                        Outcome::Gone => next.answers(op, Answer::Refused("not_found"), &mut steps),
                        Outcome::Unfit => steps.push((next, At::Looking)),
                        Outcome::Failed => {
                            next.answers(op, Answer::Refused("step_failed"), &mut steps);
                        }
                    }
                }
            }
            (At::Looking, Call::Acquire(asked)) => self.look(op, asked, &mut steps),
            (At::Trying(default, kept), Call::Acquire(asked)) => {
                self.try_kept(op, asked, *default, kept, &mut steps);
            }
            (At::Claiming, Call::Acquire(asked)) => self.claim(op, asked, &mut steps),
            (At::Losing(sandbox), _) => {
                for (mut next, _) in self.destroy(*sandbox) {
                    next.misses += 1;
                    steps.push((next, At::Placing));
                }
            }
            (At::Placing, Call::Acquire(asked)) => {
                // Who it will be is seen in the answer; until then nobody knows its name.
                let no = match op.answer {
                    Answer::Joined { sandbox, .. } => sandbox,
                    _ => 90 + op.no,
                };
                self.place(op, asked.client, asked.spec, no, &mut steps);
            }
            (At::Placing, Call::Attach { client, sandbox, .. }) => {
                if self.sandboxes.contains_key(sandbox) {
                    steps.push((self.clone(), At::Begun));
                } else {
                    self.place(op, *client, 0, *sandbox, &mut steps);
                }
            }
            (At::Making(sandbox), _) => self.make(op, *sandbox, &mut steps),
            (At::Leaving(sandbox), call) => {
                let mut next = self.clone();
                let there = next.sandboxes.get_mut(sandbox).expect("it has its place");
                if matches!(call, Call::Attach { .. }) && there.life == Life::Creating {
                    there.life = Life::Ending;
                    steps.push((next, At::Leaving(*sandbox)));
                } else {
                    next.sandboxes.remove(sandbox);
                    next.answers(op, Answer::Refused("step_failed"), &mut steps);
                }
            }
            (At::Joining(sandbox), Call::Attach { client, .. }) => {
                for (next, outcome) in self.join(op, *client, (*sandbox, None), None, false) {
                    match outcome {
                        Outcome::Joined(session) => next.joins(op, session, *sandbox, &mut steps),
                        Outcome::Gone | Outcome::Unfit => steps.push((next, At::Begun)),
                        Outcome::Failed => {
                            next.answers(op, Answer::Refused("step_failed"), &mut steps);
                        }
                    }
                }
            }
            (At::Moving(sandbox), Call::Move { session, wanted, .. }) => {
                self.move_session(op, *sandbox, *session, *wanted, &mut steps);
            }
            (At::Stopping(sandbox), Call::Move { session, .. }) => {
                let mut next = self.clone();
                let fails = next.disarm(Fault::Suspend);
                let there = next.sandboxes.get_mut(sandbox).expect("it is taken");
                there.taken = false;
                if fails {
                    there.life = Life::Running;
                    next.answers(op, Answer::Refused("step_failed"), &mut steps);
                } else {
                    there.frozen = true;
                    next.enter(op, *session, Suspended, None);
                    next.answers(op, Answer::Done, &mut steps);
                }
            }
            (At::Ending(sandbox, why), _) => {
                for (next, fails) in self.destroy(*sandbox) {
                    let answer = match (why, fails) {
                        (Ending::Asked, false) => Answer::Done,
                        (Ending::Asked, true) => Answer::Refused("step_failed"),
                        (Ending::Unfit, _) => Answer::Refused("no_match"),
                    };
                    next.answers(op, answer, &mut steps);
                }
            }
            (At::Running(born), Call::Exec { session, sandbox }) => {
                self.end_exec(op, *session, *sandbox, *born, &mut steps);
            }
            (At::Preferred(sandbox, born), Call::SetDefault(_)) => {
                match self.get(*sandbox, *born) {
                    Some(there) if there.taken => {}
                    Some(there) if there.lives() => {
                        let mut next = self.clone();
                        next.default = Some(*sandbox);
                        next.answers(op, Answer::Done, &mut steps);
                    }
                    _ => self.clone().answers(op, Answer::Refused("not_found"), &mut steps),
                }
            }
            (At::Tending(left, ending, count), _) => {
                self.tend(op, left, ending, *count, &mut steps);
            }
            (at, call) => unreachable!("{call:?} is never at {at:?}"),
        }
        steps
    }

    fn get(&self, sandbox: SandboxNo, born: u8) -> Option<&Owned> {
        self.sandboxes.get(&sandbox).filter(|there| there.born == born)
    }

    /// Answers, if this is what was answered.
    fn answers(self, op: &Op, answer: Answer, steps: &mut Steps) {
        if op.answer == answer {
            steps.push((self, At::Done));
        }
    }

    fn joins(self, op: &Op, session: SessionNo, sandbox: SandboxNo, steps: &mut Steps) {
        self.answers(op, Answer::Joined { session, sandbox, new: false }, steps);
    }

    fn disarm(&mut self, fault: Fault) -> bool {
        let bit = 1 << fault as u8;
        let was = self.armed & bit != 0;
        self.armed &= !bit;
        was
    }

    fn enter(&mut self, op: &Op, session: SessionNo, state: SessionState, kept: Option<bool>) {
        let held = self.sessions.get_mut(&session).expect("it is there");
        held.state = state;
        held.kept = kept.unwrap_or(held.kept);
        held.touched = (op.from, op.to);
    }

    /// Begins the session that was answered, if it is a new one.
    fn begin_session(
        &mut self,
        op: &Op,
        client: ClientNo,
        sandbox: SandboxNo,
    ) -> Option<SessionNo> {
        let Answer::Joined { session, .. } = op.answer else { return None };
        if self.sessions.contains_key(&session) || self.ended.contains_key(&session) {
            return None;
        }
        self.sandboxes.get_mut(&sandbox)?.sessions.push(session);
        let touched = (op.from, op.to);
        let held = Session { sandbox, client, state: Active, kept: false, busy: 0, touched };
        self.sessions.insert(session, held);
        Some(session)
    }

    fn end_session(&mut self, session: SessionNo) {
        let held = self.sessions.remove(&session).expect("it is there");
        self.ended.insert(session, held.client);
        let there = self.sandboxes.get_mut(&held.sandbox).expect("a session has a sandbox");
        there.sessions.retain(|other| *other != session);
    }

    /// Takes a sandbox that has no session any more out of use.
    fn begin_end(&mut self, sandbox: SandboxNo, timed_out: bool) {
        let there = self.sandboxes.get_mut(&sandbox).expect("it is there");
        (there.life, there.taken) = (Life::Ending, true);
        there.timed_out |= timed_out;
        if self.default == Some(sandbox) {
            self.default = None;
        }
    }

    /// Destroys a sandbox; tells whether that failed.
    fn destroy(&self, sandbox: SandboxNo) -> Vec<(Self, bool)> {
        let mut outcomes = Vec::new();
        let mut next = self.clone();
        let fails = next.disarm(Fault::Destroy);
        if fails {
            let mut failed = next.clone();
            failed.sandboxes.get_mut(&sandbox).expect("it is there").taken = false;
            outcomes.push((failed, true));
        }
        // The failure may have met a warm one instead.
        if !fails || self.rules.warm > 0 {
            let gone = next.sandboxes.remove(&sandbox).expect("it is there");
            next.timeouts += u64::from(gone.timed_out);
            outcomes.push((next, false));
        }
        outcomes
    }

    /// Wakes a sandbox that is suspended; tells whether that failed.
    fn wake(&mut self, op: &Op, sandbox: SandboxNo) -> bool {
        if self.disarm(Fault::Resume) {
            return true;
        }
        let there = self.sandboxes.get_mut(&sandbox).expect("it is there");
        (there.life, there.frozen) = (Life::Running, false);
        for session in there.sessions.clone() {
            if self.sessions[&session].state == Suspended {
                self.enter(op, session, Active, Some(false));
            }
        }
        false
    }

    fn begin_acquire(&self, op: &Op, asked: &Acquire, steps: &mut Steps) {
        let Some(preferred) = asked.preferred else {
            return self.look(op, asked, steps);
        };
        match self.sandboxes.get(&preferred) {
            Some(there) if there.lives() && there.owner == asked.client => {
                if there.fits(asked) {
                    steps.push((self.clone(), At::Preferring(preferred, there.born)));
                } else {
                    self.look(op, asked, steps);
                }
            }
            _ => self.clone().answers(op, Answer::Refused("not_found"), steps),
        }
    }

    fn look(&self, op: &Op, asked: &Acquire, steps: &mut Steps) {
        let same = |no: &SandboxNo| {
            let there = self.sandboxes.get(no);
            there.is_some_and(|there| {
                there.lives()
                    && there.owner == asked.client
                    && there.spec == asked.spec
                    && there.fits(asked)
            })
        };
        let default = self.default.filter(|no| asked.preferred.is_none() && same(no));
        let kept = self.sessions.iter().filter(|(_, held)| {
            let is_kept = held.kept && held.state == Detached && held.client == asked.client;
            is_kept && !asked.fresh && same(&held.sandbox)
        });
        let seen = |no| (no, self.sandboxes[&no].born);
        let kept = kept.map(|(no, held)| (*no, seen(held.sandbox))).collect();
        self.goes_on(op, asked, default.map(seen), kept, steps);
    }

    /// Goes on with what is left to be tried, or else with a new one.
    fn goes_on(
        &self,
        op: &Op,
        asked: &Acquire,
        default: Option<Seen>,
        kept: Vec<(SessionNo, Seen)>,
        steps: &mut Steps,
    ) {
        let next = self.clone();
        if default.is_some() || !kept.is_empty() {
            steps.push((next, At::Trying(default, kept)));
        } else if asked.labelled && !is_labelled(asked.spec) {
            next.answers(op, Answer::Refused("no_match"), steps);
        } else {
            steps.push((next, if asked.pool { At::Claiming } else { At::Placing }));
        }
    }

    fn try_kept(
        &self,
        op: &Op,
        asked: &Acquire,
        default: Option<Seen>,
        kept: &[(SessionNo, Seen)],
        steps: &mut Steps,
    ) {
        // The default comes first, the others in no order.
        let turns: Vec<_> = match default {
            Some(seen) => vec![(None, seen)],
            None => kept.iter().map(|(session, seen)| (Some(*session), *seen)).collect(),
        };
        for (session, (sandbox, born)) in turns {
            let left: Vec<_> =
                kept.iter().copied().filter(|(no, _)| Some(*no) != session).collect();
            let seen = (sandbox, Some(born));
            for (next, outcome) in self.join(op, asked.client, seen, session, asked.fresh) {
                match outcome {
                    Outcome::Joined(session) => next.joins(op, session, sandbox, steps),
                    Outcome::Gone | Outcome::Unfit => {
                        next.goes_on(op, asked, None, left.clone(), steps);
                    }
                    Outcome::Failed => next.answers(op, Answer::Refused("step_failed"), steps),
                }
            }
        }
    }

    /// Joins a sandbox with a session that rests, or else a new one.
    fn join(
        &self,
        op: &Op,
        client: ClientNo,
        (sandbox, born): (SandboxNo, Option<u8>),
        kept: Option<SessionNo>,
        fresh: bool,
    ) -> Vec<(Self, Outcome)> {
        let mut next = self.clone();
        let there = self.sandboxes.get(&sandbox);
        // An id may be used again; this is about the one that was seen.
        let there = there.filter(|there| born.is_none_or(|born| there.born == born));
        let Some(there) = there else {
            return vec![(next, Outcome::Gone)];
        };
        if there.taken {
            return Vec::new();
        }
        if there.life == Life::Ending {
            // Its end has failed before, and is tried again.
            let outcome = |fails| if fails { Outcome::Failed } else { Outcome::Gone };
            let ends = self.destroy(sandbox).into_iter();
            return ends.map(|(next, fails)| (next, outcome(fails))).collect();
        }
        if there.owner != client {
            return vec![(next, Outcome::Gone)];
        }
        if fresh && there.used {
            return vec![(next, Outcome::Unfit)];
        }
        let last = |state| {
            let there = there.sessions.iter().rev().copied();
            there.into_iter().find(|session| self.sessions[session].state == state)
        };
        let resting = match kept {
            Some(kept) => match self.sessions.get(&kept) {
                Some(held) if held.kept && held.state == Detached => Some(kept),
                _ => return vec![(next, Outcome::Gone)],
            },
            None => last(Suspended).or(last(Detached)),
        };
        if there.life == Life::Suspended && next.wake(op, sandbox) {
            return vec![(next, Outcome::Failed)];
        }
        match resting {
            Some(session) => next.enter(op, session, Active, Some(false)),
            None => {
                let Some(session) = next.begin_session(op, client, sandbox) else {
                    return Vec::new();
                };
                return vec![(next, Outcome::Joined(session))];
            }
        }
        resting.map(|session| (next, Outcome::Joined(session))).into_iter().collect()
    }

    fn claim(&self, op: &Op, asked: &Acquire, steps: &mut Steps) {
        let mut missed = self.clone();
        missed.misses += 1;
        steps.push((missed, At::Placing));
        // There may be a warm one, which can become all but one that has a network.
        let warm = self.rules.warm > 0 && self.sandboxes.len() < self.rules.max;
        if !warm || has_network(asked.spec) {
            return;
        }
        if !fits(asked.spec, asked) {
            let (mut next, no) = (self.clone(), 50 + op.no);
            if next.appear(op, asked.client, asked.spec, no) {
                next.begin_end(no, false);
                steps.push((next, At::Losing(no)));
            }
        } else if let Answer::Joined { sandbox, .. } = op.answer {
            let mut next = self.clone();
            next.hits += 1;
            if next.appear(op, asked.client, asked.spec, sandbox) {
                next.born(op, asked.client, sandbox, steps);
            }
        }
    }

    /// Puts a sandbox that is not made yet in its place; tells whether it may have this id.
    fn appear(&mut self, op: &Op, owner: ClientNo, spec: u8, no: SandboxNo) -> bool {
        let bit = 1 << no;
        if self.sandboxes.contains_key(&no) || (no >= CHOSEN && self.made & bit != 0) {
            return false;
        }
        self.made |= bit;
        let owned = Owned {
            owner,
            spec,
            life: Life::Creating,
            frozen: false,
            used: false,
            taken: true,
            timed_out: false,
            born: op.no,
            sessions: Vec::new(),
        };
        self.sandboxes.insert(no, owned);
        true
    }

    /// Gives a sandbox that was just made to its client.
    fn born(mut self, op: &Op, client: ClientNo, no: SandboxNo, steps: &mut Steps) {
        let there = self.sandboxes.get_mut(&no).expect("it has its place");
        (there.life, there.taken) = (Life::Running, false);
        let new = matches!(op.call, Call::Attach { .. });
        if let Some(session) = self.begin_session(op, client, no) {
            self.answers(op, Answer::Joined { session, sandbox: no, new }, steps);
        }
    }

    fn place(&self, op: &Op, client: ClientNo, spec: u8, no: SandboxNo, steps: &mut Steps) {
        // One that is warm gives way, but not while it is made.
        if self.sandboxes.len() + self.rules.warm >= self.rules.max {
            self.clone().answers(op, Answer::Refused("capacity"), steps);
        }
        if self.sandboxes.len() >= self.rules.max {
            return;
        }
        let mut next = self.clone();
        if next.appear(op, client, spec, no) {
            steps.push((next, At::Making(no)));
        }
    }

    fn make(&self, op: &Op, no: SandboxNo, steps: &mut Steps) {
        if self.rules.warm > 0 {
            // It waits for a warm one to give way, which may fail.
            let mut next = self.clone();
            if next.disarm(Fault::Destroy) {
                next.sandboxes.remove(&no);
                next.answers(op, Answer::Refused("step_failed"), steps);
            }
        }
        let mut next = self.clone();
        let fails = next.disarm(Fault::Create);
        if fails {
            steps.push((next.clone(), At::Leaving(no)));
            // The failure may have met a warm one instead.
            if self.rules.warm == 0 {
                return;
            }
        }
        next.created += 1;
        let there = &next.sandboxes[&no];
        let client = there.owner;
        match &op.call {
            Call::Acquire(asked) if !fits(there.spec, asked) => {
                next.begin_end(no, false);
                steps.push((next, At::Ending(no, Ending::Unfit)));
            }
            _ => next.born(op, client, no, steps),
        }
    }

    fn move_session(
        &self,
        op: &Op,
        sandbox: SandboxNo,
        session: SessionNo,
        wanted: Wanted,
        steps: &mut Steps,
    ) {
        let mut next = self.clone();
        let there = match self.sandboxes.get(&sandbox) {
            Some(there) if there.taken => return,
            Some(there) => there,
            None => return steps.push((next, At::Begun)),
        };
        let Some(held) = self.sessions.get(&session) else {
            return steps.push((next, At::Begun));
        };
        match (wanted, held.state) {
            (Wanted::End, _) => {
                next.end_session(session);
                if next.sandboxes[&sandbox].sessions.is_empty() {
                    next.begin_end(sandbox, false);
                    return steps.push((next, At::Ending(sandbox, Ending::Asked)));
                }
            }
            (Wanted::Detach, Detached)
            | (Wanted::Suspend, Suspended)
            | (Wanted::Resume, Active) => {}
            (Wanted::Keep, Detached) => {
                next.sessions.get_mut(&session).expect("it is there").kept = true;
            }
            (Wanted::Detach | Wanted::Keep, Active) => {
                next.enter(op, session, Detached, Some(wanted == Wanted::Keep));
            }
            (Wanted::Detach | Wanted::Keep, _) => {
                return next.answers(op, Answer::Refused("conflict"), steps);
            }
            (Wanted::Suspend, _) => {
                let others = there.sessions.iter().filter(|other| **other != session);
                if others.map(|other| &self.sessions[other]).any(|other| other.state == Active) {
                    return next.answers(op, Answer::Refused("conflict"), steps);
                }
                if there.life == Life::Running {
                    let there = next.sandboxes.get_mut(&sandbox).expect("it is there");
                    (there.life, there.taken) = (Life::Suspended, true);
                    return steps.push((next, At::Stopping(sandbox)));
                }
                next.enter(op, session, Suspended, None);
            }
            (Wanted::Resume, _) => {
                if there.life == Life::Suspended && next.wake(op, sandbox) {
                    return next.answers(op, Answer::Refused("step_failed"), steps);
                }
                next.enter(op, session, Active, Some(false));
            }
        }
        next.answers(op, Answer::Done, steps);
    }

    fn begin_exec(&self, op: &Op, session: SessionNo, sandbox: SandboxNo, steps: &mut Steps) {
        let mut next = self.clone();
        let there = next.sandboxes.get_mut(&sandbox);
        let refusal = match (next.sessions.get_mut(&session), there) {
            (Some(held), Some(there)) if there.life == Life::Running => {
                there.used = true;
                held.busy += 1;
                held.touched = (op.from, op.to);
                let born = there.born;
                return steps.push((next, At::Running(born)));
            }
            (Some(_), Some(there)) if there.life == Life::Suspended => "suspended",
            (None, Some(there)) if there.life != Life::Ending => "session_ended",
            _ => "ended",
        };
        next.answers(op, Answer::Refused(refusal), steps);
    }

    fn end_exec(
        &self,
        op: &Op,
        session: SessionNo,
        sandbox: SandboxNo,
        born: u8,
        steps: &mut Steps,
    ) {
        let mut next = self.clone();
        if let Some(held) = next.sessions.get_mut(&session) {
            held.busy -= 1;
            if held.state != Suspended {
                held.touched = (op.from, op.to);
            }
        }
        let fails = next.disarm(Fault::Exec);
        let answer = match self.get(sandbox, born) {
            _ if fails => Answer::Refused("step_failed"),
            None => Answer::Refused("ended"),
            Some(there) if there.frozen => Answer::Refused("suspended"),
            Some(_) => Answer::Done,
        };
        next.answers(op, answer, steps);
    }

    /// Goes on with a sweep, or answers how many it ended.
    fn tends(
        self,
        op: &Op,
        left: Vec<(SandboxNo, u8)>,
        ending: Vec<SandboxNo>,
        count: u64,
        steps: &mut Steps,
    ) {
        if left.is_empty() && ending.is_empty() {
            self.answers(op, Answer::Count(count), steps);
        } else {
            steps.push((self, At::Tending(left, ending, count)));
        }
    }

    fn tend(
        &self,
        op: &Op,
        left: &[(SandboxNo, u8)],
        ending: &[SandboxNo],
        count: u64,
        steps: &mut Steps,
    ) {
        for sandbox in ending {
            let rest: Vec<_> = ending.iter().copied().filter(|no| no != sandbox).collect();
            for (next, _) in self.destroy(*sandbox) {
                next.tends(op, left.to_vec(), rest.clone(), count, steps);
            }
        }
        for (sandbox, born) in left {
            let rest: Vec<_> = left.iter().copied().filter(|(no, _)| no != sandbox).collect();
            let there = match self.get(*sandbox, *born) {
                // It is gone, so that there is nothing to be done any more, whenever.
                None => {
                    steps.clear();
                    return self.clone().tends(op, rest, ending.to_vec(), count, steps);
                }
                Some(there) if there.taken => continue,
                Some(there) => there,
            };
            if there.life == Life::Ending {
                for (next, _) in self.destroy(*sandbox) {
                    next.tends(op, rest.clone(), ending.to_vec(), count, steps);
                }
                continue;
            }
            for expired in self.expired(op, there) {
                let mut next = self.clone();
                let mut ending = ending.to_vec();
                for session in &expired {
                    next.end_session(*session);
                }
                if !expired.is_empty() && next.sandboxes[sandbox].sessions.is_empty() {
                    next.begin_end(*sandbox, true);
                    ending.push(*sandbox);
                }
                next.tends(op, rest.clone(), ending, count + expired.len() as u64, steps);
            }
        }
    }

    /// Returns which sessions of a sandbox may be found to have timed out: when exactly each was
    /// touched is known as well as when the calls that did it began and were answered.
    fn expired(&self, op: &Op, there: &Owned) -> Vec<Vec<SessionNo>> {
        let mut all = vec![Vec::new()];
        for no in &there.sessions {
            let held = &self.sessions[no];
            let rest = match held.state {
                Active => RESTS[0],
                Detached => RESTS[1],
                _ => RESTS[2],
            };
            let busy = held.busy > 0 && held.state != Suspended;
            let may = !busy && op.to.saturating_sub(held.touched.0) > rest;
            let must = !busy && op.from.saturating_sub(held.touched.1) > rest;
            let mut with = Vec::new();
            if may {
                with = all.iter().map(|some| [some.as_slice(), &[*no]].concat()).collect();
            }
            if must {
                all.clear();
            }
            all.append(&mut with);
        }
        all
    }

    /// Does what is done at one moment.
    fn at_once(&self, op: &Op, call: &Call, steps: &mut Steps) {
        let mut next = self.clone();
        let answer = match call {
            Call::Wait => Answer::Done,
            Call::Arm(fault) => {
                next.armed |= 1 << *fault as u8;
                Answer::Done
            }
            Call::SetDefault(_) => {
                next.default = None;
                Answer::Done
            }
            Call::GetDefault => Answer::Default(self.default),
            Call::List => {
                let all = self.sessions.iter();
                Answer::Sessions(all.map(|(no, held)| (*no, (held.sandbox, held.state))).collect())
            }
            Call::GetSession(no) => {
                Answer::Session(self.sessions.get(no).map(|held| (*no, held.state)))
            }
            // Which one of several is shown is not promised, but that an active one comes first.
            Call::BySandbox(_) | Call::ByClient(_) => {
                let (sandbox, client) = match call {
                    Call::BySandbox(no) => (Some(*no), None),
                    Call::ByClient(no) => (None, Some(*no)),
                    _ => (None, None),
                };
                let of = self.sessions.iter().filter(|(_, held)| {
                    sandbox.is_none_or(|no| held.sandbox == no)
                        && client.is_none_or(|no| held.client == no && held.state == Active)
                });
                let of: Vec<_> = of.map(|(no, held)| (*no, held.state)).collect();
                let active = of.iter().any(|(_, state)| *state == Active);
                let right = |(_, state): &&(_, SessionState)| !active || *state == Active;
                let answered =
                    of.iter().filter(right).find(|s| op.answer == Answer::Session(Some(**s)));
                match answered {
                    Some(session) => Answer::Session(Some(*session)),
                    None if of.is_empty() => Answer::Session(None),
                    None => return,
                }
            }
            Call::Stats => {
                let in_state = |state| {
                    self.sessions.values().filter(|held| held.state == state).count() as u64
                };
                let made = self.sandboxes.values().filter(|s| s.life != Life::Creating);
                let claims = self.hits + self.misses;
                Answer::Stats(Shown {
                    created: if self.rules.warm == 0 { self.created } else { 0 },
                    sandboxes: made.count() as u64,
                    active: in_state(Active),
                    detached: in_state(Detached),
                    hit_rate: if claims == 0 { 0.0 } else { self.hits as f64 / claims as f64 },
                    timeouts: self.timeouts,
                })
            }
            call => unreachable!("{call:?} takes more than one step"),
        };
        next.answers(op, answer, steps);
    }
}
