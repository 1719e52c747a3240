//! Traps: THREATS.md 4.8, A1 to A10, and S19.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use warren::{
    FileFault, FileKind, RenameOptions, ResourceLimits, SandboxError, WriteMode, WriteOptions,
};

use crate::support::{PROMPT, Place, collect, fault, how, promptly, source, tar_header};

/// A file of the host that no sandbox sees.
struct Secret {
    _directory: tempfile::TempDir,
    path: PathBuf,
}

const SECRET: &[u8] = b"s3cret of the host";

impl Secret {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        std::fs::write(&path, SECRET).unwrap();
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(directory.path(), open).unwrap();
        Self { _directory: directory, path }
    }

    fn assert_untouched(&self) {
        assert_eq!(std::fs::read(&self.path).unwrap(), SECRET);
        assert_eq!(std::fs::read_dir(self.path.parent().unwrap()).unwrap().count(), 1);
    }
}

#[tokio::test]
async fn a1_no_call_leaves_the_root_through_a_link() {
    let place = Place::new().await;
    let secret = Secret::new();
    let host = secret.path.display();
    let dir = secret.path.parent().unwrap().display();
    let traps = [
        format!("{host}"),
        format!("/proc/self/root{host}"),
        format!("/proc/1/root{host}"),
        format!("/proc/self/cwd{host}"),
        format!("/../../../..{host}"),
        format!("/proc/self/fd/3{host}"),
        format!("/proc/thread-self/root{host}"),
    ];
    place.sh("echo mine > /workspace/own; ln -s /workspace/own /workspace/good").await;
    assert_eq!(place.get("/workspace/good").await.unwrap(), b"mine\n", "control: links work");
    let files = place.files();
    let link = Path::new("/workspace/trap");
    for (index, trap) in traps.iter().enumerate() {
        place
            .sh(&format!(
                "ln -sfn '{trap}' /workspace/trap; ln -sfn \"$(dirname '{trap}')\" /workspace/way"
            ))
            .await;
        for path in [link, Path::new("/workspace/way/secret"), Path::new(trap)] {
            let refused = |what: &str, result: Result<(), SandboxError>| {
                assert!(result.is_err(), "{what} {} by {trap}", path.display());
            };
            refused("read", promptly(place.get(path)).await.map(drop));
            let append = promptly(place.put_as(path, b"x", how(WriteMode::Append))).await;
            // Writing may make a new file of that name inside; it must not be the host's.
            drop((append, promptly(place.put(path, b"x")).await));
            secret.assert_untouched();
            refused("list", promptly(place.list(&format!("/proc/self/root{dir}"))).await.map(drop));
            drop(promptly(files.remove(Path::new("/workspace/way/secret"), true)).await);
            let away = Path::new("/workspace/stolen");
            let way = Path::new("/workspace/way/secret");
            drop(promptly(files.rename(way, away, RenameOptions::default())).await);
            drop(promptly(files.make_directory(&path.join("d"), None, true)).await);
            let packed = promptly(files.export_tar(path)).await;
            if let Ok(packed) = packed {
                let bytes = collect(packed.data).await.unwrap_or_default();
                assert!(!bytes.windows(SECRET.len()).any(|part| part == SECRET), "{trap}");
            }
            secret.assert_untouched();
        }
        place.sh("rm -rf /workspace/stolen /tmp/.[!.]* /tmp/*").await;
        assert!(index < traps.len());
    }
    for path in ["/proc/self/root", "/proc/1/root/etc/passwd", "/proc/self/fd/0", "/proc/self/exe"]
    {
        let kind = fault(promptly(place.get(path)).await);
        let refused = [FileFault::Loop, FileFault::NotFound, FileFault::Denied];
        assert!(refused.contains(&kind), "{path}: {kind:?}");
    }
    place.end().await;
}

#[tokio::test]
async fn a2_links_on_the_way_and_dangling_ones_lead_where_they_would_lead_a_command() {
    let place = Place::new().await;
    place
        .sh(
            "cd /workspace; mkdir real; ln -s real way; ln -s real/made dangling; ln -s loop loop; \
              ln -s /workspace/real/abs absolute; ln -s nowhere/x lost",
        )
        .await;
    place.put("/workspace/way/f", b"1").await.unwrap();
    place.put("/workspace/dangling", b"2").await.unwrap();
    place.put("/workspace/absolute", b"3").await.unwrap();
    let seen = "cd /workspace/real; cat f made abs; readlink ../dangling";
    assert_eq!(place.sh(seen).await, "123real/made", "written through, links kept");
    assert_eq!(fault(promptly(place.put("/workspace/loop", b"x")).await), FileFault::Loop);
    assert_eq!(fault(promptly(place.get("/workspace/loop")).await), FileFault::Loop);
    assert_eq!(fault(place.put("/workspace/lost", b"x").await), FileFault::NotFound);
    assert_eq!(fault(place.get("/workspace/lost").await), FileFault::NotFound);
    assert_eq!(fault(place.put("/workspace/real/f/x", b"x").await), FileFault::NotDirectory);
    place.end().await;
}

#[tokio::test]
async fn a3_a_link_swapped_in_a_loop_never_leads_out() {
    let place = Place::new().await;
    let secret = Secret::new();
    let host = secret.path.display().to_string();
    let dir = secret.path.parent().unwrap().display().to_string();
    // Both the name itself and its directory change as fast as they can.
    let script = format!(
        "cd /workspace; mkdir d; echo inside > d/secret; echo inside > plain; \
         ln -s /proc/self/root{dir} e; ln -s /proc/1/root{host} l; \
         (while :; do mv -T e d2; mv -T d e; mv -T d2 d; \
         ln -sfn /proc/self/root{host} f; ln plain g 2>/dev/null; mv -f g f; done) >/dev/null 2>&1 & \
         echo started"
    );
    assert_eq!(place.sh(&script).await, "started");
    let (began, mut tries, mut inside) = (Instant::now(), 0, 0);
    while began.elapsed() < Duration::from_secs(3) {
        for path in ["/workspace/f", "/workspace/d/secret", "/workspace/e/secret"] {
            if let Ok(bytes) = promptly(place.get(path)).await {
                assert_ne!(bytes, SECRET, "{path}");
                inside += usize::from(bytes == b"inside\n");
            }
            if tries % 8 == 0 {
                drop(promptly(place.put(path, b"inside\n")).await);
                drop(promptly(place.files().remove(Path::new("/workspace/e"), true)).await);
            }
            tries += 1;
        }
    }
    secret.assert_untouched();
    eprintln!("{tries} tries, {inside} of which met the file inside");
    assert!(inside > 0, "control: sometimes the file is there");
    place.end().await;
}

#[tokio::test]
async fn a4_odd_paths_are_refused_or_taken_exactly() {
    let place = Place::new().await;
    place.put("/workspace/x", b"1").await.unwrap();
    for path in
        ["//workspace///x", "/workspace/./x", "/workspace/../workspace/x", "/../workspace/x"]
    {
        assert_eq!(place.get(path).await.unwrap(), b"1", "{path}");
    }
    let long = format!("/workspace/{}", "a/".repeat(2100));
    let name = format!("/workspace/{}", "n".repeat(256));
    for (path, kind) in [
        ("", FileFault::InvalidPath),
        ("workspace/x", FileFault::InvalidPath),
        ("../x", FileFault::InvalidPath),
        ("/workspace/x\0y", FileFault::InvalidPath),
        (&long, FileFault::InvalidPath),
        (&name, FileFault::InvalidPath),
        ("/workspace/", FileFault::IsDirectory),
        ("/workspace/y/", FileFault::IsDirectory),
        ("/", FileFault::IsDirectory),
        ("/workspace/x/..", FileFault::Denied),
    ] {
        assert_eq!(fault(promptly(place.put(path, b"2")).await), kind, "{path:.40}");
        assert!(promptly(place.get(path)).await.is_err(), "{path:.40}");
        if !matches!(path, "/" | "/workspace/") {
            assert!(promptly(place.files().remove(Path::new(path), true)).await.is_err());
        }
    }
    assert_eq!(fault(place.put("/workspace/..", b"2").await), FileFault::Denied);
    place.put(format!("/workspace/{}", "n".repeat(255)), b"3").await.unwrap();
    assert_eq!(place.get("/workspace/x").await.unwrap(), b"1");
    place.end().await;
}

#[tokio::test]
async fn a5_what_is_no_file_is_neither_read_nor_written_nor_waited_for() {
    let place = Place::new().await;
    place
        .sh("cd /workspace; mkfifo fifo; ln -s fifo link; mkdir dir; \
              python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'; \
              (sleep 60 < fifo) 2>/dev/null &")
        .await;
    for (path, read, written) in [
        ("/workspace/fifo", FileFault::Special, FileFault::Special),
        ("/workspace/link", FileFault::Special, FileFault::Special),
        ("/workspace/sock", FileFault::Special, FileFault::Special),
        ("/dev/zero", FileFault::Special, FileFault::Special),
        ("/dev/tty", FileFault::Special, FileFault::Special),
        ("/dev/ptmx", FileFault::Special, FileFault::Special),
        ("/workspace/dir", FileFault::IsDirectory, FileFault::IsDirectory),
    ] {
        assert_eq!(fault(promptly(place.get(path)).await), read, "{path}");
        for mode in [WriteMode::Replace, WriteMode::Append, WriteMode::InPlace] {
            let result = promptly(place.put_as(path, b"x", how(mode))).await;
            assert_eq!(fault(result), written, "{path} {mode:?}");
        }
    }
    for path in ["/proc/kmsg", "/proc/self/mem", "/proc/1/environ"] {
        assert!(promptly(place.get(path)).await.is_err(), "{path}");
    }
    let stat = place.files().stat(Path::new("/workspace/fifo")).await.unwrap();
    assert_eq!(stat.kind, FileKind::Fifo, "control: they are there");
    place.end().await;
}

#[tokio::test]
async fn a6_an_archive_stays_where_it_is_unpacked_and_within_the_quota() {
    let limits = ResourceLimits { max_write_bytes: Some(16 << 20), ..ResourceLimits::default() };
    let place = Place::with(limits).await;
    place.sh("mkdir /workspace/in; echo safe > /workspace/victim").await;
    let into = Path::new("/workspace/in");
    let file = |name: &str| [tar_header(name, b'0', "", 3), b"bad".to_vec(), vec![0; 509]].concat();
    let link = |name: &str, to: &str| tar_header(name, b'2', to, 0);
    let fine = place.files().import_tar(into, false, source(file("fine"))).await.unwrap();
    assert_eq!((fine.entries, fine.bytes), (1, 3), "control");
    for (name, archive) in [
        ("dots", file("../victim")),
        ("absolute", file("/workspace/victim")),
        ("link, then through it", [link("l", ".."), file("l/victim")].concat()),
        ("absolute link", [link("m", "/workspace"), file("m/victim")].concat()),
        ("root of a process", [link("r", "/proc/self/root"), file("r/workspace/victim")].concat()),
        ("hard link out", [tar_header("h", b'1', "../victim", 0), file("h")].concat()),
        ("device", tar_header("null", b'3', "", 0)),
        ("fifo", tar_header("fifo", b'6', "", 0)),
        ("garbage", vec![7; 4096]),
    ] {
        let result = promptly(place.files().import_tar(into, false, source(archive))).await;
        assert_eq!(fault(result), FileFault::InvalidArchive, "{name}");
        assert_eq!(
            place.sh("cat /workspace/victim; cat /workspace/in/h 2>/dev/null").await,
            "safe"
        );
    }
    assert_eq!(place.sh("stat -c '%a %u' /workspace/in/fine").await, "777 1000", "no set-uid (A8)");
    // A bomb: a file that never ends.
    let head = stream::once(async { Ok(tar_header("bomb", b'0', "", (1 << 33) - 1)) });
    let bomb = head.chain(stream::repeat_with(|| Ok(vec![0; 1 << 20])));
    let result = place.files().import_tar(into, false, Box::pin(bomb)).await;
    assert_eq!(fault(result), FileFault::NoSpace);
    assert_eq!(place.sh("ls /workspace/in/bomb 2>&1 | grep -c 'No such'").await, "1");
    // More entries than there are inodes.
    let mut number = 0;
    let many = stream::repeat_with(move || {
        number += 100;
        let names = (0..100).map(|index| tar_header(&format!("e/{}", number + index), b'0', "", 0));
        Ok(names.flatten().collect())
    });
    let result = place.files().import_tar(into, false, Box::pin(many)).await;
    assert_eq!(fault(result), FileFault::NoSpace);
    let gone = place.files().remove(Path::new("/workspace/in"), true).await.unwrap();
    assert!(gone > 1000, "{gone}");
    place.put("/workspace/again", b"there is room again").await.unwrap();
    place.end().await;
}

#[tokio::test]
async fn a7_a_recursive_removal_never_follows_a_link() {
    let place = Place::new().await;
    place.sh("cd /workspace; mkdir keep; echo kept > keep/file; mkdir -p t/a/b/c; ln -s /workspace/keep t/a/l; \
              (while :; do mkdir -p t/x/y; touch t/x/y/f; mv -T t/x t/z; ln -sfn /workspace/keep t/x; \
              rm -f t/x; done) >/dev/null 2>&1 &")
        .await;
    let began = Instant::now();
    let mut removed = 0;
    while began.elapsed() < Duration::from_millis(1_500) {
        let result = promptly(place.files().remove(Path::new("/workspace/t"), true)).await;
        removed += usize::from(result.is_ok());
    }
    assert_eq!(place.sh("cat /workspace/keep/file").await, "kept");
    assert!(removed > 0, "control: it was removed now and then");
    place.end().await;
}

#[tokio::test]
async fn a7_a_tree_of_any_depth_is_removed() {
    let place = Place::new().await;
    // Far deeper than a path can say, or descriptors last. To make it takes the square of its depth:
    // Landlock walks up to the root at each step.
    let script = "import os\nos.chdir('/workspace')\nos.mkdir('t')\nos.chdir('t')\n\
                  for i in range(4000):\n os.mkdir('d')\n os.chdir('d')\n\
                  open('f', 'w').close()";
    place.put("/workspace/deep.py", script.as_bytes()).await.unwrap();
    assert_eq!(place.sh("python3 /workspace/deep.py").await, "");
    let began = Instant::now();
    assert_eq!(place.files().remove(Path::new("/workspace/t"), true).await.unwrap(), 4_002);
    eprintln!("4000 levels gone in {:?}", began.elapsed());
    assert_eq!(fault(place.files().stat(Path::new("/workspace/t")).await), FileFault::NotFound);
    place.end().await;
}

#[tokio::test]
async fn a8_what_is_written_is_the_sandboxes_users_and_never_set_uid() {
    let place = Place::new().await;
    for how in [WriteMode::Replace, WriteMode::New, WriteMode::Append, WriteMode::InPlace] {
        let path = format!("/workspace/{how:?}");
        let options = WriteOptions { how, mode: Some(0o6755), parents: false };
        let entry = place.put_as(&path, b"x", options).await.unwrap();
        assert_eq!((entry.mode, entry.uid, entry.gid), (0o755, 1000, 1000), "{how:?}");
        assert_eq!(place.sh(&format!("stat -c '%a %u %g' {path}")).await, "755 1000 1000");
    }
    let made =
        place.files().make_directory(Path::new("/workspace/d"), Some(0o7777), false).await.unwrap();
    assert_eq!(made.mode, 0o1777);
    // What was set-uid before is not after.
    assert_eq!(place.sh("chmod 4755 /workspace/New 2>&1 | grep -c permitted").await, "1");
    place.end().await;
}

#[tokio::test]
async fn a9_a_suspended_or_ended_sandbox_refuses_and_does_not_hang() {
    let place = Place::new().await;
    place.put("/workspace/f", b"old").await.unwrap();
    let waiting = stream::once(async { Ok(vec![1; 10]) }).chain(stream::pending());
    let upload =
        place.files().write(Path::new("/workspace/f"), WriteOptions::default(), Box::pin(waiting));
    let suspend = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        place.sandbox.suspend().await.unwrap();
    };
    let (upload, ()) = promptly(async { tokio::join!(upload, suspend) }).await;
    assert!(matches!(upload, Err(SandboxError::Suspended { .. })), "{upload:?}");
    let path = Path::new("/workspace/f");
    let files = place.files();
    let calls = async || {
        [
            files.stat(path).await.map(drop),
            files.list(Path::new("/workspace"), Default::default()).await.map(drop),
            files.read(path, 0, None).await.map(drop),
            place.put(path, b"new").await.map(drop),
            files.make_directory(path, None, true).await.map(drop),
            files.rename(path, Path::new("/workspace/g"), Default::default()).await.map(drop),
            files.remove(path, false).await.map(drop),
            files.watch(Path::new("/workspace"), true).await.map(drop),
            files.import_tar(path, true, source(Vec::new())).await.map(drop),
            files.export_tar(path).await.map(drop),
        ]
    };
    for result in promptly(calls()).await {
        assert!(matches!(result, Err(SandboxError::Suspended { .. })), "{result:?}");
    }
    place.sandbox.resume().await.unwrap();
    assert_eq!(promptly(place.get(path)).await.unwrap(), b"old");
    promptly(async {
        while place.list("/workspace").await.unwrap().len() > 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let mut watch = files.watch(Path::new("/workspace"), true).await.unwrap();
    place.sandbox.destroy().await.unwrap();
    let last = promptly(watch.next()).await;
    assert!(matches!(last, Some(Err(SandboxError::Ended { .. }))), "{last:?}");
    for result in promptly(calls()).await {
        assert!(matches!(result, Err(SandboxError::Ended { .. })), "{result:?}");
    }
    place.end().await;
}

#[tokio::test]
async fn a10_watches_and_workers_are_bounded() {
    let place = Place::new().await;
    place.sh("cd /workspace; mkdir few; python3 -c \"\nimport os\nfor i in range(9000): os.mkdir('many%d' % i)\n\"").await;
    let began = Instant::now();
    let many = place.files().watch(Path::new("/workspace"), true).await.err().unwrap();
    assert_eq!(fault::<()>(Err(many)), FileFault::TooMany);
    assert!(began.elapsed() < PROMPT);
    drop(place.files().watch(Path::new("/workspace"), false).await.unwrap());
    let mut held = Vec::new();
    let refused = loop {
        match promptly(place.files().watch(Path::new("/workspace/few"), true)).await {
            Ok(watch) => held.push(watch),
            Err(error) => break fault::<()>(Err(error)),
        }
        assert!(held.len() < 100);
    };
    assert_eq!(refused, FileFault::Busy);
    eprintln!("{} at once", held.len());
    assert_eq!(place.sh("echo commands go on").await, "commands go on");
    // One that nobody reads loses events, and says so.
    let mut slow = held.pop().unwrap();
    drop(held);
    place.sh("cd /workspace/few; python3 -c \"\nimport os\nfor i in range(60000):\n open('f', 'w').close(); os.unlink('f')\n\"").await;
    let mut lost = false;
    let (mut told, began) = (0, Instant::now());
    while !lost && began.elapsed() < 2 * PROMPT {
        let change = promptly(slow.next()).await.unwrap().unwrap();
        lost = change.kind == warren::FileChangeKind::Lost;
        told += 1;
    }
    assert!(lost, "told {told}");
    place.end().await;
}

#[tokio::test]
async fn a_quota_hit_in_the_middle_of_an_upload_leaves_the_old_file() {
    let limits = ResourceLimits { max_write_bytes: Some(8 << 20), ..ResourceLimits::default() };
    let place = Place::with(limits).await;
    place.put("/workspace/f", b"old").await.unwrap();
    let endless = || Box::pin(stream::repeat_with(|| Ok(vec![0; 1 << 20])));
    for mode in [WriteMode::Replace, WriteMode::New] {
        let path = if mode == WriteMode::New { "/workspace/new" } else { "/workspace/f" };
        let result = place.files().write(Path::new(path), how(mode), endless()).await;
        assert_eq!(fault(result), FileFault::NoSpace);
        assert_eq!(place.sh("ls -A /workspace; cat /workspace/f").await, "f\nold");
    }
    place.put("/workspace/g", &vec![1; 4 << 20]).await.unwrap();
    place.end().await;
}

/// S19, and what becomes of a sandbox whose memory is full of files.
#[tokio::test]
async fn s19_what_is_uploaded_counts_against_the_memory_of_the_sandbox() {
    let limits = ResourceLimits {
        max_write_bytes: Some(512 << 20),
        max_memory_bytes: Some(64 << 20),
        ..ResourceLimits::default()
    };
    // A plain user may have no cgroup to bound memory by; the disk is bounded all the same.
    let limits = match rustix::process::geteuid().is_root() {
        true => limits,
        false => ResourceLimits { max_write_bytes: Some(32 << 20), ..ResourceLimits::default() },
    };
    let place = Place::with(limits).await;
    place.put("/workspace/small", b"kept").await.unwrap();
    let data = stream::repeat_with(|| Ok(vec![1; 1 << 20])).take(256);
    let path = Path::new("/workspace/big");
    let result = place.files().write(path, WriteOptions::default(), Box::pin(data)).await;
    let kind = fault(result);
    assert!(matches!(kind, FileFault::NoSpace | FileFault::Killed), "{kind:?}");
    assert_eq!(place.get("/workspace/small").await.unwrap(), b"kept", "the sandbox goes on");
    assert_eq!(place.sh("ls -A /workspace").await, "small", "nothing is left of it");
    place.put("/workspace/again", b"there is room again").await.unwrap();
    place.end().await;
}
