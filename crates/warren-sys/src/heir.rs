//! One who removes our control groups should we die before we do.
//!
//! It has to be there before them, on the way of every `warren run`, and to copy us for it takes a quarter
//! of a millisecond: page tables, and on both sides each page that is written to afterwards. So it lives in
//! our memory, like whoever is started by [`crate::spawn`], and under the same rule: it allocates nothing
//! and leaves `errno` alone. Until we are gone it only waits; what it needs then was made before.
//!
//! The price: when memory runs out and the kernel ends us, it ends all who share ours, too.
#![expect(unsafe_code, reason = "clone3 with shared memory has no safe wrapper")]

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use rustix::thread::{NanosleepRelativeResult, Timespec, nanosleep};

use crate::process::{self, SingleThreaded};
use crate::spawn::{Stack, close_range};
use crate::{fd, socket};

/// A process that waits for our end.
#[derive(Debug)]
pub struct Heir {
    pid: Pid,
    /// There until the end.
    line: Option<OwnedFd>,
    /// What it reads. `None` once it is gone.
    held: Option<Box<Held>>,
}

/// Everything that it needs.
#[derive(Debug)]
struct Held {
    groups: Vec<CString>,
    /// What ends whoever is in them, where the kernel has it.
    switches: Vec<CString>,
    line: i32,
    stack: Stack,
}

impl Heir {
    /// Starts it, before the groups are made. There may be groups in them, but none in those.
    pub fn start(_proof: &SingleThreaded, groups: &[PathBuf]) -> io::Result<Self> {
        let (ours, theirs) = socket::pair()?;
        let string = |path: &Path| CString::new(path.as_os_str().as_bytes());
        let switches = groups.iter().map(|group| string(&group.join("cgroup.kill")));
        let held = Box::new(Held {
            groups: groups.iter().map(|group| string(group)).collect::<Result<_, _>>()?,
            switches: switches.collect::<Result<_, _>>()?,
            line: theirs.as_raw_fd(),
            stack: Stack::take()?,
        });
        let pid = process::clone_sharing(run, &raw const *held, held.stack.memory(), None)?;
        Ok(Self { pid, line: Some(ours), held: Some(held) })
    }

    /// Ends it: nothing is left to clear up.
    pub fn dismiss(mut self) {
        let _ = process::signal_raw(self.pid.as_raw_nonzero().get(), Signal::KILL.as_raw());
        if process::reap(self.pid).is_ok() {
            // Nobody reads it any more.
            drop(self.held.take());
        }
    }
}

impl Drop for Heir {
    fn drop(&mut self) {
        // It clears up now. Better lost than taken from under somebody who uses it.
        std::mem::forget(self.held.take());
        drop(self.line.take());
    }
}

/// The process.
extern "C" fn run(held: *const Held) -> ! {
    // SAFETY: `Heir` keeps it until this process is gone, or for ever, and does not change it.
    let held = unsafe { &*held };
    held.wait();
    held.clear_up();
    loop {
        // SAFETY: exit_group takes an integer and does not return.
        let _ = unsafe { process::call(libc::SYS_exit_group, [0, 0, 0, 0]) };
    }
}

impl Held {
    /// Waits until nobody has the other end of the line.
    fn wait(&self) {
        let line = self.line.unsigned_abs();
        // Pipes and sockets of ours must end with us.
        let _ = close_range(line + 1, fd::LAST);
        if let Some(below) = line.checked_sub(1) {
            let _ = close_range(0, below);
        }
        let _ = rustix::process::setsid();
        process::ignore_signals_of_groups();
        let _ = rustix::thread::set_name(c"warren-guard");
        // SAFETY: it was made for this process, which has not closed it.
        let line = unsafe { BorrowedFd::borrow_raw(self.line) };
        while let Err(Errno::INTR) = poll(&mut [PollFd::new(&line, PollFlags::IN)], None) {}
    }

    /// Ends what is in the groups and removes them, for as long as that takes within reason.
    fn clear_up(&self) {
        for switch in &self.switches {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            if let Ok(switch) = rustix::fs::open(switch.as_c_str(), flags, Mode::empty()) {
                let _ = rustix::io::write(switch, b"1");
            }
        }
        for group in &self.groups {
            let mut pause = FIRST_PAUSE;
            for _ in 0..LOOKS {
                if removed(group) {
                    break;
                }
                sleep(pause);
                pause = (pause * 2).min(LAST_PAUSE);
            }
        }
    }
}

/// How long it waits before it looks again, and how often it does: ten seconds in all.
const FIRST_PAUSE: Duration = Duration::from_micros(50);
const LAST_PAUSE: Duration = Duration::from_millis(20);
const LOOKS: u32 = 510;

/// Removes a group and those in it; `false` if somebody is still there.
fn removed(group: &CString) -> bool {
    match rustix::fs::rmdir(group.as_c_str()) {
        Ok(()) | Err(Errno::NOENT) => return true,
        Err(_) => {}
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(directory) = rustix::fs::openat(CWD, group.as_c_str(), flags, Mode::empty()) else {
        return false;
    };
    let mut room = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(directory.as_fd(), &mut room);
    while let Some(Ok(entry)) = entries.next() {
        if entry.file_type() == FileType::Directory {
            // Neither itself nor the one above can be.
            let _ = rustix::fs::unlinkat(&directory, entry.file_name(), AtFlags::REMOVEDIR);
        }
    }
    rustix::fs::rmdir(group.as_c_str()).is_ok()
}

fn sleep(time: Duration) {
    let mut left = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    while let NanosleepRelativeResult::Interrupted(rest) = nanosleep(&left) {
        left = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plain directories do: what is removed is empty in both.
    fn groups(test: &str) -> Vec<PathBuf> {
        let name = |number: u32| format!("warren-heir-{test}-{}-{number}", std::process::id());
        let groups: Vec<_> = [1, 2].map(|number| std::env::temp_dir().join(name(number))).into();
        for group in &groups {
            std::fs::create_dir(group).unwrap();
        }
        std::fs::create_dir(groups[0].join("x1")).unwrap();
        groups
    }

    #[test]
    fn what_is_left_goes_with_us_and_nothing_is_touched_while_we_are_there() {
        let groups = groups("left");
        // The one who dies is a copy of this process, which has one thread.
        let proof = SingleThreaded(std::marker::PhantomData);
        let fork = process::fork(&proof, process::Namespaces::NONE, None).unwrap();
        let process::Fork::Parent { child, .. } = fork else {
            let _heir = Heir::start(&proof, &groups).map(std::mem::forget);
            std::thread::sleep(Duration::from_millis(50));
            let there = groups.iter().all(|group| group.exists());
            process::exit_now(if there { 7 } else { 1 })
        };
        let (end, _) = process::reap(child).unwrap();
        assert_eq!(end, process::End::Exited(7), "it was there until then");
        let gone = || groups.iter().all(|group| !group.exists());
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while !gone() && std::time::Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(gone());
    }

    #[test]
    fn one_that_is_dismissed_touches_nothing_and_is_no_more() {
        let groups = groups("dismissed");
        let heir = Heir::start(&SingleThreaded(std::marker::PhantomData), &groups).unwrap();
        let pid = heir.pid;
        heir.dismiss();
        assert!(groups.iter().all(|group| group.exists()));
        groups.iter().for_each(|group| std::fs::remove_dir_all(group).unwrap());
        assert_eq!(rustix::process::test_kill_process(pid), Err(Errno::SRCH));
    }
}
