//! How a sandbox begins, pauses, goes on and ends, and when.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use chrono::Utc;
use tokio::time::Instant;
use warren::SandboxSession;
use warren::clock::Clocks;

use super::super::record::{OnTimeout, PauseMode, Record, State};
use super::wire::MetricView;
use super::{Control, Live, bad_request, guard, not_found};
use crate::error::ApiError;

/// How often it is looked what sandboxes use. It also tells the manager that they are wanted.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(5);
/// How many of those are remembered of each: an hour.
const MAX_SAMPLES: usize = 720;
/// The longest time that can be asked for.
const MAX_TIMEOUT_S: u64 = 30 * 86_400;

/// What was seen of one sandbox, oldest first.
#[derive(Debug, Default)]
pub(super) struct Samples {
    kept: VecDeque<MetricView>,
    /// The time on a CPU at the last look, and when that was.
    last: Option<(u64, Instant)>,
}

impl Samples {
    pub(super) fn all(&self) -> impl DoubleEndedIterator<Item = &MetricView> {
        self.kept.iter()
    }
}

impl Control {
    /// Ends or pauses each sandbox when its time is up, until the API stops.
    pub(super) async fn keep_time(self) {
        let stop = self.api().0.stop.clone();
        loop {
            let changed = self.0.changed.notified();
            let running = self.all().into_iter().filter(|live| live.state() == State::Running);
            let (due, next): (Vec<_>, Vec<_>) =
                running.partition(|live| live.deadline() <= Instant::now());
            for live in due {
                let this = self.clone();
                self.api().0.tasks.spawn(async move { this.expire(&live).await });
            }
            let next = next.iter().map(|live| live.deadline()).min();
            let next = next.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            tokio::select! {
                () = stop.cancelled() => return,
                () = changed => {}
                () = tokio::time::sleep_until(next) => {}
            }
        }
    }

    /// Does what is to be done with a sandbox whose time is up.
    async fn expire(&self, live: &Arc<Live>) {
        let _turn = live.turn.lock().await;
        // Somebody may have given it more time, or paused it, before we had our turn.
        if live.state() != State::Running || live.deadline() > Instant::now() {
            return;
        }
        let done = match guard(&live.record).on_timeout {
            OnTimeout::Kill => Ok(None),
            OnTimeout::Pause(mode) => Ok(Some(mode)),
        };
        let done: Result<(), ApiError> = match done {
            Ok(None) => self.end(live).await,
            Ok(Some(mode)) => self.stop_running(live, mode).await,
            Err(error) => Err(error),
        };
        if let Err(error) = done {
            tracing::warn!(sandbox = live.id, ?error, "cannot end or pause at its time");
            // Not at once again.
            *guard(&live.deadline) = Instant::now() + Duration::from_secs(1);
            self.0.changed.notify_one();
        }
    }

    /// Looks at what sandboxes use, until the API stops.
    pub(super) async fn keep_sampled(self) {
        let stop = self.api().0.stop.clone();
        loop {
            for live in self.all() {
                if live.state() == State::Running {
                    self.sample(&live).await;
                }
            }
            let pause = tokio::time::sleep(SAMPLE_INTERVAL);
            if stop.run_until_cancelled(pause).await.is_none() {
                return;
            }
        }
    }

    /// Looks at what a sandbox uses.
    pub(super) async fn sample(&self, live: &Live) {
        let record = live.record();
        let Ok(Some(sandbox)) = self.api().manager().get_sandbox(&record.sandbox).await else {
            return;
        };
        let Ok(usage) = sandbox.resource_usage().await else { return };
        let mut samples = guard(&live.samples);
        let now = Instant::now();
        let since = match samples.last.replace((usage.cpu_time_ms, now)) {
            Some((cpu, at)) => (usage.cpu_time_ms.saturating_sub(cpu), now - at),
            None => (usage.cpu_time_ms, Duration::from_millis(usage.wall_time_ms)),
        };
        let elapsed = since.1.as_secs_f64().max(0.001);
        #[expect(clippy::cast_precision_loss, reason = "a percentage needs no more digits")]
        let used = since.0 as f64 / 10.0 / elapsed;
        let timestamp = Utc::now();
        samples.kept.push_back(MetricView {
            timestamp,
            timestamp_unix: timestamp.timestamp(),
            cpu_count: record.cpus,
            cpu_used_pct: (used * 100.0).round() / 100.0,
            mem_used: usage.peak_memory_bytes,
            mem_total: record.memory_mb << 20,
            mem_cache: 0,
            disk_used: usage.bytes_written.min(record.disk_mb << 20),
            disk_total: record.disk_mb << 20,
        });
        if samples.kept.len() > MAX_SAMPLES {
            samples.kept.pop_front();
        }
    }

    pub(super) async fn session(&self, record: &Record) -> Result<SandboxSession, ApiError> {
        let session = self.api().manager().get_session(&record.session).await?;
        session.ok_or_else(|| not_found(&record.id()))
    }

    /// Ends a sandbox for good. Its turn must be held.
    pub(super) async fn end(&self, live: &Live) -> Result<(), ApiError> {
        guard(&live.over).cancel();
        let manager = self.api().manager();
        let record = live.record();
        if let Some(session) = manager.get_session(&record.session).await? {
            manager.terminate(&session).await?;
            self.api().look_at(&session).await?;
        }
        // Others may have joined it by the native dialect; to E2B there is one owner.
        while let Some(session) = manager.get_session_by_sandbox(&record.sandbox).await? {
            manager.terminate(&session).await?;
            self.api().look_at(&session).await?;
        }
        self.erase(&live.id).await;
        Ok(())
    }

    /// Stops a sandbox and keeps it. Its turn must be held.
    pub(super) async fn stop_running(&self, live: &Live, mode: PauseMode) -> Result<(), ApiError> {
        let mut record = live.record();
        let session = self.session(&record).await?;
        if mode == PauseMode::Filesystem {
            // Its files are what they were, and it has booted anew: nothing runs in it.
            guard(&live.over).cancel();
            self.api().manager().savepoint(&session).await?;
            self.api().manager().undo(&session).await?;
        }
        // Written first: a sandbox that was to be paused and is not is stopped by whoever asks next.
        record.state = State::Paused(mode);
        self.write(&record).await?;
        guard(&live.over).cancel();
        if let Err(error) = self.api().manager().suspend(&session).await {
            self.write(&live.record()).await?;
            *guard(&live.over) = Default::default();
            return Err(error.into());
        }
        guard(&live.record).state = record.state;
        self.api().look_at(&session).await?;
        Ok(())
    }

    /// Lets a sandbox go on that was paused. Its turn must be held.
    pub(super) async fn go_on(&self, live: &Live, timeout_s: u64) -> Result<(), ApiError> {
        let mut record = live.record();
        if record.state == State::Running {
            return Ok(());
        }
        let session = self.session(&record).await?;
        self.api().manager().resume(&session).await?;
        record.state = State::Running;
        lease(&mut record, timeout_s)?;
        self.write(&record).await?;
        *guard(&live.over) = Default::default();
        *guard(&live.deadline) = Instant::now() + Duration::from_secs(timeout_s);
        *guard(&live.record) = record;
        self.0.changed.notify_one();
        self.api().look_at(&session).await?;
        Ok(())
    }

    /// Lets a sandbox go on because somebody came to it.
    pub(super) async fn wake(&self, live: &Live) -> Result<(), ApiError> {
        let _turn = live.turn.lock().await;
        let timeout_s = guard(&live.record).timeout_s;
        self.go_on(live, timeout_s).await
    }

    /// Has a sandbox end so long from now; `Longer` leaves a later end as it is. Its turn must be held.
    pub(super) async fn give_time(
        &self,
        live: &Live,
        timeout_s: u64,
        how: Time,
    ) -> Result<(), ApiError> {
        let mut record = live.record();
        lease(&mut record, timeout_s)?;
        let deadline = Instant::now() + Duration::from_secs(timeout_s);
        if how == Time::Longer && live.deadline() >= deadline {
            return Ok(());
        }
        self.write(&record).await?;
        *guard(&live.record) = record;
        *guard(&live.deadline) = deadline;
        self.0.changed.notify_one();
        Ok(())
    }
}

/// Whether a new end may be before the old one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Time {
    Exact,
    Longer,
}

/// Writes into a record for how long it is wanted from now on.
pub(super) fn lease(record: &mut Record, timeout_s: u64) -> Result<(), ApiError> {
    if timeout_s > MAX_TIMEOUT_S {
        return Err(bad_request(format!("timeout cannot be greater than {MAX_TIMEOUT_S} seconds")));
    }
    record.lease(timeout_s, &Clocks::now());
    Ok(())
}
