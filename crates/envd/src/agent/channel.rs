//! One connection to an agent: frames both ways, and requests with one answer. Knows what a frame is and not what its bytes mean.

use std::time::Duration;

use agent_api::message::{Reply, Request, kind};
use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use crate::error::Error;
use crate::memory::{Held, Share};

/// How long the agent may take for an answer. Most of them are there at once; a large tree takes long to be removed.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(600);

/// How long the agent may take nothing of what is sent.
pub(crate) const WRITE_LIMIT: Duration = Duration::from_secs(60);

/// How much is read at once.
const READ_SIZE: usize = 64 * 1024;

/// What frames have in general. The memory that a larger one takes is counted.
const ORDINARY: usize = 128 * 1024;

/// What comes from an agent.
#[derive(Debug)]
pub(crate) enum Frame {
    /// A message.
    Reply(Reply),
    /// Bytes, by the kind of their frame.
    Bytes(u16, Bytes),
}

/// A connection to an agent.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: UnixStream,
    /// What has come and was not taken yet: less than two frames.
    buffer: BytesMut,
    memory: Share,
    /// Of a frame that is on its way.
    held: Held,
    _place: OwnedSemaphorePermit,
}

impl Channel {
    /// One over a stream that is idle; `place` is given up with it. Large frames are of `memory`.
    pub(crate) fn new(stream: UnixStream, place: OwnedSemaphorePermit, memory: Share) -> Self {
        Self {
            stream,
            buffer: BytesMut::new(),
            held: memory.nothing(),
            memory,
            _place: place,
        }
    }

    /// Sends a request and waits for the one answer; what was refused or failed is an error.
    pub(crate) async fn ask(&mut self, request: &Request) -> Result<Reply, Error> {
        self.send(request).await?;
        self.answer().await
    }

    /// Waits for the answer to what was sent.
    pub(crate) async fn answer(&mut self) -> Result<Reply, Error> {
        match self.frame(ANSWER_LIMIT).await? {
            Frame::Reply(reply) => failed(reply),
            Frame::Bytes(kind, _) => Err(Error::Agent(format!(
                "a frame of kind {kind} came instead of an answer"
            ))),
        }
    }

    /// Sends a request.
    pub(crate) async fn send(&mut self, request: &Request) -> Result<(), Error> {
        let json =
            serde_json::to_vec(request).map_err(|error| Error::Invalid(format!("this cannot be asked: {error}")))?;
        self.send_bytes(kind::CONTROL, &json, WRITE_LIMIT).await
    }

    /// Sends a frame; for so long the agent may take nothing.
    pub(crate) async fn send_bytes(&mut self, kind: u16, bytes: &[u8], limit: Duration) -> Result<(), Error> {
        let head = wire::Header::encode(bytes.len(), kind, 0)
            .map_err(|error| Error::Invalid(format!("this is more than can be asked at once: {error}")))?;
        let write = async {
            self.stream.write_all(&head).await?;
            self.stream.write_all(bytes).await
        };
        match timeout(limit, write).await {
            Ok(written) => written.map_err(|error| Error::Lost(error.to_string())),
            Err(_) => Err(Error::Silent(limit)),
        }
    }

    /// Waits for the next frame for so long.
    pub(crate) async fn frame(&mut self, limit: Duration) -> Result<Frame, Error> {
        timeout(limit, self.next()).await.map_err(|_| Error::Silent(limit))?
    }

    /// Waits for the next frame. Nothing is lost if it is not waited for to the end.
    pub(crate) async fn next(&mut self) -> Result<Frame, Error> {
        loop {
            if let Some(frame) = self.take()? {
                return Ok(frame);
            }
            self.buffer.reserve(READ_SIZE);
            match self.stream.read_buf(&mut self.buffer).await {
                Ok(0) => return Err(Error::Lost("the other side has closed it".to_owned())),
                Ok(_) => {}
                Err(error) => return Err(Error::Lost(error.to_string())),
            }
        }
    }

    /// A frame that has come already, without waiting for one.
    pub(crate) fn early(&mut self) -> Result<Option<Frame>, Error> {
        self.buffer.reserve(READ_SIZE);
        match self.stream.try_read_buf(&mut self.buffer) {
            // The end is found by whoever waits.
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(Error::Lost(error.to_string())),
        }
        self.take()
    }

    /// Counts what is there of a large frame that is on its way.
    fn hold(&mut self) -> Result<(), Error> {
        let there = self.buffer.len();
        match there > ORDINARY {
            true => self.held.grow_to(there),
            false => Ok(()),
        }
    }

    /// Takes the first frame off the buffer, if it is complete.
    fn take(&mut self) -> Result<Option<Frame>, Error> {
        let decoded = wire::decode(&self.buffer).map_err(|error| Error::Agent(error.to_string()))?;
        let Some((frame, length)) = decoded else {
            self.hold()?;
            return Ok(None);
        };
        if self.held.bytes() > 0 {
            self.held = self.memory.nothing();
        }
        let kind = frame.kind;
        let mut bytes = self.buffer.split_to(length);
        bytes.advance(wire::HEADER_LEN);
        if kind != kind::CONTROL {
            return Ok(Some(Frame::Bytes(kind, bytes.freeze())));
        }
        match serde_json::from_slice(&bytes) {
            Ok(reply) => Ok(Some(Frame::Reply(reply))),
            Err(error) => Err(Error::Agent(format!("it sent a message that is none: {error}"))),
        }
    }
}

/// Those replies that say that something was not done.
pub(crate) fn failed(reply: Reply) -> Result<Reply, Error> {
    match reply {
        Reply::Refused { message } => Err(Error::Refused(message)),
        Reply::RequestFailed(failure) => Err(Error::Failed(failure)),
        Reply::Failed(failure) => Err(Error::NotStarted(failure)),
        reply => Ok(reply),
    }
}

/// An answer that was not asked for.
pub(crate) fn unexpected(reply: &Reply) -> Error {
    // Only its name: the rest is the guest's, and may be long.
    let shown = format!("{reply:?}");
    let name = shown.split([' ', '(', '{']).next().unwrap_or_default();
    Error::Agent(format!("it answered {name}, which answers something else"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use agent_api::{RequestFailure, RequestFailureKind};
    use tokio::sync::Semaphore;

    use super::*;
    use crate::memory::Memory;

    fn channel() -> (Channel, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        (Channel::new(near, place, Memory::default().share()), far)
    }

    fn frame(kind: u16, bytes: &[u8]) -> Vec<u8> {
        [&wire::Header::encode(bytes.len(), kind, 0).unwrap()[..], bytes].concat()
    }

    #[tokio::test]
    async fn an_answer_is_found_however_it_comes() {
        let (mut channel, mut far) = channel();
        let sent = [frame(kind::CONTROL, br#""done""#), frame(kind::STDOUT, b"abc")].concat();
        let writer = tokio::spawn(async move {
            for byte in sent {
                far.write_all(&[byte]).await.unwrap();
            }
            far
        });
        assert!(matches!(channel.answer().await, Ok(Reply::Done)));
        assert!(matches!(channel.next().await, Ok(Frame::Bytes(kind::STDOUT, bytes)) if &bytes[..] == b"abc"));
        drop(writer.await.unwrap());
        assert!(matches!(channel.next().await, Err(Error::Lost(_))));
    }

    #[tokio::test]
    async fn what_an_agent_must_not_say_is_an_error() {
        let failure = RequestFailure {
            kind: RequestFailureKind::NoSpace,
            message: "full".to_owned(),
        };
        let failed = serde_json::to_vec(&Reply::RequestFailed(failure)).unwrap();
        for (sent, code, text) in [
            (frame(kind::CONTROL, &failed), "internal", "full"),
            (
                frame(kind::CONTROL, br#"{"refused":{"message":"no"}}"#),
                "internal",
                "no",
            ),
            (frame(kind::CONTROL, b"{"), "internal", "a message that is none"),
            (frame(kind::STDOUT, b"x"), "internal", "instead of an answer"),
            (vec![0xff; 8], "internal", "exceeds the limit"),
            (
                frame(kind::CONTROL, b"\"done\"")[..9].to_vec(),
                "unavailable",
                "ended before",
            ),
        ] {
            let (mut channel, mut far) = channel();
            far.write_all(&sent).await.unwrap();
            drop(far);
            let error = channel.answer().await.unwrap_err();
            assert_eq!(error.code().name(), code, "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_agent_is_not_waited_for_for_ever() {
        let (mut channel, _far) = channel();
        assert!(matches!(channel.ask(&Request::Ping).await, Err(Error::Silent(_))));
    }

    #[tokio::test]
    async fn what_is_there_of_a_large_frame_is_of_the_tenants_memory() {
        let (mut channel, mut far) = channel();
        let share = Memory::new(4 * ORDINARY).share();
        (channel.held, channel.memory) = (share.nothing(), share.clone());
        let large = frame(kind::STDOUT, &vec![0; 3 * ORDINARY]);
        let (begun, rest) = large.split_at(2 * ORDINARY);
        let (begun, rest) = (begun.to_vec(), rest.to_vec());
        let (go_on, told) = tokio::sync::oneshot::channel::<()>();
        let writer = tokio::spawn(async move {
            // The length alone is nothing yet.
            far.write_all(&begun).await.unwrap();
            told.await.unwrap();
            far.write_all(&rest).await.unwrap();
            far
        });
        tokio::select! {
            biased;
            frame = channel.next() => panic!("{frame:?}"),
            () = tokio::time::sleep(Duration::from_millis(200)) => {}
        }
        assert!(share.has(ORDINARY) && !share.has(3 * ORDINARY));
        go_on.send(()).unwrap();
        assert!(matches!(channel.next().await, Ok(Frame::Bytes(..))));
        assert!(share.has(4 * ORDINARY));
        // Where there is no memory for it, nothing more of it is waited for.
        let _all = share.hold(4 * ORDINARY);
        let mut far = writer.await.unwrap();
        let writes = tokio::spawn(async move { far.write_all(&large).await });
        assert!(matches!(channel.next().await, Err(Error::Memory(_))));
        drop(channel);
        drop(writes.await);
    }

    #[test]
    fn an_unexpected_answer_is_named_and_not_repeated() {
        let error = unexpected(&Reply::Refused {
            message: "x".repeat(1000),
        });
        assert!(error.to_string().len() < 150, "{error}");
    }
}
