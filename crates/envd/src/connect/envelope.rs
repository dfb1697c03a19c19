//! Messages of a stream in their envelopes: a byte of flags, four bytes of length (big-endian), the message. Reads what a client sends,
//! and bounds it; writes what it gets. Knows no message.

use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use bytes::{Buf, Bytes, BytesMut};
use futures_util::StreamExt;
use serde::Serialize;

use super::json;
use crate::error::Error;
use crate::memory::{Held, Share};

/// Bytes before each message.
const HEAD: usize = 5;

/// The message is compressed.
const COMPRESSED: u8 = 1;

/// It is the last, and says how the stream ended.
const END: u8 = 2;

/// The longest message that is read. What a process gets as input is the longest that there is to say.
pub(crate) const MAX_MESSAGE: usize = 4 * 1024 * 1024;

/// The messages of a request's body.
pub(crate) struct Envelopes {
    body: BodyDataStream,
    buffer: BytesMut,
    idle: Option<Duration>,
    memory: Share,
    /// What is in `buffer`, if that is much.
    held: Held,
}

/// A message, with the memory that it takes and what is made of it.
pub(crate) struct Message {
    pub(crate) bytes: Bytes,
    _held: Held,
}

impl Envelopes {
    /// Reads `body`, whose messages are of `memory`; if nothing comes for `idle`, that is an error.
    pub(crate) fn new(body: Body, idle: Option<Duration>, memory: &Share) -> Self {
        Self {
            body: body.into_data_stream(),
            buffer: BytesMut::new(),
            idle,
            memory: memory.clone(),
            held: memory.nothing(),
        }
    }

    /// The next message; `None` at the end of the body.
    pub(crate) async fn next(&mut self) -> Result<Option<Message>, Error> {
        loop {
            if let Some(length) = announced(&self.buffer)?
                && self.buffer.len() >= HEAD + length
            {
                let mut held = std::mem::replace(&mut self.held, self.memory.nothing());
                held.grow_to(2 * length)?;
                self.buffer.advance(HEAD);
                let bytes = self.buffer.split_to(length).freeze();
                return Ok(Some(Message { bytes, _held: held }));
            }
            match self.more().await? {
                Some(bytes) => {
                    self.held.grow_to(self.buffer.len() + bytes.len())?;
                    self.buffer.extend_from_slice(&bytes);
                }
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(Error::Body("it ends in the midst of a message".to_owned())),
            }
        }
    }

    async fn more(&mut self) -> Result<Option<Bytes>, Error> {
        let next = self.body.next();
        let next = match self.idle {
            None => next.await,
            Some(limit) => tokio::time::timeout(limit, next)
                .await
                .map_err(|_| Error::Stalled(limit))?,
        };
        next.transpose().map_err(|error| Error::Body(error.to_string()))
    }
}

/// How long the first message in `buffer` is, once its head is there.
fn announced(buffer: &BytesMut) -> Result<Option<usize>, Error> {
    let Some((&[flags, l0, l1, l2, l3], _)) = buffer.split_first_chunk::<HEAD>() else {
        return Ok(None);
    };
    let length = usize::try_from(u32::from_be_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
    if flags & COMPRESSED != 0 {
        return Err(Error::Unimplemented(
            "messages of a stream must not be compressed".to_owned(),
        ));
    }
    if flags != 0 {
        return Err(Error::Invalid(format!("a message has the unknown flags {flags:#04x}")));
    }
    if length > MAX_MESSAGE {
        return Err(Error::TooMuch(format!(
            "a message of {length} bytes exceeds the limit of {MAX_MESSAGE} bytes; send several smaller ones"
        )));
    }
    Ok(Some(length))
}

/// A message in its envelope.
pub(crate) fn message(message: &impl Serialize) -> Result<Bytes, Error> {
    Ok(wrap(0, &json::write(message)?))
}

/// The last envelope: the stream ended well, or by an error.
pub(crate) fn end(error: Option<&Error>) -> Bytes {
    let text = match error {
        None => "{}".to_owned(),
        Some(error) => serde_json::json!({ "error": super::call::description(error) }).to_string(),
    };
    wrap(END, text.as_bytes())
}

fn wrap(flags: u8, message: &[u8]) -> Bytes {
    let mut bytes = Vec::with_capacity(HEAD + message.len());
    bytes.push(flags);
    // An answer's message comes from frames of 1 MiB.
    bytes.extend_from_slice(&u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
    bytes.extend_from_slice(message);
    bytes.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;

    fn body(chunks: &[&[u8]]) -> Envelopes {
        let chunks: Vec<Result<Bytes, std::io::Error>> =
            chunks.iter().map(|chunk| Ok(Bytes::copy_from_slice(chunk))).collect();
        Envelopes::new(
            Body::from_stream(futures_util::stream::iter(chunks)),
            None,
            &Memory::default().share(),
        )
    }

    #[tokio::test]
    async fn messages_are_found_however_they_are_cut() {
        let sent = [wrap(0, b"{\"a\":1}"), wrap(0, b""), wrap(0, b"{}")].concat();
        for size in 1..=sent.len() {
            let mut envelopes = body(&sent.chunks(size).collect::<Vec<_>>());
            for expected in [&b"{\"a\":1}"[..], b"", b"{}"] {
                assert_eq!(envelopes.next().await.unwrap().unwrap().bytes, expected, "{size}");
            }
            assert!(envelopes.next().await.unwrap().is_none(), "{size}");
        }
    }

    #[tokio::test]
    async fn what_is_no_envelope_is_refused() {
        let code = async |bytes: &[u8]| match body(&[bytes]).next().await {
            Err(error) => error.code().name(),
            Ok(_) => panic!("{bytes:?}"),
        };
        assert_eq!(code(&[1, 0, 0, 0, 0]).await, "unimplemented");
        assert_eq!(code(&[2, 0, 0, 0, 0]).await, "invalid_argument");
        assert_eq!(code(&[0, 0xff, 0, 0, 0]).await, "resource_exhausted");
        assert_eq!(code(&[0, 0, 0, 0, 2, b'{']).await, "invalid_argument");
        assert_eq!(code(&[0, 0, 0]).await, "invalid_argument");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_says_nothing_is_not_waited_for() {
        let silent = Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>());
        let mut envelopes = Envelopes::new(silent, Some(Duration::from_secs(9)), &Memory::default().share());
        assert!(matches!(envelopes.next().await, Err(Error::Stalled(_))));
    }

    /// As far as it has come, and as long as somebody has it.
    #[tokio::test]
    async fn a_message_is_of_the_tenants_memory() {
        const KIB: usize = 1024;
        let share = Memory::new(256 * KIB).share();
        let sent = wrap(0, &vec![b' '; 100 * KIB]);
        let mut envelopes = body(&[&sent, &sent[..HEAD]]);
        (envelopes.held, envelopes.memory) = (share.nothing(), share.clone());
        let message = envelopes.next().await.unwrap().unwrap();
        assert!(share.has(32 * KIB) && !share.has(100 * KIB));
        // A length alone is nothing yet.
        assert!(envelopes.next().await.is_err());
        assert!(share.has(32 * KIB));
        drop((message, envelopes));
        assert!(share.has(256 * KIB));
        let _most = share.hold(200 * KIB);
        let mut more = body(&[&sent]);
        (more.held, more.memory) = (share.nothing(), share);
        assert!(matches!(more.next().await, Err(Error::Memory(_))));
    }

    #[test]
    fn the_end_says_how_it_ended() {
        assert_eq!(end(None), &b"\x02\0\0\0\x02{}"[..]);
        let error = Error::NoProcess("pid 7".to_owned());
        let bytes = end(Some(&error));
        let text = std::str::from_utf8(&bytes[HEAD..]).unwrap();
        assert_eq!(
            text,
            r#"{"error":{"code":"not_found","message":"process with pid 7 was not found; it may have ended"}}"#
        );
        assert_eq!(bytes[0], END);
    }
}
