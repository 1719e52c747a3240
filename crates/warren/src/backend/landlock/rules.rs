//! What a sandbox without namespaces may touch, decided from the spec, the profile and what the host has.

use std::path::{Path, PathBuf};

use warren_init::plan::{self, Filter, Identity, Lifetime, Plan, Rules, Users, Walls};
use warren_sys::seccomp::{self, Instruction};

use crate::backend::linux::host::Privilege;
use crate::backend::linux::limits::Decision;
use crate::backend::linux::plan::{Look, promised, stay_visible};
use crate::profile::{Profile, ProfileUsers, Seccomp};
use crate::{Result, SandboxError, SandboxId, SandboxSpec};

/// What users choose this backend by.
pub(crate) const NAME: &str = "landlock";

/// Devices that a program expects, and that lead nowhere.
const DEVICES: [&str; 6] =
    ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"];
/// What of `/etc` a program needs to find its libraries and the time; nothing of it is secret.
const TABLES: [&str; 6] = [
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
];
/// What a distribution with a merged `/usr` has as links into it, and others as directories.
const MERGED: [&str; 6] = ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];
/// What the names of sandboxes' directories begin with.
const PREFIX: &str = "warren-";
/// Where commands run by default, which stands for a directory of the sandbox's own.
pub(crate) const WORKSPACE: &str = "/workspace";

/// What is decided before.
#[derive(Debug)]
pub(crate) struct Inputs<'a> {
    pub(crate) id: &'a SandboxId,
    pub(crate) spec: &'a SandboxSpec,
    pub(crate) profile: &'a Profile,
    pub(crate) seccomp: &'a Seccomp,
    pub(crate) privilege: Privilege,
    pub(crate) lifetime: Lifetime,
    pub(crate) limits: &'a Decision,
    /// Below which the sandbox has its directory.
    pub(crate) below: &'a Path,
}

/// Returns the sandbox's own directory.
pub(crate) fn directory(below: &Path, id: &SandboxId) -> PathBuf {
    below.join(format!("{PREFIX}{id}"))
}

/// Returns the spec as it is on the host: where commands run, and what they find in their environment.
pub(crate) fn on_host(spec: &SandboxSpec, own: &Path) -> SandboxSpec {
    let text = |name: &str| own.join(name).display().to_string();
    let mut environment =
        vec![("HOME".to_owned(), text(plan::HOME)), ("TMPDIR".to_owned(), text(plan::SCRATCH))];
    environment.extend(spec.environment.iter().cloned());
    SandboxSpec { workdir: place(&spec.workdir, own), environment, ..spec.clone() }
}

/// Returns where a path is on the host: the workspace is in the sandbox's own directory, everything else
/// where it says.
pub(crate) fn place(path: &Path, own: &Path) -> PathBuf {
    match path.strip_prefix(WORKSPACE) {
        Ok(rest) if rest.as_os_str().is_empty() => own.join(plan::WORKSPACE),
        Ok(rest) => own.join(plan::WORKSPACE).join(rest),
        Err(_) => path.to_owned(),
    }
}

/// Decides, or says which part of the spec cannot be.
pub(crate) fn plan(inputs: &Inputs<'_>, host: &impl Look) -> Result<Plan> {
    let Inputs { spec, profile, .. } = inputs;
    let unsupported = |feature: String, hint: &str| SandboxError::Unsupported {
        feature,
        backend: NAME.to_owned(),
        hint: hint.to_owned(),
    };
    if let ProfileUsers::Several { .. } = profile.users {
        let feature = format!("profile `{}`: users of its own", profile.name);
        return Err(unsupported(feature, "use the profile `default`, or the `linux` backend"));
    }
    if spec.bind_mounts.iter().any(|bind| bind.source != bind.target) {
        let feature = "a path of the host at another place".to_owned();
        return Err(unsupported(feature, "there are no mounts here: use --ro or --rw PATH"));
    }
    let own = directory(inputs.below, inputs.id);
    let ro = spec.allowed_paths_ro.iter().map(|path| ("allowed_paths_ro", path, false));
    let rw = spec.allowed_paths_rw.iter().map(|path| ("allowed_paths_rw", path, true));
    let binds = spec.bind_mounts.iter();
    let binds = binds.map(|bind| ("bind_mounts", &bind.target, !bind.readonly));
    let (mut readable, mut writable) = (Vec::new(), Vec::new());
    for (field, path, writes) in ro.chain(rw).chain(binds) {
        if host.kind(path).is_none() {
            let reason = format!("`{}` does not exist on the host", path.display());
            return Err(SandboxError::invalid(
                field,
                reason,
                "create it first, or correct the path",
            ));
        }
        if let Some(link) = path.ancestors().find(|place| host.link(place).is_some()) {
            let (path, link) = (path.display(), link.display());
            let reason = format!("`{path}` is reached by a link, `{link}`");
            return Err(SandboxError::invalid(
                field,
                reason,
                format!("name what `realpath {path}` says"),
            ));
        }
        if inputs.below.starts_with(path) || is_ours(path, inputs.below) {
            let reason = format!("`{}` holds directories of other sandboxes", path.display());
            return Err(SandboxError::invalid(field, reason, "name what is needed of it"));
        }
        let list = if writes { &mut writable } else { &mut readable };
        list.push(text(path, field)?);
    }
    let stands_for_own = spec.workdir.starts_with(WORKSPACE);
    let shown = readable.iter().chain(&writable).any(|path| spec.workdir.starts_with(path));
    if !stands_for_own && !shown {
        let reason =
            format!("`{}` is no directory that this sandbox may use", spec.workdir.display());
        let hint = "leave it out, or show the directory: --rw DIR";
        return Err(SandboxError::invalid("workdir", reason, hint));
    }
    let shares_files = !readable.is_empty();
    let there = |path: &&str| host.kind(Path::new(path)).is_some();
    let mut system = Vec::new();
    for shown in profile.host {
        if there(&shown.path) {
            system.push(shown.path.to_owned());
        } else if shown.required {
            let feature = format!("profile `{}`: the host has no {}", profile.name, shown.path);
            return Err(unsupported(feature, "use another host"));
        }
    }
    system.extend(MERGED.into_iter().chain(TABLES).filter(there).map(str::to_owned));
    writable.extend(DEVICES.into_iter().filter(there).map(str::to_owned));
    let same_user = matches!(inputs.privilege, Privilege::User { .. });
    let own = text(&own, "state_dir")?;
    let bits = |program: &[Instruction]| {
        program.iter().map(|instruction| instruction.to_bits()).collect::<Vec<_>>()
    };
    let more = seccomp::without_namespaces(if !same_user {
        seccomp::Neighbours::Others
    } else if shares_files {
        seccomp::Neighbours::SameUserSharing
    } else {
        seccomp::Neighbours::SameUser
    });
    let more = seccomp::compile(seccomp::Arch::NATIVE, seccomp::Action::Allow, &more)
        .map_err(|error| SandboxError::Internal { message: error.to_string() })?;
    let mut workload = vec![bits(inputs.seccomp.workload), bits(&more)];
    workload.extend(stay_visible(inputs.limits)?.as_deref().map(bits));
    Ok(Plan {
        hostname: String::new(),
        identity: match inputs.privilege {
            Privilege::Root => Identity::Range,
            Privilege::User { uid, gid } => Identity::Single { uid, gid },
        },
        users: Users::One,
        lifetime: inputs.lifetime,
        scratch: inputs.limits.scratch,
        root: Default::default(),
        skeleton: Vec::new(),
        overlays: Vec::new(),
        mounts: Vec::new(),
        devices: Vec::new(),
        proc: Default::default(),
        landlock: Default::default(),
        filter: Filter { init: bits(inputs.seccomp.init), workload },
        cgroups: Default::default(),
        bounds: inputs.limits.bounds,
        walls: Walls::Rules(Rules {
            directory: own,
            workdir: match spec.workdir.strip_prefix(WORKSPACE) {
                Ok(below) => text(below, "workdir")?,
                Err(_) => String::new(),
            },
            system,
            readable,
            writable,
            file_bytes: spec.limits.max_write_bytes,
            nonce: nonce(inputs.id),
        }),
        promised: promised(inputs.seccomp, inputs.limits),
        egress: None,
        ahead: false,
    })
}

/// Reports whether a path is in the directory of a sandbox.
fn is_ours(path: &Path, below: &Path) -> bool {
    let first = path.strip_prefix(below).ok().and_then(|rest| rest.components().next());
    let first = first.and_then(|first| first.as_os_str().to_str());
    first.is_some_and(|name| name.starts_with(PREFIX))
}

/// Returns what tells the marks of a sandbox from those of every other, by its id alone: whoever finds
/// nothing but its directory can still find its processes.
pub(crate) fn nonce(id: &SandboxId) -> u64 {
    // FNV-1a: ids are random, so that nothing better is needed.
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in id.as_str().bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    // Never 0, which is that of sandboxes with a pid namespace.
    hash % ((1 << plan::NONCE_BITS) - 1) + 1
}

fn text(path: &Path, field: &str) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        let reason = format!("`{}` is not UTF-8", path.display());
        SandboxError::invalid(field, reason, "rename it, or name its parent directory")
    })
}
