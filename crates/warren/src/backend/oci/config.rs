//! What a container runtime is told of a sandbox: the plan, in the words of the OCI runtime specification.
//!
//! Pure. The root is mounted before the runtime is called, so that all that is left to it are the namespaces, `/proc`,
//! the control groups, and the first filter; init does the rest inside, as in every sandbox.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use warren_init::plan::{OWN_PROC, OWN_PROGRAM, Plan, RANGE, STAGE_ROOT, STAGE_USERS, Users};
use warren_sys::seccomp::{self, Action, Arch};

use super::OciRuntime;
use crate::ResourceLimits;
use crate::profile::{self, Seccomp};

/// The version of the specification that is written.
const VERSION: &str = "1.0.2";
/// What init has until it has put up what is left of the walls, each in the sandbox's own user namespace: to become
/// another user, to empty the bounding set, to let go of mounts, to bring up the loopback, to hear there who asks for names.
const FIRST_CAPABILITIES: [&str; 6] = [
    "CAP_NET_ADMIN",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_ADMIN",
];
/// Of a kernel that is not the host's: so that init may make control groups there, and be another user than commands.
const OWN_KERNELS_CAPABILITIES: [&str; 3] = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_KILL"];
/// The calls that init makes before it installs its own filter, and that filter refuses.
const FIRST_CALLS: [&str; 16] = [
    "capset",
    "keyctl",
    "landlock_add_rule",
    "landlock_create_ruleset",
    "landlock_restrict_self",
    "mount",
    "mount_setattr",
    "move_mount",
    "open_tree",
    "seccomp",
    "setgid",
    "setgroups",
    "setresgid",
    "setresuid",
    "setuid",
    "umount2",
];
/// The least that a runtime gets by with, though a sandbox may be given less once it stands.
pub(super) const LEAST_PROCESSES: u64 = 64;
pub(super) const LEAST_MEMORY: u64 = 128 << 20;

/// What the configuration is made from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inputs<'a> {
    pub(crate) runtime: OciRuntime,
    pub(crate) plan: &'a Plan,
    /// The first of the sandbox's ids.
    pub(crate) base: u32,
    pub(crate) seccomp: &'a Seccomp,
    pub(crate) limits: &'a ResourceLimits,
    pub(crate) cpu_quota_millis: Option<u32>,
    /// Where the runtime is to put it among the control groups, if it is to put it anywhere.
    pub(crate) group: Option<&'a str>,
}

/// Writes it.
pub(crate) fn config(inputs: &Inputs<'_>) -> Value {
    let plan = inputs.plan;
    let mapping = json!([{ "containerID": 0, "hostID": inputs.base, "size": RANGE }]);
    let kinds = ["pid", "network", "ipc", "uts", "mount", "cgroup"];
    let own_kernel = inputs.runtime == OciRuntime::Runsc;
    // gVisor knows no namespace of control groups: it shows none of the host's.
    let kinds = &kinds[..kinds.len() - usize::from(own_kernel)];
    let mut namespaces: Vec<Value> = kinds.iter().map(|kind| json!({ "type": kind })).collect();
    // Made by us: what is used in it is charged to whoever made it, and a runtime is root. What gVisor's kernel counts is
    // its own.
    namespaces.push(match own_kernel {
        true => json!({ "type": "user" }),
        false => json!({ "type": "user", "path": STAGE_USERS }),
    });
    let below_proc =
        |names: &[String]| names.iter().map(|name| format!("/proc/{name}")).collect::<Vec<_>>();
    let mut linux = json!({
        "namespaces": namespaces,
        "uidMappings": mapping,
        "gidMappings": mapping,
        "maskedPaths": below_proc(&plan.proc.masked),
        "readonlyPaths": below_proc(&plan.proc.read_only),
        "resources": resources(inputs),
        "seccomp": filter(inputs.seccomp),
    });
    if let Some(group) = inputs.group {
        linux["cgroupsPath"] = json!(group);
    }
    json!({
        "ociVersion": VERSION,
        "process": process(inputs),
        "root": { "path": STAGE_ROOT, "readonly": false },
        "hostname": plan.hostname,
        "mounts": mounts(inputs),
        "linux": linux,
    })
}

fn process(inputs: &Inputs<'_>) -> Value {
    let more = match inputs.plan.users {
        Users::One => Vec::new(),
        Users::Several { capabilities } => profile::capability_names(capabilities),
    };
    let own = (inputs.runtime == OciRuntime::Runsc).then_some(OWN_KERNELS_CAPABILITIES);
    let capabilities: BTreeSet<String> = FIRST_CAPABILITIES
        .iter()
        .chain(own.iter().flatten())
        .map(|name| (*name).to_owned())
        .chain(more.into_iter().map(|name| format!("CAP_{}", name.to_uppercase())))
        .collect();
    json!({
        "terminal": false,
        "user": { "uid": 0, "gid": 0 },
        "args": [OWN_PROGRAM, "contained"],
        "env": [],
        "cwd": "/",
        "capabilities": {
            "bounding": capabilities,
            "effective": capabilities,
            "permitted": capabilities,
            "inheritable": [],
            "ambient": [],
        },
        // Where programs may set their user this cannot be; init's walls are then put up by right.
        "noNewPrivileges": inputs.plan.users == Users::One,
    })
}

/// Lists what gVisor mounts. It has a `/dev` of its own, with no device of the host; on an empty `/tmp` it would put
/// a filesystem that is outside of what may be written.
fn own_kernels_mounts() -> Value {
    let proc = |target: &str, options: &[&str]| json!({ "destination": target, "type": "proc", "source": "proc", "options": options });
    let bind = |target: &str| {
        let source = format!("{STAGE_ROOT}{target}");
        let options = ["rbind", "nosuid", "nodev"];
        json!({ "destination": target, "type": "bind", "source": source, "options": options })
    };
    json!([
        proc("/proc", &["nosuid", "nodev", "noexec"]),
        proc(OWN_PROC, &["nosuid", "nodev", "noexec", "ro"]),
        bind("/tmp"),
        bind("/dev/shm"),
    ])
}

fn mounts(inputs: &Inputs<'_>) -> Value {
    if inputs.runtime == OciRuntime::Runsc {
        return own_kernels_mounts();
    }
    let plan = inputs.plan;
    let mut options = vec!["nosuid", "nodev", "noexec"];
    let mut census = options.clone();
    census.extend(["ro", "subset=pid"]);
    if plan.users == Users::One {
        options.push("hidepid=invisible");
    }
    if plan.proc.pids_only {
        options.push("subset=pid");
    }
    let mut mounts = vec![
        json!({ "destination": "/proc", "type": "proc", "source": "proc", "options": options }),
        json!({ "destination": OWN_PROC, "type": "proc", "source": "proc", "options": census }),
    ];
    if inputs.runtime != OciRuntime::Crun {
        // It is there already. A runtime that is told so makes no devices of its own. crun 1.8 would bind it without
        // what is mounted in it, and finds all it wants there without being told.
        let dev = format!("{STAGE_ROOT}/dev");
        let options = ["rbind"];
        mounts.push(
            json!({ "destination": "/dev", "type": "bind", "source": dev, "options": options }),
        );
    }
    Value::Array(mounts)
}

/// Says what the control groups hold, with room for the runtime itself: the limits of the spec are written to them once
/// the sandbox stands.
fn resources(inputs: &Inputs<'_>) -> Value {
    let limits = inputs.limits;
    let mut resources = json!({ "devices": [{ "allow": false, "access": "rwm" }] });
    if inputs.group.is_none() {
        return resources;
    }
    if let Some(bytes) = limits.max_memory_bytes {
        let bytes = bytes.max(LEAST_MEMORY);
        resources["memory"] = json!({ "limit": bytes, "swap": bytes });
    }
    if let Some(count) = limits.max_processes {
        resources["pids"] = json!({ "limit": (u64::from(count) + 1).max(LEAST_PROCESSES) });
    }
    let mut cpu = serde_json::Map::new();
    if let Some(weight) = limits.cpu_weight {
        cpu.insert("shares".to_owned(), json!((u64::from(weight) * 1024 / 100).max(2)));
    }
    if let Some(millis) = inputs.cpu_quota_millis {
        cpu.insert("period".to_owned(), json!(100_000));
        cpu.insert("quota".to_owned(), json!(u64::from(millis) * 100));
    }
    if !cpu.is_empty() {
        resources["cpu"] = Value::Object(cpu);
    }
    resources
}

/// Translates what init's own filter may allow, and what it needs until it installs that. Arguments are left to init's
/// filter, which is stacked on this one.
fn filter(seccomp: &Seccomp) -> Value {
    let mut names: BTreeSet<&str> = FIRST_CALLS.into();
    for (name, x86_64, aarch64) in profile::CALLS {
        let number = match Arch::NATIVE {
            Arch::X86_64 => x86_64,
            Arch::Aarch64 => aarch64,
        };
        let may_be = |number| seccomp::outcomes(seccomp.init, Arch::NATIVE.audit(), number);
        if number.is_some_and(|number| may_be(number).contains(&Action::Allow)) {
            names.insert(name);
        }
    }
    let architecture = match Arch::NATIVE {
        Arch::X86_64 => "SCMP_ARCH_X86_64",
        Arch::Aarch64 => "SCMP_ARCH_AARCH64",
    };
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 1,
        "architectures": [architecture],
        "syscalls": [{ "names": names, "action": "SCMP_ACT_ALLOW" }],
    })
}

#[cfg(test)]
mod tests {
    use warren_init::plan::Cgroups;

    use super::*;
    use crate::backend::linux::limits;
    use crate::backend::linux::plan::{Inputs as PlanInputs, RealHost, plan};
    use crate::{Base, SandboxId, SandboxSpec};

    fn config_of(runtime: OciRuntime, profile: &str, limits: &ResourceLimits) -> Value {
        let spec = SandboxSpec { profile: profile.to_owned(), ..SandboxSpec::default() };
        let profile = profile::profile(profile).unwrap();
        let seccomp = profile::seccomp(profile.seccomp).unwrap();
        let decision =
            limits::decide(limits, None, &[].into(), &Default::default(), false).unwrap();
        let inputs = PlanInputs {
            backend: runtime.name(),
            id: &SandboxId::from_string("sbx-0123456789"),
            spec: &spec,
            profile,
            seccomp,
            privilege: crate::backend::linux::host::Privilege::Root,
            lifetime: warren_init::plan::Lifetime::Attached,
            limits: &decision,
            cgroups: Cgroups::default(),
            base: &Base::default(),
            layers: None,
        };
        let plan = plan(&inputs, &RealHost).unwrap();
        let group = (runtime == OciRuntime::Runc).then_some("warren-sbx-0123456789");
        let cpu_quota_millis = Some(1500);
        config(&Inputs {
            runtime,
            plan: &plan,
            base: 1 << 30,
            seccomp,
            limits,
            cpu_quota_millis,
            group,
        })
    }

    fn names<'a>(value: &'a Value, key: &str) -> Vec<&'a str> {
        value.as_array().unwrap().iter().map(|one| one[key].as_str().unwrap()).collect()
    }

    #[test]
    fn the_configuration_of_a_sandbox_is_this() {
        let mut config = config_of(OciRuntime::Runc, "default", &ResourceLimits::default());
        // These two are the profile's, and long.
        let linux = config["linux"].as_object_mut().unwrap();
        let (masked, seccomp) = (linux.remove("maskedPaths"), linux.remove("seccomp"));
        let masked = masked.unwrap();
        assert!(masked.as_array().unwrap().contains(&json!("/proc/kcore")), "{masked}");
        assert_eq!(seccomp.unwrap()["defaultAction"], "SCMP_ACT_ERRNO");
        let capabilities = json!([
            "CAP_NET_ADMIN",
            "CAP_NET_BIND_SERVICE",
            "CAP_SETGID",
            "CAP_SETPCAP",
            "CAP_SETUID",
            "CAP_SYS_ADMIN"
        ]);
        let ids = json!([{ "containerID": 0, "hostID": 1 << 30, "size": 65536 }]);
        let expected = json!({
            "ociVersion": "1.0.2",
            "process": {
                "terminal": false,
                "user": { "uid": 0, "gid": 0 },
                "args": ["/.warren/init", "contained"],
                "env": [],
                "cwd": "/",
                "capabilities": {
                    "bounding": capabilities,
                    "effective": capabilities,
                    "permitted": capabilities,
                    "inheritable": [],
                    "ambient": [],
                },
                "noNewPrivileges": true,
            },
            "root": { "path": "/run/warren/stage/root", "readonly": false },
            "hostname": "warren-01234567",
            "mounts": [
                {
                    "destination": "/proc",
                    "type": "proc",
                    "source": "proc",
                    "options": ["nosuid", "nodev", "noexec", "hidepid=invisible"],
                },
                {
                    "destination": "/.warren/proc",
                    "type": "proc",
                    "source": "proc",
                    "options": ["nosuid", "nodev", "noexec", "ro", "subset=pid"],
                },
                {
                    "destination": "/dev",
                    "type": "bind",
                    "source": "/run/warren/stage/root/dev",
                    "options": ["rbind"],
                },
            ],
            "linux": {
                "namespaces": [
                    { "type": "pid" },
                    { "type": "network" },
                    { "type": "ipc" },
                    { "type": "uts" },
                    { "type": "mount" },
                    { "type": "cgroup" },
                    { "type": "user", "path": "/run/warren/stage/users" },
                ],
                "uidMappings": ids,
                "gidMappings": ids,
                "readonlyPaths": config["linux"]["readonlyPaths"],
                "resources": {
                    "devices": [{ "allow": false, "access": "rwm" }],
                    "memory": { "limit": 536_870_912, "swap": 536_870_912 },
                    "pids": { "limit": 65 },
                    "cpu": { "shares": 1024, "period": 100_000, "quota": 150_000 },
                },
                "cgroupsPath": "warren-sbx-0123456789",
            },
        });
        assert_eq!(config, expected);
    }

    #[test]
    fn a_runtime_that_puts_nothing_in_groups_is_told_of_none() {
        let crun = config_of(OciRuntime::Crun, "default", &ResourceLimits::default());
        let linux = &crun["linux"];
        assert!(linux.get("cgroupsPath").is_none() && linux["resources"].get("memory").is_none());
        assert_eq!(names(&crun["mounts"], "destination"), ["/proc", "/.warren/proc"]);
    }

    #[test]
    fn a_limit_that_no_runtime_fits_in_is_written_later() {
        let limits = ResourceLimits {
            max_processes: Some(4),
            max_memory_bytes: Some(16 << 20),
            ..ResourceLimits::default()
        };
        let config = config_of(OciRuntime::Runc, "default", &limits);
        let resources = &config["linux"]["resources"];
        assert_eq!(resources["pids"]["limit"], LEAST_PROCESSES);
        assert_eq!(resources["memory"]["limit"], LEAST_MEMORY);
    }

    #[test]
    fn a_profile_with_several_users_has_their_capabilities_and_may_gain_privileges() {
        let config = config_of(OciRuntime::Runc, "dev", &ResourceLimits::default());
        let bounding = config["process"]["capabilities"]["bounding"].as_array().unwrap();
        assert!(bounding.contains(&json!("CAP_CHOWN")), "{bounding:?}");
        assert_eq!(config["process"]["noNewPrivileges"], false);
    }

    #[test]
    fn the_first_filter_allows_what_inits_own_may_and_what_it_needs_before() {
        for name in ["strict", "default", "permissive"] {
            let seccomp = profile::seccomp(name).unwrap();
            let filter = filter(seccomp);
            let allowed = filter["syscalls"][0]["names"].as_array().unwrap().clone();
            let allows = |call: &str| allowed.contains(&json!(call));
            assert!(allows("read") && allows("execve") && allows("umount2"), "{name}");
            for call in ["init_module", "kexec_load", "bpf", "perf_event_open", "pivot_root"] {
                assert!(!allows(call), "{name}: {call}");
            }
        }
    }
}
