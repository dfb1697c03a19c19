//! What is done when the host has no space left: a VM that its VMM has stopped is shown so and goes on when there is room, and a
//! change that could not be written is written then.
//!
//! ```text
//!  a disk's write fails ─► VMM pauses the VM, tells it ─► hear ─► see_stop: Paused (no space)
//!                                                                      │
//!        Running ◄── resumed, its requests begin anew ◄── tend: room? ◄┘   (or `basalt unpause`)
//! ```
//! A thread of its own looks at the free space every two seconds, as long as something lacks any, and waits otherwise.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::space;
use node_api::{EventKind, PauseReason, State};
use vmm_api::{StopReason, VmmClient};

use crate::Error;
use crate::node::Node;
use crate::resources::space::{LEAST, RESERVE};
use crate::sandbox::entry::Entry;
use crate::store::database::Stored;
use crate::thread;
use crate::vmm::vm::pause_reason;

/// Between two looks at the free space.
const PERIOD: Duration = Duration::from_secs(2);

/// One that stops again and again is tried less and less often.
const LONGEST: Duration = Duration::from_secs(60);

/// When those that lack space are tried next, and how long is waited after that.
type Retries = BTreeMap<String, (Instant, Duration)>;

impl Node {
    /// Looks after what lacks space from here on.
    pub(crate) fn start_tending(self: &Arc<Self>) -> Result<(), Error> {
        let node = Arc::clone(self);
        let work = move || {
            let mut retries = Retries::new();
            loop {
                while !node.tend(&mut retries) {
                    std::thread::sleep(PERIOD);
                }
                node.hold.lack.wait();
            }
        };
        thread::spawn("space", work)
    }

    /// Gives room to what lacks it, if there is some; whether nothing lacks any more.
    pub(crate) fn tend(self: &Arc<Self>, retries: &mut BTreeMap<String, (Instant, Duration)>) -> bool {
        let reserved = self.hold.reserve.keep();
        let entries: Vec<Arc<Entry>> = self.entries().values().cloned().collect();
        let mut lacking = self.undo_again() + self.devices.finish_resets();
        for entry in entries {
            let (unsaved, reason) = {
                let inner = entry.lock();
                (inner.unsaved && !inner.gone, inner.stored.sandbox.pause_reason)
            };
            if unsaved {
                match self.note_change(&entry, |_| ()) {
                    Ok(()) => (),
                    Err(error) => entry.lines.unwritten.say(|more| {
                        log::error!("the record of sandbox {} cannot be written: {error}{more}", entry.id);
                    }),
                }
                lacking += usize::from(entry.lock().unsaved);
            }
            match reason {
                Some(PauseReason::NoSpace) => {
                    lacking += 1;
                    if let Err(error) = self.retry(&entry, retries) {
                        entry
                            .lines
                            .stopped
                            .say(|more| log::warn!("sandbox {} cannot go on: {error}{more}", entry.id));
                    }
                }
                None => {
                    let settled = |(next, _): &(Instant, Duration)| Instant::now() > *next + LONGEST;
                    if retries.get(&entry.id).is_some_and(settled) {
                        retries.remove(&entry.id);
                    }
                }
            }
        }
        reserved && lacking == 0
    }

    fn retry(&self, entry: &Entry, retries: &mut Retries) -> Result<(), Error> {
        let directory = self.sandbox_paths(entry).directory;
        let free = space::available(&directory).map_err(Error::file("look for free space in", &directory))?;
        let now = Instant::now();
        let (next, pause) = retries.get(&entry.id).copied().unwrap_or((now, PERIOD));
        if free < self.room_to_go_on() || now < next {
            return Ok(());
        }
        retries.insert(entry.id.clone(), (now + pause, (pause * 2).min(LONGEST)));
        let Some(_operation) = entry.try_operate() else {
            return Ok(());
        };
        let Some(vm) = entry
            .vm()
            .filter(|_| entry.lock().stored.sandbox.pause_reason.is_some())
        else {
            return Ok(());
        };
        let info = vm.ask("it was to go on", VmmClient::info)?;
        if pause_reason(&info).is_some() {
            vm.ask("it was to go on", VmmClient::resume)?;
        }
        self.goes_on_with_space(entry)
    }

    /// How much has to be free before a guest writes on. What is to become the reserve is not for guests.
    fn room_to_go_on(&self) -> u64 {
        match self.hold.reserve.exists() {
            true => LEAST.bytes(),
            false => LEAST.bytes() + RESERVE.bytes(),
        }
    }

    /// Whether one that was stopped could go on.
    pub(crate) fn has_space_for(&self, entry: &Entry) -> bool {
        space::available(&self.sandbox_paths(entry).directory).is_ok_and(|free| free >= self.room_to_go_on())
    }

    /// It runs again.
    fn goes_on_with_space(&self, entry: &Entry) -> Result<(), Error> {
        self.note_change(entry, |stored| stored.sandbox.state = State::Running)?;
        log::info!("there is space again: sandbox {} goes on", entry.id);
        self.events.tell(EventKind::Resume, &entry.stored().sandbox);
        Ok(())
    }

    /// The VMM of a sandbox has said something without being asked. Called by the monitor, which must not wait.
    pub(crate) fn hear(self: &Arc<Self>, id: &str) {
        let Ok(entry) = self.find(id) else { return };
        let Some(vm) = entry.vm() else { return };
        match vm.take_stop() {
            Ok(None) => return,
            Ok(Some(StopReason::NoSpace { disks })) => {
                log::warn!(
                    "no space left on the host for what sandbox {id} writes (disk {}): it is paused until there is some; remove \
                     what is not needed (`basalt prune`, `basalt system df`)",
                    disks.join(", ")
                );
            }
            Err(error) => {
                log::info!("the VMM of sandbox {id} is not listened to: {error}");
                return;
            }
        }
        let node = Arc::clone(self);
        let work = move || {
            if let Err(error) = node.see_stop(&entry) {
                log::warn!("whether sandbox {} is stopped is not known: {error}", entry.id);
            }
        };
        if let Err(error) = thread::spawn("stopped", work) {
            log::error!("sandbox {id} is shown as one that runs, and is stopped: {error}");
        }
    }

    /// Its VMM has stopped it: whoever is busy with it may have let it go on or ended it meanwhile.
    fn see_stop(&self, entry: &Entry) -> Result<(), Error> {
        let _operation = entry.operate();
        let Some(vm) = entry.vm().filter(|_| entry.state() == State::Running) else {
            return Ok(());
        };
        let info = vm.ask("it was stopped by its VMM", VmmClient::info)?;
        if pause_reason(&info).is_none() {
            return Ok(());
        }
        self.note_change(entry, |stored| {
            stored.sandbox.state = State::Paused;
            stored.sandbox.pause_reason = Some(PauseReason::NoSpace);
        })?;
        self.events.tell(EventKind::NoSpace, &entry.stored().sandbox);
        self.hold.lack.tell();
        Ok(())
    }

    /// As [`Node::update`], for changes that have happened whatever can be written: where there is no space, memory has the change
    /// and the record follows when there is some. The next daemon finds such changes out by itself.
    pub(crate) fn note_change(&self, entry: &Entry, change: impl Fn(&mut Stored)) -> Result<(), Error> {
        match self.update(entry, &change) {
            Err(error) if error.is_no_space() => {
                entry.lines.unsaved.say(|more| {
                    log::warn!(
                        "the record of sandbox {} is written when there is space: {error}{more}",
                        entry.id
                    );
                });
                let mut inner = entry.lock();
                change(&mut inner.stored);
                inner.stored.sandbox.settle_pause();
                inner.unsaved = true;
                drop(inner);
                entry.notify();
                self.hold.lack.tell();
                Ok(())
            }
            Ok(()) => {
                entry.lock().unsaved = false;
                Ok(())
            }
            refused => refused,
        }
    }

    /// Writes to the database, with the reserve's room where there is no other.
    pub(crate) fn with_room<T>(&self, write: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
        self.hold.with_room(write)
    }
}
