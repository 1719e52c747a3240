//! The follower of a command: sees the calls of it and of all it starts that something can be said about if they
//! fail, and judges those that do.
//!
//! Which calls it sees is said by a filter of the command's ([`calls::seen`]), so that all others run as ever; and
//! what its filters refuse traps, and is made to fail here as they say. Neither is made if nobody follows: a
//! command lives as long as its follower, and what it leaves behind does.
//!
//! Everything it reads of a command is the command's to change meanwhile: a path may be another by the
//! time it is read. So what is told is what was asked for as far as anybody can see; nothing relies on it.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::Pid;
use warren_sys::trace::{self, CallState, Event, GoOn, Stop, Waited};

use super::calls::{self, Named, Subject};
use super::judge::{self, Walls};
use super::place::{MAX_PATH, Surveyor};
use crate::protocol;
use crate::protocol::denied::{Bound, Denials, Refused, Right};

/// How often it is looked whether one that was stopped by a signal may go on: a process that is followed
/// since before it was born tells nobody of that.
const STANDING: Duration = Duration::from_millis(10);
/// The longest address of a socket that is read.
const MAX_ADDRESS: usize = 128;

/// Follows what `starter` starts until nothing is left to follow.
pub(super) fn follow(starter: Pid, walls: Walls, proc: OwnedFd, line: &OwnedFd) {
    let mut follower = Follower {
        starter,
        command: None,
        executed: false,
        told: false,
        known: HashSet::new(),
        standing: Vec::new(),
        begun: HashMap::new(),
        walls,
        surveyor: Surveyor::new(proc),
        denials: Denials::default(),
    };
    loop {
        match trace::wait(!follower.standing.is_empty()) {
            Ok(Waited::For(pid, Event::Stopped(stop))) => follower.stopped(pid, stop),
            Ok(Waited::For(pid, Event::Ended)) => follower.ended(pid, line),
            Ok(Waited::Nothing) => {
                std::thread::sleep(STANDING);
                follower.look_at_standing();
            }
            Ok(Waited::Nobody) | Err(_) => return,
        }
    }
}

struct Follower {
    starter: Pid,
    /// The first process that the starter started.
    command: Option<Pid>,
    /// Whether its program runs: what came before is ours.
    executed: bool,
    /// Whether the command has ended: what it left behind goes on alone.
    told: bool,
    /// Those that stopped once because they are followed.
    known: HashSet<Pid>,
    /// Those that a signal stopped.
    standing: Vec<Pid>,
    /// The call that each is in.
    begun: HashMap<Pid, (u64, [u64; 6])>,
    walls: Walls,
    surveyor: Surveyor,
    denials: Denials,
}

impl Follower {
    fn stopped(&mut self, pid: Pid, stop: Stop) {
        if self.known.insert(pid) {
            // Its first stop is the kernel's own, and nobody's signal.
            self.appeared(pid, stop);
            return;
        }
        let signal = match stop {
            Stop::Begins => {
                self.begins(pid);
                return;
            }
            Stop::Call => {
                self.ends(pid);
                0
            }
            // It is in the middle of the call that did so, and which does not fail.
            Stop::Started => {
                self.begun.remove(&pid);
                0
            }
            Stop::Executed => {
                self.begun.remove(&pid);
                self.executed |= self.command == Some(pid);
                0
            }
            Stop::Signal(libc::SIGSYS) if self.is_trapped(pid) => 0,
            Stop::Signal(signal) => signal,
            Stop::Group => {
                self.standing.push(pid);
                return;
            }
        };
        self.go_on(pid, signal);
    }

    fn appeared(&mut self, pid: Pid, stop: Stop) {
        if pid == self.starter {
            let _ = trace::follow_all(pid);
        } else {
            self.command.get_or_insert(pid);
        }
        let signal = match stop {
            Stop::Signal(signal) if signal != libc::SIGSTOP => signal,
            Stop::Signal(_)
            | Stop::Group
            | Stop::Begins
            | Stop::Call
            | Stop::Started
            | Stop::Executed => 0,
        };
        self.go_on(pid, signal);
    }

    fn go_on(&self, pid: Pid, signal: i32) {
        // One that was killed meanwhile is told of as ended.
        let _ = trace::go_on(pid, GoOn::On, signal);
    }

    /// Tells what was seen when the command is gone and nobody knows it yet; then lets it be known.
    fn ended(&mut self, pid: Pid, line: &OwnedFd) {
        if self.command == Some(pid) && !self.told {
            let _ = protocol::send(line, &self.denials, &[]);
            self.told = true;
        }
        self.known.remove(&pid);
        self.begun.remove(&pid);
        self.standing.retain(|standing| *standing != pid);
        let _ = trace::remove(pid);
    }

    /// Lets those go on that were told to.
    fn look_at_standing(&mut self) {
        let standing = std::mem::take(&mut self.standing);
        let (going, standing): (Vec<_>, Vec<_>) =
            standing.into_iter().partition(|pid| self.surveyor.is_told_to_go_on(*pid));
        self.standing = standing;
        for pid in going {
            self.go_on(pid, 0);
        }
    }

    /// A call begins. How it ends is of interest only while somebody is told.
    fn begins(&mut self, pid: Pid) {
        let how = match trace::call(pid) {
            Some(CallState::Begun { nr, args, .. }) if self.executed && !self.told => {
                self.begun.insert(pid, (nr, args));
                GoOn::ToEndOfCall
            }
            _ => GoOn::On,
        };
        let _ = trace::go_on(pid, how, 0);
    }

    fn ends(&mut self, pid: Pid) {
        let Some((nr, args)) = self.begun.remove(&pid) else { return };
        let Some(CallState::Ended(result)) = trace::call(pid) else { return };
        if let Ok(errno @ 1..=4095) = i32::try_from(result.wrapping_neg()) {
            self.failed(pid, Errno::from_raw_os_error(errno), nr, args);
        }
    }

    /// Has a call fail that the filters refuse, and notes it; `false` if the signal is another's.
    fn is_trapped(&mut self, pid: Pid) -> bool {
        let Some(call) = trace::trapped(pid) else { return false };
        let Some((errno, refused)) = self.walls.of_call(&call) else { return false };
        // Where that fails it is gone.
        let _ = trace::fail_trapped(pid, errno);
        if let Some(refused) = refused.filter(|_| self.executed && !self.told) {
            self.denials.add(refused, errno.into());
        }
        true
    }

    /// Notes why a call failed, if it was a wall.
    fn failed(&mut self, pid: Pid, errno: Errno, nr: u64, args: [u64; 6]) {
        let code = errno.raw_os_error();
        match errno {
            Errno::MFILE => self.denials.add(Refused::Bound(Bound::OpenFiles), code),
            Errno::AGAIN if calls::starts_a_task(nr) => {
                self.denials.add(Refused::Bound(Bound::Processes), code);
            }
            Errno::NOSPC if crate::serve::scratch_is_full(None) => {
                self.denials.add(Refused::Bound(Bound::Written), code);
            }
            Errno::NOENT | Errno::ACCESS | Errno::ROFS => {
                for subject in calls::subjects(nr, &args) {
                    if let Some(refused) = self.judge(pid, errno, subject) {
                        self.denials.add(refused, code);
                    }
                }
            }
            Errno::NETUNREACH | Errno::HOSTUNREACH => {
                for subject in calls::subjects(nr, &args) {
                    let address = address(pid, subject);
                    if let Some(refused) =
                        address.and_then(|address| judge::of_address(errno, &address))
                    {
                        self.denials.add(refused, code);
                    }
                }
            }
            _ => {}
        }
    }

    /// Decides about one path that a call named, itself or as the address of a socket.
    fn judge(&mut self, pid: Pid, errno: Errno, subject: Subject) -> Option<Refused> {
        let (named, path) = match subject {
            Subject::Path(named) => (named, trace::read_string(pid, named.pointer, MAX_PATH)?),
            Subject::Address { .. } | Subject::Message { .. } => {
                let path = socket_path(&address(pid, subject)?)?;
                let right = match errno {
                    Errno::NOENT => Right::Read,
                    _ => Right::Create,
                };
                (Named { base: None, pointer: 0, right, absent: right }, path)
            }
        };
        let (right, found) = self.surveyor.look(pid, &named, &path)?;
        self.walls.of_path(errno, right, &found)
    }
}

/// Reads the address that a call names, as far as it is given.
fn address(pid: Pid, subject: Subject) -> Option<Vec<u8>> {
    let (pointer, length) = match subject {
        Subject::Address { pointer, length } => (pointer, length),
        // The address and its length are the first two words of a `msghdr`.
        Subject::Message { pointer } => {
            let mut head = [0; 12];
            (trace::read(pid, pointer, &mut head) == head.len()).then_some(())?;
            let name = u64::from_ne_bytes(*head.first_chunk()?);
            (name, u64::from(u32::from_ne_bytes(*head.last_chunk()?)))
        }
        Subject::Path(_) => return None,
    };
    let length = usize::try_from(length & 0xffff_ffff).unwrap_or(0).min(MAX_ADDRESS);
    let mut address = vec![0; length];
    (length > 0 && trace::read(pid, pointer, &mut address) == length).then_some(address)
}

/// Returns the path of a Unix socket's address, if it has one.
fn socket_path(address: &[u8]) -> Option<Vec<u8>> {
    let (family, path) = address.split_first_chunk()?;
    let is_unix = i32::from(u16::from_ne_bytes(*family)) == libc::AF_UNIX;
    let path = path.split(|byte| *byte == 0).next()?;
    (is_unix && !path.is_empty()).then(|| path.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_has_a_path_unless_its_name_is_abstract_or_of_another_family() {
        let unix = 1;
        let address = |family: u16, rest: &[u8]| [&family.to_ne_bytes()[..], rest].concat();
        assert_eq!(socket_path(&address(unix, b"/run/x\0\0")), Some(b"/run/x".to_vec()));
        assert_eq!(socket_path(&address(unix, b"/run/x")), Some(b"/run/x".to_vec()));
        for other in [address(unix, b"\0abstract"), address(2, b"/run/x"), vec![1], Vec::new()] {
            assert_eq!(socket_path(&other), None);
        }
    }
}
