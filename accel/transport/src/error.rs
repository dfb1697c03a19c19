//! How a call, or a wait for one, can end without a record.

use std::io;
use std::time::Duration;

use wire::packet::PacketError;

/// What went wrong on the way of a record.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The other side has ended, or hung up.
    #[error("the other side of the accelerator's connection has ended; connect again")]
    PeerGone,
    /// It is there, and did not answer in time.
    #[error("{what} did not come within {} ms; the other side is there: it is busy, or hangs", waited.as_millis())]
    Deadline {
        /// What was waited for.
        what: &'static str,
        /// How long.
        waited: Duration,
    },
    /// It did what the protocol does not allow.
    #[error("the other side of the accelerator's connection broke the protocol: {0}")]
    Protocol(#[from] Protocol),
    /// The kernel refused something.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was to be done.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// How the protocol was broken.
#[derive(Debug, thiserror::Error)]
pub enum Protocol {
    /// In a ring.
    #[error(transparent)]
    Ring(#[from] wire::ring::Error),
    /// By the window's header, or by memory that is none.
    #[error(transparent)]
    Window(#[from] accel_window::Error),
    /// By a number out of order on a stream.
    #[error("a record has the sequence number {got} where {expected} is next")]
    Sequence {
        /// What comes next.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// By words about the arena on a stream that mean nothing, or that this side does not hear.
    #[error("{what} with these words says nothing of the arena; 1 and 2 do, of bytes that are there")]
    Frame {
        /// The first of them.
        what: u64,
    },
    /// By an answer to another request.
    #[error("request {expected} was answered by a record with the number {got}")]
    Answer {
        /// What was asked.
        expected: u64,
        /// What was answered.
        got: u64,
    },
    /// By what was said when they met.
    #[error("the {packet} packet is unsound: {reason}")]
    Greeting {
        /// Which one.
        packet: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// They have nothing in common, as the server says.
    #[error("the server refused the connection: {0}")]
    Refused(String),
}

impl Error {
    /// What the kernel refused.
    pub(crate) fn io<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Io {
            what,
            source: source.into(),
        }
    }

    /// Of a packet that was to come or go.
    pub(crate) fn packet(error: PacketError, what: &'static str, waited: Duration) -> Self {
        match error {
            PacketError::Closed => Self::PeerGone,
            PacketError::Late => Self::Deadline { what, waited },
            other => Self::Io {
                what: "greet the other side",
                source: io::Error::other(other),
            },
        }
    }
}

impl From<wire::ring::Error> for Error {
    fn from(error: wire::ring::Error) -> Self {
        Self::Protocol(error.into())
    }
}

impl From<accel_window::Error> for Error {
    fn from(error: accel_window::Error) -> Self {
        match error {
            accel_window::Error::Io { what, source } => Self::Io { what, source },
            other => Self::Protocol(other.into()),
        }
    }
}
