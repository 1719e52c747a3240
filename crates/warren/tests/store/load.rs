//! Many callers at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use warren::store::sqlite::SqliteStore;
use warren::store::{Change, Store, StoreError};

use crate::support::{db, number, numbered, sandbox};

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

async fn apply_all(store: Arc<SqliteStore>, name: String, count: u64) -> Vec<Duration> {
    let mut times = Vec::new();
    for n in 1..=count {
        let began = Instant::now();
        store.apply(numbered(&name, n)).await.unwrap();
        times.push(began.elapsed());
    }
    times
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_thirty_two_tasks_apply_at_once_is_all_there() {
    const TASKS: u64 = 32;
    const EACH: u64 = 200;
    let dir = tempfile::tempdir().unwrap();
    let path = db(dir.path());
    let store = Arc::new(SqliteStore::open(&path).unwrap());
    let alone = median(apply_all(Arc::clone(&store), "alone".to_owned(), 500).await);

    let began = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        tasks.spawn(apply_all(Arc::clone(&store), format!("task-{task}"), EACH));
    }
    let times: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    let took = began.elapsed();
    println!(
        "apply: median {alone:?} alone, {:?} with {TASKS} at once, {:.0} a second",
        median(times),
        (TASKS * EACH) as f64 / took.as_secs_f64()
    );
    let opened = Instant::now();
    drop(store);
    let image = SqliteStore::open(&path).unwrap().load().await.unwrap();
    println!("closed and opened again in {:?}", opened.elapsed());
    for task in 0..TASKS {
        assert_eq!(number(&image, &format!("task-{task}")), Some(EACH));
    }
}

#[tokio::test]
async fn one_bad_change_fails_its_caller_and_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = db(dir.path());
    let store = Arc::new(SqliteStore::open(&path).unwrap());
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..16 {
        let store = Arc::clone(&store);
        let mut changes = numbered(&format!("task-{task}"), 1);
        if task == 7 {
            let mut endless = sandbox("endless", 1);
            endless.backend = "x".repeat(17 << 20);
            changes.push(Change::PutSandbox(endless));
        }
        tasks.spawn(async move { (task, store.apply(changes).await) });
    }
    for (task, outcome) in tasks.join_all().await {
        match outcome {
            Ok(()) => assert_ne!(task, 7),
            Err(StoreError::Io { source, .. }) => {
                assert_eq!(source.kind(), std::io::ErrorKind::FileTooLarge, "{source}");
                assert_eq!(task, 7);
            }
            Err(error) => panic!("{error:?}"),
        }
    }
    drop(store);
    let image = SqliteStore::open(&path).unwrap().load().await.unwrap();
    assert_eq!(image.sandboxes.len(), 15, "and not even the good half of the bad one");
}
