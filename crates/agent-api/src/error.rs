//! What can go wrong between a client and an agent.

use std::io;
use std::time::Duration;

use crate::message::{ExecFailure, Reply, RequestFailure};

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
    /// The agent is older than what was asked for.
    #[error(
        "the machine's agent is of an older release: it speaks version {spoken} of its protocol, and this needs version {version}; start the \
         sandbox again, or make a new snapshot or template of this release"
    )]
    TooOld {
        /// What both speak.
        spoken: u16,
        /// What would be needed.
        version: u16,
    },
    /// The command did not start.
    #[error(transparent)]
    Exec(#[from] ExecFailure),
    /// What was asked for could not be done, for a reason that has a name.
    #[error(transparent)]
    RequestFailed(#[from] RequestFailure),
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
    /// The output of a command was asked for on a connection that is attached to it without.
    #[error("this connection is attached to the command without its output: attach with it")]
    NoOutput,
    /// A list that is too long.
    #[error(
        "the agent lists more kept commands than it can have: {count} with {text} bytes of tags and notes, and perhaps more"
    )]
    TooManyKept {
        /// Commands so far.
        count: usize,
        /// Bytes of their tags and notes.
        text: usize,
    },
    /// A file to upload has another length than was announced.
    #[error("the file ended after {got} of {want} bytes while it was uploaded")]
    ShortFile {
        /// Bytes read.
        got: u64,
        /// Bytes announced.
        want: u64,
    },
    /// A list of files is longer than any that an agent sends, or than is taken here.
    #[error("the agent's list of files has {entries} entries in {bytes} bytes and goes on; ask for less of it")]
    LongList {
        /// Entries until then.
        entries: usize,
        /// Bytes of its answers.
        bytes: usize,
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
