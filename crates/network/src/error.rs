//! What can go wrong with the network: each error says what happened and what to do about it.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use crate::ports::{PortMapping, Protocol};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused something.
    #[error("{what}: {source}")]
    Host {
        /// What was tried.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The program that sets nft tables is missing.
    #[error("the program `nft` cannot be started ({0}): install the package nftables, or use no network")]
    NoNft(io::Error),
    /// nft refused a change; nothing of it was made.
    #[error("nft refuses the rules for {what}: {message}")]
    Nft {
        /// Which rules.
        what: &'static str,
        /// What it said.
        message: String,
    },
    /// The instance's name cannot be one.
    #[error("`{0}` cannot name a network: use 1 to 48 lower-case letters, digits and `-`, beginning with a letter")]
    Instance(String),
    /// A range cannot be used.
    #[error("{range} cannot be the sandboxes' range: {why}")]
    Range {
        /// The range.
        range: String,
        /// Why not.
        why: &'static str,
    },
    /// Every range overlaps with a route of the host.
    #[error(
        "every range that sandboxes could use overlaps with a route of this host ({tried}): configure one that does not"
    )]
    NoRange {
        /// The ranges.
        tried: String,
    },
    /// There are not so many slots.
    #[error("slot {slot} is beyond the last one, {last}: the range has no more addresses")]
    Slot {
        /// Asked for.
        slot: u32,
        /// The last one.
        last: u32,
    },
    /// A TAP has at least one queue, and the kernel gives it no more than 256.
    #[error("{0} queues were asked for: give 1 to 64")]
    Queues(usize),
    /// The slot has a guest.
    #[error("slot {0} is in use: detach it first")]
    InUse(u32),
    /// A port mapping that cannot be read.
    #[error("`{text}` is no port mapping: {why}; write [IP:]HOST:GUEST[/tcp|udp], such as 8080:80")]
    Mapping {
        /// What was given.
        text: String,
        /// What is wrong.
        why: String,
    },
    /// Another sandbox has the port.
    #[error("port {} is published by another sandbox already: choose another one", place(.mapping))]
    PortPublished {
        /// The mapping.
        mapping: PortMapping,
        /// The slot that has it.
        slot: u32,
    },
    /// A program of the host listens there.
    #[error("port {} is taken: a program on this host listens there; choose another port, or stop the program", place(.0))]
    PortTaken(PortMapping),
    /// The address is not one of the host's.
    #[error("{address} is no address of this host: leave it out, or give one that `ip address` shows")]
    NotOurs {
        /// The address.
        address: IpAddr,
    },
    /// The address is IPv6's loopback.
    #[error("ports cannot be published at [::1], because the kernel routes nothing from there: use 127.0.0.1")]
    LoopbackV6,
    /// A file of the kernel's cannot be read or written.
    #[error("{}: {source}", .path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The thread inside the namespace is gone.
    #[error("the thread in the network namespace has died; restart the daemon")]
    ThreadGone,
    /// The kernel's answer makes no sense.
    #[error("the kernel's answer about {0} is cut short or malformed")]
    Answer(&'static str),
}

impl Error {
    /// For `map_err`: what was being done.
    pub(crate) fn host<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::Host {
            what,
            source: source.into(),
        }
    }
}

fn place(mapping: &PortMapping) -> String {
    let protocol = match mapping.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    };
    match mapping.host_ip {
        Some(IpAddr::V6(ip)) => format!("[{ip}]:{}/{protocol}", mapping.host_port),
        Some(IpAddr::V4(ip)) => format!("{ip}:{}/{protocol}", mapping.host_port),
        None => format!("{}/{protocol}", mapping.host_port),
    }
}
