//! The files of a sandbox, reached from outside, by friends and foes.
//!
//! Those named after THREATS.md try what a hostile sandbox, or a hostile caller, would, wherever paths are walked in
//! another way; what friends do is tried by the `linux` backend.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

mod hostile;
mod load;
#[path = "../shared/plain_user.rs"]
mod plain_user;
mod support;
mod users;
mod uses;

/// Runs the other cases of this very program once more, as `nobody`.
#[test]
fn all_of_it_holds_for_a_plain_user_too() {
    // Without those that need root to make a sandbox.
    let only = ["hostile::", "users::", "uses::", "--skip", "::oci_", "--test-threads", "2"];
    plain_user::rerun(&only);
}
