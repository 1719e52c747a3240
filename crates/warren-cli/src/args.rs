//! What can be written on the command line.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, FromArgMatches as _, Parser, Subcommand};
use clap_complete::Shell;
use warren::{BindMount, Guarantee, IsolationLevel, Limit};

use crate::commit::CommitArgs;
use crate::execs::{ExecArgs, LogsArgs, PsArgs, ShellArgs, SignalArgs, WaitArgs};
use crate::failure::Failure;
use crate::file_args::{CpArgs, FilesAction};
use crate::port::PortArgs;
use crate::receipts::ReceiptAction;
use crate::snapshots::{DiffArgs, ForkArgs, RestoreArgs, SnapshotAction};
use crate::templates::TemplateAction;
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
    /// Try each backend on this host; say what it proved, what it lacks and how to get that.
    ///
    /// A sandbox of each is made and each wall and limit is tried from inside. The exit code is 1 if none
    /// that isolates can be made here.
    Doctor(DoctorArgs),
    /// Keep sandboxes for many clients: the daemon.
    ///
    /// It listens on a unix socket that its own user alone can use, or a group too, and on TCP when
    /// asked, which then takes an API key. Settings come from a file, the environment and flags, the
    /// latter winning; `warren config` shows them. On SIGTERM it ends and leaves the sandboxes running
    /// for the next daemon.
    Serve(ServeArgs),
    /// Show the settings of the daemon and where each comes from.
    Config(ConfigArgs),
    /// Make, list and revoke the API keys that TCP takes.
    #[command(subcommand)]
    Key(KeyAction),
    /// Check and show the daemon's log of every call, command and refusal.
    #[command(subcommand)]
    Audit(AuditAction),
    /// Show how much one has of everything, and how much one may.
    Quota(ClientArgs),
    /// Make a sandbox and print its id.
    Create(Box<CreateArgs>),
    /// List the sandboxes.
    Ls(LsArgs),
    /// Show a sandbox with all that is known of it.
    Show(TargetArgs),
    /// Try the walls of a sandbox from inside and say what happened.
    ///
    /// One that something gets through is destroyed, and the exit code is 125. Limits are tried only
    /// while nothing has run in it yet; else they are read back from the kernel.
    Verify(TargetArgs),
    /// Show and check what was tried of sandboxes, signed by the daemon.
    #[command(subcommand)]
    Receipt(ReceiptAction),
    /// Run a command in a sandbox and return its exit code.
    ///
    /// What it writes comes as it is written, and goes on where it was if the daemon is started anew.
    /// 124 is a timeout, 125 an error of Warren's, 126 a program that cannot be executed, 127 one that
    /// does not exist, 2 bad usage.
    Exec(ExecArgs),
    /// Open a shell in a sandbox; Ctrl-P Ctrl-Q leaves it running.
    Shell(ShellArgs),
    /// Copy files and directories into a sandbox, or out of it.
    ///
    /// A path inside is written SANDBOX:/path; `-` is stdin or stdout. A directory is copied whole, into
    /// the one at DST if there is one. Links are copied as links.
    Cp(CpArgs),
    /// Look at the files of a sandbox, and change them.
    #[command(subcommand)]
    Files(FilesAction),
    /// Run a command in a shell of a sandbox that keeps its state, and return its exit code.
    ///
    /// The shell is made by the first command and lasts until it exits or the sandbox ends, also while
    /// the daemon is gone: directory, variables, functions and options are there for the next command.
    /// One command runs in it at a time. Ctrl-C interrupts the command and leaves the shell; a command
    /// that ignores that is killed with all that the shell started, and at last the shell is.
    ///
    /// 124 is a timeout, 130 an interrupt, 125 an error of Warren's, 2 bad usage.
    Sh(ShArgs),
    /// Join a sandbox again, or one more time; or a command in it, with what it wrote so far.
    Attach(AttachArgs),
    /// List the commands that run in a sandbox.
    Ps(PsArgs),
    /// Print what a command wrote, from any offset.
    Logs(LogsArgs),
    /// Wait until a command has ended and return its exit code.
    Wait(WaitArgs),
    /// Send a signal to a command, or end it with everything it started.
    Signal(SignalArgs),
    /// Leave a sandbox; its processes go on.
    Detach(TargetArgs),
    /// Stop every process of a sandbox.
    Suspend(SuspendArgs),
    /// Let the processes of a sandbox continue.
    Resume(TargetArgs),
    /// Save sandboxes, and look after what was saved.
    #[command(subcommand)]
    Snapshot(SnapshotAction),
    /// Make sandboxes that are as another is now, or as a snapshot says, and print their ids.
    ///
    /// All of them are made, or none unless --partial is given.
    Fork(ForkArgs),
    /// Make a sandbox what a snapshot says: its processes end, and it keeps its id and its name.
    Restore(RestoreArgs),
    /// Go back to the last savepoint of a sandbox (`exec --savepoint`, `snapshot create --savepoint`).
    Undo(TargetArgs),
    /// List what was added (A), changed (M) and removed (D) in a sandbox, with sizes.
    Diff(DiffArgs),
    /// Take changes of a sandbox over into a directory of this host: all of them, or none.
    ///
    /// A file that was changed on both sides is a conflict, and nothing is done. The caller's own rights
    /// are used, and no link is followed.
    Commit(CommitArgs),
    /// End sandboxes.
    Kill(KillArgs),
    /// Show, set or unset the sandbox that `exec` uses when none is named.
    Default(DefaultArgs),
    /// Show how many sandboxes and sessions there are.
    Stats(ClientArgs),
    /// Build, list, tag and remove what sandboxes are made from.
    #[command(subcommand)]
    Template(TemplateAction),
    /// Reach a server inside a sandbox: listen on this host, and print where.
    ///
    /// Every connection goes to the port inside, until Ctrl-C. With --stdio there is one connection, on
    /// stdin and stdout, as ssh wants it: ProxyCommand warren port --stdio SANDBOX %p
    Port(PortArgs),
    /// Follow what happens to sandboxes and sessions.
    Events(EventsArgs),
    /// Print the completions of a shell.
    Completions(CompletionsArgs),
    /// Print the man page, or write all of them to a directory.
    Man(ManArgs),
    /// Print docs/cli.md.
    #[command(hide = true)]
    Reference,
}

/// What a sandbox may reach.
#[derive(Debug, Args)]
pub(crate) struct NetArgs {
    /// Let it connect to this host, host:port, *.domain or network, by TCP; may be given more than once.
    #[arg(long, value_name = "DEST", value_delimiter = ',', help_heading = "Network")]
    pub(crate) allow_net: Vec<String>,
    /// Let it connect to everything that is public.
    #[arg(long, conflicts_with = "allow_net", help_heading = "Network")]
    pub(crate) network: bool,
}

/// What a sandbox shall be, whoever keeps it.
#[derive(Debug, Args)]
pub(crate) struct SpecArgs {
    /// Profile to start from: default, strict or permissive.
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) profile: String,
    /// System call filter, if not the profile's own.
    #[arg(long, value_name = "NAME")]
    pub(crate) seccomp: Option<String>,

    /// Weakest isolation that will do: process, namespace, container or kernel. The cheapest that proves
    /// it is taken, and nothing weaker ever.
    #[arg(long, value_name = "LEVEL", help_heading = "Isolation")]
    pub(crate) isolation: Option<IsolationLevel>,
    /// What may not be missing beside that: filesystem, network, process, limits, syscalls.
    #[arg(long, value_name = "LIST", value_delimiter = ',', help_heading = "Isolation")]
    pub(crate) require: Vec<Guarantee>,

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
    #[command(flatten)]
    pub(crate) net: NetArgs,

    /// Set a variable of the environment of commands; none of the caller's is passed on.
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::variable)]
    pub(crate) env: Vec<(String, String)>,

    /// Memory of all processes together [default: 512M].
    #[arg(long, value_name = "SIZE", value_parser = units::size, help_heading = "Limits")]
    pub(crate) memory: Option<Cap<u64>>,
    /// Share of the CPU against other sandboxes, 1 to 10000 [default: 100].
    #[arg(long, value_name = "NUMBER", value_parser = units::count, help_heading = "Limits")]
    pub(crate) cpu_weight: Option<Cap<u32>>,
    /// CPU time of a command [default: 60s].
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
    /// Output of a command, stdout and stderr together [default: 10M].
    #[arg(long, value_name = "SIZE", value_parser = units::size, help_heading = "Limits")]
    pub(crate) max_output: Option<Cap<u64>>,
    /// Time by the clock of a command [default: 2m].
    #[arg(long, value_name = "TIME", value_parser = units::time, help_heading = "Limits")]
    pub(crate) timeout: Option<Cap<u64>>,
}

/// How to run a command.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
    /// Template of the caller's to stand on: NAME, NAME:TAG or an id. What it starts in sandboxes of a daemon is not started.
    #[arg(long, value_name = "NAME")]
    pub(crate) template: Option<String>,
    /// Backend to use, held to --isolation and --require: landlock, linux, oci-crun, oci-runc [default: the
    /// cheapest that will do].
    #[arg(long, value_name = "NAME", help_heading = "Isolation")]
    pub(crate) backend: Option<String>,
    /// CPUs to use at most, as in 1.5.
    #[arg(long, value_name = "NUMBER", value_parser = units::cpus, help_heading = "Limits")]
    pub(crate) cpus: Option<Cap<u32>>,
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
    /// Follow the command, call by call, and say on stderr what walls refused to it and what would allow
    /// that; with --json in the answer. It takes longer.
    #[arg(long)]
    pub(crate) explain: bool,

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

/// Settings that can be given as flags.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct SettingArgs {
    /// Unix socket to listen on.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Address to listen on as well, as in 127.0.0.1:8080; needs an API key.
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Option<String>,
    /// Settings file, in TOML.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Directory for what outlives the daemon.
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Group that may use the socket too.
    #[arg(long, value_name = "NAME")]
    pub(crate) group: Option<String>,
    /// How log lines are written: text or json.
    #[arg(long, value_name = "FORMAT")]
    pub(crate) log_format: Option<String>,
    /// Backends to use, as in linux,host; the cheapest that proves what a caller asks for is taken.
    #[arg(long, value_name = "NAMES")]
    pub(crate) backends: Option<String>,
}

/// How to serve.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) settings: SettingArgs,
    /// End all sandboxes when the daemon ends.
    #[arg(long)]
    pub(crate) stop_all: bool,
    /// Speak E2B on TCP as well, and print what its SDKs want in their environment.
    ///
    /// Makes an API key on the first start; docs/guides/e2b.md tells the rest.
    #[arg(long)]
    pub(crate) e2b: bool,
    /// The domain below which ports of sandboxes have names, PORT-ID.DOMAIN; with --e2b.
    #[arg(long, value_name = "NAME", requires = "e2b")]
    pub(crate) e2b_domain: Option<String>,
    /// Address to speak E2B on over TLS, for those names; with --e2b-domain.
    #[arg(long, value_name = "ADDR", requires = "e2b_domain")]
    pub(crate) e2b_tls: Option<SocketAddr>,
    /// Certificate chain for the domain and `*.` below it, as PEM; one is made if there is none.
    #[arg(long, value_name = "FILE", requires = "e2b_tls", requires = "e2b_cert_key")]
    pub(crate) e2b_cert: Option<PathBuf>,
    /// The key of that certificate, as PEM.
    #[arg(long, value_name = "FILE", requires = "e2b_cert")]
    pub(crate) e2b_cert_key: Option<PathBuf>,
}

/// Which settings to show.
#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(flatten)]
    pub(crate) settings: SettingArgs,
    /// Print one JSON object for each setting.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What to do with API keys.
#[derive(Debug, Subcommand)]
pub(crate) enum KeyAction {
    /// Make a key for a tenant and print it; it is shown this once.
    Create(KeyCreateArgs),
    /// List the keys, without what is secret.
    Ls(KeyLsArgs),
    /// Make a key worthless from the next request on.
    Revoke(KeyRevokeArgs),
}

impl KeyAction {
    pub(crate) fn is_json(&self) -> bool {
        match self {
            Self::Create(args) => args.place.json,
            Self::Ls(args) => args.place.json,
            Self::Revoke(args) => args.place.json,
        }
    }
}

/// What to do with the audit log.
#[derive(Debug, Subcommand)]
pub(crate) enum AuditAction {
    /// Tell whether the log is what was written, or where it is not.
    ///
    /// Every record carries the digest of the one before, so that none can be changed, taken away, added
    /// or moved; a seal, made with the key that is beside the log, says how far it had come. A last line
    /// that is not whole, because the daemon was killed, is no break. 1 is a log that is broken, 125 one
    /// that cannot be read.
    Verify(AuditVerifyArgs),
    /// Print the records, the oldest first.
    Show(AuditShowArgs),
}

impl AuditAction {
    pub(crate) fn is_json(&self) -> bool {
        match self {
            Self::Verify(args) => args.place.json,
            Self::Show(args) => args.place.json,
        }
    }
}

/// Where the log is.
#[derive(Debug, Args)]
pub(crate) struct AuditPlaceArgs {
    /// Directory of the daemon's state.
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Settings file of the daemon.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What to check.
#[derive(Debug, Args)]
pub(crate) struct AuditVerifyArgs {
    #[command(flatten)]
    pub(crate) place: AuditPlaceArgs,
    /// Files of a log, in their order, to be checked without its seal; else the daemon's.
    #[arg(value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
}

/// Which records to print.
#[derive(Debug, Args)]
pub(crate) struct AuditShowArgs {
    #[command(flatten)]
    pub(crate) place: AuditPlaceArgs,
    /// Only what happened since: a moment, or how long ago, as in 10m.
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// Only what this tenant did: the tenant of a key, or uid:NUMBER.
    #[arg(long, value_name = "NAME")]
    pub(crate) tenant: Option<String>,
    /// Only what was done to this sandbox, by its id.
    #[arg(long, value_name = "ID")]
    pub(crate) sandbox: Option<String>,
}

/// Where the keys are.
#[derive(Debug, Args)]
pub(crate) struct KeyPlaceArgs {
    /// Directory of the daemon's state.
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Settings file of the daemon.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Whom a key is for.
#[derive(Debug, Args)]
pub(crate) struct KeyCreateArgs {
    #[command(flatten)]
    pub(crate) place: KeyPlaceArgs,
    /// Sandboxes that the tenant may have at once.
    #[arg(long, value_name = "NUMBER", value_parser = units::count)]
    pub(crate) max_sandboxes: Option<Cap<u32>>,
    /// Memory that its sandboxes may use together.
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub(crate) max_memory: Option<Cap<u64>>,
    /// CPU shares that its sandboxes may have together; one has 100 unless it asks for another.
    #[arg(long, value_name = "NUMBER", value_parser = units::count)]
    pub(crate) max_cpu_weight: Option<Cap<u32>>,
    /// What its sandboxes may write together.
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    pub(crate) max_disk: Option<Cap<u64>>,
    /// Snapshots that it may keep, savepoints included.
    #[arg(long, value_name = "NUMBER", value_parser = units::count)]
    pub(crate) max_snapshots: Option<Cap<u32>>,
    /// Commands that it may run at once.
    #[arg(long, value_name = "NUMBER", value_parser = units::count)]
    pub(crate) max_execs: Option<Cap<u32>>,
    /// Streams that it may follow at once: events, output, terminals.
    #[arg(long, value_name = "NUMBER", value_parser = units::count)]
    pub(crate) max_streams: Option<Cap<u32>>,
    /// Requests that it may send in a second.
    #[arg(long, value_name = "NUMBER", value_parser = units::count)]
    pub(crate) max_requests_per_second: Option<Cap<u32>>,
    /// The tenant.
    pub(crate) tenant: String,
}

/// Which keys to list.
#[derive(Debug, Args)]
pub(crate) struct KeyLsArgs {
    #[command(flatten)]
    pub(crate) place: KeyPlaceArgs,
}

/// Which key to revoke.
#[derive(Debug, Args)]
pub(crate) struct KeyRevokeArgs {
    #[command(flatten)]
    pub(crate) place: KeyPlaceArgs,
    /// The key's id, as `warren key ls` shows it.
    pub(crate) id: String,
}

/// How to reach the daemon, and how to print what it says.
#[derive(Debug, Args)]
pub(crate) struct ClientArgs {
    /// Unix socket of the daemon.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Name one of several clients of the same user.
    #[arg(long, value_name = "NAME")]
    pub(crate) client: Option<String>,
    /// Print the objects of the API, one a line.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What a new sandbox shall be, and which one will do.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Name to call it by.
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Template to make it from: NAME, NAME:TAG or an id.
    #[arg(long, value_name = "NAME")]
    pub(crate) template: Option<String>,
    /// Label to find it by.
    #[arg(long, value_name = "KEY=VALUE", value_parser = units::variable)]
    pub(crate) label: Vec<(String, String)>,
    /// Backend to use.
    #[arg(long, value_name = "NAME")]
    pub(crate) backend: Option<String>,
    /// Take a warm one, if there is one.
    #[arg(long)]
    pub(crate) pool: bool,
    /// Take none that a command has run in.
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Try its walls from inside before it is given, and its limits if nothing has run in it yet.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Follow its commands, call by call, each as `exec --explain` does; where they cannot be, they are not.
    #[arg(long)]
    pub(crate) explain: bool,
    /// Do this once, however often it is repeated with the same key.
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
}

/// Which sandboxes to list.
#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Only those that match: state=, name=, profile=, backend= or label=KEY=VALUE.
    #[arg(long = "filter", short = 'f', value_name = "KEY=VALUE", value_parser = units::variable)]
    pub(crate) filters: Vec<(String, String)>,
    /// Print the ids alone.
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// Which sandbox.
#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Name or id of the sandbox or its session, or the beginning of one.
    pub(crate) sandbox: String,
}

/// What to stop.
#[derive(Debug, Args)]
pub(crate) struct SuspendArgs {
    #[command(flatten)]
    pub(crate) target: TargetArgs,
    /// Free the memory that it holds as well: it is in the host's swap until it is needed again. An error on a
    /// host without swap (`warren doctor` tries it), and then nothing is stopped.
    #[arg(long)]
    pub(crate) to_disk: bool,
}

/// What to run in a shell.
#[derive(Debug, Args)]
pub(crate) struct ShArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Which of the sandbox's shells.
    #[arg(long, value_name = "NAME", default_value = "main")]
    pub(crate) session: String,
    /// Time by the clock.
    #[arg(long, value_name = "TIME", value_parser = units::time)]
    pub(crate) timeout: Option<Cap<u64>>,
    /// Have the command read what this reads, to its end; else it reads nothing.
    #[arg(long)]
    pub(crate) stdin: bool,
    /// Name or id of the sandbox, or the beginning of one.
    pub(crate) sandbox: String,
    /// The command, in the language of the shell; several words are joined by spaces.
    #[arg(value_name = "COMMAND", required = true, last = true)]
    pub(crate) command: Vec<String>,
}

/// Which sandbox to join.
#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Make a sandbox with this id if there is none.
    #[arg(long)]
    pub(crate) create: bool,
    /// Name or id of the sandbox, or the beginning of one.
    pub(crate) sandbox: String,
    /// A command in it, to be followed and, if it has a terminal, to be typed to.
    pub(crate) exec: Option<String>,
}

/// Which sandboxes to end.
#[derive(Debug, Args)]
pub(crate) struct KillArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Names or ids of the sandboxes, or the beginnings of them.
    #[arg(required = true, value_name = "SANDBOX")]
    pub(crate) sandboxes: Vec<String>,
}

/// Which sandbox is used when none is named.
#[derive(Debug, Args)]
pub(crate) struct DefaultArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Use none.
    #[arg(long, conflicts_with = "sandbox")]
    pub(crate) unset: bool,
    /// Use this one: a name or id, or the beginning of one.
    pub(crate) sandbox: Option<String>,
}

/// Which events to follow.
#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Go on after the event with this id.
    #[arg(long, value_name = "ID")]
    pub(crate) since: Option<String>,
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

/// Reads the command line of `run` alone. To describe every other command takes longer than that,
/// and is left to whoever asks for them, or makes a mistake.
fn parse_run() -> Option<RunArgs> {
    let own = || std::env::args_os().skip(1);
    if own().next()? != "run" {
        return None;
    }
    let run = RunArgs::augment_args(clap::Command::new("run"));
    RunArgs::from_arg_matches(&run.try_get_matches_from(own()).ok()?).ok()
}

/// Reads the command line, or says what is wrong with it and returns the exit code.
pub(crate) fn parse() -> Result<Action, ExitCode> {
    if let Some(run) = parse_run() {
        return Ok(Action::Run(Box::new(run)));
    }
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
