//! When something that is kept is over, by a clock that nobody can set.
//!
//! The wall clock is for people: it may be set by a day at any moment, and nothing may end early or live longer for
//! that. What lives in this process goes by `tokio::time::Instant`. What outlives it is written with two times: that of
//! the wall clock, which is shown and which is all there is once the host was started anew, and its [`BootMoment`].

use std::fs;
use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use chrono::{DateTime, Utc};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// A moment by the clock that began when the host did (`CLOCK_BOOTTIME`): it counts while the host sleeps, and is never
/// set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootMoment {
    /// Which run of the host that was.
    boot: String,
    millis: u64,
}

/// What the clocks say at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clocks {
    /// The clock on the wall.
    pub wall: DateTime<Utc>,
    /// The clock of this run of the host; none where the host does not say which run it is.
    pub boot: Option<BootMoment>,
}

impl Clocks {
    /// Reads them.
    pub fn now() -> Self {
        let time = clock_gettime(ClockId::Boottime);
        let time = u64::try_from(time.tv_sec).unwrap_or(0) * 1000
            + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000_000;
        let boot = boot_id().ok().map(|boot| BootMoment { boot, millis: time });
        Self { wall: Utc::now(), boot }
    }

    /// Returns the moment that is so long from now.
    pub fn moment_in(&self, time: Duration) -> Option<BootMoment> {
        let now = self.boot.clone()?;
        let time = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Some(BootMoment { millis: now.millis.saturating_add(time), ..now })
    }

    /// Returns how long it is until a moment that was written down, nothing if it has passed: by the wall clock only if
    /// there is no moment of this run of the host.
    pub fn until(&self, wall: DateTime<Utc>, moment: Option<&BootMoment>) -> Duration {
        match (&self.boot, moment) {
            (Some(now), Some(then)) if now.boot == then.boot => {
                Duration::from_millis(then.millis.saturating_sub(now.millis))
            }
            _ => wall.signed_duration_since(self.wall).to_std().unwrap_or(Duration::ZERO),
        }
    }
}

/// Returns what tells one run of the host from another.
pub(crate) fn boot_id() -> io::Result<String> {
    // The same for as long as this process can live.
    static KNOWN: OnceLock<String> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return Ok(known.clone());
    }
    let read = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
    Ok(KNOWN.get_or_init(|| read).clone())
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3_600);

    fn clocks(boot: &str, seconds: u64) -> Clocks {
        let boot = BootMoment { boot: boot.to_owned(), millis: seconds * 1000 };
        Clocks { wall: DateTime::UNIX_EPOCH + TimeDelta::days(20_000), boot: Some(boot) }
    }

    /// Sets the wall clock and nothing else.
    fn set(clocks: &Clocks, by: TimeDelta) -> Clocks {
        Clocks { wall: clocks.wall + by, boot: clocks.boot.clone() }
    }

    #[test]
    fn b19_in_one_run_of_the_host_setting_the_clock_moves_no_end() {
        let written = clocks("a", 100);
        let (end, moment) = (written.wall + HOUR, written.moment_in(HOUR));
        let later = clocks("a", 100 + 1800);
        for days in [-1, 0, 1] {
            let later = set(&later, TimeDelta::days(days));
            assert_eq!(later.until(end, moment.as_ref()), HOUR / 2, "{days} days");
            let over = set(&clocks("a", 100 + 3600), TimeDelta::days(days));
            assert_eq!(over.until(end, moment.as_ref()), Duration::ZERO, "{days} days");
        }
        // Control: the wall clock alone would have it a day off.
        assert_eq!(set(&later, TimeDelta::days(1)).until(end, None), Duration::ZERO);
        assert_eq!(set(&later, TimeDelta::days(-1)).until(end, None), HOUR * 25);
    }

    #[test]
    fn after_a_reboot_and_for_old_records_the_wall_clock_counts() {
        let written = clocks("a", 100_000);
        let (end, moment) = (written.wall + HOUR, written.moment_in(HOUR));
        let rebooted = set(&clocks("b", 5), TimeDelta::minutes(15));
        assert_eq!(rebooted.until(end, moment.as_ref()), HOUR * 3 / 4);
        assert_eq!(rebooted.until(end, None), HOUR * 3 / 4);
        let nameless = Clocks { boot: None, ..rebooted };
        assert_eq!(nameless.until(end, moment.as_ref()), HOUR * 3 / 4);
        assert_eq!(nameless.moment_in(HOUR), None);
    }

    #[test]
    fn no_time_is_too_long() {
        let now = Clocks::now();
        assert!(now.boot.is_some(), "this host says which run of it this is");
        let moment = now.moment_in(Duration::MAX);
        assert!(now.until(now.wall, moment.as_ref()) > HOUR);
        assert_eq!(now.until(DateTime::<Utc>::MIN_UTC, None), Duration::ZERO);
        assert!(now.until(DateTime::<Utc>::MAX_UTC, None) > HOUR);
    }
}
