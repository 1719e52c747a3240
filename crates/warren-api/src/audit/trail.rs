//! The files of the log: lines that each carry the digest of the one before, and a seal.
//!
//! A line that was changed, taken away, added or moved does not fit the next. What the chain cannot
//! tell, that its end is missing, the seal does: how far the log had come when it was last synced,
//! signed by a key. Files follow one another by size; the chain goes on from one to the next.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use super::entry::{Entry, Found, Line, Start, Torn, written};
use super::{AuditError, Limits};
use crate::keys::hex;

pub(super) const KEY: &str = "key";
pub(super) const SEAL: &str = "seal.json";
const EXTENSION: &str = ".jsonl";
/// What the first line of a log says of the line before it is this, signed, with the log's name.
const GENESIS: &str = "warren audit log ";

/// The key of a log.
#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl Key {
    /// Reads the key that is there.
    pub(super) fn read(directory: &Path) -> io::Result<Self> {
        let mut bytes = Vec::new();
        File::open(directory.join(KEY))?.take(64).read_to_end(&mut bytes)?;
        let key = bytes.try_into().map_err(|_| io::Error::other("it has not 32 bytes"))?;
        Ok(Self(key))
    }

    fn create(directory: &Path) -> io::Result<Self> {
        let mut key = [0; 32];
        rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
        replace(directory, KEY, &key)?;
        Ok(Self(key))
    }

    /// Signs as RFC 2104 does.
    pub(super) fn sign(&self, text: &[u8]) -> String {
        let mut block = [0; 64];
        block[..32].copy_from_slice(&self.0);
        let pass = |pad: u8, text: &[u8]| {
            let padded = block.map(|byte| byte ^ pad);
            Sha256::new().chain_update(padded).chain_update(text).finalize()
        };
        hex(&pass(0x5c, &pass(0x36, text)))
    }

    pub(super) fn has_signed(&self, text: &[u8], signature: &str) -> bool {
        self.sign(text).as_bytes().ct_eq(signature.as_bytes()).into()
    }

    /// Returns what the first line of a log says of the line before it.
    pub(super) fn genesis(&self, chain: &str) -> String {
        self.sign(format!("{GENESIS}{chain}").as_bytes())
    }
}

/// How far a log had come when it was last synced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Seal {
    pub(super) chain: String,
    /// The first line that is kept, and what it says of the one before.
    pub(super) first: u64,
    pub(super) first_prev: String,
    /// The last line, and its digest.
    pub(super) last: u64,
    pub(super) sha256: String,
    pub(super) signature: String,
}

impl Seal {
    fn signed(&self) -> Vec<u8> {
        let Self { chain, first, first_prev, last, sha256, signature: _ } = self;
        format!("seal {chain} {first} {first_prev} {last} {sha256}").into_bytes()
    }

    /// Reads the seal of a log: none, one that the key made, or neither.
    pub(super) fn read(directory: &Path, key: &Key) -> io::Result<Option<Result<Self, ()>>> {
        let file = match File::open(directory.join(SEAL)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut text = Vec::new();
        file.take(4 << 10).read_to_end(&mut text)?;
        let seal = serde_json::from_slice::<Self>(&text).ok();
        Ok(Some(seal.filter(|seal| key.has_signed(&seal.signed(), &seal.signature)).ok_or(())))
    }
}

/// Puts a file in the place of another, whole.
fn replace(directory: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let new = directory.join(format!("{name}.new"));
    let mut file = private().create(true).truncate(true).open(&new)?;
    file.write_all(bytes)?;
    file.sync_data()?;
    fs::rename(&new, directory.join(name))?;
    File::open(directory)?.sync_all()
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    let follow = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
    options.write(true).mode(0o600).custom_flags(follow);
    options
}

/// Which file of a log: the number of its first line, and how many of that number there were before,
/// which have no whole line.
pub(super) type Name = (u64, u32);

/// Returns the files of a log, the oldest first.
pub(super) fn files(directory: &Path) -> io::Result<Vec<(Name, PathBuf)>> {
    let mut found = Vec::new();
    for file in fs::read_dir(directory)? {
        let path = file?.path();
        let name = path.file_name().and_then(|name| {
            let stem = name.to_str()?.strip_suffix(EXTENSION)?;
            let (first, again) = stem.split_once('-')?;
            Some((first.parse().ok()?, again.parse().ok()?))
        });
        found.extend(name.map(|name| (name, path)));
    }
    found.sort();
    Ok(found)
}

/// The log, open to be written at its end.
#[derive(Debug)]
pub(super) struct Trail {
    directory: PathBuf,
    limits: Limits,
    key: Key,
    chain: String,
    file: File,
    /// The files there are, each with its first line, what that says of the one before, and its length.
    kept: Vec<Kept>,
    /// The last line that was made, and its digest.
    last: u64,
    prev: String,
    /// Lines that were made and are not in the file yet.
    pending: Vec<u8>,
    /// The last line that was sealed.
    sealed: u64,
    /// How many lines this daemon made.
    pub(super) noted: u64,
}

#[derive(Debug)]
struct Kept {
    first: u64,
    first_prev: String,
    path: PathBuf,
    bytes: u64,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

/// What is read of any line.
#[derive(Debug, Deserialize)]
pub(super) struct Place {
    pub(super) seq: u64,
    pub(super) prev: String,
    pub(super) kind: String,
}

/// The number and the digest of a line.
type Last = (u64, String);

/// Finds the last whole line of the files, its number and digest, and what follows it. A line that is
/// none, which a power cut may leave, is not whole.
fn last_line(kept: &[Kept]) -> io::Result<(Option<Last>, Option<Torn>)> {
    let mut torn_off = Vec::new();
    for file in kept.iter().rev() {
        let bytes = fs::read(&file.path)?;
        let mut rest = &bytes[..];
        while let Some(newline) = rest.iter().rposition(|byte| *byte == b'\n') {
            let before = &rest[..newline];
            let begin = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            let line = &before[begin..];
            if let Ok(place) = serde_json::from_slice::<Place>(line) {
                torn_off.splice(..0, bytes[newline + 1..].iter().copied());
                return Ok((Some((place.seq, digest(line))), torn(&torn_off)));
            }
            rest = before;
        }
        torn_off.splice(..0, bytes);
    }
    Ok((None, torn(&torn_off)))
}

fn torn(bytes: &[u8]) -> Option<Torn> {
    (!bytes.is_empty()).then(|| Torn { bytes: bytes.len() as u64, sha256: digest(bytes) })
}

pub(super) fn digest(line: &[u8]) -> String {
    hex(&Sha256::digest(line))
}

/// Returns the oldest file that has a whole line, or will have. One that has none says nothing.
fn whole(kept: &[Kept]) -> Option<&Kept> {
    kept.iter().find(|file| !file.first_prev.is_empty())
}

/// Returns what the first line of a file says of the one before.
fn first_prev(path: &Path) -> io::Result<String> {
    let mut head = Vec::new();
    File::open(path)?.take(super::verify::MAX_LINE as u64).read_to_end(&mut head)?;
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let place: Option<Place> = serde_json::from_slice(line).ok();
    Ok(place.map(|place| place.prev).unwrap_or_default())
}

impl Trail {
    /// Opens the log in a directory, or begins one, and notes that it did.
    pub(super) fn open(directory: &Path, limits: Limits) -> Result<Self, AuditError> {
        let failed = |action: &'static str| {
            let path = directory.to_owned();
            move |source| AuditError::File { action, path, source }
        };
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed("make"))?;
        let files = files(directory).map_err(failed("list"))?;
        let key = match Key::read(directory) {
            Ok(key) => key,
            Err(error) if error.kind() == io::ErrorKind::NotFound && files.is_empty() => {
                Key::create(directory).map_err(failed("make a key in"))?
            }
            // Another key would make a liar of the log that is there.
            Err(source) => return Err(AuditError::Key { path: directory.join(KEY), source }),
        };
        let seal = Seal::read(directory, &key).map_err(failed("read the seal in"))?;
        let mut kept = Vec::new();
        for ((first, _), path) in files {
            let bytes = fs::metadata(&path).map_err(failed("look at"))?.len();
            if bytes == 0 {
                // Its daemon was ended before the first line.
                fs::remove_file(&path).map_err(failed("tidy"))?;
                continue;
            }
            let first_prev = first_prev(&path).map_err(failed("read"))?;
            kept.push(Kept { first, first_prev, path, bytes });
        }
        let (ended, cut_off) = last_line(&kept).map_err(failed("read"))?;
        let good = seal.as_ref().and_then(|seal| seal.as_ref().ok());
        let chain =
            good.map_or_else(|| uuid::Uuid::new_v4().to_string(), |seal| seal.chain.clone());
        let (found, last, prev) = match (ended, &seal) {
            (None, None) => (Found::New, 0, key.genesis(&chain)),
            // The first daemon was ended before its first line.
            (None, Some(Ok(seal))) if seal.last == 0 => (Found::New, 0, key.genesis(&chain)),
            (Some((seq, sha256)), Some(Ok(seal)))
                if seq > seal.last || (seq == seal.last && sha256 == seal.sha256) =>
            {
                (if cut_off.is_some() { Found::Torn } else { Found::Intact }, seq, sha256)
            }
            // What is missing stays missing: the next line follows what was sealed.
            (_, Some(Ok(seal))) => (Found::Changed, seal.last, seal.sha256.clone()),
            (Some((seq, sha256)), Some(Err(())) | None) => (Found::Unsealed, seq, sha256),
            (None, Some(Err(()))) => (Found::Unsealed, 0, key.genesis(&chain)),
        };
        // The next seal would vouch for a log whose oldest files are missing.
        let beheaded = match (whole(&kept), good) {
            (Some(oldest), Some(seal)) => {
                oldest.first > seal.first
                    || (oldest.first == seal.first && oldest.first_prev != seal.first_prev)
            }
            (None, _) | (_, None) => false,
        };
        let found = match found {
            Found::Intact | Found::Torn if beheaded => Found::Changed,
            other => other,
        };
        // Nothing is written after a line that is not whole.
        let open = match kept.last().filter(|_| found == Found::Intact) {
            Some(file) => private().append(true).open(&file.path).map(|open| (open, None)),
            None => create(directory, last + 1).map(|(open, path)| (open, Some(path))),
        };
        let (file, new) = open.map_err(failed("open a file in"))?;
        if let Some(path) = new {
            kept.push(Kept { first: last + 1, first_prev: prev.clone(), path, bytes: 0 });
        }
        let (directory, pending) = (directory.to_owned(), Vec::new());
        let mut this = Self {
            directory,
            limits,
            key,
            chain: chain.clone(),
            file,
            kept,
            last,
            prev,
            pending,
            sealed: 0,
            noted: 0,
        };
        let version = env!("CARGO_PKG_VERSION").to_owned();
        this.push(&Entry::Start(Start { chain, version, found, torn: cut_off }), Utc::now());
        // A new log is sealed before it has a line, so that there is never one without a seal.
        let begun = match found {
            Found::New => this.seal_empty(),
            Found::Intact | Found::Torn | Found::Changed | Found::Unsealed => Ok(()),
        };
        let begun = begun.and_then(|()| this.write()).and_then(|()| this.seal());
        begun.map_err(|source| AuditError::File {
            action: "write to",
            path: this.directory.clone(),
            source,
        })?;
        match found {
            Found::New | Found::Intact => {}
            Found::Torn => {
                tracing::info!("the audit log ends in the middle of a line, which is marked")
            }
            Found::Changed | Found::Unsealed => {
                tracing::error!(?found, "the audit log is not as it was left: warren audit verify");
            }
        }
        Ok(this)
    }

    /// Makes a line of an entry.
    pub(super) fn push(&mut self, entry: &Entry, time: DateTime<Utc>) {
        let line = Line { seq: self.last + 1, prev: &self.prev, time: written(time), entry };
        // It is text and numbers alone, which are always JSON.
        let line = serde_json::to_vec(&line).expect("an entry can be written");
        self.prev = digest(&line);
        self.last += 1;
        self.noted += 1;
        self.pending.extend_from_slice(&line);
        self.pending.push(b'\n');
    }

    /// Writes the lines that are not in the file yet. What was written when it fails is not written
    /// again.
    pub(super) fn write(&mut self) -> io::Result<()> {
        while !self.pending.is_empty() {
            let written = match self.file.write(&self.pending) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => written,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.pending.drain(..written);
            if let Some(file) = self.kept.last_mut() {
                file.bytes += written as u64;
            }
        }
        if self.kept.last().is_some_and(|file| file.bytes >= self.limits.file_bytes) {
            self.rotate()?;
        }
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        self.seal()?;
        let (file, path) = create(&self.directory, self.last + 1)?;
        self.file = file;
        let first_prev = self.prev.clone();
        self.kept.push(Kept { first: self.last + 1, first_prev, path, bytes: 0 });
        let mut total: u64 = self.kept.iter().map(|file| file.bytes).sum();
        let mut leave = 0;
        while total > self.limits.total_bytes && leave + 2 < self.kept.len() {
            total -= self.kept[leave].bytes;
            leave += 1;
        }
        if leave > 0 {
            let left: Vec<Kept> = self.kept.drain(..leave).collect();
            // First the seal says that they may be missing, and then they are.
            self.seal_now()?;
            for file in left {
                match fs::remove_file(&file.path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    Ok(()) | Err(_) => {}
                }
            }
        }
        Ok(())
    }

    /// Tells whether there are lines that the seal does not cover.
    pub(super) fn is_unsealed(&self) -> bool {
        self.sealed < self.last
    }

    /// Has the disk keep what was written, and says how much that is.
    pub(super) fn seal(&mut self) -> io::Result<()> {
        self.file.sync_data()?;
        self.seal_now()
    }

    fn seal_now(&mut self) -> io::Result<()> {
        self.seal_at(self.last, self.prev.clone())?;
        self.sealed = self.last;
        Ok(())
    }

    fn seal_empty(&mut self) -> io::Result<()> {
        let genesis = self.key.genesis(&self.chain);
        self.seal_at(0, genesis)
    }

    fn seal_at(&self, last: u64, sha256: String) -> io::Result<()> {
        let Some(oldest) = whole(&self.kept) else { return Ok(()) };
        let mut seal = Seal {
            chain: self.chain.clone(),
            first: oldest.first,
            first_prev: oldest.first_prev.clone(),
            last,
            sha256,
            signature: String::new(),
        };
        seal.signature = self.key.sign(&seal.signed());
        replace(&self.directory, SEAL, &serde_json::to_vec(&seal)?)
    }
}

/// Makes a file whose first line has this number.
fn create(directory: &Path, first: u64) -> io::Result<(File, PathBuf)> {
    let mut again = 0_u32;
    loop {
        let path = directory.join(format!("{first:020}-{again}{EXTENSION}"));
        match private().append(true).create_new(true).open(&path) {
            Ok(file) => {
                File::open(directory)?.sync_all()?;
                return Ok((file, path));
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && again < 1_000 => {
                again += 1;
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_that_of_the_rfc() {
        // RFC 4231, test case 2, whose key is shorter and so filled up with zeros.
        let mut key = [0; 32];
        key[..4].copy_from_slice(b"Jefe");
        assert_eq!(
            Key(key).sign(b"what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
    }
}
