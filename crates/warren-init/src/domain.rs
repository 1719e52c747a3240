//! Names of hosts: one spelling for each, and which of them a pattern means.
//!
//! Whoever decides about a name, inside and outside, decides by what is said here, so that no spelling of it gets
//! another verdict.

/// Every name there is.
pub const EVERY: &str = "*";

/// The longest name. See RFC 1035, 2.3.4.
const LONGEST: usize = 253;
/// The longest of its parts.
const LONGEST_LABEL: usize = 63;

/// Returns the one spelling of a host's name: lower case, without the dot at its end; `None` if it is none.
///
/// What some parsers read as an address (`0x7f.1`, `2130706433`) is no name, and neither is anything beyond ASCII:
/// who means such a name writes it as it travels (`xn--...`).
pub fn canonical(name: &[u8]) -> Option<String> {
    let name = name.strip_suffix(b".").unwrap_or(name);
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let is_label =
        |label: &[u8]| (1..=LONGEST_LABEL).contains(&label.len()) && label.iter().all(plain);
    if name.len() > LONGEST || !name.split(|byte| *byte == b'.').all(is_label) {
        return None;
    }
    let name = String::from_utf8(name.to_ascii_lowercase()).ok()?;
    let last = name.rsplit('.').next().unwrap_or_default();
    let is_hex = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let numeric = last.bytes().all(|byte| byte.is_ascii_digit())
        || last.strip_prefix("0x").is_some_and(is_hex);
    (!numeric).then_some(name)
}

/// Reports whether `pattern`, a canonical name, `*.` and one, or [`EVERY`], means this canonical name.
pub fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_prefix('*') {
        // What is below it, however deep, but not itself: the dot is a part of what is compared.
        Some(suffix) => suffix.is_empty() || name.len() > suffix.len() && name.ends_with(suffix),
        None => pattern == name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_spelling() {
        for (name, expected) in [
            ("pypi.org", Some("pypi.org")),
            ("PyPI.Org.", Some("pypi.org")),
            ("xn--bcher-kva.example", Some("xn--bcher-kva.example")),
            ("_service.a-b", Some("_service.a-b")),
            ("localhost", Some("localhost")),
            ("1.2.3.4.example", Some("1.2.3.4.example")),
            ("", None),
            (".", None),
            ("a..b", None),
            ("pypi.org..", None),
            (".pypi.org", None),
            ("pypi.org:443", None),
            ("user@pypi.org", None),
            ("pypi.org%00", None),
            ("pypi.org\0", None),
            ("pypi.org/", None),
            ("*.pypi.org", None),
            ("b\u{fc}cher.example", None),
            ("127.0.0.1", None),
            ("127.1", None),
            ("0x7f.1", None),
            ("1.0x7F", None),
            ("2130706433", None),
            ("0177.0.0.01", None),
            ("[::1]", None),
            ("a b", None),
        ] {
            assert_eq!(canonical(name.as_bytes()).as_deref(), expected, "{name:?}");
        }
        let label = "x".repeat(64);
        assert_eq!(canonical(label.as_bytes()), None);
        assert!(canonical(&label.as_bytes()[1..]).is_some(), "control: shorter");
        let long = [["x"; 127].join("."), "xx".to_owned()].join(".");
        assert_eq!((long.len(), canonical(long.as_bytes())), (256, None));
    }

    #[test]
    fn a_pattern_means_itself_or_what_is_below() {
        for (pattern, name, expected) in [
            ("pypi.org", "pypi.org", true),
            ("pypi.org", "files.pypi.org", false),
            ("pypi.org", "xpypi.org", false),
            ("*.pypi.org", "files.pypi.org", true),
            ("*.pypi.org", "a.b.pypi.org", true),
            ("*.pypi.org", "pypi.org", false),
            ("*.pypi.org", "evilpypi.org", false),
            ("*.pypi.org", ".pypi.org", false),
            ("*", "anything.example", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}
