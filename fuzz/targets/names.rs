//! Questions for names, which commands send and init reads.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| warren_init::names::fuzz(data));
