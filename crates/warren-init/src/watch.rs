//! Telling what happens in a directory, and in those below it.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::files::{
    Result, Who, call, fault, open_at, open_directory, path_of, stat, tell, weight, within,
};
use crate::protocol;
use crate::protocol::files::{
    Change, ChangeKind, FaultKind, FileControl, FileEvent, MAX_PATH, MAX_WATCHES, PACKET,
};

/// How long the second half of a move may take to be told.
const HALF_A_MOVE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// How much goes into one packet at most.
const MESSAGE: usize = 13 * 1024;

/// How often a look is taken whether what is watched is still there.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Tells until nobody listens.
pub(crate) fn watch(path: &[u8], recursive: bool, who: Who<'_>, channel: &OwnedFd) -> Result<()> {
    // By its path from here on: a descriptor would keep it from being seen to go.
    let top = open_directory(path)?;
    let inode = rustix::fs::fstat(&top).map_err(call)?.st_ino;
    let top = path_of(&top).ok_or_else(|| call(Errno::NOENT))?;
    let notify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(call)?;
    let mut watcher = Watcher {
        top,
        inode,
        notify,
        recursive,
        who,
        paths: HashMap::new(),
        leaving: None,
        changes: Vec::new(),
        size: 0,
        channel,
    };
    if !watcher.add(b"", Found::Silent)? {
        return Err(fault(FaultKind::TooMany));
    }
    tell(channel, &FileEvent::Ready)?;
    watcher.run()
}

/// Whether what is found in a directory that is new to us is told.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Silent,
    Told,
}

struct Watcher<'a> {
    /// The path of the first directory, without links.
    top: Vec<u8>,
    inode: u64,
    notify: OwnedFd,
    recursive: bool,
    /// Who is told in full what there is.
    who: Who<'a>,
    /// The directory behind each watch, relative to the first.
    paths: HashMap<i32, Vec<u8>>,
    /// A directory that was moved away and may turn up elsewhere.
    leaving: Option<(u32, Vec<u8>)>,
    changes: Vec<Change>,
    size: usize,
    channel: &'a OwnedFd,
}

/// An event as it is kept while the next is read.
struct Seen {
    watch: i32,
    flags: ReadFlags,
    cookie: u32,
    name: Vec<u8>,
}

impl Watcher<'_> {
    /// Watches a directory and those below it; `false` if there are too many.
    fn add(&mut self, path: &[u8], found: Found) -> Result<bool> {
        // Each with its path, opened only when its turn comes: any depth, few descriptors.
        let mut waiting = vec![path.to_vec()];
        while let Some(path) = waiting.pop() {
            if self.paths.len() >= MAX_WATCHES {
                return Ok(false);
            }
            // One that may not be read, or is gone meanwhile, is not watched.
            let Ok(place) = self.open(&path) else { continue };
            // By descriptor: the name may have become another's.
            rustix::process::fchdir(&place).map_err(call)?;
            let flags = WatchFlags::CREATE
                | WatchFlags::MODIFY
                | WatchFlags::DELETE
                | WatchFlags::DELETE_SELF
                | WatchFlags::MOVE_SELF
                | WatchFlags::MOVED_FROM
                | WatchFlags::MOVED_TO
                | WatchFlags::ATTRIB
                | WatchFlags::ONLYDIR;
            let watch = match inotify::add_watch(&self.notify, c".", flags) {
                Ok(watch) => watch,
                // The kernel has a bound of its own, for all of one user.
                Err(Errno::NOSPC | Errno::NOMEM) => return Ok(false),
                Err(error) => return Err(call(error)),
            };
            self.paths.insert(watch, path.clone());
            if !self.recursive && found == Found::Silent {
                continue;
            }
            let Ok(mut entries) = Dir::new(place) else { continue };
            while let Some(Ok(entry)) = entries.read() {
                let name = entry.file_name().to_bytes();
                if matches!(name, b"." | b"..") {
                    continue;
                }
                let inner = join(&path, name);
                if inner.len() > MAX_PATH {
                    continue;
                }
                let directory = match entry.file_type() {
                    FileType::Directory => true,
                    FileType::Unknown => entries.fd().is_ok_and(|dir| {
                        let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
                        rustix::fs::statat(dir, name, flags)
                            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir())
                    }),
                    _ => false,
                };
                if found == Found::Told {
                    self.push(ChangeKind::Created, inner.clone(), directory)?;
                }
                if directory && self.recursive {
                    if waiting.len() >= MAX_WATCHES {
                        return Ok(false);
                    }
                    waiting.push(inner);
                }
            }
        }
        // Nor must the last of them be kept by standing in it.
        rustix::process::chdir(c"/").map_err(call)?;
        Ok(true)
    }

    fn open(&self, path: &[u8]) -> std::io::Result<OwnedFd> {
        let root = rustix::fs::open(c"/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let path = join(&self.top, path);
        let path = path.strip_prefix(b"/").filter(|path| !path.is_empty()).unwrap_or(b".");
        open_at(root.as_fd(), path, OFlags::RDONLY | OFlags::DIRECTORY)
    }

    fn run(&mut self) -> Result<()> {
        let mut buffer = vec![MaybeUninit::uninit(); 64 * 1024];
        loop {
            let waits = if self.leaving.is_some() { &HALF_A_MOVE } else { &LOOK };
            let mut fds = [
                PollFd::new(&self.notify, PollFlags::IN),
                PollFd::new(self.channel, PollFlags::IN),
            ];
            let ready = match poll(&mut fds, Some(waits)) {
                Ok(ready) => ready,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(call(error)),
            };
            let mut asked = false;
            if !fds[1].revents().is_empty() {
                match protocol::receive_trusted::<FileControl>(self.channel) {
                    Ok(Some((FileControl::Tell, _))) => asked = true,
                    // Nobody listens any more, or says anything that could be meant for us.
                    Ok(_) | Err(_) => return Ok(()),
                }
            }
            // What is asked for is what happened before: all of it is in the queue by now.
            if ready == 0 && self.leaving.is_some() {
                self.left();
            } else if ready == 0 && self.is_gone() {
                self.push(ChangeKind::Removed, Vec::new(), true)?;
                self.paths.clear();
            }
            let notify = self.notify.try_clone().map_err(call)?;
            let mut reader = inotify::Reader::new(notify, &mut buffer);
            loop {
                let seen = match reader.next() {
                    Ok(event) => Seen {
                        watch: event.wd(),
                        flags: event.events(),
                        cookie: event.cookie(),
                        name: event.file_name().map_or(&[][..], |name| name.to_bytes()).to_vec(),
                    },
                    Err(Errno::AGAIN) => break,
                    Err(Errno::INTR) => continue,
                    Err(error) => return Err(call(error)),
                };
                self.seen(&seen)?;
            }
            self.flush()?;
            if asked {
                tell(self.channel, &FileEvent::Ready)?;
            }
            if self.paths.is_empty() {
                // What was watched is gone, and so is the reason to go on.
                return tell(self.channel, &FileEvent::Done(Default::default()));
            }
        }
    }

    /// Tells whether the first directory is no longer at its path. An overlay does not say so itself.
    fn is_gone(&self) -> bool {
        let now = self.open(b"").and_then(|top| Ok(rustix::fs::fstat(top)?));
        now.map_or(true, |now| now.st_ino != self.inode)
    }

    fn seen(&mut self, seen: &Seen) -> Result<()> {
        if seen.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return self.push(ChangeKind::Lost, Vec::new(), false);
        }
        if seen.flags.contains(ReadFlags::IGNORED) {
            self.paths.remove(&seen.watch);
            return Ok(());
        }
        // What is told next is no longer about where it was.
        if self.leaving.as_ref().is_some_and(|(cookie, _)| *cookie != seen.cookie) {
            self.left();
        }
        let Some(parent) = self.paths.get(&seen.watch) else { return Ok(()) };
        let (path, first) = (join(parent, &seen.name), parent.is_empty());
        let directory = seen.flags.contains(ReadFlags::ISDIR);
        if seen.name.is_empty() {
            // About a watched directory itself; those below the first are told by their parents.
            return match seen.flags {
                flags if first && flags.contains(ReadFlags::DELETE_SELF) => {
                    self.push(ChangeKind::Removed, path, true)
                }
                flags if first && flags.contains(ReadFlags::MOVE_SELF) => {
                    self.push(ChangeKind::Renamed, path, true)
                }
                flags if first && flags.contains(ReadFlags::ATTRIB) => {
                    self.push(ChangeKind::Attributes, path, true)
                }
                _ => Ok(()),
            };
        }
        let kind = match seen.flags {
            flags if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) => {
                ChangeKind::Created
            }
            flags if flags.contains(ReadFlags::MODIFY) => ChangeKind::Written,
            flags if flags.contains(ReadFlags::DELETE) => ChangeKind::Removed,
            flags if flags.contains(ReadFlags::MOVED_FROM) => ChangeKind::Renamed,
            flags if flags.contains(ReadFlags::ATTRIB) => ChangeKind::Attributes,
            _ => return Ok(()),
        };
        self.push(kind, path.clone(), directory)?;
        if !directory || !self.recursive {
            return Ok(());
        }
        match kind {
            ChangeKind::Renamed => self.leaving = Some((seen.cookie, path)),
            ChangeKind::Created => match self.leaving.take() {
                Some((_, old)) if seen.flags.contains(ReadFlags::MOVED_TO) => {
                    self.renamed(&old, &path);
                }
                _ => return self.grow(&path),
            },
            _ => {}
        }
        Ok(())
    }

    /// Watches a directory that is new, with what was made in it before it was watched.
    fn grow(&mut self, path: &[u8]) -> Result<()> {
        if self.add(path, Found::Told)? {
            return Ok(());
        }
        self.push(ChangeKind::Lost, path.to_vec(), true)
    }

    /// A directory has another name now; what is watched below it, too.
    fn renamed(&mut self, old: &[u8], new: &[u8]) {
        for path in self.paths.values_mut() {
            if is_below(path, old) {
                *path = [new, &path[old.len()..]].concat();
            }
        }
    }

    /// A directory was moved to where it is not watched.
    fn left(&mut self) {
        let Some((_, old)) = self.leaving.take() else { return };
        let gone: Vec<i32> =
            self.paths.iter().filter(|(_, path)| is_below(path, &old)).map(|(id, _)| *id).collect();
        for watch in gone {
            let _ = inotify::remove_watch(&self.notify, watch);
            self.paths.remove(&watch);
        }
    }

    fn push(&mut self, kind: ChangeKind, path: Vec<u8>, directory: bool) -> Result<()> {
        // Looked at now: what is there later may be something else.
        let entry = match kind {
            ChangeKind::Created | ChangeKind::Written | ChangeKind::Attributes => {
                let place = join(&self.top, &path);
                self.who
                    .and_then(|_| stat(&place, self.who).ok())
                    .map(|entry| within(entry, PACKET))
            }
            ChangeKind::Removed | ChangeKind::Renamed | ChangeKind::Lost => None,
        };
        let size = 16 + path.len() + entry.as_ref().map_or(0, weight);
        if self.size + size > MESSAGE {
            self.flush()?;
        }
        self.size += size;
        self.changes.push(Change { kind, path, directory, entry });
        if self.size >= PACKET { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        self.size = 0;
        if self.changes.is_empty() {
            return Ok(());
        }
        tell(self.channel, &FileEvent::Changes(std::mem::take(&mut self.changes)))
    }
}

fn is_below(path: &[u8], dir: &[u8]) -> bool {
    path.strip_prefix(dir).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    match (path, name) {
        (path, b"") => path.to_vec(),
        (b"", name) => name.to_vec(),
        (path, name) => [path, b"/", name].concat(),
    }
}
