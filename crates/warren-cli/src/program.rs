//! Finding the program of a command, also where the sandbox would not see it.
//!
//! A sandbox shows `/usr` and what is bound. A program that the caller has elsewhere, as under a
//! version manager, is shown with the runtime it belongs to, read-only, and the caller is told.
//! What a program does not need stays hidden: never a home, and never a top-level directory.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use warren::{BindMount, Command, ProgramFault, SandboxError, SandboxSpec, profile};

use crate::failure::Failure;

/// Where a sandbox looks for programs.
const SANDBOX_PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin";
/// What is a link into `/usr`, or shown as `/usr` is.
const MERGED: [&str; 6] = ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];
/// What says which version of a version manager to use.
const VERSION_VARIABLES: [&str; 4] =
    ["PYENV_VERSION", "RBENV_VERSION", "NODENV_VERSION", "GOENV_VERSION"];

/// What the caller's surroundings are.
#[derive(Debug, Default)]
pub(crate) struct Caller {
    /// Where it stands, if that still exists.
    pub(crate) directory: Option<PathBuf>,
    /// Where it looks for programs.
    pub(crate) path: OsString,
    /// Its home.
    pub(crate) home: Option<PathBuf>,
    /// Versions that it chose by a variable.
    pub(crate) versions: Vec<String>,
}

impl Caller {
    /// Looks around.
    pub(crate) fn new() -> Self {
        let chosen = VERSION_VARIABLES.iter().filter_map(|name| env::var(name).ok());
        Self {
            directory: env::current_dir().ok(),
            path: env::var_os("PATH").unwrap_or_default(),
            home: env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute()),
            versions: chosen.flat_map(|chosen| split_versions(&chosen)).collect(),
        }
    }
}

/// Makes the program of a command visible in its sandbox, and returns what is to be said about it.
pub(crate) fn provide(
    command: &mut Command,
    spec: &mut SandboxSpec,
    caller: &Caller,
) -> Result<Vec<String>, Failure> {
    let name = command.program.clone();
    if name.contains('/') {
        return refuse_hidden(&name, spec).map(|()| Vec::new());
    }
    let set = spec.environment.iter().rev().find(|(name, _)| name == "PATH");
    let inside = set.map_or(SANDBOX_PATH, |(_, path)| path.as_str()).to_owned();
    if inside.split(':').any(|dir| is_runnable_inside(&Path::new(dir).join(&name), spec)) {
        return Ok(Vec::new());
    }
    // One that is not found anywhere is the sandbox's to refuse.
    let Some(found) = find(&name, caller) else { return Ok(Vec::new()) };
    let Ok(real) = fs::canonicalize(&found) else { return Ok(Vec::new()) };
    let (shown, bin) = match prefix(&real, caller) {
        Some(prefix) => {
            let bin = prefix.join("bin");
            if !bin.join(&name).exists() {
                command.program = text(&real)?;
            }
            spec.allowed_paths_ro.push(prefix.clone());
            (prefix, bin)
        }
        None => {
            let Some(dir) = found.parent().map(Path::to_owned) else { return Ok(Vec::new()) };
            let target = dir.join(&name);
            spec.bind_mounts.push(BindMount { source: real.clone(), target, readonly: true });
            (real, dir)
        }
    };
    let path = format!("{}:{inside}", text(&bin)?);
    spec.environment.push(("PATH".to_owned(), path));
    Ok(vec![format!("{name} comes from {}, shown read-only", shown.display())])
}

/// Says what would help, where the caller's surroundings tell more than the sandbox knows.
pub(crate) fn advise(failure: Failure, command: &Command, caller: &Caller) -> Failure {
    let relative = command.program.contains('/') && !command.program.starts_with('/');
    let here = caller.directory.as_ref().map(|directory| directory.join(&command.program));
    if failure.is_missing_program() && relative && here.is_some_and(|here| is_executable(&here)) {
        return failure.with_hint(
            "the sandbox does not see this directory: --ro \"$PWD\" --workdir \"$PWD\" shows it",
        );
    }
    failure
}

/// Refuses a program that the host has at this place and the sandbox has not.
fn refuse_hidden(program: &str, spec: &SandboxSpec) -> Result<(), Failure> {
    let path = Path::new(program);
    if !path.is_absolute() || is_visible(path, spec) || !is_executable(path) {
        return Ok(());
    }
    let (program, kind) = (program.to_owned(), ProgramFault::NotFound);
    let source = rustix::io::Errno::NOENT.into();
    let hint = format!("the host has it; `--ro {}` shows it to the sandbox", path.display());
    Err(Failure::from(SandboxError::Program { program, kind, source }).with_hint(hint))
}

/// Tells whether a program of the host would run from this place inside.
fn is_runnable_inside(path: &Path, spec: &SandboxSpec) -> bool {
    let Some(host) = on_host(path, spec) else { return false };
    // A link may lead out of what is shown.
    is_executable(&host)
        && fs::canonicalize(&host).is_ok_and(|real| {
            is_visible(&real, spec)
                || spec.bind_mounts.iter().any(|bind| real.starts_with(&bind.source))
        })
}

fn is_visible(path: &Path, spec: &SandboxSpec) -> bool {
    on_host(path, spec).is_some()
}

/// Finds which file of the host is at a place inside, if one can be there.
fn on_host(path: &Path, spec: &SandboxSpec) -> Option<PathBuf> {
    let bound = spec.bind_mounts.iter().find_map(|bind| {
        let rest = path.strip_prefix(&bind.target).ok()?;
        Some(if rest.as_os_str().is_empty() { bind.source.clone() } else { bind.source.join(rest) })
    });
    let shown = profile::profile(&spec.profile).map_or(&[][..], |profile| profile.host);
    let same = shown.iter().map(|shown| Path::new(shown.path)).chain(MERGED.map(Path::new));
    let same = same.chain(spec.allowed_paths_ro.iter().map(PathBuf::as_path));
    let mut same = same.chain(spec.allowed_paths_rw.iter().map(PathBuf::as_path));
    bound.or_else(|| same.any(|shown| path.starts_with(shown)).then(|| path.to_owned()))
}

fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// Finds a program as the caller's shell would, and past the shims of a version manager.
fn find(name: &str, caller: &Caller) -> Option<PathBuf> {
    let dirs = env::split_paths(&caller.path).filter(|dir| dir.is_absolute());
    let mut found = dirs.filter_map(|dir| {
        let path = dir.join(name);
        match is_executable(&path) {
            // A shim asks the manager, which is not inside; what it would choose is.
            true if dir.ends_with("shims") => behind_shim(dir.parent()?, name, caller),
            true => Some(path),
            false => None,
        }
    });
    found.next()
}

/// Finds what the shim of a version manager stands for.
fn behind_shim(root: &Path, name: &str, caller: &Caller) -> Option<PathBuf> {
    let global = fs::read_to_string(root.join("version")).unwrap_or_default();
    let mut wanted = caller.versions.clone();
    wanted.extend(split_versions(&global));
    let mut versions = directories(&root.join("versions"));
    for plugin in directories(&root.join("installs")) {
        versions.extend(directories(&plugin));
    }
    versions.retain(|version| is_executable(&version.join("bin").join(name)));
    let rank = |version: &PathBuf| {
        let version = version.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let place = wanted.iter().position(|wanted| {
            // `3.11` stands for the latest 3.11.x.
            let rest = version.strip_prefix(wanted.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        });
        (std::cmp::Reverse(place.unwrap_or(usize::MAX)), numbers(&version))
    };
    Some(versions.into_iter().max_by_key(rank)?.join("bin").join(name))
}

fn directories(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

fn split_versions(text: &str) -> Vec<String> {
    text.split([':', '\n', ' ']).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}

/// Orders versions: 3.9 before 3.11.
fn numbers(version: &str) -> Vec<u64> {
    version.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

/// Finds the runtime that a program belongs to, if it has a directory of its own.
fn prefix(real: &Path, caller: &Caller) -> Option<PathBuf> {
    let bin = real.parent().filter(|dir| dir.ends_with("bin"))?;
    let prefix = bin.parent()?;
    let is_top = prefix.components().count() <= 2;
    let is_home = |dir: &Path| {
        dir == Path::new("/root")
            || dir.parent() == Some(Path::new("/home"))
            || caller.home.as_deref() == Some(dir)
    };
    let holds_home = caller.home.as_ref().is_some_and(|home| home.starts_with(prefix));
    let is_hidden = prefix.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
    // ~/.local and ~/.cargo keep credentials beside their programs.
    let is_settings = is_hidden && prefix.parent().is_some_and(is_home);
    let is_private = is_top || is_home(prefix) || holds_home || is_settings;
    (!is_private).then(|| prefix.to_owned())
}

fn text(path: &Path) -> Result<String, Failure> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        let message = format!("`{}` is no UTF-8", path.display());
        Failure::usage(message, "bind it to a plain path: --bind SRC:DST:ro")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "#!/bin/sh\n").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn caller(path: &Path) -> Caller {
        Caller { path: path.into(), ..Caller::default() }
    }

    #[test]
    fn the_runtime_behind_a_shim_is_the_chosen_version_or_else_the_latest() {
        let root = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(root.path()).unwrap();
        program(&root.join("shims/tool"));
        for version in ["3.9.1", "3.11.7", "3.10.2", "9.9.9-empty"] {
            fs::create_dir_all(root.join("versions").join(version)).unwrap();
        }
        for version in ["3.9.1", "3.11.7", "3.10.2"] {
            program(&root.join(format!("versions/{version}/bin/tool")));
        }
        let shims = root.join("shims");
        let version = |caller: &Caller| {
            let found = find("tool", caller).unwrap();
            found.strip_prefix(root.join("versions")).unwrap().to_str().unwrap().to_owned()
        };
        assert_eq!(version(&caller(&shims)), "3.11.7/bin/tool");
        fs::write(root.join("version"), "3.10\n").unwrap();
        assert_eq!(version(&caller(&shims)), "3.10.2/bin/tool");
        let chosen = Caller { versions: vec!["3.9.1".into()], ..caller(&shims) };
        assert_eq!(version(&chosen), "3.9.1/bin/tool");
        let missing = Caller { versions: vec!["2.7".into()], ..caller(&shims) };
        assert_eq!(version(&missing), "3.10.2/bin/tool");
    }

    #[test]
    fn a_prefix_is_never_a_home_nor_what_holds_one_nor_a_top_level_directory() {
        let caller = Caller { home: Some("/data/people/ann".into()), ..Caller::default() };
        for (real, expected) in [
            ("/root/.pyenv/versions/3.11.7/bin/python3.11", Some("/root/.pyenv/versions/3.11.7")),
            ("/opt/node/bin/node", Some("/opt/node")),
            ("/home/ann/miniconda3/bin/python", Some("/home/ann/miniconda3")),
            ("/root/bin/x", None),
            ("/root/.local/bin/x", None),
            ("/home/ann/.cargo/bin/rustup", None),
            ("/home/ann/bin/x", None),
            ("/home/bin/x", None),
            ("/opt/bin/x", None),
            ("/etc/bin/x", None),
            ("/bin/x", None),
            ("/data/people/ann/bin/x", None),
            ("/data/people/bin/x", None),
            ("/data/people/ann/.local/bin/x", None),
            ("/srv/tools/x", None),
        ] {
            let found = prefix(Path::new(real), &caller);
            assert_eq!(found.as_deref(), expected.map(Path::new), "{real}");
        }
    }

    #[test]
    fn a_program_that_the_sandbox_has_needs_nothing() {
        let (mut command, mut spec) = (Command::new("sh"), SandboxSpec::default());
        let notes = provide(&mut command, &mut spec, &Caller::default()).unwrap();
        assert!(notes.is_empty());
        assert_eq!((command, spec), (Command::new("sh"), SandboxSpec::default()));
    }

    #[test]
    fn a_program_in_a_private_place_is_shown_alone() {
        let home = tempfile::tempdir().unwrap();
        let home = fs::canonicalize(home.path()).unwrap();
        program(&home.join(".local/bin/real-tool"));
        std::os::unix::fs::symlink("real-tool", home.join(".local/bin/tool")).unwrap();
        let bin = home.join(".local/bin");
        let caller = Caller { home: Some(home.clone()), ..caller(&bin) };
        let (mut command, mut spec) = (Command::new("tool"), SandboxSpec::default());
        let notes = provide(&mut command, &mut spec, &caller).unwrap();
        assert_eq!(notes.len(), 1);
        assert!(spec.allowed_paths_ro.is_empty());
        let bind = &spec.bind_mounts[0];
        assert_eq!((&bind.source, &bind.target), (&bin.join("real-tool"), &bin.join("tool")));
        assert!(bind.readonly);
    }
}
