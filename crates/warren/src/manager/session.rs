//! The life of a session, as a pure function.
//!
//! ```text
//!            ┌──────────────► Suspended ──┐
//!  Active ◄──┼── Detached ───────▲        ├──► Terminated
//!     └──────┴────────────────────────────┘
//! ```
//!
//! Active may become any other; Detached too; Suspended may only become Active or end.

use std::time::Duration;

use chrono::Utc;
use tokio::time::Instant;

use crate::store::SessionRecord;
use crate::{SandboxSession, SessionState};

/// What is asked of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Move {
    /// The client goes away.
    Detach,
    /// The sandbox stops.
    Suspend,
    /// The client is there, and the sandbox goes on.
    Activate,
    /// The session ends.
    Terminate,
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// It goes on to another state.
    Move(SessionState),
    /// It is so already.
    Stay,
}

/// Decides what becomes of a session, or `None` if the move is not a legal one.
pub(super) fn admit(state: SessionState, wanted: Move) -> Option<Next> {
    use SessionState::{Active, Detached, Suspended, Terminated};
    match (state, wanted) {
        (Active, Move::Detach) => Some(Next::Move(Detached)),
        (Active | Detached, Move::Suspend) => Some(Next::Move(Suspended)),
        (Detached | Suspended, Move::Activate) => Some(Next::Move(Active)),
        (Active | Detached | Suspended, Move::Terminate) => Some(Next::Move(Terminated)),
        // Asking for what is already so is no error: clients retry.
        (Detached, Move::Detach)
        | (Suspended, Move::Suspend)
        | (Active, Move::Activate)
        | (Terminated, Move::Terminate) => Some(Next::Stay),
        (Suspended, Move::Detach) | (Terminated, Move::Detach | Move::Suspend | Move::Activate) => {
            None
        }
    }
}

/// A session that lives, and the clock that it rests by.
///
/// The clock is monotonic: the wall-clock times of the session are for people to read.
#[derive(Debug, Clone)]
pub(super) struct Held {
    /// The session as clients see it.
    pub(super) shown: SandboxSession,
    /// Whether it was released to be taken up again.
    pub(super) kept: bool,
    /// How much work goes on in it.
    pub(super) busy: u32,
    /// Commands that run on their own.
    pub(super) running: u32,
    /// Whether the store has an older version.
    pub(super) dirty: bool,
    since: Instant,
    /// How long it had rested before `since`, in a process before this one.
    carried: Duration,
}

impl Held {
    pub(super) fn new(shown: SandboxSession) -> Self {
        Self {
            shown,
            kept: false,
            busy: 0,
            running: 0,
            dirty: false,
            since: Instant::now(),
            carried: Duration::ZERO,
        }
    }

    pub(super) fn from_record(record: SessionRecord) -> Self {
        let carried = Duration::from_millis(record.rested_ms);
        Self { kept: record.kept_alive, carried, ..Self::new(record.session) }
    }

    pub(super) fn record(&self) -> SessionRecord {
        let rested_ms = u64::try_from(self.rested(Instant::now()).as_millis()).unwrap_or(u64::MAX);
        SessionRecord { session: self.shown.clone(), kept_alive: self.kept, rested_ms }
    }

    /// Returns it as it is in another state, just entered.
    pub(super) fn moved(&self, state: SessionState, kept: bool) -> Self {
        let mut moved = Self { kept, ..self.clone() };
        moved.shown.state = state;
        moved.touch();
        moved
    }

    /// Returns it as it is when it is kept to be taken up again; it rests on.
    pub(super) fn kept(&self) -> Self {
        Self { kept: true, ..self.clone() }
    }

    /// Reports whether it is there for its client to take up again.
    pub(super) fn waits_for_its_client(&self) -> bool {
        self.kept && self.shown.state == SessionState::Detached
    }

    /// Notes that the client did something just now.
    pub(super) fn touch(&mut self) {
        self.shown.last_active_at = Utc::now();
        self.since = Instant::now();
        self.carried = Duration::ZERO;
        self.dirty = true;
    }

    fn rested(&self, now: Instant) -> Duration {
        // Work that is stopped with its sandbox does not hold a suspended session.
        let works = match self.shown.state {
            SessionState::Active => self.busy > 0 || self.running > 0,
            // Who left a command behind has so long to come back to it.
            SessionState::Detached => self.busy > 0,
            SessionState::Suspended | SessionState::Terminated => false,
        };
        if works {
            return Duration::ZERO;
        }
        self.carried.saturating_add(now.saturating_duration_since(self.since))
    }

    fn allowed(&self) -> Duration {
        match self.shown.state {
            SessionState::Active => self.shown.timeouts.idle_timeout,
            SessionState::Detached => self.shown.timeouts.detach_timeout,
            SessionState::Suspended => self.shown.timeouts.suspend_timeout,
            SessionState::Terminated => Duration::ZERO,
        }
    }

    /// Tells whether it has rested for longer than its state allows.
    pub(super) fn is_expired(&self, now: Instant) -> bool {
        self.rested(now) > self.allowed()
    }

    /// Returns how long it may still rest.
    pub(super) fn remaining(&self, now: Instant) -> Duration {
        self.allowed().saturating_sub(self.rested(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SandboxId;

    #[test]
    fn s4_only_the_legal_moves_are_admitted() {
        use SessionState::{Active, Detached, Suspended, Terminated};
        let states = [Active, Detached, Suspended, Terminated];
        let moves = [
            (Move::Detach, Detached),
            (Move::Suspend, Suspended),
            (Move::Activate, Active),
            (Move::Terminate, Terminated),
        ];
        let legal = |from, to| match from {
            Active => to != Active,
            Detached => to != Detached,
            Suspended => matches!(to, Active | Terminated),
            Terminated => false,
        };
        for from in states {
            for (wanted, to) in moves {
                let expected = match () {
                    () if from == to => Some(Next::Stay),
                    () if legal(from, to) => Some(Next::Move(to)),
                    () => None,
                };
                assert_eq!(admit(from, wanted), expected, "{from:?} {wanted:?}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn s9_rest_is_measured_by_a_clock_that_nobody_can_set() {
        let mut held = Held::new(SandboxSession::new(SandboxId::new(), "c"));
        held.shown.last_active_at = chrono::DateTime::<Utc>::MIN_UTC;
        assert!(held.shown.is_timed_out() && !held.is_expired(Instant::now()));
        tokio::time::advance(Duration::from_secs(301)).await;
        held.shown.last_active_at = chrono::DateTime::<Utc>::MAX_UTC;
        assert!(!held.shown.is_timed_out() && held.is_expired(Instant::now()));
        held.busy = 1;
        assert!(!held.is_expired(Instant::now()), "while a command runs it is not idle");
    }

    #[tokio::test(start_paused = true)]
    async fn rest_goes_on_where_a_record_left_it() {
        let held = Held::new(SandboxSession::new(SandboxId::new(), "c"));
        tokio::time::advance(Duration::from_secs(200)).await;
        let adopted = Held::from_record(held.record());
        assert!(!adopted.is_expired(Instant::now()));
        assert_eq!(adopted.remaining(Instant::now()), Duration::from_secs(100));
        tokio::time::advance(Duration::from_secs(101)).await;
        assert!(adopted.is_expired(Instant::now()));
    }
}
