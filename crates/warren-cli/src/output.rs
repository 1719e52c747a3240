//! The JSON objects that `--json` prints.

use std::io::{self, IsTerminal as _, Write as _};

use serde::Serialize;
use warren::{Denial, Enforcement, ExecCause, ResourceUsage};

/// What `warren run --json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct RunReport<'a> {
    pub(crate) sandbox: &'a str,
    pub(crate) backend: &'a str,
    pub(crate) profile: &'a str,
    pub(crate) exit_code: u8,
    pub(crate) cause: &'a ExecCause,
    #[serde(flatten)]
    pub(crate) output: Output<'a>,
    pub(crate) duration_ms: u64,
    pub(crate) usage: ResourceUsage,
    pub(crate) enforced: &'a Enforcement,
    pub(crate) notes: &'a [String],
    /// What walls refused, if that was asked for.
    #[serde(skip_serializing_if = "<[Denial]>::is_empty")]
    pub(crate) denials: &'a [Denial],
}

/// Says how a command ended, if it does not say so itself, and what walls refused to it.
pub(crate) fn say_end(cause: &ExecCause, denials: &[Denial]) {
    if !matches!(cause, ExecCause::Exited { .. } | ExecCause::Signalled { .. }) {
        say(&format!("warren: ended: {cause}"));
    }
    say_denials(denials);
}

/// Says what walls refused to a command: a limit that ended it, with a hint; else what it was refused.
pub(crate) fn say_denials(denials: &[Denial]) {
    for denial in denials {
        let word = if denial.errno.is_some() { "denied" } else { "hint" };
        say(&format!("{word}: {denial}"));
    }
}

/// Says how to find out more of a command that failed and of which nothing was told, if somebody reads along.
pub(crate) fn hint_at_explain(cause: &ExecCause, denials: &[Denial]) {
    let failed = matches!(cause, ExecCause::Exited { code: 1.. } | ExecCause::Signalled { .. });
    if failed && denials.is_empty() && std::io::stderr().is_terminal() {
        say("hint: --explain tells what was refused");
    }
}

/// What the command wrote, as text and, where it is none, in base64 too.
#[derive(Debug, Serialize)]
pub(crate) struct Output<'a> {
    stdout: std::borrow::Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stdout_base64: Option<String>,
    stderr: std::borrow::Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stderr_base64: Option<String>,
}

impl<'a> Output<'a> {
    pub(crate) fn new(stdout: &'a [u8], stderr: &'a [u8]) -> Self {
        let exact = |bytes: &[u8]| std::str::from_utf8(bytes).is_err().then(|| base64(bytes));
        Self {
            stdout: String::from_utf8_lossy(stdout),
            stdout_base64: exact(stdout),
            stderr: String::from_utf8_lossy(stderr),
            stderr_base64: exact(stderr),
        }
    }
}

/// Prints one object on one line.
pub(crate) fn print_json(value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    print(&line)
}

/// Writes to stdout. A reader that has gone is no error: it has read enough.
pub(crate) fn print(bytes: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Writes one line to stderr. If nobody can read it there is nobody to tell.
///
/// Names in it may come from anybody, so nothing in it can drive the reader's terminal.
pub(crate) fn say(line: &str) {
    let _ = io::stderr().write_all(format!("{}\n", harmless(line)).as_bytes());
}

/// Lays out a table for people. Names in it may come from anybody, as in [`say`].
pub(crate) fn table(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let rows: Vec<Vec<String>> =
        std::iter::once(head.iter().map(|&cell| cell.to_owned()).collect())
            .chain(rows.into_iter().map(|row| row.iter().map(|cell| harmless(cell)).collect()))
            .collect();
    let mut widths = vec![0; head.len()];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Shows control characters instead of sending them.
fn harmless(line: &str) -> String {
    let mut shown = String::with_capacity(line.len());
    for c in line.chars() {
        match c {
            '\t' => shown.push(c),
            c if c.is_control() => shown.extend(c.escape_default()),
            c => shown.push(c),
        }
    }
    shown
}

/// Encodes bytes as in RFC 4648, section 4.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |i: usize| u32::from(group.get(i).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..4 {
            let digit = (bits >> (18 - 6 * i)) & 63;
            text.push(if i <= group.len() { DIGITS[digit as usize].into() } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_drive_the_terminal() {
        assert_eq!(harmless("a\x1b[2Jb\x07\n\u{9b}ä"), "a\\u{1b}[2Jb\\u{7}\\n\\u{9b}ä");
    }

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (plain, encoded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), encoded);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfd]), "//79");
    }
}
