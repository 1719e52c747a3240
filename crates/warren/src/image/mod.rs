//! Where base roots come from: a directory, an archive, an OCI image in a file or in a registry.
//!
//! | file | its job |
//! | --- | --- |
//! | `source.rs` | what a base root is named by |
//! | `layout.rs` | images in files: an OCI layout, as directory or archive, and what `docker save` writes |
//! | `registry.rs` | images in a registry, over HTTP(S) |
//! | `manifest.rs` | what an image says of itself, and which one of several fits this host |
//! | `pull.rs` | from any of them to layers in the store |
//! | `digest.rs` | checks of what is read, while it is read |
//! | `unpack.rs` | a layer of an image as a directory that overlay can stand on |
//!
//! Nothing that comes from outside is believed: every name is resolved beneath the layer and through
//! no link, every size is bounded, and a layer counts only once its digest is the one that was named.

mod digest;
mod layout;
mod manifest;
mod pull;
mod registry;
mod source;
mod unpack;

pub use digest::{Digest, Hashing};
pub use manifest::ImageConfig;
pub use pull::{Image, Progress, pull};
pub use registry::{KnownRegistry, Login, Registries};
pub use source::{Reference, Source};
pub(crate) use unpack::decompressed;
pub use unpack::{Bounds, Onto, Owners, Unpacked, unpack};

use std::io;

use warren_init::archive::Trouble;

use crate::SandboxError;

/// Why an image could not be had. Nothing of it counts as there.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It makes no sense, or wants what it may not have.
    #[error("{what} is refused: {why}")]
    Refused {
        /// Which part of it.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// It holds more than is taken.
    #[error("{what} holds more than {limit} {unit}")]
    TooLarge {
        /// Which part of it.
        what: String,
        /// How much may be.
        limit: u64,
        /// Of what: "bytes".
        unit: &'static str,
    },
    /// It is not what its digest says.
    #[error("{what} has the digest {found} and not {expected}")]
    Digest {
        /// Which part of it.
        what: String,
        /// The digest it is known by.
        expected: Digest,
        /// The digest of what came.
        found: Digest,
    },
    /// There is none.
    #[error("no image `{name}`: {why}")]
    NotFound {
        /// What was asked for.
        name: String,
        /// Who says so.
        why: String,
    },
    /// A registry wants another name or password.
    #[error("`{registry}` does not let us have `{name}`")]
    Denied {
        /// The registry.
        registry: String,
        /// What was asked for.
        name: String,
    },
    /// A call failed, or a connection broke.
    #[error("cannot {action}")]
    Call {
        /// What was tried: "read index.json".
        action: String,
        /// What the host said.
        source: io::Error,
    },
}

impl ImageError {
    pub(crate) fn refused(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Refused { what: what.into(), why: why.into() }
    }

    pub(crate) fn call(action: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Call { action: action.into(), source: source.into() }
    }
}

/// Says that whoever asked wants no more.
fn stopped() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "nobody waits for it any more")
}

impl From<Trouble> for ImageError {
    fn from(trouble: Trouble) -> Self {
        let name = |path: &[u8]| match path {
            b"" => "the layer".to_owned(),
            path => format!("`{}`", String::from_utf8_lossy(path).escape_debug()),
        };
        match trouble {
            Trouble::Refused { path, why } => Self::refused(name(&path), why),
            Trouble::Call { path, source } => Self::call(format!("unpack {}", name(&path)), source),
            Trouble::TooDeep { path } => Self::refused(name(&path), "it is too deep a tree"),
        }
    }
}

impl From<ImageError> for SandboxError {
    fn from(error: ImageError) -> Self {
        let reason = error.to_string();
        let invalid = |hint: &str| Self::invalid("image", reason.clone(), hint);
        match error {
            ImageError::Refused { .. } => invalid("make the image anew with a tool that you trust"),
            ImageError::TooLarge { .. } => invalid("take a smaller image, or raise the bound"),
            ImageError::Digest { .. } => {
                invalid("it is damaged or not what was named: get it again")
            }
            ImageError::NotFound { name, .. } => Self::NotFound { what: "image", id: name },
            ImageError::Denied { .. } => invalid("give a user and a password, or check the name"),
            ImageError::Call { action, source } => Self::Step { step: action, path: None, source },
        }
    }
}

/// Reads an index, a manifest, a configuration or an archive of an image.
#[cfg(feature = "fuzz")]
pub(crate) fn fuzz(data: &[u8]) {
    use std::io::Write as _;
    let Some((kind, bytes)) = data.split_first() else { return };
    match kind % 4 {
        0 => drop(manifest::read(bytes, None)),
        1 => drop(manifest::read(bytes, Some("latest"))),
        2 => {
            if let Ok(config) = manifest::Config::read(bytes, usize::from(*kind / 4)) {
                config.runtime();
            }
        }
        _ => {
            let memory = rustix::fs::memfd_create(c"image", rustix::fs::MemfdFlags::CLOEXEC);
            let mut file = std::fs::File::from(memory.expect("memory"));
            file.write_all(bytes).expect("memory");
            let files = layout::Files::archive(file);
            let _ = files.and_then(|files| files.contents(None));
        }
    }
}
