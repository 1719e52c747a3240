//! Commands in the daemon's sandboxes: `exec`, `shell`, `attach`, `ps`, `logs`, `wait`, `signal`.
//!
//! What a command writes is followed by its offset. A connection that breaks, because the daemon was
//! killed, is made anew and goes on where it was.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use futures_util::{SinkExt as _, StreamExt as _};
use hyper::Method;
use rustix::stdio::{stderr, stdin, stdout};
use serde_json::Value;
use tokio::io::Interest;
use tokio_tungstenite::tungstenite::Message;
use warren_api::rest::execs::{
    AttachText, ExecInfoView, ExecListView, InputView, SignalBody, StartExecBody, TerminalBody,
};
use warren_api::rest::wire::{DefaultView, ExecBody};

use crate::args::ClientArgs;
use crate::client::{Attachment, Client};
use crate::commands::{age, chrono_now, find, printed, read, show_object};
use crate::failure::Failure;
use crate::output::{self, say};
use crate::signals::{self, Received, Signals};
use crate::snapshots;
use crate::streams::Stream;
use crate::terminal::{self, RawMode};
use crate::units::{self, Bytes, Cap};

/// How much is read at once.
const CHUNK: usize = 32 << 10;
/// How long a daemon that is gone is waited for.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long to wait before it is tried again.
const BREATHER: Duration = Duration::from_millis(100);
/// Asking twice within this means it.
const INSISTENCE: Duration = Duration::from_secs(2);
/// Ctrl-P Ctrl-Q leaves a terminal, and what runs in it goes on.
const DETACH: [u8; 2] = [0x10, 0x11];

/// What to run where.
#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Directory to run in.
    #[arg(long, value_name = "DIR")]
    workdir: Option<PathBuf>,
    /// Set a variable of the command's environment.
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::variable)]
    env: Vec<(String, String)>,
    /// Time by the clock.
    #[arg(long, value_name = "TIME", value_parser = units::time)]
    timeout: Option<Cap<u64>>,
    /// Hand on what comes from stdin.
    #[arg(long, short = 'i')]
    stdin: bool,
    /// Give it a terminal, joined to the caller's; Ctrl-P Ctrl-Q leaves it running.
    #[arg(long, short = 't', conflicts_with_all = ["json", "detach"])]
    tty: bool,
    /// Print its name and return while it runs.
    #[arg(long, short = 'd', conflicts_with = "stdin")]
    detach: bool,
    /// Name it: repeating the same command by the same name joins the same run.
    #[arg(long, value_name = "NAME")]
    id: Option<String>,
    /// Go on when it has written all that it may, and forget the oldest.
    #[arg(long)]
    forget: bool,
    /// Save the sandbox before, for `warren undo`, and say on stderr what the command changed; with --json in the answer.
    #[arg(long, conflicts_with_all = ["detach", "tty"])]
    savepoint: bool,
    /// Follow the command, call by call, and say on stderr what walls refused to it and what would allow
    /// that; with --json in the answer. It takes longer.
    #[arg(long)]
    explain: bool,
    /// Name or id of the sandbox, or the beginning of one; the default sandbox if absent.
    sandbox: Option<String>,
    /// The command and its arguments.
    #[arg(value_name = "CMD", required = true, last = true)]
    command: Vec<String>,
}

/// Where to open a shell.
#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Name it, to join it again: warren attach SANDBOX NAME.
    #[arg(long, value_name = "NAME")]
    id: Option<String>,
    /// Directory to start in.
    #[arg(long, value_name = "DIR")]
    workdir: Option<PathBuf>,
    /// The shell.
    #[arg(long, value_name = "PROGRAM", default_value = "bash")]
    program: String,
    /// Name or id of the sandbox, or the beginning of one; the default sandbox if absent.
    sandbox: Option<String>,
}

/// Whose commands to list.
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Those that ended too.
    #[arg(long, short)]
    all: bool,
    /// Name or id of the sandbox, or the beginning of one; the default sandbox if absent.
    sandbox: Option<String>,
}

/// Which command.
#[derive(Debug, Args)]
pub(crate) struct ExecTarget {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Name or id of the sandbox, or the beginning of one.
    sandbox: String,
    /// The command: its name, the beginning of it, or its pid inside.
    exec: String,
}

/// Which log to read, and how.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    target: ExecTarget,
    /// Go on until the command has ended.
    #[arg(long, short)]
    follow: bool,
    /// Begin at this byte.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    since_offset: u64,
}

impl LogsArgs {
    pub(crate) fn is_json(&self) -> bool {
        self.target.client.json
    }
}

/// Which command to wait for.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    #[command(flatten)]
    target: ExecTarget,
    /// Wait no longer than this; 124 says that it still runs.
    #[arg(long, value_name = "TIME", value_parser = units::time)]
    timeout: Option<Cap<u64>>,
}

impl WaitArgs {
    pub(crate) fn is_json(&self) -> bool {
        self.target.client.json
    }
}

/// Which signal to send.
#[derive(Debug, Args)]
pub(crate) struct SignalArgs {
    #[command(flatten)]
    target: ExecTarget,
    /// End it and everything it started.
    #[arg(long, conflicts_with = "signal")]
    kill: bool,
    /// The signal: a number, or a name such as TERM.
    #[arg(long, short, default_value = "TERM", value_parser = signal_number)]
    signal: i32,
}

impl SignalArgs {
    pub(crate) fn is_json(&self) -> bool {
        self.target.client.json
    }
}

fn signal_number(text: &str) -> Result<i32, String> {
    const NAMES: [(&str, i32); 16] = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("ABRT", 6),
        ("KILL", 9),
        ("USR1", 10),
        ("SEGV", 11),
        ("USR2", 12),
        ("PIPE", 13),
        ("ALRM", 14),
        ("TERM", 15),
        ("CHLD", 17),
        ("CONT", 18),
        ("STOP", 19),
        ("TSTP", 20),
        ("WINCH", 28),
    ];
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let named = NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
    let number = named.or_else(|| text.parse().ok()).filter(|number| (1..=64).contains(number));
    number.ok_or_else(|| "write a number from 1 to 64, or a name such as TERM".to_owned())
}

/// Finds the sandbox that is meant, or the default one.
fn sandbox(client: &Client, target: Option<&str>) -> Result<String, Failure> {
    if let Some(target) = target {
        return Ok(find(client, target)?.id);
    }
    let view: DefaultView = client.get("/v1/default")?;
    view.sandbox_id.ok_or_else(|| {
        Failure::fatal("no_default", "there is no default sandbox")
            .with_hint("name one, or set it: warren default SANDBOX")
    })
}

/// Finds the path of the one exec that is meant.
fn exec_path(client: &Client, target: &ExecTarget) -> Result<String, Failure> {
    let id = find(client, &target.sandbox)?.id;
    let list: ExecListView = client.get(&format!("/v1/sandboxes/{id}/execs"))?;
    let path = |exec: &ExecInfoView| Ok(format!("/v1/sandboxes/{id}/execs/{}", exec.id));
    let wanted = target.exec.as_str();
    let pid = wanted.parse().ok();
    let runs = |exec: &&ExecInfoView| pid.is_some() && exec.pid == pid && exec.end.is_none();
    let exact = list.items.iter().find(|exec| exec.id == wanted);
    if let Some(exec) = exact.or_else(|| list.items.iter().find(runs)) {
        return path(exec);
    }
    let begins = |exec: &&ExecInfoView| {
        let bare = exec.id.strip_prefix("exec-").unwrap_or(&exec.id);
        !wanted.is_empty() && (exec.id.starts_with(wanted) || bare.starts_with(wanted))
    };
    match list.items.iter().filter(begins).collect::<Vec<_>>()[..] {
        [exec] => path(exec),
        [] => Err(Failure::fatal("not_found", format!("no exec `{wanted}`"))
            .with_hint(format!("`warren ps -a {}` lists them", target.sandbox))),
        ref several => {
            let ids: Vec<&str> = several.iter().map(|exec| exec.id.as_str()).collect();
            let message = format!("`{wanted}` could be {}", ids.join(", "));
            Err(Failure::fatal("ambiguous", message).with_hint("write more of the name"))
        }
    }
}

fn body_of(args: &ExecArgs) -> Result<ExecBody, Failure> {
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(Failure::usage("there is no command", "write it after `--`"));
    };
    Ok(ExecBody {
        program: program.clone(),
        args: arguments.to_vec(),
        workdir: args.workdir.as_ref().map(|path| path.display().to_string()),
        env: args.env.iter().cloned().collect::<BTreeMap<_, _>>(),
        stdin: None,
        stdin_base64: None,
        timeout_ms: args.timeout.and_then(Cap::bound),
        explain: args.explain,
    })
}

/// `warren exec`.
pub(crate) fn exec(args: &ExecArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    if args.savepoint {
        let sandbox = sandbox(&client, args.sandbox.as_deref())?;
        if args.client.json && !(args.detach || args.id.is_some() || args.tty) {
            // One object tells all of it.
            let body = body_of(args)?;
            let path = format!("/v1/sandboxes/{sandbox}/exec?savepoint=true");
            return crate::commands::exec_at(&client, &path, body, args.stdin, true);
        }
        let saved = snapshots::savepoint(&client, &sandbox)?;
        let code = run(args, &client)?;
        let changed = snapshots::changes(&client, &sandbox, &format!("since={saved}"))?;
        for line in snapshots::lines(&changed).lines() {
            say(&format!("warren: {line}"));
        }
        return Ok(code);
    }
    run(args, &client)
}

fn run(args: &ExecArgs, client: &Client) -> Result<u8, Failure> {
    let command = body_of(args)?;
    let named = args.detach || args.id.is_some() || args.tty;
    if args.client.json && !named {
        return crate::commands::exec_whole(
            client,
            args.sandbox.as_deref(),
            command,
            args.stdin,
            true,
        );
    }
    if args.tty {
        terminal::require()?;
    }
    let sandbox = sandbox(client, args.sandbox.as_deref())?;
    let body = StartExecBody {
        id: args.id.clone(),
        command: command.clone(),
        open_stdin: args.stdin || args.tty,
        terminal: args.tty.then(size),
        overflow: if args.forget { warren::LogOverflow::Forget } else { Default::default() },
    };
    let started =
        client.send::<Value>(Method::POST, &format!("/v1/sandboxes/{sandbox}/execs"), &body, &[]);
    let started = match started {
        Err(failure) if failure.is("unsupported") && !named => {
            // A backend without logs: all of the output at the end.
            let target = args.sandbox.as_deref();
            return crate::commands::exec_whole(client, target, command, args.stdin, false);
        }
        other => other?,
    };
    let exec: ExecInfoView = read(started.clone())?;
    if args.detach {
        return match args.client.json {
            true => show_object(&started),
            false => printed(output::print(format!("{}\n", exec.id).as_bytes())),
        };
    }
    let path = format!("/v1/sandboxes/{sandbox}/execs/{}", exec.id);
    let mode = if args.tty { Mode::Terminal } else { Mode::Pipes { stdin: args.stdin } };
    let seen = join(client, &path, mode)?;
    if args.id.is_none() && matches!(seen, Seen::End(_)) {
        // Nobody knows its name, so nobody will ask for it again.
        let _ = client.delete(&path);
    }
    let end = match &seen {
        Seen::End(info) => info.end.clone(),
        Seen::Left(_) => None,
    };
    let code = finish(seen, args.client.json)?;
    if let Some(end) = end.filter(|_| !(args.client.json || args.tty || args.explain)) {
        output::hint_at_explain(&end.cause, &end.denials);
    }
    Ok(code)
}

fn size() -> TerminalBody {
    let (rows, columns) = terminal::size();
    TerminalBody { rows, columns }
}

/// `warren shell`.
pub(crate) fn shell(args: &ShellArgs) -> Result<u8, Failure> {
    terminal::require()?;
    let client = Client::new(&args.client)?;
    let sandbox = sandbox(&client, args.sandbox.as_deref())?;
    let mut env = BTreeMap::new();
    env.insert("TERM".to_owned(), std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned()));
    let command = ExecBody {
        program: args.program.clone(),
        args: Vec::new(),
        workdir: args.workdir.as_ref().map(|path| path.display().to_string()),
        env,
        stdin: None,
        stdin_base64: None,
        timeout_ms: None,
        explain: false,
    };
    let body = StartExecBody {
        id: args.id.clone(),
        command,
        open_stdin: true,
        terminal: Some(size()),
        overflow: warren::LogOverflow::Forget,
    };
    let exec: ExecInfoView =
        client.send(Method::POST, &format!("/v1/sandboxes/{sandbox}/execs"), &body, &[])?;
    let path = format!("/v1/sandboxes/{sandbox}/execs/{}", exec.id);
    finish(join(&client, &path, Mode::Terminal)?, args.client.json)
}

/// `warren attach SANDBOX EXEC`.
pub(crate) fn attach(
    client: &Client,
    sandbox: &str,
    exec: &str,
    json: bool,
) -> Result<u8, Failure> {
    let list: ExecListView = client.get(&format!("/v1/sandboxes/{sandbox}/execs"))?;
    let found = list.items.iter().find(|one| {
        one.id == exec || (one.end.is_none() && one.pid.is_some_and(|pid| pid.to_string() == exec))
    });
    let Some(found) = found else {
        return Err(Failure::fatal("not_found", format!("no exec `{exec}`"))
            .with_hint(format!("`warren ps {sandbox}` lists those that run")));
    };
    let mode = match found.terminal && found.end.is_none() {
        true => {
            terminal::require()?;
            Mode::Terminal
        }
        false => Mode::Pipes { stdin: false },
    };
    let path = format!("/v1/sandboxes/{sandbox}/execs/{}", found.id);
    finish(join(client, &path, mode)?, json)
}

/// `warren ps`.
pub(crate) fn ps(args: &PsArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let sandbox = sandbox(&client, args.sandbox.as_deref())?;
    let list: Value = client.get(&format!("/v1/sandboxes/{sandbox}/execs"))?;
    let mut items = list["items"].as_array().cloned().unwrap_or_default();
    items.retain(|item| args.all || item["end"].is_null());
    if args.client.json {
        items.iter().try_for_each(|item| show_object(item).map(|_| ()))?;
        return Ok(0);
    }
    let now = chrono_now();
    let rows = items.into_iter().map(|item| {
        let exec: ExecInfoView = read(item)?;
        let state = exec.end.as_ref().map_or("running".to_owned(), |end| end.cause.to_string());
        Ok(vec![
            exec.id,
            exec.pid.filter(|_| exec.end.is_none()).map_or("-".to_owned(), |pid| pid.to_string()),
            state,
            age(now, exec.started_at.timestamp()),
            Bytes(exec.logged).to_string(),
            exec.command.join(" ").chars().take(60).collect::<String>().escape_debug().to_string(),
        ])
    });
    let rows = rows.collect::<Result<Vec<_>, Failure>>()?;
    let head = ["EXEC", "PID", "STATE", "AGE", "OUTPUT", "COMMAND"];
    printed(output::print(output::table(&head, rows).as_bytes()))
}

/// `warren logs`.
pub(crate) fn logs(args: &LogsArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.target.client)?;
    let path = exec_path(&client, &args.target)?;
    let mut reader = Reader::new(&client, path, Mode::Watch, args.since_offset);
    reader.json = args.target.client.json;
    if args.follow {
        return client.block_on(reader.run()).map(|_| 0);
    }
    let info: ExecInfoView = client.get(&reader.path)?;
    // What there is now, and no more.
    reader.until = Some(info.logged);
    client.block_on(reader.run()).map(|_| 0)
}

/// `warren wait`.
pub(crate) fn wait(args: &WaitArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.target.client)?;
    let path = exec_path(&client, &args.target)?;
    let deadline = args.timeout.and_then(Cap::bound).map(Duration::from_millis);
    let began = Instant::now();
    loop {
        let left = deadline.map(|deadline| deadline.saturating_sub(began.elapsed()));
        let query = left.map_or(String::new(), |left| format!("?timeout_ms={}", left.as_millis()));
        let asked = client.get::<Value>(&format!("{path}/wait{query}"));
        let info: ExecInfoView = match asked {
            // A daemon that is started anew knows it again.
            Err(failure) if failure.is_lost() && began.elapsed() < PATIENCE => {
                std::thread::sleep(BREATHER);
                continue;
            }
            other => read(other?)?,
        };
        if info.end.is_some() {
            return finish(Seen::End(Box::new(info)), args.target.client.json);
        }
        if left == Some(Duration::ZERO) {
            return finish(Seen::Left(Box::new(info)), args.target.client.json).map(|_| 124);
        }
    }
}

/// `warren signal`.
pub(crate) fn signal(args: &SignalArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.target.client)?;
    let path = exec_path(&client, &args.target)?;
    if args.kill {
        client.post(&format!("{path}/kill"), &serde_json::json!({}))?;
    } else {
        client.post(&format!("{path}/signal"), &SignalBody { signal: args.signal })?;
    }
    Ok(0)
}

/// How a command is joined to the caller's streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Its streams to the caller's.
    Pipes { stdin: bool },
    /// Its terminal to the caller's.
    Terminal,
    /// Its output alone.
    Watch,
}

/// What was seen of a command.
enum Seen {
    End(Box<ExecInfoView>),
    /// It was left, and runs on.
    Left(Box<ExecInfoView>),
}

/// Returns the exit code of a command that was followed, and says what it does not say itself.
fn finish(seen: Seen, json: bool) -> Result<u8, Failure> {
    let (info, ended) = match seen {
        Seen::End(info) => (info, true),
        Seen::Left(info) => (info, false),
    };
    if json {
        show_object(&*info)?;
    }
    let Some(end) = info.end.filter(|_| ended) else { return Ok(0) };
    if !json {
        output::say_end(&end.cause, &end.denials);
    }
    Ok(u8::try_from(end.exit_code & 0xff).unwrap_or(125))
}

fn join(client: &Client, path: &str, mode: Mode) -> Result<Seen, Failure> {
    let mut reader = Reader::new(client, path.to_owned(), mode, 0);
    let raw = (mode == Mode::Terminal).then(RawMode::enter).transpose()?;
    let seen = client.block_on(reader.run());
    drop(raw);
    if let Ok(Seen::Left(info)) = &seen {
        say(&format!("\nleft; it runs on as {}", info.id));
    }
    seen
}

/// Follows one command.
struct Reader<'a> {
    client: &'a Client,
    path: String,
    mode: Mode,
    offset: u64,
    /// Where to stop although it goes on.
    until: Option<u64>,
    json: bool,
    out: Stream<BorrowedFd<'static>>,
    err: Stream<BorrowedFd<'static>>,
}

/// Why a connection is over.
enum Over {
    Seen(Seen),
    /// It broke, and can be made again.
    Lost,
}

impl<'a> Reader<'a> {
    fn new(client: &'a Client, path: String, mode: Mode, offset: u64) -> Self {
        let (out, err) = client.block_on(async {
            (Stream::new(stdout(), Interest::WRITABLE), Stream::new(stderr(), Interest::WRITABLE))
        });
        Self { client, path, mode, offset, until: None, json: false, out, err }
    }

    /// Follows it until it has ended or is left, over as many connections as it takes.
    async fn run(&mut self) -> Result<Seen, Failure> {
        let failed = |error| Failure::system("cannot hear signals", &error);
        let mut signals = Signals::listen(self.mode == Mode::Terminal).map_err(failed)?;
        let input = self.feed();
        tokio::pin!(input);
        let (mut fed, mut lost_at) = (self.mode != Mode::Pipes { stdin: true }, None);
        loop {
            let connected = self.client.attach(&self.query()).await;
            let socket = match connected {
                Ok(socket) => socket,
                Err(failure) if failure.is_lost() && lost_at.is_some() => {
                    let since: &Instant = lost_at.get_or_insert_with(Instant::now);
                    if since.elapsed() > PATIENCE {
                        return Err(failure);
                    }
                    tokio::time::sleep(BREATHER).await;
                    continue;
                }
                Err(failure) => return Err(failure),
            };
            let follow = self.follow(socket, &mut signals);
            tokio::pin!(follow);
            let over = loop {
                tokio::select! {
                    over = &mut follow => break over?,
                    done = &mut input, if !fed => {
                        fed = true;
                        // A command need not read what it is given.
                        let _ = done;
                    }
                }
            };
            match over {
                Over::Seen(seen) => return Ok(seen),
                Over::Lost => lost_at = Some(Instant::now()),
            }
        }
    }

    fn query(&self) -> String {
        let write = self.mode == Mode::Terminal;
        // One that comes back takes over from itself, whose end may not have been noticed yet.
        format!("{}/attach?offset={}&write={write}&steal={write}", self.path, self.offset)
    }

    /// Hands on what comes from stdin, so that repeating a piece after a break does no harm.
    fn feed(&self) -> impl Future<Output = Result<(), Failure>> + use<'a> {
        let (client, path) = (self.client, format!("{}/stdin", self.path));
        async move {
            let from = Stream::new(stdin(), Interest::READABLE);
            let (mut buffer, mut offset) = (vec![0; CHUNK], 0);
            loop {
                let read = from.read(&mut buffer).await;
                let length = read.map_err(|error| Failure::system("cannot read stdin", &error))?;
                let path = format!("{path}?offset={offset}&end={}", length == 0);
                let began = Instant::now();
                let view: InputView = loop {
                    match client.put_bytes(&path, &buffer[..length]).await {
                        Err(failure) if failure.is_lost() && began.elapsed() < PATIENCE => {
                            tokio::time::sleep(BREATHER).await;
                        }
                        other => break other?,
                    }
                };
                offset = view.taken;
                if length == 0 {
                    return Ok(());
                }
            }
        }
    }

    /// Follows it over one connection.
    async fn follow(
        &mut self,
        mut socket: Attachment,
        signals: &mut Signals,
    ) -> Result<Over, Failure> {
        let keys = Stream::new(stdin(), Interest::READABLE);
        let (mut buffer, mut held) = (vec![0; CHUNK], Keys::default());
        let mut typing = self.mode == Mode::Terminal;
        let mut asked: Option<Instant> = None;
        if typing {
            let TerminalBody { rows, columns } = size();
            let _ = socket.send(text(&AttachText::Resize { rows, columns })).await;
        }
        loop {
            if self.until.is_some_and(|until| self.offset >= until) {
                let info = self.client.get_async(&self.path).await?;
                return Ok(Over::Seen(Seen::Left(Box::new(info))));
            }
            tokio::select! {
                message = socket.next() => match message {
                    Some(Ok(Message::Binary(bytes))) => self.write(&bytes).await?,
                    Some(Ok(Message::Text(said))) => match serde_json::from_str(&said) {
                        Ok(AttachText::End { exec, cut }) => {
                            if cut {
                                say("warren: there was more output than is kept");
                            }
                            return Ok(Over::Seen(Seen::End(exec)));
                        }
                        Ok(AttachText::Skipped { bytes }) => {
                            self.offset += bytes;
                            say(&format!("warren: {} of output are forgotten", Bytes(bytes)));
                        }
                        Ok(AttachText::Refused { error }) => say(&format!("warren: {error}")),
                        Ok(_) | Err(_) => {}
                    },
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return Ok(Over::Lost),
                },
                received = signals.next() => match received {
                    Received::Resized => {
                        let TerminalBody { rows, columns } = size();
                        let _ = socket.send(text(&AttachText::Resize { rows, columns })).await;
                    }
                    Received::Signal(signal) => {
                        let twice = signals::asks_to_end(signal)
                            && asked.replace(Instant::now())
                                .is_some_and(|at| at.elapsed() < INSISTENCE);
                        if twice || self.mode == Mode::Watch {
                            let info = self.client.get_async(&self.path).await?;
                            return Ok(Over::Seen(Seen::Left(Box::new(info))));
                        }
                        let body = SignalBody { signal };
                        let _ = self.client.post_async(&format!("{}/signal", self.path), &body).await;
                    }
                },
                read = keys.read(&mut buffer), if typing => {
                    let length = read.unwrap_or(0);
                    if length == 0 {
                        typing = false;
                        continue;
                    }
                    let (typed, leaves) = held.take(&buffer[..length]);
                    if !typed.is_empty() && socket.send(Message::Binary(typed.into())).await.is_err() {
                        return Ok(Over::Lost);
                    }
                    if leaves {
                        let info = self.client.get_async(&self.path).await?;
                        return Ok(Over::Seen(Seen::Left(Box::new(info))));
                    }
                }
            }
        }
    }

    /// Writes one piece where it belongs.
    async fn write(&mut self, message: &[u8]) -> Result<(), Failure> {
        let Some((head, bytes)) = message.split_first_chunk::<9>() else { return Ok(()) };
        let offset = u64::from_be_bytes([
            head[1], head[2], head[3], head[4], head[5], head[6], head[7], head[8],
        ]);
        let room = self.until.map_or(u64::MAX, |until| until.saturating_sub(offset));
        let bytes = &bytes[..bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX))];
        self.offset = offset + bytes.len() as u64;
        if self.json {
            let stream = if head[0] == 1 { "stderr" } else { "stdout" };
            let text = String::from_utf8_lossy(bytes);
            let line = serde_json::json!({ "offset": offset, "stream": stream, "text": text });
            return show_object(&line).map(|_| ());
        }
        let written = match head[0] {
            0 => self.out.write_all(bytes).await,
            1 => self.err.write_all(bytes).await,
            // What a shell and the daemon say to each other.
            _ => return Ok(()),
        };
        written.map_err(|error| Failure::system("cannot write", &error))
    }
}

fn text(said: &AttachText) -> Message {
    Message::Text(serde_json::to_string(said).unwrap_or_default().into())
}

/// What was typed, looked through for the keys that leave.
#[derive(Debug, Default)]
struct Keys {
    /// Whether the last one was the first of the two.
    begun: bool,
}

impl Keys {
    /// Returns what is for the command, and whether it is to be left.
    fn take(&mut self, typed: &[u8]) -> (Vec<u8>, bool) {
        let mut through = Vec::with_capacity(typed.len());
        for key in typed {
            match (self.begun, *key) {
                (true, key) if key == DETACH[1] => return (through, true),
                (false, key) if key == DETACH[0] => self.begun = true,
                (true, key) => {
                    through.push(DETACH[0]);
                    self.begun = key == DETACH[0];
                    if !self.begun {
                        through.push(key);
                    }
                }
                (false, key) => through.push(key),
            }
        }
        (through, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_keys_leave_and_everything_else_goes_through() {
        let mut keys = Keys::default();
        assert_eq!(keys.take(b"ab"), (b"ab".to_vec(), false));
        assert_eq!(keys.take(b"\x10x"), (b"\x10x".to_vec(), false));
        assert_eq!(keys.take(b"\x10"), (vec![], false), "held until the next");
        assert_eq!(keys.take(b"\x10\x10y"), (b"\x10\x10\x10y".to_vec(), false));
        assert_eq!(keys.take(b"z\x10"), (b"z".to_vec(), false));
        assert_eq!(keys.take(b"\x11never"), (vec![], true));
    }

    #[test]
    fn a_signal_is_a_number_or_a_name() {
        for (text, number) in [("TERM", 15), ("sigkill", 9), ("64", 64), ("Usr1", 10)] {
            assert_eq!(signal_number(text), Ok(number));
        }
        for bad in ["0", "65", "-1", "NOPE", ""] {
            assert!(signal_number(bad).is_err(), "{bad}");
        }
    }
}
