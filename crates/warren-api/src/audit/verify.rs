//! Whether a log is what was written.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::AuditError;
use super::entry::{Found, Torn};
use super::trail::{Key, Place, Seal, digest, files};
use crate::keys::hex;

/// The longest line that is read. The longest that is written is shorter.
pub(super) const MAX_LINE: usize = 128 << 10;
/// How many breaks are told.
const MAX_BREAKS: usize = 100;
/// How often a log is read anew whose files go away meanwhile: its daemon makes room.
const TRIES: usize = 5;

/// What was found of a log.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Whether every line is what was written, as far as can be told.
    pub intact: bool,
    /// How many files there are.
    pub files: usize,
    /// How many lines.
    pub records: u64,
    /// The first.
    pub first: Option<u64>,
    /// The last.
    pub last: Option<u64>,
    /// The digest of the last: whoever keeps it elsewhere can tell later that nothing before changed.
    pub sha256: Option<String>,
    /// Up to where the key vouches for it; absent if there was no seal to look at.
    pub sealed: Option<u64>,
    /// How often a daemon was cut off while it wrote. That is no break.
    pub torn: u64,
    /// Where it is not what was written.
    pub breaks: Vec<Break>,
}

/// A place where a log is not what was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Break {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1; 0 is the file as a whole.
    pub line: u64,
    /// What is wrong.
    pub what: String,
    /// What there should be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// What there is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
}

/// Checks the log in a directory, its seal included. A daemon may be writing it.
pub fn verify(directory: &Path) -> Result<Report, AuditError> {
    let failed = |source| AuditError::File { action: "read", path: directory.to_owned(), source };
    for attempt in 1.. {
        let key = Key::read(directory).map_err(|source| AuditError::Key {
            path: directory.join(super::trail::KEY),
            source,
        })?;
        // Before the lines: there are never fewer than it says.
        let seal = Seal::read(directory, &key).map_err(failed)?;
        let paths = files(directory).map_err(failed)?.into_iter().map(|(_, path)| path).collect();
        let mut walk = Walk { key: Some(key), ..Walk::default() };
        match seal {
            Some(Ok(seal)) => walk.seal = Some(seal),
            Some(Err(())) => walk
                .complain_of(&directory.join(super::trail::SEAL), "the key did not make this seal"),
            None => walk.complain_of(directory, "there is no seal"),
        }
        match walk.through(paths) {
            Err(AuditError::File { source, .. })
                if source.kind() == io::ErrorKind::NotFound && attempt < TRIES => {}
            other => return other,
        }
    }
    unreachable!("the last attempt returns")
}

/// Checks files of a log, in this order, without its seal.
pub fn verify_files(paths: Vec<PathBuf>) -> Result<Report, AuditError> {
    Walk::default().through(paths)
}

/// Reads the lines of files that are whole, each as it is, until told that it is enough.
pub fn read(
    paths: &[PathBuf],
    mut each: impl FnMut(&str, Value) -> bool,
) -> Result<(), AuditError> {
    for path in paths {
        let failed = |source| AuditError::File { action: "read", path: path.clone(), source };
        let mut file = BufReader::new(File::open(path).map_err(failed)?);
        let mut line = Vec::new();
        while next_line(&mut file, &mut line).map_err(failed)? {
            let Ok(text) = std::str::from_utf8(&line) else { continue };
            let Ok(value) = serde_json::from_str(text) else { continue };
            if !each(text.trim_end_matches('\n'), value) {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Returns the files of the log in a directory, the oldest first.
pub fn list(directory: &Path) -> Result<Vec<PathBuf>, AuditError> {
    let found = files(directory).map_err(|source| AuditError::File {
        action: "list",
        path: directory.to_owned(),
        source,
    })?;
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Reads up to the end of a line, or as much as a line may have.
fn next_line(file: &mut impl io::BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    Ok(file.take(MAX_LINE as u64).read_until(b'\n', line)? > 0)
}

/// What the first line of a daemon says.
#[derive(Debug, Deserialize)]
struct Started {
    chain: String,
    found: Found,
    torn: Option<Torn>,
}

/// A walk along the chain.
#[derive(Default)]
struct Walk {
    key: Option<Key>,
    seal: Option<Seal>,
    report: Report,
    /// The number and the digest of the line before.
    before: Option<(u64, String)>,
    /// What was read since then that is no line, and how much of it.
    rest: Sha256,
    rest_bytes: u64,
    /// The digest of the line that the seal names.
    at_seal: Option<String>,
}

impl Walk {
    fn complain(&mut self, file: &Path, line: u64, what: &str, wanted: Option<(String, String)>) {
        if self.report.breaks.len() < MAX_BREAKS {
            let (expected, found) = wanted.unzip();
            let (file, what) = (file.to_owned(), what.to_owned());
            self.report.breaks.push(Break { file, line, what, expected, found });
        }
    }

    fn complain_of(&mut self, file: &Path, what: &str) {
        self.complain(file, 0, what, None);
    }

    fn through(mut self, paths: Vec<PathBuf>) -> Result<Report, AuditError> {
        self.report.files = paths.len();
        for path in &paths {
            let failed = |source| AuditError::File { action: "read", path: path.clone(), source };
            let mut file = BufReader::new(File::open(path).map_err(failed)?);
            let (mut line, mut number) = (Vec::new(), 0);
            while next_line(&mut file, &mut line).map_err(failed)? {
                number += 1;
                let whole = line.strip_suffix(b"\n");
                match whole.and_then(|whole| Some((whole, serde_json::from_slice(whole).ok()?))) {
                    Some((whole, place)) => self.step(path, number, whole, place),
                    None => {
                        self.rest.update(&line);
                        self.rest_bytes += line.len() as u64;
                    }
                }
            }
        }
        self.end(paths.last().map_or(Path::new(""), |path| path));
        Ok(self.report)
    }

    /// Looks at one line.
    fn step(&mut self, file: &Path, number: u64, line: &[u8], place: Place) {
        let started =
            (place.kind == "start").then(|| serde_json::from_slice::<Started>(line).ok()).flatten();
        let rest = self.take_rest();
        match (rest, started.as_ref().and_then(|start| start.torn.as_ref())) {
            (None, None) => {}
            (Some(rest), Some(torn)) if rest == *torn && number == 1 => self.report.torn += 1,
            (rest, torn) => {
                let shown = |torn: Option<&Torn>| match torn {
                    Some(torn) => format!("{} bytes with the digest {}", torn.bytes, torn.sha256),
                    None => "nothing".to_owned(),
                };
                let wanted = Some((shown(torn), shown(rest.as_ref())));
                self.complain(file, number, "before this is what is no record", wanted);
            }
        }
        let expected = match &self.before {
            Some((seq, sha256)) => Some((seq + 1, sha256.clone())),
            None => self.first(file, number, &place, started.as_ref()),
        };
        if let Some((seq, sha256)) = expected {
            if seq != place.seq {
                let wanted = Some((seq.to_string(), place.seq.to_string()));
                self.complain(file, number, "this is not the next record", wanted);
            }
            if sha256 != place.prev {
                let what = "the record before this is not the one that was written";
                self.complain(file, number, what, Some((place.prev, sha256)));
            }
        }
        match started.map(|start| start.found) {
            Some(found @ (Found::Changed | Found::Unsealed)) => {
                let found = format!("{found:?}").to_lowercase();
                let wanted = Some(("intact".to_owned(), found));
                self.complain(file, number, "a daemon did not find the log as it was left", wanted);
            }
            Some(Found::New | Found::Intact | Found::Torn) | None => {}
        }
        let sha256 = digest(line);
        if self.seal.as_ref().is_some_and(|seal| seal.last == place.seq) {
            self.at_seal = Some(sha256.clone());
        }
        self.report.records += 1;
        self.report.first.get_or_insert(place.seq);
        self.before = Some((place.seq, sha256));
    }

    /// Tells what the first line there is should be.
    fn first(
        &mut self,
        file: &Path,
        number: u64,
        place: &Place,
        start: Option<&Started>,
    ) -> Option<(u64, String)> {
        if place.seq == 1
            && let (Some(key), Some(start)) = (&self.key, start)
        {
            return Some((1, key.genesis(&start.chain)));
        }
        let seal = self.seal.as_ref()?;
        match place.seq.cmp(&seal.first) {
            // Older ones that were to be removed are checked from the first on that is there.
            std::cmp::Ordering::Less => None,
            std::cmp::Ordering::Equal => Some((seal.first, seal.first_prev.clone())),
            std::cmp::Ordering::Greater => {
                let wanted = Some((seal.first.to_string(), place.seq.to_string()));
                self.complain(file, number, "the records before this are missing", wanted);
                None
            }
        }
    }

    fn take_rest(&mut self) -> Option<Torn> {
        let bytes = std::mem::take(&mut self.rest_bytes);
        let sha256 = std::mem::take(&mut self.rest).finalize();
        (bytes > 0).then(|| Torn { bytes, sha256: hex(&sha256) })
    }

    fn end(&mut self, file: &Path) {
        // Whoever wrote it was cut off, or is at it.
        self.report.torn += u64::from(self.take_rest().is_some());
        if let Some(seal) = self.seal.take() {
            let what = "the log does not reach what was sealed";
            match &self.at_seal {
                Some(sha256) if *sha256 == seal.sha256 => {}
                Some(sha256) => {
                    let wanted = Some((seal.sha256.clone(), sha256.clone()));
                    self.complain(
                        file,
                        0,
                        "the last sealed record is not the one that was written",
                        wanted,
                    );
                }
                None if seal.last == 0 => {}
                None => {
                    let last = self.before.as_ref().map_or(0, |(seq, _)| *seq);
                    self.complain(file, 0, what, Some((seal.last.to_string(), last.to_string())));
                }
            }
            self.report.sealed = Some(seal.last);
        }
        let (last, sha256) = self.before.take().unzip();
        (self.report.last, self.report.sha256) = (last, sha256);
        self.report.intact = self.report.breaks.is_empty();
    }
}
