//! The backends by name: what `serve` keeps, what `run` chooses from, what `doctor` looks at.

use std::path::Path;
use std::sync::Arc;

use warren::backend::{
    FakeBackend, HostBackend, HostConfig, LandlockBackend, LinuxBackend, OciBackend, OciRuntime,
};
use warren::layers::Layers;
use warren::{
    BackendCapabilities, Guarantee, IsolationBackend, IsolationLevel, IsolationRequirements,
    SandboxError,
};

use crate::failure::Failure;

/// What users may name, the cheapest first. `fake` runs nothing, and is there for tests.
pub(crate) const NAMES: [&str; 7] =
    ["landlock", "linux", "oci-crun", "oci-runc", "oci-runsc", "host", "fake"];

/// Those that wall anything off and can run one command without a daemon, the cheapest first.
const LADDER: [(&str, IsolationLevel); 5] = [
    ("landlock", IsolationLevel::Process),
    ("linux", IsolationLevel::Namespace),
    ("oci-crun", IsolationLevel::Container),
    ("oci-runc", IsolationLevel::Container),
    ("oci-runsc", IsolationLevel::Kernel),
];

/// What people are told who wrote another name.
pub(crate) const HINT: &str = "the backends are landlock, linux, oci-crun, oci-runc, oci-runsc, and host, which isolates nothing";

/// Makes a backend that keeps its state below a directory, if it is given one.
///
/// To be called before there is any thread.
pub(crate) fn make(
    name: &str,
    state_dir: Option<&Path>,
) -> Result<Arc<dyn IsolationBackend>, Failure> {
    let runtime = OciRuntime::ALL.into_iter().find(|runtime| runtime.name() == name);
    if let Some(runtime) = runtime {
        return Ok(Arc::new(match state_dir {
            None => OciBackend::new(runtime)?,
            Some(state_dir) => {
                let layers = Layers::open(state_dir.join("storage"))?;
                // Each in a place of its own: whoever looks for remains takes all that is there for its own.
                let homes = state_dir.join(format!("sandboxes-{name}"));
                OciBackend::with_layers(runtime, Some(homes), layers)?
            }
        }));
    }
    Ok(match (name, state_dir) {
        ("host", _) => Arc::new(HostBackend::new(HostConfig { accept_no_isolation: true })),
        ("fake", _) => Arc::new(FakeBackend::new()),
        ("landlock", None) => Arc::new(LandlockBackend::new()?),
        ("landlock", Some(state_dir)) => {
            Arc::new(LandlockBackend::with_runtime(state_dir.join("landlock"))?)
        }
        (_, None) => Arc::new(LinuxBackend::new()?),
        (_, Some(state_dir)) => {
            let layers = Layers::open(state_dir.join("storage"))?;
            Arc::new(LinuxBackend::with_layers(Some(state_dir.join("sandboxes")), layers)?)
        }
    })
}

/// Makes the backend of a name for one command.
///
/// To be called before there is any thread.
pub(crate) fn make_for_one(name: &str) -> Result<LinuxBackend, Failure> {
    Ok(match OciRuntime::ALL.into_iter().find(|runtime| runtime.name() == name) {
        // This process has one thread, and makes one sandbox.
        None => LinuxBackend::without_launcher()?,
        Some(runtime) => OciBackend::new(runtime)?.into_maker(),
    })
}

/// Returns which backend runs one command: the cheapest whose level will do. That its walls stand is tried
/// when the sandbox is made, and a wall that does not is an error.
pub(crate) fn pick(asked: &IsolationRequirements) -> Result<&'static str, Failure> {
    let mut missing = Vec::new();
    for (name, level) in LADDER {
        // What it claims, to be proved by making it; limits are proved one by one.
        let proves = level.guarantees();
        let mut claims = BackendCapabilities {
            resource_limits: level > IsolationLevel::Process,
            ..BackendCapabilities::default()
        };
        claims.filesystem_isolation = proves.contains(&Guarantee::Filesystem);
        claims.network_isolation = proves.contains(&Guarantee::Network);
        claims.process_isolation = proves.contains(&Guarantee::Process);
        claims.syscall_filtering = proves.contains(&Guarantee::Syscalls);
        let mut lacks = asked.lacking(Some(level), &claims);
        let runtime = OciRuntime::ALL.into_iter().find(|runtime| runtime.name() == name);
        if let Some(runtime) = runtime.filter(|runtime| !runtime.is_installed()) {
            lacks.push(format!("its program, `{}`", runtime.program()));
        }
        match lacks {
            lacks if lacks.is_empty() => return Ok(name),
            lacks => missing.push(format!("backend `{name}` lacks {}", lacks.join(", "))),
        }
    }
    Err(SandboxError::NoMatch { missing }.into())
}

/// Reads `--isolation` and `--require`.
pub(crate) fn requirements(
    level: Option<IsolationLevel>,
    require: &[Guarantee],
) -> IsolationRequirements {
    IsolationRequirements { level, require: require.iter().copied().collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_command_runs_on_the_cheapest_rung_that_will_do_or_not_at_all() {
        let pick = |level, require: &[Guarantee]| super::pick(&requirements(level, require));
        assert_eq!(pick(None, &[]), Ok("linux"));
        assert_eq!(pick(None, &Guarantee::ALL), Ok("linux"));
        assert_eq!(pick(Some(IsolationLevel::Namespace), &[Guarantee::Limits]), Ok("linux"));
        assert_eq!(pick(Some(IsolationLevel::Process), &[]), Ok("landlock"));
        assert_eq!(pick(Some(IsolationLevel::Process), &[Guarantee::Process]), Ok("linux"));
        assert_eq!(pick(Some(IsolationLevel::Process), &[Guarantee::Limits]), Ok("linux"));
        assert_eq!(pick(Some(IsolationLevel::Kernel), &Guarantee::ALL), Ok("oci-runsc"));
    }
}
