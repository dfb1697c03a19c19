//! TCP connections as the kernel lists them, and their end from outside (sock_diag(7), linux/inet_diag.h). Knows no process, and
//! not which connections should end.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::socket::{Body, Socket};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;

// include/net/tcp_states.h
const TCP_TIME_WAIT: u8 = 6;
const TCP_CLOSE: u8 = 7;
const TCP_LISTEN: u8 = 10;
const TCP_MAX_STATES: u8 = 13;

/// Every state of a connection: those of sockets that only wait for one, or have none, are left out.
const CONNECTED: u32 = (1 << TCP_MAX_STATES) - 2 - (1 << TCP_CLOSE) - (1 << TCP_LISTEN);

/// `struct inet_diag_sockid`: ports and addresses in network order, interface, cookie.
const ID: usize = 48;

/// One end of a TCP connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// This end. An IPv4 address is one, whatever the socket's family.
    pub local: SocketAddr,
    /// The other end.
    pub peer: SocketAddr,
    /// Its socket is gone; the kernel keeps the addresses from being used again, for a minute at most.
    pub only_waits: bool,
    family: u8,
    id: [u8; ID],
}

/// The TCP connections of one network namespace.
#[derive(Debug)]
pub struct Connections(Socket);

impl Connections {
    /// Those of this thread's namespace.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open() -> io::Result<Self> {
        Ok(Self(Socket::diagnosis()?))
    }

    /// All of them, of both families.
    ///
    /// # Errors
    /// The kernel refuses, as one without `CONFIG_INET_DIAG` does.
    pub fn list(&self) -> io::Result<Vec<Connection>> {
        let mut all = Vec::new();
        for family in [AF_INET, AF_INET6] {
            self.0
                .dump(SOCK_DIAG_BY_FAMILY, &request(family, &[0; ID]), |_, data| {
                    all.extend(parse(data));
                })?;
        }
        Ok(all)
    }

    /// Ends one: whoever waits for it gets `ECONNABORTED`, and its peer a reset. No error if it is gone.
    ///
    /// # Errors
    /// The kernel refuses, as one without `CONFIG_INET_DIAG_DESTROY` does.
    pub fn end(&self, connection: &Connection) -> io::Result<()> {
        let asked = self
            .0
            .request(SOCK_DESTROY, 0, &request(connection.family, &connection.id));
        match asked {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

/// `struct inet_diag_req_v2`: family, protocol, extensions, padding, states, id.
fn request(family: u8, id: &[u8; ID]) -> Body {
    let mut fixed = vec![family, IPPROTO_TCP, 0, 0];
    fixed.extend(CONNECTED.to_ne_bytes());
    fixed.extend(id);
    Body::new(&fixed)
}

/// `struct inet_diag_msg`: family, state, timer, retransmissions, id, and more.
fn parse(data: &[u8]) -> Option<Connection> {
    let [family, state, _, _, rest @ ..] = data else {
        return None;
    };
    let id = rest.first_chunk::<ID>()?;
    let port = |at: usize| Some(u16::from_be_bytes(id.get(at..at + 2)?.try_into().ok()?));
    Some(Connection {
        local: SocketAddr::new(address(*family, id.get(4..20)?)?, port(0)?),
        peer: SocketAddr::new(address(*family, id.get(20..36)?)?, port(2)?),
        only_waits: *state == TCP_TIME_WAIT,
        family: *family,
        id: *id,
    })
}

fn address(family: u8, bytes: &[u8]) -> Option<IpAddr> {
    match family {
        AF_INET => Some(IpAddr::V4(Ipv4Addr::from(*bytes.first_chunk::<4>()?))),
        AF_INET6 => Some(Ipv6Addr::from(*bytes.first_chunk::<16>()?).to_canonical()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Linux 6.1 says of a connection from port 40000 to port 7000.
    fn message(family: u8, state: u8, local: &[u8], peer: &[u8]) -> Vec<u8> {
        let mut data = vec![family, state, 0, 0, 0x9c, 0x40, 0x1b, 0x58];
        for address in [local, peer] {
            let mut bytes = address.to_vec();
            bytes.resize(16, 0);
            data.extend(bytes);
        }
        data.resize(72, 7);
        data
    }

    #[test]
    fn both_ends_are_read_and_ipv4_is_ipv4_in_both_families() {
        let v4 = parse(&message(AF_INET, 1, &[192, 0, 2, 1], &[192, 0, 2, 2])).unwrap();
        assert_eq!(v4.local.to_string(), "192.0.2.1:40000");
        assert_eq!(v4.peer.to_string(), "192.0.2.2:7000");
        assert!(!v4.only_waits);
        let mapped = |last| Ipv4Addr::new(192, 0, 2, last).to_ipv6_mapped().octets();
        let v6 = parse(&message(AF_INET6, TCP_TIME_WAIT, &mapped(1), &mapped(2))).unwrap();
        assert_eq!((v6.local, v6.peer), (v4.local, v4.peer));
        assert!(v6.only_waits);
        assert_eq!(parse(&message(AF_INET, 1, &[], &[])[..51]), None, "cut short");
        assert_eq!(parse(&message(1, 1, &[], &[])), None, "no family of TCP");
    }

    #[test]
    fn a_socket_that_waits_for_connections_is_not_asked_for() {
        for state in 1..TCP_MAX_STATES {
            let asked = CONNECTED >> state & 1 == 1;
            assert_eq!(asked, ![TCP_CLOSE, TCP_LISTEN].contains(&state), "state {state}");
        }
        assert_eq!(CONNECTED & 1, 0, "there is no state 0");
    }
}
