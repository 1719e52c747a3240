//! Snapshots, forks, differences and undo, with real sandboxes; and a daemon that is killed meanwhile.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::support::{Daemon, Place};

/// Nobody waits for warm ones here.
const SETTINGS: &[(&str, &str)] = &[("WARREN_POOL_ENABLED", "false")];

fn start() -> Daemon {
    Daemon::start_in(Place::with_settings("linux", SETTINGS), &[])
}

fn lines(text: &str) -> Vec<&str> {
    text.lines().collect()
}

#[test]
fn what_worked_is_kept_and_what_did_not_is_undone() {
    let daemon = start();
    daemon.ok(&["create", "--name", "a"]);
    daemon.ok(&[
        "exec",
        "a",
        "--",
        "sh",
        "-c",
        "echo one > note; mkdir d; echo x > d/file; echo t > /tmp/t",
    ]);
    let diff = daemon.ok(&["diff", "a"]);
    let seen = lines(&diff);
    assert!(
        seen.contains(&"A /workspace/note  4 bytes") && seen.contains(&"A /workspace/d/"),
        "{diff}"
    );
    assert!(seen.contains(&"A /tmp/t  2 bytes"), "{diff}");
    let first = daemon.ok(&["snapshot", "create", "a", "first", "--label", "k=v"]);
    assert!(first.starts_with("snap-"));
    let ran = daemon.run(&[
        "exec",
        "--savepoint",
        "a",
        "--",
        "sh",
        "-c",
        "echo two >> note; rm -r d; touch new",
    ]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let mut said = lines(&ran.stderr);
    said.sort_unstable();
    assert_eq!(
        said,
        [
            "warren: A /workspace/new  0 bytes",
            "warren: D /workspace/d/",
            "warren: D /workspace/d/file  2 bytes",
            "warren: M /workspace/note  4 bytes -> 8 bytes",
        ]
    );
    let touch = ["exec", "--savepoint", "--json", "a", "--", "touch", "json"];
    let told: Value = serde_json::from_str(&daemon.ok(&touch)).unwrap();
    let changes = &told["savepoint"]["changes"];
    assert_eq!(
        (told["exit_code"].as_i64(), &changes["truncated"]),
        (Some(0), &false.into()),
        "{told}"
    );
    assert_eq!(changes["items"][0]["path"], "/workspace/json", "{told}");
    daemon.ok(&["undo", "a"]);
    let patch = daemon.ok(&["diff", "--since", "first", "--patch", "a", "/workspace/note"]);
    assert_eq!(patch, "--- a/workspace/note\n+++ b/workspace/note\n@@ -1 +1,2 @@\n one\n+two");
    let forks = daemon.ok(&["fork", "-n", "3", "a"]);
    for id in forks.lines() {
        assert_eq!(
            daemon.ok(&["exec", id, "--", "sh", "-c", "cat note; ls"]),
            "one\ntwo\nnew\nnote"
        );
    }
    daemon.ok(&["undo", "a"]);
    assert_eq!(daemon.ok(&["exec", "a", "--", "sh", "-c", "cat note; ls"]), "one\nd\nnote");
    assert_eq!(daemon.run(&["undo", "a"]).code, Some(125));
    daemon.ok(&["exec", "a", "--", "rm", "note"]);
    daemon.ok(&["restore", "a", "first"]);
    assert_eq!(daemon.ok(&["exec", "a", "--", "cat", "note", "/tmp/t"]), "one\nt");
    let from = daemon.ok(&["fork", "--snapshot", "first"]);
    assert_eq!(daemon.ok(&["exec", from.trim(), "--", "cat", "d/file"]), "x");
    let shown: Value =
        serde_json::from_str(&daemon.ok(&["snapshot", "show", "--json", "first"])).unwrap();
    assert_eq!(
        (&shown["labels"]["k"], &shown["savepoint"]),
        (&Value::from("v"), &Value::from(false))
    );
    assert_eq!(lines(&daemon.ok(&["snapshot", "ls", "-q"])), [first.trim()]);
    // As one file, to another place; here it is the same.
    let file = daemon.place.path("first.tar.zst");
    let file = file.to_str().unwrap();
    daemon.ok(&["snapshot", "export", "first", file]);
    let moved = daemon.ok(&["snapshot", "import", "--name", "moved", file]);
    let fork = daemon.ok(&["fork", moved.trim()]);
    assert_eq!(daemon.ok(&["exec", fork.trim(), "--", "cat", "note", "/tmp/t"]), "one\nt");
    let mut bytes = std::fs::read(file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(file, bytes).unwrap();
    assert_eq!(daemon.run(&["snapshot", "import", "--name", "bad", file]).code, Some(2));
    daemon.ok(&["snapshot", "rm", "moved"]);
    // What a live sandbox stands on outlives its snapshot, and a restart of the daemon.
    daemon.ok(&["snapshot", "rm", "first"]);
    assert_eq!(daemon.ok(&["snapshot", "ls", "-q"]), "");
    let daemon = Daemon::start_in(daemon.kill().into_place(), &[]);
    assert_eq!(daemon.ok(&["exec", from.trim(), "--", "cat", "d/file"]), "x");
    let gone = daemon.run(&["restore", "a", "first"]);
    assert_eq!(
        (gone.code, gone.stderr.as_str()),
        (Some(125), "error: no snapshot `first`\nhint: `warren snapshot ls` lists them\n")
    );
    for id in lines(&daemon.ok(&["ls", "-q"])) {
        daemon.ok(&["kill", id]);
    }
    daemon.end("TERM");
}

#[test]
fn chosen_changes_are_taken_over_unless_both_sides_changed_them() {
    let daemon = start();
    let host = tempfile::tempdir().unwrap();
    let at = |name: &str| host.path().join(name);
    std::fs::create_dir(at("src")).unwrap();
    for (name, text) in [("src/a", "a\n"), ("src/b", "b\n"), ("src/gone", "g\n"), ("mine", "m\n")] {
        std::fs::write(at(name), text).unwrap();
    }
    daemon.ok(&["create", "--name", "a"]);
    daemon.ok(&["cp", at("src").to_str().unwrap(), "a:/workspace/src"]);
    daemon.ok(&["snapshot", "create", "a", "start"]);
    let work = "echo A > src/a; chmod 755 src/a; echo new > src/new; mkdir deep; echo d > deep/d; rm src/gone; \
                ln -s /etc/passwd link; ln -s / out; mkfifo pipe; echo s > sneaky";
    daemon.ok(&["exec", "a", "--", "sh", "-c", work]);
    std::os::unix::fs::symlink("/tmp", at("deep")).unwrap();
    let dir = host.path().to_str().unwrap();
    // What is left out is said on stderr.
    let committed = |args: &[&str]| {
        let done = daemon.run(args);
        assert_eq!(done.code, Some(0), "{done:?}");
        done.stdout.trim_end().to_owned()
    };
    let refused = daemon.run(&["commit", "--since", "start", "a", dir]);
    assert_eq!(refused.code, Some(125), "a link of the host is not followed: {refused:?}");
    std::fs::remove_file(at("deep")).unwrap();
    std::fs::write(at("src/a"), "other\n").unwrap();
    let refused = daemon.run(&["commit", "--since", "start", "a", dir]);
    assert_eq!(refused.code, Some(125));
    assert!(refused.stderr.contains("conflict: src/a: it was changed here too"), "{refused:?}");
    assert!(at("src/gone").exists() && !at("src/new").exists(), "nothing was done");
    std::fs::write(at("src/a"), "a\n").unwrap();
    let all = ["A deep", "A deep/d", "A sneaky", "A src/new", "D src/gone", "M src/a"];
    let sorted = |text: String| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    assert_eq!(sorted(committed(&["commit", "--dry-run", "--since", "start", "a", dir])), all);
    assert!(!at("src/new").exists(), "only said");
    assert_eq!(
        committed(&["commit", "--since", "start", "a", dir, "/workspace/sneaky"]),
        "A sneaky"
    );
    let rest: Vec<_> = all.iter().copied().filter(|line| *line != "A sneaky").collect();
    // What a killed commit left is in nobody's way.
    std::fs::create_dir(at(".warren-commit")).unwrap();
    std::fs::write(at(".warren-commit/0"), "half").unwrap();
    assert_eq!(sorted(committed(&["commit", "--since", "start", "a", dir])), rest);
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(at("src/a")).unwrap());
    assert_eq!((std::fs::read(at("src/a")).unwrap(), mode & 0o7777), (b"A\n".to_vec(), 0o755));
    assert!(!at("src/gone").exists() && !at("link").exists() && !at(".warren-commit").exists());
    assert_eq!(std::fs::read(at("deep/d")).unwrap(), b"d\n");
    // One that was killed when all was in place leaves nothing to do but this.
    std::fs::create_dir(at(".warren-commit")).unwrap();
    assert_eq!(
        committed(&["commit", "--since", "start", "a", dir]),
        "",
        "there is nothing left to do"
    );
    assert!(!at(".warren-commit").exists());
    daemon.ok(&["kill", "a"]);
    daemon.end("TERM");
}

#[test]
fn d1_a_daemon_that_is_killed_meanwhile_leaves_nothing_half_made() {
    let mut daemon = start();
    daemon.ok(&["create", "--name", "a"]);
    daemon.ok(&[
        "exec",
        "a",
        "--",
        "sh",
        "-c",
        "for i in $(seq 300); do head -c 20000 /dev/urandom > f$i; done; echo kept > note",
    ]);
    daemon.ok(&["snapshot", "create", "a", "base"]);
    let mut cut = 0;
    for round in 0..12_u64 {
        let name = format!("s{round}");
        let args: &[&str] = match round % 3 {
            0 => &["snapshot", "create", "a", &name],
            1 => &["fork", "-n", "3", "a"],
            _ => &["restore", "a", "base"],
        };
        daemon.ok(&[
            "exec",
            "a",
            "--",
            "sh",
            "-c",
            "for i in $(seq 50); do head -c 20000 /dev/urandom > g$i; done",
        ]);
        let mut client =
            daemon.place.warren(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(3 + 9 * (round / 3)));
        let place = daemon.kill().into_place();
        let told = client.wait().unwrap().success();
        cut += u64::from(!told);
        daemon = Daemon::start_in(place, &[]);
        let staged = std::fs::read_dir(daemon.place.path("state/storage/staging")).unwrap().count();
        assert_eq!(staged, 0, "round {round}");
        let forks = std::fs::read_dir(daemon.place.path("state/storage/records/forks"));
        assert_eq!(forks.map_or(0, Iterator::count), 0, "round {round}");
        let ids = daemon.ok(&["ls", "-q"]);
        let ids = lines(&ids);
        let forked = ids.len() - 1;
        assert!(forked == 0 || (forked == 3 && round % 3 == 1), "round {round}: {ids:?}");
        assert!(
            !told || round % 3 != 1 || forked == 3,
            "round {round}: what was acknowledged is there"
        );
        let a = daemon.ok(&["show", "--json", "a"]);
        let own = serde_json::from_str::<Value>(&a).unwrap()["id"].as_str().map(str::to_owned);
        for id in ids.iter().filter(|id| Some((**id).to_owned()) != own) {
            assert_eq!(daemon.ok(&["exec", id, "--", "cat", "note"]), "kept", "round {round}");
            daemon.ok(&["kill", id]);
        }
        assert_eq!(daemon.ok(&["exec", "a", "--", "cat", "note"]), "kept", "round {round}");
        let known = daemon.ok(&["snapshot", "ls", "--json"]);
        assert!(!told || round % 3 != 0 || known.contains(&format!("\"{name}\"")), "round {round}");
    }
    assert!(cut > 0, "control: some were cut short");
    // Every snapshot that is listed is whole.
    for id in lines(&daemon.ok(&["snapshot", "ls", "-q"])) {
        let fork = daemon.ok(&["fork", id]);
        assert_eq!(
            daemon.ok(&["exec", fork.trim(), "--", "sh", "-c", "cat note; cat f* | wc -c"]),
            "kept\n6000000"
        );
        daemon.ok(&["kill", fork.trim()]);
        daemon.ok(&["snapshot", "rm", id]);
    }
    daemon.ok(&["kill", "a"]);
    // With the last of them all layers are gone.
    let place = daemon.kill().into_place();
    let daemon = Daemon::start_in(place, &[]);
    let left = std::fs::read_dir(daemon.place.path("state/storage/layers")).unwrap().count();
    assert_eq!(left, 0);
    daemon.end("TERM");
}

/// Tells which of two versions each file of a directory has, and that it has one of them.
#[track_caller]
fn versions(directory: &std::path::Path, count: usize) -> (usize, usize) {
    let (mut old, mut new) = (0, 0);
    for number in 0..count {
        let text = std::fs::read(directory.join(format!("f{number}"))).expect("it was committed");
        match (text.first(), text.len()) {
            (Some(b'o'), 60_000) if text.iter().all(|byte| *byte == b'o') => old += 1,
            (Some(b'n'), 70_000) if text.iter().all(|byte| *byte == b'n') => new += 1,
            other => panic!("f{number} is half-written: {other:?}"),
        }
    }
    (old, new)
}

#[test]
fn a_commit_that_is_killed_leaves_every_file_whole_and_can_be_done_again() {
    const FILES: usize = 100;
    let mut daemon = start();
    let host = tempfile::tempdir().unwrap();
    let source = tempfile::tempdir().unwrap();
    for number in 0..FILES {
        std::fs::write(source.path().join(format!("f{number}")), vec![b'o'; 60_000]).unwrap();
    }
    daemon.ok(&["create", "--name", "a"]);
    daemon.ok(&["cp", source.path().to_str().unwrap(), "a:/workspace/src"]);
    daemon.ok(&["snapshot", "create", "a", "start"]);
    let change = "import os\nfor f in os.listdir('src'): open('src/' + f, 'w').write('n' * 70000)";
    daemon.ok(&["exec", "a", "--", "python3", "-c", change]);
    let dir = host.path().to_str().unwrap().to_owned();
    let args = ["commit", "--since", "start", "--from", "/workspace/src", "a", &dir];
    let reset = || {
        for number in 0..FILES {
            std::fs::write(host.path().join(format!("f{number}")), vec![b'o'; 60_000]).unwrap();
        }
    };
    let draft = host.path().join(".warren-commit");
    reset();
    let began = std::time::Instant::now();
    assert_eq!(daemon.run(&args).code, Some(0));
    let whole = began.elapsed();
    assert_eq!(versions(host.path(), FILES), (0, FILES), "control: what a commit does");
    let (mut cut, mut between) = (0, 0);
    for round in 0..8_u32 {
        reset();
        let mut client = daemon.place.warren(&args);
        let mut client = client.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(whole * (round % 4 + 1) / 5);
        if round < 4 {
            // The daemon: what is not all there is not begun, and nothing of it stays.
            let place = daemon.kill().into_place();
            let done = client.wait().unwrap().success();
            let seen = versions(host.path(), FILES);
            assert_eq!(seen, if done { (0, FILES) } else { (FILES, 0) }, "round {round}");
            assert!(!draft.exists(), "round {round}");
            cut += u32::from(!done);
            daemon = Daemon::start_in(place, &[]);
        } else {
            // Whoever writes: each file is as it was, or as it shall be.
            client.kill().unwrap();
            cut += u32::from(!client.wait().unwrap().success());
            let (old, new) = versions(host.path(), FILES);
            between += u32::from(old > 0 && new > 0);
        }
        // Again, over what is left of it.
        assert_eq!(daemon.run(&args).code, Some(0), "round {round}");
        assert_eq!(versions(host.path(), FILES), (0, FILES), "round {round}");
        assert!(!draft.exists(), "round {round}");
        let there = std::fs::read_dir(host.path()).unwrap().count();
        assert_eq!(there, FILES, "round {round}");
    }
    eprintln!("{cut} were cut short, {between} of them between two files");
    assert!(cut > 0, "control: some were cut short");
    daemon.ok(&["kill", "a"]);
    daemon.end("TERM");
}

/// Swap that this test has for itself; none if this host lets nobody have it.
struct Swap(std::path::PathBuf);

impl Swap {
    fn on(directory: &std::path::Path) -> Option<Self> {
        let file = directory.join("swap");
        std::fs::write(&file, vec![0; 96 << 20]).ok()?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&file, mode).ok()?;
        let run = |program: &str| {
            let done = std::process::Command::new(program).arg(&file).output();
            done.is_ok_and(|done| done.status.success())
        };
        (run("mkswap") && run("swapon")).then_some(Self(file))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = std::process::Command::new("swapoff").arg(&self.0).status();
    }
}

/// Holds memory of its own and a large file, and says in the end whether the memory is what it was.
const HOLDER: &str = "import hashlib, os, time
data = os.urandom(40 << 20)
with open('/tmp/large', 'wb') as file: file.write(os.urandom(8 << 20))
digest = hashlib.sha256(data).digest()
print('ready', flush=True)
while not os.path.exists('/tmp/go'): time.sleep(0.01)
print('whole' if hashlib.sha256(data).digest() == digest else 'broken', flush=True)";

#[test]
fn suspended_to_disk_memory_is_free_and_the_processes_go_on_under_the_next_daemon() {
    let daemon = start();
    let id = daemon.ok(&["create", "--name", "a"]);
    let holder = ["exec", "-d", "--id", "holder", "a", "--", "python3", "-c", HOLDER];
    daemon.ok(&holder);
    while !daemon.ok(&["logs", "a", "holder"]).contains("ready") {
        std::thread::sleep(Duration::from_millis(10));
    }
    if std::fs::read_to_string("/proc/swaps").unwrap().lines().count() == 1 {
        let seen = daemon.run(&["suspend", "--to-disk", "a"]);
        let wanted = "error: the linux backend does not support suspending to disk here\n\
                      hint: this host has no swap";
        assert!(seen.code == Some(125) && seen.stderr.starts_with(wanted), "{seen:?}");
        assert!(daemon.ok(&["ls"]).contains("active"), "it is as it was");
        assert_eq!(daemon.ok(&["exec", "a", "--", "echo", "hi"]), "hi");
    }
    let large = tempfile::tempdir_in("/var/tmp").unwrap();
    let Some(swap) = Swap::on(large.path()) else {
        // There is nothing more to be seen here; the machine with cgroup v2 has swap.
        return drop(daemon.end("TERM"));
    };
    let find = ["/sys/fs/cgroup", "-type", "d", "-name", &format!("warren-{}", id.trim())];
    let found = std::process::Command::new("find").args(find).output().unwrap().stdout;
    let found = String::from_utf8(found).unwrap();
    let groups: Vec<std::path::PathBuf> = found.lines().map(Into::into).collect();
    let used = || -> u64 {
        let files = ["memory.usage_in_bytes", "memory.current"];
        let mut found = groups.iter().flat_map(|group| files.map(|file| group.join(file)));
        let text = found.find_map(|file| std::fs::read_to_string(file).ok());
        text.expect("a group").trim().parse().unwrap()
    };
    let before = used();
    assert!(before > 48 << 20, "control: it holds {before} bytes");
    daemon.ok(&["suspend", "--to-disk", "a"]);
    let after = used();
    eprintln!("{before} bytes before, {after} after");
    assert!(after < before / 4, "{before} bytes before, {after} after");
    daemon.ok(&["suspend", "--to-disk", "a"]);
    // What was allowed for that moment is taken back.
    let knobs = ["memory.swappiness", "memory.swap.max"];
    for knob in groups.iter().flat_map(|group| knobs.map(|knob| group.join(knob))) {
        let value = std::fs::read_to_string(&knob).unwrap_or_else(|_| "0".to_owned());
        assert_eq!(value.trim(), "0", "{}", knob.display());
    }
    let daemon = Daemon::start_in(daemon.kill().into_place(), &[]);
    assert!(used() < before / 4, "looking after it brings nothing back");
    assert!(daemon.ok(&["ls"]).contains("suspended"));
    daemon.ok(&["resume", "a"]);
    daemon.ok(&["exec", "a", "--", "touch", "/tmp/go"]);
    daemon.ok(&["wait", "a", "holder"]);
    assert_eq!(daemon.ok(&["logs", "a", "holder"]), "ready\nwhole", "its memory is what it was");
    daemon.ok(&["suspend", "a"]);
    daemon.ok(&["suspend", "--to-disk", "a"]);
    daemon.ok(&["resume", "a"]);
    assert_eq!(daemon.ok(&["exec", "a", "--", "sh", "-c", "wc -c < /tmp/large"]), "8388608");
    daemon.ok(&["kill", "a"]);
    daemon.end("TERM");
    drop(swap);
}
