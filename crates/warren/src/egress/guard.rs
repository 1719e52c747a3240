//! Looks at what a client sends before it goes on to the server.
//!
//! Many names share one server, so that the name which was dialled says little: the server goes by the
//! name that the client gives it. That one is read here, from the hello of TLS and from each request of
//! HTTP/1, and what comes with a name that is not allowed does not go on. Whoever sends is hostile, and
//! servers are lenient, each in its own way. So whatever a server might take for TLS or HTTP has to be
//! strictly that, or is refused; only what no server takes for either passes unread. Some pass over bytes
//! which no text has, and then read a request: what begins with such or has one in it goes on at once, since
//! whoever sends it may wait for an answer, and is read to the end of its first line all the same.
//!
//! Bytes go on as they came, in order, or not at all. What they are never depends on how they were cut
//! into reads. What is encrypted stays unread: whom a request *within* TLS names is between the client
//! and a server that is allowed.

mod http;
mod tls;

use std::mem;

use http::Http;
use tls::Tls;
use warren_init::domain::canonical;

/// The longest first line, of whatever protocol.
const MAX_LINE: usize = 16 << 10;
/// With these a line is meant as a request even if it names no version, as in HTTP/0.9. The last is no
/// method: it tells some servers who the client is, before the request, and nobody here has to.
const METHODS: [&str; 10] =
    ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "PROXY"];

/// What becomes of the bytes that come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// They are to be looked at.
    Watched,
    /// They may go on unseen.
    Free,
}

/// Why nothing more goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The name that is not allowed, canonical and so safe to print.
    pub(crate) name: Option<String>,
    /// What is wrong, of what the client sent.
    pub(crate) why: &'static str,
    /// Whether the client speaks HTTP/1 and can be told with a 403.
    pub(crate) http: bool,
}

/// What watches one connection, in the direction of the server.
pub(crate) struct Guard<F> {
    allows: F,
    stage: Stage,
}

enum Stage {
    Opening(Opening),
    Tls(Tls),
    Http(Http),
    Passing(Passing),
    Free,
    Refused(Refusal),
}

impl<F: Fn(&str) -> bool> Guard<F> {
    /// Begins with a connection on which nothing was sent. `allows` is asked with canonical names.
    pub(crate) fn new(allows: F) -> Self {
        Self { allows, stage: Stage::Opening(Opening::default()) }
    }

    /// Takes the next bytes of the client and appends to `out` what may go on. Once refused, nothing does.
    pub(crate) fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Flow, Refusal> {
        let result = self.advance(bytes, out);
        if let Err(refusal) = &result {
            self.stage = Stage::Refused(refusal.clone());
        }
        result
    }

    /// Takes note that the client sends nothing more. What is held goes on, or is too little to be judged.
    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), Refusal> {
        let result = match &mut self.stage {
            Stage::Opening(opening) => {
                opening.finish().map(|()| out.append(&mut mem::take(opening).line))
            }
            Stage::Tls(tls) => tls.finish(),
            Stage::Http(http) => http.finish(),
            Stage::Passing(passing) => passing.finish(),
            Stage::Free => Ok(()),
            Stage::Refused(refusal) => Err(refusal.clone()),
        };
        if let Err(refusal) = &result {
            self.stage = Stage::Refused(refusal.clone());
        }
        result
    }

    fn advance(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Flow, Refusal> {
        let mut rest = bytes;
        loop {
            match &mut self.stage {
                Stage::Opening(opening) => {
                    let Some((byte, after)) = rest.split_first() else { return Ok(Flow::Watched) };
                    rest = after;
                    let Some(protocol) = opening.push(*byte)? else { continue };
                    let mut held = mem::take(&mut opening.line);
                    // What tells a protocol is read again, by who knows it.
                    self.stage = match protocol {
                        Protocol::Tls => {
                            let mut tls = Tls::default();
                            tls.feed(&held, out, &self.allows)?;
                            Stage::Tls(tls)
                        }
                        Protocol::Http => {
                            let mut http = Http::default();
                            http.feed(&held, out, &self.allows)?;
                            Stage::Http(http)
                        }
                        Protocol::Binary => {
                            let mut passing = Passing::default();
                            // None of these ends the line, or it would have been judged by that.
                            held.iter().try_for_each(|byte| passing.push(*byte).map(drop))?;
                            out.append(&mut held);
                            Stage::Passing(passing)
                        }
                        Protocol::Other => {
                            out.append(&mut held);
                            Stage::Free
                        }
                    };
                }
                Stage::Passing(passing) => {
                    let Some((byte, after)) = rest.split_first() else { return Ok(Flow::Watched) };
                    rest = after;
                    let over = passing.push(*byte)?;
                    out.push(*byte);
                    if over {
                        self.stage = Stage::Free;
                    }
                }
                Stage::Tls(tls) => {
                    let flow = tls.feed(rest, out, &self.allows)?;
                    if flow == Flow::Free {
                        self.stage = Stage::Free;
                    }
                    return Ok(flow);
                }
                Stage::Http(http) => {
                    http.feed(rest, out, &self.allows)?;
                    return Ok(Flow::Watched);
                }
                Stage::Free => {
                    out.extend_from_slice(rest);
                    return Ok(Flow::Free);
                }
                Stage::Refused(refusal) => return Err(refusal.clone()),
            }
        }
    }

    /// How many bytes are held back.
    #[cfg(any(test, feature = "fuzz"))]
    fn held(&self) -> usize {
        match &self.stage {
            Stage::Opening(opening) => opening.line.len(),
            Stage::Tls(tls) => tls.held(),
            Stage::Http(http) => http.held(),
            Stage::Passing(_) | Stage::Free | Stage::Refused(_) => 0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Tls,
    Http,
    /// None that is text, by what came so far.
    Binary,
    Other,
}

/// The first line of a client, or the beginning of what has no lines, until it tells the protocol.
#[derive(Default)]
struct Opening {
    line: Vec<u8>,
    /// How many words have begun, and where the last of them did.
    words: usize,
    word: usize,
    in_word: bool,
    /// Whether the first word is none that HTTP has for a method.
    odd: bool,
}

impl Opening {
    /// Takes one byte. Says the protocol as soon as nothing that may follow changes it.
    fn push(&mut self, byte: u8) -> Result<Option<Protocol>, Refusal> {
        self.line.push(byte);
        match self.line[..] {
            // Servers skip empty lines before a request.
            [b'\r' | b'\n'] => return Err(Refusal::http("an empty line before the request")),
            // The types of records that TLS has. Some servers pass over alerts before the hello, and some
            // take any version below 0x1000.
            [0x14..=0x18] => return Ok(None),
            [0x16, 0x03] => return Ok(Some(Protocol::Tls)),
            [0x14..=0x18, 0..0x10] => return Err(Refusal::tls("TLS that begins with no hello")),
            [0x14..=0x18, _] => return Ok(Some(Protocol::Binary)),
            _ => {}
        }
        if byte == b'\n' || is_binary(byte) || self.is_no_request(byte) {
            return self.judge().map(Some);
        }
        if self.line.len() >= MAX_LINE {
            let http = self.is_near_http();
            return Err(Refusal { name: None, why: "a first line that is too long", http });
        }
        Ok(None)
    }

    /// Reports whether this byte is the one by which the line cannot become a request.
    ///
    /// Not all text has lines: XMPP and Subversion wait for an answer to half of one. Their first words
    /// are no methods. Some servers take any word for a method, but then none takes a third word that
    /// begins no version. Words are counted as by whoever finds the fewest.
    fn is_no_request(&mut self, byte: u8) -> bool {
        let passed_over = self.words == 0 && is_passed_over(byte);
        if passed_over || matches!(byte, b' ' | b'\t') || (!self.in_word && is_space(byte)) {
            self.in_word = false;
            return false;
        }
        if !self.in_word {
            self.in_word = true;
            self.words += 1;
            self.word = self.line.len() - 1;
        }
        self.odd |= self.words == 1 && !is_tchar(byte);
        let word = &self.line[self.word..];
        let version =
            b"HTTP/".iter().zip(word).all(|(wanted, byte)| byte.eq_ignore_ascii_case(wanted));
        self.odd && self.words == 3 && !version
    }

    /// Says what a line is that ended, or that has a byte which no text has.
    fn judge(&self) -> Result<Protocol, Refusal> {
        let ended = self.line.ends_with(b"\n");
        if self.is_near_http() {
            let bad = || Refusal::http("a request line that is none");
            return ended.then_some(Protocol::Http).ok_or_else(bad);
        }
        if ended && self.line.iter().all(|byte| is_space(*byte)) {
            return Err(Refusal::http("an empty line before the request"));
        }
        let binary = self.line.last().is_some_and(|byte| is_binary(*byte));
        Ok(if binary { Protocol::Binary } else { Protocol::Other })
    }

    fn finish(&self) -> Result<(), Refusal> {
        match self.line[..] {
            [0x14..=0x18] => Err(Refusal::tls("a hello that is not whole")),
            _ if self.is_near_http() => Err(Refusal::http("a request that is not whole")),
            _ => Ok(()),
        }
    }

    /// Reports whether some server may take the line for a request, strictly one or not.
    fn is_near_http(&self) -> bool {
        if self.line.windows(5).any(|bytes| bytes.eq_ignore_ascii_case(b"http/")) {
            return true;
        }
        let begins = self.line.iter().position(|byte| !is_passed_over(*byte)).unwrap_or_default();
        let words = self.line[begins..].split(|byte| is_space(*byte) || is_binary(*byte));
        let mut words = words.filter(|word| !word.is_empty());
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let known = METHODS.iter().any(|known| method.eq_ignore_ascii_case(known.as_bytes()));
        // Servers there were that read `ANY /path words` as HTTP/1.0. What has no end of a line is no
        // request to them: so git, which asks for a path and ends it with a zero, may.
        known || (is_target(target) && self.line.ends_with(b"\n"))
    }
}

/// What has bytes that no text has, to the end of its first line: nothing of it is held, since most of what is like this
/// waits for an answer before any line ends, and a server that reads a request in it waits for that end, too.
///
/// Netty passes over every control character and all white space before a request, and lenient servers take such in the
/// middle of one.
#[derive(Default)]
struct Passing {
    /// How much of `http/` the last bytes are.
    version: usize,
    /// How the first two words begin: as far as it matters.
    words: [Vec<u8>; 2],
    /// Which word this is, from one; none has begun yet.
    word: usize,
    in_word: bool,
    /// Whether the words have such a byte among or after them.
    mixed: bool,
}

impl Passing {
    /// No word that matters is longer.
    const MAX_WORD: usize = 8;

    /// Takes one byte. Says whether the line is over, and so is no request.
    fn push(&mut self, byte: u8) -> Result<bool, Refusal> {
        if self.word == 0 && is_passed_over(byte) {
            return Ok(false);
        }
        // It has no second `h`, so that whatever is not the next of it begins it anew or is none of it.
        let wanted = b"http/"[self.version];
        self.version = match byte.to_ascii_lowercase() {
            lower if lower == wanted => self.version + 1,
            b'h' => 1,
            _ => 0,
        };
        if self.version == 5 {
            return Err(Self::none());
        }
        if is_space(byte) || is_binary(byte) {
            self.in_word = false;
            self.mixed |= is_binary(byte);
            let ended = matches!(byte, b'\n' | b'\r');
            if self.is_method() || (ended && self.is_near()) {
                return Err(Self::none());
            }
            return Ok(byte == b'\n');
        }
        if !self.in_word {
            (self.in_word, self.word) = (true, self.word + 1);
        }
        let word = self.words.get_mut(self.word - 1).filter(|word| word.len() < Self::MAX_WORD);
        if let Some(word) = word {
            word.push(byte);
        }
        Ok(false)
    }

    fn finish(&self) -> Result<(), Refusal> {
        if self.is_near() { Err(Self::none()) } else { Ok(()) }
    }

    fn is_method(&self) -> bool {
        METHODS.iter().any(|known| self.words[0].eq_ignore_ascii_case(known.as_bytes()))
    }

    /// Reports whether some server may take the words for a request, should they end here. Between a path and its version
    /// there may be anything; git ends a path with a zero, and its line much later.
    fn is_near(&self) -> bool {
        self.is_method() || (!self.mixed && is_target(&self.words[1]))
    }

    fn none() -> Refusal {
        Refusal::http("a request among bytes that no text has")
    }
}

impl Refusal {
    fn http(why: &'static str) -> Self {
        Self { name: None, why, http: true }
    }

    fn tls(why: &'static str) -> Self {
        Self { name: None, why, http: false }
    }
}

/// Refuses a canonical name that is not allowed.
fn check(name: String, http: bool, allows: &dyn Fn(&str) -> bool) -> Result<(), Refusal> {
    if allows(&name) {
        return Ok(());
    }
    Err(Refusal { name: Some(name), why: "a name that is not allowed", http })
}

/// What a token of HTTP is made of. See RFC 9110, section 5.6.2.
fn is_tchar(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// What somebody takes for white space: also what Python does, in Latin-1.
fn is_space(byte: u8) -> bool {
    matches!(byte, b'\t'..=b'\r' | 0x1c..=0x1f | b' ' | 0x85 | 0xa0)
}

/// What no line of text has.
fn is_binary(byte: u8) -> bool {
    byte.is_ascii_control() && !is_space(byte)
}

/// What somebody passes over before a request: white space, and what controls, in Latin-1.
fn is_passed_over(byte: u8) -> bool {
    is_space(byte) || byte.is_ascii_control() || matches!(byte, 0x80..=0x9f)
}

/// Reports whether a word may say what is asked for.
fn is_target(word: &[u8]) -> bool {
    word.starts_with(b"/") || starts_with(word, b"http")
}

fn starts_with(bytes: &[u8], lower: &[u8]) -> bool {
    bytes.get(..lower.len()).is_some_and(|start| start.eq_ignore_ascii_case(lower))
}

/// Watches what anybody may send, whole and byte by byte.
#[cfg(feature = "fuzz")]
pub(crate) fn fuzz(data: &[u8]) {
    let (verdict, out) = watch([data]);
    assert_eq!(out, data[..out.len()], "what goes on is what came, in order");
    // What many servers pass over before a request hides none.
    let begins = data.iter().position(|byte| !is_passed_over(*byte)).unwrap_or_default();
    if begins > 0 && data[begins..].starts_with(b"GET ") && !data.starts_with(b"\x16\x03") {
        assert!(verdict.is_err(), "no request passes unread");
    }
    assert_eq!((verdict, out), watch(data.chunks(1)), "how it is cut makes no difference");
    if let Some(name) = canonical(data) {
        assert_eq!(
            canonical(name.as_bytes()).as_ref(),
            Some(&name),
            "there is one way to write it"
        );
    }
}

/// Watches a client that sends these pieces and no more. It may name what ends in `ok.example`.
#[cfg(any(test, feature = "fuzz"))]
fn watch<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Result<Flow, Refusal>, Vec<u8>) {
    let mut guard = Guard::new(|name| name.ends_with("ok.example"));
    let (mut out, mut flow) = (Vec::new(), Flow::Watched);
    for piece in pieces {
        let before = out.len();
        match guard.feed(piece, &mut out) {
            Ok(next) => flow = next,
            Err(refusal) => {
                assert_eq!(guard.feed(b"more", &mut Vec::new()), Err(refusal.clone()));
                return (Err(refusal), out);
            }
        }
        let most = if flow == Flow::Free { 0 } else { http::MAX_HEAD.max(tls::MAX_HELD) };
        assert!(guard.held() <= most, "no more is held than may be");
        assert!(out.len() >= before);
    }
    (guard.finish(&mut out).map(|()| flow), out)
}

#[cfg(test)]
mod tests;
