//! The files of a sandbox as its clients hold it: each call is work of a session, and what it returns
//! is, too, until it is dropped.

use std::path::Path;

use async_trait::async_trait;
use futures_util::StreamExt as _;

use super::guarded::{Guarded, Use, Work};
use crate::{
    FileChange, FileContents, FileEntry, FileListing, FileSource, FileStream, FileWatch,
    ListOptions, RenameOptions, Result, SandboxError, SandboxFiles, TreeSummary, WriteOptions,
};

impl Guarded {
    /// Begins a piece of work on files. Even to look takes a process inside.
    fn begin_files(&self) -> Result<(Work, &dyn SandboxFiles)> {
        let work = self.begin(Use::Runs)?;
        let files = self.files.as_deref().or_else(|| self.handle.files());
        let files = files.ok_or_else(|| SandboxError::Unsupported {
            feature: "files".to_owned(),
            backend: self.handle.capabilities().backend.clone(),
            hint: "run a command that reads or writes them".to_owned(),
        })?;
        Ok((work, files))
    }
}

/// Counts a stream as work for as long as somebody holds it.
fn working<T: 'static>(stream: FileStream<T>, work: Work) -> FileStream<T> {
    Box::pin(stream.inspect(move |_| {
        let _ = &work;
    }))
}

/// Counts a watch as work for as long as somebody holds it.
#[derive(Debug)]
struct Watching {
    watch: Box<dyn FileWatch>,
    _work: Work,
}

#[async_trait]
impl FileWatch for Watching {
    async fn next(&mut self) -> Result<Option<FileChange>> {
        self.watch.next().await
    }

    async fn happened(&mut self) -> Result<Vec<FileChange>> {
        self.watch.happened().await
    }
}

#[async_trait]
impl SandboxFiles for Guarded {
    async fn stat(&self, path: &Path) -> Result<FileEntry> {
        let (_work, files) = self.begin_files()?;
        files.stat(path).await
    }

    async fn list(&self, path: &Path, options: ListOptions) -> Result<FileListing> {
        let (work, files) = self.begin_files()?;
        let listing = files.list(path, options).await?;
        Ok(FileListing { items: working(listing.items, work) })
    }

    async fn read(&self, path: &Path, offset: u64, length: Option<u64>) -> Result<FileContents> {
        let (work, files) = self.begin_files()?;
        let contents = files.read(path, offset, length).await?;
        Ok(FileContents { data: working(contents.data, work), ..contents })
    }

    async fn write(
        &self,
        path: &Path,
        options: WriteOptions,
        data: FileSource,
    ) -> Result<FileEntry> {
        let (_work, files) = self.begin_files()?;
        files.write(path, options, data).await
    }

    async fn make_directory(
        &self,
        path: &Path,
        mode: Option<u32>,
        parents: bool,
    ) -> Result<FileEntry> {
        let (_work, files) = self.begin_files()?;
        files.make_directory(path, mode, parents).await
    }

    async fn rename(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<FileEntry> {
        let (_work, files) = self.begin_files()?;
        files.rename(from, to, options).await
    }

    async fn remove(&self, path: &Path, recursive: bool) -> Result<u64> {
        let (_work, files) = self.begin_files()?;
        files.remove(path, recursive).await
    }

    async fn watch(&self, path: &Path, recursive: bool) -> Result<FileStream<FileChange>> {
        let (work, files) = self.begin_files()?;
        Ok(working(files.watch(path, recursive).await?, work))
    }

    async fn open_watch(&self, path: &Path, recursive: bool) -> Result<Box<dyn FileWatch>> {
        let (work, files) = self.begin_files()?;
        let watch = files.open_watch(path, recursive).await?;
        Ok(Box::new(Watching { watch, _work: work }))
    }

    async fn set_attributes(
        &self,
        path: &Path,
        prefix: &str,
        attributes: &[(String, Vec<u8>)],
    ) -> Result<FileEntry> {
        let (_work, files) = self.begin_files()?;
        files.set_attributes(path, prefix, attributes).await
    }

    async fn import_tar(
        &self,
        path: &Path,
        parents: bool,
        data: FileSource,
    ) -> Result<TreeSummary> {
        let (_work, files) = self.begin_files()?;
        files.import_tar(path, parents, data).await
    }

    async fn export_tar(&self, path: &Path) -> Result<FileContents> {
        let (work, files) = self.begin_files()?;
        let contents = files.export_tar(path).await?;
        Ok(FileContents { data: working(contents.data, work), ..contents })
    }
}
