//! Memory that a guest has and the module does not know of yet: pieces, each of which it is told of when the guest first touches it, or
//! in turn beside that, until it knows them all. A guest so runs before all of its memory is there, zeroed and pinned, and has no
//! exits for it soon afterwards. Does not know how the module is told.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, Weak};

use vm_memory::{Address, GuestMemoryRegion, GuestRegionMmap};

use crate::uapi;

/// The least piece: what second-stage tables map at once.
const PIECE: u64 = 2 << 20;

/// The most pieces of a region: the module keeps a list of them.
const MOST_PIECES: u64 = 1024;

/// The thread that gives pieces in turn.
const NAME: &str = "giver";
const STACK: usize = 64 << 10;

struct Region {
    region: Arc<GuestRegionMmap<()>>,
    piece: u64,
    given: Vec<Mutex<bool>>,
}

impl Region {
    fn new(region: Arc<GuestRegionMmap<()>>) -> Self {
        let piece = region.len().div_ceil(MOST_PIECES).next_multiple_of(PIECE);
        let pieces = region.len().div_ceil(piece);
        Self {
            region,
            piece,
            given: (0..pieces).map(|_| Mutex::new(false)).collect(),
        }
    }

    /// Gives a piece, unless that has been done. One that is asked for meanwhile waits.
    fn give(&self, index: usize, tell: impl FnOnce(uapi::Memory) -> io::Result<()>) -> io::Result<()> {
        let Some(given) = self.given.get(index) else {
            return Ok(());
        };
        let mut given = given.lock().unwrap_or_else(PoisonError::into_inner);
        if *given {
            return Ok(());
        }
        let offset = index as u64 * self.piece;
        tell(uapi::Memory {
            guest: self.region.start_addr().raw_value() + offset,
            size: self.piece.min(self.region.len() - offset),
            address: self.region.as_ptr() as u64 + offset,
            ..uapi::Memory::default()
        })?;
        *given = true;
        Ok(())
    }
}

/// All of it.
#[derive(Default)]
pub(crate) struct Later {
    regions: RwLock<Vec<Region>>,
    begun: AtomicBool,
}

impl Later {
    /// Has a region's pieces given later.
    pub(crate) fn add(&self, region: Arc<GuestRegionMmap<()>>) {
        let mut regions = self.regions.write().unwrap_or_else(PoisonError::into_inner);
        regions.push(Region::new(region));
    }

    fn regions(&self) -> RwLockReadGuard<'_, Vec<Region>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the piece that a guest has touched; false if there is none there.
    pub(crate) fn give(&self, address: u64, tell: impl FnOnce(uapi::Memory) -> io::Result<()>) -> io::Result<bool> {
        let regions = self.regions();
        let touched = regions.iter().find_map(|region| {
            let offset = address.checked_sub(region.region.start_addr().raw_value())?;
            (offset < region.region.len()).then_some((region, offset / region.piece))
        });
        match touched {
            Some((region, piece)) => region
                .give(usize::try_from(piece).map_err(io::Error::other)?, tell)
                .map(|()| true),
            None => Ok(false),
        }
    }

    /// Gives the piece of this number, counted over all regions; false if there are not as many.
    fn give_number(&self, mut number: usize, tell: impl FnOnce(uapi::Memory) -> io::Result<()>) -> io::Result<bool> {
        for region in self.regions().iter() {
            if let Some(beyond) = number.checked_sub(region.given.len()) {
                number = beyond;
            } else {
                return region.give(number, tell).map(|()| true);
            }
        }
        Ok(false)
    }

    /// Has a thread give all pieces in turn, from now on, as long as `owner` is there. Once: whoever comes later does nothing.
    pub(crate) fn begin<T: Send + Sync + 'static>(
        &self,
        owner: Weak<T>,
        of: fn(&T) -> &Self,
        tell: fn(&T, uapi::Memory) -> io::Result<()>,
    ) {
        if self.begun.swap(true, Ordering::Relaxed) {
            return;
        }
        let body = move || {
            for number in 0.. {
                let Some(owner) = owner.upgrade() else { return };
                match of(&owner).give_number(number, |memory| tell(&owner, memory)) {
                    Ok(true) => (),
                    Ok(false) => return,
                    // Who touches it gets the error, if it is one.
                    Err(error) => log::warn!("a piece of the guest's memory is given when it is touched: {error}"),
                }
            }
        };
        if let Err(error) = base::thread::spawn(NAME, STACK, body) {
            log::warn!("the guest's memory is given only as it is touched: no thread: {error}");
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

    fn later() -> Later {
        let later = Later::default();
        later.add(region(0, (5 << 20) + 4096));
        later.add(region(4 << 30, 2 << 20));
        later
    }

    #[test]
    fn a_piece_is_given_once_and_whole() {
        let later = later();
        let mut told = Vec::new();
        for address in [0x20_0000, 0x3f_ffff, 0, 0x50_0fff, 4 << 30] {
            let given = later.give(address, |memory| {
                told.push((memory.guest, memory.size));
                Ok(())
            });
            assert!(given.unwrap());
        }
        let (low, mib) = (0x20_0000, 2 << 20);
        assert_eq!(
            told,
            [(low, mib), (0, mib), (2 * low, (1 << 20) + 4096), (4 << 30, mib)]
        );
        for nowhere in [0x50_1000, (4 << 30) - 1, (4 << 30) + (2 << 20), u64::MAX] {
            assert!(!later.give(nowhere, |_| unreachable!()).unwrap());
        }
    }

    #[test]
    fn what_could_not_be_given_is_given_again() {
        let later = later();
        let refused = later.give(0, |_| Err(io::Error::from(io::ErrorKind::OutOfMemory)));
        assert!(refused.is_err());
        let mut told = 0;
        for number in 0..4 {
            let tell = |_| {
                told += 1;
                Ok(())
            };
            assert!(later.give_number(number, tell).unwrap());
        }
        assert_eq!(told, 4);
        assert!(!later.give_number(4, |_| unreachable!()).unwrap());
    }

    #[test]
    fn pieces_grow_with_the_memory() {
        let large = Region::new(region(4 << 30, 5 << 30));
        assert_eq!(large.piece % PIECE, 0);
        assert!(large.given.len() as u64 <= MOST_PIECES);
        assert!(large.given.len() as u64 * large.piece >= 5 << 30);
    }
}
