//! The files that a recipe copies.

use std::fs;
use std::io::{self, BufReader, Read, Write};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;
use warren_init::archive::{self, BENEATH};

use crate::image::{Digest, Hashing, ImageError, decompressed};
use crate::layers::{Held, Layers, Staging};
use crate::{FileSource, LayerId, Result, SandboxError, SandboxFiles};

/// How much a context may hold, unpacked.
const MAX_BYTES: u64 = 8 << 30;
/// How deep a directory is looked into.
const MAX_DEPTH: usize = 200;

/// Files that steps of a build copy, unpacked to a place of their own.
#[derive(Debug)]
pub struct Context {
    place: Place,
}

/// Where they are.
#[derive(Debug)]
enum Place {
    /// In a place that goes with this.
    Passing(Staging),
    /// In a layer, which stays while this does.
    Kept { path: PathBuf, tree: OwnedFd, _held: Held },
}

impl Place {
    fn tree(&self) -> BorrowedFd<'_> {
        match self {
            Self::Passing(staging) => staging.tree(),
            Self::Kept { tree, .. } => tree.as_fd(),
        }
    }

    fn path(&self) -> PathBuf {
        match self {
            Self::Passing(staging) => staging.path(),
            Self::Kept { path, .. } => path.clone(),
        }
    }
}

impl PartialEq for Context {
    fn eq(&self, other: &Self) -> bool {
        self.place.path() == other.place.path()
    }
}

impl Eq for Context {}

impl Context {
    /// Unpacks an archive (tar, alone or compressed) that anybody may have written. Blocks.
    pub fn unpack(layers: &Layers, input: impl Read) -> Result<Self> {
        let staging = layers.begin()?;
        let mut input = BufReader::new(input);
        let plain = decompressed(&mut input).map_err(SandboxError::from)?;
        let mut plain = plain.take(MAX_BYTES + 1);
        let unpacked = archive::unpack(&mut plain, staging.tree());
        if plain.limit() == 0 {
            return Err(SandboxError::TooLarge {
                what: "the context".to_owned(),
                limit: MAX_BYTES,
            });
        }
        unpacked.map_err(|trouble| SandboxError::from(ImageError::from(trouble)))?;
        Ok(Self { place: Place::Passing(staging) })
    }

    /// Makes a layer of them, which stays while it is held or named. Blocks.
    pub(super) fn commit(self) -> Result<(LayerId, Held)> {
        match self.place {
            Place::Passing(staging) => staging.commit(),
            Place::Kept { path, .. } => Err(SandboxError::Internal {
                message: format!("{} is a layer already", path.display()),
            }),
        }
    }

    /// Returns those that are in a layer.
    pub(super) fn kept(layers: &Layers, layer: &LayerId, held: Held) -> Result<Self> {
        let path = layers.path(layer);
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let tree = rustix::fs::open(&path, flags, Mode::empty());
        let tree = tree.map_err(|error| SandboxError::step("open", &path, error.into()))?;
        Ok(Self { place: Place::Kept { path, tree, _held: held } })
    }

    /// Unpacks what was sent. Blocks.
    pub fn of(layers: &Layers, upload: &Upload) -> Result<Self> {
        let file = fs::File::open(upload.path());
        let file = file.map_err(|error| SandboxError::step("read", upload.path(), error))?;
        Self::unpack(layers, file)
    }

    /// Finds what a source of a COPY means: itself, or the directory in which it looks for names.
    fn find(&self, source: &str) -> Result<PathBuf> {
        let mut path = PathBuf::new();
        for part in Path::new(source).components() {
            match part {
                Component::RootDir | Component::CurDir => {}
                Component::Normal(name) => {
                    if name.as_bytes().iter().any(|byte| b"*?[".contains(byte)) {
                        break;
                    }
                    path.push(name);
                }
                Component::ParentDir | Component::Prefix(_) => {
                    let reason = format!("`{}` leads out of the context", source.escape_debug());
                    return Err(SandboxError::invalid("COPY", reason, "copy what is in it"));
                }
            }
        }
        Ok(path)
    }

    /// Opens what a source means, through no link.
    fn open(&self, source: &str) -> Result<(OwnedFd, PathBuf)> {
        let path = self.find(source)?;
        let name = if path.as_os_str().is_empty() { Path::new(".") } else { &path };
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let opened = rustix::fs::openat2(self.place.tree(), name, flags, Mode::empty(), BENEATH);
        let opened = opened.map_err(|error| {
            let reason = format!("`{}` is not in the context: {error}", source.escape_debug());
            SandboxError::invalid("COPY", reason, "check the path and what was sent")
        })?;
        Ok((opened, path))
    }

    /// Returns the digest of what a source means: names, kinds, permissions, contents.
    pub(super) fn digest(&self, source: &str) -> Result<Digest> {
        let (_, path) = self.open(source)?;
        let whole = self.place.path().join(&path);
        let mut hash = Sha256::new();
        digest(&whole, Path::new(""), &mut hash, 0)
            .map_err(|error| SandboxError::step("read", &whole, error))?;
        Ok(Digest::of(&hash.finalize()))
    }

    /// Copies what a source means into a sandbox: what is in a directory to the target, a file to the
    /// target or into it.
    pub(super) async fn copy(
        &self,
        source: &str,
        workdir: &Path,
        target: &str,
        several: bool,
        mode: Option<u32>,
        files: &dyn SandboxFiles,
    ) -> Result<()> {
        let (opened, path) = self.open(source)?;
        let stat = rustix::fs::fstat(&opened);
        let stat = stat.map_err(|error| SandboxError::step("look at", &path, error.into()))?;
        let place = workdir.join(target);
        let (directory, name) = if FileType::from_raw_mode(stat.st_mode).is_dir() {
            (place, Vec::new())
        } else {
            let own = path.file_name().unwrap_or_default().as_bytes().to_vec();
            let into = several
                || target.ends_with('/')
                || target == "."
                || self.is_there(files, &place).await;
            match (into, place.parent(), place.file_name()) {
                (false, Some(parent), Some(name)) => (parent.to_owned(), name.as_bytes().to_vec()),
                _ => (place, own),
            }
        };
        let (sender, receiver) = mpsc::channel(4);
        let packing = tokio::task::spawn_blocking(move || {
            let mut output = io::BufWriter::with_capacity(256 << 10, Pieces(sender.clone()));
            let packed = archive::pack_as(&mut output, opened, &name, mode);
            let flushed = output.flush();
            let failed = match packed {
                Err(archive::Trouble::Call { source, .. }) => Some(source),
                Err(trouble) => Some(io::Error::other(ImageError::from(trouble))),
                Ok(_) => flushed.err(),
            };
            if let Some(error) = failed {
                let _ = sender.blocking_send(Err(error));
            }
        });
        let data: FileSource =
            Box::pin(futures_util::stream::unfold(receiver, |mut receiver| async {
                let piece = receiver.recv().await?;
                Some((piece, receiver))
            }));
        let copied = files.import_tar(&directory, true, data).await;
        let packed = packing.await;
        copied?;
        packed.map_err(|error| SandboxError::Internal { message: error.to_string() })
    }

    async fn is_there(&self, files: &dyn SandboxFiles, place: &Path) -> bool {
        files.stat(place).await.is_ok_and(|found| found.kind == crate::FileKind::Directory)
    }
}

/// A file that is being sent to us, or was; it goes with this.
#[derive(Debug)]
pub struct Upload {
    _place: Staging,
    path: PathBuf,
    file: fs::File,
    bytes: u64,
}

impl Upload {
    /// Makes room for one.
    pub fn begin(layers: &Layers) -> Result<Self> {
        let place = layers.begin()?;
        let path = place.path().join("upload");
        let file = fs::File::create_new(&path);
        let file = file.map_err(|error| SandboxError::step("create", &path, error))?;
        Ok(Self { _place: place, path, file, bytes: 0 })
    }

    /// Adds what came. Blocks, for as long as a disk does.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes += bytes.len() as u64;
        if self.bytes > MAX_BYTES {
            return Err(SandboxError::TooLarge {
                what: "what is sent".to_owned(),
                limit: MAX_BYTES,
            });
        }
        let written = self.file.write_all(bytes);
        written.map_err(|error| SandboxError::step("write", &self.path, error))
    }

    /// Returns where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Sends what is written, piece by piece.
struct Pieces(mpsc::Sender<io::Result<Vec<u8>>>);

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(bytes.to_vec()));
        sent.map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Adds a tree, which is ours alone, to a digest.
fn digest(top: &Path, path: &Path, hash: &mut Sha256, depth: usize) -> io::Result<()> {
    if depth > MAX_DEPTH {
        return Err(io::Error::other("it is too deep a tree"));
    }
    let whole = top.join(path);
    let found = fs::symlink_metadata(if path.as_os_str().is_empty() { top } else { &whole })?;
    let mut field = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(path.as_os_str().as_bytes());
    field(&(found.mode() & 0o170_000).to_le_bytes());
    if found.is_dir() {
        let mut names = Vec::new();
        for entry in fs::read_dir(&whole)? {
            names.push(entry?.file_name());
        }
        names.sort_unstable();
        for name in names {
            digest(top, &path.join(name), hash, depth + 1)?;
        }
    } else if found.is_symlink() {
        field(fs::read_link(&whole)?.as_os_str().as_bytes());
    } else {
        field(&found.permissions().mode().to_le_bytes());
        let file = if path.as_os_str().is_empty() { top } else { &whole };
        let mut reader = Hashing::new(fs::File::open(file)?);
        io::copy(&mut reader, &mut io::sink())?;
        field(reader.finish().1.as_str().as_bytes());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_stays_in_its_context() {
        let directory = tempfile::tempdir().unwrap();
        let layers = Layers::open(directory.path()).unwrap();
        let context = Context::unpack(&layers, io::empty()).unwrap();
        for (source, found) in
            [("a/b", "a/b"), ("./a", "a"), ("/a", "a"), ("a/*.py", "a"), ("*", ""), (".", "")]
        {
            assert_eq!(context.find(source).unwrap(), Path::new(found), "{source}");
        }
        assert!(context.find("../x").is_err());
        assert!(context.find("a/../../x").is_err());
        let error = context.digest("nothing").unwrap_err();
        assert!(error.to_string().contains("not in the context"), "{error}");
    }
}
