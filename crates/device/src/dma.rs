//! A guest's memory as functions of the host's reach it: one address space for all functions of a VM, at the addresses that the guest
//! sees. Knows no function, and not by what an address space is served.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use memory::Ram;
use vfio::{AddressSpace, CHUNK, Mapped, Piece, Type1, UnmapError, VfioError, check_layout, map_all, unmap_all};
use vm_memory::{Address, GuestMemoryRegion, GuestRegionMmap};
use vmm_api::FdRef;

use crate::{CreateError, FdTable};

/// Memory that is where the host's bus has it is contiguous there, so that the IOMMU may map it by its largest pages.
const IDENTITY_CHUNK: NonZeroU64 = NonZeroU64::new(1 << 30).unwrap();

/// The address space of a VM, which its functions have come with.
#[derive(Default)]
pub struct DmaSpaces(Option<(FdRef, Arc<DmaSpace>)>);

impl DmaSpaces {
    /// That of a container, which is taken out of `fds` for the first function that names it.
    ///
    /// # Errors
    /// It is none, never came, or another function of this VM has another one.
    pub fn of(&mut self, container: FdRef, fds: &mut FdTable) -> Result<Arc<DmaSpace>, CreateError> {
        match &self.0 {
            Some((known, space)) if *known == container => Ok(Arc::clone(space)),
            Some(_) => Err(CreateError::Value(
                "the functions of a VM reach its memory by one container: take them together for one, and name it with each".into(),
            )),
            None => {
                let space = Type1::from_fd(fds.take(container)?).map_err(refused("a container of VFIO's"))?;
                let space = DmaSpace::new(Arc::new(space));
                self.0 = Some((container, Arc::clone(&space)));
                Ok(space)
            }
        }
    }
}

fn refused(what: &'static str) -> impl Fn(VfioError) -> CreateError {
    move |error| CreateError::Host {
        what,
        source: std::io::Error::other(error),
    }
}

/// What the functions of one VM reach: nothing, until the first one is plugged.
pub struct DmaSpace {
    space: Arc<dyn AddressSpace>,
    // There as long as a function is.
    memory: Mutex<Weak<GuestDma>>,
}

impl DmaSpace {
    /// One in which nothing is mapped.
    pub fn new(space: Arc<dyn AddressSpace>) -> Arc<Self> {
        Arc::new(Self {
            space,
            memory: Mutex::new(Weak::new()),
        })
    }

    /// Maps all of a guest's memory, if no function has had that done. Takes as long as it takes the host to zero it.
    ///
    /// # Errors
    /// Functions cannot reach all of it, which is found out before anything is mapped, or the host refuses. Nothing is mapped then.
    pub fn map(&self, ram: &Ram) -> Result<Arc<GuestDma>, CreateError> {
        let mut memory = self.memory();
        if let Some(mapped) = memory.upgrade() {
            return Ok(mapped);
        }
        let mapped = Arc::new(GuestDma::map(Arc::clone(&self.space), ram)?);
        *memory = Arc::downgrade(&mapped);
        Ok(mapped)
    }

    fn memory(&self) -> MutexGuard<'_, Weak<GuestDma>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A guest's memory, mapped: whoever has this may have functions reach it. With the last one it is unmapped, before its pages go; so a
/// function is closed before it gives this up.
pub struct GuestDma {
    space: Arc<dyn AddressSpace>,
    mapped: Vec<Mapped>,
    memory: Vec<Arc<GuestRegionMmap<()>>>,
}

impl GuestDma {
    fn map(space: Arc<dyn AddressSpace>, ram: &Ram) -> Result<Self, CreateError> {
        let what = "the guest's memory for DMA";
        let regions = ram.regions();
        let pieces = regions.iter().map(|region| Piece {
            iova: region.start_addr().raw_value(),
            address: region.as_ptr() as u64,
            length: region.len(),
        });
        let ranges = regions
            .iter()
            .map(|region| region.start_addr().raw_value()..=region.last_addr().raw_value());
        let allowed = space.iova_ranges().map_err(refused(what))?;
        check_layout(&allowed, ranges).map_err(refused(what))?;
        let chunk = match ram.identity_layout() {
            Some(_) => IDENTITY_CHUNK,
            None => CHUNK,
        };
        // SAFETY: 1. each piece is one whole mapping that its region owns, and the regions are kept until it is unmapped, or for ever if it
        // cannot be; 2. it is a guest's memory, which anybody may change at any time.
        match unsafe { map_all(space.as_ref(), pieces, chunk) } {
            Ok(mapped) => Ok(Self {
                space,
                mapped,
                memory: regions.to_vec(),
            }),
            Err(error) => {
                keep(error.left, regions.to_vec());
                Err(refused(what)(error.source))
            }
        }
    }

    /// What is mapped, in the order of its addresses.
    pub fn mapped(&self) -> &[Mapped] {
        &self.mapped
    }
}

impl Drop for GuestDma {
    fn drop(&mut self) {
        let left = unmap_all(self.space.as_ref(), std::mem::take(&mut self.mapped));
        keep(left, std::mem::take(&mut self.memory));
    }
}

/// Memory that could not be unmapped stays for as long as this process does: a function could still write to its pages.
fn keep(left: Vec<UnmapError>, memory: Vec<Arc<GuestRegionMmap<()>>>) {
    if left.is_empty() {
        return;
    }
    for error in left {
        log::error!("a guest's memory stays pinned until this process ends: {error}");
        error.mapped.abandon();
    }
    std::mem::forget(memory);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;

    use base::ByteSize;
    use vfio::fake::{FakeSpace, Op};

    fn ram() -> Ram {
        Ram::allocate(ByteSize::mib(256)).unwrap()
    }

    #[test]
    fn memory_is_mapped_once_for_all_functions_and_unmapped_with_the_last() {
        let (fake, ram) = (Arc::new(FakeSpace::new()), ram());
        let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
        let first = space.map(&ram).unwrap();
        let second = space.map(&ram).unwrap();
        assert_eq!((fake.count(Op::Map), fake.mapped_bytes()), (2, 256 << 20));
        assert_eq!(first.mapped().len(), 2);
        let region = &ram.regions()[0];
        assert_eq!(fake.translate(0x10_0000, 4096), Ok(region.as_ptr() as u64 + 0x10_0000));
        drop(first);
        assert_eq!(fake.mapped_bytes(), 256 << 20);
        drop(second);
        assert_eq!((fake.mapped_bytes(), fake.count(Op::Unmap)), (0, 2));
        // And for a function that comes later.
        drop(space.map(&ram).unwrap());
        assert_eq!(fake.count(Op::Map), 4);
    }

    #[test]
    fn a_failure_leaves_nothing_mapped_and_no_memory_behind() {
        let (fake, ram) = (Arc::new(FakeSpace::new()), ram());
        let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
        let owners = Arc::strong_count(&ram.regions()[0]);
        fake.fail(Op::Map, 2);
        let error = space.map(&ram).err().unwrap().to_string();
        assert!(error.contains("at 0x8000000"), "{error}");
        assert_eq!(fake.mapped_bytes(), 0);
        assert_eq!(Arc::strong_count(&ram.regions()[0]), owners);
    }

    #[test]
    fn memory_that_cannot_be_unmapped_is_kept() {
        let (fake, ram) = (Arc::new(FakeSpace::new()), ram());
        let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
        let mapped = space.map(&ram).unwrap();
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
        let error = space.map(&ram()).err().unwrap().to_string();
        assert!(error.contains("0x8000000 to 0x8ffffff"), "{error}");
        assert_eq!(fake.count(Op::Map), 0);
    }

    #[test]
    fn a_descriptor_that_is_no_container_is_refused() {
        let fd = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let mut fds = FdTable::new(vec![fd]);
        let mut spaces = DmaSpaces::default();
        assert!(matches!(spaces.of(FdRef(0), &mut fds), Err(CreateError::Host { .. })));
        assert!(matches!(spaces.of(FdRef(1), &mut fds), Err(CreateError::MissingFd(1))));
    }

    #[test]
    fn functions_of_one_vm_have_one_container() {
        let space = DmaSpace::new(Arc::new(FakeSpace::new()));
        let mut spaces = DmaSpaces(Some((FdRef(3), Arc::clone(&space))));
        let again = spaces.of(FdRef(3), &mut FdTable::default()).unwrap();
        assert!(Arc::ptr_eq(&again, &space));
        let error = spaces.of(FdRef(4), &mut FdTable::default()).err().unwrap().to_string();
        assert!(error.contains("one container"), "{error}");
    }
}
