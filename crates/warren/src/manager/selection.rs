//! Which sandbox and which backend fit what is asked for, decided without touching either.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::{
    AcquireOptions, BackendCapabilities, Bound, Guarantee, IsolationLevel, IsolationRequirements,
    Limit, RequiredCapabilities, Sandbox, SandboxCapabilities, SandboxSpec,
};

/// How a backend came to be considered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chosen {
    /// The caller named it, and so accepts what it lacks.
    ByName,
    /// The manager looks for one that keeps every promise.
    ByPromise,
}

/// What an acquire asks for, and what each backend lacks of the isolation in it.
pub(super) struct Asked<'a> {
    pub(super) options: &'a AcquireOptions,
    /// By the index of the backend; empty where nothing beyond the default is asked for, which every
    /// sandbox that lives was held to already.
    pub(super) lacking: Vec<Vec<String>>,
}

/// What a sandbox must have that is handed out.
#[derive(Debug, Clone, Default)]
pub(super) struct Needs {
    pub(super) capabilities: RequiredCapabilities,
    pub(super) isolation: IsolationRequirements,
}

impl Needs {
    pub(super) fn of(options: &AcquireOptions) -> Self {
        let capabilities = options.select.required_capabilities.clone();
        Self { capabilities, isolation: options.isolation.clone() }
    }

    /// Returns what a sandbox made from a spec lacks, by what it says of itself.
    pub(super) fn lacking(&self, sandbox: &dyn Sandbox, spec: &SandboxSpec) -> Vec<String> {
        let has = sandbox.capabilities();
        let mut lacks = sandbox_lacks(has, &self.capabilities);
        if self.isolation.require.contains(&Guarantee::Syscalls) && !has.syscall_filter_active {
            lacks.push(Guarantee::Syscalls.description().to_owned());
        }
        if self.isolation.demands_limits() {
            let held = sandbox.enforcement().limits;
            let is_exact = |limit: Limit, value: u64| {
                held.iter().any(|held| {
                    held.limit == limit && held.value == value && held.bound == Bound::Exact
                })
            };
            let asked = Limit::ALL.into_iter().filter_map(|one| Some((one, spec.limits.get(one)?)));
            let missing = asked.filter(|(limit, value)| !is_exact(*limit, *value));
            lacks.extend(missing.map(|(limit, _)| format!("the limit `{limit}`, exactly")));
        }
        lacks
    }
}

/// What a backend costs, the cheapest first: the higher on the ladder, the dearer.
pub(super) fn cost(level: Option<IsolationLevel>) -> IsolationLevel {
    // One that claims no rung and yet proves every wall does what namespaces do.
    level.unwrap_or(IsolationLevel::Namespace)
}

/// Returns what a backend lacks to keep what the spec asks for; nothing if it fits.
pub(super) fn backend_lacks(
    (level, backend): (Option<IsolationLevel>, &BackendCapabilities),
    spec: &SandboxSpec,
    isolation: &IsolationRequirements,
    chosen: Chosen,
    durable: bool,
) -> Vec<String> {
    let mut lacks = Vec::new();
    if !backend.available_profiles.contains(&spec.profile) {
        lacks.push(format!("profile `{}`", spec.profile));
    }
    match chosen {
        // The backend itself still refuses a limit that was asked for and that it cannot hold.
        Chosen::ByName if isolation.is_default() => return lacks,
        // A name accepts what the backend lacks, but not what the same caller says it may not lack.
        Chosen::ByName => {
            lacks.extend(isolation.lacking(level, backend));
            return lacks;
        }
        Chosen::ByPromise => lacks.extend(isolation.lacking(level, backend)),
    }
    if !backend.resource_limits {
        lacks.extend(spec.limits.non_default().iter().map(|limit| format!("the limit `{limit}`")));
    }
    if durable && !backend.persistent_sandboxes {
        lacks.push("sandboxes that outlive the daemon".to_owned());
    }
    lacks
}

/// Returns what a sandbox lacks of the capabilities asked for.
pub(super) fn sandbox_lacks(
    has: &SandboxCapabilities,
    required: &RequiredCapabilities,
) -> Vec<String> {
    let mut lacks = Vec::new();
    let switches = [
        ("network", required.network, has.has_network),
        ("write access", required.write_access, has.can_write_filesystem),
    ];
    for (name, wanted, is) in switches {
        match wanted {
            Some(true) if !is => lacks.push(name.to_owned()),
            Some(false) if is => lacks.push(format!("no {name}")),
            Some(_) | None => {}
        }
    }
    if let (Some(wanted), Some(is)) = (required.min_memory_bytes, has.limits.max_memory_bytes)
        && is < wanted
    {
        lacks.push(format!("{wanted} bytes of memory (it has {is})"));
    }
    let below = |path: &str, roots: &[PathBuf]| {
        roots.iter().any(|root| Path::new(path).starts_with(root)) && !path.contains("..")
    };
    for path in &required.readable_paths {
        if !below(path, &has.readable_paths) && !below(path, &has.writable_paths) {
            lacks.push(format!("reading {path}"));
        }
    }
    for path in &required.writable_paths {
        if !below(path, &has.writable_paths) {
            lacks.push(format!("writing {path}"));
        }
    }
    lacks
}

/// Returns the labels asked for that a spec does not bear, in order.
pub(super) fn labels_missing(
    spec: &SandboxSpec,
    required: &HashMap<String, String>,
) -> Vec<String> {
    let bears = |key: &str, value: &str| spec.labels.iter().any(|(k, v)| k == key && v == value);
    let missing = required.iter().filter(|(key, value)| !bears(key, value));
    let mut missing: Vec<_> =
        missing.map(|(key, value)| format!("label `{key}={value}`")).collect();
    missing.sort();
    missing
}

/// Tells whether a sandbox made from one spec is what another asks for.
pub(super) fn same_spec(has: &SandboxSpec, wanted: &SandboxSpec) -> bool {
    // How long its creation might have taken is no property of what was created.
    has.profile == wanted.profile
        && *has == SandboxSpec { creation_timeout: has.creation_timeout, ..wanted.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walled() -> BackendCapabilities {
        BackendCapabilities {
            name: "b".into(),
            filesystem_isolation: true,
            network_isolation: true,
            process_isolation: true,
            resource_limits: true,
            syscall_filtering: true,
            persistent_sandboxes: true,
            available_profiles: vec!["default".into()],
            ..BackendCapabilities::default()
        }
    }

    #[test]
    fn a5_a_backend_fits_only_if_it_enforces_what_the_spec_asks() {
        type Change = fn(&mut BackendCapabilities, &mut SandboxSpec);
        let rows: &[(&str, Change)] = &[
            ("", |_, _| {}),
            ("filesystem isolation", |b, _| b.filesystem_isolation = false),
            ("network isolation", |b, _| b.network_isolation = false),
            ("process isolation", |b, _| b.process_isolation = false),
            ("a system call filter", |b, _| b.syscall_filtering = false),
            ("profile `strict`", |_, s| s.profile = "strict".into()),
            ("sandboxes that outlive the daemon", |b, _| b.persistent_sandboxes = false),
            ("", |b, _| b.resource_limits = false),
            ("the limit `memory`", |b, s| {
                b.resource_limits = false;
                s.limits.max_memory_bytes = Some(1 << 30);
            }),
        ];
        for (expected, change) in rows {
            let (mut backend, mut spec) = (walled(), SandboxSpec::default());
            change(&mut backend, &mut spec);
            let asked = IsolationRequirements::default();
            let has = (Some(IsolationLevel::Namespace), &backend);
            let lacks = backend_lacks(has, &spec, &asked, Chosen::ByPromise, true);
            assert_eq!(lacks.join(", "), *expected);
            let named = backend_lacks(has, &spec, &asked, Chosen::ByName, true);
            assert_eq!(named.is_empty(), !expected.starts_with("profile"), "{expected}");
        }
    }

    #[test]
    fn a5_a_name_does_not_excuse_what_the_same_caller_requires() {
        let (spec, asked) = (SandboxSpec::default(), IsolationLevel::Container);
        let asked = IsolationRequirements::at_least(asked);
        let (backend, level) = (walled(), Some(IsolationLevel::Namespace));
        let lacks = backend_lacks((level, &backend), &spec, &asked, Chosen::ByName, true);
        assert_eq!(lacks, ["isolation level `container` (it has namespace)"]);
        let level = Some(IsolationLevel::Kernel);
        assert!(backend_lacks((level, &backend), &spec, &asked, Chosen::ByName, true).is_empty());
    }
}
