//! Which sandbox and which backend fit what is asked for, decided without touching either.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::{BackendCapabilities, RequiredCapabilities, SandboxCapabilities, SandboxSpec};

/// How a backend came to be considered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chosen {
    /// The caller named it, and so accepts what it lacks.
    ByName,
    /// The manager looks for one that keeps every promise.
    ByPromise,
}

/// Returns what a backend lacks to keep what the spec asks for; nothing if it fits.
pub(super) fn backend_lacks(
    backend: &BackendCapabilities,
    spec: &SandboxSpec,
    chosen: Chosen,
    durable: bool,
) -> Vec<String> {
    let mut lacks = Vec::new();
    if !backend.available_profiles.contains(&spec.profile) {
        lacks.push(format!("profile `{}`", spec.profile));
    }
    let walls = match chosen {
        // The backend itself still refuses a limit that was asked for and that it cannot hold.
        Chosen::ByName => return lacks,
        Chosen::ByPromise => [
            ("filesystem isolation", backend.filesystem_isolation),
            ("network isolation", backend.network_isolation),
            ("process isolation", backend.process_isolation),
            ("a system call filter", backend.syscall_filtering),
        ],
    };
    lacks.extend(walls.iter().filter(|(_, holds)| !holds).map(|(wall, _)| (*wall).to_owned()));
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
            let lacks = backend_lacks(&backend, &spec, Chosen::ByPromise, true);
            assert_eq!(lacks.join(", "), *expected);
            let named = backend_lacks(&backend, &spec, Chosen::ByName, true);
            assert_eq!(named.is_empty(), !expected.starts_with("profile"), "{expected}");
        }
    }
}
