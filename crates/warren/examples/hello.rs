//! Runs one command in a sandbox and prints what it gave.
use warren::backend::LinuxBackend;
use warren::{Command, CreateOptions, ExecContext, Sandbox, SandboxSpec};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let backend = LinuxBackend::new()?;
    let sandbox = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await?;
    let command = Command::new(&args[0]).args(&args[1..]);
    let report = sandbox.exec_report(&command, &ExecContext::default()).await?;
    eprintln!("{}", String::from_utf8_lossy(&report.output.stdout));
    eprintln!("{}", String::from_utf8_lossy(&report.output.stderr));
    eprintln!("{:?} {:?}", report.cause, report.output.resource_usage);
    eprintln!("{:#?}", sandbox.enforcement().warnings);
    sandbox.destroy().await?;
    Ok(())
}
