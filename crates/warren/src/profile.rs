//! The built-in profiles: what of the host a sandbox sees and which system calls it may make.
//!
//! They are written in `profiles/` with a reason on each rule; `build.rs` checks them and compiles the filters for
//! the target. `docs/syscalls.md` lists what becomes of every system call. Applying a profile is left to the backends.

#[cfg(test)]
use warren_sys::seccomp::Arch;
use warren_sys::seccomp::Instruction;

include!(concat!(env!("OUT_DIR"), "/profiles.rs"));

/// What a sandbox is given unless its spec says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    /// What it is asked for by.
    pub name: &'static str,
    /// One line for a list.
    pub summary: &'static str,
    /// The name of its system call filter, for [`seccomp`].
    pub seccomp: &'static str,
    /// What of the host is shown, read-only. A link is the caller's to follow, on the host.
    pub host: &'static [HostPath],
    /// Names in `/proc` that are hidden; those that the kernel does not have are skipped.
    pub proc_masked: &'static [&'static str],
    /// Names in `/proc` that cannot be written, nor what is below them.
    pub proc_readonly: &'static [&'static str],
    /// Whether `/proc` shows processes and nothing else (`subset=pid`).
    pub proc_pids_only: bool,
    /// Whether Landlock lets TCP through, to be decided by the network policy.
    pub tcp: bool,
}

/// A file or directory of the host that a sandbox may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPath {
    /// Absolute and normal.
    pub path: &'static str,
    /// Whether a host without it cannot have sandboxes of this profile; else it is left out.
    pub required: bool,
}

/// A system call filter in two parts, of which the kernel takes the stricter answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seccomp {
    /// What a profile names it by.
    pub name: &'static str,
    /// What PID 1 installs once it needs no more rights; every process of the sandbox inherits it.
    pub init: &'static [Instruction],
    /// What each workload installs on top before its exec: takes away what only PID 1 needs.
    pub workload: &'static [Instruction],
    /// The kinds of system call that no workload can make, as the build has proved on the programs.
    pub blocked_categories: &'static [&'static str],
}

/// Returns the profile of this name.
#[must_use]
pub fn profile(name: &str) -> Option<&'static Profile> {
    PROFILES.iter().find(|profile| profile.name == name)
}

/// Returns the names of all profiles, sorted.
#[must_use]
pub fn profile_names() -> Vec<&'static str> {
    PROFILES.iter().map(|profile| profile.name).collect()
}

/// Returns the system call filter of this name.
#[must_use]
pub fn seccomp(name: &str) -> Option<&'static Seccomp> {
    SECCOMP.iter().find(|seccomp| seccomp.name == name)
}
