//! Files of zeroes in the place of chunks that nobody uses: none of a chunk that the guest owns a part of, or that is mapped.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use vfio::AddressSpace;
use vfio::fake::Op;
use vfio::fake::random::Random;
use vm_memory::{Bytes, GuestAddress};

use super::super::{Access, FillPolicy};
use super::tests::{BLOCK, BOOT, REGION, Rig};
use super::*;
use crate::DmaMemory;

const CHUNKS: u64 = REGION / CHUNK.get();
const BLOCKS: u64 = CHUNK.get() / BLOCK;

fn zeroed() -> File {
    let file = File::from(rustix::fs::memfd_create("zeroed", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(CHUNK.get()).unwrap();
    file
}

fn place(rig: &Rig, files: usize) -> u64 {
    let before = rig.pluggable.zeroed();
    let files = (0..files).map(|_| zeroed()).collect();
    rig.pluggable.place_zeroed(&rig.ram, files).unwrap();
    (rig.pluggable.zeroed() - before) / CHUNK.get()
}

/// A page of a chunk in which no test has words.
fn page(rig: &Rig, chunk: u64) -> GuestAddress {
    GuestAddress(rig.start() + chunk * CHUNK.get() + 0x2000)
}

fn marks(rig: &Rig) -> Vec<u64> {
    let mark = |chunk| rig.ram.guest().read_obj(page(rig, chunk)).unwrap();
    (0..CHUNKS).map(mark).collect()
}

fn mark_all(rig: &Rig) {
    (0..CHUNKS).for_each(|chunk| rig.ram.guest().write_obj(chunk + 1, page(rig, chunk)).unwrap());
}

#[test]
fn the_lowest_chunks_that_are_free_have_files_once() {
    let rig = Rig::new();
    mark_all(&rig);
    rig.plug(BLOCKS, 1).unwrap();
    assert_eq!((place(&rig, 1), marks(&rig)), (1, vec![0, 2, 3, 4]));
    assert_eq!((place(&rig, 1), marks(&rig)), (1, vec![0, 2, 0, 4]));
    assert_eq!(
        (place(&rig, 3), marks(&rig)),
        (1, vec![0, 2, 0, 0]),
        "there is one left"
    );
    assert_eq!((place(&rig, 1), rig.pluggable.zeroed()), (0, 3 * CHUNK.get()));
    // What the guest has had and given back is the host's again, and so has room for another.
    rig.plug(0, BLOCKS).unwrap();
    rig.unplug(0, BLOCKS - 1).unwrap();
    assert_eq!(place(&rig, 1), 0, "it has a block of it yet");
    rig.unplug(BLOCKS - 1, 1).unwrap();
    assert_eq!(place(&rig, 2), 1);
}

#[test]
fn what_goes_back_is_gone_from_its_file_and_room_for_another() {
    let rig = Rig::new();
    let file = zeroed();
    let blocks = || file.metadata().unwrap().blocks();
    let placed = vec![file.try_clone().unwrap()];
    rig.pluggable.place_zeroed(&rig.ram, placed).unwrap();
    let dma = rig.map().unwrap();
    rig.plug(0, BLOCKS).unwrap();
    mark_all(&rig);
    assert!(blocks() > 0);
    rig.unplug(0, BLOCKS).unwrap();
    assert_eq!((blocks(), marks(&rig)[0], place(&rig, 1)), (0, 0, 1));
    // What was mapped ahead, and filled, goes with the last function or when it is not wanted any more.
    rig.pluggable.map_next(REGION).unwrap();
    let (first, next) = (rig.pluggable.mapped_from_start(), rig.pluggable.unmapped_below(REGION));
    assert_eq!((first, next.len()), (CHUNK.get(), 3));
    assert_eq!(place(&rig, 4), 3);
    rig.pluggable.trim(0);
    // What is wanted still is not made anew, to be charged to somebody else.
    rig.pluggable.give_back(&next[..2], REGION);
    assert_eq!(place(&rig, 4), 1);
    rig.pluggable.give_back(&next[..2], 2 * CHUNK.get());
    assert_eq!(place(&rig, 4), 1);
    rig.pluggable.map_next(REGION).unwrap();
    assert_eq!(place(&rig, 1), 0);
    drop(dma);
    assert_eq!(place(&rig, 4), 1);
}

#[test]
fn what_is_mapped_for_functions_or_could_not_be_unmapped_stays() {
    let rig = Rig::new();
    let dma = rig.map().unwrap();
    rig.pluggable.map_next(REGION).unwrap();
    mark_all(&rig);
    assert_eq!((place(&rig, 1), marks(&rig)), (1, vec![1, 0, 3, 4]));
    rig.fake.fail(Op::Unmap, 1);
    drop(dma);
    assert!(rig.is_mapped(0), "a function could still reach it");
    let refused = rig.pluggable.place_zeroed(&rig.ram, vec![zeroed()]);
    assert_eq!(refused.map_err(|error| error.to_string()), Ok(()));
    assert_eq!((marks(&rig)[0], rig.pluggable.zeroed()), (1, CHUNK.get()));
}

#[test]
fn of_files_of_which_one_cannot_be_used_none_is() {
    let rig = Rig::new();
    mark_all(&rig);
    let short = zeroed();
    short.set_len(4096).unwrap();
    let refused = rig.pluggable.place_zeroed(&rig.ram, vec![zeroed(), short]);
    assert!(matches!(refused, Err(MemoryError::ZeroedFile(_))), "{refused:?}");
    assert_eq!((marks(&rig), rig.pluggable.zeroed()), (vec![1, 2, 3, 4], 0));
}

#[test]
fn what_came_zeroed_is_filled_at_once_and_all_else_by_its_rate() {
    let rig = Rig::new();
    let slow = FillPolicy::with(Some(64 << 10), None).unwrap();
    let space = DmaSpace::with_access(Arc::clone(&rig.fake) as Arc<dyn AddressSpace>, Access::None, slow);
    let memory = DmaMemory::of(&rig.ram).with_pluggable(&rig.ram, rig.pluggable.clone());
    let dma = space.map(&memory).unwrap();
    assert_eq!(place(&rig, 1), 1);
    let pieces = rig.pluggable.unmapped_below(2 * CHUNK.get());
    let ahead = rig.pluggable.fill_ahead(&pieces, 1).unwrap().unwrap();
    let begun = Instant::now();
    let late = || begun.elapsed() > Duration::from_secs(2);
    assert!(ahead.wait_for(0, late), "it waits for the rate");
    assert!(!ahead.wait_for(1, late), "it was filled, or not waited for");
    drop((ahead, dma));
}

/// Whether a page of a chunk is there that nobody has touched (Documentation/admin-guide/mm/pagemap.rst, bit 63).
fn is_there(rig: &Rig, chunk: u64) -> bool {
    use std::os::unix::fs::FileExt;
    let page = (rig.ram.regions().last().unwrap().as_ptr().addr() as u64 + chunk * CHUNK.get() + 0x3000) / 4096;
    let mut entry = [0; 8];
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut entry, page * 8).unwrap();
    u64::from_le_bytes(entry) >> 63 == 1
}

#[test]
fn what_is_plugged_before_the_first_function_comes_is_filled_by_its_rate() {
    const RATE: u64 = 512 << 20;
    let rig = Rig::new();
    rig.plug(0, 1).unwrap();
    rig.plug(2 * BLOCKS, 1).unwrap();
    let rate = FillPolicy::with(Some(RATE), None).unwrap();
    let space = DmaSpace::with_access(Arc::clone(&rig.fake) as Arc<dyn AddressSpace>, Access::None, rate);
    let memory = DmaMemory::of(&rig.ram).filled_by(2);
    let memory = memory.with_pluggable(&rig.ram, rig.pluggable.clone());
    let begun = Instant::now();
    let dma = space.map(&memory).unwrap();
    let all = BOOT + 2 * CHUNK.get();
    // A tenth of a second's share passes at once, and the last steps.
    let least = Duration::from_millis((all - (8 << 20)) * 1000 / RATE - 100);
    assert!(begun.elapsed() > least, "{:?}, not {least:?}", begun.elapsed());
    let chunks = [0, 1, 2].map(|chunk| (rig.is_mapped(chunk * BLOCKS), is_there(&rig, chunk)));
    assert_eq!(chunks, [(true, true), (false, false), (true, true)]);
    drop(dma);
    // Nobody waits for it who does not want it any more.
    space.stop();
    assert!(space.map(&memory).is_err());
    assert!(!rig.is_mapped(0));
}

/// Placed at any time, in any order: what a function reaches is where it was when it was mapped, and what the guest owns is what it has put
/// there.
#[test]
fn nothing_that_is_mapped_or_owned_is_replaced_whatever_happens() {
    let (mut beside_functions, mut alone) = (0, 0);
    for seed in 0..40 {
        let (rig, mut random) = (Rig::new(), Random(seed));
        let mut owned: BTreeSet<u64> = BTreeSet::new();
        let mut mapped: BTreeMap<u64, u64> = BTreeMap::new();
        let mut dma = None;
        for step in 0..60 {
            if random.below(6) == 0 {
                rig.fake.fail(Op::Map, 1 + random.below(3));
            }
            let (first, blocks) = (random.below(12), 1 + random.below(4));
            let run: BTreeSet<u64> = (first..first + blocks).collect();
            match random.below(8) {
                0 if dma.is_none() => dma = rig.map().ok(),
                0 => dma = None,
                1 if random.below(2) == 0 => rig.pluggable.trim(random.below(REGION)),
                1 => drop(rig.pluggable.map_next(random.below(REGION))),
                2 => rig.pluggable.give_back(
                    &rig.pluggable.unmapped_below(random.below(REGION)),
                    random.below(REGION),
                ),
                3 | 4 => match dma {
                    Some(_) => beside_functions += place(&rig, 2),
                    None => alone += place(&rig, 1),
                },
                5 if run.is_subset(&owned) => {
                    rig.unplug(first, blocks).unwrap();
                    owned.retain(|block| !run.contains(block));
                }
                _ if run.is_disjoint(&owned) && rig.plug(first, blocks).is_ok() => {
                    owned.extend(&run);
                    run.iter().for_each(|block| rig.write(*block, seed + block + 1));
                }
                _ => (),
            }
            for chunk in 0..CHUNKS {
                let guest = rig.ram.guest();
                if !rig.is_mapped(chunk * BLOCKS) {
                    mapped.remove(&chunk);
                } else if let Some(mark) = mapped.get(&chunk) {
                    let found: u64 = guest.read_obj(page(&rig, chunk)).unwrap();
                    assert_eq!(found, *mark, "seed {seed}, step {step}: chunk {chunk} was replaced");
                } else {
                    let mark = seed * 100 + step + 1;
                    guest.write_obj(mark, page(&rig, chunk)).unwrap();
                    mapped.insert(chunk, mark);
                }
            }
            for block in &owned {
                let word = rig.word(*block);
                assert_eq!(
                    word,
                    seed + block + 1,
                    "seed {seed}, step {step}: block {block} is lost"
                );
            }
        }
    }
    assert!(beside_functions > 20 && alone > 20, "{beside_functions}, {alone}");
}
