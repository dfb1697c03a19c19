//! A guest's clients are saved with its machine, and go on where it is restored.
//!
//! ```text
//!   save:    who is served ─▶ no thread works on a record ─▶ window and state ─▶ file ─▶ they go on
//!   restore: window as it was ─▶ objects ─▶ Begin::Control with all numbers ─▶ streams dialled, Accept ─▶ served
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use accel_transport::Error;
use agent_api::accelerator::FromHost;
use wire::packet::PacketSocket;

use super::{Control, Guest};
use crate::saved::{Output, Refusal, Resumed, Saving, prepare, restore_all, save_all};
use crate::session::Client;

/// How often it is looked whether all clients are served.
const LOOK: Duration = Duration::from_millis(1);

/// How long clients on their way are waited for while the guest runs, and when it stands still: then most of them wait for the guest.
const ON_THEIR_WAY: Duration = Duration::from_secs(10);
const STANDING_STILL: Duration = Duration::from_millis(500);

/// A client that is known as long as this is there.
pub(super) struct Known<'g> {
    guest: &'g Guest,
    number: u64,
}

impl Drop for Known<'_> {
    fn drop(&mut self) {
        let known = self.guest.serving().remove(&self.number);
        drop(known);
    }
}

impl Guest {
    fn serving(&self) -> MutexGuard<'_, BTreeMap<u64, Saving>> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that the agent has not heard of yet.
    pub(super) fn resumed(&self) -> MutexGuard<'_, Vec<Resumed>> {
        self.resumed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread for each client of before. None of them is neither there nor counted as one that has a thread, for whoever saves meanwhile.
    pub(super) fn resume(self: &Arc<Self>, control: &Arc<Control>) -> io::Result<()> {
        self.resumed().drain(..).try_for_each(|resumed| {
            let client = resumed.number;
            self.begin(control, client, move |guest, control, watched| {
                guest.resume_client(control, resumed, watched);
            })
        })
    }

    /// All clients, when each that has a thread is served: none is on its way.
    fn all_served(&self, deadline: Instant) -> Result<MutexGuard<'_, BTreeMap<u64, Saving>>, Refusal> {
        loop {
            let resumed = self.resumed();
            let serving = self.serving();
            if resumed.is_empty() && self.asked.load(Ordering::SeqCst) == serving.len() {
                return Ok(serving);
            }
            drop((resumed, serving));
            if Instant::now() >= deadline {
                return Err(Refusal::OnItsWay);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// A client is served from now on.
    pub(super) fn know(&self, saving: Saving) -> Known<'_> {
        let number = saving.number;
        self.serving().insert(number, saving);
        Known { guest: self, number }
    }

    /// Has the back end make what is saved of programs, while the guest runs: it may compile for seconds, and remembers what came of it.
    pub fn prepare_save(&self) {
        // Where some stay on their way, saving says so.
        drop(self.all_served(Instant::now() + ON_THEIR_WAY));
        let clients: Vec<Arc<Client>> = self
            .serving()
            .values()
            .map(|saving| Arc::clone(&saving.client))
            .collect();
        clients.iter().for_each(|client| prepare(client));
    }

    /// Writes the window and all clients, none of which goes on before `hold` has returned, which is told the outcome. The guest does not
    /// run meanwhile.
    pub fn save(&self, output: &mut dyn Output, patience: Duration, hold: impl FnOnce(&Result<(), Refusal>)) {
        let deadline = Instant::now() + patience;
        let serving = match self.all_served(deadline.min(Instant::now() + STANDING_STILL)) {
            Ok(serving) => serving,
            Err(refusal) => return hold(&Err(refusal)),
        };
        let clients: Vec<Saving> = serving.values().cloned().collect();
        let (backend, _) = self.server.parts();
        let (held, outcome) = match save_all(backend, &clients, (output, &self.slots), deadline) {
            Ok(held) => (held, Ok(())),
            Err(refusal) => (Vec::new(), Err(refusal)),
        };
        hold(&outcome);
        drop((held, serving));
    }

    /// Makes the clients of a file again, for a guest whose window has the bytes of then.
    ///
    /// # Errors
    /// [`Refusal`]: nothing is left of it.
    pub fn restore(&self, file: &File) -> Result<(), Refusal> {
        let slot = |name: &str| self.slots.take_again(name);
        let resumed = restore_all(self.server.parts(), file, &slot)?;
        *self.resumed() = resumed;
        Ok(())
    }

    /// Nobody goes on with what is in the window: its clients see that at once.
    ///
    /// # Errors
    /// The window is none.
    pub fn abandon(&self) -> Result<(), accel_window::Error> {
        self.slots.abandon()
    }

    /// Goes on with a client.
    pub(super) fn resume_client(&self, control: &Control, resumed: Resumed, watched: PacketSocket) {
        let Resumed {
            number,
            slot,
            agreed,
            window,
            positions,
            client,
        } = resumed;
        let connected = || -> Result<_, Error> {
            let streams = self.streams(number, agreed.pairs)?;
            agreed.resume((window, &positions), streams, watched)
        };
        let connection = match connected() {
            Ok(connection) => connection,
            Err(error) => {
                log::warn!("a program that used the accelerator when its machine was saved cannot go on: {error}");
                client.end();
                return;
            }
        };
        control.say(&FromHost::Accept {
            client: number,
            file: None,
            pairs: agreed.pairs,
            welcome: String::new(),
        });
        let saving = |served: &Arc<Client>| {
            self.know(Saving {
                number,
                slot: Some(slot.name().to_owned()),
                agreed,
                client: Arc::clone(served),
            })
        };
        if let Err(error) = self.server.serve_saved(connection, Some(Arc::clone(&client)), saving) {
            log::warn!("a client's connection has ended: {error}");
        }
    }
}
