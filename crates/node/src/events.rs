//! Who is told what happens. Somebody who does not listen loses events, and nobody waits for him.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Mutex, PoisonError};

use node_api::{Ended, EventKind, MemoryState, NodeEvent, Sandbox};

/// Events that may wait for one listener.
const BACKLOG: usize = 1024;

/// The listeners.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<Vec<SyncSender<NodeEvent>>>);

impl Events {
    /// Everything from now on.
    pub(crate) fn listen(&self) -> Receiver<NodeEvent> {
        let (sender, receiver) = sync_channel(BACKLOG);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        receiver
    }

    /// Tells all.
    pub(crate) fn tell(&self, kind: EventKind, sandbox: &Sandbox) {
        self.tell_all(kind, sandbox, None, None);
    }

    /// The same of something that its memory tells more of.
    pub(crate) fn tell_memory(&self, kind: EventKind, sandbox: &Sandbox, memory: Option<MemoryState>) {
        self.tell_all(kind, sandbox, None, memory);
    }

    /// The same of something that went wrong.
    pub(crate) fn tell_why(&self, kind: EventKind, sandbox: &Sandbox, why: String) {
        self.tell_all(kind, sandbox, Some(why), None);
    }

    fn tell_all(&self, kind: EventKind, sandbox: &Sandbox, why: Option<String>, memory: Option<MemoryState>) {
        let ended: Option<Ended> = sandbox.ended.clone().filter(|_| kind == EventKind::Exit);
        let event = NodeEvent {
            time_ns: crate::clock::now_ns(),
            kind,
            id: sandbox.id.clone(),
            name: sandbox.name.clone(),
            ended,
            why,
            memory: memory.map(Box::new),
        };
        let mut listeners = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|listener| match listener.try_send(event.clone()) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                log::warn!("a client reads events too slowly, and one was dropped");
                true
            }
            Err(TrySendError::Disconnected(_)) => false,
        });
    }
}
