//! The profile `dev`: a root of its own, `sudo`, users, and no way further.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

use warren::backend::LinuxBackend;
use warren::{
    Command, CreateOptions, ExecContext, ExecOptions, ExecUser, FileFault, LogStream, LogWait,
    ProgramFault, Sandbox, SandboxError, SandboxSpec, WriteOptions,
};

mod needs_root {
    use super::*;

    fn spec(profile: &str) -> SandboxSpec {
        SandboxSpec { profile: profile.to_owned(), ..SandboxSpec::default() }
    }

    fn named(user: &str) -> ExecUser {
        ExecUser { name: user.to_owned(), workdir: None }
    }

    /// Runs a script as a user and returns its exit code and what it wrote.
    async fn run(sandbox: &dyn Sandbox, user: Option<&str>, script: &str) -> (i32, String, String) {
        let command = Command::new("bash").args(["-c".to_owned(), script.to_owned()]);
        let user = user.map(named);
        let options = ExecOptions { user, ..ExecOptions::default() };
        let exec = sandbox.start_exec(&command, &ExecContext::default(), &options).await.unwrap();
        let end = exec.wait().await.unwrap();
        let log = exec.read(0, usize::MAX, LogWait::More).await.unwrap();
        let of = |stream| {
            let pieces = log.pieces.iter().filter(|piece| piece.stream == stream);
            let bytes: Vec<u8> = pieces.flat_map(|piece| piece.bytes.clone()).collect();
            String::from_utf8(bytes).unwrap().trim().to_owned()
        };
        (end.exit_code, of(LogStream::Stdout), of(LogStream::Stderr))
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn commands_are_of_the_user_that_is_named() {
        let backend = LinuxBackend::new().unwrap();
        let sandbox = backend.create(&spec("dev"), &CreateOptions::default()).await.unwrap();
        let who = "echo $(id -un) $(id -gn) $HOME $USER $(cd; pwd)";
        let user = "user user /home/user user /home/user";
        assert_eq!(run(&sandbox, None, who).await.1, user);
        assert_eq!(run(&sandbox, Some("user"), who).await.1, user);
        assert_eq!(run(&sandbox, Some("root"), who).await.1, "root root /root root /root");
        // Whom root adds is there as well.
        let add = "echo 'ann:x:1001:1001::/home/ann:/bin/bash' >>/etc/passwd; \
                   echo 'ann:x:1001:' >>/etc/group; echo 'crew:x:50:ann' >>/etc/group; mkdir /home/ann";
        assert_eq!(run(&sandbox, Some("root"), add).await.0, 0);
        assert_eq!(run(&sandbox, Some("ann"), "id -un; id -G").await.1, "ann\n1001 50");

        let refused = async |name: &str| {
            let options = ExecOptions { user: Some(named(name)), ..ExecOptions::default() };
            let command = Command::new("true");
            sandbox.start_exec(&command, &ExecContext::default(), &options).await.unwrap_err()
        };
        // Init's own user is nobody's.
        for name in ["nobody-here", "warren", "998", "-1"] {
            let error = refused(name).await;
            let fault = matches!(error, SandboxError::Program { kind: ProgramFault::User, .. });
            assert!(fault, "{name}: {error}");
        }
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_refused_is_not_explained_where_following_would_break_sudo() {
        let backend = LinuxBackend::new().unwrap();
        let sandbox = backend.create(&spec("dev"), &CreateOptions::default()).await.unwrap();
        let options = ExecOptions { explain: warren::Explain::Inside, ..ExecOptions::default() };
        let command = Command::new("true");
        let asked = sandbox.start_exec(&command, &ExecContext::default(), &options).await;
        assert_eq!(asked.unwrap_err().code(), "unsupported");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn sudo_makes_root_of_a_user_and_of_root_nobody_of_the_host() {
        let backend = LinuxBackend::new().unwrap();
        let sandbox = backend.create(&spec("dev"), &CreateOptions::default()).await.unwrap();
        for (script, expected) in [
            ("sudo id -un", "root"),
            (
                "sudo sh -c 'echo echo installed >/usr/bin/tool; chmod +x /usr/bin/tool'; tool",
                "installed",
            ),
            ("which sudo; test -u /usr/bin/sudo && echo set-uid", "/usr/bin/sudo\nset-uid"),
            ("sudo -u user id -un", "user"),
            ("sudo -n -E bash -c 'echo $UID'", "0"),
            ("sudo A=1 bash -c 'echo $A $SUDO_USER $HOME'", "1 user /root"),
            ("sudo -i pwd", "/root"),
            ("sudo sh -c 'echo x >/etc/made; stat -c %U /etc/made'", "root"),
            ("sudo chown user: /etc/made && rm -f /etc/nope && stat -c %U /etc/made", "user"),
            // The bounding set is what root has, and nothing of it is sys_admin, net_admin or ptrace.
            ("sudo grep CapEff /proc/self/status", "CapEff:\t00000000000004fb"),
            ("grep CapEff /proc/self/status", "CapEff:\t0000000000000000"),
            ("sudo cat /proc/self/uid_map | wc -l", "1"),
        ] {
            let (code, out, err) = run(&sandbox, None, script).await;
            assert_eq!((code, out.as_str()), (0, expected), "{script}: {err}");
        }
        for script in [
            "sudo mount -t tmpfs x /mnt",
            "sudo unshare -n true",
            "sudo mknod /tmp/null c 1 3",
            "sudo sh -c 'echo x >/proc/sys/kernel/core_pattern'",
            "sudo cat /proc/1/environ",
            "sudo chmod u+s /bin/true",
            "cp /bin/true /tmp/t && sudo chown root /tmp/t && sudo chmod 4755 /tmp/t",
            "sudo nice -n -5 true 2>&1 | grep -v ermission",
            "sudo no-such-program",
        ] {
            let (code, out, _) = run(&sandbox, None, script).await;
            assert_ne!(code, 0, "{script}: {out}");
        }
        // It goes on: nothing of the above ended init.
        assert_eq!(run(&sandbox, None, "sudo kill -9 1; sudo kill -9 -1; echo $?").await.0, 137);
        assert_eq!(run(&sandbox, None, "echo here").await.1, "here");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_not_everybody_may_read_below_usr_is_closed_to_root_inside() {
        use std::fs;
        use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};

        let place = tempfile::Builder::new().prefix("warren-test-").tempdir_in("/usr/local/share");
        let place = place.unwrap();
        let at = |name: &str| place.path().join(name);
        let mode = |name: &str, mode: u32| {
            fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
        };
        mode("", 0o755);
        fs::DirBuilder::new().mode(0o700).create(at("closed")).unwrap();
        for (name, bits) in
            [("shown", 0o644), ("secret", 0o600), ("group", 0o640), ("closed/inner", 0o644)]
        {
            fs::write(at(name), "of the host\n").unwrap();
            mode(name, bits);
        }
        let backend = LinuxBackend::new().unwrap();
        let sandbox = backend.create(&spec("dev"), &CreateOptions::default()).await.unwrap();
        let directory = place.path().display();
        for who in ["root", "user"] {
            let as_who = async |script: &str| {
                run(&sandbox, Some(who), &format!("cd {directory}; {script}")).await
            };
            let (code, out, err) = as_who("cat shown; stat -c %U secret").await;
            assert_eq!((code, out.as_str()), (0, "of the host\nroot"), "control: {who}: {err}");
            for script in [
                "cat secret",
                "cat group",
                "cat closed/inner",
                "ls closed",
                "cp secret /tmp/copy",
                "mv secret /tmp/moved",
                "chmod 644 secret && cat secret",
                "chown user secret && cat secret",
                "ln secret /usr/local/share/linked && cat /usr/local/share/linked",
                "echo more >>secret && cat secret",
            ] {
                let (code, out, _) = as_who(script).await;
                assert!(code != 0 && !out.contains("host"), "{who}: {script}: {out}");
            }
            let files = sandbox.files_of(who).unwrap();
            assert!(files.read(&at("secret"), 0, None).await.is_err(), "{who}");
            assert!(files.read(&at("shown"), 0, None).await.is_ok(), "control: {who}");
        }
        // What is root's own is root's, and what is not read can be replaced.
        for (script, out) in [
            ("echo own >own; chmod 600 own; cat own", "own"),
            ("rm secret; echo mine >secret; cat secret", "mine"),
            ("cat own", ""),
        ] {
            let user = if out.is_empty() { "user" } else { "root" };
            let ran = run(&sandbox, Some(user), &format!("cd {directory}; {script}")).await;
            assert_eq!(ran.1, out, "{script}: {ran:?}");
        }
        assert_eq!(fs::read_to_string(at("secret")).unwrap(), "of the host\n");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn each_sandbox_was_booted_on_its_own() {
        let backend = LinuxBackend::new().unwrap();
        let mut seen = vec![std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap()];
        for _ in 0..2 {
            let sandbox = backend.create(&spec("dev"), &CreateOptions::default()).await.unwrap();
            let script = "cat /proc/sys/kernel/random/boot_id";
            let (_, first, _) = run(&sandbox, None, script).await;
            assert_eq!(first.len(), 36, "{first}");
            sandbox.suspend().await.unwrap();
            sandbox.resume().await.unwrap();
            assert_eq!(run(&sandbox, Some("root"), script).await.1, first, "it is the same boot");
            assert!(!seen.iter().any(|other| other.trim() == first), "{first}");
            seen.push(first);
            sandbox.destroy().await.unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn files_are_reached_with_the_rights_of_root_and_are_the_users() {
        let backend = LinuxBackend::new().unwrap();
        let sandbox = backend.create(&spec("dev"), &CreateOptions::default()).await.unwrap();
        assert_eq!(run(&sandbox, Some("root"), "mkdir -m 700 /root/d").await.0, 0);
        let path = std::path::Path::new("/root/d/f");
        let data =
            || -> warren::FileSource { Box::pin(futures_util::stream::iter([Ok(b"x".to_vec())])) };
        let own = sandbox.files().unwrap();
        let denied = own.write(path, WriteOptions::default(), data()).await.unwrap_err();
        let fault = matches!(denied, SandboxError::File { kind: FileFault::Denied, .. });
        assert!(fault, "control: a command's rights do not reach there: {denied}");
        for user in ["user", "root"] {
            let files = sandbox.files_of(user).unwrap();
            files.write(path, WriteOptions::default(), data()).await.unwrap();
            let script = "stat -c '%U %G' /root/d/f; rm /root/d/f";
            assert_eq!(run(&sandbox, Some("root"), script).await.1, format!("{user} {user}"));
        }
        let nobody = sandbox.files_of("nobody-here").unwrap();
        let error = nobody.stat(path).await.unwrap_err();
        assert!(matches!(error, SandboxError::File { kind: FileFault::NoUser, .. }), "{error}");
        sandbox.destroy().await.unwrap();

        let plain = backend.create(&spec("default"), &CreateOptions::default()).await.unwrap();
        let options = ExecOptions { user: Some(named("root")), ..ExecOptions::default() };
        let command = Command::new("true");
        let refused = plain.start_exec(&command, &ExecContext::default(), &options).await;
        assert!(matches!(refused, Err(SandboxError::Unsupported { .. })), "{refused:?}");
        plain.destroy().await.unwrap();
    }
}
