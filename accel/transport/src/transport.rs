//! Which ways there are for records, and which is taken. Knows none of them from inside.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A way for records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// Rings; each side looks for records for up to 50 us after the last one, then sleeps until it is woken by a futex. No system call
    /// and no exit while calls go on; takes a CPU each.
    Spin,
    /// Rings; each side looks for a moment, then sleeps until a descriptor is readable: between processes a pipe, between a device and a
    /// virtual machine an event fd.
    Bell,
    /// Rings; who waits sleeps at once, and the server's thread follows the client's to its CPU: a call is two changes of the running
    /// thread, and one CPU does the work of both.
    SameCpu,
    /// Rings in memory of two virtual machines; the client runs the server in its own place, and nobody is woken ([`crate::Enter`]). Is never
    /// agreed on over a socket.
    Enter,
    /// A stream socket, records in batches.
    Stream,
    /// A stream socket, one request and one answer for each record, whether it has an answer or not, as GVirtuS does; to compare with.
    Synchronous,
}

/// A name is no transport's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no transport {0:?}; there are spin, bell, same-cpu, enter, stream and synchronous")]
pub struct TransportError(String);

impl Transport {
    /// All that are agreed on over a socket.
    pub const ALL: [Self; 5] = [Self::Spin, Self::Bell, Self::SameCpu, Self::Stream, Self::Synchronous];

    /// Those that are worth using between processes of a host with so many CPUs, the best first. Two sides that spin on two CPUs leave
    /// none for anybody else: it comes last there, for where the other side has nothing else.
    pub fn preferred(cpus: usize) -> &'static [Self] {
        match cpus {
            0..3 => &[Self::SameCpu, Self::Bell, Self::Stream, Self::Spin],
            _ => &[Self::Spin, Self::SameCpu, Self::Bell, Self::Stream],
        }
    }

    /// The first of the client's wishes that the server has, too.
    pub(crate) fn choose(wishes: &[Self], have: &[Self]) -> Option<Self> {
        let agreed = |wish: &Self| have.contains(wish) && *wish != Self::Enter;
        wishes.iter().copied().find(agreed)
    }

    /// Whether it needs memory that both have.
    pub fn has_rings(self) -> bool {
        matches!(self, Self::Spin | Self::Bell | Self::SameCpu | Self::Enter)
    }

    /// How long who waits looks before it sleeps, at most.
    pub(crate) fn busy_poll(self) -> Duration {
        match self {
            Self::Spin => Duration::from_micros(50),
            Self::Bell => Duration::from_micros(10),
            Self::SameCpu | Self::Enter | Self::Stream | Self::Synchronous => Duration::ZERO,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Spin => "spin",
            Self::Bell => "bell",
            Self::SameCpu => "same-cpu",
            Self::Enter => "enter",
            Self::Stream => "stream",
            Self::Synchronous => "synchronous",
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Transport {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Self, TransportError> {
        let found = Self::ALL
            .into_iter()
            .chain([Self::Enter])
            .find(|transport| transport.name() == text);
        found.ok_or_else(|| TransportError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for transport in Transport::ALL.into_iter().chain([Transport::Enter]) {
            assert_eq!(transport.to_string().parse(), Ok(transport));
            assert_eq!(serde_json::to_string(&transport).unwrap(), format!("\"{transport}\""));
        }
        let error = "smoke".parse::<Transport>().unwrap_err().to_string();
        assert!(error.contains("smoke") && Transport::ALL.iter().all(|transport| error.contains(transport.name())));
    }

    #[test]
    fn the_clients_first_wish_that_the_server_has_is_taken() {
        use Transport::{Bell, SameCpu, Spin, Stream, Synchronous};
        assert_eq!(Transport::choose(&[Spin, Bell], &[Bell, Spin]), Some(Spin));
        assert_eq!(Transport::choose(&[Spin, Stream], &[Bell, Stream]), Some(Stream));
        assert_eq!(Transport::choose(&[Synchronous], &[Bell]), None);
        assert_eq!(Transport::choose(&[Transport::Enter], &[Transport::Enter]), None);
        assert_eq!(Transport::preferred(2).first(), Some(&SameCpu));
        assert_eq!(Transport::preferred(4).first(), Some(&Spin));
        // It is for comparison, and taken by who forces it alone.
        assert!(!Transport::preferred(64).contains(&Synchronous));
    }
}
