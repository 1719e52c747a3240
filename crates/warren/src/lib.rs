//! x

pub mod profile;
