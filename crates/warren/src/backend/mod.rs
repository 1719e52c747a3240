//! The ways of walling a sandbox off from the host.
