//! The program `warren-init`: started by the library as the launcher, it becomes init of each
//! sandbox that it is asked for. It takes no arguments and reads no environment; descriptor 0 is
//! the socket of the library. In a sandbox with several users a copy of it is their `sudo`; under another
//! name it tries the walls around it once and says what happened.

fn main() {
    if warren_init::sudo::is_meant() {
        warren_init::sudo::main();
    }
    if warren_init::probe::is_meant() {
        warren_init::probe::main();
    }
    warren_init::launcher::main();
}
