//! Memory that goes back to the host while its guest runs. Knows neither who decides that nor who else has it mapped: what a device of
//! the host's reaches must not be discarded before it is unmapped there, as the host then has other pages in its place.

use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, VolatileSlice};

use crate::layout::Range;
use crate::{GuestRam, MemoryError, PAGE, ZEROED_PIECE};

/// Gives all pages of a range of guest memory back to the host, which may take long where there are many. What is read there next is
/// zeroes, or what the file holds that the memory is mapped from privately: a snapshot's. Memory that came zeroed loses its file's pages, and
/// takes new ones when it is touched.
///
/// # Errors
/// The range is not one of whole pages of guest memory, or the host refused; a part of it may be gone then.
pub fn discard(guest: &GuestRam, range: Range) -> Result<(), MemoryError> {
    let failed = |source| MemoryError::Discard {
        start: range.start,
        length: range.length,
        source,
    };
    let outside = || failed(std::io::ErrorKind::InvalidInput.into());
    let whole = |number: u64| number.is_multiple_of(PAGE as u64);
    let end = range.start.checked_add(range.length).ok_or_else(outside)?;
    if !whole(range.start) || !whole(end) {
        return Err(outside());
    }
    let mut place = range.start;
    while place < end {
        let region = guest.find_region(GuestAddress(place)).ok_or_else(outside)?;
        let at = place - region.start_addr().raw_value();
        let in_piece = ZEROED_PIECE - at % ZEROED_PIECE;
        let length = (region.len() - at).min(end - place).min(in_piece);
        let offset = usize::try_from(at).map_err(|_| outside())?;
        let bytes = usize::try_from(length).map_err(|_| outside())?;
        let discarded = give_back(region, offset, bytes);
        discarded.map_err(|error| failed(error.into()))?;
        place += length;
    }
    Ok(())
}

/// Gives a part of a region back that lies within one [`ZEROED_PIECE`] of it.
///
/// Of a shared mapping the file keeps the pages that one process has no use for: they have to be removed from it. The kernel is asked for that
/// first, as it knows what is mapped there now, and refuses for a private mapping before it has changed anything (`madvise_remove` of
/// mm/madvise.c: EACCES for one of a file, EINVAL for one of none).
#[allow(unsafe_code, reason = "pages are given back by address")]
fn give_back(region: &GuestRegionMmap<()>, offset: usize, bytes: usize) -> Result<(), Errno> {
    let advise = |advice| {
        // SAFETY: 1. the range lies within one region's mapping, which the region keeps; 2. there is memory before and after; 3. nothing
        // refers to what is in it but by volatile accesses of the region.
        unsafe { madvise(region.as_ptr().wrapping_add(offset).cast(), bytes, advice) }
    };
    match advise(Advice::LinuxRemove) {
        Err(Errno::ACCESS | Errno::INVAL) => advise(Advice::LinuxDontNeed),
        removed => removed,
    }
}

/// Where a part of guest memory lies that was had from it, in the guest's addresses; `None` of a part of something else.
pub fn place_of(guest: &GuestRam, part: &VolatileSlice<'_>) -> Option<Range> {
    let at = part.ptr_guard().as_ptr().addr();
    guest.iter().find_map(|region| {
        let offset = at.checked_sub(region.as_ptr().addr())? as u64;
        let length = part.len() as u64;
        let is_within = offset.checked_add(length).is_some_and(|end| end <= region.len());
        is_within.then(|| Range {
            start: region.start_addr().raw_value() + offset,
            length,
        })
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;

    use base::ByteSize;
    use vm_memory::{Bytes, FileOffset, GuestRegionMmap, MmapRegion};

    use super::*;
    use crate::{Image, Layers, Ram};

    const MIB: u64 = 1 << 20;

    fn word(guest: &GuestRam, place: u64) -> u64 {
        guest.read_obj(GuestAddress(place)).unwrap()
    }

    fn range(start: u64, length: u64) -> Range {
        Range { start, length }
    }

    #[test]
    fn what_is_discarded_is_zero_and_the_rest_stays() {
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        for place in [8 * MIB - 8, 8 * MIB, 12 * MIB - 8, 12 * MIB] {
            ram.guest().write_obj(7_u64, GuestAddress(place)).unwrap();
        }
        discard(ram.guest(), range(8 * MIB, 4 * MIB)).unwrap();
        let words = [8 * MIB - 8, 8 * MIB, 12 * MIB - 8, 12 * MIB].map(|place| word(ram.guest(), place));
        assert_eq!(words, [7, 0, 0, 7]);
    }

    #[test]
    fn a_range_may_cross_regions_and_must_not_leave_them() {
        let regions = [0, 4 * MIB, 16 * MIB].map(|start| (GuestAddress(start), 4 << 20));
        let guest = GuestRam::from_ranges(&regions).unwrap();
        guest.write_obj(1_u64, GuestAddress(4 * MIB - 8)).unwrap();
        guest.write_obj(1_u64, GuestAddress(4 * MIB)).unwrap();
        discard(&guest, range(3 * MIB, 2 * MIB)).unwrap();
        assert_eq!((word(&guest, 4 * MIB - 8), word(&guest, 4 * MIB)), (0, 0));
        for (start, length) in [
            (7 * MIB, 2 * MIB),
            (32 * MIB, 4096),
            (1, 4096),
            (0, 5),
            (4096, u64::MAX - 4095),
        ] {
            let error = discard(&guest, range(start, length)).unwrap_err();
            assert!(matches!(error, MemoryError::Discard { .. }), "{error}");
        }
    }

    #[test]
    fn a_part_is_found_by_where_it_is() {
        let guest = GuestRam::from_ranges(&[(GuestAddress(0), 4 << 20), (GuestAddress(16 * MIB), 4 << 20)]).unwrap();
        let other = GuestRam::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
        let places = [(0, 4096), (3 * MIB, MIB), (16 * MIB, 4 * MIB), (17 * MIB + 5, 7)];
        for (start, length) in places {
            let bytes = usize::try_from(length).unwrap();
            let part = guest.get_slices(GuestAddress(start), bytes).next().unwrap().unwrap();
            assert_eq!(place_of(&guest, &part), Some(range(start, length)));
            assert_eq!(place_of(&other, &part), None, "it is another guest's");
        }
    }

    #[test]
    fn of_a_restored_memory_the_files_content_comes_back() {
        let file = tempfile::tempfile().unwrap();
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        ram.guest().write_obj(5_u64, GuestAddress(8 * MIB)).unwrap();
        let image: Image = ram.write_image(&file, None).unwrap();
        let copy = Ram::from_layers(Layers::single(Arc::new(file), image), ByteSize::mib(64)).unwrap();
        copy.guest().write_obj(6_u64, GuestAddress(8 * MIB)).unwrap();
        discard(copy.guest(), range(8 * MIB, 2 * MIB)).unwrap();
        assert_eq!(word(copy.guest(), 8 * MIB), 5);
    }

    #[test]
    #[allow(unsafe_code, reason = "a page is locked by its address")]
    fn what_the_host_does_not_take_is_an_error() {
        let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
        ram.guest().write_obj(7_u64, GuestAddress(8 * MIB)).unwrap();
        let page = ram.regions()[0].as_ptr().wrapping_add(8 << 20);
        // SAFETY: the page lies within the region's mapping, which stays until the end.
        unsafe { rustix::mm::mlock(page.cast(), PAGE) }.unwrap();
        let error = discard(ram.guest(), range(8 * MIB, 2 * MIB)).unwrap_err().to_string();
        assert!(error.contains("0x200000 bytes of guest memory at 0x800000"), "{error}");
        assert_eq!(word(ram.guest(), 8 * MIB), 7);
    }

    #[test]
    fn a_shared_file_loses_its_blocks() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("discard", flags).unwrap());
        file.set_len(4 * MIB).unwrap();
        let mapping = MmapRegion::from_file(FileOffset::new(file.try_clone().unwrap(), 0), 4 << 20).unwrap();
        let region = GuestRegionMmap::new(mapping, GuestAddress(0)).unwrap();
        let guest = GuestRam::from_regions(vec![region]).unwrap();
        guest.write_slice(&vec![1; 4 << 20], GuestAddress(0)).unwrap();
        assert_eq!(file.metadata().unwrap().blocks() * 512, 4 * MIB);
        discard(&guest, range(MIB, 2 * MIB)).unwrap();
        assert_eq!(file.metadata().unwrap().blocks() * 512, 2 * MIB);
        assert_eq!(word(&guest, MIB), 0);
    }
}
