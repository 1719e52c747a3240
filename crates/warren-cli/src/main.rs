//! The one binary of Warren.

mod args;
mod audit;
mod backends;
mod client;
mod commands;
mod commit;
mod config;
mod doctor;
mod execs;
mod failure;
mod file_args;
mod files;
mod keys;
mod notify;
mod output;
mod port;
mod program;
mod receipts;
mod reference;
mod request;
mod run;
mod serve;
mod sh;
mod signals;
mod snapshots;
mod socket;
mod streams;
mod templates;
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
        Action::Serve(args) => (false, serve::serve(&args)),
        Action::Config(args) => (args.json, config::config(&args)),
        Action::Key(action) => (action.is_json(), keys::key(&action)),
        Action::Audit(action) => (action.is_json(), audit::audit(&action)),
        Action::Quota(args) => (args.json, commands::quota(&args)),
        Action::Create(args) => (args.client.json, commands::create(&args)),
        Action::Ls(args) => (args.client.json, commands::ls(&args)),
        Action::Show(args) => (args.client.json, commands::show(&args)),
        Action::Verify(args) => (args.client.json, receipts::verify(&args)),
        Action::Receipt(action) => (action.is_json(), receipts::receipt(&action)),
        Action::Exec(args) => (args.client.json, execs::exec(&args)),
        Action::Shell(args) => (args.client.json, execs::shell(&args)),
        Action::Ps(args) => (args.client.json, execs::ps(&args)),
        Action::Logs(args) => (args.is_json(), execs::logs(&args)),
        Action::Wait(args) => (args.is_json(), execs::wait(&args)),
        Action::Signal(args) => (args.is_json(), execs::signal(&args)),
        Action::Cp(args) => (args.client.json, files::cp(&args)),
        Action::Files(action) => (action.is_json(), files::files(&action)),
        Action::Sh(args) => (args.client.json, sh::run(&args)),
        Action::Attach(args) => (args.client.json, commands::attach(&args)),
        Action::Detach(args) => (args.client.json, commands::change(&args, "detach")),
        Action::Suspend(args) => (args.target.client.json, commands::suspend(&args)),
        Action::Resume(args) => (args.client.json, commands::change(&args, "resume")),
        Action::Snapshot(action) => (action.is_json(), snapshots::snapshot(&action)),
        Action::Fork(args) => (args.client.json, snapshots::fork(&args)),
        Action::Restore(args) => (args.client.json, snapshots::restore(&args)),
        Action::Undo(args) => (args.client.json, snapshots::undo(&args)),
        Action::Diff(args) => (args.client.json, snapshots::diff(&args)),
        Action::Commit(args) => (args.client.json, commit::commit(&args)),
        Action::Kill(args) => (args.client.json, commands::kill(&args)),
        Action::Default(args) => (args.client.json, commands::default(&args)),
        Action::Stats(args) => (args.json, commands::stats(&args)),
        Action::Template(action) => (action.is_json(), templates::template(&action)),
        Action::Port(args) => (args.client.json, port::port(&args)),
        Action::Events(args) => (args.client.json, commands::events(&args)),
        Action::Completions(args) => (false, reference::completions(&args)),
        Action::Man(args) => (false, reference::man(&args)),
        Action::Reference => (false, reference::markdown()),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => failure.report(json),
    }
}
