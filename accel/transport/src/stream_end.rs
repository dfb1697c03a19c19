//! One side of a stream of records. Knows nothing of calls.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags};
use wire::ring::{RECORD_LEN, Record, Sequence};

use crate::end::Counters;
use crate::ring_end::BATCH;
use crate::{Error, Protocol};

/// How long one system call waits: between two of them the deadline is looked at.
const CALL: Duration = Duration::from_millis(40);

/// One side.
#[derive(Debug)]
pub(crate) struct StreamEnd {
    socket: OwnedFd,
    /// Whose the numbers of what goes out are; those of what comes in are the other's.
    sequence: Sequence,
    outgoing: Vec<u8>,
    incoming: Box<[u8; 64 * RECORD_LEN]>,
    /// What of `incoming` is there, and was taken.
    filled: usize,
    taken: usize,
    sent: u64,
    received: u64,
    pub(crate) counters: Counters,
}

impl StreamEnd {
    pub(crate) fn new(socket: OwnedFd, sequence: Sequence) -> Result<Self, Error> {
        for timeout in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, timeout, Some(CALL)).map_err(Error::io("set a socket's timeout"))?;
        }
        Ok(Self {
            socket,
            sequence,
            outgoing: Vec::new(),
            incoming: Box::new([0; 64 * RECORD_LEN]),
            filled: 0,
            taken: 0,
            sent: 0,
            received: 0,
            counters: Counters::default(),
        })
    }

    /// Puts a record, and tells its number.
    pub(crate) fn send(&mut self, record: &Record, most: Duration) -> Result<u64, Error> {
        let number = match self.sequence {
            Sequence::Stamped => self.sent,
            Sequence::Callers => record.sequence(),
        };
        self.outgoing
            .extend_from_slice(&record.with_sequence(number).to_bytes());
        self.sent += 1;
        self.counters.sent += 1;
        if self.outgoing.len() as u64 >= BATCH * RECORD_LEN as u64 {
            self.flush(Some(most))?;
        }
        Ok(number)
    }

    /// Lets all that was put go.
    pub(crate) fn flush(&mut self, most: Option<Duration>) -> Result<(), Error> {
        let mut begun = None;
        while !self.outgoing.is_empty() {
            match rustix::net::send(&self.socket, &self.outgoing, SendFlags::NOSIGNAL) {
                Ok(sent) => drop(self.outgoing.drain(..sent)),
                Err(Errno::INTR) => (),
                Err(Errno::AGAIN) => check(&mut begun, most, "space in a socket")?,
                Err(error) => return Err(ended(error)),
            }
            self.counters.bells += 1;
        }
        Ok(())
    }

    /// The next record; what was put goes before it is waited for.
    pub(crate) fn receive(&mut self, most: Option<Duration>) -> Result<Record, Error> {
        self.flush(most)?;
        let mut begun = None;
        loop {
            if let Some(record) = self.buffered()? {
                return Ok(record);
            }
            let free = self.incoming.get_mut(self.filled..).unwrap_or_default();
            match rustix::net::recv(&self.socket, free, RecvFlags::empty()) {
                Ok((0, _)) => return Err(Error::PeerGone),
                Ok((got, _)) => self.filled += got,
                Err(Errno::INTR) => (),
                Err(Errno::AGAIN) => check(&mut begun, most, "a record")?,
                Err(error) => return Err(ended(error)),
            }
            self.counters.sleeps += 1;
        }
    }

    /// The next record of those that have come whole.
    fn buffered(&mut self) -> Result<Option<Record>, Error> {
        let bytes = self.incoming.get(self.taken..self.filled).unwrap_or_default();
        let Some(bytes) = bytes.first_chunk::<RECORD_LEN>() else {
            // What is there of a record goes to the front, so that there is room for the rest.
            self.incoming.copy_within(self.taken..self.filled, 0);
            (self.filled, self.taken) = (self.filled - self.taken, 0);
            return Ok(None);
        };
        let record = Record::from_bytes(bytes);
        let (expected, got) = (self.received, record.sequence());
        // The other side stamps where this one does not.
        if self.sequence == Sequence::Callers && expected != got {
            return Err(Protocol::Sequence { expected, got }.into());
        }
        self.taken += RECORD_LEN;
        self.received += 1;
        self.counters.received += 1;
        Ok(Some(record))
    }
}

/// Whether there is time left.
fn check(begun: &mut Option<Instant>, most: Option<Duration>, what: &'static str) -> Result<(), Error> {
    let Some(most) = most else { return Ok(()) };
    // One call has waited before the clock was asked for the first time.
    let waited = begun.get_or_insert_with(Instant::now).elapsed() + CALL;
    match waited < most {
        true => Ok(()),
        false => Err(Error::Deadline { what, waited }),
    }
}

/// An error of a socket that was connected.
fn ended(error: Errno) -> Error {
    match error {
        Errno::PIPE | Errno::CONNRESET => Error::PeerGone,
        other => Error::io("use a stream socket")(other),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A server's end, and the socket of a client that writes what it likes.
    fn ends() -> (StreamEnd, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        (StreamEnd::new(near.into(), Sequence::Callers).unwrap(), far)
    }

    #[test]
    fn records_come_whole_in_whatever_pieces_they_are_sent() {
        let (mut end, mut client) = ends();
        let records: Vec<Record> = (0..200)
            .map(|number| Record::from_words([7; 8]).with_sequence(number))
            .collect();
        let bytes: Vec<u8> = records.iter().flat_map(Record::to_bytes).collect();
        let writing = std::thread::spawn(move || {
            // Sixty-one divides neither a record nor the buffer.
            bytes.chunks(61).for_each(|piece| client.write_all(piece).unwrap());
            client.write_all(&[1; 63]).unwrap();
        });
        for record in records {
            assert_eq!(end.receive(None).unwrap(), record);
        }
        writing.join().unwrap();
        assert!(
            matches!(end.receive(None), Err(Error::PeerGone)),
            "the last one is not whole"
        );
    }

    #[test]
    fn a_number_out_of_order_is_named() {
        let (mut end, mut client) = ends();
        client
            .write_all(&Record::default().with_sequence(5).to_bytes())
            .unwrap();
        let error = end.receive(None).unwrap_err();
        assert!(
            matches!(error, Error::Protocol(Protocol::Sequence { expected: 0, got: 5 })),
            "{error}"
        );
    }

    #[test]
    fn nothing_is_waited_for_longer_than_asked() {
        let (mut end, _client) = ends();
        let begun = Instant::now();
        let error = end.receive(Some(CALL)).unwrap_err();
        assert!(matches!(error, Error::Deadline { what: "a record", .. }), "{error}");
        assert!(begun.elapsed() >= CALL && begun.elapsed() < Duration::from_secs(20));
    }
}
