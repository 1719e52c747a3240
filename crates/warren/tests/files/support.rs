//! A sandbox to try things on.

use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use warren::backend::LinuxBackend;
use warren::{
    Command, ExecContext, FileEntry, FileFault, FileSource, IsolationBackend, ListItem,
    ListOptions, ResourceLimits, Result, Sandbox, SandboxError, SandboxFiles, SandboxSpec,
    WriteMode, WriteOptions,
};

/// No call takes longer, whatever was planted.
pub(crate) const PROMPT: Duration = Duration::from_secs(5);

pub(crate) struct Place {
    backend: LinuxBackend,
    pub(crate) sandbox: Box<dyn Sandbox>,
}

impl Place {
    pub(crate) async fn new() -> Self {
        Self::with(ResourceLimits::default()).await
    }

    pub(crate) async fn with(limits: ResourceLimits) -> Self {
        let backend = LinuxBackend::new().unwrap();
        let spec = SandboxSpec { limits, ..SandboxSpec::default() };
        let sandbox = backend.create_sandbox(&spec).await.unwrap();
        Self { backend, sandbox }
    }

    pub(crate) fn files(&self) -> &dyn SandboxFiles {
        self.sandbox.files().unwrap()
    }

    /// Runs a script inside and returns what it said.
    pub(crate) async fn sh(&self, script: &str) -> String {
        let command = Command::new("sh").args(["-c", script]);
        let output = self.sandbox.exec(&command, &ExecContext::default()).await.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        format!("{}{}", text(&output.stdout), text(&output.stderr))
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
        self.files().write(path.as_ref(), options, source(data.to_vec())).await
    }

    pub(crate) async fn get(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        let contents = self.files().read(path.as_ref(), 0, None).await?;
        collect(contents.data).await
    }

    pub(crate) async fn list(&self, path: &str) -> Result<Vec<FileEntry>> {
        let listing = self.files().list(Path::new(path), ListOptions::default()).await?;
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
