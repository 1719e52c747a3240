//! Freeing the memory of a sandbox that stands still: the kernel moves it to the host's swap, and brings back
//! what is needed when the sandbox goes on.
//!
//! Its processes, its walls and what it wrote stay what they are (docs/design/checkpoint.md). A sandbox that
//! runs is never swapped out; what lets the kernel do so is taken back before this is over.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use warren_sys::cgroup;

use crate::{ResourceLimits, Result, SandboxError};

const SWAPS: &str = "/proc/swaps";
/// How often the kernel is asked: what is in use at that moment it leaves where it is.
const ATTEMPTS: u32 = 4;
/// So much may stay in memory: what is locked there, by a process that may lock a little.
const SPARED: u64 = 16 << 20;

/// What became of the memory of a sandbox that was suspended to disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PagedOut {
    /// How much of it was freed.
    pub(crate) bytes: u64,
    /// How much stayed, because it is locked.
    pub(crate) left: u64,
}

/// What keeps the kernel from swapping a group out, and what makes it do so.
struct Knobs {
    /// Has to be set to this meanwhile.
    allow: (&'static str, &'static str),
    /// Asks for it.
    reclaim: &'static str,
    used: &'static str,
    /// The lines of `memory.stat` that say how much there is that only swap can take.
    held: [&'static str; 2],
}

const V1: Knobs = Knobs {
    allow: ("memory.swappiness", "100"),
    reclaim: "memory.force_empty",
    used: "memory.usage_in_bytes",
    held: ["rss", "shmem"],
};
const V2: Knobs = Knobs {
    allow: ("memory.swap.max", "max"),
    reclaim: "memory.reclaim",
    used: "memory.current",
    held: ["anon", "shmem"],
};

impl Knobs {
    fn of(group: &Path) -> &'static Self {
        if group.join(V2.used).exists() { &V2 } else { &V1 }
    }

    /// Returns how many bytes there are that only swap can take.
    fn held(&self, group: &Path) -> io::Result<u64> {
        let stat = cgroup::read(group, "memory.stat")?;
        Ok(self.held.iter().filter_map(|key| cgroup::field(&stat, key)).sum())
    }
}

fn unsupported(hint: &str) -> SandboxError {
    SandboxError::Unsupported {
        feature: "suspending to disk".to_owned(),
        backend: super::NAME.to_owned(),
        hint: hint.to_owned(),
    }
}

/// Finds out whether the memory of a group could be on disk, and returns the group.
pub(super) fn check(group: Option<PathBuf>) -> Result<PathBuf> {
    let Some(group) = group else {
        let hint = "give the sandbox a memory limit that a cgroup holds, or suspend it in memory";
        return Err(unsupported(hint));
    };
    let knobs = Knobs::of(&group);
    for file in [knobs.allow.0, knobs.reclaim] {
        if !group.join(file).exists() {
            let hint = "this needs Linux 5.19 with swap in its cgroups; suspend it in memory";
            return Err(unsupported(hint));
        }
    }
    let swaps = fs::read_to_string(SWAPS).unwrap_or_default();
    let Some(free) = free(&swaps) else {
        return Err(unsupported(
            "this host has no swap: add some (`fallocate -l 8G /swapfile; chmod 600 /swapfile; mkswap /swapfile; \
             swapon /swapfile`), or suspend it in memory",
        ));
    };
    let held = knobs.held(&group).map_err(|error| SandboxError::step("read", &group, error))?;
    if held > free {
        return Err(SandboxError::Conflict {
            action: "suspend the sandbox to disk".to_owned(),
            reason: format!("it holds {held} bytes, and {free} bytes of the host's swap are free"),
        });
    }
    Ok(group)
}

/// Returns how much swap is free; nothing where there is none at all.
fn free(swaps: &str) -> Option<u64> {
    let mut total = None;
    for line in swaps.lines().skip(1) {
        let mut numbers =
            line.split_whitespace().skip(2).map_while(|word| word.parse::<u64>().ok());
        let (Some(size), Some(used)) = (numbers.next(), numbers.next()) else { continue };
        total = Some(total.unwrap_or(0) + size.saturating_sub(used) * 1024);
    }
    total
}

/// Has the kernel move all memory of a group to disk, whose processes stand still.
pub(super) fn page_out(group: &Path) -> Result<PagedOut> {
    let knobs = Knobs::of(group);
    let failed = |step: &str, file: &str, error| SandboxError::step(step, group.join(file), error);
    let read = || knobs.held(group).map_err(|error| failed("read", "memory.stat", error));
    let held = read()?;
    let (file, value) = knobs.allow;
    let before = cgroup::read(group, file).map_err(|error| failed("read", file, error))?;
    cgroup::write(group, file, value).map_err(|error| failed("write", file, error))?;
    let _restore = Restore { group, file, value: before.trim() };
    let mut left = held;
    for _ in 0..ATTEMPTS {
        let used =
            cgroup::read(group, knobs.used).map_err(|error| failed("read", knobs.used, error))?;
        match cgroup::write(group, knobs.reclaim, used.trim()) {
            // It got less than it was asked for: there are things that cannot be moved.
            Err(error) if error.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) => {}
            other => other.map_err(|error| failed("write", knobs.reclaim, error))?,
        }
        left = read()?;
        if left == 0 {
            break;
        }
    }
    if left > SPARED && left > held / 4 {
        return Err(SandboxError::Conflict {
            action: "suspend the sandbox to disk".to_owned(),
            reason: format!("{left} of its {held} bytes would not go"),
        });
    }
    Ok(PagedOut { bytes: held - left.min(held), left })
}

/// Has a group with a limit of its memory not be swapped out, as it was made.
pub(super) fn keep_in_memory(group: Option<&Path>, limits: &ResourceLimits) {
    if let (Some(group), Some(_)) = (group, limits.max_memory_bytes) {
        // Absent where swap is not accounted.
        let _ = cgroup::write(group, Knobs::of(group).allow.0, "0");
    }
}

/// Takes back what let the kernel swap, whatever became of it.
struct Restore<'a> {
    group: &'a Path,
    file: &'static str,
    value: &'a str,
}

impl Drop for Restore<'_> {
    fn drop(&mut self) {
        if let Err(error) = cgroup::write(self.group, self.file, self.value) {
            tracing::warn!(group = %self.group.display(), %error, "a sandbox may still be swapped out");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_swap_is_what_all_areas_have_left() {
        let head = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert_eq!(free(head), None);
        assert_eq!(free(""), None);
        let two = "/swap\\040a  file\t\t2048\t1024\t-2\n/dev/zram0 partition\t1024\t1024\t5\n";
        assert_eq!(free(&format!("{head}{two}")), Some(1 << 20));
    }

    #[test]
    fn without_a_group_nothing_is_promised() {
        assert_eq!(check(None).unwrap_err().code(), "unsupported");
    }
}
