//! Finding out what this backend can enforce here, by trying.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use super::{LandlockBackend, rules};
use warren_init::protocol::Said;

use crate::backend::linux::probe::explained;
use crate::profile::{self, ProfileUsers};
use crate::receipt::HOST_LOOPBACK;
use crate::{
    BackendCapabilities, Command, CreateOptions, ExecCause, ExecContext, Finding, Inspection,
    Limit, Sandbox, SandboxSpec,
};

/// What no rule holds, whoever the caller is: the hostile suite finds each to be so, and the table in
/// `docs/isolation.md` names it by this name.
const NOT_HELD: [(&str, &str); 4] = [
    ("hidden processes", "other processes of the host can be listed: there is no pid namespace"),
    (
        "hidden metadata",
        "that a file exists, its size, owner and times can be asked for by its path, and directories that \
         everybody may read can be watched",
    ),
    ("a /proc of its own", "what of /proc every user of the host may read, a sandbox may"),
    ("a name of its own", "the host's name is seen: there is no UTS namespace"),
];

/// The one more of a plain user's.
const ACCOUNT: &str = "an account of its own";

/// Makes a sandbox, tries every wall from inside, and removes it.
pub(super) async fn inspect(backend: &LandlockBackend) -> Inspection {
    let mut findings = Vec::new();
    let mut note = |layer: &str, holds: bool, detail: String, fix: &str| {
        let fix = (!holds && !fix.is_empty()).then(|| fix.to_owned());
        findings.push(Finding { layer: layer.to_owned(), holds, detail, fix });
        holds
    };
    let options = CreateOptions { accept_missing: Limit::ALL.into(), ..CreateOptions::default() };
    let sandbox = match backend.create(&SandboxSpec::default(), &options).await {
        Ok(sandbox) => sandbox,
        Err(error) => {
            let fix = "Linux 6.12 or later with Landlock in its list of security modules \
                       (lsm=landlock,...); a container must allow the landlock_* calls";
            note("sandbox", false, explained(&error), fix);
            let name = rules::NAME.to_owned();
            let capabilities = BackendCapabilities { name, ..BackendCapabilities::default() };
            return Inspection { capabilities, findings };
        }
    };
    let who = match sandbox.id_base() {
        Some(_) => "root: each sandbox is a user of its own",
        None => "a plain user: the sandbox is the caller on the host",
    };
    note("sandbox", true, who.to_owned(), "");
    let bug = "please report this as a bug";
    let tries = sandbox.tries().await.unwrap_or_default();
    let mut refused = |layer: &str, names: &[&str]| {
        let is_refused = |name: &&&str| {
            let made = tries.iter().find(|one| one.name == **name);
            made.is_some_and(|one| !matches!(one.said, Said::Errno(0) | Said::Same))
        };
        let held = names.iter().filter(is_refused).count() == names.len();
        note(layer, held, format!("{} refused from inside", names.join(", ")), bug)
    };
    let mounts = refused("mounts", &["mount", "device node", "write /usr", "write /proc/sys"]);
    let network = refused(
        "network",
        &[
            "packet socket",
            "raw socket",
            "vsock",
            "udp to 192.0.2.1",
            "tcp to 192.0.2.1",
            HOST_LOOPBACK,
        ],
    );
    let privileges = refused("privileges", &["become root", "cgroup namespace of its own"]);
    let seccomp = refused("seccomp", &["keyctl"]);
    let memory = refused("other processes' memory", &["read /proc/1"]);
    let files = match secret() {
        Ok(secret) => {
            let path = secret.0.display().to_string();
            let script = format!("cat {path} || : > {path} || chmod 777 {path} || rm -f {path}");
            let tried = sandbox.exec_report(&shell(&script), &ExecContext::default()).await;
            let kept = std::fs::read(&secret.0).is_ok_and(|bytes| bytes == SECRET);
            let held = kept
                && tried.is_ok_and(|report| {
                    report.output.stdout.is_empty()
                        && !matches!(report.cause, ExecCause::Exited { code: 0 })
                });
            let detail = "a file of the host that anybody may read: reading, emptying, chmod and \
                          removing refused from inside";
            note("files", held, detail.to_owned(), bug)
        }
        Err(error) => note("files", false, format!("cannot make a file to try: {error}"), ""),
    };
    let own = std::process::id();
    let script = format!("kill -0 {own}");
    let signalled = sandbox.exec_report(&shell(&script), &ExecContext::default()).await;
    let signals =
        signalled.is_ok_and(|report| !matches!(report.cause, ExecCause::Exited { code: 0 }));
    let signals = note("signals", signals, "a process of the host was not reached".to_owned(), bug);
    let landlock = sandbox.enforcement().layers.into_iter().find(|layer| layer.name == "landlock");
    note(
        "landlock",
        landlock.is_some(),
        landlock.map(|layer| layer.detail).unwrap_or_default(),
        "",
    );
    for (layer, detail) in NOT_HELD {
        note(layer, false, detail.to_owned(), "use the `linux` backend where it works");
    }
    if sandbox.id_base().is_none() {
        let detail = "what the kernel counts for each user, inotify above all, is the caller's";
        note(ACCOUNT, false, detail.to_owned(), "run as root: each sandbox is then a user");
    }
    let warnings = sandbox.enforcement().warnings;
    let detail = if warnings.is_empty() { "exact".to_owned() } else { warnings.join("; ") };
    note("limits", warnings.is_empty(), detail, "use the `linux` backend where it works");
    let removed = sandbox.destroy().await.is_ok();
    note("removal", removed, "nothing is left".to_owned(), "");
    let profiles = profile::profile_names().into_iter().filter(|name| {
        profile::profile(name).is_some_and(|profile| matches!(profile.users, ProfileUsers::One))
    });
    let features = findings.iter().filter(|finding| finding.holds);
    let capabilities = BackendCapabilities {
        name: rules::NAME.to_owned(),
        filesystem_isolation: files && mounts && memory,
        network_isolation: network,
        // It sees them, so this is not claimed, though it cannot touch them.
        process_isolation: false,
        resource_limits: false,
        syscall_filtering: seccomp && privileges && signals,
        persistent_sandboxes: backend.inner.is_durable(),
        snapshots: false,
        max_concurrent_sandboxes: None,
        available_profiles: profiles.map(str::to_owned).collect(),
        platform_features: features
            .map(|finding| format!("{}: {}", finding.layer, finding.detail))
            .collect(),
    };
    Inspection { capabilities, findings }
}

const SECRET: &[u8] = b"warren's secret";

/// Makes a file that the rights of files alone do not keep anybody from.
fn secret() -> std::io::Result<Secret> {
    let path = PathBuf::from(format!("/var/tmp/warren-probe-{}", uuid::Uuid::new_v4()));
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).open(&path)?;
    let secret = Secret(path);
    file.write_all(SECRET)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
    Ok(secret)
}

/// A file that goes with this value.
struct Secret(PathBuf);

impl Drop for Secret {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn shell(script: &str) -> Command {
    Command::new("/bin/sh").args(["-c", script])
}
