//! Base roots from outside: what layers become, where images come from, and what is refused.
//!
//! All cases run as root and, by the last test, as a plain user.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

#[path = "../shared/plain_user.rs"]
mod plain_user;

mod layers;
mod oci;
mod planted;
mod registry;
mod sources;
mod tar;

#[test]
fn a_plain_user_has_the_same() {
    let others = ["a_plain_user_has_the_same", "needs_root::"];
    plain_user::rerun(&["--skip", others[0], "--skip", others[1], "--test-threads", "2"]);
}
