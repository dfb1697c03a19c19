//! What the worker owns between activations: the host's sockets, the connections, and what follows from their state.
//!
//! `from_guest.rs`, `to_guest.rs` and `host.rs` are the three sides from which it is driven. A connection is changed
//! there and settled here: [`Switch::settle`] is the one place that ends, enqueues and watches connections.

use std::fmt;
use std::time::{Duration, Instant};

use base::Epoll;
use observe::LogLimit;

use crate::connection::{Due, Stage};
use crate::host::Host;
use crate::metrics::Metrics;
use crate::packet::{HOST_CID, SHUTDOWN_BOTH, TYPE_STREAM};
use crate::resets::{Reset, Resets};
use crate::table::{Key, Table};

/// How long whoever connects may take to say where to, and the guest to answer a request.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// How long a host may take none of the last bytes of a connection that the guest has closed. Long enough for a person
/// who has stopped at a screenful; not for ever, as the bytes take room and the connection one of so many places.
pub(crate) const DRAIN_PATIENCE: Duration = Duration::from_secs(300);

/// All connections of one guest.
#[derive(Debug)]
pub(crate) struct Switch {
    /// The guest's context id.
    pub(crate) cid: u64,
    pub(crate) epoll: Epoll,
    pub(crate) host: Host,
    pub(crate) table: Table,
    pub(crate) resets: Resets,
    pub(crate) metrics: Metrics,
    log_limit: LogLimit,
}

impl Switch {
    /// A switch without connections.
    ///
    /// # Errors
    /// No epoll set could be had.
    pub(crate) fn new(cid: u32, host: Host, metrics: Metrics) -> std::io::Result<Self> {
        let epoll = Epoll::new()?;
        host.watch(&epoll)?;
        Ok(Self {
            cid: u64::from(cid),
            epoll,
            host,
            table: Table::default(),
            resets: Resets::default(),
            metrics,
            log_limit: LogLimit::new(5),
        })
    }

    /// Draws the consequences of a change to a connection.
    pub(crate) fn settle(&mut self, key: Key) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        let flushed = connection.out.is_empty();
        match connection.stage {
            Stage::Draining if flushed || !connection.may_write() => {
                self.table.remove(key);
                return;
            }
            // 5.10.6.5: a peer that has shut both directions down is answered with RST once all is delivered.
            Stage::Established if flushed && connection.guest_shut == SHUTDOWN_BOTH => return self.reset(key),
            Stage::Established if connection.credit.is_news() => connection.due.insert(Due::CREDIT_UPDATE),
            _ => (),
        }
        if connection.readable && connection.may_read() && connection.credit.ask() {
            connection.due.insert(Due::CREDIT_REQUEST);
        }
        if !connection.due.is_empty() || connection.has_data() {
            // Watched as before until it leaves the round: most sockets are empty by then.
            self.table.enqueue(key);
        } else {
            self.watch(key);
        }
    }

    /// Makes the epoll set wait for what the connection can use.
    pub(crate) fn watch(&mut self, key: Key) {
        let Some(connection) = self.table.get_mut(key) else {
            return;
        };
        let wanted = connection.interest();
        let Some(socket) = connection.socket.as_ref().filter(|_| wanted != connection.watched) else {
            return;
        };
        let result = match (connection.watched, wanted) {
            (None, Some(interest)) => self.epoll.add(socket, key.token(), interest),
            (Some(_), Some(interest)) => self.epoll.modify(socket, key.token(), interest),
            (Some(_), None) => self.epoll.remove(socket),
            (None, None) => Ok(()),
        };
        connection.watched = wanted;
        if let Err(error) = result {
            self.warn(format_args!("a socket cannot be waited for: {error}"));
            self.reset(key);
        }
    }

    /// Ends a connection at once; the guest is told if it has heard of it.
    pub(crate) fn reset(&mut self, key: Key) {
        let Some(connection) = self.table.remove(key) else {
            return;
        };
        let known = match connection.stage {
            Stage::Greeting(_) | Stage::Draining => false,
            Stage::Requesting => !connection.due.contains(Due::REQUEST),
            Stage::Established => true,
        };
        if matches!(connection.stage, Stage::Greeting(_) | Stage::Requesting) {
            self.metrics.refused.increment();
        }
        if known {
            self.resets.push(Reset {
                cid: HOST_CID,
                host_port: connection.ports.host,
                guest_port: connection.ports.guest,
                kind: TYPE_STREAM,
            });
        }
    }

    /// The driver has reset the device: the guest knows of no connection any more. Those that it has never heard of
    /// stay, and what it had finished sending still reaches the host.
    pub(crate) fn driver_reset(&mut self) {
        for key in self.table.keys() {
            let keep = self
                .table
                .get_mut(key)
                .is_some_and(|connection| match connection.stage {
                    Stage::Greeting(_) | Stage::Draining => true,
                    Stage::Requesting => connection.due.contains(Due::REQUEST),
                    Stage::Established => false,
                });
            if !keep {
                self.table.remove(key);
            }
        }
        self.resets.clear();
    }

    /// Work goes on after a pause of unknown length: whoever has a deadline gets all of it again.
    pub(crate) fn resume(&mut self, now: Instant) {
        for key in self.table.keys() {
            let Some(connection) = self.table.get_mut(key) else {
                continue;
            };
            if connection.deadline.is_some() {
                let patience = match connection.stage {
                    Stage::Draining => DRAIN_PATIENCE,
                    _ => PATIENCE,
                };
                self.table.set_deadline(key, Some(now + patience));
            }
        }
    }

    /// How long to wait at most until [`Switch::expire`] has something to do.
    pub(crate) fn timeout(&self, now: Instant) -> Option<Duration> {
        let deadline = self.table.next_deadline().map(|(deadline, _)| deadline);
        let next = deadline.into_iter().chain(self.host.resting_until()).min();
        next.map(|next| next.saturating_duration_since(now))
    }

    /// Ends what has waited for too long.
    pub(crate) fn expire(&mut self, now: Instant) {
        while let Some((deadline, key)) = self.table.next_deadline()
            && deadline <= now
        {
            self.warn(format_args!("a connection was given up: it waited for too long"));
            self.reset(key);
        }
        self.host.wake(&self.epoll, now);
    }

    /// Logs what the guest or a peer can cause, a few times a second at most.
    pub(crate) fn warn(&self, what: fmt::Arguments<'_>) {
        if self.log_limit.allow() {
            log::warn!("vsock {}: {what}", self.cid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

    use crate::connection::Connection;

    use base::Ready;
    use observe::Registry;

    fn wait(switch: &Switch) -> Vec<Ready> {
        let mut ready = Vec::new();
        switch.epoll.wait(&mut ready, None).unwrap();
        ready
    }

    #[test]
    fn whoever_says_nothing_is_given_up_in_time() {
        let name = format!("basalt-vsock-switch-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let metrics = Metrics::register(&Registry::new(), "v");
        let mut switch = Switch::new(3, Host::new(Some(listener.into()), None), metrics).unwrap();
        let began = Instant::now();
        assert_eq!(switch.timeout(began), None);

        let mut silent = UnixStream::connect_addr(&address).unwrap();
        wait(&switch);
        switch.on_listener(began);
        assert_eq!(switch.timeout(began), Some(PATIENCE));
        let mut unanswered = UnixStream::connect_addr(&address).unwrap();
        let later = began + PATIENCE / 2;
        wait(&switch);
        switch.on_listener(later);
        unanswered.write_all(b"CONNECT 5\n").unwrap();
        for event in wait(&switch) {
            switch.on_socket(event, later);
        }

        switch.expire(began + PATIENCE);
        assert_eq!(silent.read(&mut [0]).unwrap(), 0);
        assert_eq!(switch.timeout(began + PATIENCE), Some(PATIENCE / 2));
        // A pause gives all of the time again.
        switch.resume(began + PATIENCE);
        switch.expire(began + PATIENCE + PATIENCE / 2);
        assert!(switch.timeout(began).is_some());
        switch.expire(began + 2 * PATIENCE);
        assert_eq!(unanswered.read(&mut [0]).unwrap(), 0);
        assert_eq!(switch.metrics.refused.value(), 2);
        assert!(switch.resets.first().is_none(), "the guest has not heard of either");
    }

    /// A connection that the guest has closed, with `held` bytes that the host does not take, and the host's end.
    fn closed_by_the_guest(switch: &mut Switch, held: usize) -> (Key, UnixStream) {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        while ours.write(&[1; 4096]).is_ok() {}
        let mut connection = Connection::new(Stage::Established, Some(ours.into()));
        connection.guest_shut = SHUTDOWN_BOTH;
        connection.out.extend(vec![2; held]);
        let key = switch.table.insert(connection).unwrap();
        switch.on_rst(key);
        (key, theirs)
    }

    #[test]
    fn last_bytes_that_nobody_takes_are_given_up_in_time() {
        let metrics = Metrics::register(&Registry::new(), "v");
        let mut switch = Switch::new(3, Host::new(None, None), metrics).unwrap();
        let (key, mut host) = closed_by_the_guest(&mut switch, 200_000);
        let began = Instant::now();
        let left = switch.timeout(began).expect("it has a deadline");
        assert!(left <= DRAIN_PATIENCE && left + PATIENCE > DRAIN_PATIENCE, "{left:?}");

        // What is taken puts the end off.
        host.read_exact(&mut [0; 100_000]).unwrap();
        let later = began + DRAIN_PATIENCE / 2;
        let writable = base::Ready {
            token: key.token(),
            readable: false,
            writable: true,
            hangup: false,
        };
        switch.on_socket(writable, later);
        assert_eq!(switch.timeout(later), Some(DRAIN_PATIENCE));
        // That nothing is taken does not.
        switch.on_socket(writable, later + PATIENCE);
        switch.expire(later + DRAIN_PATIENCE - PATIENCE);
        assert!(switch.table.get_mut(key).is_some());
        switch.resume(later + PATIENCE);
        assert_eq!(
            switch.timeout(later + PATIENCE),
            Some(DRAIN_PATIENCE),
            "a pause is not the host's fault"
        );
        switch.expire(later + PATIENCE + DRAIN_PATIENCE);
        assert!(switch.table.get_mut(key).is_none());
        let mut rest = Vec::new();
        host.read_to_end(&mut rest).unwrap();
        assert!(rest.ends_with(&[2]), "some of it had arrived");
        assert!(switch.resets.first().is_none(), "the guest has forgotten it");
    }
}
