//! What walls refused to a command, as init saw it: facts, and no words for people.

use serde::{Deserialize, Serialize};

/// How many refusals are told of one command.
pub const MAX_DENIED: usize = 64;
/// How many bytes of paths are told of one command, all together.
pub const MAX_DENIED_BYTES: usize = 24 << 10;

/// Everything that walls refused to a command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denials {
    /// Each once, in the order in which they were met.
    pub list: Vec<Denied>,
    /// How many more there were than are told.
    pub omitted: u32,
}

/// Something that a wall refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denied {
    /// What.
    pub what: Refused,
    /// What the kernel answered; 0 if it was not the kernel who refused it.
    pub errno: i32,
    /// How often.
    pub count: u32,
}

/// What was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refused {
    /// To do something at a path.
    Path {
        /// The path as it was asked for, with the links that are there resolved.
        path: Vec<u8>,
        /// The part of it that is there.
        place: Vec<u8>,
        /// What was to be done.
        right: Right,
        /// By which wall.
        wall: PathWall,
    },
    /// To reach a path that is not in the sandbox, where the sandbox itself could not have put anything
    /// and nothing of the host is shown. Whether the host has it is not known here.
    Absent {
        /// The path.
        path: Vec<u8>,
        /// What was to be done.
        right: Right,
    },
    /// To make a system call, by the filter.
    Call {
        /// Its number.
        nr: u32,
        /// Its arguments.
        args: [u64; 6],
    },
    /// To reach an address, to which no way leads.
    Address {
        /// Four bytes of IPv4 or sixteen of IPv6.
        address: Vec<u8>,
        /// The port.
        port: u16,
    },
    /// To look up this name, its parts divided by dots: there is no name server.
    Name(Vec<u8>),
    /// More of something than there may be.
    Bound(Bound),
    /// To reach a destination, by whoever decides about that outside.
    Destination {
        /// Its name or address.
        to: Vec<u8>,
        /// The port.
        port: u16,
        /// Why.
        why: Barred,
    },
}

/// Why a destination is not to be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Barred {
    /// Nobody allowed it.
    NotAllowed,
    /// It is no public address, or has none.
    NotPublic,
    /// What the command said there cannot be judged, or is not said by anybody honest.
    Unclear,
}

/// What can be done at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Right {
    /// Read, list, look.
    Read,
    /// Write to what is there.
    Write,
    /// Make something.
    Create,
    /// Take something away.
    Remove,
    /// Execute it.
    Execute,
    /// Change its mode, owner, times or attributes.
    Change,
}

/// What stands in the way at a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PathWall {
    /// The mount at this place is read-only.
    ReadOnly {
        /// Where it is.
        mount: Vec<u8>,
    },
    /// Nothing is executed from the mount at this place.
    NoExecute {
        /// Where it is.
        mount: Vec<u8>,
    },
    /// The rules of Landlock do not grant it.
    Rules {
        /// Whether the permissions of the file would not allow it either.
        closed: bool,
    },
}

/// What there may be only so much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bound {
    /// Descriptors of one process.
    OpenFiles,
    /// Processes and threads.
    Processes,
    /// Bytes and files that were written.
    Written,
}

impl Denials {
    /// Notes one more; the same as one before is counted with it.
    pub fn add(&mut self, what: Refused, errno: i32) {
        self.note(Denied { what, errno, count: 1 });
    }

    /// Notes all of others.
    pub fn append(&mut self, others: &Self) {
        others.list.iter().for_each(|denied| self.note(denied.clone()));
        self.omitted = self.omitted.saturating_add(others.omitted);
    }

    fn note(&mut self, denied: Denied) {
        let same =
            |known: &&mut Denied| known.errno == denied.errno && known.what.is_same(&denied.what);
        if let Some(known) = self.list.iter_mut().find(same) {
            known.count = known.count.saturating_add(denied.count);
            return;
        }
        let bytes: usize = self.list.iter().map(|denied| denied.what.bytes()).sum();
        if self.list.len() >= MAX_DENIED || bytes + denied.what.bytes() > MAX_DENIED_BYTES {
            self.omitted = self.omitted.saturating_add(denied.count);
            return;
        }
        self.list.push(denied);
    }
}

impl Refused {
    /// Reports whether both are one thing to be told. A call counts once, whatever its arguments.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Call { nr: one, .. }, Self::Call { nr: other, .. }) => one == other,
            _ => self == other,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Path { path, place, .. } => path.len() + place.len(),
            Self::Absent { path, .. } => path.len(),
            Self::Name(name) => name.len(),
            Self::Destination { to, .. } => to.len(),
            Self::Call { .. } | Self::Address { .. } | Self::Bound(_) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_counted_and_what_is_beyond_the_bounds_too() {
        let mut denials = Denials::default();
        for nr in 0..100 {
            denials.add(Refused::Call { nr, args: [0; 6] }, 1);
            denials.add(Refused::Call { nr, args: [1; 6] }, 1);
        }
        assert_eq!((denials.list.len(), denials.list[0].count), (MAX_DENIED, 2));
        assert_eq!(denials.omitted, 2 * (100 - 64));
        let mut denials = Denials::default();
        for letter in b'a'..=b'z' {
            denials.add(Refused::Absent { path: vec![letter; 4000], right: Right::Read }, 2);
        }
        assert_eq!((denials.list.len(), denials.omitted), (6, 20));
    }
}
