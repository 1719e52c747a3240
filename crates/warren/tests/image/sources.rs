//! Whole images from files, and sandboxes on them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use tokio_util::sync::CancellationToken;
use warren::backend::LinuxBackend;
use warren::image::{Bounds, Image, Progress, Registries, Source, pull};
use warren::layers::Layers;
use warren::{
    Base, Command, CreateOptions, ExecContext, HostTools, IsolationBackend as _, LayerId,
    SandboxError, SandboxSpec,
};

use crate::oci::{Layout, tool};
use crate::tar::{Tar, gzip, zstd};

/// A store of layers, and room for what they come from.
pub(crate) struct Place {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) layers: Layers,
}

impl Place {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let layers = Layers::open(directory.path().join("store")).unwrap();
        Self { directory, layers }
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn pull(&self, source: &str) -> Result<Image, SandboxError> {
        self.pull_with(source, &Registries::default()).map(|(image, _)| image)
    }

    /// Pulls, and says how many layers were unpacked for it.
    pub(crate) fn pull_with(
        &self,
        source: &str,
        registries: &Registries,
    ) -> Result<(Image, usize), SandboxError> {
        let source: Source = source.parse().map_err(SandboxError::from)?;
        let mut unpacked = 0;
        let stop = CancellationToken::new();
        let image =
            pull(&source, &self.layers, registries, Bounds::default(), &stop, &mut |progress| {
                unpacked += usize::from(matches!(progress, Progress::Layer { .. }));
            })?;
        Ok((image, unpacked))
    }

    pub(crate) fn read(&self, layer: &LayerId, path: &str) -> Option<String> {
        fs::read_to_string(self.layers.path(layer).join(path)).ok()
    }

    /// Nothing is left of what was refused.
    pub(crate) fn assert_empty(&self) {
        assert_eq!(self.layers.list().unwrap(), [], "no layer is there");
        assert_eq!(fs::read_dir(self.at("store/staging")).unwrap().count(), 0);
    }
}

/// A root with a shell in it: busybox, which needs nothing else.
pub(crate) fn busybox(root: &Path) {
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::create_dir_all(root.join("etc")).unwrap();
    fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox-static is installed");
    fs::set_permissions(root.join("bin/busybox"), PermissionsExt::from_mode(0o755)).unwrap();
    for name in
        ["sh", "cat", "ls", "id", "env", "pwd", "touch", "stat", "rm", "mkdir", "echo", "test"]
    {
        symlink("busybox", root.join("bin").join(name)).unwrap();
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
        .unwrap();
    fs::write(root.join("etc/group"), "root:x:0:\nuser:x:1000:\n").unwrap();
}

fn packed(root: &Path) -> Vec<u8> {
    let done = std::process::Command::new("tar")
        .args(["-c", "--numeric-owner", "-C"])
        .arg(root)
        .arg(".")
        .output()
        .unwrap();
    assert!(done.status.success());
    done.stdout
}

async fn sh(place: &Place, image: &Image, script: &str) -> String {
    let backend = LinuxBackend::with_layers(None, place.layers.clone()).unwrap();
    let base =
        Base { layers: image.layers.clone(), host_tools: HostTools::Hidden, ..Base::default() };
    let options = CreateOptions { base, ..CreateOptions::default() };
    let sandbox = backend.create_sandbox_with(&SandboxSpec::default(), &options).await.unwrap();
    let command = Command::new("/bin/sh").args(["-c", script]);
    let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
    sandbox.destroy().await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(output.exit_code, 0, "{script}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[tokio::test(flavor = "multi_thread")]
async fn sandboxes_stand_on_a_directory_an_archive_and_an_image_and_share_their_layers() {
    let place = Place::new();
    let root = place.at("root");
    busybox(&root);
    fs::write(root.join("from"), "lower").unwrap();
    fs::write(root.join("gone"), "lower").unwrap();
    fs::create_dir(root.join("opaque")).unwrap();
    fs::write(root.join("opaque/old"), "lower").unwrap();
    let tar = packed(&root);
    let upper = Tar::default()
        .file("from", "upper")
        .file(".wh.gone", "")
        .file("opaque/.wh..wh..opq", "")
        .file("opaque/new", "upper")
        .bytes();
    let seen =
        "cat /from; test -e /gone && echo gone; ls /opaque; test -e /usr/bin && echo host; true";

    let directory = place.pull(root.to_str().unwrap()).unwrap();
    assert_eq!(sh(&place, &directory, seen).await, "lowergone\nold\n");
    fs::write(place.at("root.tar.zst"), zstd(&tar)).unwrap();
    let archive = place.pull(place.at("root.tar.zst").to_str().unwrap()).unwrap();
    assert_eq!(sh(&place, &archive, seen).await, "lowergone\nold\n");

    let layout = Layout::new(&place.at("layout"), &[tar.clone(), upper]);
    let source = format!("oci:{}:latest", layout.path.display());
    let (image, unpacked) = place.pull_with(&source, &Registries::default()).unwrap();
    assert_eq!((image.layers.len(), unpacked), (2, 2));
    assert_eq!(sh(&place, &image, seen).await, "uppernew\n", "removed, hidden and replaced");
    assert_eq!(image.config.environment[1], ("FROM_IMAGE".to_owned(), "yes".to_owned()));
    assert_eq!(image.config.workdir.as_deref(), Some(Path::new("/srv")));
    assert_eq!(image.config.user.as_deref(), Some("1000"));
    let (again, unpacked) = place.pull_with(&source, &Registries::default()).unwrap();
    assert_eq!((again.layers, unpacked), (image.layers.clone(), 0), "unpacked once");
    let count = place.layers.list().unwrap().len();
    drop((directory, archive));
    assert!(
        place.layers.collect(&image.layers.iter().cloned().collect()).unwrap().layers
            < count as u64
    );

    // The same image as an archive of the layout, and as `docker save` writes it, by others' tools.
    let oci = place.at("image.oci.tar");
    tool("tar", &["-cf", oci.to_str().unwrap(), "-C", layout.path.to_str().unwrap(), "."]);
    let saved = place.at("saved.tar");
    let to = format!("docker-archive:{}:warren/test:1", saved.display());
    tool("skopeo", &["--insecure-policy", "copy", "-q", &source, &to]);
    fs::write(place.at("saved.tar.gz"), gzip(&fs::read(&saved).unwrap())).unwrap();
    for source in [
        oci.display().to_string(),
        format!("oci-archive:{}:latest", oci.display()),
        saved.display().to_string(),
        format!("docker-archive:{}:warren/test:1", saved.display()),
        place.at("saved.tar.gz").display().to_string(),
    ] {
        let fresh = Place::new();
        let found = fresh.pull(&source).unwrap_or_else(|error| panic!("{source}: {error}"));
        assert_eq!(found.layers, image.layers, "{source}: the same layers under the same names");
        assert_eq!(found.config, image.config, "{source}");
        assert_eq!(fresh.read(&found.layers[1], "opaque/new").as_deref(), Some("upper"));
    }
    let error = place.pull(&format!("docker-archive:{}:other:2", saved.display())).unwrap_err();
    assert!(matches!(error, SandboxError::NotFound { .. }), "{error}");
}

#[test]
fn what_a_layer_says_nothing_of_is_as_it_is_below() {
    let place = Place::new();
    let secret = crate::tar::Entry { mode: 0o700, modified: 77, ..Default::default() };
    let lower =
        Tar::default().entry(b'5', "secret", "", b"", &secret).file("secret/a", "1").bytes();
    let upper = Tar::default().file("secret/b", "2").bytes();
    let layout = Layout::new(&place.at("layout"), &[lower, upper.clone()]);
    let image = place.pull(layout.path.to_str().unwrap()).unwrap();
    let found = fs::metadata(place.layers.path(&image.layers[1]).join("secret")).unwrap();
    assert_eq!(found.permissions().mode() & 0o7777, 0o700, "not opened to everybody by the way");
    let alone = Layout::new(&place.at("alone"), &[upper]);
    let alone = place.pull(alone.path.to_str().unwrap()).unwrap();
    let found = fs::metadata(place.layers.path(&alone.layers[0]).join("secret")).unwrap();
    assert_eq!(found.permissions().mode() & 0o7777, 0o755);
    assert_ne!(alone.layers[0], image.layers[1]);
}

#[test]
fn an_image_that_is_not_what_it_says_is_refused_and_leaves_nothing() {
    type Damage = fn(&Layout);
    let tar = Tar::default().file("f", "x".repeat(5000)).bytes();
    let damages: [(&str, &str, Damage); 9] = [
        ("other layer", "", |layout| {
            let other = gzip(&Tar::default().file("f", "y").bytes());
            let mut bytes = other.clone();
            bytes.resize(layout.layers[0].len(), 0);
            fs::write(layout.blob(&layout.layers[0]), bytes).unwrap();
        }),
        ("cut layer", "", |layout| {
            let bytes = &layout.layers[0];
            fs::write(layout.blob(bytes), &bytes[..bytes.len() / 2]).unwrap();
        }),
        ("longer layer", "", |layout| {
            let bytes = [&layout.layers[0][..], &gzip(b"")].concat();
            fs::write(layout.blob(&layout.layers[0]), bytes).unwrap();
        }),
        ("no layer", "is missing", |layout| {
            fs::remove_file(layout.blob(&layout.layers[0])).unwrap()
        }),
        ("no manifest", "is missing", |layout| {
            fs::remove_file(layout.blob(&layout.manifest)).unwrap()
        }),
        ("other manifest", "the manifest has the digest", |layout| {
            fs::write(layout.blob(&layout.manifest), b"{}").unwrap();
        }),
        ("other configuration", "the configuration has the digest", |layout| {
            fs::write(layout.blob(&layout.config), b"{}").unwrap();
        }),
        ("huge manifest", "more than", |layout| {
            fs::write(layout.blob(&layout.manifest), vec![b' '; 5 << 20]).unwrap();
        }),
        ("a link in place of a layer", "cannot", |layout| {
            let blob = layout.blob(&layout.layers[0]);
            fs::remove_file(&blob).unwrap();
            symlink("/etc/passwd", blob).unwrap();
        }),
    ];
    for (name, why, damage) in damages {
        let place = Place::new();
        let layout = Layout::new(&place.at("layout"), std::slice::from_ref(&tar));
        damage(&layout);
        let error = place.pull(layout.path.to_str().unwrap()).expect_err(name);
        assert!(error.to_string().contains(why), "{name}: {error}");
        place.assert_empty();
    }
    // What a configuration promises of the archive itself is kept to as well.
    let place = Place::new();
    let layout = Layout::new(&place.at("layout"), std::slice::from_ref(&tar));
    let other = place.at("lie");
    let mut lie = Layout::new(&other, &[Tar::default().file("f", "other").bytes()]);
    lie.layers = layout.layers;
    let text = String::from_utf8(lie.manifest.clone()).unwrap();
    let mut manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    manifest["layers"][0] = crate::oci::descriptor("", &lie.layers[0]);
    lie.manifest = manifest.to_string().into_bytes();
    fs::write(lie.blob(&lie.layers[0]), &lie.layers[0]).unwrap();
    fs::write(lie.blob(&lie.manifest), &lie.manifest).unwrap();
    let index = serde_json::json!({
        "schemaVersion": 2, "manifests": [crate::oci::descriptor("", &lie.manifest)],
    });
    fs::write(other.join("index.json"), index.to_string()).unwrap();
    let error = place.pull(other.to_str().unwrap()).unwrap_err();
    assert!(error.to_string().contains("the archive in a layer has the digest"), "{error}");
    place.assert_empty();
    for missing in ["/nowhere/at/all", "tar:/nowhere"] {
        let error = place.pull(missing).unwrap_err();
        assert!(error.to_string().contains("nowhere"), "{error}");
    }
}

#[test]
fn umoci_makes_what_is_read() {
    let place = Place::new();
    let root = place.at("bundle");
    let layout = place.at("umoci");
    let image = format!("{}:v1", layout.display());
    tool("umoci", &["init", "--layout", layout.to_str().unwrap()]);
    tool("umoci", &["new", "--image", &image]);
    tool(
        "umoci",
        &["config", "--image", &image, "--config.env", "A=b", "--config.workingdir", "/w"],
    );
    let rootless: &[&str] =
        if rustix::process::geteuid().is_root() { &[] } else { &["--rootless"] };
    let unpack = [&["unpack", "--image", &image], rootless, &[root.to_str().unwrap()]].concat();
    tool("umoci", &unpack);
    fs::write(root.join("rootfs/hello"), "from umoci").unwrap();
    tool("umoci", &["repack", "--image", &image, root.to_str().unwrap()]);
    fs::remove_file(root.join("rootfs/hello")).unwrap();
    fs::write(root.join("rootfs/second"), "2").unwrap();
    tool("umoci", &["repack", "--refresh-bundle", "--image", &image, root.to_str().unwrap()]);
    let found = place.pull(&format!("oci:{image}")).unwrap();
    let last = found.layers.last().unwrap();
    assert_eq!(place.read(last, "second").as_deref(), Some("2"));
    assert_eq!(found.config.workdir.as_deref(), Some(Path::new("/w")));
    assert!(found.config.environment.contains(&("A".to_owned(), "b".to_owned())));
}
