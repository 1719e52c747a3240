//! Who builds and who waits: a fair share of the places for each owner.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// How many builds are under way at once; others wait.
const PLACES: usize = 4;
/// How many of them are one owner's: there is always a place for somebody else.
const PLACES_OF_ONE: usize = PLACES - 1;

/// The places for builds.
#[derive(Debug, Default)]
pub(super) struct Room {
    books: Mutex<Books>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Books {
    /// How many builds each owner has under way.
    building: HashMap<String, usize>,
    /// Who waits, by the number that each was given.
    waiting: Vec<(u64, String)>,
    clock: u64,
}

impl Books {
    /// Says whose turn it is: of those who wait, the one whose owner builds least; of several, the first.
    fn next(&self) -> Option<u64> {
        if self.building.values().sum::<usize>() >= PLACES {
            return None;
        }
        let has = |owner: &str| self.building.get(owner).copied().unwrap_or(0);
        let may = self.waiting.iter().filter(|(_, owner)| has(owner) < PLACES_OF_ONE);
        may.min_by_key(|(number, owner)| (has(owner), *number)).map(|(number, _)| *number)
    }
}

/// A place that somebody has. Dropping it gives it back.
#[derive(Debug)]
pub(super) struct Place {
    room: Arc<Room>,
    owner: String,
}

/// A place in the queue. Dropping it leaves the queue.
struct Waiting<'a> {
    room: &'a Room,
    number: u64,
}

impl Room {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place.
    pub(super) async fn enter(self: &Arc<Self>, owner: &str) -> Place {
        let waiting = self.queue(owner);
        loop {
            // Before it is asked, so that no change is missed.
            let changed = self.changed.notified();
            if self.take(waiting.number, owner) {
                return Place { room: Arc::clone(self), owner: owner.to_owned() };
            }
            changed.await;
        }
    }

    fn queue(&self, owner: &str) -> Waiting<'_> {
        let mut books = self.books();
        books.clock += 1;
        let number = books.clock;
        books.waiting.push((number, owner.to_owned()));
        Waiting { room: self, number }
    }

    /// Takes a place for whoever has this number, if it is its turn.
    fn take(&self, number: u64, owner: &str) -> bool {
        let mut books = self.books();
        if books.next() != Some(number) {
            return false;
        }
        books.waiting.retain(|(waits, _)| *waits != number);
        *books.building.entry(owner.to_owned()).or_default() += 1;
        true
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.room.books().waiting.retain(|(waits, _)| *waits != self.number);
        // Whether it has its place or gave up, it may be another's turn now.
        self.room.changed.notify_waiters();
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut books = self.room.books();
        if let Some(count) = books.building.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                books.building.remove(&self.owner);
            }
        }
        drop(books);
        self.room.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn books(building: &[(&str, usize)], waiting: &[&str]) -> Books {
        let building = building.iter().map(|(owner, count)| ((*owner).to_owned(), *count));
        let waiting = (1..).zip(waiting.iter().map(|owner| (*owner).to_owned()));
        Books { building: building.collect(), waiting: waiting.collect(), clock: 100 }
    }

    #[test]
    fn it_is_the_turn_of_who_builds_least_and_nobody_has_every_place() {
        for (building, waiting, turn) in [
            (&[][..], &["ann", "ben"][..], Some(1)),
            (&[("ann", 1)], &["ann", "ben"], Some(2)),
            (&[("ann", 1), ("ben", 1)], &["ben", "ann"], Some(1)),
            (&[("ann", 2), ("ben", 1)], &["ann"], Some(1)),
            (&[("ann", 3)], &["ann"], None),
            (&[("ann", 3)], &["ann", "ann", "ben"], Some(3)),
            (&[("ann", 3), ("ben", 1)], &["cat"], None),
            (&[("ann", 1)], &[], None),
        ] {
            assert_eq!(books(building, waiting).next(), turn, "{building:?} {waiting:?}");
        }
    }

    #[tokio::test]
    async fn a_place_that_is_given_back_goes_to_who_waits_and_who_gives_up_is_passed_over() {
        let room = Arc::new(Room::default());
        let mut anns = Vec::new();
        for _ in 0..PLACES_OF_ONE {
            anns.push(room.enter("ann").await);
        }
        let mut fourth = Box::pin(room.enter("ann"));
        assert!(fourth.as_mut().now_or_never().is_none(), "the last place is for somebody else");
        let ben = room.enter("ben").await;
        let mut cat = Box::pin(room.enter("cat"));
        let mut dan = Box::pin(room.enter("dan"));
        assert!(cat.as_mut().now_or_never().is_none() && dan.as_mut().now_or_never().is_none());
        drop(cat);
        drop(anns.pop());
        assert!(fourth.as_mut().now_or_never().is_none(), "it came first, and its owner has more");
        let dan = dan.as_mut().now_or_never().expect("who was before it gave up");
        drop((ben, dan));
        assert!(fourth.as_mut().now_or_never().is_some(), "control: there is room again");
        drop(anns);
        assert!(room.books().building.is_empty() && room.books().waiting.is_empty());
    }
}
