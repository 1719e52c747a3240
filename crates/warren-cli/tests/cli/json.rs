//! `--json` prints one object.

use serde_json::{Value, json};

use crate::support::{Outcome, run};

fn object(seen: &Outcome) -> Value {
    assert_eq!(seen.stdout.lines().count(), 1, "{seen:?}");
    serde_json::from_str(&seen.stdout).unwrap_or_else(|error| panic!("{error}: {seen:?}"))
}

#[test]
fn the_object_has_everything_about_the_run() {
    let script = "echo out; echo err >&2; exit 3";
    let seen = run(&["--json", "--cpus", "0.5", "--", "sh", "-c", script]);
    let report = object(&seen);
    assert_eq!((seen.code, seen.stderr.as_str()), (Some(3), ""));
    assert!(report["sandbox"].as_str().is_some_and(|id| id.starts_with("sbx-")));
    for (field, value) in [
        ("backend", json!("linux")),
        ("profile", json!("default")),
        ("exit_code", json!(3)),
        ("cause", json!({"kind": "exited", "code": 3})),
        ("stdout", json!("out\n")),
        ("stderr", json!("err\n")),
        ("notes", json!([])),
    ] {
        assert_eq!(report[field], value, "{field}");
    }
    assert!(report.get("stdout_base64").is_none());
    assert!(report["duration_ms"].is_u64());
    for field in ["peak_memory_bytes", "cpu_time_ms", "wall_time_ms", "bytes_written", "bytes_read"]
    {
        assert!(report["usage"][field].is_u64(), "{field}");
    }
    let limits = report["enforced"]["limits"].as_array().unwrap();
    let limit = |name: &str| limits.iter().find(|limit| limit["limit"] == name).unwrap();
    assert_eq!(limit("memory")["value"], 512 << 20);
    assert_eq!(limit("cpus")["value"], 500);
    assert!(limits.iter().all(|limit| limit["by"].is_string() && limit["bound"].is_string()));
    let layers = report["enforced"]["layers"].as_array().unwrap();
    assert!(layers.iter().any(|layer| layer["name"] == "seccomp" && layer["detail"].is_string()));
    assert!(report["enforced"]["warnings"].is_array());
}

#[test]
fn output_that_is_no_text_is_there_in_base64_too() {
    let report = object(&run(&["--json", "--", "printf", r"\377\376\375"]));
    assert_eq!(report["stdout"], "\u{fffd}\u{fffd}\u{fffd}");
    assert_eq!(report["stdout_base64"], "//79");
    assert!(report.get("stderr_base64").is_none());
}

#[test]
fn the_cause_is_typed() {
    for (args, code, cause) in [
        (
            &["--json", "--timeout", "500ms", "--", "sleep", "60"][..],
            124,
            json!({"kind": "timed_out"}),
        ),
        (
            &["--json", "--memory", "64M", "--", "tail", "/dev/zero"],
            137,
            json!({"kind": "out_of_memory"}),
        ),
        (&["--json", "--max-output", "1K", "--", "yes"], 137, json!({"kind": "output_limit"})),
        (
            &["--json", "--", "sh", "-c", "kill -9 $$"],
            137,
            json!({"kind": "signalled", "signal": 9}),
        ),
    ] {
        let seen = run(args);
        let report = object(&seen);
        assert_eq!((seen.code, &report["cause"]), (Some(code), &cause), "{args:?}");
        assert_eq!(report["exit_code"], code);
    }
}
