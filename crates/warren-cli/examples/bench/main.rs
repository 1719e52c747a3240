//! Measures Warren from inside a process, and commands side by side with it. `bench/run` calls it.
//!
//! ```text
//! bench filter DIR               writes the default profile's seccomp programs to DIR, for the floor
//! bench rounds N PLAN            every contender once in each of N rounds; nanoseconds of each
//! bench throughput SECONDS PLAN  every contender at 1, 2, 4 and 8 at once; how many per second
//! bench suspend N PLAN           suspend and resume of a sandbox with 10 processes
//! bench stream BYTES PLAN        output of one command to the library, to the socket, and through a pipe
//! bench scale N,N,... PLAN       what one more sandbox costs with so many alive, and what each holds
//! bench snapshot N BYTES PLAN    forks on a base of so many bytes, snapshots, copies and commits of the same
//! ```
//!
//! PLAN is a JSON file, the answer is JSON on stdout. What cannot be measured is in `errors`, with the reason.

mod client;
mod contender;
mod engine;
mod scale;
mod snapshot;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command as Program, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use warren::backend::LinuxBackend;
use warren::{Command, CreateOptions, ExecContext, Sandbox as _, SandboxSpec, StreamOutput};

use client::Client;
use contender::{Contender, Series};

/// What to measure.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Plan {
    /// Commands by name.
    commands: Vec<Named>,
    /// Paths of Warren by name; see `contender.rs`.
    paths: Vec<String>,
    /// The socket of a daemon without a pool.
    socket: String,
    /// The socket of a daemon with one.
    pool_socket: String,
    /// The address of the first daemon, and a key for it.
    address: String,
    key: String,
    /// The program of the floor and its arguments, without a mode.
    floor: Vec<String>,
    /// Who commits changes of a container, beside snapshots.
    engines: Vec<engine::Engine>,
}

/// A command by name.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Named {
    name: String,
    /// `{}` in an argument is replaced by a number that is new each time.
    argv: Vec<String>,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct Answer {
    /// Nanoseconds, or other numbers, in the order in which they were measured.
    series: BTreeMap<String, Vec<f64>>,
    errors: BTreeMap<String, String>,
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let answer = match args[..] {
        ["filter", directory] => return filter(Path::new(directory)),
        ["rounds", count, plan] => rounds(count.parse()?, &read(plan)?),
        ["throughput", seconds, plan] => throughput(seconds.parse()?, &read(plan)?),
        ["suspend", count, plan] => suspend(count.parse()?, &read(plan)?)?,
        ["stream", bytes, plan] => stream(bytes.parse()?, &read(plan)?),
        ["scale", counts, plan] => {
            let counts: Result<Vec<usize>, _> = counts.split(',').map(str::parse).collect();
            scale::scale(&counts?, &read(plan)?)?
        }
        ["snapshot", count, bytes, plan] => {
            snapshot::snapshot(count.parse()?, bytes.parse()?, &read(plan)?)?
        }
        _ => bail!("usage: see the head of crates/warren-cli/examples/bench/main.rs"),
    };
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, &answer)?;
    Ok(out.flush()?)
}

fn read(path: &str) -> Result<Plan> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    serde_json::from_str(&text).with_context(|| format!("understand {path}"))
}

fn filter(directory: &Path) -> Result<()> {
    let profile = warren::profile::seccomp("default").context("the profile `default`")?;
    for (name, program) in [("init", profile.init), ("workload", profile.workload)] {
        let bytes: Vec<u8> = program.iter().flat_map(|one| one.to_bits().to_ne_bytes()).collect();
        std::fs::write(directory.join(name), bytes)?;
    }
    Ok(())
}

/// Runs every contender once in each round, so that whatever else the machine does falls on all alike.
/// How long nothing happens before each contender: what one leaves to be cleared up by the kernel, or to be made
/// anew by a daemon, is not for the next to pay.
const REST: Duration = Duration::from_millis(40);

/// Orders that look random and are the same in each run: a xorshift generator.
struct Order(u64);

impl Order {
    fn shuffle<T>(&mut self, all: &mut [T]) {
        for last in (1..all.len()).rev() {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            let other = usize::try_from(self.0 % (last as u64 + 1)).unwrap_or_default();
            all.swap(last, other);
        }
    }
}

fn rounds(count: usize, plan: &Plan) -> Answer {
    let mut answer = Answer::default();
    let mut contenders: Vec<(String, Contender)> = Vec::new();
    for name in contender::names(plan) {
        match contender::make(&name, plan) {
            Ok(contender) => contenders.push((name, contender)),
            Err(error) => drop(answer.errors.insert(name, format!("{error:#}"))),
        }
    }
    // The first round warms caches and is not counted. Each has an order of its own: whoever follows a heavy
    // one finds the caches cold, and that is to be everybody in turn.
    let mut order = Order(1);
    for round in 0..=count {
        order.shuffle(&mut contenders);
        contenders.retain_mut(|(name, contender)| {
            std::thread::sleep(REST);
            let mut series = Series::default();
            if let Err(error) = contender(&mut series) {
                answer.series.retain(|key, _| !key.starts_with(&*name));
                answer.errors.insert(name.clone(), format!("{error:#}"));
                return false;
            }
            for (part, time) in series.0 {
                let key = if part.is_empty() { name.clone() } else { format!("{name}: {part}") };
                if round > 0 {
                    answer.series.entry(key).or_default().push(nanos(time));
                }
            }
            true
        });
    }
    answer
}

fn throughput(seconds: f64, plan: &Plan) -> Answer {
    let mut answer = Answer::default();
    for workers in [1_usize, 2, 4, 8] {
        for name in contender::names(plan) {
            if answer.errors.contains_key(&name) {
                continue;
            }
            match rate(&name, plan, workers, seconds) {
                Ok(rate) => answer.series.entry(name).or_default().push(rate),
                Err(error) => drop(answer.errors.insert(name, format!("{error:#}"))),
            }
        }
        if let [program, rest @ ..] = &plan.floor[..] {
            let name = "floor with cgroups, resident".to_owned();
            let mut command = Program::new(program);
            let seconds = (seconds.ceil()).to_string();
            let mode = ["--cgroups", "--seconds", &seconds, "--parallel", &workers.to_string()];
            command.args(mode).args(rest).stderr(Stdio::null());
            let said = command.output().ok().and_then(|out| String::from_utf8(out.stdout).ok());
            match said.and_then(|text| text.trim().parse().ok()) {
                Some(rate) => answer.series.entry(name).or_default().push(rate),
                None => drop(answer.errors.insert(name, "the floor failed".to_owned())),
            }
        }
    }
    answer
}

fn rate(name: &str, plan: &Plan, workers: usize, seconds: f64) -> Result<f64> {
    let contenders: Result<Vec<_>> = (0..workers).map(|_| contender::make(name, plan)).collect();
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let (began, end) = (Instant::now(), Duration::from_secs_f64(seconds));
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let work = |mut contender: Contender| {
            let (done, stop) = (&done, &stop);
            scope.spawn(move || {
                while began.elapsed() < end && !stop.load(Ordering::Relaxed) {
                    if let Err(error) = contender(&mut Series::default()) {
                        stop.store(true, Ordering::Relaxed);
                        return Err(error);
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        };
        let threads: Vec<_> = contenders.into_iter().flatten().map(work).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let elapsed = began.elapsed();
    results.into_iter().collect::<Result<()>>()?;
    Ok(f64::from(u32::try_from(done.into_inner())?) / elapsed.as_secs_f64())
}

/// Suspends and resumes a sandbox with 10 processes, and the same by the bare freezer write.
fn suspend(count: usize, plan: &Plan) -> Result<Answer> {
    let mut answer = Answer::default();
    let crowd = "for i in 1 2 3 4 5 6 7 8 9; do sleep 1000 & done; wait";
    let runtime = contender::runtime()?;
    let backend = LinuxBackend::new()?;
    let sandbox = runtime.block_on(async {
        let sandbox = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await?;
        anyhow::Ok(Arc::new(sandbox))
    })?;
    let (running, command) = (sandbox.clone(), Command::new("/bin/sh").args(["-c", crowd]));
    let crowded = runtime.block_on(async move {
        running.start(&command, &ExecContext::default(), warren::backend::linux::Stdio::Pipes).await
    })?;
    std::thread::sleep(Duration::from_millis(300));
    let mut daemon = match Client::unix(&plan.socket) {
        Ok(client) => Some(client),
        Err(error) => {
            answer.errors.insert("suspend, daemon".to_owned(), format!("{error:#}"));
            None
        }
    };
    let mut acquired = None;
    if let Some(client) = &mut daemon {
        let held = client.create(false)?;
        let crowd = format!("setsid sh -c '{crowd}' >/dev/null 2>&1 </dev/null & sleep 0.3");
        client.exec(&held.sandbox, "/bin/sh", &["-c", &crowd])?;
        acquired = Some(held);
    }
    let rest = || std::thread::sleep(REST);
    for _ in 0..count {
        rest();
        let began = Instant::now();
        runtime.block_on(sandbox.suspend())?;
        note(&mut answer, "suspend, library", began);
        rest();
        let began = Instant::now();
        runtime.block_on(sandbox.resume())?;
        note(&mut answer, "resume, library", began);
        if let (Some(client), Some(held)) = (&mut daemon, &acquired) {
            for (name, verb) in [("suspend, daemon", "suspend"), ("resume, daemon", "resume")] {
                rest();
                let began = Instant::now();
                client.change(&held.session, verb)?;
                note(&mut answer, name, began);
            }
        }
        if let Some(program) = plan.floor.first() {
            let out = Program::new(program)
                .args(["--freeze", "1", "--tasks", "10", "--rest", "40"])
                .output()?;
            let text = String::from_utf8(out.stdout)?;
            for (name, part) in
                ["freeze, bare", "thaw, bare"].into_iter().zip(text.split_whitespace())
            {
                answer.series.entry(name.to_owned()).or_default().push(part.parse()?);
            }
        }
    }
    if let (Some(client), Some(held)) = (&mut daemon, &acquired) {
        client.destroy(&held.sandbox)?;
    }
    drop(crowded);
    runtime.block_on(sandbox.destroy())?;
    Ok(answer)
}

fn note(answer: &mut Answer, name: &str, began: Instant) {
    answer.series.entry(name.to_owned()).or_default().push(nanos(began.elapsed()));
}

/// Bytes per second of one command's output, each way.
fn stream(bytes: u64, plan: &Plan) -> Answer {
    let mut answer = Answer::default();
    let count = bytes.to_string();
    for _ in 0..3 {
        for (name, measure) in [
            ("stream, plain pipe", pipe as fn(&str, &Plan) -> Result<(u64, Duration)>),
            ("stream, library", library_stream),
            ("stream, daemon", daemon_stream),
        ] {
            match measure(&count, plan) {
                Ok((read, took)) if read == bytes => {
                    #[expect(clippy::cast_precision_loss, reason = "a rate needs no more")]
                    let rate = bytes as f64 / took.as_secs_f64();
                    answer.series.entry(name.to_owned()).or_default().push(rate);
                }
                Ok((read, _)) => {
                    drop(answer.errors.insert(name.to_owned(), format!("{read} bytes came")))
                }
                Err(error) => drop(answer.errors.insert(name.to_owned(), format!("{error:#}"))),
            }
        }
    }
    answer
}

/// A command's output, whole and once, to a client on the daemon's socket.
fn daemon_stream(bytes: &str, plan: &Plan) -> Result<(u64, Duration)> {
    let mut client = Client::unix(&plan.socket)?;
    let sandbox = client.create_chatty()?;
    let began = Instant::now();
    let total = client.follow(&sandbox, "/usr/bin/head", &["-c", bytes, "/dev/zero"]);
    let took = began.elapsed();
    client.destroy(&sandbox)?;
    Ok((total?, took))
}

fn pipe(bytes: &str, _plan: &Plan) -> Result<(u64, Duration)> {
    let began = Instant::now();
    let mut child =
        Program::new("head").args(["-c", bytes, "/dev/zero"]).stdout(Stdio::piped()).spawn()?;
    let mut out = child.stdout.take().context("a pipe")?;
    let (mut buffer, mut total) = (vec![0; 65536], 0);
    loop {
        match out.read(&mut buffer)? {
            0 => break,
            read => total += read as u64,
        }
    }
    child.wait()?;
    Ok((total, began.elapsed()))
}

fn library_stream(bytes: &str, _plan: &Plan) -> Result<(u64, Duration)> {
    let backend = LinuxBackend::new()?;
    contender::runtime()?.block_on(async {
        let mut spec = SandboxSpec::default();
        spec.limits.max_output_bytes = None;
        let sandbox = backend.create(&spec, &CreateOptions::default()).await?;
        let (sender, mut receiver) = tokio::sync::mpsc::channel(64);
        let count = async {
            let mut total = 0;
            while let Some(output) = receiver.recv().await {
                if let StreamOutput::Stdout(bytes) = output {
                    total += bytes.len() as u64;
                }
            }
            total
        };
        let command = Command::new("/usr/bin/head").args(["-c", bytes, "/dev/zero"]);
        // What is handed on need not be kept as well.
        let context = ExecContext { capture_stdout: false, ..ExecContext::default() };
        let began = Instant::now();
        let (ran, total) = tokio::join!(sandbox.exec_streaming(&command, &context, sender), count);
        let took = began.elapsed();
        sandbox.destroy().await?;
        ran?;
        Ok((total, took))
    })
}

#[expect(clippy::cast_precision_loss, reason = "nanoseconds of minutes fit into 53 bits")]
fn nanos(time: Duration) -> f64 {
    time.as_nanos() as f64
}
