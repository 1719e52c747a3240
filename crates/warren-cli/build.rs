//! Links the program so that it starts quickly: `warren run` is a new process for each command.
//!
//! A program that may be loaded anywhere has 150 kB of addresses to correct before its first line,
//! page by page; one with a fixed place has none. Its heap, stack and libraries stay where nobody
//! can guess them.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    if is("CARGO_CFG_TARGET_OS", "linux") && is("CARGO_CFG_TARGET_ENV", "gnu") {
        println!("cargo::rustc-link-arg-bin=warren=-no-pie");
    }
}
