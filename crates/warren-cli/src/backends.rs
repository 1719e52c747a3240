//! The backends by name: what `serve` keeps, what `run` chooses from, what `doctor` looks at.

use std::path::Path;
use std::sync::Arc;

use warren::backend::{
    FakeBackend, HostBackend, HostConfig, LandlockBackend, LinuxBackend, OciBackend, OciRuntime,
};
use warren::egress::Egress;
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
    egress: &Arc<Egress>,
) -> Result<Arc<dyn IsolationBackend>, Failure> {
    let runtime = OciRuntime::ALL.into_iter().find(|runtime| runtime.name() == name);
    if let Some(runtime) = runtime {
        let made = match state_dir {
            None => OciBackend::new(runtime)?,
            Some(state_dir) => {
                let layers = Layers::open(state_dir.join("storage"))?;
                // Each in a place of its own: whoever looks for remains takes all that is there for its own.
                let homes = state_dir.join(format!("sandboxes-{name}"));
                OciBackend::with_layers(runtime, Some(homes), layers)?
            }
        };
        return Ok(Arc::new(made.reaching(egress.clone())));
    }
    Ok(match (name, state_dir) {
        ("host", _) => Arc::new(HostBackend::new(HostConfig { accept_no_isolation: true })),
        ("fake", _) => Arc::new(FakeBackend::new()),
        ("landlock", None) => Arc::new(LandlockBackend::new()?),
        ("landlock", Some(state_dir)) => {
            Arc::new(LandlockBackend::with_runtime(state_dir.join("landlock"))?)
        }
        (_, None) => Arc::new(LinuxBackend::new()?.reaching(egress.clone())),
        (_, Some(state_dir)) => {
            let layers = Layers::open(state_dir.join("storage"))?;
            let homes = state_dir.join("sandboxes");
            let made = LinuxBackend::with_layers(Some(homes), layers)?.reaching(egress.clone());
            Arc::new(made.beginning_ahead())
        }
    })
}

/// Makes the backend of a name for one command, whose sandbox may stand on layers. Where the weakest level will do, and
/// so `landlock` would, one that stands on layers is `linux`'s, which is stronger.
///
/// To be called before there is any thread.
pub(crate) fn make_for_one(name: &str, layers: Option<Layers>) -> Result<LinuxBackend, Failure> {
    let runtime = OciRuntime::ALL.into_iter().find(|runtime| runtime.name() == name);
    Ok(match (runtime, layers) {
        // This process has one thread, and makes one sandbox.
        (None, None) => LinuxBackend::without_launcher()?,
        (None, Some(layers)) => LinuxBackend::without_launcher_on(layers)?,
        (Some(runtime), None) => OciBackend::new(runtime)?.into_maker(),
        (Some(runtime), Some(layers)) => {
            OciBackend::with_layers(runtime, None, layers)?.into_maker()
        }
    })
}

/// Returns which backend runs one command: the one of this name, or the cheapest whose level will do. That its walls
/// stand is tried when the sandbox is made, and a wall that does not is an error.
pub(crate) fn pick(
    asked: &IsolationRequirements,
    named: Option<&str>,
) -> Result<&'static str, Failure> {
    if let Some(other) = named.filter(|name| LADDER.iter().all(|(known, _)| known != name)) {
        return Err(Failure::usage(format!("there is no backend `{other}` for one command"), HINT));
    }
    let mut missing = Vec::new();
    for (name, level) in LADDER.into_iter().filter(|(name, _)| named.is_none_or(|one| one == *name))
    {
        match lacking(name, level, asked) {
            lacks if lacks.is_empty() => return Ok(name),
            lacks => missing.push(format!("backend `{name}` lacks {}", lacks.join(", "))),
        }
    }
    let failure = Failure::from(SandboxError::NoMatch { missing });
    // It lacks something whenever nobody says that less will do.
    Err(if named == Some("landlock") && asked.level.is_none() {
        failure.with_hint("--isolation process asks for no more than it has (docs/isolation.md)")
    } else {
        failure
    })
}

/// Says where else to turn, if a host cannot do what a backend needs.
pub(crate) fn advise(error: SandboxError, backend: &str) -> Failure {
    let is_set_up = matches!(error, SandboxError::Step { .. });
    let failure = Failure::from(error);
    if !is_set_up || backend == "landlock" {
        return failure;
    }
    failure.with_hint(
        "`warren doctor` tries every backend here and shows what each lacks; \
         `--isolation process` does without namespaces, and promises less",
    )
}

/// Returns what is asked for and not claimed by a backend of this level.
fn lacking(name: &str, level: IsolationLevel, asked: &IsolationRequirements) -> Vec<String> {
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
    lacks
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
        let pick = |level, require: &[Guarantee]| super::pick(&requirements(level, require), None);
        assert_eq!(pick(None, &[]), Ok("linux"));
        assert_eq!(pick(None, &Guarantee::ALL), Ok("linux"));
        assert_eq!(pick(Some(IsolationLevel::Namespace), &[Guarantee::Limits]), Ok("linux"));
        assert_eq!(pick(Some(IsolationLevel::Process), &[]), Ok("landlock"));
        assert_eq!(pick(Some(IsolationLevel::Process), &[Guarantee::Process]), Ok("linux"));
        assert_eq!(pick(Some(IsolationLevel::Process), &[Guarantee::Limits]), Ok("linux"));
        assert_eq!(pick(Some(IsolationLevel::Kernel), &Guarantee::ALL), Ok("oci-runsc"));
    }

    #[test]
    fn a_backend_by_name_is_one_of_a_list_and_held_to_what_is_asked_for() {
        let pick = |level, name| super::pick(&requirements(level, &[]), Some(name));
        assert_eq!(pick(None, "linux"), Ok("linux"));
        assert_eq!(pick(Some(IsolationLevel::Process), "landlock"), Ok("landlock"));
        let weaker = format!("{:?}", pick(None, "landlock").unwrap_err());
        assert!(weaker.contains("`landlock` lacks"), "{weaker}");
        assert!(weaker.contains("--isolation process asks"), "{weaker}");
        let other = format!("{:?}", pick(Some(IsolationLevel::Container), "landlock").unwrap_err());
        assert!(!other.contains("--isolation process asks"), "it would not help: {other}");
        assert!(pick(Some(IsolationLevel::Container), "linux").is_err());
        // B17 of the threat list: a name is never a path, and never a flag of a runtime.
        for name in
            ["../../bin/sh", "/usr/bin/runc", "oci-runc --root=/", "runc", "host", "fake", ""]
        {
            assert!(pick(Some(IsolationLevel::Process), name).is_err(), "{name}");
        }
    }
}
