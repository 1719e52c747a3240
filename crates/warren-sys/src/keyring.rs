//! Key rings.
#![expect(unsafe_code, reason = "keyctl has no safe wrapper")]

use std::io;

/// Gives this process a new, empty session keyring, so that keys of whoever started it are out of
/// reach. See keyctl_join_session_keyring(3).
///
/// A kernel built without key rings answers ENOSYS, and then there is nothing to reach.
pub fn new_session() -> io::Result<()> {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: with a null name the call reads no memory of ours.
    let result = crate::check(unsafe {
        libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0 as libc::c_long)
    });
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(()),
        other => other.map(drop),
    }
}

/// Asks for this process's session keyring, as any process may.
///
/// A harmless call that succeeds without any right, so that a refusal shows a filter at work.
pub fn ask() -> io::Result<()> {
    const KEYCTL_GET_KEYRING_ID: libc::c_long = 0;
    const KEY_SPEC_SESSION_KEYRING: libc::c_long = -3;
    // SAFETY: the call takes three integers and reads no memory of ours.
    crate::check(unsafe {
        libc::syscall(
            libc::SYS_keyctl,
            KEYCTL_GET_KEYRING_ID,
            KEY_SPEC_SESSION_KEYRING,
            0 as libc::c_long,
        )
    })
    .map(drop)
}
