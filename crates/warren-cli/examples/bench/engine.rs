//! A container engine that commits what was changed, beside Warren's snapshots.

use std::process::{Command as Program, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use crate::{Answer, note};

/// The commands of one engine, about one container of its own that `bench/run` made.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Engine {
    name: String,
    /// Writes `{}` new bytes to one file of the container.
    change: Vec<String>,
    /// Makes an image of what was changed.
    commit: Vec<String>,
    /// Starts a container of that image, runs a command in it and removes it; none where it cannot.
    run: Vec<String>,
    /// Removes the image.
    forget: Vec<String>,
}

/// The engines that have not failed.
#[derive(Debug)]
pub(crate) struct Engines(Vec<Engine>);

impl Engines {
    pub(crate) fn new(engines: &[Engine]) -> Self {
        Self(engines.to_vec())
    }

    /// Commits `size` changed bytes with each, and starts what was committed `runs` times.
    pub(crate) fn measure(&mut self, size: usize, label: &str, runs: usize, answer: &mut Answer) {
        self.0.retain(|engine| match engine.measure(size, label, runs, answer) {
            Ok(()) => true,
            Err(error) => {
                answer.series.retain(|key, _| !key.starts_with(&*engine.name));
                answer.errors.insert(engine.name.clone(), format!("{error:#}"));
                false
            }
        });
    }
}

impl Engine {
    fn measure(&self, size: usize, label: &str, runs: usize, answer: &mut Answer) -> Result<()> {
        let size = size.to_string();
        let change: Vec<_> = self.change.iter().map(|word| word.replace("{}", &size)).collect();
        execute(&change)?;
        let began = Instant::now();
        execute(&self.commit)?;
        note(answer, &format!("{} commit, {label} changed", self.name), began);
        for _ in 0..if self.run.is_empty() { 0 } else { runs } {
            let began = Instant::now();
            execute(&self.run)?;
            note(answer, &format!("{} run of what was committed", self.name), began);
        }
        execute(&self.forget)
    }
}

/// Runs a command that must succeed.
fn execute(argv: &[String]) -> Result<()> {
    let (program, rest) = argv.split_first().context("an empty command")?;
    let output = Program::new(program).args(rest).stdin(Stdio::null()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or("it said nothing");
    ensure!(output.status.success(), "{}: {last}", argv.join(" "));
    Ok(())
}
