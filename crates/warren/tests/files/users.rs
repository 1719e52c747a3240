//! The files of a sandbox as one of its users has them.

use std::path::Path;

use futures_util::StreamExt as _;
use warren::{FileChangeKind, FileFault, FileKind, ListItem, ListOptions, WriteMode, WriteOptions};

use crate::support::{Place, fault, source};

const IN_PLACE: WriteOptions = WriteOptions { how: WriteMode::InPlace, mode: None, parents: true };

#[tokio::test]
async fn paths_begin_at_the_home_and_entries_are_told_in_full() {
    let place = Place::new().await;
    let files = place.sandbox.files_of("user").unwrap();
    let written =
        files.write(Path::new("a/b.txt"), IN_PLACE, source(b"12345".to_vec())).await.unwrap();
    assert_eq!(written.path, Path::new("/home/user/a/b.txt"));
    let details = written.details.unwrap();
    assert_eq!((details.owner.as_str(), details.group.as_str()), ("user", "user"));
    assert_eq!(place.sh("cat ~/a/b.txt; stat -c %U:%a ~/a").await, "12345user:755");
    place.sh("ln -s a/b.txt ~/link; ln -s nowhere ~/dangling").await;

    let link = files.stat(Path::new("~/link")).await.unwrap();
    let (end, kind, mode) = link.resolved.unwrap();
    assert_eq!(
        (end.as_path(), kind, mode),
        (Path::new("/home/user/a/b.txt"), FileKind::File, 0o644)
    );
    let attributes =
        [("user.e2b.k".to_owned(), b"v".to_vec()), ("user.e2b.l".to_owned(), vec![0xff])];
    files.set_attributes(Path::new("link"), "user.e2b.", &attributes).await.unwrap();
    let told = files.stat(Path::new("a/b.txt")).await.unwrap().details.unwrap().attributes;
    assert_eq!(told, attributes);
    let fewer = &attributes[..1];
    let told = files.set_attributes(Path::new("a/b.txt"), "user.e2b.", fewer).await.unwrap();
    assert_eq!(told.details.unwrap().attributes, fewer);
    let foreign = files.set_attributes(Path::new("a/b.txt"), "security.", &[]).await;
    assert_eq!(fault(foreign), FileFault::InvalidPath);

    let mut items = files.list(Path::new("~"), ListOptions::default()).await.unwrap().items;
    let mut seen = Vec::new();
    while let Some(ListItem::Entry(entry)) = items.next().await.transpose().unwrap() {
        assert!(entry.details.is_some(), "{entry:?}");
        seen.push((entry.path.display().to_string(), entry.resolved.is_some()));
    }
    seen.sort();
    assert_eq!(seen, [("a".into(), false), ("dangling".into(), false), ("link".into(), true)]);

    let nobody = place.sandbox.files_of("nobody-here").unwrap();
    assert_eq!(fault(nobody.stat(Path::new("x")).await), FileFault::NoUser);
    let elsewhere = files.stat(Path::new("~root/x")).await;
    assert_eq!(fault(elsewhere), FileFault::InvalidPath);
    // Not root's: nothing here could give a file to anybody else.
    let root = place.sandbox.files_of("root").unwrap();
    let denied = root.write(Path::new("/tmp/x"), IN_PLACE, source(b"x".to_vec())).await;
    assert_eq!(fault(denied), FileFault::Denied);
    place.end().await;
}

#[tokio::test]
async fn a_hostile_table_of_users_is_only_a_table() {
    let place = Place::new().await;
    // The sandbox's /etc is not its user's to write, so that the worst case is a user that is odd.
    let odd = "\0root";
    let files = place.sandbox.files_of(odd).unwrap();
    assert_eq!(fault(files.stat(Path::new("/tmp")).await), FileFault::NoUser);
    place.end().await;
}

#[tokio::test]
async fn whoever_asks_is_told_all_that_has_happened_so_far() {
    let place = Place::new().await;
    let files = place.sandbox.files_of("user").unwrap();
    place.sh("mkdir /tmp/w").await;
    let mut watch = files.open_watch(Path::new("/tmp/w"), true).await.unwrap();
    assert!(watch.happened().await.unwrap().is_empty());
    for round in 0..20 {
        let name = format!("f{round}");
        let path = Path::new("/tmp/w").join(&name);
        files.write(&path, IN_PLACE, source(b"hello".to_vec())).await.unwrap();
        let seen = watch.happened().await.unwrap();
        let kinds: Vec<_> = seen.iter().map(|change| change.kind).collect();
        use FileChangeKind::{Chmod, Create, Write};
        assert_eq!(kinds, [Create, Chmod, Write], "as inotify gives them");
        assert!(seen.iter().all(|change| change.path == Path::new(&name)));
        let entry = seen[2].entry.as_ref().unwrap();
        assert_eq!((entry.path.as_path(), entry.details.is_some()), (path.as_path(), true));
    }
    place.sh("mkdir -p /tmp/w/deep/er; echo x > /tmp/w/deep/er/f; rm /tmp/w/f0").await;
    let seen = watch.happened().await.unwrap();
    assert!(seen.iter().any(|change| change.path == Path::new("deep/er/f")), "{seen:?}");
    let gone = seen.iter().find(|change| change.kind == FileChangeKind::Remove).unwrap();
    assert_eq!((gone.path.as_path(), gone.entry.is_none()), (Path::new("f0"), true));
    // Overwriting what is there is another matter: it is emptied first, and stays the same file.
    files.write(Path::new("/tmp/w/f1"), IN_PLACE, source(b"".to_vec())).await.unwrap();
    assert!(!watch.happened().await.unwrap().is_empty());
    place.end().await;
}
