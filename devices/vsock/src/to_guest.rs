//! Packets to the guest: RSTs first, then the connections in turn, one packet each.
//!
//! Data is read from the host's socket straight into the guest's buffer, so nothing on its way to the guest is ever
//! held here.

use std::io::{self, ErrorKind};

use memory::GuestRam;
use virtio::Chain;
use vm_memory::ReadVolatile;

use crate::connection::Due;
use crate::packet::{HEADER_LEN, Header, MAX_PAYLOAD, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use crate::ring::{Ring, put_bytes, transfer};
use crate::switch::Switch;
use crate::table::Key;

/// Control packets in the order in which they go out. Room in our buffer is told last: data tells it as well.
const CONTROL: [(Due, Op); 4] = [
    (Due::REQUEST, Op::Request),
    (Due::RESPONSE, Op::Response),
    (Due::SHUTDOWN, Op::Shutdown),
    (Due::CREDIT_REQUEST, Op::CreditRequest),
];

impl Switch {
    /// Sends what waits, as long as the guest has buffers, but not more than one ring full. True when there is more to
    /// do without waiting.
    pub(crate) fn deliver(&mut self, rx: &mut Ring, memory: &GuestRam) -> bool {
        rx.ignore(memory);
        for _ in 0..rx.size() {
            if self.resets.first().is_none() && self.table.is_idle() {
                return false;
            }
            let (head, length) = match rx.take_or_listen(memory) {
                None => {
                    self.wait_for_buffers();
                    return false;
                }
                Some(Ok(chain)) if chain.writable_bytes() >= HEADER_LEN => (chain.head(), self.fill(&chain)),
                Some(Ok(chain)) => {
                    self.malformed(format_args!("the guest offered a buffer that holds no header"));
                    (chain.head(), Some(0))
                }
                Some(Err(bad)) => {
                    self.malformed(format_args!("the guest offered a bad buffer: {bad}"));
                    (bad.head, Some(0))
                }
            };
            match length {
                Some(length) => rx.give(memory, head, length),
                None => rx.put_back(),
            }
        }
        true
    }

    /// The guest has no buffers, or takes nothing yet: who waits for one is not watched, as its socket would wake us again and again.
    pub(crate) fn wait_for_buffers(&mut self) {
        for place in 0..self.table.round_len() {
            if let Some(key) = self.table.round_at(place) {
                self.watch(key);
            }
        }
    }

    /// Puts the next packet into the buffer; its length, or `None` when there was none after all.
    fn fill(&mut self, chain: &Chain<'_>) -> Option<usize> {
        if let Some(reset) = self.resets.first() {
            let header = reset.header(self.cid);
            self.resets.pop();
            self.metrics.resets.increment();
            return Some(put(chain, &header));
        }
        let key = self.table.dequeue()?;
        let connection = self.table.get_mut(key)?;
        let control = CONTROL.into_iter().find(|(due, _)| connection.due.contains(*due));
        let length = if let Some((due, op)) = control {
            connection.due.remove(due);
            Some(put(chain, &connection.header(self.cid, op, 0)))
        } else if connection.has_data() {
            self.fill_data(key, chain)
        } else if connection.due.contains(Due::CREDIT_UPDATE) {
            Some(put(chain, &connection.header(self.cid, Op::CreditUpdate, 0)))
        } else {
            None
        };
        self.settle(key);
        length
    }

    fn fill_data(&mut self, key: Key, chain: &Chain<'_>) -> Option<usize> {
        let connection = self.table.get_mut(key)?;
        let credit = usize::try_from(connection.credit.free()).unwrap_or(usize::MAX);
        let room = (chain.writable_bytes() - HEADER_LEN).min(credit).min(MAX_PAYLOAD);
        if room == 0 {
            self.malformed(format_args!("the guest offered a buffer that holds a header only"));
            return Some(0);
        }
        let mut socket = connection.socket.as_ref()?;
        let mut payload = chain.writer();
        payload.skip(HEADER_LEN);
        let (count, error) = transfer(&mut payload, room, |slice| {
            ReadVolatile::read_volatile(&mut socket, slice)
        });
        // A short read has emptied the socket, or nearly: the epoll set knows.
        connection.readable = count == room;
        match error {
            // That it has closed altogether is the next event, as only hang-ups are waited for from now on.
            None if count == 0 => connection.shut_by_host(SHUTDOWN_SEND),
            Some(error) => self.on_read_error(key, &error),
            None => (),
        }
        if count == 0 {
            return None;
        }
        self.metrics.to_guest.add(count as u64);
        let connection = self.table.get_mut(key)?;
        let length = u32::try_from(count).unwrap_or(u32::MAX);
        connection.credit.sent(length);
        let header = connection.header(self.cid, Op::Rw, length);
        Some(put(chain, &header) + count)
    }

    fn on_read_error(&mut self, key: Key, error: &io::Error) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        match error.kind() {
            ErrorKind::WouldBlock => (),
            ErrorKind::Interrupted => connection.readable = true,
            // The peer closed with bytes unread. What it sent before is behind the error, which is reported once.
            ErrorKind::ConnectionReset => {
                connection.readable = true;
                connection.shut_by_host(SHUTDOWN_RECEIVE);
            }
            _ => {
                self.warn(format_args!("a connection was reset: {error}"));
                self.reset(key);
            }
        }
    }
}

/// Writes the header, for which the buffer was found large enough.
fn put(chain: &Chain<'_>, header: &Header) -> usize {
    put_bytes(chain, &header.encode())
}
