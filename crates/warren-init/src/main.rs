//! The program `warren-init`: started by the library as the launcher, it becomes init of each
//! sandbox that it is asked for. It takes no arguments and reads no environment; descriptor 0 is
//! the socket of the library.

fn main() {
    warren_init::launcher::main();
}
