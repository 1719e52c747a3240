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

#[tokio::test(flavor = "multi_thread")]
async fn whatever_was_written_is_the_same_in_forks_and_after_a_restore() {
    let place = Place::new();
    let random = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    for seed in [1, u64::from(random.subsec_nanos())] {
        check(&place, seed).await;
    }
    // All that is left is what nobody holds any more.
    place.layers.collect_unnamed([]).unwrap();
    assert!(place.layers.list().unwrap().is_empty());
}
