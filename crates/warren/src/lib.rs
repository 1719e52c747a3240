//! Sandboxes for AI agents and other untrusted code, as a library.
//!
//! [`contract`] holds the public types and traits, all re-exported here so that `use warren::*;`
//! is enough for an embedder; [`backend`] holds the ways of walling a sandbox off from the host;
//! [`manager`] gives sandboxes to clients and takes them back; [`store`] keeps what outlives it.

pub mod backend;
pub mod contract;
pub mod manager;
pub mod profile;
pub mod store;

pub use contract::*;
pub use manager::{DefaultSandboxManager, Shutdown};
#[doc(inline)]
pub use warren_init::archive;
