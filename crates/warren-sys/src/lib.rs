//! x

pub mod seccomp;
