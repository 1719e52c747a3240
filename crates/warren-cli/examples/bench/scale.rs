//! How cost grows with what is alive already, and with what a sandbox is given.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use tokio::runtime::Runtime;
use warren::backend::LinuxBackend;
use warren::backend::linux::LinuxSandbox;
use warren::{Command, CreateOptions, ExecContext, Sandbox as _, SandboxSpec};

use crate::{Answer, Plan, contender, note};

/// How often each point is measured.
const TRIES: usize = 20;

/// Measures a sandbox beside 1, 10, 100, ... idle ones, and one with binds.
pub(crate) fn scale(counts: &[usize], _plan: &Plan) -> Result<Answer> {
    let (backend, runtime) = (LinuxBackend::new()?, contender::runtime()?);
    let mut answer = Answer::default();
    let spec = SandboxSpec::default();
    for count in [0, 10, 50] {
        let spec = with_binds(&spec, count)?;
        measure(&backend, &runtime, &spec, &mut answer, &format!("{count} binds"))?;
    }
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
        measure(&backend, &runtime, &spec, &mut answer, &format!("{count} live"))?;
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

fn measure(
    backend: &LinuxBackend,
    runtime: &Runtime,
    spec: &SandboxSpec,
    answer: &mut Answer,
    name: &str,
) -> Result<()> {
    for _ in 0..TRIES {
        runtime.block_on(async {
            let began = Instant::now();
            let sandbox = backend.create(spec, &CreateOptions::default()).await?;
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
