//! What the API is asked: bodies, ids, paths, hosts, queries; and the file of its keys.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| warren_api::fuzz::requests(data));
