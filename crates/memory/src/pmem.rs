//! Files as memory of a guest's beside its RAM, as a device tells it of them (virtio-pmem, virtio 1.2, 5.19). Knows no device.

use std::fs::File;
use std::sync::Arc;

use base::ByteSize;
use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, mmap};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MmapRegion};

use crate::{GuestRam, HUGE_PAGE, MemoryError, PAGE, PROTECTION, Ram, SHARING, aligned, layout};

/// Who has what a guest writes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmemWrites {
    /// The file, and whoever else maps it.
    Shared,
    /// The guest alone, as long as it is there: the file stays as it is.
    Private,
}

/// A part of such memory that is another file's: what another machine has as its memory, too.
#[derive(Debug)]
pub struct PmemPart {
    /// A memfd that is sealed against shrinking: whoever else has it could kill this process otherwise.
    pub file: File,
    /// Where in it the part begins.
    pub offset: u64,
    /// Where in the memory.
    pub at: u64,
    /// Its bytes.
    pub length: u64,
}

impl PmemPart {
    /// Whether it is whole pages within the memory, behind `before`, and of a file that has them and keeps them. Its end.
    fn check(&self, before: u64, memory: u64) -> Result<u64, MemoryError> {
        let refuse = |why: String| {
            let (at, length) = (self.at, self.length);
            Err(MemoryError::PmemPart { at, length, why })
        };
        let whole = |bytes: u64| bytes.is_multiple_of(PAGE as u64);
        if !whole(self.at) || !whole(self.length) || !whole(self.offset) || self.length == 0 {
            return refuse("give whole pages of 4 KiB".into());
        }
        let end = self.at.checked_add(self.length).filter(|end| *end <= memory);
        let Some(end) = end.filter(|_| self.at >= before) else {
            return refuse(format!(
                "it is not within the {memory:#x} bytes of the memory, or not behind the part before it: give parts by rising places"
            ));
        };
        let seals = rustix::fs::fcntl_get_seals(&self.file);
        if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return refuse(
                "its file can be cut short by others: give a memfd that is sealed against that (F_SEAL_SHRINK)".into(),
            );
        }
        let bytes = self.file.metadata().map_err(MemoryError::Pmem)?.len();
        match self.offset.checked_add(self.length).is_some_and(|end| end <= bytes) {
            true => Ok(end),
            false => refuse(format!(
                "its file has {bytes:#x} bytes, and it begins there at {:#x}",
                self.offset
            )),
        }
    }
}

/// Maps these parts in the place of what [`map_pmem`] has mapped there, which nobody has yet.
#[allow(unsafe_code, reason = "parts of a mapping are mapped anew")]
fn map_parts(mapping: &MmapRegion, parts: &[PmemPart]) -> Result<(), MemoryError> {
    let mut end = 0;
    for part in parts {
        end = part.check(end, mapping.size() as u64)?;
    }
    let flags = MapFlags::SHARED.union(MapFlags::NORESERVE).union(MapFlags::FIXED);
    for part in parts {
        let size = ByteSize(part.length);
        let (Ok(at), Ok(length)) = (usize::try_from(part.at), usize::try_from(part.length)) else {
            return Err(MemoryError::Layout(size));
        };
        let address = mapping.as_ptr().wrapping_add(at).cast();
        // SAFETY: 1. the range lies within the mapping, as was checked, which keeps it and unmaps it as a whole; 2. nothing refers to what is in
        // it: nobody has had it yet; 3. the file has all of the range and keeps it, by its seal.
        let mapped = unsafe { mmap(address, length, PROTECTION, flags, &part.file, part.offset) };
        mapped.map_err(|error| MemoryError::Pmem(error.into()))?;
    }
    Ok(())
}

/// Maps all of a file as memory from this guest physical address on. Nobody may cut the file short: whoever touches what is gone then is killed,
/// this process included. A memfd can be sealed against that. Some `parts`, by rising places, are of other files.
///
/// # Errors
/// It is no regular file of whole pieces of 2 MiB (Linux maps no others of persistent memory), a part is none that can be, or the host cannot
/// map them.
pub fn map_pmem(
    file: File,
    start: u64,
    writes: PmemWrites,
    parts: &[PmemPart],
) -> Result<Arc<GuestRegionMmap<()>>, MemoryError> {
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
    map_parts(&mapping, parts)?;
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
            map_pmem(shared.try_clone().unwrap(), place, PmemWrites::Shared, &[]).unwrap(),
            map_pmem(private.try_clone().unwrap(), second, PmemWrites::Private, &[]).unwrap(),
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
        let region = map_pmem(file(2 << 20), place, PmemWrites::Shared, &[]).unwrap();
        let ram = ram.with_pmem(vec![region]).unwrap();
        let ram = ram.with_hotplug(ByteSize::mib(256)).unwrap();
        let is_there = |ram: &Ram| ram.guest().write_obj(1_u8, GuestAddress(place)).is_ok();
        assert!(is_there(&ram) && is_there(&ram.without_hotplug().unwrap().unwrap()));
    }

    #[test]
    fn what_cannot_be_memory_or_lies_elsewhere_is_refused() {
        for bytes in [0, 4096, (2 << 20) + 4096] {
            let told = map_pmem(file(bytes), 1 << 39, PmemWrites::Shared, &[])
                .err()
                .unwrap()
                .to_string();
            assert!(told.contains("2 MiB"), "{told}");
        }
        let null = File::open("/dev/null").unwrap();
        assert!(map_pmem(null, 1 << 39, PmemWrites::Private, &[]).is_err());
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        let place = layout::pmem(ram.sizes());
        let at = |start| map_pmem(file(2 << 20), start, PmemWrites::Shared, &[]).unwrap();
        for start in [0, place.start - (2 << 20), place.start + place.length] {
            assert!(ram.clone().with_pmem(vec![at(start)]).is_err(), "{start:#x}");
        }
        assert!(
            ram.with_pmem(vec![at(place.start), at(place.start)]).is_err(),
            "in each other"
        );
    }

    fn part(file: &File, offset: u64, at: u64, length: u64) -> PmemPart {
        let file = file.try_clone().unwrap();
        PmemPart {
            file,
            offset,
            at,
            length,
        }
    }

    #[test]
    fn parts_are_other_files_and_the_rest_is_its_own() {
        const MIB: u64 = 1 << 20;
        let (own, first, second) = (file(8 * MIB), file(2 * MIB), file(4 * MIB));
        let parts = [part(&first, 4096, 2 * MIB, MIB), part(&second, 0, 4 * MIB, 4 * MIB)];
        let start = layout::pmem(ByteSize::mib(64).into()).start;
        let region = map_pmem(own.try_clone().unwrap(), start, PmemWrites::Shared, &parts).unwrap();
        drop(parts);
        // What is written at each place of the memory, and which file has it where.
        let places = [
            (0, &own, 0),
            (2 * MIB - 1, &own, 2 * MIB - 1),
            (2 * MIB, &first, 4096),
            (3 * MIB - 1, &first, MIB + 4095),
            (3 * MIB, &own, 3 * MIB),
            (4 * MIB, &second, 0),
            (8 * MIB - 1, &second, 4 * MIB - 1),
        ];
        for (value, (at, file, offset)) in (1_u8..).zip(places) {
            region.write_obj(value, vm_memory::MemoryRegionAddress(at)).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).unwrap();
            assert_eq!(byte, [value], "{at:#x}");
        }
        let mut hidden = [0xff];
        own.read_exact_at(&mut hidden, 4 * MIB).unwrap();
        assert_eq!(hidden, [0], "what is behind a part is the file's own");
    }

    #[test]
    fn parts_that_cannot_be_are_refused_with_what_is_wrong() {
        let window = file(4 << 20);
        let open = rustix::fs::memfd_create("open", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        let open = File::from(open);
        open.set_len(4 << 20).unwrap();
        let good = || part(&window, 0, 0, 8192);
        for (parts, words) in [
            (vec![part(&window, 0, 1, 4096)], "4 KiB"),
            (vec![part(&window, 512, 0, 4096)], "4 KiB"),
            (vec![part(&window, 0, 0, 100)], "4 KiB"),
            (vec![part(&window, 0, 0, 0)], "4 KiB"),
            (vec![part(&window, 0, 2 << 20, 4096)], "within the 0x200000"),
            (vec![part(&window, 0, 4096, 2 << 20)], "within the 0x200000"),
            (vec![part(&window, 0, 4096, u64::MAX - 4095)], "within the 0x200000"),
            (vec![good(), part(&window, 0, 4096, 4096)], "behind the part before it"),
            (vec![part(&window, 4 << 20, 0, 4096)], "its file has 0x400000 bytes"),
            (
                vec![part(&window, u64::MAX - 4095, 0, 4096)],
                "its file has 0x400000 bytes",
            ),
            (vec![good(), part(&open, 0, 8192, 4096)], "F_SEAL_SHRINK"),
            (
                vec![part(&File::open("/proc/self/exe").unwrap(), 0, 0, 4096)],
                "F_SEAL_SHRINK",
            ),
        ] {
            let told = map_pmem(file(2 << 20), 1 << 39, PmemWrites::Shared, &parts);
            let told = told.err().unwrap().to_string();
            assert!(told.contains(words), "{parts:?}: {told}");
        }
        assert!(map_pmem(file(2 << 20), 1 << 39, PmemWrites::Shared, &[good()]).is_ok());
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
