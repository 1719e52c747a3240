//! The processes that serve files: one for each request, so that none holds up init.
//!
//! A worker is a copy of init with its rights and nothing of its descriptors. It does one thing for
//! the one at the other end of its socket, and ends when that is done or when nobody is there.

use std::collections::HashSet;
use std::os::fd::OwnedFd;

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Pid, Resource};
use warren_sys::{cred, fd, process, surface};

use crate::exec::Starter;
use crate::files;
use crate::plan::{INIT_ID, Users, WORKLOAD_ID};
use crate::protocol;
use crate::protocol::files::{Fault, FaultKind, FileEvent, FileRequest};
use crate::users::User;

/// How many may work at once.
const MAX_WORKERS: usize = 32;

/// The workers of one init.
#[derive(Debug, Default)]
pub(crate) struct Workers(HashSet<Pid>);

impl Workers {
    /// Starts one for a request, of one of the sandbox's users if one is named, or says why not.
    pub(crate) fn start(
        &mut self,
        starter: &Starter,
        request: &FileRequest,
        user: Option<&[u8]>,
        channel: OwnedFd,
        mut fds: Vec<OwnedFd>,
        suspended: bool,
    ) {
        let refuse = |kind, errno| {
            let fault = Fault { kind, errno, written: 0, detail: Vec::new() };
            let _ = protocol::send(&channel, &FileEvent::Failed(fault), &[]);
        };
        if suspended {
            return refuse(FaultKind::Suspended, 0);
        }
        if self.0.len() >= MAX_WORKERS {
            return refuse(FaultKind::Busy, 0);
        }
        match surface::fork_plainly(&starter.proof) {
            Ok(Some(child)) => {
                self.0.insert(child);
            }
            Ok(None) => {
                let data = (!fds.is_empty()).then(|| fds.remove(0));
                let ready = prepare(&channel, data.as_ref())
                    .and_then(|()| bound(starter))
                    .and_then(|()| identify(starter, user));
                if ready.is_ok() {
                    files::serve(request, user, &channel, data);
                }
                process::exit_now(0)
            }
            Err(error) => refuse(FaultKind::Busy, error.raw_os_error().unwrap_or_default()),
        }
    }

    /// Takes note that a process is gone, whoever it was.
    pub(crate) fn forget(&mut self, pid: Pid) {
        self.0.remove(&pid);
    }
}

/// Leaves everything of init's behind before the first path is walked.
fn prepare(channel: &OwnedFd, data: Option<&OwnedFd>) -> std::io::Result<()> {
    let streams = [fd::inherited(0)?, fd::inherited(1)?, fd::inherited(2)?];
    let mut keep = vec![channel, &streams[0], &streams[1], &streams[2]];
    keep.extend(data);
    fd::close_all_except(&keep)?;
    std::mem::forget(streams);
    rustix::process::setsid()?;
    // Signals stay as init has them: a pipe that nobody reads is an error, not the end.
    // This end is nobody else's. A worker may wait; init may not.
    let flags = rustix::fs::fcntl_getfl(channel)?;
    Ok(rustix::fs::fcntl_setfl(channel, flags - OFlags::NONBLOCK)?)
}

/// Gives it a command's bound on what one file may have, where that is all that bounds the sandbox's disk: what is
/// uploaded is the sandbox's as well.
fn bound(starter: &Starter) -> std::io::Result<()> {
    let bytes = starter.ruled.and_then(|ruled| ruled.file_bytes);
    bytes.map_or(Ok(()), |bytes| process::limit(Resource::Fsize, bytes))
}

/// Becomes who is to do it: a command's equal or, where there are several users, one of them with the
/// rights of the sandbox's root. Who is not found is said by whoever serves the request.
fn identify(starter: &Starter, user: Option<&[u8]>) -> std::io::Result<()> {
    let Users::Several { capabilities } = starter.users else {
        if starter.rightful {
            // With files it is a command's equal, and no command can signal it.
            cred::become_split(INIT_ID, WORKLOAD_ID)?;
            cred::empty_capability_sets()?;
        }
        return if cred::holds_nothing()? { Ok(()) } else { Err(Errno::PERM.into()) };
    };
    match user.map(User::find).transpose()?.flatten() {
        Some(user) => {
            starter.become_user(Some(&user))?;
            cred::keep_capabilities(capabilities)
        }
        None => {
            starter.become_user(None)?;
            cred::drop_capabilities()
        }
    }
}
