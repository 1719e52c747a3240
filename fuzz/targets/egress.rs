//! What a client in a sandbox sends to a server outside: the hello of TLS, requests of HTTP, or anything.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| warren::fuzz::egress(data));
