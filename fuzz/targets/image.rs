//! What an image says of itself: its index, manifest and configuration, and the files of an archive.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| warren::fuzz::image(data));
