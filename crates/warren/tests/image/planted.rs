//! Roots whose author planted links where set-up walks: F10 and F14 of the threat list.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use warren::backend::{LinuxBackend, OciBackend, OciRuntime};
use warren::{
    Base, BindMount, Command, CreateOptions, ExecContext, HostTools, IsolationBackend, SandboxSpec,
};

use crate::sources::{Place, busybox};

/// Where set-up makes or mounts something, or looks something up.
const WALKED: [&str; 24] = [
    "proc",
    "sys",
    "dev",
    "dev/null",
    "dev/console",
    "dev/pts",
    "dev/ptmx",
    "dev/shm",
    "dev/fd",
    "tmp",
    "var",
    "var/tmp",
    "run",
    "run/lock",
    "etc",
    "etc/passwd",
    "etc/resolv.conf",
    "etc/hosts",
    "etc/hostname",
    "home",
    "home/user",
    "root",
    "workspace",
    "data",
];

/// A directory of the host that everybody may change, and how it was.
struct Victim {
    directory: tempfile::TempDir,
    before: Vec<String>,
}

impl Victim {
    fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("victim-").tempdir_in("/var/tmp").unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("secret"), "s3cret").unwrap();
        fs::create_dir(at("bound")).unwrap();
        for (name, mode) in [("secret", 0o666), ("bound", 0o777), ("", 0o777)] {
            fs::set_permissions(at(name), PermissionsExt::from_mode(mode)).unwrap();
        }
        let mut made = Self { directory, before: Vec::new() };
        made.before = made.now();
        made
    }

    /// Says what is there, whose, and with what in it.
    fn now(&self) -> Vec<String> {
        let path = self.directory.path();
        let mut all = vec![path.to_owned()];
        all.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        all.sort();
        let each = all.iter().map(|path| {
            let found = fs::symlink_metadata(path).unwrap();
            let holds = fs::read(path).unwrap_or_default();
            format!("{path:?} {:o} {}:{} {holds:?}", found.mode(), found.uid(), found.gid())
        });
        each.collect()
    }
}

/// Plants one link in a root that is otherwise as it should be.
fn planted(root: &Path, name: &str, to: &Path) {
    busybox(root);
    let link = root.join(name);
    fs::create_dir_all(link.parent().unwrap()).unwrap();
    if name == "etc" {
        fs::remove_dir_all(&link).unwrap();
    }
    let _ = fs::remove_file(&link);
    symlink(to, &link).unwrap();
}

/// Starts a sandbox on each, which is refused or has nothing of the host. Returns how many started.
async fn lead_nowhere(backend: &dyn IsolationBackend, place: &Place, names: &[&str]) -> usize {
    let victim = Victim::new();
    let absolute = victim.directory.path().to_owned();
    // From wherever it is to the host's root and down again.
    let climbing =
        Path::new("../../../../../../../../../..").join(absolute.strip_prefix("/").unwrap());
    let shown = place.at("shown");
    fs::create_dir_all(&shown).unwrap();
    let mut started = 0;
    for (i, (name, to)) in
        names.iter().flat_map(|name| [(name, &absolute), (name, &climbing)]).enumerate()
    {
        let case = format!("/{name} -> {}", to.display());
        let root = place.at(&format!("root-{i}"));
        planted(&root, name, to);
        let read = |root: &Path| fs::read_to_string(root.join(name).join("secret"));
        assert_eq!(read(&root).unwrap(), "s3cret", "control: on the host it leads there: {case}");
        let image = place.pull(root.to_str().unwrap()).unwrap();
        let base =
            Base { layers: image.layers.clone(), host_tools: HostTools::Hidden, ..Base::default() };
        let options = CreateOptions { base, ..CreateOptions::default() };
        // What is shown below the link is mounted where it leads inside, or nowhere.
        let target = PathBuf::from("/").join(name).join("bound");
        let bind = BindMount { source: shown.clone(), target, readonly: false };
        for binds in [vec![], vec![bind]] {
            let bound = !binds.is_empty();
            let spec = SandboxSpec { bind_mounts: binds, ..SandboxSpec::default() };
            let sandbox = match backend.create_sandbox_with(&spec, &options).await {
                Ok(sandbox) => sandbox,
                Err(error) => {
                    assert!(
                        ["step_failed", "invalid_spec"].contains(&error.code()),
                        "{case}: {error}"
                    );
                    continue;
                }
            };
            started += 1;
            let script = format!(
                "cat /{name}/secret {0}/secret; echo x > /{name}/new; echo x > {0}/new; mkdir /{name}/d; \
                 rm /{name}/secret; echo x > /{name}; touch /proc/self/root{0}/new; true",
                absolute.display()
            );
            let command = Command::new("/bin/sh").args(["-c", &script]);
            let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            sandbox.destroy().await.unwrap();
            assert!(!said.contains("s3cret"), "{case}, bound {bound}: {said}");
            assert_eq!(victim.now(), victim.before, "{case}, bound {bound}");
        }
    }
    started
}

#[tokio::test(flavor = "multi_thread")]
async fn f10_links_planted_in_a_root_lead_its_set_up_nowhere() {
    let place = Place::new();
    let backend = LinuxBackend::with_layers(None, place.layers.clone()).unwrap();
    let started = lead_nowhere(&backend, &place, &WALKED).await;
    assert!(started > 40, "control: most are started on: {started}");
}

mod needs_root {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn f10_links_planted_in_a_root_lead_no_runtime_anywhere() {
        // What prepares the root is the same for each of them; what they do with it themselves is not.
        for (runtime, names) in [
            (
                OciRuntime::Crun,
                &["proc", "sys", "dev", "dev/null", "dev/console", "dev/pts", "tmp"][..],
            ),
            (OciRuntime::Runc, &["proc", "sys", "dev", "dev/null", "dev/console", "dev/pts"]),
            (OciRuntime::Runsc, &["proc", "dev"]),
        ] {
            let place = Place::new();
            let backend = OciBackend::with_layers(runtime, None, place.layers.clone()).unwrap();
            let started = lead_nowhere(&backend, &place, names).await;
            assert!(started > 0, "control: some are started on");
        }
    }
}
