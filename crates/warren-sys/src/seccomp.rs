//! System call filters: compiles rules to classic BPF, explains a compiled program and installs it.
//!
//! What is to be allowed is decided elsewhere (`profiles/seccomp/`); this module knows only how to say it to the
//! kernel. Three properties made it worth its own compiler:
//!
//! - **A search tree.** At each install the kernel runs the program once for every system call number, to note those
//!   it may let through without asking again (`seccomp_cache_prepare`, Linux 5.11). On a linear list that costs the
//!   square of its length, for every sandbox and every exec; on a tree it does not. `docs/design/seccomp.md` has the
//!   figures.
//! - **One errno per system call.** `seccompiler` has one action for all matches, but `clone3` must fail with
//!   `ENOSYS` for the libc to try `clone`, and an unknown socket family with `EAFNOSUPPORT`.
//! - **Programs are explained, not only run.** [`outcomes`] says what may become of a system call whatever its
//!   arguments are, so that a test can compare the whole table with a published list.
//!
//! Only the little-endian, 64-bit architectures of [`Arch`] are known. See seccomp(2) and
//! `Documentation/userspace-api/seccomp_filter.rst`.

#![expect(unsafe_code, reason = "seccomp(2) has no safe wrapper")]

use std::collections::{BTreeMap, BTreeSet};
use std::{error, fmt, io, mem};

/// The most instructions that the kernel takes in one program (`BPF_MAXINSNS`).
pub const MAX_INSTRUCTIONS: usize = 4096;

/// The highest errno that a system call can return (`MAX_ERRNO`).
const MAX_ERRNO: u16 = 4095;

/// The bit that marks a number of the x32 ABI; it shares its architecture with x86-64.
const X32_BIT: u32 = 0x4000_0000;

/// What the kernel itself says to a number that it does not know: `ENOSYS`.
pub const NO_SUCH_CALL: Action = Action::Errno(38);

/// Numbers, on the architecture this is built for, of calls that make memory which no process need
/// have mapped.
#[expect(clippy::cast_possible_truncation, reason = "system call numbers are small")]
pub const HIDDEN_MEMORY: [u32; 2] = [libc::SYS_memfd_create as u32, libc::SYS_shmget as u32];

/// Returns rules, for the architecture this is built for, by which a limit can be read but never changed, not even
/// lowered.
#[expect(clippy::cast_possible_truncation, reason = "system call numbers are small")]
#[must_use]
pub fn keep_limit(resource: u32) -> [Rule; 2] {
    let equals = |argument| Condition {
        argument,
        mask: 0xffff_ffff,
        comparison: Comparison::Equal,
        value: resource.into(),
    };
    // prlimit64 without a new limit only asks. All 64 bits of the pointer count: one at 4 GiB has a low half of zero.
    let changes =
        Condition { argument: 2, mask: u64::MAX, comparison: Comparison::NotEqual, value: 0 };
    let rule = |nr: libc::c_long, when| Rule { nr: nr as u32, action: Action::Errno(1), when };
    [
        rule(libc::SYS_setrlimit, vec![equals(0)]),
        rule(libc::SYS_prlimit64, vec![equals(1), changes]),
    ]
}

/// Who else is on the machine, as a sandbox without namespaces finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbours {
    /// Other users alone: the rights of files and processes hold, but for attributes of what everybody may write.
    Others,
    /// Processes and files of the same user.
    SameUser,
    /// Likewise, and some of those files can be opened for reading.
    SameUserSharing,
}

/// Returns rules, for the architecture this is built for, that refuse what only a namespace would keep inside:
/// sockets, which lead to the host's network and to whoever listens at a path; System V memory and message
/// queues, which all users share; limits and priorities of processes that are not the caller; attributes of files.
///
/// Among processes and files of the same user also what else Landlock does not look at: modes, owners and times of
/// files by their path, and where some are shared read-only, by an open descriptor too.
#[expect(clippy::cast_possible_truncation, reason = "system call numbers are small")]
#[must_use]
pub fn without_namespaces(neighbours: Neighbours) -> Vec<Rule> {
    const EPERM: Action = Action::Errno(1);
    let refuse = |nr: libc::c_long| Rule { nr: nr as u32, action: EPERM, when: Vec::new() };
    let test = |argument, mask, comparison, value| Condition { argument, mask, comparison, value };
    let mut rules: Vec<Rule> = [
        libc::SYS_socket,
        libc::SYS_connect,
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_accept,
        libc::SYS_accept4,
        libc::SYS_shmget,
        libc::SYS_shmat,
        libc::SYS_shmctl,
        libc::SYS_semget,
        libc::SYS_semop,
        libc::SYS_semtimedop,
        libc::SYS_semctl,
        libc::SYS_msgget,
        libc::SYS_msgsnd,
        libc::SYS_msgrcv,
        libc::SYS_msgctl,
        libc::SYS_mq_open,
        libc::SYS_mq_unlink,
    ]
    .into_iter()
    .map(refuse)
    .collect();
    // SOCK_DGRAM (2): one end of such a pair can send to any path. The upper bits are flags.
    rules.push(Rule {
        nr: libc::SYS_socketpair as u32,
        action: EPERM,
        when: vec![test(1, 0xf, Comparison::Equal, 2)],
    });
    // Of others alone: 0 is the caller itself.
    for nr in [
        libc::SYS_prlimit64,
        libc::SYS_sched_setaffinity,
        libc::SYS_sched_setscheduler,
        libc::SYS_sched_setparam,
        libc::SYS_sched_setattr,
    ] {
        let when = vec![test(0, 0xffff_ffff, Comparison::NotEqual, 0)];
        rules.push(Rule { nr: nr as u32, action: EPERM, when });
    }
    for nr in [libc::SYS_setpriority, libc::SYS_ioprio_set] {
        let when = vec![test(1, 0xffff_ffff, Comparison::NotEqual, 0)];
        rules.push(Rule { nr: nr as u32, action: EPERM, when });
    }
    // Landlock does not look at attributes, and the rights of files give them to whoever may write: to everybody, of
    // some.
    rules.extend(
        [
            libc::SYS_setxattr,
            libc::SYS_lsetxattr,
            libc::SYS_removexattr,
            libc::SYS_lremovexattr,
            SYS_SETXATTRAT,
            SYS_REMOVEXATTRAT,
        ]
        .into_iter()
        .map(refuse),
    );
    if neighbours == Neighbours::Others {
        rules.extend([libc::SYS_fsetxattr, libc::SYS_fremovexattr].into_iter().map(refuse));
        return rules;
    }
    rules.extend([libc::SYS_fchmodat, SYS_FCHMODAT2, libc::SYS_fchownat].into_iter().map(refuse));
    #[cfg(target_arch = "x86_64")]
    rules.extend(
        [
            libc::SYS_chmod,
            libc::SYS_chown,
            libc::SYS_lchown,
            libc::SYS_utime,
            libc::SYS_utimes,
            libc::SYS_futimesat,
        ]
        .into_iter()
        .map(refuse),
    );
    // Without a path it is about the descriptor.
    let by_path = vec![test(1, u64::MAX, Comparison::NotEqual, 0)];
    let nr = libc::SYS_utimensat as u32;
    rules.push(Rule { nr, action: EPERM, when: by_path });
    if neighbours == Neighbours::SameUserSharing {
        rules.retain(|rule| rule.nr != nr);
        rules.extend(
            [
                libc::SYS_utimensat,
                libc::SYS_fchmod,
                libc::SYS_fchown,
                libc::SYS_fsetxattr,
                libc::SYS_fremovexattr,
            ]
            .into_iter()
            .map(refuse),
        );
    }
    rules
}

/// The same on every architecture, and newer than the C library's list.
const SYS_FCHMODAT2: libc::c_long = 452;
const SYS_SETXATTRAT: libc::c_long = 463;
const SYS_REMOVEXATTRAT: libc::c_long = 466;

const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const AND: u16 = 0x54; // BPF_ALU | BPF_AND | BPF_K
const JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
const JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JUMP_AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K

const RET_KILL_PROCESS: u32 = 0x8000_0000;
const RET_TRAP: u32 = 0x0003_0000;
const RET_ERRNO: u32 = 0x0005_0000;
const RET_USER_NOTIF: u32 = 0x7fc0_0000;
const RET_TRACE: u32 = 0x7ff0_0000;
const RET_ALLOW: u32 = 0x7fff_0000;

// Offsets into struct seccomp_data.
const OFFSET_NR: u32 = 0;
const OFFSET_ARCH: u32 = 4;
const OFFSET_INSTRUCTION: u32 = 8;
const OFFSET_ARGS: u32 = 16;

/// One instruction of classic BPF, laid out as the kernel's `struct sock_filter`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction {
    /// What to do.
    pub code: u16,
    /// How many instructions a test that holds skips.
    pub jt: u8,
    /// How many instructions a test that does not hold skips.
    pub jf: u8,
    /// The operand.
    pub k: u32,
}

const _: () = assert!(
    mem::size_of::<Instruction>() == mem::size_of::<libc::sock_filter>()
        && mem::align_of::<Instruction>() == mem::align_of::<libc::sock_filter>()
        && mem::offset_of!(Instruction, jf) == mem::offset_of!(libc::sock_filter, jf)
        && mem::offset_of!(Instruction, k) == mem::offset_of!(libc::sock_filter, k)
);

impl Instruction {
    /// Packs the instruction into one number, for a table or a wire.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        self.code as u64 | (self.jt as u64) << 16 | (self.jf as u64) << 24 | (self.k as u64) << 32
    }

    /// Unpacks what [`Self::to_bits`] packed.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self {
            code: (bits & 0xffff) as u16,
            jt: (bits >> 16 & 0xff) as u8,
            jf: (bits >> 24 & 0xff) as u8,
            k: (bits >> 32) as u32,
        }
    }

    const fn new(code: u16, k: u32) -> Self {
        Self { code, jt: 0, jf: 0, k }
    }

    const fn test(code: u16, k: u32, jt: u8, jf: u8) -> Self {
        Self { code, jt, jf, k }
    }

    /// Goes on so many instructions further than the next.
    pub(crate) const fn jump(distance: u32) -> Self {
        Self::new(JUMP, distance)
    }

    /// Ends the program.
    pub(crate) const fn returning(action: Action) -> Self {
        Self::new(RETURN, action.value())
    }

    /// Returns how it ends the program, if it does.
    pub(crate) const fn answer(self) -> Option<Action> {
        if self.code == RETURN { Some(Action::from_value(self.k)) } else { None }
    }

    /// Skips one instruction, the next, unless the call is made by code at these addresses, of which `upper` is the
    /// upper half.
    pub(crate) const fn within(upper: u32, start: u32, end: u32) -> [Self; 5] {
        [
            Self::new(LOAD, OFFSET_INSTRUCTION + 4),
            Self::test(JUMP_EQUAL, upper, 0, 4),
            Self::new(LOAD, OFFSET_INSTRUCTION),
            Self::test(JUMP_AT_LEAST, start, 0, 2),
            Self::test(JUMP_AT_LEAST, end, 1, 0),
        ]
    }
}

/// The system call table that a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// 64-bit x86. Its x32 numbers get `ENOSYS`, its 32-bit (i386) calls kill the process.
    X86_64,
    /// 64-bit ARM. Its 32-bit calls kill the process.
    Aarch64,
}

impl Arch {
    /// The architecture that this code was compiled for.
    #[cfg(target_arch = "x86_64")]
    pub const NATIVE: Self = Self::X86_64;
    /// The architecture that this code was compiled for.
    #[cfg(target_arch = "aarch64")]
    pub const NATIVE: Self = Self::Aarch64;

    /// Returns the kernel's number for it (`AUDIT_ARCH_*`), as in `seccomp_data.arch`.
    #[must_use]
    pub const fn audit(self) -> u32 {
        match self {
            Self::X86_64 => 0xc000_003e,
            Self::Aarch64 => 0xc000_00b7,
        }
    }
}

/// What becomes of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// The whole process dies as if by `SIGSYS`.
    KillProcess,
    /// The call is not made, and the caller gets `SIGSYS` with this errno; who follows it can have the call fail with
    /// that instead ([`trapping`]). No profile says so.
    Trap(u16),
    /// The call is not made and fails with this errno.
    Errno(u16),
    /// Whoever listens to the filter is asked ([`crate::notify`]). No profile says so.
    Ask,
    /// Whoever follows the caller sees it begin ([`crate::trace`]); if nobody does it fails with `ENOSYS`. No profile
    /// says so.
    Trace,
    /// The call is made.
    Allow,
}

impl Action {
    /// Returns what the kernel does when this is the newer filter's answer and `older` the one below it.
    ///
    /// The stricter kind wins; of two errnos, the newer filter's.
    #[must_use]
    pub fn stacked_on(self, older: Self) -> Self {
        match (self, older) {
            (Self::Errno(_), Self::Errno(_)) | (Self::Trap(_), Self::Trap(_)) => self,
            _ => self.min(older),
        }
    }

    const fn value(self) -> u32 {
        match self {
            Self::KillProcess => RET_KILL_PROCESS,
            Self::Errno(errno) => RET_ERRNO | errno as u32,
            Self::Trap(errno) => RET_TRAP | errno as u32,
            Self::Ask => RET_USER_NOTIF,
            Self::Trace => RET_TRACE,
            Self::Allow => RET_ALLOW,
        }
    }

    /// Reads a return value. What [`compile`] never emits counts as the strictest.
    const fn from_value(value: u32) -> Self {
        match value & 0xffff_0000 {
            RET_ALLOW => Self::Allow,
            RET_ERRNO => Self::Errno((value & 0xffff) as u16),
            RET_TRAP => Self::Trap((value & 0xffff) as u16),
            RET_USER_NOTIF => Self::Ask,
            RET_TRACE => Self::Trace,
            _ => Self::KillProcess,
        }
    }
}

/// How a [`Condition`] compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Comparison {
    /// The masked argument is the value.
    Equal,
    /// The masked argument is not the value.
    NotEqual,
}

/// A test of one argument of a system call: `argument & mask == value`, or `!=`.
///
/// An argument has 64 bits here even where the kernel reads an `int` and ignores the upper half. For those, mask
/// with `0xffff_ffff`: a filter that compares bits which the kernel does not look at can be walked around.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Condition {
    /// Which argument, from 0 to 5.
    pub argument: u8,
    /// The bits to look at.
    pub mask: u64,
    /// How to compare them.
    pub comparison: Comparison,
    /// What to compare them with.
    pub value: u64,
}

/// What becomes of one system call when all conditions hold.
///
/// Several rules for one number are tried in the order given, and the first whose conditions hold decides; if none
/// does, the default action of the program does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The system call's number.
    pub nr: u32,
    /// What to do.
    pub action: Action,
    /// When to do it; empty for always.
    pub when: Vec<Condition>,
}

/// Why a list of rules is no program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompileError {
    /// The number is beyond those of the architecture's own ABI.
    Number {
        /// The number given.
        nr: u32,
    },
    /// An earlier rule for this number always holds, so that this one never decides.
    Unreachable {
        /// The system call's number.
        nr: u32,
    },
    /// A condition can never hold, or always does, or names no argument.
    Condition {
        /// The system call's number.
        nr: u32,
        /// The condition.
        condition: Condition,
    },
    /// A rule has more conditions than a jump can skip.
    TooManyConditions {
        /// The system call's number.
        nr: u32,
    },
    /// No system call fails with this errno; zero would even look like success.
    Errno {
        /// The errno given.
        errno: u16,
    },
    /// The program is longer than [`MAX_INSTRUCTIONS`].
    TooLong {
        /// Its length.
        instructions: usize,
    },
}

impl fmt::Display for CompileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number { nr } => write!(f, "{nr} is no system call number"),
            Self::Unreachable { nr } => {
                write!(f, "a rule for system call {nr} follows one that always holds")
            }
            Self::Condition { nr, condition } => {
                write!(f, "a condition for system call {nr} tests nothing: {condition:?}")
            }
            Self::TooManyConditions { nr } => {
                write!(f, "a rule for system call {nr} has too many conditions")
            }
            Self::Errno { errno } => write!(f, "{errno} is no errno"),
            Self::TooLong { instructions } => {
                write!(
                    f,
                    "the program has {instructions} instructions, the kernel takes {MAX_INSTRUCTIONS}"
                )
            }
        }
    }
}

impl error::Error for CompileError {}

/// Compiles `rules` to a program that first checks the architecture, then searches the number in a balanced tree.
///
/// A call by a foreign ABI (i386, 32-bit ARM) kills the process, since its numbers mean other things; x32 numbers
/// fail with `ENOSYS`, as on a kernel without that ABI. Every number that no rule names gets `default`.
///
/// # Errors
///
/// Refuses rules that cannot mean what was intended, and programs too long for the kernel.
pub fn compile(
    arch: Arch,
    default: Action,
    rules: &[Rule],
) -> Result<Vec<Instruction>, CompileError> {
    let segments = segments(arch, default, rules)?;
    let mut program = vec![
        Instruction::new(LOAD, OFFSET_ARCH),
        Instruction::test(JUMP_EQUAL, arch.audit(), 1, 0),
        Instruction::new(RETURN, RET_KILL_PROCESS),
        Instruction::new(LOAD, OFFSET_NR),
    ];
    program.extend(search(&segments));
    if program.len() > MAX_INSTRUCTIONS {
        return Err(CompileError::TooLong { instructions: program.len() });
    }
    Ok(program)
}

/// A run of numbers with one answer: from `first` to the next segment's.
#[derive(Debug)]
struct Segment {
    first: u32,
    /// The code that answers. Every path through it returns.
    code: Vec<Instruction>,
}

/// Cuts the whole range of numbers into segments, the least that say the same.
fn segments(arch: Arch, default: Action, rules: &[Rule]) -> Result<Vec<Segment>, CompileError> {
    let end = match arch {
        Arch::X86_64 => X32_BIT,
        Arch::Aarch64 => u32::MAX,
    };
    let fallback = vec![Instruction::new(RETURN, checked(default)?.value())];
    let mut by_number = BTreeMap::<u32, Vec<&Rule>>::new();
    for rule in rules {
        if rule.nr >= end {
            return Err(CompileError::Number { nr: rule.nr });
        }
        by_number.entry(rule.nr).or_default().push(rule);
    }

    let mut segments = vec![Segment { first: 0, code: fallback.clone() }];
    for (nr, rules) in by_number {
        push(&mut segments, nr, answer(&rules, default)?);
        push(&mut segments, nr + 1, fallback.clone());
    }
    if arch == Arch::X86_64 {
        push(&mut segments, X32_BIT, vec![Instruction::new(RETURN, NO_SUCH_CALL.value())]);
    }
    Ok(segments)
}

/// Begins a segment at `first`, unless the one before says the same; replaces one that has no number left.
fn push(segments: &mut Vec<Segment>, first: u32, code: Vec<Instruction>) {
    segments.pop_if(|last| last.first == first);
    if segments.last().is_none_or(|last| last.code != code) {
        segments.push(Segment { first, code });
    }
}

/// Writes the tests of one number's rules, in order, then the default.
fn answer(rules: &[&Rule], default: Action) -> Result<Vec<Instruction>, CompileError> {
    let mut code = Vec::new();
    let mut decided = false;
    for rule in rules {
        let &Rule { nr, action, ref when } = *rule;
        if decided {
            return Err(CompileError::Unreachable { nr });
        }
        decided = when.is_empty();
        let mut tail = vec![Instruction::new(RETURN, checked(action)?.value())];
        // From the last condition to the first, so that each knows how far it is to the next rule.
        for &condition in when.iter().rev() {
            let mut test = test(nr, condition, tail.len())?;
            test.append(&mut tail);
            tail = test;
        }
        code.append(&mut tail);
    }
    if !decided {
        code.push(Instruction::new(RETURN, default.value()));
    }
    Ok(code)
}

/// Writes the test of one condition, which skips the `rest` of its rule if it does not hold.
fn test(nr: u32, condition: Condition, rest: usize) -> Result<Vec<Instruction>, CompileError> {
    let Condition { argument, mask, comparison, value } = condition;
    if argument > 5 || mask == 0 || value & !mask != 0 {
        return Err(CompileError::Condition { nr, condition });
    }
    let skip = |distance: usize| {
        u8::try_from(distance).map_err(|_| CompileError::TooManyConditions { nr })
    };
    let mut code = Vec::<Instruction>::new();
    // Little-endian: the low half comes first in memory. Built back to front, as in `answer`.
    for (half, shift) in [(0, 0), (4, 32)] {
        let mask = (mask >> shift & 0xffff_ffff) as u32;
        let value = (value >> shift & 0xffff_ffff) as u32;
        if mask == 0 {
            continue;
        }
        let (jt, jf) = match comparison {
            // All halves must be equal: the first that differs fails.
            Comparison::Equal => (0, skip(code.len() + rest)?),
            // One half that differs is enough, and skips the test of the other.
            Comparison::NotEqual if code.is_empty() => (skip(rest)?, 0),
            Comparison::NotEqual => (0, skip(code.len())?),
        };
        let mut test = vec![Instruction::new(LOAD, OFFSET_ARGS + 8 * u32::from(argument) + half)];
        if mask != u32::MAX {
            test.push(Instruction::new(AND, mask));
        }
        test.push(Instruction::test(JUMP_EQUAL, value, jt, jf));
        test.append(&mut code);
        code = test;
    }
    Ok(code)
}

/// Writes a balanced search tree over the segments, for a number that is already loaded.
fn search(segments: &[Segment]) -> Vec<Instruction> {
    let (below, from) = segments.split_at(segments.len() / 2);
    let [pivot, ..] = from else { unreachable!("there is at least one segment") };
    if below.is_empty() {
        return pivot.code.clone();
    }
    let mut left = search(below);
    let mut code = match u8::try_from(left.len()) {
        Ok(distance) => vec![Instruction::test(JUMP_AT_LEAST, pivot.first, distance, 0)],
        // A test's offsets have eight bits, a plain jump's thirty-two.
        Err(_) => {
            let distance = u32::try_from(left.len()).expect("a program fits into memory");
            vec![
                Instruction::test(JUMP_AT_LEAST, pivot.first, 0, 1),
                Instruction::new(JUMP, distance),
            ]
        }
    };
    code.append(&mut left);
    code.append(&mut search(from));
    code
}

fn checked(action: Action) -> Result<Action, CompileError> {
    match action {
        Action::Errno(errno) | Action::Trap(errno) if errno == 0 || errno > MAX_ERRNO => {
            Err(CompileError::Errno { errno })
        }
        Action::Allow
        | Action::Ask
        | Action::Errno(_)
        | Action::KillProcess
        | Action::Trace
        | Action::Trap(_) => Ok(action),
    }
}

/// Makes of a program one that refuses the same calls in a way that who follows the caller hears of: by a trap, of which
/// [`crate::trace`] makes the errno. A call that traps is not made, whether or not anybody follows.
#[must_use]
pub fn trapping(program: &[Instruction]) -> Vec<Instruction> {
    let trap = |instruction: &Instruction| match instruction.answer() {
        Some(Action::Errno(errno)) => Instruction::returning(Action::Trap(errno)),
        _ => *instruction,
    };
    program.iter().map(trap).collect()
}

/// Adds `program` to the filters of this thread, for ever, and of what it forks and executes from now on.
///
/// Needs `no_new_privs` (`rustix::thread::set_no_new_privs`) or `CAP_SYS_ADMIN`; `EACCES` says that it has neither.
/// Each system call then gets the strictest answer of all filters installed, so a later one can only take away. No
/// flag is passed: other threads of the process are left as they are. See seccomp(2), Linux 3.17.
///
/// # Errors
///
/// Returns the kernel's errno; `EINVAL` for a program that is empty, too long or malformed.
pub fn install(program: &[Instruction]) -> io::Result<()> {
    install_with(program, 0).map(drop)
}

/// Likewise, with flags; returns what the kernel returns.
pub(crate) fn install_with(program: &[Instruction], flags: libc::c_ulong) -> io::Result<i32> {
    let len = u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    // SAFETY: seccomp reads `len` structs sock_filter at `filter` before it returns and writes none of them. Both come
    // from one slice that outlives the call, and `Instruction` has the layout of sock_filter (asserted above).
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
    };
    crate::check(result)
}

/// A system call as a filter sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// The ABI by which it is made (`AUDIT_ARCH_*`).
    pub arch: u32,
    /// Its number.
    pub nr: u32,
    /// Its arguments, those that it does not have included.
    pub args: [u64; 6],
}

/// Returns what `program` answers to `call`.
///
/// A program that the kernel would refuse to install answers [`Action::KillProcess`].
#[must_use]
pub fn evaluate(program: &[Instruction], call: &Call) -> Action {
    evaluate_at(program, call, 0)
}

/// Returns what `program` answers to `call`, made by the instruction before this address.
#[must_use]
pub fn evaluate_at(program: &[Instruction], call: &Call, instruction: u64) -> Action {
    let half = |word: u64, upper: u32| (word >> (32 * upper) & 0xffff_ffff) as u32;
    let answers = explore(program, |offset| {
        Some(match offset {
            OFFSET_NR => call.nr,
            OFFSET_ARCH => call.arch,
            OFFSET_ARGS.. => {
                let word = (offset - OFFSET_ARGS) / 4;
                half(call.args.get(word as usize / 2).copied().unwrap_or(0), word % 2)
            }
            _ => half(instruction, offset.saturating_sub(OFFSET_INSTRUCTION) / 4),
        })
    });
    answers.first().copied().unwrap_or(Action::KillProcess)
}

/// Returns every answer that `program` can give to a system call, whatever its arguments are.
///
/// Conditions are taken for independent, so the set may hold an answer that no arguments lead to, but it never
/// lacks one that some do.
#[must_use]
pub fn outcomes(program: &[Instruction], arch: u32, nr: u32) -> BTreeSet<Action> {
    explore(program, |offset| match offset {
        OFFSET_NR => Some(nr),
        OFFSET_ARCH => Some(arch),
        _ => None,
    })
}

/// Follows every path that is possible when `load` tells some words of the call and leaves the others unknown.
fn explore(program: &[Instruction], load: impl Fn(u32) -> Option<u32>) -> BTreeSet<Action> {
    let mut answers = BTreeSet::new();
    let mut visited = BTreeSet::new();
    let mut paths = vec![(0, Some(0))];
    while let Some((at, accumulator)) = paths.pop() {
        // Jumps only go forward, so every path ends; a state seen before has nothing to add.
        if !visited.insert((at, accumulator)) {
            continue;
        }
        let Some(&Instruction { code, jt, jf, k }) = program.get(at) else {
            answers.insert(Action::KillProcess);
            continue;
        };
        let next = at + 1;
        let mut branch = |holds: Option<bool>| {
            if holds != Some(false) {
                paths.push((next + usize::from(jt), accumulator));
            }
            if holds != Some(true) {
                paths.push((next + usize::from(jf), accumulator));
            }
        };
        match code {
            LOAD => paths.push((next, load(k))),
            AND => paths.push((next, accumulator.map(|value| value & k))),
            JUMP => paths.push((next + k as usize, accumulator)),
            JUMP_EQUAL => branch(accumulator.map(|value| value == k)),
            JUMP_AT_LEAST => branch(accumulator.map(|value| value >= k)),
            RETURN => drop(answers.insert(Action::from_value(k))),
            _ => drop(answers.insert(Action::KillProcess)),
        }
    }
    answers
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    const I386: u32 = 0x4000_0003;
    const EPERM: Action = Action::Errno(1);
    const ENOSYS: Action = Action::Errno(38);
    const LOW: u64 = 0xffff_ffff;

    fn rule(nr: u32, action: Action, when: &[Condition]) -> Rule {
        Rule { nr, action, when: when.to_vec() }
    }

    fn equal(argument: u8, mask: u64, value: u64) -> Condition {
        Condition { argument, mask, comparison: Comparison::Equal, value }
    }

    fn differ(argument: u8, mask: u64, value: u64) -> Condition {
        Condition { comparison: Comparison::NotEqual, ..equal(argument, mask, value) }
    }

    fn ask(program: &[Instruction], nr: u32, args: [u64; 6]) -> Action {
        evaluate(program, &Call { arch: Arch::X86_64.audit(), nr, args })
    }

    /// What the documentation of `compile` says, written as plainly as it can be.
    fn naive(arch: Arch, default: Action, rules: &[Rule], call: &Call) -> Action {
        if call.arch != arch.audit() {
            return Action::KillProcess;
        }
        if arch == Arch::X86_64 && call.nr >= X32_BIT {
            return ENOSYS;
        }
        let holds = |c: &Condition| {
            (call.args[usize::from(c.argument)] & c.mask == c.value)
                == (c.comparison == Comparison::Equal)
        };
        rules
            .iter()
            .find(|rule| rule.nr == call.nr && rule.when.iter().all(holds))
            .map_or(default, |rule| rule.action)
    }

    /// Marsaglia's xorshift: the same rule sets in every run.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        fn below(&mut self, end: u64) -> u64 {
            self.next() % end
        }

        fn pick<T: Copy>(&mut self, of: &[T]) -> T {
            of[usize::try_from(self.below(of.len() as u64)).unwrap()]
        }

        /// Few distinct values, so that arguments and conditions meet.
        fn word(&mut self) -> u64 {
            self.pick(&[0, 1, 2, 3, LOW, u64::MAX, 1 << 32, 1 << 32 | 1, 0xdead_beef_0000_0001])
        }

        fn action(&mut self) -> Action {
            self.pick(&[Action::Allow, Action::Allow, EPERM, ENOSYS, Action::KillProcess])
        }

        fn condition(&mut self) -> Condition {
            let mask = self.pick(&[u64::MAX, LOW, !LOW, 1, 3, 1 << 32, 1 << 32 | 1]);
            Condition {
                argument: u8::try_from(self.below(6)).unwrap(),
                mask,
                comparison: self.pick(&[Comparison::Equal, Comparison::NotEqual]),
                value: self.word() & mask,
            }
        }

        fn rules(&mut self, numbers: u64) -> Vec<Rule> {
            let mut rules = Vec::new();
            for nr in 0..u32::try_from(numbers).unwrap() {
                for _ in 0..self.below(3) {
                    let when = (0..1 + self.below(3)).map(|_| self.condition()).collect();
                    rules.push(Rule { nr, action: self.action(), when });
                }
                if self.below(2) == 0 {
                    rules.push(rule(nr, self.action(), &[]));
                }
            }
            rules
        }
    }

    #[test]
    fn a_compiled_program_answers_as_its_rules_read() {
        let mut random = Random(0x5eed_cafe);
        let mut longest = 0;
        for round in 0..300 {
            let arch = random.pick(&[Arch::X86_64, Arch::Aarch64]);
            let default = random.action();
            let numbers = random.pick(&[1, 2, 7, 40, 120]);
            let rules = random.rules(numbers);
            let program = compile(arch, default, &rules).unwrap();
            longest = longest.max(program.len());
            for _ in 0..400 {
                let nr = random.below(numbers + 2);
                let nr = nr | random.pick(&[0, 0, 0, 0, 0, 0, 0x4000_0000, 0x8000_0000]);
                let call = Call {
                    arch: random.pick(&[arch.audit(), arch.audit(), arch.audit(), I386]),
                    nr: u32::try_from(nr).unwrap(),
                    args: std::array::from_fn(|_| random.word()),
                };
                let answer = evaluate(&program, &call);
                assert_eq!(
                    answer,
                    naive(arch, default, &rules, &call),
                    "round {round}, {call:?}, {rules:#?}"
                );
                assert!(outcomes(&program, call.arch, call.nr).contains(&answer));
            }
        }
        assert!(longest > 1000, "control: some programs are longer than a short jump reaches");
    }

    #[test]
    fn a_condition_sees_both_halves_of_an_argument() {
        let wide = 0x1_0000_0002;
        let program = compile(
            Arch::X86_64,
            EPERM,
            &[
                rule(1, Action::Allow, &[equal(5, u64::MAX, wide)]),
                rule(2, Action::Allow, &[differ(0, u64::MAX, wide)]),
                rule(3, Action::Allow, &[equal(0, LOW, 2)]),
            ],
        )
        .unwrap();
        for (value, is) in [(wide, true), (2, false), (1 << 32, false)] {
            let expected = |holds| if holds { Action::Allow } else { EPERM };
            assert_eq!(ask(&program, 1, [0, 0, 0, 0, 0, value]), expected(is));
            assert_eq!(ask(&program, 2, [value, 0, 0, 0, 0, 0]), expected(!is));
        }
        assert_eq!(ask(&program, 3, [wide, 0, 0, 0, 0, 0]), Action::Allow, "upper half masked out");
    }

    #[test]
    fn rules_of_one_number_are_tried_in_order() {
        let program = compile(
            Arch::X86_64,
            EPERM,
            &[
                rule(7, ENOSYS, &[equal(0, LOW, 1), equal(1, LOW, 1)]),
                rule(7, Action::Allow, &[equal(0, LOW, 1)]),
            ],
        )
        .unwrap();
        assert_eq!(ask(&program, 7, [1, 1, 0, 0, 0, 0]), ENOSYS);
        assert_eq!(ask(&program, 7, [1, 2, 0, 0, 0, 0]), Action::Allow);
        assert_eq!(ask(&program, 7, [2, 1, 0, 0, 0, 0]), EPERM);
        assert_eq!(
            outcomes(&program, Arch::X86_64.audit(), 7),
            BTreeSet::from([EPERM, ENOSYS, Action::Allow])
        );
    }

    #[test]
    fn a_foreign_abi_is_killed_and_x32_does_not_exist() {
        for default in [Action::Allow, EPERM] {
            let program = compile(Arch::X86_64, default, &[rule(0, Action::Allow, &[])]).unwrap();
            for nr in [0, 1, 600] {
                assert_eq!(outcomes(&program, I386, nr), BTreeSet::from([Action::KillProcess]));
                assert_eq!(
                    outcomes(&program, Arch::X86_64.audit(), nr | X32_BIT),
                    BTreeSet::from([ENOSYS])
                );
            }
            assert_eq!(ask(&program, u32::MAX, [0; 6]), ENOSYS);
        }
    }

    #[test]
    fn contiguous_numbers_with_one_answer_cost_one_range() {
        let short: Vec<_> = (0..3).map(|nr| rule(nr, Action::Allow, &[])).collect();
        let long: Vec<_> = (0..400).map(|nr| rule(nr, Action::Allow, &[])).collect();
        let length = |rules: &[Rule]| compile(Arch::X86_64, EPERM, rules).unwrap().len();
        assert_eq!(length(&short), length(&long));
    }

    #[test]
    fn rules_that_cannot_mean_what_they_say_are_refused() {
        let error = |rules: &[Rule]| compile(Arch::X86_64, EPERM, rules).unwrap_err();
        let always = rule(1, Action::Allow, &[]);
        assert_eq!(error(&[always.clone(), always]), CompileError::Unreachable { nr: 1 });
        assert_eq!(
            error(&[rule(X32_BIT, Action::Allow, &[])]),
            CompileError::Number { nr: X32_BIT }
        );
        for condition in [equal(6, 1, 1), equal(0, 0, 0), equal(0, 1, 2)] {
            assert_eq!(
                error(&[rule(1, Action::Allow, &[condition])]),
                CompileError::Condition { nr: 1, condition }
            );
        }
        for errno in [0, 4096] {
            assert_eq!(error(&[rule(1, Action::Errno(errno), &[])]), CompileError::Errno { errno });
        }
        let many = [differ(0, u64::MAX, 1); 100];
        assert_eq!(
            error(&[rule(1, Action::Allow, &many)]),
            CompileError::TooManyConditions { nr: 1 }
        );
        let scattered: Vec<_> = (0..3000).map(|nr| rule(2 * nr, Action::Allow, &[])).collect();
        assert!(matches!(error(&scattered), CompileError::TooLong { .. }));
    }

    #[test]
    fn the_stricter_of_two_filters_wins_and_the_newer_of_two_errnos() {
        assert_eq!(ENOSYS.stacked_on(Action::Allow), ENOSYS);
        assert_eq!(Action::Allow.stacked_on(EPERM), EPERM);
        assert_eq!(ENOSYS.stacked_on(EPERM), ENOSYS);
        assert_eq!(EPERM.stacked_on(Action::KillProcess), Action::KillProcess);
    }

    #[test]
    fn what_traps_refuses_what_the_program_refuses_and_nothing_else() {
        let rules = [
            rule(1, EPERM, &[]),
            rule(2, ENOSYS, &[equal(0, LOW, 1)]),
            rule(3, Action::KillProcess, &[]),
        ];
        let program = compile(Arch::X86_64, Action::Allow, &rules).unwrap();
        let trapping = trapping(&program);
        for (nr, args) in [(1, [0; 6]), (2, [0; 6]), (2, [1; 6]), (3, [0; 6]), (4, [0; 6])] {
            let expected = match ask(&program, nr, args) {
                Action::Errno(errno) => Action::Trap(errno),
                other => other,
            };
            assert_eq!(ask(&trapping, nr, args), expected, "{nr}");
            let both = ask(&trapping, nr, args).stacked_on(ask(&program, nr, args));
            assert_eq!(both, expected, "a trap outranks an errno");
        }
    }

    #[test]
    fn an_instruction_survives_packing() {
        let instruction = Instruction { code: 0x1234, jt: 0x56, jf: 0x78, k: 0x9abc_def0 };
        assert_eq!(Instruction::from_bits(instruction.to_bits()), instruction);
    }

    /// Runs `command` in a child of a thread that has installed `programs`; other threads stay free.
    fn filtered(programs: Vec<Vec<Instruction>>, command: &str) -> std::process::ExitStatus {
        std::thread::scope(|scope| {
            let run = move || {
                rustix::thread::set_no_new_privs(true).unwrap();
                programs.iter().for_each(|program| install(program).unwrap());
                Command::new("/bin/sh").args(["-c", command]).status().unwrap()
            };
            scope.spawn(run).join().unwrap()
        })
    }

    fn number(nr: libc::c_long) -> u32 {
        u32::try_from(nr).unwrap()
    }

    #[test]
    fn the_kernel_takes_a_program_and_obeys_it() {
        let uname = |action| {
            compile(Arch::NATIVE, Action::Allow, &[rule(number(libc::SYS_uname), action, &[])])
                .unwrap()
        };
        let status = |programs| filtered(programs, "uname >/dev/null 2>&1");
        assert_eq!(status(vec![]).code(), Some(0), "control: without a filter it works");
        assert_eq!(status(vec![uname(Action::Allow)]).code(), Some(0));
        assert_eq!(status(vec![uname(EPERM)]).code(), Some(1));
        assert_eq!(status(vec![uname(EPERM), uname(Action::Allow)]).code(), Some(1));
        // The shell reports its child's SIGSYS as 128 + 31, or dies of it if it did not fork.
        let killed = status(vec![uname(Action::KillProcess)]);
        assert!(killed.code() == Some(159) || killed.signal() == Some(libc::SIGSYS), "{killed}");
    }

    #[test]
    fn the_kernel_takes_the_longest_of_random_programs() {
        let mut random = Random(7);
        let mut rules = random.rules(120);
        // Numbers that this architecture does not use: the filter is large, and the shell still runs.
        rules.iter_mut().for_each(|rule| rule.nr += 2000);
        let program = compile(Arch::NATIVE, Action::Allow, &rules).unwrap();
        assert!(program.len() > 1000, "control: long jumps are in it");
        assert_eq!(filtered(vec![program], "exit 3").code(), Some(3));
    }

    #[test]
    fn a_malformed_program_is_the_kernels_to_refuse() {
        rustix::thread::set_no_new_privs(true).unwrap();
        assert_eq!(install(&[]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        let endless = [Instruction::new(LOAD, OFFSET_NR)];
        assert_eq!(install(&endless).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        let too_long = vec![Instruction::new(RETURN, RET_ALLOW); 0x1_0000];
        assert_eq!(install(&too_long).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
