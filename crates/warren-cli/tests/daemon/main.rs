//! The daemon and its clients as their users meet them.

mod adversity;
mod audit;
mod calls;
mod clients;
mod crash;
mod execs;
mod files;
mod frames;
mod group;
mod host;
mod limits;
mod many;
mod ports;
mod readers;
mod receipts;
mod restart;
mod secrets;
mod serve;
mod service;
mod shells;
mod shortage;
mod snapshots;
mod soak;
mod support;
mod templates;
