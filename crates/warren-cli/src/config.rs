//! The settings of the daemon: file, environment and flags, in rising order, each with its origin.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use toml::de::{DeTable, DeValue};
use warren::image::{KnownRegistry, Login, Registries};
use warren::{
    Destination, DestinationHost, EgressHost, EgressOptions, PoolConfig, SandboxManagerConfig,
    SessionTimeouts,
};
use warren_api::audit::Limits;
use warren_api::keys::Quotas;

use crate::args::{ConfigArgs, SettingArgs};
use crate::backends;
use crate::failure::Failure;
use crate::output;
use crate::units::{self, Cap};

/// How a setting is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Count,
    Time,
    Switch,
    List,
}

/// Every setting there is. In the environment `pool.min_warm` is `WARREN_POOL_MIN_WARM`.
const SETTINGS: [(&str, Kind); 39] = [
    ("socket", Kind::Text),
    ("listen", Kind::Text),
    ("state_dir", Kind::Text),
    ("group", Kind::Text),
    ("allowed_hosts", Kind::List),
    ("backends", Kind::List),
    ("log_format", Kind::Text),
    ("log_level", Kind::Text),
    ("max_sandboxes", Kind::Count),
    ("cleanup_interval", Kind::Time),
    ("timeouts.idle", Kind::Time),
    ("timeouts.detach", Kind::Time),
    ("timeouts.suspend", Kind::Time),
    ("pool.enabled", Kind::Switch),
    ("pool.min_warm", Kind::Count),
    ("pool.max_warm", Kind::Count),
    ("pool.warm_ttl", Kind::Time),
    ("pool.warm_profiles", Kind::List),
    ("images.registries", Kind::List),
    ("images.login_file", Kind::Text),
    ("images.ca_file", Kind::Text),
    ("audit.enabled", Kind::Switch),
    ("audit.file_mib", Kind::Count),
    ("audit.total_mib", Kind::Count),
    ("execs.explain", Kind::Switch),
    ("receipts.verify", Kind::Switch),
    ("egress.enabled", Kind::Switch),
    ("egress.private", Kind::List),
    ("egress.closed", Kind::List),
    ("egress.hosts", Kind::List),
    ("egress.connections", Kind::Count),
    ("quotas.sandboxes", Kind::Count),
    ("quotas.memory", Kind::Text),
    ("quotas.cpu_weight", Kind::Count),
    ("quotas.disk", Kind::Text),
    ("quotas.snapshots", Kind::Count),
    ("quotas.execs", Kind::Count),
    ("quotas.streams", Kind::Count),
    ("quotas.requests_per_second", Kind::Count),
];

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Origin {
    Default,
    File(PathBuf, usize),
    Environment(String),
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path, line) => write!(f, "{}:{line}", path.display()),
            Self::Environment(name) => write!(f, "${name}"),
            Self::Flag(name) => f.write_str(name),
        }
    }
}

/// What a setting is set to, as it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
enum Value {
    Unset,
    One(String),
    Many(Vec<String>),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unset => f.write_str("-"),
            Self::One(text) => f.write_str(text),
            Self::Many(texts) if texts.is_empty() => f.write_str("-"),
            Self::Many(texts) => f.write_str(&texts.join(",")),
        }
    }
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// What the daemon goes by.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) socket: PathBuf,
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) state_dir: PathBuf,
    pub(crate) group: Option<String>,
    pub(crate) allowed_hosts: Vec<String>,
    pub(crate) backends: Vec<String>,
    pub(crate) log_format: LogFormat,
    pub(crate) log_level: tracing::Level,
    pub(crate) manager: SandboxManagerConfig,
    pub(crate) registries: Registries,
    /// Whether commands are followed wherever they can be.
    pub(crate) explain: bool,
    /// Whether the limits of every sandbox are exceeded before anybody has it.
    pub(crate) verify: bool,
    /// What sandboxes may reach of what is not public, and where names lead.
    pub(crate) egress: EgressOptions,
    /// How large the audit log gets; none is kept if absent.
    pub(crate) audit: Option<Limits>,
    /// What a tenant may have whose key says nothing else.
    pub(crate) quotas: Quotas,
    values: BTreeMap<&'static str, (Value, Origin)>,
}

/// What the caller's environment says, so that tests can say something else.
#[derive(Clone, Debug, Default)]
pub(crate) struct Surroundings {
    pub(crate) variables: BTreeMap<String, String>,
    pub(crate) is_root: bool,
}

impl Surroundings {
    /// Reads those of this process.
    pub(crate) fn of_process() -> Self {
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        Self { variables, is_root: rustix::process::geteuid().is_root() }
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    fn home(&self) -> &Path {
        Path::new(self.get("HOME").unwrap_or("/nonexistent"))
    }

    fn state_dir(&self) -> PathBuf {
        if self.is_root {
            return "/var/lib/warren".into();
        }
        let state = self.get("XDG_STATE_HOME").map(PathBuf::from);
        state.unwrap_or_else(|| self.home().join(".local/state")).join("warren")
    }

    fn socket(&self) -> PathBuf {
        if self.is_root {
            return "/run/warren/warren.sock".into();
        }
        match self.get("XDG_RUNTIME_DIR") {
            Some(runtime) => Path::new(runtime).join("warren.sock"),
            None => self.state_dir().join("warren.sock"),
        }
    }

    fn config_file(&self) -> PathBuf {
        if self.is_root {
            return "/etc/warren/warren.toml".into();
        }
        let config = self.get("XDG_CONFIG_HOME").map(PathBuf::from);
        config.unwrap_or_else(|| self.home().join(".config")).join("warren/warren.toml")
    }
}

impl Config {
    /// Puts together what defaults, file, environment and flags say.
    pub(crate) fn load(args: &SettingArgs, around: &Surroundings) -> Result<Self, Failure> {
        let mut values = defaults(around);
        let named = args.config.clone().or_else(|| around.get("WARREN_CONFIG").map(PathBuf::from));
        let path = named.clone().unwrap_or_else(|| around.config_file());
        match std::fs::read_to_string(&path) {
            Ok(text) => read_file(&path, &text, &mut values)?,
            Err(error) if named.is_none() && error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(Failure::system(&format!("cannot read {}", path.display()), &error));
            }
        }
        for (name, kind) in SETTINGS {
            let variable = format!("WARREN_{}", name.replace('.', "_").to_uppercase());
            if let Some(text) = around.get(&variable) {
                let value = match kind {
                    Kind::List => Value::Many(split(text)),
                    Kind::Text | Kind::Count | Kind::Time | Kind::Switch => {
                        Value::One(text.to_owned())
                    }
                };
                values.insert(name, (value, Origin::Environment(variable)));
            }
        }
        let mut flag = |name, flag, value: Option<String>| {
            if let Some(value) = value {
                values.insert(name, (Value::One(value), Origin::Flag(flag)));
            }
        };
        let text = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        flag("socket", "--socket", text(&args.socket));
        flag("listen", "--listen", args.listen.clone());
        flag("state_dir", "--state-dir", text(&args.state_dir));
        flag("group", "--group", args.group.clone());
        flag("log_format", "--log-format", args.log_format.clone());
        if let Some(backends) = &args.backends {
            values.insert("backends", (Value::Many(split(backends)), Origin::Flag("--backends")));
        }
        Self::new(values)
    }

    fn new(values: BTreeMap<&'static str, (Value, Origin)>) -> Result<Self, Failure> {
        let read = Values(&values);
        let pool = PoolConfig {
            enabled: read.switch("pool.enabled")?,
            min_warm: read.count("pool.min_warm")?,
            max_warm: read.count("pool.max_warm")?,
            warm_ttl: read.time("pool.warm_ttl")?,
            warm_profiles: read.list("pool.warm_profiles"),
        };
        let default_timeouts = SessionTimeouts {
            idle_timeout: read.time("timeouts.idle")?,
            detach_timeout: read.time("timeouts.detach")?,
            suspend_timeout: read.time("timeouts.suspend")?,
        };
        let manager = SandboxManagerConfig {
            max_sandboxes: read.count("max_sandboxes")?,
            pool,
            default_timeouts,
            cleanup_interval: read.time("cleanup_interval")?.max(Duration::from_millis(10)),
        };
        let listen = read.text("listen").map(|text| {
            let hint = "write an address and a port, as in 127.0.0.1:8080";
            text.parse().map_err(|_| read.wrong("listen", "is no address", hint))
        });
        let log_format = match read.text("log_format") {
            Some("json") => LogFormat::Json,
            Some("text") | None => LogFormat::Text,
            Some(_) => return Err(read.wrong("log_format", "is no format", "text or json")),
        };
        let log_level = read.text("log_level").unwrap_or("info").parse().map_err(|_| {
            read.wrong("log_level", "is no level", "error, warn, info, debug or trace")
        })?;
        let path = |name| match read.text(name).map(PathBuf::from) {
            Some(path) if path.is_absolute() => Ok(path),
            Some(path) => std::path::absolute(&path)
                .map_err(|_| read.wrong(name, "is no path", "write an absolute path")),
            None => Err(read.wrong(name, "is empty", "write an absolute path")),
        };
        let backends = read.list("backends");
        if let Some(other) = backends.iter().find(|name| !backends::NAMES.contains(&name.as_str()))
        {
            let reason = format!("has no backend `{other}`");
            return Err(read.wrong("backends", &reason, backends::HINT));
        }
        if let Some(twice) =
            backends.iter().find(|name| backends.iter().filter(|other| other == name).count() > 1)
        {
            return Err(read.wrong("backends", &format!("has `{twice}` twice"), "name each once"));
        }
        let registries = registries(&read)?;
        let mebibytes = |name| Ok::<_, Failure>(u64::from(read.count(name)?.max(1)) << 20);
        let audit = Limits {
            file_bytes: mebibytes("audit.file_mib")?,
            total_bytes: mebibytes("audit.total_mib")?,
        };
        let audit = read.switch("audit.enabled")?.then_some(audit);
        let quotas = Quotas {
            sandboxes: read.bound("quotas.sandboxes")?,
            memory_bytes: read.size("quotas.memory")?,
            cpu_weight: read.bound("quotas.cpu_weight")?,
            disk_bytes: read.size("quotas.disk")?,
            snapshots: read.bound("quotas.snapshots")?,
            execs: read.bound("quotas.execs")?,
            streams: read.bound("quotas.streams")?,
            requests_per_second: read.bound("quotas.requests_per_second")?,
        };
        Ok(Self {
            explain: read.switch("execs.explain")?,
            verify: read.switch("receipts.verify")?,
            egress: egress(&read)?,
            audit,
            quotas,
            socket: path("socket")?,
            listen: listen.transpose()?,
            state_dir: path("state_dir")?,
            group: read.text("group").map(str::to_owned),
            allowed_hosts: read.list("allowed_hosts"),
            backends,
            log_format,
            log_level,
            manager,
            registries,
            values,
        })
    }
}

/// Reads what sandboxes may reach.
fn egress(read: &Values<'_>) -> Result<EgressOptions, Failure> {
    let networks = |key: &str| {
        let network = |text: String| {
            let hint = "write networks, as in 10.0.0.0/8";
            let found: Result<Destination, _> = text.parse();
            let found = found.ok().filter(|it| matches!(it.host, DestinationHost::Range(..)));
            found.ok_or_else(|| read.wrong(key, "has what is no network", hint))
        };
        read.list(key).into_iter().map(network).collect::<Result<Vec<_>, Failure>>()
    };
    let hosts = read.list("egress.hosts").into_iter().map(|text| {
        let hint = "write services and addresses, as in llm.internal:8080=127.0.0.1";
        let odd = |_| read.wrong("egress.hosts", "has what is no NAME:PORT=ADDRESS", hint);
        text.parse::<EgressHost>().map_err(odd)
    });
    Ok(EgressOptions {
        enabled: read.switch("egress.enabled")?,
        private: networks("egress.private")?,
        closed: networks("egress.closed")?,
        hosts: hosts.collect::<Result<_, Failure>>()?,
        connections: usize::try_from(read.count("egress.connections")?).unwrap_or(usize::MAX),
        ..EgressOptions::default()
    })
}

/// Reads which registries are known, and who we are there.
fn registries(read: &Values<'_>) -> Result<Registries, Failure> {
    let mut registries = Registries::default();
    for text in read.list("images.registries") {
        let (name, plain_http) = match text.strip_prefix("http://") {
            Some(name) => (name, true),
            None => (text.strip_prefix("https://").unwrap_or(&text), false),
        };
        let known = KnownRegistry { plain_http, login: None };
        registries.known.insert(name.trim_end_matches('/').to_owned(), known);
    }
    registries.authorities = read.text("images.ca_file").map(PathBuf::from);
    let Some(path) = read.text("images.login_file") else { return Ok(registries) };
    let wrong = |what: &str| {
        let hint =
            r#"it has {"auths": {"HOST": {"auth": "base64 of user:password"}}}, as Docker's"#;
        read.wrong("images.login_file", what, hint)
    };
    // Read by the daemon and whoever looks at its settings; a client need not be able to.
    let Ok(text) = std::fs::read(path) else { return Ok(registries) };
    let file: Logins = serde_json::from_slice(&text).map_err(|_| wrong("is no file of logins"))?;
    for (name, login) in file.auths {
        let login = Login::decode(&login.auth).ok_or_else(|| wrong("has a login that is none"))?;
        registries.known.entry(name).or_default().login = Some(login);
    }
    Ok(registries)
}

/// A file of logins, as Docker and podman write it.
#[derive(serde::Deserialize)]
struct Logins {
    #[serde(default)]
    auths: BTreeMap<String, EncodedLogin>,
}

#[derive(serde::Deserialize)]
struct EncodedLogin {
    auth: String,
}

fn defaults(around: &Surroundings) -> BTreeMap<&'static str, (Value, Origin)> {
    let one = |text: &dyn ToString| Value::One(text.to_string());
    let many = |texts: &[&str]| Value::Many(texts.iter().map(|&text| text.to_owned()).collect());
    let time = |time: Duration| Value::One(format!("{}s", time.as_secs()));
    let manager = SandboxManagerConfig::default();
    let (pool, timeouts) = (&manager.pool, &manager.default_timeouts);
    let value = |name| match name {
        "socket" => one(&around.socket().display()),
        "state_dir" => one(&around.state_dir().display()),
        "allowed_hosts" | "images.registries" | "egress.private" | "egress.closed"
        | "egress.hosts" => many(&[]),
        "egress.enabled" => one(&true),
        "egress.connections" => one(&EgressOptions::default().connections),
        "backends" => many(&["linux"]),
        "log_format" => one(&"text"),
        "log_level" => one(&"info"),
        "max_sandboxes" => one(&manager.max_sandboxes),
        "cleanup_interval" => time(manager.cleanup_interval),
        "timeouts.idle" => time(timeouts.idle_timeout),
        "timeouts.detach" => time(timeouts.detach_timeout),
        "timeouts.suspend" => time(timeouts.suspend_timeout),
        "pool.enabled" => one(&pool.enabled),
        "pool.min_warm" => one(&pool.min_warm),
        "pool.max_warm" => one(&pool.max_warm),
        "pool.warm_ttl" => time(pool.warm_ttl),
        "audit.enabled" => one(&true),
        "execs.explain" | "receipts.verify" => one(&false),
        "audit.file_mib" => one(&(Limits::default().file_bytes >> 20)),
        "audit.total_mib" => one(&(Limits::default().total_bytes >> 20)),
        "pool.warm_profiles" => Value::Many(pool.warm_profiles.clone()),
        _ => Value::Unset,
    };
    SETTINGS.into_iter().map(|(name, _)| (name, (value(name), Origin::Default))).collect()
}

fn split(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// The values by name, to be read as what they should be.
struct Values<'a>(&'a BTreeMap<&'static str, (Value, Origin)>);

impl Values<'_> {
    fn text(&self, name: &str) -> Option<&str> {
        match self.0.get(name) {
            Some((Value::One(text), _)) if !text.is_empty() => Some(text),
            Some(_) | None => None,
        }
    }

    fn list(&self, name: &str) -> Vec<String> {
        match self.0.get(name) {
            Some((Value::Many(texts), _)) => texts.clone(),
            Some((Value::One(text), _)) => split(text),
            Some((Value::Unset, _)) | None => Vec::new(),
        }
    }

    fn count(&self, name: &str) -> Result<u32, Failure> {
        let count = self.text(name).unwrap_or_default().parse();
        count.map_err(|_| self.wrong(name, "is no whole number", "write a number, as in 100"))
    }

    /// Returns a number that need not be given.
    fn bound(&self, name: &str) -> Result<Option<u64>, Failure> {
        self.text(name).map(|_| self.count(name).map(u64::from)).transpose()
    }

    /// Returns a size that need not be given.
    fn size(&self, name: &str) -> Result<Option<u64>, Failure> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let size = units::size(text);
        size.map(Cap::bound).map_err(|accepted| self.wrong(name, "is no size", &accepted))
    }

    fn time(&self, name: &str) -> Result<Duration, Failure> {
        match units::time(self.text(name).unwrap_or_default()) {
            Ok(Cap::At(millis)) => Ok(Duration::from_millis(millis)),
            Ok(Cap::Lifted) => Ok(Duration::MAX),
            Err(accepted) => Err(self.wrong(name, "is no time", &accepted)),
        }
    }

    fn switch(&self, name: &str) -> Result<bool, Failure> {
        match self.text(name) {
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(_) | None => Err(self.wrong(name, "is neither true nor false", "write one")),
        }
    }

    fn wrong(&self, name: &str, reason: &str, hint: &str) -> Failure {
        let (value, origin) = match self.0.get(name) {
            Some((value, origin)) => (value.to_string(), origin.to_string()),
            None => (String::new(), String::new()),
        };
        Failure::usage(format!("{origin}: `{name}`: `{value}` {reason}"), hint)
    }
}

/// Reads a file; what it does not know it refuses, and names the line.
fn read_file(
    path: &Path,
    text: &str,
    values: &mut BTreeMap<&'static str, (Value, Origin)>,
) -> Result<(), Failure> {
    let line = |at: usize| text[..at.min(text.len())].matches('\n').count() + 1;
    let table = DeTable::parse(text).map_err(|error| {
        let at = line(error.span().map_or(0, |span| span.start));
        let message = format!("{}:{at}: {}", path.display(), error.message());
        Failure::usage(message, "the file is TOML: NAME = VALUE, text in quotes")
    })?;
    read_table("", table.get_ref(), &mut |name, at, value| {
        let at = line(at);
        let Some(&(known, kind)) = SETTINGS.iter().find(|(known, _)| *known == name) else {
            let names: Vec<&str> = SETTINGS.iter().map(|(name, _)| *name).collect();
            let message = format!("{}:{at}: there is no setting `{name}`", path.display());
            return Err(Failure::usage(message, format!("the settings are {}", names.join(", "))));
        };
        let value = written(kind, value).ok_or_else(|| {
            let wanted = match kind {
                Kind::Text => "text in quotes",
                Kind::Count => "a whole number",
                Kind::Time => "a time in quotes, as in \"30s\"",
                Kind::Switch => "true or false",
                Kind::List => "a list of texts, as in [\"a\", \"b\"]",
            };
            let message = format!("{}:{at}: `{name}` is of another type", path.display());
            Failure::usage(message, format!("write {wanted}"))
        })?;
        values.insert(known, (value, Origin::File(path.to_owned(), at)));
        Ok(())
    })
}

fn read_table(
    prefix: &str,
    table: &DeTable<'_>,
    read: &mut dyn FnMut(&str, usize, &DeValue<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for (key, value) in table {
        let name = format!("{prefix}{}", key.get_ref());
        let is_section = SETTINGS.iter().any(|(known, _)| known.starts_with(&format!("{name}.")));
        match value.get_ref() {
            DeValue::Table(inner) if is_section => read_table(&format!("{name}."), inner, read)?,
            other => read(&name, key.span().start, other)?,
        }
    }
    Ok(())
}

fn written(kind: Kind, value: &DeValue<'_>) -> Option<Value> {
    match (kind, value) {
        (Kind::Text | Kind::Time, DeValue::String(text)) => Some(Value::One(text.to_string())),
        (Kind::Count, DeValue::Integer(number)) if number.radix() == 10 => {
            Some(Value::One(number.as_str().replace('_', "")))
        }
        (Kind::Switch, DeValue::Boolean(is_on)) => Some(Value::One(is_on.to_string())),
        (Kind::List, DeValue::Array(items)) => {
            let texts = items.iter().map(|item| item.get_ref().as_str().map(str::to_owned));
            texts.collect::<Option<_>>().map(Value::Many)
        }
        _ => None,
    }
}

/// One line of `warren config --json`.
#[derive(Serialize)]
struct Line<'a> {
    name: &'a str,
    value: &'a Value,
    origin: String,
}

/// Prints the settings that hold, and where each comes from.
pub(crate) fn config(args: &ConfigArgs) -> Result<u8, Failure> {
    let config = Config::load(&args.settings, &Surroundings::of_process())?;
    let failed = |error| Failure::system("cannot write to stdout", &error);
    if args.json {
        for (name, (value, origin)) in &config.values {
            let line = Line { name, value, origin: origin.to_string() };
            output::print_json(&line).map_err(failed)?;
        }
        return Ok(0);
    }
    let rows = config.values.iter().map(|(name, (value, origin))| {
        vec![(*name).to_owned(), value.to_string(), origin.to_string()]
    });
    let table = output::table(&["SETTING", "VALUE", "ORIGIN"], rows.collect());
    output::print(table.as_bytes()).map_err(failed)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around(pairs: &[(&str, &str)]) -> Surroundings {
        let pair = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        Surroundings { variables: pairs.iter().map(pair).collect(), is_root: false }
    }

    fn file(text: &str) -> (tempfile::TempDir, SettingArgs) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("warren.toml");
        std::fs::write(&path, text).unwrap();
        (directory, SettingArgs { config: Some(path), ..SettingArgs::default() })
    }

    fn origin(config: &Config, name: &str) -> String {
        config.values[name].1.to_string()
    }

    #[test]
    fn flags_win_over_the_environment_and_that_over_the_file() {
        let (_directory, mut args) =
            file("group = \"a\"\nmax_sandboxes = 7\n[pool]\nmin_warm = 1\nwarm_ttl = \"2m\"\n");
        let around = around(&[
            ("HOME", "/h"),
            ("WARREN_MAX_SANDBOXES", "8"),
            ("WARREN_LISTEN", "127.0.0.1:1"),
        ]);
        args.listen = Some("127.0.0.1:2".into());
        let config = Config::load(&args, &around).unwrap();
        assert_eq!(config.group.as_deref(), Some("a"));
        assert!(origin(&config, "group").ends_with("warren.toml:1"));
        assert_eq!(config.manager.max_sandboxes, 8);
        assert_eq!(origin(&config, "max_sandboxes"), "$WARREN_MAX_SANDBOXES");
        assert_eq!(config.listen, Some("127.0.0.1:2".parse().unwrap()));
        assert_eq!(origin(&config, "listen"), "--listen");
        assert_eq!(config.manager.pool.warm_ttl, Duration::from_secs(120));
        assert!(origin(&config, "pool.min_warm").ends_with("warren.toml:4"));
        assert_eq!(config.manager.pool.max_warm, 10);
        assert_eq!(origin(&config, "pool.max_warm"), "default");
        assert_eq!(config.socket, Path::new("/h/.local/state/warren/warren.sock"));
    }

    #[test]
    fn what_is_wrong_in_the_file_is_named_with_its_line() {
        for (text, line, word) in [
            ("group = \"a\"\nsokcet = \"x\"\n", 2, "no setting `sokcet`"),
            ("[pool]\nmin = 1\n", 2, "no setting `pool.min`"),
            ("[pol]\nmin_warm = 1\n", 1, "no setting `pol`"),
            ("\n\nmax_sandboxes = \"7\"\n", 3, "`max_sandboxes` is of another type"),
            ("cleanup_interval = 60\n", 1, "`cleanup_interval` is of another type"),
            ("group = \n", 1, ""),
            ("group = \"a\"\ngroup = \"b\"\n", 2, "duplicate"),
            ("cleanup_interval = \"60\"\n", 1, "is no time"),
            ("max_sandboxes = -1\n", 1, "is no whole number"),
            ("listen = \"nowhere\"\n", 1, "is no address"),
            ("backends = [\"../../bin/sh\"]\n", 1, "has no backend"),
            ("backends = [\"linux\", \"linux\"]\n", 1, "twice"),
        ] {
            let (_directory, args) = file(text);
            let failure = Config::load(&args, &around(&[])).expect_err(text);
            let message = format!("{failure:?}");
            assert!(message.contains(&format!("warren.toml:{line}")), "{text:?}: {message}");
            assert!(message.contains(word), "{text:?}: {message}");
        }
    }

    #[test]
    fn a_file_may_be_damaged_in_any_way_and_is_read_or_refused() {
        let whole = "socket = \"/ü/x\" # é\nmax_sandboxes = 7\n[pool]\nwarm_profiles = [\"a\", 'b']\n\
                     warm_ttl = \"\"\"2m\"\"\"\n[quotas]\nmemory = \"1G\"\nstreams = 16\n[audit]\nenabled = true\n";
        let odd =
            ["\n", "\"", "[", "]", "=", "é", "\u{0}", "9", "_", ".", "\\u00", "#", "'", "{", "}"];
        let whole_char = |text: &str, at: usize| {
            (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
        };
        let (mut random, mut refused) = (7_u64, 0);
        let mut draw = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(random >> 33).unwrap() % below
        };
        for _ in 0..5_000 {
            let mut text = whole.to_owned();
            for _ in 0..=draw(3) {
                let from = whole_char(&text, draw(text.len() + 1));
                let to = whole_char(&text, (from + draw(6)).min(text.len())).max(from);
                text.replace_range(from..to, odd[draw(odd.len())]);
            }
            let mut values = defaults(&around(&[]));
            let read = read_file(Path::new("/x"), &text, &mut values);
            refused += u32::from(read.and_then(|()| Config::new(values)).is_err());
        }
        assert!((500..5_000).contains(&refused), "control: {refused}");
    }

    #[test]
    fn registries_are_known_by_their_names_and_we_by_a_file_of_logins() {
        let directory = tempfile::tempdir().unwrap();
        let logins = directory.path().join("auth.json");
        std::fs::write(&logins, r#"{"auths":{"ghcr.io":{"auth":"bWU6czNjcmV0"}}}"#).unwrap();
        let text = format!(
            "[images]\nregistries = [\"http://localhost:5000/\", \"https://ghcr.io\"]\nlogin_file = {logins:?}\n"
        );
        let (_directory, args) = file(&text);
        let known = Config::load(&args, &around(&[])).unwrap().registries.known;
        assert!(known["localhost:5000"].plain_http && known["localhost:5000"].login.is_none());
        let login = known["ghcr.io"].login.clone().unwrap();
        assert_eq!((login.user.as_str(), login.password.as_str()), ("me", "s3cret"));
        assert!(!known["ghcr.io"].plain_http);
        std::fs::write(&logins, r#"{"auths":{"ghcr.io":{"auth":"nothing"}}}"#).unwrap();
        assert!(Config::load(&args, &around(&[])).is_err());
    }

    #[test]
    fn a_file_that_was_named_must_be_there() {
        let args = SettingArgs { config: Some("/nonexistent/x".into()), ..Default::default() };
        assert!(Config::load(&args, &around(&[])).is_err());
        assert!(Config::load(&SettingArgs::default(), &around(&[])).is_ok());
    }

    #[test]
    fn root_and_users_have_their_own_places() {
        let root = Surroundings { is_root: true, ..Surroundings::default() };
        let config = Config::load(
            &SettingArgs { config: Some("/dev/null".into()), ..Default::default() },
            &root,
        );
        let config = config.unwrap();
        assert_eq!(config.socket, Path::new("/run/warren/warren.sock"));
        assert_eq!(config.state_dir, Path::new("/var/lib/warren"));
        let user = around(&[("HOME", "/h"), ("XDG_RUNTIME_DIR", "/run/user/7")]);
        let config = Config::load(&SettingArgs::default(), &user).unwrap();
        assert_eq!(config.socket, Path::new("/run/user/7/warren.sock"));
        assert_eq!(config.state_dir, Path::new("/h/.local/state/warren"));
    }
}
