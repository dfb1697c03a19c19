//! The way to one sandbox's agent, and how many may be on it at once: an agent serves 256 connections, of which whoever runs the sandbox
//! needs some, too. Knows no request.

use std::sync::Arc;
use std::time::Duration;

use agent_api::{ExecRequest, PROTOCOL};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Channel;
use crate::error::Error;
use crate::guest::{Guest, GuestError, Opened};
use crate::memory::Share;

/// How many connections there are at once.
const MAX_CONNECTIONS: usize = 160;

/// How long one more is waited for.
const ROOM_LIMIT: Duration = Duration::from_secs(10);

/// How long the agent may take to be reached.
const CONNECT_LIMIT: Duration = Duration::from_secs(60);

/// The way to an agent.
pub(crate) struct Reach {
    guest: Arc<dyn Guest>,
    room: Arc<Semaphore>,
    memory: Share,
}

impl Reach {
    pub(crate) fn new(guest: Arc<dyn Guest>, memory: Share) -> Self {
        Self {
            guest,
            room: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            memory,
        }
    }

    /// Whether the agent is there.
    pub(crate) async fn check(&self) -> Result<(), Error> {
        match self.connect().await {
            // It runs, whatever it can do.
            Ok(_) | Err(Error::AgentTooOld(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// A new connection, and what the sandbox's commands begin with.
    pub(crate) async fn open(&self) -> Result<(Channel, ExecRequest), Error> {
        let Ok(Ok(place)) = timeout(ROOM_LIMIT, Arc::clone(&self.room).acquire_owned()).await else {
            return Err(Error::Busy(MAX_CONNECTIONS));
        };
        let opened = self.connect().await?;
        // Commands that are kept and requests about files came with version 3.
        if opened.version < PROTOCOL.version {
            return Err(Error::AgentTooOld(format!(
                "the sandbox was made by an older release of Basalt: its agent speaks version {} of its protocol, and this needs version \
                 {}; make the sandbox again from a template of this release",
                opened.version, PROTOCOL.version
            )));
        }
        Ok((Channel::new(opened.stream, place, self.memory.clone()), opened.command))
    }

    async fn connect(&self) -> Result<Opened, Error> {
        match timeout(CONNECT_LIMIT, self.guest.connect()).await {
            Err(_) => Err(Error::Silent(CONNECT_LIMIT)),
            Ok(Err(GuestError::NotRunning)) => Err(Error::NotRunning),
            Ok(Err(GuestError::TooOld(message))) => Err(Error::AgentTooOld(message)),
            Ok(Err(GuestError::Busy(message))) => Err(Error::Overloaded(message)),
            Ok(Err(GuestError::Other(message))) => Err(Error::Unreachable(message)),
            Ok(Ok(opened)) => Ok(opened),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;
    use crate::guest::Connecting;
    use crate::memory::Memory;

    /// The version of an agent, or why there is none.
    type Answer = fn() -> Result<u16, GuestError>;

    /// Says the same to everybody.
    struct Says(Answer);

    impl Guest for Says {
        fn connect(&self) -> Connecting<'_> {
            Box::pin(async {
                Ok(Opened {
                    version: (self.0)()?,
                    stream: UnixStream::pair().unwrap().0,
                    command: ExecRequest::default(),
                })
            })
        }
    }

    fn reach(says: Answer) -> Reach {
        Reach::new(Arc::new(Says(says)), Memory::default().share())
    }

    #[tokio::test]
    async fn why_there_is_no_connection_is_told() {
        let refusals: [(Answer, &str, bool); 5] = [
            (|| Err(GuestError::NotRunning), "unavailable", false),
            (|| Err(GuestError::Other("gone".to_owned())), "unavailable", false),
            (|| Err(GuestError::Busy("busy".to_owned())), "unavailable", false),
            (|| Err(GuestError::TooOld("old".to_owned())), "unimplemented", true),
            (|| Ok(2), "unimplemented", true),
        ];
        for (says, code, runs) in refusals {
            let reach = reach(says);
            let error = reach.open().await.unwrap_err();
            assert_eq!(error.code().name(), code, "{error}");
            assert_eq!(reach.check().await.is_ok(), runs, "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn there_are_so_many_connections_and_no_more() {
        let reach = reach(|| Ok(PROTOCOL.version));
        let mut open = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            open.push(reach.open().await.unwrap());
        }
        let error = reach.open().await.unwrap_err();
        assert_eq!(error.code().name(), "resource_exhausted");
        assert_eq!(error.status().as_u16(), 429);
        reach.check().await.unwrap();
        open.pop();
        reach.open().await.unwrap();
    }
}
