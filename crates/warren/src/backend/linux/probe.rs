//! Finding out what this host can enforce, by trying.

use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;
use serde::Serialize;

use super::host::{Controller, Privilege};
use super::{LinuxBackend, LinuxSandbox, limits};
use crate::profile;
use crate::{
    BackendCapabilities, Bound, Command, CreateOptions, ExecCause, ExecContext, ExecInput,
    ExecOptions, Extent, Finding, Limit, LogWait, ResourceLimits, Result, Sandbox, SandboxError,
    SandboxId, SandboxSpec, Verdict,
};

/// Everything that was tried on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostReport {
    /// One line a layer.
    pub findings: Vec<Finding>,
}

impl HostReport {
    /// Reports whether a layer holds.
    pub fn holds(&self, layer: &str) -> bool {
        self.findings.iter().any(|finding| finding.layer == layer && finding.holds)
    }

    /// Reports whether sandboxes can be made here at all.
    pub fn is_usable(&self) -> bool {
        self.holds("sandbox")
    }

    fn note(&mut self, layer: &str, holds: bool, detail: impl Into<String>, fix: &str) {
        let fix = (!holds).then(|| fix.to_owned()).filter(|fix| !fix.is_empty());
        self.findings.push(Finding { layer: layer.to_owned(), holds, detail: detail.into(), fix });
    }

    /// Says the same in the terms of the contract.
    pub(crate) fn capabilities(
        &self,
        name: &str,
        persistent: bool,
        snapshots: bool,
    ) -> BackendCapabilities {
        let all = |layers: &[&str]| layers.iter().all(|layer| self.holds(layer));
        let profiles = if self.is_usable() { profile::profile_names() } else { Vec::new() };
        BackendCapabilities {
            name: name.to_owned(),
            // The second wall behind the mounts is Landlock, or a kernel that has no other files.
            filesystem_isolation: all(&["mounts", "proc"])
                && (self.holds("landlock") || self.holds("kernel")),
            network_isolation: all(&["network"]),
            process_isolation: all(&["processes"]),
            resource_limits: all(&["memory", "processes limit", "cpu", "quota"]),
            syscall_filtering: all(&["seccomp"]),
            persistent_sandboxes: persistent,
            snapshots,
            max_concurrent_sandboxes: None,
            available_profiles: profiles.into_iter().map(str::to_owned).collect(),
            platform_features: self
                .findings
                .iter()
                .filter(|finding| finding.holds)
                .map(|finding| format!("{}: {}", finding.layer, finding.detail))
                .collect(),
        }
    }
}

/// Makes a sandbox, tries every wall from inside and every limit, and removes it.
pub(crate) async fn examine(backend: &LinuxBackend) -> HostReport {
    try_out(backend).await.unwrap_or_else(|error| unusable(&error))
}

/// As [`examine`], for whoever remembers what was found: a host that had no process, memory or time to spare just now is an
/// error, and not one that lacks everything from now on.
pub(crate) async fn examine_for_good(backend: &LinuxBackend) -> Result<HostReport> {
    match try_out(backend).await {
        Err(error) if passes(&error) => Err(error),
        done => Ok(done.unwrap_or_else(|error| unusable(&error))),
    }
}

/// Reports whether the same may well succeed in a moment.
fn passes(error: &SandboxError) -> bool {
    match error {
        SandboxError::Timeout { .. } => true,
        SandboxError::Step { source, .. } => {
            let scarce = [Errno::AGAIN, Errno::NOMEM, Errno::MFILE, Errno::NFILE, Errno::NOSPC];
            scarce.iter().any(|errno| source.raw_os_error() == Some(errno.raw_os_error()))
        }
        _ => false,
    }
}

/// Says that no sandbox can be made here, and why.
fn unusable(error: &SandboxError) -> HostReport {
    let mut report = HostReport::default();
    report.note("sandbox", false, explained(error), fix_for(&error.to_string()));
    report
}

async fn try_out(backend: &LinuxBackend) -> Result<HostReport> {
    let mut report = HostReport::default();
    let who = match backend.host().privilege {
        Privilege::Root => "root: each sandbox has 65536 ids of its own".to_owned(),
        Privilege::User { uid, .. } => format!("user {uid}: one id, the caller's"),
    };
    let limits = ResourceLimits {
        max_memory_bytes: Some(64 << 20),
        max_processes: Some(16),
        max_write_bytes: Some(1 << 20),
        ..ResourceLimits::default()
    };
    let spec = SandboxSpec { limits, ..SandboxSpec::default() };
    let (sandbox, trace) = make(backend, &spec).await?;
    report.note("sandbox", true, who, "");
    let receipt = match sandbox.verify(Extent::Walls).await {
        Err(error) if passes(&error) => {
            let _ = trace.remove_with(&sandbox).await;
            return Err(error);
        }
        tried => tried.ok(),
    };
    for (layer, of, begin) in [
        ("mounts", "filesystem", &["make", "find", "be"][..]),
        ("processes", "processes", &["read", "be"]),
        ("proc", "filesystem", &["read", "write"]),
        ("network", "network", &["open", "send", "connect", "be"]),
        ("capabilities", "privileges", &["become", "make", "be"]),
        ("seccomp", "syscalls", &[""]),
    ] {
        let layers = receipt.iter().flat_map(|receipt| &receipt.layers);
        let tries = layers.filter(|one| one.layer == of).flat_map(|one| &one.tries);
        let tries: Vec<_> =
            tries.filter(|one| begin.iter().any(|word| one.what.starts_with(word))).collect();
        let held = !tries.is_empty() && tries.iter().all(|one| one.verdict == Verdict::Held);
        let names: Vec<_> = tries.iter().map(|one| one.what.as_str()).collect();
        let detail = format!("refused from inside: {}", names.join("; "));
        report.note(layer, held, detail, "please report this as a bug");
    }
    if backend.host().groups.own_kernel {
        let (held, detail) = try_kernel(&sandbox).await;
        report.note("kernel", held, detail, "please report this as a bug");
        let (held, detail) = try_descriptors(&sandbox).await;
        report.note("closed descriptors", held, detail, "please report this as a bug");
        let (held, detail) = try_ids(&sandbox);
        report.note("ids of its own", held, detail, "");
    } else {
        let enforcement = sandbox.enforcement();
        let landlock = enforcement.layers.iter().find(|layer| layer.name == "landlock");
        let detail = landlock.map_or_else(String::new, |layer| layer.detail.clone());
        report.note("landlock", landlock.is_some(), detail, "boot with lsm=landlock,...");
    }
    let (held, detail) = try_telling(&sandbox).await;
    let own_kernel = backend.host().groups.own_kernel;
    let fix = if own_kernel { "" } else { "have Linux 5.0 or newer, and nobody else listen" };
    report.note("denials", held, detail, fix);
    // Before the limits, which leave things behind that run for a while.
    let (held, detail, fix) = try_disk(&sandbox).await;
    report.note("suspend to disk", held, detail, &fix);
    try_limits(backend, &sandbox, &mut report).await;
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    let hard = rustix::process::getrlimit(rustix::process::Resource::Core).maximum;
    let detail = format!("core_pattern is `{}`", pattern.trim().escape_debug());
    let fix = "set kernel.core_pattern to a file or a pipe, and no hard limit of 0 on cores";
    report.note("no core dumps", stays_inside(&pattern, hard), detail, fix);
    let resumed = sandbox.suspend().await.is_ok() && sandbox.resume().await.is_ok();
    report.note("suspend", resumed, "stopped and continued", "");
    let removed = trace.remove_with(&sandbox).await;
    report.note("removal", removed.is_ok(), "nothing is left", "");
    Ok(report)
}

/// Makes a sandbox that nobody has a record of.
async fn make(backend: &LinuxBackend, spec: &SandboxSpec) -> Result<(LinuxSandbox, Trace)> {
    let id = SandboxId::new();
    let trace = Trace::leave(backend, &id);
    let options = CreateOptions {
        id: Some(id),
        accept_missing: Limit::ALL.into(),
        ..CreateOptions::default()
    };
    let made = backend.create(spec, &options).await;
    if made.is_err() {
        trace.remove();
    }
    Ok((made?, trace))
}

/// The directory of a sandbox without a record. Its control groups would be nobody's if we were killed now: this tells
/// whoever comes next. It stays for them, too, if we are given up half-way.
struct Trace(Option<PathBuf>);

impl Trace {
    fn leave(backend: &LinuxBackend, id: &SandboxId) -> Self {
        let trace = backend.inner.runtime.as_ref().map(|runtime| runtime.join(id.as_str()));
        trace.iter().for_each(|trace| drop(std::fs::create_dir(trace)));
        Self(trace)
    }

    async fn remove_with(&self, sandbox: &LinuxSandbox) -> Result<()> {
        sandbox.destroy().await.inspect(|()| self.remove())
    }

    fn remove(&self) {
        self.0.iter().for_each(|trace| drop(std::fs::remove_dir(trace)));
    }
}

/// Makes a sandbox whose network has a door, and removes it.
pub(crate) async fn try_egress(backend: &LinuxBackend) -> Result<()> {
    let spec = SandboxSpec { network_enabled: true, ..SandboxSpec::default() };
    let (sandbox, trace) = make(backend, &spec).await?;
    trace.remove_with(&sandbox).await
}

/// Says the same as a finding.
pub(crate) fn egress_finding(tried: Result<()>) -> Finding {
    let fix = match &tried {
        Err(SandboxError::Step { step, .. }) if ["route", "divert"].contains(&step.as_str()) => {
            Some("have nf_tables, nft_tproxy and policy routing in the kernel: modprobe nft_tproxy")
        }
        _ => None,
    };
    let detail = match &tried {
        Ok(()) => "what may be reached is routed and diverted to whoever decides".to_owned(),
        Err(error) => explained(error),
    };
    let (layer, fix) = ("egress".to_owned(), fix.map(str::to_owned));
    Finding { layer, holds: tried.is_ok(), detail, fix }
}

/// Has a command fail for a call that is refused, and looks whether that is told of it.
async fn try_telling(sandbox: &LinuxSandbox) -> (bool, String) {
    let script = "touch /tmp/told; chmod u+s /tmp/told; code=$?; rm /tmp/told; exit $code";
    let command = Command::new("sh").args(["-c", script]);
    let said = sandbox.exec_report(&command, &ExecContext::default()).await;
    let told = said.is_ok_and(|report| report.denials.iter().any(|one| one.wall == "seccomp"));
    let always = if told { "limits and refused calls" } else { "limits" };
    let asked = match crate::denial::can_be_followed(sandbox.capabilities()) {
        true => "; the rest with --explain",
        false => "",
    };
    (told, format!("told of every command that fails: {always}{asked}"))
}

/// Asks the kernel inside which it is, and the host's.
async fn try_kernel(sandbox: &LinuxSandbox) -> (bool, String) {
    let own = rustix::system::uname();
    let host = own.release().to_string_lossy().into_owned();
    let command = Command::new("uname").args(["-r"]);
    let said = sandbox.exec_report(&command, &ExecContext::default()).await;
    let inside =
        said.map(|report| String::from_utf8_lossy(&report.output.stdout).trim().to_owned());
    match inside {
        Ok(inside) => {
            let held = !inside.is_empty() && inside != host;
            (held, format!("the one inside says that it is {inside}, the host's is {host}"))
        }
        Err(error) => (false, explained(&error)),
    }
}

/// Looks whether commands can write to what init has open, which a kernel of its own may show them, or leave the group by
/// which they are told apart and counted.
async fn try_descriptors(sandbox: &LinuxSandbox) -> (bool, String) {
    // The first three are /dev/null.
    const SCRIPT: &str = "n=3; while [ $n -lt 40 ]; do
        for p in '' /cgroup.procs /../cgroup.procs; do (: >> /proc/1/fd/$n$p) 2>/dev/null && echo $n$p; done
        n=$((n+1)); done; echo tried";
    let look = Command::new("/bin/sh").args(["-c", SCRIPT]);
    let opened = sandbox.exec(&look, &ExecContext::default()).await;
    match opened.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()) {
        Ok(opened) if opened == "tried\n" => {
            (true, "none of init's, nor a group, opens for writing by /proc/1/fd".to_owned())
        }
        Ok(opened) => {
            let opened: Vec<_> = opened.lines().filter(|line| *line != "tried").collect();
            (false, format!("these of init's open for writing: {}", opened.join(", ")))
        }
        Err(error) => (false, explained(&error)),
    }
}

/// Looks whose a kernel of its own is among the host's processes: a user of the host's may be that of all such kernels.
fn try_ids(sandbox: &LinuxSandbox) -> (bool, String) {
    let range = sandbox.instance().base.map(|base| base..base + warren_init::plan::RANGE);
    let status = std::fs::read_to_string(format!("/proc/{}/status", sandbox.pid()));
    let status = status.unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    let user = line.split_whitespace().next().and_then(|id| id.parse::<u32>().ok());
    let is_own = user.zip(range).is_some_and(|(user, range)| range.contains(&user));
    let user = user.map_or_else(|| "unknown".to_owned(), |user| user.to_string());
    (is_own, format!("the kernel is a process of the host's user {user}"))
}

/// Joins what was tried and what the kernel said.
pub(crate) fn explained(error: &crate::SandboxError) -> String {
    let mut chain = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        chain = format!("{chain}: {cause}");
        source = cause.source();
    }
    chain
}

/// Provokes each limit that the kernel is to hold.
async fn try_limits(backend: &LinuxBackend, sandbox: &LinuxSandbox, report: &mut HostReport) {
    const DELEGATE: &str = "run as root, or in a delegated cgroup: systemd-run --user --scope -p \
                            Delegate=yes warren ...";
    let by = |limit: Limit| {
        let enforced = sandbox.enforcement().limits.into_iter();
        enforced.into_iter().find(|enforced| enforced.limit == limit)
    };
    let shell = async |script: &str| {
        let command = Command::new("/bin/sh").args(["-c", script]);
        sandbox.exec_report(&command, &ExecContext::default()).await
    };
    let exact = |limit| by(limit).is_some_and(|enforced| enforced.bound == Bound::Exact);
    let detail = |limit| by(limit).map_or_else(String::new, |enforced| enforced.by);

    // `tail` keeps a line until it ends, and this one never does.
    let greedy = shell("tail /dev/zero").await;
    let held = greedy.is_ok_and(|report| report.cause == ExecCause::OutOfMemory);
    report.note("memory", held && exact(Limit::Memory), detail(Limit::Memory), DELEGATE);
    let (held, seen) = match &backend.host().groups.cpu {
        Some(controller) => match throttle(sandbox, controller).await {
            Some(true) => (true, "; a spinner was throttled"),
            Some(false) => (false, "; a spinner was not throttled"),
            None => (false, "; a quota cannot be set"),
        },
        None => (false, ""),
    };
    let by = format!("{}{seen}", detail(Limit::CpuWeight));
    report.note("cpu", held && exact(Limit::CpuWeight), by, DELEGATE);
    let filled = shell("head -c 4000000 /dev/zero > /tmp/fill").await;
    let held = filled.is_ok_and(|report| report.cause == ExecCause::DiskQuota);
    report.note("quota", held, detail(Limit::Write), "");
    // Last, because what it starts goes on for a while.
    let fork = "i=0; while [ $i -lt 40 ]; do sleep 5 & i=$((i+1)); done; exit 0";
    let bounded =
        shell(fork).await.is_ok_and(|report| report.cause != ExecCause::Exited { code: 0 });
    let held = bounded && exact(Limit::Processes);
    report.note("processes limit", held, detail(Limit::Processes), DELEGATE);
}

/// Has something in the sandbox hold memory, and asks the kernel whether that was freed; and whether it was whole again.
async fn try_disk(sandbox: &LinuxSandbox) -> (bool, String, String) {
    const HELD: u64 = 8 << 20;
    const SCRIPT: &str =
        "x=$(head -c 8388608 /dev/zero | tr '\\0' x); echo ready; read line; echo ${#x}";
    let told = |error: SandboxError| {
        let hint = error.hint().unwrap_or_default().to_owned();
        (false, error.to_string(), hint)
    };
    let command = Command::new("/bin/sh").args(["-c", SCRIPT]);
    let options = ExecOptions { input: ExecInput::Open, ..ExecOptions::default() };
    let tried = async {
        let exec = sandbox.start_exec(&command, &ExecContext::default(), &options).await?;
        let ready = exec.read(0, 1 << 10, LogWait::More).await?;
        let paged = sandbox.page_out().await?;
        sandbox.resume().await?;
        exec.write_input(None, b"\n", true).await?;
        exec.wait().await?;
        let text = exec.read(ready.next, 1 << 10, LogWait::More).await?;
        let text: Vec<u8> = text.pieces.into_iter().flat_map(|piece| piece.bytes).collect();
        Result::Ok((paged.bytes, text.starts_with(b"8388608")))
    };
    match tried.await {
        Err(error) => told(error),
        Ok((bytes, whole)) => {
            let detail = format!("{bytes} bytes went to swap, and came back");
            (bytes >= HELD && whole, detail, "please report this as a bug".to_owned())
        }
    }
}

/// Gives the sandbox a fiftieth of a CPU and something to compute, and asks the kernel whether it
/// held it back. The share against rivals is held by the same controller.
async fn throttle(sandbox: &LinuxSandbox, controller: &Controller) -> Option<bool> {
    /// On an idle host the first period of 100 ms shows it; on a busy one the spinner has to get its turn.
    const PATIENCE: Duration = Duration::from_secs(3);
    let instance = sandbox.instance();
    let (id, groups) = (sandbox.id(), || instance.groups());
    let set = |millis| groups().change(id, &limits::cpu_quota(controller, millis)).ok();
    let count = || groups().throttled(id, controller);
    set(Some(20))?;
    let before = count()?;
    let command = Command::new("/bin/sh").args(["-c", "while :; do :; done"]);
    let context = ExecContext::default();
    let held = async {
        while count().is_some_and(|now| now == before) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let throttled = tokio::select! {
        _ = sandbox.exec_report(&command, &context) => false,
        waited = tokio::time::timeout(PATIENCE, held) => waited.is_ok(),
    };
    set(None)?;
    Some(throttled && count()? > before)
}

/// Reports whether the core of a crash goes nowhere: at a limit of 1 no file is written and no program
/// of the host is started. A socket (Linux 6.16) knows no limit, and one of 0 cannot be raised to 1.
fn stays_inside(pattern: &str, hard_limit: Option<u64>) -> bool {
    match pattern.trim_start().chars().next() {
        Some('@') => false,
        Some('|') => hard_limit != Some(0),
        _ => true,
    }
}

/// Finds what to do about the step that failed.
fn fix_for(error: &str) -> &'static str {
    if error.contains("namespaces") {
        "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, \
         user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0; in a container, \
         run it with user namespaces allowed"
    } else if error.contains("Landlock") {
        "boot with Landlock in the list of security modules: lsm=landlock,..."
    } else if error.contains("/proc") {
        "this container masks its own /proc; run it without masks, or on the host"
    } else if error.contains("overlay") {
        "load the overlay module (modprobe overlay), Linux 5.11 or later"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c17_what_a_host_has_none_of_just_now_is_not_taken_for_what_it_lacks() {
        let step = |errno: Errno| SandboxError::step("clone", "/", errno.into());
        for errno in [Errno::AGAIN, Errno::NOMEM, Errno::NFILE, Errno::NOSPC] {
            assert!(passes(&step(errno)), "{errno}");
        }
        let after = Duration::from_secs(1);
        assert!(passes(&SandboxError::Timeout { what: "init".to_owned(), after }));
        for errno in [Errno::PERM, Errno::NOSYS, Errno::INVAL, Errno::USERS] {
            assert!(!passes(&step(errno)), "control: {errno}");
        }
        assert!(!unusable(&step(Errno::PERM)).is_usable());
    }

    #[test]
    fn only_a_socket_or_an_unbounded_pipe_takes_cores() {
        assert!(stays_inside("core\n", None) && stays_inside("/var/core/%e\n", Some(0)));
        assert!(stays_inside("|/usr/lib/handler %p\n", None));
        assert!(!stays_inside("|/usr/lib/handler %p\n", Some(0)));
        assert!(!stays_inside("@/run/coredump.sock\n", None));
    }
}
