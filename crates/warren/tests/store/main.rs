//! The durable store: what was acknowledged is there, whatever happens to the process, the power or
//! the disk, and what cannot be trusted is refused.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]
#![expect(clippy::print_stdout, reason = "a test says what it measured")]

mod crash;
mod damage;
mod full;
mod keeping;
mod load;
mod model;
mod power;
mod support;
