//! Frames and messages of E2B's clients, in JSON and in protobuf.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| warren_api::fuzz::connect(data));
