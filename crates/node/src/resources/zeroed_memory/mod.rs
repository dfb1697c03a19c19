//! Memory that was zeroed while nobody waited for it, for sandboxes that get devices: pieces of 128 MiB, which are made one at a time,
//! lie ready, and are handed out once.
//!
//! ```text
//!  nothing ─► being filled ─► ready ─► taken: its VMM's alone, whatever becomes of that
//!                  └────────────┴───► given up, before a sandbox would be refused for want of memory
//! ```
//! None comes back: what a VMM may have had is never another's. A piece that is not in huge pages is none. Knows the budget, which counts
//! what is here, and neither who takes it nor when there is time to make some.

pub(crate) mod maker;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use base::ByteSize;
use host::cgroup::Root;
use host::zeroed_memory::Pages;
use vmm_api::devices::ZEROED_PIECE;

use crate::error::words::with_causes;
use crate::resources::budget::{Budget, Drain, Held};
use crate::resources::zeroed_memory::maker::{Cancel, Maker};

/// How long somebody waits for what is being made to be given up. A process at the lowest priority gets to its end late.
const GIVE_UP_LIMIT: Duration = Duration::from_secs(5);

/// A piece, as long as it is this daemon's: it counts as memory of nobody else's.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) file: OwnedFd,
    _held: Held,
}

/// What is ready, and how it came to that.
#[derive(Debug)]
pub(crate) struct ZeroedMemory {
    /// So many pieces at most are ready.
    most: usize,
    maker: Arc<dyn Maker>,
    budget: Budget,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ready: Vec<Piece>,
    filling: Option<Arc<Cancel>>,
    /// Nothing is made any more.
    closed: bool,
    taken: u64,
    small: u64,
    /// Why the last piece was none.
    failed: Option<String>,
}

/// What came of an attempt to make a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempt {
    Made,
    /// There are as many as there may be.
    Full,
    /// A sandbox is being started, or there is no memory for it now.
    Busy,
    /// It will not be better soon.
    Failed,
}

/// What there is, in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Numbers {
    pub(crate) ready: ByteSize,
    /// Bytes that VMMs were given, and pieces that were not in huge pages, since the daemon was started.
    pub(crate) handed_out: ByteSize,
    pub(crate) small: u64,
    pub(crate) failed: Option<String>,
}

impl ZeroedMemory {
    /// Nothing is ready; at most `size` will be, in whole pieces.
    pub(crate) fn new(size: ByteSize, maker: Arc<dyn Maker>, budget: Budget) -> Arc<Self> {
        let pool = Arc::new(Self {
            most: pieces_of(size),
            maker,
            budget,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let drain: Weak<dyn Drain> = Arc::<Self>::downgrade(&pool);
        pool.budget.drain_first(drain);
        pool
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// At most so much is ready.
    pub(crate) fn size(&self) -> ByteSize {
        ByteSize(bytes_of(self.most))
    }

    /// Takes as many pieces as there are, `most` at most. They do not come back.
    pub(crate) fn take(&self, most: usize) -> Vec<Piece> {
        let mut state = self.lock();
        let left = state.ready.len().saturating_sub(most);
        let taken = state.ready.split_off(left);
        state.taken = state.taken.saturating_add(bytes_of(taken.len()));
        drop(state);
        self.changed.notify_all();
        taken
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().ready.is_empty()
    }

    /// Waits until a piece is missing; false where none is to be made any more.
    pub(crate) fn wait_until_one_is_missing(&self) -> bool {
        let full = |state: &mut State| !state.closed && state.ready.len() >= self.most;
        let state = self.changed.wait_while(self.lock(), full);
        !state.unwrap_or_else(PoisonError::into_inner).closed
    }

    /// Makes one piece, if one is missing and there is time and memory for it now. One thread does this.
    pub(crate) fn make_one(&self, cgroups: Option<&Root>) -> Attempt {
        let cancel = Arc::new(Cancel::default());
        let held = {
            let mut state = self.lock();
            if state.closed || state.ready.len() >= self.most {
                return Attempt::Full;
            }
            let Some(held) = self.budget.hold_if_idle(ZEROED_PIECE.bytes()) else {
                return Attempt::Busy;
            };
            state.filling = Some(Arc::clone(&cancel));
            held
        };
        let made = Some(self.maker.make(cgroups, &cancel)).filter(|_| !cancel.is_cancelled());
        let (file, attempt, why) = match made {
            None => (None, Attempt::Busy, None),
            Some(Ok(filled)) if filled.pages == Pages::Huge => (Some(filled.file), Attempt::Made, None),
            Some(Ok(_)) => (None, Attempt::Failed, Some((1, self.maker.why_small()))),
            Some(Err(error)) => (None, Attempt::Failed, Some((0, with_causes(&error)))),
        };
        // What is given up has left the host, and here the budget, before anybody is told.
        let piece = file.map(|file| Piece { file, _held: held });
        let mut state = self.lock();
        state.filling = None;
        state.ready.extend(piece);
        if attempt != Attempt::Busy {
            self.note(&mut state, why);
        }
        drop(state);
        self.changed.notify_all();
        attempt
    }

    /// Says once why there is none, and that there are some again.
    fn note(&self, state: &mut State, why: Option<(u64, String)>) {
        match &why {
            Some((small, why)) => {
                state.small = state.small.saturating_add(*small);
                if state.failed.is_none() {
                    let size = self.size();
                    log::warn!(
                        "no memory is zeroed ahead, of {size} that are to be; it is tried again every minute: {why}"
                    );
                }
            }
            None if state.failed.is_some() => log::warn!("memory is zeroed ahead again"),
            None => (),
        }
        state.failed = why.map(|(_, why)| why);
    }

    /// Gives up all that is ready or being made, and makes none any more.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
        while self.give_up_one() {}
    }

    /// The same for people; nothing where none is to be ready.
    pub(crate) fn told(&self) -> Option<node_api::ZeroedMemory> {
        let numbers = self.numbers();
        (self.most > 0).then(|| node_api::ZeroedMemory {
            size: self.size(),
            ready: numbers.ready,
            handed_out: numbers.handed_out,
            failed: numbers.failed,
        })
    }

    pub(crate) fn numbers(&self) -> Numbers {
        let state = self.lock();
        Numbers {
            ready: ByteSize(bytes_of(state.ready.len())),
            handed_out: ByteSize(state.taken),
            small: state.small,
            failed: state.failed.clone(),
        }
    }
}

impl Drain for ZeroedMemory {
    fn give_up_one(&self) -> bool {
        let mut state = self.lock();
        if let Some(piece) = state.ready.pop() {
            drop(state);
            // Its pages are free when it is closed.
            drop(piece);
            self.changed.notify_all();
            return true;
        }
        let Some(cancel) = state.filling.clone() else {
            return false;
        };
        cancel.cancel();
        let is_made = |state: &mut State| state.filling.as_ref().is_some_and(|its| Arc::ptr_eq(its, &cancel));
        let waited = self.changed.wait_timeout_while(state, GIVE_UP_LIMIT, is_made);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// So many whole pieces are in so much memory.
fn pieces_of(size: ByteSize) -> usize {
    usize::try_from(size.bytes() / ZEROED_PIECE.bytes()).unwrap_or(usize::MAX)
}

fn bytes_of(pieces: usize) -> u64 {
    u64::try_from(pieces)
        .unwrap_or(u64::MAX)
        .saturating_mul(ZEROED_PIECE.bytes())
}

#[cfg(test)]
pub(crate) mod tests;
