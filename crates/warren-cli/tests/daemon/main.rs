//! The daemon and its clients as their users meet them.

mod adversity;
mod audit;
mod calls;
mod clients;
mod crash;
mod execs;
mod files;
mod group;
mod host;
mod limits;
mod ports;
mod receipts;
mod restart;
mod serve;
mod service;
mod shells;
mod snapshots;
mod soak;
mod support;
mod templates;
