//! The binary as its users meet it: stdout, stderr, exit code.

mod bad_input;
mod ends;
mod json;
mod needs_root;
mod network;
mod program;
mod reference;
mod signals;
mod streams;
mod support;
mod terminal;
