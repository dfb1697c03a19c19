//! Packets from the guest (virtio 1.2, 5.10.6). The guest may be hostile: what does not fit is answered with RST.

use std::io::Read;
use std::time::Instant;

use rustix::net::SendFlags;
use virtio::Chain;
use virtio::buffers::Cursor;
use vm_memory::{VolatileSlice, WriteVolatile};

use crate::connection::{Connection, Due, Stage};
use crate::packet::{HEADER_LEN, HOST_CID, Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM};
use crate::resets::Reset;
use crate::ring::transfer;
use crate::switch::{DRAIN_PATIENCE, Switch};
use crate::table::{Key, Ports};

/// A packet as it lies in guest memory; its header was read once.
struct Packet<'c, 'm> {
    header: Header,
    /// Stands behind the header.
    payload: Cursor<'c, 'm>,
}

impl Switch {
    /// Deals with one packet.
    pub(crate) fn on_packet(&mut self, chain: &Chain<'_>) {
        let mut bytes = [0; HEADER_LEN];
        let mut payload = chain.reader();
        if payload.read_exact(&mut bytes).is_err() {
            return self.malformed(format_args!("a packet is shorter than its header"));
        }
        let header = Header::decode(&bytes);
        if header.src_cid != self.cid {
            return self.malformed(format_args!("a packet claims to come from {}", header.src_cid));
        }
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            // A driver may try whether anybody is there; it hears that nobody is.
            return self.refuse(&header);
        }
        let ports = Ports {
            guest: header.src_port,
            host: header.dst_port,
        };
        let connection = self.table.find(ports);
        let brought = payload.remaining();
        let op = Op::from_number(header.op).filter(|_| header.len as usize <= brought);
        let mut packet = Packet { header, payload };
        match (op, connection) {
            (Some(op), Some(key)) => self.on_known(key, op, &mut packet),
            (Some(Op::Request), None) => self.on_request(&packet.header, ports),
            (Some(_), None) => self.refuse(&packet.header),
            (None, known) => {
                self.malformed(format_args!(
                    "a packet says operation {} and {} bytes, and has {brought}",
                    packet.header.op, packet.header.len
                ));
                match known {
                    Some(key) => self.reset(key),
                    None => self.refuse(&packet.header),
                }
            }
        }
    }

    /// Counts what the specification does not allow.
    pub(crate) fn malformed(&self, what: std::fmt::Arguments<'_>) {
        self.metrics.malformed.increment();
        self.warn(what);
    }

    /// Answers that there is no such connection. RST itself has no answer, or two sides would reset for ever.
    fn refuse(&mut self, header: &Header) {
        if header.op == Op::Request as u16 {
            self.metrics.refused.increment();
        }
        if header.op != Op::Rst as u16 {
            self.resets.push(Reset::answer(header));
        }
    }

    fn on_request(&mut self, header: &Header, ports: Ports) {
        let Some(mut connection) = self.open_to_host(ports.host) else {
            return self.refuse(header);
        };
        connection.credit.heard(header);
        connection.due.insert(Due::RESPONSE);
        let Some(key) = self.table.insert(connection) else {
            return self.refuse(header);
        };
        self.table.bind(key, ports);
        self.metrics.opened.increment();
        self.settle(key);
    }

    fn on_known(&mut self, key: Key, op: Op, packet: &mut Packet<'_, '_>) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        connection.credit.heard(&packet.header);
        match (op, &connection.stage) {
            (Op::Rst, _) => return self.on_rst(key),
            (Op::Response, Stage::Requesting) => self.on_response(key),
            (Op::Rw, Stage::Established) => self.on_data(key, packet),
            (Op::Shutdown, Stage::Established) => self.on_shutdown(key, packet.header.flags),
            (Op::CreditRequest, Stage::Established) => connection.due.insert(Due::CREDIT_UPDATE),
            (Op::CreditUpdate, _) => (),
            _ => return self.reset(key),
        }
        self.settle(key);
    }

    pub(crate) fn on_rst(&mut self, key: Key) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        let finished = connection.guest_shut & SHUTDOWN_SEND != 0;
        if finished && !connection.out.is_empty() && connection.may_write() {
            // It said goodbye before: what it sent until then still arrives.
            connection.stage = Stage::Draining;
            connection.due = Due::empty();
            connection.readable = false;
            let ports = connection.ports;
            self.table.unbind(key, ports);
            self.table.set_deadline(key, Some(Instant::now() + DRAIN_PATIENCE));
            return self.settle(key);
        }
        if matches!(connection.stage, Stage::Requesting) {
            self.metrics.refused.increment();
        }
        self.table.remove(key);
    }

    fn on_response(&mut self, key: Key) {
        self.table.set_deadline(key, None);
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        // The guest cannot answer what it was not asked.
        let asked = !connection.due.contains(Due::REQUEST);
        let line = format!("OK {}\n", connection.ports.host);
        let told = connection.socket.as_ref().is_some_and(|socket| {
            // The first bytes on an empty socket: all of them fit, or the peer is gone.
            rustix::net::send(socket, line.as_bytes(), SendFlags::NOSIGNAL) == Ok(line.len())
        });
        connection.stage = Stage::Established;
        if asked && told {
            self.metrics.opened.increment();
        } else {
            self.metrics.refused.increment();
            self.reset(key);
        }
    }

    fn on_shutdown(&mut self, key: Key, flags: u32) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        connection.guest_shut |= flags & SHUTDOWN_BOTH;
        if connection.guest_shut & SHUTDOWN_RECEIVE != 0 {
            connection.readable = false;
        }
        if connection.sink.is_some() && connection.guest_shut & SHUTDOWN_SEND != 0 {
            // All of it is in the file, which is what this answer says.
            return connection.shut_by_host(SHUTDOWN_BOTH);
        }
        if let Err(error) = connection.pass_shutdown() {
            self.warn(format_args!("a socket cannot be shut down: {error}"));
            self.reset(key);
        }
    }

    fn on_data(&mut self, key: Key, packet: &mut Packet<'_, '_>) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        let length = packet.header.len as usize;
        let over = connection.out.len() + length > connection.credit.alloc() as usize;
        if over || connection.guest_shut & SHUTDOWN_SEND != 0 {
            self.malformed(format_args!("a connection was reset: the guest sent more than it may"));
            return self.reset(key);
        }
        self.metrics.from_guest.add(u64::from(packet.header.len));
        if let Some(sink) = connection.sink.as_ref().filter(|_| connection.may_write()) {
            let result = sink.append(&mut packet.payload, length);
            connection.credit.forwarded(length);
            if let Err(error) = result {
                connection.shut_by_host(SHUTDOWN_BOTH);
                self.warn(format_args!("what the guest sends cannot be buffered: {error}"));
            }
            return;
        }
        let mut written = 0;
        if connection.out.is_empty()
            && let Some(socket) = connection.socket.as_ref().filter(|_| connection.may_write())
        {
            let mut socket = socket;
            let (count, error) = transfer(&mut packet.payload, length, |slice| {
                WriteVolatile::write_volatile(&mut socket, slice)
            });
            written = count;
            connection.credit.forwarded(count);
            if error.is_some_and(|error| error.kind() != std::io::ErrorKind::WouldBlock) {
                connection.shut_by_host(SHUTDOWN_RECEIVE);
            }
        }
        if connection.may_write() {
            reserve(connection, length - written);
            transfer(&mut packet.payload, length - written, |slice| {
                Ok(append(connection, slice))
            });
        } else {
            // Nobody reads it.
            connection.credit.forwarded(length - written);
        }
    }
}

/// Makes room for `count` more bytes: in steps that double, but never for more than what the connection was promised.
fn reserve(connection: &mut Connection, count: usize) {
    let needed = connection.out.len() + count;
    if needed > connection.out.capacity() {
        let wanted = needed.next_power_of_two().min(connection.credit.alloc() as usize);
        connection.out.reserve_exact(wanted - connection.out.len());
    }
}

/// Copies a piece of guest memory to the end of the connection's buffer.
fn append(connection: &mut Connection, slice: &VolatileSlice<'_>) -> usize {
    let mut bounce = [0_u8; 4096];
    let mut done = 0;
    while let Ok(rest) = slice.offset(done)
        && !rest.is_empty()
    {
        let count = rest.copy_to(&mut bounce);
        connection.out.extend(&bounce[..count]);
        done += count;
    }
    done
}
