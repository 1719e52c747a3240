//! Names that commands ask for. A sandbox has no name server, and init is the one who says so.
//!
//! Whoever wants to reach somebody mostly begins with a name, and asks the own loopback for it, since
//! `/etc/resolv.conf` names nobody else. Init listens there, refuses every question, and remembers what
//! it was about: so where a command wanted to go is known, and nobody pays for it who asks for nothing.
//!
//! Nothing else is done with a question: it goes nowhere, and every answer is the same. What arrives is
//! written by an attacker.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recvfrom, sendto,
    socket_with, sockopt,
};

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

    /// Refuses the next question that waits and returns its name, which is empty if nobody can read it;
    /// `None` if nobody asks.
    pub(crate) fn refuse_next(&self) -> Option<Vec<u8>> {
        let mut packet = [0; LONGEST];
        let (length, _, from) = recvfrom(&self.socket, &mut packet, RecvFlags::empty()).ok()?;
        let packet = &packet[..length];
        let question = Question::read(packet);
        if let (Some(answer), Some(from)) = (refusal(packet, question.as_ref()), from) {
            // Whoever does not take it asks again.
            let _ = sendto(&self.socket, &answer, SendFlags::empty(), &from);
        }
        Some(question.map(|question| question.name).unwrap_or_default())
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
        let rest = rest.get(4..)?;
        Some(Self { name, end: packet.len() - rest.len() })
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

/// Throws bytes at what reads questions.
#[cfg(feature = "fuzz")]
pub fn fuzz(packet: &[u8]) {
    let question = Question::read(packet);
    let Some(answer) = refusal(packet, question.as_ref()) else { return };
    assert!(answer.len() <= packet.len(), "nobody gets more than it sent");
    assert!(refusal(&answer, None).is_none(), "nobody answers an answer");
    if let Some(question) = question {
        assert!(question.name.len() < LONGEST_NAME);
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
