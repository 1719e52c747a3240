//! Looks up names.

use std::fmt;
use std::io;
use std::net::{IpAddr, ToSocketAddrs as _};

use async_trait::async_trait;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

/// How much room for its calls a thread has that looks up one name: what it asks are modules of the C library's, and what
/// they do not use costs nothing.
const STACK: usize = 1 << 20;

/// Says that a name is being looked up, until it is dropped. There are so many of them.
#[derive(Debug)]
pub struct Busy {
    _permits: [OwnedSemaphorePermit; 2],
}

impl Busy {
    pub(super) fn new(own: OwnedSemaphorePermit, place: OwnedSemaphorePermit) -> Self {
        Self { _permits: [own, place] }
    }
}

/// Finds the addresses of a name.
#[async_trait]
pub trait Resolve: fmt::Debug + Send + Sync {
    /// Returns them, the best first. What is not public among them is not dialled.
    ///
    /// Whoever asked may have stopped waiting: `busy` is to be kept for as long as anything goes on for it.
    async fn resolve(&self, name: &str, busy: Busy) -> io::Result<Vec<IpAddr>>;
}

/// Asks as every other program of this host does.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemResolver;

#[async_trait]
impl Resolve for SystemResolver {
    async fn resolve(&self, name: &str, busy: Busy) -> io::Result<Vec<IpAddr>> {
        // With the dot it is this very name, and not one below the domain of the host.
        let name = format!("{name}.");
        let look = move || {
            let _busy = busy;
            (name, 0).to_socket_addrs().map(|found| found.map(|address| address.ip()).collect())
        };
        apart(look).await?
    }
}

/// Does something in a thread of its own, and in none of the runtime's: there are only so many of those for everything
/// else that blocks, and the daemon could not end before the last one has.
async fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let (tell, told) = oneshot::channel();
    let work = move || {
        // Whoever asked may be gone.
        let _ = tell.send(work());
    };
    std::thread::Builder::new().name("lookup".to_owned()).stack_size(STACK).spawn(work)?;
    told.await.map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_lookup_that_does_not_end_holds_up_neither_the_runtime_nor_its_end() {
        let one = || {
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            runtime.worker_threads(1).max_blocking_threads(1).enable_all().build().unwrap()
        };
        let long = Duration::from_secs(3);
        let (hold, held) = mpsc::channel::<()>();
        let runtime = one();
        let began = Instant::now();
        runtime.block_on(async {
            let waits = apart(move || held.recv_timeout(10 * long));
            assert!(tokio::time::timeout(long / 100, waits).await.is_err(), "it is under way");
            tokio::task::spawn_blocking(|| ()).await.unwrap();
            assert_eq!(apart(|| 7).await.unwrap(), 7);
        });
        drop(runtime);
        assert!(began.elapsed() < long, "nobody waits for it");
        assert!(hold.send(()).is_ok(), "control: it still goes on");
        // As a thread of the runtime's does.
        let runtime = one();
        let (hold, held) = mpsc::channel::<()>();
        let began = Instant::now();
        drop(runtime.spawn_blocking(move || held.recv_timeout(long / 10)));
        drop(runtime);
        assert!(began.elapsed() >= long / 10, "control: that is waited for");
        drop(hold);
    }
}
