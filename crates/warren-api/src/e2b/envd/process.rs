//! The process service: execs of the sandbox under the names that E2B has for things.
//!
//! A process is an exec with a note of ours; nothing else is kept. It goes on whoever listens, its
//! output is its log, and what a client is told is read from that.

use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use futures_util::{Stream, stream};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use warren::{
    Command, ExecCause, ExecContext, ExecEnd, ExecId, ExecInput, ExecOptions, ExecUser, FoundExec,
    LogOverflow, LogPiece, LogStream, LogWait, MAX_EXEC_NOTE, ProgramFault, SandboxError,
    TerminalSize,
};

use super::Call;
use super::connect::{Code, Failure, Incoming};
use super::wire::{
    Data, Empty, Ended, ListResponse, ProcessConfig, ProcessEvent, ProcessInfo, ProcessInput,
    ProcessRequest, ProcessResponse, ProcessSelector, Pty, SendInputRequest, SendSignalRequest,
    StartRequest, Started, StreamInputRequest, UpdateRequest,
};
use crate::audit::Exec;

/// How much output travels in one message.
const CHUNK: usize = 32 << 10;
/// For how long somebody who comes late is told how a process ended.
const REMEMBERED: chrono::TimeDelta = chrono::TimeDelta::seconds(30);
/// What the notes of our execs begin with.
const MARK: &str = "e2b ";

/// What is noted with an exec, to find it again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct Note {
    config: ProcessConfig,
    tag: Option<String>,
}

impl Note {
    /// Writes it down; what is too long is left out, last the arguments.
    fn write(mut self) -> String {
        let write = |note: &Self| {
            let text = serde_json::to_string(note).unwrap_or_default();
            Some(format!("{MARK}{text}")).filter(|text| text.len() <= MAX_EXEC_NOTE)
        };
        if let Some(text) = write(&self) {
            return text;
        }
        self.config.envs.clear();
        if let Some(text) = write(&self) {
            return text;
        }
        self.config.args.clear();
        write(&self).unwrap_or_else(|| MARK.to_owned() + "{}")
    }

    fn read(text: &str) -> Option<Self> {
        serde_json::from_str(text.strip_prefix(MARK)?).ok()
    }
}

/// A process that was found.
struct Process {
    exec: FoundExec,
    note: Note,
    pid: u32,
    terminal: bool,
}

/// Whether a process must still run to be found.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Find {
    Running,
    Lately,
}

async fn all(call: &Call, which: Find) -> Result<Vec<Process>, Failure> {
    let execs = call.entry.sandbox.list_execs().await?;
    let now = Utc::now();
    let ours = execs.into_iter().filter_map(|exec| {
        let info = exec.info();
        let note = Note::read(info.note.as_deref()?)?;
        let counts = match (&info.end, which) {
            (None, _) => true,
            (Some(_), Find::Running) => false,
            (Some(end), Find::Lately) => now - end.ended_at < REMEMBERED,
        };
        let pid = u32::try_from(info.pid?).ok()?;
        counts.then_some(Process { exec, note, pid, terminal: info.terminal })
    });
    Ok(ours.collect())
}

async fn find(
    call: &Call,
    selector: Option<ProcessSelector>,
    which: Find,
) -> Result<Process, Failure> {
    let missing = match selector.clone().unwrap_or_default() {
        ProcessSelector { pid: Some(pid), .. } => format!("process with pid {pid} not found"),
        ProcessSelector { tag: Some(tag), .. } => {
            format!("process with tag {} not found", tag.escape_debug())
        }
        ProcessSelector { pid: None, tag: None } => {
            return Err(Failure::invalid("a process must be named by its pid or its tag"));
        }
    };
    let wanted = |process: &Process| match selector.as_ref() {
        Some(ProcessSelector { pid: Some(pid), .. }) => process.pid == *pid,
        Some(ProcessSelector { tag, .. }) => process.note.tag == *tag,
        None => false,
    };
    // The last one of them: numbers and tags are used again.
    let mut found = all(call, which).await?.into_iter().filter(wanted).collect::<Vec<_>>();
    let running = found.iter().position(|process| process.exec.info().end.is_none());
    let index = running.or(found.len().checked_sub(1));
    let index = index.ok_or_else(|| Failure::new(Code::NotFound, missing))?;
    Ok(found.swap_remove(index))
}

pub(super) async fn start(
    call: &Call,
    request: StartRequest,
) -> Result<impl Stream<Item = Result<ProcessResponse, Failure>> + use<>, Failure> {
    let deadline = call.deadline()?;
    let config = request.process.unwrap_or_default();
    if config.cmd.is_empty() {
        return Err(Failure::invalid("the command is missing"));
    }
    let user = call.user()?;
    let terminal = request.pty.as_ref().map(size).transpose()?;
    let name = ExecId::new();
    let options = ExecOptions {
        id: Some(name.clone()),
        input: match (&terminal, request.stdin) {
            (None, Some(false)) => ExecInput::Closed,
            (Some(_), _) | (None, Some(true) | None) => ExecInput::Open,
        },
        terminal,
        overflow: LogOverflow::Forget,
        user: Some(ExecUser { name: user.to_owned(), workdir: call.place(config.cwd.as_deref()) }),
        note: Some(Note { config: config.clone(), tag: request.tag }.write()),
        ..ExecOptions::default()
    };
    let mut command = Command::new(config.cmd).args(config.args);
    command.env = config.envs;
    command.timeout = deadline;
    let who = call.who();
    let context = ExecContext { extra_env: call.entry.env.clone(), ..who.context() };

    let api = &call.e2b.0.api;
    let words = std::iter::once(&command.program).chain(&command.args).map(String::as_str);
    let exec = Exec {
        sandbox: call.entry.sandbox.id().to_string(),
        name: Some(name.0),
        workdir: options.user.as_ref().and_then(|user| user.workdir.clone()),
        ..Exec::default()
    };
    let exec = exec.command(words).variables(command.env.keys().map(String::as_str));
    let running = api.run_one(&who, exec).await?;
    let started = call.entry.sandbox.start_exec(&command, &context, &options).await;
    let exec = started.map_err(|error| match error {
        SandboxError::Program { kind: ProgramFault::User, .. } => Failure::no_user(user),
        SandboxError::Program { kind: ProgramFault::Workdir, .. } => {
            let cwd = options.user.as_ref().and_then(|user| user.workdir.as_deref());
            let cwd = cwd.unwrap_or("~").escape_debug().to_string();
            Failure::invalid(format!("cwd '{cwd}' does not exist"))
        }
        other => other.into(),
    })?;
    let (stop, watched) = (api.0.stop.clone(), Arc::clone(&exec));
    api.0.tasks.spawn(async move {
        stop.run_until_cancelled(watched.wait()).await;
        drop(running);
    });
    Ok(follow(exec, 0, terminal.is_some(), call.keepalive(), deadline, Ends::WithItsTime))
}

fn size(pty: &Pty) -> Result<TerminalSize, Failure> {
    let size = pty.size.clone().unwrap_or_default();
    let fits = |value: u32| {
        u16::try_from(value).map_err(|_| Failure::invalid("the terminal is too large"))
    };
    Ok(TerminalSize { rows: fits(size.rows)?, columns: fits(size.cols)? })
}

pub(super) async fn connect(
    call: &Call,
    request: ProcessRequest,
) -> Result<impl Stream<Item = Result<ProcessResponse, Failure>> + use<>, Failure> {
    let deadline = call.deadline()?;
    let process = find(call, request.process, Find::Lately).await?;
    // From now on: what was written before was for those who listened then.
    let from = process.exec.info().logged;
    let (keepalive, terminal) = (call.keepalive(), process.terminal);
    Ok(follow(process.exec, from, terminal, keepalive, deadline, Ends::AsItDid))
}

/// What a stream says of a process whose time was up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// That the deadline was exceeded: it was the stream's own.
    WithItsTime,
    /// How it ended, like that of any other.
    AsItDid,
}

/// How far a stream is.
enum Step {
    Begin,
    Read,
    End,
    Done,
}

struct Follower {
    exec: FoundExec,
    at: u64,
    terminal: bool,
    keepalive: Duration,
    deadline: Option<Instant>,
    ends: Ends,
    waiting: std::collections::VecDeque<LogPiece>,
    step: Step,
    all_read: bool,
}

/// Tells what becomes of a process, until it ends or the deadline is there.
fn follow(
    exec: FoundExec,
    from: u64,
    terminal: bool,
    keepalive: Duration,
    deadline: Option<Duration>,
    ends: Ends,
) -> impl Stream<Item = Result<ProcessResponse, Failure>> + use<> {
    let follower = Follower {
        exec,
        at: from,
        terminal,
        keepalive,
        deadline: deadline.map(|after| Instant::now() + after),
        ends,
        waiting: std::collections::VecDeque::new(),
        step: Step::Begin,
        all_read: false,
    };
    stream::unfold(follower, |mut follower| async move {
        let next = follower.next().await?;
        if next.is_err() {
            follower.step = Step::Done;
        }
        let said = next.map(|event| ProcessResponse { event: Some(event) });
        Some((said, follower))
    })
}

impl Follower {
    async fn next(&mut self) -> Option<Result<ProcessEvent, Failure>> {
        match self.step {
            Step::Begin => {
                self.step = Step::Read;
                let pid = self.exec.info().pid.and_then(|pid| u32::try_from(pid).ok());
                let start = Some(Started { pid: pid.unwrap_or_default() });
                Some(Ok(ProcessEvent { start, ..ProcessEvent::default() }))
            }
            Step::Read => match self.read().await {
                Ok(Some(event)) => Some(Ok(event)),
                Ok(None) => {
                    self.step = Step::End;
                    Some(self.end().await)
                }
                Err(failure) => Some(Err(failure)),
            },
            Step::End | Step::Done => None,
        }
    }

    /// Returns the next output, or a sign of life; `None` when all was told.
    async fn read(&mut self) -> Result<Option<ProcessEvent>, Failure> {
        loop {
            if let Some(piece) = self.waiting.pop_front() {
                if let Some(data) = self.data(piece) {
                    return Ok(Some(ProcessEvent { data: Some(data), ..ProcessEvent::default() }));
                }
                continue;
            }
            if self.all_read {
                return Ok(None);
            }
            let quiet = Instant::now() + self.keepalive;
            let until = self.deadline.map_or(quiet, |deadline| deadline.min(quiet));
            let read = self.exec.read(self.at, CHUNK, LogWait::More);
            match tokio::time::timeout_at(until, read).await {
                Ok(read) => {
                    let read = read?;
                    self.at = read.next;
                    self.all_read = read.ended;
                    self.waiting = read.pieces.into();
                }
                Err(_) if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) => {
                    return Err(Failure::deadline());
                }
                Err(_) => {
                    let keepalive = Some(Empty {});
                    return Ok(Some(ProcessEvent { keepalive, ..ProcessEvent::default() }));
                }
            }
        }
    }

    fn data(&self, piece: LogPiece) -> Option<Data> {
        let bytes = Some(piece.bytes);
        Some(match (piece.stream, self.terminal) {
            (LogStream::Stdout, true) => Data { pty: bytes, ..Data::default() },
            (LogStream::Stdout, false) => Data { stdout: bytes, ..Data::default() },
            (LogStream::Stderr, _) => Data { stderr: bytes, ..Data::default() },
            (LogStream::Control, _) => return None,
        })
    }

    async fn end(&self) -> Result<ProcessEvent, Failure> {
        let end = self.exec.wait().await?;
        if end.cause == ExecCause::TimedOut && self.ends == Ends::WithItsTime {
            return Err(Failure::deadline());
        }
        Ok(ProcessEvent { end: Some(ended(&end)), ..ProcessEvent::default() })
    }
}

/// Says how a process ended, in the words that Go has for it.
fn ended(end: &ExecEnd) -> Ended {
    let signal = match end.cause {
        ExecCause::Exited { code } => {
            let status = format!("exit status {code}");
            let error = (code != 0).then(|| status.clone());
            return Ended { exit_code: code, exited: true, status, error };
        }
        ExecCause::Signalled { signal } => signal,
        ExecCause::TimedOut
        | ExecCause::OutOfMemory
        | ExecCause::TooManyProcesses
        | ExecCause::DiskQuota
        | ExecCause::OutputLimit
        | ExecCause::CpuTime
        | ExecCause::KilledByPolicy { .. }
        | ExecCause::Lost => 9,
    };
    let status = format!("signal: {}", signal_name(signal));
    Ended { exit_code: -1, exited: false, error: Some(status.clone()), status }
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "hangup",
        2 => "interrupt",
        3 => "quit",
        4 => "illegal instruction",
        5 => "trace/breakpoint trap",
        6 => "aborted",
        7 => "bus error",
        8 => "floating point exception",
        9 => "killed",
        10 => "user defined signal 1",
        11 => "segmentation fault",
        12 => "user defined signal 2",
        13 => "broken pipe",
        14 => "alarm clock",
        15 => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

pub(super) async fn list(call: &Call, _: Empty) -> Result<ListResponse, Failure> {
    let all = all(call, Find::Running).await?.into_iter();
    let info = |process: Process| ProcessInfo {
        config: Some(process.note.config),
        pid: process.pid,
        tag: process.note.tag,
    };
    Ok(ListResponse { processes: all.map(info).collect() })
}

impl Process {
    async fn write(&self, input: Option<ProcessInput>) -> Result<(), Failure> {
        let wrong = |message: &str| Err(Failure::new(Code::Internal, message));
        let bytes = match (input.unwrap_or_default(), self.terminal) {
            (ProcessInput { stdin: Some(bytes), .. }, false)
            | (ProcessInput { pty: Some(bytes), .. }, true) => bytes,
            (ProcessInput { stdin: Some(_), .. }, true) => {
                return wrong("error writing to stdin: the process has a tty, write to that");
            }
            (ProcessInput { pty: Some(_), .. }, false) => {
                return wrong("error writing to tty: the process has none, write to its stdin");
            }
            (ProcessInput { stdin: None, pty: None }, _) => {
                return Err(Failure::new(Code::Unimplemented, "invalid input type"));
            }
        };
        match self.exec.write_input(None, &bytes, false).await {
            Ok(_) => Ok(()),
            Err(SandboxError::Conflict { .. }) => {
                wrong("error writing to stdin: stdin not enabled or closed")
            }
            Err(error) => Err(error.into()),
        }
    }
}

pub(super) async fn send_input(call: &Call, request: SendInputRequest) -> Result<Empty, Failure> {
    let process = find(call, request.process, Find::Running).await?;
    process.write(request.input).await?;
    Ok(Empty {})
}

pub(super) async fn stream_input(call: &Call, mut incoming: Incoming) -> Result<Empty, Failure> {
    let mut process = None;
    while let Some(StreamInputRequest { start, data, keepalive }) = incoming.next().await? {
        match (start, data, keepalive) {
            (Some(start), ..) => process = Some(find(call, start.process, Find::Running).await?),
            (None, Some(data), _) => {
                let process = process.as_ref();
                let process = process.ok_or_else(|| Failure::invalid("data comes before start"))?;
                process.write(data.input).await?;
            }
            (None, None, Some(_)) => {}
            (None, None, None) => {
                return Err(Failure::new(Code::Unimplemented, "invalid event type"));
            }
        }
    }
    Ok(Empty {})
}

pub(super) async fn send_signal(call: &Call, request: SendSignalRequest) -> Result<Empty, Failure> {
    let process = find(call, request.process, Find::Running).await?;
    match request.signal {
        9 | 15 => process.exec.signal(request.signal).await?,
        other => {
            return Err(Failure::new(Code::Unimplemented, format!("invalid signal: {other}")));
        }
    }
    if request.signal == 9 {
        // Whoever looks next must not find it any more.
        let _ = tokio::time::timeout(Duration::from_secs(2), process.exec.wait()).await;
    }
    Ok(Empty {})
}

pub(super) async fn close_stdin(call: &Call, request: ProcessRequest) -> Result<Empty, Failure> {
    let process = find(call, request.process, Find::Running).await?;
    if process.terminal {
        let message = "error closing stdin: the process has a tty, send Ctrl+D (0x04) instead";
        return Err(Failure::new(Code::Unknown, message));
    }
    match process.exec.write_input(None, b"", true).await {
        // One that is closed already is as good.
        Ok(_) | Err(SandboxError::Conflict { .. }) => Ok(Empty {}),
        Err(error) => Err(error.into()),
    }
}

pub(super) async fn update(call: &Call, request: UpdateRequest) -> Result<Empty, Failure> {
    let process = find(call, request.process, Find::Running).await?;
    let Some(pty) = request.pty else { return Ok(Empty {}) };
    if !process.terminal {
        let message = "error resizing tty: the process has none";
        return Err(Failure::new(Code::Internal, message));
    }
    process.exec.resize(size(&pty)?).await?;
    Ok(Empty {})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(cause: ExecCause) -> ExecEnd {
        let (duration, usage) = (Duration::ZERO, warren::ResourceUsage::default());
        let exit_code = cause.exit_code();
        let (ended_at, denials) = (Utc::now(), Vec::new());
        ExecEnd { cause, exit_code, duration, usage, tasks_started: 1, ended_at, denials }
    }

    #[test]
    fn an_end_is_told_in_the_words_that_clients_know() {
        let told = |cause| {
            let Ended { exit_code, exited, status, error } = ended(&end(cause));
            (exit_code, exited, status, error)
        };
        let text = |text: &str| text.to_owned();
        assert_eq!(told(ExecCause::Exited { code: 0 }), (0, true, text("exit status 0"), None));
        let three = text("exit status 3");
        assert_eq!(told(ExecCause::Exited { code: 3 }), (3, true, three.clone(), Some(three)));
        let killed = text("signal: killed");
        let wanted = (-1, false, killed.clone(), Some(killed));
        assert_eq!(told(ExecCause::Signalled { signal: 9 }), wanted);
        assert_eq!(told(ExecCause::OutOfMemory), wanted);
        let terminated = told(ExecCause::Signalled { signal: 15 });
        assert_eq!(terminated.2, "signal: terminated");
    }

    #[test]
    fn a_note_finds_a_process_again_and_is_never_too_long() {
        let config = ProcessConfig {
            cmd: "/bin/bash".into(),
            args: vec!["-l".into(), "-c".into(), "true".into()],
            ..ProcessConfig::default()
        };
        let note = Note { config, tag: Some("t".into()) };
        assert_eq!(Note::read(&note.clone().write()), Some(note.clone()));
        assert_eq!(Note::read("somebody else's"), None);
        let mut long = note;
        long.config.args.push("x".repeat(MAX_EXEC_NOTE));
        let read = Note::read(&long.write()).unwrap();
        assert_eq!((read.config.cmd.as_str(), read.tag.as_deref()), ("/bin/bash", Some("t")));
    }
}
