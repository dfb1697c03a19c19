//! One connection: its state, its buffer toward the host, what the guest is still to be told.
//!
//! ```text
//!  someone connects to the listener                        the guest's OP_REQUEST to CID 2
//!         │                                                     │ a socket pair; one end went to the acceptor
//!         ▼                                                     │
//!     Greeting ──CONNECT <port>\n──▶ Requesting ──OP_RESPONSE──▶ Established ◀┘ (owes OP_RESPONSE)
//!         │                              │           OK <port>\n   │  │
//!         │ another line, hang-up,       │ OP_RST, hang-up,        │  │ the guest is done and bytes of its
//!         │ deadline                     │ deadline                │  │ are still on their way to the host
//!         ▼                              ▼                         │  ▼
//!       gone  ◀──────────────────────────┴─────────────────────────┴─ Draining
//!                                            OP_RST either way, or both sides shut down
//! ```
//! Draining, too, has a deadline, which each byte that the host takes puts off.
//!
//! `settle` in switch.rs draws the consequences after each event. Knows no queue and no table.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use base::Interest;
use bitflags::bitflags;
use rustix::io::Errno;

use crate::credit::Credit;
use crate::packet::{HOST_CID, Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM};
use crate::sink::Sink;
use crate::table::Ports;

bitflags! {
    /// Packets that the guest is to get. Each kind waits at most once, so that a guest cannot make them pile up.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(crate) struct Due: u8 {
        const REQUEST = 1;
        const RESPONSE = 2;
        const SHUTDOWN = 4;
        const CREDIT_REQUEST = 8;
        const CREDIT_UPDATE = 16;
    }
}

/// The longest first line: `CONNECT 4294967295` and room for a carriage return or a blank.
const LINE_MAX: usize = 32;

/// The first line of whoever connects, as far as it has come.
#[derive(Debug, Default)]
pub(crate) struct Line(Vec<u8>);

/// What became of the first line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Greeting {
    /// There is more to come.
    Partial,
    /// The guest's port.
    Port(u32),
    /// No such line, or nobody there any more.
    Bad,
}

impl Line {
    /// Reads on, at most to the end of the line: what follows belongs to the guest.
    pub(crate) fn read(&mut self, socket: impl AsFd) -> Greeting {
        let mut bytes = [0; LINE_MAX];
        let room = LINE_MAX.saturating_sub(self.0.len());
        let peeked = match receive(&socket, &mut bytes[..room], rustix::net::RecvFlags::PEEK) {
            Ok(0) => return Greeting::Bad,
            Ok(count) => &bytes[..count],
            Err(Errno::AGAIN | Errno::INTR) => return Greeting::Partial,
            Err(_) => return Greeting::Bad,
        };
        let end = peeked.iter().position(|&byte| byte == b'\n');
        let count = end.map_or(peeked.len(), |end| end + 1);
        self.0.extend_from_slice(&peeked[..end.unwrap_or(count)]);
        if receive(&socket, &mut bytes[..count], rustix::net::RecvFlags::empty()) != Ok(count) {
            return Greeting::Bad;
        }
        match end {
            Some(_) => self.parse(),
            None if self.0.len() >= LINE_MAX => Greeting::Bad,
            None => Greeting::Partial,
        }
    }

    fn parse(&self) -> Greeting {
        let text = std::str::from_utf8(&self.0).ok();
        let port = text.and_then(|text| text.trim_end().strip_prefix("CONNECT "));
        let digits = port.filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
        digits
            .and_then(|digits| digits.parse().ok())
            .map_or(Greeting::Bad, Greeting::Port)
    }
}

fn receive(socket: impl AsFd, bytes: &mut [u8], flags: rustix::net::RecvFlags) -> Result<usize, Errno> {
    rustix::net::recv(socket, bytes, flags).map(|(count, _)| count)
}

/// Where a connection stands.
#[derive(Debug)]
pub(crate) enum Stage {
    /// Someone connected to the listener and has not said where to.
    Greeting(Line),
    /// The guest is, or is to be, asked.
    Requesting,
    /// Bytes flow.
    Established,
    /// The guest has finished; its last bytes go to the host.
    Draining,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stage: Stage,
    pub(crate) ports: Ports,
    /// `None` once nothing can be read or written any more.
    pub(crate) socket: Option<OwnedFd>,
    /// In place of a socket: the file that takes what the guest sends.
    pub(crate) sink: Option<Arc<Sink>>,
    pub(crate) credit: Credit,
    /// From the guest, not yet taken by the host; never more than the credit promises.
    pub(crate) out: VecDeque<u8>,
    pub(crate) due: Due,
    /// What the guest has shut down (`SHUTDOWN_*`).
    pub(crate) guest_shut: u32,
    /// What the host has shut down.
    pub(crate) host_shut: u32,
    /// A read would not block, as far as is known.
    pub(crate) readable: bool,
    /// In the round.
    pub(crate) queued: bool,
    /// What the epoll set has the socket for; `None`: it is not in it.
    pub(crate) watched: Option<Interest>,
    /// When the next step must have happened.
    pub(crate) deadline: Option<Instant>,
}

/// What was written to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// All of it.
    Done,
    /// The socket takes no more now.
    Blocked,
    /// Nobody reads any more.
    Broken,
}

impl Connection {
    /// A connection that has done nothing yet.
    pub(crate) fn new(stage: Stage, socket: Option<OwnedFd>) -> Self {
        Self {
            stage,
            ports: Ports::default(),
            socket,
            sink: None,
            credit: Credit::default(),
            out: VecDeque::new(),
            due: Due::empty(),
            guest_shut: 0,
            host_shut: 0,
            readable: false,
            queued: false,
            watched: None,
            deadline: None,
        }
    }

    /// The header of a packet of this connection's. Tells the guest of all room there is, so no update is due after.
    pub(crate) fn header(&mut self, cid: u64, op: Op, len: u32) -> Header {
        self.due.remove(Due::CREDIT_UPDATE);
        Header {
            src_cid: HOST_CID,
            dst_cid: cid,
            src_port: self.ports.host,
            dst_port: self.ports.guest,
            len,
            kind: TYPE_STREAM,
            op: op as u16,
            flags: if op == Op::Shutdown { self.host_shut } else { 0 },
            buf_alloc: self.credit.alloc(),
            fwd_cnt: self.credit.announce(),
        }
    }

    /// Whether bytes of the host's may go to the guest, credit aside.
    pub(crate) fn may_read(&self) -> bool {
        matches!(self.stage, Stage::Established)
            && self.socket.is_some()
            && self.host_shut & SHUTDOWN_SEND == 0
            && self.guest_shut & SHUTDOWN_RECEIVE == 0
    }

    /// Whether bytes of the guest's are of use to anybody.
    pub(crate) fn may_write(&self) -> bool {
        (self.socket.is_some() || self.sink.is_some()) && self.host_shut & SHUTDOWN_RECEIVE == 0
    }

    /// Whether the next packet is data.
    pub(crate) fn has_data(&self) -> bool {
        self.readable && self.may_read() && self.credit.free() > 0 && !self.due.intersects(Due::REQUEST | Due::RESPONSE)
    }

    /// The host has shut these directions down; the guest is to hear what it has not.
    pub(crate) fn shut_by_host(&mut self, directions: u32) {
        if self.host_shut | directions == self.host_shut {
            return;
        }
        self.host_shut |= directions;
        self.due.insert(Due::SHUTDOWN);
        if self.host_shut & SHUTDOWN_RECEIVE != 0 {
            // Nobody will read it. It counts as forwarded, or a guest that writes on would wait for ever.
            self.credit.forwarded(self.out.len());
            self.out = VecDeque::new();
        }
        if self.host_shut == SHUTDOWN_BOTH {
            self.readable = false;
            self.watched = None;
            // Closing takes it out of the epoll set.
            self.socket = None;
            self.sink = None;
        }
    }

    /// Writes what has waited, as much as the host takes.
    pub(crate) fn flush(&mut self) -> Flow {
        while !self.out.is_empty() {
            let Some(socket) = &self.socket else {
                return Flow::Broken;
            };
            let (first, _) = self.out.as_slices();
            match rustix::net::send(socket, first, rustix::net::SendFlags::NOSIGNAL) {
                Ok(count) => {
                    self.out.drain(..count);
                    self.credit.forwarded(count);
                }
                Err(Errno::INTR) => (),
                Err(Errno::AGAIN) => return Flow::Blocked,
                Err(_) => return Flow::Broken,
            }
        }
        // An idle connection keeps no buffer.
        self.out = VecDeque::new();
        Flow::Done
    }

    /// Tells the host that no more will come, or that no more is read, whichever the guest has said.
    pub(crate) fn pass_shutdown(&self) -> io::Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let finished = self.guest_shut & SHUTDOWN_SEND != 0 && self.out.is_empty();
        let how = match (finished, self.guest_shut & SHUTDOWN_RECEIVE != 0) {
            (true, true) => rustix::net::Shutdown::Both,
            (true, false) => rustix::net::Shutdown::Write,
            (false, true) => rustix::net::Shutdown::Read,
            (false, false) => return Ok(()),
        };
        match rustix::net::shutdown(socket, how) {
            // The peer may have gone first.
            Ok(()) | Err(Errno::NOTCONN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// What to wait for on the socket; `None`: nothing, not even a hang-up (which would be reported again and again
    /// while it cannot be acted upon).
    pub(crate) fn interest(&self) -> Option<Interest> {
        self.socket.as_ref()?;
        let read = match self.stage {
            Stage::Greeting(_) => true,
            Stage::Requesting | Stage::Draining => false,
            Stage::Established => self.may_read() && !self.readable,
        };
        let write = !self.out.is_empty();
        // Bytes lie there that the guest has no room for: the hang-up comes after them.
        let waiting = self.may_read() && self.readable;
        (read || write || !waiting).then_some(Interest {
            read,
            write,
            edge: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn greeting(pieces: &[&str]) -> (Greeting, String) {
        let (mut peer, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut line = Line::default();
        let mut result = Greeting::Partial;
        for piece in pieces {
            peer.write_all(piece.as_bytes()).unwrap();
            result = line.read(&ours);
        }
        drop(peer);
        let mut rest = String::new();
        (&ours).read_to_string(&mut rest).unwrap();
        (result, rest)
    }

    #[test]
    fn the_line_is_read_and_nothing_behind_it() {
        assert_eq!(
            greeting(&["CONNECT 52\nhello\n"]),
            (Greeting::Port(52), "hello\n".into())
        );
        assert_eq!(
            greeting(&["CON", "NECT ", "1024", "\nx"]),
            (Greeting::Port(1024), "x".into())
        );
        assert_eq!(greeting(&["CONNECT 4294967295\r\n"]).0, Greeting::Port(u32::MAX));
        assert_eq!(greeting(&["CONNECT 52"]).0, Greeting::Partial);
    }

    #[test]
    fn other_lines_are_refused() {
        for line in [
            "\n",
            "CONNECT\n",
            "CONNECT \n",
            "CONNECT +5\n",
            "CONNECT -1\n",
            "CONNECT 4294967296\n",
            "connect 5\n",
            "CONNECT 5 6\n",
            "GET / HTTP/1.1\r\n",
            "CONNECT 00000000000000000000000000000000000000005\n",
        ] {
            assert_eq!(greeting(&[line]).0, Greeting::Bad, "{line:?}");
        }
        let (peer, ours) = UnixStream::pair().unwrap();
        drop(peer);
        assert_eq!(Line::default().read(&ours), Greeting::Bad);
    }

    #[test]
    fn a_connection_without_room_in_the_guest_is_not_watched() {
        let (_peer, ours) = UnixStream::pair().unwrap();
        let mut connection = Connection::new(Stage::Established, Some(ours.into()));
        assert_eq!(connection.interest(), Some(Interest::READ));
        connection.readable = true;
        assert_eq!(connection.interest(), None);
        connection.out.push_back(1);
        assert_eq!(connection.interest(), Some(Interest::WRITE));
        connection.shut_by_host(SHUTDOWN_SEND);
        connection.out.clear();
        assert_eq!(
            connection.interest(),
            Some(Interest::NONE),
            "the full close is still to come"
        );
    }
}
