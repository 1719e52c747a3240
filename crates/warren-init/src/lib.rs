//! What runs inside a Warren sandbox, and how to talk to it.
//!
//! This library holds the [`plan`] that a sandbox is made from, the [`protocol`] spoken with it, the
//! [`log`] of an exec, and the [`IMAGE`] of the program itself. The program has two lives: as the *launcher*, a small
//! single-threaded process beside the library, it copies itself into the namespaces of each new
//! sandbox; the copy becomes *init*, PID 1 of that sandbox, applies the plan and then runs commands.

mod account;
mod apply;
pub mod archive;
mod attempt;
pub mod domain;
mod exec;
mod explain;
mod files;
mod gate;
pub mod launcher;
pub mod log;
mod logged;
#[cfg(feature = "fuzz")]
pub mod names;
#[cfg(not(feature = "fuzz"))]
mod names;
pub mod plan;
mod port;
pub mod probe;
pub mod protocol;
mod refusals;
mod sentry;
mod serve;
pub mod stage;
mod steps;
pub mod sudo;
pub mod terminal;
mod users;
pub mod warden;
mod watch;
mod worker;

/// The program, as a static executable that needs nothing of the host.
///
/// To be executed from a sealed memory file, so that no process inside a sandbox ever runs from,
/// or can reach, a file of the host.
#[cfg(not(warren_init_image))]
pub static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/warren-init"));
