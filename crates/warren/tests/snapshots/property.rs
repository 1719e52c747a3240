//! Random trees of every kind of file: what is saved is what comes back.

use warren::layers::Below;
use warren::{Base, Capture, Command, ExecContext, Sandbox};

use super::{Place, sh};

const SCRIPT: &str = include_str!("tree.py");

async fn python(sandbox: &dyn Sandbox, args: &[&str]) -> String {
    let args = ["-c", SCRIPT].iter().chain(args).copied();
    let command = Command::new("python3").args(args);
    let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.exit_code, 0, "{err}");
    String::from_utf8(output.stdout).unwrap()
}

async fn change(sandbox: &dyn Sandbox, seed: u64) {
    python(sandbox, &["change", &seed.to_string(), "40"]).await;
}

async fn show(sandbox: &dyn Sandbox) -> String {
    python(sandbox, &["show"]).await
}

/// As `show`, of one that stands on something.
async fn show_apart(sandbox: &dyn Sandbox) -> String {
    python(sandbox, &["show", "apart"]).await
}

#[track_caller]
fn assert_same(what: &str, seed: u64, was: &str, is: &str) {
    if was == is {
        return;
    }
    let missing: Vec<_> =
        was.lines().filter(|line| !is.lines().any(|other| other == *line)).collect();
    let added: Vec<_> =
        is.lines().filter(|line| !was.lines().any(|other| other == *line)).collect();
    panic!("{what}, seed {seed}\n-{}\n+{}", missing.join("\n-"), added.join("\n+"));
}

/// Three snapshots of one sandbox, a fork of each, and then one of a fork's.
async fn check(place: &Place, seed: u64) {
    // Said at once: a script that fails inside does not know it.
    eprintln!("seed {seed}");
    let origin = place.on(&Base::default()).await;
    let mut saved: Vec<(String, Capture)> = Vec::new();
    for round in 0..3 {
        change(&*origin, seed * 10 + round).await;
        if round == 1 {
            // Somebody has a file mapped from before the snapshot until after it.
            let hold = "printf %4096s x > /workspace/mapped; python3 -c '
import mmap, time, os
file = open(\"/workspace/mapped\", \"r+b\")
mapped = mmap.mmap(file.fileno(), 4096)
mapped[0] = 65
open(\"/tmp/ready\", \"w\").close()
while not os.path.exists(\"/tmp/go\"): time.sleep(0.002)
mapped[0] = 66
' >/dev/null 2>&1 & while ! test -e /tmp/ready; do sleep 0.002; done";
            sh(&*origin, hold).await;
        }
        let seen = show(&*origin).await;
        saved.push((seen, origin.capture().await.unwrap()));
        if round == 1 {
            sh(&*origin, "touch /tmp/go; while test $(head -c 1 /workspace/mapped) != B; do sleep 0.002; done").await;
        }
    }
    for (round, (seen, capture)) in saved.iter().enumerate() {
        let fork = place.on(&capture.base).await;
        assert_same(&format!("fork {round}"), seed, seen, &show(&*fork).await);
        if round == 1 {
            change(&*fork, seed + 1_000).await;
            let (seen, capture) = (show_apart(&*fork).await, fork.capture().await.unwrap());
            let child = place.on(&capture.base).await;
            assert_same("fork of a fork", seed, &seen, &show_apart(&*child).await);
            change(&*fork, seed + 2_000).await;
            let (seen, capture) = (show_apart(&*fork).await, fork.capture().await.unwrap());
            child.rebase(&capture.base).await.unwrap();
            assert_same("the second of a fork", seed, &seen, &show_apart(&*child).await);
            let uncounted = ["show", "apart", "uncounted"];
            let seen = python(&*child, &uncounted).await;
            let several = &capture.base.changes;
            assert!(several.len() > 1, "control: there is something to merge");
            let (merged, _held) = place.layers.merge(several, Below::Something).unwrap();
            let base = Base { changes: merged, ..capture.base.clone() };
            child.rebase(&base).await.unwrap();
            assert_same("all in one layer", seed, &seen, &python(&*child, &uncounted).await);
            child.destroy().await.unwrap();
        }
        fork.destroy().await.unwrap();
    }
    for (round, (seen, capture)) in saved.iter().enumerate() {
        origin.rebase(&capture.base).await.unwrap();
        assert_same(&format!("restored {round}"), seed, seen, &show(&*origin).await);
    }
    origin.destroy().await.unwrap();
}

/// A tree that is always the same and a new one; or those of `WARREN_SEEDS`, as in `17` or `1..500`.
fn seeds() -> Vec<u64> {
    let Ok(asked) = std::env::var("WARREN_SEEDS") else {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        return vec![1, u64::from(now.subsec_nanos())];
    };
    let (from, to) = asked.split_once("..").unwrap_or((&asked, ""));
    let from: u64 = from.parse().unwrap();
    (from..to.parse().unwrap_or(from + 1)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_was_written_is_the_same_in_forks_and_after_a_restore() {
    let place = Place::new();
    for seed in seeds() {
        check(&place, seed).await;
    }
    // All that is left is what nobody holds any more.
    place.layers.collect_unnamed([]).unwrap();
    assert!(place.layers.list().unwrap().is_empty());
}

/// To the fork itself it may be two inodes with a mode each; see "One file that is two inodes" in the design.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_linked_in_a_fork_is_one_file_for_who_stands_on_it() {
    let place = Place::new();
    let origin = place.on(&Base::default()).await;
    sh(&*origin, "echo first > a; chmod 600 a").await;
    let fork = place.on(&origin.capture().await.unwrap().base).await;
    sh(&*fork, "echo second >> a; ln a c; chmod 000 c; chmod 640 a").await;
    let told = sh(&*fork, "stat -c '%a %h' a c").await;
    assert_eq!(
        told, "640 2\n640 2\n",
        "control: what is asked of the file is true in the fork too"
    );
    let child = place.on(&fork.capture().await.unwrap().base).await;
    let look = "stat -c '%a %h' a c; test a -ef c; cat a c";
    assert_eq!(sh(&*child, look).await, "640 2\n640 2\nfirst\nsecond\nfirst\nsecond\n");
    for sandbox in [origin, fork, child] {
        sandbox.destroy().await.unwrap();
    }
}
