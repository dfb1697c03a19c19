//! One side of a stream: records, and bytes of the arena, of which each side has a copy of its own. Knows nothing of calls.
//!
//! What travels is 64 bytes at a time: records, and, with the highest bit of the second word set, what is said of the arena:
//!
//! | first word | third, fourth word | |
//! |---|---|---|
//! | 1 | offset, length | so many bytes of the arena come behind it |
//! | 2 | offset, length | a client wants these bytes, as they are once all before it is done |
//!
//! A client lets bytes go before the record that they are for, and asks for what the server has written. Both sides look at offset and
//! length before they touch memory, so no stream makes a side have more than its copy of the arena and two buffers.

use std::io;
use std::time::{Duration, Instant};

use accel_window::Window;
use wire::ring::{RECORD_LEN, Record, SEQUENCE_LIMIT, Sequence};

use crate::channel::{CALL, Channel};
use crate::end::Counters;
use crate::ring_end::BATCH;
use crate::{Error, Protocol};

/// Bytes of the arena follow.
const DATA: u64 = 1;
/// Bytes of the arena are wanted.
const WANTED: u64 = 2;

/// How much of the arena is copied at a time, and as much as is taken of the socket at a time.
const CHUNK: usize = 128 << 10;
/// What waits to go is no more: bytes, what says which they are, and a record.
const OUTGOING: usize = CHUNK + 2 * RECORD_LEN;

/// How long a client may leave bytes in the socket that it has asked for.
const PATIENCE: Duration = Duration::from_secs(10);

/// A part of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    offset: u64,
    length: u64,
}

/// One side.
#[derive(Debug)]
pub(crate) struct StreamEnd {
    channel: Channel,
    /// Whose the numbers of what goes out are; those of what comes in are the other's.
    sequence: Sequence,
    /// This side's copy.
    arena: Window,
    outgoing: Vec<u8>,
    incoming: Box<[u8]>,
    /// What of `incoming` is there, and was taken.
    filled: usize,
    taken: usize,
    /// Bytes of the arena that are still to come: all of them, and how many have.
    coming: Option<(Part, u64)>,
    /// The last ones that have come.
    came: Option<Part>,
    /// Bytes of the arena that this side has announced or asked for are on their way.
    has_data_under_way: bool,
    /// A deadline has passed meanwhile: bytes that come later, or the rest of them, would pass for others.
    is_over: bool,
    sent: u64,
    received: u64,
    pub(crate) counters: Counters,
}

impl StreamEnd {
    pub(crate) fn new(channel: Channel, sequence: Sequence, arena: Window) -> Self {
        Self {
            channel,
            sequence,
            arena,
            outgoing: Vec::with_capacity(OUTGOING),
            incoming: vec![0; CHUNK].into(),
            filled: 0,
            taken: 0,
            coming: None,
            came: None,
            has_data_under_way: false,
            is_over: false,
            sent: 0,
            received: 0,
            counters: Counters::default(),
        }
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
        if self.outgoing.len() as u64 >= u64::from(BATCH) * RECORD_LEN as u64 {
            self.flush(Some(most))?;
        }
        Ok(number)
    }

    /// Puts bytes of the arena, so that the other side's copy has them when it takes the next record.
    pub(crate) fn send_data(&mut self, offset: u64, length: u64, most: Duration) -> Result<(), Error> {
        if length == 0 {
            return Ok(());
        }
        let part = self.arena.slice(offset, length)?;
        let had = std::mem::replace(&mut self.has_data_under_way, true);
        self.say(DATA, Part { offset, length });
        let mut at = 0;
        while at < length {
            let step = (length - at).min(CHUNK as u64);
            // No more than a chunk.
            let more = usize::try_from(step).unwrap_or(CHUNK);
            if self.outgoing.len() + more > CHUNK {
                self.flush(Some(most))?;
            }
            let begin = self.outgoing.len();
            self.outgoing.resize(begin + more, 0);
            part.read(at, self.outgoing.get_mut(begin..).unwrap_or_default())?;
            at += step;
            if self.outgoing.len() >= CHUNK {
                self.flush(Some(most))?;
            }
        }
        self.has_data_under_way = had;
        Ok(())
    }

    /// Asks for bytes of the arena, which [`Self::take_data`] waits for.
    pub(crate) fn want(&mut self, offset: u64, length: u64) {
        if length > 0 {
            self.came = None;
            self.has_data_under_way = true;
            self.say(WANTED, Part { offset, length });
        }
    }

    /// Waits for bytes that were asked for.
    pub(crate) fn take_data(&mut self, offset: u64, length: u64, most: Duration) -> Result<(), Error> {
        self.flush(Some(most))?;
        let mut begun = None;
        while length > 0 && self.came != Some(Part { offset, length }) {
            match self.record()? {
                Some(record) => {
                    return Err(Protocol::Answer {
                        expected: self.sent,
                        got: record.sequence(),
                    }
                    .into());
                }
                None if self.came == Some(Part { offset, length }) => (),
                None => self.fill(&mut begun, Some(most), "bytes of a buffer")?,
            }
        }
        self.has_data_under_way = false;
        Ok(())
    }

    fn say(&mut self, what: u64, part: Part) {
        let words = [what, SEQUENCE_LIMIT, part.offset, part.length, 0, 0, 0, 0];
        self.outgoing.extend_from_slice(&Record::from_words(words).to_bytes());
    }

    /// Lets all that was put go.
    pub(crate) fn flush(&mut self, most: Option<Duration>) -> Result<(), Error> {
        if self.is_over {
            return Err(Error::PeerGone);
        }
        let (mut gone, mut begun) = (0, None);
        let outcome = loop {
            let rest = self.outgoing.get(gone..).unwrap_or_default();
            let done = match rest.is_empty() {
                true => self.channel.flush().map(|()| None),
                false => self.channel.send(rest).map(Some),
            };
            match done {
                Ok(None) => break Ok(()),
                Ok(Some(sent)) => {
                    gone += sent;
                    // The time is for a side that takes nothing.
                    begun = None;
                    self.counters.bells += 1;
                }
                Err(error) => {
                    if let Err(error) = again(error).and_then(|call| check(&mut begun, call, most, "space in a socket"))
                    {
                        break Err(error);
                    }
                }
            }
        };
        self.outgoing.drain(..gone);
        self.is_over = outcome.is_err() && self.has_data_under_way;
        outcome
    }

    /// The next record; what was put goes before it is waited for.
    pub(crate) fn receive(&mut self, most: Option<Duration>) -> Result<Record, Error> {
        // What is asked for goes with what was put.
        self.arena_frames()?;
        self.flush(most)?;
        let mut begun = None;
        loop {
            if let Some(record) = self.record()? {
                return Ok(record);
            }
            // Answers to what came before a record that is not whole yet.
            self.flush(most)?;
            self.fill(&mut begun, most, "a record")?;
        }
    }

    /// Takes what has come of the socket; without anything, a moment has passed.
    fn fill(&mut self, begun: &mut Option<Instant>, most: Option<Duration>, what: &'static str) -> Result<(), Error> {
        // What is there of 64 bytes goes to the front, so that there is room for the rest.
        self.incoming.copy_within(self.taken..self.filled, 0);
        (self.filled, self.taken) = (self.filled - self.taken, 0);
        let free = self.incoming.get_mut(self.filled..).unwrap_or_default();
        let got = self.channel.receive(free);
        self.counters.sleeps += 1;
        match got {
            Ok(0) => Err(Error::PeerGone),
            Ok(got) => {
                self.filled += got;
                *begun = None;
                Ok(())
            }
            Err(error) => {
                let outcome = again(error).and_then(|call| check(begun, call, most, what));
                self.is_over = outcome.is_err() && self.has_data_under_way;
                outcome
            }
        }
    }

    /// The next record of those that have come whole.
    fn record(&mut self) -> Result<Option<Record>, Error> {
        self.arena_frames()?;
        let Some(record) = self.next().filter(|_| self.coming.is_none()) else {
            return Ok(None);
        };
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

    /// The next 64 bytes, if they are there; they are not taken.
    fn next(&self) -> Option<Record> {
        let bytes = self.incoming.get(self.taken..self.filled).unwrap_or_default();
        bytes.first_chunk().map(Record::from_bytes)
    }

    /// Does what comes before the next record: bytes go into the arena, and those that are wanted are put.
    fn arena_frames(&mut self) -> Result<(), Error> {
        loop {
            if let Some((part, at)) = self.coming {
                let there = self.incoming.get(self.taken..self.filled).unwrap_or_default();
                let step = usize::try_from(part.length - at).unwrap_or(usize::MAX).min(there.len());
                let bytes = there.get(..step).unwrap_or_default();
                self.arena.slice(part.offset, part.length)?.write(at, bytes)?;
                self.taken += step;
                let at = at + step as u64;
                if at < part.length {
                    self.coming = Some((part, at));
                    return Ok(());
                }
                (self.coming, self.came) = (None, Some(part));
            }
            let Some(frame) = self.next().filter(|frame| frame.sequence() >= SEQUENCE_LIMIT) else {
                return Ok(());
            };
            self.taken += RECORD_LEN;
            self.arena_frame(&frame)?;
        }
    }

    fn arena_frame(&mut self, frame: &Record) -> Result<(), Error> {
        let [what, mark, offset, length, rest @ ..] = *frame.words();
        if mark != SEQUENCE_LIMIT || length == 0 || rest != [0; 4] {
            return Err(Protocol::Frame { what }.into());
        }
        self.arena.slice(offset, length)?;
        match (what, self.sequence) {
            (DATA, _) => {
                self.coming = Some((Part { offset, length }, 0));
                Ok(())
            }
            (WANTED, Sequence::Callers) => self.send_data(offset, length, PATIENCE),
            _ => Err(Protocol::Frame { what }.into()),
        }
    }
}

/// Whether there is time left, after a call that has waited for so long.
fn check(begun: &mut Option<Instant>, call: Duration, most: Option<Duration>, what: &'static str) -> Result<(), Error> {
    let Some(most) = most else { return Ok(()) };
    // The clock is asked for the first time after that call.
    let began = || Instant::now().checked_sub(call).unwrap_or_else(Instant::now);
    let waited = begun.get_or_insert_with(began).elapsed();
    match waited < most {
        true => Ok(()),
        false => Err(Error::Deadline { what, waited }),
    }
}

/// An error of a socket that was connected, unless it says to try again: then how long its call has waited.
fn again(error: io::Error) -> Result<Duration, Error> {
    use io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionReset, Interrupted, TimedOut, UnexpectedEof, WouldBlock,
    };
    match error.kind() {
        WouldBlock => Ok(CALL),
        Interrupted => Ok(Duration::ZERO),
        // What keeps a TCP connection alive has had no answer (tcp(7), TCP_USER_TIMEOUT).
        BrokenPipe | ConnectionReset | ConnectionAborted | UnexpectedEof | TimedOut => Err(Error::PeerGone),
        _ => Err(Error::io("use a stream socket")(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// An arena of two pages.
    fn arena() -> Window {
        Window::create(accel_window::Geometry::new(1, 2, 8192).unwrap())
            .unwrap()
            .1
    }

    /// A server's end, and the socket of a client that writes what it likes.
    fn ends() -> (StreamEnd, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        let channel = Channel::new(near.into()).unwrap();
        (StreamEnd::new(channel, Sequence::Callers, arena()), far)
    }

    fn frame(words: [u64; 4]) -> [u8; RECORD_LEN] {
        let [what, mark, offset, length] = words;
        Record::from_words([what, mark, offset, length, 0, 0, 0, 0]).to_bytes()
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

    #[test]
    fn bytes_of_the_arena_come_before_their_record_in_whatever_pieces() {
        let (mut end, mut client) = ends();
        let data: Vec<u8> = (0..5000_u32).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let mut bytes = frame([DATA, SEQUENCE_LIMIT, 17, 5000]).to_vec();
        bytes.extend_from_slice(&data);
        bytes.extend_from_slice(&Record::default().to_bytes());
        // Asked for before and behind: what is answered is what was there by then.
        bytes.extend_from_slice(&frame([WANTED, SEQUENCE_LIMIT, 18, 4998]));
        bytes.extend_from_slice(&Record::default().with_sequence(1).to_bytes());
        let writing = std::thread::spawn(move || {
            bytes.chunks(61).for_each(|piece| client.write_all(piece).unwrap());
            client
        });
        assert_eq!(end.receive(None).unwrap().sequence(), 0);
        let mut there = vec![0; 5000];
        end.arena.slice(17, 5000).unwrap().read(0, &mut there).unwrap();
        assert_eq!(there, data);
        assert_eq!(end.receive(None).unwrap().sequence(), 1);
        end.flush(None).unwrap();
        let mut client = writing.join().unwrap();
        let mut answer = vec![0; RECORD_LEN + 4998];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..RECORD_LEN], frame([DATA, SEQUENCE_LIMIT, 18, 4998]));
        assert_eq!(answer[RECORD_LEN..], data[1..4999]);
    }

    #[test]
    fn a_client_has_back_what_it_has_sent_and_its_answer_may_be_in_between() {
        let (near, far) = UnixStream::pair().unwrap();
        let [server, client] = [near, far].map(|socket| Channel::new(socket.into()).unwrap());
        let mut server = StreamEnd::new(server, Sequence::Callers, arena());
        let mut client = StreamEnd::new(client, Sequence::Stamped, arena());
        let serving = std::thread::spawn(move || {
            loop {
                let Ok(record) = server.receive(None) else { return };
                // What it makes of the bytes.
                server.arena.slice(4000, 4).unwrap().write(0, b"done").unwrap();
                server.send(&record, PATIENCE).unwrap();
            }
        });
        for _ in 0..3 {
            client.arena.slice(4000, 8).unwrap().write(0, b"tasktask").unwrap();
            client.send_data(4000, 8, PATIENCE).unwrap();
            let number = client.send(&Record::default(), PATIENCE).unwrap();
            client.want(4000, 8);
            assert_eq!(client.receive(Some(PATIENCE)).unwrap().sequence(), number);
            client.take_data(4000, 8, PATIENCE).unwrap();
            let mut bytes = [0; 8];
            client.arena.slice(4000, 8).unwrap().read(0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"donetask");
        }
        drop(client);
        serving.join().unwrap();
    }

    #[test]
    fn bytes_that_come_after_their_deadline_pass_for_no_others() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut client = StreamEnd::new(Channel::new(near.into()).unwrap(), Sequence::Stamped, arena());
        client.want(8, 4);
        let error = client.take_data(8, 4, CALL).unwrap_err();
        assert!(matches!(error, Error::Deadline { .. }), "{error}");
        far.write_all(&frame([DATA, SEQUENCE_LIMIT, 8, 4])).unwrap();
        far.write_all(b"late").unwrap();
        client.want(8, 4);
        let error = client.take_data(8, 4, CALL).unwrap_err();
        assert!(matches!(error, Error::PeerGone), "{error}");
        let error = client.receive(Some(CALL)).unwrap_err();
        assert!(matches!(error, Error::PeerGone), "{error}");
    }

    #[test]
    fn bytes_whose_rest_has_not_gone_in_time_end_the_stream() {
        let (mut end, client) = ends();
        rustix::net::sockopt::set_socket_send_buffer_size(end.channel.socket(), 4096).unwrap();
        let geometry = accel_window::Geometry::new(1, 2, 1 << 20).unwrap();
        end.arena = Window::create(geometry).unwrap().1;
        let error = end.send_data(0, 1 << 20, CALL).unwrap_err();
        assert!(matches!(error, Error::Deadline { .. }), "{error}");
        let error = end.flush(Some(CALL)).unwrap_err();
        assert!(matches!(error, Error::PeerGone), "{error}");
        drop(client);
    }

    #[test]
    fn memory_of_a_stream_does_not_grow() {
        let (near, far) = UnixStream::pair().unwrap();
        let [server, client] = [near, far].map(|socket| Channel::new(socket.into()).unwrap());
        let geometry = accel_window::Geometry::new(1, 2, 1 << 20).unwrap();
        let arena = || Window::create(geometry).unwrap().1;
        let mut server = StreamEnd::new(server, Sequence::Callers, arena());
        let mut client = StreamEnd::new(client, Sequence::Stamped, arena());
        let serving = std::thread::spawn(move || {
            while let Ok(record) = server.receive(None) {
                server.send(&record, PATIENCE).unwrap();
            }
            server.outgoing.capacity()
        });
        let chunk = CHUNK as u64;
        for length in [chunk - 64, chunk - 63, chunk - 1, chunk, chunk + 1, 3 * chunk - 65] {
            // Both sides have something to go already.
            client.send_data(0, chunk / 2, PATIENCE).unwrap();
            client.send_data(0, length, PATIENCE).unwrap();
            client.send(&Record::default(), PATIENCE).unwrap();
            client.want(0, chunk / 2);
            client.want(0, length);
            client.receive(Some(PATIENCE)).unwrap();
            client.take_data(0, length, PATIENCE).unwrap();
        }
        assert_eq!(client.outgoing.capacity(), OUTGOING);
        drop(client);
        assert_eq!(serving.join().unwrap(), OUTGOING);
    }

    #[test]
    fn what_is_outside_of_the_arena_or_unsound_ends_the_stream() {
        for words in [
            [DATA, SEQUENCE_LIMIT, 8000, 193],
            [DATA, SEQUENCE_LIMIT, u64::MAX, 2],
            [DATA, SEQUENCE_LIMIT, 0, u64::MAX],
            [WANTED, SEQUENCE_LIMIT, 1, 8192],
            [DATA, SEQUENCE_LIMIT, 0, 0],
            [DATA, SEQUENCE_LIMIT | 1, 0, 1],
            [3, SEQUENCE_LIMIT, 0, 1],
        ] {
            let (mut end, mut client) = ends();
            client.write_all(&frame(words)).unwrap();
            let error = end.receive(Some(PATIENCE)).unwrap_err();
            assert!(matches!(error, Error::Protocol(_)), "{words:x?}: {error}");
        }
        // A server asks for nothing.
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut client = StreamEnd::new(Channel::new(near.into()).unwrap(), Sequence::Stamped, arena());
        far.write_all(&frame([WANTED, SEQUENCE_LIMIT, 0, 1])).unwrap();
        let error = client.receive(Some(PATIENCE)).unwrap_err();
        assert!(
            matches!(error, Error::Protocol(Protocol::Frame { what: WANTED })),
            "{error}"
        );
    }
}
