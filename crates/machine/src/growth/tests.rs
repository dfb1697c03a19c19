//! What is asked of a guest that has functions, and that has none, with an address space without an IOMMU.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use base::ByteSize;
use device::{DmaMemory, DmaSpace, GuestDma};
use memory::Ram;
use memory::layout::MemorySize;
use vfio::AddressSpace;
use vfio::fake::{FakeSpace, Op};

use super::*;
use crate::map_thread::RETRY;

const MIB: u64 = 1 << 20;
const REGION: u64 = 512 * MIB;

/// A device whose guest plugs nothing.
struct Asked {
    requested: Mutex<Vec<u64>>,
    fake: Arc<FakeSpace>,
    paced: bool,
}

impl ResizeMemory for Asked {
    fn sizes(&self) -> PluggableSizes {
        PluggableSizes {
            region: REGION,
            block: 2 * MIB,
            requested: self.requested.lock().unwrap().last().copied().unwrap_or(0),
            plugged: 0,
        }
    }

    fn check(&self, bytes: u64) -> Result<(), CreateError> {
        match bytes <= REGION {
            true => Ok(()),
            false => Err(CreateError::Value("too much".into())),
        }
    }

    fn request(&self, bytes: u64) -> Result<(), CreateError> {
        self.check(bytes)?;
        // The boot memory is mapped, and all that is asked for.
        let mapped = self.fake.mapped_bytes().saturating_sub(128 * MIB);
        assert!(
            !self.paced || mapped >= bytes,
            "{bytes:#x} are asked for, {mapped:#x} mapped"
        );
        self.requested.lock().unwrap().push(bytes);
        Ok(())
    }
}

struct Rig {
    asked: Arc<Asked>,
    fake: Arc<FakeSpace>,
    growth: Growth,
    ram: Ram,
}

impl Rig {
    fn new(paced: bool) -> Self {
        let ram = Ram::allocate(MemorySize {
            boot: ByteSize::mib(128),
            hotplug: ByteSize(REGION),
            hotplug_region: ByteSize(0),
        })
        .unwrap();
        let fake = Arc::new(FakeSpace::new());
        let asked = Arc::new(Asked {
            requested: Mutex::default(),
            fake: Arc::clone(&fake),
            paced,
        });
        let pluggable = Pluggable {
            resize: Arc::clone(&asked) as Arc<dyn ResizeMemory>,
            dma: PluggableDma::new(ram.hotplug().unwrap()),
        };
        Self {
            asked,
            fake,
            growth: Growth::new(pluggable, 2),
            ram,
        }
    }

    fn map(&mut self) -> Arc<GuestDma> {
        self.growth.pace();
        let space = DmaSpace::new(Arc::clone(&self.fake) as Arc<dyn AddressSpace>);
        let memory = DmaMemory::of(&self.ram).with_pluggable(&self.ram, self.growth.dma().clone());
        let dma = space.map(&memory).unwrap();
        self.growth.go_on().unwrap();
        dma
    }

    fn requested(&self) -> Vec<u64> {
        self.asked.requested.lock().unwrap().clone()
    }

    fn comes_to(&self, bytes: u64) {
        let begun = Instant::now();
        while self.asked.sizes().requested != bytes {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", self.requested());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn without_functions_all_is_asked_for_at_once() {
    let mut rig = Rig::new(false);
    rig.growth.request(300 * MIB).unwrap();
    rig.growth.request(4 * MIB).unwrap();
    assert_eq!(rig.requested(), [300 * MIB, 4 * MIB]);
    assert!(rig.growth.request(REGION + 1).is_err());
    assert_eq!(rig.growth.info().target, 4 * MIB);
}

#[test]
fn with_functions_nothing_is_asked_for_that_is_not_mapped() {
    let mut rig = Rig::new(true);
    let dma = rig.map();
    rig.growth.request(300 * MIB).unwrap();
    rig.comes_to(300 * MIB);
    assert_eq!(rig.requested(), [128 * MIB, 256 * MIB, 300 * MIB]);
    rig.growth.request(REGION).unwrap();
    rig.comes_to(REGION);
    rig.growth.request(128 * MIB).unwrap();
    assert_eq!(rig.requested().last(), Some(&(128 * MIB)), "less is asked for at once");
    let begun = Instant::now();
    while rig.fake.mapped_bytes() > 256 * MIB {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "what nobody has plugged stays mapped"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    rig.growth.free();
    drop(dma);
    assert_eq!(rig.fake.mapped_bytes(), 0);
}

#[test]
fn what_was_to_be_before_the_first_function_came_is_mapped_ahead_too() {
    let mut rig = Rig::new(true);
    rig.growth.pace();
    rig.growth.request(256 * MIB).unwrap();
    assert!(
        rig.requested().is_empty() && rig.growth.info().error.is_none(),
        "nothing can be mapped yet"
    );
    let dma = rig.map();
    rig.comes_to(256 * MIB);
    assert_eq!(rig.fake.mapped_bytes(), 384 * MIB);
    rig.growth.free();
    drop(dma);
}

#[test]
fn a_guest_that_boots_is_asked_for_nothing_meanwhile() {
    let mut rig = Rig::new(true);
    rig.growth.map_ahead(REGION).unwrap();
    assert!(rig.growth.map_ahead(REGION + 1).is_err());
    let dma = rig.map();
    let begun = Instant::now();
    while rig.fake.mapped_bytes() < 128 * MIB + REGION {
        assert!(begun.elapsed() < Duration::from_secs(60), "it is not mapped");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((rig.requested().len(), rig.growth.info().target), (0, 0));
    rig.growth.request(300 * MIB).unwrap();
    rig.comes_to(300 * MIB);
    assert_eq!(rig.requested().len(), 1, "all of it is mapped");
    rig.growth.free();
    drop(dma);
}

#[test]
fn what_the_host_refuses_is_told_and_tried_again() {
    let mut rig = Rig::new(true);
    let dma = rig.map();
    rig.fake.fail(Op::Map, 2);
    rig.growth.request(REGION).unwrap();
    rig.comes_to(128 * MIB);
    let begun = Instant::now();
    while rig.growth.info().error.is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60), "nobody is told");
        std::thread::sleep(Duration::from_millis(1));
    }
    rig.comes_to(REGION);
    let begun = Instant::now();
    while rig.growth.info().error.is_some() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the error stays");
        std::thread::sleep(Duration::from_millis(1));
    }
    rig.growth.free();
    drop(dma);
}

#[test]
fn what_the_kernel_does_not_unmap_is_tried_again_later() {
    let mut rig = Rig::new(true);
    let dma = rig.map();
    rig.growth.request(REGION).unwrap();
    rig.comes_to(REGION);
    rig.fake.fail(Op::Unmap, 1);
    rig.growth.request(256 * MIB).unwrap();
    let begun = Instant::now();
    while rig.growth.info().error.is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60), "nobody is told");
        std::thread::sleep(Duration::from_millis(1));
    }
    let tried = rig.fake.count(Op::Unmap);
    std::thread::sleep(RETRY.0 / 4);
    assert_eq!(rig.fake.count(Op::Unmap), tried, "it is tried without a rest");
    while rig.fake.mapped_bytes() > 384 * MIB {
        assert!(begun.elapsed() < Duration::from_secs(60), "it stays mapped");
        std::thread::sleep(Duration::from_millis(5));
    }
    rig.growth.free();
    drop(dma);
}

#[test]
fn with_the_last_function_all_is_asked_for() {
    let mut rig = Rig::new(false);
    let dma = rig.map();
    // It is never mapped.
    rig.fake.fail(Op::Map, 1);
    rig.growth.request(REGION).unwrap();
    rig.growth.free();
    drop(dma);
    assert_eq!(rig.asked.sizes().requested, REGION);
    assert_eq!(rig.growth.info().error, None);
    rig.growth.request(0).unwrap();
    assert_eq!(rig.asked.sizes().requested, 0);
}
