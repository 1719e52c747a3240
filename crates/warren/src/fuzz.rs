//! Doors for `fuzz/` to what parses what came from elsewhere.

use crate::{egress, image, layers, snapshot};

/// Watches what a client in a sandbox sends to a server outside.
pub fn egress(data: &[u8]) {
    egress::guard::fuzz(data);
}

/// Reads what an image says of itself.
pub fn image(data: &[u8]) {
    image::fuzz(data);
}

/// Reads a snapshot that somebody sent: its manifest, or one of its layers.
pub fn snapshot(data: &[u8]) {
    match data.split_first() {
        Some((0..128, manifest)) => snapshot::fuzz(manifest),
        Some((_, layer)) => layers::stream::fuzz(layer),
        None => {}
    }
}
