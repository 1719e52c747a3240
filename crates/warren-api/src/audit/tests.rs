//! What is done to a log, and what is told of it.

use std::fs;
use std::path::{Path, PathBuf};

use chrono::Utc;
use tempfile::TempDir;

use super::trail::{KEY, SEAL, Trail};
use super::*;

const SMALL: Limits = Limits { file_bytes: 4 << 10, total_bytes: 1 << 20 };

fn call(path: &str) -> Entry {
    let (path, method, peer) = (path.to_owned(), "GET".to_owned(), "uid:1".to_owned());
    let call = Call { path, method, peer, ..Call::default() };
    Entry::Call(Box::new(call))
}

/// Writes a log of so many calls, as a daemon would, and ends as one that is killed would or not.
fn write(directory: &Path, limits: Limits, calls: usize, sealed: bool) {
    let mut trail = Trail::open(directory, limits).unwrap();
    for i in 0..calls {
        trail.push(&call(&format!("/v1/{i}")), Utc::now());
        trail.write().unwrap();
    }
    if sealed {
        trail.seal().unwrap();
    }
}

fn log_of(limits: Limits, calls: usize) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), limits, calls, true);
    directory
}

fn files(directory: &TempDir) -> Vec<PathBuf> {
    list(directory.path()).unwrap()
}

fn lines(path: &Path) -> Vec<String> {
    fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

fn put(path: &Path, lines: &[String]) {
    fs::write(path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
}

#[test]
fn a_log_is_intact_and_nobody_elses() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = log_of(Limits::default(), 20);
    let report = verify(directory.path()).unwrap();
    assert_eq!((report.intact, report.records, report.torn), (true, 21, 0), "{report:?}");
    assert_eq!((report.first, report.last, report.sealed), (Some(1), Some(21), Some(21)));
    for name in fs::read_dir(directory.path()).unwrap() {
        let mode = name.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    assert_eq!(verify_files(files(&directory)).unwrap().records, 21);
}

#[test]
fn any_byte_that_is_changed_is_found() {
    let directory = log_of(Limits::default(), 6);
    let path = &files(&directory)[0];
    let bytes = fs::read(path).unwrap();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        // Another digit, letter, quote, brace, or end of a line.
        changed[at] ^= 1;
        fs::write(path, &changed).unwrap();
        let report = verify(directory.path()).unwrap();
        assert!(!report.intact, "byte {at}, `{}`", char::from(bytes[at]));
    }
    fs::write(path, &bytes).unwrap();
    assert!(verify(directory.path()).unwrap().intact, "control");
}

#[test]
fn a_line_that_is_gone_moved_added_or_rewritten_is_found_where_it_is() {
    let directory = log_of(Limits::default(), 9);
    let path = &files(&directory)[0];
    let whole = lines(path);
    let expect = |changed: &[String], line: u64, what: &str| {
        put(path, changed);
        let report = verify(directory.path()).unwrap();
        let found: Vec<_> = report.breaks.iter().map(|one| (one.line, one.what.as_str())).collect();
        assert!(found.contains(&(line, what)), "{line} {what}: {found:?}");
    };
    let before = "the record before this is not the one that was written";
    let mut gone = whole.clone();
    gone.remove(4);
    expect(&gone, 5, before);
    expect(&gone, 5, "this is not the next record");
    let mut moved = whole.clone();
    moved.swap(4, 5);
    expect(&moved, 5, "this is not the next record");
    let mut twice = whole.clone();
    twice.insert(4, whole[3].clone());
    expect(&twice, 5, "this is not the next record");
    let mut rewritten = whole.clone();
    rewritten[4] = rewritten[4].replace("/v1/", "/v2/");
    expect(&rewritten, 6, before);
    let mut garbage = whole.clone();
    garbage[4] = "nothing".to_owned();
    expect(&garbage, 6, "before this is what is no record");
    expect(&whole[1..], 1, "the records before this are missing");
    // Nobody without the key can tell a log from another that begins with the same words.
    let mut begun = whole.clone();
    begun[0] = begun[0].replace("\"version\":\"", "\"version\":\"9");
    expect(&begun, 2, before);
    let prev = begun[0].find("\"prev\":\"").unwrap() + 8;
    begun[0].replace_range(prev..prev + 64, &"0".repeat(64));
    expect(&begun, 1, before);
}

#[test]
fn a_log_that_ends_too_early_is_found_by_its_seal() {
    let directory = log_of(Limits::default(), 9);
    let path = &files(&directory)[0];
    let whole = fs::read(path).unwrap();
    for end in 0..whole.len() {
        fs::write(path, &whole[..end]).unwrap();
        let report = verify(directory.path()).unwrap();
        assert!(!report.intact, "cut off at {end}");
    }
    fs::write(path, &whole).unwrap();
    let seal = directory.path().join(SEAL);
    let sealed = fs::read_to_string(&seal).unwrap();
    // Who cannot sign cannot move the seal along.
    fs::write(&seal, sealed.replace("\"last\":10", "\"last\":9")).unwrap();
    let report = verify(directory.path()).unwrap();
    assert_eq!(report.breaks[0].what, "the key did not make this seal");
    fs::remove_file(&seal).unwrap();
    assert_eq!(verify(directory.path()).unwrap().breaks[0].what, "there is no seal");
    // Nor can a daemon that starts on it be made to forget that.
    write(directory.path(), Limits::default(), 1, true);
    let report = verify(directory.path()).unwrap();
    let what = "a daemon did not find the log as it was left";
    assert!(report.breaks.iter().any(|one| one.what == what), "{report:?}");
}

#[test]
fn a_daemon_that_finds_the_end_gone_says_so_for_ever() {
    let directory = log_of(Limits::default(), 9);
    let path = &files(&directory)[0];
    let whole = lines(path);
    put(path, &whole[..5]);
    write(directory.path(), Limits::default(), 3, true);
    write(directory.path(), Limits::default(), 3, true);
    let report = verify(directory.path()).unwrap();
    let found: Vec<_> = report.breaks.iter().map(|one| one.what.as_str()).collect();
    assert!(found.contains(&"this is not the next record"), "{found:?}");
    assert!(found.contains(&"a daemon did not find the log as it was left"), "{found:?}");
    let missing =
        report.breaks.iter().find(|one| one.what == "this is not the next record").unwrap();
    assert_eq!((missing.expected.as_deref(), missing.found.as_deref()), (Some("6"), Some("11")));
}

#[test]
fn a_line_that_was_never_finished_is_no_break_wherever_it_ends() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), Limits::default(), 2, true);
    let path = list(directory.path()).unwrap().pop().unwrap();
    let sealed = fs::read(&path).unwrap();
    write(directory.path(), Limits::default(), 1, false);
    let all = fs::read(&path).unwrap();
    assert!(all.len() > sealed.len(), "control: it was appended to");
    let begun = all.len() - sealed.len();
    // The start of the second daemon is sealed; its call is not.
    let start = all[sealed.len()..].iter().position(|byte| *byte == b'\n').unwrap() + 1;
    for cut in (start..begun).step_by(8).chain([start + 1, begun - 1]) {
        let copy = tempfile::tempdir().unwrap();
        for name in [KEY, SEAL] {
            fs::copy(directory.path().join(name), copy.path().join(name)).unwrap();
        }
        let torn = copy.path().join(path.file_name().unwrap());
        fs::write(&torn, &all[..sealed.len() + cut]).unwrap();
        let report = verify(copy.path()).unwrap();
        assert!(report.intact, "{cut}: {report:?}");
        assert_eq!(report.torn, u64::from(cut > start), "{cut}");
        // The next daemon marks it, and so does one that is cut off at its own first line.
        write(copy.path(), Limits::default(), 1, true);
        let report = verify(copy.path()).unwrap();
        assert!(report.intact, "{cut}: {report:?}");
        if cut == start {
            continue;
        }
        assert_eq!(fs::read(&torn).unwrap(), &all[..sealed.len() + cut], "nothing is tidied away");
        // What is torn cannot be changed either.
        let mut changed = all[..sealed.len() + cut].to_vec();
        *changed.last_mut().unwrap() ^= 1;
        fs::write(&torn, &changed).unwrap();
        assert!(!verify(copy.path()).unwrap().intact, "{cut}");
    }
}

#[test]
fn a_daemon_that_is_cut_off_at_its_first_line_again_and_again_leaves_a_log() {
    let directory = log_of(Limits { file_bytes: 1, ..SMALL }, 0);
    // The file after the first line is new and empty; each of these leaves half a line in one.
    for round in 0..3 {
        let torn = directory.path().join(format!("{:020}-{round}.jsonl", 2));
        assert_eq!(torn.exists(), round == 0, "control");
        fs::write(torn, format!("{{\"seq\":{round}")).unwrap();
        assert!(verify(directory.path()).unwrap().intact);
    }
    write(directory.path(), Limits::default(), 1, true);
    let report = verify(directory.path()).unwrap();
    assert!(report.intact, "{report:?}");
    assert_eq!((report.records, report.torn), (3, 1));
}

#[test]
fn the_chain_goes_on_over_files_and_restarts_and_the_oldest_give_way() {
    let directory = tempfile::tempdir().unwrap();
    for _ in 0..4 {
        write(directory.path(), SMALL, 40, true);
    }
    let report = verify(directory.path()).unwrap();
    assert!(report.intact && report.files > 3, "{report:?}");
    assert_eq!((report.first, report.records), (Some(1), 4 * 41));
    // Without the first, or one between, something is missing.
    for gone in [0, 1] {
        let path = &files(&directory)[gone];
        let bytes = fs::read(path).unwrap();
        fs::remove_file(path).unwrap();
        assert!(!verify(directory.path()).unwrap().intact, "{gone}");
        fs::write(path, bytes).unwrap();
    }
    let limits = Limits { total_bytes: 16 << 10, ..SMALL };
    write(directory.path(), limits, 200, true);
    let report = verify(directory.path()).unwrap();
    assert!(report.intact && report.first > Some(1), "{report:?}");
    let bytes: u64 = files(&directory).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    assert!(bytes <= 24 << 10, "{bytes}");
    let oldest = files(&directory).swap_remove(0);
    fs::remove_file(oldest).unwrap();
    let report = verify(directory.path()).unwrap();
    assert_eq!(report.breaks[0].what, "the records before this are missing");
    // A daemon that starts on it does not make that good.
    write(directory.path(), limits, 1, true);
    assert!(!verify(directory.path()).unwrap().intact);
}

#[test]
fn a_log_without_its_key_is_not_continued() {
    let directory = log_of(Limits::default(), 1);
    fs::remove_file(directory.path().join(KEY)).unwrap();
    let refused = Trail::open(directory.path(), Limits::default()).unwrap_err();
    assert!(matches!(refused, AuditError::Key { .. }), "{refused:?}");
    assert!(matches!(verify(directory.path()), Err(AuditError::Key { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_many_note_at_once_is_all_there_and_the_end_is_sealed() {
    let directory = tempfile::tempdir().unwrap();
    let limits = Limits { file_bytes: 256 << 10, ..Limits::default() };
    let audit = Audit::open(directory.path(), limits).unwrap();
    let tasks = tokio_util::task::TaskTracker::new();
    for who in 0..8 {
        let audit = audit.clone();
        tasks.spawn(async move {
            for i in 0..1_000 {
                audit.before(call(&format!("/{who}/{i}"))).await.unwrap();
            }
        });
    }
    tasks.close();
    tasks.wait().await;
    audit.stop().await;
    assert_eq!(audit.before(call("/late")).await, Err(Unwritable), "nothing is done after the end");
    let report = verify(directory.path()).unwrap();
    assert!(report.intact, "{:?}", report.breaks.first());
    assert_eq!((report.records, report.sealed), (8_002, report.last));
    let mut seen = vec![0; 8];
    read(&files(&directory), |_, record| {
        if let Some(path) = record["path"].as_str() {
            let (who, i) = path[1..].split_once('/').unwrap();
            let next = &mut seen[who.parse::<usize>().unwrap()];
            assert_eq!(i.parse::<usize>().unwrap(), *next, "in the order of whoever asked");
            *next += 1;
        }
        true
    })
    .unwrap();
    assert_eq!(seen, [1_000; 8]);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_log_cannot_be_written_nothing_is_begun_and_nothing_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let audit = Audit::open(directory.path(), Limits { file_bytes: 600, ..SMALL }).unwrap();
    assert!(audit.is_ready(), "control");
    // There is nowhere to go on once the file is full.
    let away = directory.path().with_extension("away");
    fs::rename(directory.path(), &away).unwrap();
    let mut noted = 0;
    while audit.before(call("/x")).await.is_ok() {
        noted += 1;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!audit.is_ready());
    // What is under way waits for its turn.
    audit.after(call("/y")).await.unwrap();
    fs::rename(&away, directory.path()).unwrap();
    while !audit.is_ready() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    audit.before(call("/z")).await.unwrap();
    audit.stop().await;
    let report = verify(directory.path()).unwrap();
    assert!(report.intact, "{report:?}");
    assert_eq!(report.records, noted + 4, "start, those, one that waited, one after, and the end");
}
