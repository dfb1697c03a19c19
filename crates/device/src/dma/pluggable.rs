//! Memory that can be plugged, as functions of the host's reach it: a block is the guest's only when it is mapped for them, and its pages
//! go back to the host only when it is not. Knows no guest's requests but by [`MemoryBlocks`], and not who maps ahead of them.
//!
//! ```text
//!  chunk (128 MiB):  unmapped ── map_next, or a plug that waits for it ──▶ mapped ── its last block is unplugged ──▶ unmapped, discarded
//! ```
//! Without functions nothing is mapped, and what is unplugged is discarded at once.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memory::layout::Range;
use memory::{GuestRam, discard};
use vfio::{CHUNK, Mapped, Piece, VfioError};
use vm_memory::{GuestMemoryRegion, GuestRegionMmap};

use super::DmaSpace;
use super::keep;
use crate::MemoryBlocks;

/// All of a VM's memory that can be plugged. One object, which its device's thread and whoever maps share.
#[derive(Clone)]
pub struct PluggableDma(Arc<Shared>);

struct Shared {
    range: Range,
    state: Mutex<State>,
    hits: AtomicU64,
    misses: AtomicU64,
}

struct State {
    /// Ascending, from the first address of the range on.
    chunks: Vec<Chunk>,
    /// There while functions are, and while memory is being mapped for the first of them.
    functions: Option<Reach>,
}

#[derive(Default)]
struct Chunk {
    /// Bytes of it that the guest owns.
    plugged: u64,
    mapped: Option<Mapped>,
}

#[derive(Clone)]
struct Reach {
    space: Arc<DmaSpace>,
    region: Arc<GuestRegionMmap<()>>,
}

/// How plugging went while functions were there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlugCounts {
    /// Requests whose memory was mapped before.
    pub hits: u64,
    /// Requests that waited for it.
    pub misses: u64,
}

impl PluggableDma {
    /// Of a region in which nothing is plugged yet: whole chunks of 128 MiB.
    pub fn new(range: Range) -> Self {
        let chunks = usize::try_from(range.length.div_ceil(CHUNK.get())).unwrap_or(0);
        Self(Arc::new(Shared {
            range,
            state: Mutex::new(State {
                chunks: (0..chunks).map(|_| Chunk::default()).collect(),
                functions: None,
            }),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }))
    }

    /// How plugging went so far.
    pub fn counts(&self) -> PlugCounts {
        PlugCounts {
            hits: self.0.hits.load(Ordering::Relaxed),
            misses: self.0.misses.load(Ordering::Relaxed),
        }
    }

    /// Functions are about to reach the region: maps what is plugged of it, and from now on whatever is plugged.
    ///
    /// # Errors
    /// The host refuses, or it was given up. Nothing is mapped then, and all is as without functions.
    pub(super) fn begin(&self, space: &Arc<DmaSpace>, region: &Arc<GuestRegionMmap<()>>) -> Result<(), VfioError> {
        self.state().functions = Some(Reach {
            space: Arc::clone(space),
            region: Arc::clone(region),
        });
        loop {
            // A plug that comes between two of them maps its own.
            let mut state = self.state();
            let lacks = |chunk: &Chunk| chunk.plugged > 0 && chunk.mapped.is_none();
            let Some(index) = state.chunks.iter().position(lacks) else {
                return Ok(());
            };
            let mapped = match space.is_stopped() {
                true => Err(VfioError::GivenUp),
                false => state.map(self.0.range, index),
            };
            if let Err(error) = mapped {
                drop(state);
                self.end();
                return Err(error);
            }
        }
    }

    /// No function reaches it any more. What is not plugged goes back to the host.
    pub(super) fn end(&self) {
        let mut state = self.state();
        let Some(reach) = state.functions.take() else { return };
        let mut left = Vec::new();
        for (index, chunk) in state.chunks.iter_mut().enumerate().rev() {
            let Some(mapped) = chunk.mapped.take() else { continue };
            match reach.space.unmap(mapped) {
                Ok(()) if chunk.plugged == 0 => give_back(&reach.region, self.0.range.start, index),
                Ok(()) => (),
                Err(error) => left.push(error),
            }
        }
        keep(left, vec![reach.region]);
    }

    /// Which pieces below so many bytes of the region are not mapped for functions yet, ascending; none without functions.
    pub fn unmapped_below(&self, bytes: u64) -> Vec<Piece> {
        let state = self.state();
        let Some(reach) = &state.functions else {
            return Vec::new();
        };
        let below = (0_u64..)
            .zip(&state.chunks)
            .take_while(|(index, _)| index * CHUNK.get() < bytes);
        below
            .filter(|(_, chunk)| chunk.mapped.is_none())
            .map(|(index, _)| piece(&reach.region, self.0.range, index))
            .collect()
    }

    /// How many bytes from the begin of the region on are mapped without a gap.
    pub fn mapped_from_start(&self) -> u64 {
        let state = self.state();
        let chunks = state.chunks.iter().take_while(|chunk| chunk.mapped.is_some()).count();
        (chunks as u64 * CHUNK.get()).min(self.0.range.length)
    }

    /// Maps the first piece below so many bytes that is not mapped, before it is plugged; whether there was one.
    ///
    /// # Errors
    /// The host refuses; nothing has changed.
    pub fn map_next(&self, bytes: u64) -> Result<bool, VfioError> {
        let mut state = self.state();
        if state.functions.is_none() {
            return Ok(false);
        }
        let index = state.chunks.iter().position(|chunk| chunk.mapped.is_none());
        match index.filter(|index| (*index as u64) * CHUNK.get() < bytes) {
            Some(index) => state.map(self.0.range, index).map(|()| true),
            None => Ok(false),
        }
    }

    /// Gives pages of pieces back that were filled to be mapped, and are neither mapped nor plugged.
    pub fn give_back(&self, pieces: &[Piece]) {
        let state = self.state();
        let Some(reach) = &state.functions else { return };
        for piece in pieces {
            let index = usize::try_from((piece.iova - self.0.range.start) / CHUNK).unwrap_or(usize::MAX);
            if state
                .chunks
                .get(index)
                .is_some_and(|chunk| chunk.mapped.is_none() && chunk.plugged == 0)
            {
                give_back(&reach.region, self.0.range.start, index);
            }
        }
    }

    /// The memory of its pieces, for whoever fills it: it stays as long as functions are there.
    pub fn region(&self) -> Option<Arc<GuestRegionMmap<()>>> {
        self.state().functions.as_ref().map(|reach| Arc::clone(&reach.region))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change of it is whole: what is mapped is put in when it is.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The parts of a run by chunk: which, and how many bytes.
    fn parts(&self, run: Range) -> Vec<(usize, u64)> {
        let mut parts = Vec::new();
        let (mut at, end) = (
            run.start - self.0.range.start,
            run.start - self.0.range.start + run.length,
        );
        while at < end {
            let next = (at / CHUNK + 1) * CHUNK.get();
            parts.push((usize::try_from(at / CHUNK).unwrap_or(usize::MAX), next.min(end) - at));
            at = next;
        }
        parts
    }
}

impl State {
    /// Maps a chunk that is not mapped.
    fn map(&mut self, range: Range, index: usize) -> Result<(), VfioError> {
        let (Some(reach), Some(chunk)) = (&self.functions, self.chunks.get_mut(index)) else {
            return Ok(());
        };
        let piece = piece(&reach.region, range, index as u64);
        // SAFETY: 1. it lies within one mapping, which its region owns, and the region is kept until it is unmapped, or for ever if it cannot
        // be; nothing is put in its place and none of it is discarded before that; 2. it is a guest's memory, which anybody may change at
        // any time.
        chunk.mapped = Some(unsafe { reach.space.map_piece(piece) }?);
        Ok(())
    }

    /// Maps those of these chunks that are not, all or none; whether there were any.
    fn map_lacking(&mut self, range: Range, parts: &[(usize, u64)]) -> Result<bool, VfioError> {
        let mut done = Vec::new();
        for &(index, _) in parts {
            if self.functions.is_none() || self.chunks.get(index).is_none_or(|chunk| chunk.mapped.is_some()) {
                continue;
            }
            match self.map(range, index) {
                Ok(()) => done.push(index),
                Err(error) => {
                    for index in done {
                        self.unmap_empty(range, index);
                    }
                    return Err(error);
                }
            }
        }
        Ok(!done.is_empty())
    }

    /// Unmaps a chunk of which nothing is plugged, and gives its pages back. One that cannot be unmapped keeps them, which costs memory and
    /// nothing else.
    fn unmap_empty(&mut self, range: Range, index: usize) {
        let (Some(reach), Some(chunk)) = (&self.functions, self.chunks.get_mut(index)) else {
            return;
        };
        let Some(mapped) = chunk.mapped.take_if(|_| chunk.plugged == 0) else {
            return;
        };
        match reach.space.unmap(mapped) {
            Ok(()) => give_back(&reach.region, range.start, index),
            Err(error) => {
                log::error!("memory that the guest has given back stays pinned: {error}");
                chunk.mapped = Some(error.mapped);
            }
        }
    }
}

fn piece(region: &GuestRegionMmap<()>, range: Range, index: u64) -> Piece {
    let offset = index * CHUNK.get();
    Piece {
        iova: range.start + offset,
        address: region.as_ptr() as u64 + offset,
        length: CHUNK.get().min(range.length - offset),
    }
}

/// Gives the pages of a chunk back to the host. Where that fails they stay, which costs memory and nothing else.
fn give_back(region: &Arc<GuestRegionMmap<()>>, start: u64, index: usize) {
    let offset = index as u64 * CHUNK.get();
    let range = Range {
        start: start + offset,
        length: CHUNK.get().min(region.len() - offset),
    };
    let given = GuestRam::from_arc_regions(vec![Arc::clone(region)])
        .map_err(|error| error.to_string())
        .and_then(|memory| discard(&memory, range).map_err(|error| error.to_string()));
    if let Err(error) = given {
        log::warn!("memory that the guest has given back is not the host's yet: {error}");
    }
}

impl MemoryBlocks for PluggableDma {
    fn plug(&mut self, _memory: &GuestRam, run: Range) -> io::Result<()> {
        let parts = self.parts(run);
        let mut state = self.state();
        let waited = state.map_lacking(self.0.range, &parts).map_err(io::Error::other)?;
        if state.functions.is_some() {
            let counted = if waited { &self.0.misses } else { &self.0.hits };
            counted.fetch_add(1, Ordering::Relaxed);
        }
        for (index, bytes) in parts {
            if let Some(chunk) = state.chunks.get_mut(index) {
                chunk.plugged += bytes;
            }
        }
        Ok(())
    }

    fn unplug(&mut self, memory: &GuestRam, run: Range) -> io::Result<()> {
        let parts = self.parts(run);
        let mut state = self.state();
        if state.functions.is_none() {
            discard(memory, run).map_err(io::Error::other)?;
        }
        for (index, bytes) in parts {
            if let Some(chunk) = state.chunks.get_mut(index) {
                chunk.plugged = chunk.plugged.saturating_sub(bytes);
            }
            state.unmap_empty(self.0.range, index);
        }
        Ok(())
    }

    fn restored(&mut self, runs: &[Range]) -> io::Result<()> {
        let mut state = self.state();
        for run in runs {
            for (index, bytes) in self.parts(*run) {
                if let Some(chunk) = state.chunks.get_mut(index) {
                    chunk.plugged += bytes;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
