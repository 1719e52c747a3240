//! A snapshot that somebody sends: its manifest, and its layers.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| warren::fuzz::snapshot(data));
