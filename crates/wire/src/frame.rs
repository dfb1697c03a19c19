//! Frames over a byte stream: eight bytes of header, then the payload. Never looks into a payload, and never believes a
//! length before it has been checked against [`MAX_PAYLOAD`].
//!
//! ```text
//!  0        4      6      8
//!  | length | kind | flags| payload (length bytes) ...      all little-endian
//! ```

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::Error;

/// Bytes of a frame header.
pub const HEADER_LEN: usize = 8;

/// Longest payload of a frame. A request with the longest argument list that is sensible fits; a peer cannot make the
/// other side hold more than this.
pub const MAX_PAYLOAD: usize = 1024 * 1024;

/// A reader gives memory back after a frame larger than this; ordinary data frames stay below.
const KEEP_CAPACITY: usize = 128 * 1024;

/// How much the receive buffer grows at once, so that a header alone does not make the reader allocate the maximum.
const GROW: usize = 64 * 1024;

/// What is sent at once where there is no memory for more.
const SMALL: usize = 2048;

/// How often a frame may be refused for lack of memory, and the pause after each time: two seconds in all.
const REFUSALS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(20);

/// A frame header that has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Payload bytes that follow; at most [`MAX_PAYLOAD`].
    pub length: usize,
    /// What the payload is; the protocol's business.
    pub kind: u16,
    /// Free for the protocol.
    pub flags: u16,
}

impl Header {
    /// Reads a header and checks its length.
    pub fn decode(bytes: [u8; HEADER_LEN]) -> Result<Self, Error> {
        let [l0, l1, l2, l3, k0, k1, f0, f1] = bytes;
        let length = usize::try_from(u32::from_le_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
        if length > MAX_PAYLOAD {
            return Err(Error::TooLarge {
                length,
                limit: MAX_PAYLOAD,
            });
        }
        Ok(Self {
            length,
            kind: u16::from_le_bytes([k0, k1]),
            flags: u16::from_le_bytes([f0, f1]),
        })
    }

    /// The eight bytes of a header for a payload of `length` bytes.
    pub fn encode(length: usize, kind: u16, flags: u16) -> Result<[u8; HEADER_LEN], Error> {
        let too_large = Error::TooLarge {
            length,
            limit: MAX_PAYLOAD,
        };
        if length > MAX_PAYLOAD {
            return Err(too_large);
        }
        let [l0, l1, l2, l3] = u32::try_from(length).map_err(|_| too_large)?.to_le_bytes();
        let [k0, k1] = kind.to_le_bytes();
        let [f0, f1] = flags.to_le_bytes();
        Ok([l0, l1, l2, l3, k0, k1, f0, f1])
    }
}

/// One frame; the payload is borrowed from the reader's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// What the payload is.
    pub kind: u16,
    /// Free for the protocol.
    pub flags: u16,
    /// The bytes.
    pub payload: &'a [u8],
}

/// Decodes the first frame of `bytes` and says how many bytes it took; `None` if more bytes are needed.
pub fn decode(bytes: &[u8]) -> Result<Option<(Frame<'_>, usize)>, Error> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_LEN>() else {
        return Ok(None);
    };
    let header = Header::decode(*header)?;
    let Some(payload) = rest.get(..header.length) else {
        return Ok(None);
    };
    Ok(Some((
        Frame {
            kind: header.kind,
            flags: header.flags,
            payload,
        },
        HEADER_LEN + header.length,
    )))
}

/// Reads frames from a blocking stream.
#[derive(Debug)]
pub struct FrameReader<R> {
    stream: R,
    buffer: Vec<u8>,
}

impl<R: Read> FrameReader<R> {
    /// The stream. Nothing has been read ahead: it stands behind the last frame.
    pub fn into_inner(self) -> R {
        self.stream
    }

    /// A reader that holds no buffer yet.
    pub fn new(stream: R) -> Self {
        Self {
            stream,
            buffer: Vec::new(),
        }
    }

    /// The stream, for instance to shut it down.
    pub fn get_ref(&self) -> &R {
        &self.stream
    }

    /// The stream, to read what is no frame.
    pub fn get_mut(&mut self) -> &mut R {
        &mut self.stream
    }

    /// The payload of the frame that [`read`](Self::read) returned last.
    pub fn last_payload(&self) -> &[u8] {
        &self.buffer
    }

    /// Waits for the next frame; `None` when the peer has closed the stream between two frames.
    pub fn read(&mut self) -> Result<Option<Frame<'_>>, Error> {
        let mut head = [0; HEADER_LEN];
        match fill(&mut self.stream, &mut head)? {
            0 => return Ok(None),
            HEADER_LEN => {}
            got => {
                return Err(Error::Truncated {
                    what: "a frame header",
                    got,
                    want: HEADER_LEN,
                });
            }
        }
        let header = Header::decode(head)?;
        if self.buffer.capacity() > KEEP_CAPACITY && header.length <= KEEP_CAPACITY {
            self.buffer = Vec::new();
        }
        self.buffer.clear();
        while self.buffer.len() < header.length {
            let have = self.buffer.len();
            self.buffer.resize(header.length.min(have + GROW), 0);
            let Some(space) = self.buffer.get_mut(have..) else {
                break;
            };
            let want = space.len();
            let got = fill(&mut self.stream, space)?;
            if got < want {
                return Err(Error::Truncated {
                    what: "a frame",
                    got: have + got,
                    want: header.length,
                });
            }
        }
        Ok(Some(Frame {
            kind: header.kind,
            flags: header.flags,
            payload: &self.buffer,
        }))
    }
}

/// Reads until `space` is full or the stream ends; says how many bytes came.
pub(crate) fn fill(stream: &mut impl Read, space: &mut [u8]) -> Result<usize, Error> {
    let mut done = 0;
    while let Some(rest) = space.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match stream.read(rest) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(done)
}

/// Writes frames to a blocking stream; several threads may share one, and a frame is never torn apart.
#[derive(Debug)]
pub struct FrameWriter<W> {
    stream: Mutex<W>,
}

impl<W: Write> FrameWriter<W> {
    /// Does something with the stream itself, between two frames.
    pub fn with<T>(&self, work: impl FnOnce(&W) -> T) -> T {
        work(&self.stream.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A writer over `stream`.
    pub fn new(stream: W) -> Self {
        Self {
            stream: Mutex::new(stream),
        }
    }

    /// Sends one frame, waiting for the stream to take all of it.
    pub fn send(&self, kind: u16, flags: u16, payload: &[u8]) -> Result<(), Error> {
        let header = Header::encode(payload.len(), kind, flags)?;
        // A panic while the lock is held cannot leave a frame half-written that the next `send` would not notice: the
        // peer then reads a wrong length and ends the connection.
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        write_both(&mut *stream, &header, payload)?;
        stream.flush()?;
        Ok(())
    }
}

/// Writes header and payload, in one call where the stream takes them so. Linux has what is sent by vsock at once in one piece of memory,
/// which a guest whose memory is full of files may not have: then smaller pieces are tried, for a while.
fn write_both(stream: &mut impl Write, header: &[u8], payload: &[u8]) -> Result<(), Error> {
    let (mut done, mut most, mut refused) = (0, usize::MAX, 0);
    while done < header.len() + payload.len() {
        let head = header.get(done..).unwrap_or_default();
        let body = payload.get(done.saturating_sub(header.len())..).unwrap_or_default();
        let body = body.get(..most).unwrap_or(body);
        match stream.write_vectored(&[IoSlice::new(head), IoSlice::new(body)]) {
            Ok(0) => return Err(std::io::Error::from(ErrorKind::WriteZero).into()),
            Ok(n) => done += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::OutOfMemory && refused < REFUSALS => {
                most = SMALL;
                refused += 1;
                std::thread::sleep(PAUSE);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// Has memory for small pieces alone, and now and then not even for those.
    #[derive(Default)]
    struct Short {
        taken: Vec<u8>,
        asked: u32,
        never: bool,
    }

    impl Write for Short {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.asked += 1;
            if self.never || bytes.len() > HEADER_LEN + SMALL || self.asked.is_multiple_of(3) {
                return Err(std::io::Error::from_raw_os_error(12));
            }
            self.taken.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> std::io::Result<usize> {
            self.write(
                &pieces
                    .iter()
                    .flat_map(|piece| piece.iter().copied())
                    .collect::<Vec<u8>>(),
            )
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_frame_goes_out_in_small_pieces_where_memory_is_short() {
        let payload: Vec<u8> = (0..10_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let writer = FrameWriter::new(Short::default());
        writer.send(7, 0, &payload).unwrap();
        let taken = writer.with(|short| short.taken.clone());
        let (frame, length) = decode(&taken).unwrap().unwrap();
        assert_eq!((frame.kind, frame.payload, length), (7, &payload[..], taken.len()));
        let never = FrameWriter::new(Short {
            never: true,
            ..Short::default()
        });
        assert!(never.send(7, 0, &payload).is_err());
    }

    /// Gives and takes at most `step` bytes at a time, as a slow socket does.
    struct Dribble {
        data: Cursor<Vec<u8>>,
        step: usize,
    }

    impl Read for Dribble {
        fn read(&mut self, space: &mut [u8]) -> std::io::Result<usize> {
            let step = self.step.min(space.len());
            self.data.read(&mut space[..step])
        }
    }

    impl Write for Dribble {
        fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
            let step = self.step.min(data.len());
            self.data.write(&data[..step])
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn encoded(kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
        let writer = FrameWriter::new(Vec::new());
        writer.send(kind, flags, payload).unwrap();
        writer.stream.into_inner().unwrap()
    }

    #[test]
    fn frames_survive_a_stream_that_moves_one_byte_at_a_time() {
        let big: Vec<u8> = (0..=255).cycle().take(200_000).collect();
        let writer = FrameWriter::new(Dribble {
            data: Cursor::new(Vec::new()),
            step: 3,
        });
        writer.send(7, 9, b"hello").unwrap();
        writer.send(8, 0, b"").unwrap();
        writer.send(9, 1, &big).unwrap();
        let data = writer.stream.into_inner().unwrap().data.into_inner();
        let mut reader = FrameReader::new(Dribble {
            data: Cursor::new(data),
            step: 1,
        });
        assert_eq!(
            reader.read().unwrap(),
            Some(Frame {
                kind: 7,
                flags: 9,
                payload: b"hello"
            })
        );
        assert_eq!(
            reader.read().unwrap(),
            Some(Frame {
                kind: 8,
                flags: 0,
                payload: b""
            })
        );
        assert_eq!(
            reader.read().unwrap(),
            Some(Frame {
                kind: 9,
                flags: 1,
                payload: &big
            })
        );
        assert_eq!(reader.read().unwrap(), None);
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        assert_eq!(encoded(0x0102, 0x0304, b"ab"), [2, 0, 0, 0, 2, 1, 4, 3, b'a', b'b']);
    }

    #[test]
    fn an_oversized_frame_is_refused_with_the_numbers_before_anything_is_allocated() {
        let mut reader = FrameReader::new(Cursor::new([0xff; 64]));
        match reader.read() {
            Err(Error::TooLarge {
                length: 0xffff_ffff,
                limit: MAX_PAYLOAD,
            }) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(reader.buffer.capacity(), 0);
        let writer = FrameWriter::new(Vec::new());
        assert!(matches!(
            writer.send(1, 0, &vec![0; MAX_PAYLOAD + 1]),
            Err(Error::TooLarge { .. })
        ));
        assert!(writer.stream.into_inner().unwrap().is_empty());
        assert_eq!(encoded(1, 0, &vec![0; MAX_PAYLOAD]).len(), MAX_PAYLOAD + HEADER_LEN);
    }

    #[test]
    fn a_liar_about_the_length_costs_one_step_of_memory() {
        let mut bytes = Header::encode(MAX_PAYLOAD, 1, 0).unwrap().to_vec();
        bytes.extend([0; 100]);
        let mut reader = FrameReader::new(Cursor::new(bytes));
        match reader.read() {
            Err(Error::Truncated {
                got: 100,
                want: MAX_PAYLOAD,
                ..
            }) => {}
            other => panic!("{other:?}"),
        }
        assert!(reader.buffer.capacity() <= GROW);
    }

    #[test]
    fn truncation_anywhere_is_an_error_and_never_a_frame() {
        let whole = encoded(3, 0, b"payload");
        for cut in 1..whole.len() {
            let mut reader = FrameReader::new(Cursor::new(whole[..cut].to_vec()));
            assert!(matches!(reader.read(), Err(Error::Truncated { .. })), "cut at {cut}");
            assert!(decode(&whole[..cut]).unwrap().is_none(), "cut at {cut}");
        }
        let (frame, used) = decode(&whole).unwrap().unwrap();
        assert_eq!((frame.payload, used), (&b"payload"[..], whole.len()));
    }

    #[test]
    fn arbitrary_bytes_never_panic() {
        // A small xorshift generator: the sequence is the same in every run.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut bytes = Vec::new();
        for round in 0..2000 {
            bytes.clear();
            for _ in 0..round % 40 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                bytes.push(state.to_le_bytes()[3] & if round % 2 == 0 { 0xff } else { 0x07 });
            }
            if let Ok(Some((frame, used))) = decode(&bytes) {
                assert_eq!(used, HEADER_LEN + frame.payload.len());
            }
            let mut reader = FrameReader::new(Cursor::new(bytes.clone()));
            while let Ok(Some(_)) = reader.read() {}
        }
    }

    #[test]
    fn memory_of_a_large_frame_is_given_back() {
        let mut bytes = encoded(1, 0, &vec![1; MAX_PAYLOAD]);
        bytes.extend(encoded(2, 0, b"small"));
        let mut reader = FrameReader::new(Cursor::new(bytes));
        assert_eq!(reader.read().unwrap().unwrap().payload.len(), MAX_PAYLOAD);
        assert_eq!(reader.read().unwrap().unwrap().payload, b"small");
        assert!(reader.buffer.capacity() < KEEP_CAPACITY);
    }
}
