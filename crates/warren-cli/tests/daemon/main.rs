//! The daemon and its clients as their users meet them.

mod clients;
mod crash;
mod serve;
mod shells;
mod support;
