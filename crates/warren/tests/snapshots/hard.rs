//! Saving under hard conditions: very many files, one that is being written, one whose sandbox dies, a disk that is
//! full.

use std::time::{Duration, Instant};

use warren::snapshot::Snapshots;
use warren::store::StoreError;
use warren::{
    Base, CreateOptions, DiffOptions, Importer, IsolationBackend as _, ResourceLimits, Sandbox,
    SandboxError, SandboxSpec,
};

use super::{Place, sh};

const FILES: u64 = 100_000;

impl Place {
    async fn large(&self) -> Box<dyn Sandbox> {
        let limits = ResourceLimits {
            max_write_bytes: Some(1 << 30),
            max_cpu_time_ms: None,
            max_wall_time_ms: None,
            ..ResourceLimits::default()
        };
        let spec = SandboxSpec { limits, ..SandboxSpec::default() };
        self.backend.create_sandbox_with(&spec, &CreateOptions::default()).await.unwrap()
    }

    #[track_caller]
    fn assert_nothing_half_made(&self) {
        let staged = self.path().join("storage/staging").read_dir().unwrap().count();
        assert_eq!(staged, 0);
    }
}

/// Whose size is for nothing is not read for ever, while everybody waits for the sandbox.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_digested_for_one_comparison_is_bounded() {
    let place = Place::new();
    let sandbox = place.large().await;
    let compare = async |digests| {
        let options = DiffOptions { digests, ..DiffOptions::default() };
        let compared = sandbox.diff(None, &options);
        tokio::time::timeout(Duration::from_secs(60), compared).await.expect("it ends")
    };
    sh(&*sandbox, "echo x > /workspace/small; truncate -s 1G /workspace/sparse").await;
    let digested = compare(true).await.unwrap();
    let files = digested.iter().filter_map(|entry| entry.after.as_ref()?.sha256.as_deref());
    assert_eq!(files.count(), 2, "control: {digested:?}");
    sh(&*sandbox, "truncate -s 64T /workspace/sparse").await;
    let error = compare(true).await.unwrap_err();
    assert!(matches!(error, SandboxError::TooLarge { .. }), "{error}");
    assert_eq!(compare(false).await.unwrap().len(), 2, "control: it is listed");
    sandbox.destroy().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_files_are_saved_and_the_next_time_only_what_changed() {
    let place = Place::new();
    let sandbox = place.large().await;
    // In /tmp, which no overlay makes slower.
    let made = sh(
        &*sandbox,
        "python3 -c '
import os
for d in range(100):
    os.mkdir(f\"/tmp/{d}\")
    for f in range(1000): os.close(os.open(f\"/tmp/{d}/{f}\", os.O_CREAT | os.O_WRONLY))
for d in range(100):
    with open(f\"/tmp/{d}/7\", \"w\") as file: file.write(\"x\" * 1000)
'; find /tmp -type f | wc -l",
    )
    .await;
    assert_eq!(made.trim(), FILES.to_string(), "control");
    let began = Instant::now();
    let first = sandbox.capture().await.unwrap();
    let whole = began.elapsed();
    assert!(first.paused < whole, "it goes on before all is done: {:?} of {whole:?}", first.paused);
    let info = place.layers.info(&first.base.changes[0]).unwrap();
    assert_eq!((info.bytes, first.new_bytes), (100_000, 100_000));
    let beside = info.entries - FILES - 100;
    assert!(beside < 20, "{} entries", info.entries);

    sh(&*sandbox, "echo more > /tmp/42/more; rm /tmp/43/43; mv /tmp/44/44 /tmp/44/other").await;
    let second = sandbox.capture().await.unwrap();
    let [_, top] = &second.base.changes[..] else { panic!("one on the other: {:?}", second.base) };
    let info = place.layers.info(top).unwrap();
    assert!(info.bytes == 5 && info.entries < 30, "only what changed: {info:?}");
    eprintln!("stood still {:?} of {whole:?}, then {:?}", first.paused, second.paused);
    assert!(second.paused < first.paused, "{:?} after {:?}", second.paused, first.paused);

    let options = CreateOptions { base: second.base.clone(), ..CreateOptions::default() };
    let fork = place.backend.create_sandbox_with(&SandboxSpec::default(), &options).await.unwrap();
    let look = "find /tmp -type f | wc -l; cat /tmp/42/more; \
                ls /tmp/43/43 /tmp/44/44 2>&1 | wc -l";
    assert_eq!(sh(&*fork, look).await, "100000\nmore\n2\n");
    fork.destroy().await.unwrap();
    sandbox.destroy().await.unwrap();
    place.assert_nothing_half_made();
}

/// Each number is written to one file, then to the next, then appended to a third: whatever is seen at one moment has
/// them in that order, at most one apart.
const WRITER: &str = "cat > /tmp/writer.py <<'END'
import os
files = [os.open(f'/workspace/{n}', os.O_CREAT | os.O_WRONLY) for n in ('a', 'b')]
log = os.open('/tmp/log', os.O_CREAT | os.O_WRONLY | os.O_APPEND)
n = 0
while True:
    n += 1
    for file in files: os.pwrite(file, b'%012d' % n, 0)
    os.write(log, b'%012d\\n' % n)
END
python3 /tmp/writer.py >/dev/null 2>&1 &
while ! test -s /tmp/log; do sleep 0.005; done";

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_being_written_is_saved_as_it_was_at_one_moment() {
    let place = Place::new();
    let sandbox = place.on(&Base::default()).await;
    sh(&*sandbox, WRITER).await;
    let mut last = 0_u64;
    for round in 0..5 {
        let capture = sandbox.capture().await.unwrap();
        let fork = place.on(&capture.base).await;
        let look = "cat /workspace/a; echo; cat /workspace/b; echo; tail -n 1 /tmp/log; \
                    wc -l < /tmp/log";
        let seen = sh(&*fork, look).await;
        let numbers: Vec<u64> = seen.lines().map(|line| line.trim().parse().unwrap()).collect();
        let [a, b, c, lines] = numbers[..] else { panic!("{seen}") };
        assert!(a >= b && b >= c && a - c <= 1, "round {round}: {seen}");
        assert_eq!(lines, c, "round {round}: every line of the log is there");
        assert!(a > last, "control: it goes on between snapshots: {a} after {last}");
        last = a;
        fork.destroy().await.unwrap();
    }
    sandbox.destroy().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_names_of_one_file_stay_together_when_a_directory_of_one_moves() {
    let place = Place::new();
    let sandbox = place.on(&Base::default()).await;
    sh(&*sandbox, "cd /workspace; mkdir old; echo one > old/file; ln old/file other").await;
    sandbox.capture().await.unwrap();
    sh(&*sandbox, "cd /workspace; mv old new").await;
    let capture = sandbox.capture().await.unwrap();
    let fork = place.on(&capture.base).await;
    let seen = sh(&*fork, "cd /workspace; stat -c '%h %n' new/file other; ls").await;
    assert_eq!(seen, "2 new/file\n2 other\nnew\nother\n");
    fork.destroy().await.unwrap();
    sandbox.destroy().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_dies_meanwhile_is_saved_or_not_and_leaves_nothing_half_made() {
    let place = Place::new();
    let (mut saved, mut refused) = (0, 0);
    for round in 0..12 {
        let sandbox = place.on(&Base::default()).await;
        sh(&*sandbox, "for i in $(seq 500); do echo $i > /workspace/$i; done").await;
        let ends = async {
            // At first at once, then a little later each time.
            for _ in 0..round {
                tokio::task::yield_now().await;
            }
            if round > 6 {
                tokio::time::sleep(Duration::from_millis(2 * (round - 6))).await;
            }
            place.backend.destroy_all().await.unwrap();
        };
        let ((), captured) = tokio::join!(ends, sandbox.capture());
        match captured {
            Ok(capture) => {
                saved += 1;
                assert_eq!(place.layers.info(&capture.base.changes[0]).unwrap().bytes, 1_892);
            }
            Err(error) => {
                refused += 1;
                assert!(matches!(error, SandboxError::Ended { .. }), "round {round}: {error:?}");
            }
        }
        place.assert_nothing_half_made();
    }
    eprintln!("{saved} saved, {refused} not");
    assert!(saved > 0 && refused > 0, "control: {saved} saved, {refused} not");
    // What has ended says so, and nothing else.
    let sandbox = place.on(&Base::default()).await;
    sandbox.destroy().await.unwrap();
    let error = sandbox.snapshot("late").await.unwrap_err();
    assert!(matches!(error, SandboxError::Ended { .. }), "{error:?}");
    assert!(Snapshots::of(&place.layers).list(None).unwrap().is_empty());
    place.layers.collect_unnamed([]).unwrap();
    assert!(place.layers.list().unwrap().is_empty());
}

/// A small filesystem in the place of another, for a while.
struct Small(std::path::PathBuf);

impl Small {
    fn mount(path: std::path::PathBuf, size: &str) -> Self {
        std::fs::create_dir_all(&path).unwrap();
        let options = format!("size={size},mode=700");
        let mut mount = std::process::Command::new("mount");
        let done = mount.args(["-t", "tmpfs", "-o", &options, "warren-test"]).arg(&path).status();
        assert!(done.unwrap().success());
        Self(path)
    }

    fn resize(&self, size: &str) {
        let options = format!("remount,size={size}");
        let done = std::process::Command::new("mount").args(["-o", &options]).arg(&self.0).status();
        assert!(done.unwrap().success());
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

mod needs_root {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn d3_a_disk_that_is_full_in_the_middle_keeps_what_there_was_and_works_again_with_room() {
        let directory = tempfile::tempdir().unwrap();
        let small = Small::mount(directory.path().join("storage"), "4m");
        let place = Place::in_directory(directory);
        let sandbox = place.on(&Base::default()).await;
        sh(&*sandbox, "echo kept > /workspace/note").await;
        let kept = sandbox.snapshot("kept").await.unwrap();
        let fill = "for i in $(seq 40); do head -c 500000 /dev/urandom > /workspace/$i; done";
        sh(&*sandbox, fill).await;
        for round in 0..2 {
            let error = sandbox.snapshot("large").await.unwrap_err();
            let full = matches!(error, SandboxError::Store(StoreError::Full));
            assert!(full && error.hint().is_some(), "round {round}: {error:?}");
            place.assert_nothing_half_made();
            assert_eq!(place.layers.list().unwrap().len(), 1, "only what was there");
            assert_eq!(sh(&*sandbox, "ls /workspace | wc -l").await, "41\n", "it goes on");
        }
        let snapshots = Snapshots::of(&place.layers);
        let known = snapshots.list(None).unwrap();
        assert_eq!(known.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), [kept.as_str()]);
        let fork = place.on(&known[0].base).await;
        assert_eq!(sh(&*fork, "cat /workspace/note").await, "kept\n");
        fork.destroy().await.unwrap();

        small.resize("80m");
        sandbox.snapshot("large").await.unwrap();
        let large = snapshots.find(None, "large").unwrap();
        assert_eq!(large.bytes, 20_000_005);
        let fork = place.on(&large.base).await;
        assert_eq!(sh(&*fork, "cat /workspace/? /workspace/?? | wc -c").await, "20000000\n");
        fork.destroy().await.unwrap();
        // An archive that does not fit is refused alike.
        let mut archive = Vec::new();
        let mut exported = snapshots.export(None, "large").unwrap();
        std::io::Read::read_to_end(&mut exported, &mut archive).unwrap();
        drop(exported);
        snapshots.remove(None, "large").unwrap();
        sandbox.destroy().await.unwrap();
        place.layers.collect_unnamed([]).unwrap();
        small.resize("8m");
        let error =
            snapshots.import(None, Some("moved"), Importer::Tenant, &archive[..]).unwrap_err();
        assert!(matches!(error, SandboxError::Store(StoreError::Full)), "{error:?}");
        place.assert_nothing_half_made();
        small.resize("80m");
        snapshots.import(None, Some("moved"), Importer::Tenant, &archive[..]).unwrap();
    }
}
