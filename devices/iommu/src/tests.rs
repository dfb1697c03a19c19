//! The device behind the real transport, with functions whose address spaces are maps of intervals.

mod orders;
mod requests;
mod threads;

use std::sync::Arc;

use ::device::{DeviceContext, DmaMemory, DmaSpace, EndpointDma, Endpoints, IommuModule, SpaceAlarm};
use base::ByteSize;
use memory::Ram;
use observe::Registry;
use vfio::AddressSpace;
use vfio::fake::FakeSpace;
use virtio::VirtioDevice;
use virtio::conformance::driver::Driver;
use virtio::conformance::{Request, Subject, run};
use vmm_api::DeviceSpec;
use vmm_api::devices::IommuConfig;

use crate::MODULE;
use crate::protocol::{PROBE_SIZE, REQUESTS, TAIL};
use crate::saved::IommuState;

const PAGE: u64 = 4096;

/// Addresses that a function uses in these tests begin here.
const IOVA: u64 = 0x8000_0000;

fn made(endpoints: &Endpoints, registry: &Registry) -> Box<dyn VirtioDevice> {
    let spec = DeviceSpec::new("iommu", &IommuConfig {}).unwrap();
    let context = DeviceContext {
        id: "iommu",
        metrics: registry,
        no_space: &SpaceAlarm::new().unwrap(),
    };
    MODULE.create(&spec, &context, endpoints.clone()).unwrap()
}

/// A function behind it.
struct Function {
    fake: Arc<FakeSpace>,
    // Open as long as this is there.
    dma: Option<Arc<EndpointDma>>,
}

fn function(endpoints: &Endpoints, id: u32, ram: &Ram) -> Function {
    let fake = Arc::new(FakeSpace::new());
    let space = DmaSpace::new(Arc::clone(&fake) as Arc<dyn AddressSpace>);
    let dma = EndpointDma::new(space, &DmaMemory::of(ram)).unwrap();
    endpoints.insert(id, &dma);
    Function { fake, dma: Some(dma) }
}

fn ram() -> Ram {
    Ram::allocate(ByteSize::mib(64)).unwrap()
}

/// A driver of the device.
struct Guest {
    driver: Driver,
    endpoints: Endpoints,
    registry: Registry,
}

impl Guest {
    fn new() -> Self {
        let (endpoints, registry) = (Endpoints::default(), Registry::new());
        let mut driver = Driver::new(made(&endpoints, &registry)).with_queue_size(16);
        driver.start();
        Self {
            driver,
            endpoints,
            registry,
        }
    }

    /// The status of a request, whose parts follow its type.
    fn ask(&mut self, kind: u8, parts: &[&[u8]]) -> u8 {
        let request = [&[kind, 0, 0, 0], &parts.concat()[..]].concat();
        let pushed = self.driver.push(REQUESTS, &[&request], &[TAIL]);
        self.driver.kick(REQUESTS);
        let used = self.driver.wait_used(REQUESTS).expect("an answer");
        assert_eq!(used.written as usize, TAIL);
        self.driver.bytes(pushed.writable[0])[0]
    }

    fn attach(&mut self, domain: u32, endpoint: u32) -> u8 {
        self.ask(1, &[&domain.to_le_bytes(), &endpoint.to_le_bytes(), &[0; 8]])
    }

    fn detach(&mut self, domain: u32, endpoint: u32) -> u8 {
        self.ask(2, &[&domain.to_le_bytes(), &endpoint.to_le_bytes(), &[0; 8]])
    }

    fn map(&mut self, domain: u32, iova: u64, pages: u64, guest: u64, flags: u32) -> u8 {
        let end = iova.wrapping_add(pages * PAGE).wrapping_sub(1);
        self.ask(
            3,
            &[
                &domain.to_le_bytes(),
                &iova.to_le_bytes(),
                &end.to_le_bytes(),
                &guest.to_le_bytes(),
                &flags.to_le_bytes(),
            ],
        )
    }

    fn unmap(&mut self, domain: u32, iova: u64, pages: u64) -> u8 {
        let end = iova.wrapping_add(pages * PAGE).wrapping_sub(1);
        self.ask(
            4,
            &[&domain.to_le_bytes(), &iova.to_le_bytes(), &end.to_le_bytes(), &[0; 4]],
        )
    }

    fn counted(&self, name: &str) -> u64 {
        let samples = self.registry.samples();
        samples
            .iter()
            .filter(|sample| sample.name == name)
            .map(|sample| sample.value)
            .sum()
    }
}

#[test]
fn it_conforms() {
    let request = Request {
        queue: REQUESTS,
        readable: std::iter::once(5).chain([0; 71]).collect(),
        writable: PROBE_SIZE + TAIL,
    };
    let make = || made(&Endpoints::default(), &Registry::new());
    run(&Subject::new(make, request)).unwrap();
}

#[test]
fn the_state_is_what_the_golden_file_says() {
    state::golden::check(env!("CARGO_MANIFEST_DIR"), &IommuState::here());
}
