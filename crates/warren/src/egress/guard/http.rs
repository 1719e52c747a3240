//! Requests of HTTP/1, one after the other. See RFC 9112.
//!
//! Stricter than the standard wherever two servers were ever found to read the same bytes differently:
//! whoever finds the end of a request elsewhere than its server does lets the next one through unread.

use super::{MAX_LINE, Refusal, canonical, check, is_tchar};

/// The longest head of a request, and the most that may follow a body in pieces.
pub(super) const MAX_HEAD: usize = 32 << 10;
const MAX_FIELDS: usize = 128;
const MAX_METHOD: usize = 32;
/// As many digits as the size of a piece may have, and the end of their line.
const MAX_SIZE_LINE: usize = 16 + 2;
/// Lengths are signed in many a server.
const MAX_LENGTH: u64 = i64::MAX.cast_unsigned();

/// A client that speaks HTTP/1, from its first byte on.
#[derive(Default)]
pub(super) struct Http {
    /// Lines that may not go on yet.
    held: Vec<u8>,
    /// Where in there the current line begins.
    line: usize,
    part: Part,
    request: Request,
    fields: usize,
}

/// What comes next.
#[derive(Clone, Copy, Debug, Default)]
enum Part {
    #[default]
    RequestLine,
    Fields,
    /// So many bytes of a body with a length.
    Body(u64),
    /// The size of a piece of a body without one, so many bytes of it, the end of its line.
    Size,
    Piece(u64),
    PieceEnd,
    Trailers,
}

/// What a head said so far.
#[derive(Debug, Default)]
struct Request {
    /// Whether the method is one with which servers do not look for a body.
    bare: bool,
    version_1_1: bool,
    /// The name in the target, if that has one.
    target: Option<String>,
    host: Option<String>,
    length: Option<u64>,
    chunked: bool,
    expects: bool,
}

impl Http {
    pub(super) fn feed(
        &mut self,
        bytes: &[u8],
        out: &mut Vec<u8>,
        allows: &dyn Fn(&str) -> bool,
    ) -> Result<(), Refusal> {
        let mut rest = bytes;
        while let Some((byte, after)) = rest.split_first() {
            if let Part::Body(left) | Part::Piece(left) = &mut self.part {
                let length = usize::try_from(*left).unwrap_or(usize::MAX).min(rest.len());
                let (piece, after) = rest.split_at(length);
                out.extend_from_slice(piece);
                *left -= length as u64;
                rest = after;
                match self.part {
                    Part::Body(0) => self.part = Part::RequestLine,
                    Part::Piece(0) => self.part = Part::PieceEnd,
                    _ => {}
                }
                continue;
            }
            rest = after;
            self.held.push(*byte);
            if *byte == b'\n' {
                self.take_line(out, allows)?;
            } else if self.held.len() >= self.limit() {
                return Err(Refusal::http("a line that is too long"));
            }
        }
        Ok(())
    }

    pub(super) fn finish(&self) -> Result<(), Refusal> {
        if self.held.is_empty() {
            return Ok(());
        }
        Err(Refusal::http("a request that is not whole"))
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// The most that is held before the end of the current line.
    fn limit(&self) -> usize {
        match self.part {
            Part::RequestLine => MAX_LINE,
            Part::Fields | Part::Trailers => MAX_HEAD,
            Part::Size => MAX_SIZE_LINE,
            Part::PieceEnd | Part::Body(_) | Part::Piece(_) => 2,
        }
    }

    fn take_line(
        &mut self,
        out: &mut Vec<u8>,
        allows: &dyn Fn(&str) -> bool,
    ) -> Result<(), Refusal> {
        let line = self.held.get(self.line..).unwrap_or_default();
        let line = line.strip_suffix(b"\r\n");
        let line = line.ok_or_else(|| Refusal::http("a line without its carriage return"))?;
        if line.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t') {
            return Err(Refusal::http("a control character"));
        }
        let (next, whole) = match self.part {
            Part::RequestLine => {
                self.request = Request::begin(line)?;
                (Part::Fields, false)
            }
            Part::Fields if line.is_empty() => (self.request.end(allows)?, true),
            Part::Fields => {
                self.request.field(line)?;
                self.fields += 1;
                (Part::Fields, false)
            }
            Part::Size => match size(line) {
                None => return Err(Refusal::http("a size that is none")),
                Some(0) => (Part::Trailers, true),
                Some(length) => (Part::Piece(length), true),
            },
            Part::PieceEnd if line.is_empty() => (Part::Size, true),
            Part::Trailers if line.is_empty() => (Part::RequestLine, true),
            Part::Trailers => {
                trailer(line)?;
                self.fields += 1;
                (Part::Trailers, false)
            }
            // Bodies have no lines.
            Part::PieceEnd | Part::Body(_) | Part::Piece(_) => {
                return Err(Refusal::http("a piece that is longer than it says"));
            }
        };
        if self.fields > MAX_FIELDS {
            return Err(Refusal::http("too many fields"));
        }
        self.part = next;
        if whole {
            out.append(&mut self.held);
            (self.line, self.fields) = (0, 0);
        } else {
            self.line = self.held.len();
        }
        Ok(())
    }
}

impl Request {
    /// Reads the first line: three words with one space between each.
    fn begin(line: &[u8]) -> Result<Self, Refusal> {
        let bad = || Refusal::http("a request line that is none");
        let mut words = line.split(|byte| *byte == b' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(bad());
        };
        if !is_token(method) || method.len() > MAX_METHOD {
            return Err(bad());
        }
        if !target.iter().all(u8::is_ascii_graphic) {
            return Err(Refusal::http("a target that is none"));
        }
        let version_1_1 = match version {
            b"HTTP/1.1" => true,
            b"HTTP/1.0" => false,
            // Who says this goes on in HTTP/2, and understands no answer in HTTP/1.
            b"HTTP/2.0" => {
                return Err(Refusal { http: false, ..Refusal::http("HTTP/2 in the clear") });
            }
            _ => return Err(Refusal::http("a version that is neither HTTP/1.0 nor HTTP/1.1")),
        };
        let is = |known: &str| method.eq_ignore_ascii_case(known.as_bytes());
        if is("CONNECT") {
            return Err(Refusal::http("CONNECT"));
        }
        let bare = is("GET") || is("HEAD") || is("TRACE");
        let request = Self { bare, version_1_1, ..Self::default() };
        if target.starts_with(b"/") || (method == b"OPTIONS" && target == b"*") {
            return Ok(request);
        }
        let named = target.strip_prefix(b"http://").and_then(|rest| {
            let end = rest.iter().position(|byte| *byte == b'/')?;
            host(&rest[..end])
        });
        let target = named.ok_or_else(|| Refusal::http("a target that is none"))?;
        Ok(Self { target: Some(target), ..request })
    }

    fn field(&mut self, line: &[u8]) -> Result<(), Refusal> {
        let (name, value) = field(line)?;
        let is = |known: &str| name.eq_ignore_ascii_case(known.as_bytes());
        // Not even a tab beside these values: some leave it there, and then read something else.
        let value = trimmed(value);
        if is("Host") {
            let host = host(value).ok_or_else(|| Refusal::http("a Host that is no name"))?;
            return once(&mut self.host, host, "more than one Host");
        }
        if is("Content-Length") {
            let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
            let length = str::from_utf8(value).ok().filter(|_| digits);
            let length = length.and_then(|digits| digits.parse().ok());
            let length = length.filter(|length| *length <= MAX_LENGTH);
            let length = length.ok_or_else(|| Refusal::http("a Content-Length that is none"))?;
            return once(&mut self.length, length, "more than one Content-Length");
        }
        if is("Transfer-Encoding") {
            if value != b"chunked" || self.chunked {
                return Err(Refusal::http("a Transfer-Encoding other than chunked"));
            }
            self.chunked = true;
        } else if is("Expect") {
            // With anything else there, some expect a body and some do not.
            if value != b"100-continue" || self.expects {
                return Err(Refusal::http("an Expect other than 100-continue"));
            }
            self.expects = true;
        } else if is("Upgrade") || is("HTTP2-Settings") {
            return Err(Refusal::http("an upgrade to another protocol"));
        }
        Ok(())
    }

    /// Judges a whole head, and says what comes after it.
    fn end(&mut self, allows: &dyn Fn(&str) -> bool) -> Result<Part, Refusal> {
        let host = self.host.take().ok_or_else(|| Refusal::http("a request without Host"))?;
        if self.target.as_ref().is_some_and(|target| *target != host) {
            return Err(Refusal::http("a target and a Host with different names"));
        }
        check(host, true, allows)?;
        let body = match (self.length, self.chunked) {
            (None | Some(0), false) => return Ok(Part::RequestLine),
            (Some(length), false) => Part::Body(length),
            (None, true) if self.version_1_1 => Part::Size,
            (None, true) => return Err(Refusal::http("a Transfer-Encoding in HTTP/1.0")),
            (Some(_), true) => return Err(Refusal::http("two lengths of one body")),
        };
        // Some servers do not look for one there, and take it for the next request.
        if self.bare { Err(Refusal::http("a body where there is none")) } else { Ok(body) }
    }
}

fn once<T>(place: &mut Option<T>, value: T, why: &'static str) -> Result<(), Refusal> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(Refusal::http(why)),
    }
}

/// Reads a line as a name, a colon right after it, and a value.
fn field(line: &[u8]) -> Result<(&[u8], &[u8]), Refusal> {
    let bad = || Refusal::http("a field that is none");
    let colon = line.iter().position(|byte| *byte == b':').ok_or_else(bad)?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    if is_token(name) { Ok((name, value)) } else { Err(bad()) }
}

/// Refuses a field after a body that should have been before it: some would still go by it.
fn trailer(line: &[u8]) -> Result<(), Refusal> {
    let (name, _) = field(line)?;
    let early =
        ["Host", "Content-Length", "Transfer-Encoding", "Expect", "Upgrade", "HTTP2-Settings"];
    if early.iter().any(|known| name.eq_ignore_ascii_case(known.as_bytes())) {
        return Err(Refusal::http("a field that may not come after a body"));
    }
    Ok(())
}

/// Reads `name` or `name:port`. Which port is not asked here.
fn host(value: &[u8]) -> Option<String> {
    let Some(colon) = value.iter().position(|byte| *byte == b':') else {
        return canonical(value);
    };
    let (name, port) = (&value[..colon], &value[colon + 1..]);
    let digits = !port.is_empty() && port.iter().all(u8::is_ascii_digit);
    let number = str::from_utf8(port).ok().filter(|_| digits)?.parse::<u16>();
    number.ok().and_then(|_| canonical(name))
}

/// Reads the size of a piece. Nobody sends the extensions that may come with it, but who smuggles.
fn size(line: &[u8]) -> Option<u64> {
    if line.is_empty() || !line.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let size = u64::from_str_radix(str::from_utf8(line).ok()?, 16).ok()?;
    (size <= MAX_LENGTH).then_some(size)
}

fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(|byte| is_tchar(*byte))
}

fn trimmed(mut value: &[u8]) -> &[u8] {
    while let [b' ', rest @ ..] | [rest @ .., b' '] = value {
        value = rest;
    }
    value
}
