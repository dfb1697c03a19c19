//! The two ends of the way of one client thread's calls, whatever that way is.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use wire::ring::Record;

use crate::connection::Control;
use crate::ring_end::{Position, RingEnd};
use crate::stream_end::StreamEnd;
use crate::{Error, Protocol, Transport};

/// What an end has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Records put.
    pub sent: u64,
    /// Records taken.
    pub received: u64,
    /// Times that the other side was woken: a system call each; of a stream, calls that wrote.
    pub bells: u64,
    /// Times that this side slept; of a stream, calls that read.
    pub sleeps: u64,
    /// Times that a server's thread went after its client to another CPU.
    pub moves: u64,
}

/// A way.
#[derive(Debug)]
pub(crate) enum Way {
    Ring(Box<RingEnd>),
    Stream(Box<StreamEnd>),
}

impl Way {
    fn send(&mut self, record: &Record, most: Duration) -> Result<u64, Error> {
        match self {
            Self::Ring(end) => end.send(record, most),
            Self::Stream(end) => end.send(record, most),
        }
    }

    /// The same, for a record that a flush follows soon.
    fn put(&mut self, record: &Record, most: Duration) -> Result<u64, Error> {
        match self {
            Self::Ring(end) => end.put(record, most),
            Self::Stream(end) => end.send(record, most),
        }
    }

    fn flush(&mut self, most: Duration) -> Result<(), Error> {
        match self {
            Self::Ring(end) => end.flush(),
            Self::Stream(end) => end.flush(Some(most)),
        }
    }

    fn receive(&mut self, most: Option<Duration>) -> Result<Record, Error> {
        match self {
            Self::Ring(end) => end.receive(most),
            Self::Stream(end) => end.receive(most),
        }
    }

    /// Of a stream; rings have one memory.
    fn stream(&mut self) -> Option<&mut StreamEnd> {
        match self {
            Self::Ring(_) => None,
            Self::Stream(end) => Some(end),
        }
    }

    fn counters(&self) -> Counters {
        match self {
            Self::Ring(end) => end.counters,
            Self::Stream(end) => end.counters,
        }
    }
}

/// The end of a client's thread. It may go from thread to thread; one uses it at a time.
///
/// After an error that is no [`Error::Deadline`] every later call ends in one, too: the connection is over. An answer that comes after
/// its call's deadline is dropped by the next call; but after a deadline with data under way, announced or asked for, a stream is over.
#[derive(Debug)]
pub struct ClientEnd {
    way: Way,
    transport: Transport,
    /// Calls that were given up, whose answers may still come.
    given_up: u32,
    /// Answers that were waited for at once ([`Transport::Synchronous`]), and that nobody has asked for yet.
    kept: VecDeque<Record>,
    /// Of streams: what is hung up with the last end. An end of rings has it as its peer.
    _control: Option<Arc<Control>>,
}

impl ClientEnd {
    pub(crate) fn new(way: Way, transport: Transport) -> Self {
        Self {
            way,
            transport,
            given_up: 0,
            kept: VecDeque::new(),
            _control: None,
        }
    }

    /// With what is to stay open as long as this is there.
    pub(crate) fn keeping(self, control: &Arc<Control>) -> Self {
        Self {
            _control: Some(Arc::clone(control)),
            ..self
        }
    }

    /// Puts a record that has no answer, and tells its number. In a ring it is there at once, and a server that sleeps is woken for it when
    /// it has asked to be ([`ServerEnd::coalesce`]); on a stream it goes with others: at the 32nd, when another one is put 50 us after the
    /// first, and before any answer is waited for. Where the ring is full this waits for space.
    ///
    /// # Errors
    /// Each of [`Error`]'s.
    pub fn send(&mut self, record: &Record, most: Duration) -> Result<u64, Error> {
        match self.transport {
            Transport::Synchronous => {
                let (number, answer) = self.exchange(record, most)?;
                self.keep(answer);
                Ok(number)
            }
            _ => self.way.send(record, most),
        }
    }

    /// The same of a record that has an answer, which [`Self::receive`] takes, and that has the server write bytes of the arena, which
    /// [`Self::take_data`] takes behind it: they come with the answer.
    ///
    /// # Errors
    /// Each of [`Error`]'s.
    pub fn send_and_want(
        &mut self,
        record: &Record,
        (offset, length): (u64, u64),
        most: Duration,
    ) -> Result<u64, Error> {
        if self.transport != Transport::Synchronous {
            let number = self.way.send(record, most)?;
            self.want_data(offset, length);
            return Ok(number);
        }
        let number = self.way.put(record, most)?;
        self.want_data(offset, length);
        let answer = self.answer_to(number, most)?;
        self.keep(answer);
        Ok(number)
    }

    /// An answer that was waited for at once is there for who asks for it; zeroes are none.
    fn keep(&mut self, answer: Record) {
        if answer.with_sequence(0) != Record::default() {
            self.kept.push_back(answer);
        }
    }

    /// Lets all that was put go.
    ///
    /// # Errors
    /// Each of [`Error`]'s.
    pub fn flush(&mut self, most: Duration) -> Result<(), Error> {
        self.way.flush(most)
    }

    /// Puts a record, and waits for its answer. `most` is for either, space and answer.
    ///
    /// # Errors
    /// Each of [`Error`]'s; [`Protocol::Answer`] if what comes is the answer to something else.
    pub fn call(&mut self, record: &Record, most: Duration) -> Result<Record, Error> {
        self.exchange(record, most).map(|(_, answer)| answer)
    }

    fn exchange(&mut self, record: &Record, most: Duration) -> Result<(u64, Record), Error> {
        let expected = self.way.put(record, most)?;
        Ok((expected, self.answer_to(expected, most)?))
    }

    fn answer_to(&mut self, expected: u64, most: Duration) -> Result<Record, Error> {
        loop {
            // What was put goes before an answer is waited for.
            let answer = self.way.receive(Some(most)).inspect_err(|error| {
                if matches!(error, Error::Deadline { .. }) {
                    self.given_up += 1;
                }
            })?;
            match answer.sequence() {
                got if got == expected => return Ok(answer),
                // Each that was given up has one answer, so this ends.
                got if got < expected && self.given_up > 0 => self.given_up -= 1,
                got => return Err(Protocol::Answer { expected, got }.into()),
            }
        }
    }

    /// The next record from the server, whatever it answers.
    ///
    /// # Errors
    /// Each of [`Error`]'s.
    pub fn receive(&mut self, most: Duration) -> Result<Record, Error> {
        match self.kept.pop_front() {
            Some(answer) => Ok(answer),
            None => self.way.receive(Some(most)),
        }
    }

    /// Puts bytes of the arena before the next record, where the server has a copy of its own.
    ///
    /// # Errors
    /// Each of [`Error`]'s; the bytes are not in the arena.
    pub fn send_data(&mut self, offset: u64, length: u64, most: Duration) -> Result<(), Error> {
        match self.way.stream() {
            Some(end) => end.send_data(offset, length, most),
            None => Ok(()),
        }
    }

    /// Asks for bytes of the server's copy, as they are once all that was put is done. [`Self::take_data`] waits for them: after the answers
    /// to what was put before this, before anything else is put.
    pub fn want_data(&mut self, offset: u64, length: u64) {
        if let Some(end) = self.way.stream() {
            end.want(offset, length);
        }
    }

    /// Waits for bytes that were asked for: then they are in the arena. Nothing is to be done where there is one memory.
    ///
    /// # Errors
    /// Each of [`Error`]'s.
    pub fn take_data(&mut self, offset: u64, length: u64, most: Duration) -> Result<(), Error> {
        match self.way.stream() {
            Some(end) => end.take_data(offset, length, most),
            None => Ok(()),
        }
    }

    /// How its records travel.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// What it has done.
    pub fn counters(&self) -> Counters {
        self.way.counters()
    }
}

/// The end of a server's thread, which stays that thread's: with [`Transport::SameCpu`] it moves the thread to its client's CPU.
#[derive(Debug)]
pub struct ServerEnd {
    pub(crate) way: Way,
    pub(crate) transport: Transport,
}

impl ServerEnd {
    /// How long records of a ring that nobody waits for may be left there, so that several are taken together: 50 us if nobody says another
    /// time; if it is zero, each is taken at once, and without one, half of a ring's may be left for some milliseconds. What a client
    /// waits for is taken at once.
    pub fn coalesce(&mut self, most: Option<Duration>) {
        if let Way::Ring(end) = &mut self.way {
            end.leave_records(most);
        }
    }

    /// The next request; `None` waits for ever. Answers that were put go before.
    ///
    /// # Errors
    /// Each of [`Error`]'s. After one that is no [`Error::Deadline`] the connection is over.
    pub fn receive(&mut self, most: Option<Duration>) -> Result<Record, Error> {
        self.way.receive(most)
    }

    /// A request is done: its answer, if it has one, gets its number, and goes when the next request is waited for. Where each record is
    /// answered ([`Transport::Synchronous`]), zeroes answer one that has none.
    ///
    /// # Errors
    /// Each of [`Error`]'s; a client that does not take its answers for `most` is an [`Error::Deadline`].
    pub fn finish(&mut self, request: &Record, answer: Option<&Record>, most: Duration) -> Result<(), Error> {
        let answer = match (answer, self.transport) {
            (Some(answer), _) => *answer,
            (None, Transport::Synchronous) => Record::default(),
            (None, _) => return Ok(()),
        };
        self.way.put(&answer.with_sequence(request.sequence()), most).map(drop)
    }

    /// Puts bytes of the arena before the next answer, where the client has a copy of its own.
    ///
    /// # Errors
    /// Each of [`Error`]'s; the bytes are not in the arena.
    pub fn send_data(&mut self, offset: u64, length: u64, most: Duration) -> Result<(), Error> {
        match self.way.stream() {
            Some(end) => end.send_data(offset, length, most),
            None => Ok(()),
        }
    }

    /// Lets all answers go now.
    ///
    /// # Errors
    /// Each of [`Error`]'s.
    pub fn flush(&mut self, most: Duration) -> Result<(), Error> {
        self.way.flush(most)
    }

    /// Where it is in its rings, after [`ServerEnd::flush`]; nothing if it has none. Another end goes on from there.
    #[must_use]
    pub fn position(&self) -> Option<Position> {
        match &self.way {
            Way::Ring(ring) => Some(ring.position()),
            Way::Stream(_) => None,
        }
    }

    /// How its records travel.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// What it has done.
    pub fn counters(&self) -> Counters {
        self.way.counters()
    }
}
