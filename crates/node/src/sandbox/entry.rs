//! One sandbox in memory. Its record is in the database, too; whoever changes one changes both (`Node::update`).
//!
//! Two locks. `operation` is held by whoever starts, stops, pauses or removes the sandbox, for as long as that takes: each
//! of these has a deadline. `inner` is held for moments. `operation` comes first. Killing the VM needs neither.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use base::PciAddress;
use node_api::sandbox::Process;
use node_api::{Ended, State};
use observe::{Repeated, Span};

use crate::resources::budget::Promise;
use crate::store::database::Stored;
use crate::vmm::vm::Vm;

/// How often a line about a sandbox is said again.
const SAID_AGAIN: Duration = Duration::from_secs(60);

/// So many spans of a start are kept, about 10 KB; one that nobody looks at has 30.
const MAX_TRACE: usize = 64;

/// One sandbox.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) id: String,
    pub(crate) lines: Lines,
    operation: Mutex<()>,
    /// Held by whoever takes away what its machine has, with its turn or without, behind `operation` and before `inner`.
    ending: Mutex<()>,
    inner: Mutex<Inner>,
    changed: Condvar,
    /// What its last start was made of, in this daemon's life.
    trace: Mutex<Vec<Span>>,
}

/// Lines of the log that say the same of one sandbox as often as something is tried again with it.
#[derive(Debug)]
pub(crate) struct Lines {
    /// It was left on the way.
    pub(crate) interrupted: Repeated,
    /// Its record waits for space.
    pub(crate) unsaved: Repeated,
    /// Its record cannot be written, whatever space there is.
    pub(crate) unwritten: Repeated,
    /// It was stopped for want of space, and cannot go on.
    pub(crate) stopped: Repeated,
    /// DMA of its devices was refused.
    pub(crate) dma_fault: Repeated,
    /// Its time is over, and it runs on.
    pub(crate) overdue: Repeated,
}

impl Default for Lines {
    fn default() -> Self {
        let line = || Repeated::new(SAID_AGAIN);
        Self {
            interrupted: line(),
            unsaved: line(),
            unwritten: line(),
            stopped: line(),
            dma_fault: line(),
            overdue: line(),
        }
    }
}

/// What changes.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) stored: Stored,
    pub(crate) vm: Option<Arc<Vm>>,
    /// So many wait for its turn to stop it: whoever has that gives up what takes a time that nobody knows.
    stops: u32,
    /// A client of this daemon is tied to it, and says when it has all that it wants to know.
    pub(crate) attached: bool,
    /// It is in no table any more.
    pub(crate) gone: bool,
    /// What it has of the host as long as it has a machine, or is about to get one; and for its disk.
    machine: Option<Arc<Promise>>,
    disk: Option<Promise>,
    /// An operation of it did not come to its end, and could not be taken back: that is tried again.
    pub(crate) interrupted: bool,
    /// What its machine held could not all be given back when that had ended: that is tried again.
    pub(crate) unsettled: Option<Unsettled>,
    /// Devices that its machine was given, and its guest does not have yet, behind its start.
    pub(crate) coming: Vec<PciAddress>,
    /// How often devices were taken from its machine: whoever waits for one looks anew what there is.
    pub(crate) devices_taken: u64,
    /// Why devices that were to come behind the start did not.
    pub(crate) not_come: Option<String>,
    /// Why its memory was not brought to its size, which is tried again.
    pub(crate) memory_failed: Option<String>,
    /// The machine of which somebody tells when all of its memory is there.
    pub(crate) memory_followed: Option<Weak<Vm>>,
    /// So often was DMA of its devices refused by an IOMMU, as far as the kernel told that to this daemon.
    pub(crate) dma_faults: u64,
    /// Its record is older than what is known here, as there was no space for it.
    pub(crate) unsaved: bool,
}

/// The end of a machine that was not dealt with to its end.
#[derive(Clone, Debug)]
pub(crate) struct Unsettled {
    /// Whose end it was, as it is in the record: with another machine, or none, it is over.
    pub(crate) vmm: Option<Process>,
    /// How it ended; nothing of a sandbox that had exited before.
    pub(crate) ended: Option<Ended>,
}

impl Entry {
    pub(crate) fn new(stored: Stored) -> Arc<Self> {
        Arc::new(Self {
            id: stored.sandbox.id.clone(),
            lines: Lines::default(),
            operation: Mutex::new(()),
            ending: Mutex::new(()),
            inner: Mutex::new(Inner {
                stored,
                vm: None,
                stops: 0,
                attached: false,
                gone: false,
                machine: None,
                disk: None,
                interrupted: false,
                unsettled: None,
                coming: Vec::new(),
                devices_taken: 0,
                not_come: None,
                memory_failed: None,
                memory_followed: None,
                dma_faults: 0,
                unsaved: false,
            }),
            changed: Condvar::new(),
            trace: Mutex::default(),
        })
    }

    /// What its last start was made of.
    pub(crate) fn trace(&self) -> Vec<Span> {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// It was started, which was made of this.
    pub(crate) fn keep_trace(&self, spans: &[Span]) {
        let kept = spans.get(spans.len().saturating_sub(MAX_TRACE)..).unwrap_or_default();
        *self.trace.lock().unwrap_or_else(PoisonError::into_inner) = kept.to_vec();
    }

    /// Waits for its turn to change the sandbox's state.
    pub(crate) fn operate(&self) -> MutexGuard<'_, ()> {
        self.operation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same to stop it: whoever has its turn and waits for memory gives that up.
    pub(crate) fn operate_to_stop(&self) -> MutexGuard<'_, ()> {
        self.lock().stops += 1;
        self.notify();
        let turn = self.operate();
        self.lock().stops -= 1;
        turn
    }

    /// The same for who cannot wait; `None` when somebody has it.
    pub(crate) fn try_operate(&self) -> Option<MutexGuard<'_, ()>> {
        match self.operation.try_lock() {
            Ok(operation) => Some(operation),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The right to take away what its machine has. One that waits for it may find another machine, or none.
    pub(crate) fn ending(&self) -> MutexGuard<'_, ()> {
        self.ending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stored(&self) -> Stored {
        self.lock().stored.clone()
    }

    pub(crate) fn state(&self) -> State {
        self.lock().stored.sandbox.state
    }

    pub(crate) fn vm(&self) -> Option<Arc<Vm>> {
        self.lock().vm.clone()
    }

    /// What its machine was promised.
    pub(crate) fn promised(&self) -> Option<Arc<Promise>> {
        self.lock().machine.clone()
    }

    /// Its machine is promised this, until it has none any more.
    pub(crate) fn promise(&self, machine: Arc<Promise>) {
        self.lock().machine = Some(machine);
    }

    /// Its disk is promised this, until it is gone.
    pub(crate) fn promise_disk(&self, disk: Promise) {
        self.lock().disk = Some(disk);
    }

    /// It has no machine any more: what that was promised others may have, unless somebody holds it for the next one.
    pub(crate) fn take_promise(&self) -> Option<Arc<Promise>> {
        self.lock().machine.take()
    }

    /// Says that something has changed.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }

    /// Waits until `what` holds; false when `limit` is over before (`None`: for ever).
    pub(crate) fn wait(&self, limit: Option<Duration>, what: impl Fn(&Inner) -> bool) -> bool {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut inner = self.lock();
        while !what(&inner) {
            inner = match deadline {
                None => self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    let waited = self.changed.wait_timeout(inner, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }
}

impl Inner {
    /// Somebody waits for its turn to stop it.
    pub(crate) fn is_to_stop(&self) -> bool {
        self.stops > 0
    }

    /// Nothing of it is left.
    pub(crate) fn is_gone(&mut self) {
        self.gone = true;
        (self.machine, self.disk) = (None, None);
    }

    /// What was begun with it waits to be taken back, or its machine's end to be dealt with.
    pub(crate) fn is_interrupted(&self) -> bool {
        (self.interrupted || self.unsettled().is_some()) && !self.gone
    }

    /// The end of its machine, if that waits to be dealt with.
    pub(crate) fn unsettled(&self) -> Option<&Unsettled> {
        let unsettled = self.unsettled.as_ref();
        unsettled.filter(|unsettled| unsettled.vmm == self.stored.sandbox.vmm)
    }

    /// Its machine is gone, and maybe something that that held is not given back yet.
    pub(crate) fn has_ended(&self) -> bool {
        self.is_over() || self.unsettled().is_some()
    }

    /// It has no VM and is not about to get one.
    pub(crate) fn is_over(&self) -> bool {
        self.gone || self.stored.sandbox.state.is_off()
    }

    /// It has come to its end.
    pub(crate) fn has_exited(&self) -> bool {
        self.gone || self.stored.sandbox.state == State::Exited
    }
}
