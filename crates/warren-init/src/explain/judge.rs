//! Whether a wall refused something, decided from facts alone: pure.
//!
//! Of everything that fails most is nobody's wall: a file that is not there, a permission of the file's
//! own, a port that nobody listens on. What is not shown to be a wall's is not told.

use rustix::io::Errno;
use warren_sys::seccomp::{Action, Call, Instruction, evaluate};

use crate::protocol::denied::{PathWall, Refused, Right};

/// What is known of a path that a call named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// All of it, with the links that are there resolved.
    pub(crate) path: Vec<u8>,
    /// The part of it that is there.
    pub(crate) place: Vec<u8>,
    /// The mount that the place is on.
    pub(crate) mount: Mount,
    /// Whether the permissions of what is there allow what was wanted.
    pub(crate) permitted: bool,
}

impl Found {
    fn is_there(&self) -> bool {
        self.path == self.place
    }
}

/// What is known of a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) point: Vec<u8>,
    pub(crate) read_only: bool,
    pub(crate) no_execute: bool,
}

/// What the walls of a sandbox allow.
#[derive(Debug)]
pub(crate) struct Walls {
    /// Where Landlock lets be written.
    pub(crate) writable: Vec<Vec<u8>>,
    /// Where it lets be read; everywhere if nothing is said.
    pub(crate) readable: Option<Vec<Vec<u8>>>,
    /// The filters of a command, the older first.
    pub(crate) filters: Vec<Vec<Instruction>>,
}

impl Walls {
    /// Decides whether a wall refused what was wanted of a path.
    pub(crate) fn of_path(&self, errno: Errno, right: Right, found: &Found) -> Option<Refused> {
        let Found { path, place, mount, permitted } = found;
        let by = |wall| {
            let (path, place) = (path.clone(), place.clone());
            Some(Refused::Path { path, place, right, wall })
        };
        let point = || mount.point.clone();
        match errno {
            Errno::ROFS if mount.read_only => by(PathWall::ReadOnly { mount: point() }),
            Errno::ACCESS if right == Right::Execute && mount.no_execute => {
                by(PathWall::NoExecute { mount: point() })
            }
            Errno::ACCESS if !self.grants(right, found) => {
                by(PathWall::Rules { closed: !permitted })
            }
            Errno::NOENT if !found.is_there() && self.readable.is_none() => {
                // On another mount the host has it as little, or it is the kernel's.
                let bare = mount.point == b"/" && !is_below_any(place, &self.writable);
                bare.then(|| Refused::Absent { path: path.clone(), right })
            }
            _ => None,
        }
    }

    /// Reports whether Landlock grants a right. It has none on modes, owners, times and attributes.
    fn grants(&self, right: Right, found: &Found) -> bool {
        let holder = match right {
            Right::Create | Right::Remove => parent(&found.path),
            Right::Read | Right::Write | Right::Execute | Right::Change => &found.path,
        };
        match right {
            Right::Write | Right::Create | Right::Remove => is_below_any(holder, &self.writable),
            Right::Read | Right::Execute => self.readable.as_ref().is_none_or(|readable| {
                is_below_any(holder, readable) || is_below_any(holder, &self.writable)
            }),
            Right::Change => true,
        }
    }

    /// Decides whether the filters refuse a call: with which errno, and what of it is to be told.
    pub(crate) fn of_call(&self, call: &Call) -> Option<(u16, Option<Refused>)> {
        let answers = self.filters.iter().map(|filter| evaluate(filter, call));
        let answer = answers.fold(Action::Allow, |older, newer| newer.stacked_on(older));
        let Action::Errno(errno) = answer else { return None };
        // What every C library calls first, and does without by `clone`.
        let is_told = i64::from(call.nr) != libc::SYS_clone3;
        Some((errno, is_told.then_some(Refused::Call { nr: call.nr, args: call.args })))
    }
}

/// Decides whether no way out of the sandbox's network is what refused an address.
pub(crate) fn of_address(errno: Errno, address: &[u8]) -> Option<Refused> {
    if !matches!(errno, Errno::NETUNREACH | Errno::HOSTUNREACH) {
        return None;
    }
    let family = u16::from_ne_bytes(*address.first_chunk()?);
    let port = u16::from_be_bytes(*address.get(2..)?.first_chunk()?);
    let address = match i32::from(family) {
        libc::AF_INET => address.get(4..8)?,
        libc::AF_INET6 => address.get(8..24)?,
        _ => return None,
    };
    // Its own, which it does reach.
    let own = address[0] == 127 && address.len() == 4;
    (!own).then(|| Refused::Address { address: address.to_vec(), port })
}

/// Returns what holds the last part of a path.
pub(crate) fn parent(path: &[u8]) -> &[u8] {
    match path.iter().rposition(|byte| *byte == b'/') {
        None | Some(0) => b"/",
        Some(end) => &path[..end],
    }
}

fn is_below_any(path: &[u8], places: &[Vec<u8>]) -> bool {
    places.iter().any(|place| is_below(path, place))
}

fn is_below(path: &[u8], place: &[u8]) -> bool {
    let rest = path.strip_prefix(place);
    place == b"/" || rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

#[cfg(test)]
mod tests {
    use warren_sys::seccomp::{Arch, NO_SUCH_CALL, Rule, compile};

    use super::*;

    fn walls() -> Walls {
        let writable = [&b"/workspace"[..], b"/tmp"].map(<[u8]>::to_vec).to_vec();
        Walls { writable, readable: None, filters: Vec::new() }
    }

    fn found(path: &str, place: &str, point: &str) -> Found {
        let mount = Mount {
            point: point.into(),
            read_only: point == "/usr",
            no_execute: point == "/dev/shm",
        };
        Found { path: path.into(), place: place.into(), mount, permitted: true }
    }

    #[test]
    fn a_path_is_told_only_where_a_wall_is_shown_to_refuse_it() {
        let walls = walls();
        let judged = |errno, right, found: &Found| match walls.of_path(errno, right, found) {
            Some(Refused::Path { wall, .. }) => Some(Some(wall)),
            Some(_) => Some(None),
            None => None,
        };
        let (usr, own) = (found("/usr/x", "/usr", "/usr"), found("/tmp/x", "/tmp/x", "/tmp"));
        let etc = found("/etc/x", "/etc", "/");
        let read_only = PathWall::ReadOnly { mount: b"/usr".to_vec() };
        let rules = |closed| PathWall::Rules { closed };
        let closed = Found { permitted: false, ..etc.clone() };
        let shm = found("/dev/shm/x", "/dev/shm/x", "/dev/shm");
        let no_execute = PathWall::NoExecute { mount: b"/dev/shm".to_vec() };
        for (errno, right, found, expected) in [
            (Errno::ROFS, Right::Create, &usr, Some(Some(read_only))),
            (Errno::ROFS, Right::Create, &own, None),
            (Errno::ACCESS, Right::Create, &etc, Some(Some(rules(false)))),
            (Errno::ACCESS, Right::Create, &closed, Some(Some(rules(true)))),
            (Errno::ACCESS, Right::Write, &own, None),
            (Errno::ACCESS, Right::Read, &closed, None),
            (Errno::ACCESS, Right::Change, &closed, None),
            (Errno::ACCESS, Right::Execute, &shm, Some(Some(no_execute))),
            (Errno::ACCESS, Right::Execute, &own, None),
            (Errno::NOENT, Right::Read, &etc, Some(None)),
            (Errno::NOENT, Right::Read, &usr, None),
            (Errno::NOENT, Right::Read, &found("/tmp/x/y", "/tmp/x", "/"), None),
            (Errno::PERM, Right::Change, &etc, None),
        ] {
            assert_eq!(judged(errno, right, found), expected, "{errno:?} {right:?} {found:?}");
        }
        // `/tmpfoo` is not below `/tmp`.
        let beside = found("/tmpfoo", "/tmpfoo", "/");
        assert!(walls.of_path(Errno::ACCESS, Right::Write, &beside).is_some());
    }

    #[test]
    fn without_a_root_of_its_own_reading_is_refused_where_no_rule_grants_it() {
        let walls = Walls { readable: Some(vec![b"/usr".to_vec()]), ..walls() };
        let read = |path: &str| {
            walls.of_path(Errno::ACCESS, Right::Read, &found(path, path, "/")).is_some()
        };
        assert_eq!((read("/usr/bin/x"), read("/tmp/x"), read("/home/x")), (false, false, true));
        let absent = found("/home/x", "/home", "/");
        assert_eq!(walls.of_path(Errno::NOENT, Right::Read, &absent), None);
    }

    #[test]
    fn a_call_is_told_only_if_a_filter_refuses_it() {
        let rule = |nr: i64, action| Rule { nr: nr.try_into().unwrap(), action, when: Vec::new() };
        let older = [rule(libc::SYS_mount, Action::Errno(1)), rule(libc::SYS_clone3, NO_SUCH_CALL)];
        let newer = [rule(libc::SYS_ptrace, Action::Errno(1))];
        let filters =
            [&older[..], &newer].map(|rules| compile(Arch::NATIVE, Action::Allow, rules).unwrap());
        let walls = Walls { filters: filters.to_vec(), ..walls() };
        let judged = |nr: i64| {
            let call =
                Call { arch: Arch::NATIVE.audit(), nr: nr.try_into().unwrap(), args: [0; 6] };
            walls.of_call(&call).map(|(errno, told)| (errno, told.is_some()))
        };
        assert_eq!([libc::SYS_mount, libc::SYS_ptrace].map(judged), [Some((1, true)); 2]);
        assert_eq!(judged(libc::SYS_chown), None, "the filter lets it through");
        assert_eq!(judged(libc::SYS_clone3), Some((38, false)), "every program does without");
    }

    #[test]
    fn an_address_is_told_if_no_way_leads_there_and_it_is_not_the_sandboxs_own() {
        let v4 = |a: [u8; 4]| [&2u16.to_ne_bytes()[..], &80u16.to_be_bytes(), &a, &[0; 8]].concat();
        let outside = v4([169, 254, 169, 254]);
        let told = Refused::Address { address: vec![169, 254, 169, 254], port: 80 };
        assert_eq!(of_address(Errno::NETUNREACH, &outside), Some(told));
        assert_eq!(of_address(Errno::CONNREFUSED, &outside), None);
        assert_eq!(of_address(Errno::NETUNREACH, &v4([127, 0, 0, 1])), None);
        assert_eq!(of_address(Errno::NETUNREACH, &outside[..7]), None, "cut short");
        let v6 = [&10u16.to_ne_bytes()[..], &[1, 187, 0, 0, 0, 0], &[0x20; 16], &[0; 4]].concat();
        let told = Refused::Address { address: vec![0x20; 16], port: 443 };
        assert_eq!(of_address(Errno::NETUNREACH, &v6), Some(told));
    }
}
