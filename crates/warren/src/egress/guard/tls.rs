//! The hello of TLS, and the name in it. See RFC 8446, sections 4.1.2 and 5.1, and RFC 6066, section 3.
//!
//! In TLS 1.3 a server may ask for a second hello, in the clear like the first, and some go by the name in
//! that one. So the records of a client are followed until there can be none.

use super::{Flow, Refusal, canonical, check};

/// The longest hello. A large one, with keys against quantum computers, has 2 KiB.
const MAX_HELLO: usize = 16 << 10;
/// The most of its records that is held, with their heads: nobody needs one for each byte.
pub(super) const MAX_HELD: usize = 32 << 10;
const MAX_RECORD: usize = 16 << 10;
/// What is encrypted may be longer. See RFC 5246, section 6.2.3.
const MAX_ENCRYPTED: usize = MAX_RECORD + 2048;

/// Types of records.
const CHANGE_CIPHER_SPEC: u8 = 0x14;
const ALERT: u8 = 0x15;
const HANDSHAKE: u8 = 0x16;
const APPLICATION_DATA: u8 = 0x17;

const CLIENT_HELLO: u8 = 1;
/// Types of extensions. The one with an encrypted hello is left alone: only the server of the name outside,
/// which is judged, can read the name inside, as it can all else within TLS.
const SERVER_NAME: u16 = 0;
const EARLY_DATA: u16 = 42;
const SUPPORTED_VERSIONS: u16 = 43;

/// A client that speaks TLS, from its first byte on.
#[derive(Default)]
pub(super) struct Tls {
    /// Records that may not go on yet.
    held: Vec<u8>,
    /// What the head of the current record has so far, its type and what is to come of it.
    head: Vec<u8>,
    kind: u8,
    left: usize,
    /// The current message, put together from its records.
    message: Vec<u8>,
    /// Whether this is after the first hello.
    again: bool,
    /// Whether the client may send data before the server has answered, or asked for another hello.
    early: bool,
}

/// What a hello says that matters here.
#[derive(Debug, Default, PartialEq, Eq)]
struct Hello {
    name: Option<String>,
    early: bool,
    /// Whether it may be for TLS 1.3, which names its version there.
    newest: bool,
}

impl Tls {
    pub(super) fn feed(
        &mut self,
        bytes: &[u8],
        out: &mut Vec<u8>,
        allows: &dyn Fn(&str) -> bool,
    ) -> Result<Flow, Refusal> {
        let mut rest = bytes;
        while let Some((byte, after)) = rest.split_first() {
            if self.left > 0 && self.kind != HANDSHAKE {
                let (piece, after) = rest.split_at(self.left.min(rest.len()));
                out.extend_from_slice(piece);
                self.left -= piece.len();
                rest = after;
                continue;
            }
            rest = after;
            self.held.push(*byte);
            let flow = if self.left > 0 {
                self.left -= 1;
                self.message.push(*byte);
                self.handshake(out, allows)?
            } else {
                self.head.push(*byte);
                self.record(out)?
            };
            if flow == Flow::Free {
                out.append(&mut self.held);
                out.extend_from_slice(rest);
                return Ok(Flow::Free);
            }
            if self.held.len() >= MAX_HELD {
                return Err(Refusal::tls("a hello in too many records"));
            }
        }
        Ok(Flow::Watched)
    }

    pub(super) fn finish(&self) -> Result<(), Refusal> {
        if self.held.is_empty() { Ok(()) } else { Err(Refusal::tls("a hello that is not whole")) }
    }

    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Looks at the head of a record, once it is whole.
    fn record(&mut self, out: &mut Vec<u8>) -> Result<Flow, Refusal> {
        let [kind, major, _, high, low] = self.head[..] else { return Ok(Flow::Watched) };
        self.head.clear();
        let length = usize::from(u16::from_be_bytes([high, low]));
        let most = if kind == HANDSHAKE { MAX_RECORD } else { MAX_ENCRYPTED };
        if major != 3 || length == 0 || length > most {
            return Err(Refusal::tls("a record that TLS does not have"));
        }
        (self.kind, self.left) = (kind, length);
        match kind {
            HANDSHAKE => Ok(Flow::Watched),
            _ if !self.again || !self.message.is_empty() => {
                Err(Refusal::tls("a hello with another record in it"))
            }
            // Only whoever announced early data may send some and then another hello: nobody else sends
            // data before all hellos are over.
            APPLICATION_DATA if !self.early => Ok(Flow::Free),
            // TLS 1.3 puts the first of these before its second hello, for the sake of old boxes between.
            CHANGE_CIPHER_SPEC | ALERT | APPLICATION_DATA => {
                out.append(&mut self.held);
                Ok(Flow::Watched)
            }
            _ => Err(Refusal::tls("a record that TLS does not have")),
        }
    }

    /// Looks at a message of which one more byte came.
    fn handshake(
        &mut self,
        out: &mut Vec<u8>,
        allows: &dyn Fn(&str) -> bool,
    ) -> Result<Flow, Refusal> {
        if !self.may_be_hello() {
            // After one hello this is what TLS 1.2 goes on with, in the clear or not. No server takes
            // another hello then.
            let bad = || Refusal::tls("TLS that begins with no hello");
            return self.again.then_some(Flow::Free).ok_or_else(bad);
        }
        let [_, high, middle, low, body @ ..] = &self.message[..] else { return Ok(Flow::Watched) };
        let length = u32::from_be_bytes([0, *high, *middle, *low]);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_HELLO {
            return Err(Refusal::tls("a hello that is too long"));
        }
        if body.len() < length {
            return Ok(Flow::Watched);
        }
        if self.left > 0 {
            return Err(Refusal::tls("a hello with more in its record"));
        }
        let hello = Hello::read(body).ok_or_else(|| Refusal::tls("a hello that cannot be read"))?;
        // Without a name there the server takes the one that was dialled, which was checked.
        if let Some(name) = hello.name {
            check(name, false, allows)?;
        }
        if self.again || !hello.newest {
            return Ok(Flow::Free);
        }
        (self.again, self.early) = (true, hello.early);
        self.message.clear();
        out.append(&mut self.held);
        Ok(Flow::Watched)
    }

    /// Reports whether the message is a hello as far as it came.
    fn may_be_hello(&self) -> bool {
        // What is encrypted hardly ever seems a second one: no server takes one longer than 128 KiB and a
        // little, so its length begins with little.
        match self.message[..] {
            [kind, high, ..] => kind == CLIENT_HELLO && (!self.again || high <= 2),
            [kind] => kind == CLIENT_HELLO,
            [] => true,
        }
    }
}

impl Hello {
    /// Reads a hello, of which all lengths have to add up.
    fn read(body: &[u8]) -> Option<Self> {
        let mut body = Bytes(body);
        let [major, _] = body.take(2)? else { return None };
        let _random = body.take(32)?;
        let session = body.short()?;
        let ciphers = body.long()?;
        let compressions = body.short()?;
        let odd = *major != 3 || session.0.len() > 32 || ciphers.0.len() % 2 != 0;
        if odd || ciphers.0.is_empty() || compressions.0.is_empty() {
            return None;
        }
        let mut hello = Self::default();
        if body.0.is_empty() {
            // SSL 3.0 had no extensions.
            return Some(hello);
        }
        let mut extensions = body.long()?;
        if !body.0.is_empty() {
            return None;
        }
        while !extensions.0.is_empty() {
            let kind = extensions.number()?;
            let extension = extensions.long()?;
            match kind {
                SERVER_NAME if hello.name.is_some() => return None,
                SERVER_NAME => hello.name = Some(Self::name(extension)?),
                EARLY_DATA => hello.early = true,
                SUPPORTED_VERSIONS => hello.newest = true,
                _ => {}
            }
        }
        Some(hello)
    }

    /// Reads the one name of the one kind that there is.
    fn name(mut extension: Bytes<'_>) -> Option<String> {
        let mut list = extension.long()?;
        let [0] = list.take(1)? else { return None };
        let name = list.long()?;
        if extension.0.is_empty() && list.0.is_empty() { canonical(name.0) } else { None }
    }
}

/// What is left to read.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.take(2)?.try_into().ok()?))
    }

    /// Takes what has its length before it, in one byte.
    fn short(&mut self) -> Option<Self> {
        let [length] = self.take(1)? else { return None };
        self.take(usize::from(*length)).map(Self)
    }

    /// Takes what has its length before it, in two bytes.
    fn long(&mut self) -> Option<Self> {
        let length = self.number()?;
        self.take(usize::from(length)).map(Self)
    }
}
