//! What can be written on the command line.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use warren::{BindMount, Limit};

use crate::failure::Failure;
use crate::units::{self, Cap};

/// Runs untrusted code in a sandbox of its own: no daemon, no set-up, no root.
#[derive(Debug, Parser)]
#[command(name = "warren", version, max_term_width = 100, subcommand_required = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    action: Action,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Action {
    /// Run a command in a new sandbox and remove the sandbox.
    ///
    /// The command sees /usr of the host, an empty /workspace, and what is bound by name; it has no
    /// network. Its standard streams and signals go through, and its exit code is returned; 124 is a
    /// timeout, 125 an error of Warren's, 126 a program that cannot be executed, 127 one that does not
    /// exist, 2 bad usage.
    ///
    /// A limit that is given here holds or is an error. Sizes are written 512M or 1.5G, times 500ms,
    /// 30s or 2m; `none` takes a limit away.
    Run(Box<RunArgs>),
    /// Try each layer of a sandbox on this host; say what holds and how to get what does not.
    ///
    /// A sandbox is made and each wall and limit is tried from inside. The exit code is 1 if no sandbox
    /// can be made here.
    Doctor(DoctorArgs),
    /// Print the completions of a shell.
    Completions(CompletionsArgs),
    /// Print the man page, or write all of them to a directory.
    Man(ManArgs),
    /// Print docs/cli.md.
    #[command(hide = true)]
    Reference,
}

/// How to run a command.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Profile to start from: default, strict or permissive.
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) profile: String,
    /// System call filter, if not the profile's own.
    #[arg(long, value_name = "NAME")]
    pub(crate) seccomp: Option<String>,

    /// Show a path of the host, read-only, at the same place.
    #[arg(long, value_name = "PATH", help_heading = "Files")]
    pub(crate) ro: Vec<PathBuf>,
    /// Show a path of the host, writable, at the same place.
    #[arg(long, value_name = "PATH", help_heading = "Files")]
    pub(crate) rw: Vec<PathBuf>,
    /// Show a path of the host at another place.
    #[arg(long, value_name = "SRC:DST[:ro]", value_parser = units::bind, help_heading = "Files")]
    pub(crate) bind: Vec<BindMount>,
    /// Directory to run in.
    #[arg(long, value_name = "DIR", help_heading = "Files")]
    pub(crate) workdir: Option<PathBuf>,
    /// Set a variable of the command's environment; none of the caller's is passed on.
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::variable)]
    pub(crate) env: Vec<(String, String)>,

    /// Memory of all processes together [default: 512M].
    #[arg(long, value_name = "SIZE", value_parser = units::size, help_heading = "Limits")]
    pub(crate) memory: Option<Cap<u64>>,
    /// CPUs to use at most, as in 1.5.
    #[arg(long, value_name = "NUMBER", value_parser = units::cpus, help_heading = "Limits")]
    pub(crate) cpus: Option<Cap<u32>>,
    /// Share of the CPU against other sandboxes, 1 to 10000 [default: 100].
    #[arg(long, value_name = "NUMBER", value_parser = units::count, help_heading = "Limits")]
    pub(crate) cpu_weight: Option<Cap<u32>>,
    /// CPU time [default: 60s].
    #[arg(long, value_name = "TIME", value_parser = units::time, help_heading = "Limits")]
    pub(crate) cpu_time: Option<Cap<u64>>,
    /// Processes and threads at once [default: 64].
    #[arg(long, value_name = "NUMBER", value_parser = units::count, help_heading = "Limits")]
    pub(crate) pids: Option<Cap<u32>>,
    /// Open files of each process [default: 256].
    #[arg(long, value_name = "NUMBER", value_parser = units::count, help_heading = "Limits")]
    pub(crate) open_files: Option<Cap<u32>>,
    /// What all files it writes may take up [default: 100M].
    #[arg(long, value_name = "SIZE", value_parser = units::size, help_heading = "Limits")]
    pub(crate) disk: Option<Cap<u64>>,
    /// Output, stdout and stderr together [default: 10M].
    #[arg(long, value_name = "SIZE", value_parser = units::size, help_heading = "Limits")]
    pub(crate) max_output: Option<Cap<u64>>,
    /// Time by the clock [default: 2m].
    #[arg(long, value_name = "TIME", value_parser = units::time, help_heading = "Limits")]
    pub(crate) timeout: Option<Cap<u64>>,
    /// Run even if this host cannot hold a limit: memory, cpus, processes, ...
    #[arg(long, value_name = "LIMIT", help_heading = "Limits")]
    pub(crate) accept_missing: Vec<Limit>,

    /// Give the command a terminal of its own, joined to the caller's.
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) tty: bool,
    /// Print one JSON object instead: output, how it ended, what it used, what was enforced.
    #[arg(long)]
    pub(crate) json: bool,
    /// Print no warnings and notes.
    #[arg(long, short)]
    pub(crate) quiet: bool,

    /// The command and its arguments.
    #[arg(value_name = "CMD", required = true, trailing_var_arg = true)]
    pub(crate) command: Vec<String>,
}

/// How to show what was found.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which completions to print.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Which shell.
    pub(crate) shell: Shell,
}

/// Where the man pages go.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Directory for the pages.
    pub(crate) dir: Option<PathBuf>,
}

/// Reads the command line, or says what is wrong with it and returns the exit code.
pub(crate) fn parse() -> Result<Action, ExitCode> {
    let error = match Cli::try_parse() {
        Ok(cli) => return Ok(cli.action),
        Err(error) => error,
    };
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // Nobody reads it any more if this fails.
        let _ = error.print();
        return Err(ExitCode::SUCCESS);
    }
    let own = std::env::args_os().take_while(|arg| arg != OsStr::new("--"));
    if own.into_iter().any(|arg| arg == OsStr::new("--json")) {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        let message = first.strip_prefix("error: ").unwrap_or(first).to_owned();
        return Err(Failure::usage(message, "`warren --help` shows what there is").report(true));
    }
    let _ = error.print();
    Err(ExitCode::from(2))
}
