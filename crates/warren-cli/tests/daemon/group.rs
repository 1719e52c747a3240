//! A group that may use the socket, with real users of this host.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use crate::support::{Daemon, Outcome, Place, outcome};

/// A group that nobody is in.
const GROUP: &str = "4242";

/// Runs the client as another user.
fn run_as(daemon: &Daemon, user: &[&str], args: &[&str]) -> Outcome {
    let mut command = Command::new("setpriv");
    command.args(user).arg(daemon.place.path("warren")).args(args);
    command.env_clear().env("HOME", "/nonexistent");
    command.env("WARREN_SOCKET", daemon.place.path("run/warren.sock"));
    outcome(command.output().expect("setpriv is there"))
}

mod needs_root {
    use super::*;

    #[test]
    fn the_group_may_use_the_socket_each_user_as_a_tenant_of_its_own_and_others_may_not() {
        let place = Place::new();
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(place.path(""), open).unwrap();
        // Where it was built, others may not get to.
        std::fs::copy(env!("CARGO_BIN_EXE_warren"), place.path("warren")).unwrap();
        let daemon = Daemon::start_in(place, &["--group", GROUP]);
        let socket = std::fs::metadata(daemon.place.path("run/warren.sock")).unwrap();
        assert_eq!(socket.permissions().mode() & 0o777, 0o660);

        let operators = daemon.ok(&["create"]);
        let nobody = ["--reuid=65534", "--regid", GROUP, "--clear-groups"];
        let member = ["--reuid=65533", "--regid=65533", "--groups", GROUP];
        let stranger = ["--reuid=65532", "--regid=65532", "--clear-groups"];

        let made = run_as(&daemon, &nobody, &["create", "--json"]);
        assert_eq!(made.code, Some(0), "{made:?}");
        let made: serde_json::Value = serde_json::from_str(&made.stdout).unwrap();
        assert_eq!(made["session"]["tenant"], "uid:65534");
        let id = made["sandbox"]["id"].as_str().unwrap();
        assert_eq!(run_as(&daemon, &nobody, &["ls", "-q"]).stdout.trim(), id, "its own alone");
        let ran = run_as(&daemon, &nobody, &["exec", id, "--", "echo", "hi"]);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "hi\n"), "{ran:?}");

        let seen = run_as(&daemon, &member, &["ls", "-q"]);
        assert_eq!((seen.code, seen.stdout.as_str()), (Some(0), ""), "{seen:?}");
        for foreign in [id, &operators] {
            let seen = run_as(&daemon, &member, &["show", foreign]);
            assert!(seen.stderr.starts_with("error: no sandbox"), "{seen:?}");
        }
        let bind = run_as(&daemon, &nobody, &["create", "--ro", "/root"]);
        assert!(bind.stderr.contains("only the operator"), "{bind:?}");

        let refused = run_as(&daemon, &stranger, &["ls", "-q"]);
        assert_eq!((refused.code, refused.stdout.as_str()), (Some(125), ""), "{refused:?}");
        assert!(refused.stderr.contains("you may not talk to the daemon"), "{refused:?}");
        assert_eq!(daemon.ok(&["ls", "-q"]).lines().count(), 2, "the operator sees both");
    }
}
