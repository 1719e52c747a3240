//! `warren sh`: one command in a shell that keeps its state.

use std::io::Write as _;

use serde_json::Value;
use warren::ExecCause;
use warren_api::ErrorBody;
use warren_api::rest::execs::PieceView;
use warren_api::rest::shells::{ShellRunBody, ShellRunView};

use crate::args::ShArgs;
use crate::client::Client;
use crate::commands::{find, printed, read, show_object, stdin};
use crate::failure::Failure;
use crate::output::{self, say};
use crate::units::Cap;

const SIGINT: i32 = 2;

pub(crate) fn run(args: &ShArgs) -> Result<u8, Failure> {
    // It becomes part of a path, which has no place for anything else.
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let name = &args.session;
    if name.is_empty() || !name.chars().all(plain) || matches!(name.as_str(), "." | "..") {
        let message = format!("`{}` is no name of a session", name.escape_debug());
        return Err(Failure::usage(message, "use letters, digits, `-`, `_` and `.`"));
    }
    let client = Client::new(&args.client)?;
    let mut body = ShellRunBody {
        command: args.command.join(" "),
        timeout_ms: args.timeout.and_then(Cap::bound),
        ..ShellRunBody::default()
    };
    if args.stdin {
        body.set_stdin(stdin()?);
    }
    let shell = format!("/v1/sandboxes/{}/shells/{name}", find(&client, &args.sandbox)?.id);
    let interrupt = format!("{shell}/interrupt");
    if args.client.json {
        let ran: Value = client.send_interruptibly(&format!("{shell}/run"), &body, &interrupt)?;
        let shown: ShellRunView = read(ran.clone())?;
        show_object(&ran)?;
        return Ok(code(&shown));
    }
    let mut ended = None;
    client.follow_interruptibly(&format!("{shell}/stream"), &body, &interrupt, |kind, data| {
        match kind {
            "stdout" => drop(printed(output::print(&parsed::<PieceView>(data)?.bytes()))?),
            "stderr" => {
                // Nobody reads it any more if this fails.
                let _ = std::io::stderr().write_all(&parsed::<PieceView>(data)?.bytes());
            }
            "end" => ended = Some(parsed::<ShellRunView>(data)?),
            "error" => {
                let error = parsed::<ErrorBody>(data)?.error;
                let failure = Failure::fatal("daemon", error.message);
                return Err(match error.hint {
                    Some(hint) => failure.with_hint(hint),
                    None => failure,
                });
            }
            _ => {}
        }
        Ok(())
    })?;
    let Some(shown) = ended else {
        return Err(Failure::fatal("daemon", "the daemon went before the command ended")
            .with_hint("the command may still run; `warren logs` shows what it writes"));
    };
    let tells = match shown.cause {
        ExecCause::Exited { .. } => false,
        // One who interrupts it knows.
        ExecCause::Signalled { signal } => signal != SIGINT && !shown.shell_ended,
        _ => true,
    };
    if tells {
        say(&format!("warren: ended: {}", shown.cause));
    }
    if shown.shell_ended && !matches!(shown.cause, ExecCause::Exited { .. }) {
        say(&format!("warren: the shell `{name}` is gone with its state"));
    }
    Ok(code(&shown))
}

fn parsed<T: serde::de::DeserializeOwned>(data: &str) -> Result<T, Failure> {
    read(serde_json::from_str(data).unwrap_or_default())
}

fn code(ran: &ShellRunView) -> u8 {
    u8::try_from(ran.exit_code & 0xff).unwrap_or(125)
}
