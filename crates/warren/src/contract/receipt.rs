//! What was tried on one sandbox, and what happened.

use std::fmt;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::SandboxId;

/// What was tried on one sandbox, from inside, and what happened.
///
/// Nothing in it is said to hold that was not tried. What its backend does not promise is in it, too, as
/// such.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Receipt {
    /// The form of this receipt: 1.
    pub version: u32,
    /// The sandbox.
    pub sandbox_id: SandboxId,
    /// The backend that made it.
    pub backend: String,
    /// The profile that it was made from.
    pub profile: String,
    /// The version of Warren that tried.
    pub warren: String,
    /// The kernel that was asked.
    pub kernel: String,
    /// How much was tried.
    pub extent: Extent,
    /// When.
    pub tried_at: DateTime<Utc>,
    /// How long that took, in microseconds; `None` if nobody measured it.
    pub took_us: Option<u64>,
    /// What all layers together come to.
    pub verdict: Verdict,
    /// The layers, each with what was tried.
    pub layers: Vec<ReceiptLayer>,
}

impl Receipt {
    /// Returns the layers that were promised and that something got through.
    pub fn open(&self) -> impl Iterator<Item = &ReceiptLayer> {
        self.layers.iter().filter(|layer| layer.verdict == Verdict::Open)
    }

    /// Returns everything that was tried.
    pub fn tries(&self) -> impl Iterator<Item = &ReceiptTry> {
        self.layers.iter().flat_map(|layer| &layer.tries)
    }
}

/// How much is tried of a sandbox, each with all that the one before tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    /// What a backend tries before it calls any sandbox ready.
    Creation,
    /// Every wall, and each limit that can be tried without a command's noticing.
    Walls,
    /// Also limits that are lowered for the moment, in a sandbox where nothing runs yet.
    Pristine,
    /// Also memory: the kernel ends a process for it and writes that to its log.
    Everything,
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Creation => "creation",
            Self::Walls => "walls",
            Self::Pristine => "pristine",
            Self::Everything => "everything",
        })
    }
}

/// What an attempt, or all of a layer's, came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It was tried, and refused.
    Held,
    /// Of a layer: some of it was tried and held, the rest was not tried.
    Partly,
    /// It was tried, and got through.
    Open,
    /// It was read back from the kernel and is as it should be. It was not tried.
    Set,
    /// It is promised, and was not tried.
    NotTried,
    /// It is not promised, whatever happened.
    NotPromised,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Held => "held",
            Self::Partly => "partly",
            Self::Open => "OPEN",
            Self::Set => "set",
            Self::NotTried => "not tried",
            Self::NotPromised => "not promised",
        })
    }
}

/// One layer of a sandbox's walls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReceiptLayer {
    /// Which: "filesystem", "network", "processes", "privileges", "syscalls" or "limits".
    pub layer: String,
    /// What its attempts come to.
    pub verdict: Verdict,
    /// They.
    pub tries: Vec<ReceiptTry>,
}

/// One attempt to get through a wall.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReceiptTry {
    /// What was tried: "connect to 169.254.169.254:80, where clouds have their metadata".
    pub what: String,
    /// What happened: "ENETUNREACH".
    pub said: String,
    /// What that came to.
    pub verdict: Verdict,
    /// What is to hold it: "a network namespace without a route".
    pub by: String,
}

/// A receipt and, where there is a key, what shows that it is the key's owner's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedReceipt {
    /// The receipt, to be read. What is signed is in the envelope, and says the same.
    pub receipt: Receipt,
    /// What is signed, in the form of DSSE 1.0; `None` where there is no key.
    pub envelope: Option<Envelope>,
}

/// Signed bytes, in the form of DSSE 1.0 (github.com/secure-systems-lab/dsse).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    /// What the payload is.
    #[serde(rename = "payloadType")]
    pub payload_type: String,
    /// The receipt as JSON, in base64.
    pub payload: String,
    /// One signature for each key.
    pub signatures: Vec<EnvelopeSignature>,
}

/// One signature of an [`Envelope`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvelopeSignature {
    /// Which key: the first half of the SHA-256 of the public key, in hexadecimal digits.
    pub keyid: String,
    /// The Ed25519 signature, in base64.
    pub sig: String,
}
