//! What people write for sizes, times and the like. Strict: what is not understood is refused.

use std::fmt;

use warren::BindMount;

/// A limit as it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cap<T> {
    /// This much.
    At(T),
    /// No limit: `none` or `unlimited`.
    Lifted,
}

impl<T> Cap<T> {
    /// Returns the bound, if there is one.
    pub(crate) fn bound(self) -> Option<T> {
        match self {
            Self::At(value) => Some(value),
            Self::Lifted => None,
        }
    }
}

type Parsed<T> = Result<Cap<T>, String>;

const SIZE: &str = "a size is a number and B, K, M, G or T, as in 512M or 1.5G, or `none`";
const TIME: &str = "a time is a number and ms, s, m or h, as in 500ms, 30s or 2m, or `none`";
const CPUS: &str = "a number of CPUs has up to three decimals, as in 2 or 0.5, or is `none`";
const COUNT: &str = "a whole number, as in 64, or `none`";

/// Parses a size in bytes; K, M and so on are powers of 1024.
pub(crate) fn size(text: &str) -> Parsed<u64> {
    cap(text, SIZE, |text| {
        let (number, unit) = split(text);
        let unit = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" | "kib" => 1 << 10,
            "m" | "mb" | "mib" => 1 << 20,
            "g" | "gb" | "gib" => 1 << 30,
            "t" | "tb" | "tib" => 1 << 40,
            _ => return None,
        };
        scale(number, unit)
    })
}

/// Parses a time in milliseconds.
pub(crate) fn time(text: &str) -> Parsed<u64> {
    cap(text, TIME, |text| {
        let (number, unit) = split(text);
        let unit = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            _ => return None,
        };
        scale(number, unit)
    })
}

/// Parses a number of CPUs in thousandths.
pub(crate) fn cpus(text: &str) -> Parsed<u32> {
    cap(text, CPUS, |text| {
        let decimals = text.split_once('.').map_or("", |(_, decimals)| decimals);
        (decimals.len() <= 3).then(|| scale(text, 1_000))?.and_then(|cpus| cpus.try_into().ok())
    })
}

/// Parses a whole number.
pub(crate) fn count(text: &str) -> Parsed<u32> {
    cap(text, COUNT, |text| is_digits(text).then(|| text.parse().ok())?)
}

/// Parses `SRC:DST`, `SRC:DST:ro` or `SRC:DST:rw`.
pub(crate) fn bind(text: &str) -> Result<BindMount, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let (source, target, readonly) = match parts[..] {
        [source, target] | [source, target, "rw"] => (source, target, false),
        [source, target, "ro"] => (source, target, true),
        _ => return Err("write SRC:DST, or SRC:DST:ro for a read-only one".to_owned()),
    };
    if source.is_empty() || target.is_empty() {
        return Err("neither side may be empty: write SRC:DST".to_owned());
    }
    Ok(BindMount { source: source.into(), target: target.into(), readonly })
}

/// Parses `NAME=VALUE`.
pub(crate) fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        Some(_) | None => {
            Err("write NAME=VALUE; nothing is taken from the caller's environment".to_owned())
        }
    }
}

fn cap<T>(text: &str, accepted: &str, parse: impl FnOnce(&str) -> Option<T>) -> Parsed<T> {
    if matches!(text, "none" | "unlimited") {
        return Ok(Cap::Lifted);
    }
    parse(text).map(Cap::At).ok_or_else(|| accepted.to_owned())
}

fn split(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    text.split_at(end)
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Multiplies a decimal number, exactly: what does not come out whole is refused.
fn scale(number: &str, unit: u64) -> Option<u64> {
    let (whole, decimals) = match number.split_once('.') {
        Some((whole, decimals)) => (whole, Some(decimals)),
        None => (number, None),
    };
    if !is_digits(whole) || !decimals.is_none_or(is_digits) {
        return None;
    }
    let decimals = decimals.unwrap_or_default();
    let denominator = 10_u128.checked_pow(u32::try_from(decimals.len()).ok()?)?;
    let digits: u128 = format!("{whole}{decimals}").parse().ok()?;
    let product = digits.checked_mul(u128::from(unit))?;
    // 0.1G is no whole number of bytes, and nobody means the last one.
    (unit >= 1 << 10 || product % denominator == 0)
        .then(|| (product / denominator).try_into().ok())?
}

/// A number of bytes, for people: `512 MiB`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")] {
            let (whole, rest) = (self.0 >> shift, self.0 & ((1 << shift) - 1));
            if whole > 0 && rest == 0 {
                return write!(f, "{whole} {unit}");
            }
            if whole >= 10 || (whole > 0 && rest << 2 & ((1 << shift) - 1) == 0) {
                let hundredths = (u128::from(rest) * 100) >> shift;
                return write!(f, "{whole}.{hundredths:02} {unit}");
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

/// A number of milliseconds, for people: `2 s`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Millis(pub(crate) u64);

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0 / 1000, self.0 % 1000) {
            (0, millis) => write!(f, "{millis} ms"),
            (seconds, 0) => write!(f, "{seconds} s"),
            (seconds, millis) => {
                let decimals = format!("{millis:03}");
                write!(f, "{seconds}.{} s", decimals.trim_end_matches('0'))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_exactly_or_not_at_all() {
        for (text, bytes) in [
            ("1", 1),
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("2GiB", 2 << 30),
            ("1.5G", 3 << 29),
            ("0.1K", 102),
            ("0", 0),
            ("64KB", 64 << 10),
            ("3T", 3 << 40),
        ] {
            assert_eq!(size(text), Ok(Cap::At(bytes)), "{text}");
        }
        for text in ["none", "unlimited"] {
            assert_eq!(size(text), Ok(Cap::Lifted));
        }
        for text in [
            "",
            "M",
            "-1M",
            "+1M",
            "1,5G",
            "1.5",
            "1..5G",
            ".5G",
            "5.G",
            "512 M",
            "512MM",
            "1e3",
            "0x10",
            "99999999999T",
            "NaN",
            "inf",
            "None",
            "٣M",
        ] {
            let refused = size(text).expect_err(text);
            assert!(refused.contains("512M"), "says what is accepted: {refused}");
        }
    }

    #[test]
    fn a_time_needs_its_unit() {
        for (text, millis) in
            [("500ms", 500), ("30s", 30_000), ("1.5s", 1_500), ("2m", 120_000), ("1h", 3_600_000)]
        {
            assert_eq!(time(text), Ok(Cap::At(millis)), "{text}");
        }
        assert_eq!(time("none"), Ok(Cap::Lifted));
        for text in ["30", "s", "-1s", "1.0005s", "0.5ms", "1 s", "1d", "30S", "9e9s"] {
            assert!(time(text).expect_err(text).contains("30s"));
        }
    }

    #[test]
    fn cpus_have_up_to_three_decimals() {
        for (text, millis) in
            [("1", 1000), ("0.5", 500), ("1.25", 1250), ("0.001", 1), ("64", 64_000)]
        {
            assert_eq!(cpus(text), Ok(Cap::At(millis)), "{text}");
        }
        for text in ["", "-1", "0.0001", "1.", ".5", "two", "99999999999"] {
            assert!(cpus(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_count_is_digits_alone() {
        assert_eq!(count("64"), Ok(Cap::At(64)));
        for text in ["", "-1", "+1", "1.5", "64K", "4294967296"] {
            assert!(count(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_bind_has_two_sides_and_perhaps_a_mode() {
        let mount = |target: &str, readonly| BindMount {
            source: "/a".into(),
            target: target.into(),
            readonly,
        };
        assert_eq!(bind("/a:/b"), Ok(mount("/b", false)));
        assert_eq!(bind("/a:/b:ro"), Ok(mount("/b", true)));
        assert_eq!(bind("/a:/b:rw"), Ok(mount("/b", false)));
        for text in ["", "/a", "/a:", ":/b", "/a:/b:rx", "/a:/b:ro:ro", "/a:/b:/c"] {
            assert!(bind(text).is_err(), "{text}");
        }
    }

    #[test]
    fn amounts_are_shown_as_people_write_them() {
        for (bytes, shown) in [
            (512 << 20, "512 MiB"),
            (3 << 29, "1.50 GiB"),
            (1, "1 bytes"),
            (1 << 40, "1 TiB"),
            (100_000, "97.65 KiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), shown);
        }
        for (millis, shown) in
            [(2_000, "2 s"), (1_500, "1.5 s"), (500, "500 ms"), (120_000, "120 s")]
        {
            assert_eq!(Millis(millis).to_string(), shown);
        }
    }
}
