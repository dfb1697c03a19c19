//! Pages that are put into a balloon and taken back with functions and without, in any order and by a guest that lies: what the guest owns is
//! mapped, and what fails leaves it so.

use std::collections::BTreeSet;

use base::ByteSize;
use memory::Ram;
use vfio::AddressSpace;
use vfio::fake::random::Random;
use vfio::fake::{FakeSpace, Op};

use super::*;
use crate::{DmaMemory, GuestDma};

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 256 * MIB;
const UNIT: u64 = 2 * MIB;

struct Rig {
    ram: Ram,
    fake: Arc<FakeSpace>,
    space: Arc<DmaSpace>,
    ballooned: BalloonedDma,
}

impl Rig {
    fn new(tuning: MapTuning) -> Self {
        let fake = Arc::new(FakeSpace::new());
        Self {
            ram: Ram::allocate(ByteSize(MEMORY)).unwrap(),
            space: DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>),
            fake,
            ballooned: BalloonedDma::new(ByteSize(MEMORY).into(), tuning),
        }
    }

    fn map(&self) -> Result<Arc<GuestDma>, crate::CreateError> {
        self.space
            .map(&DmaMemory::of(&self.ram).with_ballooned(self.ballooned.clone()))
    }

    fn is_mapped(&self, page: u64) -> bool {
        self.fake.translate(page * PAGE, PAGE).is_ok()
    }
}

fn mib(start: u64, length: u64) -> Range {
    Range {
        start: start * MIB,
        length: length * MIB,
    }
}

fn page(number: u64) -> Range {
    Range {
        start: number * PAGE,
        length: PAGE,
    }
}

/// As Linux does: from the top down, by 1 MiB.
fn inflate(rig: &Rig, from: u64, to: u64) {
    for start in (from..to).rev() {
        rig.ballooned.inflate(&[mib(start, 1)]);
    }
}

#[test]
fn what_is_in_the_balloon_is_not_mapped_and_all_else_is() {
    let rig = Rig::new(MapTuning::default());
    inflate(&rig, 64, 256);
    assert_eq!(rig.ballooned.inflated(), 192 * MIB);
    let dma = rig.map().unwrap();
    assert_eq!((rig.fake.mapped_bytes(), rig.fake.count(Op::Map)), (64 * MIB, 1));
    assert_eq!(rig.space.mapped(), 64 * MIB);
    // One page of a unit is enough.
    rig.ballooned.deflate(&[page(100 * MIB / PAGE)]).unwrap();
    assert_eq!(rig.fake.mapped_bytes(), 66 * MIB);
    rig.ballooned.deflate(&[mib(100, 2)]).unwrap();
    let counts = rig.ballooned.counts();
    assert_eq!((counts.hits, counts.misses, counts.messages), (1, 1, 194));
    drop(dma);
    assert_eq!((rig.fake.mapped_bytes(), rig.space.mapped()), (0, 0));
    rig.ballooned.deflate(&[mib(64, 192)]).unwrap();
    drop(rig.map().unwrap());
    assert_eq!(rig.ballooned.inflated(), 0);
}

#[test]
fn it_is_mapped_ahead_in_the_order_in_which_it_is_taken_back() {
    let rig = Rig::new(MapTuning::default());
    inflate(&rig, 64, 256);
    let _dma = rig.map().unwrap();
    assert_eq!(rig.ballooned.safe_size(), 192 * MIB);
    let pieces = rig.ballooned.next_ahead();
    assert_eq!(
        pieces
            .iter()
            .map(|piece| (piece.iova / MIB, piece.length / MIB))
            .collect::<Vec<_>>(),
        [(64, 64), (128, 64)]
    );
    rig.ballooned.map_ahead(&pieces, 2, &|| false).unwrap();
    assert_eq!(rig.ballooned.safe_size(), 64 * MIB);
    // The last that was put in comes first.
    rig.ballooned
        .deflate(&(64..192).map(|start| mib(start, 1)).collect::<Vec<_>>())
        .unwrap();
    assert_eq!((rig.ballooned.counts().hits, rig.ballooned.counts().misses), (1, 0));
    let pieces = rig.ballooned.next_ahead();
    rig.ballooned.map_ahead(&pieces, 0, &|| false).unwrap();
    assert_eq!((rig.ballooned.safe_size(), rig.fake.mapped_bytes()), (0, MEMORY));
    assert!(rig.ballooned.next_ahead().is_empty());
}

#[test]
fn without_merging_each_unit_is_mapped_by_itself() {
    let rig = Rig::new(MapTuning {
        merge: false,
        ahead: true,
    });
    let _dma = rig.map().unwrap();
    assert_eq!(rig.fake.count(Op::Map), MEMORY / UNIT);
}

#[test]
fn what_the_host_refuses_to_map_is_not_taken_back() {
    let rig = Rig::new(MapTuning::default());
    inflate(&rig, 64, 256);
    rig.fake.fail(Op::Map, 1);
    assert!(rig.map().is_err());
    assert_eq!((rig.fake.mapped_bytes(), rig.space.mapped()), (0, 0));
    let dma = rig.map().unwrap();
    rig.fake.fail(Op::Map, 1);
    assert!(rig.ballooned.deflate(&[mib(64, 1), mib(200, 1)]).is_err());
    assert_eq!(rig.ballooned.inflated(), 192 * MIB);
    rig.ballooned.deflate(&[mib(64, 1), mib(200, 1)]).unwrap();
    assert_eq!(
        (rig.ballooned.inflated(), rig.fake.mapped_bytes()),
        (190 * MIB, 68 * MIB)
    );
    // Ahead of the guest, nothing changes either.
    rig.fake.fail(Op::Map, 1);
    let pieces = rig.ballooned.next_ahead();
    assert!(rig.ballooned.map_ahead(&pieces, 0, &|| false).is_err());
    assert_eq!(rig.fake.mapped_bytes(), 68 * MIB);
    assert!(
        rig.ballooned.map_ahead(&pieces, 0, &|| true).is_err(),
        "nobody wants it"
    );
    drop(dma);
    assert_eq!(rig.fake.mapped_bytes(), 0);
}

#[test]
fn a_request_is_counted_once_however_often_it_comes() {
    let rig = Rig::new(MapTuning::default());
    inflate(&rig, 64, 256);
    let _dma = rig.map().unwrap();
    let counts = || (rig.ballooned.counts().hits, rig.ballooned.counts().misses);
    for _ in 0..3 {
        rig.fake.fail(Op::Map, 1);
        assert!(rig.ballooned.deflate(&[mib(64, 1)]).is_err());
    }
    assert_eq!(counts(), (0, 1));
    // It is mapped ahead meanwhile.
    rig.ballooned
        .map_ahead(&rig.ballooned.next_ahead(), 0, &|| false)
        .unwrap();
    rig.ballooned.deflate(&[mib(64, 1)]).unwrap();
    assert_eq!(counts(), (0, 1));
    rig.ballooned.deflate(&[mib(65, 1)]).unwrap();
    rig.fake.fail(Op::Map, 1);
    assert!(rig.ballooned.deflate(&[mib(255, 1)]).is_err());
    assert_eq!(counts(), (1, 2));
    // Another driver's is another.
    rig.ballooned.forget();
    rig.ballooned.deflate(&[mib(255, 1)]).unwrap();
    assert_eq!(counts(), (1, 3));
}

#[test]
fn a_driver_that_goes_without_a_word_leaves_all_to_the_next() {
    let rig = Rig::new(MapTuning::default());
    inflate(&rig, 64, 256);
    let _dma = rig.map().unwrap();
    assert!(rig.ballooned.forget());
    assert_eq!(rig.ballooned.inflated(), 0);
    assert!(rig.ballooned.settle().unwrap());
    assert_eq!(rig.fake.mapped_bytes(), MEMORY);
    assert!(!rig.ballooned.forget());
}

#[test]
fn what_is_left_is_mapped_by_parts_and_not_for_functions_that_go() {
    let memory = ByteSize(1 << 30);
    let rig = Rig {
        ram: Ram::allocate(memory).unwrap(),
        ballooned: BalloonedDma::new(memory.into(), MapTuning::default()),
        ..Rig::new(MapTuning::default())
    };
    inflate(&rig, 64, 1024);
    let dma = rig.map().unwrap();
    assert!(rig.ballooned.forget());
    assert!(!rig.ballooned.settle().unwrap());
    assert_eq!(rig.fake.mapped_bytes(), (64 << 20) + AT_ONCE);
    rig.space.stop();
    assert!(!rig.ballooned.forget() && rig.ballooned.settle().unwrap());
    assert_eq!(rig.fake.mapped_bytes(), (64 << 20) + AT_ONCE);
    drop(dma);
}

#[test]
fn a_guest_is_waited_for_as_long_as_it_goes_on() {
    let rig = Rig::new(MapTuning::default());
    let patience = Duration::from_millis(60);
    assert!(!rig.ballooned.await_inflated(64 * MIB, &rig.space, patience));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for start in 64..128 {
                std::thread::sleep(Duration::from_millis(2));
                rig.ballooned.inflate(&[mib(start, 1)]);
            }
        });
        // Longer in all than it may stand still.
        assert!(
            rig.ballooned
                .await_inflated(64 * MIB, &rig.space, Duration::from_secs(20))
        );
    });
    rig.space.stop();
    assert!(
        !rig.ballooned
            .await_inflated(MEMORY, &rig.space, Duration::from_secs(60))
    );
}

#[test]
fn units_are_as_large_as_a_container_has_mappings_for() {
    for (memory, unit) in [
        (MEMORY, UNIT),
        (64 << 30, UNIT),
        (350 << 30, 16 * MIB),
        (2 << 40, 64 * MIB),
    ] {
        let units = Units::of(&layout::ram(ByteSize(memory)));
        assert_eq!(units.size(), unit, "{memory:#x}");
    }
    // What ends in the middle of one, and what lies in the hole below 4 GiB.
    let mut units = Units::of(&layout::ram(ByteSize((5 << 30) + 4096)));
    units.put_in(&[mib(3 << 10, 1), mib(7 << 10, 1), page((6 << 30) / PAGE)]);
    assert_eq!(units.inflated(), 1);
    units.take_out(&[mib(6 << 10, 1)]);
    assert_eq!(units.inflated(), 0);
}

/// What a guest may name: any pages, in the memory and beyond it, several times.
fn named(random: &mut Random) -> Vec<Range> {
    let pages = MEMORY / PAGE;
    (0..1 + random.below(6))
        .map(|_| {
            let start = random.below(pages + 2000);
            Range {
                start: start * PAGE,
                length: (1 + random.below(3 * UNIT / PAGE)) * PAGE,
            }
        })
        .collect()
}

fn numbers(ranges: &[Range]) -> impl Iterator<Item = u64> {
    let each = |range: &Range| range.start / PAGE..(range.start + range.length) / PAGE;
    ranges.iter().flat_map(each).filter(|page| *page < MEMORY / PAGE)
}

#[test]
fn in_any_order_a_guest_owns_no_page_that_functions_do_not_reach() {
    let mut random = Random(21);
    for round in 0..4 {
        let tuning = MapTuning {
            merge: round % 2 == 0,
            ahead: true,
        };
        let rig = Rig::new(tuning);
        // By what the guest was answered.
        let mut inflated: BTreeSet<u64> = BTreeSet::new();
        let mut dma = None;
        for step in 0..120 {
            if random.below(6) == 0 {
                rig.fake.fail(Op::Map, 1 + random.below(3));
            }
            match random.below(8) {
                0..3 => {
                    let pages = named(&mut random);
                    rig.ballooned.inflate(&pages);
                    inflated.extend(numbers(&pages));
                }
                3..5 => {
                    let pages = named(&mut random);
                    if rig.ballooned.deflate(&pages).is_ok() {
                        inflated.retain(|page| {
                            !pages
                                .iter()
                                .any(|range| (range.start..range.start + range.length).contains(&(page * PAGE)))
                        });
                    }
                }
                5 => dma = dma.or_else(|| rig.map().ok()),
                6 => {
                    let pieces = rig.ballooned.next_ahead();
                    let _refused = rig.ballooned.map_ahead(&pieces, 0, &|| false);
                }
                _ if random.below(10) == 0 => dma = None,
                _ => (),
            }
            assert_eq!(
                rig.ballooned.inflated(),
                inflated.len() as u64 * PAGE,
                "round {round}, step {step}"
            );
            match &dma {
                None => assert_eq!(rig.fake.mapped_bytes(), 0),
                Some(_) => {
                    // All pages of a unit are mapped, or none: what the space here is asked for is whole units.
                    for unit in 0..MEMORY / UNIT {
                        let owned =
                            (unit * UNIT / PAGE..(unit + 1) * UNIT / PAGE).find(|page| !inflated.contains(page));
                        assert!(
                            owned.is_none_or(|page| rig.is_mapped(page)),
                            "round {round}, step {step}: {owned:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn without_functions_a_driver_waits_for_nothing_however_much_memory_there_is() {
    let ballooned = BalloonedDma::new(ByteSize(16 * AT_ONCE).into(), MapTuning::default());
    ballooned.inflate(&[mib(64, 64)]);
    assert!(!ballooned.forget() && ballooned.settle().unwrap());
}
