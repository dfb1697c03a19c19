//! Where the server is, as the environment says, and how it is met. Knows no call.

use std::env;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wire::packet::PacketSocket;

use crate::{Address, ClientConnection, Link, Offer, Transport, connect, connect_by_entering, connect_remote, tls};

/// Names the socket of the server.
const SOCKET: &str = "BASALT_ACCEL_SOCKET";
/// Where it is if nobody says another place.
const DEFAULT_SOCKET: &str = "/run/basalt/accel.sock";
/// Names a server on another machine, in place of a socket, or one that this virtual machine enters.
const SERVER: &str = "BASALT_ACCEL";
/// Who signs such servers' certificates, and this client's own certificate and key where the server asks for one: files with PEM.
const AUTHORITIES: &str = "BASALT_ACCEL_TLS_CA";
const CERTIFICATE: &str = "BASALT_ACCEL_TLS_CERT";
const KEY: &str = "BASALT_ACCEL_TLS_KEY";
/// Names one way for records (docs/accel-window.md), for measurements.
const TRANSPORT: &str = "BASALT_ACCEL_TRANSPORT";

/// A server's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// On this machine.
    Socket(PathBuf),
    /// On another one.
    Remote(Address),
    /// In a frozen one that this one is linked to by a number: a window that both have, as a file.
    Entered(u32, PathBuf),
}

/// What begins the name of one that is entered: `enter:NUMBER:PATH`.
const ENTER: &str = "enter:";

/// How many links a virtual machine can have (`BASALT_MAX_LINKS` of kmod/uapi/basalt.h).
const MAX_LINKS: u32 = 4;

/// The number and the path.
fn entered(text: &str) -> Result<Place, String> {
    let parts = text
        .split_once(':')
        .and_then(|(number, path)| Some((number.parse().ok()?, path)));
    match parts {
        Some((number, path)) if number < MAX_LINKS && Path::new(path).is_absolute() => {
            Ok(Place::Entered(number, path.into()))
        }
        _ => Err(format!(
            "{SERVER}={ENTER}{text}: give the number of a link, 0 to 3, and the path of a window, such as {ENTER}0:/run/window/slot-0"
        )),
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Remote(address) => address.fmt(f),
            Self::Entered(number, path) => write!(f, "{ENTER}{number}:{}", path.display()),
        }
    }
}

impl Place {
    /// That which the environment names.
    ///
    /// # Errors
    /// What is wrong with a variable.
    pub fn of_environment() -> Result<Self, String> {
        if let Some(address) = env::var_os(SERVER) {
            let address = address.to_string_lossy();
            if let Some(of_link) = address.strip_prefix(ENTER) {
                return entered(of_link);
            }
            let parsed = address.parse().map_err(|error| format!("{SERVER}: {error}"))?;
            return Ok(Self::Remote(parsed));
        }
        let path = env::var_os(SOCKET).unwrap_or_else(|| DEFAULT_SOCKET.into());
        Ok(Self::Socket(path.into()))
    }

    /// What names another one.
    #[must_use]
    pub fn named_by(&self) -> &'static str {
        match self {
            Self::Socket(_) => SOCKET,
            Self::Remote(_) | Self::Entered(..) => SERVER,
        }
    }

    /// Meets it, for so many threads.
    ///
    /// # Errors
    /// Why there is no connection.
    pub fn meet(&self, pairs: u32, patience: Duration) -> Result<ClientConnection, String> {
        let offer = |transports| Offer {
            transports,
            pairs,
            patience,
        };
        match self {
            Self::Socket(path) => {
                let connected = || -> rustix::io::Result<_> {
                    let flags = SocketFlags::CLOEXEC;
                    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
                    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
                    Ok(PacketSocket::from_fd(socket))
                };
                let socket = connected().map_err(|error| error.to_string())?;
                let cpus = std::thread::available_parallelism().map_or(1, usize::from);
                let preferred = Transport::preferred(cpus).to_vec();
                connect(socket, &offer(forced()?.unwrap_or(preferred))).map_err(|error| error.to_string())
            }
            Self::Remote(address) => {
                let tls = match address.is_secure {
                    true => Some(certificates()?),
                    false => None,
                };
                let offer = offer(forced()?.unwrap_or(vec![Transport::Stream]));
                connect_remote(address, tls.as_ref(), &offer).map_err(|error| error.to_string())
            }
            Self::Entered(number, path) => {
                if !may_be_linked() {
                    return Err(
                        "only a guest on an AMD processor, of a sandbox of the class `bare`, can enter a server"
                            .to_owned(),
                    );
                }
                let file = File::options().read(true).write(true).open(path);
                let file = file.map_err(|error| format!("the window {}: {error}", path.display()))?;
                let offer = offer(vec![Transport::Enter]);
                connect_by_entering(file, Arc::new(Link(*number)), &offer).map_err(|error| error.to_string())
            }
        }
    }
}

/// Whether the instruction by which a server is entered, and waits to be, is one: elsewhere it would end the program.
#[must_use]
pub fn may_be_linked() -> bool {
    use std::arch::x86_64::__cpuid;
    let vendor = __cpuid(0);
    let amd = [vendor.ebx, vendor.edx, vendor.ecx] == [*b"Auth", *b"enti", *b"cAMD"].map(u32::from_le_bytes);
    // Of a hypervisor: CPUID 1, ECX (AMD64 APM 3, E.3.2).
    amd && __cpuid(1).ecx >> 31 == 1
}

/// The one way that is to be taken, if one is.
fn forced() -> Result<Option<Vec<Transport>>, String> {
    let Some(forced) = env::var_os(TRANSPORT) else {
        return Ok(None);
    };
    let forced = forced.to_string_lossy().parse::<Transport>();
    forced
        .map(|forced| Some(vec![forced]))
        .map_err(|error| error.to_string())
}

fn certificates() -> Result<Arc<tls::ClientConfig>, String> {
    let authorities = env::var_os(AUTHORITIES).ok_or_else(|| {
        format!("{AUTHORITIES} is not set: it names a file with the certificates that sign the server's")
    })?;
    let identity = match (env::var_os(CERTIFICATE), env::var_os(KEY)) {
        (Some(certificate), Some(key)) => Some(tls::Identity {
            certificate: certificate.into(),
            key: key.into(),
        }),
        (None, None) => None,
        _ => return Err(format!("set both {CERTIFICATE} and {KEY}, or neither")),
    };
    tls::client(authorities.as_ref(), identity.as_ref()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_entered_has_a_number_and_a_path() {
        let place = entered("3:/run/window/slot-0").unwrap();
        assert_eq!(place, Place::Entered(3, "/run/window/slot-0".into()));
        assert_eq!(place.to_string(), "enter:3:/run/window/slot-0");
        for wrong in ["", "0", "0:", "0:slot", "4:/slot", "-1:/slot", "/slot", "x:/slot"] {
            assert!(
                entered(wrong).unwrap_err().contains("enter:0:/run/window/slot-0"),
                "{wrong}"
            );
        }
    }
}
