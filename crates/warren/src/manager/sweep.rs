//! Ends what timed out, by itself.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tracing::info;

use super::Inner;
use super::keeper::Request;
use super::registry::Life;
use crate::store::Change;

/// How long one sweep waits for sandboxes that are busy with something else.
const PATIENCE: Duration = Duration::from_secs(90);
/// How often what changed without having been written is written.
const FLUSH: Duration = Duration::from_secs(5);

impl Inner {
    /// Sweeps each `cleanup_interval` until the manager stops.
    pub(super) async fn keep_swept(self: Arc<Self>) {
        let pause = self.config.cleanup_interval.max(Duration::from_millis(1));
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = sleep(pause) => {}
            }
            let ended = self.sweep().await;
            if ended > 0 {
                info!(ended, "sessions timed out");
            }
        }
    }

    /// Writes how long sessions have rested now and then, until the manager stops.
    pub(super) async fn keep_written(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = sleep(FLUSH) => {}
            }
            let dirty: Vec<_> = {
                let registry = self.registry();
                let dirty = registry.sandboxes.iter().filter(|(id, entry)| {
                    entry.lives() && registry.sessions_on(id).any(|held| held.dirty)
                });
                dirty.map(|(_, entry)| entry.mailbox.clone()).collect()
            };
            for mailbox in dirty {
                let (reply, _) = oneshot::channel();
                let _ = mailbox.try_send(Request::Flush { reply });
            }
        }
    }

    /// Has every sandbox end what timed out, all at once, and returns how many sessions that were.
    pub(super) async fn sweep(self: &Arc<Self>) -> u64 {
        let mailboxes: Vec<_> = {
            let registry = self.registry();
            let settled = registry.sandboxes.values().filter(|entry| entry.life != Life::Creating);
            settled.map(|entry| entry.mailbox.clone()).collect()
        };
        let mut replies = Vec::with_capacity(mailboxes.len());
        for mailbox in mailboxes {
            let (reply, ended) = oneshot::channel();
            // One with a full mailbox is at work; the next sweep meets it again.
            if mailbox.try_send(Request::Tend { reply }).is_ok() {
                replies.push(ended);
            }
        }
        let mut total = 0;
        let all = async {
            for ended in replies {
                total += ended.await.unwrap_or(0);
            }
        };
        let _ = timeout(PATIENCE, all).await;
        self.recover_rest().await;
        self.collect().await;
        // What the store was to forget and could not be told.
        if !self.registry().owed.is_empty() {
            let _ = self.persist(std::iter::empty::<Change>()).await;
        }
        total
    }
}
