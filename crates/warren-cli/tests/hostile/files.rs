//! 4.1: the file system and its set-up.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::RenameFlags;

use crate::host::{Feature, Host, Who, require};

hostile! {
    a_sandbox_cannot_read_a_root_only_host_file,
    a_sandbox_cannot_see_world_readable_host_files,
    a_sandbox_cannot_change_host_files,
    a_sandbox_cannot_change_what_it_was_given_read_only,
    the_hosts_password_hashes_are_not_in_the_sandbox,
    dots_do_not_lead_above_the_root,
    chroot_does_not_lead_above_the_root,
    the_root_and_cwd_links_of_proc_stay_inside,
    a_file_handle_does_not_open_the_hosts_root,
    a_link_or_rename_does_not_cross_into_a_shared_mount,
    a_directory_moved_out_of_a_bind_does_not_lead_above_it,
    a_link_left_in_a_bind_is_not_followed_by_the_next_sandbox,
    a_link_swapped_in_during_the_start_is_never_followed,
    the_host_is_not_named_inside,
}

mod by_init {
    use super::*;
    hostile_by_init! {
        an_archive_unpacks_inside_or_not_at_all,
        a_bound_file_that_is_none_blocks_nobody,
    }
}

hostile_by_gvisor! {
    a_sandbox_cannot_read_a_root_only_host_file,
    a_sandbox_cannot_see_world_readable_host_files,
    a_sandbox_cannot_change_host_files,
    a_sandbox_cannot_change_what_it_was_given_read_only,
    the_hosts_password_hashes_are_not_in_the_sandbox,
    dots_do_not_lead_above_the_root,
    chroot_does_not_lead_above_the_root,
    the_root_and_cwd_links_of_proc_stay_inside,
    a_file_handle_does_not_open_the_hosts_root,
    a_link_or_rename_does_not_cross_into_a_shared_mount,
    a_directory_moved_out_of_a_bind_does_not_lead_above_it,
    a_link_left_in_a_bind_is_not_followed_by_the_next_sandbox,
    a_link_swapped_in_during_the_start_is_never_followed,
    the_host_is_not_named_inside,
    an_archive_unpacks_inside_or_not_at_all,
    a_bound_file_that_is_none_blocks_nobody,
    links_planted_where_set_up_walks_are_refused_and_change_nothing,
    marks_of_the_overlay_cannot_be_forged,
}

mod roots {
    use super::*;
    hostile_in_namespaces! {
        links_planted_where_set_up_walks_are_refused_and_change_nothing,
        marks_of_the_overlay_cannot_be_forged,
    }
}

// What is bound belongs to `user`; root inside cannot even write there, so those cases have no control.
hostile_as_root_inside! {
    a_sandbox_cannot_read_a_root_only_host_file,
    a_sandbox_cannot_see_world_readable_host_files,
    a_sandbox_cannot_change_what_it_was_given_read_only,
    the_hosts_password_hashes_are_not_in_the_sandbox,
    dots_do_not_lead_above_the_root,
    chroot_does_not_lead_above_the_root,
    the_root_and_cwd_links_of_proc_stay_inside,
    a_file_handle_does_not_open_the_hosts_root,
    a_directory_moved_out_of_a_bind_does_not_lead_above_it,
    a_link_swapped_in_during_the_start_is_never_followed,
    marks_of_the_overlay_cannot_be_forged,
    an_archive_unpacks_inside_or_not_at_all,
    the_host_is_not_named_inside,
}

const ABSENT: &[&str] = &["ENOENT", "EACCES", "ENOTDIR"];
const REFUSED: &[&str] = &["ENOENT", "EACCES", "EPERM", "EROFS", "ENOTDIR"];

// F1: a root of its own: what was not bound is not there
fn a_sandbox_cannot_read_a_root_only_host_file(host: &Host) {
    let secret = host.file("secret", 0o600, "s3cret");
    let read = [format!("read {secret}")];
    host.bare_root().allows(&read);
    host.sandbox().refuses(&read, ABSENT);
    // A grant opens the path to a reader who may read the file, and gives nobody rights over it.
    host.give(Path::new(&secret));
    if host.who() == Who::Nobody {
        let shown = host.sandbox().with(&format!("--ro {secret}")).ask(&read[0]);
        assert_eq!(shown.field("text"), "s3cret", "control: the probe reads what it is given");
    }
}

// F2: a root of its own
fn a_sandbox_cannot_see_world_readable_host_files(host: &Host) {
    let secret = host.file("public", 0o644, "s3cret");
    let tag = host.path("").file_name().unwrap().to_str().unwrap().to_owned();
    // One in each directory that belongs to the host's own users and services.
    let spread: Vec<_> =
        ["/tmp", "/home", "/opt", "/srv", "/run", "/var/lib", "/mnt", "/media", "/root"]
            .map(|dir| format!("{dir}/{tag}"))
            .into_iter()
            .filter(|path| fs::write(path, "s3cret").is_ok())
            .collect();
    assert!(spread.len() >= 7, "control: the host has these directories: {spread:?}");
    let reads: Vec<_> = spread.iter().chain([&secret]).map(|p| format!("read {p}")).collect();
    let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        host.bare_root().allows(&reads);
        host.sandbox().refuses(&reads, ABSENT);
        host.sandbox().with("--profile permissive").refuses(&reads, ABSENT);
    }));
    spread.iter().for_each(|path| fs::remove_file(path).unwrap());
    tried.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let shown = host.sandbox().with(&format!("--ro {secret}")).ask(&format!("read {secret}"));
    assert_eq!(shown.field("text"), "s3cret", "control: the probe reads what it is given");
}

/// Everything that changes a file, each in another way.
fn changes(path: &str) -> Vec<String> {
    ["append", "rewrite", "truncate", "chmod", "chown", "setxattr", "unlink"]
        .map(|change| format!("{change} {path}"))
        .to_vec()
}

fn state_of(path: &str) -> (Vec<u8>, u32, u32, u32) {
    let meta = fs::metadata(path).unwrap();
    (fs::read(path).unwrap(), meta.permissions().mode(), meta.uid(), meta.gid())
}

/// Where a directory can be written to. A kernel of its own makes no file in one that is the host's: docs/design/oci.md.
fn granted<'h>(host: &'h Host, dir: &str) -> crate::host::Place<'h> {
    match host.has_own_kernel() {
        true => host.bare_root(),
        false => host.sandbox().with(&format!("--rw {dir}")),
    }
}

// F3: a root of its own; ids of its own
fn a_sandbox_cannot_change_host_files(host: &Host) {
    let file = host.file("file", 0o666, "host bytes");
    let dir = host.open_dir("dir");
    let before = state_of(&file);
    let mut attempts = changes(&file);
    attempts.push(format!("put {dir}/new x"));
    attempts.push("put /etc/warren-hostile x".to_owned());
    attempts.push("put /usr/bin/warren-hostile x".to_owned());
    attempts.push("append /usr/bin/env".to_owned());
    attempts.push("rename /usr/bin/env /tmp/env".to_owned());
    let tool = state_of("/usr/bin/env");
    // The sandbox may own a private /etc or a private copy of the path; the host is what counts.
    host.sandbox().ask_all(&attempts);
    assert_eq!(state_of(&file), before, "the host's file is as it was");
    assert_eq!(state_of("/usr/bin/env"), tool, "the host's tools are as they were");
    for path in [&format!("{dir}/new"), "/etc/warren-hostile", "/usr/bin/warren-hostile"] {
        assert!(!Path::new(path).exists(), "{path} came to the host");
    }
    // Control: with a grant the same attempts do reach the host.
    let granted = granted(host, &dir);
    granted.allows(&[format!("put {dir}/new x")]);
    assert_eq!(fs::read(format!("{dir}/new")).unwrap(), b"x", "control: a grant reaches the host");
}

// F4: read-only mounts
fn a_sandbox_cannot_change_what_it_was_given_read_only(host: &Host) {
    let dir = host.open_dir("given");
    let file = host.file("given/file", 0o666, "host bytes");
    host.give(Path::new(&file));
    let (before, program) = (state_of(&file), state_of(&host.at("probe")));
    let mut attempts = changes(&file);
    attempts.extend(changes(&host.at("probe")));
    attempts.extend([format!("put {dir}/new x"), format!("rename {file} {dir}/other")]);
    attempts.push(format!("remount-rw {dir}"));
    attempts.push("write /proc/self/exe".to_owned());
    let refused =
        [REFUSED, &["ETXTBSY", "EBUSY", "EXDEV", "EINVAL", "ENOSYS", "EOPNOTSUPP"]].concat();
    host.sandbox().with(&format!("--ro {dir}")).refuses(&attempts, &refused);
    if host.has_namespaces() {
        let bound = host.sandbox().with(&format!("--bind {dir}:/given:ro"));
        bound.refuses(&changes("/given/file"), &refused);
    }
    assert_eq!(state_of(&file), before);
    assert_eq!(state_of(&host.at("probe")), program, "the delivered program is as it was");
    let granted = granted(host, &dir);
    granted.allows(&[format!("append {file}")]);
    assert_ne!(state_of(&file), before, "control: the same attempt on a writable mount");
}

// F5: an /etc of its own
fn the_hosts_password_hashes_are_not_in_the_sandbox(host: &Host) {
    let control = host.bare_root().ask("read /etc/shadow");
    assert!(control.field("text").starts_with("root:"), "control: the host has them: {control:?}");
    let files = ["/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/sudoers", "/etc/machine-id"];
    let reads: Vec<_> = files.iter().map(|f| format!("read {f}")).collect();
    for (file, answer) in files.iter().zip(host.sandbox().ask_all(&reads)) {
        let own = fs::read_to_string(file).unwrap_or_default();
        let same =
            answer.result == "OK" && own.lines().next().is_some_and(|l| answer.detail.contains(l));
        assert!(!same, "{file} of the host is inside: {answer:?}");
    }
}

// F6: pivot_root, the old root detached
fn dots_do_not_lead_above_the_root(host: &Host) {
    let secret = host.file("secret", 0o644, "s3cret");
    let climb = format!("walk-up {secret}");
    host.bare().allows(&[&climb]);
    host.sandbox().refuses(&[&climb], ABSENT);
    // Where there is no root of its own a command starts in its own directory, or not at all.
    let dirs: &[_] =
        if host.has_namespaces() { &["/", "/tmp", "/usr/bin", "/home/user"] } else { &[] };
    for dir in dirs {
        host.sandbox().with(&format!("--workdir {dir}")).refuses(&[&climb], ABSENT);
    }
    host.sandbox().allows(&["walk-up /etc/passwd"]);
}

// F7: seccomp; no capability
fn chroot_does_not_lead_above_the_root(host: &Host) {
    let secret = host.file("secret", 0o644, "s3cret");
    let cage = host.open_dir("cage");
    fs::copy(host.path("probe"), host.path("cage/probe")).unwrap();
    let control =
        host.bare_root().around(["chroot", &cage]).run(&["/probe", "chroot-out", "/x", &secret]);
    assert!(control.text().contains("s3cret"), "control: it does break out of a bare chroot");
    let tries =
        ["/tmp/x", "/workspace/x", "/dev/shm/x"].map(|d| format!("chroot-out {d} {secret}"));
    host.sandbox().refuses(&tries, REFUSED);
}

// F8: pid namespace, hidepid
fn the_root_and_cwd_links_of_proc_stay_inside(host: &Host) {
    let secret = host.file("secret", 0o644, "s3cret");
    let links = [
        "self/root",
        "1/root",
        "self/cwd",
        "1/cwd",
        "self/task/1/root",
        "thread-self/root",
        "2/root",
    ];
    let tries: Vec<_> = links.iter().map(|l| format!("read /proc/{l}{secret}")).collect();
    let relative: Vec<_> = links.iter().map(|l| format!("read /proc/{l}/secret")).collect();
    host.bare_root().allows(&tries[..1]);
    host.bare().cwd(host.path("")).allows(&relative[2..3]);
    host.sandbox().refuses(&tries, REFUSED);
    host.sandbox().cwd(host.path("")).refuses(&relative, REFUSED);
    host.sandbox().allows(&["read /proc/self/root/etc/passwd"]);
}

// F9: seccomp; no capability
fn a_file_handle_does_not_open_the_hosts_root(host: &Host) {
    require(&[Feature::FileHandles]);
    let shared = host.open_dir("shared");
    let mounts = ["/", "/usr", "/workspace", "/tmp", &shared].map(|m| format!("by-handle {m}"));
    host.bare_root().allows(&[&mounts[1], &mounts[4]]);
    // What is not given cannot even be opened to ask for its handle, where that is the host's.
    let refused: &[_] =
        if host.has_namespaces() { &["EPERM"] } else { &["EPERM", "EACCES", "ENOENT"] };
    host.sandbox().with(&format!("--rw {shared}")).refuses(&mounts, refused);
}

// F13: mount namespace
fn a_link_or_rename_does_not_cross_into_a_shared_mount(host: &Host) {
    let shared = host.open_dir("shared");
    host.file("shared/host", 0o666, "host bytes");
    host.give(&host.path("shared/host"));
    let own = host.workspace();
    let tries = [
        format!("put {own}/mine x"),
        format!("link {own}/mine {shared}/link"),
        format!("rename {own}/mine {shared}/moved"),
        format!("link {shared}/host {own}/host"),
        format!("rename {shared}/host {own}/host"),
        format!("link /usr/bin/env {shared}/env"),
    ];
    let sandbox = host.sandbox().with(&format!("--rw {shared}"));
    let answers = sandbox.ask_all(&tries);
    assert_eq!(answers[0].result, "OK");
    for (attempt, answer) in tries.iter().zip(&answers).skip(1) {
        assert!(
            ["EXDEV", "EPERM", "EACCES"].contains(&answer.result.as_str()),
            "{attempt}: {answer:?}"
        );
    }
    let granted = granted(host, &shared);
    granted.allows(&[format!("put {shared}/a x"), format!("link {shared}/a {shared}/b")]);
}

// F13: mount namespace; Landlock
fn a_directory_moved_out_of_a_bind_does_not_lead_above_it(host: &Host) {
    let escape = |name: &str, sandboxed: bool| {
        let inner = host.open_dir(&format!("{name}/inner"));
        host.open_dir(&format!("{name}/outside"));
        host.open_dir(&format!("{name}/inner/a/b"));
        host.file(&format!("{name}/outside/secret"), 0o644, "s3cret");
        let place =
            if sandboxed { host.sandbox().with(&format!("--rw {inner}")) } else { host.bare() };
        let mut command = place.command(&place.probe_line(&[format!("moved-cwd {inner} secret")]));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut out, mut said) = (BufReader::new(child.stdout.take().unwrap()), String::new());
        out.read_line(&mut said).unwrap();
        assert!(said.contains("result=OK"), "control: it sits there: {said}");
        fs::rename(format!("{inner}/a"), host.path(&format!("{name}/outside/a"))).unwrap();
        drop(child.stdin.take());
        said.clear();
        out.read_to_string(&mut said).unwrap();
        assert!(child.wait().unwrap().success() && said.contains("result="), "it tried: {said}");
        said.contains("s3cret")
    };
    assert!(escape("bare", false), "control: on the host the walk leads to the file");
    assert!(!escape("sandboxed", true), "the walk led out of the bind");
}

// F10: set-up by descriptor
fn a_link_left_in_a_bind_is_not_followed_by_the_next_sandbox(host: &Host) {
    let shared = host.open_dir("kept");
    let secret = host.open_dir("elsewhere");
    host.file("elsewhere/secret", 0o666, "s3cret");
    host.give(&host.path("kept"));
    let first = granted(host, &shared);
    let plant = format!("mkdir {shared}/plain && ln -s {secret} {shared}/link");
    assert_eq!(first.run(&["sh", "-c", &plant]).code, Some(0), "control: a link can be planted");
    let bound = |name: &str| match host.has_namespaces() {
        true => host.sandbox().flag(format!("--bind={shared}/{name}:/data")),
        false => host.sandbox().flag(format!("--rw={shared}/{name}")),
    };
    let data = |name: &str| match host.has_namespaces() {
        true => "/data/secret".to_owned(),
        false => format!("{shared}/{name}/secret"),
    };
    assert_eq!(bound("plain").run(&["true"]).code, Some(0), "control: no link, no refusal");
    for name in ["link", "link/."] {
        let ended = bound(name).run(&["cat", &data(name)]);
        assert!(!ended.text().contains("s3cret"), "{name}: {ended:?}");
        ended.assert_clean_error(name);
    }
}

/// The names under which set-up makes or mounts something of its own.
const SET_UP: [&str; 8] = ["resolv.conf", "null", "console", "pts", "proc", "sys", "tmp", "work"];

// F10: every sandbox has a new root, so that what one plants is found by the next in binds alone.
fn links_planted_where_set_up_walks_are_refused_and_change_nothing(host: &Host) {
    let (kept, plain) = (host.open_dir("kept"), host.open_dir("plain"));
    host.file("plain/file", 0o644, "plain");
    let away = host.open_dir("elsewhere");
    let secret = host.file("elsewhere/file", 0o644, "s3cret");
    host.give(&host.path("kept"));
    let owner = |path: &str| fs::symlink_metadata(path).map(|m| (m.uid(), m.gid(), m.mode()));
    let before = (state_of(&secret), owner(&away).unwrap());
    let plant = |script: &str| {
        let place = granted(host, &kept);
        let script = format!("cd {kept} && for n in {}; do {script}; done", SET_UP.join(" "));
        assert_eq!(place.run(&["sh", "-c", &script]).code, Some(0), "control: they can be planted");
    };
    let below = |name: &str| {
        let place =
            host.sandbox().with(&format!("--bind {kept}:/data --bind {plain}:/data/{name}"));
        place.run(&["cat", &format!("/data/{name}/file")])
    };
    plant("mkdir $n");
    for name in SET_UP {
        assert_eq!(below(name).text(), "plain", "control: {name} as a directory");
    }
    plant(&format!("rmdir $n && ln -s {away} $n"));
    for name in SET_UP {
        let ended = below(name);
        ended.assert_clean_error(name);
        assert!(!ended.text().contains("s3cret"), "{name}: {ended:?}");
    }
    // The whole of a planted directory over what set-up furnishes.
    plant(&format!("rm $n && ln -s {secret} $n"));
    for target in ["/etc", "/tmp", "/workspace", "/home/user", "/var/tmp", "/run", "/opt"] {
        let place = host.sandbox().flag(format!("--bind={kept}:{target}"));
        let ended = place.run(&["sh", "-c", &format!("cat {target}/*; echo x > {target}/tmp")]);
        assert!(!ended.text().contains("s3cret"), "{target}: {ended:?}");
        assert!(ended.code.is_some(), "{target}: {ended:?}");
    }
    assert_eq!((state_of(&secret), owner(&away).unwrap()), before, "as it was, and nobody else's");
}

// F11: set-up by descriptor
fn a_link_swapped_in_during_the_start_is_never_followed(host: &Host) {
    let few = if host.is_thorough() { 40 } else { 10 };
    let tries: u32 = std::env::var("WARREN_RACES").map_or(few, |n| n.parse().unwrap());
    let (kept, away) = (host.open_dir("kept"), host.open_dir("elsewhere"));
    host.file("elsewhere/file", 0o644, "s3cret");
    host.open_dir("kept/turning");
    host.file("kept/turning/file", 0o644, "plain");
    std::os::unix::fs::symlink(&away, host.path("kept/trap")).unwrap();
    let dir = fs::File::open(&kept).unwrap();
    let stop = AtomicBool::new(false);
    let (mut followed, mut seen, mut refused) = (0, 0, 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let swap = RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(&dir, "turning", &dir, "trap", swap).unwrap();
                // Long enough for either to be found, short enough to change between two looks.
                thread::sleep(Duration::from_micros(300));
            }
        });
        let tried = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..tries {
                for _ in 0..20 {
                    let naive = fs::read_to_string(host.path("kept/turning/file"));
                    followed += u32::from(naive.is_ok_and(|text| text == "s3cret"));
                }
                let flags = match host.has_namespaces() {
                    true => [
                        format!("--bind {kept}/turning:/data --workdir /data"),
                        format!("--bind {kept}:/data --workdir /data/turning"),
                    ],
                    false => [
                        format!("--rw {kept}/turning --workdir {kept}/turning"),
                        format!("--rw {kept} --workdir {kept}/turning"),
                    ],
                };
                for place in flags.map(|flags| host.sandbox().with(&flags)) {
                    let ended = place.run(&["cat", "file"]);
                    assert!(!ended.text().contains("s3cret"), "it was followed: {ended:?}");
                    match ended.text().as_str() {
                        "plain" => seen += 1,
                        _ => refused += 1,
                    }
                    if ended.code != Some(0) {
                        assert!(!ended.stderr.contains("panicked"), "{ended:?}");
                    }
                }
            }
        }));
        stop.store(true, Ordering::Relaxed);
        tried.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    eprintln!(
        "{seen} starts found the directory, {refused} the link; a naive reader fell for it {followed} times"
    );
    assert!(followed > 0, "control: who follows links does get there");
    assert!(seen > 0 && refused > 0, "control: both were found: {seen}, {refused}");
}

// F12: user namespace
fn marks_of_the_overlay_cannot_be_forged(host: &Host) {
    let layers = host.open_dir("layers");
    // Control: on an upper layer of their own, out of reach of the overlay, the marks do their work.
    let script = format!(
        "set -e; cd {layers}; mount -t tmpfs none .; mkdir lower upper work merged lower/inner upper/outer; \
         echo s3cret > lower/inner/file; \
         {probe} setxattr-as upper/outer trusted.overlay.redirect /inner > /dev/null; \
         mount -t overlay -o redirect_dir=on,lowerdir=lower,upperdir=upper,workdir=work none merged; \
         cat merged/outer/file",
        probe = host.at("probe"),
    );
    let control = host.bare_mounts().run(&["sh", "-c", &script]);
    assert_eq!(
        control.text(),
        "s3cret\n",
        "control: a redirect leads to the lower layer: {control:?}"
    );
    host.bare_root().allows(&[
        format!("setxattr-as {layers} trusted.overlay.opaque y"),
        format!("whiteout {layers}/gone"),
    ]);
    let marks = ["redirect", "opaque", "origin", "metacopy", "impure", "upper", "whiteouts"];
    for profile in host.profiles() {
        let sandbox = host.sandbox().with(&format!("--profile {profile}"));
        let trusted =
            marks.map(|mark| format!("setxattr-as /workspace trusted.overlay.{mark} /etc"));
        sandbox.refuses(&trusted, &["EPERM", "EOPNOTSUPP"]);
        let places = ["/workspace", "/tmp", "/dev/shm", "/home/user", "/var/tmp"];
        sandbox.refuses(&places.map(|dir| format!("whiteout {dir}/gone")), &["EPERM"]);
        // What a user may call an attribute the overlay keeps for the user, and does not heed: what is
        // looked up anew after it was set, under another name, is still the empty directory.
        let mut lines = vec!["mkdir /workspace/a".to_owned(), "mkdir /workspace/a/b".to_owned()];
        lines.extend(
            marks.map(|mark| format!("setxattr-as /workspace/a/b user.overlay.{mark} /etc")),
        );
        lines.push("rename /workspace/a /workspace/c".to_owned());
        let found = lines.len();
        lines.extend(["list /workspace/c/b".to_owned(), "read /workspace/c/b/passwd".to_owned()]);
        let answers = sandbox.ask_all(&lines);
        assert_eq!(answers[found - 1].result, "OK", "control: it is renamed: {answers:?}");
        assert_eq!(answers[found].number("count"), 0, "{profile}: {answers:?}");
        assert_eq!(answers[found + 1].result, "ENOENT", "{profile}: {answers:?}");
    }
}

// F14: a root of its own; quota
fn an_archive_unpacks_inside_or_not_at_all(host: &Host) {
    let (image, escape) = (host.open_dir("image"), host.at("escaped"));
    let secret = host.file("secret", 0o644, "s3cret");
    let given = host.open_dir("given");
    // Four times the quota, and more files than it has room for.
    let (quota, places) = if host.is_thorough() { (4, 2) } else { (2, 1) };
    let (size, files) = (quota * 4, quota * 800);
    let script = format!(
        "set -e; cd {image}; echo out > up; cp {probe} suid; chmod 6755 suid; mknod -m 666 node c 1 11; \
         ln -s {secret} absolute; ln -s ../../../../../../../..{secret} climbing; mkfifo -m 666 fifo; \
         tar -P --transform 's,^up$,../../../../../../../..{escape},' -cf {given}/image.tar *; \
         head -c {size}M /dev/zero > zeros; tar -czf {given}/bomb.tar zeros; \
         many=$(mktemp -d -p /dev/shm); cd $many; seq {files} | xargs touch; tar -cf {given}/many.tar *; rm -r $many",
        probe = host.at("probe"),
    );
    let made = host.bare_root().run(&["sh", "-c", &script]);
    assert_eq!(made.code, Some(0), "control: the archives can be made: {made:?}");
    let unpack = "cd $1; tar -P -xf $2/image.tar; test -e node && echo node; test -u suid && echo suid; \
        cat absolute climbing 2>&1; tar -xf $2/bomb.tar && echo bomb; rm -f zeros; tar -xf $2/many.tar && echo many; true";
    let unpack = |place: crate::host::Place<'_>, to: &str| {
        place.run(&["sh", "-c", unpack, "sh", to, &given]).text()
    };
    let there = host.open_dir("there");
    let control = unpack(host.bare_root(), &there);
    for found in ["node", "suid", "s3cret", "bomb", "many"] {
        assert!(control.contains(found), "control: on the host there is {found}: {control}");
    }
    assert!(Path::new(&escape).exists(), "control: on the host it climbs");
    fs::remove_file(&escape).unwrap();
    for to in ["/workspace", "/tmp"].into_iter().take(places) {
        let place = host.sandbox().with(&format!("--ro {given} --disk {quota}M --timeout 60s"));
        let inside = unpack(place, to);
        for found in ["node\n", "s3cret", "bomb\n", "many\n"] {
            assert!(!inside.contains(found), "{to}: {found} from {inside}");
        }
        assert!(!Path::new(&escape).exists(), "{to}: it climbed out");
    }
    // The image itself, not packed.
    let bound = host.sandbox().with(&format!("--ro {image}"));
    bound.refuses(&[format!("read {image}/node")], REFUSED);
    let links = [format!("read {image}/absolute"), format!("read {image}/climbing")];
    host.bare_root().allows(&links);
    bound.refuses(&links, ABSENT);
}

// F15: set-up by descriptor
fn a_bound_file_that_is_none_blocks_nobody(host: &Host) {
    let script = "set -e; mkfifo -m 666 fifo; mknod -m 666 device c 1 11; truncate -s 1T sparse; chmod 644 sparse";
    let made = host.bare_root().cwd(host.path("")).run(&["sh", "-c", script]);
    assert_eq!(made.code, Some(0), "control: {made:?}");
    let _listener = std::os::unix::net::UnixListener::bind(host.path("socket")).unwrap();
    let fifo = host.at("fifo");
    let patience = if host.is_thorough() { "1" } else { "0.2" };
    let stuck = host.bare_root().run(&["timeout", patience, "cat", &fifo]);
    assert_eq!(stuck.code, Some(124), "control: whoever opens it waits: {stuck:?}");
    for name in ["fifo", "device", "sparse", "socket"] {
        let path = host.at(name);
        let binds = [format!("--ro={path}"), format!("--bind={path}:/opt/it")];
        // Where there are no mounts a path is where it is.
        for bind in binds.into_iter().take(if host.has_namespaces() { 2 } else { 1 }) {
            let ended = host.sandbox().flag(bind).run(&["echo", "here"]);
            assert_eq!(ended.text(), "here\n", "{name}: {ended:?}");
            assert!(ended.took < Duration::from_secs(20), "{name}: {ended:?}");
        }
        // As a directory to start in, or as the program, it is an error and no wait.
        let place = host.sandbox().with(&format!("--ro {path}"));
        place.clone().flag(format!("--workdir={path}")).run(&["true"]).assert_clean_error(name);
        place.run(&[&path]).assert_clean_error(name);
    }
    let reads = ["device", "socket"].map(|name| format!("read {}", host.at(name)));
    let place =
        host.sandbox().with(&format!("--ro {} --ro {}", host.at("device"), host.at("socket")));
    place.refuses(&reads, &["EACCES", "ENXIO", "EPERM"]);
    let time = if host.is_thorough() { "1s" } else { "300ms" };
    let waits = host.sandbox().with(&format!("--ro {fifo} --timeout {time}")).run(&["cat", &fifo]);
    // A kernel of its own opens none of the host's, and nobody waits.
    let expected = if host.has_own_kernel() { 1 } else { 124 };
    assert_eq!(waits.code, Some(expected), "a command that waits is ended in time: {waits:?}");
    let large = format!("cat {} > /tmp/copy", host.at("sparse"));
    let place = host.sandbox().with(&format!("--ro {} --disk 16M", host.at("sparse")));
    assert_ne!(place.run(&["sh", "-c", &large]).code, Some(0), "a terabyte does not fit");
}

// F16: UTS namespace, an /etc of its own
fn the_host_is_not_named_inside(host: &Host) {
    let cwd = host.open_dir("tenant-s3cret");
    let outside = rustix::system::uname();
    let inside = host.sandbox().ask("uname");
    if host.has_namespaces() {
        assert_ne!(inside.field("node"), outside.nodename().to_str().unwrap());
    } else {
        assert_eq!(inside.field("node"), outside.nodename().to_str().unwrap());
        host.not_promised("a name of its own");
    }
    let caller = |place: crate::host::Place<'_>| {
        place
            .cwd(&cwd)
            .env("HOME", &cwd)
            .env("LOGNAME", "tenant-s3cret")
            .ask("find-in-proc tenant-s3cret")
    };
    host.give(Path::new(&cwd));
    assert_eq!(caller(host.bare()).result, "OK", "control: the caller's environment names it");
    host.assert_hidden(&caller(host.sandbox()));
}
