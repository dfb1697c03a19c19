//! Which thread does what, and for how long, with a host that takes its time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vfio::fake::Op;

use super::*;
use crate::worker::ROUND_BYTES;

#[test]
fn who_pauses_it_waits_for_one_large_request_and_not_for_all_there_are() {
    let mut guest = Guest::new();
    let ram = Ram::allocate(ByteSize(ROUND_BYTES)).unwrap();
    let has_begun = Arc::new(AtomicBool::new(false));
    let begun = Arc::clone(&has_begun);
    let slow = Arc::new(FakeSpace::new().with_before(move |op| {
        begun.store(true, Ordering::SeqCst);
        if op == Op::Map {
            std::thread::sleep(Duration::from_millis(200));
        }
    }));
    let space = DmaSpace::new(Arc::clone(&slow) as Arc<dyn AddressSpace>);
    let dma = EndpointDma::new(space, &DmaMemory::of(&ram)).unwrap();
    guest.endpoints.insert(40, &dma);
    assert_eq!(guest.attach(1, 40), 0);
    let (domain, start, end) = (
        1_u32.to_le_bytes(),
        0_u64.to_le_bytes(),
        (ROUND_BYTES - 1).to_le_bytes(),
    );
    let map = [&[3, 0, 0, 0], &domain[..], &start, &end, &[0; 8], &[1, 0, 0, 0]].concat();
    let unmap = [&[4, 0, 0, 0], &domain[..], &start, &end, &[0; 4]].concat();
    for _ in 0..4 {
        guest.driver.push(REQUESTS, &[&map], &[TAIL]);
        guest.driver.push(REQUESTS, &[&unmap], &[TAIL]);
    }
    guest.driver.kick(REQUESTS);
    let waits = Instant::now();
    while !has_begun.load(Ordering::SeqCst) {
        assert!(waits.elapsed() < Duration::from_secs(60), "it maps nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
    guest.driver.device().pause();
    let mapped = slow.count(Op::Map);
    assert!(mapped < 4, "it was stopped when it had done all");
    guest.driver.device().resume().unwrap();
    for _ in 0..8 {
        assert!(guest.driver.wait_used(REQUESTS).is_some(), "what is left is done then");
    }
    assert_eq!((slow.count(Op::Map), slow.mapped_bytes()), (4, 0));
}
