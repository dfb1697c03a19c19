//! Messages of a stream in their envelopes (Connect): a byte of flags, four bytes of length (big-endian), the message. Knows no message.

use std::io::{self, Read};

/// The message is the last, and says how the stream ended.
const END: u8 = 2;

/// The longest message that is read: servers send what a process writes in smaller pieces.
const MAX_MESSAGE: usize = 16 << 20;

/// A message in its envelope.
pub(crate) fn wrap(message: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(5 + message.len());
    bytes.push(0);
    bytes.extend_from_slice(&u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
    bytes.extend_from_slice(message);
    bytes
}

/// What comes of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Envelope {
    /// A message.
    Message(Vec<u8>),
    /// The last one, which says how the stream ended.
    End(Vec<u8>),
}

/// The next envelope. A stream that ends without its last message has broken off.
pub(crate) fn next(from: &mut impl Read) -> io::Result<Envelope> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let [flags, length @ ..] = head;
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    if length > MAX_MESSAGE || (flags != 0 && flags != END) {
        let what = format!("a message of {length} bytes with the flags {flags:#04x}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    // As it comes: whoever only says that it is long takes no memory.
    let mut message = Vec::new();
    let wanted = u64::try_from(length).unwrap_or(u64::MAX);
    if from.take(wanted).read_to_end(&mut message)? < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(if flags == END {
        Envelope::End(message)
    } else {
        Envelope::Message(message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found_and_breaks_are_told() {
        let mut bytes = wrap(b"{}");
        bytes.extend_from_slice(&[2, 0, 0, 0, 2, b'{', b'}']);
        let mut from = &bytes[..];
        assert_eq!(next(&mut from).unwrap(), Envelope::Message(b"{}".to_vec()));
        assert_eq!(next(&mut from).unwrap(), Envelope::End(b"{}".to_vec()));
        for cut in [0, 3, 6] {
            let error = next(&mut &bytes[..cut]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{cut}");
        }
    }

    #[test]
    fn what_is_too_long_or_compressed_is_refused() {
        for head in [[0, 0xff, 0, 0, 0], [1, 0, 0, 0, 0]] {
            let error = next(&mut &head[..]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
    }
}
