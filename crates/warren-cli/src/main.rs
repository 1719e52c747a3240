//! The one binary of Warren.

mod args;
mod doctor;
mod failure;
mod output;
mod program;
mod reference;
mod request;
mod run;
mod signals;
mod streams;
mod terminal;
mod units;

use std::process::ExitCode;

use args::Action;

fn main() -> ExitCode {
    let action = match args::parse() {
        Ok(action) => action,
        Err(code) => return code,
    };
    let (json, result) = match action {
        Action::Run(args) => (args.json, run::run(&args)),
        Action::Doctor(args) => (args.json, doctor::doctor(&args)),
        Action::Completions(args) => (false, reference::completions(&args)),
        Action::Man(args) => (false, reference::man(&args)),
        Action::Reference => (false, reference::markdown()),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => failure.report(json),
    }
}
