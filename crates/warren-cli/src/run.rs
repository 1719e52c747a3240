//! `warren run`.

use std::cell::RefCell;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::stdio::{stderr, stdin, stdout};
use tokio::io::Interest;
use warren::backend::linux::{Ending, Execution, LinuxSandbox, Stdio};
use warren::backend::{LandlockBackend, LinuxBackend};
use warren::layers::{Held, Layers};
use warren::template::{Template, Templates};
use warren::{
    Bound, Destination, EnforcedLimit, Enforcement, ExecCause, ExecContext, Explain,
    IsolationBackend as _, Limit, ResourceLimits, ResourceUsage, Sandbox as _, SandboxError,
};

use crate::args::{RunArgs, SettingArgs};
use crate::backends;
use crate::config::{Config, Surroundings};
use crate::failure::Failure;
use crate::output::{self, Output, RunReport, say};
use crate::program::{self, Caller};
use crate::request::Request;
use crate::signals::{self, Received, Signals};
use crate::streams::{Allowance, Sink, Source, Stream, Target, TooMuch, copy_in, copy_out};
use crate::terminal::{self, RawMode};
use crate::units::{Bytes, Millis};

/// How soon a second signal must follow the first to end the sandbox.
const INSISTENCE: Duration = Duration::from_secs(2);

/// Runs a command in a new sandbox and returns the exit code.
pub(crate) fn run(args: &RunArgs) -> Result<u8, Failure> {
    let asked = backends::requirements(args.spec.isolation, &args.spec.require);
    // This process has one thread, and makes one sandbox.
    let (backend, ground) = match (&args.template, backends::pick(&asked, args.backend.as_deref())?)
    {
        (Some(_), "landlock") if args.backend.is_some() => {
            let hint = "leave --backend out, or name one that has a root of its own";
            return Err(Failure::usage("backend `landlock` has no root to be a template's", hint));
        }
        (Some(name), chosen) => {
            let (backend, template, held) = find_template(name, chosen)?;
            (Maker::Linux(backend), Some((template, held)))
        }
        (None, "landlock") => (Maker::Landlock(LandlockBackend::without_launcher()?), None),
        (None, name) => (Maker::Linux(backends::make_for_one(name, None)?), None),
    };
    let backend = backend.reaching(args)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::system("cannot start", &error))?;
    runtime.block_on(async {
        let caller = Caller::new();
        let template = ground.as_ref().map(|(template, _)| template);
        let request = Request::new(args, template, &caller)?;
        if args.tty {
            terminal::require()?;
        }
        let failed = |error| Failure::system("cannot listen to signals", &error);
        let mut signals = Signals::listen(args.tty).map_err(failed)?;
        let stdio = if args.tty {
            let (rows, columns) = terminal::size();
            Stdio::Terminal { rows, columns }
        } else {
            Stdio::Pipes
        };
        let (sandbox, execution) = tokio::select! {
            made = backend.create_for(&request, stdio, explain_of(args)) => {
                made.map_err(|error| backends::advise(error, backend.name()))?
            }
            signal = interruption(&mut signals) => return Ok(exit_code(128 + signal)),
        };
        let enforced = sandbox.enforcement();
        if !args.quiet {
            request.notes.iter().for_each(|note| say(&format!("note: {note}")));
            warn(backend.name(), &enforced);
        }
        let run = Run { args, request: &request, sandbox: &sandbox, signals: &mut signals };
        let ran = run.run(execution).await;
        // Again after a failure; there is nothing left to do after a success.
        let removed = sandbox.destroy().await;
        let ran = ran.map_err(|failure| program::advise(failure, &request.command, &caller))?;
        removed?;
        if let Some(end) = explain(&ran.ending.cause, &request.spec.limits)
            && !args.quiet
        {
            say(&format!("warren: ended: {end}"));
        }
        if !args.json && (args.explain || !args.quiet) {
            output::say_denials(&ran.ending.denials);
        }
        if !(args.json || args.quiet || args.tty || args.explain) {
            output::hint_at_explain(&ran.ending.cause, &ran.ending.denials);
        }
        let exit_code = exit_code(ran.ending.exit_code);
        if args.json {
            let report = RunReport {
                sandbox: sandbox.id().as_str(),
                backend: backend.name(),
                profile: &request.spec.profile,
                exit_code,
                cause: &ran.ending.cause,
                output: Output::new(&ran.stdout, &ran.stderr),
                duration_ms: u64::try_from(ran.ending.duration.as_millis()).unwrap_or(u64::MAX),
                usage: ran.ending.usage,
                enforced: &enforced,
                notes: &request.notes,
                denials: &ran.ending.denials,
            };
            let printed = output::print_json(&report);
            printed.map_err(|error| Failure::system("cannot write to stdout", &error))?;
        }
        Ok(exit_code)
    })
}

/// Makes the sandbox.
enum Maker {
    Landlock(LandlockBackend),
    Linux(LinuxBackend),
}

impl Maker {
    /// Has it reach what is asked for. What is not public is the caller's own to reach, and so to let be reached.
    fn reaching(self, args: &RunArgs) -> Result<Self, Failure> {
        let asked = &args.spec.net.allow_net;
        match self {
            Self::Linux(backend) if args.spec.net.network || !asked.is_empty() => {
                let config = Config::load(&SettingArgs::default(), &Surroundings::of_process())?;
                let mut options = config.egress;
                options.enabled = true;
                // Not by the way: what has public addresses, as 0.0.0.0/0, means those.
                let asked = asked.iter().filter_map(|text| text.parse::<Destination>().ok());
                options.private.extend(asked.filter(Destination::is_private));
                Ok(Self::Linux(backend.reaching(options)))
            }
            other => Ok(other),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Landlock(backend) => backend.name(),
            Self::Linux(backend) => backend.name(),
        }
    }

    async fn create_for(
        &self,
        request: &Request,
        stdio: Stdio,
        explain: Explain,
    ) -> Result<(LinuxSandbox, Execution), SandboxError> {
        let Request { spec, options, command, .. } = request;
        let context = ExecContext::default();
        match self {
            Self::Landlock(backend) => {
                backend.create_for(spec, options, command, &context, stdio, explain).await
            }
            Self::Linux(backend) => {
                backend.create_for(spec, options, command, &context, stdio, explain).await
            }
        }
    }
}

/// Finds a template of the caller where its daemon keeps them, which need not run; it stays while what is returned lives.
fn find_template(name: &str, chosen: &str) -> Result<(LinuxBackend, Template, Held), Failure> {
    let config = Config::load(&SettingArgs::default(), &Surroundings::of_process())?;
    let layers = Layers::open(config.state_dir.join("storage"))?;
    let backend = backends::make_for_one(chosen, Some(layers.clone()))?;
    let templates = Templates::new(layers, Arc::new(backend.clone()), config.registries);
    let owner = warren_api::tenant_of(rustix::process::geteuid().as_raw());
    let (template, held) = templates.hold(&owner, name)?;
    Ok((backend, template, held))
}

/// What a command gave.
#[derive(Debug)]
struct Ran {
    ending: Ending,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

/// A command about to run.
struct Run<'a> {
    args: &'a RunArgs,
    request: &'a Request,
    sandbox: &'a LinuxSandbox,
    signals: &'a mut Signals,
}

impl Run<'_> {
    /// Runs the command, passes everything through and removes the sandbox.
    async fn run(mut self, mut execution: Execution) -> Result<Ran, Failure> {
        let mut raw = None;
        let (target, out, err) = if self.args.tty {
            let terminal = execution.started().await?.ok_or_else(|| {
                Failure::usage("the sandbox gave no terminal", "leave --tty out to use pipes")
            })?;
            let unset = |error| Failure::system("cannot set up the command's terminal", &error);
            rustix::io::ioctl_fionbio(&terminal, true).map_err(|error| unset(error.into()))?;
            raw = Some(RawMode::enter()?);
            let both = Interest::READABLE | Interest::WRITABLE;
            let terminal = Rc::new(Stream::new(terminal, both));
            (Some(Target::Terminal(Rc::clone(&terminal))), Some(Source::Terminal(terminal)), None)
        } else {
            (
                execution.stdin.take().map(Target::Pipe),
                execution.stdout.take().map(Source::Pipe),
                execution.stderr.take().map(Source::Pipe),
            )
        };
        let (stdout, stderr) = (self.sink(stdout()), self.sink(stderr()));
        let allowance = Allowance::new(self.request.spec.limits.max_output_bytes);
        let ending = {
            let output = async {
                tokio::try_join!(
                    copy_out(out, &stdout, &allowance),
                    copy_out(err, &stderr, &allowance)
                )
                .map(|_| ())
            };
            let input = copy_in(Stream::new(stdin(), Interest::READABLE), target);
            self.attend(&mut execution, input, output).await?
        };
        drop(raw);
        Ok(Ran { ending, stdout: stdout.kept(), stderr: stderr.kept() })
    }

    fn sink(&self, caller: BorrowedFd<'static>) -> Sink<BorrowedFd<'static>> {
        if self.args.json {
            Sink::Kept(RefCell::default())
        } else {
            Sink::Caller(Stream::new(caller, Interest::WRITABLE))
        }
    }

    /// Keeps everything going until the command has ended and its output is out.
    async fn attend(
        &mut self,
        execution: &mut Execution,
        input: impl Future<Output = ()>,
        output: impl Future<Output = Result<(), TooMuch>>,
    ) -> Result<Ending, Failure> {
        tokio::pin!(input, output);
        let (mut fed, mut written) = (false, None);
        let mut asked: Option<Instant> = None;
        let mut ending = loop {
            tokio::select! {
                ending = execution.wait() => break ending?,
                received = self.signals.next() => {
                    if let Received::Signal(signal) = received
                        && signals::asks_to_end(signal)
                        && asked.replace(Instant::now()).is_some_and(|at| at.elapsed() < INSISTENCE)
                    {
                        break insisted(signal);
                    }
                    pass_on(execution, received).await?;
                }
                () = &mut input, if !fed => fed = true,
                done = &mut output, if written.is_none() => {
                    written = Some(done);
                    if done == Err(TooMuch) {
                        execution.stop_for_output().await?;
                    }
                }
            }
        };
        // What goes on in the background would hold the streams open for ever.
        self.sandbox.destroy().await?;
        while written.is_none() {
            tokio::select! {
                done = &mut output => written = Some(done),
                // Whoever reads us has stopped; there is no command left to ask.
                _ = interruption(self.signals) => break,
            }
        }
        if written == Some(Err(TooMuch))
            && matches!(ending.cause, ExecCause::Exited { .. } | ExecCause::OutputLimit)
        {
            // Not its own code, which may say that all is well: some of its output is missing.
            ending.cause = ExecCause::OutputLimit;
            ending.exit_code = ending.cause.exit_code();
        }
        Ok(ending)
    }
}

async fn pass_on(execution: &Execution, received: Received) -> Result<(), Failure> {
    match received {
        Received::Signal(signal) => execution.signal(signal).await?,
        Received::Resized => {
            let (rows, columns) = terminal::size();
            execution.resize(rows, columns).await?;
        }
    }
    Ok(())
}

/// The caller asked twice, and the command did not follow.
fn insisted(signal: i32) -> Ending {
    let cause = ExecCause::KilledByPolicy { reason: "asked to end twice".to_owned() };
    let (duration, usage) = (Duration::ZERO, ResourceUsage::default());
    let (exit_code, denials) = (128 + signal, Vec::new());
    Ending { cause, exit_code, duration, usage, tasks_started: 0, denials }
}

/// Says how much is to be explained: the caller sees the host with its own eyes.
fn explain_of(args: &RunArgs) -> Explain {
    if args.explain { Explain::Host } else { Explain::Nothing }
}

/// Waits for a signal that would end any other program.
async fn interruption(signals: &mut Signals) -> i32 {
    loop {
        if let Received::Signal(signal) = signals.next().await {
            return signal;
        }
    }
}

/// Says what fell back to a looser bound, and how to have it exact.
fn warn(backend: &str, enforced: &Enforcement) {
    if !enforced.warnings.is_empty() {
        say(&format!("warning: {}", enforced.warnings.join("; ")));
    }
    if let Some(hint) = exact(backend, &enforced.limits) {
        say(&format!("hint: {hint}"));
    }
}

/// Says how to have each limit held exactly, if one is not.
fn exact(backend: &str, limits: &[EnforcedLimit]) -> Option<&'static str> {
    let nearest = |limit: &EnforcedLimit| limit.bound == Bound::Nearest;
    limits.iter().any(nearest).then_some(match backend {
        // No user and no group helps where there is no file system of a size of its own, or a kernel of its own.
        "landlock" | "oci-runsc" => {
            "--require limits takes a backend that holds each of them exactly"
        }
        _ => {
            "run as root, or with a cgroup of your own: systemd-run --user --scope -p \
             Delegate=yes warren run ..."
        }
    })
}

/// Says which limit ended a command, if one did.
fn explain(cause: &ExecCause, limits: &ResourceLimits) -> Option<String> {
    let limit = match cause {
        ExecCause::Exited { .. } | ExecCause::Signalled { .. } => return None,
        ExecCause::KilledByPolicy { reason } => return Some(reason.clone()),
        ExecCause::Lost => return Some(cause.to_string()),
        ExecCause::TimedOut => Limit::WallTime,
        ExecCause::OutOfMemory => Limit::Memory,
        ExecCause::TooManyProcesses => Limit::Processes,
        ExecCause::DiskQuota => Limit::Write,
        ExecCause::OutputLimit => Limit::Output,
        ExecCause::CpuTime => Limit::CpuTime,
    };
    let shown = limits.get(limit).map(|value| match limit {
        Limit::Memory | Limit::Write | Limit::Output => Bytes(value).to_string(),
        Limit::WallTime | Limit::CpuTime => Millis(value).to_string(),
        Limit::Processes | Limit::OpenFiles | Limit::CpuWeight | Limit::CpuQuota => {
            value.to_string()
        }
    });
    Some(match shown {
        Some(limit) => format!("{cause} (limit {limit})"),
        None => cause.to_string(),
    })
}

/// The kernel keeps eight bits of an exit code.
fn exit_code(code: i32) -> u8 {
    u8::try_from(code & 0xff).unwrap_or(125)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_exact_limits_is_one_that_leads_there() {
        let limit = |bound| EnforcedLimit { limit: Limit::Write, value: 1, bound, by: "x".into() };
        assert_eq!(exact("linux", &[limit(Bound::Exact)]), None);
        let hint = exact("linux", &[limit(Bound::Exact), limit(Bound::Nearest)]);
        assert!(hint.is_some_and(|hint| hint.contains("run as root")), "{hint:?}");
        let hint = exact("landlock", &[limit(Bound::Nearest)]);
        assert!(hint.is_some_and(|hint| !hint.contains("root")), "{hint:?}");
    }
}
