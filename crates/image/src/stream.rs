//! Byte streams that a tar is read from: a file that can be sought in, or a decompressor whose output is counted,
//! bounded and hashed. Knows nothing of tar.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::os::unix::fs::FileExt;

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use sha2::{Digest, Sha256};

use crate::Error;
use crate::stop::Stop;

/// A stream with a position.
pub(crate) trait Stream {
    /// What it is, for messages.
    fn what(&self) -> &str;
    /// Bytes read or skipped so far.
    fn position(&self) -> u64;
    /// Reads until `buf` is full or the stream ends; says how much it read.
    fn fill(&mut self, buf: &mut [u8]) -> Result<usize, Error>;
    /// Skips exactly `count` bytes.
    fn skip(&mut self, count: u64) -> Result<(), Error>;

    /// Fills `buf`, or it is an error.
    fn exact(&mut self, buf: &mut [u8]) -> Result<(), Error> {
        let got = self.fill(buf)?;
        if got == buf.len() {
            Ok(())
        } else {
            Err(self.truncated((buf.len() - got) as u64))
        }
    }

    /// The stream ended `missing` bytes too early.
    fn truncated(&self, missing: u64) -> Error {
        Error::Truncated {
            what: self.what().to_owned(),
            at: self.position(),
            missing,
        }
    }
}

/// A part of a file.
#[derive(Debug)]
pub(crate) struct FilePart<'a> {
    file: &'a File,
    what: String,
    start: u64,
    len: u64,
    position: u64,
}

impl<'a> FilePart<'a> {
    pub(crate) fn new(file: &'a File, what: String, start: u64, len: u64) -> Self {
        Self {
            file,
            what,
            start,
            len,
            position: 0,
        }
    }
}

impl Read for FilePart<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.len - self.position).unwrap_or(usize::MAX);
        let want = buf.len().min(left);
        let got = self.file.read_at(&mut buf[..want], self.start + self.position)?;
        self.position += got as u64;
        Ok(got)
    }
}

impl Stream for FilePart<'_> {
    fn what(&self) -> &str {
        &self.what
    }

    fn position(&self) -> u64 {
        self.position
    }

    fn fill(&mut self, buf: &mut [u8]) -> Result<usize, Error> {
        read_full(self, buf).map_err(|(_, source)| Error::Io {
            action: "read",
            path: self.what.clone().into(),
            source,
        })
    }

    fn skip(&mut self, count: u64) -> Result<(), Error> {
        let left = self.len - self.position;
        if count > left {
            self.position = self.len;
            return Err(self.truncated(count - left));
        }
        self.position += count;
        Ok(())
    }
}

/// How a layer or archive is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// By the first bytes of a file: gzip (RFC 1952, 2.3.1), Zstandard and its skippable frames (RFC 8878, 3.1).
    /// The name of a compression that is known but not supported is the error.
    pub(crate) fn sniff(head: &[u8]) -> Result<Self, &'static str> {
        match head {
            [0x1f, 0x8b, ..] => Ok(Self::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Ok(Self::Zstd),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Err("xz"),
            [b'B', b'Z', b'h', b'1'..=b'9', ..] => Err("bzip2"),
            _ => Ok(Self::None),
        }
    }

    /// What `input` is when decompressed.
    pub(crate) fn decoder<'a>(self, input: impl Read + 'a) -> Box<dyn Read + 'a> {
        let input = BufReader::with_capacity(256 << 10, input);
        match self {
            Self::None => Box::new(input),
            Self::Gzip => Box::new(MultiGzDecoder::new(input)),
            Self::Zstd => Box::new(ZstdFrames(Frame::Between(Box::new(input)))),
        }
    }
}

type ZstdFrame<'a> = StreamingDecoder<Box<dyn BufRead + 'a>, ruzstd::decoding::FrameDecoder>;

/// Zstandard frames one after the other, as the format allows and seekable layers (zstd:chunked) have them.
struct ZstdFrames<'a>(Frame<'a>);

enum Frame<'a> {
    Between(Box<dyn BufRead + 'a>),
    Inside(Box<ZstdFrame<'a>>),
    End,
}

impl Read for ZstdFrames<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            match std::mem::replace(&mut self.0, Frame::End) {
                Frame::End => return Ok(0),
                Frame::Between(mut input) => {
                    if input.fill_buf()?.is_empty() {
                        return Ok(0);
                    }
                    self.0 = next_frame(input)?;
                }
                Frame::Inside(mut frame) => {
                    let got = frame.read(buf)?;
                    if got > 0 || buf.is_empty() {
                        self.0 = Frame::Inside(frame);
                        return Ok(got);
                    }
                    self.0 = Frame::Between(frame.into_inner());
                }
            }
        }
    }
}

fn next_frame(mut input: Box<dyn BufRead + '_>) -> io::Result<Frame<'_>> {
    // A skippable frame is recognised before it is given to the decoder, which would consume the input.
    let head = input.fill_buf()?;
    if matches!(head, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..]) {
        let mut header = [0; 8];
        input.read_exact(&mut header)?;
        let len = u64::from(u32::from_le_bytes([header[4], header[5], header[6], header[7]]));
        let skipped = io::copy(&mut input.by_ref().take(len), &mut io::sink())?;
        return if skipped == len {
            Ok(Frame::Between(input))
        } else {
            Err(ErrorKind::UnexpectedEof.into())
        };
    }
    match StreamingDecoder::new(input) {
        Ok(frame) => Ok(Frame::Inside(Box::new(frame))),
        Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::MagicNumberReadError(source))) => Err(source),
        Err(error) => Err(io::Error::new(ErrorKind::InvalidData, error)),
    }
}

/// A decompressor's output: counted, bounded by what is left of the image's allowance, and hashed.
pub(crate) struct Unpacked<'a> {
    reader: Box<dyn Read + 'a>,
    what: String,
    position: u64,
    /// Where the output must have ended, and the whole image's limit for the message.
    allowed: u64,
    limit: u64,
    stop: Stop,
    hash: Sha256,
}

impl<'a> Unpacked<'a> {
    /// `used` of `limit` bytes have been taken by other layers.
    pub(crate) fn new(reader: Box<dyn Read + 'a>, what: String, used: u64, limit: u64) -> Self {
        Self {
            reader,
            what,
            position: 0,
            allowed: limit.saturating_sub(used),
            limit,
            stop: Stop::default(),
            hash: Sha256::new(),
        }
    }

    /// The same, but reading ends when `stop` says so.
    pub(crate) fn until(mut self, stop: &Stop) -> Self {
        self.stop = stop.clone();
        self
    }

    /// Reads what is left; the number of bytes and their SHA-256.
    pub(crate) fn finish(mut self) -> Result<(u64, [u8; 32]), Error> {
        let mut buf = vec![0; 256 << 10];
        while self.fill(&mut buf)? == buf.len() {}
        Ok((self.position, self.hash.finalize().into()))
    }
}

impl Stream for Unpacked<'_> {
    fn what(&self) -> &str {
        &self.what
    }

    fn position(&self) -> u64 {
        self.position
    }

    fn fill(&mut self, buf: &mut [u8]) -> Result<usize, Error> {
        self.stop.check()?;
        let got = read_full(&mut self.reader, buf).map_err(|(got, source)| {
            let at = self.position + got as u64;
            if source.kind() == ErrorKind::UnexpectedEof {
                Error::Truncated {
                    what: self.what.clone(),
                    at,
                    missing: (buf.len() - got) as u64,
                }
            } else {
                Error::BadCompression {
                    what: self.what.clone(),
                    at,
                    source,
                }
            }
        })?;
        self.hash.update(&buf[..got]);
        self.position += got as u64;
        if self.position > self.allowed {
            let found = self.limit - self.allowed + self.position;
            let what = "the number of bytes of all layers".to_owned();
            return Err(Error::TooLarge {
                what,
                found,
                limit: self.limit,
            });
        }
        Ok(got)
    }

    fn skip(&mut self, mut count: u64) -> Result<(), Error> {
        let mut buf = [0; 8192];
        while count > 0 {
            let want = usize::try_from(count).unwrap_or(usize::MAX).min(buf.len());
            let got = self.fill(&mut buf[..want])?;
            count -= got as u64;
            if got < want {
                return Err(self.truncated(count));
            }
        }
        Ok(())
    }
}

/// Reads until `buf` is full or the input ends. An error comes with what had been read before it.
fn read_full(reader: &mut (impl Read + ?Sized), buf: &mut [u8]) -> Result<usize, (usize, io::Error)> {
    let mut got = 0;
    while got < buf.len() {
        match reader.read(&mut buf[got..]) {
            Ok(0) => break,
            Ok(count) => got += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err((got, error)),
        }
    }
    Ok(got)
}
