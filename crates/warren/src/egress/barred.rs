//! What a sandbox was refused, summed up: one who is refused a million times a minute is told of in one line.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use warren_init::protocol::denied::Barred;

use crate::{BarredDestination, BarredDestinations, BarredWhy};

/// How many destinations are told apart at a time; of others it is counted how many they were.
const MOST: usize = 32;
/// How much of a name is kept.
const LONGEST: usize = 253;
/// How often a sandbox is told of at once, and after how long once more.
const AT_ONCE: u32 = 16;
const AGAIN: Duration = Duration::from_secs(600);

/// What was refused to a sandbox and was not told yet.
#[derive(Debug, Default)]
pub(crate) struct Tally(Mutex<Sum>);

#[derive(Debug, Default)]
struct Sum {
    barred: Option<BarredDestinations>,
    /// How often it was told of, less what is forgiven, and up to when that is.
    told: u32,
    forgiven: Option<Instant>,
}

impl Tally {
    /// Counts one more. It takes a lock that is held for moments, and no more room than there is for the most.
    pub(crate) fn note(&self, to: &str, port: Option<u16>, why: Barred) {
        let why = match why {
            Barred::NotAllowed => BarredWhy::NotAllowed,
            Barred::NotPublic => BarredWhy::NotPublic,
            Barred::Unclear => BarredWhy::Unclear,
        };
        let to: String = to.chars().take(LONGEST).collect();
        self.sum().note(to, port, why, Utc::now());
    }

    /// Returns what is to be told now; with `all`, whatever there is.
    pub(crate) fn take(&self, all: bool) -> Option<BarredDestinations> {
        self.sum().take(all, Instant::now())
    }

    /// Goes on with what another had.
    pub(crate) fn go_on_from(&self, other: &Self) {
        let before = std::mem::take(&mut *other.sum());
        *self.sum() = before;
    }

    fn sum(&self) -> std::sync::MutexGuard<'_, Sum> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sum {
    fn note(&mut self, to: String, port: Option<u16>, why: BarredWhy, now: DateTime<Utc>) {
        let new = || BarredDestinations { since: now, until: now, list: Vec::new(), others: 0 };
        let barred = self.barred.get_or_insert_with(new);
        barred.until = now;
        let same = |one: &&mut BarredDestination| (&one.to, one.port, one.why) == (&to, port, why);
        let room = barred.list.len() < MOST;
        match barred.list.iter_mut().find(same) {
            Some(known) => known.count += 1,
            None if room => {
                barred.list.push(BarredDestination { to, port, why, count: 1 });
            }
            None => barred.others += 1,
        }
    }

    fn take(&mut self, all: bool, now: Instant) -> Option<BarredDestinations> {
        self.barred.as_ref()?;
        let since = self.forgiven.get_or_insert(now);
        while self.told > 0 && now.saturating_duration_since(*since) >= AGAIN {
            *since += AGAIN;
            self.told -= 1;
        }
        if self.told == 0 {
            *since = now;
        }
        if self.told >= AT_ONCE && !all {
            return None;
        }
        self.told = self.told.saturating_add(1);
        self.barred.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_destination_is_counted_and_of_many_only_the_first_are_told_apart() {
        let tally = Tally::default();
        assert_eq!(tally.take(true), None, "control: nothing was refused");
        for _ in 0..1000 {
            tally.note("evil.example", Some(443), Barred::NotAllowed);
        }
        tally.note("evil.example", Some(80), Barred::NotAllowed);
        tally.note("evil.example", Some(443), Barred::NotPublic);
        let told = tally.take(false).unwrap();
        let counts: Vec<_> = told.list.iter().map(|one| (one.port, one.why, one.count)).collect();
        assert_eq!(
            counts,
            [
                (Some(443), BarredWhy::NotAllowed, 1000),
                (Some(80), BarredWhy::NotAllowed, 1),
                (Some(443), BarredWhy::NotPublic, 1),
            ]
        );
        assert_eq!((told.others, tally.take(true)), (0, None), "told once");
        for i in 0..10_000 {
            tally.note(&format!("{i}.{}", "x".repeat(1000)), Some(1), Barred::Unclear);
        }
        let told = tally.take(true).unwrap();
        assert_eq!((told.list.len(), told.others), (MOST, 10_000 - MOST as u64));
        assert!(told.list.iter().all(|one| one.to.len() <= LONGEST));
    }

    #[test]
    fn whoever_is_refused_all_the_time_is_told_of_ever_more_rarely_and_never_lost() {
        let (mut sum, begin) = (Sum::default(), Instant::now());
        let (mut lines, mut counted) = (0, 0);
        // Once a second for a day, as whoever looks for it does.
        for second in 0..86_400 {
            sum.note("evil.example".to_owned(), None, BarredWhy::NotAllowed, Utc::now());
            if let Some(told) = sum.take(false, begin + Duration::from_secs(second)) {
                lines += 1;
                counted += told.list[0].count;
            }
        }
        assert!(lines > 100 && lines <= 160, "{lines} lines a day");
        let rest = sum.take(true, begin + Duration::from_secs(86_400)).unwrap();
        assert_eq!(counted + rest.list[0].count, 86_400);
        // After a while of quiet it is told at once, as at first.
        let later = begin + Duration::from_secs(200_000);
        for second in 0..u64::from(AT_ONCE) {
            sum.note("a".to_owned(), None, BarredWhy::NotAllowed, Utc::now());
            assert!(sum.take(false, later + Duration::from_secs(second)).is_some(), "{second}");
        }
        sum.note("a".to_owned(), None, BarredWhy::NotAllowed, Utc::now());
        assert_eq!(sum.take(false, later + Duration::from_secs(60)), None);
    }
}
