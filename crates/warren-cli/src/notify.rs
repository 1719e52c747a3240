//! Telling systemd how the daemon does (sd_notify(3), without its library).

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends a state to whoever started us, if they want to know.
pub(crate) fn notify(state: &str) {
    if let Some(target) = std::env::var_os("NOTIFY_SOCKET")
        && let Err(error) = send(&target, state)
    {
        tracing::warn!(%error, "cannot tell the service manager");
    }
}

fn send(target: &std::ffi::OsStr, state: &str) -> std::io::Result<()> {
    let address = match target.as_encoded_bytes().split_first() {
        Some((b'@', name)) => SocketAddr::from_abstract_name(name)?,
        Some(_) | None => SocketAddr::from_pathname(target)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_reaches_a_path_and_an_abstract_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let name = format!("warren-test-{}", std::process::id());
        let abstract_address = SocketAddr::from_abstract_name(&name).unwrap();
        for (socket, target) in [
            (UnixDatagram::bind(&path).unwrap(), path.clone().into_os_string()),
            (UnixDatagram::bind_addr(&abstract_address).unwrap(), format!("@{name}").into()),
        ] {
            send(&target, "READY=1").unwrap();
            let mut buffer = [0; 32];
            let length = socket.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"READY=1");
        }
    }
}
