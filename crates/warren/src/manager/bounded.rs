//! Calls on what is not ours: they end in time, and a panic in one is its failure alone.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::timeout;
use tracing::error;

use crate::{Result, SandboxError};

/// Makes a call on a backend that may take so long; what it had in hand when it did not end in time
/// or panicked is dropped.
pub(super) async fn bounded<T>(
    what: &str,
    time: Duration,
    call: impl Future<Output = Result<T>>,
) -> Result<T> {
    match timeout(time, caught(call)).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(Panicked)) => {
            error!(what, "a backend panicked");
            Err(SandboxError::Internal { message: format!("the backend panicked while {what}") })
        }
        Err(_) => Err(SandboxError::Timeout { what: what.to_owned(), after: time }),
    }
}

/// A call panicked. The message was printed by the panic.
#[derive(Debug)]
pub(super) struct Panicked;

/// Turns a panic into an error, so that whoever waits goes on and can clear up.
pub(super) async fn caught<T>(call: impl Future<Output = T>) -> Result<T, Panicked> {
    let mut call = pin!(call);
    // What the call leaves behind is its own; nothing of it is looked at after a panic.
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(context))) {
        Ok(poll) => poll.map(Ok),
        Err(_) => Poll::Ready(Err(Panicked)),
    })
    .await
}
