//! The program `warren-init`: started by the library as the launcher, it becomes init of each
//! sandbox that it is asked for. It takes no arguments and reads no environment; descriptor 0 is
//! the socket of the library.

mod account;
mod apply;
mod exec;
mod files;
mod launcher;
mod logged;
mod port;
mod probe;
mod serve;
mod watch;
mod worker;

fn main() {
    launcher::main();
}
