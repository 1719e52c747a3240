//! The daemon as a service of systemd's.

use crate::support::{Daemon, Place};

#[test]
fn the_service_manager_hears_that_it_is_ready_and_that_it_stops() {
    // The start waits for READY=1.
    let daemon = Daemon::start();
    let (code, daemon) = daemon.end("TERM");
    assert_eq!((code, daemon.notice().as_str()), (Some(0), "STOPPING=1"));
}

mod needs_systemd {
    use super::*;

    #[test]
    fn systemd_finds_no_fault_with_the_unit() {
        let place = Place::new();
        let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/warren.service");
        let text = std::fs::read_to_string(unit).unwrap();
        let verify = |text: &str| {
            let path = place.path("warren.service");
            std::fs::write(&path, text).unwrap();
            let verify = std::process::Command::new("systemd-analyze")
                .args(["verify", "--man=no"])
                .arg(path)
                .output();
            let seen = crate::support::outcome(verify.expect("systemd-analyze is there"));
            // What it says of other units of this host is not about ours.
            let ours = seen.stderr.lines().filter(|line| line.contains("warren"));
            ours.map(str::to_owned).collect::<Vec<_>>()
        };
        // The program that was built, since none is installed.
        let here = text.replace("/usr/local/bin/warren", env!("CARGO_BIN_EXE_warren"));
        assert_ne!(here, text);
        assert_eq!(verify(&here), [""; 0]);
        let wrong = here.replace("KillMode=process", "KillMode=nobody");
        assert!(verify(&wrong).join("\n").contains("kill mode"), "control: a fault is found");
    }
}
