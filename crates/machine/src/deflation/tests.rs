//! A guest that takes back what it is asked to, at once, from the top of its balloon, with an address space without an IOMMU.

use std::sync::Mutex;
use std::time::Instant;

use base::ByteSize;
use device::{BalloonInfo, DmaMemory, GuestDma, GuestPages, MapTuning};
use memory::Ram;
use memory::layout::Range;
use vfio::AddressSpace;
use vfio::fake::{FakeSpace, Op};

use super::*;

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 512 * MIB;
const BOOT: u64 = 64 * MIB;

/// Each MiB that is in the balloon, the last on top.
struct Guest {
    pages: Mutex<Box<dyn device::FreePages>>,
    inside: Mutex<Vec<u64>>,
    asked: Mutex<Vec<u64>>,
    /// Of a request for more than before.
    takes: Mutex<Duration>,
}

impl Guest {
    fn comes_to(&self, bytes: u64) {
        let mut inside = self.inside.lock().unwrap();
        let mut pages = self.pages.lock().unwrap();
        while inside.len() as u64 * MIB > bytes {
            let range = [mib(*inside.last().unwrap())];
            if pages.deflate(&range).is_err() {
                return;
            }
            inside.pop();
        }
    }
}

fn mib(start: u64) -> Range {
    Range {
        start: start * MIB,
        length: MIB,
    }
}

impl ResizeBalloon for Guest {
    fn info(&self) -> BalloonInfo {
        BalloonInfo {
            target: self.asked.lock().unwrap().last().copied().unwrap_or(0),
            ..BalloonInfo::default()
        }
    }

    fn request(&self, bytes: u64) -> Result<(), CreateError> {
        let before = self.info().target;
        self.asked.lock().unwrap().push(bytes);
        self.comes_to(bytes);
        if bytes > before {
            std::thread::sleep(*self.takes.lock().unwrap());
        }
        Ok(())
    }
}

struct Rig {
    guest: Arc<Guest>,
    fake: Arc<FakeSpace>,
    deflation: Deflation,
    ram: Ram,
}

impl Rig {
    fn new(tuning: MapTuning, inflated_to: u64) -> Self {
        let ram = Ram::allocate(ByteSize(MEMORY)).unwrap();
        let dma = device::BalloonedDma::new(ByteSize(MEMORY).into(), tuning);
        let mut pages: Box<dyn device::FreePages> = Box::new(GuestPages {
            pins: ram.pins().clone(),
            pluggable: None,
            ballooned: Some(dma.clone()),
        });
        let inside: Vec<_> = (BOOT / MIB..inflated_to / MIB).rev().collect();
        inside.iter().for_each(|start| pages.inflated(&[mib(*start)]));
        let guest = Arc::new(Guest {
            pages: Mutex::new(pages),
            inside: Mutex::new(inside),
            asked: Mutex::new(vec![MEMORY - BOOT]),
            takes: Mutex::default(),
        });
        let ballooned = Ballooned {
            resize: Arc::clone(&guest) as Arc<dyn ResizeBalloon>,
            dma,
        };
        Self {
            guest,
            fake: Arc::new(FakeSpace::new()),
            deflation: Deflation::with_patience(ballooned, 2, Duration::from_millis(40)),
            ram,
        }
    }

    fn map(&mut self) -> Arc<GuestDma> {
        let space = DmaSpace::new(Arc::clone(&self.fake) as Arc<dyn AddressSpace>);
        self.deflation.filling().wait(&space);
        let memory = DmaMemory::of(&self.ram).with_ballooned(self.deflation.dma().clone());
        let dma = space.map(&memory).unwrap();
        self.deflation.go_on().unwrap();
        dma
    }

    fn comes_to(&self, inflated: u64) {
        self.waits("its size", |rig| rig.deflation.dma().inflated() == inflated);
    }

    fn waits(&self, what: &str, until: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !until(self) {
            let asked = self.guest.asked.lock().unwrap().clone();
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}: {asked:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn it_becomes_smaller_as_memory_is_mapped_and_the_guest_waits_for_nothing() {
    let mut rig = Rig::new(MapTuning::default(), MEMORY);
    let dma = rig.map();
    rig.comes_to(0);
    let info = rig.deflation.info();
    assert_eq!((info.counts.misses, info.counts.hits, info.fell_back), (0, 448, false));
    assert_eq!(
        rig.guest.asked.lock().unwrap()[..],
        [448, 320, 192, 64, 0].map(|mib| mib * MIB)
    );
    assert_eq!(rig.fake.mapped_bytes(), MEMORY);
    rig.deflation.free();
    drop(dma);
    assert_eq!(rig.fake.mapped_bytes(), 0);
}

#[test]
fn without_mapping_ahead_the_guest_waits_for_each_piece() {
    let tuning = MapTuning {
        merge: true,
        ahead: false,
    };
    let mut rig = Rig::new(tuning, MEMORY);
    let _dma = rig.map();
    rig.comes_to(0);
    let counts = rig.deflation.info().counts;
    assert_eq!(
        (counts.misses, counts.hits),
        (224, 224),
        "each 2 MiB are waited for once"
    );
}

#[test]
fn a_guest_that_fills_no_balloon_has_all_mapped_before() {
    let mut rig = Rig::new(MapTuning::default(), 128 * MIB);
    let _dma = rig.map();
    assert!(rig.deflation.info().fell_back);
    rig.comes_to(0);
    assert_eq!((rig.fake.mapped_bytes(), rig.guest.info().target), (MEMORY, 0));
}

#[test]
fn what_the_host_refuses_is_tried_again_and_the_guest_goes_on_with_less() {
    let mut rig = Rig::new(MapTuning::default(), MEMORY);
    // Boot memory, one piece, and then no more.
    rig.fake.fail(Op::Map, 3);
    let _dma = rig.map();
    rig.waits("an error", |rig| rig.deflation.info().error.is_some());
    assert!(
        rig.guest.info().target > 0,
        "it is asked to take back what is not mapped"
    );
    rig.comes_to(0);
    assert_eq!(
        (rig.deflation.info().error, rig.deflation.info().counts.misses),
        (None, 0)
    );
}

#[test]
fn another_size_is_come_to_by_what_is_mapped_and_with_the_last_function_at_once() {
    let mut rig = Rig::new(MapTuning::default(), MEMORY);
    rig.deflation.request(200 * MIB).unwrap();
    rig.comes_to(200 * MIB);
    let dma = rig.map();
    rig.deflation.request(100 * MIB).unwrap();
    rig.comes_to(100 * MIB);
    rig.deflation.free();
    drop(dma);
    rig.deflation.request(0).unwrap();
    rig.comes_to(0);
}

#[test]
fn with_a_first_function_that_does_not_come_the_guest_has_all_of_it() {
    let mut rig = Rig::new(MapTuning::default(), MEMORY);
    rig.deflation.free();
    assert_eq!(rig.deflation.dma().inflated(), MEMORY - BOOT, "none was to come");
    let space = DmaSpace::new(Arc::clone(&rig.fake) as Arc<dyn AddressSpace>);
    rig.deflation.filling().wait(&space);
    rig.fake.fail(Op::Map, 1);
    let memory = DmaMemory::of(&rig.ram).with_ballooned(rig.deflation.dma().clone());
    assert!(space.map(&memory).is_err());
    rig.deflation.free();
    rig.comes_to(0);
}

#[test]
fn a_larger_size_stays_whatever_is_being_mapped() {
    let mut rig = Rig::new(MapTuning::default(), MEMORY);
    let slow = |_| std::thread::sleep(Duration::from_millis(100));
    rig.fake = Arc::new(FakeSpace::new().with_before(slow));
    *rig.guest.takes.lock().unwrap() = Duration::from_millis(300);
    let _dma = rig.map();
    rig.waits("the first piece", |rig| rig.guest.info().target < MEMORY - BOOT);
    rig.deflation.request(400 * MIB).unwrap();
    rig.waits("the end", |rig| !rig.deflation.thread.state().running);
    assert_eq!(rig.guest.info().target, 400 * MIB);
}

#[test]
fn nothing_is_amiss_where_no_more_is_to_be_mapped() {
    let mut rig = Rig::new(MapTuning::default(), MEMORY);
    rig.fake.fail(Op::Map, 3);
    let _dma = rig.map();
    rig.waits("an error", |rig| rig.deflation.info().error.is_some());
    rig.deflation.request(MEMORY - BOOT).unwrap();
    rig.waits("the end", |rig| !rig.deflation.thread.state().running);
    assert_eq!(rig.deflation.info().error, None);
}
