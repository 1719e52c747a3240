//! Much at once: large files, full folders.

use std::path::Path;
use std::time::Instant;

use futures_util::{StreamExt as _, stream};
use warren::{ListItem, ListOptions, ResourceLimits, WriteOptions};

use crate::support::Place;

/// The most memory that this process ever had, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[tokio::test]
async fn a_gibibyte_goes_in_and_out_whole_and_in_little_memory() {
    let limits = ResourceLimits {
        max_write_bytes: Some(1200 << 20),
        max_memory_bytes: Some(1600 << 20),
        ..ResourceLimits::default()
    };
    let place = Place::with(limits).await;
    let before = peak();
    // Each mebibyte differs from the others, and making it costs next to nothing.
    let (pattern, mut count): (Vec<u8>, u64) =
        ((0..1 << 20).map(|i: u32| i.to_le_bytes()[1]).collect(), 0);
    let mut chunk = move || {
        let mut bytes = pattern.clone();
        count += 1;
        bytes[..8].copy_from_slice(&count.to_le_bytes());
        bytes
    };
    let mut again = chunk.clone();
    let data = stream::repeat_with(move || Ok(chunk())).take(1024);
    let began = Instant::now();
    let path = Path::new("/workspace/big");
    let entry = place.files().write(path, WriteOptions::default(), Box::pin(data)).await.unwrap();
    let up = began.elapsed();
    assert_eq!(entry.size, 1 << 30);
    let began = Instant::now();
    let mut contents = place.files().read(path, 0, None).await.unwrap();
    assert_eq!(contents.length, Some(1 << 30));
    let (mut expected, mut at, mut read) = (Vec::new(), 0, 0);
    while let Some(part) = contents.data.next().await {
        let part = part.unwrap();
        read += part.len();
        let mut rest = &part[..];
        while !rest.is_empty() {
            if at == expected.len() {
                (expected, at) = (again(), 0);
            }
            let length = rest.len().min(expected.len() - at);
            assert!(rest[..length] == expected[at..at + length]);
            at += length;
            rest = &rest[length..];
        }
    }
    assert_eq!(read, 1 << 30);
    let grown = peak().saturating_sub(before);
    eprintln!("1 GiB up in {up:?}, down in {:?}, {grown} bytes more at most", began.elapsed());
    assert!(grown < 32 << 20, "{grown}");
    place.end().await;
}

#[tokio::test]
async fn a_folder_of_100_000_files_is_listed_whole_and_in_little_memory() {
    let limits = ResourceLimits { max_write_bytes: Some(1 << 30), ..ResourceLimits::default() };
    let place = Place::with(limits).await;
    let script = "import os\nos.makedirs('/workspace/m')\nfor i in range(100000):\n \
                  os.close(os.open('/workspace/m/file-%d' % i, os.O_CREAT | os.O_WRONLY))";
    place.put("/workspace/make.py", script.as_bytes()).await.unwrap();
    assert_eq!(place.sh("python3 /workspace/make.py").await, "");
    let (before, began) = (peak(), Instant::now());
    let options = ListOptions { depth: 2, limit: 1_000_000 };
    let mut items = place.files().list(Path::new("/workspace"), options).await.unwrap().items;
    let (mut count, mut end) = (0, None);
    while let Some(item) = items.next().await {
        match item.unwrap() {
            ListItem::Entry(_) => count += 1,
            ListItem::End { truncated } => end = Some(truncated),
        }
    }
    let took = began.elapsed();
    assert_eq!((count, end), (100_002, Some(false)));
    let grown = peak().saturating_sub(before);
    let began = Instant::now();
    let gone = place.files().remove(Path::new("/workspace/m"), true).await.unwrap();
    eprintln!(
        "100,000 files listed in {took:?}, {grown} bytes more; gone in {:?}",
        began.elapsed()
    );
    assert_eq!(gone, 100_001);
    assert!(grown < 8 << 20, "{grown}");
    place.end().await;
}
