//! Published ports: how they are written, and whether a program of the host has one already.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
use serde::{Deserialize, Serialize};

use crate::Error;

/// What is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// A port of the host's that leads to a port of a guest's.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PortMapping {
    /// The host's address; `None` is every one of them, IPv4 and IPv6.
    pub host_ip: Option<IpAddr>,
    /// The host's port.
    pub host_port: u16,
    /// The guest's port.
    pub guest_port: u16,
    /// Which protocol.
    pub protocol: Protocol,
}

impl PortMapping {
    /// Whether both want the same port.
    pub(crate) fn conflicts_with(&self, other: &Self) -> bool {
        let same_address = match (self.host_ip, other.host_ip) {
            (Some(one), Some(two)) => one == two,
            _ => true,
        };
        same_address && (self.protocol, self.host_port) == (other.protocol, other.host_port)
    }
}

impl fmt::Display for PortMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host_ip {
            Some(IpAddr::V4(ip)) => write!(f, "{ip}:")?,
            Some(IpAddr::V6(ip)) => write!(f, "[{ip}]:")?,
            None => {}
        }
        let protocol = match self.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        write!(f, "{}:{}/{protocol}", self.host_port, self.guest_port)
    }
}

impl FromStr for PortMapping {
    type Err = Error;

    /// Reads `[IP:]HOST:GUEST[/tcp|udp]`; an IPv6 address stands in brackets.
    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text).map_err(|why| Error::Mapping {
            text: text.to_owned(),
            why,
        })
    }
}

fn parse(text: &str) -> Result<PortMapping, String> {
    let (rest, protocol) = match text.rsplit_once('/') {
        None => (text, Protocol::Tcp),
        Some((rest, "tcp")) => (rest, Protocol::Tcp),
        Some((rest, "udp")) => (rest, Protocol::Udp),
        Some((_, other)) => return Err(format!("`{other}` is neither tcp nor udp")),
    };
    let (rest, guest) = rest.rsplit_once(':').ok_or("there is no `:` in it")?;
    let (ip, host) = match rest.rsplit_once(':') {
        None => (None, rest),
        Some((ip, host)) => (Some(address(ip)?), host),
    };
    Ok(PortMapping {
        // All addresses of one family are not told apart from all addresses.
        host_ip: ip.filter(|ip| !ip.is_unspecified()),
        host_port: port(host)?,
        guest_port: port(guest)?,
        protocol,
    })
}

fn address(text: &str) -> Result<IpAddr, String> {
    let wrong = || format!("`{text}` is no IP address (IPv6 stands in brackets)");
    match text.strip_prefix('[') {
        Some(rest) => {
            let inner = rest.strip_suffix(']').ok_or_else(wrong)?;
            inner.parse::<Ipv6Addr>().map(IpAddr::V6).map_err(|_| wrong())
        }
        None => text.parse::<Ipv4Addr>().map(IpAddr::V4).map_err(|_| wrong()),
    }
}

fn port(text: &str) -> Result<u16, String> {
    let number: u64 = text
        .bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())
        .flatten()
        .ok_or_else(|| format!("`{text}` is no port number"))?;
    match u16::try_from(number) {
        Ok(port) if port > 0 => Ok(port),
        _ => Err(format!("port {number} is out of range, ports are 1 to 65535")),
    }
}

/// Tries the port out, as a program that listens on it would.
pub(crate) fn check_free(mapping: &PortMapping) -> Result<(), Error> {
    match mapping.host_ip {
        Some(IpAddr::V6(Ipv6Addr::LOCALHOST)) => Err(Error::LoopbackV6),
        Some(ip) => try_out(ip, mapping),
        None => {
            try_out(IpAddr::V4(Ipv4Addr::UNSPECIFIED), mapping)?;
            match try_out(IpAddr::V6(Ipv6Addr::UNSPECIFIED), mapping) {
                // A host without IPv6.
                Err(Error::NotOurs { .. }) => Ok(()),
                other => other,
            }
        }
    }
}

fn try_out(ip: IpAddr, mapping: &PortMapping) -> Result<(), Error> {
    match occupy(SocketAddr::new(ip, mapping.host_port), mapping.protocol) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(Error::PortTaken(mapping.clone())),
        Err(error)
            if error.kind() == io::ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(libc::EAFNOSUPPORT) =>
        {
            Err(Error::NotOurs { address: ip })
        }
        Err(error) => Err(Error::host(format!(
            "trying whether port {} is free",
            mapping.host_port
        ))(error)),
    }
}

/// Binds and lets go.
fn occupy(address: SocketAddr, protocol: Protocol) -> io::Result<()> {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let kind = match protocol {
        Protocol::Tcp => SocketType::STREAM,
        Protocol::Udp => SocketType::DGRAM,
    };
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    if protocol == Protocol::Tcp {
        // Connections that are closing do not matter, listeners do.
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    bind(&socket, &address)?;
    if protocol == Protocol::Tcp {
        listen(&socket, 1)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_written_again() {
        for text in ["8080:80/tcp", "127.0.0.1:8080:80/udp", "[fd00::1]:1:65535/tcp"] {
            assert_eq!(text.parse::<PortMapping>().unwrap().to_string(), text);
        }
        assert_eq!("8080:80".parse::<PortMapping>().unwrap().protocol, Protocol::Tcp);
        assert_eq!("0.0.0.0:1:2".parse::<PortMapping>().unwrap().host_ip, None);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, word) in [
            ("80", "no `:`"),
            ("0:80", "out of range"),
            ("80:65536", "out of range"),
            ("80:99999999999999999999999", "no port number"),
            ("80:+5", "no port number"),
            (":80", "no port number"),
            ("80:80/sctp", "neither tcp nor udp"),
            ("host:80:80", "no IP address"),
            ("fd00::1:80:80", "brackets"),
            ("[fd00::1:80:80", "brackets"),
        ] {
            let error = text.parse::<PortMapping>().unwrap_err().to_string();
            assert!(error.contains(word) && error.contains(text), "{error}");
        }
    }

    #[test]
    fn the_same_port_conflicts_unless_the_addresses_differ() {
        let of = |text: &str| text.parse::<PortMapping>().unwrap();
        assert!(of("80:1").conflicts_with(&of("80:2")));
        assert!(of("80:1").conflicts_with(&of("127.0.0.1:80:2")));
        assert!(!of("127.0.0.2:80:1").conflicts_with(&of("127.0.0.1:80:2")));
        assert!(!of("80:1").conflicts_with(&of("80:1/udp")));
        assert!(!of("80:1").conflicts_with(&of("81:1")));
    }

    #[test]
    fn a_listener_is_seen_whatever_its_address() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let of = |text: String| text.parse::<PortMapping>().unwrap();
        for text in [format!("{port}:80"), format!("127.0.0.1:{port}:80")] {
            let error = check_free(&of(text)).unwrap_err();
            assert!(matches!(error, Error::PortTaken(_)), "{error}");
        }
        check_free(&of(format!("{port}:80/udp"))).unwrap();
        drop(listener);
        check_free(&of(format!("{port}:80"))).unwrap();
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        assert!(matches!(
            check_free(&of(format!("{port}:80/udp"))),
            Err(Error::PortTaken(_))
        ));
        assert!(matches!(
            check_free(&of("198.51.100.7:80:80".into())),
            Err(Error::NotOurs { .. })
        ));
        assert!(matches!(check_free(&of("[::1]:80:80".into())), Err(Error::LoopbackV6)));
    }
}
