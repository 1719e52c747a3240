//! Who keeps account of what commands did, whoever ran them.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::{
    Command, Denial, ExecCause, ExecEnd, ExecId, ExecReport, Result, SandboxError, SandboxId,
};

/// One run of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run<'a> {
    /// Where it runs.
    pub sandbox: &'a SandboxId,
    /// Whose sandbox that is, as its manager names clients; empty if it is nobody's.
    pub client: &'a str,
    /// The request that it serves, as [`ExecContext`](super::ExecContext) says; may be empty.
    pub request: &'a str,
    /// Its name, if it has one.
    pub name: Option<&'a ExecId>,
}

/// What became of a command.
#[derive(Debug, Clone, Copy)]
pub enum Outcome<'a> {
    /// It ended.
    Ended {
        /// How.
        cause: &'a ExecCause,
        /// Its exit code.
        exit_code: i32,
        /// How long it took.
        duration: Duration,
        /// When that was seen, if not just now.
        at: Option<DateTime<Utc>>,
        /// What walls refused to it.
        denials: &'a [Denial],
    },
    /// It could not be started, or its sandbox ended first.
    Failed(&'a SandboxError),
    /// Whoever waited for it does so no more, and it ended with that.
    GivenUp,
}

impl<'a> Outcome<'a> {
    /// Says how a command on its own ended.
    pub fn of(end: &'a Result<ExecEnd>) -> Self {
        match end {
            Ok(end) => Self::Ended {
                cause: &end.cause,
                exit_code: end.exit_code,
                duration: end.duration,
                at: Some(end.ended_at),
                denials: &end.denials,
            },
            Err(error) => Self::Failed(error),
        }
    }

    /// Says how a command ended that was waited for.
    pub fn of_report(report: &'a Result<ExecReport>) -> Self {
        match report {
            Ok(ExecReport { output, cause, denials }) => Self::Ended {
                cause,
                exit_code: output.exit_code,
                duration: output.duration,
                at: None,
                denials,
            },
            Err(error) => Self::Failed(error),
        }
    }
}

/// Why a destination was refused to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BarredWhy {
    /// Nobody allowed it.
    NotAllowed,
    /// It is no public address, or leads to none.
    NotPublic,
    /// Nobody can tell who is meant by what was said there.
    Unclear,
}

/// A destination that was refused to a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarredDestination {
    /// Its name or address.
    pub to: String,
    /// The port; none of a name that was only asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Why.
    pub why: BarredWhy,
    /// How often.
    pub count: u64,
}

/// What was refused to one sandbox over a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarredDestinations {
    /// When the first of it was.
    pub since: DateTime<Utc>,
    /// When the last was.
    pub until: DateTime<Utc>,
    /// Each destination once, in the order in which they were met.
    pub list: Vec<BarredDestination>,
    /// How often others were refused, for which there was no room.
    pub others: u64,
}

/// Keeps account of what commands did. It is told in passing, by whoever has no time: nothing here waits for a disk.
#[async_trait]
pub trait Witness: Send + Sync + fmt::Debug {
    /// Hears of a command that a template has run, before it is; an error keeps it from that.
    async fn begins(&self, run: &Run<'_>, command: &Command) -> Result<()>;

    /// Hears what became of a command; returns whether account of that is kept, which it is not once the end is near.
    fn ended(&self, run: &Run<'_>, outcome: &Outcome<'_>) -> bool;

    /// Hears what a sandbox was refused, whether or not a command failed.
    fn barred(&self, sandbox: &SandboxId, client: &str, barred: &BarredDestinations);

    /// Hears that a sandbox had ended, with whatever ran in it, while no manager was there.
    fn gone(&self, sandbox: &SandboxId, client: &str);
}
