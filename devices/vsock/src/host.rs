//! The host's side: who connects to the listener, what is handed to the acceptor, and what happens on sockets.
//!
//! The sockets belong to the node; what it does with them is unknown here.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{Epoll, Interest, Ready};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use wire::packet::{PacketError, PacketSocket};

use crate::connection::{Connection, Due, Flow, Greeting, Line, Stage};
use crate::packet::{SHUTDOWN_BOTH, SHUTDOWN_RECEIVE};
use crate::sink::Sink;
use crate::switch::{DRAIN_PATIENCE, PATIENCE, Switch};
use crate::table::{Key, Ports};
use crate::worker::LISTENER;

/// Ports given to the host's ends of connections into the guest: the second quarter, where nobody listens.
pub(crate) const FIRST_PORT: u32 = 1 << 30;

/// The last of them.
const LAST_PORT: u32 = (1 << 31) - 1;

/// How long the listener rests when the process has no descriptors left.
const REST: Duration = Duration::from_millis(100);

/// The most connections accepted at once; the others' turn comes in between.
const ACCEPT_BATCH: usize = 64;

/// The two ways between the host's programs and the guest.
#[derive(Debug)]
pub(crate) struct Host {
    listener: Option<OwnedFd>,
    acceptor: Option<PacketSocket>,
    sinks: Vec<Arc<Sink>>,
    next_port: u32,
    resting_until: Option<Instant>,
}

impl Host {
    /// Out of the two sockets, either of which may be missing; both do not block.
    pub(crate) fn new(listener: Option<OwnedFd>, acceptor: Option<PacketSocket>) -> Self {
        Self {
            listener,
            acceptor,
            sinks: Vec::new(),
            next_port: FIRST_PORT,
            resting_until: None,
        }
    }

    /// The port that the next connection into the guest gets.
    pub(crate) fn next_port(&self) -> u32 {
        self.next_port
    }

    /// Goes on where another device was; false if that is no port for the host's ends.
    pub(crate) fn set_next_port(&mut self, port: u32) -> bool {
        let good = (FIRST_PORT..=LAST_PORT).contains(&port);
        if good {
            self.next_port = port;
        }
        good
    }

    /// Also answers at these ports.
    pub(crate) fn with_sinks(mut self, sinks: Vec<Arc<Sink>>) -> Self {
        self.sinks = sinks;
        self
    }

    /// Waits for connections to the listener.
    pub(crate) fn watch(&self, epoll: &Epoll) -> std::io::Result<()> {
        match &self.listener {
            Some(listener) => epoll.add(listener, LISTENER, Interest::READ),
            None => Ok(()),
        }
    }

    /// When the listener has rested.
    pub(crate) fn resting_until(&self) -> Option<Instant> {
        self.resting_until
    }

    /// Waits for connections again, if the rest is over.
    pub(crate) fn wake(&mut self, epoll: &Epoll, now: Instant) {
        if self.resting_until.is_some_and(|until| until <= now) {
            self.resting_until = None;
            if let Err(error) = self.watch(epoll) {
                log::error!("no connection into the guest is accepted any more: {error}");
            }
        }
    }

    /// Hands a new connection to `port` to the acceptor and tells our end of it.
    fn hand_over(&mut self, port: u32) -> Result<OwnedFd, PacketError> {
        let Some(acceptor) = &self.acceptor else {
            return Err(PacketError::Closed);
        };
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // Only ours: what the acceptor gets behaves like any accepted socket.
        rustix::io::ioctl_fionbio(&ours, true)?;
        match acceptor.send(&port.to_le_bytes(), &[theirs.as_fd()]) {
            Ok(()) => Ok(ours),
            Err(error) => {
                if matches!(error, PacketError::Closed) {
                    log::info!("the guest's connections have no acceptor any more");
                    self.acceptor = None;
                }
                Err(error)
            }
        }
    }
}

impl Switch {
    /// Takes who waits at the listener.
    pub(crate) fn on_listener(&mut self, now: Instant) {
        for _ in 0..ACCEPT_BATCH {
            let Some(listener) = &self.host.listener else { return };
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(listener, flags) {
                Ok(socket) => self.on_accepted(socket, now),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => (),
                Err(error) => {
                    self.warn(format_args!("no connection can be accepted just now: {error}"));
                    if let Err(error) = self.epoll.remove(listener) {
                        log::error!("the vsock listener cannot be left alone: {error}");
                    }
                    self.host.resting_until = Some(now + REST);
                    return;
                }
            }
        }
    }

    fn on_accepted(&mut self, socket: OwnedFd, now: Instant) {
        let greeting = Connection::new(Stage::Greeting(Line::default()), Some(socket));
        match self.table.insert(greeting) {
            Some(key) => {
                self.table.set_deadline(key, Some(now + PATIENCE));
                self.settle(key);
            }
            None => {
                self.warn(format_args!("too many connections; one into the guest is refused"));
                self.metrics.refused.increment();
            }
        }
    }

    /// Something happened on a connection's socket.
    pub(crate) fn on_socket(&mut self, event: Ready, now: Instant) {
        let key = Key::from_token(event.token);
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        match &connection.stage {
            Stage::Greeting(_) => return self.on_greeting(key, now),
            Stage::Requesting if event.hangup => return self.reset(key),
            Stage::Requesting => return,
            Stage::Established | Stage::Draining => (),
        }
        if event.writable || event.hangup {
            let before = connection.out.len();
            self.flush(key);
            let draining = |it: &&mut Connection| matches!(it.stage, Stage::Draining) && it.out.len() < before;
            if self.table.get_mut(key).filter(draining).is_some() {
                self.table.set_deadline(key, Some(now + DRAIN_PATIENCE));
            }
        }
        if let Some(connection) = self.table.get_mut(key) {
            if connection.may_read() {
                connection.readable |= event.readable || event.hangup;
            } else if event.hangup {
                connection.shut_by_host(SHUTDOWN_BOTH);
            }
        }
        self.settle(key);
    }

    fn on_greeting(&mut self, key: Key, now: Instant) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        let (Stage::Greeting(line), Some(socket)) = (&mut connection.stage, &connection.socket) else {
            return;
        };
        match line.read(socket) {
            Greeting::Partial => (),
            Greeting::Bad => {
                self.warn(format_args!(
                    "a connection was closed: its first line was not `CONNECT <port>`"
                ));
                self.reset(key);
            }
            Greeting::Port(guest) => {
                connection.stage = Stage::Requesting;
                connection.due.insert(Due::REQUEST);
                let host = self.fresh_port(guest);
                self.table.bind(key, Ports { guest, host });
                self.table.set_deadline(key, Some(now + PATIENCE));
                // Leaves the round as late as the packet does, but a hang-up counts from now on.
                self.watch(key);
                self.settle(key);
            }
        }
    }

    /// A port of the host's that has no connection with `guest`. There are a million times as many as connections.
    fn fresh_port(&mut self, guest: u32) -> u32 {
        loop {
            let host = self.host.next_port;
            self.host.next_port = if host == LAST_PORT { FIRST_PORT } else { host + 1 };
            if self.table.find(Ports { guest, host }).is_none() {
                return host;
            }
        }
    }

    /// The guest wants to connect: to a file, or to somebody on the host, who now has the other end.
    pub(crate) fn open_to_host(&mut self, port: u32) -> Option<Connection> {
        if self.table.is_full() {
            self.warn(format_args!(
                "too many connections; the guest's to port {port} is refused"
            ));
            return None;
        }
        if let Some(sink) = self.host.sinks.iter().find(|sink| sink.port() == port) {
            let mut connection = Connection::new(Stage::Established, None);
            connection.sink = Some(Arc::clone(sink));
            return Some(connection);
        }
        match self.host.hand_over(port) {
            Ok(socket) => Some(Connection::new(Stage::Established, Some(socket))),
            Err(error) => {
                self.warn(format_args!(
                    "the guest's connection to port {port} is refused: {error}"
                ));
                None
            }
        }
    }

    /// Writes what has waited for the host, and passes on that it was the last.
    pub(crate) fn flush(&mut self, key: Key) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        let result = match connection.flush() {
            Flow::Done => connection.pass_shutdown(),
            Flow::Blocked => Ok(()),
            Flow::Broken => {
                connection.shut_by_host(SHUTDOWN_RECEIVE);
                Ok(())
            }
        };
        if let Err(error) = result {
            self.warn(format_args!("a socket cannot be shut down: {error}"));
            self.reset(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ports_of_the_hosts_ends_are_taken_over() {
        let mut host = Host::new(None, None);
        for good in [FIRST_PORT + 1, LAST_PORT, FIRST_PORT] {
            assert!(host.set_next_port(good) && host.next_port() == good);
        }
        for bad in [0, FIRST_PORT - 1, LAST_PORT + 1, u32::MAX] {
            assert!(!host.set_next_port(bad) && host.next_port() == FIRST_PORT);
        }
    }
}
