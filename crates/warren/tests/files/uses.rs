//! What callers do all day.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt as _;
use warren::{
    FileChangeKind, FileFault, FileKind, ListItem, ListOptions, RenameOptions, WriteMode,
    WriteOptions,
};

use crate::support::{Place, collect, fault, how, promptly, source};

#[tokio::test]
async fn a_file_is_written_read_in_ranges_appended_to_and_replaced() {
    let place = Place::new().await;
    let written = place.put("/workspace/f", b"hello world").await.unwrap();
    assert_eq!((written.kind, written.size, written.mode), (FileKind::File, 11, 0o644));
    assert_eq!(place.get("/workspace/f").await.unwrap(), b"hello world");
    for (offset, length, expected) in [
        (6, None, &b"world"[..]),
        (0, Some(5), b"hello"),
        (6, Some(100), b"world"),
        (11, None, b""),
        (99, Some(1), b""),
    ] {
        let part = place.files().read(Path::new("/workspace/f"), offset, length).await.unwrap();
        assert_eq!(part.length, Some(expected.len() as u64), "{offset}");
        assert_eq!(collect(part.data).await.unwrap(), expected, "{offset}");
    }
    place.put_as("/workspace/f", b"!", how(WriteMode::Append)).await.unwrap();
    assert_eq!(place.sh("cat /workspace/f; chmod 600 /workspace/f").await, "hello world!");
    let kept = place.put("/workspace/f", b"new").await.unwrap();
    assert_eq!((kept.mode, kept.size), (0o600, 3), "the mode stays");
    let exists = place.put_as("/workspace/f", b"x", how(WriteMode::New)).await;
    assert_eq!(fault(exists), FileFault::Exists);
    place.put_as("/workspace/g", b"x", how(WriteMode::New)).await.unwrap();
    let same = place.sh("stat -c %i /workspace/f").await;
    place.put_as("/workspace/f", b"in place", how(WriteMode::InPlace)).await.unwrap();
    assert_eq!(
        place.sh("stat -c %i /workspace/f; cat /workspace/f").await,
        format!("{same}\nin place")
    );
    let deep = WriteOptions { parents: true, ..WriteOptions::default() };
    assert_eq!(fault(place.put("/workspace/a/b/c", b"x").await), FileFault::NotFound);
    place.put_as("/workspace/a/b/c", b"x", deep).await.unwrap();
    assert_eq!(place.list("/workspace").await.unwrap().len(), 3, "no draft is left");
    // A file of /proc has bytes, though it says that it has none.
    let id = place.get("/proc/sys/kernel/random/boot_id").await.unwrap();
    assert_eq!(
        String::from_utf8(id).unwrap().trim(),
        place.sh("cat /proc/sys/kernel/random/boot_id").await
    );
    place.put("/workspace/empty", b"").await.unwrap();
    assert_eq!(place.get("/workspace/empty").await.unwrap(), b"");
    place.end().await;
}

#[tokio::test]
async fn directories_are_made_listed_moved_and_removed() {
    let place = Place::new().await;
    let files = place.files();
    let path = Path::new;
    let made = files.make_directory(path("/workspace/a/b"), Some(0o750), true).await.unwrap();
    assert_eq!((made.kind, made.mode), (FileKind::Directory, 0o750));
    files.make_directory(path("/workspace/a/b"), None, true).await.unwrap();
    let again = files.make_directory(path("/workspace/a/b"), None, false).await;
    assert_eq!(fault(again), FileFault::Exists);
    place.sh("cd /workspace/a; echo 12345 > b/f; ln -s b/f link; ln -s nowhere dangling").await;
    let over = files.make_directory(path("/workspace/a/b/f"), None, true).await;
    assert_eq!(fault(over), FileFault::NotDirectory);
    let shallow = place.list("/workspace/a").await.unwrap();
    let names: Vec<_> = shallow.iter().map(|entry| entry.path.to_str().unwrap()).collect();
    assert_eq!(names, ["b", "dangling", "link"]);
    assert_eq!(shallow[2].target.as_deref(), Some(path("b/f")));
    let options = ListOptions { depth: 5, limit: 3 };
    let mut items = files.list(path("/workspace"), options).await.unwrap().items;
    let mut seen = 0;
    while let Some(item) = items.next().await {
        match item.unwrap() {
            ListItem::Entry(entry) => {
                assert!(entry.path.starts_with("a"));
                seen += 1;
            }
            ListItem::End { truncated } => assert!(truncated),
        }
    }
    assert_eq!(seen, 3);
    let link = files.stat(path("/workspace/a/link")).await.unwrap();
    assert_eq!(link.kind, FileKind::Link);
    assert_eq!(link.resolved, Some(("/workspace/a/b/f".into(), FileKind::File, 0o644)));
    let dangling = files.stat(path("/workspace/a/dangling")).await.unwrap();
    assert_eq!((dangling.kind, dangling.resolved), (FileKind::Link, None));

    let keep = RenameOptions::default();
    let moved = files.rename(path("/workspace/a/link"), path("/workspace/l"), keep).await.unwrap();
    assert_eq!(moved.kind, FileKind::Link, "the link itself");
    place.put("/workspace/x", b"x").await.unwrap();
    let taken = files.rename(path("/workspace/x"), path("/workspace/l"), keep).await;
    assert_eq!(fault(taken), FileFault::Exists);
    let replace = RenameOptions { replace: true, parents: true };
    files.rename(path("/workspace/x"), path("/workspace/l"), replace).await.unwrap();
    files.rename(path("/workspace/l"), path("/tmp/n/e/w"), replace).await.unwrap();
    assert_eq!(place.get("/tmp/n/e/w").await.unwrap(), b"x", "to another filesystem");
    assert_eq!(fault(files.stat(path("/workspace/l")).await), FileFault::NotFound);
    let full = files.remove(path("/workspace/a"), false).await;
    assert_eq!(fault(full), FileFault::NotEmpty);
    place.sh("mkdir -p /workspace/a/shut/in; touch /workspace/a/shut/in/f; chmod 0 /workspace/a/shut/in /workspace/a/shut").await;
    assert_eq!(files.remove(path("/workspace/a"), true).await.unwrap(), 7);
    assert!(place.list("/workspace").await.unwrap().is_empty());
    assert_eq!(fault(files.remove(path("/"), true).await), FileFault::Denied);
    assert_eq!(fault(files.remove(path("/usr/bin/env"), false).await), FileFault::ReadOnly);
    place.end().await;
}

#[tokio::test]
async fn a_tree_goes_in_and_comes_out_as_it_was() {
    let place = Place::new().await;
    place
        .sh("cd /workspace; mkdir -p t/sub/empty; head -c 300000 /dev/urandom > t/sub/data; \
              ln -s sub/data t/link; mkfifo t/fifo; chmod 700 t/sub/data")
        .await;
    let packed = place.files().export_tar(Path::new("/workspace/t")).await.unwrap();
    let bytes = collect(packed.data).await.unwrap();
    let into = Path::new("/workspace/new/place");
    let done = place.files().import_tar(into, true, source(bytes.clone())).await.unwrap();
    assert_eq!((done.entries, done.bytes), (4, 300_000), "all but the FIFO");
    assert_eq!(
        place
            .sh("cd /workspace; rm t/fifo; diff -r t new/place && stat -c %a new/place/sub/data")
            .await,
        "700"
    );
    // Half an archive is an error, and what is whole of it is there.
    let cut = bytes[..bytes.len() / 2].to_vec();
    let result = place.files().import_tar(Path::new("/workspace/cut"), true, source(cut)).await;
    assert_eq!(fault(result), FileFault::InvalidArchive);
    assert_eq!(place.sh("find /workspace/cut -name data").await, "");
    let one = place.files().export_tar(Path::new("/workspace/t/sub/data")).await.unwrap();
    let one = collect(one.data).await.unwrap();
    assert!(one.starts_with(b"data\0"));
    place.end().await;
}

#[tokio::test]
async fn names_that_are_no_text_come_and_go_unchanged() {
    let place = Place::new().await;
    for name in [&b"\xff\xfe\x80"[..], b"a\nb\tc", b"back\\slash", b"sp ace %41", "ü☃".as_bytes()]
    {
        let path = PathBuf::from("/workspace").join(OsStr::from_bytes(name));
        place.put(&path, name).await.unwrap();
        assert_eq!(place.get(&path).await.unwrap(), name);
        let listed = place.list("/workspace").await.unwrap();
        assert_eq!(listed[0].path.as_os_str().as_bytes(), name);
        assert_eq!(place.files().remove(&path, false).await.unwrap(), 1);
    }
    place.end().await;
}

#[tokio::test]
async fn a_watch_tells_what_happens_at_every_depth() {
    let place = Place::new().await;
    place.sh("mkdir -p /workspace/w/old").await;
    let mut changes = place.files().watch(Path::new("/workspace/w"), true).await.unwrap();
    place.sh("cd /workspace/w; echo x > f; mkdir -p new/deep; sleep 0.2; echo y > new/deep/g; \
              mv new moved; echo z > moved/deep/h; chmod 600 f; rm f; mv old ..; echo q > ../old/q; \
              touch last")
        .await;
    let mut seen = Vec::new();
    while let Some(change) = promptly(changes.next()).await {
        let change = change.unwrap();
        let last = change.path == Path::new("last");
        seen.push((change.kind, change.path.display().to_string(), change.directory));
        if last {
            break;
        }
    }
    use FileChangeKind::{Chmod, Create, Remove, Rename, Write};
    for (kind, path, directory) in [
        (Create, "f", false),
        (Write, "f", false),
        (Create, "new", true),
        (Create, "new/deep", true),
        (Create, "new/deep/g", false),
        (Write, "new/deep/g", false),
        (Rename, "new", true),
        (Create, "moved", true),
        (Create, "moved/deep/h", false),
        (Chmod, "f", false),
        (Remove, "f", false),
        (Rename, "old", true),
    ] {
        let expected = (kind, path.to_owned(), directory);
        assert!(seen.contains(&expected), "{expected:?} in {seen:?}");
    }
    assert!(!seen.iter().any(|(_, path, _)| path.contains('q')), "it left: {seen:?}");
    place.sh("rm -r /workspace/w").await;
    let mut last = None;
    promptly(async {
        while let Some(change) = changes.next().await {
            last = Some(change.unwrap());
        }
    })
    .await;
    let last = last.map(|change| (change.kind, change.path));
    assert_eq!(last, Some((Remove, PathBuf::new())), "it ends with what is watched");
    let missing = place.files().watch(Path::new("/workspace/w"), true).await.err().unwrap();
    assert_eq!(fault::<()>(Err(missing)), FileFault::NotFound);
    place.put("/workspace/file", b"").await.unwrap();
    let file = place.files().watch(Path::new("/workspace/file"), true).await.err().unwrap();
    assert_eq!(fault::<()>(Err(file)), FileFault::NotDirectory);
    place.end().await;
}

#[tokio::test]
async fn whoever_hangs_up_leaves_nothing_behind() {
    let place = Place::new().await;
    place.put("/workspace/f", b"old").await.unwrap();
    // An upload that breaks off, and one whose caller is gone.
    let broken = futures_util::stream::iter([
        Ok(vec![1; 100_000]),
        Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset)),
    ]);
    let cut = place
        .files()
        .write(Path::new("/workspace/f"), WriteOptions::default(), Box::pin(broken))
        .await;
    assert_eq!(fault(cut), FileFault::Interrupted);
    let endless = futures_util::stream::once(async { Ok(vec![1; 10]) })
        .chain(futures_util::stream::pending());
    let upload =
        place.files().write(Path::new("/workspace/f"), WriteOptions::default(), Box::pin(endless));
    assert!(tokio::time::timeout(Duration::from_millis(300), upload).await.is_err());
    // A download that nobody reads on.
    place.sh("head -c 5000000 /dev/zero > /workspace/big").await;
    drop(place.files().read(Path::new("/workspace/big"), 0, None).await.unwrap());
    drop(place.files().watch(Path::new("/workspace"), true).await.unwrap());
    drop(place.files().export_tar(Path::new("/usr")).await.unwrap());
    promptly(async {
        while place.list("/workspace").await.unwrap().len() > 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(place.get("/workspace/f").await.unwrap(), b"old");
    // Workers are few: were one left for each, this would be refused.
    for _ in 0..100 {
        drop(place.files().watch(Path::new("/workspace"), false).await.unwrap());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    place.end().await;
}
