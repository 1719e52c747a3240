//! Which limit is held by what, decided without touching anything.

use std::collections::BTreeSet;

use warren_init::plan::{Bounds, Scratch};

use super::host::{Controller, GroupSupport};
use crate::{Bound, EnforcedLimit, Limit, ResourceLimits, Result, SandboxError};

/// Half a page for each file: a tree of small files runs out of both at about the same time.
const BYTES_PER_INODE: u64 = 2048;
/// The skeleton of the root and a little air.
const SPARE_INODES: u64 = 512;
/// The period of a CPU quota.
const PERIOD_US: u64 = 100_000;

/// What a kernel of its own may take beside what its commands do, in bytes: its own data, and the cache of files
/// that are open.
const KERNEL_MEMORY: u64 = 256 << 20;
/// How many threads and processes of the host it may take beside one for each of its own.
const KERNEL_TASKS: u64 = 1024;
/// By how much such a kernel outweighs its group, as measured: of six that spin on two CPUs each took two to six times what a
/// process of the host got with the same weight, and as much with half to a quarter of it. Probably because it wakes dozens of
/// threads wherever there is room, and a group is weighed on each CPU by itself.
const KERNEL_WEIGHT: u64 = 4;

/// One value to write to a file of a control group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) controller: Controller,
    pub(crate) file: &'static str,
    pub(crate) value: String,
    /// Whether a kernel that lacks the file still holds the limit.
    pub(crate) optional: bool,
}

impl Setting {
    /// Tells whether the kernel holds what was written; it rounds memory down to whole pages.
    pub(crate) fn is_held_by(&self, found: &str) -> bool {
        match (found.parse::<u64>(), self.value.parse::<u64>()) {
            (Ok(found), Ok(written)) => found <= written && written - found < 4096,
            _ => found == self.value,
        }
    }

    /// Returns the limit that it is, if a caller can ask for it.
    pub(crate) fn limit(&self) -> Option<Limit> {
        match self.file {
            "memory.max" | "memory.limit_in_bytes" => Some(Limit::Memory),
            "pids.max" => Some(Limit::Processes),
            "cpu.weight" | "cpu.shares" => Some(Limit::CpuWeight),
            "cpu.max" | "cpu.cfs_quota_us" => Some(Limit::CpuQuota),
            _ => None,
        }
    }
}

/// How the limits of one sandbox are held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) settings: Vec<Setting>,
    pub(crate) bounds: Bounds,
    pub(crate) scratch: Scratch,
    /// Whether commands are told apart by marks, for want of a cgroup.
    pub(crate) by_marks: bool,
    pub(crate) enforced: Vec<EnforcedLimit>,
    pub(crate) warnings: Vec<String>,
    lacks: Lack,
}

/// Why a limit may be held by nothing exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lack {
    /// The user has none.
    Group,
    Namespaces,
    /// The host's group counts the kernel of the sandbox with what runs on it.
    GroupInside,
}

impl Lack {
    fn of(support: &GroupSupport) -> Self {
        match (support.shared, support.own_kernel) {
            (true, _) => Self::Namespaces,
            (false, true) => Self::GroupInside,
            (false, false) => Self::Group,
        }
    }

    fn reason(self) -> &'static str {
        match self {
            Self::Group => "this user has no cgroup with the controller for it",
            Self::Namespaces => "without namespaces nothing holds it exactly",
            Self::GroupInside => "the sandbox's own kernel has nothing that holds it exactly",
        }
    }

    fn hint(self, limit: Limit) -> String {
        let instead = match self {
            Self::Group => {
                "run as root, or in a delegated cgroup (systemd-run --user --scope -p Delegate=yes warren ...)"
            }
            Self::Namespaces => "unset it, use a stronger isolation",
            Self::GroupInside => "unset it, or use containers or namespaces",
        };
        format!("{instead}, or accept what there is: --accept-missing {limit}")
    }

    fn name(self) -> &'static str {
        match self {
            Self::Group => "a cgroup",
            Self::Namespaces => "namespaces",
            Self::GroupInside => "cgroups on its own kernel",
        }
    }
}

/// Decides what holds each limit on a host with `support`, or names the one that nothing can hold.
///
/// `required` are the limits that the caller asked for; those must be held as they were asked.
pub(crate) fn decide(
    limits: &ResourceLimits,
    cpu_quota_millis: Option<u32>,
    required: &BTreeSet<Limit>,
    support: &GroupSupport,
    binds_writable: bool,
) -> Result<Decision> {
    let mut decision = Decision {
        settings: Vec::new(),
        bounds: Bounds::default(),
        scratch: scratch(limits.max_write_bytes),
        by_marks: support.v2.is_none() && !support.own_kernel,
        enforced: Vec::new(),
        warnings: Vec::new(),
        lacks: Lack::of(support),
    };
    decision.memory(limits.max_memory_bytes, support);
    decision.processes(limits.max_processes, support);
    decision.cpu_weight(limits.cpu_weight, support);
    decision.cpu_quota(cpu_quota_millis, support);
    let (bound, by) = match support.v2 {
        _ if support.own_kernel => (Bound::Exact, "cpuacct of its own kernel"),
        Some(_) => (Bound::Exact, "cgroup v2 cpu.stat"),
        // A child whose parent does not care how it ends is gone without a trace.
        None => (Bound::Nearest, "init adds up /proc"),
    };
    decision.note(Limit::CpuTime, limits.max_cpu_time_ms, bound, by);
    decision.note(Limit::WallTime, limits.max_wall_time_ms, Bound::Exact, "init's clock");
    decision.open_files(limits.max_open_files, support, required)?;
    decision.note(Limit::Output, limits.max_output_bytes, Bound::Exact, "counted by the reader");
    if support.shared {
        let by = "rlimit FSIZE on each file; all together are not bounded";
        decision.note(Limit::Write, limits.max_write_bytes, Bound::Nearest, by);
        decision.enforced.sort_by_key(|enforced| enforced.limit);
        decision.settle(required)?;
        return Ok(decision);
    }
    let by = match binds_writable {
        false => "the size of a tmpfs",
        true => "the size of a tmpfs; what is bound writable is not bounded",
    };
    decision.note(Limit::Write, limits.max_write_bytes, Bound::Exact, by);
    decision.enforced.sort_by_key(|enforced| enforced.limit);
    decision.settle(required)?;
    Ok(decision)
}

fn scratch(max_write_bytes: Option<u64>) -> Scratch {
    match max_write_bytes {
        Some(bytes) => {
            Scratch { bytes, inodes: (bytes / BYTES_PER_INODE).clamp(1024, 4 << 20) + SPARE_INODES }
        }
        // The kernel then bounds it by half of the memory; files are bounded all the same.
        None => Scratch { bytes: 0, inodes: 4 << 20 },
    }
}

impl Decision {
    fn note(&mut self, limit: Limit, value: Option<u64>, bound: Bound, by: impl Into<String>) {
        if let Some(value) = value {
            self.enforced.push(EnforcedLimit { limit, value, bound, by: by.into() });
        }
    }

    fn set(&mut self, controller: &Controller, file: &'static str, value: impl ToString) {
        let (controller, value) = (controller.clone(), value.to_string());
        self.settings.push(Setting { controller, file, value, optional: false });
    }

    fn set_if_there(&mut self, controller: &Controller, file: &'static str, value: impl ToString) {
        let (controller, value) = (controller.clone(), value.to_string());
        self.settings.push(Setting { controller, file, value, optional: true });
    }

    /// Nothing inside may raise what the kernel lets a process have open; init would fail with each
    /// command.
    fn open_files(
        &mut self,
        limit: Option<u32>,
        support: &GroupSupport,
        required: &BTreeSet<Limit>,
    ) -> Result<()> {
        let Some(wanted) = limit.map(u64::from) else { return Ok(()) };
        let held = support.open_files.map_or(wanted, |most| wanted.min(most));
        if held < wanted {
            let reason = format!("the hard limit of this process is {held}");
            let hint = format!(
                "ask for {held} at most, or raise the limit of who starts Warren (`ulimit -Hn`, \
                 LimitNOFILE= of a service)"
            );
            if required.contains(&Limit::OpenFiles) {
                let limit = Limit::OpenFiles;
                return Err(SandboxError::LimitNotEnforceable { limit, reason, hint });
            }
            self.warnings.push(format!("there are {held} open files and not {wanted}: {reason}"));
        }
        self.note(Limit::OpenFiles, Some(held), Bound::Exact, "rlimit NOFILE");
        Ok(())
    }

    fn memory(&mut self, limit: Option<u64>, support: &GroupSupport) {
        let Some(mut bytes) = limit else { return };
        if support.own_kernel {
            // Its commands by init; all of it, with a kernel that is a process like any other, by the host.
            self.bounds.memory = Some(bytes);
            bytes = bytes.saturating_add(KERNEL_MEMORY);
        }
        let Some(controller) = &support.memory else {
            self.bounds.memory = limit;
            let by = "init watches memory that is mapped, rlimit DATA on each process, no memfd, no SysV \
                      segments; shared memory that nobody has mapped any more is not seen";
            return self.note(Limit::Memory, limit, Bound::Nearest, by);
        };
        match controller {
            Controller::V1(_) => {
                self.set(controller, "memory.limit_in_bytes", bytes);
                // Memory and swap together: no swap beyond the limit. Absent where swap is not
                // accounted; then nothing of a sandbox is swapped out to escape it either.
                self.set_if_there(controller, "memory.memsw.limit_in_bytes", bytes);
                self.set_if_there(controller, "memory.swappiness", 0);
            }
            Controller::V2 => {
                self.set(controller, "memory.max", bytes);
                self.set_if_there(controller, "memory.swap.max", 0);
            }
        }
        let by = match support.own_kernel {
            false => controller.describe("memory"),
            true => format!(
                "init, which looks every 20 ms; {} holds all of it, with its kernel, at {} MiB more",
                controller.describe("memory"),
                KERNEL_MEMORY >> 20
            ),
        };
        let bound = if support.own_kernel { Bound::Nearest } else { Bound::Exact };
        self.note(Limit::Memory, limit, bound, by);
    }

    fn processes(&mut self, limit: Option<u32>, support: &GroupSupport) {
        let Some(count) = limit.map(u64::from) else { return };
        if support.own_kernel {
            self.bounds.processes = Some(count);
            if let Some(controller) = &support.pids {
                self.set(controller, "pids.max", count + KERNEL_TASKS);
            }
            // Seen on a busy host: 200 forks, one after the other, got to 65 where 32 are allowed. And whoever reads that
            // a command failed for it reads this, and is not to take it for that kernel's word.
            let by = "pids of its own kernel, which lets some more through on a busy host and counts no refusals \
                      (that a command failed for one is inferred by init: it failed while all were in use)";
            return self.note(Limit::Processes, Some(count), Bound::Nearest, by);
        }
        let by = match &support.pids {
            Some(controller) => {
                // One more, for init, and for its warden where it has one.
                self.set(controller, "pids.max", count + 1 + u64::from(support.shared));
                controller.describe("pids")
            }
            None if support.shared => {
                self.bounds.processes = Some(count);
                let by = "rlimit NPROC, with the processes that the same user had before";
                return self.note(Limit::Processes, Some(count), Bound::Nearest, by);
            }
            None => {
                self.bounds.processes = Some(count);
                "rlimit NPROC in the sandbox's user namespace".to_owned()
            }
        };
        self.note(Limit::Processes, Some(count), Bound::Exact, by);
    }

    fn cpu_weight(&mut self, limit: Option<u32>, support: &GroupSupport) {
        let Some(weight) = limit.map(u64::from) else { return };
        let Some(controller) = &support.cpu else {
            self.bounds.nice = nice(weight);
            let by = format!("nice {}", self.bounds.nice);
            return self.note(Limit::CpuWeight, Some(weight), Bound::Nearest, by);
        };
        let less = if support.own_kernel { KERNEL_WEIGHT } else { 1 };
        match controller {
            // The two scales meet at their defaults, 100 and 1024.
            Controller::V1(_) => {
                self.set(controller, "cpu.shares", (weight * 1024 / 100 / less).max(2));
            }
            Controller::V2 => self.set(controller, "cpu.weight", (weight / less).max(1)),
        }
        self.note(Limit::CpuWeight, Some(weight), Bound::Exact, controller.describe("cpu"));
    }

    fn cpu_quota(&mut self, millis: Option<u32>, support: &GroupSupport) {
        let Some(millis) = millis.map(u64::from) else { return };
        let Some(controller) = &support.cpu else {
            return self.note(Limit::CpuQuota, Some(millis), Bound::Nearest, "nothing");
        };
        self.settings.extend(cpu_quota(controller, Some(millis)));
        self.note(Limit::CpuQuota, Some(millis), Bound::Exact, controller.describe("cpu"));
    }

    /// Refuses what was asked for and is not held as asked; says what else is not.
    fn settle(&mut self, required: &BTreeSet<Limit>) -> Result<()> {
        let nearest = self.enforced.iter().filter(|enforced| enforced.bound == Bound::Nearest);
        let demanded = nearest.clone().find(|enforced| required.contains(&enforced.limit));
        if let Some(EnforcedLimit { limit, .. }) = demanded {
            return Err(SandboxError::LimitNotEnforceable {
                limit: *limit,
                reason: self.lacks.reason().to_owned(),
                hint: self.lacks.hint(*limit),
            });
        }
        let missing: Vec<_> =
            nearest.map(|enforced| format!("{} ({})", enforced.limit, enforced.by)).collect();
        if !missing.is_empty() {
            self.warnings.push(format!(
                "without {} these limits are only held by the nearest bound: {}",
                self.lacks.name(),
                missing.join(", ")
            ));
        }
        // Nothing holds a quota but a cgroup; whoever accepts that shall not read otherwise.
        self.enforced.retain(|enforced| enforced.by != "nothing");
        Ok(())
    }
}

/// Returns what to write for a share of a CPU, in thousandths, or for none.
pub(crate) fn cpu_quota(controller: &Controller, millis: Option<u64>) -> Vec<Setting> {
    let quota = millis.map(|millis| (millis * PERIOD_US / 1000).to_string());
    let set = |file, value: String| {
        let controller = controller.clone();
        Setting { controller, file, value, optional: false }
    };
    match controller {
        Controller::V1(_) => vec![
            set("cpu.cfs_period_us", PERIOD_US.to_string()),
            set("cpu.cfs_quota_us", quota.unwrap_or_else(|| "-1".to_owned())),
        ],
        Controller::V2 => {
            let quota = quota.unwrap_or_else(|| "max".to_owned());
            vec![set("cpu.max", format!("{quota} {PERIOD_US}"))]
        }
    }
}

/// Finds the nice value whose share of the CPU is nearest to a weight: each step is a factor 1.25.
fn nice(weight: u64) -> i32 {
    let mut share = 100 * 1024;
    let mut nice = 0;
    // Without privileges a process can only become nicer.
    while nice < 19 && weight * 1024 < share {
        share = share * 4 / 5;
        nice += 1;
    }
    nice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rounding_is_overlooked_when_a_limit_is_read_back() {
        let is_same = |found: &str, written: &str| {
            let (controller, value) = (Controller::V2, written.to_owned());
            Setting { controller, file: "memory.max", value, optional: false }.is_held_by(found)
        };
        assert!(
            is_same("64", "64")
                && is_same("20480", "24000")
                && is_same("50000 100000", "50000 100000")
        );
        assert!(!is_same("65", "64") && !is_same("16384", "24000") && !is_same("max", "64"));
    }

    fn everything(controller: &Controller) -> GroupSupport {
        let some = || Some(controller.clone());
        let (memory, pids, cpu) = (some(), some(), some());
        GroupSupport { v2: Some("/g".into()), memory, pids, cpu, ..GroupSupport::default() }
    }

    fn files(decision: &Decision) -> Vec<(&str, &str)> {
        decision.settings.iter().map(|s| (s.file, s.value.as_str())).collect()
    }

    #[test]
    fn cgroup_v2_holds_every_limit_exactly() {
        let limits = ResourceLimits::default();
        let decision =
            decide(&limits, Some(1500), &Limit::ALL.into(), &everything(&Controller::V2), false)
                .unwrap();
        let expected = [
            ("memory.max", "536870912"),
            ("memory.swap.max", "0"),
            ("pids.max", "65"),
            ("cpu.weight", "100"),
            ("cpu.max", "150000 100000"),
        ];
        assert_eq!(files(&decision), expected);
        assert_eq!(decision.enforced.len(), Limit::ALL.len());
        assert!(decision.enforced.iter().all(|enforced| enforced.bound == Bound::Exact));
        assert!(decision.warnings.is_empty());
        assert_eq!(decision.bounds, Bounds::default(), "init has nothing to hold");
    }

    #[test]
    fn cgroup_v1_holds_every_limit_exactly() {
        let v1 = Controller::V1("/sys/fs/cgroup/x".into());
        let limits = ResourceLimits { cpu_weight: Some(50), ..ResourceLimits::default() };
        let decision =
            decide(&limits, Some(500), &Limit::ALL.into(), &everything(&v1), false).unwrap();
        let expected = [
            ("memory.limit_in_bytes", "536870912"),
            ("memory.memsw.limit_in_bytes", "536870912"),
            ("memory.swappiness", "0"),
            ("pids.max", "65"),
            ("cpu.shares", "512"),
            ("cpu.cfs_period_us", "100000"),
            ("cpu.cfs_quota_us", "50000"),
        ];
        assert_eq!(files(&decision), expected);
        assert!(decision.enforced.iter().all(|enforced| enforced.bound == Bound::Exact));
    }

    #[test]
    fn without_cgroups_a_default_falls_back_loudly_and_a_demand_is_refused() {
        let (limits, none) = (ResourceLimits::default(), GroupSupport::default());
        let decision = decide(&limits, None, &BTreeSet::new(), &none, false).unwrap();
        assert!(decision.settings.is_empty());
        assert_eq!(decision.bounds.memory, Some(512 << 20));
        assert_eq!(decision.bounds.processes, Some(64));
        assert_eq!(decision.warnings.len(), 1);
        assert!(decision.warnings[0].contains("memory (init watches memory"));
        for limit in [Limit::Memory, Limit::CpuWeight, Limit::CpuTime] {
            let error = decide(&limits, None, &[limit].into(), &none, false).unwrap_err();
            assert_eq!(error.code(), "limit_not_enforceable");
            let hint = error.hint().unwrap();
            assert!(hint.contains(&format!("--accept-missing {limit}")), "{hint}");
        }
        let error =
            decide(&limits, Some(500), &[Limit::CpuQuota].into(), &none, false).unwrap_err();
        assert!(error.to_string().contains("`cpus`"), "{error}");
        for limit in [Limit::Processes, Limit::WallTime, Limit::Write, Limit::Output] {
            decide(&limits, None, &[limit].into(), &none, false).unwrap();
        }
    }

    #[test]
    fn more_open_files_than_the_host_gives_are_refused_and_a_default_is_made_smaller_loudly() {
        let support = GroupSupport { open_files: Some(100), ..everything(&Controller::V2) };
        let limits = ResourceLimits::default();
        let demanded = [Limit::OpenFiles].into();
        let error = decide(&limits, None, &demanded, &support, false).unwrap_err();
        assert_eq!(error.code(), "limit_not_enforceable");
        assert!(error.to_string().contains("`open-files`"), "{error}");
        assert!(error.hint().unwrap().contains("100 at most"), "{:?}", error.hint());
        let decision = decide(&limits, None, &BTreeSet::new(), &support, false).unwrap();
        let held = decision.enforced.iter().find(|enforced| enforced.limit == Limit::OpenFiles);
        assert_eq!(held.unwrap().value, 100);
        assert!(decision.warnings[0].contains("100 open files and not 256"), "{decision:?}");
        let fits = ResourceLimits { max_open_files: Some(100), ..limits };
        assert!(decide(&fits, None, &demanded, &support, false).unwrap().warnings.is_empty());
    }

    #[test]
    fn nothing_is_held_that_was_not_limited() {
        let support = everything(&Controller::V2);
        let decision =
            decide(&ResourceLimits::unlimited(), None, &BTreeSet::new(), &support, false).unwrap();
        assert!(decision.settings.is_empty() && decision.enforced.is_empty());
        assert!(decision.scratch.inodes > 0, "files are bounded all the same");
    }

    #[test]
    fn a_weight_is_a_nice_value_without_cgroups() {
        assert_eq!((nice(100), nice(1000)), (0, 0));
        assert_eq!(nice(80), 1);
        assert_eq!(nice(1), 19);
    }
}
