//! `warren doctor`.

use serde::Serialize;
use warren::egress::Egress;
use warren::{
    EgressOptions, Finding, Guarantee, Inspection, IsolationLevel, IsolationRequirements,
};

use crate::args::DoctorArgs;
use crate::backends;
use crate::failure::Failure;
use crate::output;

/// What `warren doctor --json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    /// Whether a sandbox can be made here that is walled off.
    usable: bool,
    backends: &'a [Backend],
    /// Those of `linux`.
    findings: &'a [Finding],
}

/// One backend, as this host has it.
#[derive(Debug, Serialize)]
struct Backend {
    name: String,
    /// The rung of the ladder that it is, if its walls stand.
    level: Option<IsolationLevel>,
    /// Whether it has proved what its level promises.
    usable: bool,
    proved: Vec<Guarantee>,
    lacks: Vec<Guarantee>,
    /// Why it is of no use, if it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    findings: Vec<Finding>,
}

impl Backend {
    fn new(
        name: &str,
        level: Option<IsolationLevel>,
        inspected: Result<Inspection, String>,
    ) -> Self {
        let (Inspection { capabilities, findings }, error) = match inspected {
            Ok(inspection) => (inspection, None),
            Err(error) => (Inspection::default(), Some(error)),
        };
        let (proved, lacks): (Vec<_>, Vec<_>) =
            Guarantee::ALL.into_iter().partition(|one| one.is_given_by(&capabilities));
        let promised = level.map(IsolationRequirements::at_least);
        let usable =
            promised.is_some_and(|promised| promised.lacking(level, &capabilities).is_empty());
        Self { name: name.to_owned(), level, usable, proved, lacks, error, findings }
    }

    /// Says why it is as it is, in the words of the first layer that does not hold.
    fn reason(&self) -> String {
        let broken = self.findings.iter().find(|finding| !finding.holds);
        let broken = broken.map(|finding| format!("{}: {}", finding.layer, finding.detail));
        self.error.clone().or(broken).unwrap_or_default()
    }
}

/// Tries every backend on this host; returns 1 if none that isolates can be used.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<u8, Failure> {
    let known = backends::NAMES.into_iter().filter(|name| *name != "fake");
    // Before there is a runtime: some of them start a process.
    let egress = Egress::new(EgressOptions::default());
    let made: Vec<_> = known.map(|name| (name, backends::make(name, None, &egress))).collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::system("cannot start", &error))?;
    let backends: Vec<Backend> = runtime.block_on(async {
        let mut backends = Vec::new();
        for (name, backend) in made {
            backends.push(match backend {
                Ok(backend) => {
                    let inspected = backend.inspect().await.map_err(|error| error.to_string());
                    Backend::new(name, backend.level(), inspected)
                }
                Err(failure) => Backend::new(name, None, Err(failure.message().to_owned())),
            });
        }
        backends
    });
    let usable = backends.iter().any(|backend| backend.usable);
    let printed = if args.json {
        let linux = backends.iter().find(|backend| backend.name == "linux");
        let findings = linux.map_or(&[][..], |linux| &linux.findings);
        output::print_json(&Report { usable, backends: &backends, findings })
    } else {
        output::print(written(&backends).as_bytes())
    };
    printed.map_err(|error| Failure::system("cannot write to stdout", &error))?;
    Ok(if usable { 0 } else { 1 })
}

/// Lays out the ladder, and below it what each backend tried.
fn written(backends: &[Backend]) -> String {
    let names = |list: &[Guarantee]| match list {
        [] => "-".to_owned(),
        list => list.iter().map(|one| one.name()).collect::<Vec<_>>().join(" "),
    };
    let rows = backends.iter().map(|backend| {
        vec![
            backend.name.clone(),
            backend.level.map_or_else(|| "-".to_owned(), |level| level.to_string()),
            if backend.usable { "yes" } else { "no" }.to_owned(),
            names(&backend.proved),
            names(&backend.lacks),
            backend.reason(),
        ]
    });
    let head = ["BACKEND", "LEVEL", "USABLE", "PROVED", "LACKS", "BECAUSE"];
    let mut text = output::table(&head, rows.collect());
    for backend in backends.iter().filter(|backend| !backend.findings.is_empty()) {
        text.push_str(&format!("\n{}:\n{}", backend.name, table(&backend.findings)));
    }
    text
}

fn table(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.layer.len()).chain([5]).max().unwrap_or(5);
    let mut text = format!("{:width$}  HOLDS  DETAIL\n", "LAYER");
    for finding in findings {
        let holds = if finding.holds { "yes" } else { "no" };
        let line = format!("{:width$}  {holds:5}  {}", finding.layer, finding.detail);
        text.push_str(line.trim_end());
        text.push('\n');
        if let Some(fix) = &finding.fix {
            text.push_str(&format!("{:width$}  fix:   {fix}\n", ""));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_that_has_not_proved_its_level_is_not_usable() {
        let all = warren::BackendCapabilities {
            filesystem_isolation: true,
            network_isolation: true,
            process_isolation: true,
            syscall_filtering: true,
            ..Default::default()
        };
        let seen = |capabilities| Inspection { capabilities, findings: Vec::new() };
        let level = Some(IsolationLevel::Namespace);
        let whole = Backend::new("linux", level, Ok(seen(all.clone())));
        assert!(whole.usable && whole.lacks == [Guarantee::Limits]);
        let without = warren::BackendCapabilities { network_isolation: false, ..all.clone() };
        assert!(!Backend::new("linux", level, Ok(seen(without))).usable);
        assert!(!Backend::new("host", None, Ok(seen(all))).usable, "no rung of the ladder");
        let broken = Backend::new("linux", level, Err("no namespaces".into()));
        assert!(!broken.usable && broken.proved.is_empty());
        let text = written(&[whole, broken]);
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
            .collect();
        assert_eq!(
            rows[1],
            ["linux", "namespace", "yes", "filesystem network process syscalls", "limits"]
        );
        assert_eq!(
            rows[2][2..],
            ["no", "-", "filesystem network process limits syscalls", "no namespaces"]
        );
    }

    #[test]
    fn a_layer_that_does_not_hold_has_its_fix_below_it() {
        let finding = |layer: &str, holds, fix: Option<&str>| Finding {
            layer: layer.into(),
            holds,
            detail: "seen".into(),
            fix: fix.map(Into::into),
        };
        let shown = table(&[finding("sandbox", true, None), finding("cpu", false, Some("do it"))]);
        assert_eq!(
            shown,
            "LAYER    HOLDS  DETAIL\n\
             sandbox  yes    seen\n\
             cpu      no     seen\n         fix:   do it\n"
        );
    }
}
