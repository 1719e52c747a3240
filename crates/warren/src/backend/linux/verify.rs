//! Trying the walls and limits of one sandbox, from inside and out.

use std::collections::BTreeSet;
use std::io;
use std::time::{Duration, Instant};

use chrono::Utc;
use warren_init::protocol::{Probe, Request, Tries, Try};

use super::limits::{self, Setting};
use super::sandbox::lost;
use super::{LinuxSandbox, binds_writable, trial};
use crate::receipt::{self, Attempt, Listening, Walled};
use crate::{Extent, Limit, Receipt, Result, Sandbox, SandboxError};

/// How long all attempts may take together.
const PATIENCE: Duration = Duration::from_secs(10);
/// What a sandbox without a directory of its own cannot see of the host.
const HIDDEN: &str = "/run/warren/ranges";
/// How many processes there may be while that limit is tried, and how many are started.
const TRIAL_PROCESSES: (u32, u32) = (4, 8);
/// What Warren's own files may take beside what a sandbox may write.
const OWN_BYTES: u64 = warren_init::IMAGE.len() as u64;
/// The most processes that are started to try a limit that cannot be lowered.
const MAX_PROCESSES: u32 = 128;
/// How much memory there may be, beside what is in use, while that limit is tried; and how much is taken.
const TRIAL_MEMORY: (u64, u64) = (16 << 20, 24 << 20);

impl LinuxSandbox {
    /// Says what was tried when it was made.
    pub(super) fn creation_receipt(&self) -> Receipt {
        let instance = self.instance();
        let attempt = Attempt {
            extent: Extent::Creation,
            at: instance.made_at,
            took: None,
            tries: Vec::new(),
            read_back: Vec::new(),
            at_creation: instance.tried(),
        };
        self.judge(&attempt)
    }

    /// Tries its walls. Whoever asks for limits that are lowered sees to it that nothing runs in it.
    pub(super) async fn try_walls(&self, extent: Extent) -> Result<Receipt> {
        if extent == Extent::Creation {
            return Ok(self.creation_receipt());
        }
        let _state = self.running().await?;
        // Held until this is over, so that nothing begins meanwhile. What has begun must not notice.
        let busy = !self.instance().is_idle().await;
        // Without namespaces a user's processes are counted with those of others.
        let alone = self.capabilities().backend == super::NAME;
        let extent = if busy || !alone { extent.min(Extent::Walls) } else { extent };
        let (at, began, listening) = (Utc::now(), Instant::now(), Listening::start());
        let spec = self.terms.spec.limits.clone();
        let mut probe = Probe {
            hidden: self.hidden(),
            namespaces: receipt::own_namespaces(),
            open_files: spec.max_open_files.map(u64::from),
            // There is room for what is there from the start, too, which is a copy of init at the most.
            write_bytes: spec.max_write_bytes.map(|most| most.saturating_add(OWN_BYTES)),
            ..Probe::default()
        };
        listening.be_named_in(&mut probe);
        let lowered = extent >= Extent::Pristine;
        let huge_pages = if lowered { self.lower(extent, &mut probe)? } else { None };
        let request = match huge_pages {
            Some(huge_pages) => Request::ProbeGently { probe, huge_pages },
            None => Request::Probe(probe),
        };
        let answer = tokio::time::timeout(PATIENCE, self.ask_walls(&request)).await;
        if lowered {
            self.change_limits(&self.own_settings()?)?;
        }
        let answer = answer.map_err(|_| {
            let what = "trying the walls of the sandbox".to_owned();
            SandboxError::Timeout { what, after: PATIENCE }
        });
        let mut tries = answer??;
        listening.correct(&mut tries);
        let attempt = Attempt {
            extent,
            at,
            took: Some(began.elapsed()),
            tries,
            read_back: self.read_back()?,
            at_creation: self.instance().tried(),
        };
        Ok(self.judge(&attempt))
    }

    /// Tries every wall and says what happened, whatever is promised.
    pub(crate) async fn tries(&self) -> Result<Vec<Try>> {
        let listening = Listening::start();
        let namespaces = receipt::own_namespaces();
        let mut probe = Probe { namespaces, ..Probe::default() };
        listening.be_named_in(&mut probe);
        let mut tries = self.ask_walls(&Request::Probe(probe)).await?;
        listening.correct(&mut tries);
        Ok(tries)
    }

    fn judge(&self, attempt: &Attempt) -> Receipt {
        let can = self.capabilities();
        let limits = &self.terms.enforcement.limits;
        // All that are made by this engine have them, but for those of rules alone.
        let namespaces = can.backend != crate::backend::landlock::rules::NAME;
        let walled = Walled { namespaces, blocked: &can.blocked_syscall_categories, limits };
        Receipt::new(self.id(), can, &walled, attempt)
    }

    async fn ask_walls(&self, request: &Request) -> Result<Vec<Try>> {
        match self.instance().ask::<Tries>(request).await {
            Ok(Some(Tries(tries))) => Ok(tries),
            Ok(None) if self.has_ended() => Err(self.ended()),
            // No process could be made for it, or its init is of another version and knows no such thing.
            Ok(None) => Err(lost("try the walls from inside", io::ErrorKind::BrokenPipe.into())),
            Err(error) => Err(self.explain(lost("reach init", error))),
        }
    }

    /// Returns a path that is on the host and is not to be found inside.
    fn hidden(&self) -> Option<String> {
        let instance = self.instance();
        let own = instance.home.as_ref().map(|home| home.path().to_owned());
        let path =
            own.or_else(|| Some(HIDDEN.into()).filter(|path: &std::path::PathBuf| path.exists()));
        path.map(|path| path.to_string_lossy().into_owned())
    }

    /// Lowers what can be lowered, so that going beyond costs little; returns how many huge pages are too many then, if memory is
    /// to be tried by them.
    fn lower(&self, extent: Extent, probe: &mut Probe) -> Result<Option<usize>> {
        let mut limits = self.terms.spec.limits.clone();
        let support = &self.core.support;
        match (limits.max_processes, &support.pids) {
            (Some(most), Some(_)) => {
                limits.max_processes = Some(most.min(TRIAL_PROCESSES.0));
                probe.processes = Some(TRIAL_PROCESSES.1);
            }
            (Some(most), None) if most < MAX_PROCESSES => probe.processes = Some(most + 1),
            (Some(_) | None, _) => {}
        }
        let mut huge_pages = None;
        if let (Some(most), Some(_)) = (limits.max_memory_bytes, &support.memory) {
            // What the kernel keeps for the sandbox counts, too, and is more in one profile than in another.
            let used = self.instance().groups().used_memory().unwrap_or_default();
            let lowered = |room| most.min(used.saturating_add(room));
            if extent >= Extent::Everything {
                limits.max_memory_bytes = Some(lowered(TRIAL_MEMORY.0));
                probe.memory_bytes = Some(TRIAL_MEMORY.1);
            } else if let Some(pages) = trial::too_many(lowered(trial::ROOM)) {
                limits.max_memory_bytes = Some(lowered(trial::ROOM));
                huge_pages = Some(pages);
            }
        }
        let writable = binds_writable(&self.terms.spec);
        let lowered = limits::decide(&limits, None, &BTreeSet::new(), support, writable)?.settings;
        if let Err(error) = self.change_limits(&lowered) {
            self.change_limits(&self.own_settings()?)?;
            return Err(error);
        }
        Ok(huge_pages)
    }

    fn own_settings(&self) -> Result<Vec<Setting>> {
        let spec = &self.terms.spec;
        let (quota, writable) = (self.instance().cpu_quota_millis, binds_writable(spec));
        let none = BTreeSet::new();
        Ok(limits::decide(&spec.limits, quota, &none, &self.core.support, writable)?.settings)
    }

    fn change_limits(&self, settings: &[Setting]) -> Result<()> {
        self.instance().groups().change(self.id(), settings)
    }

    /// Asks the kernel which limits the sandbox is under.
    fn read_back(&self) -> Result<Vec<(Limit, bool)>> {
        let instance = self.instance();
        let groups = instance.groups();
        let inside = groups.hold(self.id(), instance.pid());
        let mut all = Vec::new();
        for setting in self.own_settings()? {
            let Some(limit) = setting.limit() else { continue };
            let found = groups.value(self.id(), &setting);
            let same = found.is_some_and(|found| setting.is_held_by(&found));
            all.push((limit, inside && same));
        }
        Ok(all)
    }
}
