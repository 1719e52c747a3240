//! What a base root is named by.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::{Digest, ImageError};

/// Where Docker's own images are.
const DOCKER: &str = "docker.io";
const MAX_NAME: usize = 255;
const MAX_TAG: usize = 128;

/// Where a base root comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Files of the host; what they are is told by what is in them: a root in a directory or an
    /// archive, an OCI layout in either, or what `docker save` wrote.
    Files {
        /// The directory or the archive.
        path: PathBuf,
        /// Which image of several.
        reference: Option<String>,
    },
    /// An image in a registry.
    Registry(Reference),
}

/// The name of an image in a registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    /// The registry: a host, or host:port.
    pub registry: String,
    /// The repository in it.
    pub repository: String,
    /// The tag; not looked at if there is a digest.
    pub tag: String,
    /// The one image that is meant, whatever the tag says.
    pub digest: Option<Digest>,
}

impl FromStr for Source {
    type Err = ImageError;

    /// Reads `PATH`, `oci:PATH[:NAME]`, `oci-archive:…`, `docker-archive:…`, `tar:…`, `dir:…`,
    /// `docker://NAME` or `NAME`. What begins with `/` or `.` is a path.
    fn from_str(text: &str) -> Result<Self, ImageError> {
        if text.starts_with(['/', '.']) {
            return Ok(Self::Files { path: text.into(), reference: None });
        }
        if let Some(name) = text.strip_prefix("docker://") {
            return name.parse().map(Self::Registry);
        }
        for prefix in ["oci:", "oci-archive:", "docker-archive:", "tar:", "dir:"] {
            if let Some(rest) = text.strip_prefix(prefix)
                && rest.starts_with(['/', '.'])
            {
                let (path, reference) = match rest.split_once(':') {
                    Some((path, reference)) => (path, Some(reference.to_owned())),
                    None => (rest, None),
                };
                return Ok(Self::Files { path: path.into(), reference });
            }
        }
        text.parse().map(Self::Registry)
    }
}

impl FromStr for Reference {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        let refused = |why: &str| {
            let shown: String = text.chars().take(MAX_NAME).collect();
            ImageError::refused(format!("the name `{}`", shown.escape_debug()), why)
        };
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest.parse()?)),
            None => (text, None),
        };
        let (host, rest) = match rest.split_once('/') {
            Some((host, rest)) if host.contains(['.', ':']) || host == "localhost" => (host, rest),
            _ => (DOCKER, rest),
        };
        let (repository, tag) = rest.split_once(':').unwrap_or((rest, "latest"));
        let repository = match (host, repository.contains('/')) {
            (DOCKER, false) => format!("library/{repository}"),
            _ => repository.to_owned(),
        };
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let part = |part: &str| {
            part.starts_with(plain)
                && part.ends_with(plain)
                && part.chars().all(|c| plain(c) || matches!(c, '.' | '_' | '-'))
        };
        if repository.len() > MAX_NAME || !repository.split('/').all(part) {
            return Err(refused("an image is named by lower-case words with `/` between them"));
        }
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let is_tag =
            tag.starts_with(word) && tag.chars().all(|c| word(c) || matches!(c, '.' | '-'));
        if tag.len() > MAX_TAG || !is_tag {
            return Err(refused("a tag has letters, digits, `_`, `.` and `-`"));
        }
        if !is_host(host) {
            return Err(refused("a registry is a host, or host:port"));
        }
        Ok(Self { registry: host.to_owned(), repository, tag: tag.to_owned(), digest })
    }
}

impl Reference {
    /// Returns the host that serves it.
    pub(super) fn host(&self) -> &str {
        match self.registry.as_str() {
            DOCKER => "registry-1.docker.io",
            other => other,
        }
    }

    /// Returns what the registry knows it by within its repository.
    pub(super) fn selector(&self) -> &str {
        self.digest.as_ref().map_or(&self.tag, Digest::as_str)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => write!(f, ":{}", self.tag),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Files { path, reference: None } => write!(f, "{}", path.display()),
            Self::Files { path, reference: Some(name) } => {
                write!(f, "oci:{}:{name}", path.display())
            }
            Self::Registry(reference) => reference.fmt(f),
        }
    }
}

impl From<&Path> for Source {
    fn from(path: &Path) -> Self {
        Self::Files { path: path.to_owned(), reference: None }
    }
}

/// Tells whether this is a host or an address, with a port or without.
fn is_host(text: &str) -> bool {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, port)) => {
            if address.parse::<std::net::Ipv6Addr>().is_err() {
                return false;
            }
            ("v6", port.strip_prefix(':'))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let label = |label: &str| !label.is_empty() && label.bytes().all(plain);
    let digits = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    host.len() <= 253
        && host.split('.').all(label)
        && port.is_none_or(|port| digits(port) && port.parse::<u16>().is_ok_and(|port| port > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

    #[test]
    fn names_mean_what_they_mean_elsewhere() {
        for (text, shown) in [
            ("ubuntu", "docker.io/library/ubuntu:latest"),
            ("ubuntu:22.04", "docker.io/library/ubuntu:22.04"),
            ("e2bdev/base:latest", "docker.io/e2bdev/base:latest"),
            ("docker://ubuntu", "docker.io/library/ubuntu:latest"),
            ("localhost/x", "localhost/x:latest"),
            ("localhost:5000/a/b:c", "localhost:5000/a/b:c"),
            ("ghcr.io/o/n", "ghcr.io/o/n:latest"),
            ("[::1]:5000/n", "[::1]:5000/n:latest"),
        ] {
            let source: Source = text.parse().unwrap();
            assert!(matches!(source, Source::Registry(_)), "{text}");
            assert_eq!(source.to_string(), shown);
        }
        let pinned: Reference = format!("ghcr.io/o/n:1@{DIGEST}").parse().unwrap();
        assert_eq!((pinned.selector(), pinned.host()), (DIGEST, "ghcr.io"));
        // Found by fuzzing: the tag means nothing then, and is not shown.
        assert_eq!(pinned.to_string(), format!("ghcr.io/o/n@{DIGEST}"));
        assert_eq!("x".parse::<Reference>().unwrap().host(), "registry-1.docker.io");
        for (text, path, name) in [
            ("/srv/root", "/srv/root", None),
            ("./root.tar", "./root.tar", None),
            ("oci:/srv/layout:v1", "/srv/layout", Some("v1")),
            ("docker-archive:./x.tar", "./x.tar", None),
            ("/srv/a:b", "/srv/a:b", None),
        ] {
            let reference = name.map(str::to_owned);
            assert_eq!(
                text.parse::<Source>().unwrap(),
                Source::Files { path: path.into(), reference }
            );
        }
    }

    #[test]
    fn what_names_nothing_is_refused() {
        for text in [
            "",
            "A",
            "a b",
            "a//b",
            "../x",
            "a/../b",
            "a:",
            "a:b:c",
            "a:b/c",
            "-a",
            "a@x",
            "a@sha256:0",
            "host:99999/a",
            "host:/a",
            "h_st..x/a",
            "[::g]:1/a",
            "user@host/x",
            "a?b",
            "a#b",
            "a%2fb",
            &"a".repeat(300),
            &format!("a:{}", "t".repeat(129)),
            "http://x/y",
        ] {
            let parsed = text.parse::<Reference>();
            assert!(parsed.is_err(), "{text}: {parsed:?}");
        }
    }
}
