//! Lazy pinning of a guest's memory: pieces, each of which the module maps and pins when the guest first touches it, or in turn beside
//! that, until it has all of them. A guest so runs before all of its memory is there, zeroed and pinned, and has no exits for it soon
//! afterwards. Does not know how the module maps a piece.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, Weak};

use vm_memory::{Address, GuestMemoryRegion, GuestRegionMmap};

use crate::module::uapi;

/// The least piece: what second-stage tables map at once.
const PIECE: u64 = 2 << 20;

/// The most pieces of a region: the module keeps a list of them.
const MOST_PIECES: u64 = 1024;

/// The thread that maps pieces in turn.
const NAME: &str = "pinner";
const STACK: usize = 64 << 10;

struct Region {
    region: Arc<GuestRegionMmap<()>>,
    piece: u64,
    mapped: Vec<Mutex<bool>>,
}

impl Region {
    fn new(region: Arc<GuestRegionMmap<()>>) -> Self {
        let piece = region.len().div_ceil(MOST_PIECES).next_multiple_of(PIECE);
        let pieces = region.len().div_ceil(piece);
        Self {
            region,
            piece,
            mapped: (0..pieces).map(|_| Mutex::new(false)).collect(),
        }
    }

    /// Maps a piece, unless that has been done. One that is asked for meanwhile waits.
    fn map(&self, index: usize, map: impl FnOnce(uapi::Memory) -> io::Result<()>) -> io::Result<()> {
        let Some(mapped) = self.mapped.get(index) else {
            return Ok(());
        };
        let mut mapped = mapped.lock().unwrap_or_else(PoisonError::into_inner);
        if *mapped {
            return Ok(());
        }
        let offset = index as u64 * self.piece;
        map(uapi::Memory {
            guest: self.region.start_addr().raw_value() + offset,
            size: self.piece.min(self.region.len() - offset),
            address: self.region.as_ptr() as u64 + offset,
            ..uapi::Memory::default()
        })?;
        *mapped = true;
        Ok(())
    }
}

/// All of it.
#[derive(Default)]
pub(crate) struct LazyMemory {
    regions: RwLock<Vec<Region>>,
    pinning: AtomicBool,
}

impl LazyMemory {
    /// Has a region's pieces mapped later.
    pub(crate) fn add(&self, region: Arc<GuestRegionMmap<()>>) {
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        regions.push(Region::new(region));
    }

    fn regions(&self) -> RwLockReadGuard<'_, Vec<Region>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps the piece that a guest has touched; false if there is none there.
    pub(crate) fn map_touched(
        &self,
        address: u64,
        map: impl FnOnce(uapi::Memory) -> io::Result<()>,
    ) -> io::Result<bool> {
        let regions = self.regions();
        let touched = regions.iter().find_map(|region| {
            let offset = address.checked_sub(region.region.start_addr().raw_value())?;
            (offset < region.region.len()).then_some((region, offset / region.piece))
        });
        match touched {
            Some((region, piece)) => region
                .map(usize::try_from(piece).map_err(io::Error::other)?, map)
                .map(|()| true),
            None => Ok(false),
        }
    }

    /// Maps the piece of this number, counted over all regions; false if there are not as many.
    fn map_number(&self, mut number: usize, map: impl FnOnce(uapi::Memory) -> io::Result<()>) -> io::Result<bool> {
        for region in self.regions().iter() {
            if let Some(beyond) = number.checked_sub(region.mapped.len()) {
                number = beyond;
            } else {
                return region.map(number, map).map(|()| true);
            }
        }
        Ok(false)
    }

    /// Has a thread map all pieces in turn, from now on, as long as `owner` is there. Once: whoever comes later does nothing.
    pub(crate) fn start_pinning<T: Send + Sync + 'static>(
        &self,
        owner: Weak<T>,
        of: fn(&T) -> &Self,
        map: fn(&T, uapi::Memory) -> io::Result<()>,
    ) {
        if self.pinning.swap(true, Ordering::Relaxed) {
            return;
        }
        let body = move || {
            for number in 0.. {
                let Some(owner) = owner.upgrade() else { return };
                match of(&owner).map_number(number, |memory| map(&owner, memory)) {
                    Ok(true) => (),
                    Ok(false) => return,
                    // Who touches it gets the error, if it is one.
                    Err(error) => log::warn!("a piece of the guest's memory is pinned when it is touched: {error}"),
                }
            }
        };
        if let Err(error) = base::thread::spawn(NAME, STACK, body) {
            log::warn!("the guest's memory is pinned only as it is touched: no thread: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{GuestAddress, MmapRegion};

    use super::*;

    fn region(start: u64, length: usize) -> Arc<GuestRegionMmap<()>> {
        let mapping = MmapRegion::new(length).unwrap();
        Arc::new(GuestRegionMmap::new(mapping, GuestAddress(start)).unwrap())
    }

    fn lazy() -> LazyMemory {
        let memory = LazyMemory::default();
        memory.add(region(0, (5 << 20) + 4096));
        memory.add(region(4 << 30, 2 << 20));
        memory
    }

    #[test]
    fn a_piece_is_mapped_once_and_whole() {
        let lazy = lazy();
        let mut asked = Vec::new();
        for address in [0x20_0000, 0x3f_ffff, 0, 0x50_0fff, 4 << 30] {
            let mapped = lazy.map_touched(address, |memory| {
                asked.push((memory.guest, memory.size));
                Ok(())
            });
            assert!(mapped.unwrap());
        }
        let (low, mib) = (0x20_0000, 2 << 20);
        assert_eq!(
            asked,
            [(low, mib), (0, mib), (2 * low, (1 << 20) + 4096), (4 << 30, mib)]
        );
        for nowhere in [0x50_1000, (4 << 30) - 1, (4 << 30) + (2 << 20), u64::MAX] {
            assert!(!lazy.map_touched(nowhere, |_| unreachable!()).unwrap());
        }
    }

    #[test]
    fn what_could_not_be_mapped_is_mapped_again() {
        let lazy = lazy();
        let refused = lazy.map_touched(0, |_| Err(io::Error::from(io::ErrorKind::OutOfMemory)));
        assert!(refused.is_err());
        let mut asked = 0;
        for number in 0..4 {
            let map = |_| {
                asked += 1;
                Ok(())
            };
            assert!(lazy.map_number(number, map).unwrap());
        }
        assert_eq!(asked, 4);
        assert!(!lazy.map_number(4, |_| unreachable!()).unwrap());
    }

    #[test]
    fn pieces_grow_with_the_memory() {
        let large = Region::new(region(4 << 30, 5 << 30));
        assert_eq!(large.piece % PIECE, 0);
        assert!(large.mapped.len() as u64 <= MOST_PIECES);
        assert!(large.mapped.len() as u64 * large.piece >= 5 << 30);
    }
}
