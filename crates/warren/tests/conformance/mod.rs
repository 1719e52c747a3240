//! What every backend must do: one suite, run on each.
//!
//! `conformance!(name, given)` makes a module with one test a case. What a backend cannot do is
//! said in [`Expect`], and then that it refuses is what is tested; no case is left out.
//!
//! Scripts keep to what the fake backend's tiny shell knows, unless the backend runs real programs.

#![expect(clippy::unwrap_used, reason = "a case may panic as the test may that runs it")]

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use tokio::sync::mpsc;
use warren::{
    Command, CreateOptions, ExecCause, ExecContext, ExecHandle, ExecId, ExecOptions, ExecReport,
    FileSource, FoundExec, IsolationBackend, Limit, LogWait, ProgramFault, ResourceLimits, Sandbox,
    SandboxError, SandboxId, SandboxSpec, StreamOutput, WriteOptions,
};

/// A backend, and what is to be expected of it.
pub(crate) struct Given {
    pub(crate) backend: Arc<dyn IsolationBackend>,
    pub(crate) expect: Expect,
    /// Lists what is left on the host; asked after each case, when all has been destroyed.
    pub(crate) left: Box<dyn Fn() -> Vec<String>>,
}

/// What a backend can do, where that differs.
pub(crate) struct Expect {
    /// Whether it runs real programs on real files, or only the fake's tiny shell.
    pub(crate) runs_programs: bool,
    /// Where a command runs that does not say.
    pub(crate) workdir: Workdir,
    /// Whether sandboxes can be saved.
    pub(crate) snapshots: bool,
    /// Whether commands have logs, and files can be reached from outside.
    pub(crate) logs_and_files: bool,
    /// Limits that it must refuse when they are demanded.
    pub(crate) unenforceable: BTreeSet<Limit>,
}

/// Where a command runs that does not say.
pub(crate) enum Workdir {
    /// At the path that the spec names.
    AsInTheSpec,
    /// In a directory that stands for it.
    Elsewhere,
}

/// Makes a module with one test for each case of the suite.
macro_rules! conformance {
    ($name:ident, $given:expr) => {
        conformance!(@ $name, $given, [
            created_sandboxes_have_unique_ids_and_are_found,
            an_id_that_was_asked_for_is_given_once,
            an_unknown_id_is_nobodys,
            an_exit_code_is_the_commands_own,
            a_signal_is_told_from_an_exit_code,
            stdout_and_stderr_are_kept_apart,
            output_that_is_not_wanted_is_not_returned,
            stdin_reaches_the_command_and_ends,
            the_environment_is_the_specs_the_contexts_and_the_commands,
            the_environment_of_the_host_does_not_get_in,
            a_command_runs_where_it_was_told_to,
            a_missing_program_is_a_typed_error,
            a_file_that_is_no_program_is_a_typed_error,
            an_invalid_command_is_refused_and_harms_nothing,
            a_timeout_keeps_the_output_and_the_sandbox,
            the_shortest_of_the_timeouts_holds,
            a_timeout_ends_the_background_children_too,
            an_exec_that_is_dropped_leaves_no_process,
            output_beyond_the_limit_ends_the_command,
            streamed_output_comes_in_order_and_the_exit_last,
            a_receiver_that_went_away_does_not_end_the_command,
            execs_run_at_the_same_time,
            a_suspended_sandbox_makes_no_progress_until_it_is_resumed,
            time_stands_still_for_a_suspended_command,
            suspending_and_resuming_twice_is_no_error,
            a_sandbox_is_alive_until_it_is_destroyed,
            destroying_twice_is_no_error,
            a_destroyed_sandbox_refuses_everything_else,
            destroying_ends_the_commands_that_run,
            usage_is_reported_for_the_sandbox_and_each_exec,
            an_invalid_spec_is_refused_before_anything_is_created,
            a_demanded_limit_is_enforced_or_refused_by_name,
            destroy_all_empties_the_list,
            snapshots_work_or_are_a_typed_error,
            a_fork_has_what_was_captured_or_there_is_none,
            a_log_is_anybodys_from_any_offset_or_a_typed_error,
            a_name_is_one_run_or_a_typed_error,
            files_go_in_and_come_out_or_are_not_offered,
            capabilities_and_health_name_what_there_is,
        ]);
    };
    (@ $name:ident, $given:expr, [$($case:ident),* $(,)?]) => {
        mod $name {
            use super::*;
            $(
                #[tokio::test]
                async fn $case() {
                    let given = $given;
                    conformance::$case(&given).await;
                    given.finish().await;
                }
            )*
        }
    };
}

impl Given {
    async fn create(&self) -> Box<dyn Sandbox> {
        self.create_as(&SandboxSpec::default()).await
    }

    async fn create_as(&self, spec: &SandboxSpec) -> Box<dyn Sandbox> {
        self.backend.create_sandbox(spec).await.expect("a sandbox can be created")
    }

    /// Clears up after a case and checks that nothing is left on the host.
    pub(crate) async fn finish(self) {
        self.backend.destroy_all().await.expect("everything can be destroyed");
        assert_eq!(self.backend.list_sandboxes().await.unwrap(), []);
        let left = (self.left)();
        assert!(left.is_empty(), "left on the host: {left:?}");
    }
}

fn sh(script: &str) -> Command {
    Command::new("sh").args(["-c", script])
}

fn context() -> ExecContext {
    ExecContext::default()
}

async fn run(sandbox: &dyn Sandbox, command: &Command) -> ExecReport {
    sandbox.exec_report(command, &context()).await.expect("the command runs")
}

async fn stdout(sandbox: &dyn Sandbox, command: &Command) -> String {
    let report = run(sandbox, command).await;
    assert_eq!(report.cause, ExecCause::Exited { code: 0 }, "{report:?}");
    String::from_utf8(report.output.stdout).unwrap()
}

async fn assert_usable(sandbox: &dyn Sandbox) {
    assert!(sandbox.is_alive().await);
    assert_eq!(stdout(sandbox, &sh("echo usable")).await, "usable\n");
}

/// Counts the processes of the host that have this argument.
fn processes_with(argument: &str) -> usize {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.filter(|line| line.split(|byte| *byte == 0).any(|arg| arg == argument.as_bytes())).count()
}

/// Counts the processes that have this argument: of the host, or inside where the host runs none of them.
async fn running_with(given: &Given, sandbox: &dyn Sandbox, argument: &str) -> usize {
    if given.backend.level() != Some(warren::IsolationLevel::Kernel) {
        return processes_with(argument);
    }
    let each = "for f in /proc/[0-9]*/cmdline; do tr '\\0' '\\n' 2>/dev/null < $f; done";
    let said = stdout(sandbox, &sh(each)).await;
    said.lines().filter(|line| *line == argument).count()
}

/// Waits a little until as many run as are wanted, and tells whether they did.
async fn soon_running(
    given: &Given,
    sandbox: &dyn Sandbox,
    argument: &str,
    wanted: impl Fn(usize) -> bool,
) -> bool {
    for _ in 0..200 {
        if wanted(running_with(given, sandbox, argument).await) {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    false
}

pub(crate) async fn created_sandboxes_have_unique_ids_and_are_found(given: &Given) {
    let (first, second) = (given.create().await, given.create().await);
    assert_ne!(first.id(), second.id());
    let listed: BTreeSet<_> = given.backend.list_sandboxes().await.unwrap().into_iter().collect();
    assert_eq!(listed, [first.id().clone(), second.id().clone()].into());
    let found = given.backend.get_sandbox(second.id()).await.unwrap().expect("it lives");
    assert_eq!(found.id(), second.id());
    drop(second);
    assert_usable(&*found).await;
}

pub(crate) async fn an_id_that_was_asked_for_is_given_once(given: &Given) {
    let spec = SandboxSpec::default();
    let ask = |id: &str| CreateOptions { id: Some(id.into_id()), ..Default::default() };
    let sandbox = given.backend.create_sandbox_with(&spec, &ask("mine-1")).await.unwrap();
    assert_eq!(sandbox.id().as_str(), "mine-1");
    assert_eq!(sandbox.capabilities().sandbox_id, "mine-1");
    assert_usable(&*sandbox).await;
    let error = given.backend.create_sandbox_with(&spec, &ask("mine-1")).await.unwrap_err();
    assert_eq!(error.code(), "already_exists");
    for id in ["", "..", "a/b", "a\0b"] {
        let error = given.backend.create_sandbox_with(&spec, &ask(id)).await.unwrap_err();
        assert_eq!(error.code(), "invalid_spec", "{id:?}");
    }
    sandbox.destroy().await.unwrap();
    given.backend.create_sandbox_with(&spec, &ask("mine-1")).await.expect("it is free again");
}

trait IntoId {
    fn into_id(self) -> SandboxId;
}

impl IntoId for &str {
    fn into_id(self) -> SandboxId {
        SandboxId::from_string(self)
    }
}

pub(crate) async fn an_unknown_id_is_nobodys(given: &Given) {
    for id in ["sbx-unknown", "", "../../etc"] {
        assert!(given.backend.get_sandbox(&id.into_id()).await.unwrap().is_none(), "{id:?}");
    }
}

pub(crate) async fn an_exit_code_is_the_commands_own(given: &Given) {
    let sandbox = given.create().await;
    for (command, code) in [
        (Command::new("true"), 0),
        (Command::new("false"), 1),
        (sh("exit 3"), 3),
        (sh("exit 137"), 137),
        (sh("exit 255"), 255),
        (sh("false; true"), 0),
    ] {
        let report = run(&*sandbox, &command).await;
        assert_eq!(report.cause, ExecCause::Exited { code }, "{command:?}");
        assert_eq!(report.output.exit_code, code);
        assert!(!report.output.timed_out && !report.output.resource_limited);
        let output = sandbox.exec(&command, &context()).await.unwrap();
        assert_eq!(output.exit_code, code, "exec and exec_report agree");
    }
}

pub(crate) async fn a_signal_is_told_from_an_exit_code(given: &Given) {
    let sandbox = given.create().await;
    let report = run(&*sandbox, &sh("kill -9 $$")).await;
    if given.expect.runs_programs {
        assert_eq!(report.cause, ExecCause::Signalled { signal: 9 });
        assert_eq!(report.output.exit_code, 137);
    } else {
        assert_eq!(report.cause, ExecCause::Exited { code: 127 }, "it knows no kill");
    }
    assert_usable(&*sandbox).await;
}

pub(crate) async fn stdout_and_stderr_are_kept_apart(given: &Given) {
    let sandbox = given.create().await;
    let report = run(&*sandbox, &sh("echo out; echo err >&2; echo more")).await;
    assert_eq!(report.output.stdout, b"out\nmore\n");
    assert_eq!(report.output.stderr, b"err\n");
}

pub(crate) async fn output_that_is_not_wanted_is_not_returned(given: &Given) {
    let sandbox = given.create().await;
    let command = sh("echo out; echo err >&2");
    let deaf = ExecContext { capture_stdout: false, ..context() };
    let output = sandbox.exec(&command, &deaf).await.unwrap();
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b""[..], &b"err\n"[..]));
    let deaf = ExecContext { capture_stderr: false, ..context() };
    let output = sandbox.exec(&command, &deaf).await.unwrap();
    assert_eq!((output.stdout.as_slice(), output.stderr.as_slice()), (&b"out\n"[..], &b""[..]));
}

pub(crate) async fn stdin_reaches_the_command_and_ends(given: &Given) {
    let sandbox = given.create().await;
    // More than a pipe holds, and bytes that are no text.
    let bytes: Vec<u8> = (0..300_000_u32).map(|i| i.to_le_bytes()[0]).collect();
    let report = run(&*sandbox, &Command::new("cat").stdin(bytes.clone())).await;
    assert!(report.output.stdout == bytes, "{} bytes came back", report.output.stdout.len());
    assert_eq!(stdout(&*sandbox, &Command::new("cat")).await, "", "no stdin is an empty one");
    let unread = Command::new("true").stdin(bytes);
    assert_eq!(stdout(&*sandbox, &unread).await, "", "a command need not read it");
}

pub(crate) async fn the_environment_is_the_specs_the_contexts_and_the_commands(given: &Given) {
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let environment = vec![pair("A", "spec"), pair("B", "spec"), pair("C", "spec")];
    let spec = SandboxSpec { environment, ..SandboxSpec::default() };
    let sandbox = given.create_as(&spec).await;
    let extra_env = vec![pair("B", "context"), pair("C", "context")];
    let ctx = ExecContext { extra_env, ..context() };
    let command = sh("echo $A $B $C $D").env("C", "command");
    let output = sandbox.exec(&command, &ctx).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "spec context command");
    let alone = Command { inherit_env: false, ..command };
    let output = sandbox.exec(&alone, &ctx).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "context command");
}

pub(crate) async fn the_environment_of_the_host_does_not_get_in(given: &Given) {
    let host = std::env::vars().filter(|(name, _)| name.starts_with("CARGO")).count();
    assert!(host > 0, "control: the test has what must not get in; run it by cargo");
    let sandbox = given.create().await;
    for inherit_env in [true, false] {
        let command = Command { inherit_env, ..Command::new("env") };
        let shown = stdout(&*sandbox, &command).await;
        assert!(!shown.contains("CARGO"), "{shown}");
    }
}

pub(crate) async fn a_command_runs_where_it_was_told_to(given: &Given) {
    let sandbox = given.create().await;
    let pwd = Command::new("pwd");
    let default = stdout(&*sandbox, &pwd).await;
    match given.expect.workdir {
        Workdir::AsInTheSpec => assert_eq!(default, "/workspace\n"),
        Workdir::Elsewhere => assert_ne!(default, "/workspace\n"),
    }
    let ctx = ExecContext { workdir: Some(PathBuf::from("/tmp")), ..context() };
    let output = sandbox.exec(&pwd, &ctx).await.unwrap();
    assert_eq!(output.stdout, b"/tmp\n", "the context's");
    let output = sandbox.exec(&pwd.clone().workdir("/usr"), &ctx).await.unwrap();
    assert_eq!(output.stdout, b"/usr\n", "the command's wins");
    let told = stdout(&*sandbox, &pwd.clone().workdir("/workspace")).await;
    assert_eq!(told, default, "the spec's own path leads to the same place");

    let missing = sandbox.exec(&pwd.workdir("/no/such/place"), &context()).await;
    if given.expect.runs_programs {
        let fault = ProgramFault::Workdir;
        assert!(matches!(missing, Err(SandboxError::Program { kind, .. }) if kind == fault));
    } else {
        assert_eq!(missing.unwrap().stdout, b"/no/such/place\n", "it has no files to look at");
    }
}

pub(crate) async fn a_missing_program_is_a_typed_error(given: &Given) {
    let sandbox = given.create().await;
    for program in ["no-such-program", "/no/such/program"] {
        let error = sandbox.exec(&Command::new(program), &context()).await.unwrap_err();
        let SandboxError::Program { program: named, kind, .. } = &error else {
            panic!("{error:?}");
        };
        assert_eq!((named.as_str(), *kind), (program, ProgramFault::NotFound));
        assert_eq!(kind.exit_code(), 127);
    }
    assert_usable(&*sandbox).await;
}

pub(crate) async fn a_file_that_is_no_program_is_a_typed_error(given: &Given) {
    let sandbox = given.create().await;
    let error = sandbox.exec(&Command::new("/etc/passwd"), &context()).await.unwrap_err();
    let SandboxError::Program { kind, .. } = error else { panic!("{error:?}") };
    if given.expect.runs_programs {
        assert_eq!((kind, kind.exit_code()), (ProgramFault::NotExecutable, 126));
    } else {
        assert_eq!(kind, ProgramFault::NotFound, "it has no files to look at");
    }
    assert_usable(&*sandbox).await;
}

pub(crate) async fn an_invalid_command_is_refused_and_harms_nothing(given: &Given) {
    let sandbox = given.create().await;
    for (command, code) in [
        (Command::new(""), "invalid_spec"),
        (Command::new("echo").args(["a\0b"]), "invalid_spec"),
        (Command::new("echo").env("A=B", "c"), "invalid_spec"),
        (Command::new("echo").workdir("relative"), "invalid_spec"),
        (Command::new("echo").timeout(Duration::ZERO), "invalid_spec"),
        (Command::new("echo").args(["x".repeat(3 << 20)]), "too_large"),
    ] {
        let error = sandbox.exec(&command, &context()).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
    }
    assert_usable(&*sandbox).await;
}

pub(crate) async fn a_timeout_keeps_the_output_and_the_sandbox(given: &Given) {
    let sandbox = given.create().await;
    let command = sh("echo before; sleep 30; echo after").timeout(Duration::from_millis(300));
    let began = Instant::now();
    let report = run(&*sandbox, &command).await;
    assert!(began.elapsed() < Duration::from_secs(10));
    assert_eq!(report.cause, ExecCause::TimedOut);
    assert!(report.output.timed_out && !report.output.resource_limited);
    assert_eq!((report.output.exit_code, report.output.stdout.as_slice()), (124, &b"before\n"[..]));
    assert!(report.output.duration >= Duration::from_millis(300));
    assert_usable(&*sandbox).await;
}

pub(crate) async fn the_shortest_of_the_timeouts_holds(given: &Given) {
    let (short, long) = (Duration::from_millis(150), Duration::from_secs(60));
    for (own, contexts, wall_ms) in
        [(short, long, 60_000), (long, short, 60_000), (long, long, 150)]
    {
        let limits = ResourceLimits { max_wall_time_ms: Some(wall_ms), ..Default::default() };
        let sandbox = given.create_as(&SandboxSpec { limits, ..SandboxSpec::default() }).await;
        let ctx = ExecContext { timeout: Some(contexts), ..context() };
        let began = Instant::now();
        let command = Command::new("sleep").args(["30"]).timeout(own);
        let output = sandbox.exec(&command, &ctx).await.unwrap();
        assert!(output.timed_out && began.elapsed() < Duration::from_secs(10));
    }
}

pub(crate) async fn a_timeout_ends_the_background_children_too(given: &Given) {
    let sandbox = given.create().await;
    let mark = format!("31337.{}1", std::process::id());
    let script = match given.expect.runs_programs {
        true => format!("sleep {mark} & sleep {mark} & echo started; sleep {mark}"),
        false => format!("echo started; sleep {mark}"),
    };
    let control = async {
        let all_started = soon_running(given, &*sandbox, &mark, |count| count >= 3);
        assert!(!given.expect.runs_programs || all_started.await, "control: they run");
    };
    let command = sh(&script).timeout(Duration::from_secs(2));
    let (report, ()) = tokio::join!(run(&*sandbox, &command), control);
    assert_eq!(report.cause, ExecCause::TimedOut);
    assert_eq!(report.output.stdout, b"started\n");
    assert!(soon_running(given, &*sandbox, &mark, |count| count == 0).await, "some are left");
    assert_usable(&*sandbox).await;
}

pub(crate) async fn an_exec_that_is_dropped_leaves_no_process(given: &Given) {
    let sandbox = given.create().await;
    let mark = format!("31337.{}2", std::process::id());
    let command = Command::new("sleep").args([mark.as_str()]);
    let ctx = context();
    tokio::select! {
        result = sandbox.exec(&command, &ctx) => panic!("it ended: {result:?}"),
        started = soon_running(given, &*sandbox, &mark, |count| count == 1),
            if given.expect.runs_programs =>
        {
            assert!(started, "control: it runs");
        }
        () = tokio::time::sleep(Duration::from_millis(50)), if !given.expect.runs_programs => {}
    }
    assert!(soon_running(given, &*sandbox, &mark, |count| count == 0).await);
    assert_usable(&*sandbox).await;
}

pub(crate) async fn output_beyond_the_limit_ends_the_command(given: &Given) {
    let limits = ResourceLimits { max_output_bytes: Some(1_000), ..Default::default() };
    let sandbox = given.create_as(&SandboxSpec { limits, ..SandboxSpec::default() }).await;
    let report = run(&*sandbox, &Command::new("yes")).await;
    assert_eq!(report.cause, ExecCause::OutputLimit);
    assert!(report.output.resource_limited && !report.output.timed_out);
    assert_eq!(report.output.stdout.len(), 1_000, "what fits is kept");
    let full = "x".repeat(999);
    let report = run(&*sandbox, &Command::new("echo").args([full])).await;
    assert_eq!(report.cause, ExecCause::Exited { code: 0 }, "control: the limit itself fits");
    assert_usable(&*sandbox).await;
}

pub(crate) async fn streamed_output_comes_in_order_and_the_exit_last(given: &Given) {
    let sandbox = given.create().await;
    let (output_tx, mut output_rx) = mpsc::channel(1);
    let script = "echo 1; sleep 0.05; echo 2 >&2; sleep 0.05; echo 3; exit 7";
    let (command, ctx) = (sh(script), context());
    let exec = sandbox.exec_streaming(&command, &ctx, output_tx);
    let receive = async {
        let mut pieces = Vec::new();
        while let Some(piece) = output_rx.recv().await {
            pieces.push(piece);
        }
        pieces
    };
    let (output, pieces) = tokio::join!(exec, receive);
    let piece = |text: &str| text.as_bytes().to_vec();
    let expected = [
        StreamOutput::Stdout(piece("1\n")),
        StreamOutput::Stderr(piece("2\n")),
        StreamOutput::Stdout(piece("3\n")),
        StreamOutput::Exit { code: 7 },
    ];
    assert_eq!(pieces, expected);
    let output = output.unwrap();
    assert_eq!(
        (output.exit_code, output.stdout, output.stderr),
        (7, piece("1\n3\n"), piece("2\n"))
    );
}

pub(crate) async fn a_receiver_that_went_away_does_not_end_the_command(given: &Given) {
    let sandbox = given.create().await;
    let (output_tx, output_rx) = mpsc::channel(1);
    drop(output_rx);
    let script = "echo 1; ".repeat(200) + "sleep 0.05; echo end; exit 7";
    let output = sandbox.exec_streaming(&sh(&script), &context(), output_tx).await.unwrap();
    assert_eq!(output.exit_code, 7);
    assert!(output.stdout.ends_with(b"1\nend\n") && output.stdout.len() == 404);
}

pub(crate) async fn execs_run_at_the_same_time(given: &Given) {
    let sandbox = given.create().await;
    let began = Instant::now();
    let each = async |n: u32| stdout(&*sandbox, &sh(&format!("sleep 1; echo {n}"))).await;
    let shown = tokio::join!(each(1), each(2), each(3), each(4));
    assert_eq!(shown, ("1\n".into(), "2\n".into(), "3\n".into(), "4\n".into()));
    assert!(began.elapsed() < Duration::from_millis(3_500), "{:?}", began.elapsed());
}

pub(crate) async fn a_suspended_sandbox_makes_no_progress_until_it_is_resumed(given: &Given) {
    let sandbox = given.create().await;
    let (output_tx, mut output_rx) = mpsc::channel(1_000);
    let script = "echo tick; sleep 0.02; ".repeat(40) + "exit 5";
    let (command, ctx) = (sh(&script), context());
    let exec = sandbox.exec_streaming(&command, &ctx, output_tx);
    let control = async {
        for _ in 0..3 {
            output_rx.recv().await.expect("it ticks");
        }
        sandbox.suspend().await.unwrap();
        assert!(sandbox.is_alive().await, "suspended is alive");
        let refused = sandbox.exec(&Command::new("true"), &context()).await.unwrap_err();
        assert_eq!(refused.code(), "suspended");
        tokio::time::sleep(Duration::from_millis(100)).await;
        while output_rx.try_recv().is_ok() {} // what was under way
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(output_rx.try_recv().is_err(), "it ticks while suspended");
        sandbox.resume().await.unwrap();
        assert_eq!(output_rx.recv().await, Some(StreamOutput::Stdout(b"tick\n".to_vec())));
        while output_rx.recv().await.is_some() {}
    };
    let (output, ()) = tokio::join!(exec, control);
    let output = output.unwrap();
    assert_eq!(output.exit_code, 5);
    assert_eq!(output.stdout, b"tick\n".repeat(40), "nothing was lost");
    assert_usable(&*sandbox).await;
}

pub(crate) async fn time_stands_still_for_a_suspended_command(given: &Given) {
    let sandbox = given.create().await;
    let command = sh("sleep 0.2; echo done").timeout(Duration::from_millis(700));
    let control = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        sandbox.suspend().await.unwrap();
        tokio::time::sleep(Duration::from_millis(1_000)).await;
        sandbox.resume().await.unwrap();
    };
    let (report, ()) = tokio::join!(run(&*sandbox, &command), control);
    assert_eq!(report.cause, ExecCause::Exited { code: 0 });
    assert_eq!(report.output.stdout, b"done\n");
}

pub(crate) async fn suspending_and_resuming_twice_is_no_error(given: &Given) {
    let sandbox = given.create().await;
    sandbox.resume().await.expect("it runs already");
    sandbox.suspend().await.unwrap();
    sandbox.suspend().await.expect("it is suspended already");
    sandbox.resume().await.unwrap();
    sandbox.resume().await.expect("it runs again already");
    assert_usable(&*sandbox).await;
}

pub(crate) async fn a_sandbox_is_alive_until_it_is_destroyed(given: &Given) {
    let sandbox = given.create().await;
    let other = given.backend.get_sandbox(sandbox.id()).await.unwrap().unwrap();
    assert!(sandbox.is_alive().await && other.is_alive().await);
    sandbox.suspend().await.unwrap();
    assert!(sandbox.is_alive().await);
    sandbox.destroy().await.expect("a suspended one can be destroyed");
    assert!(!sandbox.is_alive().await && !other.is_alive().await);
    assert!(given.backend.get_sandbox(sandbox.id()).await.unwrap().is_none());
    assert_eq!(given.backend.list_sandboxes().await.unwrap(), []);
}

pub(crate) async fn destroying_twice_is_no_error(given: &Given) {
    let sandbox = given.create().await;
    let other = given.backend.get_sandbox(sandbox.id()).await.unwrap().unwrap();
    let (first, second) = tokio::join!(sandbox.destroy(), other.destroy());
    first.and(second).expect("at the same time");
    sandbox.destroy().await.expect("and after");
    assert_eq!((given.left)(), Vec::<String>::new());
}

pub(crate) async fn a_destroyed_sandbox_refuses_everything_else(given: &Given) {
    let sandbox = given.create().await;
    sandbox.destroy().await.unwrap();
    let (command, ctx) = (Command::new("true"), context());
    let (output_tx, _output_rx) = mpsc::channel(1);
    let refusals = [
        sandbox.exec(&command, &ctx).await.map(drop),
        sandbox.exec_report(&command, &ctx).await.map(drop),
        sandbox.exec_streaming(&command, &ctx, output_tx).await.map(drop),
        sandbox.suspend().await,
        sandbox.resume().await,
        sandbox.snapshot("s").await.map(drop),
        sandbox.restore("s").await,
        sandbox.resource_usage().await.map(drop),
    ];
    for (i, refusal) in refusals.into_iter().enumerate() {
        let error = refusal.expect_err(&format!("call {i}"));
        let SandboxError::Ended { id } = &error else { panic!("call {i}: {error}") };
        assert_eq!(id, sandbox.id());
    }
    assert_eq!(sandbox.capabilities().sandbox_id, sandbox.id().as_str(), "it still has a name");
}

pub(crate) async fn destroying_ends_the_commands_that_run(given: &Given) {
    let sandbox = given.create().await;
    let command = sh("echo started; sleep 30");
    let ctx = context();
    let destroy = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        sandbox.destroy().await.unwrap();
    };
    let began = Instant::now();
    let (result, ()) = tokio::join!(sandbox.exec_report(&command, &ctx), destroy);
    assert!(began.elapsed() < Duration::from_secs(10));
    match result {
        Ok(report) => {
            assert!(matches!(report.cause, ExecCause::KilledByPolicy { .. }), "{report:?}");
            assert_eq!(report.output.stdout, b"started\n");
        }
        Err(error) => assert_eq!(error.code(), "ended", "{error}"),
    }
}

pub(crate) async fn usage_is_reported_for_the_sandbox_and_each_exec(given: &Given) {
    let sandbox = given.create().await;
    let report = run(&*sandbox, &Command::new("sleep").args(["0.1"])).await;
    let usage = report.output.resource_usage.expect("an exec reports what it used");
    assert!((100..10_000).contains(&usage.wall_time_ms), "{usage:?}");
    let total = sandbox.resource_usage().await.unwrap();
    assert!(total.wall_time_ms >= 100, "{total:?}");
    if given.expect.runs_programs {
        let busy = sh("i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done");
        let usage = run(&*sandbox, &busy).await.output.resource_usage.unwrap();
        assert!(usage.cpu_time_ms > 0, "{usage:?}");
        assert!(sandbox.resource_usage().await.unwrap().cpu_time_ms >= usage.cpu_time_ms);
    }
}

pub(crate) async fn an_invalid_spec_is_refused_before_anything_is_created(given: &Given) {
    let rows: [fn(&mut SandboxSpec); 7] = [
        |spec| spec.profile = "../x".into(),
        |spec| spec.workdir = "relative".into(),
        |spec| spec.allowed_paths_ro = vec!["/a/../b".into()],
        |spec| spec.allowed_paths_rw = vec!["/proc".into()],
        |spec| spec.environment = vec![("A=B".into(), "c".into())],
        |spec| spec.limits.max_memory_bytes = Some(0),
        |spec| spec.creation_timeout = Duration::ZERO,
    ];
    for (i, change) in rows.into_iter().enumerate() {
        let mut spec = SandboxSpec::default();
        change(&mut spec);
        let error = given.backend.create_sandbox(&spec).await.unwrap_err();
        assert_eq!(error.code(), "invalid_spec", "row {i}: {error}");
        assert!(error.hint().is_some(), "row {i}");
        assert_eq!(given.backend.list_sandboxes().await.unwrap(), [], "row {i}");
        assert_eq!((given.left)(), Vec::<String>::new(), "row {i}");
    }
}

pub(crate) async fn a_demanded_limit_is_enforced_or_refused_by_name(given: &Given) {
    let spec = SandboxSpec::default();
    for limit in Limit::ALL {
        let quota = (limit == Limit::CpuQuota).then_some(500);
        let options = CreateOptions {
            demanded: [limit].into(),
            cpu_quota_millis: quota,
            ..CreateOptions::default()
        };
        let created = given.backend.create_sandbox_with(&spec, &options).await;
        if !given.expect.unenforceable.contains(&limit) {
            let enforced = created.unwrap().enforcement().limits;
            let value = quota.map(u64::from).or(spec.limits.get(limit));
            let found = enforced.iter().find(|it| it.limit == limit);
            assert_eq!(found.map(|it| it.value), value, "{limit}");
            continue;
        }
        let error = created.unwrap_err();
        assert!(
            matches!(error, SandboxError::LimitNotEnforceable { limit: named, .. } if named == limit),
            "{limit}: {error}"
        );
        assert!(error.hint().is_some_and(|hint| hint.contains(limit.name())));
        let accepting = CreateOptions { accept_missing: [limit].into(), ..options };
        let sandbox = given.backend.create_sandbox_with(&spec, &accepting).await.unwrap();
        let claimed =
            |it: &warren::EnforcedLimit| it.limit == limit && it.bound == warren::Bound::Exact;
        assert!(!sandbox.enforcement().limits.iter().any(claimed), "{limit}");
    }
}

pub(crate) async fn destroy_all_empties_the_list(given: &Given) {
    let sandboxes = [given.create().await, given.create().await, given.create().await];
    sandboxes[0].suspend().await.unwrap();
    sandboxes[1].destroy().await.unwrap();
    given.backend.destroy_all().await.unwrap();
    assert_eq!(given.backend.list_sandboxes().await.unwrap(), []);
    for sandbox in &sandboxes {
        assert!(!sandbox.is_alive().await);
    }
    given.backend.destroy_all().await.expect("with none left");
    given.create().await;
}

pub(crate) async fn snapshots_work_or_are_a_typed_error(given: &Given) {
    let sandbox = given.create().await;
    if given.expect.snapshots {
        let look = sh("cat /workspace/kept /workspace/later 2>&1");
        if given.expect.runs_programs {
            stdout(&*sandbox, &sh("echo one > /workspace/kept")).await;
        }
        let saved = sandbox.snapshot("first").await.unwrap();
        assert_eq!(sandbox.snapshot("first").await.unwrap_err().code(), "already_exists");
        assert_ne!(saved, sandbox.snapshot("").await.unwrap(), "each has its own id");
        if given.expect.runs_programs {
            stdout(&*sandbox, &sh("echo two > /workspace/kept; echo > /workspace/later")).await;
            assert_eq!(stdout(&*sandbox, &look).await, "two\n\n", "control");
        }
        sandbox.restore(&saved).await.unwrap();
        if given.expect.runs_programs {
            let seen = run(&*sandbox, &look).await.output;
            let seen = String::from_utf8(seen.stdout).unwrap();
            assert!(seen.starts_with("one\n") && seen.contains("No such file"), "{seen}");
        }
        assert_eq!(sandbox.restore("no-such").await.unwrap_err().code(), "not_found");
    } else {
        let unsupported = [sandbox.snapshot("s").await.map(drop), sandbox.restore("s").await];
        for error in unsupported.map(Result::unwrap_err) {
            let SandboxError::Unsupported { backend, .. } = &error else { panic!("{error}") };
            assert_eq!(backend, given.backend.name());
        }
    }
    assert_usable(&*sandbox).await;
}

pub(crate) async fn a_fork_has_what_was_captured_or_there_is_none(given: &Given) {
    // The fake's shell has one file, which is no part of what it captures without layers.
    if !given.expect.snapshots || !given.expect.runs_programs {
        let refused = given.create().await.capture().await.unwrap_err();
        assert!(matches!(refused, SandboxError::Unsupported { .. }), "{refused}");
        return;
    }
    let origin = given.create().await;
    stdout(&*origin, &sh("echo one > /workspace/kept; mkdir /tmp/d; ln -s x /tmp/d/link")).await;
    let captured = origin.capture().await.unwrap();
    stdout(&*origin, &sh("echo two > /workspace/kept")).await;
    let options = CreateOptions { base: captured.base.clone(), ..CreateOptions::default() };
    let spec = SandboxSpec::default();
    let fork = given.backend.create_sandbox_with(&spec, &options).await.unwrap();
    let look = sh("cat /workspace/kept; readlink /tmp/d/link; id -u");
    assert_eq!(stdout(&*fork, &look).await, "one\nx\n1000\n");
    stdout(&*fork, &sh("echo three > /workspace/kept")).await;
    let own = sh("cat /workspace/kept");
    assert_eq!(stdout(&*origin, &own).await, "two\n", "each has its own from then on");
}

/// Reads a log from `offset` on, until it has ended.
async fn rest_of(exec: &dyn ExecHandle, mut offset: u64) -> String {
    let mut text = Vec::new();
    loop {
        let read = exec.read(offset, 5, LogWait::More).await.unwrap();
        text.extend(read.pieces.into_iter().flat_map(|piece| piece.bytes));
        if read.ended {
            return String::from_utf8(text).unwrap();
        }
        offset = read.next;
    }
}

/// Starts a command with a log, or expects to be told that there is no such thing.
async fn start(
    given: &Given,
    sandbox: &dyn Sandbox,
    script: &str,
    options: &ExecOptions,
) -> Option<FoundExec> {
    let started = sandbox.start_exec(&sh(script), &context(), options).await;
    if given.expect.logs_and_files {
        return Some(started.unwrap());
    }
    let refused = started.unwrap_err();
    assert!(matches!(refused, SandboxError::Unsupported { .. }), "{refused}");
    None
}

pub(crate) async fn a_log_is_anybodys_from_any_offset_or_a_typed_error(given: &Given) {
    let sandbox = given.create().await;
    let script = "echo first; sleep 0.3; echo second; exit 7";
    let Some(exec) = start(given, &*sandbox, script, &ExecOptions::default()).await else {
        assert_usable(&*sandbox).await;
        return;
    };
    let (all, tail) = tokio::join!(rest_of(&*exec, 0), rest_of(&*exec, 6));
    assert_eq!((all.as_str(), tail.as_str()), ("first\nsecond\n", "second\n"));
    let end = exec.wait().await.unwrap();
    assert_eq!(end.cause, ExecCause::Exited { code: 7 });
    let found = sandbox.find_exec(exec.id()).await.unwrap().expect("it is remembered");
    assert_eq!(rest_of(&*found, 3).await, "st\nsecond\n", "also once it has ended");
    assert_usable(&*sandbox).await;
}

pub(crate) async fn a_name_is_one_run_or_a_typed_error(given: &Given) {
    let sandbox = given.create().await;
    let named =
        |name: &str| ExecOptions { id: Some(ExecId(name.to_owned())), ..Default::default() };
    let Some(first) = start(given, &*sandbox, "echo $$", &named("build")).await else { return };
    let again = start(given, &*sandbox, "echo $$", &named("build")).await.unwrap();
    assert_eq!(rest_of(&*first, 0).await, rest_of(&*again, 0).await, "one process");
    let other = sandbox.start_exec(&sh("true"), &context(), &named("build")).await.unwrap_err();
    assert_eq!(other.code(), "already_exists");
    let control = start(given, &*sandbox, "echo $$", &named("other")).await.unwrap();
    assert_ne!(rest_of(&*first, 0).await, rest_of(&*control, 0).await, "control");
}

pub(crate) async fn files_go_in_and_come_out_or_are_not_offered(given: &Given) {
    let sandbox = given.create().await;
    let Some(files) = sandbox.files() else {
        assert!(!given.expect.logs_and_files, "it has no files");
        return;
    };
    assert!(given.expect.logs_and_files);
    let home = stdout(&*sandbox, &sh("pwd")).await;
    let path = PathBuf::from(home.trim_end()).join("d/note");
    let piece: FileSource = Box::pin(stream::iter(vec![Ok(b"said\n".to_vec())]));
    let options = WriteOptions { parents: true, ..WriteOptions::default() };
    files.write(&path, options, piece).await.unwrap();
    assert_eq!(stdout(&*sandbox, &sh("cat d/note; echo back > d/note")).await, "said\n");
    let read: Vec<_> = files.read(&path, 0, None).await.unwrap().data.collect().await;
    let read = read.into_iter().collect::<Result<Vec<_>, _>>().unwrap().concat();
    assert_eq!(read, b"back\n");
    let outside = files.read("/etc/shadow".as_ref(), 0, None).await.map(drop).unwrap_err();
    assert!(matches!(outside, SandboxError::File { .. }), "{outside}");
    assert_usable(&*sandbox).await;
}

pub(crate) async fn capabilities_and_health_name_what_there_is(given: &Given) {
    let probed = given.backend.probe().await.unwrap();
    assert_eq!(probed.name, given.backend.name());
    assert_eq!(probed.snapshots, given.expect.snapshots);
    assert!(probed.available_profiles.iter().any(|profile| profile == "default"));
    let before = given.backend.health_check().await.unwrap();
    assert!(before.healthy && before.active_sandboxes == 0);

    let sandbox = given.create().await;
    let capabilities = sandbox.capabilities();
    assert_eq!(capabilities.sandbox_id, sandbox.id().as_str());
    assert_eq!(capabilities.backend, given.backend.name());
    assert_eq!(capabilities.profile, "default");
    assert_eq!(capabilities.has_network, !probed.network_isolation, "a wall that is not there");
    let after = given.backend.health_check().await.unwrap();
    assert_eq!(after.active_sandboxes, 1);
    assert_eq!(after.last_sandbox_created, Some(capabilities.created_at));
}
