//! What was tried of a sandbox, as its users are told, and whether they need believe it.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::Value;

use crate::support::{Daemon, Place};

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Checks a signature as somebody does who has never heard of us.
fn openssl_believes(place: &Place, receipt: &Value, key: &str) -> bool {
    let envelope = &receipt["envelope"];
    let decoded = |text: &Value| BASE64.decode(text.as_str().unwrap()).unwrap();
    let (kind, payload) =
        (envelope["payloadType"].as_str().unwrap(), decoded(&envelope["payload"]));
    let mut signed = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len()).into_bytes();
    signed.extend_from_slice(&payload);
    std::fs::write(place.path("signed"), signed).unwrap();
    std::fs::write(place.path("signature"), decoded(&envelope["signatures"][0]["sig"])).unwrap();
    std::fs::write(place.path("key.pem"), key).unwrap();
    let output = Command::new("openssl")
        .args(["pkeyutl", "-verify", "-pubin", "-rawin"])
        .args(["-inkey".into(), place.path("key.pem")])
        .args(["-in".into(), place.path("signed")])
        .args(["-sigfile".into(), place.path("signature")])
        .output();
    output.expect("openssl is there").status.success()
}

#[test]
fn a_daemon_that_is_told_to_tries_the_limits_of_every_sandbox_before_anybody_has_it() {
    let limits = |daemon: &Daemon, id: &str| {
        let shown = json(&daemon.ok(&["show", id, "--json"]));
        let receipt = &shown["receipt"]["receipt"];
        let layers = receipt["layers"].as_array().unwrap();
        let tries = layers.iter().flat_map(|layer| layer["tries"].as_array().unwrap());
        let held = tries.filter(|one| {
            let what = one["what"].as_str().unwrap();
            one["verdict"] == "held" && (what.contains("memory") || what.contains("one process"))
        });
        (receipt["extent"].as_str().unwrap().to_owned(), held.count())
    };
    // Nothing is begun ahead for one that is made first, or for one that stands on layers.
    for (verify, expected) in [("false", ("creation", 0)), ("true", ("pristine", 2))] {
        let settings = vec![("WARREN_POOL_ENABLED", "false"), ("WARREN_RECEIPTS_VERIFY", verify)];
        let daemon = Daemon::start_in(Place::with_settings("linux", settings.leak()), &[]);
        let first = daemon.ok(&["create"]);
        let fork = daemon.ok(&["fork", &first]);
        for id in [&first, &fork] {
            let (extent, held) = limits(&daemon, id);
            assert_eq!((extent.as_str(), held), expected, "{id}");
        }
        let run = daemon.ok(&["exec", &fork, "--", "sh", "-c", "(true); echo it works"]);
        assert_eq!(run, "it works", "its limits are what they were");
    }
}

#[test]
fn a_receipt_is_made_shown_and_believed_without_the_daemon() {
    let daemon = Daemon::start_in(Place::with_backend("linux"), &[]);
    let place = daemon.place.clone();
    let id = daemon.ok(&["create", "--name", "box", "--verify"]);
    let shown = json(&daemon.ok(&["show", "box", "--json"]));
    let receipt = &shown["receipt"]["receipt"];
    assert_eq!(
        (&receipt["extent"], &receipt["sandbox_id"]),
        (&"everything".into(), &Value::from(id))
    );
    let table = daemon.ok(&["show", "box"]);
    assert!(table.contains("receipt.network") && table.contains("held, "), "{table}");

    daemon.ok(&["exec", "box", "--", "true"]);
    let table = daemon.ok(&["verify", "box"]);
    assert!(table.contains("169.254.169.254") && table.contains("ENETUNREACH"), "{table}");
    assert!(!table.contains("OPEN"), "{table}");
    let made = daemon.ok(&["receipt", "show", "box"]);
    assert_eq!(json(&made)["receipt"]["extent"], "walls", "a command has run in it");
    let key = daemon.ok(&["receipt", "key"]) + "\n";
    let mode = std::fs::metadata(place.path("state/receipt.key")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o600);
    assert!(openssl_believes(&place, &json(&made), &key));

    // The next daemon has the receipt and the key.
    let (_, daemon) = daemon.end("TERM");
    let daemon = Daemon::start_in(daemon.place.clone(), &[]);
    assert_eq!(daemon.ok(&["receipt", "show", "box"]), made);
    daemon.ok(&["kill", "box"]);
    drop(daemon);

    let (file, public) = (place.path("receipt.json"), place.path("receipt.pub"));
    std::fs::write(&public, key).unwrap();
    let check = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let (file, public) = (file.to_str().unwrap(), public.to_str().unwrap());
        place.run(&["receipt", "verify", file, "--key", public])
    };
    let good = check(&made);
    assert_eq!(good.code, Some(0), "{good:?}");
    assert!(good.stdout.contains("ENETUNREACH"), "{good:?}");
    let bad = check(&made.replace("ENETUNREACH", "EHOSTUNREACH"));
    assert_eq!((bad.code, bad.stdout.as_str()), (Some(1), ""), "{bad:?}");
    assert!(bad.stderr.contains("not what was signed"), "{bad:?}");
}

/// Whoever put up the walls: one attempt of each kind was made before anybody could use the sandbox.
#[test]
fn what_was_tried_of_a_fresh_sandbox_is_shown_signed_and_kept() {
    // Of the others see `warren`'s tests of receipts: to a daemon they are all the same.
    const BACKENDS: [(&str, &str, &str, &str); 2] = [
        ("landlock", "process", "open a socket", "held, 3 tried"),
        ("oci-crun", "container", "find a route to 192.0.2.1", "held, 6 tried"),
    ];
    let daemon = Daemon::start_in(Place::with_backend("landlock,oci-crun"), &[]);
    let place = daemon.place.clone();
    let key = daemon.ok(&["receipt", "key"]) + "\n";
    let mut made = Vec::new();
    for (backend, level, network, told) in BACKENDS {
        let how = ["--name", backend, "--backend", backend, "--isolation", level];
        daemon.ok(&[&["create"][..], &how].concat());
        let text = daemon.ok(&["receipt", "show", backend]);
        let signed = json(&text);
        assert_eq!(
            (&signed["receipt"]["extent"], &signed["receipt"]["backend"]),
            (&"creation".into(), &backend.into())
        );
        for layer in signed["receipt"]["layers"].as_array().unwrap() {
            let expected = if layer["layer"] == "limits" { "partly" } else { "held" };
            assert_eq!(layer["verdict"], expected, "{backend}: {layer}");
            if layer["layer"] == "network" {
                assert_eq!(layer["tries"][0]["what"], network, "{backend}: {layer}");
            }
        }
        let table = daemon.ok(&["show", backend]);
        let line = table.lines().find(|line| line.starts_with("receipt.network"));
        assert!(line.is_some_and(|line| line.ends_with(told)), "{backend}: {table}");
        assert!(openssl_believes(&place, &signed, &key), "{backend}");
        let lie = text.replacen("creation", "everything", 1);
        let key = place.path("key.pem");
        std::fs::write(place.path("lie.json"), lie).unwrap();
        let (lie, key) = (place.path("lie.json"), key.to_str().unwrap());
        let seen = place.run(&["receipt", "verify", lie.to_str().unwrap(), "--key", key]);
        assert_eq!(seen.code, Some(1), "control: {seen:?}");
        made.push(text);
    }
    let (_, daemon) = daemon.end("KILL");
    let daemon = Daemon::start_in(daemon.place.clone(), &[]);
    for ((backend, ..), made) in BACKENDS.iter().zip(made) {
        assert_eq!(daemon.ok(&["receipt", "show", backend]), made, "the next daemon knows it");
        daemon.ok(&["kill", backend]);
    }
}

#[test]
fn a_receipt_of_the_bare_host_promises_nothing() {
    let daemon = Daemon::start_in(Place::with_backend("host"), &[]);
    daemon.ok(&["create", "--name", "box", "--backend", "host"]);
    let made = json(&daemon.ok(&["verify", "box", "--json"]));
    assert_eq!(made["receipt"]["verdict"], "not_promised");
    let layers = made["receipt"]["layers"].as_array().unwrap();
    let open: Vec<_> = layers
        .iter()
        .flat_map(|layer| layer["tries"].as_array().unwrap())
        .filter(|one| one["said"] == "let through" || one["said"] == "the host's own")
        .collect();
    assert!(open.len() > 20, "what is tried there gets through: {made}");
    assert!(!daemon.ok(&["ls", "-q"]).is_empty(), "what was not promised ends nothing");
}

#[test]
fn a_limit_that_ended_a_command_is_named_with_what_would_allow_it_and_what_only_says_so_is_not() {
    let daemon = Daemon::start_in(Place::with_backend("linux"), &[]);
    daemon.ok(&["create", "--name", "box", "--disk", "4M", "--pids", "10"]);
    let script = |text: &'static str| ["exec", "box", "--", "sh", "-c", text];
    let full = daemon.run(&script("head -c 8M /dev/zero > /tmp/big; rm /tmp/big; exit 1"));
    let fill = daemon.run(&script("head -c 8M /dev/zero > /tmp/big"));
    assert!(
        fill.stderr.contains("hint: more than 4M of files, by the size of a tmpfs"),
        "{fill:?}"
    );
    assert!(fill.stderr.contains("allowed by --disk 8M"), "{fill:?}");
    daemon.ok(&["exec", "box", "--", "rm", "/tmp/big"]);
    let lie = daemon.run(&script("echo 'disk quota exceeded: Permission denied' >&2; exit 1"));
    assert_eq!((lie.code, lie.stderr.contains("hint")), (Some(1), false), "{lie:?} {full:?}");
    let forks = "i=0; while [ $i -lt 20 ]; do sleep 2 & i=$((i+1)); done; exit 1";
    let seen = daemon.run(&["exec", "box", "--json", "--", "sh", "-c", forks]);
    let denials = &json(&seen.stdout)["denials"];
    assert_eq!(denials[0]["what"], "more than 10 processes", "{seen:?}");
    assert_eq!(denials[0]["grant"], "--pids 20", "{seen:?}");
}
