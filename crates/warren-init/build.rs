//! Builds this crate's own program, so that its library can hold it as bytes.
//!
//! Cargo cannot yet make a program a dependency of a library. So the build script calls cargo again
//! for the program alone, optimised and static whatever the outer profile is, in a target directory
//! of its own. The inner build runs this script too, with `WARREN_INIT_IMAGE` set, and stops here.
//!
//! With musl's target installed (`rustup target add x86_64-unknown-linux-musl`) the program is half as
//! big and starts without asking the processor what it can, which in a virtual machine takes half a
//! millisecond. Without it the C library of the outer build serves as well.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(warren_init_image)");
    println!("cargo::rerun-if-env-changed=WARREN_INIT_IMAGE");
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=../warren-sys/src");
    println!("cargo::rerun-if-changed=Cargo.toml");
    if env::var_os("WARREN_INIT_IMAGE").is_some() {
        println!("cargo::rustc-cfg=warren_init_image");
        return;
    }
    let variable = |name| env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    let out = PathBuf::from(variable("OUT_DIR"));
    // What is fuzzed parses and launches nothing.
    if env::var_os("CARGO_FEATURE_FUZZ").is_some() {
        std::fs::write(out.join("warren-init"), "").expect("cargo makes OUT_DIR");
        return;
    }
    let target = smallest(variable("TARGET"), &variable("RUSTC"));
    let directory = out.join("image");
    let status = Command::new(variable("CARGO"))
        .args(["build", "--release", "--bin", "warren-init", "--manifest-path"])
        .arg(PathBuf::from(variable("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .args(["--target", &target, "--target-dir"])
        .arg(&directory)
        .args(["--config", "profile.release.opt-level='s'"])
        .args(["--config", "profile.release.lto='fat'"])
        .args(["--config", "profile.release.codegen-units=1"])
        .args(["--config", "profile.release.panic='abort'"])
        .args(["--config", "profile.release.strip='symbols'"])
        .env("WARREN_INIT_IMAGE", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static\x1f-Crelocation-model=static")
        // What the outer build was told is not for the inner one: a linter instead of a compiler,
        // coverage, another target directory.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .env_remove("CLIPPY_ARGS")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("CARGO_BUILD_TARGET")
        .status()
        .unwrap_or_else(|error| panic!("cannot run cargo for warren-init: {error}"));
    assert!(status.success(), "cannot build the program warren-init");
    let program = directory.join(&target).join("release/warren-init");
    let image = out.join("warren-init");
    // Not written over: the file may be another build directory's as well, by a link.
    let _ = std::fs::remove_file(&image);
    std::fs::copy(&program, &image)
        .unwrap_or_else(|error| panic!("cannot copy {}: {error}", program.display()));
}

/// Returns the same target with musl as its C library, if that is installed.
fn smallest(target: String, rustc: &str) -> String {
    let musl = target.replace("-gnu", "-musl");
    let asked = Command::new(rustc).args(["--print", "target-libdir", "--target", &musl]).output();
    let directory = asked.map(|answer| String::from_utf8_lossy(&answer.stdout).trim().to_owned());
    match directory {
        Ok(directory) if !directory.is_empty() && Path::new(&directory).is_dir() => musl,
        _ => target,
    }
}
