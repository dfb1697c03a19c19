//! Memory that a guest boots with, does without until it is mapped for functions of the host's, and takes back then: what is in its balloon
//! need not be mapped, all else is. Knows no driver's requests but by what they name, and not who asks the guest for the size of its balloon.
//!
//! ```text
//!  unit (2 MiB):  unmapped, all of it in the balloon ── map_ahead, or a page is taken back: mapped before the answer ──▶ mapped
//! ```
//! Without functions nothing is mapped. With them a unit of which the guest owns one page is mapped (I1), and what is mapped stays so until the
//! last function leaves, also where it is put into the balloon again. Which pages are in the balloon is only what a driver has said that has
//! to tell before it takes one back (`VIRTIO_BALLOON_F_MUST_TELL_HOST`, virtio 1.2, 5.5.3); of any other nothing is, so that all is mapped.

mod units;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use memory::Pins;
use memory::layout::{self, MemorySize, Range};
use vfio::{CHUNK, DmaAccess, Mapped, Piece, VfioError, runs, unmap_all};
use vm_memory::{Address, GuestMemoryRegion, GuestRegionMmap};

use super::{DmaSpace, keep};
use units::{PAGE, Units};

/// So many bytes are mapped for one request at most: who pauses the device waits for it. The rest is mapped when it is looked at again.
const AT_ONCE: u64 = 512 << 20;

/// Between two looks whether a guest is still waited for.
const LOOK: Duration = Duration::from_millis(20);

/// How memory is mapped for functions; all of it is on but where its gain is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapTuning {
    /// Neighbours are mapped by one request, up to 128 MiB.
    pub merge: bool,
    /// Memory is mapped before the guest is asked to take it back.
    pub ahead: bool,
}

impl Default for MapTuning {
    fn default() -> Self {
        Self {
            merge: true,
            ahead: true,
        }
    }
}

/// What a guest boots with, as far as it is in its balloon. One object, which the device's thread and whoever maps share.
#[derive(Clone)]
pub struct BalloonedDma(Arc<Shared>);

struct Shared {
    tuning: MapTuning,
    state: Mutex<State>,
    /// Pages were put in.
    changed: Condvar,
    hits: AtomicU64,
    misses: AtomicU64,
    messages: AtomicU64,
}

struct State {
    units: Units,
    mapped: Vec<Mapped>,
    functions: Option<Reach>,
    /// The last request was not answered, and comes again.
    waits: bool,
}

#[derive(Clone)]
struct Reach {
    space: Arc<DmaSpace>,
    memory: Vec<Arc<GuestRegionMmap<()>>>,
    /// Whoever maps it has a pin of these meanwhile.
    pins: Pins,
}

/// How pages were taken back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeflateCounts {
    /// Requests to take pages back while functions were there, all of whose memory was mapped before.
    pub hits: u64,
    /// Those that waited for some of it.
    pub misses: u64,
    /// Requests that put pages in or took them back, with functions and without.
    pub messages: u64,
}

impl BalloonedDma {
    /// Of a guest that boots with so much, and has nothing in its balloon.
    pub fn new(size: MemorySize, tuning: MapTuning) -> Self {
        Self(Arc::new(Shared {
            tuning,
            state: Mutex::new(State {
                units: Units::of(&layout::ram(size.boot)),
                mapped: Vec::new(),
                functions: None,
                waits: false,
            }),
            changed: Condvar::new(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            messages: AtomicU64::new(0),
        }))
    }

    /// How pages were taken back so far.
    pub fn counts(&self) -> DeflateCounts {
        DeflateCounts {
            hits: self.0.hits.load(Ordering::Relaxed),
            misses: self.0.misses.load(Ordering::Relaxed),
            messages: self.0.messages.load(Ordering::Relaxed),
        }
    }

    /// How memory is mapped.
    pub fn tuning(&self) -> MapTuning {
        self.0.tuning
    }

    /// The guest does without these pages from now on, until it says that it takes them back. What is none of its boot memory is not
    /// counted, nor what is in already.
    pub(crate) fn inflate(&self, pages: &[Range]) {
        self.0.messages.fetch_add(1, Ordering::Relaxed);
        self.state().units.put_in(pages);
        self.0.changed.notify_all();
    }

    /// The guest takes these pages back, and owns them when this returns.
    ///
    /// # Errors
    /// The host refuses to map them, or there is too much for one request; the guest is not to be answered, and none of them is its own.
    /// What was mapped of them stays mapped.
    pub(crate) fn deflate(&self, pages: &[Range]) -> io::Result<()> {
        let mut state = self.state();
        let lacking = state.units.unmapped_of(pages);
        if state.functions.is_some() {
            // It is one request, however often it comes.
            let comes_again = std::mem::replace(&mut state.waits, true);
            let counted = if lacking.is_empty() {
                &self.0.hits
            } else {
                &self.0.misses
            };
            counted.fetch_add(u64::from(!comes_again), Ordering::Relaxed);
            if !state.map_some(self.0.tuning, &lacking)? {
                return Err(io::Error::other("more of it has to be mapped first"));
            }
        }
        state.waits = false;
        state.units.take_out(pages);
        self.0.messages.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The driver has gone without a word, and the next one knows of no balloon: the guest owns all of its memory. Whether functions do not
    /// reach some of that.
    pub(crate) fn forget(&self) -> bool {
        let mut state = self.state();
        state.waits = false;
        state.units.empty();
        !state.lacking().is_empty()
    }

    /// Maps what the guest owns and functions do not reach, of which there is some after [`BalloonedDma::forget`] alone, as far as one request
    /// may take; whether that was all.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn settle(&self) -> io::Result<bool> {
        let mut state = self.state();
        let lacking = state.lacking();
        state.map_some(self.0.tuning, &lacking)
    }

    /// How many bytes are in the balloon.
    pub fn inflated(&self) -> u64 {
        self.state().units.inflated() * PAGE
    }

    /// Waits until so many bytes are in the balloon: `false` if none are added for as long as that, or it was given up by
    /// [`DmaSpace::stop`]. Nothing relies on it but how much has to be mapped before the first function comes.
    pub fn await_inflated(&self, bytes: u64, space: &DmaSpace, patience: Duration) -> bool {
        let mut state = self.state();
        let (mut most, mut since) = (0, Instant::now());
        loop {
            let inflated = state.units.inflated() * PAGE;
            if inflated > most {
                (most, since) = (inflated, Instant::now());
            }
            if inflated >= bytes || space.is_stopped() || since.elapsed() > patience {
                return inflated >= bytes;
            }
            let waited = self.0.changed.wait_timeout(state, LOOK);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Functions are about to reach this memory: maps all that the guest owns of it, and from now on whatever it takes back.
    ///
    /// # Errors
    /// The host refuses, or it was given up. Nothing is mapped then, and all is as without functions.
    pub(super) fn begin(
        &self,
        space: &Arc<DmaSpace>,
        memory: &[Arc<GuestRegionMmap<()>>],
        pins: &Pins,
        fillers: usize,
    ) -> Result<(), VfioError> {
        let reach = Reach {
            space: Arc::clone(space),
            memory: memory.to_vec(),
            pins: pins.clone(),
        };
        let owned = {
            let mut state = self.state();
            let owned = state.units.owned_and_unmapped();
            let owned = reach.runs(&owned, self.0.tuning);
            state.functions = Some(reach);
            owned
        };
        let mapped = self.map_ahead(&owned, fillers, &|| space.is_stopped());
        if mapped.is_err() {
            self.end();
        }
        mapped
    }

    /// Maps such pieces as they are filled by so many threads ahead of it. What a request has mapped meanwhile is left out.
    ///
    /// # Errors
    /// The host refuses, or nobody wants it any more; what was mapped before stays.
    pub fn map_ahead(&self, pieces: &[Piece], fillers: usize, is_given_up: &dyn Fn() -> bool) -> Result<(), VfioError> {
        let reach = self.state().functions.as_ref().map(Reach::filled);
        let Some((space, memory)) = reach else { return Ok(()) };
        let ahead = space
            .fill_ahead(pieces.iter().copied(), memory, fillers)
            .map_err(|source| VfioError::Call {
                call: "a thread that fills memory",
                source,
            })?;
        for (index, piece) in pieces.iter().enumerate() {
            if !ahead.wait_for(index, is_given_up) {
                return Err(VfioError::GivenUp);
            }
            let mut state = self.state();
            let lacking = state.units.unmapped_of(&[Range {
                start: piece.iova,
                length: piece.length,
            }]);
            state.map(self.0.tuning, &lacking)?;
        }
        Ok(())
    }

    /// No function reaches it any more.
    pub(super) fn end(&self) {
        let (reach, mapped) = {
            let mut state = self.state();
            (state.functions.take(), std::mem::take(&mut state.mapped))
        };
        let Some(reach) = reach else { return };
        let left = unmap_all(reach.space.space.as_ref(), mapped);
        self.state().units.unmap_all();
        keep(left, reach.memory, &reach.pins);
    }

    /// What is to be mapped next: the units of which the guest takes pages back first, as many as one request maps. Linux' driver takes back
    /// first what it has put in last. Nothing without functions.
    pub fn next_ahead(&self) -> Vec<Piece> {
        let state = self.state();
        let Some(reach) = &state.functions else {
            return Vec::new();
        };
        let most = usize::try_from(CHUNK.get() / state.units.size()).unwrap_or(1).max(1);
        reach.runs(&state.units.latest_unmapped(most), self.0.tuning)
    }

    /// So large the balloon may be made for the guest to take nothing back that is not mapped, if it takes back first what it has put in last.
    pub fn safe_size(&self) -> u64 {
        let state = self.state();
        match &state.functions {
            Some(_) => state.units.unmapped_depth() * PAGE,
            None => 0,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change of it is whole: a unit is marked as mapped when it is.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reach {
    /// The memory, and for whom it is filled.
    fn filled(&self) -> (Arc<DmaSpace>, Vec<Arc<GuestRegionMmap<()>>>) {
        (Arc::clone(&self.space), self.memory.clone())
    }

    /// Units as what is mapped by one request each.
    fn runs(&self, units: &[Range], tuning: MapTuning) -> Vec<Piece> {
        let pieces = units.iter().filter_map(|unit| self.piece(*unit));
        match tuning.merge {
            true => runs(pieces, CHUNK),
            false => pieces.collect(),
        }
    }

    fn piece(&self, unit: Range) -> Option<Piece> {
        let holds = |region: &&Arc<GuestRegionMmap<()>>| {
            let start = region.start_addr().raw_value();
            (start..start + region.len()).contains(&unit.start)
        };
        let region = self.memory.iter().find(holds)?;
        Some(Piece {
            iova: unit.start,
            address: region.as_ptr() as u64 + (unit.start - region.start_addr().raw_value()),
            length: unit.length,
        })
    }
}

impl State {
    /// Maps units that are not mapped; what was mapped before one is refused stays.
    fn map(&mut self, tuning: MapTuning, units: &[Range]) -> Result<(), VfioError> {
        let Some(reach) = &self.functions else { return Ok(()) };
        for run in reach.runs(units, tuning) {
            // SAFETY: 1. it lies within one mapping, which its region owns, and the region is kept until it is unmapped, or for ever if it
            // cannot be; nothing is put in its place, and the pin that is had meanwhile keeps all of it from being discarded; 2. it is a guest's
            // memory, which anybody may change at any time.
            let mapped = unsafe { reach.space.map_piece(run, DmaAccess::ReadWrite) }?;
            self.mapped.push(mapped);
            self.units.map(run.iova, run.length);
        }
        Ok(())
    }

    /// What functions do not reach that the guest owns. Nothing, where they are about to leave, with the guest's memory or without.
    fn lacking(&self) -> Vec<Range> {
        match &self.functions {
            Some(reach) if !reach.space.is_stopped() => self.units.owned_and_unmapped(),
            // All of it is not mapped then, and need not be.
            _ => Vec::new(),
        }
    }

    /// The same as far as one request may take; whether that is all.
    fn map_some(&mut self, tuning: MapTuning, units: &[Range]) -> io::Result<bool> {
        let most = usize::try_from(AT_ONCE / self.units.size())
            .unwrap_or(usize::MAX)
            .max(1);
        let now = &units[..units.len().min(most)];
        self.map(tuning, now).map_err(io::Error::other)?;
        Ok(now.len() == units.len())
    }
}

#[cfg(test)]
mod tests;
