//! A client's use of a sandbox, and the requests that join one.

use std::collections::HashMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{SandboxCapabilities, SandboxId, SandboxSpec};

/// One client's use of one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSession {
    /// `sess-` and a random UUID.
    pub session_id: String,
    /// The sandbox that is used.
    pub sandbox_id: SandboxId,
    /// Who uses it.
    pub client_id: String,
    /// When the session began.
    pub created_at: DateTime<Utc>,
    /// When the client last did something with it.
    pub last_active_at: DateTime<Utc>,
    /// Where in its life the session is.
    pub state: SessionState,
    /// The client's own notes.
    pub metadata: HashMap<String, String>,
    /// How long the session may rest in each state.
    pub timeouts: SessionTimeouts,
}

impl SandboxSession {
    /// Begins an active session of `client_id` on a sandbox, with the default timeouts.
    pub fn new(sandbox_id: SandboxId, client_id: &str) -> Self {
        let now = Utc::now();
        Self {
            session_id: format!("sess-{}", Uuid::new_v4()),
            sandbox_id,
            client_id: client_id.to_owned(),
            created_at: now,
            last_active_at: now,
            state: SessionState::Active,
            metadata: HashMap::new(),
            timeouts: SessionTimeouts::default(),
        }
    }

    /// Tells whether the session has rested for longer than its state allows.
    ///
    /// One that ended is always past its time. A clock that went backwards counts as no time at all,
    /// so a wrong clock ends nobody's session early.
    pub fn is_timed_out(&self) -> bool {
        let allowed = match self.state {
            SessionState::Active => self.timeouts.idle_timeout,
            SessionState::Detached => self.timeouts.detach_timeout,
            SessionState::Suspended => self.timeouts.suspend_timeout,
            SessionState::Terminated => return true,
        };
        let rested = Utc::now().signed_duration_since(self.last_active_at);
        rested.to_std().is_ok_and(|rested| rested > allowed)
    }

    /// Notes that the client did something just now.
    pub fn touch(&mut self) {
        self.last_active_at = Utc::now();
    }
}

/// Where in its life a session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SessionState {
    /// The client is there.
    Active,
    /// The client went away; the sandbox goes on.
    Detached,
    /// Every process of the sandbox is stopped.
    Suspended,
    /// The session has ended.
    Terminated,
}

/// How long a session may rest in each state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionTimeouts {
    /// While active, without any work.
    pub idle_timeout: Duration,
    /// While detached.
    pub detach_timeout: Duration,
    /// While suspended.
    pub suspend_timeout: Duration,
}

impl Default for SessionTimeouts {
    fn default() -> Self {
        Self {
            idle_timeout: Duration::from_secs(300),
            detach_timeout: Duration::from_secs(3_600),
            suspend_timeout: Duration::from_secs(86_400),
        }
    }
}

/// Asks to join a sandbox by its id.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttachRequest {
    /// The sandbox to join.
    pub sandbox_id: SandboxId,
    /// Who joins.
    pub client_id: String,
    /// Whether a sandbox with this id is made when there is none.
    pub create_if_missing: bool,
    /// What to make then; the default spec if absent.
    pub create_spec: Option<SandboxSpec>,
}

/// What joining a sandbox gave.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttachResult {
    /// The session that now holds the sandbox.
    pub session: SandboxSession,
    /// Whether the sandbox was made for this request.
    pub newly_created: bool,
    /// What the sandbox can do.
    pub capabilities: SandboxCapabilities,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(state: SessionState) -> SandboxSession {
        let mut session = SandboxSession::new(SandboxId::new(), "c");
        session.state = state;
        session
    }

    #[test]
    fn a_session_times_out_by_the_timeout_of_its_state() {
        for (state, rested_secs, expected) in [
            (SessionState::Active, 299, false),
            (SessionState::Active, 301, true),
            (SessionState::Detached, 3_599, false),
            (SessionState::Detached, 3_601, true),
            (SessionState::Suspended, 86_399, false),
            (SessionState::Suspended, 86_401, true),
            (SessionState::Terminated, 1_000_000, true),
        ] {
            let mut session = session(state);
            session.last_active_at = Utc::now() - chrono::Duration::seconds(rested_secs);
            assert_eq!(session.is_timed_out(), expected, "{state:?} after {rested_secs} s");
        }
    }

    #[test]
    fn absurd_durations_and_clocks_never_panic_or_end_a_session_early() {
        let mut endless = session(SessionState::Active);
        endless.timeouts.idle_timeout = Duration::MAX;
        endless.last_active_at = DateTime::<Utc>::MIN_UTC;
        assert!(!endless.is_timed_out(), "a limit beyond all clocks");

        let mut backwards = session(SessionState::Active);
        backwards.timeouts.idle_timeout = Duration::ZERO;
        backwards.last_active_at = DateTime::<Utc>::MAX_UTC;
        assert!(!backwards.is_timed_out(), "the clock went backwards");

        let mut ancient = session(SessionState::Active);
        ancient.last_active_at = DateTime::<Utc>::MIN_UTC;
        assert!(ancient.is_timed_out(), "control: a session of long ago");
    }

    #[test]
    fn touching_a_session_makes_it_fresh() {
        let mut session = session(SessionState::Active);
        session.last_active_at = Utc::now() - chrono::Duration::seconds(301);
        assert!(session.is_timed_out(), "control");
        session.touch();
        assert!(!session.is_timed_out());
    }
}
