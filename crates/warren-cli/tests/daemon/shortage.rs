//! A daemon, its launcher or an init to which the kernel refuses a process, a program or memory (THREATS C17, C18): whoever
//! asks is told, nothing is lost, and it works again.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use warren_sys::cgroup::{self, Layout};

use crate::adversity::init_of;
use crate::support::{Daemon, Outcome, PATIENCE, Place, outcome};

/// Has the kernel refuse a call to a process, and to all that it starts from now on.
struct Refusing(Child);

impl Refusing {
    fn new(pid: &str, call: &str, errno: &str) -> Self {
        let (trace, inject) = (format!("trace={call}"), format!("inject={call}:error={errno}"));
        let mut strace = Command::new("strace");
        strace.args(["-f", "-q", "-o", "/dev/null", "-p", pid, "-e", &trace, "-e", &inject]);
        let this = Self(strace.stderr(Stdio::null()).spawn().unwrap());
        let is_traced = || {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            !status.contains("TracerPid:\t0\n")
        };
        let began = Instant::now();
        while !is_traced() {
            assert!(began.elapsed() < PATIENCE, "control: strace has the process");
            std::thread::sleep(Duration::from_millis(2));
        }
        this
    }
}

impl Drop for Refusing {
    fn drop(&mut self) {
        // It lets go of them all when it is told to end.
        let _ = Command::new("kill").args(["-INT", &self.0.id().to_string()]).status();
        let _ = self.0.wait();
    }
}

/// Runs a client, which may not hang.
fn ask(daemon: &Daemon, args: &[&str]) -> Outcome {
    let mut child = daemon.place.warren(args).spawn().unwrap();
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(15) {
            child.kill().unwrap();
            panic!("{args:?} hangs: {}", daemon.log());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    outcome(child.wait_with_output().unwrap())
}

#[track_caller]
fn assert_typed(seen: &Outcome, code: i32) {
    assert_eq!((seen.code, seen.stdout.as_str()), (Some(code), ""), "{seen:?}");
    assert!(seen.stderr.starts_with("error: ") && seen.stderr.contains("hint: "), "{seen:?}");
}

/// Returns the first refusal of what is asked again and again: one may have been made ready before.
fn until_refused(daemon: &Daemon, args: &[&str]) -> Outcome {
    let mut tries = (0..3).map(|_| ask(daemon, args));
    tries.find(|seen| seen.code != Some(0)).expect("control: it is refused")
}

#[test]
fn c18_what_cannot_be_started_is_said_to_be_so_and_the_next_is_started() {
    let settings: &[(&str, &str)] = &[("WARREN_POOL_ENABLED", "false")];
    let daemon = Daemon::start_in(Place::with_settings("linux", settings), &[]);
    let id = daemon.ok(&["create"]);
    let echo = ["exec", &id, "--", "echo", "here"];
    let init = init_of(&id);
    let calls =
        [("clone3", "EAGAIN"), ("clone3", "ENOMEM"), ("execve", "EAGAIN"), ("execve", "ENOMEM")];
    for (call, errno) in calls {
        let refusing = Refusing::new(&init, call, errno);
        let seen = until_refused(&daemon, &echo);
        assert_typed(&seen, 126);
        assert!(seen.stderr.contains("no process could be started"), "{call} {errno}: {seen:?}");
        assert_eq!(ask(&daemon, &echo), seen, "{call} {errno}");
        drop(refusing);
        assert_eq!(daemon.ok(&echo), "here", "{call} {errno}");
    }
    let launcher = launcher_of(&daemon);
    for errno in ["EAGAIN", "ENOMEM"] {
        let before = daemon.ok(&["ls", "-q"]).lines().count();
        let refusing = Refusing::new(&launcher, "clone3", errno);
        let made = (0..3).map(|_| ask(&daemon, &["create"])).collect::<Vec<_>>();
        drop(refusing);
        let (made, refused): (Vec<_>, Vec<_>) = made.iter().partition(|seen| seen.code == Some(0));
        assert!(!refused.is_empty(), "control: {errno} is what it says");
        refused.iter().for_each(|seen| assert_typed(seen, 125));
        let known = daemon.ok(&["ls", "-q"]).lines().count();
        assert_eq!(known, before + made.len(), "nothing is left of what was not made");
        let next = daemon.ok(&["create"]);
        assert_eq!(daemon.ok(&["exec", &next, "--", "echo", "here"]), "here", "{errno}");
    }
}

/// The process that makes sandboxes for a daemon.
fn launcher_of(daemon: &Daemon) -> String {
    let read = |path: String| fs::read_to_string(path).unwrap_or_default();
    let threads = fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap().flatten();
    let children = threads.map(|thread| read(format!("{}/children", thread.path().display())));
    let children = children.collect::<String>();
    let is_launcher = |pid: &&str| read(format!("/proc/{pid}/comm")).contains("launcher");
    let launcher = children.split_whitespace().find(is_launcher);
    launcher.expect("a launcher").to_owned()
}

/// A control group around the daemon alone.
struct Narrow(PathBuf);

impl Narrow {
    fn new(controller: &str) -> Self {
        let layout = Layout::detect().unwrap();
        let own =
            layout.v1(controller).map(|v1| &v1.own).or(layout.v2.as_ref().map(|v2| &v2.mount));
        let group = own.unwrap().join(format!("daemon-{}-{controller}", std::process::id()));
        fs::create_dir(&group).unwrap();
        Self(group)
    }

    fn set(&self, files: [&str; 2], value: &str) {
        let path = files.map(|file| self.0.join(file)).into_iter().find(|path| path.exists());
        fs::write(path.unwrap(), value).unwrap();
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).unwrap().trim().to_owned()
    }

    fn add(&self, pid: &str) {
        fs::write(self.0.join("cgroup.procs"), pid).unwrap();
    }
}

impl Drop for Narrow {
    fn drop(&mut self) {
        let _ = cgroup::remove(&self.0, Duration::from_secs(5));
    }
}

#[test]
fn c17_without_processes_it_says_so_and_serves_again() {
    let settings: &[(&str, &str)] =
        &[("WARREN_POOL_ENABLED", "false"), ("WARREN_CLEANUP_INTERVAL", "300ms")];
    let group = Narrow::new("pids");
    let daemon = Daemon::start_in(Place::with_settings("linux", settings), &[]);
    let id = daemon.ok(&["create"]);
    daemon.ok(&["exec", &id, "--", "sh", "-c", "echo kept > /workspace/kept"]);
    // It has the threads that it has, and its launcher is alone.
    group.add(&daemon.pid().to_string());
    group.add(&launcher_of(&daemon));
    group.set(["pids.max", "pids.max"], &group.read("pids.current"));
    let mut refused = 0;
    for args in
        [&["create"][..], &["snapshot", "create", &id], &["ls"], &["exec", &id, "--", "true"]]
            .repeat(3)
    {
        let seen = ask(&daemon, args);
        if seen.code != Some(0) {
            refused += 1;
            assert_typed(&seen, 125);
        }
    }
    assert!(refused > 0, "control: something needs a process");
    assert!(!group.read("pids.events").ends_with(" 0"), "control: the kernel refused");
    group.set(["pids.max", "pids.max"], "max");
    let next = daemon.ok(&["create"]);
    assert_eq!(daemon.ok(&["exec", &next, "--", "echo", "here"]), "here");
    daemon.ok(&["snapshot", "create", &id]);
    assert_eq!(daemon.ok(&["exec", &id, "--", "cat", "/workspace/kept"]), "kept");
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}

#[test]
fn c17_killed_for_want_of_memory_nothing_of_it_is_lost() {
    let group = Narrow::new("memory");
    let settings: &[(&str, &str)] = &[("WARREN_POOL_ENABLED", "false")];
    let daemon = Daemon::start_in(Place::with_settings("linux", settings), &[]);
    let ids = [daemon.ok(&["create"]), daemon.ok(&["create"])];
    for id in &ids {
        daemon.ok(&["exec", id, "--", "sh", "-c", "echo kept > /workspace/kept; sleep 600 &"]);
    }
    let saved = daemon.ok(&["snapshot", "create", &ids[0]]);
    // What it has stays charged where it was: it can have this much more.
    group.set(["memory.limit_in_bytes", "memory.max"], "1M");
    group.add(&daemon.pid().to_string());
    let began = Instant::now();
    let is_alive = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", daemon.pid()));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    };
    let mut told = Vec::new();
    while is_alive() {
        assert!(began.elapsed() < PATIENCE, "control: it runs out of memory");
        let clients: Vec<_> =
            (0..4).map(|_| daemon.place.warren(&["create"]).spawn().unwrap()).collect();
        told.extend(clients.into_iter().map(|child| outcome(child.wait_with_output().unwrap())));
    }
    let counts = ["memory.oom_control", "memory.events"].map(|file| group.0.join(file));
    let counts = counts.iter().find_map(|path| fs::read_to_string(path).ok()).unwrap();
    assert!(counts.contains("oom_kill 1"), "control: the kernel killed it: {counts}");
    let failed = told.iter().filter(|seen| seen.code != Some(0));
    failed.for_each(|seen| assert_typed(seen, 125));
    let made = told.iter().filter(|seen| seen.code == Some(0)).map(|seen| seen.stdout.trim());
    let daemon = Daemon::start_in(daemon.kill().into_place(), &[]);
    let known = daemon.ok(&["ls", "-q"]);
    for id in made.chain(ids.iter().map(String::as_str)) {
        assert!(known.lines().any(|line| id.starts_with(line)), "{id} is lost: {known}");
    }
    for id in &ids {
        assert_eq!(daemon.ok(&["exec", id, "--", "cat", "/workspace/kept"]), "kept");
    }
    assert!(daemon.ok(&["snapshot", "ls", "-q"]).contains(&saved), "{saved}");
    let next = daemon.ok(&["create"]);
    assert_eq!(daemon.ok(&["exec", &next, "--", "echo", "here"]), "here");
}
