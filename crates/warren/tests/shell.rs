//! Stateful shell sessions on the linux backend.
//!
//! The cases of `linux` run as root and, by the last test, as a plain user without control groups.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

#[path = "shared/plain_user.rs"]
mod plain_user;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use warren::backend::LinuxBackend;
use warren::shell::{Shell, ShellCommand, ShellOptions, ShellOutput, ShellState, Shells};
use warren::{
    Command, CreateOptions, ExecCause, ExecContext, ExecId, ExecOptions, IsolationBackend,
    LogStream, LogWait, ResourceLimits, Sandbox, SandboxId, SandboxSpec,
};

/// A sandbox that outlives its backend, and is gone with this.
struct Place {
    directory: tempfile::TempDir,
    id: SandboxId,
    spec: SandboxSpec,
}

impl Place {
    fn new(limits: ResourceLimits) -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { directory, id: SandboxId::new(), spec: SandboxSpec { limits, ..Default::default() } }
    }

    fn backend(&self) -> LinuxBackend {
        LinuxBackend::with_runtime(self.directory.path()).unwrap()
    }

    async fn make(&self) -> Arc<dyn Sandbox> {
        let all = "memory processes output write cpu-time wall-time".split(' ');
        let options = CreateOptions {
            id: Some(self.id.clone()),
            persistent: true,
            accept_missing: all.filter_map(|limit| limit.parse().ok()).collect(),
            ..CreateOptions::default()
        };
        self.backend().create_sandbox_with(&self.spec, &options).await.unwrap().into()
    }

    async fn adopt(&self, anchor: &str) -> Arc<dyn Sandbox> {
        let adopted = self.backend().adopt(&self.id, &self.spec, anchor).await;
        adopted.unwrap().unwrap().into()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (backend, id) = (self.backend(), self.id.clone());
        let reclaim = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(backend.reclaim(&id))
        };
        std::thread::spawn(reclaim).join().unwrap().unwrap();
    }
}

fn options(name: &str) -> ShellOptions {
    let grace = Duration::from_millis(400);
    ShellOptions { name: name.to_owned(), grace, ..ShellOptions::default() }
}

async fn open(sandbox: &Arc<dyn Sandbox>, name: &str) -> Arc<Shell> {
    Arc::new(Shell::open(Arc::clone(sandbox), &options(name)).await.unwrap())
}

async fn run(shell: &Shell, command: &str) -> ShellOutput {
    let ran = shell.run(&ShellCommand::new(command)).await;
    ran.unwrap_or_else(|error| panic!("{error} at {:.200}", command))
}

/// Runs a command and returns its exit code and what it wrote.
async fn said(shell: &Shell, command: &str) -> (i32, String, String) {
    let output = run(shell, command).await;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.exit_code, text(output.stdout), text(output.stderr))
}

/// Waits until `path` is there.
async fn until_there(sandbox: &dyn Sandbox, path: &str) {
    let test = Command::new("test").args(["-e", path]);
    for _ in 0..500 {
        if sandbox.exec(&test, &ExecContext::default()).await.unwrap().exit_code == 0 {
            return;
        }
    }
    panic!("{path} did not appear");
}

mod linux {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_shell_keeps_its_directory_variables_functions_traps_and_options() {
        let place = Place::new(ResourceLimits::default());
        let sandbox = place.make().await;
        let shell = open(&sandbox, "a").await;
        assert!(shell.is_new());
        let set = "mkdir -p '/workspace/a b'; cd '/workspace/a b'; x=5; export Y='it''s'; \
                   f() { echo \"f $x $1\"; }; trap 'echo bye' EXIT; set -o pipefail; \
                   alias hi='echo hello'; set -- one two; (exit 3)";
        assert_eq!(said(&shell, set).await, (3, String::new(), String::new()));
        for (command, code, stdout) in [
            ("echo $?", 0, "3\n"),
            ("pwd", 0, "/workspace/a b\n"),
            ("f 1; sh -c 'echo $Y'", 0, "f 5 1\nits\n"),
            ("false | true", 1, ""),
            ("hi there; echo $1 $#", 0, "hello there\none 2\n"),
            ("cat; read z || echo none", 0, "none\n"),
            ("echo \"$(printf '%s' \"a'b\")\" 'ü€😀' \"x\ny\"", 0, "a'b ü€😀 x\ny\n"),
            ("cat <<'E'\n$x \"q\" 'z' \\\nE\n", 0, "$x \"q\" 'z' \\\n"),
            ("# nothing", 0, ""),
            ("case x in x) echo yes;; esac; [[ -n $BASH_VERSION ]] && echo bash", 0, "yes\nbash\n"),
            ("exit 9", 9, "bye\n"),
        ] {
            let (got, out, err) = said(&shell, command).await;
            // An interactive shell says so when it exits.
            let err = err.replace("exit\n", "");
            assert_eq!((got, out.as_str(), err.as_str()), (code, stdout, ""), "{command}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_bad_command_costs_the_shell_its_state() {
        let place = Place::new(ResourceLimits::default());
        let sandbox = place.make().await;
        let shell = open(&sandbox, "b").await;
        run(&shell, "cd /tmp; kept=yes; keep() { echo \"$kept in $PWD\"; }").await;
        for (command, code, part) in [
            ("echo 'open", 2, "unexpected EOF"),
            ("echo \"open", 2, "unexpected EOF"),
            ("echo $(", 1, "unexpected EOF"),
            ("echo `", 2, "unexpected EOF"),
            ("if true; then", 2, "syntax error"),
            ("(", 2, "syntax error"),
            ("}", 2, "syntax error"),
            (") ; echo no", 2, "syntax error"),
            ("' ; echo no >&3; '", 127, "not found"),
            ("set -e; false; true; set +e", 0, ""),
            ("set -eu; false", 1, ""),
            ("echo $unset; echo no", 1, "unbound variable"),
            ("set +eu; : ${unset:?is unset}; echo no", 1, "is unset"),
            ("readonly r=1; r=2; echo no", 1, "readonly"),
            ("exec /nowhere/x; true", 0, "No such file"),
            ("return 5", 2, "can only `return'"),
            ("mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone; ls; pwd; cd /tmp", 0, ""),
            ("exec 3>&- 0<&- 4>/dev/null; exec 4>&-", 0, ""),
            ("echo x >&3", 1, "Bad file descriptor"),
            ("sh -c 'kill -9 $$'", 137, ""),
            ("kill -TERM $$", 0, ""),
            ("\\echo \"`echo $(echo '\\\\' \"!! \\\"\")`\" !x; set -H", 0, ""),
            ("PS1='> ' PROMPT_COMMAND='echo prompt'", 0, ""),
            ("set -x; set +x", 0, "+ set +x"),
            ("trap 'echo debug' DEBUG; trap - DEBUG", 0, ""),
            ("nosuchprogram", 127, "not found"),
        ] {
            let (got, _, err) = said(&shell, command).await;
            assert!(got == code && err.contains(part), "{command}: {got} {err:?}");
            let after = said(&shell, "keep").await;
            assert_eq!(after, (0, "yes in /tmp\n".to_owned(), String::new()), "after {command}");
        }
        for (command, code) in [
            (ShellCommand::new("echo a\0b"), "invalid_spec"),
            (ShellCommand::new("#".repeat((1 << 20) + 1)), "too_large"),
            (ShellCommand::new("true").timeout(Duration::ZERO), "invalid_spec"),
        ] {
            assert_eq!(shell.run(&command).await.unwrap_err().code(), code);
        }
        let long = format!("x='{}'; echo ${{#x}}", "ü\n'\\''".repeat(100_000));
        assert_eq!(said(&shell, &long).await.1, "300000\n");
        for name in ["", "a/b", "a b", "ä", &"x".repeat(59)] {
            let error = Shell::open(Arc::clone(&sandbox), &options(name)).await.unwrap_err();
            assert_eq!(error.code(), "invalid_spec", "{name:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_stuck_command_is_interrupted_and_the_shell_keeps_its_state() {
        let place = Place::new(ResourceLimits::default());
        let sandbox = place.make().await;
        let shell = open(&sandbox, "c").await;
        assert!(!shell.interrupt().await.unwrap(), "nothing runs");
        run(&shell, "cd /tmp; x=1; spin() { while :; do :; done; }").await;
        for stuck in [
            "while :; do :; done; echo no",
            "nested() { for i in 1 2; do spin; echo no; done; }; nested; echo no",
            "sleep 60; echo no",
            "while :; do sleep 60; echo no; done",
            "sleep 60 | cat; echo no",
            "echo $(sleep 60); echo no",
            "(while :; do :; done); echo no",
            "wait_for() { sleep 60 & wait; }; wait_for; echo no",
            "sh -c 'trap \"\" INT; sleep 60'",
            "setsid sh -c 'sleep 60'",
            "kill -STOP $$; echo no",
            "while :; do python3 -c 'import signal, time; signal.signal(2, lambda *a: exit(0)); \
             time.sleep(60)'; done",
        ] {
            let command = ShellCommand::new(format!("x=2; touch /tmp/on; {stuck}"));
            let (output, interrupted) = tokio::join!(shell.run(&command), async {
                until_there(&*sandbox, "/tmp/on").await;
                tokio::time::sleep(Duration::from_millis(100)).await;
                shell.interrupt().await.unwrap()
            });
            let output = output.unwrap();
            assert!(interrupted, "{stuck}");
            assert_eq!(output.cause, ExecCause::Signalled { signal: 2 }, "{stuck}");
            assert_eq!((output.exit_code, output.shell), (130, ShellState::Alive), "{stuck}");
            assert_eq!(output.stdout, b"", "{stuck}");
            let after = said(&shell, "rm /tmp/on; echo $x $PWD; type -t spin; x=1").await;
            assert_eq!(after.1, "2 /tmp\nfunction\n", "{stuck}");
        }
        // Its time being up is the same, and it says so.
        for stuck in ["while :; do :; done", "sleep 60"] {
            let began = Instant::now();
            let timeout = Duration::from_millis(300);
            let output = shell.run(&ShellCommand::new(stuck).timeout(timeout)).await.unwrap();
            assert_eq!((output.cause, output.exit_code), (ExecCause::TimedOut, 124), "{stuck}");
            assert!(output.usage.wall_time >= timeout && began.elapsed() < timeout * 20);
            assert_eq!(said(&shell, "echo $x").await.1, "1\n");
        }
        // One that has the shell itself ignore SIGINT loses it.
        let deaf = ShellCommand::new("trap '' INT; spin").timeout(Duration::from_millis(200));
        let output = shell.run(&deaf).await.unwrap();
        assert_eq!((output.cause, output.shell), (ExecCause::TimedOut, ShellState::Ended));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_command_that_ends_the_shell_says_so_and_the_next_gets_a_new_one() {
        let place = Place::new(ResourceLimits::default());
        let sandbox = place.make().await;
        let shells = Shells::default();
        for (command, cause) in [
            ("x=1; exit 7", ExecCause::Exited { code: 7 }),
            ("x=1; kill -9 $$", ExecCause::Signalled { signal: 9 }),
            ("x=1; exec sh -c 'exit 3'", ExecCause::Exited { code: 3 }),
            ("x=1; f() { eval 'exit 4'; }; f", ExecCause::Exited { code: 4 }),
        ] {
            let (shell, is_new) = shells.open(Arc::clone(&sandbox), &options("d")).await.unwrap();
            assert!(is_new, "{command}");
            assert_eq!(said(&shell, "echo \"<$x>\"").await.1, "<>\n");
            let (same, is_new) = shells.open(Arc::clone(&sandbox), &options("d")).await.unwrap();
            assert!(!is_new && Arc::ptr_eq(&same, &shell));
            let output = run(&shell, command).await;
            assert_eq!((&output.cause, output.shell), (&cause, ShellState::Ended), "{command}");
            assert_eq!(output.exit_code, cause.exit_code(), "{command}");
            let error = shell.run(&ShellCommand::new("true")).await.unwrap_err();
            assert_eq!(error.code(), "conflict", "{error}");
            assert!(error.to_string().contains("it has ended"), "{error}");
        }
        // However many find that it has ended, there is one new shell, and it can be found again.
        let (old, _) = shells.open(Arc::clone(&sandbox), &options("d")).await.unwrap();
        run(&old, "exit").await;
        let (one, two) = (options("d"), options("d"));
        let (one, two) = tokio::join!(
            shells.open(Arc::clone(&sandbox), &one),
            shells.open(Arc::clone(&sandbox), &two),
        );
        let (one, two) = (one.unwrap().0, two.unwrap().0);
        old.close().await.unwrap();
        assert!(Arc::ptr_eq(&one, &two));
        assert!(sandbox.find_exec(one.exec().id()).await.unwrap().is_some());
        run(&one, "exit").await;
        // One that closes what it is told things by is gone, and that is noticed.
        let (shell, _) = shells.open(Arc::clone(&sandbox), &options("d")).await.unwrap();
        let output = run(&shell, "for fd in 3 10 11 12 255; do eval \"exec $fd>&-\"; done").await;
        assert_eq!(output.shell, ShellState::Ended, "{output:?}");
        let error = shells.open(Arc::clone(&sandbox), &options("e/f")).await.unwrap_err();
        assert_eq!(error.code(), "invalid_spec");
        // A plain exec that has the name of a shell is none.
        let id = Some(ExecId("shell-plain".to_owned()));
        let named = ExecOptions { id, ..ExecOptions::default() };
        let sleep = Command::new("sleep").args(["60"]);
        let plain = sandbox.start_exec(&sleep, &ExecContext::default(), &named).await.unwrap();
        let error = shells.open(Arc::clone(&sandbox), &options("plain")).await.unwrap_err();
        assert_eq!(error.code(), "already_exists");
        plain.kill().await.unwrap();
        let listed = Shell::list(&*sandbox).await.unwrap();
        assert_eq!(listed.iter().map(|shell| shell.name.as_str()).collect::<Vec<_>>(), ["d"]);
        shells.find(&sandbox, "d").await.unwrap().unwrap().close().await.unwrap();
        assert!(Shell::list(&*sandbox).await.unwrap().is_empty());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_shell_outlives_its_backend_with_its_state_and_the_command_it_runs() {
        let place = Place::new(ResourceLimits::default());
        let sandbox = place.make().await;
        let anchor = sandbox.anchor().unwrap();
        let shell = open(&sandbox, "e").await;
        let first = run(&shell, "cd /tmp; x=before; f() { echo \"$x $PWD\"; }").await;
        let pid = shell.info().pid;
        drop((shell, sandbox));

        let sandbox = place.adopt(&anchor).await;
        let shell = open(&sandbox, "e").await;
        assert_eq!((shell.is_new(), shell.info().pid), (false, pid));
        let second = run(&shell, "f; x=after").await;
        assert_eq!((second.exit_code, second.stdout.as_slice()), (0, &b"before /tmp\n"[..]));
        assert!(second.begin > first.end && second.end > second.begin);
        // Whoever waits for a command goes, and then the backend: the command does not.
        let slow = ShellCommand::new("touch /tmp/on; sleep 1.5; echo slow; x=slept; (exit 3)");
        let left = tokio::time::timeout(Duration::from_millis(400), shell.run(&slow)).await;
        assert!(left.is_err(), "control: it still runs");
        let error = shell.run(&ShellCommand::new("true")).await.unwrap_err();
        assert_eq!(error.code(), "conflict", "{error}");
        drop((shell, sandbox));

        let sandbox = place.adopt(&anchor).await;
        let shell = open(&sandbox, "e").await;
        let error = shell.run(&ShellCommand::new("true")).await.unwrap_err();
        assert_eq!(error.code(), "conflict", "{error}");
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert_eq!(said(&shell, "echo $? $x; f").await.1, "3 slept\nslept /tmp\n");
        // One that never ends is interrupted by whoever comes after.
        let stuck = ShellCommand::new("x=stuck; while :; do :; done");
        let left = tokio::time::timeout(Duration::from_millis(400), shell.run(&stuck)).await;
        assert!(left.is_err(), "control: it still runs");
        drop((shell, sandbox));
        let sandbox = place.adopt(&anchor).await;
        let shell = open(&sandbox, "e").await;
        assert!(shell.interrupt().await.unwrap());
        assert_eq!(said(&shell, "echo $? $x").await.1, "130 stuck\n");
        // Half a command of one who was cut short is given up.
        shell.exec().write_input(None, b"\necho 'half of it", false).await.unwrap();
        drop((shell, sandbox));
        let sandbox = place.adopt(&anchor).await;
        let shell = open(&sandbox, "e").await;
        assert_eq!(said(&shell, "echo $x").await.1, "stuck\n");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn output_arrives_whole_as_it_comes_and_is_bounded() {
        let limits = ResourceLimits { max_output_bytes: Some(60 << 20), ..Default::default() };
        let place = Place::new(limits);
        let sandbox = place.make().await;
        let shell = open(&sandbox, "f").await;
        let output = run(&shell, "head -c 50000000 /dev/zero | tr '\\0' 'a'; echo end >&2").await;
        assert_eq!((output.exit_code, output.truncated), (0, false));
        assert_eq!(output.stdout.len(), 50_000_000);
        assert!(output.stdout.iter().all(|byte| *byte == b'a') && output.stderr == b"end\n");
        assert_eq!(output.usage.output_bytes, 50_000_004);
        let binary = "x=$(seq 0 255); for i in $x; do printf \"\\\\x$(printf %x $i)\"; done";
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(run(&shell, binary).await.stdout, all);

        // More than it may: it is stopped, what it wrote first is kept, and the shell goes on.
        let much = ShellCommand { max_output_bytes: Some(1000), ..ShellCommand::new("x=7; yes") };
        let output = shell.run(&much).await.unwrap();
        assert_eq!((output.cause, output.exit_code), (ExecCause::OutputLimit, 137));
        assert!(output.truncated && output.stdout == b"y\n".repeat(500));
        assert_eq!(said(&shell, "echo $x").await.1, "7\n");
        // More than the log holds, which forgets what is oldest.
        let output = run(&shell, "yes | head -c 300000000; echo over").await;
        assert_eq!(output.cause, ExecCause::OutputLimit);
        assert_eq!(said(&shell, "echo $x").await.1, "7\n");

        let (tx, mut rx) = mpsc::channel(1);
        let command = ShellCommand::new("echo one; sleep 0.5; echo two >&2; sleep 0.5; echo three");
        let began = Instant::now();
        let (output, pieces) = tokio::join!(shell.run_streaming(&command, tx), async {
            let mut pieces = Vec::new();
            while let Some(piece) = rx.recv().await {
                pieces.push((piece.stream, piece.bytes, began.elapsed()));
            }
            pieces
        });
        let output = output.unwrap();
        let got: Vec<_> = pieces.iter().map(|(stream, text, _)| (*stream, &text[..])).collect();
        let (out, err) = (LogStream::Stdout, LogStream::Stderr);
        assert_eq!(got, [(out, &b"one\n"[..]), (err, b"two\n"), (out, b"three\n")]);
        assert!(pieces[0].2 + Duration::from_millis(600) < pieces[2].2, "as it comes");
        assert_eq!((&output.stdout[..], &output.stderr[..]), (&b"one\nthree\n"[..], &b"two\n"[..]));
        // The offsets are those of the log.
        let length = usize::try_from(output.end - output.begin).unwrap();
        let read = shell.exec().read(output.begin, length, LogWait::Never).await.unwrap();
        let stdout = read.pieces.into_iter().filter(|piece| piece.stream == LogStream::Stdout);
        let stdout: Vec<u8> = stdout.flat_map(|piece| piece.bytes).collect();
        assert_eq!(stdout, output.stdout);
        // One who never receives does not keep the command beyond its time.
        let (tx, _rx) = mpsc::channel(1);
        let command = ShellCommand::new("for i in 1 2 3 4 5; do echo $i; sleep 0.1; done; sleep 9");
        let output = shell.run_streaming(&command.timeout(Duration::from_secs(1)), tx).await;
        assert_eq!(output.unwrap().cause, ExecCause::TimedOut);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn each_command_is_held_to_the_limits_of_an_exec_and_the_shell_is_not() {
        let limits = ResourceLimits { max_wall_time_ms: Some(700), ..Default::default() };
        let place = Place::new(limits);
        let sandbox = place.make().await;
        let shell = open(&sandbox, "g").await;
        assert_eq!(run(&shell, "x=1; sleep 60").await.cause, ExecCause::TimedOut);
        assert_eq!(said(&shell, "echo $x").await.1, "1\n", "it is older than any may be");

        let limits = ResourceLimits { max_cpu_time_ms: Some(500), ..Default::default() };
        let place = Place::new(limits);
        let sandbox = place.make().await;
        let shell = open(&sandbox, "g").await;
        run(&shell, "x=1").await;
        let spin = "python3 -c 'import time\nwhile time.process_time() < 0.3: pass'";
        for _ in 0..3 {
            let output = run(&shell, spin).await;
            assert_eq!(output.cause, ExecCause::Exited { code: 0 }, "none of them is too much");
            let cpu = output.usage.cpu_time;
            assert!(cpu >= Duration::from_millis(250), "{cpu:?}");
            assert!(output.usage.wall_time >= Duration::from_millis(300));
        }
        let idle = run(&shell, "sleep 0.2").await.usage;
        assert!(idle.cpu_time < Duration::from_millis(150), "{idle:?}");
        assert_eq!(run(&shell, "while :; do :; done").await.cause, ExecCause::CpuTime);
        assert_eq!(said(&shell, "echo $x").await.1, "1\n", "it has used more than any may");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_command_runs_at_a_time_and_background_jobs_go_on() {
        let place = Place::new(ResourceLimits::default());
        let sandbox = place.make().await;
        let shell = open(&sandbox, "h").await;
        let slow = ShellCommand::new("sleep 0.5; echo done");
        let second = async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            shell.run(&ShellCommand::new("true")).await
        };
        let (first, second) = tokio::join!(shell.run(&slow), second);
        assert_eq!(first.unwrap().stdout, b"done\n");
        assert_eq!(second.unwrap_err().code(), "conflict");
        let began = Instant::now();
        let job = "until [ -e /tmp/go ]; do sleep 0.05; done; echo late; echo x > /tmp/late";
        let output = run(&shell, &format!("({job}) & echo now")).await;
        assert!(began.elapsed() < Duration::from_secs(10), "it is not waited for");
        assert_eq!(output.stdout, b"now\n");
        // An interrupt is for the command, not for the jobs.
        let stuck = ShellCommand::new("sleep 60").timeout(Duration::from_millis(100));
        assert_eq!(shell.run(&stuck).await.unwrap().cause, ExecCause::TimedOut);
        assert_eq!(said(&shell, "touch /tmp/go; wait; cat /tmp/late").await.1, "late\nx\n");
        // Two shells of one sandbox know nothing of each other.
        let other = open(&sandbox, "i").await;
        run(&shell, "x=1; cd /tmp").await;
        let (a, b) = tokio::join!(said(&shell, "echo $x $PWD"), said(&other, "echo \"<$x>\""));
        assert_eq!((a.1.as_str(), b.1.as_str()), ("1 /tmp\n", "<>\n"));
        // A command cannot say how it ended.
        let fake = "for fd in 3 4 10 11 12; do printf '%032d E 0\\n' 0 >&$fd; done 2>/dev/null; \
                    for fd in /proc/$$/fd/*; do echo junk > $fd; done 2>/dev/null; (exit 6)";
        let output = run(&other, fake).await;
        assert!(output.exit_code == 6 || output.shell == ShellState::Ended, "{output:?}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn e1_a_signal_is_told_from_an_exit_of_the_same_number() {
        let place = Place::new(ResourceLimits::default());
        let sandbox = place.make().await;
        let shell = open(&sandbox, "k").await;
        run(&shell, "die() { sh -c \"kill -$1 \\$\\$\"; }; f() { return 139; }; x=kept").await;
        let (exited, signalled) =
            (|code| ExecCause::Exited { code }, |signal| ExecCause::Signalled { signal });
        for (command, cause) in [
            ("die 9", signalled(9)),
            ("sh -c 'exit 137'", exited(137)),
            ("(exit 137)", exited(137)),
            ("f", exited(139)),
            ("die SEGV", signalled(11)),
            ("die 9; sh -c 'exit 137'", exited(137)),
            ("die 9; f", exited(139)),
            ("die 9; true", exited(0)),
            ("die 9 || false", exited(1)),
            ("true | sh -c 'kill -TERM $$'", signalled(15)),
            // A shell inside the shell waited for it, and exited by itself.
            ("true | die TERM", exited(143)),
            ("die 9 | true", exited(0)),
            ("y=$(exec sh -c 'kill -ABRT $$')", signalled(6)),
            ("sleep 60 & kill -9 $!; wait $!", signalled(9)),
            ("set -e; die 9; set +e", exited(0)),
            ("set -e; die 9", signalled(9)),
            ("set +e; kill -9 $BASHPID & wait $!", signalled(9)),
            ("(die 9); echo $x", exited(0)),
        ] {
            let output = run(&shell, command).await;
            assert_eq!(output.cause, cause, "{command}");
            assert_eq!((output.exit_code, output.shell), (cause.exit_code(), ShellState::Alive));
            assert_eq!(said(&shell, "echo $x").await.1, "kept\n", "{command}");
        }
        // Without what tells, or with one that lies, the shell goes on.
        run(&shell, "enable -d __warren_w").await;
        assert_eq!(run(&shell, "die 9").await.cause, exited(137));
        run(&shell, "__warren_w() { return 11; }").await;
        assert_eq!(run(&shell, "die 9").await.cause, exited(137));
        assert_eq!(said(&shell, "echo $x").await.1, "kept\n");
    }

    /// Memory and storage; what only a control group counts is below.
    #[tokio::test(flavor = "multi_thread")]
    async fn e1_a_command_that_met_a_limit_says_which_and_the_shell_lives() {
        let limits = ResourceLimits {
            max_memory_bytes: Some(64 << 20),
            max_write_bytes: Some(8 << 20),
            ..Default::default()
        };
        let place = Place::new(limits);
        let sandbox = place.make().await;
        let shell = open(&sandbox, "l").await;
        run(&shell, "x=kept").await;
        // Several together, none of which has too much: one alone is refused it, without groups.
        let grow = "python3 -c 'import os\nr, w = os.pipe()\nfor i in range(4):\n if os.fork() == 0:\n  \
                    os.close(w); x = b\"x\" * (30 << 20); os.read(r, 1); os._exit(0)\n\
                    s = os.wait()[1]\nos.close(w)\nfor i in range(3): os.wait()\nexit(s != 0)'";
        let output = run(&shell, grow).await;
        assert_eq!((output.cause, output.shell), (ExecCause::OutOfMemory, ShellState::Alive));
        assert_eq!(run(&shell, "false").await.cause, ExecCause::Exited { code: 1 });
        let survived = run(&shell, &format!("{grow} || echo $x")).await;
        assert_eq!(survived.cause, ExecCause::Exited { code: 0 });
        assert_eq!(survived.stdout, b"kept\n");

        let output = run(&shell, "head -c 20000000 /dev/zero > /tmp/full").await;
        assert_eq!((output.cause, output.exit_code), (ExecCause::DiskQuota, 1));
        let output = run(&shell, "rm /tmp/full; false").await;
        assert_eq!(output.cause, ExecCause::Exited { code: 1 });
        // What was refused before is no reason why the shell itself ends.
        let output = run(&shell, "exit 7").await;
        assert_eq!((output.cause, output.exit_code), (ExecCause::Exited { code: 7 }, 7));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_command_reads_what_it_is_given_and_the_next_reads_nothing() {
        let place = Place::new(ResourceLimits::default());
        let sandbox = place.make().await;
        let shell = open(&sandbox, "m").await;
        let with = |command: &str, stdin: &[u8]| ShellCommand {
            stdin: Some(stdin.to_vec()),
            ..ShellCommand::new(command)
        };
        let all: Vec<u8> = (0..=255).cycle().take(1_000_000).collect();
        assert_eq!(shell.run(&with("cat", &all)).await.unwrap().stdout, all);
        shell.run(&with("read a; read b", b"one\ntwo\nthree")).await.unwrap();
        assert_eq!(said(&shell, "echo $b $a; cat").await.1, "two one\n");
        assert_eq!(shell.run(&with("wc -c", b"")).await.unwrap().stdout, b"0\n");
        assert_eq!(said(&shell, "ls -A /tmp").await.1, "", "it is gone");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn time_in_which_the_sandbox_is_suspended_is_none_of_a_commands() {
        let place = Place::new(ResourceLimits::default());
        let sandbox = place.make().await;
        let (one, two) = (open(&sandbox, "n").await, open(&sandbox, "o").await);
        let timeout = Duration::from_millis(600);
        let stuck = ShellCommand::new("touch /tmp/on; sleep 60").timeout(timeout);
        let quick = ShellCommand::new("x=1; sleep 0.4; echo $x").timeout(timeout);
        run(&two, "true").await;
        let (stuck, quick, stood) = tokio::join!(one.run(&stuck), two.run(&quick), async {
            until_there(&*sandbox, "/tmp/on").await;
            sandbox.suspend().await.unwrap();
            let since = Instant::now();
            for error in [
                one.interrupt().await.map(drop).unwrap_err(),
                one.run(&ShellCommand::new("true")).await.map(drop).unwrap_err(),
            ] {
                assert!(["suspended", "conflict"].contains(&error.code()), "{error}");
            }
            tokio::time::sleep(Duration::from_millis(1200)).await;
            let stood = since.elapsed();
            sandbox.resume().await.unwrap();
            stood
        });
        let (stuck, quick) = (stuck.unwrap(), quick.unwrap());
        assert_eq!((quick.cause, &quick.stdout[..]), (ExecCause::Exited { code: 0 }, &b"1\n"[..]));
        assert_eq!((stuck.cause, stuck.shell), (ExecCause::TimedOut, ShellState::Alive));
        let wall = stuck.usage.wall_time;
        assert!(wall >= timeout + stood - Duration::from_millis(50), "{wall:?} {stood:?}");
        assert_eq!(said(&two, "echo $x").await.1, "1\n");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn without_bash_it_is_sh() {
        let place = Place::new(ResourceLimits::default());
        let sandbox = place.make().await;
        // Only sh is found by its name.
        let link = Command::new("sh")
            .args(["-c", "mkdir -p /tmp/bin; ln -s $(command -v sh) /tmp/bin/sh"]);
        sandbox.exec(&link, &ExecContext::default()).await.unwrap();
        let env = [("PATH".to_owned(), "/tmp/bin".to_owned())].into();
        let options = ShellOptions { env, ..options("j") };
        let shell = Shell::open(Arc::clone(&sandbox), &options).await.unwrap();
        let set = "echo \"<$BASH_VERSION>\"; PATH=/usr/bin:/bin; x=1; cd /tmp; (exit 3)";
        assert_eq!(said(&shell, set).await, (3, "<>\n".to_owned(), String::new()));
        for (command, code) in [
            ("echo 'open", 2),
            ("if true; then", 2),
            ("set -eu; false", 1),
            ("echo $unset", 2),
            ("set +eu; readonly r=1; r=2", 2),
        ] {
            assert_eq!(said(&shell, command).await.0, code, "{command}");
            assert_eq!(said(&shell, "echo $? $x $PWD").await.1, format!("{code} 1 /tmp\n"));
        }
        for stuck in ["while :; do :; done", "sleep 60; echo no"] {
            let command = ShellCommand::new(stuck).timeout(Duration::from_millis(200));
            assert_eq!(shell.run(&command).await.unwrap().cause, ExecCause::TimedOut, "{stuck}");
            assert_eq!(said(&shell, "echo $x $PWD").await.1, "1 /tmp\n", "{stuck}");
        }
    }
}

/// What the kernel counts in control groups, which only root is given here.
mod counted {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn e1_what_the_kernel_killed_or_refused_is_no_plain_exit() {
        let limits = ResourceLimits {
            max_memory_bytes: Some(64 << 20),
            max_processes: Some(16),
            ..Default::default()
        };
        let place = Place::new(limits);
        let sandbox = place.make().await;
        let shell = open(&sandbox, "p").await;
        let grow = "python3 -c 'x = b\"x\" * (200 << 20)'";
        let output = run(&shell, grow).await;
        assert_eq!((output.cause, output.exit_code), (ExecCause::OutOfMemory, 137));
        assert_eq!(said(&shell, &format!("{grow}; echo $?")).await.1, "137\n", "control");
        // Its children end with it, so that the shell has processes again.
        let fork = "python3 -c 'import os\nr, w = os.pipe()\nfor i in range(40):\n if os.fork() == 0:\n  \
                    os.close(w); os.read(r, 1); os._exit(0)' 2>/dev/null";
        let output = run(&shell, fork).await;
        assert_eq!((output.cause, output.exit_code), (ExecCause::TooManyProcesses, 1));
        assert_eq!(run(&shell, "sleep 0.1; false").await.cause, ExecCause::Exited { code: 1 });
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn e2_each_command_reports_its_own_memory_and_storage() {
        let place = Place::new(ResourceLimits::default());
        let sandbox = place.make().await;
        let (shell, other) = (open(&sandbox, "q").await, open(&sandbox, "r").await);
        let (small, large) = (1 << 20, 40 << 20);
        run(&other, "true").await;
        let hold = run(&shell, "python3 -c 'x = b\"x\" * (40 << 20)'").await.usage;
        assert!(hold.peak_memory_bytes.unwrap() >= large, "{hold:?}");
        let write = run(&shell, "head -c 5000000 /dev/zero | cat > /tmp/x; rm /tmp/x").await.usage;
        assert!(write.bytes_written >= 10_000_000 && write.bytes_read >= 10_000_000, "{write:?}");
        let idle = run(&shell, "true").await.usage;
        assert!(idle.peak_memory_bytes.unwrap() < large, "{idle:?}");
        assert!(idle.bytes_written < small && idle.bytes_read < small, "{idle:?}");
        let total = sandbox.resource_usage().await.unwrap();
        assert!(total.peak_memory_bytes >= large, "the sandbox's own is not lost: {total:?}");
        // One who looks does not take what another saw.
        let both =
            tokio::join!(run(&shell, "python3 -c 'x = b\"x\" * (40 << 20)'; sleep 0.3"), async {
                for _ in 0..5 {
                    run(&other, "sleep 0.1").await;
                }
            });
        assert!(both.0.usage.peak_memory_bytes.unwrap() >= large, "{:?}", both.0.usage);
    }
}

/// Runs the cases of this very program once more, as `nobody`.
#[test]
fn a_plain_user_has_shells_too() {
    plain_user::rerun(&["linux::", "--test-threads", "2"]);
}
