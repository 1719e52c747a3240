//! 4.7: resources, and life and death.
//!
//! S14 and S15 need a suspend, which the library has: `crates/warren/tests/hostile.rs`. S8 is asked here of
//! one run; what of it is about the API is asked there.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, getrlimit, kill_process, setrlimit, waitpid,
};
use warren_sys::cgroup::Layout;

use crate::host::{Host, Place, Running, Who, descendants_of, finish};
use crate::processes::inside;

hostile! {
    a_fork_bomb_stops_at_the_limit_and_the_host_still_works,
    a_memory_bomb_ends_as_out_of_memory,
    shared_and_unmapped_memory_counts_too,
    a_limit_that_cannot_be_held_is_refused_and_not_weakened,
    one_quota_bounds_all_that_is_written_anywhere,
    spinning_sandboxes_leave_the_host_its_share,
    what_the_kernel_has_for_each_user_is_left_to_the_others,
    nothing_survives_the_client,
}

mod by_init {
    use super::*;
    hostile_by_init! {
        empty_files_run_out,
        descriptors_run_out,
        an_output_flood_to_a_stalled_reader_stays_bounded,
        a_storm_of_writes_reaches_no_disk,
        a_stopped_and_a_waiting_process_are_gone_with_their_sandbox,
        a_sandbox_is_not_spared_when_memory_runs_out,
        no_core_reaches_a_program_of_the_host,
        orphans_are_reaped,
        a_deep_directory_goes_with_its_sandbox,
        a_daemon_is_gone_with_its_command,
        a_daemon_is_gone_after_a_timeout,
        killing_everything_inside_ends_only_the_sandbox,
        wall_time_ends_one_who_hides,
    }
}

hostile_by_gvisor! {
    a_fork_bomb_stops_at_the_limit_and_the_host_still_works,
    a_memory_bomb_ends_as_out_of_memory,
    shared_and_unmapped_memory_counts_too,
    a_limit_that_cannot_be_held_is_refused_and_not_weakened,
    one_quota_bounds_all_that_is_written_anywhere,
    spinning_sandboxes_leave_the_host_its_share,
    what_the_kernel_has_for_each_user_is_left_to_the_others,
    nothing_survives_the_client,
    empty_files_run_out,
    descriptors_run_out,
    an_output_flood_to_a_stalled_reader_stays_bounded,
    a_storm_of_writes_reaches_no_disk,
    a_stopped_and_a_waiting_process_are_gone_with_their_sandbox,
    a_sandbox_is_not_spared_when_memory_runs_out,
    no_core_reaches_a_program_of_the_host,
    orphans_are_reaped,
    a_deep_directory_goes_with_its_sandbox,
    a_daemon_is_gone_with_its_command,
    a_daemon_is_gone_after_a_timeout,
    killing_everything_inside_ends_only_the_sandbox,
    wall_time_ends_one_who_hides,
    what_the_kernel_remembers_for_a_sandbox_is_charged_to_it,
    a_helper_that_wakes_late_still_clears_up_after_the_client,
    a_run_whose_helpers_were_killed_still_ends_and_clears_up,
    killing_init_from_outside_ends_the_run,
    a_reader_that_never_reads_holds_up_nobody,
    huge_and_odd_arguments_get_through_or_a_clean_error,
    cpu_time_is_counted_over_all_processes,
    output_is_bytes_and_never_drives_the_callers_terminal,
}

mod with_namespaces {
    use super::*;
    hostile_in_namespaces! {
        what_the_kernel_remembers_for_a_sandbox_is_charged_to_it,
        a_helper_that_wakes_late_still_clears_up_after_the_client,
        a_run_whose_helpers_were_killed_still_ends_and_clears_up,
        killing_init_from_outside_ends_the_run,
    }
}

mod long {
    use super::*;
    hostile_by_linux! {
        a_reader_that_never_reads_holds_up_nobody,
        huge_and_odd_arguments_get_through_or_a_clean_error,
        cpu_time_is_counted_over_all_processes,
        wall_time_ends_a_sleeper,
        output_is_bytes_and_never_drives_the_callers_terminal,
    }
    hostile_at_once! {
        a_process_that_nothing_ends_does_not_hold_up_its_client,
    }
}

/// How long a process of the host takes to be started and to end, as a rule.
fn spawn_time() -> Duration {
    let spawn = |_| {
        let start = Instant::now();
        assert!(Command::new("true").status().unwrap().success());
        start.elapsed()
    };
    let mut times: Vec<_> = (0..21).map(spawn).collect();
    times.sort();
    times[10]
}

// S1: pids cgroup, or RLIMIT_NPROC
fn a_fork_bomb_stops_at_the_limit_and_the_host_still_works(host: &Host) {
    let control = host.bare().ask("forks 200");
    assert_eq!((control.result.as_str(), control.number("count")), ("OK", 200), "control");
    let roomy = of_so_many(host, 300).ask("forks 200");
    assert_eq!(
        (roomy.result.as_str(), roomy.number("count")),
        ("OK", 200),
        "control: below the limit"
    );
    let tight = of_so_many(host, 32).ask("forks 200");
    assert_eq!(tight.result, "EAGAIN", "{tight:?}");
    if host.has_own_kernel() {
        // It lets some more through at times, and so nothing better is said of it.
        let report = of_so_many(host, 32).report(&["true"]).0;
        let limits = report["enforced"]["limits"].as_array().unwrap();
        let held = limits.iter().find(|limit| limit["limit"] == "processes").unwrap();
        assert_eq!(held["bound"], "nearest", "{report:#}");
    } else {
        assert!(tight.number("count") <= 32, "{tight:?}");
    }
    let default = host.sandbox().ask("forks 2000");
    assert_eq!(default.result, "EAGAIN", "a limit without asking: {default:?}");
    // One limit for each: what a neighbour uses up is not missing here.
    let neighbour = of_so_many(host, 32).start(&["wait-eof"]);
    let beside = of_so_many(host, 32).ask("forks 20");
    assert_eq!(beside.result, "OK", "{beside:?}");
    drop(neighbour);
    if !host.is_thorough() {
        return;
    }
    let before = spawn_time();
    let bomb = of_so_many(host, 64).with("--timeout 3s");
    let line = bomb.probe_line(&["bomb"]);
    let command = bomb.clone().flag("--json").command(&line);
    let running = thread::spawn(move || finish(command));
    thread::sleep(Duration::from_millis(1500));
    let during = spawn_time();
    assert!(!running.is_finished(), "control: all the while the bomb went off");
    let ended = running.join().unwrap();
    eprintln!("a process of the host starts in {before:?}, during a fork bomb in {during:?}");
    // The bomb has the weight of one process for each CPU. Other work on the host may come and go between
    // the two measurements, so this is no measure of speed: without a limit it is seconds, or never.
    assert!(during < 50 * before.max(Duration::from_millis(1)), "{during:?} is not {before:?}");
    assert!(ended.took < Duration::from_secs(15), "{ended:?}");
    let report: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
    let cause = report["cause"]["kind"].as_str().unwrap();
    assert!(["timed_out", "too_many_processes"].contains(&cause), "{report:#}");
}

/// A sandbox of so many processes. A kernel of its own does not hold that exactly, which has to be accepted.
fn of_so_many(host: &Host, processes: u32) -> Place<'_> {
    let sandbox = host.sandbox().with(&format!("--pids {processes}"));
    let nearly = host.has_own_kernel() || host.is_callers_own();
    if nearly { sandbox.with("--accept-missing processes") } else { sandbox }
}

/// A sandbox with 64 MiB. A plain user without a cgroup has to accept that init watches it.
fn small_memory(host: &Host) -> Place<'_> {
    let sandbox = host.sandbox().with("--memory 64M --timeout 30s");
    let watched = host.who() == Who::Nobody || host.has_own_kernel();
    if watched { sandbox.with("--accept-missing memory") } else { sandbox }
}

/// How a bomb goes off: slowly enough for one who looks from time to time, unless it is the kernel that looks.
fn pace(host: &Host) -> &'static str {
    let watched = host.who() == Who::Nobody || host.has_own_kernel();
    if watched { "" } else { " hurry" }
}

// S2: memory cgroup, or init watches
fn a_memory_bomb_ends_as_out_of_memory(host: &Host) {
    let pace = pace(host);
    host.bare().allows(&[format!("eat 128 1{pace}"), format!("eat 128 16{pace}")]);
    let sandbox = small_memory(host);
    for small in ["eat 24 1", "eat 24 6"] {
        let report = sandbox.probe_report(&format!("{small}{pace}"));
        assert_eq!(
            (report.cause(), report.code()),
            ("exited", 0),
            "control: in the limit: {report:#?}"
        );
    }
    let default = host.sandbox().with("--timeout 60s");
    let places = [(&sandbox, "128"), (&default, "600")];
    for (place, mib) in places.into_iter().take(if host.is_thorough() { 2 } else { 1 }) {
        let line = format!("{} direct eat {mib} 1{pace}", host.at("probe"));
        let one = place.report(&line.split(' ').collect::<Vec<_>>());
        // An rlimit on each process may speak before the watch over all of them does.
        let watched = host.who() == Who::Nobody || host.has_own_kernel();
        let refused = watched && one.stdout().contains("result=ENOMEM");
        assert!(one.cause() == "out_of_memory" || refused, "{mib} MiB in one process: {one:#?}");
    }
    let many = sandbox.probe_report(&format!("eat 128 16{pace}"));
    assert_eq!(many.cause(), "out_of_memory", "{many:#?}");
}

// S2: memory cgroup, or no memfd and no SysV segments
fn shared_and_unmapped_memory_counts_too(host: &Host) {
    let mut wrong = vec![];
    // Segments are nobody's where all sandboxes would share them; one kind will do where a cgroup counts them all.
    let kinds: &[_] = match (host.is_thorough(), host.has_namespaces()) {
        (true, _) => &["shared", "memfd", "sysv", "dropped"],
        (false, true) => &["memfd", "sysv"],
        (false, false) => &["shared", "memfd"],
    };
    let pace = pace(host);
    for &kind in kinds {
        host.bare().allows(&[format!("eat-hidden {kind} 128{pace}")]);
        let within = small_memory(host).probe_report(&format!("eat-hidden {kind} 24{pace}"));
        // Without a cgroup nobody sees memory that no process has mapped, so there is none.
        let watched = host.who() == Who::Nobody || host.has_own_kernel();
        let none = watched && ["memfd", "sysv"].contains(&kind);
        let expected = if none { "result=ENOSYS" } else { "result=OK" };
        assert!(within.stdout().contains(expected), "control: in the limit: {within:#?}");
        let line = format!("{} direct eat-hidden {kind} 128{pace}", host.at("probe"));
        let report = small_memory(host).report(&line.split(' ').collect::<Vec<_>>());
        if host.who() == Who::Nobody && kind == "dropped" {
            // Nobody but a cgroup can count this, and nothing says otherwise: SECURITY.md.
            let text = report.0["enforced"]["limits"].to_string();
            assert!(text.contains("nobody has mapped any more is not seen"), "{text}");
            assert!(text.contains("nearest"), "{text}");
            continue;
        }
        // Ended, or refused at some point below: anything but 128 MiB under a limit of 64.
        if report.cause() != "out_of_memory" && !report.stdout().contains("result=E") {
            wrong.push(format!("{kind}: {}, {}", report.cause(), report.stdout()));
        }
    }
    assert!(wrong.is_empty(), "128 MiB under a limit of 64:\n{}", wrong.concat());
}

// T14: refused before anything is made
fn a_limit_that_cannot_be_held_is_refused_and_not_weakened(host: &Host) {
    let asked = host.sandbox().with("--memory 64M");
    let ended = asked.run(&["true"]);
    if ended.code == Some(0) {
        let report = asked.report(&["true"]).0;
        let limits = report["enforced"]["limits"].as_array().unwrap();
        let memory = limits.iter().find(|limit| limit["limit"] == "memory").unwrap();
        assert_eq!(memory["bound"], "exact", "asked for and started, so it is held: {report:#}");
    } else {
        let watched = host.who() == Who::Nobody || host.has_own_kernel();
        assert!(watched, "control: root has cgroups: {ended:?}");
        ended.assert_clean_error("a limit that a plain user cannot have");
        assert!(
            ended.stderr.contains("--accept-missing memory"),
            "the way out is named: {ended:?}"
        );
    }
    let accepted = small_memory(host).report(&["true"]);
    assert_eq!(accepted.cause(), "exited", "control: {accepted:#?}");
}

/// Where what is written is on the host's disk, under a limit on each file.
fn each_file_is_bounded_and_all_together_are_not(host: &Host) {
    let refused = host.sandbox().with("--disk 1M").run(&["true"]);
    refused.assert_clean_error("a quota that is asked for and cannot be held");
    let sandbox = host.sandbox().with("--disk 1M --accept-missing write");
    let large = sandbox.run(&["sh", "-c", "head -c 2000000 /dev/zero > large"]);
    assert_ne!(large.code, Some(0), "one file: {large:?}");
    let several = "for n in 1 2 3; do head -c 1000000 /dev/zero > $n; done";
    assert_eq!(sandbox.run(&["sh", "-c", several]).code, Some(0), "all together are not bounded");
    host.not_promised("limits");
}

// S3: the size of one tmpfs
fn one_quota_bounds_all_that_is_written_anywhere(host: &Host) {
    let places =
        "/workspace /tmp /dev/shm /home/user /var/tmp /run /var /etc /dev /dev/mqueue / /usr /mnt";
    if !host.has_namespaces() {
        return each_file_is_bounded_and_all_together_are_not(host);
    }
    let fill = |quota: &str| {
        let place = host.sandbox().with(&format!("--disk {quota}"));
        place.ask(&format!("fill 200 {places}"))
    };
    let control = host.bare().ask(&format!("fill 40 {}", host.at("home")));
    assert_eq!(control.result, "OK", "control: on the host there is room: {control:?}");
    fs::remove_file(host.path("home/fill")).unwrap();
    let small = fill("16M");
    assert!(["ENOSPC", "EDQUOT", "EFBIG"].contains(&small.result.as_str()), "{small:?}");
    assert!(small.number("opened") >= 4, "it found places to write to: {small:?}");
    assert!(small.number("total") <= 17 << 20, "more than one quota of 16 MiB: {small:?}");
    let large = fill("48M");
    assert!(large.number("total") <= 49 << 20, "more than one quota of 48 MiB: {large:?}");
    assert!(large.number("total") >= 32 << 20, "control: a larger quota holds more: {large:?}");
    let report = host.sandbox().with("--disk 16M").report(&[
        "/bin/sh",
        "-c",
        "cat /dev/zero > /workspace/x",
    ]);
    assert!(["disk_quota", "exited"].contains(&report.cause()), "{report:#?}");
    assert_ne!(report.code(), 0, "{report:#?}");
}

// S4: the inodes of one tmpfs
fn empty_files_run_out(host: &Host) {
    if !host.has_namespaces() {
        // On a disk of the host, where nobody counts them: not tried to the end.
        host.sandbox().allows(&["many-files . 1000"]);
        return host.not_promised("limits");
    }
    let dirs = ["/workspace", "/tmp", "/dev/shm", "/home/user"];
    for dir in dirs.into_iter().take(if host.is_thorough() { 4 } else { 1 }) {
        host.sandbox().allows(&[format!("many-files {dir} 1000")]);
        // There is one for each half page of the quota: a smaller one has fewer, and is as soon full.
        let flags = if host.is_thorough() { "--timeout 60s" } else { "--timeout 60s --disk 16M" };
        let answer = host.sandbox().with(flags).ask(&format!("many-files {dir} 150000"));
        assert!(["ENOSPC", "EDQUOT"].contains(&answer.result.as_str()), "{dir}: {answer:?}");
    }
}

// S5: RLIMIT_NOFILE
fn descriptors_run_out(host: &Host) {
    let control = host.bare().ask("open-many");
    assert!(control.number("count") > 512, "control: the host's limit is higher: {control:?}");
    let default = host.sandbox().ask("open-many");
    assert_eq!(default.result, "EMFILE");
    assert!(default.number("count") <= 256, "{default:?}");
    let tight = host.sandbox().with("--open-files 64").ask("open-many");
    assert!(tight.result == "EMFILE" && tight.number("count") <= 64, "{tight:?}");
    let roomy = host.sandbox().with("--open-files 400").ask("open-many");
    assert!(roomy.number("count") > 300, "control: the limit is the one asked for: {roomy:?}");
    if !host.is_thorough() {
        return;
    }
    let hoard = of_so_many(host, 250).with("--timeout 20s").ask("hoard 200");
    assert_eq!(hoard.number("processes"), 200, "{hoard:?}");
    fs::read("/proc/self/status").unwrap();
}

/// A control group of the host for the CPU alone, with this weight against others. What else the session of the tests runs has
/// a share of its own, and does not count against who is in here.
struct CpuGroup(PathBuf);

impl CpuGroup {
    /// In the scale of v2, where the usual weight is 100.
    fn of_weight(weight: u64) -> Self {
        let layout = Layout::detect().unwrap();
        let name = format!("hostile-{}-{weight}", std::process::id());
        let (group, file, value) = match (layout.v1("cpu"), &layout.v2) {
            (Some(v1), _) => (v1.own.join(name), "cpu.shares", weight * 1024 / 100),
            (None, Some(v2)) => (v2.mount.join(name), "cpu.weight", weight),
            (None, None) => panic!("this host has no control groups"),
        };
        fs::create_dir(&group).unwrap();
        let group = Self(group);
        fs::write(group.0.join(file), value.to_string()).unwrap();
        group
    }

    /// What to put around a command that is to run in here.
    fn around(&self) -> [String; 4] {
        let enter = format!("echo $$ > {}/cgroup.procs; exec \"$@\"", self.0.display());
        ["sh", "-c", &enter, "sh"].map(str::to_owned)
    }
}

impl Drop for CpuGroup {
    fn drop(&mut self) {
        drop(warren_sys::cgroup::remove(&self.0, Duration::from_secs(10)));
    }
}

/// The CPU time so far of every process that this test started and that lives.
fn spent() -> Duration {
    let own = i32::try_from(std::process::id()).unwrap();
    let ticks = |pid: i32| -> Option<u64> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
        Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
    };
    let ticks: u64 = descendants_of(own).into_iter().filter_map(ticks).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// How much of a CPU somebody has who wants all of it, and each of `count` sandboxes that want it too.
fn shares(place: &Place<'_>, count: u32, time: Duration) -> (f64, f64) {
    let (before, start) = (spent(), Instant::now());
    let answer = place.ask(&format!("spin {}", time.as_millis()));
    let took = start.elapsed().as_secs_f64();
    let theirs = spent().saturating_sub(before).as_secs_f64() / f64::from(count);
    let own = Duration::from_millis(answer.number("cpu_ms")).as_secs_f64();
    (own / took, theirs / took)
}

// S6: cpu cgroup, or nice
fn spinning_sandboxes_leave_the_host_its_share(host: &Host) {
    let count = if host.is_thorough() { 32 } else { 6 };
    let (group, low) = (CpuGroup::of_weight(100), CpuGroup::of_weight(3));
    let aside = host.bare().within(group.around());
    // Who has no control groups runs in ours, as does whoever asks: there they are processes like any other.
    let (sandbox, held_down) = match host.who() {
        Who::Nobody => {
            (host.sandbox().within(group.around()), aside.clone().around(["nice", "-n", "19"]))
        }
        _ => (host.sandbox(), host.bare().within(low.around())),
    };
    let start =
        |_| sandbox.clone().with("--timeout 60s").start_first(&["wait-eof", "spin 50000"], 1);
    let mut spinners: Vec<_> = (0..count).map(start).collect();
    spinners.iter_mut().for_each(|spinner| drop(spinner.child.stdin.take()));
    // To be one among many is to have what each of them has. Where they are placed is chance, so not every moment counts.
    let mut seen = vec![];
    let is_fair = |seen: &[(f64, f64)]| {
        let sum = |of: fn(&(f64, f64)) -> f64| seen.iter().map(of).sum::<f64>();
        sum(|(own, _)| *own) >= sum(|(_, theirs)| *theirs) / 2.0
    };
    for _ in 0..6 {
        seen.push(shares(&aside, count, Duration::from_millis(500)));
        if is_fair(&seen) {
            break;
        }
    }
    let control = shares(&held_down, count, Duration::from_millis(300));
    for mut spinner in spinners {
        spinner.child.kill().unwrap();
    }
    eprintln!(
        "a host process, and each of {count} sandboxes: {seen:.2?}; held down: {control:.2?}"
    );
    if host.is_callers_own() && !is_fair(&seen) {
        // Its init, which looks through all of /proc now and then, takes as much beside each command.
        return host.not_promised("limits");
    }
    assert!(is_fair(&seen), "less than half of what each sandbox has: {seen:.2?}");
    let spins = seen.iter().all(|(_, theirs)| *theirs > 0.1 / f64::from(count));
    assert!(spins, "control: the sandboxes do spin: {seen:.2?}");
    assert!(!is_fair(&[control]), "control: one that is held down has less: {control:.2?}");
}

fn peak_kib(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.map_or(0, |l| l.trim().trim_end_matches(" kB").parse().unwrap())
}

// S7: pipes of fixed size
fn an_output_flood_to_a_stalled_reader_stays_bounded(host: &Host) {
    for fd in ["1", "2"] {
        let place = host.sandbox().with("--max-output 1M --timeout 30s");
        let report = place.probe_report(&format!("flood 1024 {fd}"));
        assert_eq!(report.cause(), "output_limit", "fd {fd}: {:?}", report.0["cause"]);
        let key = if fd == "1" { "stdout" } else { "stderr" };
        let kept = report.0[key].as_str().unwrap().len();
        assert!(kept > 100_000 && kept <= (1 << 20) + 4096, "fd {fd}: {kept} bytes kept");
    }
    let control = host.sandbox().with("--max-output 1M").probe_report("all-bytes 100");
    assert_eq!(control.cause(), "exited", "control: a little output is no flood");
    if !host.is_thorough() {
        return;
    }
    let place = host.sandbox().with("--max-output 1M --timeout 20s");
    let mut command = place.command(&place.probe_line(&["flood 1024 1"]));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    thread::sleep(Duration::from_secs(2));
    let all: Vec<_> =
        descendants_of(pid).into_iter().chain([pid]).map(|p| (p, peak_kib(p))).collect();
    assert!(all.iter().all(|(_, kib)| *kib < 64 << 10), "nobody hoards what is not read: {all:?}");
    let mut bytes = vec![];
    child.stdout.take().unwrap().read_to_end(&mut bytes).unwrap();
    child.wait().unwrap();
    assert!(bytes.len() <= (1 << 20) + (128 << 10), "{} bytes got out of 1 MiB", bytes.len());
}

// S8: pipes of fixed size
fn a_reader_that_never_reads_holds_up_nobody(host: &Host) {
    let (streams, time) = if host.is_thorough() { (2, 4) } else { (1, 2) };
    let place = host.sandbox().with(&format!("--max-output none --timeout {time}s"));
    let read = place.run(&place.probe_line(&["flood 8 1"]));
    assert_eq!(read.stdout.len(), 8 << 20, "control: to one who reads all of it flows");
    for fd in ["1", "2"].into_iter().take(streams) {
        let mut command = place.command(&place.probe_line(&[format!("flood 1024 {fd}")]));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let start = Instant::now();
        thread::sleep(Duration::from_millis(1500));
        assert!(child.try_wait().unwrap().is_none(), "control: it stands still, full");
        let beside = host.sandbox().run(&["echo", "here"]);
        assert_eq!(beside.text(), "here\n", "a neighbour is not held up: {beside:?}");
        let all: Vec<_> =
            descendants_of(pid).into_iter().chain([pid]).map(|p| (p, peak_kib(p))).collect();
        assert!(inside(host, pid).len() >= 2, "control: init and the probe: {all:?}");
        assert!(all.iter().all(|(_, kib)| *kib < 64 << 10), "nobody hoards: {all:?}");
        // Nobody ever reads, and the sandbox ends all the same, in its own time. What is left is the
        // client with a pipe full of output, as with any program whose reader has stopped.
        while !inside(host, pid).is_empty() {
            assert!(start.elapsed() < Duration::from_secs(20), "fd {fd}: it outlives its time");
            thread::sleep(Duration::from_millis(10));
        }
        assert!(child.try_wait().unwrap().is_none(), "control: nobody has read yet");
        drop((child.stdout.take(), child.stderr.take()));
        assert_eq!(child.wait().unwrap().code(), Some(124), "fd {fd}");
    }
}

// S17: ids of its own, or limits of the user namespace
fn what_the_kernel_has_for_each_user_is_left_to_the_others(host: &Host) {
    let roomy = || host.sandbox().with("--open-files 1000 --timeout 60s");
    if host.is_callers_own() {
        let held = roomy().start(&["hold-inotify"]);
        assert_eq!(host.bare().ask("inotify").result, "EMFILE", "one account: {:?}", held.ready);
        return host.not_promised("an account of its own");
    }
    for (hold, one) in [("hold-inotify", "inotify"), ("hold-signals", "queue-signal")] {
        // Control: on the host one process of a user takes it from all others of that user.
        let held = host.bare().start(&[hold]);
        assert!(["EMFILE", "EAGAIN"].contains(&held.ready[0].result.as_str()), "{:?}", held.ready);
        assert_ne!(host.bare().ask(one).result, "OK", "control: there is one account: {one}");
        drop(held);
        host.bare().allows(&[one]);
        let held = roomy().start(&[hold]);
        let took = held.ready[0].number("count");
        assert!(took >= 16, "control: inside it took what there is: {:?}", held.ready);
        roomy().allows(&[one]);
        host.bare().allows(&[one]);
        drop(held);
    }
    // Pipes are the user's: a sandbox of root's has a user of its own, one of a plain user's has not.
    let least = |place: &Place<'_>| place.ask("pipe").number("size");
    assert_eq!(least(&host.bare()), 65536, "control: a pipe as it should be");
    // Each call takes its time on a kernel of its own.
    let (pipes, epolls) = if host.has_own_kernel() { (2, 2) } else { (40, 50) };
    let held = roomy().start(&[format!("hold-pipes {pipes}")]);
    // A kernel of its own has no such account, and keeps pipes in memory that is counted.
    let used_up = held.ready[0].number("least") < 65536 || host.has_own_kernel();
    assert!(used_up, "control: it used them up: {:?}", held.ready);
    let own_user = host.who() == Who::Root;
    for size in [least(&host.bare()), least(&roomy())] {
        assert!(size == 65536 || (!own_user && size >= 4096), "{size}");
    }
    drop(held);
    // Watches of epoll are the user's, too, and take memory: whichever ends first is the bound.
    let watches = |place: &Place<'_>| {
        let mut command = place.command(&place.probe_line(&[format!("hold-epoll {epolls}")]));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    };
    let mut greedy = watches(&host.sandbox().with("--timeout 60s"));
    let mut line = String::new();
    BufReader::new(greedy.stdout.take().unwrap()).read_line(&mut line).unwrap();
    eprintln!("watches of epoll in one sandbox: {line}");
    host.bare().allows(&["epoll"]);
    host.sandbox().allows(&["epoll"]);
    drop(greedy.stdin.take());
    greedy.wait().unwrap();
}

// S17: everything written is in a tmpfs
fn a_storm_of_writes_reaches_no_disk(host: &Host) {
    let disk = host.open_dir("disk");
    let control = host.bare().ask(&format!("storm {disk} 300"));
    assert!(control.number("disk_bytes") > 0, "control: on the host it does: {control:?}");
    if !host.has_namespaces() {
        let inside = host.sandbox().ask("storm . 300");
        assert!(inside.number("disk_bytes") > 0, "its files are on a disk: {inside:?}");
        return host.not_promised("limits");
    }
    let dirs = ["/workspace", "/tmp", "/dev/shm", "/home/user", "/var/tmp"];
    for dir in dirs.into_iter().take(if host.is_thorough() { 5 } else { 1 }) {
        let inside = host.sandbox().ask(&format!("storm {dir} 300"));
        assert_eq!((inside.result.as_str(), inside.number("disk_bytes")), ("OK", 0), "{dir}");
        assert!(inside.number("rounds") > 10, "control: it did write and sync: {inside:?}");
    }
}

// S18: PID 1 killed; cgroup.kill
fn a_stopped_and_a_waiting_process_are_gone_with_their_sandbox(host: &Host) {
    let ways = [("default", "stopped", ("D", "T")), ("permissive", "traced", ("D", "t"))];
    let (ways, time) = if host.is_thorough() { (&ways[..], 2) } else { (&ways[1..], 1) };
    for &(profile, how, states) in ways {
        let sandbox = host.sandbox().with(&format!("--profile {profile} --timeout {time}s"));
        let ended = sandbox.run(&sandbox.probe_line(&[format!("stuck {how}")]));
        let (parent, child) = states;
        let expected = format!("parent={parent} child={child}");
        assert!(ended.text().contains(&expected), "control: they are stuck: {ended:?}");
        assert_eq!(ended.code, Some(124), "{ended:?}");
        assert!(ended.took < Duration::from_secs(8), "{how}: {ended:?}");
        // The same when the client is killed and nobody is there to be asked.
        let mut running = sandbox.start(&[format!("stuck {how}")]);
        assert!(with_tag(host, "stuck").len() >= 3, "control: they run");
        running.signal(Signal::KILL);
        running.wait_only();
        wait_until_gone(host, "stuck", how);
    }
}

// S18: a process that waits for a file system is not ended by SIGKILL either
fn a_process_that_nothing_ends_does_not_hold_up_its_client(host: &Host) {
    let dir = host.open_dir("dead");
    let dead = host.bare_root().start(&[format!("dead-fuse {dir}")]);
    assert_eq!(dead.ready[0].result, "OK", "control: {:?}", dead.ready);
    let place = host.sandbox().with(&format!("--ro {dir} --timeout 1s"));
    let alive = place.run(&["echo", "here"]);
    assert_eq!(alive.text(), "here\n", "control: to have it bound is no harm: {alive:?}");
    let mut command = place.command(&["cat", &format!("{dir}/name")]);
    let start = Instant::now();
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    thread::sleep(Duration::from_millis(2500));
    let state = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // On a kernel of its own it is not the command that waits there, but who holds its files, and nobody tells it to end
    // before the sandbox does.
    let waits = |pid: &i32| host.has_own_kernel() || state(pid).contains(") D ");
    let stuck: Vec<_> = inside(host, pid).into_iter().filter(waits).collect();
    assert!(!stuck.is_empty(), "control: its time is over, and it is still there");
    let beside = host.sandbox().run(&["echo", "here"]);
    assert_eq!(beside.text(), "here\n", "a neighbour is not held up: {beside:?}");
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(start.elapsed() < Duration::from_secs(40), "the client hangs with it");
        thread::sleep(Duration::from_millis(20));
    };
    assert_ne!(status.code(), Some(0), "what could not be removed is not reported as success");
    // When the file system goes, so does what waited for it, and nothing is left after that.
    dead.end();
}

/// Reads a number from a file of the memory cgroup that a process is in, whichever version has it.
fn memory_of(pid: i32, files: [&str; 2]) -> u64 {
    let own = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let at = |line: &str| line.rsplit_once(':').unwrap().1.to_owned();
    let v1 = own.lines().find(|line| line.contains(":memory:")).map(at);
    let v2 = own.lines().find(|line| line.starts_with("0::")).map(at);
    let paths = [v1.map(|p| format!("/sys/fs/cgroup/memory{p}/{}", files[0]))]
        .into_iter()
        .chain([v2.map(|p| format!("/sys/fs/cgroup{p}/../{}", files[1]))])
        .flatten();
    let text =
        paths.filter_map(|path| fs::read_to_string(path).ok()).next().expect("a memory cgroup");
    let slab = text.lines().find_map(|line| line.strip_prefix("slab "));
    slab.unwrap_or(&text).trim().parse().unwrap()
}

// S19: memory cgroup
fn what_the_kernel_remembers_for_a_sandbox_is_charged_to_it(host: &Host) {
    const MIB: u64 = 1 << 20;
    if host.who() == Who::Nobody {
        // Without a cgroup of its own a sandbox is charged where its caller is, and its quota bounds it.
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let running = host.sandbox().with("--disk 16M").start(&["fill 64 /tmp", "wait-eof"]);
        assert!(running.ready[0].number("total") <= 17 * MIB, "{:?}", running.ready);
        let inside = *descendants_of(running.pid()).last().unwrap();
        let its = fs::read_to_string(format!("/proc/{inside}/cgroup")).unwrap();
        assert_eq!(its, own, "charged to the caller");
        return;
    }
    let charged = |cases: &[&str]| {
        let place = host.sandbox().with("--memory 400M --disk 200M");
        let place =
            if host.has_own_kernel() { place.with("--accept-missing memory") } else { place };
        let running = place.start(cases);
        let inside = *descendants_of(running.pid()).last().unwrap();
        let pages = memory_of(inside, ["memory.usage_in_bytes", "memory.current"]);
        let names = memory_of(inside, ["memory.kmem.usage_in_bytes", "memory.stat"]);
        (pages / MIB, names / MIB, peak_kib(running.pid()) >> 10)
    };
    let idle = charged(&["wait-eof"]);
    let pages = charged(&["fill 100 /tmp", "wait-eof"]);
    assert!(pages.0 >= idle.0 + 90, "100 MiB of files: {pages:?}, idle {idle:?}");
    if !host.is_thorough() {
        return;
    }
    let names = charged(&["look-up /workspace 200000", "wait-eof"]);
    eprintln!(
        "MiB of pages, names, and client: idle {idle:?}, 100 MiB {pages:?}, 200000 names {names:?}"
    );
    assert!(idle.0 < 50, "control: an idle one holds little: {idle:?}");
    assert!(names.1 >= idle.1 + 20, "200000 names that are not there: {names:?}, idle {idle:?}");
    assert!(pages.2 < 64, "nor is it the client's: {pages:?}");
}

// R4: review of a daemon that is spared by the OOM killer
fn a_sandbox_is_not_spared_when_memory_runs_out(host: &Host) {
    let score = |place: Place<'_>, score: &str| {
        let is_bare = place.is_bare();
        let place =
            place.around(["/bin/sh", "-c", "echo $0 > /proc/self/oom_score_adj; \"$@\"", score]);
        if host.has_own_kernel() && !is_bare {
            // What that kernel says is its own business; the host's asks its processes.
            let running = place.start(&["wait-eof"]);
            let score =
                |pid: i32| fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
            let its = inside(host, running.pid()).into_iter();
            return its.map(|pid| score(pid).trim().parse().unwrap()).min().unwrap();
        }
        place.ask("read /proc/self/oom_score_adj").field("text").parse::<i32>().unwrap()
    };
    assert_eq!(score(host.bare(), "300"), 300, "control: a score is inherited");
    assert_eq!(score(host.sandbox(), "300"), 300, "what the caller is ready to lose stays so");
    // Only one with CAP_SYS_RESOURCE can be spared at all.
    let spared = score(host.bare_root(), "-500");
    eprintln!("a host that lets root have -500 gives it {spared}");
    let inside = score(host.sandbox(), "-500");
    assert!(inside >= 0, "it is spared: {inside}");
}

/// Has the host pipe cores to a program, until this goes. A helper puts it back should we be killed.
struct CorePattern(std::process::Child);

impl CorePattern {
    fn pipe_to(program: &str) -> Self {
        let before = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
        let script = "read go; printf %s \"$0\" > /proc/sys/kernel/core_pattern";
        let mut helper = Command::new("setsid");
        helper.args(["sh", "-c", script, before.trim_end()]).stdin(Stdio::piped());
        let helper = Self(helper.spawn().unwrap());
        fs::write("/proc/sys/kernel/core_pattern", format!("|{program}")).unwrap();
        helper
    }
}

impl Drop for CorePattern {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

// P1: core(5), piping to a program, bounded by no limit but 1
fn no_core_reaches_a_program_of_the_host(host: &Host) {
    let (cores, sink) = (host.open_dir("cores"), host.at("sink"));
    host.file("sink", 0o755, &format!("#!/bin/sh\ncat > /dev/null; echo x > {cores}/$1\n"));
    let probe = host.at("probe");
    let before = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    let pattern = CorePattern::pipe_to(&format!("{sink} %s-%u-%e"));
    let came = || {
        thread::sleep(Duration::from_millis(if host.is_thorough() { 700 } else { 350 }));
        let names = fs::read_dir(&cores).unwrap().flatten().map(|e| e.file_name());
        let names: Vec<_> = names
            .filter(|n| {
                n.to_string_lossy().starts_with("6-") && n.to_string_lossy().ends_with("-probe")
            })
            .collect();
        fs::read_dir(&cores).unwrap().flatten().for_each(|e| fs::remove_file(e.path()).unwrap());
        names
    };
    let crash = |place: &Place<'_>, how: &str| {
        let ended = place.run(&[&probe, "direct", "crash", how]);
        assert!(ended.text().contains("crash result=OK"), "it was made to crash: {ended:?}");
    };
    let ways = ["as-is", "lowered"];
    for how in ways.into_iter().take(if host.is_thorough() { 2 } else { 1 }) {
        crash(&host.bare(), how);
        assert_eq!(came().len(), 1, "control: on the host its core is piped, limit or not: {how}");
        for profile in host.profiles() {
            crash(&host.sandbox().with(&format!("--profile {profile}")), how);
            let came = came();
            assert!(came.is_empty(), "{profile}, {how}: {came:?}");
        }
    }
    drop(pattern);
    assert_eq!(fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap(), before);
}

// S9: init
fn orphans_are_reaped(host: &Host) {
    let control = host.sandbox().ask("zombie").number("zombies");
    let answer = host.sandbox().ask("orphans 150");
    if !host.has_namespaces() {
        // The host's are seen too, and come and go.
        assert!(control >= 1, "control: the probe sees a zombie");
        assert!(answer.number("zombies") < control + 75, "{answer:?}");
        return host.not_promised("hidden processes");
    }
    assert_eq!(control, 1, "control: the probe sees a zombie");
    assert_eq!((answer.number("orphans"), answer.number("zombies")), (150, 0), "{answer:?}");
}

// S10: the tmpfs goes with its namespace
fn a_deep_directory_goes_with_its_sandbox(host: &Host) {
    let dirs: &[_] = if host.is_thorough() { &["/workspace", "/tmp"] } else { &[host.workspace()] };
    for dir in dirs {
        let sandbox = host.sandbox().with("--timeout 60s");
        let levels = if host.is_thorough() { 2500 } else { 1000 };
        let line = sandbox.probe_line(&[format!("deep {dir} {levels}")]);
        let ended = sandbox.run(&line);
        let deep = format!("levels={levels}");
        assert!(ended.text().contains(&deep), "control: up to 500 kB deep: {ended:?}");
        assert!(ended.took < Duration::from_secs(20), "{ended:?}");
    }
}

/// The processes with this text in their command line. What runs on a kernel of its own has none on the host: there
/// all that is left of any sandbox counts.
fn with_tag(host: &Host, tag: &str) -> Vec<i32> {
    let own = i32::try_from(std::process::id()).unwrap();
    if host.has_own_kernel() && !inside(host, own).is_empty() {
        return inside(host, own);
    }
    let of_ours = descendants_of(own).into_iter();
    of_ours
        .filter(|pid| {
            let text = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&text).contains(tag)
        })
        .collect()
}

// S11: PID 1 killed; a cgroup for each exec
fn a_daemon_is_gone_with_its_command(host: &Host) {
    let answer = host.bare().ask("daemon s11-control");
    let left = with_tag(host, "s11-control");
    assert_eq!(left.len(), 1, "control: on the host it stays: {answer:?}");
    let pid = Pid::from_raw(left[0]).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    let ended = host.sandbox().run(&host.sandbox().probe_line(&["daemon s11-inside"]));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.text().contains("result=OK"), "control: it was started: {ended:?}");
    assert_eq!(with_tag(host, "s11-inside"), [0; 0], "a daemon is left when the run is over");
}

// S11: PID 1 killed; a cgroup for each exec
fn a_daemon_is_gone_after_a_timeout(host: &Host) {
    let sandbox = host.sandbox().with("--timeout 1s");
    let cases = ["daemon s11-late", "stubborn 3"];
    let ended = sandbox.run(&sandbox.probe_line(&cases));
    assert_eq!(ended.code, Some(124), "{ended:?}");
    assert!(ended.took < Duration::from_secs(6), "{ended:?}");
    assert!(ended.text().contains("daemon result=OK"), "control: it was started: {ended:?}");
    assert_eq!(with_tag(host, "s11-late"), [0; 0], "a daemon is left when the run is over");
    if !host.is_thorough() {
        return;
    }
    let report = sandbox.report(&sandbox.probe_line(&cases));
    assert_eq!(report.cause(), "timed_out", "{report:#?}");
    assert!(report.stdout().contains("daemon result=OK"), "the output so far is kept: {report:#?}");
}

fn wait_until_gone(host: &Host, tag: &str, what: &str) {
    let start = Instant::now();
    while !with_tag(host, tag).is_empty() {
        let left = with_tag(host, tag);
        assert!(start.elapsed() < Duration::from_secs(2), "{what}: {left:?} survive");
        thread::sleep(Duration::from_millis(10));
    }
}

// S12: PR_SET_PDEATHSIG, the launcher
fn nothing_survives_the_client(host: &Host) {
    let stubborn = |place: &Place<'_>, tag: &str| -> Running {
        place.start(&[format!("daemon {tag}"), "stubborn 5".to_owned()])
    };
    let mut control = host
        .bare()
        .around(["/bin/sh", "-c", "\"$@\"; true", "sh"])
        .start(&["daemon s12-c", "stubborn 1"]);
    control.signal(Signal::KILL);
    control.wait_only();
    assert!(!with_tag(host, "s12-c").is_empty(), "control: on the host they survive their parent");
    for pid in with_tag(host, "s12-c") {
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
    let signals = [
        (Signal::TERM, "s12-term"),
        (Signal::KILL, "s12-kill"),
        (Signal::INT, "s12-int"),
        (Signal::HUP, "s12-hup"),
    ];
    for (signal, tag) in signals.into_iter().take(if host.is_thorough() { 4 } else { 2 }) {
        let mut running = stubborn(&host.sandbox(), tag);
        assert!(with_tag(host, tag).len() >= 3, "control: they run");
        running.signal(signal);
        if signal != Signal::KILL {
            // The command hears no polite signal; the second one is not.
            thread::sleep(Duration::from_millis(500));
            running.signal(Signal::KILL);
        }
        running.wait_only();
        wait_until_gone(host, tag, tag);
    }
}

/// The processes below the client that are not in the sandbox: whatever it needs to keep one.
fn helpers(host: &Host, client: i32) -> Vec<Pid> {
    let its = inside(host, client);
    let below = descendants_of(client).into_iter().filter(|pid| !its.contains(pid));
    below.filter_map(Pid::from_raw).collect()
}

// S12: on a busy host the sandbox may be dead before the helper hears that the client is.
fn a_helper_that_wakes_late_still_clears_up_after_the_client(host: &Host) {
    // Which of the two ends the helper hears of first is chance: one try in two shows nothing.
    for _ in 0..if host.is_thorough() { 6 } else { 2 } {
        let mut running = host.sandbox().start(&["daemon s12-late", "stubborn 1"]);
        let helpers = helpers(host, running.pid());
        helpers.iter().for_each(|pid| kill_process(*pid, Signal::STOP).unwrap());
        running.signal(Signal::KILL);
        running.wait_only();
        thread::sleep(Duration::from_millis(300));
        helpers.iter().for_each(|pid| kill_process(*pid, Signal::CONT).unwrap());
        wait_until_gone(host, "s12-late", "a late helper");
    }
}

// S12: a helper that an operator or the OOM killer ended must not cost more than the run.
fn a_run_whose_helpers_were_killed_still_ends_and_clears_up(host: &Host) {
    let running = host.sandbox().start(&["daemon s12-helper", "wait-eof"]);
    let orphans = inside(host, running.pid());
    helpers(host, running.pid()).iter().for_each(|pid| kill_process(*pid, Signal::KILL).unwrap());
    thread::sleep(Duration::from_millis(200));
    // They are this test's from now on, which has to do for them what PID 1 does on a host: a runtime waits for that.
    let over = AtomicBool::new(false);
    let ended = thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for pid in orphans.iter().filter_map(|pid| Pid::from_raw(*pid)) {
                    let _ = waitpid(Some(pid), WaitOptions::NOHANG);
                }
                thread::sleep(Duration::from_millis(5));
            }
        });
        let ended = running.end();
        over.store(true, Ordering::Relaxed);
        ended
    });
    assert!(ended.took < Duration::from_secs(3), "{ended:?}");
    wait_until_gone(host, "s12-helper", "after the end of the helpers");
    let control = host.sandbox().start(&["daemon s12-control", "wait-eof"]);
    assert_eq!(control.end().code, Some(0), "control: with its helpers it ends well");
}

// S13: pid namespace
fn killing_everything_inside_ends_only_the_sandbox(host: &Host) {
    // First of all: what follows would end the host if the sandbox shared its processes.
    let victim = host.bare().start(&["wait-eof"]);
    if host.has_namespaces() {
        let seen = host.sandbox().ask("pids").number("count");
        assert!(seen <= 4, "the sandbox sees processes of the host");
    } else {
        let tries = [victim.pid(), i32::try_from(std::process::id()).unwrap(), 1];
        host.sandbox().refuses(&tries.map(|pid| format!("kill {pid} 0")), &["EPERM"]);
    }
    let neighbour = host.sandbox().start(&["wait-eof"]);
    let cases =
        ["kill -1 9", "kill -1 19", "kill 1 9", "kill 1 15", "kill 1 19", "kill 0 9", "kill -1 15"];
    let (cases, time) = if host.is_thorough() { (&cases[..], 3) } else { (&cases[..3], 1) };
    for &case in cases {
        let sandbox = host.sandbox().with(&format!("--timeout {time}s"));
        let ended = sandbox.run(&sandbox.probe_line(&[case]));
        assert!(ended.signal.is_none(), "{case} reached the client: {ended:?}");
        assert!(ended.took < Duration::from_secs(8), "{case}: {ended:?}");
    }
    let report = host.sandbox().with("--timeout 3s").probe_report("kill -1 9");
    // Where init is the same user it is among those, and the sandbox ends with it.
    let ended = host.is_callers_own() && report.0["error"]["code"] == "ended";
    assert!(
        ended || ["exited", "signalled", "lost", "timed_out"].contains(&report.cause()),
        "{report:#?}"
    );
    // Control: neither the host's process nor the neighbour felt any of it, and both still end well.
    assert_eq!(neighbour.end().code, Some(0), "the neighbour");
    assert_eq!(victim.end().code, Some(0), "the host's process");
}

// S13: pid namespace
fn killing_init_from_outside_ends_the_run(host: &Host) {
    let mut running = host.sandbox().start(&["daemon s13-init", "stubborn 2"]);
    let ours = fs::read_link("/proc/self/ns/pid").unwrap();
    let first = inside(host, running.pid()).into_iter().find(|pid| {
        if host.has_own_kernel() {
            // Init is in it, and nowhere else.
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            return line.starts_with("runsc-sandbox");
        }
        let nspid = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = nspid.lines().find(|l| l.starts_with("NSpid:")).unwrap_or("").to_owned();
        fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|ns| ns != ours)
            && line.ends_with("\t1")
    });
    let init = Pid::from_raw(first.expect("control: there is an init")).unwrap();
    kill_process(init, Signal::KILL).unwrap();
    let ended = running.wait_only();
    assert!(ended.took < Duration::from_secs(3), "{ended:?}");
    assert!(ended.code.is_some_and(|code| code != 0), "it is not reported as success: {ended:?}");
    wait_until_gone(host, "s13-init", "after the end of init");
}

// S16: checked before anything is made
fn huge_and_odd_arguments_get_through_or_a_clean_error(host: &Host) {
    let probe = host.at("probe");
    let through = |place: &Place<'_>, args: Vec<std::ffi::OsString>, expected: &str, what: &str| {
        let ended = place.run(&args);
        if ended.code == Some(0) {
            assert!(
                ended.text().contains(expected),
                "{what}: {}",
                &ended.text()[..200.min(ended.text().len())]
            );
        } else {
            assert!(ended.stderr.len() < 10_000, "{what}: {} bytes of message", ended.stderr.len());
            ended.assert_clean_error(what);
        }
    };
    widen();
    let block = "a".repeat(100_000);
    for (count, place) in [(1, host.sandbox()), (19, host.sandbox()), (55, host.sandbox())] {
        let mut args = vec![probe.clone().into(), "args".into()];
        args.extend((0..count).map(|_| block.clone().into()));
        through(
            &place,
            args,
            &format!("count={count} bytes={}", count * 100_000),
            "long arguments",
        );
    }
    let mut many = host.sandbox();
    for i in 0..100_000 {
        many = many.flag(format!("--env=K{i}=v"));
    }
    through(&many, vec![probe.clone().into(), "env".into()], "env result=OK", "100000 variables");
    let odd = std::ffi::OsString::from_vec(b"\xff\xfe\x1b[31m".to_vec());
    through(
        &host.sandbox(),
        vec![probe.clone().into(), "args".into(), odd],
        "hex=fffe1b5b33316d",
        "not UTF-8",
    );
    through(
        &host.sandbox(),
        vec![probe.clone().into(), "args".into(), "".into()],
        "count=1 bytes=0",
        "empty",
    );
    host.sandbox().run(&[""]).assert_clean_error("an empty program");
    host.sandbox().run::<&str>(&[]).assert_clean_error("no program");
    for flag in [
        "--env==v",
        "--env=",
        "--memory=0",
        "--memory=99999999999999999999",
        "--pids=0",
        "--pids=-1",
    ] {
        host.sandbox().flag(flag).run(&["true"]).assert_clean_error(flag);
    }
    // An empty argument vector has been the end of careful programs before.
    let ended = host.bare().run(&[&probe, "direct", "no-argv", &host.at("warren")]);
    assert!(
        ended.signal.is_none() && ended.code.is_some_and(|c| c != 101 && c != 134),
        "{ended:?}"
    );
    let control = host.sandbox().run(&[&probe, "args", "a", "b"]);
    assert!(control.text().contains("count=2 bytes=2"), "control: {control:?}");
}

/// Lets this process pass six megabytes of arguments, the most that Linux takes, and not two.
fn widen() {
    let wide = Rlimit { current: None, ..getrlimit(Resource::Stack) };
    setrlimit(Resource::Stack, wide).unwrap();
}

// max_cpu_time_ms, by E1
fn cpu_time_is_counted_over_all_processes(host: &Host) {
    let sandbox = host.sandbox().with("--cpu-time 1s --timeout 20s");
    // Without a cgroup init adds up what it sees, which is enough for these.
    let sandbox = match host.who() {
        Who::Nobody => sandbox.with("--accept-missing cpu-time"),
        _ if host.has_own_kernel() => sandbox.with("--accept-missing cpu-time"),
        _ => sandbox,
    };
    let time = if host.is_thorough() { 2500 } else { 1200 };
    let asleep = sandbox.probe_report(&format!("sleep {time}"));
    assert_eq!(asleep.cause(), "exited", "control: sleeping costs nothing: {asleep:#?}");
    let ways = ["spin-tree 2 15000", "spin-tree 1 15000", "spin-relay 15000"];
    for case in ways.into_iter().take(if host.is_thorough() { 3 } else { 1 }) {
        let start = Instant::now();
        let report = sandbox.probe_report(case);
        assert_eq!(report.cause(), "cpu_time", "{case}: {report:#?}");
        assert!(start.elapsed() < Duration::from_secs(10), "{case} took {:?}", start.elapsed());
    }
}

// max_wall_time_ms, by E1
fn wall_time_ends_a_sleeper(host: &Host) {
    let short = host.sandbox().with("--timeout 1s");
    assert_eq!(short.run(&short.probe_line(&["sleep 100"])).code, Some(0), "control: in time");
    let ended = short.run(&short.probe_line(&["sleep 30000"]));
    assert_eq!(ended.code, Some(124), "{ended:?}");
    assert!(
        ended.took >= Duration::from_millis(900) && ended.took < Duration::from_secs(5),
        "{ended:?}"
    );
    assert_eq!(short.probe_report("sleep 30000").cause(), "timed_out");
}

// S11: whom init cannot see it cannot end
fn wall_time_ends_one_who_hides(host: &Host) {
    let (probe, short) = (host.at("probe"), host.sandbox().with("--timeout 1s"));
    let control = host.sandbox().run(&[&probe, "direct", "hide", "name", "10"]);
    assert_eq!(control.code, Some(0), "control: hiding is no crime: {control:?}");
    let ways = ["name", "dumpable", "mark", "high-mark"];
    for how in ways.into_iter().take(if host.is_thorough() { 4 } else { 1 }) {
        let ended = short.run(&[&probe, "direct", "hide", how, "10000"]);
        assert_eq!(ended.code, Some(124), "{how}: {ended:?}");
        assert!(ended.took < Duration::from_secs(5), "{how}: {ended:?}");
    }
}

// S20: bytes as they are; a terminal of its own
fn output_is_bytes_and_never_drives_the_callers_terminal(host: &Host) {
    let probe = host.at("probe");
    let expected: Vec<u8> = (0..40).flat_map(|_| 0..=255u8).collect();
    let bytes = host.sandbox().run(&[&probe, "all-bytes", "40"]);
    assert_eq!(host.bare().run(&[&probe, "all-bytes", "40"]).stdout, expected, "control");
    assert_eq!(bytes.stdout, expected, "every byte comes through as it is");
    let json = host.sandbox().flag("--json").run(&[&probe, "all-bytes", "1"]);
    assert!(json.stdout.iter().all(|b| *b == b'\n' || *b >= 0x20), "JSON holds no control bytes");
    assert!(serde_json::from_slice::<serde_json::Value>(&json.stdout).is_ok(), "{json:?}");
    let count = if host.is_thorough() { 100_000 } else { 10_000 };
    let lines = host.sandbox().with("--timeout 60s").run(&[&probe, "lines", &count.to_string()]);
    let counted: String = (0..count).map(|i| format!("{i:07}\n")).collect();
    assert!(lines.text() == counted, "stdout: {} of {} bytes", lines.stdout.len(), counted.len());
    assert!(
        lines.stderr.ends_with(&counted),
        "stderr: {} of {} bytes",
        lines.stderr.len(),
        counted.len()
    );
    // What the tool itself says quotes hostile names, and must not pass on what they would do.
    let clear = "\u{1b}[2J\u{1b}]0;owned\u{7}";
    let named = |flag: &str| host.sandbox().flag(format!("--{flag}={clear}")).run(&["true"]);
    let mut wrong = vec![];
    for (what, ended) in [
        ("program", host.sandbox().run(&[clear])),
        ("profile", named("profile")),
        ("ro", host.sandbox().flag(format!("--ro=/{clear}")).run(&["true"])),
        ("workdir", host.sandbox().flag(format!("--workdir=/{clear}")).run(&["true"])),
        ("memory", named("memory")),
        ("accept-missing", named("accept-missing")),
        ("bind", named("bind")),
        ("no such flag", named(clear)),
    ] {
        // A directory of that name is made in the sandbox, where it harms nobody.
        if what != "workdir" {
            ended.assert_clean_error(what);
        }
        if ended.stderr.contains(['\u{1b}', '\u{7}']) {
            wrong.push(format!("{what}: {:?}", ended.stderr));
        }
    }
    assert!(wrong.is_empty(), "control bytes reach the terminal:\n{}", wrong.join("\n"));
}
