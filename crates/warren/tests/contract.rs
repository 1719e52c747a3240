//! A program of a user that names every type, field, default and method of the contract's first
//! section. It fails to compile when one of them changes.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use tokio::sync::mpsc;
use warren::*;

/// Asserts that a type has the traits that users rely on.
fn is_value<T: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned>() {}
fn is_key<T: Eq + std::hash::Hash + Ord>() {}
fn is_copy<T: Copy + Eq>() {}
fn has_default<T: Default>() {}

#[test]
fn every_type_is_a_plain_value() {
    is_value::<SandboxId>();
    is_value::<SandboxSession>();
    is_value::<SessionState>();
    is_value::<SessionTimeouts>();
    is_value::<AttachRequest>();
    is_value::<AttachResult>();
    is_value::<SandboxSelectionOptions>();
    is_value::<RequiredCapabilities>();
    is_value::<SandboxManagerStats>();
    is_value::<SandboxManagerConfig>();
    is_value::<PoolConfig>();
    is_value::<SandboxSpec>();
    is_value::<BindMount>();
    is_value::<ResourceLimits>();
    is_value::<SandboxCapabilities>();
    is_value::<BackendCapabilities>();
    is_value::<BackendHealth>();
    is_value::<Command>();
    is_value::<ExecContext>();
    is_value::<ExecOutput>();
    is_value::<ResourceUsage>();
    is_value::<StreamOutput>();
    is_value::<ExecCause>();
    is_value::<ExecReport>();
    is_value::<Enforcement>();
    is_value::<CreateOptions>();
    is_key::<SandboxId>();
    is_key::<Limit>();
    is_copy::<SessionState>();
    is_copy::<Limit>();
    has_default::<SandboxSelectionOptions>();
    has_default::<RequiredCapabilities>();
    has_default::<SandboxManagerStats>();
    has_default::<SandboxManagerConfig>();
    has_default::<PoolConfig>();
}

fn session() -> SandboxSession {
    SandboxSession {
        session_id: "sess-1".to_string(),
        sandbox_id: SandboxId("sbx-1".to_string()),
        client_id: "me".to_string(),
        created_at: Utc::now(),
        last_active_at: Utc::now(),
        state: SessionState::Active,
        metadata: HashMap::from([("k".to_string(), "v".to_string())]),
        timeouts: SessionTimeouts {
            idle_timeout: Duration::from_secs(1),
            detach_timeout: Duration::from_secs(2),
            suspend_timeout: Duration::from_secs(3),
        },
    }
}

fn limits() -> ResourceLimits {
    ResourceLimits {
        max_memory_bytes: Some(1_u64 << 30),
        max_cpu_time_ms: Some(1_u64),
        max_wall_time_ms: Some(1_u64),
        max_processes: Some(1),
        max_open_files: Some(8),
        max_output_bytes: Some(1_u64),
        max_write_bytes: Some(1_u64 << 20),
        cpu_weight: Some(1),
    }
}

fn spec() -> SandboxSpec {
    SandboxSpec {
        profile: "default".to_string(),
        workdir: PathBuf::from("/workspace"),
        allowed_paths_ro: vec![PathBuf::from("/a")],
        allowed_paths_rw: vec![PathBuf::from("/b")],
        bind_mounts: vec![BindMount {
            source: PathBuf::from("/c"),
            target: PathBuf::from("/d"),
            readonly: true,
        }],
        allowed_network: vec!["example.org:443".to_string()],
        environment: vec![("A".to_string(), "b".to_string())],
        limits: limits(),
        network_enabled: true,
        seccomp_profile: Some("strict".to_string()),
        creation_timeout: Duration::from_secs(1),
        labels: vec![("team".to_string(), "blue".to_string())],
    }
}

fn capabilities() -> SandboxCapabilities {
    SandboxCapabilities {
        sandbox_id: "sbx-1".to_string(),
        backend: "mine".to_string(),
        profile: "default".to_string(),
        can_write_filesystem: true,
        readable_paths: vec![PathBuf::from("/")],
        writable_paths: vec![PathBuf::from("/")],
        has_network: false,
        allowed_destinations: vec![String::new()],
        limits: limits(),
        syscall_filter_active: false,
        blocked_syscall_categories: vec![String::new()],
        is_persistent: false,
        created_at: Utc::now(),
        time_remaining_ms: Some(1_u64),
    }
}

fn backend_capabilities() -> BackendCapabilities {
    BackendCapabilities {
        name: "mine".to_string(),
        filesystem_isolation: true,
        network_isolation: true,
        process_isolation: true,
        resource_limits: true,
        syscall_filtering: true,
        persistent_sandboxes: true,
        snapshots: true,
        max_concurrent_sandboxes: Some(1_u32),
        available_profiles: vec!["default".to_string()],
        platform_features: vec![String::new()],
    }
}

fn usage() -> ResourceUsage {
    ResourceUsage {
        peak_memory_bytes: 1_u64,
        cpu_time_ms: 1_u64,
        wall_time_ms: 1_u64,
        bytes_written: 1_u64,
        bytes_read: 1_u64,
    }
}

fn output() -> ExecOutput {
    ExecOutput {
        exit_code: 0_i32,
        stdout: vec![b'o'],
        stderr: vec![b'e'],
        duration: Duration::from_secs(1),
        timed_out: false,
        resource_limited: false,
        resource_usage: Some(usage()),
    }
}

#[test]
fn every_listed_field_can_be_written_as_a_literal_and_survives_json() {
    fn round_trip<T>(value: &T)
    where
        T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
    {
        let json = serde_json::to_string(value).unwrap();
        assert_eq!(&serde_json::from_str::<T>(&json).unwrap(), value);
    }
    round_trip(&session());
    round_trip(&spec());
    round_trip(&capabilities());
    round_trip(&backend_capabilities());
    round_trip(&output());
    round_trip(&AttachRequest {
        sandbox_id: SandboxId::from_string("sbx-1"),
        client_id: "me".to_string(),
        create_if_missing: true,
        create_spec: Some(spec()),
    });
    round_trip(&AttachResult {
        session: session(),
        newly_created: true,
        capabilities: capabilities(),
    });
    round_trip(&SandboxSelectionOptions {
        preferred_id: Some(SandboxId::from_string("sbx-1")),
        require_fresh: true,
        required_capabilities: RequiredCapabilities {
            network: Some(true),
            write_access: Some(true),
            min_memory_bytes: Some(1_u64),
            readable_paths: vec!["/a".to_string()],
            writable_paths: vec!["/b".to_string()],
        },
        preferred_backend: Some("linux".to_string()),
        required_labels: HashMap::from([("k".to_string(), "v".to_string())]),
        use_pool: true,
    });
    round_trip(&SandboxManagerStats {
        sandboxes_created: 1_u64,
        active_sandboxes: 1_u64,
        active_sessions: 1_u64,
        detached_sessions: 1_u64,
        pool_size: 1_u64,
        pool_hit_rate: 0.5_f64,
        avg_creation_time_ms: 0.5_f64,
        timeout_destroys: 1_u64,
    });
    round_trip(&SandboxManagerConfig {
        max_sandboxes: 1_u32,
        pool: PoolConfig {
            enabled: false,
            min_warm: 1_u32,
            max_warm: 1_u32,
            warm_ttl: Duration::from_secs(1),
            warm_profiles: vec!["strict".to_string()],
        },
        default_timeouts: SessionTimeouts::default(),
        cleanup_interval: Duration::from_secs(1),
    });
    round_trip(&BackendHealth {
        healthy: true,
        active_sandboxes: 1_u32,
        resource_utilization: 0.5_f32,
        warnings: vec![String::new()],
        last_sandbox_created: Some(Utc::now()),
    });
    round_trip(&Command {
        program: "true".to_string(),
        args: vec![String::new()],
        workdir: Some(PathBuf::from("/")),
        env: HashMap::from([("k".to_string(), "v".to_string())]),
        inherit_env: false,
        stdin: Some(vec![0]),
        timeout: Some(Duration::from_secs(1)),
    });
    round_trip(&ExecContext {
        trace_id: "t".to_string(),
        request_id: "r".to_string(),
        workdir: Some(PathBuf::from("/")),
        extra_env: vec![("k".to_string(), "v".to_string())],
        timeout: Some(Duration::from_secs(1)),
        capture_stdout: false,
        capture_stderr: false,
        stream_output: true,
    });
    round_trip(&vec![
        StreamOutput::Stdout(vec![1]),
        StreamOutput::Stderr(vec![2]),
        StreamOutput::Exit { code: 3_i32 },
    ]);
    for state in [
        SessionState::Active,
        SessionState::Detached,
        SessionState::Suspended,
        SessionState::Terminated,
    ] {
        round_trip(&state);
    }
}

#[test]
fn every_default_is_the_one_of_the_contract() {
    let timeouts = SessionTimeouts::default();
    assert_eq!(timeouts.idle_timeout, Duration::from_secs(300));
    assert_eq!(timeouts.detach_timeout, Duration::from_secs(3600));
    assert_eq!(timeouts.suspend_timeout, Duration::from_secs(86400));

    let selection = SandboxSelectionOptions::default();
    assert!(selection.preferred_id.is_none() && !selection.require_fresh && !selection.use_pool);
    assert!(selection.preferred_backend.is_none() && selection.required_labels.is_empty());
    let required = selection.required_capabilities;
    assert!(required.network.is_none() && required.write_access.is_none());
    assert!(required.min_memory_bytes.is_none());
    assert!(required.readable_paths.is_empty() && required.writable_paths.is_empty());

    let config = SandboxManagerConfig::default();
    assert_eq!(config.max_sandboxes, 100);
    assert_eq!(config.cleanup_interval, Duration::from_secs(60));
    assert_eq!(config.default_timeouts, timeouts);
    assert!(config.pool.enabled);
    assert_eq!((config.pool.min_warm, config.pool.max_warm), (2, 10));
    assert_eq!(config.pool.warm_ttl, Duration::from_secs(600));
    assert_eq!(config.pool.warm_profiles, ["default"]);

    let spec = SandboxSpec::default();
    assert_eq!(spec.profile, "default");
    assert_eq!(spec.workdir, PathBuf::from("/workspace"));
    assert!(spec.allowed_paths_ro.is_empty() && spec.allowed_paths_rw.is_empty());
    assert!(spec.bind_mounts.is_empty() && spec.allowed_network.is_empty());
    assert!(spec.environment.is_empty() && spec.labels.is_empty());
    assert!(!spec.network_enabled && spec.seccomp_profile.is_none());
    assert_eq!(spec.creation_timeout, Duration::from_secs(30));

    let limits = spec.limits;
    assert_eq!(limits.max_memory_bytes, Some(512 * 1024 * 1024));
    assert_eq!(limits.max_cpu_time_ms, Some(60_000));
    assert_eq!(limits.max_wall_time_ms, Some(120_000));
    assert_eq!(limits.max_processes, Some(64));
    assert_eq!(limits.max_open_files, Some(256));
    assert_eq!(limits.max_output_bytes, Some(10 * 1024 * 1024));
    assert_eq!(limits.max_write_bytes, Some(100 * 1024 * 1024));
    assert_eq!(limits.cpu_weight, Some(100));

    let context = ExecContext::default();
    assert!(context.capture_stdout && context.capture_stderr && !context.stream_output);
    assert!(context.workdir.is_none() && context.timeout.is_none() && context.extra_env.is_empty());

    let stats = SandboxManagerStats::default();
    assert_eq!((stats.sandboxes_created, stats.pool_size, stats.timeout_destroys), (0, 0, 0));
    assert!(stats.pool_hit_rate == 0.0 && stats.avg_creation_time_ms == 0.0);
}

#[test]
fn ids_have_their_prefixes_and_a_uuid() {
    let uuid = |text: &str, prefix: &str| {
        let rest = text.strip_prefix(prefix).expect(prefix).to_string();
        assert_eq!(uuid::Uuid::parse_str(&rest).unwrap().get_version_num(), 4);
    };
    uuid(SandboxId::new().as_str(), "sbx-");
    uuid(&SandboxId::default().to_string(), "sbx-");
    assert_ne!(SandboxId::new(), SandboxId::new());
    assert_eq!(SandboxId::from_string("x").as_str(), "x");
    assert_eq!(serde_json::to_string(&SandboxId::from_string("x")).unwrap(), "\"x\"");

    let mut session = SandboxSession::new(SandboxId::from_string("sbx-1"), "me");
    uuid(&session.session_id, "sess-");
    assert_eq!(session.state, SessionState::Active);
    assert_eq!((session.sandbox_id.as_str(), session.client_id.as_str()), ("sbx-1", "me"));
    assert_eq!(session.created_at, session.last_active_at);
    assert!(session.metadata.is_empty() && !session.is_timed_out());
    let before: DateTime<Utc> = session.last_active_at;
    session.touch();
    assert!(session.last_active_at >= before);
}

#[test]
fn a_command_is_built_by_value() {
    let command = Command::new("python3")
        .args(["-c", "print(6*7)"])
        .args(vec![String::from("x")])
        .workdir("/tmp")
        .env("A", "b")
        .timeout(Duration::from_secs(5))
        .stdin("in");
    assert_eq!(command.program, "python3");
    assert_eq!(command.args, ["-c", "print(6*7)", "x"]);
    assert_eq!(command.workdir, Some(PathBuf::from("/tmp")));
    assert_eq!(command.env["A"], "b");
    assert_eq!(command.timeout, Some(Duration::from_secs(5)));
    assert_eq!(command.stdin, Some(b"in".to_vec()));
    assert!(command.inherit_env);
}

#[test]
fn isolation_is_full_with_every_wall_and_soft_with_none() {
    assert!(backend_capabilities().is_fully_isolated());
    assert!(!backend_capabilities().is_soft_isolation());
    assert!(BackendCapabilities::default().is_soft_isolation());
    let open = BackendCapabilities { network_isolation: false, ..backend_capabilities() };
    assert!(!open.is_fully_isolated() && !open.is_soft_isolation());
}

/// A backend, a sandbox and a manager of a user's own, with the required methods alone.
struct Mine(SandboxId, SandboxCapabilities);

#[async_trait]
impl IsolationBackend for Mine {
    fn name(&self) -> &str {
        "mine"
    }
    async fn probe(&self) -> Result<BackendCapabilities, SandboxError> {
        Ok(backend_capabilities())
    }
    async fn create_sandbox(&self, _: &SandboxSpec) -> Result<Box<dyn Sandbox>, SandboxError> {
        Ok(Box::new(Mine(self.0.clone(), self.1.clone())))
    }
    async fn list_sandboxes(&self) -> Result<Vec<SandboxId>, SandboxError> {
        Ok(vec![self.0.clone()])
    }
    async fn get_sandbox(&self, _: &SandboxId) -> Result<Option<Box<dyn Sandbox>>, SandboxError> {
        Ok(None)
    }
    async fn destroy_all(&self) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn health_check(&self) -> Result<BackendHealth, SandboxError> {
        Ok(BackendHealth::default())
    }
}

#[async_trait]
impl Sandbox for Mine {
    fn id(&self) -> &SandboxId {
        &self.0
    }
    fn capabilities(&self) -> &SandboxCapabilities {
        &self.1
    }
    async fn exec(&self, _: &Command, _: &ExecContext) -> Result<ExecOutput, SandboxError> {
        Ok(output())
    }
    async fn exec_streaming(
        &self,
        _: &Command,
        _: &ExecContext,
        output_tx: mpsc::Sender<StreamOutput>,
    ) -> Result<ExecOutput, SandboxError> {
        drop(output_tx.send(StreamOutput::Exit { code: 0 }).await);
        Ok(output())
    }
    async fn is_alive(&self) -> bool {
        true
    }
    async fn suspend(&self) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn resume(&self) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn snapshot(&self, name: &str) -> Result<String, SandboxError> {
        Ok(name.to_string())
    }
    async fn restore(&self, _: &str) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn destroy(&self) -> Result<(), SandboxError> {
        Ok(())
    }
    async fn resource_usage(&self) -> Result<ResourceUsage, SandboxError> {
        Ok(usage())
    }
}

/// Calls every method of the manager with the types that users write. Never run: it is the
/// compiler that checks it.
#[expect(dead_code, reason = "the compiler is the test")]
async fn names_every_method_of_the_manager(manager: &dyn SandboxManager) -> anyhow::Result<()> {
    let acquired: (SandboxSession, Arc<dyn Sandbox>) =
        manager.acquire(&spec(), &SandboxSelectionOptions::default(), "me").await?;
    let session: SandboxSession = acquired.0;
    let (): () = manager.release(&session, true).await?;
    let request = AttachRequest {
        sandbox_id: session.sandbox_id.clone(),
        client_id: "me".to_string(),
        create_if_missing: false,
        create_spec: None,
    };
    let _: AttachResult = manager.attach(request).await?;
    let (): () = manager.detach(&session).await?;
    let (): () = manager.suspend(&session).await?;
    let _: SandboxSession = manager.resume(&session).await?;
    let (): () = manager.terminate(&session).await?;
    let _: Vec<SandboxSession> = manager.list_sessions().await?;
    let _: Option<SandboxSession> = manager.get_session("sess-1").await?;
    let _: Option<SandboxSession> = manager.get_session_by_sandbox(&session.sandbox_id).await?;
    let _: Option<SandboxSession> = manager.get_session_by_client("me").await?;
    let _: Option<Arc<dyn Sandbox>> = manager.get_sandbox(&session.sandbox_id).await?;
    let (): () = manager.set_default_sandbox(Some(session.sandbox_id)).await?;
    let _: Option<SandboxId> = manager.get_default_sandbox().await;
    let _: u64 = manager.cleanup_expired().await?;
    let _: SandboxManagerStats = manager.stats().await;
    let _: bool = manager.health().await?;
    Ok(())
}

#[tokio::test]
async fn a_backend_with_the_required_methods_alone_refuses_what_it_cannot_honour() {
    let mine = Mine(SandboxId::from_string("sbx-1"), capabilities());
    let backend: Arc<dyn IsolationBackend> = Arc::new(mine);
    let spec = SandboxSpec::default();
    let create = async |options: CreateOptions| {
        backend.create_sandbox_with(&spec, &options).await.map(drop).map_err(|error| error.code())
    };
    let none = CreateOptions::default();
    assert_eq!(create(none.clone()).await, Ok(()));
    let id = Some(SandboxId::new());
    assert_eq!(create(CreateOptions { id, ..none.clone() }).await, Err("unsupported"));
    let demanded = [Limit::Memory].into();
    let demanding = CreateOptions { demanded, ..none.clone() };
    assert_eq!(create(demanding.clone()).await, Err("limit_not_enforceable"));
    let accept_missing = [Limit::Memory].into();
    assert_eq!(create(CreateOptions { accept_missing, ..demanding }).await, Ok(()));
    let quota = CreateOptions { cpu_quota_millis: Some(500), ..none };
    assert_eq!(create(quota).await, Err("limit_not_enforceable"));
}

#[tokio::test]
async fn a_sandbox_with_the_required_methods_alone_reports_from_its_output() {
    let sandbox: Box<dyn Sandbox> = Box::new(Mine(SandboxId::new(), capabilities()));
    let command = Command::new("true");
    let report = sandbox.exec_report(&command, &ExecContext::default()).await.unwrap();
    assert_eq!(report.cause, ExecCause::Exited { code: 0 });
    assert_eq!(sandbox.enforcement(), Enforcement::default());
    assert!(format!("{sandbox:?}").contains("sbx-"));
}

#[test]
fn an_error_becomes_an_anyhow_error() {
    let error = anyhow::Error::from(SandboxError::Ended { id: SandboxId::from_string("x") });
    assert_eq!(error.to_string(), "sandbox `x` has ended");
    assert_eq!(error.downcast_ref::<SandboxError>().unwrap().code(), "ended");
}
