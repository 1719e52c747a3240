//! The program `warren-init`: started by the library as the launcher, it becomes init of each
//! sandbox that it is asked for. It reads no environment; descriptor 0 is the socket of the library. With the
//! argument `stage` it makes one sandbox by a container runtime and guards it, and with `contained` it is
//! what that runtime starts. In a sandbox with several users a copy of it is their `sudo`; under another
//! name it tries the walls around it once and says what happened.

fn main() {
    if warren_init::sudo::is_meant() {
        warren_init::sudo::main();
    }
    if warren_init::probe::is_meant() {
        warren_init::probe::main();
    }
    match std::env::args_os().nth(1) {
        Some(life) if life == "stage" => warren_init::stage::main(),
        Some(life) if life == "contained" => warren_init::stage::inside(),
        Some(_) | None => warren_init::launcher::main(),
    }
}
