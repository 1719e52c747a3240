//! What is noted: who asked for what and what became of it, never what it carried.

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use warren::{BarredDestinations, Denial, ExecCause};

use super::strangers::Strangers;
use crate::keys::hex;
use crate::principal::split;

/// How much of one text is noted.
const MAX_TEXT: usize = 1 << 10;
/// How much of a command line is noted.
const MAX_COMMAND: usize = 4 << 10;
/// How many names of variables are.
const MAX_NAMES: usize = 64;
/// How many of the things that walls refused to a command are noted, and how much of the words for each.
const MAX_REFUSALS: usize = 16;
const MAX_REFUSAL: usize = 256;

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Entry {
    /// A daemon began to write.
    Start(Start),
    /// A daemon ended, and had noted everything.
    Stop {
        /// How many entries it noted.
        noted: u64,
    },
    /// A request was answered, whatever the answer.
    Call(Box<Call>),
    /// A request was refused: nobody known, not allowed, nothing there for this caller, or too much.
    Denial(Box<Call>),
    /// A command is about to be run.
    Exec(Box<Exec>),
    /// A command ended, or came to nothing.
    End(Box<End>),
    /// A sandbox was refused destinations, whether or not a command failed.
    Barred(Box<Barred>),
    /// A sandbox had ended, with whatever ran in it, while no daemon was there.
    Gone(Place),
    /// Requests of nobody known, of which there were too many to write each.
    Strangers(Box<Strangers>),
}

/// What a daemon found when it began to write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// Which log this is; its first line vouches for it by the key.
    pub chain: String,
    /// The daemon's version.
    pub version: String,
    /// In which state the log was.
    pub found: Found,
    /// What followed the last whole line of the file before, if the daemon before was cut off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub torn: Option<Torn>,
}

/// In which state a daemon found the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Found {
    /// There was none.
    New,
    /// As the daemon before left it.
    Intact,
    /// With a last line that is not whole: that daemon was cut off.
    Torn,
    /// Shorter than, or other than, what had been sealed.
    Changed,
    /// With a seal that the key did not make, or none.
    Unsealed,
}

/// The beginning of a line that was never finished.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Torn {
    /// How long it is.
    pub bytes: u64,
    /// Its digest.
    pub sha256: String,
}

/// A request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Call {
    /// The name of the request, which its answer has as well.
    pub request: String,
    /// Who asked, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// As which client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// By which key; its name, never itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// From where.
    pub peer: String,
    /// What was asked for.
    pub method: String,
    /// Of what. What servers inside a sandbox are asked for is not ours to note.
    pub path: String,
    /// Of which file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Which sandbox it was about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// Which session it was about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Which port inside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The answer, or none if the caller hung up before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// The stable name of what went wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Whether it was about what is somebody else's. The caller was told that it does not exist.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub foreign: bool,
    /// How long it took, to the first byte of the answer.
    pub elapsed_ms: u64,
}

/// A command. Its environment's values and what it reads are never noted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Exec {
    /// The request that asked for it, or the build.
    pub request: String,
    /// Whose it is.
    pub tenant: String,
    /// Where it runs.
    pub sandbox: String,
    /// Its name, if it can be asked for by one, or that of the shell that it runs in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Program and arguments, as far as they are noted.
    pub command: Vec<String>,
    /// How many there are, if some are left out or shortened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments: Option<usize>,
    /// The digest of all of them, each with a NUL after it.
    pub sha256: String,
    /// Where it begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// The names of the variables that were set for it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub variables: Vec<String>,
}

/// A sandbox, and whose it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Place {
    /// Whose.
    pub tenant: String,
    /// As which client.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub client: String,
    /// Which.
    pub sandbox: String,
}

impl Place {
    /// Notes a sandbox of a client, as its manager names that.
    pub(crate) fn new(sandbox: &str, client: &str) -> Self {
        let (tenant, client) = split(client);
        let (tenant, client) = (tenant.to_owned(), client.to_owned());
        Self { tenant, client, sandbox: sandbox.to_owned() }
    }
}

/// What became of a command. What it wrote is never noted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct End {
    /// The request that asked for it, or the build; absent of a shell, which serves many.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub request: String,
    /// Where it ran.
    #[serde(flatten)]
    pub place: Place,
    /// As in its [`Exec`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// How it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<ExecCause>,
    /// Its exit code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The stable name of why it was not started, or of what ended first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// How long it took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub elapsed_ms: Option<u64>,
    /// When its end was seen, if that was not just before this was noted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
    /// What walls refused to it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub denials: Vec<Refusal>,
    /// How many more of that there are.
    #[serde(skip_serializing_if = "is_zero")]
    pub more_denials: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands it by reference")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// Something that a wall refused to a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Which wall.
    pub wall: String,
    /// What was refused.
    pub what: String,
    /// By what.
    pub by: String,
    /// How often.
    pub count: u32,
}

impl End {
    /// Notes what walls refused, as far as there is room.
    pub(crate) fn denials(mut self, denials: &[Denial]) -> Self {
        let noted = denials.iter().take(MAX_REFUSALS).map(|denial| Refusal {
            wall: cut(&denial.wall, MAX_REFUSAL).to_owned(),
            what: cut(&denial.what, MAX_REFUSAL).to_owned(),
            by: cut(&denial.by, MAX_REFUSAL).to_owned(),
            count: denial.count,
        });
        self.denials = noted.collect();
        self.more_denials = denials.len() - self.denials.len();
        self
    }
}

/// What a sandbox was refused to reach, summed up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Barred {
    /// Which sandbox.
    #[serde(flatten)]
    pub place: Place,
    /// What, why and how often.
    #[serde(flatten)]
    pub barred: BarredDestinations,
}

impl Exec {
    /// Notes a command line, however long it is.
    pub(crate) fn command<'a>(mut self, words: impl Iterator<Item = &'a str>) -> Self {
        let (mut digest, mut room, mut count, mut whole) = (Sha256::new(), MAX_COMMAND, 0, true);
        for word in words {
            digest.update(word.as_bytes());
            digest.update([0]);
            count += 1;
            if room == 0 {
                whole = false;
                continue;
            }
            let kept = cut(word, room);
            whole &= kept.len() == word.len();
            // An empty word takes room as well, so that their number is bounded.
            room = room.saturating_sub(kept.len().max(16));
            self.command.push(kept.to_owned());
        }
        self.sha256 = hex(&digest.finalize());
        self.arguments = (!whole).then_some(count);
        self
    }

    /// Notes the names of variables.
    pub(crate) fn variables<'a>(mut self, names: impl Iterator<Item = &'a str>) -> Self {
        self.variables = names.take(MAX_NAMES).map(|name| cut(name, 128).to_owned()).collect();
        self.variables.sort();
        self
    }
}

/// Returns as much of a text as is noted.
pub(crate) fn bounded(text: &str) -> String {
    cut(text, MAX_TEXT).to_owned()
}

fn cut(text: &str, room: usize) -> &str {
    let end = (0..=room.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// A line of the log.
#[derive(Debug, Serialize)]
pub(super) struct Line<'a> {
    pub(super) seq: u64,
    pub(super) prev: &'a str,
    pub(super) time: String,
    #[serde(flatten)]
    pub(super) entry: &'a Entry,
}

pub(super) fn written(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Millis, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_is_noted_as_far_as_there_is_room_and_its_digest_is_of_all() {
        let short = Exec::default().command(["sh", "-c", "true"].into_iter());
        assert_eq!(short.command, ["sh", "-c", "true"]);
        assert_eq!(short.arguments, None);
        let long = "ä".repeat(MAX_COMMAND);
        let cut = Exec::default().command(["echo", &long, "more"].into_iter());
        assert_eq!((cut.command.len(), cut.arguments), (2, Some(3)));
        assert!(cut.command.iter().map(String::len).sum::<usize>() <= MAX_COMMAND);
        let other = Exec::default().command(["echo", &long, "less"].into_iter());
        assert_eq!(cut.command, other.command);
        assert_ne!(cut.sha256, other.sha256);
        let split = Exec::default().command(["a", "b"].into_iter());
        assert_ne!(split.sha256, Exec::default().command(["ab"].into_iter()).sha256);
        let many = Exec::default().command(std::iter::repeat_n("", 1_000_000));
        assert!(many.command.len() <= MAX_COMMAND && many.arguments == Some(1_000_000));
    }
}
