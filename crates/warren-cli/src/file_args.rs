//! What can be written on the command line about files.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::args::ClientArgs;

/// A path inside a sandbox: `SANDBOX:/path`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inside {
    pub(crate) sandbox: String,
    pub(crate) path: PathBuf,
}

/// One end of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Stdin or stdout.
    Stream,
    /// A path of the caller's own.
    Local(PathBuf),
    /// A path inside a sandbox.
    Inside(Inside),
}

/// Reads one end of a copy: what has a `:` before any `/` is inside a sandbox.
fn end(text: &OsStr) -> Result<End, String> {
    let bytes = text.as_bytes();
    if bytes == b"-" {
        return Ok(End::Stream);
    }
    let colon = bytes.iter().position(|byte| *byte == b':');
    let slash = bytes.iter().position(|byte| *byte == b'/').unwrap_or(bytes.len());
    let Some(colon) = colon.filter(|colon| *colon < slash) else {
        return Ok(End::Local(text.into()));
    };
    let sandbox =
        std::str::from_utf8(&bytes[..colon]).map_err(|_| "the sandbox's name is no text")?;
    if sandbox.is_empty() {
        return Err(
            "the sandbox has no name; write SANDBOX:/path, or ./ before a local path".into()
        );
    }
    let path = OsString::from_vec(bytes[colon + 1..].to_vec());
    if !path.as_bytes().starts_with(b"/") {
        return Err("a path inside a sandbox begins with `/`, as in SANDBOX:/workspace/file".into());
    }
    Ok(End::Inside(Inside { sandbox: sandbox.to_owned(), path: path.into() }))
}

fn inside(text: &OsStr) -> Result<Inside, String> {
    match end(text)? {
        End::Inside(inside) => Ok(inside),
        End::Stream | End::Local(_) => Err("write it as SANDBOX:/path".into()),
    }
}

/// Makes a parser of clap's out of one of ours, for text that need not be UTF-8.
macro_rules! parser {
    ($name:ident, $function:ident, $output:ty) => {
        #[derive(Clone)]
        struct $name;

        impl clap::builder::TypedValueParser for $name {
            type Value = $output;

            fn parse_ref(
                &self,
                command: &clap::Command,
                _: Option<&clap::Arg>,
                value: &OsStr,
            ) -> Result<$output, clap::Error> {
                $function(value).map_err(|why| {
                    let message = format!("invalid value '{}': {why}\n", value.to_string_lossy());
                    clap::Error::raw(clap::error::ErrorKind::ValueValidation, message)
                        .with_cmd(command)
                })
            }
        }
    };
}

parser!(EndParser, end, End);
parser!(InsideParser, inside, Inside);

/// What to copy where.
#[derive(Debug, Args)]
pub(crate) struct CpArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Show no progress.
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// What: a path, SANDBOX:/path, or `-` for stdin.
    #[arg(value_name = "SRC", value_parser = EndParser)]
    pub(crate) from: End,
    /// Where to: a path, SANDBOX:/path, or `-` for stdout.
    #[arg(value_name = "DST", value_parser = EndParser)]
    pub(crate) to: End,
}

/// What to do with files.
#[derive(Debug, Subcommand)]
pub(crate) enum FilesAction {
    /// List a directory.
    Ls(FilesLsArgs),
    /// Show what is at a path.
    Stat(FileArgs),
    /// Print a file.
    Cat(FileArgs),
    /// Write stdin to a file: whole, or not at all.
    Write(FilesWriteArgs),
    /// Make a directory.
    Mkdir(FilesMkdirArgs),
    /// Give something another name.
    Mv(FilesMvArgs),
    /// Remove something; links are not followed.
    Rm(FilesRmArgs),
    /// Tell what happens in a directory.
    Watch(FilesWatchArgs),
}

impl FilesAction {
    pub(crate) fn is_json(&self) -> bool {
        match self {
            Self::Ls(args) => args.client.json,
            Self::Stat(args) | Self::Cat(args) => args.client.json,
            Self::Write(args) => args.client.json,
            Self::Mkdir(args) => args.client.json,
            Self::Mv(args) => args.client.json,
            Self::Rm(args) => args.client.json,
            Self::Watch(args) => args.client.json,
        }
    }
}

/// Which file.
#[derive(Debug, Args)]
pub(crate) struct FileArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// The path.
    #[arg(value_name = "SANDBOX:PATH", value_parser = InsideParser)]
    pub(crate) path: Inside,
}

/// Which directory to list.
#[derive(Debug, Args)]
pub(crate) struct FilesLsArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// How deep, 1 to 64.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) depth: u16,
    /// How many entries at most.
    #[arg(long, value_name = "NUMBER", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) limit: u32,
    /// The directory.
    #[arg(value_name = "SANDBOX:PATH", value_parser = InsideParser)]
    pub(crate) path: Inside,
}

/// Which file to write, and how.
#[derive(Debug, Args)]
pub(crate) struct FilesWriteArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Add to what is there.
    #[arg(long, short)]
    pub(crate) append: bool,
    /// Fail if there is something already.
    #[arg(long, conflicts_with = "append")]
    pub(crate) exclusive: bool,
    /// Make the directories on the way.
    #[arg(long, short)]
    pub(crate) parents: bool,
    /// Permissions, in octal.
    #[arg(long, value_name = "MODE")]
    pub(crate) mode: Option<String>,
    /// The file.
    #[arg(value_name = "SANDBOX:PATH", value_parser = InsideParser)]
    pub(crate) path: Inside,
}

/// Which directory to make.
#[derive(Debug, Args)]
pub(crate) struct FilesMkdirArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Make those on the way; one that is there is no error.
    #[arg(long, short)]
    pub(crate) parents: bool,
    /// Permissions, in octal.
    #[arg(long, value_name = "MODE")]
    pub(crate) mode: Option<String>,
    /// The directory.
    #[arg(value_name = "SANDBOX:PATH", value_parser = InsideParser)]
    pub(crate) path: Inside,
}

/// What to move where.
#[derive(Debug, Args)]
pub(crate) struct FilesMvArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Replace what is there.
    #[arg(long, short)]
    pub(crate) force: bool,
    /// Make the directories on the way.
    #[arg(long, short)]
    pub(crate) parents: bool,
    /// What.
    #[arg(value_name = "SANDBOX:PATH", value_parser = InsideParser)]
    pub(crate) from: Inside,
    /// Its new path, in the same sandbox.
    #[arg(value_name = "PATH")]
    pub(crate) to: PathBuf,
}

/// What to remove.
#[derive(Debug, Args)]
pub(crate) struct FilesRmArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// With all that is in it.
    #[arg(long, short)]
    pub(crate) recursive: bool,
    /// What.
    #[arg(value_name = "SANDBOX:PATH", value_parser = InsideParser)]
    pub(crate) path: Inside,
}

/// What to watch.
#[derive(Debug, Args)]
pub(crate) struct FilesWatchArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// With all below it.
    #[arg(long, short)]
    pub(crate) recursive: bool,
    /// The directory.
    #[arg(value_name = "SANDBOX:PATH", value_parser = InsideParser)]
    pub(crate) path: Inside,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_inside_if_a_colon_comes_before_any_slash() {
        let box_at = |sandbox: &str, path: &str| {
            End::Inside(Inside { sandbox: sandbox.into(), path: path.into() })
        };
        for (text, expected) in [
            ("-", End::Stream),
            ("file", End::Local("file".into())),
            ("./a:b", End::Local("./a:b".into())),
            ("/a:/b", End::Local("/a:/b".into())),
            ("web:/x", box_at("web", "/x")),
            ("web:/x:y", box_at("web", "/x:y")),
        ] {
            assert_eq!(end(OsStr::new(text)).unwrap(), expected, "{text}");
        }
        for bad in [":/x", "web:", "web:x"] {
            assert!(end(OsStr::new(bad)).is_err(), "{bad}");
        }
        let odd = OsStr::from_bytes(b"web:/\xff");
        let End::Inside(inside) = end(odd).unwrap() else { panic!("inside") };
        assert_eq!(inside.path.as_os_str().as_bytes(), b"/\xff");
    }
}
