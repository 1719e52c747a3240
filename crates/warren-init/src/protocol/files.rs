//! What is asked of a sandbox's files, and what is answered.
//!
//! Each request is served by a process of its own inside, on the socket that comes with it. Bytes of
//! files travel through a pipe, the second descriptor of the request. Names are bytes: nothing here
//! needs them to be text.

use serde::{Deserialize, Serialize};

/// The longest path that is taken, as the kernel has it (PATH_MAX, without the NUL).
pub const MAX_PATH: usize = 4095;
/// How deep a list goes at most.
pub const MAX_DEPTH: u16 = 64;
/// How many directories one request may watch.
pub const MAX_WATCHES: usize = 8192;
/// How long the extended attributes of one entry may be together.
pub const MAX_ATTRIBUTES: usize = 6 * 1024;
/// How much goes into one packet before the next is begun.
pub const PACKET: usize = 8 * 1024;

/// What is asked of the files of a sandbox. Paths are absolute, and resolved inside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileRequest {
    /// Say what is there; answered by [`FileEvent::Entries`] with one entry.
    Stat {
        /// Of what; a link is not followed.
        path: Vec<u8>,
    },
    /// Say what is in a directory; [`FileEvent::Entries`] and then [`FileEvent::Done`].
    List {
        /// Which directory.
        path: Vec<u8>,
        /// How deep: 1 is what is in the directory itself.
        depth: u16,
        /// How many entries at most.
        limit: u32,
    },
    /// Send what is in a file through the pipe: [`FileEvent::Entries`], later [`FileEvent::Done`].
    Read {
        /// Which file.
        path: Vec<u8>,
        /// From where.
        offset: u64,
        /// How much; to its end if absent.
        length: Option<u64>,
    },
    /// Write what comes through the pipe: [`FileEvent::Ready`] and, after [`FileControl::Commit`],
    /// [`FileEvent::Entries`] with what is there now.
    Write {
        /// Which file.
        path: Vec<u8>,
        /// What becomes of what was there.
        how: WriteHow,
        /// Its permissions; those it had, or 0644, if absent.
        mode: Option<u32>,
        /// Whether to make the directories on the way.
        parents: bool,
    },
    /// Make a directory; answered as [`FileRequest::Stat`].
    MakeDirectory {
        /// Which one.
        path: Vec<u8>,
        /// Its permissions.
        mode: u32,
        /// Whether to make the directories on the way, and to take one that is there already.
        parents: bool,
    },
    /// Give something another name; answered as [`FileRequest::Stat`] of the new one.
    Move {
        /// What; a link itself, not what it leads to.
        from: Vec<u8>,
        /// Its new path.
        to: Vec<u8>,
        /// Whether what is there may be replaced.
        replace: bool,
        /// Whether to make the directories on the way.
        parents: bool,
    },
    /// Remove something; answered by [`FileEvent::Done`].
    Remove {
        /// What; a link itself, not what it leads to.
        path: Vec<u8>,
        /// Whether to remove what is in it, too.
        recursive: bool,
    },
    /// Tell what happens in a directory: [`FileEvent::Ready`], then [`FileEvent::Changes`].
    Watch {
        /// Which directory.
        path: Vec<u8>,
        /// Whether to watch those below it, too.
        recursive: bool,
    },
    /// Unpack the archive that comes through the pipe: [`FileEvent::Ready`] and, after
    /// [`FileControl::Commit`], [`FileEvent::Done`].
    Import {
        /// Into which directory.
        path: Vec<u8>,
        /// Whether to make it, and those on the way.
        parents: bool,
    },
    /// Give a file these extended attributes, and no other whose name begins with `prefix`; answered
    /// as [`FileRequest::Stat`].
    SetAttributes {
        /// Which file; a link is followed.
        path: Vec<u8>,
        /// What the names of all of them begin with; `user.` at least.
        prefix: Vec<u8>,
        /// Their whole names and values.
        attributes: Vec<(Vec<u8>, Vec<u8>)>,
    },
    /// Send a directory, or one file, as an archive through the pipe: [`FileEvent::Entries`], later
    /// [`FileEvent::Done`].
    Export {
        /// What.
        path: Vec<u8>,
    },
}

impl FileRequest {
    /// Returns the paths that it names.
    pub fn paths(&mut self) -> impl Iterator<Item = &mut Vec<u8>> {
        let (one, other) = match self {
            Self::Stat { path }
            | Self::List { path, .. }
            | Self::Read { path, .. }
            | Self::Write { path, .. }
            | Self::MakeDirectory { path, .. }
            | Self::Remove { path, .. }
            | Self::Watch { path, .. }
            | Self::Import { path, .. }
            | Self::SetAttributes { path, .. }
            | Self::Export { path } => (path, None),
            Self::Move { from, to, .. } => (from, Some(to)),
        };
        [Some(one), other].into_iter().flatten()
    }
}

/// What becomes of a file that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WriteHow {
    /// It is replaced at one moment, when all has arrived.
    Replace,
    /// It is left alone; the request fails.
    New,
    /// What comes is added to it as it comes.
    Append,
    /// It is emptied and written as the bytes come: the same file, never whole at one moment.
    InPlace,
}

/// What the one who asked says later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileControl {
    /// All was sent, this many bytes. A socket that closes instead means: forget it.
    Commit(u64),
    /// Tell all that has happened so far, and then [`FileEvent::Ready`].
    Tell,
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileEvent {
    /// The bytes may come, or: it is watched.
    Ready,
    /// What is there.
    Entries(Vec<Entry>),
    /// What happened.
    Changes(Vec<Change>),
    /// It is done.
    Done(Summary),
    /// It could not be done.
    Failed(Fault),
}

/// What is at one path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its path: as it was asked for, or relative to the directory that is listed.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: Kind,
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
    pub modified: Time,
    /// When it was read.
    pub accessed: Time,
    /// When anything about it changed.
    pub changed: Time,
    /// Where a link leads, as it is written.
    pub target: Option<Vec<u8>>,
    /// Where a link ends, and what is there; only for one path or in full, and if it ends anywhere.
    pub resolved: Option<(Vec<u8>, Kind, u32)>,
    /// What is told in full, to one of the sandbox's users.
    pub more: Option<More>,
}

/// What else there is to say of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct More {
    /// What its owner is called.
    pub owner: Vec<u8>,
    /// What its group is called.
    pub group: Vec<u8>,
    /// The extended attributes `user.*` of what it leads to, their whole names and values; left out
    /// if they are longer than [`MAX_ATTRIBUTES`] together.
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

/// What kind of thing a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
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

/// Seconds since 1970, and nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Time {
    /// Seconds.
    pub seconds: i64,
    /// The rest.
    pub nanos: u32,
}

/// Something that happened in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// What.
    pub kind: ChangeKind,
    /// To what: relative to the directory that is watched, empty for itself.
    pub path: Vec<u8>,
    /// Whether that is a directory.
    pub directory: bool,
    /// What is there now, if it is told in full and still is.
    pub entry: Option<Entry>,
}

/// What can happen in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChangeKind {
    /// It was made, or moved here.
    Created,
    /// It was written to.
    Written,
    /// It was removed.
    Removed,
    /// It was moved away: this was its name.
    Renamed,
    /// Its permissions or times changed.
    Attributes,
    /// Something happened that is not told: too much at once, or more directories than are watched.
    Lost,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// How many entries were listed, removed, packed or unpacked.
    pub entries: u64,
    /// How many bytes of files were moved.
    pub bytes: u64,
    /// How many were left out: what cannot be read, or is neither file, directory nor link.
    pub skipped: u64,
    /// Whether there was more than was asked for.
    pub truncated: bool,
}

/// Why it could not be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// What is in the way.
    pub kind: FaultKind,
    /// What the kernel said, or 0.
    pub errno: i32,
    /// How many bytes were written all the same.
    pub written: u64,
    /// Which entry of an archive, or what is wrong with it.
    pub detail: Vec<u8>,
}

/// What can be in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultKind {
    /// A call failed; the errno says why.
    Call,
    /// The path is not absolute, is empty, has a NUL, or is too long.
    Path,
    /// It is a FIFO, a device or a socket.
    Special,
    /// It is a directory.
    Directory,
    /// It is no directory.
    NotDirectory,
    /// The bytes that arrived are not those that were sent.
    Cut,
    /// The archive makes no sense, or wants to be where it may not.
    Archive,
    /// There are more directories than can be watched, or levels than can be walked.
    TooMany,
    /// The sandbox serves as many requests as it can.
    Busy,
    /// The sandbox is suspended.
    Suspended,
    /// The sandbox has no such user.
    User,
}
