//! What snapshots and forks cost, beside copies of the same files.
//!
//! A fork stands on a base of a gigabyte (or of nothing) with a megabyte changed; a snapshot holds what was
//! changed. Beside them `cp -a` of the base, `cp -a` of the changed files, a container engine's commit of as
//! many bytes, and what such a one does at least: a tar of the changed files and its digest.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::Command as Program;
use std::time::Instant;

use anyhow::{Result, ensure};
use warren::backend::LinuxBackend;
use warren::layers::Layers;
use warren::{
    Base, Command, CreateOptions, ExecContext, LayerId, ResourceLimits, Sandbox as _, SandboxSpec,
};

use crate::engine::Engines;
use crate::{Answer, Plan, contender, note};

/// Sizes of what is changed before a snapshot.
const CHANGED: [(&str, usize); 4] =
    [("64 KiB", 64 << 10), ("1 MiB", 1 << 20), ("16 MiB", 16 << 20), ("64 MiB", 64 << 20)];

/// Measures `count` forks, on a base of `gigabyte` bytes.
pub(crate) fn snapshot(count: usize, bytes: usize, plan: &Plan) -> Result<Answer> {
    let mut answer = Answer::default();
    let mut engines = Engines::new(&plan.engines);
    let directory = tempfile::tempdir()?;
    let layers = Layers::open(directory.path().join("storage"))?;
    let backend = LinuxBackend::with_layers(None, layers.clone())?;
    let runtime = contender::runtime()?;
    let (large, _held) = base(&layers, bytes)?;
    let limits = ResourceLimits { max_write_bytes: Some(200 << 20), ..ResourceLimits::default() };
    let spec = SandboxSpec { limits, ..SandboxSpec::default() };
    let on = |base: Base| CreateOptions { base, ..CreateOptions::default() };
    let run = |sandbox: &warren::backend::LinuxSandbox, script: &str| {
        let command = Command::new("/bin/sh").args(["-c", script]);
        let output = runtime.block_on(sandbox.exec(&command, &ExecContext::default()))?;
        ensure!(output.exit_code == 0, "{script}: {}", String::from_utf8_lossy(&output.stderr));
        anyhow::Ok(())
    };

    let mut grounds = Vec::new();
    for (name, layers) in [("over 1 GiB", vec![large.clone()]), ("over nothing", Vec::new())] {
        let base = Base { layers, ..Base::default() };
        let sandbox = runtime.block_on(backend.create(&spec, &on(base)))?;
        run(&sandbox, "head -c 1048576 /dev/urandom > changed")?;
        let captured = runtime.block_on(sandbox.capture())?;
        grounds.push((format!("fork and exec, {name}"), sandbox, captured));
    }
    let source = layers.path(&large);
    let copy = directory.path().join("copy");
    for round in 0..count {
        for (name, _, captured) in &grounds {
            let began = Instant::now();
            let fork = runtime.block_on(backend.create(&spec, &on(captured.base.clone())))?;
            run(&fork, "test -s changed")?;
            note(&mut answer, name, began);
            runtime.block_on(fork.destroy())?;
        }
        // It takes long, and is the same each time.
        if round % 25 == 0 {
            let began = Instant::now();
            copied(&source, &copy)?;
            note(&mut answer, "cp -a of 1 GiB", began);
            std::fs::remove_dir_all(&copy)?;
        }
    }

    for (name, size) in CHANGED.into_iter().filter(|(_, size)| *size <= bytes) {
        let rounds = (count / 5).clamp(2, 20);
        let sandbox = runtime.block_on(backend.create(&spec, &on(Base::default())))?;
        // What the chain has already: a snapshot costs what changed since.
        run(
            &sandbox,
            "mkdir old; for i in $(seq 500); do echo $i > old/$i; done; head -c 33554432 /dev/urandom > old/large",
        )?;
        runtime.block_on(sandbox.capture())?;
        for _ in 0..rounds {
            run(&sandbox, &format!("head -c {size} /dev/urandom > changed"))?;
            let began = Instant::now();
            let captured = runtime.block_on(sandbox.capture())?;
            note(&mut answer, &format!("snapshot, {name} changed"), began);
            let paused = captured.paused.as_secs_f64() * 1e9;
            answer.series.entry(format!("stands still, {name} changed")).or_default().push(paused);
            // The others, on a copy of the same files in memory.
            let memory = tempfile::tempdir_in("/dev/shm")?;
            std::fs::write(memory.path().join("changed"), random(size)?)?;
            let began = Instant::now();
            copied(memory.path(), &copy)?;
            note(&mut answer, &format!("cp -a, {name}"), began);
            std::fs::remove_dir_all(&copy)?;
            let began = Instant::now();
            committed(memory.path(), directory.path())?;
            note(&mut answer, &format!("tar and sha256sum, {name}"), began);
            engines.measure(size, name, 1, &mut answer);
        }
        runtime.block_on(sandbox.destroy())?;
    }
    for (_, sandbox, _) in grounds {
        runtime.block_on(sandbox.destroy())?;
    }
    Ok(answer)
}

fn random(size: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; size];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Makes a layer of this many bytes.
fn base(layers: &Layers, bytes: usize) -> Result<(LayerId, warren::layers::Held)> {
    let staging = layers.begin()?;
    let piece = random((4 << 20).min(bytes))?;
    for number in 0..bytes / piece.len() {
        let mut file = File::create(staging.path().join(format!("file-{number}")))?;
        // Each is another, so that nothing can be shared.
        file.write_all(&number.to_le_bytes())?;
        file.write_all(&piece)?;
    }
    Ok(staging.commit()?)
}

fn copied(from: &Path, to: &Path) -> Result<()> {
    let status = Program::new("cp").arg("-a").arg(from).arg(to).status()?;
    ensure!(status.success(), "cp failed");
    Ok(())
}

/// Does what an engine does for a commit, without the engine.
fn committed(from: &Path, to: &Path) -> Result<()> {
    let script = "tar -cf \"$2/layer.tar\" -C \"$1\" . && sha256sum \"$2/layer.tar\" > /dev/null";
    let status = Program::new("sh").args(["-c", script, "sh"]).arg(from).arg(to).status()?;
    ensure!(status.success(), "tar failed");
    Ok(())
}
