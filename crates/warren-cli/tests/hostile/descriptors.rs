//! 4.2: descriptors, environment and working directory.

use std::fs::{self, File};
use std::path::Path;
use std::process::Stdio;

use crate::host::Host;

hostile! {
    descriptors_of_the_caller_are_closed_inside,
    a_directory_on_standard_input_opens_no_host_file,
    standard_output_does_not_reopen_the_hosts_file,
    no_visible_process_has_a_descriptor_that_reaches_the_host,
    a_command_starts_in_a_directory_of_the_sandbox,
    a_hostile_working_directory_is_refused_or_resolved_inside,
    the_callers_environment_stays_outside,
    no_descriptor_of_the_host_is_passed_in,
}

hostile_by_gvisor! {
    descriptors_of_the_caller_are_closed_inside,
    a_directory_on_standard_input_opens_no_host_file,
    standard_output_does_not_reopen_the_hosts_file,
    no_visible_process_has_a_descriptor_that_reaches_the_host,
    a_command_starts_in_a_directory_of_the_sandbox,
    a_hostile_working_directory_is_refused_or_resolved_inside,
    the_callers_environment_stays_outside,
    no_descriptor_of_the_host_is_passed_in,
}

hostile_as_root_inside! {
    descriptors_of_the_caller_are_closed_inside,
    a_directory_on_standard_input_opens_no_host_file,
    standard_output_does_not_reopen_the_hosts_file,
    no_visible_process_has_a_descriptor_that_reaches_the_host,
    a_command_starts_in_a_directory_of_the_sandbox,
    a_hostile_working_directory_is_refused_or_resolved_inside,
    the_callers_environment_stays_outside,
    no_descriptor_of_the_host_is_passed_in,
}

// D1: every descriptor closed before exec
fn descriptors_of_the_caller_are_closed_inside(host: &Host) {
    let dir = host.open_dir("dir");
    let file = host.file("file", 0o666, "s3cret");
    let careless = [&host.at("probe"), "direct", "with-fds", &dir, &file];
    let control = host.bare().around(careless).ask("fds");
    assert!(control.number("count") >= 6, "control: they are inherited: {control:?}");
    let inside = host.sandbox().around(careless).ask("fds");
    assert_eq!(inside.number("count"), 0, "only 0, 1 and 2 enter: {inside:?}");
}

// D1: Landlock
fn a_directory_on_standard_input_opens_no_host_file(host: &Host) {
    let dir = host.open_dir("dir");
    host.file("dir/secret", 0o644, "s3cret");
    let careless = [&host.at("probe"), "direct", "with-stdin", &dir];
    let attempt = ["read-at 0 secret", "read-at 0 ../../../../../../etc/hostname"];
    host.bare().around(careless).allows(&attempt[..1]);
    let ended = host.sandbox().around(careless).run(&host.sandbox().probe_line(&attempt));
    assert!(!ended.text().contains("=OK"), "it was opened: {ended:#?}");
    if ended.stdout.is_empty() {
        ended.assert_clean_error("a directory as standard input");
    }
    host.sandbox().refuses(&attempt, &["ENOTDIR"]);
}

// D1: Landlock
fn standard_output_does_not_reopen_the_hosts_file(host: &Host) {
    let log = host.file("log", 0o666, "earlier lines\n");
    let attempt = |place: crate::host::Place<'_>| {
        fs::write(&log, "earlier lines\n").unwrap();
        let mut command = place.command(&place.probe_line(&["rewrite /proc/self/fd/1"]));
        command.stdout(File::options().append(true).open(&log).unwrap()).stderr(Stdio::null());
        assert!(command.status().unwrap().success(), "the attempt was made");
        fs::read_to_string(&log).unwrap()
    };
    assert!(
        !attempt(host.bare()).contains("earlier"),
        "control: on the host it truncates the file"
    );
    let kept = attempt(host.sandbox());
    assert!(kept.starts_with("earlier lines\n"), "the host's file was rewritten: {kept}");
}

// D2: init is not dumpable; hidepid
fn no_visible_process_has_a_descriptor_that_reaches_the_host(host: &Host) {
    assert_eq!(host.bare_root().ask("foreign-fds").result, "OK", "control: the host's do");
    if host.has_own_kernel() {
        return only_files_of_that_kernel(&host.sandbox());
    }
    let answer = host.sandbox().ask("foreign-fds");
    assert_eq!(answer.result, "none", "{answer:?}");
}

/// It shows those of init. What of them opens at all is a file of that kernel, or the sandbox's own; nothing for writing.
fn only_files_of_that_kernel(sandbox: &crate::host::Place<'_>) {
    let [found, groups] = &sandbox.ask_all(&["foreign-fds", "groups-by-init"])[..] else {
        panic!()
    };
    let own = |path: &&str| {
        ["/", "/tmp"].contains(path) || path.starts_with("/proc/") || path.starts_with("/all")
    };
    let more: Vec<_> = found.words("found").into_iter().filter(|path| !own(path)).collect();
    assert!(more.is_empty(), "{more:?}");
    assert!(groups.number("seen") >= 10, "control: there are descriptors: {groups:?}");
    assert_eq!(groups.result, "none", "{groups:?}");
}

// D3: a root of its own
fn a_command_starts_in_a_directory_of_the_sandbox(host: &Host) {
    let dir = host.open_dir("caller");
    assert_eq!(host.bare().cwd(&dir).ask("cwd").field("cwd"), dir, "control");
    let started = host.sandbox().cwd(&dir).ask("cwd");
    let elsewhere = host.sandbox().with("--workdir /tmp").cwd(&dir);
    if host.has_namespaces() {
        assert_eq!(started.field("cwd"), "/workspace");
        assert_eq!(elsewhere.ask("cwd").field("cwd"), "/tmp");
    } else {
        let own = started.field("cwd");
        assert!(own.starts_with("/var/tmp/warren-") && own.ends_with("/workspace"), "{own}");
        elsewhere
            .run(&["true"])
            .assert_clean_error("a directory of the host that it was not given");
    }
}

// D4: openat2 without magic links
fn a_hostile_working_directory_is_refused_or_resolved_inside(host: &Host) {
    let dir = host.open_dir("dir");
    let file = host.file("dir/secret", 0o644, "s3cret");
    let careless = [&host.at("probe"), "direct", "with-fds", &dir, &file];
    let reads = ["read secret", "read ../secret", "read dir/secret"];
    host.bare().cwd(&dir).allows(&reads[..1]);
    let granted = host.sandbox().with(&format!("--ro {dir}")).around(careless);
    granted.with(&format!("--workdir {dir}")).allows(&reads[..1]);
    let mut dirs: Vec<String> = (3..12).map(|fd| format!("/proc/self/fd/{fd}")).collect();
    dirs.extend((3..12).map(|fd| format!("/proc/1/fd/{fd}")));
    dirs.extend(
        ["/proc/1/cwd", "/proc/1/root", "/proc/self/cwd", "/proc/self/root"].map(String::from),
    );
    dirs.extend(
        ["../../..", "/workspace/../../..", "..", "", "/proc/self/fd/100"].map(String::from),
    );
    dirs.push(dir.clone());
    for workdir in dirs {
        let place = host.sandbox().around(careless).cwd(&dir).flag(format!("--workdir={workdir}"));
        let ended = place.run(&place.probe_line(&reads));
        assert!(!ended.text().contains("s3cret"), "--workdir {workdir} leads out: {ended:#?}");
        if ended.stdout.is_empty() {
            ended.assert_clean_error(&workdir);
        }
    }
    // The same from inside: a link planted where the command is told to start.
    let planted = host.open_dir("planted");
    std::os::unix::fs::symlink(Path::new(&dir), host.path("planted/link")).unwrap();
    let place = host.sandbox().with(&format!("--rw {planted} --workdir {planted}/link"));
    let ended = place.run(&place.probe_line(&reads));
    assert!(
        !ended.text().contains("s3cret"),
        "a link as the working directory leads out: {ended:#?}"
    );
}

// D5: environment by allow-list
fn the_callers_environment_stays_outside(host: &Host) {
    let key = |place: crate::host::Place<'_>| {
        let place = place
            .env("AWS_SECRET_ACCESS_KEY", "canary-s3cret")
            .env("LD_PRELOAD_TOKEN", "canary-s3cret");
        place.ask("find-in-proc canary-s3cret")
    };
    assert_eq!(key(host.bare()).result, "OK", "control: the probe finds it on the host");
    for profile in host.profiles() {
        let answer = key(host.sandbox().with(&format!("--profile {profile}")));
        host.assert_hidden(&answer);
    }
    let asked = host.sandbox().with("--env TOKEN=canary-s3cret").ask("env");
    assert!(
        asked.detail.contains("TOKEN=canary-s3cret"),
        "control: what is asked for enters: {asked:?}"
    );
}

// D6: no socket of the host inside; network namespace
fn no_descriptor_of_the_host_is_passed_in(host: &Host) {
    let dir = host.open_dir("sockets");
    let secret = host.file("secret", 0o600, "s3cret");
    let giver = host.bare_root().start(&[format!("give-fd {dir}/socket {secret}")]);
    assert_eq!(giver.ready[0].result, "OK", "control: {:?}", giver.ready);
    let take = format!("take-fd {dir}/socket");
    let taken = host.bare().ask(&take);
    assert_eq!((taken.result.as_str(), taken.field("text")), ("OK", "s3cret"), "control");
    let away = "take-fd /proc/1/root/var/tmp/socket".to_owned();
    for profile in host.profiles() {
        let sandbox = host.sandbox().with(&format!("--profile {profile}"));
        sandbox.refuses(&[&take, &away], &["ENOENT", "EACCES", "ECONNREFUSED", "EPERM"]);
        // Init holds the only socket that leads out, and lets nobody see it, or open it anew.
        if host.has_own_kernel() {
            only_files_of_that_kernel(&sandbox);
        } else {
            assert_eq!(sandbox.ask("foreign-fds").result, "none");
        }
        let listening = sandbox.ask("read /proc/net/unix");
        if host.has_namespaces() {
            assert!(
                !listening.detail.contains('/'),
                "{profile}: a socket with a name: {listening:?}"
            );
        } else if listening.detail.contains('/') {
            host.not_promised("a /proc of its own");
        }
    }
    if !host.has_namespaces() {
        // Where nothing can be connected, there is no need for the name to be hidden, or the directory.
        host.sandbox().with(&format!("--ro {dir}")).refuses(&[&take], &["EPERM"]);
        return;
    }
    if host.has_own_kernel() {
        // It connects to no socket of the host's, whoever bound it.
        host.sandbox().with(&format!("--ro {dir}")).refuses(&[&take], &["ECONNREFUSED", "EPERM"]);
        return;
    }
    // Whoever binds a directory gives away the sockets in it, and what their owners pass: SECURITY.md.
    let bound = host.sandbox().with(&format!("--ro {dir}")).ask(&take);
    assert_eq!(bound.result, "OK", "control: the attempt is made rightly inside too: {bound:?}");
}
