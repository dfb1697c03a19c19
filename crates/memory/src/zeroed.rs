//! Memory that can be plugged and came zeroed: files of a file system in memory that somebody has filled before, mapped in the place of pieces
//! of it, so that nobody has to zero those when they are first touched. Knows neither who fills files nor what is plugged.
//!
//! ```text
//!  anonymous, or a snapshot's files ── place_zeroed ──▶ shared mapping of a file ── drop_changes, or rebase ──▶ as before, or the new files
//! ```
//! What is in such a piece this process's page map does not tell: a page of the file that its page tables do not have, as one that was swapped
//! out, has an empty entry, and one that they have is a file's, as what has not changed since a snapshot is. So whatever goes by the page map
//! (`image`, `layers`) takes all pages of a piece for touched and changed.
//!
//! A file that was cut off would kill whoever touches the memory (SIGBUS), and so would one whose file system has no space left when a page that
//! was given back is touched again. The second is checked: the file system has no limit, or is the file's alone and has room for all of it. The
//! first cannot be: whoever hands a file over must not keep it, nor anybody else.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::sparse::blocks_with_data;
use rustix::fs::{OFlags, fcntl_getfl, fstatfs};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, madvise, mmap};

use crate::holes::anonymous;
use crate::layers::{Layers, Segment};
use crate::{HUGE_PAGE, MemoryError, PAGE, PROTECTION, Ram, huge_pages, image};

/// Bytes of a piece and of its file.
pub const ZEROED_PIECE: u64 = 128 << 20;

/// What stat(2) counts blocks by.
const ST_BLOCK: u64 = 512;

/// Of a file system in memory (linux/magic.h).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Which pieces of a memory are such files, by their places in a file of all of it. Shared by all who have that memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct ZeroedPieces(Arc<Mutex<BTreeSet<u64>>>);

impl ZeroedPieces {
    /// Whether a part of one lies there.
    pub(crate) fn overlaps(&self, places: Range<u64>) -> bool {
        let first = places.start.saturating_sub(ZEROED_PIECE - 1);
        self.lock().range(first..places.end).next().is_some()
    }

    /// Other memory was mapped there: pieces that it covers are none any more.
    pub(crate) fn replaced(&self, places: Range<u64>) {
        let is_left = |piece: &u64| *piece < places.start || piece + ZEROED_PIECE > places.end;
        self.lock().retain(is_left);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        // Each change of it is whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(what: &'static str) -> impl Fn(Errno) -> MemoryError {
    move |error| MemoryError::Zeroed {
        what,
        source: error.into(),
    }
}

/// Whether a file can be memory that came zeroed, but for its content, which nobody could check in less time than zeroing takes.
///
/// # Errors
/// It cannot.
pub fn check_zeroed(file: &File) -> Result<(), MemoryError> {
    let metadata = file.metadata().map_err(|source| MemoryError::Zeroed {
        what: "looked at",
        source,
    })?;
    if !metadata.is_file() || metadata.len() != ZEROED_PIECE {
        return Err(MemoryError::ZeroedFile("is no regular file of 128 MiB"));
    }
    if fcntl_getfl(file).map_err(failed("looked at"))? & OFlags::RWMODE != OFlags::RDWR {
        return Err(MemoryError::ZeroedFile("cannot be read and written"));
    }
    let system = fstatfs(file).map_err(failed("looked at"))?;
    if system.f_type != TMPFS_MAGIC {
        return Err(MemoryError::ZeroedFile("lies in no file system in memory"));
    }
    // A limit of 0 is none (`shmem_statfs` of mm/shmem.c).
    let block = u64::try_from(system.f_bsize).unwrap_or(0);
    let limit = system.f_blocks.saturating_mul(block);
    let used = system.f_blocks.saturating_sub(system.f_bfree).saturating_mul(block);
    let is_its_own = used == metadata.blocks() * ST_BLOCK;
    match limit {
        0 => Ok(()),
        ZEROED_PIECE.. if is_its_own => Ok(()),
        _ => Err(MemoryError::ZeroedFile("lies in a file system that can be full")),
    }
}

impl Ram {
    /// Whether pieces of it can be had zeroed.
    ///
    /// # Errors
    /// Why not, as the end of a sentence.
    pub fn takes_zeroed(&self) -> Result<(), &'static str> {
        if self.hotplug().is_none_or(|range| range.length == 0) || self.identity.is_some() {
            return Err("it has no memory that can be plugged");
        }
        // Its thread puts pages at places that it had registered, and is lost where one is another mapping by then.
        if self.pager.is_some() {
            return Err("its memory comes on demand");
        }
        // A guest that owns its CPUs reaches the pages that were there, or a function of the host's that could not be taken off them.
        match self.pins.is_for_ever() {
            true => Err("its memory has to stay where it is"),
            false => Ok(()),
        }
    }

    /// Maps a file of [`ZEROED_PIECE`] zeroes in the place of the memory that can be plugged from this guest physical address on, whose
    /// content goes. Nobody may reach that past this process's page tables, and nothing of it may be plugged. The file is this memory's from
    /// now on: nobody else may change it, or cut it off. Once it is mapped it need not stay open.
    ///
    /// # Errors
    /// It is no such file, the address is none of a whole piece, the memory [takes none](Ram::takes_zeroed), or the host refused.
    #[allow(unsafe_code, reason = "a part of a region is mapped anew")]
    pub fn place_zeroed(&self, address: u64, file: &File) -> Result<(), MemoryError> {
        check_zeroed(file)?;
        let invalid = || MemoryError::Zeroed {
            what: "mapped there",
            source: std::io::ErrorKind::InvalidInput.into(),
        };
        let place = self.piece(address).ok_or_else(invalid)?;
        self.takes_zeroed().map_err(|_| invalid())?;
        let flags = MapFlags::SHARED.union(MapFlags::NORESERVE).union(MapFlags::FIXED);
        self.each_part(place / PAGE as u64, ZEROED_PIECE / PAGE as u64, |address, bytes, _| {
            // SAFETY: 1. the range lies within one region's mapping, which the region keeps and unmaps as a whole (`each_part`); 2. nothing
            // refers to what is in it but by volatile accesses of the region, which find memory there before and after; 3. the file has all
            // of the range, as was checked, and keeps it, as whoever has handed it over has promised.
            let mapped = unsafe { mmap(address, bytes, PROTECTION, flags, file, 0) };
            mapped.map_err(failed("mapped"))?;
            // SAFETY: 1. the range is the mapping that was just made; 2. MADV_HUGEPAGE changes how pages are backed, never what they hold.
            if let Err(error) = unsafe { madvise(address, bytes, Advice::LinuxHugepage) } {
                log::debug!("no huge pages for zeroed memory: {error}");
            }
            Ok(())
        })?;
        self.zeroed.lock().insert(place);
        Ok(())
    }

    /// The place of the piece that begins at this guest physical address, if one does.
    fn piece(&self, address: u64) -> Option<u64> {
        let region = self.hotplug()?;
        let offset = address.checked_sub(region.start)?;
        let end = offset.checked_add(ZEROED_PIECE)?;
        let is_whole = offset.is_multiple_of(ZEROED_PIECE) && end <= region.length;
        is_whole.then_some(self.sizes().boot.bytes() + offset)
    }

    /// Maps again what was there before all that came zeroed. Nothing may access the memory meanwhile.
    pub(crate) fn put_back_zeroed(&self) -> Result<(), MemoryError> {
        let mut pieces = self.zeroed.lock();
        while let Some(&place) = pieces.first() {
            self.put_back(place)?;
            pieces.pop_first();
        }
        Ok(())
    }

    fn put_back(&self, place: u64) -> Result<(), MemoryError> {
        let whole = Segment {
            first: place / PAGE as u64,
            pages: ZEROED_PIECE / PAGE as u64,
            file: 0,
        };
        let Some(layers) = self.layers() else {
            return self.each_part(whole.first, whole.pages, |address, bytes, _| anonymous(address, bytes));
        };
        let base = layers.base()?;
        // As `Ram::from_layers` has it: a file of before anything could be plugged has nothing of it.
        if base.metadata().map_err(image::failed("looked at"))?.len() > place {
            self.map(&whole, base)?;
            let (region, at) = self.at(place)?;
            let runs = blocks_with_data(base, whole.places(), HUGE_PAGE as u64);
            for run in runs.map_err(image::failed("looked at"))? {
                let within = |end: u64| at + usize::try_from(end - place).unwrap_or(usize::MAX - at);
                huge_pages(region, within(run.start)..within(run.end));
            }
        } else {
            self.each_part(whole.first, whole.pages, |address, bytes, _| anonymous(address, bytes))?;
        }
        for part in parts(layers, &whole) {
            self.map_over(&part)?;
        }
        Ok(())
    }
}

/// What lies in other files than the lowest of some pages.
fn parts(layers: &Layers, whole: &Segment) -> Vec<Segment> {
    let end = whole.first + whole.pages;
    let part = |segment: &Segment| {
        let first = segment.first.max(whole.first);
        let last = segment.first.saturating_add(segment.pages).min(end);
        let pages = last.checked_sub(first).filter(|pages| *pages > 0)?;
        Some(Segment {
            first,
            pages,
            ..*segment
        })
    };
    layers.segments().iter().filter_map(part).collect()
}

#[cfg(test)]
mod tests;
