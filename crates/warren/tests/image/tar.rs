//! Archives as anybody might write them, the wrong ones too.

const BLOCK: usize = 512;

/// An archive that is being written.
#[derive(Debug, Default, Clone)]
pub(crate) struct Tar(Vec<u8>);

/// What an entry says of itself beside its name and kind.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) modified: u64,
    pub(crate) pax: Vec<(String, Vec<u8>)>,
}

impl Default for Entry {
    fn default() -> Self {
        Self { mode: 0o644, uid: 0, gid: 0, modified: 1_000_000_000, pax: Vec::new() }
    }
}

impl Tar {
    pub(crate) fn file(self, path: &str, contents: impl AsRef<[u8]>) -> Self {
        self.entry(b'0', path, "", contents.as_ref(), &Entry::default())
    }

    pub(crate) fn dir(self, path: &str) -> Self {
        self.entry(b'5', path, "", b"", &Entry { mode: 0o755, ..Entry::default() })
    }

    pub(crate) fn link(self, path: &str, target: &str) -> Self {
        self.entry(b'2', path, target, b"", &Entry { mode: 0o777, ..Entry::default() })
    }

    pub(crate) fn hard_link(self, path: &str, target: &str) -> Self {
        self.entry(b'1', path, target, b"", &Entry::default())
    }

    pub(crate) fn entry(
        mut self,
        kind: u8,
        path: &str,
        link: &str,
        contents: &[u8],
        entry: &Entry,
    ) -> Self {
        let mut records = Vec::new();
        let long = [("path", path), ("linkpath", link)].into_iter();
        let long = long.filter(|(_, text)| text.len() > 100);
        let long = long.map(|(key, text)| (key.to_owned(), text.as_bytes().to_vec()));
        for (key, value) in long.chain(entry.pax.clone()) {
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while rest + length.to_string().len() != length {
                length = rest + length.to_string().len();
            }
            records.extend_from_slice(format!("{length} {key}=").as_bytes());
            records.extend_from_slice(&value);
            records.push(b'\n');
        }
        if !records.is_empty() {
            self.block(b'x', "pax", "", records.len(), &Entry::default());
            self.data(&records);
        }
        self.block(kind, path, link, contents.len(), entry);
        self.data(contents);
        self
    }

    fn data(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(BLOCK), 0);
    }

    fn block(&mut self, kind: u8, path: &str, link: &str, size: usize, entry: &Entry) {
        let mut block = [0; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &path.as_bytes()[..path.len().min(100)]);
        put(100, format!("{:07o}", entry.mode).as_bytes());
        put(108, format!("{:07o}", entry.uid).as_bytes());
        put(116, format!("{:07o}", entry.gid).as_bytes());
        put(124, format!("{size:011o}").as_bytes());
        put(136, format!("{:011o}", entry.modified).as_bytes());
        put(148, b"        ");
        put(156, &[kind]);
        put(157, &link.as_bytes()[..link.len().min(100)]);
        put(257, b"ustar\x0000");
        let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&block);
    }

    pub(crate) fn bytes(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 2 * BLOCK, 0);
        self.0
    }

    /// The archive without its end.
    pub(crate) fn open_ended(self) -> Vec<u8> {
        self.0
    }
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub(crate) fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}
