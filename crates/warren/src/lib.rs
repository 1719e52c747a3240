//! Sandboxes for AI agents and other untrusted code, as a library.
//!
//! [`contract`] holds the public types and traits, all re-exported here so that `use warren::*;`
//! is enough for an embedder; [`backend`] holds the ways of walling a sandbox off from the host;
//! [`layers`] keeps the files that sandboxes stand on, and [`image`] brings them from elsewhere;
//! [`manager`] gives sandboxes to clients and takes them back; [`store`] keeps what outlives it;
//! [`template`] builds what sandboxes are made from by name; [`receipt`] says what was tried of one;
//! [`egress`] lets them reach what they may; [`shell`] runs commands in one shell that keeps its state; [`clock`] says when something kept is over.

pub mod backend;
pub mod clock;
pub mod contract;
pub mod denial;
pub mod egress;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
pub mod image;
pub mod layers;
pub mod manager;
pub mod profile;
pub mod receipt;
pub mod shell;
pub mod snapshot;
pub mod store;
pub mod template;

pub use contract::*;
pub use egress::{EgressHost, EgressOptions};
pub use manager::{DefaultSandboxManager, Shutdown};
#[doc(inline)]
pub use warren_init::archive;
