//! What is said between the daemon, the launcher and init, in both directions. Whatever is understood
//! is written again as it was understood.
#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use warren_init::protocol::files::{FileEvent, FileRequest};
use warren_init::protocol::{
    Done, ExecControl, ExecEvent, Outward, Report, Request, Standing, Tries, parse_inline,
    write_inline,
};

fn both<T: Debug + PartialEq + serde::Serialize + serde::de::DeserializeOwned>(packet: &[u8]) {
    let Ok(message) = parse_inline::<T>(packet) else { return };
    let again = write_inline(&message).expect("what was read can be written");
    let read: T = parse_inline(&again).expect("what was written can be read");
    assert_eq!(read, message);
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, packet)) = data.split_first() else { return };
    match kind % 10 {
        0 => both::<Report>(packet),
        1 => both::<Request>(packet),
        2 => both::<ExecControl>(packet),
        3 => both::<ExecEvent>(packet),
        4 => both::<Done>(packet),
        5 => both::<Standing>(packet),
        6 => both::<FileRequest>(packet),
        7 => both::<FileEvent>(packet),
        8 => both::<Outward>(packet),
        _ => both::<Tries>(packet),
    }
});
