//! The caller's terminal.

use rustix::io::Errno;
use rustix::stdio::stdin;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

use crate::failure::Failure;

/// The caller's terminal in raw mode. Dropping it, or a panic, gives it back as it was.
#[derive(Debug)]
pub(crate) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Makes every key a byte for the command: it has a terminal of its own that interprets them.
    pub(crate) fn enter() -> Result<Self, Failure> {
        let refused = |error: Errno| Failure::system("cannot set up the terminal", &error.into());
        let before = tcgetattr(stdin()).map_err(refused)?;
        let mut raw = before.clone();
        raw.make_raw();
        // The release build aborts on a panic, and then nothing is dropped.
        let (saved, next) = (before.clone(), std::panic::take_hook());
        std::panic::set_hook(Box::new(move |info| {
            let _ = tcsetattr(stdin(), OptionalActions::Now, &saved);
            next(info);
        }));
        tcsetattr(stdin(), OptionalActions::Drain, &raw).map_err(refused)?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}

/// Refuses if the caller has no terminal to give.
pub(crate) fn require() -> Result<(), Failure> {
    if isatty(stdin()) {
        return Ok(());
    }
    Err(Failure::usage("--tty needs a terminal, and stdin is none", "leave --tty out to use pipes"))
}

/// Returns the terminal's lines and columns.
pub(crate) fn size() -> (u16, u16) {
    match tcgetwinsize(stdin()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row, size.ws_col),
        // What a terminal is that does not say.
        Ok(_) | Err(_) => (24, 80),
    }
}
