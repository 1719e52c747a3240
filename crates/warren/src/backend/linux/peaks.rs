//! The most memory that a sandbox held at once, in windows of time that may overlap.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use warren_sys::cgroup;

use crate::ExecId;

/// In v1 a counter of its own, so that resetting it costs nobody the peak of the sandbox's whole life.
const V1: &str = "memory.memsw.max_usage_in_bytes";
/// In v2 each opener resets it for itself alone, since Linux 6.12.
const V2: &str = "memory.peak";

/// Windows of one sandbox, each named after the exec that it is for.
#[derive(Debug, Default)]
pub(crate) struct Peaks {
    windows: HashMap<ExecId, Window>,
}

#[derive(Debug)]
enum Window {
    /// The counter is everybody's: what it said before somebody else reset it is kept here.
    Shared(u64),
    Own(File),
}

impl Peaks {
    /// Ends the window of an exec and opens its next one; returns the peak of the one that ended.
    pub(crate) fn since_last(&mut self, group: &Path, id: &ExecId) -> Option<u64> {
        if group.join(V2).exists() { self.own(group, id) } else { self.shared(group, id) }
    }

    pub(crate) fn forget(&mut self, id: &ExecId) {
        self.windows.remove(id);
    }

    fn own(&mut self, group: &Path, id: &ExecId) -> Option<u64> {
        if let Some(Window::Own(file)) = self.windows.get_mut(id) {
            let mut text = [0; 32];
            let length = file.read_at(&mut text, 0).ok()?;
            let peak = std::str::from_utf8(&text[..length]).ok()?.trim().parse().ok();
            file.write_all(b"reset").ok()?;
            return peak;
        }
        // An older kernel refuses one of the two.
        let mut file = OpenOptions::new().read(true).write(true).open(group.join(V2)).ok()?;
        file.write_all(b"reset").ok()?;
        self.windows.insert(id.clone(), Window::Own(file));
        None
    }

    fn shared(&mut self, group: &Path, id: &ExecId) -> Option<u64> {
        let highest: u64 = cgroup::read(group, V1).ok()?.trim().parse().ok()?;
        cgroup::write(group, V1, "0").ok()?;
        for window in self.windows.values_mut() {
            if let Window::Shared(seen) = window {
                *seen = highest.max(*seen);
            }
        }
        match self.windows.insert(id.clone(), Window::Shared(0)) {
            Some(Window::Shared(seen)) => Some(seen),
            Some(Window::Own(_)) | None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn id(name: &str) -> ExecId {
        ExecId(name.to_owned())
    }

    /// The files of a group that a test writes instead of the kernel.
    #[test]
    fn windows_that_overlap_do_not_take_each_others_peak() {
        let group = tempfile::tempdir().unwrap();
        let counter = group.path().join(V1);
        let mut peaks = Peaks::default();
        let mut ask = |name: &str, kernel: u64| {
            fs::write(&counter, format!("{kernel}\n")).unwrap();
            let peak = peaks.since_last(group.path(), &id(name));
            assert!(fs::read_to_string(&counter).unwrap().starts_with('0'), "it was reset");
            peak
        };
        assert_eq!(ask("a", 900), None, "nobody knows when that was");
        assert_eq!(ask("b", 500), None);
        assert_eq!(ask("b", 300), Some(300));
        assert_eq!(ask("a", 100), Some(500), "it was while b had not begun");
        assert_eq!(ask("a", 50), Some(50));
        peaks.forget(&id("b"));
        fs::write(&counter, "7\n").unwrap();
        assert_eq!(peaks.since_last(group.path(), &id("b")), None, "a new one");
    }

    #[test]
    fn a_group_that_counts_nothing_has_no_peak() {
        let group = tempfile::tempdir().unwrap();
        let mut peaks = Peaks::default();
        assert_eq!(peaks.since_last(group.path(), &id("a")), None);
        assert_eq!(peaks.since_last(group.path(), &id("a")), None);
        assert!(peaks.windows.is_empty());
    }
}
