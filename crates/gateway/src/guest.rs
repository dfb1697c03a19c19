//! The way into a sandbox: a connection to its agent, which the node hands out, and from there one to a TCP port of its loopback
//! addresses. No byte of these passes the node's daemon. A guest is not trusted: what it says is bounded in size and time.

use std::io;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::time::Duration;

use agent_api::message::{Reply as AgentReply, Request as AgentRequest, kind};
use agent_api::{ExecRequest, RequestFailureKind};
use envd::Opened;
use node_api::{Reply, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use wire::{HEADER_LEN, Header};

use crate::Error;
use crate::node::{Nodes, Owner};

/// The version of the agent's protocol that came with [`AgentRequest::Connect`].
const CONNECTS: u16 = 3;

/// How long a guest may take to connect to a port of its own.
const CONNECT: Duration = Duration::from_secs(10);

/// The most bytes of a guest's answer to that.
const MAX_ANSWER: usize = 16 << 10;

/// Where a sandbox's agent is reached.
#[derive(Clone)]
pub struct Guest {
    nodes: Nodes,
    id: String,
}

/// Why there is no connection to a sandbox's port.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PortError {
    /// The sandbox's agent cannot be reached.
    #[error(transparent)]
    Agent(#[from] Error),
    /// Nothing listens there.
    #[error("nothing listens at port {0}")]
    Closed(u16),
    /// The sandbox is older than that.
    #[error(
        "the sandbox's agent speaks version {0} of its protocol, which has no way to a port: make the sandbox anew"
    )]
    Old(u16),
    /// The agent refused for another reason.
    #[error("the sandbox's agent refused: {0}")]
    Refused(String),
    /// The connection broke.
    #[error("the connection to the sandbox's agent broke")]
    Broken(#[from] io::Error),
    /// It took too long.
    #[error("the sandbox's agent did not answer in {} s", CONNECT.as_secs())]
    Late,
    /// What it said is no answer.
    #[error("the sandbox's agent answered with something that is not understood")]
    Malformed,
}

impl Guest {
    pub(crate) fn new(nodes: Nodes, id: &str) -> Self {
        Self {
            nodes,
            id: id.to_owned(),
        }
    }

    /// A new connection to the agent.
    ///
    /// # Errors
    /// The sandbox does not run, or the node cannot be asked.
    pub async fn connect(&self) -> Result<Opened, Error> {
        let (stream, command, version) = self.open().await?;
        stream
            .set_nonblocking(true)
            .and_then(|()| UnixStream::from_std(stream))
            .map_err(Error::host("use an agent's connection"))
            .map(|stream| Opened {
                stream,
                command,
                version,
            })
    }

    /// The same for a thread that blocks.
    pub(crate) async fn connect_blocking(&self) -> Result<(StdUnixStream, ExecRequest), Error> {
        let (stream, command, _) = self.open().await?;
        Ok((stream, command))
    }

    async fn open(&self) -> Result<(StdUnixStream, ExecRequest, u16), Error> {
        let request = Request::Exec {
            sandbox: self.id.clone(),
        };
        // Whoever comes this far has shown the sandbox's token, or it is public.
        let answer = self.nodes.ask(&Owner::Gateway, request).await?;
        let Reply::Agent { command, version, .. } = answer.reply else {
            return Err(Error::Unexpected("exec"));
        };
        let stream = answer.fds.into_iter().next().ok_or(Error::Unexpected("an agent"))?;
        let version = version.unwrap_or(agent_api::PROTOCOL.oldest);
        Ok((StdUnixStream::from(stream), *command, version))
    }

    /// A new connection to a port of its loopback addresses.
    pub(crate) async fn connect_port(&self, port: u16) -> Result<UnixStream, PortError> {
        let opened = self.connect().await?;
        if opened.version < CONNECTS {
            return Err(PortError::Old(opened.version));
        }
        let mut stream = opened.stream;
        match tokio::time::timeout(CONNECT, ask_for_port(&mut stream, port)).await {
            Ok(asked) => asked.map(|()| stream),
            Err(_) => Err(PortError::Late),
        }
    }
}

async fn ask_for_port(stream: &mut UnixStream, port: u16) -> Result<(), PortError> {
    let json = serde_json::to_vec(&AgentRequest::Connect { port }).map_err(|_| PortError::Malformed)?;
    let header = Header::encode(json.len(), kind::CONTROL, 0).map_err(|_| PortError::Malformed)?;
    stream.write_all(&[&header[..], &json[..]].concat()).await?;
    let mut header = [0; HEADER_LEN];
    stream.read_exact(&mut header).await?;
    let header = Header::decode(header).map_err(|_| PortError::Malformed)?;
    if header.kind != kind::CONTROL || header.length > MAX_ANSWER {
        return Err(PortError::Malformed);
    }
    let mut payload = vec![0; header.length];
    stream.read_exact(&mut payload).await?;
    match serde_json::from_slice(&payload).map_err(|_| PortError::Malformed)? {
        // The connection is the port's from here on: nothing behind this frame has been read.
        AgentReply::Done => Ok(()),
        AgentReply::RequestFailed(failure) if failure.kind == RequestFailureKind::NotFound => {
            Err(PortError::Closed(port))
        }
        AgentReply::RequestFailed(failure) => Err(PortError::Refused(failure.message)),
        AgentReply::Refused { message } => Err(PortError::Refused(message)),
        _ => Err(PortError::Malformed),
    }
}
