//! The log of an exec, which init writes and the daemon reads.
#![no_main]

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use libfuzzer_sys::fuzz_target;
use warren_init::log::{self, META, Runs, VERDICT};

fn memory() -> File {
    rustix::fs::memfd_create(c"log", rustix::fs::MemfdFlags::CLOEXEC).expect("memory").into()
}

fuzz_target!(|data: &[u8]| {
    // The head, the notes, the index and the bytes are at places of their own; so are the pieces here.
    let file = memory();
    let mut rest = data;
    for place in [0, META, VERDICT, log::INDEX, log::DATA] {
        let Some((length, after)) = rest.split_first() else { break };
        let (piece, after) = after.split_at((usize::from(*length) * 4).min(after.len()));
        let head = (place == 0 && !piece.is_empty()).then(|| log::head_of(piece));
        file.write_all_at(head.as_deref().unwrap_or(piece), place).expect("memory");
        rest = after;
    }
    let _ = log::head(&file);
    for place in [META, VERDICT] {
        if let Ok(Some(note)) = log::read_note(&file, place) {
            assert!(note.len() as u64 <= log::MAX_NOTE);
        }
    }
    let Ok(size) = log::size(&file) else { return };
    let mut runs = Runs::default();
    if runs.extend(&file, size).is_err() {
        return;
    }
    for offset in [0, size / 2, size] {
        let pieces = log::read(&file, &runs, offset, size, 4096).expect("a log in order is read");
        let mut at = offset;
        for piece in &pieces {
            assert_eq!(piece.offset, at, "nothing is left out");
            assert!(!piece.bytes.is_empty());
            at += piece.bytes.len() as u64;
        }
        assert!(at <= size.max(offset));
    }
});
