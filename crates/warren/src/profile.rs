//! The built-in profiles: what of the host a sandbox sees and which system calls it may make.
//!
//! They are written in `profiles/` with a reason on each rule; `build.rs` checks them and compiles the filters for
//! the target. `docs/syscalls.md` lists what becomes of every system call. Applying a profile is left to the backends.

#[cfg(test)]
use warren_sys::seccomp::Arch;
use warren_sys::seccomp::Instruction;

include!(concat!(env!("OUT_DIR"), "/profiles.rs"));

/// What a sandbox is given unless its spec says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Profile {
    /// What it is asked for by.
    pub name: &'static str,
    /// One line for a list.
    pub summary: &'static str,
    /// The name of its system call filter, for [`seccomp`].
    pub seccomp: &'static str,
    /// What of the host is shown, read-only. A link is the caller's to follow, on the host.
    pub host: &'static [HostPath],
    /// Names in `/proc` that are hidden; those that the kernel does not have are skipped.
    pub proc_masked: &'static [&'static str],
    /// Names in `/proc` that cannot be written, nor what is below them.
    pub proc_readonly: &'static [&'static str],
    /// Whether `/proc` shows processes and nothing else (`subset=pid`).
    pub proc_pids_only: bool,
    /// Whether Landlock lets TCP through, to be decided by the network policy.
    pub tcp: bool,
    /// Which users commands may be.
    pub users: ProfileUsers,
}

/// Which users the commands of a sandbox may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProfileUsers {
    /// `user`, for good.
    One,
    /// `user`, root and whom they add. Root is root of the sandbox's own user namespace alone: on the
    /// host it is an id that nobody else has.
    Several {
        /// What root may do, by the bits of capabilities(7).
        capabilities: u64,
    },
}

/// Returns the names of capabilities by their bits, as far as a profile may have them.
#[must_use]
pub fn capability_names(bits: u64) -> Vec<&'static str> {
    let held = |(_, bit): &&(&str, u32)| bits & 1 << bit != 0;
    CAPABILITIES.iter().filter(held).map(|(name, _)| *name).collect()
}

/// A file or directory of the host that a sandbox may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostPath {
    /// Absolute and normal.
    pub path: &'static str,
    /// Whether a host without it cannot have sandboxes of this profile; else it is left out.
    pub required: bool,
}

/// A system call filter in two parts, of which the kernel takes the stricter answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seccomp {
    /// What a profile names it by.
    pub name: &'static str,
    /// What PID 1 installs once it needs no more rights; every process of the sandbox inherits it.
    pub init: &'static [Instruction],
    /// What each workload installs on top before its exec: takes away what only PID 1 needs.
    pub workload: &'static [Instruction],
    /// The kinds of system call that no workload can make, as the build has proved on the programs.
    pub blocked_categories: &'static [&'static str],
}

/// Returns the profile of this name.
#[must_use]
pub fn profile(name: &str) -> Option<&'static Profile> {
    PROFILES.iter().find(|profile| profile.name == name)
}

/// Returns the names of all profiles, sorted.
#[must_use]
pub fn profile_names() -> Vec<&'static str> {
    PROFILES.iter().map(|profile| profile.name).collect()
}

/// Returns the system call filter of this name.
#[must_use]
pub fn seccomp(name: &str) -> Option<&'static Seccomp> {
    SECCOMP.iter().find(|seccomp| seccomp.name == name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Write as _;
    use std::path::Path;
    use std::{env, fs};

    use warren_sys::seccomp::{Action, Call, evaluate, outcomes};

    use super::*;

    const EPERM: Action = Action::Errno(1);
    const ENOSYS: Action = Action::Errno(38);
    const EPROTONOSUPPORT: Action = Action::Errno(93);
    const EAFNOSUPPORT: Action = Action::Errno(97);
    const I386: u32 = 0x4000_0003;
    const ARM: u32 = 0x4000_0028;
    const X32_BIT: u32 = 0x4000_0000;
    const PROFILES_BY_STRICTNESS: [&str; 3] = ["strict", "default", "permissive"];

    type Filter = (&'static [Instruction], &'static [Instruction]);

    fn filter(arch: Arch, name: &str) -> Filter {
        let (.., init, workload) = compiled::FILTERS
            .iter()
            .find(|(a, n, ..)| (*a, *n) == (arch, name))
            .expect("every filter is compiled for every architecture");
        (init, workload)
    }

    fn number(arch: Arch, name: &str) -> Option<u32> {
        let (_, x86_64, aarch64) = compiled::CALLS.iter().find(|call| call.0 == name).unwrap();
        match arch {
            Arch::X86_64 => *x86_64,
            Arch::Aarch64 => *aarch64,
        }
    }

    /// All that a workload can get for a call, whatever its arguments.
    fn workload_outcomes((init, workload): Filter, arch: u32, nr: u32) -> BTreeSet<Action> {
        let below = outcomes(init, arch, nr);
        let above = outcomes(workload, arch, nr);
        above.iter().flat_map(|a| below.iter().map(|b| a.stacked_on(*b))).collect()
    }

    /// What a workload gets for a call with these arguments, on every architecture that has it.
    #[track_caller]
    fn ask(profile: &str, name: &str, args: &[u64]) -> Action {
        let mut padded = [0; 6];
        padded[..args.len()].copy_from_slice(args);
        let answers: BTreeSet<_> = [Arch::X86_64, Arch::Aarch64]
            .into_iter()
            .filter_map(|arch| {
                let (init, workload) = filter(arch, profile);
                let call = Call { arch: arch.audit(), nr: number(arch, name)?, args: padded };
                Some(evaluate(workload, &call).stacked_on(evaluate(init, &call)))
            })
            .collect();
        assert_eq!(answers.len(), 1, "{name} has the same answer everywhere: {answers:?}");
        *answers.first().unwrap()
    }

    fn show(action: Action) -> &'static str {
        match action {
            Action::Allow => "allow",
            Action::KillProcess => "kill",
            Action::Ask | Action::Trace | Action::Trap(_) => unreachable!("no profile says so"),
            Action::Errno(errno) => {
                compiled::ERRNOS.iter().find(|(_, number)| *number == errno).unwrap().0
            }
        }
    }

    /// The answer of one profile to one call: "allow", "EPERM", "allow or EPERM", "ENOSYS, init: allow".
    fn cell(profile: &str, name: &str) -> String {
        let cells: BTreeSet<String> = [Arch::X86_64, Arch::Aarch64]
            .into_iter()
            .filter_map(|arch| {
                let filter = filter(arch, profile);
                let nr = number(arch, name)?;
                let listed = |set: &BTreeSet<Action>| {
                    set.iter().rev().map(|action| show(*action)).collect::<Vec<_>>().join(" or ")
                };
                let workload = workload_outcomes(filter, arch.audit(), nr);
                let init = outcomes(filter.0, arch.audit(), nr);
                let init = if init == workload {
                    String::new()
                } else {
                    format!(", init: {}", listed(&init))
                };
                Some(listed(&workload) + &init)
            })
            .collect();
        cells.into_iter().collect::<Vec<_>>().join(" / ")
    }

    fn published() -> String {
        let mut page = String::from(
            "# What becomes of every system call\n\n\
             Generated from `profiles/seccomp/`, which has the reasons: `WARREN_BLESS=1 cargo test -p warren syscalls`\n\
             writes this page anew, and that test fails when it is stale. Read off the compiled filters, not the lists.\n\n\
             \"or\" means that the arguments decide. \"init\" is what PID 1 of the sandbox, our own program, gets instead.\n\
             A number that is not here fails with ENOSYS. Calls by a foreign ABI (i386, 32-bit ARM) kill the process; x32\n\
             numbers fail with ENOSYS.\n\n\
             | call | x86-64 | aarch64 | strict | default | permissive |\n\
             | --- | --- | --- | --- | --- | --- |\n",
        );
        for (name, x86_64, aarch64) in compiled::CALLS {
            let nr = |number: &Option<u32>| number.map_or(String::new(), |nr| nr.to_string());
            let cells = PROFILES_BY_STRICTNESS.map(|profile| cell(profile, name)).join(" | ");
            writeln!(page, "| {name} | {} | {} | {cells} |", nr(x86_64), nr(aarch64)).unwrap();
        }
        page
    }

    #[test]
    fn the_published_list_of_syscalls_is_what_the_filters_do() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/syscalls.md");
        let now = published();
        if env::var_os("WARREN_BLESS").is_some() {
            fs::write(&path, &now).unwrap();
        }
        let stale = fs::read_to_string(&path).unwrap_or_default() != now;
        assert!(
            !stale,
            "docs/syscalls.md is stale: run WARREN_BLESS=1 cargo test -p warren syscalls"
        );
    }

    #[test]
    fn a_number_or_abi_outside_the_list_of_syscalls_never_passes() {
        for &(arch, name, init, workload) in compiled::FILTERS {
            let filter = (init, workload);
            let known: BTreeSet<_> =
                compiled::CALLS.iter().filter_map(|call| number(arch, call.0)).collect();
            assert!(known.len() > 300, "control: there is a table");
            for nr in 0..600 {
                if !known.contains(&nr) {
                    let all = workload_outcomes(filter, arch.audit(), nr);
                    assert_eq!(all, BTreeSet::from([ENOSYS]), "{name} {arch:?} {nr}");
                }
                for foreign in [I386, ARM] {
                    let all = workload_outcomes(filter, foreign, nr);
                    assert_eq!(all, BTreeSet::from([Action::KillProcess]), "{name} {arch:?} {nr}");
                }
                let all = workload_outcomes(filter, arch.audit(), nr | X32_BIT);
                assert_eq!(all, BTreeSet::from([ENOSYS]), "{name} {arch:?} x32 {nr}");
            }
        }
    }

    #[test]
    fn each_profile_allows_all_that_a_stricter_one_does() {
        for pair in PROFILES_BY_STRICTNESS.windows(2) {
            for (call, ..) in compiled::CALLS {
                let always = |profile: &str| cell(profile, call).starts_with("allow");
                assert!(!always(pair[0]) || always(pair[1]), "{call} in {pair:?}");
            }
        }
    }

    #[test]
    fn no_profile_makes_a_namespace() {
        const CLONE_NEW: [u64; 7] = [
            0x0002_0000,
            0x0200_0000,
            0x0400_0000,
            0x0800_0000,
            0x1000_0000,
            0x2000_0000,
            0x4000_0000,
        ];
        for profile in PROFILES_BY_STRICTNESS {
            let thread = 0x003d_0f00;
            assert_eq!(ask(profile, "clone", &[thread]), Action::Allow, "control: threads start");
            for flag in CLONE_NEW {
                for flags in [flag, flag | thread, flag | 17, flag | 1 << 32] {
                    assert_eq!(ask(profile, "clone", &[flags]), EPERM, "{flags:#x}");
                }
            }
            assert_eq!(ask(profile, "clone3", &[]), ENOSYS);
            assert_eq!(ask(profile, "unshare", &[]), EPERM);
            assert_eq!(ask(profile, "setns", &[]), EPERM);
        }
    }

    #[test]
    fn sockets_are_local_tcp_udp_and_routes_alone() {
        const UNIX: u64 = 1;
        const NETLINK: u64 = 16;
        for profile in ["default", "permissive"] {
            for inet in [2, 10] {
                for (kind, protocol) in
                    [(1, 0), (1, 6), (2, 17), (2 | 0o2_000_000, 0), (1 | 0o4000, 0)]
                {
                    assert_eq!(ask(profile, "socket", &[inet, kind, protocol]), Action::Allow);
                }
                for kind in [3, 3 | 0o2_000_000, 3 | 1 << 32, 4, 5, 6, 10] {
                    assert_eq!(ask(profile, "socket", &[inet, kind, 0]), EPERM, "type {kind}");
                }
                for protocol in [1, 58, 132, 136, 255, 256, 262] {
                    let answer = ask(profile, "socket", &[inet, 1, protocol]);
                    assert_eq!(answer, EPROTONOSUPPORT, "protocol {protocol}");
                }
                assert_eq!(ask(profile, "socketpair", &[inet, 1]), EAFNOSUPPORT);
            }
            assert_eq!(ask(profile, "socket", &[NETLINK, 3, 0]), Action::Allow);
            for protocol in 1..64 {
                assert_eq!(ask(profile, "socket", &[NETLINK, 3, protocol]), EAFNOSUPPORT);
            }
        }
        for profile in PROFILES_BY_STRICTNESS {
            assert_eq!(ask(profile, "socket", &[UNIX, 1]), Action::Allow);
            assert_eq!(ask(profile, "socketpair", &[UNIX, 1]), Action::Allow);
            for family in (0..64).filter(|family| ![1, 2, 10, 16].contains(family)) {
                for family in [family, family | 1 << 32] {
                    assert_eq!(ask(profile, "socket", &[family, 1]), EAFNOSUPPORT, "{family}");
                }
            }
        }
        for family in [2, 10, NETLINK] {
            assert_eq!(ask("strict", "socket", &[family, 1]), EAFNOSUPPORT);
        }
    }

    #[test]
    fn the_limit_of_cores_can_be_asked_for_and_not_changed() {
        const CORE: u64 = 4;
        for profile in PROFILES_BY_STRICTNESS {
            // A pointer to 4 GiB has a low half of zero.
            for new in [0x7fff_0000, 1 << 32] {
                for resource in [CORE, CORE | 1 << 32] {
                    assert_eq!(ask(profile, "prlimit64", &[0, resource, new]), ENOSYS);
                }
                assert_eq!(ask(profile, "prlimit64", &[0, CORE + 1, new]), Action::Allow);
            }
            assert_eq!(ask(profile, "prlimit64", &[0, CORE, 0, 0x7fff_0000]), Action::Allow);
            assert_eq!(ask(profile, "setrlimit", &[CORE, 0x7fff_0000]), ENOSYS);
            assert_eq!(ask(profile, "setrlimit", &[CORE + 1, 0x7fff_0000]), Action::Allow);
        }
    }

    #[test]
    fn no_profile_leaves_a_set_uid_file_or_a_device() {
        const O_CREAT: u64 = 0o100;
        const O_TMPFILE: u64 = 0o20_000_000;
        for profile in PROFILES_BY_STRICTNESS {
            for (mode, answer) in [
                (0o755, Action::Allow),
                (0o1777, Action::Allow),
                (0o4755, EPERM),
                (0o2755, EPERM),
                (0o6000 | 1 << 40, EPERM),
            ] {
                for name in ["creat", "mkdir", "chmod", "fchmod", "mknod"] {
                    assert_eq!(ask(profile, name, &[0, mode]), answer, "{name} {mode:o}");
                }
                for name in ["mkdirat", "fchmodat", "fchmodat2", "mknodat"] {
                    assert_eq!(ask(profile, name, &[0, 0, mode]), answer, "{name} {mode:o}");
                }
                for flags in [O_CREAT, O_CREAT | 1, O_TMPFILE | 0o200_000 | 1] {
                    assert_eq!(ask(profile, "open", &[0, flags, mode]), answer, "{mode:o}");
                    assert_eq!(ask(profile, "openat", &[0, 0, flags, mode]), answer, "{mode:o}");
                }
                // Garbage in a register that the kernel does not read is no reason to refuse.
                assert_eq!(ask(profile, "openat", &[0, 0, 0, mode]), Action::Allow);
            }
            for (kind, answer) in [
                (0o010_000, Action::Allow),
                (0o100_000, Action::Allow),
                (0o140_000, Action::Allow),
                (0o020_000, EPERM),
                (0o060_000, EPERM),
            ] {
                assert_eq!(ask(profile, "mknod", &[0, kind | 0o644]), answer, "{kind:o}");
                assert_eq!(ask(profile, "mknodat", &[0, 0, kind | 0o644]), answer, "{kind:o}");
            }
            assert_eq!(ask(profile, "openat2", &[]), ENOSYS);
        }
    }

    #[test]
    fn no_profile_types_into_a_terminal() {
        for profile in PROFILES_BY_STRICTNESS {
            assert_eq!(ask(profile, "ioctl", &[0, 0x5401]), Action::Allow, "control: TCGETS");
            for request in [0x5412, 0x541c, 0x5423] {
                for request in [request, request | 1 << 32] {
                    assert_eq!(ask(profile, "ioctl", &[0, request]), EPERM, "{request:#x}");
                }
            }
        }
    }

    #[test]
    fn personality_never_makes_data_executable() {
        const READ_IMPLIES_EXEC: u64 = 0x0040_0000;
        const ADDR_NO_RANDOMIZE: u64 = 0x0004_0000;
        for profile in PROFILES_BY_STRICTNESS {
            for more in [0, 8, ADDR_NO_RANDOMIZE] {
                assert_eq!(ask(profile, "personality", &[READ_IMPLIES_EXEC | more]), EPERM);
            }
        }
        assert_eq!(ask("default", "personality", &[0xffff_ffff]), Action::Allow);
        assert_eq!(ask("default", "personality", &[ADDR_NO_RANDOMIZE]), EPERM);
        assert_eq!(ask("permissive", "personality", &[ADDR_NO_RANDOMIZE]), Action::Allow);
    }

    #[test]
    fn init_keeps_what_a_workload_loses() {
        for seccomp in SECCOMP {
            for name in
                ["clone3", "openat2", "setfsuid", "setresuid", "setgroups", "seccomp", "waitid"]
            {
                let nr = number(Arch::NATIVE, name).unwrap();
                let init = outcomes(seccomp.init, Arch::NATIVE.audit(), nr);
                assert_eq!(init, BTreeSet::from([Action::Allow]), "{name} in {}", seccomp.name);
            }
        }
        assert_eq!(ask("strict", "setresuid", &[]), EPERM);
        assert_eq!(ask("default", "setresuid", &[]), Action::Allow);
    }

    #[test]
    fn every_profile_has_its_filter_and_says_what_it_blocks() {
        assert_eq!(profile_names(), ["default", "dev", "permissive", "strict"]);
        for name in profile_names() {
            let profile = profile(name).unwrap();
            let seccomp = seccomp(profile.seccomp).unwrap();
            for category in ["mount", "namespaces", "io_uring", "bpf", "keyring"] {
                assert!(seccomp.blocked_categories.contains(&category), "{category} in {name}");
            }
            assert_eq!(seccomp.blocked_categories.contains(&"debug"), name != "permissive");
            assert!(profile.host.contains(&HostPath { path: "/usr", required: true }));
            assert!(profile.proc_masked.contains(&"kcore"));
            assert!(profile.proc_readonly.contains(&"sys"));
            assert!(!profile.summary.is_empty());
        }
        assert_eq!(profile("nope"), None);
        assert_eq!(seccomp("nope"), None);
    }

    #[test]
    fn only_dev_has_root_and_root_has_no_way_into_the_kernel() {
        for profile in PROFILES {
            match profile.users {
                ProfileUsers::One => assert_ne!(profile.name, "dev"),
                ProfileUsers::Several { capabilities } => {
                    assert_eq!(profile.name, "dev");
                    // sys_module to sys_time but for none, net_admin, net_raw, ipc, mknod, mac, bpf, perf.
                    for bit in [2, 8, 9, 11, 12, 13, 14, 15].into_iter().chain(16..64) {
                        assert_eq!(capabilities & 1 << bit, 0, "capability {bit}");
                    }
                    assert_eq!(capability_names(capabilities).len(), 8);
                }
            }
        }
    }

    #[test]
    fn no_profile_shows_where_the_host_keeps_its_own() {
        for HostPath { path, .. } in PROFILES.iter().flat_map(|profile| profile.host) {
            for private in
                ["/home", "/root", "/var", "/run", "/proc", "/sys", "/dev", "/tmp", "/boot"]
            {
                assert!(!Path::new(path).starts_with(private), "{path}");
            }
            assert!(*path != "/etc" && *path != "/", "{path}");
        }
    }

    /// Not a test but the measurement of `docs/design/seccomp.md`.
    #[test]
    #[ignore = "measures: cargo test --release -p warren -- --ignored --nocapture install_time"]
    fn install_time_of_a_tree_and_of_a_list() {
        let seccomp = seccomp("default").unwrap();
        let list = linear(seccomp.init);
        let none: &[Instruction] = &[];
        for (name, below, program) in [
            ("init, as a tree", none, seccomp.init),
            ("init, as a list", none, &list),
            ("workload on top of init", seccomp.init, seccomp.workload),
            ("init once more on top of init", seccomp.init, seccomp.init),
        ] {
            let mut times: Vec<_> = (0..500).map(|_| install_time(below, program)).collect();
            times.sort();
            let (median, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
            eprintln!("{name}: {} instructions, median {median:?}, p99 {p99:?}", program.len());
        }
    }

    /// Installs on a thread of its own, so that every time is the first.
    fn install_time(below: &[Instruction], program: &[Instruction]) -> std::time::Duration {
        let run = || {
            rustix::thread::set_no_new_privs(true).unwrap();
            if !below.is_empty() {
                warren_sys::seccomp::install(below).unwrap();
            }
            let start = std::time::Instant::now();
            warren_sys::seccomp::install(program).unwrap();
            start.elapsed()
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap())
    }

    /// Writes the calls that `program` always allows one after another, and refuses all others.
    fn linear(program: &[Instruction]) -> Vec<Instruction> {
        let one = |code, jt, jf, k| Instruction { code, jt, jf, k };
        let arch = Arch::NATIVE.audit();
        let mut list = vec![
            one(0x20, 0, 0, 4),
            one(0x15, 1, 0, arch),
            one(0x06, 0, 0, 0x8000_0000),
            one(0x20, 0, 0, 0),
        ];
        for nr in (0..600).filter(|nr| outcomes(program, arch, *nr).contains(&Action::Allow)) {
            list.extend([one(0x15, 0, 1, nr), one(0x06, 0, 0, 0x7fff_0000)]);
        }
        list.push(one(0x06, 0, 0, 0x0005_0001));
        list
    }

    /// These need the programs that they run.
    mod needs_programs {
        use std::process::{Command, Output};

        use super::*;

        /// Runs a command in a child of a thread that has the whole filter; other threads stay free.
        fn filtered(profile: &str, program: &str, args: &[&str]) -> Output {
            let seccomp = seccomp(profile).unwrap();
            let run = || {
                rustix::thread::set_no_new_privs(true).unwrap();
                warren_sys::seccomp::install(seccomp.init).unwrap();
                warren_sys::seccomp::install(seccomp.workload).unwrap();
                Command::new(program).args(args).output()
            };
            let output = std::thread::scope(|scope| scope.spawn(run).join().unwrap());
            output.unwrap_or_else(|why| panic!("this host lacks {program}: {why}"))
        }

        #[track_caller]
        fn prints_42(profile: &str, program: &str, args: &[&str]) {
            let output = filtered(profile, program, args);
            let out = String::from_utf8_lossy(&output.stdout);
            assert_eq!(out.trim(), "42", "{program} under {profile}: {output:?}");
        }

        #[test]
        fn ordinary_programs_run_under_every_profile() {
            let directory = tempfile::tempdir().unwrap();
            let source = directory.path().join("a.c");
            let binary = directory.path().join("a");
            fs::write(&source, "#include <stdio.h>\nint main(){printf(\"%d\\n\",6*7);}").unwrap();
            let build = format!("gcc -o {0} {1} && {0}", binary.display(), source.display());
            let commit = format!(
                "cd {} && git init -q . && echo 42 >x && git add x && \
                 git -c user.name=a -c user.email=a@b commit -qm x && git show HEAD:x",
                directory.path().display()
            );
            let threads = "import threading, subprocess, tempfile, shutil, os\n\
                 t = threading.Thread(target=lambda: None); t.start(); t.join()\n\
                 d = tempfile.mkdtemp(); p = d + '/a'; open(p, 'w').write('42')\n\
                 shutil.copy2(p, p + 'b'); os.chmod(p, 0o600)\n\
                 print(subprocess.check_output(['cat', p + 'b']).decode()); shutil.rmtree(d)";
            let child =
                "require('child_process').execFile('echo',['42'],(e,o)=>process.stdout.write(o))";
            for profile in PROFILES_BY_STRICTNESS {
                prints_42(profile, "bash", &["-c", "cat <(echo $((6 * 7)) | sort)"]);
                prints_42(profile, "python3", &["-c", threads]);
                prints_42(profile, "node", &["-e", child]);
                prints_42(profile, "sh", &["-c", &build]);
                prints_42(profile, "sh", &["-c", &commit]);
                fs::remove_dir_all(directory.path().join(".git")).unwrap();
            }
        }

        /// Makes calls that need no rights and have no effect, and prints the errno of each.
        const ATTEMPTS: &str = "import ctypes, sys\n\
            libc = ctypes.CDLL(None, use_errno=True)\n\
            for call in sys.argv[1:]:\n\
            \x20   ctypes.set_errno(0)\n\
            \x20   libc.syscall(*[ctypes.c_long(int(x)) for x in call.split(',')])\n\
            \x20   print(ctypes.get_errno())\n";

        #[test]
        fn the_kernel_refuses_what_the_list_of_syscalls_does() {
            // The errno without a filter is the control: the call itself is there and would not say EPERM.
            let calls: [(&str, &[i64], i32, i32); 8] = [
                ("unshare", &[0], 0, 1),
                ("setns", &[-1, 0], 9, 1),
                ("clone3", &[0, 0], 22, 38),
                ("openat2", &[-1, 0, 0, 0], 22, 38),
                ("personality", &[0x0040_0000], 0, 1),
                ("ioctl", &[-1, 0x5412, 0], 9, 1),
                ("socket", &[40, 77, 0], 22, 97),
                ("chmod", &[0, 0o4755], 14, 1),
            ];
            let calls = calls.iter().filter_map(|(name, args, free, walled)| {
                let nr = i64::from(number(Arch::NATIVE, name)?);
                let words = std::iter::once(nr).chain(args.iter().copied());
                let words: Vec<_> = words.map(|word| word.to_string()).collect();
                Some((words.join(","), free.to_string(), walled.to_string()))
            });
            let (attempts, (free, walled)): (Vec<_>, (Vec<_>, Vec<_>)) =
                calls.map(|(attempt, free, walled)| (attempt, (free, walled))).unzip();
            let args: Vec<_> =
                ["-c", ATTEMPTS].into_iter().chain(attempts.iter().map(String::as_str)).collect();
            let lines = |output: Output| -> Vec<String> {
                String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
            };
            assert_eq!(
                lines(Command::new("python3").args(&args).output().unwrap()),
                free,
                "control"
            );
            for profile in PROFILES_BY_STRICTNESS {
                assert_eq!(lines(filtered(profile, "python3", &args)), walled, "{profile}");
            }
        }
    }
}
