//! An address space that is a map of intervals, with a DMA engine that knows what is mapped.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::space::Owner;
use crate::{AddressSpace, DmaAccess, MSI_WINDOW, Mapped, Piece, UnmapError, VfioError};

/// The only size of pages.
const PAGE: u64 = 4096;

/// What can be made to fail, and is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    /// [`AddressSpace::map`].
    Map,
    /// [`AddressSpace::unmap`].
    Unmap,
}

/// An access to what is not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("DMA fault at {0:#x}: it is not mapped")]
pub struct Fault(
    /// The first address that is not mapped.
    pub u64,
);

#[derive(Debug, Default)]
struct State {
    /// By the first address.
    mapped: BTreeMap<u64, Piece>,
    /// Those of them that may not be written to.
    read_only: BTreeSet<u64>,
    counts: BTreeMap<Op, u64>,
    /// Which call of which kind fails, counted from now on.
    failing: BTreeMap<Op, u64>,
}

impl State {
    /// Counts a call, and tells whether it is to fail.
    fn call(&mut self, op: Op) -> Result<(), io::Error> {
        *self.counts.entry(op).or_default() += 1;
        match self.failing.get_mut(&op) {
            Some(1) => {
                self.failing.remove(&op);
                Err(Errno::NOMEM.into())
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn overlaps(&self, piece: &Piece, last: u64) -> bool {
        let before = self.mapped.range(..=last).next_back();
        before
            .and_then(|(_, other)| other.last())
            .is_some_and(|end| end >= piece.iova)
    }
}

/// What is done before each call, by the thread that makes it.
struct Before(Box<dyn Fn(Op) + Send + Sync>);

impl fmt::Debug for Before {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Before")
    }
}

/// An address space without an IOMMU.
#[derive(Debug)]
pub struct FakeSpace {
    state: Mutex<State>,
    before: Before,
    ranges: Vec<RangeInclusive<u64>>,
    limit: u32,
    owner: Owner,
}

impl Default for FakeSpace {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeSpace {
    /// One of 48 bits without the window of interrupts, for 65 535 mappings.
    pub fn new() -> Self {
        Self {
            state: Mutex::default(),
            before: Before(Box::new(|_| ())),
            ranges: vec![0..=MSI_WINDOW.start() - 1, MSI_WINDOW.end() + 1..=(1 << 48) - 1],
            limit: 65_535,
            owner: Owner::default(),
        }
    }

    /// With these addresses.
    #[must_use]
    pub fn with_ranges(mut self, ranges: Vec<RangeInclusive<u64>>) -> Self {
        self.ranges = ranges;
        self
    }

    /// For so many mappings.
    #[must_use]
    pub fn with_limit(mut self, limit: u32) -> Self {
        self.limit = limit;
        self
    }

    /// With this done before each call, by the thread that makes it and with no lock held.
    #[must_use]
    pub fn with_before(mut self, before: impl Fn(Op) + Send + Sync + 'static) -> Self {
        self.before = Before(Box::new(before));
        self
    }

    /// Lets the `nth` call of this kind from now on fail, the next one being 1: once.
    pub fn fail(&self, op: Op, nth: u64) {
        self.state().failing.insert(op, nth.max(1));
    }

    /// How many calls of this kind there were, those that failed too.
    pub fn count(&self, op: Op) -> u64 {
        self.state().counts.get(&op).copied().unwrap_or(0)
    }

    /// What is mapped, ascending.
    pub fn mapped(&self) -> Vec<Piece> {
        self.state().mapped.values().copied().collect()
    }

    /// What a function may do with a piece that is mapped, by its first address.
    pub fn access(&self, iova: u64) -> Option<DmaAccess> {
        let state = self.state();
        let is_mapped = state.mapped.contains_key(&iova);
        is_mapped.then(|| match state.read_only.contains(&iova) {
            true => DmaAccess::Read,
            false => DmaAccess::ReadWrite,
        })
    }

    /// How many bytes are mapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.state().mapped.values().map(|piece| piece.length).sum()
    }

    /// Where in this process an access of a function begins.
    ///
    /// # Errors
    /// A byte of it is not mapped.
    pub fn translate(&self, iova: u64, length: u64) -> Result<u64, Fault> {
        let state = self.state();
        let mut at = iova;
        let end = iova.checked_add(length).ok_or(Fault(iova))?;
        let mut first = None;
        while at < end || first.is_none() {
            let piece = state.mapped.range(..=at).next_back().map(|(_, piece)| *piece);
            let piece = piece.filter(|piece| at - piece.iova < piece.length).ok_or(Fault(at))?;
            first.get_or_insert(piece.address + (at - piece.iova));
            at = piece.iova + piece.length;
        }
        first.ok_or(Fault(iova))
    }

    /// A function's write, as the function would do it.
    ///
    /// # Errors
    /// A byte of it is not mapped: nothing is written.
    ///
    /// # Safety
    /// What is mapped is memory of this process that anybody may write to, and neighbours there are neighbours here.
    pub unsafe fn dma_write(&self, iova: u64, data: &[u8]) -> Result<(), Fault> {
        let address = self.translate(iova, data.len() as u64)?;
        // SAFETY: 1. the destination is mapped and writable, by the caller; 2. the two do not overlap, as nobody has a reference to what
        // functions reach.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len()) };
        Ok(())
    }

    /// A function's read.
    ///
    /// # Errors
    /// A byte of it is not mapped.
    ///
    /// # Safety
    /// As [`FakeSpace::dma_write`].
    pub unsafe fn dma_read(&self, iova: u64, data: &mut [u8]) -> Result<(), Fault> {
        let address = self.translate(iova, data.len() as u64)?;
        // SAFETY: as in `dma_write`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, data.as_mut_ptr(), data.len()) };
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What type 1 checks of a piece.
    fn check(&self, state: &State, piece: &Piece) -> Result<(), Errno> {
        let aligned = [piece.iova, piece.address, piece.length]
            .iter()
            .all(|value| value % PAGE == 0);
        let last = piece.last().filter(|_| aligned).ok_or(Errno::INVAL)?;
        if state.overlaps(piece, last) {
            return Err(Errno::EXIST);
        }
        if state.mapped.len() as u64 >= u64::from(self.limit) {
            return Err(Errno::NOSPC);
        }
        match self
            .ranges
            .iter()
            .any(|range| range.contains(&piece.iova) && range.contains(&last))
        {
            true => Ok(()),
            false => Err(Errno::INVAL),
        }
    }
}

impl AddressSpace for FakeSpace {
    unsafe fn map_for(&self, piece: Piece, access: DmaAccess) -> Result<Mapped, VfioError> {
        (self.before.0)(Op::Map);
        let mut state = self.state();
        let checked = state
            .call(Op::Map)
            .and_then(|()| self.check(&state, &piece).map_err(io::Error::from));
        match checked {
            Ok(()) => {
                state.mapped.insert(piece.iova, piece);
                if access == DmaAccess::Read {
                    state.read_only.insert(piece.iova);
                }
                Ok(self.owner.mapped(piece))
            }
            Err(source) => Err(VfioError::Map {
                iova: piece.iova,
                length: piece.length,
                source,
                next: "",
            }),
        }
    }

    fn unmap(&self, mapped: Mapped) -> Result<(), UnmapError> {
        let mapped = self.owner.check(mapped)?;
        (self.before.0)(Op::Unmap);
        let mut state = self.state();
        if let Err(source) = state.call(Op::Unmap) {
            let call = "VFIO_IOMMU_UNMAP_DMA";
            return Err(UnmapError {
                mapped,
                source: VfioError::Call { call, source },
            });
        }
        let piece = mapped.piece();
        assert_eq!(
            state.mapped.remove(&piece.iova),
            Some(piece),
            "a value stands for what is not mapped"
        );
        state.read_only.remove(&piece.iova);
        mapped.settle();
        Ok(())
    }

    fn iova_ranges(&self) -> Result<Vec<RangeInclusive<u64>>, VfioError> {
        Ok(self.ranges.clone())
    }

    fn page_sizes(&self) -> Result<u64, VfioError> {
        Ok(PAGE)
    }

    fn available(&self) -> Result<Option<u32>, VfioError> {
        let used = u32::try_from(self.state().mapped.len()).unwrap_or(u32::MAX);
        Ok(Some(self.limit.saturating_sub(used)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::random::Random;

    /// What is mapped by another account: the owner of each page.
    const PAGES: usize = 64;
    type Pages = [Option<u64>; PAGES];

    fn piece(first: u64, pages: u64, address: u64) -> Piece {
        Piece {
            iova: first * PAGE,
            address: address * PAGE,
            length: pages * PAGE,
        }
    }

    fn pages_of(piece: Piece) -> std::ops::Range<usize> {
        let number = |address: u64| usize::try_from(address / PAGE).unwrap();
        number(piece.iova)..number(piece.iova + piece.length)
    }

    fn compare(space: &FakeSpace, pages: &Pages, seed: u64) {
        for (number, page) in (0..).zip(pages) {
            let expected = page.map(|address| address * PAGE).ok_or(Fault(number * PAGE));
            assert_eq!(
                space.translate(number * PAGE, PAGE),
                expected,
                "page {number} with seed {seed}"
            );
        }
    }

    fn map(space: &FakeSpace, pages: &mut Pages, piece: Piece, failing: bool) -> Option<Mapped> {
        let range = pages_of(piece);
        let fits = range.end <= PAGES && pages[range.clone()].iter().all(Option::is_none);
        // SAFETY: nobody reaches what is not there: nothing here does DMA.
        let mapped = unsafe { space.map(piece) }.ok();
        assert_eq!(mapped.is_some(), fits && !failing && piece.length > 0, "{piece:?}");
        if mapped.is_some() {
            for (at, page) in (piece.address / PAGE..).zip(&mut pages[range]) {
                *page = Some(at);
            }
        }
        mapped
    }

    #[test]
    fn in_any_order_pages_are_mapped_once_and_failures_change_nothing() {
        for seed in 0..300 {
            let mut random = Random(seed);
            let space = FakeSpace::new().with_ranges(vec![0..=PAGES as u64 * PAGE - 1]);
            let mut pages: Pages = [None; PAGES];
            let mut held: Vec<Mapped> = Vec::new();
            for _ in 0..60 {
                let failing = random.below(6) == 0;
                if random.below(5) < 3 {
                    let wanted = piece(
                        random.below(PAGES as u64),
                        random.below(9),
                        1000 + random.below(1 << 20),
                    );
                    if failing {
                        space.fail(Op::Map, 1);
                    }
                    held.extend(map(&space, &mut pages, wanted, failing));
                } else if !held.is_empty() {
                    let index = usize::try_from(random.below(held.len() as u64)).unwrap();
                    let mapped = held.swap_remove(index);
                    let piece = mapped.piece();
                    if failing {
                        space.fail(Op::Unmap, 1);
                    }
                    match space.unmap(mapped) {
                        Ok(()) => pages[pages_of(piece)].fill(None),
                        Err(left) => {
                            assert!(failing, "seed {seed}");
                            held.push(left.mapped);
                        }
                    }
                }
                compare(&space, &pages, seed);
                let sum: u64 = held.iter().map(Mapped::length).sum();
                assert_eq!(
                    (space.mapped_bytes(), space.mapped().len()),
                    (sum, held.len()),
                    "seed {seed}"
                );
            }
            assert!(crate::unmap_all(&space, held).is_empty());
            assert_eq!(space.mapped(), []);
        }
    }

    #[test]
    fn dma_reaches_what_is_mapped_and_nothing_else() {
        let file = base::memfd::sized("dma", 2 * PAGE).unwrap();
        let memory = crate::Mapping::new(&file, 0, 0x2000).unwrap();
        let space = FakeSpace::new();
        let piece = Piece {
            iova: 0x10_0000,
            address: memory.address(),
            length: memory.length(),
        };
        // SAFETY: 1. it is unmapped below; 2. nothing here has a reference to it.
        let mapped = unsafe { space.map(piece) }.unwrap();
        let mut data = [0; 4];
        // SAFETY: the one mapping is memory of ours.
        unsafe { space.dma_write(0x10_0ffe, b"abcd") }.unwrap();
        // SAFETY: as above.
        unsafe { space.dma_read(0x10_0ffe, &mut data) }.unwrap();
        assert_eq!(&data, b"abcd");
        for (iova, fault) in [(0x10_1ffe, 0x10_2000), (0xf_fffe, 0xf_fffe), (u64::MAX, u64::MAX)] {
            // SAFETY: as above.
            assert_eq!(unsafe { space.dma_write(iova, b"abcd") }, Err(Fault(fault)));
        }
        space.unmap(mapped).unwrap();
        // SAFETY: nothing is mapped.
        assert_eq!(unsafe { space.dma_read(0x10_0000, &mut data) }, Err(Fault(0x10_0000)));
    }

    #[test]
    fn what_type1_refuses_is_refused() {
        let space = FakeSpace::new().with_limit(1);
        // SAFETY: nobody reaches it.
        let refused = |piece| unsafe { space.map(piece) }.unwrap_err().to_string();
        assert!(refused(piece(0xfee00, 1, 1)).contains("Invalid argument"));
        assert!(refused(piece(0xfedff, 2, 1)).contains("Invalid argument"));
        assert!(refused(piece(0, 0, 1)).contains("Invalid argument"));
        // SAFETY: as above.
        let mapped = unsafe { space.map(piece(4, 4, 1)) }.unwrap();
        assert!(refused(piece(7, 9, 1)).contains("File exists"));
        assert!(refused(piece(8, 1, 1)).contains("No space left"));
        assert_eq!(space.available().unwrap(), Some(0));
        space.unmap(mapped).unwrap();
    }
}
