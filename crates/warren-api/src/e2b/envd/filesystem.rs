//! The filesystem service: the files of the sandbox as one of its users has them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use tokio::time::Instant;
use uuid::Uuid;
use warren::{
    FileChange, FileChangeKind, FileEntry, FileFault, FileKind, FileWatch, ListItem, ListOptions,
    RenameOptions, SandboxError, SandboxFiles,
};

use super::Call;
use super::connect::{Code, Failure};
use super::wire::{
    Empty, EntryInfo, EntryResponse, FilesystemEvent, ListDirRequest, ListDirResponse, MoveRequest,
    PathRequest, WatchRequest, WatchResponse, Watcher, WatcherEvents, event_type, file_type,
};

/// What the names of extended attributes begin with that are a file's metadata.
pub(super) const METADATA: &str = "user.e2b.";
/// How many watchers a sandbox has at most that are asked now and then.
const MAX_WATCHERS: usize = 16;
/// How deep a list goes at most.
const MAX_DEPTH: u16 = 64;

/// What is at a path, as it is told.
pub(super) fn info(entry: &FileEntry) -> EntryInfo {
    let path = entry.path.display().to_string();
    let name = entry.path.file_name();
    let name = name.map_or_else(|| path.clone(), |name| name.to_string_lossy().into_owned());
    let (kind, mode) = match (&entry.resolved, entry.kind) {
        (Some((_, kind, mode)), _) => (Some(*kind), *mode),
        (None, FileKind::Link) => (None, 0),
        (None, kind) => (Some(kind), entry.mode),
    };
    let symlink_target = (entry.kind == FileKind::Link).then(|| {
        // One that leads nowhere leads to itself.
        let end = entry.resolved.as_ref().map_or(&entry.path, |(end, ..)| end);
        end.display().to_string()
    });
    let size = i64::try_from(entry.size).unwrap_or(i64::MAX);
    let (owner, group) = match entry.details.as_deref() {
        Some(details) => (details.owner.clone(), details.group.clone()),
        None => (entry.uid.to_string(), entry.gid.to_string()),
    };
    EntryInfo {
        name,
        kind: match kind {
            Some(FileKind::File) => file_type::FILE,
            Some(FileKind::Directory) => file_type::DIRECTORY,
            _ => file_type::UNSPECIFIED,
        },
        path,
        // There are filesystems on which a directory has none, which looks like a mistake.
        size: if entry.kind == FileKind::Directory { size.max(1) } else { size },
        mode: mode & 0o777,
        permissions: permissions(entry.kind, entry.mode),
        owner,
        group,
        modified_time: Some(entry.modified.into()),
        symlink_target,
        metadata: metadata(entry),
    }
}

/// Returns the metadata of a file: attributes of ours that are text.
pub(super) fn metadata(entry: &FileEntry) -> HashMap<String, String> {
    let all = entry.details.iter().flat_map(|details| &details.attributes);
    let ours = all.filter_map(|(name, value)| {
        let value = String::from_utf8(value.clone()).ok()?;
        Some((name.strip_prefix(METADATA)?.to_owned(), value))
    });
    ours.collect()
}

/// Writes permissions as Go does.
fn permissions(kind: FileKind, mode: u32) -> String {
    let mut text = String::new();
    match kind {
        FileKind::File => {}
        FileKind::Directory => text.push('d'),
        FileKind::Link => text.push('L'),
        FileKind::Fifo => text.push('p'),
        FileKind::Socket => text.push('S'),
        FileKind::Device => text.push('D'),
    }
    for (bit, letter) in [(0o4000, 'u'), (0o2000, 'g'), (0o1000, 't')] {
        if mode & bit != 0 {
            text.push(letter);
        }
    }
    if text.is_empty() {
        text.push('-');
    }
    for (index, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> index) == 0 { '-' } else { letter });
    }
    text
}

fn files(call: &Call) -> Result<Arc<dyn SandboxFiles>, Failure> {
    let files = call.entry.sandbox.files_of(call.user()?);
    files.ok_or_else(|| Failure::new(Code::Unimplemented, "this sandbox has no files"))
}

/// Says why something could not be done with a file.
fn failed(call: &Call, path: &str) -> impl FnOnce(SandboxError) -> Failure {
    let user = call.user().unwrap_or_default().to_owned();
    let path = path.escape_debug().to_string();
    move |error| match &error {
        SandboxError::File { kind: FileFault::NoUser, .. } => Failure::no_user(&user),
        SandboxError::File { kind: FileFault::NotFound, .. } => {
            Failure::new(Code::NotFound, format!("path not found: {path}"))
        }
        SandboxError::File { kind: FileFault::NotDirectory, .. } => {
            Failure::invalid(format!("path is not a directory: {path}"))
        }
        SandboxError::File { kind: FileFault::Loop, .. } => {
            let message = format!("cyclic symlink or chain of too many links at {path}");
            Failure::new(Code::FailedPrecondition, message)
        }
        _ => error.into(),
    }
}

fn entry(found: &FileEntry) -> EntryResponse {
    EntryResponse { entry: Some(info(found)) }
}

pub(super) async fn stat(call: &Call, request: PathRequest) -> Result<EntryResponse, Failure> {
    let path = call.path(&request.path);
    let found = files(call)?.stat(&path).await;
    Ok(entry(&found.map_err(failed(call, &request.path))?))
}

pub(super) async fn make_dir(call: &Call, request: PathRequest) -> Result<EntryResponse, Failure> {
    let (files, path) = (files(call)?, call.path(&request.path));
    let is = |error: &SandboxError, wanted| match error {
        SandboxError::File { kind, .. } => *kind == wanted,
        _ => false,
    };
    let mut made = files.make_directory(&path, None, false).await;
    if made.as_ref().is_err_and(|error| is(error, FileFault::NotFound)) {
        made = files.make_directory(&path, None, true).await;
    }
    if made.as_ref().is_err_and(|error| is(error, FileFault::Exists)) {
        let shown = request.path.escape_debug().to_string();
        let there = files.stat(&path).await.map_err(failed(call, &request.path))?;
        let kind = there.resolved.map_or(there.kind, |(_, kind, _)| kind);
        return Err(match kind {
            FileKind::Directory => {
                Failure::new(Code::AlreadyExists, format!("directory already exists: {shown}"))
            }
            _ => {
                Failure::invalid(format!("path already exists but it is not a directory: {shown}"))
            }
        });
    }
    Ok(entry(&made.map_err(failed(call, &request.path))?))
}

pub(super) async fn rename(call: &Call, request: MoveRequest) -> Result<EntryResponse, Failure> {
    let (from, to) = (call.path(&request.source), call.path(&request.destination));
    let options = RenameOptions { replace: true, parents: true };
    let moved = files(call)?.rename(&from, &to, options).await;
    Ok(entry(&moved.map_err(failed(call, &request.source))?))
}

pub(super) async fn remove(call: &Call, request: PathRequest) -> Result<Empty, Failure> {
    match files(call)?.remove(&call.path(&request.path), true).await {
        // What is not there is removed.
        Ok(_) | Err(SandboxError::File { kind: FileFault::NotFound, .. }) => Ok(Empty {}),
        Err(error) => Err(failed(call, &request.path)(error)),
    }
}

pub(super) async fn list_dir(
    call: &Call,
    request: ListDirRequest,
) -> Result<ListDirResponse, Failure> {
    let (files, path) = (files(call)?, call.path(&request.path));
    let depth = u16::try_from(request.depth.max(1)).unwrap_or(MAX_DEPTH).min(MAX_DEPTH);
    let options = ListOptions { depth, ..ListOptions::default() };
    let listing = files.list(&path, options).await.map_err(failed(call, &request.path))?;
    let mut items = listing.items;
    let mut found = Vec::new();
    while let Some(item) = items.next().await {
        match item.map_err(failed(call, &request.path))? {
            ListItem::Entry(entry) => found.push(entry),
            ListItem::End { truncated: true } => {
                let message = "the directory has more entries than can be listed";
                return Err(Failure::new(Code::ResourceExhausted, message));
            }
            ListItem::End { truncated: false } => {}
        }
    }
    // A directory before what is in it, and by name among what is in the same.
    found.sort_by(|a, b| a.path.components().cmp(b.path.components()));
    let top = match found.is_empty() {
        true => PathBuf::new(),
        // Where relative paths begin is known inside.
        false => absolute(&*files, &path).await.map_err(failed(call, &request.path))?,
    };
    let entries = found.into_iter().map(|found| {
        let path = top.join(&found.path);
        info(&FileEntry { path, ..found })
    });
    Ok(ListDirResponse { entries: entries.collect() })
}

/// Returns the path itself if it is absolute; asks where it is if not.
async fn absolute(files: &dyn SandboxFiles, path: &Path) -> Result<PathBuf, SandboxError> {
    if path.is_absolute() {
        return Ok(path.to_owned());
    }
    Ok(files.stat(path).await?.path)
}

/// What happened, as it is told; `None` for what is not.
fn event(change: FileChange, with_entry: bool) -> Option<FilesystemEvent> {
    let kind = match change.kind {
        FileChangeKind::Create => event_type::CREATE,
        FileChangeKind::Write => event_type::WRITE,
        FileChangeKind::Remove => event_type::REMOVE,
        FileChangeKind::Rename => event_type::RENAME,
        FileChangeKind::Chmod => event_type::CHMOD,
        FileChangeKind::Lost => return None,
    };
    let name = match change.path.as_os_str().is_empty() {
        true => ".".to_owned(),
        false => change.path.display().to_string(),
    };
    let entry = change.entry.filter(|_| with_entry).map(|entry| info(&entry));
    Some(FilesystemEvent { name, kind, entry })
}

fn lost() -> Failure {
    Failure::new(Code::Internal, "watcher error: more happened than could be told")
}

async fn open_watch(call: &Call, request: &WatchRequest) -> Result<Box<dyn FileWatch>, Failure> {
    let opened = files(call)?.open_watch(&call.path(&request.path), request.recursive).await;
    opened.map_err(failed(call, &request.path))
}

pub(super) async fn watch_dir(
    call: &Call,
    request: WatchRequest,
) -> Result<impl Stream<Item = Result<WatchResponse, Failure>> + use<>, Failure> {
    let deadline = call.deadline()?.map(|after| Instant::now() + after);
    let (watch, keepalive) = (open_watch(call, &request).await?, call.keepalive());
    let with_entry = request.include_entry;
    let first = WatchResponse { start: Some(Empty {}), ..WatchResponse::default() };
    let rest = stream::unfold(Some(watch), move |watch| async move {
        let mut watch = watch?;
        match next(&mut *watch, keepalive, deadline, with_entry).await {
            Ok(said) => Some((Ok(said), Some(watch))),
            Err(failure) => Some((Err(failure), None)),
        }
    });
    Ok(stream::once(async { Ok(first) }).chain(rest))
}

/// Waits for the next that happens, or gives a sign of life.
async fn next(
    watch: &mut dyn FileWatch,
    keepalive: Duration,
    deadline: Option<Instant>,
    with_entry: bool,
) -> Result<WatchResponse, Failure> {
    let quiet = Instant::now() + keepalive;
    let until = deadline.map_or(quiet, |deadline| deadline.min(quiet));
    let change = async {
        match watch.next().await? {
            Some(change) => event(change, with_entry).ok_or_else(lost),
            // What was watched is gone; whoever listens decides for how long.
            None => std::future::pending().await,
        }
    };
    match tokio::time::timeout_at(until, change).await {
        Ok(event) => Ok(WatchResponse { filesystem: Some(event?), ..WatchResponse::default() }),
        Err(_) if deadline.is_some_and(|deadline| deadline <= Instant::now()) => {
            Err(Failure::deadline())
        }
        Err(_) => Ok(WatchResponse { keepalive: Some(Empty {}), ..WatchResponse::default() }),
    }
}

/// Watchers that are asked now and then what has happened.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Watchers(Arc<Mutex<HashMap<String, Arc<Asked>>>>);

/// One of them.
#[derive(Debug)]
struct Asked {
    sandbox: String,
    with_entry: bool,
    watch: tokio::sync::Mutex<Box<dyn FileWatch>>,
}

impl Watchers {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Arc<Asked>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, call: &Call, id: &str) -> Result<Arc<Asked>, Failure> {
        let found = self.all().get(id).cloned();
        let found = found.filter(|asked| asked.sandbox == call.entry.id);
        let id = id.escape_debug();
        let missing = || Failure::new(Code::NotFound, format!("watcher with id {id} not found"));
        found.ok_or_else(missing)
    }

    fn count(&self, sandbox: &str) -> usize {
        self.all().values().filter(|asked| asked.sandbox == sandbox).count()
    }
}

pub(super) async fn create_watcher(call: &Call, request: WatchRequest) -> Result<Watcher, Failure> {
    let watchers = &call.e2b.0.watchers;
    let crowded = || {
        let message = format!("a sandbox has {MAX_WATCHERS} watchers at most: remove one");
        Failure::new(Code::ResourceExhausted, message)
    };
    if watchers.count(&call.entry.id) >= MAX_WATCHERS {
        return Err(crowded());
    }
    let watch = tokio::sync::Mutex::new(open_watch(call, &request).await?);
    let (sandbox, with_entry) = (call.entry.id.clone(), request.include_entry);
    let watcher_id = format!("w{}", Uuid::new_v4().simple());
    let asked = Arc::new(Asked { sandbox, with_entry, watch });
    watchers.all().insert(watcher_id.clone(), asked);
    if watchers.count(&call.entry.id) > MAX_WATCHERS {
        watchers.all().remove(&watcher_id);
        return Err(crowded());
    }
    // It goes with the sandbox, at the latest.
    let (over, api, id) = (call.entry.over.clone(), &call.e2b.0.api, watcher_id.clone());
    let (stop, watchers) = (api.0.stop.clone(), watchers.clone());
    api.0.tasks.spawn(async move {
        stop.run_until_cancelled(over.cancelled()).await;
        watchers.all().remove(&id);
    });
    Ok(Watcher { watcher_id })
}

pub(super) async fn watcher_events(
    call: &Call,
    request: Watcher,
) -> Result<WatcherEvents, Failure> {
    let asked = call.e2b.0.watchers.find(call, &request.watcher_id)?;
    let changes = asked.watch.lock().await.happened().await?;
    let events = changes.into_iter().map(|change| event(change, asked.with_entry));
    let events = events.collect::<Option<Vec<_>>>().ok_or_else(lost)?;
    Ok(WatcherEvents { events })
}

pub(super) async fn remove_watcher(call: &Call, request: Watcher) -> Result<Empty, Failure> {
    call.e2b.0.watchers.find(call, &request.watcher_id)?;
    call.e2b.0.watchers.all().remove(&request.watcher_id);
    Ok(Empty {})
}

#[cfg(test)]
mod tests {
    use chrono::Utc;

    use super::*;

    fn at(path: &str, kind: FileKind, mode: u32) -> FileEntry {
        let now = Utc::now();
        FileEntry {
            path: path.into(),
            kind,
            size: 0,
            mode,
            uid: 1000,
            gid: 1000,
            links: 1,
            modified: now,
            accessed: now,
            changed: now,
            target: None,
            resolved: None,
            details: None,
        }
    }

    #[test]
    fn permissions_are_written_as_go_does() {
        for (kind, mode, wanted) in [
            (FileKind::File, 0o644, "-rw-r--r--"),
            (FileKind::Directory, 0o755, "drwxr-xr-x"),
            (FileKind::Link, 0o777, "Lrwxrwxrwx"),
            (FileKind::Directory, 0o1777, "dtrwxrwxrwx"),
            (FileKind::File, 0o4755, "urwxr-xr-x"),
            (FileKind::Fifo, 0o600, "prw-------"),
        ] {
            assert_eq!(permissions(kind, mode), wanted);
        }
    }

    #[test]
    fn a_link_is_told_as_what_it_leads_to() {
        let mut link = at("/a/link", FileKind::Link, 0o777);
        let broken = info(&link);
        assert_eq!((broken.kind, broken.symlink_target.as_deref()), (0, Some("/a/link")));
        link.resolved = Some(("/b/file".into(), FileKind::File, 0o640));
        let told = info(&link);
        assert_eq!((told.name.as_str(), told.kind, told.mode), ("link", file_type::FILE, 0o640));
        assert_eq!(told.permissions, "Lrwxrwxrwx");
        assert_eq!(told.symlink_target.as_deref(), Some("/b/file"));
        let root = info(&at("/", FileKind::Directory, 0o755));
        assert_eq!((root.name.as_str(), root.size > 0), ("/", true));
    }
}
