//! 4.3: /proc, /sys, cgroup files and devices.

use std::path::Path;

use crate::host::{Feature, Host, require};

hostile! {
    no_kernel_setting_opens_for_writing,
    kernel_addresses_are_hidden,
    files_about_the_whole_machine_are_masked,
    processes_of_the_host_are_invisible,
    no_running_binary_opens_for_writing,
    nothing_in_sys_opens_for_writing,
    no_cgroup_file_opens_for_writing,
    masks_cannot_be_unmounted_nor_mounts_made_writable,
    no_device_of_the_host_is_in_dev,
    a_device_made_by_mknod_does_not_open,
    terminals_of_the_host_are_not_in_dev_pts,
    one_sandbox_does_not_take_the_terminals_of_all,
    keys_pushed_into_the_callers_terminal_do_not_arrive,
}

hostile_by_gvisor! {
    no_kernel_setting_opens_for_writing,
    kernel_addresses_are_hidden,
    files_about_the_whole_machine_are_masked,
    processes_of_the_host_are_invisible,
    no_running_binary_opens_for_writing,
    nothing_in_sys_opens_for_writing,
    no_cgroup_file_opens_for_writing,
    masks_cannot_be_unmounted_nor_mounts_made_writable,
    no_device_of_the_host_is_in_dev,
    a_device_made_by_mknod_does_not_open,
    terminals_of_the_host_are_not_in_dev_pts,
    one_sandbox_does_not_take_the_terminals_of_all,
    keys_pushed_into_the_callers_terminal_do_not_arrive,
}

hostile_as_root_inside! {
    no_kernel_setting_opens_for_writing,
    kernel_addresses_are_hidden,
    files_about_the_whole_machine_are_masked,
    processes_of_the_host_are_invisible,
    no_running_binary_opens_for_writing,
    nothing_in_sys_opens_for_writing,
    no_cgroup_file_opens_for_writing,
    masks_cannot_be_unmounted_nor_mounts_made_writable,
    no_device_of_the_host_is_in_dev,
    a_device_made_by_mknod_does_not_open,
    terminals_of_the_host_are_not_in_dev_pts,
    one_sandbox_does_not_take_the_terminals_of_all,
    keys_pushed_into_the_callers_terminal_do_not_arrive,
}

/// `null`: /dev/null lies over the file.
const REFUSED: &[&str] = &["ENOENT", "EACCES", "EPERM", "EROFS", "ENOTDIR", "null"];

// P1, P2, P3: a /proc of its own, read-only parts
fn no_kernel_setting_opens_for_writing(host: &Host) {
    let named = [
        "kernel/core_pattern",
        "kernel/modprobe",
        "kernel/poweroff_cmd",
        "kernel/hotplug",
        "kernel/sysrq",
        "kernel/hostname",
        "kernel/ns_last_pid",
        "kernel/shmmax",
        "kernel/yama/ptrace_scope",
        "fs/binfmt_misc/register",
        "fs/file-max",
        "fs/protected_symlinks",
        "vm/overcommit_memory",
        "vm/panic_on_oom",
        "vm/drop_caches",
        "net/ipv4/ip_forward",
        "net/core/somaxconn",
        "user/max_user_namespaces",
    ];
    let mut tries: Vec<_> = named.iter().map(|n| format!("write /proc/sys/{n}")).collect();
    tries.extend(
        ["sysrq-trigger", "irq/default_smp_affinity", "mtrr", "timer_list", "acpi/wakeup"]
            .map(|n| format!("write /proc/{n}")),
    );
    host.bare_root().allows(&[&tries[0], &tries[2], &tries[10], &tries[12]]);
    for profile in host.profiles() {
        host.sandbox().with(&format!("--profile {profile}")).refuses(&tries, REFUSED);
    }
    let control = host.bare_root().ask("writable-below /proc/sys");
    assert!(control.number("writable") > 100, "control: {control:?}");
    let inside = host.sandbox().ask("writable-below /proc/sys");
    assert_eq!(inside.result, "none", "{inside:?}");
}

// P4: a /proc of its own, masks
fn kernel_addresses_are_hidden(host: &Host) {
    assert_eq!(host.bare_root().ask("kallsyms").result, "OK", "control: root sees addresses");
    host.sandbox().refuses(&["kallsyms"], &["none", "ENOENT", "EACCES", "EPERM"]);
    let inside = host.sandbox().ask("read /proc/kcore");
    assert!(inside.result != "OK" || inside.field("bytes") == "0", "{inside:?}");
}

// P5: a /proc of its own, masks
fn files_about_the_whole_machine_are_masked(host: &Host) {
    let names = [
        "keys",
        "key-users",
        "timer_list",
        "slabinfo",
        "vmallocinfo",
        "kpagecount",
        "kpageflags",
        "kpagecgroup",
        "iomem",
        "ioports",
        "kmsg",
        "sched_debug",
        "scsi/scsi",
        "latency_stats",
        "config.gz",
        "interrupts",
        "pagetypeinfo",
        "buddyinfo",
        "modules",
        "fs/ext4",
        "acpi",
        "asound",
        "sysrq-trigger",
    ];
    // What of these leaks about the host is the threat list's; the rest must at least not be writable.
    let masked = &names[..12];
    let reads: Vec<_> = masked.iter().map(|n| format!("read /proc/{n}")).collect();
    host.bare_root().allows(&[&reads[0], &reads[4], &reads[8]]);
    for (name, answer) in masked.iter().zip(host.sandbox().ask_all(&reads)) {
        let empty = answer.result == "OK" && answer.field("bytes") == "0";
        // Those that everybody on the host may read are all that is left to see where /proc is the host's.
        let everybodys = ["keys", "key-users", "iomem", "ioports"].contains(name);
        if host.has_namespaces() || !everybodys {
            assert!(empty || answer.result != "OK", "/proc/{name} is readable: {answer:?}");
        } else if !empty && answer.result == "OK" {
            host.not_promised("a /proc of its own");
        }
    }
    let writes: Vec<_> = names.iter().map(|n| format!("write /proc/{n}")).collect();
    for (name, answer) in names.iter().zip(host.sandbox().ask_all(&writes)) {
        assert_ne!(answer.result, "OK", "/proc/{name} opens for writing");
    }
}

// P6: pid namespace
fn processes_of_the_host_are_invisible(host: &Host) {
    let victim = host.bare().env("VICTIM", "canary-of-the-host").start(&["wait-eof"]);
    let find = "find-in-proc canary-of-the-host";
    assert_eq!(host.bare().ask(find).result, "OK", "control: its environment is there to be read");
    host.assert_hidden(&host.sandbox().ask(find));
    let pids = host.sandbox().ask("pids");
    let files = ["environ", "maps", "cmdline", "status", "mem", "root/etc/shadow", "cwd/secret"];
    let reads: Vec<_> = files.iter().map(|f| format!("read /proc/{}/{f}", victim.pid())).collect();
    host.bare().allows(&reads[..4]);
    if !host.has_namespaces() {
        assert!(pids.words("pids").contains(victim.pid().to_string().as_str()), "{pids:?}");
        host.not_promised("hidden processes");
        // That it runs is seen, and by what command; nothing of what it has.
        let kept = [&reads[..2], &reads[4..]].concat();
        return host.sandbox().refuses(&kept, &["EACCES", "EPERM"]);
    }
    assert!(pids.number("count") <= 4, "only init and the probe: {pids:?}");
    assert!(!pids.words("pids").contains(victim.pid().to_string().as_str()), "{pids:?}");
    host.sandbox().refuses(&reads, &["ENOENT"]);
}

// P7: init from a sealed memory file
fn no_running_binary_opens_for_writing(host: &Host) {
    // Control: a binary of one's own, running from a writable place, is found by the same probe.
    let own = host.sandbox().run(&[
        "/bin/sh",
        "-c",
        &format!("cp {} own && ./own write-any-exe", host.at("probe")),
    ]);
    assert!(own.text().contains("result=OK"), "control: {own:?}");
    let answer = host.sandbox().ask("write-any-exe");
    assert_eq!(answer.result, "none", "init or the delivered program: {answer:?}");
    host.sandbox()
        .refuses(&["write /proc/1/exe", "read /proc/1/mem", "write /proc/1/mem"], REFUSED);
}

// P8: no /sys
fn nothing_in_sys_opens_for_writing(host: &Host) {
    let control = host.bare_root().ask("writable-below /sys/kernel");
    assert_eq!(control.result, "OK", "control: root may write there: {control:?}");
    let inside = host.sandbox().ask("writable-below /sys");
    assert_eq!(inside.result, "none", "{inside:?}");
    for dir in [
        "firmware",
        "kernel/debug",
        "kernel/tracing",
        "kernel/slab",
        "kernel/security",
        "fs/bpf",
        "block",
    ] {
        let answer = host.sandbox().ask(&format!("list /sys/{dir}"));
        assert!(answer.result != "OK" || answer.number("count") == 0, "/sys/{dir}: {answer:?}");
    }
}

// P9: no cgroup file system; cgroup namespace
fn no_cgroup_file_opens_for_writing(host: &Host) {
    let hierarchies =
        ["", "/memory", "/pids", "/cpu", "/freezer", "/devices", "/unified", "/systemd"];
    let files = [
        "release_agent",
        "cgroup.procs",
        "tasks",
        "memory.limit_in_bytes",
        "memory.max",
        "pids.max",
        "freezer.state",
        "cgroup.freeze",
        "cgroup.kill",
        "notify_on_release",
        "devices.allow",
    ];
    let mut tries = vec![];
    for hierarchy in hierarchies {
        tries.extend(files.map(|file| format!("write /sys/fs/cgroup{hierarchy}/{file}")));
        tries.push(format!("mkdir /sys/fs/cgroup{hierarchy}/hostile"));
    }
    let control = host.bare_root().ask("writable-below /sys/fs/cgroup");
    assert_eq!(control.result, "OK", "control: root may write there: {control:?}");
    host.sandbox().refuses(&tries, REFUSED);
    assert_eq!(host.sandbox().ask("writable-below /sys/fs/cgroup").result, "none");
    if host.has_own_kernel() {
        // That kernel has groups, by which commands are told apart and counted, and shows init's descriptors of them.
        let groups = host.sandbox().ask("groups-by-init");
        assert_eq!(groups.result, "none", "{groups:?}");
        assert!(groups.number("seen") >= 10, "control: there are descriptors: {groups:?}");
    }
}

// P10: seccomp; no capability
fn masks_cannot_be_unmounted_nor_mounts_made_writable(host: &Host) {
    let control = host.bare_mounts().ask("umount-all");
    assert_eq!(
        control.result, "OK",
        "control: root unmounts in a namespace of its own: {control:?}"
    );
    // First of all: what follows would harm the host if the sandbox shared its mounts.
    host.sandbox().refuses(&["sys umount2"], &["EPERM"]);
    let inside = host.sandbox().ask("umount-all");
    assert_eq!(inside.result, "none", "{inside:?}");
    assert!(inside.number("mounts") > 3, "it saw the mounts: {inside:?}");
    let places = [
        "/",
        "/usr",
        "/proc",
        "/proc/sys",
        "/proc/kcore",
        "/proc/keys",
        "/sys",
        "/dev",
        "/etc",
        "/bin",
    ];
    let remounts: Vec<_> = places.iter().map(|p| format!("remount-rw {p}")).collect();
    host.bare_mounts().allows(&remounts[..1]);
    host.sandbox().refuses(&remounts, &["EPERM", "EINVAL", "ENOENT"]);
}

// V1, V3, V4: a /dev of its own
fn no_device_of_the_host_is_in_dev(host: &Host) {
    let control = host.bare_root().ask("list /dev");
    let hosts = control.words("names");
    for node in ["loop0", "kmsg", "fuse", "ttyS0", "tty0", "hwrng", "kvm"] {
        assert!(hosts.contains(node), "control: the host has /dev/{node}");
    }
    // The link `core` is a runtime's; where it leads is masked.
    let known =
        "null zero full random urandom tty pts ptmx shm fd stdin stdout stderr mqueue console core";
    // Another kernel has devices of these names, which are its own.
    let others = if host.has_own_kernel() { ["fuse", "net"] } else { ["", ""] };
    for profile in host.profiles().iter().filter(|_| host.has_namespaces()) {
        let inside = host.sandbox().with(&format!("--profile {profile}")).ask("list /dev");
        let more: Vec<_> = inside
            .words("names")
            .into_iter()
            .filter(|n| !known.split(' ').any(|k| k == *n) && !others.contains(n))
            .collect();
        assert!(more.is_empty(), "{profile}: /dev has {more:?}");
    }
    let nodes = "vda sda nvme0n1 loop0 loop-control mapper/control dm-0 mem kmem port kmsg kvm vhost-net \
        vhost-vsock vsock fuse net/tun uinput input/event0 tty0 tty1 ttyS0 userfaultfd hwrng cpu/0/msr \
        btrfs-control zram0 rtc0 snapshot autofs nvram vga_arbiter cpu_dma_latency";
    // Where /dev is the host's, what is there can be seen and not opened.
    let (ask, refused): (_, &[_]) = match host.has_namespaces() {
        true => ("stat", &["ENOENT", "ENOTDIR"]),
        false => ("read", &["ENOENT", "ENOTDIR", "EACCES"]),
    };
    let hosts = nodes.split_whitespace();
    let hosts = hosts.filter(|node| !others.contains(&node.split('/').next().unwrap()));
    let reads: Vec<_> = hosts.map(|n| format!("{ask} /dev/{n}")).collect();
    host.sandbox().refuses(&reads, refused);
    // A host whose /dev has one of each, for those that this one has not.
    let furnished = furnished_dev(host, nodes);
    host.bare().within(&furnished).allows(&reads);
    host.sandbox().within(&furnished).refuses(&reads, refused);
    host.sandbox().allows(&["read /dev/urandom", "write /dev/zero"]);
}

/// A command that runs another where `/dev` has a file of every one of these names.
fn furnished_dev(host: &Host, nodes: &str) -> Vec<String> {
    let dev = host.open_dir("dev");
    let own = "null zero full random urandom tty ptmx";
    let script = format!(
        "set -e; mount --make-rprivate /; mount -t tmpfs none {dev}; cd {dev}; mkdir pts shm; \
         for n in {own}; do cp -a /dev/$n .; done; mount --bind /dev/pts pts; \
         for n in {nodes}; do mkdir -p $(dirname $n); echo x > $n; chmod 644 $n; done; \
         mount --move {dev} /dev; exec \"$@\""
    );
    ["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned).to_vec()
}

// V2: no capability; nodev mounts
fn a_device_made_by_mknod_does_not_open(host: &Host) {
    let shared = host.open_dir("shared");
    let devices = [
        "b 254 0", "b 7 0", "c 1 11", "c 10 229", "c 10 232", "c 10 200", "c 1 1", "c 1 3", "c 5 1",
    ];
    let mut tries = vec![];
    for dir in ["/tmp", "/workspace", "/dev/shm", "/dev", &shared] {
        tries.extend(devices.map(|device| format!("mknod-open {dir}/hostile {device}")));
    }
    host.bare_root().allows(&[format!("mknod-open {shared}/control c 1 11")]);
    host.sandbox().with(&format!("--rw {shared}")).refuses(&tries, REFUSED);
    // A node that the host left in a shared directory is one too.
    let made = std::process::Command::new("mknod")
        .args([&format!("{shared}/left"), "c", "1", "11"])
        .status();
    assert!(made.unwrap().success());
    std::process::Command::new("chmod").args(["666", &format!("{shared}/left")]).status().unwrap();
    let left = [format!("read {shared}/left")];
    assert_ne!(host.bare_root().ask(&left[0]).result, "EACCES", "control: on the host it opens");
    host.sandbox().with(&format!("--rw {shared}")).refuses(&left, REFUSED);
}

// V5: a devpts of its own
fn terminals_of_the_host_are_not_in_dev_pts(host: &Host) {
    let on_pty = [&host.at("probe"), "direct", "on-pty"];
    // Around both: a terminal of the host is open while they look.
    let numbers = |text: &str| {
        let names = text.split_once("names=").map_or("", |(_, rest)| rest);
        names.split_whitespace().filter(|n| n.parse::<u32>().is_ok()).count()
    };
    let outside = host.bare().around(on_pty).run(&host.bare().probe_line(&["list /dev/pts"]));
    assert!(numbers(&outside.text()) >= 1, "control: the host's is listed there: {outside:?}");
    let inside = host.sandbox().around(on_pty).run(&host.bare().probe_line(&["list /dev/pts"]));
    assert!(inside.text().contains("list result="), "the attempt was made: {inside:?}");
    assert_eq!(numbers(&inside.text()), 0, "{inside:?}");
    assert!(Path::new("/dev/pts/ptmx").exists(), "control: the host has a devpts");
}

// V5: the host has a fixed number of terminals for everybody
fn one_sandbox_does_not_take_the_terminals_of_all(host: &Host) {
    let control = host.bare().ask("terminals 100");
    assert_eq!(control.number("count"), 100, "control: the host has more: {control:?}");
    if host.has_own_kernel() {
        return terminals_of_another_kernel_are_not_the_hosts(host);
    }
    let greedy = host.sandbox().with("--open-files 4000").ask("terminals 3000");
    let expected = if host.has_namespaces() { ("ENOSPC", 64) } else { ("EACCES", 0) };
    assert_eq!((greedy.result.as_str(), greedy.number("count")), expected, "{greedy:?}");
}

/// How many it gives out is that kernel's own business; the host counts its own.
fn terminals_of_another_kernel_are_not_the_hosts(host: &Host) {
    let in_use = || -> u32 {
        let text = std::fs::read_to_string("/proc/sys/kernel/pty/nr").unwrap();
        text.trim().parse().unwrap()
    };
    let before = in_use();
    let held = host.bare().start(&["hold-terminals 50"]);
    assert!(in_use() >= before + 40, "control: the host counts those of its own");
    drop(held);
    let greedy = host.sandbox().with("--open-files 4000").start(&["hold-terminals 3000"]);
    assert!(greedy.ready[0].number("count") >= 1000, "control: it has them: {:?}", greedy.ready);
    // Somebody else on this host may open one meanwhile.
    assert!(in_use() < before + 40, "the host's are used up: {} of {before}", in_use());
    drop(greedy);
}

// V6: seccomp (TIOCSTI); a terminal of its own
fn keys_pushed_into_the_callers_terminal_do_not_arrive(host: &Host) {
    require(&[Feature::Seccomp]);
    let on_pty = [&host.at("probe"), "direct", "on-pty"];
    let push = |place: crate::host::Place<'_>| {
        let ended = place.around(on_pty).run(&host.bare().probe_line(&["tiocsti"]));
        assert!(ended.text().contains("tiocsti result="), "the attempt was made: {ended:?}");
        ended.text().contains("on-pty result=OK")
    };
    assert!(push(host.bare()), "control: without a sandbox the key arrives");
    assert!(!push(host.sandbox()), "a key arrived in the caller's terminal");
    if host.has_own_kernel() {
        // It cannot be handed one, and says so.
        let refused = host.sandbox().flag("--tty").around(on_pty).run(&["tty"]).text();
        assert!(refused.contains("error: ") && !refused.contains("/dev/pts/"), "{refused}");
        return;
    }
    assert!(!push(host.sandbox().flag("--tty")), "a key arrived through --tty");
    assert!(
        !push(host.sandbox().with("--profile permissive --tty")),
        "a key arrived through permissive"
    );
    let said = host.sandbox().flag("--tty").around(on_pty).run(&["tty"]).text();
    assert!(said.contains("/dev/pts/"), "control: --tty is a terminal: {said}");
}
