//! What each request is answered, and what it leaves behind.

use vfio::DmaAccess;
use vfio::fake::Op;

use super::*;

/// Statuses (5.13.6).
const OK: u8 = 0;
const UNSUPP: u8 = 2;
const DEVERR: u8 = 3;
const INVAL: u8 = 4;
const RANGE: u8 = 5;
const NOENT: u8 = 6;
const NOMEM: u8 = 8;

const READ: u32 = 1;
const WRITE: u32 = 2;

#[test]
fn its_driver_is_told_what_it_can_map() {
    let guest = Guest::new();
    // INPUT_RANGE, MAP_UNMAP and PROBE of its own features, and no bypass.
    assert_eq!(guest.driver.offered() & 0xff_ffff, 0b01_0101);
    assert_eq!(guest.driver.config(0, 8), PAGE);
    assert_eq!(
        (guest.driver.config(8, 8), guest.driver.config(16, 8)),
        (0, (1 << 39) - 1)
    );
    assert_eq!(
        (guest.driver.config(24, 8), guest.driver.config(32, 4)),
        (0xffff_ffff_0000_0000, 504)
    );
    assert_eq!(guest.driver.queue_count(), 2);
}

#[test]
fn a_function_reaches_what_is_mapped_in_its_domain() {
    let (mut guest, ram) = (Guest::new(), ram());
    let one = function(&guest.endpoints, 40, &ram);
    let other = function(&guest.endpoints, 48, &ram);
    assert_eq!(guest.map(1, IOVA, 1, 0, READ), NOENT, "no domain before a function");
    assert_eq!((guest.attach(1, 40), guest.attach(2, 48)), (OK, OK));
    assert_eq!(guest.map(1, IOVA, 2, 8 << 20, READ | WRITE), OK);
    assert_eq!(guest.map(1, IOVA + 2 * PAGE, 1, 4 << 20, READ), OK);
    let base = ram.regions()[0].as_ptr() as u64;
    assert_eq!(one.fake.translate(IOVA, 2 * PAGE), Ok(base + (8 << 20)));
    assert_eq!(one.fake.access(IOVA + 2 * PAGE), Some(DmaAccess::Read));
    assert_eq!(other.fake.mapped(), [], "it is in another domain");
    // It comes to a domain that has mappings, and leaves its own.
    assert_eq!(guest.attach(1, 48), OK);
    assert_eq!(other.fake.translate(IOVA, 2 * PAGE), Ok(base + (8 << 20)));
    assert_eq!(guest.map(2, IOVA, 1, 0, READ), NOENT, "its domain is gone");
    assert_eq!(guest.unmap(1, IOVA, 3), OK);
    assert_eq!((one.fake.mapped_bytes(), other.fake.mapped_bytes()), (0, 0));
    assert_eq!(guest.map(1, IOVA, 1, 0, WRITE), OK);
    assert_eq!(one.fake.access(IOVA), Some(DmaAccess::ReadWrite));
    assert_eq!((guest.detach(1, 40), one.fake.mapped_bytes()), (OK, 0));
    assert_eq!(other.fake.mapped_bytes(), PAGE);
    assert_eq!((guest.detach(1, 48), guest.detach(1, 48)), (OK, INVAL));
    assert_eq!(guest.map(1, IOVA, 1, 0, READ), NOENT);
}

#[test]
fn what_cannot_be_is_refused_and_changes_nothing() {
    let (mut guest, ram) = (Guest::new(), ram());
    let one = function(&guest.endpoints, 40, &ram);
    assert_eq!((guest.attach(1, 41), guest.detach(1, 41)), (NOENT, NOENT));
    let parts = [1_u32.to_le_bytes(), 40_u32.to_le_bytes()].concat();
    // Bypass; reserved bytes.
    assert_eq!(guest.ask(1, &[&parts, &[1, 0, 0, 0, 0, 0, 0, 0]]), INVAL);
    assert_eq!(guest.ask(1, &[&parts, &[0, 0, 0, 0, 0, 0, 0, 1]]), INVAL);
    assert_eq!(guest.ask(2, &[&parts, &[0, 0, 0, 0, 0, 0, 0, 1]]), INVAL);
    assert_eq!(guest.attach(1, 40), OK);
    assert_eq!(guest.map(1, IOVA, 4, 0, READ | WRITE), OK);
    let end_of_range = 1 << 39;
    for (iova, pages, phys, flags, status) in [
        (IOVA + 3 * PAGE, 2, 0, READ, INVAL),
        (IOVA - PAGE, 2, 0, READ, INVAL),
        (IOVA - PAGE, 9, 0, READ, INVAL),
        (0, 1, 0, 0, UNSUPP),
        // Registers of a function (5.13.6.5: with a feature that is not offered).
        (0, 1, 0, READ | 4, INVAL),
        (0, 1, 0, 8 | WRITE, INVAL),
        (1, 1, 0, READ, RANGE),
        (0, 1, 1, READ, RANGE),
        (0, 0, 0, READ, RANGE),
        (end_of_range - PAGE, 2, 0, READ, RANGE),
        (u64::MAX - PAGE + 1, 1, 0, READ, RANGE),
        (0xfedf_f000, 2, 0, READ, RANGE),
        (0xfee0_0000, 1, 0, READ, RANGE),
        (0, 1, 64 << 20, READ, INVAL),
        (0, 2, (64 << 20) - PAGE, READ, INVAL),
        (0, 1, 0xfee0_0000, READ, INVAL),
        (0, 1, u64::MAX - PAGE + 1, READ, INVAL),
        (0, (64 << 8) - 3, 0, READ, NOMEM),
    ] {
        assert_eq!(
            guest.map(1, iova, pages, phys, flags),
            status,
            "{pages} pages at {iova:#x} from {phys:#x}, {flags}"
        );
    }
    // A part of what is mapped, from either end and from within.
    for (iova, pages) in [(IOVA, 3), (IOVA + PAGE, 3), (IOVA + PAGE, 1), (IOVA - PAGE, 2)] {
        assert_eq!(guest.unmap(1, iova, pages), RANGE, "{pages} pages at {iova:#x}");
    }
    assert_eq!(guest.ask(4, &[&1_u32.to_le_bytes(), &[9; 8], &[8; 8], &[0; 4]]), RANGE);
    assert_eq!((guest.unmap(1, 0, 5), guest.unmap(7, IOVA, 4)), (OK, NOENT));
    assert_eq!(one.fake.mapped_bytes(), 4 * PAGE, "it is as it was");
    assert_eq!(one.fake.count(Op::Map), 1, "the host was asked for nothing");
    // All there is.
    assert_eq!(guest.ask(4, &[&1_u32.to_le_bytes(), &[0; 8], &[255; 8], &[0; 4]]), OK);
    assert_eq!(one.fake.mapped_bytes(), 0);
    assert!(guest.counted("iommu_refused_requests_total") > 20);
}

#[test]
fn what_the_host_refuses_is_told_and_undone() {
    let (mut guest, ram) = (Guest::new(), ram());
    let one = function(&guest.endpoints, 40, &ram);
    let other = function(&guest.endpoints, 48, &ram);
    assert_eq!((guest.attach(1, 40), guest.attach(1, 48)), (OK, OK));
    // Functions are asked in the order of their numbers.
    other.fake.fail(Op::Map, 1);
    assert_eq!(guest.map(1, IOVA, 1, 0, READ), NOMEM);
    assert_eq!((one.fake.mapped_bytes(), other.fake.mapped_bytes()), (0, 0));
    assert_eq!(guest.map(1, IOVA, 1, 0, READ), OK, "it can be tried again");
    assert_eq!(guest.detach(1, 48), OK);
    other.fake.fail(Op::Map, 1);
    assert_eq!((guest.attach(1, 48), other.fake.mapped_bytes()), (NOMEM, 0));
    assert_eq!(guest.detach(1, 48), INVAL, "it is attached nowhere");
    one.fake.fail(Op::Unmap, 1);
    assert_eq!((guest.unmap(1, IOVA, 1), one.fake.mapped_bytes()), (DEVERR, PAGE));
    assert_eq!((guest.unmap(1, IOVA, 1), one.fake.mapped_bytes()), (OK, 0));
}

#[test]
fn a_function_that_leaves_takes_its_mappings_along_and_another_has_none() {
    let (mut guest, ram) = (Guest::new(), ram());
    let mut one = function(&guest.endpoints, 40, &ram);
    assert_eq!((guest.attach(1, 40), guest.map(1, IOVA, 1, 0, READ)), (OK, OK));
    guest.endpoints.remove(40);
    assert_eq!(guest.unmap(1, 0, 1), OK, "its driver is taking leave");
    one.dma = None;
    assert_eq!((one.fake.mapped_bytes(), guest.unmap(1, IOVA, 1)), (0, NOENT));
    let next = function(&guest.endpoints, 40, &ram);
    assert_eq!(guest.map(1, IOVA, 1, 0, READ), NOENT);
    assert_eq!((guest.attach(1, 40), next.fake.mapped_bytes()), (OK, 0));
}

#[test]
fn another_function_of_its_number_is_not_taken_for_one_that_is_still_leaving() {
    let (mut guest, ram) = (Guest::new(), ram());
    let mut one = function(&guest.endpoints, 40, &ram);
    assert_eq!((guest.attach(1, 40), guest.map(1, IOVA, 1, 0, READ)), (OK, OK));
    guest.endpoints.remove(40);
    // A vCPU is still in an access to it.
    let next = function(&guest.endpoints, 40, &ram);
    assert_eq!(guest.detach(1, 40), INVAL, "it was never attached");
    assert_eq!(guest.attach(1, 40), OK);
    assert_eq!(guest.map(1, IOVA + PAGE, 1, 0, READ), OK);
    assert_eq!((one.fake.mapped_bytes(), next.fake.mapped_bytes()), (PAGE, PAGE));
    one.dma = None;
    assert_eq!((one.fake.mapped_bytes(), next.fake.mapped_bytes()), (0, PAGE));
    assert_eq!((guest.detach(1, 40), next.fake.mapped_bytes()), (OK, 0));
}

#[test]
fn a_reset_ends_all_mappings_and_a_pause_none() {
    let (mut guest, ram) = (Guest::new(), ram());
    let one = function(&guest.endpoints, 40, &ram);
    assert_eq!((guest.attach(1, 40), guest.map(1, IOVA, 1, 0, READ)), (OK, OK));
    guest.driver.device().pause();
    assert_eq!(one.fake.mapped_bytes(), PAGE);
    guest.driver.device().resume().unwrap();
    assert_eq!((guest.map(1, 0, 1, 0, READ), one.fake.mapped_bytes()), (OK, 2 * PAGE));
    guest.driver.reset();
    assert_eq!((one.fake.mapped_bytes(), ram.pins().is_pinned()), (0, false));
    guest.driver.start();
    assert_eq!((guest.map(1, IOVA, 1, 0, READ), guest.attach(1, 40)), (NOENT, OK));
}

#[test]
fn it_is_saved_without_functions_alone() {
    let (mut guest, ram) = (Guest::new(), ram());
    let mut one = function(&guest.endpoints, 40, &ram);
    assert_eq!(guest.attach(1, 40), OK);
    let next = made(&guest.endpoints, &Registry::new());
    let refused = guest.driver.migrate(next).unwrap_err().to_string();
    assert!(refused.contains("detach"), "{refused}");
    guest.driver.device().resume().unwrap();
    one.dma = None;
    let next = made(&guest.endpoints, &Registry::new());
    guest.driver.migrate(next).unwrap();
    let again = function(&guest.endpoints, 40, &ram);
    assert_eq!((guest.attach(1, 40), guest.map(1, IOVA, 1, 0, READ)), (OK, OK));
    assert_eq!(again.fake.mapped_bytes(), PAGE);
    let mut other = IommuState::here();
    other.input_end = 7;
    let saved = state::Saved::of(&other).unwrap();
    let refused = made(&guest.endpoints, &Registry::new()).restore(&saved);
    assert!(refused.unwrap_err().to_string().contains("input_end: 7"));
}

#[test]
fn a_probe_tells_what_must_not_be_mapped() {
    let (mut guest, ram) = (Guest::new(), ram());
    let ranges = vec![0x1000..=0xfedf_ffff, 0xfef0_0000..=(1 << 48) - 1];
    let fake = Arc::new(FakeSpace::new().with_ranges(ranges));
    let space = DmaSpace::new(fake as Arc<dyn AddressSpace>);
    let dma = EndpointDma::new(space, &DmaMemory::of(&ram)).unwrap();
    guest.endpoints.insert(40, &dma);
    let mut probe = |endpoint: u32, writable: usize| {
        let request = [&[5, 0, 0, 0], &endpoint.to_le_bytes()[..], &[0; 64]].concat();
        let pushed = guest.driver.push(REQUESTS, &[&request], &[writable]);
        guest.driver.kick(REQUESTS);
        let used = guest.driver.wait_used(REQUESTS).unwrap();
        (guest.driver.bytes(pushed.writable[0]), used.written as usize)
    };
    let (told, written) = probe(40, PROBE_SIZE + TAIL);
    assert_eq!((written, told[PROBE_SIZE]), (PROBE_SIZE + TAIL, OK));
    assert_eq!(told[..8], [1, 0, 20, 0, 1, 0, 0, 0], "interrupts first");
    assert_eq!(told[24..32], [1, 0, 20, 0, 0, 0, 0, 0]);
    assert_eq!(
        (&told[32..40], &told[40..48]),
        (&[0; 8][..], &0xfff_u64.to_le_bytes()[..])
    );
    assert_eq!(told[48..52], [0; 4], "what lies beyond the input range is not named");
    let (told, written) = probe(41, PROBE_SIZE + TAIL);
    assert_eq!((written, told[PROBE_SIZE]), (PROBE_SIZE + TAIL, NOENT));
    assert_eq!(probe(40, PROBE_SIZE + TAIL - 1).1, 0, "its status has no place");
    let mut guest = guest;
    assert_eq!((guest.attach(1, 40), guest.map(1, 0, 1, 0, READ)), (OK, RANGE));
}

#[test]
fn what_is_no_request_comes_back_untouched() {
    let mut guest = Guest::new();
    for (request, writable) in [
        (vec![9; 36], 4),
        (vec![0; 36], 4),
        (vec![3; 35], 4),
        (vec![1; 20], 3),
        (Vec::new(), 4),
    ] {
        let readable: &[&[u8]] = if request.is_empty() { &[] } else { &[&request] };
        let pushed = guest.driver.push(REQUESTS, readable, &[writable]);
        guest.driver.kick(REQUESTS);
        assert_eq!(guest.driver.wait_used(REQUESTS).unwrap().written, 0, "{request:?}");
        assert!(guest.driver.bytes(pushed.writable[0]).iter().all(|byte| *byte == 0));
    }
    assert_eq!(guest.counted("iommu_refused_chains_total"), 5);
}
