//! Stateful shell sessions: commands in one shell that keeps its directory, variables, functions,
//! traps and options, each command with its own exit code, cause and usage.
//!
//! A shell is an exec named `shell-NAME` whose descriptor 3 carries what it is told and what it says
//! (see `shell/script.rs`). Everything there is to know about it is in the exec's log, so it outlives whoever
//! opened it: opening it by its name again goes on in the same shell.
//!
//! What a command can do to it:
//!
//! - A command that takes too long, writes too much or is interrupted gets SIGINT, and the shell gives
//!   up the line with whatever loops and functions it is in. As at a terminal, it goes on with the
//!   line if it waits for a program that handles SIGINT and exits by itself. If the command is there
//!   after [`ShellOptions::grace`], everything that the shell ever started is ended (its background
//!   jobs, too); if not even that is enough, because the shell itself ignores SIGINT, the shell is.
//! - `exit`, `exec PROGRAM` and the like end it. The result says so, and whoever opens the name next
//!   gets a new shell.
//! - `set -e` has no effect on commands, as always to the left of `||`; give scripts to a shell of
//!   their own.
//! - It is an interactive shell: `$-` has an `i` and aliases work. Bash announces a background job on
//!   stderr as `[1] 123`, leaves an empty line there at an interrupt, and may complain that it has no
//!   terminal (`tcsetattr`) when a signal ends a program. The few steps around a command are seen by
//!   `set -x` and a DEBUG trap.
//!
//! How a command ended ([`ShellOutput::cause`]) is told by whoever knows:
//!
//! - The kernel counts what it refused to the sandbox. A command that failed, and during which the
//!   count of memory kills or of refused processes rose, or after which nothing more can be written, met
//!   that limit, as an exec of its own would have. (Without control groups init itself ends what the
//!   shell started when there is too much memory, and counts that.)
//! - That a signal ended the program that made the command fail, and which, is what bash got from the
//!   kernel when it waited for it: `exit 137` is [`ExecCause::Exited`], and a program that was killed is
//!   [`ExecCause::Signalled`]. A subshell (`(...)`, a function in a pipeline) that waited for such a program
//!   exits by itself, with 128 and the signal. Another shell than bash tells a status alone.
//! - What was done to it (time, output, an interrupt) is known to the one who did it.
//!
//! Fooling all this about how a command ended is possible for that command, and harms nobody else: the
//! sandbox is one trust domain. What comes from it is parsed strictly and bounded.

mod script;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use uuid::Uuid;

use self::script::{Ear, Word};
use crate::{
    Command, ExecCause, ExecContext, ExecEnd, ExecHandle, ExecId, ExecInput, ExecMeasure,
    ExecOptions, FileSource, FoundExec, LogOverflow, LogPiece, LogStream, LogWait, ResourceLimits,
    Result, Sandbox, SandboxError, SandboxId, TimeLimits, WriteOptions,
};

/// What the exec of a shell is called before the shell's own name.
const PREFIX: &str = "shell-";
/// The longest command.
const MAX_COMMAND: usize = 1 << 20;
/// How much output of one command is kept where neither caller nor sandbox says.
const MAX_OUTPUT: u64 = 10 << 20;
/// How much of its input travels at once.
const CHUNK: usize = 256 << 10;
/// How much of the log is read at once.
const READ: usize = 256 << 10;
/// How long a shell may take to answer when nothing runs in it.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long is waited for a command that an earlier caller left, before it counts as running.
const SHORT: Duration = Duration::from_millis(200);
/// How often a look is taken at the CPU time of a command.
const CPU_LOOK: Duration = Duration::from_millis(500);
/// How often a look is taken at a command whose sandbox is suspended.
const STILL_LOOK: Duration = Duration::from_millis(250);
/// How often everything that a shell started is ended before the shell is.
const STEPS: u32 = 5;
const SIGINT: i32 = 2;
const SIGCONT: i32 = 18;

/// How a shell is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShellOptions {
    /// Its name.
    pub name: String,
    /// Where a new one begins; the sandbox's own directory if absent.
    pub workdir: Option<PathBuf>,
    /// The environment that a new one begins with, beside the sandbox's own.
    pub env: BTreeMap<String, String>,
    /// How long a command may take to heed an interrupt before more is done to it.
    pub grace: Duration,
}

impl Default for ShellOptions {
    fn default() -> Self {
        Self {
            name: "main".to_owned(),
            workdir: None,
            env: BTreeMap::new(),
            grace: Duration::from_secs(2),
        }
    }
}

/// A command for a shell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShellCommand {
    /// What the shell is to evaluate: anything that could be a script.
    pub command: String,
    /// How long it may take. The sandbox's `max_wall_time_ms` holds too.
    pub timeout: Option<Duration>,
    /// How much it may write. The sandbox's `max_output_bytes` holds too.
    pub max_output_bytes: Option<u64>,
    /// What it reads; nothing if absent. It is a file in the sandbox's `/tmp` for so long.
    pub stdin: Option<Vec<u8>>,
}

impl ShellCommand {
    /// Makes a command that is held by the sandbox's limits alone.
    pub fn new(command: impl Into<String>) -> Self {
        Self { command: command.into(), ..Self::default() }
    }

    /// Sets how long it may take.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Checks what can be checked without a shell.
    pub fn validate(&self) -> Result<()> {
        if self.command.contains('\0') {
            let hint = "no shell can be told a NUL byte; write it as \\0 for printf";
            return Err(SandboxError::invalid("command", "it contains a NUL byte", hint));
        }
        if self.command.len() > MAX_COMMAND {
            let what = "the command".to_owned();
            return Err(SandboxError::TooLarge { what, limit: MAX_COMMAND as u64 });
        }
        if self.timeout == Some(Duration::ZERO) {
            let hint = "leave the timeout out to have the sandbox's own";
            return Err(SandboxError::invalid("timeout", "no command ends within no time", hint));
        }
        Ok(())
    }
}

/// What a command in a shell gave, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShellOutput {
    /// The status that the shell gave it, or the one that stands for what was done to it.
    pub exit_code: i32,
    /// How it ended; the [module](self) says who tells. [`ExecCause::Signalled`] with SIGINT is a
    /// command that was [interrupted](Shell::interrupt).
    pub cause: ExecCause,
    /// What was written to stdout meanwhile, by it and by what earlier commands left running.
    pub stdout: Vec<u8>,
    /// The same of stderr.
    pub stderr: Vec<u8>,
    /// Whether there was more than was kept.
    pub truncated: bool,
    /// What was used meanwhile.
    pub usage: ShellUsage,
    /// Where in the log of the shell's exec its output begins.
    pub begin: u64,
    /// Where in the log it ends.
    pub end: u64,
    /// Whether the shell is still there.
    pub shell: ShellState,
}

/// Whether a shell is still there after a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShellState {
    /// It waits for the next command.
    Alive,
    /// It ended with the command, and its state is lost.
    Ended,
}

/// What was used while a command ran, by it and by what earlier commands left running.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShellUsage {
    /// CPU time, user and system.
    pub cpu_time: Duration,
    /// Time by the clock.
    pub wall_time: Duration,
    /// What was written to stdout and stderr, kept or not.
    pub output_bytes: u64,
    /// The most memory that the sandbox held at once; `None` where nobody counts.
    pub peak_memory_bytes: Option<u64>,
    /// What was read, by whatever call, by the shell and by all that it waited for.
    pub bytes_read: u64,
    /// What was written in the same way.
    pub bytes_written: u64,
}

/// A shell at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShellInfo {
    /// Its name.
    pub name: String,
    /// The exec that it is.
    pub exec_id: ExecId,
    /// Its pid inside the sandbox.
    pub pid: Option<i32>,
    /// When it was opened.
    pub started_at: DateTime<Utc>,
    /// How many bytes its log has taken.
    pub logged: u64,
    /// How it ended, once it has.
    pub end: Option<ExecEnd>,
}

/// A shell in a sandbox. Dropping it ends nothing.
#[derive(Debug)]
pub struct Shell {
    name: String,
    sandbox: Arc<dyn Sandbox>,
    exec: FoundExec,
    limits: ResourceLimits,
    grace: Duration,
    is_new: bool,
    /// Held by whoever runs a command.
    turn: tokio::sync::Mutex<Turn>,
    /// Counts how often somebody asked for an interrupt.
    interrupts: watch::Sender<u64>,
}

/// What is known of a shell's conversation.
#[derive(Debug)]
struct Turn {
    /// How far its log was read.
    at: u64,
    standing: Standing,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Standing {
    /// It was just started, and not set up.
    New,
    /// It waits for a line.
    Idle,
    /// It may not have been set up, or may have got half a line from one who is gone.
    Unsure,
    /// A command runs whose caller is gone; with this token it was asked when that ends.
    Busy(Option<String>),
}

/// Why a command is to be stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Asked,
    Time,
    Output,
    Cpu,
    /// The shell does not take it.
    Deaf,
}

/// How far stopping a command has got.
#[derive(Debug)]
struct Stop {
    why: Why,
    step: u8,
    next: Instant,
}

/// What holds a command, and what is kept of it.
#[derive(Debug, Default)]
struct Watch {
    deadline: Option<Instant>,
    /// When the shell must have taken it.
    taken_by: Option<Instant>,
    /// What was used and refused before it began.
    before: ExecMeasure,
    /// What the sandbox held most, as far as that was looked at.
    peak_memory: Option<u64>,
    /// For how long it has stood still, so that its time is longer by that.
    stood_still: Duration,
    /// Nothing is done before, since it stands still.
    still_until: Option<Instant>,
    cpu_limit: Option<Duration>,
    cpu_look: Option<Instant>,
    stop: Option<Stop>,
    /// Absent if this is no command.
    max_output: Option<u64>,
    begin: u64,
    /// Whether the shell has taken it.
    taken: bool,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    output: u64,
    forgotten: bool,
    stream: Option<mpsc::Sender<LogPiece>>,
    /// What the stream has no room for yet.
    pending: VecDeque<LogPiece>,
}

/// How waiting for a command ended.
#[derive(Debug)]
enum Finish {
    /// Its status and the signal of its last program, and where its output ends.
    Status(u8, u8, u64),
    /// The shell is gone.
    Gone(Box<ExecEnd>, u64),
    /// It took longer than was to be waited.
    Late,
}

fn token() -> String {
    Uuid::new_v4().simple().to_string()
}

/// Returns the name of the exec that a shell is.
fn exec_id(name: &str) -> Result<ExecId> {
    let id = ExecId(format!("{PREFIX}{name}"));
    if name.is_empty() || id.validate().is_err() {
        let shown: String = name.chars().take(64).collect();
        return Err(SandboxError::invalid(
            "name",
            format!("`{}` is no name of a shell", shown.escape_debug()),
            "a name has up to 58 letters, digits, `-`, `_` and `.`",
        ));
    }
    Ok(id)
}

/// Returns a file that helps a bash to say which signal ended a program, if there is one.
pub(crate) fn helper() -> io::Result<Option<OwnedFd>> {
    const TOLD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/told.so"));
    // One for each shell, so that no two sandboxes have an inode in common.
    warren_sys::fd::sealed("warren-told", TOLD).map(Some)
}

/// Tells whether an exec is a shell.
pub(crate) fn is_shell(exec: &dyn ExecHandle) -> bool {
    exec.id().as_str().starts_with(PREFIX)
        && exec.info().command.last().is_some_and(|word| word == script::MARK)
}

impl Shell {
    /// Opens a shell, or finds the one of this name. One that has ended is replaced by a new one.
    pub async fn open(sandbox: Arc<dyn Sandbox>, options: &ShellOptions) -> Result<Self> {
        if let Some(found) = Self::find(&sandbox, &options.name, options.grace).await? {
            if !found.has_ended() {
                return Ok(found);
            }
            found.exec.forget().await?;
        }
        let command = Command {
            args: ["-c", script::START, script::MARK].map(str::to_owned).to_vec(),
            workdir: options.workdir.clone(),
            env: options.env.clone().into_iter().collect(),
            ..Command::new(script::PROGRAM)
        };
        let exec_options = ExecOptions {
            id: Some(exec_id(&options.name)?),
            input: ExecInput::Control,
            overflow: LogOverflow::Forget,
            time_limits: TimeLimits::HeldByCaller,
            ..ExecOptions::default()
        };
        let exec = sandbox.start_exec(&command, &ExecContext::default(), &exec_options).await?;
        let turn = Turn { at: 0, standing: Standing::New };
        Ok(Self::new(&sandbox, &options.name, exec, options.grace, turn, true))
    }

    /// Finds a shell by its name, also one that has ended and is still remembered.
    pub async fn find(
        sandbox: &Arc<dyn Sandbox>,
        name: &str,
        grace: Duration,
    ) -> Result<Option<Self>> {
        let id = exec_id(name)?;
        let Some(exec) = sandbox.find_exec(&id).await? else { return Ok(None) };
        if !is_shell(&*exec) {
            return Err(SandboxError::AlreadyExists { what: "exec", id: id.0 });
        }
        let turn = look_back(&*exec).await?;
        Ok(Some(Self::new(sandbox, name, exec, grace, turn, false)))
    }

    /// Lists the shells of a sandbox, the oldest first.
    pub async fn list(sandbox: &dyn Sandbox) -> Result<Vec<ShellInfo>> {
        let all = sandbox.list_execs().await?;
        Ok(all.iter().filter(|exec| is_shell(&***exec)).map(|exec| describe(&**exec)).collect())
    }

    fn new(
        sandbox: &Arc<dyn Sandbox>,
        name: &str,
        exec: FoundExec,
        grace: Duration,
        turn: Turn,
        is_new: bool,
    ) -> Self {
        Self {
            name: name.to_owned(),
            sandbox: Arc::clone(sandbox),
            exec,
            limits: sandbox.capabilities().limits.clone(),
            grace,
            is_new,
            turn: tokio::sync::Mutex::new(turn),
            interrupts: watch::Sender::new(0),
        }
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the exec that it is, to read its log.
    pub fn exec(&self) -> &FoundExec {
        &self.exec
    }

    /// Tells whether opening it made it.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Tells whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.exec.info().end.is_some()
    }

    /// Says how it is now.
    pub fn info(&self) -> ShellInfo {
        describe(&*self.exec)
    }

    /// Runs a command to its end. While another runs it is refused with a [`SandboxError::Conflict`].
    ///
    /// Whoever stops waiting leaves the command to run; what it writes is in the log.
    pub async fn run(&self, command: &ShellCommand) -> Result<ShellOutput> {
        self.run_with(command, None).await
    }

    /// Runs a command to its end and sends its output as it comes.
    ///
    /// The result holds the output as well. A receiver that is gone, or does not take what there is
    /// by the time the command is to be stopped, misses the rest: it can read that in the log.
    pub async fn run_streaming(
        &self,
        command: &ShellCommand,
        output_tx: mpsc::Sender<LogPiece>,
    ) -> Result<ShellOutput> {
        self.run_with(command, Some(output_tx)).await
    }

    async fn run_with(
        &self,
        command: &ShellCommand,
        stream: Option<mpsc::Sender<LogPiece>>,
    ) -> Result<ShellOutput> {
        command.validate()?;
        // Before it is our turn: whoever finds it taken may ask us at once.
        let mut interrupts = self.interrupts.subscribe();
        let mut turn = self.turn.try_lock().map_err(|_| self.busy())?;
        self.settle(&mut turn).await?;
        let before = self.awake().await?;
        self.exec.count_from_here();
        let token = token();
        let input = self.bring(&token, command.stdin.as_deref()).await?;
        let started = Instant::now();
        let wall = self.limits.max_wall_time_ms.map(Duration::from_millis);
        let timeout = [command.timeout, wall].into_iter().flatten().min();
        let output = [command.max_output_bytes, self.limits.max_output_bytes];
        let cpu_limit = self.limits.max_cpu_time_ms.map(Duration::from_millis);
        let mut watch = Watch {
            // One beyond what the clock can tell is none.
            deadline: timeout.and_then(|timeout| started.checked_add(timeout)),
            taken_by: Some(started + PATIENCE),
            before,
            stood_still: before.stood_still,
            cpu_limit,
            cpu_look: cpu_limit.map(|_| started + CPU_LOOK),
            max_output: Some(output.into_iter().flatten().min().unwrap_or(MAX_OUTPUT)),
            stream,
            ..Watch::default()
        };
        // What it writes comes after this. It need not come after what says that it begins: only of
        // what is written first the log promises that it is first.
        turn.at = turn.at.max(self.exec.info().logged);
        watch.begin = turn.at;
        // Until we know better: we may be dropped at any point from here on.
        turn.standing = Standing::Unsure;
        let path = input.as_ref().map(|input| input.path.as_str());
        let line = script::begin(&token, &command.command, path.unwrap_or_default());
        let sent = tokio::time::timeout(PATIENCE, self.tell(&line)).await;
        sent.map_err(|_| self.deaf())??;
        let finish = self.follow(&mut turn, &token, &mut watch, &mut interrupts).await?;
        let wall_time = started.elapsed();
        let after = self.exec.measure().await.unwrap_or(before);
        watch.note_memory(&after);
        if let Some(input) = input {
            input.remove().await;
        }
        let (own, code, end, shell) = match finish {
            Finish::Status(status, signal, end) => {
                let cause = judge(status, signal, &before, &after);
                (cause, status.into(), end, ShellState::Alive)
            }
            Finish::Gone(ended, end) => (ended.cause, ended.exit_code, end, ShellState::Ended),
            Finish::Late => return Err(self.deaf()),
        };
        let done = match watch.stop.as_ref().map(|stop| stop.why) {
            None => None,
            Some(Why::Asked) => Some(ExecCause::Signalled { signal: SIGINT }),
            Some(Why::Time) => Some(ExecCause::TimedOut),
            Some(Why::Output) => Some(ExecCause::OutputLimit),
            Some(Why::Cpu) => Some(ExecCause::CpuTime),
            Some(Why::Deaf) => return Err(self.deaf()),
        };
        let kept = (watch.stdout.len() + watch.stderr.len()) as u64;
        Ok(ShellOutput {
            exit_code: done.as_ref().map_or(code, ExecCause::exit_code),
            cause: done.unwrap_or(own),
            truncated: watch.forgotten || kept < watch.output,
            stdout: watch.stdout,
            stderr: watch.stderr,
            usage: ShellUsage {
                cpu_time: after.cpu_time.saturating_sub(before.cpu_time),
                wall_time,
                output_bytes: watch.output,
                peak_memory_bytes: watch.peak_memory,
                bytes_read: after.bytes_read.saturating_sub(before.bytes_read),
                bytes_written: after.bytes_written.saturating_sub(before.bytes_written),
            },
            begin: watch.begin,
            end,
            shell,
        })
    }

    /// Stops the command that runs and waits until it has; returns whether there was one.
    ///
    /// Its directory, variables and functions stay as the command has left them. See the module for
    /// what happens to a command that does not heed SIGINT.
    pub async fn interrupt(&self) -> Result<bool> {
        if !self.has_ended() {
            self.awake().await?;
        }
        let Ok(mut turn) = self.turn.try_lock() else {
            self.interrupts.send_modify(|count| *count += 1);
            // Whoever runs it sees to it, and lets go of its turn.
            let _ = tokio::time::timeout(self.grace * 3 + PATIENCE, self.turn.lock()).await;
            return Ok(true);
        };
        if self.has_ended() || turn.standing == Standing::Idle {
            return Ok(false);
        }
        if !matches!(turn.standing, Standing::Busy(_)) {
            // It may be about to run what was sent.
            match self.settle(&mut turn).await {
                Ok(()) => return Ok(false),
                Err(SandboxError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let token = token();
        let stop = Stop { why: Why::Asked, step: 0, next: Instant::now() };
        let stood_still = self.awake().await?.stood_still;
        let mut watch = Watch { stop: Some(stop), stood_still, ..Watch::default() };
        self.follow(&mut turn, &token, &mut watch, &mut self.interrupts.subscribe()).await?;
        Ok(true)
    }

    /// Ends it with everything it started, and forgets it with its log.
    pub async fn close(&self) -> Result<()> {
        if !self.has_ended() {
            self.exec.kill().await?;
            self.exec.wait().await?;
        }
        self.exec.forget().await
    }

    /// Measures it, if it could do what it is told.
    async fn awake(&self) -> Result<ExecMeasure> {
        let measured = self.exec.measure().await?;
        match measured.suspended {
            true => Err(SandboxError::Suspended { id: self.sandbox.id().clone() }),
            false => Ok(measured),
        }
    }

    /// Puts what a command is to read where the shell can open it.
    async fn bring(&self, token: &str, stdin: Option<&[u8]>) -> Result<Option<Brought>> {
        let Some(stdin) = stdin else { return Ok(None) };
        let unsupported = || SandboxError::Unsupported {
            feature: "input for a command in a shell".to_owned(),
            backend: self.sandbox.capabilities().backend.clone(),
            hint: "have the command read a file".to_owned(),
        };
        let files = self.sandbox.files().ok_or_else(unsupported)?;
        let brought = Brought {
            sandbox: Arc::clone(&self.sandbox),
            path: format!("/tmp/.warren-stdin-{token}"),
        };
        let options = WriteOptions { mode: Some(0o600), ..WriteOptions::default() };
        let chunks: Vec<_> = stdin.chunks(CHUNK).map(|chunk| Ok(chunk.to_vec())).collect();
        let data: FileSource = Box::pin(futures_util::stream::iter(chunks));
        files.write(Path::new(&brought.path), options, data).await?;
        Ok(Some(brought))
    }

    fn busy(&self) -> SandboxError {
        SandboxError::Conflict {
            action: format!("run a command in shell `{}`", self.name),
            reason: "another one runs in it".to_owned(),
        }
    }

    fn gone(&self) -> SandboxError {
        SandboxError::Conflict {
            action: format!("run a command in shell `{}`", self.name),
            reason: "it has ended".to_owned(),
        }
    }

    fn deaf(&self) -> SandboxError {
        SandboxError::Timeout { what: format!("shell `{}`", self.name), after: PATIENCE }
    }

    async fn tell(&self, line: &str) -> Result<()> {
        match self.exec.write_input(None, line.as_bytes(), false).await {
            // It may have closed the way by which it is told things, and live on.
            Err(SandboxError::Conflict { .. }) if self.has_ended() => Err(self.gone()),
            other => other.map(drop),
        }
    }

    /// Asks how the command ended. One that has much to read yet need not be told once more.
    async fn ask(&self, token: &str, patience: Duration) -> Result<()> {
        let asked = tokio::time::timeout(patience, self.tell(&script::ask(token))).await;
        match asked {
            Ok(Err(SandboxError::Conflict { .. })) | Err(_) => Ok(()),
            Ok(other) => other,
        }
    }

    /// Waits until the shell is ready for a command: sets up a new one, and gets over what whoever was
    /// here before us has left.
    async fn settle(&self, turn: &mut Turn) -> Result<()> {
        let known = match &turn.standing {
            Standing::Idle => return if self.has_ended() { Err(self.gone()) } else { Ok(()) },
            Standing::New | Standing::Unsure => None,
            Standing::Busy(token) => token.clone(),
        };
        let is_new = turn.standing == Standing::New;
        let is_asked = known.is_some();
        let token = known.unwrap_or_else(token);
        let interrupts = &mut self.interrupts.subscribe();
        for _ in 0..3 {
            if !is_asked {
                let sent = tokio::time::timeout(PATIENCE, self.tell(script::SET_UP)).await;
                sent.map_err(|_| self.deaf())??;
                self.ask(&token, PATIENCE).await?;
            }
            let patience = match (&turn.standing, is_new) {
                (Standing::Busy(_), _) => SHORT,
                (_, true) => PATIENCE,
                (_, false) => PATIENCE / 5,
            };
            let taken_by = Some(Instant::now() + patience);
            let stood_still = self.awake().await?.stood_still;
            let mut watch = Watch { taken_by, stood_still, ..Watch::default() };
            match self.follow(turn, &token, &mut watch, interrupts).await? {
                Finish::Status(..) => return Ok(()),
                Finish::Gone(..) => return Err(self.gone()),
                Finish::Late => {}
            }
            if matches!(turn.standing, Standing::Busy(_)) {
                turn.standing = Standing::Busy(Some(token));
                return Err(self.busy());
            }
            // Half a line from an earlier caller is given up by SIGINT, which does nothing to a shell
            // that waits for a line; but one that is being started would end.
            if !is_new {
                self.exec.signal(SIGINT).await?;
            }
        }
        Err(self.deaf())
    }

    /// Reads the log until the shell has answered `token`, and stops the command when it is to be.
    async fn follow(
        &self,
        turn: &mut Turn,
        token: &str,
        watch: &mut Watch,
        interrupts: &mut watch::Receiver<u64>,
    ) -> Result<Finish> {
        let mut ear = Ear::default();
        loop {
            let listens = watch.stop.is_none() && watch.is_of_a_command();
            if listens && interrupts.has_changed().unwrap_or(false) {
                watch.stop(Why::Asked);
                continue;
            }
            if let Some(finish) = self.keep_time(turn, token, watch).await? {
                return Ok(finish);
            }
            let wake = watch.wakes();
            let sleep = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let read = tokio::select! {
                read = self.exec.read(turn.at, READ, LogWait::More), if watch.pending.is_empty() => {
                    read?
                }
                () = watch.hand_on(), if !watch.pending.is_empty() => continue,
                _ = interrupts.changed(), if listens => {
                    watch.stop(Why::Asked);
                    continue;
                }
                () = sleep => continue,
            };
            if read.skipped > 0 {
                // What it said may be among what is forgotten.
                watch.forgotten |= watch.is_of_a_command();
                watch.taken = true;
                self.ask(token, SHORT).await?;
            }
            for piece in read.pieces {
                turn.at = piece.offset + piece.bytes.len() as u64;
                if piece.stream != LogStream::Control {
                    watch.take(piece);
                    continue;
                }
                for said in ear.hear(piece.offset, &piece.bytes) {
                    match (said.word, said.token == token) {
                        (Word::Begins, true) => {
                            watch.taken = true;
                            turn.standing = Standing::Busy(None);
                            self.ask(token, PATIENCE).await?;
                        }
                        (Word::Ended { status, signal }, true) => {
                            turn.at = said.to;
                            turn.standing = Standing::Idle;
                            watch.finish_stream().await;
                            return Ok(Finish::Status(status, signal, said.from));
                        }
                        // One that was sent by a caller who is gone: it is our answer that tells.
                        (Word::Begins, false) if watch.is_of_a_command() => {}
                        (Word::Begins, false) => {
                            turn.standing = Standing::Busy(None);
                            let soon = Instant::now() + SHORT;
                            watch.taken_by = watch.taken_by.map(|at| at.min(soon));
                        }
                        (Word::Ended { .. }, false) => {}
                    }
                }
            }
            turn.at = turn.at.max(read.next);
            if read.ended {
                let end = self.exec.wait().await?;
                watch.finish_stream().await;
                return Ok(Finish::Gone(Box::new(end), turn.at));
            }
        }
    }

    /// Does what is due.
    async fn keep_time(
        &self,
        turn: &Turn,
        token: &str,
        watch: &mut Watch,
    ) -> Result<Option<Finish>> {
        let now = Instant::now();
        if !watch.is_due(now) {
            return Ok(None);
        }
        let seen = self.exec.measure().await?;
        watch.note_memory(&seen);
        // What stands still with its sandbox has as much time as before.
        watch.wait_for(seen.stood_still);
        if seen.suspended {
            watch.still_until = Some(now + STILL_LOOK);
            return Ok(None);
        }
        let passed = |at: Option<Instant>| at.is_some_and(|at| now >= at);
        if watch.stop.is_none() {
            if passed(watch.deadline) {
                watch.stop(Why::Time);
            } else if watch.max_output.is_some_and(|max| watch.output > max) {
                watch.stop(Why::Output);
            } else if !watch.taken && passed(watch.taken_by) {
                if !watch.is_of_a_command() {
                    return Ok(Some(Finish::Late));
                }
                watch.stop(Why::Deaf);
            } else if passed(watch.cpu_look) {
                watch.cpu_look = Some(now + CPU_LOOK);
                let used = seen.cpu_time.saturating_sub(watch.before.cpu_time);
                if watch.cpu_limit.is_some_and(|limit| used > limit) {
                    watch.stop(Why::Cpu);
                }
            }
        }
        let Some(stop) = watch.stop.as_mut().filter(|stop| now >= stop.next) else {
            return Ok(None);
        };
        tracing::debug!(shell = self.name, at = turn.at, ?stop, "stopping a command");
        stop.step += 1;
        stop.next = now + if stop.step == 1 { self.grace } else { self.grace / STEPS };
        match stop.step {
            1 => {
                self.exec.signal(SIGINT).await?;
                // One that is stopped has to run to heed it.
                self.exec.signal(SIGCONT).await?;
            }
            // Again and again: a shell goes on if what it waited for did not die of SIGINT, so it must
            // be met between two programs, or the next one before that can handle signals.
            step if u32::from(step) < STEPS + 2 => {
                self.exec.kill_children().await?;
                for pause in [0, 5, 10, 20] {
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                    self.exec.signal(SIGINT).await?;
                }
            }
            _ => self.exec.kill().await?,
        }
        // What it was asked before may have been given up with the rest.
        self.ask(token, SHORT).await?;
        Ok(None)
    }
}

impl Watch {
    fn is_of_a_command(&self) -> bool {
        self.max_output.is_some()
    }

    fn stop(&mut self, why: Why) {
        self.stop = Some(Stop { why, step: 0, next: Instant::now() });
    }

    /// When something is due.
    fn wakes(&self) -> Option<Instant> {
        let due = match &self.stop {
            Some(stop) => Some(stop.next),
            None => {
                let taken_by = self.taken_by.filter(|_| !self.taken);
                [self.deadline, taken_by, self.cpu_look].into_iter().flatten().min()
            }
        };
        due.max(self.still_until.filter(|_| due.is_some()))
    }

    fn is_due(&self, now: Instant) -> bool {
        let too_much = self.max_output.is_some_and(|max| self.output > max);
        let still = self.still_until.is_some_and(|until| now < until);
        let wakes = self.wakes().is_some_and(|at| now >= at);
        !still && (wakes || (too_much && self.stop.is_none()))
    }

    /// Makes its time longer by what it has stood still since this was asked before.
    fn wait_for(&mut self, stood_still: Duration) {
        let more = stood_still.saturating_sub(self.stood_still);
        self.stood_still = stood_still;
        if more.is_zero() {
            return;
        }
        let stop = self.stop.as_mut().map(|stop| &mut stop.next);
        let times = [self.deadline.as_mut(), self.taken_by.as_mut(), stop];
        for at in times.into_iter().flatten() {
            *at = at.checked_add(more).unwrap_or(*at);
        }
    }

    fn note_memory(&mut self, seen: &ExecMeasure) {
        self.peak_memory = self.peak_memory.max(seen.peak_memory_bytes);
    }

    fn take(&mut self, mut piece: LogPiece) {
        let Some(max_output) = self.max_output else { return };
        let kept = (self.stdout.len() + self.stderr.len()) as u64;
        self.output += piece.bytes.len() as u64;
        let room = usize::try_from(max_output.saturating_sub(kept)).unwrap_or(usize::MAX);
        piece.bytes.truncate(room);
        match piece.stream {
            LogStream::Stdout => self.stdout.extend_from_slice(&piece.bytes),
            LogStream::Stderr => self.stderr.extend_from_slice(&piece.bytes),
            LogStream::Control => {}
        }
        if self.stream.is_some() && !piece.bytes.is_empty() {
            self.pending.push_back(piece);
        }
    }

    /// Gives the stream one piece, once it has room.
    async fn hand_on(&mut self) {
        let Some(stream) = &self.stream else { return self.pending.clear() };
        // The end must be seen: a receiver that does not receive is not waited for any more.
        let permit = match self.stop {
            Some(_) => stream.try_reserve().ok(),
            None => stream.reserve().await.ok(),
        };
        let is_gone = permit.is_none();
        if let (Some(permit), Some(piece)) = (permit, self.pending.pop_front()) {
            permit.send(piece);
        }
        if is_gone {
            self.stream = None;
        }
    }

    /// Gives the stream what is left, as long as the command may still take.
    async fn finish_stream(&mut self) {
        let until = self.deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
        while !self.pending.is_empty() {
            if tokio::time::timeout_at(until, self.hand_on()).await.is_err() {
                return;
            }
        }
    }
}

/// What a command reads, as a file in its sandbox.
#[derive(Debug)]
struct Brought {
    sandbox: Arc<dyn Sandbox>,
    path: String,
}

impl Brought {
    async fn remove(self) {
        if let Some(files) = self.sandbox.files() {
            // The command, or whoever ends the sandbox, may have done it.
            let _ = files.remove(Path::new(&self.path), false).await;
        }
    }
}

/// Decides how a command ended by itself, as an exec of its own would be judged: a limit is the cause
/// only if it did not succeed all the same.
fn judge(status: u8, signal: u8, before: &ExecMeasure, after: &ExecMeasure) -> ExecCause {
    if status == 0 {
        ExecCause::Exited { code: 0 }
    } else if after.out_of_memory > before.out_of_memory {
        ExecCause::OutOfMemory
    } else if after.too_many_processes > before.too_many_processes {
        ExecCause::TooManyProcesses
    } else if after.disk_full {
        ExecCause::DiskQuota
    } else if signal != 0 && status.checked_sub(128) == Some(signal) {
        // The program that made it fail: had another one followed, the status were that one's.
        ExecCause::Signalled { signal: signal.into() }
    } else {
        ExecCause::Exited { code: status.into() }
    }
}

fn describe(exec: &dyn ExecHandle) -> ShellInfo {
    let info = exec.info();
    ShellInfo {
        name: info.id.as_str().strip_prefix(PREFIX).unwrap_or_default().to_owned(),
        exec_id: info.id,
        pid: info.pid,
        started_at: info.started_at,
        logged: info.logged,
        end: info.end,
    }
}

/// Finds out from its log how a shell stands that somebody else used.
async fn look_back(exec: &dyn ExecHandle) -> Result<Turn> {
    let (mut ear, mut at, mut standing) = (Ear::default(), 0, Standing::Unsure);
    loop {
        let read = exec.read(at, usize::MAX, LogWait::Never).await?;
        let controls = read.pieces.iter().filter(|piece| piece.stream == LogStream::Control);
        for said in controls.flat_map(|piece| ear.hear(piece.offset, &piece.bytes)) {
            standing = match said.word {
                Word::Begins => Standing::Busy(None),
                Word::Ended { .. } => Standing::Unsure,
            };
        }
        at = read.next;
        if read.pieces.is_empty() || read.ended {
            return Ok(Turn { at, standing });
        }
    }
}

/// A command that a process before this one left: an exec, or what runs in a shell.
#[derive(Debug)]
pub struct LeftCommand {
    exec: FoundExec,
    ear: Ear,
    /// How far the log of a shell was read.
    at: u64,
    /// Whether the shell said last that a command begins.
    busy: bool,
}

impl LeftCommand {
    /// Takes an exec, whatever it is.
    pub fn new(exec: FoundExec) -> Self {
        Self { exec, ear: Ear::default(), at: 0, busy: false }
    }

    /// Tells whether it runs. Of a shell the log is read that was written since the last time.
    pub async fn runs(&mut self) -> bool {
        if self.exec.info().end.is_some() {
            return false;
        }
        if !is_shell(&*self.exec) {
            return true;
        }
        // What cannot be read now is as it was.
        while let Ok(read) = self.exec.read(self.at, READ, LogWait::Never).await {
            let controls = read.pieces.iter().filter(|piece| piece.stream == LogStream::Control);
            for said in controls.flat_map(|piece| self.ear.hear(piece.offset, &piece.bytes)) {
                self.busy = matches!(said.word, Word::Begins);
            }
            self.at = read.next;
            if read.pieces.is_empty() || read.ended {
                break;
            }
        }
        self.busy
    }
}

/// The shells that one process has open: whoever asks for the same gets the same, so that one
/// command runs in it at a time.
#[derive(Debug, Default)]
pub struct Shells(Mutex<HashMap<(SandboxId, String), Arc<Shell>>>);

impl Shells {
    /// Opens a shell, or finds the one of this name; one that has ended is replaced. Tells whether the
    /// shell was made by this call.
    pub async fn open(
        &self,
        sandbox: Arc<dyn Sandbox>,
        options: &ShellOptions,
    ) -> Result<(Arc<Shell>, bool)> {
        let key = (sandbox.id().clone(), options.name.clone());
        if let Some(known) = self.known(&key) {
            return Ok((known, false));
        }
        let shell = Arc::new(Shell::open(sandbox, options).await?);
        let is_new = shell.is_new();
        Ok(self.keep(key, shell, is_new))
    }

    /// Finds a shell by its name, also one that has ended and is still remembered.
    pub async fn find(&self, sandbox: &Arc<dyn Sandbox>, name: &str) -> Result<Option<Arc<Shell>>> {
        let key = (sandbox.id().clone(), name.to_owned());
        if let Some(known) = self.known(&key) {
            return Ok(Some(known));
        }
        let grace = ShellOptions::default().grace;
        let found = Shell::find(sandbox, name, grace).await?;
        Ok(found.map(|shell| match shell.has_ended() {
            true => Arc::new(shell),
            false => self.keep(key, Arc::new(shell), false).0,
        }))
    }

    fn table(&self) -> std::sync::MutexGuard<'_, HashMap<(SandboxId, String), Arc<Shell>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self, key: &(SandboxId, String)) -> Option<Arc<Shell>> {
        self.table().get(key).filter(|shell| !shell.has_ended()).cloned()
    }

    /// Of two who opened the same at once, both go on with the first one's.
    fn keep(
        &self,
        key: (SandboxId, String),
        shell: Arc<Shell>,
        is_new: bool,
    ) -> (Arc<Shell>, bool) {
        let mut table = self.table();
        table.retain(|_, known| !known.has_ended());
        match table.get(&key) {
            Some(first) => (Arc::clone(first), false),
            None => {
                table.insert(key, Arc::clone(&shell));
                (shell, is_new)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_failed_met_the_limit_that_was_hit_or_ended_by_itself() {
        let none = ExecMeasure::default();
        let memory = ExecMeasure { out_of_memory: 1, ..none };
        let processes = ExecMeasure { too_many_processes: 1, ..none };
        let disk = ExecMeasure { disk_full: true, ..none };
        let all = ExecMeasure { out_of_memory: 2, too_many_processes: 2, disk_full: true, ..none };
        let exited = |code| ExecCause::Exited { code };
        for (status, signal, before, after, expected) in [
            (0, 0, none, none, exited(0)),
            (0, 9, none, all, exited(0)),
            (1, 0, none, none, exited(1)),
            (137, 9, none, memory, ExecCause::OutOfMemory),
            (137, 9, memory, memory, ExecCause::Signalled { signal: 9 }),
            (137, 0, none, none, exited(137)),
            (137, 11, none, none, exited(137)),
            (9, 9, none, none, exited(9)),
            (255, 127, none, none, ExecCause::Signalled { signal: 127 }),
            (2, 0, none, processes, ExecCause::TooManyProcesses),
            (1, 0, none, disk, ExecCause::DiskQuota),
            (1, 0, none, all, ExecCause::OutOfMemory),
        ] {
            assert_eq!(judge(status, signal, &before, &after), expected, "{status} {signal}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_stands_still_has_as_much_time_as_before() {
        let second = Duration::from_secs(1);
        let start = Instant::now();
        let deadline = Some(start + second * 10);
        let mut watch = Watch { deadline, stood_still: second, ..Watch::default() };
        assert_eq!(watch.wakes(), deadline);
        watch.wait_for(second);
        assert_eq!(watch.wakes(), deadline, "it did not stand still again");
        watch.wait_for(second * 4);
        watch.wait_for(second * 4);
        assert_eq!(watch.wakes(), Some(start + second * 13));
        // While it does, it is looked at now and then, and nothing is done to it.
        tokio::time::advance(second * 20).await;
        assert!(watch.is_due(Instant::now()));
        watch.still_until = Some(Instant::now() + STILL_LOOK);
        assert!(!watch.is_due(Instant::now()));
        assert_eq!(watch.wakes(), watch.still_until);
    }
}
