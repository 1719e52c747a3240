//! Execs with a log, on the linux backend: rules E1 to E5 and what terminals and input add to them.
//!
//! The cases of `linux` run as root and, by the last test, as a plain user without control groups.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

#[path = "execution/explain.rs"]
mod explain;
#[path = "shared/plain_user.rs"]
mod plain_user;
#[path = "execution/refused.rs"]
mod refused;

use std::time::{Duration, Instant};

use warren::backend::LinuxBackend;
use warren::{
    Command, CreateOptions, ExecCause, ExecContext, ExecEnd, ExecHandle, ExecId, ExecInput,
    ExecOptions, ExecUser, FoundExec, IsolationBackend, LogOverflow, LogRead, LogStream, LogWait,
    MAX_EXEC_NOTE, ProgramFault, ResourceLimits, Sandbox, SandboxError, SandboxId, SandboxSpec,
    TerminalSize,
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

    async fn make(&self, backend: &LinuxBackend) -> Box<dyn Sandbox> {
        let id = Some(self.id.clone());
        let options = CreateOptions { id, persistent: true, ..CreateOptions::default() };
        backend.create_sandbox_with(&self.spec, &options).await.unwrap()
    }

    fn logs(&self) -> usize {
        let logs = self.directory.path().join(self.id.as_str()).join("execs");
        std::fs::read_dir(logs).map_or(0, Iterator::count)
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

fn sh(script: &str) -> Command {
    Command::new("sh").args(["-c", script])
}

fn named(id: &str) -> ExecOptions {
    ExecOptions { id: Some(ExecId(id.to_owned())), ..ExecOptions::default() }
}

async fn start(sandbox: &dyn Sandbox, command: &Command, options: &ExecOptions) -> FoundExec {
    sandbox.start_exec(command, &ExecContext::default(), options).await.unwrap()
}

async fn run(sandbox: &dyn Sandbox, script: &str) -> (ExecEnd, String) {
    let exec = start(sandbox, &sh(script), &ExecOptions::default()).await;
    let end = exec.wait().await.unwrap();
    (end, text(&*exec, LogStream::Stdout).await)
}

/// Reads a log from `offset` to its end.
async fn rest(exec: &dyn ExecHandle, mut offset: u64) -> Vec<LogRead> {
    let mut all = Vec::new();
    loop {
        let read = exec.read(offset, usize::MAX, LogWait::More).await.unwrap();
        offset = read.next;
        let ended = read.ended;
        all.push(read);
        if ended {
            return all;
        }
    }
}

fn bytes(reads: &[LogRead], stream: LogStream) -> Vec<u8> {
    let pieces = reads.iter().flat_map(|read| &read.pieces);
    let own = pieces.filter(|piece| piece.stream == stream);
    own.flat_map(|piece| piece.bytes.iter().copied()).collect()
}

async fn text(exec: &dyn ExecHandle, stream: LogStream) -> String {
    String::from_utf8(bytes(&rest(exec, 0).await, stream)).unwrap()
}

/// Waits until the log holds `wanted`.
async fn until(exec: &dyn ExecHandle, wanted: &str) -> String {
    let (mut seen, mut at) = (String::new(), 0);
    let read = async {
        while !seen.contains(wanted) {
            let read = exec.read(at, usize::MAX, LogWait::More).await.unwrap();
            for piece in &read.pieces {
                seen.push_str(&String::from_utf8_lossy(&piece.bytes));
            }
            at = read.next;
            assert!(!read.ended || seen.contains(wanted), "it ended after {seen:?}");
        }
    };
    tokio::time::timeout(Duration::from_secs(20), read).await.expect("it says so in time");
    seen
}

mod linux {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn e1_each_end_has_its_cause() {
        let limits = ResourceLimits {
            max_memory_bytes: Some(64 << 20),
            max_processes: Some(12),
            max_output_bytes: Some(1 << 20),
            max_write_bytes: Some(8 << 20),
            max_cpu_time_ms: Some(1_500),
            max_wall_time_ms: Some(60_000),
            ..ResourceLimits::default()
        };
        let place = Place::new(limits);
        let backend = place.backend();
        // Without a cgroup some limits are held by the nearest bound; here that will do.
        let all = "memory processes output write cpu-time wall-time".split(' ');
        let accept_missing = all.filter_map(|limit| limit.parse().ok()).collect();
        let id = Some(place.id.clone());
        let options = CreateOptions { id, persistent: true, accept_missing, ..Default::default() };
        let sandbox = backend.create_sandbox_with(&place.spec, &options).await.unwrap();
        // None of them has too much; when one of them is gone, the others go by themselves.
        let eat = "python3 -c 'import os\nr, w = os.pipe()\nfor i in range(4):\n if os.fork() == 0:\n  \
                   os.close(w); x = b\"x\" * (30 << 20); os.read(r, 1); os._exit(0)\n\
                   s = os.wait()[1]\nos.close(w)\nfor i in range(3): os.wait()\nexit(s != 0)'; exit 1";
        let many = "for i in $(seq 40); do sleep 2 & done; wait";
        let fill = "head -c 20000000 /dev/zero > /workspace/big";
        let killed = start(&*sandbox, &sh("sleep 60"), &ExecOptions::default()).await;
        killed.kill().await.unwrap();
        let end = killed.wait().await.unwrap();
        assert!(matches!(end.cause, ExecCause::KilledByPolicy { .. }), "{end:?}");
        // Only a control group counts how often it refused a process.
        let has_groups = rustix::process::geteuid().is_root();
        let refused = if has_groups { "too_many_processes" } else { "exited" };
        for (script, timeout, expected) in [
            ("exit 3", None, "exited"),
            ("kill -USR1 $$; sleep 5", None, "signalled"),
            ("sleep 60", Some(300), "timed_out"),
            (eat, None, "out_of_memory"),
            (fill, None, "disk_quota"),
            ("yes", None, "output_limit"),
            ("rm /workspace/big; while :; do :; done", None, "cpu_time"),
            (many, None, refused),
        ] {
            let mut command = sh(script);
            command.timeout = timeout.map(Duration::from_millis);
            let exec = start(&*sandbox, &command, &ExecOptions::default()).await;
            let end = exec.wait().await.unwrap();
            let cause = serde_json::to_value(&end.cause).unwrap();
            assert_eq!(cause["kind"], expected, "{script}: {end:?}");
            assert_eq!(exec.info().end, Some(end), "{script}");
        }
        let (end, _) = run(&*sandbox, "true").await;
        assert_eq!(end.cause, ExecCause::Exited { code: 0 }, "it stays usable");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn e1_an_exec_that_goes_with_init_while_nobody_looks_is_lost() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let exec = start(&*sandbox, &sh("sleep 60"), &named("gone")).await;
        assert!(exec.info().end.is_none(), "control: it runs");
        sandbox.destroy().await.unwrap();
        assert_eq!(exec.wait().await.unwrap_err().code(), "ended");
        assert_eq!(exec.info().end.unwrap().cause, ExecCause::Lost);
        assert!(!place.directory.path().join(place.id.as_str()).exists());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_command_starts_with_every_signal_let_through_and_none_ignored() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let cat = Command::new("cat").args(["/proc/self/status"]);
        let exec = start(&*sandbox, &cat, &named("s")).await;
        let status = text(&*exec, LogStream::Stdout).await;
        let none = "0000000000000000";
        // The C library keeps signals 32 and 33 to itself; whoever ignores those, does so for all.
        let kept = "0000000180000000";
        for field in ["SigPnd", "SigBlk", "SigIgn", "SigCgt"] {
            let is = |value: &str| status.contains(&format!("{field}:\t{value}\n"));
            assert!(is(none) || (field == "SigIgn" && is(kept)), "{field}: {status}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn e2_each_exec_reports_what_it_used_itself() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let spin = "python3 -c 'import time\nwhile time.process_time() < 0.5: pass'";
        let hold = "python3 -c 'b=bytearray(80<<20); b[::4096]=b[::4096]'";
        let write = "head -c 3000000 /dev/zero > /workspace/file";
        let ((spun, _), (held, _), (slept, _), (wrote, _)) = tokio::join!(
            run(&*sandbox, spin),
            run(&*sandbox, hold),
            run(&*sandbox, "sleep 0.7"),
            run(&*sandbox, write)
        );
        let (forked, _) = run(&*sandbox, "for i in 1 2 3 4 5; do /bin/true; done; true").await;
        assert_eq!(forked.tasks_started, 6, "{forked:?}");
        assert!(spun.usage.cpu_time_ms >= 450, "{spun:?}");
        assert!(slept.usage.cpu_time_ms < spun.usage.cpu_time_ms / 2, "{slept:?}");
        assert!(slept.usage.wall_time_ms >= 700 && slept.duration.as_millis() >= 700, "{slept:?}");
        assert!(held.usage.peak_memory_bytes >= 80 << 20, "{held:?}");
        assert!(slept.usage.peak_memory_bytes < 40 << 20, "{slept:?}");
        assert!(wrote.usage.bytes_written >= 3_000_000, "{wrote:?}");
        assert!(slept.usage.bytes_written < 1_000_000, "{slept:?}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn e3_a_kill_or_a_timeout_ends_the_whole_tree_and_nothing_else() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let tree = "(setsid sh -c 'sh -c \"sleep 4711 & sleep 4711\" & kill -STOP $$; sleep 4711' &)\n\
                    sleep 4711 & echo before; wait; sleep 4711";
        let count = "pgrep -cx sleep || true";
        let other = start(&*sandbox, &Command::new("sleep").args(["4712"]), &named("other")).await;
        for by in ["kill", "timeout"] {
            let mut command = sh(tree);
            command.timeout = (by == "timeout").then_some(Duration::from_millis(1500));
            let exec = start(&*sandbox, &command, &ExecOptions::default()).await;
            until(&*exec, "before").await;
            let mut seen = 0;
            for _ in 0..100 {
                seen = run(&*sandbox, count).await.1.trim().parse().unwrap();
                if seen >= 4 {
                    break;
                }
            }
            assert!(seen >= 4, "control: {seen} run");
            if by == "kill" {
                exec.kill().await.unwrap();
            }
            exec.wait().await.unwrap();
            assert_eq!(text(&*exec, LogStream::Stdout).await, "before\n", "the output is kept");
            assert_eq!(run(&*sandbox, count).await.1.trim(), "1", "after a {by}");
        }
        assert!(other.info().end.is_none());
        other.signal(15).await.unwrap();
        assert_eq!(other.wait().await.unwrap().cause, ExecCause::Signalled { signal: 15 });
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn e4_any_number_of_readers_read_from_any_offset_and_a_stopped_one_stalls_nobody() {
        let limits = ResourceLimits { max_output_bytes: Some(100 << 20), ..Default::default() };
        let place = Place::new(limits);
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        // Far more than any buffer between the two.
        let script = "for i in $(seq 20); do seq 100000; echo side $i >&2; done";
        let exec = start(&*sandbox, &sh(script), &ExecOptions::default()).await;
        let stopped = exec.read(0, 10, LogWait::More).await.unwrap();
        let whole = rest(&*exec, 0).await;
        assert_eq!(exec.wait().await.unwrap().exit_code, 0);
        let expected: String = (1..=100_000).map(|i| format!("{i}\n")).collect();
        assert!(bytes(&whole, LogStream::Stdout) == expected.repeat(20).into_bytes());
        let side: String = (1..=20).map(|i| format!("side {i}\n")).collect();
        assert_eq!(bytes(&whole, LogStream::Stderr), side.into_bytes());
        // The one that stopped goes on where it was, and others begin anywhere.
        let all: Vec<u8> =
            whole.iter().flat_map(|r| &r.pieces).flat_map(|p| p.bytes.clone()).collect();
        for from in [stopped.next, 1, 4_711_017, all.len() as u64 - 1] {
            let read = rest(&*exec, from).await;
            let pieces = read.iter().flat_map(|read| &read.pieces);
            let got: Vec<u8> = pieces.flat_map(|piece| piece.bytes.clone()).collect();
            assert!(got == all[usize::try_from(from).unwrap()..], "from {from}");
        }
        let beyond = exec.read(all.len() as u64 + 5, 10, LogWait::More).await.unwrap();
        assert!(beyond.ended && beyond.pieces.is_empty());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn e4_a_flood_is_the_same_to_readers_beside_it_and_cut_at_exactly_the_limit() {
        let limit = (24 << 20) + 5;
        let mut expected = Vec::new();
        let mut numbers = 1..;
        while expected.len() as u64 <= limit {
            expected.extend_from_slice(format!("{}\n", numbers.next().unwrap()).as_bytes());
        }
        expected.truncate(usize::try_from(limit).unwrap());
        // The strict filter has no call that moves bytes, so that init copies them.
        for seccomp in ["default", "strict"] {
            let limits = ResourceLimits { max_output_bytes: Some(limit), ..Default::default() };
            let mut place = Place::new(limits);
            place.spec.seccomp_profile = Some(seccomp.to_owned());
            let backend = place.backend();
            let sandbox = place.make(&backend).await;
            let exec = start(&*sandbox, &sh("seq 100000000"), &ExecOptions::default()).await;
            let stopped = exec.read(0, 10, LogWait::More).await.unwrap();
            let later = 1 << 20;
            let (whole, part) = tokio::join!(rest(&*exec, 0), rest(&*exec, later));
            assert_eq!(exec.wait().await.unwrap().cause, ExecCause::OutputLimit, "{seccomp}");
            let late = rest(&*exec, stopped.next).await;
            for (from, reads) in [(0, whole), (later, part), (stopped.next, late)] {
                let got = bytes(&reads, LogStream::Stdout);
                assert!(
                    got == expected[usize::try_from(from).unwrap()..],
                    "{seccomp}, from {from}"
                );
                assert!(reads.last().unwrap().cut);
            }
            sandbox.destroy().await.unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn e4_a_log_outlives_its_backend_and_its_reader_goes_on_where_it_was() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        // It ends when it is told to, which is after whoever started it is gone, however slow that is.
        let slow = "for i in $(seq 60); do echo line $i; sleep 0.02; done; read word; \
                    [ $word = abcd ] && exit 7";
        let options = ExecOptions { input: ExecInput::Open, ..named("slow") };
        start(&*sandbox, &sh("echo early; exit 3"), &named("early")).await.wait().await.unwrap();
        let exec = start(&*sandbox, &sh(slow), &options).await;
        let ends_alone =
            start(&*sandbox, &sh("sleep 0.3; echo alone; exit 9"), &named("alone")).await;
        assert_eq!(exec.write_input(None, b"abc", false).await.unwrap(), 3);
        let first = exec.read(0, usize::MAX, LogWait::More).await.unwrap();
        let anchor = sandbox.anchor().unwrap();
        drop((exec, ends_alone, sandbox, backend));
        // Nobody is there for a while; one of them ends meanwhile.
        tokio::time::sleep(Duration::from_millis(600)).await;

        let backend = place.backend();
        let sandbox = backend.adopt(&place.id, &place.spec, &anchor).await.unwrap().unwrap();
        let find = |id: &str| {
            let id = ExecId(id.to_owned());
            let sandbox = &sandbox;
            async move { sandbox.find_exec(&id).await.unwrap().unwrap() }
        };
        let exec = find("slow").await;
        assert_eq!(exec.info().input_taken, 3, "init remembers what it was given");
        assert_eq!(exec.write_input(Some(3), b"d\n", true).await.unwrap(), 5);
        let mut all = vec![first.clone()];
        all.extend(rest(&*exec, first.next).await);
        let expected: String = (1..=60).map(|i| format!("line {i}\n")).collect();
        assert_eq!(String::from_utf8(bytes(&all, LogStream::Stdout)).unwrap(), expected);
        assert_eq!(exec.wait().await.unwrap().exit_code, 7);
        let alone = find("alone").await;
        assert_eq!(alone.wait().await.unwrap().exit_code, 9);
        assert_eq!(text(&*alone, LogStream::Stdout).await, "alone\n");
        let early = find("early").await;
        assert_eq!(early.wait().await.unwrap().cause, ExecCause::Exited { code: 3 });
        assert_eq!(sandbox.list_execs().await.unwrap().len(), 3);
        early.forget().await.unwrap();
        assert_eq!((sandbox.list_execs().await.unwrap().len(), place.logs()), (2, 2));
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn e4_a_log_says_where_it_was_cut_and_one_that_forgets_keeps_the_newest() {
        let limits = ResourceLimits { max_output_bytes: Some(100_000), ..Default::default() };
        let place = Place::new(limits);
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let cut = start(&*sandbox, &sh("seq 1000000; sleep 60"), &ExecOptions::default()).await;
        assert_eq!(cut.wait().await.unwrap().cause, ExecCause::OutputLimit);
        let reads = rest(&*cut, 0).await;
        let last = reads.last().unwrap();
        assert!(last.cut && last.next == 100_000, "{} {}", last.cut, last.next);
        let flood = Command::new("/usr/bin/head").args(["-c", "100000000", "/dev/zero"]);
        let flood = start(&*sandbox, &flood, &ExecOptions::default()).await;
        assert_eq!(flood.wait().await.unwrap().cause, ExecCause::OutputLimit);
        assert_eq!(rest(&*flood, 0).await.last().unwrap().next, 100_000);

        let forgets = ExecOptions { overflow: LogOverflow::Forget, ..ExecOptions::default() };
        let exec = start(&*sandbox, &sh("seq 1000000"), &forgets).await;
        assert_eq!(exec.wait().await.unwrap().exit_code, 0, "it goes on");
        let reads = rest(&*exec, 0).await;
        let whole: String = (1..=1_000_000).map(|i| format!("{i}\n")).collect();
        let kept = bytes(&reads, LogStream::Stdout);
        assert_eq!(reads[0].skipped + kept.len() as u64, whole.len() as u64);
        assert!(kept.len() >= 100_000 && whole.as_bytes().ends_with(&kept));
        assert!(!reads.last().unwrap().cut);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn e5_the_same_name_is_the_same_run_and_another_command_is_refused_it() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let command = sh("echo ran >> /workspace/runs; cat /workspace/runs");
        let options = named("once");
        let both = futures(&*sandbox, &command, &options).await;
        for exec in &both {
            assert_eq!(exec.wait().await.unwrap().exit_code, 0);
            assert_eq!(text(&**exec, LogStream::Stdout).await, "ran\n");
        }
        let again = start(&*sandbox, &command, &options).await;
        assert_eq!(text(&*again, LogStream::Stdout).await, "ran\n");
        let context = ExecContext::default();
        let other = sandbox.start_exec(&sh("true"), &context, &options).await.unwrap_err();
        assert_eq!(other.code(), "already_exists");
        let fails = Command::new("/nowhere");
        let error = sandbox.start_exec(&fails, &context, &named("x")).await.unwrap_err();
        assert_eq!(error.code(), "program_not_found", "{error}");
        start(&*sandbox, &sh("true"), &named("x")).await;
        let bad = sandbox.start_exec(&command, &context, &named("../x")).await.unwrap_err();
        assert_eq!(bad.code(), "invalid_spec");
    }

    async fn futures(
        sandbox: &dyn Sandbox,
        command: &Command,
        options: &ExecOptions,
    ) -> [FoundExec; 3] {
        let (a, b, c) = tokio::join!(
            start(sandbox, command, options),
            start(sandbox, command, options),
            start(sandbox, command, options)
        );
        [a, b, c]
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn input_is_a_stream_with_offsets_that_repeating_does_not_double() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let open = ExecOptions { input: ExecInput::Open, ..ExecOptions::default() };
        let exec = start(&*sandbox, &Command::new("cat").stdin(*b"first "), &open).await;
        assert_eq!(exec.write_input(Some(6), b"second ", false).await.unwrap(), 13);
        assert_eq!(exec.write_input(Some(6), b"second third ", false).await.unwrap(), 19);
        let gap = exec.write_input(Some(100), b"x", false).await.unwrap_err();
        assert_eq!(gap.code(), "conflict");
        assert_eq!(exec.write_input(None, b"last", true).await.unwrap(), 23);
        assert_eq!(exec.wait().await.unwrap().exit_code, 0, "it saw the end of its input");
        assert_eq!(text(&*exec, LogStream::Stdout).await, "first second third last");
        assert!(exec.write_input(None, b"late", false).await.is_err());

        // Far more than is ever held for a command that does not read yet.
        let much = vec![b'x'; 3_000_000];
        let exec = start(&*sandbox, &sh("sleep 0.3; wc -c"), &open).await;
        exec.write_input(None, &much, true).await.unwrap();
        assert_eq!(exec.wait().await.unwrap().exit_code, 0);
        assert_eq!(text(&*exec, LogStream::Stdout).await.trim(), "3000000");
        let whole = sh("wc -c").stdin(much);
        let output = sandbox.exec(&whole, &ExecContext::default()).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "3000000");

        let deaf = start(&*sandbox, &sh("exec <&-; sleep 1"), &open).await;
        let refused = async { while deaf.write_input(None, &[0; 10_000], false).await.is_ok() {} };
        tokio::time::timeout(Duration::from_secs(10), refused).await.expect("it is told");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_terminal_is_one_with_a_size_that_changes_and_a_log_to_replay() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let options = ExecOptions {
            input: ExecInput::Open,
            terminal: Some(TerminalSize { rows: 30, columns: 100 }),
            overflow: LogOverflow::Forget,
            ..named("terminal")
        };
        let script =
            "tty; stty size; while read -r line; do stty size; echo \"<$line>\"; done; echo over";
        let exec = start(&*sandbox, &Command::new("bash").args(["-c", script]), &options).await;
        until(&*exec, "30 100").await;
        exec.resize(TerminalSize { rows: 40, columns: 120 }).await.unwrap();
        exec.write_input(None, b"hello\n", false).await.unwrap();
        // With the end of its line, which the terminal writes by itself: somebody may read in between.
        let seen = until(&*exec, "<hello>\r\n").await;
        assert!(seen.contains("/dev/pts/") && seen.contains("40 120"), "{seen:?}");
        // One who comes later sees all of it; what was typed is echoed by the terminal.
        let late = exec.read(0, usize::MAX, LogWait::Never).await.unwrap();
        let all = String::from_utf8_lossy(&late.pieces[0].bytes).into_owned();
        assert!(all.contains("hello\r\n") && all.contains("<hello>\r\n"), "{all:?}");
        exec.write_input(None, b"", true).await.unwrap();
        until(&*exec, "over").await;
        assert_eq!(exec.wait().await.unwrap().exit_code, 0);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_said_on_the_control_descriptor_comes_after_what_was_written_before() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let options = ExecOptions { input: ExecInput::Control, ..ExecOptions::default() };
        let script = "while IFS= read -r n <&3; do seq 1 $n; seq 1 $n >&2; echo done $n >&3; done";
        let exec = start(&*sandbox, &Command::new("bash").args(["-c", script]), &options).await;
        let mut at = 0;
        for count in [1u32, 1_000, 2, 20_000] {
            exec.write_input(None, format!("{count}\n").as_bytes(), false).await.unwrap();
            let (mut out, mut err, mut said) = (0, 0, Vec::new());
            while said.is_empty() {
                let read = exec.read(at, usize::MAX, LogWait::More).await.unwrap();
                at = read.next;
                for piece in read.pieces {
                    let lines = piece.bytes.iter().filter(|byte| **byte == b'\n').count();
                    match piece.stream {
                        LogStream::Stdout => out += lines,
                        LogStream::Stderr => err += lines,
                        LogStream::Control => said.extend(piece.bytes),
                    }
                }
            }
            let count = usize::try_from(count).unwrap();
            assert_eq!((out, err), (count, count), "all of it came first");
            assert_eq!(String::from_utf8(said).unwrap(), format!("done {count}\n"));
        }
        exec.write_input(None, b"", true).await.unwrap();
        assert_eq!(exec.wait().await.unwrap().exit_code, 0);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_command_started_can_be_ended_without_it() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let script = "(setsid sleep 4713 &) ; sleep 4713; echo survived; exit 5";
        let exec = start(&*sandbox, &Command::new("bash").args(["-c", script]), &named("b")).await;
        let count = "pgrep -cx sleep || true";
        for _ in 0..100 {
            if run(&*sandbox, count).await.1.trim() == "2" {
                break;
            }
        }
        assert_eq!(run(&*sandbox, count).await.1.trim(), "2", "control: they run");
        exec.kill_children().await.unwrap();
        assert_eq!(exec.wait().await.unwrap().exit_code, 5);
        assert_eq!(text(&*exec, LogStream::Stdout).await, "survived\n");
        assert_eq!(run(&*sandbox, count).await.1.trim(), "0");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_remembered_of_ended_execs_is_bounded() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        for i in 0..260 {
            let exec = start(&*sandbox, &Command::new("true"), &named(&format!("n{i}"))).await;
            exec.wait().await.unwrap();
        }
        // The last may be noted a moment after whoever waited for it.
        let began = Instant::now();
        while place.logs() > 256 && began.elapsed() < Duration::from_secs(5) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let all = sandbox.list_execs().await.unwrap();
        assert_eq!((all.len(), place.logs()), (256, 256));
        assert_eq!(all[0].id().as_str(), "n4", "the oldest went first");
        sandbox.exec(&sh("seq 10"), &ExecContext::default()).await.unwrap();
        assert_eq!(place.logs(), 256, "what nobody can ask for leaves nothing");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_command_that_closes_its_output_goes_on_and_is_waited_for() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let (end, output) = run(&*sandbox, "echo said; exec >&- 2>&-; sleep 0.3; exit 4").await;
        assert_eq!((end.exit_code, output.as_str()), (4, "said\n"));
        assert!(end.duration >= Duration::from_millis(300));
        // What it leaves behind may go on writing to its log.
        let exec =
            start(&*sandbox, &sh("(sleep 0.3; echo later) & echo now"), &named("left")).await;
        exec.wait().await.unwrap();
        assert_eq!(text(&*exec, LogStream::Stdout).await, "now\n");
        tokio::time::sleep(Duration::from_millis(600)).await;
        assert_eq!(text(&*exec, LogStream::Stdout).await, "now\nlater\n");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_suspended_or_dying_sandbox_refuses_an_exec_and_its_logs_can_be_read() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let exec = start(&*sandbox, &sh("echo on; sleep 60"), &named("s")).await;
        until(&*exec, "on").await;
        sandbox.suspend().await.unwrap();
        let context = ExecContext::default();
        let refused = sandbox.start_exec(&sh("true"), &context, &named("t")).await.unwrap_err();
        assert_eq!(refused.code(), "suspended");
        let read = exec.read(0, 100, LogWait::Never).await.unwrap();
        assert_eq!(read.pieces[0].bytes, b"on\n");
        sandbox.destroy().await.unwrap();
        let refused = sandbox.start_exec(&sh("true"), &context, &named("t")).await.unwrap_err();
        assert_eq!(refused.code(), "ended");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_of_the_sandboxs_users_runs_a_command_from_home_and_a_note_stays_with_it() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let by = |name: &str, workdir: Option<&str>| ExecOptions {
            user: Some(ExecUser { name: name.to_owned(), workdir: workdir.map(str::to_owned) }),
            note: Some("kept".to_owned()),
            ..ExecOptions::default()
        };
        let show = sh("pwd; echo $HOME $USER $LOGNAME $MORE");
        let home = "/home/user user user";
        for (workdir, wanted) in [
            (None, format!("/home/user\n{home}\n")),
            (Some("~"), format!("/home/user\n{home}\n")),
            (Some("/tmp"), format!("/tmp\n{home}\n")),
            (Some("../../usr"), format!("/usr\n{home}\n")),
        ] {
            let exec = start(&*sandbox, &show, &by("user", workdir)).await;
            exec.wait().await.unwrap();
            assert_eq!(text(&*exec, LogStream::Stdout).await, wanted);
            assert_eq!(exec.info().note.as_deref(), Some("kept"));
        }
        let other = show.clone().env("HOME", "/tmp").env("MORE", "more");
        let exec = start(&*sandbox, &other, &by("user", None)).await;
        exec.wait().await.unwrap();
        let said = text(&*exec, LogStream::Stdout).await;
        assert_eq!(said, "/home/user\n/tmp user user more\n", "the command's word wins");

        let context = ExecContext::default();
        let refuse = async |options: ExecOptions| {
            sandbox.start_exec(&show, &context, &options).await.unwrap_err()
        };
        for other in ["nobody-here", "root"] {
            let refused = refuse(by(other, None)).await;
            assert_eq!(refused.code(), "unsupported", "the profile has one user: {refused}");
        }
        for (options, wanted) in [
            (by("user", Some("nowhere")), ProgramFault::Workdir),
            (by("user", Some("~root")), ProgramFault::Workdir),
        ] {
            let refused = refuse(options).await;
            let SandboxError::Program { kind, .. } = refused else { panic!("{refused}") };
            assert_eq!(kind, wanted);
        }
        let invalid = refuse(by("a\0b", None)).await;
        assert!(matches!(invalid, SandboxError::InvalidSpec { .. }), "{invalid}");
        let long = ExecOptions { note: Some("x".repeat(MAX_EXEC_NOTE + 1)), ..by("user", None) };
        assert_eq!(refuse(long).await.code(), "too_large");
    }
}

/// Runs the cases of this very program once more, as `nobody`.
#[test]
fn execs_have_logs_for_a_plain_user_too() {
    plain_user::rerun(&["linux::", "--test-threads", "1"]);
}
