//! `warren cp` and `warren files`: the files of a sandbox.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read, Write};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use hyper::Method;
use hyper::body::Bytes;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use tokio::sync::mpsc;
use warren::archive;
use warren_api::rest::files::{FileChangeView, FileEntryView, FileListView};

use crate::client::Client;
use crate::commands::{find, printed, read, show_object};
use crate::failure::Failure;
use crate::file_args::{
    CpArgs, End, FileArgs, FilesAction, FilesLsArgs, FilesMvArgs, FilesWatchArgs, FilesWriteArgs,
    Inside,
};
use crate::output::{self, say};
use crate::units::Bytes as Size;

const CHUNK: usize = 256 << 10;

/// Escapes whatever is not plain in a query, byte by byte.
fn escaped(path: &Path) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let escape = |byte| if plain(byte) { char::from(byte).into() } else { format!("%{byte:02X}") };
    path.as_os_str().as_bytes().iter().copied().map(escape).collect()
}

fn flag(name: &str, given: bool) -> String {
    if given { format!("&{name}=true") } else { String::new() }
}

fn mode(given: Option<&String>) -> String {
    given.map(|mode| format!("&mode={}", escaped(Path::new(mode)))).unwrap_or_default()
}

/// The files of one sandbox.
struct Files<'a> {
    client: &'a Client,
    id: String,
}

impl<'a> Files<'a> {
    fn of(client: &'a Client, inside: &Inside) -> Result<Self, Failure> {
        Ok(Self { client, id: find(client, &inside.sandbox)?.id })
    }

    fn url(&self, what: &str, path: &Path, more: &str) -> String {
        format!("/v1/sandboxes/{}/files{what}?path={}{more}", self.id, escaped(path))
    }

    fn stat(&self, path: &Path) -> Result<Option<FileEntryView>, Failure> {
        match self.client.get(&self.url("/stat", path, "")) {
            Ok(entry) => Ok(Some(entry)),
            Err(failure) if failure.is_missing_file() => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

/// What a path leads to in the end.
fn kind(entry: &FileEntryView) -> &str {
    entry.resolved_kind.as_deref().unwrap_or(&entry.kind)
}

/// `warren files`.
pub(crate) fn files(action: &FilesAction) -> Result<u8, Failure> {
    match action {
        FilesAction::Ls(args) => ls(args),
        FilesAction::Stat(args) => stat(args),
        FilesAction::Cat(args) => cat(args),
        FilesAction::Write(args) => write(args),
        FilesAction::Mkdir(args) => {
            let client = Client::new(&args.client)?;
            let more = flag("parents", args.parents) + &mode(args.mode.as_ref());
            let url = Files::of(&client, &args.path)?.url("/mkdir", &args.path.path, &more);
            let made: Value = client.send(Method::POST, &url, &serde_json::json!({}), &[])?;
            if args.client.json { show_object(&made) } else { Ok(0) }
        }
        FilesAction::Mv(args) => mv(args),
        FilesAction::Rm(args) => {
            let client = Client::new(&args.client)?;
            let more = flag("recursive", args.recursive);
            let url = Files::of(&client, &args.path)?.url("", &args.path.path, &more);
            let gone: Value = client.send(Method::DELETE, &url, &serde_json::json!({}), &[])?;
            if args.client.json { show_object(&gone) } else { Ok(0) }
        }
        FilesAction::Watch(args) => watch(args),
    }
}

fn ls(args: &FilesLsArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let more = format!("&depth={}&limit={}", args.depth, args.limit);
    let url = Files::of(&client, &args.path)?.url("/list", &args.path.path, &more);
    let mut listed: FileListView = client.get(&url)?;
    listed.entries.sort_by(|a, b| a.path.cmp(&b.path));
    if args.client.json {
        listed.entries.iter().try_for_each(|entry| show_object(entry).map(drop))?;
    } else {
        let rows = listed.entries.iter().map(row).collect();
        let head = ["MODE", "SIZE", "MODIFIED", "NAME"];
        printed(output::print(output::table(&head, rows).as_bytes()))?;
    }
    if listed.truncated {
        say(&format!("warning: there are more than {} entries", args.limit));
    }
    Ok(0)
}

fn row(entry: &FileEntryView) -> Vec<String> {
    let letter = match entry.kind.as_str() {
        "file" => '-',
        kind => kind.chars().next().unwrap_or('?'),
    };
    let link = entry.target.as_ref().map(|target| format!(" -> {target}")).unwrap_or_default();
    vec![
        format!("{letter}{}", entry.mode),
        Size(entry.size).to_string(),
        entry.modified_at.format("%Y-%m-%d %H:%M").to_string(),
        format!("{}{link}", entry.path),
    ]
}

fn stat(args: &FileArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let url = Files::of(&client, &args.path)?.url("/stat", &args.path.path, "");
    let found: Value = client.get(&url)?;
    if args.client.json {
        return show_object(&found);
    }
    let entry: FileEntryView = read(found)?;
    let mut rows = vec![
        ("path", entry.path),
        ("kind", entry.kind),
        ("size", entry.size.to_string()),
        ("mode", entry.mode),
        ("owner", format!("{}:{}", entry.uid, entry.gid)),
        ("modified", entry.modified_at.to_rfc3339()),
    ];
    rows.extend(entry.target.map(|target| ("target", target)));
    rows.extend(entry.resolved.map(|resolved| ("resolved", resolved)));
    let rows = rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
    printed(output::print(output::table(&["FIELD", "VALUE"], rows).as_bytes()))
}

fn cat(args: &FileArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let url = Files::of(&client, &args.path)?.url("", &args.path.path, "");
    client.download(&url, |_| (), |chunk| to_stdout(&chunk))?;
    Ok(0)
}

fn to_stdout(chunk: &[u8]) -> Result<(), Failure> {
    let written = io::stdout().lock().write_all(chunk);
    written.map_err(|error| Failure::system("cannot write to stdout", &error))
}

fn write(args: &FilesWriteArgs) -> Result<u8, Failure> {
    if io::stdin().is_terminal() {
        return Err(Failure::usage("stdin is a terminal", "pipe something in"));
    }
    let client = Client::new(&args.client)?;
    let more = flag("exclusive", args.exclusive)
        + &flag("parents", args.parents)
        + &mode(args.mode.as_ref());
    let url = Files::of(&client, &args.path)?.url("", &args.path.path, &more);
    let method = if args.append { Method::PATCH } else { Method::PUT };
    let bar = Progress::hidden();
    let written: Value = client.upload(method, &url, None, |out| pour(io::stdin(), out, &bar))?;
    if args.client.json { show_object(&written) } else { Ok(0) }
}

fn mv(args: &FilesMvArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let id = Files::of(&client, &args.from)?.id;
    let (from, to) = (escaped(&args.from.path), escaped(&args.to));
    let more = flag("replace", args.force) + &flag("parents", args.parents);
    let url = format!("/v1/sandboxes/{id}/files/move?from={from}&to={to}{more}");
    let moved: Value = client.send(Method::POST, &url, &serde_json::json!({}), &[])?;
    if args.client.json { show_object(&moved) } else { Ok(0) }
}

fn watch(args: &FilesWatchArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let more = flag("recursive", args.recursive);
    let url = Files::of(&client, &args.path)?.url("/watch", &args.path.path, &more);
    client.follow(&url, &[], |kind, data| {
        if kind == "error" {
            let body: warren_api::ErrorBody = read(serde_json::from_str(data).unwrap_or_default())?;
            return Err(Failure::answered(500, body.error));
        }
        if args.client.json {
            return printed(output::print(format!("{data}\n").as_bytes())).map(drop);
        }
        let change: FileChangeView = read(serde_json::from_str(data).unwrap_or_default())?;
        let slash = if change.directory { "/" } else { "" };
        let row = vec![kind.to_owned(), format!("{}{slash}", change.path)];
        // A table of one row, for what it does to names that could drive a terminal.
        let text = output::table(&["      ", ""], vec![row]);
        let line = text.lines().nth(1).unwrap_or_default();
        printed(output::print(format!("{line}\n").as_bytes())).map(drop)
    })?;
    Ok(0)
}

/// A bar on a terminal, and nothing elsewhere.
#[derive(Clone)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn hidden() -> Self {
        Self(ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()))
    }

    fn new(args: &CpArgs, total: Option<u64>) -> Self {
        if args.quiet || args.client.json || !io::stderr().is_terminal() {
            return Self::hidden();
        }
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(10));
        let template = match total {
            Some(_) => "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{spinner} {bytes} {bytes_per_sec}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self(bar)
    }

    fn add(&self, bytes: usize) {
        self.0.inc(bytes as u64);
    }

    fn done(&self) {
        self.0.finish_and_clear();
    }
}

/// Where an upload goes, from the thread that makes it.
pub(crate) struct Outlet(pub(crate) mpsc::Sender<io::Result<Bytes>>);

impl Outlet {
    /// Sends a piece; fails if nobody takes it any more.
    pub(crate) fn send(&self, chunk: Bytes) -> io::Result<()> {
        self.0.blocking_send(Ok(chunk)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Writes to an outlet, counting.
struct Counted<'a>(&'a Outlet, &'a Progress);

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(Bytes::copy_from_slice(bytes))?;
        self.1.add(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(crate) fn pour(mut from: impl Read, to: &Outlet, bar: &Progress) -> Result<(), Failure> {
    loop {
        let mut chunk = vec![0; CHUNK];
        match from.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(got) => {
                chunk.truncate(got);
                bar.add(got);
                // If nobody takes it, the answer says why.
                if to.send(chunk.into()).is_err() {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Failure::system("cannot read what is to be copied", &error)),
        }
    }
}

/// `warren cp`.
pub(crate) fn cp(args: &CpArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let done = match (&args.from, &args.to) {
        (End::Inside(from), End::Local(to)) => download(&client, args, from, Some(to))?,
        (End::Inside(from), End::Stream) => download(&client, args, from, None)?,
        (End::Local(from), End::Inside(to)) => upload(&client, args, Some(from), to)?,
        (End::Stream, End::Inside(to)) => upload(&client, args, None, to)?,
        (End::Inside(_), End::Inside(_)) => {
            let hint = "copy it out first, or use `warren files mv` within one sandbox";
            return Err(Failure::usage("both ends are inside a sandbox", hint));
        }
        (End::Local(_) | End::Stream, End::Local(_) | End::Stream) => {
            let hint = "write SANDBOX:/path for what is inside";
            return Err(Failure::usage("neither end is inside a sandbox", hint));
        }
    };
    if args.client.json { show_object(&done) } else { Ok(0) }
}

/// Finds the path that a copy gets: within a directory that is there, or the path itself.
fn landing(to: &Path, is_directory: bool, from: &Path) -> PathBuf {
    match from.file_name() {
        Some(name) if is_directory || to.as_os_str().as_bytes().ends_with(b"/") => to.join(name),
        _ => to.to_owned(),
    }
}

fn upload(
    client: &Client,
    args: &CpArgs,
    from: Option<&Path>,
    to: &Inside,
) -> Result<Value, Failure> {
    let files = Files::of(client, to)?;
    let Some(from) = from else {
        let bar = Progress::new(args, None);
        let url = files.url("", &to.path, "&parents=true");
        let done = client.upload(Method::PUT, &url, None, |out| pour(io::stdin(), out, &bar));
        bar.done();
        return done;
    };
    let broken =
        |error: &io::Error| Failure::system(&format!("cannot read {}", from.display()), error);
    let is_directory = files.stat(&to.path)?.is_some_and(|entry| kind(&entry) == "directory");
    let target = landing(&to.path, is_directory, from);
    let found = std::fs::metadata(from).map_err(|error| broken(&error))?;
    if found.is_dir() {
        let top = File::open(from).map_err(|error| broken(&error))?;
        let bar = Progress::new(args, None);
        let url = files.url("/tar", &target, "&parents=true");
        let done = client.upload(Method::PUT, &url, Some("application/x-tar"), |out| {
            let counted = Counted(out, &bar);
            let mut buffered = io::BufWriter::with_capacity(CHUNK, counted);
            let packed = archive::pack(&mut buffered, top.into(), b"");
            let packed = packed.and_then(|moved| match buffered.flush() {
                Ok(()) => Ok(moved),
                Err(source) => Err(archive::Trouble::Call { path: Vec::new(), source }),
            });
            match packed {
                Ok(moved) => {
                    skipped(moved.skipped);
                    Ok(())
                }
                // If nobody takes it, the answer says why.
                Err(archive::Trouble::Call { source, .. })
                    if source.kind() == io::ErrorKind::BrokenPipe =>
                {
                    Ok(())
                }
                Err(trouble) => Err(troubled(&trouble)),
            }
        });
        bar.done();
        return done;
    }
    if !found.is_file() {
        let hint = "copy a file or a directory, or pipe it: warren cp - SANDBOX:/path";
        return Err(Failure::usage(format!("{} is no file", from.display()), hint));
    }
    let file = File::open(from).map_err(|error| broken(&error))?;
    let bar = Progress::new(args, Some(found.len()));
    let mode = found.permissions().mode() & 0o777;
    let url = files.url("", &target, &format!("&parents=true&mode={mode:04o}"));
    let done = client.upload(Method::PUT, &url, None, |out| pour(file, out, &bar));
    bar.done();
    done
}

fn skipped(count: u64) {
    if count > 0 {
        say(&format!("warning: {count} left out: not readable, or no file, directory or link"));
    }
}

fn troubled(trouble: &archive::Trouble) -> Failure {
    let shown = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
    match trouble {
        archive::Trouble::Call { path, source } => {
            Failure::system(&format!("cannot copy {}", shown(path)), source)
        }
        archive::Trouble::Refused { path, why } => {
            Failure::fatal("invalid_archive", format!("cannot copy {}: {why}", shown(path)))
        }
        archive::Trouble::TooDeep { path } => {
            let message = format!("cannot copy {}: it is too deep", shown(path));
            Failure::fatal("too_many", message)
        }
    }
}

fn download(
    client: &Client,
    args: &CpArgs,
    from: &Inside,
    to: Option<&Path>,
) -> Result<Value, Failure> {
    let files = Files::of(client, from)?;
    // Asked for once more by what follows: this is only to know what to expect.
    let entry: FileEntryView = client.get(&files.url("/stat", &from.path, ""))?;
    let whole = kind(&entry) == "directory";
    let bar = Progress::new(args, (entry.kind == "file").then_some(entry.size));
    let url = files.url(if whole { "/tar" } else { "" }, &from.path, "");
    let done = match to {
        None => client.download(
            &url,
            |_| (),
            |chunk| {
                bar.add(chunk.len());
                to_stdout(&chunk)
            },
        ),
        Some(to) if whole => {
            download_tree(client, &url, &landing(to, to.is_dir(), &from.path), &bar)
        }
        Some(to) => {
            download_file(client, &url, &landing(to, to.is_dir(), &from.path), &entry, &bar)
        }
    };
    bar.done();
    done?;
    Ok(serde_json::json!({ "path": entry.path, "kind": kind(&entry) }))
}

/// Writes beside the right name first, so that half a file never has it.
fn download_file(
    client: &Client,
    url: &str,
    to: &Path,
    entry: &FileEntryView,
    bar: &Progress,
) -> Result<(), Failure> {
    let broken =
        |error: &io::Error| Failure::system(&format!("cannot write {}", to.display()), error);
    if std::fs::symlink_metadata(to).is_ok_and(|found| !found.is_file() && !found.is_symlink()) {
        // A device or a FIFO: its owner wants the bytes in it.
        let mut file = File::options().write(true).open(to).map_err(|error| broken(&error))?;
        return client.download(
            url,
            |_| (),
            |chunk| {
                bar.add(chunk.len());
                file.write_all(&chunk).map_err(|error| broken(&error))
            },
        );
    }
    // Through a link, as `cp` does.
    let to = std::fs::canonicalize(to).unwrap_or_else(|_| to.to_owned());
    let draft = to.with_file_name(format!(".warren-{}", std::process::id()));
    let mode = u32::from_str_radix(&entry.mode, 8).unwrap_or(0o644) & 0o777;
    let mode = if entry.kind == "file" { mode | 0o600 } else { 0o644 };
    let file = File::options().write(true).create_new(true).mode(mode).open(&draft);
    let mut file = file.map_err(|error| broken(&error))?;
    let copied = client
        .download(
            url,
            |_| (),
            |chunk| {
                bar.add(chunk.len());
                file.write_all(&chunk).map_err(|error| broken(&error))
            },
        )
        .and_then(|()| std::fs::rename(&draft, &to).map_err(|error| broken(&error)));
    if copied.is_err() {
        let _ = std::fs::remove_file(&draft);
    }
    copied
}

/// Reads chunks that come through a channel.
struct Inlet {
    chunks: std::sync::mpsc::Receiver<Bytes>,
    rest: Bytes,
}

impl Read for Inlet {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() {
            match self.chunks.recv() {
                Ok(chunk) => self.rest = chunk,
                Err(_) => return Ok(0),
            }
        }
        let length = buffer.len().min(self.rest.len());
        buffer[..length].copy_from_slice(&self.rest.split_to(length));
        Ok(length)
    }
}

/// Unpacks beneath a directory. What comes was packed inside: it is not trusted.
fn download_tree(client: &Client, url: &str, to: &Path, bar: &Progress) -> Result<(), Failure> {
    let broken =
        |error: &io::Error| Failure::system(&format!("cannot write {}", to.display()), error);
    match std::fs::create_dir(to) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(broken(&error)),
        _ => {}
    }
    let top = File::open(to).map_err(|error| broken(&error))?;
    // A few chunks ahead, and no more.
    let (sender, chunks) = std::sync::mpsc::sync_channel(4);
    std::thread::scope(|scope| {
        let unpacker = scope.spawn(move || {
            let mut inlet = Inlet { chunks, rest: Bytes::new() };
            archive::unpack(&mut inlet, top.as_fd())
        });
        let received = client.download(
            url,
            |_| (),
            |chunk| {
                bar.add(chunk.len());
                // It has stopped, and says why below.
                sender.send(chunk).map_err(|_| Failure::fatal("stopped", "the copy stopped"))
            },
        );
        drop(sender);
        let unpacked = unpacker.join().unwrap_or_else(|_| {
            let why = "unpacking failed";
            Err(archive::Trouble::Refused { path: Vec::new(), why })
        });
        match (received, unpacked) {
            (_, Err(trouble)) => Err(troubled(&trouble)),
            (Err(failure), Ok(_)) => Err(failure),
            (Ok(()), Ok(_)) => Ok(()),
        }
    })
}
