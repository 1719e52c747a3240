//! Sandboxes by the hundred in one daemon (THREATS C16, C20).

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::adversity::{init_of, signal};
use crate::calls;
use crate::support::{Daemon, PATIENCE, Place};

const SETTINGS: &[(&str, &str)] =
    &[("WARREN_MAX_SANDBOXES", "1000"), ("WARREN_POOL_ENABLED", "false")];

/// Does something with each, a handful at a time.
fn each<T: Sync>(all: &[T], act: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    act(one);
                }
            });
        }
    });
}

#[track_caller]
fn made(place: &Place, path: &str, body: &Value) -> Value {
    let (status, answer) = calls::ask(place, "POST", path, Some(body)).expect("an answer");
    assert!((200..300).contains(&status), "{path}: {status} {answer}");
    answer
}

fn make(place: &Place, count: usize) -> Vec<String> {
    let ids = std::sync::Mutex::new(Vec::new());
    each(&vec![(); count], |()| {
        let answer = made(place, "/v1/sandboxes", &json!({}));
        let id = answer["sandbox"]["id"].as_str().unwrap().to_owned();
        ids.lock().unwrap().push(id);
    });
    ids.into_inner().unwrap()
}

/// Has one say something.
#[track_caller]
fn greet(place: &Place, id: &str) {
    let answer = made(place, &format!("/v1/sandboxes/{id}/exec"), &calls::run("echo here"));
    assert_eq!(answer["stdout"], "here\n", "{id}: {answer}");
}

/// How many of these sandboxes have an init on the host.
fn living(ids: &[String]) -> usize {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let inits = processes.filter_map(|path| {
        let read = |file: &str| std::fs::read_to_string(path.join(file)).unwrap_or_default();
        // One that ended may be there still, to be reaped by the host's own first process.
        let lives = !read("stat").contains(") Z ");
        (lives && read("comm").trim() == "warren-init").then(|| read("cgroup"))
    });
    let all = inits.collect::<String>();
    ids.iter().filter(|id| all.contains(id.as_str())).count()
}

#[test]
fn c16_an_init_that_hangs_keeps_none_of_500_sandboxes_waiting() {
    let daemon = Daemon::start_in(Place::with_settings("linux", SETTINGS), &[]);
    let ids = make(&daemon.place, 500);
    let place = daemon.kill().into_place();
    let (hung, others) = ids.split_first().unwrap();
    let init = init_of(hung);
    signal("-STOP", &init);
    let began = Instant::now();
    let daemon = Daemon::start_in(place, &[]);
    let ready = began.elapsed();
    each(others, |id| greet(&daemon.place, id));
    let took = began.elapsed();
    eprintln!("ready after {ready:?}, and 499 served after {took:?}");
    assert!(took < Duration::from_secs(15), "the others waited for {took:?}");
    let seen = daemon.run(&["exec", hung, "--", "echo", "here"]);
    assert_eq!(seen.code, Some(125), "control: it hangs, and nobody waits for it: {seen:?}");
    // It was slow, and is not destroyed for that: once it answers it is taken over like the others.
    signal("-CONT", &init);
    let began = Instant::now();
    loop {
        let seen = daemon.run(&["exec", hung, "--", "echo", "here"]);
        if (seen.code, seen.stdout.trim()) == (Some(0), "here") {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "it was not taken over: {seen:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(living(&ids), 500, "control: they are all there");
    daemon.ok(&["kill", hung]);
    assert_eq!(living(&ids), 499);
    drop(daemon);
    assert_eq!(living(&ids), 0);
}

#[test]
fn c20_told_to_end_it_leaves_100_busy_sandboxes_or_takes_them_along_in_bounded_time() {
    // Whoever waits for an answer has ten seconds more.
    let bound = Duration::from_secs(18);
    let daemon = Daemon::start_in(Place::with_settings("linux", SETTINGS), &[]);
    let ids = make(&daemon.place, 100);
    let busy = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.5; done";
    let work = json!({ "id": "work", "command": calls::run(busy) });
    each(&ids, |id| drop(made(&daemon.place, &format!("/v1/sandboxes/{id}/execs"), &work)));
    // Somebody waits for each.
    let call = |id: &String| {
        let path = format!("/v1/sandboxes/{id}/exec");
        calls::send(&daemon.place, "POST", &path, Some(&calls::run("sleep 1000")))
    };
    let waiting: Vec<_> = ids.iter().filter_map(call).collect();
    assert_eq!(waiting.len(), 100, "control: somebody waits for each");
    let began = Instant::now();
    let (code, daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0), "{}", daemon.log());
    assert!(began.elapsed() < bound, "it took {:?} to let go of them", began.elapsed());
    assert_eq!(living(&ids), 100, "they go on without it");
    drop(waiting);
    let daemon = Daemon::start_in(daemon.into_place(), &["--stop-all"]);
    each(&ids, |id| {
        let path = format!("/v1/sandboxes/{id}/execs/work");
        let (_, shown) = calls::ask(&daemon.place, "GET", &path, None).expect("an answer");
        assert!(shown["end"].is_null() && shown["id"] == "work", "control: it works on: {shown}");
    });
    let began = Instant::now();
    let (code, daemon) = daemon.end("TERM");
    assert_eq!(code, Some(0), "{}", daemon.log());
    assert!(began.elapsed() < bound, "it took {:?} to end them", began.elapsed());
    assert_eq!(living(&ids), 0, "they went along");
}
