//! What the root of a sandbox stands on.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Result, SandboxError};

/// How many layers a root may stand on, all kinds together.
pub const MAX_LAYERS: usize = 40;

const PREFIX: &str = "sha256:";
const DIGITS: usize = 64;

/// The name of a layer of files, which is the digest of what is in it: `sha256:` and 64 hexadecimal
/// digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct LayerId(String);

impl LayerId {
    /// Names the layer with this digest.
    pub fn of(digest: [u8; 32]) -> Self {
        let mut name = String::with_capacity(PREFIX.len() + DIGITS);
        name.push_str(PREFIX);
        for byte in digest {
            for digit in [byte >> 4, byte & 15] {
                name.push(char::from_digit(digit.into(), 16).expect("four bits are one digit"));
            }
        }
        Self(name)
    }

    /// Returns it with its prefix.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the digits alone, fit for the name of a file.
    pub fn hex(&self) -> &str {
        &self.0[PREFIX.len()..]
    }
}

impl FromStr for LayerId {
    type Err = SandboxError;

    fn from_str(text: &str) -> Result<Self, SandboxError> {
        let is_digit = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
        match text.strip_prefix(PREFIX) {
            Some(hex) if hex.len() == DIGITS && hex.bytes().all(is_digit) => {
                Ok(Self(text.to_owned()))
            }
            _ => Err(SandboxError::invalid(
                "layer",
                format!("`{}` is not the digest of a layer", text.escape_debug()),
                "a layer is named `sha256:` and 64 hexadecimal digits",
            )),
        }
    }
}

impl TryFrom<String> for LayerId {
    type Error = SandboxError;

    fn try_from(text: String) -> Result<Self, SandboxError> {
        text.parse()
    }
}

impl From<LayerId> for String {
    fn from(id: LayerId) -> Self {
        id.0
    }
}

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a sandbox sees the programs of the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostTools {
    /// `/usr` and what else its profile names, read-only, over whatever layers have there.
    #[default]
    Shown,
    /// Nothing of it: all there is comes from layers.
    Hidden,
}

/// What the root of a sandbox stands on: by default the host's toolchain alone.
///
/// From below: [`layers`](Self::layers), the entries that Warren makes for each sandbox,
/// [`changes`](Self::changes), and on top what the sandbox writes itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Base {
    /// A root of its own, as of an image, the lowest layer first.
    pub layers: Vec<LayerId>,
    /// Whether the host's programs are shown.
    pub host_tools: HostTools,
    /// What was written before, by this sandbox or by those that it comes from, oldest first.
    pub changes: Vec<LayerId>,
}

impl Base {
    /// Tells whether there is nothing but the host's toolchain.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    /// Returns every layer, each once.
    pub fn all(&self) -> BTreeSet<&LayerId> {
        self.layers.iter().chain(&self.changes).collect()
    }

    /// Checks what can be checked without a host.
    pub fn validate(&self) -> Result<(), SandboxError> {
        let count = self.layers.len() + self.changes.len();
        if count > MAX_LAYERS {
            return Err(SandboxError::invalid(
                "base",
                format!("{count} layers are more than {MAX_LAYERS}"),
                "flatten some of them into one",
            ));
        }
        if self.host_tools == HostTools::Hidden && self.layers.is_empty() {
            return Err(SandboxError::invalid(
                "base",
                "there is neither a layer nor the host's toolchain",
                "name a layer, or have the host's tools shown",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_named_by_a_digest_and_nothing_else() {
        let id = LayerId::of([0xa7; 32]);
        assert_eq!(id.as_str().parse::<LayerId>().unwrap(), id);
        assert_eq!(id.hex(), "a7".repeat(32));
        let json = serde_json::to_string(&id).unwrap();
        assert_eq!(serde_json::from_str::<LayerId>(&json).unwrap(), id);
        let upper = id.as_str().to_uppercase();
        for bad in ["", "sha256:", "sha256:../../etc", &id.hex()[1..], id.hex(), &upper] {
            assert!(bad.parse::<LayerId>().is_err(), "{bad}");
            assert!(serde_json::from_str::<LayerId>(&format!("{bad:?}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_root_stands_on_something_and_not_on_too_much() {
        Base::default().validate().unwrap();
        let layers = |count| vec![LayerId::of([1; 32]); count];
        Base { layers: layers(MAX_LAYERS), ..Base::default() }.validate().unwrap();
        let (many, few) = (layers(MAX_LAYERS), layers(1));
        assert!(Base { layers: many, changes: few, ..Base::default() }.validate().is_err());
        let nothing = Base { host_tools: HostTools::Hidden, ..Base::default() };
        assert!(nothing.validate().is_err());
    }
}
