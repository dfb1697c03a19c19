//! One forwarded port: how it is written, and the words of QEMU's user network for it ("Human Monitor Commands",
//! `hostfwd_add`, `hostfwd_remove`, `info usernet`).

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::str::FromStr;

use anyhow::{Context, Result, bail};

use crate::monitor::Monitor;
use crate::state::State;

/// `id=` of the network of the lab (`emulator`).
const NETDEV: &str = "net";

/// What is forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

impl Protocol {
    fn word(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// A port of this machine that leads to the port of the same number of the lab. Written `tcp:127.0.0.1:8080`; the
/// address 0.0.0.0 is all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Forward {
    pub(crate) protocol: Protocol,
    pub(crate) port: u16,
    pub(crate) address: Ipv4Addr,
}

impl Forward {
    /// Whether both cannot be forwarded at once: in the lab they are one port, whatever their addresses here.
    pub(crate) fn conflicts_with(&self, other: &Self) -> bool {
        (self.protocol, self.port) == (other.protocol, other.port)
    }

    /// Why this machine does not give the port away, if it does not.
    fn refusal(&self) -> Option<String> {
        let place = SocketAddrV4::new(self.address, self.port);
        let tried = match self.protocol {
            Protocol::Tcp => TcpListener::bind(place).map(drop),
            Protocol::Udp => UdpSocket::bind(place).map(drop),
        };
        let error = tried.err()?;
        Some(match error.kind() {
            io::ErrorKind::AddrInUse => format!(
                "port {} of this machine is taken by a program that listens on it: choose another one, or end that program \
                 (`ss -lnp{} 'sport = :{}'` shows it)",
                self.port,
                &self.protocol.word()[..1],
                self.port
            ),
            io::ErrorKind::AddrNotAvailable => format!(
                "{} is no address of this machine: leave it out, or give one of those that `ip address` shows",
                self.address
            ),
            io::ErrorKind::PermissionDenied => format!(
                "port {} may be used by root only: choose one from 1024 on, or become root",
                self.port
            ),
            _ => format!("port {} of this machine cannot be used: {error}", self.port),
        })
    }
}

impl fmt::Display for Forward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.protocol.word(), self.address, self.port)
    }
}

impl FromStr for Forward {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let read = || -> Option<Self> {
            let mut parts = text.splitn(3, ':');
            let protocol = match parts.next()? {
                "tcp" => Protocol::Tcp,
                "udp" => Protocol::Udp,
                _ => return None,
            };
            let address = parts.next()?.parse().ok()?;
            let port = parts.next()?.parse().ok().filter(|port| *port > 0)?;
            Some(Self {
                protocol,
                port,
                address,
            })
        };
        read().with_context(|| format!("`{text}` is no forwarded port: write tcp:ADDRESS:PORT or udp:ADDRESS:PORT"))
    }
}

/// Whoever can forward ports.
pub(crate) trait Rules {
    /// The ports that are forwarded now.
    fn list(&mut self) -> Result<Vec<Forward>>;
    /// Forwards one.
    fn add(&mut self, forward: &Forward) -> Result<()>;
    /// Takes one back.
    fn remove(&mut self, forward: &Forward) -> Result<()>;
}

/// The emulator of a lab.
pub(crate) struct Emulator {
    state: State,
    /// The port of the agent, which is forwarded by the emulator's own command line.
    agent: u16,
}

impl Emulator {
    pub(crate) fn new(state: &State, agent: u16) -> Self {
        Self {
            state: state.clone(),
            agent,
        }
    }

    /// Connected for one command: it serves one client at a time, and others have questions too.
    fn human(&self, line: &str) -> Result<String> {
        Monitor::open(&self.state)?.human(line)
    }
}

impl Rules for Emulator {
    fn list(&mut self) -> Result<Vec<Forward>> {
        let mut found = listed(&self.human("info usernet")?);
        found.retain(|forward| (forward.protocol, forward.port) != (Protocol::Tcp, self.agent));
        Ok(found)
    }

    fn add(&mut self, forward: &Forward) -> Result<()> {
        // The emulator only says that it could not.
        if let Some(refusal) = forward.refusal() {
            bail!(refusal);
        }
        let said = self.human(&format!("hostfwd_add {NETDEV} {forward}-:{}", forward.port))?;
        if said.trim().is_empty() {
            return Ok(());
        }
        bail!(
            "port {} of this machine cannot be forwarded: {}",
            forward.port,
            said.trim()
        )
    }

    fn remove(&mut self, forward: &Forward) -> Result<()> {
        let said = self.human(&format!("hostfwd_remove {NETDEV} {forward}"))?;
        // One that is gone already is as good.
        if said.contains("removed") || said.contains("not found") {
            return Ok(());
        }
        bail!("port {} of this machine stays forwarded: {}", forward.port, said.trim())
    }
}

/// The ports in what `info usernet` prints.
fn listed(text: &str) -> Vec<Forward> {
    let read = |line: &str| {
        let mut words = line.split_whitespace();
        let protocol = match words.next()? {
            "TCP[HOST_FORWARD]" => Protocol::Tcp,
            "UDP[HOST_FORWARD]" => Protocol::Udp,
            _ => return None,
        };
        let address = match words.nth(1)? {
            "*" => Ipv4Addr::UNSPECIFIED,
            address => address.parse().ok()?,
        };
        let port = words.next()?.parse().ok()?;
        Some(Forward {
            protocol,
            port,
            address,
        })
    };
    text.lines().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_written_again() {
        for text in ["tcp:127.0.0.1:8080", "udp:0.0.0.0:53"] {
            assert_eq!(text.parse::<Forward>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "tcp:8080",
            "sctp:0.0.0.0:1",
            "tcp:0.0.0.0:0",
            "tcp:::1:80",
            "tcp:a:1",
        ] {
            let error = text.parse::<Forward>().unwrap_err().to_string();
            assert!(error.contains("tcp:ADDRESS:PORT"), "{text}: {error}");
        }
    }

    #[test]
    fn the_emulators_table_is_read() {
        let text = "Hub -1 (net):\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\n\
                    \x20 TCP[ESTABLISHED]   33       127.0.0.1 18080       10.0.2.15 18080     0     0\n\
                    \x20 TCP[HOST_FORWARD]  13       127.0.0.1 18080       10.0.2.15 18080     0     0\n\
                    \x20 UDP[HOST_FORWARD]  14               *    53       10.0.2.15    53     0     0\n";
        let found: Vec<String> = listed(text).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["tcp:127.0.0.1:18080", "udp:0.0.0.0:53"]);
        assert!(listed("").is_empty());
    }

    #[test]
    fn a_port_that_is_taken_is_named_with_what_to_do() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let forward: Forward = format!("tcp:0.0.0.0:{port}").parse().unwrap();
        let refusal = forward.refusal().unwrap();
        assert!(
            refusal.contains(&format!("port {port} of this machine is taken")),
            "{refusal}"
        );
        assert!(refusal.contains(&format!("ss -lnpt 'sport = :{port}'")), "{refusal}");
        drop(listener);
        assert_eq!(forward.refusal(), None);
        let elsewhere: Forward = "tcp:198.51.100.7:80".parse().unwrap();
        assert!(elsewhere.refusal().unwrap().contains("198.51.100.7 is no address"));
    }
}
