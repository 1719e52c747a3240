//! Names that commands ask for. A sandbox has no name server, and init is the one who says so.
//!
//! Whoever wants to reach somebody mostly begins with a name, and asks the own loopback for it, since
//! `/etc/resolv.conf` names nobody else. Init listens there, refuses the question, and remembers what
//! it was about: so where a command wanted to go is known, and nobody pays for it who asks for nothing.
//!
//! Of a name that may be reached it says an address that nobody has, from its own [`Book`]: whoever connects to that
//! is asked again by that name, outside. So no question ever goes anywhere, and where a name leads is found out once,
//! by the one who then goes there. What arrives is written by an attacker.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recvfrom, sendto,
    socket_with, sockopt,
};

use crate::domain;
use crate::plan::Range;

/// How many questions are answered before init looks at what else there is to do.
pub(crate) const AT_ONCE: usize = 16;

/// Where names are asked for.
const PORT: u16 = 53;
/// How many bytes of questions may wait; what comes then is lost, and asked again.
const ROOM: usize = 16 << 10;
/// The longest question of one name, with what newer programs append to it.
const LONGEST: usize = 512;
/// What every message begins with. See RFC 1035, 4.1.1.
const HEAD: usize = 12;
/// How long a name may be in a message, its end included. See RFC 1035, 2.3.4.
const LONGEST_NAME: usize = 255;

/// Listens to questions for names.
#[derive(Debug)]
pub(crate) struct Names {
    socket: OwnedFd,
}

impl Names {
    /// Listens in the network of this process, where the loopback is up and nobody listens yet.
    pub(crate) fn listen() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
        sockopt::set_socket_recv_buffer_size(&socket, ROOM)?;
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, PORT))?;
        Ok(Self { socket })
    }

    /// What it listens with.
    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Answers the next question that waits, and returns its name if that was refused, which is empty if nobody can read
    /// it; `None` if nobody asks.
    pub(crate) fn answer_next(&self, mut book: Option<&mut Book>) -> Option<Option<Vec<u8>>> {
        let mut packet = [0; LONGEST];
        let (length, _, from) = recvfrom(&self.socket, &mut packet, RecvFlags::empty()).ok()?;
        let packet = &packet[..length];
        let question = Question::read(packet);
        let found = book.as_mut().zip(question.as_ref()).and_then(|(book, question)| {
            let address = book.address_of(&question.name)?;
            Some(answer(packet, question, address))
        });
        let refused = found.is_none();
        let said = found.or_else(|| refusal(packet, question.as_ref()));
        if let (Some(said), Some(from)) = (said, from) {
            // Whoever does not take it asks again.
            let _ = sendto(&self.socket, &said, SendFlags::empty(), &from);
        }
        let name = || question.map(|question| question.name).unwrap_or_default();
        Some(refused.then(name))
    }
}

/// Addresses that nobody has (RFC 2544), one for each name that was asked for.
#[derive(Debug)]
pub(crate) struct Book {
    /// Which names get one.
    patterns: Vec<String>,
    /// The last of them, each in the place that its number leads to.
    pages: Vec<Option<(u32, String)>>,
    numbers: HashMap<String, u32>,
    /// The number that the next name gets.
    next: u32,
}

impl Book {
    /// All that it gives out.
    pub(crate) const RANGE: Range =
        Range { address: std::net::IpAddr::V4(Ipv4Addr::new(198, 18, 0, 0)), bits: 15 };
    /// How many names it remembers; older ones get another number.
    const PAGES: u32 = 4096;
    /// How many numbers there are: all of the range but its first and last address.
    const NUMBERS: u32 = (1 << 17) - 2;
    const FIRST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);

    pub(crate) fn new(patterns: &[String]) -> Self {
        let pages = (0..Self::PAGES).map(|_| None).collect();
        Self { patterns: patterns.to_vec(), pages, numbers: HashMap::new(), next: 0 }
    }

    /// Returns the address of a name that may be asked for.
    fn address_of(&mut self, name: &[u8]) -> Option<Ipv4Addr> {
        let name = domain::canonical(name)?;
        if !self.patterns.iter().any(|pattern| domain::matches(pattern, &name)) {
            return None;
        }
        let number = match self.numbers.get(&name) {
            Some(number) => *number,
            None => self.note(name),
        };
        Some(Ipv4Addr::from(u32::from(Self::FIRST) + number))
    }

    /// Gives a name its number, and forgets the one that was in its place.
    fn note(&mut self, name: String) -> u32 {
        let number = self.next;
        self.next = (number + 1) % Self::NUMBERS;
        if let Some(page) = self.pages.get_mut((number % Self::PAGES) as usize) {
            if let Some((_, before)) = page.replace((number, name.clone())) {
                self.numbers.remove(&before);
            }
            self.numbers.insert(name, number);
        }
        number
    }

    /// Returns the name that an address was given out for.
    pub(crate) fn name_of(&self, address: Ipv4Addr) -> Option<&str> {
        let number = u32::from(address).checked_sub(u32::from(Self::FIRST))?;
        let page = self.pages.get((number % Self::PAGES) as usize)?.as_ref();
        page.filter(|(known, _)| *known == number).map(|(_, name)| name.as_str())
    }

    /// Reports whether it could have given out this address.
    pub(crate) fn gives(address: Ipv4Addr) -> bool {
        (u32::from(address) ^ u32::from(Self::FIRST)) >> 17 == 0
    }
}

impl AsFd for Names {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What somebody wants to know.
#[derive(Debug, PartialEq, Eq)]
struct Question {
    /// The name, its parts divided by dots. They may hold any byte.
    name: Vec<u8>,
    /// What is to be known of it.
    kind: u16,
    /// Where in the message it ends, with its type and class.
    end: usize,
}

impl Question {
    /// Reads the one question of a message, if that is what it is.
    fn read(packet: &[u8]) -> Option<Self> {
        let (head, mut rest) = packet.split_at_checked(HEAD)?;
        // An ordinary question, and one of it: the first bit is that of an answer, the next four are its kind.
        if head[2] & 0xf8 != 0 || head[4..6] != [0, 1] {
            return None;
        }
        let mut name = Vec::new();
        loop {
            let (length, after) = rest.split_first()?;
            rest = after;
            match length {
                0 => break,
                // More would be a reference to another place, which no question has.
                1..=63 => {
                    let (label, after) = rest.split_at_checked(usize::from(*length))?;
                    if !name.is_empty() {
                        name.push(b'.');
                    }
                    name.extend_from_slice(label);
                    rest = after;
                }
                _ => return None,
            }
            if name.len() + 2 > LONGEST_NAME {
                return None;
            }
        }
        let (kind, rest) = rest.split_at_checked(4)?;
        let kind = u16::from_be_bytes([kind[0], kind[1]]);
        Some(Self { name, kind, end: packet.len() - rest.len() })
    }
}

/// Returns what is answered to a message; nothing if it is no question at all.
fn refusal(packet: &[u8], question: Option<&Question>) -> Option<Vec<u8>> {
    /// This is an answer.
    const ANSWER: u8 = 0x80;
    /// "Refused". See RFC 1035, 4.1.1.
    const REFUSED: u8 = 5;
    // An answer to an answer would have two of us talk for ever.
    if packet.len() < HEAD || packet[2] & ANSWER != 0 {
        return None;
    }
    let mut answer = packet[..question.map_or(HEAD, |question| question.end)].to_vec();
    // The kind of the question and its wish for more stay as they are.
    answer[2] = packet[2] & 0x79 | ANSWER;
    answer[3] = REFUSED;
    answer[4..HEAD].fill(0);
    answer[5] = question.is_some().into();
    Some(answer)
}

/// Returns what is answered about a name that has this address: nothing, to who asks for something else than that.
fn answer(packet: &[u8], question: &Question, address: Ipv4Addr) -> Vec<u8> {
    /// An IPv4 address. See RFC 1035, 3.2.2.
    const ADDRESS: u16 = 1;
    /// Whoever answers asks others if it has to.
    const RECURSIVE: u8 = 0x80;
    let mut answer = refusal(packet, Some(question)).unwrap_or_default();
    if let Some(said) = answer.get_mut(3) {
        *said = RECURSIVE;
    }
    if question.kind == ADDRESS
        && let Some(count) = answer.get_mut(7)
    {
        *count = 1;
        // The name is the one at the first place, of the kind and class of the question; good for half a minute.
        answer.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 30, 0, 4]);
        answer.extend_from_slice(&address.octets());
    }
    answer
}

/// Throws bytes at what reads questions.
#[cfg(feature = "fuzz")]
pub fn fuzz(packet: &[u8]) {
    let question = Question::read(packet);
    let Some(refused) = refusal(packet, question.as_ref()) else { return };
    assert!(refused.len() <= packet.len(), "nobody gets more than it sent");
    assert!(refusal(&refused, None).is_none(), "nobody answers an answer");
    if let Some(question) = question {
        assert!(question.name.len() < LONGEST_NAME);
        let mut book = Book::new(&[domain::EVERY.to_owned()]);
        let Some(address) = book.address_of(&question.name) else { return };
        assert_eq!(book.name_of(address), domain::canonical(&question.name).as_deref());
        let answer = answer(packet, &question, address);
        assert!(answer.len() <= packet.len() + 16 && answer.len() < LONGEST + 16);
        assert!(refusal(&answer, None).is_none(), "nobody answers an answer");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(name: &[&[u8]]) -> Vec<u8> {
        let mut packet = vec![0xab, 0xcd, 1, 0x20, 0, 1, 0, 0, 0, 0, 0, 1];
        for label in name {
            packet.push(label.len().try_into().unwrap());
            packet.extend_from_slice(label);
        }
        packet.extend_from_slice(&[0, 0, 28, 0, 1]);
        packet
    }

    #[test]
    fn the_name_of_a_question_is_read_and_the_question_refused() {
        let question = asked(&[b"pypi", b"org"]);
        let appended = [&question[..], &[0, 0, 41, 4, 176, 0, 0, 0, 0, 0, 0]].concat();
        let read = Question::read(&appended).unwrap();
        assert_eq!(
            (read.name.as_slice(), read.end),
            (&b"pypi.org"[..], question.len()),
            "without what is appended"
        );
        let answer = refusal(&appended, Some(&read)).unwrap();
        assert_eq!(answer[..HEAD], [0xab, 0xcd, 0x81, 5, 0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(answer[HEAD..], question[HEAD..], "the question is repeated");
    }

    #[test]
    fn a_name_that_may_be_reached_has_an_address_and_no_other_has() {
        let mut book = Book::new(&["pypi.org".to_owned(), "*.example".to_owned()]);
        let first = book.address_of(b"PyPI.org").unwrap();
        assert_eq!(first, Ipv4Addr::new(198, 18, 0, 1));
        assert_eq!(book.address_of(b"pypi.org."), Some(first), "the same name");
        assert_ne!(book.address_of(b"a.example"), Some(first));
        assert_eq!(book.name_of(first), Some("pypi.org"));
        for other in ["example", "pypi.org.evil", "xpypi.org", "", "pypi.org\0"] {
            assert_eq!(book.address_of(other.as_bytes()), None, "{other}");
        }
        assert_eq!(book.name_of(Ipv4Addr::new(198, 18, 0, 3)), None, "not given out");
        assert_eq!(book.name_of(Ipv4Addr::new(127, 0, 0, 1)), None);

        let question = asked(&[b"pypi", b"org"]);
        let read = Question::read(&question).unwrap();
        let none = answer(&question, &read, first);
        assert_eq!(none[2..HEAD], [0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0], "none of this kind");
        let mut v4 = question.clone();
        let kind = v4.len() - 3;
        v4[kind] = 1;
        let read = Question::read(&v4).unwrap();
        let one = answer(&v4, &read, first);
        assert_eq!(one[2..HEAD], [0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(one[v4.len()..], [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 30, 0, 4, 198, 18, 0, 1]);
    }

    #[test]
    fn a_book_forgets_the_oldest_name_and_never_takes_one_for_another() {
        let mut book = Book::new(&[domain::EVERY.to_owned()]);
        let first = book.address_of(b"n0.example").unwrap();
        let all: Vec<_> = (0..Book::NUMBERS + 10)
            .map(|n| book.address_of(format!("n{n}.example").as_bytes()).unwrap())
            .collect();
        assert!(all.iter().all(|address| Book::gives(*address)), "in its range");
        let last = all.last().unwrap();
        assert_eq!(book.name_of(*last), Some(format!("n{}.example", Book::NUMBERS + 9).as_str()));
        let old = book.name_of(Ipv4Addr::from(u32::from(*last) - Book::PAGES));
        assert_eq!(old, None, "forgotten, and not mistaken");
        assert_ne!(book.name_of(first), Some("n0.example"));
        assert!(book.numbers.len() <= Book::PAGES as usize);
        let outside = [Ipv4Addr::new(198, 17, 255, 255), Ipv4Addr::new(198, 20, 0, 0)];
        assert!(!outside.into_iter().any(Book::gives));
    }

    #[test]
    fn what_is_no_question_has_no_name_and_no_long_answer() {
        let good = asked(&[b"pypi", b"org"]);
        assert!(Question::read(&good).is_some(), "control");
        for cut in 0..good.len() {
            assert_eq!(Question::read(&good[..cut]), None, "cut to {cut} bytes");
        }
        let mut two = good.clone();
        two[5] = 2;
        let mut update = good.clone();
        update[2] |= 5 << 3;
        let reference = [&good[..HEAD], &[0xc0, 12, 0, 1, 0, 1]].concat();
        let long = asked(&[[b'x'; 63].as_slice(); 4]);
        for bad in [&two, &update, &reference, &long] {
            assert_eq!(Question::read(bad), None, "{bad:?}");
            assert_eq!(refusal(bad, None).map(|answer| answer.len()), Some(HEAD));
        }
        assert!(Question::read(&asked(&[[b'x'; 63].as_slice(); 3])).is_some(), "control: shorter");
        let mut answer = good;
        answer[2] |= 0x80;
        assert_eq!((refusal(&answer, None), refusal(b"short", None)), (None, None));
    }
}
