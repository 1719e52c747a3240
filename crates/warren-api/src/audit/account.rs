//! What becomes of commands and what is refused to sandboxes, as their manager and builds tell it, into the log.

use std::fmt;
use std::io;
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::task::TaskTracker;
use warren::{BarredDestinations, Command, Outcome, Result, Run, SandboxError, SandboxId, Witness};

use super::Audit;
use super::entry::{Barred, End, Entry, Exec, Place, bounded, written};

/// How long after its end a command may be heard of before it is noted when it ended.
const JUST_NOW: Duration = Duration::from_secs(5);

/// The log, as a manager has it. Clones are of the same log.
#[derive(Clone)]
pub(crate) struct Account {
    audit: Audit,
    /// Waits for room, should there be none.
    tasks: TaskTracker,
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Account")
    }
}

impl Account {
    pub(crate) fn new(audit: Audit, tasks: TaskTracker) -> Self {
        Self { audit, tasks }
    }

    /// Notes something that was done; returns whether that will be in the log.
    fn note(&self, entry: Entry) -> bool {
        match self.audit.at_once(entry) {
            Ok(()) => true,
            Err(None) => false,
            // The disk is slow or full. There are never more of these than there were commands and sandboxes.
            Err(Some(entry)) if tokio::runtime::Handle::try_current().is_ok() => {
                let audit = self.audit.clone();
                self.tasks.spawn(async move {
                    // The daemon ends, and says so in its own log.
                    let _ = audit.after(entry).await;
                });
                true
            }
            Err(Some(_)) => false,
        }
    }
}

/// Returns what is noted of a command.
pub(crate) fn noted(sandbox: &SandboxId, name: Option<&str>, command: &Command) -> Exec {
    let exec = Exec {
        sandbox: sandbox.to_string(),
        name: name.map(str::to_owned),
        workdir: command.workdir.as_ref().map(|place| place.display().to_string()),
        ..Exec::default()
    };
    let words = std::iter::once(&command.program).chain(&command.args);
    exec.command(words.map(String::as_str)).variables(command.env.keys().map(String::as_str))
}

fn ended(run: &Run<'_>, outcome: &Outcome<'_>) -> End {
    let end = End {
        request: bounded(run.request),
        place: Place::new(run.sandbox.as_str(), run.client),
        name: run.name.map(|name| name.0.clone()),
        ..End::default()
    };
    match outcome {
        Outcome::Ended { cause, exit_code, duration, at, denials } => {
            let late =
                at.filter(|at| (chrono::Utc::now() - at).to_std().unwrap_or_default() > JUST_NOW);
            let end = End {
                cause: Some((*cause).clone()),
                exit_code: Some(*exit_code),
                elapsed_ms: Some(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)),
                ended_at: late.map(written),
                ..end
            };
            end.denials(denials)
        }
        Outcome::Failed(error) => End { code: Some(error.code().to_owned()), ..end },
        Outcome::GivenUp => End { code: Some("given_up".to_owned()), ..end },
    }
}

#[async_trait]
impl Witness for Account {
    async fn begins(&self, run: &Run<'_>, command: &Command) -> Result<(), SandboxError> {
        let name = run.name.map(|name| name.as_str());
        let tenant = Place::new(run.sandbox.as_str(), run.client).tenant;
        let exec =
            Exec { request: bounded(run.request), tenant, ..noted(run.sandbox, name, command) };
        let noted = self.audit.before(Entry::Exec(Box::new(exec))).await;
        noted.map_err(|_| SandboxError::Step {
            step: "run a command that is not in the audit log, which cannot be written".to_owned(),
            path: None,
            source: io::ErrorKind::StorageFull.into(),
        })
    }

    fn ended(&self, run: &Run<'_>, outcome: &Outcome<'_>) -> bool {
        self.note(Entry::End(Box::new(ended(run, outcome))))
    }

    fn barred(&self, sandbox: &SandboxId, client: &str, barred: &BarredDestinations) {
        let place = Place::new(sandbox.as_str(), client);
        self.note(Entry::Barred(Box::new(Barred { place, barred: barred.clone() })));
    }

    fn gone(&self, sandbox: &SandboxId, client: &str) {
        self.note(Entry::Gone(Place::new(sandbox.as_str(), client)));
    }
}
