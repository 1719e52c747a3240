//! Is there an order of steps that explains a history?
//!
//! The calls of a history overlap, and each may have taken effect at any moment between its
//! beginning and its answer. The search goes through the history from the front and, before each
//! answer, tries the steps of the calls under way until the one that was answered has come to its
//! answer; what was tried before from the same place is not tried again. A beginning has no effect,
//! so it is taken as soon as it comes; so is an answer that was arrived at, because a step of
//! another call that could come before it can as well come after.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{Hash, Hasher};

use super::spec::{At, Model, Op, Rules};

/// A beginning or an answer; the number is that of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Begins(usize),
    Answers(usize),
}

/// What clients asked and were told, in the order in which it was seen.
#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) ops: Vec<Op>,
    pub(super) events: Vec<Event>,
}

/// No order explains the history up to this event.
#[derive(Debug)]
pub(super) struct Unexplained {
    pub(super) furthest: usize,
    pub(super) tried: usize,
}

struct Config {
    event: usize,
    model: Model,
    under_way: BTreeMap<usize, At>,
}

impl Config {
    /// Returns what tells it from others; a collision of 128 bits is not to be expected.
    fn key(&self) -> (u64, u64) {
        let hash = |salt: u8| {
            let mut hasher = DefaultHasher::new();
            (salt, self.event, &self.model, &self.under_way).hash(&mut hasher);
            hasher.finish()
        };
        (hash(0), hash(1))
    }
}

/// Finds an order of steps that explains the history; tells how many were tried.
pub(super) fn explain(rules: Rules, history: &History) -> Result<usize, Unexplained> {
    let first = Config { event: 0, model: Model::new(rules), under_way: BTreeMap::new() };
    let mut open = vec![first];
    let mut seen = HashSet::new();
    let mut furthest = 0;
    while let Some(mut config) = open.pop() {
        let answered = loop {
            match history.events.get(config.event) {
                None => return Ok(seen.len()),
                Some(Event::Begins(no)) => {
                    config.under_way.insert(*no, At::Begun);
                }
                Some(Event::Answers(no)) if config.under_way[no] == At::Done => {
                    config.under_way.remove(no);
                }
                Some(Event::Answers(no)) => break *no,
            }
            config.event += 1;
        };
        furthest = furthest.max(config.event);
        if !seen.insert(config.key()) {
            continue;
        }
        // The one that is to be answered is tried first, so it is pushed last.
        let others = config.under_way.keys().filter(|no| **no != answered);
        for no in others.chain([&answered]) {
            let at = &config.under_way[no];
            for (model, at) in config.model.steps(&history.ops[*no], at) {
                let mut under_way = config.under_way.clone();
                under_way.insert(*no, at);
                open.push(Config { event: config.event, model, under_way });
            }
        }
    }
    Err(Unexplained { furthest, tried: seen.len() })
}

impl History {
    /// Returns how many calls overlapped with another.
    pub(super) fn overlapping(&self) -> usize {
        let (mut under_way, mut overlapped) = (BTreeSet::new(), BTreeSet::<usize>::new());
        for event in &self.events {
            match event {
                Event::Begins(no) => {
                    under_way.insert(*no);
                    if under_way.len() > 1 {
                        overlapped.extend(&under_way);
                    }
                }
                Event::Answers(no) => {
                    under_way.remove(no);
                }
            }
        }
        overlapped.len()
    }

    /// Writes it out, up to the event that nothing explains.
    pub(super) fn told(&self, furthest: usize) -> String {
        let mut text = String::new();
        for event in &self.events[..=furthest.min(self.events.len() - 1)] {
            let line = match event {
                Event::Begins(no) => format!("{no:3} {:?}\n", self.ops[*no].call),
                Event::Answers(no) => {
                    let op = &self.ops[*no];
                    format!("{no:3}     = {:?} ({}..{} ms)\n", op.answer, op.from, op.to)
                }
            };
            text.push_str(&line);
        }
        text
    }
}
