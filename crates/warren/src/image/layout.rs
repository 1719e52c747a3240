//! Images in files: an OCI layout as a directory or an archive, and what `docker save` writes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use serde::Deserialize;
use warren_init::archive::{BENEATH, Kind, Reader, clean};

use super::manifest::{self, Config, Descriptor, Found, MAX_DOCUMENT, MAX_INDEXES};
use super::{Digest, ImageError, Reference};

/// How many files an archive of images may hold, and how many links may lead to one another.
const MAX_FILES: usize = 10_000;
const MAX_LINKS: usize = 8;

/// The files of an image: a directory, or what is in an archive.
#[derive(Debug)]
pub(super) enum Files {
    /// Below this directory.
    Directory(OwnedFd),
    /// In this archive: where each file begins, and how long it is.
    Archive(File, BTreeMap<Vec<u8>, Place>),
}

/// Where a file of an archive is.
#[derive(Clone, Debug)]
pub(super) enum Place {
    At { offset: u64, size: u64 },
    Link(Vec<u8>),
}

/// One layer as it is read: who it is, if that is known, and what is in it.
pub(super) struct Part {
    pub(super) descriptor: Option<Descriptor>,
    pub(super) diff_id: Option<Digest>,
    pub(super) input: Box<dyn Read + Send>,
}

/// What there is to be unpacked.
#[derive(Debug)]
pub(super) enum Contents {
    /// An image of several layers.
    Image(Box<Parts>),
    /// The root itself, in one archive.
    Root,
}

/// The parts of an image, each by the name of its file.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) config: Config,
    pub(super) layers: Vec<(Vec<u8>, Option<Descriptor>)>,
}

impl Files {
    /// Opens a directory.
    pub(super) fn directory(path: &Path) -> Result<Self, ImageError> {
        let opened = File::open(path).and_then(|dir| {
            if dir.metadata()?.is_dir() {
                Ok(dir)
            } else {
                Err(io::ErrorKind::NotADirectory.into())
            }
        });
        let opened =
            opened.map_err(|error| ImageError::call(format!("open {}", path.display()), error))?;
        Ok(Self::Directory(opened.into()))
    }

    /// Looks through an archive, which must not be compressed.
    pub(super) fn archive(file: File) -> Result<Self, ImageError> {
        let read = |error| ImageError::call("read the archive", error);
        let mut counted = Counted { input: BufReader::new(file.try_clone().map_err(read)?), at: 0 };
        counted.input.seek(SeekFrom::Start(0)).map_err(read)?;
        let mut reader = Reader::new(counted);
        let mut files = BTreeMap::new();
        while let Some(header) = reader.next_entry()? {
            let offset = reader.get_ref().at;
            let place = match header.kind {
                Kind::File => Place::At { offset, size: header.size },
                Kind::Link => Place::Link(header.link),
                Kind::Directory | Kind::HardLink | Kind::Fifo | Kind::Device => continue,
            };
            // A root has any names and may be large; an image has few files, at plain names.
            let Ok(path) = clean(&header.path) else { continue };
            if files.len() < MAX_FILES {
                files.insert(path, place);
            }
        }
        Ok(Self::Archive(file, files))
    }

    /// Opens one of the files.
    fn open(&self, name: &[u8]) -> Result<Option<Box<dyn Read + Send>>, ImageError> {
        let shown = || String::from_utf8_lossy(name).escape_debug().to_string();
        match self {
            Self::Directory(dir) => {
                let path = clean(name)?;
                let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
                match rustix::fs::openat2(dir, &path[..], flags, Mode::empty(), BENEATH) {
                    Ok(file) => Ok(Some(Box::new(File::from(file)))),
                    Err(rustix::io::Errno::NOENT) => Ok(None),
                    Err(error) => Err(ImageError::call(format!("open `{}`", shown()), error)),
                }
            }
            Self::Archive(file, files) => {
                let mut name = clean(name)?;
                for _ in 0..MAX_LINKS {
                    match files.get(&name) {
                        None => return Ok(None),
                        Some(Place::At { offset, size }) => {
                            let file = file.try_clone();
                            let file = file.map_err(|e| ImageError::call("read the archive", e))?;
                            let (at, left) = (*offset, *size);
                            return Ok(Some(Box::new(Window { file, at, left })));
                        }
                        Some(Place::Link(target)) => name = follow(&name, target),
                    }
                }
                Err(ImageError::refused(format!("`{}`", shown()), "too many links lead to it"))
            }
        }
    }

    fn document(&self, name: &[u8]) -> Result<Option<Vec<u8>>, ImageError> {
        let Some(input) = self.open(name)? else { return Ok(None) };
        let shown = String::from_utf8_lossy(name).escape_debug().to_string();
        let mut bytes = Vec::new();
        input
            .take(MAX_DOCUMENT + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| ImageError::call(format!("read `{shown}`"), error))?;
        if bytes.len() as u64 > MAX_DOCUMENT {
            let what = format!("`{shown}`");
            return Err(ImageError::TooLarge { what, limit: MAX_DOCUMENT, unit: "bytes" });
        }
        Ok(Some(bytes))
    }

    fn blob(&self, descriptor: &Descriptor, what: &str) -> Result<Vec<u8>, ImageError> {
        let name = blob_name(&descriptor.digest);
        let bytes = self.document(&name)?.ok_or_else(|| missing(&name))?;
        descriptor.digest.check(what, Digest::of(&bytes))?;
        Ok(bytes)
    }

    /// Finds out what the files are, and of several images the one that is named.
    pub(super) fn contents(&self, reference: Option<&str>) -> Result<Contents, ImageError> {
        if let Some(index) = self.document(b"index.json")?
            && self.document(b"oci-layout")?.is_some()
        {
            return Ok(Contents::Image(Box::new(self.oci(index, reference)?)));
        }
        if let Some(list) = self.document(b"manifest.json")? {
            // A root may have a file of that name.
            if let Ok(saved) = manifest::parse::<Vec<Saved>>(&list, "manifest.json") {
                return Ok(Contents::Image(Box::new(self.docker(saved, reference)?)));
            }
        }
        match reference {
            None => Ok(Contents::Root),
            Some(name) => Err(ImageError::NotFound {
                name: name.to_owned(),
                why: "the files are those of no image".to_owned(),
            }),
        }
    }

    fn oci(&self, index: Vec<u8>, reference: Option<&str>) -> Result<Parts, ImageError> {
        let (mut bytes, mut reference) = (index, reference);
        for _ in 0..MAX_INDEXES {
            match manifest::read(&bytes, reference.take())? {
                Found::Document(descriptor) => bytes = self.blob(&descriptor, "the manifest")?,
                Found::Manifest(found) => {
                    let config = self.blob(&found.config, "the configuration")?;
                    let config = Config::read(&config, found.layers.len())?;
                    let layers = found.layers.into_iter();
                    let layers = layers.map(|layer| (blob_name(&layer.digest), Some(layer)));
                    return Ok(Parts { config, layers: layers.collect() });
                }
            }
        }
        Err(ImageError::refused("the index", "it leads to too many others"))
    }

    fn docker(&self, saved: Vec<Saved>, reference: Option<&str>) -> Result<Parts, ImageError> {
        let count = saved.len();
        let mut fitting = saved.into_iter().filter(|one| match reference {
            Some(wanted) => one.tags().any(|tag| is_same(tag, wanted)),
            None => count == 1,
        });
        let Some(image) = fitting.next() else {
            let (name, why) = match reference {
                Some(name) => (name.to_owned(), "nothing in the archive has this name"),
                None => ("".to_owned(), "the archive holds several, or none: name one of them"),
            };
            return Err(ImageError::NotFound { name, why: why.to_owned() });
        };
        let config = self.document(image.config.as_bytes())?;
        let config = config.ok_or_else(|| missing(image.config.as_bytes()))?;
        let layers: Vec<_> =
            image.layers.into_iter().map(|name| (name.into_bytes(), None)).collect();
        Ok(Parts { config: Config::read(&config, layers.len())?, layers })
    }

    /// Opens the n-th layer.
    pub(super) fn layer(&self, parts: &Parts, index: usize) -> Result<Part, ImageError> {
        let (name, descriptor) = &parts.layers[index];
        let input = self.open(name)?.ok_or_else(|| missing(name))?;
        let diff_id = Some(parts.config.diff_ids()[index].clone());
        Ok(Part { descriptor: descriptor.clone(), diff_id, input })
    }
}

/// Tells whether two names mean the same image: `a/b` is `docker.io/a/b:latest`.
fn is_same(one: &str, other: &str) -> bool {
    let whole = |text: &str| text.parse::<Reference>().ok();
    one == other || whole(one).is_some_and(|whole_one| whole(other) == Some(whole_one))
}

fn blob_name(digest: &Digest) -> Vec<u8> {
    format!("blobs/sha256/{}", digest.hex()).into_bytes()
}

fn missing(name: &[u8]) -> ImageError {
    let name = String::from_utf8_lossy(name).escape_debug().to_string();
    ImageError::refused("the image", format!("`{name}` is missing"))
}

/// Follows a link within an archive, by its text alone; what leads out leads nowhere.
fn follow(name: &[u8], target: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = match target.starts_with(b"/") {
        true => Vec::new(),
        false => name.split(|byte| *byte == b'/').collect(),
    };
    parts.pop();
    for part in target.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join(&b'/')
}

/// An image of those that `docker save` wrote.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

impl Saved {
    fn tags(&self) -> impl Iterator<Item = &str> {
        self.repo_tags.iter().flatten().map(String::as_str)
    }
}

/// A reader that knows where it is.
#[derive(Debug)]
struct Counted<R> {
    input: R,
    at: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.input.read(buffer)?;
        self.at += got as u64;
        Ok(got)
    }
}

/// One file within an archive.
#[derive(Debug)]
struct Window {
    file: File,
    at: u64,
    left: u64,
}

impl Read for Window {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let got = self.file.read_at(&mut buffer[..most], self.at)?;
        self.at += got as u64;
        self.left -= got as u64;
        Ok(got)
    }
}

/// Has what may be compressed as a plain file: itself, or a copy without a name beside it.
pub(super) fn plain(file: File, spool: &Path, most: u64) -> Result<File, ImageError> {
    let read = |error| ImageError::call("read the archive", error);
    let mut input = BufReader::new(file.try_clone().map_err(read)?);
    let mut magic = [0; 4];
    let got = file.read_at(&mut magic, 0).map_err(read)?;
    if !(magic[..got].starts_with(&[0x1f, 0x8b]) || magic == [0x28, 0xb5, 0x2f, 0xfd]) {
        return Ok(file);
    }
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let copy = rustix::fs::open(spool, flags, Mode::from_raw_mode(0o600));
    let copy = copy.map_err(|error| ImageError::call("make room for the archive", error))?;
    let mut copy = File::from(copy);
    let limited = super::unpack::decompressed(&mut input)?;
    let copied = io::copy(&mut limited.take(most + 1), &mut copy).map_err(read)?;
    if copied > most {
        let what = "the archive".to_owned();
        return Err(ImageError::TooLarge { what, limit: most, unit: "bytes" });
    }
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_an_archive_lead_nowhere_else() {
        for (name, target, found) in [
            ("a/layer.tar", "../b.tar", "b.tar"),
            ("a", "b", "b"),
            ("a/b/c", "./d", "a/b/d"),
            ("a", "../../etc/passwd", "etc/passwd"),
            ("a/b", "/x", "x"),
        ] {
            assert_eq!(follow(name.as_bytes(), target.as_bytes()), found.as_bytes());
        }
    }
}
