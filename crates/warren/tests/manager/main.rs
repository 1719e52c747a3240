//! The manager on the fake backend, rule by rule of the contract.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

mod acquire;
mod concurrency;
mod durability;
mod health;
mod history;
mod isolation;
mod model;
mod pool;
mod receipts;
mod sessions;
mod snapshots;
mod support;
