//! How the agent of one sandbox is reached; whoever serves the sandbox implements it. Knows nothing of what is said to the agent.

use std::pin::Pin;

use agent_api::ExecRequest;
use tokio::net::UnixStream;

/// The agent of one sandbox.
pub trait Guest: Send + Sync + 'static {
    /// A new connection to the agent, after its handshake and idle. One is made for each thing that is done.
    fn connect(&self) -> Connecting<'_>;
}

/// What [`Guest::connect`] is waited for with.
pub type Connecting<'a> = Pin<Box<dyn Future<Output = Result<Opened, GuestError>> + Send + 'a>>;

/// A connection to an agent.
#[derive(Debug)]
pub struct Opened {
    /// The stream; the next byte on it is a frame's first.
    pub stream: UnixStream,
    /// What all commands of the sandbox begin with: environment, directory and user. Nothing else of it is looked at.
    pub command: ExecRequest,
    /// The version of the agent's protocol that both sides speak.
    pub version: u16,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// There is no such sandbox, or it does not run.
    #[error("the sandbox was not found, or does not run")]
    NotRunning,
    /// The sandbox's agent is of a release that cannot do this; says what can be done.
    #[error("{0}")]
    TooOld(String),
    /// Too much is being asked at this moment, in one sentence: the same may work soon.
    #[error("{0}")]
    Busy(String),
    /// Anything else, in one sentence.
    #[error("{0}")]
    Other(String),
}
