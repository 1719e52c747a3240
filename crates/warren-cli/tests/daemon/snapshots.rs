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
    assert_eq!(
        committed(&["commit", "--since", "start", "a", dir]),
        "",
        "there is nothing left to do"
    );
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
