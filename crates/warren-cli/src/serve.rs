//! `warren serve`: the daemon.

use std::fs::{DirBuilder, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::fmt::format::FmtSpan;
use warren::egress::Egress;
use warren::receipt::ReceiptKey;
use warren::store::sqlite::{Retention, SqliteStore};
use warren::store::{Image, Store};
use warren::template::Templates;
use warren::{DefaultSandboxManager, IsolationBackend, Shutdown};
use warren_api::audit::Audit;
use warren_api::e2b;
use warren_api::journal::{KEPT_ANSWERS, KEPT_EVENTS};
use warren_api::keys::{Keys, Quotas};
use warren_api::server::Server;
use warren_api::tls::{Certificate, TlsListener};
use warren_api::{Api, Options, rest};

use crate::args::ServeArgs;
use crate::audit;
use crate::backends;
use crate::config::{Config, LogFormat, Surroundings};
use crate::failure::Failure;
use crate::keys;
use crate::notify::notify;
use crate::output;
use crate::socket::Socket;

/// How long requests that still run are waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the lock of a daemon that was killed may outlive it: a child that it was starting, a container runtime for one, shares the
/// lock until it executes its program, and a busy machine takes its time.
const LAST_CHILD: Duration = Duration::from_secs(2);

/// Serves until it is told to end.
pub(crate) fn serve(args: &ServeArgs) -> Result<u8, Failure> {
    let config = Config::load(&args.settings, &Surroundings::of_process())?;
    log_to_stderr(&config);
    let _lock = lock(&config.state_dir)?;
    let keys = Keys::at(config.state_dir.join(keys::FILE));
    let e2b_key = match (args.e2b, config.listen) {
        (false, _) => None,
        (true, Some(_)) => Some(e2b_key(&config.state_dir, &keys)?),
        (true, None) => {
            let hint = "say where: warren serve --e2b --listen 127.0.0.1:3000";
            return Err(Failure::usage(
                "E2B is spoken on TCP, and there is no address".to_owned(),
                hint,
            ));
        }
    };
    if let Some(listen) = config.listen
        && keys.list()?.is_empty()
    {
        return Err(Failure::fatal("keys", format!("will not listen on {listen} without a key"))
            .with_hint("make one first: warren key create TENANT"));
    }
    // Before any thread: the launcher of sandboxes is forked off here.
    let egress = Egress::new(config.egress.clone());
    let make = |name: &String| backends::make(name, Some(&config.state_dir), &egress);
    let made = config.backends.iter().map(make);
    let backends = made.collect::<Result<Vec<_>, _>>()?;
    // After that: a sandbox is to have no more than it had.
    raise_open_files();
    leave_no_core();
    let (socket, listener) = Socket::bind(&config.socket, config.group.as_deref())?;
    // Every sweep uses a thread for what blocks: so there is always one, also when no other can be started.
    let kept = config.manager.cleanup_interval.saturating_mul(2).max(Duration::from_secs(60));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_keep_alive(kept)
        .build()
        .map_err(|error| Failure::system("cannot start", &error))?;
    drop(runtime.spawn_blocking(|| ()));
    let ended = runtime.block_on(run(args, &config, keys, e2b_key.as_deref(), backends, listener));
    drop(socket);
    ended.map(|()| 0)
}

async fn run(
    args: &ServeArgs,
    config: &Config,
    keys: Keys,
    e2b_key: Option<&str>,
    backends: Vec<Arc<dyn IsolationBackend>>,
    listener: std::os::unix::net::UnixListener,
) -> Result<(), Failure> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error: std::io::Error| Failure::system(&what, &error)
    };
    let mut terminate = signal(SignalKind::terminate()).map_err(failed("cannot hear signals"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed("cannot hear signals"))?;
    let listener = UnixListener::from_std(listener).map_err(failed("cannot listen"))?;
    let tcp = match config.listen {
        Some(address) => Some(
            TcpListener::bind(address)
                .await
                .map_err(failed(&format!("cannot listen on {address}")))?,
        ),
        None => None,
    };

    let retention = Retention { events: KEPT_EVENTS, answers: KEPT_ANSWERS };
    let store = SqliteStore::open_keeping(&config.state_dir.join("warren.db"), retention);
    let store = Arc::new(store.map_err(warren::SandboxError::from)?);
    let key = ReceiptKey::open(&config.state_dir.join("receipt.key"))?;
    let (manager, image) = manager(config, backends.clone(), &store, key).await?;
    if config.verify {
        manager.verify_all();
    }
    let mut allowed_hosts = config.allowed_hosts.clone();
    // Where SDKs that are told a domain alone look for the control plane.
    allowed_hosts.extend(args.e2b_domain.iter().map(|domain| format!("api.{domain}")));
    let audit =
        config.audit.map(|limits| Audit::open(&config.state_dir.join(audit::DIRECTORY), limits));
    let audit = audit.transpose()?;
    let templates = backends.iter().find_map(|backend| {
        let layers = backend.layers()?.clone();
        Some(Templates::new(layers, Arc::clone(backend), config.registries.clone()))
    });
    templates.as_ref().map_or(Ok(()), Templates::take_up)?;
    let options = Options {
        keys: Some(keys),
        audit: audit.clone(),
        quotas: config.quotas,
        explain: config.explain,
        allowed_hosts,
        journal: Some(store),
        templates,
    };
    let api = Api::new(Arc::new(manager.clone()), options);
    for record in image.iter().flat_map(|image| &image.sandboxes) {
        if let Some(owner) = &record.owner {
            api.remember(owner, &record.id, &record.spec.labels);
        }
    }
    api.start().await?;

    let server = Server::new();
    let router = rest::router(&api);
    server.serve(listener, router.clone());
    if let Some(tcp) = tcp {
        let address = tcp.local_addr().map_err(failed("cannot listen"))?;
        let router = match e2b_key {
            None => router,
            Some(key) => {
                let tls = e2b_tls(args, &config.state_dir).await?;
                let port = match &tls {
                    Some((_, 443)) | None => String::new(),
                    Some((_, port)) => format!(":{port}"),
                };
                let domain = args.e2b_domain.as_ref().map(|domain| format!("{domain}{port}"));
                let reaches = e2b_reaches(config, &manager).await;
                let settings = e2b::control::Settings { domain, reaches };
                let router = e2b::control::open(&api, settings).await?;
                // What `Sandbox.create()` asks for: to make one is then to claim one. Only root can.
                if rustix::process::geteuid().is_root() {
                    manager.keep_warm(e2b::control::spec(reaches))?;
                }
                if let Some((tls, _)) = tls {
                    server.serve(tls, router.clone());
                }
                let shown = format!(
                    "export E2B_API_URL=http://{address}\nexport E2B_SANDBOX_URL=http://{address}\n\
                     export E2B_API_KEY={key}\n"
                );
                output::print(shown.as_bytes()).map_err(failed("cannot write to stdout"))?;
                router
            }
        };
        server.serve(tcp, router);
        tracing::info!(%address, "listening");
    }
    tracing::info!(socket = %config.socket.display(), "listening");
    notify("READY=1");

    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    notify("STOPPING=1");
    tracing::info!(stop_all = args.stop_all, "stopping");
    let leave = async {
        // Streams end first: they would keep their connections for ever.
        tokio::join!(api.stop(), server.close(PATIENCE));
        // Whoever hung up last is noted.
        api.noted().await;
        // Without records the next daemon could not find what was left.
        let stops = args.stop_all || image.is_none();
        let mode = if stops { Shutdown::StopAll } else { Shutdown::LeaveRunning };
        manager.shutdown(mode).await;
        // After what ended with that, that this is the end.
        if let Some(audit) = audit {
            audit.stop().await;
        }
    };
    tokio::select! {
        () = leave => tracing::info!("stopped"),
        // Whoever asks twice does not want to wait; the next daemon takes over what is left.
        _ = terminate.recv() => tracing::warn!("stopped at once"),
        _ = interrupt.recv() => tracing::warn!("stopped at once"),
    }
    Ok(())
}

/// Tries whether the sandboxes of E2B can reach anything beyond themselves, as its clients take for granted.
async fn e2b_reaches(config: &Config, manager: &DefaultSandboxManager) -> bool {
    if !config.egress.enabled {
        return false;
    }
    let tried = manager.try_egress(&e2b::control::spec(true)).await;
    if let Err(error) = &tried {
        tracing::warn!(%error, "sandboxes of E2B have no network; `warren doctor` says more");
    }
    tried.is_ok()
}

/// Listens for E2B over TLS, if that is asked for, and says on which port.
///
/// Without a certificate one is made, which those trust who are given the file beside the daemon's
/// state: it is another after each start.
async fn e2b_tls(
    args: &ServeArgs,
    state_dir: &Path,
) -> Result<Option<(TlsListener, u16)>, Failure> {
    let (Some(address), Some(domain)) = (args.e2b_tls, &args.e2b_domain) else { return Ok(None) };
    let failed = |what: String| move |error: std::io::Error| Failure::system(&what, &error);
    let read = |path: &Path| {
        std::fs::read_to_string(path).map_err(failed(format!("cannot read {}", path.display())))
    };
    let certificate = match (&args.e2b_cert, &args.e2b_cert_key) {
        (Some(chain), Some(key)) => Certificate { chain: read(chain)?, key: read(key)? },
        _ => {
            let made = Certificate::make(domain);
            let (certificate, authority) =
                made.map_err(failed(format!("cannot make a certificate for {domain}")))?;
            let path = state_dir.join("e2b-ca.pem");
            std::fs::write(&path, authority)
                .map_err(failed(format!("cannot write {}", path.display())))?;
            tracing::info!(authority = %path.display(), %domain, "made a certificate");
            certificate
        }
    };
    let listening = failed(format!("cannot listen on {address}"));
    let tcp = TcpListener::bind(address).await.map_err(listening)?;
    let port = tcp.local_addr().map_err(failed("cannot listen".to_owned()))?.port();
    let listener = TlsListener::new(tcp, &certificate);
    let listener = listener.map_err(failed("cannot use the certificate".to_owned()))?;
    tracing::info!(%address, "listening over TLS");
    Ok(Some((listener, port)))
}

/// Returns the key that E2B's SDKs are to use: the one of the start before, as long as it is good.
///
/// It is kept as it is, for the daemon's own user alone: whoever starts the daemon again is to be told
/// the same.
fn e2b_key(state_dir: &Path, keys: &Keys) -> Result<String, Failure> {
    let path = state_dir.join("e2b.key");
    let failed = |error| Failure::system(&format!("cannot use {}", path.display()), &error);
    match std::fs::read_to_string(&path) {
        Ok(key) if keys.is_good(key.trim()) => return Ok(key.trim().to_owned()),
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let (key, _) = keys.create_for_e2b("e2b", Quotas::default())?;
    let new = path.with_extension("new");
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&new)
        .map_err(failed)?;
    std::io::Write::write_all(&mut file, format!("{key}\n").as_bytes()).map_err(failed)?;
    std::fs::rename(&new, &path).map_err(failed)?;
    Ok(key)
}

/// Opens a manager with records that outlive it, and returns what they said before; where no backend
/// has sandboxes that outlive the daemon there is nothing to record, and the log says so.
async fn manager(
    config: &Config,
    backends: Vec<Arc<dyn IsolationBackend>>,
    store: &Arc<SqliteStore>,
    key: ReceiptKey,
) -> Result<(DefaultSandboxManager, Option<Image>), Failure> {
    let mut outlives = false;
    for backend in &backends {
        outlives |= backend.probe().await.is_ok_and(|can| can.persistent_sandboxes);
    }
    if !outlives {
        tracing::warn!("sandboxes end with the daemon: no backend here can leave them running");
        let manager =
            DefaultSandboxManager::new_signing(backends, config.manager.clone(), Some(key));
        return Ok((manager, None));
    }
    let image = Store::load(&**store).await.map_err(warren::SandboxError::from)?;
    let (store, config) = (Arc::clone(store), config.manager.clone());
    let manager = DefaultSandboxManager::open_signing(backends, config, store, Some(key)).await?;
    Ok((manager, Some(image)))
}

/// Takes as many descriptors as the host lets us have: each connection and each sandbox needs some.
fn raise_open_files() {
    let had = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: had.maximum, ..had }) {
        tracing::warn!(%error, "cannot have more open files");
    }
}

/// Has no core be written should we crash: keys, variables and what is typed would be in it.
fn leave_no_core() {
    // One byte is too little for a file and, other than none, holds for a program that is piped to as well: core(5).
    let one = Rlimit { current: Some(1), maximum: Some(1) };
    if getrlimit(Resource::Core).maximum != Some(0)
        && let Err(error) = setrlimit(Resource::Core, one)
    {
        tracing::warn!(%error, "cannot do without cores");
    }
}

fn log_to_stderr(config: &Config) {
    let builder = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(config.log_level)
        .with_span_events(FmtSpan::NONE)
        .with_ansi(false);
    // Only a second logger in one process could fail, and there is none.
    let _ = match config.log_format {
        LogFormat::Json => builder.json().try_init(),
        LogFormat::Text => builder.try_init(),
    };
}

/// Makes sure that no other daemon uses the same state.
fn lock(state_dir: &Path) -> Result<File, Failure> {
    let failed = |error| Failure::system(&format!("cannot use {}", state_dir.display()), &error);
    DirBuilder::new().recursive(true).mode(0o700).create(state_dir).map_err(failed)?;
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(state_dir.join("daemon.lock"))
        .map_err(failed)?;
    let began = Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if began.elapsed() < LAST_CHILD => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(Errno::WOULDBLOCK) => {
                let message = format!("another daemon uses {}", state_dir.display());
                return Err(Failure::fatal("state", message)
                    .with_hint("end that one, or use another directory: --state-dir DIR"));
            }
            Err(error) => return Err(failed(error.into())),
        }
    }
}
