//! 4.5: the kernel's surface.

use warren_sys::seccomp::{Action, Arch, Call, Instruction, evaluate};

use crate::host::{Feature, Host, require};
use crate::processes::inside;

hostile_by_init! {
    no_dangerous_call_passes_the_filter,
    a_child_can_be_traced_only_where_the_profile_says_so,
    foreign_call_conventions_are_refused,
    only_harmless_socket_families_can_be_made,
    a_call_newer_than_the_filter_is_refused,
}

hostile_by_gvisor! {
    no_dangerous_call_passes_the_filter,
    a_child_can_be_traced_only_where_the_profile_says_so,
    foreign_call_conventions_are_refused,
    only_harmless_socket_families_can_be_made,
    a_call_newer_than_the_filter_is_refused,
}

hostile_as_root_inside! {
    no_dangerous_call_passes_the_filter,
    a_child_can_be_traced_only_where_the_profile_says_so,
    foreign_call_conventions_are_refused,
    only_harmless_socket_families_can_be_made,
    a_call_newer_than_the_filter_is_refused,
}

/// Calls that no profile has a reason to allow. Without the filter none of them answers EPERM to root,
/// so that EPERM inside is the filter's own word.
pub(crate) const CALLS: &str = "io_uring_setup io_uring_enter io_uring_register bpf userfaultfd keyctl add_key request_key \
    perf_event_open fanotify_init syslog swapon swapoff reboot acct pivot_root quotactl init_module finit_module \
    delete_module kexec_load kexec_file_load iopl ioperm personality modify_ldt kcmp settimeofday clock_settime \
    clock_adjtime sethostname setdomainname open_by_handle_at setns chroot mount umount2 fsopen fsmount fsconfig \
    fspick move_mount open_tree mount_setattr process_vm_writev";

// K1-K17, K19-K21: seccomp
fn no_dangerous_call_passes_the_filter(host: &Host) {
    require(&[Feature::IoUring, Feature::Bpf, Feature::Userfaultfd, Feature::Keyrings]);
    require(&[Feature::PerfEvents, Feature::Fanotify]);
    let cases: Vec<_> = CALLS.split_whitespace().map(|call| format!("sys {call}")).collect();
    let outside: Vec<_> = host.bare_root().ask_all(&cases).into_iter().map(|a| a.result).collect();
    for (case, answer) in cases.iter().zip(&outside) {
        assert_ne!(answer, "EPERM", "control: without a filter {case} gets to the kernel");
    }
    host.bare_root().allows(&[
        "sys io_uring_setup",
        "sys userfaultfd",
        "sys perf_event_open",
        "sys keyctl",
    ]);
    for profile in host.profiles() {
        let sandbox = host.sandbox().with(&format!("--profile {profile}"));
        // A profile for debuggers may let these two through; what they reach is a sandbox's own.
        let debugging = ["sys process_vm_writev", "sys kcmp"];
        let own: Vec<_> = cases
            .iter()
            .filter(|c| *profile != "permissive" || !debugging.contains(&c.as_str()))
            .collect();
        sandbox.refuses(&own, &["EPERM", "ENOSYS"]);
        sandbox.allows(&["sys native"]);
        // Where this kernel lacks a call, another answer than its own shows who gave it.
        let inside = sandbox.ask_all(&cases);
        let unsaid: Vec<_> = cases
            .iter()
            .zip(inside.iter().zip(&outside))
            .filter(|(case, (inside, outside))| own.contains(case) && inside.result == **outside)
            .collect();
        assert!(unsaid.is_empty(), "{profile}: the kernel says the same: {unsaid:?}");
    }
}

/// The seccomp programs that are in force on a process of a sandbox, read back from the kernel.
fn installed(host: &Host, client: i32) -> Vec<Vec<Instruction>> {
    let probe = *inside(host, client).last().unwrap();
    let file = host.at("filter");
    let read = host.bare_root().ask(&format!("filters {probe} {file}"));
    assert_eq!(
        read.result, "OK",
        "this host does not show filters (CONFIG_CHECKPOINT_RESTORE): {read:?}"
    );
    let program = |index| {
        let bytes = std::fs::read(format!("{file}.{index}")).unwrap();
        let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        words.map(Instruction::from_bits).collect()
    };
    (0..read.number("count")).map(program).collect()
}

/// What the programs say to a call; the kernel takes the strictest.
fn verdict(programs: &[Vec<Instruction>], arch: u32, nr: u32) -> Action {
    let call = Call { arch, nr, args: [0; 6] };
    let all = programs.iter().map(|program| evaluate(program, &call));
    all.reduce(|strictest, next| next.stacked_on(strictest)).unwrap()
}

// K18: seccomp
fn a_child_can_be_traced_only_where_the_profile_says_so(host: &Host) {
    host.bare().allows(&["sys ptrace"]);
    host.sandbox().with("--profile strict").refuses(&["sys ptrace"], &["EPERM"]);
    host.sandbox().with("--profile default").refuses(&["sys ptrace"], &["EPERM"]);
    // Whatever a profile lets do to a child, init stays out of reach.
    for profile in host.profiles() {
        host.sandbox()
            .with(&format!("--profile {profile}"))
            .refuses(&["ptrace 1"], &["EPERM", "ESRCH"]);
    }
}

// K22, K23: seccomp (architecture)
fn foreign_call_conventions_are_refused(host: &Host) {
    require(&[Feature::I386]);
    host.bare().allows(&["int80", "sys native"]);
    for profile in host.profiles() {
        let sandbox = host.sandbox().with(&format!("--profile {profile}"));
        let mut refused = vec!["killed", "ENOSYS", "EPERM"];
        if host.has_own_kernel() {
            // It takes the number for that of a native call (20 is writev), and filters it as one.
            refused.push("EBADF");
        }
        sandbox.refuses(&["int80", "x32"], &refused);
        sandbox.allows(&["sys native"]);
        if host.is_contained() {
            // Its first filter is the runtime's, in words of its own; ours, behind it, is the same as everywhere.
            continue;
        }
        // A kernel without x32 says the same. What is in force says it before that.
        let running = sandbox.start(&["wait-eof"]);
        let programs = installed(host, running.pid());
        let (native, getpid) = (Arch::NATIVE.audit(), 39);
        assert_eq!(verdict(&programs, native, getpid), Action::Allow, "control: {profile}");
        for nr in 0..600 {
            let x32 = verdict(&programs, native, 0x4000_0000 | nr);
            assert_eq!(x32, Action::Errno(38), "{profile}: call {nr} of x32");
        }
        drop(running);
    }
}

// K24-K29: seccomp
fn only_harmless_socket_families_can_be_made(host: &Host) {
    require(&[Feature::PacketSockets, Feature::Ipv6]);
    let [packet, icmp, icmp6, vsock] =
        ["socket 17 3 0", "socket 2 3 1", "socket 10 3 58", "socket 40 1 0"];
    let [xfrm, audit, netfilter] = ["socket 16 3 6", "socket 16 3 9", "socket 16 3 12"];
    let refused =
        [packet, icmp, icmp6, vsock, xfrm, audit, netfilter, "socket 38 5 0", "socket 2 3 255"];
    // A kernel without AF_ALG (38) says EAFNOSUPPORT as the filter does; but to a type that is none it
    // says EINVAL, and the filter does not ask for the type.
    let no_type = ["socket 38 11 0"];
    host.bare_root().refuses(&no_type, &["EINVAL"]);
    host.bare_root().allows(&refused[..7]);
    let made = host.bare_root().ask("families");
    let control = made.words("made");
    assert!(control.contains("17") && control.contains("40"), "control: {control:?}");
    for profile in host.profiles() {
        let sandbox = host.sandbox().with(&format!("--profile {profile}"));
        sandbox.refuses(
            &refused,
            &["EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT"],
        );
        let unasked = if host.has_namespaces() { "EAFNOSUPPORT" } else { "EPERM" };
        sandbox.refuses(&no_type, &[unasked]);
        let answer = sandbox.ask("families");
        let more: Vec<_> = answer
            .words("made")
            .into_iter()
            .filter(|f| !["1", "2", "10", "16"].contains(f))
            .collect();
        assert!(more.is_empty(), "{profile}: families {more:?} can be made");
        let answer = sandbox.ask("netlink");
        let more: Vec<_> = answer.words("made").into_iter().filter(|p| *p != "0").collect();
        assert!(more.is_empty(), "{profile}: netlink protocols {more:?} can be made");
    }
}

// K30: seccomp (default: refuse)
fn a_call_newer_than_the_filter_is_refused(host: &Host) {
    // 467 is open_tree_attr, which came with Linux 6.15: younger than the tables of most filters.
    let young = host.bare_root().ask("numbers 467 467");
    assert_ne!(
        young.result, "ENOSYS",
        "control: this kernel has calls that are newer than most filters"
    );
    let ranges = ["numbers 467 467", "numbers 600 1100", "numbers 1000 1000", "numbers 335 423"];
    for profile in host.profiles() {
        let sandbox = host.sandbox().with(&format!("--profile {profile}"));
        sandbox.refuses(&ranges, &["EPERM", "ENOSYS", "killed"]);
    }
}
