//! Images as tools write them, made here and by those tools.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use warren::image::Digest;

use crate::tar::gzip;

/// A layout with one image of these layers, each compressed as the caller likes.
pub(crate) struct Layout {
    pub(crate) path: PathBuf,
    pub(crate) manifest: Vec<u8>,
    pub(crate) config: Vec<u8>,
    pub(crate) layers: Vec<Vec<u8>>,
}

pub(crate) fn architecture() -> &'static str {
    if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }
}

impl Layout {
    /// Writes one at `path` whose image is called `latest`; `tars` are plain archives.
    pub(crate) fn new(path: &Path, tars: &[Vec<u8>]) -> Self {
        let layers: Vec<_> = tars.iter().map(|tar| gzip(tar)).collect();
        let diff_ids: Vec<_> = tars.iter().map(|tar| Digest::of(tar)).collect();
        let config = serde_json::json!({
            "os": "linux",
            "architecture": architecture(),
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
            "config": {
                "Env": ["PATH=/bin", "FROM_IMAGE=yes"], "WorkingDir": "/srv", "User": "1000",
                "Cmd": ["sh"],
            },
        });
        let config = serde_json::to_vec(&config).unwrap();
        let layer =
            |bytes: &Vec<u8>| descriptor("application/vnd.oci.image.layer.v1.tar+gzip", bytes);
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": layers.iter().map(layer).collect::<Vec<_>>(),
        });
        let manifest = serde_json::to_vec(&manifest).unwrap();
        let layout = Self { path: path.to_owned(), manifest, config, layers };
        layout.write();
        layout
    }

    fn write(&self) {
        fs::create_dir_all(self.path.join("blobs/sha256")).unwrap();
        for blob in self.layers.iter().chain([&self.manifest, &self.config]) {
            fs::write(self.blob(blob), blob).unwrap();
        }
        fs::write(self.path.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        let mut one = descriptor("application/vnd.oci.image.manifest.v1+json", &self.manifest);
        one["annotations"] = serde_json::json!({ "org.opencontainers.image.ref.name": "latest" });
        one["platform"] = serde_json::json!({ "os": "linux", "architecture": architecture() });
        let index = serde_json::json!({ "schemaVersion": 2, "manifests": [one] });
        fs::write(self.path.join("index.json"), index.to_string()).unwrap();
    }

    /// Where a blob is.
    pub(crate) fn blob(&self, bytes: &[u8]) -> PathBuf {
        self.path.join("blobs/sha256").join(Digest::of(bytes).hex())
    }
}

pub(crate) fn descriptor(kind: &str, bytes: &[u8]) -> serde_json::Value {
    serde_json::json!({ "mediaType": kind, "digest": Digest::of(bytes), "size": bytes.len() })
}

/// Runs a tool that must succeed.
#[track_caller]
pub(crate) fn tool(program: &str, args: &[&str]) -> String {
    // Whoever we are, there is no configuration of ours that it could find.
    let done = Command::new(program).args(args).env("HOME", "/nonexistent").output();
    let done = done.unwrap_or_else(|error| panic!("`{program}` (./test installs it): {error}"));
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program} {args:?}: {said}");
    String::from_utf8(done.stdout).unwrap()
}
