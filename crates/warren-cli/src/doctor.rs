//! `warren doctor`.

use serde::Serialize;
use warren::backend::LinuxBackend;
use warren::backend::linux::{Finding, HostReport};

use crate::args::DoctorArgs;
use crate::failure::Failure;
use crate::output;

/// What `warren doctor --json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    usable: bool,
    #[serde(flatten)]
    host: &'a HostReport,
}

/// Tries every layer on this host; returns 1 if no sandbox can be made.
pub(crate) fn doctor(args: &DoctorArgs) -> Result<u8, Failure> {
    let backend = LinuxBackend::new()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::system("cannot start", &error))?;
    let report = runtime.block_on(backend.examine());
    let usable = report.is_usable();
    let printed = if args.json {
        output::print_json(&Report { usable, host: &report })
    } else {
        output::print(table(&report.findings).as_bytes())
    };
    printed.map_err(|error| Failure::system("cannot write to stdout", &error))?;
    Ok(if usable { 0 } else { 1 })
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
