//! Where the server is, as the environment says, and how it is met. Knows no call.

use std::env;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wire::packet::PacketSocket;

use crate::{Address, ClientConnection, Offer, Transport, connect, connect_remote, tls};

/// Names the socket of the server.
const SOCKET: &str = "BASALT_ACCEL_SOCKET";
/// Where it is if nobody says another place.
const DEFAULT_SOCKET: &str = "/run/basalt/accel.sock";
/// Names a server on another machine, in place of a socket.
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
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Remote(address) => address.fmt(f),
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
            Self::Remote(_) => SERVER,
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
        }
    }
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
