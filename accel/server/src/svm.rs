//! Shared virtual memory of a client: what it has, and when the back end gets it back.
//!
//! ```text
//!   allocated ── in the table, and held by kernels whose argument and buffers whose memory it is ──▶ gone ── commands that were put before ──▶ freed
//! ```
//!
//! An address is the same for the client and for kernels, and is looked up here whatever it is used for. A back end frees memory at once, so
//! whatever a client frees stays until all commands are complete that its queues had then. Allocations are whole pages, no two of which
//! share one: the client has memory of its own at the same addresses.
#![allow(unsafe_code, reason = "memory of a C API is freed by its function")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::api::{Api, Code, P};
use crate::objects::{Held, Object};
use crate::quota::Charge;
use crate::session::{Client, Session};

/// Bytes of a page, of the client's and of this host's.
pub(crate) const PAGE: u64 = 4096;

/// Allocations that a client can have.
const MOST: usize = 1 << 16;

/// How often it is looked whether commands are complete that memory waits for.
const LOOK: Duration = Duration::from_micros(200);

/// How long it is waited for memory that was freed and that commands still need.
const PATIENCE: Duration = Duration::from_millis(100);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the back end has allocated.
#[derive(Debug)]
struct Memory {
    base: P,
    context: Held,
    /// It ends with the memory.
    _charge: Charge,
}

// SAFETY: 1. the address is the back end's, which takes it from any thread; nobody here looks at what is there.
unsafe impl Send for Memory {}

impl Memory {
    fn free(self, api: &Api) {
        if let Ok(function) = api.clSVMFree() {
            // SAFETY: 1. the address is one that the back end gave out for this context, and is freed here alone; 2. the context is held.
            unsafe { function(self.context.raw(), self.base) };
        }
    }
}

/// Memory that nobody names any more.
type Gone = Arc<Mutex<Vec<Memory>>>;

/// An allocation. When its last holder lets go its memory is gone.
#[derive(Debug)]
pub(crate) struct Allocation {
    /// Where the client's part begins, on a page's boundary.
    begin: u64,
    /// Bytes that the client has asked for.
    size: u64,
    memory: Mutex<Option<Memory>>,
    context: Held,
    gone: Gone,
}

impl Allocation {
    /// The address that the client has.
    pub(crate) fn begin(&self) -> u64 {
        self.begin
    }

    /// As the back end takes it.
    pub(crate) fn at(&self, address: u64) -> P {
        std::ptr::with_exposed_provenance_mut(usize::try_from(address.max(self.begin)).unwrap_or_default())
    }

    /// Whether it was allocated in that context.
    pub(crate) fn is_in(&self, context: &Held) -> bool {
        Arc::ptr_eq(&self.context.0, &context.0)
    }

    /// Whether an object can work with it: one that was made with the same context.
    pub(crate) fn is_of(&self, object: &Object) -> bool {
        object.is_made_with(&self.context)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let memory = self.memory.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        lock(&self.gone).extend(memory);
    }
}

/// What kernels have of it: arguments by their places, and what they were told that they reach.
#[derive(Debug, Default, Clone)]
pub(crate) struct Used {
    pub(crate) arguments: BTreeMap<u32, Arc<Allocation>>,
    pub(crate) told: Vec<Arc<Allocation>>,
}

/// Memory that is gone, and events that are complete when no command needs it; without them that is known at the end alone.
#[derive(Debug)]
struct Waiting {
    memory: Memory,
    events: Option<Vec<Held>>,
}

/// All of a client's.
#[derive(Debug, Default)]
pub(crate) struct Svm {
    table: Mutex<BTreeMap<u64, Arc<Allocation>>>,
    gone: Gone,
    waiting: Mutex<Vec<Waiting>>,
}

impl Svm {
    /// What the back end has allocated from `base` on: it has so many bytes for the client behind the first boundary of so many bytes.
    pub(crate) fn allocated(
        &self,
        (base, context): (P, &Held),
        (boundary, size): (u64, u64),
        charge: Charge,
    ) -> Result<Allocation, Code> {
        let begin = (base.expose_provenance() as u64).checked_next_multiple_of(boundary);
        let allocation = Allocation {
            begin: begin.unwrap_or_default(),
            size,
            memory: Mutex::new(Some(Memory {
                base,
                context: context.clone(),
                _charge: charge,
            })),
            context: context.clone(),
            gone: Arc::clone(&self.gone),
        };
        match begin.and_then(|begin| begin.checked_add(size)) {
            Some(_) => Ok(allocation),
            None => Err(Code::MEM_OBJECT_ALLOCATION_FAILURE),
        }
    }

    /// Whether the client has any.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.table).is_empty()
    }

    /// The client has it from now on.
    pub(crate) fn insert(&self, allocation: Allocation) -> Result<(), Code> {
        let mut table = lock(&self.table);
        if table.len() >= MOST {
            drop(table);
            return Err(Code::OUT_OF_RESOURCES);
        }
        let before = table.insert(allocation.begin, Arc::new(allocation));
        drop(table);
        // A back end gives no address twice; if it does, the former one is held by nobody but its kernels.
        drop(before);
        Ok(())
    }

    /// The allocation that has all of these bytes.
    pub(crate) fn find(&self, address: u64, length: u64) -> Result<Arc<Allocation>, Code> {
        let table = lock(&self.table);
        let found = table.range(..=address).next_back().map(|(_, allocation)| allocation);
        let end = address.checked_add(length).ok_or(Code::INVALID_VALUE)?;
        let within = |allocation: &&Arc<Allocation>| {
            // An address behind the last byte is none of it.
            address < allocation.begin + allocation.size && end <= allocation.begin + allocation.size
        };
        found.filter(within).cloned().ok_or(Code::INVALID_VALUE)
    }

    /// The client lets go of what begins there.
    pub(crate) fn remove(&self, address: u64, context: &Held) -> Result<(), Code> {
        let mut table = lock(&self.table);
        let is_there = table.get(&address).is_some_and(|allocation| allocation.is_in(context));
        let removed = if is_there { table.remove(&address) } else { None };
        drop(table);
        removed.map(drop).ok_or(Code::INVALID_VALUE)
    }

    /// Frees what is gone and no command needs. If there is something that commands need, it is waited for, for so long. Whether something
    /// was freed.
    pub(crate) fn sweep(&self, client: &Client, patience: Duration) -> bool {
        let gone = std::mem::take(&mut *lock(&self.gone));
        if !gone.is_empty() {
            let events = client.markers();
            let waiting = gone.into_iter().map(|memory| Waiting {
                memory,
                events: events.clone(),
            });
            lock(&self.waiting).extend(waiting);
        }
        let deadline = Instant::now() + patience;
        let mut freed = false;
        loop {
            let mut waiting = lock(&self.waiting);
            let is_complete = |waiting: &Waiting| {
                let events = waiting.events.as_ref();
                events.is_some_and(|events| client.are_done(events))
            };
            let (complete, busy): (Vec<_>, Vec<_>) = std::mem::take(&mut *waiting).into_iter().partition(is_complete);
            let waits_on = !busy.is_empty();
            *waiting = busy;
            drop(waiting);
            freed |= !complete.is_empty();
            for one in complete {
                one.memory.free(&client.backend.api);
            }
            if !waits_on || Instant::now() >= deadline {
                return freed;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Frees everything: no command is left, and no kernel.
    pub(crate) fn end(&self, api: &Api) {
        drop(std::mem::take(&mut *lock(&self.table)));
        for one in std::mem::take(&mut *lock(&self.waiting)) {
            one.memory.free(api);
        }
        for memory in std::mem::take(&mut *lock(&self.gone)) {
            memory.free(api);
        }
    }
}

impl Session<'_> {
    /// Charges so many bytes. What was freed comes first, even if it has to be waited for.
    pub(crate) fn charge(&self, bytes: u64) -> Result<Charge, Code> {
        let (quota, svm) = (&self.client.tenant.quota, &self.client.svm);
        svm.sweep(self.client, Duration::ZERO);
        quota
            .charge(bytes)
            .or_else(|refused| match svm.sweep(self.client, self.client.patience(PATIENCE)) {
                true => quota.charge(bytes),
                false => Err(refused),
            })
    }
}

impl Client {
    /// How long may be waited in place of so long: not at all where no timer would end it.
    pub(crate) fn patience(&self, most: Duration) -> Duration {
        if self.has_timers { most } else { Duration::ZERO }
    }

    /// Events that are complete when all is done that the client's queues have now, also those that it has released; nothing if the back end
    /// has no such events.
    pub(crate) fn markers(&self) -> Option<Vec<Held>> {
        self.queues().iter().map(|queue| self.mark(queue)).collect()
    }

    /// Whether all of these events are complete.
    pub(crate) fn are_done(&self, events: &[Held]) -> bool {
        events.iter().all(|event| self.is_done(Some(event)))
    }
}
