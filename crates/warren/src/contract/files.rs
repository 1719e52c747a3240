//! The files of one sandbox, as its owner reaches them from outside.

use std::fmt;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use futures_core::Stream;

use super::{Result, SandboxError};

/// Things that come one after the other, the last of which may be an error. Dropping it ends what it
/// comes from.
pub type FileStream<T> = Pin<Box<dyn Stream<Item = Result<T, SandboxError>> + Send>>;

/// Bytes that a caller sends. An error in it means that they do not go on: what was begun is undone.
pub type FileSource = Pin<Box<dyn Stream<Item = std::io::Result<Vec<u8>>> + Send>>;

/// The files of one sandbox.
///
/// Paths are absolute and resolved inside, with the rights of a command: a link, `..` or `/proc`
/// leads where it would lead a command, and never out. Names need not be UTF-8. Nothing here waits
/// for a FIFO or a device, which are refused.
///
/// A suspended sandbox refuses every call with [`SandboxError::Suspended`]; what goes on while it is
/// suspended ends with that error.
#[async_trait]
pub trait SandboxFiles: Send + Sync {
    /// Says what is at a path. A link is not followed; where it ends is told.
    async fn stat(&self, path: &Path) -> Result<FileEntry, SandboxError>;

    /// Lists a directory, in no order; paths are relative to it.
    async fn list(&self, path: &Path, options: ListOptions) -> Result<FileListing, SandboxError>;

    /// Reads a file, or `length` bytes from `offset` on.
    async fn read(
        &self,
        path: &Path,
        offset: u64,
        length: Option<u64>,
    ) -> Result<FileContents, SandboxError>;

    /// Writes a file. Links are followed; what is there appears whole or not at all, unless
    /// [`WriteMode`] says otherwise. The file is the sandbox's user's, and never set-uid.
    async fn write(
        &self,
        path: &Path,
        options: WriteOptions,
        data: FileSource,
    ) -> Result<FileEntry, SandboxError>;

    /// Makes a directory. With `parents` those on the way, too, and one that is there is no error.
    async fn make_directory(
        &self,
        path: &Path,
        mode: Option<u32>,
        parents: bool,
    ) -> Result<FileEntry, SandboxError>;

    /// Gives something another name; a link itself, not what it leads to.
    async fn rename(
        &self,
        from: &Path,
        to: &Path,
        options: RenameOptions,
    ) -> Result<FileEntry, SandboxError>;

    /// Removes something and returns how many entries went. No link is ever followed.
    async fn remove(&self, path: &Path, recursive: bool) -> Result<u64, SandboxError>;

    /// Tells what happens in a directory. It is watched when this returns.
    async fn watch(
        &self,
        path: &Path,
        recursive: bool,
    ) -> Result<FileStream<FileChange>, SandboxError>;

    /// Unpacks a tar stream beneath a directory, which is made if `parents`.
    ///
    /// Nothing in it gets out of that directory. If it fails, what was unpacked so far is there, but
    /// no half of a file.
    async fn import_tar(
        &self,
        path: &Path,
        parents: bool,
        data: FileSource,
    ) -> Result<TreeSummary, SandboxError>;

    /// Packs a directory, or one file, as a tar stream.
    async fn export_tar(&self, path: &Path) -> Result<FileContents, SandboxError>;

    /// Gives what is at a path these extended attributes, by their whole names, and no others whose
    /// names begin with `prefix`, which is `user.` at least. A link is followed.
    async fn set_attributes(
        &self,
        path: &Path,
        prefix: &str,
        attributes: &[(String, Vec<u8>)],
    ) -> Result<FileEntry, SandboxError>;

    /// Watches a directory for one who asks now and then what has happened.
    async fn open_watch(
        &self,
        path: &Path,
        recursive: bool,
    ) -> Result<Box<dyn FileWatch>, SandboxError>;
}

/// A directory that is watched. Dropping it ends that.
#[async_trait]
pub trait FileWatch: Send {
    /// Waits for the next change; `None` when what is watched is gone.
    async fn next(&mut self) -> Result<Option<FileChange>, SandboxError>;

    /// Returns all that has happened up to now and was not told yet.
    async fn happened(&mut self) -> Result<Vec<FileChange>, SandboxError>;
}

impl fmt::Debug for dyn SandboxFiles + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SandboxFiles").finish_non_exhaustive()
    }
}

impl fmt::Debug for dyn FileWatch + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileWatch").finish_non_exhaustive()
    }
}

/// What is at one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileEntry {
    /// Its path: as it was asked for, or relative to the directory that is listed.
    pub path: PathBuf,
    /// What it is.
    pub kind: FileKind,
    /// Its size in bytes.
    pub size: u64,
    /// Its permissions.
    pub mode: u32,
    /// Its owner, inside.
    pub uid: u32,
    /// Its group, inside.
    pub gid: u32,
    /// How many names it has.
    pub links: u64,
    /// When its contents changed.
    pub modified: DateTime<Utc>,
    /// When it was read.
    pub accessed: DateTime<Utc>,
    /// When anything about it changed.
    pub changed: DateTime<Utc>,
    /// Where a link leads, as it is written.
    pub target: Option<PathBuf>,
    /// Where a link ends, what is there and its permissions; absent in lists, and if it ends nowhere.
    pub resolved: Option<(PathBuf, FileKind, u32)>,
    /// What one of the sandbox's users is told beside; absent otherwise.
    pub details: Option<Box<FileDetails>>,
}

/// What else there is to say of what is at a path, to one of the sandbox's users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileDetails {
    /// What its owner is called inside, by number if by nothing else.
    pub owner: String,
    /// What its group is called inside.
    pub group: String,
    /// Its extended attributes `user.*` by their whole names; a link has those of where it ends. None
    /// of them if they are longer than 6 KiB together.
    pub attributes: Vec<(String, Vec<u8>)>,
}

/// What kind of thing a path names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A FIFO.
    Fifo,
    /// A socket.
    Socket,
    /// A device.
    Device,
}

impl FileKind {
    /// Returns its stable name.
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Directory => "directory",
            Self::Link => "link",
            Self::Fifo => "fifo",
            Self::Socket => "socket",
            Self::Device => "device",
        }
    }
}

/// How much of a directory to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListOptions {
    /// How deep, 1 to 64: 1 is what is in the directory itself.
    pub depth: u16,
    /// How many entries at most.
    pub limit: u32,
}

impl Default for ListOptions {
    fn default() -> Self {
        Self { depth: 1, limit: 100_000 }
    }
}

/// What is in a directory.
pub struct FileListing {
    /// The entries, and last of all whether there were more.
    pub items: FileStream<ListItem>,
}

impl fmt::Debug for FileListing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileListing").finish_non_exhaustive()
    }
}

/// One step of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListItem {
    /// Something is there.
    Entry(FileEntry),
    /// That is all, or, if `truncated`, as much as was asked for.
    End {
        /// Whether there is more.
        truncated: bool,
    },
}

/// What is in a file.
pub struct FileContents {
    /// The file.
    pub entry: FileEntry,
    /// How many bytes will come, if that is known.
    pub length: Option<u64>,
    /// The bytes.
    pub data: FileStream<Vec<u8>>,
}

impl fmt::Debug for FileContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("FileContents");
        shown.field("entry", &self.entry).field("length", &self.length).finish_non_exhaustive()
    }
}

/// How to write a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WriteOptions {
    /// What becomes of what was there.
    pub how: WriteMode,
    /// Its permissions; those it had, or 0644, if absent. Never set-uid or set-gid.
    pub mode: Option<u32>,
    /// Whether to make the directories on the way.
    pub parents: bool,
}

/// What becomes of a file that is there already.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WriteMode {
    /// It is replaced at one moment, when all has arrived.
    #[default]
    Replace,
    /// It is left alone, and the call fails.
    New,
    /// What comes is added to it, as it comes.
    Append,
    /// It is emptied and written as the bytes come: the same file, and half a file for a while.
    InPlace,
}

/// How to move something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RenameOptions {
    /// Whether what is there may be replaced.
    pub replace: bool,
    /// Whether to make the directories on the way.
    pub parents: bool,
}

/// Something that happened in a directory that is watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileChange {
    /// What.
    pub kind: FileChangeKind,
    /// To what: relative to the directory that is watched, empty for itself.
    pub path: PathBuf,
    /// Whether that is a directory.
    pub directory: bool,
    /// What was there right after, told to one of the sandbox's users, and if anything was.
    pub entry: Option<Box<FileEntry>>,
}

/// What can happen in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileChangeKind {
    /// It was made, or moved here.
    Create,
    /// It was written to.
    Write,
    /// It was removed.
    Remove,
    /// It was moved away: this was its name.
    Rename,
    /// Its permissions or times changed.
    Chmod,
    /// Something happened that is not told: too much at once, or more directories than are watched.
    Lost,
}

impl FileChangeKind {
    /// Returns its stable name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Write => "write",
            Self::Remove => "remove",
            Self::Rename => "rename",
            Self::Chmod => "chmod",
            Self::Lost => "lost",
        }
    }
}

/// What was unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TreeSummary {
    /// Files, directories and links.
    pub entries: u64,
    /// Bytes in files.
    pub bytes: u64,
}

/// Why something could not be done with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileFault {
    /// There is nothing at this path.
    NotFound,
    /// There is something already.
    Exists,
    /// It is a directory.
    IsDirectory,
    /// It is no directory.
    NotDirectory,
    /// It is a FIFO, a device or a socket.
    Special,
    /// It is a directory with something in it.
    NotEmpty,
    /// The sandbox's user may not.
    Denied,
    /// It is on a part of the filesystem that cannot be written.
    ReadOnly,
    /// The sandbox's disk is full.
    NoSpace,
    /// The path is not absolute, has a NUL, or is too long.
    InvalidPath,
    /// Links lead in a circle, or through a link of the kernel's own.
    Loop,
    /// The archive makes no sense, or wants to be where it may not.
    InvalidArchive,
    /// There are more directories than can be watched, or levels than can be walked.
    TooMany,
    /// The sandbox serves as many requests as it can.
    Busy,
    /// It was cut off before all had arrived.
    Interrupted,
    /// The process inside that served it was killed.
    Killed,
    /// The sandbox has no user of this name.
    NoUser,
    /// Something else: the source says what.
    Other,
}

impl FileFault {
    /// Returns its stable name.
    pub fn code(self) -> &'static str {
        match self {
            Self::NotFound => "file_not_found",
            Self::Exists => "file_exists",
            Self::IsDirectory => "is_directory",
            Self::NotDirectory => "not_directory",
            Self::Special => "not_regular",
            Self::NotEmpty => "not_empty",
            Self::Denied => "denied",
            Self::ReadOnly => "read_only",
            Self::NoSpace => "no_space",
            Self::InvalidPath => "invalid_path",
            Self::Loop => "link_loop",
            Self::InvalidArchive => "invalid_archive",
            Self::TooMany => "too_many",
            Self::Busy => "busy",
            Self::Interrupted => "interrupted",
            Self::Killed => "file_worker_killed",
            Self::NoUser => "no_such_user",
            Self::Other => "file_failed",
        }
    }

    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::NotFound => "there is nothing",
            Self::Exists => "there is something already",
            Self::IsDirectory => "it is a directory",
            Self::NotDirectory => "it is no directory",
            Self::Special => "it is neither a file nor a directory",
            Self::NotEmpty => "it is not empty",
            Self::Denied => "the sandbox's user may not",
            Self::ReadOnly => "it cannot be written there",
            Self::NoSpace => "the sandbox's disk is full",
            Self::InvalidPath => "it is no path that can be used",
            Self::Loop => "its links lead nowhere",
            Self::InvalidArchive => "the archive is refused",
            Self::TooMany => "it has too many directories",
            Self::Busy => "the sandbox serves as many requests as it can",
            Self::Interrupted => "it was cut off before all had arrived",
            Self::Killed => "the process that served it was killed",
            Self::NoUser => "the sandbox has no such user",
            Self::Other => "it failed",
        }
    }

    pub(super) fn hint(self) -> &'static str {
        match self {
            Self::NotFound => "check the path; it is one inside the sandbox",
            Self::Exists => "choose another path, or allow it to be replaced",
            Self::IsDirectory => "name a file, or copy the directory as a tree",
            Self::NotDirectory => "name a directory",
            Self::Special => "FIFOs, devices and sockets are for the sandbox's own programs",
            Self::NotEmpty => "remove it recursively",
            Self::Denied => "only what belongs to the sandbox's user can be changed",
            Self::ReadOnly => "write to /workspace, /tmp or the home directory",
            Self::NoSpace => "remove something, or give the sandbox a larger disk",
            Self::InvalidPath => "paths begin with `/` and have up to 4095 bytes, 255 in a name",
            Self::Loop => "name the file itself; links of /proc are not followed",
            Self::InvalidArchive => "send a tar of files, directories and links with plain paths",
            Self::TooMany => "name a smaller directory",
            Self::Busy => "try again when some have ended",
            Self::Interrupted => "send it again, whole",
            Self::Killed => "the sandbox may be out of memory, which its files take up, too",
            Self::NoUser => "name one of the sandbox's /etc/passwd, `user` for one",
            Self::Other => "the daemon's log says more",
        }
    }
}
