//! The `sudo` of a sandbox with several users: this program, set-user-id, under that name.
//!
//! Everybody inside may be anybody inside; a password would protect nothing. What root of a sandbox
//! may do is bounded by the capabilities that the sandbox has at all, and by its filter.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use warren_sys::{cred, process};

use crate::users::{Names, User};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const USAGE: &str = "usage: sudo [-EHinsSkv] [-u USER] [NAME=VALUE]... [COMMAND [ARG]...]";

/// What was asked for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Asked {
    user: Option<String>,
    keep_env: bool,
    login: bool,
    shell: bool,
    nothing: bool,
    env: Vec<(OsString, OsString)>,
    command: Vec<OsString>,
}

/// Reports whether this program was called by that name.
pub fn is_meant() -> bool {
    let name = std::env::args_os().next().unwrap_or_default();
    std::path::Path::new(&name).file_name() == Some(OsStr::new("sudo"))
}

/// Runs a command as another user. Does not return.
pub fn main() -> ! {
    let asked = match parse(std::env::args_os().skip(1)) {
        Ok(asked) => asked,
        Err(why) => fail(&why),
    };
    if asked.nothing {
        process::exit_now(0);
    }
    let name = asked.user.clone().unwrap_or_else(|| "root".to_owned());
    let number = name.strip_prefix('#').and_then(|number| number.parse().ok());
    let called = number.map_or_else(|| name.clone().into_bytes(), |id| Names::read().user(id));
    let Ok(Some(user)) = User::find(&called) else { fail(&format!("unknown user {name}")) };
    let caller = rustix::process::getuid().as_raw();
    let group = rustix::process::getgid().as_raw();
    if let Err(error) = cred::become_user(user.uid, user.gid, &user.groups) {
        fail(&format!("cannot become {name}: {error}"));
    }
    let mut command = command(&asked, &user);
    let caller_name = Names::read().user(caller);
    command.env("SUDO_UID", caller.to_string()).env("SUDO_GID", group.to_string());
    command
        .env("SUDO_USER", OsStr::from_bytes(&caller_name))
        .envs(asked.env.iter().map(|(k, v)| (k, v)));
    if asked.login && !user.home.is_empty() {
        command.current_dir(OsStr::from_bytes(&user.home));
    }
    let program = command.get_program().to_owned();
    let error = command.exec();
    if error.kind() == std::io::ErrorKind::NotFound {
        fail(&format!("{}: command not found", program.display()));
    }
    fail(&format!("{}: {error}", program.display()))
}

/// Puts the command together that runs as `user`.
fn command(asked: &Asked, user: &User) -> Command {
    let shell = if user.shell.is_empty() { b"/bin/sh" } else { &user.shell[..] };
    let (shell, name) = (OsStr::from_bytes(shell), OsStr::from_bytes(&user.name));
    let wants_shell = asked.login || asked.shell || asked.command.is_empty();
    let mut command = if wants_shell {
        let mut command = Command::new(shell);
        if asked.login {
            command.arg0("-sh");
        }
        if !asked.command.is_empty() {
            let words: Vec<_> = asked.command.iter().map(|word| quoted(word)).collect();
            command.arg("-c").arg(words.join(OsStr::new(" ")));
        }
        command
    } else {
        let mut command = Command::new(&asked.command[0]);
        command.args(&asked.command[1..]);
        command
    };
    if !asked.keep_env {
        command.env_clear();
        for kept in ["TERM", "LANG", "LC_ALL", "DISPLAY", "COLORTERM"] {
            if let Some(value) = std::env::var_os(kept) {
                command.env(kept, value);
            }
        }
        command.env("PATH", PATH);
    }
    command.env("HOME", OsStr::from_bytes(&user.home)).env("USER", name).env("LOGNAME", name);
    command.env("SHELL", shell);
    command
}

/// Escapes a word for a shell.
fn quoted(word: &OsStr) -> OsString {
    let mut bytes = Vec::new();
    for byte in word.as_bytes() {
        if !byte.is_ascii_alphanumeric() && !matches!(byte, b'_' | b'-' | b'$' | b'/' | b'.') {
            bytes.push(b'\\');
        }
        bytes.push(*byte);
    }
    OsStr::from_bytes(&bytes).to_owned()
}

fn parse(args: impl Iterator<Item = OsString>) -> Result<Asked, String> {
    let mut asked = Asked::default();
    let mut args = args.peekable();
    while let Some(arg) = args.next() {
        let text = arg.to_str().unwrap_or_default();
        let mut value = |name: &str| {
            let next = args.next().and_then(|value| value.into_string().ok());
            next.ok_or_else(|| format!("{name} needs a value\n{USAGE}"))
        };
        match text {
            "--" => {
                asked.command = args.collect();
                return Ok(asked);
            }
            "--user" => asked.user = Some(value("--user")?),
            "--group" | "--prompt" => drop(value(text)?),
            "--preserve-env" => asked.keep_env = true,
            "--login" => asked.login = true,
            "--shell" => asked.shell = true,
            "--non-interactive" | "--stdin" | "--set-home" => {}
            "--validate" | "--reset-timestamp" | "--remove-timestamp" => asked.nothing = true,
            long if long.starts_with("--user=") => asked.user = Some(long[7..].to_owned()),
            long if long.starts_with("--preserve-env=") => {
                for name in long[15..].split(',') {
                    let value = std::env::var_os(name).map(|value| (name.into(), value));
                    asked.env.extend(value);
                }
            }
            long if long.starts_with("--") => {
                return Err(format!("unknown option {long}\n{USAGE}"));
            }
            short if short.starts_with('-') && short.len() > 1 => {
                for (at, flag) in short.char_indices().skip(1) {
                    let rest = &short[at + 1..];
                    match flag {
                        'E' => asked.keep_env = true,
                        'i' => asked.login = true,
                        's' => asked.shell = true,
                        'H' | 'n' | 'S' | 'b' | 'P' => {}
                        'k' | 'K' | 'v' | 'l' => asked.nothing = true,
                        'u' | 'g' | 'p' | 'C' | 'D' => {
                            let given =
                                if rest.is_empty() { value("it")? } else { rest.to_owned() };
                            if flag == 'u' {
                                asked.user = Some(given);
                            }
                            break;
                        }
                        other => return Err(format!("unknown option -{other}\n{USAGE}")),
                    }
                }
            }
            _ => match split_variable(&arg) {
                Some(variable) => asked.env.push(variable),
                None => {
                    asked.command = std::iter::once(arg).chain(args).collect();
                    asked.nothing = false;
                    return Ok(asked);
                }
            },
        }
    }
    if !asked.nothing && !asked.login && !asked.shell {
        return Err(USAGE.to_owned());
    }
    Ok(asked)
}

fn split_variable(arg: &OsStr) -> Option<(OsString, OsString)> {
    let bytes = arg.as_bytes();
    let equals = bytes.iter().position(|byte| *byte == b'=')?;
    let (name, value) = (&bytes[..equals], &bytes[equals + 1..]);
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    (!name.is_empty() && name.iter().all(plain))
        .then(|| (OsStr::from_bytes(name).to_owned(), OsStr::from_bytes(value).to_owned()))
}

fn fail(why: &str) -> ! {
    let _ = rustix::io::write(rustix::stdio::stderr(), format!("sudo: {why}\n").as_bytes());
    process::exit_now(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(line: &str) -> Result<Asked, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn options_end_where_the_command_begins() {
        let plain = asked("-n ls -u x --login").unwrap();
        assert_eq!((plain.command.len(), plain.user, plain.login), (4, None, false));
        for line in ["-u user id", "-uuser id", "--user user id", "--user=user id", "-nu user id"] {
            let asked = asked(line).unwrap();
            assert_eq!((asked.user.as_deref(), asked.command.len()), (Some("user"), 1), "{line}");
        }
        let with = asked("-E A=1 B=x=y env").unwrap();
        assert!(with.keep_env);
        assert_eq!(with.env[1], ("B".into(), "x=y".into()));
        assert!(asked("-v").unwrap().nothing && !asked("-k ls").unwrap().nothing);
        for line in ["", "--nope ls", "-Z ls", "-u"] {
            assert!(asked(line).is_err(), "{line}");
        }
    }

    #[test]
    fn a_word_is_one_word_to_a_shell() {
        assert_eq!(quoted(OsStr::new("a b;$x'")), OsStr::new("a\\ b\\;$x\\'"));
    }
}
