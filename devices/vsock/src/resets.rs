//! RST packets that wait for a buffer of the guest's: bounded, and none twice.
//!
//! ```text
//!  tx queue ──▶ packet nobody expects ──▶ [ at most MOST waiting ] ──▶ rx queue
//!      ▲                                            │ full
//!      └────────── no more is taken ◀───────────────┘   (5.10.6.1.1: neither side may make the other hold more)
//! ```
//! Connections that end add to the list beyond `MOST`; there are at most as many of them as the table holds.

use std::collections::VecDeque;

use crate::packet::{Header, Op};

/// How many wait before the device stops to take packets.
const MOST: usize = 256;

/// Who is reset, as the guest sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reset {
    /// The context id that the guest talked to.
    pub(crate) cid: u64,
    /// The port there.
    pub(crate) host_port: u32,
    /// The guest's own port.
    pub(crate) guest_port: u32,
    /// The socket type that the guest used.
    pub(crate) kind: u16,
}

impl Reset {
    /// The answer to a packet of the guest's.
    pub(crate) fn answer(header: &Header) -> Self {
        Self {
            cid: header.dst_cid,
            host_port: header.dst_port,
            guest_port: header.src_port,
            kind: header.kind,
        }
    }

    /// The packet for the guest `cid`.
    pub(crate) fn header(&self, cid: u64) -> Header {
        Header {
            src_cid: self.cid,
            dst_cid: cid,
            src_port: self.host_port,
            dst_port: self.guest_port,
            kind: self.kind,
            op: Op::Rst as u16,
            ..Header::default()
        }
    }
}

/// The waiting ones, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Resets(VecDeque<Reset>);

impl Resets {
    /// Adds one that does not wait already.
    pub(crate) fn push(&mut self, reset: Reset) {
        if !self.0.contains(&reset) {
            self.0.push_back(reset);
        }
    }

    /// Whether packets of the guest's must wait.
    pub(crate) fn is_full(&self) -> bool {
        self.0.len() >= MOST
    }

    /// The oldest.
    pub(crate) fn first(&self) -> Option<&Reset> {
        self.0.front()
    }

    /// Forgets the oldest, which was sent.
    pub(crate) fn pop(&mut self) {
        self.0.pop_front();
        if self.0.is_empty() {
            self.0.shrink_to(MOST / 8);
        }
    }

    /// Forgets all: the guest they were for is gone.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_held_once_and_many_are_full() {
        let mut resets = Resets::default();
        let mut reset = Reset {
            cid: 2,
            host_port: 1,
            guest_port: 0,
            kind: 1,
        };
        resets.push(reset);
        resets.push(reset);
        resets.pop();
        assert!(resets.first().is_none());
        for port in 0..256 {
            assert!(!resets.is_full());
            reset.guest_port = port;
            resets.push(reset);
        }
        assert!(resets.is_full());
    }
}
