//! The audit log of a real daemon: killed, restarted, read while it runs.

use serde_json::Value;

use crate::support::{Daemon, Place};

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
