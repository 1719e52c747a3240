//! The control groups of one sandbox, from first to last.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use warren_init::launcher::Guard;
use warren_init::plan::{COMMANDS, Cgroups};
use warren_sys::cgroup;

use super::host::{Controller, GroupSupport};
use super::limits::Setting;
use crate::{Result, SandboxError, SandboxId};

/// How long the last process of a group may take to be gone after it was killed.
const PATIENCE: Duration = Duration::from_secs(10);

/// The control groups of one sandbox. Dropping them removes them, unless they are to be left.
#[derive(Debug)]
pub(crate) struct Groups {
    places: Places,
    on_drop: OnDrop,
    /// The v1 groups that are to be made, with their limits.
    pending: Vec<(PathBuf, Setting)>,
    /// Removes them should we die.
    guard: Option<Guard>,
    counters: OnceLock<Counters>,
    freezer: OnceLock<Option<Freezer>>,
}

/// The files in which the kernel counts what it refused: they are looked at for every command, and a
/// look-up takes longer than the reading.
#[derive(Debug)]
struct Counters {
    memory: Option<File>,
    pids: Option<File>,
}

impl Counters {
    fn of(places: &Places) -> Self {
        let open = |group: &Option<PathBuf>, files: &[&str]| {
            let group = group.as_ref()?;
            files.iter().find_map(|file| File::open(group.join(file)).ok())
        };
        Self {
            memory: open(&places.memory, &["memory.events", "memory.oom_control"]),
            pids: open(&places.pids, &["pids.events"]),
        }
    }
}

/// What stops all commands at once, kept open from the first time on: who is suspended often wants it soon.
#[derive(Debug)]
struct Freezer {
    switch: File,
    events: File,
}

impl Freezer {
    /// `None` where commands have no group for themselves.
    fn of(places: &Places) -> Option<Self> {
        let commands = places.v2.as_ref()?.join(COMMANDS);
        let switch = File::options().write(true).open(commands.join("cgroup.freeze")).ok()?;
        Some(Self { switch, events: File::open(commands.join("cgroup.events")).ok()? })
    }

    /// Stops all, or lets them go on; returns whether they were seen to within a moment.
    fn turn(&self, frozen: bool) -> bool {
        let value = if frozen { b"1" } else { b"0" };
        if self.switch.write_at(value, 0).is_err() {
            return false;
        }
        for _ in 0..cgroup::EAGER_LOOKS {
            if count(Some(&self.events), "frozen") == Some(u64::from(frozen)) {
                return true;
            }
            std::thread::yield_now();
        }
        false
    }
}

/// Reads a number from such a file.
fn count(file: Option<&File>, key: &str) -> Option<u64> {
    let mut text = [0; 512];
    let length = file?.read_at(&mut text, 0).ok()?;
    cgroup::field(str::from_utf8(&text[..length]).ok()?, key)
}

/// Where the groups of a sandbox are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Places {
    v2: Option<PathBuf>,
    v1: Vec<PathBuf>,
    memory: Option<PathBuf>,
    pids: Option<PathBuf>,
}

impl Places {
    /// Reports whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.v2.is_none() && self.v1.is_empty()
    }
}

/// What becomes of something on the host when our value of it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnDrop {
    Remove,
    Leave,
}

/// How often the kernel refused something to a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refusals {
    pub(crate) out_of_memory: u64,
    pub(crate) too_many_processes: u64,
}

impl Groups {
    /// Lists the groups that [`begin`](Self::begin) and [`finish`](Self::finish) would make.
    pub(crate) fn wanted(
        id: &SandboxId,
        support: &GroupSupport,
        settings: &[Setting],
    ) -> Vec<PathBuf> {
        let name = name(id);
        let mut wanted: Vec<_> = support.v2.iter().map(|base| base.join(&name)).collect();
        for setting in settings {
            if let Controller::V1(base) = &setting.controller
                && !wanted.contains(&base.join(&name))
            {
                wanted.push(base.join(&name));
            }
        }
        wanted
    }

    /// Makes the v2 group and writes its limits, or leaves nothing; [`finish`](Self::finish) makes the
    /// others. The guard, if there is one, is let go when they are removed.
    pub(crate) fn begin(
        id: &SandboxId,
        support: &GroupSupport,
        settings: &[Setting],
        guard: Option<Guard>,
    ) -> Result<Self> {
        let name = name(id);
        let mut groups = Self::adopt(Places::default());
        (groups.on_drop, groups.guard) = (OnDrop::Remove, guard);
        if let Some(base) = &support.v2 {
            let group = base.join(&name);
            make(&group)?;
            groups.places.v2 = Some(group);
        }
        for setting in settings {
            match (&setting.controller, &groups.places.v2) {
                (Controller::V1(base), _) => {
                    groups.pending.push((base.join(&name), setting.clone()));
                }
                (Controller::V2, Some(group)) => write(group, setting)?,
                (Controller::V2, None) => return Err(no_group(setting)),
            }
        }
        let find = |controller: &Option<Controller>| match controller.as_ref()? {
            Controller::V2 => groups.places.v2.clone(),
            Controller::V1(base) => {
                let group = base.join(&name);
                groups.pending.iter().any(|(pending, _)| *pending == group).then_some(group)
            }
        };
        let (memory, pids) = (find(&support.memory), find(&support.pids));
        (groups.places.memory, groups.places.pids) = (memory, pids);
        Ok(groups)
    }

    /// Makes the groups that these settings are for, and writes none of them.
    pub(crate) fn bare(
        id: &SandboxId,
        support: &GroupSupport,
        settings: &[Setting],
    ) -> Result<Self> {
        let of_v1 = |setting: &&Setting| matches!(setting.controller, Controller::V1(_));
        let settings: Vec<_> = settings.iter().filter(of_v1).cloned().collect();
        let mut groups = Self::begin(id, support, &settings, None)?;
        for (group, _) in std::mem::take(&mut groups.pending) {
            groups.make_v1(group)?;
        }
        Ok(groups)
    }

    fn make_v1(&mut self, group: PathBuf) -> Result<()> {
        if !self.places.v1.contains(&group) {
            make(&group)?;
            self.places.v1.push(group);
        }
        Ok(())
    }

    /// Makes the v1 groups and writes their limits.
    pub(crate) fn finish(&mut self) -> Result<()> {
        for (group, setting) in std::mem::take(&mut self.pending) {
            self.make_v1(group.clone())?;
            write(&group, &setting)?;
        }
        Ok(())
    }

    /// Takes over groups that were made before.
    pub(crate) fn adopt(places: Places) -> Self {
        let (on_drop, pending, guard) = (OnDrop::Leave, Vec::new(), None);
        let (counters, freezer) = (OnceLock::new(), OnceLock::new());
        Self { places, on_drop, pending, guard, counters, freezer }
    }

    /// Takes over whatever groups a sandbox may have, without knowing more than its id.
    pub(crate) fn of(id: &SandboxId, support: &GroupSupport) -> Self {
        let name = name(id);
        let there = |base: &PathBuf| Some(base.join(&name)).filter(|group| group.exists());
        let controllers = [&support.memory, &support.pids, &support.cpu];
        let v1 = controllers.into_iter().filter_map(|controller| match controller {
            Some(Controller::V1(base)) => there(base),
            Some(Controller::V2) | None => None,
        });
        let v2 = support.v2.as_ref().and_then(there);
        Self::adopt(Places { v2, v1: v1.collect(), memory: None, pids: None })
    }

    /// Freezes or thaws all commands, where they are in a group of their own, as far as that takes but a
    /// moment; returns whether it is done. If not, init can do it and wait for longer.
    pub(crate) fn freeze_commands(&self, frozen: bool) -> bool {
        let freezer = self.freezer.get_or_init(|| Freezer::of(&self.places));
        freezer.as_ref().is_some_and(|freezer| freezer.turn(frozen))
    }

    /// Reports whether all commands are to stand still, where one can tell from here.
    pub(crate) fn are_commands_stopped(&self) -> Option<bool> {
        let commands = self.places.v2.as_ref()?.join(COMMANDS);
        Some(cgroup::read(&commands, "cgroup.freeze").ok()?.trim() == "1")
    }

    /// Has them stay when this value goes.
    pub(crate) fn leave(&mut self) {
        self.on_drop = OnDrop::Leave;
    }

    /// Returns where they are.
    pub(crate) fn places(&self) -> Places {
        self.places.clone()
    }

    /// Writes limits to groups that exist.
    pub(crate) fn change(&self, id: &SandboxId, settings: &[Setting]) -> Result<()> {
        let name = name(id);
        let apply = |setting: &Setting| {
            let group = match &setting.controller {
                Controller::V1(base) => Some(base.join(&name)),
                Controller::V2 => self.places.v2.clone(),
            };
            let group = group.filter(|group| group.exists()).ok_or_else(|| no_group(setting))?;
            write(&group, setting)
        };
        // In v1 memory may never be above memory and swap together, so that the order depends on
        // whether the limit rises or falls; once the rest is written, it does not any more.
        let refused: Vec<_> = settings.iter().filter(|setting| apply(setting).is_err()).collect();
        refused.into_iter().try_for_each(apply)
    }

    /// Returns the directories for the plan.
    pub(crate) fn planned(&self) -> Cgroups {
        let text = |path: &PathBuf| path.to_string_lossy().into_owned();
        let mut v1: Vec<_> = self.places.v1.iter().map(text).collect();
        for (group, _) in &self.pending {
            if !v1.contains(&text(group)) {
                v1.push(text(group));
            }
        }
        // Who has a guard makes one sandbox, for one command, and ends.
        Cgroups { v2: self.places.v2.as_ref().map(text), v1, parted: self.guard.is_none() }
    }

    /// Says what these limits are at present, where the kernel has them, so that they can be written again.
    pub(crate) fn present(&self, id: &SandboxId, settings: &[Setting]) -> Vec<Setting> {
        let now = |setting: &Setting| {
            let value = self.value(id, setting)?;
            Some(Setting { value, ..setting.clone() })
        };
        settings.iter().filter_map(now).collect()
    }

    /// Reads back what a limit is.
    pub(crate) fn value(&self, id: &SandboxId, setting: &Setting) -> Option<String> {
        let group = match &setting.controller {
            Controller::V1(base) => base.join(name(id)),
            Controller::V2 => self.places.v2.clone()?,
        };
        Some(cgroup::read(&group, setting.file).ok()?.trim().to_owned())
    }

    /// Reports whether a process of the sandbox is in all of them.
    pub(crate) fn hold(&self, id: &SandboxId, pid: i32) -> bool {
        let own = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let inside = own.lines().filter(|line| line.contains(&name(id))).count();
        inside >= self.places.v1.len() + usize::from(self.places.v2.is_some())
    }

    /// Reads how often the kernel refused memory or a process.
    pub(crate) fn refusals(&self) -> Refusals {
        let Counters { memory, pids } = self.counters.get_or_init(|| Counters::of(&self.places));
        Refusals {
            out_of_memory: count(memory.as_ref(), "oom_kill").unwrap_or_default(),
            too_many_processes: count(pids.as_ref(), "max").unwrap_or_default(),
        }
    }

    /// Returns the most memory that the sandbox ever held.
    pub(crate) fn peak_memory(&self) -> Option<u64> {
        self.read_memory(["memory.peak", "memory.max_usage_in_bytes"])
    }

    /// Returns how much memory the sandbox holds now.
    pub(crate) fn used_memory(&self) -> Option<u64> {
        self.read_memory(["memory.current", "memory.usage_in_bytes"])
    }

    /// Reads a number that v2 and v1 have by different names.
    fn read_memory(&self, files: [&str; 2]) -> Option<u64> {
        let group = self.places.memory.as_ref()?;
        files.iter().find_map(|file| cgroup::read(group, file).ok()?.trim().parse().ok())
    }

    /// Returns the group that processes are counted in.
    pub(crate) fn pids(&self) -> Option<&Path> {
        self.places.pids.as_deref()
    }

    /// Returns the group that memory is counted in.
    pub(crate) fn memory(&self) -> Option<&Path> {
        self.places.memory.as_deref()
    }

    /// Returns the CPU time of everything that ran in the sandbox.
    pub(crate) fn cpu_time(&self) -> Option<Duration> {
        let text = cgroup::read(self.places.v2.as_ref()?, "cpu.stat").ok()?;
        cgroup::field(&text, "usage_usec").map(Duration::from_micros)
    }

    /// Returns how often the kernel made the sandbox wait because it had used up its share of a CPU.
    pub(crate) fn throttled(&self, id: &SandboxId, controller: &Controller) -> Option<u64> {
        let group = match controller {
            Controller::V1(base) => base.join(name(id)),
            Controller::V2 => self.places.v2.clone()?,
        };
        cgroup::field(&cgroup::read(&group, "cpu.stat").ok()?, "nr_throttled")
    }

    /// Reports whether a command, or something that one left behind, may be there. Without a group
    /// nobody knows.
    pub(crate) fn is_populated(&self) -> bool {
        let Some(group) = &self.places.v2 else { return true };
        let Ok(entries) = fs::read_dir(group) else { return true };
        let leaves = entries.flatten().filter(|entry| entry.path().is_dir());
        leaves
            .map(|leaf| cgroup::read(&leaf.path(), "cgroup.events"))
            .any(|events| events.map_or(true, |text| cgroup::field(&text, "populated") != Some(0)))
    }

    /// Reports whether each command has a group of its own.
    pub(crate) fn tell_commands(&self) -> bool {
        self.places.v2.is_some()
    }

    /// Ends whatever is in the groups at once, where the kernel can.
    pub(crate) fn kill(&self) {
        if let Some(group) = &self.places.v2 {
            let _ = cgroup::write(group, "cgroup.kill", "1");
        }
    }

    /// Removes the groups; every process in them must be dead or dying.
    pub(crate) fn remove(&mut self) -> Result<()> {
        self.remove_within(PATIENCE)
    }

    /// Likewise, waiting so long for all of them. What cannot be removed is still ours, to be tried again.
    pub(crate) fn remove_within(&mut self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        let mut result = Ok(());
        let mut is_gone = |group: &mut PathBuf| {
            let left = deadline.saturating_duration_since(Instant::now());
            let gone = cgroup::remove(group, left);
            gone.map_err(|error| {
                result = Err(SandboxError::step("remove the control group", &*group, error));
            })
            .is_ok()
        };
        self.places.v2.take_if(&mut is_gone);
        self.places.v1.retain_mut(|group| !is_gone(group));
        if result.is_ok() {
            self.guard.take().into_iter().for_each(Guard::dismiss);
        }
        result
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        // Only reached with groups left when a creation failed or a sandbox was never destroyed;
        // whoever could be told of a failure is gone.
        if self.on_drop == OnDrop::Remove {
            let _ = self.remove();
        }
    }
}

/// What the directory of every sandbox begins with, in every hierarchy.
const PREFIX: &str = "warren-";

pub(crate) fn name(id: &SandboxId) -> String {
    format!("{PREFIX}{id}")
}

/// Writes a limit, and sees to it that the kernel holds it.
fn write(group: &Path, setting: &Setting) -> Result<()> {
    match cgroup::set(group, setting.file, &setting.value) {
        Err(error) if setting.optional && error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(SandboxError::step("set the limit", group.join(setting.file), error)),
        Ok(found) if setting.is_held_by(&found) => Ok(()),
        Ok(found) => {
            let (file, wanted, found) = (setting.file, &setting.value, found.escape_debug());
            let open = format!("limits: {file} is `{found}` after `{wanted}` was written");
            Err(SandboxError::WallOpen { id: id_of(group).unwrap_or_default(), open: vec![open] })
        }
    }
}

/// Returns whose group this is, by its name.
fn id_of(group: &Path) -> Option<SandboxId> {
    let id = group.file_name().and_then(|name| name.to_str()?.strip_prefix(PREFIX));
    id.map(SandboxId::from_string)
}

fn no_group(setting: &Setting) -> SandboxError {
    SandboxError::Internal { message: format!("no control group for {}", setting.file) }
}

fn make(group: &Path) -> Result<()> {
    fs::create_dir(group).map_err(|error| match (error.kind(), id_of(group)) {
        (io::ErrorKind::AlreadyExists, Some(id)) => super::taken(&id),
        _ => SandboxError::step("create the control group", group, error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_cannot_be_removed_is_still_known_and_all_are_waited_for_once() {
        let directory = tempfile::tempdir().unwrap();
        let group = |name: &str| directory.path().join(name);
        let places =
            Places { v2: Some(group("a")), v1: vec![group("b"), group("c")], ..Default::default() };
        // Not empty, as one is that somebody is in.
        for busy in ["a", "c"] {
            fs::create_dir(group(busy)).unwrap();
            fs::write(group(busy).join("file"), "").unwrap();
        }
        fs::create_dir(group("b")).unwrap();
        let mut groups = Groups::adopt(places);
        let began = Instant::now();
        groups.remove_within(Duration::from_secs(1)).unwrap_err();
        assert!(began.elapsed() < Duration::from_millis(1_900), "{:?}", began.elapsed());
        assert!(!group("b").exists(), "control: the others are gone");
        for busy in ["a", "c"] {
            fs::remove_file(group(busy).join("file")).unwrap();
        }
        groups.remove_within(Duration::ZERO).unwrap();
        assert!(!group("a").exists() && !group("c").exists());
        assert!(groups.places().is_empty());
    }

    #[test]
    fn a_limit_that_the_kernel_does_not_hold_is_an_open_wall() {
        let directory = tempfile::tempdir().unwrap();
        let group = directory.path().join("warren-sbx-1");
        fs::create_dir(&group).unwrap();
        let (controller, value) = (Controller::V2, "64".to_owned());
        let setting = Setting { controller, file: "pids.max", value, optional: false };
        fs::write(group.join("pids.max"), "").unwrap();
        write(&group, &setting).expect("control: it holds what is written");
        fs::remove_file(group.join("pids.max")).unwrap();
        // Takes everything and holds nothing.
        std::os::unix::fs::symlink("/dev/null", group.join("pids.max")).unwrap();
        let error = write(&group, &setting).unwrap_err();
        let SandboxError::WallOpen { id, open } = error else { panic!("{error:?}") };
        assert_eq!(id.as_str(), "sbx-1");
        assert_eq!(open, ["limits: pids.max is `` after `64` was written"]);
    }
}
