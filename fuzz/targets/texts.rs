//! What is written as lines of text: recipes of templates, what the kernel says of mounts and control
//! groups, names of images.
#![no_main]

use libfuzzer_sys::fuzz_target;
use warren::image::{Reference, Source};

fuzz_target!(|data: &[u8]| {
    let Some((kind, text)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(text);
    match kind % 4 {
        0 => drop(warren::template::parse(&text)),
        1 => {
            let (mounts, own) = text.split_once("\n\n").unwrap_or((&text, ""));
            drop(warren_sys::cgroup::Layout::parse(mounts, own));
        }
        2 => {
            if let Ok(reference) = text.parse::<Reference>() {
                // A tag beside a digest means nothing, and is not shown.
                let again = reference.to_string().parse::<Reference>();
                let again = again.expect("a name is a name");
                assert_eq!(again.to_string(), reference.to_string());
            }
        }
        _ => drop(text.parse::<Source>()),
    }
});
