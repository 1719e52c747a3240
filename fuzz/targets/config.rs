//! The settings of the daemon: their file, the file of logins that they name, and the environment.
//!
//! They are read by the program, which is no library: its files that do that are part of this target.
#![no_main]
#![allow(dead_code, reason = "the program uses the rest")]

#[path = "../../crates/warren-cli/src/backends.rs"]
mod backends;
#[path = "../../crates/warren-cli/src/config.rs"]
mod config;
#[path = "../../crates/warren-cli/src/failure.rs"]
mod failure;
#[path = "../../crates/warren-cli/src/output.rs"]
mod output;
#[path = "../../crates/warren-cli/src/units.rs"]
mod units;

/// The flags, of which only the file is given here.
mod args {
    use std::path::PathBuf;

    #[derive(Debug, Default)]
    pub(crate) struct SettingArgs {
        pub(crate) socket: Option<PathBuf>,
        pub(crate) listen: Option<String>,
        pub(crate) config: Option<PathBuf>,
        pub(crate) state_dir: Option<PathBuf>,
        pub(crate) group: Option<String>,
        pub(crate) log_format: Option<String>,
        pub(crate) backends: Option<String>,
    }

    #[derive(Debug)]
    pub(crate) struct ConfigArgs {
        pub(crate) settings: SettingArgs,
        pub(crate) json: bool,
    }
}

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::time::Duration;

use args::SettingArgs;
use config::{Config, Surroundings};
use libfuzzer_sys::fuzz_target;

/// Whose value in the environment wins, so that no path of the file's is opened.
const LOGINS: &str = "WARREN_IMAGES_LOGIN_FILE";

fn file(bytes: &[u8]) -> (File, PathBuf) {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = File::from(rustix::fs::memfd_create(c"file", flags).expect("memory"));
    file.write_all_at(bytes, 0).expect("memory");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
    (file, path)
}

fuzz_target!(|data: &[u8]| {
    // No text of TOML or JSON has a NUL in it, and no variable.
    let mut parts = data.splitn(3, |byte| *byte == 0);
    let mut part = || parts.next().unwrap_or_default();
    let (settings, path) = file(part());
    let (logins, logins_path) = file(part());
    let lines = String::from_utf8_lossy(part()).into_owned();
    let mut variables: BTreeMap<_, _> = lines
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (format!("WARREN_{name}"), value.to_owned()))
        .collect();
    variables.insert(LOGINS.to_owned(), logins_path.display().to_string());
    let args = SettingArgs { config: Some(path.clone()), ..SettingArgs::default() };
    let around = Surroundings { variables, is_root: true };
    match Config::load(&args, &around) {
        Ok(config) => {
            assert!(config.socket.is_absolute() && config.state_dir.is_absolute());
            assert!(config.manager.cleanup_interval >= Duration::from_millis(10));
            for (index, name) in config.backends.iter().enumerate() {
                assert!(backends::NAMES.contains(&name.as_str()));
                assert!(!config.backends[..index].contains(name), "once each");
            }
        }
        // Whoever has to correct it is told which file and line, or which variable.
        Err(failure) => {
            let said = format!("{failure:?}");
            let file = format!("{}:", path.display());
            let broken = std::str::from_utf8(settings_of(data)).is_err();
            assert!(said.contains(&file) || said.contains("$WARREN_") || broken, "{said}");
        }
    }
    drop((settings, logins));
});

fn settings_of(data: &[u8]) -> &[u8] {
    data.split(|byte| *byte == 0).next().unwrap_or_default()
}
