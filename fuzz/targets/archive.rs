//! Archives, as they come from clients, images and sandboxes.
#![no_main]

use std::io::Read as _;

use libfuzzer_sys::fuzz_target;
use warren_init::archive::{Reader, clean, halves};

fuzz_target!(|data: &[u8]| {
    let mut reader = Reader::new(data);
    let mut contents = Vec::new();
    while let Ok(Some(header)) = reader.next_entry() {
        for path in [&header.path, &header.link] {
            let Ok(path) = clean(path) else { continue };
            // Whatever it was, it stays below where it is unpacked.
            assert!(!path.starts_with(b"/") && !path.contains(&0));
            assert!(!path.split(|byte| *byte == b'/').any(|part| part == b".."));
            halves(&path);
        }
        contents.clear();
        if (&mut reader).take(1 << 16).read_to_end(&mut contents).is_err() {
            return;
        }
        assert!(contents.len() as u64 <= header.size);
    }
});
