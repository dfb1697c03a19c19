//! Functions behind an IOMMU that the guest has: each reaches of the guest's memory what the guest maps for it, where the guest maps it, and
//! nothing else. Knows neither the guest's requests nor its domains, and not by what an address space is served.
//!
//! ```text
//!  nothing ── map ──▶ pinned (nothing is discarded) ─▶ filled (a page of the process's own) ─▶ mapped ── unmap ──▶ nothing
//!                                                          └────────── refused ──────────────────▶ nothing
//! ```
//! Filling comes before pinning: of memory that is mapped privately from files each page becomes the process's own, and a page that a pager
//! brings is waited for, neither of which pinning does.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io::ErrorKind;
use std::iter::Sum;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use memory::{Pin, Pins};
use rustix::mm::{Advice, madvise};
use vfio::{DmaAccess, MSI_WINDOW, Mapped, Piece, UnmapError, VfioError};
use vm_memory::{Address, GuestMemoryRegion, GuestRegionMmap};

use super::{DmaMemory, DmaSpace, MapCounts, keep, refused};
use crate::CreateError;

/// So many pieces of memory can be mapped for a function: as many as a container of VFIO's takes (`dma_entry_limit`), of which each costs
/// the host's kernel memory that is not the guest's.
pub const MAX_MAPPINGS: usize = 65_535;

/// Why nothing was mapped, or is mapped still.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// Not all of it is memory of the guest's.
    #[error("{length:#x} bytes at {start:#x} are not all memory of the guest's")]
    NotMemory {
        /// The guest's address.
        start: u64,
        /// Bytes.
        length: u64,
    },
    /// More mappings than [`MAX_MAPPINGS`], or more bytes than the guest has.
    #[error("more cannot be mapped for a function: {MAX_MAPPINGS} pieces, and as much as the guest has memory")]
    Full,
    /// Pages could not be had.
    #[error("guest memory at {start:#x} cannot be filled: {source}")]
    Fill {
        /// The guest's address.
        start: u64,
        /// Why.
        source: std::io::Error,
    },
    /// The host's IOMMU refuses.
    #[error(transparent)]
    Host(#[from] VfioError),
}

impl EndpointError {
    /// More was wanted than there is: less may be had, or the same later.
    pub fn is_want_of_memory(&self) -> bool {
        match self {
            Self::Full => true,
            // ENOSPC is what a container says that takes no more mappings.
            Self::Fill { source, .. } | Self::Host(VfioError::Map { source, .. }) => {
                matches!(source.kind(), ErrorKind::OutOfMemory | ErrorKind::StorageFull)
            }
            Self::NotMemory { .. } | Self::Host(_) => false,
        }
    }
}

/// A mapping.
#[derive(Debug)]
struct Entry {
    pieces: Vec<Mapped>,
    /// Nothing of it is discarded.
    pin: Pin,
}

/// Mappings.
#[derive(Debug, Default)]
struct Entries {
    /// By the first address that the function uses.
    all: BTreeMap<u64, Entry>,
    /// Of all of them.
    pieces: usize,
}

impl Entries {
    fn insert(&mut self, iova: u64, entry: Entry) {
        self.pieces += entry.pieces.len();
        self.all.insert(iova, entry);
    }

    fn remove(&mut self, iova: u64) -> Option<Entry> {
        let entry = self.all.remove(&iova)?;
        self.pieces -= entry.pieces.len();
        Some(entry)
    }
}

/// What one function reaches: nothing at first. With the last of these all is unmapped, before the memory goes; so a function is closed before
/// it gives this up.
pub struct EndpointDma {
    entries: Mutex<Entries>,
    reserved: Vec<RangeInclusive<u64>>,
    regions: Vec<Arc<GuestRegionMmap<()>>>,
    pins: Pins,
    most_bytes: u64,
    // Its groups are open until all is unmapped.
    space: Arc<DmaSpace>,
}

impl EndpointDma {
    /// For a function whose address space is its own.
    ///
    /// # Errors
    /// The host does not tell which addresses can be mapped.
    pub fn new(space: Arc<DmaSpace>, memory: &DmaMemory) -> Result<Arc<Self>, CreateError> {
        let allowed = space.space.iova_ranges();
        Ok(Arc::new(Self {
            entries: Mutex::default(),
            reserved: gaps(&allowed.map_err(refused("the addresses that a function can use"))?),
            regions: memory.regions.clone(),
            pins: memory.pins.clone(),
            most_bytes: memory.size(),
            space,
        }))
    }

    /// Addresses that can not be mapped, ascending, but for [`MSI_WINDOW`], which never can.
    pub fn reserved(&self) -> &[RangeInclusive<u64>] {
        &self.reserved
    }

    /// Lets the function reach a range of the guest's memory from `iova` on. Takes as long as it takes to fill it.
    ///
    /// # Errors
    /// It is not all memory, too much would be mapped, or the host refuses: nothing has changed.
    pub fn map(&self, iova: u64, guest: memory::layout::Range, access: DmaAccess) -> Result<(), EndpointError> {
        let pieces = self.pieces(iova, guest)?;
        let mut entries = self.entries();
        let is_too_much = self
            .space
            .mapped()
            .checked_add(guest.length)
            .is_none_or(|all| all > self.most_bytes);
        if is_too_much || entries.pieces + pieces.len() > MAX_MAPPINGS {
            return Err(EndpointError::Full);
        }
        let mut entry = Entry {
            pieces: Vec::with_capacity(pieces.len()),
            // What is being discarded is waited for, and what is filled stays.
            pin: self.pins.pin(),
        };
        for piece in pieces {
            let mapped = fill(&piece)
                .map_err(|source| EndpointError::Fill {
                    start: guest.start + (piece.iova - iova),
                    source,
                })
                // SAFETY: 1. the piece lies within a mapping that its region owns, and the regions are kept until it is unmapped, or for ever
                // if it cannot be; 2. it is a guest's memory, which anybody may change at any time.
                .and_then(|()| Ok(unsafe { self.space.map_piece(piece, access) }?));
            match mapped {
                Ok(mapped) => entry.pieces.push(mapped),
                Err(error) => {
                    self.end(entry);
                    return Err(error);
                }
            }
        }
        entries.insert(iova, entry);
        Ok(())
    }

    /// Takes from the function what [`EndpointDma::map`] has mapped from this address on; nothing, where nothing was.
    ///
    /// # Errors
    /// The host did not unmap all of it: what is left is mapped, and can be tried again.
    pub fn unmap(&self, iova: u64) -> Result<(), EndpointError> {
        let mut entries = self.entries();
        let Some(Entry { pieces, pin }) = entries.remove(iova) else {
            return Ok(());
        };
        let (mut left, mut last) = (Vec::new(), None);
        for UnmapError { mapped, source } in self.unmap_pieces(pieces) {
            left.push(mapped);
            last = Some(source);
        }
        match last {
            None => Ok(()),
            Some(error) => {
                entries.insert(iova, Entry { pieces: left, pin });
                Err(error.into())
            }
        }
    }

    /// The same of all that is mapped, whatever fails.
    ///
    /// # Errors
    /// The last of them.
    pub fn unmap_all(&self) -> Result<(), EndpointError> {
        let all: Vec<u64> = self.entries().all.keys().copied().collect();
        let mut outcome = Ok(());
        for iova in all.into_iter().rev() {
            if let Err(error) = self.unmap(iova) {
                outcome = Err(error);
            }
        }
        outcome
    }

    /// How many bytes the function reaches.
    pub fn mapped(&self) -> u64 {
        self.space.mapped()
    }

    /// Unmaps pieces; those that could not be.
    fn unmap_pieces(&self, pieces: Vec<Mapped>) -> Vec<UnmapError> {
        let unmapped = pieces.into_iter().map(|piece| self.space.unmap(piece));
        unmapped.filter_map(Result::err).collect()
    }

    /// A mapping that nobody asks for any more: what cannot be unmapped of it stays for ever, and so does its memory.
    fn end(&self, Entry { pieces, pin }: Entry) {
        keep(self.unmap_pieces(pieces), self.regions.clone(), &self.pins);
        // Not before all of it is unmapped, or kept.
        drop(pin);
    }

    /// Where a range of the guest's memory is in this process: a piece for each part that is a mapping of its own.
    fn pieces(&self, iova: u64, guest: memory::layout::Range) -> Result<Vec<Piece>, EndpointError> {
        let not_memory = || EndpointError::NotMemory {
            start: guest.start,
            length: guest.length,
        };
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < guest.length {
            let at = guest.start.checked_add(done).ok_or_else(not_memory)?;
            let region = self.regions.iter().find(|region| {
                let start = region.start_addr().raw_value();
                (start..=region.last_addr().raw_value()).contains(&at)
            });
            let region = region.ok_or_else(not_memory)?;
            let offset = at - region.start_addr().raw_value();
            let length = (region.len() - offset).min(guest.length - done);
            pieces.push(Piece {
                iova: iova.checked_add(done).ok_or_else(not_memory)?,
                address: region.as_ptr() as u64 + offset,
                length,
            });
            done += length;
        }
        Ok(pieces)
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        // A mapping is in it when it is whole, and as long as something of it is mapped.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for EndpointDma {
    fn drop(&mut self) {
        let entries = std::mem::take(&mut *self.entries());
        entries.all.into_values().for_each(|entry| self.end(entry));
    }
}

/// Has each page be there, and be the process's own.
fn fill(piece: &Piece) -> std::io::Result<()> {
    let length = usize::try_from(piece.length).map_err(std::io::Error::other)?;
    // SAFETY: 1. the range lies within a mapping that its region owns, which is kept; 2. the content of its pages stays what it is.
    unsafe { madvise(piece.address as *mut c_void, length, Advice::LinuxPopulateWrite) }?;
    Ok(())
}

/// What lies between ranges that are allowed, and around them, but for [`MSI_WINDOW`].
fn gaps(allowed: &[RangeInclusive<u64>]) -> Vec<RangeInclusive<u64>> {
    let mut known: Vec<_> = allowed.iter().map(|range| (*range.start(), *range.end())).collect();
    known.push((*MSI_WINDOW.start(), *MSI_WINDOW.end()));
    known.sort_unstable();
    let (mut gaps, mut next) = (Vec::new(), Some(0));
    for (start, end) in known {
        if let Some(first) = next
            && first < start
        {
            gaps.push(first..=start - 1);
        }
        next = next.and_then(|next| end.checked_add(1).map(|behind| behind.max(next)));
    }
    gaps.extend(next.map(|next| next..=u64::MAX));
    gaps
}

/// Functions behind a guest's IOMMU, by the numbers that the guest knows them by (endpoint IDs). One object, which the IOMMU's thread and whoever
/// brings functions share.
#[derive(Clone, Default)]
pub struct Endpoints(Arc<Mutex<BTreeMap<u32, Weak<EndpointDma>>>>);

impl Endpoints {
    /// A function has this number from now on.
    pub fn insert(&self, id: u32, endpoint: &Arc<EndpointDma>) {
        self.all().insert(id, Arc::downgrade(endpoint));
    }

    /// None has this number any more. What is mapped for the one that had stays until it is closed.
    pub fn remove(&self, id: u32) {
        self.all().remove(&id);
    }

    /// The function of this number.
    pub fn find(&self, id: u32) -> Option<Arc<EndpointDma>> {
        self.all().get(&id).and_then(Weak::upgrade)
    }

    /// How many bytes functions reach, all of them together.
    pub fn mapped(&self) -> u64 {
        self.sum(DmaSpace::mapped)
    }

    /// What has been mapped for those that there are.
    pub fn map_counts(&self) -> MapCounts {
        self.sum(DmaSpace::map_counts)
    }

    fn sum<T: Sum>(&self, of: impl Fn(&DmaSpace) -> T) -> T {
        let there: Vec<_> = self.all().values().filter_map(Weak::upgrade).collect();
        there.iter().map(|endpoint| of(&endpoint.space)).sum()
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<u32, Weak<EndpointDma>>> {
        // Each change of it is whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
