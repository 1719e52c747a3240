//! `warren sh`: one command in a shell that keeps its state.

use std::io::Write as _;

use serde_json::Value;
use warren::ExecCause;
use warren_api::rest::shells::{ShellRunBody, ShellRunView};

use crate::args::ShArgs;
use crate::client::Client;
use crate::commands::{find, printed, read, show_object};
use crate::failure::Failure;
use crate::output::{self, say};
use crate::units::Cap;

pub(crate) fn run(args: &ShArgs) -> Result<u8, Failure> {
    // It becomes part of a path, which has no place for anything else.
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let name = &args.session;
    if name.is_empty() || !name.chars().all(plain) || matches!(name.as_str(), "." | "..") {
        let message = format!("`{}` is no name of a session", name.escape_debug());
        return Err(Failure::usage(message, "use letters, digits, `-`, `_` and `.`"));
    }
    let client = Client::new(&args.client)?;
    let body = ShellRunBody {
        command: args.command.join(" "),
        timeout_ms: args.timeout.and_then(Cap::bound),
        ..ShellRunBody::default()
    };
    let shell = format!("/v1/sandboxes/{}/shells/{name}", find(&client, &args.sandbox)?.id);
    let (path, interrupt) = (format!("{shell}/run"), format!("{shell}/interrupt"));
    let ran: Value = client.send_interruptibly(&path, &body, &interrupt)?;
    let shown: ShellRunView = read(ran.clone())?;
    let code = u8::try_from(shown.exit_code & 0xff).unwrap_or(125);
    if args.client.json {
        show_object(&ran)?;
        return Ok(code);
    }
    let (stdout, stderr) = shown.bytes();
    printed(output::print(&stdout))?;
    // Nobody reads it any more if this fails.
    let _ = std::io::stderr().write_all(&stderr);
    if !matches!(shown.cause, ExecCause::Exited { .. } | ExecCause::Signalled { .. }) {
        say(&format!("warren: ended: {}", shown.cause));
    }
    if shown.shell_ended && !matches!(shown.cause, ExecCause::Exited { .. }) {
        say(&format!("warren: the shell `{name}` is gone with its state"));
    }
    Ok(code)
}
