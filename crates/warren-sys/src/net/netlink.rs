//! Talking with the kernel over netlink: messages made of attributes, each answered by an errno.
//!
//! The kernel works on what it is sent within the very call that sends it, so its answers are there when that returns,
//! and nothing here ever waits. See netlink(7), and `linux/netlink.h` of the kernel for the layouts.

use std::ffi::c_int;
use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send,
    socket_with,
};

/// Messages to be sent together, numbered from 1.
#[derive(Debug, Default)]
pub(super) struct Request {
    bytes: Vec<u8>,
    /// The number of the last message.
    last: u32,
    /// How many of them are to be answered even if nothing went wrong.
    acknowledged: usize,
}

impl Request {
    /// Adds a message: the `header` of its family, and the attributes that `body` adds.
    pub(super) fn message(
        &mut self,
        kind: c_int,
        flags: c_int,
        header: &[u8],
        body: impl FnOnce(&mut Self),
    ) {
        let flags = flags | libc::NLM_F_REQUEST;
        self.last += 1;
        self.acknowledged += usize::from(flags & libc::NLM_F_ACK != 0);
        let start = self.bytes.len();
        // struct nlmsghdr: length, type, flags, number, and the sender, whom the kernel knows.
        self.bytes.extend([0; 4]);
        self.bytes.extend(narrow(kind).to_ne_bytes());
        self.bytes.extend(narrow(flags).to_ne_bytes());
        self.bytes.extend(self.last.to_ne_bytes());
        self.bytes.extend([0; 4]);
        self.bytes.extend(header);
        self.pad();
        body(self);
        let length = u32::try_from(self.bytes.len() - start).expect("a message is short");
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    /// Adds an attribute.
    pub(super) fn attribute(&mut self, kind: c_int, value: &[u8]) {
        self.sized(kind, |request| request.bytes.extend(value));
    }

    /// Adds an attribute that is made of those that `body` adds.
    pub(super) fn nest(&mut self, kind: c_int, body: impl FnOnce(&mut Self)) {
        self.sized(kind | libc::NLA_F_NESTED, body);
    }

    fn sized(&mut self, kind: c_int, value: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        // struct nlattr: the length, without what is added at the end to align the next one, and the type.
        self.bytes.extend([0; 2]);
        self.bytes.extend(narrow(kind).to_ne_bytes());
        value(self);
        let length = u16::try_from(self.bytes.len() - start).expect("an attribute is short");
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// C's constants are wider than the fields that they are for.
fn narrow(constant: c_int) -> u16 {
    u16::try_from(constant).expect("a constant of 16 bits")
}

/// NETLINK_ROUTE, which is number 0: what a socket is for that is for nothing else.
pub(super) const ROUTES: Option<Protocol> = None;

/// A conversation with one subsystem of the kernel, about the network namespace of this thread.
#[derive(Debug)]
pub(super) struct Kernel(OwnedFd);

impl Kernel {
    pub(super) fn reach(subsystem: Option<Protocol>) -> io::Result<Self> {
        let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
        let socket = socket_with(family, SocketType::RAW, flags, subsystem)?;
        // Port 0 is the kernel. A socket that is connected is sent nothing by anybody else.
        connect(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self(socket))
    }

    /// Sends a request and takes its answers; an error is the first errno among them.
    pub(super) fn ask(&self, request: &Request) -> io::Result<()> {
        send(&self.0, &request.bytes, SendFlags::empty())?;
        let mut missing = request.acknowledged;
        while missing > 0 {
            // What follows the errno is our own message, which may be cut off.
            let mut answer = [0; ANSWER];
            let length = match recv(&self.0, &mut answer, RecvFlags::DONTWAIT) {
                Ok((length, _)) => length,
                Err(Errno::AGAIN) => return Err(io::Error::other("an unanswered message")),
                Err(error) => return Err(error.into()),
            };
            match outcome(&answer[..length]) {
                // An answer to none that asked for one is about the whole, and an error.
                Some((number, errno)) if (1..=request.last).contains(&number) => errno?,
                _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "an odd answer")),
            }
            missing -= 1;
        }
        Ok(())
    }
}

impl Kernel {
    /// Sends a question and returns the body of its answer: what follows struct nlmsghdr, cut off after a while.
    pub(super) fn tell(&self, question: &Request, kind: c_int) -> io::Result<Vec<u8>> {
        send(&self.0, &question.bytes, SendFlags::empty())?;
        let mut answer = [0; 256];
        let (length, _) = recv(&self.0, &mut answer, RecvFlags::DONTWAIT)?;
        let odd = || io::Error::new(io::ErrorKind::InvalidData, "an odd answer");
        let answer = &answer[..length];
        if let Some((_, errno)) = outcome(answer) {
            errno?;
            return Err(odd());
        }
        let (head, body) = answer.split_at_checked(HEADER).ok_or_else(odd)?;
        let is_kind = head[4..6] == narrow(kind).to_ne_bytes();
        if is_kind { Ok(body.to_vec()) } else { Err(odd()) }
    }
}

/// The length of struct nlmsghdr.
const HEADER: usize = 16;
/// The length of the part of an answer that tells something: struct nlmsghdr, and the errno.
const ANSWER: usize = 20;

/// Takes an answer apart: the number of the message it is for, and what became of that.
fn outcome(answer: &[u8]) -> Option<(u32, io::Result<()>)> {
    let field = |at: usize| answer.get(at..)?.first_chunk().copied();
    let (length, number) = (u32::from_ne_bytes(field(0)?), u32::from_ne_bytes(field(8)?));
    let [kind @ .., _, _] = field(4)?;
    let is_whole = usize::try_from(length).is_ok_and(|length| length >= ANSWER);
    if !is_whole || c_int::from(u16::from_ne_bytes(kind)) != libc::NLMSG_ERROR {
        return None;
    }
    match i32::from_ne_bytes(field(16)?) {
        0 => Some((number, Ok(()))),
        errno @ -4095..=-1 => Some((number, Err(io::Error::from_raw_os_error(-errno)))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_laid_out_as_the_kernel_reads_it() {
        let mut request = Request::default();
        request.message(0x10, 0, &[], |_| {});
        request.message(0x11, libc::NLM_F_ACK, &[7], |message| {
            message.nest(4, |inner| inner.attribute(1, b"five!"));
            message.attribute(2, &[9; 4]);
        });
        let sixteen = |number: u16| number.to_ne_bytes().to_vec();
        let thirty_two = |number: u32| number.to_ne_bytes().to_vec();
        let expected = [
            // Length, type, flags, number, sender.
            [thirty_two(16), sixteen(0x10), sixteen(1), thirty_two(1), vec![0; 4]].concat(),
            [thirty_two(44), sixteen(0x11), sixteen(1 | 4), thirty_two(2), vec![0; 4]].concat(),
            vec![7, 0, 0, 0],
            // A nested attribute's length has the padding of what is in it, and no other's has its own.
            [sixteen(16), sixteen(0x8004), sixteen(9), sixteen(1)].concat(),
            b"five!\0\0\0".to_vec(),
            [sixteen(8), sixteen(2), vec![9; 4]].concat(),
        ];
        assert_eq!(request.bytes, expected.concat());
        assert_eq!((request.last, request.acknowledged), (2, 1));
    }

    /// An answer with these in its header, and an errno.
    fn answer(length: u32, kind: u16, number: u32, errno: i32) -> Vec<u8> {
        let mut answer = length.to_ne_bytes().to_vec();
        answer.extend(kind.to_ne_bytes());
        answer.extend([0; 2]);
        answer.extend(number.to_ne_bytes());
        answer.extend([0; 4]);
        answer.extend(errno.to_ne_bytes());
        answer
    }

    #[test]
    fn an_answer_that_is_none_is_not_taken_for_one() {
        let told = |answer: &[u8]| {
            outcome(answer).map(|(number, result)| {
                (number, result.map_err(|error| error.raw_os_error().unwrap()))
            })
        };
        assert_eq!(told(&answer(36, 2, 7, 0)), Some((7, Ok(()))));
        assert_eq!(told(&answer(36, 2, 7, -17)), Some((7, Err(17))));
        assert_eq!(told(&answer(36, 2, 7, 17)), None, "no errno");
        assert_eq!(told(&answer(36, 2, 7, i32::MIN)), None, "no errno");
        assert_eq!(told(&answer(36, 3, 7, 0)), None, "of another type");
        for length in [0, 16, 19] {
            assert_eq!(told(&answer(length, 2, 7, 0)), None, "says that it is {length} long");
        }
        for length in 0..ANSWER {
            assert_eq!(told(&answer(36, 2, 7, 0)[..length]), None, "is {length} long");
        }
    }

    #[test]
    fn what_the_kernel_does_not_answer_is_an_error_and_no_wait() {
        let kernel = Kernel::reach(ROUTES).unwrap();
        // Nothing is done for a message without a type, which is answered only if that is asked for.
        let mut request = Request::default();
        request.message(libc::NLMSG_NOOP, 0, &[], |_| {});
        kernel.ask(&request).unwrap();
        request.acknowledged = 1;
        assert_eq!(kernel.ask(&request).unwrap_err().to_string(), "an unanswered message");
        let mut request = Request::default();
        request.message(libc::NLMSG_NOOP, libc::NLM_F_ACK, &[], |_| {});
        kernel.ask(&request).expect("control: it is answered");
    }
}
