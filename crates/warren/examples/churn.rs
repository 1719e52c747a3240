//! Creates, uses and destroys sandboxes, and says how long each part took.
use std::time::{Duration, Instant};

use warren::backend::LinuxBackend;
use warren::{Command, CreateOptions, ExecContext, Sandbox, SandboxSpec};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let count: usize = std::env::args().nth(1).map_or(Ok(100), |n| n.parse())?;
    let backend = LinuxBackend::new()?;
    let mut parts: [Vec<Duration>; 4] = Default::default();
    for _ in 0..count {
        let start = Instant::now();
        let sandbox = backend.create(&SandboxSpec::default(), &CreateOptions::default()).await?;
        parts[0].push(start.elapsed());
        for part in &mut parts[1..3] {
            let start = Instant::now();
            sandbox.exec(&Command::new("/bin/true"), &ExecContext::default()).await?;
            part.push(start.elapsed());
        }
        let start = Instant::now();
        sandbox.destroy().await?;
        parts[3].push(start.elapsed());
    }
    for (name, times) in ["create", "first exec", "second exec", "destroy"].iter().zip(&mut parts) {
        times.sort();
        let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)];
        eprintln!("{name:12} median {:?} p90 {:?} p99 {:?}", at(50), at(90), at(99));
    }
    Ok(())
}
