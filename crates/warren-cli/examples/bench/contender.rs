//! What is measured: each contender does its work once and notes how long it took.

use std::process::{Command as Program, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use tokio::runtime::Runtime;
use warren::backend::LinuxBackend;
use warren::{Command, CreateOptions, ExecContext, Sandbox as _, SandboxSpec};

use crate::Plan;
use crate::client::Client;

/// Times of one go, by the name of the part; the whole has none.
#[derive(Debug, Default)]
pub(crate) struct Series(pub(crate) Vec<(&'static str, Duration)>);

impl Series {
    fn note(&mut self, part: &'static str, began: Instant) {
        self.0.push((part, began.elapsed()));
    }
}

/// Does its work once.
pub(crate) type Contender = Box<dyn FnMut(&mut Series) -> Result<()> + Send>;

const TRUE: &str = "/bin/true";

/// Lists all contenders of a plan, in order.
pub(crate) fn names(plan: &Plan) -> Vec<String> {
    plan.commands.iter().map(|named| &named.name).chain(&plan.paths).cloned().collect()
}

/// Makes a contender, with connections and sandboxes of its own.
pub(crate) fn make(name: &str, plan: &Plan) -> Result<Contender> {
    if let Some(named) = plan.commands.iter().find(|named| named.name == name) {
        return Ok(command(named.argv.clone()));
    }
    match name {
        "library, cold" => library_cold(),
        "library, exec" => library_exec(),
        "daemon, cold" => daemon_cold(&plan.socket),
        "daemon, exec by unix socket" => daemon_exec(Client::unix(&plan.socket)?),
        "daemon, exec by TCP" => daemon_exec(Client::tcp(&plan.address, &plan.key)?),
        "daemon, pool claim and exec" => pool(&plan.pool_socket),
        "daemon, cold, one request" => one_request(&plan.socket),
        "daemon, pool, one request" => pool_one_request(&plan.pool_socket),
        _ => bail!("there is no path `{name}`"),
    }
}

/// Returns a runtime of one thread.
pub(crate) fn runtime() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// All share one, as all that embed the library would.
fn backend() -> Result<LinuxBackend> {
    static BACKEND: OnceLock<Result<LinuxBackend, String>> = OnceLock::new();
    let made = BACKEND.get_or_init(|| LinuxBackend::new().map_err(|error| error.to_string()));
    made.clone().map_err(|error| anyhow!(error))
}

/// A program, spawned without copying this process (posix_spawn shares its memory until the exec).
fn command(argv: Vec<String>) -> Contender {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    Box::new(move |series| {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed).to_string();
        let argv: Vec<String> = argv.iter().map(|arg| arg.replace("{}", &number)).collect();
        let (program, args) = argv.split_first().context("an empty command")?;
        let mut command = Program::new(program);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let began = Instant::now();
        let status = command.status().with_context(|| format!("start {program}"))?;
        series.note("", began);
        if status.success() {
            return Ok(());
        }
        // Once more, to hear why.
        let said = Program::new(program).args(args).stdin(Stdio::null()).output()?;
        let said = [said.stderr, said.stdout].concat();
        let said = String::from_utf8_lossy(&said);
        let last = said.trim().lines().last().unwrap_or("it said nothing").to_owned();
        bail!("{status}: {last}")
    })
}

fn library_cold() -> Result<Contender> {
    let (backend, runtime) = (backend()?, runtime()?);
    Ok(Box::new(move |series| {
        runtime.block_on(async {
            let all = Instant::now();
            let sandbox =
                backend.create(&SandboxSpec::default(), &CreateOptions::default()).await?;
            series.note("create", all);
            let began = Instant::now();
            let ran = sandbox.exec(&Command::new(TRUE), &ExecContext::default()).await?;
            series.note("first exec", began);
            let began = Instant::now();
            sandbox.destroy().await?;
            series.note("destroy", began);
            series.note("", all);
            check(i64::from(ran.exit_code))
        })
    }))
}

fn library_exec() -> Result<Contender> {
    let (backend, runtime) = (backend()?, runtime()?);
    let (spec, options) = (SandboxSpec::default(), CreateOptions::default());
    let sandbox = runtime.block_on(backend.create(&spec, &options))?;
    Ok(Box::new(move |series| {
        let began = Instant::now();
        let command = Command::new(TRUE);
        let ran = runtime.block_on(sandbox.exec(&command, &ExecContext::default()))?;
        series.note("", began);
        check(i64::from(ran.exit_code))
    }))
}

fn check(exit_code: i64) -> Result<()> {
    if exit_code == 0 { Ok(()) } else { bail!("the command exited with {exit_code}") }
}

fn daemon_cold(socket: &str) -> Result<Contender> {
    let mut client = Client::unix(socket)?;
    Ok(Box::new(move |series| {
        let all = Instant::now();
        let held = client.create(false)?;
        series.note("create", all);
        let began = Instant::now();
        client.exec(&held.sandbox, TRUE, &[])?;
        series.note("first exec", began);
        let began = Instant::now();
        client.destroy(&held.sandbox)?;
        series.note("destroy", began);
        series.note("", all);
        Ok(())
    }))
}

/// A sandbox of the daemon that is ended with the contender.
struct Held(Client, String);

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.0.destroy(&self.1);
    }
}

fn daemon_exec(mut client: Client) -> Result<Contender> {
    let sandbox = client.create(false)?.sandbox;
    let mut held = Held(client, sandbox);
    Ok(Box::new(move |series| {
        let Held(client, sandbox) = &mut held;
        let began = Instant::now();
        client.exec(sandbox, TRUE, &[])?;
        series.note("", began);
        Ok(())
    }))
}

fn pool(socket: &str) -> Result<Contender> {
    let mut client = Client::unix(socket)?;
    Ok(Box::new(move |series| {
        // What is measured is a claim, not what happens when the pool has run dry.
        await_pool(&mut client, 2)?;
        let all = Instant::now();
        let held = client.create(true)?;
        series.note("claim", all);
        client.exec(&held.sandbox, TRUE, &[])?;
        series.note("", all);
        client.destroy(&held.sandbox)?;
        // Filling it again is not to fall on whoever comes next.
        await_pool(&mut client, POOL)
    }))
}

/// The end of the sandbox is not the caller's to wait for; whoever comes next pays for it.
fn one_request(socket: &str) -> Result<Contender> {
    let mut client = Client::unix(socket)?;
    Ok(Box::new(move |series| {
        let began = Instant::now();
        client.run(TRUE)?;
        series.note("", began);
        Ok(())
    }))
}

fn pool_one_request(socket: &str) -> Result<Contender> {
    let mut client = Client::unix(socket)?;
    Ok(Box::new(move |series| {
        await_pool(&mut client, 2)?;
        let began = Instant::now();
        client.run(TRUE)?;
        series.note("", began);
        await_pool(&mut client, POOL)
    }))
}

/// How many `bench/run` has the daemon keep warm.
const POOL: u64 = 8;

fn await_pool(client: &mut Client, size: u64) -> Result<()> {
    let patience = Instant::now() + Duration::from_secs(5);
    while client.warm()? < size && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
