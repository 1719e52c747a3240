//! What a sandbox is to be, decided from the spec, the profile and what the host has.
//!
//! Pure but for the question what a path of the host is, which comes in from outside.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use warren_init::plan::{
    Cgroups, Entry, EntryKind, Filter, Identity, Landlock, Lifetime, Mount, Overlay, Owner, Owners,
    Plan, Proc, Promised, Root, Scratch, Users, Walls,
};

use warren_sys::process;
use warren_sys::seccomp::{self, Instruction};

use super::host::{FileKind, Privilege};
use super::limits::Decision;
use crate::egress;
use crate::layers::Layers;
use crate::profile::{Profile, ProfileUsers, Seccomp};
use crate::{Base, HostTools, LayerId, Limit, Result, SandboxError, SandboxId, SandboxSpec};

/// What of `/dev` a sandbox has, beside terminals and shared memory of its own.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
/// What a distribution with a merged `/usr` has as links into it, and others as directories.
const MERGED: [&str; 6] = ["bin", "sbin", "lib", "lib32", "lib64", "libx32"];
/// The home of the commands' user.
pub(crate) const HOME: &str = "/home/user";
/// Where commands may write, in every sandbox.
pub(crate) const WRITABLE: [&str; 4] = ["/workspace", HOME, "/tmp", "/var/tmp"];
/// As many mounts as descriptors fit into one message, with some to spare.
const MAX_MOUNTS: usize = 200;

const PASSWD: &str = "\
root:x:0:0:root:/root:/usr/sbin/nologin
warren:x:998:998:Warren's init:/:/usr/sbin/nologin
user:x:1000:1000:user:/home/user:/bin/sh
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
";
const GROUP: &str = "root:x:0:\ntty:x:5:\nwarren:x:998:\nuser:x:1000:\nnogroup:x:65534:\n";
const DEV_PASSWD: &str = "\
root:x:0:0:root:/root:/bin/bash
warren:x:998:998:Warren's init:/:/usr/sbin/nologin
user:x:1000:1000:user:/home/user:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
";
/// Where Warren's own `sudo` is, over whatever the host has there.
const SUDO: &str = "/usr/bin/sudo";
const PROFILE: &str = "\
for file in /etc/profile.d/*.sh; do
  if [ -r \"$file\" ]; then . \"$file\"; fi
done
unset file
";
const HOSTS: &str = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n";
const RESOLV: &str = "# This sandbox has no network, so there is no name server.\n";
/// What is not there is looked for at 127.0.0.1, where init answers.
const RESOLV_ALLOWED: &str = "# Names that this sandbox may connect to are known at 127.0.0.1.\n";
const NSSWITCH: &str = "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\n\
     protocols: files\nservices: files\n";

/// Asks what a path of the host is.
pub(crate) trait Look {
    /// What it is, links followed.
    fn kind(&self, path: &Path) -> Option<FileKind>;
    /// Where it leads, if it is a link.
    fn link(&self, path: &Path) -> Option<PathBuf>;
    /// Whether it is on an overlay, as in a container. The kernel stacks two and no more.
    fn is_overlay(&self, path: &Path) -> bool;
}

/// Looks at the host itself.
#[derive(Debug)]
pub(crate) struct RealHost;

impl Look for RealHost {
    fn kind(&self, path: &Path) -> Option<FileKind> {
        super::host::file_kind(path)
    }

    fn link(&self, path: &Path) -> Option<PathBuf> {
        std::fs::read_link(path).ok()
    }

    fn is_overlay(&self, path: &Path) -> bool {
        rustix::fs::statfs(path).is_ok_and(|found| found.f_type == OVERLAY)
    }
}

/// The number by which an overlay is known. See statfs(2).
const OVERLAY: rustix::fs::FsWord = 0x794c_7630;

/// Takes the host for what it was when a sandbox was made: everything that was bound was there then,
/// and what has become of it since changes nothing.
#[derive(Debug)]
pub(crate) struct RememberedHost;

impl Look for RememberedHost {
    fn kind(&self, path: &Path) -> Option<FileKind> {
        Some(RealHost.kind(path).unwrap_or(FileKind::Other))
    }

    fn link(&self, path: &Path) -> Option<PathBuf> {
        let merged = path.parent() == Some(Path::new("/"));
        RealHost.link(path).filter(|_| merged)
    }

    fn is_overlay(&self, path: &Path) -> bool {
        RealHost.is_overlay(path)
    }
}

/// What is decided before the plan.
#[derive(Debug)]
pub(crate) struct Inputs<'a> {
    /// Which backend asks.
    pub(crate) backend: &'static str,
    pub(crate) id: &'a SandboxId,
    pub(crate) spec: &'a SandboxSpec,
    pub(crate) profile: &'a Profile,
    pub(crate) seccomp: &'a Seccomp,
    pub(crate) privilege: Privilege,
    pub(crate) lifetime: Lifetime,
    pub(crate) limits: &'a Decision,
    pub(crate) cgroups: Cgroups,
    pub(crate) base: &'a Base,
    /// Where layers are kept, if they are.
    pub(crate) layers: Option<&'a Layers>,
}

/// Decides, or says which part of the spec cannot be.
pub(crate) fn plan(inputs: &Inputs<'_>, host: &impl Look) -> Result<Plan> {
    let mut links = Vec::new();
    let mounts = mounts(inputs, host, &mut links)?;
    let mut skeleton = Skeleton::default();
    let users = users(inputs)?;
    if matches!(users, Users::Several { .. }) {
        skeleton.furnish_for_several(host);
    }
    skeleton.furnish(inputs, &links, &mounts);
    let targets = |mounts: &[(Mount, FileKind)]| {
        let writable = mounts.iter().filter(|(mount, _)| mount.writable);
        writable.map(|(mount, _)| mount.target.clone()).collect::<Vec<_>>()
    };
    let mut writable: Vec<String> = match users {
        // The root of an image is the sandbox's own, as far as the rights of its files go.
        Users::One if !inputs.base.layers.is_empty() => vec!["/".to_owned()],
        Users::One => ["/dev", "/proc"].map(str::to_owned).to_vec(),
        // What cannot be written is so by its mount; all else is root's.
        Users::Several { .. } => vec!["/".to_owned()],
    };
    writable.extend(WRITABLE.map(str::to_owned));
    writable.extend(targets(&mounts));
    let workdir = text(&inputs.spec.workdir, "workdir")?;
    if !is_below_any(&inputs.spec.workdir, mounts.iter().map(|(mount, _)| mount.target.as_str())) {
        writable.push(workdir);
    }
    let (overlays, mounts) = match users {
        Users::One => (Vec::new(), mounts),
        // Root of the sandbox installs things; what it writes is its own.
        Users::Several { .. } => overlays(mounts, host),
    };
    let bits = |program: &[Instruction]| {
        program.iter().map(|instruction| instruction.to_bits()).collect::<Vec<_>>()
    };
    let mut workload = vec![bits(inputs.seccomp.workload)];
    workload.extend(stay_visible(inputs.limits)?.as_deref().map(bits));
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Ok(Plan {
        hostname: hostname(inputs.id),
        identity: match inputs.privilege {
            Privilege::Root => Identity::Range,
            Privilege::User { uid, gid } => Identity::Single { uid, gid },
        },
        users,
        lifetime: inputs.lifetime,
        scratch: Scratch {
            // What is there from the start takes room on the same filesystem, and not from the
            // sandbox's share of it. Zero stays zero: no bound.
            bytes: match inputs.limits.scratch.bytes {
                0 => 0,
                bytes => bytes.saturating_add(skeleton.bytes()),
            },
            ..inputs.limits.scratch
        },
        root: root(inputs)?,
        skeleton: skeleton.entries,
        overlays,
        mounts: mounts.into_iter().map(|(mount, _)| mount).collect(),
        devices: owned(&DEVICES),
        proc: Proc {
            masked: owned(inputs.profile.proc_masked),
            read_only: owned(inputs.profile.proc_readonly),
            pids_only: inputs.profile.proc_pids_only,
        },
        landlock: Landlock { writable, tcp: inputs.profile.tcp },
        filter: Filter { init: bits(inputs.seccomp.init), workload },
        cgroups: inputs.cgroups.clone(),
        bounds: inputs.limits.bounds,
        walls: Walls::Namespaces,
        promised: promised(inputs.seccomp, inputs.limits),
        egress: None,
        ahead: false,
    })
}

/// Says what is promised of commands, whatever is around them.
pub(crate) fn promised(seccomp: &Seccomp, limits: &Decision) -> Promised {
    let files = limits.enforced.iter().find(|enforced| enforced.limit == Limit::OpenFiles);
    Promised {
        no_tracing: seccomp.blocked_categories.contains(&"debug"),
        open_files: files.map(|enforced| enforced.value),
        host_port: None,
        host_pid: i32::try_from(std::process::id()).ok(),
    }
}

/// Says where the layers are that the root stands on.
fn root(inputs: &Inputs<'_>) -> Result<Root> {
    let place = |id: &LayerId| match inputs.layers {
        Some(layers) => text(&layers.path(id), "state_dir"),
        None => Err(SandboxError::Unsupported {
            feature: "a root of layers".to_owned(),
            backend: inputs.backend.to_owned(),
            hint: "give the backend a directory to keep layers in".to_owned(),
        }),
    };
    let all = |ids: &[LayerId]| ids.iter().map(place).collect::<Result<Vec<_>>>();
    Ok(Root { below: all(&inputs.base.layers)?, above: all(&inputs.base.changes)? })
}

/// Takes the host's `/usr` out of what is mounted as it is, if it is shown. Of the rest of the host
/// nothing is the sandbox's root's.
fn overlays(
    mounts: Vec<(Mount, FileKind)>,
    host: &impl Look,
) -> (Vec<Overlay>, Vec<(Mount, FileKind)>) {
    let is_usr = |(mount, _): &(Mount, FileKind)| {
        mount.owners == Owners::Shifted && mount.source == "/usr" && mount.target == "/usr"
    };
    let (usr, mut rest): (Vec<_>, Vec<_>) = mounts.into_iter().partition(is_usr);
    for (mount, _) in rest.iter_mut().filter(|(mount, _)| mount.owners == Owners::Shifted) {
        mount.owners = Owners::Nobody;
    }
    let overlay = |(mount, _): (Mount, FileKind)| Overlay {
        veiled: !host.is_overlay(Path::new(&mount.source)),
        source: mount.source,
        target: mount.target,
    };
    (usr.into_iter().map(overlay).collect(), rest)
}

/// Decides which users there are. A plain user has one id to give.
fn users(inputs: &Inputs<'_>) -> Result<Users> {
    match (inputs.profile.users, inputs.privilege) {
        (ProfileUsers::One, _) => Ok(Users::One),
        (ProfileUsers::Several { capabilities }, Privilege::Root) => {
            Ok(Users::Several { capabilities })
        }
        (ProfileUsers::Several { .. }, Privilege::User { .. }) => Err(SandboxError::Unsupported {
            feature: format!("profile `{}`: users beside the caller's own", inputs.profile.name),
            backend: inputs.backend.to_owned(),
            hint: "run the daemon as root, which gives each sandbox ids of its own, or use the \
                   profile `default`, which has one user"
                .to_owned(),
        }),
    }
}

/// Refuses what would hide from init, where it has to look for itself: memory that no process need
/// have mapped, and another mark than one's own.
pub(crate) fn stay_visible(limits: &Decision) -> Result<Option<Vec<Instruction>>> {
    let refuse = |nr| seccomp::Rule { nr, action: seccomp::NO_SUCH_CALL, when: Vec::new() };
    let mut rules = Vec::new();
    if limits.bounds.memory.is_some() {
        rules.extend(seccomp::HIDDEN_MEMORY.map(refuse));
    }
    if limits.by_marks {
        rules.extend(seccomp::keep_limit(process::MARK_NUMBER));
    }
    if rules.is_empty() {
        return Ok(None);
    }
    seccomp::compile(seccomp::Arch::NATIVE, seccomp::Action::Allow, &rules)
        .map(Some)
        .map_err(|error| SandboxError::Internal { message: error.to_string() })
}

/// A name that tells sandboxes apart and nothing of the host.
fn hostname(id: &SandboxId) -> String {
    let short: String = id.as_str().trim_start_matches("sbx-").chars().take(8).collect();
    let plain = short.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    if plain && !short.is_empty() { format!("warren-{short}") } else { "warren".to_owned() }
}

/// Lists what of the host is seen, outer targets first, and the links of a merged `/usr`.
fn mounts(
    inputs: &Inputs<'_>,
    host: &impl Look,
    links: &mut Vec<(String, String)>,
) -> Result<Vec<(Mount, FileKind)>> {
    let mut mounts = binds(inputs.spec, host)?;
    let mut system: Vec<String> = Vec::new();
    let (shown, merged) = match inputs.base.host_tools {
        HostTools::Shown => (inputs.profile.host, &MERGED[..]),
        HostTools::Hidden => (&[][..], &[][..]),
    };
    for shown in shown {
        if host.kind(Path::new(shown.path)).is_some() {
            system.push(shown.path.to_owned());
        } else if shown.required {
            return Err(SandboxError::Unsupported {
                feature: format!(
                    "profile `{}`: the host has no {}",
                    inputs.profile.name, shown.path
                ),
                backend: inputs.backend.to_owned(),
                hint: "bind a root of your own, or use another host".to_owned(),
            });
        }
    }
    for name in merged {
        let path = format!("/{name}");
        match host.link(Path::new(&path)) {
            Some(target) => links.push((path, text(&target, "a link of the host")?)),
            None if host.kind(Path::new(&path)).is_some() => system.push(path),
            None => {}
        }
    }
    // What the caller binds comes before what the profile would show at, or below, the same place.
    let taken: Vec<String> = mounts.iter().map(|(mount, _)| mount.target.clone()).collect();
    for path in system {
        let covered = is_below_any(Path::new(&path), taken.iter().map(String::as_str));
        if let (false, Some(kind)) = (covered, host.kind(Path::new(&path))) {
            let (source, target) = (path.clone(), path);
            let mount = Mount { source, target, writable: false, owners: Owners::Shifted };
            mounts.push((mount, kind));
        }
    }
    links.retain(|(path, _)| !taken.contains(path));
    if mounts.len() > MAX_MOUNTS {
        let reason = format!("{} mounts are more than {MAX_MOUNTS}", mounts.len());
        let hint = "bind a directory that holds several of them";
        return Err(SandboxError::invalid("bind_mounts", reason, hint));
    }
    mounts.sort_by_key(|(mount, _)| Path::new(&mount.target).components().count());
    Ok(mounts)
}

/// Lists what the caller binds.
fn binds(spec: &SandboxSpec, host: &impl Look) -> Result<Vec<(Mount, FileKind)>> {
    let ro = spec.allowed_paths_ro.iter().map(|path| ("allowed_paths_ro", path, path, false));
    let rw = spec.allowed_paths_rw.iter().map(|path| ("allowed_paths_rw", path, path, true));
    let binds = spec.bind_mounts.iter();
    let binds = binds.map(|bind| ("bind_mounts", &bind.source, &bind.target, !bind.readonly));
    ro.chain(rw)
        .chain(binds)
        .map(|(field, source, target, writable)| {
            let kind = host.kind(source).ok_or_else(|| {
                let reason = format!("`{}` does not exist on the host", source.display());
                SandboxError::invalid(field, reason, "create it first, or correct the path")
            })?;
            refuse_links(source, field, host)?;
            let (source, target) = (text(source, field)?, text(&normal(target), field)?);
            Ok((Mount { source, target, writable, owners: Owners::Workload }, kind))
        })
        .collect()
}

/// Refuses to show a sandbox a directory of ours, in which inits listen or layers are kept, or
/// anything in it.
pub(crate) fn refuse_runtime(spec: &SandboxSpec, runtime: &Path) -> Result<()> {
    let shown = spec.allowed_paths_ro.iter().chain(&spec.allowed_paths_rw);
    let bound = spec.bind_mounts.iter().map(|bind| &bind.source);
    match shown.chain(bound).find(|path| runtime.starts_with(path) || path.starts_with(runtime)) {
        None => Ok(()),
        Some(path) => Err(SandboxError::invalid(
            "bind_mounts",
            format!("`{}` holds Warren's own sockets or layers", path.display()),
            "bind something else, or have Warren's runtime directory elsewhere",
        )),
    }
}

/// Refuses a source that is reached by a link: a sandbox that may write where the link is could turn
/// it to any place of the host. The launcher follows none either, should one appear after this look.
fn refuse_links(source: &Path, field: &str, host: &impl Look) -> Result<()> {
    match source.ancestors().find(|place| host.link(place).is_some()) {
        None => Ok(()),
        Some(link) => {
            let (source, link) = (source.display(), link.display());
            let reason = format!("`{source}` is reached by a link, `{link}`");
            Err(SandboxError::invalid(field, reason, format!("bind what `realpath {source}` says")))
        }
    }
}

/// Forgets doubled and trailing slashes and `.`; the spec has no `..` when it gets here.
fn normal(path: &Path) -> PathBuf {
    path.components().filter(|part| *part != Component::CurDir).collect()
}

fn text(path: &Path, field: &str) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        let reason = format!("`{}` is not UTF-8", path.display());
        SandboxError::invalid(field, reason, "rename it, or bind its parent directory")
    })
}

fn is_below_any<'a>(path: &Path, mut targets: impl Iterator<Item = &'a str>) -> bool {
    targets.any(|target| path.starts_with(target))
}

/// The entries of the root, each once, parents first.
#[derive(Debug, Default)]
struct Skeleton {
    entries: Vec<Entry>,
    seen: BTreeSet<String>,
}

impl Skeleton {
    fn furnish(
        &mut self,
        inputs: &Inputs<'_>,
        links: &[(String, String)],
        mounts: &[(Mount, FileKind)],
    ) {
        let spec = inputs.spec;
        // A root of its own has these itself, or does without.
        let own_root = !inputs.base.layers.is_empty();
        for path in ["/etc", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/run", "/opt"] {
            self.add(path, EntryKind::Directory(0o755), Owner::System);
        }
        for path in ["/tmp", "/var/tmp"] {
            self.add(path, EntryKind::Directory(0o1777), Owner::System);
        }
        for path in [HOME, "/workspace"] {
            self.add(path, EntryKind::Directory(0o755), Owner::Workload);
        }
        let resolv = if egress::is_asked(spec) { RESOLV_ALLOWED } else { RESOLV };
        let etc = [
            ("/etc/hosts", HOSTS),
            ("/etc/resolv.conf", resolv),
            ("/etc/passwd", PASSWD),
            ("/etc/group", GROUP),
            ("/etc/nsswitch.conf", NSSWITCH),
        ];
        for (path, contents) in etc.into_iter().take(if own_root { 2 } else { etc.len() }) {
            self.add(path, EntryKind::File(contents.as_bytes().to_vec()), Owner::System);
        }
        let own = [
            ("/etc/mtab", "../proc/self/mounts"),
            ("/dev/fd", "/proc/self/fd"),
            ("/dev/stdin", "/proc/self/fd/0"),
            ("/dev/stdout", "/proc/self/fd/1"),
            ("/dev/stderr", "/proc/self/fd/2"),
            ("/dev/ptmx", "pts/ptmx"),
            ("/etc/os-release", "../usr/lib/os-release"),
        ];
        for (path, target) in own.into_iter().take(own.len() - usize::from(own_root)) {
            self.add(path, EntryKind::Link(target.to_owned()), Owner::System);
        }
        for name in DEVICES {
            self.add(&format!("/dev/{name}"), EntryKind::File(Vec::new()), Owner::System);
        }
        for (path, target) in links {
            self.add(path, EntryKind::Link(target.clone()), Owner::System);
        }
        for (index, (mount, kind)) in mounts.iter().enumerate() {
            // A target inside an outer mount must be there already: nothing is made on the host.
            let outer = mounts[..index].iter().map(|(outer, _)| outer.target.as_str());
            if !is_below_any(Path::new(&mount.target), outer) {
                let entry = match kind {
                    FileKind::Directory => EntryKind::Directory(0o755),
                    FileKind::Other => EntryKind::File(Vec::new()),
                };
                self.add(&mount.target, entry, Owner::System);
            }
        }
        let targets = mounts.iter().map(|(mount, _)| mount.target.as_str());
        if let (false, Some(workdir)) =
            (is_below_any(&spec.workdir, targets), spec.workdir.to_str())
        {
            self.add(workdir, EntryKind::Directory(0o755), Owner::Workload);
        }
    }

    /// Adds what a machine with users has, before the rest: the first to name a path decides.
    fn furnish_for_several(&mut self, host: &impl Look) {
        self.add("/root", EntryKind::Directory(0o700), Owner::System);
        for path in ["/var/lib", "/var/cache", "/var/log", "/run/lock", "/mnt", "/srv"] {
            self.add(path, EntryKind::Directory(0o755), Owner::System);
        }
        for (path, contents) in [
            ("/etc/passwd", DEV_PASSWD),
            ("/etc/group", GROUP),
            ("/etc/shells", "/bin/sh\n/bin/bash\n"),
            ("/etc/profile", PROFILE),
        ] {
            self.add(path, EntryKind::File(contents.as_bytes().to_vec()), Owner::System);
        }
        self.add(SUDO, EntryKind::OwnProgram, Owner::System);
        // Debian has a python3 and no python.
        let has = |path: &str| host.kind(Path::new(path)).is_some();
        if has("/usr/bin/python3") && !has("/usr/bin/python") && !has("/usr/local/bin/python") {
            let python = EntryKind::Link("/usr/bin/python3".to_owned());
            self.add("/usr/local/bin/python", python, Owner::System);
        }
    }

    /// Returns what the contents of its files take up, in whole pages.
    fn bytes(&self) -> u64 {
        const PAGE: u64 = 4096;
        let length = |entry: &Entry| match &entry.kind {
            EntryKind::File(contents) => contents.len() as u64,
            EntryKind::OwnProgram => warren_init::IMAGE.len() as u64,
            EntryKind::Directory(_) | EntryKind::Link(_) => 0,
        };
        self.entries.iter().map(|entry| length(entry).div_ceil(PAGE) * PAGE).sum()
    }

    /// Adds an entry and the directories above it; the first to name a path decides.
    fn add(&mut self, path: &str, kind: EntryKind, owner: Owner) {
        let path = normal(Path::new(path));
        let Some(name) = path.to_str().filter(|name| *name != "/") else { return };
        if self.seen.contains(name) {
            return;
        }
        if let Some(parent) = path.parent().and_then(Path::to_str) {
            self.add(parent, EntryKind::Directory(0o755), Owner::System);
        }
        self.seen.insert(name.to_owned());
        self.entries.push(Entry { path: name.to_owned(), kind, owner });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::linux::host::GroupSupport;
    use crate::backend::linux::limits;
    use crate::{BindMount, ResourceLimits};

    /// A host with these files and links, and nothing else.
    struct FakeHost(Vec<(&'static str, FileKind)>, Vec<(&'static str, &'static str)>);

    impl Look for FakeHost {
        fn kind(&self, path: &Path) -> Option<FileKind> {
            self.0.iter().find(|(name, _)| Path::new(name) == path).map(|(_, kind)| *kind)
        }

        fn link(&self, path: &Path) -> Option<PathBuf> {
            let found = self.1.iter().find(|(name, _)| Path::new(name) == path);
            found.map(|(_, target)| PathBuf::from(target))
        }

        fn is_overlay(&self, _: &Path) -> bool {
            false
        }
    }

    fn merged() -> FakeHost {
        let files = ["/usr", "/etc/ssl/certs", "/data", "/data/inner", "/root", "/home"];
        let mut files: Vec<_> = files.map(|path| (path, FileKind::Directory)).to_vec();
        files.push(("/etc/ld.so.cache", FileKind::Other));
        FakeHost(files, vec![("/bin", "usr/bin"), ("/lib", "usr/lib")])
    }

    fn plan_of(spec: &SandboxSpec, host: &FakeHost, privilege: Privilege) -> Result<Plan> {
        let groups = GroupSupport::default();
        let limits = limits::decide(&ResourceLimits::default(), None, &[].into(), &groups, false)?;
        let profile = crate::profile::profile("default").unwrap();
        let inputs = Inputs {
            backend: crate::backend::linux::NAME,
            id: &SandboxId::from_string("sbx-0123456789"),
            spec,
            profile,
            seccomp: crate::profile::seccomp(profile.seccomp).unwrap(),
            privilege,
            lifetime: Lifetime::Attached,
            limits: &limits,
            cgroups: Cgroups::default(),
            base: &Base::default(),
            layers: None,
        };
        plan(&inputs, host)
    }

    fn targets(plan: &Plan) -> Vec<&str> {
        plan.mounts.iter().map(|mount| mount.target.as_str()).collect()
    }

    fn entry<'a>(plan: &'a Plan, path: &str) -> Option<&'a EntryKind> {
        plan.skeleton.iter().find(|entry| entry.path == path).map(|entry| &entry.kind)
    }

    #[test]
    fn only_what_the_profile_names_and_the_host_has_is_shown() {
        let plan = plan_of(&SandboxSpec::default(), &merged(), Privilege::Root).unwrap();
        assert_eq!(targets(&plan), ["/usr", "/etc/ld.so.cache", "/etc/ssl/certs"]);
        assert!(plan.mounts.iter().all(|mount| !mount.writable));
        assert_eq!(entry(&plan, "/bin"), Some(&EntryKind::Link("usr/bin".to_owned())));
        assert_eq!(entry(&plan, "/etc/ld.so.cache"), Some(&EntryKind::File(Vec::new())));
        assert_eq!(entry(&plan, "/root"), None);
        assert_eq!(plan.hostname, "warren-01234567");
    }

    #[test]
    fn every_entry_comes_after_its_parent_and_once() {
        let spec = SandboxSpec {
            workdir: "/a/b/c".into(),
            bind_mounts: vec![BindMount {
                source: "/data".into(),
                target: "/deep/er/still".into(),
                readonly: true,
            }],
            ..SandboxSpec::default()
        };
        let plan = plan_of(&spec, &merged(), Privilege::Root).unwrap();
        let mut seen = BTreeSet::from(["/"]);
        for entry in &plan.skeleton {
            let parent = Path::new(&entry.path).parent().and_then(Path::to_str).unwrap();
            assert!(seen.contains(parent), "{} before {parent}", entry.path);
            assert!(seen.insert(&entry.path), "{} twice", entry.path);
        }
        assert!(seen.contains("/deep/er/still") && seen.contains("/a/b/c"));
    }

    #[test]
    fn what_the_caller_binds_wins_and_outer_mounts_come_first() {
        let bind = |source: &str, target: &str| BindMount {
            source: source.into(),
            target: target.into(),
            readonly: false,
        };
        let spec = SandboxSpec {
            bind_mounts: vec![bind("/data/inner", "/etc/x/inner"), bind("/data", "/etc")],
            ..SandboxSpec::default()
        };
        let plan = plan_of(&spec, &merged(), Privilege::Root).unwrap();
        assert_eq!(
            targets(&plan),
            ["/etc", "/usr", "/etc/x/inner"],
            "nothing of the profile in it"
        );
        assert_eq!(entry(&plan, "/etc/x/inner"), None, "nothing is made inside what is bound");
        assert!(plan.landlock.writable.contains(&"/etc".to_owned()));
    }

    #[test]
    fn a_missing_source_or_toolchain_is_named_before_anything_is_made() {
        let spec =
            SandboxSpec { allowed_paths_ro: vec!["/nowhere".into()], ..SandboxSpec::default() };
        let error = plan_of(&spec, &merged(), Privilege::Root).unwrap_err();
        assert!(error.to_string().contains("`/nowhere` does not exist"), "{error}");
        let bare = FakeHost(Vec::new(), Vec::new());
        let error = plan_of(&SandboxSpec::default(), &bare, Privilege::Root).unwrap_err();
        assert_eq!(error.code(), "unsupported");
    }

    #[test]
    fn a_source_that_is_reached_by_a_link_is_refused_and_named() {
        let mut host = merged();
        host.0.push(("/srv/link/inner", FileKind::Directory));
        host.1.push(("/srv/link", "/root"));
        let bound = |path: &str| SandboxSpec {
            allowed_paths_rw: vec![path.into()],
            ..SandboxSpec::default()
        };
        let error = plan_of(&bound("/srv/link/inner"), &host, Privilege::Root).unwrap_err();
        assert!(error.to_string().contains("reached by a link, `/srv/link`"), "{error}");
        assert!(error.hint().unwrap().contains("realpath"), "{error}");
        plan_of(&bound("/data/inner"), &host, Privilege::Root).expect("control: no link");
    }

    #[test]
    fn a_command_keeps_its_mark_where_init_goes_by_it() {
        let prlimit = |resource, new| seccomp::Call {
            arch: seccomp::Arch::NATIVE.audit(),
            nr: seccomp::keep_limit(process::MARK_NUMBER)[1].nr,
            args: [0, resource, new, 0, 0, 0],
        };
        let allows = |limits: &Decision, call| {
            let filter = stay_visible(limits).unwrap();
            filter.is_none_or(|filter| seccomp::evaluate(&filter, &call) == seccomp::Action::Allow)
        };
        let none = GroupSupport::default();
        let with = GroupSupport { v2: Some("/g".into()), ..GroupSupport::default() };
        let decide = |support| {
            limits::decide(&ResourceLimits::unlimited(), None, &[].into(), support, false).unwrap()
        };
        let mark = u64::from(process::MARK_NUMBER);
        assert!(!allows(&decide(&none), prlimit(mark, 0x1000)));
        assert!(!allows(&decide(&none), prlimit(mark, 1 << 32)), "its low half is zero");
        assert!(allows(&decide(&none), prlimit(mark, 0)), "control: it may be read");
        assert!(allows(&decide(&none), prlimit(mark + 1, 0x1000)), "control: another limit");
        assert!(allows(&decide(&with), prlimit(mark, 0x1000)), "control: a cgroup needs no mark");
    }

    #[test]
    fn a_user_has_one_id_and_root_gives_ranges() {
        let user = Privilege::User { uid: 7, gid: 8 };
        let plan = plan_of(&SandboxSpec::default(), &merged(), user).unwrap();
        assert_eq!(plan.identity, Identity::Single { uid: 7, gid: 8 });
        assert_eq!(plan.bounds.processes, Some(64));
        let plan = plan_of(&SandboxSpec::default(), &merged(), Privilege::Root).unwrap();
        assert_eq!(plan.identity, Identity::Range);
    }

    #[test]
    fn a_host_without_merged_usr_has_its_directories_shown() {
        let mut host = merged();
        host.0.extend([("/bin", FileKind::Directory), ("/lib64", FileKind::Directory)]);
        host.1.clear();
        let plan = plan_of(&SandboxSpec::default(), &host, Privilege::Root).unwrap();
        assert_eq!(targets(&plan)[..3], ["/usr", "/bin", "/lib64"]);
    }

    #[test]
    fn an_id_that_is_no_host_name_is_not_used_as_one() {
        assert_eq!(hostname(&SandboxId::from_string("sbx-äöü")), "warren");
        assert_eq!(hostname(&SandboxId::from_string("mine.1")), "warren");
        assert_eq!(hostname(&SandboxId::from_string("mine-1")), "warren-mine-1");
    }
}
