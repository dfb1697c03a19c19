//! What a service manager (systemd) and this process tell each other: who started it, which socket it listens on, when it is
//! ready. The protocols are those of sd_notify(3) and sd_listen_fds(3).

use std::os::fd::{FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use anyhow::{Context, Result, bail};

/// The first descriptor that is handed over (`SD_LISTEN_FDS_START`).
const FIRST: i32 = 3;

/// Whether a service manager started this very process, and would start it again. Variables alone are inherited by whatever
/// a service starts.
pub(crate) fn is_manager() -> bool {
    names_us("SYSTEMD_EXEC_PID")
}

fn names_us(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|text| text.parse() == Ok(std::process::id()))
}

/// Whether this process is to end a service whose main process has died already (systemd.service(5): stop commands are
/// executed even then, without `$MAINPID`).
pub(crate) fn is_after_a_death() -> bool {
    std::env::var_os("MAINPID").is_none()
}

/// The socket that it listens on for us.
pub(crate) fn socket() -> Result<Option<OwnedFd>> {
    if !names_us("LISTEN_PID") {
        return Ok(None);
    }
    let count = std::env::var("LISTEN_FDS").context("LISTEN_FDS")?;
    if count != "1" {
        bail!("the service manager hands over {count} sockets, not one: see basaltd.socket");
    }
    // SAFETY: sd_listen_fds(3): the descriptors from FIRST on are this process's, and nobody else's in it: this is called
    // once, before anything else is opened.
    let socket = unsafe { OwnedFd::from_raw_fd(FIRST) };
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC).context("the service manager's socket")?;
    Ok(Some(socket))
}

/// Tells the service manager how it is, such as `READY=1`. Nobody wants to know where there is none.
pub(crate) fn tell(what: &str) -> Result<()> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET").filter(|path| !path.is_empty()) else {
        return Ok(());
    };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    let told = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(what.as_bytes(), &address));
    told.with_context(|| format!("the service manager at {} did not take `{what}`", path.display()))?;
    Ok(())
}
