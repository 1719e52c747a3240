//! What happens in a sandbox that was made from a template.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::TaskTracker;

use super::Defaults;
use super::build::shell;
use crate::{
    Command, ExecContext, ExecId, ExecOptions, ExecUser, FoundExec, LogOverflow, LogWait, Outcome,
    Result, Run, Sandbox, SandboxError, SandboxId, SandboxSpec, TimeLimits, Witness,
};

/// What the command is called that a template starts: `warren logs SANDBOX start`.
pub const START: &str = "start";
/// How long is waited between two looks, at first and at most.
const FIRST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);
const TAIL: usize = 2_000;

/// For whom a template has commands run, and who hears of them.
#[derive(Debug, Clone, Default)]
pub struct Behalf {
    /// Who hears of each before it is run; nobody if absent.
    witness: Option<Arc<dyn Witness>>,
    /// Whose they are.
    client: String,
    /// What they serve: a request, or a build.
    request: String,
    /// Waits for their ends and tells of them, where no manager does.
    ends: Option<TaskTracker>,
}

impl Behalf {
    /// For a client and a request, in a sandbox whose manager tells how commands end.
    pub fn new(witness: Option<Arc<dyn Witness>>, client: String, request: String) -> Self {
        Self { witness, client, request, ends: None }
    }

    /// In a sandbox that no manager has; `ends` waits for the ends of commands.
    pub(super) fn telling(self, ends: TaskTracker) -> Self {
        Self { ends: Some(ends), ..self }
    }

    /// Starts a command, unless it cannot be noted.
    pub(super) async fn start(
        &self,
        sandbox: &dyn Sandbox,
        command: &Command,
        options: ExecOptions,
    ) -> Result<FoundExec> {
        let id = options.id.clone().unwrap_or_default();
        if let Some(witness) = &self.witness {
            witness.begins(&self.run(sandbox.id(), &id), command).await?;
        }
        let context = ExecContext { request_id: self.request.clone(), ..ExecContext::default() };
        let options = ExecOptions { id: Some(id.clone()), ..options };
        let started = sandbox.start_exec(command, &context, &options).await;
        if let (Some(witness), Some(ends)) = (&self.witness, &self.ends) {
            match &started {
                Ok(exec) => {
                    let (this, exec) = (self.clone(), Arc::clone(exec));
                    let (witness, sandbox) = (Arc::clone(witness), sandbox.id().clone());
                    ends.spawn(async move {
                        let end = exec.wait().await;
                        witness.ended(&this.run(&sandbox, &id), &Outcome::of(&end));
                    });
                }
                Err(error) => {
                    witness.ended(&self.run(sandbox.id(), &id), &Outcome::Failed(error));
                }
            }
        }
        started
    }

    /// Tells what a sandbox was refused that is gone now.
    pub(super) fn barred(&self, sandbox: &dyn Sandbox) {
        if let Some(witness) = &self.witness
            && let Some(barred) = sandbox.take_barred(true)
        {
            witness.barred(sandbox.id(), &self.client, &barred);
        }
    }

    fn run<'a>(&'a self, sandbox: &'a SandboxId, name: &'a ExecId) -> Run<'a> {
        let Self { client, request, .. } = self;
        Run { sandbox, client, request, name: Some(name) }
    }
}

/// Starts the template's command in a new sandbox and waits until it is ready. Done twice, it starts
/// nothing twice.
///
/// Whoever hears of these commands hears here that they begin; how they end is for the manager of the sandbox to tell.
pub async fn begin(
    sandbox: &dyn Sandbox,
    defaults: &Defaults,
    patience: Duration,
    behalf: &Behalf,
) -> Result<()> {
    let user = defaults.user.as_ref().map(|name| ExecUser { name: name.clone(), workdir: None });
    let by = ["/bin/sh".to_owned(), "-c".to_owned()];
    let spec = SandboxSpec::default();
    let mut started = None;
    if let Some(start) = &defaults.start {
        let options = ExecOptions {
            id: Some(ExecId(START.to_owned())),
            overflow: LogOverflow::Forget,
            // It serves for as long as the sandbox lives.
            time_limits: TimeLimits::HeldByCaller,
            user: user.clone(),
            ..ExecOptions::default()
        };
        let command = shell(&by, start, defaults, &spec);
        started = Some(behalf.start(sandbox, &command, options).await?);
    }
    let Some(ready) = &defaults.ready else { return Ok(()) };
    let command = shell(&by, ready, defaults, &spec);
    let deadline = Instant::now() + patience;
    let mut pause = FIRST;
    loop {
        let options = ExecOptions {
            overflow: LogOverflow::Forget,
            user: user.clone(),
            ..ExecOptions::default()
        };
        let tried = async {
            let exec = behalf.start(sandbox, &command, options).await?;
            let end = exec.wait().await?;
            exec.forget().await?;
            Ok::<_, SandboxError>(end.exit_code)
        };
        let late = || SandboxError::Timeout { what: format!("`{ready}`"), after: patience };
        if timeout_at(deadline, tried).await.map_err(|_| late())?? == 0 {
            return Ok(());
        }
        if let Some(start) = &started
            && let Some(end) = start.info().end
            && end.exit_code != 0
        {
            let said = start.read(0, TAIL, LogWait::Never).await?;
            let said: Vec<u8> = said.pieces.into_iter().flat_map(|piece| piece.bytes).collect();
            let said = String::from_utf8_lossy(&said).trim().to_owned();
            return Err(SandboxError::Conflict {
                action: "start what the template starts".to_owned(),
                reason: format!("it ended with exit code {}: {said}", end.exit_code),
            });
        }
        if Instant::now() + pause >= deadline {
            return Err(late());
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST);
    }
}
