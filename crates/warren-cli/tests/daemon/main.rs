//! The daemon and its clients as their users meet them.

mod clients;
mod serve;
mod support;
