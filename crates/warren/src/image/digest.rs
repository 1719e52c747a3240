//! Digests, and readers that take them of all that passes.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::ImageError;

/// What contents are known by: `sha256:` and 64 hexadecimal digits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    /// Returns the digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self::finish(Sha256::new_with_prefix(bytes))
    }

    fn finish(hasher: Sha256) -> Self {
        use fmt::Write as _;
        let mut text = "sha256:".to_owned();
        for byte in hasher.finalize() {
            let _ = write!(text, "{byte:02x}");
        }
        Self(text)
    }

    /// Returns it as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the hexadecimal digits alone.
    pub fn hex(&self) -> &str {
        &self.0["sha256:".len()..]
    }

    /// Checks that `what` is what this digest names.
    pub fn check(&self, what: &str, found: Self) -> Result<(), ImageError> {
        if *self == found {
            return Ok(());
        }
        Err(ImageError::Digest { what: what.to_owned(), expected: self.clone(), found })
    }
}

impl FromStr for Digest {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        let plain = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        match text.strip_prefix("sha256:") {
            Some(hex) if hex.len() == 64 && hex.bytes().all(plain) => Ok(Self(text.to_owned())),
            _ => {
                let shown: String = text.chars().take(100).collect();
                let what = format!("the digest `{}`", shown.escape_debug());
                Err(ImageError::refused(what, "it is not `sha256:` and 64 hexadecimal digits"))
            }
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = ImageError;

    fn try_from(text: String) -> Result<Self, ImageError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A reader that takes the digest of all that is read through it.
pub struct Hashing<R> {
    input: R,
    hasher: Sha256,
    bytes: u64,
}

impl<R> fmt::Debug for Hashing<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hashing").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl<R: Read> Hashing<R> {
    /// Reads from `input`.
    pub fn new(input: R) -> Self {
        Self { input, hasher: Sha256::new(), bytes: 0 }
    }

    /// Returns how many bytes there were, and their digest.
    pub fn finish(self) -> (u64, Digest) {
        (self.bytes, Digest::finish(self.hasher))
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.input.read(buffer)?;
        self.hasher.update(&buffer[..got]);
        self.bytes += got as u64;
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn only_what_is_a_digest_is_taken_for_one() {
        assert_eq!(Digest::of(b"").as_str(), EMPTY);
        assert_eq!(EMPTY.parse::<Digest>().unwrap(), Digest::of(b""));
        let long = format!("{EMPTY}0");
        for text in ["", "sha256:", &EMPTY[7..], &EMPTY.to_uppercase(), &long, "sha512:00", "../x"]
        {
            text.parse::<Digest>().unwrap_err();
        }
        serde_json::from_str::<Digest>("\"sha256:../../etc\"").unwrap_err();
    }

    #[test]
    fn all_that_is_read_is_in_the_digest() {
        let mut reader = Hashing::new(&b"abc"[..]);
        io::copy(&mut reader, &mut io::sink()).unwrap();
        let (bytes, digest) = reader.finish();
        assert_eq!((bytes, &digest), (3, &Digest::of(b"abc")));
        digest.check("it", Digest::of(b"abc")).unwrap();
        let error = digest.check("the layer", Digest::of(b"abx")).unwrap_err();
        assert!(error.to_string().starts_with("the layer has the digest sha256:"), "{error}");
    }
}
