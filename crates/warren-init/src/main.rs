//! The program `warren-init`: started by the library as the launcher, it becomes init of each
//! sandbox that it is asked for. It takes no arguments and reads no environment; descriptor 0 is
//! the socket of the library. In a sandbox with several users a copy of it is their `sudo`.

fn main() {
    if warren_init::sudo::is_meant() {
        warren_init::sudo::main();
    }
    warren_init::launcher::main();
}
