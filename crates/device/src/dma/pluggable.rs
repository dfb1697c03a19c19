//! Memory that can be plugged, as functions of the host's reach it: a block is the guest's only when it is mapped for them, and its pages
//! go back to the host only when it is not. Knows no guest's requests but by [`MemoryBlocks`], and not who maps ahead of them.
//!
//! ```text
//!  chunk (128 MiB):  unmapped ── map_next, or a plug that waits for it ──▶ mapped ── its last block is unplugged ──▶ unmapped, discarded
//! ```
//! Without functions nothing is mapped, and what is unplugged is discarded at once. What is unplugged of a chunk that stays mapped is discarded
//! when that is not mapped any more.
//!
//! A file of zeroes takes the place of a chunk under the lock under which that is plugged and mapped, and only of one that is neither: no
//! function has the pages that were there, and nothing of the guest's is lost, as what is in unplugged blocks is undefined (virtio 1.2, 5.15.6).

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memory::layout::Range;
use memory::{GuestRam, MemoryError, Pins, Ram, ZEROED_PIECE, check_zeroed, discard};
use vfio::{CHUNK, DmaAccess, Mapped, Piece, VfioError};
use vm_memory::{GuestMemoryRegion, GuestRegionMmap};

use super::ahead::Run;
use super::{Ahead, DmaSpace, keep};
use crate::MemoryBlocks;

const _: () = assert!(CHUNK.get() == ZEROED_PIECE && ZEROED_PIECE == vmm_api::devices::ZEROED_PIECE.bytes());

/// All of a VM's memory that can be plugged. One object, which its device's thread and whoever maps share.
#[derive(Clone)]
pub struct PluggableDma(Arc<Shared>);

struct Shared {
    range: Range,
    state: Mutex<State>,
    hits: AtomicU64,
    misses: AtomicU64,
    zeroed: AtomicU64,
}

struct State {
    /// Ascending, from the first address of the range on.
    chunks: Vec<Chunk>,
    /// There while functions are, and while memory is being mapped for the first of them.
    functions: Option<Reach>,
}

/// The smallest block of a device: a chunk has as many as a word has bits.
const BLOCK: u64 = CHUNK.get() / u64::BITS as u64;

/// So many chunks are mapped for one request at most: who pauses the device waits for it. A guest that is told that it is busy asks again.
const AT_ONCE: usize = 4;

#[derive(Default)]
struct Chunk {
    /// Which of its blocks the guest owns, a bit each.
    plugged: u64,
    mapped: Option<Mapped>,
    /// A file of zeroes lies there, of which nothing was given back yet.
    is_zeroed: bool,
}

impl Chunk {
    /// Nobody has a use for the memory that is there.
    fn is_free(&self) -> bool {
        self.plugged == 0 && self.mapped.is_none() && !self.is_zeroed
    }
}

#[derive(Clone)]
struct Reach {
    space: Arc<DmaSpace>,
    region: Arc<GuestRegionMmap<()>>,
    /// Whoever maps it has a pin of these meanwhile.
    pins: Pins,
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
            zeroed: AtomicU64::new(0),
        }))
    }

    /// How plugging went so far.
    pub fn counts(&self) -> PlugCounts {
        PlugCounts {
            hits: self.0.hits.load(Ordering::Relaxed),
            misses: self.0.misses.load(Ordering::Relaxed),
        }
    }

    /// Has files of zeroes take the places of the lowest chunks of `ram`, whose region it is, that are free: nothing plugged, nothing mapped, and no
    /// such file. There may be fewer than files, which are closed then. See [`Ram::place_zeroed`] for what a file must be.
    ///
    /// # Errors
    /// One of the files cannot be used, or the memory takes none: nothing has changed. Or the host refused one of them.
    pub fn place_zeroed(&self, ram: &Ram, files: Vec<File>) -> Result<(), MemoryError> {
        files.iter().try_for_each(check_zeroed)?;
        for file in files {
            // Others come between two of them.
            let mut state = self.state();
            // Functions are leaving or coming, or have left pages pinned.
            if state.functions.is_none() && ram.pins().is_pinned() {
                return Ok(());
            }
            let chunk = (0..).zip(&mut state.chunks).find(|(_, chunk)| chunk.is_free());
            let Some((index, chunk)) = chunk else { return Ok(()) };
            ram.place_zeroed(self.0.range.start + index * CHUNK.get(), &file)?;
            chunk.is_zeroed = true;
            self.0.zeroed.fetch_add(CHUNK.get(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Bytes of files that were placed so far.
    pub fn zeroed(&self) -> u64 {
        self.0.zeroed.load(Ordering::Relaxed)
    }

    /// Functions are about to reach the region: maps what is plugged of it, which so many threads fill ahead of that, and from now on whatever
    /// is plugged.
    ///
    /// # Errors
    /// The host refuses, or it was given up. Nothing is mapped then, and all is as without functions.
    pub(super) fn begin(
        &self,
        space: &Arc<DmaSpace>,
        region: &Arc<GuestRegionMmap<()>>,
        pins: &Pins,
        fillers: usize,
    ) -> Result<(), VfioError> {
        let lacks = |chunk: &Chunk| chunk.plugged > 0 && chunk.mapped.is_none();
        let plugged: Vec<_> = {
            let mut state = self.state();
            state.functions = Some(Reach {
                space: Arc::clone(space),
                region: Arc::clone(region),
                pins: pins.clone(),
            });
            let lacking = (0..).zip(&state.chunks).filter(|(_, chunk)| lacks(chunk));
            lacking.map(|(index, _)| piece(region, self.0.range, index)).collect()
        };
        let mapped = self.map_filled(space, &plugged, fillers);
        if mapped.is_err() {
            self.end();
        }
        mapped
    }

    /// Maps these pieces, as far as they are plugged yet and not mapped.
    fn map_filled(&self, space: &DmaSpace, pieces: &[Piece], fillers: usize) -> Result<(), VfioError> {
        let ahead = self.fill_ahead(pieces, fillers).map_err(|source| VfioError::Call {
            call: "a thread that fills memory",
            source,
        })?;
        for (number, piece) in pieces.iter().enumerate() {
            let is_filled = |ahead: &Ahead| ahead.wait_for(number, || space.is_stopped());
            if !ahead.as_ref().is_none_or(is_filled) || space.is_stopped() {
                return Err(VfioError::GivenUp);
            }
            // A plug that comes between two of them maps its own.
            let mut state = self.state();
            let index = self.index(piece);
            let chunk = state.chunks.get(index);
            if chunk.is_some_and(|chunk| chunk.plugged > 0 && chunk.mapped.is_none()) {
                state.map(self.0.range, index)?;
            }
        }
        Ok(())
    }

    /// No function reaches it any more. What is not plugged goes back to the host.
    pub(super) fn end(&self) {
        let Some(reach) = self.state().functions.take() else {
            return;
        };
        let mut left = Vec::new();
        let chunks = self.state().chunks.len();
        for index in (0..chunks).rev() {
            // Others come between two of them.
            let mut state = self.state();
            let Some(chunk) = state.chunks.get_mut(index) else {
                continue;
            };
            let Some(mapped) = chunk.mapped.take() else { continue };
            match reach.space.unmap(mapped) {
                Ok(()) => {
                    chunk.is_zeroed &= chunk.plugged != 0;
                    give_back(&reach.region, self.0.range.start, index, !chunk.plugged);
                }
                Err(error) => left.push(error),
            }
        }
        keep(left, vec![reach.region], &reach.pins);
    }

    /// Takes from functions, and gives back to the host, what is mapped beyond so many bytes and of which nothing is plugged.
    pub fn trim(&self, bytes: u64) {
        let chunks = self.state().chunks.len();
        let first = usize::try_from(bytes.div_ceil(CHUNK.get())).unwrap_or(usize::MAX);
        for index in (first.min(chunks)..chunks).rev() {
            self.state().unmap_empty(self.0.range, index);
        }
    }

    /// Whether [`PluggableDma::trim`] has something to do.
    pub fn has_beyond(&self, bytes: u64) -> bool {
        let state = self.state();
        let first = usize::try_from(bytes.div_ceil(CHUNK.get())).unwrap_or(usize::MAX);
        let beyond = state.chunks.iter().skip(first);
        state.functions.is_some()
            && beyond
                .filter(|chunk| chunk.mapped.is_some())
                .any(|chunk| chunk.plugged == 0)
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

    /// Gives pages of pieces back that were filled to be mapped, and are neither mapped nor plugged. What came zeroed below so many bytes of
    /// the region stays: it is to be mapped yet, and whoever has had it zeroed counts with it.
    pub fn give_back(&self, pieces: &[Piece], wanted: u64) {
        let mut state = self.state();
        let State { chunks, functions } = &mut *state;
        let Some(reach) = functions else { return };
        for piece in pieces {
            let index = self.index(piece);
            let is_wanted = (index as u64).saturating_mul(CHUNK.get()) < wanted;
            let stays = |chunk: &Chunk| chunk.mapped.is_some() || chunk.plugged != 0 || (chunk.is_zeroed && is_wanted);
            if let Some(chunk) = chunks.get_mut(index).filter(|chunk| !stays(chunk)) {
                chunk.is_zeroed = false;
                give_back(&reach.region, self.0.range.start, index, u64::MAX);
            }
        }
    }

    /// Begins to fill pieces of it that are to be mapped, by so many threads; nothing without functions.
    ///
    /// # Errors
    /// No thread could be had.
    pub fn fill_ahead(&self, pieces: &[Piece], fillers: usize) -> io::Result<Option<Ahead>> {
        let (reach, runs) = {
            let state = self.state();
            let run = |piece: &Piece| Run {
                piece: *piece,
                is_zeroed: state.chunks.get(self.index(piece)).is_some_and(|chunk| chunk.is_zeroed),
            };
            let runs: Vec<_> = pieces.iter().map(run).collect();
            (state.functions.clone(), runs)
        };
        let begin = |reach: Reach| reach.space.fill_ahead(runs, vec![reach.region], fillers);
        reach.map(begin).transpose()
    }

    /// Of the chunk that a piece is.
    fn index(&self, piece: &Piece) -> usize {
        usize::try_from((piece.iova - self.0.range.start) / CHUNK).unwrap_or(usize::MAX)
    }

    /// Whether the guest owns all that lies in the region of a range of its memory.
    pub(crate) fn is_plugged(&self, range: Range) -> bool {
        let region = self.0.range;
        let start = range.start.max(region.start);
        let end = (range.start.saturating_add(range.length)).min(region.start + region.length);
        if start >= end {
            return true;
        }
        let (first, last) = ((start - region.start) / BLOCK, (end - region.start).div_ceil(BLOCK));
        let parts = self.parts(Range {
            start: region.start + first * BLOCK,
            length: (last - first) * BLOCK,
        });
        let state = self.state();
        parts.iter().all(|part| {
            let chunk = state.chunks.get(part.index);
            chunk.is_some_and(|chunk| chunk.plugged & part.blocks == part.blocks)
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change of it is whole: what is mapped is put in when it is.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The parts of a run by chunk.
    fn parts(&self, run: Range) -> Vec<Part> {
        let mut parts = Vec::new();
        let (mut at, end) = (
            run.start - self.0.range.start,
            run.start - self.0.range.start + run.length,
        );
        while at < end {
            let next = ((at / CHUNK + 1) * CHUNK.get()).min(end);
            let (first, blocks) = (at % CHUNK / BLOCK, (next - at) / BLOCK);
            parts.push(Part {
                index: usize::try_from(at / CHUNK).unwrap_or(usize::MAX),
                blocks: bits(first, blocks),
                range: Range {
                    start: self.0.range.start + at,
                    length: next - at,
                },
            });
            at = next;
        }
        parts
    }
}

/// So many bits from this one on.
fn bits(first: u64, count: u64) -> u64 {
    let all = match count {
        0..64 => (1 << count) - 1,
        _ => u64::MAX,
    };
    all << first
}

/// What lies in one chunk of a run.
struct Part {
    index: usize,
    blocks: u64,
    range: Range,
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
        chunk.mapped = Some(unsafe { reach.space.map_piece(piece, DmaAccess::ReadWrite) }?);
        Ok(())
    }

    /// Maps those of these chunks that are not; whether there were any.
    ///
    /// # Errors
    /// The host refuses, and those that were mapped here are not any more; or there are too many for one request, which goes on when it
    /// comes again.
    fn map_lacking(&mut self, range: Range, parts: &[Part]) -> io::Result<bool> {
        let mut done = Vec::new();
        for &Part { index, .. } in parts {
            if self.functions.is_none() || self.chunks.get(index).is_none_or(|chunk| chunk.mapped.is_some()) {
                continue;
            }
            if done.len() == AT_ONCE {
                return Err(io::Error::other("more of it has to be mapped first"));
            }
            match self.map(range, index) {
                Ok(()) => done.push(index),
                Err(error) => {
                    for index in done {
                        self.unmap_empty(range, index);
                    }
                    return Err(io::Error::other(error));
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
            Ok(()) => {
                chunk.is_zeroed = false;
                give_back(&reach.region, range.start, index, u64::MAX);
            }
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

/// Gives the pages of these blocks of a chunk back to the host. Where that fails they stay, which costs memory and nothing else.
fn give_back(region: &Arc<GuestRegionMmap<()>>, start: u64, index: usize, blocks: u64) {
    let offset = index as u64 * CHUNK.get();
    let length = CHUNK.get().min(region.len() - offset);
    let memory = match GuestRam::from_arc_regions(vec![Arc::clone(region)]) {
        Ok(memory) => memory,
        Err(error) => return log::error!("a region is none, a bug: {error}"),
    };
    for (first, end) in runs_of_bits(blocks) {
        let (from, to) = ((first * BLOCK).min(length), (end * BLOCK).min(length));
        let range = Range {
            start: start + offset + from,
            length: to - from,
        };
        if let Err(error) = discard(&memory, range) {
            log::warn!("memory that the guest has given back is not the host's yet: {error}");
        }
    }
}

/// Where runs of set bits begin and end.
fn runs_of_bits(mut bits: u64) -> Vec<(u64, u64)> {
    let mut runs = Vec::new();
    while bits != 0 {
        let first = bits.trailing_zeros();
        let length = (bits >> first).trailing_ones();
        runs.push((u64::from(first), u64::from(first + length)));
        bits &= u64::MAX.checked_shl(first + length).unwrap_or(0);
    }
    runs
}

impl MemoryBlocks for PluggableDma {
    fn plug(&mut self, _memory: &GuestRam, run: Range) -> io::Result<()> {
        let parts = self.parts(run);
        let mut state = self.state();
        let mapped = state.map_lacking(self.0.range, &parts);
        if state.functions.is_some() {
            let found = matches!(mapped, Ok(false));
            let counted = if found { &self.0.hits } else { &self.0.misses };
            counted.fetch_add(1, Ordering::Relaxed);
        }
        mapped?;
        for part in parts {
            if let Some(chunk) = state.chunks.get_mut(part.index) {
                chunk.plugged |= part.blocks;
            }
        }
        Ok(())
    }

    fn unplug(&mut self, memory: &GuestRam, run: Range) -> io::Result<()> {
        let parts = self.parts(run);
        let mut state = self.state();
        // Outside of the region there is none, which `discard` says.
        let is_mapped = |part: &Part| state.chunks.get(part.index).is_some_and(|chunk| chunk.mapped.is_some());
        for part in parts.iter().filter(|part| !is_mapped(part)) {
            discard(memory, part.range).map_err(io::Error::other)?;
        }
        for part in parts {
            if let Some(chunk) = state.chunks.get_mut(part.index) {
                chunk.plugged &= !part.blocks;
                chunk.is_zeroed &= chunk.plugged != 0;
            }
            state.unmap_empty(self.0.range, part.index);
        }
        Ok(())
    }

    fn restored(&mut self, runs: &[Range]) -> io::Result<()> {
        let mut state = self.state();
        for run in runs {
            for part in self.parts(*run) {
                if let Some(chunk) = state.chunks.get_mut(part.index) {
                    chunk.plugged |= part.blocks;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod zeroed_tests;
