//! Templates as people build and use them, and what a killed build leaves.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use serde_json::Value;

use crate::support::{Daemon, PATIENCE, Place, greet};

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[test]
fn a_template_is_built_from_files_named_used_and_removed() {
    let place = Place::with_backend("linux");
    let project = place.path("project");
    let recipe = "FROM host\nENV GREETING=hello\nWORKDIR /workspace/app\nCOPY src .\nRUN cat main > built; echo done\n";
    write(&project.join("Warrenfile"), recipe);
    write(&project.join("src/main"), "of the project\n");
    let daemon = Daemon::start_in(place, &[]);
    let dir = project.to_str().unwrap();
    let seen = daemon.run(&["template", "build", "app:v1", dir, "--tag", "newest"]);
    assert_eq!(seen.code, Some(0), "{seen:?}");
    assert!(seen.stderr.contains("[4] done"), "{seen:?}");
    let id = seen.stdout.trim().to_owned();
    let again = daemon.run(&["template", "build", "app:v2", dir]);
    assert!(again.stderr.contains("[4] known from before"), "{again:?}");
    let listed = daemon.ok(&["template", "ls"]);
    assert!(listed.contains("newest,v1") && listed.contains("v2"), "{listed}");
    let shown: Value =
        serde_json::from_str(&daemon.ok(&["template", "show", "app:v1", "--json"])).unwrap();
    assert_eq!(
        (shown["id"].as_str(), shown["workdir"].as_str()),
        (Some(&*id), Some("/workspace/app"))
    );

    let sandbox = daemon.ok(&["create", "--template", "app:newest", "--env", "MORE=1"]);
    let said = daemon.ok(&["exec", &sandbox, "--", "sh", "-c", "cat built; echo $GREETING $MORE"]);
    assert_eq!(said, "of the project\nhello 1");
    // Without the daemon, too: what a template is on disk is enough.
    let here = ["run", "--template", "app:v1", "--env", "MORE=2", "--", "sh", "-c"];
    let here = daemon.run(&[&here[..], &["cat built; echo $GREETING $MORE"]].concat());
    assert_eq!(here.stdout, "of the project\nhello 2\n", "{here:?}");
    let missing = daemon.run(&["run", "--template", "nope", "--", "true"]);
    assert_eq!(missing.code, Some(125), "{missing:?}");
    assert!(missing.stderr.contains("no template `nope"), "{missing:?}");
    daemon.ok(&["template", "tag", "app:v1", "default"]);
    daemon.ok(&["template", "rm", "app:v2"]);
    daemon.ok(&["create", "--template", "app"]);
    let missing = daemon.run(&["create", "--template", "app:v2"]);
    assert!(missing.stderr.contains("no template `app:v2`"), "{missing:?}");

    // It outlives the daemon, and so does what stands on it.
    let place = daemon.kill().into_place();
    let daemon = Daemon::start_in(place, &[]);
    assert_eq!(daemon.ok(&["exec", &sandbox, "--", "cat", "built"]), "of the project");
    daemon.ok(&["create", "--template", "app:v1"]);
    daemon.ok(&["template", "rm", "app"]);
    assert_eq!(daemon.ok(&["template", "ls"]).lines().count(), 1);
    assert_eq!(daemon.ok(&["exec", &sandbox, "--", "cat", "built"]), "of the project");
    let failed = daemon.run(&["template", "build", "app", "/nonexistent"]);
    assert!(failed.stderr.contains("there is no recipe"), "{failed:?}");
    write(&project.join("Bad"), "FROM host\nRUN echo before; exit 7\n");
    let bad = project.join("Bad");
    let failed = daemon.run(&["template", "build", "app", dir, "--file", bad.to_str().unwrap()]);
    assert_eq!(failed.code, Some(125), "{failed:?}");
    assert!(
        failed.stderr.contains("step 1 failed") && failed.stderr.contains("exit code 7"),
        "{failed:?}"
    );
}

#[test]
fn the_steps_of_a_template_reach_what_they_are_let_reach_and_its_sandboxes_do_not() {
    let port = greet();
    let hosts = format!("world.test:{port}=127.0.0.1,other.test:{port}=127.0.0.1").leak();
    let place = Place::with_settings("linux", vec![("WARREN_EGRESS_HOSTS", &*hosts)].leak());
    let project = place.path("project");
    let fetch = |host| format!("bash -c 'cat < /dev/tcp/{host}/{port}'");
    let recipe = format!("FROM host\nRUN {} > /workspace/said\n", fetch("world.test"));
    write(&project.join("Warrenfile"), &recipe);
    let daemon = Daemon::start_in(place, &[]);
    let build = |more: &[&str]| {
        let args = ["template", "build", "app", project.to_str().unwrap()];
        daemon.run(&[&args, more].concat())
    };
    for refused in [&[][..], &["--allow-net", "other.test"]] {
        let refused = build(refused);
        assert!(refused.stderr.contains("step 1 failed"), "{refused:?}");
    }
    let odd = build(&["--allow-net", "http://world.test"]);
    assert!(odd.code == Some(2) && odd.stderr.contains("allowed_network[0]"), "{odd:?}");
    let built = build(&["--allow-net", "world.test"]);
    assert_eq!(built.code, Some(0), "{built:?}");
    let sandbox = daemon.ok(&["create", "--template", "app"]);
    assert_eq!(daemon.ok(&["exec", &sandbox, "--", "cat", "/workspace/said"]), "hello");
    let closed = daemon.run(&["exec", &sandbox, "--", "sh", "-c", &fetch("world.test")]);
    assert!(closed.code == Some(1) && closed.stdout.is_empty(), "{closed:?}");
    let open = daemon.ok(&["create", "--template", "app", "--allow-net", "world.test"]);
    assert_eq!(daemon.ok(&["exec", &open, "--", "sh", "-c", &fetch("world.test")]), "hello");
}

#[test]
fn commands_run_as_the_templates_user_by_its_name_or_number() {
    let place = Place::with_backend("linux");
    let project = place.path("project");
    let daemon = Daemon::start_in(place, &[]);
    let dir = project.to_str().unwrap();
    for (user, uid, group) in [("root", "0", "0"), ("4242", "4242", "0"), ("1000", "1000", "1000")]
    {
        write(&project.join("Warrenfile"), &format!("FROM host\nUSER {user}\nRUN id -u\n"));
        let built = daemon.run(&["template", "build", "who", dir, "--profile", "dev"]);
        assert!(
            built.code == Some(0) && built.stderr.contains(&format!("[2] {uid}\n")),
            "{built:?}"
        );
        let sandbox = daemon.ok(&["create", "--template", "who"]);
        let who = ["sh", "-c", "id -u; id -g"];
        let wanted = format!("{uid}\n{group}");
        assert_eq!(daemon.ok(&[&["exec", &sandbox, "--"][..], &who].concat()), wanted, "{user}");
        let fork = daemon.ok(&["fork", &sandbox]);
        assert_eq!(daemon.ok(&[&["exec", &fork, "--"][..], &who].concat()), wanted, "{user}");
        let here = daemon.run(&[&["run", "--template", "who", "--"][..], &who].concat());
        assert_eq!(here.stdout.trim(), wanted, "{here:?}");
        for id in [&sandbox, &fork] {
            daemon.ok(&["kill", id]);
        }
    }
    // A sandbox with one user has that one, whatever its number is said to be.
    write(&project.join("Warrenfile"), "FROM host\nUSER 1000\nRUN id -u\n");
    let built = daemon.run(&["template", "build", "one", dir]);
    assert!(built.code == Some(0) && built.stderr.contains("[2] 1000\n"), "{built:?}");
}

#[test]
fn a_root_of_ones_own_is_imported_and_hides_the_host() {
    let place = Place::with_backend("linux");
    let root = place.path("root");
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox-static is installed");
    fs::set_permissions(root.join("bin/busybox"), fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["sh", "ls"] {
        symlink("busybox", root.join("bin").join(name)).unwrap();
    }
    let daemon = Daemon::start_in(place, &[]);
    let imported = daemon.run(&["template", "import", "busy", root.to_str().unwrap()]);
    assert_eq!(imported.code, Some(0), "{imported:?}");
    let sandbox = daemon.ok(&["create", "--template", "busy"]);
    let said = daemon.ok(&[
        "exec",
        &sandbox,
        "--",
        "/bin/sh",
        "-c",
        "ls /bin; ls /usr/bin 2>/dev/null; true",
    ]);
    assert_eq!(said, "busybox\nls\nsh");
}

#[test]
fn d1_a_build_that_is_killed_with_its_daemon_leaves_nothing() {
    let place = Place::with_backend("linux");
    let project = place.path("project");
    write(
        &project.join("Warrenfile"),
        "FROM host\nRUN echo one > /workspace/a\nRUN echo up; sleep 1734\n",
    );
    let mut daemon = Daemon::start_in(place, &[]);
    let dir = project.to_str().unwrap().to_owned();
    for _ in 0..3 {
        let client = daemon.place.warren(&["template", "build", "half", &dir]).spawn().unwrap();
        let began = std::time::Instant::now();
        while sleepers() == 0 {
            assert!(began.elapsed() < PATIENCE, "the step does not run: {}", daemon.log());
            std::thread::yield_now();
        }
        daemon = Daemon::start_in(daemon.kill().into_place(), &[]);
        let seen = client.wait_with_output().unwrap();
        assert_eq!(seen.status.code(), Some(125), "the client is told");
        let began = std::time::Instant::now();
        while sleepers() > 0 {
            assert!(began.elapsed() < PATIENCE, "its sandbox goes on");
            std::thread::yield_now();
        }
        assert_eq!(daemon.ok(&["template", "ls"]).lines().count(), 1, "nothing half-made is seen");
        let staging = daemon.place.path("state/storage/staging");
        assert_eq!(fs::read_dir(staging).unwrap().count(), 0);
    }
    // What was done before the kill is known.
    write(&project.join("Warrenfile"), "FROM host\nRUN echo one > /workspace/a\nRUN echo two\n");
    let built = daemon.run(&["template", "build", "half", &dir]);
    assert!(built.stderr.contains("[1] known from before"), "{built:?}");
}

/// Counts the commands of the step, by an argument that nobody else has.
fn sleepers() -> usize {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let line = |entry: fs::DirEntry| fs::read(entry.path().join("cmdline")).unwrap_or_default();
    processes.map(line).filter(|line| line == b"sleep\x001734\0").count()
}
