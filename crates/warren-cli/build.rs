//! Links the program so that it starts quickly: `warren run` is a new process for each command.
//!
//! A program that may be loaded anywhere has 150 kB of addresses to correct before its first line,
//! page by page, and one with shared libraries looks for them, maps them and binds their names.
//! This one has a fixed place and brings its libraries along. Its heap and stack stay where nobody
//! can guess them.
//!
//! Cargo's own way to a static program, `-C target-feature=+crt-static`, is for a whole build, and
//! procedural macros cannot be linked so; it would take `--target` on every command line. What it
//! comes to for the linker is little: where rustc asks for a shared library, it is given a script of
//! the same name that says the archive.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// What rustc asks the linker for by itself on this target, and what stands for it.
const LIBRARIES: [(&str, &[&str]); 7] = [
    ("c", &["libc.a"]),
    ("m", &["libm.a"]),
    ("dl", &["libdl.a"]),
    ("rt", &["librt.a"]),
    ("util", &["libutil.a"]),
    ("pthread", &["libpthread.a"]),
    ("gcc_s", &["libgcc_eh.a", "libgcc.a"]),
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    if !is("CARGO_CFG_TARGET_OS", "linux") || !is("CARGO_CFG_TARGET_ENV", "gnu") {
        return;
    }
    println!("cargo::rustc-link-arg-bin=warren=-no-pie");
    let host = env::var("HOST").is_ok_and(|host| is("TARGET", &host));
    let scripts = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("static");
    // Without the archives (a system that has only shared libraries) the program is an ordinary one.
    if host && write_scripts(&scripts).is_some() {
        println!("cargo::rustc-link-arg-bin=warren=-static");
        println!("cargo::rustc-link-arg-bin=warren=-L{}", scripts.display());
    }
}

/// Writes a script for each library, or nothing where an archive is missing.
fn write_scripts(directory: &Path) -> Option<()> {
    let mut scripts = Vec::new();
    for (name, archives) in LIBRARIES {
        let found: Option<Vec<String>> = archives.iter().map(|archive| find(archive)).collect();
        scripts.push((
            directory.join(format!("lib{name}.so")),
            format!("GROUP ( {} )\n", found?.join(" ")),
        ));
    }
    fs::create_dir_all(directory).ok()?;
    for (path, text) in scripts {
        fs::write(path, text).ok()?;
    }
    Some(())
}

/// Where the C compiler has this archive.
fn find(archive: &str) -> Option<String> {
    let output = Command::new("cc").arg(format!("-print-file-name={archive}")).output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    // A file that it does not know it answers as it was asked.
    Path::new(&path).is_absolute().then_some(path)
}
