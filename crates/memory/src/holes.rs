//! Saved memory of which no file has content, for a VM whose memory will all be its own: devices of the host's reach it. Mapped from a file such
//! pages would come by the page cache, 4 KiB at a time, to be copied. Does not know who reaches it.

use std::ffi::c_void;
use std::ops::Range;

use base::sparse::blocks_with_data;
use rustix::mm::{Advice, MapFlags, madvise, mmap_anonymous};

use crate::{HUGE_PAGE, Layers, MemoryError, PAGE, PROTECTION, Ram, SHARING, image};

const BLOCK: u64 = HUGE_PAGE as u64;

impl Ram {
    /// Maps zeroed memory, in huge pages, wherever 2 MiB have no content in any of the files that this is mapped from; how many bytes that were.
    /// What is read and written there is the same as before; nobody may have written there yet, or mapped something else there.
    ///
    /// # Errors
    /// A file cannot be looked at, or the host cannot map so many pieces.
    pub fn map_holes_anonymous(&self) -> Result<u64, MemoryError> {
        let holes = self.layers().map(holes).transpose()?.unwrap_or_default();
        let mut mapped = 0;
        for hole in holes {
            let (first, pages) = (hole.start / PAGE as u64, (hole.end - hole.start) / PAGE as u64);
            self.each_part(first, pages, |address, bytes, _| anonymous(address, bytes))?;
            mapped += hole.end - hole.start;
        }
        Ok(mapped)
    }
}

/// Whole blocks of the memory that have content in none of its files, by their places in them.
fn holes(layers: &Layers) -> Result<Vec<Range<u64>>, MemoryError> {
    let base = layers.base()?;
    let end = base.metadata().map_err(image::failed("looked at"))?.len();
    let mut content = blocks_with_data(base, 0..end, BLOCK).map_err(image::failed("looked at"))?;
    content.extend(layers.segments().iter().map(|segment| {
        let (first, behind) = (
            segment.first * PAGE as u64,
            (segment.first + segment.pages) * PAGE as u64,
        );
        first / BLOCK * BLOCK..behind.next_multiple_of(BLOCK)
    }));
    content.sort_unstable_by_key(|run| run.start);
    let (mut holes, mut place) = (Vec::new(), 0);
    for run in content {
        if run.start > place {
            holes.push(place..run.start);
        }
        place = place.max(run.end);
    }
    // A last block that is not whole stays the file's.
    let whole = end / BLOCK * BLOCK;
    if whole > place {
        holes.push(place..whole);
    }
    Ok(holes)
}

/// Maps memory of its own, for which huge pages are asked, in the place of a part of a region, as [`Ram::each_part`] has it: what was there
/// is zeroes then.
#[allow(unsafe_code, reason = "a part of a region is mapped anew")]
pub(crate) fn anonymous(address: *mut c_void, bytes: usize) -> Result<(), MemoryError> {
    let flags = SHARING.union(MapFlags::FIXED);
    // SAFETY: 1. the range lies within one region's mapping, which the region keeps and unmaps as a whole (`each_part`); 2. nothing refers to
    // what is in it but by volatile accesses of the region, which find memory there before and after.
    let mapped = unsafe { mmap_anonymous(address, bytes, PROTECTION, flags) };
    mapped.map_err(|error| image::failed("left where it has no content")(error.into()))?;
    // SAFETY: 1. the range is the mapping that was just made; 2. MADV_HUGEPAGE changes how pages are backed, never what they hold.
    if let Err(error) = unsafe { madvise(address, bytes, Advice::LinuxHugepage) } {
        log::debug!("no huge pages for guest memory: {error}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Arc;

    use base::ByteSize;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::{Layer, Written};

    const SIZE: ByteSize = ByteSize::mib(32);
    const PAGES: u64 = (32 << 20) / PAGE as u64;

    fn pagemap() -> File {
        File::open("/proc/self/pagemap").unwrap()
    }

    fn put(ram: &Ram, place: u64, value: u64) {
        ram.guest().write_obj(value, GuestAddress(place)).unwrap();
    }

    fn words(ram: &Ram) -> Vec<u64> {
        let word = |page| ram.guest().read_obj(GuestAddress(page * PAGE as u64)).unwrap();
        (0..PAGES).map(word).collect()
    }

    /// Files of a memory that has content at these places.
    fn saved(places: &[u64]) -> Layers {
        let ram = Ram::allocate(SIZE).unwrap();
        places.iter().for_each(|place| put(&ram, *place, place + 1));
        let file = Arc::new(tempfile::tempfile().unwrap());
        let image = ram.write_image(&file, Some(&pagemap())).unwrap();
        Layers::single(file, image)
    }

    fn map(layers: &Layers) -> Ram {
        Ram::from_layers(layers.clone(), SIZE).unwrap()
    }

    /// Writes what has changed to another file; the files then, and which pages these were.
    fn changes(ram: &Ram) -> (Layers, Vec<(u64, u64)>) {
        let file = Arc::new(tempfile::tempfile().unwrap());
        match ram.write_changes(&file, Some(&pagemap())).unwrap() {
            Written::Whole(_) => panic!("all of it was written"),
            Written::Changes(image, runs) => (ram.layers().unwrap().with(Layer { file, image }, &runs), runs),
        }
    }

    /// Which of these places are mapped from a file.
    fn of_files(ram: &Ram, places: &[u64]) -> Vec<u64> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let is_of_file = |place: &u64| {
            let address = ram.regions()[0].as_ptr().addr() + usize::try_from(*place).unwrap();
            let line = maps.lines().find(|line| {
                let (start, rest) = line.split_once('-').unwrap();
                let (end, _) = rest.split_once(' ').unwrap();
                let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).unwrap());
                (start..end).contains(&address)
            });
            line.unwrap().contains("(deleted)")
        };
        places.iter().copied().filter(is_of_file).collect()
    }

    #[test]
    fn what_has_content_stays_the_files_and_all_else_is_anonymous() {
        let (low, high) = (3 * BLOCK + 8192, 9 * BLOCK - 4096);
        let layers = saved(&[low, high]);
        let ram = map(&layers);
        let places = [0, low, high, high + 4096, SIZE.bytes() - 1];
        assert_eq!(of_files(&ram, &places), places);
        assert_eq!(ram.map_holes_anonymous().unwrap(), SIZE.bytes() - 2 * BLOCK);
        assert_eq!(of_files(&ram, &places), [low, high]);
        assert_eq!(words(&ram), words(&map(&layers)));
    }

    #[test]
    fn what_a_later_file_has_is_no_hole() {
        let ram = map(&saved(&[BLOCK]));
        put(&ram, 5 * BLOCK + 4096, 7);
        let (layers, _) = changes(&ram);
        let again = map(&layers);
        assert_eq!(again.map_holes_anonymous().unwrap(), SIZE.bytes() - 2 * BLOCK);
        assert_eq!(words(&again), words(&ram));
        assert_eq!(
            of_files(&again, &[0, BLOCK, 5 * BLOCK + 4096, 6 * BLOCK]),
            [BLOCK, 5 * BLOCK + 4096]
        );
    }

    #[test]
    fn what_has_changed_is_what_was_written() {
        let layers = saved(&[BLOCK]);
        let (plain, ram) = (map(&layers), map(&layers));
        ram.map_holes_anonymous().unwrap();
        for ram in [&plain, &ram] {
            put(ram, BLOCK, 8);
            put(ram, 6 * BLOCK + 4096, 9);
        }
        let (again, runs) = changes(&ram);
        assert_eq!(words(&map(&again)), words(&plain));
        // Huge pages are changed as a whole.
        let has = |page: u64| {
            runs.iter()
                .any(|(first, pages)| (*first..first + pages).contains(&page))
        };
        let page = |place: u64| place / PAGE as u64;
        assert!(has(page(BLOCK)) && has(page(6 * BLOCK) + 1));
        assert!(!has(page(BLOCK) + 1) && !has(page(5 * BLOCK)) && !has(page(7 * BLOCK)));
    }

    #[test]
    fn what_is_zeroed_and_was_put_there_is_zeroed_again() {
        let ram = map(&saved(&[BLOCK]));
        ram.map_holes_anonymous().unwrap();
        put(&ram, 2 * BLOCK, 3);
        let region = ram.regions()[0].as_ptr();
        let place = region.wrapping_add(usize::try_from(2 * BLOCK).unwrap());
        #[allow(unsafe_code, reason = "as whoever drops changes does")]
        // SAFETY: it is a part of the region's mapping, to which nobody has a reference.
        unsafe { madvise(place.cast(), HUGE_PAGE, Advice::LinuxDontNeed) }.unwrap();
        assert_eq!(words(&ram), words(&map(ram.layers().unwrap())));
    }
}
