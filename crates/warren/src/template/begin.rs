//! What happens in a sandbox that was made from a template.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::Defaults;
use super::build::shell;
use crate::{
    ExecContext, ExecId, ExecOptions, ExecUser, LogOverflow, LogWait, Result, Sandbox,
    SandboxError, SandboxSpec, TimeLimits,
};

/// What the command is called that a template starts: `warren logs SANDBOX start`.
pub const START: &str = "start";
/// How long is waited between two looks, at first and at most.
const FIRST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);
const TAIL: usize = 2_000;

/// Starts the template's command in a new sandbox and waits until it is ready. Done twice, it starts
/// nothing twice.
pub async fn begin(sandbox: &dyn Sandbox, defaults: &Defaults, patience: Duration) -> Result<()> {
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
        started = Some(sandbox.start_exec(&command, &ExecContext::default(), &options).await?);
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
            let exec = sandbox.start_exec(&command, &ExecContext::default(), &options).await?;
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
