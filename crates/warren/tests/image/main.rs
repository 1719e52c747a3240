//! Base roots from outside: what layers become, and what is refused.

mod layers;
mod tar;
