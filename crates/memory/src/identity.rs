//! Memory that nobody translates: the guest sees it where the host's bus has it. Whoever reserved it says where that is.

use std::sync::Arc;

use base::ByteSize;
use vm_memory::{GuestMemoryRegion, GuestRegionMmap};

use crate::layout::{self, Range};
use crate::{HUGE_PAGE, MemoryError, Ram};

/// Bytes behind a guest's memory that are its devices': a page for the MSI-X table of each, as there are no accesses that come out.
pub const TABLES: u64 = HUGE_PAGE as u64;

/// Where such memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentityLayout {
    /// Below 1 MiB, for code by which processors start.
    pub low: Range,
    /// The guest's memory.
    pub main: Range,
    /// Its devices' tables.
    pub tables: Range,
}

impl Ram {
    /// Takes `size` of zeroed memory, and [`TABLES`] behind it, of what somebody has mapped, and the low memory beside.
    ///
    /// # Errors
    /// There is not as much.
    pub fn identity(
        low: Arc<GuestRegionMmap<()>>,
        main: Arc<GuestRegionMmap<()>>,
        size: ByteSize,
    ) -> Result<Self, MemoryError> {
        let all = |region: &GuestRegionMmap<()>| Range {
            start: region.start_addr().0,
            length: region.len(),
        };
        let (low_range, mapped) = (all(&low), all(&main));
        let layout = IdentityLayout {
            low: low_range,
            main: Range {
                start: mapped.start,
                length: size.bytes(),
            },
            tables: Range {
                start: mapped.start.saturating_add(size.bytes()),
                length: TABLES,
            },
        };
        if size
            .bytes()
            .checked_add(TABLES)
            .is_none_or(|needed| needed > mapped.length)
        {
            return Err(MemoryError::Layout(size));
        }
        let mut ram = Self::from_regions(size.into(), vec![low, main], None)?;
        ram.identity = Some(layout);
        Ok(ram)
    }

    /// Where it is, if nobody translates.
    pub fn identity_layout(&self) -> Option<&IdentityLayout> {
        self.identity.as_ref()
    }

    /// Where a guest's memory begins, but for what is low in one that nobody translates. Loaders count from here.
    pub fn start(&self) -> u64 {
        self.identity.map_or(0, |place| place.main.start)
    }

    /// Where the memory that begins at [`Ram::start`] ends, or the hole in it begins.
    pub fn first_end(&self) -> u64 {
        let first = match &self.identity {
            Some(place) => Some(place.main),
            None => layout::ram(self.size()).first().copied(),
        };
        first.map_or(0, |range| range.start + range.length)
    }

    /// What of it is the guest's, lowest address first.
    pub fn ranges(&self) -> Vec<Range> {
        match &self.identity {
            Some(place) => vec![place.low, place.main],
            None => layout::ram(self.size()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{GuestAddress, MmapRegion};

    pub(super) fn region(start: u64, length: usize) -> Arc<GuestRegionMmap<()>> {
        let mapping = MmapRegion::new(length).unwrap();
        Arc::new(GuestRegionMmap::new(mapping, GuestAddress(start)).unwrap())
    }

    #[test]
    fn a_guests_memory_begins_where_it_was_placed() {
        const START: u64 = 5 << 30;
        let size = ByteSize::mib(64);
        let ram = Ram::identity(region(0x2_0000, 0x8000), region(START, 66 << 20), size).unwrap();
        assert_eq!((ram.start(), ram.first_end()), (START, START + size.bytes()));
        assert_eq!(ram.size(), size);
        assert_eq!(ram.ranges()[0].length, 0x8000);
        assert_eq!(ram.identity_layout().unwrap().tables.start, START + size.bytes());
        let short = Ram::identity(region(0x2_0000, 0x8000), region(START, 65 << 20), size);
        assert!(matches!(short, Err(MemoryError::Layout(_))));
        let translated = Ram::allocate(ByteSize::mib(64)).unwrap();
        assert_eq!((translated.start(), translated.first_end()), (0, 64 << 20));
        assert_eq!(translated.identity_layout(), None);
    }
}
