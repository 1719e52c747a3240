//! What a shell is told and what it says. Pure text: who carries it is left to the session.
//!
//! The shell is an *interactive* one without a terminal, whose script is what it is sent. Of all
//! constructions that was the one that keeps its state whatever a command does: on SIGINT, an unset
//! variable under `set -u`, `${x:?}`, an assignment to a constant or a syntax error such a shell gives
//! up the whole line, however deep in loops and functions it is, and reads the next; one that is not
//! interactive exits. (`return` in a trap leaves only the innermost function, and a DEBUG trap that
//! looks at a flag costs every command.) What it takes to be interactive is turned off or kept quiet:
//! prompts, history, job control, startup files. (As its PROMPT_COMMAND bash would evaluate a command
//! as quietly as in a script; but bash 5.2 corrupts its memory when it gives up such a line.)
//!
//! A command is two lines. The first says on descriptor 3 that it begins, and has it evaluated with
//! that descriptor closed and nothing to read. The second is sent once the first was heard, so that it
//! is not yet in the shell's own buffer, which dash empties when it gives up a line; it says how the
//! command ended. It may be sent again whenever it could have been lost: it changes nothing.
//!
//! `$?` is 137 for a program that SIGKILL ended and for one that exited so. Bash itself has waited for
//! it and knows better, but has no word for it; `shell/told.c` adds one, `__warren_w`. It comes as
//! descriptor 4, so that nothing need be installed; a shell that cannot take it tells the number alone.

use std::fmt::Write as _;

/// The program that becomes the shell.
pub(super) const PROGRAM: &str = "sh";
/// The name that its start-up goes by, to be known again.
pub(super) const MARK: &str = "warren-shell";
/// Becomes bash, or sh where there is none. What it complains about while it starts (it has no
/// terminal) is for nobody.
pub(super) const START: &str = "\
    if command -v bash >/dev/null 2>&1\n\
    then exec bash --noprofile --norc --noediting -i <&3 5>&2 2>/dev/null\n\
    else exec sh -i <&3 5>&2 2>/dev/null\n\
    fi";

/// What makes it ready. Safe to be sent again, at any time.
///
/// `__warren_s` is how the last command ended, and empty while one runs: what is given up leaves it
/// so, and then `$?` tells. `__warren_q` lets a command see the `$?` of the one before. `__warren_r`
/// evaluates the command in `__warren_c` on the left side of a list, so that `set -e` does not end the
/// shell. `__warren_i` is a file with what the command reads. `__warren_n` is the signal that ended the
/// last program, as `__warren_w` told it.
pub(super) const SET_UP: &str = r#"
__warren_s=${__warren_s:-$?}; [ -n "${__warren_o-}" ] || { PS1= PS2= HISTFILE=; unset PROMPT_COMMAND MAILCHECK; __warren_w() { :; }; [ -z "${BASH_VERSION-}" ] || { set +o history +H +m; history -c; shopt -s execfail; enable -f /proc/self/fd/4 __warren_w && unset -f __warren_w; }; exec 2>&5 4>&- 5>&-; __warren_o=1; }
__warren_b() { __warren_p=${__warren_s:-0}; __warren_s=; __warren_w || :; __warren_n=; command echo "$1 B" >&3 || exit 125; }
__warren_q() { return "${__warren_p:-0}"; }
__warren_r='{ __warren_q; eval "$__warren_c"; } <"${__warren_i:-/dev/null}" 3>&- && __warren_s=0 || __warren_s=$?'
__warren_e() { __warren_s=${__warren_s:-$2}; [ -n "${__warren_n-}" ] || { __warren_w && __warren_n=0 || __warren_n=$?; }; PS1= PS2=; unset PROMPT_COMMAND __warren_c; case $- in *H*) set +H;; esac; command echo "$1 E $__warren_s $__warren_n" >&3 || exit 125; }
"#;

/// The longest line that the shell may say.
const MAX_LINE: usize = 128;
/// How long a token is.
const TOKEN: usize = 32;

/// Returns the line that runs a command, which reads `input`. The command must have no NUL byte, and
/// the path nothing that is special to a shell.
pub(super) fn begin(token: &str, command: &str, input: &str) -> String {
    let mut line = String::with_capacity(command.len() + 200);
    let _ = write!(line, "\n{{ __warren_b {token}; }} </dev/null >/dev/null 2>&1; ");
    let _ = write!(line, "__warren_i={input} __warren_c=\"");
    for char in command.chars() {
        // All that is special between these quotes. (Between single ones less is, but bash takes a
        // time for each quote in the text that grows with the text.)
        if matches!(char, '\\' | '"' | '$' | '`') {
            line.push('\\');
        }
        line.push(char);
    }
    line.push_str("\"; eval \"$__warren_r\"\n");
    line
}

/// Returns the line that asks how the last command ended.
///
/// It begins a line of its own: after an unfinished quote bash is not yet where a command may begin.
pub(super) fn ask(token: &str) -> String {
    format!("\n{{ __warren_e {token} \"$?\"; }} </dev/null >/dev/null 2>&1\n")
}

/// What the shell says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// The command begins.
    Begins,
    /// It ended.
    Ended {
        /// With this status.
        status: u8,
        /// The signal that ended the last program that the shell waited for; 0 if none did, or the
        /// shell cannot tell.
        signal: u8,
    },
}

/// Something the shell said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Saying {
    pub(super) token: String,
    pub(super) word: Word,
    /// Where in the log it begins and ends.
    pub(super) from: u64,
    pub(super) to: u64,
}

/// Makes out what the shell says among whatever else comes from its descriptor 3.
#[derive(Debug, Default)]
pub(super) struct Ear {
    line: Vec<u8>,
    from: u64,
    too_long: bool,
}

impl Ear {
    /// Takes bytes that begin at `offset` of the log.
    pub(super) fn hear(&mut self, offset: u64, bytes: &[u8]) -> Vec<Saying> {
        let mut heard = Vec::new();
        for (at, byte) in (offset..).zip(bytes) {
            if self.line.is_empty() && !self.too_long {
                self.from = at;
            }
            match byte {
                b'\n' => {
                    let said = std::mem::take(&mut self.line);
                    let known = if self.too_long { None } else { understand(&said) };
                    self.too_long = false;
                    if let Some((token, word)) = known {
                        heard.push(Saying { token, word, from: self.from, to: at + 1 });
                    }
                }
                _ if self.line.len() == MAX_LINE => {
                    self.line.clear();
                    self.too_long = true;
                }
                _ if self.too_long => {}
                byte => self.line.push(*byte),
            }
        }
        heard
    }
}

fn understand(line: &[u8]) -> Option<(String, Word)> {
    let line = std::str::from_utf8(line).ok()?;
    let (token, rest) = line.split_once(' ')?;
    let plain = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if token.len() != TOKEN || !token.bytes().all(plain) {
        return None;
    }
    let word = match rest.split_once(' ') {
        None if rest == "B" => Word::Begins,
        Some(("E", numbers)) => {
            let (status, signal) = numbers.split_once(' ')?;
            let number = |text: &str| {
                let plain = text.bytes().all(|byte| byte.is_ascii_digit());
                text.parse().ok().filter(|_| plain)
            };
            Word::Ended { status: number(status)?, signal: number(signal)? }
        }
        Some(_) | None => return None,
    };
    Some((token.to_owned(), word))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn what_the_shell_says_is_understood_and_nothing_else_is() {
        let mut ear = Ear::default();
        let text = format!("junk\n{A} B\n{A} E 130 2\n");
        let heard = ear.hear(7, text.as_bytes());
        let words: Vec<_> = heard.iter().map(|said| (said.word, said.from, said.to)).collect();
        let ended = Word::Ended { status: 130, signal: 2 };
        assert_eq!(words, [(Word::Begins, 12, 47), (ended, 47, 88)]);
        for bad in [
            format!("{A} E 256 0\n"),
            format!("{A} E 0 256\n"),
            format!("{A} E -1 0\n"),
            format!("{A} E +1 0\n"),
            format!("{A} E 1 +1\n"),
            format!("{A} E 1\n"),
            format!("{A} E 1 \n"),
            format!("{A} E 1 1 1\n"),
            format!("{A} E \n"),
            format!("{A} E\n"),
            format!("{A} C\n"),
            format!(" {A} B\n"),
            format!("{A} B \n"),
            format!("{} B\n", &A[1..]),
            format!("{} B\n", A.to_uppercase()),
            format!("{}{A} B\n", "x".repeat(500)),
            format!("{A} B"),
        ] {
            assert_eq!(Ear::default().hear(0, bad.as_bytes()), [], "{bad:?}");
        }
    }

    #[test]
    fn a_line_that_comes_in_parts_is_one_line() {
        let mut ear = Ear::default();
        assert_eq!(ear.hear(0, &A.as_bytes()[..9]), []);
        // In between, the command wrote something else.
        assert_eq!(ear.hear(100, &A.as_bytes()[9..]), []);
        let heard = ear.hear(200, b" E 7 0\n");
        let ended = Word::Ended { status: 7, signal: 0 };
        assert_eq!((heard[0].word, heard[0].from, heard[0].to), (ended, 0, 207));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_ear_hold_more_than_a_line(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20),
        ) {
            let mut ear = Ear::default();
            for part in &parts {
                ear.hear(0, part);
                prop_assert!(ear.line.len() <= MAX_LINE);
            }
            ear.hear(0, b"\n");
            let heard = ear.hear(0, format!("{A} B\n").as_bytes());
            prop_assert_eq!(heard.len(), 1);
        }

        #[test]
        fn a_command_stays_between_its_quotes(command in "[^\0]{0,200}") {
            let line = begin(A, &command, "");
            let quoted = line.split_once("__warren_c=").unwrap().1;
            // Read as a shell reads it: up to a quote, and a backslash takes the next.
            let (mut text, mut chars) = (String::new(), quoted.chars().skip(1));
            while let Some(char) = chars.next() {
                match char {
                    '"' => break,
                    '\\' => text.extend(chars.next()),
                    char => {
                        prop_assert!(!matches!(char, '$' | '`'));
                        text.push(char);
                    }
                }
            }
            prop_assert_eq!(text, command);
        }
    }
}
