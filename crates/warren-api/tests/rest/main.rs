//! The dialects as their callers meet them, on a real manager and a backend with no kernel in it.

mod audit;
mod bad_input;
mod description;
mod e2b;
mod events;
mod idempotency;
mod lists;
mod quotas;
mod references;
mod run;
mod sessions;
mod snapshots;
mod support;
mod templates;
mod tenants;
