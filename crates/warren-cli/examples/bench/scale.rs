//! How cost grows with what is alive already, and with what a sandbox is given.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use warren::backend::LinuxBackend;
use warren::backend::linux::LinuxSandbox;
use warren::layers::Layers;
use warren::{Base, Command, CreateOptions, ExecContext, Sandbox as _, SandboxSpec};

use crate::client::Client;
use crate::{Answer, Plan, contender, note};

/// How often each point is measured.
const TRIES: usize = 20;

/// Measures a sandbox beside 1, 10, 100, ... idle ones, in the library and in a daemon; one with binds, one
/// on layers, and one in which many commands run.
pub(crate) fn scale(counts: &[usize], plan: &Plan) -> Result<Answer> {
    let (backend, runtime) = (LinuxBackend::new()?, contender::runtime()?);
    let mut answer = Answer::default();
    let spec = SandboxSpec::default();
    for count in [0, 10, 50] {
        let spec = with_binds(&spec, count)?;
        let options = CreateOptions::default();
        let name = format!("{count} binds");
        measure(&backend, &runtime, &spec, &options, &mut answer, &name)?;
    }
    on_layers(&runtime, &mut answer)?;
    beside_commands(&backend, &runtime, &mut answer)?;
    in_daemon(counts, plan, &mut answer)?;
    let before = available();
    let mut live: Vec<LinuxSandbox> = Vec::new();
    for &count in counts {
        while live.len() < count {
            match runtime.block_on(backend.create(&spec, &CreateOptions::default())) {
                Ok(sandbox) => live.push(sandbox),
                Err(error) => {
                    let why = format!("only {} live: {error}", live.len());
                    answer.errors.insert(format!("{count} live"), why);
                    break;
                }
            }
        }
        if live.len() < count {
            break;
        }
        let (options, name) = (CreateOptions::default(), format!("{count} live"));
        measure(&backend, &runtime, &spec, &options, &mut answer, &name)?;
    }
    if !live.is_empty() {
        let sample: Vec<f64> = live.iter().take(50).filter_map(pss).collect();
        answer.series.insert("idle: PSS in kB".to_owned(), sample);
        #[expect(clippy::cast_precision_loss, reason = "kilobytes of this machine")]
        let each = before.saturating_sub(available()) as f64 / live.len() as f64;
        answer.series.insert("idle: memory of the host in kB".to_owned(), vec![each]);
    }
    let began = Instant::now();
    for sandbox in &live {
        runtime.block_on(sandbox.destroy())?;
    }
    note(&mut answer, "destroy of all", began);
    Ok(answer)
}

fn with_binds(spec: &SandboxSpec, count: usize) -> Result<SandboxSpec> {
    let mut spec = spec.clone();
    let base = std::env::temp_dir().canonicalize()?.join("warren-bench-binds");
    for number in 0..count {
        let path: PathBuf = base.join(number.to_string());
        std::fs::create_dir_all(&path)?;
        spec.allowed_paths_ro.push(path);
    }
    Ok(spec)
}

/// Measures one that stands on what so many before it wrote, each on the one before.
fn on_layers(runtime: &Runtime, answer: &mut Answer) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let layers = Layers::open(directory.path().join("storage"))?;
    let backend = LinuxBackend::with_layers(None, layers)?;
    let spec = SandboxSpec::default();
    let (mut base, mut depth, mut held) = (Base::default(), 0, Vec::new());
    for count in [0, 10, 30] {
        while depth < count {
            let options = CreateOptions { base: base.clone(), ..CreateOptions::default() };
            let captured = runtime.block_on(async {
                let sandbox = backend.create(&spec, &options).await?;
                let write =
                    Command::new("/bin/sh").args(["-c", &format!("echo {depth} > {depth}")]);
                sandbox.exec(&write, &ExecContext::default()).await?;
                let captured = sandbox.capture().await?;
                sandbox.destroy().await?;
                anyhow::Ok(captured)
            })?;
            base = captured.base.clone();
            held.push(captured);
            depth += 1;
        }
        let options = CreateOptions { base: base.clone(), ..CreateOptions::default() };
        measure(&backend, runtime, &spec, &options, answer, &format!("{count} layers"))?;
    }
    Ok(())
}

/// Measures a command in a sandbox in which so many others run, whose output is listened to.
fn beside_commands(backend: &LinuxBackend, runtime: &Runtime, answer: &mut Answer) -> Result<()> {
    let (spec, options) = (SandboxSpec::default(), CreateOptions::default());
    runtime.block_on(async {
        let sandbox = Arc::new(backend.create(&spec, &options).await?);
        let mut open = tokio::task::JoinSet::new();
        for count in [0, 10, 50] {
            while open.len() < count {
                let (sandbox, (output, mut seen)) = (Arc::clone(&sandbox), mpsc::channel(4));
                open.spawn(async move {
                    let command = Command::new("/bin/sh").args(["-c", "echo; exec sleep 60"]);
                    let _ = sandbox.exec_streaming(&command, &ExecContext::default(), output).await;
                });
                seen.recv().await;
            }
            for _ in 0..TRIES {
                let began = Instant::now();
                sandbox.exec(&Command::new("/bin/true"), &ExecContext::default()).await?;
                note(answer, &format!("exec, {count} streams"), began);
            }
        }
        sandbox.destroy().await?;
        open.shutdown().await;
        anyhow::Ok(())
    })
}

/// Measures a daemon that has so many.
fn in_daemon(counts: &[usize], plan: &Plan, answer: &mut Answer) -> Result<()> {
    let mut client = Client::unix(&plan.socket)?;
    let mut live = Vec::new();
    for &count in counts {
        while live.len() < count {
            live.push(client.create(false)?.sandbox);
        }
        for _ in 0..TRIES {
            let began = Instant::now();
            let sandbox = client.create(false)?.sandbox;
            note(answer, &format!("create, daemon with {count}"), began);
            let began = Instant::now();
            client.exec(&sandbox, "/bin/true", &[])?;
            note(answer, &format!("exec, daemon with {count}"), began);
            let began = Instant::now();
            client.destroy(&sandbox)?;
            note(answer, &format!("destroy, daemon with {count}"), began);
        }
    }
    live.iter().try_for_each(|sandbox| client.destroy(sandbox))
}

fn measure(
    backend: &LinuxBackend,
    runtime: &Runtime,
    spec: &SandboxSpec,
    options: &CreateOptions,
    answer: &mut Answer,
    name: &str,
) -> Result<()> {
    for _ in 0..TRIES {
        runtime.block_on(async {
            let began = Instant::now();
            let sandbox = backend.create(spec, options).await?;
            note(answer, &format!("create, {name}"), began);
            let began = Instant::now();
            sandbox.exec(&Command::new("/bin/true"), &ExecContext::default()).await?;
            note(answer, &format!("exec, {name}"), began);
            let began = Instant::now();
            sandbox.destroy().await?;
            note(answer, &format!("destroy, {name}"), began);
            anyhow::Ok(())
        })?;
    }
    Ok(())
}

/// Reads how much of the machine's memory is left, in kB.
fn available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    field(&text, "MemAvailable:").unwrap_or_default()
}

/// Reads what an idle sandbox holds: its init is all that runs in it.
fn pss(sandbox: &LinuxSandbox) -> Option<f64> {
    let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", sandbox.pid())).ok()?;
    #[expect(clippy::cast_precision_loss, reason = "kilobytes of a small process")]
    field(&text, "Pss:").map(|kilobytes| kilobytes as f64)
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}
