//! What can go wrong in the agent itself. What goes wrong with a command is an `ExecFailure` and goes to the client.

use std::io;

/// An error of the agent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A connection failed, or its peer did not follow the protocol.
    #[error("connection: {0}")]
    Wire(#[from] wire::Error),
    /// A message that cannot be read.
    #[error("connection: a request cannot be read: {0}")]
    Malformed(#[source] serde_json::Error),
    /// A frame that does not belong here.
    #[error("connection: a frame of kind {kind} with {length} bytes does not belong here")]
    UnexpectedFrame {
        /// Its kind.
        kind: u16,
        /// Its length.
        length: usize,
    },
    /// More standard input than the window allows.
    #[error("connection: {got} bytes of standard input are under way, the window is {window}")]
    WindowExceeded {
        /// Bytes queued and new.
        got: usize,
        /// The limit.
        window: usize,
    },
    /// Bytes for a port that was not open yet. They must not be taken for requests.
    #[error("connection: something was sent for port {port} before the answer that it is open")]
    EarlyBytes {
        /// The port.
        port: u16,
    },
    /// The system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The answer.
        #[source]
        source: io::Error,
    },
    /// A request that makes no sense here.
    #[error("{0}")]
    Refused(String),
}

impl Error {
    /// A failed system call, with what it was for.
    pub(crate) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::System {
            what,
            source: source.into(),
        }
    }
}
