//! Which thread does what, and for how long, with a host that takes its time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use vfio::fake::Op;

use super::*;
use crate::domains::Domains;
use crate::metrics::Metrics;
use crate::protocol::{Request, Virt};
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

/// A vCPU's thread may not, and asks this when its guest resets the device, whoever closes a function meanwhile.
#[test]
fn who_asks_whether_functions_are_attached_never_unmaps_anything() {
    let (endpoints, ram) = (Endpoints::default(), ram());
    let metrics = Arc::new(Metrics::new(&Registry::new(), "iommu"));
    let mut domains = Domains::new(endpoints.clone(), metrics);
    let by_who_asks = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&by_who_asks);
    let fake = Arc::new(FakeSpace::new().with_before(move |op| {
        let asks = std::thread::current().name() == Some("asks");
        seen.fetch_or(op == Op::Unmap && asks, Ordering::SeqCst);
    }));
    for _ in 0..1000 {
        let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
        let dma = EndpointDma::new(space, &DmaMemory::of(&ram)).unwrap();
        endpoints.insert(40, &dma);
        let (domain, endpoint, flags, reserved) = (1, 40, 0, false);
        let attach = Request::Attach {
            domain,
            endpoint,
            flags,
            reserved,
        };
        let map = Request::Map {
            domain,
            virt: Virt {
                start: IOVA,
                end: IOVA + PAGE - 1,
            },
            phys_start: 0,
            flags: 1,
        };
        assert_eq!((domains.serve(attach), domains.serve(map)), (Ok(()), Ok(())));
        let has_begun = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let ask = || {
                while !domains.is_empty() {
                    has_begun.store(true, Ordering::SeqCst);
                }
            };
            let asks = base::thread::spawn_scoped(scope, "asks", 64 << 10, ask).unwrap();
            while !has_begun.load(Ordering::SeqCst) {
                std::hint::spin_loop();
            }
            drop(dma);
            asks.join().unwrap();
        });
    }
    assert!(!by_who_asks.load(Ordering::SeqCst));
    assert_eq!((fake.count(Op::Unmap), fake.mapped_bytes()), (1000, 0));
}
