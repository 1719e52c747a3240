//! Credentials: identities, capabilities, and what they may still become.
#![expect(unsafe_code, reason = "setfsuid has no safe wrapper")]

use std::io;

use rustix::process::{Gid, Uid};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities, set_capabilities,
    set_capabilities_secure_bits, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

/// Becomes `id`, for good, as user and group, with no other group.
pub fn become_only(id: u32) -> io::Result<()> {
    become_split(id, id)
}

/// Takes `real` as real and saved id and `effective` as effective one, for users and groups alike.
///
/// A process may signal or trace another by the other's real and saved ids. One with split ids
/// can therefore signal processes of `effective`, and start new ones, without any capability,
/// while those cannot signal it.
pub fn become_split(real: u32, effective: u32) -> io::Result<()> {
    let (gid, egid) = (Gid::from_raw(real), Gid::from_raw(effective));
    set_thread_res_gid(gid, egid, gid)?;
    let (uid, euid) = (Uid::from_raw(real), Uid::from_raw(effective));
    Ok(set_thread_res_uid(uid, euid, uid)?)
}

/// Leaves all supplementary groups. Needs CAP_SETGID and a user namespace that allows it.
pub fn leave_groups() -> io::Result<()> {
    Ok(set_thread_groups(&[])?)
}

/// Takes `id` as effective user and keeps every capability; the real and saved ones are root's.
///
/// A user namespace belongs to the effective user of whoever makes it, and the kernel adds what is
/// used inside (inotify instances, pending signals, message queues) to the account of that user
/// outside, too. See user_namespaces(7) and namespaces(7), "the /proc/sys/user directory".
pub fn act_as(id: u32) -> io::Result<()> {
    set_thread_res_uid(Uid::ROOT, Uid::from_raw(id), Uid::ROOT)?;
    // Leaving uid 0 empties the effective set alone.
    let sets = capabilities(None)?;
    set_capabilities(None, CapabilitySets { effective: sets.permitted, ..sets })?;
    // The kernel takes it for a setuid program now; a copy of this one may read its own /proc files.
    Ok(rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable)?)
}

/// Checks permissions on files as `id` until told otherwise; returns the id before.
pub fn check_files_as(id: u32) -> u32 {
    // SAFETY: setfsuid takes an integer, changes only the calling thread, and cannot fail in a way
    // that touches memory. See setfsuid(2).
    // The number of a user, in the type of one that may fail: those above 2^31 seem negative.
    unsafe { libc::setfsuid(id) }.cast_unsigned()
}

/// Does something with the rights that `id`, as user and group, has on files, and with no other.
///
/// By leaving 0 root's capabilities on files go out of effect, and back in by returning to it.
pub fn with_files_as<T>(id: u32, work: impl FnOnce() -> T) -> T {
    // SAFETY: setfsgid takes an integer, changes only the calling thread, and cannot fail in a way
    // that touches memory. See setfsgid(2).
    let group = |id| unsafe { libc::setfsgid(id) }.unsigned_abs();
    let before = (group(id), check_files_as(id));
    let done = work();
    check_files_as(before.1);
    group(before.0);
    done
}

/// Empties the bounding set and forbids uid 0 to mean anything, for this process and all it starts.
///
/// Needs CAP_SETPCAP, so it comes before [`drop_capabilities`].
pub fn forbid_capabilities() -> io::Result<()> {
    let bits = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
        | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED;
    set_capabilities_secure_bits(bits)?;
    drop_from_bounding_set(|_| true)
}

/// Empties the bounding set of a kernel that has no such bits as [`forbid_capabilities`] sets: gVisor. There
/// `no_new_privs` alone keeps uid 0 from meaning anything.
pub fn empty_bounding_set() -> io::Result<()> {
    drop_from_bounding_set(|_| true)
}

fn drop_from_bounding_set(unwanted: impl Fn(u32) -> bool) -> io::Result<()> {
    for capability in (0..=63).filter(|capability| unwanted(*capability)) {
        // SAFETY: PR_CAPBSET_DROP takes one integer. A kernel that does not know the number says
        // EINVAL: all that it knows are dropped by then.
        match crate::check(unsafe {
            libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(capability), 0, 0, 0)
        }) {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The capability that installs a seccomp filter or a Landlock domain without `no_new_privs`.
const SYS_ADMIN: u64 = 1 << 21;
/// The capability that signals processes of other users.
const KILL: u64 = 1 << 5;

/// Leaves in the bounding set what `allowed` names, by the bits of capabilities(7). What is exec'd as
/// root, or by a set-user-id program of root's, gets those: in this user namespace, and in no other.
///
/// Needs CAP_SETPCAP.
pub fn bound_capabilities(allowed: u64) -> io::Result<()> {
    set_capabilities_secure_bits(
        CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED,
    )?;
    drop_from_bounding_set(|capability| allowed & 1 << capability == 0)
}

/// Takes split ids as [`become_split`] does and keeps, permitted and in effect, what `kept` names and
/// the right to install filters.
pub fn become_split_keeping(real: u32, effective: u32, kept: u64) -> io::Result<()> {
    rustix::thread::set_keep_capabilities(true)?;
    become_split(real, effective)?;
    rustix::thread::set_keep_capabilities(false)?;
    hold(kept | SYS_ADMIN, kept | SYS_ADMIN)
}

/// Takes `id` as every id and keeps, permitted and in effect, what `kept` names, by the bits of capabilities(7), and
/// nothing else.
pub fn become_only_keeping(id: u32, kept: u64) -> io::Result<()> {
    rustix::thread::set_keep_capabilities(true)?;
    become_only(id)?;
    rustix::thread::set_keep_capabilities(false)?;
    hold(kept, kept)
}

/// Reports whether this process holds `kept` at the most, and can get nothing else.
pub fn holds_only(kept: u64) -> io::Result<bool> {
    let sets = capabilities(None)?;
    let held = sets.permitted | sets.effective;
    let bounded = held.bits() & !kept == 0 && sets.inheritable.is_empty();
    Ok(bounded && rustix::thread::no_new_privs()?)
}

/// Puts everything that is permitted into effect.
pub fn use_capabilities() -> io::Result<()> {
    let sets = capabilities(None)?;
    Ok(set_capabilities(None, CapabilitySets { effective: sets.permitted, ..sets })?)
}

/// Leaves nothing in effect but the right to signal, for a process that uses the rest seldom.
pub fn rest_capabilities() -> io::Result<()> {
    let permitted = capabilities(None)?.permitted;
    hold(permitted.bits(), permitted.bits() & KILL)
}

/// Holds of `kept` what it has, permitted and in effect, and nothing else.
pub fn keep_capabilities(kept: u64) -> io::Result<()> {
    let kept = capabilities(None)?.permitted.bits() & kept;
    hold(kept, kept)
}

fn hold(permitted: u64, effective: u64) -> io::Result<()> {
    let (permitted, effective) =
        (CapabilitySet::from_bits_retain(permitted), CapabilitySet::from_bits_retain(effective));
    let inheritable = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective, permitted, inheritable })?)
}

/// Becomes one user for good, with its groups. One that was not root keeps what it holds.
///
/// Needs CAP_SETUID and CAP_SETGID in effect.
pub fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
    set_thread_groups(&groups)?;
    let gid = Gid::from_raw(gid);
    set_thread_res_gid(gid, gid, gid)?;
    let uid = Uid::from_raw(uid);
    Ok(set_thread_res_uid(uid, uid, uid)?)
}

/// Reports whether this process may hold no more than `allowed`, now and after any exec, but for the
/// right to install filters that it has itself.
pub fn holds_at_most(allowed: u64) -> io::Result<bool> {
    let sets = capabilities(None)?;
    let held = sets.permitted | sets.effective | sets.inheritable;
    let mut bounded = true;
    for capability in 0..=63_u32 {
        // SAFETY: PR_CAPBSET_READ takes one integer and says 0, 1, or EINVAL beyond the last.
        match unsafe {
            libc::prctl(libc::PR_CAPBSET_READ, libc::c_ulong::from(capability), 0, 0, 0)
        } {
            1 => bounded &= allowed & 1 << capability != 0,
            0 => {}
            _ => break,
        }
    }
    Ok(bounded && held.bits() & !(allowed | SYS_ADMIN) == 0)
}

/// Gives up every capability in every set.
pub fn drop_capabilities() -> io::Result<()> {
    rustix::thread::clear_ambient_capability_set()?;
    empty_capability_sets()
}

/// Likewise, on a kernel that has no ambient set: gVisor.
pub fn empty_capability_sets() -> io::Result<()> {
    let none = CapabilitySet::empty();
    Ok(set_capabilities(
        None,
        CapabilitySets { effective: none, permitted: none, inheritable: none },
    )?)
}

/// Reports whether this process holds no capability and can get none.
pub fn holds_nothing() -> io::Result<bool> {
    let sets = capabilities(None)?;
    let empty =
        sets.effective.is_empty() && sets.permitted.is_empty() && sets.inheritable.is_empty();
    Ok(empty && rustix::thread::no_new_privs()?)
}
