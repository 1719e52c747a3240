//! The audit log of a real daemon: killed, restarted, read while it runs.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Daemon, PATIENCE, Place, greet};

fn records(place: &Place, args: &[&str]) -> Vec<Value> {
    let shown = place.run(&[&["audit", "show", "--json"], args].concat());
    assert_eq!(shown.code, Some(0), "{shown:?}");
    shown.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn verified(place: &Place) -> Value {
    let report = place.run(&["audit", "verify", "--json"]);
    let report_value: Value =
        serde_json::from_str(&report.stdout).unwrap_or_else(|_| panic!("{report:?}"));
    assert_eq!(report.code, Some(0), "{report:?}");
    report_value
}

#[test]
fn what_was_done_is_shown_and_what_was_changed_is_found() {
    let daemon = Daemon::start();
    let id = daemon.run(&["create"]).stdout.trim().to_owned();
    daemon.run(&["exec", "--env", "TOKEN=s3cret", &id, "--", "echo", "hi"]);
    daemon.run(&["show", "nobodys"]);
    let place = daemon.place.clone();
    verified(&place);
    assert_eq!(daemon.end("TERM").0, Some(0));
    let all = records(&place, &[]);
    let own = records(
        &place,
        &["--sandbox", &id, "--tenant", &format!("uid:{}", rustix::process::geteuid().as_raw())],
    );
    assert!(own.len() >= 2 && own.len() < all.len(), "{own:?}");
    assert!(own.iter().any(|one| one["kind"] == "exec" && one["command"][0] == "echo"), "{own:?}");
    assert!(records(&place, &["--since", "2999-01-01T00:00:00Z"]).is_empty());
    assert_eq!(records(&place, &["--since", "1h"]).len(), all.len());
    assert_eq!(all.last().map(|last| last["kind"].clone()), Some("stop".into()));
    let report = verified(&place);
    assert_eq!((&report["intact"], &report["sealed"]), (&Value::Bool(true), &report["last"]));
    let log = std::fs::read_dir(place.path("state/audit")).expect("a log").filter_map(|file| {
        let path = file.ok()?.path();
        path.extension().is_some_and(|name| name == "jsonl").then_some(path)
    });
    let log = log.min().expect("a file");
    let text = std::fs::read_to_string(&log).expect("text");
    assert!(!text.contains("s3cret"));
    let told = place.run(&["audit", "verify", log.to_str().expect("UTF-8")]);
    assert!(told.code == Some(0) && told.stdout.contains("without a seal"), "{told:?}");
    std::fs::write(&log, text.replacen("\"echo\"", "\"true\"", 1)).expect("a log that was changed");
    let told = place.run(&["audit", "verify"]);
    assert_eq!(told.code, Some(1), "{told:?}");
    assert!(told.stdout.contains("is not the one that was written; expected "), "{told:?}");
    assert!(told.stdout.contains("BROKEN: "), "{told:?}");
}

/// Waits until the log has so many records of a kind about a sandbox, and returns them.
#[track_caller]
fn awaited(place: &Place, kind: &str, sandbox: &str, count: usize) -> Vec<Value> {
    let began = Instant::now();
    loop {
        let mut found = records(place, &["--sandbox", sandbox]);
        found.retain(|one| one["kind"] == kind);
        if found.len() >= count {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "{count} of {kind}: {found:#?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn named<'a>(records: &'a [Value], name: &str) -> Vec<&'a Value> {
    records.iter().filter(|one| one["name"] == name).collect()
}

#[test]
fn how_a_command_ended_and_what_it_was_refused_is_noted_and_nothing_that_it_said() {
    let place = Place::with_backend("linux");
    let daemon = Daemon::start_in(place.clone(), &[]);
    let id = daemon.ok(&["create"]);
    let script = "echo s3cret; echo s3cret >&2; chroot / true; exit 3";
    assert_eq!(daemon.run(&["exec", &id, "--", "sh", "-c", script]).code, Some(3));
    daemon.ok(&["exec", "-d", "--id", "fails", &id, "--", "sh", "-c", script]);
    daemon.ok(&["exec", "-d", "--id", "works", &id, "--", "true"]);
    let killed = ["exec", "-d", "--id", "killed", &id, "--", "sleep", "1000"];
    daemon.ok(&killed);
    let before = awaited(&place, "end", &id, 3);
    assert!(named(&before, "killed").is_empty(), "control: it runs");
    daemon.ok(&["kill", &id]);
    let ends = awaited(&place, "end", &id, 4);
    let one = |name: &str| match &named(&ends, name)[..] {
        [one] => (*one).clone(),
        other => panic!("{name}: {other:#?}"),
    };
    let fails = one("fails");
    assert_eq!(fails["cause"], serde_json::json!({ "kind": "exited", "code": 3 }));
    assert_eq!(fails["exit_code"], 3);
    let refused = fails["denials"].as_array().expect("denials");
    assert!(
        refused.iter().any(|one| one["wall"] == "seccomp" && one["what"] == "call chroot"),
        "{fails}"
    );
    let works = one("works");
    assert_eq!((&works["exit_code"], &works["denials"]), (&0.into(), &Value::Null));
    assert_eq!(one("killed")["exit_code"], Value::Null, "it went with its sandbox");
    assert_eq!(one("killed")["code"], "ended");
    // Each has its beginning, by the same request and, where it has one, by the same name.
    let all = records(&place, &["--sandbox", &id]);
    for end in &ends {
        let begun = all.iter().filter(|one| {
            one["kind"] == "exec" && one["request"] == end["request"] && one["name"] == end["name"]
        });
        assert_eq!(begun.count(), 1, "{end}");
        assert_eq!(end["tenant"], format!("uid:{}", rustix::process::geteuid().as_raw()));
        assert_eq!(end["client"], "default");
    }
    let text = serde_json::to_string(&ends).expect("text");
    assert!(!text.contains("s3cret") && !text.contains("sleep"), "{text}");
    assert_eq!(daemon.end("TERM").0, Some(0));
    assert_eq!(verified(&place)["intact"], true);
}

#[test]
fn a_command_that_ends_while_no_daemon_runs_is_noted_once_by_the_next() {
    let place = Place::with_backend("linux");
    let daemon = Daemon::start_in(place.clone(), &[]);
    let id = daemon.ok(&["create"]);
    daemon.ok(&["exec", "-d", "--id", "before", &id, "--", "sh", "-c", "exit 5"]);
    awaited(&place, "end", &id, 1);
    // Whoever looks that soon may see what was written before it was noted that it was.
    std::thread::sleep(Duration::from_millis(100));
    let script = "sleep 2; exit 7";
    daemon.ok(&["exec", "-d", "--id", "between", &id, "--", "sh", "-c", script]);
    // What was done in its last moments a daemon that is killed has not written.
    awaited(&place, "exec", &id, 2);
    let place = daemon.kill().into_place();
    std::thread::sleep(Duration::from_secs(3));
    let nobody = records(&place, &["--sandbox", &id]);
    let ended = |all: &[Value], name: &str| {
        let own = named(all, name);
        own.iter().filter(|one| one["kind"] == "end").count()
    };
    assert_eq!((ended(&nobody, "before"), ended(&nobody, "between")), (1, 0), "control");
    let daemon = Daemon::start_in(place.clone(), &[]);
    let ends = awaited(&place, "end", &id, 2);
    let between = named(&ends, "between")[0];
    assert_eq!((&between["exit_code"], &between["cause"]["kind"]), (&7.into(), &"exited".into()));
    assert_eq!(between["client"], "default");
    let begun = nobody.iter().find(|one| one["kind"] == "exec" && one["name"] == "between");
    assert_eq!(between["request"], begun.expect("it was noted")["request"]);
    // What the daemon before was told of is not told again, however often one starts.
    let (code, ended_daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0));
    let place = ended_daemon.into_place();
    let daemon = Daemon::start_in(place.clone(), &["--stop-all"]);
    daemon.ok(&["exec", &id, "--", "true"]);
    let all = awaited(&place, "end", &id, 3);
    assert_eq!((ended(&all, "before"), ended(&all, "between")), (1, 1), "{all:#?}");
    // One that ends with the daemon, which takes all along, is noted before the end.
    daemon.ok(&["exec", "-d", "--id", "last", &id, "--", "sleep", "1000"]);
    assert_eq!(daemon.end("TERM").0, Some(0));
    let all = records(&place, &[]);
    assert_eq!(ended(&all, "last"), 1, "{all:#?}");
    let (last, mut stops) = (all.last(), all.iter().filter(|one| one["kind"] == "stop"));
    assert_eq!(last, stops.next_back(), "that it is the end is said last");
    assert_eq!(verified(&place)["intact"], true);
}

#[test]
fn a_sandbox_that_is_gone_when_the_next_daemon_comes_is_noted() {
    let daemon = Daemon::start();
    let id = daemon.ok(&["create"]);
    let place = daemon.kill().into_place();
    let before = records(&place, &["--sandbox", &id]);
    assert!(before.iter().all(|one| one["kind"] != "gone"), "control: {before:#?}");
    let daemon = Daemon::start_in(place.clone(), &[]);
    let [gone] = &awaited(&place, "gone", &id, 1)[..] else { panic!("once") };
    assert_eq!(gone["client"], "default");
    assert_eq!(daemon.end("TERM").0, Some(0));
}

#[test]
fn what_a_sandbox_was_refused_to_reach_is_summed_up_although_no_command_failed() {
    let port = greet();
    let hosts = format!("world.test:{port}=127.0.0.1").leak();
    let place = Place::with_settings("linux", vec![("WARREN_EGRESS_HOSTS", &*hosts)].leak());
    let daemon = Daemon::start_in(place.clone(), &[]);
    let allowed = daemon.ok(&["create", "--allow-net", &format!("world.test:{port}")]);
    let fetch = |host: &str, port: u16| {
        let one = format!("(cat < /dev/tcp/{host}/{port}) 2>/dev/null");
        ["exec", &allowed, "--", "bash", "-c", &format!("{one}; exit 0")].map(str::to_owned)
    };
    let run = |args: [String; 6]| daemon.ok(&args.each_ref().map(String::as_str));
    assert_eq!(run(fetch("world.test", port)), "hello", "control: what is allowed is reached");
    let quiet = records(&place, &["--sandbox", &allowed]);
    assert!(quiet.iter().all(|one| one["kind"] != "barred"), "control: {quiet:#?}");
    run(fetch("world.test", 9));
    for _ in 0..3 {
        run(fetch("evil.test", 443));
    }
    let began = Instant::now();
    loop {
        let barred = awaited(&place, "barred", &allowed, 1);
        let all: Vec<&Value> =
            barred.iter().filter_map(|one| one["list"].as_array()).flatten().collect();
        let count = |to: &str, port: Value| {
            let own = all.iter().filter(|one| one["to"] == to && one["port"] == port);
            own.map(|one| (one["why"].clone(), one["count"].as_u64())).collect::<Vec<_>>()
        };
        let times =
            |found: &[(Value, Option<u64>)]| found.iter().filter_map(|one| one.1).sum::<u64>();
        let (wrong_port, name) = (count("world.test", 9.into()), count("evil.test", Value::Null));
        // Of each name both kinds of addresses are asked for.
        if times(&wrong_port) >= 1 && times(&name) >= 3 {
            assert!(
                wrong_port.iter().chain(&name).all(|one| one.0 == "not_allowed"),
                "{barred:#?}"
            );
            assert!(barred.len() <= 3, "summed up: {barred:#?}");
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{barred:#?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let ends = awaited(&place, "end", &allowed, 5);
    assert!(ends.iter().all(|one| one["exit_code"] == 0), "control: none failed: {ends:#?}");
    // What was refused just before the end is noted at the end.
    run(fetch("late.test", 443));
    daemon.ok(&["kill", &allowed]);
    let all = records(&place, &["--sandbox", &allowed]);
    let text = serde_json::to_string(&all).expect("text");
    assert!(text.contains("late.test"), "{text}");
    assert_eq!(daemon.end("TERM").0, Some(0));
    assert_eq!(verified(&place)["intact"], true);
}

#[test]
fn what_a_template_runs_is_noted_when_it_is_built_and_when_it_is_used() {
    let place = Place::with_backend("linux");
    let project = place.path("project");
    std::fs::create_dir_all(&project).expect("a directory");
    let recipe = "FROM host\nENV TOKEN=s3cret\nRUN echo built; true\n\
                  CMD echo up > /workspace/up; sleep 1000\nHEALTHCHECK CMD cat /workspace/up\n";
    std::fs::write(project.join("Warrenfile"), recipe).expect("a recipe");
    let daemon = Daemon::start_in(place.clone(), &[]);
    let dir = project.to_str().expect("UTF-8");
    let built = daemon.run(&["template", "build", "app", dir]);
    assert_eq!(built.code, Some(0), "{built:?}");
    let request = format!("build-{}", built.stdout.trim());
    let said = |all: &[Value], kind: &str, words: &str| {
        let own = all.iter().filter(|one| one["kind"] == kind);
        own.filter(|one| one["command"][2] == words).cloned().collect::<Vec<_>>()
    };
    let all = records(&place, &[]);
    let mut seen = Vec::new();
    for words in ["echo built; true", "echo up > /workspace/up; sleep 1000"] {
        let [exec] = &said(&all, "exec", words)[..] else { panic!("{words}: {all:#?}") };
        assert_eq!(
            (&exec["request"], &exec["variables"][0]),
            (&(*request).into(), &"TOKEN".into())
        );
        seen.push(exec.clone());
    }
    assert!(!said(&all, "exec", "cat /workspace/up").is_empty(), "{all:#?}");
    for (exec, exit_code) in seen.iter().zip([Value::from(0), Value::Null]) {
        let sandbox = exec["sandbox"].as_str().expect("a sandbox");
        let ends = awaited(&place, "end", sandbox, 1);
        let [end] = &named(&ends, exec["name"].as_str().expect("a name"))[..] else {
            panic!("{ends:#?}")
        };
        assert_eq!((&end["exit_code"], &end["request"]), (&exit_code, &(*request).into()));
        assert_eq!(end["tenant"], exec["tenant"]);
    }
    let sandbox = daemon.ok(&["create", "--template", "app"]);
    let own = records(&place, &["--sandbox", &sandbox]);
    let [start] = &said(&own, "exec", "echo up > /workspace/up; sleep 1000")[..] else {
        panic!("{own:#?}")
    };
    assert_eq!((&start["name"], &start["tenant"]), (&"start".into(), &seen[0]["tenant"]));
    let create = own.iter().find(|one| one["kind"] == "call" && one["status"] == 201);
    assert_eq!(start["request"], create.expect("a call")["request"], "{own:#?}");
    assert!(!said(&own, "exec", "cat /workspace/up").is_empty(), "{own:#?}");
    assert!(!serde_json::to_string(&records(&place, &[])).expect("text").contains("s3cret"));
    assert_eq!(daemon.end("TERM").0, Some(0));
    assert_eq!(verified(&place)["intact"], true);
}

#[test]
fn a_daemon_that_is_killed_under_load_leaves_a_log_that_the_next_one_continues() {
    let place = Place::new();
    let mut answered = 0;
    for round in 0..4 {
        let daemon = Daemon::start_in(place.clone(), &[]);
        let busy: Vec<_> = (0..4)
            .map(|_| {
                let place = place.clone();
                std::thread::spawn(move || {
                    (0..100).take_while(|_| place.run(&["stats"]).code == Some(0)).count()
                })
            })
            .collect();
        std::thread::sleep(std::time::Duration::from_millis(150 + 37 * round));
        drop(daemon.kill());
        answered += busy.into_iter().map(|one| one.join().expect("a client")).sum::<usize>();
    }
    let report = verified(&place);
    assert_eq!(report["intact"], true, "{report}");
    let noted = records(&place, &[]);
    assert_eq!(noted.iter().filter(|one| one["kind"] == "start").count(), 4);
    // An answer may be read before its line is written; each client had one under way at each kill.
    let calls = noted.iter().filter(|one| one["path"] == "/v1/stats").count();
    assert!(calls + 16 >= answered, "{calls} of {answered}");
    assert_eq!(Daemon::start_in(place.clone(), &[]).end("TERM").0, Some(0));
    assert_eq!(verified(&place)["intact"], true);
}
