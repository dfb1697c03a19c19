//! A directory that is watched: what the agent tells of it, as events, with what is there now if that was asked for. Streams them; those
//! that are polled (`polled`) take them from here, too.

use std::collections::VecDeque;
use std::sync::Arc;

use agent_api::message::Reply;
use agent_api::{FsRequest, OsText, WatchEvent, WatchEventKind};

use super::messages::{EntryInfo, EventType, FilesystemEvent, WatchDir, Watched};
use super::service::{ask, ask_on, home};
use crate::agent::{Channel, Frame, Reach, failed, unexpected};
use crate::connect::Events;
use crate::error::Error;
use crate::state::State;

/// Begins to watch, and answers with what happens.
pub(super) async fn stream(state: &State, user: Option<String>, watch: WatchDir) -> Result<Stream, Error> {
    Ok(Stream {
        watch: Watch::begin(state, user, watch).await?,
        begun: false,
    })
}

/// A directory that is watched.
pub(super) struct Watch {
    channel: Channel,
    reach: Arc<Reach>,
    user: Option<String>,
    path: OsText,
    include_entry: bool,
    /// What was told and not taken yet: one frame's worth at most.
    events: VecDeque<WatchEvent>,
    /// Where entries are asked for, if they are wanted.
    looker: Option<Channel>,
}

impl Watch {
    /// Begins to watch.
    pub(super) async fn begin(state: &State, user: Option<String>, watch: WatchDir) -> Result<Self, Error> {
        let path = home(watch.path);
        let request = FsRequest::Watch {
            path: path.clone(),
            recursive: watch.recursive,
        };
        let (channel, user, reply) = ask(state, user.as_deref(), request).await?;
        let looker = match watch.include_entry {
            // There before the first event, which then is not held up.
            true => Some(state.open().await?.0),
            false => None,
        };
        match reply {
            Reply::Done => Ok(Self {
                channel,
                reach: Arc::clone(&state.reach),
                user,
                path,
                include_entry: watch.include_entry,
                events: VecDeque::new(),
                looker,
            }),
            other => Err(unexpected(&other)),
        }
    }

    /// Waits for what happens next. Nothing is lost if it is not waited for to the end.
    pub(super) async fn next(&mut self) -> Result<FilesystemEvent, Error> {
        let event = loop {
            if let Some(event) = self.events.front() {
                break event.clone();
            }
            match self.channel.next().await? {
                Frame::Reply(Reply::Watched(events)) => self.events.extend(events),
                Frame::Reply(other) => return Err(unexpected(&failed(other)?)),
                Frame::Bytes(kind, _) => {
                    return Err(Error::Agent(format!("a frame of kind {kind} came from a watch")));
                }
            }
        };
        let kind = kind(event.kind)?;
        let entry = match kind {
            // What is there now is something else than what is gone.
            EventType::Remove | EventType::Rename => None,
            _ if !self.include_entry => None,
            _ => self.look(&event.name).await,
        };
        // Only now: whoever stops waiting above finds the event again.
        self.events.pop_front();
        Ok(FilesystemEvent {
            name: event.name.to_string(),
            kind,
            entry,
        })
    }

    /// What is there now, if anything is and can be asked for.
    async fn look(&mut self, name: &OsText) -> Option<EntryInfo> {
        // Taken, so that one whose answer was not waited for is not asked again.
        let mut looker = match self.looker.take() {
            Some(looker) => looker,
            None => self.reach.open().await.ok()?.0,
        };
        let path = OsText::from([self.path.as_bytes(), b"/", name.as_bytes()].concat());
        let reply = ask_on(&mut looker, self.user.as_deref(), FsRequest::Stat { path }).await;
        if !matches!(reply, Err(Error::Lost(_) | Error::Silent(_) | Error::Agent(_))) {
            self.looker = Some(looker);
        }
        match reply {
            Ok(Reply::Entry(entry)) => Some(EntryInfo::from(*entry)),
            _ => None,
        }
    }
}

fn kind(kind: WatchEventKind) -> Result<EventType, Error> {
    Ok(match kind {
        WatchEventKind::Create => EventType::Create,
        WatchEventKind::Write => EventType::Write,
        WatchEventKind::Remove => EventType::Remove,
        WatchEventKind::Rename => EventType::Rename,
        WatchEventKind::Attributes => EventType::Chmod,
        WatchEventKind::Lost => {
            return Err(Error::DataLoss(
                "so much happened in the directory that some of it was not seen: list it, and watch it again"
                    .to_owned(),
            ));
        }
    })
}

/// The same as a stream of messages.
pub(super) struct Stream {
    watch: Watch,
    begun: bool,
}

impl Events for Stream {
    type Message = Watched;

    async fn next(&mut self) -> Result<Option<Watched>, Error> {
        if !self.begun {
            self.begun = true;
            return Ok(Some(Watched::Start {}));
        }
        Ok(Some(Watched::Filesystem(Box::new(self.watch.next().await?))))
    }

    fn keepalive(&self) -> Watched {
        Watched::Keepalive {}
    }
}
