//! A snapshot as one file: a tar, compressed by zstd, of a manifest and of each layer.
//!
//! ```text
//! manifest.json        what the snapshot is, and of each layer its id, its length and its SHA-256
//! layers/<digest>      the layer, as `layers/stream.rs` writes it
//! ```
//!
//! What is read may be anybody's. Only these entries are taken, in this order, each checked against the manifest; a
//! layer that is not what its id says is refused, and nothing is there before all of it is.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek as _, Write};
use std::os::fd::AsFd as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::Snapshots;
use crate::layers::Held;
use crate::layers::stream;
use crate::layers::tree::{self, Ids};
use crate::{
    Base, Capture, Importer, LayerId, Result, SandboxError, SandboxId, SandboxSpec, Snapshot,
    SnapshotOptions,
};

const MANIFEST: &str = "manifest.json";
const VERSION: u32 = 1;
const BLOCK: usize = 512;
/// The longest manifest, and the most that a snapshot may hold.
const MAX_MANIFEST: u64 = 4 << 20;
const MAX_BYTES: u64 = 64 << 30;
/// The largest window of zstd: 128 MiB of memory.
const WINDOW: u32 = 27;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    version: u32,
    name: String,
    labels: std::collections::BTreeMap<String, String>,
    sandbox_id: SandboxId,
    spec: SandboxSpec,
    base: Base,
    layers: Vec<ManifestLayer>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestLayer {
    id: LayerId,
    size: u64,
    sha256: String,
}

fn failed(step: &str, error: io::Error) -> SandboxError {
    SandboxError::keeping(step, None, error)
}

fn refused(reason: impl Into<String>) -> SandboxError {
    let hint = "it was damaged on its way, or is none of Warren's: export it again";
    SandboxError::invalid("archive", reason, hint)
}

/// Hashes what goes through it.
struct Hashing<T> {
    inner: T,
    hash: Sha256,
    count: u64,
}

impl<T> Hashing<T> {
    fn new(inner: T) -> Self {
        Self { inner, hash: Sha256::new(), count: 0 }
    }

    fn hex(self) -> (String, u64) {
        (self.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect(), self.count)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.count += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.hash.update(&bytes[..read]);
        self.count += read as u64;
        Ok(read)
    }
}

impl Snapshots {
    /// Writes a snapshot of an owner to a file, which has no name and is read from its beginning.
    pub fn export(&self, owner: Option<&str>, id: &str) -> Result<File> {
        let snapshot = self.find(owner, id)?;
        let _held = self.layers().hold(snapshot.base.all())?;
        let mut streams = Vec::new();
        let mut layers = Vec::new();
        for id in snapshot.base.all() {
            let wrote = || {
                let file = nameless(self.layers().root())?;
                let mut out = Hashing::new(BufWriter::new(file));
                stream::write(tree::open_root(&self.layers().path(id))?.as_fd(), &mut out)?;
                out.flush()?;
                let file = out.inner.get_ref().try_clone()?;
                let (sha256, size) = out.hex();
                io::Result::Ok((file, ManifestLayer { id: id.clone(), size, sha256 }))
            };
            let (file, layer) = wrote().map_err(|error| failed("export a layer", error))?;
            streams.push(file);
            layers.push(layer);
        }
        let manifest = Manifest {
            version: VERSION,
            name: snapshot.name.clone(),
            labels: snapshot.labels.clone(),
            sandbox_id: snapshot.sandbox_id.clone(),
            spec: snapshot.spec.clone(),
            base: snapshot.base.clone(),
            layers,
        };
        let mut write = || {
            let out = BufWriter::new(nameless(self.layers().root())?);
            let mut out = zstd::stream::write::Encoder::new(out, 3)?;
            let text = serde_json::to_vec(&manifest)?;
            entry(&mut out, MANIFEST, text.len() as u64, &mut &text[..])?;
            for (layer, file) in manifest.layers.iter().zip(&mut streams) {
                file.rewind()?;
                let name = format!("layers/{}", layer.id.hex());
                entry(&mut out, &name, layer.size, &mut BufReader::new(file))?;
            }
            out.write_all(&[0; 2 * BLOCK])?;
            let mut out = out.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
            out.rewind()?;
            Ok(out)
        };
        write().map_err(|error: io::Error| failed("write the archive", error))
    }

    /// Reads a snapshot from a file and makes it an owner's, under its own name or another. What its sandboxes
    /// are to be is what `importer` may ask for, or it is refused.
    pub fn import(
        &self,
        owner: Option<&str>,
        name: Option<&str>,
        importer: Importer,
        input: impl Read,
    ) -> Result<Snapshot> {
        let broken = |error: io::Error| refused(error.to_string());
        let mut input = zstd::stream::read::Decoder::new(input).map_err(broken)?.single_frame();
        input.window_log_max(WINDOW).map_err(broken)?;
        let manifest = opening(&mut input)?;
        // Before anything of it is kept: between keeping and looking somebody could fork it.
        if importer == Importer::Tenant
            && let Some(what) = manifest.spec.operator_only()
        {
            let hint = "export a sandbox that has no paths of its host and all of its limits";
            return Err(SandboxError::invalid("archive", what.to_string(), hint));
        }
        let Manifest { labels, sandbox_id, spec, base, layers, .. } = manifest;
        let name = name.unwrap_or(&manifest.name).to_owned();
        let options = SnapshotOptions { name, labels, ..SnapshotOptions::default() };
        options.validate()?;
        let reserved = self.reserve(owner, &options.name)?;
        // Not what others have: that is nobody's to find out.
        let had: BTreeSet<LayerId> =
            self.list(owner)?.iter().flat_map(|snapshot| snapshot.base.all()).cloned().collect();
        let mut held = Held::default();
        let mut ids = std::collections::BTreeMap::new();
        let mut new_bytes = 0;
        for layer in &layers {
            let (found, size) = header(&mut input).map_err(broken)?;
            if found != format!("layers/{}", layer.id.hex()) || size != layer.size {
                return Err(refused(format!("layer {} is not where it should be", layer.id)));
            }
            let staging = self.layers().begin()?;
            let mut hashing = Hashing::new((&mut input).take(size));
            stream::read(&mut hashing, staging.tree(), MAX_BYTES).map_err(|error| {
                match error.raw_os_error() {
                    Some(_) => failed("unpack a layer", error),
                    None => broken(error),
                }
            })?;
            let (sha256, count) = hashing.hex();
            if sha256 != layer.sha256 || count != size {
                return Err(refused(format!("the digest of layer {} is wrong", layer.id)));
            }
            padding(&mut input, size).map_err(broken)?;
            let (id, kept) = staging.commit()?;
            // A plain user cannot keep the owners of files, so that the layer is another.
            if id != layer.id && Ids::of_layers() == Ids::Same {
                return Err(refused(format!("layer {} holds something else", layer.id)));
            }
            if !had.contains(&id) {
                new_bytes += self.layers().info(&id)?.bytes;
            }
            held.join(kept);
            ids.insert(&layer.id, id);
        }
        let mut end = Vec::new();
        (&mut input).take(4 * BLOCK as u64).read_to_end(&mut end).map_err(broken)?;
        if end.len() != 2 * BLOCK || end.iter().any(|byte| *byte != 0) {
            return Err(refused("it has no end, or something after it"));
        }
        let own = |old: &[LayerId]| old.iter().map(|id| ids[id].clone()).collect();
        let base = Base {
            layers: own(&base.layers),
            changes: own(&base.changes),
            host_tools: base.host_tools,
        };
        let paused = std::time::Duration::ZERO;
        reserved.put(&sandbox_id, spec, &Capture { base, new_bytes, paused, held }, options)
    }
}

/// Reads the manifest that a snapshot begins with, and checks what can be checked of it.
fn opening(input: &mut impl Read) -> Result<Manifest> {
    let broken = |error: io::Error| refused(error.to_string());
    let (found, size) = header(input).map_err(broken)?;
    if found != MANIFEST || size > MAX_MANIFEST {
        return Err(refused("it does not begin with a manifest"));
    }
    let mut text = Vec::new();
    input.take(size).read_to_end(&mut text).map_err(broken)?;
    padding(input, size).map_err(broken)?;
    let manifest: Manifest =
        serde_json::from_slice(&text).map_err(|error| refused(error.to_string()))?;
    let Manifest { version, sandbox_id, spec, base, layers, .. } = &manifest;
    if *version != VERSION {
        return Err(refused(format!("it is of version {version}")));
    }
    base.validate()?;
    spec.validate()?;
    sandbox_id.validate()?;
    if !layers.iter().map(|layer| &layer.id).eq(base.all()) {
        return Err(refused("its layers are not those that it stands on"));
    }
    let total = layers.iter().try_fold(0_u64, |total, layer| total.checked_add(layer.size));
    if total.is_none_or(|total| total > MAX_BYTES) {
        return Err(SandboxError::TooLarge { what: "the snapshot".to_owned(), limit: MAX_BYTES });
    }
    Ok(manifest)
}

/// Reads what a snapshot begins with: as it is, or a manifest that is given a header first.
#[cfg(feature = "fuzz")]
pub(crate) fn fuzz(data: &[u8]) {
    let _ = opening(&mut &data[..]);
    let mut whole = Vec::new();
    entry(&mut whole, MANIFEST, data.len() as u64, &mut &data[..]).expect("memory");
    let _ = opening(&mut &whole[..]);
}

/// Makes a file that has no name, and goes with its last descriptor.
fn nameless(directory: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?.into())
}

/// Writes one entry of a tar: what POSIX calls a ustar header, and the bytes.
fn entry(out: &mut impl Write, name: &str, size: u64, from: &mut impl Read) -> io::Result<()> {
    let mut header = [0_u8; BLOCK];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..108].copy_from_slice(b"0000600\0");
    header[108..116].copy_from_slice(b"0000000\0");
    header[116..124].copy_from_slice(b"0000000\0");
    header[124..136]
        .copy_from_slice(format!("{size:011o} ").as_bytes().get(..12).ok_or_else(too_long)?);
    header[136..148].copy_from_slice(b"00000000000 ");
    header[148..156].fill(b' ');
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    out.write_all(&header)?;
    if io::copy(&mut from.take(size), out)? != size {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    out.write_all(&vec![0; pad(size)])
}

fn too_long() -> io::Error {
    io::ErrorKind::FileTooLarge.into()
}

fn pad(size: u64) -> usize {
    usize::try_from(size.next_multiple_of(BLOCK as u64) - size).unwrap_or_default()
}

fn padding(input: &mut impl Read, size: u64) -> io::Result<()> {
    input.read_exact(&mut vec![0; pad(size)])
}

/// Reads the header of an entry, which must be as we write it.
fn header(input: &mut impl Read) -> io::Result<(String, u64)> {
    let odd = || io::Error::new(io::ErrorKind::InvalidData, "an entry is not as Warren writes it");
    let mut header = [0_u8; BLOCK];
    input.read_exact(&mut header)?;
    let text = |bytes: &[u8]| {
        let end = bytes.iter().position(|byte| *byte == 0 || *byte == b' ').unwrap_or(bytes.len());
        std::str::from_utf8(&bytes[..end]).map(str::to_owned).map_err(|_| odd())
    };
    let size = u64::from_str_radix(&text(&header[124..136])?, 8).map_err(|_| odd())?;
    let said = u32::from_str_radix(&text(&header[148..156])?, 8).map_err(|_| odd())?;
    let name = text(&header[..100])?;
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    if said != sum || &header[257..262] != b"ustar" || header[156] != b'0' {
        return Err(odd());
    }
    Ok((name, size))
}
