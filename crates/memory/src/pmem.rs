//! Files as memory of a guest's beside its RAM, as a device tells it of them (virtio-pmem, virtio 1.2, 5.19). Knows no device.

use std::fs::File;
use std::sync::Arc;

use base::ByteSize;
use rustix::mm::MapFlags;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

use crate::{GuestRam, HUGE_PAGE, MemoryError, PROTECTION, Ram, SHARING, aligned, layout};

/// Who has what a guest writes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmemWrites {
    /// The file, and whoever else maps it.
    Shared,
    /// The guest alone, as long as it is there: the file stays as it is.
    Private,
}

/// Maps all of a file as memory from this guest physical address on. Nobody may cut the file short: whoever touches what is gone then is killed,
/// this process included. A memfd can be sealed against that.
///
/// # Errors
/// It is no regular file of whole pieces of 2 MiB (Linux maps no others of persistent memory), or the host cannot map it.
pub fn map_pmem(file: File, start: u64, writes: PmemWrites) -> Result<Arc<GuestRegionMmap<()>>, MemoryError> {
    let metadata = file.metadata().map_err(MemoryError::Pmem)?;
    let bytes = metadata.len();
    if !metadata.is_file() || bytes == 0 || !bytes.is_multiple_of(HUGE_PAGE as u64) {
        return Err(MemoryError::PmemFile(bytes));
    }
    let size = ByteSize(bytes);
    let length = usize::try_from(bytes).map_err(|_| MemoryError::Layout(size))?;
    let place = FileOffset::new(file, 0);
    let flags = match writes {
        PmemWrites::Shared => MapFlags::SHARED | MapFlags::NORESERVE,
        PmemWrites::Private => SHARING,
    };
    let (protection, flags) = (PROTECTION.bits().cast_signed(), flags.bits().cast_signed());
    let map = || MmapRegion::build(Some(place.clone()), length, protection, flags);
    let mapping = aligned(length, HUGE_PAGE, map).map_err(|source| MemoryError::Map { size, source })?;
    let region = GuestRegionMmap::new(mapping, GuestAddress(start)).ok_or(MemoryError::Layout(size))?;
    Ok(Arc::new(region))
}

impl Ram {
    /// The same memory, and such regions beside it: devices reach them as they do RAM, and nothing else is done with them. They are in no
    /// snapshot and are not mapped for functions of the host's. What a guest's balloon discards of a shared file is zeroes in it.
    ///
    /// # Errors
    /// They are not where [`layout::pmem`] says, or lie in each other.
    pub fn with_pmem(mut self, regions: Vec<Arc<GuestRegionMmap<()>>>) -> Result<Self, MemoryError> {
        let place = layout::pmem(self.sizes);
        let is_beside = |region: &Arc<GuestRegionMmap<()>>| {
            use vm_memory::Address;
            let (first, last) = (region.start_addr().raw_value(), region.last_addr().raw_value());
            place.start <= first && last < place.start + place.length
        };
        if !regions.iter().all(is_beside) {
            return Err(MemoryError::Layout(self.sizes.all()));
        }
        self.pmem = regions;
        self.guest = Arc::new(self.guest_of(&self.regions)?);
        Ok(self)
    }

    /// Those regions, in their order.
    pub fn pmem(&self) -> &[Arc<GuestRegionMmap<()>>] {
        &self.pmem
    }

    /// The checked view of these regions of RAM, with what is beside it.
    pub(crate) fn guest_of(&self, regions: &[Arc<GuestRegionMmap<()>>]) -> Result<GuestRam, MemoryError> {
        let all = regions.iter().chain(&self.pmem).cloned().collect();
        GuestRam::from_arc_regions(all).map_err(|_| MemoryError::Layout(self.sizes.all()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::memfd;
    use layout::MemorySize;
    use std::os::unix::fs::FileExt;
    use vm_memory::Bytes;

    fn file(bytes: u64) -> File {
        memfd::sized("pmem", bytes).unwrap()
    }

    #[test]
    fn devices_reach_a_file_as_they_do_memory() {
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        let place = layout::pmem(ram.sizes()).start;
        let (shared, private) = (file(2 << 20), file(4 << 20));
        let second = place + (128 << 20);
        let regions = vec![
            map_pmem(shared.try_clone().unwrap(), place, PmemWrites::Shared).unwrap(),
            map_pmem(private.try_clone().unwrap(), second, PmemWrites::Private).unwrap(),
        ];
        let ram = ram.with_pmem(regions).unwrap();
        for (at, file, seen) in [(place, &shared, 7), (second, &private, 0)] {
            ram.guest().write_obj(7_u8, GuestAddress(at + 4096)).unwrap();
            assert_eq!(ram.guest().read_obj::<u8>(GuestAddress(at + 4096)).unwrap(), 7);
            let mut byte = [0xff];
            file.read_exact_at(&mut byte, 4096).unwrap();
            assert_eq!(byte[0], seen);
            file.write_all_at(&[9], 8192).unwrap();
            assert_eq!(ram.guest().read_obj::<u8>(GuestAddress(at + 8192)).unwrap(), 9);
        }
        assert!(ram.guest().write_obj(1_u8, GuestAddress(place + (2 << 20))).is_err());
        assert_eq!((ram.regions().len(), ram.pmem().len()), (1, 2));
    }

    #[test]
    fn what_can_be_plugged_comes_and_goes_beside_it() {
        let mut size = MemorySize::from(ByteSize::mib(64));
        size.hotplug_region = ByteSize::mib(256);
        let ram = Ram::allocate(size).unwrap();
        let place = layout::pmem(ram.sizes()).start;
        let region = map_pmem(file(2 << 20), place, PmemWrites::Shared).unwrap();
        let ram = ram.with_pmem(vec![region]).unwrap();
        let ram = ram.with_hotplug(ByteSize::mib(256)).unwrap();
        let is_there = |ram: &Ram| ram.guest().write_obj(1_u8, GuestAddress(place)).is_ok();
        assert!(is_there(&ram) && is_there(&ram.without_hotplug().unwrap().unwrap()));
    }

    #[test]
    fn what_cannot_be_memory_or_lies_elsewhere_is_refused() {
        for bytes in [0, 4096, (2 << 20) + 4096] {
            let told = map_pmem(file(bytes), 1 << 39, PmemWrites::Shared)
                .err()
                .unwrap()
                .to_string();
            assert!(told.contains("2 MiB"), "{told}");
        }
        let null = File::open("/dev/null").unwrap();
        assert!(map_pmem(null, 1 << 39, PmemWrites::Private).is_err());
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        let place = layout::pmem(ram.sizes());
        let at = |start| map_pmem(file(2 << 20), start, PmemWrites::Shared).unwrap();
        for start in [0, place.start - (2 << 20), place.start + place.length] {
            assert!(ram.clone().with_pmem(vec![at(start)]).is_err(), "{start:#x}");
        }
        assert!(
            ram.with_pmem(vec![at(place.start), at(place.start)]).is_err(),
            "in each other"
        );
    }

    #[test]
    fn the_place_of_files_is_above_all_else_and_within_40_bits() {
        for gib in [1, 8, 300, 600] {
            let size = MemorySize::from(ByteSize::gib(gib));
            let (place, window) = (layout::pmem(size), layout::pci_window_64(size));
            assert_eq!(place.start, window.start + window.length);
            assert_eq!(place.start + place.length, 1 << 40);
        }
        assert_eq!(layout::pmem(ByteSize::gib(2000).into()).length, 0);
    }
}
