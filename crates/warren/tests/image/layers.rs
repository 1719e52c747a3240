//! One layer, unpacked: what comes out, and what never gets in.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use warren::image::{Bounds, Digest, ImageError, Onto, Owners, Unpacked, unpack};

use crate::tar::{Entry, Tar, gzip, zstd};

/// A directory to unpack into, beside something that must stay as it is.
struct Place {
    outer: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let outer = tempfile::tempdir().unwrap();
        fs::create_dir(outer.path().join("layer")).unwrap();
        fs::write(outer.path().join("victim"), "safe").unwrap();
        Self { outer }
    }

    fn layer(&self) -> PathBuf {
        self.outer.path().join("layer")
    }

    fn at(&self, path: &str) -> PathBuf {
        self.layer().join(path)
    }

    fn unpack(&self, bytes: &[u8]) -> Result<Unpacked, ImageError> {
        self.unpack_as(bytes, mine_or_kept(), Bounds::default())
    }

    fn unpack_as(
        &self,
        bytes: &[u8],
        owners: Owners,
        bounds: Bounds,
    ) -> Result<Unpacked, ImageError> {
        let dir = File::open(self.layer()).unwrap();
        let result =
            unpack(bytes, &Onto { target: dir.as_fd(), below: Vec::new(), owners, bounds });
        let beside: Vec<_> = fs::read_dir(self.outer.path()).unwrap().collect();
        assert_eq!(beside.len(), 2, "nothing is made beside the layer");
        assert_eq!(fs::read(self.outer.path().join("victim")).unwrap(), b"safe");
        result
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn mine_or_kept() -> Owners {
    if is_root() { Owners::Kept } else { Owners::Mine }
}

fn opaque(path: &Path) -> Option<Vec<u8>> {
    let mut value = [0; 8];
    let got = rustix::fs::lgetxattr(path, "user.overlay.opaque", &mut value[..]).ok()?;
    Some(value[..got].to_vec())
}

fn is_whiteout(path: &Path) -> bool {
    let found = fs::symlink_metadata(path).unwrap();
    found.file_type().is_char_device() && found.rdev() == 0
}

#[test]
fn a_layer_keeps_contents_rights_times_owners_attributes_and_links() {
    let place = Place::new();
    let deep = format!("{}/{}", "d".repeat(120), "f".repeat(120));
    let pax = vec![
        ("mtime".to_owned(), b"1234567890.987654321".to_vec()),
        ("SCHILY.xattr.user.note".to_owned(), b"a\0b".to_vec()),
        ("SCHILY.xattr.security.selinux".to_owned(), b"left out".to_vec()),
    ];
    let file = Entry { mode: 0o4750, uid: 7, gid: 8, pax, ..Entry::default() };
    let shut = Entry { mode: 0o1555, modified: 5, ..Entry::default() };
    let bytes = Tar::default()
        .entry(b'5', "./", "", b"", &Entry { mode: 0o711, ..Entry::default() })
        .entry(b'5', "shut/", "", b"", &shut)
        .file("shut/within", "in")
        .entry(b'0', "tool", "", b"#!", &file)
        .hard_link("again", "tool")
        .link("abs", "/etc/passwd")
        .link("up", "../../victim")
        .file(&deep, "deep")
        .file("holes", [vec![0; 1 << 20], b"end".to_vec()].concat())
        .entry(b'6', "pipe", "", b"", &Entry { mode: 0o622, ..Entry::default() })
        .entry(b'3', "null", "", b"", &Entry::default())
        .bytes();
    let plain = place.unpack(&bytes).unwrap();
    assert_eq!((plain.entries, plain.skipped, plain.hides_all), (11, 1, false));
    assert_eq!(plain.diff_id, Digest::of(&bytes));
    assert_eq!((plain.size, &plain.digest), (bytes.len() as u64, &plain.diff_id));
    let tool = fs::metadata(place.at("tool")).unwrap();
    assert_eq!((tool.mode() & 0o7777, tool.nlink()), (0o4750, 2));
    assert_eq!((tool.mtime(), tool.mtime_nsec()), (1_234_567_890, 987_654_321));
    if is_root() {
        assert_eq!((tool.uid(), tool.gid()), (7, 8));
    }
    let mut value = [0; 8];
    let got = rustix::fs::getxattr(place.at("again"), "user.note", &mut value[..]).unwrap();
    assert_eq!(&value[..got], b"a\0b");
    let shut = fs::metadata(place.at("shut")).unwrap();
    let lent = if is_root() { 0 } else { 0o700 };
    assert_eq!((shut.mode() & 0o7777, shut.mtime()), (0o1555 | lent, 5));
    assert_eq!(fs::read(place.at("shut/within")).unwrap(), b"in");
    assert_eq!(fs::read_link(place.at("abs")).unwrap(), Path::new("/etc/passwd"));
    assert_eq!(fs::read_link(place.at("up")).unwrap(), Path::new("../../victim"));
    assert_eq!(fs::read(place.at(&deep)).unwrap(), b"deep");
    let holes = fs::metadata(place.at("holes")).unwrap();
    assert_eq!(holes.len(), (1 << 20) + 3);
    assert!(holes.blocks() * 512 < 1 << 19, "what is zero takes no room: {}", holes.blocks());
    assert!(fs::read(place.at("holes")).unwrap().ends_with(b"\0end"));
    assert!(fs::metadata(place.at("pipe")).unwrap().file_type().is_fifo());
    assert!(!place.at("null").exists(), "no device gets in");
    assert_eq!(fs::metadata(place.layer()).unwrap().mode() & 0o7777, 0o711 | lent);
}

#[test]
fn it_is_the_same_layer_however_it_is_compressed() {
    let bytes = Tar::default().dir("d").file("d/f", "x".repeat(100_000)).bytes();
    let mut members = gzip(&bytes[..1000]);
    members.extend_from_slice(&gzip(&bytes[1000..]));
    for (name, packed) in [("gzip", gzip(&bytes)), ("zstd", zstd(&bytes)), ("members", members)] {
        let place = Place::new();
        let unpacked = place.unpack(&packed).unwrap();
        assert_eq!(unpacked.diff_id, Digest::of(&bytes), "{name}");
        assert_eq!(unpacked.digest, Digest::of(&packed), "{name}: all of it is in the digest");
        assert_eq!(fs::read(place.at("d/f")).unwrap().len(), 100_000, "{name}");
        let cut = place_refuses(&packed[..packed.len() / 2]);
        assert!(cut.contains("cannot") || cut.contains("ends"), "{name}: {cut}");
    }
}

fn place_refuses(bytes: &[u8]) -> String {
    let place = Place::new();
    place.unpack(bytes).expect_err("it must be refused").to_string()
}

#[test]
fn whiteouts_hide_what_is_below_and_nothing_of_their_own_layer() {
    let place = Place::new();
    let unpacked = place
        .unpack(
            &Tar::default()
                .dir("d")
                .file("d/.wh.gone", "")
                .file("d/kept", "1")
                .file("d/.wh.kept", "")
                .file("o/.wh..wh..opq", "")
                .file("o/new", "2")
                .file(".wh.swap", "")
                .dir("swap")
                .file("swap/in", "3")
                .dir("late")
                .file("late/in", "4")
                .file(".wh.late", "")
                .file(".wh.back", "")
                .file("back", "5")
                .file(".wh..wh.plnk", "")
                .bytes(),
        )
        .unwrap();
    assert!(is_whiteout(&place.at("d/gone")));
    assert_eq!(fs::read(place.at("d/kept")).unwrap(), b"1");
    assert_eq!(opaque(&place.at("d")), None);
    for (dir, file) in [("o", "new"), ("swap", "in"), ("late", "in")] {
        assert_eq!(opaque(&place.at(dir)).as_deref(), Some(&b"y"[..]), "{dir}");
        assert!(place.at(dir).join(file).exists());
    }
    assert_eq!(fs::read(place.at("back")).unwrap(), b"5");
    assert_eq!(fs::read_dir(place.layer()).unwrap().count(), 5, "no name begins with .wh.");
    assert!(!unpacked.hides_all);
    let all = Place::new().unpack(&Tar::default().file(".wh..wh..opq", "").bytes()).unwrap();
    assert!(all.hides_all);
}

#[test]
fn of_a_name_that_comes_twice_the_last_holds() {
    let place = Place::new();
    let second = Entry { mode: 0o700, ..Entry::default() };
    let bytes = Tar::default()
        .file("f", "one")
        .file("f", "two")
        .link("l", "../victim")
        .file("l", "mine")
        .file("x", "file")
        .dir("x")
        .dir("y")
        .file("y", "file")
        .dir("z")
        .entry(b'5', "z", "", b"", &second)
        .bytes();
    place.unpack(&bytes).unwrap();
    let read = |name: &str| fs::read_to_string(place.at(name)).unwrap();
    assert_eq!((read("f"), read("l"), read("y")), ("two".into(), "mine".into(), "file".into()));
    assert!(place.at("x").is_dir());
    assert_eq!(fs::metadata(place.at("z")).unwrap().mode() & 0o777, 0o700);
}

#[test]
fn nothing_gets_out_of_the_layer() {
    let control = Tar::default().file("a/./b//c", "x").dir("./").bytes();
    Place::new().unpack(&control).expect("control: a harmless layer is taken");
    let attribute = |name: &str| {
        let pax = vec![(format!("SCHILY.xattr.{name}"), b"y".to_vec())];
        Tar::default().entry(b'0', "f", "", b"", &Entry { pax, ..Entry::default() })
    };
    let owned = |uid| Tar::default().entry(b'0', "f", "", b"", &Entry { uid, ..Entry::default() });
    let mut cases: BTreeMap<&str, (Tar, &str)> = BTreeMap::from([
        ("dots", (Tar::default().file("../victim", "bad"), "leads out")),
        ("dots within", (Tar::default().file("a/../../victim", "bad"), "leads out")),
        ("absolute", (Tar::default().file("/tmp/warren-bad", "bad"), "absolute")),
        ("NUL by pax", {
            let pax = vec![("path".to_owned(), b"a\0b".to_vec())];
            let entry = Entry { pax, ..Entry::default() };
            (Tar::default().entry(b'0', "f", "", b"", &entry), "NUL")
        }),
        (
            "file through a link",
            (Tar::default().link("l", "..").file("l/victim", "bad"), "on its way"),
        ),
        (
            "through an absolute link",
            (Tar::default().link("l", "/tmp").file("l/x", "bad"), "on its way"),
        ),
        (
            "through a link to within",
            (Tar::default().dir("d").link("l", "d").file("l/x", ""), "on its way"),
        ),
        ("directory below a link", (Tar::default().link("l", "..").dir("l/new"), "on its way")),
        (
            "whiteout through a link",
            (Tar::default().link("l", "..").file("l/.wh.victim", ""), "on its way"),
        ),
        (
            "opaque through a link",
            (Tar::default().link("l", "..").file("l/.wh..wh..opq", ""), "on its way"),
        ),
        ("below a file", (Tar::default().file("f", "").file("f/x", ""), "on its way")),
        ("hard link out", (Tar::default().hard_link("h", "../victim"), "outside")),
        ("absolute hard link", (Tar::default().hard_link("h", "/etc/passwd"), "outside")),
        (
            "hard link through a link",
            (Tar::default().link("l", "..").hard_link("h", "l/victim"), "on its way"),
        ),
        ("hard link to nothing", (Tar::default().hard_link("h", "nowhere"), "not in the layer")),
        (
            "hard link to a whiteout",
            (Tar::default().file(".wh.w", "").hard_link("h", "w"), "not in the layer"),
        ),
        ("hard link to a directory", (Tar::default().dir("d").hard_link("h", "d"), "directory")),
        ("hard link to itself", (Tar::default().hard_link("h", "h"), "not in the layer")),
        ("whiteout of dots", (Tar::default().file(".wh...", ""), "removes nothing")),
        ("whiteout of nothing", (Tar::default().file(".wh.", ""), "removes nothing")),
        ("below a whiteout", (Tar::default().file("d/.wh.x/y", ""), "removed")),
        ("overlay's attribute", (attribute("user.overlay.redirect"), "overlay")),
        ("overlay's other attribute", (attribute("trusted.overlay.opaque"), "overlay")),
        ("file over a full directory", (Tar::default().file("d/f", "").file("d", ""), "directory")),
        ("no name", (Tar::default().file(".", "x"), "no name")),
        ("long name", (Tar::default().file(&"a/".repeat(3000), ""), "too long")),
        ("sparse", (Tar::default().entry(b'S', "s", "", b"", &Entry::default()), "sparse")),
        ("unknown kind", (Tar::default().entry(b'M', "m", "", b"", &Entry::default()), "unknown")),
    ]);
    if is_root() {
        cases.insert("an id of nobody", (owned(65_536), "65536 ids"));
        Place::new().unpack(&owned(65_535).bytes()).expect("control: the last id");
    }
    for (name, (tar, why)) in cases {
        let place = Place::new();
        let error = place.unpack(&tar.bytes()).expect_err(name);
        assert!(matches!(error, ImageError::Refused { .. }), "{name}: {error:?}");
        assert!(error.to_string().contains(why), "{name}: {error}");
    }
    assert!(!Path::new("/tmp/warren-bad").exists());
}

#[test]
fn too_much_is_refused_before_it_is_taken() {
    let small = Bounds { entries: 10, bytes: 1 << 20 };
    let place = Place::new();
    let fine = (0..10).fold(Tar::default(), |tar, n| tar.file(&format!("f{n}"), "x"));
    place.unpack_as(&fine.clone().bytes(), mine_or_kept(), small).expect("control: ten of ten");
    let many = fine.file("one-more", "x").bytes();
    let error = Place::new().unpack_as(&many, mine_or_kept(), small).unwrap_err();
    assert!(matches!(error, ImageError::TooLarge { unit: "entries", limit: 10, .. }), "{error}");
    // 64 MiB of zeros in a few kilobytes; the same behind the end of the archive.
    let bomb = Tar::default().file("zeros", vec![0; 64 << 20]).bytes();
    let mut trailing = Tar::default().file("f", "x").bytes();
    trailing.resize(64 << 20, 0);
    // Headers that never come to an entry are bounded as well.
    let pax = Entry { pax: vec![("comment".to_owned(), vec![b'x'; 60_000])], ..Entry::default() };
    let chatter =
        (0..100).fold(Tar::default(), |tar, _| tar.entry(b'g', "g", "", &[b'x'; 60_000], &pax));
    for (name, bytes) in [("bomb", bomb), ("trailing", trailing), ("chatter", chatter.bytes())] {
        for packed in [gzip(&bytes), zstd(&bytes)] {
            assert!(packed.len() < 1 << 20, "control: it is small when it comes");
            let error = Place::new().unpack_as(&packed, mine_or_kept(), small).unwrap_err();
            let large = matches!(error, ImageError::TooLarge { unit: "bytes", .. });
            assert!(large, "{name}: {error}");
        }
    }
    // A size that is never sent takes no room either.
    let mut lie = Tar::default().file("lie", "").open_ended();
    lie[124..136].copy_from_slice(b"77777777777\0");
    let sum: u64 = lie[..512]
        .iter()
        .enumerate()
        .map(|(at, byte)| u64::from(if (148..156).contains(&at) { b' ' } else { *byte }))
        .sum();
    lie[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let error = Place::new().unpack(&lie).unwrap_err();
    assert!(error.to_string().contains("ends within"), "{error}");
}

#[test]
fn one_user_alone_can_read_and_remove_all_of_a_layer() {
    let place = Place::new();
    let none = Entry { mode: 0, uid: 123_456, gid: 7, ..Entry::default() };
    let bytes = Tar::default()
        .entry(b'5', "d", "", b"", &none)
        .entry(b'0', "d/f", "", b"secret", &none)
        .bytes();
    place.unpack_as(&bytes, Owners::Mine, Bounds::default()).unwrap();
    let (dir, file) =
        (fs::metadata(place.at("d")).unwrap(), fs::metadata(place.at("d/f")).unwrap());
    assert_eq!((dir.mode() & 0o7777, file.mode() & 0o7777), (0o700, 0o400));
    assert_eq!(file.uid(), rustix::process::geteuid().as_raw());
}

#[test]
fn bytes_that_are_no_layer_never_panic_nor_get_out() {
    let good = Tar::default()
        .dir("d")
        .file("d/.wh.x", "")
        .link("l", "d")
        .hard_link("h", "l")
        .entry(
            b'0',
            "f",
            "",
            b"abc",
            &Entry { pax: vec![("mtime".to_owned(), b"1.5".to_vec())], ..Entry::default() },
        )
        .bytes();
    let mut seed: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut next = |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        usize::try_from(seed % below as u64).unwrap()
    };
    let place = Place::new();
    let mut refused = 0;
    for _ in 0..1_500 {
        let mut bytes = good.clone();
        for _ in 0..=next(3) {
            let at = next(bytes.len() / 512 - 2) * 512 + next(160);
            bytes[at] = [b'.', b'/', b'5', b'1', 0, 0xff, b'w'][next(7)];
            let start = at / 512 * 512;
            let block = &bytes[start..start + 512];
            let sum: u64 = block
                .iter()
                .enumerate()
                .map(|(at, byte)| u64::from(if (148..156).contains(&at) { b' ' } else { *byte }))
                .sum();
            bytes[start + 148..start + 156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        let bounds = Bounds { entries: 100, bytes: 1 << 20 };
        refused += u32::from(place.unpack_as(&bytes, mine_or_kept(), bounds).is_err());
        let _ = fs::set_permissions(place.layer(), PermissionsExt::from_mode(0o755));
    }
    assert!(refused > 100, "some of it is wrong: {refused}");
}
