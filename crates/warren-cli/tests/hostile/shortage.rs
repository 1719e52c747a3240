//! A host that lacks something, or has run out of it (THREATS C18, C19): refused, by name, and nothing is left. What the
//! kernel would say is said by a filter, or by a limit of its own.

use std::path::PathBuf;
use std::time::Duration;
use std::{fs, thread};

use warren_sys::cgroup::{self, Layout};
use warren_sys::seccomp::{self, Action, Arch, Rule, compile};

use crate::host::{Ended, Host, Place, Who, finish};

hostile_by_linux! {
    a_namespace_that_cannot_be_had_is_named,
    a_process_that_cannot_be_started_is_an_error,
    a_layer_that_is_missing_is_named,
    control_groups_that_cannot_be_written_hold_no_limit,
}

const ENOSYS: u16 = 38;

/// A namespace of users of one's own, in which something is done before the rest is run.
fn apart(first: &str) -> [String; 5] {
    let script = format!("{first}; exec \"$@\"");
    ["unshare", "-Ur", "sh", "-ec", &script].map(str::to_owned)
}

/// Puts a script around all that is run there, as the same user.
fn after<'h>(place: Place<'h>, script: &[String]) -> Place<'h> {
    place.around(script).around(["sh"])
}

#[track_caller]
fn assert_refused(ended: &Ended, named: &str) {
    ended.assert_clean_error(named);
    assert_eq!(ended.code, Some(125), "{named}: {ended:?}");
    assert!(ended.stderr.contains(named), "{named}: {ended:?}");
    assert_eq!(ended.text(), "", "{named}: nothing ran");
}

fn a_namespace_that_cannot_be_had_is_named(host: &Host) {
    let control = after(host.sandbox(), &apart(":")).run(&["echo", "in"]);
    assert_eq!(control.text(), "in\n", "control: with all of them it runs: {control:?}");
    for kind in ["user", "mnt", "pid", "ipc", "uts", "net", "cgroup"] {
        let none = apart(&format!("echo 0 > /proc/sys/user/max_{kind}_namespaces"));
        let ended = after(host.sandbox(), &none).run(&["echo", "in"]);
        let named = match kind {
            "net" => "the network namespace".to_owned(),
            "cgroup" => "the cgroup namespace".to_owned(),
            _ => format!("{kind} (user.max_{kind}_namespaces is 0)"),
        };
        assert_refused(&ended, &named);
        assert!(ended.stderr.contains("--isolation process"), "where else to turn: {ended:?}");
    }
}

/// A control group for one process alone.
struct Narrow(PathBuf);

impl Narrow {
    fn new() -> Self {
        let layout = Layout::detect().unwrap();
        let own = layout.v1("pids").map(|v1| &v1.own).or(layout.v2.as_ref().map(|v2| &v2.mount));
        let group = own.unwrap().join(format!("hostile-{}-narrow", std::process::id()));
        fs::create_dir(&group).unwrap();
        let group = Self(group);
        fs::write(group.0.join("pids.max"), "1").unwrap();
        group
    }
}

impl Drop for Narrow {
    fn drop(&mut self) {
        // Whoever was in there has just been reaped.
        let _ = cgroup::remove(&self.0, Duration::from_secs(5));
    }
}

fn a_process_that_cannot_be_started_is_an_error(host: &Host) {
    let (place, named, _group) = match host.who() {
        // The kernel counts all processes of a user's, but for root's.
        Who::Nobody => {
            let place = host.sandbox().around(["prlimit", "--nproc=1:1"]);
            (place, "cannot create the namespaces", None)
        }
        _ => {
            let group = Narrow::new();
            let enter = format!("echo $$ > {}/cgroup.procs; exec \"$@\"", group.0.display());
            let place = host.sandbox().within(["sh", "-ec", &enter, "sh"]);
            (place, "the guard of the control groups", Some(group))
        }
    };
    let ended = place.run(&["echo", "in"]);
    assert_refused(&ended, named);
    assert!(ended.stderr.contains("Resource temporarily unavailable"), "control: {ended:?}");
}

/// Runs something where the kernel says that it has no such call.
fn without(call: u32, place: &Place<'_>) -> Ended {
    let rule = Rule { nr: call, action: Action::Errno(ENOSYS), when: Vec::new() };
    let filter = compile(Arch::NATIVE, Action::Allow, &[rule]).unwrap();
    // What a thread starts has its filter.
    let command = place.command(&["echo", "in"]);
    let run = move || {
        rustix::thread::set_no_new_privs(true).unwrap();
        seccomp::install(&filter).unwrap();
        finish(command)
    };
    thread::spawn(run).join().unwrap()
}

fn a_layer_that_is_missing_is_named(host: &Host) {
    let by_machine = |x86: u32, arm: u32| if cfg!(target_arch = "x86_64") { x86 } else { arm };
    let harmless = by_machine(161, 51); // chroot(2), which nobody needs.
    assert_eq!(without(harmless, &host.sandbox()).text(), "in\n", "control: it runs");
    for (call, named) in [
        (by_machine(317, 277), "seccomp"),
        (444, "Landlock"),             // To make its rules,
        (446, "Landlock"),             // and to be held by them.
        (428, "cannot open /usr"),     // open_tree(2)
        (442, "cannot restrict /usr"), // mount_setattr(2)
        (by_machine(155, 41), "enter the new root"),
    ] {
        assert_refused(&without(call, &host.sandbox()), named);
    }
}

fn control_groups_that_cannot_be_written_hold_no_limit(host: &Host) {
    let groups = "mount --make-rprivate /; \
                  for m in $(awk '/ cgroup2? /{print $5}' /proc/self/mountinfo); do \
                  mount -o remount,bind,ro $m; done; exec \"$@\"";
    let read_only = || host.sandbox().within(["unshare", "-m", "sh", "-ec", groups, "sh"]);
    let ended = read_only().with("--memory 64M").run(&["echo", "in"]);
    assert_refused(&ended, "cannot enforce the limit `memory`");
    let ended = read_only().run(&["echo", "in"]);
    assert_eq!(ended.text(), "in\n", "what nobody asked for need not be exact: {ended:?}");
    assert!(ended.stderr.contains("warning: "), "and is not weaker in silence: {ended:?}");
    let report = read_only().report(&["true"]).0;
    let limits = report["enforced"]["limits"].as_array().unwrap();
    let memory = limits.iter().find(|limit| limit["limit"] == "memory").unwrap();
    assert_ne!(memory["bound"], "exact", "{report:#}");
    if host.who() == Who::Root {
        let report = host.sandbox().with("--memory 64M").report(&["true"]).0;
        assert_eq!(report["exit_code"], 0, "control: where they can be written it is held");
    }
}
