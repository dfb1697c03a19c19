//! What a process writes and how it ends, as a stream of messages. The process outlives the stream. Knows nothing of how it was started.

use super::kept::{self, Note};
use super::messages::{Connect, Data, End, Event, Streamed};
use crate::agent::{Happening, Listener};
use crate::connect::Events;
use crate::connect::json::Base64;
use crate::error::Error;
use crate::state::State;

/// Attaches to a process that runs; what it writes from now on is the answer.
pub(super) async fn connect(state: &State, connect: Connect) -> Result<Output, Error> {
    let (command, note) = kept::listen(state, connect.process.which()?).await?;
    Ok(Output::new(command, &note))
}

/// A process that is listened to.
pub(super) struct Output {
    command: Listener,
    pty: bool,
    stage: Stage,
}

enum Stage {
    /// Nothing was said yet.
    New,
    /// It runs.
    Running,
    /// Its end was told.
    Ended,
}

impl Output {
    pub(super) fn new(command: Listener, note: &Note) -> Self {
        Self {
            command,
            pty: note.pty,
            stage: Stage::New,
        }
    }

    fn event(&mut self, happening: Happening) -> Event {
        match happening {
            Happening::Stdout(bytes) if self.pty => Event::Data(Data::Pty(Base64(bytes))),
            Happening::Stdout(bytes) => Event::Data(Data::Stdout(Base64(bytes))),
            Happening::Stderr(bytes) => Event::Data(Data::Stderr(Base64(bytes))),
            Happening::Exited(status) => {
                self.stage = Stage::Ended;
                Event::End(End::from(status))
            }
        }
    }
}

impl Events for Output {
    type Message = Streamed;

    async fn next(&mut self) -> Result<Option<Streamed>, Error> {
        let event = match self.stage {
            Stage::New => {
                self.stage = Stage::Running;
                Event::Start { pid: self.command.pid }
            }
            Stage::Running => {
                let happening = self.command.next().await?;
                self.event(happening)
            }
            Stage::Ended => return Ok(None),
        };
        Ok(Some(Streamed { event }))
    }

    fn keepalive(&self) -> Streamed {
        Streamed {
            event: Event::Keepalive {},
        }
    }
}
