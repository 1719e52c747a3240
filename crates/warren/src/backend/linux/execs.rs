//! The execs of one sandbox that have a log: each a file that init writes and anybody reads.
//!
//! A log is a file in the sandbox's directory, or a memory file where the sandbox ends with us or the
//! exec has no name by which anybody could ask for it again. One task for each exec that runs hears
//! from init; all others look at what that task says and at the file.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;
use warren_init::log::{self, Head, META, Overflow, Runs, Stream, TOLD, VERDICT};
use warren_init::protocol::{
    Ended, Exec, ExecControl, ExecEvent, Input, Request, Stage, Streams, Used,
};

use super::channel::{Channel, watch as watch_fd};
use super::execution::{self, Ending};
use super::groups::Refusals;
use super::peaks::Peaks;
use super::sandbox::{Core, LinuxSandbox};
use crate::backend::ExecPlan;
use crate::denial;
use crate::shell;
use crate::{
    ExecCause, ExecEnd, ExecHandle, ExecId, ExecInfo, ExecInput, ExecMeasure, ExecOptions, Explain,
    FoundExec, LogOverflow, LogPiece, LogRead, LogStream, LogWait, MAX_EXEC_NOTE, ResourceLimits,
    Result, SandboxError, SandboxId, TerminalSize,
};

/// The directory of logs in that of a sandbox.
const DIRECTORY: &str = "execs";
/// How many execs that ended are remembered, and how much of the disk their logs may take.
const MAX_ENDED: usize = 256;
const MAX_ENDED_BYTES: u64 = 256 << 20;
/// One that was read so recently is not forgotten, unless there are far too many.
const READING: Duration = Duration::from_secs(60);
/// The most that one read returns.
const MAX_READ: usize = 1 << 20;
/// How much input travels in one message.
const INPUT_CHUNK: usize = 32 << 10;
/// The first input that travels with the request.
const FIRST_INPUT: usize = 48 << 10;
/// The largest log that is kept in memory, and where a larger one is that has no name.
const MAX_MEMORY: u64 = 64 << 20;
const LARGE: &str = "/var/tmp";
/// How long is waited for what init says of an exec that is taken up.
const ADOPTION: Duration = Duration::from_secs(1);
/// How much of a command is noted, to be shown.
const MAX_SHOWN: usize = 4 << 10;
/// How much of the name of a request is.
const MAX_REQUEST: usize = 128;

/// The execs of one sandbox.
#[derive(Debug, Default)]
pub(crate) struct Execs {
    /// Where logs are, if they are to outlive us.
    directory: Option<PathBuf>,
    table: Mutex<BTreeMap<ExecId, Arc<LoggedExec>>>,
    tasks: TaskTracker,
    peaks: Mutex<Peaks>,
}

/// Whether anybody can ask for an exec again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// By its name, until it is forgotten.
    Named,
    /// Nobody but the one who started it.
    Unnamed,
}

/// A hold of an exec by the one who started it: one without a name goes when nobody waits for it.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) exec: Arc<LoggedExec>,
    listener: Option<Listener>,
}

impl Hold {
    /// Hears what init says of one without a name until it has finished: there is no task that does.
    pub(crate) async fn listen(&mut self) {
        if let Some(listener) = &mut self.listener {
            listener.0.as_mut().await;
            self.listener = None;
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.exec.keep == Keep::Unnamed {
            self.exec.abandon();
        }
        // It is still to be heard how it ended, for the account of the sandbox.
        if let (Some(Listener(rest)), Some(core)) = (self.listener.take(), self.exec.core.upgrade())
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            core.execs().tasks.spawn_on(rest, &runtime);
        }
    }
}

/// Hears what init says of an exec, until it has finished.
struct Listener(Pin<Box<dyn Future<Output = ()> + Send>>);

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listener")
    }
}

/// What is noted in the log about its exec.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Note {
    command: Vec<String>,
    started_at: DateTime<Utc>,
    terminal: bool,
    /// What whoever started it noted.
    #[serde(default)]
    text: Option<String>,
    /// The request that it serves.
    #[serde(default)]
    request: String,
    forgets: bool,
    /// Tells whether a later request of the same name is for the same.
    fingerprint: u64,
    /// What the kernel had refused before.
    before: Refusals,
    /// Whether it is told what walls refuse.
    #[serde(default)]
    explain: Explain,
}

/// One exec with a log.
#[derive(Debug)]
pub(crate) struct LoggedExec {
    id: ExecId,
    sandbox: SandboxId,
    note: Note,
    /// What the kernel had refused before what counts.
    before: Mutex<Refusals>,
    place: Place,
    /// Open while it runs, and for ever where it has no name.
    file: Mutex<Option<Arc<File>>>,
    channel: Mutex<Option<Arc<Channel>>>,
    runs: Mutex<Runs>,
    last_read: Mutex<Option<Instant>>,
    phase: watch::Sender<Phase>,
    input: tokio::sync::Mutex<()>,
    core: Weak<Core>,
    origin: Origin,
    keep: Keep,
    /// Whether somebody tells of its end, or did.
    told: AtomicBool,
}

/// Who started an exec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Us,
    /// One who is gone.
    Another,
}

#[derive(Debug)]
enum Place {
    Path(PathBuf),
    /// It goes with its last descriptor.
    Nameless,
}

/// What is known of an exec.
#[derive(Clone, Debug, Default)]
struct Phase {
    pid: Option<i32>,
    /// Changes whenever init says something, so that whoever waits looks again.
    heard: u64,
    input_taken: u64,
    input_open: bool,
    /// Whether some was left that there was no room for.
    input_full: bool,
    input_heard: u64,
    /// What it has used, and how often that was said.
    used: (u64, Used),
    finish: Option<Finish>,
}

#[derive(Clone, Debug)]
enum Finish {
    Ended(Box<ExecEnd>),
    Refused(Stage, i32),
    /// The sandbox is gone.
    Gone,
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lost(step: &str, source: io::Error) -> SandboxError {
    SandboxError::Step { step: step.to_owned(), path: None, source }
}

impl Execs {
    /// For a sandbox with this directory, if it is to outlive us.
    pub(crate) fn new(home: Option<&Path>) -> Self {
        Self { directory: home.map(|home| home.join(DIRECTORY)), ..Self::default() }
    }

    /// Returns the most memory that the sandbox held since this was asked for the same exec before.
    pub(crate) fn peak_memory(&self, group: &Path, id: &ExecId) -> Option<u64> {
        guard(&self.peaks).since_last(group, id)
    }

    pub(crate) fn list(&self) -> Vec<FoundExec> {
        let mut all: Vec<Arc<LoggedExec>> = guard(&self.table).values().cloned().collect();
        all.sort_by_key(|exec| exec.note.started_at);
        all.into_iter().map(|exec| exec as FoundExec).collect()
    }

    pub(crate) fn find(&self, id: &ExecId) -> Option<FoundExec> {
        guard(&self.table).get(id).cloned().map(|exec| exec as FoundExec)
    }

    fn create_log(&self, id: &ExecId, keep: Keep, limit: Option<u64>) -> io::Result<(File, Place)> {
        let is_small = limit.is_some_and(|limit| limit <= MAX_MEMORY);
        let nameless = keep == Keep::Unnamed && is_small;
        let Some(directory) = self.directory.as_ref().filter(|_| !nameless) else {
            // Memory is the sandbox's, and what it may have is bounded; a large log is on a disk.
            let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
            let on_disk = || rustix::fs::open(LARGE, flags, Mode::from_raw_mode(0o600));
            // Whoever finds it by a descriptor of init's, as gVisor shows them, must not be let in either.
            let in_memory = || {
                let file = memfd_create("warren-log", MemfdFlags::CLOEXEC)?;
                rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR).map(|()| file)
            };
            let file = if is_small { in_memory() } else { on_disk().or_else(|_| in_memory()) };
            return Ok((file?.into(), Place::Nameless));
        };
        let path = directory.join(id.as_str());
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = match options.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::DirBuilder::new().mode(0o700).recursive(false).create(directory)?;
                options.open(&path)
            }
            other => other,
        };
        Ok((file?, Place::Path(path)))
    }

    /// Forgets the oldest of those that ended, so that they stay within their bounds.
    fn tidy(&self) {
        let table = guard(&self.table);
        let mut ended: Vec<(DateTime<Utc>, u64, Arc<LoggedExec>)> = table
            .values()
            .filter(|exec| exec.keep == Keep::Named)
            .filter_map(|exec| match &exec.phase.borrow().finish {
                Some(Finish::Ended(end)) => Some((end.ended_at, exec.disk(), exec.clone())),
                Some(Finish::Refused(..) | Finish::Gone) | None => None,
            })
            .collect();
        drop(table);
        ended.sort_by_key(|(at, ..)| *at);
        let mut count = ended.len();
        let mut bytes: u64 = ended.iter().map(|(_, bytes, _)| bytes).sum();
        // The newest has not been read yet, whatever its size.
        ended.pop();
        for (_, size, exec) in ended {
            if count <= MAX_ENDED && bytes <= MAX_ENDED_BYTES {
                break;
            }
            let is_read = guard(&exec.last_read).is_some_and(|at| at.elapsed() < READING);
            if is_read && count <= 2 * MAX_ENDED {
                continue;
            }
            self.remove(&exec);
            (count, bytes) = (count - 1, bytes - size);
        }
    }

    fn remove(&self, exec: &LoggedExec) {
        let mut table = guard(&self.table);
        // Once it was forgotten another may have its name, and its place on the disk.
        if table.get(&exec.id).is_some_and(|known| std::ptr::eq(&**known, exec)) {
            table.remove(&exec.id);
            exec.delete();
        }
    }
}

impl LinuxSandbox {
    /// Starts a command with a log, or finds the one that was started by this name.
    ///
    /// The sandbox must be running, and stay so until this returns.
    pub(crate) async fn start_logged(
        &self,
        plan: ExecPlan,
        limits: &ResourceLimits,
        options: &ExecOptions,
        keep: Keep,
        request: &str,
    ) -> Result<Hold> {
        let id = options.id.clone().unwrap_or_default();
        id.validate()?;
        let limit = limits.max_output_bytes;
        let fingerprint = fingerprint(&plan, options);
        let execs = self.execs();
        let note = Note {
            command: shown(&plan),
            started_at: Utc::now(),
            terminal: options.terminal.is_some(),
            text: options.note.clone(),
            request: request.chars().take(MAX_REQUEST).collect(),
            forgets: options.overflow == LogOverflow::Forget,
            fingerprint,
            before: self.instance().groups().refusals(),
            explain: options.explain,
        };
        let (exec, is_new) = {
            // Held while the log is made, so that of two with one name one is the first.
            let mut table = guard(&execs.table);
            match table.get(&id) {
                Some(known) if known.note.fingerprint == fingerprint => (known.clone(), false),
                Some(_) => {
                    return Err(SandboxError::AlreadyExists { what: "exec", id: id.0 });
                }
                None => {
                    let made = execs.create_log(&id, keep, limit);
                    let (file, place) = made.map_err(|error| lost("make a log", error))?;
                    let exec = Arc::new(LoggedExec::new(
                        self,
                        id.clone(),
                        note,
                        place,
                        file,
                        Origin::Us,
                        keep,
                    ));
                    table.insert(id.clone(), exec.clone());
                    (exec, true)
                }
            }
        };
        let mut hold = Hold { exec, listener: None };
        if !is_new {
            return Ok(hold);
        }
        match self.launch_logged(&hold.exec, plan, limits, options).await {
            Ok(listener) if keep == Keep::Named => drop(execs.tasks.spawn(listener.0)),
            Ok(listener) => hold.listener = Some(listener),
            Err(error) => {
                // Whoever waits for the same is told that there is none.
                hold.exec.phase.send_modify(|phase| phase.finish = Some(Finish::Gone));
                execs.remove(&hold.exec);
                return Err(error);
            }
        }
        Ok(hold)
    }

    async fn launch_logged(
        &self,
        exec: &Arc<LoggedExec>,
        mut plan: ExecPlan,
        limits: &ResourceLimits,
        options: &ExecOptions,
    ) -> Result<Listener> {
        let file = exec.file().map_err(|error| lost("open a log", error))?;
        if matches!(exec.place, Place::Path(_)) {
            let text = serde_json::to_vec(&exec.note).unwrap_or_default();
            log::write_note(&*file, META, &text).map_err(|error| lost("write a log", error))?;
        }
        let mut given = plan.stdin.take().unwrap_or_default();
        let rest = given.split_off(given.len().min(FIRST_INPUT));
        let more = options.input == ExecInput::Open || !rest.is_empty();
        let taken = given.len() as u64;
        let streams = Streams::Logged {
            input: match options.input {
                ExecInput::Control => Input::Control,
                ExecInput::Open | ExecInput::Closed => Input::Stdin { first: given, more },
            },
            terminal: options.terminal.map(|size| (size.rows, size.columns)),
            limit: limits.max_output_bytes,
            overflow: match options.overflow {
                LogOverflow::End => Overflow::End,
                LogOverflow::Forget => Overflow::Forget,
            },
        };
        let request = Exec {
            announced: exec.keep == Keep::Named,
            explain: options.explain != Explain::Nothing,
            ..execution::request(&plan, limits, exec.id.0.clone(), streams)
        };
        let (channel, theirs) = Channel::pair().map_err(|error| lost("make a socket", error))?;
        let (notice, theirs_notice) = self.new_notice()?;
        let helper = match options.input {
            ExecInput::Control => shell::helper().map_err(|error| lost("make a file", error))?,
            ExecInput::Closed | ExecInput::Open => None,
        };
        let terminal = match options.terminal {
            Some(size) => self.lend_terminal(size.rows, size.columns)?,
            None => None,
        };
        let mut fds = vec![theirs.as_fd()];
        fds.extend(terminal.iter().flat_map(|both| [both.outer.as_fd(), both.inner.as_fd()]));
        fds.extend(helper.as_ref().map(AsFd::as_fd));
        let rung = theirs_notice.as_ref().unwrap_or(&notice);
        fds.extend([file.as_fd(), rung.as_fd()]);
        let sent = self.control().send(&Request::Exec(request), &fds).await;
        sent.map_err(|error| lost("reach init", error))?;
        drop(theirs);
        exec.phase.send_modify(|phase| {
            phase.input_taken = taken;
            phase.input_open = more || options.input == ExecInput::Control;
        });
        let listener = Self::listen_to(exec, channel, (notice, theirs_notice))?;
        if !rest.is_empty() {
            let (exec, end) = (exec.clone(), options.input == ExecInput::Closed);
            self.execs().tasks.spawn(async move {
                // A command need not read what it is given.
                let _ = exec.write_input(None, &rest, end).await;
            });
        }
        Ok(listener)
    }

    /// Makes what init writes to when a log grows; its end of that, if it has another.
    fn new_notice(&self) -> Result<(OwnedFd, Option<OwnedFd>)> {
        let made = match self.core.support.own_kernel {
            false => {
                eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(|both| (both, None))
            }
            // Which takes no such thing from the host. A pipe that is full says as much.
            true => {
                let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
                pipe_with(flags).map(|(ours, theirs)| (ours, Some(theirs)))
            }
        };
        made.map_err(|error| lost("make a notice", error.into()))
    }

    /// Returns what hears what init says of an exec.
    fn listen_to(
        exec: &Arc<LoggedExec>,
        channel: Channel,
        (notice, rung): (OwnedFd, Option<OwnedFd>),
    ) -> Result<Listener> {
        let channel = Arc::new(channel);
        *guard(&exec.channel) = Some(channel.clone());
        let notice = watch_fd(notice).map_err(|error| lost("watch a log", error))?;
        let exec = exec.clone();
        Ok(Listener(Box::pin(async move {
            // Kept open: a pipe that nobody can write to any more is readable for ever.
            let _rung = rung;
            let finish = loop {
                let heard = tokio::select! {
                    biased;
                    heard = channel.receive::<ExecEvent>() => heard,
                    grown = notice.readable() => {
                        if let Ok(mut grown) = grown {
                            let _ = rustix::io::read(notice.get_ref(), &mut [0; 4096]);
                            grown.clear_ready();
                        }
                        exec.phase.send_modify(|phase| phase.heard += 1);
                        continue;
                    }
                };
                let event = heard.ok().flatten().map(|(event, _)| event);
                match exec.hear(event) {
                    Some(finish) => break finish,
                    None => continue,
                }
            };
            exec.finish(finish);
        })))
    }

    /// Takes up the execs of a sandbox that outlived its maker.
    pub(crate) async fn adopt_execs(&self) -> Result<()> {
        let Some(directory) = self.execs().directory.clone() else { return Ok(()) };
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        for entry in entries {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let id = ExecId(name);
            if id.validate().is_ok() {
                self.adopt_exec(id, entry.path()).await?;
            }
        }
        Ok(())
    }

    async fn adopt_exec(&self, id: ExecId, path: PathBuf) -> Result<()> {
        let file = open_log(&path).map_err(|error| SandboxError::step("open", &path, error))?;
        let note = log::read_note(&file, META).ok().flatten();
        let note: Option<Note> = note.and_then(|note| serde_json::from_slice(&note).ok());
        let Some(note) = note else {
            // We were gone before we asked for it.
            let _ = fs::remove_file(&path);
            return Ok(());
        };
        let verdict = log::read_note(&file, VERDICT).ok().flatten();
        let verdict: Option<ExecEnd> = verdict.and_then(|text| serde_json::from_slice(&text).ok());
        let place = Place::Path(path);
        let exec =
            LoggedExec::new(self, id.clone(), note, place, file, Origin::Another, Keep::Named);
        let exec = Arc::new(exec);
        let told = exec.file().and_then(|file| log::read_note(&*file, TOLD));
        exec.told.store(told.is_ok_and(|told| told.is_some()), Ordering::Release);
        guard(&self.execs().table).insert(id.clone(), exec.clone());
        if let Some(end) = verdict {
            exec.settle(Finish::Ended(Box::new(end)));
            return Ok(());
        }
        let (channel, theirs) = Channel::pair().map_err(|error| lost("make a socket", error))?;
        let (notice, rung) = self.new_notice()?;
        let fds = [theirs.as_fd(), rung.as_ref().unwrap_or(&notice).as_fd()];
        let sent = self.control().send(&Request::Follow(id.0), &fds).await;
        sent.map_err(|error| lost("reach init", error))?;
        drop(theirs);
        self.execs().tasks.spawn(Self::listen_to(&exec, channel, (notice, rung))?.0);
        // Until init has said how far it is, it would seem to take no input. One that is being started
        // says it later.
        let mut phase = exec.phase.subscribe();
        let told = phase.wait_for(|phase| phase.input_heard > 0 || phase.finish.is_some());
        let _ = tokio::time::timeout(ADOPTION, told).await;
        Ok(())
    }
}

fn open_log(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}

/// Checks what a caller asked of an exec beside its command.
pub(crate) fn validate(options: &ExecOptions) -> Result<()> {
    if options.note.as_ref().is_some_and(|note| note.len() > MAX_EXEC_NOTE) {
        let what = "the note of an exec".to_owned();
        return Err(SandboxError::TooLarge { what, limit: MAX_EXEC_NOTE as u64 });
    }
    let Some(user) = &options.user else { return Ok(()) };
    let workdir = user.workdir.as_deref().unwrap_or_default();
    let fine = |text: &str, most| text.len() <= most && !text.contains('\0');
    if fine(&user.name, 256) && fine(workdir, 4095) {
        return Ok(());
    }
    let hint = "name a user of the sandbox's /etc/passwd, and a path of up to 4095 bytes";
    Err(SandboxError::invalid("user", "it has a NUL, or is too long", hint))
}

/// Tells one request from another of the same name.
fn fingerprint(plan: &ExecPlan, options: &ExecOptions) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&plan.program, &plan.args, &plan.workdir, &plan.env, &plan.stdin, plan.timeout)
        .hash(&mut hasher);
    let ExecOptions { id: _, input, terminal, overflow, time_limits, user, note, explain } =
        options;
    let size = terminal.map(|size| (size.rows, size.columns));
    (*input as u8, size, *overflow as u8, *time_limits as u8, user, note).hash(&mut hasher);
    if *explain != Explain::Nothing {
        // Else what it was before anybody could ask for it: an exec may be older than we are.
        explain.hash(&mut hasher);
    }
    hasher.finish()
}

/// Returns a command as it is shown: all of it, unless it is long.
fn shown(plan: &ExecPlan) -> Vec<String> {
    let mut left = MAX_SHOWN;
    let mut words = Vec::new();
    for word in std::iter::once(&plan.program).chain(&plan.args) {
        if word.len() >= left {
            let end = (0..=left.min(word.len())).rev().find(|end| word.is_char_boundary(*end));
            words.push(format!("{}…", &word[..end.unwrap_or(0)]));
            break;
        }
        left -= word.len();
        words.push(word.clone());
    }
    words
}

impl LoggedExec {
    fn new(
        sandbox: &LinuxSandbox,
        id: ExecId,
        note: Note,
        place: Place,
        file: File,
        origin: Origin,
        keep: Keep,
    ) -> Self {
        Self {
            id,
            sandbox: crate::Sandbox::id(sandbox).clone(),
            before: Mutex::new(note.before),
            note,
            place,
            file: Mutex::new(Some(Arc::new(file))),
            channel: Mutex::default(),
            runs: Mutex::default(),
            last_read: Mutex::default(),
            phase: watch::Sender::new(Phase::default()),
            input: tokio::sync::Mutex::default(),
            core: sandbox.downgrade(),
            origin,
            keep,
            told: AtomicBool::new(false),
        }
    }

    fn file(&self) -> io::Result<Arc<File>> {
        if let Some(file) = &*guard(&self.file) {
            return Ok(file.clone());
        }
        match &self.place {
            Place::Path(path) => open_log(path).map(Arc::new),
            Place::Nameless => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn delete(&self) {
        *guard(&self.file) = None;
        if let Place::Path(path) = &self.place {
            // One that is gone with its sandbox is as good.
            let _ = fs::remove_file(path);
        }
    }

    /// Returns how much of the disk its log takes.
    fn disk(&self) -> u64 {
        let Ok(file) = self.file() else { return 0 };
        file.metadata().map_or(0, |meta| meta.blocks() * 512)
    }

    /// Takes in what init says; returns how it finished if it has.
    fn hear(&self, event: Option<ExecEvent>) -> Option<Finish> {
        let change = |change: &dyn Fn(&mut Phase)| {
            self.phase.send_modify(|phase| {
                phase.heard += 1;
                change(phase);
            });
            None
        };
        match event {
            Some(ExecEvent::Started { pid }) => change(&|phase| phase.pid = Some(pid)),
            Some(ExecEvent::Input { taken, open, full }) => change(&|phase| {
                phase.input_taken = taken;
                phase.input_open = open;
                phase.input_full = full;
                phase.input_heard += 1;
            }),
            Some(ExecEvent::Used(used)) => change(&|phase| phase.used = (phase.used.0 + 1, used)),
            // One that was running before we came, and is not known to init, ended in between.
            Some(ExecEvent::Refused { .. }) if self.is_noted_as_ended() => Some(self.orphaned()),
            Some(ExecEvent::Refused { stage, errno }) => Some(Finish::Refused(stage, errno)),
            // Those of an exec with a log are in that.
            Some(ExecEvent::Denied(_) | ExecEvent::DeniedMore(_)) => None,
            Some(ExecEvent::Ended(ended)) => Some(Finish::Ended(Box::new(self.judge(&ended)))),
            None => Some(self.orphaned()),
        }
    }

    fn is_noted_as_ended(&self) -> bool {
        self.head().is_ok_and(|head| head.ended.is_some())
    }

    /// Init is gone, or does not know it: the log may say how it ended.
    fn orphaned(&self) -> Finish {
        if let Ok(Head { ended: Some(ended), .. }) = self.head() {
            return Finish::Ended(Box::new(self.judge(&ended)));
        }
        let core = self.core.upgrade();
        let refusals = core.map(|core| core.refusals()).unwrap_or_default();
        if refusals.out_of_memory > guard(&self.before).out_of_memory {
            // The kernel chose init when memory ran out.
            return Finish::Ended(Box::new(end_of(Ending::of(
                ExecCause::OutOfMemory,
                Duration::ZERO,
            ))));
        }
        Finish::Gone
    }

    fn judge(&self, ended: &Ended) -> ExecEnd {
        let core = self.core.upgrade();
        let before = *guard(&self.before);
        let after = || core.as_ref().map_or(before, |core| core.refusals());
        let ending = execution::settle(ended, before, after, false);
        let mut end = end_of(ending);
        if let Some(core) = core {
            core.account(&end.usage);
            let terms = core.terms();
            end.denials.extend(denial::of_cause(&end.cause, &terms.enforcement.limits));
            if self.note.explain != Explain::Nothing || end.exit_code != 0 {
                let seen = self.file().and_then(|file| log::denied(&*file)).unwrap_or_default();
                for denial in execution::explained(&terms, self.note.explain, &seen) {
                    // The limit that ended it was met by a call as well.
                    if !end.denials.iter().any(|known| known.what == denial.what) {
                        end.denials.push(denial);
                    }
                }
            }
        }
        end
    }

    /// Notes how it finished, for us and for whoever comes after us.
    fn finish(&self, finish: Finish) {
        let finish = match finish {
            // It was started by one who is gone, and nobody knows how it ended.
            Finish::Refused(..) if self.origin == Origin::Another => {
                Finish::Ended(Box::new(end_of(Ending::of(ExecCause::Lost, Duration::ZERO))))
            }
            other => other,
        };
        // Where nobody holds the sandbox any more, not all was known: the next to take it up asks init, and
        // judges by the log.
        let is_held = self.core.strong_count() > 0;
        if let (Finish::Ended(end), Place::Path(_), Ok(file)) = (&finish, &self.place, self.file())
            && is_held
        {
            let text = serde_json::to_vec(end).unwrap_or_default();
            if let Err(error) = log::write_note(&*file, VERDICT, &text) {
                tracing::warn!(exec = %self.id, %error, "the end of an exec could not be noted");
            }
        }
        self.settle(finish);
        if let Some(core) = self.core.upgrade() {
            guard(&core.execs().peaks).forget(&self.id);
            core.execs().tidy();
        }
    }

    /// Says that it has finished, and lets go of what it takes to run.
    fn settle(&self, finish: Finish) {
        *guard(&self.channel) = None;
        if matches!(self.place, Place::Path(_)) {
            *guard(&self.file) = None;
        }
        self.phase.send_modify(|phase| {
            phase.heard += 1;
            phase.input_open = false;
            phase.finish = Some(finish);
        });
    }

    fn head(&self) -> io::Result<Head> {
        log::head(&*self.file()?)
    }

    fn ended(&self) -> SandboxError {
        SandboxError::Ended { id: self.sandbox.clone() }
    }

    /// Waits until its program runs, or has run.
    pub(crate) async fn started(&self) -> Result<()> {
        let mut phase = self.phase.subscribe();
        let seen = phase.wait_for(|phase| phase.pid.is_some() || phase.finish.is_some()).await;
        let seen = seen.map_err(|_| self.ended())?.clone();
        match seen.finish {
            Some(Finish::Refused(stage, errno)) => {
                if let Some(core) = self.core.upgrade() {
                    core.execs().remove(self);
                }
                let program = self.note.command.first().cloned().unwrap_or_default();
                Err(execution::refused(&self.sandbox, program, stage, errno))
            }
            Some(Finish::Gone) => Err(self.ended()),
            Some(Finish::Ended(_)) | None => Ok(()),
        }
    }

    async fn control(&self, control: ExecControl) -> Result<()> {
        let channel = guard(&self.channel).clone();
        // One that has ended is past being told anything.
        let Some(channel) = channel else { return Ok(()) };
        match channel.send(&control, &[]).await {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other.map_err(|error| lost("reach init", error)),
        }
    }

    /// Lets go of one that nobody can ask for again: has init end it if it runs, and forgets it.
    fn abandon(&self) {
        if let Some(channel) = &*guard(&self.channel) {
            channel.try_send(&ExecControl::Kill);
        }
        if let Some(core) = self.core.upgrade() {
            guard(&core.execs().table).remove(&self.id);
        }
        if let Place::Path(path) = &self.place {
            let _ = fs::remove_file(path);
        }
    }

    /// Returns what there is to read from `offset` on; `None` if there is nothing yet.
    fn look(&self, offset: u64, max: usize) -> Result<Option<LogRead>> {
        let failed = |error| lost("read a log", error);
        *guard(&self.last_read) = Some(Instant::now());
        // In this order: what ended before we ask for the size is all there.
        let finish = self.phase.borrow().finish.clone();
        let file = match self.file() {
            Ok(file) => file,
            Err(_) if matches!(finish, Some(Finish::Gone)) => return Err(self.ended()),
            Err(error) => return Err(failed(error)),
        };
        let size = log::size(&*file).map_err(failed)?;
        let head = match finish.is_some() || self.note.forgets {
            true => log::head(&*file).map_err(failed)?,
            false => Head::default(),
        };
        let from = offset.max(head.kept_from);
        let skipped = from - offset;
        if from < size {
            let pieces = {
                let mut runs = guard(&self.runs);
                runs.extend(&*file, size).map_err(failed)?;
                log::read(&*file, &runs, from, size, max.min(MAX_READ)).map_err(failed)?
            };
            let next = pieces.last().map_or(from, |last| last.offset + last.bytes.len() as u64);
            let ended = finish.is_some() && next >= size;
            let pieces = pieces.into_iter().map(piece).collect();
            return Ok(Some(LogRead { pieces, next, skipped, cut: head.cut, ended }));
        }
        Ok(finish.map(|_| LogRead {
            pieces: Vec::new(),
            next: from,
            skipped,
            cut: head.cut,
            ended: true,
        }))
    }
}

fn piece(piece: log::Piece) -> LogPiece {
    let stream = match piece.stream {
        Stream::Stdout => LogStream::Stdout,
        Stream::Stderr => LogStream::Stderr,
        Stream::Control => LogStream::Control,
    };
    LogPiece { offset: piece.offset, stream, bytes: piece.bytes }
}

fn end_of(ending: Ending) -> ExecEnd {
    let Ending { cause, exit_code, duration, usage, tasks_started, denials } = ending;
    let ended_at = Utc::now();
    ExecEnd { cause, exit_code, duration, usage, tasks_started, ended_at, denials }
}

#[async_trait]
impl ExecHandle for LoggedExec {
    fn id(&self) -> &ExecId {
        &self.id
    }

    fn info(&self) -> ExecInfo {
        let phase = self.phase.borrow().clone();
        let size = self.file().and_then(|file| log::size(&*file));
        ExecInfo {
            id: self.id.clone(),
            command: self.note.command.clone(),
            pid: phase.pid,
            terminal: self.note.terminal,
            note: self.note.text.clone(),
            request_id: self.note.request.clone(),
            started_at: self.note.started_at,
            logged: size.unwrap_or(0),
            input_taken: phase.input_taken,
            input_open: phase.input_open && phase.finish.is_none(),
            end: match phase.finish {
                Some(Finish::Ended(end)) => Some(*end),
                Some(Finish::Refused(..) | Finish::Gone) => {
                    Some(end_of(Ending::of(ExecCause::Lost, Duration::ZERO)))
                }
                None => None,
            },
        }
    }

    async fn read(&self, offset: u64, max: usize, wait: LogWait) -> Result<LogRead> {
        let mut phase = self.phase.subscribe();
        loop {
            // Seen before we look: what comes after wakes us.
            phase.mark_unchanged();
            if let Some(read) = self.look(offset, max)? {
                return Ok(read);
            }
            if wait == LogWait::Never {
                return Ok(LogRead { next: offset, ..LogRead::default() });
            }
            phase.changed().await.map_err(|_| self.ended())?;
        }
    }

    async fn wait(&self) -> Result<ExecEnd> {
        let mut phase = self.phase.subscribe();
        let seen = phase.wait_for(|phase| phase.finish.is_some()).await;
        let finish = seen.map_err(|_| self.ended())?.finish.clone();
        match finish {
            Some(Finish::Ended(end)) => Ok(*end),
            Some(Finish::Refused(..) | Finish::Gone) | None => Err(self.ended()),
        }
    }

    async fn signal(&self, signal: i32) -> Result<()> {
        if !(1..=64).contains(&signal) {
            let reason = format!("{signal} is no signal");
            return Err(SandboxError::invalid("signal", reason, "signals are 1 to 64"));
        }
        self.control(ExecControl::Signal(signal)).await
    }

    async fn kill(&self) -> Result<()> {
        self.control(ExecControl::Kill).await
    }

    async fn kill_children(&self) -> Result<()> {
        self.control(ExecControl::KillRest).await
    }

    async fn resize(&self, size: TerminalSize) -> Result<()> {
        let TerminalSize { rows, columns } = size;
        self.control(ExecControl::Resize { rows, columns }).await
    }

    async fn write_input(&self, offset: Option<u64>, bytes: &[u8], end: bool) -> Result<u64> {
        // One after another: a second writer's bytes come after all of the first's.
        let _turn = self.input.lock().await;
        let refuse = |reason: String| {
            Err(SandboxError::Conflict {
                action: "write to the command's input".to_owned(),
                reason,
            })
        };
        let mut phase = self.phase.subscribe();
        let known = phase.borrow().clone();
        let begin = offset.unwrap_or(known.input_taken);
        if begin > known.input_taken {
            return refuse(format!("it has {} bytes so far", known.input_taken));
        }
        let target = begin + bytes.len() as u64;
        let (mut at, mut done) = (begin, false);
        while !done {
            let known = phase.borrow_and_update().clone();
            if known.finish.is_some() || !known.input_open {
                return match known.input_taken >= target && bytes.is_empty() {
                    true => Ok(known.input_taken),
                    false => refuse("it reads no more".to_owned()),
                };
            }
            at = at.max(known.input_taken).min(target);
            let from = usize::try_from(at - begin).unwrap_or(usize::MAX);
            let rest = bytes.get(from..).unwrap_or_default();
            let chunk = rest[..rest.len().min(INPUT_CHUNK)].to_vec();
            let (wanted, last) = (at + chunk.len() as u64, rest.len() <= INPUT_CHUNK);
            let control = ExecControl::Input { offset: at, bytes: chunk, end: end && last };
            self.control(control).await?;
            // It says at once how much it took, and again when there is room for the rest.
            let answered = |phase: &Phase| {
                let heard = phase.input_heard > known.input_heard;
                phase.finish.is_some() || (heard && !phase.input_full)
            };
            let seen = phase.wait_for(answered).await.map_err(|_| self.ended())?.clone();
            done = last && seen.input_taken >= wanted;
        }
        Ok(self.phase.borrow().input_taken)
    }

    async fn measure(&self) -> Result<ExecMeasure> {
        let mut phase = self.phase.subscribe();
        let before = phase.borrow().used.0;
        self.control(ExecControl::Measure).await?;
        let answered = |phase: &Phase| phase.finish.is_some() || phase.used.0 > before;
        let seen = phase.wait_for(answered).await.map_err(|_| self.ended())?.clone();
        let core = self.core.upgrade().ok_or_else(|| self.ended())?;
        let used = seen.used.1;
        let refusals = core.refusals();
        let measured = ExecMeasure {
            cpu_time: Duration::from_micros(used.cpu_us),
            bytes_read: used.read_bytes,
            bytes_written: used.written_bytes,
            peak_memory_bytes: None,
            out_of_memory: refusals.out_of_memory + used.memory_kills,
            too_many_processes: refusals.too_many_processes,
            disk_full: used.scratch_full,
            suspended: used.suspended,
            stood_still: Duration::from_micros(used.stood_still_us),
        };
        match seen.finish {
            Some(Finish::Ended(end)) => Ok(ExecMeasure {
                cpu_time: Duration::from_millis(end.usage.cpu_time_ms),
                bytes_read: end.usage.bytes_read,
                bytes_written: end.usage.bytes_written,
                ..measured
            }),
            Some(Finish::Refused(..) | Finish::Gone) => Err(self.ended()),
            None => Ok(ExecMeasure { peak_memory_bytes: core.peak_memory(&self.id), ..measured }),
        }
    }

    fn count_from_here(&self) {
        if let Some(core) = self.core.upgrade() {
            *guard(&self.before) = core.refusals();
        }
    }

    fn claim_end(&self) -> bool {
        !self.told.swap(true, Ordering::AcqRel)
    }

    fn end_was_told(&self) {
        let Some(core) = self.core.upgrade() else { return };
        // Held: one that is forgotten has no file, and another may have its name.
        let table = guard(&core.execs().table);
        let is_known = table.get(&self.id).is_some_and(|known| std::ptr::eq(&**known, self));
        if is_known
            && let (Place::Path(_), Ok(file)) = (&self.place, self.file())
            && let Err(error) = log::write_note(&*file, TOLD, b"told")
        {
            tracing::warn!(exec = %self.id, %error, "the end of an exec may be told twice");
        }
    }

    async fn forget(&self) -> Result<()> {
        if self.phase.borrow().finish.is_none() {
            return Err(SandboxError::Conflict {
                action: format!("forget exec `{}`", self.id),
                reason: "it still runs".to_owned(),
            });
        }
        if let Some(core) = self.core.upgrade() {
            core.execs().remove(self);
        }
        Ok(())
    }
}
