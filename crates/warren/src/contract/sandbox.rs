//! One sandbox.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::mpsc;

use super::{
    BarredDestinations, Base, Capture, Command, DiffEntry, DiffOptions, Enforcement, ExecContext,
    ExecId, ExecOptions, ExecOutput, ExecReport, Extent, FoundExec, PortStream, Reach, Receipt,
    ResourceUsage, Result, SandboxCapabilities, SandboxError, SandboxFiles, SandboxId, SandboxSpec,
    StreamOutput,
};

/// One sandbox: a place on a host where commands run behind walls.
///
/// After [`destroy`](Self::destroy) every call but `id`, `capabilities`, `is_alive` and `destroy`
/// fails with [`SandboxError::Ended`]. Dropping a handle destroys nothing.
#[async_trait]
pub trait Sandbox: Send + Sync {
    /// Returns its id.
    fn id(&self) -> &SandboxId;

    /// Returns what it can do.
    fn capabilities(&self) -> &SandboxCapabilities;

    /// Runs a command to its end. A command that fails is no error; one that cannot start is.
    async fn exec(&self, cmd: &Command, ctx: &ExecContext) -> Result<ExecOutput, SandboxError>;

    /// Runs a command to its end and sends its output as it comes, [`StreamOutput::Exit`] last.
    ///
    /// The result holds the whole output as well. A receiver that is gone does not end the command.
    async fn exec_streaming(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        output_tx: mpsc::Sender<StreamOutput>,
    ) -> Result<ExecOutput, SandboxError>;

    /// Tells whether commands could run in it, now or once it is resumed.
    async fn is_alive(&self) -> bool;

    /// Stops every process at once. Doing so twice is no error.
    async fn suspend(&self) -> Result<(), SandboxError>;

    /// As [`suspend`](Self::suspend), and frees the memory that the sandbox holds: it is on disk until it is needed again. One that is
    /// suspended already is taken further.
    ///
    /// Where that cannot be it is an error, and the sandbox is as it was.
    async fn suspend_to_disk(&self) -> Result<(), SandboxError> {
        Err(SandboxError::Unsupported {
            feature: "suspending to disk".to_owned(),
            backend: self.capabilities().backend.clone(),
            hint: "suspend it in memory, or choose a backend that has it, `linux` for one"
                .to_owned(),
        })
    }

    /// Lets every process continue where it was. Doing so twice is no error.
    async fn resume(&self) -> Result<(), SandboxError>;

    /// Saves its state under a name and returns the id of the snapshot.
    async fn snapshot(&self, name: &str) -> Result<String, SandboxError>;

    /// Goes back to a state that was saved.
    async fn restore(&self, snapshot_id: &str) -> Result<(), SandboxError>;

    /// Ends every process and removes everything it has on the host. Doing so twice is no error.
    async fn destroy(&self) -> Result<(), SandboxError>;

    /// Returns what it has used since it was made.
    async fn resource_usage(&self) -> Result<ResourceUsage, SandboxError>;

    /// Runs a command to its end and tells how it ended.
    async fn exec_report(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
    ) -> Result<ExecReport, SandboxError> {
        self.exec(cmd, ctx).await.map(ExecReport::from)
    }

    /// Starts a command that has a log, and returns once its program runs.
    ///
    /// It goes on whoever listens, until it ends, is ended, or its sandbox is.
    async fn start_exec(
        &self,
        cmd: &Command,
        ctx: &ExecContext,
        options: &ExecOptions,
    ) -> Result<FoundExec, SandboxError> {
        let _ = (cmd, ctx, options);
        Err(SandboxError::Unsupported {
            feature: "execs with a log".to_owned(),
            backend: self.capabilities().backend.clone(),
            hint: "run the command to its end, or choose another backend".to_owned(),
        })
    }

    /// Lists the execs with a log that run, and those that ended and are still remembered, the oldest
    /// first.
    async fn list_execs(&self) -> Result<Vec<FoundExec>, SandboxError> {
        Ok(Vec::new())
    }

    /// Finds an exec by its name.
    async fn find_exec(&self, id: &ExecId) -> Result<Option<FoundExec>, SandboxError> {
        Ok(self.list_execs().await?.into_iter().find(|exec| exec.id() == id))
    }

    /// Gives a pristine sandbox to a caller: binds the whole of `spec` to it and returns it as that
    /// caller's, or `None` if this sandbox cannot be what the spec asks for.
    ///
    /// Whoever claims must be the only holder, and no command may have run. After `None` the
    /// sandbox is as it was.
    async fn claim(&self, spec: &SandboxSpec) -> Result<Option<Arc<dyn Sandbox>>, SandboxError> {
        let _ = spec;
        Ok(None)
    }

    /// Connects to a TCP port on the sandbox's own loopback, 127.0.0.1 or else ::1.
    ///
    /// Fails with [`SandboxError::PortClosed`] if nothing listens there, and at once if the sandbox
    /// is suspended or has ended. Nothing but the sandbox itself can be reached this way.
    async fn connect(&self, port: u16) -> Result<PortStream, SandboxError> {
        let _ = port;
        Err(SandboxError::Unsupported {
            feature: "connections to ports".to_owned(),
            backend: self.capabilities().backend.clone(),
            hint: "choose a backend that has them, `linux` for one".to_owned(),
        })
    }

    /// Has it reach this much of what its spec lets it, from now on and also after a restart. What it is connected to and
    /// may not be any more is ended.
    ///
    /// One that reaches nothing anyway can be denied anything.
    async fn set_reach(&self, reach: &Reach) -> Result<(), SandboxError> {
        if reach.allow.is_empty() && !self.capabilities().has_network {
            return Ok(());
        }
        Err(SandboxError::Unsupported {
            feature: "changing what a sandbox may reach".to_owned(),
            backend: self.capabilities().backend.clone(),
            hint: "say it when the sandbox is made, with a backend that has a network, `linux` for one"
                .to_owned(),
        })
    }

    /// Returns how much it reaches of what its spec lets it.
    fn reach(&self) -> Reach {
        Reach::default()
    }

    /// Returns what it was refused to reach since this was asked before, if anything, and if it is time to say so: whoever is
    /// refused again and again is told of ever more rarely. With `all` it is time.
    fn take_barred(&self, all: bool) -> Option<BarredDestinations> {
        let _ = all;
        None
    }

    /// Returns what its backend needs to find it again after a restart, to be kept in a store and
    /// understood by that backend alone; `None` if it ends with the process that made it.
    fn anchor(&self) -> Option<String> {
        None
    }

    /// Returns what its root stands on.
    fn base(&self) -> Base {
        Base::default()
    }

    /// Makes layers of what was written since it was made, while all of it stands still. What a
    /// later capture has in common with an earlier one is not copied again.
    async fn capture(&self) -> Result<Capture, SandboxError> {
        Err(SandboxError::Unsupported {
            feature: "snapshots".to_owned(),
            backend: self.capabilities().backend.clone(),
            hint: "copy out what is needed before the sandbox is destroyed".to_owned(),
        })
    }

    /// Ends every process and makes the sandbox anew on other ground, with its id and its spec. What
    /// was written is gone. If that cannot be done the sandbox has ended, unless the error was found
    /// before anything was.
    async fn rebase(&self, base: &Base) -> Result<(), SandboxError> {
        let _ = base;
        Err(SandboxError::Unsupported {
            feature: "going back".to_owned(),
            backend: self.capabilities().backend.clone(),
            hint: "make a new sandbox".to_owned(),
        })
    }

    /// Lists what is otherwise now than in what `since` says, or than in what it was made from.
    async fn diff(
        &self,
        since: Option<&Base>,
        options: &DiffOptions,
    ) -> Result<Vec<DiffEntry>, SandboxError> {
        let _ = (since, options);
        Err(SandboxError::Unsupported {
            feature: "differences".to_owned(),
            backend: self.capabilities().backend.clone(),
            hint: "choose a backend that has snapshots, `linux` for one".to_owned(),
        })
    }

    /// Returns its files, if its backend lets them be reached from outside.
    fn files(&self) -> Option<&dyn SandboxFiles> {
        None
    }

    /// Returns its files as one of its users has them, by a name of its `/etc/passwd`.
    ///
    /// Paths may begin at that user's home, with or without `~`; what is made is theirs; entries have
    /// their [`details`](super::FileEntry::details), in lists and changes as well. What else may be
    /// done with files is as the profile has it: in one that has a root, everything.
    fn files_of(&self, user: &str) -> Option<Arc<dyn SandboxFiles>> {
        let _ = user;
        None
    }

    /// Returns what holds it, as far as that was proved by trying.
    fn enforcement(&self) -> Enforcement {
        Enforcement::default()
    }

    /// Says what was tried when it was made.
    fn receipt(&self) -> Receipt {
        Receipt::untried(self.id(), self.capabilities())
    }

    /// Tries its walls from inside and says what happened. Beyond [`Extent::Walls`] nothing may run in
    /// it: limits are lowered for the moment.
    async fn verify(&self, extent: Extent) -> Result<Receipt, SandboxError> {
        let _ = extent;
        Ok(self.receipt())
    }
}

impl fmt::Debug for dyn Sandbox + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sandbox").field("id", self.id()).finish_non_exhaustive()
    }
}
