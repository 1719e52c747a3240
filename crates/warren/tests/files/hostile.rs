//! Traps: THREATS.md 4.8, A1 to A10, and S19.
//!
//! Each case is tried by `linux`, and those that are about paths by whoever walks them otherwise, too ([`By`]).

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use warren::{
    FileFault, FileKind, RenameOptions, ResourceLimits, SandboxError, WriteMode, WriteOptions,
};

use crate::support::{By, PROMPT, Place, collect, fault, how, promptly, source, tar_header};

/// What the disk of a sandbox holds; without one of its own (`landlock`), what one file may have.
const DISK: u64 = 16 << 20;

fn limits() -> ResourceLimits {
    ResourceLimits { max_write_bytes: Some(DISK), ..ResourceLimits::default() }
}

/// Makes of each `async fn name(place: &Place)` a test, `linux::name`, and one for each other backend. To start a sandbox
/// of gVisor's takes as long as to try a case there, so there they are one test, in one sandbox, one after the other.
macro_rules! traps {
    ($($name:ident),+ $(,)?) => {
        traps! { @ linux, Linux, [$($name),+] }
        traps! { @ landlock, Landlock, [$($name),+] }
        traps! { @ oci_crun, Crun, [$($name),+] }

        mod oci_runsc {
            use super::*;

            #[tokio::test]
            async fn every_trap_is_none_on_a_kernel_without_openat2() {
                let place = Place::of(By::Runsc, limits()).await;
                $(
                    // Said before, so that whoever reads of a failure knows which it was.
                    eprintln!("{}", stringify!($name));
                    let began = Instant::now();
                    super::$name(&place).await;
                    eprintln!("{:?}", began.elapsed());
                    if place.sandbox.is_alive().await {
                        place.python(CLEAN).await;
                    }
                )+
                place.end().await;
            }
        }
    };
    (@ $module:ident, $by:ident, [$($name:ident),+]) => {
        mod $module {
            use super::*;

            $(
                #[tokio::test]
                async fn $name() {
                    let place = Place::of(By::$by, limits()).await;
                    super::$name(&place).await;
                    place.end().await;
                }
            )+
        }
    };
}

traps! {
    a1_no_call_leaves_the_root_through_a_link,
    a2_links_on_the_way_and_dangling_ones_lead_where_they_would_lead_a_command,
    a3_a_link_swapped_in_a_loop_never_leads_out,
    a4_odd_paths_are_refused_or_taken_exactly,
    a5_what_is_no_file_is_neither_read_nor_written_nor_waited_for,
    a6_an_archive_stays_where_it_is_unpacked_and_within_the_quota,
    a7_a_recursive_removal_never_follows_a_link,
    a8_what_is_written_is_the_sandboxes_users_and_never_set_uid,
    // The last: it ends the sandbox.
    a9_a_suspended_or_ended_sandbox_refuses_and_does_not_hang,
}

/// Ends what a case left running and removes what it left lying, for the next.
const CLEAN: &str = r#"
import os, shutil
for name in os.listdir("/workspace"):
    path = "/workspace/" + name
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
"#;

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

async fn a1_no_call_leaves_the_root_through_a_link(place: &Place) {
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
    let link = place.at("/workspace/trap");
    let way = place.at("/workspace/way/secret");
    for trap in &traps {
        place
            .sh(&format!(
                "ln -sfn '{trap}' /workspace/trap; ln -sfn \"$(dirname '{trap}')\" /workspace/way"
            ))
            .await;
        for path in [&link, &way, &PathBuf::from(trap)] {
            let refused = |what: &str, result: Result<(), SandboxError>| {
                assert!(result.is_err(), "{what} {} by {trap}", path.display());
            };
            let read = files.read(path, 0, None);
            refused("read", promptly(read).await.map(drop));
            for mode in [WriteMode::Append, WriteMode::InPlace, WriteMode::Replace] {
                // Writing may make a new file of that name inside; it must not be the host's.
                let data = source(b"x".to_vec());
                drop(promptly(files.write(path, how(mode), data)).await);
            }
            secret.assert_untouched();
            refused("list", promptly(place.list(&format!("/proc/self/root{dir}"))).await.map(drop));
            drop(promptly(files.remove(&way, true)).await);
            let away = place.at("/workspace/stolen");
            drop(promptly(files.rename(&way, &away, RenameOptions::default())).await);
            drop(promptly(files.make_directory(&path.join("d"), None, true)).await);
            let packed = promptly(files.export_tar(path)).await;
            if let Ok(packed) = packed {
                let bytes = collect(packed.data).await.unwrap_or_default();
                assert!(!bytes.windows(SECRET.len()).any(|part| part == SECRET), "{trap}");
            }
            secret.assert_untouched();
        }
        let made = if place.by == By::Landlock { "" } else { "/tmp/.[!.]* /tmp/*" };
        place.sh(&format!("rm -rf /workspace/stolen {made}")).await;
    }
    for path in ["/proc/self/root", "/proc/1/root/etc/passwd", "/proc/self/fd/0", "/proc/self/exe"]
    {
        let kind = fault(promptly(place.get(path)).await);
        let refused = [FileFault::Loop, FileFault::NotFound, FileFault::Denied];
        assert!(refused.contains(&kind), "{path}: {kind:?}");
    }
    for path in ["/usr/warren-test", "/etc/warren-test"] {
        let kind = fault(promptly(place.put(path, b"x")).await);
        assert!(matches!(kind, FileFault::ReadOnly | FileFault::Denied), "{path}: {kind:?}");
    }
    // Where it has no root of its own, that something is there and how large it is can be asked (SECURITY.md, the
    // `process` level), and no more than that.
    place.sh(&format!("ln -sfn {host} /workspace/trap")).await;
    let told = promptly(files.stat(&secret.path)).await.map(|entry| entry.size);
    let through = promptly(files.stat(&link)).await.unwrap();
    let kinds =
        [promptly(place.get(&secret.path)).await, promptly(place.get("/workspace/trap")).await];
    let kinds = kinds.map(fault);
    if place.by == By::Landlock {
        assert_eq!((told.unwrap(), kinds), (SECRET.len() as u64, [FileFault::Denied; 2]));
        assert_eq!(through.resolved.map(|(path, ..)| path), Some(secret.path.clone()));
    } else {
        assert_eq!((fault(told), kinds), (FileFault::NotFound, [FileFault::NotFound; 2]));
        assert_eq!(through.resolved, None);
    }
    secret.assert_untouched();
}

async fn a2_links_on_the_way_and_dangling_ones_lead_where_they_would_lead_a_command(place: &Place) {
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
    // Written into, and made, where a link to nowhere leads.
    for mode in [WriteMode::Append, WriteMode::InPlace] {
        place.sh("cd /workspace; rm real/made").await;
        place.put_as("/workspace/dangling", b"4", how(mode)).await.unwrap();
        assert_eq!(place.sh("cat /workspace/real/made").await, "4", "{mode:?}");
        let lost = place.put_as("/workspace/lost", b"x", how(mode)).await;
        assert_eq!(fault(lost), FileFault::NotFound, "{mode:?}");
    }
}

/// Swaps, as fast as it can, until it is told to stop: `f` is a file, then a link of the kernel's, `d` a directory, then
/// such a link, and `g` a file, then a plain link to a file of the host. The kernel's lead to what a command may read, so
/// that whoever follows one is seen to.
const SWAPS: &str = r#"
import os
os.chdir("/workspace")
beyond = "/proc/self/root/workspace/beyond"
os.mkdir("d")
os.mkdir("beyond")
for name in "plain", "d/secret", "beyond/secret", "beyond/far":
    text = "beyond" if name.startswith("beyond") else "inside"
    with open(name, "w") as file:
        file.write(text)
os.symlink(beyond, "e")
swaps = 0
open("started", "w").close()
while not os.path.exists("stop"):
    for _ in range(16):
        for name, target in ("f", beyond + "/secret"), ("g", "SECRET"):
            os.symlink(target, "t")
            os.rename("t", name)
        os.rename("d", "x")
        os.rename("e", "d")
        for name in "f", "g":
            os.link("plain", "t")
            os.rename("t", name)
        os.rename("d", "e")
        os.rename("x", "d")
        swaps += 1
with open("swaps.new", "w") as file:
    file.write(str(swaps))
os.rename("swaps.new", "swaps")
"#;

/// Reads what is being swapped as one would who thinks that a path means the same twice: it looks whether there is a link,
/// and opens what is none.
const NAIVE: &str = r#"
import os, time
os.chdir("/workspace")
inside = beyond = caught = 0
end = time.monotonic() + 15
while time.monotonic() < end and min(inside, beyond, 10 * caught) < 50:
    for path in "f", "d/secret":
        plain = not os.path.islink(path) and not os.path.islink("d")
        os.sched_yield()
        try:
            with open(path) as file:
                text = file.read()
        except OSError:
            continue
        inside += text == "inside"
        beyond += text == "beyond"
        caught += plain and text == "beyond"
print(inside, beyond, caught)
"#;

/// Starts a script that goes on until there is a file `stop`.
async fn start(place: &Place, script: &str) {
    place.put("/workspace/swaps.py", place.at(script).as_os_str().as_bytes()).await.unwrap();
    place.sh("cd /workspace; python3 swaps.py > said 2>&1 &").await;
    let waits = "cd /workspace; until [ -e started ]; do sleep 0.01; done; echo started";
    assert_eq!(promptly(place.sh(waits)).await, "started");
}

/// Stops it, and returns how often it swapped.
async fn stop(place: &Place) -> u64 {
    place.put("/workspace/stop", b"").await.unwrap();
    let waits =
        "cd /workspace; until [ -e swaps ] || [ -s said ]; do sleep 0.01; done; cat said swaps";
    let said = promptly(place.sh(waits)).await;
    said.parse().unwrap_or_else(|_| panic!("control: it went on to the end: {said}"))
}

/// Lists the entries of an archive that have what is beyond in them, under another name than its own.
fn far(archive: &[u8]) -> Vec<String> {
    let mut reader = warren::archive::Reader::new(archive);
    let mut found = Vec::new();
    while let Ok(Some(header)) = reader.next_entry() {
        let mut text = String::new();
        let read = std::io::Read::read_to_string(&mut reader, &mut text);
        let path = String::from_utf8_lossy(&header.path).into_owned();
        if read.is_ok() && text == "beyond" && !path.starts_with("beyond/") {
            found.push(path);
        }
    }
    found
}

/// How long a race goes on at the least, and at the most if it was not met from both sides yet.
const RACE: Duration = Duration::from_secs(1);
const AT_MOST: Duration = Duration::from_secs(30);
/// How often each side has to be met before it was a race.
const OFTEN: u32 = 20;

fn goes_on(began: Instant, sides: [u32; 2]) -> bool {
    let met = sides.iter().all(|side| *side >= OFTEN);
    began.elapsed() < if met { RACE } else { AT_MOST }
}

async fn a3_a_link_swapped_in_a_loop_never_leads_out(place: &Place) {
    let secret = Secret::new();
    start(place, &SWAPS.replace("SECRET", secret.path.to_str().unwrap())).await;
    let naive = place.python(NAIVE).await;
    let counts: Vec<u32> = naive.split(' ').filter_map(|count| count.parse().ok()).collect();
    let [inside, beyond, caught] = counts[..] else { panic!("control: {naive}") };
    assert!(inside >= OFTEN && beyond >= OFTEN, "control: an open of the path is led: {naive}");
    assert!(caught > 0, "control: so is one who looked before: {naive}");
    let (began, files) = (Instant::now(), place.files());
    let paths = ["/workspace/f", "/workspace/d/secret", "/workspace/g"];
    let (mut inside, mut refused, mut tries) = (0, 0, 0);
    while goes_on(began, [inside, refused]) {
        for path in paths {
            match promptly(place.get(path)).await {
                Ok(bytes) => {
                    assert_eq!(String::from_utf8_lossy(&bytes), "inside", "{path}");
                    inside += 1;
                }
                Err(error) => {
                    let kind = fault::<()>(Err(error));
                    // Gone for a moment; or, `g`, where the host is out of sight, or out of reach.
                    let missed = matches!(kind, FileFault::NotFound | FileFault::Denied)
                        // Looked at by its name, and then by its name again, which is no directory any more.
                        || kind == FileFault::NotDirectory && place.by == By::Runsc;
                    assert!(missed || kind == FileFault::Loop, "{path}: {kind:?}");
                    refused += u32::from(kind == FileFault::Loop);
                }
            }
            if let Ok(entry) = promptly(files.stat(&place.at(path))).await {
                let end = entry.resolved.map(|(path, ..)| path).unwrap_or_default();
                assert!(!end.starts_with(place.at("/workspace/beyond")), "{}", end.display());
            }
            tries += 1;
        }
        if tries % 4 == 0 {
            for mode in [WriteMode::Replace, WriteMode::InPlace] {
                for path in paths {
                    drop(promptly(place.put_as(path, b"inside", how(mode))).await);
                }
            }
        }
        if let Ok(listed) = promptly(place.list("/workspace/d")).await {
            assert!(!listed.iter().any(|entry| entry.path == Path::new("far")), "{listed:?}");
        }
        for path in ["/workspace/d", "/workspace"] {
            if let Ok(packed) = promptly(files.export_tar(&place.at(path))).await {
                let far = far(&collect(packed.data).await.unwrap_or_default());
                assert_eq!(far, [""; 0], "{path} has only its own");
            }
        }
    }
    let swaps = stop(place).await;
    assert_eq!(place.get("/workspace/beyond/secret").await.unwrap(), b"beyond", "never written");
    secret.assert_untouched();
    eprintln!(
        "naive: {naive}; {tries} tries met {inside} inside and {refused} links, {swaps} swaps"
    );
    assert!(inside >= OFTEN && refused >= OFTEN, "control: {tries}: {inside} {refused}");
    assert!(swaps >= u64::from(OFTEN), "control: {swaps} swaps");
}

async fn a4_odd_paths_are_refused_or_taken_exactly(place: &Place) {
    place.put("/workspace/x", b"1").await.unwrap();
    for path in [
        "//workspace///x",
        "/workspace/./x",
        "/workspace/../../../../../../workspace/x",
        "/../workspace/x",
    ] {
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
            assert!(promptly(place.files().remove(&place.at(path), true)).await.is_err());
        }
    }
    assert_eq!(fault(place.put("/workspace/..", b"2").await), FileFault::Denied);
    place.put(format!("/workspace/{}", "n".repeat(255)), b"3").await.unwrap();
    assert_eq!(place.get("/workspace/x").await.unwrap(), b"1");
}

async fn a5_what_is_no_file_is_neither_read_nor_written_nor_waited_for(place: &Place) {
    place
        .sh("cd /workspace; mkfifo fifo; ln -s fifo link; mkdir dir; \
              python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")' 2>/dev/null; \
              (sleep 60 < fifo) >/dev/null 2>&1 &")
        .await;
    for (path, kind) in [
        ("/workspace/fifo", FileFault::Special),
        ("/workspace/link", FileFault::Special),
        // Where there are no sockets there is none in the way.
        ("/workspace/sock", FileFault::Special),
        ("/dev/zero", FileFault::Special),
        ("/dev/tty", FileFault::Special),
        ("/dev/ptmx", FileFault::Special),
        ("/workspace/dir", FileFault::IsDirectory),
    ] {
        if path.ends_with("sock") && place.by == By::Landlock {
            assert_eq!(fault(promptly(place.get(path)).await), FileFault::NotFound);
            continue;
        }
        assert_eq!(fault(promptly(place.get(path)).await), kind, "{path}");
        for mode in [WriteMode::Replace, WriteMode::Append, WriteMode::InPlace] {
            let result = promptly(place.put_as(path, b"x", how(mode))).await;
            assert_eq!(fault(result), kind, "{path} {mode:?}");
        }
    }
    for path in ["/proc/kmsg", "/proc/self/mem"] {
        assert!(promptly(place.get(path)).await.is_err(), "{path}");
    }
    // gVisor shows everybody what it knows of init; that has no environment there.
    match (place.by, promptly(place.get("/proc/1/environ")).await) {
        (By::Runsc, read) => assert_eq!(read.unwrap(), b""),
        (By::Linux | By::Landlock | By::Crun, read) => assert!(read.is_err()),
    }
    let stat = place.files().stat(&place.at("/workspace/fifo")).await.unwrap();
    assert_eq!(stat.kind, FileKind::Fifo, "control: they are there");
}

async fn a6_an_archive_stays_where_it_is_unpacked_and_within_the_quota(place: &Place) {
    place.sh("cd /workspace; mkdir in; echo safe > victim").await;
    // A command of a plain user's can change no mode without a root of its own.
    let shut = place.at("/workspace/shut");
    place.files().make_directory(&shut, Some(0o700), false).await.unwrap();
    let into = &place.at("/workspace/in");
    let file = |name: &str| [tar_header(name, b'0', "", 3), b"bad".to_vec(), vec![0; 509]].concat();
    let link = |name: &str, to: &str| tar_header(name, b'2', to, 0);
    let fine = place.files().import_tar(into, false, source(file("fine"))).await.unwrap();
    assert_eq!((fine.entries, fine.bytes), (1, 3), "control");
    let workspace = place.at("/workspace").display().to_string();
    for (name, archive) in [
        ("dots", file("../victim")),
        ("absolute", file(&format!("{workspace}/victim"))),
        ("link, then through it", [link("l", ".."), file("l/victim")].concat()),
        ("absolute link", [link("m", &workspace), file("m/victim")].concat()),
        (
            "root of a process",
            [link("r", "/proc/self/root"), file(&format!("r{workspace}/victim"))].concat(),
        ),
        ("hard link out", [tar_header("h", b'1', "../victim", 0), file("h")].concat()),
        ("link, then a directory", [link("n", "../shut"), tar_header("n/", b'5', "", 0)].concat()),
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
    let (user, _) = ids(place).await;
    let shut = format!("700 {user}");
    assert_eq!(
        told(place, "/workspace/shut").await,
        shut,
        "as it was, whoever was made a link to it"
    );
    assert_eq!(told(place, "/workspace/in/fine").await, format!("777 {user}"), "no set-uid (A8)");
    // A bomb: a file that goes on and on.
    let head = stream::once(async { Ok(tar_header("bomb", b'0', "", (1 << 33) - 1)) });
    let bomb = head.chain(stream::repeat_with(|| Ok(vec![0; 1 << 20])).take(128));
    let result = place.files().import_tar(into, false, Box::pin(bomb)).await;
    assert_eq!(fault(result), FileFault::NoSpace);
    assert_eq!(fault(place.get("/workspace/in/bomb").await), FileFault::NotFound, "none of it");
    // More entries than there are inodes; on the host's own disk nobody counts them (SECURITY.md, the `process` level).
    let mut number = 0;
    let many = stream::repeat_with(move || {
        number += 100;
        let names = (0..100).map(|index| tar_header(&format!("e/{}", number + index), b'0', "", 0));
        Ok(names.flatten().collect())
    });
    if place.by == By::Landlock {
        let end = stream::once(async { Ok(vec![0; 1024]) });
        let many = Box::pin(many.take(50).chain(end));
        assert_eq!(place.files().import_tar(into, false, many).await.unwrap().entries, 5_000);
    } else {
        let result = place.files().import_tar(into, false, Box::pin(many)).await;
        assert_eq!(fault(result), FileFault::NoSpace);
    }
    let gone = place.files().remove(into, true).await.unwrap();
    assert!(gone > 1000, "{gone}");
    place.put("/workspace/again", b"there is room again").await.unwrap();
}

/// Has `t/x` be a directory with a file, then a link to `keep`, until it is told to stop.
const TURNS: &str = r#"
import os, shutil, time
os.chdir("/workspace")
os.mkdir("keep")
open("keep/kept", "w").close()
def done(work, *names):
    try:
        work(*names)
    except OSError:
        return 0
    return 1
def stand(since):
    # For as long as it took so far, so that neither is there for a moment alone.
    now = time.monotonic()
    while time.monotonic() < now + (now - since):
        os.path.islink("t/x")
def touch(name):
    os.close(os.open(name, os.O_CREAT))
swaps = 0
open("started", "w").close()
while not os.path.exists("stop"):
    for _ in range(16):
        begun = time.monotonic()
        done(os.makedirs, "t/y/z")
        done(touch, "t/y/f")
        done(os.rename, "t/y", "t/x")
        stand(begun)
        moved = done(os.rename, "t/x", "t/v")
        done(os.symlink, "/workspace/keep", "t/l")
        swaps += done(os.rename, "t/l", "t/x") and moved
        stand(begun)
        done(os.unlink, "t/x")
        shutil.rmtree("t/v", True)
with open("swaps.new", "w") as file:
    file.write(str(swaps))
os.rename("swaps.new", "swaps")
"#;

/// Looks whether `t/x` is a directory and no link, and lists it to remove what is in it.
const NAIVE_REMOVAL: &str = r#"
import os, time
os.chdir("/workspace")
own = caught = 0
end = time.monotonic() + 15
while time.monotonic() < end and min(own, 10 * caught) < 50:
    if os.path.islink("t/x") or not os.path.isdir("t/x"):
        continue
    os.sched_yield()
    try:
        names = os.listdir("t/x")
    except OSError:
        continue
    own += "f" in names
    caught += "kept" in names
print(own, caught)
"#;

async fn a7_a_recursive_removal_never_follows_a_link(place: &Place) {
    start(place, TURNS).await;
    let naive = place.python(NAIVE_REMOVAL).await;
    let counts: Vec<u32> = naive.split(' ').filter_map(|count| count.parse().ok()).collect();
    let [own, caught] = counts[..] else { panic!("control: {naive}") };
    assert!(own >= OFTEN && caught > 0, "control: one who looked before is led away: {naive}");
    let began = Instant::now();
    let (mut trees, mut links, mut tries) = (0, 0, 0);
    while goes_on(began, [trees, links]) {
        for path in ["/workspace/t/x", "/workspace/t/x", "/workspace/t"] {
            let removed = promptly(place.files().remove(&place.at(path), true)).await;
            // A link is one, and a directory that was there is more than itself.
            trees += u32::from(removed.as_ref().is_ok_and(|entries| *entries > 1));
            links += u32::from(path.ends_with('x') && matches!(removed, Ok(1)));
            tries += 1;
        }
    }
    let swaps = stop(place).await;
    assert_eq!(place.get("/workspace/keep/kept").await.unwrap(), b"", "it is there");
    eprintln!("naive: {naive}; {tries} tries: {trees} trees and {links} links, {swaps} swaps");
    assert!(trees >= OFTEN && links >= OFTEN, "control: {tries}: {trees} {links}");
    assert!(swaps >= u64::from(OFTEN), "control: {swaps} swaps");
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

/// Returns whose commands are: the sandbox's user and group.
async fn ids(place: &Place) -> (u32, u32) {
    let said = place.sh("id -u; id -g").await;
    let ids: Vec<u32> = said.lines().map(|id| id.parse().unwrap()).collect();
    let own = rustix::process::geteuid().as_raw();
    match place.by {
        // A range of its own, or whoever calls.
        By::Landlock => assert!(ids[0] != 0 && (own == 0) == (ids[0] != own), "{ids:?}"),
        By::Linux | By::Crun | By::Runsc => assert_eq!(ids, [1000, 1000]),
    }
    (ids[0], ids[1])
}

/// Says which mode a file has, and whose it is, as a command sees it.
async fn told(place: &Place, path: &str) -> String {
    let script =
        "import os, sys; s = os.stat(sys.argv[1]); print(\"%o\" % (s.st_mode & 0o7777), s.st_uid)";
    place.sh(&format!("python3 -c '{script}' {path}")).await
}

async fn a8_what_is_written_is_the_sandboxes_users_and_never_set_uid(place: &Place) {
    let (user, group) = ids(place).await;
    for how in [WriteMode::Replace, WriteMode::New, WriteMode::Append, WriteMode::InPlace] {
        let path = format!("/workspace/{how:?}");
        let options = WriteOptions { how, mode: Some(0o6755), parents: false };
        let entry = place.put_as(&path, b"x", options).await.unwrap();
        assert_eq!((entry.mode, entry.uid, entry.gid), (0o755, user, group), "{how:?}");
        assert_eq!(told(place, &path).await, format!("755 {user}"));
    }
    let made =
        place.files().make_directory(&place.at("/workspace/d"), Some(0o7777), false).await.unwrap();
    assert_eq!(made.mode, 0o1777);
    // What was set-uid before is not after.
    let refused = "import os\ntry: os.chmod(\"/workspace/New\", 0o4755)\nexcept PermissionError: print(\"refused\")";
    assert_eq!(place.python(refused).await, "refused");
}

async fn a9_a_suspended_or_ended_sandbox_refuses_and_does_not_hang(place: &Place) {
    let workspace = &place.at("/workspace");
    let (path, other) = (&workspace.join("f"), &workspace.join("g"));
    place.put("/workspace/f", b"old").await.unwrap();
    let waiting = stream::once(async { Ok(vec![1; 10]) }).chain(stream::pending());
    let upload = place.files().write(path, WriteOptions::default(), Box::pin(waiting));
    let suspend = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        place.sandbox.suspend().await.unwrap();
    };
    let (upload, ()) = promptly(async { tokio::join!(upload, suspend) }).await;
    assert!(matches!(upload, Err(SandboxError::Suspended { .. })), "{upload:?}");
    let files = place.files();
    let calls = async || {
        [
            files.stat(path).await.map(drop),
            files.list(workspace, Default::default()).await.map(drop),
            files.read(path, 0, None).await.map(drop),
            files.write(path, how(WriteMode::Replace), source(b"new".to_vec())).await.map(drop),
            files.make_directory(path, None, true).await.map(drop),
            files.rename(path, other, Default::default()).await.map(drop),
            files.remove(path, false).await.map(drop),
            files.watch(workspace, true).await.map(drop),
            files.import_tar(path, true, source(Vec::new())).await.map(drop),
            files.export_tar(path).await.map(drop),
        ]
    };
    for result in promptly(calls()).await {
        assert!(matches!(result, Err(SandboxError::Suspended { .. })), "{result:?}");
    }
    place.sandbox.resume().await.unwrap();
    assert_eq!(promptly(place.get("/workspace/f")).await.unwrap(), b"old");
    promptly(async {
        while place.list("/workspace").await.unwrap().len() > 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let mut watch = files.watch(workspace, true).await.unwrap();
    place.sandbox.destroy().await.unwrap();
    let last = promptly(watch.next()).await;
    assert!(matches!(last, Some(Err(SandboxError::Ended { .. }))), "{last:?}");
    for result in promptly(calls()).await {
        assert!(matches!(result, Err(SandboxError::Ended { .. })), "{result:?}");
    }
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
