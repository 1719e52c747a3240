//! The files of a sandbox, reached through a worker inside it.
//!
//! Nothing here touches a file, or a descriptor of one: a process inside the sandbox does all path
//! work, reads and writes, with the sandbox's rights and on its account, and bytes come and go by a
//! pipe. What it answers may be an attacker's: it is checked, bounded, and never waited for for ever.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use chrono::DateTime;
use futures_util::{StreamExt, stream};
use rustix::io::Errno;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe;
use tokio_util::sync::CancellationToken;
use warren_init::protocol::files::{
    self as wire, ChangeKind, Fault, FaultKind, FileControl, FileEvent, FileRequest, Kind,
    MAX_DEPTH, MAX_PATH, WriteHow,
};

use super::channel::Channel;
use super::sandbox::LinuxSandbox;
use crate::{
    FileChange, FileChangeKind, FileContents, FileDetails, FileEntry, FileFault, FileKind,
    FileListing, FileSource, FileStream, FileWatch, ListItem, ListOptions, RenameOptions, Result,
    SandboxError, SandboxFiles, TreeSummary, WriteMode, WriteOptions,
};

/// How long a worker may say nothing.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long it may take over what it does without a word.
const LONG_PATIENCE: Duration = Duration::from_secs(600);
/// How much is read from a pipe at once, and how much a pipe holds.
const CHUNK: usize = 256 * 1024;
/// How long after its worker a sandbox may end that took it along.
const LAST_BREATH: Duration = Duration::from_millis(200);

/// A conversation with one worker. Dropping it ends the worker.
#[derive(Debug)]
struct Talk {
    sandbox: LinuxSandbox,
    channel: Channel,
    /// Cancelled when the sandbox is suspended.
    stop: CancellationToken,
    action: &'static str,
    path: String,
}

impl Talk {
    async fn begin(
        sandbox: &LinuxSandbox,
        action: &'static str,
        path: &Path,
        request: FileRequest,
        data: Option<OwnedFd>,
    ) -> Result<Self> {
        let (channel, stop) =
            sandbox.ask_about_files(request, data.as_ref().map(AsFd::as_fd)).await?;
        let path = path.display().to_string();
        Ok(Self { sandbox: sandbox.clone(), channel, stop, action, path })
    }

    fn error(&self, kind: FileFault, source: io::Error) -> SandboxError {
        let (action, path) = (self.action, self.path.clone());
        SandboxError::File { action, path, kind, detail: String::new(), source }
    }

    fn nonsense(&self) -> SandboxError {
        let message = format!("a sandbox answered nonsense when asked to {} a file", self.action);
        SandboxError::Internal { message }
    }

    /// Waits for something, unless the sandbox is suspended or the worker takes too long.
    async fn wait<T>(&self, patience: Duration, work: impl Future<Output = T>) -> Result<T> {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Err(self.sandbox.suspended()),
            done = tokio::time::timeout(patience, work) => done.map_err(|_| {
                let what = format!("to {} a file", self.action);
                SandboxError::Timeout { what, after: patience }
            }),
        }
    }

    async fn next(&self, patience: Duration) -> Result<FileEvent> {
        match self.wait(patience, self.channel.receive::<FileEvent>()).await? {
            Ok(Some((FileEvent::Failed(fault), _))) => Err(self.fault(&fault)),
            Ok(Some((event, fds))) if fds.is_empty() => Ok(event),
            Ok(Some(_)) => Err(self.nonsense()),
            Ok(None) => Err(self.lost().await),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(self.nonsense()),
            Err(error) => Err(self.error(FileFault::Interrupted, error)),
        }
    }

    /// Says why a worker is gone that did not say so itself.
    async fn lost(&self) -> SandboxError {
        let since = tokio::time::Instant::now();
        while since.elapsed() < LAST_BREATH {
            if self.sandbox.has_ended() {
                return self.sandbox.ended();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.error(FileFault::Killed, io::ErrorKind::BrokenPipe.into())
    }

    async fn ready(&self) -> Result<()> {
        match self.next(PATIENCE).await? {
            FileEvent::Ready => Ok(()),
            _ => Err(self.nonsense()),
        }
    }

    async fn entry(&self, patience: Duration) -> Result<FileEntry> {
        match self.next(patience).await? {
            FileEvent::Entries(mut entries) if entries.len() == 1 => {
                entries.pop().and_then(entry).ok_or_else(|| self.nonsense())
            }
            _ => Err(self.nonsense()),
        }
    }

    async fn done(&self, patience: Duration) -> Result<wire::Summary> {
        match self.next(patience).await? {
            FileEvent::Done(summary) => Ok(summary),
            _ => Err(self.nonsense()),
        }
    }

    fn fault(&self, fault: &Fault) -> SandboxError {
        let kind = match fault.kind {
            FaultKind::Suspended => return self.sandbox.suspended(),
            FaultKind::Call => fault_of(fault.errno),
            FaultKind::Path => FileFault::InvalidPath,
            FaultKind::Special => FileFault::Special,
            FaultKind::Directory => FileFault::IsDirectory,
            FaultKind::NotDirectory => FileFault::NotDirectory,
            FaultKind::Cut => FileFault::Interrupted,
            FaultKind::Archive => FileFault::InvalidArchive,
            FaultKind::TooMany => FileFault::TooMany,
            FaultKind::Busy => FileFault::Busy,
            FaultKind::User => FileFault::NoUser,
        };
        let detail = match (&fault.detail[..], fault.written) {
            (b"", 0) => String::new(),
            (b"", written) => format!(" (after {written} bytes)"),
            (detail, _) => format!(" ({})", String::from_utf8_lossy(detail).escape_debug()),
        };
        let source = match fault.errno {
            0 => io::Error::other("refused"),
            errno => io::Error::from_raw_os_error(errno),
        };
        let (action, path) = (self.action, self.path.clone());
        SandboxError::File { action, path, kind, detail, source }
    }

    /// Sends all that comes, and returns how much that was.
    async fn pump(&self, mut to: pipe::Sender, mut data: FileSource) -> Result<u64> {
        let mut sent = 0;
        loop {
            // How long it may take to come is for the one who sends it to say.
            let chunk = tokio::select! {
                biased;
                () = self.stop.cancelled() => return Err(self.sandbox.suspended()),
                chunk = data.next() => chunk,
            };
            let chunk = match chunk {
                None => return Ok(sent),
                Some(Ok(chunk)) => chunk,
                Some(Err(error)) => return Err(self.error(FileFault::Interrupted, error)),
            };
            match self.wait(PATIENCE, to.write_all(&chunk)).await? {
                Ok(()) => sent += chunk.len() as u64,
                // It has stopped reading, and says why.
                Err(_) => {
                    return Err(match self.next(PATIENCE).await {
                        Err(error) => error,
                        Ok(_) => self.nonsense(),
                    });
                }
            }
        }
    }

    async fn commit(&self, sent: u64) -> Result<()> {
        let message = FileControl::Commit(sent);
        let sent = self.channel.send(&message, &[]);
        // If it is gone, it has said why.
        drop(self.wait(PATIENCE, sent).await?);
        Ok(())
    }

    /// Returns what comes through a pipe until the worker says that it is done.
    fn stream(self, from: pipe::Receiver, length: Option<u64>) -> FileStream<Vec<u8>> {
        let state = (self, from, length);
        Box::pin(stream::try_unfold(Some(state), async |state| {
            let Some((talk, mut from, left)) = state else { return Ok(None) };
            let mut chunk = Vec::with_capacity(CHUNK);
            let got = talk.wait(PATIENCE, from.read_buf(&mut chunk)).await?;
            let got = got.map_err(|error| talk.error(FileFault::Interrupted, error))? as u64;
            if got == 0 {
                talk.done(PATIENCE).await?;
                // The file became shorter while it was read.
                return match left {
                    None | Some(0) => Ok(None),
                    Some(_) => {
                        let source = io::ErrorKind::UnexpectedEof.into();
                        Err(talk.error(FileFault::Interrupted, source))
                    }
                };
            }
            let left = match left {
                Some(left) => Some(left.checked_sub(got).ok_or_else(|| talk.nonsense())?),
                None => None,
            };
            Ok(Some((chunk, Some((talk, from, left)))))
        }))
    }
}

fn fault_of(errno: i32) -> FileFault {
    match Errno::from_raw_os_error(errno) {
        Errno::NOENT => FileFault::NotFound,
        Errno::EXIST => FileFault::Exists,
        Errno::ISDIR => FileFault::IsDirectory,
        Errno::NOTDIR => FileFault::NotDirectory,
        Errno::NOTEMPTY => FileFault::NotEmpty,
        Errno::ACCESS | Errno::PERM | Errno::BUSY => FileFault::Denied,
        Errno::ROFS => FileFault::ReadOnly,
        // Too large a file: where no filesystem bounds them all, each is bounded by itself.
        Errno::NOSPC | Errno::DQUOT | Errno::NOMEM | Errno::FBIG => FileFault::NoSpace,
        Errno::NAMETOOLONG | Errno::INVAL | Errno::ILSEQ => FileFault::InvalidPath,
        Errno::LOOP => FileFault::Loop,
        Errno::NXIO | Errno::NODEV => FileFault::Special,
        Errno::MFILE | Errno::NFILE => FileFault::TooMany,
        _ => FileFault::Other,
    }
}

fn kind(kind: Kind) -> FileKind {
    match kind {
        Kind::File => FileKind::File,
        Kind::Directory => FileKind::Directory,
        Kind::Link => FileKind::Link,
        Kind::Fifo => FileKind::Fifo,
        Kind::Socket => FileKind::Socket,
        Kind::Device => FileKind::Device,
    }
}

fn path_from(bytes: Vec<u8>) -> Option<PathBuf> {
    let fine = bytes.len() <= MAX_PATH && !bytes.contains(&0);
    fine.then(|| OsString::from_vec(bytes).into())
}

/// Understands an entry; `None` if it is none.
fn entry(entry: wire::Entry) -> Option<FileEntry> {
    let time = |time: wire::Time| DateTime::from_timestamp(time.seconds, time.nanos);
    let resolved = match entry.resolved {
        Some((path, of, mode)) => Some((path_from(path)?, kind(of), mode & 0o7777)),
        None => None,
    };
    Some(FileEntry {
        path: path_from(entry.path)?,
        kind: kind(entry.kind),
        size: entry.size,
        mode: entry.mode & 0o7777,
        uid: entry.uid,
        gid: entry.gid,
        links: entry.links,
        modified: time(entry.modified).unwrap_or_default(),
        accessed: time(entry.accessed).unwrap_or_default(),
        changed: time(entry.changed).unwrap_or_default(),
        target: match entry.target {
            Some(target) => Some(path_from(target)?),
            None => None,
        },
        resolved,
        details: entry.more.map(|more| Box::new(details(more))),
    })
}

fn details(more: wire::More) -> FileDetails {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let attributes = more.attributes.into_iter();
    // Names that are no text are nobody's who could ask for them by it.
    let named = attributes.filter_map(|(name, value)| Some((String::from_utf8(name).ok()?, value)));
    FileDetails { owner: text(more.owner), group: text(more.group), attributes: named.collect() }
}

/// Tells whether a path stays beneath what it is relative to.
fn is_below(path: &Path) -> bool {
    path.components().all(|part| matches!(part, std::path::Component::Normal(_)))
}

fn listed(from: wire::Entry) -> Option<FileEntry> {
    entry(from).filter(|entry| is_below(&entry.path) && !entry.path.as_os_str().is_empty())
}

fn change(change: wire::Change) -> Option<FileChange> {
    let kind = match change.kind {
        ChangeKind::Created => FileChangeKind::Create,
        ChangeKind::Written => FileChangeKind::Write,
        ChangeKind::Removed => FileChangeKind::Remove,
        ChangeKind::Renamed => FileChangeKind::Rename,
        ChangeKind::Attributes => FileChangeKind::Chmod,
        ChangeKind::Lost => FileChangeKind::Lost,
    };
    let path = path_from(change.path).filter(|path| is_below(path))?;
    let entry = match change.entry {
        Some(told) => Some(Box::new(entry(told)?)),
        None => None,
    };
    Some(FileChange { kind, path, directory: change.directory, entry })
}

fn bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

/// Makes a pipe of which the worker gets one end.
fn new_pipe() -> Result<(OwnedFd, OwnedFd)> {
    let failed = |error: Errno| SandboxError::Step {
        step: "make a pipe".to_owned(),
        path: None,
        source: error.into(),
    };
    let (reader, writer) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(failed)?;
    // A user has room for so many; less is only slower.
    let _ = rustix::pipe::fcntl_setpipe_size(&writer, CHUNK);
    Ok((reader, writer))
}

/// A directory that is watched by a worker.
#[derive(Debug)]
struct Watch {
    talk: Talk,
    waiting: VecDeque<FileChange>,
    is_over: bool,
}

impl Watch {
    async fn open(sandbox: &LinuxSandbox, path: &Path, recursive: bool) -> Result<Self> {
        let request = FileRequest::Watch { path: bytes(path), recursive };
        let talk = Talk::begin(sandbox, "watch", path, request, None).await?;
        talk.ready().await?;
        Ok(Self { talk, waiting: VecDeque::new(), is_over: false })
    }

    /// Takes in what the worker says; tells whether that is what was asked for.
    fn hear(&mut self, event: FileEvent) -> Result<Heard> {
        match event {
            FileEvent::Changes(changes) => {
                let changes: Option<Vec<_>> = changes.into_iter().map(change).collect();
                self.waiting.extend(changes.ok_or_else(|| self.talk.nonsense())?);
                Ok(Heard::More)
            }
            FileEvent::Ready => Ok(Heard::All),
            FileEvent::Done(_) => {
                self.is_over = true;
                Ok(Heard::All)
            }
            FileEvent::Entries(_) | FileEvent::Failed(_) => Err(self.talk.nonsense()),
        }
    }
}

/// How much of what was asked for was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    More,
    All,
}

#[async_trait]
impl FileWatch for Watch {
    async fn next(&mut self) -> Result<Option<FileChange>> {
        loop {
            if let Some(change) = self.waiting.pop_front() {
                return Ok(Some(change));
            }
            if self.is_over {
                return Ok(None);
            }
            // Nothing may happen for as long as it likes.
            let event = self.talk.next(Duration::MAX).await?;
            self.hear(event)?;
        }
    }

    async fn happened(&mut self) -> Result<Vec<FileChange>> {
        if !self.is_over {
            let asked = self.talk.channel.send(&FileControl::Tell, &[]);
            // If it is gone, it has said why.
            drop(self.talk.wait(PATIENCE, asked).await?);
            loop {
                let event = self.talk.next(PATIENCE).await?;
                if self.hear(event)? == Heard::All {
                    break;
                }
            }
        }
        Ok(self.waiting.drain(..).collect())
    }
}

impl LinuxSandbox {
    async fn send(
        &self,
        action: &'static str,
        path: &Path,
        request: FileRequest,
        data: FileSource,
    ) -> Result<Talk> {
        let (reader, writer) = new_pipe()?;
        let talk = Talk::begin(self, action, path, request, Some(reader)).await?;
        talk.ready().await?;
        let writer = pipe::Sender::from_owned_fd(writer);
        let writer = writer.map_err(|error| talk.error(FileFault::Other, error))?;
        let sent = talk.pump(writer, data).await?;
        talk.commit(sent).await?;
        Ok(talk)
    }
}

#[async_trait]
impl SandboxFiles for LinuxSandbox {
    async fn stat(&self, path: &Path) -> Result<FileEntry> {
        let request = FileRequest::Stat { path: bytes(path) };
        Talk::begin(self, "look at", path, request, None).await?.entry(PATIENCE).await
    }

    async fn list(&self, path: &Path, options: ListOptions) -> Result<FileListing> {
        let depth = options.depth.clamp(1, MAX_DEPTH);
        let request = FileRequest::List { path: bytes(path), depth, limit: options.limit };
        let talk = Talk::begin(self, "list", path, request, None).await?;
        // The first answer is waited for: what cannot be listed is an error of this call.
        let first = talk.next(PATIENCE).await?;
        let state = (talk, Some(first), VecDeque::new(), u64::from(options.limit));
        let items = stream::try_unfold(Some(state), async |state| {
            let Some((talk, mut event, mut waiting, mut left)) = state else { return Ok(None) };
            loop {
                if let Some(entry) = waiting.pop_front() {
                    let state = Some((talk, event, waiting, left));
                    return Ok(Some((ListItem::Entry(entry), state)));
                }
                let next = match event.take() {
                    Some(event) => event,
                    None => talk.next(PATIENCE).await?,
                };
                match next {
                    FileEvent::Entries(entries) => {
                        let count = entries.len() as u64;
                        left = left.checked_sub(count).ok_or_else(|| talk.nonsense())?;
                        let entries: Option<Vec<_>> = entries.into_iter().map(listed).collect();
                        waiting.extend(entries.ok_or_else(|| talk.nonsense())?);
                    }
                    FileEvent::Done(wire::Summary { truncated, .. }) => {
                        return Ok(Some((ListItem::End { truncated }, None)));
                    }
                    _ => return Err(talk.nonsense()),
                }
            }
        });
        Ok(FileListing { items: Box::pin(items) })
    }

    async fn read(&self, path: &Path, offset: u64, length: Option<u64>) -> Result<FileContents> {
        let (reader, writer) = new_pipe()?;
        let request = FileRequest::Read { path: bytes(path), offset, length };
        let talk = Talk::begin(self, "read", path, request, Some(writer)).await?;
        let entry = talk.entry(PATIENCE).await?;
        let reader = pipe::Receiver::from_owned_fd(reader);
        let reader = reader.map_err(|error| talk.error(FileFault::Other, error))?;
        // Files of /proc say that they are empty, and are not.
        let known = (entry.size > 0).then(|| entry.size.saturating_sub(offset));
        let length = known.map(|known| length.unwrap_or(known).min(known));
        Ok(FileContents { entry, length, data: talk.stream(reader, length) })
    }

    async fn write(
        &self,
        path: &Path,
        options: WriteOptions,
        data: FileSource,
    ) -> Result<FileEntry> {
        let how = match options.how {
            WriteMode::Replace => WriteHow::Replace,
            WriteMode::New => WriteHow::New,
            WriteMode::Append => WriteHow::Append,
            WriteMode::InPlace => WriteHow::InPlace,
        };
        let (mode, parents) = (options.mode, options.parents);
        let request = FileRequest::Write { path: bytes(path), how, mode, parents };
        self.send("write", path, request, data).await?.entry(PATIENCE).await
    }

    async fn make_directory(
        &self,
        path: &Path,
        mode: Option<u32>,
        parents: bool,
    ) -> Result<FileEntry> {
        let mode = mode.unwrap_or(0o755);
        let request = FileRequest::MakeDirectory { path: bytes(path), mode, parents };
        Talk::begin(self, "make", path, request, None).await?.entry(PATIENCE).await
    }

    async fn rename(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<FileEntry> {
        let RenameOptions { replace, parents } = options;
        let request = FileRequest::Move { from: bytes(from), to: bytes(to), replace, parents };
        Talk::begin(self, "move", from, request, None).await?.entry(LONG_PATIENCE).await
    }

    async fn remove(&self, path: &Path, recursive: bool) -> Result<u64> {
        let request = FileRequest::Remove { path: bytes(path), recursive };
        let talk = Talk::begin(self, "remove", path, request, None).await?;
        Ok(talk.done(LONG_PATIENCE).await?.entries)
    }

    async fn watch(&self, path: &Path, recursive: bool) -> Result<FileStream<FileChange>> {
        let watch = Watch::open(self, path, recursive).await?;
        Ok(Box::pin(stream::try_unfold(watch, async |mut watch| {
            Ok(watch.next().await?.map(|change| (change, watch)))
        })))
    }

    async fn open_watch(&self, path: &Path, recursive: bool) -> Result<Box<dyn FileWatch>> {
        Ok(Box::new(Watch::open(self, path, recursive).await?))
    }

    async fn set_attributes(
        &self,
        path: &Path,
        prefix: &str,
        attributes: &[(String, Vec<u8>)],
    ) -> Result<FileEntry> {
        let named = |(name, value): &(String, Vec<u8>)| (name.clone().into_bytes(), value.clone());
        let request = FileRequest::SetAttributes {
            path: bytes(path),
            prefix: prefix.as_bytes().to_vec(),
            attributes: attributes.iter().map(named).collect(),
        };
        Talk::begin(self, "describe", path, request, None).await?.entry(PATIENCE).await
    }

    async fn import_tar(
        &self,
        path: &Path,
        parents: bool,
        data: FileSource,
    ) -> Result<TreeSummary> {
        let request = FileRequest::Import { path: bytes(path), parents };
        let talk = self.send("unpack into", path, request, data).await?;
        let wire::Summary { entries, bytes, .. } = talk.done(PATIENCE).await?;
        Ok(TreeSummary { entries, bytes })
    }

    async fn export_tar(&self, path: &Path) -> Result<FileContents> {
        let (reader, writer) = new_pipe()?;
        let request = FileRequest::Export { path: bytes(path) };
        let talk = Talk::begin(self, "pack", path, request, Some(writer)).await?;
        let entry = talk.entry(PATIENCE).await?;
        let reader = pipe::Receiver::from_owned_fd(reader);
        let reader = reader.map_err(|error| talk.error(FileFault::Other, error))?;
        Ok(FileContents { entry, length: None, data: talk.stream(reader, None) })
    }
}
