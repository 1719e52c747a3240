//! 4.4: other processes, what they share, privileges and mounts.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::host::{
    Answer, Feature, Host, Place, Running, Who, descendants_of, namespaces, require,
};

hostile! {
    a_host_process_cannot_be_signalled_traced_or_read,
    no_visible_namespace_can_be_entered,
    shared_memory_queues_and_keys_of_the_host_are_invisible,
    another_sandbox_is_invisible,
    setuid_and_file_capabilities_give_nothing,
    no_new_namespace_can_be_made,
    nothing_can_be_mounted,
    priorities_and_limits_cannot_be_raised,
    init_cannot_be_slowed_down_or_limited,
    every_process_of_a_sandbox_is_walled_off_as_seen_from_the_host,
}

hostile_by_gvisor! {
    a_host_process_cannot_be_signalled_traced_or_read,
    no_visible_namespace_can_be_entered,
    shared_memory_queues_and_keys_of_the_host_are_invisible,
    another_sandbox_is_invisible,
    setuid_and_file_capabilities_give_nothing,
    no_new_namespace_can_be_made,
    nothing_can_be_mounted,
    priorities_and_limits_cannot_be_raised,
    init_cannot_be_slowed_down_or_limited,
    every_process_of_a_sandbox_is_walled_off_as_seen_from_the_host,
    a_finished_sandbox_leaves_no_namespace,
}

mod namespaces_of_its_own {
    use super::*;
    hostile_in_namespaces! { a_finished_sandbox_leaves_no_namespace }
}

hostile_as_root_inside! {
    a_host_process_cannot_be_signalled_traced_or_read,
    no_visible_namespace_can_be_entered,
    shared_memory_queues_and_keys_of_the_host_are_invisible,
    another_sandbox_is_invisible,
    no_new_namespace_can_be_made,
    nothing_can_be_mounted,
    priorities_and_limits_cannot_be_raised,
    init_cannot_be_slowed_down_or_limited,
    every_process_of_a_sandbox_is_walled_off_as_seen_from_the_host,
    a_finished_sandbox_leaves_no_namespace,
}

/// What root of the profile `dev` may hold: chown dac_override fowner fsetid kill setgid setuid net_bind_service.
const DEV: u64 = 0x4fb;
/// What init keeps to give each command its filter: sys_admin, permitted and not in effect.
const INSTALL_FILTERS: u64 = 1 << 21;

/// Where processes of the host are seen, they are out of reach all the same.
const NO_SUCH: &[&str] = &["ESRCH", "ENOENT", "EPERM", "ENOSYS", "EACCES"];

/// A process of the host, of the caller's own user, with one of everything.
fn victim(host: &Host, tag: &str) -> Running {
    host.bare().start(&[format!("victim {tag} 0")])
}

// X1-X4: pid namespace
fn a_host_process_cannot_be_signalled_traced_or_read(host: &Host) {
    let victim = victim(host, "x1");
    let (pid, address) = (victim.said("pid"), victim.said("addr"));
    let tries = [
        format!("kill {pid} 0"),
        format!("ptrace {pid}"),
        format!("pidfd {pid}"),
        format!("vm-read {pid} {address}"),
        format!("kill {pid} 15"),
        format!("read /proc/{pid}/mem"),
        format!("write /proc/{pid}/mem"),
        format!("kill {} 9", std::process::id()),
    ];
    host.bare().allows(&tries[..4]);
    for profile in host.profiles() {
        host.sandbox().with(&format!("--profile {profile}")).refuses(&tries, NO_SUCH);
    }
    host.bare().allows(&tries[..1]);
}

// X5: seccomp; no capability
fn no_visible_namespace_can_be_entered(host: &Host) {
    assert_eq!(host.bare_root().ask("setns").result, "OK", "control: root enters its own");
    let answer = host.sandbox().ask("setns");
    assert_eq!(answer.result, "none", "{answer:?}");
    assert!(answer.number("links") > 0, "there were links to try: {answer:?}");
}

// X6-X9: IPC namespace; seccomp
fn shared_memory_queues_and_keys_of_the_host_are_invisible(host: &Host) {
    require(&[Feature::SysvIpc, Feature::PosixQueues, Feature::Keyrings]);
    let victim = victim(host, "x6");
    let tries = ["sysv x6", "shm x6", "mqueue x6", "key x6"];
    let made = victim.ready[0].detail.clone();
    assert!(!made.contains("=E"), "control: the victim made them all: {made}");
    host.bare().allows(&tries);
    for profile in host.profiles() {
        let refused = ["ENOENT", "EPERM", "EACCES", "ENOSYS", "ENOKEY"];
        host.sandbox().with(&format!("--profile {profile}")).refuses(&tries, &refused);
    }
    drop(victim);
}

/// Without namespaces: the other's files are at a path of the host, and there is nothing else to share.
fn another_without_namespaces_is_out_of_reach(host: &Host) {
    let owner = host.sandbox().start(&["put x10 s3cret", "cwd", "wait-eof"]);
    let file = format!("{}/x10", owner.ready[1].field("cwd"));
    host.bare_root().allows(&[format!("read {file}")]);
    host.sandbox().refuses(&[format!("read {file}"), format!("append {file}")], &["EACCES"]);
    let shared = ["victim x10 4710", "sysv x10", "shm x10", "abstract x10", "tcp 127.0.0.1 4710"];
    let refused = ["EPERM", "EACCES", "ENOSYS", "ENOENT"];
    let made = host.sandbox().ask("victim x10 4710");
    assert!(["shm", "sysv"].iter().all(|kind| made.field(kind).starts_with('E')), "{made:?}");
    host.sandbox().refuses(&shared[1..], &refused);
    drop(owner);
}

// X10-X13: namespaces, ids of its own
fn another_sandbox_is_invisible(host: &Host) {
    if !host.has_namespaces() {
        return another_without_namespaces_is_out_of_reach(host);
    }
    // Without a cgroup a sandbox has SysV segments only if its memory is not bounded.
    let sandbox = || host.sandbox().with("--memory none");
    let files = ["/workspace/x10", "/tmp/x10", "/dev/shm/x10", "/home/user/x10"];
    let looks: Vec<String> = files
        .iter()
        .map(|f| format!("read {f}"))
        .chain(["sysv", "shm", "abstract"].map(|look| format!("{look} x10")))
        .chain(["tcp 127.0.0.1 4710".to_owned(), "tcp ::1 4710".to_owned()])
        .collect();
    let mut owner: Vec<String> = files.iter().map(|f| format!("put {f} x")).collect();
    // Control: all of it is there to be found within one sandbox.
    let line = sandbox().probe_line(&[owner.clone(), looks.clone()].concat());
    let within =
        [&line[..1], &["--victim".into(), "x10".into(), "4710".into()], &line[1..]].concat();
    let within = sandbox().run(&within);
    let found = within.text().lines().filter(|l| l.contains("result=OK")).count();
    assert_eq!(found, owner.len() + 1 + looks.len(), "control: within one sandbox: {within:#?}");
    owner.push("victim x10 4710".to_owned());
    let other = sandbox().start(&owner);
    let absent = ["ENOENT", "ECONNREFUSED", "EPERM", "EACCES", "ENETUNREACH"];
    sandbox().refuses(&looks, &absent);
    host.bare().refuses(&looks, &absent);
    drop(other);
}

// R1: no_new_privs; nosuid mounts
fn setuid_and_file_capabilities_give_nothing(host: &Host) {
    let dir = host.open_dir("bin");
    for name in ["suid", "sgid", "caps"] {
        fs::copy(host.path("probe"), host.path(&format!("bin/{name}"))).unwrap();
    }
    for (name, mode) in [("suid", 0o4755), ("sgid", 0o2755), ("caps", 0o755)] {
        fs::set_permissions(host.path(&format!("bin/{name}")), fs::Permissions::from_mode(mode))
            .unwrap();
    }
    host.bare_root().allows(&[format!("set-file-caps {dir}/caps")]);
    let run = |place: &Place<'_>, program: &str| {
        let ended = place.run(&[program, "whoami"]);
        assert!(ended.text().contains("euid="), "it ran: {ended:?}");
        ended.text()
    };
    // Control: as nobody on the bare host each of them does give what it promises.
    let nobody =
        host.bare_root().around("setpriv --reuid 65534 --regid 65534 --clear-groups".split(' '));
    assert!(run(&nobody, &format!("{dir}/suid")).contains("euid=0"), "control: setuid works here");
    assert!(run(&nobody, &format!("{dir}/sgid")).contains("egid=0"), "control: setgid works here");
    assert!(
        !run(&nobody, &format!("{dir}/caps")).contains("CapEff: 0000000000000000"),
        "control: file caps"
    );
    // Without a user namespace ids are those of the host; which, is the sandbox's own business.
    let no_gain = |text: String, what: &str| {
        let answer = Answer::parse(text.trim());
        let ids = ["uid", "euid", "gid", "egid"].map(|key| answer.field(key).to_owned());
        assert!(ids.iter().all(|id| *id == ids[0] && id != "0"), "{what}: {text}");
        assert!(ids[0] == "1000" || !host.has_namespaces(), "{what}: {text}");
        // gVisor does not show the ambient set; the bounding set is the caller's, where nothing is the sandbox's own.
        let sets = if host.has_own_kernel() || host.is_callers_own() { 4 } else { 5 };
        assert_eq!(text.matches("0000000000000000").count(), sets, "{what}: {text}");
    };
    for profile in host.profiles() {
        let sandbox = host.sandbox().with(&format!("--profile {profile} --ro {dir}"));
        for name in ["suid", "sgid", "caps"] {
            if name == "caps" && !host.has_namespaces() && !host.is_callers_own() {
                // A program that can only run with what it cannot get is not run; in a user namespace it is
                // nobody's, and runs without, as it does where no bound was drawn.
                let refused = sandbox.run(&[&format!("{dir}/{name}"), "whoami"]);
                assert!(refused.stderr.contains("not permitted"), "{refused:?}");
                continue;
            }
            no_gain(run(&sandbox, &format!("{dir}/{name}")), name);
        }
        let own = format!("cp {} own; chmod 6755 own; exec ./own whoami", host.at("probe"));
        no_gain(sandbox.run(&["/bin/sh", "-c", &own]).text(), "a setuid copy of one's own");
        sandbox.refuses(&["setuid"], &["EPERM", "EINVAL"]);
    }
}

// R2: seccomp
fn no_new_namespace_can_be_made(host: &Host) {
    let kinds = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"];
    host.bare().allows(&["unshare user", "clone user", "clone3 user"]);
    host.bare_root().allows(&kinds.map(|kind| format!("unshare {kind}")));
    for profile in host.profiles() {
        let sandbox = host.sandbox().with(&format!("--profile {profile}"));
        sandbox.refuses(&kinds.map(|kind| format!("unshare {kind}")), &["EPERM"]);
        sandbox.refuses(
            &kinds[..7].iter().map(|k| format!("clone {k}")).collect::<Vec<_>>(),
            &["EPERM"],
        );
        sandbox.refuses(&kinds.map(|kind| format!("clone3 {kind}")), &["ENOSYS"]);
    }
}

// R3: seccomp; no capability
fn nothing_can_be_mounted(host: &Host) {
    let kinds =
        ["tmpfs", "proc", "sysfs", "cgroup", "cgroup2", "mqueue", "devpts", "overlay", "ramfs"];
    let direct: Vec<_> = kinds.iter().map(|kind| format!("mount {kind} /tmp")).collect();
    let by_userns: Vec<_> = kinds.iter().map(|kind| format!("userns-mount {kind} /tmp")).collect();
    let others = [
        "bind / /tmp",
        "bind /proc /tmp",
        "bind /usr /workspace",
        "open-tree /",
        "open-tree /usr",
        "fsopen tmpfs",
        "fsopen proc",
        "umount /proc",
        "umount /",
    ];
    host.bare_mounts().allows(&[&direct[0], &direct[1], others[0], others[3], others[5]]);
    host.bare().allows(&by_userns[..1]);
    for profile in host.profiles() {
        let sandbox = host.sandbox().with(&format!("--profile {profile}"));
        sandbox.refuses(&direct, &["EPERM"]);
        sandbox.refuses(&by_userns, &["EPERM"]);
        sandbox.refuses(&others, &["EPERM", "ENOSYS"]);
    }
}

// R4: no capability; rlimits
fn priorities_and_limits_cannot_be_raised(host: &Host) {
    host.bare_root().allows(&["fifo", "nice", "mlock"]);
    // Root on a host that keeps CAP_SYS_RESOURCE back cannot do these two either; what anybody may do
    // shows that the attempt is made rightly.
    match host.has_namespaces() {
        true => host.sandbox().allows(&["oom-adj 900"]),
        false => host.bare().allows(&["oom-adj 900"]),
    }
    let sandbox = host.sandbox();
    if host.has_own_kernel() {
        priorities_of_another_kernel_are_not_the_hosts(host);
    } else {
        sandbox.refuses(&["fifo", "nice"], &["EPERM", "EACCES"]);
        sandbox.refuses(&["oom-adj -500"], &["EACCES", "EPERM", "ENOENT", "EROFS"]);
    }
    sandbox.refuses(&["mlock"], &["EPERM", "ENOMEM", "EAGAIN"]);
    let limits = sandbox.ask("raise-limits");
    assert_eq!(limits.result, "none", "{limits:?}");
    assert!(limits.number("finite") >= 1, "there are limits to raise: {limits:?}");
}

/// How the threads of a process stand with the host's scheduler, and how much memory it holds that cannot be paged out:
/// the least nice value, whether one is of another policy than the usual one, and KiB.
fn precedence(pid: i32) -> (i64, bool, u64) {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let fields = |task: fs::DirEntry| -> Option<(i64, bool)> {
        let stat = fs::read_to_string(task.path().join("stat")).ok()?;
        let fields: Vec<_> = stat.rsplit_once(") ")?.1.split(' ').collect();
        Some((fields[16].parse().unwrap(), fields[38] != "0"))
    };
    let tasks: Vec<_> = tasks.filter_map(fields).collect();
    let locked = status(pid, &["VmLck"]).into_iter().next().unwrap().1;
    let locked = locked.trim().trim_end_matches(" kB").parse().unwrap();
    (tasks.iter().map(|task| task.0).min().unwrap(), tasks.iter().any(|task| task.1), locked)
}

/// What a command is among those of its kernel is that kernel's business; what its kernel is among the host's processes
/// is not.
fn priorities_of_another_kernel_are_not_the_hosts(host: &Host) {
    let control = host.bare_root().start(&["hold-priority"]);
    let (nice, another, _) = precedence(control.said("pid").parse().unwrap());
    assert!(nice == -5 && another, "control: on the host it comes first: {nice} {another}");
    drop(control);
    let running = host.sandbox().start(&["hold-priority"]);
    eprintln!("that kernel lets commands have {:?}", running.ready[0].words("found"));
    for pid in inside(host, running.pid()) {
        let (nice, another, locked) = precedence(pid);
        assert!(nice >= 0 && !another, "{pid} comes before others: {nice} {another}");
        assert!(locked < 32 << 10, "{pid} holds {locked} KiB");
        let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        assert!(score.trim().parse::<i32>().unwrap() >= 0, "{pid} is spared: {score}");
    }
    drop(running);
}

// R4: init keeps the clock and the limits
fn init_cannot_be_slowed_down_or_limited(host: &Host) {
    // Without namespaces a process is asked about by 0 alone, whoever it is.
    let place = if host.has_namespaces() { host.sandbox() } else { host.bare() };
    let control = place.ask("slow-self");
    // Another kernel may not know all of them.
    let own: &[_] = match host.has_own_kernel() {
        true => &["affinity", "limit", "priority"],
        false => &["affinity", "ioprio", "limit", "priority", "scheduler"],
    };
    let own = own.iter().copied().collect();
    assert_eq!(control.words("found"), own, "control: one's own process: {control:?}");
    for profile in host.profiles() {
        let init = host.sandbox().with(&format!("--profile {profile}")).ask("slow-pid 1");
        assert_eq!(init.result, "none", "{profile}: {init:?}");
    }
}

/// The lines of /proc/PID/status that begin with one of `keys`.
fn status(pid: i32, keys: &[&str]) -> Vec<(String, String)> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let lines = text.lines().filter_map(|l| l.split_once(":\t"));
    let wanted = lines.filter(|(key, _)| keys.contains(key));
    wanted.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// The processes of the sandbox: those below the client that live in another pid namespace, or, where there is none,
/// under a filter. Of a kernel of its own: that kernel, who holds its files, and what its commands run in.
pub(crate) fn inside(host: &Host, client: i32) -> Vec<i32> {
    let kind = if host.has_own_kernel() { "user" } else { "pid" };
    let ours = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
    let below = descendants_of(client).into_iter();
    if !host.has_namespaces() {
        let filtered = |pid: &i32| status(*pid, &["Seccomp"]).iter().any(|(_, mode)| mode == "2");
        return below.filter(filtered).collect();
    }
    below
        .filter(|pid| fs::read_link(format!("/proc/{pid}/ns/{kind}")).is_ok_and(|ns| ns != ours))
        .collect()
}

// R5: namespaces, ids, seccomp, no_new_privs, cgroups
fn every_process_of_a_sandbox_is_walled_off_as_seen_from_the_host(host: &Host) {
    require(&[Feature::PidNamespaces, Feature::NetNamespaces, Feature::CgroupNamespaces]);
    let own = namespaces(i32::try_from(std::process::id()).unwrap());
    let own_cgroup = fs::read_to_string("/proc/self/cgroup").unwrap();
    let control = host.bare().start(&["wait-eof"]);
    let shared = namespaces(control.pid()).iter().filter(|ns| own.contains(ns)).count();
    assert_eq!(shared, own.len(), "control: a process of the host shares every namespace with us");
    let running = [host.sandbox().start(&["wait-eof"]), host.sandbox().start(&["wait-eof"])];
    let mut uids = vec![];
    let mut wrong = vec![];
    if !host.has_namespaces() {
        host.not_promised("hidden processes");
    }
    if host.has_own_kernel() {
        return each_kernel_of_its_own_is_walled_off(host, &running);
    }
    for sandbox in &running {
        let pids = inside(host, sandbox.pid());
        assert!(pids.len() >= 2, "init and the probe: {pids:?}");
        let mut seen = BTreeSet::new();
        for &pid in &pids {
            for (kind, link) in namespaces(pid) {
                // The time namespace is not one that a sandbox needs.
                if host.has_namespaces()
                    && !kind.starts_with("time")
                    && own.contains(&(kind.clone(), link.clone()))
                {
                    wrong.push(format!("{pid} shares {link} with the host ({kind})"));
                }
            }
            for (key, value) in status(pid, &["Uid", "Gid"]) {
                for id in value.split_whitespace() {
                    if id == "0" {
                        wrong.push(format!("{pid} has {key} {value}"));
                    }
                    seen.insert((key.clone(), id.to_owned()));
                }
            }
            for (key, value) in status(pid, &["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"]) {
                let held = u64::from_str_radix(&value, 16).unwrap();
                // The user namespace is its own, as seen above; the first process is init.
                let allowed = match host.who() {
                    // Only a user namespace, or a right, would take away what nobody there can draw from.
                    Who::Nobody if key == "CapBnd" && host.is_callers_own() => u64::MAX,
                    Who::Root | Who::Nobody => 0,
                    Who::RootInside if pid == pids[0] && key != "CapBnd" => DEV | INSTALL_FILTERS,
                    Who::RootInside => DEV,
                };
                if held & !allowed != 0 {
                    wrong.push(format!("{pid} has {key} {value}"));
                }
            }
            let walls = status(pid, &["Seccomp", "NoNewPrivs"]);
            let no_new_privs = host.who() != Who::RootInside;
            if !walls.contains(&("Seccomp".into(), "2".into()))
                || no_new_privs && !walls.contains(&("NoNewPrivs".into(), "1".into()))
            {
                wrong.push(format!("{pid} has {walls:?}"));
            }
            let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
            if host.who() != Who::Nobody && cgroup == own_cgroup {
                wrong.push(format!("{pid} is in the caller's cgroup"));
            }
        }
        uids.push(seen);
    }
    if host.who() != Who::Nobody {
        let both: Vec<_> = uids[0].intersection(&uids[1]).collect();
        assert!(both.is_empty(), "two sandboxes share {both:?}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What the host sees of a kernel of its own: that kernel, who holds its files, and what its commands run in.
fn each_kernel_of_its_own_is_walled_off(host: &Host, running: &[Running; 2]) {
    let own = namespaces(i32::try_from(std::process::id()).unwrap());
    let own_cgroup = fs::read_to_string("/proc/self/cgroup").unwrap();
    let (mut kernels, mut wrong) = (vec![], vec![]);
    for sandbox in running {
        let pids = inside(host, sandbox.pid());
        assert!(pids.len() >= 3, "the kernel, its files, and the probe: {pids:?}");
        for &pid in &pids {
            let shared: Vec<_> =
                namespaces(pid).into_iter().filter(|ns| own.contains(ns)).collect();
            let apart = ["user", "mnt", "net", "ipc", "uts"];
            wrong.extend(
                shared
                    .iter()
                    .filter(|ns| apart.contains(&&*ns.0))
                    .map(|ns| format!("{pid}: {ns:?}")),
            );
            let ids = status(pid, &["Uid", "Gid"]);
            if ids.iter().any(|(_, ids)| ids.split_whitespace().any(|id| id == "0")) {
                wrong.push(format!("{pid} has {ids:?}"));
            }
            let walls = status(pid, &["Seccomp", "NoNewPrivs"]);
            if !walls.contains(&("Seccomp".into(), "2".into()))
                || !walls.contains(&("NoNewPrivs".into(), "1".into()))
            {
                wrong.push(format!("{pid} has {walls:?}"));
            }
            if fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap() == own_cgroup {
                wrong.push(format!("{pid} is in the caller's cgroup"));
            }
            // A capability is one in the user namespace of whoever holds it, which is not the host's, as seen above.
            let held = status(pid, &["CapEff"]);
            let sees_all = shared.iter().any(|(kind, _)| kind == "pid");
            kernels.extend((sees_all && held[0].1 != "0000000000000000").then(|| ids[0].1.clone()));
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if !line.starts_with("runsc-gofer")
                && Path::new(&format!("/proc/{pid}/root/usr")).exists()
            {
                wrong.push(format!("{pid} has files"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // That it is the same user for all, and no pid namespace is between it and the host: SECURITY.md.
    kernels.dedup();
    assert_eq!(kernels.len(), 1, "they are one user: {kernels:?}");
    host.not_promised("ids of its own");
}

// R5, T8: PID 1 takes its namespaces along
fn a_finished_sandbox_leaves_no_namespace(host: &Host) {
    let running = host.sandbox().start(&["wait-eof"]);
    let own = namespaces(i32::try_from(std::process::id()).unwrap());
    let its: BTreeSet<String> = inside(host, running.pid())
        .into_iter()
        .flat_map(namespaces)
        .filter(|ns| !own.contains(ns))
        .map(|(_, link)| link)
        .collect();
    assert!(its.len() >= 6, "control: it has namespaces of its own: {its:?}");
    let alive = || -> BTreeSet<String> {
        let pids = fs::read_dir("/proc").unwrap().flatten();
        let pids = pids.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
        pids.flat_map(namespaces).map(|(_, link)| link).filter(|l| its.contains(l)).collect()
    };
    assert_eq!(alive(), its, "control: they are found while it runs");
    running.end();
    let start = Instant::now();
    while !alive().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(2), "left: {:?}", alive());
        thread::sleep(Duration::from_millis(10));
    }
}
