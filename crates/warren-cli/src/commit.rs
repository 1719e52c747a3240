//! `warren commit`: takes chosen changes of a sandbox over into a directory of the host.
//!
//! The caller's own rights are used, not the daemon's. What the sandbox says may be an attacker's: every path is
//! resolved beneath the directory and through no link, only files and directories (and links, if asked for)
//! are made, and permissions are no more than read, write and execute. Everything is fetched and checked
//! first; then each file is put in its place by one rename.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use clap::Args;
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};
use warren_api::rest::snapshots::{ChangeView, DiffEntryView, SideView};

use crate::args::ClientArgs;
use crate::client::Client;
use crate::commands::{escaped, find, printed};
use crate::failure::Failure;
use crate::output::{self, say};
use crate::snapshots;

/// Where what was fetched waits, in the directory itself so that it can be renamed from there.
const DRAFT: &str = ".warren-commit";

/// What to take over, and where to.
#[derive(Debug, Args)]
pub(crate) struct CommitArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Take over what changed since this snapshot, and not since the sandbox was made.
    #[arg(long, value_name = "SNAPSHOT")]
    since: Option<String>,
    /// Directory of the sandbox that DIR stands for.
    #[arg(long, value_name = "PATH", default_value = "/workspace")]
    from: PathBuf,
    /// Say what would be done, and do nothing.
    #[arg(long)]
    dry_run: bool,
    /// Take over symbolic links too, wherever they lead.
    #[arg(long)]
    links: bool,
    /// Name or id of the sandbox or its session, or the beginning of one.
    sandbox: String,
    /// Directory of this host.
    dir: PathBuf,
    /// Only these paths of the sandbox and what is below them.
    paths: Vec<PathBuf>,
}

/// One thing to do.
struct Step<'a> {
    /// Below the directory.
    path: PathBuf,
    entry: &'a DiffEntryView,
}

/// How something on the host stands to what the sandbox began with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// As it was there: it can be replaced.
    Before,
    /// As it is there now: there is nothing to do.
    After,
    /// Otherwise.
    Other,
}

/// `warren commit`.
pub(crate) fn commit(args: &CommitArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let sandbox = find(&client, &args.sandbox)?.id;
    let mut query = "digests=true".to_owned();
    if let Some(since) = &args.since {
        query.push_str(&format!("&since={}", snapshots::find_snapshot(&client, since)?.id));
    }
    let wanted = if args.paths.is_empty() { vec![args.from.clone()] } else { args.paths.clone() };
    for path in &wanted {
        let path = args.from.join(path);
        let text = path.to_str().ok_or_else(|| {
            Failure::usage(
                format!("`{}` is not UTF-8", path.display()),
                "name its parent directory",
            )
        })?;
        query.push_str(&format!("&path={}", escaped(text)));
    }
    let diff = snapshots::changes(&client, &sandbox, &query)?;
    if diff.truncated {
        let hint = "name some paths";
        return Err(Failure::usage("there are too many changes for one commit", hint));
    }
    let dir = &args.dir;
    let failed =
        |error: io::Error| Failure::system(&format!("cannot use {}", dir.display()), &error);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(dir, flags, Mode::empty()).map_err(|error| failed(error.into()))?;

    let mut steps = Vec::new();
    let mut conflicts = Vec::new();
    for entry in &diff.items {
        let Some(path) = below(&entry.path, &args.from) else { continue };
        let path = match path {
            Ok(path) => path,
            Err(why) => {
                conflicts.push(format!("{}: {why}", shown(&entry.path)));
                continue;
            }
        };
        let known = |side: &Option<SideView>| {
            side.as_ref().is_none_or(|side| match side.kind.as_str() {
                "file" | "directory" => true,
                "link" => args.links,
                _ => false,
            })
        };
        if !known(&entry.before) || !known(&entry.after) {
            say(&format!("warren: left out: {} is no file", shown(&entry.path)));
            continue;
        }
        match standing(root.as_fd(), &path, entry) {
            Ok(Standing::Before) => steps.push(Step { path, entry }),
            Ok(Standing::After) => {}
            Ok(Standing::Other) => {
                conflicts.push(format!("{}: it was changed here too", path.display()));
            }
            Err(error) => conflicts.push(format!("{}: {error}", path.display())),
        }
    }
    if !conflicts.is_empty() {
        for conflict in &conflicts {
            say(&format!("warren: conflict: {}", shown(conflict)));
        }
        let message = format!("{} of the changes cannot be taken over; none was", conflicts.len());
        let hint = "move what is in the way, or choose other paths";
        return Err(Failure::fatal("conflict", message).with_hint(hint));
    }
    if !args.dry_run && (!steps.is_empty() || Draft::is_left(root.as_fd())) {
        apply(&client, &sandbox, root.as_fd(), &steps).map_err(|error| match error {
            Trouble::Host(error) => failed(error),
            Trouble::Daemon(failure) => failure,
        })?;
    }
    let line = |step: &Step<'_>| {
        let mark = match step.entry.change {
            ChangeView::Added => 'A',
            ChangeView::Changed => 'M',
            ChangeView::Removed => 'D',
        };
        format!("{mark} {}\n", shown(&step.path.display().to_string()))
    };
    if args.client.json {
        let items: Vec<&DiffEntryView> = steps.iter().map(|step| step.entry).collect();
        return crate::commands::show_object(&items);
    }
    printed(output::print(steps.iter().map(line).collect::<String>().as_bytes()))
}

/// Keeps a name on its line.
fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Returns where a path of the sandbox is below the directory; `None` for what is not below its own.
fn below(path: &str, from: &Path) -> Option<Result<PathBuf, &'static str>> {
    let rest = Path::new(path).strip_prefix(from).ok()?;
    if rest.as_os_str().is_empty() {
        return None;
    }
    if path.contains('\u{fffd}') {
        return Some(Err("its name is no UTF-8"));
    }
    let plain = rest.components().all(|part| matches!(part, Component::Normal(_)));
    let ours = rest.components().next() == Some(Component::Normal(DRAFT.as_ref()));
    Some(if plain && !ours { Ok(rest.to_owned()) } else { Err("its name cannot be used") })
}

/// Opens the directory that something is in, beneath `root` and through no link.
fn parent(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let parent = parent.unwrap_or(Path::new("."));
    Ok(rustix::fs::openat2(root, parent, flags, Mode::empty(), resolve)?)
}

fn name(path: &Path) -> io::Result<&std::ffi::OsStr> {
    path.file_name().ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn standing(root: BorrowedFd<'_>, path: &Path, entry: &DiffEntryView) -> io::Result<Standing> {
    let there = match parent(root, path) {
        Ok(parent) => describe(parent.as_fd(), path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let same = |side: &Option<SideView>| match (&there, side) {
        (None, None) => true,
        (Some((kind, what)), Some(side)) => {
            *kind == side.kind
                && match side.kind.as_str() {
                    "file" => Some(what) == side.sha256.as_ref(),
                    "link" => Some(what) == side.target.as_ref(),
                    _ => true,
                }
        }
        _ => false,
    };
    // A directory that is there stays as it is.
    let is_dir =
        |side: &Option<SideView>| side.as_ref().is_some_and(|side| side.kind == "directory");
    if same(&entry.after) && !(is_dir(&entry.after) && entry.change == ChangeView::Removed) {
        return Ok(Standing::After);
    }
    Ok(if same(&entry.before) { Standing::Before } else { Standing::Other })
}

/// Says what something is, and what is in it or where it leads.
fn describe(parent: BorrowedFd<'_>, path: &Path) -> io::Result<Option<(String, String)>> {
    let name = name(path)?;
    let found = match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(None),
        other => other?,
    };
    Ok(Some(match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = File::from(rustix::fs::openat(parent, name, flags, Mode::empty())?);
            ("file".to_owned(), digest(file)?)
        }
        FileType::Directory => ("directory".to_owned(), String::new()),
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(parent, name, Vec::new())?;
            ("link".to_owned(), target.to_string_lossy().into_owned())
        }
        _ => ("other".to_owned(), String::new()),
    }))
}

fn digest(mut file: File) -> io::Result<String> {
    let mut hash = Hash(Sha256::new());
    io::copy(&mut file, &mut hash)?;
    Ok(hash.hex())
}

struct Hash(Sha256);

impl Hash {
    fn hex(self) -> String {
        self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl io::Write for Hash {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

enum Trouble {
    Host(io::Error),
    Daemon(Failure),
}

impl<E: Into<io::Error>> From<E> for Trouble {
    fn from(error: E) -> Self {
        Self::Host(error.into())
    }
}

/// Fetches what is new, checks it, and puts it in place.
fn apply(
    client: &Client,
    sandbox: &str,
    root: BorrowedFd<'_>,
    steps: &[Step<'_>],
) -> Result<(), Trouble> {
    let draft = Draft::begin(root)?;
    let files =
        |step: &&Step<'_>| step.entry.after.as_ref().is_some_and(|side| side.kind == "file");
    for (number, step) in steps.iter().enumerate().filter(|(_, step)| files(step)) {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file =
            rustix::fs::openat(&draft.dir, number.to_string(), flags, Mode::RUSR | Mode::WUSR)?;
        let (mut file, mut hash) = (File::from(file), Hash(Sha256::new()));
        let url = format!("/v1/sandboxes/{sandbox}/files?path={}", escaped(&step.entry.path));
        let write = |chunk: hyper::body::Bytes| {
            let written = file.write_all(&chunk).and_then(|()| hash.write_all(&chunk));
            written.map_err(|error| Failure::system("cannot write to the directory", &error))
        };
        client.download(&url, |_| (), write).map_err(Trouble::Daemon)?;
        let side = step.entry.after.as_ref();
        if side.and_then(|side| side.sha256.as_ref()) != Some(&hash.hex()) {
            let message =
                format!("`{}` was changed in the sandbox meanwhile", shown(&step.entry.path));
            let failure = Failure::fatal("conflict", message);
            return Err(Trouble::Daemon(failure.with_hint("suspend the sandbox, or try again")));
        }
        let mode = side.map_or(0o644, |side| side.mode) & 0o777;
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode))?;
    }
    // Parents come before what is in them; what is removed goes the other way.
    for (number, step) in steps.iter().enumerate() {
        let Some(side) = &step.entry.after else { continue };
        let parent = parent(root, &step.path)?;
        let name = name(&step.path)?;
        if step.entry.before.as_ref().is_some_and(|before| before.kind != side.kind) {
            remove(parent.as_fd(), &step.path)?;
        }
        match side.kind.as_str() {
            "directory" => match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            },
            "link" => {
                let target = side.target.clone().unwrap_or_default();
                rustix::fs::symlinkat(target, &draft.dir, number.to_string())?;
                rustix::fs::renameat(&draft.dir, number.to_string(), &parent, name)?;
            }
            _ => rustix::fs::renameat(&draft.dir, number.to_string(), &parent, name)?,
        }
    }
    for step in steps.iter().rev().filter(|step| step.entry.after.is_none()) {
        match parent(root, &step.path) {
            Ok(parent) => remove(parent.as_fd(), &step.path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Removes one thing; a directory that holds something else of the host's stays.
fn remove(parent: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let name = name(path)?;
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {
            match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
                Err(error) => Err(error.into()),
            }
        }
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The directory of what was fetched. One that a killed commit left is used up by the next.
struct Draft<'a> {
    root: BorrowedFd<'a>,
    dir: OwnedFd,
}

impl<'a> Draft<'a> {
    /// Whether a commit was killed that had nothing else to do any more.
    fn is_left(root: BorrowedFd<'_>) -> bool {
        rustix::fs::statat(root, DRAFT, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    fn begin(root: BorrowedFd<'a>) -> io::Result<Self> {
        match rustix::fs::mkdirat(root, DRAFT, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(root, DRAFT, flags, Mode::empty())?;
        rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive)?;
        let draft = Self { root, dir };
        draft.clear()?;
        Ok(draft)
    }

    fn clear(&self) -> io::Result<()> {
        for entry in rustix::fs::Dir::read_from(&self.dir)? {
            let entry = entry?;
            let name = entry.file_name();
            if name != c"." && name != c".." {
                rustix::fs::unlinkat(&self.dir, name, AtFlags::empty())?;
            }
        }
        Ok(())
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        let _ = self.clear();
        let _ = rustix::fs::unlinkat(self.root, DRAFT, AtFlags::REMOVEDIR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stays_below_the_directory_or_is_refused() {
        let from = Path::new("/workspace");
        let at = |path| below(path, from).map(|path| path.ok());
        assert_eq!(at("/workspace/a/b"), Some(Some("a/b".into())));
        assert_eq!(at("/workspace"), None);
        assert_eq!(at("/etc/passwd"), None);
        for bad in [
            "/workspace/../etc",
            "/workspace/a/../../b",
            "/workspace/\u{fffd}",
            "/workspace/.warren-commit/1",
        ] {
            assert_eq!(at(bad), Some(None), "{bad}");
        }
    }
}
