//! Saved memory of which no file has content, for a VM whose memory will all be its own: devices of the host's reach it. Mapped from a file such
//! pages would come by the page cache, 4 KiB at a time, to be copied. Does not know who reaches it.
//!
//! Of memory that was in use a part is left as it is whose pages the page map has as this process's own: somebody has written there. Of all
//! others the content is the files', as whoever changes them gets a page of its own first; so nothing is lost if nobody writes between that
//! look and the new mapping.

use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;

use base::sparse::blocks_with_data;
use rustix::mm::{Advice, MapFlags, madvise, mmap_anonymous};

use crate::image::{self, Entry, entries};
use crate::{HUGE_PAGE, Layers, MemoryError, PAGE, PROTECTION, Ram, SHARING};

const BLOCK: u64 = HUGE_PAGE as u64;

/// So many blocks of the page map are read at a time.
const LOOK: usize = 32;

impl Ram {
    /// Maps zeroed memory, in huge pages, wherever 2 MiB have no content in any of the files that this is mapped from; how many bytes that were.
    /// What is read and written there is the same as before; nobody may have written there yet, or mapped something else there.
    ///
    /// # Errors
    /// A file cannot be looked at, or the host cannot map so many pieces.
    pub fn map_holes_anonymous(&self) -> Result<u64, MemoryError> {
        self.map_anonymous(self.layers().map(holes).transpose()?.unwrap_or_default())
    }

    /// The same for memory that was in use: only where nobody has written since it was mapped from its files, as this process's page map tells.
    /// From the look at that on until this returns nobody may write anywhere in it.
    ///
    /// # Errors
    /// As [`Ram::map_holes_anonymous`], or the page map cannot be read; what was mapped until then stays so, and holds the same as before.
    pub fn map_unwritten_holes_anonymous(&self, pagemap: &File) -> Result<u64, MemoryError> {
        self.map_anonymous(self.unwritten_holes(pagemap)?)
    }

    /// Which parts those are, by their places in the files. A hint as long as somebody may write.
    ///
    /// # Errors
    /// The page map or a file cannot be read.
    pub fn unwritten_holes(&self, pagemap: &File) -> Result<Vec<Range<u64>>, MemoryError> {
        let mut unwritten: Vec<Range<u64>> = Vec::new();
        for hole in self.layers().map(holes).transpose()?.unwrap_or_default() {
            for place in hole.clone().step_by(LOOK * HUGE_PAGE) {
                let places = place..(place + LOOK as u64 * BLOCK).min(hole.end);
                for block in self.unwritten_blocks(places, pagemap)? {
                    match unwritten.last_mut() {
                        Some(last) if last.end == block => last.end += BLOCK,
                        _ => unwritten.push(block..block + BLOCK),
                    }
                }
            }
        }
        Ok(unwritten)
    }

    /// Blocks between two places without a page of this process's own. What came zeroed is none, nor is a block that lies in two regions.
    fn unwritten_blocks(&self, places: Range<u64>, pagemap: &File) -> Result<Vec<u64>, MemoryError> {
        let (mut blocks, mut bytes) = (Vec::new(), Vec::new());
        let (region, first) = self.at(places.start)?;
        let end = first.saturating_add(usize::try_from(places.end - places.start).unwrap_or(usize::MAX));
        let last = end.min(region.size() / PAGE * PAGE);
        let entries = entries(region, (first, last), Some(pagemap), &mut bytes);
        let entries = entries.map_err(image::failed("looked at: page map"))?;
        for (place, entries) in places.step_by(HUGE_PAGE).zip(entries.chunks_exact(HUGE_PAGE / PAGE)) {
            let is_changed = entries.iter().any(|entry| Entry::of(*entry).is_changed());
            if !is_changed && !self.zeroed.overlaps(place..place + BLOCK) {
                blocks.push(place);
            }
        }
        Ok(blocks)
    }

    fn map_anonymous(&self, holes: Vec<Range<u64>>) -> Result<u64, MemoryError> {
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
    use std::collections::BTreeMap;
    use std::fs::File;
    use std::sync::{Arc, RwLock};

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
    fn what_was_written_stays_and_what_was_not_is_anonymous() {
        let layers = saved(&[BLOCK]);
        let (ram, plain) = (map(&layers), map(&layers));
        for ram in [&ram, &plain] {
            put(ram, 3 * BLOCK - 8, 5);
            put(ram, 7 * BLOCK, 0);
        }
        // To have been read is to be in the page cache.
        assert_eq!(ram.guest().read_obj::<u64>(GuestAddress(5 * BLOCK)).unwrap(), 0);
        let holes = ram.unwritten_holes(&pagemap()).unwrap();
        let all = SIZE.bytes();
        let expected = [0..BLOCK, 3 * BLOCK..7 * BLOCK, 8 * BLOCK..all];
        assert_eq!(holes, expected);
        assert_eq!(ram.map_unwritten_holes_anonymous(&pagemap()).unwrap(), all - 3 * BLOCK);
        let places = [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 5 * BLOCK, 7 * BLOCK, 8 * BLOCK];
        assert_eq!(of_files(&ram, &places), [BLOCK, 2 * BLOCK, 7 * BLOCK]);
        assert_eq!(words(&ram), words(&plain));
        // And what is written then is what a snapshot has.
        for ram in [&ram, &plain] {
            put(ram, 5 * BLOCK + 4096, 6);
        }
        let (again, _) = changes(&ram);
        assert_eq!(words(&map(&again)), words(&plain));
    }

    #[test]
    fn with_nothing_to_look_at_nothing_is_mapped() {
        let ram = Ram::allocate(SIZE).unwrap();
        assert_eq!(ram.map_unwritten_holes_anonymous(&pagemap()).unwrap(), 0);
    }

    /// Writes to some places all over a memory, one by one, when it may; no other thread writes to the same.
    fn write_all_over(ram: &Ram, turn: &RwLock<()>, number: u64) -> Vec<(u64, u64)> {
        let mut random = number * 7919 + 1;
        let mut write = |_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let place = (random >> 33) % PAGES * PAGE as u64 + number * 8;
            let _may = turn.read().unwrap();
            put(ram, place, random);
            (place, random)
        };
        let written: BTreeMap<u64, u64> = (0..12).map(&mut write).collect();
        written.into_iter().collect()
    }

    #[test]
    fn nothing_is_lost_of_what_others_write_before_they_stand_still_and_when_they_go_on() {
        const WRITERS: u64 = 3;
        let mut mapped = 0;
        for round in 0..20 {
            let ram = map(&saved(&[BLOCK, 9 * BLOCK + 4096]));
            let turn = RwLock::new(());
            let written: Vec<_> = std::thread::scope(|scope| {
                let writer = |number| {
                    let (ram, turn) = (&ram, &turn);
                    scope.spawn(move || write_all_over(ram, turn, round * WRITERS + number))
                };
                let writers: Vec<_> = (0..WRITERS).map(writer).collect();
                let stand_still = turn.write().unwrap();
                mapped += ram.map_unwritten_holes_anonymous(&pagemap()).unwrap();
                drop(stand_still);
                writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
            });
            for (place, value) in written {
                let found: u64 = ram.guest().read_obj(GuestAddress(place)).unwrap();
                assert_eq!(found, value, "at {place:#x}");
            }
        }
        assert!(mapped > 0, "there was nothing to map in any round");
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
