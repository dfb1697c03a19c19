//! Blocks that are plugged and unplugged with functions and without: what the guest owns is mapped, what is mapped is never discarded, and
//! what fails changes nothing, in any order.

use std::collections::BTreeSet;

use base::ByteSize;
use memory::Ram;
use memory::layout::MemorySize;
use vfio::AddressSpace;
use vfio::fake::random::Random;
use vfio::fake::{FakeSpace, Op};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::{DmaMemory, GuestDma};

pub(super) const BOOT: u64 = 128 << 20;
pub(super) const REGION: u64 = 512 << 20;
pub(super) const BLOCK: u64 = 32 << 20;

pub(super) struct Rig {
    pub(super) ram: Ram,
    pub(super) fake: Arc<FakeSpace>,
    pub(super) pluggable: PluggableDma,
}

impl Rig {
    pub(super) fn new() -> Self {
        let ram = Ram::allocate(MemorySize {
            boot: ByteSize(BOOT),
            hotplug: ByteSize(REGION),
            hotplug_region: ByteSize(0),
        });
        Self::of(ram.unwrap())
    }

    fn of(ram: Ram) -> Self {
        Self {
            pluggable: PluggableDma::new(ram.hotplug().unwrap()),
            ram,
            fake: Arc::new(FakeSpace::new()),
        }
    }

    pub(super) fn map(&self) -> Result<Arc<GuestDma>, crate::CreateError> {
        let space = DmaSpace::new(Arc::clone(&self.fake) as Arc<dyn AddressSpace>);
        space.map(&DmaMemory::of(&self.ram).with_pluggable(&self.ram, self.pluggable.clone()))
    }

    pub(super) fn start(&self) -> u64 {
        self.ram.hotplug().unwrap().start
    }

    fn run(&self, first: u64, blocks: u64) -> Range {
        Range {
            start: self.start() + first * BLOCK,
            length: blocks * BLOCK,
        }
    }

    pub(super) fn plug(&self, first: u64, blocks: u64) -> io::Result<()> {
        self.pluggable.clone().plug(self.ram.guest(), self.run(first, blocks))
    }

    pub(super) fn unplug(&self, first: u64, blocks: u64) -> io::Result<()> {
        self.pluggable.clone().unplug(self.ram.guest(), self.run(first, blocks))
    }

    pub(super) fn is_mapped(&self, block: u64) -> bool {
        self.fake.translate(self.start() + block * BLOCK, BLOCK).is_ok()
    }

    pub(super) fn word(&self, block: u64) -> u64 {
        self.ram
            .guest()
            .read_obj(GuestAddress(self.start() + block * BLOCK))
            .unwrap()
    }

    pub(super) fn write(&self, block: u64, word: u64) {
        let at = GuestAddress(self.start() + block * BLOCK);
        self.ram.guest().write_obj(word, at).unwrap();
    }
}

#[test]
fn without_functions_what_is_unplugged_goes_back_at_once() {
    let rig = Rig::new();
    rig.write(3, 9);
    rig.plug(3, 1).unwrap();
    assert_eq!(rig.word(3), 9, "a block that is plugged is not touched");
    rig.unplug(3, 1).unwrap();
    assert_eq!((rig.word(3), rig.fake.count(Op::Map)), (0, 0));
    assert_eq!(rig.pluggable.counts(), PlugCounts::default());
    let error = rig.pluggable.clone().unplug(
        rig.ram.guest(),
        Range {
            start: 1 << 45,
            length: BLOCK,
        },
    );
    assert!(error.unwrap_err().to_string().contains("cannot be given back"));
}

#[test]
fn the_first_function_has_what_is_plugged_mapped_and_the_last_one_takes_it_along() {
    let rig = Rig::new();
    rig.plug(5, 1).unwrap();
    rig.write(5, 7);
    let dma = rig.map().unwrap();
    assert!(rig.is_mapped(5) && !rig.is_mapped(0));
    assert_eq!((dma.space().mapped(), dma.space().map_counts().calls), (256 << 20, 2));
    rig.pluggable.map_next(REGION).unwrap();
    rig.write(0, 8);
    drop(dma);
    assert_eq!((rig.fake.mapped_bytes(), rig.word(5)), (0, 7));
    assert_eq!(rig.word(0), 0, "what is mapped and not plugged goes back");
}

#[test]
fn a_plug_hits_what_was_mapped_ahead_or_waits_for_it() {
    let rig = Rig::new();
    let dma = rig.map().unwrap();
    assert_eq!(rig.pluggable.unmapped_below(BLOCK).len(), 1);
    assert!(rig.pluggable.map_next(BLOCK).unwrap());
    assert!(!rig.pluggable.map_next(BLOCK).unwrap(), "no more is wanted");
    assert_eq!(rig.pluggable.mapped_from_start(), CHUNK.get());
    rig.plug(0, 4).unwrap();
    rig.plug(7, 2).unwrap();
    assert_eq!(rig.pluggable.counts(), PlugCounts { hits: 1, misses: 1 });
    assert!((0..12).all(|block| rig.is_mapped(block)) && !rig.is_mapped(12));
    rig.write(1, 5);
    rig.unplug(0, 3).unwrap();
    assert_eq!(rig.word(1), 5, "what is mapped is not discarded");
    rig.unplug(3, 1).unwrap();
    assert_eq!((rig.word(1), rig.is_mapped(0)), (0, false));
    drop(dma);
}

#[test]
fn a_plug_that_the_host_refuses_changes_nothing() {
    let rig = Rig::new();
    let dma = rig.map().unwrap();
    rig.fake.fail(Op::Map, 3);
    assert!(rig.plug(0, 12).is_err());
    assert_eq!(
        (rig.fake.mapped_bytes(), rig.pluggable.counts()),
        (BOOT, PlugCounts { hits: 0, misses: 1 })
    );
    rig.plug(0, 12).unwrap();
    rig.fake.fail(Op::Unmap, 1);
    rig.write(0, 5);
    rig.unplug(0, 4).unwrap();
    assert_eq!(
        (rig.is_mapped(0), rig.word(0)),
        (true, 5),
        "what cannot be unmapped keeps its pages"
    );
    drop(dma);
    assert_eq!(rig.fake.mapped_bytes(), 0);
}

#[test]
fn a_first_function_for_which_not_all_can_be_mapped_leaves_nothing() {
    let rig = Rig::new();
    rig.plug(0, 16).unwrap();
    rig.fake.fail(Op::Map, 4);
    assert!(rig.map().is_err());
    assert_eq!(rig.fake.mapped_bytes(), 0);
    assert_eq!(rig.pluggable.unmapped_below(REGION), [], "there is no function");
    rig.unplug(0, 16).unwrap();
    rig.map().map(drop).unwrap();
}

#[test]
fn what_is_unplugged_of_a_chunk_goes_back_when_that_is_not_mapped_any_more() {
    let rig = Rig::new();
    rig.plug(0, 4).unwrap();
    let dma = rig.map().unwrap();
    (0..4).for_each(|block| rig.write(block, 7));
    rig.unplug(1, 2).unwrap();
    assert_eq!([0, 1, 2, 3].map(|block| rig.word(block)), [7; 4], "the chunk is mapped");
    drop(dma);
    assert_eq!([0, 1, 2, 3].map(|block| rig.word(block)), [7, 0, 0, 7]);
}

#[test]
fn what_is_mapped_beyond_what_is_wanted_goes_back() {
    let rig = Rig::new();
    let dma = rig.map().unwrap();
    while rig.pluggable.map_next(REGION).unwrap() {}
    rig.plug(8, 1).unwrap();
    rig.write(15, 9);
    assert!(rig.pluggable.has_beyond(CHUNK.get()) && !rig.pluggable.has_beyond(REGION));
    rig.pluggable.trim(CHUNK.get());
    let mapped: Vec<_> = (0..16).step_by(4).map(|block| rig.is_mapped(block)).collect();
    assert_eq!((mapped, rig.word(15)), (vec![true, false, true, false], 0));
    assert!(!rig.pluggable.has_beyond(CHUNK.get()), "what is plugged stays");
    drop(dma);
}

#[test]
fn one_request_waits_for_a_few_chunks_alone() {
    let ram = Ram::allocate(MemorySize {
        boot: ByteSize(BOOT),
        hotplug: ByteSize(10 * CHUNK.get()),
        hotplug_region: ByteSize(0),
    });
    let rig = Rig::of(ram.unwrap());
    let dma = rig.map().unwrap();
    for mapped in [4, 8] {
        assert!(rig.plug(0, 40).unwrap_err().to_string().contains("first"));
        assert_eq!(rig.pluggable.mapped_from_start(), mapped * CHUNK.get());
    }
    rig.plug(0, 40).unwrap();
    drop(dma);
    assert_eq!(rig.fake.mapped_bytes(), 0);
}

/// Whatever comes in whatever order, and whatever the host refuses: I1 and I2 of the design, and nothing is left at the end.
#[test]
fn what_is_owned_is_mapped_whatever_happens() {
    let mut plugged_beside_functions = 0;
    for seed in 0..40 {
        let (rig, mut random) = (Rig::new(), Random(seed));
        let mut owned: BTreeSet<u64> = BTreeSet::new();
        let mut dma = None;
        for step in 0..40 {
            if random.below(4) == 0 {
                let what = if random.below(3) == 0 { Op::Unmap } else { Op::Map };
                rig.fake.fail(what, 1 + random.below(3));
            }
            let (first, blocks) = (random.below(12), 1 + random.below(4));
            let run: BTreeSet<u64> = (first..first + blocks).collect();
            match random.below(6) {
                0 if dma.is_none() => dma = rig.map().ok(),
                0 => dma = None,
                1 if random.below(2) == 0 => rig.pluggable.trim(random.below(REGION)),
                1 => drop(rig.pluggable.map_next(random.below(REGION))),
                2 if run.is_subset(&owned) => {
                    rig.unplug(first, blocks).unwrap();
                    owned.retain(|block| !run.contains(block));
                }
                _ if run.is_disjoint(&owned) && rig.plug(first, blocks).is_ok() => {
                    owned.extend(&run);
                    run.iter().for_each(|block| rig.write(*block, seed + block + 1));
                    plugged_beside_functions += u64::from(dma.is_some());
                }
                _ => (),
            }
            for block in &owned {
                assert_eq!(
                    rig.word(*block),
                    seed + block + 1,
                    "seed {seed}, step {step}: block {block} was discarded"
                );
                assert!(
                    dma.is_none() || rig.is_mapped(*block),
                    "seed {seed}, step {step}: block {block} is the guest's and not mapped"
                );
            }
        }
        rig.fake.fail(Op::Unmap, u64::MAX);
        drop(dma);
    }
    assert!(plugged_beside_functions > 40, "{plugged_beside_functions}");
}
