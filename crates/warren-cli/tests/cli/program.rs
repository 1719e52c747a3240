//! A program that lives outside of what a sandbox shows.

use crate::support::{directory, outcome, program, run, warren};

/// Prints where it was found and that its runtime is there and cannot be written.
const TOOL: &str = "#!/bin/sh\necho \"$0\"\ncat \"${0%/bin/*}/lib/data\"\n\
                    touch \"${0%/bin/*}/lib/new\" 2>/dev/null && echo written\nexit 0\n";

#[test]
fn a_program_of_a_version_manager_runs_with_its_runtime_and_the_caller_is_told() {
    let root = directory();
    let at = root.path().to_str().unwrap();
    for version in ["1.9.0", "1.10.0"] {
        let prefix = root.path().join("versions").join(version);
        program(&prefix.join("bin/some-tool"), TOOL);
        program(&prefix.join("lib/data"), &format!("data of {version}\n"));
    }
    program(&root.path().join("shims/some-tool"), "#!/bin/sh\nexec no-such-manager\n");
    program(&root.path().join("secret"), "s3cret");
    let path = format!("{at}/shims:/usr/bin:/bin");
    let tool = |args: &[&str], version: Option<&str>| {
        let mut command = warren(&["run"]);
        command.args(args).env("PATH", &path);
        outcome(command.envs(version.map(|version| ("PYENV_VERSION", version))))
    };
    let seen = tool(&["--", "some-tool"], None);
    let prefix = format!("{at}/versions/1.10.0");
    assert_eq!(seen.stdout, format!("{prefix}/bin/some-tool\ndata of 1.10.0\n"), "{seen:?}");
    assert_eq!(seen.stderr, format!("note: some-tool comes from {prefix}, shown read-only\n"));
    assert_eq!(seen.code, Some(0));

    let chosen = tool(&["--quiet", "--", "some-tool"], Some("1.9.0"));
    assert!(chosen.stdout.ends_with("data of 1.9.0\n"), "{chosen:?}");
    assert_eq!(chosen.stderr, "");

    let report: serde_json::Value =
        serde_json::from_str(&tool(&["--json", "--quiet", "--", "some-tool"], None).stdout)
            .unwrap();
    assert_eq!(report["notes"][0], format!("some-tool comes from {prefix}, shown read-only"));
}

#[test]
fn a_program_in_a_home_is_shown_without_what_lies_beside_it() {
    let home = directory();
    let at = home.path().to_str().unwrap();
    let tool = "#!/bin/sh\necho ran\nls -A \"${0%/bin/*}\" \"${0%/bin/*}/bin\"\n";
    program(&home.path().join(".local/bin/some-tool"), tool);
    program(&home.path().join(".local/share/token"), "s3cret");
    let mut command = warren(&["run", "--", "some-tool"]);
    let seen = outcome(command.env("HOME", at).env("PATH", format!("{at}/.local/bin:/usr/bin")));
    let local = format!("{at}/.local");
    assert_eq!(seen.stdout, format!("ran\n{local}:\nbin\n\n{local}/bin:\nsome-tool\n"), "{seen:?}");
    assert_eq!(
        seen.stderr,
        format!("note: some-tool comes from {local}/bin/some-tool, shown read-only\n")
    );
}

#[test]
fn what_the_sandbox_has_itself_comes_first() {
    let root = directory();
    program(&root.path().join("bin/true"), "#!/bin/sh\nexit 1\n");
    let mut command = warren(&["run", "--", "true"]);
    let seen = outcome(command.env("PATH", root.path().join("bin")));
    assert_eq!((seen.code, seen.stderr.as_str()), (Some(0), ""));
}

#[test]
fn a_program_of_the_host_that_is_not_shown_is_127_with_the_way_to_show_it() {
    let root = directory();
    let path = root.path().join("tool");
    program(&path, "#!/bin/sh\necho ran\n");
    let path = path.to_str().unwrap();
    let seen = run(&["--", path]);
    assert_eq!(seen.code, Some(127));
    let expected = format!(
        "error: cannot run `{path}`: no such program in the sandbox: No such file or directory (os error 2)\n\
         hint: the host has it; `--ro {path}` shows it to the sandbox\n"
    );
    assert_eq!(seen.stderr, expected);
    assert_eq!(run(&["--ro", path, "--", path]).stdout, "ran\n", "the hint works");

    let mut relative = warren(&["run", "--", "./tool"]);
    let seen = outcome(relative.current_dir(root.path()));
    assert_eq!(seen.code, Some(127));
    assert!(seen.stderr.contains("--ro \"$PWD\" --workdir \"$PWD\""), "{seen:?}");
}

#[test]
fn a_bound_directory_in_path_has_its_programs() {
    let root = directory();
    program(&root.path().join("some-tool"), "#!/bin/sh\necho ran\n");
    let bind = format!("{}:/tools:ro", root.path().display());
    let seen = run(&["--bind", &bind, "--env", "PATH=/tools:/bin", "--", "some-tool"]);
    assert_eq!((seen.stdout.as_str(), seen.stderr.as_str()), ("ran\n", ""));
}
