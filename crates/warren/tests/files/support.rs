//! A sandbox to try things on.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use warren::backend::{LandlockBackend, LinuxBackend, OciBackend, OciRuntime};
use warren::{
    Command, CreateOptions, ExecContext, FileEntry, FileFault, FileSource, IsolationBackend, Limit,
    ListItem, ListOptions, ResourceLimits, Result, Sandbox, SandboxError, SandboxFiles,
    SandboxSpec, WriteMode, WriteOptions,
};

/// No call takes longer, whatever was planted.
pub(crate) const PROMPT: Duration = Duration::from_secs(5);
/// What the cases call the directory that is the sandbox's own.
const WORKSPACE: &str = "/workspace";

/// Who makes the sandbox. What differs is who walks a path: the kernel in a root that is the sandbox's own (`Linux`,
/// `Crun`), the kernel in the host's root behind rules (`Landlock`), or we, one name at a time, on gVisor (`Runsc`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    Linux,
    Landlock,
    Crun,
    Runsc,
}

impl By {
    /// Makes the backend; `homes` is for one whose sandboxes have their files on the host's disk.
    fn backend(self, homes: &Path) -> Box<dyn IsolationBackend> {
        match self {
            Self::Linux => Box::new(LinuxBackend::new().unwrap()),
            Self::Landlock => Box::new(LandlockBackend::new().unwrap().in_directory(homes)),
            Self::Crun => Box::new(OciBackend::new(OciRuntime::Crun).unwrap()),
            Self::Runsc => Box::new(OciBackend::new(OciRuntime::Runsc).unwrap()),
        }
    }
}

pub(crate) struct Place {
    pub(crate) by: By,
    backend: Box<dyn IsolationBackend>,
    pub(crate) sandbox: Box<dyn Sandbox>,
    /// Where [`WORKSPACE`] is: a sandbox without a root of its own has it elsewhere on the host.
    workspace: PathBuf,
    homes: tempfile::TempDir,
}

impl Place {
    pub(crate) async fn new() -> Self {
        Self::with(ResourceLimits::default()).await
    }

    pub(crate) async fn with(limits: ResourceLimits) -> Self {
        Self::of(By::Linux, limits).await
    }

    pub(crate) async fn of(by: By, limits: ResourceLimits) -> Self {
        let homes = tempfile::Builder::new().prefix("warren-test-").tempdir_in("/var/tmp").unwrap();
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
        std::fs::set_permissions(homes.path(), open).unwrap();
        let backend = by.backend(homes.path());
        let spec = SandboxSpec { limits, ..SandboxSpec::default() };
        // Without a filesystem of its own each file is bounded, and not all together.
        let accept = (by == By::Landlock).then_some(Limit::Write);
        let options =
            CreateOptions { accept_missing: accept.into_iter().collect(), ..Default::default() };
        let sandbox = backend.create_sandbox_with(&spec, &options).await.unwrap();
        let mut place = Self { by, backend, sandbox, workspace: WORKSPACE.into(), homes };
        place.workspace = place.sh("pwd").await.into();
        assert_eq!(place.workspace == Path::new(WORKSPACE), by != By::Landlock);
        place
    }

    /// Returns where a path is here that the cases write with [`WORKSPACE`] in it, and changes nothing else of it.
    pub(crate) fn at(&self, path: impl AsRef<OsStr>) -> PathBuf {
        let (path, there) = (path.as_ref().as_bytes(), self.workspace.as_os_str().as_bytes());
        let mut at = Vec::new();
        let mut rest = path;
        while let Some((first, _)) = rest.split_first() {
            if let Some(after) = rest.strip_prefix(WORKSPACE.as_bytes()) {
                at.extend_from_slice(there);
                rest = after;
            } else {
                at.push(*first);
                rest = &rest[1..];
            }
        }
        std::ffi::OsString::from_vec(at).into()
    }

    pub(crate) fn files(&self) -> &dyn SandboxFiles {
        self.sandbox.files().unwrap()
    }

    /// Runs a script inside and returns what it said.
    pub(crate) async fn sh(&self, script: &str) -> String {
        let script = self.at(script).into_os_string().into_string().unwrap();
        let command = Command::new("sh").args(["-c", &script]);
        let output = self.sandbox.exec(&command, &ExecContext::default()).await.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        format!("{}{}", text(&output.stdout), text(&output.stderr))
    }

    /// Runs a script of Python inside and returns what it said. On gVisor `ls` and `stat` fail on whatever they are given.
    pub(crate) async fn python(&self, script: &str) -> String {
        assert!(!script.contains('\''), "it is quoted by them");
        self.sh(&format!("python3 -c '{script}'")).await
    }

    pub(crate) async fn put(&self, path: impl AsRef<Path>, data: &[u8]) -> Result<FileEntry> {
        self.put_as(path, data, WriteOptions::default()).await
    }

    pub(crate) async fn put_as(
        &self,
        path: impl AsRef<Path>,
        data: &[u8],
        options: WriteOptions,
    ) -> Result<FileEntry> {
        self.files().write(&self.at(path.as_ref()), options, source(data.to_vec())).await
    }

    pub(crate) async fn get(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        let contents = self.files().read(&self.at(path.as_ref()), 0, None).await?;
        collect(contents.data).await
    }

    pub(crate) async fn list(&self, path: &str) -> Result<Vec<FileEntry>> {
        let listing = self.files().list(&self.at(path), ListOptions::default()).await?;
        let mut entries = Vec::new();
        let mut items = listing.items;
        while let Some(item) = items.next().await {
            if let ListItem::Entry(entry) = item? {
                entries.push(entry);
            }
        }
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(entries)
    }

    pub(crate) async fn end(self) {
        self.sandbox.destroy().await.unwrap();
        assert!(self.backend.list_sandboxes().await.unwrap().is_empty());
        assert_eq!(std::fs::read_dir(self.homes.path()).unwrap().count(), 0, "nothing is left");
    }
}

pub(crate) async fn collect(mut data: warren::FileStream<Vec<u8>>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(chunk) = data.next().await {
        bytes.extend(chunk?);
    }
    Ok(bytes)
}

pub(crate) fn source(data: Vec<u8>) -> FileSource {
    Box::pin(stream::iter(vec![Ok(data)]))
}

pub(crate) fn how(how: WriteMode) -> WriteOptions {
    WriteOptions { how, ..WriteOptions::default() }
}

/// Waits for a call, but not for ever, and returns why it was refused.
#[track_caller]
pub(crate) fn fault<T: std::fmt::Debug>(result: Result<T>) -> FileFault {
    match result {
        Err(SandboxError::File { kind, .. }) => kind,
        other => panic!("no fault of a file: {other:?}"),
    }
}

pub(crate) async fn promptly<T>(work: impl Future<Output = T>) -> T {
    let began = Instant::now();
    let done = tokio::time::timeout(PROMPT, work).await.expect("it does not hang");
    assert!(began.elapsed() < PROMPT);
    done
}

/// Writes the header of a tar entry, whatever it says.
pub(crate) fn tar_header(name: &str, kind: u8, link: &str, size: u64) -> Vec<u8> {
    let mut block = vec![0; 512];
    let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.as_bytes());
    put(100, b"0006777");
    put(124, format!("{size:011o}").as_bytes());
    put(136, b"00000000000");
    put(148, b"        ");
    put(156, &[kind]);
    put(157, link.as_bytes());
    put(257, b"ustar\x0000");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}
