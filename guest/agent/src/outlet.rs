//! Where a command's output goes, and what is told about its streams: to the one client whose command it is, to all who are
//! attached to one that is kept, or nowhere. Knows nothing of pipes and processes.

use agent_api::message::{Reply, kind};
use agent_api::{Duplex, ExitStatus, OutputStream};
use wire::FrameWriter;

use crate::Error;
use crate::kept::Place;
use crate::stdin::Source;

/// What frames are sent to: a connection, of whatever kind.
pub(crate) trait Sink: Send + Sync {
    /// Sends a whole frame, and waits for as long as that takes.
    fn send(&self, kind: u16, payload: &[u8]) -> Result<(), Error>;

    /// Ends the connection, in both directions.
    fn close(&self);
}

impl<S: Duplex> Sink for FrameWriter<S> {
    fn send(&self, kind: u16, payload: &[u8]) -> Result<(), Error> {
        Ok(Self::send(self, kind, 0, payload)?)
    }

    fn close(&self) {
        self.with(Duplex::close);
    }
}

/// A reply as a frame's payload.
pub(crate) fn encode(reply: &Reply) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(reply).map_err(Error::Malformed)
}

/// The kind of frames that carry a stream.
pub(crate) fn frame_kind(stream: OutputStream) -> u16 {
    match stream {
        OutputStream::Stdout => kind::STDOUT,
        OutputStream::Stderr => kind::STDERR,
    }
}

/// The client is gone whose command it is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lost;

/// Who gets it.
pub(crate) enum Outlet<'a> {
    /// Nobody waits for the command.
    Nobody,
    /// The command's client.
    Client(&'a dyn Sink),
    /// Those who are attached. Any of them may leave, and nothing is lost.
    Attached(Place),
}

impl Outlet<'_> {
    /// Some output.
    pub(crate) fn output(&self, stream: OutputStream, bytes: &[u8]) -> Result<(), Lost> {
        match self {
            Self::Nobody => Ok(()),
            Self::Client(client) => client.send(frame_kind(stream), bytes).map_err(|_| Lost),
            Self::Attached(place) => {
                place.audience().output(stream, bytes);
                Ok(())
            }
        }
    }

    /// The command has closed one of its output streams.
    pub(crate) fn output_closed(&self, stream: OutputStream) -> Result<(), Lost> {
        self.tell(&Reply::OutputClosed { stream })
    }

    /// Nobody in the command reads its input any more.
    pub(crate) fn input_unread(&self) -> Result<(), Lost> {
        self.tell(&Reply::StdinClosed)
    }

    /// A client has ended the input. To others it is the same as if the command did not read it.
    pub(crate) fn input_closed(&self) {
        if let Self::Attached(place) = self {
            place.audience().tell(&Reply::StdinClosed);
        }
    }

    /// The command has some input.
    pub(crate) fn input_taken(&self, taken: &[(Source, usize)]) -> Result<(), Lost> {
        for (source, bytes) in taken {
            let notice = Reply::StdinTaken {
                bytes: u32::try_from(*bytes).unwrap_or(u32::MAX),
            };
            match self {
                Self::Client(client) if *source == Source::CLIENT => send(*client, &notice)?,
                Self::Nobody | Self::Client(_) => {}
                Self::Attached(place) => place.audience().tell_source(*source, &notice),
            }
        }
        Ok(())
    }

    /// The command has ended, and all its output went out.
    pub(crate) fn exited(&self, status: ExitStatus) -> Result<(), Lost> {
        match self {
            Self::Attached(place) => {
                place.end(status);
                Ok(())
            }
            _ => self.tell(&Reply::Exited(status)),
        }
    }

    fn tell(&self, notice: &Reply) -> Result<(), Lost> {
        match self {
            Self::Nobody => Ok(()),
            Self::Client(client) => send(*client, notice),
            Self::Attached(place) => {
                place.audience().tell(notice);
                Ok(())
            }
        }
    }
}

fn send(client: &dyn Sink, notice: &Reply) -> Result<(), Lost> {
    let frame = encode(notice).map_err(|_| Lost)?;
    client.send(kind::CONTROL, &frame).map_err(|_| Lost)
}
