//! Hearing of system calls that a filter refuses: the kernel asks a listener what to answer, and the caller waits.
//!
//! What [`telling`] makes of a program refuses the same calls, and neither more nor less: where the program fails with
//! an errno, the kernel asks. Two things follow from who may be asked:
//!
//! - **Whoever holds the listener is the wall.** It could let a call through; so [`Listener`] has no way to say that.
//!   Where nobody holds one any more, the kernel fails such calls with `ENOSYS`.
//! - **Nobody can wait for its own answer.** A call made by the code of the one who listens, or of what it forked and
//!   has not executed another program, is refused at once, as the program says. Which code that is, is told by the
//!   address of the instruction. A program that lies at the same address loses the telling and gains nothing.
//!
//! See seccomp_unotify(2), Linux 5.0.

#![expect(unsafe_code, reason = "seccomp(2) and its ioctls have no safe wrapper")]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::seccomp::{self, Action, Call, Instruction, MAX_INSTRUCTIONS};

/// The most pieces of code that are told apart. A static program is one.
const MAX_PIECES: usize = 8;

/// Finds where the code of this program lies, its libraries' included; `None` if that cannot be said in a filter.
pub fn own_code() -> Option<Vec<Range<u64>>> {
    extern "C" fn note(info: *mut libc::dl_phdr_info, _: usize, pieces: *mut c_void) -> c_int {
        // SAFETY: the loader hands over one `dl_phdr_info` that lives as long as this call, and the pointer that was
        // given to `dl_iterate_phdr` below, to a vector which nobody else uses meanwhile.
        let (info, pieces) = unsafe { (&*info, &mut *pieces.cast::<Vec<Range<u64>>>()) };
        for index in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: the object has so many program headers, which are mapped as long as it is loaded.
            let header = unsafe { &*info.dlpi_phdr.add(index) };
            if header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0 {
                let start = info.dlpi_addr.wrapping_add(header.p_vaddr);
                // What the kernel tells is the address after the instruction, which may be the end.
                pieces.push(start..start.saturating_add(header.p_memsz).saturating_add(1));
            }
        }
        0
    }
    let mut pieces: Vec<Range<u64>> = Vec::new();
    // SAFETY: `note` has the signature that is asked for and does not unwind but for want of memory; the vector
    // outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut pieces).cast()) };
    let fits = !pieces.is_empty() && pieces.len() <= MAX_PIECES;
    (fits && pieces.iter().all(|piece| halves(piece).is_some())).then_some(pieces)
}

/// Takes a range of addresses apart: their upper half, and where it begins and ends in the lower one.
fn halves(piece: &Range<u64>) -> Option<(u32, u32, u32)> {
    let upper = |address: u64| (address >> 32) as u32;
    let lower = |address: u64| (address & 0xffff_ffff) as u32;
    let is_one = upper(piece.start) == upper(piece.end);
    is_one.then(|| (upper(piece.start), lower(piece.start), lower(piece.end)))
}

/// Makes of a program one that asks wherever it would fail with an errno that is to be `told`, unless the call is made
/// by `own` code.
///
/// `None` if it would be too long for the kernel, or a piece of code cannot be told.
#[must_use]
pub fn telling(
    program: &[Instruction],
    own: &[Range<u64>],
    told: impl Fn(u16) -> bool,
) -> Option<Vec<Instruction>> {
    let mut asking = program.to_vec();
    let mut ends: BTreeMap<u16, usize> = BTreeMap::new();
    for at in 0..program.len() {
        let Some(Action::Errno(errno)) = program[at].answer() else { continue };
        if !told(errno) {
            continue;
        }
        let end = match ends.get(&errno) {
            Some(end) => *end,
            None => {
                let end = asking.len();
                ends.insert(errno, end);
                asking.extend(ask_unless_own(errno, own)?);
                end
            }
        };
        asking[at] = Instruction::jump(u32::try_from(end - at - 1).ok()?);
    }
    (asking.len() <= MAX_INSTRUCTIONS).then_some(asking)
}

/// Writes what fails with `errno` for own code, and asks about any other.
fn ask_unless_own(errno: u16, own: &[Range<u64>]) -> Option<Vec<Instruction>> {
    let mut code = Vec::new();
    for piece in own {
        let (upper, start, end) = halves(piece)?;
        code.extend(Instruction::within(upper, start, end));
        code.push(Instruction::returning(Action::Errno(errno)));
    }
    code.push(Instruction::returning(Action::Ask));
    Some(code)
}

/// Hears of the calls that a filter asks about. Descriptors of it must be nobody's but the one's who answers.
#[derive(Debug)]
pub struct Listener(OwnedFd);

/// A call that waits for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    id: u64,
    /// The thread that makes it, as a number in the listener's own pid namespace; 0 if it is not in there.
    pub pid: i32,
    /// The call.
    pub call: Call,
}

// As in linux/seccomp.h. The kernel says in `SECCOMP_GET_NOTIF_SIZES` if they grew; it takes those it had at first.
#[repr(C)]
#[derive(Default)]
struct Notice {
    id: u64,
    pid: u32,
    flags: u32,
    nr: i32,
    arch: u32,
    instruction: u64,
    args: [u64; 6],
}

#[repr(C)]
struct Answer {
    id: u64,
    value: i64,
    error: i32,
    flags: u32,
}

const NEW_LISTENER: libc::c_ulong = 1 << 3;
const GET_SIZES: libc::c_uint = 3;
const RECEIVE: u64 = ioctl_number(0, size_of::<Notice>());
const SEND: u64 = ioctl_number(1, size_of::<Answer>());

/// `_IOWR('!', number, size)`.
const fn ioctl_number(number: u64, size: usize) -> u64 {
    3 << 30 | (size as u64) << 16 | 0x21 << 8 | number
}

/// Adds `program` to the filters of this thread, as [`seccomp::install`] does, and listens to what it asks.
///
/// # Errors
///
/// Returns the kernel's errno, and has installed nothing: `EBUSY` if a filter is in force already that has a
/// listener, `EINVAL` if the kernel knows none, `EOPNOTSUPP` if its notices are longer than ours.
pub fn install(program: &[Instruction]) -> io::Result<Listener> {
    if notice_size()? > size_of::<Notice>() {
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    let number = seccomp::install_with(program, NEW_LISTENER)?;
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it. It is closed by an exec.
    Ok(Listener(unsafe { OwnedFd::from_raw_fd(number) }))
}

/// Asks how long a notice is: the kernel writes that much, whatever it is given.
fn notice_size() -> io::Result<usize> {
    // Of a notice, of an answer, of what a filter sees.
    let mut sizes = [0_u16; 3];
    // SAFETY: the kernel writes three numbers of 16 bits, which outlive the call.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, GET_SIZES, 0, sizes.as_mut_ptr().cast::<c_void>())
    };
    crate::check(result)?;
    Ok(sizes[0].into())
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Listener {
    /// Takes the next call that waits, if there is one. Never waits itself.
    pub fn next(&self) -> Option<Asked> {
        // The kernel counts those who came and not those who left: it has something to say, if only that
        // somebody left meanwhile (ENOENT), whenever one waits now.
        let mut fds = [PollFd::new(self, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let waits = poll(&mut fds, Some(&now)).is_ok_and(|ready| ready == 1);
        if !waits || !fds[0].revents().contains(PollFlags::IN) {
            return None;
        }
        let mut notice = Notice::default();
        // SAFETY: the kernel writes one notice, of a size that `install` compared, to what outlives the call.
        unsafe { self.ioctl(RECEIVE, (&raw mut notice).cast()) }.ok()?;
        let Notice { id, pid, nr, arch, args, .. } = notice;
        let call = Call { arch, nr: nr.cast_unsigned(), args };
        Some(Asked { id, pid: i32::try_from(pid).unwrap_or(0), call })
    }

    /// Has a call fail with `errno`; `false` if nobody waits for that any more.
    ///
    /// No call succeeds by this: what is no errno of a failure becomes `EPERM`.
    pub fn refuse(&self, asked: &Asked, errno: u16) -> bool {
        let errno = if (1..=4095).contains(&errno) { errno.into() } else { libc::EPERM };
        let mut answer = Answer { id: asked.id, value: 0, error: -errno, flags: 0 };
        // SAFETY: the kernel reads one answer, which outlives the call.
        unsafe { self.ioctl(SEND, (&raw mut answer).cast()) }.is_ok()
    }

    /// # Safety
    ///
    /// `argument` must be what the request reads or writes.
    unsafe fn ioctl(&self, request: u64, argument: *mut c_void) -> io::Result<()> {
        // SAFETY: the caller answers for the argument.
        let result =
            unsafe { libc::syscall(libc::SYS_ioctl, self.0.as_raw_fd(), request, argument) };
        crate::check(result).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::slice;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::seccomp::{Arch, NO_SUCH_CALL, Rule, compile, evaluate, evaluate_at};

    const EPERM: Action = Action::Errno(1);

    fn rules() -> Vec<Rule> {
        let rule = |nr: libc::c_long, action| Rule {
            nr: u32::try_from(nr).unwrap(),
            action,
            when: Vec::new(),
        };
        vec![
            rule(libc::SYS_keyctl, EPERM),
            rule(libc::SYS_mount, EPERM),
            rule(libc::SYS_socket, Action::Errno(97)),
            rule(libc::SYS_clone3, NO_SUCH_CALL),
            rule(libc::SYS_bpf, Action::KillProcess),
        ]
    }

    #[test]
    fn what_asks_refuses_what_the_program_refuses_and_nothing_else() {
        let program = compile(Arch::NATIVE, Action::Allow, &rules()).unwrap();
        let own = [0x20_0000..0x30_0000, 0x7fff_0000_1000..0x7fff_0000_2000];
        let asking = telling(&program, &own, |errno| errno != 38).unwrap();
        let numbers = (0..500).chain([u32::MAX]);
        for nr in numbers {
            let call = Call { arch: Arch::NATIVE.audit(), nr, args: [0; 6] };
            let plain = evaluate(&program, &call);
            for at in [0x20_0000, 0x2f_ffff, 0x7fff_0000_1000, 0x7fff_0000_1fff] {
                assert_eq!(evaluate_at(&asking, &call, at), plain, "{nr} at {at:#x}");
            }
            let expected = match plain {
                Action::Errno(1 | 97) => Action::Ask,
                other => other,
            };
            for at in [0, 0x1f_ffff, 0x30_0000, 0x7fff_0000_0fff, 0x7ffe_0000_1000, u64::MAX] {
                assert_eq!(evaluate_at(&asking, &call, at), expected, "{nr} at {at:#x}");
            }
        }
        let foreign = Call { arch: 1, nr: 0, args: [0; 6] };
        assert_eq!(evaluate_at(&asking, &foreign, 0), Action::KillProcess);
    }

    #[test]
    fn code_across_a_boundary_that_a_filter_cannot_compare_is_not_told() {
        let program = compile(Arch::NATIVE, Action::Allow, &rules()).unwrap();
        let (across, within) = (0xffff_f000..0x1_0000_1000, 0xffff_f000..0xffff_ffff);
        assert_eq!(telling(&program, slice::from_ref(&across), |_| true), None);
        assert!(telling(&program, slice::from_ref(&within), |_| true).is_some(), "control");
    }

    #[test]
    fn the_code_of_this_program_is_found() {
        let own = own_code().unwrap();
        let here = own_code as *const () as u64;
        assert!(own.iter().any(|piece| piece.contains(&here)), "{here:#x} {own:x?}");
        let not_code = &raw const here as u64;
        assert!(!own.iter().any(|piece| piece.contains(&not_code)), "{not_code:#x} {own:x?}");
    }

    /// Calls `keyctl` on a thread with that filter, and answers what is asked; returns the errno, and what was asked.
    fn call_with(asking: Vec<Instruction>) -> (i32, Option<Asked>) {
        let (to_us, from_it) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            to_us.send(install(&asking).unwrap()).unwrap();
            crate::keyring::ask().unwrap_err().raw_os_error().unwrap()
        });
        let listener = from_it.recv_timeout(Duration::from_secs(5)).unwrap();
        let mut asked = None;
        while !thread.is_finished() {
            if let Some(call) = listener.next() {
                assert!(listener.refuse(&call, 93), "it waits");
                assert!(!listener.refuse(&call, 93), "it was answered");
                asked = Some(call);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        (thread.join().unwrap(), asked)
    }

    #[test]
    fn the_kernel_asks_about_others_code_and_refuses_own_code_itself() {
        let program = compile(Arch::NATIVE, Action::Allow, &rules()).unwrap();
        let asking = |own: &[Range<u64>]| telling(&program, own, |_| true).unwrap();
        let (errno, asked) = call_with(asking(&[]));
        assert_eq!(errno, 93, "as it was answered");
        assert_eq!(i64::from(asked.unwrap().call.nr), libc::SYS_keyctl);
        let (errno, asked) = call_with(asking(&own_code().unwrap()));
        assert_eq!((errno, asked), (1, None), "as the program says");
    }

    #[test]
    fn a_second_listener_is_refused_and_nothing_installed() {
        let program = compile(Arch::NATIVE, Action::Allow, &rules()).unwrap();
        let asking = telling(&program, &own_code().unwrap(), |_| true).unwrap();
        let second = std::thread::spawn(move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            let _first = install(&asking).unwrap();
            install(&asking).map(drop).unwrap_err().raw_os_error()
        });
        assert_eq!(second.join().unwrap(), Some(libc::EBUSY));
    }
}
