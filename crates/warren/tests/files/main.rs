//! The files of a sandbox of the linux backend, reached from outside, by friends and foes.
//!
//! Those named after THREATS.md try what a hostile sandbox, or a hostile caller, would.

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
    plain_user::rerun(&["hostile::", "users::", "uses::", "--test-threads", "2"]);
}
