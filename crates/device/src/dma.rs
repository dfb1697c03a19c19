//! A guest's memory as functions of the host's reach it: one address space for all functions of a VM, at the addresses that the guest
//! sees. Knows no function, and not by what an address space is served.

mod access;
mod ahead;
mod ballooned;
mod endpoint;
mod fill;
mod pluggable;
mod progress;

use std::io;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use memory::{Pin, Pins, Ram};
use vfio::{
    AddressSpace, CHUNK, DmaAccess, Mapped, Piece, UnmapError, VfioError, check_layout, map_runs, runs, unmap_all,
};
use vm_memory::{Address, GuestMemoryRegion, GuestRegionMmap};

use crate::CreateError;
use access::Access;
use ahead::Run;
use fill::FillPolicy;
use progress::Progress;

pub use access::{DmaSpaces, KnownBy, Taken};
pub use ahead::Ahead;
pub use ballooned::{BalloonedDma, DeflateCounts, MapTuning};
pub use endpoint::{EndpointDma, EndpointError, Endpoints, MAX_MAPPINGS};
pub use pluggable::{PlugCounts, PluggableDma};
pub use progress::MapCounts;

/// Memory that is where the host's bus has it is contiguous there, so that the IOMMU may map it by its largest pages.
const IDENTITY_CHUNK: NonZeroU64 = NonZeroU64::new(1 << 30).unwrap();

fn refused(what: &'static str) -> impl Fn(VfioError) -> CreateError {
    move |error| CreateError::Host {
        what,
        source: std::io::Error::other(error),
    }
}

/// What the functions of one VM reach: nothing, until that is mapped.
pub struct DmaSpace {
    space: Arc<dyn AddressSpace>,
    access: Access,
    fill: FillPolicy,
    // There as long as a function is.
    memory: Mutex<Weak<GuestDma>>,
    progress: Arc<Progress>,
    stopped: AtomicBool,
}

impl DmaSpace {
    /// One in which nothing is mapped.
    pub fn new(space: Arc<dyn AddressSpace>) -> Arc<Self> {
        Self::with_access(space, Access::None, FillPolicy::default())
    }

    fn with_access(space: Arc<dyn AddressSpace>, access: Access, fill: FillPolicy) -> Arc<Self> {
        Arc::new(Self {
            space,
            access,
            fill,
            memory: Mutex::new(Weak::new()),
            progress: Arc::default(),
            stopped: AtomicBool::new(false),
        })
    }

    /// Lets go of groups of which no function is left. Others are there, whose groups keep the container at work.
    pub fn close_groups(&self) {
        self.access.close_groups();
    }

    /// Whether its functions came by files of their own, for iommufd.
    pub fn has_iommufd(&self) -> bool {
        matches!(self.access, Access::Iommufd(_))
    }

    /// Maps all of a guest's memory, if no function has had that done. Takes as long as it takes the host to zero it.
    ///
    /// # Errors
    /// Functions cannot reach all of it, which is found out before anything is mapped; the host refuses; or [`DmaSpace::stop`] was called.
    /// Nothing is mapped then.
    pub fn map(self: &Arc<Self>, memory: &DmaMemory) -> Result<Arc<GuestDma>, CreateError> {
        let mut known = self.memory();
        if let Some(mapped) = known.upgrade() {
            return Ok(mapped);
        }
        let mapped = Arc::new(GuestDma::map(self, memory)?);
        *known = Arc::downgrade(&mapped);
        Ok(mapped)
    }

    /// How many bytes are mapped, those included that are on their way.
    pub fn mapped(&self) -> u64 {
        self.progress.mapped()
    }

    /// What has been mapped so far, and how long that took.
    pub fn map_counts(&self) -> MapCounts {
        self.progress.counts()
    }

    /// Gives up what is being mapped.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Begins to fill runs of this memory that are to be mapped, in their order and as this space's memory is filled, by so many threads.
    fn fill_ahead(
        &self,
        runs: impl IntoIterator<Item = impl Into<Run>>,
        memory: Vec<Arc<GuestRegionMmap<()>>>,
        fillers: usize,
    ) -> io::Result<Ahead> {
        let runs = runs.into_iter().map(Into::into).collect();
        let ahead = Ahead::begin(runs, memory, fillers, &self.fill)?;
        Ok(ahead.counted(self.progress.begin()))
    }

    /// As [`AddressSpace::map_for`].
    ///
    /// # Safety
    /// As there.
    unsafe fn map_piece(&self, piece: Piece, access: DmaAccess) -> Result<Mapped, VfioError> {
        let _work = self.progress.begin();
        // SAFETY: what is asked is the same.
        let mapped = unsafe { self.space.map_for(piece, access) }?;
        self.progress.add(piece.length);
        Ok(mapped)
    }

    /// The end of a piece that was mapped by [`DmaSpace::map_piece`].
    fn unmap(&self, mapped: Mapped) -> Result<(), UnmapError> {
        let length = mapped.length();
        self.space.unmap(mapped)?;
        self.progress.remove(length);
        Ok(())
    }

    fn memory(&self) -> MutexGuard<'_, Weak<GuestDma>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a function reaches of a guest's memory, as long as this is there.
pub enum Reach {
    /// All that the guest owns, at the guest's addresses.
    All(Arc<GuestDma>),
    /// What the guest maps for it, by an IOMMU of its own.
    Mapped(Arc<EndpointDma>),
}

/// A guest's memory as it is to be mapped.
#[derive(Clone)]
pub struct DmaMemory {
    /// What it boots with.
    regions: Vec<Arc<GuestRegionMmap<()>>>,
    pluggable: Option<(PluggableDma, Arc<GuestRegionMmap<()>>)>,
    /// What of its regions is in a balloon, and need not be mapped.
    ballooned: Option<BalloonedDma>,
    chunk: NonZeroU64,
    /// Threads that fill it ahead of the one that maps it; none where it is filled already.
    fillers: usize,
    pins: Pins,
}

/// Its last region is memory that can be plugged.
fn has_hotplug(ram: &Ram) -> bool {
    ram.hotplug().is_some_and(|range| range.length > 0)
}

impl DmaMemory {
    /// All that it boots with, filled by whoever maps it.
    pub fn of(ram: &Ram) -> Self {
        let boots_with = ram.regions().len() - usize::from(has_hotplug(ram));
        Self {
            regions: ram.regions()[..boots_with].to_vec(),
            pluggable: None,
            ballooned: None,
            chunk: match ram.identity_layout() {
                Some(_) => IDENTITY_CHUNK,
                None => CHUNK,
            },
            fillers: 0,
            pins: ram.pins().clone(),
        }
    }

    /// The same, filled by so many threads ahead of the one that maps it.
    #[must_use]
    pub fn filled_by(self, fillers: usize) -> Self {
        Self { fillers, ..self }
    }

    /// The same, and what is plugged of the memory that can be.
    #[must_use]
    pub fn with_pluggable(self, ram: &Ram, pluggable: PluggableDma) -> Self {
        let region = ram.regions().last().filter(|_| has_hotplug(ram));
        Self {
            pluggable: region.map(|region| (pluggable, Arc::clone(region))),
            ..self
        }
    }

    /// The same without what is in a balloon, as long as it is.
    #[must_use]
    pub fn with_ballooned(self, ballooned: BalloonedDma) -> Self {
        Self {
            ballooned: Some(ballooned),
            ..self
        }
    }

    /// Bytes that the guest boots with.
    pub fn size(&self) -> u64 {
        self.regions.iter().map(|region| region.len()).sum()
    }

    fn runs(&self) -> Vec<Piece> {
        let pieces = self.regions.iter().map(|region| Piece {
            iova: region.start_addr().raw_value(),
            address: region.as_ptr() as u64,
            length: region.len(),
        });
        runs(pieces, self.chunk)
    }
}

/// A guest's memory, mapped: whoever has this may have functions reach it. With the last one it is unmapped, before its pages go; so a
/// function is closed before it gives this up.
pub struct GuestDma {
    mapped: Vec<Mapped>,
    pluggable: Option<PluggableDma>,
    ballooned: Option<BalloonedDma>,
    memory: Vec<Arc<GuestRegionMmap<()>>>,
    // Its groups are open until all is unmapped.
    space: Arc<DmaSpace>,
    /// From before anything is mapped until all is unmapped, or for ever: nothing of it is discarded meanwhile.
    pin: Pin,
}

impl GuestDma {
    fn map(space: &Arc<DmaSpace>, memory: &DmaMemory) -> Result<Self, CreateError> {
        let what = "the guest's memory for DMA";
        let pluggable = memory.pluggable.iter().map(|(_, region)| region);
        let ranges = (memory.regions.iter().chain(pluggable))
            .map(|region| region.start_addr().raw_value()..=region.last_addr().raw_value());
        let allowed = space.space.iova_ranges().map_err(refused(what))?;
        check_layout(&allowed, ranges).map_err(refused(what))?;
        if let Some(ballooned) = &memory.ballooned {
            return Self::map_owned(space, memory, ballooned);
        }
        let runs = memory.runs();
        let pin = memory.pins.pin();
        let ahead = space.fill_ahead(runs.iter().copied(), memory.regions.clone(), memory.fillers);
        let ahead = ahead.map_err(|source| CreateError::Host { what, source })?;
        space.progress.forget();
        let before = |index: usize| {
            if let Some(last) = index.checked_sub(1) {
                space.progress.add(runs[last].length);
            }
            match ahead.wait_for(index, || space.is_stopped()) {
                true => Ok(()),
                false => Err(VfioError::GivenUp),
            }
        };
        // SAFETY: 1. each piece is one whole mapping that its region owns, and the regions are kept until it is unmapped, or for ever if it
        // cannot be; 2. it is a guest's memory, which anybody may change at any time.
        match unsafe { map_runs(space.space.as_ref(), &runs, before) } {
            Ok(mapped) => {
                if let Some(last) = runs.last() {
                    space.progress.add(last.length);
                }
                let mut dma = Self {
                    mapped,
                    pluggable: None,
                    ballooned: None,
                    memory: memory.regions.clone(),
                    space: Arc::clone(space),
                    pin,
                };
                dma.map_plugged(memory)?;
                Ok(dma)
            }
            Err(error) => {
                space.progress.forget();
                keep(error.left, memory.regions.clone(), &memory.pins);
                Err(refused(what)(error.source))
            }
        }
    }

    /// What is not in the balloon of what it boots with, and what is plugged.
    fn map_owned(space: &Arc<DmaSpace>, memory: &DmaMemory, ballooned: &BalloonedDma) -> Result<Self, CreateError> {
        let pin = memory.pins.pin();
        space.progress.forget();
        let begun = ballooned.begin(space, &memory.regions, &memory.pins, memory.fillers);
        begun.map_err(refused("the guest's memory for DMA"))?;
        let mut dma = Self {
            mapped: Vec::new(),
            pluggable: None,
            ballooned: Some(ballooned.clone()),
            memory: memory.regions.clone(),
            space: Arc::clone(space),
            pin,
        };
        dma.map_plugged(memory)?;
        Ok(dma)
    }

    fn map_plugged(&mut self, memory: &DmaMemory) -> Result<(), CreateError> {
        if let Some((pluggable, region)) = &memory.pluggable {
            let begun = pluggable.begin(&self.space, region, &memory.pins, memory.fillers);
            begun.map_err(refused("the guest's memory for DMA"))?;
            self.pluggable = Some(pluggable.clone());
        }
        Ok(())
    }

    /// Where it is mapped.
    pub fn space(&self) -> &Arc<DmaSpace> {
        &self.space
    }

    /// What is mapped of the memory that the guest boots with, in the order of its addresses; nothing where a part may be in a balloon.
    pub fn mapped(&self) -> &[Mapped] {
        &self.mapped
    }
}

impl Drop for GuestDma {
    fn drop(&mut self) {
        if let Some(pluggable) = &self.pluggable {
            pluggable.end();
        }
        if let Some(ballooned) = &self.ballooned {
            ballooned.end();
        }
        let left = unmap_all(self.space.space.as_ref(), std::mem::take(&mut self.mapped));
        self.space.progress.forget();
        keep(left, std::mem::take(&mut self.memory), self.pin.pins());
    }
}

/// Memory that could not be unmapped stays for as long as this process does: a function could still write to its pages.
fn keep(left: Vec<UnmapError>, memory: Vec<Arc<GuestRegionMmap<()>>>, pins: &Pins) {
    if left.is_empty() {
        return;
    }
    pins.pin().for_ever();
    for error in left {
        log::error!("a guest's memory stays pinned until this process ends: {error}");
        error.mapped.abandon();
    }
    std::mem::forget(memory);
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::ByteSize;
    use vfio::fake::{FakeSpace, Op};

    fn ram() -> Ram {
        Ram::allocate(ByteSize::mib(256)).unwrap()
    }

    #[test]
    fn memory_is_mapped_once_for_all_functions_and_unmapped_with_the_last() {
        let (fake, ram) = (Arc::new(FakeSpace::new()), ram());
        let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
        let first = space.map(&DmaMemory::of(&ram)).unwrap();
        let second = space.map(&DmaMemory::of(&ram)).unwrap();
        assert_eq!((fake.count(Op::Map), fake.mapped_bytes()), (2, 256 << 20));
        assert_eq!(first.mapped().len(), 2);
        let region = &ram.regions()[0];
        assert_eq!(fake.translate(0x10_0000, 4096), Ok(region.as_ptr() as u64 + 0x10_0000));
        drop(first);
        assert_eq!(fake.mapped_bytes(), 256 << 20);
        drop(second);
        assert_eq!((fake.mapped_bytes(), fake.count(Op::Unmap)), (0, 2));
        // And for a function that comes later.
        drop(space.map(&DmaMemory::of(&ram)).unwrap());
        assert_eq!(fake.count(Op::Map), 4);
    }

    #[test]
    fn a_failure_leaves_nothing_mapped_and_no_memory_behind() {
        let (fake, ram) = (Arc::new(FakeSpace::new()), ram());
        let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
        let owners = Arc::strong_count(&ram.regions()[0]);
        fake.fail(Op::Map, 2);
        let error = space.map(&DmaMemory::of(&ram)).err().unwrap().to_string();
        assert!(error.contains("at 0x8000000"), "{error}");
        assert_eq!(fake.mapped_bytes(), 0);
        assert_eq!(Arc::strong_count(&ram.regions()[0]), owners);
    }

    #[test]
    fn memory_that_cannot_be_unmapped_is_kept() {
        let (fake, ram) = (Arc::new(FakeSpace::new()), ram());
        let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
        let mapped = space.map(&DmaMemory::of(&ram)).unwrap();
        let owners = Arc::strong_count(&ram.regions()[0]);
        fake.fail(Op::Unmap, 1);
        drop(mapped);
        assert_eq!(fake.mapped_bytes(), 128 << 20);
        assert_eq!(Arc::strong_count(&ram.regions()[0]), owners);
    }

    #[test]
    fn memory_that_functions_cannot_reach_is_refused_before_anything_is_mapped() {
        let fake = Arc::new(FakeSpace::new().with_ranges(vec![0..=0x7ff_ffff, 0x900_0000..=u64::MAX]));
        let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
        let error = space.map(&DmaMemory::of(&ram())).err().unwrap().to_string();
        assert!(error.contains("0x8000000 to 0x8ffffff"), "{error}");
        assert_eq!(fake.count(Op::Map), 0);
    }

    #[test]
    fn what_is_being_mapped_can_be_given_up() {
        let (fake, memory) = (Arc::new(FakeSpace::new()), DmaMemory::of(&ram()).filled_by(2));
        let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
        space.stop();
        let told = space.map(&memory).err().unwrap();
        assert!(
            matches!(&told, CreateError::Host { source, .. } if source.to_string().contains("given up")),
            "{told}"
        );
        assert_eq!((fake.mapped_bytes(), space.mapped()), (0, 0));
    }

    #[test]
    fn memory_is_filled_ahead_and_progress_is_told() {
        let ram = ram();
        let (fake, memory) = (Arc::new(FakeSpace::new()), DmaMemory::of(&ram).filled_by(2));
        let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
        let resident = || ram.regions().iter().map(|region| resident(region)).sum::<usize>();
        assert_eq!(resident(), 0);
        let mapped = space.map(&memory).unwrap();
        assert_eq!((space.mapped(), memory.size()), (256 << 20, 256 << 20));
        // The space here touches nothing. Fillers that get no processor for long are not waited for.
        assert!(resident() > 0);
        drop(mapped);
        assert_eq!(space.mapped(), 0);
    }

    /// How many pages of it are there (mincore(2)).
    fn resident(region: &GuestRegionMmap<()>) -> usize {
        let length = usize::try_from(region.len()).unwrap();
        let mut pages = vec![0_u8; length / 4096];
        // SAFETY: 1. the range is a mapping that the region owns; 2. a byte a page is written.
        let asked = unsafe { libc::mincore(region.as_ptr().cast(), length, pages.as_mut_ptr()) };
        assert_eq!(asked, 0);
        pages.iter().filter(|page| **page & 1 != 0).count()
    }
}
