//! Following a process and all it starts, call by call. See ptrace(2).
//!
//! A process asks for it itself ([`follow_me`]): that takes no right but being a child of the one who
//! follows, whereas taking hold of another takes its identity. What it starts is followed by the same.
#![expect(unsafe_code, reason = "ptrace and waitid have no safe wrapper")]

use std::io;

use rustix::process::Pid;

use crate::seccomp::Call;

/// What a followed process stopped for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A call that a filter wants to be seen ([`Action::Trace`](crate::seccomp::Action::Trace)) begins: ask [`call`].
    Begins,
    /// A call that was let go on [to its end](GoOn::ToEndOfCall) has ended: ask [`call`].
    Call,
    /// It started another, which is followed as well.
    Started,
    /// It executes another program.
    Executed,
    /// This signal is about to reach it.
    Signal(i32),
    /// It stands still because a signal told it and all its threads to.
    Group,
}

/// What became of a followed process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It stopped, and stays so until it is told to go on.
    Stopped(Stop),
    /// It is gone, and was not removed yet if it was only looked at.
    Ended,
}

/// A call, as the kernel tells of it at its beginning and at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallState {
    /// It begins.
    Begun {
        /// The ABI by which it is made (`AUDIT_ARCH_*`).
        arch: u32,
        /// Its number.
        nr: u64,
        /// Its arguments, those that it does not have included.
        args: [u64; 6],
    },
    /// It ended with this; negative is an errno.
    Ended(i64),
}

/// Has the one who started this process follow it, and all it starts, from now on.
pub fn follow_me() -> io::Result<()> {
    // SAFETY: PTRACE_TRACEME takes nothing and touches no memory.
    unsafe { ptrace(libc::PTRACE_TRACEME as Word, 0, 0, 0) }.map(drop)
}

/// Has what the stopped `pid` starts be followed too, its calls told apart from signals, and those told that filters
/// want to be seen. Without who follows them such calls would fail: so all are killed should it die.
pub fn follow_all(pid: Pid) -> io::Result<()> {
    let options = libc::PTRACE_O_TRACESYSGOOD
        | libc::PTRACE_O_TRACESECCOMP
        | libc::PTRACE_O_EXITKILL
        | libc::PTRACE_O_TRACEFORK
        | libc::PTRACE_O_TRACEVFORK
        | libc::PTRACE_O_TRACECLONE
        | libc::PTRACE_O_TRACEEXEC;
    // SAFETY: PTRACE_SETOPTIONS takes bits and touches no memory.
    unsafe { ptrace(libc::PTRACE_SETOPTIONS as Word, raw(pid), 0, options as Word) }.map(drop)
}

/// How far a stopped process goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GoOn {
    /// To the end of the call that begins.
    ToEndOfCall,
    /// To the next call that is to be seen, or whatever else happens.
    On,
}

/// Lets the stopped `pid` go on, with `signal` if that is not 0.
pub fn go_on(pid: Pid, how: GoOn, signal: i32) -> io::Result<()> {
    let request = match how {
        GoOn::ToEndOfCall => libc::PTRACE_SYSCALL,
        GoOn::On => libc::PTRACE_CONT,
    };
    // SAFETY: both take the number of a signal and touch no memory.
    unsafe { ptrace(request as Word, raw(pid), 0, signal.into()) }.map(drop)
}

/// What waiting brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// This happened.
    For(Pid, Event),
    /// Nothing yet.
    Nothing,
    /// There is nobody to wait for.
    Nobody,
}

/// Waits for something to happen to any child or followed process, or only looks. One that is gone stays
/// until it is [removed](remove).
pub fn wait(only_look: bool) -> io::Result<Waited> {
    let patience = if only_look { libc::WNOHANG } else { 0 };
    loop {
        let options = libc::WEXITED | libc::WSTOPPED | libc::WNOWAIT | patience;
        let (pid, code) = match wait_id(None, options)? {
            Known::Of(pid, code, _) => (pid, code),
            Known::Nothing => return Ok(Waited::Nothing),
            Known::Nobody => return Ok(Waited::Nobody),
        };
        if matches!(code, libc::CLD_EXITED | libc::CLD_KILLED | libc::CLD_DUMPED) {
            return Ok(Waited::For(pid, Event::Ended));
        }
        // Takes the news away, so that the next is told. It may have been killed meanwhile.
        if let Known::Of(_, _, status) = wait_id(Some(pid), libc::WSTOPPED | libc::WNOHANG)? {
            return Ok(Waited::For(pid, Event::Stopped(stop(pid, status))));
        }
    }
}

/// Removes one that is gone: whoever started it hears of it only then.
pub fn remove(pid: Pid) -> io::Result<()> {
    wait_id(Some(pid), libc::WEXITED | libc::WNOHANG).map(drop)
}

/// What the kernel knows of a child: who, in which way, and how exactly.
enum Known {
    Of(Pid, i32, i32),
    Nothing,
    Nobody,
}

fn wait_id(pid: Option<Pid>, options: i32) -> io::Result<Known> {
    let (kind, id) = match pid {
        Some(pid) => (libc::P_PID, pid.as_raw_nonzero().get().unsigned_abs()),
        None => (libc::P_ALL, 0),
    };
    loop {
        // SAFETY: `siginfo_t` is plain data for which all zeroes is a valid value.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: waitid writes one `siginfo_t`, which outlives the call.
        let result = unsafe { libc::waitid(kind, id, &raw mut info, options | libc::__WALL) };
        match crate::check(result) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.raw_os_error() == Some(libc::ECHILD) => return Ok(Known::Nobody),
            Err(error) => return Err(error),
        }
        // SAFETY: waitid filled the SIGCHLD form of the union, or left the zeroes.
        let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
        return Ok(match Pid::from_raw(pid) {
            Some(pid) => Known::Of(pid, info.si_code, status),
            None => Known::Nothing,
        });
    }
}

/// Reads what a process stopped for.
fn stop(pid: Pid, status: i32) -> Stop {
    match (status & 0xff, status >> 8) {
        (_, libc::PTRACE_EVENT_EXEC) => Stop::Executed,
        (_, libc::PTRACE_EVENT_SECCOMP) => Stop::Begins,
        (_, event) if event != 0 => Stop::Started,
        (signal, _) if signal == libc::SIGTRAP | 0x80 => Stop::Call,
        (libc::SIGSTOP | libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU, _)
            if !is_on_its_way(pid) =>
        {
            Stop::Group
        }
        (signal, _) => Stop::Signal(signal),
    }
}

/// A signal on its way can be asked about; the stop that it brought cannot. See ptrace(2), "Group-stop".
fn is_on_its_way(pid: Pid) -> bool {
    // SAFETY: `siginfo_t` is plain data for which all zeroes is a valid value.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let place = (&raw mut info) as Word;
    // SAFETY: PTRACE_GETSIGINFO writes one `siginfo_t`, which outlives the call.
    let asked = unsafe { ptrace(libc::PTRACE_GETSIGINFO as Word, raw(pid), 0, place) };
    !asked.is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL))
}

/// What the kernel tells of a call. See `struct ptrace_syscall_info`, of which the C libraries do not all
/// know; the last words are those of a union.
#[repr(C)]
#[derive(Default)]
struct CallInfo {
    op: u8,
    pad: [u8; 3],
    arch: u32,
    instruction: u64,
    stack: u64,
    /// At the beginning its number and arguments, at the end its result.
    words: [u64; 7],
    rest: u64,
}

const GET_SYSCALL_INFO: Word = 0x420e;
const BEGINS: u8 = 1;
const ENDS: u8 = 2;
const IS_FILTERED: u8 = 3;

/// Tells how far the call is at which `pid` stopped; `None` if it is at none.
pub fn call(pid: Pid) -> Option<CallState> {
    let mut info = CallInfo::default();
    let (size, place) = (size_of::<CallInfo>() as Word, (&raw mut info) as Word);
    // SAFETY: PTRACE_GET_SYSCALL_INFO (Linux 5.3) writes at most `size` bytes to what outlives the call.
    unsafe { ptrace(GET_SYSCALL_INFO, raw(pid), size, place) }.ok()?;
    let [nr, args @ ..] = info.words;
    match info.op {
        BEGINS | IS_FILTERED => Some(CallState::Begun { arch: info.arch, nr, args }),
        ENDS => Some(CallState::Ended(nr.cast_signed())),
        _ => None,
    }
}

/// The registers of a process, as NT_PRSTATUS has them, and where in them are the arguments of a call and its result.
#[cfg(target_arch = "x86_64")]
mod registers {
    /// r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss and six bases.
    pub(super) const REGISTERS: usize = 27;
    pub(super) const ARGUMENTS: [usize; 6] = [14, 13, 12, 7, 9, 8];
    pub(super) const RESULT: usize = 10;
}

/// The registers of a process, as NT_PRSTATUS has them, and where in them are the arguments of a call and its result.
#[cfg(target_arch = "aarch64")]
mod registers {
    /// x0 to x30, sp, pc, pstate.
    pub(super) const REGISTERS: usize = 34;
    pub(super) const ARGUMENTS: [usize; 6] = [0, 1, 2, 3, 4, 5];
    pub(super) const RESULT: usize = 0;
}

use registers::{ARGUMENTS, REGISTERS, RESULT};

type Registers = [u64; REGISTERS];

/// `si_code` of a `SIGSYS` that a filter sent.
const SYS_SECCOMP: i32 = 1;

/// Tells which call was refused, if `pid` stopped for the `SIGSYS` of a filter that [traps](crate::seccomp::trapping).
///
/// A process can send the like to itself: whether its filters refuse this call is for the caller to know.
pub fn trapped(pid: Pid) -> Option<Call> {
    let mut info = [0_u32; size_of::<libc::siginfo_t>() / 4];
    let place = info.as_mut_ptr() as Word;
    // SAFETY: PTRACE_GETSIGINFO writes one `siginfo_t`, as long as the array, which outlives the call.
    unsafe { ptrace(libc::PTRACE_GETSIGINFO as Word, raw(pid), 0, place) }.ok()?;
    // Signal, errno, code and padding; the address, in two; then the number and the ABI of the call.
    let [signal, _, code, _, _, _, nr, arch, ..] = info;
    let is_filters = signal == libc::SIGSYS.cast_unsigned() && code == SYS_SECCOMP.cast_unsigned();
    let registers = is_filters.then(|| registers_of(pid)).flatten()?;
    Some(Call { arch, nr, args: ARGUMENTS.map(|index| registers[index]) })
}

/// Has the call of `pid` that was [trapped] look as if it had failed with `errno`.
pub fn fail_trapped(pid: Pid, errno: u16) -> io::Result<()> {
    let failed = || io::Error::from_raw_os_error(libc::ESRCH);
    let mut registers = registers_of(pid).ok_or_else(failed)?;
    registers[RESULT] = (-i64::from(errno)).cast_unsigned();
    exchange(libc::PTRACE_SETREGSET as Word, pid, &mut registers)
}

fn registers_of(pid: Pid) -> Option<Registers> {
    let mut registers = [0; REGISTERS];
    exchange(libc::PTRACE_GETREGSET as Word, pid, &mut registers).ok()?;
    Some(registers)
}

fn exchange(request: Word, pid: Pid, registers: &mut Registers) -> io::Result<()> {
    const NT_PRSTATUS: Word = 1;
    let iov_len = size_of::<Registers>();
    let mut vector = libc::iovec { iov_base: registers.as_mut_ptr().cast(), iov_len };
    let place = (&raw mut vector) as Word;
    // SAFETY: both requests read or write what the vector names and no more, and then its length; all outlive the call.
    unsafe { ptrace(request, raw(pid), NT_PRSTATUS, place) }?;
    if vector.iov_len == iov_len { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
}

/// Reads the memory of the stopped `pid` at `address`, as far as there is some; returns how much.
///
/// By words, and not by a descriptor of it: that would ask for the rights of the one who follows. What
/// is there may be changed at any time by another thread of it.
pub fn read(pid: Pid, address: u64, buffer: &mut [u8]) -> usize {
    const SIZE: u64 = size_of::<u64>() as u64;
    let mut filled = 0;
    while filled < buffer.len() {
        let at = address.wrapping_add(filled as u64);
        let aligned = at & !(SIZE - 1);
        let Some(word) = peek(pid, aligned) else { break };
        let bytes = &word.to_ne_bytes()[usize::try_from(at - aligned).unwrap_or(0)..];
        let length = bytes.len().min(buffer.len() - filled);
        buffer[filled..filled + length].copy_from_slice(&bytes[..length]);
        filled += length;
    }
    filled
}

/// Reads a string of `pid`, of less than `most` bytes; `None` if it has no end by then.
pub fn read_string(pid: Pid, address: u64, most: usize) -> Option<Vec<u8>> {
    let mut string = Vec::new();
    while string.len() < most {
        // Word by word: what follows the end may not be there.
        let mut buffer = [0; 8];
        let at = address.wrapping_add(string.len() as u64);
        let want = buffer.len() - usize::try_from(at % 8).unwrap_or(0);
        if read(pid, at, &mut buffer[..want]) < want {
            return None;
        }
        let bytes = &buffer[..want];
        if let Some(end) = bytes.iter().position(|byte| *byte == 0) {
            string.extend_from_slice(&bytes[..end]);
            return (string.len() < most).then_some(string);
        }
        string.extend_from_slice(bytes);
    }
    None
}

fn peek(pid: Pid, address: u64) -> Option<u64> {
    let mut word: u64 = 0;
    let place = (&raw mut word) as Word;
    // SAFETY: PTRACE_PEEKDATA reads memory of another process, by a number that need not be an address,
    // and writes one word, which outlives the call.
    let read =
        unsafe { ptrace(libc::PTRACE_PEEKDATA as Word, raw(pid), address.cast_signed(), place) };
    read.ok().map(|_| word)
}

type Word = libc::c_long;

fn raw(pid: Pid) -> Word {
    pid.as_raw_nonzero().get().into()
}

/// The call itself, not that of a C library, which returns what was read in the place of an error.
///
/// # Safety
///
/// That of the request.
unsafe fn ptrace(request: Word, pid: Word, address: Word, data: Word) -> io::Result<Word> {
    // SAFETY: the caller answers for the request.
    let result = unsafe { libc::syscall(libc::SYS_ptrace, request, pid, address, data) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
