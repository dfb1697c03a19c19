//! One function's memory, with an address space without an IOMMU.

use base::ByteSize;
use memory::layout::Range;
use memory::{Image, Layers, Ram};
use vfio::AddressSpace;
use vfio::fake::{FakeSpace, Op};
use vm_memory::{Bytes, GuestAddress};

use super::*;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

fn range(start: u64, length: u64) -> Range {
    Range { start, length }
}

fn endpoint(ram: &Ram) -> (Arc<FakeSpace>, Arc<EndpointDma>) {
    let fake = Arc::new(FakeSpace::new());
    let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
    (fake, EndpointDma::new(space, &DmaMemory::of(ram)).unwrap())
}

#[test]
fn it_reaches_what_was_mapped_where_it_was_and_nothing_else() {
    let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
    let (fake, endpoint) = endpoint(&ram);
    assert_eq!(fake.mapped(), [], "nothing at first");
    endpoint
        .map(0xff00_0000, range(8 * MIB, 2 * PAGE), DmaAccess::ReadWrite)
        .unwrap();
    endpoint.map(0, range(16 * MIB, PAGE), DmaAccess::Read).unwrap();
    let base = ram.regions()[0].as_ptr() as u64;
    assert_eq!(fake.translate(0xff00_0000, 2 * PAGE), Ok(base + 8 * MIB));
    assert_eq!(fake.translate(0, PAGE), Ok(base + 16 * MIB));
    assert_eq!(fake.access(0), Some(DmaAccess::Read));
    assert_eq!(fake.access(0xff00_0000), Some(DmaAccess::ReadWrite));
    assert!(fake.translate(8 * MIB, PAGE).is_err(), "its own address is not mapped");
    assert_eq!((endpoint.mapped(), ram.pins().is_pinned()), (3 * PAGE, true));
    endpoint.unmap(0).unwrap();
    endpoint.unmap(PAGE).unwrap();
    assert_eq!((endpoint.mapped(), ram.pins().is_pinned()), (2 * PAGE, true));
    endpoint.unmap_all().unwrap();
    assert_eq!(
        (endpoint.mapped(), fake.mapped_bytes(), ram.pins().is_pinned()),
        (0, 0, false)
    );
}

#[test]
fn with_the_last_of_it_all_is_unmapped() {
    let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
    let (fake, endpoint) = endpoint(&ram);
    for number in 0..5 {
        endpoint
            .map(number * 2 * PAGE, range(0, PAGE), DmaAccess::ReadWrite)
            .unwrap();
    }
    let endpoints = Endpoints::default();
    endpoints.insert(40, &endpoint);
    assert_eq!((endpoints.mapped(), endpoints.map_counts().calls), (5 * PAGE, 5));
    assert!(endpoints.find(40).is_some() && endpoints.find(41).is_none());
    drop(endpoint);
    assert_eq!((fake.mapped_bytes(), ram.pins().is_pinned()), (0, false));
    assert!(endpoints.find(40).is_none() && endpoints.mapped() == 0);
}

#[test]
fn pages_stay_until_they_are_unmapped_however_that_comes() {
    let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
    let pins = ram.pins().clone();
    let pinned = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&pinned);
    let fake = Arc::new(FakeSpace::new().with_before(move |op| {
        if op == Op::Unmap {
            seen.lock().unwrap().push(pins.is_pinned());
        }
    }));
    let made = || {
        let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
        EndpointDma::new(space, &DmaMemory::of(&ram)).unwrap()
    };
    let endpoint = made();
    endpoint.map(0, range(0, PAGE), DmaAccess::ReadWrite).unwrap();
    endpoint.unmap(0).unwrap();
    endpoint.map(0, range(0, PAGE), DmaAccess::ReadWrite).unwrap();
    endpoint.map(2 * PAGE, range(0, PAGE), DmaAccess::ReadWrite).unwrap();
    drop(endpoint);
    assert_eq!(
        (&pinned.lock().unwrap()[..], ram.pins().is_pinned()),
        (&[true; 3][..], false)
    );
}

#[test]
fn a_function_has_so_many_pieces_at_a_time_and_no_more() {
    let ram = Ram::allocate(ByteSize::mib(512)).unwrap();
    let fake = Arc::new(FakeSpace::new().with_limit(u32::MAX));
    let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
    let endpoint = EndpointDma::new(space, &DmaMemory::of(&ram)).unwrap();
    let map = |number: usize| endpoint.map(number as u64 * 2 * PAGE, range(0, PAGE), DmaAccess::ReadWrite);
    (0..MAX_MAPPINGS).for_each(|number| map(number).unwrap());
    assert!(matches!(map(MAX_MAPPINGS), Err(EndpointError::Full)));
    endpoint.unmap(0).unwrap();
    map(MAX_MAPPINGS).unwrap();
    assert!(matches!(map(0), Err(EndpointError::Full)));
    // What the host refuses is not counted, nor what it does not unmap twice.
    endpoint.unmap(2 * PAGE).unwrap();
    fake.fail(Op::Map, 1);
    assert!(matches!(map(0), Err(EndpointError::Host(_))));
    fake.fail(Op::Unmap, 1);
    assert!(endpoint.unmap(4 * PAGE).is_err());
    map(0).unwrap();
    assert!(matches!(map(1), Err(EndpointError::Full)));
}

#[test]
fn what_is_no_memory_is_not_mapped() {
    // Above 3 GiB there is a hole up to 4 GiB, and what can be plugged is not the guest's yet.
    let size = memory::layout::MemorySize::from(ByteSize::mib(64)).with_hotplug(ByteSize::mib(256));
    let ram = Ram::allocate(size).unwrap();
    let hotplug = ram.hotplug().unwrap().start;
    let (fake, endpoint) = endpoint(&ram);
    for (start, length) in [
        (64 * MIB, PAGE),
        (64 * MIB - PAGE, 2 * PAGE),
        (0xfee0_0000, PAGE),
        (hotplug, PAGE),
        (u64::MAX - PAGE + 1, PAGE),
        (0, u64::MAX - PAGE + 1),
    ] {
        let refused = endpoint.map(0, range(start, length), DmaAccess::ReadWrite);
        assert!(matches!(refused, Err(EndpointError::NotMemory { .. })), "{start:#x}");
    }
    assert_eq!((fake.count(Op::Map), ram.pins().is_pinned()), (0, false));
}

#[test]
fn a_range_of_two_regions_is_mapped_whole_or_not_at_all() {
    use vm_memory::{GuestRegionMmap, MmapRegion};
    let region = |start| {
        let mapping = MmapRegion::new(4 << 20).unwrap();
        Arc::new(GuestRegionMmap::new(mapping, GuestAddress(start)).unwrap())
    };
    let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
    let fake = Arc::new(FakeSpace::new());
    let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
    let memory = DmaMemory {
        regions: vec![region(0), region(4 * MIB)],
        ..DmaMemory::of(&ram)
    };
    let endpoint = EndpointDma::new(space, &memory).unwrap();
    let across = range(4 * MIB - PAGE, 2 * PAGE);
    fake.fail(Op::Map, 2);
    let refused = endpoint.map(0, across, DmaAccess::ReadWrite);
    assert!(matches!(refused, Err(EndpointError::Host(_))), "{refused:?}");
    assert_eq!(
        (fake.mapped_bytes(), fake.count(Op::Unmap), endpoint.mapped()),
        (0, 1, 0)
    );
    assert!(!ram.pins().is_pinned());
    endpoint.map(0, across, DmaAccess::ReadWrite).unwrap();
    assert_eq!(fake.mapped().len(), 2);
    endpoint.unmap(0).unwrap();
    assert_eq!(fake.mapped(), []);
}

#[test]
fn what_the_host_does_not_unmap_stays_and_can_be_tried_again() {
    let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
    let (fake, endpoint) = endpoint(&ram);
    endpoint.map(0, range(0, PAGE), DmaAccess::ReadWrite).unwrap();
    fake.fail(Op::Unmap, 1);
    assert!(endpoint.unmap(0).is_err());
    assert_eq!((endpoint.mapped(), ram.pins().is_pinned()), (PAGE, true));
    endpoint.unmap(0).unwrap();
    assert_eq!((endpoint.mapped(), ram.pins().is_pinned()), (0, false));
    // And in the end it is kept.
    endpoint.map(0, range(0, PAGE), DmaAccess::ReadWrite).unwrap();
    fake.fail(Op::Unmap, 1);
    drop(endpoint);
    assert_eq!((fake.mapped_bytes(), ram.pins().is_pinned()), (PAGE, true));
}

#[test]
fn a_guest_pins_no_more_than_it_has() {
    let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
    let (fake, endpoint) = endpoint(&ram);
    endpoint.map(0, range(0, 64 * MIB), DmaAccess::ReadWrite).unwrap();
    let more = endpoint.map(1 << 32, range(0, PAGE), DmaAccess::ReadWrite);
    assert!(matches!(more, Err(EndpointError::Full)), "{more:?}");
    endpoint.unmap(0).unwrap();
    endpoint.map(1 << 32, range(0, PAGE), DmaAccess::ReadWrite).unwrap();
    assert_eq!(fake.mapped_bytes(), PAGE);
}

#[test]
fn of_a_clones_memory_only_what_is_mapped_becomes_its_own() {
    let file = tempfile::tempfile().unwrap();
    let ram = Ram::allocate(ByteSize::mib(64)).unwrap();
    ram.guest().write_slice(&vec![7; 32 << 20], GuestAddress(0)).unwrap();
    let image: Image = ram.write_image(&file, None).unwrap();
    let copy = Ram::from_layers(Layers::single(Arc::new(file), image), ByteSize::mib(64)).unwrap();
    let (_fake, endpoint) = endpoint(&copy);
    let before = own_bytes(&copy);
    // A read alone makes them its own, too: the guest may write to them while a function reads.
    endpoint.map(0, range(8 * MIB, 16 * PAGE), DmaAccess::Read).unwrap();
    let own = own_bytes(&copy) - before;
    assert_eq!(own, 16 * PAGE);
    assert_eq!(copy.guest().read_obj::<u8>(GuestAddress(8 * MIB)).unwrap(), 7);
}

/// How much of the first region is memory of this process's own (proc_pid_pagemap(5): present, and neither a file's page nor shared).
fn own_bytes(ram: &Ram) -> u64 {
    use std::os::unix::fs::FileExt;
    let region = &ram.regions()[0];
    let first = region.as_ptr() as u64 / PAGE;
    let mut words = vec![0; usize::try_from(region.len() / PAGE * 8).unwrap()];
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut words, first * 8).unwrap();
    let own = |word: &[u8; 8]| u64::from_le_bytes(*word) >> 61 & 0b101 == 0b100;
    words.as_chunks::<8>().0.iter().filter(|word| own(word)).count() as u64 * PAGE
}

#[test]
fn what_no_function_can_use_is_told_but_for_interrupts() {
    let all = 0..=u64::MAX;
    assert_eq!(gaps(std::slice::from_ref(&all)), []);
    let intel = [0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff];
    assert_eq!(gaps(&intel), [0x80_0000_0000..=u64::MAX]);
    let amd = [0x1000..=0x79ff_ffff, 0x7b00_0000..=0xfc_ffff_ffff];
    assert_eq!(
        gaps(&amd),
        [0..=0xfff, 0x7a00_0000..=0x7aff_ffff, 0xfd_0000_0000..=u64::MAX]
    );
    assert_eq!(gaps(&[]), [0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX]);
}
