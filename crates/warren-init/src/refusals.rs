//! What the filter refuses to commands, as init hears of it: the kernel asks init what to answer.
//!
//! Init answers what the plan's own program says, and never lets a call through. It hears only of other
//! programs' calls: those of its own code, in itself, in a worker or in a command that is being started,
//! the kernel refuses without asking (`warren_sys::notify`), so that init cannot wait for itself, nor for
//! somebody who waits for it.
//!
//! Where nothing can be listened to (a kernel before 5.0, a container that is listened to already) the
//! same calls are refused in the same way, and not told.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use warren_sys::notify::{self, Asked, Listener};
use warren_sys::seccomp::{self, Action, Call, Instruction, evaluate};

use crate::protocol::denied::Refused;

/// What is answered where the plan's program has no answer, which does not happen.
const EPERM: u16 = 1;
/// What the kernel says to what it does not have: callers ask for it to find that out, and do without.
const ENOSYS: u16 = 38;
/// What a filesystem says that has no attributes: whoever copies files asks for each, and passes over it.
const EOPNOTSUPP: u16 = 95;

/// How many calls are answered before init looks at what else there is to do.
pub(crate) const AT_ONCE: usize = 16;

/// Hears of refused calls.
#[derive(Debug)]
pub(crate) struct Refusals {
    listener: Listener,
    program: Vec<Instruction>,
}

/// One call that was refused.
#[derive(Debug)]
pub(crate) struct Heard {
    asked: Asked,
    errno: u16,
}

impl Refusals {
    /// Installs init's filter, and listens to it if that can be.
    pub(crate) fn install(bits: &[u64]) -> io::Result<Option<Self>> {
        let program: Vec<_> = bits.iter().copied().map(Instruction::from_bits).collect();
        let told = |errno| !matches!(errno, ENOSYS | EOPNOTSUPP);
        let telling = notify::own_code().and_then(|own| notify::telling(&program, &own, told));
        if let Some(listener) = telling.and_then(|telling| notify::install(&telling).ok()) {
            return Ok(Some(Self { listener, program }));
        }
        seccomp::install(&program)?;
        Ok(None)
    }

    /// Takes the next that waits, if there is one.
    pub(crate) fn next(&self) -> Option<Heard> {
        let asked = self.listener.next()?;
        Some(Heard { asked, errno: answer(&self.program, &asked.call) })
    }

    /// Answers it; `false` if it was not told of by who it was, because it is gone.
    pub(crate) fn refuse(&self, heard: &Heard) -> bool {
        self.listener.refuse(&heard.asked, heard.errno)
    }
}

impl AsFd for Refusals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Heard {
    /// The thread that waits.
    pub(crate) fn pid(&self) -> i32 {
        self.asked.pid
    }

    /// What is to be told of it, and with which errno.
    pub(crate) fn told(&self) -> (Refused, i32) {
        let Call { nr, args, .. } = self.asked.call;
        (Refused::Call { nr, args }, self.errno.into())
    }
}

/// What a program answers to a call that it asked about. Whatever it is, it is a refusal.
fn answer(program: &[Instruction], call: &Call) -> u16 {
    match evaluate(program, call) {
        Action::Errno(errno) => errno,
        Action::Allow | Action::Ask | Action::KillProcess | Action::Trace | Action::Trap(_) => {
            EPERM
        }
    }
}

#[cfg(test)]
mod tests {
    use warren_sys::seccomp::{Arch, Rule, compile};

    use super::*;

    #[test]
    fn what_is_answered_is_what_the_filter_says_and_never_a_yes() {
        let rule = |nr, action| Rule { nr, action, when: Vec::new() };
        let rules = [rule(41, Action::Errno(97)), rule(42, Action::KillProcess)];
        let program = compile(Arch::NATIVE, Action::Allow, &rules).unwrap();
        let answered =
            |nr| answer(&program, &Call { arch: Arch::NATIVE.audit(), nr, args: [0; 6] });
        assert_eq!((answered(41), answered(42), answered(43)), (97, EPERM, EPERM));
    }
}
