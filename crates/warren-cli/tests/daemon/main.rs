//! The daemon and its clients as their users meet them.

mod clients;
mod crash;
mod files;
mod serve;
mod support;
