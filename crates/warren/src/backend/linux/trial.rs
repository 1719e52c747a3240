//! Exceeding the limits of one that was begun ahead, whom nobody waits for.
//!
//! The kernel takes a third of a millisecond and more to find that it cannot make room, and tells its log of a process too
//! many: neither is for a creation that somebody waits for. The limits are lowered for it, and are what they were before
//! when it is over; should this be given up half-way, or get through, the sandbox ends. See `docs/design/receipt.md`.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use warren_init::protocol::{Lowered, Report, Word};
use warren_sys::memory::HUGE_PAGE;

use super::host::GroupSupport;
use super::limits::{self, Setting};
use super::sandbox::{Instance, lost, next_report, nonsense};
use crate::{ResourceLimits, Result, SandboxError, SandboxId};

/// How much memory there may be, beside what is in use, while that limit is tried and nobody is to be killed for it: half a
/// huge page is left when there is no room for another.
pub(super) const ROOM: u64 = 3 << 20;
/// The largest limit that is tried so, as all that it allows may be taken on the way.
const MOST: u64 = 32 << 20;

/// Returns how many huge pages do not fit below a limit, whatever else can be made to give way.
pub(super) fn too_many(limit: u64) -> Option<usize> {
    let limit = usize::try_from(limit).ok().filter(|_| limit <= MOST)?;
    Some(limit / HUGE_PAGE + 1)
}

/// Waits until one is begun, and has it exceed what its control groups can hold.
pub(super) async fn try_limits(
    instance: &mut Instance,
    id: &SandboxId,
    support: &GroupSupport,
    patience: Duration,
) -> Result<()> {
    let tried = async {
        wait(instance, id).await?;
        processes(instance, id, support).await?;
        memory(instance, id, support).await
    };
    let given_up = |_| SandboxError::Timeout {
        what: "trying the limits of the next sandbox".to_owned(),
        after: patience,
    };
    tokio::time::timeout(patience, tried).await.map_err(given_up)??;
    // Nobody has run in it: this was us.
    let refused = instance.groups().refusals();
    instance.refused_before = refused;
    Ok(())
}

async fn processes(instance: &Instance, id: &SandboxId, support: &GroupSupport) -> Result<()> {
    if instance.groups().pids().is_none() {
        return Ok(());
    }
    // None beside init.
    let limits = ResourceLimits { max_processes: Some(0), ..ResourceLimits::unlimited() };
    exceed(instance, id, &settings(&limits, support)?, Lowered::Processes).await?;
    // There are more reasons for a kernel to start none; this is the group's own count.
    match instance.groups().refusals().too_many_processes {
        0 => Err(lost("try the limit on processes", io::ErrorKind::WouldBlock.into())),
        _ => Ok(()),
    }
}

async fn memory(instance: &Instance, id: &SandboxId, support: &GroupSupport) -> Result<()> {
    let Some(used) = instance.groups().used_memory() else { return Ok(()) };
    let limit = used.saturating_add(ROOM);
    let Some(huge_pages) = too_many(limit) else { return Ok(()) };
    let limits = ResourceLimits { max_memory_bytes: Some(limit), ..ResourceLimits::unlimited() };
    exceed(instance, id, &settings(&limits, support)?, Lowered::Memory { huge_pages }).await
}

fn settings(limits: &ResourceLimits, support: &GroupSupport) -> Result<Vec<Setting>> {
    Ok(limits::decide(limits, None, &BTreeSet::new(), support, false)?.settings)
}

/// Has it exceed a limit while that is lowered.
async fn exceed(
    instance: &Instance,
    id: &SandboxId,
    lowered: &[Setting],
    limit: Lowered,
) -> Result<()> {
    let before = instance.groups().present(id, lowered);
    instance.groups().change(id, lowered)?;
    let sent = instance.control.send(&Word::<()>::Exceed(limit), &[]).await;
    sent.map_err(|error| lost("try a limit", error))?;
    wait(instance, id).await?;
    instance.groups().change(id, &before)
}

/// Waits until it has done what it was told.
async fn wait(instance: &Instance, id: &SandboxId) -> Result<()> {
    match next_report(id, &instance.control).await?.0 {
        Report::Waiting => Ok(()),
        Report::Launched { .. } | Report::Ready(_) | Report::Failed(_) => Err(nonsense("init")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_never_fits() {
        for limit in [0, 1, 4096, (2 << 20) - 1, 2 << 20, 5 << 20, MOST] {
            let asked = u64::try_from(too_many(limit).unwrap() * HUGE_PAGE).unwrap();
            assert!(asked > limit && asked <= limit + (2 << 20), "{limit}: {asked}");
        }
        assert_eq!(too_many(MOST + 1), None, "it would take too long");
    }
}
