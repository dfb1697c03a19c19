//! What can go wrong between a client and an agent.

use std::io;
use std::time::Duration;

use crate::message::{ExecFailure, Reply};

/// An error of the client.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection failed, or the handshake did.
    #[error(transparent)]
    Wire(#[from] wire::Error),
    /// The agent closed the connection.
    #[error("the agent closed the connection while {0}; its machine has probably stopped")]
    Closed(&'static str),
    /// The agent did not answer in time.
    #[error("the agent did not answer within {0:?}")]
    Silent(Duration),
    /// Nothing came within the limit that was set on the connection.
    #[error("the agent was silent for longer than allowed")]
    TimedOut,
    /// The agent said no.
    #[error("the agent refused: {0}")]
    Refused(String),
    /// The command did not start.
    #[error(transparent)]
    Exec(#[from] ExecFailure),
    /// A reply that does not belong here.
    #[error("the agent answered {0:?}, which is no answer to the request")]
    Unexpected(Box<Reply>),
    /// A frame of a kind that does not belong here.
    #[error("the agent sent a frame of kind {0}, which is not expected here")]
    UnexpectedFrame(u16),
    /// A message that cannot be read.
    #[error("a message of the agent cannot be read: {0}")]
    Malformed(#[source] serde_json::Error),
    /// The command has ended; its input goes nowhere.
    #[error("the command has ended")]
    Ended,
    /// A file to upload has another length than was announced.
    #[error("the file ended after {got} of {want} bytes while it was uploaded")]
    ShortFile {
        /// Bytes read.
        got: u64,
        /// Bytes announced.
        want: u64,
    },
    /// Something local: standard input, output, the terminal, a file.
    #[error("{what}: {source}")]
    Local {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// Signals can be caught once in a process.
    #[error("signals are caught already in this process")]
    SignalsTaken,
}

impl Error {
    /// The exit code for the local process: that of a command that did not start, or 125, as podman has it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exec(failure) => failure.kind.exit_code(),
            _ => 125,
        }
    }

    pub(crate) fn local(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |source| Self::Local {
            what,
            source: source.into(),
        }
    }
}
