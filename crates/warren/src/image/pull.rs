//! From a source to layers in the store.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::layout::{Contents, Files};
use super::manifest::{Descriptor, ImageConfig};
use super::registry::{Pull, Registries};
use super::unpack::{self, Bounds, Owners, Unpacked};
use super::{Digest, ImageError, Reference, Source};
use crate::layers::{Below, Held, Layers};
use crate::{LayerId, SandboxError};

/// How many layers an image may have here; the kernel stacks a few more.
const MOST: usize = 24;
/// The directory of the store that says which layer came from which part of an image.
const KNOWN: &str = "images";

/// An image whose layers are in the store.
#[derive(Debug)]
pub struct Image {
    /// Its layers, the lowest first.
    pub layers: Vec<LayerId>,
    /// How it is to be run.
    pub config: ImageConfig,
    /// Keeps the layers until somebody has written down that they are needed.
    pub held: Held,
}

/// How far a pull has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A layer is about to be read.
    Layer {
        /// Which, from 1.
        number: usize,
        /// Of how many.
        count: usize,
        /// How large it is as it comes, if that is known.
        bytes: Option<u64>,
    },
    /// A layer is there, from before or just now.
    Have {
        /// Which, from 1.
        number: usize,
        /// Of how many.
        count: usize,
        /// What it is called here.
        layer: LayerId,
    },
}

/// Brings a root into the store, unless it is there already. Blocks, until `stop` is cancelled at most.
pub fn pull(
    source: &Source,
    layers: &Layers,
    registries: &Registries,
    bounds: Bounds,
    stop: &CancellationToken,
    progress: &mut dyn FnMut(Progress),
) -> Result<Image, SandboxError> {
    let (image, held) = (Vec::new(), Held::default());
    let mut puller = Puller { layers, bounds, stop, progress, image, held };
    let config = match source {
        Source::Registry(reference) => puller.registry(reference, registries)?,
        Source::Files { path, reference } => {
            let found = std::fs::metadata(path)
                .map_err(|error| ImageError::call(format!("open {}", path.display()), error))?;
            let files = if found.is_dir() {
                Files::directory(path)?
            } else {
                let file = File::open(path)
                    .map_err(|error| ImageError::call(format!("open {}", path.display()), error))?;
                Files::archive(super::layout::plain(file, layers.root(), bounds.bytes)?)?
            };
            puller.files(&files, reference.as_deref())?
        }
    };
    puller.squeeze()?;
    Ok(Image { layers: puller.image, config, held: puller.held })
}

struct Puller<'a> {
    layers: &'a Layers,
    bounds: Bounds,
    stop: &'a CancellationToken,
    progress: &'a mut dyn FnMut(Progress),
    image: Vec<LayerId>,
    held: Held,
}

/// A reader that fails once it is told to stop.
struct Stoppable<'a, R>(R, &'a CancellationToken);

impl<R: Read> Read for Stoppable<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.1.is_cancelled() {
            return Err(super::stopped());
        }
        self.0.read(buffer)
    }
}

/// What is remembered of a part of an image.
#[derive(Serialize, Deserialize)]
struct Known {
    layer: LayerId,
    hides_all: bool,
}

impl Puller<'_> {
    fn registry(
        &mut self,
        reference: &Reference,
        registries: &Registries,
    ) -> Result<ImageConfig, SandboxError> {
        let mut pull = Pull::new(reference, registries, self.stop)?;
        let (manifest, config) = pull.manifest()?;
        let count = manifest.layers.len();
        let mut chain = None;
        for (index, (layer, diff_id)) in manifest.layers.iter().zip(config.diff_ids()).enumerate() {
            chain = Some(link(chain.as_ref(), diff_id));
            let place = (index + 1, count);
            if self.recall(diff_id, chain.as_ref(), place)? {
                continue;
            }
            self.announce(place, Some(layer.size));
            let input = pull.layer(layer)?;
            self.layer(input, Some(layer), Some(diff_id), chain.as_ref(), place)?;
        }
        Ok(config.runtime())
    }

    fn files(&mut self, files: &Files, name: Option<&str>) -> Result<ImageConfig, SandboxError> {
        let parts = match files.contents(name)? {
            Contents::Image(parts) => parts,
            Contents::Root => {
                self.announce((1, 1), None);
                match files {
                    Files::Directory(dir) => self.directory(dir.as_fd())?,
                    Files::Archive(file, _) => {
                        let mut file = file
                            .try_clone()
                            .map_err(|error| ImageError::call("read the archive", error))?;
                        io::Seek::rewind(&mut file)
                            .map_err(|error| ImageError::call("read the archive", error))?;
                        self.layer(file, None, None, None, (1, 1))?;
                    }
                }
                return Ok(ImageConfig::default());
            }
        };
        let count = parts.layers.len();
        let mut chain = None;
        for (index, diff_id) in parts.config.diff_ids().iter().enumerate() {
            chain = Some(link(chain.as_ref(), diff_id));
            let place = (index + 1, count);
            if self.recall(diff_id, chain.as_ref(), place)? {
                continue;
            }
            let part = files.layer(&parts, index)?;
            self.announce(place, part.descriptor.as_ref().map(|layer| layer.size));
            let (descriptor, diff_id) = (part.descriptor.as_ref(), part.diff_id.as_ref());
            self.layer(part.input, descriptor, diff_id, chain.as_ref(), place)?;
        }
        Ok(parts.config.runtime())
    }

    fn announce(&mut self, (number, count): (usize, usize), bytes: Option<u64>) {
        (self.progress)(Progress::Layer { number, count, bytes });
    }

    /// Unpacks a layer, and takes it only if it is what was named.
    fn layer(
        &mut self,
        input: impl Read,
        descriptor: Option<&Descriptor>,
        diff_id: Option<&Digest>,
        chain: Option<&Digest>,
        place: (usize, usize),
    ) -> Result<(), SandboxError> {
        let staging = self.layers.begin()?;
        // One byte more than there should be shows that there is more.
        let most = descriptor.map_or(u64::MAX, |layer| layer.size.saturating_add(1));
        let below = self.image.iter().rev().map(|layer| self.layers.path(layer));
        let onto = unpack::Onto {
            target: staging.tree(),
            below: below.collect(),
            owners: Owners::of_layers(),
            bounds: self.bounds,
        };
        let unpacked = unpack::unpack(Stoppable(input.take(most), self.stop), &onto)?;
        if let Some(layer) = descriptor {
            if unpacked.size != layer.size {
                let why = format!("it has not the {} bytes that the manifest says", layer.size);
                return Err(ImageError::refused(format!("the layer {}", layer.digest), why).into());
            }
            layer.digest.check("a layer", unpacked.digest.clone())?;
        }
        if let Some(diff_id) = diff_id {
            diff_id.check("the archive in a layer", unpacked.diff_id.clone())?;
        }
        let (layer, held) = staging.commit()?;
        if let Some(key) = if unpacked.from_below { chain } else { diff_id } {
            self.remember(key, &layer, &unpacked)?;
        }
        self.take(layer, unpacked.hides_all, held, place);
        Ok(())
    }

    /// Copies a directory of the host.
    fn directory(&mut self, dir: std::os::fd::BorrowedFd<'_>) -> Result<(), SandboxError> {
        let staging = self.layers.begin()?;
        crate::layers::copy(dir, &staging)?;
        let (layer, held) = staging.commit()?;
        self.take(layer, false, held, (1, 1));
        Ok(())
    }

    fn take(&mut self, layer: LayerId, hides_all: bool, held: Held, place: (usize, usize)) {
        if hides_all {
            self.image.clear();
        }
        self.image.push(layer.clone());
        self.held.join(held);
        (self.progress)(Progress::Have { number: place.0, count: place.1, layer });
    }

    /// Makes one layer of the lowest, so that there is room on top of an image that has very many.
    fn squeeze(&mut self) -> Result<(), SandboxError> {
        if self.image.len() > MOST {
            let lowest = ..=self.image.len() - MOST;
            let (merged, held) = self.layers.merge(&self.image[lowest], Below::Nothing)?;
            drop(self.image.splice(lowest, merged));
            self.held.join(held);
        }
        Ok(())
    }

    /// Takes a layer that is in the store already.
    fn recall(
        &mut self,
        diff_id: &Digest,
        chain: Option<&Digest>,
        place: (usize, usize),
    ) -> Result<bool, SandboxError> {
        for key in [Some(diff_id), chain].into_iter().flatten() {
            let path = self.layers.root().join(KNOWN).join(key.hex());
            let Ok(text) = std::fs::read(path) else { continue };
            let Ok(known) = serde_json::from_slice::<Known>(&text) else { continue };
            match self.layers.hold([&known.layer]) {
                Ok(held) => {
                    self.take(known.layer, known.hides_all, held, place);
                    return Ok(true);
                }
                // Removed since; it is brought again.
                Err(SandboxError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    fn remember(
        &self,
        key: &Digest,
        layer: &LayerId,
        unpacked: &Unpacked,
    ) -> Result<(), SandboxError> {
        let directory = self.layers.root().join(KNOWN);
        let known = Known { layer: layer.clone(), hides_all: unpacked.hides_all };
        let write = || {
            std::fs::create_dir_all(&directory)?;
            let text = serde_json::to_vec(&known).map_err(io::Error::other)?;
            let draft = directory.join(format!("{}.{}", key.hex(), uuid::Uuid::new_v4()));
            std::fs::write(&draft, text)?;
            std::fs::rename(&draft, directory.join(key.hex()))
        };
        write().map_err(|error| SandboxError::keeping("write to", Some(directory.clone()), error))
    }
}

/// Names a layer on top of others, as images do: the digest of both names.
fn link(below: Option<&Digest>, diff_id: &Digest) -> Digest {
    match below {
        None => diff_id.clone(),
        Some(below) => Digest::of(format!("{below} {diff_id}").as_bytes()),
    }
}
