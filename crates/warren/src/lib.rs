//! Sandboxes for AI agents and other untrusted code, as a library.
//!
//! [`contract`] holds the public types and traits, all re-exported here so that `use warren::*;`
//! is enough for an embedder; [`backend`] holds the ways of walling a sandbox off from the host;
//! [`store`] keeps what outlives the daemon.

pub mod backend;
pub mod contract;
pub mod profile;
pub mod store;

pub use contract::*;
