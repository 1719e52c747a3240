//! The ways of walling a sandbox off from the host.
//!
//! Here is what they share: deciding what an exec runs as (`ExecPlan`) and keeping its output
//! within bounds (`Capture`). How the walls are built is left to each backend.

pub mod fake;
pub mod host;
pub mod landlock;
pub mod linux;
pub mod oci;

pub use fake::FakeBackend;
pub use host::{HostBackend, HostConfig};
pub use landlock::LandlockBackend;
pub use linux::{LinuxBackend, LinuxSandbox};
pub use oci::{OciBackend, OciRuntime};

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::Duration;

use crate::template;
use crate::{Command, ExecContext, ExecUser, Result, SandboxSpec, StreamOutput};

/// An exec with everything decided: what the command, its context and the spec say together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExecPlan {
    pub(crate) program: String,
    pub(crate) args: Vec<String>,
    pub(crate) workdir: PathBuf,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) stdin: Option<Vec<u8>>,
    pub(crate) timeout: Option<Duration>,
    /// Who runs it, if the spec says so.
    pub(crate) user: Option<ExecUser>,
}

impl ExecPlan {
    /// Decides. The command's own word wins over the context's, and that over the spec's; of the
    /// timeouts the shortest holds, so that nobody can extend another's.
    pub(crate) fn new(spec: &SandboxSpec, cmd: &Command, ctx: &ExecContext) -> Result<Self> {
        cmd.validate()?;
        ctx.validate()?;
        let inherited = if cmd.inherit_env { spec.environment.as_slice() } else { &[] };
        let env = inherited.iter().chain(&ctx.extra_env).cloned();
        let own = cmd.env.iter().map(|(name, value)| (name.clone(), value.clone()));
        let wall = spec.limits.max_wall_time_ms.map(Duration::from_millis);
        let user = spec.labels.iter().find(|(key, _)| key == template::USER_LABEL);
        Ok(Self {
            program: cmd.program.clone(),
            args: cmd.args.clone(),
            workdir: cmd.workdir.as_ref().or(ctx.workdir.as_ref()).unwrap_or(&spec.workdir).clone(),
            env: env.chain(own).collect(),
            stdin: cmd.stdin.clone(),
            timeout: [cmd.timeout, ctx.timeout, wall].into_iter().flatten().min(),
            user: user.map(|(_, name)| ExecUser { name: name.clone(), workdir: None }),
        })
    }
}

/// Which of its two outputs a command wrote to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    Stdout,
    Stderr,
}

/// The output of one exec, kept within its bound.
#[derive(Debug)]
pub(crate) struct Capture {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    /// What a streaming caller has yet to be sent; always empty without one.
    pub(crate) pending: VecDeque<StreamOutput>,
    left: u64,
    keep_stdout: bool,
    keep_stderr: bool,
    streams: bool,
}

/// Whether an exec may go on writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Room {
    Left,
    Exceeded,
}

impl Capture {
    pub(crate) fn new(max: Option<u64>, ctx: &ExecContext, streams: bool) -> Self {
        Self {
            stdout: Vec::new(),
            stderr: Vec::new(),
            pending: VecDeque::new(),
            left: max.unwrap_or(u64::MAX),
            keep_stdout: ctx.capture_stdout,
            keep_stderr: ctx.capture_stderr,
            streams,
        }
    }

    /// Takes what the command wrote, as far as there is room.
    pub(crate) fn take(&mut self, channel: Channel, bytes: &[u8]) -> Room {
        let room = usize::try_from(self.left).unwrap_or(usize::MAX);
        let kept = &bytes[..bytes.len().min(room)];
        self.left -= kept.len() as u64;
        if !kept.is_empty() {
            let (store, keep) = match channel {
                Channel::Stdout => (&mut self.stdout, self.keep_stdout),
                Channel::Stderr => (&mut self.stderr, self.keep_stderr),
            };
            if keep {
                store.extend_from_slice(kept);
            }
            if self.streams {
                self.pending.push_back(match channel {
                    Channel::Stdout => StreamOutput::Stdout(kept.to_vec()),
                    Channel::Stderr => StreamOutput::Stderr(kept.to_vec()),
                });
            }
        }
        if kept.len() < bytes.len() { Room::Exceeded } else { Room::Left }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_word_wins_over_the_contexts_and_that_over_the_specs() {
        let spec = SandboxSpec {
            environment: vec![("A".into(), "spec".into()), ("B".into(), "spec".into())],
            ..SandboxSpec::default()
        };
        let ctx = ExecContext {
            workdir: Some("/ctx".into()),
            extra_env: vec![("B".into(), "ctx".into()), ("C".into(), "ctx".into())],
            timeout: Some(Duration::from_secs(5)),
            ..ExecContext::default()
        };
        let plan = |cmd: &Command, ctx: &ExecContext| ExecPlan::new(&spec, cmd, ctx).unwrap();
        let env = |plan: ExecPlan| {
            plan.env.into_iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(" ")
        };

        let plain = Command::new("true");
        let bare = plan(&plain, &ExecContext::default());
        assert_eq!(bare.workdir, PathBuf::from("/workspace"));
        assert_eq!(bare.timeout, Some(Duration::from_secs(120)), "the spec's wall time");
        assert_eq!(env(bare), "A=spec B=spec");

        let within = plan(&plain, &ctx);
        assert_eq!(within.workdir, PathBuf::from("/ctx"));
        assert_eq!(within.timeout, Some(Duration::from_secs(5)));
        assert_eq!(env(within), "A=spec B=ctx C=ctx");

        let own = plain.env("C", "cmd").workdir("/cmd").timeout(Duration::from_secs(9));
        assert_eq!(plan(&own, &ctx).workdir, PathBuf::from("/cmd"));
        assert_eq!(plan(&own, &ctx).timeout, Some(Duration::from_secs(5)), "the shortest holds");
        assert_eq!(env(plan(&own, &ctx)), "A=spec B=ctx C=cmd");
        let alone = Command { inherit_env: false, ..own };
        assert_eq!(env(plan(&alone, &ctx)), "B=ctx C=cmd");
    }

    #[test]
    fn output_is_kept_up_to_the_bound_of_both_channels_together() {
        let ctx = ExecContext::default();
        let mut capture = Capture::new(Some(5), &ctx, true);
        assert_eq!(capture.take(Channel::Stdout, b"abc"), Room::Left);
        assert_eq!(capture.take(Channel::Stderr, b"de"), Room::Left, "full, and not beyond");
        assert_eq!(capture.take(Channel::Stdout, b"f"), Room::Exceeded);
        assert_eq!(
            (capture.stdout.as_slice(), capture.stderr.as_slice()),
            (&b"abc"[..], &b"de"[..])
        );
        assert_eq!(capture.pending.len(), 2, "nothing is streamed beyond the bound");

        let mut deaf = Capture::new(None, &ExecContext { capture_stdout: false, ..ctx }, false);
        deaf.take(Channel::Stdout, b"abc");
        assert!(deaf.stdout.is_empty() && deaf.pending.is_empty());
    }
}
