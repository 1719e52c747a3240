//! Which wall ended a command, or refused something to it, and the smallest thing that would allow it.
//!
//! From what the kernel counted and from what holds, never from what a program prints. See
//! `docs/design/denials.md`.

mod explained;

pub(crate) use explained::{Ground, Really};

use crate::profile::{self, ProfileUsers};
use crate::{Denial, EnforcedLimit, ExecCause, Limit, SandboxCapabilities};

/// Reports whether commands of such a sandbox can be followed, so that all walls are told of them. Whoever
/// asks for it where it cannot be is refused; whoever would have it wherever it can be asks here first.
pub fn can_be_followed(capabilities: &SandboxCapabilities) -> bool {
    let profile = profile::profile(&capabilities.profile);
    let one_user = profile.is_none_or(|profile| matches!(profile.users, ProfileUsers::One));
    let by_us = matches!(capabilities.backend.as_str(), "linux" | "landlock");
    // From 2 on nobody may who is not root. See Documentation/admin-guide/LSM/Yama.rst.
    let scope = || std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let scope = || scope().ok().and_then(|text| text.trim().parse::<u32>().ok());
    by_us && one_user && scope().is_none_or(|scope| scope < 2)
}

/// Says which limit ended a command, if one did.
pub fn of_cause(cause: &ExecCause, limits: &[EnforcedLimit]) -> Option<Denial> {
    let limit = match cause {
        ExecCause::OutOfMemory => Limit::Memory,
        ExecCause::TooManyProcesses => Limit::Processes,
        ExecCause::DiskQuota => Limit::Write,
        ExecCause::OutputLimit => Limit::Output,
        ExecCause::CpuTime => Limit::CpuTime,
        // It may have been the command's own, which is no limit of its sandbox.
        ExecCause::TimedOut
        | ExecCause::Exited { .. }
        | ExecCause::Signalled { .. }
        | ExecCause::KilledByPolicy { .. }
        | ExecCause::Lost => return None,
    };
    of_limit(limit, limits)
}

/// Says which limit is in the way, if somebody holds it.
fn of_limit(limit: Limit, limits: &[EnforcedLimit]) -> Option<Denial> {
    let enforced = limits.iter().find(|enforced| enforced.limit == limit)?;
    let (value, twice) = (enforced.value, enforced.value.saturating_mul(2));
    let mib = |bytes: u64| format!("{}M", bytes.div_ceil(1 << 20));
    let (what, grant) = match limit {
        Limit::Memory => {
            (format!("more than {} of memory", mib(value)), format!("--memory {}", mib(twice)))
        }
        Limit::Processes => (format!("more than {value} processes"), format!("--pids {twice}")),
        Limit::Write => {
            (format!("more than {} of files", mib(value)), format!("--disk {}", mib(twice)))
        }
        Limit::Output => {
            (format!("more than {} of output", mib(value)), format!("--max-output {}", mib(twice)))
        }
        Limit::CpuTime => {
            (format!("more than {value} ms of CPU time"), format!("--cpu-time {twice}ms"))
        }
        Limit::OpenFiles => {
            (format!("more than {value} open files"), format!("--open-files {twice}"))
        }
        Limit::WallTime | Limit::CpuWeight | Limit::CpuQuota => return None,
    };
    let (wall, by) = ("limits".to_owned(), enforced.by.clone());
    Some(Denial { wall, what, by, errno: None, count: 1, grant: Some(grant) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bound;

    #[test]
    fn a_limit_that_ended_a_command_is_named_with_twice_as_much_and_nothing_else_is() {
        let limit =
            |limit, value| EnforcedLimit { limit, value, bound: Bound::Exact, by: "it".to_owned() };
        let limits =
            [limit(Limit::Memory, 512 << 20), limit(Limit::Processes, 64), limit(Limit::Write, 1)];
        for (cause, what, grant) in [
            (ExecCause::OutOfMemory, "more than 512M of memory", "--memory 1024M"),
            (ExecCause::TooManyProcesses, "more than 64 processes", "--pids 128"),
            (ExecCause::DiskQuota, "more than 1M of files", "--disk 1M"),
        ] {
            let denial = of_cause(&cause, &limits).unwrap();
            assert_eq!((denial.what.as_str(), denial.grant.as_deref()), (what, Some(grant)));
            assert_eq!(of_cause(&cause, &[]), None, "nobody holds it");
        }
        for cause in
            [ExecCause::Exited { code: 137 }, ExecCause::Signalled { signal: 9 }, ExecCause::Lost]
        {
            assert_eq!(of_cause(&cause, &limits), None, "{cause}");
        }
    }
}
